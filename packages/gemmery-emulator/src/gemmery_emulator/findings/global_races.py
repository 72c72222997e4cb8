"""Races in global memory, reported as findings, and loads by way of the read-only cache of what was stored before.

PTX ISA 9.0, "ld.global.nc": the cache is not coherent, so the load may return the value from before the store, whatever
orders the two. `__ldg()` and pointers that are `const __restrict__` compile to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gemmery_emulator.findings import messages
from gemmery_emulator.findings.grid import GridHistory, StampFields, stored
from gemmery_emulator.findings.handover import Handover
from gemmery_emulator.findings.messages import EQUAL, UNWRITTEN, Collection
from gemmery_emulator.findings.orders import UPDATES, Followed, Orders, Words
from gemmery_emulator.findings.pointers import Reach, reach
from gemmery_emulator.machine import Access, Machine, Observer, Pieces, active
from gemmery_emulator.op import Flags, Indices, Mask
from gemmery_emulator.ptx import Opcode


class GlobalRaces(Observer):
    """Follows the accesses of a launch to the arrays that it also writes."""

    def __init__(self, machine: Machine, orders: Orders, collection: Collection) -> None:
        self.reach: Reach = reach(machine.kernel, machine.memory, machine.launch.parameters)
        self._orders, self._collection = orders, collection
        # Pairs of atomics pass unchecked only if the kernel has neither volatile accesses nor atomics of block scope.
        simple = not (orders.volatile.any() or (orders.own & orders.atomic).any())
        self._atomic = orders.atomic if simple else np.zeros_like(orders.atomic)
        self._checked = _checked(self.reach, self._atomic)
        accesses = tuple(index for index, checked in enumerate(self._checked) if checked)
        fields = StampFields(accesses, machine.block_threads, machine.launch.blocks)
        self.grid = GridHistory(machine.memory.data.size, fields, self._conflict)
        self._handover = Handover()
        self._ids: list[Indices | range] = []  # the block numbers of each chunk so far

    def checks(self, index: int) -> bool:
        """Whether an instruction may race."""
        return self.reach.followed[index] and self._checked[index]

    def follow(self, followed: Followed) -> None:
        """The next chunk's threads are ordered by the clocks of these blocks."""
        self._followed, self._clocks = followed, followed.clocks

    def start(self, machine: Machine) -> None:
        self._machine, clocks = machine, self._clocks
        mates = machine.launch.together if self._orders.meets else 1
        self.grid.start(machine.blocks, machine.block_threads, clocks, self._handover, mates)
        self._handover.start()
        ids = machine.block_ids  # in order they are kept as a range: 2 billion blocks would take 16 GB
        self._ids.append(range(int(ids[0]), int(ids[-1]) + 1) if (np.diff(ids) == 1).all() else ids)
        self._threads = np.arange(machine.threads)
        warps = machine.block_threads // 32
        clocks.publishing.releases, clocks.publishing.first = self._handover.releases, self.grid.first * warps
        # The clocks that each warp covered at its last fence: of any scope, and of a scope beyond its block.
        self._own_fence, self._fence = np.zeros((2, machine.blocks, warps, warps), np.int64)

    def access(self, machine: Machine, event: Access) -> None:
        if event.space != "global" or event.kind == "bulk" or not self.reach.followed[event.index]:
            return
        self._event: Access | None = event
        threads = self._threads if event.mask is None else event.mask.nonzero()[0]
        addresses = machine.spread(event.addresses)
        addresses = addresses if event.mask is None else addresses[threads]
        if self._checked[event.index]:
            writes = event.kind in UPDATES or event.kind == "st"
            touch = self.grid.writes if writes else self.grid.reads
            touch(event.index, addresses, threads, event.width, bool(self._atomic[event.index]))
        if self._orders.hands_over:
            self._hand_over(event, threads, addresses)

    def transferred(self, machine: Machine, index: int, places: Callable[[], Pieces]) -> None:
        if not self._checked[index]:
            return
        self._event = None
        threads, addresses, width = places()
        if not threads.size:
            return
        opcode = machine.kernel.instructions[index].opcode
        touch = self.grid.writes if "bulk_group" in opcode.modifiers else self.grid.reads
        touch(index, addresses, threads, width, bool(self._atomic[index]))
        if touch == self.grid.reads:
            self._unfenced(index, *self.grid.ordered_writes(index, addresses, threads, width))

    def _unfenced(self, index: int, stamps: Words, threads: Words, addresses: Words) -> None:
        """Report a bulk copy of what threads stored without a fence.proxy.async since.

        Of stores of another block only those of a kernel without such a fence are known to lack it.
        """
        then, second, _, _, one_block = self._pairs(threads, stamps)
        fenced = self._clocks.fenced["global"]
        rows = threads // self._machine.block_threads if len(fenced) > 1 else np.zeros_like(threads)
        late = stamps >> self.grid.fields.clock_at > fenced[rows, second >> 5, second & 31]
        fences = any("global" in spaces for spaces in self._orders.proxied)
        late &= self._orders.stores[then] & (one_block | (not fences))
        self._first_of_each("misuse", index, threads, addresses, stamps, late)

    def fenced(self, machine: Machine, index: int, mask: Mask) -> None:
        if not (self._orders.hands_over and self._orders.fence[index]):
            return
        warps, own = self._followed.warps(mask), bool(self._orders.own[index])
        for fences in (self._own_fence,) if own else (self._own_fence, self._fence):
            np.copyto(fences, self._clocks.vouched(), where=warps[:, :, None])
        blocks = np.flatnonzero(np.broadcast_to(warps.any(axis=1), machine.blocks))
        self._handover.fence(blocks.tolist(), own)

    def _hand_over(self, event: Access, threads: Words, addresses: Words) -> None:
        """Atomics synchronize threads in turn: by release and acquire, or with fences if relaxed or volatile."""
        orders, index = self._orders, event.index
        releases, acquires = orders.releases[index], orders.acquires[index] | orders.tickets[index]
        if not (releases or acquires or orders.with_fences[index]):
            return
        every = np.broadcast_to(self._clocks.vouched(), self._fence.shape)
        inside, across, own_scope = self._own_fence, self._fence, orders.own[index]
        if not (releases or self._handover.any or inside.any()):
            return
        if not releases:  # others release nothing before a fence, and acquire nothing where no thread has released
            have_fenced = np.any(across | inside, axis=(1, 2))
            some = have_fenced[threads // self._machine.block_threads] | np.isin(addresses, self._handover.addresses())
            threads, addresses = threads[some], addresses[some]
        covered: dict[tuple[int, int, int], Words] = {}
        blocks, own = np.divmod(threads, self._machine.block_threads)
        for block, place, address in zip(blocks.tolist(), own.tolist(), addresses.tolist(), strict=True):
            number, warp = self.grid.first + block, place >> 5
            thread = number, place
            for key, fenced in ((address, -1), across), ((address, number), inside):
                if key[1] < 0 and own_scope:
                    continue
                if event.kind != "st" and event.kind != "red":
                    self._handover.acquire(key, block, thread, by_fence=not acquires)
                if not releases and event.kind == "ld":
                    continue
                each = block, warp, key[1]
                if each not in covered:
                    covered[each] = every[block, warp]
                    if not releases:  # covers the accesses before fences that this warp has seen
                        before = fenced[block]
                        ready = before.diagonal() <= every[block, warp]
                        covered[each] = np.where(ready[:, None], before, 0).max(axis=0)
                self._handover.release(key, block, thread, covered[each])
        if self._clocks.publishing.matters():
            self._publish(index, threads, covered)
        if releases:
            warps = np.zeros(self._fence.shape[:2], np.bool_)
            warps[blocks, own >> 5] = True
            self._clocks.has_released(warps)

    def _publish(self, index: int, threads: Words, covered: dict[tuple[int, int, int], Words]) -> None:
        """Threads have released, to their blocks or to all, what the warps of their blocks did up to these clocks."""
        each = self._fence.shape[1]
        until = np.zeros((2, self._machine.blocks * each), np.int64)
        for (block, warp, scope), clocks in covered.items():
            until[int(scope < 0), block * each + warp] = clocks[warp]
        for clocks in until:
            self._clocks.publishing.publish(index, threads, clocks)

    def unwritten(self) -> dict[str, int]:
        """The bytes that no thread has written of each array that the launch writes and does not read."""
        kernel, arrays = self._machine.kernel, self.reach.arrays
        read, first = set[str](), dict[str, int]()
        for index, names in enumerate(arrays):
            if names is None:
                return {}
            stores = kernel.instructions[index].opcode.name == "st"
            if stores and len(names) == 1:
                first.setdefault(next(iter(names)), index)
            elif not stores:
                read |= names
        missing = {}
        for array in self._machine.memory.allocations:
            if array.name not in first or array.name in read or array.name in kernel.variables:
                continue
            if count := self.grid.unwritten(array.start, array.stop):
                missing[array.name] = count
                if count <= 3 * (array.size - count):  # of an array of which few elements are meant, nothing is said
                    text = (
                        f"no thread of the grid writes {count:,} of the {array.size:,} bytes of {array.name}: if the "
                        "kernel should write all of them, launch more blocks, or look at the bounds"
                    )
                    self._collection.add(self._machine, UNWRITTEN, first[array.name], 0, 1, text)
        return missing

    def _conflict(self, index: int, threads: Words, addresses: Words, others: Words, together: bool) -> None:
        """Report the first conflict with each other instruction that the grid found."""
        then, second, number, one_warp, one_block = self._pairs(threads, others)
        racing = ~self._orders.pairs(index, then, one_warp, one_block)
        if self._handover.knows_any:  # an update that the block has observed by an atomic
            flags = (self._orders.atomic | self._orders.volatile)[then]
            blocks = threads // self._machine.block_threads
            for at in np.flatnonzero(racing & flags & ~one_block):
                number_there = int(number[at]) + self.grid.first
                racing[at] = not self._handover.observed(int(blocks[at]), int(addresses[at]), number_there)
        if self._event is not None and self._event.kind == "st" and racing.any():
            equal = self._orders.stores[then] & self._same(threads, addresses, number, second, together)
            self._first_of_each(EQUAL, index, threads, addresses, others, racing & equal)
            racing &= ~equal
        self._first_of_each("race", index, threads, addresses, others, racing)

    def _first_of_each(
        self, kind: str, index: int, threads: Words, addresses: Words, others: Words, racing: Flags
    ) -> None:
        """Report the first conflict with each other instruction, of two blocks or two warps if there are any."""
        machine = self._machine
        then, second, number, one_warp, one_block = self._pairs(threads, others)
        for other in np.unique(then[racing]).tolist():
            these = racing & (then == other)
            pairs = (these, these & ~one_warp, these & ~one_block)
            strength = max(place for place, some in enumerate(pairs) if some.any())
            first = int(pairs[strength].argmax())
            where = int(number[first] + self.grid.first) - 1
            place = self._block_id(where), int(second[first])
            thread, address = int(threads[first]), int(addresses[first])
            clock = int(others[first]) >> self.grid.fields.clock_at
            reason = messages.reason(machine, kind, self._handover.releases.missed.get((place[1] & 31, clock)))
            report = messages.unfenced if kind == "misuse" else messages.grid_race
            message = partial(report, machine, index, thread, address, other, place, reason)
            self._collection.add(machine, kind, index, thread, int(these.sum()), message, other, strength)

    def _pairs(self, threads: Words, others: Words) -> tuple[Words, Words, Words, Flags, Flags]:
        """Of other accesses the instructions, threads and blocks, and whether they are of the same warps and blocks."""
        fields = self.grid.fields
        second, number = fields.threads(others), fields.blocks(others) - self.grid.first
        block, own = np.divmod(threads, self._machine.block_threads)
        one_block: Flags = block == number
        return fields.instructions(others), second, number, one_block & (own >> 5 == second >> 5), one_block

    def _block_id(self, number: int) -> int:
        """The block with a number in the launch, from 0."""
        for ids in self._ids:
            if number < len(ids):
                return int(ids[number])
            number -= len(ids)
        raise IndexError(number)

    def _same(self, threads: Words, addresses: Words, number: Words, second: Words, together: bool) -> Flags:
        """Stores of the value that the other thread stored: the order does not matter."""
        machine, size = self._machine, self.grid.granule
        own = stored(self._event, machine, threads, addresses, size)
        if together:
            other = stored(self._event, machine, number * machine.block_threads + second, addresses, size)
        else:
            other = machine.memory.data[addresses[:, None] + np.arange(size)]
        same: Flags = np.all(own == other, axis=1)
        return same


def _checked(reach: Reach, atomic: Flags) -> tuple[bool, ...]:
    """The instructions that may race: those followed, but for atomics of arrays that only atomics access."""
    plain: set[str] = set()
    for names, follows, passes in zip(reach.arrays, reach.followed, atomic, strict=True):
        if follows and not passes:
            if names is None:
                return reach.followed
            plain |= names
    return tuple(
        follows and (names is None or not plain.isdisjoint(names))
        for names, follows in zip(reach.arrays, reach.followed, strict=True)
    )


_WAY_OUT = (
    "it may get the value from before the store: load it plainly, without __ldg(), and without const __restrict__ at a "
    "pointer to what the kernel writes"
)


class ReadOnlyLoads(Observer):
    """The last store to each granule of global memory, in kernels that may load it by way of the read-only cache."""

    def __init__(self, machine: Machine, reach: Reach, collection: Collection) -> None:
        self._collection = collection
        kernel = machine.kernel
        followed = [(index, kernel.instructions[index].opcode) for index in np.flatnonzero(reach.followed).tolist()]
        stores = [index for index, opcode in followed if _stores(opcode)]
        self._loads = {index for index, opcode in followed if opcode.name == "ld" and "nc" in opcode.modifiers}
        self._stores = stores if self._loads else []
        self._number = {index: number for number, index in enumerate(self._stores, 1)}
        widths = [kernel.instructions[index].opcode.type for index in (*self._stores, *self._loads)]
        self._granule = 1 if any(kind.endswith(("8", "16")) for kind in widths) else 4
        size = machine.memory.data.size // self._granule + 1 if self._loads else 0
        self._stored = np.zeros(size, np.min_scalar_type(len(self._stores)))  # numbers of stores; 0 for none

    def follows(self, index: int) -> bool:
        """Whether it has to know of an access."""
        return index in self._number or (index in self._loads and bool(self._stores))

    def access(self, machine: Machine, event: Access) -> None:
        if event.space != "global" or event.kind == "bulk":
            return
        if event.index in self._number:
            _, places = self._places(machine, event)
            self._stored[places] = self._number[event.index]
        elif event.index in self._loads:
            threads, places = self._places(machine, event)
            stored = self._stored[places].max(axis=1)
            for number in np.unique(stored[stored > 0]).tolist():
                these, other = np.flatnonzero(stored == number), self._stores[number - 1]
                thread, first = int(threads[these[0]]), places[these[0]]
                where = int(first[self._stored[first].argmax()]) * self._granule
                text = (
                    f"{messages.thread(machine, thread)} reads {messages.address(machine, 'global', where)} by way of "
                    f"the read-only cache, after the store at {messages.line_of(machine, other)}; {_WAY_OUT}"
                )
                self._collection.add(machine, "misuse", event.index, thread, len(these), text, other)

    def transferred(self, machine: Machine, index: int, pieces: Callable[[], Pieces]) -> None:
        if index in self._number:
            _, addresses, width = pieces()
            places = addresses[:, None] // self._granule + np.arange(max(width // self._granule, 1))
            self._stored[places] = self._number[index]

    def _places(self, machine: Machine, event: Access) -> tuple[Words, Words]:
        """The threads of an access, and the granules of each."""
        threads = active(machine, event.mask)
        first = machine.spread(event.addresses)[threads] // self._granule
        return threads, first[:, None] + np.arange(max(event.width // self._granule, 1))


def _stores(opcode: Opcode) -> bool:
    """Whether it writes global memory: a store, an atomic, or a bulk copy out of shared memory."""
    return opcode.name == "st" or opcode.family in UPDATES or (opcode.is_bulk and "bulk_group" in opcode.modifiers)
