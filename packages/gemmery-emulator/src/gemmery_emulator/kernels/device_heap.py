"""Device memory of a program that runs as a whole: allocations that keep their addresses, and managed memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gemmery_emulator.memory import APART, LIMIT, PAGE, TIMES, Allocation, Bytes, Global, Heap

WORD = 8  # bytes of a pointer
FIRST = 1 << 20  # bytes of memory that exist at first


@dataclass
class Managed:
    """Memory that host and device share: the host's array, and its place on the device."""

    host: Bytes
    device: Allocation
    sent: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    @property
    def address(self) -> int:
        """The address on the host, which the program knows."""
        return int(self.host.ctypes.data)

    def __contains__(self, address: int) -> bool:
        return self.address <= address < self.address + max(self.device.size, 1)


class DeviceHeap:
    """Allocations in one buffer of bytes, by address; what is freed is used again."""

    def __init__(self, most: int) -> None:
        self.most, self.top, self.used = most, PAGE, 0
        self.data: Bytes = np.zeros(FIRST, np.uint8)
        self.live: dict[int, Allocation] = {}
        self.freed: dict[int, list[int]] = {}  # addresses by their room
        self.managed: dict[int, Managed] = {}
        self.limit = LIMIT  # bytes that malloc() in kernels may take
        self.of_kernels: Heap | None = None  # where it takes them, once a kernel has called it

    def allocate(self, name: str, size: int) -> Allocation | None:
        """Make an allocation, of zeros; None if there is no memory left."""
        room = -(-max(size, 1) // APART) * APART + APART
        if self.used + size > self.most:
            return None
        start = self.freed[room].pop() if self.freed.get(room) else self.top
        if start == self.top:
            self._grow(room)
        self.data[start : start + size] = 0
        self.live[start] = allocation = Allocation(name, start, size)
        self.used += size
        return allocation

    def open(self) -> None:
        """Make room for malloc() in kernels."""
        self.of_kernels = Heap(self.top, self.limit)
        self._grow(TIMES * self.limit)

    def _grow(self, room: int) -> None:
        self.top += room
        if self.top + PAGE > len(self.data):
            grown = np.zeros(max(2 * len(self.data), self.top + PAGE), np.uint8)
            grown[: len(self.data)] = self.data
            self.data = grown

    def share(self, name: str, size: int, address: int = 0) -> Managed | None:
        """Make memory that the host may use, too, or let the device use the host's at an address."""
        allocation = self.allocate(name, size)
        if allocation is None:
            return None
        if address:
            host = np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)
        else:
            room = np.zeros(size + APART, np.uint8)
            begin = -room.ctypes.data % APART
            host = room[begin : begin + max(size, 1)]
        shared = Managed(host, allocation)
        self.managed[shared.address] = shared
        return shared

    def free(self, address: int) -> bool:
        """Free what begins at an address of the device's, or of managed memory; False if nothing does."""
        shared = self.managed.pop(address, None)
        allocation = self.live.pop(shared.device.start if shared else address, None)
        if allocation is None:
            return False
        self.used -= allocation.size
        room = -(-max(allocation.size, 1) // APART) * APART + APART
        self.freed.setdefault(room, []).append(allocation.start)
        return True

    def holding(self, address: int) -> Allocation | None:
        """The allocation that an address of the device lies in, or at the end of."""
        return next((each for each in self.live.values() if each.start <= address <= each.stop), None)

    def is_device(self, address: int) -> bool:
        """Whether an address lies in the device's memory, whatever is there."""
        return 0 < address < self.top + PAGE

    def translated(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Words in which addresses of managed memory on the host are those on the device."""
        result = words
        for shared in self.managed.values():
            inside = (words >= shared.address) & (words <= shared.address + shared.device.size)
            if inside.any():
                result = result.copy() if result is words else result
                result[inside] = words[inside] - np.uint64(shared.address) + np.uint64(shared.device.start)
        return result

    def send(self) -> None:
        """Copy managed memory to the device, before a launch."""
        for shared in self.managed.values():
            place = self.data[shared.device.start : shared.device.stop]
            place[:] = shared.host[: shared.device.size]
            whole = place[: len(place) // WORD * WORD].view(np.uint64)
            shared.sent = whole[:] = self.translated(whole)
            shared.sent = shared.sent.copy()

    def receive(self) -> None:
        """Copy managed memory back; pointers in it that the kernel has not written stay the host's."""
        for shared in self.managed.values():
            place = self.data[shared.device.start : shared.device.stop]
            host = shared.host[: shared.device.size]
            count = len(place) // WORD * WORD
            words = place[:count].view(np.uint64)
            changed = words != shared.sent
            host[:count].view(np.uint64)[changed] = words[changed]
            host[count:] = place[count:]

    def memory(self, symbols: dict[int, str]) -> Global:
        """The memory of a launch; `named` are the names of variables of its module, by their addresses."""
        memory = Global.over(self.data[: self.top + PAGE], list(self._visible(symbols)))
        memory.heap = self.of_kernels
        return memory

    def _visible(self, symbols: dict[int, str]) -> Iterator[Allocation]:
        for start in sorted(self.live):
            each = self.live[start]
            yield Allocation(symbols[start], start, each.size) if start in symbols else each
