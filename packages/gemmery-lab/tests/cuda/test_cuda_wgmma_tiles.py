"""Tiles of wgmma_epilogue whose warpgroups or pieces of C are not the usual ones, on the emulator; no GPU is needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from checked_products import Placed, matrices, place, problem_of, random, run
from gemmery.cuda import nvrtc
from gemmery.errors import RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery_lab.emulated_product import EmulationOptions, Gemm, run_rung
from mutant import edited

pytestmark = pytest.mark.sampled(7)

pytest.importorskip("cuda.bindings")

EPILOGUE = find(CUDA, "wgmma_epilogue")
BY_K = ("row", "col", "row")


def tile(bm: int, bn: int, stages: int, cm: int = 1, cn: int = 1) -> dict[str, int]:
    return {"bm": bm, "bn": bn, "stages": stages, "cm": cm, "cn": cn, "band": 2, "blocks": 4}


@pytest.mark.many
@pytest.mark.parametrize("config", [tile(192, 192, 2, 2), tile(192, 128, 2), tile(192, 64, 2)])
def test_warpgroups_beside_each_other(config):
    """Of 192 rows, each of the two has all, and half of the columns; a block takes several tiles."""
    assert run(EPILOGUE, *matrices((400, 504, 200), "bf16", layouts=BY_K), config=config)


def test_blocks_take_turns_at_columns_that_they_cannot_divide():
    """Of 112 columns, 4 blocks would have 28 each, no multiple of 8; the fourth row of tiles has 58 of 64 rows."""
    config = {**tile(64, 112, 3, 4), "blocks": 8}
    a, b, c = matrices((250, 230, 136), "f16", layouts=BY_K, filled=True)
    assert run(EPILOGUE, a, b, c, alpha=0.5, beta=-1.5, config=config)


NARROWER = {**tile(192, 192, 2, 2), "band": 1}


@pytest.mark.many
@pytest.mark.parametrize(("shape", "config"), [((400, 552, 712), NARROWER), ((200, 376, 640), tile(192, 192, 2))])
def test_every_other_tile_is_narrower(shape, config):
    """Of 192 columns, 8 less; the next band begins with a narrow one. k has a last step of one product, or of four."""
    assert run(EPILOGUE, *matrices(shape, "bf16", layouts=BY_K), config=config)


@pytest.mark.many
@pytest.mark.parametrize("n", [568, 560])
def test_tiles_stay_wide_where_narrower_ones_do_not_cover_c_or_begin_within_sectors(n):
    """3 tiles do not have 568 columns, and rows of 560 begin at sectors. The mutant is right where tiles are wide."""
    texts = edited("staged.cuh", "sums[i - Tiles::NARROWER / 2]", "sums[i]")
    assert run(EPILOGUE, *matrices((400, n, 600), "bf16", layouts=BY_K), config=NARROWER, texts=texts)


@pytest.mark.many
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("staged.cuh", "sums[i - Tiles::NARROWER / 2]", "sums[i]"),
        ("staged.cuh", "? 1 + Tiles::NARROWER : 1", "? 1 : 1"),
        ("wgmma_persistent.cu", "(column + bands % 2) / 2", "column / 2"),
        ("wgmma_persistent.cu", "covers && (column + bands) % 2", "covers && column % 2"),
        ("wgmma_persistent.cu", "if (covers) tile.col -=", "if (narrow) tile.col -="),
        ("wgmma_epilogue.cu", "Constant<Tiles::WN - Tiles::NARROWER>{}", "Constant<Tiles::WN / 3>{}"),
    ],
)
def test_wrong_narrower_tiles_show(file, old, new):
    texts = edited(file, old, new)
    operands = matrices((400, 552, 712), "bf16", layouts=BY_K)
    with pytest.raises(AssertionError):
        run(EPILOGUE, *operands, config=NARROWER, texts=texts)


@pytest.mark.many
@pytest.mark.parametrize(("config", "a"), [(tile(192, 192, 2, 2), "col"), (tile(192, 128, 2), "row")])
def test_three_warpgroups_where_columns_are_adjacent(config, a):
    """Of 192 rows, each of the three has 64, and all columns: half of them would begin within a box."""
    assert run(EPILOGUE, *matrices((400, 392, 104), "bf16", layouts=(a, "row", "row")), config={**config, "blocks": 2})


APART = {**tile(64, 128, 3, 2), "band": 3}


@pytest.mark.many
@pytest.mark.parametrize(
    ("shape", "layouts", "config"),
    [
        ((1000, 136, 200), BY_K, APART),
        ((1000, 264, 72), ("row", "row", "row"), {**APART, "blocks": 6}),
        ((1000, 136, 328), BY_K, {**APART, "cm": 1}),
        ((1528, 376, 456), BY_K, {**tile(192, 192, 2), "band": 3}),  # its tiles are of two widths
        ((1528, 200, 104), ("row", "row", "row"), tile(192, 192, 2)),
        ((1528, 392, 104), BY_K, {**tile(192, 192, 2), "band": 2}),  # matrices change places in every other band
        ((136, 1000, 200), ("row", "col", "col"), APART),  # rows of C' = B' A'
    ],
)
@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_tiles_of_rows_that_are_apart(shape, layouts, config, name):
    runs = run(EPILOGUE, *matrices(shape, name, layouts=layouts), config=config)
    assert runs[-1].kernel.endswith(", 1, 1>>")


def shortened(width: int, first: int) -> tuple[Placed, Placed, Placed]:
    """Return matrices whose first elements of k are left out, so that rows of A are further from each other."""
    a, b, c = matrices((1000, 136, width), "bf16", layouts=BY_K)
    return replace(a, array=a.array[:, :, first:]), replace(b, array=b.array[:, first:]), c


@pytest.mark.many
@pytest.mark.parametrize(("width", "first"), [(272, 8), (272, 40), (216, 8)])
def test_rows_that_are_apart_begin_anywhere_in_a_line(width, first):
    runs = run(EPILOGUE, *shortened(width, first), config=APART)
    assert runs[-1].kernel.endswith(", 1, 1>>")


@pytest.mark.many
@pytest.mark.parametrize(("width", "first"), [(200, 0), (208, 0), (216, 8), (232, 24), (272, 8), (272, 40), (216, 40)])
def test_rows_that_are_apart_keep_the_order_of_sums(width, first):
    """So that a product has the bits of other tiles, wherever its rows begin."""
    a, b, c = shortened(width, first)
    results = []
    for config in (APART, tile(64, 64, 3)):
        assert run(EPILOGUE, a, b, c, config=config)
        results.append(c.array.tobytes())
    assert results[0] == results[1]


@pytest.mark.many
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("wgmma.cuh", "step * Tiles::BK - Tiles::early(p, tile)", "step * Tiles::BK - Tiles::early(p, tile) / 2"),
        ("wgmma.cuh", "step * Tiles::BK - Tiles::place_of(p, tile)", "step * Tiles::BK - 2 * Tiles::place_of(p, tile)"),
        ("wgmma.cuh", "(place_of(p, tile) + 16) / 32", "place_of(p, tile) / 32"),
        ("wgmma.cuh", "return p.product.k + Tiles::early(p, tile)", "return p.product.k"),
        ("wgmma.cuh", "block * (8192 >> 4) - late", "block * (8192 >> 4)"),
        ("wgmma.cuh", "^ chunk * 16", "+ chunk * 16"),
        ("wgmma_specialized.cu", "first.load(0, before, 7)", "first.load(0, before, 6)"),
        ("wgmma_specialized.cu", "ptx::wgmma_wait_group<1>();  // the registers of the last", "// of the last"),
        ("wgmma_specialized.cu", "first.load(1, now.stage, 0)", "first.load(1, now.stage, 1)"),
        ("wgmma_epilogue.cu", "late = Tiles::is_late(p, order.tile)", "late = false"),
        ("wgmma_persistent.cu", "row -= matrix * rows()", "row -= matrix"),
        ("wgmma_persistent.cu", "Tiles::APART ? rows() * batch : rows()", "rows()"),
        ("wgmma_epilogue.cu", "brief = is_brief(depth)", "brief = is_brief(p.product.k)"),
    ],
)
def test_wrong_rows_apart_show(file, old, new):
    texts = edited(file, old, new)
    operands = matrices((1000, 136, 328), "bf16", layouts=BY_K)
    with pytest.raises(AssertionError):
        run(EPILOGUE, *operands, config={**APART, "cm": 1}, texts=texts)


@pytest.mark.parametrize(
    ("shape", "layouts", "options"),
    [
        ((1001, 136, 200), BY_K, {}),  # no eighths
        ((1032, 136, 200), BY_K, {}),  # it would take more tiles
        ((1000, 136, 192), BY_K, {}),  # rows begin at lines
        ((1000, 136, 200), ("col", "col", "row"), {}),
        ((1000, 136, 200), BY_K, {"out": "f32"}),
        ((1000, 136, 200), BY_K, {"epilogue": "relu"}),
        ((1000, 136, 200), BY_K, {"batch": 2}),
        ((1000, 136, 200), BY_K, {"alignments": (8, 16, 16)}),  # A is packed to whole lines
        ((1000, 132, 200), BY_K, {"alignments": (16, 16, 8)}),  # no tensor map describes C
    ],
)
def test_other_products_have_rows_beside_each_other(shape, layouts, options):
    problem = problem_of(shape, "bf16", layouts)._replace(device="h200", **options)
    geometry = EPILOGUE.geometry(problem, {**EPILOGUE.default, **APART})
    assert (geometry.apart, geometry.kernel.endswith(", 1, 1>>")) == (1, False)


@pytest.mark.many
@pytest.mark.parametrize("config", [tile(128, 224, 2, 2), tile(64, 96, 2, 2, 2), tile(64, 64, 2, 4)])
def test_blocks_share_the_k_of_boxes_whose_sides_are_adjacent(config):
    """Boxes of 64 columns of B, of which a tile may have 3 or a part of the last; and of 64 rows of A."""
    assert run(EPILOGUE, *matrices((200, 264, 104), "bf16", layouts=("col", "row", "row")), config=config)


@pytest.mark.many
@pytest.mark.parametrize(("bm", "bn"), [(128, 112), (128, 144), (64, 144), (64, 112), (256, 112)])
def test_pieces_of_c_that_overlap(bm, bn):
    assert run(EPILOGUE, *matrices((300, 310, 72), "f16", layouts=BY_K), config=tile(bm, bn, 2))


@pytest.mark.many
@pytest.mark.parametrize(("b", "shape", "stages"), [("col", (300, 712, 456), 2), ("row", (264, 654, 400), 2)])
def test_some_pieces_leave_at_once_and_others_during_the_next_tile(b, shape, stages):
    """Of ten pieces, there are registers for six; with a C that a tensor map describes and one without."""
    config = {**tile(256, 160, stages, 1, 2), "blocks": 2}
    assert run(EPILOGUE, *matrices(shape, "bf16", layouts=("row", b, "row")), config=config)


@pytest.mark.many
@pytest.mark.parametrize(("name", "k"), [("bf16", 72), ("bf16", 88), ("e4m3", 144), ("e4m3", 176), ("int8", 160)])
def test_the_last_step_has_one_product_or_more(name, k):
    """A step has four, of 32 bytes of k each."""
    out = "int32" if name == "int8" else "bf16"
    assert run(EPILOGUE, *matrices((70, 72, k), name, out=out, layouts=BY_K), config=tile(64, 64, 2))


@pytest.mark.many
@pytest.mark.parametrize(
    ("name", "m", "b", "bn"),
    [
        *[("bf16", 1, "col", 32), ("f16", 8, "row", 32), ("e4m3", 5, "col", 32), ("bf16", 8, "col", 64)],
        *[("f16", 1, "col", 96), ("bf16", 7, "col", 112), ("bf16", 2, "row", 112)],
    ],
)
def test_eight_rows_are_all_that_shared_memory_has(name, m, b, bn):
    """64 are multiplied, each of the 8 eight times, and those that C has are stored."""
    operands = matrices((m, 118 if bn > 32 else 70, 400), name, out="bf16", layouts=("row", b, "row"))
    assert run(EPILOGUE, *operands, config=tile(8, bn, 4))


@pytest.mark.many
@pytest.mark.parametrize(
    ("shape", "config", "lines"),
    [
        ((3, 72, 392), tile(8, 32, 4), 6),
        ((3, 200, 392), tile(8, 96, 2), 4),
        ((40, 104, 648), tile(64, 64, 2), 8),
        ((72, 104, 392), tile(64, 64, 2, 2), 6),
    ],
)
def test_each_line_of_b_is_asked_for_once_ahead(shape, config, lines):
    """Prefetches change nothing that can be checked, so here they load: a sector for each line of each column."""
    file, (a, b, c) = "wgmma_epilogue.cu", matrices(shape, "bf16", layouts=BY_K)
    asked = "ptx::prefetch_global_L2(from);"
    loads = asked.replace("ptx::prefetch_global_L2(", "(void)*reinterpret_cast<const volatile short*>(")
    text = nvrtc.text(file)
    assert text.count(asked) == 1
    case = problem_of(shape, "bf16", BY_K)._replace(device="h100", alignments=(16, 16, 16))
    given, options = Gemm(a.array, b.array, c.array), EmulationOptions(texts={file: text.replace(asked, loads)})
    (done,) = run_rung(EPILOGUE, case, config, given, options)
    assert [str(each) for each in done.findings] == []
    assert done.global_.loads.sectors == shape[1] * lines
    (done,) = run_rung(EPILOGUE, case, config, given, EmulationOptions())
    assert done.global_.loads.sectors == 0


@pytest.mark.many
@pytest.mark.parametrize("bn", [112, 144])
def test_pieces_that_overlap_read_c_before_they_write_it(bn):
    a, b, c = matrices((130, 300, 72), "bf16", filled=True)
    assert run(EPILOGUE, a, b, c, alpha=0.5, beta=-1.5, epilogue="gelu", config=tile(128, bn, 2))


@pytest.mark.many
@pytest.mark.parametrize(("bm", "bn", "stages"), [(128, 192, 2), (128, 256, 3), (256, 192, 2)])
def test_results_of_32_bits(bm, bn, stages):
    """Of the pieces of a tile all, half or none stay in registers while the next one is multiplied."""
    assert run(EPILOGUE, *matrices((300, 560, 72), "f16", out="f32", layouts=BY_K), config=tile(bm, bn, stages))


@pytest.mark.many
@pytest.mark.parametrize("beta", [0.0, -1.5])
@pytest.mark.parametrize(
    ("m", "config"),
    [
        (72, tile(64, 64, 2)),  # 48 of 56 rows are those of the tile above
        (136, tile(128, 64, 2)),
        (260, tile(256, 64, 2)),  # the last tile begins at 132, and its warps have rows 64 apart
        (330, tile(128, 64, 2, 2, 1)),  # a block of the last cluster has no rows at all
        (200, tile(64, 64, 2, 2, 4)),
        (184, tile(128, 64, 2, 4, 2)),
    ],
)
def test_the_last_tile_overlaps_the_one_above(m, config, beta):
    """Each element of C is written once, by the tile whose own it is: C may be an operand, too."""
    a, b, c = matrices((m, 136, 136), "bf16", layouts=BY_K, filled=beta != 0)
    assert run(EPILOGUE, a, b, c, alpha=0.5, beta=beta, config=config)


@pytest.mark.parametrize("out", ["f32", "bf16"])
def test_gelu_of_numbers_of_every_size(out):
    """Sums are elements of A; the bound of few products is tight. Infinity stays what it is."""
    sizes = np.concatenate([np.linspace(-8, 8, 1199), np.geomspace(1e-7, 6e4, 200), -np.geomspace(1e-7, 6e4, 200)])
    sizes = np.append(sizes, np.inf)
    a = place(sizes.astype(np.float16).reshape(1, 200, 8), "f16")
    b = place(np.eye(8, dtype=np.float16)[None], "f16")
    _, _, c = matrices((200, 8, 8), "f16", out)
    assert run(EPILOGUE, a, b, c, epilogue="gelu", config=tile(64, 32, 2))


@pytest.mark.many
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        (tile(128, 64, 2), "bf16"),
        (tile(64, 112, 2), "f16"),
        (tile(256, 96, 2), "bf16"),
        (tile(256, 160, 2, 1, 2), "bf16"),  # it looks up its place when the bias is brought
    ],
)
def test_a_bias_and_relu(config, name, layout):
    """Of columns; and of rows, where C is by columns. Its last part is that of a tile beyond the edge."""
    a, b, c = matrices((270, 250, 72), name, layouts=("row", "col", layout))
    bias = place(random((1, 1, 250), "f32", 4), "f32", "odd")
    assert run(EPILOGUE, a, b, c, bias=bias, epilogue="bias+relu", config=config)


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (tile(192, 192, 2), {"out": "f32"}, "products of halves"),
        (tile(192, 96, 2), {}, "64, 128 or 192 columns"),
        (tile(128, 112, 2), {"out": "f32"}, "results of 16 bits"),
        (tile(128, 104, 2), {}, "96, 112, 128, 144"),
    ],
)
def test_tiles_that_are_refused(config, change, words):
    problem = Problem(512, 512, 512, "bf16", "bf16", b_layout="col", device="h200")._replace(**change)
    with pytest.raises(RefusedError, match=words):
        EPILOGUE.geometry(problem, config)


@pytest.mark.many
@pytest.mark.parametrize(("shape", "places"), [((64, 64, 12), 1), ((128, 112, 6), 2), ((256, 160, 4, 1, 2), 1)])
def test_large_tiles_let_the_next_launch_begin_when_their_products_have_ended(shape, places):
    """They ask once more, behind the products, where the grid is not small; the largest have no registers to ask."""
    problem = Problem(4096, 4096, 4096, "bf16", "bf16", b_layout="col", device="h100", alignments=(16, 16, 16))
    (launch,) = EPILOGUE.geometry(problem, {**EPILOGUE.default, **tile(*shape), "band": 4, "blocks": 128}).launches
    text = nvrtc.ptx(launch.source, launch.kernel, "sm_90a").text
    before, _, after = text.partition("wgmma.mma_async")
    begins = "griddepcontrol.launch_dependents"
    assert (before.count(begins), after.count(begins)) == (1, places - 1)
