"""Time weights of few bits against bf16 on a CUDA device: `python benchmarks/quantized_products.py {check|table|tune|random}`.

Operands rotate over more memory than L2 holds, launches are in CUDA graphs, and PyTorch's linear layer in bfloat16 runs
in the same process. `tune` times other variants than the model's choice. Each row is a line of JSON in the file `--to`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from gemmery.arrays import View
from gemmery.cuda import driver, nvrtc, ordered, weights
from gemmery.cuda.choose.data import QUANTIZED
from gemmery.cuda.weights import Format, arrange, problem_of
from gemmery.errors import CompileError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.torch.arranged import multiply

RUNG = find(CUDA, "wgmma_quantized")
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
SHAPES = (8192, 28672), (14336, 4096), (4096, 4096), (28672, 8192), (4096, 14336)
ROWS = 1, 4, 16, 32, 64, 128, 256, 512
ROTATED = 200 << 20  # bytes of weights


def logical(form: Format, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return codes, factors, zero points, factors of rows, and the weight in float32, rounded once to its type."""
    torch.manual_seed(seed)
    n, k = form.n, form.k
    codes = torch.randint(0, 256 if weights.KINDS[form.kind] == 8 else 16, (n, k), dtype=torch.uint8, device="cuda")
    scales = zeros = rows = None
    if form.kind == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0
        levels = codes.view(torch.float8_e4m3fn).float()
    elif form.kind == "e2m1":
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
        levels = table[(codes & 7).long()] * (1 - 2.0 * (codes >> 3))
    else:
        levels = codes.view(torch.int8).float() if form.kind == "int8" else codes.float()
    if form.group:
        scales = (torch.rand(n, k // form.group, device="cuda") / 64 + 1 / 128).to(TYPES[form.dtype])
        spread = scales.float().repeat_interleave(form.group, 1)
        if form.kind == "int4_zeros":
            zeros = torch.randint(0, 17, scales.shape, dtype=torch.uint8, device="cuda")
            levels -= zeros.repeat_interleave(form.group, 1)
        elif form.kind == "int4":
            levels -= 8
        w = (levels * spread).to(TYPES[form.dtype]).float()
        scales = scales.view(torch.int16)
    else:
        rows = torch.rand(n, device="cuda") / 64 + 1 / 128
        w = levels * rows[:, None]
    return codes, scales, zeros, rows, w


def launch(x: torch.Tensor, form: Format, c: torch.Tensor, config: dict[str, int], invariant: bool = False):
    """Return a function of an arranged weight that puts a variant on the current stream, and the config with all choices."""
    where = f"cuda:{x.get_device()}"
    views = (View(0, tuple(z.shape), (z.stride(0) * 2, 2), form.dtype, where) for z in (x, c))
    of_x, of_c = views
    problem = problem_of(of_x, form, of_c)._replace(invariant=invariant)
    kernel = RUNG.build(problem, {**RUNG.default, **config})
    ready = kernel.ready(*(View(0, (1, *z.shape), (0, *z.strides), z.dtype) for z in (of_x, View(0, (form.k, form.n), (2, 2 * form.k), form.dtype), of_c)))
    scratch = torch.empty(max(16, ready.workspace), dtype=torch.uint8, device="cuda")

    def run(arranged: torch.Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        extra = (0, 0, ordered.counters(ready.counters, stream, x.get_device())) if ready.counters else ()
        ready(x.data_ptr(), arranged.data_ptr(), c.data_ptr(), stream, 0, scratch.data_ptr(), None, extra)

    return run, RUNG.resolve(problem, {**RUNG.default, **config})


def graph(calls):
    """Return a CUDA graph of calls."""
    calls[0]()
    torch.cuda.synchronize()
    graph_of = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph_of, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph_of


def times(graphs, count, rounds=5):
    """Return the median time of a launch of each graph, in us, of rounds in turn."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    measured = [[] for _ in graphs]
    for _ in range(rounds + 1):
        for each, of in zip(measured, graphs, strict=True):
            of.replay()
            begin.record()
            of.replay()
            end.record()
            end.synchronize()
            each.append(begin.elapsed_time(end) * 1e3 / count)
    return [statistics.median(each[1:]) for each in measured]


def rotating(form: Format):
    """Return copies of an arranged weight."""
    codes, scales, zeros, rows, _ = logical(form)
    first = arrange(form, codes, scales, zeros, rows)
    return [first, *(first.clone() for _ in range(max(1, math.ceil(ROTATED / form.bytes) - 1)))]


def dense(n: int, k: int):
    """Return copies of a weight in bfloat16."""
    return [torch.randn(n, k, device="cuda").bfloat16() / 64 for _ in range(max(2, math.ceil(ROTATED / (2 * n * k))))]


def variants(m: int, kind: str = "int4", group: int = 128):
    """Return configs near to what suits so many rows."""
    for tile in QUANTIZED:
        if tile.tokens * tile.blocks >= 224 and (kind in ("e2m1", "e4m3") or group in (16, 32)):
            continue
        if tile.tokens < min(m, 48) or (tile.tokens >= 2 * m and tile.tokens > 8):
            continue
        for splits in (1, 2, 4):
            yield {**dict(zip(tile._fields, tile, strict=True)), "stages": 0, "splits": splits}
        if m >= 128:
            yield {**dict(zip(tile._fields, tile, strict=True)), "stages": 0, "runs": 132}


def measure(form: Format, m: int, copies, plain, tune: bool):
    """Return a row of the table: times of PyTorch, of the model's choice, and of other variants."""
    x = torch.randn(m, form.k, device="cuda").to(TYPES[form.dtype])
    c = torch.empty(m, form.n, device="cuda", dtype=TYPES[form.dtype])
    graphs, names, kept = [], [], []  # graphs do not keep the scratch memory of what they captured
    if plain:
        y = x.to(torch.bfloat16)
        count = len(plain) * max(1, 8 // len(plain))
        graphs.append((graph([lambda w=plain[i % len(plain)]: torch.nn.functional.linear(y, w) for i in range(count)]), count))
        names.append("torch")
    count = max(8, len(copies))
    tried = [{}, {"invariant": 1}, *({"late": 1},) * tune, *(variants(m, form.kind, form.group) if tune else ())]
    seen = set()
    for config in tried:
        try:
            invariant = "invariant" in config
            run, resolved = launch(x, form, c, {} if invariant else config, invariant)
        except (CompileError, RefusedError):
            continue
        name = "".join(f"{a}{resolved[b]}" for a, b in zip("ngbwsrx", ("tokens", "warpgroups", "blocks", "ways", "stages", "resident", "splits"), strict=True))
        name = "invariant:" * invariant + name + f"@{resolved['runs']}" * bool(resolved["runs"]) + "late" * resolved["late"]
        if name in seen:
            continue
        seen.add(name)
        kept.append(run)
        graphs.append((graph([lambda w=copies[i % len(copies)], run=run: run(w) for i in range(count)]), count))
        names.append(name)
    measured = [1e9] * len(graphs)
    for i, us in enumerate(times([g for g, _ in graphs], 1)):
        measured[i] = us / graphs[i][1]
    return dict(zip(names, measured, strict=True))


def check() -> None:
    """Compare values of many shapes and formats with float32 products; twice, and in a graph."""
    rng, bad, done = random.Random(1), 0, 0
    cases = []
    for kind, groups in (("int4", (128, 64, 32)), ("int4_zeros", (128, 64, 32)), ("int8", (0, 128, 32)), ("e4m3", (0,)), ("e2m1", (32, 16))):
        for group in groups:
            for dtype in ("bf16", "f16"):
                for _ in range(3):
                    k = rng.choice((1, 3, 8, 16, 17, 33)) * max(group, 64) if rng.random() < 0.6 else rng.randrange(1, 9) * max(group, 8)
                    m = rng.choice((1, 2, 7, 8, 16, 31, 64, 65, 100, 128, 200, 513))
                    form = Format(rng.choice((1, 7, 64, 129, 255, 512, 1000, 4096)), k, kind, group, dtype)
                    cases.append((form, m, rng.choice(list(variants(m, kind, group)))))
    keys = {key for form, m, config in cases for key in (*kernels([(form, m)], False, "bias+relu"), *kernels([(form, m)], False, "", config))}
    compile_all(sorted(keys))
    for form, m, config in cases:
        codes, scales, zeros, rows, w = logical(form, done)
        arranged = arrange(form, codes, scales, zeros, rows)
        x = torch.randn(m, form.k, device="cuda").to(TYPES[form.dtype])
        bias = torch.randn(form.n, device="cuda")
        exact = (x.double() @ w.double().t() + bias).relu()
        size = x.double().abs() @ w.double().abs().t() + bias.abs()
        y = multiply(x, arranged, form, bias, "relu")
        again = multiply(x, arranged, form, bias, "relu")
        limit = 2.0 ** (-8 if form.dtype == "bf16" else -11) * exact.abs() + 2.0**-15 * size
        ok = bool(((y.double() - exact).abs() <= limit).all()) and torch.equal(y, again)
        around = torch.full((m + 2, form.n), 7.0, device="cuda", dtype=TYPES[form.dtype])
        try:
            run, _ = launch(x, form, around[1:-1], config)
            run(arranged)
            run(arranged)
            exact = x.double() @ w.double().t()
            fine = ((around[1:-1].double() - exact).abs() <= 2.0 ** (-8 if form.dtype == "bf16" else -11) * exact.abs() + 2.0**-15 * size)
            ok = ok and bool(fine.all()) and bool((around[0] == 7).all() and (around[-1] == 7).all())
        except (CompileError, RefusedError):
            pass
        done += 1
        if not ok:
            bad += 1
            print("WRONG", form, m, config, float((y.double() - (x.double() @ w.double().t() + bias).relu()).abs().max()), flush=True)
    print(f"check: {done} cases, {bad} wrong", flush=True)


def layers() -> None:
    """Check QuantizedLinear plainly, in a CUDA graph, compiled, and after a change of its weight."""
    import gemmery.torch
    from gemmery.torch.quantization import dequantize

    torch.manual_seed(0)
    for bits, group in ((4, 128), (4, 32), (8, 128)):
        for m in (1, 16, 200, 1500):
            model = torch.nn.Sequential(torch.nn.Linear(4096, 6144, device="cuda", dtype=torch.bfloat16))
            gemmery.torch.replace_linear(model, bits=bits, group=group)
            x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
            with torch.inference_mode():
                for _ in range(2):
                    weight = dequantize(model[0].packed, model[0].scales, bits, group, torch.bfloat16)
                    exact = x.double() @ weight.double().t() + model[0].bias.double()
                    limit = 2.0**-8 * exact.abs() + 2.0**-14 * (x.double().abs() @ weight.double().abs().t())
                    y = model(x)
                    capture = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(capture):
                        z, z2 = model(x), model(x)
                    capture.replay()
                    capture.replay()
                    torch.cuda.synchronize()
                    right = bool(((y.double() - exact).abs() <= limit).all())
                    same = torch.equal(y, z) and torch.equal(y, z2)
                    print(f"layer {bits}/{group} m={m}: right {right}, graph {same}", flush=True)
                    model[0].load_state_dict({"weight": -weight, "bias": model[0].bias})
    compiled_model = torch.compile(model)
    with torch.inference_mode():
        y, z = compiled_model(x), model(x)
        print("compiled", torch.equal(y, z), float((y.float() - z.float()).abs().max()), float(z.float().abs().max()), flush=True)
        few = x[:7]
        print("compiled, 7 rows", torch.equal(compiled_model(few), model(few)), flush=True)


def compile_all(keys) -> None:
    """Compile kernels in processes of their own, into the cache."""
    began = time.time()
    with ProcessPoolExecutor(14) as pool:
        list(pool.map(compiled, keys))
    print(f"compiled {len(keys)} kernels in {time.time() - began:.0f} s", flush=True)


def compiled(key) -> None:
    """Compile one."""
    try:
        nvrtc.code(*key, "sm_90a")
    except CompileError as error:
        print(str(error)[:400], flush=True)


def kernels(cases, tune: bool, epilogue: str = "", only=None):
    """Return the kernels that cases need."""
    keys = set()
    for form, m in cases:
        for config in (only or {}, *(({"late": 1}, *variants(m, form.kind, form.group)) if tune else ())):
            x, c = (View(0, (m, side), (2 * side, 2), form.dtype, "h200") for side in (form.k, form.n))
            try:
                geometry = RUNG.geometry(problem_of(x, form, c, epilogue)._replace(device="h200"), {**RUNG.default, **config})
            except (CompileError, RefusedError):
                continue
            keys.add((geometry.source, geometry.kernel))
    return sorted(keys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("check", "table", "tune", "random", "layers"))
    parser.add_argument("--to", default="")
    parser.add_argument("--shapes", default="")
    parser.add_argument("--kinds", default="int4/128")
    parser.add_argument("--rows", default="")
    parser.add_argument("--count", type=int, default=200)
    args = parser.parse_args()
    file = open(args.to, "a") if args.to else None
    if args.what == "check":
        return check()
    shapes = [tuple(map(int, each.split("x"))) for each in args.shapes.split(",")] if args.shapes else SHAPES
    rows = tuple(map(int, args.rows.split(","))) if args.rows else ROWS
    kinds = [(each.split("/")[0], int(each.split("/")[1]), (each.split("/") + ["bf16"])[2]) for each in args.kinds.split(",")]
    cases = [(Format(n, k, *kind), m) for n, k in shapes for kind in kinds for m in rows]
    if args.what == "layers":
        return layers()
    if args.what == "random":
        rng = random.Random(45)
        cases = [
            (Format(64 * rng.randrange(8, 257), 64 * rng.randrange(8, 257), "int4", 64, "bf16"), int(2 ** rng.uniform(0, 9.01)))
            for _ in range(args.count)
        ]
    tune = args.what == "tune"
    compile_all(kernels(cases, tune))
    known, ratios = (None, [], None, []), []
    for form, m in cases:
        if known[0] != form:
            plain = known[3] if known[2] == (form.n, form.k) else dense(form.n, form.k)
            known = form, rotating(form), (form.n, form.k), plain
        row = measure(form, m, known[1], known[3], tune)
        named = list(row.items())
        best = min(named[1:], key=lambda each: each[1])
        ratios.append(named[0][1] / named[1][1])
        print(f"{form.n}x{form.k} {form.kind}/{form.group} {form.dtype} m={m}: torch {named[0][1]:.1f}, {named[1][0]} {named[1][1]:.1f} = {ratios[-1]:.2f}; best {best[0]} {best[1]:.1f}, choice +{100 * (named[1][1] / best[1] - 1):.0f} %", flush=True)
        if file:
            file.write(json.dumps({"n": form.n, "k": form.k, "kind": form.kind, "group": form.group, "dtype": form.dtype, "m": m, "us": row}) + "\n")
            file.flush()
    print(f"ratios: least {min(ratios):.3f}, geometric mean {statistics.geometric_mean(ratios):.3f}, of {len(ratios)}")


if __name__ == "__main__":
    sys.exit(main())
