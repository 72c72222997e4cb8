"""The rungs to consider for a problem on the CPU, best first, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator

from gemmery import dtypes
from gemmery.cpu.target import SHALLOW, Target, deepest, direct_tile, host, k_block
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
    rung = candidate.rung
    return rung.refuses(problem) if problem.dtype in rung.dtypes else f"it does not support {problem.dtype}"


# From this many times L2 on, reading an unpacked B is slow: a tile that runs down k jumps one row per step. Few rows of
# A read B once and tolerate a larger one; many rows read it again and again.
_DIRECT_FEW = 2.0
_DIRECT_MANY = 1.0
# Intel's cores prefetch within a page, so not down k: f32 with a 2 MiB L2, direct and packed, GFLOP/s:
# 243, 215 at n = 384; 185, 213 at 512; 62, 207 at 1024, where all rows map to one L1 set.
_DIRECT_MANY_INTEL = 0.375
# Up to so many rows a tile has too few multiply-adds to hide that: from 1/4 of L2 on, streams are as fast where B
# is in a cache (4 x 512 x 512, f32, Zen 5: 160 GFLOP/s, direct 136), and twice as fast where it is not (21 against 14).
FEWEST_ROWS = 5
_DIRECT_FEWEST = 0.25
_STREAMED_COLUMNS = 128  # fewer are too short for streams
# Rows of A up to which reading B once, as streams, beats packing it: m = 128 of 2048 x 2048, f32, Zen 4: 109 GFLOP/s
# streamed, 98 packed; see docs/findings/few_rows_on_a_cpu.md.
STREAMED_ROWS = 160
LARGE_C = 4.0  # times L2, from which writing C takes longest in a product with small k
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


def specialised(problem: Problem) -> Candidate | None:
    """Return the rung compiled for this problem that is faster than the one for every shape, if there is one."""
    if problem.invariant or problem.b_layout == "packed":  # some add in another order
        return None
    p = problem.by_rows()
    return next((candidate for candidate in _special(p) if not refusal(problem, candidate)), None)


def _special(p: Problem) -> Iterator[Candidate]:
    batched, direct = _RUNGS["batched"], _RUNGS["direct"]
    if p.interleaved:
        return
    if p.batch >= _MANY:
        reason = f"{p.batch} products of one small shape: the loop over them is compiled with it"
        yield Candidate(batched, batched.default, reason)
    if p.batch * p.m * p.n * p.k <= _TINY and p.k <= k_block(host()) and 1 not in (p.m, p.n):
        yield Candidate(direct, {"specialised": 1}, "so small that choosing tiles takes a part of its time")


def row_columns(dtype: str) -> int:
    """Return the columns of C up to which one row of it is faster by a register tile than by a pass over B.

    1 x 12 x 700, f32, Zen 5: 0.69 us in a tile, 1.54 by gemv; two tiles take 1.2 to 1.4 times as long as gemv.
    """
    target = host()
    return direct_tile(target)[1] * target.lanes(dtypes.get(dtype).size)


def direct_b(target: Target, m: int, n: int) -> float:
    """Return the bytes of B below which reading it in place is fastest, for m rows of A and n columns of C."""
    many = _DIRECT_MANY_INTEL if "Intel" in target.cpu else _DIRECT_MANY
    few = _DIRECT_FEWEST if m <= FEWEST_ROWS and n >= _STREAMED_COLUMNS else _DIRECT_FEW
    return (few if m <= STREAMED_ROWS else many) * (target.l2 or 1 << 20)


def ranking(problem: Problem, target: Target) -> list[tuple[str, str]]:
    """Return the names of rungs that suit a problem, best first, each with the reason in words."""
    if problem.b_layout == "packed":
        return [("packed", "B was packed before, in the order in which it is read")]
    one_column = problem.n == 1 and dtypes.get(problem.dtype).kind == "c"  # real ones do not depend on m
    if problem.invariant and (problem.m == 1 < problem.n or one_column):
        return [("packed", "batch_invariant: one row is summed in the order of many")]
    p = problem.by_rows()
    size, l2 = dtypes.get(p.dtype).size, target.l2 or 1 << 20
    b_bytes, c_bytes = p.k * p.n * size, p.m * p.n * size
    choices = []
    if p.interleaved:
        choices.append(("batched", f"the elements of {p.batch} products are adjacent: vectors run along the batch"))
    if p.m == 1 and 1 < p.n <= row_columns(p.dtype) and p.k <= deepest(target):
        choices.append(("direct", f"C is one row of {p.n} columns, which stay in registers"))
    if p.m == 1 or p.n == 1:
        choices.append(("gemv", "one operand is a vector: the matrix is read once, at memory bandwidth"))
    if c_bytes > LARGE_C * l2 and p.k <= SHALLOW:
        choices.append(
            (
                "packed",
                f"C is {c_bytes >> 20} MiB and k is only {p.k}: writing C takes longest, and packed writes it in order",
            )
        )
    if b_bytes < direct_b(target, p.m, p.n) and p.k <= deepest(target):
        choices.append(
            ("direct", f"B is {_size(b_bytes)} and stays in cache: packing it would take longer than it saves")
        )
    elif p.m <= STREAMED_ROWS:
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
