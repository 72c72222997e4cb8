"""Load and store matrix fragments: ldmatrix, stmatrix, wmma.load and wmma.store.

PTX ISA 9.0, "Warp Level Matrix Instructions". fragments.py maps elements to lanes; all lanes of a warp take part.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.emulator import fragments, reach
from gemmery.emulator.fragments import Fragment, Piece
from gemmery.emulator.machine import Machine
from gemmery.emulator.op import NUMPY, Mask
from gemmery.emulator.ptx import Address, Instruction, Opcode, Vector
from gemmery.emulator.steps import Handler, Lowering, Read, Step, refused

ROW = 16  # bytes of a row of an 8 x 8 matrix of 16-bit elements
Lanes = NDArray[np.bool_]


def _load_matrix(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """ldmatrix."""
    count, trans = fragments.matrices(instruction.opcode)
    target, source = instruction.operands
    if not isinstance(source, Address) or not isinstance(target, Vector) or len(target.elements) != count:
        raise refused(instruction)
    writes = [lowering.write(register, "b32", instruction) for register in lowering.flat((target,))]
    address, space, lanes = lowering.address(source, instruction), instruction.opcode.space, _first(8 * count)

    def step(machine: Machine, mask: Mask) -> None:
        rows = reach.rows(machine, index, space, address(machine.registers), _some(machine, mask, lanes), "ldmatrix")
        loaded = fragments.loaded(rows.reshape(machine.warps, 32, ROW // 4)[:, : 8 * count], trans)
        for write, value in zip(writes, loaded, strict=True):
            write(machine.registers, mask, value.reshape(-1))

    return step


def _store_matrix(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """stmatrix."""
    count, trans = fragments.matrices(instruction.opcode)
    target, source = instruction.operands
    if not isinstance(target, Address) or not isinstance(source, Vector) or len(source.elements) != count:
        raise refused(instruction)
    reads = [lowering.read(register, "b32", instruction) for register in lowering.flat((source,))]
    address, space, lanes = lowering.address(target, instruction), instruction.opcode.space, _first(8 * count)

    def step(machine: Machine, mask: Mask) -> None:
        shape = (machine.warps, 32)
        rows = np.zeros((*shape, ROW // 4), np.uint32)
        stored = [machine.spread(read(machine.registers)).reshape(shape) for read in reads]
        rows[:, : 8 * count] = fragments.stored(stored, trans).view(np.uint32)
        values = [np.ascontiguousarray(rows[..., word]).reshape(-1) for word in range(ROW // 4)]
        some = _some(machine, mask, lanes)
        reach.store(machine, index, space, address(machine.registers), some, values, "u4", ROW, "stmatrix")

    return step


def _warp_matrix(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """wmma.load and wmma.store; wmma.mma only computes."""
    fragment = fragments.wmma_fragment(instruction.opcode)
    place, registers = instruction.operands[:2]
    loads = isinstance(place, Vector)
    if loads:
        place, registers = registers, place
    if not isinstance(place, Address):
        raise refused(instruction)
    address, space = lowering.address(place, instruction), instruction.opcode.space
    strides = instruction.operands[2:]
    apart: Read = lowering.read(strides[0], "u32", instruction) if strides else lambda _: np.uint32(fragment.stride)
    make, elements = _loading if loads else _storing, lowering.flat((registers,))
    if len(elements) != fragment.registers:
        raise refused(instruction, f"{len(elements)} registers:")
    return make(lowering, instruction, index, fragment, elements, (space, address, apart))


Location = tuple[str, Read, Read]  # a space, an address in it, the stride between rows in elements


def _loading(
    lowering: Lowering, instruction: Instruction, index: int, fragment: Fragment, targets: list[Any], where: Location
) -> Step:
    writes = [lowering.write(register, fragment.type, instruction) for register in targets]
    space, address, apart = where

    def step(machine: Machine, mask: Mask) -> None:
        parts: list[Any] = [None] * fragment.registers
        for piece in fragment.pieces:
            lanes = _lanes(machine, piece, fragment.size, address, apart)
            if piece.matrices:
                some = _some(machine, mask, _first(len(piece.major)))
                rows = reach.rows(machine, index, space, lanes, some, "ldmatrix").reshape(machine.warps, 32, ROW // 4)
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
    lowering: Lowering, instruction: Instruction, index: int, fragment: Fragment, sources: list[Any], where: Location
) -> Step:
    reads = [lowering.read(register, fragment.type, instruction) for register in sources]
    space, address, apart = where

    def step(machine: Machine, mask: Mask) -> None:
        parts = [machine.spread(read(machine.registers)).reshape(machine.warps, 32) for read in reads]
        for piece in fragment.pieces:
            lanes = _lanes(machine, piece, fragment.size, address, apart)
            values = [np.ascontiguousarray(value).view(piece.dtype).reshape(-1) for value in piece.get(parts)]
            reach.store(machine, index, space, lanes, mask, values, piece.dtype, piece.width)

    return step


def _lanes(machine: Machine, piece: Piece, size: int, address: Read, apart: Read) -> NDArray[np.int64]:
    """Return the address of each lane of each warp; lanes beyond the rows of a matrix repeat the first."""
    major, minor = (np.concatenate([part, np.repeat(part[:1], 32 - len(part))]) for part in (piece.major, piece.minor))
    base = machine.spread(address(machine.registers)).reshape(-1, 32)
    step = machine.spread(apart(machine.registers)).astype(np.int64).reshape(-1, 32)
    addresses: NDArray[np.int64] = (base + (major * step + minor) * size).reshape(-1)
    return addresses


def _first(count: int) -> Lanes:
    return np.arange(32) < count


def _some(machine: Machine, mask: Mask, lanes: Lanes) -> Mask:
    """Return the mask of the lanes that give an address; None for all."""
    if lanes.all():
        return mask
    every = np.tile(lanes, machine.warps)
    return every if mask is None else every & mask


def _count(opcode: Opcode) -> tuple[str, int]:
    """A wmma.load or wmma.store counts as the machine instructions that ptxas makes of it."""
    pieces = fragments.wmma_fragment(opcode).pieces
    return "ldmatrix" if pieces[0].matrices else "st" if opcode.name == "wmma.store" else "ld", len(pieces)


TABLE = {
    "ldmatrix": Handler(step=_load_matrix, lanes="warp"),
    "stmatrix": Handler(step=_store_matrix, lanes="warp"),
    "wmma.load": Handler(step=_warp_matrix, lanes="warp", count=_count),
    "wmma.store": Handler(step=_warp_matrix, lanes="warp", count=_count),
}
