"""How the register-tiled kernels are laid out for a problem: tiles, accesses, budgets, refusals; no GPU is needed."""

from __future__ import annotations

import itertools
import re

import pytest

from gemmery.errors import RefusedError
from gemmery.ladder.rung import find
from gemmery.ladder.simt_tiled import TILED
from gemmery.problem import Problem

PIPELINED = find(TILED, "simt_pipelined")
OPEN = PIPELINED.default
NAMES = [rung.name for rung in TILED]


def problem(m, n, k, name="f32", **options):
    return Problem(m, n, k, name, name, device=options.pop("device", "h200"), **options)


def parameters(geometry):
    """The arguments of the kernel's template and of its types, as text."""
    return re.sub(r"\w+<|>", "", geometry.kernel).split(", ")


@pytest.mark.parametrize(
    ("aligned", "sides", "expected"),
    [
        ((16, 16, 16), (128, 128, 128), ["4", "4", "4"]),
        ((8, 16, 4), (128, 128, 128), ["2", "4", "1"]),
        ((16, 16, 16), (128, 130, 66), ["2", "2", "2"]),  # A along k, B and C along n: an access ends where they do
        ((16, 16, 16), (128, 127, 65), ["1", "1", "1"]),
    ],
)
def test_an_access_is_as_wide_as_alignment_and_sides_allow(aligned, sides, expected):
    m, n, k = sides
    rung = find(TILED, "simt_vectorized")
    assert parameters(rung.geometry(problem(m, n, k, alignments=aligned), rung.default))[5:8] == expected


def test_what_is_neither_row_nor_column_is_read_by_the_element():
    rung = find(TILED, "simt_padded")
    assert parameters(rung.geometry(problem(64, 64, 64, a_layout="any", c_layout="any"), rung.default))[5:8] == [
        "1",
        "4",
        "1",
    ]


def test_what_cp_async_would_transpose_it_copies_by_the_element():
    rung = find(TILED, "simt_pipelined")
    for a, b in itertools.product(("row", "col"), repeat=2):
        asked = problem(1024, 1024, 1024, a_layout=a, b_layout=b)
        assert parameters(rung.geometry(asked, {**OPEN, "bk": 8, "stages": 3}))[5:7] == [
            "1" if a == "row" else "4",
            "1" if b == "col" else "4",
        ]
        assert parameters(rung.geometry(asked, {**OPEN, "stages": 2}))[5:7] == ["4", "4"]


def test_pieces_along_k_are_copied_and_read_as_they_lie():
    asked = problem(512, 512, 512, b_layout="col")
    pieces = PIPELINED.geometry(asked, OPEN)
    assert (pieces.source, parameters(pieces)[5:7]) == ("simt_along_k.cu", ["4", "4"])
    assert (
        PIPELINED.geometry(asked, {**OPEN, "bm": 128, "bn": 256, "wm": 32, "wn": 128, "tm": 16, "tn": 8}).source
        == "simt_pipelined.cu"
    )
    for other in (
        asked._replace(b_layout="row"),
        asked._replace(k=510),
        asked._replace(alignments=(16, 8, 16)),
        problem(512, 512, 512, "f64", b_layout="col"),
    ):
        assert PIPELINED.geometry(other, OPEN).source == "simt_pipelined.cu"


@pytest.mark.parametrize("name", ["f32", "f64"])
def test_a_small_product_takes_tiles_that_reach_every_multiprocessor(name):
    blocks = [PIPELINED.geometry(problem(n, n, n, name), OPEN).grid[0] for n in (1024, 2048, 4096)]
    assert min(blocks) >= 128
    areas = [
        c["bm"] * c["bn"] for c in (PIPELINED.resolve(problem(n, n, 512, name), OPEN) for n in (64, 256, 1024, 4096))
    ]
    assert areas == sorted(areas)
    assert areas[0] < areas[-1]


def test_what_is_given_is_kept_and_the_rest_chosen():
    config = PIPELINED.resolve(problem(4096, 4096, 4096), {**OPEN, "bk": 32, "stages": 4})
    assert (config["bk"], config["stages"]) == (32, 4)
    assert all(value for key, value in config.items() if key != "blocks")


def test_before_sm_80_and_for_halves_the_next_tile_goes_through_registers():
    assert PIPELINED.resolve(problem(512, 512, 512, device="t4"), OPEN)["stages"] == 2
    assert PIPELINED.resolve(problem(512, 512, 512, "f16"), OPEN)["stages"] == 2
    assert PIPELINED.resolve(problem(512, 512, 512, device="a100"), OPEN)["stages"] > 2
    assert PIPELINED.geometry(problem(512, 512, 512), {**OPEN, "stages": 2, "splits": 1}).needs == 70
    assert PIPELINED.geometry(problem(512, 512, 512), {**OPEN, "stages": 3, "splits": 1}).needs == 80


def test_blocks_leave_each_thread_registers_for_its_sums():
    rung = find(TILED, "simt_warptile")
    for name, expected in (("f32", "2"), ("f64", "1")):
        assert parameters(rung.geometry(problem(512, 512, 512, name), rung.default))[-1] == expected
    assert parameters(rung.geometry(problem(512, 512, 512), {**rung.default, "blocks": 1}))[-1] == "1"


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("simt_threadtile", {"bm": 96}, "bm=96.*power of two"),
        ("simt_threadtile", {"tm": 0}, "tm=0.*power of two"),
        ("simt_threadtile", {"bk": 1}, "bk=1.*2 or more"),
        ("simt_threadtile", {"tm": 256}, "tm=256.*2 or more"),
        ("simt_threadtile", {"tm": 2, "tn": 2}, "4096 threads.*32 to 1024"),
        ("simt_threadtile", {"bm": 16, "bn": 16, "tm": 4, "tn": 4}, "16 threads.*32 to 1024"),
        ("simt_padded", {"bk": 64}, r"bk=64.* 66560 bytes of shared memory.*49152.*smaller bk"),
        ("simt_warptile", {"wm": 256}, "wm=256.*divides the block's"),
        ("simt_warptile", {"wm": 32}, "wm=32.*32 threads"),
        ("simt_pipelined", {"stages": 1}, "stages=1.*2 or more"),
    ],
)
def test_a_tile_that_cannot_be_is_refused(name, config, words):
    rung = find(TILED, name)
    with pytest.raises(RefusedError, match=words):
        rung.geometry(problem(512, 512, 512), {**rung.default, **config})


def test_more_sums_than_registers_are_refused():
    rung = find(TILED, "simt_padded")
    config = {**rung.default, "tm": 16, "tn": 8}
    assert rung.geometry(problem(512, 512, 512), config).threads == 128
    with pytest.raises(RefusedError, match=r"tm=16, tn=8 in f64: 304 registers.*255"):
        rung.geometry(problem(512, 512, 512, "f64"), config)


def test_cp_async_of_halves_is_refused():
    with pytest.raises(RefusedError, match=r"stages=3 of f16.*does not widen.*stages=2"):
        PIPELINED.geometry(problem(512, 512, 512, "f16"), {**OPEN, "stages": 3})


@pytest.mark.parametrize("name", NAMES)
def test_tf32_may_be_summed_in_f32(name):
    rung = find(TILED, name)
    assert (
        rung.geometry(problem(64, 64, 64, precision="tf32"), rung.default).kernel
        == rung.geometry(problem(64, 64, 64), rung.default).kernel
    )
