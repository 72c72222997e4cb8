"""The data for pictures: the first access of each instruction, and the path of a warp after a branch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from gemmery.banks import WARP
from gemmery_emulator.instructions import makers
from gemmery_emulator.machine import Access, Machine, Observer
from gemmery_emulator.op import Flags, Mask
from gemmery_emulator.ptx import Instruction, Line, PtxKernel, names_of
from gemmery_emulator.ptx.scopes import SIZES

MOST = 64  # largest number of stretches kept after a branch
LONGEST = 1 << 9  # basic blocks for which a path is followed
ActiveLanes = tuple[bool, ...]


@dataclass(frozen=True)
class WarpAccess:
    """One memory instruction of one warp: the address at which each lane reads or writes `width` bytes."""

    line: Line  # in the kernel's file
    inner: Line  # of the code itself
    opcode: str  # "ld.shared.v4.f32"
    space: str  # "shared", "global"
    kind: str  # as in machine.Access
    width: int
    addresses: tuple[int | None, ...]  # one per lane, None if inactive; for shared memory offsets in the block's part
    warp: int = 0  # of its block
    frames: tuple[Line, ...] = ()  # the calls that were inlined, `line` first and `inner` last

    @property
    def piece(self) -> int:
        """Bytes at each address: 16 for ldmatrix, which takes the addresses of rows."""
        return 16 if self.kind in ("ldmatrix", "stmatrix") else self.width

    @property
    def addressing(self) -> int:
        """The number of lanes, from the first, that give an address: for ldmatrix 8 for each matrix."""
        return 2 * self.width if self.kind in ("ldmatrix", "stmatrix") else len(self.addresses)


@dataclass(frozen=True)
class TileLayout:
    """A tile in shared memory: its contents, and one warp's access that stores it and one that loads it.

    `held` maps a byte offset in shared memory to the row and the column of the operand's element that begins there.
    """

    operand: str  # "A"
    held: Mapping[int, tuple[int, int]]
    store: WarpAccess | None = None
    load: WarpAccess | None = None


@dataclass(frozen=True)
class Stretch:
    """Consecutive instructions that a warp executes with the same active lanes."""

    first: Line
    last: Line  # of the same file
    instructions: int
    lanes: ActiveLanes  # the active lanes
    busiest: Line | None = None  # the line with most of the instructions


@dataclass(frozen=True)
class Divergence:
    """A branch at which the lanes of a warp diverge, and what the warp executes around it."""

    line: Line  # of the branch
    taken: ActiveLanes  # the lanes that take the branch
    active: ActiveLanes  # the lanes that execute the branch
    stretches: tuple[Stretch, ...]
    warp: int = 0  # of its block
    frames: tuple[Line, ...] = ()  # of the branch, as in WarpAccess


class Trace(Observer):
    """Records the first block for pictures, each instruction once.

    Launches are numbered from 0. `accesses` holds all warps of the first access of each instruction, by launch,
    instruction and space; `divergences` the path of a warp from its first divergence at each branch until its lanes
    meet again; `sources` maps an offset in shared memory to the global address that its contents came from.
    """

    def __init__(self) -> None:
        self.accesses: dict[tuple[int, int, str], tuple[WarpAccess, ...]] = {}
        self.divergences: dict[tuple[int, int], Divergence] = {}
        self.sources: dict[tuple[int, int], int] = {}
        self.arrays: dict[str, range] = {}  # addresses of arrays in global memory
        self._launch = -1
        self.kernel: PtxKernel | None = None
        self.watching = False  # whether this chunk is recorded: the first one of a launch
        self._origins: Mapping[int, tuple[tuple[int, int], ...]] = {}
        self._feeding: frozenset[int] = frozenset()  # loads whose values are stored to shared memory
        self._fetched: dict[int, Access] = {}  # the latest access of each
        self._places: dict[int, int] = {}
        self._before = 0, 0  # the latest instructions
        self._open: list[_Walk] = []

    def start(self, machine: Machine) -> None:
        self.watching = machine.kernel is not self.kernel
        if self.watching:
            self._launch, self.kernel = self._launch + 1, machine.kernel
            self._origins, self._fetched = origins(machine.kernel), {}
            self._feeding = frozenset(load for pieces in self._origins.values() for load, _ in pieces)
            self.arrays = {array.name: range(array.start, array.stop) for array in machine.memory.allocations}

    @property
    def following(self) -> bool:
        """Whether a warp's path after a divergent branch is being recorded."""
        return bool(self._open)

    def knows(self, index: int) -> bool:
        """Whether an access of an instruction is recorded."""
        return any((self._launch, index, space) in self.accesses for space in ("global", "shared"))

    def feeds(self, index: int) -> bool:
        """Whether the values of a load are stored to shared memory."""
        return index in self._feeding

    def fetched(self, event: Access) -> None:
        """The latest access of a load that feeds stores."""
        self._fetched[event.index] = event

    def has_diverged(self, index: int) -> bool:
        """Whether a branch has a divergence that is recorded."""
        return (self._launch, index) in self.divergences

    def reached(self, first: int, last: int) -> None:
        """These are the latest instructions, of blocks of which it was not told."""
        self._before = first, last

    def access(self, machine: Machine, event: Access) -> None:
        if not self.watching or event.space not in ("shared", "global"):
            return
        key = self._launch, event.index, event.space
        feeds = event.index in self._feeding or event.kind == "cp.async"
        if feeds and event.space == "global":
            self._fetched[event.index] = event
        if key in self.accesses:
            return
        block = _Block(machine, event)
        if block.active.any():  # perhaps only lanes of other blocks are active
            self.accesses[key] = block.warps(machine.kernel.instructions[event.index])
            if event.space == "shared" and event.kind in ("st", "cp.async"):
                # Record the global addresses of the values that a store puts into shared memory.
                pieces = ((event.index, 0),) if event.kind == "cp.async" else self._origins.get(event.index, ())
                size = event.width // max(1, len(pieces))
                for place, (load, offset) in enumerate(pieces):
                    if load in self._fetched:
                        fetched = _Block(machine, self._fetched[load])
                        both = block.active & fetched.active
                        to, of = block.addresses[both] + place * size, fetched.addresses[both] + offset
                        places = ((self._launch, at) for at in to.tolist())
                        self.sources.update(zip(places, of.tolist(), strict=True))

    def branch(self, machine: Machine, index: int, jumps: Any, active: Mask) -> None:
        key = self._launch, index
        if not self.watching or key in self.divergences or not np.ndim(jumps):
            return
        threads = machine.block_threads
        works = np.ones(threads, bool) if active is None else active[:threads]
        going = (jumps[:threads] & works).reshape(-1, WARP)
        works = works.reshape(-1, WARP)
        parted = going.any(axis=1) & (going != works).any(axis=1)
        if parted.any():
            warp = int(parted.argmax())
            at = machine.kernel.instructions[index]
            divergence = Divergence(at.line, _lanes(going[warp]), _lanes(works[warp]), (), warp, at.frames)
            self.divergences[key] = divergence
            walk = _Walk(key, warp)
            walk.add(machine, *self._before, _lanes(works[warp]))
            self._open.append(walk)

    def executed(self, machine: Machine, first: int, last: int, warps: int, threads: int) -> None:
        self._before = first, last
        for walk in tuple(self._open):
            lanes = self._active(machine, walk.warp)
            if any(lanes):
                walk.add(machine, first, last, lanes)
            divergence = self.divergences[walk.branch]
            together = all(now or not before for now, before in zip(lanes, divergence.active, strict=True))
            walk.blocks += 1
            if together or len(walk.stretches) == MOST or walk.blocks == LONGEST:
                self._close(walk)

    def _active(self, machine: Machine, warp: int) -> ActiveLanes:
        """The lanes of a warp that are at the block which runs now."""
        if machine.places.each is None:
            return (True,) * WARP
        return _lanes(machine.places.each[warp * WARP : (warp + 1) * WARP] == machine.places.at)

    def _close(self, walk: _Walk) -> None:
        self._open.remove(walk)
        divergence = self.divergences[walk.branch]
        stretches = zip(walk.stretches, walk.lines, strict=True)
        done = tuple(replace(stretch, busiest=lines.most_common(1)[0][0]) for stretch, lines in stretches)
        self.divergences[walk.branch] = replace(divergence, stretches=done)

    def finish(self, machine: Machine) -> None:
        for walk in tuple(self._open):
            self._close(walk)


class _Block:
    """The addresses of the first block, one per thread, and its active threads."""

    def __init__(self, machine: Machine, event: Access) -> None:
        threads = machine.block_threads
        self.event = event
        self.addresses = np.broadcast_to(event.addresses, (machine.threads,))[:threads].copy()
        self.active = np.ones(threads, bool) if event.mask is None else event.mask[:threads].copy()

    def warps(self, instruction: Instruction) -> tuple[WarpAccess, ...]:
        """Return the accesses of the warps with an active lane."""
        rows = zip(self.addresses.reshape(-1, WARP).tolist(), self.active.reshape(-1, WARP).tolist(), strict=True)
        place = instruction.line, instruction.inner, str(instruction.opcode)
        what = self.event.space, self.event.kind, self.event.width
        lanes = (
            tuple(address if works else None for address, works in zip(addresses, active, strict=True))
            for addresses, active in rows
        )
        accesses = (WarpAccess(*place, *what, each, warp, instruction.frames) for warp, each in enumerate(lanes))
        return tuple(access for access in accesses if any(address is not None for address in access.addresses))


@dataclass
class _Walk:
    """The path of one warp since it diverged at a branch."""

    branch: tuple[int, int]
    warp: int
    blocks: int = 0  # basic blocks since
    stretches: list[Stretch] = field(default_factory=list)
    lines: list[Counter[Line]] = field(default_factory=list)  # of each stretch

    def add(self, machine: Machine, start: int, stop: int, lanes: ActiveLanes) -> None:
        """Append a stretch, or extend the last one if the same lanes continue in the same file."""
        lines = Counter(instruction.line for instruction in machine.kernel.instructions[start:stop])
        file, number = next(iter(lines)).file, attrgetter("number")
        here = [line for line in lines if line.file == file]
        last = self.stretches[-1] if self.stretches else None
        if last and (last.lanes, last.first.file) == (lanes, file):
            here, start = [last.first, last.last, *here], start - last.instructions
            self.stretches.pop()
            lines = self.lines.pop() + lines
        self.stretches.append(Stretch(min(here, key=number), max(here, key=number), stop - start, lanes))
        self.lines.append(lines)


def _lanes(flags: Flags) -> ActiveLanes:
    return tuple(flags.tolist())


@lru_cache(maxsize=64)
def origins(kernel: PtxKernel) -> Mapping[int, tuple[tuple[int, int], ...]]:
    """Return for each store to shared memory the loads from global memory whose values it stores.

    For each stored register these are the index of the load, and the offset of the value in the loaded bytes. Values
    are traced through moves and conversions; stores of other values are left out.
    """
    instructions = kernel.instructions
    sources = {}
    for index, instruction in enumerate(instructions):
        if instruction.opcode.name == "st" and instruction.opcode.space in ("shared", "shared::cluster", ""):
            pieces = [_origin(instructions, makers(kernel), name) for name in names_of(instruction.operands[1:])]
            if pieces and all(piece is not None for piece in pieces):
                sources[index] = tuple(piece for piece in pieces if piece is not None)
    return sources


def _origin(
    instructions: tuple[Instruction, ...], writers: Mapping[str, list[int]], register: str
) -> tuple[int, int] | None:
    """Return the load that a register's value comes from; zeros for elements outside the operand are ignored."""
    traced, ahead = set(), [(register, 0)]
    while ahead:
        name, offset = ahead.pop(0)  # of registers packed into one, the lowest comes first
        for index in writers.get(name, ()):
            instruction = instructions[index]
            opcode, targets = instruction.opcode, names_of(instruction.operands[:1])
            into = targets.index(name) * SIZES.get(opcode.type, 0) // (1 if opcode.name == "ld" else len(targets))
            if opcode.name == "ld" and opcode.space in ("global", ""):
                return index, offset + into
            if opcode.name in ("mov", "cvt", "selp") and index not in traced:
                traced.add(index)
                ahead += [(source, offset + into) for source in names_of(instruction.operands[1:])]
    return None
