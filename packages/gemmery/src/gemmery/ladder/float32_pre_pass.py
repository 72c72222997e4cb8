"""The launches that split float32 operands into parts, before they are multiplied, and where the parts lie."""

from __future__ import annotations

from dataclasses import replace

from gemmery.cuda.constants import KEPT_PARTS, MOST_PARTS, SPLIT_THREADS, STRIP, STRIP_DEEP
from gemmery.cuda.geometry import C_NAMES, LARGEST_SIDE, Geometry, target, vector
from gemmery.ladder.gpu import beside, whole
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

ROW = 128  # bytes of k in a stage
_BLOCKS = 4  # of the pre-pass on a multiprocessor
# Rows of more k than this have blocks of their own; blocks take several of the others. On an H200 a block for each row
# takes longer at n = 2048; at 4096 it reaches 0.91 of a copy's rate, not 0.82 (benchmarks/float32_pre_pass.py).
_SHORT = 2048
_IN_REGISTERS = ((1024, 1, 4), (4096, 8, 2), (8192, 8, 4), (16384, 8, 8))  # longest row, warps, eights of a thread


class Slab(NamedTuple):
    """How operands are split that do not stay in registers by rows, for k up to `longest`."""

    longest: int
    blocks: int  # of a cluster, which share all k of some sides
    across: int  # lanes, with 4 sides each
    warps: int  # of a block


SLABS = (Slab(512, 1, 4, 8), Slab(1024, 2, 4, 8), Slab(4096, 4, 4, 8), Slab(8192, 8, 4, 8), Slab(LARGEST_SIDE, 8, 2, 8))
# Of more k than this, where four sides are adjacent, strips are split. Between a tile that is measured and one that is
# split there is 1/5 of what the L2 cache holds: 320 tiles on an H100, 384 on an H200. With 300, 400 and 500 an H200
# reaches 0.78, 0.82 and 0.81 of a copy's rate at n = 16384.
_SLABS_TO = 1024
_LAG = 5 * 4 * STRIP * STRIP_DEEP  # bytes of L2 for each of these tiles


# ---- where things lie ----


def _before_marks(problem: Problem) -> int:
    """Return the bytes in front of what is known of sides and of k: the status, and a counter for each strip."""
    return whole(1) + whole(4 * problem.batch * _strips(problem.m, problem.n))


def _strips(*sides: int) -> int:
    return sum(-(-side // STRIP) for side in sides)


def places(problem: Problem) -> tuple[int, int, int, int]:
    """Return where parts of A, parts of B and the workspace end, and the bytes from one row of parts to the next."""
    pitch = whole(2 * problem.k, ROW)
    marks = sum(whole(4 * problem.batch * side) + whole(4 * problem.k) for side in (problem.m, problem.n))
    start = _before_marks(problem) + marks
    a, b = (whole(MOST_PARTS * problem.batch * side * pitch) for side in (problem.m, problem.n))
    return start, start + a, start + a + b, pitch


def in_registers(problem: Problem) -> int:
    """Return the operands of which a row stays in registers: bit 0 stands for A, bit 1 for B."""
    if problem.k > _IN_REGISTERS[-1][0]:
        return 0
    return (problem.a_layout == "row") + 2 * (problem.b_layout == "col")


def _to_split(problem: Problem) -> int:
    """Return the operands that were not split before: bit 0 stands for A, bit 1 for B."""
    return ("a" not in problem.split) + 2 * ("b" not in problem.split)


# ---- launches ----


def _launch(name: str, problem: Problem, grid: int, *parameters: object, source: str = "split_parts") -> Geometry:
    """A launch of the pre-pass."""
    types, needs = ("float", C_NAMES[problem.out]), "griddepcontrol and clusters"
    return beside(source, name, grid, SPLIT_THREADS, *types, *parameters, instructions=needs)


def begin(problem: Problem) -> Geometry:
    """The first launch: what later ones lower or raise."""
    longest = max(problem.m * problem.batch, problem.n * problem.batch, problem.k)
    if not problem.split:
        return _launch("split_begin", problem, -(-longest // SPLIT_THREADS))
    before = 3 - _to_split(problem)
    return _launch("split_join", problem, -(-longest // SPLIT_THREADS), before, source="split_prepared")


def split(problem: Problem, scheme: str, asked_for: bool) -> tuple[Geometry, ...]:
    """The launches that write the parts of A and B; those not `asked_for` do nothing where two parts will do."""
    operands = _to_split(problem) & in_registers(problem)
    rest, launches = _to_split(problem) & ~operands, []
    if operands:
        warps, eights = next(each for longest, *each in _IN_REGISTERS if problem.k <= longest)
        rows = problem.batch * sum(side for bit, side in ((1, problem.m), (2, problem.n)) if operands & bit)
        blocks = -(-rows * warps * 32 // SPLIT_THREADS)
        if problem.k <= _SHORT or not asked_for:  # launches that are not asked for most often have nothing to do
            blocks = min(blocks, _BLOCKS * target(problem).sms)
        launches.append(_launch("split_rows", problem, blocks, scheme, asked_for, operands, warps, eights))
    return (*launches, _split_columns(problem, scheme, asked_for, rest)) if rest else tuple(launches)


def _split_columns(problem: Problem, scheme: str, asked_for: bool, operands: int) -> Geometry:
    """The launch for operands of which no row stays in registers."""
    places = [place for place in (0, 1) if operands >> place & 1]
    sides = [(problem.m, problem.n)[place] for place in places]
    by_sides = problem.a_layout == "col", problem.b_layout == "row"
    # Four rows of A, or columns of B, are adjacent, aligned, and never beyond the last.
    aligned = all(by_sides[place] and vector(problem, place) == 4 for place in places)
    adjacent = aligned and all(side % 4 == 0 for side in sides)
    if adjacent and problem.k > _SLABS_TO:
        deep = -(-problem.k // STRIP_DEEP)
        count = problem.batch * _strips(*sides) * deep
        lag = target(problem).l2 // _LAG
        grid = 2 * (count + min(max(lag, deep), count)) if asked_for else count
        return _launch("split_strips", problem, grid, scheme, asked_for, operands, lag, source="split_strips")
    _, blocks, across, warps = next(each for each in SLABS if problem.k <= each.longest)
    grid = problem.batch * sum(-(-side // (4 * across)) for side in sides) * blocks
    launch = _launch("split_slabs", problem, grid, scheme, asked_for, operands, adjacent, blocks, across, warps)
    return replace(launch, block=(32 * warps, 1, 1), cluster=blocks)


def judging(problem: Problem) -> tuple[Geometry, ...]:
    """Return the launches that split A and B in two parts and judge them, for a C by rows.

    The workspace then begins with `constants.INEXACT`, NOT_FINITE, both or 0.
    """
    guard = _launch("split_guard", problem, -(-problem.k // SPLIT_THREADS))
    return (begin(problem), *split(problem, "TwoParts", asked_for=True), guard)


# ---- one operand, before its products ----


class KeptOperand(NamedTuple):
    """How an operand of `matrices` x `sides` x `depth` is split: it takes the place of B in a product of one row."""

    two: tuple[Geometry, ...]  # launches that write two parts of its elements
    three: tuple[Geometry, ...]  # and three
    workspace: int  # bytes of both
    parts: int  # where they begin there
    each: int  # bytes of one part
    marks: tuple[tuple[int, int], ...]  # of the workspace: the first byte and the number of bytes, of each kind
    nbytes: int  # of five parts and the marks


def kept_operand(problem: Problem) -> KeptOperand:
    """Return the launches that split B, and what of the workspace is kept, in the order of split_prepared.cu.

    The problem has one row, and A is one matrix for the whole batch.
    """
    alone, count = problem._replace(split="a"), problem.batch * problem.n
    first = begin(problem)
    schemes = [(first, *split(alone, scheme, asked_for=True)) for scheme in ("TwoParts", "ThreeParts")]
    pitch = whole(2 * problem.k, ROW)
    largest = _before_marks(problem) + whole(4 * problem.batch) + whole(4 * problem.k)
    smallest = largest + whole(4 * count)
    parts = smallest + whole(4 * problem.k) + whole(MOST_PARTS * pitch)
    marks = ((largest, 4 * count), (smallest, 4 * problem.k), (0, 4))
    nbytes = whole(KEPT_PARTS * count * pitch) + sum(whole(size) for _, size in marks)
    return KeptOperand(
        schemes[0], schemes[1], parts + whole(MOST_PARTS * count * pitch), parts, count * pitch, marks, nbytes
    )
