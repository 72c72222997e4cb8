"""Float32 on tensor cores in parts: bit for bit as the rules say, for any operands; no GPU is needed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gemmery.cuda import tensormaps
from gemmery.errors import EmulationError, RefusedError
from gemmery.ladder import float32_parts, float32_pre_pass
from gemmery.problem import Problem
from gemmery_lab.emulated_product import Gemm, problem_of, run_rung
from split_products import NAMES, RUNGS, multiplied, operands, same
from split_rules import U, chain, expected

pytestmark = pytest.mark.sampled(7)

pytest.importorskip("cuda.bindings")

BOUNDS = {"split_fp16x3": float32_parts.two_parts, "split_bf16x6": float32_parts.three_parts}
BOUNDS["split_paired"] = float32_parts.pairs


# ---- bits ----


EDGES = {  # test_gpu_split.py takes all of them by each rung
    "split_fp16x3": (0, 15, 16, 63, 64, 65, 129),
    "split_bf16x6": (1, 16, 17, 127, 128, 129),
    "split_paired": (3, 4, 64, 65),
}


@pytest.mark.many
@pytest.mark.parametrize(("name", "k"), [(name, k) for name, all_k in EDGES.items() for k in all_k])
def test_each_k(name, k):
    """Less than a step, whole steps, and one more; CUDA cores for the first."""
    a, b = operands(24, 40, k)
    assert same(multiplied(RUNGS[name], a, b), expected(name, a, b))


@pytest.mark.many
@pytest.mark.parametrize("name", NAMES)
def test_tiles_of_a_ragged_product(name):
    a, b = operands(200, 136, 328)
    assert same(multiplied(RUNGS[name], a, b, ("row", "col", "row")), expected(name, a, b))


@pytest.mark.many
@pytest.mark.parametrize("k", [1088, 4096])
def test_a_long_k(k):
    """17 sums, or 64, are added on CUDA cores; corrections are in tensor cores all the time."""
    a, b = operands(64, 64, k)
    assert same(multiplied(RUNGS["split_fp16x3"], a, b), expected("split_fp16x3", a, b))


@pytest.mark.many
@pytest.mark.parametrize(("longest", "warps", "eights"), [(64, 1, 1), (600, 1, 3), (2048, 8, 1)])
def test_rows_in_registers(longest, warps, eights, monkeypatch):
    """Of one warp or of eight, one piece or several of a thread; longer rows are read by squares."""
    a, b = operands(9, 10, 597)
    monkeypatch.setattr(float32_pre_pass, "_IN_REGISTERS", ((longest, warps, eights),))
    c = multiplied(RUNGS["split_bf16x6"], a, b, ("row", "col", "row"))
    assert same(c, expected("split_bf16x6", a, b))


@pytest.mark.parametrize("k", [16, 1024, 1025, 4096, 4097, 8192, 8193, 16_384, 16_385])
def test_registers_have_room_for_a_row(k):
    """The instance of each k holds it, and no more eights of a thread than it has registers for."""
    case = Problem(64, 64, k, "f32", "f32", b_layout="col", device="h200")
    kernels = [launch.kernel for launch in RUNGS["split_bf16x6"].geometry(case, RUNGS["split_bf16x6"].default).before]
    rows = [kernel for kernel in kernels if kernel.startswith("split_rows")]
    assert len(rows) == (k <= 16_384)
    assert any(kernel.startswith("split_slabs") for kernel in kernels) == (k > 16_384)
    for kernel in rows:
        warps, eights = map(int, kernel.strip(">").split(", ")[-2:])
        assert warps * eights * 256 >= k
        assert eights <= 8


@pytest.mark.many
@pytest.mark.parametrize(
    ("slab", "shape", "layout"),
    [
        ((2, 4, 8), (24, 40, 700), "row"),  # k in two blocks
        ((8, 4, 1), (68, 36, 604), "row"),  # in eight, of which some have more than others, and twice
        ((1, 2, 8), (17, 23, 1100), "odd"),  # by one block, and twice
        ((4, 8, 2), (33, 70, 600), "strided"),
    ],
)
def test_slabs(slab, shape, layout, monkeypatch):
    """However many blocks share k, by pieces of 16 bytes or element by element."""
    monkeypatch.setattr(float32_pre_pass, "SLABS", (float32_pre_pass.Slab(10_000, *slab),))
    a, b = operands(*shape)
    c = multiplied(RUNGS["split_bf16x6"], a, b, ("col" if layout == "row" else layout, layout, "row"))
    assert same(c, expected("split_bf16x6", a, b))


@pytest.mark.many
@pytest.mark.parametrize("name", NAMES[:2])
def test_strips(name, monkeypatch):
    """Of long k: some blocks measure tiles that others split, and three parts need no new measures."""
    case = Problem(64, 68, 1028, "f32", "f32", device="h200")
    assert RUNGS[name].geometry(case, RUNGS[name].default).before[2].source == "split_strips.cu"
    assert RUNGS[name].geometry(case._replace(n=70), RUNGS[name].default).before[2].source == "split_parts.cu"
    monkeypatch.setattr(float32_pre_pass, "_SLABS_TO", 0)
    b = operands(1, 68, 300)[1]
    a, b = operands(72, 1, 300)[0].reshape(3, 24, 300), np.ldexp(b, np.arange(68) % 50 - 25).astype(np.float32)
    a[1, 3, 5] = 1e-30
    layouts = ("col", "row", "row")
    if name == "split_bf16x6":
        assert same(multiplied(RUNGS[name], a, b, layouts), np.stack([expected(name, x, b) for x in a]))
    else:  # the device takes three parts of the second
        assert all(same(multiplied(RUNGS[name], x, b, layouts), expected(name, x, b)) for x in a[:2])


def test_pieces_of_a_slab_are_whole():
    """Sixteen bytes at a time only where sides are adjacent, aligned, and a multiple of four."""
    case = Problem(64, 68, 600, "f32", "f32", a_layout="col", device="h200")
    unaligned = case._replace(alignments=(16, 4, 16))
    for problem, whole in ((case, 1), (case._replace(n=70), 0), (case._replace(m=63), 0), (unaligned, 0)):
        rung = RUNGS["split_bf16x6"]
        slabs = rung.geometry(problem, rung.default).before[1]
        assert slabs.kernel == f"split_slabs<float, float, ThreeParts, 1, 3, {whole}, 2, 4, 8>"
        assert slabs.cluster == 2
        assert slabs.grid[0] == 2 * (-(-problem.m // 16) + -(-problem.n // 16))


@pytest.mark.many
@pytest.mark.parametrize(
    "layouts", [("odd", "padded col", "row"), ("strided", "reversed", "padded"), ("col", "one row", "col")]
)
def test_no_layout_shows(layouts):
    a, b = operands(40, 24, 72)
    if "one row" in layouts:
        b[:] = b[:1]
    assert same(multiplied(RUNGS["split_fp16x3"], a, b, layouts), expected("split_fp16x3", a, b))


@pytest.mark.many
@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_batches(shared):
    """Each matrix has its own scales; parts of one for all follow each other without gaps."""
    pairs = [operands(24, 40, 80, seed) for seed in range(3)]
    a, b = (np.stack(side) for side in zip(*pairs, strict=True))
    a, b = np.ldexp(a[:1] if shared == "a" else a, 3), b[:1] if shared == "b" else b
    c = multiplied(RUNGS["split_bf16x6"], a, b)
    for at in range(3):
        assert same(c[at], expected("split_bf16x6", a[at % len(a)], b[at % len(b)]))


def test_steps_after_a_product_are_those_of_float32():
    a, b = operands(24, 40, 80)
    plain = expected("split_bf16x6", a, b)
    bias = np.arange(40, dtype=np.float32) / 4 - 5
    c = multiplied(RUNGS["split_bf16x6"], a, b, alpha=0.5, bias=bias, epilogue="bias+relu", scaled=True)
    assert same(c, np.maximum(np.float32(0.5) * plain + bias, 0))


@pytest.mark.many
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_the_same_in_any_product(name):
    a, b = operands(136, 40, 80)
    alone = [multiplied(RUNGS[name], a[rows], b) for rows in (slice(0, 1), slice(70, 136))]
    whole = multiplied(RUNGS[name], a, b)
    assert same(np.concatenate(alone), np.concatenate([whole[:1], whole[70:]]))


@pytest.mark.many
@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_share_columns(name, monkeypatch):
    """In clusters of two, where the last one has rows beyond the edge; large products alone have them by themselves."""
    case = Problem(8192, 8192, 8192, "f32", "f32", device="h200")
    assert RUNGS[name].geometry(case, RUNGS[name].default).cluster == 2
    assert RUNGS[name].geometry(case._replace(m=512), RUNGS[name].default).cluster == 1
    tile = float32_parts._tile
    monkeypatch.setattr(float32_parts, "_tile", lambda *each: tile(*each)._replace(cm=2))
    a, b = operands(150, 200, 136)
    assert same(multiplied(RUNGS[name], a, b, config={"blocks": 4, "bm": 64}), expected(name, a, b))


# ---- values ----


def with_values(name):
    """Operands with special values of a kind."""
    a, b = operands(24, 40, 80)
    largest, tiny = np.finfo(np.float32).max, np.float32(1e-45)
    if name == "infinite":
        a[3, 5], b[7, 9] = np.inf, -np.inf
    elif name == "nan":
        a[3, 5] = np.nan
    elif name == "largest":
        a[2], b[:, 3] = largest, 2.0**-100
    elif name == "subnormal":
        a, b = np.ldexp(a, -135), np.ldexp(b, 100)
    elif name == "of all sizes":
        a[:8], a[8:16], b[:, ::2] = np.ldexp(a[:8], -140), np.ldexp(a[8:16], 120), np.ldexp(b[:, ::2], -60)
    elif name == "rows of zeros":
        a[5], b[:, 6], a[7, ::2] = 0, -0.0, tiny
    elif name == "too large":
        a, b = np.ldexp(a, 100), np.ldexp(b, 100)
    elif name == "too small":
        a, b = np.ldexp(a, -70), np.ldexp(b, -75)
    return a, b


KINDS = ("infinite", "nan", "largest", "subnormal", "of all sizes", "rows of zeros", "too large", "too small")


@pytest.mark.many
@pytest.mark.parametrize("name", NAMES)
def test_special_values(name):
    """With Inf or NaN CUDA cores multiply; results that are too large or small are those of one rounding."""
    for kind in KINDS:
        a, b = with_values(kind)
        with np.errstate(over="ignore"):
            finite = np.isfinite(a).all() and np.isfinite(b).all()
            wanted = expected(name, a, b) if finite else chain(a.astype(np.float64), b.astype(np.float64))
        assert same(multiplied(RUNGS[name], a, b), wanted), kind


def test_three_parts_of_an_identity_are_exact():
    a, _ = operands(40, 40, 40)
    identity = np.eye(40, dtype=np.float32)
    assert np.array_equal(multiplied(RUNGS["split_bf16x6"], a, identity), a)


# ---- bounds, refusals, memory ----


def test_sums_kept_in_tensor_cores_have_a_bias():
    """As benchmarks/float32_errors.py shows it: cuts of positive sums add up, until CUDA cores take them over."""
    path = Path(__file__).parents[4] / "benchmarks" / "float32_errors.py"
    spec = importlib.util.spec_from_file_location("float32_errors", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    a, b = script.KINDS["positive"](np.random.default_rng(0), 1024)
    assert script.error("wgmma_epilogue", a, b) > 80
    assert script.error("split_fp16x3", a, b) < 10


@pytest.mark.parametrize("name", NAMES)
def test_bounds_hold(name):
    """By the rules, on operands of which all but the first kind have sums that are cut in one direction."""
    for k in (5, 16, 64, 200, 1100):
        for kind in range(3):
            a, b = operands(8, 9, k, seed=kind)
            if kind:
                a, b = abs(a) ** kind, abs(b)
            wide = a.astype(np.float64), b.astype(np.float64)
            error = abs(expected(name, a, b) - wide[0] @ wide[1]) / (abs(wide[0]) @ abs(wide[1])) / U
            assert error.max() <= BOUNDS[name](k)


def test_bounds_are_those_of_float32():
    """CUDA cores add up to k roundings."""
    for k in range(1, 5000):
        assert float32_parts.three_parts(k) <= k
        assert k < 87 or float32_parts.two_parts(k) <= k or k < 128
        assert float32_parts.pairs(k) <= 26
    assert float32_parts.two_parts(128) <= 128


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"groups": 3}, "wgmma_grouped"),
        ({"scales": "outer"}, "8 bits"),
        ({"out": "f64"}, "not f64"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_other_products_are_refused(name, options, reason):
    case = Problem(64, 64, 256, "f32", "f32", device="h200")
    assert reason in RUNGS[name].refuses(case._replace(**options))
    for precision in ("", "f32_tensor", "f32_strict", "f32_plus"):
        assert RUNGS[name].refuses(case._replace(precision=precision)) == ""
        assert RUNGS[name].geometry(case._replace(precision=precision), RUNGS[name].default)


def test_tiles_that_it_has_not_are_refused():
    case = Problem(64, 64, 256, "f32", "f32", device="h200")
    with pytest.raises(RefusedError, match="128 x 96"):
        RUNGS["split_paired"].geometry(case, {**RUNGS["split_paired"].default, "bn": 128})


@pytest.mark.many
@pytest.mark.parametrize("out", ["f16", "bf16"])
def test_narrower_results(out):
    """Rounded from the sums in float32, by all three ways."""
    for k, planted in ((80, 0), (80, np.inf), (8, 0)):
        a, b = operands(24, 40, k)
        a[0, 0] += planted
        c = np.zeros((1, 24, 40), np.uint16)
        gemm = Gemm(a[None], b[None], c)
        rung = RUNGS["split_bf16x6"]
        run_rung(rung, problem_of(gemm, "f32", out, "h200"), {}, gemm)
        wanted = chain(a.astype(np.float64), b.astype(np.float64)) if planted else expected("split_bf16x6", a, b)
        if out == "f16":
            assert same(c[0].view(np.float16), wanted.astype(np.float16))
        else:
            bits = wanted.view(np.uint32).astype(np.uint64)
            assert same(c[0][1:], ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)[1:])


@pytest.mark.parametrize("batch", [1, 3])
def test_parts_fill_the_workspace(batch):
    """It ends with the last part of B; without room for the last eight elements there is a fault."""
    a, b = operands(24, 40, 80)
    a, b = np.stack([a] * batch), np.stack([b] * batch)
    gemm = Gemm(a, b, np.zeros((batch, 24, 40), np.float32))
    case = problem_of(gemm, "f32", "f32", "h200")
    geometry = RUNGS["split_bf16x6"].geometry(case, RUNGS["split_bf16x6"].default)
    ends = [box.packed + 3 * batch * side * box.pitch for box, side in zip(geometry.maps, (24, 40), strict=False)]
    assert ends[0] <= geometry.maps[1].packed
    assert geometry.workspace - tensormaps.PACKED_APART < ends[1] <= geometry.workspace

    def smaller(problem, config):
        return replace(geometry, workspace=ends[1] - geometry.maps[1].pitch + 2 * 80 - 16)

    with pytest.raises(EmulationError, match="map extends beyond its array"):
        run_rung(RUNGS["split_bf16x6"]._replace(geometry=smaller), case, {}, gemm)


@pytest.mark.parametrize(
    ("k", "b_layout", "asked_for", "blocks"),
    [
        (4096, "col", True, 4096 + 1000),  # of each row
        (4096, "row", True, 4096),  # B has no rows in registers
        (2048, "col", True, 528),  # four on each multiprocessor
        (4096, "col", False, 528),
    ],
)
def test_rows_have_blocks_of_their_own_where_they_are_long(k, b_layout, asked_for, blocks):
    case = Problem(4096, 1000, k, "f32", "f32", b_layout=b_layout, device="h200")
    rows = float32_pre_pass.split(case, "TwoParts", asked_for)[0]
    assert rows.kernel.startswith("split_rows")
    assert rows.grid == (blocks, 1, 1)


@pytest.mark.parametrize(("device", "lag"), [("h100", 320), ("h200", 384)])
def test_a_fifth_of_l2_lies_between_measuring_and_splitting(device, lag):
    case = Problem(4096, 4096, 4096, "f32", "f32", a_layout="col", device=device)
    (strips,) = float32_pre_pass.split(case, "TwoParts", asked_for=True)
    assert strips.kernel.endswith(f", {lag}>")
    assert strips.grid == (2 * (2 * 64 * 32 + lag), 1, 1)
