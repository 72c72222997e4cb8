"""The API's own way to a device, from arrays to results, on the emulator: what only a GPU showed otherwise."""

from __future__ import annotations

import numpy as np
import pytest

import gemmery as gm
from emulated_card import OnCard
from gemmery.api import checked, grouped, on_device
from gemmery.api.device_call import located
from gemmery.arrays import view
from gemmery.keywords import Options

pytestmark = pytest.mark.sampled(3)

pytest_plugins = ["card_fixtures"]

pytest.importorskip("cuda.bindings")
ENDS = [3, 3, 40]


@pytest.fixture
def whole():
    """Small whole numbers, whose sums are exact in any order."""
    rng = np.random.default_rng(12)
    return lambda *shape: rng.integers(-3, 4, shape).astype(np.float64)


def test_layouts_alignments_and_batches(card, whole):
    x, y = whole(3, 40, 64), whole(3, 64, 48)
    a, b = card.put(x, "bf16"), card.put(y.swapaxes(1, 2), "bf16").T
    out = card.empty((3, 40, 48), "bf16")
    assert gm.matmul(a, b, out) is out
    assert np.array_equal(out.numbers, x @ y)
    turned = card.empty((3, 48, 40), "bf16").T  # of C' = B' A'
    gm.matmul(a, b, turned)
    assert np.array_equal(turned.numbers, x @ y)
    assert card.launched == ["wgmma_epilogue"] * 2
    one = card.put(y[0].T, "bf16", beside=2).T  # of the whole batch, from an address that no tensor map has
    gm.matmul(a, one, out)
    assert np.array_equal(out.numbers, x @ y[0])
    assert card.launched[2:] == ["wgmma_pack", "wgmma_epilogue"]


@pytest.mark.parametrize("kinds", [("f16", "f32"), ("f32", "f64"), ("f64", "f32")])
def test_two_types_are_multiplied_as_they_are(card, whole, kinds):
    x, y = whole(30, 40), whole(40, 50)
    a, b = (card.put(z, kind) for z, kind in zip((x, y), kinds, strict=True))
    out = card.empty((30, 50), "f64" if "f64" in kinds else "f32")
    gm.matmul(a, b, out)
    assert np.array_equal(out.numbers, x @ y)
    assert card.launched == ["simt_pipelined"]


def test_out_may_overlap_an_operand(card, whole):
    x, y = whole(48, 48), whole(48, 48)
    memory, b = card.put(np.vstack([x, x[:1]]), "bf16"), card.put(y.T, "bf16").T
    gm.matmul(memory.rows(0, 48), b, memory.rows(1, 49))
    assert np.array_equal(memory.numbers[1:], x @ y)
    assert np.array_equal(memory.numbers[0], x[0])
    assert card.launched == ["copy", "wgmma_epilogue"]


@pytest.fixture(params=[1, 3])
def blocks(request, monkeypatch):
    """The columns of B in so many blocks, each expanded before its product."""
    monkeypatch.setattr(on_device, "_COLUMNS", 48 // request.param)
    monkeypatch.setattr(on_device, "_MOST", {"complex64": 1})
    return request.param


def test_complex_products_add_what_beta_multiplies(card, whole, blocks):
    x, y, c = (whole(*sides) + 1j * whole(*sides) for sides in ((24, 16), (16, 48), (24, 48)))
    a, b, old = (card.put(z, "complex64") for z in (x, y, c))
    for out in (card.empty((24, 48), "complex64"), old):
        gm.gemm(2.0, a, b, -1.0, old, out=out, precision="f32_strict")
        assert np.array_equal(out.numbers, 2 * x @ y - c)
    assert card.launched.count("complex_expand") == 2 * blocks


@pytest.mark.parametrize("moved", [0, 1])
def test_complex_products_over_an_operand(card, whole, blocks, moved):
    operands = [whole(48, 48) + 1j * whole(48, 48) for _ in range(2)]
    arrays = [card.put(z, "complex64") for z in operands]
    memory = card.put(np.vstack([operands[moved], operands[moved][:1]]), "complex64")
    arrays[moved] = memory.rows(0, 48)
    gm.matmul(*arrays, memory.rows(1, 49), precision="f32_strict")
    assert np.array_equal(memory.numbers[1:], operands[0] @ operands[1])


def test_factors_bias_and_beta(card, whole):
    x, y, bias = whole(40, 64), whole(64, 48), whole(48)
    rows, columns = (2.0 ** np.arange(-2, 2))[np.arange(40) % 4], (2.0 ** np.arange(3))[np.arange(48) % 3]
    a, b = card.put(x, "bf16"), card.put(y.T, "bf16").T
    vectors = {"scale_b": card.put(columns, "f32"), "bias": card.put(bias, "f32"), "activation": "relu"}
    for out in (card.empty((40, 48), "bf16"), card.empty((48, 40), "bf16").T):
        for factors in (rows, rows[:1]):
            gm.matmul(a, b, out, scale_a=card.put(factors, "f32"), **vectors)
            want = np.maximum((x * factors[:, None]) @ (y * columns) + bias, 0)
            assert np.array_equal(out.numbers, want.astype(out.numbers.dtype))
    old = whole(40, 48)
    c = card.put(old, "bf16")
    gm.gemm(2.0, a, b, -1.0, c, out=c)
    assert np.array_equal(c.numbers, (2 * x @ y - old).astype(c.numbers.dtype))
    nothing = card.empty((40, 48), "bf16")  # NaN, which beta = 0 does not read
    gm.gemm(0.5, a, b, 0.0, nothing, out=nothing)
    assert np.array_equal(nothing.numbers, (0.5 * x @ y).astype(nothing.numbers.dtype))


def test_tiles_that_add_to_c_share_no_element(card, whole):
    """The last tile of a row may begin within the one before, whose elements it would add to C again."""
    x, y, old = whole(16, 64), whole(64, 80), whole(16, 80)
    a, b, wide = card.put(x, "bf16"), card.put(y.T, "bf16").T, card.empty((16, 160), "bf16")
    c = OnCard(card, wide.memory.pointer, (16, 80), (320, 4), "bf16")  # every second column: no tensor copies
    c.numbers[...] = old
    gm.gemm(1.0, a, b, 2.0, c, out=c)
    assert np.array_equal(c.numbers, (x @ y + 2 * old).astype(c.numbers.dtype))


@pytest.mark.parametrize("on_the_card", [True, False])
def test_groups(card, whole, on_the_card):
    x, y, bias = whole(44, 64), whole(3, 64, 48), whole(3, 48)
    a, b = card.put(x, "bf16"), card.put(y.swapaxes(1, 2), "bf16").T
    rows, columns = np.where(np.arange(44) % 2, 0.5, 2.0), np.array([1.0, 4.0, 0.25])
    vectors = {"scale_a": card.put(rows, "f32"), "scale_b": card.put(columns, "f32"), "bias": card.put(bias, "f32")}
    want = [(x[s:e] * rows[s:e, None]) @ (y[g] * columns[g]) + bias[g] for g, s, e in ((0, 0, 3), (2, 3, 40))]
    out = card.empty((44, 48), "bf16")
    gm.grouped_matmul(a, b, offsets=card.put(ENDS, "int32") if on_the_card else ENDS, out=out, **vectors)
    assert np.array_equal(out.numbers[:40], np.concatenate(want).astype(out.numbers.dtype))
    assert np.isnan(out.numbers[40:].astype(np.float32)).all()  # rows of no group
    assert card.launched == ["wgmma_grouped"]


@pytest.mark.parametrize("on_the_card", [True, False])
@pytest.mark.parametrize("k", [64, 68])  # of 68, no warp brings the last 4 of a row: the caller copies rows
def test_rows_of_groups_that_an_index_names(card, whole, on_the_card, k):
    x, y, bias = whole(20, k), whole(3, k, 48), whole(3, 48)
    a, b = (view(card.put(z, "bf16")) for z in (x, y))
    index = np.random.default_rng(3).integers(-20, 20, 44)
    ends = view(card.put(ENDS, "int32") if on_the_card else np.array(ENDS))
    terms = Options(bias=card.put(bias, "f32"))
    out = card.empty((44, 48), "bf16")
    result = on_device.gathered(a, b, out, view(card.put(index, "int64")), ends, terms)
    if k == 68:
        assert (result, card.launched) == (None, [])
        return
    want = [x[index[s:e]] @ y[g] + bias[g] for g, s, e in ((0, 0, 3), (2, 3, 40))]
    assert np.array_equal(out.numbers[:40], np.concatenate(want).astype(out.numbers.dtype))
    assert np.isnan(out.numbers[40:].astype(np.float32)).all()  # rows of no group
    assert card.launched == ["wgmma_grouped"]


@pytest.mark.parametrize("on_the_card", [True, False])
@pytest.mark.parametrize("columns", [64, 71])  # of A: 71 are packed first
def test_groups_along_k(card, whole, on_the_card, columns):
    x, y = whole(44, columns), whole(44, 48)
    a, b = card.put(x, "bf16").T, card.put(y, "bf16")
    want = np.stack([x[s:e].T @ y[s:e] for s, e in ((0, 3), (3, 3), (3, 40))])
    out = card.empty((3, columns, 48), "bf16")
    gm.grouped_matmul(a, b, offsets=card.put(ENDS, "int32") if on_the_card else ENDS, out=out)
    assert np.array_equal(out.numbers, want.astype(out.numbers.dtype))
    assert card.launched[-1] == "wgmma_grouped_k"


def test_no_groups(card, whole):
    a, b = card.put(whole(44, 64), "bf16"), card.empty((0, 48, 64), "bf16").T
    out = card.empty((44, 48), "bf16")
    assert gm.grouped_matmul(a, b, offsets=card.empty((0,), "int32"), out=out) is out
    assert np.isnan(out.numbers.astype(np.float32)).all()


def test_a_graph_captures_groups_of_a_k_of_0(card, monkeypatch):
    a, b = card.put(np.ones((4, 0)), "f16"), card.put(np.ones((0, 8)), "f16")
    offsets, out = card.put(np.zeros(3), "int32"), card.empty((3, 4, 8), "f16")
    ends_of_groups = []
    for module in (checked, on_device):
        monkeypatch.setattr(module, "located", lambda z: located(z)._replace(stream=7))
    monkeypatch.setattr(on_device.driver, "captures", lambda stream: stream == 7)
    monkeypatch.setattr(on_device.arrays, "allocates", lambda array: True)
    monkeypatch.setattr(grouped, "multiply_groups", lambda a, b, ends, *_: ends_of_groups.append(ends))
    assert gm.grouped_matmul(a, b, offsets=offsets, out=out) is out
    assert ends_of_groups == [[0, 0, 0]]
