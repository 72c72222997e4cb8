"""Codes on the emulator: rows of x that become codes, and every format of weights expanded, as on the CPU."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from emulated_card import installed
from gemmery.api.codes import decoded
from gemmery.api.packed import _rows, prepare_rows, prepare_unpacking
from gemmery.arrays import View
from gemmery.cuda import nvrtc
from gemmery.problem import Problem
from mutant import edited

pytest.importorskip("cuda.bindings")

KINDS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
WORDS = {"int8": "int8", "uint8": "uint8", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def low(array):
    return None if array is None else array.memory._replace(pointer=array.memory.pointer & 15, owner=None)


def start(array):
    return 0 if array is None else array.memory.pointer


def rows_on(card, x, kind, format_):
    """Codes and factors of rows, and the words why no kernel makes them."""
    a, s = card.put(x, kind), card.empty((len(x), 1), "f32")
    codes = card.empty(x.shape, "int8" if format_ == "int8" else "e4m3")
    run = prepare_rows(low(a), low(codes))
    assert not isinstance(run, str), run
    run(start(a), start(a), start(codes), 0, 0, start(s))
    return codes.numbers.view(np.uint8), s.numbers


@pytest.mark.many
@pytest.mark.parametrize("format_", ["float8_e4m3", "int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (9, 256), (2, 2056), (1, 2050), (2, 40001), (1, 17024), (1, 17026)])
def test_rows_have_the_bits_of_the_cpu(shape, kind, format_, monkeypatch):
    card, rng = installed(monkeypatch), np.random.default_rng(sum(shape))
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-20, 9, (shape[0], 1)))).astype(KINDS[kind])
    if len(x) > 2:
        x[0], x[1, 3], x[2, 2] = 0, np.nan, -np.inf
    codes, factors = gm.quantize_rows(x, format_)
    result = rows_on(card, x, kind, format_)
    assert np.array_equal(result[0], codes.view(np.uint8))
    assert np.array_equal(result[1], factors, equal_nan=True)
    assert (card.launched, card.findings) == (["quantize_rows"], [])


@pytest.mark.many
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("for (int k = first + EACH * STEP; k < p.k; k += STEP) look", "for (int k = p.k; k < p.k; k += STEP) look"),
        ("for (int k = first + EACH * STEP; k < p.k; k += STEP) write", "for (int k = p.k; k < p.k; k += STEP) write"),
        ("& 0x7fffffff", ""),
        ("__reduce_max_sync(~0u, of_warp", "__reduce_max_sync(~0u, x); (void)(of_warp"),
        ("scale < 0x1p-126f ? 0x1p-126f : scale", "scale"),
        ("(__float2int_rn(high) & 255) << 8", "__float2int_rn(high) << 8 & 255"),
        ("p.a + row * p.a_row", "p.a"),
        ("p.c + row * p.c_row", "p.c"),
    ],
)
def test_a_kernel_that_is_wrong_about_rows_is_told(old, new, monkeypatch):
    card, rng = installed(monkeypatch), np.random.default_rng(1)
    monkeypatch.setattr(nvrtc, "ptx", partial(nvrtc.ptx, texts=edited("quantize_rows.cu", old, new)))
    for shape in ((9, 250), (2, 17024)):
        x = -np.abs(rng.standard_normal(shape).astype(np.float32)) * np.float32(3)
        x[0], x[1, 200], x[1, -1] = 1e-39, -7, -99
        for format_ in ("int8", "float8_e4m3"):
            codes, factors = gm.quantize_rows(x, format_)
            found = rows_on(card, x, "f32", format_)
            wrong = not np.array_equal(found[0], codes.view(np.uint8)) or not np.array_equal(found[1], factors)
            if wrong or card.findings:
                return
    raise AssertionError("nothing shows that it is wrong")


@pytest.mark.many(5)
@pytest.mark.parametrize("own", KINDS)
@pytest.mark.parametrize(
    ("format_", "group", "zero_points"),
    [
        ("int8", None, False), ("int4", 8, True), ("int4", 32, False), ("float8_e4m3", None, False),
        ("mxfp4", None, False), ("nvfp4", None, False),
    ],
)  # fmt: skip
def test_every_format_is_expanded_as_on_the_cpu(format_, group, zero_points, own, monkeypatch):
    card, rng = installed(monkeypatch), np.random.default_rng(3)
    w = (rng.standard_normal((96, 41)) * np.exp2(rng.integers(-20, 9, (1, 41)))).astype(KINDS[own])
    if not zero_points:
        w[3, 5] = np.nan
    matrix = gm.quantize(w, format_, group, zero_points=zero_points)
    packed, scales, zeros, scale = (
        None if z is None else card.put(np.atleast_1d(z), WORDS[z.dtype.name]) for z in matrix.parts
    )
    for dtype, kind in KINDS.items():
        result = card.empty((41, 96), dtype)
        run = prepare_unpacking(*map(low, (packed, scales, zeros, scale)), dtype, format_)
        assert not isinstance(run, str), run
        run(start(zeros), start(packed), start(result), 0, start(scale), start(scales))
        expected = decoded(matrix.parts, format_, dtype)
        found = np.asarray(result.numbers).view(kind).astype(float)
        assert np.array_equal(found, expected.astype(float), equal_nan=True)
    assert (card.launched, card.findings) == (["unpack"] * 3, [])


def test_rows_that_no_kernel_takes_have_a_reason():
    x = View(0, (3, 8), (32, 4), "f32", "cuda:99")
    codes = View(0, (3, 8), (8, 1), "int8", "cuda:99")
    for change in ({"dtype": "f64"}, {"shape": (0, 8)}, {"strides": (4, 12)}):
        assert "elements are adjacent" in prepare_rows(x._replace(**change), codes)
    assert "elements are adjacent" in prepare_rows(x, codes._replace(strides=(16, 1)))


@pytest.mark.many
@pytest.mark.parametrize("format_", ["int8", "e4m3"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1000, 8192, 16384, 65536])
def test_nothing_spills(k, kind, format_):
    geometry = _rows(Problem(64, k, k, kind, format_, device="h200", alignments=(16, 16, 16)), {})
    report = nvrtc.code(geometry.source, geometry.kernel, "sm_90a").report
    assert report.spill_stores == report.spill_loads == 0
    assert report.registers * geometry.threads <= 65536
