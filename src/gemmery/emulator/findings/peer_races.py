"""Races in shared memory between blocks of a cluster: loads, stores and atomics that one of them makes in another.

Accesses of one block to its own shared memory are compared in races.py. Here each granule remembers the last thread
that wrote it, and two that read it, of different blocks if possible; the clocks of cluster_races.py tell what orders
warps of different blocks: barriers of the cluster and mbarriers.
"""

from __future__ import annotations

import numpy as np

from gemmery.banks import WARP
from gemmery.emulator.findings import messages
from gemmery.emulator.findings.clocks import Clocks, Words
from gemmery.emulator.findings.finding import Collection
from gemmery.emulator.findings.orders import UPDATES, Orders, is_fence
from gemmery.emulator.hopper import cluster
from gemmery.emulator.machine import Access, Machine
from gemmery.emulator.op import Flags

WRITES = UPDATES | {"st", "stmatrix"}
KINDS = WRITES | {"ld", "ldmatrix"}
# A stamp: bits 0-15 the thread in its cluster, 16-37 the instruction, from 38 on the clock.
THREAD, INDEX_AT, INDEX, CLOCK_AT = (1 << 16) - 1, 16, (1 << 22) - 1, 38
_WAY_OUT = (
    "nothing orders the two: let the cluster meet in between (barrier.cluster.arrive and .wait), or let one block wait "
    "for an mbarrier at which the other arrives"
)


def followed(machine: Machine, orders: Orders) -> bool:
    """Whether threads may access shared memory of other blocks, which barriers and mbarriers alone order.

    What is handed over by atomics in shared memory is not followed.
    """
    opcodes = [instruction.opcode for instruction in machine.kernel.instructions]
    accesses = any(
        opcode.family in ("ld", "st", *UPDATES) and opcode.space in ("", cluster.SPACE)
        for opcode in opcodes
        if opcode.type
    )
    hands_over = orders.with_fences.any() or ((orders.releases | orders.acquires) & orders.atomic).any()
    relaxed = any(opcode.name == "barrier.cluster.arrive" and "relaxed" in opcode.modifiers for opcode in opcodes)
    return accesses and not hands_over and not (relaxed and any(map(is_fence, opcodes)))


class PeerRaces:
    """The accesses of a chunk to shared memory that other blocks of the cluster may access, too."""

    def __init__(self, machine: Machine, clocks: Clocks, collection: Collection) -> None:
        self._machine, self._clocks, self._collection = machine, clocks, collection
        self._barrier = machine.unit(cluster.ClusterBarrier)
        self._threads = cluster.size(machine) * machine.block_threads  # of a cluster
        opcodes = [instruction.opcode for instruction in machine.kernel.instructions]
        narrow = any(opcode.family in KINDS and opcode.type.endswith(("8", "b16", "u16", "s16")) for opcode in opcodes)
        self._granule = 1 if narrow else 4
        self._each = -(-machine.shared.size // self._granule)
        self._written, self._read, self._read_too = np.zeros((3, machine.blocks * self._each), np.int64)
        self._updates = np.array([opcode.name in UPDATES for opcode in opcodes])

    def access(self, event: Access) -> None:
        """Threads access shared memory, of their own block or of another."""
        if event.kind not in KINDS:
            return
        machine = self._machine
        threads = np.arange(machine.threads) if event.mask is None else np.flatnonzero(event.mask)
        addresses = machine.spread(event.addresses)[threads]
        blocks = cluster.resolved(addresses, threads // machine.block_threads, cluster.size(machine))
        count = max(event.width // self._granule, 1)
        places = blocks * self._each + (addresses & cluster.OFFSET) // self._granule
        places = (places[:, None] + np.arange(count)).ravel()
        threads = np.repeat(threads, count)
        stamps = self._clocks.clock.reshape(-1)[threads // WARP] << CLOCK_AT | event.index << INDEX_AT
        stamps |= threads % self._threads
        self._check(event.index, threads, places, self._written[places])
        if event.kind not in WRITES:
            self._reads(places, stamps)
            return
        self._check(event.index, threads, places, self._read[places])
        self._check(event.index, threads, places, self._read_too[places])
        self._written[places] = stamps
        self._check(event.index, threads, places, self._written[places])  # blocks that write together

    def _reads(self, places: Words, stamps: Words) -> None:
        before = self._read[places]
        self._read[places] = stamps
        last = self._read[places]
        for candidates in (before, stamps):
            other = self._apart(candidates & THREAD, last & THREAD) & (candidates != 0)
            self._read_too[places[other]] = candidates[other]

    def _apart(self, threads: Words, others: Words) -> Flags:
        """Whether threads, numbered in their clusters, are of different blocks."""
        each = self._machine.block_threads
        apart: Flags = threads // each != others // each
        return apart

    def _check(self, index: int, threads: Words, places: Words, others: Words) -> None:
        own, then = threads % self._threads, others >> INDEX_AT & INDEX
        racing = (others != 0) & self._apart(own, others & THREAD) & ~(self._updates[index] & self._updates[then])
        # Before its first barrier of the cluster, a use of another block's memory is a misuse (lifetime.py).
        racing &= self._barrier.waited[threads] > 0
        if not racing.any():
            return
        known = self._clocks.known[threads // self._threads, own // WARP, (others & THREAD) // WARP]
        racing &= others >> CLOCK_AT > known
        for other in np.unique(then[racing]).tolist():
            these = racing & (then == other)
            self._report(index, other, these, threads, places, others)

    def _report(self, index: int, other: int, these: Flags, threads: Words, places: Words, others: Words) -> None:
        machine, first = self._machine, int(these.argmax())
        thread, place = int(threads[first]), int(places[first])
        second = thread - thread % self._threads + (int(others[first]) & THREAD)
        where = messages.address(machine, "shared", place % self._each * self._granule)
        text = (
            f"{messages.thread(machine, thread)} {messages.does(machine, index)} {where} of "
            f"{messages.block(machine, place // self._each)}, which {messages.thread(machine, second)} "
            f"{messages.does(machine, other)} at {messages.line_of(machine, other)}; {_WAY_OUT}"
        )
        self._collection.add(machine, "race", index, thread, int(these.sum()), text, other)
