"""Families of shapes: what one general kernel of the CPU serves on one thread, as ranges.

A caller that finds a product in a family runs its kernel without a plan: the first family that fits has the kernel and
the bits of `dispatch.plan`. Products that fit none, such as those cut for threads, are planned one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

from gemmery import dtypes
from gemmery.cpu.build import SMALL_C, block_sides, chain, direct_columns, packed_kc, product
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.split import most_alone
from gemmery.cpu.target import FAN, SHALLOW, constants, deepest, host
from gemmery.cpu.ukernel import SHORT
from gemmery.dispatch import cpu
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

UNLIMITED = 1 << 62
_RUNGS = {rung.name: rung for rung in CPU}

Range = tuple[int, int]  # inclusive


class Family(NamedTuple):
    """Ranges of m, n and k, and limits of their products, within which one kernel runs on the caller's thread.

    A and the batch may have any strides, C is row-major. The blocks are those of a record of every member.
    """

    rung: Rung
    launch: Launch
    blocks: Blocks
    m: Range
    n: Range
    k: Range
    b_elements: int  # most k * n
    c_elements: int  # most m * n
    work: int  # most m * n * k * batch


def families(dtype: str, out: str, b_layout: str, epilogue: str, scaled: bool, threads: int) -> tuple[Family, ...]:
    """Return the families of an element type and an epilogue, in the order in which they are to be tried.

    Missing kernels are compiled.
    """
    sample = Problem(1, 1, 1, dtype, out, b_layout=b_layout, epilogue=epilogue, scaled=scaled)
    groups = (_row(sample, threads), _gemv(sample, threads), _direct(sample, threads), _packed(sample, threads))
    return tuple(family for group in groups for family in group)


def _built(name: str, problem: Problem) -> tuple[Rung, Launch] | None:
    """Return a rung and its kernel for a problem; None where it refuses the problem."""
    rung = _RUNGS[name]
    if problem.dtype not in rung.dtypes or rung.refuses(problem):
        return None
    launch = rung.build(problem, rung.default)
    assert isinstance(launch, Launch)
    return rung, launch


def _family(built: tuple[Rung, Launch], m: Range, n: Range, threads: int, blocks: Blocks, **limits: int) -> Family:
    """Return the family of a kernel; with several threads its products are too short for a second one."""
    work = UNLIMITED if threads == 1 else most_alone(built[1].unit, m[0], n[0])
    k = (0, limits.get("k", UNLIMITED))
    b_elements, c_elements = (limits.get(name, UNLIMITED) for name in ("b_elements", "c_elements"))
    return Family(*built, blocks, m, n, k, b_elements, c_elements, work)


def _row(sample: Problem, threads: int) -> Iterator[Family]:
    """One row of C with few columns: with several threads, as short as those of two columns must be."""
    built = _built("direct", sample._replace(m=1, n=2, k=2))
    if built:
        lanes, most = host().lanes(dtypes.get(sample.dtype).size), cpu.row_columns(sample.dtype)
        for n in ((2, lanes), (lanes + 1, most)):
            yield _family(built, (1, 1), n, threads, _blocks(sample, n), k=deepest(host()))


def _blocks(sample: Problem, n: Range) -> Blocks:
    """Return the blocks of kernels that do not pack, for so many columns."""
    return Blocks(kc=chain(sample._replace(n=n[0])))


def _gemv(sample: Problem, threads: int) -> Iterator[Family]:
    """One column of C, then one row, of short vectors and of long ones."""
    first = cpu.row_columns(sample.dtype) + 1 if _built("direct", sample._replace(m=1, n=2, k=2)) else 2
    for most in (SHORT, UNLIMITED):
        for m, n in (((1, most), (1, 1)), ((1, 1), (first, most))):
            built = _built("gemv", sample._replace(m=min(m[1], 2), n=n[0], k=2))
            if built:
                yield _family(built, m, n, threads, built[1].blocks(m[1], n[1], most), k=most)


def _direct(sample: Problem, threads: int) -> Iterator[Family]:
    """Few columns of C; then few and many rows of A, for which B may be larger and smaller."""
    size, l2 = dtypes.get(sample.dtype).size, host().l2 or 1 << 20
    rows_of_streams, c_elements = constants().streamed_rows, int(constants().large_c * l2) // size
    starts = direct_columns(sample.dtype) if threads > 1 else [2, host().lanes(size) + 1]
    for n in zip(starts, [*(start - 1 for start in starts[1:]), UNLIMITED], strict=True):
        built = _built("direct", sample._replace(m=2, n=n[0], k=2))
        if not built:
            return
        few = cpu.FEWEST_ROWS
        rows = [(2, few), (few + 1, rows_of_streams), (rows_of_streams + 1, UNLIMITED)]
        for m in rows if n[1] == UNLIMITED else [(2, UNLIMITED)]:  # the B of few columns is never large
            b_elements = (int(min(cpu.direct_b(host(), least, n[1]) for least in m)) - 1) // size
            limits = {"b_elements": b_elements, "c_elements": c_elements}
            yield _family(built, m, n, threads, _blocks(sample, n), k=deepest(host()), **limits)


def _packed(sample: Problem, threads: int) -> Iterator[Family]:
    """Any product: the kernel cuts it into blocks as a plan does. k needs no room for sums of C's rows."""
    built = _built("packed", sample._replace(m=2, n=SMALL_C, k=2))  # chains are short in a small C
    if not built:
        return
    types, launch = product(host(), sample), built[1]
    kc = packed_kc(host(), types) // types.parts
    mc, nc = block_sides(host(), types)
    blocks = launch.blocks(mc, nc // types.parts, kc)
    most = kc if types.sums_apart else kc * FAN if types.rounds else UNLIMITED
    least = 2 if _built("gemv", sample._replace(m=2, n=1, k=2)) else 1
    if _built("direct", sample._replace(m=2, n=2, k=2)):
        # Of the products that are not in the families of `direct`, those with several threads are cut. With one thread
        # a C of few rows is for `streamed`, and a large one for `direct` unless k is small.
        if threads == 1:
            size, l2 = dtypes.get(sample.dtype).size, host().l2 or 1 << 20
            rows, columns = (constants().streamed_rows + 1, UNLIMITED), (host().lanes(size) + 1, UNLIMITED)
            yield _family(built, rows, (2, UNLIMITED), 1, blocks, k=min(kc, SHALLOW))
            yield _family(built, rows, columns, 1, blocks, k=most, c_elements=int(constants().large_c * l2) // size)
        return
    starts = ((32, 64), (8, 8), (least, least)) if threads > 1 else ((least, least),)
    # Small products need no workspace, so that their calls take 30 ns less.
    side = next(side for side in (48, 32, 16, 1) if not launch.blocks(side, side, side).workspace)
    for m, n in starts:
        if max(m, n) <= side:
            yield _family(built, (m, side), (n, side), threads, blocks._replace(workspace=0), k=side)
    small = chain(sample._replace(m=2, n=2))
    for m, n in starts:
        if small < kc and m * n < SMALL_C:  # those with a short chain come first
            few = blocks._replace(kc=small)
            limits = {"k": small * FAN, "c_elements": SMALL_C}
            yield _family(built, (m, UNLIMITED), (n, UNLIMITED), threads, few, **limits)
        yield _family(built, (m, UNLIMITED), (n, UNLIMITED), threads, blocks, k=most)
