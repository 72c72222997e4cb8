"""Few rows times packed weights: values on the emulator, every byte, mutants, refusals, the API's way to a launch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from emulated_card import ORDINAL, installed
from gemmery.api.packed import prepare_packed, prepare_unpacking
from gemmery.arrays import View
from gemmery.cuda import nvrtc
from gemmery.cuda.launch import Ready
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.gpu import cut_off
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery_lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung
from mutant import edited

pytestmark = pytest.mark.sampled(3)

pytest.importorskip("cuda.bindings")

RUNG = find(CUDA, "gemv_quantized")
KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
ROUNDOFF = {"bf16": 2.0**-8, "f16": 2.0**-11}
PACKED = Problem(1, 4096, 4096, "bf16", "bf16", b_layout="col", device="h200", bits=4, group=128)


def packed(levels, bits):
    """Levels as bytes: two columns in one where they have 4 bits."""
    if bits == 8:
        return levels.astype(np.int8).view(np.uint8)
    halves = (levels + 8).astype(np.uint8)
    return halves[:, 0::2] | halves[:, 1::2] << 4


def weights(n, k, bits, group, dtype):
    """Levels of every value, and factors of many sizes."""
    rng = np.random.default_rng(n + k)
    levels = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, k))
    return levels, np.exp2(rng.uniform(-6, 3, (n, k // group))).astype(KINDS[dtype])


def emulated(x, levels, scales, bits, dtype, *, epilogue="", bias=None, config=None, texts=None):
    """The layer by the rung, and the faults of the run."""
    (m, k), n, word = x.shape, len(levels), np.uint16 if dtype == "bf16" else np.float16
    c = np.full((1, m, n), np.nan, KINDS[dtype]).view(word)
    gemm = Gemm(
        x.view(word)[None], packed(levels, bits).T[None], c, bias, b_scale=np.ascontiguousarray(scales).view(word)[None]
    )
    case = problem_of(gemm, dtype, dtype, "h200", epilogue=epilogue)
    case = case._replace(b_layout="col", alignments=(16, 16, 16), bits=bits, group=k // scales.shape[1])
    runs = run_rung(RUNG, case, config or {}, gemm, EmulationOptions(texts=texts))
    return c[0].view(KINDS[dtype]).astype(float), [str(each) for run in runs for each in run.findings]


@pytest.mark.parametrize(
    ("shape", "bits", "group", "dtype", "config"),
    [
        ((1, 40, 384), 4, 128, "bf16", {}),
        ((1, 40, 384), 8, 64, "f16", {}),
        ((3, 17, 768), 8, 384, "bf16", {"tiles": 2, "warps": 4, "steps": 1}),
        ((13, 133, 640), 4, 640, "f16", {"warps": 4, "blocks": 1}),
        ((64, 24, 128), 4, 128, "bf16", {}),
        ((5, 4400, 128), 8, 128, "bf16", {"warps": 16, "blocks": 1}),  # blocks that have several tiles
    ],
)
def test_values_are_within_the_bound(shape, bits, group, dtype, config):
    m, n, k = shape
    x = np.random.default_rng(1).standard_normal((m, k)).astype(KINDS[dtype])
    levels, scales = weights(n, k, bits, group, dtype)
    bias = np.linspace(-9, 9, n, dtype=np.float32)
    weight = levels * np.repeat(scales.astype(float), group, 1)
    exact, size = x.astype(float) @ weight.T + bias, np.abs(x.astype(float)) @ np.abs(weight).T + np.abs(bias)
    result, findings = emulated(x, levels, scales, bits, dtype, epilogue="bias", bias=bias, config=config)
    assert findings == []
    difference, rounding = np.abs(result - exact), ROUNDOFF[dtype] * np.abs(exact)
    assert np.all(difference <= cut_off(k) * 2.0**-24 * size * 1.01 + rounding)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("bits", [8, 4])
def test_every_level_is_exact_wherever_it_stands(bits, dtype):
    k = 256
    levels = (np.arange(k) + np.arange(k)[:, None]) % 2**bits - 2 ** (bits - 1)
    x = np.zeros((2, k), KINDS[dtype])
    for column in range(0, k, 37):
        x[:] = 0
        x[0, column], x[1, -1 - column] = 1, -2
        result, _ = emulated(x, levels, np.ones((k, 2)).astype(KINDS[dtype]), bits, dtype)
        assert np.array_equal(result, [levels[:, column], -2 * levels[:, -1 - column]])


def test_the_bits_of_a_row_depend_on_no_other_row():
    x = np.random.default_rng(2).standard_normal((21, 512)).astype(np.float16)
    levels, scales = weights(24, 512, 4, 128, "f16")
    together = emulated(x, levels, scales, 4, "f16")[0]
    assert np.array_equal(together[20:], emulated(x[20:], levels, scales, 4, "f16")[0])


@pytest.mark.many
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("words[e], row + distance[e]", "words[e], row"),
        ("BASE | 0x00080008, MINUS", "BASE | 0x00070007, MINUS"),
        ("(word & 0x80 * twice) | BASE", "BASE"),
        ("x[j / 2 + 8 / BITS]", "x[j / 2 + 1]"),
        ("step * Tiles::DEEP / Tiles::GROUP", "step"),
        ("rows.first * groups", "rows.first"),
        ("p.k / 16 * Tiles::BITS", "p.k / 16 * 16"),
        ("cp_async_wait_group<Tiles::STEPS - 1>", "cp_async_wait_group<Tiles::STEPS>"),
        ("tile += gridDim.x;\n      enter();", "enter();"),
        ("buffer ^= 1;", ""),
    ],
)
def test_a_kernel_that_is_wrong_about_packed_weights_is_told(old, new):
    texts, config = edited("gemv_quantized.cu", old, new), {"warps": 4, "blocks": 1}
    x = np.random.default_rng(3).integers(-3, 4, (11, 512)).astype(np.float16)
    for bits, group in ((4, 128), (8, 128)):
        levels, _ = weights(2200, 512, bits, group, "f16")
        scales = np.exp2(np.random.default_rng(4).integers(-2, 3, (2200, 4))).astype(np.float16)
        levels //= 2 ** (bits - 4)  # sums that f16 holds
        expected = (x.astype(float) @ (levels * np.repeat(scales.astype(float), group, 1)).T).astype(np.float16)
        result, findings = emulated(x, levels, scales, bits, "f16", config=config, texts=texts)
        if findings or not np.array_equal(result, expected):
            return
    raise AssertionError("nothing shows that it is wrong")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"m": 65}, "at most 64 rows"),
        ({"bits": 0, "m": 9}, "at most 8 rows"),
        ({"bits": 3}, "3 bits: it unpacks 8 and 4"),
        ({"group": 64}, "groups of 64 in k=4096: of 4 bits a group is a multiple of 128"),
        ({"bits": 8, "group": 96}, "a multiple of 64"),
        ({"alignments": (8, 16, 16)}, "16 bytes"),
        ({"out": "f64"}, "not f64"),
    ],
)
def test_what_it_does_not_multiply_is_refused_in_words(change, words):
    assert words in RUNG.refuses(PACKED._replace(**change))
    assert RUNG.refuses(PACKED) == ""


@pytest.mark.many(5)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("n", [16, 2048, 14336, 128256])
@pytest.mark.parametrize("m", [1, 9, 17, 64])
def test_nothing_spills_and_all_blocks_run_at_once(m, n, bits):
    geometry = RUNG.geometry(PACKED._replace(m=m, n=n, bits=bits), RUNG.default)
    report = nvrtc.code(geometry.source, geometry.kernel, "sm_90a").report
    assert report.spill_stores == report.spill_loads == 0
    each = min(65536 // (geometry.threads * report.registers), (227 << 10) // (geometry.shared + 1024))
    assert geometry.grid[0] * geometry.grid[1] <= 132 * each


def on_the_card(card, x, levels, scales, bits, dtype, epilogue=""):
    """A layer by the launch that the API prepares; the word why there is none."""
    word = "bf16" if dtype == "bf16" else "f16"
    a, w, s = card.put(x, word), card.put(packed(levels, bits), "uint8"), card.put(scales, word)
    c = card.empty((len(x), len(levels)), word)
    run = prepare_packed(
        *(z.memory._replace(pointer=z.memory.pointer & 15, owner=None) for z in (a, w, s, c)), bits, epilogue
    )
    if isinstance(run, Ready):
        run(a.memory.pointer, w.memory.pointer, c.memory.pointer, 0, 0, s.memory.pointer)
    return c.numbers if isinstance(run, Ready) else run


@pytest.mark.parametrize("bits", [8, 4])
def test_the_launch_that_the_api_prepares(bits, monkeypatch):
    card = installed(monkeypatch)
    rng = np.random.default_rng(bits)
    x, levels = rng.integers(-2, 3, (3, 256)), rng.integers(-7, 8, (40, 256))
    scales = np.exp2(rng.integers(-1, 2, (40, 2)))
    result = on_the_card(card, x, levels, scales, bits, "f16", "relu")
    assert np.array_equal(result, np.maximum(x @ (levels * np.repeat(scales, 128, 1)).T, 0))
    assert card.launched == ["gemv_quantized"]
    assert card.findings == []
    assert "groups of 32" in on_the_card(card, x, levels, np.ones((40, 8)), bits, "f16")
    assert "not empty" in on_the_card(card, x[:0], levels, scales, bits, "f16")


def test_other_types_have_no_launch():
    x, packed_, c = (View(0, shape, (256, 1), "f32", f"cuda:{ORDINAL}") for shape in ((1, 256), (4, 256), (1, 4)))
    assert "f16 or bf16" in prepare_packed(x, packed_, packed_, c, 8, "")


def unpacked_on(card, levels, scales, bits, dtype):
    """The matrix that the kernel unpacks; the words why there is none."""
    word = "bf16" if dtype == "bf16" else "f16"
    w, s = card.put(packed(levels, bits), "uint8"), card.put(scales, word)
    c = card.empty(levels.shape, word)
    views = (z.memory._replace(pointer=z.memory.pointer & 15, owner=None) for z in (w, s))
    run = prepare_unpacking(*views, None, None, word, f"int{bits}")
    if isinstance(run, Ready):
        run(0, w.memory.pointer, c.memory.pointer, 0, 0, s.memory.pointer)
    return c.numbers if isinstance(run, Ready) else run


@pytest.mark.many(3)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("bits", "group"), [(8, 8), (4, 8), (8, 136), (4, 136)])
def test_a_matrix_is_unpacked_with_one_rounding(bits, group, dtype, monkeypatch):
    """Every level, and more elements than a block has, not as many as two have."""
    card, rng = installed(monkeypatch), np.random.default_rng(bits)
    levels = (np.arange(41 * 272) * 5 % 2**bits - 2 ** (bits - 1)).reshape(41, 272)
    scales = np.exp2(rng.uniform(-6, 3, (41, 272 // group))).astype(KINDS[dtype])
    weight = (levels * np.repeat(scales.astype(float), group, 1)).astype(KINDS[dtype])
    result = unpacked_on(card, levels, scales, bits, dtype)
    assert np.array_equal(result.view(np.uint16), weight.view(np.uint16))
    assert (card.launched, card.findings) == (["unpack"], [])


def test_what_no_kernel_unpacks_has_a_reason(monkeypatch):
    card = installed(monkeypatch)
    levels = np.zeros((4, 24), int)
    assert "groups of 12" in unpacked_on(card, levels, np.ones((4, 2)), 4, "f16")
    assert "not empty" in unpacked_on(card, levels[:0], np.ones((0, 3)), 8, "f16")
    one, factors = View(0, (4, 24), (24, 1), "uint8"), View(0, (4, 3), (12, 4), "f32")
    assert "f32, f16 or bf16" in prepare_unpacking(one, factors, None, None, "f64", "int8")
    assert "factors of f64" in prepare_unpacking(one, factors._replace(dtype="f64"), None, None, "f16", "int8")
    assert "contiguous" in prepare_unpacking(one._replace(strides=(48, 1)), factors, None, None, "f16", "int8")
