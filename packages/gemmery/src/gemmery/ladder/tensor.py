"""The rungs on tensor cores by wmma and by mma.sync."""

from __future__ import annotations

from dataclasses import replace

from gemmery import dtypes
from gemmery.cuda.choose import complete
from gemmery.cuda.choose.cost import quickest, quickest_split
from gemmery.cuda.choose.data import MMA_F64, MMA_PIPELINED, MMA_SPLITS, Tiling
from gemmery.cuda.device import REGISTERS, THREADS, WARP
from gemmery.cuda.geometry import Geometry, access, accesses, contiguous, instance, layouts, target, template, vector
from gemmery.errors import RefusedError
from gemmery.ladder.gpu import gpu_rung, of_tiles, tensor_rung
from gemmery.problem import Config, Problem

_KEYS = ("bm", "bn", "bk", "wm", "wn")
_LEAST_REGISTERS = 64  # per thread that multiplies in f64
_SPACE = {
    "bm": (32, 64, 128, 256),
    "bn": (32, 64, 128, 256),
    "bk": (16, 32, 64),
    "wm": (16, 32, 64),
    "wn": (16, 32, 64),
    "blocks": (1, 2, 3, 4),
}
_RING = {key: (0, *values) for key, values in {**_SPACE, "stages": (2, 3, 4, 5)}.items()}  # 0: chosen by the rung
_RING |= {"bm": (0, 32, 64, 96, 128, 256), "bn": (0, 32, 64, 96, 128, 256)}
_RING |= {"wm": (0, 16, 32, 48, 64), "wn": (0, 16, 24, 32, 48, 64)}

_WIDE = {"divergent_branches": 0, "local_requests": 0, "load_sectors_a_request": 16, "load_bytes_a_sector": 32}
_STORES = {"store_sectors_a_request": 16, "store_bytes_a_sector": 32}


def _mma_f64(name: str, problem: Problem, config: Config) -> Geometry:
    """A ring of `stages` tiles, and the widest instruction of the device."""
    tile, stages = tuple(config[key] for key in _KEYS), config["stages"]
    (bm, bn, bk, *_), threads = tile, _threads(config, 16, 8, 16, _triples(problem))
    if stages < 2:
        raise RefusedError(f"stages={stages}: one tile is read while another is filled; use 2 or more")
    if (registers := REGISTERS // (threads * config["blocks"])) < _LEAST_REGISTERS:
        raise RefusedError(
            f"blocks={config['blocks']} of {threads} threads: {registers} registers are left for each, and mma in f64 "
            f"takes {_LEAST_REGISTERS} at least; use fewer blocks or larger tiles of a warp"
        )
    wide = target(problem).capability >= 90
    parameters = access(problem), template("WarpTiles", *tile), stages, config["blocks"], wide
    shared, instructions = stages * (bm + bn) * bk * 8, "mma.sync in f64 and cp.async"
    return of_tiles(name, problem, (bm, bn), threads, *parameters, shared=shared, needs=80, instructions=instructions)


def _resolve_f64(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced: by the tile that should take least time."""
    # Of a short k, 3 blocks of a smaller tile fill their rings while others multiply: 2000 of 128 x 128 x 128 take
    # 221 us, by the largest 257.
    tilings, triples = MMA_F64[3 * (problem.k <= 128) :], _triples(problem)

    def suits(tile: Tiling) -> bool:
        sides = {key: getattr(tile, key) for key in ("bm", "bn", "wm", "wn")}
        return all((side % 3 or key in triples) and config[key] in (0, side) for key, side in sides.items())

    fits = [tile for tile in tilings if suits(tile)] or [tile for tile in MMA_F64 if tile.bm % 3]
    return complete(config, quickest(fits, problem.m, problem.n, problem.batch, target(problem).sms)._asdict())


def _triples(problem: Problem) -> tuple[str, ...]:
    """Return the sides of a tile that may be three times a power of two: those of operands in which k is adjacent."""
    return ("bm", "wm") * (problem.a_layout != "col") + ("bn", "wn") * (problem.b_layout == "col")


def _fragments(name: str, problem: Problem, config: Config) -> Geometry:
    """A kernel with the fragments of wmma.cuh, of 8 x 8 x 4 in f64.

    Shared memory holds two padded tiles of A and B, then sums for C.
    """
    bm, bn, bk, _, wn = tile = tuple(config[key] for key in _KEYS)
    size = dtypes.get(problem.dtype).size
    m, n, k = (8, 8, 4) if size == 8 else (16, 16, 32 // size)
    threads = _threads(config, m, n, 2 * k)
    filled = _padded(bm, bk, size, problem.a_layout != "col") + _padded(bn, bk, size, problem.b_layout != "row")
    patches = threads // WARP * m * (wn + 4) * max(4, size)
    parameters, half = (access(problem), template("WarpTiles", *tile), config["blocks"]), problem.dtype == "f16"
    needs = {} if half else {"needs": 80, "instructions": f"wmma of {problem.precision or problem.dtype}"}
    return of_tiles(name, problem, (bm, bn), threads, *parameters, shared=max(2 * filled, patches), **needs)


def _padded(side: int, bk: int, size: int, along_k: bool) -> int:
    """Return the bytes of a tile of wmma.cuh, whose rows have 16 or 32 bytes of padding."""
    rows, width = (side, bk) if along_k else (bk, side)
    return rows * (width * size + (32 if size == 8 or (size == 4 and not along_k) else 16))


def _threads(config: Config, m: int, n: int, k: int, triples: tuple[str, ...] = ()) -> int:
    """Return the threads of a block: a warp per wm x wn of bm x bn, by instructions of m x n, with at least this k.

    Sides in `triples` may be three times a power of two, too.
    """
    sides = {key: config[key] for key in _KEYS}
    for key, least in zip(_KEYS, (m, n, k, m, n), strict=True):
        power = sides[key] // 3 if key in triples and sides[key] % 3 == 0 else sides[key]
        if power < least or power & (power - 1):
            raise RefusedError(f"{key}={sides[key]}: a side of a tile is a power of two from {least} on")
    bm, bn, _, wm, wn = sides.values()
    if bm % wm or bn % wn:
        raise RefusedError(f"wm={wm}, wn={wn} of bm={bm}, bn={bn}: a warp's tile must fit in the block's; change one")
    threads = bm // wm * (bn // wn) * WARP
    if threads > THREADS:
        raise RefusedError(
            f"bm={bm}, bn={bn}, wm={wm}, wn={wn}: {threads} threads; a block has at most {THREADS}; make the warp's "
            "tile larger"
        )
    return threads


TENSOR = (
    gpu_rung(
        "wmma_f64",
        idea="a warp multiplies fragments of 8 x 4 and 4 x 8 in one instruction",
        parent="simt_smem",
        dtypes=("f64",),
        geometry=_fragments,
        space=_SPACE,
        default={"bm": 128, "bn": 128, "bk": 16, "wm": 64, "wn": 32, "blocks": 1},
        expect={**_WIDE, **_STORES},
        lesson=(
            "One warp instruction does the work of eight multiply-adds per thread, on fragments distributed over the "
            "lanes. The limit moves: shared memory and tile loads must keep up, so a warp computes a tile of 64 x 32. "
            "This instruction runs at half the rate that Hopper's tensor cores reach in float64."
        ),
    ),
    tensor_rung(
        "wmma_f16",
        idea="fragments of 16 x 16 x 16 in half precision, with sums in f32",
        parent="wmma_f64",
        geometry=_fragments,
        # 64 bytes of k: two fragments of 16, in tf32 of 8.
        resolve=lambda problem, config: complete(config, {"bk": 64 // dtypes.get(problem.dtype).size}),
        space={**_SPACE, "bk": (0, 16, 32, 64)},
        default={"bm": 128, "bn": 128, "bk": 0, "wm": 64, "wn": 32, "blocks": 2},
        expect={**_WIDE, **_STORES},
        lesson=(
            "The same program with another element type is four to eight times as fast: the easy way to use tensor "
            "cores. It reaches a third of the vendor's speed: arithmetic no longer hides the wait for tiles, and the "
            "compiler chooses the layout of fragments, so they cannot be loaded in a better way."
        ),
    ),
    gpu_rung(
        "mma_f64",
        idea="mma.sync in f64 from a swizzled ring of tiles, 16 x 8 x 4 per instruction where available",
        parent="wmma_f64",
        dtypes=("f64",),
        geometry=_mma_f64,
        resolve=_resolve_f64,
        space=_RING,
        expect={**_WIDE, **_STORES, "bank_conflicts": 0},
        lesson=(
            "mma.sync defines which lane holds which element, so the tile can be laid out for it: no bank conflicts, "
            "and no registers needed to store tiles. A ring of tiles hides the latency of memory, and reading "
            "fragments one step ahead hides that of shared memory. Which instruction shape reaches the peak depends on "
            "the architecture: measure it first."
        ),
    ),
)


# ---- mma.sync and ldmatrix in half precision and tf32 ----

_SWIZZLED = {"bm": (64, 128, 256), "bn": (32, 64, 128, 256), "bk": (32, 64), "wm": (32, 64), "wn": (16, 32, 64)}
_CONFLICT_FREE = {"bank_conflicts": 0, **_WIDE}
_ROW = 128  # bytes of k per tile
_STAGES = 4
_MOST_SPLITS = MMA_SPLITS[-1]

FINISHES = "mma_pipelined"  # the rung whose file has the launch that adds up parts of k
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
    return with_finish(name, product, problem, bits, splits) if splits > 1 else product


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
    sides, size = {key: config[key] for key in _KEYS}, dtypes.get(problem.dtype).size
    (bm, bn, bk, wm, wn), group = sides.values(), 32 // size
    for key, side in sides.items():
        if side < 16 or side & (side - 1):
            raise RefusedError(f"{key}={side}: a side of a swizzled tile is a power of two, at least 16")
    if bm < 32 or bn < 32 or bk < 2 * group or wm > bm or wn > bn:
        text = ", ".join(f"{key}={side}" for key, side in sides.items())
        raise RefusedError(
            f"{text}: a block has at least 32 x 32, warps of it at most its size, and bk two groups of {group}"
        )
    threads = (bm // wm) * (bn // wn) * WARP
    wide = access(problem, (*widths, accesses(problem)[2]))
    parameters = wide, *options, template("WarpTiles", *sides.values()), *((stages,) if stages > 1 else ())
    shared, instructions = stages * (bm + bn) * bk * size, "mma.m16n8k16 and cp.async"
    return of_tiles(name, problem, (bm, bn), threads, *parameters, shared=shared, needs=80, instructions=instructions)


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


def with_finish(name: str, product: Geometry, problem: Problem, packed: int, splits: int) -> Geometry:
    """Return the launch that adds up the parts of k, after those that compute them."""
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


MMA = (
    tensor_rung(
        "mma_ldmatrix",
        idea="mma.sync and ldmatrix on tiles whose 16-byte chunks are swizzled by XOR",
        parent="wmma_f16",
        geometry=_ldmatrix,
        space=_SWIZZLED,
        default={"bm": 128, "bn": 128, "bk": 64, "wm": 64, "wn": 64},
        expect={**_CONFLICT_FREE, **_STORES},
        lesson=(
            "ldmatrix gives a warp four 8 x 8 matrices, each from eight rows of 16 bytes at addresses the warp "
            "chooses. Rows 128 bytes apart would use the same banks eight times over; storing chunk c of row r at c ^ "
            "r % 8 spreads them, and the stores into the tile are free of conflicts too. But loading a tile, waiting "
            "for it and multiplying it still happen one after the other."
        ),
    ),
    tensor_rung(
        FINISHES,
        idea="a ring of tiles filled by cp.async, and fragments read one group of k ahead",
        parent="mma_ldmatrix",
        geometry=_pipelined,
        resolve=_resolve,
        space={
            **{key: (0, *values) for key, values in _SWIZZLED.items()},
            "stages": (0, 2, 3, 4, 5, 6),
            "splits": (0, 1, 2, 4),
        },
        expect=_CONFLICT_FREE,
        lesson=(
            "Three copies are in flight while a fourth tile is multiplied, and the fragments of the next 32 bytes of k "
            "are read while the current ones are used, so the tensor cores rarely wait. The remaining limit is the "
            "rate of mma.sync, about two thirds of wgmma's on Hopper. Operands whose rows are not aligned to 16 bytes "
            "are packed first: one pass over them costs little next to the product."
        ),
    ),
)
