"""The rungs whose images serve every product of their element types: layouts and edges are values, not instances.

An image serves all shapes, strides, alignments, batches, alpha, beta and biases; an activation has an image of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemmery import dtypes
from gemmery.cuda.choose import complete
from gemmery.cuda.choose.cost import quickest
from gemmery.cuda.choose.data import MMA_GENERAL, SIMT_GENERAL, Tiling
from gemmery.cuda.device import WARP
from gemmery.cuda.geometry import Geometry, target, template, whole_pieces
from gemmery.errors import RefusedError
from gemmery.ladder.gpu import cut_off, gpu_rung, of_tiles, off_tensor_cores
from gemmery.problem import Config, Problem

_ROW = 128  # bytes of k in a tile of mma
_PAD, _PAD_MMA = 4, 8  # elements after each row of the sums in shared memory


def _mma(name: str, problem: Problem, config: Config) -> Geometry:
    """Tensor cores, from a ring of tiles of 64 of k."""
    tile, smallest = _known(MMA_GENERAL, config["tile"]), MMA_GENERAL[0]
    side, small = tile.bm, tile is smallest
    if not small and not whole_pieces(problem):
        raise RefusedError(
            f"tile={side} of alignments {problem.alignments[:2]}: its copies are 16 bytes wide; use tile={smallest.bm}"
        )
    tiling = template("WarpTiles", side, side, 64, tile.wm, tile.wn)
    threads = side * side // (tile.wm * tile.wn) * WARP
    shared = max(tile.stages * 2 * side * _ROW, side * (side + _PAD_MMA) * 4)
    fields: dict[str, Any] = {"shared": shared, "needs": 80, "instructions": "mma.m16n8k16 and cp.async"}
    return of_tiles(name, _of_activation(problem), (side, side), threads, tiling, tile.stages, small, **fields)


def on_cuda_cores(problem: Problem, name: str = "") -> Geometry:
    """Return the launch of the rung on CUDA cores, or of a kernel of its kind, in the tile that takes least time."""
    return _simt(name or GENERAL[1].name, problem, _resolve(problem, {"tile": 0}))


def _simt(name: str, problem: Problem, config: Config) -> Geometry:
    """CUDA cores, from a ring of tiles copied element by element."""
    size = dtypes.get(problem.dtype).size
    tile = _known(SIMT_GENERAL, config["tile"])
    side, bk = tile.bm, tile.bk
    if size == 8 and tile is not SIMT_GENERAL[0]:
        raise RefusedError(
            f"tile={side} of {problem.dtype}: its sums take too many registers; use tile={SIMT_GENERAL[0].bm}"
        )
    tiling = template("ThreadTiles", side, side, bk, tile.tm, tile.tn)
    threads, parameters = side * side // (tile.tm * tile.tn), (tiling, tile.wm, tile.wn, tile.stages)
    shared = max(tile.stages * bk * 2 * (side + _PAD) * size, side * (side + _PAD) * size)
    fields: dict[str, Any] = {"shared": shared, "needs": 80, "instructions": "cp.async"}
    return of_tiles(name, _of_activation(problem), (side, side), threads, *parameters, **fields)


def _resolve(problem: Problem, config: Config) -> Config:
    """Return the config with a tile of 0 replaced by that which should take least time."""
    size = dtypes.get(problem.dtype).size
    tilings, every = (MMA_GENERAL, whole_pieces(problem)) if size == 2 else (SIMT_GENERAL, size == 4)
    tile = quickest(tilings if every else tilings[:1], problem.m, problem.n, problem.batch, target(problem).sms)
    return complete(config, {"tile": tile.bm})


def _known(tilings: Sequence[Tiling], side: int) -> Tiling:
    """Return the tiling with tiles of this side."""
    for tile in tilings:
        if tile.bm == side:
            return tile
    known = ", ".join(str(tile.bm) for tile in tilings)
    raise RefusedError(f"tile={side}: its images have tiles of {known}; use one of them, or 0")


def _of_activation(problem: Problem) -> Problem:
    """Return the problem for the name of an instance: alpha, beta and a bias are values."""
    parts = [part for part in problem.epilogue.split("+") if part not in ("", "bias")]
    return problem._replace(epilogue="+".join(parts), scaled=False, precision="")


GENERAL = (
    gpu_rung(
        "mma_general",
        idea="one image for all shapes and layouts: a block reads them before its loop",
        parent="mma_pipelined",
        dtypes=("f16", "bf16"),
        refuses=off_tensor_cores,
        bound=cut_off,
        geometry=_mma,
        resolve=_resolve,
        space={"tile": (0, *(tile.bm for tile in MMA_GENERAL))},
        expect={"divergent_branches": 0, "local_requests": 0},
        lesson=(
            "The parent is compiled for each combination of layouts, alignments and tiles: 28 instances for 150 random "
            "shapes, 0.2 s each. Most of what they fix is uniform for a whole block and costs little as a value: a "
            "predicate per ldmatrix, a size per cp.async. One image is there for every shape, and the specialised one "
            "can be compiled while it already works."
        ),
    ),
    gpu_rung(
        "simt_general",
        idea="one image for all shapes and layouts: single elements by cp.async, wherever they are",
        parent="simt_pipelined",
        dtypes=("f32", "f64", "int32", "uint32", "int64", "uint64", "complex64"),
        refuses=lambda p: "" if p.out == p.dtype else f"it does not widen {p.dtype} to {p.out}",
        geometry=_simt,
        resolve=_resolve,
        space={"tile": (0, *(tile.bm for tile in SIMT_GENERAL))},
        expect={"divergent_branches": 0, "local_requests": 0},
        lesson=(
            "cp.async copies as little as four bytes, so a tile can be transposed on its way into shared memory and no "
            "layout needs code of its own. It takes more instructions than copies of 16 bytes, but few next to the "
            "multiply-adds of a tile."
        ),
    ),
)
