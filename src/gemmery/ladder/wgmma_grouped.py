"""The rung for groups of rows, each times a matrix of its own, by wgmma: sm_90a."""

from __future__ import annotations

from math import exp

from gemmery import dtypes
from gemmery.cuda import hopper_model
from gemmery.cuda.geometry import C_NAMES, Geometry, MapBox, element, target, template
from gemmery.cuda.tiles import complete
from gemmery.errors import RefusedError
from gemmery.ladder import wgmma, wgmma_routes
from gemmery.ladder.gpu import gpu_rung
from gemmery.problem import Config, Problem

_BM, _BLOCK = 128, 64  # rows of a tile, and of the part of it that one warpgroup multiplies
_PLACES = 16 * 24  # bytes of places of tiles, and their barriers
_STAGES = {256: 4, 128: 6, 64: 8}  # of a tile's columns: about 200 KB
_SPEEDS = {64: 80, 128: 93, 256: 100}  # of their products, in percent, fitted together with these:
_LINE_RATE, _FINISH = 76, {2: 0.009, 4: 0.1}  # bytes from the L2 cache in a cycle, and cycles to finish an element of C


def _grouped(name: str, problem: Problem, config: Config) -> Geometry:
    """Blocks that take the tiles of all groups in turn: as many as there may be tiles, at most one a multiprocessor."""
    bn, stages = config["bn"], config["stages"]
    if bn not in _STAGES:
        raise RefusedError(f"bn={bn}: a tile has {', '.join(map(str, _STAGES))} columns")
    if not 2 <= stages <= _STAGES[bn]:
        raise RefusedError(f"stages={stages}: a ring of tiles of {bn} columns has 2 to {_STAGES[bn]} stages")
    a, b = wgmma.operand_boxes(problem, _BM, bn)
    if problem.a_layout != "col":
        a = MapBox("a", (a.box[0], _BLOCK))
    if problem.b_layout == "col":
        b = MapBox("b", (b.box[0], bn))
    tiles = wgmma.wgmma_tiles(problem, _BM, bn, stages)
    ring = wgmma.ring_bytes(problem, _BM, bn, stages) + wgmma.staging_bytes(problem, _BM, bn)
    kernel = template(name, element(problem), C_NAMES[problem.out], wgmma.steps(problem), tiles)
    blocks, shared = max(1, min(most_tiles(problem, bn), config["blocks"])), ring + 16 * stages + _PLACES
    maps = a, b, wgmma.piece_box(problem, _BM, bn)
    return wgmma.launch(name, kernel, blocks, 3, shared, (_BM, bn), maps, overlaps=True)


def _refuses(problem: Problem) -> str:
    """Refuse what the parent refuses, except groups."""
    return wgmma.refuses_library(problem._replace(groups=0))


def most_tiles(problem: Problem, bn: int) -> int:
    """Return the number of tiles at most: the rows of each group may end within one."""
    columns = -(-problem.n // bn)
    if not problem.groups:
        return -(-problem.m // _BM) * columns * problem.batch
    return (problem.m // _BM + min(problem.groups, problem.m)) * columns


def _resolve(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced."""
    sms = target(problem).sms
    bn = config["bn"] or min(_STAGES, key=lambda bn: _cycles(problem, bn, sms))
    return complete(config, {"bn": bn, "stages": _STAGES.get(bn, 0), "blocks": sms})


def _cycles(problem: Problem, bn: int, sms: int) -> float:
    """Return about the cycles that tiles of bn columns take: rounds of them, the last one half full.

    A step of 128 bytes of k lasts until its products are done, or until its rows have come from the L2 cache.
    """
    long, short = expected_tiles(problem)
    columns = -(-problem.n // bn)
    rounds = (long + short) * columns / sms
    high = _BM if 4 * long > short else _BLOCK  # of tiles that decide when a round ends
    area = high * bn
    steps = -(-problem.k * dtypes.get(problem.dtype).size // hopper_model.ROW)
    step = max(area * 100 / (hopper_model.STEP_AREA * _SPEEDS[bn]), (high + bn) * hopper_model.ROW / _LINE_RATE)
    each = steps * step + area * _FINISH[dtypes.get(problem.out).size]
    return each * (rounds + 0.5 if rounds > 1 else 1)


def expected_tiles(problem: Problem) -> tuple[float, float]:
    """Return how many rows of tiles groups have, those of more than a block of 64 rows and the others.

    The host does not know where groups end. They are uneven: sizes are taken to be distributed exponentially, so that
    the last tile of a group has any number of rows.

    >>> [round(each, 1) for each in expected_tiles(Problem(1024, 4096, 7168, "bf16", "bf16", groups=8))]
    [7.7, 5.0]
    """
    if not problem.groups:
        whole, rest = divmod(problem.m, _BM)
        return problem.batch * (whole + (rest > _BLOCK)), problem.batch * (0 < rest <= _BLOCK)
    mean = max(problem.m, 1) / problem.groups
    every = min(problem.groups, problem.m) / (1 - exp(-_BM / mean))
    long = every * exp(-_BLOCK / mean)
    return long, every - long


GROUPED = (
    gpu_rung(
        "wgmma_grouped",
        idea="groups of rows, each times a matrix of its own: the device reads where they end",
        parent="wgmma_epilogue",
        dtypes=wgmma.DTYPES,
        refuses=_refuses,
        bound=wgmma.aligned_sums,
        bounds=wgmma.BOUNDS,
        geometry=wgmma_routes.packing(_grouped),
        resolve=_resolve,
        space={"bn": (0, *_STAGES), "stages": (0, 2, 3, 4), "blocks": (0, 1, 128)},
        expect={"local_requests": 0, "bank_conflicts": 0},
        lesson=(
            "A launch for each expert of a layer leaves multiprocessors idle at each end, and the host must know how "
            "many rows each has. Here all tiles of all groups are one list that blocks take in turn. The list is "
            "written nowhere: a thread walks along the ends of the groups and counts tiles until it comes to its own, "
            "a cached load and ten instructions for each group, once for the whole launch. With few rows per group the "
            "weights are what is moved, so of A only blocks of 64 rows that the group has are brought and multiplied."
        ),
    ),
)
