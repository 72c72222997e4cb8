"""Clusters: their blocks, the addresses and the lifetime of another block's shared memory, and the cluster's barrier.

PTX ISA 9.0, "Data Movement and Conversion Instructions" (mapa, getctarank, isspacep) and "barrier.cluster". In a chunk
the blocks of a cluster are adjacent, in the order of their ranks. A shared::cluster address holds the rank plus one
above the offset, so that a plain shared address means the block's own memory in both windows.

A block may use an mbarrier of another one after a barrier of the cluster that follows its mbarrier.init, and other
shared memory after any barrier of the cluster. Afterwards the owner has to see the use before it ends: at the mbarrier
itself, or at a later barrier of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from gemmery.errors import EmulationError
from gemmery_emulator.machine import LaunchConfig, Machine, active, report_misuse
from gemmery_emulator.memory import SHARED_WINDOW
from gemmery_emulator.op import Flags, Indices, Kinds, Mask, Values, sort_by_kind
from gemmery_emulator.ptx import Instruction
from gemmery_emulator.steps import Handler, Lowering, Step, lane_step, refused

SPACE = "shared::cluster"
RANK_AT = 24
OFFSET = (1 << RANK_AT) - 1
SHUFFLED = 1 << 24  # largest number of clusters in random order: it takes 128 MB and a second
_BARRIERS: Mapping[str, Kinds] = {
    "barrier.cluster.arrive": {"order": ("release", "relaxed"), "aligned": ("aligned",)},
    "barrier.cluster.wait": {"order": ("acquire",), "aligned": ("aligned",)},
}
BARRIER = -1  # the cluster's barrier in events: not an address in shared memory


def in_order(launch: LaunchConfig, step: int, shuffled: np.random.Generator | None = None) -> Iterator[Indices]:
    """Yield all blocks of a grid, `step` at a time, each cluster together and by rank; `shuffled` orders the clusters.

    >>> from gemmery_emulator.machine import LaunchConfig
    >>> [ids.tolist() for ids in in_order(LaunchConfig((4, 2, 1), (32, 1, 1), cluster=(2, 2, 1)), 4)]
    [[0, 1, 4, 5], [2, 3, 6, 7]]

    Raises EmulationError for more clusters than can be put in random order.
    """
    (gx, gy, _), (x, y, z), each = launch.grid, launch.cluster, launch.together
    clusters = launch.blocks // each
    if shuffled is not None and clusters > SHUFFLED:
        raise EmulationError(
            f"grid={launch.grid} with a seed: an order is drawn of at most {SHUFFLED:,} blocks or clusters; "
            "leave out the seed, or launch fewer"
        )
    drawn = None if shuffled is None else shuffled.permutation(clusters)
    for first in range(0, launch.blocks, step):
        number, rank = np.divmod(np.arange(first, min(first + step, launch.blocks)), each)
        if drawn is not None:
            number = drawn[number]
        across, down = gx // x, gy // y
        column = number % across * x + rank % x
        row = number // across % down * y + rank // x % y
        layer = number // (across * down) * z + rank // (x * y)
        yield column + gx * (row + gy * layer)


def size(machine: Machine) -> int:
    """Blocks of a cluster."""
    return machine.launch.together


def ranks(machine: Machine) -> Indices:
    """Return each block's position in its cluster."""
    return np.arange(machine.blocks) % size(machine)


class Peers:
    """The shared memory of all blocks of a cluster, by shared::cluster addresses."""

    def __init__(self, machine: Machine) -> None:
        self.size, self.stride, self.cluster = machine.shared.size, machine.shared.stride, size(machine)
        self._threads = machine.block_threads
        self._own = np.repeat(np.arange(machine.blocks), machine.block_threads)

    def outside(self, addresses: Values, mask: Mask, width: int) -> Mask:
        """Return a mask of the threads whose address is not within a block of their cluster; None if there are none."""
        bad = ((addresses & OFFSET) + width > self.size) | (addresses < 0) | (addresses >> RANK_AT > self.cluster)
        if mask is not None:
            bad = bad & mask
        return np.atleast_1d(bad) if bad.any() else None

    def relative(self, addresses: Values) -> Indices:
        """Return addresses as byte offsets in the part of the thread's own block, which may be negative."""
        away: Indices = (resolved(addresses, self._own, self.cluster) - self._own) * self.stride + (addresses & OFFSET)
        return away

    def alike(self, threads: Indices, addresses: Indices) -> tuple[Indices, Indices]:
        """Add the threads with the same numbers in the other blocks of the cluster.

        A write into another block counts there as one by the thread with the same number, so that each block can be
        tracked separately.
        """
        if self.cluster == 1:
            return threads, addresses
        block, own = np.divmod(threads, self._threads)
        every = (block - block % self.cluster)[:, None] + np.arange(self.cluster)
        doubles, away = (every * self._threads + own[:, None]).ravel(), np.repeat(addresses, self.cluster) - BARRIER
        if (away == away[0]).all():  # the common case, without sorting
            there = np.zeros(self._own.size, bool)
            there[doubles] = True
            threads = np.flatnonzero(there)
            return threads, np.full(threads.shape, addresses[0])
        both = np.unique(doubles << RANK_AT + 1 | away)
        return both >> RANK_AT + 1, (both & (2 << RANK_AT) - 1) + BARRIER


def report_order(machine: Machine, index: int, threads: Indices, addresses: Indices, acquired: bool) -> None:
    """Report that threads arrived at mbarriers or passed; equal threads of a cluster's blocks count as one."""
    if acquired:
        threads, addresses = machine.unit(Peers).alike(threads, addresses)
    if len(threads):
        machine.observers.ordered(machine, index, threads, addresses, acquired)


def resolved(addresses: Values, own: Indices, cluster: int) -> Indices:
    """Return the block of each address in the chunk, for threads in the blocks `own`."""
    rank = addresses >> RANK_AT
    if not rank.any():
        return own
    blocks: Indices = np.where(rank > 0, own - own % cluster + rank - 1, own)
    return blocks


def destinations(
    machine: Machine, threads: Indices, addresses: Indices, ranks_of: Indices | None
) -> tuple[Indices, Indices]:
    """Return copies by threads and the block of each: that of its address, or those whose bits are set in `ranks_of`.

    Copies are numbered by their threads, of which each may send several.
    """
    own, count = threads // machine.block_threads, size(machine)
    if ranks_of is None:
        return np.arange(len(threads)), resolved(addresses, own, count)
    copies, rank = np.nonzero(ranks_of[:, None] >> np.arange(count) & 1)
    return copies, own[copies] - own[copies] % count + rank


def _of_peers(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """mapa: map an address to the shared memory of the block with a rank; getctarank: the rank of its block."""
    space, kind = instruction.opcode.modifiers, instruction.opcode.type
    if space not in ((), (SPACE,)) or instruction.opcode.types not in (("u32",), ("u64",)):
        raise refused(instruction)
    target, source, *ranks_of = instruction.operands
    read, window = lowering.read(source, kind, instruction), 0 if space else SHARED_WINDOW
    read_ranks = [lowering.read(rank, "u32", instruction) for rank in ranks_of]
    write = lowering.write(target, kind if ranks_of else "u32", instruction)

    def mapped(address: Values, rank: Values) -> Values:
        offset = address.astype(np.int64) - window & OFFSET
        place = (rank.astype(np.int64) + 1 << RANK_AT) + offset + window
        return place.astype(np.uint32 if kind == "u32" else np.uint64)

    def rank(machine: Machine, mask: Mask) -> None:
        ranked = machine.spread(read(machine.registers).astype(np.int64) - window) >> RANK_AT
        own = np.repeat(ranks(machine), machine.block_threads)
        write(machine.registers, mask, np.where(ranked > 0, ranked - 1, own).astype(np.uint32))

    return lane_step(mapped, [read, *read_ranks], [write]) if ranks_of else rank


class ClusterBarrier:
    """The state of barrier.cluster: the number of arrivals and waits of each thread."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._threads = size(machine) * machine.block_threads
        self.arrived, self.waited = np.zeros((2, machine.threads), np.int64)

    def arrive(self, index: int, mask: Mask) -> None:
        """Count the arrival of these threads, which do not wait here."""
        machine = self._machine
        self._report(index, active(machine, mask), acquired=False)
        self.arrived[slice(None) if mask is None else mask] += 1
        machine.changes += 1

    def wait(self, index: int, mask: Mask) -> None:
        """Let those of these threads continue for which all running threads of their cluster have arrived as often."""
        machine, alive = self._machine, self._machine.places.running()
        arrived = np.where(alive, self.arrived, np.iinfo(np.int64).max).reshape(-1, self._threads).min(axis=1)
        passes = np.repeat(arrived, self._threads) > self.waited
        if mask is not None:
            passes &= mask
        self.waited[passes] += 1
        machine.failed = ~passes if mask is None else mask & ~passes
        if passes.any():
            self._report(index, np.flatnonzero(passes), acquired=True)

    def _report(self, index: int, threads: Indices, acquired: bool) -> None:
        report_order(self._machine, index, threads, np.full(threads.shape, BARRIER), acquired)


def _barrier(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """barrier.cluster.arrive and barrier.cluster.wait."""
    opcode = instruction.opcode
    if opcode.types or sort_by_kind(opcode.modifiers, _BARRIERS[opcode.name]) is None:
        raise refused(instruction)
    does = ClusterBarrier.arrive if opcode.name == "barrier.cluster.arrive" else ClusterBarrier.wait
    return lambda machine, mask: does(machine.unit(ClusterBarrier), index, mask)


TABLE = {
    "mapa": Handler(step=_of_peers, operands=(3,), effect=False),
    "getctarank": Handler(step=_of_peers, operands=(2,), effect=False),
    "barrier.cluster.arrive": Handler(step=_barrier, kind="barrier.cluster", orders=True),
    "barrier.cluster.wait": Handler(step=_barrier, kind="barrier.cluster", orders=True, waits=True),
}


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
        self._machine, self.clustered = machine, size(machine) > 1
        if not self.clustered:
            return
        self._granules = machine.shared.stride // 8
        count = self._granules * machine.blocks
        self._barrier = machine.unit(ClusterBarrier)
        self._since, self._seen = np.zeros((2, count), np.int64)  # arrivals before its init; phases its block has seen
        self._barriers, self._blocks = Uses(count), Uses(machine.blocks)
        machine.at_end.append(self._finish)

    def initializes(self, threads: Indices, places: Indices) -> None:
        """Threads initialize mbarriers."""
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
        what = "uses an mbarrier of " + _NOT_BEGUN.format("initialized it yet")
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
        report_misuse(self._machine, index, threads[early], "uses shared memory of " + _NOT_BEGUN.format("begun"))
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
