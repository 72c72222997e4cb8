"""How float32 products may be computed: for a call, for a process, by the environment; no GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

import gemmery as gm
from gemmery import config
from gemmery.api import device_operands
from gemmery.api.device_call import table
from gemmery.cuda.device import KNOWN
from gemmery.dispatch import choice
from gemmery.dispatch.cuda import ranking
from gemmery.ladder import float32_parts
from gemmery.problem import Problem

pytest_plugins = ["card_fixtures"]
pytestmark = pytest.mark.sampled(5)

pytest.importorskip("cuda.bindings")
RUNGS = {"f32_tensor": "split_fp16x3", "f32_strict": "split_bf16x6", "f32_plus": "split_paired"}
SHAPE = (70, 40, 136)
UNIT = 2.0**-24


@pytest.fixture(autouse=True)
def _default():
    yield
    gm.set_float32_precision(None)


@pytest.fixture
def operands(card):
    m, n, k = SHAPE
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    return card.put(x, "f32"), card.put(y.T, "f32").T, x.astype(np.float64), y.astype(np.float64)


def multiplied(card, a, b, **options):
    """The elements of the product, in memory of the card."""
    out = card.empty((a.memory.shape[0], b.memory.shape[1]), a.dtype)
    gm.matmul(a, b, out, **options)
    return out.numbers


def units(result, x, y):
    """The largest error, in units of the rounding of float32 of |x| |y|."""
    return float((np.abs(result - x @ y) / (np.abs(x) @ np.abs(y))).max() / UNIT)


@pytest.fixture
def always(monkeypatch):
    """Parts for every size: a small product would be left to CUDA cores."""
    monkeypatch.setattr("gemmery.dispatch.cuda.parts_pay", lambda *_, **__: True)


@pytest.mark.many
@pytest.mark.parametrize("name", RUNGS)
def test_each_precision_has_its_rung_and_bound(card, operands, always, name):
    a, b, x, y = operands
    result = multiplied(card, a, b, precision=name)
    assert card.launched[-1] == RUNGS[name]
    assert units(result, x, y) <= 3
    assert not np.array_equal(result, (x @ y).astype(np.float32))  # it is not float64


def test_steps_after_the_product(card, operands, always):
    a, b, _, _ = operands
    bias = np.linspace(-2, 2, SHAPE[1]).astype(np.float32)
    plain = multiplied(card, a, b, precision="f32_strict")
    fused = multiplied(card, a, b, bias=card.put(bias, "f32"), activation="relu", precision="f32_strict")
    assert np.array_equal(fused, np.maximum(plain.astype(np.float32) + bias, 0))


def test_a_default_holds_for_calls_that_name_none(card, operands, always):
    a, b, _, _ = operands
    gm.set_float32_precision("f32_strict")
    assert gm.get_float32_precision() == "f32_strict"
    first = multiplied(card, a, b)
    assert card.launched[-1] == "split_bf16x6"
    assert np.array_equal(first, multiplied(card, a, b, precision="f32_strict"))
    multiplied(card, a, b, precision="f32_plus")
    assert card.launched[-1] == "split_paired"
    gm.set_float32_precision(None)
    multiplied(card, a, b)
    assert not card.launched[-1].startswith("split")


def test_a_default_leaves_other_types_alone(card):
    gm.set_float32_precision("f32_plus")
    ones = card.put(np.ones((16, 16)), "f16")
    assert (multiplied(card, ones, ones) == 16).all()
    assert not any(name.startswith("split") for name in card.launched)
    array = np.ones((4, 4), np.float32)
    assert (gm.matmul(array, array) == 4).all()  # on the CPU it has no meaning


def test_a_new_default_forgets_the_calls_of_before():
    table.calls["key"], table.latest["place"] = "call", ("call",)
    gm.set_float32_precision("tf32")
    assert (table.calls, table.latest) == ({}, {})


def test_the_environment_has_a_default(monkeypatch):
    monkeypatch.setenv("GEMMERY_FLOAT32_PRECISION", " F32_Tensor ")
    gm.set_float32_precision(None)
    assert gm.get_float32_precision() == "f32_tensor"
    monkeypatch.setattr(device_operands, "_default", device_operands._UNSET)
    assert gm.get_float32_precision() == "f32_tensor"
    monkeypatch.setenv("GEMMERY_FLOAT32_PRECISION", "double")
    with pytest.raises(gm.ArgumentError, match=r"GEMMERY_FLOAT32_PRECISION='double'.*tf32, f32_tensor.*unset it"):
        config.float32_precision()
    monkeypatch.delenv("GEMMERY_FLOAT32_PRECISION")


@pytest.mark.parametrize("value", ["high", "", 1, "F32_TENSOR", ["tf32"]])
def test_wrong_defaults_are_refused_and_change_nothing(value):
    gm.set_float32_precision("tf32")
    with pytest.raises(gm.ArgumentError, match="'tf32', 'f32_tensor', 'f32_strict' or 'f32_plus', or None"):
        gm.set_float32_precision(value)
    assert gm.get_float32_precision() == "tf32"


def test_what_no_product_can_have(card):
    halves, singles = card.put(np.ones((8, 8)), "f16"), card.put(np.ones((8, 8)), "f32")
    with pytest.raises(gm.ArgumentError, match=r"float16.*'f32_plus', for float32 products"):
        gm.matmul(halves, halves, precision="f32_plus")
    with pytest.raises(gm.ArgumentError, match=r"precision='f32'.*'f32_strict'"):
        gm.matmul(singles, singles, precision="f32")
    with pytest.raises(gm.ArgumentError, match="leave it out on the CPU"):
        gm.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), precision="f32_tensor")
    with pytest.raises(gm.RefusedError, match=r"f32_plus.*9.0.*8.0.*f32_strict"):
        device_operands.resolved("f32_plus", "f32", "f32", "a100")
    assert device_operands.resolved("f32_strict", "f32", "f32", "a100") == "f32_strict"


def test_float64_by_norms(card, monkeypatch):
    monkeypatch.setattr("gemmery.dispatch.cuda.residues_pay", lambda _: True)  # so small a one is left to float64
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((20, 40)), rng.standard_normal((40, 10))
    a, b = card.put(x, "f64"), card.put(y, "f64")
    result = multiplied(card, a, b, precision="f64_normwise")
    assert card.launched[-1] == "ozaki_int8"
    norms = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=0)
    assert (np.abs(result - x @ y) <= 2.0**-52 * norms).all()
    scaled = card.empty((20, 10), "f64")
    gm.gemm(0.5, a, b, out=scaled, precision="f64_normwise")
    assert np.array_equal(scaled.numbers, result / 2)
    multiplied(card, a, b)
    assert card.launched[-1] != "ozaki_int8"


def test_float64_by_norms_is_for_float64_on_hopper(card):
    singles, doubles = card.put(np.ones((8, 8)), "f32"), card.put(np.ones((8, 8)), "f64")
    with pytest.raises(gm.ArgumentError, match=r"float32.*'f64_normwise' for float64"):
        gm.matmul(singles, singles, precision="f64_normwise")
    with pytest.raises(gm.ArgumentError, match=r"'f32_plus'.*float64 into float64.*'f64_normwise'"):
        gm.matmul(doubles, doubles, precision="f32_plus")
    with pytest.raises(gm.ArgumentError, match="leave it out on the CPU"):
        gm.matmul(np.ones((2, 2)), np.ones((2, 2)), precision="f64_normwise")
    with pytest.raises(gm.RefusedError, match=r"f64_normwise.*9.0.*8.0.*float64 itself"):
        device_operands.resolved("f64_normwise", "f64", "f64", "a100")
    with pytest.raises(gm.ArgumentError, match="or None for the default"):
        gm.set_float32_precision("f64_normwise")


@pytest.mark.parametrize(
    ("fields", "rung"),
    [
        ({"k": 15}, "mma_f64"),
        ({"k": 70_000}, "mma_f64"),
        ({"m": 2048, "n": 2048, "k": 2048}, "mma_f64"),
        ({"m": 2048, "n": 2048, "k": 2048, "invariant": True}, "ozaki_int8"),
        ({}, "ozaki_int8"),
    ],
)
def test_what_residues_do_not_suit_is_float64(fields, rung):
    p = Problem(4096, 4096, 4096, "f64", "f64", device="h200", precision="f64_normwise")._replace(**fields)
    assert choice(p).rung.name == rung


@pytest.mark.parametrize(
    ("planted", "name", "verdict", "bound"),
    [
        (1.0, "fp16x3", "two halves will do", float32_parts.two_parts),
        (1e-30, "bf16x6", "too small for two halves", float32_parts.three_parts),
        (np.nan, "float32", "an operand has Inf or NaN", float),
    ],
)
def test_an_explanation_has_the_verdict_about_the_numbers(
    card, operands, always, monkeypatch, planted, name, verdict, bound
):
    """By the device's own guard, which multiplies nothing here."""
    monkeypatch.setattr("gemmery.api.explanation._device_limits", lambda *_: (1e5, 1e3))
    a, b, _, _ = operands
    a.numbers[2, 130], before = planted, a.numbers[2, 130]
    explained = gm.explain(a, b, precision="f32_tensor")
    a.numbers[2, 130] = before
    assert explained.peak_gflops == 1e5 / 3  # three products for one
    assert not {"split_fp16x3", "split_bf16x6", "split_simt"} & set(card.launched)
    assert (explained.scheme.name, explained.scheme.bound) == (name, bound(SHAPE[2]))
    text = str(explained)
    assert verdict in text
    assert f"scheme     {name}: " in text
    assert "error      at most f(k) u |A| |B| in each element, u = 2^-24, f(k) = " in text


def test_an_explanation_of_what_no_numbers_decide(card, operands, monkeypatch):
    monkeypatch.setattr("gemmery.api.explanation._device_limits", lambda *_: (1e5, 1e3))
    a, b, _, _ = operands
    for chosen, name in (("f32_plus", "paired"), ("f32_strict", "bf16x6"), ("f32_tensor", "float32")):
        scheme = gm.explain(a.rows(0, 8), b, precision=chosen).scheme
        assert (scheme.name, scheme.verdict) == (name, "")
    assert gm.explain(a, b).scheme is None
    assert card.launched == []


def names(**fields):
    """The rungs that a product on an H200 would take, best first."""
    p = Problem(4096, 4096, 4096, "f32", "f32", device="h200")._replace(**fields)
    return [name for name, _ in ranking(p, KNOWN["h200"])]


def test_small_products_stay_on_cuda_cores():
    assert names(precision="f32_tensor")[0] == "split_fp16x3"
    for small in ({"m": 8}, {"k": 127}, {"m": 256, "n": 256, "k": 256}, {"k": 0}):
        assert not names(precision="f32_tensor", **small)[0].startswith("split"), small
    assert names(precision="f32_tensor", m=1)[0] == "gemv_vectorized"
    assert names(precision="f32_strict", m=8)[0] == "split_bf16x6"  # by name: bits, not time
    assert not names(precision="f32_strict", k=15)[0].startswith("split")
    assert names(precision="f32_plus", m=1, k=1)[0] == "split_paired"
    assert not names(precision="")[0].startswith("split")


def test_an_invariant_product_is_chosen_without_m():
    for m in (1, 8, 300, 8192):
        assert names(precision="f32_tensor", invariant=True, m=m)[0] == "split_fp16x3"


def test_other_devices_multiply_float32_itself():
    for name in ("f32_tensor", "f32_strict"):
        p = Problem(512, 512, 512, "f32", "f32", device="a100", precision=name)
        assert choice(p).rung.name == "simt_pipelined"
