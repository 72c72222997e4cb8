"""The rungs whose images serve every product of their element types: layouts and edges are values, not instances.

An image serves all shapes, strides, alignments, batches, alpha, beta and biases; an activation has an image of its own.
Those for batches of small products have sides that are constants of an instance; a block has many products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemmery import dtypes
from gemmery.cuda.choose import complete
from gemmery.cuda.choose.cost import batch_products, batch_tile, quickest
from gemmery.cuda.choose.data import MMA_GENERAL, SIMT_GENERAL, Tiling
from gemmery.cuda.device import THREADS, WARP
from gemmery.cuda.geometry import Geometry, instance, layouts, target, template, whole_pieces
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
    return problem._replace(epilogue=problem.activation, scaled=False, precision="")


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
            "predicate per ldmatrix, a size per cp.async. One image is there for every shape, and the specialized one "
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


_MOST = 32  # rows and columns of a matrix
_PIECE = 16  # bytes
_PADDED, _PADDED_MMA = 64, 32  # bytes of a line from which there are pieces between two


def _refuses(problem: Problem) -> str:
    """Refuse large sides, and products without elements."""
    sides = problem.m, problem.n, problem.k
    if max(sides) > _MOST or min(sides) < 1:
        return f"m, n, k = {sides}: it multiplies matrices with sides of 1 to {_MOST}"
    return ""


def _refuses_mma(problem: Problem) -> str:
    """Refuse what tensor cores would round, and sides that are not whole fragments."""
    if any(side % 16 for side in (problem.m, problem.n, problem.k)):
        return f"m, n, k = {problem.m}, {problem.n}, {problem.k}: fragments are 16 x 16; use simt_batched"
    return (off_tensor_cores(problem) if problem.dtype != "f64" else "") or _refuses(problem)


def _simt_batch(name: str, problem: Problem, config: Config) -> Geometry:
    """A thread for tm x tn elements of a product, and a block for `products` of them."""
    products, tm, tn = config["products"], config["tm"], config["tn"]
    if problem.m % tm or problem.n % tn:
        raise RefusedError(f"tm={tm}, tn={tn} of C {problem.m} x {problem.n}: a thread's tile divides C; change either")
    threads = -(-products * (problem.m // tm) * (problem.n // tn) // WARP) * WARP
    if threads > THREADS:
        raise RefusedError(f"products={products}: {threads} threads; a block has at most {THREADS}; use fewer products")
    return _batched(name, problem._replace(precision=""), config, threads, (_PADDED, _PIECE), tm, tn)


def _mma_batch(name: str, problem: Problem, config: Config) -> Geometry:
    """A warp for each product."""
    pad = 2 * _PIECE if problem.dtype == "f64" else _PIECE
    return _batched(name, problem, config, config["products"] * WARP, (_PADDED_MMA, pad))


def _batched(name: str, problem: Problem, config: Config, threads: int, apart: tuple[int, int], *tile: int) -> Geometry:
    """The launch of a kernel with a block for `products` products; `apart` are the bytes from which a line gets pieces
    behind it, and those of the pieces.
    """
    m, n, k, products = problem.m, problem.n, problem.k, config["products"]
    size, out = dtypes.get(problem.dtype).size, dtypes.get(problem.out).size
    lines = (
        (k, m, size) if problem.a_layout == "col" else (m, k, size),
        (n, k, size) if problem.b_layout == "col" else (k, n, size),
        (m, n, out),
    )
    room = sum(-(-products * _step(*each, *apart) // _PIECE) * _PIECE for each in lines)
    kernel = instance(name, problem, *layouts(problem), template("BatchSides", m, n, k), *tile, products)
    grid = -(-problem.batch // products), 1, 1
    return Geometry(
        f"{name}.cu",
        kernel,
        grid,
        (threads, 1, 1),
        room,
        needs=80,
        instructions="cp.async",
        tile=(m, n),
        overlaps=bool(config["overlap"]) and problem.device != "cpu" and target(problem).capability >= 90,
    )


def _step(lines: int, length: int, size: int, padded: int, pad: int) -> int:
    """Return the bytes from one matrix to the next in shared memory: STEP of BatchLines in batched.cuh."""
    line = length * size
    pitch = line + pad if line >= padded and line % (2 * _PIECE) == 0 else line
    room = lines * pitch
    return room if room % (2 * _PIECE) else room + _PIECE


def _resolve_batch(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced."""
    products, tm, tn = batch_tile(problem, target(problem).sms)
    return complete(config, {"products": products, "tm": tm, "tn": tn})


_OVERLAP = {"overlap": (0, 1)}
_EXPECT = {
    "local_requests": 0,
    "load_sectors_a_request": 16,
    "load_bytes_a_sector": 32,
    "store_sectors_a_request": 16,
    "store_bytes_a_sector": 32,
}
_SIDES = (1, 2, 3, 4, 5, 6, 7, 8)
BATCHED = (
    gpu_rung(
        "simt_batched",
        idea="a block streams many small products: vectors cross the borders of matrices, sides are constants",
        parent="simt_smem",
        refuses=_refuses,
        geometry=_simt_batch,
        resolve=_resolve_batch,
        expect=_EXPECT,
        space={"products": (0, 1, 2, 4, 8, 16, 32, 64, 128, 256), "tm": (0, *_SIDES), "tn": (0, *_SIDES), **_OVERLAP},
        default={"products": 0, "tm": 0, "tn": 0, "overlap": 1},
        lesson=(
            "With a block for each product the time is that of starting blocks: 200,000 take 122 us, whatever their "
            "size. The matrices of a batch that follow each other are one array, so a block reads those of many "
            "products as vectors, whole lines at a time, and what one product needs is put apart in shared memory. "
            "Sides that are constants leave no loop and no test around the few multiply-adds."
        ),
    ),
    gpu_rung(
        "mma_batched",
        idea="a warp multiplies a whole small product, from a block's part of the batch in shared memory",
        parent="simt_batched",
        dtypes=("f16", "bf16", "f64"),
        refuses=_refuses_mma,
        bound=cut_off,
        bounds={"f64": float},
        geometry=_mma_batch,
        resolve=lambda p, config: complete(config, {"products": batch_products(p, target(p).sms, WARP)}),
        expect=_EXPECT,
        space={"products": (0, 1, 2, 4, 8, 16), **_OVERLAP},
        default={"products": 0, "overlap": 1},
        lesson=(
            "At 16 x 16 a product of half precision has 16 multiply-adds for each 3 bytes that memory moves; CUDA "
            "cores would also convert each element as often as it is read. Tensor cores do both in a few "
            "instructions of a warp, which then only waits for its part of the batch."
        ),
    ),
)
