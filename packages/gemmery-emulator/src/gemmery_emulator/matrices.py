"""Load and store matrix fragments: ldmatrix, stmatrix, wmma.load and wmma.store.

PTX ISA 9.0, "Warp Level Matrix Instructions". fragments.py maps elements to lanes; all lanes of a warp take part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery_emulator import fragments, reach
from gemmery_emulator.fragments import Fragment, Piece
from gemmery_emulator.machine import Machine, report_misuse
from gemmery_emulator.op import NUMPY, Mask
from gemmery_emulator.ptx import Instruction, Opcode, Vector
from gemmery_emulator.steps import Handler, Lowering, Read, Step, refused

ROW = 16  # bytes of a row of an 8 x 8 matrix of 16-bit elements


def _fragment(opcode: Opcode) -> Fragment:
    """The pieces of a load or store; ldmatrix and stmatrix are one piece, whose rows' addresses the lanes give."""
    if opcode.family == "wmma":
        return fragments.wmma_fragment(opcode)
    count, trans = fragments.matrices(opcode)
    row = np.arange(8 * count)
    piece = Piece(row, 0 * row, tuple(range(count)), "u4", matrices=True, transposed=trans)
    return Fragment((piece,), "b32", count, 1, 2, 8)


def _move(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """ldmatrix, stmatrix, wmma.load and wmma.store; wmma.mma only computes."""
    fragment, loads = _fragment(instruction.opcode), instruction.opcode.name in ("ldmatrix", "wmma.load")
    place, registers, *strides = instruction.operands
    if loads:
        place, registers = registers, place
    if not isinstance(registers, Vector):
        raise refused(instruction)
    if len(registers.elements) != fragment.registers or len(strides) > (instruction.opcode.family == "wmma"):
        raise refused(instruction, f"{len(registers.elements)} registers:")
    address = lowering.address(place, instruction)
    apart: Read = lowering.read(strides[0], "u32", instruction) if strides else lambda _: np.uint32(fragment.stride)

    def where(machine: Machine, piece: Piece) -> Any:
        if instruction.opcode.family == "wmma":
            # Report a leading dimension that is no multiple of 16 bytes, and a matrix that begins at no multiple of 32.
            for value, rule, what in (
                (apart(machine.registers).astype(np.int64) * fragment.size, 16, "with {} bytes from row to row"),
                (address(machine.registers), 32, "at address {:#x}"),
            ):
                bad = np.flatnonzero(np.broadcast_to(value % rule != 0, (machine.threads,)))
                if bad.size:
                    name = machine.kernel.instructions[index].opcode.name
                    where = what.format(int(machine.spread(value)[bad[0]]))
                    report_misuse(
                        machine, index, bad, f"executes {name} {where}: it must be a multiple of {rule} bytes"
                    )
            # The address of each lane of each warp; lanes beyond the rows of a matrix repeat the first.
            major, minor = (
                np.concatenate([part, np.repeat(part[:1], 32 - len(part))]) for part in (piece.major, piece.minor)
            )
            base = machine.spread(address(machine.registers)).reshape(-1, 32)
            step = machine.spread(apart(machine.registers)).astype(np.int64).reshape(-1, 32)
            addresses: NDArray[np.int64] = (base + (major * step + minor) * fragment.size).reshape(-1)
            return addresses
        return address(machine.registers)

    make = _loading if loads else _storing
    return make(lowering, instruction, index, fragment, lowering.flat((registers,)), where)


Where = Callable[[Machine, Piece], Any]  # the address of each lane for a piece


def _loading(
    lowering: Lowering, instruction: Instruction, index: int, fragment: Fragment, targets: list[Any], where: Where
) -> Step:
    writes = [lowering.write(register, fragment.type, instruction) for register in targets]
    space = instruction.opcode.space

    def step(machine: Machine, mask: Mask) -> None:
        parts: list[Any] = [None] * fragment.registers
        for piece in fragment.pieces:
            lanes = where(machine, piece)
            if piece.matrices:
                some = _some(machine, mask, piece)
                rows = reach.rows(machine, index, space, lanes, some).reshape(machine.warps, 32, ROW // 4)
                piece.put(fragments.loaded(rows[:, : len(piece.major)], piece.transposed), parts)
            else:
                kind, count = piece.dtype, len(piece.registers)
                values = reach.load(machine, index, space, lanes, mask, kind, count, piece.width)
                piece.put([value.reshape(machine.warps, 32) for value in values], parts)
        filled = parts[: fragment.registers // fragment.copies] * fragment.copies
        for write, value in zip(writes, filled, strict=True):
            write(machine.registers, mask, value.reshape(-1).view(NUMPY[fragment.type]))

    return step


def _storing(
    lowering: Lowering, instruction: Instruction, index: int, fragment: Fragment, sources: list[Any], where: Where
) -> Step:
    reads = [lowering.read(register, fragment.type, instruction) for register in sources]
    space = instruction.opcode.space

    def step(machine: Machine, mask: Mask) -> None:
        parts = [machine.spread(read(machine.registers)).reshape(machine.warps, 32) for read in reads]
        for piece in fragment.pieces:
            lanes = where(machine, piece)
            if piece.matrices:
                rows = np.zeros((machine.warps, 32, ROW // 4), np.uint32)
                rows[:, : len(piece.major)] = fragments.stored(parts, piece.transposed).view(np.uint32)
                values = [np.ascontiguousarray(rows[..., word]).reshape(-1) for word in range(ROW // 4)]
                some = _some(machine, mask, piece)
                reach.store(machine, index, space, lanes, some, values, "u4", ROW, "stmatrix")
            else:
                values = [np.ascontiguousarray(value).view(piece.dtype).reshape(-1) for value in piece.get(parts)]
                reach.store(machine, index, space, lanes, mask, values, piece.dtype, piece.width)

    return step


def _some(machine: Machine, mask: Mask, piece: Piece) -> Mask:
    """Return the mask of the lanes that give the address of a row; None for all."""
    count = len(piece.major)
    if count == 32:
        return mask
    every = np.tile(np.arange(32) < count, machine.warps)
    return every if mask is None else every & mask


def _count(opcode: Opcode) -> tuple[str, int]:
    """A wmma.load or wmma.store counts as the machine instructions that ptxas makes of it."""
    pieces = fragments.wmma_fragment(opcode).pieces
    return "ldmatrix" if pieces[0].matrices else "st" if opcode.name == "wmma.store" else "ld", len(pieces)


TABLE = {
    "ldmatrix": Handler(step=_move, lanes="warp"),
    "stmatrix": Handler(step=_move, lanes="warp"),
    "wmma.load": Handler(step=_move, lanes="warp", count=_count),
    "wmma.store": Handler(step=_move, lanes="warp", count=_count),
}
