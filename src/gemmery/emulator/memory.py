"""Global, shared and local memory of a launch, as NumPy buffers that all threads reach with one gather or scatter.

A global address is an offset in one buffer whose first page no array has, so that a null pointer faults. An address in
shared or local memory is an offset in the block's or the thread's own part. Generic addresses of shared and local
memory and of parameters lie in windows far above, as they do on a device (PTX ISA 9.0, "Generic Addressing").
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.emulator.op import Mask, Values

PAGE = 4096
APART = 512  # bytes between arrays at least: what runs over an end meets no other array
SHARED_WINDOW = 1 << 40
LOCAL_WINDOW = 1 << 41
PARAMETER_WINDOW = 1 << 42

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Allocation:
    """An array in global memory."""

    name: str
    start: int
    size: int  # bytes

    @property
    def stop(self) -> int:
        """The first byte after it."""
        return self.start + self.size


class Space:
    """Bytes of one space for the threads of a chunk: `base` is what a thread's or block's own part adds."""

    def __init__(self, data: Bytes, base: Any = 0) -> None:
        self.data = data
        self.base = base
        self._views: dict[tuple[str, int], NDArray[Any]] = {}

    def view(self, kind: str, count: int) -> NDArray[Any]:
        """The same memory as elements of a NumPy type, or as rows of `count` of them."""
        found = self._views.get((kind, count))
        if found is None:
            found = self.data.view(kind)
            if count > 1:
                found = found.reshape(-1, count)
            self._views[kind, count] = found
        return found

    def load(self, addresses: Values, kind: str, count: int, width: int) -> list[Any]:
        """`count` values a thread from checked addresses; a scalar address gives scalars."""
        index = (addresses + self.base) >> width.bit_length() - 1
        view = self.view(kind, count)
        if count == 1:
            return [view.take(index) if index.ndim else view[index]]
        rows = view.take(index, axis=0) if index.ndim else view[index]
        return [rows[..., place].copy() for place in range(count)]

    def store(self, addresses: Values, values: list[Any], mask: Mask, kind: str, width: int, threads: int) -> None:
        """Write a value of each thread of the mask; of threads that write one place the last one stays."""
        index = (addresses + self.base) >> width.bit_length() - 1
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
    """All arrays of a launch, and the module's variables.

    Each begins at a multiple of 512 bytes, or `beside` bytes after one.
    """

    def __init__(self, sizes: dict[str, int], beside: Mapping[str, int] | None = None) -> None:
        self.allocations: list[Allocation] = []
        place = PAGE
        for name, size in sizes.items():
            step = (beside or {}).get(name, 0)
            self.allocations.append(Allocation(name, place + step, size))
            place += -(-max(step + size, 1) // APART) * APART + APART
        super().__init__(np.zeros(place + PAGE, np.uint8))
        self.safe = np.int64(0)  # an address that may be read: zeros
        self._starts = [one.start for one in self.allocations]

    def address(self, name: str) -> int:
        """Where an array begins."""
        return next(one.start for one in self.allocations if one.name == name)

    def bytes(self, name: str) -> Bytes:
        """The bytes of an array, to be written or read."""
        one = next(one for one in self.allocations if one.name == name)
        return self.data[one.start : one.stop]

    def nearest(self, address: int) -> Allocation | None:
        """The array that holds an address, or ends last before it, or is the first after it."""
        if not self.allocations:
            return None
        return self.allocations[max(bisect_right(self._starts, address) - 1, 0)]

    def outside(self, addresses: Values, mask: Mask, width: int) -> Mask:
        """Threads that reach beyond an array; None when there are none."""
        if addresses.ndim == 0:
            one = self.nearest(int(addresses))
            inside = one is not None and one.start <= addresses and addresses + width <= one.stop
            return None if inside else np.ones(1, bool)
        low, high = int(addresses.min()), int(addresses.max())
        one = self.nearest(low)
        if one is not None and one.start <= low and high + width <= one.stop:
            return None
        place = np.searchsorted(np.array(self._starts, np.int64), addresses, side="right") - 1
        starts, stops = np.array([(a.start, a.stop) for a in self.allocations] or [(0, 0)], np.int64).T
        place = np.maximum(place, 0)
        bad = (addresses < starts[place]) | (addresses + width > stops[place])
        if mask is not None:
            bad &= mask
        return bad if bad.any() else None


class Own(Space):
    """Shared memory of each block, or local memory of each thread: `size` bytes that begin `base` bytes on."""

    def __init__(self, parts: int, size: int, threads: int) -> None:
        self.size = size
        self.stride = -(-max(size, 1) // 128) * 128
        base = np.repeat(np.arange(parts, dtype=np.int64) * self.stride, threads // parts) if parts > 1 else 0
        super().__init__(np.zeros(parts * self.stride, np.uint8), base)
        self.safe = np.int64(0)

    def outside(self, addresses: Values, mask: Mask, width: int) -> Mask:
        """Threads that reach beyond their part; None when there are none."""
        if int(addresses.min()) >= 0 and int(addresses.max()) + width <= self.size:
            return None
        bad = (addresses < 0) | (addresses + width > self.size)
        if mask is not None:
            bad = bad & mask
        return np.atleast_1d(bad) if bad.any() else None
