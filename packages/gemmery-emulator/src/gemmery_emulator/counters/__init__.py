"""The observer that counts what a kernel does: `EmulatedRun.shared`, `EmulatedRun.global_` and the others.

One pass over the events counts each access twice: as it is in the PTX, and as ptxas merges it with its neighbors
(merging.py). The rules of memory are in banks.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from gemmery import banks
from gemmery_emulator.counters.counts import FIELDS, Banked, CountKey, Counts, Frames, Traffic, of
from gemmery_emulator.counters.merging import Merge, predicated
from gemmery_emulator.hopper import products
from gemmery_emulator.instructions import find
from gemmery_emulator.machine import Access, Machine, Observer
from gemmery_emulator.op import Indices, Mask, Op, Traits, lowest, warps_in
from gemmery_emulator.ptx import Instruction, Opcode, PtxKernel
from gemmery_emulator.steps import Handler

# The field of MemoryTraffic and of SharedTraffic for each kind of access. ncu counts the reads of cp.async as loads.
GLOBAL = {"ld": "loads", "cp.async": "loads", "st": "stores", "atom": "atomics", "red": "atomics", "bulk": "bulk"}
SHARED = {
    **dict.fromkeys(("ld", "ldmatrix"), "loads"),
    **dict.fromkeys(("st", "stmatrix", "cp.async"), "stores"),
    **dict.fromkeys(("atom", "red"), "atomics"),
}

FEW = 512  # threads whose access costs more to count than to look up: 35 us, of NumPy's calls alone
# By instruction, then by space and field: sums in the order of the fields of Banked or Traffic.
Counted = dict[int, dict[tuple[str, str], list[int]]]


class Counters(Observer):
    """Counts one kernel's run over all its chunks; `counts` returns the result."""

    def __init__(self, kernel: PtxKernel, merges: Mapping[int, Merge] | None = None) -> None:
        self._kernel = kernel
        self._merges = {} if merges is None else merges
        size = len(kernel.instructions) + 1
        # Differences between neighboring instructions, so that counting a range takes two additions.
        self._warps, self._threads = [0] * size, [0] * size
        self._branches, self._divergent = [0] * size, [0] * size
        self._written: Counted = {}  # accesses as they are in the PTX
        self._wide: Counted = {}  # merged accesses, at the instruction that represents them
        self._source: Access | None = None  # the read of the cp.async whose write is the next event

    # ---- while the kernel runs ----

    def executed(self, machine: Machine, first: int, last: int, warps: int, threads: int) -> None:
        self._warps[first] += warps
        self._warps[last] -= warps
        self._threads[first] += threads
        self._threads[last] -= threads

    def branch(self, machine: Machine, index: int, jumps: Any, active: Mask) -> None:
        warps = machine.warps if active is None else warps_in(active)
        self._branches[index] += warps
        if np.ndim(jumps):
            going, staying = (jumps, ~jumps) if active is None else (jumps & active, active & ~jumps)
            self._divergent[index] += warps_in(going) + warps_in(staying) - warps

    def access(self, machine: Machine, event: Access) -> None:
        if event.kind == "bulk":
            # Count a bulk copy of `width` bytes for each thread that issues one.
            copies = machine.threads if event.mask is None else int(np.count_nonzero(event.mask))
            cost = copies, -(-event.width // banks.SECTOR) * copies, event.width * copies
            _add(self._written, event.index, event.space, event.kind, cost)
        elif event.kind == "cp.async" and event.space == "shared":
            _add(self._written, event.index, event.space, event.kind, self._written_by_copy(machine, event))
            self._source = None
        else:
            addresses = machine.spread(event.addresses)
            self.repeated(event.index, event.space, event.kind, event.width, addresses, event.mask)
            self._source = event if event.kind == "cp.async" else self._source

    def _written_by_copy(self, machine: Machine, event: Access) -> tuple[int, ...]:
        """The cost of a cp.async's write, which depends on both ends modulo whole lines."""
        at = to = machine.spread(event.addresses)
        fetched: Mask = np.zeros(machine.threads, np.bool_)
        if self._source is not None:
            at, fetched = machine.spread(self._source.addresses), self._source.mask
        # Idle threads may hold any address.
        lanes, mask = _warps(to - (lowest(to) & -128), event.mask)
        sources, reading = _warps(at - (lowest(at) & -128), fetched)
        bypass = "cg" in self._kernel.instructions[event.index].opcode.modifiers
        return banks.copied(lanes, sources, mask, reading, event.width, bypass)

    def repeated(
        self, index: int, space: str, kind: str, width: int, addresses: Indices, mask: Mask, times: int = 1
    ) -> None:
        """Count accesses of any number of warps, each of which came so often."""
        cost = _cost(addresses, mask, space, kind, width)
        _add(self._written, index, space, kind, tuple(times * value for value in cost))
        merge = self._merges.get(index)
        if merge is not None and merge.first == index:
            cost = _cost(addresses + merge.offset, mask, space, kind, merge.width)
            _add(self._wide, index, space, kind, tuple(times * value for value in cost))

    def repeated_copies(
        self, index: int, width: int, to: Indices, read: Indices, mask: Mask, fetched: Mask, times: int
    ) -> None:
        """Count what cp.async writes, one row of lanes for each warp."""
        bypass = "cg" in self._kernel.instructions[index].opcode.modifiers
        cost = banks.copied(to, read, mask, fetched, width, bypass)
        _add(self._written, index, "shared", "cp.async", tuple(times * value for value in cost))

    def branched(self, index: int, warps: int, divergent: int) -> None:
        """Count executions of a branch by warps."""
        self._branches[index] += warps
        self._divergent[index] += divergent

    # ---- afterwards ----

    def counts(self, merged: bool = True, only: Sequence[int] | None = None) -> Counts:
        """Return all counts, with those by line and by frames: as ptxas merges accesses, or as they are in the PTX.

        With `only`, return those of some instructions; an instruction that ptxas merges into another has none.
        """
        warps, threads = self._executed(merged)
        frames: dict[Frames, defaultdict[CountKey, int]] = {}
        for index, instruction in enumerate(self._kernel.instructions):
            if warps[index] and (only is None or index in only):
                place = frames.setdefault(instruction.frames or (instruction.line,), defaultdict(int))
                for key, value in self._of(index, instruction, warps[index], threads[index], merged):
                    place[key] += value
        return of(frames)

    def _executed(self, merged: bool) -> tuple[list[int], list[int]]:
        """Return the warps and the threads that executed each instruction."""
        warps, threads = list(accumulate(self._warps)), list(accumulate(self._threads))
        if merged:
            for index, branch in predicated(self._kernel).items():
                warps[index] = warps[branch]
        return warps, threads

    def _of(
        self, index: int, instruction: Instruction, warps: int, threads: int, merged: bool
    ) -> Iterator[tuple[CountKey, int]]:
        merge = self._merges.get(index) if merged else None
        if merge is not None and merge.first != index:
            return
        entry = find(instruction.opcode)
        kind, issues = _kind(instruction.opcode, entry)
        if isinstance(entry, Op):
            yield ("flops",), entry.flops * (warps if entry.scope == "warp" else threads)
        elif product := products.shape_of(instruction.opcode):
            yield ("flops",), product.flops * warps
        yield ("instructions", kind), warps * issues
        yield ("thread_instructions",), threads * issues
        if self._branches[index]:
            yield ("branches",), self._branches[index]
            yield ("divergent_branches",), self._divergent[index]
        if instruction.opcode.space == "const":
            return  # constants have their own cache
        counted = self._written if merge is None else self._wide
        for (space, way), sums in counted.get(index, {}).items():
            names = FIELDS[Banked if space == "shared" else Traffic]
            for name, value in zip(names, sums, strict=True):
                yield (space, way, name), value


def _kind(opcode: Opcode, entry: Traits) -> tuple[str, int]:
    """Return the kind of an instruction in EmulatedRun.instructions, and how many machine instructions it stands for.

    >>> from gemmery_emulator.instructions import opcode
    >>> [
    ...     _kind(read, find(read))[0]
    ...     for read in map(opcode, ("ld.global.f32", "ld.param.u64", "cp.async.cg.shared.global"))
    ... ]
    ['ld', 'ld.param', 'cp.async']
    >>> _kind(read := opcode("wmma.load.a.sync.aligned.row.m16n16k8.shared.tf32"), find(read))
    ('ld', 4)
    """
    if isinstance(entry, Handler) and entry.count is not None:
        return entry.count(opcode)
    return entry.kind or opcode.family, entry.issues


def _warps(addresses: Indices, mask: Mask) -> tuple[Indices, Mask]:
    shape = (-1, banks.WARP)
    return addresses.reshape(shape), None if mask is None else mask.reshape(shape)


def _cost(addresses: Indices, mask: Mask, space: str, kind: str, width: int) -> tuple[int, ...]:
    """Count loads, stores and atomics of any number of warps; of few from memory, as loops repeat their patterns."""
    if addresses.size > FEW:
        return _counted(addresses, mask, space, kind, width)
    near = addresses - (lowest(addresses) & -128)  # costs depend on the place in a line
    return _remembered(near.tobytes(), b"" if mask is None else mask.tobytes(), space, kind, width)


@lru_cache(maxsize=1 << 12)
def _remembered(addresses: bytes, mask: bytes, space: str, kind: str, width: int) -> tuple[int, ...]:
    active = np.frombuffer(mask, np.bool_) if mask else None
    return _counted(np.frombuffer(addresses, np.int64), active, space, kind, width)


def _counted(addresses: Indices, mask: Mask, space: str, kind: str, width: int) -> tuple[int, ...]:
    if space == "shared":
        return banks.served(*_warps(addresses, mask), width, kind) if kind in SHARED else ()
    if space == "local":
        return _interleaved(addresses, mask, width)
    return banks.moved(*_warps(addresses, mask), width)


def _add(counted: Counted, index: int, space: str, kind: str, cost: tuple[int, ...]) -> None:
    ways = SHARED if space == "shared" else GLOBAL
    if kind in ways:
        places = counted.setdefault(index, {})
        sums = places.setdefault((space, ways[kind]), [0] * len(cost))
        for place, value in enumerate(cost):
            sums[place] += value


def _interleaved(addresses: Indices, mask: Mask, width: int) -> tuple[int, ...]:
    """Count local memory, where each 4-byte word of the 32 lanes takes 128 consecutive bytes."""
    lanes, mask = _warps(addresses, mask)
    places = (lanes >> 2) * (4 * banks.WARP) + 4 * np.arange(banks.WARP)
    words = -(-width // 4)
    requests, sectors, used = banks.moved(places, mask, min(4, width))
    return requests, words * sectors, words * used
