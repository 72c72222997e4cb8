"""The part of `new_shapes` that runs in a new process: products of new shapes, then of the same again, next to a rival.

The process prints its times as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from gemmery_lab.measure.processes import Pairs, pairs
from gemmery_lab.measure.work import Work

PASSES = 5  # over all shapes once they are known, in turn with the rival
LONG = 0.5  # seconds of a pass from which it is not repeated


def main(work: dict[str, Any], device: str, rest: float) -> None:
    """Run every product of `work` on "cpu" or a GPU, "cuda:0", and print the seconds of each pass as one line of JSON.

    `rest` is a pause before each repeated pass. `import gemmery` is outside the clock: the suite first_call times it.
    """
    if device != "cpu":
        from gemmery_lab.measure.torch_operands import new_shapes

        convert, theirs, wait = new_shapes(work["dtype"], device)
        products = pairs(Work(**work), convert)
    else:
        import numpy as np

        products, theirs, wait = pairs(Work(**work)), np.matmul, lambda: None  # a product on the CPU has its result
    theirs(*products[0])
    wait()
    import gemmery

    gemmery.matmul  # noqa: B018 (loads the entry)
    first, _ = one_pass(gemmery.matmul, products[:1], wait)
    new, worst = one_pass(gemmery.matmul, products, wait)
    again: list[float] = []
    rival: list[float] = []
    for _ in range(PASSES):
        for function, passes in ((gemmery.matmul, again), (theirs, rival)):
            time.sleep(rest)
            if not passes or passes[-1] < LONG:
                passes.append(one_pass(function, products, wait)[0])
    sys.stdout.write(json.dumps({"first": first, "new": new, "worst": worst, "again": again, "rival": rival}) + "\n")


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
