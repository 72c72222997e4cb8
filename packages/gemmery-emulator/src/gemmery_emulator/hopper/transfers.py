"""Instructions for bulk copies of contiguous bytes and of boxes of tensors: cp.async.bulk, cp.reduce.async.bulk.

PTX ISA 9.0, "Data Movement and Conversion Instructions: Bulk copy" and ": Tensor copy".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from gemmery.errors import EmulationError
from gemmery_emulator.hopper import cluster, tensormap
from gemmery_emulator.hopper.bulk import PIECE, Bulk, Load, Store
from gemmery_emulator.hopper.cluster import Lifetimes
from gemmery_emulator.hopper.mbarrier import Mbarriers, of
from gemmery_emulator.hopper.tensormap import Chunks, DecodedMap, add_in_turn
from gemmery_emulator.machine import Access, CopyEvent, Machine, Pieces, Rows, active, report_misuse
from gemmery_emulator.op import NUMPY, POLICY, Flags, Indices, Mask
from gemmery_emulator.ptx import Address, Instruction, Opcode
from gemmery_emulator.steps import Handler, Lower, Lowering, Read, Step, no_step, on_unit, only_constant, refused

TILE_ALIGNMENT = 128  # bytes: the alignment of a tensor's box in shared memory
_TENSOR, _HINT = r"(\.tensor\.[1-5]d)", r"(?:\.L2::cache_hint)?"
_TILE = r"(?(1)(?:\.tile)?)"  # only for tensors
_COMPLETE = r"\.mbarrier::complete_tx::bytes"
_LOADED = re.compile(
    rf"cp\.async\.bulk{_TENSOR}?\.shared::(?:cluster|cta)\.global{_TILE}{_COMPLETE}(?:\.multicast::cluster)?"
    rf"(?(1)(?:\.cta_group::1)?){_HINT}"  # .cta_group::2, for an mbarrier of the other block, is not modeled
)
_SENT = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"  # to another block's shared memory
_STORED = re.compile(rf"cp\.async\.bulk{_TENSOR}?\.global\.shared::cta{_TILE}\.bulk_group{_HINT}")
_ADDED = re.compile(rf"cp\.reduce\.async\.bulk{_TENSOR}\.global\.shared::cta\.add{_TILE}\.bulk_group{_HINT}")
_ADDED_ROW = re.compile(
    rf"cp\.reduce\.async\.bulk(\.noftz)?\.global\.shared::cta\.add\.bulk_group{_HINT}"
    r"\.(?(1)(?:f16|bf16)|(?:[us]32|u64|f32|f64))"
)
_PREFETCHED = re.compile(rf"cp\.async\.bulk\.prefetch{_TENSOR}?\.L2\.global{_TILE}{_HINT}")


def _wait(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    pending, reads_only = only_constant(instruction), "read" in instruction.opcode.modifiers
    return lambda machine, mask: machine.unit(Bulk).wait(mask, pending, reads_only=reads_only)


def _copy(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """cp.async.bulk and cp.reduce.async.bulk, with or without tensors."""
    opcode, spelling = instruction.opcode, str(instruction.opcode)
    stores = any(pattern.fullmatch(spelling) for pattern in (_STORED, _ADDED, _ADDED_ROW))
    multicast = "multicast::cluster" in opcode.modifiers
    if not (stores or spelling == _SENT or _LOADED.fullmatch(spelling)) or (multicast and opcode.space == "shared"):
        raise refused(instruction)
    tensor = opcode.name in ("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
    operands = instruction.operands[: len(instruction.operands) - (POLICY in opcode.modifiers)]
    mask_of: Read | None = None
    if multicast:
        mask_of, operands = lowering.read(operands[-1], "u16", instruction), operands[:-1]
    if len(operands) != 2 + (not tensor) + (not stores):
        raise refused(instruction, f"{len(instruction.operands)} operands:")
    ends = _Ends(lowering, instruction, operands, tensor, stores)
    return partial(ends.store, index, opcode) if stores else partial(ends.load, index, mask_of)


class _Ends:
    """Both ends of a copy, as functions of the registers."""

    def __init__(
        self, lowering: Lowering, instruction: Instruction, operands: tuple[Any, ...], tensor: bool, stores: bool
    ) -> None:
        outside, shared = operands[:2] if stores else operands[1::-1]
        if not isinstance(outside, Address):
            raise refused(instruction)
        self.tensor = tensor
        self.sends = instruction.opcode.spelling == _SENT  # from the block's own shared memory to another's
        self.shared = lowering.address(shared, instruction)
        self.outside = lowering.address(outside, instruction)
        self.coordinates = [lowering.read(coordinate, "s32", instruction) for coordinate in outside.coordinates]
        self.bytes = None if tensor else lowering.read(operands[2], "u32", instruction)
        self.barrier: Read = self.shared if stores else lowering.address(operands[-1], instruction)

    def boxes(self, machine: Machine, index: int, threads: Indices) -> list[tuple[Indices, _Boxes | _Row]]:
        """Group the threads by tensor map, or by number of bytes; each group has its end outside shared memory."""
        registers = machine.registers
        addresses = of(self.outside(registers), threads)
        groups = addresses if self.tensor else of(self.bytes(registers), threads) if self.bytes else addresses
        boxes: list[tuple[Indices, _Boxes | _Row]] = []
        for group in np.unique(groups).tolist():
            these = groups == group
            some = threads[these]
            if self.tensor:
                tensor = machine.unit(Bulk).tensor(index, group)
                if len(self.coordinates) != len(tensor.box):
                    text = machine.kernel.instructions[index].text
                    raise EmulationError(f"{text!r}: its tensor map has {len(tensor.box)} dimensions")
                where = np.stack([of(read(registers), some) for read in self.coordinates], axis=1)
                boxes.append((some, _Boxes(index, some, tensor, where)))
            else:
                boxes.append((some, (_Own if self.sends else _Row)(index, some, addresses[these], group)))
        return boxes

    def _checked(self, machine: Machine, index: int, mask: Mask) -> Iterator[tuple[Any, Indices, Indices]]:
        """Yield the copies that may start: their end outside shared memory, their threads, their addresses inside."""
        for threads, end in self.boxes(machine, index, active(machine, mask)):
            addresses = of(self.shared(machine.registers), threads)
            good = _inside(machine, index, addresses, threads, end)
            if good.any():
                yield end.only(good), threads[good], addresses[good]

    def load(self, index: int, mask_of: Read | None, machine: Machine, mask: Mask) -> None:
        """Copy from global to shared memory, of one block or of several of the cluster.

        The mbarrier is at the same offset in the destination block.
        """
        each, mbarriers = machine.block_threads, machine.unit(Mbarriers)
        for outside, every, at in self._checked(machine, index, mask):
            end, data = outside.get(machine)
            some = np.isin(every, end.threads)
            threads, addresses = every[some], at[some]
            marks = of(self.barrier(machine.registers), threads)
            ranks = None if mask_of is None else of(mask_of(machine.registers), threads)
            copies, blocks = cluster.destinations(machine, threads, addresses, ranks)
            there = threads[copies] % each + blocks * each
            order = np.lexsort((addresses[copies], there))
            there, blocks, copies = there[order], blocks[order], copies[order]
            own, which = marks[copies] & cluster.OFFSET, threads[copies]
            barriers = mbarriers.places(index, there, own)[1]
            if len(barriers) == len(there):
                if cluster.size(machine) > 1:
                    machine.unit(Lifetimes).arrives(index, which, barriers, mbarriers.phases(barriers))
                places = _pieces(machine, blocks, addresses[copies], end)
                offsets = places * PIECE - (blocks * machine.shared.stride)[:, None]
                source, box, element, where = end.described(copies)
                event = CopyEvent(index, which, blocks, offsets, own, source, box, element, where, end.swizzle)
                machine.observers.copied(machine, event)
                machine.unit(Bulk).load(Load(index, there, places, data[copies], barriers, end.swizzle))

    def store(self, index: int, opcode: Opcode, machine: Machine, mask: Mask) -> None:
        """Copy from shared to global memory, at the latest when the thread waits for its group."""
        for end, threads, addresses in self._checked(machine, index, mask):
            inside = end
            if opcode.name.startswith("cp.reduce.async.bulk"):
                inside = replace(end, adds=True if isinstance(end, _Boxes) else opcode.type)
            places = _pieces(machine, threads // machine.block_threads, addresses, inside)
            machine.unit(Bulk).store(Store(index, threads, places, inside, np.zeros(len(threads), np.int64)))


@dataclass(frozen=True)
class _Boxes(Rows):
    """Boxes of a tensor in global memory, one for each copy."""

    index: int
    threads: Indices
    tensor: DecodedMap
    coordinates: Indices
    adds: bool = False

    @property
    def bytes(self) -> int:
        return self.tensor.bytes

    @property
    def swizzle(self) -> int:
        return self.tensor.swizzle

    def described(self, copies: Indices) -> tuple[int, tuple[int, ...], int, Indices]:
        """Where copies come from: the tensor's address, the box, bytes of an element, and each one's coordinates."""
        box = tuple(map(int, self.tensor.box))
        return self.tensor.address, box, self.tensor.dtype.itemsize, self.coordinates[copies]

    @property
    def inside(self) -> Flags | None:
        """Which pieces of each box lie in the tensor; None for all."""
        return self.tensor.pieces(self.coordinates, whole=True)[1]

    def get(self, machine: Machine) -> tuple[_Boxes, Chunks]:
        machine.observers.transferred(machine, self.index, partial(self._touched, whole=False))
        data, moved = self.tensor.fetch(machine.memory, self.coordinates)
        _count(machine, self.index, self.threads, self.tensor.address, moved)
        return self, data

    def put(self, machine: Machine, data: Chunks) -> Callable[[], Pieces]:
        moved = self.tensor.put(machine.memory, self.coordinates, data, self.adds)
        _count(machine, self.index, self.threads, self.tensor.address, moved)
        return partial(self._touched, whole=not self.adds)

    def _touched(self, whole: bool) -> Pieces:
        addresses, inside, width = self.tensor.pieces(self.coordinates, whole)
        threads = np.broadcast_to(self.threads[:, None], addresses.shape)
        some = slice(None) if inside is None else inside
        return threads[some].ravel(), addresses[some].ravel(), width


@dataclass(frozen=True)
class _Row(Rows):
    """Contiguous bytes in global memory, one row for each copy."""

    index: int
    threads: Indices
    addresses: Indices
    bytes: int
    swizzle: int = 0
    adds: str = ""  # the type of the elements that are added, and not written
    inside = None  # all pieces are

    def described(self, copies: Indices) -> tuple[int, tuple[int, ...], int, Indices]:
        return int(self.addresses[0]), (self.bytes,), 1, np.zeros((len(copies), 1), np.int64)

    def get(self, machine: Machine) -> tuple[_Row, Chunks]:
        inside, places = self._checked(machine)
        machine.observers.transferred(machine, self.index, partial(inside._touched, places))
        return inside, machine.memory.view("c16", 1).take(places)

    def put(self, machine: Machine, data: Chunks) -> Callable[[], Pieces]:
        inside, places = self._checked(machine)
        some = np.ascontiguousarray(data[np.isin(self.threads, inside.threads)])
        if self.adds:
            kind = "u2" if self.adds == "bf16" else NUMPY[self.adds]
            elements = PIECE // np.dtype(kind).itemsize
            each = (places[:, :, None] * elements + np.arange(elements)).reshape(len(places), -1)
            add_in_turn(machine.memory.view(kind, 1), each, some.view(kind), self.adds == "bf16")
        else:
            machine.memory.view("c16", 1)[places] = some
        return partial(inside._touched, places)

    def _touched(self, places: Indices) -> Pieces:
        return np.repeat(self.threads, places.shape[1]), places.ravel() * PIECE, PIECE

    def _checked(self, machine: Machine) -> tuple[_Row, Indices]:
        """Return the copies that stay within an array."""
        bad = self.addresses % PIECE != 0
        bad |= np.array([_beyond(machine, int(address), self.bytes) for address in self.addresses])
        if bad.any():
            _fault(machine, self.index, "global", self.threads, self.addresses, self.bytes, bad)
        inside = self.only(~bad) if bad.any() else self
        _count(machine, self.index, inside.threads, int(self.addresses[0]), self.bytes * len(inside.threads))
        return inside, inside.addresses[:, None] // PIECE + np.arange(self.bytes // PIECE)


@dataclass(frozen=True)
class _Own(_Row):
    """Contiguous bytes in the block's own shared memory."""

    def get(self, machine: Machine) -> tuple[_Row, Chunks]:
        good = _inside(machine, self.index, self.addresses, self.threads, self)
        inside = self.only(good)
        places = _pieces(machine, inside.threads // machine.block_threads, inside.addresses, inside)
        if len(places):
            machine.unit(Bulk).report(self.index, inside.threads, places, "reads")
        return inside, machine.shared.view("c16", 1).take(places)


def _beyond(machine: Machine, address: int, width: int) -> bool:
    array = machine.memory.nearest(address)
    return array is None or not (array.start <= address and address + width <= array.stop)


def _count(machine: Machine, index: int, threads: Indices, address: int, moved: int) -> None:
    """Report the bytes moved: the same number by each thread, and the remainder by the last one."""
    if not len(threads):
        return
    each = moved // len(threads)
    for some, width in ((threads[:-1], each), (threads[-1:], moved - each * (len(threads) - 1))):
        if len(some):
            mask = np.zeros(machine.threads, bool)
            mask[some] = True
            machine.observers.access(machine, Access(index, "global", "bulk", np.int64(address), mask, width))


def _fault(
    machine: Machine, index: int, space: str, threads: Indices, addresses: Indices, width: int, bad: Flags
) -> None:
    spread, mask = np.zeros(machine.threads, np.int64), np.zeros(machine.threads, bool)
    spread[threads], mask[threads[bad]] = addresses, True
    aligned = addresses[bad] % PIECE == 0
    event = Access(index, space, "bulk", spread, mask, width if aligned.all() else PIECE)
    machine.observers.fault(machine, event, "outside" if aligned.all() else "misaligned", mask)


def _inside(machine: Machine, index: int, addresses: Indices, threads: Indices, end: Any) -> Flags:
    """Return the copies within shared memory and aligned; report the others."""
    offsets = addresses & cluster.OFFSET
    alignment = TILE_ALIGNMENT if isinstance(end, _Boxes) else PIECE
    bad = offsets + end.bytes > machine.shared.size
    if bad.any():
        _fault(machine, index, "shared", threads, offsets, end.bytes, bad)
    crooked = (offsets % alignment != 0) & ~bad
    if crooked.any():
        what = f"copies in bulk at byte {offsets[crooked][0]} of shared memory: a multiple of {alignment} is needed"
        report_misuse(machine, index, threads[crooked], what)
    if isinstance(end, _Boxes):
        starts = end.coordinates[:, 0] * end.tensor.dtype.itemsize
        skew = starts % PIECE != 0
        if skew.any():
            what = f"copies a box that begins {starts[skew][0]} bytes along the innermost dimension: no multiple of 16"
            report_misuse(machine, index, threads[skew], f"{what}, an illegal instruction on an H200")
            crooked |= skew
    if end.bytes % PIECE:
        report_misuse(machine, index, threads, f"copies {end.bytes} bytes in bulk: a multiple of {PIECE} is needed")
        bad = np.ones_like(bad)
    good: Flags = ~(bad | crooked)
    return good


def _pieces(machine: Machine, blocks: Indices, addresses: Indices, end: Any) -> Indices:
    """Return the indices of the 16-byte pieces of each copy in the chunk's shared memory: (copies, pieces)."""
    offsets = (addresses & cluster.OFFSET)[:, None] + np.arange(0, end.bytes, PIECE)
    places: Indices = (tensormap.swizzled(offsets, end.swizzle) + (blocks * machine.shared.stride)[:, None]) // PIECE
    return places


def _entry(step: Lower, spelled: re.Pattern[str] | None, kind: str = "cp.async.bulk") -> Handler:
    return Handler(step=step, spelled=spelled, kind=kind, orders=True)


TABLE = {
    **{name: _entry(_copy, None) for name in ("cp.async.bulk", "cp.async.bulk.tensor")},
    "cp.reduce.async.bulk": _entry(_copy, _ADDED_ROW, "cp.reduce"),
    "cp.reduce.async.bulk.tensor": _entry(_copy, _ADDED, "cp.reduce"),
    **{f"cp.async.bulk.prefetch{of}": _entry(no_step, _PREFETCHED) for of in ("", ".tensor")},
    "cp.async.bulk.commit_group": _entry(on_unit(Bulk, Bulk.commit), re.compile(r"cp\.async\.bulk\.commit_group")),
    "cp.async.bulk.wait_group": _entry(_wait, re.compile(r"cp\.async\.bulk\.wait_group(?:\.read)?")),
}
