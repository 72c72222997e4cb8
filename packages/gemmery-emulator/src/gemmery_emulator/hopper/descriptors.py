"""Matrices that wgmma and tcgen05 multiply: the bytes of shared memory that a descriptor selects, or of registers.

PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions: Matrix Descriptor Format", and "TensorCore 5th
Generation: Shared memory descriptor".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gemmery.dtypes import Array
from gemmery_emulator.machine import Machine, Rows, report_misuse
from gemmery_emulator.op import Flags, Indices

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

    row_fields = ("descriptors",)
    descriptors: Indices
    rows: int  # m or n
    size: int = 2  # bytes of an element
    by_rows: bool = False  # M- or N-major: the matrix is contiguous along its rows
    depth: int = DEPTH  # bytes along k

    def wrong(self) -> tuple[Flags, str]:
        """The descriptors of tcgen05 that are wrong or not modelled, and what is wrong with the first kind of them."""
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

    def pieces(self) -> Indices:
        """Return the offsets in shared memory of the 16-byte pieces: (descriptors, ...)."""
        rough = self.descriptors & START & ~FINE
        kinds, which = np.unique(self.descriptors - rough, return_inverse=True)
        patterns = [_pattern(kind, self.rows, self.size, self.by_rows, self.depth) for kind in kinds.tolist()]
        every = patterns[0] if len(patterns) == 1 else np.stack(patterns)[which.reshape(-1)]
        pieces: Indices = every + (rough << 4)[:, None, None]
        return pieces

    def words(self, bytes_: Array) -> Array:
        """Return the bytes of its pieces by rows, as words: (descriptors, rows, words)."""
        if not self.by_rows:
            return bytes_.view("u4")
        count, pieces, k = bytes_.shape
        elements = bytes_.view(f"u{self.size}").reshape(count, pieces, k, PIECE // self.size)
        rows = np.ascontiguousarray(elements.swapaxes(2, 3)).reshape(count, self.rows, k)
        return rows.view("u4")


@dataclass(frozen=True)
class RegisterMatrix(Rows):
    """A of wgmma in registers, for all warpgroups that execute an instruction together."""

    row_fields = ("registers",)
    registers: tuple[Array, ...]  # four, each (warpgroups, 128)
    slots: tuple[int, ...]  # where the machine has them

    def words(self) -> Array:
        """Return its bytes by rows, as words: lane / 4 is the row, the second register is 8 rows below, the third 16
        bytes further.
        """
        words = np.stack(self.registers).reshape(2, 2, -1, 4, 8, 4)  # bytes, rows, warpgroup, warp, row, word
        return np.ascontiguousarray(words.transpose(2, 3, 1, 4, 0, 5)).reshape(-1, ROWS, 8)


def pieces_of_chunk(machine: Machine, offsets: Indices, blocks: Indices) -> Indices:
    """Return pieces of blocks (blocks, ...) in the chunk's shared memory; the first takes the place of those beyond."""
    inside = np.where(offsets + PIECE > machine.shared.size, 0, offsets)
    places: Indices = (inside + (blocks * machine.shared.stride)[:, None, None]) // PIECE
    return places


def read_pieces(machine: Machine, index: int, threads: Indices, offsets: Indices, blocks: Indices) -> Indices:
    """Report that threads' products read pieces of their blocks' shared memory, and return these in the chunk's.

    Pieces outside of shared memory are reported, and the first one takes their place.
    """
    bad = offsets + PIECE > machine.shared.size
    if bad.any():
        far = int(offsets.max()) + PIECE
        what = f"reads a matrix that ends at byte {far} of shared memory: a block has {machine.shared.size}"
        report_misuse(machine, index, threads[bad.any(axis=(1, 2))], what)
        offsets = np.where(bad, 0, offsets)
    there = blocks * machine.block_threads + threads % machine.block_threads
    machine.observers.bulk(machine, index, there, offsets.reshape(len(offsets), -1), "reads")
    return pieces_of_chunk(machine, offsets, blocks)


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
