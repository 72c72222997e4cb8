"""Integers, bools, complex numbers and semirings on CUDA tensors: NumPy's bits, bounds, scalars, graphs, kinds."""

from __future__ import annotations

import numpy as np
import pytest

import gemmery as gm
from gemmery import verify
from gemmery.cuda import driver
from gemmery.keywords import SEMIRINGS

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(driver.missing()), reason=driver.missing()),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch sees no CUDA device"),
]

WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
RINGS = tuple(name for name in SEMIRINGS if name != "or_and")
SMALL, LARGE = (70, 50, 90), (900, 1000, 1100)


def numbers(shape, name, seed=0):
    """Random numbers, of integers the whole range, as NumPy's array."""
    draw, kind = np.random.default_rng([seed, *shape]), np.dtype(name)
    if kind.kind in "iub":
        bits = draw.integers(0, 256, (*shape, kind.itemsize), np.uint8)
        return bits[..., 0] < 16 if kind.kind == "b" else bits.view(kind)[..., 0]
    value = draw.standard_normal(shape)
    return (value + 1j * draw.standard_normal(shape) if kind.kind == "c" else value).astype(kind)


def pair(m, n, k, name, layouts="CC"):
    """A and B as arrays and as tensors of these layouts."""
    arrays = numbers((m, k), name, 1), numbers((k, n), name, 2)
    tensors = [
        torch.from_numpy(x).cuda() if layout == "C" else torch.from_numpy(np.ascontiguousarray(x.T)).cuda().T
        for x, layout in zip(arrays, layouts, strict=True)
    ]
    return arrays, tensors


def check(result, a, b, **options):
    checked = verify.check(result.cpu().numpy(), a, b, lambda k: 2.0 * k + 8, **options)
    assert checked.error_over_bound <= 1, checked


@pytest.mark.parametrize("layouts", ["CC", "FC", "CF", "FF"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 50, 70), (50, 1, 70), (17, 9, 0), SMALL, LARGE, (1024, 1024, 1024)])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_have_numpys_bits(name, shape, layouts):
    (a, b), (x, y) = pair(*shape, name, layouts)
    result = gm.matmul(x, y)
    assert result.dtype == x.dtype
    check(result, a, b)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("int8", "int32"),
        ("int8", "int64"),
        ("uint8", "int32"),
        ("int16", "int32"),
        ("int32", "int64"),
        ("bool", "int32"),
    ],
)
def test_wider_sums(name, out, shape):
    (a, b), (x, y) = pair(*shape, name)
    check(gm.matmul(x, y, dtype=out), a, b)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("name", ["int32", "int64", "uint8", "complex64", "complex128"])
def test_scalars_bias_out_batches_and_repeats(name, shape):
    (a, b), (x, y) = pair(*shape, name)
    old = numbers((shape[0], shape[1]), name, 3)
    whole = np.dtype(name).kind in "iu"
    for alpha, beta in ((1, 0), (3, -2), (2.0, 1.0)) if whole else ((1, 0), (2, -1), (1j, 0.5)):
        for _ in range(2):
            check(gm.gemm(alpha, x, y, beta, torch.from_numpy(old).cuda()), a, b, alpha=alpha, beta=beta, c=old)
    bias = numbers((shape[1],), name, 4)
    check(gm.matmul(x, y, bias=torch.from_numpy(bias).cuda()), a, b, bias=bias)
    check(gm.matmul(x, y, bias=5), a, b, bias=np.asarray(5, name))
    out = torch.empty((shape[1], shape[0]), dtype=x.dtype, device="cuda").T
    check(gm.matmul(x, y, out=out), a, b)
    batch = torch.stack([x, x])
    for _ in range(20):
        both = gm.matmul(batch, y)
    check(both, np.stack([a, a]), b)
    assert torch.equal(both[0], both[1])


def test_the_largest_sums_of_bytes_are_exact():
    """Digits of -128 in all places: sums of one weight are as large as they can be, those of all do not fit."""
    k, least = 20_000, -(0x80 * (2**64 - 1) // 255) % 2**64
    a = torch.from_numpy(np.full((256, k), least, np.uint64).view(np.int64)).cuda()
    expected = k * least * least % 2**64
    assert (gm.matmul(a, a.T.clone()).cpu().numpy().view(np.uint64) == expected).all()


def test_a_graph_keeps_a_product_of_bytes():
    (a, b), (x, y) = pair(1024, 1024, 1024, "int32")
    out, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
    gm.matmul(x, y, out=out)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gm.matmul(x, y, out=out)
    x.neg_()
    graph.replay()
    check(out, -a, b)


@pytest.mark.parametrize("layouts", ["CC", "FC", "CF", "FF"])
@pytest.mark.parametrize("shape", [(5, 7, 3), (50, 1, 70), (4, 4, 0), SMALL, (512, 640, 768)])
@pytest.mark.parametrize(
    ("name", "precision"),
    [("complex64", None), ("complex64", "f32_tensor"), ("complex64", "f32_strict"), ("complex128", None)],
)
def test_complex_numbers(name, precision, shape, layouts):
    (a, b), (x, y) = pair(*shape, name, layouts)
    check(gm.matmul(x, y, precision=precision), a, b)
    check(gm.matmul(x.conj(), y, precision=precision), a.conj(), b)


@pytest.mark.parametrize("shape", [SMALL, (33, 40, 0), (140, 130, 1000), (512, 300, 64)])
@pytest.mark.parametrize("name", ["float64", "float32", "float16"])
@pytest.mark.parametrize("semiring", RINGS)
def test_semirings(semiring, name, shape):
    for layouts in ("CC", "FF"):
        (a, b), (x, y) = pair(*shape, name, layouts)
        checked = verify.check_semiring(gm.matmul(x, y, semiring=semiring).cpu().numpy(), a, b, semiring)
        assert checked.error_over_bound <= 1, checked


@pytest.mark.skipif(bool(driver.missing()) or driver.find("cuda:0").capability != 90, reason="needs a device of sm_90")
def test_one_kind_of_float8_by_the_other():
    draw = np.random.default_rng(0)
    a, b = draw.integers(-2, 3, (300, 200)), draw.integers(-2, 3, (200, 400))
    x = torch.from_numpy(a).cuda().to(torch.float8_e4m3fn)
    y = torch.from_numpy(np.ascontiguousarray(b.T)).cuda().to(torch.float8_e5m2).T
    for left, right, expected in ((x, y, a @ b), (y.T, x.T, b.T @ a.T)):
        assert torch.equal(gm.matmul(left, right, dtype="float32").cpu(), torch.from_numpy(expected).float())
