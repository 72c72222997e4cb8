"""What changed from one rung to another: their sources, and what the ladder says of them."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files

from gemmery.errors import ArgumentError, GemmeryError
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung, find
from gemmery.problem import Problem

SIDE = 4096  # of the squares whose launch is compared; a row and a square for a rung that takes vectors
CONTEXT = 3  # lines around a change


@dataclass(frozen=True)
class Fact:
    """One thing that is said of two rungs, as words; "" where it does not hold for one of them."""

    name: str
    old: str
    new: str


@dataclass(frozen=True)
class Difference:
    """What changed between two rungs."""

    old: str
    new: str
    facts: tuple[Fact, ...]  # those that differ
    lines: tuple[str, ...]  # of a unified diff, without line ends; () where the rungs share their source


def diff(old: str, new: str) -> Difference:
    """What changed from the rung `old` to the rung `new`.

    >>> diff("simd_row", "simd_blocked").facts[0].name
    'idea'

    Raises ArgumentError for a rung that is not in the ladder, and for one compared with itself.
    """
    first, second = find((*CPU, *CUDA), old), find((*CPU, *CUDA), new)
    if first is second:
        raise ArgumentError(f"rung {old!r} is compared with itself: name two, as in simt_naive simt_smem")
    before, after = _facts(first), _facts(second)
    pairs = [Fact(name, before.get(name, ""), after.get(name, "")) for name in dict.fromkeys([*before, *after])]
    lines = difflib.unified_diff(
        source(first).splitlines(),
        source(second).splitlines(),
        f"{first.name}, {first.source}",
        f"{second.name}, {second.source}",
        n=CONTEXT,
        lineterm="",
    )
    return Difference(old, new, tuple(pair for pair in pairs if pair.old != pair.new), tuple(lines))


def source(rung: Rung) -> str:
    """The kernel's file; of a file that makes several rungs, the functions that make this one."""
    text = files("gemmery").joinpath(rung.source).read_text(encoding="utf-8")
    if sum(other.source == rung.source for other in CPU) < 2:
        return text
    made = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    kept = _reached(made, rung.name)
    return "\n\n\n".join(ast.get_source_segment(text, made[name]) or "" for name in made if name in kept) + "\n"


def _reached(functions: Mapping[str, ast.FunctionDef], name: str) -> set[str]:
    """A function and those of its file that it calls, directly or not."""
    reached, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        reached.add(one)
        called = {node.id for node in ast.walk(functions[one]) if isinstance(node, ast.Name)}
        waiting += [other for other in called if other in functions and other not in reached]
    return reached


def _facts(rung: Rung) -> dict[str, str]:
    config = {name: str(value) for name, value in rung.default.items()}
    return {
        "idea": rung.idea,
        "parent": rung.parent or "none",
        "dtypes": ", ".join(rung.dtypes),
        **{f"config {name}": value for name, value in config.items()},
        **dict(_launches(rung)),
    }


def _launches(rung: Rung) -> Iterator[tuple[str, str]]:
    """How a GPU rung is launched with its default config for a large product, where it takes one."""
    if rung.geometry is None:
        return
    for m in (SIDE, 1):
        problem = Problem(m, SIDE, SIDE, rung.dtypes[0], rung.dtypes[0], device="h200")
        if rung.refuses(problem):
            continue
        try:
            found = rung.geometry(problem, rung.default)
        except GemmeryError:
            continue
        at = f" at {m} x {SIDE} x {SIDE} {problem.dtype}"
        yield f"grid{at}", _sides(found.grid)
        yield "threads a block", _sides(found.block)
        yield "dynamic shared memory", f"{found.shared} bytes"
        yield "scratch memory", f"{found.workspace} bytes"
        yield "launches", str(1 + len(found.before))
        yield "compute capability", f"sm_{found.needs}{f' ({found.instructions})' if found.instructions else ''}"
        return


def _sides(sides: tuple[int, int, int]) -> str:
    return " x ".join(str(side) for side in sides if side > 1) or "1"
