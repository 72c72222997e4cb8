"""Faults of a kernel, found while it runs: each with its line, its thread and a remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.banks import WARP
from gemmery_emulator.control import leaving
from gemmery_emulator.convergence import WAY_OUT, exists, ranges
from gemmery_emulator.findings import messages
from gemmery_emulator.findings.cluster_races import AsyncRaces, ClusterRaces, PeerRaces, may_access, may_copy, sends
from gemmery_emulator.findings.global_races import GlobalRaces, ReadOnlyLoads
from gemmery_emulator.findings.messages import LATE, SKIPPED, Collection, Finding
from gemmery_emulator.findings.orders import UPDATES, Orders, orders
from gemmery_emulator.findings.shared_races import SharedRaces, TensorRaces
from gemmery_emulator.hopper.mbarrier import Mbarriers
from gemmery_emulator.lower import Unwritten
from gemmery_emulator.machine import Access, Machine, Observer, Pieces, active
from gemmery_emulator.op import Flags, Indices, Mask
from gemmery_emulator.ptx import Line, PtxKernel

__all__ = ["Finding", "Findings"]

PUBLISHED = UPDATES | {"st", "stmatrix"}  # writes of lanes that other lanes may publish


class Findings(Observer):
    """Collects the findings of a run, one for each kind and pair of lines."""

    def __init__(self) -> None:
        self._collection = Collection()
        self._kernel: PtxKernel | None = None
        self.unwritten: dict[str, int] = {}  # bytes by array
        self.of_shared: SharedRaces  # of the present chunk
        self.of_global: GlobalRaces
        self.read_only: ReadOnlyLoads
        self.orders: Orders

    def sorted(self) -> tuple[Finding, ...]:
        """All findings so far, causes before what may follow from them."""
        return self._collection.sorted()

    def warnings(self) -> tuple[Finding, ...]:
        """What need not be a fault; after the launch."""
        if self._kernel is not None:
            self.unwritten = self.of_global.unwritten()
        return self._collection.warnings()

    def start(self, machine: Machine) -> None:
        self._machine = machine
        if self._kernel is None:
            self._kernel, self.orders = machine.kernel, orders(machine.kernel)
            self.of_global = GlobalRaces(machine, self.orders, self._collection)
            self.read_only = ReadOnlyLoads(machine, self.of_global.reach, self._collection)
        self.of_shared = SharedRaces(machine, self.orders, self._collection)
        self.of_global.follow(self.of_shared.followed)
        self.of_global.start(machine)
        self._cluster = ClusterRaces(machine, self._collection) if may_copy(machine, self.orders) else None
        self._peers: PeerRaces | None = None
        if self._cluster is not None and may_access(machine, self.orders):
            self._peers = PeerRaces(machine, self._cluster.clocks, self._collection)
        self._async = AsyncRaces(machine, self._collection) if sends(machine) else None
        self._tensor = TensorRaces(machine, self.orders, self.of_shared.followed, self._collection)

    def parts(self) -> Sequence[Observer]:
        of_cluster = [part for part in (self._cluster, self._peers, self._async) if part is not None]
        return (self, self.of_global, self.read_only, self.of_shared, *of_cluster, self._tensor)

    def access(self, machine: Machine, event: Access) -> None:
        if self.orders.publishes and event.kind in PUBLISHED and event.space != "local":
            few = event.mask is not None and np.count_nonzero(event.mask) <= machine.warps
            if not (few and event.kind == "atom"):  # one lane of a warp takes a lock or a ticket, or waits
                self.of_shared.clocks.publishing.write(event.index, event.mask, self.of_shared.clocks.clock)
        if machine.memory.heap is not None and event.space == "global" and event.kind != "bulk":
            threads, writes = active(machine, event.mask), event.kind in ("st", *UPDATES)
            self._in_heap(event.index, threads, machine.spread(event.addresses)[threads], event.width, writes)

    def transferred(self, machine: Machine, index: int, places: Callable[[], Pieces]) -> None:
        if machine.memory.heap is not None:
            writes = "bulk_group" in machine.kernel.instructions[index].opcode.modifiers
            self._in_heap(index, *places(), writes)

    def _in_heap(self, index: int, threads: Indices, addresses: Indices, width: int, writes: bool) -> None:
        heap, reads = self._machine.memory.heap, messages.does(self._machine, index, globally=True) != "writes"
        assert heap is not None
        if (empty := heap.unwritten(addresses, width, reads, writes)).size:
            where = messages.address(self._machine, "global", int(addresses[empty[0]]))
            what = f"reads {width} bytes at {where}, which no thread has written: malloc() does not set them"
            self._broken("uninitialized", index, threads[empty], what)

    def barrier(self, machine: Machine, index: int, barrier: int, mask: Mask) -> None:
        every = leaving(machine, index, barrier, mask)
        if mask is not None and every is not None and every is not mask:
            threads = np.flatnonzero(every & ~mask & exists(machine))
            if threads.size:
                self._broken(SKIPPED, index, threads, messages.SKIPS)

    def misused(self, machine: Machine, index: int, threads: Indices, message: str) -> None:
        self._broken("misuse" if machine.places.running().any() else LATE, index, threads, message)

    def mismatched(self, machine: Machine, index: int, threads: Indices, message: str) -> None:
        self._broken("warp mask", index, threads, message)

    def undefined(self, machine: Machine, index: int, threads: Indices, use: Line) -> None:
        after = "" if use == machine.kernel.instructions[index].line else f" and uses what comes of it at {use}"
        what = f"reads a variable, or an element of its own array, that it has not written{after}: set it first"
        self._broken("uninitialized", index, threads, what)

    def branch(self, machine: Machine, index: int, jumps: Any, active: Mask) -> None:
        guard = machine.kernel.instructions[index].guard
        if machine.followed and guard is not None and machine.slots[guard.name] in machine.followed:
            unit = machine.unit(Unwritten)
            bad, first = unit.read(index, [machine.slots[guard.name]])
            unit.report(index, bad, active, first)

    def _broken(self, kind: str, index: int, threads: Indices, message: str) -> None:
        first = int(threads[0])
        text = f"{messages.thread(self._machine, first)} {message}"
        self._collection.add(self._machine, kind, index, first, len(threads), text)

    def fault(self, machine: Machine, event: Access, kind: str, mask: Flags) -> None:
        threads = np.flatnonzero(mask)
        address = int(np.broadcast_to(event.addresses, mask.shape)[threads[0]])
        does = "reads" if event.kind in ("ld", "ldmatrix") else "accesses" if event.kind == "cp.async" else "writes"
        if kind == "misaligned":
            where = messages.address(machine, event.space, address)
            where += f": the address must be a multiple of {event.width}"
        else:
            kind = "out of bounds"
            where = messages.beyond(machine, event.space, address, event.width, event.index, self.of_global.reach)
        self._broken(kind, event.index, threads, f"{does} {event.width} bytes at {where}")

    def diverged(self, machine: Machine, index: int, mask: Flags) -> None:
        threads = np.flatnonzero(mask)
        waiting = np.count_nonzero(threads // machine.block_threads == threads[0] // machine.block_threads)
        message = (
            f"waits here, with {waiting} of the block's {machine.launch.block_threads} threads, and the others wait at "
            "another barrier or never arrive: let all threads of the block reach the same barrier"
        )
        self._broken("divergent barrier", index, threads, message)

    def deadlock(self, machine: Machine, index: int, mask: Flags, members: NDArray[np.uint32] | None) -> None:
        if members is not None:
            self._warp_waits(index, mask, members)
            return
        opcode = machine.kernel.instructions[index].opcode
        clustered = opcode.name == "barrier.cluster.wait"
        if opcode.family in ("bar", "barrier") and not clustered:
            self.diverged(machine, index, mask)
            return
        threads = np.flatnonzero(mask)
        waits = "waits for an arrival or a copy that no remaining thread can make: "
        waits += "let all threads of the cluster arrive equally often"
        if opcode.family == "mbarrier":
            waits = messages.mbarrier(machine, *machine.unit(Mbarriers).missing(int(threads[0])))
        self._broken("deadlock", index, threads, waits)

    def _warp_waits(self, index: int, mask: Flags, members: NDArray[np.uint32]) -> None:
        threads = np.flatnonzero(mask)
        first = int(threads[0])
        lanes = slice(first - first % WARP, first - first % WARP + WARP)
        waiting = mask[lanes] & (members[lanes] == members[first])
        missing = ranges((members[first] >> np.arange(WARP, dtype=np.uint32) & 1 == 1) & ~waiting)
        waits = f"waits at __syncwarp() with mask {int(members[first]):#x} for {missing}, which never arrive"
        self._broken("warp mask", index, threads, f"{waits}: {WAY_OUT}")
