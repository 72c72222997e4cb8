"""Integers, complex numbers and semirings by the kernels of devices, on the emulator; no GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery import dispatch, verify
from gemmery.cuda.constants import MOST_DIGITS
from gemmery.keywords import SEMIRINGS
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.gpu import WHOLE
from gemmery.ladder.int8_pieces import digit_products, digits
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery_lab.emulated_product import Gemm, problem_of, run_rung
from layouts import laid
from operands import numpy_dtype

pytest.importorskip("cuda.bindings")
pytestmark = [pytest.mark.compiler, pytest.mark.sampled(7)]

DIGITS = find(CUDA, "wgmma_digits")
RINGS = tuple(name for name in SEMIRINGS if name != "or_and")


def numbers(shape, name, seed):
    """Numbers of the whole range, so that sums wrap; the least and the largest are among them."""
    draw, kind = np.random.default_rng([seed, *shape]), numpy_dtype(name)
    if kind.kind == "b":
        return draw.random(shape) < 0.1
    if kind.kind in "iu":
        info = np.iinfo(kind)
        values = draw.integers(info.min, info.max, shape, kind, endpoint=True)
        values[draw.random(shape) < 0.1] = info.min
        values[draw.random(shape) < 0.1] = info.max
        return values
    value = draw.standard_normal(shape)
    return (value + 1j * draw.standard_normal(shape) if kind.kind == "c" else value).astype(kind)


def multiplied(rung, a, b, out, layouts=("row", "row", "row"), config=(), alpha=1, beta=0, **options):
    """A B + beta C and the C before, by a rung on the emulator, from guarded memory."""
    images = [laid(x, layout)[1] for x, layout in zip((a, b), layouts, strict=False)]
    old = numbers((a.shape[0], a.shape[1], b.shape[2]), out, 3)
    c = laid(old, layouts[2])[1]
    gemm = Gemm(*images, c, alpha=alpha, beta=beta)
    names = (verify.dtypes.get(x.dtype.name).name for x in (a, c))
    case = problem_of(gemm, *names, "h200", scaled=(alpha, beta) != (1, 0))._replace(**options)
    runs = run_rung(rung, case, dict(config), gemm)
    assert [str(each) for run in runs for each in run.findings] == []
    return c, old


def check(result, a, b, **options):
    checked = verify.check(result, a, b, lambda k: k + 2.0, **options)
    assert checked.error_over_bound <= 1, checked


@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("name", "out"),
    [
        *((name, name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")),
        *(("int8", "int64"), ("uint8", "int32"), ("int16", "int32"), ("uint16", "int64"), ("int32", "int64")),
    ],
)
def test_bytes_on_tensor_cores(name, out):
    a, b = numbers((1, 70, 100), name, 1), numbers((1, 100, 150), name, 2)
    check(multiplied(DIGITS, a, b, out)[0], a, b)


@pytest.mark.many(3)
@pytest.mark.parametrize("layouts", [("col", "row", "row"), ("row", "col", "padded"), ("strided", "reversed", "col")])
@pytest.mark.parametrize(("name", "config"), [("int32", {"cm": 2}), ("int64", {"cm": 2}), ("int32", {"bn": 128})])
def test_bytes_of_any_layout_in_batches_and_clusters(name, config, layouts):
    a, b = numbers((2, 140, 131), name, 1), numbers((2, 131, 300), name, 2)
    for alpha, beta in ((1, 0), (-3, 2)):
        c, old = multiplied(DIGITS, a, b, name, layouts, config, alpha, beta)
        check(c, a, b, alpha=alpha, beta=beta, c=old)


@pytest.mark.many(3)
@pytest.mark.parametrize("alpha", [1, -2])
@pytest.mark.parametrize("name", ["simt_smem", "wgmma_digits"])
def test_sums_of_bytes_wrap_and_do_not_saturate(name, alpha):
    a, b = np.full((1, 20, 70), 2, np.int8), np.ones((1, 70, 12), np.int8)
    c, old = multiplied(find(CUDA, name), a, b, "int8", ("row", "row", "row"), (), alpha, 3)
    assert np.array_equal(c, (140 * alpha + 3 * old.astype(np.int64)).astype(np.int8))


@pytest.mark.many(3)
@pytest.mark.parametrize("k", [0, 1, 31, MOST_DIGITS + 1])
def test_the_bytes_of_a_k_that_does_not_suit_are_left_to_cuda_cores(k):
    p = Problem(512, 512, k, "int32", "int32", batch=1000, device="h200")
    assert "use simt_pipelined" in DIGITS.refuses(p)
    assert dispatch.choice(p).rung.name == "simt_pipelined"


def test_counts_of_products():
    assert [digit_products(name, name) for name in WHOLE] == [1, 3, 10, 36, 1, 3, 10, 36, 1]
    assert [digits(name, "int64") for name in WHOLE] == [1, 3, 5, 8, 2, 3, 5, 8, 1]
    p = Problem(4096, 4096, 4096, "int32", "int32", device="h200")
    launches = DIGITS.geometry(p, DIGITS.default).launches
    assert [each.source for each in launches] == ["digits_split.cu", "wgmma_digits.cu"]
    assert launches[-1].workspace == 2 * 4 * 4096 * 4096


@pytest.mark.many(3)
@pytest.mark.parametrize("layouts", [("row", "row", "row"), ("col", "padded", "row"), ("strided", "reversed", "col")])
@pytest.mark.parametrize("name", [*WHOLE, "complex64", "complex128"])
@pytest.mark.parametrize("rung", ["simt_smem", "simt_pipelined", "simt_general"])
def test_cuda_cores(rung, name, layouts):
    rung = find(CUDA, rung)
    if name not in rung.dtypes:
        pytest.skip(f"{rung.name} does not take {name}")
    a, b = numbers((2, 37, 29), name, 1), numbers((2, 29, 45), name, 2)
    scalars = ((1, 0),) if name == "bool" else ((1, 0), (2 - 1j, 1j) if name.startswith("c") else (-3, 2))
    for alpha, beta in scalars:
        c, old = multiplied(rung, a, b, name, layouts, (), alpha, beta)
        check(c, a, b, alpha=alpha, beta=beta, c=old)


@pytest.mark.many(3)
@pytest.mark.parametrize("k", [0, 1, 29, 64])
@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
@pytest.mark.parametrize("semiring", RINGS)
@pytest.mark.parametrize("rung", ["simt_naive", "simt_smem", "simt_pipelined"])
def test_semirings(rung, semiring, name, k):
    a, b = numbers((1, 37, k), name, 1), numbers((1, k, 45), name, 2)
    if k > 2:
        a[0, 3, 1], a[0, 4, 2], b[0, 1, 5], a[0, 7] = np.inf, -np.inf, -np.inf, np.nan
    for layouts in (("row", "row", "row"), ("col", "col", "row")):
        c, _ = multiplied(find(CUDA, rung), a, b, name, layouts, semiring=semiring)
        checked = verify.check_semiring(c, a, b, semiring)
        assert checked.error_over_bound <= 1, checked


@pytest.mark.many(3)
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_one_kind_of_float8_by_the_other(name):
    other = {"e4m3": "e5m2", "e5m2": "e4m3"}[name]
    draw = np.random.default_rng(0)
    a, b = draw.integers(-2, 3, (1, 70, 96)), draw.integers(-2, 3, (1, 150, 96)).transpose(0, 2, 1)
    c = np.zeros((1, 70, 150), np.float32)
    gemm = Gemm(a.astype(numpy_dtype(name)), b.astype(numpy_dtype(other)), c)
    case = problem_of(gemm, name, "f32", "h200")._replace(b_dtype=other)
    assert dispatch.choice(case).rung.name == "wgmma_epilogue"
    run_rung(find(CUDA, "wgmma_epilogue"), case, {}, gemm)
    assert np.array_equal(c, a @ b)


@pytest.mark.many(3)
@pytest.mark.parametrize("layouts", [("row", "row", "row"), ("col", "padded", "row"), ("strided", "reversed", "col")])
@pytest.mark.parametrize(
    ("name", "other", "out"),
    [
        ("bf16", "f32", "f32"), ("f32", "f16", "f32"), ("int8", "bf16", "bf16"), ("f32", "f64", "f64"),
        ("int8", "int32", "int32"), ("int64", "uint8", "int64"), ("int8", "uint8", "int16"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rung", ["simt_smem", "simt_pipelined"])
def test_types_that_differ_are_widened_as_they_are_loaded(rung, name, other, out, layouts):
    kinds = [numpy_dtype(each) for each in (name, other, out)]
    a, b = (
        numbers((2, *shape), kind.name, i)
        for i, (shape, kind) in enumerate(zip(((37, 29), (29, 45)), kinds, strict=False))
    )
    c, _ = multiplied(find(CUDA, rung), a, b, kinds[2].name, layouts, b_dtype=other)
    wide = "f32" if out == "bf16" else out
    x, y = (z.astype(numpy_dtype(wide)) for z in (a, b))
    if out == "bf16":
        assert np.allclose(c.astype(float), x.astype(float) @ y, rtol=2.0**-8, atol=2.0**-20 * 128 * 29)
    else:
        check(c, x, y)
    p = Problem(8, 1000, 1000, name, out, device="h200", b_dtype=other)
    assert dispatch.choice(p).rung.name == "simt_pipelined"
