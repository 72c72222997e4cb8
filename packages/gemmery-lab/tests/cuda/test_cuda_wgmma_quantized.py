"""Any number of rows times weights of few bits by wgmma: values on the emulator, variants, refusals, arrangement."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from emulated_card import installed
from gemmery.api import packed
from gemmery.api.packed import prepare_arranged
from gemmery.arrays import View
from gemmery.cuda import nvrtc, weights
from gemmery.cuda.choose.variants import QUANTIZED, stages, tiles_cut
from gemmery.cuda.launch import Ready
from gemmery.cuda.weights import Format
from gemmery.errors import ArgumentError, CompileError, EmulationError, RefusedError, ShapeError
from gemmery.ladder import cuda
from gemmery.ladder.cuda import BY_WEIGHTS
from gemmery.ladder.rung import find
from gemmery.ladder.wgmma import aligned_sums
from gemmery.problem import Problem
from gemmery_lab.emulated_product import EmulationOptions, Gemm, launch_of, run_rung
from mutant import edited

pytestmark = pytest.mark.sampled(7)

RUNG = find(BY_WEIGHTS, "wgmma_quantized")
TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
ROUNDOFF = {"bf16": 2.0**-8, "f16": 2.0**-11}
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GUARD = 8  # elements around each row of C: where n is a multiple of 8, rows begin at multiples of 16 bytes
SMALL = {"tokens": 8, "warpgroups": 4, "blocks": 1, "ways": 2, "stages": 4, "resident": 1}
SMALL |= {"runs": 0, "turns": 1, "shares": 1}
THREE = SMALL | {"warpgroups": 3, "ways": 1}  # whose 192 rows are in one band of 256 or in two


def logical(form, seed=0):
    """Codes, factors and zero points of every value; and the weight they stand for, in float64, each rounded once."""
    rng, (n, k) = np.random.default_rng(seed), (form.n, form.k)
    codes = rng.integers(0, 256 if weights.KINDS[form.kind] == 8 else 16, (n, k)).astype(np.uint8)
    scales = zeros = rows = None
    if form.kind == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
        levels = codes.view(ml_dtypes.float8_e4m3fn).astype(float)
    elif form.kind == "e2m1":
        levels = FLOAT4[codes & 7] * np.where(codes & 8, -1, 1)
    else:
        levels = codes.view(np.int8).astype(float) if form.kind == "int8" else codes.astype(float)
    if form.group:
        least, span = (rng.integers(-9, 0, (n, 1)), 5) if form.kind == "int4_close" else (-6, 8)
        scales = np.exp2(rng.uniform(least, least + span, (n, k // form.group))).astype(TYPES[form.dtype])
        spread = np.repeat(scales.astype(float), form.group, 1)
        if form.kind == "int4_zeros":
            zeros = rng.integers(0, 17, scales.shape).astype(np.uint8)
            levels -= np.repeat(zeros, form.group, 1)
        elif form.kind in ("int4", "int4_close"):
            levels -= 8
        exact = (levels * spread).astype(TYPES[form.dtype]).astype(float)
        scales = scales.view(np.uint16)
    else:
        rows = np.exp2(rng.uniform(-6, 2, n)).astype(np.float32)
        exact = levels * rows[:, None]
    return codes, scales, zeros, rows, exact


def problem(form, m, epilogue=""):
    """The product of m rows by an arranged weight."""
    fields = {"bits": weights.KINDS[form.kind], "group": form.group, "levels": form.kind, "epilogue": epilogue}
    return Problem(m, form.n, form.k, form.dtype, form.dtype, b_layout="col", device="h200", **fields)


def emulated(form, m, *, config=None, epilogue="", seed=0, order=None, texts=None, invariant=False):
    """The product by the rung, its exact value and size, the faults of the run, and the bits of C with its guards."""
    *parts, w = logical(form, seed)
    rng = np.random.default_rng(seed + 1)
    x = rng.standard_normal((m, form.k)).astype(TYPES[form.dtype])
    bias = np.linspace(-3, 3, form.n, dtype=np.float32) if "bias" in epilogue else None
    around = np.full((m + 2, form.n + 2 * GUARD), 0x7FFF, np.uint16)
    c = around[1:-1, GUARD:-GUARD][None]
    case = problem(form, m, epilogue)._replace(invariant=invariant)
    arranged = weights.arrange(form, *parts)
    counters = np.zeros(max(4, launch_of(RUNG, case, config or {}).counters) // 4, np.int32)
    gemm = Gemm(x.view(np.uint16)[None], arranged[None, None], c, bias, offsets=counters)
    runs = run_rung(RUNG, case, config or {}, gemm, EmulationOptions(seed=order, texts=texts))
    exact, size = x.astype(float) @ w.T, np.abs(x.astype(float)) @ np.abs(w).T
    if bias is not None:
        exact, size = exact + bias, size + np.abs(bias)
    if "relu" in epilogue:
        exact = np.maximum(exact, 0)
    assert not counters.any()
    inside = c[0].copy()
    around[1:-1, GUARD:-GUARD] = 0x7FFF
    assert np.all(around == 0x7FFF)
    return inside.view(TYPES[form.dtype]).astype(float), exact, size, [str(f) for run in runs for f in run.findings]


def multiplied(form, x, parts, config, texts=None):
    """The product of x by the rung, and the faults of the run."""
    c = np.full((1, len(x), form.n), 0x7FFF, np.uint16)
    gemm = Gemm(x.view(np.uint16)[None], weights.arrange(form, *parts)[None, None], c, offsets=np.zeros(64, np.int32))
    runs = run_rung(RUNG, problem(form, len(x)), config, gemm, EmulationOptions(texts=texts))
    return c[0].view(TYPES[form.dtype]).astype(float), [str(each) for run in runs for each in run.findings]


def check(form, m, **options):
    """The result is within the bound, and nothing was found."""
    result, exact, size, findings = emulated(form, m, **options)
    assert findings == []
    rounding = ROUNDOFF[form.dtype] * np.abs(exact)
    assert np.all(np.abs(result - exact) <= aligned_sums(form.k) * 2.0**-24 * size * 1.01 + rounding)
    return result


@pytest.mark.many(4)
@pytest.mark.parametrize(
    ("m", "form", "config"),
    [
        (3, Format(131, 384, "int4", 128, "bf16"), {}),
        (17, Format(96, 520, "int8", 0, "f16"), {}),
        (9, Format(70, 192, "int4_zeros", 64, "bf16"), {}),
        (5, Format(64, 96, "int4_zeros", 32, "f16"), {}),
        (1, Format(257, 256, "e4m3", 0, "bf16"), {}),
        (2, Format(65, 200, "e4m3", 0, "f16"), {}),
        (8, Format(64, 160, "e2m1", 32, "bf16"), {}),
        (8, Format(63, 144, "e2m1", 16, "f16"), {}),
        (4, Format(64, 512, "int4", 256, "f16"), {}),
        (9, Format(131, 512, "int4_close", 32, "f16"), {}),
        (4, Format(64, 256, "int8", 128, "bf16"), {}),
        (
            33,
            Format(128, 768, "int4", 32, "bf16"),
            {"tokens": 16, "warpgroups": 4, "ways": 2, "stages": 4, "splits": 2},
        ),
        (70, Format(300, 640, "int4", 128, "bf16"), {"tokens": 64, "warpgroups": 4, "ways": 1, "runs": 7, "stages": 5}),
        (6, Format(830, 1536, "int4", 64, "bf16"), SMALL | {"runs": 3}),
        (20, Format(300, 384, "int8", 0, "bf16"), SMALL | {"ways": 1, "runs": 2}),
        (11, Format(451, 384, "int4_zeros", 64, "bf16"), THREE),
        (20, Format(900, 520, "int8", 0, "f16"), THREE | {"runs": 2}),
        (9, Format(640, 512, "int4", 128, "bf16"), THREE | {"splits": 2}),
        (
            130,
            Format(140, 384, "int4", 64, "f16"),
            {"tokens": 128, "warpgroups": 2, "blocks": 2, "ways": 1, "stages": 3},
        ),
    ],
)
def test_values_are_within_the_bound_between_guards(m, form, config):
    check(form, m, config=config, epilogue="bias+relu" if form.n % 2 else "")


@pytest.mark.parametrize("splits", [1, 2])
def test_the_launch_that_is_prepared(splits, monkeypatch):
    """Through the driver's arguments, twice by the same counters."""
    card = installed(monkeypatch)
    form = Format(70, 1024, "int4", 128, "bf16")
    *parts, w = logical(form)
    x = np.random.default_rng(5).integers(-2, 3, (3, form.k))
    a, b, c = card.put(x, "bf16"), card.put(weights.arrange(form, *parts), "uint8"), card.empty((3, form.n), "bf16")
    monkeypatch.setattr(cuda, "variant_of", lambda *_: SMALL | {"splits": splits})
    views = (z.memory._replace(pointer=z.memory.pointer & 15, owner=None) for z in (a, c))
    run = prepare_arranged(next(views), form, next(views))
    assert isinstance(run, Ready)
    counters, scratch = card.put(np.zeros(64), "uint8"), card.empty((max(1, run.workspace),), "uint8")
    exact = x @ w.T
    for _ in range(2):
        extra = (0, 0, counters.memory.pointer) if run.counters else ()
        run(a.memory.pointer, b.memory.pointer, c.memory.pointer, 0, 0, scratch.memory.pointer, None, extra)
        assert np.all(np.abs(c.numbers - exact) <= 2.0**-8 * np.abs(exact) + 2.0**-14 * (np.abs(x) @ np.abs(w).T))
    assert card.launched == ["wgmma_quantized"] * 2
    assert (run.counters > 0) == (splits == 2)
    assert card.findings == []


def test_a_kernel_that_does_not_compile_is_told_once(monkeypatch):
    installed(monkeypatch)

    def broken(*_):
        raise CompileError("unpack.cuh:7: no type named Spot")

    candidate = SimpleNamespace(rung=SimpleNamespace(name="wgmma_quantized", build=broken), config={})
    monkeypatch.setattr(packed, "quantized", lambda _: candidate)
    x, c = (View(0, (3, n), (2 * n, 2), "bf16", "cuda:0") for n in (1024, 70))
    with pytest.warns(RuntimeWarning, match="wgmma_quantized does not compile.*no type named Spot"):
        assert "Spot" in prepare_arranged(x, Format(70, 1024, "int4", 128, "bf16"), c)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "Spot" in prepare_arranged(x, Format(70, 1024, "int4", 128, "bf16"), c)


@pytest.mark.parametrize(
    ("tiles", "steps", "blocks", "cut"), [(6, 4, 6, 0), (7, 20, 6, 7), (9, 20, 6, 3), (11, 20, 6, 0), (4, 20, 6, 4)]
)
def test_tiles_are_cut_where_others_of_a_round_would_wait_for_long(tiles, steps, blocks, cut):
    assert tiles_cut(tiles, steps, blocks) == cut


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 100, "group": 0, "levels": "int8"}, "k=100"),
        ({"k": 96, "group": 64}, "k is a multiple of 64"),
        ({"group": 48}, "groups of 48"),
        ({"levels": "int3"}, "arrange has put in its order"),
        ({"out": "f32"}, "not f32"),
        ({"alignments": (8, 16, 16)}, "multiples of 8 bytes"),
        ({"scaled": True}, "alpha, beta"),
        ({"c_layout": "any"}, "adjacent"),
    ],
)
def test_what_it_does_not_multiply_is_refused_in_words(change, words):
    case = problem(Format(512, 256, "int4", 128, "bf16"), 16)
    assert RUNG.refuses(case) == ""
    assert words in RUNG.refuses(case._replace(**change))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"ways": 4, "stages": 6}, "wait for ever"),
        ({"ways": 4, "turns": 2}, "turns=2, ways=4"),
        ({"shares": 2}, "shares=2, ways=2"),
        ({"ways": 2, "stages": 3}, "wait for ever"),
        ({"blocks": 2}, None),
        ({"warpgroups": 2, "ways": 4}, "64 to 256 rows"),
        ({"tokens": 128, "stages": 8}, "take fewer stages"),
        ({"tokens": 64, "ways": 1, "stages": 3, "warpgroups": 4}, None),
        ({"resident": 2, "tokens": 96}, "2 blocks"),
    ],
)
def test_variants_that_would_hang_or_do_not_fit_are_refused_before_the_launch(config, words):
    case = problem(Format(512, 2048, "int4", 128, "bf16"), 16)
    if words is None:
        assert RUNG.geometry(case, SMALL | RUNG.default | SMALL | config).threads == 640
        return
    with pytest.raises(RefusedError, match=words):
        RUNG.geometry(case, RUNG.default | SMALL | {"ways": 2} | config)


@pytest.mark.many
@pytest.mark.parametrize("tile", QUANTIZED)
@pytest.mark.parametrize("kind", ["int4/128/bf16", "int4_zeros/32/f16", "int8/0/bf16", "e4m3/0/f16", "e2m1/16/bf16"])
@pytest.mark.parametrize(
    ("runs", "turns", "shares"), [(0, 1, 1), (132, 1, 1), (0, 4, 1), (132, 2, 1), (0, 2, 2), (132, 1, 2)]
)
def test_registers_suffice_for_every_variant(tile, kind, runs, turns, shares):
    """What consumers ask for is what the launch has, or the device waits for ever; and nothing spills."""
    name, group, dtype = kind.split("/")
    form = Format(4096, 4096, name, int(group), dtype)
    depth = stages(form, tile, runs > 0, shares > 1)
    if not depth or (runs and (tile.resident, tile.tokens) in ((2, 16), (2, 32))):  # never chosen
        return
    if runs and tile.warpgroups == 4 and tile.tokens >= {1: 64, 2: 56, 4: 32}[tile.ways]:
        return
    if max(turns, shares) > 1 and (tile.ways > 1 or tile.tokens > {2: 152, 3: 104}.get(tile.warpgroups, 0)):
        return
    config = dict(zip(tile._fields, tile, strict=True)) | {"stages": depth, "splits": 1, "runs": runs}
    config |= {"turns": turns, "shares": shares}
    geometry = RUNG.geometry(problem(form, tile.tokens), RUNG.default | config)
    program = nvrtc.code(geometry.source, geometry.kernel, "sm_90a")
    assert program.report.spill_stores == program.report.spill_loads == program.report.stack == 0
    launched = 65536 // tile.resident // geometry.threads // 8 * 8
    assert program.report.registers == launched
    taken = re.findall(
        r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32 (\d+)", nvrtc.ptx(geometry.source, geometry.kernel, "sm_90a").text
    )
    each = {way: int(count) for way, count in taken}
    assert each["inc"] * tile.warpgroups + each["dec"] <= launched * (tile.warpgroups + 1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"codes": (512, 255)}, "codes has shape"),
        ({"scales": (512, 3)}, "scales has shape"),
        ({"zeros": (512, 2)}, "zeros has shape"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(wrong, words):
    form = Format(512, 256, "int4", 128, "bf16")
    shapes = {"codes": (512, 256), "scales": (512, 2)} | wrong
    arrays = {name: np.zeros(shape, np.uint16 if name == "scales" else np.uint8) for name, shape in shapes.items()}
    with pytest.raises(ShapeError, match=words):
        weights.arrange(form, **arrays)


@pytest.mark.parametrize(("kind", "dtype", "power"), [("int4", "bf16", 8), ("e2m1", "bf16", 15)])
def test_factors_that_do_not_fit_are_refused(kind, dtype, power):
    form = Format(3, 64, kind, 64, dtype)
    for exponent in (power - 1, power):
        scales = np.full((3, 1), 2.0**exponent).astype(TYPES[dtype]).view(np.uint16)
        if exponent < power:
            weights.arrange(form, np.zeros((3, 64), np.uint8), scales)
            continue
        with pytest.raises(ArgumentError, match=rf"2\^{power} or more"):
            weights.arrange(form, np.zeros((3, 64), np.uint8), scales)


@pytest.mark.parametrize(
    ("factors", "near"),
    [
        ((1, 31, 0, -1.5), True),
        ((2.0**-14, 2.0**-9), True),
        ((1, 64), False),
        ((2.0**-15, 2.0**-14), False),
        ((1, np.inf), False),
    ],
)
def test_factors_are_close_where_all_of_a_row_are_normal_and_alike(factors, near):
    form = Format(1, 64 * len(factors), "int4", 64, "f16")
    scales = np.array([factors], np.float16).view(np.uint16)
    assert weights.close(form, scales).kind == ("int4_close" if near else "int4")
    assert weights.close(form._replace(dtype="bf16"), scales).kind == "int4"


@pytest.mark.many(5)
@pytest.mark.parametrize("kind", ["int4", "int8", "e4m3", "e2m1"])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_code_is_exact_wherever_it_stands(kind, dtype):
    """One token a column: a unit vector picks a column of W."""
    many = 2 ** weights.KINDS[kind]
    form = Format(many, 128, kind, 0 if kind in ("int8", "e4m3") else 64, dtype)
    codes = ((np.arange(128) + np.arange(many)[:, None]) % many).astype(np.uint8)
    if kind == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0
        levels = codes.view(ml_dtypes.float8_e4m3fn).astype(float)
    elif kind == "e2m1":
        levels = FLOAT4[codes & 7] * np.where(codes & 8, -1, 1)
    else:
        levels = codes.view(np.int8).astype(float) if kind == "int8" else codes - 8.0
    one = np.full((many, 2), 1).astype(TYPES[dtype]).view(np.uint16) if form.group else None
    result, findings = multiplied(form, np.eye(128).astype(TYPES[dtype]), (codes, one), {"tokens": 64})
    assert findings == []
    assert np.array_equal(result, levels.T)


@pytest.mark.many
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("levels.cuh", "both(0x8008), MINUS_ZERO", "both(0x8007), MINUS_ZERO"),
        ("levels.cuh", "words[half][j] >> 8 :", "words[half][j] >> 4 :"),
        ("levels.cuh", "twice(scales[i], row)", "twice(scales[i], !row)"),
        ("levels.cuh", "thread / 4 * COUNT * 4", "thread / 8 * COUNT * 4"),
        ("wgmma_quantized.cu", "stage + at / PIECES * PITCH + at % PIECES * 16", "stage + at / PIECES * PITCH"),
        ("wgmma_quantized.cu", "next += WAYS)", "next += 1)"),
        ("wgmma_quantized.cu", "*counter() = 0;", ""),
        (
            "wgmma_quantized.cu",
            "now.parity ^ 1);\n          producer.bring_x",
            "now.parity);\n          producer.bring_x",
        ),
        ("quantized_tiles.cuh", "(Tiles::BAND * Tiles::L::CHUNK);", "Tiles::L::CHUNK;"),
        ("wgmma_quantized.cu", "half * (Tiles::X_BYTES >> 5)", "half * (Tiles::X_BYTES >> 4)"),
        (
            "wgmma_quantized.cu",
            "if (piece == 1 && before >= 0) release(before);",
            "if (piece == 0 && before >= 0) release(before);",
        ),
        ("wgmma_quantized.cu", "ptx::wgmma_wait_group<Tiles::SETS - 1>();", ""),
    ],
)
def test_a_kernel_that_is_wrong_is_told(file, old, new):
    texts = edited(file, old, new)
    try:
        result, exact, size, findings = emulated(
            Format(320, 1664, "int4", 128, "bf16"), 24, config=SMALL | {"tokens": 16, "splits": 2}, texts=texts
        )
    except (AssertionError, CompileError, EmulationError):
        return
    assert findings or not np.all(np.abs(result - exact) <= 2.0**-8 * np.abs(exact) + 2.0**-14 * size)
