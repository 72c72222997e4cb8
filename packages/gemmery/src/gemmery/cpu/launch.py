"""Call compiled code with views: make a job with its scalars and its cut for threads, and run it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import lru_cache

from gemmery.arrays import View
from gemmery.cpu import pool
from gemmery.cpu.abi import FIELDS
from gemmery.cpu.layout import JOB, JOB_AT
from gemmery.cpu.split import Unit, grid, halves
from gemmery.tuples import NamedTuple

_SCALAR = {"float": "<ff", "double": "<dd"}
_PAGE = 4096
_BITS = {"i8": 8, "i16": 16, "i32": 32, "i64": 64}
_PLAN = len(JOB) - len(FIELDS) - 4  # words after the record and the two scalars
_pack = struct.Struct(f"<{len(FIELDS)}q16s16s{8 * _PLAN}s").pack
_pack_plan = struct.Struct(f"<{_PLAN}q").pack


class Blocks(NamedTuple):
    """mc, kc, nc of one part, and the bytes of workspace that they need."""

    mc: int = 0
    kc: int = 0
    nc: int = 0
    workspace: int = 0


def scalar(element: str, value: complex) -> bytes:
    """Return a scalar of an LLVM element type as 16 bytes; integers wrap, an imaginary part follows the real one."""
    if element in _BITS:
        wrapped = int(value.real) & ((1 << _BITS[element]) - 1)
        return wrapped.to_bytes(_BITS[element] // 8, "little").ljust(16, b"\0")
    return struct.pack(_SCALAR[element], value.real, value.imag).ljust(16, b"\0")


class Sharing(NamedTuple):
    """How threads share one packed B: the kernel that multiplies by it, and the function that packs columns of B."""

    launch: Launch
    pack: int
    bytes: int
    columns: int  # of a panel; they divide those of a part of a symmetric product


_LEAST, _MOST = 1 << 20, 1 << 29  # bytes of a packed B that threads share
_TALL = 256  # rows of A from which on that pays: with fewer, each packed column is read too few times
_PACKERS = 4  # parts of packing for each thread


class Launch:
    """A compiled kernel that can be called with views.

    `blocks(m, n, k)` returns the blocks of a part. `unit` describes how the product may be cut for threads (None: it
    runs on the caller's thread). With `at_once` the kernel itself runs all `batch` products of its record. For a B that
    was packed before, `b_steps(k, n)` returns the bytes from one block of k to the next, and from column to column.
    `shares(n, k)` returns how threads share a packed B, where that is faster than each packing what it reads.
    """

    def __init__(
        self,
        address: int,
        accumulator: str,
        out_size: int,
        blocks: Callable[[int, int, int], Blocks],
        *,
        unit: Unit | None = None,
        at_once: bool = False,
        b_steps: Callable[[int, int], tuple[int, int]] | None = None,
        shares: Callable[[int, int], Sharing] | None = None,
    ) -> None:
        self.address, self.accumulator, self.out_size = address, accumulator, out_size
        self.blocks, self.unit, self.at_once, self.b_steps, self._shares = blocks, unit, at_once, b_steps, shares
        self._one, self._zero = scalar(accumulator, 1.0), scalar(accumulator, 0.0)
        self._run = _entry()
        self._planned = lru_cache(maxsize=1024)(self.plan)

    def plan(self, batch: int, m: int, n: int, k: int, threads: int) -> tuple[tuple[int, int, int], bytes]:
        """Return (mc, kc, nc) and the last fields of a job, from `kernel` on, for products of this shape."""
        unit = self.unit and self.unit.of(m, n, threads)
        cut, launch = grid(unit, batch, m, n, k, threads), self
        shared: tuple[int, ...] = (0,) * 5
        if self._shares and batch == 1 and cut.row_parts > 1 and m >= _TALL and pool.address():
            sharing = self._shares(n, k)
            if _LEAST <= sharing.bytes <= _MOST:
                launch = sharing.launch
                cut, panels = grid(launch.unit, 1, m, n, k, threads), -(-n // sharing.columns)
                columns = -(-panels // (_PACKERS * threads)) * sharing.columns
                assert launch.b_steps is not None
                shared = sharing.pack, -(-sharing.bytes // _PAGE) * _PAGE, *launch.b_steps(k, n), columns
        blocks = launch.blocks(min(cut.rows, m), min(cut.columns, n), k) if cut.parts else Blocks()
        plan = _pack_plan(
            launch.address, self.at_once, cut.threads, cut.parts, cut.row_parts, cut.column_parts,
            cut.rows, cut.columns, cut.products, blocks.workspace, cut.wakes, pool.address(),
            *halves(n, cut.threads), 0, *shared,
        )  # fmt: skip
        return (blocks.mc, blocks.kc, blocks.nc), plan

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
        """Compute C = alpha A B + beta C for every matrix of the batch; a column-major C as C' = B' A'.

        Raises MemoryError, before C is written, where there is no memory for packed panels.
        """
        self.run(self.job(a, b, c, alpha, beta, bias, threads), a, b)

    def reserve(self, a: View, b: View, c: View, threads: int) -> None:
        """Allocate what a call with these views needs, and run nothing; the next call finds the memory there.

        Raises MemoryError where there is none.
        """
        job = self.job(a, b, c, 1, 0, None, threads)
        at = JOB_AT["parts"]
        if self._run(job[:at] + bytes(8) + job[at + 8 :]):
            raise _no_memory(a, b)

    def transposes(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
        """Return True if C is column-major, as in arrange.layout, so that a job computes C' = B' A'."""
        (_, m, n), (_, c_row, c_col) = shape, strides
        return n > 1 and c_col != self.out_size and (m == 1 or c_row == self.out_size)

    def run(self, job: bytes, a: View, b: View) -> None:
        """Run a job, which this kernel made of a and b."""
        if self._run(job):
            raise _no_memory(a, b)

    def job(
        self, a: View, b: View, c: View, alpha: complex, beta: complex, bias: View | None, threads: int
    ) -> bytes:  # fmt: skip
        """Return the job of one call, in the layout that the compiled pool reads."""
        batch, m, n = c.shape
        c_batch, c_row, c_col = c.strides
        a_batch, a_row, a_col = a.strides
        b_batch, b_row, b_col = b.strides
        k = a.shape[2]
        if self.transposes(c.shape, c.strides):
            a, b, m, n, c_row, c_col = b, a, n, m, c_col, c_row
            a_batch, a_row, a_col, b_batch, b_row, b_col = b_batch, b_col, b_row, a_batch, a_col, a_row
        if self.b_steps is not None:
            b_row, b_col = self.b_steps(k, n)
        blocks, plan = self._planned(batch, m, n, k, threads)
        return _pack(
            m, n, k, a.pointer, a_row, a_col, b.pointer, b_row, b_col, c.pointer, c_row, c_col, 0, 0,
            bias.pointer if bias else 0, bias.strides[0] if bias else 0,
            batch, a_batch, b_batch, c_batch, 0, *blocks, 0,
            self._one if alpha == 1 else scalar(self.accumulator, alpha),
            self._zero if beta == 0 else scalar(self.accumulator, beta),
            plan,
        )  # fmt: skip


def _no_memory(a: View, b: View) -> MemoryError:
    return MemoryError(f"no memory for the packed panels of a product of {a.shape} by {b.shape}")


def _entry() -> Callable[[bytes], int]:
    """Return the function that runs a job: the compiled pool's, or that of Python's threads where there is none."""
    if not pool.address():
        return pool.run_on_python_threads
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)(pool.entries()["run"])
