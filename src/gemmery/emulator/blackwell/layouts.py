"""Where matrices are: the registers of a warp in tensor memory, the pieces of a tile in shared memory.

PTX ISA 9.0, "TensorCore 5th Generation: Data Movement Shape" and ": Shared memory descriptor".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gemmery.dtypes import Array
from gemmery.emulator.op import Flags, Indices

PIECE = 16  # bytes that a swizzle moves as a unit
DEPTH = 32  # bytes along k in one product
LANE_AT = 16  # an address in tensor memory: the lane above its column
# Registers of one repetition of a shape, and its most repetitions.
SHAPES = {"32x32b": (1, 128), "16x64b": (1, 128), "16x128b": (2, 64), "16x256b": (4, 32), "16x32bx2": (1, 128)}
# The bytes of a swizzle by the highest three bits of a descriptor. The mode 1, of atoms of 32 bytes, is not modelled.
SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}


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
        lanes, columns = (
            np.repeat(lanes, 2, axis=1),
            np.repeat(2 * columns, 2, axis=1) + np.arange(2 * len(lanes[0])) % 2,
        )
    if shape == "16x32bx2":
        columns = columns + np.arange(32)[:, None] // 16 * split
    return RegisterPlaces(lanes, columns)


@dataclass(frozen=True)
class SharedLayout:
    """The fields of a descriptor, without the start address."""

    rows: int
    size: int  # bytes of an element
    by_rows: bool  # M- or N-major: the matrix is contiguous along its rows
    leading: int  # bytes
    stride: int
    base: int
    swizzle: int  # bytes


@lru_cache(maxsize=256)
def _pieces(layout: SharedLayout, start: int, depth: int) -> Indices:
    """Offsets of the 16-byte pieces from the multiple of 1024 before the start: (rows, 2), or (pieces, k)."""
    pitch = layout.swizzle or PIECE
    if not layout.by_rows:
        row, piece = np.arange(layout.rows)[:, None], np.arange(depth // PIECE)
        across = piece * (PIECE if layout.swizzle else layout.leading)
        addresses = start + row // 8 * layout.stride + row % 8 * pitch + across
    else:
        piece, k = np.arange(layout.rows * layout.size // PIECE)[:, None], np.arange(depth // layout.size)
        many = pitch // PIECE
        groups, along = (layout.leading, layout.stride) if layout.swizzle else (layout.stride, layout.leading)
        addresses = start + piece // many * groups + piece % many * PIECE + k // 8 * along + k % 8 * pitch
    if layout.swizzle:
        addresses = addresses ^ (((addresses >> 7) - layout.base & layout.swizzle // PIECE - 1) << 4)
    return addresses


@dataclass(frozen=True)
class SharedTile:
    """A matrix in shared memory, by a descriptor for each block."""

    descriptors: Indices
    rows: int
    size: int  # bytes of an element
    by_rows: bool = False
    depth: int = DEPTH  # bytes along k

    def wrong(self) -> tuple[Flags, str]:
        """The descriptors that are wrong or not modelled, and what is wrong with the first kind of them."""
        modes, fixed = self.descriptors >> 61 & 7, self.descriptors >> 46 & 7
        for bad, what in (
            (fixed != 1, "whose bits 46 to 48 are not 0b001, the version of sm_100"),
            (~np.isin(modes, list(SWIZZLES)), "with another swizzle than none, 32, 64 or 128 bytes"),
            (self.descriptors >> 52 & 1 != 0, "with an absolute leading dimension"),
        ):
            if bad.any():
                return bad, what
        return np.zeros(len(self.descriptors), np.bool_), ""

    def swizzles(self) -> Indices:
        """The swizzle of each matrix, in bytes."""
        swizzles: Indices = np.array([SWIZZLES.get(mode, 0) for mode in range(8)])[self.descriptors >> 61 & 7]
        return swizzles

    def pieces(self) -> Indices:
        """Return the offsets in shared memory of the 16-byte pieces: (descriptors, ...)."""
        starts = (self.descriptors & 0x3FFF) << 4
        kinds, which = np.unique(np.stack([self.descriptors & ~0x3FFF, starts & 1023]), axis=1, return_inverse=True)
        patterns = []
        for descriptor, fine in kinds.T.tolist():
            leading, stride = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
            swizzle = SWIZZLES.get(descriptor >> 61 & 7, 0)
            layout = SharedLayout(self.rows, self.size, self.by_rows, leading, stride, descriptor >> 49 & 7, swizzle)
            patterns.append(_pieces(layout, fine, self.depth))
        pieces: Indices = np.stack(patterns)[which.reshape(-1)] + (starts & ~1023)[:, None, None]
        return pieces

    def words(self, bytes_: Array) -> Array:
        """Return the bytes of its pieces by rows, as words: (descriptors, rows, words)."""
        if not self.by_rows:
            return bytes_.view("u4")
        count, pieces, k = bytes_.shape
        elements = bytes_.view(f"u{self.size}").reshape(count, pieces, k, PIECE // self.size)
        rows = np.ascontiguousarray(elements.swapaxes(2, 3)).reshape(count, self.rows, k)
        return rows.view("u4")
