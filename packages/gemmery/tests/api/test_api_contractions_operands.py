"""The operands of tensordot, vecdot and einsum: arrays of every kind and of several types; the kind of the result."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery import arrays
from gemmery.api import contractions, sums_of_products


def test_results_have_the_kind_of_the_operands():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    a, b = torch.randn(2, 5, 3, 8), torch.randn(2, 7, 3, 8)
    result = gm.einsum("bqhd,bkhd->bhqk", a, b)
    assert torch.allclose(result, torch.einsum("bqhd,bkhd->bhqk", a, b), rtol=1e-4, atol=1e-5)
    assert torch.allclose(gm.einsum("bqhd,bkhd->bkqh", a, b.numpy()), result.permute(0, 3, 2, 1), rtol=1e-4, atol=1e-5)
    assert torch.allclose(gm.vecdot(a, a), (a * a).sum(-1), rtol=1e-4, atol=1e-5)
    z = torch.randn(4, 5, dtype=torch.complex64)
    assert torch.allclose(gm.vecdot(z, z.conj()), torch.linalg.vecdot(z, z.conj()), rtol=1e-4, atol=1e-5)
    out = torch.zeros(8, 3, 8, 3).permute(1, 0, 3, 2)
    version = out._version
    assert gm.tensordot(a[:, :2], b[:, :2], ([0, 1], [0, 1]), out=out) is out
    assert out._version > version
    assert torch.allclose(out, torch.tensordot(a[:, :2], b[:, :2], ([0, 1], [0, 1])), rtol=1e-4, atol=1e-5)
    with pytest.raises(gm.LayoutError, match=r"requires grad.*gemmery\.torch"):
        gm.einsum("ij,jk->ik", torch.ones(2, 2, requires_grad=True), torch.ones(2, 2))


def test_lists_buffers_subclasses_and_exporters():
    class Own(np.ndarray):
        pass

    class Exporter:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    a = np.arange(6.0).reshape(2, 3)
    expected = a @ a.T
    for obj in (a.tolist(), Exporter(a), memoryview(a)):
        result = gm.einsum("ij,kj->ki", obj, a)
        assert np.array_equal(np.asarray(result), expected)
        assert isinstance(result, memoryview) == isinstance(obj, memoryview)
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    assert type(gm.tensordot(Exporter(a), torch.from_numpy(a.T), 1)) is np.ndarray
    assert type(gm.tensordot(a, torch.from_numpy(a.T), 1)) is torch.Tensor
    assert type(gm.tensordot(a.view(Own), a.T, 1)) is Own
    half = a.astype(ml_dtypes.bfloat16)
    assert gm.tensordot(half, half.T, 1).dtype == half.dtype
    assert gm.tensordot(memoryview(a.astype("i1")), half.T, 1).dtype == half.dtype  # no memoryview of bfloat16
    assert np.array_equal(gm.vecdot(memoryview(a), a, keepdims=True), np.vecdot(a, a, keepdims=True))
    with pytest.raises(gm.LayoutError, match="masks"):
        gm.vecdot(np.ma.masked_array(a), a)


def test_an_array_on_a_device_without_a_library_is_refused():
    its_view = arrays.View(4096, (2, 2), (8, 4), "f32", "cuda:0")
    with pytest.raises(gm.DeviceError, match=r"cupy\.from_dlpack"):
        sums_of_products.with_transposes(its_view, own=False)


def test_views_of_one_operand_are_views():
    a = np.arange(9.0).reshape(3, 3)
    for expression in ("ij->ji", "ii->i", "i...->...i"):
        result = gm.einsum(expression, a)
        assert np.shares_memory(result, a)
        assert result.flags.writeable
    assert gm.einsum("ii", a) == 12


def test_operands_of_several_types_and_kinds():
    a, b, c = np.full((2, 9), 100, "i1"), np.full((9, 3), 100, "i1"), np.ones((3, 2))
    assert np.array_equal(gm.einsum("ij,jk,kl->il", a, b, c), np.einsum("ij,jk,kl->il", a, b, c))
    for names in (("i1", "u1", "f2"), ("f2", "i1", "u1"), ("u1", "f2", "i1")):
        a, b, c = (np.full(2, 100, name) for name in names)
        assert gm.einsum("a,b,c->abc", a, b, c, optimize=["einsum_path", (0, 1), (0, 1)]).dtype == np.float32
        assert gm.einsum("a,b,c->", a, b, c) == 8e6
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    for expression in ("ij,ij->ij", "ii,ij->j", "ij,kj->j"):
        assert torch.allclose(gm.einsum(expression, x, y), torch.einsum(expression, x, y), rtol=1e-4, atol=1e-5)
    assert torch.allclose(gm.einsum("ij->", x), x.sum(), rtol=1e-4, atol=1e-5)
    out = torch.zeros(3, 3)
    assert gm.einsum("ij,ji->ij", x, y, out=out) is out
    assert torch.allclose(out, x * y.T)
    for expression in ("ij,ij->ij", "ij,kj->j"):
        mixed = gm.einsum(expression, x.numpy(), y)
        assert type(mixed) is torch.Tensor
        assert torch.allclose(mixed, torch.einsum(expression, x, y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("expression", ["ij,jk->k", "ji,j->", "ij,jk->kj", "ji,jk->k"])
def test_an_operand_summed_first_neither_wraps_nor_rounds(expression):
    lengths = {"i": 3000, "j": 4, "k": 3}
    a, b = (np.ones([lengths[letter] for letter in term]) for term in expression.split("->")[0].split(","))
    expected = np.einsum(expression, a, b)
    for x, y in ((a.astype("i1"), b.astype("i8")), (a.astype("?"), b.astype("i4")), (a.astype("f2"), b)):
        result = gm.einsum(expression, x, y)
        assert result.dtype == y.dtype
        assert np.array_equal(result, expected)
    for name in ("f2", ml_dtypes.bfloat16):  # 3000 * 128 is beyond float16
        result = gm.einsum(expression, (a * 128).astype(name), (b / 256).astype(name))
        assert result.dtype == name
        assert np.array_equal(result, (expected / 2).astype(name))
        terms, result_term = expression.split("->")
        named = gm.einsum(expression, (a * 128).astype(name), (b / 256).astype(name), dtype=name)
        assert np.array_equal(named, result)
        several = gm.einsum(f"{terms},->{result_term}", (a * 128).astype(name), (b / 256).astype(name), np.int8(1))
        assert several.dtype == name
        assert np.array_equal(several, result)
    assert type(gm.einsum("i,j->", a[:, 0].astype("f2"), b.ravel().astype("f2"))) is np.float16


@pytest.mark.parametrize("expression", ["ij,jk->k", "ji,jk->k", "ij,ij,jk->k"])
def test_integers_on_a_device_do_not_wrap_where_the_result_would_not(monkeypatch, expression):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setattr(contractions, "viewed", lambda _, x: arrays.view(x)._replace(device="cuda:0"))
    terms = expression.split("->")[0].split(",")
    lengths = {"i": 300 if len(terms) == 2 else 4, "j": 4, "k": 3}
    operands = [torch.full([lengths[z] for z in term], 100, dtype=torch.int8) for term in terms]
    operands[-1] = operands[-1].int()
    expected = np.einsum(expression, *(x.numpy().astype("i4") for x in operands))
    assert np.array_equal(gm.einsum(expression, *operands), expected)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("expression", ["ab,,ab", "ij,kl->ijkl", "ij,kj,kl,l->i", "ii->i", "ij->", "ij,ik->jk"])
def test_a_matrix_of_numpy_is_a_plain_array(expression):
    terms, rng = expression.split("->")[0].split(","), np.random.default_rng(0)
    operands = [rng.integers(-9, 9, (3,) * len(term)).astype("f8") for term in terms]
    matrices = [np.matrix(x) if x.ndim == 2 else x for x in operands]
    result = gm.einsum(expression, *matrices)
    assert not isinstance(result, np.matrix)
    assert np.array_equal(result, np.einsum(expression, *operands))
    m, x = matrices[0], operands[0]
    if expression == "ij,ik->jk":
        assert type(gm.tensordot(m, m, 0)) is type(gm.vecdot(m, m)) is np.ndarray
        assert np.array_equal(gm.vecdot(m, m, axis=0, keepdims=True), [(x * x).sum(0)])
        assert np.array_equal(gm.matmul(m, np.stack([x, x])), np.matmul(x, np.stack([x, x])))
        assert np.array_equal(gm.grouped_matmul(m, x, offsets=[1, 3])[1], x[:, 1:] @ x[1:])


@pytest.mark.parametrize("kind", ["nested", "sparse rows", "sparse", "a size", "a type"])
def test_what_is_no_dense_tensor_of_pytorch_takes_the_long_way(kind):
    """An error of gemmery in words, or NumPy's result: no AttributeError, and none of PyTorch's own."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if kind == "a size":
        x = torch.Size([1, 2, 3])
        assert [gm.vecdot(x, x), gm.tensordot(x, x, 1), gm.einsum("i,i->", x, x)] == [14, 14, 14]
        return
    x = {
        "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
        "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
        "sparse": lambda: torch.eye(3).to_sparse(),
        "a type": lambda: torch.float32,
    }[kind]()
    for call in (lambda: gm.vecdot(x, x), lambda: gm.tensordot(x, x, 1), lambda: gm.einsum("ij,jk->ik", x, x)):
        with pytest.raises(gm.GemmeryError):
            call()
