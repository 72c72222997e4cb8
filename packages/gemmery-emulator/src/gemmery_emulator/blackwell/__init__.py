"""Instructions of Blackwell (sm_100): tensor memory, and products of matrices that one thread starts.

PTX ISA 9.0, "TensorCore 5th Generation: Tensor Memory". It has 128 lanes of 512 columns of 32 bits for each block,
which allocates it by columns. A multiprocessor has one such memory for all of its blocks; here each block has its own,
so that an allocation never waits for another block. `fragment` tells which lanes and columns the registers of a warp
are (": Data Movement Shape").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gemmery.dtypes import Array
from gemmery_emulator.machine import Machine, Rows, landed, report_misuse
from gemmery_emulator.op import Flags, Indices

LANES, COLUMNS, QUARTER = 128, 512, 32  # a warp reaches 1/4 of the lanes
COUNTS = (32, 64, 128, 256, 512)  # columns that can be allocated
HALF = 16  # lanes: accesses are followed by groups of so many
FREE = -1
LANE_AT = 16  # an address: the lane above its column
UNWRITTEN = 0xFFFFFFFF  # a NaN
# Registers of one repetition of a shape, and its most repetitions.
SHAPES = {"32x32b": (1, 128), "16x64b": (1, 128), "16x128b": (2, 64), "16x256b": (4, 32), "16x32bx2": (1, 128)}


@dataclass(frozen=True)
class RegisterPlaces:
    """The lanes and columns of a warp's registers, from the address of the instruction: (32, registers)."""

    lanes: Indices
    columns: Indices


@lru_cache(maxsize=64)
def fragment(shape: str, repeats: int, split: int = 0, packs: bool = False) -> RegisterPlaces:
    """Return where the registers of a shape are; the second half of 16x32bx2 is `split` columns further.

    If a register packs 16 bits of two columns, there are two places of each.

    >>> fragment("16x128b", 1).lanes[5].tolist(), fragment("16x128b", 1).columns[5].tolist()
    ([1, 9], [1, 1])
    """
    lane, register = np.indices((32, repeats * SHAPES[shape][0]))
    lanes, columns = {
        "32x32b": (lane, register),
        "16x32bx2": (lane % 16, register),
        "16x64b": (lane % 2 * 8 + lane // 4, lane // 2 % 2 + 2 * register),
        "16x128b": (lane // 4 + register % 2 * 8, lane % 4 + register // 2 * 4),
        "16x256b": (lane // 4 + register // 2 % 2 * 8, lane % 4 * 2 + register % 2 + register // 4 * 8),
    }[shape]
    if packs:
        lanes = np.repeat(lanes, 2, axis=1)
        columns = np.repeat(2 * columns, 2, axis=1) + np.arange(len(lanes[0])) % 2
    if shape == "16x32bx2":
        columns = columns + np.arange(32)[:, None] // 16 * split
    return RegisterPlaces(lanes, columns)


@dataclass(frozen=True)
class Unwaited(Rows):
    """Loads or stores of warps that have not waited for them: the columns first ... last - 1 of their blocks."""

    kind: str  # "ld" or "st"
    index: int
    threads: Indices  # the first of each warp
    first: Indices
    last: Indices


class TensorMemory:
    """The tensor memory of a chunk of blocks."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.data = np.zeros((machine.blocks, LANES, 0), np.uint32)
        # For each column the instruction and the thread that allocated it, and its allocation's first column.
        self._index, self._thread, self._start = np.full((3, machine.blocks, COLUMNS), FREE, np.int64)
        self._relinquished = np.zeros(machine.blocks, bool)
        self._unwaited: list[Unwaited] = []
        machine.at_end.append(self._finish)

    # ---- allocation ----

    def allocate(self, index: int, threads: Indices, counts: Indices) -> Indices:
        """Allocate columns for the blocks of these threads, and return the first of each; 0 where it is refused."""
        each = zip(threads.tolist(), counts.tolist(), strict=True)
        return np.array([self._allocated(index, thread, count) for thread, count in each], np.int64)

    def _allocated(self, index: int, thread: int, count: int) -> int:
        block, report = thread // self._machine.block_threads, np.array([thread])
        if count not in COUNTS:
            what = f"allocates {count} columns of tensor memory: 32, 64, 128, 256 or 512"
            report_misuse(self._machine, index, report, what)
            return 0
        if self._relinquished[block]:
            what = "allocates tensor memory after its block gave up the permit (tcgen05.relinquish_alloc_permit)"
            report_misuse(self._machine, index, report, what)
        free = self._index[block] == FREE
        fits = np.lib.stride_tricks.sliding_window_view(free, count)[::32].all(axis=1)
        if not fits.any():
            what = f"waits forever for {count} columns of tensor memory: its block leaves {int(free.sum())} of 512 free"
            report_misuse(self._machine, index, report, what)
            return 0
        start = 32 * int(fits.argmax())
        own = block, slice(start, start + count)
        self._index[own], self._thread[own], self._start[own] = index, thread, start
        missing = start + count - self.data.shape[2]
        if missing > 0:
            fresh = np.full((*self.data.shape[:2], missing), UNWRITTEN, np.uint32)
            self.data = np.concatenate([self.data, fresh], axis=2)
        self.data[block, :, start : start + count] = UNWRITTEN
        return start

    def relinquish(self, threads: Indices) -> None:
        """The blocks of these threads allocate no more."""
        self._relinquished[threads // self._machine.block_threads] = True

    def free(self, index: int, threads: Indices, addresses: Indices, counts: Indices) -> None:
        """Free columns; report those that are not an allocation."""
        for thread, address, count in zip(threads.tolist(), addresses.tolist(), counts.tolist(), strict=True):
            block, stop = thread // self._machine.block_threads, address + count
            wrong = not 0 <= address < stop <= COLUMNS
            own = self._start[block, address:stop]
            if wrong or not (own == address).all() or (self._start[block] == address).sum() != count:
                why = "which is no allocation: pass its address and its columns"
                if not wrong and (self._index[block, address:stop] == FREE).all():
                    why = "which is free: free it once"
                what = f"frees {count} columns of tensor memory from {address:#x}, {why}"
                report_misuse(self._machine, index, np.array([thread]), what)
                continue
            self._index[block, address:stop] = self._start[block, address:stop] = FREE

    def _finish(self) -> None:
        """Report what no thread has waited for or freed when all have ended."""
        for access in self._unwaited:
            what = f"executes tcgen05.{access.kind} and never waits for it: tcgen05.wait::{access.kind} before"
            does = "the registers are used" if access.kind == "ld" else "others read what it stores"
            report_misuse(self._machine, access.index, access.threads, f"{what} {does}")
        for index in np.unique(self._index[self._index != FREE]).tolist():
            blocks, columns = np.nonzero(self._index == index)
            threads = self._thread[blocks, columns]
            count = int((blocks == blocks[0]).sum())
            what = (
                f"allocates {count} columns of tensor memory that nobody frees: tcgen05.dealloc before the block ends"
            )
            report_misuse(self._machine, index, np.unique(threads), what)

    def allocated(self, index: int, threads: Indices, blocks: Indices, first: Indices, count: int) -> Flags:
        """Return which of these threads access allocated columns of the blocks; report the others."""
        columns = first[:, None] + np.arange(count)
        inside = (columns >= 0) & (columns < COLUMNS)
        good: Flags = (inside & (self._index[blocks[:, None], columns % COLUMNS] != FREE)).all(axis=1)
        if not good.all():
            start = int(first[~good][0])
            what = f"accesses the columns {start} to {start + count - 1} of tensor memory, which are not all allocated"
            report_misuse(self._machine, index, threads[~good], f"{what}: tcgen05.alloc them first")
        return good

    # ---- loads and stores ----

    def places(
        self, index: int, threads: Indices, addresses: Indices, part: RegisterPlaces
    ) -> tuple[Flags, tuple[Indices, Indices, Indices]]:
        """Return which warps may access their registers' places, and these places: (warps, 32, registers)."""
        machine = self._machine
        lanes, columns = addresses >> LANE_AT, addresses & 0xFFFF
        blocks, warps = threads // machine.block_threads, threads % machine.block_threads // 32
        most = int(part.lanes.max()) + 1
        bad = (lanes < warps % 4 * QUARTER) | (lanes + most > (warps % 4 + 1) * QUARTER) | (lanes % HALF != 0)
        if bad.any():
            lane, warp = int(lanes[bad][0]), int(warps[bad][0])
            what = f"accesses lanes {lane} to {lane + most - 1} of tensor memory: warp {warp} of a block reaches"
            quarter = warp % 4 * QUARTER
            report_misuse(machine, index, threads[bad], f"{what} the lanes {quarter} to {quarter + QUARTER - 1}")
        good = ~bad & self.allocated(index, threads, blocks, columns, int(part.columns.max()) + 1)
        block, lane, column = (each[good][:, None, None] for each in (blocks, lanes, columns))
        return good, (block, lane + part.lanes, column + part.columns)

    def accesses(self, kind: str, index: int, threads: Indices, addresses: Indices, part: RegisterPlaces) -> None:
        """Warps load or store: report it, and remember it until they wait."""
        columns = addresses & 0xFFFF
        last = columns + int(part.columns.max()) + 1
        self.meets(index, threads, threads // self._machine.block_threads, columns, last, kind)
        halves = np.unique(part.lanes // HALF * COLUMNS + part.columns)
        places = (addresses >> LANE_AT)[:, None] // HALF * COLUMNS + columns[:, None] + halves
        self.report(index, threads, places, "reads" if kind == "ld" else "writes")
        self._unwaited.append(Unwaited(kind, index, threads, columns, last))

    def wait(self, kind: str, threads: Indices) -> None:
        """tcgen05.wait::ld and ::st of these warps."""

        def waited(access: Unwaited) -> Flags:
            return np.isin(access.threads, threads) & (access.kind == kind)

        self._unwaited = landed(self._unwaited, waited, lambda access: None)

    def meets(
        self, index: int, threads: Indices, blocks: Indices, first: Indices, last: Indices, kind: str = "mma"
    ) -> None:
        """Report an access to columns of these blocks for whose earlier stores or loads a warp has not waited."""
        machine = self._machine
        for access in self._unwaited:
            if kind == access.kind:
                continue
            own = access.threads // machine.block_threads
            bad = (own == blocks[:, None]) & (access.first < last[:, None]) & (access.last > first[:, None])
            if kind != "mma":  # lanes of other warps are other places
                bad &= access.threads == threads[:, None]
            if bad.any():
                does = "writes" if access.kind == "st" else "reads"
                at = machine.kernel.instructions[access.index].line
                what = f"uses columns of tensor memory that the tcgen05.{access.kind} at {at} may still access"
                way_out = f"first execute tcgen05.wait::{access.kind} in the warp that {does} them"
                report_misuse(machine, index, threads[bad.any(axis=1)], f"{what}: {way_out}")
                return

    def report(self, index: int, threads: Indices, places: Indices, what: str) -> None:
        """Tell the observers of accesses to columns, by groups of HALF lanes: (threads, places)."""
        if len(threads):
            self._machine.observers.tensor(self._machine, index, threads, places * 4, what)


def columns_of(first: Indices, halves: Array, count: int) -> Indices:
    """The places of columns from the first on, in these groups of lanes: (blocks, halves * count)."""
    pattern = (halves[:, None] * COLUMNS + np.arange(count)).ravel()
    places: Indices = first[:, None] + pattern
    return places
