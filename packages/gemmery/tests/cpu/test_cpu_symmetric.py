"""Products of a matrix with its own transpose on the CPU: half of the work, exactly symmetric or Hermitian."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest

import gemmery as gm
from gemmery import verify
from gemmery.arrays import View
from gemmery.cpu import pool, split
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.layout import JOB_AT
from gemmery.cpu.split import Unit

TYPES = [np.float32, np.float64, np.float16, np.int8, np.int64, np.complex64, np.complex128]
SHAPES = [
    (1, 5),
    (3, 100),
    (8, 8),
    (47, 40),
    (48, 32),
    (49, 31),
    (65, 500),
    (129, 130),
    (200, 70),
    (385, 40),
    (500, 33),
]


def stored(n, k, dtype):
    """Return one matrix row-major, column-major, with every second column, and reversed."""
    rng = np.random.default_rng(n + k)
    numbers = 4 * rng.standard_normal((n, k)) + (1j * rng.standard_normal((n, k)) if np.dtype(dtype).kind == "c" else 0)
    a, wide = numbers.astype(dtype), np.zeros((n, 2 * k), dtype)
    wide[:, ::2] = a
    return a, np.asfortranarray(a), wide[:, ::2], a[::-1]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_symmetric_to_the_last_bit_and_equal_to_the_whole_product(dtype, threads):
    for shape in SHAPES:
        for a, b in zip(stored(*shape, dtype), stored(*shape, dtype), strict=True):
            for order in "CF":
                whole, c = (np.empty((len(a), len(a)), dtype, order) for _ in range(2))
                gm.matmul(a, b.T, whole, threads=threads)  # the same numbers in other memory
                gm.matmul(a, a.T, c, threads=threads)
                assert np.array_equal(c, whole)
                assert np.array_equal(c, c.T)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("batch", [(), (3,), (20,)])
def test_a_matrix_times_its_conjugate_transpose_is_hermitian(dtype, batch):
    for n, k in [(1, 1), (1, 700), (2, 3), (5, 7), (8, 8), (16, 16), (17, 33), (40, 300), (130, 90)]:
        if batch and n * k > 300:
            continue
        rng = np.random.default_rng(n + k)
        wide = (rng.standard_normal((*batch, n, 3 * k)) + 1j * rng.standard_normal((*batch, n, 3 * k))).astype(dtype)
        columns = np.asfortranarray(wide[..., :k]) if not batch else wide[..., :k]
        for a in (wide[..., :k].copy(), columns, wide[..., ::3], wide[..., k - 1 :: -1] if k > 1 else wide[..., :1]):
            for b in (
                a.conj().swapaxes(-1, -2),
                a.swapaxes(-1, -2).conj().copy(),
                wide.conj()[..., ::3].swapaxes(-1, -2),
            ):
                if b.shape[-2] == k and np.array_equal(b, a.conj().swapaxes(-1, -2)):
                    c = gm.matmul(a, b)
                    assert np.array_equal(c, c.conj().swapaxes(-1, -2))
                    assert not c[..., range(n), range(n)].imag.any()


def test_within_the_bound():
    for dtype in (np.float32, np.float64, np.complex64):
        for a in stored(150, 400, dtype):
            assert verify.check(gm.matmul(a, a.T), a, a.T).ok


class Counted:
    """A kernel of Python that writes 1000 i + j to the elements of its part, and remembers what it was asked for."""

    def __init__(self, n):
        self.n, self.parts = n, []
        self.c = np.full((n, n), -1.0)
        self.function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.run)

    def run(self, record):
        m, n, *_ = struct.unpack("<24q", ctypes.string_at(record, 192))
        (below,) = struct.unpack("<q", ctypes.string_at(record + 192, 8))
        (c,) = struct.unpack("<q", ctypes.string_at(record + 72, 8))
        row, column = divmod((c - self.c.ctypes.data) // 8, self.n)
        self.parts.append((row, column, m, n, below))
        self.c[row : row + m, column : column + n] = 1000 * np.arange(row, row + m)[:, None] + np.arange(
            column, column + n
        )


@pytest.mark.skipif(not pool.address(), reason="a system without futexes")
@pytest.mark.parametrize(("n", "threads"), [(48, 1), (100, 1), (1000, 1), (1000, 2), (1000, 4), (1000, 9), (1000, 64)])
def test_parts_are_below_the_diagonal_and_mirrored(n, threads):
    kernel = Counted(n)
    address = ctypes.cast(kernel.function, ctypes.c_void_p).value
    launch = Launch(address, "double", 8, lambda m, n, k: Blocks(), unit=Unit(6, 8, 100.0))
    a = np.zeros((n, 50))
    x = View(a.ctypes.data, (1, n, 50), (0, 400, 8), "f64", owner=a)
    y = View(a.ctypes.data, (1, 50, n), (0, 8, 400), "f64", owner=a)
    c = View(kernel.c.ctypes.data, (1, n, n), (0, 8 * n, 8), "f64", owner=kernel.c)
    job = launch.job(x, y, c, 1, 0, None, threads)
    one = struct.pack("<q", 1)  # Python's kernel must not run on a worker
    job = job[: JOB_AT["threads"]] + one + job[JOB_AT["threads"] + 8 :]
    launch.run(job, x, y)
    lower = np.tril(1000 * np.arange(n)[:, None] + np.arange(n)[None, :])
    assert np.array_equal(kernel.c, lower + np.tril(lower, -1).T)
    assert sum(m * n for _, _, m, n, _ in kernel.parts) <= n * n // 2 + (n if n < 400 else 400) * n // 2 + n
    assert all(below == 1 + row - column for row, column, _, _, below in kernel.parts)
    kernel.parts.clear()
    other = a.copy()
    launch.run(launch.job(x, y._replace(pointer=other.ctypes.data), c, 1, 0, None, 1), x, y)
    assert kernel.parts == [(0, 0, n, n, 0)]
    kernel.parts.clear()
    launch.run(launch.job(x, y, c, 1, 2.0, None, 1), x, y)  # beta: the halves of C differ
    assert kernel.parts == [(0, 0, n, n, 0)]


def test_parts_of_several_threads_begin_at_multiples_of_their_columns():
    for threads in (2, 3, 4, 5, 16, 64, 200):
        for n in (48, 100, 1000, 5000):
            rows, columns = split.halves(n, threads)
            assert columns % 48 == 0
            assert rows == n or rows % columns == 0
    assert split.halves(5000, 1) == (0, 0)


def test_other_functions_and_tensors():
    torch = pytest.importorskip("torch")
    a, b = np.random.default_rng(0).standard_normal((120, 130)), np.random.default_rng(1).standard_normal((3, 70, 60))
    t = torch.from_numpy(a)
    z = torch.complex(t, t.flip(0))
    for c, want in (
        (gm.gemm(2.0, a, a.T), 2 * (a @ a.T)),
        (gm.gemm(2.0, a, a.T, 3.0, np.triu(a[:, :120])), 2 * (a @ a.T) + 3 * np.triu(a[:, :120])),
        (gm.einsum("ij,kj->ik", a, a), a @ a.T),
        (gm.einsum("ji,jk->ik", a, a), a.T @ a),
        (gm.tensordot(a, a, (1, 1)), a @ a.T),
        (gm.matmul(b, b.swapaxes(1, 2)), b @ b.swapaxes(1, 2)),
        (gm.matmul(a, a.T, bias=np.arange(120.0)), a @ a.T + np.arange(120.0)),
        (gm.matmul(t.T, t).numpy(), a.T @ a),
        (gm.matmul(z, z.mH).numpy(), (z @ z.mH).numpy()),
    ):
        assert np.allclose(c, want, rtol=1e-12, atol=1e-12)
    h = gm.matmul(z, z.mH).numpy()
    assert np.array_equal(h, h.conj().T)
