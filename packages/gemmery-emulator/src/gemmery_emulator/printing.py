"""printf in kernels: writes to standard output, thread by thread (CUDA C++ Programming Guide, "Formatted Output").

The compiler calls `vprintf` with the format and a buffer of arguments, each at a multiple of its size: integers of 4
bytes or, with a length of `l` or `ll`, of 8; floats as doubles; pointers. The format is that of C without a precision
of `*` and the lengths `hh`, `j`, `t` and `z`: devices do not support those, and print them unchanged.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmery.errors import EmulationError
from gemmery_emulator import device_launch, heap, reach
from gemmery_emulator.machine import Machine, report_misuse
from gemmery_emulator.memory import Bytes
from gemmery_emulator.op import Mask
from gemmery_emulator.ptx import Instruction
from gemmery_emulator.steps import Handler, Lowering, Step, refused

CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\d*))?(h|ll|l)?([diouxXcspeEfFgGaA%])")
LONG = ("l", "ll")
BITS = {"h": 16} | dict.fromkeys(LONG, 64)
WIDEST = 1 << 12  # largest width and precision, in characters
LONGEST = 1 << 16  # bytes of an unterminated string that are printed


def _printf(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """Return the step of a call of vprintf(format, buffer), which returns the number of arguments."""
    if len(instruction.operands) != 3:
        raise refused(instruction)
    write = lowering.write(instruction.operands[0], "u32", instruction)
    formats, buffers = (lowering.read(operand, "s64", instruction) for operand in instruction.operands[1:])

    def step(machine: Machine, mask: Mask) -> None:
        texts, pointers = machine.spread(formats(machine.registers)), machine.spread(buffers(machine.registers))
        counts = np.zeros(machine.threads, np.uint32)
        for thread in range(machine.threads) if mask is None else np.flatnonzero(mask).tolist():
            arguments = _Arguments(machine, index, thread, int(pointers[thread]))
            try:
                text = formatted(arguments.string(int(texts[thread])), arguments.next, arguments.string)
            except EmulationError as error:
                raise EmulationError(f"{instruction.line}: {error}") from None
            sys.stdout.write(text)
            counts[thread] = arguments.count
        write(machine.registers, mask, counts)

    return step


def formatted(text: str, following: Callable[[str], Any], string: Callable[[int], str]) -> str:
    """Format text as C does: `following` returns the next argument as a NumPy type, `string` the text at a pointer.

    >>> numbers = iter([5, -3, 0.25])
    >>> formatted("%03d %u %5.1f%%", lambda kind: np.array([next(numbers)]).astype(kind)[0], str)
    '005 4294967293   0.2%'
    """

    def converted(match: re.Match[str]) -> str:
        flags, width, precision, length, kind = match.groups(default="")
        if kind == "%":
            return "%"
        width = str(int(following("i4"))) if width == "*" else width
        wide = max(abs(int(width or 0)), int(precision or 0))
        if wide > WIDEST:
            raise EmulationError(f"printf: {match[0]} pads to {wide:,} characters; {WIDEST:,} at most are modeled")
        before = f"%{flags}{width}" + (f".{precision}" if match.group(3) is not None else "")
        if kind in "eEfFgG":
            return (before + kind) % float(following("f8"))
        if kind in "aA":
            value = re.sub(r"\.?0*p", "p", float(following("f8")).hex())
            return f"%{flags}{width}s" % (value.upper() if kind == "A" else value)
        if kind in "sp":
            address = int(following("i8" if kind == "s" else "u8"))
            if kind == "s":
                return (before + "s") % (string(address) if address else "(null)")
            return (before + "s") % (hex(address) if address else "(nil)")
        number = int(following("u8" if length in LONG else "u4")) & (1 << BITS.get(length, 32)) - 1
        if kind == "c":
            return (before + "s") % chr(number & 255)
        if kind in "di" and number >> BITS.get(length, 32) - 1:
            number -= 1 << BITS.get(length, 32)
        if "#" in flags and kind in "oxX":
            prefix = ("0" if kind == "o" else f"0{kind}") if number else ""
            return f"%{flags}{width}s".replace("#", "") % (prefix + format(number, kind))
        return (before + ("d" if kind == "u" else kind)) % number

    return CONVERSION.sub(converted, text)


class _Arguments:
    """The arguments of one thread, read in order."""

    def __init__(self, machine: Machine, index: int, thread: int, buffer: int) -> None:
        self._machine, self._index, self._thread, self._place = machine, index, thread, buffer
        self.count = 0

    def next(self, kind: str) -> Any:
        """Return the next argument as a NumPy type."""
        size = np.dtype(kind).itemsize
        first = -(-self._place // size) * size
        self._place = first + size
        self.count += 1
        data = np.zeros(size, np.uint8)
        part = self._bytes(first, size)
        data[: len(part)] = part
        return data.view(kind)[0]

    def string(self, address: int) -> str:
        """Return the characters from an address to the next zero."""
        return self._bytes(address, LONGEST).tobytes().partition(b"\0")[0].decode("utf-8", "replace")

    def _bytes(self, address: int, count: int) -> Bytes:
        """Return the memory at a generic address; if there is none, report a finding and return nothing."""
        machine, thread = self._machine, self._thread
        ((name, place, _),) = reach.placed(machine, "", np.int64(address), None)
        space = reach.memory_of(machine, name)
        if space.outside(np.int64(place), None, 1) is not None:
            what = (
                f"prints a string at address {address:#x}, where there is no memory: pass a pointer to the characters"
            )
            report_misuse(machine, self._index, np.array([thread]), what)
            return np.zeros(0, np.uint8)
        first = int(np.broadcast_to(place + space.base, (machine.threads,))[thread])
        return space.data[first : first + count].copy()


def _call(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """A call of a function outside the text: printf, malloc and free, or an error when a thread reaches it."""
    (name,) = instruction.opcode.modifiers
    if name == "vprintf":
        return _printf(lowering, instruction, index)
    if name in heap.CALLS:
        return heap.call(lowering, instruction, index)
    if name in device_launch.CALLS:
        return device_launch.call(lowering, instruction, index)
    error = EmulationError(
        f"a call of {name} ({instruction.line}) is not modeled: remove it for the emulator, for "
        "example with #ifndef EMULATED and options=('-DEMULATED',) (-o -DEMULATED)"
    )

    def step(machine: Machine, mask: Mask) -> None:
        raise error

    return step


TABLE = {"call": Handler(step=_call, orders=True, count=lambda opcode: (opcode.spelling, 1))}
