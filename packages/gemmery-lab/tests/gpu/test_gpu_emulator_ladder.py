"""The same products on a GPU and on the emulator: equal bytes of C."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery import dtypes
from gemmery.cuda import driver
from gemmery.ladder.cuda import CUDA
from gemmery_lab.emulated_product import EmulationOptions, Gemm, run_rung
from gemmery_lab.emulated_product import problem_of as problem_on
from gpu_operands import built, matrices, needed, problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())]

EVERY = [pytest.param(rung, name, id=f"{rung.name}-{name}") for rung in CUDA for name in rung.dtypes]
SHAPES = [(1, 1, 1), (17, 19, 23), (64, 64, 64), (65, 127, 63), (136, 200, 72), (130, 72, 264)]
SMALL = [(5, 3, 0), (11, 23, 35), (31, 33, 32), (32, 32, 32), (24, 40, 48)]  # for the rung of one block
VECTORS = [(1, 7, 0), (1, 259, 129), (259, 1, 129), (1, 256, 128), (128, 1, 200)]
LAYOUTS = [("row", "row", "row"), ("row", "col", "row"), ("col", "row", "col")]


@pytest.mark.parametrize(("rung", "name"), EVERY)
def test_a_product_is_the_gpus(rung, name):
    """Bit for bit."""
    taken = [both(rung, name, shape, layouts) for shape in [*SHAPES, *SMALL, *VECTORS] for layouts in LAYOUTS]
    assert any(taken)


def both(rung, name, shape, layouts):
    """Multiply twice and compare; return False if the rung refuses."""
    a, b, c = matrices(shape, name, "int32" if name == "int8" else dtypes.written(name), layouts)
    precision = needed(rung, name)
    kernel = built(rung, problem(a, b, c, precision=precision))
    if kernel is None:
        return False
    kernel(a.view(), b.view(), c.view())
    driver.synchronize()
    theirs = c.result()
    ours = c.values.copy(order="K")
    given = Gemm(a.values, b.values, ours)
    case = problem_on(given, name, c.name, "h200", precision=precision)
    run_rung(rung, case, {}, given, EmulationOptions(driver.device().arch))
    assert theirs.tobytes() == ours.tobytes(), f"{case}: {np.argwhere(theirs != ours)[:3]}"
    return True
