"""Faults of a kernel, found while it runs: each with its line, its thread and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.banks import WARP
from gemmery_emulator.control import BARRIERS
from gemmery_emulator.convergence import WAY_OUT, exists, ranges
from gemmery_emulator.findings import messages
from gemmery_emulator.findings.cluster_races import ClusterRaces, PeerRaces, may_access, may_copy
from gemmery_emulator.findings.global_races import GlobalRaces, ReadOnlyLoads
from gemmery_emulator.findings.messages import LATE, SKIPPED, Collection, Finding
from gemmery_emulator.findings.orders import UPDATES, orders
from gemmery_emulator.findings.shared_races import SharedRaces
from gemmery_emulator.findings.tensor_races import TensorRaces
from gemmery_emulator.hopper import cluster
from gemmery_emulator.hopper.mbarrier import Mbarriers
from gemmery_emulator.machine import Access, BarrierEvent, CopyEvent, Machine, Observer, Pieces
from gemmery_emulator.op import Flags, Indices, Mask
from gemmery_emulator.ptx import Line, PtxKernel
from gemmery_emulator.unwritten import Unwritten

__all__ = ["Finding", "Findings"]

PUBLISHED = UPDATES | {"st", "stmatrix"}  # writes of lanes that other lanes may publish


class Findings(Observer):
    """Collects the findings of a run, one for each kind and pair of lines."""

    def __init__(self) -> None:
        self._collection = Collection()
        self._kernel: PtxKernel | None = None
        self.unwritten: dict[str, int] = {}  # bytes by array

    def sorted(self) -> tuple[Finding, ...]:
        """All findings so far, causes before what may follow from them."""
        return self._collection.sorted()

    def warnings(self) -> tuple[Finding, ...]:
        """What need not be a fault; after the launch."""
        if self._kernel is not None:
            self.unwritten = self._global.unwritten()
        return self._collection.warnings()

    def start(self, machine: Machine) -> None:
        self._machine = machine
        if self._kernel is None:
            self._kernel, self._orders = machine.kernel, orders(machine.kernel)
            self._spelled = [instruction.opcode.spelling for instruction in machine.kernel.instructions]
            self._global = GlobalRaces(machine, self._orders, self._collection)
            self._read_only = ReadOnlyLoads(machine, self._global.reach, self._collection)
        self._shared = SharedRaces(machine, self._orders, self._collection)
        self._global.start(machine, self._shared.clocks)
        self._cluster = ClusterRaces(machine, self._collection) if may_copy(machine, self._orders) else None
        self._peers: PeerRaces | None = None
        if self._cluster is not None and may_access(machine, self._orders):
            self._peers = PeerRaces(machine, self._cluster.clocks, self._collection)
        self._tensor = TensorRaces(machine, self._orders, self._shared.followed, self._collection)

    def access(self, machine: Machine, event: Access) -> None:
        if self._orders.publishes and event.kind in PUBLISHED and event.space != "local":
            few = event.mask is not None and np.count_nonzero(event.mask) <= machine.warps
            if not (few and event.kind == "atom"):  # one lane of a warp takes a lock or a ticket, or waits
                self._shared.clocks.publishing.write(event.index, event.mask, self._shared.clocks.clock)
        if event.space == "global":
            self._global.access(event)
            self._read_only.access(machine, event)
        elif event.space == "shared":
            self._shared.access(event)
            if self._cluster is not None:
                self._cluster.access(event)
        elif event.space == cluster.SPACE and event.kind != "ld":
            self._shared.receives(event)
        if self._peers is not None and event.space in ("shared", cluster.SPACE):
            self._peers.access(event)

    def converged(self, machine: Machine, mask: Mask) -> None:
        if self._orders.publishes and self._shared.clocks.publishing.matters():
            self._shared.clocks.converge(self._shared.followed.lanes(mask))

    def landed(self, machine: Machine, index: int, addresses: Indices, threads: Indices) -> None:
        self._shared.landed(index, addresses, threads)

    def barrier(self, machine: Machine, index: int, barrier: int, mask: Mask) -> None:
        operands = machine.kernel.instructions[index].operands
        if mask is not None and barrier >= 0 and len(operands) == min(BARRIERS[self._spelled[index]].operands):
            mask = self._with_ended(index, mask)
        self._shared.barrier(index, barrier, mask)
        if self._cluster is not None:
            self._cluster.barrier(index, barrier, mask)

    def _with_ended(self, index: int, mask: Flags) -> Mask:
        """The threads that leave a barrier of their blocks, and those that have ended: it does not wait for them."""
        machine, shape = self._machine, (self._machine.blocks, -1)
        ended = ~machine.places.running() & np.repeat(mask.reshape(shape).any(axis=1), machine.block_threads)
        threads = np.flatnonzero(ended & exists(machine))
        if threads.size:
            self._broken(SKIPPED, index, threads, messages.SKIPS)
        return mask | ended

    def ordered(self, machine: Machine, index: int, threads: Indices, addresses: Indices, acquired: bool) -> None:
        self._shared.ordered(index, threads, addresses, acquired)
        if self._cluster is not None:
            self._cluster.ordered(index, threads, addresses, acquired)

    def mbarrier(self, machine: Machine, event: BarrierEvent) -> None:
        if self._cluster is not None:
            self._cluster.mbarrier(event)

    def copied(self, machine: Machine, event: CopyEvent) -> None:
        if self._cluster is not None:
            self._cluster.copied(event)

    def initialised(self, machine: Machine, index: int, threads: Indices, addresses: Indices) -> None:
        self._shared.initialised(index, threads, addresses)

    def fenced(self, machine: Machine, index: int, mask: Mask) -> None:
        warps = self._shared.followed.warps(mask)
        if self._orders.fence[index]:
            self._global.fenced(index, warps)
            self._shared.clocks.orders(warps)
        else:
            self._shared.clocks.fences(self._shared.followed.lanes(mask))

    def bulk(self, machine: Machine, index: int, threads: Indices, addresses: Indices, what: str) -> None:
        self._shared.bulk(index, threads, addresses, what)
        if self._cluster is not None and what == "reads":
            self._cluster.bulk(index, threads, addresses)

    def transferred(self, machine: Machine, index: int, places: Callable[[], Pieces]) -> None:
        self._global.transferred(index, places)
        self._read_only.transferred(index, places)

    def tensor(self, machine: Machine, index: int, threads: Indices, addresses: Indices, what: str) -> None:
        self._tensor.access(index, threads, addresses, what)

    def warpgroup(self, machine: Machine, index: int, threads: Indices) -> None:
        self._shared.warpgroup(threads)
        if self._cluster is not None:
            self._cluster.warpgroup(threads)

    def finish(self, machine: Machine) -> None:
        self._shared.finish()

    def misused(self, machine: Machine, index: int, threads: Indices, message: str) -> None:
        self._broken("misuse" if machine.places.running().any() else LATE, index, threads, message)

    def mismatched(self, machine: Machine, index: int, threads: Indices, message: str) -> None:
        self._broken("warp mask", index, threads, message)

    def undefined(self, machine: Machine, index: int, threads: Indices, use: Line) -> None:
        after = "" if use == machine.kernel.instructions[index].line else f" and uses what comes of it at {use}"
        what = f"reads a variable, or an element of its own array, that it has not written{after}: set it first"
        self._broken("uninitialised", index, threads, what)

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
            where = messages.beyond(machine, event.space, address, event.width, event.index, self._global.reach)
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
