"""The instructions that the emulator models, as tables for its document, made from the emulator's own tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from textwrap import fill

from gemmery_emulator import atomics, control, specials
from gemmery_emulator.instructions import COMPUTED, OTHERS, opcode

WIDTH = 120  # of the document's lines
TYPE = re.compile(r"pred|([busf]|bf|tf)(\d+)(x2)?|e\dm\d(x2)?")


def instructions() -> str:
    r"""Every instruction that computes, with its types and modifiers.

    >>> print("\n".join(line for line in instructions().splitlines() if line.startswith("| `popc`")))
    | `popc` | b32, b64 |  | 2 |
    """
    families: dict[str, list[list[str]]] = {}
    for spelling in COMPUTED:
        read = opcode(spelling)
        families.setdefault(read.name, []).append([*read.modifiers, *read.types])
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
    of_blocks = {name for name, entry in control.TABLE.items() if isinstance(entry, control.End)}
    ends = _spans(sorted(of_blocks - control.BARRIERS.keys()))
    others = _spans(sorted(OTHERS.keys() - of_blocks - {"call"}))
    read = map(opcode, control.BARRIERS)
    barriers = {barrier.spelling for barrier in read if not {"cta", "aligned"} & {*barrier.modifiers}}
    lines = (
        f"- Data, matrices and order: {others}.",
        f"- Control: {ends}; `call` of the text's functions, by name or through a pointer, and of `printf`.",
        f"- `atom` and `red`: {changes}.",
        f"- Barriers of a block and of a warp: {_spans(sorted(barriers))}.",
        f"- Special registers: {_spans(specials.names())}.",
    )
    return "\n".join(
        fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) for line in lines
    )


def _listed(words: Iterable[str]) -> str:
    numbers = {word: [int(number) for number in re.findall(r"\d+", word)] for word in words}
    return ", ".join(sorted(numbers, key=lambda word: (re.sub(r"\d.*", "", word), "x" in word, numbers[word])))


def _spans(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
