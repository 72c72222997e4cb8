"""The histories of accesses that find races, as compiled code reads and writes them; and its counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.banks import WARP
from gemmery_emulator.counters import Counters
from gemmery_emulator.findings import Findings
from gemmery_emulator.kernels.native.frames import PAIR_AT, RELATIVE, Record
from gemmery_emulator.kernels.native.translation import Move, Translation
from gemmery_emulator.lockstep import LockStep

NEVER = 1 << 62
LOW = (1 << PAIR_AT) - 1


class Races:
    """What compiled code has to know of the races of a chunk."""

    def __init__(self, machine: LockStep, findings: Findings, translation: Translation) -> None:
        self._machine, self._findings = machine, findings
        self._shared, self._global = findings.of_shared, findings.of_global
        self._orders, self._read_only = findings.orders, findings.read_only
        self._clocks = self._shared.clocks
        orders = self._orders
        self.meets = not (orders.publishes or orders.hands_over)  # whether a barrier changes clocks alone
        self._follows = [index for index in translation.number if self._global.checks(index)]
        self._translation = translation
        self._threads = np.arange(machine.threads)
        self._own_lane = self._threads % machine.block_threads
        self._own_block = self._threads // machine.block_threads
        self._begins = self._own_stamp = self._own_clock = np.zeros(0, np.int64)
        self._told: tuple[Any, ...] = ()  # what compiled code knows
        self._ticks = self._seen = self._latest = -1
        self._lent = False  # whether compiled code has the history of global memory
        self._made_for: tuple[int, ...] = ()

    def allows(self, index: int) -> bool:
        """Whether an access orders nothing, and is plain enough for compiled code."""
        orders = self._orders
        special = (orders.atomic, orders.volatile, orders.releases, orders.acquires, orders.with_fences)
        if any(flags[index] for flags in special) or orders.publishes or orders.hands_over or self._shared.reads_apart:
            return False
        return not self._read_only.follows(index)

    @property
    def hidden(self) -> bool:
        """Whether compiled code would see nothing of global memory, whose history is packed."""
        return bool(self._follows) and self._global.grid.packed

    def lend(self, context: Record, accesses: Record) -> bool:
        """Let compiled code go on with the histories; False if they hold what only Python looks at."""
        clocks, grid = self._clocks, self._global.grid
        if clocks.lanes is not None or clocks.publishing.releases.partial:
            return False
        shared = self._shared.history.tables()
        tables = grid.tables() if self._follows else None
        if clocks.ticks != self._ticks:
            self._ticks, self._seen = clocks.ticks, int(clocks.known.min())
            self._latest = int(clocks.clock.max())
        context.set("seen_by_all", self._seen)
        context.set("clock_limit", NEVER if tables is None else max(tables.clock_limit - self._latest, 0))
        self._lent = tables is not None
        places = () if tables is None else tuple(tables.numbers.values())
        now = (*shared, clocks.known, clocks.clock, clocks.blocks, self._shared.followed.alike, grid.first, *places)
        if len(now) == len(self._told) and all(map(_same, now, self._told)):
            return True
        self._told = now
        several, block = clocks.blocks > 1, (clocks.blocks > 1, shared.granules, grid.first)
        if block != self._made_for:
            self._make(several, shared.granules)
            self._made_for = block
        fields = {
            "races": 1,
            "alike": self._shared.followed.alike,
            "clocked": clocks.blocks,
            "many": several,
            "shift": shared.shift,
            "begins": self._begins,
            "own_lane": self._own_lane,
            "own_stamp": self._own_stamp,
            "own_clock": self._own_clock,
            "known": clocks.known,
            "clock": clocks.clock,
            "written": shared.written,
            "read": shared.read,
            "read_too": shared.read_too,
        }
        for name, value in {**fields, **({} if tables is None else tables.numbers)}.items():
            context.set(name, value)
        # An access narrower than a granule, or one whose history is packed, is left to Python.
        shifts = np.where(accesses.column("shared") == 1, shared.shift, 0)
        refused = np.zeros(len(shifts), np.bool_)
        for index in self._follows:
            place = self._translation.number[index]
            accesses.set("follows", 1, place)
            accesses.set("access", grid.access(index), place)
            shifts[place] = 0 if tables is None else tables.numbers["grid_shift"]
            refused[place] = tables is None
        accesses.column("refused")[:] = refused | (accesses.column("width") >> shifts == 0)
        return True

    def _make(self, several: bool, granules: int) -> None:
        """Make what compiled code adds to the addresses and stamps of each thread."""
        fields, warps = self._global.grid.fields, self._machine.block_threads // 32
        self._begins = self._own_block * granules if several else np.zeros_like(self._own_block)
        self._own_clock = (self._own_block * warps if several else 0) + (self._own_lane >> 5)
        number = self._own_block + self._global.grid.first
        self._own_stamp = (number << fields.block_at) + (self._own_lane << fields.thread_at)

    def settle(self, context: Record) -> None:
        """Take over what compiled code has done."""
        ticks = context.get("ticks")
        if ticks:
            self._clocks.ticks += ticks
            context.set("ticks", 0)
        if self._lent:
            lows = {name: context.get(name) for name in ("written_low", "written_high", "read_low", "read_high")}
            self._global.grid.widen(**lows)


def _same(value: Any, before: Any) -> bool:
    """One array, or one number."""
    return value is before or (not isinstance(value, np.ndarray) and type(value) is type(before) and value == before)


def count_entries(counters: Sequence[Counters], translation: Translation, entries: NDArray[np.int64]) -> None:
    """Count the accesses of all entries, those of one instruction that came equally often at once."""
    keys = (entries[:, 0] & LOW) * (1 << 40) + entries[:, 2]
    order = np.argsort(keys, kind="stable")
    order = order[entries[order, 2] > 0]
    for rows in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1) if order.size else ():
        _count_rows(counters, translation, entries[rows], entries)


def _count_rows(
    counters: Sequence[Counters], translation: Translation, rows: NDArray[np.int64], entries: NDArray[np.int64]
) -> None:
    """Count accesses of one instruction, by entries that came equally often."""
    number = int(rows[0, 0]) & LOW
    index, form = translation.records[number - 1]
    assert isinstance(form, Move)
    kind, times, (addresses, mask) = form.what or ("st" if form.stores else "ld"), int(rows[0, 2]), _lanes(rows)
    every = None if mask.all() else mask
    if not (form.what and form.stores):
        flat = None if every is None else every.reshape(-1)
        for each in counters:
            each.repeated(index, form.space, kind, form.width, addresses.reshape(-1), flat, times)
        return
    other = (rows[:, 0] >> PAIR_AT) - 1
    read, fetched = _lanes(entries[other])
    fetched &= (other >= 0)[:, None]
    for each in counters:
        each.repeated_copies(index, form.width, addresses, read, every, fetched, times)


def _lanes(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the addresses of entries, none of which is negative, and the active lanes."""
    addresses = rows[:, RELATIVE : RELATIVE + WARP]
    return addresses - (addresses.min(axis=1, keepdims=True) & -128) + (1 << 12), rows[:, 1, None] >> np.arange(
        WARP
    ) & 1 == 1
