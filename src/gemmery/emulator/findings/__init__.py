"""Faults of a kernel, found while it runs: each with its line, its thread and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.emulator.barriers import ARRIVE
from gemmery.emulator.convergence import WAY_OUT, ranges
from gemmery.emulator.findings import words
from gemmery.emulator.findings.global_races import GlobalRaces
from gemmery.emulator.findings.grid import stored
from gemmery.emulator.findings.orders import ACQUIRES, RELEASES, UPDATES, Orders, is_fence, orders
from gemmery.emulator.findings.races import ATOMIC, INDEX, INDEX_AT, THREAD, Flags, History, Words
from gemmery.emulator.findings.words import Place
from gemmery.emulator.hopper.products import Products
from gemmery.emulator.machine import Access, Machine, Observer
from gemmery.emulator.op import Mask
from gemmery.emulator.ptx import Immediate, Line

STORES = frozenset(("st", "stmatrix", "cp.async", "bulk"))


@dataclass(frozen=True)
class Finding:
    """One fault at one line, or between two lines, with the first thread that committed it.

    `kind` is "out of bounds", "misaligned", "uninitialised", "not landed", "race", "divergent barrier",
    "deadlock", "warp mask" or "misuse".

    >>> print(Finding("uninitialised", Line("sum.cu", 7), "thread 1 of block 0 reads byte 4 ...", (0, 0, 0), (1, 0, 0)))
    sum.cu:7: uninitialised: thread 1 of block 0 reads byte 4 ...
    """

    kind: str
    line: Line
    message: str
    block: Place
    thread: Place
    other: Line | None = None  # of a race: the access it races with; of a copy: where it starts
    count: int = 1  # occurrences over all threads and blocks
    inner: Line | None = None  # the inlined line, when `line` is the one that it was inlined into

    def __str__(self) -> str:
        return f"{words.lines(self.line, self.inner)}: {self.kind}: {self.message}"


class Findings(Observer):
    """Collects the findings of a run in `found`, one for each kind and pair of lines."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], Finding] = {}  # by kind and both lines
        self._lines: dict[int, str] = {}  # of instructions
        self._machine: Any = None
        self._event: Any = None  # the access being checked
        self._orders: Orders | None = None

    @property
    def found(self) -> tuple[Finding, ...]:
        """All findings so far, sorted by line and kind."""
        return tuple(sorted(self._found.values(), key=lambda one: (one.line.file, one.line.number, one.kind)))

    def start(self, machine: Machine) -> None:
        self._machine = machine
        if self._orders is None:
            self._orders = orders(machine.kernel)
            self._global = GlobalRaces(machine, self._orders, self._race)
        self._history = History(1, machine.block_threads, machine.shared.size, self._conflict)
        self._global.start(machine, self._history)
        self._multiplies = any(one.opcode.name == "wgmma.mma_async" for one in machine.kernel.instructions)
        self._alike = machine.blocks  # the blocks that the one that is followed stands for

    def access(self, machine: Machine, event: Access) -> None:
        self._event = event
        if event.space == "global":
            self._global.access(event)
        if event.space != "shared":
            return
        if self._multiplies and event.kind in STORES:
            writers = np.arange(machine.threads) if event.mask is None else np.flatnonzero(event.mask)
            self._overwrite(event.index, writers, machine.spread(event.addresses)[writers])
        threads, addresses = self._taking_part(event.addresses, event.mask)
        if not threads.size:
            return
        if event.kind in UPDATES:
            self._history.updates(event.index, addresses, threads, event.width)
        elif event.kind in STORES:
            self._history.writes(event.index, addresses, threads, event.width, event.kind == "cp.async")
        else:
            self._history.reads(event.index, addresses, threads, event.width)
        self._hand_over(event, threads, addresses)

    def _hand_over(self, event: Access, threads: Words, addresses: Words) -> None:
        """Atomics order other accesses: by release and acquire, or with fences if they are relaxed or volatile."""
        assert self._orders is not None
        index, order = event.index, self._machine.kernel.instructions[event.index].opcode.modifiers
        releases, acquires = not RELEASES.isdisjoint(order), not ACQUIRES.isdisjoint(order)
        fences = self._orders.fences and bool(self._orders.atomic[index] or self._orders.volatile[index])
        if not (releases or acquires or fences):
            return
        for address in np.unique(addresses).tolist():
            warps, key = self._warps_of(threads[addresses == address]), ("atomic", address)
            if acquires:
                self._history.acquire(warps, key)
            elif fences and event.kind in ("ld", "atom"):
                self._history.hear(warps, key)
            if releases or (fences and event.kind != "ld"):
                self._history.publish(warps, key, at_fence=not releases)

    def _overwrite(self, index: int, threads: Words, addresses: Words) -> None:
        """Report a write to memory that a product of a warpgroup may still read."""
        machine = self._machine
        blocks = threads // machine.block_threads
        if (read := machine.unit(Products).reader(blocks * machine.shared.stride + addresses)) is None:
            return
        (first, other), thread = read, int(threads[read[0]])
        what = (
            f"{words.thread(machine, thread)} writes {words.address(machine, 'shared', int(addresses[first]))}, which "
            f"the wgmma at {self._line(other)} may still read: wait with wgmma.wait_group first"
        )
        self._add("race", index, thread, 1, what, other)

    def landed(self, machine: Machine, index: int, addresses: NDArray[np.int64], threads: NDArray[np.int64]) -> None:
        size = machine.kernel.instructions[index].operands[2]
        assert isinstance(size, Immediate)
        threads, addresses = self._followed(threads, addresses)
        self._history.lands(index, addresses, threads, size.bits)

    def barrier(self, machine: Machine, index: int, barrier: int, mask: Mask) -> None:
        warps = self._warps(mask)
        if barrier < 0:
            self._history.meets_itself(warps)
        elif machine.kernel.instructions[index].opcode.name in ARRIVE:
            self._history.release(warps, barrier)
        else:
            self._history.acquire(warps, barrier)  # from threads that arrived and did not wait
            self._history.meets(warps)

    def ordered(
        self, machine: Machine, index: int, threads: NDArray[np.int64], addresses: NDArray[np.int64], acquired: bool
    ) -> None:
        threads, addresses = self._followed(threads, addresses)
        self._event = None
        inside = addresses >= 0  # the barrier of a cluster has no address
        if inside.any():
            self._history.updates(index, addresses[inside], threads[inside], 8)
        for address in np.unique(addresses).tolist():
            warps = self._warps_of(threads[addresses == address])
            if acquired:
                self._history.acquire(warps, ("mbarrier", address))
            else:
                self._history.release(warps, ("mbarrier", address))

    def initialised(
        self, machine: Machine, index: int, threads: NDArray[np.int64], addresses: NDArray[np.int64]
    ) -> None:
        threads, addresses = self._followed(threads, addresses)
        self._event = None
        self._history.writes(index, addresses, threads, 8)

    def fenced(self, machine: Machine, index: int, mask: Mask) -> None:
        if is_fence(machine.kernel.instructions[index].opcode):
            warps = self._warps(mask)
            self._global.fenced(index, warps)
            self._history.orders(warps)
        else:
            self._history.fences(self._warps(mask))

    def bulk(
        self, machine: Machine, index: int, threads: NDArray[np.int64], addresses: NDArray[np.int64], what: str
    ) -> None:
        self._event, each = None, addresses.shape[1]
        if what == "begins" and self._multiplies:
            self._overwrite(index, np.repeat(threads, each), addresses.ravel())
        if self._alike > 1:
            rows = np.column_stack([threads, addresses])
            own = rows.reshape(self._alike, -1, each + 1) if len(rows) % self._alike == 0 else rows[None, :0]
            own[..., 0] -= np.arange(len(own))[:, None] * machine.block_threads
            if own.size and (own == own[0]).all():
                threads, addresses = own[0, :, 0], own[0, :, 1:]
            else:
                self._spread()
        threads, addresses = np.repeat(threads, each), addresses.ravel()
        if what == "begins":
            self._history.writes(index, addresses, threads, 16, asynchronous=True)
        elif what == "lands":
            self._history.lands(index, addresses, threads, 16, then=True)
        else:
            opcodes = [one.opcode for one in machine.kernel.instructions]
            stores = np.array([not (opcode.is_bulk or opcode.family == "mbarrier") for opcode in opcodes])
            self._history.reads(index, addresses, threads, 16, stores)

    def warpgroup(self, machine: Machine, index: int, threads: NDArray[np.int64]) -> None:
        threads, _ = self._followed(threads, np.zeros_like(threads))
        warps: Flags = np.zeros((self._history.blocks, machine.block_threads // 32), np.bool_)
        warps.reshape(-1)[threads[:, None] // 32 + np.arange(4)] = True
        self._history.meets(warps)

    def misused(self, machine: Machine, index: int, threads: NDArray[np.int64], message: str) -> None:
        first = int(threads[0])
        self._add("misuse", index, first, len(threads), f"{words.thread(machine, first)} {message}")

    def mismatched(self, machine: Machine, index: int, threads: NDArray[np.int64], message: str) -> None:
        first = int(threads[0])
        self._add("warp mask", index, first, len(threads), f"{words.thread(machine, first)} {message}")

    def fault(self, machine: Machine, event: Access, kind: str, mask: NDArray[np.bool_]) -> None:
        thread = int(np.flatnonzero(mask)[0])
        address = int(np.broadcast_to(event.addresses, mask.shape)[thread])
        does = "reads" if event.kind in ("ld", "ldmatrix") else "accesses" if event.kind == "cp.async" else "writes"
        what = f"{words.thread(machine, thread)} {does} {event.width} bytes at "
        if kind == "misaligned":
            where = words.address(machine, event.space, address)
            what += f"{where}: the address must be a multiple of {event.width}"
            self._add("misaligned", event.index, thread, int(mask.sum()), what)
        else:
            what += words.beyond(machine, event.space, address, event.width, event.index, self._global.reach)
            self._add("out of bounds", event.index, thread, int(mask.sum()), what)

    def diverged(self, machine: Machine, index: int, mask: NDArray[np.bool_]) -> None:
        thread = int(np.flatnonzero(mask)[0])
        block = thread // machine.block_threads
        waiting = int(mask.reshape(machine.blocks, -1)[block].sum())
        what = (
            f"{words.thread(machine, thread)} waits here, with {waiting} of the block's "
            f"{machine.launch.block_threads} threads, and the others wait at another barrier or never arrive: "
            "let all threads of the block reach the same barrier"
        )
        self._add("divergent barrier", index, thread, int(mask.sum()), what)

    def deadlock(
        self, machine: Machine, index: int, mask: NDArray[np.bool_], members: NDArray[np.uint32] | None
    ) -> None:
        if members is not None:
            self._warp_waits(machine, index, mask, members)
            return
        opcode = machine.kernel.instructions[index].opcode
        clustered = opcode.name == "barrier.cluster.wait"
        if opcode.family in ("bar", "barrier") and not clustered:
            self.diverged(machine, index, mask)
            return
        thread = int(np.flatnonzero(mask)[0])
        way_out = (
            "let all threads of the cluster arrive equally often"
            if clustered
            else "check the number of arrivals that the barrier was initialised for, that all of them are made, the "
            "expected bytes, and the parity that is waited for"
        )
        waits = "waits for an arrival or a copy that no remaining thread can make"
        what = f"{words.thread(machine, thread)} {waits}: {way_out}"
        self._add("deadlock", index, thread, int(mask.sum()), what)

    def _warp_waits(self, machine: Machine, index: int, mask: NDArray[np.bool_], members: NDArray[np.uint32]) -> None:
        thread = int(np.flatnonzero(mask)[0])
        lanes = slice(thread - thread % 32, thread - thread % 32 + 32)
        waiting = mask[lanes] & (members[lanes] == members[thread])
        missing = ranges((members[thread] >> np.arange(32, dtype=np.uint32) & 1 == 1) & ~waiting)
        what = (
            f"{words.thread(machine, thread)} waits at __syncwarp() with mask {int(members[thread]):#x} for {missing}, "
            f"which never arrive: {WAY_OUT}"
        )
        self._add("warp mask", index, thread, int(mask.sum()), what)

    def _warps(self, mask: Mask) -> Flags:
        """The warps of a mask, for the blocks that are followed."""
        if mask is not None and self._alike > 1:
            rows = mask.reshape(self._alike, -1)
            if (rows == rows[0]).all():
                mask = rows[0]
            else:
                self._spread()
        followed = self._history.blocks, self._machine.block_threads // 32
        warps: Flags = np.ones(followed, np.bool_)
        if mask is not None:
            warps = np.any(mask.reshape(*followed, 32), axis=2)
        return warps

    def _warps_of(self, threads: Words) -> Flags:
        """The warps of these threads, numbered through the blocks that are followed."""
        warps: Flags = np.zeros((self._history.blocks, self._machine.block_threads // 32), np.bool_)
        warps.reshape(-1)[threads // 32] = True
        return warps

    def _taking_part(self, addresses: Any, mask: Mask) -> tuple[Words, Words]:
        """The active threads and their addresses; those of the followed block alone while all blocks do the same."""
        each = self._machine.block_threads
        if self._alike > 1:
            places = addresses.reshape(-1, each) if addresses.ndim else addresses
            masks = None if mask is None else mask.reshape(-1, each)
            same: Any = places == places[0] if addresses.ndim else np.True_
            if masks is not None:
                same = (same | ~masks) if (masks == masks[0]).all() else np.False_
            if same.all():
                mask = None if masks is None else masks[0]
                addresses = places[0] if addresses.ndim else places
            else:
                self._spread()
        threads = np.arange(self._history.blocks * each) if mask is None else np.flatnonzero(mask)
        if not addresses.ndim:
            return threads, np.full(threads.shape, addresses, np.int64)
        return threads, addresses if mask is None else addresses[mask]

    def _followed(self, threads: Words, addresses: Words) -> tuple[Words, Words]:
        """The same for threads listed by number; each is listed once while one block stands for all."""
        if self._alike > 1:
            taken = np.zeros(self._machine.threads, bool)
            spread = np.zeros(self._machine.threads, np.int64)
            taken[threads], spread[threads] = True, addresses
            if np.count_nonzero(taken) == len(threads):
                return self._taking_part(spread, taken)
            self._spread()
        return threads, addresses

    def _spread(self) -> None:
        if self._alike > 1:
            self._history.spread(self._alike)
            self._alike = 1

    def _conflict(self, kind: str, index: int, threads: Words, addresses: Words, others: Words) -> None:
        """Report the first conflict with each other instruction that the history found."""
        if kind in ("race", "clash"):
            racing = ~self._atomic(index, threads, others)
            if self._event is not None and self._event.kind == "st":
                racing &= ~self._same(kind, threads, addresses, others)
            threads, addresses, others = threads[racing], addresses[racing], others[racing]
        kind = "race" if kind == "clash" else kind
        instructions = others >> INDEX_AT & INDEX
        for other in np.unique(instructions).tolist():
            these = instructions == other
            apart = these & (threads % self._machine.block_threads >> 5 != (others & THREAD) >> 5)
            first = int((apart if kind == "race" and apart.any() else these).argmax())  # of two warps if there are any
            thread, address, stamp = int(threads[first]), int(addresses[first]), int(others[first])
            place = f"{words.thread(self._machine, thread)} reads {words.address(self._machine, 'shared', address)}"
            count = int(these.sum()) * self._alike
            if kind == "race":
                if not self._again(kind, index, count, other):
                    atomic = bool(stamp & ATOMIC)
                    what = words.race(self._machine, index, thread, address, other, stamp & THREAD, atomic)
                    self._add(kind, index, thread, count, what, other)
            elif kind == "uninitialised":
                what = f"{place}, which no thread has written: write it first, or do not read it"
                self._add(kind, index, thread, count, what)
            elif kind == "not landed":
                way_out = "its group first (cp.async.wait_group with a smaller number)"
                if words.in_bulk(self._machine, other):
                    way_out = "its mbarrier first, which has to expect all bytes of the copy"
                what = f"{place}, which the cp.async at {self._line(other)} may still be writing: wait for {way_out}"
                self._add(kind, index, thread, count, what, other)
            elif kind == "unfenced":
                what = (
                    f"{place} through the async proxy, which was written at {self._line(other)} without a "
                    "fence.proxy.async since: put one after the store, before the barrier"
                )
                self._add("misuse", index, thread, count, what, other)

    def _atomic(self, index: int, threads: Words, others: Words) -> Flags:
        """Pairs of accesses of one block that do not race because both are atomic."""
        assert self._orders is not None
        one_warp = threads % self._machine.block_threads >> 5 == (others & THREAD) >> 5
        return self._orders.pairs(index, others >> INDEX_AT & INDEX, one_warp, np.ones_like(one_warp))

    def _same(self, kind: str, threads: Words, addresses: Words, others: Words) -> Flags:
        """Stores of the value that the other thread stored: the order does not matter."""
        machine, size = self._machine, self._history.granule
        own = stored(self._event, machine, threads, addresses, size)
        blocks = threads // machine.block_threads
        if kind == "clash":
            held = stored(self._event, machine, blocks * machine.block_threads + (others & THREAD), addresses, size)
        else:
            held = machine.shared.data[(blocks * machine.shared.stride + addresses)[:, None] + np.arange(size)]
        assert self._orders is not None
        same: Flags = np.all(own == held, axis=1) & self._orders.stores[others >> INDEX_AT & INDEX]
        return same

    def _race(self, index: int, thread: int, count: int, message: Callable[[], str], other: int) -> None:
        if not self._again("race", index, count, other):
            self._add("race", index, thread, count, message(), other)

    def _again(self, kind: str, index: int, count: int, other: int | None) -> bool:
        """Count a finding that is known already; a kernel may have the same race thousands of times."""
        key = self._key(kind, index, other)
        if (known := self._found.get(key)) is None:
            return False
        self._found[key] = replace(known, count=known.count + count)
        return True

    def _add(self, kind: str, index: int, thread: int, count: int, message: str, other: int | None = None) -> None:
        if self._again(kind, index, count, other):
            return
        instructions = self._machine.kernel.instructions
        one, second = instructions[index], None if other is None else instructions[other].line
        where = words.indices(self._machine, thread)
        self._found[self._key(kind, index, other)] = Finding(
            kind, one.line, message, *where, second, count, words.done_at(one)
        )

    def _key(self, kind: str, index: int, other: int | None) -> tuple[str, str, str]:
        return kind, self._line(index), "" if other is None else self._line(other)

    def _line(self, index: int) -> str:
        if index not in self._lines:
            self._lines[index] = words.line_of(self._machine, index)
        return self._lines[index]
