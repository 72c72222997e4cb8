"""Tensor maps: the array that the tensor memory accelerator copies from or to, and the bytes of each box of it.

PTX ISA 9.0, "Tensors", and the CUDA driver's cuTensorMapEncodeTiled. A device's map is made by its driver
and is opaque; the 128 bytes here are the emulator's own.
"""

# No `from __future__ import annotations` here: help() would show annotations as strings.

import operator
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.errors import ArgumentError, EmulationError, LayoutError, brief
from gemmery_emulator.exact import from_bf16, to_bf16
from gemmery_emulator.memory import Global
from gemmery_emulator.op import Flags, Indices

BYTES = 128
ALIGNMENT = 16  # bytes, of the array's address, its strides and the inner side of a box
MOST_DIMENSIONS, LONGEST_BOX = 5, 256
SWIZZLES = (0, 32, 64, 128)  # bytes of a row in which 16-byte pieces are exchanged
_MAGIC = b"gemmery tensor\0\0"
_FORMAT = struct.Struct("<16sQBBBx5I5H5B3x4Q")
BFLOAT16 = "bfloat16"  # the type of ml_dtypes; elsewhere its bits
_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")
TYPES = (*_TYPES, BFLOAT16)
Chunks = NDArray[Any]  # 16 bytes an element


@dataclass(frozen=True)
class TensorMap:
    """An array with the box that one copy moves, for the arguments of `emulate`; made by `tensor_map`."""

    array: NDArray[Any]
    box: tuple[int, ...]
    swizzle: int
    steps: tuple[int, ...]

    def encoded(self, address: int) -> bytes:
        """Return the 128 bytes of the map, for an array at an address."""
        array = self.array
        sides = (sides[::-1] for sides in (array.shape, array.strides[:-1], self.box, self.steps))
        return encoded(address, array.dtype.name, self.swizzle, *sides)


def encoded(
    address: int,
    kind: str,
    swizzle: int,
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    steps: tuple[int, ...],
) -> bytes:
    """Return the 128 bytes of a map; dimensions are ordered from the innermost, which has no stride. `kind` is one of
    TYPES.
    """
    missing = MOST_DIMENSIONS - len(extents)
    sides = (number for numbers in (extents, box, steps) for number in (*numbers, *(1,) * missing))
    fields = _FORMAT.pack(_MAGIC, address, len(extents), TYPES.index(kind), swizzle, *sides, *strides, *(0,) * missing)
    return fields.ljust(BYTES, b"\0")


def tensor_map(
    array: NDArray[Any], box: tuple[int, ...], *, swizzle: int = 0, steps: tuple[int, ...] | None = None
) -> TensorMap:
    """Make a tensor map of an array, for a parameter `const __grid_constant__ CUtensorMap` or a pointer to one.

    `box` is in elements, in the order of the array's shape (a kernel names coordinates in the opposite order);
    `swizzle` is 0, 32, 64 or 128 bytes; with `steps` of s the box has every s-th element of a dimension. The array may
    be a view with gaps, or with other dimensions exchanged, while its last dimension is contiguous. Elements outside
    the array read as zeros and are not written.

    >>> a = np.zeros((200, 128), np.float16)
    >>> tensor_map(a, (64, 64), swizzle=128).box
    (64, 64)

    Raises ArgumentError or LayoutError where cuTensorMapEncodeTiled would refuse.
    """
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"tensor_map: {type(array).__name__} is no array; pass a NumPy array")
    if array.dtype.name not in TYPES or not array.dtype.isnative:
        raise ArgumentError(f"tensor_map: an array of {array.dtype}; a map describes {', '.join(TYPES)}")
    box, steps = _whole("box", box), _whole("steps", (1,) * array.ndim if steps is None else steps)
    if not 1 <= array.ndim <= MOST_DIMENSIONS or not len(box) == len(steps) == array.ndim:
        raise ArgumentError(
            f"box={box}, steps={steps}: the array has {array.ndim} dimensions; give one number for each"
        )
    if any(not 1 <= side <= LONGEST_BOX for side in box) or any(not 1 <= step <= 8 for step in steps) or steps[-1] > 1:
        raise ArgumentError(f"box={box}, steps={steps}: sides are 1 to {LONGEST_BOX}, steps 1 to 8, the last one 1")
    if np.ndim(swizzle) or swizzle not in SWIZZLES:
        raise ArgumentError(f"swizzle={swizzle}: 0, 32, 64 or 128 bytes")
    if array.strides[-1] != array.itemsize or any(step % ALIGNMENT or step < 0 for step in array.strides[:-1]):
        raise LayoutError(
            f"strides {array.strides}: the last dimension must be contiguous, the other strides multiples of 16 bytes "
            "and not negative; of a transposed matrix pass the matrix, and exchange the coordinates"
        )
    if array.size and array.ctypes.data % ALIGNMENT:
        raise LayoutError(f"the array begins {array.ctypes.data % ALIGNMENT} bytes after a multiple of 16: pass a copy")
    row = box[-1] * array.itemsize
    if row % ALIGNMENT or (swizzle and row != swizzle):
        rule = f"{swizzle} with this swizzle" if swizzle else f"a multiple of {ALIGNMENT}"
        raise ArgumentError(f"box={box}: its rows have {row} bytes; the emulator takes {rule}")
    return TensorMap(array, tuple(box), swizzle, tuple(steps))


def _whole(name: str, numbers: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(number) for number in numbers)
    except Exception:  # TypeError, or what an object's own methods raise
        raise ArgumentError(f"{name}={brief(numbers)}: pass a tuple of whole numbers, one for each dimension") from None


@dataclass(frozen=True)
class DecodedMap:
    """A decoded map; dimensions are ordered from the innermost."""

    address: int
    type: str  # one of TYPES
    swizzle: int
    extents: Indices
    strides: Indices  # bytes
    box: Indices
    steps: Indices

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type of an element; for bfloat16 that of its bits."""
        return np.dtype("uint16" if self.type == BFLOAT16 else self.type)

    @property
    def row(self) -> int:
        """Bytes of a box along the innermost dimension."""
        return int(self.box[0]) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of a box, including elements outside the array."""
        sides = -(-self.box[1:] // self.steps[1:])
        return self.row * int(sides.prod())

    @property
    def end(self) -> int:
        """The address after its last element."""
        size = self.dtype.itemsize
        return self.address + int(((self.extents - 1) * self.strides).sum()) + size if self.extents.all() else 0

    def pieces(self, coordinates: Indices, whole: bool = False) -> tuple[Indices, Flags | None, int]:
        """Return the addresses (boxes, pieces) of the boxes at `coordinates` (boxes, dimensions), and a piece's bytes.

        Along the innermost dimension a box begins at a multiple of 16 bytes.
        The mask selects the pieces inside the array; None if all are. With `whole` pieces have 16 bytes and the last
        one of a row may end beyond it, else they are elements where rows are no multiples of 16 bytes.
        """
        size = self.dtype.itemsize
        inner = coordinates[:, 0] * size
        width = ALIGNMENT if whole or int(self.extents[0]) * size % ALIGNMENT == 0 else size
        along = np.arange(0, self.row, width)
        offsets, inside = inner[:, None] + along, None
        if (inner < 0).any() or int(inner.max()) + self.row > int(self.extents[0]) * size:
            inside = (offsets >= 0) & (offsets < int(self.extents[0]) * size)
        for place in range(1, len(self.box)):
            index = coordinates[:, place, None] + np.arange(0, self.box[place], self.steps[place])
            if int(index.min()) < 0 or int(index.max()) >= self.extents[place]:
                valid = (index >= 0) & (index < self.extents[place])
                wide = np.ones_like(offsets, bool) if inside is None else inside
                inside = (valid[:, :, None] & wide[:, None, :]).reshape(len(index), -1)
            elif inside is not None:
                inside = np.tile(inside, (1, index.shape[1]))
            offsets = ((index * self.strides[place])[:, :, None] + offsets[:, None, :]).reshape(len(index), -1)
        return offsets + self.address, inside, width

    def fetch(self, memory: Global, coordinates: Indices) -> tuple[Chunks, int]:
        """Return the boxes as (boxes, pieces of 16 bytes), with zeros outside the array, and the bytes read."""
        addresses, inside, width = self.pieces(coordinates)
        view = memory.view(_PIECES[width], 1)
        if inside is None:
            boxes = view.take(addresses >> width.bit_length() - 1)
            return boxes.view("c16"), boxes.nbytes
        boxes = view.take(np.where(inside, addresses, 0) >> width.bit_length() - 1)
        boxes[~inside] = 0
        return boxes.view("c16"), int(np.count_nonzero(inside)) * width

    def put(self, memory: Global, coordinates: Indices, boxes: Chunks, adds: bool) -> int:
        """Write or add the boxes inside the array; returns the bytes written.

        An H200 writes whole pieces of 16 bytes, also behind the end of a row of other lengths.
        """
        addresses, inside, width = self.pieces(coordinates, whole=not adds)
        if adds:  # element by element
            size, pieces = self.dtype.itemsize, addresses
            addresses = (pieces[:, :, None] + np.arange(0, width, size)).reshape(len(pieces), -1)
            inside, width = None if inside is None else np.repeat(inside, width // size, axis=1), size
        view = memory.view(self.dtype.char if adds else _PIECES[width], 1)
        values = np.ascontiguousarray(boxes).view(view.dtype)
        places = addresses >> width.bit_length() - 1
        if inside is not None:
            places, values = places[inside], values[inside]
        if adds:
            add_in_turn(view, places, values, self.type == BFLOAT16)
        else:
            view[places] = values
        return values.nbytes


def add_in_turn(view: NDArray[Any], places: Indices, values: NDArray[Any], bfloat16: bool) -> None:
    """Add each value to its place, one after the other: a place may occur several times."""
    if bfloat16:
        for place, value in zip(places.reshape(-1), values.reshape(-1), strict=True):
            view[place] = to_bf16(from_bf16(view[place]) + from_bf16(value))
    else:
        np.add.at(view, places, values)


_PIECES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def decoded(data: bytes) -> DecodedMap:
    """Read the 128 bytes that `encoded` made; raises EmulationError for others."""
    magic, address, rank, kind, swizzle, *rest = _FORMAT.unpack_from(data)
    if magic != _MAGIC:
        raise EmulationError(
            "this tensor map was not made by gemmery, and a driver's map is opaque: pass gemmery.tensor_map(array, box)"
        )
    extents, box, steps, strides = rest[:rank], rest[5 : 5 + rank], rest[10 : 10 + rank], rest[15 : 14 + rank]
    itemsize = 2 if TYPES[kind] == BFLOAT16 else np.dtype(TYPES[kind]).itemsize
    sides = (np.array(numbers, np.int64) for numbers in (extents, (itemsize, *strides), box, steps))
    return DecodedMap(address, TYPES[kind], swizzle, *sides)


def swizzled(addresses: Indices, swizzle: int) -> Indices:
    """Return the swizzled address of a byte of shared memory: bits 4 to 6 are combined with those from 7 on by XOR.

    >>> [int(swizzled(np.int64(place), 128)) for place in (0, 128, 1024, 144)]
    [0, 144, 1024, 128]
    """
    if not swizzle:
        return addresses
    places: Indices = addresses ^ ((addresses >> 7 & swizzle // 16 - 1) << 4)
    return places
