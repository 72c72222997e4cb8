"""gm.matmul of products met before: the compiled entry gives the same bits and the same refusals as Python."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gemmery as gm
from gemmery import dtypes, tiers, verify
from operands import random

SHAPES = [(1, 1, 1), (4, 4, 4), (3, 5, 7), (33, 17, 65), (1, 40, 30), (40, 1, 30), (200, 180, 190)]


@pytest.fixture(autouse=True)
def _entry_is_made():
    gm.matmul(np.eye(2), np.eye(2))


@pytest.mark.many(5)
@pytest.mark.parametrize("name", dtypes.NAMES)
def test_the_second_call_gives_the_bits_of_the_first(name):
    for (m, n, k), turn_a, turn_b in itertools.product(SHAPES, (False, True), (False, True)):
        a = random((k, m), name, 1).T if turn_a else random((m, k), name, 1)
        b = random((n, k), name, 2).T if turn_b else random((k, n), name, 2)
        first = gm.matmul(a, b)
        assert verify.check(first, a, b).error_over_bound <= 1
        for _ in range(3):
            again = gm.matmul(a, b)
            assert again is not first
            assert again.dtype == first.dtype
            assert again.flags.c_contiguous
            assert again.tobytes() == first.tobytes()
        out = np.full_like(first, 7)
        for call in (lambda out=out: gm.matmul(a, b, out), lambda out=out: gm.matmul(a, b, out=out)):  # noqa: B023
            assert call() is out
            assert out.tobytes() == first.tobytes()
            out[...] = 7
        other_a, other_b = random(a.shape, name, 3), random(b.shape, name, 4)
        other_a, other_b = (x.T.copy().T if turn else x for x, turn in ((other_a, turn_a), (other_b, turn_b)))
        assert verify.check(gm.matmul(other_a, other_b), other_a, other_b).error_over_bound <= 1


def test_strided_operands_met_before():
    for a_step, b_step in itertools.product([1, 2, -1, -2], [1, 3, -1]):
        a, b = random((18, 14), "f32", 1)[::a_step, ::a_step], random((14, 9), "f32", 2)[::b_step, ::b_step]
        k = min(a.shape[1], b.shape[0])
        a, b = a[:, :k], b[:k]
        first = gm.matmul(a, b)
        assert verify.check(first, a, b).error_over_bound <= 1
        assert gm.matmul(a, b).tobytes() == first.tobytes()
    flat = np.broadcast_to(random((1, 6), "f32", 3), (5, 6))
    for _ in range(3):
        assert verify.check(gm.matmul(flat, flat.T), flat, flat.T).error_over_bound <= 1


@pytest.mark.parametrize("n", [6, 150])
def test_an_out_that_will_not_do_is_still_refused(n):
    a, b = random((n, n), "f64", 1), random((n, n), "f64", 2)
    expected = gm.matmul(a, b)
    gm.matmul(a, b, out=np.zeros((n, n)))
    read_only = np.zeros((n, n))
    read_only.flags.writeable = False
    for out, error in [
        (read_only, gm.LayoutError),
        (np.zeros((n, n + 1)), gm.ShapeError),
        (np.zeros((n, n), int), gm.DTypeError),
        (np.zeros((n, n), ">f8"), gm.LayoutError),
        (np.zeros(n), gm.ShapeError),
        ([[0.0] * n] * n, gm.LayoutError),
    ]:
        with pytest.raises(error):
            gm.matmul(a, b, out)
        with pytest.raises(error):
            gm.matmul(a, b, out=out)
        assert not np.any(np.asarray(out))
    for out in (np.zeros((n, n)).T, np.zeros((2 * n, 2 * n))[::2, ::2], np.zeros((n, n), np.complex128)):
        assert gm.matmul(a, b, out=out) is out
        assert np.array_equal(out, expected)


@pytest.mark.parametrize("n", [6, 150])
def test_an_out_that_overlaps_is_still_right(n):
    base = random((n + 1, n), "f32", 1)
    b = random((n, n), "f32", 2)
    for _ in range(3):
        x = base.copy()
        gm.matmul(x[:n], b, out=x[1:])
        assert verify.check(x[1:], base[:n], b).error_over_bound <= 1
        x = base.copy()
        gm.matmul(x[1:], b, x[1:])
        assert verify.check(x[1:], base[1:], b).error_over_bound <= 1
        square = b.copy()
        gm.matmul(square, square, out=square)
        assert verify.check(square, b, b).error_over_bound <= 1


def test_operands_that_look_alike_are_not_confused():
    a, b = random((8, 8), "f32", 1), random((8, 8), "f32", 2)
    for _ in range(2):
        gm.matmul(a, b)
        with pytest.raises(gm.ShapeError):
            gm.matmul(a, b[:7])
        with pytest.raises(gm.ShapeError):
            gm.matmul(a[:, :7], b)
        assert gm.matmul(a.view(np.int32), b.view(np.int32)).dtype == np.int32
        assert gm.matmul(a[:7], b).shape == (7, 8)
        assert gm.matmul(a[0], b).shape == (8,)
        assert gm.matmul(a[None], b).shape == (1, 8, 8)
        assert verify.check(gm.matmul(a.T, b), a.T, b).error_over_bound <= 1
        swapped = a.astype(">f4")
        assert verify.check(gm.matmul(swapped, b), a, b).error_over_bound <= 1
        with pytest.raises(gm.LayoutError):
            gm.matmul(np.ma.masked_array(a), b)
        with pytest.warns(PendingDeprecationWarning):
            matrix = np.matrix(a)
        assert type(gm.matmul(matrix, b)) is np.matrix
        assert gm.matmul(a.tolist(), b).dtype == np.float64


def test_wrong_calls_are_type_errors():
    a = np.eye(3)
    gm.matmul(a, a)
    for call in (
        gm.matmul,
        lambda: gm.matmul(a),
        lambda: gm.matmul(a, a, None, a),
        lambda: gm.matmul(a, a, None, out=a),
        lambda: gm.matmul(a, a, wherever=True),
        lambda: gm.matmul(a=a, b=a),
    ):
        with pytest.raises(TypeError, match="matmul"):
            call()
    assert np.array_equal(gm.matmul(a, a, out=None), a)
    assert gm.matmul(a, a, dtype=np.complex128).dtype == np.complex128
    assert np.array_equal(gm.matmul(a, a, bias=1), a + 1)


def test_no_memory_is_lost():
    a, b, out = random((16, 16), "f32", 1), random((16, 16), "f32", 2), np.zeros((16, 16), np.float32)

    def repeat(count):
        for _ in range(count):
            gm.matmul(a, b)
            gm.matmul(a, b, out)
            gm.matmul(a, b, out=out)

    repeat(200)
    tiers.wait()  # the kernel for this shape is compiled in the background
    tracemalloc.start()
    repeat(20_000)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 100_000


def test_ten_threads_through_the_entry():
    work = [(random((m, k), "f32", 1), random((k, n), "f32", 2)) for m, n, k in SHAPES]
    expected = [gm.matmul(a, b).tobytes() for a, b in work]

    def repeat(number):
        for _ in range(200):
            for (a, b), bits in zip(work, expected, strict=True):
                if gm.matmul(a, b).tobytes() != bits:
                    return False
        return True

    with ThreadPoolExecutor(10) as pool:
        assert all(pool.map(repeat, range(10)))


@pytest.mark.process
def test_a_name_imported_before_the_first_product_is_fast_and_right_too():
    code = (
        "from gemmery import matmul\n"
        "import numpy as np\n"
        "a = np.arange(9.0).reshape(3, 3)\n"
        "for _ in range(4): assert np.array_equal(matmul(a, a), a @ a)\n"
        "assert np.array_equal(matmul(a, a, bias=1.0), a @ a + 1)\n"
        "assert np.array_equal(matmul(a, a, out=np.zeros((3, 3))), a @ a)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
