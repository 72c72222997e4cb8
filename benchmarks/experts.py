"""Time products of experts on a Hopper GPU, beside PyTorch's in the same process.

    python benchmarks/experts.py check
    python benchmarks/experts.py packed --groups 8,64 --rows 1,4,16,32,64
    python benchmarks/experts.py gradients --tokens 1024,4096,32768
    python benchmarks/experts.py factors

`packed` times experts of 4 bits, `gradients` groups along k in bf16, `factors` the same in e4m3 with factors of 128;
`tune` times other variants of `packed`. Launches are in CUDA graphs, and operands take turns that together exceed 200
MB. `check` compares values with float64.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

import gemmery as gm
from gemmery.arrays import View
from gemmery.cuda import nvrtc, ordered
from gemmery.cuda.weights import Format, problem_of
from gemmery.errors import RefusedError
from gemmery.ladder.cuda import BY_WEIGHTS
from gemmery.ladder.rung import find
from gemmery.torch import arranged as by_torch

SHAPES = ((2048, 7168), (7168, 2048), (4096, 7168))  # columns of a weight and k, of DeepSeek-V3's experts
BYTES = 4.6e12  # in a second, of an H200's memory, as a copy reads
ROTATED = 200 << 20


def say(line):
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def time_of(calls, rounds=7):
    """Return the median time in us of a call, of those in a graph."""
    for call in calls:  # packed experts are arranged in their first product
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    measured = []
    for _ in range(rounds):
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        measured.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(measured)


def turns(size):
    """Return how many operands of so many bytes take turns."""
    return max(2, math.ceil(ROTATED / size))


def uneven(total, groups, seed=0):
    """Return the ends of groups of about exponential sizes."""
    draw = torch.Generator().manual_seed(seed)
    sizes = -torch.log(torch.rand(groups, generator=draw))
    ends = (sizes.cumsum(0) / sizes.sum() * total).round().int()
    ends[-1] = total
    return ends.cuda()


def even(rows, groups):
    """Return the ends of groups of so many rows each."""
    return torch.arange(1, groups + 1, dtype=torch.int32, device="cuda") * rows


def expected(x, w, ends):
    """Return the products of groups of rows in float64."""
    result, start = torch.zeros(len(x), w.shape[2], dtype=torch.float64, device="cuda"), 0
    for group, end in enumerate(ends.tolist()):
        result[start:end] = x[start:end].double() @ w[group].double()
        start = end
    return result


def check():
    """Compare values with float64, of formats and groups of all kinds; print what is wrong, and how many are right."""
    right = []

    def compare(name, result, want, size, u):
        error = ((result.double() - want).abs() / (u * want.abs() + 2.0**-14 * size + 1e-30)).max().item()
        right.append(error <= 1)
        if not error <= 1:
            say(f"WRONG {name}: {error:.3g} of the bound")

    for dtype, formats in itertools.product((torch.bfloat16, torch.float16), ("int4", "int8", "mxfp4", "float8_e4m3")):
        for n, k, ends in ((520, 1024, [0, 3, 40, 40, 139]), (2048, 512, [5, 6, 7, 300]), (264, 4096, [0, 0, 1])):
            torch.manual_seed(n)
            w = torch.randn(len(ends), k, n, device="cuda", dtype=dtype) / 8
            x = torch.randn(ends[-1] + 3, k, device="cuda", dtype=dtype)
            group = {"int4": 128, "mxfp4": 32}.get(formats)
            experts, offs = gm.quantize(w, formats, group), torch.tensor(ends, dtype=torch.int32, device="cuda")
            exact = experts.dequantize(torch.float32 if formats == "mxfp4" else dtype).to(dtype)
            want, size = expected(x, exact, offs), expected(x.abs(), exact.abs(), offs)
            u = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
            bias = torch.randn(len(ends), n, device="cuda", dtype=dtype)
            for options in ({}, {"batch_invariant": True}, {"bias": bias, "activation": "silu"}):
                result = gm.grouped_matmul(x, experts, offsets=offs, **options)[: ends[-1]]
                of_all, sizes = want[: ends[-1]], size[: ends[-1]]
                if "bias" in options:
                    counts = torch.tensor([j - i for i, j in itertools.pairwise([0, *ends])], device="cuda")
                    of_all = torch.nn.functional.silu(of_all + bias.double().repeat_interleave(counts, 0))
                    sizes = sizes + 16
                compare(f"{formats} {dtype} {n}x{k} {ends} {options.keys()}", result, of_all, sizes, 2 * u)
                again = gm.grouped_matmul(x, experts, offsets=ends, **options)[: ends[-1]]
                if not torch.equal(result, again):
                    say(f"WRONG {formats} {dtype} {n}x{k}: other bits the second time")
    for m, n, total, ends in (
        (136, 520, 1000, [0, 1, 130, 130, 900]),
        (2048, 1024, 4096, [512, 1024, 3000, 4096]),
        (256, 256, 640, [640]),
        (72, 64, 300, [300, 10, 999]),
    ):
        for dtype, by_k in itertools.product((torch.bfloat16, torch.float16, torch.float32), (False, True)):
            torch.manual_seed(m)
            a, b = (torch.randn(total, side, device="cuda", dtype=dtype) for side in (m, n))
            if by_k:
                a, b = a.T.contiguous().T, b.T.contiguous().T
            offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
            result = gm.grouped_matmul(a.T, b, offsets=offs)
            start = 0
            for group, end in enumerate(ends):
                end = min(max(end, start), total)  # noqa: PLW2901 # as kernels use offsets
                want = a[start:end].double().T @ b[start:end].double()
                size = a[start:end].double().abs().T @ b[start:end].double().abs()
                u = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}[dtype]
                compare(f"along k {dtype} {m}x{n} {ends} {by_k} {group}", result[group], want, size, u)
                start = end
    for ends in ([256, 256, 1024, 2048], [5, 133, 900, 2000]):
        m, n, total = 520, 776, 2048
        a = (torch.randn(m, total, device="cuda") * 4).to(torch.float8_e4m3fn)
        b = (torch.randn(n, total, device="cuda") * 4).to(torch.float8_e4m3fn).T
        sa, sb = torch.rand(m, total // 128, device="cuda") + 0.5, torch.rand(total // 128, -(-n // 128), device="cuda")
        wide_a = a.double() * sa.double().repeat_interleave(128, 1)
        wide_b = b.double() * sb.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :n]
        offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
        result = gm.grouped_matmul(a, b, offsets=offs, scale_a=sa, scale_b=sb, dtype=torch.float32)
        for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            want = wide_a[:, start:end] @ wide_b[start:end]
            compare(
                f"factors {ends} {group}",
                result[group],
                want,
                64 * wide_a[:, start:end].abs() @ wide_b[start:end].abs(),
                0,
            )
    say(f"{sum(right)} of {len(right)} right")


def packed_experts(n, k, groups):
    """Return a stack of 4-bit matrices of random codes."""
    packed = torch.randint(0, 256, (groups, n, k // 2), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(groups, n, k // 128, device="cuda") / 64 + 1 / 128).bfloat16()
    return gm.QuantizedMatrix("int4", packed, scales)


def packed(groups_of, rows_of):
    """Time experts of 4 bits; beside them torch._grouped_mm in bf16, and the time in which memory brings the codes."""
    for (n, k), groups in itertools.product(SHAPES[:2], groups_of):
        form = Format(n, k, "int4", 128, "bf16")
        count = turns(groups * form.bytes)
        stacks = [packed_experts(n, k, groups) for _ in range(count)]
        wide = [
            torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16) for _ in range(turns(groups * n * k * 2))
        ]
        for rows in rows_of:
            m, ends = rows * groups, even(rows, groups)
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            own = time_of([partial(gm.grouped_matmul, x, q, offsets=ends) for q in stacks])
            plain = time_of([partial(torch._grouped_mm, x, w.mT, offs=ends) for w in wide])
            unequal = uneven(m, groups)
            loose = time_of([partial(gm.grouped_matmul, x, q, offsets=unequal) for q in stacks])
            least = (groups * form.bytes + m * (n + k) * 2) / BYTES * 1e6
            say(
                f"{groups} of {n}x{k}, {rows} each: {own:.1f} us, {least / own:.2f} of the bytes' time {least:.1f}, "
                f"{plain / own:.2f} of torch bf16 {plain:.1f}; uneven {loose:.1f}"
            )


TILES = (
    *((tokens, 4, 1, 4, 16, 1) for tokens in (8, 16, 24, 32)),
    *((tokens, 4, 1, 2, 8, 1) for tokens in (8, 16, 24, 32, 48, 64)),
    *((tokens, 2, 1, 2, 8, 2) for tokens in (8, 16, 24, 32)),
    *((tokens, 4, 1, 1, 8, 1) for tokens in (16, 32, 48, 64)),
)


def _variant(of_x, form, of_c, groups, case):
    """Return a variant, its problem and its config once it is compiled; None if it is refused."""
    tile, whole = case
    rung, problem = find(BY_WEIGHTS, "wgmma_quantized"), problem_of(of_x, form, of_c, "", whole, groups)
    names = ("tokens", "warpgroups", "blocks", "ways", "stages", "resident")
    config = {**rung.default, **dict(zip(names, tile, strict=True))}
    try:
        launch = rung.geometry(problem, config)
        nvrtc.code(launch.source, launch.kernel, "sm_90a")
    except RefusedError:
        return None
    return case, problem, config


def _put(run, x, w, c, ends, scratch):
    """Put a launch on the current stream."""
    stream = torch.cuda.current_stream().cuda_stream
    counters = ordered.counters(run.counters, stream, 0) if run.counters else 0
    run(x.data_ptr(), w.data_ptr(), c.data_ptr(), stream, 0, scratch.data_ptr(), None, (ends.data_ptr(), 0, counters))


def tune(groups_of, rows_of):
    """Time variants of experts of 4 bits, the best first; "w": those whose tiles are never cut."""
    rung = find(BY_WEIGHTS, "wgmma_quantized")
    for (n, k), groups in itertools.product(SHAPES[:2], groups_of):
        form = Format(n, k, "int4", 128, "bf16")
        stacks = [by_torch._arranged_experts(packed_experts(n, k, groups), torch.bfloat16)[1]]
        stacks += [stacks[0].clone() for _ in range(turns(groups * form.bytes) - 1)]
        for rows in rows_of:
            m, ends = rows * groups, even(rows, groups)
            x, c = (torch.randn(m, side, device="cuda", dtype=torch.bfloat16) for side in (k, n))
            of_x, of_c = (View(0, tuple(z.shape), (z.stride(0) * 2, 2), "bf16", "cuda:0") for z in (x, c))
            cases = [(tile, whole) for tile in TILES if rows <= tile[0] < 4 * rows + 8 for whole in (False, True)]
            with ThreadPoolExecutor(16) as pool:
                ready = [each for each in pool.map(partial(_variant, of_x, form, of_c, groups), cases) if each]
            results = []
            for case, problem, config in ready:
                views = [View(0, (1, *z.shape), (0, *z.strides), z.dtype) for z in (of_x, of_c)]
                run = rung.build(problem, config).ready(views[0], View(0, (1, k, n), (0, 2, 2 * k), "bf16"), views[1])
                scratch = torch.empty(max(16, run.workspace), dtype=torch.uint8, device="cuda")
                results.append((time_of([partial(_put, run, x, w, c, ends, scratch) for w in stacks], 4), case))
            results.sort()
            chosen = rung.resolve(problem_of(of_x, form, of_c, "", False, groups), rung.default)
            best = ", ".join(f"{each:.1f} {tile[:4]}{'w' * whole}" for each, (tile, whole) in results[:4])
            say(f"tune {groups} of {n}x{k}, {rows} each: {best}; chosen {tuple(chosen.values())[:6]}")


def gradients(tokens_of, groups_of):
    """Time groups along k in bf16, beside torch._grouped_mm."""
    for (n, k), groups, tokens in itertools.product(SHAPES, groups_of, tokens_of):
        count = 2 if tokens * (n + k) * 2 > ROTATED // 4 else 4
        x, dy = ([torch.randn(tokens, s, device="cuda").bfloat16() for _ in range(count)] for s in (k, n))
        line = f"{groups} groups, {tokens} tokens, {n}x{k}:"
        for name, ends in (("even", even(tokens // groups, groups)), ("uneven", uneven(tokens, groups))):
            own = time_of([partial(gm.grouped_matmul, g.T, z, offsets=ends) for g, z in zip(dy, x, strict=True)], 5)
            rival = time_of([partial(torch._grouped_mm, g.T, z, offs=ends) for g, z in zip(dy, x, strict=True)], 5)
            rate = 2 * tokens * n * k / own / 1e6
            line += f" {name} {own:.1f} us, {rate:.0f} TFLOP/s, {rival / own:.2f} of torch {rival:.1f};"
        say(line)


def factors():
    """Time groups along k in e4m3 with a factor for each 128 of k."""
    for (n, k), groups, tokens in itertools.product(SHAPES, (8,), (4096, 32768)):
        a = torch.randn(n, tokens, device="cuda").to(torch.float8_e4m3fn)
        b = torch.randn(k, tokens, device="cuda").to(torch.float8_e4m3fn)
        sa, sb = (torch.rand(*s, device="cuda") for s in ((n, tokens // 128), (tokens // 128, k // 128)))
        ends, rough = even(tokens // groups, groups), uneven(tokens, groups)
        line = f"e4m3 {groups} groups, {tokens} tokens, {n}x{k}:"
        aligned = rough // 128 * 128
        for name, each in (("even", ends), ("uneven by 128", aligned), ("uneven", rough)):
            call = partial(gm.grouped_matmul, a, b.T, offsets=each, scale_a=sa, scale_b=sb)
            own = time_of([call] * 2, 5)
            line += f" {name} {own:.1f} us, {2 * int(each[-1]) * n * k / own / 1e6:.0f} TFLOP/s;"
        say(line)


def main():
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "packed", "tune", "gradients", "factors"))
    parser.add_argument("--groups", default="8,64")
    parser.add_argument("--rows", default="1,4,16,32,64")
    parser.add_argument("--tokens", default="1024,4096,32768")
    options = parser.parse_args()
    groups, rows, tokens = (
        [int(x) for x in text.split(",")] for text in (options.groups, options.rows, options.tokens)
    )
    calls = {"check": check, "factors": factors, "packed": lambda: packed(groups, rows)}
    calls |= {"tune": lambda: tune(groups, rows), "gradients": lambda: gradients(tokens, groups)}
    calls[options.what]()


if __name__ == "__main__":
    main()
