"""Fences, and hints to caches and the scheduler, which change no value: prefetch, createpolicy, nanosleep.

PTX ISA 9.0, "Parallel Synchronization and Communication Instructions" and "Data Movement and Conversion Instructions".
Caches are not modelled, and lock step keeps the order.
"""

from __future__ import annotations

import re

import numpy as np

from gemmery.emulator.machine import Machine
from gemmery.emulator.modifiers import SCOPES
from gemmery.emulator.op import Mask
from gemmery.emulator.ptx import Instruction
from gemmery.emulator.steps import Handler, Lowering, Step, no_step

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
_ELSEWHERE = frozenset(("alias", "tensormap::generic", "mbarrier_init"))  # fences that are not for shared memory


def _policy(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """createpolicy: caches are not modelled, so every policy is 0."""
    write = lowering.write(instruction.operands[0], "b64", instruction)

    def step(machine: Machine, mask: Mask) -> None:
        write(machine.registers, mask, np.uint64(0))

    return step


def _fence(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """Fences, which do nothing here: lock step keeps the order. Observers are told of those for shared memory."""
    words = instruction.opcode.modifiers
    if not _ELSEWHERE.isdisjoint(words) or words == ("proxy", "async", "global"):
        return no_step(lowering, instruction, index)

    def step(machine: Machine, mask: Mask) -> None:
        for observer in machine.observers:
            observer.fenced(machine, index, mask)

    return step


_HINTS = ("prefetch", "prefetchu", "applypriority", "pmevent", "griddepcontrol")
TABLE = {
    "createpolicy": Handler(step=_policy, spelled=_POLICIES, effect=False),
    **{name: Handler(step=no_step, spelled=_WITHOUT_EFFECT) for name in _HINTS},
    "nanosleep": Handler(step=no_step, spelled=_WITHOUT_EFFECT, writes=False),
    "membar": Handler(step=_fence, spelled=_FENCES, orders=True),
    "fence": Handler(step=_fence, spelled=_FENCES, orders=True),
}
