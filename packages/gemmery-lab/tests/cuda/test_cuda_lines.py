"""Products whose rows straddle lines of L2, which warps bring by whole lines, on the emulator."""

from __future__ import annotations

import pytest

from checked_products import matrices, run
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find

pytest.importorskip("cuda.bindings")

TILE = {"stages": 3, "cm": 1, "cn": 1, "band": 2, "blocks": 3}
COLUMNS = ("row", "col", "row")
# Pitches of k that are 16, 32 and 64 bytes times an odd number; a line, less than a line, and rows beyond the edge.
SHAPES = [(70, 200, 200), (130, 136, 72), (9, 264, 144), (200, 72, 8), (64, 64, 160), (129, 128, 24)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bm", "bn"), [(64, 64), (128, 96), (136, 64), (80, 64)])
def test_tiles(shape, bm, bn):
    """One tile of a block after another; also of C' = B' A', of whose sides one is no multiple of 16."""
    rung = find(CUDA, "wgmma_epilogue")
    assert run(rung, *matrices(shape, "bf16", layouts=COLUMNS), config={**TILE, "bm": bm, "bn": bn})


@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("splits", [2, 4])
def test_parts_of_k(shape, splits):
    """Blocks of a cluster whose parts of k begin within a tile's lines."""
    rung, tile = find(CUDA, "wgmma_streamk"), {"bm": 64, "bn": 64, "stages": 4, "band": 2, "blocks": 0}
    assert run(rung, *matrices(shape, "bf16", layouts=COLUMNS, batch=2), config={**tile, "splits": splits})
