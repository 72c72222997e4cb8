"""Read the element types of a kernel's pointers from its symbol, by the demangler of the system's C++ library.

`_Z3addPKfPfi` is add(float const*, float*, int).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from gemmery.errors import ArgumentError

LIBRARIES = ("libstdc++.so.6", "libc++.so.1", "libc++.1.dylib")
# A pointer or a reference, also to rows: "float const*", "float (*) [4]".
_POINTER = re.compile(r"([\w ]+?)(?: const| volatile)* ?(?:[*&]|&&|\([*&]\) ?(?:\[\w*\])+)(?: const| volatile)*")
_BITS = {"short": "2", "int": "4", "long": "8", "long long": "8"}
_FLOATS = {"float": "float32", "double": "float64", "__half": "float16", "__nv_bfloat16": "bfloat16"}
_HALVES, _SHORTS = {"float16", "bfloat16"}, {"int16", "uint16"}  # each may be passed as the bits of the other
_VECTOR = re.compile(r"(?:(u?)(short|int|long|longlong)|(float|double|__half|__nv_bfloat16))([1-4])(?:_16a|_32a)?")


def pointees(symbol: str) -> tuple[str, ...]:
    """Return the type that each parameter of a function points or refers to; "" if unknown, or not a pointer.

    >>> pointees("_Z1gIfLi4EEvPKT_PS0_i")
    ('float', 'float', '')

    Returns () for a symbol that is not mangled or cannot be read, and on a system without such a library.
    """
    text, depth, ends = demangled(symbol), 0, list[int]()
    for place in reversed(range(len(text) if text.endswith(")") else 0)):  # back from the last bracket to its first
        depth += (text[place] in ")>]") - (text[place] in "(<[")
        if not depth or not ends or (depth == 1 and text[place] == ","):
            ends.append(place)
        if depth == 0:
            break
    parts = [text[start + 1 : stop].strip() for stop, start in pairwise(ends)][::-1]
    matches = [_POINTER.fullmatch(part) for part in parts if part]
    return tuple(match[1] if match else "" for match in matches)


@cache
def _demangler() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The function that writes a mangled name in C++, and the one that frees what it returns."""
    for library in LIBRARIES:
        with suppress(OSError, AttributeError):
            demangle, free = ctypes.CDLL(library).__cxa_demangle, ctypes.CDLL(None).free
            demangle.restype, free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
            return demangle, free
    return None


def demangled(symbol: str) -> str:
    """Return a symbol as C++ writes it; "" for other names."""
    functions = _demangler()
    if functions is None or not symbol.startswith("_Z"):
        return ""
    demangle, free = functions
    written = demangle(symbol.encode(), None, None, None)
    text = ctypes.string_at(written).decode() if written else ""
    free(written)
    return text


def last_name(symbol: str) -> str:
    """Return the last name in the symbol of a variable, or the symbol.

    >>> last_name("_ZN3lab5tableE"), last_name("_ZZ3sumPfE4tile_0"), last_name("table")
    ('table', 'tile', 'table')
    """
    return demangled(symbol).rpartition("::")[2] or symbol


def mismatch(pointee: str, dtype: np.dtype[Any]) -> str:
    """Return the NumPy type that an array for a pointer should have; "" if `dtype` is right, or the type unknown.

    Any pointer takes a structured array; one to integers takes integers of the same size, signed or not; one to 16-bit
    integers takes float16 and bfloat16 too, as their bits.

    >>> mismatch("float", np.dtype("f8")), mismatch("unsigned int", np.dtype("i4")), mismatch("void", np.dtype("f8"))
    ('float32', '', '')
    """
    expected, vector = _numpy(pointee), _VECTOR.fullmatch(pointee)
    if vector and vector[4] in "24" and expected[-2:] == "32" and dtype.itemsize <= 2:
        return ""  # wide copies of short elements
    if not expected or dtype.names is not None or dtype.subdtype is not None or dtype.name.startswith("void"):
        return ""
    if dtype.name == expected or ({dtype.name, expected} & _HALVES and {dtype.name, expected} & _SHORTS):
        return ""
    if dtype.kind == "c":  # pairs of numbers
        return "" if np.dtype(f"f{dtype.itemsize // 2}").name == expected else expected
    alike = dtype.kind in "iumM" and "int" in expected and expected.endswith(f"int{8 * dtype.itemsize}")
    return "" if alike else expected


def check_elements(symbol: str, args: Sequence[Any]) -> None:
    """Compare the types of arrays with those of the pointers of a function; raises ArgumentError."""
    types = pointees(symbol)
    for place, (value, pointee) in enumerate(zip(args, types, strict=True)) if len(types) == len(args) else ():
        expected = mismatch(pointee, value.dtype) if isinstance(value, np.ndarray) else ""
        if expected:
            raise ArgumentError(
                f"argument {place} is an array of {value.dtype}, but the kernel's parameter points to {pointee}: "
                f"pass an array of {expected}, or view its bytes as {expected}"
            )


def _numpy(pointee: str) -> str:
    """Return the NumPy type of a C++ type or of the elements of a vector type; "" if any array may be passed."""
    match = _VECTOR.fullmatch(pointee)
    if match:
        pointee = match[3] or (f"unsigned {match[2]}" if match[1] else match[2]).replace("longlong", "long long")
    pointee = {"__half2": "__half", "__nv_bfloat162": "__nv_bfloat16"}.get(pointee, pointee)
    if pointee in _FLOATS:
        return _FLOATS[pointee]
    size = _BITS.get(pointee.removeprefix("unsigned "))
    return f"{'u' if pointee.startswith('unsigned') else ''}int{8 * int(size)}" if size else ""
