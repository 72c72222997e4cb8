"""Instructions of tensor memory: tcgen05.alloc and dealloc, ld and st, their waits and fences.

PTX ISA 9.0, "TensorCore 5th Generation Instructions: Tensor Memory Allocation", ": Load and Store".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from gemmery.dtypes import Array
from gemmery_emulator.blackwell.operations import Operations
from gemmery_emulator.blackwell.tensor_memory import SHAPES, TensorMemory, fragment
from gemmery_emulator.hopper.mbarrier import active, of
from gemmery_emulator.machine import Access, Machine, report_misuse
from gemmery_emulator.memory import SHARED_WINDOW
from gemmery_emulator.op import Indices, Mask
from gemmery_emulator.ptx import Address, Immediate, Instruction, Register, Vector
from gemmery_emulator.steps import Handler, Lower, Lowering, Step, no_step, refused

_GROUP = r"cta_group::[12]"
_ALLOCATED = re.compile(rf"tcgen05\.alloc\.{_GROUP}\.sync\.aligned(\.shared::cta)?\.b32")
_FREED = re.compile(rf"tcgen05\.dealloc\.{_GROUP}\.sync\.aligned\.b32")
_MOVED = re.compile(
    r"tcgen05\.(ld|st)\.sync\.aligned\.(32x32b|16x(?:64b|128b|256b|32bx2))\.x(\d+)(\.(?:un)?pack::16b)?\.b32"
)
_PACKED = {"ld": ".pack::16b", "st": ".unpack::16b"}


def _first_lanes(machine: Machine, mask: Mask) -> Indices:
    """The first threads of the warps that execute an instruction."""
    threads = active(machine, mask)
    firsts: Indices = np.unique(threads // 32) * 32
    return firsts


def _allocate(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    match = _ALLOCATED.fullmatch(str(instruction.opcode))
    to, count = instruction.operands
    if match is None or not isinstance(to, Address):
        raise refused(instruction)
    where, window = lowering.address(to, instruction), 0 if match[1] else SHARED_WINDOW
    columns = lowering.read(count, "u32", instruction)

    def step(machine: Machine, mask: Mask) -> None:
        threads = _first_lanes(machine, mask)
        starts = machine.unit(TensorMemory).allocate(index, threads, of(columns(machine.registers), threads))
        offsets = of(where(machine.registers), threads) - window
        bad = (offsets < 0) | (offsets + 4 > machine.shared.size) | (offsets % 4 != 0)
        if bad.any():
            what = f"writes an address of tensor memory to byte {offsets[bad][0]} of shared memory: not a word of it"
            report_misuse(machine, index, threads[bad], what)
        threads, offsets, starts = threads[~bad], offsets[~bad], starts[~bad]
        if not len(threads):
            return
        lanes, spread = np.zeros(machine.threads, bool), np.zeros(machine.threads, np.int64)
        lanes[threads], spread[threads] = True, offsets
        values = np.zeros(machine.threads, np.uint32)
        values[threads] = starts
        machine.observers.access(machine, Access(index, "shared", "st", spread, lanes, 4, [values]))
        machine.shared.store(spread, [values], lanes, "u4", 4, machine.threads)

    return step


def _free(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    where, count = (lowering.read(operand, "u32", instruction) for operand in instruction.operands)

    def step(machine: Machine, mask: Mask) -> None:
        threads = _first_lanes(machine, mask)
        addresses, counts = of(where(machine.registers), threads), of(count(machine.registers), threads)
        memory, blocks = machine.unit(TensorMemory), threads // machine.block_threads
        memory.meets(index, threads, blocks, addresses, addresses + counts)
        early, by = machine.unit(Operations).writer(blocks, addresses, addresses + counts)
        at = machine.kernel.instructions[by].line
        what = f"frees tensor memory that the operation at {at} may still write: wait at the mbarrier of its commit"
        report_misuse(machine, index, threads[early], what)
        memory.free(index, threads, addresses, counts)

    return step


def _relinquish(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    return lambda machine, mask: machine.unit(TensorMemory).relinquish(_first_lanes(machine, mask))


def _wait(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    kind = instruction.opcode.name.rpartition("::")[2]
    return lambda machine, mask: machine.unit(TensorMemory).wait(kind, _first_lanes(machine, mask))


# ---- registers ----


@dataclass(frozen=True)
class _Moved:
    """A tcgen05.ld or tcgen05.st, read from its opcode and its operands."""

    kind: str
    shape: str
    repeats: int
    packs: bool  # a register holds two columns of 16 bits
    split: int
    address: Address
    registers: tuple[Register | Immediate, ...]


def _moved(instruction: Instruction) -> _Moved:
    match = _MOVED.fullmatch(str(instruction.opcode))
    if match is None or int(match[3]) not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise refused(instruction)
    kind, shape, repeats, packs = match[1], match[2], int(match[3]), match[4] is not None
    operands = list(instruction.operands)
    address = operands.pop(1 if kind == "ld" else 0)
    values = operands.pop(0 if kind == "ld" else -1)
    split = operands.pop(0) if shape == "16x32bx2" else Immediate(0, "s32")
    registers = values.elements if isinstance(values, Vector) else (values,)
    each, most = SHAPES[shape]
    if operands or not isinstance(address, Address) or not isinstance(split, Immediate):
        raise refused(instruction)
    if repeats > most or len(registers) != each * repeats or (packs and match[4] != _PACKED[kind]):
        raise refused(instruction, f"{len(registers)} registers:")
    if not all(isinstance(register, Register | Immediate) for register in registers):
        raise refused(instruction)
    return _Moved(kind, shape, repeats, packs, split.bits, address, registers)  # type: ignore[arg-type]


def _move(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """tcgen05.ld and tcgen05.st."""
    moved = _moved(instruction)
    where = lowering.address(moved.address, instruction)
    part = fragment(moved.shape, moved.repeats, moved.split, moved.packs)
    run = (_loading if moved.kind == "ld" else _storing)(lowering, instruction, moved)

    def step(machine: Machine, mask: Mask) -> None:
        memory, threads = machine.unit(TensorMemory), _first_lanes(machine, mask)
        addresses = of(where(machine.registers), threads)
        good, places = memory.places(index, threads, addresses, part)
        threads = threads[good]
        if len(threads):
            memory.accesses(moved.kind, index, threads, addresses[good], part)
        run(machine, mask, threads, places)

    return step


# The active threads, the first threads of the warps that may access their places, and these.
_Run = Callable[[Machine, Mask, Indices, tuple[Indices, Indices, Indices]], None]


def _loading(lowering: Lowering, instruction: Instruction, moved: _Moved) -> _Run:
    writes = [lowering.write(register, "b32", instruction) for register in moved.registers]

    def run(machine: Machine, mask: Mask, threads: Indices, places: tuple[Indices, Indices, Indices]) -> None:
        values = np.zeros((machine.warps, 32, len(writes)), np.uint32)
        words: Array = machine.unit(TensorMemory).data[places]
        if moved.packs:
            words = words[..., ::2] & 0xFFFF | words[..., 1::2] << 16
        values[threads // 32] = words
        for place, write in enumerate(writes):
            write(machine.registers, mask, np.ascontiguousarray(values[..., place]).reshape(-1))

    return run


def _storing(lowering: Lowering, instruction: Instruction, moved: _Moved) -> _Run:
    reads = [lowering.read(register, "b32", instruction) for register in moved.registers]

    def run(machine: Machine, mask: Mask, threads: Indices, places: tuple[Indices, Indices, Indices]) -> None:
        lanes = threads[:, None] + np.arange(32)
        words = np.stack([machine.spread(read(machine.registers))[lanes] for read in reads], axis=2)
        if moved.packs:
            words = np.stack([words & 0xFFFF, words >> 16], axis=3).reshape(*words.shape[:2], 2 * len(reads))
        machine.unit(TensorMemory).data[places] = words

    return run


def _of_warp(step: Lower, spelled: str | re.Pattern[str], writes: bool = False) -> Handler:
    """An instruction that all lanes of a warp execute."""
    pattern = re.compile(spelled) if isinstance(spelled, str) else spelled
    return Handler(step=step, spelled=pattern, lanes="warp", writes=writes, orders=True, kind="tcgen05")


TABLE = {
    "tcgen05.alloc": replace(_of_warp(_allocate, _ALLOCATED), operands=(2,)),
    "tcgen05.dealloc": replace(_of_warp(_free, _FREED), operands=(2,)),
    "tcgen05.relinquish_alloc_permit": _of_warp(
        _relinquish, rf"tcgen05\.relinquish_alloc_permit\.{_GROUP}\.sync\.aligned"
    ),
    "tcgen05.ld": _of_warp(_move, _MOVED, writes=True),
    "tcgen05.st": _of_warp(_move, _MOVED),
    **{f"tcgen05.wait::{kind}": _of_warp(_wait, rf"tcgen05\.wait::{kind}\.sync\.aligned") for kind in ("ld", "st")},
    **{
        f"tcgen05.fence::{when}_thread_sync": Handler(
            step=no_step, spelled=re.compile(rf"tcgen05\.fence::{when}_thread_sync"), orders=True, kind="tcgen05"
        )
        for when in ("before", "after")
    },
}
