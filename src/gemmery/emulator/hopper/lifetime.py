"""Whether the shared memory that a block uses in another block of its cluster is there: begun, and not ended.

A block may use an mbarrier of another one after a barrier of the cluster that follows its mbarrier.init, and other
shared memory after any barrier of the cluster. Afterwards the owner has to see the use before it ends: at the mbarrier
itself, or at a later barrier of the cluster.
"""

from __future__ import annotations

import numpy as np

from gemmery.emulator.hopper import cluster
from gemmery.emulator.hopper.cluster import ClusterBarrier
from gemmery.emulator.machine import Machine, report_misuse
from gemmery.emulator.op import Flags, Indices

_NOT_BEGUN = "another block, which may not have {}: let the cluster meet first (barrier.cluster.arrive and .wait)"
_ENDED = (
    "uses shared memory of another block, which may have ended: let the cluster meet before its blocks end "
    "(barrier.cluster.arrive and .wait), or let that block wait for this"
)


class Uses:
    """The latest use by another block of each mbarrier, or of the memory of each block; instruction 0 for none."""

    def __init__(self, count: int) -> None:
        self.instruction, self.thread, self.arrived, self.phase = np.zeros((4, count), np.int64)
        self.any = np.zeros(count, bool)

    def note(self, places: Indices, index: int, threads: Indices, arrived: Indices, phase: Indices) -> None:
        """Another block's threads use these places, after so many arrivals at the barrier of the cluster."""
        self.instruction[places], self.thread[places], self.any[places] = index, threads, True
        self.arrived[places] = np.maximum(self.arrived[places], arrived)
        self.phase[places] = np.maximum(self.phase[places], phase)


class Lifetimes:
    """What blocks of a chunk use of each other, with what the cluster's barriers say about it."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self.clustered = machine, cluster.size(machine) > 1
        if not self.clustered:
            return
        self._granules = machine.shared.stride // 8
        count = self._granules * machine.blocks
        self._barrier = machine.unit(ClusterBarrier)
        self._since, self._seen = np.zeros((2, count), np.int64)  # arrivals before its init; phases its block has seen
        self._barriers, self._blocks = Uses(count), Uses(machine.blocks)
        machine.at_end.append(self._finish)

    def initialises(self, threads: Indices, places: Indices) -> None:
        """Threads initialise mbarriers."""
        if self.clustered:
            self._since[places] = self._barrier.arrived[threads]

    def passes(self, places: Indices, phases: Indices) -> None:
        """Threads pass mbarriers of their own blocks, of which so many phases have ended."""
        if self.clustered:
            np.maximum.at(self._seen, places, phases)

    def arrives(self, index: int, threads: Indices, places: Indices, phases: Indices) -> None:
        """Threads arrive at mbarriers, or start copies that do; only those of other blocks count."""
        own, owners = threads // self._machine.block_threads, places // max(self._granules, 1)
        remote = own != owners
        if not remote.any():
            return
        threads, places, own = threads[remote], places[remote], own[remote]
        early = self._barriers_passed()[own] <= self._since[places]
        if early.any():
            what = "uses an mbarrier of " + _NOT_BEGUN.format("initialised it yet")
            report_misuse(self._machine, index, threads[early], what)
        self._blocks.any[owners[remote]] = False  # a wait for this arrival may cover what came before
        self._barriers.note(places, index, threads, self._barrier.arrived[threads], phases[remote])

    def accesses(self, index: int, threads: Indices, blocks: Indices) -> None:
        """Threads load from the shared memory of these blocks, or store to it."""
        own = threads // self._machine.block_threads
        remote = own != blocks
        if not remote.any():
            return
        threads, blocks, own = threads[remote], blocks[remote], own[remote]
        early = self._barriers_passed()[own] == 0
        if early.any():
            what = "uses shared memory of " + _NOT_BEGUN.format("begun")
            report_misuse(self._machine, index, threads[early], what)
        self._blocks.note(blocks, index, threads, self._barrier.arrived[threads], np.zeros_like(blocks))

    def _barriers_passed(self) -> Indices:
        """For each block the barriers of the cluster that a thread of it has passed."""
        passed: Indices = self._barrier.waited.reshape(self._machine.blocks, -1).max(axis=1)
        return passed

    def _finish(self) -> None:
        """Report what the owner may not have seen when it ended."""
        passed, barriers = self._barriers_passed(), self._barriers
        unseen = barriers.any & (barriers.phase >= self._seen)
        self._report(barriers, unseen & (np.repeat(passed, self._granules) <= barriers.arrived))
        self._report(self._blocks, self._blocks.any & (passed <= self._blocks.arrived))

    def _report(self, uses: Uses, bad: Flags) -> None:
        for index in np.unique(uses.instruction[bad]).tolist():
            report_misuse(self._machine, index, uses.thread[bad & (uses.instruction == index)], _ENDED)
