"""How the kernels by wgmma are launched: tiles, rings, clusters, maps, refusals, bounds; no GPU is needed."""

from __future__ import annotations

import itertools

import pytest

from gemmery.cuda import nvrtc, sass
from gemmery.cuda.choose.cost import at_a_time, is_swapped
from gemmery.cuda.choose.data import INSTANCES
from gemmery.cuda.choose.legal import plain_halves, refuses_swapped
from gemmery.cuda.device import KNOWN
from gemmery.cuda.geometry import refusal
from gemmery.errors import RefusedError
from gemmery.ladder.rung import find
from gemmery.ladder.wgmma import WGMMA
from gemmery.problem import Problem

H200 = KNOWN["h200"]
LIBRARY = find(WGMMA, "wgmma_epilogue")
TYPES = [
    ("bf16", "bf16"),
    ("f16", "f32"),
    ("f32", "f32"),
    ("e4m3", "bf16"),
    ("e5m2", "f32"),
    ("int8", "int32"),
    ("int8", "f16"),
]


def product(m, n, k, dtype="bf16", out="", b_layout="col", **options):
    precision = "tf32" if dtype == "f32" else ""
    return Problem(m, n, k, dtype, out or dtype, b_layout=b_layout, device="h200", precision=precision, **options)


def launch(problem, **config):
    return LIBRARY.geometry(problem, {**LIBRARY.default, **config})


@pytest.mark.parametrize(("dtype", "out"), TYPES)
def test_every_product_has_a_launch(dtype, out):
    """Whatever is chosen for it is legal, in every layout, and fits the device."""
    sides = [(1, 1, 1), (1, 4096, 4096), (65, 63, 8), (1000, 1000, 1000), (4096, 4096, 0), (8192, 28672, 8192)]
    for (m, n, k), a, b in itertools.product(sides, ("row", "col"), ("row", "col")):
        problem = product(m, n, k, dtype, out, b, a_layout=a)
        assert LIBRARY.refuses(problem) == ""
        assert refusal(launch(problem), H200) == ""


@pytest.mark.parametrize("tile", INSTANCES)
@pytest.mark.parametrize(("dtype", "out"), TYPES)
def test_every_instance_fits_every_type(tile, dtype, out):
    config = dict(zip(("bm", "bn", "stages", "cm", "cn"), tile[:5], strict=True))
    problem = product(8 if tile.bm == 8 else 4096, 4096, 4096, dtype, out)
    largest = tile[:3] == (256, 160, 4)
    taken = not is_swapped(tile.bm) or not refuses_swapped(problem)
    if (
        (tile.bm == 192 and not plain_halves(problem))
        or ((tile.bn % 32 or largest) and out in ("f32", "int32"))
        or not taken
    ):
        words = r"plain products of halves|results of 16 bits|use fewer stages|elements of 16 bits"
        with pytest.raises(RefusedError, match=words):
            launch(problem, **config)
        return
    geometry = launch(problem, **config)
    assert refusal(geometry, H200) == ""
    assert geometry.grid[0] % geometry.cluster == 0
    assert geometry.kernel.startswith("wgmma_epilogue_cluster<" if geometry.cluster > 1 else "wgmma_epilogue<")


def test_an_instance_is_the_same_for_every_shape():
    """m, n, k, alpha and beta are values of the argument; the steps after the product belong to an image."""
    config = {"bm": 128, "bn": 128, "stages": 4, "cm": 1, "cn": 1}
    fused = [launch(product(m, 264, 136, scaled=True, epilogue="bias+silu"), **config).kernel for m in (1, 300)]
    plain = [launch(product(m, n, k), **config).kernel for m, n, k in [(1, 8, 8), (300, 520, 0), (77, 4096, 64)]]
    assert len(set(fused)) == len(set(plain)) == 1
    assert fused[0] == plain[0].replace(", 0, ", ", 32, ", 1)


def test_boxes_are_what_a_block_brings():
    config = {"bm": 128, "bn": 256, "stages": 4, "cm": 2, "cn": 1}
    a, b, c = launch(product(512, 512, 512), **config).maps
    assert (a.box, b.box, c.box, c.swizzle) == ((64, 128), (64, 128), (64, 16), 128)
    a, b, c = launch(product(512, 512, 512, b_layout="row", a_layout="col"), **config).maps
    assert (a.box, b.box) == ((64, 64), (64, 32))
    a, b, c = launch(product(512, 512, 512, "int8", "int32"), **config).maps
    assert (a.box, b.box, c.box, c.swizzle) == ((128, 128), (128, 128), (32, 16), 128)
    wide = {"bm": 256, "bn": 192, "stages": 3, "cm": 1, "cn": 1}
    assert launch(product(512, 576, 512), **wide).maps[2].box == (32, 16)  # sums leave no room for packed ones


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bm": 40}, "bm=40.* 8, 64, 128, 192 or 256 rows"),
        ({"bm": 8}, "bm=8.* at most 8 rows, of A by rows"),
        ({"bm": 192, "bn": 96}, "192 rows has 64, 128 or 192 columns"),
        ({"bn": 40}, "bn=40.* 32, 64, 96, .* 256 columns"),
        ({"bm": 256, "bn": 256, "stages": 2}, "256 sums for each thread.* room for 192"),
        ({"stages": 1}, "stages=1: one is filled while another is read"),
        ({"bm": 128, "bn": 256, "stages": 5}, "stages=5.* bytes of shared memory, of 232448"),
        ({"bn": 128, "cm": 3}, "cm=3, cn=1: a cluster has 1, 2, 4 or 8 blocks"),
    ],
)
def test_a_config_that_no_kernel_has_is_refused(config, words):
    full = {"bm": 128, "bn": 128, "stages": 4, "cm": 1, "cn": 1, **config}
    with pytest.raises(RefusedError, match=words):
        launch(product(512, 512, 512), **full)


def test_what_the_rungs_do_not_take_is_named():
    assert "precision='tf32'" in LIBRARY.refuses(product(64, 64, 64, "f32")._replace(precision=""))
    assert "plain product of int8" in LIBRARY.refuses(product(64, 64, 64, "int8", "int32", epilogue="relu"))
    assert "not f64" in LIBRARY.refuses(product(64, 64, 64, "f16", "f64"))
    assert "wgmma_blockscaled applies" in LIBRARY.refuses(product(64, 64, 64, "e4m3", "bf16", scales="blocks"))
    below = find(WGMMA, "wgmma_tma")
    assert "a tensor map needs 16; wgmma_epilogue packs" in below.refuses(product(64, 64, 63, alignments=(2, 2, 16)))
    assert "wgmma_epilogue has it" in below.refuses(product(64, 64, 64, epilogue="relu"))


def test_other_generations_are_refused():
    geometry = launch(product(512, 512, 512))
    assert "sm_90a (wgmma" in refusal(geometry, KNOWN["a100"])
    assert "sm_90a (wgmma" in refusal(geometry, KNOWN["rtx5090"])


def test_clusters_that_run_at_a_time():
    assert [at_a_time(blocks, 132) for blocks in (1, 2, 4)] == [132, 66, 30]


def test_bounds_by_type():
    """By hand: a cut for each product and for the sum, and one of the result, in each step."""
    assert LIBRARY.bound_of("bf16")(16) == 16 / 2 + 2.5
    assert LIBRARY.bound_of("f32", "tf32")(16) == 2.0**14 + 16 / 2 + 2 * 2.5
    assert LIBRARY.bound_of("e4m3")(64) == 2 * (33 * 2**11 + 2)
    assert LIBRARY.bound_of("int8")(1000) == 0


def test_lines_that_are_asked_for_ahead():
    """Of a B that few rows read from memory: not of one that is packed, by rows, short, or read by several tiles."""
    row = product(1, 4096, 4096)
    tiles = {"bm": 8, "bn": 32, "stages": 36}
    assert [launch(row._replace(device=name), **tiles).ahead for name in ("h100", "h200")] == [12, 8]
    pair = {"bm": 64, "bn": 64, "stages": 12, "cm": 2, "cn": 1}
    assert launch(product(128, 4096, 4096), **pair).ahead == 8
    assert launch(product(129, 4096, 4096), **pair).ahead == 0
    for other in (row._replace(k=2304), row._replace(alignments=(16, 2, 16))):
        assert launch(other, **tiles).ahead == 0
    assert launch(row._replace(b_layout="row"), bm=8, bn=32, stages=18).ahead == 0
    assert launch(row, bm=256, bn=32, stages=4).ahead == 0


def test_the_next_launch_may_begin_at_once_after_brief_products():
    for tile in ({"bm": 128, "bn": 64, "stages": 8}, {"bm": 128, "bn": 256, "stages": 4}):
        for k, name, expected in ((1024, "h200", -1), (1024, "h100", 0), (1025, "h200", 0), (2048, "h200", 0)):
            case = product(1024, 1024, k)._replace(device=name)
            assert launch(case, **tile, cm=1, cn=1).ahead == expected
        assert launch(product(8192, 8192, 1024), **tile, cm=1, cn=1).ahead == 0  # k is short, the product is not


@pytest.mark.compiler
@pytest.mark.skipif(not sass.nvdisasm(), reason=sass.MISSING)
def test_pairs_of_64_rows_ask_for_stages_without_a_loop_over_lanes():
    """ptxas loops over the lanes that may be there, each with ELECT, unless elect.sync has named the one."""
    pytest.importorskip("cuda.bindings")

    def copies(config):
        geometry = launch(product(128, 4096, 4096), **config)
        made = nvrtc.code(geometry.source, geometry.kernel, "sm_90a")
        code = [each.opcode for each in sass.instructions(sass.disassembled(made.cubin, made.entry))]
        places = [i for i, opcode in enumerate(code) if opcode.startswith("UTMALDG")]
        return len(places), code[places[0] - 4 : places[-1]].count("ELECT")

    alone = {"bm": 64, "bn": 64, "stages": 12, "cm": 1, "cn": 1}
    assert copies({**alone, "cm": 2}) == (2, 0)
    assert copies(alone) == (2, 2)
