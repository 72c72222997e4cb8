"""Branches, ends of threads and barriers, which the machine itself executes; fences, and hints that change no value.

PTX ISA 9.0, "Control Flow Instructions", "bar", "barrier", "bar.warp.sync", "membar/fence", "prefetch", "createpolicy",
"nanosleep". Caches are not modeled, and lock step keeps the order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from gemmery_emulator.machine import Machine
from gemmery_emulator.op import SCOPES, STORED, Mask, Traits
from gemmery_emulator.ptx import Immediate, Instruction, Register
from gemmery_emulator.steps import Handler, Lowering, Read, Step, Write, drop, lane_step, no_step, refused

WARP_SYNC = "bar.warp.sync"
WHOLE_WARP = -1  # the barrier number that observers receive for bar.warp.sync


@dataclass(frozen=True, kw_only=True)
class End(Traits):
    """An instruction that ends a basic block."""

    way: str  # "branch", "switch", "exit", "trap", "barrier"
    writes: bool = False
    orders: bool = True


@dataclass(frozen=True, kw_only=True)
class Barrier(End):
    """A barrier of a block or a warp; after a result there are its number, a count of threads, and a predicate."""

    way: str = "barrier"
    operands: tuple[int, ...]  # how many it may have
    arrives: bool = False  # whether threads go on at once
    reduction: tuple[str, str] = ("", "")  # how predicates are combined: "popc", "and", "or"; the type of the result


def _barriers() -> dict[str, Barrier]:
    # "bar" is always aligned and has no modifier for it.
    forms = [f"{name}.{{}}{how}" for name in ("barrier", "barrier.cta") for how in ("", ".aligned")]
    table = {WARP_SYNC: Barrier(kind="bar.warp", operands=(1,))}
    for form in ("bar.{}", "bar.cta.{}", *forms):
        table[form.format("sync")] = Barrier(kind="bar", operands=(1, 2))
        table[form.format("arrive")] = Barrier(kind="bar", operands=(2,), arrives=True)
        for way, kind in (("popc", "u32"), ("and", "pred"), ("or", "pred")):
            spelling = f"{form.format(f'red.{way}')}.{kind}"
            table[spelling] = Barrier(kind="bar", operands=(3, 4), reduction=(way, kind), writes=True)
    return table


@dataclass(frozen=True)
class Reduction:
    """What bar.red combines of the threads of a block."""

    way: str  # "popc", "and", "or"
    predicate: Read
    write: Write


@dataclass(frozen=True)
class LoweredBarrier:
    """A barrier of a kernel, with its operands as functions of the registers."""

    arrives: bool  # whether threads go on at once
    number: Read | None  # None for that of a warp
    count: Read | None  # of threads; None for all of the block
    members: Read | None  # the lanes that __syncwarp() names; None for a barrier of a block
    reduction: Reduction | None


def lowered_barrier(lowering: Lowering, instruction: Instruction, barrier: Barrier) -> LoweredBarrier:
    """Return a barrier for the machine; refuse it if its operands are wrong in number or kind."""
    if len(instruction.operands) not in barrier.operands:
        raise refused(instruction)
    (way, kind), reduction, operands = barrier.reduction, None, list(instruction.operands)
    if way:
        result, *operands, predicate = operands
        write = lowering.write(result, kind, instruction)
        if write is drop:
            raise refused(instruction)
        reduction = Reduction(way, lowering.read(predicate, "pred", instruction), write)
    for operand in operands:  # the barrier's number or the members of a warp, and a count of threads
        if not (isinstance(operand, Immediate) or (isinstance(operand, Register) and STORED.get(operand.type) == "u4")):
            raise refused(instruction)
    first, *count = (lowering.read(operand, "u32", instruction) for operand in operands)
    if instruction.opcode.spelling == WARP_SYNC:
        return LoweredBarrier(False, None, None, first, None)
    return LoweredBarrier(barrier.arrives, first, count[0] if count else None, None, reduction)


def leaving(machine: Machine, index: int, barrier: int, mask: Mask) -> Mask:
    """The threads that a barrier has let go, and those of their blocks that have ended: it does not wait for them."""
    instruction = machine.kernel.instructions[index]
    if mask is None or barrier < 0 or len(instruction.operands) != min(BARRIERS[instruction.opcode.spelling].operands):
        return mask
    blocks = mask.reshape(machine.blocks, -1).any(axis=1)
    return mask | ~machine.places.running() & np.repeat(blocks, machine.block_threads)


_EVICTED = r"\.L2::evict_(?:last|normal|first|unchanged)"
_ORDERED_IN = rf"\.(?:{'|'.join(SCOPES)})"
_POLICIES = re.compile(
    rf"createpolicy\.(?:fractional{_EVICTED}|range(?:\.global)?{_EVICTED})(?:\.L2::evict_(?:first|unchanged))?\.b64"
    r"|createpolicy\.cvt\.L2\.b64"
)
_WITHOUT_EFFECT = re.compile(
    r"prefetch(?:\.global|\.local)?\.L[12]|prefetch\.global\.L2::evict_(?:last|normal)|prefetchu\.L1"
    r"|prefetch(?:\.const|\.param)?\.tensormap|applypriority(?:\.global)?\.L2::evict_normal"
    r"|griddepcontrol\.(?:launch_dependents|wait)|nanosleep\.u32|pmevent(?:\.mask)?"
)
_FENCES = re.compile(
    rf"membar\.(?:cta|gl|sys)|fence(?:\.(?:sc|acq_rel|acquire|release))?{_ORDERED_IN}"
    r"|fence\.mbarrier_init\.release\.cluster"
    r"|fence\.proxy\.alias|fence\.proxy\.async(?:\.global|\.shared::cta|\.shared::cluster)?"
    rf"|fence\.proxy\.tensormap::generic\.(?:acquire|release){_ORDERED_IN}"
    r"|fence(?:\.proxy\.async::generic)?"
    r"\.(?:acquire\.sync_restrict::shared::cluster|release\.sync_restrict::shared::cta)\.cluster"
)
_ELSEWHERE = frozenset(("alias", "tensormap::generic", "mbarrier_init"))  # fences for neither global nor shared memory


def _policy(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """createpolicy: caches are not modeled, so every policy is 0."""
    write = lowering.write(instruction.operands[0], "b64", instruction)
    return lane_step(lambda: np.uint64(0), [], [write])


def _fence(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """Fences, which do nothing here: lock step keeps the order. Observers are told of them."""
    if not _ELSEWHERE.isdisjoint(instruction.opcode.modifiers):
        return no_step(lowering, instruction, index)

    def step(machine: Machine, mask: Mask) -> None:
        machine.observers.fenced(machine, index, mask)

    return step


_HINTS = ("prefetch", "prefetchu", "applypriority", "pmevent", "griddepcontrol")
BARRIERS = _barriers()
TABLE: dict[str, Traits] = {
    "bra": End(way="branch"),
    "brx": End(way="switch"),
    "ret": End(way="exit"),
    "exit": End(way="exit", kind="ret"),
    "trap": End(way="trap"),
    **BARRIERS,
    "createpolicy": Handler(step=_policy, spelled=_POLICIES, effect=False),
    **{name: Handler(step=no_step, spelled=_WITHOUT_EFFECT) for name in _HINTS},
    "nanosleep": Handler(step=no_step, spelled=_WITHOUT_EFFECT, writes=False),
    "membar": Handler(step=_fence, spelled=_FENCES, orders=True),
    "fence": Handler(step=_fence, spelled=_FENCES, orders=True),
}
