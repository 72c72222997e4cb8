"""Products of complex32: shapes, values against complex128, and what is refused."""

import warnings

import pytest

torch = pytest.importorskip("torch")

import gemmery as gm  # noqa: E402
from gemmery.errors import ArgumentError, DTypeError, ShapeError  # noqa: E402


def halves(*shape):
    torch.manual_seed(sum(shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls complex32 experimental
        return torch.complex(torch.randn(shape), torch.randn(shape)).to(torch.complex32)


SHAPES = [((5, 7), (7, 3)), ((7,), (7, 3)), ((5, 7), (7,)), ((7,), (7,)), ((2, 1, 5, 7), (3, 7, 4)), ((5, 0), (0, 3))]


@pytest.mark.parametrize(("first", "second"), SHAPES)
@pytest.mark.parametrize("dtype", [None, "complex64"])
def test_values(first, second, dtype):
    a, b = halves(*first), halves(*second)
    expected = a.to(torch.complex128) @ b.to(torch.complex128)
    size = a.to(torch.complex128).abs() @ b.to(torch.complex128).abs()
    result = gm.matmul(a, b, dtype=dtype)
    assert result.dtype is (torch.complex32 if dtype is None else torch.complex64)
    assert result.shape == expected.shape
    bound = 2 * a.shape[-1] * 2.0**-24 * size + (2.0**-10 * expected.abs() + 2.0**-24 if dtype is None else 1e-12)
    assert bool(((result.to(torch.complex128) - expected).abs() <= bound).all())


def test_conjugates_views_and_an_out():
    a, out = halves(4, 6), torch.empty(6, 6, dtype=torch.complex32)
    assert gm.matmul(a.mH, a, out=out) is out
    wide = a.to(torch.complex128)
    assert (out.to(torch.complex128) - wide.mH @ wide).abs().max() <= 2e-2
    copied = gm.matmul(a.mH.resolve_conj().contiguous(), a)
    assert torch.equal(torch.view_as_real(copied), torch.view_as_real(out))


def test_what_is_refused():
    a = halves(4, 6)
    with pytest.raises(DTypeError, match="convert both"):
        gm.matmul(a, a.mT.to(torch.complex64))
    with pytest.raises(ArgumentError, match="bias= does not apply"):
        gm.matmul(a, a.mT, bias=1.0)
    with pytest.raises(DTypeError, match="complex32 or complex64"):
        gm.matmul(a, a.mT, dtype="float32")
    with pytest.raises(ShapeError, match="is 6, but"):
        gm.matmul(a, a)
    with pytest.raises(ShapeError, match="out is"):
        gm.matmul(a, a.mT, out=torch.empty(3, 4, dtype=torch.complex32))
    with pytest.raises(DTypeError, match="complex32"):
        gm.gemm(1.0, a, a.mT)
