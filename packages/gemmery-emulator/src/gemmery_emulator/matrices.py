"""Load and store matrix fragments: ldmatrix, stmatrix, wmma.load and wmma.store.

PTX ISA 9.0, "Warp Level Matrix Instructions". fragments.py maps elements to lanes; all lanes of a warp take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gemmery_emulator import fragments, reach
from gemmery_emulator.fragments import Fragment, Piece
from gemmery_emulator.machine import Machine, report_misuse
from gemmery_emulator.op import NUMPY, Mask
from gemmery_emulator.ptx import Instruction, Opcode, Vector
from gemmery_emulator.steps import Handler, Lowering, Read, Step, Write, refused

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
    of_wmma = instruction.opcode.family == "wmma"
    moved = _Moved(index, instruction.opcode.space, fragment, address, apart if of_wmma else None)
    flat = lowering.flat((registers,))
    if loads:
        return partial(moved.load, [lowering.write(register, fragment.type, instruction) for register in flat])
    return partial(moved.store, [lowering.read(register, fragment.type, instruction) for register in flat])


@dataclass(frozen=True)
class _Moved:
    """A load or store of a fragment."""

    index: int
    space: str
    fragment: Fragment
    address: Read
    apart: Read | None  # elements from row to row; None if the lanes give the addresses of rows

    def _lanes(self, machine: Machine, piece: Piece) -> Any:
        """The address of each lane for a piece; lanes beyond the rows of a matrix repeat the first."""
        start, size = self.address(machine.registers), self.fragment.size
        if self.apart is None:
            return start
        stride = self.apart(machine.registers).astype(np.int64)
        rules = (stride * size, 16, "with {} bytes from row to row"), (start, 32, "at address {:#x}")
        for value, rule, what in rules:
            bad = np.flatnonzero(np.broadcast_to(value % rule != 0, (machine.threads,)))
            if bad.size:
                name = machine.kernel.instructions[self.index].opcode.name
                does = f"executes {name} {what.format(int(machine.spread(value)[bad[0]]))}"
                report_misuse(machine, self.index, bad, f"{does}: it must be a multiple of {rule} bytes")
        major, minor = (
            np.concatenate([part, np.repeat(part[:1], 32 - len(part))]) for part in (piece.major, piece.minor)
        )
        base, step = (machine.spread(value).reshape(-1, 32) for value in (start, stride))
        return (base + (major * step + minor) * size).reshape(-1)

    def load(self, writes: Sequence[Write], machine: Machine, mask: Mask) -> None:
        """Load the pieces of the fragment to registers."""
        fragment = self.fragment
        parts: list[Any] = [None] * fragment.registers
        for piece in fragment.pieces:
            lanes = self._lanes(machine, piece)
            if piece.matrices:
                some = _some(machine, mask, piece)
                rows = reach.rows(machine, self.index, self.space, lanes, some).reshape(machine.warps, 32, ROW // 4)
                piece.put(fragments.loaded(rows[:, : len(piece.major)], piece.transposed), parts)
            else:
                kind, count = piece.dtype, len(piece.registers)
                values = reach.load(machine, self.index, self.space, lanes, mask, kind, count, piece.width)
                piece.put([value.reshape(machine.warps, 32) for value in values], parts)
        filled = parts[: fragment.registers // fragment.copies] * fragment.copies
        for write, value in zip(writes, filled, strict=True):
            write(machine.registers, mask, value.reshape(-1).view(NUMPY[fragment.type]))

    def store(self, reads: Sequence[Read], machine: Machine, mask: Mask) -> None:
        """Store registers as the pieces of the fragment."""
        parts = [machine.spread(read(machine.registers)).reshape(machine.warps, 32) for read in reads]
        for piece in self.fragment.pieces:
            lanes = self._lanes(machine, piece)
            if piece.matrices:
                rows = np.zeros((machine.warps, 32, ROW // 4), np.uint32)
                rows[:, : len(piece.major)] = fragments.stored(parts, piece.transposed).view(np.uint32)
                values = [np.ascontiguousarray(rows[..., word]).reshape(-1) for word in range(ROW // 4)]
                some = _some(machine, mask, piece)
                reach.store(machine, self.index, self.space, lanes, some, values, "u4", ROW, "stmatrix")
            else:
                values = [np.ascontiguousarray(value).view(piece.dtype).reshape(-1) for value in piece.get(parts)]
                reach.store(machine, self.index, self.space, lanes, mask, values, piece.dtype, piece.width)


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
