"""From views to a call of compiled code: the argument record, scalars, workspace."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass

from gemmery.arrays import View
from gemmery.cpu import abi, workspace

_SCALAR = {"float": "<f", "double": "<d", "i16": "<h", "i32": "<i", "i64": "<q"}
_BITS = {"i16": 16, "i32": 32, "i64": 64}
_SCALARS_AT = ctypes.sizeof(abi.Record)
_RECORD = ctypes.c_int64 * (len(abi.FIELDS) + 4)  # alpha and beta, 16 bytes each, lie behind the fields
_Entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass(frozen=True)
class Blocks:
    """mc, kc, nc of one call, and the workspace they need."""

    mc: int = 0
    kc: int = 0
    nc: int = 0
    workspace: int = 0


def scalar(element: str, value: complex) -> bytes:
    """A scalar of an LLVM element type in memory, 16 bytes; integers wrap."""
    if element in _BITS:
        wrapped = int(value.real) & ((1 << _BITS[element]) - 1)
        return wrapped.to_bytes(_BITS[element] // 8, "little").ljust(16, b"\0")
    return struct.pack(_SCALAR[element], value.real).ljust(16, b"\0")


class Launch:
    """A compiled kernel that can be called with views."""

    def __init__(
        self, address: int, accumulator: str, out_size: int, blocks: Callable[[int, int, int], Blocks]
    ) -> None:
        self.address, self.accumulator, self.out_size, self.blocks = address, accumulator, out_size, blocks
        self._entry = _Entry(address)
        self._one, self._zero = scalar(accumulator, 1.0), scalar(accumulator, 0.0)

    def __call__(
        self,
        a: View,
        b: View,
        c: View,
        *,
        alpha: complex = 1.0,
        beta: complex = 0.0,
        bias: View | None = None,
        threads: int = 1,
    ) -> None:
        """C = alpha A B + beta C for every matrix of the batch; a column-major C as its transpose, B' A'."""
        if c.strides[2] != self.out_size and c.strides[1] == self.out_size:
            a, b, c = _transposed(b), _transposed(a), _transposed(c)
        batch, m, n = c.shape
        k = a.shape[2]
        blocks = self.blocks(m, n, k)
        record = _RECORD()
        at = ctypes.addressof(record)
        with workspace.borrowed(blocks.workspace) as buffer:
            fields = (
                m, n, k,
                a.pointer, a.strides[1], a.strides[2],
                b.pointer, b.strides[1], b.strides[2],
                c.pointer, c.strides[1], c.strides[2],
                at + _SCALARS_AT, at + _SCALARS_AT + 16,
                bias.pointer if bias else 0, bias.strides[0] if bias else 0,
                batch, a.strides[0], b.strides[0], c.strides[0],
                buffer, blocks.mc, blocks.kc, blocks.nc,
            )  # fmt: skip
            record[: len(fields)] = fields
            scales = (self._one if alpha == 1 else scalar(self.accumulator, alpha)) + (
                self._zero if beta == 0 else scalar(self.accumulator, beta)
            )
            ctypes.memmove(at + _SCALARS_AT, scales, 32)
            for _ in range(batch):
                self._entry(at)
                record[abi.SLOT["a"]] += a.strides[0]
                record[abi.SLOT["b"]] += b.strides[0]
                record[abi.SLOT["c"]] += c.strides[0]


def _transposed(x: View) -> View:
    return x._replace(shape=(x.shape[0], x.shape[2], x.shape[1]), strides=(x.strides[0], x.strides[2], x.strides[1]))
