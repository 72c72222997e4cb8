"""Operands of wgmma: the bytes of shared memory or registers that a matrix descriptor or a fragment selects.

PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions: Matrix Descriptor Format".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from gemmery.dtypes import Array
from gemmery.emulator.op import Flags, Indices

ROWS = 64  # of a warpgroup's product
PIECE = 16  # bytes that a swizzle moves as a unit


@dataclass(frozen=True)
class MatrixLayout:
    """The fields of a descriptor, without the start address."""

    rows: int  # m or n
    by_rows: bool  # M- or N-major: the matrix is contiguous along its rows
    leading: int  # bytes
    stride: int
    base: int
    swizzle: int  # bytes


_MODES = (0, 128, 64, 32)


@lru_cache(maxsize=256)
def _pieces(layout: MatrixLayout, start: int) -> Indices:
    """Offsets of the 16-byte pieces from the multiple of 1024 before the start: (rows, 2), or (rows / 8, k)."""
    pitch = layout.swizzle or PIECE  # between rows, or along k
    if not layout.by_rows:
        row, piece = np.arange(layout.rows)[:, None], np.arange(2)
        across = piece * (layout.leading if not layout.swizzle else PIECE)
        offsets = row // 8 * layout.stride + row % 8 * pitch + across
    else:
        piece, k = np.arange(layout.rows // 8)[:, None], np.arange(16)
        many = pitch // PIECE
        groups, along = (layout.leading, layout.stride) if layout.swizzle else (layout.stride, layout.leading)
        offsets = piece // many * groups + piece % many * PIECE + k // 8 * along + k % 8 * pitch
    addresses = offsets + start
    if layout.swizzle:
        addresses = addresses ^ (((addresses >> 7) - layout.base & layout.swizzle // 16 - 1) << 4)
    return addresses


@dataclass(frozen=True)
class WgmmaOperand:
    """An operand, for all warpgroups that execute an instruction together."""

    type: str
    rows: int
    by_rows: bool = False
    descriptors: Indices | None = None  # one a warpgroup
    registers: tuple[Array, ...] = ()  # of A: four, each (warpgroups, 128)
    slots: tuple[int, ...] = ()  # where the machine has those registers

    def only(self, some: Flags) -> WgmmaOperand:
        """Return the selected warpgroups."""
        descriptors = None if self.descriptors is None else self.descriptors[some]
        return replace(self, descriptors=descriptors, registers=tuple(register[some] for register in self.registers))

    def swizzles(self) -> Indices:
        """The swizzle of each warpgroup's matrix, in bytes."""
        assert self.descriptors is not None
        swizzles: Indices = np.array(_MODES)[self.descriptors >> 62 & 3]
        return swizzles

    def pieces(self) -> Indices:
        """Return the offsets in shared memory of the 16-byte pieces: (warpgroups, ...)."""
        assert self.descriptors is not None
        layouts = []
        for descriptor in np.unique(self.descriptors & ~0x3FFF).tolist():
            layout = MatrixLayout(
                self.rows,
                self.by_rows,
                (descriptor >> 16 & 0x3FFF) << 4,
                (descriptor >> 32 & 0x3FFF) << 4,
                descriptor >> 49 & 7,
                _MODES[descriptor >> 62 & 3],
            )
            layouts.append((descriptor, layout))
        starts = (self.descriptors & 0x3FFF) << 4
        rough = starts & ~1023
        pieces: Indices | None = None
        for descriptor, layout in layouts:
            for fine in np.unique(starts & 1023).tolist():
                pattern = _pieces(layout, fine)
                these = (self.descriptors & ~0x3FFF == descriptor) & (starts & 1023 == fine)
                if pieces is None:
                    pieces = np.empty((len(starts), *pattern.shape), np.int64)
                pieces[these] = rough[these, None, None] + pattern
        assert pieces is not None
        return pieces

    def words(self, shared: Array, pieces: Indices | None) -> Array:
        """Return its bytes by rows, as words: (warpgroups, rows, 8)."""
        if pieces is None:
            return _from_registers(self.registers)
        bytes_ = shared.take(pieces)
        if self.by_rows:
            count = len(bytes_)
            bytes_ = bytes_.view("u2").reshape(count, self.rows // 8, 16, 8).swapaxes(2, 3)
            return np.ascontiguousarray(bytes_).reshape(count, self.rows, 16).view("u4")
        return bytes_.view("u4")


def _from_registers(registers: tuple[Array, ...]) -> Array:
    """Return A from four registers: lane / 4 is the row, the second is 8 rows below, the third 16 bytes further."""
    words = np.stack(registers).reshape(2, 2, -1, 4, 8, 4)  # bytes, rows, warpgroup, warp, row, word
    return np.ascontiguousarray(words.transpose(2, 3, 1, 4, 0, 5)).reshape(-1, ROWS, 8)
