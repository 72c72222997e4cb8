"""Convergence: the lanes that an instruction of a warp or warpgroup waits for, and masks that do not fit.

PTX ISA 9.0, "shfl.sync", "vote.sync", "match.sync", "redux.sync", "elect.sync": a lane waits for those that its mask
names, as long as they have not ended. They have to execute the same instruction with the same mask, and the lane itself
is one of them. Instructions of matrices, which are .aligned, take all lanes of the warp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
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


class Shuffled:
    """Undefined values that shuffles gave, and to the end of the launch the shuffles of them, by their instruction."""

    def __init__(self, machine: Machine) -> None:
        self.undefined: dict[int, Undefined] = {}
        self.spread: dict[int, Spread] = {}


def names_lanes(instruction: Instruction) -> bool:
    """Whether an instruction has its member mask in a register; it then starts a basic block."""
    return find(instruction.opcode).lanes == "mask" and not isinstance(instruction.operands[-1], Immediate)


def gathering(lowering: Lowering, first: int, last: int) -> Gathering | None:
    """The lanes that instructions first ... last - 1 wait for; None for no waiting."""
    inside = lowering.kernel.instructions[first:last]
    lanes = [find(instruction.opcode).lanes for instruction in inside]
    if "warpgroup" in lanes:
        return Gathering(128, None)
    for kind, instruction in zip(lanes, inside, strict=True):
        mask = instruction.operands[-1] if kind == "mask" else None
        every = isinstance(mask, Immediate) and mask.bits & FULL == FULL and instruction.guard is None
        if kind == "warp" or every:
            return Gathering(32, None)
    if lanes[0] and names_lanes(inside[0]) and inside[0].guard is None:
        return Gathering(32, lowering.read(inside[0].operands[-1], "b32", inside[0]))
    return None


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
        return partial(_complete, index, step)
    if name == "selp" and lowering.shuffles:
        return partial(_select, lowering.read(instruction.operands[3], "pred", instruction), index, step)
    if name == "st" and lowering.shuffles and instruction.opcode.type in ("f32", "f64"):
        kind, values = instruction.opcode.type, lowering.flat(instruction.operands[1:])
        return partial(_store, [lowering.read(value, kind, instruction) for value in values], index, step)
    if lanes != "mask":
        return step
    operands = lowering.flat(instruction.operands)
    read_members = lowering.read(operands[-1], "b32", instruction)
    reads = [lowering.read(operand, "b32", instruction) for operand in operands[-3:-1]] if name == "shfl" else []

    def run(machine: Machine, mask: Mask) -> None:
        members = read_members(machine.registers)
        machine.unit(Shuffled).undefined.pop(index, None)
        rows = None if mask is None else mask.reshape(-1, 32)
        partly = rows is not None and np.count_nonzero(rows.any(axis=1) != rows.all(axis=1))
        if machine.observers and (partly or members.ndim or members != FULL):
            mistake = _mistake(machine, index, mask, members, [read(machine.registers) for read in reads])
            if mistake is not None:
                report_mismatch(machine, index, np.flatnonzero(mistake[0]), mistake[1])
        machine.observers.converged(machine, mask)
        step(machine, mask)

    return run


def _complete(index: int, step: Step, machine: Machine, mask: Mask) -> None:
    """Execute an instruction that requires all lanes."""
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


def _others(machine: Machine, active: Flags) -> Flags:
    """Existing lanes that do not execute the instruction: (warps, 32)."""
    return exists(machine).reshape(-1, 32) & ~active


def exists(machine: Machine) -> Flags:
    """The threads that the blocks have, of those that fill their warps."""
    real: Flags = np.arange(machine.threads) % machine.block_threads < machine.launch.block_threads
    return real


def _mistake(
    machine: Machine, index: int, mask: Mask, members: Any, operands: Sequence[Any]
) -> tuple[Flags, str] | None:
    """The lanes (warps, 32) that execute an instruction with a mask that does not fit, and what is wrong with it.

    `operands` are those that tell the lane that a shuffle reads.
    """
    opcode = machine.kernel.instructions[index].opcode
    active = np.ones((machine.warps, 32), bool) if mask is None else mask.reshape(-1, 32)
    masks, lanes = machine.spread(members).reshape(-1, 32), LANES.astype("u4")
    called = _NAMES.get(" ".join((opcode.name, *opcode.modifiers[:2])), f"{opcode.name}.{opcode.modifiers[0]}")

    def first(bad: Flags) -> tuple[int, int, str]:
        """The warp and lane of the first of these lanes, and the start of its message."""
        warp, lane = divmod(int(bad.reshape(-1).argmax()), 32)
        return warp, lane, f"executes {called} with mask {int(masks[warp, lane]):#x}"

    bad = active & (masks >> lanes & 1 == 0)
    if bad.any():
        _, lane, does = first(bad)
        what = f"{does}, which leaves out its own lane {lane}: the result is undefined; add the lane to the mask"
        return bad, f"{what}, or keep it from the call"
    others = _others(machine, active)
    if opcode.name == "elect":
        others &= machine.places.running().reshape(-1, 32)
    bad = active & (masks & _bits(others)[:, None] != 0)
    if bad.any():
        warp, lane, does = first(bad)
        missing = ranges(others[warp] & (masks[warp, lane] >> lanes & 1 == 1))
        return bad, f"{does}, and {missing} do not: they take another path or have ended; {WAY_OUT}"
    if (masks != masks[:, :1]).any():
        names = masks[:, :, None] >> lanes & 1 == 1
        unlike = names & active[:, None, :] & (masks[:, :, None] != masks[:, None, :])
        bad = active & unlike.any(axis=2)
        if bad.any():
            warp, lane, does = first(bad)
            other = int(unlike[warp, lane].argmax())
            what = f"{does}, and lane {other} with mask {int(masks[warp, other]):#x}"
            return bad, f"{what}: all lanes that a mask names pass the same"
    if not operands:
        return None
    source, _ = sources(opcode.modifiers[1], *(machine.spread(operand).reshape(-1, 32) for operand in operands))
    source = np.broadcast_to(source, active.shape)
    outside = masks >> source.astype("u4") & 1 == 0
    bad = active & (outside | ~np.take_along_axis(active, source, axis=1))
    if not bad.any():
        return None
    warp, lane, does = first(bad)
    read = int(source[warp, lane])
    inside = warp * 32 % machine.block_threads + read < machine.launch.block_threads
    why = "its mask leaves out" if outside[warp, lane] else "does not execute it" if inside else "the block lacks"
    what = f"{does} and reads lane {read}, which {why}: the value is undefined; read a lane that executes it too"
    certain, selections = used(machine.kernel, index)
    if certain:
        return bad, what
    machine.unit(Shuffled).undefined[index] = Undefined(bad.reshape(-1), what, selections)
    # Remember the warps that read undefined values, for the stores of what is computed of them.
    known, warps = machine.unit(Shuffled).spread, np.atleast_1d(bad.any(axis=1))
    if index in known:
        known[index] = replace(known[index], warps=known[index].warps | warps)
    else:
        known[index] = Spread(np.flatnonzero(bad), warps, what, stores(machine.kernel, index))
    return None


def _select(predicate: Read, index: int, step: Step, machine: Machine, mask: Mask) -> None:
    """Execute a selection, and report lanes that select an undefined value."""
    for shuffle, undefined in machine.unit(Shuffled).undefined.items():
        if index in undefined.selections:
            bad = undefined.lanes & (machine.spread(predicate(machine.registers)) == undefined.selections[index])
            threads = np.flatnonzero(bad if mask is None else bad & mask)
            report_mismatch(machine, shuffle, threads, undefined.message)
    step(machine, mask)


def _store(reads: Sequence[Read], index: int, step: Step, machine: Machine, mask: Mask) -> None:
    """Execute a store of floats, and report warps that store a NaN after reading undefined values."""
    spread = machine.unit(Shuffled).spread
    for shuffle in [place for place, values in spread.items() if index in values.stores]:
        nan = np.zeros(machine.threads, bool)
        for read in reads:
            nan |= np.isnan(machine.spread(read(machine.registers)))
        bad = np.repeat(spread[shuffle].warps, 32) & nan
        if (bad if mask is None else bad & mask).any():
            values = spread.pop(shuffle)
            report_mismatch(machine, shuffle, values.threads, values.message)
    step(machine, mask)


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
