"""Arguments with arrays inside: structs that hold pointers, and arrays of pointers or of such structs.

A tuple is a struct by value. A list is an array in device memory, passed as its address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.errors import ArgumentError

AddressOf = Callable[[str], int]  # of a name
POINTER = 8  # bytes


def as_array(value: Any) -> Any:
    """Return an object that shares its memory through `__array_interface__` as an array, and others unchanged."""
    if isinstance(value, np.ndarray | np.generic) or not hasattr(value, "__array_interface__"):
        if isinstance(value, tuple | list):
            return type(value)(map(as_array, value)) if type(value) in (tuple, list) else value
        return value
    return np.asarray(value)


def parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and values inside a tuple or list, at any depth; the value itself if it is neither.

    >>> list(parts((1, [2, 3]), "argument 0"))
    [('argument 0.0', 1), ('argument 0.1[0]', 2), ('argument 0.1[1]', 3)]
    """
    if not isinstance(value, tuple | list):
        yield name, value
        return
    for place, part in enumerate(value):
        yield from parts(part, f"{name}.{place}" if isinstance(value, tuple) else f"{name}[{place}]")


def arrays(value: Any, name: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays inside a tuple or list, with their names."""
    return ((each, part) for each, part in parts(value, name) if isinstance(part, np.ndarray))


def lists(value: Any, name: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield the lists of a value, at any depth, with their names."""
    if isinstance(value, list):
        yield name, value
    if isinstance(value, tuple | list):
        for place, part in enumerate(value):
            yield from lists(part, f"{name}.{place}" if isinstance(value, tuple) else f"{name}[{place}]")


def content(value: list[Any], name: str, address: AddressOf) -> bytes:
    """Return the bytes of an array whose elements are pointers or structs of one size."""
    for place, part in enumerate(value):
        if not (part is None or isinstance(part, np.ndarray | tuple | list)):
            raise ArgumentError(
                f"{name}[{place}] is {part!r}: a list is an array of pointers or structs, so pass arrays and tuples in "
                "it, or instead of it a NumPy array of numbers"
            )
    elements = [_member(part, f"{name}[{place}]", address)[0] for place, part in enumerate(value)]
    if len({len(element) for element in elements}) > 1:
        sizes = ", ".join(str(len(element)) for element in elements)
        raise ArgumentError(f"{name} is a list whose elements have {sizes} bytes: pass elements of one type")
    return b"".join(elements)


def struct(value: tuple[Any, ...], name: str, address: AddressOf) -> tuple[bytes, int]:
    """Return the bytes of a struct, its members where a C++ compiler puts them, and its alignment."""
    packed, most = bytearray(), 1
    for place, part in enumerate(value):
        member, alignment = _member(part, f"{name}.{place}", address)
        packed += bytes(-len(packed) % alignment) + member
        most = max(most, alignment)
    return bytes(packed) + bytes(-len(packed) % most), most


def _member(value: Any, name: str, address: AddressOf) -> tuple[bytes, int]:
    """Return the bytes and the alignment of a member of a struct or of an element."""
    if isinstance(value, tuple):
        return struct(value, name, address)
    if value is None:
        return bytes(POINTER), POINTER
    if isinstance(value, np.ndarray | list):
        return address(name).to_bytes(POINTER, "little"), POINTER
    if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.kind != "U":
        return value.tobytes(), value.dtype.alignment
    if isinstance(value, bytes | bytearray):
        return bytes(value), 1
    raise ArgumentError(
        f"{name} is {value!r}, whose size and alignment in a struct are not known: pass a NumPy scalar, such as "
        "numpy.int32(4), an array or a list for a pointer, a tuple for a struct, or bytes"
    )
