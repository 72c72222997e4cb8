"""How the records of a first product are labelled, and its time in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COLD, WARM = "gm.matmul, cold cache", "gm.matmul, warm cache"
IMPORT, PLAN, COMPILE, LOAD, REST, NEXT = "import", "plan", "compile", "load", "the rest", "the next call"
PIECES = (IMPORT, PLAN, COMPILE, LOAD, REST, NEXT)  # cases of records; all but the last add up to the first product
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
    parts = {
        IMPORT: times["import"],
        PLAN: covered[2] - covered[1],
        COMPILE: covered[0],
        LOAD: covered[1] - covered[0],
        REST: times["call"] - covered[2],
        NEXT: times["next"],
    }
    return {name: value / 1e9 for name, value in parts.items()}


def _covered(spans: Iterable[Interval]) -> int:
    """Return the time that spans cover together."""
    total = last = 0
    for begin, end in sorted(map(tuple, spans)):
        total += max(end - max(begin, last), 0)
        last = max(last, end)
    return total
