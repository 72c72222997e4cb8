"""Run the rungs of the GPU ladder on a few small ragged problems, for compute-sanitizer: `make sanitize`.

Operands have no guards: the sanitizer knows where each allocation ends. C is not initialized, but where tensor copies
write it: initcheck does not see those (CUDA 13.0), so there C holds NaN before.

    python tests/shared/sanitized.py --names      the rungs, one a line
    python tests/shared/sanitized.py RUNG ...     run them
"""

from __future__ import annotations

import sys

from gemmery import dtypes, verify
from gemmery.cuda import driver, halved
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gpu_operands import allowed, built, matrices, place, problem
from operands import random

CASES = [
    ((37, 45, 41), ("row", "row")),
    ((37, 45, 41), ("odd", "padded col")),
    ((64, 40, 24), ("row", "row")),
    ((136, 72, 200), ("row", "col")),
    ((20, 24, 41), ("strided", "reversed")),
    ((1, 67, 43), ("row", "col")),
    ((1, 72, 64), ("row", "col")),
]
# Tiles of every eighth row: the first wgmma of a stage has its A from registers in every other one.
APART = [
    ({"bm": 64, "bn": 128, "stages": 4, "cm": 2}, ((1000, 136, 200), ("row", "col"))),
    ({"bm": 64, "bn": 128, "stages": 4, "cm": 2}, ((1000, 136, 104), ("row", "row"))),
    ({"bm": 192, "bn": 192, "stages": 4, "cm": 2}, ((1528, 392, 328), ("row", "col"))),
]
# Tiles of C' = B' A', the last of which overlaps the one above; once by less than its last piece.
SWAPPED = [
    ({"bm": 136, "bn": 128, "stages": 6, "cm": 1}, ((160, 136, 200), ("row", "col"))),
    ({"bm": 112, "bn": 128, "stages": 6, "cm": 1}, ((236, 264, 104), ("row", "row"))),
]


def touch(
    rung, name: str, precision: str = "", finished: bool = False, cases=CASES, batch: int = 2, config=None
) -> int:
    """Return how many problems the rung took; raise AssertionError if a result is wrong."""
    taken = 0
    for shape, layouts in cases:
        a, b, c = matrices(shape, name, name, (*layouts, "row"), batch=batch, guard=0)
        kernel = built(rung, problem(a, b, c, "bias+relu" if finished else "", finished, precision), config)
        if kernel is None:
            continue
        if not any(each.operand == "c" for each in kernel.geometry.maps):
            c.memory = driver.Memory(c.memory.size)  # not initialized
        options, row = {}, None
        if finished:
            held = dtypes.get(name).accumulator
            bias = place(random((1, 1, shape[1]), held, 4), held, guard=0)
            row = bias.view()._replace(shape=bias.shape[2:], strides=bias.strides[2:])
            options = {"alpha": 0.5, "bias": bias.values[0, 0], "activation": "relu"}
        kernel(a.view(), b.view(), c.view(), alpha=options.get("alpha", 1.0), bias=row)
        driver.synchronize()
        found = verify.check(c.result(), a.values, b.values, allowed(rung, precision, name), **options)
        assert found.ok, f"{rung.name} {name} {shape} {layouts}: {found}"
        taken += 1
    return taken


def products(rung) -> int:
    """Yield a problem for each element type, and one with every step of the epilogue."""
    taken = sum(touch(rung, name) for name in rung.dtypes)
    if "f32" in rung.dtypes:
        taken += touch(rung, "f32", "tf32")
    if rung.name == "wgmma_epilogue":
        taken += sum(touch(rung, "bf16", cases=[case], batch=1, config=config) for config, case in APART + SWAPPED)
    return taken + touch(rung, rung.dtypes[0], finished=True)


def sums() -> int:
    """Compute C = A + B in some layouts."""
    for layout in ("row", "odd", "col"):
        x, y = (place(random((2, 37, 45), "f16", seed), "f16", layout, guard=0) for seed in (8, 9))
        halved.addition(x.view(), y.view(), y.view())(x.view(), y.view(), y.view())
        driver.synchronize()
        assert (y.result() == x.values + y.values).all()
    return 3


def main(names: list[str]) -> None:
    if names == ["--names"]:
        print("simt_add", *(rung.name for rung in CUDA), sep="\n")  # noqa: T201
        return
    for name in names:
        taken = sums() if name == "simt_add" else products(find(CUDA, name))
        assert taken, f"{name} took nothing"
        print(f"{name}: {taken} problems", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
