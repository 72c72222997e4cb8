"""Races in shared and tensor memory, as findings: accesses that nothing orders, and copies that nothing waited for.

While all blocks of a chunk do the same, one of them stands for all: `Followed` of orders.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gemmery.banks import WARP
from gemmery_emulator import specials
from gemmery_emulator.blackwell import COLUMNS, HALF, LANES
from gemmery_emulator.blackwell.operations import Operations
from gemmery_emulator.control import BARRIERS, leaving
from gemmery_emulator.findings import messages
from gemmery_emulator.findings.grid import stored
from gemmery_emulator.findings.messages import EQUAL, Collection
from gemmery_emulator.findings.orders import UPDATES, Clocks, Followed, Orders, Words
from gemmery_emulator.findings.races import ATOMIC, CLOCK_AT, INDEX, INDEX_AT, THREAD, History
from gemmery_emulator.hopper import cluster
from gemmery_emulator.hopper.bulk import Bulk
from gemmery_emulator.hopper.products import Products
from gemmery_emulator.machine import Access, Machine, Observer, active
from gemmery_emulator.op import Flags, Mask
from gemmery_emulator.ptx import Immediate

STORES = frozenset(("st", "stmatrix", "cp.async", "bulk"))


class SharedRaces(Observer):
    """Follows the accesses of a chunk of blocks to shared memory, and what orders them."""

    def __init__(self, machine: Machine, orders: Orders, collection: Collection) -> None:
        self._machine, self._orders, self._collection = machine, orders, collection
        self.clocks = Clocks(1, machine.block_threads // WARP)
        size = machine.shared.size
        zeroed = specials.GROUPS if size > machine.kernel.shared + machine.launch.shared else 0
        self.history = History(self.clocks, machine.block_threads, size, self._conflict, zeroed)
        self.followed = Followed(machine, self.clocks, self.history.spread)
        self._opcodes = [instruction.opcode for instruction in machine.kernel.instructions]
        # The asynchronous readers that the kernel has, how they are called, and how a thread waits for them.
        self._readers: list[tuple[Products | Bulk | Operations, str, str]] = []
        if orders.products:
            self._readers.append((machine.unit(Products), "wgmma", "with wgmma.wait_group"))
        if orders.bulk_groups:
            self._readers.append((machine.unit(Bulk), "bulk copy", "with cp.async.bulk.wait_group.read"))
        if orders.operations.any():
            self._readers.append(
                (machine.unit(Operations), "tcgen05 operation", "at the mbarrier of its tcgen05.commit")
            )

    @property
    def reads_apart(self) -> bool:
        """Whether asynchronous units read shared memory, so that stores are compared with what they read."""
        return bool(self._readers)

    def access(self, machine: Machine, event: Access) -> None:
        """Threads load, store or update."""
        if event.space == cluster.SPACE and event.kind != "ld":
            self._receives(machine, event)
        if event.space != "shared":
            return
        if self._readers and (event.kind in STORES or event.kind in UPDATES):
            writers = active(machine, event.mask)
            self._overwrite(event.index, writers, machine.spread(event.addresses)[writers])
        threads, addresses = self.followed.active(event.addresses, event.mask)
        if not threads.size:
            return
        self.history.event = event
        if event.kind in UPDATES:
            self.history.updates(event.index, addresses, threads, event.width)
        elif event.kind in STORES:
            self.history.writes(event.index, addresses, threads, event.width, event.kind == "cp.async")
        else:
            self.history.reads(event.index, addresses, threads, event.width)
        self._hand_over(event, threads, addresses)

    def finish(self, machine: Machine) -> None:
        self.history.forget()

    def converged(self, machine: Machine, mask: Mask) -> None:
        if self._orders.publishes and self.clocks.publishing.matters():
            self.clocks.converge(self.followed.lanes(mask))

    def fenced(self, machine: Machine, index: int, mask: Mask) -> None:
        if self._orders.fence[index]:
            self.clocks.orders(self.followed.warps(mask))
        else:
            self.clocks.fences(self.followed.lanes(mask), self._orders.proxied[index])

    def _receives(self, machine: Machine, event: Access) -> None:
        """Threads store to shared memory of other blocks of their cluster, where it counts as written from now on."""
        threads = active(machine, event.mask)
        own, number = np.divmod(threads, machine.block_threads)
        addresses = machine.spread(event.addresses)[threads]
        blocks = cluster.resolved(addresses, own, cluster.size(machine))
        if self._readers:
            self._overwrite(event.index, threads, addresses & cluster.OFFSET, blocks)
        there, offsets = self.followed.listed(blocks * machine.block_threads + number, addresses & cluster.OFFSET)
        self.history.receives(event.index, offsets, there, event.width)

    def _hand_over(self, event: Access, threads: Words, addresses: Words) -> None:
        """Atomics order other accesses: by release and acquire, or with fences if they are relaxed or volatile."""
        orders, index = self._orders, event.index
        releases, acquires, fences = orders.releases[index], orders.acquires[index], orders.with_fences[index]
        if not (releases or acquires or fences):
            return
        if releases or (fences and event.kind != "ld"):
            self.clocks.lanes_publish(index, threads, at_fence=not releases)
        for address in np.unique(addresses).tolist():
            key = ("atomic", address)
            warps = self.clocks.warps_of(threads[addresses == address])
            turns = [warps]
            if event.kind == "atom":  # each update sees those before it
                turns = [warps & (np.arange(warps.shape[1]) == warp) for warp in np.flatnonzero(warps.any(axis=0))]
            for warps in turns:
                if acquires:
                    self.clocks.acquire(warps, key)
                elif fences and event.kind in ("ld", "atom"):
                    self.clocks.receive(warps, key)
                if releases or (fences and event.kind != "ld"):
                    self.clocks.publish(warps, key, at_fence=not releases)

    def _overwrite(self, index: int, threads: Words, addresses: Words, blocks: Words | None = None) -> None:
        """Report a write to memory that a product of a warpgroup, or a bulk copy out of it, may still read.

        The memory is that of the threads' own blocks, or of these.
        """
        machine = self._machine
        places = (threads // machine.block_threads if blocks is None else blocks) * machine.shared.stride + addresses
        for unit, name, wait in self._readers:
            read = unit.reader(places)
            if read is None:
                continue
            first, other = read
            thread, where = int(threads[first]), messages.address(machine, "shared", int(addresses[first]))
            message = (
                f"{messages.thread(machine, thread)} writes {where}, which the {name} at "
                f"{messages.line_of(machine, other)} may still read: wait {wait} first"
            )
            # A barrier would not end the unit's reads, whatever pair of threads races beside it.
            self._collection.add(machine, "race", index, thread, 1, message, other, strength=3)

    def landed(self, machine: Machine, index: int, addresses: Words, threads: Words) -> None:
        size = machine.kernel.instructions[index].operands[2]
        assert isinstance(size, Immediate)
        threads, addresses = self.followed.listed(threads, addresses)
        self.history.lands(index, addresses, threads, size.bits)

    def barrier(self, machine: Machine, index: int, barrier: int, mask: Mask) -> None:
        mask = leaving(machine, index, barrier, mask)
        warps = self.followed.warps(mask)
        if barrier < 0:
            self._warps_meet(mask, warps)
        elif BARRIERS[self._opcodes[index].spelling].arrives:
            self.clocks.publishing.meet(warps, self.clocks.clock)
            self.clocks.release(warps, barrier)
        else:
            self.clocks.acquire(warps, barrier)  # from threads that arrived and did not wait
            self.clocks.meets(warps)

    def _warps_meet(self, mask: Mask, warps: Flags) -> None:
        """These threads leave a barrier of their warps, all lanes of a warp that have not ended or some."""
        if mask is not None:
            running = self._machine.places.running().reshape(-1, WARP)
            lanes = mask.reshape(-1, WARP)
            if (running & ~lanes)[lanes.any(axis=1)].any():
                self.clocks.lanes_meet(self.followed.lanes(mask))
                return
        self.clocks.publishing.meet(warps, self.clocks.clock)
        self.clocks.meets_itself(warps)

    def ordered(self, machine: Machine, index: int, threads: Words, addresses: Words, acquired: bool) -> None:
        threads, addresses = self.followed.listed(threads, addresses)
        self.history.event = None
        inside = addresses >= 0  # the barrier of a cluster has no address
        if inside.any():
            self.history.updates(index, addresses[inside], threads[inside], 8)
        if not acquired:
            self.clocks.lanes_publish(index, threads)
        for address in np.unique(addresses).tolist():
            warps = self.clocks.warps_of(threads[addresses == address])
            if acquired:
                self.clocks.acquire(warps, ("mbarrier", address))
            else:
                self.clocks.release(warps, ("mbarrier", address))

    def initialized(self, machine: Machine, index: int, threads: Words, addresses: Words) -> None:
        threads, addresses = self.followed.listed(threads, addresses)
        self.history.event = None
        self.history.writes(index, addresses, threads, 8)

    def bulk(self, machine: Machine, index: int, threads: Words, addresses: Words, what: str) -> None:
        self.history.event = None
        if what == "begins":
            self._overwrite(index, np.repeat(threads, addresses.shape[1]), addresses.ravel())
        threads, addresses = self.followed.pieces(threads, addresses)
        if what == "begins":
            self.history.writes(index, addresses, threads, 16, asynchronous=True)
        elif what == "lands":
            self.history.lands(index, addresses, threads, 16, then=True)
        else:
            stores = np.array([not (opcode.is_bulk or opcode.family == "mbarrier") for opcode in self._opcodes])
            self.history.reads(index, addresses, threads, 16, stores)

    def warpgroup(self, machine: Machine, index: int, threads: Words) -> None:
        threads, _ = self.followed.listed(threads, np.zeros_like(threads))
        self.clocks.meets(self.clocks.warps_of((threads[:, None] + np.arange(0, 4 * WARP, WARP)).ravel()))

    def _conflict(self, kind: str, index: int, threads: Words, addresses: Words, others: Words) -> None:
        """Report the first conflict with each other instruction that the history found."""
        if kind in ("race", "clash"):
            one_warp = threads % self._machine.block_threads >> 5 == (others & THREAD) >> 5
            pairs = index, others >> INDEX_AT & INDEX, one_warp, np.ones_like(one_warp)
            racing = ~self._orders.pairs(*pairs)  # but for those that are both atomic
            event = self.history.event
            if event is not None and event.kind == "st" and event.index == index:
                equal = racing & self._same(kind, threads, addresses, others)
                self._first_of_each(EQUAL, index, threads[equal], addresses[equal], others[equal])
                racing &= ~equal
            threads, addresses, others = threads[racing], addresses[racing], others[racing]
        self._first_of_each("race" if kind == "clash" else kind, index, threads, addresses, others)

    def _first_of_each(self, kind: str, index: int, threads: Words, addresses: Words, others: Words) -> None:
        """Report the first conflict with each other instruction."""
        instructions = others >> INDEX_AT & INDEX
        for other in np.unique(instructions).tolist():
            these = instructions == other
            apart = these & (threads % self._machine.block_threads >> 5 != (others & THREAD) >> 5)
            strong = kind in ("race", EQUAL) and bool(apart.any())
            first = int((apart if strong else these).argmax())  # of two warps if there are any
            place = int(threads[first]), int(addresses[first])
            count = int(these.sum()) * self.followed.alike
            self._report(kind, index, *place, other, int(others[first]), count, int(strong))

    def _report(
        self, kind: str, index: int, thread: int, address: int, other: int, stamp: int, count: int, strength: int
    ) -> None:
        machine = self._machine
        place = f"{messages.thread(machine, thread)} reads {messages.address(machine, 'shared', address)}"
        message: str | Callable[[], str]
        if kind in ("race", EQUAL):
            access = machine, index, thread, address, other, stamp & THREAD, bool(stamp & ATOMIC)
            released = self.clocks.publishing.releases.missed.get((stamp & 31, stamp >> CLOCK_AT))
            message = partial(messages.race, *access, messages.reason(machine, kind, released))
        elif kind == "uninitialized":
            message = f"{place}, which no thread has written: write it first, or do not read it"
        elif kind == "not landed":
            way_out = "its group first (cp.async.wait_group with a smaller number)"
            if messages.in_bulk(machine, other):
                way_out = "its mbarrier first, which has to expect all bytes of the copy"
            at = messages.line_of(machine, other)
            message = f"{place}, which the cp.async at {at} may still be writing: wait for {way_out}"
        else:
            message = (
                f"{place} through the async proxy, which was written at {messages.line_of(machine, other)} without a "
                "fence.proxy.async since: put one after the store, before the barrier"
            )
            kind = "misuse"
        second = None if kind == "uninitialized" else other
        self._collection.add(machine, kind, index, thread, count, message, second, strength)

    def _same(self, kind: str, threads: Words, addresses: Words, others: Words) -> Flags:
        """Stores of the value that the other thread stored: the order does not matter."""
        machine, size = self._machine, self.history.granule
        event = self.history.event
        own = stored(event, machine, threads, addresses, size)
        blocks = threads // machine.block_threads
        if kind == "clash":
            other = stored(event, machine, blocks * machine.block_threads + (others & THREAD), addresses, size)
        else:
            other = machine.shared.data[(blocks * machine.shared.stride + addresses)[:, None] + np.arange(size)]
        same: Flags = np.all(own == other, axis=1) & self._orders.stores[others >> INDEX_AT & INDEX]
        return same


WORD = 4


class TensorRaces(Observer):
    """Races in tensor memory: what nothing orders with a product or a copy of another thread, or with a warp.

    The clocks are those of shared memory. A word stands for one column of 16 lanes.
    """

    def __init__(self, machine: Machine, orders: Orders, followed: Followed, collection: Collection) -> None:
        self._machine, self._followed, self._collection = machine, followed, collection
        self._operations = orders.operations
        if orders.tensor_memory:
            size = LANES // HALF * COLUMNS * WORD
            self._history = History(followed.clocks, machine.block_threads, size, self._conflict)
            followed.spreads.append(self._history.spread)

    def tensor(self, machine: Machine, index: int, threads: Words, addresses: Words, what: str) -> None:
        threads, addresses = self._followed.pieces(threads, addresses)
        if what == "reads":
            self._history.reads(index, addresses, threads, WORD)
        elif what == "lands":
            self._history.lands(index, addresses, threads, WORD, then=True)
        else:
            self._history.writes(index, addresses, threads, WORD, asynchronous=what == "begins")

    def _conflict(self, kind: str, index: int, threads: Words, addresses: Words, others: Words) -> None:
        """Report a conflict, unless one thread's operations follow each other."""
        instructions = others >> INDEX_AT & INDEX
        own = threads % self._machine.block_threads == others & THREAD
        if kind == "uninitialized":
            bad = self._operations[np.full(threads.shape, index)]
        else:
            bad = ~(own & self._operations[index] & self._operations[instructions])
        if not bad.any():
            return
        first, machine = int(bad.argmax()), self._machine
        other, thread = int(instructions[first]), messages.thread(machine, int(threads[first]))
        half, column = divmod(int(addresses[first]) // WORD, COLUMNS)
        where = f"column {column} of tensor memory (lanes {half * HALF} to {half * HALF + HALF - 1})"
        does = "uses" if self._operations[index] else "reads" if self._name(index) == "tcgen05.ld" else "writes"
        at = messages.line_of(machine, other)
        if kind == "uninitialized":
            message = f"{thread} adds to {where}, which nothing has written: the first product must not add"
        elif kind == "not landed" or (self._operations[other] and not own[first]):
            way_out = "wait at the mbarrier of a tcgen05.commit that follows it"
            message = f"{thread} {does} {where}, which the {self._name(other)} at {at} may still use: {way_out}"
        else:
            second = messages.thread(machine, int(others[first] & THREAD), False)
            message = (
                f"{thread} {does} {where}, which {second} uses at {at}; nothing orders the two: let one arrive at a "
                "barrier where the other waits, with tcgen05.fence::before_thread_sync and ::after_thread_sync"
            )
        kind, pair = ("uninitialized", None) if kind == "uninitialized" else ("race", other)
        count = int(bad.sum()) * self._followed.alike
        self._collection.add(machine, kind, index, int(threads[first]), count, message, pair)

    def _name(self, index: int) -> str:
        return self._machine.kernel.instructions[index].opcode.name
