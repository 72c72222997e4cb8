"""The instructions that the emulator models, as tables for its document, made from the emulator's own tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from textwrap import fill

from gemmery.emulator import access, atomics, barriers, lower, specials
from gemmery.emulator.ops import TABLE

WIDTH = 120  # of the document's lines
TYPE = re.compile(r"pred|([busf]|bf|tf)(\d+)(x2)?|e\dm\d(x2)?")


def instructions() -> str:
    r"""Every instruction that computes, with its types and modifiers.

    >>> print("\n".join(line for line in instructions().splitlines() if line.startswith("| `popc`")))
    | `popc` | b32, b64 |  | 2 |
    """
    families: dict[str, list[list[str]]] = {}
    for opcode in TABLE:
        name, *words = opcode.split(".")
        families.setdefault(name, []).append(words)
    lines = ["| instruction | types | modifiers | forms |", "| :--- | :--- | :--- | ---: |"]
    for name in sorted(families):
        words = [word for form in families[name] for word in form]
        types = _listed(word for word in words if TYPE.fullmatch(word))
        others = _listed(word for word in words if not TYPE.fullmatch(word))
        lines.append(f"| `{name}` | {types} | {others} | {len(families[name])} |")
    return "\n".join(lines)


def machine() -> str:
    """Lists of the instructions that move data, synchronize or read special registers."""
    kinds: dict[str, list[str]] = {}
    for name, kind in atomics.CHANGES:
        kinds.setdefault(name, []).append(kind)
    changes = "; ".join(f"`{name}` of {', '.join(types)}" for name, types in kinds.items())
    control = _spans(sorted(name for name in lower.ENDS if not name.startswith("bar")))
    return "\n".join(
        _wrapped(line)
        for line in (
            f"- Data, matrices and order: {_spans(name for name in access.HANDLERS if name != 'call')}.",
            f"- Control: {control}; `call` of functions that the text defines, put in its place, and of `printf`.",
            f"- `atom` and `red`: {changes}.",
            f"- Barriers of a block and of a warp: {_spans(sorted(_barriers()))}.",
            f"- Special registers: {_spans(specials.names())}.",
        )
    )


def _wrapped(item: str) -> str:
    return fill(item, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _barriers() -> set[str]:
    every = {*barriers.SYNC, *barriers.ARRIVE, *barriers.REDUCTIONS}
    return {opcode.replace(".cta", "").replace(".aligned", "") for opcode in every}


def _listed(words: Iterable[str]) -> str:
    numbers = {word: [int(one) for one in re.findall(r"\d+", word)] for word in words}
    return ", ".join(sorted(numbers, key=lambda word: (re.sub(r"\d.*", "", word), "x" in word, numbers[word])))


def _spans(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
