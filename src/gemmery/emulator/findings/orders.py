"""Which instructions order memory, and for which threads: atomics and fences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemmery.emulator.findings import pointers
from gemmery.emulator.findings.clocks import Flags
from gemmery.emulator.ptx import Kernel, Opcode

UPDATES = frozenset(("atom", "red"))
ATOMICALLY = frozenset(("relaxed", "acquire", "release", "acq_rel", "mmio"))  # modifiers of ld and st
RELEASES, ACQUIRES = frozenset(("release", "acq_rel")), frozenset(("acquire", "acq_rel"))
COUNTS = frozenset(("add", "inc", "dec"))
ELSEWHERE = frozenset(("proxy", "mbarrier_init"))  # fences for asynchronous units alone


def is_atomic(opcode: Opcode) -> bool:
    """An update, or a load or store with a memory order."""
    ordered = opcode.name in ("ld", "st") and not ATOMICALLY.isdisjoint(opcode.modifiers)
    return opcode.name in UPDATES or ordered


def is_count(opcode: Opcode) -> bool:
    """Whether it takes a ticket: an atomic that counts and returns the old value.

    PTX asks for a fence after it as well, before what others stored is read. Last blocks that sum up after a ticket and
    a barrier do without one, NVIDIA's threadFenceReduction sample among them: it is taken to acquire.
    """
    return opcode.name == "atom" and not COUNTS.isdisjoint(opcode.modifiers)


def is_fence(opcode: Opcode) -> bool:
    """Whether it is a fence between threads, and not only for asynchronous units."""
    return opcode.name == "membar" or (opcode.name == "fence" and not ELSEWHERE & set(opcode.modifiers))


def is_own(opcode: Opcode) -> bool:
    """Whether its scope is one block."""
    return "cta" in opcode.modifiers


@dataclass(frozen=True)
class Orders:
    """Properties of a kernel's instructions, by number."""

    atomic: Flags
    volatile: Flags
    own: Flags  # atomic with the scope of one block
    stores: Flags  # stores whose values are known
    fences: bool  # whether the kernel has a fence
    hands_over: bool  # whether threads may synchronize by global memory

    def pairs(self, index: int, others: np.ndarray, one_warp: Flags, one_block: Flags) -> Flags:
        """Pairs of accesses that do not race because both are atomic, or volatile and of different warps.

        PTX treats volatile accesses as relaxed. But volatile accesses of lanes of one warp rely on lock step. An atomic
        with the scope of a block is not atomic for other blocks.
        """
        either = (self.atomic | self.volatile)[others] & (self.atomic[index] | self.volatile[index])
        pairs: Flags = either & ~(self.volatile[others] & self.volatile[index] & one_warp)
        pairs &= one_block | ~(self.own[others] | self.own[index])
        return pairs


def orders(kernel: Kernel) -> Orders:
    """The orders of a kernel."""
    opcodes = [opcode.opcode for opcode in kernel.instructions]
    retried = pointers.retried(kernel)
    atomic = np.array([is_atomic(opcode) or index in retried for index, opcode in enumerate(opcodes)], np.bool_)
    volatile = np.array(["volatile" in opcode.modifiers for opcode in opcodes], np.bool_)
    own = np.array([is_atomic(opcode) and is_own(opcode) for opcode in opcodes], np.bool_)
    stores = np.array([opcode.name == "st" for opcode in opcodes], np.bool_)
    fences = any(map(is_fence, opcodes))
    ordered = [
        opcode
        for opcode, instruction in zip(opcodes, kernel.instructions, strict=True)
        if (is_atomic(opcode) or "volatile" in opcode.modifiers) and pointers.reached(instruction) is not None
    ]
    hands_over = bool(ordered) and (
        fences or any(not (RELEASES | ACQUIRES).isdisjoint(opcode.modifiers) for opcode in ordered)
    )
    return Orders(atomic, volatile, own, stores, fences, hands_over)
