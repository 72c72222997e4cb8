"""malloc and free in kernels (CUDA C++ Programming Guide, "Dynamic Global Memory Allocation and Operations").

No address is given twice, so that an access to a freed block is known by its address. `new` and `delete` call both.
"""

from __future__ import annotations

import numpy as np

from gemmery_emulator.device_launch import BUFFERS
from gemmery_emulator.machine import Machine, active, report_misuse
from gemmery_emulator.op import Mask
from gemmery_emulator.ptx import Instruction, PtxKernel
from gemmery_emulator.steps import Lowering, Step

CALLS = ("malloc", "free")


def takes_memory(kernel: PtxKernel) -> bool:
    """Whether a kernel calls malloc() or free(), or takes buffers for the parameters of kernels that it launches."""
    names = (*CALLS, *BUFFERS)
    return any(each.opcode.name == "call" and each.opcode.modifiers[0] in names for each in kernel.instructions)


def call(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """Return the step of a call of malloc(size) or free(pointer)."""
    takes, line = instruction.opcode.modifiers[0] == "malloc", str(instruction.line)
    write = lowering.write(instruction.operands[0], "u64", instruction)
    read = lowering.read(instruction.operands[1], "u64", instruction)

    def step(machine: Machine, mask: Mask) -> None:
        heap, passed = machine.memory.heap, machine.spread(read(machine.registers))
        pointers = np.zeros(machine.threads, np.uint64)
        assert heap is not None
        for thread in active(machine, mask).tolist():
            if takes:
                pointers[thread] = heap.take(int(passed[thread]), line)
            elif passed[thread] and (wrong := heap.free(int(passed[thread]), line)):
                report_misuse(machine, index, np.array([thread]), wrong)
        write(machine.registers, mask, pointers)

    return step
