"""Which instructions order memory, and for which threads; and the vector clocks of warps.

The clocks tell which accesses each warp has seen, through barriers, mbarriers, atomics and fences. A warp's clock
counts the times at which it has passed something on. __syncwarp() and barriers order the lanes of a warp; lock step
does not, which PTX has not guaranteed since sm_70.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.banks import WARP
from gemmery_emulator.findings import pointers
from gemmery_emulator.findings.handover import Publishing
from gemmery_emulator.machine import Machine
from gemmery_emulator.op import Flags, Mask
from gemmery_emulator.ptx import Opcode, PtxKernel

UPDATES = frozenset(("atom", "red", "red.async"))
ATOMICALLY = frozenset(("relaxed", "acquire", "release", "acq_rel", "mmio"))  # modifiers of ld and st
RELEASES, ACQUIRES = frozenset(("release", "acq_rel")), frozenset(("acquire", "acq_rel"))
OWN_SCOPES = frozenset(("cta", "cluster"))
CLUSTER = frozenset(("cluster", "shared::cluster", "multicast::cluster"))  # what blocks of a cluster share
COUNTS = frozenset(("add", "inc", "dec"))
ELSEWHERE = frozenset(("proxy", "mbarrier_init"))  # fences for asynchronous units alone
SPACES = ("shared", "global")  # whose accesses asynchronous units see after a fence.proxy.async


def is_fence(opcode: Opcode) -> bool:
    """Whether it is a fence between threads, and not only for asynchronous units."""
    return opcode.name == "membar" or (opcode.name == "fence" and ELSEWHERE.isdisjoint(opcode.modifiers))


def proxied(opcode: Opcode) -> tuple[str, ...]:
    """The spaces of a fence.proxy.async; none of another instruction."""
    words = opcode.modifiers
    if opcode.name != "fence" or "proxy" not in words:
        return ()
    return SPACES if words == ("proxy", "async") else SPACES[1:] if words[-1] == "global" else SPACES[:1]


class Orders:
    """Properties of a kernel's instructions, by number."""

    def __init__(self, kernel: PtxKernel) -> None:
        opcodes = [instruction.opcode for instruction in kernel.instructions]
        retried = pointers.retried(kernel)
        ordered = (opcode.name in ("ld", "st") and not ATOMICALLY.isdisjoint(opcode.modifiers) for opcode in opcodes)
        updates = _flags(opcode.name in UPDATES for opcode in opcodes) | _flags(ordered)
        adds = _flags(opcode.name.startswith("cp.reduce.async.bulk") for opcode in opcodes)
        self.atomic = updates | adds | _flags(index in retried for index in range(len(opcodes)))
        self.volatile = _flags("volatile" in opcode.modifiers for opcode in opcodes)
        self.fence = _flags(map(is_fence, opcodes))  # between threads
        self.proxied = [proxied(opcode) for opcode in opcodes]
        # Atomics and fences with the scope of one block or cluster.
        self.own = _flags(not OWN_SCOPES.isdisjoint(opcode.modifiers) for opcode in opcodes) & (updates | self.fence)
        self.stores = _flags(opcode.name == "st" for opcode in opcodes)  # whose values are known
        self.releases, self.acquires = (
            _flags(not order.isdisjoint(opcode.modifiers) for opcode in opcodes) for order in (RELEASES, ACQUIRES)
        )
        # Tickets: atomics that count and return the old value. PTX asks for a fence after one as well, before what
        # others stored is read. Last blocks that sum up after a ticket and a barrier do without it, NVIDIA's
        # threadFenceReduction sample among them: a ticket is taken to acquire.
        self.tickets = _flags(opcode.name == "atom" and not COUNTS.isdisjoint(opcode.modifiers) for opcode in opcodes)
        # Atomic or volatile accesses of a kernel that has fences.
        self.with_fences = (self.atomic | self.volatile) & self.fence.any()
        reaches = _flags(pointers.reached(instruction) is not None for instruction in kernel.instructions)
        orders = self.fence.any() | self.releases | self.acquires
        # Whether threads may synchronize by global memory.
        self.hands_over = bool(((updates | self.volatile) & reaches & orders).any())
        # Whether some lanes may publish what others have written: by atomics or mbarriers.
        published = ((updates | self.volatile) & (self.fence.any() | self.releases)).any()
        self.publishes = bool(published) or any(opcode.family == "mbarrier" for opcode in opcodes)
        # Whether blocks of a cluster may order each other by more than atomics that all blocks see.
        self.meets = any(
            opcode.family == "mapa"
            or opcode.name.startswith("barrier.cluster")
            or not CLUSTER.isdisjoint(opcode.modifiers)
            for opcode in opcodes
        )
        self.products = any(opcode.name == "wgmma.mma_async" for opcode in opcodes)  # of warpgroups
        self.bulk_groups = any("bulk_group" in opcode.modifiers for opcode in opcodes)  # copies out of shared memory
        self.operations = _flags(opcode.name in ("tcgen05.mma", "tcgen05.cp") for opcode in opcodes)
        self.tensor_memory = any(opcode.family == "tcgen05" for opcode in opcodes)

    def pairs(self, index: int, others: np.ndarray, one_warp: Flags, one_block: Flags) -> Flags:
        """Pairs of accesses that do not race because both are atomic, or volatile and of different warps.

        PTX treats volatile accesses as relaxed. But volatile accesses of lanes of one warp rely on lock step. An atomic
        with the scope of a block is not atomic for other blocks.
        """
        either = (self.atomic | self.volatile)[others] & (self.atomic[index] | self.volatile[index])
        pairs: Flags = either & ~(self.volatile[others] & self.volatile[index] & one_warp)
        pairs &= one_block | ~(self.own[others] | self.own[index])
        return pairs


orders = lru_cache(maxsize=64)(Orders)  # of a kernel


def _flags(values: Iterable[bool]) -> Flags:
    return np.array(list(values), np.bool_)


Words = NDArray[np.int64]


class Clocks:
    """The clocks of the warps of some blocks: `clock` (blocks, warps), and `known` (blocks, warps, others).

    `known` is the latest clock of every warp of the block that each warp has seen.
    """

    def __init__(self, blocks: int, warps: int) -> None:
        self.blocks = blocks
        self.clock = np.ones((blocks, warps), np.int64)
        self.known = np.zeros((blocks, warps, warps), np.int64)
        self.publishing = Publishing(blocks, warps)
        self.ticks = 0  # how often a clock or what is known has changed
        # The latest clock of each lane that a fence.proxy.async has seen, for each of SPACES: (blocks, warps, lanes).
        self.fenced = {space: np.zeros((blocks, warps, WARP), np.int64) for space in SPACES}
        self._released: dict[Any, Words] = {}  # by key: (blocks, warps)
        # The latest clock at which each lane has met each other one of its warp while others stayed away:
        # (blocks, warps, lanes, others); None until some lanes of a warp meet.
        self.lanes: Words | None = None
        # For each warp: the clocks known at its last fence, and those that its atomics have received since.
        self._at_fence, self._received = np.zeros((2, blocks, warps, warps), np.int64)

    def warps_of(self, threads: Words) -> Flags:
        """The warps of these threads, numbered through the blocks: (blocks, warps)."""
        warps: Flags = np.zeros(self.clock.shape, np.bool_)
        warps.reshape(-1)[threads // WARP] = True
        return warps

    def vouched(self) -> Words:
        """`known` with each warp's own clock: what a release passes on."""
        own = np.eye(self.clock.shape[1], dtype=np.int64)
        vouched: Words = np.maximum(self.known, self.clock[:, :, None] * own)
        return vouched

    def spread(self, blocks: int) -> None:
        """Follow each block from now on, and not one for all."""
        self.blocks = blocks
        lanes = self.publishing
        lanes.waited, lanes.wrote = np.tile([lanes.waited, lanes.wrote], (blocks, 1, 1))
        self.clock = np.tile(self.clock, (blocks, 1))
        self.fenced = {space: np.tile(clocks, (blocks, 1, 1)) for space, clocks in self.fenced.items()}
        self.known, self._at_fence, self._received = (
            np.tile(clocks, (blocks, 1, 1)) for clocks in (self.known, self._at_fence, self._received)
        )
        self._released = {key: np.tile(clocks, (blocks, 1)) for key, clocks in self._released.items()}
        self.lanes = None if self.lanes is None else np.tile(self.lanes, (blocks, 1, 1, 1))
        self.ticks += 1

    def meets(self, warps: Flags) -> None:
        """Warps (blocks, warps) meet at a barrier: each has seen everything that any of them had."""
        self.publishing.meet(warps, self.clock)
        if warps.all():
            self.known[:] = self.clock[:, None, :]
        else:
            self.known = np.where(warps[:, :, None], self._together(warps)[:, None, :], self.known)
        self._advance(warps)

    def meets_itself(self, warps: Flags) -> None:
        """The lanes of each of these warps meet: __syncwarp()."""
        block, warp = np.nonzero(warps)
        self.known[block, warp, warp] = self.clock[block, warp]
        self._advance(warps)

    def lanes_meet(self, lanes: Flags) -> None:
        """Some lanes (blocks, warps, 32) of each warp meet: __syncwarp() with a mask of these."""
        self.publishing.meet(lanes, self.clock)
        if self.lanes is None:
            self.lanes = np.zeros((*lanes.shape, lanes.shape[-1]), np.int64)
        latest = np.where(lanes[..., None], self.lanes, 0).max(axis=2)
        latest = np.maximum(latest, np.where(lanes, self.clock[..., None], 0))
        self.lanes = np.where(lanes[..., None], latest[:, :, None, :], self.lanes)
        warps: Flags = np.any(lanes, axis=2)
        self._advance(warps)

    def lanes_have_met(self, threads: Words, others: Words, clocks: Words) -> Flags:
        """Whether lanes have met others of their warp since they accessed something at these clocks.

        `threads` are numbered through the blocks, `others` in their block.
        """
        assert self.lanes is not None
        warps = self.lanes.reshape(-1, *self.lanes.shape[2:])
        since: Flags = warps[threads >> 5, threads & 31, others & 31] >= clocks
        since &= (threads >> 5) % self.clock.shape[1] == others >> 5
        return since

    def converge(self, lanes: Flags) -> None:
        """Lanes (blocks, warps, 32) wait for each other at a shuffle or the like: it orders no memory by itself."""
        late: Flags = np.any((self.publishing.wrote > self.publishing.waited) & lanes, axis=2)
        if late.any():
            self.publishing.meet(lanes, self.clock)
            self.has_released(late)

    def fences(self, lanes: Flags, spaces: Sequence[str]) -> None:
        """Asynchronous units see what these lanes (blocks, warps, 32) have seen of some spaces: fence.proxy.async.

        It orders a thread's own accesses alone: lanes do not see each other's by it, as they do by __syncwarp().
        """
        warps: Flags = np.any(lanes, axis=2)
        known = np.where(warps[:, :, None], self.known, 0).max(axis=1)
        latest = np.maximum(known[..., None], np.where(lanes, self.clock[..., None], 0))
        if self.lanes is not None:
            latest = np.maximum(latest, np.where(lanes[..., None], self.lanes, 0).max(axis=2))
        for space in spaces:
            self.fenced[space] = np.maximum(self.fenced[space], latest)
        self._advance(warps)

    def release(self, warps: Flags, key: Any) -> None:
        """Warps that later acquire the key in the same block see what these warps did, as with an mbarrier."""
        self._pass_on(key, self._together(warps))
        self.meets_itself(warps)

    def acquire(self, warps: Flags, key: Any) -> None:
        """These warps see what was released to the key."""
        if (released := self._released.get(key)) is not None:
            self.known = np.where(warps[:, :, None], np.maximum(self.known, released[:, None, :]), self.known)
            self.ticks += 1

    def orders(self, warps: Flags) -> None:
        """A fence between threads: earlier atomics acquire, later ones release, for each warp."""
        some = warps[:, :, None]
        self.known = np.where(some, np.maximum(self.known, self._received), self.known)
        self._at_fence = np.where(some, self.vouched(), self._at_fence)
        self._advance(warps)

    def publish(self, warps: Flags, key: Any, at_fence: bool) -> None:
        """These warps write atomically and pass on what they did, or what they did before their last fence."""
        if at_fence:
            self._pass_on(key, np.where(warps[:, :, None], self._at_fence, 0).max(axis=1))
        else:
            self._pass_on(key, self._together(warps))
            self._advance(warps)

    def lanes_publish(self, index: int, threads: Words, at_fence: bool = False) -> None:
        """These threads are about to `publish` or `release`, by this instruction."""
        if self.publishing.matters():
            clocks = self._at_fence.diagonal(axis1=1, axis2=2) if at_fence else self.clock
            self.publishing.publish(index, threads, clocks.reshape(-1))

    def has_released(self, warps: Flags) -> None:
        """What these warps (blocks, warps) do from now on is not part of what they have released to other blocks."""
        any_block: Flags = np.any(warps, axis=0, keepdims=True)  # where one block stands for all
        self._advance(warps if len(warps) == len(self.clock) else any_block)

    def receive(self, warps: Flags, key: Any) -> None:
        """These warps read atomically: after their next fence they see what was released to the key."""
        if (released := self._released.get(key)) is not None:
            received = np.maximum(self._received, released[:, None, :])
            self._received = np.where(warps[:, :, None], received, self._received)

    def _pass_on(self, key: Any, clocks: Words) -> None:
        self._released[key] = np.maximum(self._released.get(key, 0), clocks)

    def _together(self, warps: Flags) -> Words:
        """The latest clocks that any of these warps has seen, its own included: (blocks, warps)."""
        known = np.where(warps[:, :, None], self.known, 0).max(axis=1)
        together: Words = np.maximum(known, np.where(warps, self.clock, 0))
        return together

    def _advance(self, warps: Flags) -> None:
        self.clock += warps
        self.ticks += 1


class Followed:
    """The blocks of a chunk that are followed; `alike` is the number of blocks that each of them stands for."""

    def __init__(self, machine: Machine, clocks: Clocks, *spreads: Callable[[int], None]) -> None:
        self.alike = machine.blocks
        self.clocks, self.spreads = clocks, list(spreads)  # of the histories of accesses
        self._every = np.arange(machine.threads)
        self._threads, self._block_threads = machine.threads, machine.block_threads

    def warps(self, mask: Mask) -> Flags:
        """The warps of a mask: (blocks, warps)."""
        if mask is None:
            return np.ones(self.clocks.clock.shape, np.bool_)
        warps: Flags = np.any(self.lanes(mask), axis=2)
        return warps

    def lanes(self, mask: Mask) -> Flags:
        """The lanes of a mask: (blocks, warps, 32)."""
        if mask is not None and self.alike > 1:
            rows = mask.reshape(self.alike, -1)
            if (rows == rows[0]).all():
                mask = rows[0]
            else:
                self._spread()
        shape = (*self.clocks.clock.shape, WARP)
        return np.ones(shape, np.bool_) if mask is None else mask.reshape(shape)

    def active(self, addresses: Any, mask: Mask) -> tuple[Words, Words]:
        """The active threads and their addresses; those of the followed block alone while all blocks do the same."""
        block_threads = self._block_threads
        if self.alike > 1:
            rows = addresses.reshape(-1, block_threads) if addresses.ndim else addresses
            masks = None if mask is None else mask.reshape(-1, block_threads)
            same: Any = rows == rows[0] if addresses.ndim else np.True_
            if masks is not None:
                same = (same | ~masks) if (masks == masks[0]).all() else np.False_
            if same.all():
                mask = None if masks is None else masks[0]
                addresses = rows[0] if addresses.ndim else rows
            else:
                self._spread()
        threads = self._every[: self.clocks.blocks * block_threads] if mask is None else mask.nonzero()[0]
        if not addresses.ndim:
            return threads, np.full(threads.shape, addresses, np.int64)
        return threads, addresses if mask is None else addresses[mask]

    def listed(self, threads: Words, addresses: Words) -> tuple[Words, Words]:
        """The same for threads listed by number; each is listed once while one block stands for all."""
        if self.alike > 1:
            mask = np.zeros(self._threads, bool)
            spread = np.zeros(self._threads, np.int64)
            mask[threads], spread[threads] = True, addresses
            if np.count_nonzero(mask) == len(threads):
                return self.active(spread, mask)
            self._spread()
        return threads, addresses

    def pieces(self, threads: Words, addresses: Words) -> tuple[Words, Words]:
        """The same for threads of which each has several addresses: (threads, addresses)."""
        count = addresses.shape[1]
        if self.alike > 1:
            rows = np.column_stack([threads, addresses])
            blocks = rows.reshape(self.alike, -1, count + 1) if len(rows) % self.alike == 0 else rows[None, :0]
            blocks[..., 0] -= np.arange(len(blocks))[:, None] * self._block_threads
            if blocks.size and (blocks == blocks[0]).all():
                threads, addresses = blocks[0, :, 0], blocks[0, :, 1:]
            else:
                self._spread()
        return np.repeat(threads, count), addresses.ravel()

    def _spread(self) -> None:
        """Follow each block from now on."""
        if self.alike > 1:
            for spread in self.spreads:
                spread(self.alike)
            self.clocks.spread(self.alike)
            self.alike = 1
