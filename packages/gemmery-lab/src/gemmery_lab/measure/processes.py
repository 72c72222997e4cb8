"""What processes of their own time: first products in pieces, and products of new shapes; how records are labeled."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gemmery import dtypes
from gemmery_lab.measure.work import Work, numpy_dtype

EMPTY, WARM, MET = "empty cache", "warm cache", "met before"
FIRST, REST, WORST = "first product", "after the first product", "worst later call"
CASES = (EMPTY, WARM, MET)  # totals over all shapes
# Cases that are compared with the rival: with its total, the worst call with its worst.
COMPARED = (EMPTY, WARM, f"{WARM}, {REST}", MET, f"{WARM}, {WORST}")
Pairs = Sequence[tuple[Any, Any]]
PASSES = 5  # over all shapes once they are known, in turn with the rival
LONG = 0.5  # seconds of a pass from which it is not repeated


def shapes(work: Work) -> list[tuple[int, int, int]]:
    """Return (m, n, k) of `batch` products, each side 2**u with u uniform from 0 to log2 of the side of `work`.

    >>> shapes(Work(1024, 1024, 1024, "f32", "f32", batch=2, seed=5))
    [(265, 270, 35), (7, 1, 14)]
    """
    sides = 2 ** np.random.default_rng(work.seed).uniform(0, np.log2(work.m), (work.batch, 3))
    return [(int(m), int(n), int(k)) for m, n, k in sides]


def pairs(work: Work, convert: Callable[[Any], Any] = lambda array: array) -> Pairs:
    """Return operands of each shape, cut from one matrix; `convert` makes a library's array of NumPy's."""
    rng, side = np.random.default_rng(work.seed), work.m
    if dtypes.get(work.dtype).kind in "iu":
        every = rng.integers(-9, 9, (side, side)).astype(numpy_dtype(work.dtype))
    else:
        every = rng.standard_normal((side, side), np.float32).astype(numpy_dtype(work.dtype))
    return [(convert(every[:m, :k].copy()), convert(every[:k, :n].copy())) for m, n, k in shapes(work)]


def flops(work: Work) -> int:
    """Return the operations of all products."""
    return sum(2 * m * n * k for m, n, k in shapes(work))


def run_new_shapes(ours: Any, work: dict[str, Any], device: str, rest: float) -> None:
    """Run every product of `work` on "cpu" or a GPU, "cuda:0", then again in turn with a rival; print JSON of seconds.

    `ours` is the package gemmery, whose import is outside the clock: the suite first_call times it. `rest` is a pause
    before each repeated pass.
    """
    if device != "cpu":
        from gemmery_lab.measure.torch_operands import new_shapes

        convert, theirs, wait = new_shapes(device)
        products = pairs(Work(**work), convert)
    else:
        products, theirs, wait = pairs(Work(**work)), np.matmul, lambda: None  # a product on the CPU has its result
    theirs(*products[0])
    wait()
    ours.matmul  # noqa: B018 (loads the entry)
    first, _ = one_pass(ours.matmul, products[:1], wait)
    new, worst = one_pass(ours.matmul, products, wait)
    again: list[tuple[float, float]] = []
    rival: list[tuple[float, float]] = []
    for _ in range(PASSES):
        for function, passes in ((ours.matmul, again), (theirs, rival)):
            time.sleep(rest)
            if not passes or passes[-1][0] < LONG:
                passes.append(one_pass(function, products, wait))
    totals = {name: [total for total, _ in each] for name, each in (("again", again), ("rival", rival))}
    # The rival's longest call is that of its first pass, as ours is of the pass of new shapes.
    times = {"first": first, "new": new, "worst": worst, "rival worst": rival[0][1], **totals}
    sys.stdout.write(json.dumps(times) + "\n")


def one_pass(function: Callable[[Any, Any], object], pairs: Pairs, wait: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of all products, each until its result is there, and those of the longest."""
    total = worst = 0
    for a, b in pairs:
        start = time.perf_counter_ns()
        function(a, b)
        wait()
        elapsed = time.perf_counter_ns() - start
        total, worst = total + elapsed, max(worst, elapsed)
    return total / 1e9, worst / 1e9


COLD_CACHE, WARM_CACHE = "gm.matmul, cold cache", "gm.matmul, warm cache"  # kernels of records
# Cases of records; all but the last add up to the first product.
PIECES = ("import", "plan", "compile", "load", "the rest", "the next call")
Interval = Sequence[int]  # begin and end


def pieces(times: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each piece of a first product, from the nanoseconds that its process noted.

    `times` has those of "import", "call" and "next", and `spans` of planning, of loading images and, within that,
    of LLVM. Spans of several threads may overlap: what counts is the time in which any of them did it.

    >>> spans = {"plan": [(0, 50)], "load": [(10, 20), (30, 40)], "compile": [(31, 39)]}
    >>> seconds = pieces({"import": 5, "call": 60, "next": 1, "spans": spans})
    >>> {name: round(1e9 * value) for name, value in seconds.items()}
    {'import': 5, 'plan': 30, 'compile': 10, 'load': 10, 'the rest': 10, 'the next call': 1}
    """
    plan, load, llvm = (times["spans"][name] for name in ("plan", "load", "compile"))
    compiled = [span for span in load if any(span[0] <= begin and end <= span[1] for begin, end in llvm)]
    covered = (_covered(compiled), _covered([*compiled, *load]), _covered([*compiled, *load, *plan]))
    planned, loaded, rest = covered[2] - covered[1], covered[1] - covered[0], times["call"] - covered[2]
    parts = times["import"], planned, covered[0], loaded, rest, times["next"]
    return {name: value / 1e9 for name, value in zip(PIECES, parts, strict=True)}


def _covered(spans: Iterable[Interval]) -> int:
    """Return the time that spans cover together."""
    total = last = 0
    for begin, end in sorted(map(tuple, spans)):
        total += max(end - max(begin, last), 0)
        last = max(last, end)
    return total
