"""How the kernels on tensor cores are launched: no GPU is needed to ask."""

from __future__ import annotations

import itertools
import re

import pytest

from gemmery.cuda.device import KNOWN
from gemmery.cuda.geometry import refusal
from gemmery.errors import RefusedError
from gemmery.ladder.rung import find
from gemmery.ladder.tensor import TENSOR
from gemmery.problem import Problem

MMA, WMMA = find(TENSOR, "mma_f64"), find(TENSOR, "wmma_f64")
SQUARE = Problem(512, 512, 512, "f64", "f64", device="h200")


def parameters(geometry):
    """The arguments of the kernel's template and of its types."""
    return re.sub(r"\w+<|>", "", geometry.kernel).split(", ")


@pytest.mark.parametrize(("device", "wide"), [("a100", "0"), ("rtx4090", "0"), ("h200", "1"), ("b200", "1")])
def test_the_wide_instruction_is_used_where_it_exists(device, wide):
    problem = Problem(512, 512, 512, "f64", "f64", device=device)
    assert parameters(MMA.geometry(problem, MMA.default))[-1] == wide


@pytest.mark.parametrize("name", ["rtx3090", "rtx4090", "a100", "h200", "b200", "rtx5090"])
@pytest.mark.parametrize("rung", TENSOR, ids=lambda rung: rung.name)
def test_the_default_fits_every_device_with_the_instructions(rung, name):
    for dtype, precision in (("f64", ""), ("bf16", ""), ("f32", "tf32")):
        if dtype in rung.dtypes:
            problem = Problem(512, 512, 512, dtype, dtype, precision=precision, device=name)
            assert refusal(rung.geometry(problem, rung.default), KNOWN[name]) == ""


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"stages": 1}, "stages=1"),
        ({"bn": 96}, "bn=96"),
        ({"bm": 160}, "bm=160"),
        ({"bm": 96, "wm": 64}, "wm=64"),
        ({"wn": 4}, "wn=4"),
        ({"bk": 8}, "bk=8"),
        ({"wm": 256}, "wm=256"),
        ({"bm": 256, "bn": 256, "wm": 16, "wn": 16}, "8192 threads"),
        ({"bm": 128, "bn": 32, "wm": 16, "wn": 16, "blocks": 4}, "blocks=4 of 512 threads: 32 registers"),
    ],
)
def test_a_config_without_sense_is_refused_with_its_value(config, word):
    with pytest.raises(RefusedError, match=word):
        MMA.geometry(SQUARE, {**MMA.default, **config})


@pytest.mark.parametrize(
    ("a", "b", "tile"), [("row", "col", (96, 96)), ("row", "row", (96, 64)), ("col", "row", (64, 64))]
)
def test_sides_of_three_powers_of_two_are_those_along_which_k_is_adjacent(a, b, tile):
    problem = Problem(1536, 1536, 1536, "f64", "f64", a_layout=a, b_layout=b, device="h200")
    assert MMA.geometry(problem, MMA.default).tile == tile
    assert MMA.geometry(problem, {**MMA.default, "bm": 64}).tile[0] == 64


def test_an_access_never_crosses_an_edge():
    for m, n, k in itertools.product((8, 9, 10), repeat=3):
        for a_layout, b_layout in itertools.product(("row", "col", "any"), repeat=2):
            problem = Problem(m, n, k, "f64", "f64", a_layout=a_layout, b_layout=b_layout, device="h200")
            widths = [int(width) for width in parameters(MMA.geometry(problem, MMA.default))[5:8]]
            along = {"row": k, "col": m, "any": 1}[a_layout], {"row": n, "col": k, "any": 1}[b_layout], n
            assert widths == [2 if side % 2 == 0 else 1 for side in along]


def test_what_has_no_adjacent_neighbors_is_kept_along_k():
    """A tile is padded along its rows: the bytes depend on which they are."""
    config = {**WMMA.default, "bm": 128, "bn": 32}

    def shared(a_layout, b_layout):
        problem = Problem(512, 512, 512, "f64", "f64", a_layout=a_layout, b_layout=b_layout, device="h200")
        return WMMA.geometry(problem, config).shared

    assert shared("any", "any") == shared("row", "col") == 2 * 8 * (128 + 32) * (config["bk"] + 4)
    assert shared("col", "row") == 2 * 8 * config["bk"] * (128 + 4 + 32 + 4)


def test_tensor_cores_round_f32_only_where_that_is_allowed():
    halves = find(TENSOR, "wmma_f16")
    exact = Problem(512, 512, 512, "f32", "f32", device="h200")
    assert "tf32" in halves.refuses(exact)
    assert halves.refuses(Problem(512, 512, 512, "f32", "f32", precision="tf32", device="h200")) == ""
    assert "f64" in halves.refuses(Problem(512, 512, 512, "f16", "f64", device="h200"))
