"""B packed once for many products: how it lies in memory, what that takes, and the packing."""

from __future__ import annotations

import ctypes
import mmap
import struct
from functools import cache
from typing import Any

import numpy as np

from gemmery.arrange import Ints
from gemmery.arrays import View
from gemmery.cpu.abi import FIELDS
from gemmery.cpu.build import even_kc, packed_kc
from gemmery.cpu.images import once_entries, product
from gemmery.cpu.panels import Whole, operands, whole
from gemmery.cpu.target import host
from gemmery.cpu.ukernel import Product, register_tile
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple


class PackedView(View):
    """The memory of a packed B, with the shape of B: its strides mean nothing."""


class Packed:
    """An operand that was packed: the part of it that products read.

    The compiled entry reads `array`, its first slot, in its place: panels as an array of bytes without a type of their
    own, whose strides say what they hold.
    """

    __slots__ = ("array", "memory")
    array: np.ndarray[Any, Any]
    memory: PackedView

    def check(self, common: str, result: str, semiring: str = "") -> None:
        """Raise DTypeError unless it was packed for products of these element types, LayoutError for a semiring's."""
        raise NotImplementedError


def stand_in(block: mmap.mmap, shape: Ints, dtype: str, result: str) -> np.ndarray[Any, Any]:
    """Return the array that the compiled entry reads in the place of panels of a type for results of another.

    Its key in the table is that of no array whose product is known: NumPy multiplies no elements of this type.
    """
    kind = _kinds.setdefault((dtype, result), len(_kinds) + 1)
    strided = np.lib.stride_tricks.as_strided
    return strided(np.frombuffer(block, "V1"), shape, (kind, _STRIDE), writeable=False)


_STRIDE = -7
_kinds: dict[tuple[str, str], int] = {}


class Layout(NamedTuple):
    """How a packed B lies in memory: all that the loops over it assume."""

    step: str  # of the micro-kernel
    element: str  # of the panels, LLVM's name, or gemmery's where each step widens them
    group: int  # elements along k in a cell
    columns: int  # of a panel, in numbers
    depth: int  # elements of k in a step of the micro-kernel
    block: int  # most elements of k in a block

    def __str__(self) -> str:
        cells = f"{self.element} x {self.group}" if self.group > 1 else self.element
        return f"{self.step}, {self.columns} columns of {cells}, k by {self.depth} in blocks of {self.block}"


@cache
def layout(dtype: str, out: str, semiring: str = "") -> Layout:
    """Return how this machine's products of a B of `dtype` with a C of `out` have it when it is packed."""
    types = _types(dtype, out, semiring)
    columns, kc = register_tile(host(), types).nr, packed_kc(host(), types)
    return Layout(types.step, types.stored or types.packed, types.group, columns, types.unit, kc // types.parts)


@cache
def _types(dtype: str, out: str, semiring: str = "") -> Product:
    return product(host(), Problem(2, 2, 2, dtype, out, b_layout="packed", semiring=semiring))


def size(dtype: str, out: str, k: int, n: int) -> int:
    """Return the bytes of a packed B of k x n elements."""
    return _whole(dtype, out, k, n)[0].size


def _whole(dtype: str, out: str, k: int, n: int) -> tuple[Whole, int]:
    """Return the bytes of its blocks and panels, and the numbers of k in a block."""
    types = _types(dtype, out)
    kc = even_kc(types, k, packed_kc(host(), types))
    return whole(operands(types, register_tile(host(), types))[1], k * types.parts, n * types.parts, kc), kc


def pack(b: View, out: str, to: int) -> None:
    """Pack a matrix B for products with a C of `out` into the memory at an address."""
    (k, n), (b_row, b_col) = b.shape, b.strides
    bytes_, kc = _whole(b.dtype, out, k, n)
    values = {
        "n": n, "k": k, "b": b.pointer, "b_row": b_row, "b_col": b_col, "kc": kc, "c": to, "c_row": bytes_.block,
        "c_col": bytes_.panel // register_tile(host(), _types(b.dtype, out)).nr,
    }  # fmt: skip
    record = struct.pack(f"<{len(FIELDS)}q", *(values.get(name, 0) for name, _ in FIELDS))
    panels = once_entries(_types(b.dtype, out))["panels"]
    ctypes.CFUNCTYPE(None, ctypes.c_char_p)(panels)(record)
