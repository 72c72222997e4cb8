"""LLVM's types as text: vectors, sizes, suffixes of intrinsics, literals."""

from __future__ import annotations

import struct

from gemmery import dtypes

FLOATS = {row.llvm: row.size for row in map(dtypes.get, dtypes.NAMES) if row.kind == "f"}
SIZES = dtypes.SIZES
_MANGLED = {row.llvm: row.name for row in map(dtypes.get, dtypes.NAMES) if row.kind == "f"} | {"ptr": "p0"}


def vector(lanes: int, element: str) -> str:
    """Return the vector type of `lanes` elements."""
    return f"<{lanes} x {element}>"


def lanes_of(type_: str) -> int:
    """Return the number of elements of a vector type; 1 for a scalar."""
    return int(type_[1:].split(" ", 1)[0]) if type_.startswith("<") else 1


def element_of(type_: str) -> str:
    """Return the element type of a vector type; a scalar type itself."""
    return type_[1:-1].split(" x ")[1] if type_.startswith("<") else type_


def size_of(type_: str) -> int:
    """Return the bytes of a value in memory."""
    return lanes_of(type_) * SIZES[element_of(type_)]


def with_element(type_: str, element: str) -> str:
    """Return the type with the same number of lanes of another element type."""
    return vector(lanes_of(type_), element) if type_.startswith("<") else element


def mangle(type_: str) -> str:
    """Return LLVM's suffix for an overloaded intrinsic of this type: v16f32."""
    element = element_of(type_)
    short = _MANGLED.get(element, element)
    return f"v{lanes_of(type_)}{short}" if type_.startswith("<") else short


def constant(type_: str, number: float) -> str:
    """Return a literal of a scalar type, floats by their bits."""
    if type_ in ("float", "double"):
        value = number
        if type_ == "float":
            value = struct.unpack("<f", struct.pack("<f", number))[0]
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    if type_ == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', number))[0]:04X}"
    if type_ == "bfloat":
        return f"0xR{struct.unpack('<I', struct.pack('<f', number))[0] >> 16:04X}"
    return str(int(number))
