"""The call stacks of threads: what a function that calls itself keeps of its registers while the inner call runs.

`ptx.calls` puts a "call.save" before each call of such a function, and a "call.restore" after it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.errors import EmulationError
from gemmery_emulator.machine import Machine, active
from gemmery_emulator.op import STORED, Mask
from gemmery_emulator.ptx import Immediate, Instruction, Register, Vector
from gemmery_emulator.steps import Handler, Lowering, Step
from gemmery_emulator.symbols import last_name


class CallStacks:
    """The registers that the threads of a chunk have saved, by their names: (levels, threads)."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._depth = np.zeros(machine.threads, np.int64)
        self._saved: dict[str, NDArray[Any]] = {}

    def save(self, index: int, mask: Mask, most: int, values: dict[str, Any]) -> None:
        """Keep values of these threads, which call a function now."""
        machine, threads = self._machine, active(self._machine, mask)
        depth = self._depth[threads]
        deep = np.flatnonzero(depth >= most)
        if deep.size:
            raise EmulationError(self._too_deep(index, int(threads[deep[0]]), most))
        for name, value in values.items():
            stack = self._saved.get(name, np.zeros((0, machine.threads), value.dtype))
            if len(stack) <= (level := int(depth.max())):
                higher = np.zeros((max(level + 1, 2 * len(stack)) - len(stack), machine.threads), value.dtype)
                stack = np.concatenate([stack, higher])
            stack[depth, threads] = machine.spread(value)[threads]
            self._saved[name] = stack
        self._depth[threads] += 1
        machine.changes += 1  # the state is another one although registers and memory are the same

    def restore(self, mask: Mask, names: list[str]) -> list[Any]:
        """Give these threads back, when the function has returned, what they saved before it was called."""
        threads = active(self._machine, mask)
        self._depth[threads] -= 1
        self._machine.changes += 1
        restored = []
        for name in names:
            value = np.zeros(self._machine.threads, self._saved[name].dtype)
            value[threads] = self._saved[name][self._depth[threads], threads]
            restored.append(value)
        return restored

    def _too_deep(self, index: int, thread: int, most: int) -> str:
        machine, instruction = self._machine, self._machine.kernel.instructions[index]
        block, own = divmod(thread, machine.block_threads)
        who = f"thread {own} of block {machine.block_ids[block]}"
        return (
            f"{last_name(instruction.opcode.modifiers[0])} is called at depth {most + 1} by {who} "
            f"({instruction.line}): at most {most} calls of functions that call themselves are modeled in each other; "
            "end the recursion, or use a loop"
        )


def _registers(instruction: Instruction) -> list[Register]:
    saved = instruction.operands[0]
    assert isinstance(saved, Vector)
    return [each for each in saved.elements if isinstance(each, Register)]


def _save(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    _, most = instruction.operands
    assert isinstance(most, Immediate)
    reads = {each.name: lowering.read(each, _kind(each), instruction) for each in _registers(instruction)}

    def step(machine: Machine, mask: Mask) -> None:
        values = {name: read(machine.registers) for name, read in reads.items()}
        machine.unit(CallStacks).save(index, mask, most.bits, values)

    return step


def _restore(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    registers = _registers(instruction)
    names = [each.name for each in registers]
    writes = [lowering.write(each, _kind(each), instruction) for each in registers]

    def step(machine: Machine, mask: Mask) -> None:
        for write, value in zip(writes, machine.unit(CallStacks).restore(mask, names), strict=True):
            write(machine.registers, mask, value)

    return step


def _kind(register: Register) -> str:
    """The PTX type of a register's bits."""
    stored = STORED[register.type]
    return "pred" if stored == "?" else f"{'f' if stored[0] == 'f' else 'b'}{8 * int(stored[1:])}"


TABLE = {
    "call.save": Handler(step=_save, kind="call", orders=True, writes=False),
    "call.restore": Handler(step=_restore, kind="call", orders=True),
}
