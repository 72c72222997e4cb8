"""Global, shared and local memory of a launch: NumPy buffers that all threads access with one gather or scatter.

A global address is an offset in one buffer; no array is in its first page, so that a null pointer faults. An address in
shared or local memory is an offset in the part of the block or thread. Generic addresses of shared and local memory and
of parameters are in windows far above, as on a device (PTX ISA 9.0, "Generic Addressing").
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.errors import EmulationError
from gemmery_emulator.op import Flags, Mask, Values, highest, lowest

PAGE = 4096
APART = 512  # smallest gap between arrays in bytes, so that an access beyond an end does not reach another array
PIECE = 1 << 20  # bytes that are compared at once
HASHED = 1 << 23  # bytes from which a hash is kept and not a copy: it takes five times as long to compare
SHARED_WINDOW = 1 << 40
LOCAL_WINDOW = 1 << 41
PARAMETER_WINDOW = 1 << 42
LIMIT = 8 << 20  # bytes that malloc() may take at once: cudaLimitMallocHeapSize, unless a program sets it
TIMES = 16  # addresses for each byte of the limit
ALIGNED = 16  # bytes, of its blocks
BETWEEN = 64  # bytes between two blocks

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


class Heap:
    """The blocks of a heap, in the order of their addresses."""

    def __init__(self, start: int, limit: int = LIMIT) -> None:
        self.start, self.stop, self.limit, self.used = start, start + TIMES * limit, limit, 0
        self._blocks = [Allocation("the start of the heap", start, 0)]
        self._bounds = np.full((2, 64), start, np.int64)  # where blocks begin and end; 0 for the end of a freed one
        self._written: Bytes = np.zeros(self.stop - start, np.uint8)  # whether a thread has written a byte

    def take(self, size: int, line: str) -> int:
        """The address of a new block, 0 if the heap is spent."""
        start, number = self._blocks[-1].start + _room(self._blocks[-1].size) + BETWEEN, len(self._blocks)
        if self.used + _room(size) > self.limit:
            return 0
        if start + _room(size) > self.stop:
            most = f"malloc() gives {self.stop - self.start:,} bytes in all, at most"
            raise EmulationError(f"{line}: {most}, freed ones too: take memory once and use it again")
        self.used += _room(size)
        self._blocks.append(Allocation(f"the {size} bytes of malloc() at {line}", start, size))
        if number == self._bounds.shape[1]:
            self._bounds = np.concatenate((self._bounds, self._bounds), axis=1)
        self._bounds[:, number] = start, start + size
        return start

    def free(self, address: int, line: str) -> str:
        """Free a block; returns what is wrong with the address, "" if nothing is."""
        number = int(self._numbers(address))
        block = self._blocks[number]
        if not number or block.start != address:
            return f"frees address {address:#x}, which malloc() did not give: pass what malloc() or new returned"
        if not self._bounds[1, number]:
            return f"frees {block.name}: free it once"
        self._blocks[number], self._bounds[1, number] = replace(block, name=f"{block.name}, freed at {line}"), 0
        self.used -= _room(block.size)
        return ""

    def holds(self, addresses: Values, width: int) -> Flags:
        """Whether each access lies in a block that is not freed."""
        inside: Flags = (addresses >= self.start) & (addresses + width <= self._bounds[1, self._numbers(addresses)])
        return inside

    def nearest(self, address: int) -> Allocation:
        """The block at an address or before it, without bytes if it is freed."""
        number = int(self._numbers(address))
        return self._blocks[number] if self._bounds[1, number] else replace(self._blocks[number], size=0)

    def beyond(self, address: int, width: int) -> str:
        """Why an access is in no block, and what to do about it."""
        number = int(self._numbers(address))
        block, after = self._blocks[number], self._blocks[min(number + 1, len(self._blocks) - 1)]
        if 0 < after.start - address <= BETWEEN // 2:
            return f"address {address:#x}, {after.start - address} bytes before {after.name}; bound the index"
        if (over := address + width - block.stop) <= 0:
            return f"address {address:#x} in {block.name}; free it after its last use"
        return f"address {address:#x}, ending {over} bytes beyond {block.name}; bound the index, or allocate more"

    def unwritten(self, addresses: Values, width: int, reads: bool, writes: bool) -> Values:
        """The accesses, of these, that read bytes which no thread has written."""
        some = np.flatnonzero((addresses >= self.start) & (addresses < self.stop))
        places = (addresses[some] - self.start)[:, None] + np.arange(width)
        empty = some[~self._written[places].all(axis=1)] if reads else some[:0]
        if writes:
            self._written[places] = 1
        return empty

    def _numbers(self, addresses: Values | int) -> Values:
        return np.maximum(np.searchsorted(self._bounds[0, : len(self._blocks)], addresses, side="right") - 1, 0)


def _room(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


class Global(Space):
    """Global memory: all arrays of a launch, and the module's variables.

    Each begins at a multiple of 512 bytes plus `beside` bytes; `behind` them are so many bytes for a heap.
    """

    def __init__(self, sizes: dict[str, int], beside: Mapping[str, int] | None = None, behind: int = 0) -> None:
        self.heap: Heap | None = None  # of malloc() in kernels
        self.launches: Any = None  # by the threads of the kernel that runs
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
