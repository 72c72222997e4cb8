"""Products and copies into tensor memory under way: they happen when a thread waits for the commit after them.

PTX ISA 9.0, "TensorCore 5th Generation: Memory Consistency Model". The operations of one thread happen in their order.
Each reads shared memory as late as possible, so that a missing wait is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from gemmery.emulator.hopper import cluster
from gemmery.emulator.hopper.descriptors import PieceReaders
from gemmery.emulator.hopper.mbarrier import Mbarriers, Needed
from gemmery.emulator.machine import Machine, Rows, landed, report_misuse
from gemmery.emulator.op import Flags, Indices


class OperationWork(Rows):
    """What an operation does, for all threads that started it together."""

    def run(self, machine: Machine) -> None:
        """Do it."""


@dataclass(frozen=True)
class Operation(Rows):
    """An operation under way."""

    row_fields = ("threads", "work", "pieces", "blocks", "places")
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

    row_fields = ("threads", "there", "barriers")
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
            for observer in machine.observers:
                observer.tensor(
                    machine, operation.index, block * machine.block_threads + own, operation.places * 4, what
                )
