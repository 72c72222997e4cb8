"""The difference of two rungs, and the functions and types that a rung uses, in headers or in its Python file."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import groupby
from textwrap import dedent

from gemmery.errors import ArgumentError, GemmeryError
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung, find
from gemmery.problem import Problem

SIDE = 4096  # side of the squares whose launches are compared; rungs that take vectors get a row and a square
CONTEXT = 3  # lines around a change
_NOT_CODE = re.compile(r"//.*|\"(?:\\.|[^\"\\])*\"")  # comments and strings of C++
_INCLUDE = re.compile(r'^#include "([\w.]+)"', re.MULTILINE)
LOOPS = "Its loops:\n"  # begins a paragraph of pseudocode
_WORD = re.compile(r"[A-Za-z_]\w*")
_TEMPLATE = re.compile(r"\btemplate\s*<[^{]*?>\s*(?=[a-z_A-Z]+\s)(?!class|typename|int)")
_DIRECTIVE = re.compile(r"^#define(?:\\\n|.)*", re.MULTILINE)
_NAMED = re.compile(r"\b(?!__|decltype|alignas|asm\b)(\w+)\s*(?:(?:<[^<>()]*>\s*)?\(|(?:\[[^]]*\]\s*)*(?:=(?!=)|[;{]))")
_TYPE = re.compile(r"\b(?:struct|enum|using)\s+(?:alignas\(.*\) )?(\w+)")


@dataclass(frozen=True)
class Fact:
    """A property of two rungs in words; "" for a rung that does not have it."""

    name: str
    old: str
    new: str


@dataclass(frozen=True)
class Difference:
    """The difference of two rungs."""

    old: str
    new: str
    facts: tuple[Fact, ...]  # those that differ
    lines: tuple[str, ...]  # a unified diff, then what only one of them uses; () where they share all code


def diff(old: str, new: str) -> Difference:
    """Return what changed from the rung `old` to the rung `new`.

    The files of two GPU kernels, and functions of one Python file, are compared line by line. Definitions in headers,
    and functions of different Python files, are listed whole where only one of the rungs uses them.

    >>> diff("simd_row", "simd_blocked").facts[0].name
    'idea'

    Raises ArgumentError for a rung that is not in the ladder, and for one compared with itself.
    """
    first, second = find((*CPU, *CUDA), old), find((*CPU, *CUDA), new)
    if first is second:
        raise ArgumentError(f"rung {old!r} is compared with itself: name two, as in simt_naive simt_smem")
    before, after = _facts(first), _facts(second)
    pairs = [Fact(name, before.get(name, ""), after.get(name, "")) for name in dict.fromkeys([*before, *after])]
    facts = tuple(pair for pair in pairs if pair.old != pair.new)
    return Difference(old, new, facts, tuple(_lines(first, second)))


def source(rung: Rung) -> str:
    """The text that a rung is compared by: its kernel's file, or the functions of a Python file that make it."""
    if rung.geometry is not None:
        return contents(rung.source)
    return "\n\n\n".join(definition.text for definition in in_python(rung.source, rung.name)) + "\n"


def _lines(old: Rung, new: Rung) -> Iterator[str]:
    both = old.geometry is not None and new.geometry is not None
    if both or old.source == new.source:
        (first, before), (second, after) = ((f"{rung.name}, {rung.source}", source(rung)) for rung in (old, new))
        yield from difflib.unified_diff(before.splitlines(), after.splitlines(), first, second, n=CONTEXT, lineterm="")
    if both or old.source != new.source:
        old_items, new_items = (_used(rung, kernel=not both) for rung in (old, new))
        yield from _listed(
            "-", old.name, [item for item in old_items if item not in new_items and item.file != new.source]
        )
        yield from _listed(
            "+", new.name, [item for item in new_items if item not in old_items and item.file != old.source]
        )


def _used(rung: Rung, kernel: bool) -> list[Definition]:
    """The definitions that a rung is made of, with the file of its GPU kernel where that is asked for."""
    if rung.geometry is not None:
        own = [Definition(rung.source, rung.name, contents(rung.source).rstrip())] if kernel else []
        return [*own, *in_headers(rung.source)]
    # A rung that is built by its parent's function runs its parent's kernel.
    rungs = [row for row in CPU if row is rung or (row.name == rung.parent and row.build is rung.build)]
    return [definition for row in rungs for definition in in_python(row.source, row.name)]


def _listed(sign: str, name: str, definitions: Sequence[Definition]) -> Iterator[str]:
    """Definitions of other files; beside the generator of a CPU rung, only the beginning of what it calls."""
    entry = name in [definition.name for definition in definitions if definition.file.endswith(".py")]
    for file, group in groupby(definitions, key=lambda definition: definition.file):
        yield f"{sign * 3} only {name} uses, {file}"
        for definition in group:
            yield f"@@ {definition.name} @@"
            text = definition.text
            if entry and definition.name != name:
                text = text.partition("\n\n")[0].partition('"""\n')[0].partition(":\n")[0] + ": ..."
            yield from (f"{sign}{line}" for line in text.splitlines())


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
    """The launch of a GPU rung with its default config for a large product that it takes."""
    if rung.geometry is None:
        return
    for m in (SIDE, 1):
        problem = Problem(m, SIDE, SIDE, rung.dtypes[0], rung.dtypes[0], device="h200")
        if rung.refuses(problem):
            continue
        try:
            launch = rung.geometry(problem, rung.default)
        except GemmeryError:
            continue
        at = f" at {m} x {SIDE} x {SIDE} {problem.dtype}"
        yield f"grid{at}", _sides(launch.grid)
        yield "threads per block", _sides(launch.block)
        yield "dynamic shared memory", f"{launch.shared} bytes"
        yield "scratch memory", f"{launch.workspace} bytes"
        yield "launches", str(len(launch.launches))
        yield "compute capability", f"sm_{launch.needs}{f' ({launch.instructions})' if launch.instructions else ''}"
        return


def _sides(sides: tuple[int, int, int]) -> str:
    return " x ".join(str(side) for side in sides if side > 1) or "1"


@dataclass(frozen=True)
class Definition:
    """A function or type of a file, with the comment above it."""

    file: str  # in the package: "cuda/kernels/registers.cuh"
    name: str
    text: str


def in_headers(kernel: str) -> tuple[Definition, ...]:
    """Definitions in headers that a .cu file uses, directly or through others, those of the nearest headers first.

    >>> [each.name for each in in_headers("cuda/kernels/simt_smem.cu") if each.file.endswith("tile.cuh")]
    ['Tile', 'tile_of_block', 'a_or_zero', 'b_or_zero']
    """
    text, folder = contents(kernel), kernel.rpartition("/")[0]
    known = [definition for header in _included(folder, text) for definition in of_header(f"{folder}/{header}")]
    return _reached(_words(text), known)


def in_python(source: str, entry: str) -> tuple[Definition, ...]:
    """Functions and classes of a Python file that `entry` uses; all of them where the file has no such function."""
    text = contents(source)
    lines = text.splitlines()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    first = [min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1 for node in nodes]
    pairs = zip(first, nodes, strict=True)
    known = [Definition(source, node.name, "\n".join(lines[start : node.end_lineno])) for start, node in pairs]
    return _reached({entry}, known) or tuple(known)


@lru_cache
def docstring(source: str, entry: str) -> tuple[str, ...]:
    """The docstring of a function of a Python file, or of the file where it has no such function, in paragraphs."""
    tree = ast.parse(contents(source))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry]
    text = ast.get_docstring(functions[0] if functions else tree, clean=False) or ""
    margin = re.compile(r"^    " if functions else "", re.MULTILINE)
    return tuple(margin.sub("", part).rstrip() for part in text.split("\n\n"))


def pseudocode(source: str, entry: str) -> str:
    """The loops of a CPU rung, which the docstring of its generator has; "" for another source.

    >>> pseudocode("cpu/simple.py", "scalar_naive").splitlines()[:3]
    ['for i in 0..m:', '    for j in 0..n:', '        sum = 0']
    """
    parts = docstring(source, entry) if source.endswith(".py") else ()
    return dedent("\n".join(part.removeprefix(LOOPS) for part in parts if part.startswith(LOOPS)))


def _reached(words: Iterable[str], known: Sequence[Definition]) -> tuple[Definition, ...]:
    """The definitions that `words` name, and those that these name in turn."""
    uses: dict[str, set[str]] = {}
    for definition in known:
        uses.setdefault(definition.name, set()).update(_words(definition.text))
    reached, waiting = set[str](), list(words)
    while waiting:
        name = waiting.pop()
        if name in uses and name not in reached:
            reached.add(name)
            waiting += uses[name]
    return tuple(definition for definition in known if definition.name in reached)


def _included(folder: str, text: str) -> list[str]:
    """The headers that a text includes, breadth first."""
    headers = list(dict.fromkeys(_INCLUDE.findall(text)))
    for header in headers:  # grows while it is walked
        headers += [name for name in _INCLUDE.findall(contents(f"{folder}/{header}")) if name not in headers]
    return headers


@lru_cache
def of_header(header: str) -> tuple[Definition, ...]:
    """All definitions of a header, whole lines with the comment above them."""
    definitions, lines, depth = list[Definition](), list[str](), 0
    for line in _DIRECTIVE.sub("#", contents(header)).splitlines():
        code = _NOT_CODE.sub("", line).rstrip()
        if not lines and (not line or line.startswith(("}", "namespace", 'extern "C" {'))):
            continue
        if not depth and line.startswith("#"):
            lines = []
            continue
        if not line or (line.startswith("//") and any(_NOT_CODE.sub("", each) for each in lines)):
            lines = lines if depth else []  # a comment that stands by itself
        lines += [line] if line or depth else []
        depth += sum(map(code.count, "({")) - sum(map(code.count, ")}"))
        if lines and not depth and code.endswith((";", "}")):
            text = "\n".join(lines)
            head = _TEMPLATE.sub("", "\n".join(_NOT_CODE.sub("", each) for each in lines)).partition("{")[0]
            match = _TYPE.search(head) or _NAMED.search(head)
            definitions += [Definition(header, match[1], text)] if match else []
            lines = []
    return tuple(definitions)


def _words(text: str) -> set[str]:
    return set(_WORD.findall(_NOT_CODE.sub("", text)))


@lru_cache
def contents(file: str) -> str:
    """The text of a file in the package."""
    return files("gemmery").joinpath(file).read_text(encoding="utf-8")
