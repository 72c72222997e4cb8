"""Launches from kernels (dynamic parallelism): CUDA C++ Programming Guide, "CUDA Dynamic Parallelism".

A compiler turns `child<<<grid, block>>>(x)` in a kernel into a call that gives a buffer for the parameters, stores to
it, and a call that launches. Children run in the order of their launches when the blocks that run together with their
parent have ended, those of cudaStreamTailLaunch when the whole grid has: a device may start others earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemmery.errors import EmulationError
from gemmery_emulator.machine import LaunchConfig, Machine, active, report_misuse
from gemmery_emulator.op import Mask
from gemmery_emulator.ptx import Instruction, PtxKernel
from gemmery_emulator.steps import Lowering, Step

# What gives a buffer for parameters, what launches, and what returns the latest error.
BUFFERS, STARTS, ERRORS = (
    tuple(prefix + name for prefix in ("__cudaCDP2", "cuda") for name in names)
    for names in (("GetParameterBufferV2",), ("LaunchDeviceV2",), ("GetLastError", "PeekAtLastError"))
)
CALLS = (*BUFFERS, *STARTS, *ERRORS)
DEEPEST = 24  # launches within each other, as on a device
MOST = 2048  # launches that wait at once: cudaLimitDevRuntimePendingLaunchCount, unless a program sets it
TAIL = 3  # cudaStreamTailLaunch
REFUSED = 1  # cudaErrorInvalidValue


@dataclass(frozen=True)
class DeviceLaunch:
    """A launch by a thread."""

    kernel: str
    launch: LaunchConfig
    is_tail: bool


@dataclass
class Launches:
    """The launches of the kernel that runs: the buffers that its threads have, and what has not started."""

    program: Callable[[str], Any]  # a LoweredKernel of the same module
    buffers: dict[int, tuple[str, LaunchConfig]] = field(default_factory=dict)
    waiting: list[DeviceLaunch] = field(default_factory=list)


def launches(kernel: PtxKernel) -> bool:
    """Whether a kernel may launch others."""
    return any(each.opcode.name == "call" and each.opcode.modifiers[0] in STARTS for each in kernel.instructions)


def call(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """Return the step of a call for a buffer or a launch, or for the latest error, which is none."""
    name, line = instruction.opcode.modifiers[0], str(instruction.line)
    result, *passed = instruction.operands
    kind = "u64" if name in BUFFERS else "u32"
    write = lowering.write(result, kind, instruction)
    wide = (0, 1) if name in STARTS else (0,)  # pointers and streams
    reads = [lowering.read(each, "u64" if at in wide else "u32", instruction) for at, each in enumerate(passed)]
    does = None if name in ERRORS else _buffer if name in BUFFERS else _start

    def step(machine: Machine, mask: Mask) -> None:
        results = np.zeros(machine.threads, np.dtype(np.uint64 if kind == "u64" else np.uint32))
        values = [machine.spread(read(machine.registers)) for read in reads]
        if does is not None:
            for thread in active(machine, mask).tolist():
                results[thread] = does(machine, index, line, thread, [int(each[thread]) for each in values])
        write(machine.registers, mask, results)

    return step


def _buffer(machine: Machine, index: int, line: str, thread: int, passed: list[int]) -> int:
    """The address of a buffer for the parameters of a kernel; 0 if it cannot be launched so."""
    heap, launched = machine.memory.heap, machine.memory.launches
    assert heap is not None
    address, *grid_sides, x, y, z, shared = passed
    grid, block = (grid_sides[0], grid_sides[1], grid_sides[2]), (x, y, z)
    name, threads = machine.kernel.entries.get(address, ""), block[0] * block[1] * block[2]
    wrong = "" if name else f"launches a kernel at address {address:#x}, where there is none"
    if not 1 <= threads <= 1024 or not all(grid):
        wrong = f"launches {name} with grid {grid} and block {block}: 1 to 1024 threads, and no side of 0"
    if wrong:
        report_misuse(machine, index, np.array([thread]), wrong)
        return 0
    last = max(launched.program(name).kernel.parameters, key=lambda each: each.offset, default=None)
    buffer = heap.take(last.offset + last.size if last else 1, line)
    launched.buffers[buffer] = name, LaunchConfig(grid, block, b"", shared)
    return buffer


def _start(machine: Machine, index: int, line: str, thread: int, passed: list[int]) -> int:
    """Queue the launch of a buffer; returns an error code."""
    heap, launched = machine.memory.heap, machine.memory.launches
    buffer, stream = passed
    if buffer not in launched.buffers:
        return REFUSED
    name, launch = launched.buffers.pop(buffer)
    last = max(launched.program(name).kernel.parameters, key=lambda each: each.offset, default=None)
    size = last.offset + last.size if last else 0
    parameters = machine.memory.data[buffer : buffer + size].tobytes()
    assert heap is not None
    heap.free(buffer, line)
    clustered = launched.program(name).kernel.limits.get("reqnctapercluster", (1,))
    cluster: Any = (*clustered, 1, 1)[:3]
    configured = LaunchConfig(launch.grid, launch.block, parameters, launch.shared, cluster)
    launched.waiting.append(DeviceLaunch(name, configured, stream == TAIL))
    if len(launched.waiting) > MOST:
        raise EmulationError(
            f"more than {MOST} launches from kernels wait at {line}: launch fewer, with more blocks each"
        )
    machine.changes += 1
    return 0
