"""Global, shared and local memory of a launch: NumPy buffers that all threads access with one gather or scatter.

A global address is an offset in one buffer; no array is in its first page, so that a null pointer faults. An address in
shared or local memory is an offset in the part of the block or thread. Generic addresses of shared and local memory and
of parameters are in windows far above, as on a device (PTX ISA 9.0, "Generic Addressing").
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gemmery_emulator.op import Mask, Values, highest, lowest

if TYPE_CHECKING:
    from gemmery_emulator.heap import Heap

PAGE = 4096
APART = 512  # smallest gap between arrays in bytes, so that an access beyond an end does not reach another array
PIECE = 1 << 20  # bytes that are compared at once
HASHED = 1 << 23  # bytes from which a hash is kept and not a copy: it takes five times as long to compare
SHARED_WINDOW = 1 << 40
LOCAL_WINDOW = 1 << 41
PARAMETER_WINDOW = 1 << 42

Bytes = NDArray[np.uint8]


def same_bytes(first: Bytes, second: Bytes) -> bool:
    """Whether two arrays of one length have the same bytes; by pieces, as flags of all take as much memory again."""
    pieces = (slice(start, start + PIECE) for start in range(0, len(first), PIECE))
    return all(np.array_equal(first[piece], second[piece]) for piece in pieces)


def remembered(data: Bytes) -> Bytes | bytes:
    """What tells later whether bytes have changed: a copy, or a hash if they are many."""
    return data.copy() if len(data) < HASHED else _digest(data)


def is_as_remembered(data: Bytes, before: Bytes | bytes) -> bool:
    """Whether bytes are those that were kept."""
    if isinstance(before, bytes):
        return _digest(data) == before
    return same_bytes(data, before)


def _digest(data: Bytes) -> bytes:
    """A hash of many bytes; pieces of zeros, of which predicted products consist, take little time."""
    digest = hashlib.sha256()
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        if piece.any():
            digest.update(start.to_bytes(8, "little"))
            digest.update(piece.data)
    return digest.digest()


@dataclass(frozen=True)
class Allocation:
    """An array in global memory."""

    name: str
    start: int
    size: int  # bytes

    @property
    def stop(self) -> int:
        """The address after its last byte."""
        return self.start + self.size


class Space:
    """The bytes of one space for a chunk of blocks; `base` is the offset of each thread's or block's part."""

    def __init__(self, data: Bytes, base: Any = 0) -> None:
        self.data = data
        self.base = base
        self._views: dict[tuple[str, int], NDArray[Any]] = {}

    def view(self, kind: str, count: int) -> NDArray[Any]:
        """Return the memory as elements of a NumPy type, or as rows of `count` elements."""
        view = self._views.get((kind, count))
        if view is None:
            view = self.data.view(kind)
            if count > 1:
                view = view.reshape(-1, count)
            self._views[kind, count] = view
        return view

    def release(self) -> None:
        """Free the memory, at the end of the chunk; cycles keep the space itself until Python collects garbage."""
        self.data, self.base = np.zeros(0, np.uint8), 0
        self._views.clear()

    def _elements(self, addresses: Values, width: int) -> Values:
        """Return the number of the element of `width` bytes at each address."""
        offsets = addresses if isinstance(self.base, int) else addresses + self.base
        return offsets >> width.bit_length() - 1

    def load(self, addresses: Values, kind: str, count: int, width: int) -> list[Any]:
        """Load `count` values per thread from checked addresses; a scalar address gives scalars."""
        index = self._elements(addresses, width)
        view = self.view(kind, count)
        if count == 1:
            return [view.take(index) if index.ndim else view[index]]
        rows = view.take(index, axis=0) if index.ndim else view[index]
        return [rows[..., place].copy() for place in range(count)]

    def store(self, addresses: Values, values: list[Any], mask: Mask, kind: str, width: int, threads: int) -> None:
        """Store the values of the threads in the mask; if several write to one address, the last one remains."""
        index = self._elements(addresses, width)
        if index.ndim == 0:
            index = np.broadcast_to(index, (threads,))
        view = self.view(kind, len(values))
        if mask is not None:
            index = index[mask]
        for place, value in enumerate(values):
            some = value[mask] if mask is not None and value.ndim else value
            if len(values) == 1:
                view[index] = some
            else:
                view[index, place] = some


class Global(Space):
    """Global memory: all arrays of a launch, and the module's variables.

    Each begins at a multiple of 512 bytes plus `beside` bytes; `behind` them are so many bytes for a heap.
    """

    def __init__(self, sizes: dict[str, int], beside: Mapping[str, int] | None = None, behind: int = 0) -> None:
        self.heap: Heap | None = None  # of malloc() in kernels
        self.allocations: list[Allocation] = []
        place = PAGE
        for name, size in sizes.items():
            step = (beside or {}).get(name, 0)
            self.allocations.append(Allocation(name, place + step, size))
            place += -(-max(step + size, 1) // APART) * APART + APART
        self.behind = place
        super().__init__(np.zeros(place + behind + PAGE, np.uint8))
        self.safe = np.int64(0)  # an address that is safe to read, and holds zeros
        self._starts = [allocation.start for allocation in self.allocations]

    @classmethod
    def over(cls, data: Bytes, allocations: Sequence[Allocation]) -> Global:
        """Global memory on bytes that are there, with its arrays in the order of their addresses."""
        memory = cls({})
        memory.data, memory.allocations = data, list(allocations)
        memory._starts = [allocation.start for allocation in allocations]
        memory._views.clear()
        return memory

    def address(self, name: str) -> int:
        """Return the address of an array."""
        return next(allocation.start for allocation in self.allocations if allocation.name == name)

    def bytes(self, name: str) -> Bytes:
        """Return the bytes of an array as a view."""
        allocation = next(allocation for allocation in self.allocations if allocation.name == name)
        return self.data[allocation.start : allocation.stop]

    def nearest(self, address: int) -> Allocation | None:
        """Return the array that holds an address, else the last one before it, else the first one."""
        if self.heap is not None and self.heap.start <= address < self.heap.stop:
            return self.heap.nearest(address)
        if not self.allocations:
            return None
        return self.allocations[max(bisect_right(self._starts, address) - 1, 0)]

    def outside(self, addresses: Values, mask: Mask, width: int) -> Mask:
        """Return a mask of the threads whose access is not within an array; None if there are none."""
        if addresses.ndim == 0:
            allocation = self.nearest(int(addresses))
            inside = allocation is not None and allocation.start <= addresses and addresses + width <= allocation.stop
            return None if inside else np.ones(1, bool)
        low, high = lowest(addresses), highest(addresses)
        allocation = self.nearest(low)
        if allocation is not None and allocation.start <= low and high + width <= allocation.stop:
            return None
        place = np.searchsorted(np.array(self._starts, np.int64), addresses, side="right") - 1
        starts, stops = np.array([(a.start, a.stop) for a in self.allocations] or [(0, 0)], np.int64).T
        place = np.maximum(place, 0)
        bad = (addresses < starts[place]) | (addresses + width > stops[place])
        if self.heap is not None:
            bad &= ~self.heap.holds(addresses, width)
        if mask is not None:
            bad &= mask
        return bad if bad.any() else None


class Own(Space):
    """Shared memory of each block, or local memory of each thread: parts of `size` bytes."""

    def __init__(self, parts: int, size: int, threads: int) -> None:
        self.size = size
        self.stride = -(-max(size, 1) // 128) * 128
        base = np.repeat(np.arange(parts, dtype=np.int64) * self.stride, threads // parts) if parts > 1 else 0
        super().__init__(np.zeros(parts * self.stride, np.uint8), base)
        self.safe = np.int64(0)

    def outside(self, addresses: Values, mask: Mask, width: int) -> Mask:
        """Return a mask of the threads whose access is not within their part; None if there are none."""
        if int(addresses.min()) >= 0 and int(addresses.max()) + width <= self.size:
            return None
        bad = (addresses < 0) | (addresses + width > self.size)
        if mask is not None:
            bad = bad & mask
        return np.atleast_1d(bad) if bad.any() else None
