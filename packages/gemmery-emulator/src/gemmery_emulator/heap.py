"""malloc and free in kernels (CUDA C++ Programming Guide, "Dynamic Global Memory Allocation and Operations").

No address is given twice, so that an access to a freed block is known by its address. `new` and `delete` call both.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gemmery.errors import EmulationError
from gemmery_emulator.machine import Machine, active, report_misuse
from gemmery_emulator.memory import Allocation, Bytes
from gemmery_emulator.op import Flags, Mask, Values
from gemmery_emulator.ptx import Instruction, Line, PtxKernel
from gemmery_emulator.steps import Lowering, Step

LIMIT = 8 << 20  # bytes that may be taken at once: cudaLimitMallocHeapSize, unless a program sets it
TIMES = 16  # addresses for each byte of the limit
ALIGNED = 16  # bytes
APART = 64  # bytes between two blocks
CALLS = ("malloc", "free")


def takes_memory(kernel: PtxKernel) -> bool:
    """Whether a kernel calls malloc() or free()."""
    return any(each.opcode.name == "call" and each.opcode.modifiers[0] in CALLS for each in kernel.instructions)


class Heap:
    """The blocks of a heap, in the order of their addresses."""

    def __init__(self, start: int, limit: int = LIMIT) -> None:
        self.start, self.stop, self.limit, self.used = start, start + TIMES * limit, limit, 0
        self._blocks = [Allocation("the start of the heap", start, 0)]
        self._bounds = np.full((2, 64), start, np.int64)  # where blocks begin and end; 0 for the end of a freed one
        self._written: Bytes = np.zeros(self.stop - start, np.uint8)  # whether a thread has written a byte

    def take(self, size: int, line: Line) -> int:
        """The address of a new block, 0 if the heap is spent."""
        start, number = self._blocks[-1].start + _room(self._blocks[-1].size) + APART, len(self._blocks)
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

    def free(self, address: int, line: Line) -> str:
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
        if 0 < after.start - address <= APART // 2:
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


def call(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """Return the step of a call of malloc(size) or free(pointer)."""
    takes, line = instruction.opcode.modifiers[0] == "malloc", instruction.line
    write = lowering.write(instruction.operands[0], "u64", instruction)
    read = lowering.read(instruction.operands[1], "u64", instruction)

    def step(machine: Machine, mask: Mask) -> None:
        heap, passed, given = (
            machine.memory.heap,
            machine.spread(read(machine.registers)),
            np.zeros(machine.threads, "u8"),
        )
        assert heap is not None
        for thread in active(machine, mask).tolist():
            if takes:
                given[thread] = heap.take(int(passed[thread]), line)
            elif passed[thread] and (wrong := heap.free(int(passed[thread]), line)):
                report_misuse(machine, index, np.array([thread]), wrong)
        write(machine.registers, mask, given)

    return step
