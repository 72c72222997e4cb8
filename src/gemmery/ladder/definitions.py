"""The functions and types that a rung's kernel uses, wherever they are defined: in headers, or in its Python file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from textwrap import dedent

_NOT_CODE = re.compile(r"//.*|\"(?:\\.|[^\"\\])*\"")  # comments and strings of C++
_INCLUDE = re.compile(r'^#include "([\w.]+)"', re.MULTILINE)
LOOPS = "Its loops:\n"  # begins a paragraph of pseudocode
_WORD = re.compile(r"[A-Za-z_]\w*")
_TYPE = re.compile(r"\b(?:struct|enum|using)\s+(\w+)")
_VALUE = re.compile(r"(\w+)\s*=")
_FUNCTION = re.compile(r"(\w+)(?:<[^()]*>)?\s*\(")


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
    known = [Definition(source, node.name, "\n".join(lines[_start(node) : node.end_lineno])) for node in nodes]
    return _reached({entry}, known) or tuple(known)


def docstring(source: str, entry: str) -> list[str]:
    """The docstring of a function of a Python file, or of the file where it has no such function, in paragraphs."""
    tree = ast.parse(contents(source))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry]
    text = ast.get_docstring(functions[0] if functions else tree, clean=False) or ""
    margin = re.compile(r"^    " if functions else "", re.MULTILINE)
    return [margin.sub("", part).rstrip() for part in text.split("\n\n")]


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
    """All definitions of a header."""
    return tuple(Definition(header, _name(text), text) for text in _chunks(contents(header)))


def _chunks(text: str) -> Iterator[str]:
    """The text of each definition at the top level or in a namespace: these are not indented."""
    above: list[str] = []  # the comment
    body: list[str] = []
    depth = 0
    for line in text.replace("\\\n", "").splitlines():  # a macro is one line
        code = _NOT_CODE.sub("", line).rstrip()
        if not body and line.startswith("//"):
            above.append(line)
        elif not body and (not code or code.startswith(("#", "namespace ", "}"))):
            above = []
        else:
            body.append(line)
            depth += sum(map(code.count, "({")) - sum(map(code.count, ")}"))
            if depth == 0 and code.endswith((";", "}")):
                yield "\n".join([*above, *body])
                above, body = [], []


def _name(text: str) -> str:
    """The name of a definition in C++."""
    code = _NOT_CODE.sub("", text).lstrip()
    if code.startswith("template"):
        code = code[_closing(code, "<", ">") :]
    for attribute in ("alignas", "__launch_bounds__"):
        if attribute in code.partition("{")[0]:
            before, _, after = code.partition(attribute)
            code = before + after[_closing(after, "(", ")") :]
    head = code.partition("{")[0]
    match = _TYPE.search(head) or _VALUE.search(head.partition("(")[0]) or _FUNCTION.search(head)
    return match[1] if match else ""


def _closing(code: str, opens: str, closes: str) -> int:
    """The place after the bracket that closes the first one."""
    depth = 0
    for place, character in enumerate(code):
        depth += (character == opens) - (character == closes)
        if character == closes and depth == 0:
            return place + 1
    return 0


def _start(node: ast.FunctionDef | ast.ClassDef) -> int:
    """The line, counted from 0, where a definition and its decorators begin."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1


def _words(text: str) -> set[str]:
    return set(_WORD.findall(_NOT_CODE.sub("", text)))


@lru_cache
def contents(file: str) -> str:
    """The text of a file in the package."""
    return files("gemmery").joinpath(file).read_text(encoding="utf-8")
