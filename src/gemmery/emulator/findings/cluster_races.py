"""Bulk copies into another block's shared memory, which its readers have to allow first.

Blocks of a cluster run in step here, and races.py counts the threads of one number in all of them as one. So the reads
of each block are followed here with the clocks of all warps of the cluster: the thread that starts a copy must have
seen the reads of every block that it copies into, through an mbarrier or a barrier of the cluster.
"""

from __future__ import annotations

import numpy as np

from gemmery.banks import WARP
from gemmery.emulator.control import BARRIERS
from gemmery.emulator.findings import messages
from gemmery.emulator.findings.clocks import Clocks, Words
from gemmery.emulator.findings.finding import Collection
from gemmery.emulator.findings.orders import Orders
from gemmery.emulator.hopper import cluster
from gemmery.emulator.hopper.bulk import PIECE
from gemmery.emulator.machine import Access, BarrierEvent, CopyEvent, Machine
from gemmery.emulator.op import Flags, Mask

READS = frozenset(("ld", "ldmatrix"))
# A stamp: bits 0-9 the warp in its cluster, 10-31 the instruction, from 32 on the clock.
WARP_IN_CLUSTER, INDEX_AT, INDEX, CLOCK_AT = 1023, 10, (1 << 22) - 1, 32


def followed(machine: Machine, orders: Orders) -> bool:
    """Whether blocks of a cluster may copy into each other.

    What threads hand over in global memory, and what tcgen05 reads, is not followed.
    """
    if cluster.size(machine) == 1 or orders.hands_over or orders.operations.any():
        return False
    opcodes = (instruction.opcode for instruction in machine.kernel.instructions)
    return any(opcode.name == "mapa" or "multicast::cluster" in opcode.modifiers for opcode in opcodes)


class ClusterRaces:
    """The last two warps that read each piece of a chunk's shared memory, and what orders the warps of a cluster."""

    def __init__(self, machine: Machine, collection: Collection) -> None:
        self._machine, self._collection = machine, collection
        self._size, self._warps = cluster.size(machine), machine.block_threads // WARP
        self.clocks = Clocks(machine.blocks // self._size, self._size * self._warps)
        self._pieces = -(-machine.shared.size // PIECE)
        self._read, self._read_too = np.zeros((2, machine.blocks * self._pieces), np.int64)
        self._opcodes = [instruction.opcode for instruction in machine.kernel.instructions]

    # ---- what reads and copies ----

    def access(self, event: Access) -> None:
        """Threads read shared memory of their own block."""
        if event.kind not in READS:
            return
        machine = self._machine
        threads = np.arange(machine.threads) if event.mask is None else np.flatnonzero(event.mask)
        self._reads(event.index, threads, machine.spread(event.addresses)[threads])

    def bulk(self, index: int, threads: Words, addresses: Words) -> None:
        """Asynchronous units read 16 bytes at each of `addresses` (threads, pieces)."""
        self._reads(index, np.repeat(threads, addresses.shape[1]), addresses.ravel())

    def _reads(self, index: int, threads: Words, addresses: Words) -> None:
        places = threads // self._machine.block_threads * self._pieces + addresses // PIECE
        warps = threads // WARP
        stamps = self.clocks.clock.reshape(-1)[warps] << CLOCK_AT | index << INDEX_AT
        stamps |= warps % (self._size * self._warps)
        before = self._read[places]
        self._read[places] = stamps
        last = self._read[places]
        for candidates in (before, stamps):
            other = ((candidates ^ last) & WARP_IN_CLUSTER != 0) & (candidates != 0)
            self._read_too[places[other]] = candidates[other]

    def copied(self, event: CopyEvent) -> None:
        """Threads start copies: those into other blocks need their readers' leave."""
        own = event.threads // self._machine.block_threads
        for copy in np.flatnonzero(own != event.blocks).tolist():
            self._check(event, copy)
        self._release(event.threads, event.blocks, event.barriers)

    def _check(self, event: CopyEvent, copy: int) -> None:
        machine, each = self._machine, self._size * self._warps
        thread, block = int(event.threads[copy]), int(event.blocks[copy])
        at, warp = divmod(thread // WARP, each)
        addresses = event.addresses[copy]
        places = block * self._pieces + addresses // PIECE
        for read in (self._read[places], self._read_too[places]):
            unseen = read >> CLOCK_AT > self.clocks.known[at, warp, read & WARP_IN_CLUSTER]
            unseen &= read & WARP_IN_CLUSTER != warp
            if unseen.any():
                first = int(unseen.argmax())
                other = int(read[first] >> INDEX_AT & INDEX)
                where = messages.address(machine, "shared", int(addresses[first]))
                there = messages.block(machine, block)
                text = (
                    f"{messages.thread(machine, thread)} copies to {where} of {there}, which threads there read at "
                    f"{self._collection.line(machine, other)}; nothing orders the two: let the readers "
                    "arrive at an mbarrier of the block that copies, too, and wait for it before the copy"
                )
                self._collection.add(machine, "race", event.index, thread, 1, text, other)
                return

    # ---- what orders warps ----

    def barrier(self, index: int, barrier: int, mask: Mask) -> None:
        """These threads leave a barrier of their blocks or warps."""
        warps = self._of_mask(mask)
        if barrier < 0:
            self.clocks.meets_itself(warps)
            return
        blocks = warps.reshape(-1, self._size, self._warps)
        for rank in range(self._size):
            only = np.zeros_like(blocks)
            only[:, rank] = blocks[:, rank]
            some, key = only.reshape(warps.shape), ("barrier", rank, barrier)
            if not some.any():
                continue
            if BARRIERS[self._opcodes[index].spelling].arrives:
                self.clocks.release(some, key)
            else:
                self.clocks.acquire(some, key)
                self.clocks.meets(some)

    def ordered(self, index: int, threads: Words, addresses: Words, acquired: bool) -> None:
        """Threads arrive at the barrier of their cluster or pass it, or cp.async arrives for them at an mbarrier."""
        if self._opcodes[index].name == "cp.async.mbarrier.arrive":
            self._release(threads, threads // self._machine.block_threads, addresses)
        elif addresses[0] == cluster.BARRIER and acquired:
            self.clocks.acquire(self._of(threads), cluster.BARRIER)
        elif addresses[0] == cluster.BARRIER and "relaxed" not in self._opcodes[index].modifiers:
            self.clocks.release(self._of(threads), cluster.BARRIER)

    def mbarrier(self, event: BarrierEvent) -> None:
        """Threads arrive at mbarriers of any block of the cluster, or pass those of their own."""
        if event.what == "passes":
            for key, some in self._each(event.blocks, event.addresses):
                self.clocks.acquire(self._of(event.threads[some]), key)
        elif event.what in ("arrives", "expects") and "relaxed" not in self._opcodes[event.index].modifiers:
            self._release(event.threads, event.blocks, event.addresses)

    def warpgroup(self, threads: Words) -> None:
        """The four warps from each of these threads on have waited together."""
        each = self._size * self._machine.block_threads  # threads of a cluster
        for first in np.unique(threads % each):
            some = threads[threads % each == first]
            self.clocks.meets(self._of((some[:, None] + np.arange(0, 4 * WARP, WARP)).ravel()))

    def _release(self, threads: Words, blocks: Words, addresses: Words) -> None:
        for key, some in self._each(blocks, addresses):
            self.clocks.release(self._of(threads[some]), key)

    def _each(self, blocks: Words, addresses: Words) -> list[tuple[tuple[str, int, int], Flags]]:
        """The mbarriers, by the rank of their block and their address, and which of the rows are theirs."""
        ranks = blocks % self._size
        return [
            (("mbarrier", rank, address), (ranks == rank) & (addresses == address))
            for rank, address in np.unique(np.stack([ranks, addresses]), axis=1).T.tolist()
        ]

    def _of(self, threads: Words) -> Flags:
        """The warps of these threads: (clusters, warps of a cluster)."""
        warps: Flags = np.zeros(self.clocks.clock.shape, np.bool_)
        warps.reshape(-1)[threads // WARP] = True
        return warps

    def _of_mask(self, mask: Mask) -> Flags:
        if mask is None:
            return np.ones(self.clocks.clock.shape, np.bool_)
        warps: Flags = np.any(mask.reshape(*self.clocks.clock.shape, WARP), axis=2)
        return warps
