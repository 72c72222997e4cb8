"""What each warp does, in its order: the events of the emulator as events of clocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gemmery.banks import WARP
from gemmery_emulator.machine import BarrierEvent, CopyEvent, Machine
from gemmery_emulator.op import Indices, Mask
from gemmery_emulator.pace.clocks import Arrives, Awaits, BulkCopies, ClockEvent, ClockKey

PIECE = 16  # bytes


class WarpStreams:
    """The events of all warps of a chunk; what happens in a basic block stands after its instructions."""

    def __init__(self, machine: Machine, latencies: Mapping[str, float]) -> None:
        self.events: list[list[Any]] = [[] for _ in range(machine.warps)]
        self._each = machine.warps // machine.blocks
        self._cluster = machine.launch.together
        self._latencies = latencies
        self._later: list[tuple[int, ClockEvent]] = []
        self.turned = 0  # turns of loops that the first warp begins
        self._latest = [-1] * machine.warps  # by warp, the first instruction of its latest basic block
        self._phases: dict[tuple[int, int], int] = defaultdict(int)  # by block and address, how many have ended
        self._rounds: dict[tuple[int, int], int] = defaultdict(int)  # of barriers, by block and number
        self._turns = [[0, 0] for _ in range(machine.warps)]  # arrivals and waits at the barrier of a cluster
        self._stores: set[tuple[int, int]] = set()

    def turns(self, warps: Sequence[int], first: int) -> list[bool]:
        """Note the basic block that warps execute; returns whether it begins a new turn of a loop, by warp."""
        latest = self._latest
        again = [first <= latest[warp] for warp in warps]
        self.turned += bool(again and again[0] and warps[0] == 0)
        for warp in warps:
            latest[warp] = first
        return again

    def settle(self) -> None:
        """Append what happened in the latest basic block."""
        for warp, event in self._later:
            self.events[warp].append(event)
        self._later.clear()

    def barrier(self, machine: Machine, index: int, number: int, mask: Mask) -> None:
        """Warps arrive at a barrier of their blocks and leave it together; at bar.arrive they only arrive."""
        warps = range(len(self.events)) if mask is None else _warps(np.flatnonzero(mask))
        only = "arrive" in machine.kernel.instructions[index].opcode.modifiers
        blocks = {warp // self._each for warp in warps}
        for warp in warps:
            block = warp // self._each
            key: ClockKey = "barrier", block, number, self._rounds[block, number]
            self._later.append((warp, Arrives(key, self._latencies["barrier"])))
            if not only:
                self._later.append((warp, Awaits(key, "waits at a barrier", index)))
        for block in blocks if not only else ():
            self._rounds[block, number] += 1

    def cluster(self, machine: Machine, index: int, acquired: bool) -> None:
        """The running warps arrive at the barrier of their cluster, or pass it."""
        running = np.ones(machine.threads, bool) if machine.ran is None else machine.ran
        if acquired:
            running = running & ~machine.failed
        for warp in _warps(np.flatnonzero(running)):
            group = warp // self._each // self._cluster
            key: ClockKey = "cluster", group, self._turns[warp][acquired]
            self._turns[warp][acquired] += 1
            event = (
                Awaits(key, "waits for its cluster", index) if acquired else Arrives(key, self._latencies["cluster"])
            )
            self._later.append((warp, event))

    def mbarrier(self, event: BarrierEvent) -> None:
        """Threads arrive at mbarriers or pass them, or phases end."""
        places = list(zip(event.blocks.tolist(), event.addresses.tolist(), strict=True))
        if event.what == "ends":
            for place, times in zip(places, event.amounts.tolist(), strict=True):
                self._phases[place] += times
            return
        if event.what == "waits":
            return
        warps = (event.threads // WARP).tolist()
        if event.what == "passes":
            for warp, place in sorted(set(zip(warps, places, strict=True))):
                key: ClockKey = "phase", *place, self._phases[place] - 1
                self._later.append((warp, Awaits(key, "waits at an mbarrier", event.index)))
            return
        for warp, place in zip(warps, places, strict=True):
            after = self._latencies["mbarrier" if place[0] == warp // self._each else "remote"]
            self._later.append((warp, Arrives(("phase", *place, self._phases[place]), after)))

    def copied(self, event: CopyEvent) -> None:
        """Threads start bulk copies, each to one block or to several of its cluster."""
        size = float(PIECE * event.addresses.shape[1])
        to: dict[tuple[int, int], list[ClockKey]] = defaultdict(list)
        for thread, block, barrier in zip(
            event.threads.tolist(), event.blocks.tolist(), event.barriers.tolist(), strict=True
        ):
            to[thread, barrier].append(("phase", block, barrier, self._phases[block, barrier]))
        for (thread, _), keys in to.items():
            self._later.append((thread // WARP, BulkCopies(tuple(keys), size, event.index)))

    def stored(self, index: int, threads: Indices, addresses: Indices) -> None:
        """BulkCopies out of shared memory, which are told of when they start and when they read it."""
        for thread, places in zip(threads.tolist(), addresses, strict=True):
            store = thread, int(places.min())
            if store in self._stores:
                self._stores.remove(store)
            else:
                self._stores.add(store)
                self._later.append((thread // WARP, BulkCopies((), float(PIECE * len(places)), index)))


def _warps(threads: Indices) -> list[int]:
    """The warps of some threads."""
    distinct: list[int] = np.unique(threads // WARP).tolist()
    return distinct
