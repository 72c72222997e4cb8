"""Sums over k in parts: shared by the blocks of a cluster, or with factors of their own; no GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from block_scales import scaled_operands
from checked_products import matrices, run
from gemmery import dtypes
from gemmery.cuda.choose import legal
from gemmery.cuda.choose.data import Instance
from gemmery.errors import GemmeryError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.ladder.wgmma_split import promoted, turns
from gemmery.problem import Problem
from gemmery_lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung
from mutant import edited
from operands import numpy_dtype

pytestmark = pytest.mark.sampled(5)

pytest.importorskip("cuda.bindings")

STREAMK, BLOCKSCALED = (find(CUDA, name) for name in ("wgmma_streamk", "wgmma_blockscaled"))
QUARTERS = {"bm": 64, "bn": 64, "stages": 4, "splits": 4, "blocks": 8}
HALVES = {"bm": 128, "bn": 128, "stages": 4, "splits": 2, "blocks": 4}


# ---- k shared by the blocks of a cluster ----


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_turns_are_fewer_than_a_round(splits):
    """Every tile is computed, and sharing the last ones takes less time than leaving them whole."""
    for blocks in (8, 16, 128, 136):
        for count in range(1, 3 * blocks):
            whole, parts = turns(count, blocks, splits)
            clusters = blocks // splits
            assert whole % blocks == 0 or whole == count
            assert clusters * (parts - 1) < count - whole <= clusters * parts
            assert whole // blocks + parts / splits <= -(-count // blocks)
            assert parts < splits


@pytest.mark.many
@pytest.mark.parametrize(
    ("config", "shape", "expected"),
    [
        (QUARTERS, (300, 200, 328), (16, 2)),  # 20 tiles on 8 blocks: two rounds, then two turns of two clusters
        (QUARTERS, (130, 130, 72), (8, 1)),  # 9 tiles, and fewer steps than parts
        (QUARTERS, (460, 64, 200), (8, 0)),  # 8 tiles, of which none is left
        (HALVES, (250, 380, 136), (4, 1)),  # 6 tiles
        (HALVES, (100, 100, 1000), (0, 1)),  # a part of a round only
    ],
)
def test_whole_and_shared_tiles(config, shape, expected):
    m, n, _ = shape
    count = -(-m // config["bm"]) * -(-n // config["bn"])
    assert turns(count, config["blocks"], config["splits"]) == expected
    assert run(STREAMK, *matrices(shape, "f16", layouts=("row", "col", "row")), config=config)


def sharing(bm: int, bn: int, stages: int, splits: int, cm: int = 1, cn: int = 1) -> dict[str, int]:
    cluster = cm * cn * splits
    blocks = cluster * max(1, 8 // cluster)
    return {"bm": bm, "bn": bn, "stages": stages, "cm": cm, "cn": cn, "splits": splits, "band": 2, "blocks": blocks}


BESIDE = (sharing(80, 64, 4, 2, cn=2), (147, 328, 200))
# 10 tiles, of which one cluster shares the last 2: those have 48 columns and 32 rows of C of tiles before them.
OVERLAPPING = ({**sharing(80, 64, 4, 4), "blocks": 4}, (100, 264, 200))


@pytest.mark.many
@pytest.mark.parametrize("beta", [0.0, -1.5])
@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (sharing(160, 64, 4, 4), (147, 200, 520)),  # of C' = B' A'
        (sharing(152, 64, 5, 3), (147, 200, 520)),  # parts of 56, 56 and 40 columns
        (sharing(80, 64, 4, 2, cm=2), (147, 320, 520)),
        (sharing(72, 64, 4, 4, cn=2), (140, 320, 520)),  # A comes in turns
        BESIDE,
        OVERLAPPING,
        (sharing(64, 64, 4, 4, cn=2), (130, 320, 520)),
        (sharing(64, 64, 4, 3, cm=2), (130, 320, 520)),
        (sharing(128, 64, 4, 2, cm=2, cn=2), (250, 320, 520)),
        (sharing(64, 64, 4, 2, cn=4), (64, 1400, 72)),  # six turns of a cluster, in the last two tiles beyond the edge
    ],
)
def test_blocks_that_share_k_share_operands(config, shape, beta):
    """Each element of C is written once: C may be an operand, too."""
    a, b, c = matrices(shape, "f16", layouts=("row", "col", "row"), filled=beta != 0)
    assert run(STREAMK, a, b, c, alpha=0.5, beta=beta, config=config)


@pytest.mark.many
@pytest.mark.parametrize(
    ("case", "file", "old", "new"),
    [
        (BESIDE, "cluster.cuh", "(i + CM * n);\n    return mask << first();", "(i + CM * n);\n    return mask;"),
        (BESIDE, "wgmma_streamk.cu", "to * LAYER + within", "to * LAYER"),
        (BESIDE, "wgmma_streamk.cu", "&& !Tiles::SWAPPED", ""),
        (BESIDE, "wgmma_streamk.cu", "within = ptx::cluster_ctarank() % M::LAYER, rank", "within = 0, rank"),
        (OVERLAPPING, "wgmma_streamk.cu", "if (row < rest.own) continue;  // another tile's", ""),
        (OVERLAPPING, "wgmma_streamk.cu", "if (Tiles::SWAPPED && four.column < at.own) continue;", ""),
    ],
)
def test_wrong_layers_show(case, file, old, new):
    config, shape = case
    a, b, c = matrices(shape, "f16", layouts=("row", "col", "row"), filled=True)
    with pytest.raises((AssertionError, GemmeryError)):
        run(STREAMK, a, b, c, alpha=0.5, beta=-1.5, config=config, texts=edited(file, old, new))


@pytest.mark.many
@pytest.mark.parametrize("layouts", [("row", "row", "row"), ("col", "col", "col")])
def test_shared_tiles_of_other_layouts_and_batches(layouts):
    assert run(STREAMK, *matrices((136, 200, 72), "bf16", layouts=layouts, batch=3), config=QUARTERS)


def test_shared_tiles_after_whole_ones_of_32_bits():
    assert run(STREAMK, *matrices((300, 200, 328), "f16", "f32", ("row", "col", "row")), config=QUARTERS)


def test_shared_tiles_with_an_epilogue():
    a, b, c = matrices((136, 72, 136), "bf16", filled=True)
    assert run(STREAMK, a, b, c, alpha=0.5, beta=-1.5, epilogue="gelu", config=QUARTERS)


def test_parts_are_added_in_the_order_of_k():
    """The same bits in any order of blocks and warps, and those of sums of the parts one after the other."""
    steps, (m, n, k) = 8, (64, 64, 512)
    results = []
    for seed in (None, 1):
        a, b, c = matrices((m, n, k), "bf16", "f32", ("row", "col", "row"))
        assert run(STREAMK, a, b, c, config=QUARTERS, seed=seed)
        results.append(c.array[0].copy())
    assert np.array_equal(*results)
    parts = []
    for part in range(QUARTERS["splits"]):
        along = slice(part * k // 4, (part + 1) * k // 4)
        alone = np.zeros((1, m, n), np.float32)
        x, y = a.array[..., along].copy(), np.asfortranarray(b.array[0, along])[None]
        given = Gemm(x.view(np.uint16), y.view(np.uint16), alone)
        case = problem_of(given, "bf16", "f32", "h200")
        run_rung(find(CUDA, "wgmma_persistent"), case, {"bm": 64, "bn": 64, "stages": 2}, given)
        parts.append(alone[0])
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert steps % QUARTERS["splits"] == 0
    assert np.array_equal(results[0], total)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"splits": 9}, "2 to 8"),
        ({"cm": 2, "cn": 2, "splits": 3}, "or fewer where they share operands"),
        ({"bm": 192, "bn": 192, "stages": 4}, "below each other"),
        ({"bm": 256, "bn": 192, "stages": 3}, "meet in the ring"),
    ],
)
def test_tiles_that_cannot_be_shared_are_refused(config, reason):
    case = Problem(256, 256, 256, "bf16", "bf16", device="h200")
    with pytest.raises(RefusedError, match=reason):
        STREAMK.geometry(case, {**STREAMK.default, **config})


def test_a_grid_consists_of_whole_clusters():
    for splits in (2, 4, 8):
        for side in (64, 1000, 5000):
            case = Problem(side, side, side, "bf16", "bf16", device="h200", b_layout="col")
            geometry = STREAMK.geometry(case, {**STREAMK.default, "splits": splits})
            assert geometry.cluster == splits
            assert geometry.grid[0] % splits == 0
            assert 0 < geometry.grid[0] <= 132
            assert legal.split_refusal(Instance(*geometry.tile, 6, 1, 1), splits) == ""


def test_k_of_invariant_products_is_not_shared():
    case = Problem(64, 64, 64, "bf16", "bf16", device="h200")
    assert STREAMK.refuses(case) == ""
    assert "splits k" in STREAMK.refuses(case._replace(invariant=True))


# ---- factors of blocks ----


def scaled(shape, name="e4m3", out="f32", config=None, texts=None, across=False, **options):
    """Run on the emulator; return C, the operands, and the findings."""
    operands = scaled_operands(*shape, name, across)
    c = np.full((1, *shape[:2]), np.nan, np.float32).astype(numpy_dtype(out))
    alpha, bias = options.pop("alpha", 1.0), options.pop("bias", None)
    gemm = Gemm(operands.a[None], operands.b[None], c, bias, alpha, 0.0, operands.a_scale, operands.b_scale)
    case = problem_of(gemm, name, out, "h200", scaled=alpha != 1, **options)._replace(scales="blocks")
    runs = run_rung(BLOCKSCALED, case, config or {"stages": 3, "blocks": 2}, gemm, EmulationOptions(texts=texts))
    return c[0], operands, [str(each) for one in runs for each in one.findings]


@pytest.mark.many
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((128, 128, 128), {"bm": 128, "bn": 128, "stages": 3}),
        ((200, 264, 1040), {"bm": 128, "bn": 128, "stages": 3, "blocks": 4}),  # ragged sides, 9 parts
        ((64, 64, 2688), {"bm": 64, "bn": 64, "stages": 3}),  # 16 parts together, 4, and one
        ((72, 200, 400), {"bm": 64, "bn": 64, "stages": 3, "blocks": 2}),  # two tiles for a block of columns of B
        ((130, 72, 16), {"bm": 128, "bn": 128, "stages": 3}),  # less than a part
    ],
)
def test_factors_of_blocks(shape, config):
    c, operands, findings = scaled(shape, config=config)
    assert findings == []
    assert np.array_equal(c, operands.product)


@pytest.mark.many
@pytest.mark.parametrize(("name", "out"), [("e5m2", "f16"), ("e4m3", "bf16")])
def test_factors_of_blocks_of_each_type(name, out):
    c, operands, findings = scaled((72, 136, 528), name, out)
    assert findings == []
    assert np.array_equal(c, operands.product.astype(numpy_dtype(out)))


def test_factors_of_any_strides():
    c, operands, findings = scaled((72, 136, 400), across=True)
    assert operands.a_scale.strides[0] == 4
    assert findings == []
    assert np.array_equal(c, operands.product)


def test_factors_of_blocks_with_an_epilogue():
    bias = np.arange(-36, 36, dtype=np.float32)
    c, operands, findings = scaled((40, 72, 272), epilogue="bias+relu", bias=bias, alpha=0.5)
    assert findings == []
    assert np.array_equal(c, np.maximum(0.5 * operands.product + bias, 0))


def test_random_numbers_keep_the_bound():
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal((1, 96, 656)).astype(numpy_dtype("e4m3")) for _ in range(2))
    c = np.full((1, 96, 96), np.nan, np.float32)
    gemm = Gemm(a, b.transpose(0, 2, 1), c)
    run_rung(BLOCKSCALED, problem_of(gemm, "e4m3", "f32", "h200"), {"stages": 3}, gemm)
    wide = a[0].astype(np.float64), b[0].astype(np.float64).T
    limit = promoted(656) * 2.0**-24 * (np.abs(wide[0]) @ np.abs(wide[1]))
    assert (np.abs(c[0] - wide[0] @ wide[1]) <= limit).all()


@pytest.mark.many
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("min(row + 8, p", "min(row, p"),  # the factor of another row
        ("at.column / 128 * p.b_scale_col", "at.column / 64 * p.b_scale_col"),
        ("coming.upper * coming.block", "coming.upper"),
        ("i & 2 ? of_lower", "i & 1 ? of_lower"),
        ("min(part, last)", "min(part + 1, last)"),
        ("part += 4;", ""),
        ("(threadIdx.x & 28) + of", "(threadIdx.x & 28)"),
        ("? (TOGETHER - 1) % 4 : first", "? (TOGETHER - 1) % 4 : 0"),  # of the last parts
    ],
)
def test_a_wrong_factor_shows(old, new):
    file = "wgmma_blockscaled.cu"
    texts = edited(file, old, new)
    c, operands, _ = scaled((72, 264, 784), config={"bm": 64, "bn": 64, "stages": 3}, texts=texts)
    assert not np.array_equal(c, operands.product)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scales": "outer"}, "factor for each 128 of k"),
        ({"scales": "blocks", "c_layout": "col"}, "row by row"),
        ({"scales": "blocks", "batch": 2}, "batch of 2"),
        ({"out": "int32"}, "not int32"),
    ],
)
def test_products_without_factors_of_blocks_are_refused(options, reason):
    case = Problem(64, 64, 256, "e4m3", "bf16", device="h200")
    assert BLOCKSCALED.refuses(case) == ""
    assert reason in BLOCKSCALED.refuses(case._replace(**options))


def test_the_bound_of_parts_does_not_grow_as_k_does():
    assert promoted(16384) < 1.01 * promoted(128)
    assert BLOCKSCALED.dtypes == dtypes.FLOAT8
