"""Operands of wgmma: the bytes of shared memory or registers that a matrix descriptor or a fragment selects.

PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions: Matrix Descriptor Format".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS = 64  # of a warpgroup's product
PIECE = 16  # bytes that a swizzle moves as a unit
Array = NDArray[Any]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """The fields of a descriptor, without the start address."""

    rows: int  # m or n
    by_rows: bool  # M- or N-major: the matrix is contiguous along its rows
    leading: int  # bytes
    stride: int
    base: int
    swizzle: int  # bytes


_MODES = (0, 128, 64, 32)


@lru_cache(maxsize=256)
def _pieces(layout: Layout, start: int) -> Indices:
    """Offsets of the 16-byte pieces from the multiple of 1024 before the start: (rows, 2), or (rows / 8, k)."""
    one = layout
    pitch = one.swizzle or PIECE  # between rows, or along k
    if not one.by_rows:
        row, piece = np.arange(one.rows)[:, None], np.arange(2)
        across = piece * (one.leading if not one.swizzle else PIECE)
        offsets = row // 8 * one.stride + row % 8 * pitch + across
    else:
        piece, k = np.arange(one.rows // 8)[:, None], np.arange(16)
        many = pitch // PIECE
        groups, along = (one.leading, one.stride) if one.swizzle else (one.stride, one.leading)
        offsets = piece // many * groups + piece % many * PIECE + k // 8 * along + k % 8 * pitch
    addresses = offsets + start
    if one.swizzle:
        addresses = addresses ^ (((addresses >> 7) - one.base & one.swizzle // 16 - 1) << 4)
    return addresses


@dataclass(frozen=True)
class Side:
    """An operand, for all warpgroups that execute an instruction together."""

    type: str
    rows: int
    by_rows: bool = False
    descriptors: Indices | None = None  # one a warpgroup
    registers: tuple[Array, ...] = ()  # of A: four, each (warpgroups, 128)

    def only(self, some: NDArray[np.bool_]) -> Side:
        """Return the selected warpgroups."""
        chosen = None if self.descriptors is None else self.descriptors[some]
        return replace(self, descriptors=chosen, registers=tuple(one[some] for one in self.registers))

    def swizzles(self) -> Indices:
        """Start address of each warpgroup's matrix, in bytes."""
        assert self.descriptors is not None
        found: Indices = np.array(_MODES)[self.descriptors >> 62 & 3]
        return found

    def pieces(self) -> Indices:
        """Return the offsets in shared memory of the 16-byte pieces: (warpgroups, ...)."""
        assert self.descriptors is not None
        every = []
        for descriptor in np.unique(self.descriptors & ~0x3FFF).tolist():
            layout = Layout(
                self.rows,
                self.by_rows,
                (descriptor >> 16 & 0x3FFF) << 4,
                (descriptor >> 32 & 0x3FFF) << 4,
                descriptor >> 49 & 7,
                _MODES[descriptor >> 62 & 3],
            )
            every.append((descriptor, layout))
        starts = (self.descriptors & 0x3FFF) << 4
        rough = starts & ~1023
        found: Indices | None = None
        for descriptor, layout in every:
            for fine in np.unique(starts & 1023).tolist():
                pattern = _pieces(layout, fine)
                these = (self.descriptors & ~0x3FFF == descriptor) & (starts & 1023 == fine)
                if found is None:
                    found = np.empty((len(starts), *pattern.shape), np.int64)
                found[these] = rough[these, None, None] + pattern
        assert found is not None
        return found

    def words(self, shared: Array, pieces: Indices | None) -> Array:
        """Return its bytes by rows, as words: (warpgroups, rows, 8)."""
        if pieces is None:
            return _from_registers(self.registers)
        found = shared.take(pieces)
        if self.by_rows:
            count = len(found)
            found = found.view("u2").reshape(count, self.rows // 8, 16, 8).swapaxes(2, 3)
            return np.ascontiguousarray(found).reshape(count, self.rows, 16).view("u4")
        return found.view("u4")


def _from_registers(registers: tuple[Array, ...]) -> Array:
    """Return A from four registers: lane / 4 is the row, the second is 8 rows below, the third 16 bytes further."""
    held = np.stack(registers).reshape(2, 2, -1, 4, 8, 4)  # bytes, rows, warpgroup, warp, row, word
    return np.ascontiguousarray(held.transpose(2, 3, 1, 4, 0, 5)).reshape(-1, ROWS, 8)
