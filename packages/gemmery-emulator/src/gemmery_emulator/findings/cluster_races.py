"""Races in shared memory between blocks of a cluster: bulk copies, loads, stores and atomics of one in another.

Blocks of a cluster run in step here, and races.py counts the threads of one number in all of them as one. So the reads
of each block are followed here with the clocks of all warps of the cluster: the thread that starts a copy must have
seen the reads of every block that it copies into, through an mbarrier or a barrier of the cluster.

Of loads, stores and atomics, each granule remembers the last thread that wrote it, and two that read it, of different
blocks if possible; the same clocks tell what orders warps of different blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gemmery.banks import WARP
from gemmery_emulator.control import BARRIERS, leaving
from gemmery_emulator.findings import messages
from gemmery_emulator.findings.messages import Collection
from gemmery_emulator.findings.orders import UPDATES, Clocks, Orders, Words, is_fence
from gemmery_emulator.hopper import cluster
from gemmery_emulator.hopper.async_stores import TABLE, WORD, AsyncStores
from gemmery_emulator.hopper.bulk import PIECE
from gemmery_emulator.machine import Access, BarrierEvent, CopyEvent, Machine, Observer, active
from gemmery_emulator.op import Flags, Mask

READS = frozenset(("ld", "ldmatrix"))
# A stamp: bits 0-15 the warp or the thread in its cluster, 16-37 the instruction, from 38 on the clock.
WHO, INDEX_AT, INDEX, CLOCK_AT = (1 << 16) - 1, 16, (1 << 22) - 1, 38


def may_copy(machine: Machine, orders: Orders) -> bool:
    """Whether blocks of a cluster may copy into each other.

    What threads hand over in global memory, and what tcgen05 reads, is not followed.
    """
    if cluster.size(machine) == 1 or orders.hands_over or orders.operations.any():
        return False
    opcodes = (instruction.opcode for instruction in machine.kernel.instructions)
    return any(opcode.name == "mapa" or "multicast::cluster" in opcode.modifiers for opcode in opcodes)


class ClusterRaces(Observer):
    """The last two warps that read each piece of a chunk's shared memory, and what orders the warps of a cluster."""

    def __init__(self, machine: Machine, collection: Collection) -> None:
        self._machine, self._collection = machine, collection
        self._size, self._warps = cluster.size(machine), machine.block_threads // WARP
        self.clocks = Clocks(machine.blocks // self._size, self._size * self._warps)
        self._pieces = -(-machine.shared.size // PIECE)
        self._read, self._read_too = np.zeros((2, machine.blocks * self._pieces), np.int64)
        self._opcodes = [instruction.opcode for instruction in machine.kernel.instructions]

    # ---- what reads and copies ----

    def access(self, machine: Machine, event: Access) -> None:
        if event.space != "shared" or event.kind not in READS:
            return
        threads = active(machine, event.mask)
        self._reads(event.index, threads, machine.spread(event.addresses)[threads])

    def bulk(self, machine: Machine, index: int, threads: Words, addresses: Words, what: str) -> None:
        if what == "reads":
            self._reads(index, np.repeat(threads, addresses.shape[1]), addresses.ravel())

    def _reads(self, index: int, threads: Words, addresses: Words) -> None:
        places = threads // self._machine.block_threads * self._pieces + addresses // PIECE
        warps = threads // WARP
        stamps = self.clocks.clock.reshape(-1)[warps] << CLOCK_AT | index << INDEX_AT
        stamps |= warps % (self._size * self._warps)
        _keep_two(self._read, self._read_too, places, stamps, np.not_equal)

    def copied(self, machine: Machine, event: CopyEvent) -> None:
        """Threads start copies: those into other blocks need their readers' leave."""
        own = event.threads // machine.block_threads
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
            unseen = read >> CLOCK_AT > self.clocks.known[at, warp, read & WHO]
            unseen &= read & WHO != warp
            if unseen.any():
                first = int(unseen.argmax())
                other = int(read[first] >> INDEX_AT & INDEX)
                where = messages.address(machine, "shared", int(addresses[first]))
                there = messages.block(machine, block)
                text = (
                    f"{messages.thread(machine, thread)} copies to {where} of {there}, which threads there read at "
                    f"{messages.line_of(machine, other)}; nothing orders the two: let the readers "
                    "arrive at an mbarrier of the block that copies, too, and wait for it before the copy"
                )
                self._collection.add(machine, "race", event.index, thread, 1, text, other)
                return

    # ---- what orders warps ----

    def sends(self, machine: Machine, index: int, threads: Words, blocks: Words, barriers: Words) -> None:
        """Threads start stores: whoever waits at the mbarrier sees what they did before, and what they store."""
        self._release(threads, blocks, barriers)

    def barrier(self, machine: Machine, index: int, barrier: int, mask: Mask) -> None:
        mask = leaving(machine, index, barrier, mask)
        warps: Flags = np.ones(self.clocks.clock.shape, np.bool_)
        if mask is not None:
            warps = np.any(mask.reshape(*warps.shape, WARP), axis=2)
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

    def ordered(self, machine: Machine, index: int, threads: Words, addresses: Words, acquired: bool) -> None:
        """Threads arrive at the barrier of their cluster or pass it, or cp.async arrives for them at an mbarrier."""
        if self._opcodes[index].name == "cp.async.mbarrier.arrive":
            self._release(threads, threads // machine.block_threads, addresses)
        elif addresses[0] == cluster.BARRIER and acquired:
            self.clocks.acquire(self.clocks.warps_of(threads), cluster.BARRIER)
        elif addresses[0] == cluster.BARRIER and "relaxed" not in self._opcodes[index].modifiers:
            self.clocks.release(self.clocks.warps_of(threads), cluster.BARRIER)

    def mbarrier(self, machine: Machine, event: BarrierEvent) -> None:
        """Threads arrive at mbarriers of any block of the cluster, or pass those of their own."""
        if event.what == "passes":
            for key, some in self._each(event.blocks, event.addresses):
                self.clocks.acquire(self.clocks.warps_of(event.threads[some]), key)
        elif event.what in ("arrives", "expects") and "relaxed" not in self._opcodes[event.index].modifiers:
            self._release(event.threads, event.blocks, event.addresses)

    def warpgroup(self, machine: Machine, index: int, threads: Words) -> None:
        each = self._size * machine.block_threads  # threads of a cluster
        for first in np.unique(threads % each):
            some = threads[threads % each == first]
            self.clocks.meets(self.clocks.warps_of((some[:, None] + np.arange(0, 4 * WARP, WARP)).ravel()))

    def _release(self, threads: Words, blocks: Words, addresses: Words) -> None:
        for key, some in self._each(blocks, addresses):
            self.clocks.release(self.clocks.warps_of(threads[some]), key)

    def _each(self, blocks: Words, addresses: Words) -> list[tuple[tuple[str, int, int], Flags]]:
        """The mbarriers, by the rank of their block and their address, and which of the rows are theirs."""
        ranks = blocks % self._size
        return [
            (("mbarrier", rank, address), (ranks == rank) & (addresses == address))
            for rank, address in np.unique(np.stack([ranks, addresses]), axis=1).T.tolist()
        ]


WRITES = UPDATES | {"st", "stmatrix"}
KINDS = WRITES | {"ld", "ldmatrix"}
_WAY_OUT = (
    "nothing orders the two: let the cluster meet in between (barrier.cluster.arrive and .wait), or let one block wait "
    "for an mbarrier at which the other arrives"
)


def may_access(machine: Machine, orders: Orders) -> bool:
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


class PeerRaces(Observer):
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

    def access(self, machine: Machine, event: Access) -> None:
        """Threads access shared memory, of their own block or of another."""
        if event.space not in ("shared", cluster.SPACE) or event.kind not in KINDS:
            return
        threads = active(machine, event.mask)
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
            _keep_two(self._read, self._read_too, places, stamps, self._apart)
            return
        self._check(event.index, threads, places, self._read[places])
        self._check(event.index, threads, places, self._read_too[places])
        self._written[places] = stamps
        self._check(event.index, threads, places, self._written[places])  # blocks that write together

    def _apart(self, threads: Words, others: Words) -> Flags:
        """Whether threads, numbered in their clusters, are of different blocks."""
        each = self._machine.block_threads
        apart: Flags = threads // each != others // each
        return apart

    def _check(self, index: int, threads: Words, places: Words, others: Words) -> None:
        own, then = threads % self._threads, others >> INDEX_AT & INDEX
        racing = (others != 0) & self._apart(own, others & WHO) & ~(self._updates[index] & self._updates[then])
        # Before its first barrier of the cluster, a use of another block's memory is a misuse (cluster.py).
        racing &= self._barrier.waited[threads] > 0
        if not racing.any():
            return
        known = self._clocks.known[threads // self._threads, own // WARP, (others & WHO) // WARP]
        racing &= others >> CLOCK_AT > known
        for other in np.unique(then[racing]).tolist():
            these = racing & (then == other)
            machine, first = self._machine, int(these.argmax())
            thread, place = int(threads[first]), int(places[first])
            second = thread - thread % self._threads + (int(others[first]) & WHO)
            where = messages.address(machine, "shared", place % self._each * self._granule)
            text = (
                f"{messages.thread(machine, thread)} {messages.does(machine, index)} {where} of "
                f"{messages.block(machine, place // self._each)}, which {messages.thread(machine, second)} "
                f"{messages.does(machine, other)} at {messages.line_of(machine, other)}; {_WAY_OUT}"
            )
            self._collection.add(machine, "race", index, thread, int(these.sum()), text, other)


class AsyncRaces(Observer):
    """Accesses of shared memory to which an st.async or red.async is under way."""

    def __init__(self, machine: Machine, collection: Collection) -> None:
        self._machine, self._collection = machine, collection
        self._under_way = machine.unit(AsyncStores)
        self._names = [instruction.opcode.name for instruction in machine.kernel.instructions]

    def access(self, machine: Machine, event: Access) -> None:
        if event.space not in ("shared", cluster.SPACE) or not self._under_way.count.any():
            return
        threads = active(machine, event.mask)
        addresses = machine.spread(event.addresses)[threads]
        blocks = cluster.resolved(addresses, threads // machine.block_threads, cluster.size(machine))
        first = (blocks * machine.shared.stride + (addresses & cluster.OFFSET)) // WORD
        words = first[:, None] + np.arange(max(event.width // WORD, 1))
        racing = self._under_way.count[words] > 0
        if self._names[event.index] == "red.async":  # sums of several threads
            racing &= np.array([name != "red.async" for name in self._names])[self._under_way.index[words]]
        if not racing.any():
            return
        row, column = (int(each[0]) for each in np.nonzero(racing))
        word, thread = int(words[row, column]), int(threads[row])
        other = int(self._under_way.index[word])
        where = messages.address(machine, "shared", word * WORD % machine.shared.stride)
        sender = messages.thread(machine, int(self._under_way.thread[word]))
        text = (
            f"{messages.thread(machine, thread)} {messages.does(machine, event.index)} {where} of "
            f"{messages.block(machine, int(blocks[row]))}, which {sender} {messages.does(machine, other)} at "
            f"{messages.line_of(machine, other)} by {self._names[other]}; nothing has waited for it: wait at its "
            "mbarrier first"
        )
        self._collection.add(
            machine, "race", event.index, thread, int(racing.any(axis=1).sum()), text, other, strength=3
        )


def sends(machine: Machine) -> bool:
    """Whether a kernel has asynchronous stores."""
    return any(instruction.opcode.name in TABLE for instruction in machine.kernel.instructions)


def _keep_two(
    read: Words, read_too: Words, places: Words, stamps: Words, apart: Callable[[Words, Words], Flags]
) -> None:
    """Keep two readers of each place that are apart: whoever else writes it differs from one of them."""
    before = read[places]
    read[places] = stamps
    last = read[places]
    for candidates in (before, stamps):
        other = apart(candidates & WHO, last & WHO) & (candidates != 0)
        read_too[places[other]] = candidates[other]
