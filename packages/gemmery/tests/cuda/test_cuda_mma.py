"""How the kernels by mma.sync are launched: tiles by size and device, packing, refusals; no GPU is needed."""

from __future__ import annotations

import itertools
import re

import pytest

from gemmery.cuda.device import KNOWN
from gemmery.cuda.geometry import refusal
from gemmery.errors import RefusedError
from gemmery.ladder.rung import find
from gemmery.ladder.tensor import MMA
from gemmery.problem import Problem

LDMATRIX, PIPELINED = find(MMA, "mma_ldmatrix"), find(MMA, "mma_pipelined")
AMPERE_ON = [device for device in KNOWN.values() if device.capability >= 80]


def square(n, **options):
    return Problem(n, n, n, "f16", "f16", **{"device": "h200", **options})


def parameters(geometry):
    """The arguments of the template and of its types, after the types and the epilogue."""
    return re.sub(r"\w+<|>", "", geometry.kernel).split(", ")[3:]


@pytest.mark.parametrize("device", AMPERE_ON, ids=lambda device: device.name)
@pytest.mark.parametrize("n", [1, 100, 512, 1024, 2048, 4096, 8192])
def test_a_ring_fits_every_device(device, n):
    geometry = PIPELINED.geometry(square(n, device=device.name), PIPELINED.default)
    assert refusal(geometry, device) == ""
    assert int(parameters(geometry)[-1]) >= 3  # stages


def test_turing_is_refused_with_the_instruction():
    geometry = PIPELINED.geometry(square(512), PIPELINED.default)
    assert "sm_80 (mma.m16n8k16 and cp.async)" in refusal(geometry, KNOWN["t4"])


@pytest.mark.parametrize(("n", "tile"), [(512, (64, 32)), (1024, (64, 128)), (2048, (256, 128)), (8192, (256, 128))])
def test_the_tile_follows_the_size(n, tile):
    config = PIPELINED.resolve(square(n), PIPELINED.default)
    assert (config["bm"], config["bn"]) == tile


def test_a_small_shared_memory_halves_the_rows():
    config = PIPELINED.resolve(square(4096, device="rtx4090"), PIPELINED.default)
    assert (config["bm"], config["bn"], config["bk"], config["stages"]) == (128, 256, 32, 4)


def test_what_a_config_says_is_kept():
    config = PIPELINED.resolve(square(2048), {**PIPELINED.default, "bn": 256, "stages": 3})
    assert (config["bn"], config["stages"]) == (256, 3)
    given = {"bm": 128, "bn": 128, "bk": 32, "wm": 64, "wn": 32, "stages": 5, "splits": 1}
    assert PIPELINED.resolve(square(64), given) == given
    assert PIPELINED.geometry(square(64), given).shared == 5 * (128 + 128) * 32 * 2


def test_aligned_operands_are_not_packed():
    for a_layout, b_layout in itertools.product(("row", "col"), repeat=2):
        for alignment in (4, 8, 16):
            problem = square(40, a_layout=a_layout, b_layout=b_layout, alignments=(alignment,) * 3)
            geometry = PIPELINED.geometry(problem, PIPELINED.default)
            assert geometry.before == ()
            assert geometry.workspace == 0


@pytest.mark.parametrize(
    ("m", "n", "k", "options", "rows", "packed"),
    [
        (33, 16, 50, {"alignments": (2, 16, 16)}, 33 * 56, 1),  # A: m rows of k
        (33, 17, 48, {"alignments": (16, 2, 16)}, 48 * 24, 2),  # B: k rows of n
        (33, 17, 50, {"alignments": (2, 2, 2)}, 33 * 56 + 50 * 24, 3),
        (33, 16, 50, {"a_layout": "any"}, 33 * 56, 1),
        (33, 16, 50, {"a_layout": "col", "alignments": (2, 16, 16)}, 50 * 40, 1),  # k rows of m
        (33, 17, 48, {"b_layout": "col", "alignments": (16, 2, 16)}, 17 * 48, 2),  # n rows of k
        (33, 40, 65, {}, 33 * 72, 1),  # aligned rows, the last 16 bytes of which are not all the matrix's
        (40, 33, 64, {}, 64 * 40, 2),
        (33, 40, 64, {"a_layout": "col"}, 64 * 40, 1),
        (40, 33, 50, {"a_layout": "col", "b_layout": "col"}, 33 * 56, 2),
    ],
)
def test_scratch_memory_holds_rows_of_whole_16_bytes(m, n, k, options, rows, packed):
    problem = Problem(m, n, k, "f16", "f32", batch=3, device="h200", **options)
    geometry = PIPELINED.geometry(problem, PIPELINED.default)
    assert geometry.workspace == 3 * rows * 2
    (before,) = geometry.before
    assert before.kernel.endswith(f", {packed}>")
    assert before.grid[0] % 3 == 0
    assert parameters(geometry)[5] == str(packed)


def test_nothing_is_packed_of_an_empty_sum():
    geometry = PIPELINED.geometry(
        Problem(5, 5, 0, "f16", "f16", device="h200", alignments=(2, 2, 2)), PIPELINED.default
    )
    assert geometry.before == ()
    assert geometry.workspace == 0


@pytest.mark.parametrize(
    ("m", "n", "k", "layouts", "ragged"),
    [
        (33, 40, 64, ("row", "row"), False),  # A runs along k, B along n
        (40, 33, 64, ("row", "row"), True),
        (40, 40, 65, ("row", "row"), True),
        (40, 40, 65, ("col", "row"), False),
        (33, 40, 64, ("col", "row"), True),
        (40, 33, 64, ("row", "col"), False),
    ],
)
def test_pieces_are_cut_where_a_row_ends_within_16_bytes(m, n, k, layouts, ragged):
    problem = Problem(m, n, k, "bf16", "bf16", a_layout=layouts[0], b_layout=layouts[1], device="h200")
    assert parameters(LDMATRIX.geometry(problem, LDMATRIX.default))[5] == str(int(ragged))
    assert bool(PIPELINED.geometry(problem, PIPELINED.default).before) == ragged


@pytest.mark.parametrize(
    ("n", "c_layout", "elements"), [(40, "row", 8), (36, "row", 4), (35, "row", 1), (40, "any", 1)]
)
def test_an_access_to_c_divides_its_rows(n, c_layout, elements):
    problem = Problem(8, n, 8, "f16", "f16", c_layout=c_layout, device="h200")
    assert parameters(PIPELINED.geometry(problem, PIPELINED.default))[4] == str(elements)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bm": 96}, "bm=96: a side of a swizzled tile is a power of two"),
        ({"wn": 8}, "wn=8: a side of a swizzled tile is a power of two, at least 16"),
        ({"bm": 64, "wm": 128}, "bm=64, .*wm=128.*warps of it at most its size"),
        ({"bk": 16}, "bk=16.* two groups of 16"),
        ({"stages": 1}, "stages=1: a ring has 2 to 8 tiles"),
        ({"stages": 9}, "stages=9: a ring has 2 to 8 tiles"),
        ({"splits": 17}, "splits=17: k is split into 1 to 16 parts"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(config, words):
    with pytest.raises(RefusedError, match=words):
        PIPELINED.geometry(square(2048), {**PIPELINED.default, **config})


def test_f32_needs_leave_to_lose_bits():
    problem = Problem(64, 64, 64, "f32", "f32", device="h200")
    assert "precision='tf32'" in PIPELINED.refuses(problem)
    assert PIPELINED.refuses(Problem(64, 64, 64, "f32", "f32", device="h200", precision="tf32")) == ""
    assert "not f64" in PIPELINED.refuses(Problem(64, 64, 64, "f16", "f64", device="h200"))


def test_a_deep_product_is_split_and_added_up():
    problem = Problem(256, 200, 16384, "f16", "f16", batch=2, device="h200", epilogue="relu")
    splits = PIPELINED.resolve(problem, PIPELINED.default)["splits"]
    assert splits > 1
    geometry = PIPELINED.geometry(problem, PIPELINED.default)
    assert geometry.kernel == f"mma_pipelined_finish<f16, f16, 4, ROW, ROW, 0, {splits}>"
    assert geometry.workspace == 2 * 256 * 200 * splits * 4
    (parts,) = geometry.before
    assert parts.kernel.startswith("mma_pipelined<f16, f16, 0, ")  # the epilogue waits for the whole sum
    whole = PIPELINED.geometry(problem, {**PIPELINED.resolve(problem, PIPELINED.default), "splits": 1})
    assert parts.grid[0] == splits * whole.grid[0]


def test_a_split_product_is_packed_first():
    problem = Problem(40, 24, 4096, "f16", "f32", device="h200", alignments=(2, 16, 16))
    geometry = PIPELINED.geometry(problem, {**PIPELINED.default, "splits": 4})
    assert [one.kernel.partition("<")[0] for one in geometry.before] == ["mma_pipelined_pack", "mma_pipelined"]
    assert geometry.workspace == 40 * 4096 * 2 + 4 * 40 * 24 * 4
