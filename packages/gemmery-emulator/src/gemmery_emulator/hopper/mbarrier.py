"""mbarriers: objects in shared memory that count expected arrivals and bytes; a phase ends when both reach zero.

PTX ISA 9.0, "Parallel Synchronization and Communication Instructions: mbarrier". Their state is kept apart
from memory: one number for each granule of 8 bytes of each block, so that barriers at one address of all blocks form a
vector. test_wait waits like try_wait: a thread whose test fails sleeps until some phase ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gemmery_emulator.hopper import cluster
from gemmery_emulator.hopper.cluster import Lifetimes
from gemmery_emulator.machine import BarrierEvent, Machine, active, report_misuse
from gemmery_emulator.memory import SHARED_WINDOW
from gemmery_emulator.op import Flags, Indices, Kinds, Mask, sort_by_kind
from gemmery_emulator.ptx import Address, Instruction
from gemmery_emulator.reach import Copies
from gemmery_emulator.steps import Handler, Lowering, Step, drop, lane_step, refused

SIZE = 8  # bytes of an mbarrier
MOST = (1 << 20) - 1  # largest number of expected arrivals, and of bytes
PENDING_AT = 32  # the state that arrive returns: the phase in the low bits, the pending arrivals above
Needed = Callable[[Indices], Flags]
ByKind = Mapping[str, str]  # the modifiers of an opcode


class Mbarriers:
    """All mbarriers of a chunk, by `place`: the index of an 8-byte granule in the chunk's shared memory."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._stride = machine.shared.stride // SIZE
        count = self._stride * machine.blocks
        self._live = np.zeros(count, bool)
        self._phase, self._pending, self._expected, self._bytes = np.zeros((4, count), np.int64)
        self._awaited = np.zeros(machine.threads, np.int64)  # where each thread has waited in vain
        self.landing: list[Callable[[Needed], None]] = []  # each completes what arrives at mbarriers that need it

    # ---- which barrier ----

    def places(self, index: int, threads: Indices, addresses: Indices, fresh: bool = False) -> tuple[Indices, Indices]:
        """Return the threads with the address of an mbarrier, and its place; report the others to the observers."""
        machine = self._machine
        blocks = cluster.resolved(addresses, threads // machine.block_threads, cluster.size(machine))
        offsets = addresses & cluster.OFFSET
        bad = (offsets % SIZE != 0) | (offsets + SIZE > machine.shared.size) | (blocks < 0)
        bad |= blocks >= machine.blocks
        what = "uses an mbarrier outside shared memory or not at a multiple of 8: declare it as an aligned b64"
        report_misuse(machine, index, threads[bad], what)
        places = np.where(bad, 0, blocks * self._stride + offsets // SIZE)
        if not fresh:
            dead = ~self._live[places] & ~bad
            what = "uses an mbarrier that is not initialized: execute mbarrier.init first"
            report_misuse(machine, index, threads[dead], what)
            bad |= dead
        return (threads, places) if not bad.any() else (threads[~bad], places[~bad])

    # ---- what happens to it ----

    def start(self, places: Indices, count: Any) -> None:
        """mbarrier.init."""
        self._live[places] = True
        self._phase[places] = self._bytes[places] = 0
        self._pending[places] = self._expected[places] = count

    def end(self, places: Indices) -> None:
        """mbarrier.inval."""
        self._live[places] = False

    def expect(self, places: Indices, count: Any) -> None:
        """Expect more bytes in this phase."""
        np.add.at(self._bytes, places, count)

    def complete(self, places: Indices, count: Any) -> None:
        """Complete bytes."""
        np.subtract.at(self._bytes, places, count)
        self._turn(places)

    def drop(self, places: Indices, count: Any) -> None:
        """Reduce the expected arrivals from the next phase on."""
        np.subtract.at(self._expected, places, count)

    def expect_arrival(self, places: Indices) -> None:
        """Expect one more arrival in this phase."""
        np.add.at(self._pending, places, 1)

    def arrive(self, index: int, threads: Indices, places: Indices, count: Any) -> Indices:
        """Count arrivals; returns the state before them."""
        before = self._phase[places] | self._pending[places] << PENDING_AT
        np.subtract.at(self._pending, places, count)
        over = self._pending[places] < 0
        what = "arrives at a phase that expects no more arrivals: initialize the mbarrier with a larger count, or wait"
        report_misuse(self._machine, index, threads[over], what)
        self._turn(places)
        return before

    def offsets(self, places: Indices) -> Indices:
        """Return the addresses in the blocks' shared memory."""
        return places % self._stride * SIZE

    def phases(self, places: Indices) -> Indices:
        """Return the number of phases that have ended."""
        return self._phase[places]

    def _turn(self, places: Indices) -> None:
        """End the phases that expect nothing more; excess arrivals count for the following phases."""
        done = (self._pending[places] <= 0) & (self._bytes[places] == 0)
        if not done.any():
            return
        ended = _distinct(places[done], len(self._phase))
        self._machine.changes += 1
        awaited = np.maximum(self._expected[ended], 1)
        times, rest = np.divmod(-self._pending[ended], awaited)
        self._phase[ended] += 1 + times
        self._pending[ended] = self._expected[ended] - rest
        self.report(-1, "ends", ended[:0], ended, 1 + times)

    def report(self, index: int, what: str, threads: Indices, places: Indices, amounts: Indices) -> None:
        """Tell the observers what happens to these mbarriers."""
        if len(places):
            blocks, granules = np.divmod(places, self._stride)
            event = BarrierEvent(index, what, threads, blocks, granules * SIZE, amounts)
            self._machine.observers.mbarrier(self._machine, event)

    def missing(self, thread: int) -> tuple[int, int, int, int, int]:
        """Of the mbarrier where a thread waits: its address, its phase, its arrivals, the missing ones, and bytes."""
        place = self._awaited[thread]
        parts = (place % self._stride * SIZE, self._phase[place], self._expected[place], self._pending[place])
        return *map(int, parts), int(self._bytes[place])  # type: ignore[return-value]

    # ---- who waits ----

    def failed(self, threads: Indices, places: Indices, phase: Indices) -> Flags:
        """Complete what is under way to these mbarriers; returns which waits for a phase, by parity or state, continue.

        Only as much as ends the phase. For a state, too, only the parity matters, as on an H200.
        """
        waits: Flags = self._phase[places] & 1 == phase & 1
        for land in self.landing:
            if waits.any():
                land(self._needed(_distinct(places[waits], len(self._phase))))
                waits = self._phase[places] & 1 == phase & 1
        self._awaited[threads[waits]] = places[waits]
        return waits

    def _needed(self, barriers: Indices) -> Needed:
        """Return which of some places are these mbarriers, as long as their present phase has not ended."""
        before = self._phase[barriers]
        return lambda places: np.isin(places, barriers[self._phase[barriers] == before])


def _distinct(places: Indices, count: int) -> Indices:
    """Return each place once, in order."""
    if len(places) < 64:
        return np.unique(places)
    flags = np.zeros(count, bool)
    flags[places] = True
    return np.flatnonzero(flags)


# ---- instructions ----


def _entry(
    lower: Callable[..., Step], kinds: Kinds, *operands: int, kind: str = "mbarrier", waits: bool = False
) -> Handler:
    """An instruction with these modifiers and numbers of operands."""

    def step(lowering: Lowering, instruction: Instruction, index: int) -> Step:
        opcode, by_kind = instruction.opcode, sort_by_kind(instruction.opcode.modifiers, kinds)
        if by_kind is None or opcode.types != ("b64",) or ("order" in by_kind) != ("scope" in by_kind):
            raise refused(instruction)
        return lower(lowering, instruction, index, by_kind)

    return Handler(step=step, operands=operands, kind=kind, waits=waits, orders=True)


def of(value: Any, threads: Indices) -> Indices:
    """Return the value of each of these threads."""
    if not value.ndim:
        return np.full(threads.shape, value).astype(np.int64)
    values: Indices = value[threads].astype(np.int64)
    return values


Located = tuple[Mbarriers, Indices, Indices]  # with the active threads that name one, and the place of each
Act = Callable[[Machine, int, Mask, Located, Any], object]


def _located(
    lowering: Lowering, instruction: Instruction, operand: Any, index: int, by_kind: ByKind, fresh: bool = False
) -> Callable[[Machine, Mask], Located]:
    """Return a function that gives the mbarriers that are named, whose address may be generic."""
    where, window = lowering.address(operand, instruction), 0 if "space" in by_kind else SHARED_WINDOW

    def locate(machine: Machine, mask: Mask) -> Located:
        mbarriers, threads = machine.unit(Mbarriers), active(machine, mask)
        return mbarriers, *mbarriers.places(index, threads, of(where(machine.registers), threads) - window, fresh)

    return locate


def _acting(act: Act, counted: bool = False, fresh: bool = False) -> Callable[..., Step]:
    """Lower an instruction that does something to the mbarrier of its first operand, as often as its second says."""

    def lower(lowering: Lowering, instruction: Instruction, index: int, by_kind: ByKind) -> Step:
        locate = _located(lowering, instruction, instruction.operands[0], index, by_kind, fresh)
        count = lowering.read(instruction.operands[1], "u32", instruction) if counted else lambda _: np.int64(1)

        def step(machine: Machine, mask: Mask) -> None:
            located = locate(machine, mask)
            act(machine, index, mask, located, of(count(machine.registers), located[1]))

        return step

    return lower


def _init(machine: Machine, index: int, mask: Mask, located: Located, counts: Any) -> None:
    mbarriers, threads, places = located
    wrong = (counts < 1) | (counts > MOST)
    if wrong.any():
        what = f"initializes an mbarrier for {counts[wrong][0]} arrivals: 1 to {MOST}"
        report_misuse(machine, index, threads[wrong], what)
    mbarriers.start(places, counts)
    machine.unit(Lifetimes).initializes(threads, places)
    if len(threads):
        machine.observers.initialized(machine, index, threads, mbarriers.offsets(places))


def _copies_arrive(machine: Machine, index: int, mask: Mask, located: Located, counts: Any) -> None:
    """cp.async.mbarrier.arrive: arrive when all copies of the thread have landed, which here is at once."""
    machine.unit(Copies).wait_all(mask)
    mbarriers, threads, places = located
    cluster.report_order(machine, index, threads, mbarriers.offsets(places), acquired=False)
    if "noinc" not in machine.kernel.instructions[index].opcode.modifiers:
        mbarriers.expect_arrival(places)
    mbarriers.arrive(index, threads, places, counts)


def _arrive(lowering: Lowering, instruction: Instruction, index: int, by_kind: ByKind) -> Step:
    """arrive and arrive_drop, also with expect_tx."""
    name = instruction.opcode.name
    expects = name in ("mbarrier.arrive.expect_tx", "mbarrier.arrive_drop.expect_tx")
    drops = name in ("mbarrier.arrive_drop", "mbarrier.arrive_drop.expect_tx")
    operands = instruction.operands
    result, operands = (None, operands) if isinstance(operands[0], Address) else (operands[0], operands[1:])
    if len(operands) != 2 and (expects or len(operands) != 1):
        raise refused(instruction, f"{len(instruction.operands)} operands:")
    locate = _located(lowering, instruction, operands[0], index, by_kind)
    count = lowering.read(operands[1], "u32", instruction) if len(operands) > 1 else None
    write = drop if result is None else lowering.write(result, "b64", instruction)
    if write is not drop and by_kind.get("space") == cluster.SPACE:
        raise refused(instruction, "the state of another block's mbarrier:")

    def step(machine: Machine, mask: Mask) -> None:
        (mbarriers, threads, places), lifetimes = locate(machine, mask), machine.unit(Lifetimes)
        counts = of(count(machine.registers), threads) if count is not None else np.ones(len(threads), np.int64)
        cluster.report_order(machine, index, threads, mbarriers.offsets(places), acquired=False)
        if lifetimes.clustered:
            lifetimes.arrives(index, threads, places, mbarriers.phases(places))
        mbarriers.report(index, "expects" if expects else "arrives", threads, places, counts)
        if expects:
            mbarriers.expect(places, counts)
            counts = np.ones_like(counts)
        if drops:
            mbarriers.drop(places, counts)
        state = mbarriers.arrive(index, threads, places, counts)
        states = np.zeros(machine.threads, np.uint64)
        states[threads] = state
        write(machine.registers, mask, states)

    return step


def _wait(lowering: Lowering, instruction: Instruction, index: int, by_kind: ByKind) -> Step:
    """test_wait and try_wait."""
    parity = instruction.opcode.name in ("mbarrier.test_wait.parity", "mbarrier.try_wait.parity")
    result, place, phase, *_ = instruction.operands
    locate = _located(lowering, instruction, place, index, by_kind)
    awaited = lowering.read(phase, "u32" if parity else "b64", instruction)
    write = lowering.write(result, "pred", instruction)

    def step(machine: Machine, mask: Mask) -> None:
        mbarriers, threads, places = locate(machine, mask)
        waits = mbarriers.failed(threads, places, of(awaited(machine.registers), threads))
        failed = np.zeros(machine.threads, bool)
        failed[threads[waits]] = True
        machine.failed = failed
        mbarriers.report(index, "waits", threads[waits], places[waits], np.ones_like(places[waits]))
        if not waits.all():
            mbarriers.report(index, "passes", threads[~waits], places[~waits], np.ones_like(places[~waits]))
            machine.unit(Lifetimes).passes(places[~waits], mbarriers.phases(places[~waits]))
            cluster.report_order(machine, index, threads[~waits], mbarriers.offsets(places[~waits]), acquired=True)
        write(machine.registers, mask, ~failed)

    return step


def _pending_count(lowering: Lowering, instruction: Instruction, index: int, by_kind: ByKind) -> Step:
    read = lowering.read(instruction.operands[1], "b64", instruction)
    write = lowering.write(instruction.operands[0], "u32", instruction)
    return lane_step(lambda state: (state >> np.uint64(PENDING_AT)).astype(np.uint32), [read], [write])


_OWN, _ANY = ("shared", "shared::cta"), ("shared", "shared::cta", "shared::cluster")
_ARRIVALS: Kinds = {"space": _ANY, "order": ("release", "relaxed"), "scope": ("cta", "cluster")}
_WAITS: Kinds = {**_ARRIVALS, "space": _OWN, "order": ("acquire", "relaxed")}
_COUNTED: Kinds = {**_ARRIVALS, "order": ("relaxed",)}
_PLACED: Kinds = {"space": _OWN}
TABLE = {
    "mbarrier.init": _entry(_acting(_init, counted=True, fresh=True), _PLACED, 2),
    "mbarrier.inval": _entry(_acting(lambda _, __, ___, at, counts: at[0].end(at[2])), _PLACED, 1),
    "mbarrier.arrive": _entry(_arrive, _ARRIVALS, 1, 2, 3),
    "mbarrier.arrive.expect_tx": _entry(_arrive, _ARRIVALS, 2, 3),
    "mbarrier.arrive_drop": _entry(_arrive, _ARRIVALS, 1, 2, 3),
    "mbarrier.arrive_drop.expect_tx": _entry(_arrive, _ARRIVALS, 2, 3),
    "mbarrier.expect_tx": _entry(
        _acting(lambda _, __, ___, at, counts: at[0].expect(at[2], counts), counted=True), _COUNTED, 2
    ),
    "mbarrier.complete_tx": _entry(
        _acting(lambda _, __, ___, at, counts: at[0].complete(at[2], counts), counted=True), _COUNTED, 2
    ),
    "mbarrier.test_wait": _entry(_wait, _WAITS, 3, waits=True),
    "mbarrier.test_wait.parity": _entry(_wait, _WAITS, 3, waits=True),
    "mbarrier.try_wait": _entry(_wait, _WAITS, 3, 4, waits=True),  # the last operand is a time limit
    "mbarrier.try_wait.parity": _entry(_wait, _WAITS, 3, 4, waits=True),
    "mbarrier.pending_count": _entry(_pending_count, {}, 2),
    "cp.async.mbarrier.arrive": _entry(_acting(_copies_arrive), {**_PLACED, "noinc": ("noinc",)}, 1, kind="cp.async"),
}
