"""The promise about bits: a kernel compiled for one shape gives those of the kernel for every shape."""

import numpy as np
import pytest

import gemmery as gm
from gemmery import arrays, dispatch, dtypes, tiers
from gemmery_lab.measure.work import Work, operands


@pytest.mark.many(5)
@pytest.mark.parametrize("shape", [(3, 3, 3), (16, 7, 12), (1, 9, 4)], ids=str)
@pytest.mark.parametrize("name", [name for name in dtypes.NAMES if name != "bf16"])
def test_a_kernel_for_one_shape_has_the_bits_of_the_one_for_every_shape(name, shape):
    """docs/promises.md excepts bfloat16, and products of a matrix and one column."""
    work = Work(*shape, name, name, batch=9)
    a, b, general = operands(work)
    special = general.copy()
    plan = dispatch.specialized(work.problem)
    assert plan is not None
    for kernel, c in ((plan.kernel, special), (dispatch.plan(work.problem).kernel, general)):
        kernel(*map(arrays.view, (a, b, c)))
    assert special.tobytes() == general.tobytes()


@pytest.mark.parametrize("shape", [(8, 8), (9, 3, 3)], ids=str)
def test_the_bits_stay_when_a_kernel_for_the_shape_arrives(shape):
    a = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    first = gm.matmul(*a).tobytes()
    seen = {gm.matmul(*a).tobytes() for _ in range(200)}
    tiers.wait()
    assert seen | {gm.matmul(*a).tobytes() for _ in range(3)} == {first}
