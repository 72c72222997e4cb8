"""The histories of accesses that find races, as compiled code reads and writes them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gemmery_emulator.findings import Findings
from gemmery_emulator.kernels.native.layout import Record
from gemmery_emulator.kernels.native.translation import Translation
from gemmery_emulator.lockstep import LockStep

NEVER = 1 << 62


class Races:
    """What compiled code has to know of the races of a chunk."""

    def __init__(self, machine: LockStep, findings: Findings, translation: Translation) -> None:
        self._machine, self._findings = machine, findings
        self._shared, self._global = findings.of_shared, findings.of_global
        self._orders, self._read_only = findings.orders, findings.read_only
        self._clocks = self._shared.clocks
        orders = self._orders
        self.meets = not (orders.publishes or orders.hands_over)  # whether a barrier changes clocks alone
        self._follows = [index for index in translation.moves if self._global.checks(index)]
        self._translation = translation
        self._threads = np.arange(machine.threads)
        self._own_lane = self._threads % machine.block_threads
        self._own_block = self._threads // machine.block_threads
        self._begins = self._own_stamp = self._own_clock = np.zeros(0, np.int64)
        self._lent = False  # whether compiled code has the history of global memory
        self._made_for: tuple[int, ...] = ()

    def allows(self, index: int) -> bool:
        """Whether an access orders nothing, and is plain enough for compiled code."""
        orders = self._orders
        special = (orders.atomic, orders.volatile, orders.releases, orders.acquires, orders.with_fences)
        if any(flags[index] for flags in special) or orders.publishes or orders.hands_over or self._shared.reads_apart:
            return False
        return not self._read_only.follows(index)

    def lend(self, context: Record, accesses: NDArray[np.int64], names: list[str]) -> bool:
        """Let compiled code go on with the histories; False if they hold what only Python looks at."""
        clocks, history, grid = self._clocks, self._shared.history, self._global.grid
        if clocks.lanes is not None or clocks.publishing.releases.partial:
            return False
        clocks.settle()
        shared = history.tables()
        several = clocks.blocks > 1
        made_for = several, shared.granules, grid.first
        if made_for != self._made_for:
            self._make(several, shared.granules)
            self._made_for = made_for
        numbers = {
            "races": 1,
            "alike": self._shared.followed.alike,
            "clocked": clocks.blocks,
            "many": several,
            "seen_by_all": int(clocks.known.min()),
            "begins": self._begins,
            "own_lane": self._own_lane,
            "own_stamp": self._own_stamp,
            "own_clock": self._own_clock,
            "shift": shared.shift,
            "ticks": 0,
            "clock_limit": NEVER,
            "known": clocks.known,
            "clock": clocks.clock,
            "written": shared.written,
            "read": shared.read,
            "read_too": shared.read_too,
        }
        shifts = np.where(accesses[:, names.index("shared")] == 1, shared.shift, 0)
        follows = np.zeros(len(accesses), np.int64)
        if self._follows:
            tables = grid.tables()
            usable = tables is not None
            if tables is not None:
                numbers |= tables.numbers
                numbers["clock_limit"] = max(tables.clock_limit - int(clocks.clock.max()), 0)
                for index in self._follows:
                    place = self._translation.number[index]
                    follows[place] = 1
                    accesses[place, names.index("access")] = grid.access(index)
                    shifts[place] = tables.numbers["grid_shift"]
        else:
            usable = True
        self._lent = bool(self._follows) and usable
        for name, value in numbers.items():
            context.set(name, value)
        # An access narrower than a granule, or one whose history is packed, is left to Python.
        followed = [self._translation.number[index] for index in self._follows]
        accesses[:, names.index("follows")] = follows
        narrow = (accesses[:, names.index("width")] >> shifts) == 0
        if not usable:
            narrow[followed] = True
        accesses[:, names.index("refused")] = narrow
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

