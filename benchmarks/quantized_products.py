"""Time products by weights of few bits on a CUDA device, beside PyTorch's linear layer in bfloat16 in the same process.

    python benchmarks/quantized_products.py tune --shapes 8192x28672 --rows 1,16,64 --kinds int4/128,int8/0 --to times

A shape is out_features x in_features; a kind names codes, columns of a group and, if another, the type of x. Launches
are in CUDA graphs, and weights take turns that together exceed 200 MB. `check` compares values with float64, `table`
times the model's choice, `tune` other variants too, `random` 4-bit weights of random sizes, as `tune --shapes random`
does; `layers` checks QuantizedLinear in graphs and compiled. Each product is a line of JSON in the file `--to`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from graph_times import captured, say, times, turns

import gemmery.torch
from gemmery.arrays import View
from gemmery.cuda import nvrtc, ordered, weights
from gemmery.cuda.choose.variants import QUANTIZED, stages, suits
from gemmery.cuda.device import KNOWN
from gemmery.cuda.weights import Format, arrange, problem_of
from gemmery.errors import CompileError, RefusedError
from gemmery.ladder.cuda import BY_WEIGHTS
from gemmery.torch import arranged as by_torch
from gemmery.torch.quantization import dequantize

RUNG = BY_WEIGHTS[0]
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
ROUNDOFF = {"bf16": 2.0**-8, "f16": 2.0**-11}
SHAPES = "8192x28672,14336x4096,4096x4096,28672x8192,4096x14336"
ROWS = "1,4,16,32,64,128,256,512"
CHECKED = "int4/128,int4_close/32,int4/64,int4/32,int4_zeros/128,int4_zeros/32,int8/0,int8/128,int8/32,e4m3/0"
FLOAT4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
NAMES = dict(zip("ngbwsrx", ("tokens", "warpgroups", "blocks", "ways", "stages", "resident", "splits"), strict=True))


def multiply(x, whole, form, bias, activation):
    """Return activation(x W' + bias) for an arranged weight, as layers compute it."""
    result = by_torch._product(x, whole, form, bias, activation)
    if result is None:
        raise RefusedError(f"no kernel multiplies {tuple(x.shape)} by {form}")
    return result


def logical(form, seed=0):
    """Return codes, factors, zero points, factors of rows, and the weight in float32, rounded once to its type."""
    torch.manual_seed(seed)
    n, k = form.n, form.k
    codes = torch.randint(0, 2 ** weights.KINDS[form.kind], (n, k), dtype=torch.uint8, device="cuda")
    scales = zeros = rows = None
    if form.kind == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
        levels = codes.view(torch.float8_e4m3fn).float()
    elif form.kind == "e2m1":
        levels = torch.tensor(FLOAT4, device="cuda")[(codes & 7).long()] * (1 - 2.0 * (codes >> 3))
    else:
        levels = codes.view(torch.int8).float() if form.kind == "int8" else codes.float()
    if not form.group:
        rows = torch.rand(n, device="cuda") / 64 + 1 / 128
        return codes, None, None, rows, levels * rows[:, None]
    scales = (torch.rand(n, k // form.group, device="cuda") / 64 + 1 / 128).to(TYPES[form.dtype])
    if form.kind == "int4_zeros":
        zeros = torch.randint(0, 17, scales.shape, dtype=torch.uint8, device="cuda")
        levels -= zeros.repeat_interleave(form.group, 1)
    elif form.kind in ("int4", "int4_close"):
        levels -= 8
    w = (levels * scales.float().repeat_interleave(form.group, 1)).to(TYPES[form.dtype]).float()
    return codes, scales.view(torch.int16), zeros, rows, w


def launch(x, form, c, config, invariant=False):
    """Return a function of an arranged weight that puts a variant on the current stream, and its name."""
    where = f"cuda:{x.get_device()}"
    of_x, of_c = (View(0, tuple(z.shape), (z.stride(0) * 2, 2), form.dtype, where) for z in (x, c))
    problem = problem_of(of_x, form, of_c, invariant=invariant)
    of_w = View(0, (form.k, form.n), (2, 2 * form.k), form.dtype)
    each = (View(0, (1, *z.shape), (0, *z.strides), z.dtype) for z in (of_x, of_w, of_c))
    ready = RUNG.build(problem, {**RUNG.default, **config}).ready(*each)
    scratch = torch.empty(max(16, ready.workspace), dtype=torch.uint8, device="cuda")

    def run(arranged):
        stream = torch.cuda.current_stream().cuda_stream
        extra = (0, 0, ordered.counters(ready.counters, stream, x.get_device())) if ready.counters else ()
        ready(x.data_ptr(), arranged.data_ptr(), c.data_ptr(), stream, 0, scratch.data_ptr(), None, extra)

    chosen = RUNG.resolve(problem, {**RUNG.default, **config})
    name = "".join(f"{letter}{chosen[key]}" for letter, key in NAMES.items())
    name += f"t{chosen['turns']}" * (chosen["turns"] > 1) + f"p{chosen['shares']}" * (chosen["shares"] > 1)
    return run, name + f"@{chosen['runs']}" * bool(chosen["runs"]) + "late" * chosen["late"]


def copies(make, size, least):
    """Return so many weights of this many bytes that no cache holds them."""
    first = make()
    return [first, *(first.clone() for _ in range(turns(size, least) - 1))]


def arranged_copies(form):
    """Return copies of an arranged weight."""
    return copies(lambda: arrange(form, *logical(form)[:4]), form.bytes, 1)


def variants(m, form):
    """Return the configs that the model compares."""
    device = KNOWN["h200"]
    for tile in QUANTIZED:
        for splits in (0, 1, 2, 4, 8):
            if suits(m, form, tile, splits, device):
                runs = 0 if splits else device.sms * tile.resident
                depth = stages(form, tile, not splits)
                yield {**tile._asdict(), "stages": depth, "splits": splits or 1, "runs": runs}


def measure(form, m, packed, plain, tune):
    """Return the times in us: of PyTorch, the model's choice, the one with the same bits for any m, and others."""
    x = torch.randn(m, form.k, device="cuda").to(TYPES[form.dtype])
    c, y = torch.empty(m, form.n, device="cuda", dtype=x.dtype), x.bfloat16()
    calls = {"torch": [lambda w=w: torch.nn.functional.linear(y, w) for w in plain]}
    for config in ({}, None, *(({"late": 1}, *variants(m, form)) if tune else ())):
        try:
            run, name = launch(x, form, c, config or {}, config is None)
        except (CompileError, RefusedError):
            continue
        calls.setdefault("invariant" if config is None else name, [lambda w=w, run=run: run(w) for w in packed])
    calls = {name: each * math.ceil(8 / len(each)) for name, each in calls.items()}
    measured = times([captured(each).replay for each in calls.values()], 5)
    return {name: us / len(each) for (name, each), us in zip(calls.items(), measured, strict=True)}


def check():
    """Compare values of many shapes and formats with float64; twice, and of another variant between guards."""
    rng, cases = random.Random(1), []
    for kind in [*CHECKED.split(","), "e2m1/32", "e2m1/16"] * 6:
        name, group = kind.split("/")
        k = rng.choice((1, 3, 8, 16, 17, 33)) * max(int(group), 64)
        k = k if rng.random() < 0.6 else rng.randrange(1, 9) * max(int(group), 8)
        n, m = rng.choice((1, 7, 64, 129, 255, 512, 1000, 4096)), rng.choice((1, 2, 7, 16, 31, 64, 65, 100, 200, 513))
        form = Format(n, k, name, int(group), "f16" if name == "int4_close" else rng.choice(("bf16", "f16")))
        cases.append((form, m, rng.choice(list(variants(m, form)))))
    keys = [key for form, m, other in cases for key in (kernel(form, m, {}, "bias+relu"), kernel(form, m, other, ""))]
    compile_all(keys)
    wrong = 0
    for seed, (form, m, other) in enumerate(cases):
        *parts, w = logical(form, seed)
        whole, x = arrange(form, *parts), torch.randn(m, form.k, device="cuda").to(TYPES[form.dtype])
        bias = torch.randn(form.n, device="cuda")
        exact, size = x.double() @ w.double().t(), x.double().abs() @ w.double().abs().t() + bias.abs()
        y, again = (multiply(x, whole, form, bias, "relu") for _ in range(2))
        around = torch.full((m + 2, form.n), 7.0, device="cuda", dtype=x.dtype)
        run, name = launch(x, form, around[1:-1], other)
        run(whole)
        run(whole)
        pairs = (y, (exact + bias).relu()), (around[1:-1], exact)
        limit = 2.0**-15 * size
        right = [((z.double() - e).abs() <= ROUNDOFF[form.dtype] * e.abs() + limit).all().item() for z, e in pairs]
        if not (all(right) and torch.equal(y, again) and (around[[0, -1]] == 7).all().item()):
            wrong += 1
            say(f"WRONG {form} {m} {name} {right}")
    for n, k in ((4096, 4096), (14336, 4096), (2112, 1856), (4096, 14336)):
        form = Format(n, k, "int4", 64, "bf16")
        whole, x = arrange(form, *logical(form)[:3]), torch.randn(513, k, device="cuda").bfloat16()
        rows = []
        for m in (513, 1, 7, 16, 33, 64, 100, 128, 200, 256, 300):
            rows.append(torch.empty(m, n, device="cuda", dtype=x.dtype))
            launch(x[:m], form, rows[-1], {}, True)[0](whole)
        same = [bool(torch.equal(y, rows[0][: len(y)])) for y in rows]
        wrong += not all(same)
        say(f"{n}x{k}: rows of invariant products have the same bits: {same}")
    say(f"check: {len(cases)} cases, {wrong} wrong")


def layers():
    """Check QuantizedLinear plainly, in a CUDA graph, after a change of its weight, and compiled."""
    torch.manual_seed(0)
    for bits, group, m in ((4, 128, 1), (4, 32, 16), (8, 128, 200), (4, 64, 1500)):
        model = torch.nn.Sequential(torch.nn.Linear(4096, 6144, device="cuda", dtype=torch.bfloat16))
        gemmery.torch.replace_linear(model, bits=bits, group=group)
        layer, x = model[0], torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
        with torch.inference_mode():
            for _ in range(2):
                weight = dequantize(layer.packed, layer.scales, bits, torch.bfloat16)
                exact = x.double() @ weight.double().t() + layer.bias.double()
                limit = 2.0**-8 * exact.abs() + 2.0**-14 * (x.double().abs() @ weight.double().abs().t())
                y, graph = model(x), torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    z = model(x), model(x)
                graph.replay()
                graph.replay()
                torch.cuda.synchronize()
                right = bool(((y.double() - exact).abs() <= limit).all())
                same = all(torch.equal(y, each) for each in z)
                say(f"layer {bits}/{group} m={m}: right {right}, graph {same}")
                layer.load_state_dict({"weight": -weight, "bias": layer.bias})
            y, z = torch.compile(model)(x), model(x)
            far = float((y.float() - z.float()).abs().max())
            say(f"compiled {torch.equal(y, z)}, at most {far} of {float(z.abs().max())} apart")


def kernel(form, m, config, epilogue="", invariant=False):
    """Return the source and the instance of a variant."""
    x, c = (View(0, (m, side), (2 * side, 2), form.dtype, "h200") for side in (form.k, form.n))
    geometry = RUNG.geometry(problem_of(x, form, c, epilogue, invariant), {**RUNG.default, **config})
    return geometry.source, geometry.kernel


def compile_all(keys):
    """Compile kernels in processes of their own, into the cache."""
    with ProcessPoolExecutor() as pool:
        list(pool.map(compile_one, sorted(set(keys))))


def compile_one(key):
    """Compile one; what the compiler has against it comes when it is launched."""
    try:
        nvrtc.code(*key, "sm_90a")
    except CompileError as error:
        say(str(error)[:300])


def cases_of(args):
    """Return formats and numbers of rows."""
    if "random" in (args.what, args.shapes):
        rng = random.Random(45)
        sides = [(64 * rng.randrange(8, 257), 64 * rng.randrange(8, 257)) for _ in range(args.count)]
        return [(Format(*side, "int4", 64, "bf16"), int(2 ** rng.uniform(0, 9.01))) for side in sides]
    kinds = [(*each.split("/"), "bf16")[:3] for each in args.kinds.split(",")]
    shapes = [tuple(map(int, each.split("x"))) for each in args.shapes.split(",")]
    forms = [Format(*shape, kind, int(group), dtype) for shape in shapes for kind, group, dtype in kinds]
    return [(form, m) for form in forms for m in map(int, args.rows.split(","))]


def timed(args):
    """Time products, print them, and add them to a file."""
    cases, tune, before, ratios = cases_of(args), args.what == "tune", None, []
    keys = [kernel(form, m, {}, invariant=invariant) for form, m in cases for invariant in (False, True)]
    if tune:
        for form, m in cases:
            for config in variants(m, form):
                try:
                    keys.append(kernel(form, m, config))
                except RefusedError:
                    continue
    compile_all(keys)
    for form, m in cases:
        if before is None or before[:2] != form[:2]:
            plain = copies(
                lambda of=form: torch.randn(of.n, of.k, device="cuda").bfloat16() / 64, 2 * form.n * form.k, 2
            )
        if before != form:
            packed, before = arranged_copies(form), form
        us = measure(form, m, packed, plain, tune)
        (_, rival), (name, own), *_ = us.items()
        best = min((key for key in us if key not in ("torch", "invariant")), key=us.get)
        ratios.append(rival / own)
        what = f"{form.n}x{form.k} {form.kind}/{form.group} {form.dtype} m={m}"
        also = f", invariant {us['invariant']:.1f}, best {best} {us[best]:.1f}"
        say(f"{what}: torch {rival:.1f}, {name} {own:.1f} = {ratios[-1]:.2f}{also}")
        if args.to:
            with Path(args.to).open("a") as file:
                file.write(json.dumps({**form._asdict(), "m": m, "us": us}) + "\n")
    mean = statistics.geometric_mean(ratios)
    say(f"{len(ratios)} ratios: least {min(ratios):.3f}, geometric mean {mean:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("check", "table", "tune", "random", "layers"))
    parser.add_argument("--to", default="")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--kinds", default="int4/128")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--count", type=int, default=120)
    asked = parser.parse_args()
    {"check": check, "layers": layers}.get(asked.what, lambda: timed(asked))()
