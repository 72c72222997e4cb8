"""Convergence: the lanes that an instruction of a warp or warpgroup waits for, and masks that do not fit.

PTX ISA 9.0, "shfl.sync", "vote.sync", "match.sync", "redux.sync", "elect.sync": a lane waits for those that its mask
names, as long as they have not ended. They have to execute the same instruction with the same mask, and the lane itself
is one of them. Instructions of matrices, which are .aligned, take all lanes of the warp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery_emulator.instructions import find, stores, used
from gemmery_emulator.machine import Machine
from gemmery_emulator.op import Flags, Indices, Mask
from gemmery_emulator.ops.warp import LANES, sources
from gemmery_emulator.ptx import Immediate, Instruction
from gemmery_emulator.steps import Lowering, Read, Step

FULL = 0xFFFFFFFF
_NAMES = {
    "shfl sync idx": "__shfl_sync()",
    "shfl sync up": "__shfl_up_sync()",
    "shfl sync down": "__shfl_down_sync()",
    "shfl sync bfly": "__shfl_xor_sync()",
    "vote sync ballot": "__ballot_sync()",
    "vote sync all": "__all_sync()",
    "vote sync any": "__any_sync()",
    "match any sync": "__match_any_sync()",
    "match all sync": "__match_all_sync()",
    **{f"redux sync {name}": f"__reduce_{name}_sync()" for name in ("add", "min", "max", "and", "or", "xor")},
}
WAY_OUT = (
    "let all lanes of the mask execute it, or pass the mask of those that do (__ballot_sync() of the condition, before "
    "the branch)"
)


@dataclass(frozen=True)
class Gathering:
    """The lanes that a basic block waits for before it runs."""

    threads: int  # 32 for a warp, 128 for a warpgroup
    members: Read | None  # the lanes that each thread names; None for all


@dataclass(frozen=True)
class Undefined:
    """The threads to which a shuffle gave an undefined value, which the program may drop."""

    lanes: Flags
    message: str
    selections: dict[int, bool]  # instructions that choose between it and another value, and whether it is the first


@dataclass(frozen=True)
class Spread:
    """A shuffle of undefined values that a program may drop, and the stores that show that it did not."""

    threads: Indices  # that read them first
    warps: Flags
    message: str
    stores: frozenset[int]


def spread_values(machine: Machine) -> dict[int, Spread]:
    """The shuffles of undefined values, by their instruction, to the end of the launch."""
    return {}


def undefined_values(machine: Machine) -> dict[int, Undefined]:
    """The undefined values that shuffles gave, by their instruction."""
    return {}


def names_lanes(instruction: Instruction) -> bool:
    """Whether an instruction has its member mask in a register; it then starts a basic block."""
    return find(instruction.opcode).lanes == "mask" and not isinstance(instruction.operands[-1], Immediate)


def gathering(lowering: Lowering, first: int, last: int) -> Gathering | None:
    """The lanes that instructions first ... last - 1 wait for; None for no waiting."""
    inside = lowering.kernel.instructions[first:last]
    lanes = [find(instruction.opcode).lanes for instruction in inside]
    if "warpgroup" in lanes:
        return Gathering(128, None)
    if "warp" in lanes or any(kind and _names_all(inside[place]) for place, kind in enumerate(lanes)):
        return Gathering(32, None)
    if lanes[0] and names_lanes(inside[0]) and inside[0].guard is None:
        return Gathering(32, lowering.read(inside[0].operands[-1], "b32", inside[0]))
    return None


def _names_all(instruction: Instruction) -> bool:
    """Whether an instruction with a member mask names all lanes of a warp."""
    mask = instruction.operands[-1] if instruction.operands else None
    return isinstance(mask, Immediate) and mask.bits & FULL == FULL and instruction.guard is None


def absent(machine: Machine, gathering: Gathering, mask: Flags) -> Flags:
    """Threads of the mask that wait for others, which have neither arrived nor ended."""
    missing = machine.places.running() & ~mask
    if not missing.any():
        return np.zeros_like(mask)
    rows = missing.reshape(-1, 32)
    if gathering.members is not None:
        members = machine.spread(gathering.members(machine.registers)).reshape(-1, 32)
        waits: Flags = (members & _bits(rows)[:, None] != 0).reshape(-1)
        return waits & mask
    if gathering.threads > 32 and machine.block_threads % gathering.threads == 0:
        rows = missing.reshape(-1, gathering.threads)
    return np.repeat(rows.any(axis=1), rows.shape[1]) & mask


def checked(lowering: Lowering, instruction: Instruction, index: int, step: Step) -> Step:
    """The step of a warp instruction, with a report of masks that do not fit."""
    name, lanes = instruction.opcode.name, find(instruction.opcode).lanes
    if lanes == "warp":
        return _complete(index, step)
    if name == "selp" and lowering.shuffles:
        return _selecting(lowering, instruction, index, step)
    if name == "st" and lowering.shuffles and instruction.opcode.type in ("f32", "f64"):
        return _storing(lowering, instruction, index, step)
    if lanes != "mask":
        return step
    operands = lowering.flat(instruction.operands)
    read_members = lowering.read(operands[-1], "b32", instruction)
    reads = [lowering.read(operand, "b32", instruction) for operand in operands[-3:-1]] if name == "shfl" else []
    elects = name == "elect"

    def run(machine: Machine, mask: Mask) -> None:
        members = read_members(machine.registers)
        machine.unit(undefined_values).pop(index, None)
        if machine.observers and (members.ndim or members != FULL or not _in_whole_warps(mask)):
            at = _Lanes(machine, index, mask, members, elects)
            if not (at.own() or at.missing() or at.differing()) and reads:
                at.reading(*(read(machine.registers) for read in reads))
        machine.observers.converged(machine, mask)
        step(machine, mask)

    return run


def _in_whole_warps(mask: Mask) -> bool:
    """Whether all lanes of each warp are active, or none."""
    if mask is None:
        return True
    active = mask.reshape(-1, 32)
    return np.array_equal(np.any(active, axis=1), np.all(active, axis=1))


def _complete(index: int, step: Step) -> Step:
    """The step of an instruction that requires all lanes."""

    def run(machine: Machine, mask: Mask) -> None:
        if mask is not None and machine.observers:
            active = mask.reshape(-1, 32)
            threads = np.flatnonzero(active & ~active.all(axis=1, keepdims=True))
            if threads.size:
                name = machine.kernel.instructions[index].opcode.family
                warp = threads[0] // 32
                others = _others(machine, active)[warp]
                what = f"executes {name}, and {ranges(~active[warp])} of its warp do not: let all 32 lanes execute it, "
                what += "outside of branches" if others.any() else "in a block of whole warps"
                report_mismatch(machine, index, threads, what)
        machine.observers.converged(machine, mask)
        step(machine, mask)

    return run


def _others(machine: Machine, active: Flags) -> Flags:
    """Existing lanes that do not execute the instruction: (warps, 32)."""
    return exists(machine).reshape(-1, 32) & ~active


def exists(machine: Machine) -> Flags:
    """The threads that the blocks have, of those that fill their warps."""
    real: Flags = np.arange(machine.threads) % machine.block_threads < machine.launch.block_threads
    return real


class _Lanes:
    """The lanes that execute an instruction together, with their masks: (warps, 32)."""

    def __init__(self, machine: Machine, index: int, mask: Mask, members: Any, elects: bool) -> None:
        self._machine, self._index, self._elects = machine, index, elects
        self._active = np.ones((machine.warps, 32), bool) if mask is None else mask.reshape(-1, 32)
        self._members = machine.spread(members).reshape(-1, 32)
        opcode = machine.kernel.instructions[index].opcode
        self._name = _NAMES.get(" ".join((opcode.name, *opcode.modifiers[:2])), f"{opcode.name}.{opcode.modifiers[0]}")

    def _report(self, bad: Flags, what: str) -> bool:
        report_mismatch(self._machine, self._index, np.flatnonzero(bad), what)
        return True

    def _at(self, bad: Flags) -> tuple[int, int, str]:
        """The warp and lane of the first of these lanes, and the start of its message."""
        warp, lane = divmod(int(bad.reshape(-1).argmax()), 32)
        return warp, lane, f"executes {self._name} with mask {int(self._members[warp, lane]):#x}"

    def own(self) -> bool:
        """Report lanes that are not in their own mask."""
        bad = self._active & (self._members >> LANES.astype("u4") & 1 == 0)
        if not bad.any():
            return False
        _, lane, does = self._at(bad)
        what = f"{does}, which leaves out its own lane {lane}: the result is undefined; add the lane to the mask"
        return self._report(bad, f"{what}, or keep it from the call")

    def missing(self) -> bool:
        """Report lanes whose mask names existing lanes that do not execute the instruction."""
        machine = self._machine
        others = _others(machine, self._active)
        if self._elects:
            others &= machine.places.running().reshape(-1, 32)
        bad = self._active & (self._members & _bits(others)[:, None] != 0)
        if not bad.any():
            return False
        warp, lane, does = self._at(bad)
        lanes = ranges(others[warp] & (self._members[warp, lane] >> LANES.astype("u4") & 1 == 1))
        return self._report(bad, f"{does}, and {lanes} do not: they take another path or have ended; {WAY_OUT}")

    def differing(self) -> bool:
        """Report lanes whose mask names lanes with another mask."""
        if (self._members == self._members[:, :1]).all():
            return False
        names = self._members[:, :, None] >> LANES.astype("u4") & 1 == 1
        unlike = names & self._active[:, None, :] & (self._members[:, :, None] != self._members[:, None, :])
        bad = self._active & unlike.any(axis=2)
        if not bad.any():
            return False
        warp, lane, does = self._at(bad)
        other = int(unlike[warp, lane].argmax())
        what = f"{does}, and lane {other} with mask {int(self._members[warp, other]):#x}"
        return self._report(bad, f"{what}: all lanes that a mask names pass the same")

    def reading(self, b: Any, c: Any) -> bool:
        """Report lanes that use a value from a lane which does not execute the instruction."""
        machine = self._machine
        opcode = machine.kernel.instructions[self._index].opcode
        source, _ = sources(opcode.modifiers[1], *(machine.spread(operand).reshape(-1, 32) for operand in (b, c)))
        source = np.broadcast_to(source, self._active.shape)
        outside = self._members >> source.astype("u4") & 1 == 0
        bad = self._active & (outside | ~np.take_along_axis(self._active, source, axis=1))
        if not bad.any():
            return False
        warp, lane, does = self._at(bad)
        read = int(source[warp, lane])
        inside = warp * 32 % machine.block_threads + read < machine.launch.block_threads
        why = "its mask leaves out" if outside[warp, lane] else "does not execute it" if inside else "the block lacks"
        what = f"{does} and reads lane {read}, which {why}: the value is undefined; read a lane that executes it too"
        certain, selections = used(machine.kernel, self._index)
        if certain:
            return self._report(bad, what)
        machine.unit(undefined_values)[self._index] = Undefined(bad.reshape(-1), what, selections)
        self._spread(bad, what)
        return False

    def _spread(self, bad: Flags, message: str) -> None:
        """Remember the warps that read undefined values, for the stores of what is computed of them."""
        known = self._machine.unit(spread_values)
        old = known.get(self._index)
        warps: Flags = np.atleast_1d(bad.any(axis=1))
        if old is None:
            places = stores(self._machine.kernel, self._index)
            known[self._index] = Spread(np.flatnonzero(bad), warps, message, places)
        else:
            known[self._index] = replace(old, warps=old.warps | warps)


def _selecting(lowering: Lowering, instruction: Instruction, index: int, step: Step) -> Step:
    """The step of a selection, with a report of lanes that select an undefined value."""
    predicate = lowering.read(instruction.operands[3], "pred", instruction)

    def run(machine: Machine, mask: Mask) -> None:
        for shuffle, undefined in machine.unit(undefined_values).items():
            if index in undefined.selections:
                bad = undefined.lanes & (machine.spread(predicate(machine.registers)) == undefined.selections[index])
                threads = np.flatnonzero(bad if mask is None else bad & mask)
                report_mismatch(machine, shuffle, threads, undefined.message)
        step(machine, mask)

    return run


def _storing(lowering: Lowering, instruction: Instruction, index: int, step: Step) -> Step:
    """The step of a store of floats, with a report of warps that store a NaN after reading undefined values."""
    kind = instruction.opcode.type
    reads = [lowering.read(operand, kind, instruction) for operand in lowering.flat(instruction.operands[1:])]

    def run(machine: Machine, mask: Mask) -> None:
        spread = machine.unit(spread_values)
        for shuffle in [place for place, values in spread.items() if index in values.stores]:
            nan = np.zeros(machine.threads, bool)
            for read in reads:
                nan |= np.isnan(machine.spread(read(machine.registers)))
            bad = np.repeat(spread[shuffle].warps, 32) & nan
            if (bad if mask is None else bad & mask).any():
                values = spread.pop(shuffle)
                report_mismatch(machine, shuffle, values.threads, values.message)
        step(machine, mask)

    return run


def check_barrier(machine: Machine, index: int, mask: Mask, members: Any) -> None:
    """Report lanes that execute __syncwarp() with a mask that leaves them out."""
    if members.ndim == 0 and members == FULL:
        return
    lanes = np.arange(machine.threads, dtype="u4") % 32
    bad = machine.spread(members) >> lanes & 1 == 0
    threads = np.flatnonzero(bad if mask is None else bad & mask)
    if threads.size:
        first = int(threads[0])
        does = f"executes __syncwarp() with mask {int(machine.spread(members)[first]):#x}"
        what = f"{does}, which leaves out its own lane {first % 32}: the result is undefined; add the lane to the mask"
        report_mismatch(machine, index, threads, f"{what}, or keep it from the call")


def report_mismatch(machine: Machine, index: int, threads: Indices, message: str) -> None:
    """Report masks that do not fit, if there are any."""
    if len(threads):
        machine.observers.mismatched(machine, index, threads, message)


def _bits(lanes: Flags) -> NDArray[np.uint32]:
    """A mask of 32 bits for each warp."""
    return np.packbits(np.ascontiguousarray(lanes), axis=1, bitorder="little").view(np.uint32)[:, 0]


def ranges(lanes: Flags) -> str:
    """Lane numbers as text.

    >>> ranges(np.array([True, False, True, True, True]))
    'lanes 0, 2-4'
    """
    numbers = np.flatnonzero(lanes)
    starts = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in starts]
    return f"lane{'s' * (len(numbers) > 1)} {', '.join(parts)}"
