"""float64 on tensor cores by tiles whose sides are no powers of two; no GPU is needed."""

from __future__ import annotations

import pytest

from checked_products import matrices, run
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find

pytest.importorskip("cuda.bindings")

MMA_F64 = find(CUDA, "mma_f64")
SQUARE = {"bm": 96, "bn": 96, "bk": 16, "wm": 48, "wn": 24, "stages": 4, "blocks": 1}
TALL = {"bm": 96, "bn": 64, "bk": 16, "wm": 48, "wn": 32, "stages": 3, "blocks": 2}


@pytest.mark.parametrize(
    ("tile", "layouts"), [(SQUARE, ("row", "col", "row")), (TALL, ("row", "row", "row")), (TALL, ("row", "col", "col"))]
)
@pytest.mark.parametrize("shape", [(97, 100, 37), (96, 192, 32)])
def test_sides_of_three_times_a_power_are_right_and_write_nothing_else(shape, tile, layouts):
    assert run(MMA_F64, *matrices(shape, "f64", layouts=layouts), config=tile)
