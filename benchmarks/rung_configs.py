"""Time configurations of rungs on one GPU next to PyTorch, for products that `gemmery bench` has no suite of.

    python benchmarks/rung_configs.py batched gemv factors --seconds 60

Each contestant is a CUDA graph of calls with operands of its own that together are three times the L2 cache. They are
checked against PyTorch in float64, then take turns; the median of a call is printed, and its ratio to the first.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

import gemmery as gm
from gemmery import tiers
from gemmery.arrays import View
from gemmery.cuda.choose.data import SIMT_PIPELINED
from gemmery.cuda.geometry import Scaling
from gemmery.errors import GemmeryError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem

TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
TOLERANCES = {"f16": 2e-3, "bf16": 2e-2, "f32": 1e-5, "f64": 1e-13, "fp8": 1e-2}
COMPILE = """import sys
from gemmery.cuda import nvrtc
for source, kernel in zip(sys.argv[1::2], sys.argv[2::2]):
    nvrtc.code(source, kernel, "sm_90a")
"""
COMPILERS = 16
FACTORED = ("bm=128 bn=256 cm=1 cn=1 blocks=128", "bm=128 bn=256 cm=1 cn=1 blocks=132", "bm=128 bn=224 cm=1 cn=1")
# Tiles of float32 with k adjacent in A and B: bm, bn, bk, wm, wn, tm, tn, stages, blocks.
ALONG_K = (
    *("128 256 16 32 128 16 8 3 0", "128 128 16 64 32 8 8 2 0", "128 64 16 32 32 8 4 3 1", "64 64 16 32 32 8 4 3 3"),
    *("32 32 16 32 16 4 4 4 6", "32 32 16 32 16 4 4 3 6"),
)
# Tiles of float64: bm, bn, bk, wm, wn, stages, blocks.
DOUBLES = (
    *((128, 128, 16, 64, 32, 3, 1), (96, 128, 16, 48, 32, 4, 1), (96, 96, 16, 48, 24, 4, 1)),
    *((96, 64, 16, 48, 32, 3, 2), (64, 64, 16, 32, 32, 3, 3)),
)
WIDE = (1536, 2560, 3072)  # squared
CALLS, TURNS = 16, 9


def say(line):
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def problem_of(m, n, k, dtype, batch, b):
    """Return a product of matrices by rows, or with a B by columns."""
    return Problem(m, n, k, dtype, dtype, batch, b_layout=b, device="cuda:0")


def put_of(problem, name, sets):
    """Return what launches a configuration of a rung, "simt_batched tm=2", on a set of operands."""
    rung, *words = name.split()
    config = {key: int(value) for key, value in (word.split("=") for word in words)}
    rung = find(CUDA, rung)
    kernel = rung.build(problem, {**rung.default, **config})

    def view(x):
        along, row, column = (step * x.element_size() for step in x.stride())
        return View(x.data_ptr(), tuple(x.shape), (along, row, column), problem.dtype, "cuda:0")

    ready = kernel.ready(*(view(x) for x in sets[0]))
    scratch = torch.empty(max(1, ready.workspace), dtype=torch.uint8, device="cuda")

    def put(index):
        a, b, c = sets[index]
        stream = torch.cuda.current_stream().cuda_stream
        ready(a.data_ptr(), b.data_ptr(), c.data_ptr(), stream, workspace=scratch.data_ptr())

    return put


def compile_all(cases):
    """Compile what the configurations need, in parallel processes."""
    kernels = {}
    for problem, names in cases:
        for name in names:
            rung, *words = name.split()
            rung = find(CUDA, rung)
            config = {key: int(value) for key, value in (word.split("=") for word in words)}
            try:
                launches = rung.geometry(problem.by_rows(), {**rung.default, **config}).launches
            except GemmeryError as error:
                say(f"{name}: {error}")
                continue
            kernels |= {(each.source, each.kernel): None for each in launches}
    lots = [list(itertools.chain(*list(kernels)[i::COMPILERS])) for i in range(COMPILERS)]
    with ThreadPoolExecutor(COMPILERS) as pool:
        run = [sys.executable, "-c", COMPILE]
        list(pool.map(lambda lot: subprocess.run([*run, *lot], check=False), lots))


def graph_of(put, sets):
    """Return a graph of calls with one set after the other, and their number."""
    count = sets * -(-CALLS // sets)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for index in range(min(sets, 3)):
            put(index)
    side.synchronize()
    tiers.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            put(index % sets)
    return graph, count


def seconds(graph, count, repeats):
    """Return the time of a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count / repeats / 1e3


def race(title, puts, sets, check, bytes_moved, flops):
    """Check and time the contestants, and print a line for each."""
    graphs = {}
    for name, put in puts.items():
        try:
            error = check(put)
            if not error <= 1:
                say(f"{title}: {name}: WRONG, {error:.3g} of the tolerance")
                continue
            graphs[name] = graph_of(put, sets)
        except (RuntimeError, GemmeryError) as error:
            say(f"{title}: {name}: {str(error).splitlines()[0][:200]}")
    if not graphs:
        return
    first = {name: seconds(*graph, 1) for name, graph in graphs.items()}
    repeats = {name: max(1, min(50, int(2e-3 / (each * graphs[name][1])))) for name, each in first.items()}
    turns = [{name: seconds(*graph, repeats[name]) for name, graph in graphs.items()} for _ in range(TURNS)]
    medians = {name: statistics.median(turn[name] for turn in turns) for name in graphs}
    base = next(iter(medians.values()))
    say(title)
    for name, each in medians.items():
        rate = f"{bytes_moved / each / 1e12:.2f} TB/s, {flops / each / 1e12:.1f} TFLOP/s"
        say(f"    {each * 1e6:9.2f} us  {base / each:6.3f}  {rate}  {name}")


def number_of_sets(size):
    """Return how many sets of so many bytes no cache holds."""
    return max(2, -(-3 * torch.cuda.get_device_properties(0).L2_cache_size // size))


def plain(m, n, k, dtype, batch, b, names, copy=False, api=True):
    """Race configurations for products of matrices with torch.bmm or torch.mm, and a copy of as many bytes."""
    problem, kind = problem_of(m, n, k, dtype, batch, b), TYPES[dtype]
    count = min(number_of_sets(problem.bytes), 400)

    def made():
        y = torch.randn(batch, n, k, device="cuda", dtype=kind).mT if b == "col" else None
        y = torch.randn(batch, k, n, device="cuda", dtype=kind) if y is None else y
        x = torch.randn(batch, m, k, device="cuda", dtype=kind)
        return x, y, torch.empty(batch, m, n, device="cuda", dtype=kind)

    sets = [made() for _ in range(count)]
    some = slice(0, min(batch, 3000))
    a, y, _ = sets[0]
    exact = a[some].double() @ y[some].double()
    size = a[some].double().abs() @ y[some].double().abs()

    def check(put):
        sets[0][2].fill_(float("nan"))
        put(0)
        torch.cuda.synchronize()
        last = sets[0][2][-1].double() - a[-1].double() @ y[-1].double()
        worst = ((sets[0][2][some].double() - exact).abs() / size).max()
        worst = torch.maximum(worst, (last.abs() / (a[-1].double().abs() @ y[-1].double().abs())).max())
        return worst.item() / TOLERANCES[dtype]

    single = batch == 1
    tensors = [tuple(x[0] for x in each) if single else each for each in sets]
    function = torch.mm if single else torch.bmm

    def by_lt(index):
        torch.backends.cuda.preferred_blas_library("cublaslt")
        function(*tensors[index][:2], out=tensors[index][2])
        torch.backends.cuda.preferred_blas_library("cublas")

    puts = {function.__name__: lambda i: function(*tensors[i][:2], out=tensors[i][2]), "cublasLt": by_lt}
    if single and m == 1:
        puts["torch.mv"] = lambda i: torch.mv(tensors[i][1].T, tensors[i][0][0], out=tensors[i][2][0])
    if single and kind in (torch.float16, torch.bfloat16):
        bias = torch.zeros(n, device="cuda", dtype=kind)
        puts["torch.addmm"] = lambda i: torch.addmm(bias, *tensors[i][:2], out=tensors[i][2])
    for name in names:
        try:
            puts[name] = put_of(problem, name, sets)
        except GemmeryError as error:
            say(f"{name}: {error}")
    if api:
        puts["gm.matmul"] = lambda i: gm.matmul(*tensors[i][:2], out=tensors[i][2])
    title = f"{batch} x {m} x {n} x {k} {dtype} B by {b}"
    race(title, puts, count, check, problem.bytes, problem.flops)
    if copy:
        half = -(-problem.bytes // 2 // 16) * 16
        buffers = [torch.empty(2, half, dtype=torch.uint8, device="cuda") for _ in range(count)]
        race(title, {"copy": lambda i: buffers[i][1].copy_(buffers[i][0])}, count, lambda _: 0, 2 * half, 0)


def batched():
    """Batches of small products, next to the rungs that would take them otherwise."""
    for dtype, n in itertools.product(("f16", "f32", "f64"), (2, 3, 4, 8)):
        yield (n, n, n, dtype, 200_000), "row", [], True
    tiles = {"f16": "mma_pipelined", "f32": "simt_pipelined", "f64": "mma_f64"}
    for n, dtype, batch in itertools.product((16, 32), tiles, (100, 1000, 20_000)):
        yield (n, n, n, dtype, batch), "row", [tiles[dtype]], batch == 20_000
    for n, dtype in itertools.product((64, 128), tiles):
        yield (n, n, n, dtype, 2000), "row", [tiles[dtype]], True
    for m, n, k in ((1, 8, 8), (8, 1, 8), (3, 7, 5), (24, 8, 16), (32, 4, 32)):
        yield (m, n, k, "f32", 20_000), "row", ["gemv_vectorized"] if 1 in (m, n) else ["simt_pipelined"], True


def gemv():
    """One row times a matrix by rows, next to tiles and to parts of k that a second launch adds up."""
    names = ["gemv_vectorized", "gemv_vectorized cluster=0"]
    for dtype, n in itertools.product(("f16", "f32", "f64"), (1024, 2048, 4096, 8192)):
        yield (1, n, n, dtype, 1), "row", [*names, "wgmma_epilogue"] if dtype == "f16" else names, False
    for n, k in itertools.product((512, 1024, 2048, 4096, 8192, 14336), (512, 1024, 2048, 4096)):
        yield (1, n, k, "bf16", 1), "row", [*names, "wgmma_epilogue"], False


def columns():
    """float32 on CUDA cores, with B by columns, by several tiles."""
    keys = "bm", "bn", "bk", "wm", "wn", "tm", "tn", "stages", "blocks"
    tiles = [zip(keys, text.split(), strict=True) for text in ALONG_K]
    names = ["simt_pipelined " + " ".join(f"{key}={value}" for key, value in each) for each in tiles]
    for n in (512, 1024, 2048, 4096):
        yield (n, n, n, "f32", 1), "col", names, False


def wide():
    """float32 on CUDA cores, with B by rows, of sides that leave the largest tiles uneven rounds."""
    keys = "bm", "bn", "bk", "wm", "wn", "tm", "tn", "stages", "blocks"
    for m, n, k in (
        (818, 3773, 1012),
        (692, 3864, 1968),
        (1200, 3000, 700),
        (1800, 2000, 1500),
        *((n,) * 3 for n in WIDE),
    ):
        tiles = (zip(keys, tile[:9], strict=True) for tile in SIMT_PIPELINED[4])
        names = ["simt_pipelined splits=1 " + " ".join(f"{key}={value}" for key, value in each) for each in tiles]
        yield (m, n, k, "f32", 1), "row", names, False


def doubles():
    """float64 on tensor cores, with B by columns and by rows, by several tiles."""
    keys = "bm", "bn", "bk", "wm", "wn", "stages", "blocks"
    names = ["mma_f64 " + " ".join(f"{key}={value}" for key, value in zip(keys, each, strict=True)) for each in DOUBLES]
    for n, b in itertools.product((1024, 1536, 2048, 2560, 3072), ("col", "row")):
        yield (n, n, n, "f64", 1), b, [name for name in names if b == "col" or "bn=96" not in name], False


def ragged():
    """Few tiles in bfloat16: whole, and with a k that the blocks of a cluster share."""
    shapes = [(147, 1280, 8192), (100, 3000, 5000), (392, 4096, 4096), (128, 7168, 2048), (512, 7168, 2048)]
    draw = random.Random(5)
    for _ in range(25):
        m = int(2 ** draw.uniform(0, 9))
        shapes.append((m, *(int(2 ** draw.uniform(8, 13)) // 8 * 8 for _ in range(2))))
    for m, n, k in shapes:
        yield (m, n, k, "bf16", 1), "col", ["wgmma_epilogue"], False


def factors(title, m, n, k):
    """Race fp8 with a factor for each row and column, and with one."""
    kind = torch.float8_e4m3fn
    count = number_of_sets(m * k + n * k + 2 * m * n)
    made = lambda *shape: torch.randn(*shape, device="cuda").to(kind)  # noqa: E731
    sets = [(made(m, k), made(n, k).T, torch.empty(m, n, device="cuda", dtype=torch.bfloat16)) for _ in range(count)]
    rows, columns = torch.rand(m, 1, device="cuda") + 0.5, torch.rand(1, n, device="cuda") + 0.5
    one = torch.ones((), device="cuda")
    exact = (sets[0][0].float() @ sets[0][1].float()) * rows * columns

    def check(put, factor):
        put(0)
        torch.cuda.synchronize()
        expected = exact if factor else sets[0][0].float() @ sets[0][1].float()
        return ((sets[0][2].float() - expected).norm() / expected.norm()).item() / TOLERANCES["fp8"]

    def scaled(i, x, y):
        torch._scaled_mm(*sets[i][:2], x, y, out_dtype=torch.bfloat16, use_fast_accum=True, out=sets[i][2])

    def own(i, x, y):
        gm.matmul(*sets[i][:2], scale_a=x, scale_b=y, out=sets[i][2])

    def tile(name):
        rung, kept = find(CUDA, "wgmma_epilogue"), {}
        config = {key: int(value) for key, value in (word.split("=") for word in name.split())}
        problem = Problem(m, n, k, "e4m3", "bf16", b_layout="col", scales="outer", device="cuda:0")
        kernel = rung.build(problem, {**rung.default, **config})
        types = "e4m3", "e4m3", "bf16"

        def view(x, dtype):
            steps = (x.numel() * x.element_size(), *(step * x.element_size() for step in x.stride()))
            return View(x.data_ptr(), (1, *x.shape), steps, dtype, "cuda:0")

        views = [view(x, dtype) for x, dtype in zip(sets[0], types, strict=True)]
        ready = kernel.ready(*views, scaling=Scaling("outer", a_row=1, b_column=1))
        kept["scratch"] = torch.empty(max(1, ready.workspace), dtype=torch.uint8, device="cuda")
        extra = rows.data_ptr(), columns.data_ptr(), 0

        def put(i):
            stream, scratch = torch.cuda.current_stream().cuda_stream, kept["scratch"].data_ptr()
            ready(*(x.data_ptr() for x in sets[i]), stream, workspace=scratch, extra=extra)

        return put

    puts = {
        "torch rowwise": lambda i: scaled(i, rows, columns),
        "gm rowwise": lambda i: own(i, rows[:, 0], columns[0]),
    }
    for name in FACTORED:
        try:
            puts[name] = tile(name)
        except GemmeryError as error:
            say(f"{name}: {str(error)[:200]}")
    single = {"torch one": lambda i: scaled(i, one, one), "gm one": lambda i: own(i, one, one)}
    flops, moved = 2 * m * n * k, m * k + n * k + 2 * m * n
    race(f"fp8 {m} x {n} x {k}", puts, count, lambda put: check(put, True), moved, flops)
    race(f"fp8 {m} x {n} x {k}", single, count, lambda put: check(put, False), moved, flops)


def main():
    """Print a line for each contestant."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "what", nargs="+", choices=("batched", "gemv", "columns", "wide", "doubles", "ragged", "factors")
    )
    parser.add_argument("--seconds", type=float, default=100)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    torch.cuda.init()
    lists = {"batched": batched, "gemv": gemv, "columns": columns, "wide": wide, "doubles": doubles, "ragged": ragged}
    cases = [case for what in options.what if what in lists for case in lists[what]()]
    begin = time.monotonic()
    compile_all([(problem_of(*sides, b), names) for sides, b, names, _ in cases])
    say(f"compiled in {time.monotonic() - begin:.0f} s")
    if "factors" in options.what:
        for m, n, k in ((4096, 7168, 2048), (4096, 24576, 1536), (4096, 2112, 7168), (4096, 4096, 4096)):
            factors("fp8", m, n, k)
    for sides, b, names, copy in cases:
        if time.monotonic() > end:
            say("out of time")
            break
        m, n, k, dtype, batch = sides
        plain(m, n, k, dtype, batch, b, names, copy)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.no_grad():
        main()
