"""Arrays of other libraries: results have the kind of the operands, and memory is read and written in place."""

from __future__ import annotations

import array
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery import arrays
from gemmery.arrays import dlpack, view
from operands import random

DTYPES = ["float64", "float32", "float16", "bfloat16", "complex64", "complex128", "int8", "int16", "int32", "int64",
          "uint8", "uint16", "uint32", "uint64"]  # fmt: skip


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


def pair(name, shape_a=(5, 7), shape_b=(7, 4)):
    short = name.replace("bfloat", "bf").replace("float", "f")
    return random(shape_a, short, 1), random(shape_b, short, 2)


def tensor(torch, x):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def numbers(x):
    """The bits of a tensor or array."""
    if type(x).__module__.startswith("torch"):
        x = x.detach().contiguous()
        return x.flatten().view(sys.modules["torch"].uint8).numpy().tobytes() if x.ndim else x.numpy().tobytes()
    return np.ascontiguousarray(x).tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_in_a_tensor_out(torch, name):
    a, b = pair(name)
    result = gm.matmul(tensor(torch, a), tensor(torch, b))
    assert type(result) is torch.Tensor
    assert result.dtype == getattr(torch, name)
    assert numbers(result) == numbers(gm.matmul(a, b))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_a_tensor_and_an_array_give_a_tensor(torch, name):
    a, b = pair(name)
    for result in (gm.matmul(tensor(torch, a), b), gm.matmul(a, tensor(torch, b))):
        assert type(result) is torch.Tensor
        assert numbers(result) == numbers(gm.matmul(a, b))


def test_an_out_tensor_is_written_in_place(torch):
    a, b = pair("bfloat16")
    big = torch.zeros(10, 4, dtype=torch.bfloat16)
    out = big[::2]
    assert gm.matmul(tensor(torch, a), tensor(torch, b), out=out) is out
    assert numbers(out) == numbers(gm.matmul(a, b))
    assert not big[1::2].any()
    a, b = pair("float32")
    out = torch.zeros(4, 5, dtype=torch.float64).T
    gm.matmul(a, b, out=out)
    assert np.array_equal(out.numpy(), gm.matmul(a, b).astype("f8"))


def test_strided_transposed_and_expanded_tensors(torch):
    a, b = torch.randn(8, 6, 10), torch.randn(10, 12)
    for x, y in [(a[::2, 1:], b[:, ::3]), (a.transpose(0, 1), b), (a, b.T[:10].T), (a[:1].expand(5, 6, 10), b)]:
        assert torch.allclose(gm.matmul(x, y), torch.matmul(x, y), rtol=1e-4, atol=1e-5)


def test_lazily_conjugated_tensors(torch):
    a = torch.randn(4, 5, dtype=torch.complex64)
    assert torch.allclose(gm.matmul(a, a.conj().T), a @ a.conj().T, rtol=1e-4, atol=1e-5)
    x = torch.randn(3, 3, dtype=torch.complex64)
    imaginary = x.conj().imag
    assert imaginary.is_neg()
    assert torch.allclose(gm.matmul(imaginary, imaginary), imaginary @ imaginary, rtol=1e-4, atol=1e-5)
    with pytest.raises(gm.LayoutError):
        gm.matmul(a, a.T, out=torch.zeros(4, 4, dtype=torch.complex64).conj())


def test_a_tensor_that_requires_grad_is_refused_while_gradients_are_recorded(torch):
    x = torch.nn.Parameter(torch.randn(3, 3))
    with pytest.raises(gm.LayoutError, match=r"x\.detach\(\)"):
        gm.matmul(x, x)
    with torch.no_grad():
        assert torch.allclose(gm.matmul(x, x), x @ x, rtol=1e-4, atol=1e-5)
    assert torch.allclose(gm.matmul(x.detach(), x.detach()), x @ x, rtol=1e-4, atol=1e-5)


def test_tensors_that_are_not_plain_memory_are_refused(torch):
    with pytest.raises(gm.LayoutError, match="to_dense"):
        gm.matmul(torch.eye(3).to_sparse(), torch.eye(3))
    with pytest.raises(gm.DeviceError, match="meta"):
        gm.matmul(torch.eye(3, device="meta"), torch.eye(3))
    with pytest.raises(gm.DTypeError, match="float8"):
        gm.matmul(torch.ones(3, 3).to(torch.float8_e4m3fn), torch.eye(3))


def test_options_and_scalars_of_tensors(torch):
    a, b, bias = torch.randn(6, 5), torch.randn(5, 4), torch.randn(4)
    result = gm.matmul(a, b, bias=bias, activation="gelu")
    assert torch.allclose(result, torch.nn.functional.gelu(a @ b + bias), rtol=1e-4, atol=1e-5)
    half = torch.randn(6, 6).to(torch.bfloat16)
    assert gm.matmul(half, half, dtype=torch.float32).dtype == torch.float32
    c = torch.randn(6, 4)
    assert torch.allclose(gm.gemm(0.5, a, b, 2.0, c), torch.addmm(c, a, b, beta=2, alpha=0.5), rtol=1e-4, atol=1e-5)
    vector = gm.matmul(a[0], b[:, 0])
    assert type(vector) is torch.Tensor
    assert vector.shape == ()
    assert gm.matmul(torch.zeros(0, 3), torch.zeros(3, 2)).shape == (0, 2)


@pytest.mark.process
def test_bfloat16_tensors_do_not_need_ml_dtypes(torch):
    code = (
        "import sys, torch, gemmery as gm\n"
        "x = torch.randn(9, 9).to(torch.bfloat16)\n"
        "assert gm.matmul(x, x).dtype == torch.bfloat16\n"
        "assert gm.matmul(x, x, dtype=torch.float32).dtype == torch.float32\n"
        "assert gm.matmul(x, x.float()).dtype == torch.float32\n"
        "gm.matmul(x.float(), x.float(), out=x)\n"
        "assert 'ml_dtypes' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class Exporter:
    """Any array of a library that knows DLPack and the array API."""

    def __init__(self, x):
        self.x = x

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=lambda other: type(self)(np.from_dlpack(other)))


class Bare:
    """DLPack and nothing else."""

    __dlpack_device__ = Exporter.__dlpack_device__
    __dlpack__ = Exporter.__dlpack__

    def __init__(self, x):
        self.x = x


def test_dlpack_with_an_array_namespace_comes_back_as_it_went_in():
    a, b = pair("float32")
    result = gm.matmul(Exporter(a), b)
    assert type(result) is Exporter
    assert np.array_equal(result.x, gm.matmul(a, b))


class Half:
    """bfloat16 of a library such as JAX, which knows the array API and takes DLPack alone."""

    def __init__(self, memory):
        self.memory = memory

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        return dlpack.Exported(self.memory).__dlpack__(**options)

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=lambda other: Half(view(other)) if hasattr(other, "__dlpack__") else other)


def test_bfloat16_of_an_array_namespace_comes_back_as_it_went_in():
    a, b = pair("bfloat16")
    result = gm.matmul(Half(view(a)), Half(view(b)))
    assert type(result) is Half
    assert result.memory.dtype == "bf16"
    assert arrays.memory(result.memory).tobytes() == numbers(gm.matmul(a, b))


def test_dlpack_alone_comes_back_as_a_numpy_array_and_is_written_in_place():
    a, b = pair("float64")
    result = gm.matmul(Bare(a), Bare(b))
    assert type(result) is np.ndarray
    assert np.array_equal(result, gm.matmul(a, b))
    out = Bare(np.zeros((5, 4)))
    assert gm.matmul(a, b, out=out) is out
    assert np.array_equal(out.x, result)


def test_bfloat16_by_dlpack(torch):
    a, b = pair("bfloat16")
    result = gm.matmul(Bare(tensor(torch, a)), Bare(tensor(torch, b)))
    assert result.dtype == ml_dtypes.bfloat16
    assert numbers(result) == numbers(gm.matmul(a, b))


@pytest.mark.parametrize("name", ["float32", "float16", "int8", "uint64"])
def test_memoryviews_come_back_as_memoryviews(name):
    a, b = pair(name)
    result = gm.matmul(memoryview(a), memoryview(b))
    assert type(result) is memoryview
    assert result.shape == (5, 4)
    assert np.array_equal(np.asarray(result), gm.matmul(a, b))


def test_buffers_of_the_standard_library():
    one, two = array.array("d", [1, 2, 3]), array.array("d", [4, 5, 6])
    assert gm.matmul(one, two) == 32
    square = memoryview(bytearray(range(9))).cast("B", (3, 3))
    assert np.array_equal(
        gm.matmul(square, square), np.arange(9, dtype="u1").reshape(3, 3) @ np.arange(9).reshape(3, 3)
    )
    out = array.array("d", [0, 0, 0])
    assert gm.gemv(np.diag([1.0, 2.0, 3.0]), one, out=out) is out
    assert list(out) == [1, 4, 9]
    with pytest.raises(gm.LayoutError, match="read-only"):
        gm.matmul(np.ones((2, 2), "u1"), np.ones(2, "u1"), out=bytes(2))


def test_lists_are_served_and_a_matrix_stays_one():
    assert np.array_equal(gm.matmul([[1, 2]], [[3], [4]]), [[11]])
    with pytest.warns(PendingDeprecationWarning):
        x = np.matrix([[1.0, 2.0], [3.0, 4.0]])
    assert type(gm.matmul(x, x)) is np.matrix
    assert np.array_equal(gm.matmul(x, x), x @ x)


def test_a_memory_map_is_read_and_written(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(6, 6))
    x[:] = np.arange(36).reshape(6, 6)
    expected = np.asarray(x) @ np.asarray(x)
    gm.matmul(x, x, out=x)
    assert np.array_equal(x, expected)


def test_a_masked_array_is_refused():
    with pytest.raises(gm.LayoutError, match="mask"):
        gm.matmul(np.ma.masked_array(np.eye(2)), np.eye(2))
