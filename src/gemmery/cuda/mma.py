"""How the kernels on tensor cores by mma.sync and ldmatrix are launched."""

from __future__ import annotations

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

# Tiles of a block and of its warps, and the share of the largest one's speed that each reaches where there are many of
# them (one H200, f16, n = 2048).
TILES = (
    (256, 128, 64, 64, 1.00),
    (128, 256, 64, 64, 1.00),
    (128, 128, 64, 64, 0.87),
    (64, 128, 32, 64, 0.66),
    (64, 64, 32, 32, 0.55),
    (64, 32, 32, 16, 0.42),
)
ROW = 128  # bytes of k in a tile
STAGES = 4
PACK_THREADS, PACK_ROWS, PACK_BYTES = 256, 32, 512  # a block of the packing launch: threads, and what it copies


def ldmatrix(problem: Problem, config: Config) -> Geometry:
    """One tile of A and of B at a time."""
    vectors = _elements(problem, 0), _elements(problem, 1)
    ragged = _ragged(problem, vectors)
    return _by_warps("mma_ldmatrix", problem, config, vectors, ragged, stages=1)


def pipelined(problem: Problem, config: Config) -> Geometry:
    """A ring of `stages` tiles of A and of B; operands that cp.async cannot copy are packed by a launch before."""
    config = chosen(problem, config)
    stages = config["stages"]
    if not 2 <= stages <= 8:
        raise RefusedError(f"stages={stages}: a ring has 2 to 8 tiles; 3 or 4 hide the latency of memory")
    size = _size(problem)
    given = _elements(problem, 0), _elements(problem, 1)
    packed = [elements * size < 4 for elements in given]
    vectors = tuple(16 // size if pack else elements for elements, pack in zip(given, packed, strict=True))
    ragged = _ragged(problem, tuple(1 if pack else elements for elements, pack in zip(given, packed, strict=True)))
    bits = packed[0] + 2 * packed[1]
    made = _by_warps("mma_pipelined", problem, config, vectors, ragged, bits, stages=stages)
    return _with_packing(made, problem, bits) if bits and problem.k else made


def chosen(problem: Problem, config: Config) -> Config:
    """The config with a value for what it leaves open (0): the tile with which the product takes least time.

    A multiprocessor computes its share of the tiles one after the other, each in proportion to its area.

    >>> chosen(Problem(1024, 1024, 1024, "f16", "f16"), dict.fromkeys((*SIDES, "stages"), 0))
    {'bm': 64, 'bn': 128, 'bk': 64, 'wm': 32, 'wn': 64, 'stages': 4}
    """
    if all(config.values()):
        return config
    found = device.find("h200" if problem.device == "cpu" else problem.device)
    row, most = ROW, found.limits.shared

    def time(tile: tuple[int, int, int, int, float]) -> float:
        bm, bn, *_, speed = tile
        return -(-tiles(problem, bm, bn)[0] // found.sms) * bm * bn / speed

    bm, bn, wm, wn, _ = min(TILES, key=time)
    if 3 * (bm + bn) * row > most:
        row //= 2
    stages = min(STAGES, most // ((bm + bn) * row))
    ours = {"bm": bm, "bn": bn, "bk": row // _size(problem), "wm": wm, "wn": wn, "stages": stages}
    return {key: config[key] or ours[key] for key in ours}


def _by_warps(
    name: str, problem: Problem, config: Config, vectors: tuple[int, ...], *access: int, stages: int
) -> Geometry:
    """A block of bm x bn, a warp for each wm x wn of it, and `stages` tiles of both operands in shared memory."""
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
    """The same after a launch that copies A (bit 0 of `packed`) and B (bit 1) to rows of whole 16 bytes."""
    size = _size(problem)
    a = (problem.k, problem.m) if problem.a_layout == "col" else (problem.m, problem.k)  # rows, elements of one
    b = (problem.n, problem.k) if problem.b_layout == "col" else (problem.k, problem.n)
    chosen = [operand for bit, operand in enumerate((a, b)) if packed >> bit & 1]
    blocks = sum(-(-rows // PACK_ROWS) * -(-columns * size // PACK_BYTES) for rows, columns in chosen)
    kernel = instance(
        "mma_pipelined_pack",
        replace(problem, epilogue="", scaled=False),
        LAYOUTS[problem.a_layout],
        LAYOUTS[problem.b_layout],
        packed,
    )
    before = Geometry("mma_pipelined.cu", kernel, (problem.batch * blocks, 1, 1), (PACK_THREADS, 1, 1), needs=80)
    scratch = problem.batch * sum(rows * -(-columns * size // 16) * 16 for rows, columns in chosen)
    return replace(made, before=(before,), workspace=scratch)


def _size(problem: Problem) -> int:
    """Bytes of an element of A and B."""
    return 4 if problem.dtype == "f32" else 2


def _elements(problem: Problem, operand: int) -> int:
    """How many elements of A (0), B (1) or C (2) one access takes: one where neighbours are not adjacent."""
    layout = (problem.a_layout, problem.b_layout, problem.c_layout)[operand]
    return 1 if layout == "any" else vector(problem, operand)


def _ragged(problem: Problem, vectors: tuple[int, ...]) -> bool:
    """Whether an access to A or B may begin inside and end outside of it."""
    a_side = problem.m if problem.a_layout == "col" else problem.k
    b_side = problem.k if problem.b_layout == "col" else problem.n
    return a_side % vectors[0] != 0 or b_side % vectors[1] != 0


def _check_tile(bm: int, bn: int, bk: int, wm: int, wn: int, group: int) -> None:
    sides = {"bm": bm, "bn": bn, "bk": bk, "wm": wm, "wn": wn}
    for key, side in sides.items():
        if side < 16 or side & (side - 1):
            raise RefusedError(f"{key}={side}: a side of a swizzled tile is a power of two from 16 on")
    if bm < 32 or bn < 32 or bk < 2 * group or wm > bm or wn > bn:
        text = ", ".join(f"{key}={side}" for key, side in sides.items())
        raise RefusedError(
            f"{text}: a block has at least 32 x 32, warps of it at most its size, and bk two groups of {group}"
        )
