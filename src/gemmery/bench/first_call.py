"""How the records of a first product are labelled, and its time in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COLD, WARM = "gm.matmul, cold cache", "gm.matmul, warm cache"
IMPORT, PLAN, COMPILE, LOAD, REST, NEXT = "import", "plan", "compile", "load", "the rest", "the next call"
PIECES = (IMPORT, PLAN, COMPILE, LOAD, REST, NEXT)  # cases of records; all but the last add up to the first product
Span = Sequence[int]  # begin and end


def pieces(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each piece of a first product, from the nanoseconds that its process noted.

    `found` has the times of "import", "call" and "next", and `spans` of planning, of loading images and, within that,
    of LLVM. Spans of several threads may overlap: what counts is the time in which any of them did it.

    >>> spans = {"plan": [(0, 50)], "load": [(10, 20), (30, 40)], "compile": [(31, 39)]}
    >>> taken = pieces({"import": 5, "call": 60, "next": 1, "spans": spans})
    >>> {name: round(1e9 * value) for name, value in taken.items()}
    {'import': 5, 'plan': 30, 'compile': 10, 'load': 10, 'the rest': 10, 'the next call': 1}
    """
    plan, load, llvm = (found["spans"][name] for name in ("plan", "load", "compile"))
    compiled = [one for one in load if any(one[0] <= begin and end <= one[1] for begin, end in llvm)]
    parts = (_covered(compiled), _covered([*compiled, *load]), _covered([*compiled, *load, *plan]))
    taken = {
        IMPORT: found["import"],
        PLAN: parts[2] - parts[1],
        COMPILE: parts[0],
        LOAD: parts[1] - parts[0],
        REST: found["call"] - parts[2],
        NEXT: found["next"],
    }
    return {name: value / 1e9 for name, value in taken.items()}


def _covered(spans: Iterable[Span]) -> int:
    """Return the time that spans cover together."""
    total = last = 0
    for begin, end in sorted(map(tuple, spans)):
        total += max(end - max(begin, last), 0)
        last = max(last, end)
    return total
