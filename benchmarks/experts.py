"""Time products of experts on a Hopper GPU, beside PyTorch's in the same process.

    python benchmarks/experts.py packed --groups 8,64 --rows 1,4,16,32,64
    python benchmarks/experts.py gradients --tokens 1024,4096,32768
    python benchmarks/experts.py factors
    python benchmarks/experts.py codes --rows 1024,4096,8192
    python benchmarks/experts.py gathered --tokens 1024,8192,32768

`packed` times experts of 4 bits, `gradients` groups along k in bf16, `factors` the same in e4m3 with factors of 128;
`codes` products of codes of 8 bits by weights of 4, beside PyTorch's linear layer in bf16; `gathered` rows that an
index gathers; `tune` other variants of `packed`. Launches are in CUDA graphs, and operands take turns that together
exceed 200 MB.
packages/gemmery/tests/gpu/test_gpu_experts.py compares values with float64.
"""

from __future__ import annotations

import argparse
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from graph_times import ROTATED, captured, say, time_of, times, turns

import gemmery as gm
from gemmery.arrays import View
from gemmery.cuda import nvrtc, ordered
from gemmery.cuda.weights import Format, problem_of
from gemmery.errors import CompileError, RefusedError
from gemmery.ladder.cuda import BY_WEIGHTS
from gemmery.ladder.rung import find
from gemmery.torch import arranged as by_torch

SHAPES = ((2048, 7168), (7168, 2048), (4096, 7168))  # columns of a weight and k, of DeepSeek-V3's experts
BYTES = 4.6e12  # in a second, of an H200's memory, as a copy reads


def uneven(total, groups, seed=0):
    """Return the ends of groups of about exponential sizes."""
    draw = torch.Generator().manual_seed(seed)
    sizes = -torch.log(torch.rand(groups, generator=draw))
    ends = (sizes.cumsum(0) / sizes.sum() * total).round().int()
    ends[-1] = total
    return ends.cuda()


def routed(rows, groups, seed=0):
    """Return the ends of groups to which tokens are routed at random, so many each on average."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.bincount(torch.randint(0, groups, (rows * groups,), generator=draw), minlength=groups)
    return sizes.cumsum(0).int().cuda()


def even(rows, groups):
    """Return the ends of groups of so many rows each."""
    return torch.arange(1, groups + 1, dtype=torch.int32, device="cuda") * rows


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


TILES = (  # tokens, warpgroups, blocks of 64 rows, ways, blocks on a multiprocessor
    *((tokens, 4, 1, 4, 1) for tokens in (8, 16, 24, 32)),
    *((tokens, 4, 1, 2, 1) for tokens in (8, 16, 24, 32, 48, 64, 80, 96)),
    *((tokens, 4, 1, 1, 1) for tokens in (8, 16, 24, 32, 48, 64, 80, 96)),
    *((tokens, 2, 1, 2, 2) for tokens in (8, 16, 24, 32)),
    *((tokens, 2, 1, 1, 2) for tokens in (8, 16, 24, 32, 48)),
    *((tokens, 2, 1, 1, 1) for tokens in (80, 96, 128)),
)


def _variant(of_x, form, of_c, groups, case):
    """Return a variant with the most stages that fit, its problem and its config, once compiled; None if refused."""
    tile, whole = case
    rung, problem = find(BY_WEIGHTS, "wgmma_quantized"), problem_of(of_x, form, of_c, "", whole, groups)
    names = ("tokens", "warpgroups", "blocks", "ways", "resident")
    for depth in range(8 // tile[3] * tile[3], 2 * tile[3] - 1, -tile[3]):
        config = {**rung.default, **dict(zip(names, tile, strict=True)), "stages": depth}
        try:
            launch = rung.geometry(problem, config)
            nvrtc.code(launch.source, launch.kernel, "sm_90a")
        except RefusedError:
            continue
        except CompileError as error:
            say(str(error)[:300])
            return None
        return case, problem, config
    return None


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
            m = rows * groups
            x, c = (torch.randn(m, side, device="cuda", dtype=torch.bfloat16) for side in (k, n))
            of_x, of_c = (View(0, tuple(z.shape), (z.stride(0) * 2, 2), "bf16", "cuda:0") for z in (x, c))
            cases = [(tile, whole) for tile in TILES if rows <= tile[0] <= 2 * rows + 8 for whole in (False, True)]
            with ThreadPoolExecutor(16) as pool:
                ready = [each for each in pool.map(partial(_variant, of_x, form, of_c, groups), cases) if each]
            chosen = rung.resolve(problem_of(of_x, form, of_c, "", False, groups), rung.default)
            for name, ends in (("even", even(rows, groups)), ("routed", routed(rows, groups))):
                results, first = [], None
                for case, problem, config in ready:
                    views = [View(0, (1, *z.shape), (0, *z.strides), z.dtype) for z in (of_x, of_c)]
                    run = rung.build(problem, config)
                    run = run.ready(views[0], View(0, (1, k, n), (0, 2, 2 * k), "bf16"), views[1])
                    scratch = torch.empty(max(16, run.workspace), dtype=torch.uint8, device="cuda")
                    c.fill_(torch.nan)
                    us = time_of([partial(_put, run, x, w, c, ends, scratch) for w in stacks], 4)
                    results.append((us, case))
                    first = c.clone() if first is None else first
                    far = float((c.float() - first.float()).norm() / first.float().norm())
                    if not far < 0.004:
                        say(f"WRONG {n}x{k} {groups} {rows} {name} {case}: {far}")
                results.sort()
                best = ", ".join(f"{each:.1f} {tile}{'w' * whole}" for each, (tile, whole) in results[:5])
                mine = [us for us, (tile, whole) in results if not whole and tile[:4] == tuple(chosen.values())[:4]]
                least = (groups * form.bytes + m * (n + k) * 2) / BYTES * 1e6
                say(
                    f"tune {groups} of {n}x{k}, {rows} each, {name}, bytes {least:.1f}: {best}; chosen "
                    f"{tuple(chosen.values())[:6]} {min(mine, default=0):.1f}"
                )


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


def gathered(tokens_of):
    """Time groups of rows that an index gathers, the rows as they lie, and the copy of them."""
    for (n, k), groups in (((2048, 7168), 8), ((7168, 2048), 8), ((1536, 2048), 64)):
        weights = [torch.randn(groups, n, k, device="cuda").bfloat16() / 8 for _ in range(2)]
        for tokens in tokens_of:
            x = torch.randn(tokens, k, device="cuda").bfloat16() / 8
            index, ends = torch.randint(0, tokens, (tokens,), device="cuda"), uneven(tokens, groups)
            own, rival = partial(gm.grouped_matmul, x, offsets=ends), partial(torch._grouped_mm, offs=ends)
            forms = {
                "gm": partial(own, gather=index),
                "gm bare": own,
                "torch": lambda w, x=x, index=index, rival=rival: rival(x[index], w),
                "torch bare": partial(rival, x),
                "copy": lambda w, x=x, index=index: x[index],
            }
            graphs = [captured([partial(form, w.mT) for w in weights]).replay for form in forms.values()]
            each = dict(zip(forms, (round(t / 2, 1) for t in times(graphs, 5)), strict=True))
            say(json.dumps({"case": f"gather {groups} of {n}x{k} {tokens}", **each}))


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


def codes(rows_of):
    """Time codes of 8 bits by weights of 4, alone and with the launch that makes the codes."""
    for n, k in ((8192, 28672), (14336, 4096), (4096, 14336), (4096, 4096)):
        packed_w = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scales = torch.rand(n, k // 128, device="cuda") / 64 + 1 / 128
        matrix, wide = gm.QuantizedMatrix("int4", packed_w, scales), torch.randn(n, k, device="cuda").bfloat16()
        for kind, rows in itertools.product(("float8_e4m3", "int8"), rows_of):
            x = torch.randn(rows, k, device="cuda").bfloat16()
            made, factors = gm.quantize_rows(x, kind)
            own = partial(gm.matmul, made, matrix, scale_a=factors, dtype="bfloat16")
            both = partial(_quantized, x, kind, matrix)
            ways = own, both, partial(torch.nn.functional.linear, x, wide)
            alone, with_codes, rival = (time_of([call] * 4, 5) for call in ways)
            say(
                f"{kind} {n}x{k}, m={rows}: {alone:.1f} us, {2 * rows * n * k / alone / 1e6:.0f} TFLOP/s, "
                f"{rival / alone:.2f} of bf16 {rival:.1f}; with codes made {with_codes:.1f}, {rival / with_codes:.2f}"
            )


def _quantized(x, kind, matrix):
    """Return a product whose codes are made first."""
    made, factors = gm.quantize_rows(x, kind)
    return gm.matmul(made, matrix, scale_a=factors, dtype="bfloat16")


def main():
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("packed", "tune", "gradients", "factors", "codes", "gathered"))
    parser.add_argument("--groups", default="8,64")
    parser.add_argument("--rows", default="1,4,16,32,64")
    parser.add_argument("--tokens", default="1024,4096,32768")
    options = parser.parse_args()
    groups, rows, tokens = (
        [int(x) for x in text.split(",")] for text in (options.groups, options.rows, options.tokens)
    )
    calls = {"factors": factors, "packed": lambda: packed(groups, rows), "codes": lambda: codes(rows)}
    calls |= {
        "gathered": lambda: gathered(tokens),
        "tune": lambda: tune(groups, rows),
        "gradients": lambda: gradients(tokens, groups),
    }
    calls[options.what]()


if __name__ == "__main__":
    main()
