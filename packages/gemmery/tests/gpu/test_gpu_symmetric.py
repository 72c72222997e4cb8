"""Products of a matrix with its own transpose on a device: right, and symmetric to the last bit."""

from __future__ import annotations

import pytest

import gemmery as gm
from gemmery.cuda import driver, halved

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())]

# Of the largest sum: 16 bits and their rounding, chains of 24 and of 53 bits, exact integers.
TOLERANCES = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5, "float64": 1e-13, "int8": 0}
SHAPES = ((64, 64), (200, 3000), (1000, 777), (4100, 1030), (5000, 512), (halved.LEAST, halved.DEEP), (8192, 1024))


@pytest.mark.parametrize("transposed_first", [False, True], ids=["a @ a.T", "a.T @ a"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_transpose_of_c_is_c(dtype, shape, transposed_first):
    draw = torch.Generator("cuda").manual_seed(len(dtype) + sum(shape))
    numbers = torch.randn(shape, device="cuda", generator=draw)
    a = (40 * numbers).clamp(-127, 127).to(torch.int8) if dtype == "int8" else numbers.to(getattr(torch, dtype))
    x, y = (a.T, a) if transposed_first else (a, a.T)
    want = x.double() @ y.double()
    for _ in range(2):  # the first call prepares, the second repeats
        c = gm.matmul(x, y, dtype="int32") if dtype == "int8" else gm.matmul(x, y)
        assert torch.equal(c, c.T)
        assert (c.double() - want).abs().max() <= TOLERANCES[dtype] * want.abs().max()


def test_no_element_of_a_large_c_is_left_out():
    a = torch.randn((halved.LEAST, 1024), device="cuda").to(torch.bfloat16)
    c = torch.full((halved.LEAST, halved.LEAST), torch.nan, device="cuda", dtype=torch.bfloat16)
    assert gm.matmul(a, a.T, out=c) is c
    copy = a.clone()  # equal numbers in other memory: no symmetric product
    assert (c.double() - gm.matmul(a, copy.T).double()).abs().max() <= 1e-2 * c.abs().max()
