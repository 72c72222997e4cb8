"""Names in the host part of a program: of allocations, variables and instances of templates."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gemmery.errors import EmulationError


def allocation_name(name: str, line: int) -> str:
    """The name of an allocation: "d_a (line 12)" of "(void**)&d_a, n * sizeof(float)"."""
    first = re.sub(r"^\s*\([^()]*\*\s*\)|^\s*(reinterpret_cast|static_cast)\s*<[^>]*>", "", name)
    words = re.findall(r"[A-Za-z_]\w*", first.partition(",")[0])
    return f"{words[-1] if words else 'memory'} (line {line})"


def plain(symbol: str) -> str:
    """The last name in a symbol of a variable: "table" of "_ZN3lab5tableE"."""
    piece, at = symbol, re.match(r"_Z(?:N|L|NL)?", symbol)
    if at is None:
        return symbol
    rest = symbol[at.end() :]
    while match := re.match(r"L?(\d+)", rest):
        size = int(match[1])
        piece, rest = rest[match.end() : match.end() + size], rest[match.end() + size :]
    return piece if rest in ("", "E") and not symbol.startswith("_ZN4cuda") else symbol


def instance(name: str, parameters: Sequence[str], pretty: str) -> str:
    """A kernel's name with the arguments of its template, which a compiler of C++ writes after a function's name.

    >>> instance("f", ["T", "N"], "void f(T*) [with T = float; int N = 4]")
    'f<float, 4>'
    """
    if not any(parameters):
        return name
    inside = pretty[pretty.rindex("[") :].removeprefix("[with ").removeprefix("[").removesuffix("]")
    values = []
    for place, parameter in enumerate(parameters, 1):
        called = rf"\b{parameter}" if parameter else f"<template-parameter-1-{place}>"
        piece = re.search(rf"(?:^|[;,] )[^;=]*?{called} = (.*?)(?=; |, \w+ = |$)", inside)
        if not piece or "lambda" in piece[1]:
            raise EmulationError(f"{pretty}: an argument of the template has no name that another compiler knows")
        values.append(piece[1].removeprefix("{").removesuffix("}"))
    return f"{name}<{', '.join(value for value in values if value)}>"
