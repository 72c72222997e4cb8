"""Bulk copies between global and shared memory, and the tiles of shared memory that asynchronous units read.

PTX ISA 9.0, "Data Movement and Conversion Instructions: Bulk copy" and ": Tensor copy". A load lands when a
thread waits for its mbarrier, and only as much of it as ends the phase; a store reads its data when its thread waits
for the group. Both are as late as possible, so that a missing wait is found.
After cp.async.bulk.wait_group.read a store has read its data, but counts as a write only at a wait without .read, or
when its block ends.

wgmma and tcgen05 multiply the bytes of shared memory that a descriptor selects, or of registers ("Asynchronous
Warpgroup Level Matrix Instructions: Matrix Descriptor Format", "TensorCore 5th Generation: Shared memory descriptor").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.dtypes import Array
from gemmery.errors import EmulationError
from gemmery_emulator.hopper import cluster, tensormap
from gemmery_emulator.hopper.mbarrier import Mbarriers, Needed
from gemmery_emulator.hopper.tensormap import Chunks, DecodedMap
from gemmery_emulator.machine import Machine, Pieces, Rows, landed, report_misuse
from gemmery_emulator.memory import PARAMETER_WINDOW
from gemmery_emulator.op import Flags, Indices, Mask

ROWS = 64  # of a warpgroup's product
PIECE = 16  # bytes that a swizzle moves as a unit
DEPTH = 32  # bytes along k in one product
SWIZZLES = (0, 128, 64, 32)  # bytes, by the two highest bits of a descriptor
START, FINE = 0x3FFF, 0x3F  # bits of the address where a matrix starts, and of its place in 1024 bytes; both in pieces


@lru_cache(maxsize=512)
def _pattern(descriptor: int, rows: int, size: int, by_rows: bool, depth: int) -> Indices:
    """Offsets of a matrix's 16-byte pieces: (rows, pieces), or (pieces, k) of one that is contiguous along its rows."""
    start, leading, stride = ((descriptor >> at & START) << 4 for at in (0, 16, 32))
    base, swizzle = descriptor >> 49 & 7, SWIZZLES[descriptor >> 62 & 3]
    pitch = swizzle or PIECE  # between rows, or along k
    if not by_rows:
        row, piece = np.arange(rows)[:, None], np.arange(depth // PIECE)
        addresses = start + row // 8 * stride + row % 8 * pitch + piece * (PIECE if swizzle else leading)
    else:
        piece, k = np.arange(rows * size // PIECE)[:, None], np.arange(depth // size)
        many = pitch // PIECE
        groups, along = (leading, stride) if swizzle else (stride, leading)
        addresses = start + piece // many * groups + piece % many * PIECE + k // 8 * along + k % 8 * pitch
    if swizzle:
        addresses = addresses ^ (((addresses >> 7) - base & swizzle // PIECE - 1) << 4)
    return addresses


@dataclass(frozen=True)
class SharedTile(Rows):
    """A matrix in shared memory, by a descriptor for each warpgroup or block."""

    descriptors: Indices
    rows: int  # m or n
    size: int = 2  # bytes of an element
    by_rows: bool = False  # M- or N-major: the matrix is contiguous along its rows
    depth: int = DEPTH  # bytes along k

    def wrong(self) -> tuple[Flags, str]:
        """The descriptors of tcgen05 that are wrong or not modeled, and what is wrong with the first kind of them."""
        for bad, what in (
            (self.descriptors >> 46 & 7 != 1, "whose bits 46 to 48 are not 0b001, the version of sm_100"),
            (self.descriptors >> 61 & 1 != 0, "with another swizzle than none, 32, 64 or 128 bytes"),
            (self.descriptors >> 52 & 1 != 0, "with an absolute leading dimension"),
        ):
            if bad.any():
                return bad, what
        return np.zeros(len(self.descriptors), np.bool_), ""

    def swizzles(self) -> Indices:
        """The swizzle of each matrix, in bytes."""
        swizzles: Indices = np.array(SWIZZLES)[self.descriptors >> 62 & 3]
        return swizzles

    def _pieces(self) -> Indices:
        """Return the offsets in shared memory of the 16-byte pieces: (descriptors, ...)."""
        rough = self.descriptors & START & ~FINE
        kinds, which = np.unique(self.descriptors - rough, return_inverse=True)
        patterns = [_pattern(kind, self.rows, self.size, self.by_rows, self.depth) for kind in kinds.tolist()]
        every = patterns[0] if len(patterns) == 1 else np.stack(patterns)[which.reshape(-1)]
        pieces: Indices = every + (rough << 4)[:, None, None]
        return pieces

    def places(self, machine: Machine, blocks: Indices, offsets: Indices | None = None) -> Indices:
        """Return its pieces in the chunk's shared memory, (blocks, ...); the first takes the place of those beyond."""
        offsets = self._pieces() if offsets is None else offsets
        inside = np.where(offsets + PIECE > machine.shared.size, 0, offsets)
        places: Indices = (inside + (blocks * machine.shared.stride)[:, None, None]) // PIECE
        return places

    def read(self, machine: Machine, index: int, threads: Indices, blocks: Indices) -> Indices:
        """Report that threads' products read its pieces in their blocks, and those outside; return their places."""
        offsets = self._pieces()
        bad = offsets + PIECE > machine.shared.size
        if bad.any():
            far = int(offsets.max()) + PIECE
            what = f"reads a matrix that ends at byte {far} of shared memory: a block has {machine.shared.size}"
            report_misuse(machine, index, threads[bad.any(axis=(1, 2))], what)
            offsets = np.where(bad, 0, offsets)
        there = blocks * machine.block_threads + threads % machine.block_threads
        machine.observers.bulk(machine, index, there, offsets.reshape(len(offsets), -1), "reads")
        return self.places(machine, blocks, offsets)

    def words(self, machine: Machine, places: Indices) -> Array:
        """Return the bytes at its places by rows, as words: (descriptors, rows, words)."""
        bytes_: Array = machine.shared.view("c16", 1).take(places)
        if not self.by_rows:
            return bytes_.view("u4")
        count, pieces, k = bytes_.shape
        elements = bytes_.view(f"u{self.size}").reshape(count, pieces, k, PIECE // self.size)
        rows = np.ascontiguousarray(elements.swapaxes(2, 3)).reshape(count, self.rows, k)
        return rows.view("u4")


@dataclass(frozen=True)
class RegisterMatrix(Rows):
    """A of wgmma in registers, for all warpgroups that execute an instruction together."""

    registers: tuple[Array, ...]  # four, each (warpgroups, 128)
    slots: tuple[int, ...]  # where the machine has them

    def words(self) -> Array:
        """Return its bytes by rows, as words: lane / 4 is the row, the second register is 8 rows below, the third 16
        bytes further.
        """
        words = np.stack(self.registers).reshape(2, 2, -1, 4, 8, 4)  # bytes, rows, warpgroup, warp, row, word
        return np.ascontiguousarray(words.transpose(2, 3, 1, 4, 0, 5)).reshape(-1, ROWS, 8)


class PieceReaders:
    """How many operations under way read each piece of a chunk's shared memory."""

    def __init__(self, machine: Machine) -> None:
        self._counts = np.zeros(-(-machine.shared.data.size // PIECE), np.int32)

    def begin(self, pieces: Indices) -> None:
        """An operation that reads these pieces is under way."""
        np.add.at(self._counts, pieces, 1)

    def end(self, pieces: Indices) -> None:
        """It has read them."""
        np.subtract.at(self._counts, pieces, 1)

    def reader(self, places: Indices, under_way: Iterable[tuple[int, Sequence[Indices]]]) -> tuple[int, int] | None:
        """Return which of these bytes of shared memory is read, and the instruction: `under_way` has their pieces."""
        read = self._counts[places // PIECE] > 0
        if not read.any():
            return None
        first = int(read.argmax())
        piece = places[first] // PIECE
        return first, next(index for index, every in under_way if any((piece == each).any() for each in every))


@dataclass(frozen=True)
class Load(Rows):
    """The loads of one instruction, one row for each copy; under way until the phase of their mbarrier needs them."""

    index: int  # of the instruction
    threads: Indices  # threads in the destination block with the numbers of the issuing threads
    places: Indices  # (copies, pieces) in the chunk's shared memory
    data: Chunks
    barriers: Indices
    swizzle: int  # bytes


@dataclass(frozen=True)
class Store(Rows):
    """The stores of one instruction to global memory, which happen when its thread waits."""

    index: int
    threads: Indices
    places: Indices  # (copies, pieces) in the chunk's shared memory
    write: Any  # the copies in `places`, and their data: rows, too
    groups: Indices


@dataclass(frozen=True)
class Unseen(Rows):
    """Stores that have read their data and written it, which no thread may rely on yet."""

    index: int
    threads: Indices
    groups: Indices
    places: Callable[[], Pieces]  # what they have written

    def only(self, some: Flags) -> Unseen:
        threads = self.threads[some]

        def places() -> Pieces:
            writers, addresses, width = self.places()
            these = np.isin(writers, threads)
            return writers[these], addresses[these], width

        return Unseen(self.index, threads, self.groups[some], places)


class Bulk:
    """The bulk copies under way of a chunk of blocks."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._mbarriers = machine, machine.unit(Mbarriers)
        self._mbarriers.landing.append(self._land_for)
        machine.at_end.append(self._finish)
        self._loads: list[Load] = []
        self._stores: list[Store] = []
        self._unseen: list[Unseen] = []
        self._readers = PieceReaders(machine)
        self._committed = np.zeros(machine.threads, np.int64)
        self._tensors: dict[int, DecodedMap] = {}
        # For pieces of shared memory: the instruction and the swizzle that wrote them (0: none), and their contents.
        self._swizzled: tuple[Indices, Chunks] | None = None

    @property
    def _shared(self) -> NDArray[Any]:
        return self._machine.shared.view("c16", 1)

    # ---- into shared memory ----

    def load(self, load: Load) -> None:
        """Start loads; threads that pass the mbarrier later see everything the issuing threads did before."""
        self.report(load.index, load.threads, load.places, "begins")
        first = np.unique(load.threads, return_index=True)[1]
        offsets = self._mbarriers.offsets(load.barriers[first])
        cluster.report_order(self._machine, load.index, load.threads[first], offsets, acquired=False)
        self._loads.append(load)
        self._machine.changes += 1  # threads that sleep on the mbarrier may continue now

    def _land_for(self, needed: Needed) -> None:
        """Land the loads under way to mbarriers until their phase ends."""
        self._loads = landed(self._loads, lambda load: needed(load.barriers), self._land)

    def _land(self, load: Load) -> None:
        self.report(load.index, load.threads, load.places, "lands")
        self._shared[load.places] = load.data
        self._mbarriers.complete(load.barriers, load.places.shape[1] * PIECE)
        if load.swizzle or self._swizzled is not None:
            # Record the swizzle by which pieces were written, and their contents.
            if self._swizzled is None:
                self._swizzled = np.zeros(self._shared.size, np.int64), np.empty_like(self._shared)
            marks, brought = self._swizzled
            marks[load.places] = load.index << 8 | load.swizzle if load.swizzle else 0
            brought[load.places] = load.data

    def compare(self, index: int, threads: Indices, places: Indices, swizzles: Indices) -> None:
        """Report tiles whose pieces (threads, ...) were copied with another swizzle, and not overwritten since.

        One that was copied without a swizzle may be swizzled already.
        """
        if self._swizzled is None:
            return
        marks, brought = self._swizzled
        swizzlings = marks[places]
        bad: Flags = (swizzlings != 0) & (swizzlings & 255 != swizzles[:, None, None])
        if bad.any():
            now, then = self._shared[places[bad]], brought[places[bad]]
            bad[bad] = (now.view("u8") == then.view("u8")).reshape(-1, 2).all(axis=1)
        if bad.any():
            some = bad.any(axis=(1, 2))
            copy, swizzle = divmod(int(swizzlings[bad][0]), 256)
            at = self._machine.kernel.instructions[copy].line
            what = f"multiplies a tile that was copied with a swizzle of {swizzle} bytes, with a descriptor for"
            way_out = f"{swizzles[some][0]}: use the same for it and the tensor map of the copy at {at}"
            report_misuse(self._machine, index, threads[some], f"{what} {way_out}")

    # ---- out of shared memory ----

    def store(self, store: Store) -> None:
        """Start stores; they belong to the group that their threads commit next."""
        self._report_reads(store)
        self._stores.append(replace(store, groups=self._committed[store.threads]))
        self._readers.begin(store.places)

    def reader(self, places: Indices) -> tuple[int, int] | None:
        """Return which of these bytes of the chunk's shared memory a store under way reads, and its instruction."""
        under_way = ((store.index, [store.places]) for store in self._stores)
        return self._readers.reader(places, under_way) if self._stores else None

    def commit(self, mask: Mask) -> None:
        """Close the group of these threads."""
        self._committed[slice(None) if mask is None else mask] += 1

    def wait(self, mask: Mask, pending: int, *, reads_only: bool = False) -> None:
        """Complete all groups of these threads except the latest `pending` ones, or only their reads."""
        self._stores = landed(self._stores, lambda store: self._ready(store, mask, pending), self._write)
        if not reads_only:
            self._unseen = landed(self._unseen, lambda unseen: self._ready(unseen, mask, pending), self._show)

    def _ready(self, copies: Store | Unseen, mask: Mask, pending: int) -> Flags:
        """Which copies are of these threads, and not of the latest `pending` groups."""
        ready: Flags = copies.groups < self._committed[copies.threads] - pending
        return ready if mask is None else ready & mask[copies.threads]

    def _show(self, unseen: Unseen) -> None:
        self._machine.observers.transferred(self._machine, unseen.index, unseen.places)

    def _finish(self) -> None:
        """Complete the stores for which no thread has waited, when all threads have ended."""
        for store in self._stores:
            what = "ends while its bulk copy may still read shared memory: cp.async.bulk.wait_group.read before the end"
            report_misuse(self._machine, store.index, store.threads, what)
            self._write(store)
        for unseen in self._unseen:
            self._show(unseen)
        self._stores, self._unseen = [], []

    def _write(self, store: Store) -> None:
        self._readers.end(store.places)
        self._report_reads(store)
        places = store.write.put(self._machine, self._shared[store.places])
        self._unseen.append(Unseen(store.index, store.threads, store.groups, places))

    def _report_reads(self, store: Store) -> None:
        """Report the pieces that stores read; one inside the tensor takes the place of those beyond it."""
        threads, places, inside = store.threads, store.places, store.write.inside
        if inside is not None:
            within = inside.any(axis=1)
            first = np.take_along_axis(places, inside.argmax(axis=1)[:, None], axis=1)
            threads, places = threads[within], np.where(inside, places, first)[within]
        if len(threads):
            self.report(store.index, threads, places, "reads")

    # ---- tensor maps ----

    def tensor(self, index: int, address: int) -> DecodedMap:
        """Return the tensor map at a generic address, in a parameter or in global memory."""
        machine = self._machine
        tensor = self._tensors.get(address)
        if tensor is None:
            inside = address - PARAMETER_WINDOW
            source = machine.parameters if inside >= 0 else machine.memory.data
            start = inside if inside >= 0 else address
            tensor = tensormap.decoded(source[start : start + tensormap.BYTES].tobytes().ljust(tensormap.BYTES, b"\0"))
            array = machine.memory.nearest(tensor.address)
            if array is None or not (array.start <= tensor.address and tensor.end <= array.stop):
                raise EmulationError(
                    f"{machine.kernel.instructions[index].text!r}: its tensor map extends beyond its array"
                )
            self._tensors[address] = tensor
        return tensor

    def report(self, index: int, threads: Indices, places: Indices, what: str) -> None:
        """Report to the observers what a copy does to pieces of shared memory."""
        machine = self._machine
        addresses = places * PIECE - (threads // machine.block_threads * machine.shared.stride)[:, None]
        machine.observers.bulk(machine, index, threads, addresses, what)
