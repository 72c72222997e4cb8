"""Instructions with which one thread starts operations: tcgen05.mma and cp, and commit, which waits for them.

PTX ISA 9.0, "TensorCore 5th Generation Instructions: tcgen05.mma", ": tcgen05.cp", ": tcgen05.commit".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from gemmery.errors import EmulationError
from gemmery_emulator.blackwell.operations import Commit, Operation, Operations, OperationWork, TensorProduct, shape_of
from gemmery_emulator.blackwell.tensor_memory import LANE_AT, TensorMemory, columns_of
from gemmery_emulator.exact import added as tensor_sums
from gemmery_emulator.hopper import cluster
from gemmery_emulator.hopper.cluster import Lifetimes
from gemmery_emulator.hopper.descriptors import DEPTH, SharedTile, pieces_of_chunk, read_pieces
from gemmery_emulator.hopper.mbarrier import Mbarriers, active, of
from gemmery_emulator.machine import Machine, report_misuse
from gemmery_emulator.memory import SHARED_WINDOW
from gemmery_emulator.op import Flags, Indices, Mask
from gemmery_emulator.ptx import Address, Instruction, Vector
from gemmery_emulator.steps import Handler, Lowering, Read, Step, refused

_GROUP = r"cta_group::([12])"
_MULTIPLIED = re.compile(
    rf"tcgen05\.mma\.{_GROUP}\.kind::(tf32|f16|f8f6f4|i8)(?:\.collector::a::(?:fill|use|lastuse|discard))?"
)
_COMMITTED = re.compile(
    rf"tcgen05\.commit\.{_GROUP}\.mbarrier::arrive::one(\.shared::cluster)?(\.multicast::cluster)?\.b64"
)
_COPIED = re.compile(rf"tcgen05\.cp\.{_GROUP}\.(128x256b|128x128b|32x128b\.warpx4)")


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
    pair, kind = match[1] == "2", match[2]
    to, a, b, shape_bits, *rest = instruction.operands
    mask_of = rest.pop(0) if isinstance(rest[0], Vector) else None
    lanes = mask_of.elements if isinstance(mask_of, Vector) else ()
    if not isinstance(to, Address) or len(rest) != 1 or len(lanes) not in (0, 8 if pair else 4):
        raise refused(instruction, "a scale of the sums, or disabled lanes of another number:")
    disabled = [lowering.read(word, "b32", instruction) for word in lanes]
    where, in_memory = lowering.address(to, instruction), isinstance(a, Address)
    read_a = lowering.address(a, instruction) if isinstance(a, Address) else lowering.read(a, "s64", instruction)
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
                if "not modelled" in shape:
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
                pieces.append(read_pieces(machine, index, threads, tile.pieces(), block))
            else:
                columns = tile & 0xFFFF
                memory.meets(index, threads, block, columns, columns + DEPTH // 4)
                memory.report(index, there, columns_of(columns, halves, DEPTH // 4), "reads")
    operation = Operation(index, threads, product, tuple(pieces), product.blocks, places)
    machine.unit(Operations).start(operation)


@dataclass(frozen=True)
class _TileCopy(OperationWork):
    """Copies of tiles from shared to tensor memory."""

    row_fields = ("blocks", "tile", "addresses")
    blocks: Indices
    tile: SharedTile
    addresses: Indices
    times: int  # how often the rows are repeated along the lanes

    def run(self, machine: Machine) -> None:
        lanes, columns = np.arange(128)[:, None], np.arange(self.tile.depth // 4)
        for block in self.blocks.T:
            places = pieces_of_chunk(machine, self.tile.pieces(), block)
            words = self.tile.words(machine.shared.view("c16", 1).take(places))
            first = (self.addresses & 0xFFFF)[:, None, None]
            machine.unit(TensorMemory).data[block[:, None, None], lanes, first + columns] = np.tile(
                words, (1, self.times, 1)
            )


def _copy(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    match = _COPIED.fullmatch(str(instruction.opcode))
    if match is None:
        raise refused(instruction)
    to, descriptor = instruction.operands
    if not isinstance(to, Address):
        raise refused(instruction)
    where, read = lowering.address(to, instruction), lowering.read(descriptor, "s64", instruction)
    pair, rows, depth = match[1] == "2", int(match[2].split("x")[0]), 32 if match[2].endswith("256b") else 16

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
            pieces.append(read_pieces(machine, index, threads, work.tile.pieces(), block))
        places = columns_of(first, np.arange(8), depth // 4)
        machine.unit(Operations).start(Operation(index, threads, work, tuple(pieces), blocks, places))

    return step


def _commit(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    match = _COMMITTED.fullmatch(str(instruction.opcode))
    barrier, *ranks = instruction.operands
    if match is None or not isinstance(barrier, Address) or len(ranks) != (match[3] is not None):
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


TABLE = {
    "tcgen05.mma": Handler(step=_multiply, writes=False, orders=True, kind="tcgen05.mma"),
    "tcgen05.cp": Handler(step=_copy, writes=False, orders=True, kind="tcgen05"),
    "tcgen05.commit": Handler(step=_commit, writes=False, orders=True, kind="tcgen05"),
}
