"""Time products with functions in their epilogue on a CUDA device, beside PyTorch's in the same process.

    python benchmarks/epilogues.py --cases swiglu,gelu,residual,outputs,codes,plain --to times.jsonl

Launches are in CUDA graphs, and operands take turns that together exceed 200 MB. Times of a case are medians of replays
that take turns: `gm` is ours, `bare` our plain product (of two weights two of them), `compiled` torch.compile's form,
`eager` PyTorch's. Each case is a line of JSON with microseconds.
"""

from __future__ import annotations

import argparse
import json

import torch
from graph_times import captured, say, times, turns
from torch.nn import functional

import gemmery as gm
import gemmery.torch
from gemmery.api import device_call, finished_on_device
from gemmery.cuda import choose

DECODE = (1, 4, 16, 64)


def normal(*shape):
    """Return normal numbers in bfloat16."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 8


def compiled(function):
    """Return a function by torch.compile for its exact shapes; None where that is not there."""
    try:
        return torch.compile(function, dynamic=False)
    except RuntimeError:
        return None


def write(line, file):
    """Print a case, and append it to a file if there is one."""
    say(json.dumps(line))
    if file:
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(f"{json.dumps(line)}\n")


def measure(name, forms, operands, rounds, file):
    """Time forms, functions of a set of operands by name, and say so."""
    graphs, names = [], []
    for label, form in forms.items():
        try:
            graphs.append(captured([lambda x=x, form=form: form(*x) for x in operands]).replay)
            names.append(label)
        except Exception as error:  # a form that PyTorch or the device refuses is left out
            say(f"{name} {label}: {type(error).__name__}: {str(error)[:300]}")
    medians = [each / len(operands) for each in times(graphs, rounds)]
    write({"case": name, **{label: round(each, 2) for label, each in zip(names, medians, strict=True)}}, file)


gelu_of = gm.epilogue(lambda c, b: gm.gelu(c + b))
residual_of = gm.epilogue(lambda c, r, s: r + s * c)
outputs_of = gm.epilogue(lambda c, b: (gm.gelu(c + b), c + b))
swiglu = gm.epilogue(lambda c, d: gm.silu(c) * d)


@gm.epilogue
def codes_of(c):
    """Codes of e4m3 and a factor for each row."""
    top = gm.row_maximum(gm.maximum(c, -c)) / 448.0
    return gm.cast(c / top, "float8_e4m3"), top


def plain_cases(n, rounds, file, wanted):
    """Products of n x n x n."""
    count = turns(3 * 2 * n * n, 4)
    operands = [(normal(n, n), normal(n, n), normal(n), normal(n, n)) for _ in range(count)]

    def bare(x, w, b, r):
        return gm.matmul(x, w.T)

    cases = {
        "plain": {"gm": lambda x, w, b, r: gm.matmul(x, w.T, epilogue=lambda_of), "bare": bare,
                  "eager": lambda x, w, b, r: x @ w.T},
        "gelu": {"gm": lambda x, w, b, r: gm.matmul(x, w.T, epilogue=gelu_of(b=b)), "bare": bare,
                 "option": lambda x, w, b, r: gm.matmul(x, w.T, bias=b, activation="gelu"),
                 "compiled": compiled(lambda x, w, b, r: functional.gelu(functional.linear(x, w, b)))},
        "residual": {"gm": lambda x, w, b, r: gm.matmul(x, w.T, epilogue=residual_of(r=r, s=0.5)), "bare": bare,
                     "compiled": compiled(lambda x, w, b, r: r + 0.5 * functional.linear(x, w))},
        "outputs": {"gm": lambda x, w, b, r: gm.matmul(x, w.T, epilogue=outputs_of(b=b)), "bare": bare,
                    "compiled": compiled(lambda x, w, b, r: outputs_in_torch(functional.linear(x, w, b)))},
        "codes": {"gm": lambda x, w, b, r: gm.matmul(x, w.T, epilogue=codes_of), "bare": bare},
    }  # fmt: skip
    for name, forms in cases.items():
        if name in wanted:
            measure(f"{name} {n}", {key: form for key, form in forms.items() if form}, operands, rounds, file)


def parts(n, rounds, file):
    """What a residual and a second output cost, in parts: arithmetic, code on a row that caches hold, and bytes."""
    operands = [(normal(n, n), normal(n, n), normal(n), normal(n, n)) for _ in range(turns(3 * 2 * n * n, 4))]
    same, wide = operands[0][3], torch.randn(n, n, device="cuda")
    functions = {
        "traced c": lambda b, r: lambda_of,
        "row": lambda b, r: residual_of(r=b, s=0.5),
        "same row, matrix": lambda b, r: residual_of(r=b[None].expand(n, n), s=0.5),
        "f32 matrix": lambda b, r: residual_of(r=wide, s=0.5),
        "one r": lambda b, r: residual_of(r=same, s=0.5),
        "matrix": lambda b, r: residual_of(r=r, s=0.5),
        "two, plain": lambda b, r: pair_of,
        "gelu b": lambda b, r: gelu_of(b=b),
        "gelu": lambda b, r: plain_gelu,
        "two, gelu": lambda b, r: outputs_of(b=b),
    }
    forms = {"bare": lambda x, w, b, r: gm.matmul(x, w.T)}
    for name, of in functions.items():
        forms[name] = lambda x, w, b, r, of=of: gm.matmul(x, w.T, epilogue=of(b, r))
    measure("parts", forms, operands, rounds, file)


lambda_of = gm.epilogue(lambda c: c * 1.0)
pair_of = gm.epilogue(lambda c: (c * 2.0, c))
plain_gelu = gm.epilogue(gm.gelu)


def outputs_in_torch(c):
    """Return gelu of the sums, and the sums."""
    return functional.gelu(c), c


def rows(sizes, rounds, file):
    """Codes of e4m3 and a factor for each row, by blocks that exchange numbers of rows, and by a pass over sums."""
    quantized = gm.quantize_rows("float8_e4m3")

    def own(x, w):
        return gm.matmul(x, w.T, epilogue=quantized)

    def passed(x, w):
        before, finished_on_device.MANY_EXCHANGED = finished_on_device.MANY_EXCHANGED, 1 << 60
        try:
            device_call.table.launches.clear()
            device_call.table.calls.clear()
            return own(x, w)
        finally:
            finished_on_device.MANY_EXCHANGED = before
            device_call.table.launches.clear()
            device_call.table.calls.clear()

    for m, n, k in sizes:
        operands = [(normal(m, k), normal(n, k)) for _ in range(turns(2 * (m * k + n * k + m * n), 4))]
        forms = {"bare": lambda x, w: gm.matmul(x, w.T), "gm": own, "two launches": passed}
        measure(f"rows {m} x {n} x {k}", forms, operands, rounds, file)


def swiglu_cases(rows, n, k, rounds, file, transposed):
    """Two weights of n x k, or of k x n."""
    for m in rows:

        def make(m=m):
            w = [normal(n, k).T if transposed else normal(k, n) for _ in range(2)]
            return normal(m, k), *w

        operands = [make() for _ in range(turns(4 * n * k, 4))]
        forms = {
            "gm": lambda x, g, u: gm.matmul(x, (g, u), epilogue=swiglu),
            "bare": lambda x, g, u: (gm.matmul(x, g), gm.matmul(x, u)),
            "compiled": compiled(lambda x, g, u: functional.silu(x @ g) * (x @ u)),
            "eager": lambda x, g, u: functional.silu(x @ g) * (x @ u),
        }
        measure(f"swiglu {m} x {n} x {k} {'T' if transposed else 'N'}", forms, operands, rounds, file)


def tuned(tile, call):
    """Return a function that runs a product with this tile, band and grid, from its first run on."""

    def run(*operands):
        before = choose.traced_choices
        twice = choose.Instance(*tile[:5]) in choose.PAIRED_TWICE.values()
        choose.traced_choices = lambda problem, device: dict(
            zip(choose.KEYS, (*tile, 1, twice * 2 * device.sms), strict=True)
        )
        device_call.table.launches.clear()
        try:
            return call(*operands)
        finally:
            choose.traced_choices = before

    return run


def tune(rows, n, k, rounds, file):
    """Two weights of n x k by tiles of other sizes."""
    few = [(8, 64, 12), (8, 112, 6), (8, 128, 8), (64, 64, 12), (64, 112, 4), (64, 128, 8), (64, 224, 5), (64, 256, 4)]
    large = [(128, 256, 4), (256, 128, 4), (128, 192, 4), (128, 128, 6), (128, 128, 4)]
    for m in rows:
        operands = [(normal(m, k), normal(n, k).T, normal(n, k).T) for _ in range(turns(4 * n * k, 4))]

        def call(x, g, u):
            return gm.matmul(x, (g, u), epilogue=swiglu)

        forms = {}
        for tile in large if m > 512 else [each for each in few if m <= each[0]]:
            for cn in (1, 2) if m > 512 else (1,):
                forms[f"{tile} {cn}"] = tuned((*tile, 1, cn, 8), call)
        forms["chosen"] = call
        measure(f"tune {m}", forms, operands, rounds, file)


def training(m, n, k, rounds, file):
    """A linear layer with gelu, forward and backward, launched one after the other."""
    layer = gemmery.torch.fused(lambda c, bias: gm.gelu(c + bias))
    bias = normal(n).requires_grad_()
    x, weight, grad = normal(m, k).requires_grad_(), normal(n, k).requires_grad_(), normal(m, n)
    forms = {
        "gm": lambda: layer(x, weight.T, bias=bias),
        "compiled": compiled(lambda: functional.gelu(functional.linear(x, weight, bias))),
        "eager": lambda: functional.gelu(functional.linear(x, weight, bias)),
    }
    steps = {}
    for label, form in forms.items():

        def step(form=form):
            x.grad = weight.grad = bias.grad = None
            form().backward(grad)

        try:
            for _ in range(3):
                step()
        except Exception as error:
            say(f"training {label}: {type(error).__name__}: {str(error)[:300]}")
            continue
        steps[label] = lambda step=step: [step() for _ in range(8)]
    medians = times(list(steps.values()), rounds, warm=False)
    line = {label: round(each / 8, 2) for label, each in zip(steps, medians, strict=True)}
    write({"case": f"training {m} x {n} x {k}", **line}, file)


def main():
    """Run the cases that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="plain,gelu,residual,outputs,codes,training,swiglu")
    parser.add_argument("--rows", default=",".join(map(str, (*DECODE, 4096))))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--to", default="")
    args = parser.parse_args()
    wanted = args.cases.split(",")
    plain_cases(4096, args.rounds, args.to, wanted)
    if "parts" in wanted:
        parts(4096, args.rounds, args.to)
    if "rows" in wanted:
        rows([(4096, 4096, 4096), (2048, 4096, 4096)], args.rounds, args.to)
    if "tune" in wanted:
        tune([int(m) for m in args.rows.split(",")], 14336, 4096, args.rounds, args.to)
    if "training" in wanted:
        training(8192, 4096, 4096, args.rounds, args.to)
    if "swiglu" in wanted:
        swiglu_cases([int(m) for m in args.rows.split(",")], 14336, 4096, args.rounds, args.to, True)


if __name__ == "__main__":
    main()
