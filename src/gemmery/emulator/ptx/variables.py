"""Declarations of variables in all spaces, of parameters, and their layout.

NVIDIA, Parallel Thread Execution ISA 9.0, "State Spaces", "Types" and "Variables".
"""

from __future__ import annotations

import re
import struct
from dataclasses import replace

from gemmery.emulator.ptx import Variable
from gemmery.emulator.ptx.scopes import integer, number
from gemmery.errors import EmulationError

SIZES = {f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64, 128)} | {"f16x2": 4, "bf16x2": 4}
REGISTERS = frozenset((*SIZES, "pred", "bf16", "tf32"))  # types of registers; which ones are modelled each use decides
LARGEST, MOST_LOCAL = 1 << 38, 512 << 10  # bytes of a variable
_VARIABLE = re.compile(
    r"""(?:\.(?:extern|visible|weak|common)\s+)* \.(?P<space>shared|local|global|const|param)(?:::\w+)? \s*
        (?P<words>(?:\.attribute\s*\([^)]*\)\s*|\.align\s+\d+\s*|\.\w+\s*)+)
        (?P<name>[\w$%]+) \s* (?P<lengths>(?:\[[^\]]*\]\s*)*) (?:=\s*(?P<values>.*))?""",
    re.VERBOSE | re.DOTALL,
)

_POINTER = re.compile(r"(?:generic\((?P<generic>[\w$%.]+)\)|(?P<plain>[A-Za-z_$%][\w$%.]*))(?P<more>[+-]\d+)?")


def variable(text: str) -> tuple[Variable, str]:
    """Read `.shared .align 16 .b8 tile[4096]` as a variable at offset 0; returns it with its type.

    Raises EmulationError for text that is not a declaration.
    """
    match = _VARIABLE.fullmatch(text.strip())
    words = re.findall(r"\.(\w+)(?:\s+(\d+))?", match["words"]) if match else []
    type_ = next((word for word, _ in reversed(words) if word in SIZES), "")
    if not match or not type_:
        raise EmulationError("this is not a declaration: a variable is declared as .shared .align 16 .b8 name[4096]")
    length = next((int(word[1:]) for word, _ in words if word in ("v2", "v4", "v8")), 1)
    align = max(SIZES[type_] * length, 1)
    align = next((int(value or 0) for word, value in words if word == "align" and "ptr" not in dict(words)), align)
    if align < 1 or align & align - 1:
        raise EmulationError(f".align {align}: an alignment must be a power of two")
    data, pointers = _constants(match["values"], type_) if match["values"] else (b"", ())
    for length_text in re.findall(r"\[([^\]]*)\]", match["lengths"]):
        count = integer(length_text.strip()) if length_text.strip() else len(data) // SIZES[type_]
        if count is None:
            raise EmulationError(f"[{length_text}]: a length must be a number")
        length *= count
    size = SIZES[type_] * length
    if size > LARGEST or (match["space"] == "local" and size > MOST_LOCAL):
        raise EmulationError(
            f"{size} bytes are more than a device has: a variable has at most {LARGEST}, a local one {MOST_LOCAL}"
        )
    if len(data) > size:
        raise EmulationError(f"{len(data)} bytes of initial values for {size} bytes")
    data = data.ljust(size, b"\0") if data else b""
    return Variable(match["name"], match["space"], 0, size, align, data, pointers), type_


def laid_out(variables: list[Variable], start: int = 0) -> tuple[dict[str, Variable], int]:
    """Place variables one after the other, aligned; returns them with their size in bytes.

    Variables without a size (`extern .shared x[]`) all begin at the end, at the largest of their alignments, as with
    ptxas.
    """
    placed = {}
    for declared in variables:
        if declared.size:
            offset = -(-start // declared.align) * declared.align
            placed[declared.name] = replace(declared, offset=offset)
            start = offset + declared.size
    align = max((declared.align for declared in variables if not declared.size), default=1)
    start = -(-start // align) * align
    placed |= {declared.name: replace(declared, offset=start) for declared in variables if not declared.size}
    return placed, start


def _constants(text: str, type_: str) -> tuple[bytes, tuple[tuple[int, str, int], ...]]:
    """Read {1, 0x2A, {3, 4}}, 0f3F800000 or generic(x)+4 as bytes of a type, and the addresses in them."""
    packed: list[bytes] = []
    pointers: list[tuple[int, str, int]] = []
    size = SIZES[type_]
    for item in filter(None, ("".join(part.split()) for part in re.split(r"[{},]", text))):
        whole, real = integer(item), number(item)
        pointer = _POINTER.fullmatch(item)
        if type_ in ("f32", "f64") and (real is not None or whole is not None):
            packed.append(struct.pack("<f" if size == 4 else "<d", whole if real is None else real))
        elif whole is not None:
            packed.append((whole % (1 << 8 * size)).to_bytes(size, "little"))
        elif pointer and size == 8:
            pointers.append((size * len(packed), pointer["generic"] or pointer["plain"], int(pointer["more"] or 0)))
            packed.append(bytes(size))
        else:
            raise EmulationError(f"initial value {item}: numbers and addresses of 8 bytes are modelled")
    return b"".join(packed), tuple(pointers)
