"""Every rung of the GPU ladder once on small ragged shapes, for compute-sanitizer (see the Makefile).

Operands have no guards: the sanitizer knows where each allocation ends. What C holds before is not initialised.
"""

from __future__ import annotations

import itertools
import sys

from gemmery import dtypes, verify
from gemmery.cuda import driver, simt
from gemmery.ladder.cuda import CUDA
from gpu_operands import allowed, built, matrices, place, problem
from operands import random

SHAPES = [(37, 45, 41), (64, 40, 24), (1, 67, 43), (1, 72, 64)]
LAYOUTS = [("row", "row"), ("row", "col"), ("odd", "padded col")]


def touch(rung, name: str, precision: str = "") -> int:
    """How many problems the rung took; AssertionError where a result is wrong."""
    taken = 0
    for shape, (a_layout, b_layout) in itertools.product(SHAPES, LAYOUTS):
        a, b, c = matrices(shape, name, name, (a_layout, b_layout, "row"), guard=0)
        c.memory = driver.Memory(c.memory.size)  # not initialised
        held = dtypes.get(name).accumulator
        bias = place(random((1, 1, shape[1]), held, 4), held, guard=0)
        kernel = built(rung, problem(a, b, c, "bias+relu", True, precision))
        if kernel is None:
            continue
        row = bias.view()._replace(shape=bias.shape[2:], strides=bias.strides[2:])
        kernel(a.view(), b.view(), c.view(), alpha=0.5, bias=row)
        driver.synchronize()
        options = {"alpha": 0.5, "bias": bias.values[0, 0], "activation": "relu"}
        found = verify.check(c.result(), a.values, b.values, allowed(rung, precision), **options)
        assert found.ok, f"{rung.name} {name} {shape} {a_layout} {b_layout}: {found}"
        taken += 1
    return taken


def main() -> int:
    wanted = sys.argv[1:]
    for rung in CUDA:
        if not wanted or rung.name in wanted:
            counts = {name: touch(rung, name) for name in rung.dtypes}
            counts["tf32"] = touch(rung, "f32", "tf32") if "f32" in rung.dtypes else 0
            print(rung.name, counts, flush=True)  # noqa: T201
            assert any(counts.values()), f"{rung.name} took nothing"
    for layout in ("row", "odd", "col"):
        x, y = (place(random((2, 37, 45), "f16", seed), "f16", layout, guard=0) for seed in (8, 9))
        simt.addition(x.view(), y.view(), y.view())(x.view(), y.view(), y.view())
        driver.synchronize()
        assert (y.result() == x.values + y.values).all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
