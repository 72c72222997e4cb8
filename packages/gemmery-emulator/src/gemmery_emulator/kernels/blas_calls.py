"""cuBLAS for programs on the emulator: column-major calls on device memory by the products of the library."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery_emulator.kernels.device_heap import DeviceHeap

TYPES = {0: np.float32, 1: np.float64, 2: np.float16, 3: np.int8, 10: np.int32}  # by CUDA's numbers of data types
INVALID, MAPPING, NOT_SUPPORTED = 7, 11, 15  # cuBLAS's errors


def products() -> Any:
    """The library's namespace, which is loaded whenever a part of it is, and is above this part."""
    return sys.modules["gemmery"]


class UnmappedError(Exception):
    """An operand of a call lies outside of the device's allocations."""


class BlasCalls:
    """The calls of cuBLAS that a program makes: pointers of vectors and matrices are the device's or managed.

    They raise UnmappedError for an operand that is not there, which the program gets as cuBLAS's MAPPING.
    """

    heap: DeviceHeap

    def _elements(self, address: int, kind: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> NDArray[Any]:
        """Elements of a type on the device, or of the host for a scalar, by their steps in elements."""
        dtype = np.dtype(TYPES[kind])
        size = (sum((side - 1) * step for side, step in zip(shape, steps, strict=True)) + 1) * dtype.itemsize
        if self.heap.is_device(address):
            inside = self.heap.holding(address)
            if inside is None or address + size > inside.stop:
                raise UnmappedError
            bytes_ = self.heap.data[address : address + size]
        else:
            bytes_ = np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)
        first = bytes_.view(dtype)
        return np.lib.stride_tricks.as_strided(first, shape, tuple(step * dtype.itemsize for step in steps))

    def _scalar(self, address: int, kind: int) -> Any:
        try:
            return self._elements(address, kind, (1,), (1,))[0]
        except UnmappedError:
            return 0

    def _matrix(self, address: int, kind: int, offset: int, shape: tuple[int, int], step: int) -> NDArray[Any]:
        return self._elements(address + offset * np.dtype(TYPES[kind]).itemsize, kind, shape, (1, step))

    def _vector(self, address: int, kind: int, count: int, step: int) -> NDArray[Any]:
        elements = self._elements(address, kind, (count,), (abs(step),))
        return elements if step > 0 else elements[::-1]

    def on_product(
        self, of: int, to: int, scale: int, ta: int, tb: int, m: int, n: int, k: int, alpha: int, a: int, lda: int,
        next_a: int, b: int, ldb: int, next_b: int, beta: int, c: int, ldc: int, next_c: int, count: int,
    ) -> int:  # fmt: skip
        """C = alpha op(A) op(B) + beta C, by gm.gemm on views in the order of columns."""
        if min(m, n) <= 0 or count <= 0:
            return 0
        if not {of, to, scale} <= TYPES.keys():
            return NOT_SUPPORTED
        scales = float(self._scalar(alpha, scale)), float(self._scalar(beta, scale))
        for each in range(count):
            left = self._matrix(a, of, next_a * each, (k, m) if ta else (m, k), lda)
            right = self._matrix(b, of, next_b * each, (n, k) if tb else (k, n), ldb)
            result = self._matrix(c, to, next_c * each, (m, n), ldc)
            x, y = left.T if ta else left, right.T if tb else right
            if result.dtype != x.dtype:
                x, y = x.astype(result.dtype), y.astype(result.dtype)
            old = None if scales[1] == 0 else result.copy()
            result[...] = products().gemm(scales[0], x, y, scales[1], old)
        return 0

    def on_gemv(
        self, kind: int, t: int, m: int, n: int, alpha: int, a: int, lda: int, x: int, dx: int, beta: int, y: int,
        dy: int,
    ) -> int:  # fmt: skip
        """y = alpha op(A) x + beta y, by gm.gemv."""
        matrix = self._matrix(a, kind, 0, (m, n), lda)
        vector, result = self._vector(x, kind, m if t else n, dx), self._vector(y, kind, n if t else m, dy)
        old = float(self._scalar(beta, kind))
        product = products().gemv(matrix.T if t else matrix, vector, alpha=float(self._scalar(alpha, kind)))
        result[...] = product if old == 0 else product + matrix.dtype.type(old) * result
        return 0

    def on_axpy(self, kind: int, n: int, alpha: int, x: int, dx: int, y: int, dy: int) -> int:
        """y += alpha x."""
        source, result = self._vector(x, kind, n, dx), self._vector(y, kind, n, dy)
        result += self._scalar(alpha, kind) * source
        return 0

    def on_scal(self, kind: int, n: int, alpha: int, x: int, dx: int) -> int:
        """x *= alpha."""
        vector = self._vector(x, kind, n, dx)
        vector *= self._scalar(alpha, kind)
        return 0

    def on_copy_vector(self, kind: int, n: int, x: int, dx: int, y: int, dy: int) -> int:
        """y = x."""
        self._vector(y, kind, n, dy)[...] = self._vector(x, kind, n, dx)
        return 0

    def on_dot(self, kind: int, n: int, x: int, dx: int, y: int, dy: int, to: int) -> int:
        """The sum of products of two vectors, summed in float64."""
        first, second = self._vector(x, kind, n, dx), self._vector(y, kind, n, dy)
        self._elements(to, kind, (1,), (1,))[0] = np.dot(first.astype("f8"), second.astype("f8"))
        return 0

    def on_norm(self, kind: int, n: int, x: int, dx: int, to: int, order: int) -> int:
        """The sum of sizes, or the root of the sum of squares, in float64."""
        self._elements(to, kind, (1,), (1,))[0] = np.linalg.norm(self._vector(x, kind, n, dx).astype("f8"), order)
        return 0

    def on_amax(self, kind: int, n: int, x: int, dx: int, to: int) -> int:
        """The number of the largest size, counted from 1."""
        self._elements(to, 10, (1,), (1,))[0] = np.abs(self._vector(x, kind, n, dx)).argmax() + 1
        return 0
