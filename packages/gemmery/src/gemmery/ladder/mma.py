"""The rungs on tensor cores by mma.sync and ldmatrix, in half precision and tf32."""

from __future__ import annotations

from dataclasses import replace

from gemmery import dtypes
from gemmery.cuda.choose import complete
from gemmery.cuda.choose.cost import quickest_split
from gemmery.cuda.choose.data import MMA_PIPELINED, MMA_SPLITS
from gemmery.cuda.device import WARP
from gemmery.cuda.geometry import (
    Geometry,
    access,
    accesses,
    contiguous,
    instance,
    layouts,
    target,
    template,
    tiles,
    vector,
)
from gemmery.errors import RefusedError
from gemmery.ladder.gpu import tensor_rung
from gemmery.problem import Config, Problem

_WIDE = {
    "bank_conflicts": 0,
    "divergent_branches": 0,
    "local_requests": 0,
    "load_sectors_a_request": 16,
    "load_bytes_a_sector": 32,
}
_SPACE = {"bm": (64, 128, 256), "bn": (32, 64, 128, 256), "bk": (32, 64), "wm": (32, 64), "wn": (16, 32, 64)}

_SIDES = ("bm", "bn", "bk", "wm", "wn")
_ROW = 128  # bytes of k per tile
_STAGES = 4
_MOST_SPLITS = MMA_SPLITS[-1]

_FINISH_THREADS = 256
_PACK_THREADS, _PACK_ROWS, _PACK_BYTES = 256, 32, 512  # a block of the packing launch: threads, and its copy


def _ldmatrix(name: str, problem: Problem, config: Config) -> Geometry:
    """One tile of A and of B at a time."""
    widths = vector(problem, 0), vector(problem, 1)
    return _by_warps(name, problem, config, widths, any(_ragged(problem, widths)), stages=1)


def _pipelined(name: str, problem: Problem, config: Config) -> Geometry:
    """A ring of `stages` tiles of A and of B, after a launch that packs operands that cp.async cannot copy.

    With `splits` above 1, each block sums over a part of k, and a last launch adds up the parts.
    """
    stages, splits = config["stages"], config["splits"]
    if not 2 <= stages <= 8:
        raise RefusedError(f"stages={stages}: a ring has 2 to 8 tiles; 3 or 4 hide the latency of memory")
    if not 1 <= splits <= _MOST_SPLITS:
        raise RefusedError(f"splits={splits}: k is split into 1 to {_MOST_SPLITS} parts")
    size = dtypes.get(problem.dtype).size
    widths = vector(problem, 0), vector(problem, 1)
    packed = [width * size < 4 or cut for width, cut in zip(widths, _ragged(problem, widths), strict=True)]
    widths = (16 // size if packed[0] else widths[0], 16 // size if packed[1] else widths[1])
    bits = packed[0] + 2 * packed[1]
    summed = problem._replace(epilogue="", scaled=False) if splits > 1 else problem
    product = _by_warps(name, summed, config, widths, bits, splits, stages=stages)
    if bits and problem.k:
        product = _with_packing(name, product, problem, bits)
    return _with_finish(name, product, problem, bits, splits) if splits > 1 else product


def _resolve(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced: by the tile with which the product takes least time.

    A multiprocessor computes its share of the tiles one after the other, each in proportion to its area.

    >>> _resolve(Problem(1024, 1024, 1024, "f16", "f16"), MMA[1].default)
    {'bm': 64, 'bn': 128, 'bk': 64, 'wm': 32, 'wn': 64, 'stages': 4, 'splits': 1}
    """
    if all(config.values()):
        return config
    device, size = target(problem), dtypes.get(problem.dtype).size
    tile, splits = quickest_split(MMA_PIPELINED, MMA_SPLITS, problem, device.sms)
    bm, bn, row, most = tile.bm, tile.bn, _ROW, device.limits.shared
    if 3 * (bm + bn) * row > most:
        row //= 2
        bm, bn = min(bm, bn), max(bm, bn)  # 470 TFLOP/s, where 256 half rows of A by 128 columns reach 397
    stages = min(_STAGES, most // ((bm + bn) * row))
    sides = {"bm": bm, "bn": bn, "bk": row // size, "wm": tile.wm, "wn": tile.wn}
    return complete(config, {**sides, "stages": stages, "splits": splits})


def _by_warps(
    name: str, problem: Problem, config: Config, widths: tuple[int, int], *options: int, stages: int
) -> Geometry:
    """A block of bm x bn, a warp per wm x wn of it, and `stages` tiles of both operands in shared memory."""
    bm, bn, bk, wm, wn = sides = tuple(config[key] for key in _SIDES)
    size = dtypes.get(problem.dtype).size
    _check_tile(bm, bn, bk, wm, wn, 32 // size)
    threads = (bm // wm) * (bn // wn) * WARP
    parameters = *options, template("WarpTiles", *sides), *((stages,) if stages > 1 else ())
    return Geometry(
        f"{name}.cu",
        instance(name, problem, access(problem, (*widths, accesses(problem)[2])), *parameters),
        tiles(problem, bm, bn),
        (threads, 1, 1),
        shared=stages * (bm + bn) * bk * size,
        needs=80,
        instructions="mma.m16n8k16 and cp.async",
        tile=(bm, bn),
    )


def _with_packing(name: str, product: Geometry, problem: Problem, packed: int) -> Geometry:
    """The product after a launch that copies A (bit 0 of `packed`) and B (bit 1) to rows of whole 16 bytes."""
    size = dtypes.get(problem.dtype).size
    a = (problem.k, problem.m) if problem.a_layout == "col" else (problem.m, problem.k)  # rows, elements per row
    b = (problem.n, problem.k) if problem.b_layout == "col" else (problem.k, problem.n)
    operands = [operand for bit, operand in enumerate((a, b)) if packed >> bit & 1]
    blocks = sum(-(-rows // _PACK_ROWS) * -(-columns * size // _PACK_BYTES) for rows, columns in operands)
    plain = problem._replace(epilogue="", scaled=False)
    kernel = instance(f"{name}_pack", plain, *layouts(problem), packed)
    copy = Geometry(f"{name}.cu", kernel, (problem.batch * blocks, 1, 1), (_PACK_THREADS, 1, 1), needs=80)
    scratch = problem.batch * sum(rows * -(-columns * size // 16) * 16 for rows, columns in operands)
    return replace(product, before=(copy,), workspace=scratch)


def _with_finish(name: str, product: Geometry, problem: Problem, packed: int, splits: int) -> Geometry:
    """The launch that adds up the parts of k, after those that compute them."""
    parts = replace(product, before=(), grid=(product.grid[0] * splits, 1, 1), workspace=0)
    blocks = problem.batch * problem.m * -(-problem.n // _FINISH_THREADS)
    return Geometry(
        f"{name}.cu",
        instance(f"{name}_finish", problem, *layouts(problem), packed, splits),
        (blocks, 1, 1),
        (_FINISH_THREADS, 1, 1),
        workspace=product.workspace + 4 * splits * problem.batch * problem.m * problem.n,
        before=(*product.before, parts),
        needs=product.needs,
        instructions=product.instructions,
    )


def _ragged(problem: Problem, widths: tuple[int, int]) -> tuple[bool, bool]:
    """Return whether an access to A, and to B, may begin inside and end outside the matrix."""
    a, b, _ = contiguous(problem)
    return a % widths[0] != 0, b % widths[1] != 0


def _check_tile(bm: int, bn: int, bk: int, wm: int, wn: int, group: int) -> None:
    sides = {"bm": bm, "bn": bn, "bk": bk, "wm": wm, "wn": wn}
    for key, side in sides.items():
        if side < 16 or side & (side - 1):
            raise RefusedError(f"{key}={side}: a side of a swizzled tile is a power of two, at least 16")
    if bm < 32 or bn < 32 or bk < 2 * group or wm > bm or wn > bn:
        text = ", ".join(f"{key}={side}" for key, side in sides.items())
        raise RefusedError(
            f"{text}: a block has at least 32 x 32, warps of it at most its size, and bk two groups of {group}"
        )


MMA = (
    tensor_rung(
        "mma_ldmatrix",
        idea="mma.sync and ldmatrix on tiles whose 16-byte chunks are swizzled by XOR",
        parent="wmma_f16",
        geometry=_ldmatrix,
        space=_SPACE,
        default={"bm": 128, "bn": 128, "bk": 64, "wm": 64, "wn": 64},
        expect={**_WIDE, "store_sectors_a_request": 16, "store_bytes_a_sector": 32},
        lesson=(
            "ldmatrix gives a warp four 8 x 8 matrices, each from eight rows of 16 bytes at addresses the warp "
            "chooses. Rows 128 bytes apart would use the same banks eight times over; storing chunk c of row r at c ^ "
            "r % 8 spreads them, and the stores into the tile are free of conflicts too. But loading a tile, waiting "
            "for it and multiplying it still happen one after the other."
        ),
    ),
    tensor_rung(
        "mma_pipelined",
        idea="a ring of tiles filled by cp.async, and fragments read one group of k ahead",
        parent="mma_ldmatrix",
        geometry=_pipelined,
        resolve=_resolve,
        space={
            **{key: (0, *values) for key, values in _SPACE.items()},
            "stages": (0, 2, 3, 4, 5, 6),
            "splits": (0, 1, 2, 4),
        },
        expect=_WIDE,
        lesson=(
            "Three copies are in flight while a fourth tile is multiplied, and the fragments of the next 32 bytes of k "
            "are read while the current ones are used, so the tensor cores rarely wait. The remaining limit is the "
            "rate of mma.sync, about two thirds of wgmma's on Hopper. Operands whose rows are not aligned to 16 bytes "
            "are packed first: one pass over them costs little next to the product."
        ),
    ),
)
