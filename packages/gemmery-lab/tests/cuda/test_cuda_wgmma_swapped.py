"""Tiles of wgmma_epilogue that compute C' = B' A', on the emulator; no GPU is needed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from checked_products import matrices, place, run
from gemmery.cuda import choose
from gemmery.cuda.choose import cost
from gemmery.cuda.choose.data import Instance
from gemmery.cuda.device import KNOWN
from gemmery.errors import GemmeryError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from mutant import edited
from operands import random

pytestmark = pytest.mark.sampled(7)

pytest.importorskip("cuda.bindings")

EPILOGUE = find(CUDA, "wgmma_epilogue")
BY_K = ("row", "col", "row")
PROBLEM = Problem(520, 4096, 4096, "bf16", "bf16", b_layout="col", device="h200")


def tile(bm: int, bn: int, stages: int = 2, cm: int = 1, cn: int = 1) -> dict[str, int]:
    return {"bm": bm, "bn": bn, "stages": stages, "cm": cm, "cn": cn, "band": 2, "blocks": 4}


OVERLAPPING = ((160, 136, 136), tile(136, 128))  # 96 of 112 rows beyond the edge are those of the tile above


@pytest.mark.many
@pytest.mark.parametrize("beta", [0.0, -1.5])
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((272, 264, 136), tile(136, 128)),  # two whole tiles; of columns, three that overlap
        OVERLAPPING,
        ((144, 136, 72), tile(136, 128)),  # the last tile has 8 rows: its last piece begins 32 rows before its end
        ((236, 136, 72), tile(112, 64)),  # 12 rows
        ((337, 200, 72), tile(152, 64)),  # 33 rows
        ((40, 72, 72), tile(112, 64)),  # fewer rows than a tile
        ((330, 520, 200), tile(144, 256)),  # each warpgroup has two blocks of 64 columns
        ((300, 264, 72), tile(176, 128)),
        ((90, 136, 72), tile(32, 64)),
        ((250, 264, 136), tile(136, 128, 2, 2)),  # blocks of a cluster share columns of B
        ((410, 136, 72), tile(200, 64, 2, 2)),
        ((337, 520, 200), {**tile(160, 64, 2, 2, 4), "blocks": 8}),
        ((337, 328, 200), {**tile(160, 64, 2, 1, 4), "blocks": 8}),  # the last of four has 8 columns, and two have none
        ((190, 520, 72), {**tile(96, 128, 2, 2, 4), "blocks": 8}),
        ((170, 264, 200), tile(80, 64, 3, 2, 2)),
        ((300, 264, 72), tile(80, 64)),
        ((66, 520, 200), {**tile(72, 64, 3, 1, 4), "blocks": 8}),  # four blocks take turns at copying rows of A
        ((50, 264, 72), tile(56, 64, 2, 1, 2)),
    ],
)
def test_rows_in_multiples_of_eight(shape, config, beta):
    """Each element of C is written once: C may be an operand, too."""
    a, b, c = matrices(shape, "bf16", layouts=BY_K, filled=beta != 0)
    runs = run(EPILOGUE, a, b, c, alpha=0.5, beta=beta, config=config)
    assert runs[-1].kernel.endswith(f", {config['cn']}, {config['cm']}, 0, 1>>")


@pytest.mark.many
@pytest.mark.parametrize("new", ["turn % SHARERS != 0", "turn % 2 != slice % 2"])
def test_wrong_turns_show(new):
    """Blocks wait for rows that nobody brings, or get more bytes than they wait for."""
    config = {**tile(72, 64, 3, 1, 4), "blocks": 4}
    operands = matrices((66, 264, 136), "bf16", layouts=BY_K)
    with pytest.raises((AssertionError, GemmeryError)):
        run(EPILOGUE, *operands, config=config, texts=edited("tma.cuh", "turn % SHARERS != slice", new))


@pytest.mark.many
@pytest.mark.parametrize("layouts", [("row", "row", "row"), ("row", "col", "col"), ("col", "col", "col")])
@pytest.mark.parametrize("k", [0, 8, 63, 200])
def test_layouts_and_depths(layouts, k):
    """Where C is by columns, kernels that write rows would take C' = B' A', and these take the product as it is."""
    shape = (272, 136, k) if layouts[2] == "row" else (136, 272, k)
    assert run(EPILOGUE, *matrices(shape, "f16", layouts=layouts), config=tile(136, 128))


@pytest.mark.many
@pytest.mark.parametrize("epilogue", ["bias", "bias+gelu", "bias+relu", "silu"])
@pytest.mark.parametrize("layouts", [BY_K, ("row", "col", "col")])
def test_steps_after_the_product(epilogue, layouts):
    m, n = (270, 272) if layouts[2] == "row" else (272, 270)
    a, b, c = matrices((m, n, 72), "bf16", layouts=layouts)
    bias = place(random((1, 1, n), "f32", 4), "f32", "odd") if "bias" in epilogue else None
    assert run(EPILOGUE, a, b, c, bias=bias, epilogue=epilogue, config=tile(112, 64))


@pytest.mark.many
@pytest.mark.parametrize("shared", [(False, False), (True, False), (False, True)])
def test_batches(shared):
    operands = matrices((150, 136, 72), "bf16", layouts=BY_K, batch=3, shared=shared)
    assert run(EPILOGUE, *operands, config=tile(112, 64))


@pytest.mark.many
@pytest.mark.parametrize("layouts", [BY_K, ("row", "row", "row"), ("col", "col", "row"), ("strided", "col", "row")])
def test_operands_that_are_packed_first(layouts):
    """Rows of 67 elements, or columns of 151, begin at multiples of 2 bytes."""
    assert len(run(EPILOGUE, *matrices((151, 136, 67), "bf16", layouts=layouts), config=tile(112, 64))) == 2


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("a_layout", ["row", "col", "any"])
def test_what_is_chosen_is_taken(a_layout, device):
    """Whatever has to be packed: the choice is made for operands as they are read."""
    taken = set()
    for m, k, b, aligned in itertools.product((65, 520, 521, 1300), (0, 67, 4096), ("row", "col", "any"), (2, 16)):
        case = PROBLEM._replace(
            m=m, k=k, a_layout=a_layout, b_layout=b, alignments=(aligned, aligned, 16), device=device
        )
        for change in ({}, {"scales": "outer"}, {"batch": 3}, {"epilogue": "bias+gelu"}, {"invariant": True}):
            taken.add(EPILOGUE.geometry(case._replace(**change), EPILOGUE.default).swapped)
    assert taken == {False, True}


@pytest.mark.parametrize("asked", [{"cm": 2}, {"cn": 2}, {"bn": 96}, {"bn": 128}, {"stages": 3}])
def test_a_config_that_is_given_in_part_goes_with_other_tiles(asked):
    for m, n, k in ((520, 4096, 4096), (1320, 7232, 4800), (777, 4096, 4096)):
        case = PROBLEM._replace(m=m, n=n, k=k)
        assert EPILOGUE.geometry(case, EPILOGUE.default).swapped
        assert not EPILOGUE.geometry(case, {**EPILOGUE.default, **asked}).swapped


def test_the_bits_are_those_of_other_tiles():
    a, b, c = matrices((160, 200, 200), "bf16", layouts=BY_K)
    results = []
    for config in (tile(136, 128), tile(112, 64), tile(64, 64)):
        assert run(EPILOGUE, a, b, c, config=config)
        results.append(c.array.tobytes())
    assert len(set(results)) == 1


@pytest.mark.many
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("staged.cuh", "if (P::SWAPPED && at.column < at.own) return;", ""),
        ("staged.cuh", "first + i * 16 * P::ROW", "first + i * 8 * P::ROW"),
        ("staged.cuh", ": row / 4 % 2;", ": row / 2 % 2;"),
        ("staged.cuh", "chunk = lane / 8 % 2;", "chunk = lane / 16;"),
        ("ptx_hopper.cuh", "m8n8.x4.trans.shared::cta.b16 [%0], {%1", "m8n8.x4.shared::cta.b16 [%0], {%1"),
        ("wgmma_epilogue.cu", "if (P::SWAPPED && of_piece.column < at.own) of_piece.column = p.product.n;", ""),
    ],
)
def test_wrong_swapped_tiles_show(file, old, new):
    texts = edited(file, old, new)
    a, b, c = matrices(OVERLAPPING[0], "bf16", layouts=BY_K, filled=True)
    with pytest.raises(AssertionError):
        run(EPILOGUE, a, b, c, alpha=0.5, beta=-1.5, config=OVERLAPPING[1], texts=texts)


@pytest.mark.sampled(1)
def test_a_last_piece_that_is_not_its_own_shows():
    texts = edited("wgmma_persistent.cu", "min(beyond / 32 * 32, Tiles::BN - 32)", "beyond / 32 * 32")
    with pytest.raises(AssertionError):
        run(EPILOGUE, *matrices((144, 136, 72), "bf16", layouts=BY_K), config=tile(136, 128), texts=texts)


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (tile(40, 128), {}, r"bm=40, bn=128: a tile has 8, 64, 128, 192 or 256 rows; or 32, 48, 56"),
        (tile(136, 192), {}, "64, 128 or 256 columns"),
        (tile(136, 128), {"out": "f32"}, "elements of 16 bits"),
        (tile(136, 128), {"a_layout": "col"}, "A by rows"),
        (tile(136, 128), {"n": 4095}, "rows of C have 8190 bytes.*use 64, 128 or 256 rows"),
        (tile(136, 256, 9), {}, "stages=9 of bm=136, bn=256: .* use fewer stages"),
        (tile(176, 256), {}, "bm=176, bn=256: only tiles that leave packed"),
    ],
)
def test_what_is_refused(config, change, words):
    with pytest.raises(RefusedError, match=words):
        EPILOGUE.geometry(PROBLEM._replace(**change), config)


def test_numbers_of_rows_that_other_tiles_do_not_suit():
    """520 rows are four tiles of 136; by 64 or 128, five. No table has them, as rows straddle no lines."""
    device = KNOWN["h200"]
    taken = choose.chosen(PROBLEM, device)
    assert (taken["bm"], taken["bn"], taken["splits"]) == (136, 128, 1)
    assert EPILOGUE.geometry(PROBLEM, EPILOGUE.default).swapped
    for change in ({"m": 512}, {"m": 40}, {"k": 4104}, {"out": "f32"}, {"n": 4095}, {"a_layout": "col"}):
        case = PROBLEM._replace(**change)
        assert not cost.is_swapped(choose.chosen(case, device)["bm"])
        assert not EPILOGUE.geometry(case, EPILOGUE.default).swapped


def test_no_block_of_a_cluster_has_rows_beyond_the_edge_alone():
    device = KNOWN["h200"]
    for m in range(65, 513):
        case = PROBLEM._replace(m=m, n=3368, k=5640)
        tiles = choose.candidates(case, cost.demand_of(case), device)
        pairs = [each for each in tiles if cost.is_swapped(each.bm) and each.cm > 1]
        assert pairs or m <= 80
        assert all(-(-m // each.bm) % each.cm == 0 for each in pairs)


def test_the_model_exchanges_the_sides():
    demand = cost.demand_of(PROBLEM._replace(k=4104, n=1000))
    other = cost.swapped(demand)
    assert (other.m, other.n, other.a_more, other.b_more) == (1000, 520, demand.b_more, demand.a_more)
    tall, wide = Instance(144, 128, 6, 1, 1), Instance(128, 144, 6, 1, 1)
    device = KNOWN["h200"]
    assert cost.cycles(demand, tall, 1, device) == cost.cycles(other, wide, 1, device)


def test_bits_do_not_depend_on_rows():
    """A row has the same bits in a product of 8 and of 150 rows, whatever tiles these have."""
    a, b, c = matrices((150, 136, 200), "bf16", layouts=BY_K)
    assert run(EPILOGUE, a, b, c, config=tile(112, 64))
    few, _, result = matrices((8, 136, 200), "bf16", layouts=BY_K)
    few.array[...] = a.array[:, :8]
    few = replace(few, before=few.image.copy())
    assert run(EPILOGUE, few, b, result, config=tile(8, 32, 4))
    assert np.array_equal(c.array[:, :8], result.array)
