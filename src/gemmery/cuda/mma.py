"""Launches of the tensor-core kernels by mma.sync and ldmatrix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

from gemmery.cuda import device
from gemmery.cuda.geometry import LAYOUTS, Geometry, instance, tiles, vector
from gemmery.errors import RefusedError
from gemmery.problem import Problem

Config = Mapping[str, int]
WARP = 32
SIDES = ("bm", "bn", "bk", "wm", "wn")
KEYS = (*SIDES, "stages", "splits")
Tiling = tuple[int, int, int, int, float]

# Tiles of a block and of its warps, and the speed of each alone on a multiprocessor, as a share of the largest's (one
# H200, f16).
TILES: tuple[Tiling, ...] = (
    (256, 128, 64, 64, 1.00),
    (128, 256, 64, 64, 1.00),
    (128, 128, 64, 64, 0.90),
    (64, 128, 32, 64, 0.68),
    (64, 64, 32, 32, 0.42),
    (64, 32, 32, 16, 0.25),
)
ROW = 128  # bytes of k per tile
STAGES = 4
SPLITS, MOST_SPLITS = (1, 2, 4, 8, 16), 16

# In units of one element of C by ROW bytes of k on one multiprocessor, 31 ps on an H200: filling and emptying a ring,
# in steps; a launch that adds up parts, 3 us; writing and reading a sum of one part, 8 bytes at 3 TB/s.
START, FINISH, FINISH_ELEMENT = 6, 97_000, 0.09
FINISH_THREADS = 256
PACK_THREADS, PACK_ROWS, PACK_BYTES = 256, 32, 512  # a block of the packing launch: threads, and the size of its copy


def ldmatrix(problem: Problem, config: Config) -> Geometry:
    """One tile of A and of B at a time."""
    vectors = _elements(problem, 0), _elements(problem, 1)
    return _by_warps("mma_ldmatrix", problem, config, vectors, any(_ragged(problem, vectors)), stages=1)


def pipelined(problem: Problem, config: Config) -> Geometry:
    """A ring of `stages` tiles of A and of B, after a launch that packs operands that cp.async cannot copy.

    With `splits` above 1, each block sums over a part of k, and a last launch adds up the parts.
    """
    config = chosen(problem, config)
    stages, splits = config["stages"], config["splits"]
    if not 2 <= stages <= 8:
        raise RefusedError(f"stages={stages}: a ring has 2 to 8 tiles; 3 or 4 hide the latency of memory")
    if not 1 <= splits <= MOST_SPLITS:
        raise RefusedError(f"splits={splits}: k is split into 1 to {MOST_SPLITS} parts")
    size = _size(problem)
    given = _elements(problem, 0), _elements(problem, 1)
    packed = [n * size < 4 or cut for n, cut in zip(given, _ragged(problem, given), strict=True)]
    vectors = tuple(16 // size if pack else elements for elements, pack in zip(given, packed, strict=True))
    bits = packed[0] + 2 * packed[1]
    summed = problem._replace(epilogue="", scaled=False) if splits > 1 else problem
    made = _by_warps("mma_pipelined", summed, config, vectors, bits, splits, stages=stages)
    if bits and problem.k:
        made = _with_packing(made, problem, bits)
    return _with_finish(made, problem, bits, splits) if splits > 1 else made


def chosen(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced: by the tile with which the product takes least time.

    A multiprocessor computes its share of the tiles one after the other, each in proportion to its area.

    >>> chosen(Problem(1024, 1024, 1024, "f16", "f16"), dict.fromkeys(KEYS, 0))
    {'bm': 64, 'bn': 128, 'bk': 64, 'wm': 32, 'wn': 64, 'stages': 4, 'splits': 1}
    """
    if all(config.values()):
        return config
    found = device.find("h200" if problem.device == "cpu" else problem.device)

    def time(choice: tuple[Tiling, int]) -> float:
        (bm, bn, *_, speed), splits = choice
        steps = -(-problem.k * _size(problem) // ROW)
        rounds = -(-tiles(problem, bm, bn)[0] * splits // found.sms)
        finish = FINISH + FINISH_ELEMENT * problem.batch * problem.m * problem.n * splits if splits > 1 else 0
        return rounds * bm * bn / speed * (-(-steps // splits) + START) + finish

    (bm, bn, wm, wn, _), splits = min(itertools.product(TILES, SPLITS), key=time)
    row, most = ROW, found.limits.shared
    if 3 * (bm + bn) * row > most:
        row //= 2
        bm, bn = min(bm, bn), max(bm, bn)  # 470 TFLOP/s, where 256 half rows of A by 128 columns reach 397
    stages = min(STAGES, most // ((bm + bn) * row))
    sides = {"bm": bm, "bn": bn, "bk": row // _size(problem), "wm": wm, "wn": wn}
    return {key: config[key] or ours for key, ours in {**sides, "stages": stages, "splits": splits}.items()}


def _by_warps(
    name: str, problem: Problem, config: Config, vectors: tuple[int, ...], *access: int, stages: int
) -> Geometry:
    """A block of bm x bn, a warp per wm x wn of it, and `stages` tiles of both operands in shared memory."""
    bm, bn, bk, wm, wn = sides = tuple(config[key] for key in SIDES)
    size = _size(problem)
    _check_tile(bm, bn, bk, wm, wn, 32 // size)
    threads = (bm // wm) * (bn // wn) * WARP
    vectors = *vectors, math.gcd(_elements(problem, 2), problem.n)
    layouts = (LAYOUTS[problem.a_layout], LAYOUTS[problem.b_layout])
    ring = (stages,) if stages > 1 else ()
    return Geometry(
        f"{name}.cu",
        instance(name, problem, *layouts, *vectors, *access, *sides, *ring),
        tiles(problem, bm, bn),
        (threads, 1, 1),
        shared=stages * (bm + bn) * bk * size,
        needs=80,
        instructions="mma.m16n8k16 and cp.async",
        tile=(bm, bn),
    )


def _with_packing(made: Geometry, problem: Problem, packed: int) -> Geometry:
    """As without packing, after a launch that copies A (bit 0 of `packed`) and B (bit 1) to rows of whole 16 bytes."""
    size = _size(problem)
    a = (problem.k, problem.m) if problem.a_layout == "col" else (problem.m, problem.k)  # rows, elements per row
    b = (problem.n, problem.k) if problem.b_layout == "col" else (problem.k, problem.n)
    chosen = [operand for bit, operand in enumerate((a, b)) if packed >> bit & 1]
    blocks = sum(-(-rows // PACK_ROWS) * -(-columns * size // PACK_BYTES) for rows, columns in chosen)
    kernel = instance(
        "mma_pipelined_pack",
        problem._replace(epilogue="", scaled=False),
        LAYOUTS[problem.a_layout],
        LAYOUTS[problem.b_layout],
        packed,
    )
    before = Geometry("mma_pipelined.cu", kernel, (problem.batch * blocks, 1, 1), (PACK_THREADS, 1, 1), needs=80)
    scratch = problem.batch * sum(rows * -(-columns * size // 16) * 16 for rows, columns in chosen)
    return replace(made, before=(before,), workspace=scratch)


def _with_finish(made: Geometry, problem: Problem, packed: int, splits: int) -> Geometry:
    """The launch that adds up the parts of k, after those that compute them."""
    kernel = instance(
        "mma_pipelined_finish", problem, LAYOUTS[problem.a_layout], LAYOUTS[problem.b_layout], packed, splits
    )
    parts = replace(made, before=(), grid=(made.grid[0] * splits, 1, 1), workspace=0)
    blocks = problem.batch * problem.m * -(-problem.n // FINISH_THREADS)
    return Geometry(
        made.source,
        kernel,
        (blocks, 1, 1),
        (FINISH_THREADS, 1, 1),
        workspace=made.workspace + 4 * splits * problem.batch * problem.m * problem.n,
        before=(*made.before, parts),
        needs=made.needs,
        instructions=made.instructions,
    )


def _size(problem: Problem) -> int:
    """Return the bytes of an element of A and B."""
    return 4 if problem.dtype == "f32" else 2


def _elements(problem: Problem, operand: int) -> int:
    """Return the elements of A (0), B (1) or C (2) per access: one if they are not adjacent."""
    layout = (problem.a_layout, problem.b_layout, problem.c_layout)[operand]
    return 1 if layout == "any" else vector(problem, operand)


def _ragged(problem: Problem, vectors: tuple[int, ...]) -> tuple[bool, bool]:
    """Return whether an access to A, and to B, may begin inside and end outside the matrix."""
    a_side = problem.m if problem.a_layout == "col" else problem.k
    b_side = problem.k if problem.b_layout == "col" else problem.n
    return a_side % vectors[0] != 0, b_side % vectors[1] != 0


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
