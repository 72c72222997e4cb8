"""Random products of float32 in parts, on a device of the emulator: what is drawn, and that wrong results show."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import gemmery as gm
import gemmery_lab as lab
from emulated_card import OnCard, installed
from gemmery_lab import random_products, verification
from gemmery_lab.random_products import PARTS

pytest.importorskip("cuda.bindings")


@pytest.fixture
def card(monkeypatch):
    card = installed(monkeypatch)
    card.memory.restart()
    yield card
    assert card.findings == []


def placed_on(card):
    """What copies an image to the card."""

    def place(image):
        start = card.memory.take(image.memory.size)
        memory = card.memory.data[start : start + image.memory.size]
        memory[:] = image.memory
        size = image.dtype.itemsize
        steps = tuple(step * size for step in image.strides)
        return OnCard(card, start + image.offset * size, image.shape, steps, "f32"), memory.copy

    return place


def test_products_on_a_device(card, monkeypatch, sample):
    """Of each precision, by the rung that is its own."""
    monkeypatch.setattr(random_products, "_PARTS_MOST", 1e4)
    products = [random_products.drawn(seed, PARTS, "cuda") for seed in range(150)]
    deep = [p for p in products if p.k >= 128 and p.batch * p.m * p.n * p.k < 1e4]
    rungs = "split_fp16x3", "split_bf16x6", "split_paired"
    for precision, rung in sample(zip(PARTS, rungs, strict=True), 3):
        product = next(p for p in deep if p.dtype == precision and (p.invariant or precision != "f32_tensor"))
        reason, ratio = verification._tried(product, placed_on(card))
        assert reason == "", str(product)
        assert 0 < ratio <= 1
        assert card.launched[-1] == rung


def in_float64(p, a, b, c, vectors, off=0.0):
    """Compute a product by NumPy; one element is off by so many units of float32's rounding of |A||B|."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    product = x @ y
    product[..., -1, -1] += off * 2.0**-24 * (abs(x) @ abs(y))[..., -1, -1]
    result = p.alpha * product + (p.beta * c.astype(np.float64) if p.beta else 0)
    c[...] = result + (0 if vectors["bias"] is None else vectors["bias"])


def test_an_error_beyond_the_bound_shows(monkeypatch):
    for seed in range(60):
        product = random_products.drawn(seed, PARTS, "cuda")
        if product.batch * product.m * product.n * product.k > 1e6:
            continue
        monkeypatch.setattr(verification, "_call", in_float64)
        assert verification._tried(product, verification.on_host)[0] == "", str(product)
        off = 3 * random_products.growth_in_parts(product)(product.k) + 8
        monkeypatch.setattr(verification, "_call", lambda *given, off=off: in_float64(*given, off=off))
        assert "times the bound" in verification._tried(product, verification.on_host)[0], str(product)


def test_what_is_drawn():
    """The seed and the precision repeat a product; all spreads occur, batches of many, and k at which steps begin."""
    products = [random_products.drawn(seed, PARTS, "cuda") for seed in range(300)]
    assert products[7] == random_products.batch_in_parts(7, products[7].dtype)
    assert set(Counter(p.spread for p in products)) == set(random_products.SPREADS)
    assert {p.dtype for p in products} == set(PARTS)
    assert {p.k for p in products} >= {1, 15, 16, 127, 128}
    assert 30_000 < sum(p.batch for p in products) < 60_000
    steep = next(p for p in products if p.spread == "steep")
    a, b = (
        abs(random_products.values_in_parts(steep, shape, i)) for i, shape in enumerate(((99, steep.k), (steep.k, 99)))
    )
    sizes = np.median(a, 0), np.median(b, 1)
    assert np.allclose(np.log2(sizes[0] * sizes[1]), np.log2(np.median(sizes[0] * sizes[1])), atol=3)


def test_a_batch_counts_as_its_products(monkeypatch):
    monkeypatch.setattr(verification, "on_gpu", lambda device: verification.on_host)
    monkeypatch.setattr(verification.asked, "ordinal", lambda device: None if device == "cpu" else 0)
    monkeypatch.setattr(verification, "_call", in_float64)
    run = lab.verify(300, "cuda", ["f32_tensor", "f32_plus"], seed=5)
    assert run.ok
    assert run.products == sum(run.types.values()) >= 300 > run.seeds
    assert run.products == sum(
        random_products.drawn(5 + i, ("f32_tensor", "f32_plus"), "cuda").batch for i in range(run.seeds)
    )
    with pytest.raises(gm.ArgumentError, match="f32_tensor"):
        lab.verify(3, "cpu", ["f32_tensor"])
