"""Groups of rows in one launch: results on the emulator, offsets of all kinds, the number of blocks and instances."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from gemmery.cuda import nvrtc
from gemmery.errors import EmulationError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery_lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung
from mutant import edited

pytestmark = pytest.mark.sampled(7)

pytest.importorskip("cuda.bindings")

RUNG = find(CUDA, "wgmma_grouped")
UNTOUCHED = 999.0
SMALL = {"bn": 64, "stages": 3}


def repeated(matrix, groups):
    """A matrix for each group without a copy, as the launch describes A and C."""
    return as_strided(matrix, (groups, *matrix.shape), (0, *matrix.strides))


def operands(rows, groups, n, k, layouts=("row", "col")):
    rng = np.random.default_rng(rows + n + k)
    a, b = rng.integers(-3, 4, (rows, k)).astype("f2"), rng.integers(-3, 4, (groups, k, n)).astype("f2")
    a = np.ascontiguousarray(a.T).T if layouts[0] == "col" else a
    b = np.ascontiguousarray(b.swapaxes(1, 2)).swapaxes(1, 2) if layouts[1] == "col" else b
    return a, b


def emulated(a, b, ends, **others):
    """The result of the rung, and what the emulator finds in the run."""
    c, runs = launched(a, b, ends, **others)
    return c, [finding for run in runs for finding in run.findings]


def launched(a, b, ends, *, out="f16", seed=None, epilogue="", config=None, texts=None, **others):
    """The result of the rung, and its emulated launches."""
    groups, _, n = b.shape
    c = np.full((len(a), n), UNTOUCHED, "f2" if out == "f16" else "f4")
    scales = "outer" if "b_scale" in others else ""
    gemm = Gemm(repeated(a, groups), b, repeated(c, groups), offsets=np.array(ends, np.int32), **others)
    problem = problem_of(gemm, "f16", out, "h200", epilogue=epilogue, scaled="alpha" in others)
    problem = problem._replace(batch=1, groups=groups, scales=scales)
    options = EmulationOptions(seed=seed, texts=texts)
    return c, run_rung(RUNG, problem, {**RUNG.default, **SMALL, **(config or {})}, gemm, options)


def expected(a, b, ends, finish=lambda sums, group: sums):
    result, start = np.full((len(a), b.shape[2]), UNTOUCHED, "f4"), 0
    for group, end in enumerate(ends):
        result[start:end] = finish(a[start:end].astype("f4") @ b[group].astype("f4"), group)
        start = end
    return result


@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("ends", "rows", "blocks", "seed"),
    [
        (
            [1, 1, 70],
            80,
            0,
            None,
        ),  # one row, none, a tile of which the second warpgroup has 5 rows; 10 rows of no group
        ([0, 130, 300], 300, 2, 1),  # tiles in turn on two blocks; groups that begin within a tile
        ([64, 128, 136], 136, 1, None),  # the second warpgroup has no rows
        ([0, 0, 0], 8, 0, None),
    ],
)
def test_each_group_is_multiplied_and_no_other_row_is_written(ends, rows, blocks, seed):
    a, b = operands(rows, len(ends), 72, 136)
    result, findings = emulated(a, b, ends, seed=seed, config={"blocks": blocks})
    assert findings == []
    assert np.array_equal(result, expected(a, b, ends))


@pytest.mark.parametrize("layouts", [("row", "row"), ("col", "col"), ("col", "row")])
def test_other_layouts(layouts):
    ends = [71, 80, 133]  # of which no tensor copy finds a row of A where m is adjacent
    a, b = operands(136, 3, 136, 72, layouts)
    result, findings = emulated(a, b, ends, config={"blocks": 3})
    assert findings == []
    assert np.array_equal(result, expected(a, b, ends))


@pytest.mark.parametrize("waits", [True, False])
def test_a_warpgroup_without_rows_has_read_where_its_tile_is(waits):
    """Its thread that hands stages back waits for the others: places of tiles are written again after 16 tiles."""
    a, b = operands(130, 3, 600, 8)
    texts = {} if waits else edited("wgmma_grouped.cu", "    ptx::bar_sync(2 + warpgroup, 128);", "")
    _, findings = emulated(a, b, [40, 80, 130], config={"blocks": 1}, texts=texts)
    assert (findings == []) is waits


@pytest.mark.parametrize("k", [8, 64])
def test_few_steps_of_k(k):
    a, b = operands(90, 2, 16, k)
    result, findings = emulated(a, b, [3, 88], config={"blocks": 1})
    assert findings == []
    assert np.array_equal(result, expected(a, b, [3, 88]))


def test_more_rows_of_tiles_than_a_band_has():
    a, b = operands(2100, 2, 72, 8)
    result, findings = emulated(a, b, [2090, 2095], config={"blocks": 7})
    assert findings == []
    assert np.array_equal(result, expected(a, b, [2090, 2095]))


# Sizes of groups: long tiles and a short one, a short one, none, long ones. Two rounds of long tiles for 11 blocks
# leave one for short tiles, and these outlast them.
SORTED = np.cumsum([130, 30, 700, 0, 129, 64, 65, 300]).tolist()


def sorted_kernel(*edits):
    """The kernel that takes long tiles first whatever the sizes of matrix and groups, with further edits."""
    text = nvrtc.text("wgmma_grouped.cu")
    rows = "p.product.m / (4 * Tiles::BM) >= p.product.batch"
    for old, new in (("LARGE = 48 << 20", "LARGE = 0"), (rows, "true"), *edits):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return {"wgmma_grouped.cu": text}


def is_each_tile_taken_once(ends, rows, **options):
    """Whether the result is right, and as much is multiplied as blocks of 64 rows have."""
    a, b = operands(rows, len(ends), 72, 8)
    result, (run,) = launched(a, b, ends, **options)
    used = np.minimum(np.maximum.accumulate([0, *ends]), rows)
    blocks = sum(-(-int(size) // 64) for size in np.diff(used))
    right = np.array_equal(result, expected(a, b, used[1:])) and run.findings == ()
    return right and run.flops == blocks * 2 * (2 * 64**3)  # 72 columns are two tiles, 8 of k one step of 64


@pytest.mark.many
@pytest.mark.parametrize("blocks", [1, 2, 11, 100])
@pytest.mark.parametrize("seed", [None, 1])
def test_long_tiles_of_large_matrices_come_first(blocks, seed):
    assert is_each_tile_taken_once(SORTED, SORTED[-1] + 9, config={"blocks": blocks}, texts=sorted_kernel(), seed=seed)


@pytest.mark.many(3)
@pytest.mark.parametrize("ends", [[0, 0], [64, 64], [1024, 1024], [30, 60], [1500, -1], [900, 9000], [4290, 4300]])
def test_lists_of_tiles_may_be_empty_and_longer_than_a_band(ends):
    assert is_each_tile_taken_once(ends, 4300, config={"blocks": 5}, texts=sorted_kernel())


def test_long_tiles_come_first_only_where_groups_have_many_rows():
    """Without the edit of their number, groups of 512 rows on average are sorted, and others are not."""
    text = nvrtc.text("wgmma_grouped.cu").replace("LARGE = 48 << 20", "LARGE = 0")
    never = text.replace("listed(int rows) const {", "listed(int rows) const { if (sorts) return 0;")
    assert never != text
    for rows, is_sorted in ((1024, True), (1023, False)):
        right = is_each_tile_taken_once([500, 1020], rows, texts={"wgmma_grouped.cu": never})
        assert right is not is_sorted


@pytest.mark.many
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("group = end = 0;", "group = 0;"),
        ("rest = tiles + meanwhile + block;", "rest = tiles + block;"),
        ("rest = tiles + meanwhile + block;", "rest = tiles + meanwhile + block + 1;"),
        ("tiles + (is_first ? 0 : meanwhile) - 1;", "tiles + (is_first ? 0 : meanwhile);"),
        ("tiles + block - first_blocks;", "tiles + block;"),
        ("stride = is_first ? first_blocks : others;", "stride = blocks;"),
        ("return is_long ? long_of(rows) :", "return is_long ? tiles_of(rows) :"),
        ("tiles_of(rows) - long_of(rows);", "tiles_of(rows);"),
        ("is_long ? above + within % height : long_of(end - begin)", "above + within % height"),
        ("if (!sorts || !is_long) return;", "return;"),
        ("    if (index > last) take_rest();\n    find();", "    find();"),
    ],
)
def test_a_kernel_that_is_wrong_about_the_order_is_told(old, new):
    texts = sorted_kernel((old, new))
    assert not is_each_tile_taken_once(SORTED, SORTED[-1], config={"blocks": 11}, texts=texts)


def test_groups_with_few_tiles_take_narrow_ones():
    """1024 uneven rows of 8 groups have about 12 rows of tiles: 1.5 rounds of 256 columns, which last as long as 2."""
    for rows, groups, n, k, bn in (
        (1024, 8, 4096, 7168, 128),
        (128, 8, 4096, 7168, 256),
        (8192, 8, 4096, 7168, 256),
        (1024, 64, 4096, 7168, 256),
    ):
        case = problem(rows, groups, n)._replace(k=k)
        assert RUNG.resolve(case, RUNG.default)["bn"] == bn


def test_offsets_that_are_wrong_touch_nothing_outside():
    """Each is used as if it were at least the one before, and at most the rows."""
    a, b = operands(72, 4, 16, 64)
    result, findings = emulated(a, b, [40, -5, 900, 20])
    assert findings == []
    assert np.array_equal(result, expected(a, b, [40, 40, 72, 72]))


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_bias_of_each_group_and_activation(alpha):
    a, b = operands(80, 3, 40, 64)
    bias = np.arange(3 * 40, dtype="f4").reshape(3, 40) - 60
    ends = [1, 1, 70]
    result, findings = emulated(a, b, ends, out="f32", epilogue="bias+relu", bias=bias, alpha=alpha)
    assert findings == []
    assert np.array_equal(result, expected(a, b, ends, lambda sums, group: np.maximum(alpha * sums + bias[group], 0)))


def test_a_result_that_no_tensor_copy_can_write():
    a, b = operands(80, 2, 41, 64)
    result, findings = emulated(a, b, [70, 79])
    assert findings == []
    assert np.array_equal(result, expected(a, b, [70, 79]))


def test_the_bits_of_a_row_depend_on_no_other_row():
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((136, 136)).astype("f2"), rng.standard_normal((2, 136, 48)).astype("f2")
    b = np.ascontiguousarray(b.swapaxes(1, 2)).swapaxes(1, 2)
    whole = emulated(a, b, [136, 136], out="f32")[0]
    parts = emulated(a, np.stack([b[0], b[0]]).copy(), [67, 136], out="f32", config={"bn": 128, "blocks": 1})[0]
    assert np.array_equal(whole, parts)


@pytest.mark.sampled(1)
@pytest.mark.many
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("wgmma_grouped.cu", "begin = p.offsets ? end : 0;", "begin = 0;"),
        ("wgmma_grouped.cu", "max(end_of<true>(p, group), begin)", "end_of<true>(p, group)"),
        ("staged.cuh", "min(p.offsets[group], p.product.m)", "p.offsets[group]"),
        ("staged.cuh", "at.row + 16 <= end_of<true>(p, at.batch)", "at.row < end_of<true>(p, at.batch)"),
        ("staged.cuh", "min(16, end - at.row)", "min(16, end - at.row + 1)"),
        ("staged.cuh", "if (P::GROUPED && threadIdx.x % 32 == 0)", "if (false)"),
        ("staged.cuh", "p.product.c_batch ? at.batch : 0", "at.batch"),
        ("staged.cuh", "of_groups ? batch * p.product.bias_row : 0", "0"),
        ("staged.cuh", "(P::GROUPED && p.offsets ? at.batch * p.b_scale_k : 0)", "0"),
    ],
)
def test_a_kernel_that_is_wrong_about_groups_is_told(file, old, new):
    """Mutants of what only offsets show; tests/shared/mutants_hopper.py has the others."""
    texts = edited(file, old, new)
    a, b = operands(140, 4, 16, 64)
    bias = np.arange(4 * 16, dtype="f4").reshape(4, 16)
    run = {"epilogue": "bias", "bias": bias, "b_scale": bias + 1, "config": {"blocks": 1}}
    cases = (([64, 70, 60, 130], [64, 70, 70, 130]), ([64, 70, 60, 900], [64, 70, 70, 140]))
    right, findings = emulated(a, b, cases[0][0], **run)
    assert findings == []
    assert np.array_equal(right, expected(a, b, cases[0][1], scaled_and_biased(bias)))
    for ends, clamped in cases:
        shown, findings = emulated(a, b, ends, **run, texts=texts)
        if findings or not np.array_equal(shown, expected(a, b, clamped, scaled_and_biased(bias))):
            return
    raise AssertionError("nothing shows that it is wrong")


def scaled_and_biased(bias):
    return lambda sums, group: (sums * (bias[group] + 1) + bias[group]).astype("f2")


def test_float8_and_factors_of_rows_and_of_columns_of_each_group():
    rng = np.random.default_rng(3)
    kind = ml_dtypes.float8_e4m3fn
    a, b = (rng.integers(-4, 5, shape).astype("f4").astype(kind) for shape in ((90, 272), (3, 40, 272)))
    factors = np.exp2(rng.integers(-2, 3, (90, 1))).astype("f4"), np.exp2(rng.integers(-2, 3, (3, 40))).astype("f4")
    gemm = Gemm(
        repeated(a.view("u1"), 3),
        b.view("u1").swapaxes(1, 2),
        c := np.full((90, 40), UNTOUCHED, "f4"),
        a_scale=factors[0],
        b_scale=factors[1],
        offsets=np.array([1, 1, 77], np.int32),
    )
    gemm = replace(gemm, c=repeated(c, 3))
    case = problem_of(gemm, "e4m3", "f32", "h200")._replace(batch=1, groups=3, scales="outer")
    (run,) = run_rung(RUNG, case, {**RUNG.default, **SMALL}, gemm)
    assert run.findings == ()
    products = expected(a, b.swapaxes(1, 2), [1, 1, 77], lambda sums, group: sums * factors[1][group])
    products[:77] *= factors[0][:77]
    assert np.array_equal(c, products)


INDEXED = {"ends": [1, 1, 150, 201], "rows": 50, "bn": 64, "stages": 3, "blocks": 2, "k": 136}


def by_index(*, ends, rows, bn, stages, blocks, k, seed=None, texts=None):
    """Return the result of the rung for rows that an index names, negative ones too, the right one, and findings."""
    draw, groups, n = np.random.default_rng(rows), len(ends), 72
    a, b = operands(rows, groups, n, k)
    index = draw.integers(-rows, rows, ends[-1] + 7)
    c = np.full((len(index), n), UNTOUCHED, "f2")
    gemm = Gemm(repeated(a, groups), b, repeated(c, groups), offsets=np.array(ends, np.int32), index=index)
    case = problem_of(gemm, "f16", "f16", "h200")._replace(batch=1, groups=groups, gathered=True)
    config = {**RUNG.default, "bn": bn, "stages": stages, "blocks": blocks}
    runs = run_rung(RUNG, case, config, gemm, EmulationOptions(seed=seed, texts=texts))
    return c, expected(a[index], b, ends), [str(finding) for run in runs for finding in run.findings]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"bn": 256, "stages": 4, "seed": 1, "rows": 300},
        {"stages": 2, "k": 8, "seed": 2},
        {"bn": 128, "stages": 6, "blocks": 1, "k": 520},
    ],
)
def test_rows_that_an_index_names(change):
    result, right, findings = by_index(**{**INDEXED, **change})
    assert findings == []
    assert np.array_equal(result, right)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("which < 0 ? which + count : which", "which"),
        ("(chunk() ^ row()) << 4", "chunk() << 4"),
        ("i < 8 || both", "i < 8"),
        ("k < p.product.k", "true"),
        ("      ptx::mbarrier_try_wait_parity(loaded + 8 * now.stage, now.parity);\n", ""),
        ("      ptx::fence_proxy_async();\n      __syncwarp();", "      __syncwarp();"),
        ("ptx::cp_async_mbarrier_arrive(loaded", "ptx::mbarrier_arrive(loaded"),
        ("Gatherer<Tiles>::THREADS);", "Gatherer<Tiles>::THREADS / 2);"),
        ("Tiles::STAGES + now.stage), now.parity ^ 1", "Tiles::STAGES + now.stage), now.parity"),
    ],
)  # fmt: skip
def test_rows_that_are_brought_wrongly_are_seen(old, new):
    try:
        result, right, findings = by_index(**INDEXED, texts=edited("wgmma_grouped.cu", old, new))
    except EmulationError as error:  # a stage that never comes
        result, right, findings = 0, 0, [str(error)]
    assert findings or not np.array_equal(result, right)


@pytest.mark.parametrize("change", [{"a_layout": "col"}, {"k": 4100}, {"dtype": "e4m3"}, {"alignments": (8, 16, 16)}])
def test_an_index_that_warps_cannot_follow_is_refused(change):
    assert RUNG.refuses(problem(256, 8)._replace(gathered=True)) == ""
    assert RUNG.refuses(problem(256, 8)._replace(gathered=True, **change))


def problem(rows, groups, n=4096, **others):
    return Problem(rows, n, 4096, "bf16", "bf16", b_layout="col", device="h200", groups=groups, **others)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"groups": 3}, "groups=3: wgmma_grouped"), ({"groups": 0, "scales": "blocks"}, "'blocks': wgmma_blockscaled")],
)
def test_the_rung_for_plain_products_names_the_one_that_has_the_rest(change, words):
    assert words in find(CUDA, "wgmma_epilogue").refuses(problem(128, **{"groups": 1, **change}))


def test_one_instance_serves_every_number_of_rows_and_groups():
    launches = [RUNG.geometry(problem(rows, groups), RUNG.default) for rows in (128, 8192) for groups in (8, 64)]
    assert len({launch.kernel for launch in launches}) == 1


@pytest.mark.parametrize(
    ("rows", "groups", "n", "blocks"),
    [
        (1, 8, 256, 1),  # one group has the row
        (256, 2, 256, 4),  # at most two whole tiles, and a partial one of each group
        (8192, 64, 4096, 132),
    ],
)
def test_there_are_no_more_blocks_than_tiles(rows, groups, n, blocks):
    assert RUNG.geometry(problem(rows, groups, n), {**RUNG.default, "bn": 256}).grid == (blocks, 1, 1)
