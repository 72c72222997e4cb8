"""Experts of few bits in one launch: values on the emulator, groups of any size, parts of tiles, wrong kernels."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from emulated_card import installed
from gemmery.api.packed import prepare_arranged
from gemmery.cuda import weights
from gemmery.cuda.device import KNOWN
from gemmery.cuda.launch import Ready
from gemmery.cuda.weights import Format
from gemmery.ladder.wgmma import aligned_sums
from gemmery_lab.emulated_product import EmulationOptions, Gemm, launch_of, run_rung
from mutant import edited
from test_cuda_wgmma_quantized import GUARD, ROUNDOFF, RUNG, TYPES, logical, problem

pytestmark = pytest.mark.sampled(5)

SMALL = {"tokens": 8, "warpgroups": 4, "blocks": 1, "ways": 2, "stages": 4, "resident": 1, "turns": 1}
UNTOUCHED = 0x7FFF


def multiplied(form, m, ends, *, config=None, epilogue="", invariant=False, order=None, texts=None):
    """The result's bits as numbers, its error in units of the bound, and the findings."""
    groups = len(ends)
    parts = [logical(form, seed) for seed in range(groups)]
    x = np.random.default_rng(7).standard_normal((m, form.k)).astype(TYPES[form.dtype])
    bias = np.linspace(-3, 3, groups * form.n, dtype=np.float32).reshape(groups, form.n) if epilogue else None
    around = np.full((m + 2, form.n + 2 * GUARD), UNTOUCHED, np.uint16)
    c = around[1:-1, GUARD:-GUARD][None]
    case = problem(form, m, epilogue)._replace(groups=groups, invariant=invariant)
    experts = np.stack([weights.arrange(form, *each[:-1]) for each in parts])
    config = {**SMALL, **(config or {})}
    counters = np.zeros(max(4, launch_of(RUNG, case, config).counters) // 4, np.int32)
    told = np.array(ends, np.int32).view(np.float32)[:, None]
    gemm = Gemm(x.view(np.uint16)[None], experts[None], c, bias, a_scale=told, offsets=counters)
    runs = run_rung(RUNG, case, config, gemm, EmulationOptions(seed=order, texts=texts))
    result, want = c[0].copy(), np.full((m, form.n), np.nan)
    size = np.zeros((m, form.n))
    used = np.minimum(np.maximum.accumulate([0, *ends]), m)
    for group, (start, end) in enumerate(pairwise(used)):
        rows, w = x[start:end].astype(float), parts[group][-1]
        want[start:end], size[start:end] = rows @ w.T, np.abs(rows) @ np.abs(w).T
        if bias is not None:
            want[start:end] = np.maximum(want[start:end] + bias[group], 0)
            size[start:end] += np.abs(bias[group])
    c[0][: used[-1]] = UNTOUCHED
    untouched = np.all(around == UNTOUCHED) and not counters.any()
    numbers = result.view(TYPES[form.dtype]).astype(float)[: used[-1]]
    bound = aligned_sums(form.k) * 2.0**-24 * size * 1.01 + ROUNDOFF[form.dtype] * np.abs(want)
    close = np.all(np.abs(numbers - want[: used[-1]]) <= bound[: used[-1]])
    return result, bool(untouched and close), [str(each) for run in runs for each in run.findings]


@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("form", "m", "ends", "config"),
    [
        (Format(131, 384, "int4", 128, "bf16"), 30, [3, 3, 14, 29], {}),
        (Format(96, 520, "int8", 0, "f16"), 9, [0, 9], {"runs": 3}),
        (Format(70, 192, "int4_zeros", 64, "bf16"), 40, [1, 2, 3, 4, 5, 6, 7, 40], {"runs": 5}),
        (Format(64, 160, "e2m1", 32, "bf16"), 20, [20, 20], {}),
        (Format(257, 256, "e4m3", 0, "bf16"), 12, [0, 0, 0, 5], {"ways": 1, "stages": 3, "runs": 2}),
        (Format(64, 256, "int4", 128, "f16"), 70, [2 * i for i in range(1, 36)], {"runs": 7}),
        (Format(64, 2048, "int4", 128, "bf16"), 8, [0, 3, 3], {"runs": 4}),
        # Products of 8, 16, 32, 48, 64 and, of one group, 64 and 8 tokens.
        (Format(65, 256, "int4", 128, "bf16"), 180, [1, 10, 27, 60, 109, 179], {"tokens": 64, "ways": 1, "stages": 3}),
        (Format(64, 384, "int4", 128, "bf16"), 130, [3, 84, 130], {"tokens": 80, "warpgroups": 2, "ways": 1}),
    ],
)
def test_values_are_within_the_bound_between_guards(form, m, ends, config):
    _, right, findings = multiplied(form, m, ends, config=config, epilogue="bias+relu" if form.n % 2 else "")
    assert findings == []
    assert right


CUT = Format(64, 128 * 40, "int4", 128, "bf16")  # one tile for four blocks, of ten steps each


def test_blocks_share_a_tile_where_many_would_be_idle():
    """Each order of blocks gives the same bits; an invariant product's tiles are whole, and no block counts."""
    results = [multiplied(CUT, 8, [0, 5, 5], config={"runs": 4}, order=order) for order in (None, 1, 2)]
    assert all(right and findings == [] for _, right, findings in results)
    assert all(np.array_equal(results[0][0], each[0]) for each in results)
    never_clears = edited("wgmma_quantized.cu", "*counter() = 0;", "")
    for invariant in (True, False):
        options = {"config": {"runs": 4}, "invariant": invariant, "texts": never_clears}
        _, right, findings = multiplied(CUT, 8, [0, 5, 5], **options)
        assert (right and findings == []) is invariant


@pytest.mark.parametrize(
    ("n", "k", "ends", "runs"),
    [
        (131, 1664, [3, 8, 14, 19], 5),  # each group has one tile across: what was asked for is wanted
        (131, 1664, [3, 3, 14, 29], 5),  # one has none, another two
        (131, 128, [8, 9, 10], 0),  # fewer steps than stages
        (64, 2560, [5, 9], 4),  # runs that end with a tile
        (64, 2560, [0, 9], 5),
    ],
)
def test_weights_are_asked_for_before_groups_are_known(n, k, ends, runs):
    """In each order of blocks the same bits, whether what was asked for is wanted or not."""
    form, config = Format(n, k, "int4", 128, "bf16"), {"runs": runs}
    results = [multiplied(form, ends[-1] + 1, ends, config=config, order=order) for order in (None, 1)]
    assert all(right and findings == [] for _, right, findings in results)
    assert np.array_equal(results[0][0], results[1][0])


def test_offsets_that_are_wrong_touch_nothing_outside():
    _, right, findings = multiplied(Format(64, 128, "int4", 128, "bf16"), 12, [4, -7, 900, 2])
    assert findings == []
    assert right


@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("shares.cuh", "max(min(ends[group], p.product.m), row)", "min(ends[group], p.product.m)"),
        ("shares.cuh", "if (lane >= d) count += left;", "count += left;"),
        ("shares.cuh", "      count += tile;\n", ""),
        ("shares.cuh", "table[middle].x > tile", "table[middle].x >= tile"),
        ("shares.cuh", "within % across * Tiles::TOKENS, last}", "within % across * Tiles::TOKENS, last + 1}"),
        ("quantized_tiles.cuh", "from = w + spot.group * each;", "from = w;"),
        ("wgmma_quantized.cu", "Tiles::GROUPED ? spot.group * p.bias_row : 0", "0"),
        ("wgmma_quantized.cu", "w += spot.group * whole_bytes<Tiles>(p.product);", "w += 0;"),
        ("wgmma_quantized.cu", "if (tokens <= LESS) return", "if (tokens <= LESS + 8) return"),
        ("wgmma_quantized.cu", "if (ptx::elect_sync()) producer.drop(early);", ""),
        ("wgmma_quantized.cu", "          producer.start_w();\n", ""),
        ("quantized_tiles.cuh", "ptx::mbarrier_try_wait_parity(full + 8 * i, 0);", ""),
        ("shares.cuh", "        assumed &= count == (group + 1) * of_group;\n", ""),
    ],
)
def test_a_kernel_that_is_wrong_is_told(file, old, new):
    form, ends = Format(63, 128, "int8", 0, "bf16"), [3, 3, *range(4, 34), 1, *range(35, 40), 60]
    config = {"runs": 6} | ({"tokens": 32} if "LESS" in old else {})
    for texts, right in (({}, True), (edited(file, old, new), False)):
        _, close, findings = multiplied(form, 64, ends, config=config, epilogue="bias+relu", texts=texts)
        assert (close and findings == []) is right


def test_the_variant_is_that_of_a_matrix_of_all_groups():
    """With as many tokens as most groups have; where ends need room, with fewer stages."""
    form = Format(2048, 7168, "int4", 128, "bf16")
    for m, groups, tokens in ((64, 8, 16), (8, 8, 8), (64 * 32, 64, 48)):
        assert RUNG.resolve(problem(form, m)._replace(groups=groups), RUNG.default)["tokens"] == tokens
    many = problem(form, 4096)._replace(groups=2000)
    assert RUNG.geometry(many, RUNG.default).shared <= KNOWN["h200"].limits.shared


def test_the_launch_that_is_prepared(monkeypatch):
    """Through the driver's arguments, twice by the same counters."""
    card, form, ends = installed(monkeypatch), Format(70, 1024, "int4", 128, "bf16"), [1, 1, 5]
    parts = [logical(form, seed) for seed in range(3)]
    x = np.random.default_rng(5).integers(-2, 3, (6, form.k))
    experts = np.stack([weights.arrange(form, *each[:-1]) for each in parts])
    a, b, c = card.put(x, "bf16"), card.put(experts, "uint8"), card.empty((6, form.n), "bf16")
    views = (z.memory._replace(pointer=z.memory.pointer & 15, owner=None) for z in (a, c))
    run = prepare_arranged(next(views), form, next(views), groups=3)
    assert isinstance(run, Ready)
    told = card.put(np.array(ends, np.int32).view(np.uint8), "uint8")
    counters, scratch = card.put(np.zeros(4096), "uint8"), card.empty((max(1, run.workspace),), "uint8")
    assert run.counters <= 4096
    for _ in range(2):
        extra = told.memory.pointer, 0, counters.memory.pointer
        run(a.memory.pointer, b.memory.pointer, c.memory.pointer, 0, 0, scratch.memory.pointer, None, extra)
        for group, (start, end) in enumerate(pairwise([0, *ends])):
            exact, w = x[start:end] @ parts[group][-1].T, parts[group][-1]
            bound = 2.0**-8 * np.abs(exact) + 2.0**-14 * (np.abs(x[start:end]) @ np.abs(w).T)
            assert np.all(np.abs(c.numbers[start:end] - exact) <= bound)
    assert card.launched == ["wgmma_quantized"] * 2
