"""The rungs to consider for a problem on the CPU, best first, each with its reason; and families of shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from gemmery import dtypes
from gemmery.cpu.build import (
    SMALL_C,
    block_sides,
    chain,
    direct_columns,
    dots_few_rows,
    packed_kc,
    room_for_copies,
)
from gemmery.cpu.images import halved, product
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.panels import fan
from gemmery.cpu.split import most_alone
from gemmery.cpu.target import (
    DOTS_K,
    FAN,
    SHALLOW,
    Target,
    constants,
    deepest,
    direct_tile,
    dots_columns,
    host,
    k_block,
)
from gemmery.cpu.ukernel import SHORT
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import Rung
from gemmery.problem import Config, Problem
from gemmery.tuples import NamedTuple

_RUNGS = {rung.name: rung for rung in CPU}


class Candidate(NamedTuple):
    """A rung with a config, and the reason for it."""

    rung: Rung
    config: Config
    reason: str


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Yield the rungs that suit this problem on this machine, best first."""
    for name, reason in ranking(problem, host()):
        yield Candidate(_RUNGS[name], _RUNGS[name].default, reason)


def refusal(problem: Problem, candidate: Candidate) -> str:
    """Return the reason why this rung refuses the problem, or ""."""
    return candidate.rung.refusal(problem)


# Rows of A up to which streams are faster from so many bytes of B on, where B is not in L2, however large that is: a
# tile of few rows has too few multiply-adds to wait for B (f32, in us, Zen 4, 20 x 856 x 503: 171, in place 468; with B
# in L2 164 and 154. Emerald Rapids, L2 of 2 MiB, 5 x 256 x 256: 22, 41; 6.0, 5.7. 12 x 362 x 362: 58, 148; 35, 28).
_STREAMED_FROM = ((5, 256 << 10), (32, 512 << 10))
_STREAMED_COLUMNS = 128  # fewer are too short for streams
# Up to such a k, and from so many columns on, 1/8 of the usual C is a large one: tiles down the columns of a C that is
# in no cache wait for its lines (Zen 4, f32, 668 x 751 x 10: 288 us, packed 164, with C in a cache 134 and 119; with 32
# columns packed takes 1.8 times as long).
_SHALLOWEST, _WIDE_C, _SMALLER = 48, 64, 0.125
# A kernel for one shape takes tens of ms to compile, once; fewer products than this are not worth it.
_MANY = 8
# Elements of C up to which products that interleave are computed in place; packing larger ones takes a small part.
_INTERLEAVED = 64**2
# Multiply-adds up to which tiles chosen while compiling are worth it: 8 x 8 x 8 takes 14 ns with them, 19 without.
_TINY = 16**3


def along_batch(problem: Problem) -> bool:
    """Return True where products that interleave are faster by vectors along the batch than one by one."""
    lanes = host().lanes(dtypes.get(problem.dtype).size)
    many = problem.batch >= min(lanes, _MANY) and problem.m * problem.n <= _INTERLEAVED
    return many and not _RUNGS["batched"].refuses(problem)


def specialized(problem: Problem) -> Candidate | None:
    """Return the rung compiled for this problem that is faster than the one for every shape, if there is one."""
    if problem.invariant or problem.semiring or problem.b_layout == "packed":  # some add in another order
        return None
    p, special = problem.by_rows(), list[Candidate]()
    batched, direct = _RUNGS["batched"], _RUNGS["direct"]
    if p.batch >= _MANY and not p.interleaved:
        reason = f"{p.batch} products of one small shape: the loop over them is compiled with it"
        special.append(Candidate(batched, batched.default, reason))
    tiny = p.batch * p.m * p.n * p.k <= _TINY and p.k <= k_block(host()) and 1 not in (p.m, p.n)
    if tiny and not p.interleaved:
        special.append(Candidate(direct, {"specialised": 1}, "so small that choosing tiles takes a part of its time"))
    return next((candidate for candidate in special if not refusal(problem, candidate)), None)


def row_columns(dtype: str) -> int:
    """Return the columns of C up to which one row of it is faster by a register tile than by a pass over B.

    1 x 12 x 700, f32, Zen 5: 0.69 us in a tile, 1.54 by gemv; two tiles take 1.2 to 1.4 times as long as gemv.
    """
    target = host()
    return direct_tile(target)[1] * target.lanes(dtypes.get(dtype).size)


# The constants that limit B for elements of one byte and two.
_NARROW_B = {row.name: f"direct_int{8 * row.size}" for row in dtypes.DTYPES if row.kind in "iu" and row.size <= 2}


def direct_b(target: Target, dtype: str, m: int, n: int) -> float:
    """Return the bytes of B up to which reading it in place is fastest, for m rows of A and n columns of C."""
    usual = constants(target)
    if dtype in _NARROW_B:
        return float(getattr(usual, _NARROW_B[dtype])) + 1
    l2 = target.l2 or 1 << 20
    few = usual.direct_few * l2
    if n >= _STREAMED_COLUMNS and dtype in _RUNGS["streamed"].dtypes:
        few = min([few, *(least for rows, least in _streamed_from(target) if m <= rows)])
    return few if m <= usual.streamed_rows else usual.direct_many * l2


def _streamed_from(target: Target) -> tuple[tuple[int, int], ...]:
    """Return rows of A, and the bytes of B from which on up to so many are faster as streams.

    Tiles of AVX2 have 4 rows, and without a copy each waits for B. Zen 3, us, in memory and in a cache: f64, 12 x 200 x
    300 174, 57, streams 68, 55; f32, 8 x 300 x 256 55, 17; 33, 17; with copies, 32 x 256 x 256 99, 55; 90, 68.
    """
    return ((target.copied - 1, 256 << 10), *_STREAMED_FROM[1:]) if target.isa == "avx2" else _STREAMED_FROM


def _large_c(target: Target, dtype: str, n: int, k: int) -> int:
    """Return the bytes of C above which writing it takes longest, if k is small."""
    smaller = k <= _SHALLOWEST and n >= _WIDE_C and dtype not in _NARROW_B
    return int(constants(target).large_c * (_SMALLER if smaller else 1) * (target.l2 or 1 << 20))


# Sides from which on float16 is faster as halves on the tile unit: Emerald Rapids, one thread, 33 x 32 x 32 0.7 times
# as fast as by vectors, 48 x 48 x 48 1.0, 64 x 64 x 64 1.1. For fewer rows, making halves of a packed B takes longer.
_HALVES_FROM = 48


def _in_halves(problem: Problem, target: Target) -> bool:
    """Return True if float16 is fastest as halves on the tile unit; not where a row must not depend on m."""
    p = problem.by_rows()
    return (
        target.has_tiles
        and p.dtype in _RUNGS["amx_halves"].dtypes
        and min(p.m, p.n, p.k) >= _HALVES_FROM
        and not p.invariant
        and not _RUNGS["amx_halves"].refuses(p)
    )


def _few_columns(problem: Problem, target: Target) -> bool:
    """Return True if dot products along k are fastest; not for a column-major C, whose rows must not depend on m."""
    if problem.invariant or problem.c_layout != "row" or problem.dtype not in ("f32", "f64") or problem.k < DOTS_K:
        return False
    # A row alone and a column-major B is for `gemv`, which reads both in place, too.
    if problem.a_layout != "row" or (problem.m == 1 and problem.b_layout == "col"):
        return False
    return 2 <= problem.n <= dots_columns(target, dtypes.get(problem.dtype).size, problem.b_layout)


def _few_rows(problem: Problem) -> bool:
    """Return True if dot products along k are fastest for few rows by a column-major B, which others would pack.

    Only for so small a C that a row may depend on m, where chains are short (`chain`).

    2 x 512 x 512, f32, Zen 5, us: 26.9 packed, 13.1; f64 52.9, 26.0; 4 x 64 x 64, f32 0.64, 0.62.
    """
    rows = problem.a_layout == "row" and problem.c_layout == "row" and problem.dtype in ("f32", "f64")
    small = problem.m * problem.n <= SMALL_C and problem.k >= DOTS_K and not problem.invariant
    return rows and small and dots_few_rows(problem)


def ranking(problem: Problem, target: Target) -> list[tuple[str, str]]:
    """Return the names of rungs that suit a problem, best first, each with the reason in words."""
    if problem.semiring:
        p, step = problem.by_rows(), f"{problem.semiring}: two instructions in place of a multiply-add"
        small = p.k * p.n * dtypes.get(p.dtype).size < direct_b(target, p.dtype, p.m, p.n) and p.k <= deepest(target)
        return [("direct", f"{step}; B stays in cache")] * small + [("packed", step)]
    if _in_halves(problem, target):
        return [("amx_halves", "float16 as two bfloat16 that add up to it: four products on the tile unit")]
    if problem.b_layout == "packed":
        return [("packed", "B was packed before, in the order in which it is read")]
    one_column = problem.n == 1 and dtypes.get(problem.dtype).kind == "c"  # real ones do not depend on m
    if problem.invariant and (problem.m == 1 < problem.n or one_column):
        return [("packed", "batch_invariant: one row is summed in the order of many")]
    p = problem.by_rows()
    size = dtypes.get(p.dtype).size
    b_bytes, c_bytes = p.k * p.n * size, p.m * p.n * size
    choices = []
    if p.interleaved:
        choices.append(("batched", f"the elements of {p.batch} products are adjacent: vectors run along the batch"))
    if _few_columns(problem, target):
        choices.append(("dots", f"C has {p.n} columns: vectors along k are full, and A is read once"))
    if _few_rows(problem):
        choices.append(("dots", f"C has {p.m} rows: vectors along k are full, and B is read once, unpacked"))
    if p.m == 1 and 1 < p.n <= row_columns(p.dtype) and p.k <= deepest(target):
        choices.append(("direct", f"C is one row of {p.n} columns, which stay in registers"))
    if p.m == 1 or p.n == 1:
        choices.append(("gemv", "one operand is a vector: the matrix is read once, at memory bandwidth"))
    if c_bytes > _large_c(target, p.dtype, p.n, p.k) and (p.k <= SHALLOW or p.dtype in _NARROW_B):
        choices.append(
            ("packed", f"C is {_size(c_bytes)} and k {p.k}: writing C takes longest, and packed writes it in order")
        )
    if b_bytes < direct_b(target, p.dtype, p.m, p.n) and p.k <= deepest(target):
        choices.append(
            ("direct", f"B is {_size(b_bytes)} and stays in cache: packing it would take longer than it saves")
        )
    elif p.m <= constants(target).streamed_rows:
        choices.append(("streamed", f"A has {p.m} rows and B is {_size(b_bytes)}: B is read once instead of packed"))
    choices.append(
        (
            "packed",
            f"B is {_size(b_bytes)}: panels packed in the order in which they are read come close to the FMA peak",
        )
    )
    return choices


def _size(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


# ---- families: what one general kernel serves on one thread, as ranges ----
# A caller that finds a product in a family runs its kernel without a plan: the first family that fits has the kernel
# and the bits of `dispatch.plan`. Products that fit none, such as those cut for threads, are planned one by one.

UNLIMITED = 1 << 62

Range = tuple[int, int]  # inclusive


class Family(NamedTuple):
    """Ranges of m, n and k, and limits of their products, within which one kernel runs on the caller's thread.

    The batch may have any strides, and A, unless its rows must be contiguous; C is row-major. The blocks are those of a
    record of every member.
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
    a_rows: bool = False  # rows of A must be contiguous


def families(dtype: str, out: str, b_layout: str, epilogue: str, scaled: bool, threads: int) -> tuple[Family, ...]:
    """Return the families of an element type and an epilogue, in the order in which they are to be tried.

    Missing kernels are compiled.
    """
    sample = Problem(1, 1, 1, dtype, out, b_layout=b_layout, epilogue=epilogue, scaled=scaled)
    groups = (_dots, _row, _gemv, _direct, _in_halves_from, _packed)
    return tuple(family for group in groups for family in group(sample, threads))


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


def _dots(sample: Problem, threads: int) -> Iterator[Family]:
    """Few columns of C and a long k; then few rows of a small C, by a column-major B."""
    built = _built("dots", sample._replace(m=2, n=2, k=DOTS_K))
    most = dots_columns(host(), dtypes.get(sample.dtype).size, sample.b_layout)
    if built and most > 1:
        rows = (2 if sample.b_layout == "col" else 1, UNLIMITED)
        family = _family(built, rows, (2, most), threads, built[1].blocks(2, 2, DOTS_K))
        yield family._replace(k=(DOTS_K, UNLIMITED), a_rows=True)
        built = _built("dots", sample._replace(m=2, n=most + 1, k=DOTS_K)) if sample.b_layout == "col" else None
        if built:
            blocks, columns = built[1].blocks(2, most + 1, DOTS_K), (most + 1, UNLIMITED)
            family = _family(built, (2, most), columns, threads, blocks, c_elements=SMALL_C)
            yield family._replace(k=(DOTS_K, UNLIMITED), a_rows=True)


def _row(sample: Problem, threads: int) -> Iterator[Family]:
    """One row of C with few columns: with several threads, as short as those of two columns must be."""
    built = _built("direct", sample._replace(m=1, n=2, k=2))
    if built:
        lanes, most = host().lanes(dtypes.get(sample.dtype).size), row_columns(sample.dtype)
        for n in ((2, lanes), (lanes + 1, most)):
            yield _family(built, (1, 1), n, threads, _blocks(sample, n), k=deepest(host()))


def _blocks(sample: Problem, n: Range) -> Blocks:
    """Return the blocks of kernels that do not pack, for so many columns."""
    return Blocks(kc=chain(sample._replace(n=n[0])))


def _gemv(sample: Problem, threads: int) -> Iterator[Family]:
    """One column of C, then one row, of short vectors and of long ones."""
    first = row_columns(sample.dtype) + 1 if _built("direct", sample._replace(m=1, n=2, k=2)) else 2
    for most in (SHORT, UNLIMITED):
        for m, n in (((1, most), (1, 1)), ((1, 1), (first, most))):
            built = _built("gemv", sample._replace(m=min(m[1], 2), n=n[0], k=2))
            if built:
                yield _family(built, m, n, threads, built[1].blocks(m[1], n[1], most), k=most)


def _direct(sample: Problem, threads: int) -> Iterator[Family]:
    """Few columns of C; then few and many rows of A, for which B may be larger and smaller."""
    size, rows_of_streams = dtypes.get(sample.dtype).size, constants().streamed_rows
    streams = _streamed_from(host())
    starts = direct_columns(sample.dtype) if threads > 1 else [2, host().lanes(size) + 1]
    for n in zip(starts, [*(start - 1 for start in starts[1:]), UNLIMITED], strict=True):
        built = _built("direct", sample._replace(m=2, n=n[0], k=2))
        if not built:
            return
        ends = {1, UNLIMITED}
        if host().copied and n[1] == UNLIMITED:
            ends.add(host().copied - 1)
        by_rows = n[1] == UNLIMITED and sample.dtype not in _NARROW_B  # the B of few columns is never large
        if by_rows:
            ends |= {rows_of_streams, *(rows for rows, _ in streams)}
        for before, end in itertools.pairwise(sorted(ends)):
            m = before + 1, end
            blocks = room_for_copies(host(), _blocks(sample, n), m[0], n[1], UNLIMITED, size)
            b_elements = (int(min(direct_b(host(), sample.dtype, least, n[1]) for least in m)) - 1) // size
            bands = [(n, 0)]  # of columns and k; fewer rows have a large C only where B is large
            if by_rows and m[1] > streams[-1][0]:
                bands += [((n[0], _WIDE_C - 1), 0), (n, _SHALLOWEST + 1)]
            for columns, least in bands:
                c_elements = _large_c(host(), sample.dtype, columns[1], least) // size
                limits = {"b_elements": b_elements, "c_elements": c_elements}
                family = _family(built, m, columns, threads, blocks, k=deepest(host()), **limits)
                yield family._replace(k=(least, family.k[1]))


def _in_halves_from(sample: Problem, threads: int) -> Iterator[Family]:
    """float16 on the tile unit."""
    sides = (_HALVES_FROM, UNLIMITED)
    large = sample._replace(m=_HALVES_FROM, n=_HALVES_FROM, k=_HALVES_FROM)
    built = _built("amx_halves", large) if _in_halves(large, host()) else None
    if built:
        types = halved(product(host(), sample))
        blocks = built[1].blocks(*block_sides(host(), types), packed_kc(host(), types))
        kc = blocks.kc if types.sums_apart else blocks.kc * fan(types)
        yield _family(built, sides, sides, threads, blocks)._replace(k=(_HALVES_FROM, kc))


def _packed(sample: Problem, threads: int) -> Iterator[Family]:
    """Any product: the kernel cuts it into blocks as a plan does. k needs no room for sums of C's rows."""
    built = _built("packed", sample._replace(m=2, n=SMALL_C, k=2))  # chains are short in a small C
    if not built:
        return
    types, launch = product(host(), sample), built[1]
    kc = packed_kc(host(), types) // types.parts
    mc, nc = block_sides(host(), types)
    few, blocks = (launch.blocks(rows, nc // types.parts, kc) for rows in (mc, 2 * mc))  # up to mc rows, and more
    most = kc if types.sums_apart else kc * fan(types) if types.rounds else UNLIMITED
    least = 2 if _built("gemv", sample._replace(m=2, n=1, k=2)) else 1
    if sample.dtype not in _NARROW_B and _built("direct", sample._replace(m=2, n=2, k=2)):
        # Of the products that are not in the families of `direct`, those with several threads are cut. With one thread
        # a C of few rows is for `streamed`, and a large one for `direct` unless k is small.
        if threads == 1:
            size = dtypes.get(sample.dtype).size
            streamed = constants().streamed_rows if sample.dtype in _RUNGS["streamed"].dtypes else 1
            rows, columns = (streamed + 1, UNLIMITED), (host().lanes(size) + 1, UNLIMITED)
            yield _family(built, rows, (2, UNLIMITED), 1, blocks, k=min(kc, SHALLOW))
            yield _family(
                built, rows, columns, 1, blocks, k=most, c_elements=_large_c(host(), sample.dtype, 2, 0) // size
            )
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
            limits = {"k": small * FAN, "c_elements": SMALL_C}
            yield _family(built, (m, UNLIMITED), (n, UNLIMITED), threads, blocks._replace(kc=small), **limits)
        yield _family(built, (m, mc), (n, UNLIMITED), threads, few, k=most)
        yield _family(built, (mc + 1, UNLIMITED), (n, UNLIMITED), threads, blocks, k=most)
