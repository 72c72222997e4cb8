"""The k of a tile shared by blocks on CUDA cores: by a cluster, or with a second launch; no GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from checked_products import ROWS, matrices, run
from gemmery import dispatch
from gemmery.api import prepared
from gemmery.cuda.choose.data import SIMT_PACKED
from gemmery.errors import RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery_lab.emulated_product import Gemm, problem_of, run_rung

pytest.importorskip("cuda.bindings")

PIPELINED = find(CUDA, "simt_pipelined")
TILE = {"bm": 32, "bn": 32, "bk": 16, "wm": 32, "wn": 16, "tm": 4, "tn": 4, "stages": 3, "blocks": 4}
WIDE = {**TILE, "bm": 16, "bn": 64, "wm": 16, "wn": 32}
COLUMNS = ("row", "col", "row")


@pytest.mark.many(5)
@pytest.mark.parametrize("device", ["h200", "a100"])
@pytest.mark.parametrize("layouts", [ROWS, COLUMNS, ("col", "row", "col"), ("strided", "odd", "padded")])
@pytest.mark.parametrize(
    ("shape", "tile", "splits"),
    [((33, 65, 101), TILE, 2), ((40, 36, 100), WIDE, 8), ((17, 35, 9), TILE, 4), ((5, 68, 52), WIDE, 3)],
)
def test_shared_products_are_right_and_write_nothing_else(shape, tile, splits, layouts, device):
    """Sides that no tile divides, parts of uneven length and empty ones, in guarded memory."""
    assert run(PIPELINED, *matrices(shape, "f32", layouts=layouts), config={**tile, "splits": splits}, device=device)


@pytest.mark.many(2)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("packed", SIMT_PACKED)
def test_columns_of_b_are_copied_to_rows_before(packed, splits):
    """Also where a cluster shares k. The copied rows of n have a gap behind them, and C no whole tiles."""
    config = {**packed._asdict(), "splits": splits}
    del config["speed"]
    runs = run(PIPELINED, *matrices((136, 268, 100), "f32", layouts=COLUMNS), config=config)
    product = "simt_pipelined_cluster" if splits > 1 else "simt_pipelined"
    assert [each.kernel.partition("<")[0] for each in runs] == ["wgmma_pack", product]
    assert runs[-1].kernel.endswith(", true>")


def test_an_older_device_shares_k_through_registers():
    config = {**TILE, "stages": 2, "splits": 4}
    assert run(PIPELINED, *matrices((33, 65, 101), "f32"), config=config, device="t4")


@pytest.mark.parametrize("device", ["h200", "a100"])
@pytest.mark.parametrize("layouts", [ROWS, COLUMNS])
def test_the_epilogue_is_applied_to_the_whole_sum(layouts, device):
    a, b, c = matrices((35, 36, 100), "f32", layouts=layouts, batch=3, filled=True)
    bias = matrices((1, 36, 36), "f32", filled=True)[2]
    given = {"alpha": 0.5, "beta": -1.5, "bias": bias, "epilogue": "bias+gelu"}
    assert run(PIPELINED, a, b, c, **given, config={**TILE, "splits": 4}, device=device)


@pytest.mark.many(3)
@pytest.mark.parametrize("device", ["h200", "a100"])
@pytest.mark.parametrize("layouts", [ROWS, COLUMNS])
def test_parts_are_added_in_the_order_of_k(layouts, device):
    """The same bits in any order of blocks and warps, and those of sums of the parts one after the other."""
    m, n, k = 40, 36, 96
    results = []
    for seed in (None, 1, 2):
        a, b, c = matrices((m, n, k), "f32", layouts=layouts)
        assert run(PIPELINED, a, b, c, config={**TILE, "splits": 3}, device=device, seed=seed)
        results.append(c.array[0].copy())
    total = np.zeros((m, n), np.float32)
    for part in range(3):
        along = slice(part * 32, part * 32 + 32)
        x, y, z = matrices((m, n, 32), "f32", layouts=layouts)
        x.array[...], y.array[...] = a.array[..., along], b.array[:, along]
        x.before[...], y.before[...] = x.image, y.image
        assert run(PIPELINED, x, y, z, config={**TILE, "splits": 1}, device=device)
        total = z.array[0].copy() if part == 0 else total + z.array[0]
    assert all(np.array_equal(each, total) for each in results)


@pytest.mark.parametrize("device", ["h200", "a100"])
def test_nan_stays_in_its_row(device):
    """Zeros behind the end of k, and parts without k, meet none."""
    a, b, c = (each.array for each in matrices((20, 20, 50), "f32"))
    a[0, 3, 49] = np.nan
    given = Gemm(a, b, c)
    run_rung(PIPELINED, problem_of(given, "f32", "f32", device), {**TILE, "splits": 8}, given)
    assert np.array_equal(np.isnan(c[0]), np.repeat(np.arange(20)[:, None] == 3, 20, axis=1))


def test_few_tiles_share_k_and_many_do_not():
    def chosen(m, n, k, **options):
        problem = Problem(m, n, k, *2 * (options.pop("name", "f32"),), device="h200", **options)
        candidate = dispatch.choice(problem)
        assert candidate.rung.name in ("simt_pipelined", "mma_f64")
        return PIPELINED.resolve(problem, {**PIPELINED.default, **candidate.config})["splits"]

    assert chosen(64, 2048, 2048) > 1
    assert chosen(64, 2048, 2048, b_layout="col") > 1
    assert chosen(64, 2048, 2047, b_layout="col") > 1
    assert chosen(64, 2048, 16) == 1
    assert chosen(4096, 4096, 4096) == 1
    assert chosen(64, 2048, 2048, invariant=True) == 1
    assert PIPELINED.resolve(Problem(64, 2048, 2048, "f64", "f64", device="a100"), PIPELINED.default)["splits"] == 1
    assert PIPELINED.resolve(Problem(64, 2048, 2048, "f32", "f32", device="a100"), PIPELINED.default)["splits"] > 1


@pytest.mark.parametrize("options", [{}, {"b_layout": "col"}, {"epilogue": "gelu"}])
def test_no_general_kernel_serves_a_product_that_shares_k(options):
    """It adds whole k: the bits of a shape would change when its own kernel is there."""
    draw, shared = np.random.default_rng(5), 0
    for m, n, k in (2 ** draw.uniform(1, 12, (60, 3))).astype(int).tolist():
        problem = Problem(m, n, k, "f32", "f32", device="h200", **options)
        candidate = dispatch.choice(problem)
        shares = candidate.rung.geometry(problem, candidate.config).launches[-1].cluster > 1
        assert prepared._at_once(prepared._ALONE, problem) == shares
        assert not (shares and prepared.leaves_to_general("f32", "h200", m, n, k))
        shared += shares
    assert 10 <= shared <= 50


@pytest.mark.parametrize(
    ("name", "options", "splits", "words"),
    [
        ("f64", {}, 2, "splits=2 of sums of f64.*use splits=1"),
        ("f32", {"semiring": "min_plus"}, 2, "splits=2 of min_plus.*use splits=1"),
        ("f32", {}, 9, "splits=9: 1 to 8 blocks"),
    ],
)
def test_what_blocks_cannot_share_is_refused(name, options, splits, words):
    with pytest.raises(RefusedError, match=words):
        PIPELINED.geometry(Problem(64, 64, 64, name, name, device="h200", **options), {**TILE, "splits": splits})
    narrow = {**TILE, "tn": 2, "wn": 8, "splits": 2}
    with pytest.raises(RefusedError, match=r"tn=2, splits=2: .*a multiple of 4"):
        PIPELINED.geometry(Problem(64, 64, 64, "f32", "f32", device="h200"), narrow)
