"""Instructions of tensor memory, and those with which one thread starts operations on it, or waits for them.

PTX ISA 9.0, "TensorCore 5th Generation Instructions": "Tensor Memory Allocation", "Load and Store" (tcgen05.alloc and
dealloc, ld and st, their waits and fences), "tcgen05.mma", "tcgen05.cp", "tcgen05.commit".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from gemmery.dtypes import Array
from gemmery.errors import EmulationError
from gemmery_emulator.blackwell import LANE_AT, SHAPES, TensorMemory, columns_of, fragment
from gemmery_emulator.blackwell.operations import Commit, Operation, Operations, OperationWork, TensorProduct, shape_of
from gemmery_emulator.exact import added as tensor_sums
from gemmery_emulator.hopper import cluster
from gemmery_emulator.hopper.bulk import DEPTH, SharedTile
from gemmery_emulator.hopper.cluster import Lifetimes
from gemmery_emulator.hopper.mbarrier import Mbarriers, of
from gemmery_emulator.machine import Access, Machine, active, report_misuse
from gemmery_emulator.memory import SHARED_WINDOW
from gemmery_emulator.op import Flags, Indices, Mask
from gemmery_emulator.ptx import Address, Immediate, Instruction, Register, Vector
from gemmery_emulator.steps import Handler, Lower, Lowering, Read, Step, no_step, refused

_GROUP = r"cta_group::[12]"
_ALLOCATED = rf"tcgen05\.alloc\.{_GROUP}\.sync\.aligned(\.shared::cta)?\.b32"
_MOVED = re.compile(
    r"tcgen05\.(ld|st)\.sync\.aligned\.(32x32b|16x(?:64b|128b|256b|32bx2))\.x(\d+)(\.(?:un)?pack::16b)?\.b32"
)
_PACKED = {"ld": ".pack::16b", "st": ".unpack::16b"}
_MULTIPLIED = re.compile(
    rf"tcgen05\.mma\.({_GROUP})\.kind::(tf32|f16|f8f6f4|i8)(?:\.collector::a::(?:fill|use|lastuse|discard))?"
)
_COMMITTED = re.compile(
    rf"tcgen05\.commit\.({_GROUP})\.mbarrier::arrive::one(\.shared::cluster)?(\.multicast::cluster)?\.b64"
)
_COPIED = re.compile(rf"tcgen05\.cp\.({_GROUP})\.(128x256b|128x128b|32x128b\.warpx4)")


def _first_lanes(machine: Machine, mask: Mask) -> Indices:
    """The first threads of the warps that execute an instruction."""
    threads = active(machine, mask)
    firsts: Indices = np.unique(threads // 32) * 32
    return firsts


def _allocate(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    to, count = instruction.operands
    where = lowering.address(to, instruction)
    window = 0 if "shared::cta" in instruction.opcode.modifiers else SHARED_WINDOW
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


def _move(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """tcgen05.ld and tcgen05.st; with .pack::16b a register holds two columns of 16 bits."""
    match, operands = _MOVED.fullmatch(str(instruction.opcode)), list(instruction.operands)
    if match is None or int(match[3]) not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise refused(instruction)
    kind, shape, repeats, packs = match[1], match[2], int(match[3]), match[4] is not None
    address = operands.pop(1 if kind == "ld" else 0)
    registers = lowering.flat((operands.pop(0 if kind == "ld" else -1),))
    split = operands.pop(0) if shape == "16x32bx2" else Immediate(0, "s32")
    each, most = SHAPES[shape]
    if operands or not isinstance(address, Address) or not isinstance(split, Immediate):
        raise refused(instruction)
    if repeats > most or len(registers) != each * repeats or (packs and match[4] != _PACKED[kind]):
        raise refused(instruction, f"{len(registers)} registers:")
    if not all(isinstance(register, Register | Immediate) for register in registers):
        raise refused(instruction)
    where, part = lowering.address(address, instruction), fragment(shape, repeats, split.bits, packs)
    writes = [lowering.write(register, "b32", instruction) for register in registers if kind == "ld"]
    reads = [lowering.read(register, "b32", instruction) for register in registers if kind == "st"]

    def step(machine: Machine, mask: Mask) -> None:
        memory, threads = machine.unit(TensorMemory), _first_lanes(machine, mask)
        addresses = of(where(machine.registers), threads)
        good, places = memory.places(index, threads, addresses, part)
        threads = threads[good]
        if len(threads):
            memory.accesses(kind, index, threads, addresses[good], part)
        if kind == "ld":
            values = np.zeros((machine.warps, 32, len(writes)), np.uint32)
            words: Array = memory.data[places]
            values[threads // 32] = words[..., ::2] & 0xFFFF | words[..., 1::2] << 16 if packs else words
            for place, write in enumerate(writes):
                write(machine.registers, mask, np.ascontiguousarray(values[..., place]).reshape(-1))
            return
        lanes = threads[:, None] + np.arange(32)
        words = np.stack([machine.spread(read(machine.registers))[lanes] for read in reads], axis=2)
        if packs:
            words = np.stack([words & 0xFFFF, words >> 16], axis=3).reshape(*words.shape[:2], 2 * len(reads))
        memory.data[places] = words

    return step


def _starting(machine: Machine, index: int, mask: Mask) -> Indices:
    """The threads that start an operation; report warps of which several lanes do."""
    threads = active(machine, mask)
    _, first, counts = np.unique(threads // 32, return_index=True, return_counts=True)
    if (counts > 1).any():
        name = machine.kernel.instructions[index].opcode.name
        what = f"executes {name} with {counts[counts > 1][0]} lanes of its warp: one thread starts it (elect.sync)"
        report_misuse(machine, index, threads[first[counts > 1]], what)
    return threads[first]


def _blocks_of(machine: Machine, index: int, threads: Indices, pair: bool) -> tuple[Indices, Indices]:
    """The threads that may start an operation of their block or of a pair, and its blocks: (threads, 1 or 2)."""
    blocks = threads // machine.block_threads
    if not pair:
        return threads, blocks[:, None]
    if cluster.size(machine) % 2:
        raise EmulationError(
            f"{machine.kernel.instructions[index].text!r} needs clusters of an even number of blocks: pass cluster=2"
        )
    odd = cluster.ranks(machine)[blocks] % 2 == 1
    what = "starts an operation of a pair of blocks from the second one: the block of even rank starts it"
    report_misuse(machine, index, threads[odd], what)
    threads, blocks = threads[~odd], blocks[~odd]
    return threads, blocks[:, None] + np.arange(2)


def _described(machine: Machine, index: int, threads: Indices, tile: SharedTile) -> Flags:
    """Report wrong descriptors of shared memory; returns the others."""
    wrong, why = tile.wrong()
    if wrong.any():
        what = f"uses a descriptor of shared memory ({int(tile.descriptors[wrong][0]) & (1 << 64) - 1:#x}) {why}"
        report_misuse(machine, index, threads[wrong], what)
    good: Flags = ~wrong
    return good


def _multiply(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    match = _MULTIPLIED.fullmatch(str(instruction.opcode))
    if match is None:
        raise refused(instruction)
    pair, kind = match[1].endswith("2"), match[2]
    to, a, b, shape_bits, *rest = instruction.operands
    mask_of = rest.pop(0) if isinstance(rest[0], Vector) else None
    lanes = mask_of.elements if isinstance(mask_of, Vector) else ()
    if len(rest) != 1 or len(lanes) not in (0, 8 if pair else 4):
        raise refused(instruction, "a scale of the sums, or disabled lanes of another number:")
    disabled = [lowering.read(word, "b32", instruction) for word in lanes]
    where, in_memory = lowering.address(to, instruction), isinstance(a, Address)
    read_a = lowering.address(a, instruction) if in_memory else lowering.read(a, "s64", instruction)
    read_b, bits = lowering.read(b, "s64", instruction), lowering.read(shape_bits, "u32", instruction)
    adds = lowering.read(rest[0], "pred", instruction)
    core = lowering.faster.get(tensor_sums, tensor_sums)

    def step(machine: Machine, mask: Mask) -> None:
        registers = machine.registers
        every, blocks = _blocks_of(machine, index, _starting(machine, index, mask), pair)
        if any(of(read(registers), every).any() for read in disabled):
            raise refused(instruction, "lanes that are disabled:")
        each = of(bits(registers), every)
        for number in np.unique(each).tolist():
            shape = shape_of(kind, pair, number)
            some = each == number
            threads = every[some]
            if isinstance(shape, str):
                if "not modeled" in shape:
                    raise EmulationError(f"{instruction.text!r} ({instruction.line}): a product {shape}")
                report_misuse(machine, index, threads, f"starts a product {shape}: correct the instruction descriptor")
                continue
            tile_b = SharedTile(of(read_b(registers), threads), shape.n // shape.blocks, shape.size, shape.by_rows[1])
            values_a = of(read_a(registers), threads)
            side_a = values_a if in_memory else SharedTile(values_a, shape.rows, shape.size, shape.by_rows[0])
            adding = np.asarray(machine.spread(adds(registers))[threads])
            sums = of(where(registers), threads)
            _start(machine, TensorProduct(index, threads, blocks[some], shape, side_a, tile_b, sums, adding, core))

    return step


def _start(machine: Machine, product: TensorProduct) -> None:
    """Check the tiles and the columns of a product, and start it."""
    index, memory, shape = product.index, machine.unit(TensorMemory), product.shape
    lanes = product.sums >> LANE_AT
    bad = (lanes != 0) & ((shape.m != 64) | (lanes != 16))
    if bad.any():
        what = f"adds {shape.m} rows to lane {lanes[bad][0]} of tensor memory: 0" + " or 16" * (shape.m == 64)
        report_misuse(machine, index, product.threads[bad], what)
    good = ~bad & _described(machine, index, product.threads, product.b)
    if isinstance(product.a, SharedTile):
        good &= _described(machine, index, product.threads, product.a)
    for block in product.blocks.T:
        good &= memory.allocated(index, product.threads, block, product.sums & 0xFFFF, shape.columns)
        if not isinstance(product.a, SharedTile):
            good &= memory.allocated(index, product.threads, block, product.a & 0xFFFF, DEPTH // 4)
    product = product.only(good)
    if not good.any():
        return
    threads, pieces = product.threads, []
    first = product.sums & 0xFFFF
    halves = shape.halves + (product.sums >> LANE_AT)[0] // 16
    places = columns_of(first, halves, shape.columns)
    for block in product.blocks.T:
        there = block * machine.block_threads + threads % machine.block_threads
        memory.meets(index, threads, block, first, first + shape.columns)
        if product.adds.any():
            memory.report(index, there[product.adds], places[product.adds], "reads")
        for tile in (product.a, product.b):
            if isinstance(tile, SharedTile):
                pieces.append(tile.read(machine, index, threads, block))
            else:
                columns = tile & 0xFFFF
                memory.meets(index, threads, block, columns, columns + DEPTH // 4)
                memory.report(index, there, columns_of(columns, halves, DEPTH // 4), "reads")
    operation = Operation(index, threads, product, tuple(pieces), product.blocks, places)
    machine.unit(Operations).start(operation)


@dataclass(frozen=True)
class _TileCopy(OperationWork):
    """Copies of tiles from shared to tensor memory."""

    blocks: Indices
    tile: SharedTile
    addresses: Indices
    times: int  # how often the rows are repeated along the lanes

    def run(self, machine: Machine) -> None:
        lanes, columns = np.arange(128)[:, None], np.arange(self.tile.depth // 4)
        for block in self.blocks.T:
            words = self.tile.words(machine, self.tile.places(machine, block))
            first = (self.addresses & 0xFFFF)[:, None, None]
            machine.unit(TensorMemory).data[block[:, None, None], lanes, first + columns] = np.tile(
                words, (1, self.times, 1)
            )


def _copy(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    match = _COPIED.fullmatch(str(instruction.opcode))
    if match is None:
        raise refused(instruction)
    to, descriptor = instruction.operands
    where, read = lowering.address(to, instruction), lowering.read(descriptor, "s64", instruction)
    pair, rows, depth = match[1].endswith("2"), int(match[2].split("x")[0]), 32 if match[2].endswith("256b") else 16

    def step(machine: Machine, mask: Mask) -> None:
        threads, blocks = _blocks_of(machine, index, _starting(machine, index, mask), pair)
        addresses = of(where(machine.registers), threads)
        tile = SharedTile(of(read(machine.registers), threads), rows, 1, depth=depth)
        good = _described(machine, index, threads, tile)
        memory = machine.unit(TensorMemory)
        for block in blocks.T:
            good &= memory.allocated(index, threads, block, addresses & 0xFFFF, depth // 4)
        if not good.any():
            return
        work = _TileCopy(blocks, tile, addresses, 128 // rows).only(good)
        threads, blocks, first = threads[good], work.blocks, work.addresses & 0xFFFF
        pieces = []
        for block in blocks.T:
            memory.meets(index, threads, block, first, first + depth // 4)
            pieces.append(work.tile.read(machine, index, threads, block))
        places = columns_of(first, np.arange(8), depth // 4)
        machine.unit(Operations).start(Operation(index, threads, work, tuple(pieces), blocks, places))

    return step


def _commit(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    match = _COMMITTED.fullmatch(str(instruction.opcode))
    barrier, *ranks = instruction.operands
    if match is None or len(ranks) != (match[3] is not None):
        raise refused(instruction)
    where, window = lowering.address(barrier, instruction), 0 if match[2] else SHARED_WINDOW
    mask_of: Read | None = lowering.read(ranks[0], "u16", instruction) if ranks else None

    def step(machine: Machine, mask: Mask) -> None:
        threads, size, each = _starting(machine, index, mask), cluster.size(machine), machine.block_threads
        addresses = of(where(machine.registers), threads) - window
        ranks = None if mask_of is None else of(mask_of(machine.registers), threads)
        copies, blocks = cluster.destinations(machine, threads, addresses, ranks)
        threads, addresses = threads[copies], addresses[copies]
        there = blocks * each + threads % each
        mbarriers = machine.unit(Mbarriers)
        reached, barriers = mbarriers.places(index, there, addresses & cluster.OFFSET)
        threads, there = threads[np.isin(there, reached)], reached
        if size > 1:
            machine.unit(Lifetimes).arrives(index, threads, barriers, mbarriers.phases(barriers))
        if len(threads):
            machine.unit(Operations).commit(Commit(index, threads, there, barriers, 0))

    return step


def _of_warp(step: Lower, spelled: str, writes: bool = False, operands: tuple[int, ...] = ()) -> Handler:
    """An instruction that all lanes of a warp execute."""
    pattern = re.compile(spelled)
    return Handler(
        step=step, spelled=pattern, operands=operands, lanes="warp", writes=writes, orders=True, kind="tcgen05"
    )


TABLE = {
    "tcgen05.alloc": _of_warp(_allocate, _ALLOCATED, operands=(2,)),
    "tcgen05.dealloc": _of_warp(_free, rf"tcgen05\.dealloc\.{_GROUP}\.sync\.aligned\.b32", operands=(2,)),
    "tcgen05.relinquish_alloc_permit": _of_warp(
        _relinquish, rf"tcgen05\.relinquish_alloc_permit\.{_GROUP}\.sync\.aligned"
    ),
    "tcgen05.ld": _of_warp(_move, _MOVED.pattern, writes=True),
    "tcgen05.st": _of_warp(_move, _MOVED.pattern),
    **{f"tcgen05.wait::{kind}": _of_warp(_wait, rf"tcgen05\.wait::{kind}\.sync\.aligned") for kind in ("ld", "st")},
    **{
        f"tcgen05.fence::{when}_thread_sync": Handler(
            step=no_step, spelled=re.compile(rf"tcgen05\.fence::{when}_thread_sync"), orders=True, kind="tcgen05"
        )
        for when in ("before", "after")
    },
    "tcgen05.mma": Handler(step=_multiply, writes=False, orders=True, kind="tcgen05.mma"),
    "tcgen05.cp": Handler(step=_copy, writes=False, orders=True, kind="tcgen05"),
    "tcgen05.commit": Handler(step=_commit, writes=False, orders=True, kind="tcgen05"),
}
