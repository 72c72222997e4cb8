"""Compiled blocks beside the machine: which are compiled and when, and what both keep of the same state.

Registers live in two places. The machine has a list of values, which are never written in place; compiled code has an
array for each register. Whoever runs next gets those that the other may have changed.
"""

from __future__ import annotations

import ctypes
import functools
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery import config
from gemmery_emulator.convergence import Shuffled
from gemmery_emulator.counters import Counters
from gemmery_emulator.findings import Findings
from gemmery_emulator.kernels.native import frames
from gemmery_emulator.kernels.native.block_copies import CopyRows
from gemmery_emulator.kernels.native.buffers import Buffers
from gemmery_emulator.kernels.native.compiling import CALL, CALL_THREAD, PAUSE, USUAL, USUAL_THREAD, Native, Ways, turns
from gemmery_emulator.kernels.native.frames import ADDRESSES, CONTEXT, ENTRIES, Record
from gemmery_emulator.kernels.native.sharing import Races, count_entries
from gemmery_emulator.kernels.native.translation import AsyncCopy, CopyGroup, Move
from gemmery_emulator.lockstep import LockStep
from gemmery_emulator.machine import Access
from gemmery_emulator.op import Mask
from gemmery_emulator.ptx import PtxKernel
from gemmery_emulator.trace import Trace

FAR = 2**31 - 1  # the place of threads that wait at a barrier
LEAST = 4  # blocks that are worth a call
MOST = 1 << 14  # blocks of a call, so that Python looks at the time and at signals
LONGEST = 1 << 20  # blocks that Python executes after calls that came to nothing
FOREIGN = frozenset(("wgmma", "tcgen05", "mapa"))  # of kernels that stay with NumPy

BlockRun = Callable[[int], int]
ChunkPart = Callable[[int, int, int], int]


def engine(machine: LockStep) -> BlockEngine | None:
    """Return what runs compiled blocks for a chunk; None where NumPy has to run all."""
    program, way = machine.program, config.emulator()
    if way == "numpy":
        return None
    block_engine, reason = None, _unsuited(machine)
    if not reason:
        if program.native is None:
            object.__setattr__(program, "native", Native(program))
        native: Native = program.native
        if way == "compiled" and not native.eager:
            native.compile_all()
            reason = native.uncoded()
        ways = native.ways.setdefault(machine.threads, Ways())
        if native.eager or (any(native.fit) and ways.unwatched != machine.launch.parameters):
            block_engine = BlockEngine(machine, native, ways)
    if reason and way == "compiled":
        tell(program.kernel.name, reason)
    return block_engine


@functools.cache
def tell(kernel: str, reason: str) -> None:
    """Say once why a kernel, or some of its blocks, are not compiled where all should be."""
    text = f"GEMMERY_EMULATOR=compiled: {kernel} runs by NumPy, at least in part: {reason}"
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _unsuited(machine: LockStep) -> str:
    """Return why NumPy has to run all blocks of a kernel, in words; "" if it need not."""
    program = machine.program
    reasons = {
        "it has clusters": machine.launch.together > 1,
        "it may read registers that a thread has not written": bool(program.followed),
        "it has local memory": bool(program.kernel.local),
        "it is observed": any(type(each) not in (Counters, Findings, Trace) for each in machine.watching),
        "it has instructions of warpgroups or clusters": _is_foreign(program.kernel),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


@functools.lru_cache(maxsize=64)
def _is_foreign(kernel: PtxKernel) -> bool:
    return any(each.opcode.family in FOREIGN for each in kernel.instructions)


class BlockEngine:
    """Runs compiled blocks of a chunk."""

    def __init__(self, machine: LockStep, native: Native, ways: Ways) -> None:
        self._machine, self._native = machine, native
        self._program, self._translation = native.program, native.translation
        self._counters = [each for each in machine.watching if isinstance(each, Counters)]
        traces = [each for each in machine.watching if isinstance(each, Trace) and each.watching]
        self._trace = traces[0] if traces else None
        self._races: Races | None = None
        self._ready = self._hidden = False
        self._failed, self._early = 0, 16  # calls that may end at branches, before these have parted threads
        self._pause, self._pauses = 0, PAUSE
        self._ways = ways
        self._began, self._busy, self._fixed = time.thread_time(), native.busy, 0.0
        self._spent = self._late = 0.0  # NumPy's work: blocks that may have code, and those that have
        self._stale = 0  # the number of the latest compiled run
        self.ran: Mask = None  # the threads of the latest run

    # ---- before and after Python ----

    def lend(self, at: int) -> None:
        """NumPy is about to execute a block."""
        if self._ready:
            slots = self._translation.slots_of(at)
            self._export(slots)
            self._changed |= dict.fromkeys(slots)
            block = self._program.blocks[at]
            if self._copies is not None:
                self._copies.give_back()
            if self._kept and any(index in self._unseen for index in range(block.first, block.last)):
                self._tell_fetched()
        if self._native.executed(at, self._machine.threads):
            self._ways = Ways()  # this chunk is no measure of either way
            if self._ready:
                self._bind_blocks()
        elif self._native.fit[at]:
            work = self._native.seconds(at, self._machine.threads)
            self._spent += work
            self._late += work if at in self._native.code else 0.0

    def _tell_fetched(self) -> None:
        """Tell the recorder of pictures what compiled blocks loaded, before it sees what is stored."""
        assert self._trace is not None
        threads = self._machine.threads
        for index, lanes in self._kept.items():
            mask = lanes[8 * threads :].astype(np.bool_)
            if mask.any():
                form: Any = self._translation.forms[index]
                event = Access(index, "global", "ld", lanes[: 8 * threads].view(np.int64).copy(), mask, form.width)
                self._trace.fetched(event)

    def lend_all(self) -> None:
        """NumPy needs all registers."""
        if self._ready:
            self._export(self._written)

    def finish(self) -> None:
        """Tell the counters what compiled blocks did, at the end of a chunk."""
        native, machine, work = self._native, self._machine, 0.0
        if self._ready:
            begun = time.thread_time()
            self._count_patterns()
            self._buffers.give_back()
            table = self._blocks
            for number in np.flatnonzero(table.column("every_warp")).tolist():
                block = self._program.blocks[number]
                warps, threads = table.get("every_warp", number), table.get("every_thread", number)
                work += native.seconds(number, machine.threads) * warps / machine.warps
                for counters in self._counters:
                    counters.executed(machine, block.first, block.last, warps, threads)
                    branches = table.get("branches", number), table.get("divergent", number)
                    counters.branched(block.last - 1, *branches)
            self._fixed += time.thread_time() - begun
        seconds = time.thread_time() - self._began - (native.busy - self._busy)
        self._ways.ran(seconds, self._spent, work, self._fixed, self._late)
        self._ways.settle(machine.launch.parameters, machine.threads)

    # ---- running ----

    def run(self, allowance: int) -> int:
        """BlockRun compiled blocks, at most so many; return how many ran."""
        if allowance < LEAST or not self._native.code or self._hidden or not self._may_run():
            return 0
        if not self._ready:
            work = self._ways.work  # as in the latest chunk; beyond that, as much again as so far
            work = work if self._spent <= work else 2 * self._spent
            if not (self._native.eager or self._ways.prefers_compiled(work, self._machine.threads)):
                return 0
            begun = time.thread_time()
            findings = next((each for each in self._machine.watching if isinstance(each, Findings)), None)
            self._races = Races(self._machine, findings, self._translation) if findings is not None else None
            if self._races is not None and self._races.hidden:  # of which compiled code would see too little
                self._hidden = True
                return 0
            self._make()
            self._fixed = time.thread_time() - begun
        if not self._prepare():
            return 0
        ctx, machine = self._context, self._machine
        self._enter(min(allowance, MOST))
        before = machine.elapsed + machine.ended
        why = self._run(ctx.address())
        together, at, steps = bool(ctx.get("uniform")), ctx.get("at"), ctx.get("steps")
        self._return(together, at)
        # Python executes each access once, and looks at each branch that parts threads for the first time.
        expected = (
            why - frames.INSIDE in self._unseen if why > frames.END else self._early > 0 and at in self._undiverged
        )
        self._early -= 1
        done = (USUAL + USUAL_THREAD * machine.threads) * (machine.elapsed + machine.ended - before)
        self._failed = 0 if expected or done > CALL + CALL_THREAD * machine.threads else self._failed + 1
        if self._failed > 3 and not self._native.eager:
            self._pause, self._failed = self._pauses, 0
            self._pauses = min(2 * self._pauses, LONGEST)
        if why >= frames.END:
            mask: Mask = None if together else self._mask[: machine.threads].astype(np.bool_)
            block = self._program.blocks[at]
            if self._trace is not None:
                self._trace.reached(block.first, block.last)
            if why > frames.END:
                self._finish_inside(at, why - frames.INSIDE, mask)
            if block.way:
                self._export(self._translation.slots[block.last - 1])
            machine.end_block(block, mask, at)
        return steps

    def _may_run(self) -> bool:
        """Whether compiled blocks may run now, as far as that is known without looking at the histories."""
        if self._pause:
            self._pause -= 1
            return False
        places = self._machine.places
        if places.each is None and places.at not in self._native.code:
            return False
        return self._machine.waits_plainly() and not (self._trace is not None and self._trace.following)

    def _enter(self, budget: int) -> None:
        """Tell compiled code where threads are."""
        ctx, machine, places = self._context, self._machine, self._machine.places
        self._parked, self._at_first = machine.waiting.at_barriers.parked, places.each
        if places.each is not None:
            self._places[:] = places.each
            if self._parked.size:
                self._places[self._parked] = FAR
        numbers = (places.each is None, places.at, 0, budget, machine.elapsed, machine.ended)
        for name, number in zip(("uniform", "at", "steps", "budget", "elapsed", "ended"), numbers, strict=True):
            ctx.set(name, number)
        self._ran[:] = 0
        self._stale += 1

    def _return(self, together: bool, at: int) -> None:
        """Tell the machine where threads are now, and which of them ran."""
        machine, places, threads = self._machine, self._machine.places, self._machine.threads
        machine.elapsed, machine.ended = self._context.get("elapsed"), self._context.get("ended")
        places.at, places.each = at, None
        if not together:
            places.each = self._places.copy()
            if self._parked.size and self._at_first is not None:
                places.each[self._parked] = self._at_first[self._parked]
        self._settle()
        self.ran = None if self._ran[threads] else self._ran[:threads].astype(np.bool_)

    def _finish_inside(self, at: int, index: int, mask: Mask) -> None:
        """Execute an instruction by NumPy and the rest of its block by compiled code, as far as that comes."""
        block, translation = self._program.blocks[at], self._translation
        last = block.last - bool(block.way)
        flags = self._full if mask is None else self._mask
        part = _part(self._native.code[at])
        while True:
            slots = translation.slots[index]
            self._export(slots)
            if self._copies is not None and isinstance(translation.forms[index], AsyncCopy | CopyGroup):
                self._copies.give_back()
            if self._kept and index in self._unseen:
                self._tell_fetched()
            block.steps[index - block.first](self._machine, mask)
            self._changed |= dict.fromkeys(slots)
            index += 1
            if index == last:
                return
            if self._prepare():
                self._stale += 1
                stopped = part(self._context.address(), flags.__array_interface__["data"][0], index)
                self._settle()
                if not stopped:
                    return
                index = stopped - 1

    # ---- state ----

    def _make(self) -> None:
        """Make the buffers of a chunk."""
        machine, program, translation = self._machine, self._program, self._translation
        threads = machine.threads
        self._context, self._blocks, self._accesses = Record(CONTEXT), *(each.copy() for each in self._native.tables)
        self._run: BlockRun = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(turns()["run"])
        kinds = [np.dtype(np.bool_ if kind == "?" else kind) for kind in translation.stored]
        known = sorted({*program.slots.values(), *program.provided.values()})
        rows = {slot: translation.rows.get(slot, slot) for slot in known}
        numbers_of = {row: number for number, row in enumerate(dict.fromkeys(rows.values()))}
        self._buffers = own = Buffers.for_threads(threads, len(numbers_of))
        self._values: dict[int, NDArray[Any]] = {
            slot: own.rows[numbers_of[row]][: threads * kinds[slot].itemsize].view(kinds[slot])
            for slot, row in rows.items()
        }
        self._registers = np.zeros(max(known, default=0) + 1, np.int64)
        for slot, values in self._values.items():
            self._registers[slot] = values.__array_interface__["data"][0]
        self._places, self._mask, self._ran, self._full = own.places, own.mask, own.ran, own.full
        self._entries, self._slots = own.entries, own.slots
        bases = np.broadcast_to(np.asarray(machine.shared.base, np.int64), (threads,))
        own.bases[:] = bases
        arrays = [(each.start, each.stop) for each in machine.memory.allocations] or [(0, 0)]
        self._arrays = np.array(arrays, np.int64)
        numbers = {
            "threads": threads, "block_threads": machine.block_threads, "warps": machine.warps,
            "stop": program.stop, "shared_limit": machine.shared.size, "array_count": len(arrays),
            "each_warp": machine.block_threads // 32,
        }  # fmt: skip
        buffers = {
            "places": self._places, "mask": self._mask, "full": self._full, "ran": self._ran,
            "registers": self._registers, "lanes": own.lanes,
            "every_lane": own.every_lane, "before": own.touched[0], "where": own.touched[1],
            "stamps": own.touched[2], "who": own.touched[3], "goes": own.goes, "blocks": self._blocks.words,
            "access": self._accesses.words, "found": own.found, "read_found": own.read_found,
            "sources": own.sources, "reads": own.reads,
            "parameters": machine.parameters, "memory": machine.memory.data, "shared": machine.shared.data,
            "bases": own.bases, "arrays": self._arrays, "entries": self._entries, "slots": self._slots,
            **dict(zip(ADDRESSES, own.addresses, strict=True)),
        }  # fmt: skip
        for name, value in (*numbers.items(), *buffers.items()):
            self._context.set(name, value)
        self._describe()
        self._copies: CopyRows | None = None
        if any(isinstance(form, AsyncCopy) for form in translation.forms):
            self._copies = CopyRows(machine, self._context, self._accesses, own, translation)
        self._written = sorted(set(translation.mentions) - set(translation.rows))
        self._exported = dict.fromkeys(self._values, 0)  # the run after which each was copied to the machine
        # In the order of their changes: the later of two that share a row is the one whose value counts.
        self._changed = dict.fromkeys(slot for slot in self._values if slot not in translation.rows)
        self._ready = True
        self._bind_blocks()

    def _describe(self) -> None:
        """Describe the accesses and the blocks of the kernel to compiled code."""
        translation, program, threads = self._translation, self._program, self._machine.threads
        self._kept: dict[int, NDArray[np.uint8]] = {}  # the latest addresses of loads, and by whom
        self._unseen = dict[int, list[int]]()
        for number, (index, form) in enumerate(translation.records):
            if isinstance(form, Move) and (self._races is None or self._races.allows(index)):
                self._unseen.setdefault(index, []).append(number)
            if self._trace is not None and self._trace.feeds(index):
                self._kept[index] = np.zeros(9 * threads, np.uint8)
                self._accesses.set("kept", self._kept[index], number)
        self._blocks.column("diverged")[:] = self._trace is None
        if self._races is not None and not self._races.meets:
            ways = self._blocks.column("way")
            ways[ways == frames.MEETS] = frames.ELSEWHERE
        branching = (number for number, block in enumerate(program.blocks) if block.guard is not None)
        self._undiverged = list(branching) if self._trace is not None else []

    def _bind_blocks(self) -> None:
        # Slots that compiled code reads or writes.
        self._used = {*self._program.provided.values(), *self._translation.rows}
        for number, address in self._native.code.items():
            self._blocks.set("ready", address, number)
            self._used.update(self._translation.slots_of(number))

    def _export(self, slots: Iterable[int]) -> None:
        """Give the machine the values of registers that compiled blocks may have changed."""
        registers, exported, stale = self._machine.registers, self._exported, self._stale
        for slot in slots:
            if exported[slot] != stale and slot not in self._changed:
                registers[slot] = _agreed(self._values[slot].copy())
            exported[slot] = stale

    def _import(self) -> None:
        """Take the values of registers that NumPy may have changed."""
        registers = self._machine.registers
        for slot in [slot for slot in self._changed if slot in self._used]:
            self._values[slot][...] = registers[slot]
            del self._changed[slot]

    def _prepare(self) -> bool:
        """Make the state ready for compiled code; False where NumPy has to go on."""
        shuffled = self._machine.unit(Shuffled)
        if shuffled.undefined or shuffled.spread:
            return False
        if self._races is not None and not self._races.lend(self._context, self._accesses):
            return False
        if self._unseen:
            indices = [index for index in self._unseen if self._trace is None or self._trace.knows(index)]
            for index in indices:
                self._accesses.column("seen")[self._unseen.pop(index)] = 1
        if self._undiverged and self._trace is not None:
            for number in [n for n in self._undiverged if self._trace.has_diverged(self._program.blocks[n].last - 1)]:
                self._blocks.set("diverged", 1, number)
                self._undiverged.remove(number)
        if self._context.get("used") + 4 * self._machine.warps > ENTRIES:
            self._count_patterns()
        if self._copies is not None:
            self._copies.lend()
        self._import()
        return True

    def _settle(self) -> None:
        """Tell the histories of accesses what compiled code has done."""
        if self._races is not None:
            self._races.settle(self._context)

    def _count_patterns(self) -> None:
        """Count the accesses so far, those of one instruction that came equally often at once."""
        used = self._context.get("used")
        count_entries(self._counters, self._translation, self._entries[:used])
        self._entries[:used] = 0
        self._slots[:] = 0
        self._context.set("used", 0)
        self._accesses.column("latest")[:] = ENTRIES


def _agreed(values: NDArray[Any]) -> Any:
    """Return one number where all threads agree, to the bit: NumPy is faster with it."""
    bits = values.view(f"u{values.itemsize}")
    return values[0] if bits[0] == bits[-1] and (bits == bits[0]).all() else values


def _part(address: int) -> ChunkPart:
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)
