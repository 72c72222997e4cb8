"""The rungs on CUDA cores whose threads keep tiles of C in registers: from one tile a thread to a ring of stages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

from gemmery import dtypes
from gemmery.cuda.choose import complete, may_share
from gemmery.cuda.choose.cost import packed_cycles, quickest, quickest_shared, shared_cycles
from gemmery.cuda.choose.data import (
    FEW_TILES,
    MANY_AREA,
    PACKED_ROWS,
    SIMT_ALONG_K,
    SIMT_BY_ELEMENTS,
    SIMT_PACKED,
    SIMT_PIPELINED,
    SIMT_SEMIRINGS,
    SIMT_SHARED,
    SIMT_SPLITS,
    Tiling,
)
from gemmery.cuda.constants import PACK_THREADS
from gemmery.cuda.device import REGISTERS, STATIC_SHARED, THREADS, WARP, Device
from gemmery.cuda.geometry import Geometry, access, accesses, layouts, sum_size, target, template
from gemmery.errors import RefusedError
from gemmery.ladder.gpu import ALIGNED, EVERY, LINE, OTHERS, WHOLE, beside, gpu_rung, of_tiles, whole
from gemmery.ladder.tensor import FINISHES, with_finish
from gemmery.problem import Config, Problem

Choice = tuple[Tiling, int]  # and the parts of k
_KEYS = ("bm", "bn", "bk", "tm", "tn")
_MOST_REGISTERS = 255  # per thread
_PAD = 4  # padding elements after each step of k in the tile of an operand contiguous in k

_TILE = {
    "bm": (32, 64, 128, 256),
    "bn": (32, 64, 128, 256),
    "bk": (8, 16, 32),
    "tm": (4, 8, 16),
    "tn": (4, 8, 16),
    "blocks": (0, 1, 2, 3, 4),  # per multiprocessor, limited by registers; 0: as many as fit
}
_WARPS = {**_TILE, "wm": (16, 32, 64, 128), "wn": (16, 32, 64, 128)}
_DEFAULT = {"bm": 128, "bn": 128, "bk": 8, "tm": 8, "tn": 8, "blocks": 0}
_RING = {**_WARPS, "stages": (2, 3, 4), "splits": (1, 2, 4, 8)}
_PIPELINE = {key: values if 0 in values else (0, *values) for key, values in _RING.items()}

_IN_REGISTERS = {"divergent_branches": 0, "local_requests": 0, "load_bytes_a_sector": 32}
_WIDE = {**_IN_REGISTERS, "load_sectors_a_request": 16}
_WITHOUT_CONFLICTS = {**_WIDE, "store_sectors_a_request": 16, "store_bytes_a_sector": 32, "bank_conflicts": 0}


_BLOCKS, _BLOCK = 4, 32  # of the launch that packs, on a multiprocessor; sides of B that one of these copies at a time


def _packs(problem: Problem, config: Config) -> bool:
    """Return True if B is copied to rows of n first: k is adjacent in it, and tiles are so large that it pays."""
    large = any((config["bm"], config["bn"], config["tn"]) == (each.bm, each.bn, each.tn) for each in SIMT_PACKED)
    return large and config["stages"] > 2 and _pieces_along_k(problem) and target(problem).capability >= 90


def _pipelined(name: str, problem: Problem, config: Config) -> Geometry:
    """As simt_warptile, with `stages` tiles in shared memory: through registers if there are two, else by cp.async."""
    if _packs(problem, config):
        a, _, c = problem.alignments
        product = _pipelined(name, problem._replace(b_layout="row", alignments=(a, ALIGNED, c)), config)
        pitch = whole(4 * problem.n, LINE)
        blocks = min(_BLOCKS * target(problem).sms, -(-problem.k // _BLOCK) * -(-problem.n // _BLOCK) * problem.batch)
        pack = beside("wgmma_pack", "wgmma_pack", blocks, PACK_THREADS, "unsigned int", 2 | 4)
        kernel, room = f"{product.kernel[:-1]}, true>", problem.batch * problem.k * pitch
        return replace(product, kernel=kernel, before=(pack,), workspace=room)
    stages, splits, keys = config["stages"], config["splits"], ("wm", "wn", "stages")
    hopper = target(problem).capability >= 90
    summed = problem if splits == 1 or hopper else problem._replace(epilogue="", scaled=False)
    geometry = _tiled(name, summed, config, wide=True, keys=keys, pad=_PAD, stages=stages)
    if stages > 2 and _widens(problem):
        raise RefusedError(
            f"stages={stages} of {problem.dtype} into {problem.out}: cp.async does not widen; use stages=2"
        )
    if stages > 2:
        geometry = replace(geometry, needs=80, instructions="cp.async")
    return geometry if splits == 1 else _shared(problem, geometry, config)


def _shared(problem: Problem, tiled: Geometry, config: Config) -> Geometry:
    """A launch in which `splits` blocks have a part of the k of a tile each: those of a cluster add up their sums.

    Before compute capability 9.0, a second launch adds them up.
    """
    splits, (name, arguments) = config["splits"], tiled.kernel[:-1].split("<", 1)
    if splits not in SIMT_SPLITS:
        raise RefusedError(f"splits={splits}: 1 to {SIMT_SPLITS[-1]} blocks share the k of a tile")
    if problem.semiring or dtypes.get(problem.out).accumulator != "f32":
        what = problem.semiring or f"sums of {problem.out}"
        raise RefusedError(f"splits={splits} of {what}: blocks that share k add up float32; use splits=1")
    if config["tn"] % 4:
        raise RefusedError(f"tn={config['tn']}, splits={splits}: threads send 4 sums at a time; use a multiple of 4")
    if target(problem).capability < 90:
        parts = replace(tiled, kernel=f"{name}<{arguments}, false, {splits}>")
        return with_finish(FINISHES, parts, problem, 0, splits)
    sent = -(-config["tm"] * config["tn"] // (4 * splits)) * splits * 16  # bytes of a thread
    return replace(
        tiled,
        kernel=f"{name}_cluster<{arguments}, {splits}>",
        grid=(tiled.grid[0] * splits, 1, 1),
        shared=tiled.shared + sent * tiled.threads,
        cluster=splits,
        needs=90,
        instructions="clusters of blocks",
    )


def _resolve(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced: by the tile that should take least time, and its stages."""
    device, size = target(problem), sum_size(problem)
    along_k = size == 4 and problem.a_layout == "row" and problem.b_layout == "col"
    tilings = SIMT_PIPELINED[size]
    if along_k:
        tilings = SIMT_ALONG_K if _pieces_along_k(problem) else SIMT_BY_ELEMENTS
        if problem.m < PACKED_ROWS or device.capability < 90:
            tilings = tuple(tile for tile in tilings if tile.bn < 256)
    if problem.semiring == "log_sum_exp":
        tilings = tilings[1:]  # the largest would leave no registers for the exponential
    elif problem.semiring and size == 4:
        tilings = SIMT_SEMIRINGS
    tile, splits = quickest(tilings, problem.m, problem.n, problem.batch, device.sms), 1
    few = () if config["bm"] else shared_tiles(problem, device)
    if few:
        choices = (config["splits"],) if config["splits"] else SIMT_SPLITS
        tile, splits = quickest_shared(few, choices, problem, device)
        if _pieces_along_k(problem) and device.capability >= 90:
            tile, splits = _packed_or(tile, splits, choices, problem, device)
    if device.capability < 80 or _widens(problem):
        tile = tile._replace(stages=2)
    return complete(config, {**tile._asdict(), "splits": splits})


def _packed_or(tile: Tiling, splits: int, choices: tuple[int, ...], problem: Problem, device: Device) -> Choice:
    """Return a tile and the parts of k for a B that is copied to rows of n first, or the given ones if that is slower.

    The copy reads and writes every element.
    """
    times = {each: packed_cycles(problem, *each, device) for each in product(SIMT_PACKED, choices)}
    other = min(times, key=times.__getitem__)
    return other if times[other] < shared_cycles(problem, tile, splits, device) else (tile, splits)


def shared_tiles(problem: Problem, device: Device) -> tuple[Tiling, ...]:
    """Return the tiles of float32 whose k blocks may share, for a C of few tiles; none for other products."""
    plain = (problem.dtype, problem.out, problem.b_dtype, problem.semiring) == ("f32", "f32", "", "")
    if not plain or not may_share(problem.m, problem.n, problem.k, problem.batch, device):
        return ()
    kind = shared_kind(problem)
    if problem.m * problem.n * problem.batch <= FEW_TILES * device.sms:
        return SIMT_SHARED[kind]
    # Of many tiles, small ones were not timed, and the model takes them for faster than they are.
    return tuple(tile for tile in SIMT_SHARED[kind] if kind != "elements" and tile.bm * tile.bn >= MANY_AREA)


def shared_kind(problem: Problem) -> str:
    """Return which tiles of SIMT_SHARED suit a product: by the layout of B, and whether pieces of k are copied."""
    return "rows" if problem.b_layout != "col" else "pieces" if _pieces_along_k(problem) else "elements"


def _along_k(problem: Problem, config: Config) -> bool:
    """Return True if tiles are of pieces along k, and a warp's lanes have four rows and columns beside each other."""
    lanes = all(config[warp] // config[thread] % 4 == 0 for warp, thread in (("wm", "tm"), ("wn", "tn")))
    return config["bk"] == 16 and lanes and _pieces_along_k(problem)


def _pieces_along_k(problem: Problem) -> bool:
    """Return True if k is adjacent in A and in B, in pieces of four elements of 4 bytes that are multiplied as such."""
    sizes = (*_sizes(problem), sum_size(problem))
    sides = problem.a_layout == "row" and problem.b_layout == "col"
    return sides and sizes == (4, 4, 4) and not problem.semiring and accesses(problem)[:2] == (4, 4)


def _sizes(problem: Problem) -> tuple[int, int]:
    """Return the bytes of an element of A and of B."""
    return dtypes.get(problem.dtype).size, dtypes.get(problem.b_dtype or problem.dtype).size


def _widens(problem: Problem) -> bool:
    """Return True if elements of A or B are widened as they are loaded."""
    return any(size != sum_size(problem) for size in _sizes(problem))


def _tiled(
    name: str,
    problem: Problem,
    config: Config,
    wide: bool = False,
    keys: tuple[str, ...] = (),  # parameters of its own
    pad: int = 0,
    stages: int = 0,  # tiles in dynamic shared memory; 0: one, in static shared memory
) -> Geometry:
    """One thread per tm x tn elements of a tile of C; accesses of one element, or as `wide` as each matrix allows."""
    threads, size = _threads(config, keys), sum_size(problem)
    bm, bn, bk, tm, tn = (config[key] for key in _KEYS)
    sides = bm + pad * (problem.a_layout == "row") + bn + pad * (problem.b_layout == "col")
    shared = max(1, stages) * bk * sides * size
    if not stages and shared > STATIC_SHARED:
        raise RefusedError(
            f"bm={bm}, bn={bn}, bk={bk}: the tiles take {shared} bytes of shared memory, this kernel has "
            f"{STATIC_SHARED}; use a smaller bk, or simt_pipelined"
        )
    registers = (tm * tn + tm + tn) * size // 4
    if registers > _MOST_REGISTERS:
        raise RefusedError(
            f"tm={tm}, tn={tn} in {problem.out}: {registers} registers; a thread has {_MOST_REGISTERS}; use smaller "
            "ones"
        )
    # Blocks per multiprocessor that registers allow: of sums, fragments of A and B, two of each in a ring, and indices.
    operands = (tm * tn + (2 if stages else 1) * (tm + tn)) * (size // 4)
    indices = 32 + 16 * ("any" in (problem.a_layout, problem.b_layout)) + 32 * (1 in _sizes(problem))
    a, b, c = accesses(problem, bm, bn, bk)
    along_k = stages > 2 and _along_k(problem, config)  # pieces of four k are read as they lie
    if along_k:
        operands, shared = tm * tn + 8 * (tm + tn), stages * bk * (bm + bn) * size
    elif stages > 2:  # cp.async does not transpose: it copies operands contiguous in k element by element
        a, b = 1 if problem.a_layout == "row" else a, 1 if problem.b_layout == "col" else b
    geometry = of_tiles(
        name,
        problem._replace(precision=""),  # exact f32 products satisfy tf32 too
        (bm, bn),
        threads,
        *((access(problem, (a, b, c)),) if wide else layouts(problem)),
        template("ThreadTiles", bm, bn, bk, tm, tn),
        *(config[key] for key in keys),
        config["blocks"] or max(1, REGISTERS // (threads * (operands + indices))),
        shared=shared if stages else 0,
    )
    if along_k:
        kernel = geometry.kernel.replace(name, "simt_along_k", 1)
        return replace(geometry, source="simt_along_k.cu", kernel=kernel)
    return geometry


def _threads(config: Config, keys: tuple[str, ...]) -> int:
    """Return the threads of a block, after a check of its tile, and of those of its warps if `keys` has any."""
    bm, bn, bk, tm, tn = (config[key] for key in _KEYS)
    if keys:
        wm, wn = config["wm"], config["wn"]
        if min(wm, wn, tm, tn) < 1 or bm % wm or bn % wn:
            raise RefusedError(
                f"wm={wm}, wn={wn} of bm={bm}, bn={bn}: a warp's tile divides the block's; change either"
            )
        if wm % tm or wn % tn or wm // tm * (wn // tn) != WARP:
            raise RefusedError(f"tm={tm}, tn={tn} of wm={wm}, wn={wn}: a warp's tile is that of {WARP} threads")
        if config.get("stages", 2) < 2:
            raise RefusedError(f"stages={config['stages']}: one tile is read while another is filled; use 2 or more")
    for key in _KEYS:
        if config[key] < 1 or config[key] & (config[key] - 1):
            raise RefusedError(f"{key}={config[key]}: threads share a tile evenly; use a power of two")
    if bk < 2 or bm < tm or bn < tn:
        raise RefusedError(
            f"bm={bm}, bn={bn}, bk={bk} for tm={tm}, tn={tn}: a block's tile is a thread's times 2 or more"
        )
    threads = bm // tm * (bn // tn)
    if threads < WARP or threads > THREADS:
        raise RefusedError(
            f"bm={bm}, bn={bn}, tm={tm}, tn={tn}: {threads} threads; a block has {WARP} to {THREADS}; change the "
            "thread's tile"
        )
    return threads


_tile_rung = partial(gpu_rung, space=_TILE, default=_DEFAULT)
TILED = (
    _tile_rung(
        "simt_threadtile",
        idea="each thread computes tm x tn elements from tiles in shared memory",
        parent="simt_smem",
        geometry=_tiled,
        expect={**_IN_REGISTERS, "load_sectors_a_request": 4},
        lesson=(
            "A thread reads tm + tn elements for tm x tn multiply-adds and keeps its sums in registers, so shared "
            "memory is read tm tn / (tm + tn) times less often than with one thread per element."
        ),
    ),
    _tile_rung(
        "simt_vectorized",
        idea="16-byte loads from global memory, adjacent threads loading adjacent chunks",
        parent="simt_threadtile",
        geometry=partial(_tiled, wide=True),
        expect=_WIDE,
        lesson=(
            "Fewer and wider requests move the same bytes. A width is used only if it divides both the alignment and "
            "the side, so no load crosses an edge."
        ),
    ),
    _tile_rung(
        "simt_padded",
        idea="tiles with k as the outer dimension, padded against bank conflicts",
        parent="simt_vectorized",
        geometry=partial(_tiled, wide=True, pad=_PAD),
        expect=_WITHOUT_CONFLICTS,
        lesson=(
            "A tile is transposed as it is stored, so that one step of k is a row of shared memory and is read 16 bytes"
            " at a time. Four elements of padding per row put the transposing stores on different banks."
        ),
    ),
    _tile_rung(
        "simt_swizzled",
        idea="no padding: element positions are XORed with a number derived from k",
        parent="simt_padded",
        geometry=partial(_tiled, wide=True),
        expect=_WITHOUT_CONFLICTS,
        lesson=("The XOR moves each store to a different bank, as the padding did, and needs no extra memory."),
    ),
    gpu_rung(
        "simt_warptile",
        idea="C in tiles of the block, of each warp in it, and of each thread in that",
        parent="simt_padded",
        geometry=partial(_tiled, wide=True, keys=("wm", "wn"), pad=_PAD),
        space=_WARPS,
        default={**_DEFAULT, "wm": 64, "wn": 32},
        expect=_WITHOUT_CONFLICTS,
        lesson=(
            "A warp that computes a compact part of the tile reads fewer different elements, and lanes that read the "
            "same chunk share wavefronts."
        ),
    ),
    gpu_rung(
        "simt_pipelined",
        idea="the next tiles are loaded while the current one is multiplied",
        parent="simt_warptile",
        mixed=(*EVERY, *WHOLE),
        dtypes=(*EVERY, *OTHERS),
        semirings=True,
        geometry=_pipelined,
        resolve=_resolve,
        space=_PIPELINE,
        expect={**_IN_REGISTERS, "bank_conflicts": 0},
        lesson=(
            "A block no longer waits for memory at every tile: the next tile is on its way, through registers or by "
            "cp.async, and the operands of the next step of k are read while the current step is multiplied."
        ),
    ),
)
