"""verify(): random products on the CPU, and by a stand-in for a GPU; wrong ones are reported and can be repeated."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import gemmery_lab as lab
from gemmery.dtypes import DTYPES, FLOAT8
from gemmery.errors import ArgumentError, DeviceError
from gemmery_lab import cli, verification
from gemmery_lab.measure import torch_operands
from gemmery_lab.measure.work import numpy_dtype
from gemmery_lab.random_products import OTHERS, RINGS, TYPES, drawn, image


def expected(p, a, b, c, vectors):
    """Compute a product in float64 by NumPy."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    for_a, for_b = vectors["scale_a"], vectors["scale_b"]
    if p.scales == "numbers":
        x, y = x * for_a, y * for_b
    elif p.scales == "outer":
        x, y = x * for_a[:, None], y * for_b[..., None, :]
    elif p.scales == "blocks":
        rows, columns = np.arange(p.k) // 128, np.arange(p.n) // 128
        x, y = x * for_a[:, rows], y * for_b[rows][:, columns]
    starts = (0, *p.ends)
    groups = list(enumerate(zip(starts, p.ends, strict=False)))
    if p.deep:
        result = np.stack([x[:, s:e] @ y[s:e] for _, (s, e) in groups])
    else:
        result = np.concatenate([x[s:e] @ y[g] for g, (s, e) in groups]) if p.ends else x @ y
    result = p.alpha * result + (p.beta * c.astype(np.float64) if p.beta else 0)
    result = result + (0 if vectors["bias"] is None else vectors["bias"])
    if p.activation == "relu":
        result = np.maximum(result, 0)
    with np.errstate(over="ignore"):
        c[..., : result.shape[-2], :] = (
            result.astype(np.int64).astype(np.int32) if p.out == "int32" else result.astype(np.float32).astype(c.dtype)
        )


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Products of every type, option and layout, computed in float64 where a GPU would."""
    monkeypatch.setattr(verification, "_call", expected)
    types = [name for name in TYPES["cuda"] if name not in (*OTHERS, *RINGS)]
    seeds = [seed for seed in range(80) if drawn(seed, types, "cuda").activation in ("", "relu")]
    return [drawn(seed, types, "cuda") for seed in seeds]


def test_products_of_all_kinds_pass_on_the_cpu():
    run = lab.verify(100, seed=7)
    assert run.ok, run.wrong
    assert set(run.types) == set(TYPES["cpu"])
    assert 0 < run.worst <= 1


def test_every_element_type_that_a_cpu_multiplies_is_drawn():
    assert {row.name for row in DTYPES} - set(FLOAT8) - set(TYPES["cpu"]) == set()


def test_float64_that_is_rounded_to_float32_fails(monkeypatch):
    monkeypatch.setattr(verification, "_call", expected)
    drawn_ones = (drawn(seed, ["f64"], "cpu") for seed in range(20))
    products = [p for p in drawn_ones if p.k and not (p.whole or p.epilogue or p.activation or p.symmetric)]
    assert products
    for product in products:
        assert "times the bound" in verification._tried(product, verification.on_host)[0], str(product)


def test_float32_has_no_factors_on_a_gpu():
    assert {drawn(seed, ["f32"], "cuda").scales for seed in range(60)} == {""}


def test_a_right_result_passes_whatever_the_options(on_a_gpu):
    kinds = Counter((p.function, p.dtype, p.scales) for p in on_a_gpu)
    assert len(kinds) > 20
    assert {p.scales for p in on_a_gpu} == {"", "numbers", "outer", "blocks"}
    for product in on_a_gpu:
        assert verification._tried(product, verification.on_host)[0] == "", str(product)


def test_one_wrong_element_fails_of_every_type(on_a_gpu, monkeypatch):
    def wrong(p, a, b, c, vectors):
        expected(p, a, b, c, vectors)
        at = tuple(side // 2 for side in c.shape)
        c[at] = c[at].astype(np.float64) * 2 + 3

    monkeypatch.setattr(verification, "_call", wrong)
    for product in on_a_gpu:
        if product.whole or product.dtype == "int8":
            assert "times the bound" in verification._tried(product, verification.on_host)[0], str(product)


def test_an_unwritten_result_and_a_byte_beyond_it_fail(on_a_gpu, monkeypatch):
    monkeypatch.setattr(verification, "_call", lambda p, a, b, c, vectors: None)
    product = next(p for p in on_a_gpu if p.dtype == "bf16" and not p.beta)
    assert "element" in verification._tried(product, verification.on_host)[0]

    def beyond(placed):
        array, memory = verification.on_host(placed)
        memory()[-1] = 0
        return array, memory

    monkeypatch.setattr(verification, "_call", expected)
    assert verification._tried(product, beyond)[0] == "memory around C was written"


def test_a_row_of_no_group_that_is_written_fails(monkeypatch):
    def beyond(p, a, b, c, vectors):
        expected(p, a, b, c, vectors)
        c[-1] = 0

    drawn_ones = (drawn(seed, TYPES["cuda"], "cuda") for seed in range(400))
    products = [p for p in drawn_ones if p.ends and not p.deep and p.ends[-1] < p.m and p.activation in ("", "relu")]
    assert products
    monkeypatch.setattr(verification, "_call", beyond)
    for product in products:
        assert verification._tried(product, verification.on_host)[0] == (
            "memory around C or a row of no group was written"
        )


def test_a_group_of_no_k_that_is_not_zeros_fails(monkeypatch):
    def wrong(p, a, b, c, vectors):
        expected(p, a, b, c, vectors)
        c[[start == end for start, end in zip((0, *p.ends), p.ends, strict=False)]] = 1

    drawn_ones = (drawn(seed, TYPES["cpu"], "cpu") for seed in range(400))
    product = next(p for p in drawn_ones if p.deep and not p.activation and len(set(p.ends)) < len(p.ends))
    monkeypatch.setattr(verification, "_call", wrong)
    assert verification._tried(product, verification.on_host)[0] == "a group of no k is not zeros"


def test_the_seed_and_the_type_alone_repeat_a_product():
    for seed in range(50):
        product = drawn(seed, TYPES["cuda"], "cuda")
        assert drawn(seed, [product.dtype], "cuda") == product


@pytest.mark.parametrize("layout", ["row", "col", "padded", "padded col", "aligned", "odd", "strided", "one row"])
def test_images_have_guards_and_the_layout(layout):
    numbers = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3).astype(numpy_dtype("e4m3"))
    placed = image(numbers, layout)
    same = np.repeat(numbers[:, :1], 5, axis=1) if layout == "one row" else numbers
    np.testing.assert_array_equal(placed.matrices().astype(np.float32), same.astype(np.float32))
    first = placed.offset
    assert (placed.memory[:first] == 0xFF).all()
    assert (placed.memory[-64:] == 0xFF).all()


def test_the_command_shows_wrong_products_and_how_to_repeat_them(monkeypatch, capsys):
    assert cli.run(["verify", "--products", "3", "--dtype", "f32"]) == 0
    assert "3 products (3 f32) on cpu, seeds 0 to 2" in capsys.readouterr().out

    def fail(*_):
        raise ArgumentError("no such product\nof any kind")

    monkeypatch.setattr(verification, "computed", fail)
    assert cli.run(["verify", "--products", "30", "--seed", "7", "--dtype", "f16,int8"]) == 1
    out = capsys.readouterr().out
    assert "seeds 7 to 16" in out  # it stops after 10
    assert "  ArgumentError: no such product\n  again" in out
    assert "again: gemmery verify --device cpu --dtype" in out
    assert cli.run(["verify", "--products", "1", "--seed", "7"]) == 1
    assert "1 product (1 " in (out := capsys.readouterr().out)
    assert ") on cpu, seed 7, " in out
    assert cli.run(["verify", "--json", "--products", "1"]) == 1


def test_operands_become_tensors_of_any_layout(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(torch_operands, "without_torch", lambda: "")
    place = verification.on_gpu("cpu")
    for seed in range(8):
        product = drawn(seed, ("f16", "bf16", "f32"), "cpu")
        assert verification._tried(product, place)[0] == "", str(product)
    for name in ("e4m3", "e5m2", "int8"):
        placed = image(np.arange(30).reshape(2, 5, 3).astype(numpy_dtype(name)), "padded col")
        tensor, memory = place(placed)
        assert tuple(tensor.shape) == (2, 5, 3)
        assert tensor.double().numpy().tolist() == placed.matrices().astype(np.float64).tolist()
        assert np.array_equal(memory(), placed.memory)


def test_nothing_follows_an_error_of_the_device(monkeypatch):
    def fail(*_):
        raise DeviceError("an illegal memory access")

    monkeypatch.setattr(verification, "_call", fail)
    run = lab.verify(30)
    assert run.products == len(run.wrong) == 1


def test_what_cannot_be_verified_is_refused():
    with pytest.raises(
        ArgumentError, match=r"dtype 'e4m3' is not supported.*Supported: f16, bf16, f32, f64, int8, int16.*min_plus"
    ):
        lab.verify(1, dtypes=["e4m3"])
    with pytest.raises(ArgumentError, match="products 0"):
        lab.verify(0)
    with pytest.raises(ArgumentError, match="device 'tpu'"):
        lab.verify(1, "tpu")


def test_a_symmetric_product_is_symmetric_to_the_last_bit(monkeypatch):
    """One element off the diagonal is one unit in the last place away: the error is small, and C has no symmetry."""
    product = next(
        p for p in (drawn(seed, ["f32"], "cpu") for seed in range(1000)) if p.symmetric and p.m > 1 and p.batch == 1
    )
    checked, beside = verification.computed(product, verification.on_host)
    assert checked.ok
    assert not beside
    call = verification._call

    def nudged(p, a, b, c, vectors):
        assert np.shares_memory(a, b)
        call(p, a, b, c, vectors)
        c[0, -1] = np.nextafter(c[0, -1], np.float32(np.inf))

    monkeypatch.setattr(verification, "_call", nudged)
    checked, beside = verification.computed(product, verification.on_host)
    assert checked.ok
    assert "not symmetric" in beside


def test_products_with_epilogues_are_drawn_and_compared(monkeypatch):
    products = [p for p in (drawn(seed, TYPES["cpu"], "cpu") for seed in range(120)) if p.epilogue][:6]
    assert {p.weights for p in products} == {1, 2}
    assert all(verification._tried(p, verification.on_host)[0] == "" for p in products)
    multiply = verification.gm.matmul

    def wrong(*arguments, **options):
        results = multiply(*arguments, **options)
        first, *others = results if isinstance(results, tuple) else (results,)
        return first * 1.5 + 100, *others

    monkeypatch.setattr(verification.gm, "matmul", wrong)
    assert all("times the bound" in verification._tried(p, verification.on_host)[0] for p in products)
