"""The rungs on CUDA cores that keep tiles in registers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from gemmery import dtypes
from gemmery.cuda.choose import complete
from gemmery.cuda.choose.cost import quickest
from gemmery.cuda.choose.data import SIMT_PIPELINED
from gemmery.cuda.device import REGISTERS, STATIC_SHARED, THREADS, WARP
from gemmery.cuda.geometry import Geometry, access, accesses, instance, layouts, sum_size, target, template, tiles
from gemmery.errors import RefusedError
from gemmery.ladder.gpu import gpu_rung
from gemmery.problem import Config, Problem

_KEYS = ("bm", "bn", "bk", "tm", "tn")
_WARP_KEYS = ("bm", "bn", "bk", "wm", "wn", "tm", "tn")
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
_WARP_DEFAULT = {**_DEFAULT, "wm": 64, "wn": 32}
_PIPELINE = {key: values if 0 in values else (0, *values) for key, values in {**_WARPS, "stages": (2, 3, 4)}.items()}

_IN_REGISTERS = {"divergent_branches": 0, "local_requests": 0, "load_bytes_a_sector": 32}
_WIDE = {**_IN_REGISTERS, "load_sectors_a_request": 16}
_WITHOUT_CONFLICTS = {**_WIDE, "store_sectors_a_request": 16, "store_bytes_a_sector": 32, "bank_conflicts": 0}


def _warptile(name: str, problem: Problem, config: Config) -> Geometry:
    """Wide accesses, padded tiles that have k as the outer dimension, and the threads of a warp on wm x wn elements."""
    _check_warps(config)
    return _launch(name, problem, config, wide=True, keys=("wm", "wn"), pad=_PAD)


def _pipelined(name: str, problem: Problem, config: Config) -> Geometry:
    """As _warptile, with `stages` tiles in shared memory: through registers if there are two, else by cp.async."""
    _check_warps(config)
    stages = config["stages"]
    if stages < 2:
        raise RefusedError(f"stages={stages}: one tile is read while another is filled; use 2 or more")
    keys = ("wm", "wn", "stages")
    geometry = _launch(name, problem, config, wide=True, keys=keys, pad=_PAD, stages=stages)
    if stages == 2:
        return geometry
    if dtypes.get(problem.dtype).size != sum_size(problem):
        raise RefusedError(
            f"stages={stages} of {problem.dtype} into {problem.out}: cp.async does not widen; use stages=2"
        )
    return replace(geometry, needs=80, instructions="cp.async")


def _resolve(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced: by the tile that should take least time, and its stages."""
    device = target(problem)
    tile = quickest(SIMT_PIPELINED[sum_size(problem)], problem.m, problem.n, problem.batch, device.sms)
    if device.capability < 80 or dtypes.get(problem.dtype).size != sum_size(problem):
        tile = tile._replace(stages=2)
    return complete(config, tile._asdict())


def _launch(
    name: str,
    problem: Problem,
    config: Config,
    wide: bool = False,
    keys: tuple[str, ...] = (),  # parameters of its own
    pad: int = 0,
    stages: int = 0,  # tiles in dynamic shared memory; 0: one, in static shared memory
) -> Geometry:
    """One thread per tm x tn elements of a tile of C; accesses of one element, or as `wide` as each matrix allows."""
    _check_tile(config)
    bm, bn, bk, tm, tn = (config[key] for key in _KEYS)
    sides = bm + pad * (problem.a_layout == "row") + bn + pad * (problem.b_layout == "col")
    shared = max(1, stages) * bk * sides * sum_size(problem)
    if not stages and shared > STATIC_SHARED:
        raise RefusedError(
            f"bm={bm}, bn={bn}, bk={bk}: the tiles take {shared} bytes of shared memory, this kernel has "
            f"{STATIC_SHARED}; use a smaller bk, or simt_pipelined"
        )
    registers = (tm * tn + tm + tn) * sum_size(problem) // 4
    if registers > _MOST_REGISTERS:
        raise RefusedError(
            f"tm={tm}, tn={tn} in {problem.out}: {registers} registers; a thread has {_MOST_REGISTERS}; use smaller "
            "ones"
        )
    kernel = instance(
        name,
        problem._replace(precision=""),  # exact f32 products satisfy tf32 too
        *((access(problem, _accesses(problem, config, transposing=stages <= 2)),) if wide else layouts(problem)),
        template("ThreadTiles", bm, bn, bk, tm, tn),
        *(config[key] for key in keys),
        config["blocks"] or _blocks(problem, config, 2 if stages else 1),
    )
    threads = bm // tm * (bn // tn)
    dynamic = shared if stages else 0
    return Geometry(f"{name}.cu", kernel, tiles(problem, bm, bn), (threads, 1, 1), dynamic, tile=(bm, bn))


def _blocks(problem: Problem, config: Config, fragments: int) -> int:
    """Return the blocks per multiprocessor that registers allow: a thread holds its sums and `fragments` of A and B."""
    tm, tn = config["tm"], config["tn"]
    operands = (tm * tn + fragments * (tm + tn)) * (sum_size(problem) // 4)
    indices = 32 + 16 * ("any" in (problem.a_layout, problem.b_layout))
    threads = config["bm"] // tm * (config["bn"] // tn)
    return max(1, REGISTERS // (threads * (operands + indices)))


def _accesses(problem: Problem, config: Config, transposing: bool) -> tuple[int, int, int]:
    """Return the elements of A, B and C per access.

    A kernel that cannot transpose copies operands contiguous in k element by element.
    """
    a, b, c = accesses(problem, config["bm"], config["bn"], config["bk"])
    if transposing:
        return a, b, c
    return 1 if problem.a_layout == "row" else a, 1 if problem.b_layout == "col" else b, c


def _check_tile(config: Config) -> None:
    bm, bn, bk, tm, tn = (config[key] for key in _KEYS)
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


def _check_warps(config: Config) -> None:
    bm, bn, _, wm, wn, tm, tn = (config[key] for key in _WARP_KEYS)
    if min(wm, wn, tm, tn) < 1 or bm % wm or bn % wn:
        raise RefusedError(f"wm={wm}, wn={wn} of bm={bm}, bn={bn}: a warp's tile divides the block's; change either")
    if wm % tm or wn % tn or wm // tm * (wn // tn) != WARP:
        raise RefusedError(f"tm={tm}, tn={tn} of wm={wm}, wn={wn}: a warp's tile is that of {WARP} threads")


_tile_rung = partial(gpu_rung, space=_TILE, default=_DEFAULT)
TILED = (
    _tile_rung(
        "simt_threadtile",
        idea="each thread computes tm x tn elements from tiles in shared memory",
        parent="simt_smem",
        geometry=_launch,
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
        geometry=partial(_launch, wide=True),
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
        geometry=partial(_launch, wide=True, pad=_PAD),
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
        geometry=partial(_launch, wide=True),
        expect=_WITHOUT_CONFLICTS,
        lesson=("The XOR moves each store to a different bank, as the padding did, and needs no extra memory."),
    ),
    gpu_rung(
        "simt_warptile",
        idea="C in tiles of the block, of each warp in it, and of each thread in that",
        parent="simt_padded",
        geometry=_warptile,
        space=_WARPS,
        default=_WARP_DEFAULT,
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
