"""Products with an epilogue on a device, from arrays to results, on the emulator."""

from __future__ import annotations

import numpy as np
import pytest

import gemmery as gm
from gemmery.api import finished, finished_on_device
from gemmery.cuda import ordered
from gemmery.keywords import NO_OPTIONS
from random_functions import check
from random_functions import function as random_function

pytest_plugins = ["card_fixtures"]
pytestmark = pytest.mark.sampled(5)

pytest.importorskip("cuda.bindings")


def numbers(result):
    """Return the elements of a result of DLPack as float64."""
    return np.asarray(result.numbers if hasattr(result, "numbers") else result).astype(np.float64)


def whole(*shape):
    return np.random.default_rng(12).integers(-3, 4, shape).astype(np.float64)


def test_one_launch_reads_operands_of_every_kind(card):
    x, w, r = whole(40, 64), whole(64, 48), whole(40, 48)
    a, b = card.put(x, "bf16"), card.put(w.T, "bf16").T
    out = card.empty((40, 48), "f32")
    function = gm.epilogue(lambda c, r, s, up, down: r + s * gm.relu(c) * up + down)
    kept = {
        "r": card.put(r, "bf16"),
        "s": 0.5,
        "up": card.put(np.arange(48.0), "f32"),
        "down": card.put(np.arange(40.0)[:, None], "f32"),
    }
    assert gm.matmul(a, b, out, dtype="float32", epilogue=function(**kept)) is out
    expected = r + 0.5 * np.maximum(x @ w, 0) * np.arange(48.0) + np.arange(40.0)[:, None]
    assert np.array_equal(out.numbers, expected)
    assert card.launched == ["wgmma_epilogue", "copy"]


def test_two_weights_share_a_launch(card):
    x, w, v = whole(40, 64), whole(64, 48), whole(64, 48)[::-1]
    a, b, up = card.put(x, "bf16"), card.put(w.T, "bf16").T, card.put(v.T, "bf16").T
    out = card.empty((40, 48), "f32")
    gm.matmul(a, (b, up), out, dtype="float32", epilogue=lambda c, d: gm.relu(c) * d)
    assert np.array_equal(out.numbers, np.maximum(x @ w, 0) * (x @ v))
    assert card.launched == ["wgmma_epilogue", "copy"]
    other = card.put(v, "bf16")  # lies otherwise: its sums go to memory first
    gm.matmul(a, (b, other), out, dtype="float32", epilogue=lambda c, d: gm.relu(c) * d)
    assert np.array_equal(out.numbers, np.maximum(x @ w, 0) * (x @ v))
    assert card.launched[2:] == ["wgmma_epilogue", "wgmma_epilogue", "copy"]


def test_statistics_of_rows(card):
    x, w = whole(40, 64), whole(64, 50)
    a, b = card.put(x, "bf16"), card.put(w.T, "bf16").T
    outs = tuple(card.empty(shape, "f32") for shape in ((40, 50), (40, 1), (40, 1)))
    softmax = gm.epilogue(
        lambda c: (gm.row_maximum(c) - c, gm.row_sum(c), gm.row_sum_of_squares(c - gm.row_maximum(c)))
    )
    gm.matmul(a, b, outs, dtype="float32", epilogue=softmax)
    c = x @ w
    top = c.max(1, keepdims=True)
    for out, expected in zip(
        outs, (top - c, c.sum(1, keepdims=True), ((c - top) ** 2).sum(1, keepdims=True)), strict=True
    ):
        assert np.array_equal(out.numbers, expected)
    assert card.launched[:2] == ["wgmma_epilogue", "traced_rows"]


@pytest.mark.parametrize("invariant", [False, True])
def test_blocks_exchange_numbers_of_rows_unless_rows_stay_the_same(card, monkeypatch, invariant):
    def zeros(size, *_):
        start = card.memory.take(size)
        card.memory.data[start : start + size] = 0
        return start

    monkeypatch.setattr(ordered, "counters", zeros)
    monkeypatch.setattr(finished_on_device, "MANY_EXCHANGED", 130 * 256)
    draw = np.random.default_rng(4)
    x, w = draw.standard_normal((130, 64)), draw.standard_normal((256, 64))
    got = {}
    for m in (130, 3):
        a, b = card.put(x[:m], "f16"), card.put(w, "f16").T
        outs = card.empty((m, 256), "f32"), card.empty((m, 1), "f32")
        kept = {"epilogue": lambda c: (c + gm.row_sum(c), gm.row_sum(c)), "batch_invariant": invariant}
        gm.matmul(a, b, outs, dtype="float32", **kept)
        got[m] = [out.numbers.copy() for out in outs]
        c = a.numbers.astype(np.float64) @ b.numbers.astype(np.float64)
        bound = 2.0**-24 * 400 * (np.abs(a.numbers) @ np.abs(b.numbers.astype(np.float64))).sum(1, keepdims=True)
        total = c.sum(1, keepdims=True)
        assert (np.abs(got[m][0] - (c + total)) <= bound).all()
        assert (np.abs(got[m][1] - total) <= bound).all()
    assert ("wgmma_rows" in card.launched) == (not invariant)
    if invariant:
        assert all(np.array_equal(many[:3], few) for many, few in zip(got[130], got[3], strict=True))


@pytest.mark.many(4)
@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize(("dtype", "out", "weights", "statistics"), [
    ("bf16", "bf16", 1, False), ("f16", "f32", 2, False), ("f32", "f32", 1, False), ("f32", "f32", 2, True),
    ("bf16", "bf16", 2, False), ("f64", "f64", 1, True),
])  # fmt: skip
def test_random_functions(card, dtype, out, weights, statistics, seed):
    m, n, k = ((40, 48, 64), (33, 67, 24), (1, 64, 72))[seed % 3]
    draw = np.random.default_rng(seed)
    x, *ws = (draw.integers(-2, 3, shape).astype(np.float64) for shape in ((m, k), *[(k, n)] * weights))
    a = card.put(x, dtype)
    bs = [card.put(w.T, dtype).T if seed % 4 else card.put(w, dtype) for w in ws]
    f = random_function(seed, weights, statistics, 1 + seed % 2)
    kind = "f64" if dtype == "f64" else ("bf16", "f32", "f16")[seed % 3]
    read = {"x0": draw.standard_normal((m, n)), "x1": draw.standard_normal(n), "x2": draw.standard_normal((m, 1))}
    kept = {name: card.put(values, kind if name == "x0" else "f32") for name, values in read.items()} | {"x3": 0.75}
    names = [each.name for each in f.graph(weights).operands]
    outs = tuple(card.empty((m, n), out) for _ in range(1 + seed % 2))
    named = {"dtype": {"bf16": "bfloat16", "f32": "float32"}[out]} if out != dtype else {}
    gm.matmul(a, tuple(bs) if weights == 2 else bs[0], outs if len(outs) > 1 else outs[0], epilogue=f(**kept), **named)
    values = {name: kept[name] if name == "x3" else numbers(kept[name]) for name in names}
    check(
        [numbers(each) for each in outs],
        f.graph(weights),
        [x @ w for w in ws],
        values,
        out,
        2.0**-53 if out == "f64" else 2.0**-24,
    )


@pytest.mark.many(4)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("n", "k"), [(300, 512), (8, 4096), (67, 75)])
def test_one_row_is_a_product_with_a_vector(card, n, k, transposed):
    x, w, v = whole(1, k), whole(k, n), whole(k, n)[::-1]
    a = card.put(x, "bf16")
    b, up = (card.put(each.T, "bf16").T if transposed else card.put(each, "bf16") for each in (w, v))
    out = card.empty((1, n), "f32")
    kept = {"r": card.put(np.arange(float(n)), "f32")}
    gm.matmul(a, (b, up), out, dtype="float32", epilogue=gm.epilogue(lambda c, d, r: gm.relu(c) * d + r)(**kept))
    assert np.array_equal(out.numbers, np.maximum(x @ w, 0) * (x @ v) + np.arange(float(n)))
    assert not any(name.startswith("wgmma") for name in card.launched)


@pytest.mark.many(4)
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_sums_of_integers_are_converted(card, dtype):
    low, top = max(np.iinfo(dtype).min, -(2**20)), min(np.iinfo(dtype).max, 2**20)
    x, w = np.random.default_rng(5).integers(low, top, (2, 9, 9))
    total = (x @ w).astype(f"{'u' * (low == 0)}int{64 if '64' in dtype else 32}")
    kind = "f64" if np.dtype(dtype).itemsize > 2 else "f32"
    a, b, out = card.put(x, dtype), card.put(w, dtype), card.empty((9, 9), kind)
    gm.matmul(a, b, out, epilogue=lambda c: c * 0.5)
    assert np.array_equal(out.numbers, total.astype(out.numbers.dtype) / 2)
    with pytest.raises(gm.DTypeError, match="a floating-point type, not int32"):
        gm.matmul(a, b, epilogue=lambda c: c * 0.5, dtype="int32")


def test_the_other_kind_of_float8_is_multiplied_as_it_is(card):
    x, w = np.full((16, 32), 1.125), np.full((32, 16), 2.0**-14)  # e5m2 has no 1.125, and e4m3 no 2**-14
    a, b, out = card.put(x, "e4m3"), card.put(w, "e5m2"), card.empty((16, 16), "f32")
    gm.matmul(a, b, out, dtype="float32", epilogue=lambda c: c * 2.0)
    assert np.array_equal(out.numbers, 2 * x @ w)


def test_wrong_arguments_are_refused_before_a_launch(card):
    a, b = card.put(whole(8, 16), "f32"), card.put(whole(16, 8), "f32")
    keep, plus = (lambda c: c), gm.epilogue(lambda c, r: c + r)
    bad = [
        ((a, b, card.empty((8, 8), "int32")), {"epilogue": keep}, gm.DTypeError, "same_kind"),
        ((a, b, card.empty((2, 8, 8), "f32")), {"epilogue": keep}, gm.ShapeError, "out has shape"),
        ((a, b, np.empty((8, 8), np.float32)), {"epilogue": keep}, gm.DeviceError, "out 0 on cpu"),
        ((np.ones((8, 16), np.float32), b), {"epilogue": keep}, gm.DeviceError, "a is on cpu"),
        ((a, np.ones((16, 8), np.float32)), {"epilogue": keep}, gm.DeviceError, "b on cpu"),
        ((a, b), {"epilogue": keep, "semiring": "min_plus"}, gm.ArgumentError, "exclude each other"),
        ((a, b), {"epilogue": keep, "precision": "f33"}, gm.ArgumentError, "f33"),
        ((a, b), {"epilogue": keep, "threads": 2}, gm.ArgumentError, "threads="),
        ((a, b), {"epilogue": plus(r=1j)}, gm.DTypeError, "real numbers"),
        ((a, b), {"epilogue": plus(r=card.put(np.ones((8, 8)), "complex64"))}, gm.DTypeError, "real numbers"),
        ((a, b), {"epilogue": plus(r=np.ones(8))}, gm.ArgumentError, "on the CPU"),
        ((a, gm.pack(np.ones((16, 8)))), {"epilogue": keep}, gm.ArgumentError, "takes plain matrices"),
    ]  # fmt: skip
    bad += [
        ((card.put(np.ones((8, 16)), dtype), card.put(np.ones((16, 8)), dtype)), {"epilogue": keep},
         gm.DTypeError, "real numbers") for dtype in ("bool", "complex64")
    ]  # fmt: skip
    for given, options, error, words in bad:
        with pytest.raises(error, match=words):
            gm.matmul(*given, **options)
    assert card.launched == []


def test_explain_says_where_a_function_is_applied(card):
    a, b = card.put(whole(40, 64), "bf16"), card.put(whole(48, 64), "bf16").T
    own = {"r": card.put(whole(40, 48), "bf16")}
    add = gm.epilogue(lambda c, r: gm.relu(c) + r)
    fused = finished.explained(a, b, NO_OPTIONS._replace(epilogue=add(**own)))
    assert "to each tile" in fused
    assert "2 matrices of 40 x 48" in fused
    by_rows = finished.explained(a, b, NO_OPTIONS._replace(epilogue=lambda c: c - gm.row_maximum(c)))
    assert "by rows" in by_rows


@pytest.mark.parametrize(("m", "kernel"), [(1, "gemv_vectorized"), (4, "wgmma_epilogue")])
def test_two_weights_of_few_rows_take_one_launch(card, m, kernel):
    x, *ys = whole(m, 16), whole(16, 8192), whole(16, 8192)[::-1]
    out, weights = card.empty((m, 8192), "bf16"), tuple(card.put(y.T, "bf16").T for y in ys)
    for _ in range(2):
        gm.matmul(card.put(x, "bf16"), weights, out, epilogue=lambda c, d: c - 2 * d)
    assert np.array_equal(out.numbers, (x @ ys[0] - 2 * (x @ ys[1])).astype(out.numbers.dtype))
    assert set(card.launched) == {kernel, "copy"}
