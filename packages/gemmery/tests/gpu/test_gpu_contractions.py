"""tensordot, vecdot and einsum of PyTorch's and CuPy's arrays on a CUDA device, against float64."""

from __future__ import annotations

import numpy as np
import pytest

import gemmery as gm
from gemmery.cuda import driver

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())]

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


def numbers(torch, shape, name, seed):
    torch.manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, device="cuda").to(getattr(torch, name))


def check(result, expression, a, b, k):
    """Compare within (2 k + 8) u |A| |B| and one rounding."""
    name = str(result.dtype).removeprefix("torch.")
    x, y, z = (array.double().cpu().numpy() for array in (a, b, result))
    expected, size = np.einsum(expression, x, y), np.einsum(expression, np.abs(x), np.abs(y))
    sums = min(ROUNDOFF[name], ROUNDOFF["float32"])
    assert result.is_cuda
    assert z.shape == expected.shape
    bound = (2 * k + 8) * sums * size + 2 * ROUNDOFF[name] * np.abs(expected) + 2.0**-24 * (name == "float16")
    assert (np.abs(z - expected) <= bound).all()


@pytest.mark.parametrize("name", ROUNDOFF)
def test_contractions_of_tensors(torch, name):
    q, k = numbers(torch, (2, 50, 3, 64), name, 1), numbers(torch, (2, 70, 3, 64), name, 2)
    check(gm.einsum("bqhd,bkhd->bhqk", q, k), "bqhd,bkhd->bhqk", q, k, 64)
    p = numbers(torch, (2, 3, 50, 70), name, 3)
    result = gm.einsum("bhqk,bkhd->bqhd", p, k)
    check(result, "bhqk,bkhd->bqhd", p, k, 70)
    assert result.is_contiguous()
    out = torch.empty(70, 2, 50, 3, dtype=q.dtype, device="cuda").permute(1, 3, 2, 0)
    assert gm.einsum("bqhd,bkhd->bhqk", q, k, out=out) is out
    check(out, "bqhd,bkhd->bhqk", q, k, 64)
    check(gm.tensordot(q, k, ([0, 3], [0, 3])), "bqhd,bkid->qhki", q, k, 128)
    check(gm.vecdot(q, q), "bqhd,bqhd->bqh", q, q, 64)
    check(gm.vecdot(q, k[0, 0, 0]), "bqhd,d->bqh", q, k[0, 0, 0], 64)


def test_whole_numbers_and_operands_of_two_devices(torch):
    whole = torch.arange(9, dtype=torch.int32, device="cuda").reshape(3, 3)
    assert torch.equal(gm.einsum("ij,jk->ki", whole, whole).cpu(), (whole.cpu() @ whole.cpu()).T)
    with pytest.raises(gm.DeviceError, match="all operands must be on one device"):
        gm.einsum("ij,jk->ik", whole.float(), torch.ones(3, 3))


def test_arrays_of_cupy():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    a, b = cupy.arange(24.0).reshape(2, 3, 4), cupy.arange(60.0).reshape(4, 3, 5)
    result = gm.einsum("abc,cbd->da", a, b)
    assert type(result) is cupy.ndarray
    assert np.array_equal(cupy.asnumpy(result), np.einsum("abc,cbd->da", cupy.asnumpy(a), cupy.asnumpy(b)))
