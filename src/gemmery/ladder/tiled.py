"""The rungs on CUDA cores that keep tiles in registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gemmery.cuda import tiled
from gemmery.cuda.geometry import Geometry
from gemmery.cuda.launch import builder
from gemmery.ladder.rung import Rung
from gemmery.problem import Config, Problem

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
_PIPELINE_DEFAULT = dict.fromkeys(_PIPELINE, 0)  # chosen by the size of the product

_IN_REGISTERS = {"divergent_branches": 0, "local_requests": 0, "load_bytes_a_sector": 32}
_WIDE = {**_IN_REGISTERS, "load_sectors_a_request": 16}
_WITHOUT_CONFLICTS = {**_WIDE, "store_sectors_a_request": 16, "store_bytes_a_sector": 32, "bank_conflicts": 0}


def _takes(problem: Problem) -> str:
    """Refuse nothing."""
    return ""


def _rung(
    name: str,
    parent: str,
    idea: str,
    lesson: str,
    geometry: Callable[[Problem, Config], Geometry],
    space: dict[str, tuple[int, ...]],
    default: Config,
    expect: Mapping[str, float],
    settled: Callable[[Problem, Config], Config] = lambda _, config: config,
) -> Rung:
    return Rung(
        name=name,
        idea=idea,
        parent=parent,
        dtypes=("f32", "f64", "f16", "bf16"),
        refuses=_takes,
        build=builder(geometry),
        geometry=geometry,
        settled=settled,
        space=space,
        default=default,
        expect=expect,
        lesson=lesson,
        source=f"cuda/kernels/{name}.cu",
    )


TILED: tuple[Rung, ...] = (
    _rung(
        "simt_threadtile",
        "simt_smem",
        "each thread computes tm x tn elements from tiles in shared memory",
        "A thread reads tm + tn elements for tm x tn multiply-adds and keeps its sums in registers, so shared memory "
        "is read tm tn / (tm + tn) times less often than with one thread per element.",
        tiled.threadtile,
        _TILE,
        _DEFAULT,
        {**_IN_REGISTERS, "load_sectors_a_request": 4},
    ),
    _rung(
        "simt_vectorized",
        "simt_threadtile",
        "16-byte loads from global memory, adjacent threads loading adjacent chunks",
        "Fewer and wider requests move the same bytes. A width is used only if it divides both the alignment and the "
        "side, so no load crosses an edge.",
        tiled.vectorized,
        _TILE,
        _DEFAULT,
        _WIDE,
    ),
    _rung(
        "simt_padded",
        "simt_vectorized",
        "tiles with k as the outer dimension, padded against bank conflicts",
        "A tile is transposed as it is stored, so that one step of k is a row of shared memory and is read 16 bytes at "
        "a time. Four elements of padding per row put the transposing stores on different banks.",
        tiled.padded,
        _TILE,
        _DEFAULT,
        _WITHOUT_CONFLICTS,
    ),
    _rung(
        "simt_swizzled",
        "simt_padded",
        "no padding: element positions are XORed with a number derived from k",
        "The XOR moves each store to a different bank, as the padding did, and needs no extra memory.",
        tiled.swizzled,
        _TILE,
        _DEFAULT,
        _WITHOUT_CONFLICTS,
    ),
    _rung(
        "simt_warptile",
        "simt_padded",
        "block tile, warp tile, thread tile",
        "A warp that computes a compact part of the tile reads fewer different elements, and lanes that read the same "
        "chunk share wavefronts.",
        tiled.warptile,
        _WARPS,
        _WARP_DEFAULT,
        _WITHOUT_CONFLICTS,
    ),
    _rung(
        "simt_pipelined",
        "simt_warptile",
        "the next tiles are loaded while the current one is multiplied",
        "A block no longer waits for memory at every tile: the next tile is on its way, through registers or by "
        "cp.async, and the operands of the next step of k are read while the current step is multiplied.",
        tiled.pipelined,
        _PIPELINE,
        _PIPELINE_DEFAULT,
        {**_IN_REGISTERS, "bank_conflicts": 0},
        tiled.chosen,
    ),
)
