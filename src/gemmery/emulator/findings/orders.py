"""Which instructions order memory, and for which threads: atomics and fences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gemmery.emulator.findings import pointers
from gemmery.emulator.op import Flags
from gemmery.emulator.ptx import Opcode, PtxKernel

UPDATES = frozenset(("atom", "red"))
ATOMICALLY = frozenset(("relaxed", "acquire", "release", "acq_rel", "mmio"))  # modifiers of ld and st
RELEASES, ACQUIRES = frozenset(("release", "acq_rel")), frozenset(("acquire", "acq_rel"))
OWN_SCOPES = frozenset(("cta", "cluster"))
CLUSTER = frozenset(("cluster", "shared::cluster", "multicast::cluster"))  # what blocks of a cluster share
COUNTS = frozenset(("add", "inc", "dec"))
ELSEWHERE = frozenset(("proxy", "mbarrier_init"))  # fences for asynchronous units alone


def is_atomic(opcode: Opcode) -> bool:
    """An update, or a load or store with a memory order."""
    ordered = opcode.name in ("ld", "st") and not ATOMICALLY.isdisjoint(opcode.modifiers)
    return opcode.name in UPDATES or ordered


def is_ticket(opcode: Opcode) -> bool:
    """Whether it takes a ticket: an atomic that counts and returns the old value.

    PTX asks for a fence after it as well, before what others stored is read. Last blocks that sum up after a ticket and
    a barrier do without one, NVIDIA's threadFenceReduction sample among them: it is taken to acquire.
    """
    return opcode.name == "atom" and not COUNTS.isdisjoint(opcode.modifiers)


def is_fence(opcode: Opcode) -> bool:
    """Whether it is a fence between threads, and not only for asynchronous units."""
    return opcode.name == "membar" or (opcode.name == "fence" and ELSEWHERE.isdisjoint(opcode.modifiers))


@dataclass(frozen=True)
class Orders:
    """Properties of a kernel's instructions, by number."""

    atomic: Flags
    volatile: Flags
    own: Flags  # atomics and fences with the scope of one block or cluster
    stores: Flags  # stores whose values are known
    fence: Flags  # between threads
    releases: Flags
    acquires: Flags
    tickets: Flags
    with_fences: Flags  # atomic or volatile accesses of a kernel that has fences
    hands_over: bool  # whether threads may synchronize by global memory
    meets: bool  # whether blocks of a cluster may order each other by more than atomics that all blocks see
    products: bool  # whether there are products of warpgroups
    bulk_groups: bool  # whether there are bulk copies out of shared memory
    operations: Flags  # of tensor memory: tcgen05.mma and tcgen05.cp
    tensor_memory: bool  # whether there is any

    def pairs(self, index: int, others: np.ndarray, one_warp: Flags, one_block: Flags) -> Flags:
        """Pairs of accesses that do not race because both are atomic, or volatile and of different warps.

        PTX treats volatile accesses as relaxed. But volatile accesses of lanes of one warp rely on lock step. An atomic
        with the scope of a block is not atomic for other blocks.
        """
        either = (self.atomic | self.volatile)[others] & (self.atomic[index] | self.volatile[index])
        pairs: Flags = either & ~(self.volatile[others] & self.volatile[index] & one_warp)
        pairs &= one_block | ~(self.own[others] | self.own[index])
        return pairs


@lru_cache(maxsize=64)
def orders(kernel: PtxKernel) -> Orders:
    """The orders of a kernel."""
    opcodes = [instruction.opcode for instruction in kernel.instructions]
    retried = pointers.retried(kernel)
    updates = _flags(map(is_atomic, opcodes))
    adds = _flags(opcode.name.startswith("cp.reduce.async.bulk") for opcode in opcodes)
    atomic = updates | adds | _flags(index in retried for index in range(len(opcodes)))
    volatile = _flags("volatile" in opcode.modifiers for opcode in opcodes)
    releases, acquires = (
        _flags(not order.isdisjoint(opcode.modifiers) for opcode in opcodes) for order in (RELEASES, ACQUIRES)
    )
    fence = _flags(map(is_fence, opcodes))
    reaches = _flags(pointers.reached(instruction) is not None for instruction in kernel.instructions)
    ordered = (updates | volatile) & reaches
    return Orders(
        atomic,
        volatile,
        _flags(not OWN_SCOPES.isdisjoint(opcode.modifiers) for opcode in opcodes) & (updates | fence),
        _flags(opcode.name == "st" for opcode in opcodes),
        fence,
        releases,
        acquires,
        _flags(map(is_ticket, opcodes)),
        (atomic | volatile) & fence.any(),
        bool((ordered & (fence.any() | releases | acquires)).any()),
        any(opcode.family == "mapa" or opcode.name.startswith("barrier.cluster") for opcode in opcodes)
        or any(not CLUSTER.isdisjoint(opcode.modifiers) for opcode in opcodes),
        any(opcode.name == "wgmma.mma_async" for opcode in opcodes),
        any("bulk_group" in opcode.modifiers for opcode in opcodes),
        _flags(opcode.name in ("tcgen05.mma", "tcgen05.cp") for opcode in opcodes),
        any(opcode.family == "tcgen05" for opcode in opcodes),
    )


def _flags(values: Iterable[bool]) -> Flags:
    return np.array(list(values), np.bool_)
