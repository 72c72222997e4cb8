"""Products and copies into tensor memory under way: they happen when a thread waits for the commit after them.

PTX ISA 9.0, "TensorCore 5th Generation: Memory Consistency Model". The operations of one thread happen in their order.
Each reads shared memory as late as possible, so that a missing wait is found.

A product, tcgen05.mma, is of tiles in shared or tensor memory, and added to tensor memory (": Instruction descriptor",
": Data path layout organization"). Sums are rounded by the rule of exact.py with 25 bits, as Hopper's of f16; no sums
of a Blackwell device are on record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from gemmery.dtypes import Array
from gemmery_emulator.blackwell import HALF, LANE_AT, TensorMemory
from gemmery_emulator.exact import NORMAL, Added, SumRule, chained
from gemmery_emulator.hopper import cluster
from gemmery_emulator.hopper.bulk import DEPTH, Bulk, PieceReaders, SharedTile
from gemmery_emulator.hopper.mbarrier import Mbarriers, Needed
from gemmery_emulator.hopper.products import added_whole, multiplied
from gemmery_emulator.machine import Machine, Rows, landed, report_misuse
from gemmery_emulator.op import Flags, Indices
from gemmery_emulator.ops.warp import DECODED


class OperationWork(Rows):
    """What an operation does, for all threads that started it together."""

    def run(self, machine: Machine) -> None:
        """Do it."""


@dataclass(frozen=True)
class Operation(Rows):
    """An operation under way."""

    index: int
    threads: Indices
    work: OperationWork
    pieces: tuple[Indices, ...]  # of the chunk's shared memory that it reads: (threads, pieces) each
    blocks: Indices  # whose tensor memory it writes: (threads, blocks)
    places: Indices  # of this tensor memory: (threads, places)
    number: int = 0


@dataclass(frozen=True)
class Commit(Rows):
    """Arrivals at mbarriers that wait for the operations before a number."""

    index: int
    threads: Indices  # that committed
    there: Indices  # threads in the mbarriers' blocks
    barriers: Indices
    number: int


class Operations:
    """The operations under way of a chunk of blocks, in the order of their start."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._mbarriers = machine, machine.unit(Mbarriers)
        self._mbarriers.landing.append(self._land_for)
        machine.at_end.append(self._finish)
        self._under_way: list[Operation] = []
        self._commits: list[Commit] = []
        self._started = 0
        self._readers = PieceReaders(machine)

    def start(self, operation: Operation) -> None:
        """Start an operation."""
        self._under_way.append(replace(operation, number=self._started))
        self._started += 1
        for pieces in operation.pieces:
            self._readers.begin(pieces)
        self._report(operation, "begins")

    def commit(self, commit: Commit) -> None:
        """Arrive at mbarriers when the operations of these threads so far are complete."""
        offsets = self._mbarriers.offsets(commit.barriers)
        cluster.report_order(self._machine, commit.index, commit.there, offsets, acquired=False)
        self._commits.append(replace(commit, number=self._started))
        self._machine.changes += 1  # threads that sleep on the mbarrier may continue now

    def _land_for(self, needed: Needed) -> None:
        """Complete what commits to mbarriers wait for, until their phase ends."""
        self._commits = landed(self._commits, lambda commit: needed(commit.barriers), self._complete)

    def _complete(self, commit: Commit) -> None:
        self._run(lambda operation: np.isin(operation.threads, commit.threads) & (operation.number < commit.number))
        counts = np.ones(len(commit.there), np.int64)
        self._mbarriers.report(commit.index, "arrives", commit.there, commit.barriers, counts)
        self._mbarriers.arrive(commit.index, commit.there, commit.barriers, counts)

    def _run(self, completes: Callable[[Operation], Flags]) -> None:
        self._under_way = landed(self._under_way, completes, self._land)

    def _land(self, operation: Operation) -> None:
        for pieces in operation.pieces:
            self._readers.end(pieces)
        self._report(operation, "lands")
        operation.work.run(self._machine)

    def _finish(self) -> None:
        """Report and complete the operations for which no thread has waited, when all threads have ended."""
        for operation in self._under_way:
            what = "is not complete when its block ends: tcgen05.commit, and wait at the mbarrier"
            report_misuse(self._machine, operation.index, operation.threads, f"starts an operation that {what}")
        self._run(lambda operation: np.ones(len(operation.threads), np.bool_))

    def reader(self, places: Indices) -> tuple[int, int] | None:
        """Return which of these bytes of the chunk's shared memory an operation reads, and its instruction."""
        return self._readers.reader(places, ((operation.index, operation.pieces) for operation in self._under_way))

    def writer(self, blocks: Indices, first: Indices, last: Indices) -> tuple[Flags, int]:
        """Return which of these columns of tensor memory an operation may still write, and its instruction."""
        for operation in self._under_way:
            columns = operation.places % 512
            low, high = columns.min(axis=1), columns.max(axis=1)
            meets = (low < last[:, None]) & (high >= first[:, None])
            meets &= (operation.blocks == blocks[:, None, None]).any(axis=2)
            if meets.any():
                return meets.any(axis=1), operation.index
        return np.zeros(len(blocks), np.bool_), 0

    def _report(self, operation: Operation, what: str) -> None:
        """Tell the observers of writes to tensor memory, by threads of the same number in each of its blocks."""
        machine = self._machine
        own = operation.threads % machine.block_threads
        for block in operation.blocks.T:
            machine.observers.tensor(
                machine, operation.index, block * machine.block_threads + own, operation.places * 4, what
            )


# The types of each kind, by the numbers in an instruction descriptor.
SUMS = {"tf32": {1: "f32"}, "f16": {0: "f16", 1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}
SIDES = {"tf32": {2: "tf32"}, "f16": {0: "f16", 1: "bf16"}, "f8f6f4": {0: "e4m3", 1: "e5m2"}, "i8": {0: "u8", 1: "s8"}}
_SIZES = {"tf32": 4, "f16": 2, "f8f6f4": 1, "i8": 1}
NARROW = {3: "e2m3", 4: "e3m2", 5: "e2m1"}  # of f8f6f4, not modeled


@dataclass(frozen=True)
class TensorShape:
    """What an instruction descriptor says."""

    m: int
    n: int
    a: str
    b: str
    sums: str
    size: int  # bytes of an element of A or B
    by_rows: tuple[bool, bool]  # A is M-major, B is N-major
    negative: bool
    saturates: bool
    pair: bool  # two blocks multiply together

    @property
    def blocks(self) -> int:
        """The blocks that multiply together."""
        return 2 if self.pair else 1

    @property
    def rows(self) -> int:
        """Rows of A in each block."""
        return self.m // self.blocks

    @property
    def columns(self) -> int:
        """Columns of tensor memory that the sums take in each block."""
        return self.n // 2 if self.pair and self.m == 128 else self.n

    @property
    def halves(self) -> Indices:
        """The groups of 16 lanes that hold sums, relative to the address."""
        return np.arange(0, 8, 2) if self.m == 64 else np.arange(8)

    @property
    def rule(self) -> SumRule:
        """How floating-point sums are rounded."""
        return SumRule(DEPTH // self.size, NORMAL[self.a], NORMAL[self.b], halves=self.sums == "f16")

    def sums_at(self) -> tuple[Indices, Indices]:
        """The lanes and columns of a block's sums, relative to the address: (rows, n)."""
        row, column = np.indices((self.rows, self.n))
        if self.m == 64:
            return row // HALF * 32 + row % HALF, column
        return row + column // self.columns * 64, column % self.columns

    def a_at(self) -> Indices:
        """The lanes of A in tensor memory."""
        row = np.arange(self.rows)
        return row // HALF * 32 + row % HALF if self.m == 64 else row


def shape_of(kind: str, pair: bool, bits: int) -> TensorShape | str:
    """Read an instruction descriptor; returns what is wrong with it.

    >>> shape = shape_of("f16", False, 1 << 4 | 128 // 8 << 17 | 128 // 16 << 24)
    >>> shape.m, shape.n, shape.a, shape.sums
    (128, 128, 'f16', 'f32')
    """
    m, n, sums = (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8, bits >> 4 & 3
    a, b = bits >> 7 & 7, bits >> 10 & 7
    if bits >> 2 & 1:
        return "with a sparse A, which is not modeled"
    if kind == "f8f6f4" and (a in NARROW or b in NARROW):
        return f"of {NARROW.get(a) or NARROW[b]}, which is not modeled"
    if a not in SIDES[kind] or b not in SIDES[kind] or sums not in SUMS[kind]:
        return f"with types {a} and {b} and sums {sums}, which .kind::{kind} does not have"
    if kind == "f16" and a != b:
        return "with f16 and bf16"
    if kind == "f16" and SUMS[kind][sums] == "f16" and a == 1:
        return "of bf16 with sums in f16"
    sides = (128, 256) if pair else (64, 128)
    step = 32 if pair else 16 if m == 128 else 8
    if m not in sides or not step <= n <= 256 or n % step:
        return f"of {m} x {n}: {sides[0]} or {sides[1]} rows, and columns a multiple of {step} from {step} to 256"
    by_rows = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
    negative = bool((bits >> 13 ^ bits >> 14) & 1)
    types = SIDES[kind][a], SIDES[kind][b], SUMS[kind][sums], _SIZES[kind]
    return TensorShape(m, n, *types, by_rows, negative, bool(bits >> 3 & 1), pair)


@dataclass(frozen=True)
class TensorProduct(OperationWork):
    """A product that threads have started, each for its block or pair of blocks."""

    index: int
    threads: Indices
    blocks: Indices  # (threads, 1 or 2)
    shape: TensorShape
    a: SharedTile | Indices  # descriptors, or addresses in tensor memory
    b: SharedTile
    sums: Indices  # addresses in tensor memory
    adds: Flags
    core: Added  # sums.added, or a faster function with the same bits

    def run(self, machine: Machine) -> None:
        """Add the product to tensor memory."""
        memory, shape = machine.unit(TensorMemory).data, self.shape
        b = np.concatenate([self._shared(machine, self.b, shape.b, block) for block in self.blocks.T], axis=1)
        lanes, columns = shape.sums_at()
        first, lane = (self.sums & 0xFFFF)[:, None, None], (self.sums >> LANE_AT)[:, None, None]
        for block in self.blocks.T:
            if isinstance(self.a, SharedTile):
                a = self._shared(machine, self.a, shape.a, block)
            else:
                words = memory[
                    block[:, None, None],
                    (self.a >> LANE_AT)[:, None, None] + shape.a_at()[:, None],
                    (self.a & 0xFFFF)[:, None, None] + np.arange(DEPTH // 4),
                ]
                a = DECODED[shape.a](np.ascontiguousarray(words))
            place = block[:, None, None], lane + lanes, first + columns
            memory[place] = self._added(memory[place], a, b)

    def _shared(self, machine: Machine, tile: SharedTile, kind: str, blocks: Indices) -> Array:
        """The elements of a tile of these blocks: (threads, rows, k)."""
        places = tile.places(machine, blocks)
        machine.unit(Bulk).compare(self.index, self.threads, places, tile.swizzles())
        return DECODED[kind](tile.words(machine, places))

    def _added(self, before: Array, a: Array, b: Array) -> Array:
        """The words of the sums after adding A (threads, rows, k) times the transpose of B (threads, n, k)."""
        shape, adds = self.shape, self.adds[:, None, None]
        if shape.sums == "s32":
            return added_whole(multiplied(a, b), before, adds, shape.saturates)
        halves = shape.sums == "f16"
        start = (before & 0xFFFF).astype("u2").view("f2").astype("f4") if halves else before.view("f4")
        start = np.ascontiguousarray(np.where(adds, start, np.float32(0)))
        sums = chained(self.core, start, -a if shape.negative else a, b, shape.rule)
        return sums.astype("f2").view("u2").astype("u4") if halves else sums.astype("f4").view("u4")
