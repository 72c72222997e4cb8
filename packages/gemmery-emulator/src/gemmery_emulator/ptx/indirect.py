"""Calls through a pointer: the addresses of functions, and which functions a call may reach.

NVIDIA, Parallel Thread Execution ISA 9.0, "Control Flow Instructions: call, .calltargets, .callprototype".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gemmery.errors import EmulationError
from gemmery_emulator.ptx import Opcode, Variable
from gemmery_emulator.ptx.scopes import SIZES, variable

FIRST = 1 << 43  # the address of the first function; there is no memory there
STEP = 4  # bits: functions are 16 bytes apart
SWITCH = "brx.through"  # the opcode of a branch by the address of a function
NAME = "call through"  # of an opcode, whose only modifier is a prototype, or whose modifiers are functions
_PROTOTYPE = re.compile(r"\.callprototype\s*(?:\(([^()]*)\))?\s*_\s*(?:\(([^()]*)\))?.*", re.DOTALL)


def address(number: int) -> int:
    """Return the address of a function by its number."""
    return FIRST + (number << STEP)


def signature(results: Iterable[int], parameters: Iterable[int]) -> str:
    """Return the sizes of results and parameters as text, which only functions of one prototype share.

    >>> signature([4], [8, 4])
    '(4) _ (8, 4)'
    """
    return " _ ".join(f"({', '.join(map(str, sizes))})" for sizes in (results, parameters))


def prototype(text: str) -> str:
    """Read `.callprototype (.param .b32 _) _ (.param .b64 _)` as a signature."""
    match = _PROTOTYPE.fullmatch(text)
    if not match:
        raise EmulationError("this is not a prototype: .callprototype (.param .b32 _) _ (.param .b64 _)")
    return signature(*(map(_size, filter(str.strip, (group or "").split(","))) for group in match.groups()))


def _size(declaration: str) -> int:
    words = declaration.split()
    if words[0] == ".reg" and len(words) == 3 and words[1][1:] in SIZES:
        return SIZES[words[1][1:]]
    return variable(declaration)[0].size


def through(targets: Collection[str]) -> Opcode:
    """Return the opcode of a call through a pointer, to functions by name or to those of a signature."""
    return Opcode(NAME, tuple(targets), (), NAME, "call", "")


def reachable(call: Opcode, signatures: Mapping[str, str]) -> list[str]:
    """Return the functions that a call may reach; `signatures` has those whose address is used."""
    targets = call.modifiers
    return [name for name, own in signatures.items() if name in targets or own in targets]


def case(address: Any) -> Any:
    """Return the place of a function's address in the table of a call, far beyond its end for other addresses."""
    return (address ^ np.uint64(FIRST)) >> np.uint64(STEP)


def with_functions(declared: Variable, functions: Mapping[str, int]) -> Variable:
    """Write the addresses of functions into a variable's initial values."""
    data, others = bytearray(declared.data), []
    for at, name, offset in declared.pointers:
        if name in functions:
            data[at : at + 8] = (functions[name] + offset).to_bytes(8, "little")
        else:
            others.append((at, name, offset))
    return replace(declared, data=bytes(data), pointers=tuple(others))
