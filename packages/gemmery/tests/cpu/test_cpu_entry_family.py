"""Products of shapes never met before, which compiled code serves by a kernel for every shape of a type."""

from __future__ import annotations

import ctypes
import itertools
import struct

import numpy as np
import pytest

import gemmery as gm
from gemmery.api import products
from gemmery.arrays import View
from gemmery.cpu import entry, entry_layout, entry_table
from gemmery.cpu.build import packed
from gemmery.cpu.entry_layout import Class, Member
from gemmery.cpu.layout import JOB, JOB_AT
from gemmery.problem import Problem

FUNCTIONS = {"matmul": products._matmul, "gemm": products._gemm, "gemv": products._gemv}
DOCS = [f"{name}(a, b)\n--\n\n" for name in ("matmul", "gemm", "gemv")]
MOST = 1 << 40


def member(launch, m=(1, MOST), n=(1, MOST), k=(0, 256), work=1e9, most=None):
    """A family of all shapes: the job of a product on one thread, with workspace for the largest blocks."""
    a, b, c = (View(0, (1, 4, 4), (64, 16, 4), "f32") for _ in range(3))
    job = bytearray(launch.job(a, b, c, 1, 0, None, 1))
    blocks = launch.blocks(96, 512, 256)
    for name, word in (("mc", blocks.mc), ("kc", blocks.kc), ("nc", blocks.nc), ("workspace_bytes", blocks.workspace)):
        struct.pack_into("<q", job, JOB_AT[name], word)
    return Member(m, n, k, MOST, MOST, 0, work, most or work, bytes(job))


@pytest.fixture
def served():
    """The builtins, whose f32 products are all served by the packed kernel, and the calls that reach Python."""
    gm.matmul(np.eye(2), np.eye(2))
    if not entry.counts()[1] or not entry_table.address():
        pytest.skip("no compiled entry on this interpreter")
    entry.forget()
    calls = []

    def python(function):
        def call(*args, **options):
            calls.append(args)
            return function(*args, **options)

        return call

    built = entry.builtins({name: python(function) for name, function in FUNCTIONS.items()}, DOCS)
    f32 = np.dtype(np.float32)
    for scaled, beta, bias, activation in [
        (False, False, "", ""),
        (True, False, "", ""),
        (True, True, "", ""),
        (False, False, "bias", "relu"),
    ]:
        epilogue = "+".join(filter(None, (bias, activation)))
        for layout in ("row", "col", "any"):
            launch = packed(Problem(2, 2, 2, "f32", "f32", b_layout=layout, epilogue=epilogue, scaled=scaled), {})
            class_ = Class(f32, layout, f32 if bias else None, False, scaled, beta, activation)
            entry.learn(class_, launch.accumulator, 2, [member(launch)])
    yield (*built, calls)
    entry.forget()
    entry.builtins(FUNCTIONS, DOCS)


def whole(shape, seed=0):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


SIZES = (1, 2, 3, 8, 17)


def test_every_shape_of_matrices(served):
    matmul, _, _, calls = served
    for m, n, k in itertools.product(SIZES, SIZES, (0, 1, 5, 40)):
        a, b = whole((m, k), 1), whole((k, n), 2)
        result = matmul(a, b)
        assert result.dtype == np.float32
        assert result.flags.c_contiguous
        assert np.array_equal(result, a @ b)
        out = np.full((m, 2 * n), 7, np.float32)
        assert matmul(a, b, out=out[:, :n]).base is out
        assert np.array_equal(out[:, :n], a @ b)
        assert (out[:, n:] == 7).all()
    assert not calls


def test_vectors(served):
    matmul, _, gemv, calls = served
    for m, k in itertools.product(SIZES, SIZES):
        a, x, y = whole((m, k), 1), whole(k, 2), whole(m, 3)
        assert np.array_equal(matmul(a, x), a @ x)
        assert np.array_equal(gemv(a, x), a @ x)
        assert np.array_equal(gemv(a, x, alpha=2), 2 * (a @ x))
        assert np.array_equal(gemv(a, x, y, alpha=2, beta=-1.0), 2 * (a @ x) - y)
        assert np.array_equal(matmul(y, a), y @ a)
        dot = matmul(x, x)
        assert dot == x @ x
        assert type(dot) is np.float32
        out = np.zeros((), np.float32)
        assert matmul(x, x, out=out) is out
        assert out == x @ x
    assert not calls


def test_strides_of_all_kinds(served):
    matmul, _, _, calls = served
    base = whole((40, 40), 1)
    views = [base[:8, :8], base[:8, :8].T, base[::5, ::5], base[7::-1, :8], base[:8, 7::-1], base[::-5, ::-5]]
    views += [np.broadcast_to(base[:1, :8], (8, 8)), np.broadcast_to(base[:8, :1], (8, 8))]
    for a, b in itertools.product(views, views):
        assert np.array_equal(matmul(a, b), a @ b)
    assert not calls


def test_batches(served):
    matmul, gemm, _, calls = served
    shapes = [(6, 3, 4), (1, 3, 4), (3, 4), (6, 1, 4), (4,), (1, 1, 4)], [(6, 4, 5), (1, 4, 5), (4, 5), (6, 4, 1), (4,)]
    for (i, first), (j, second) in itertools.product(*map(enumerate, shapes)):
        a, b = whole(first, i), whole(second, 9 + j)
        for x, y in ((a, b), (a[..., ::-1], b), (np.moveaxis(np.moveaxis(a, 0, -1).copy(), -1, 0), b)):
            want = np.matmul(x, y)
            got = matmul(x, y)
            assert got.shape == want.shape
            assert np.array_equal(got, want)
            if want.ndim:
                out = np.full(want.shape, 7, np.float32)
                assert matmul(x, y, out) is out
                assert np.array_equal(out, want)
            if min(x.ndim, y.ndim) > 1:
                assert np.array_equal(gemm(2.0, x, y), 2 * want)
    assert len(calls) < 40  # one row in A and one column in B: Python folds the batch into columns


def test_what_python_must_refuse_or_decide(served):
    matmul, gemm, gemv, calls = served
    a, b = whole((3, 4)), whole((4, 5))
    bad = [
        lambda: matmul(a, a),
        lambda: matmul(a, b[:3]),
        lambda: matmul(whole((2, 3, 4)), whole((3, 4, 5))),
        lambda: matmul(a, b, out=np.zeros((3, 6), np.float32)),
        lambda: matmul(a, b, out=np.zeros((4, 5), np.float32)),
        lambda: matmul(a, b, out=np.broadcast_to(np.zeros(5, np.float32), (3, 5))),
        lambda: gemm(1.0, a, b[:, 0]),
        lambda: gemm(1.0, a, b, 1.0),
        lambda: gemm(1.0, a, b, 1.0, np.zeros((5, 3), np.float32)),
        lambda: gemv(a, b),
        lambda: gemv(a, b[:, 0], np.zeros(4, np.float32), beta=1.0),
        lambda: matmul(a, b, bias=np.zeros(4, np.float32), activation="relu"),
        lambda: matmul(a, np.float32(1)),
    ]
    for number, call in enumerate(bad, 1):
        with pytest.raises(gm.GemmeryError):
            call()
        assert len(calls) == number


def test_bias_and_activation(served):
    matmul, _, _, calls = served
    for m, n in itertools.product(SIZES, SIZES):
        a, b, bias = whole((m, 6), 1), whole((6, n), 2), whole(n, 3)
        want = np.maximum(a @ b + bias, 0)
        assert np.array_equal(matmul(a, b, bias=bias, activation="relu"), want)
        out = np.empty((m, n), np.float32)
        assert np.array_equal(matmul(a, b, out, bias=bias, activation="relu"), want)
        one = np.float32([2])
        assert np.array_equal(matmul(a, b, bias=one, activation="relu"), np.maximum(a @ b + 2, 0))
    assert not calls


def test_out_that_overlaps(served):
    matmul, gemm, _, calls = served
    for n in SIZES:
        base, b = whole((n + 1, n), 1), whole((n, n), 2)
        for rows in (slice(None, -1), slice(1, None)):
            x = base.copy()
            assert matmul(x[rows], b, x[1:]) is not None
            assert np.array_equal(x[1:], base[rows] @ b)
            y = base.copy()
            gemm(2.0, y[rows], b, 1.0, y[1:], out=y[1:])
            assert np.array_equal(y[1:], 2 * (base[rows] @ b) + base[1:])
        square = b.copy()
        assert np.array_equal(matmul(square, square, out=square), b @ b)
        flipped = b.copy()
        assert np.array_equal(matmul(flipped[::-1], b, out=flipped), b[::-1] @ b)
    assert not calls


def test_a_shape_that_comes_often_is_told_to_python_once(served):
    matmul, _, _, calls = served
    a, b = whole((5, 6)), whole((6, 7))
    for _ in range(3 * entry_layout.OFTEN):
        assert np.array_equal(matmul(a, b), a @ b)
    assert len(calls) == 1
    assert entry.counts()[0] == 1


@pytest.fixture
def alone():
    """The builtin matmul without a family, the calls that reach Python, which returns None, and the packed kernel."""
    gm.matmul(np.eye(2), np.eye(2))
    if not entry.active():
        pytest.skip("no compiled entry on this interpreter")
    entry.forget()
    calls = []

    def python(*args, **options):
        calls.append(args)

    matmul, *_ = entry.builtins(FUNCTIONS | {"matmul": python}, DOCS)
    yield matmul, calls, packed(Problem(2, 2, 2, "f32", "f32"), {})
    entry.builtins(FUNCTIONS, DOCS)
    entry.forget()


def test_limits_of_a_family_are_kept(alone):
    matmul, calls, launch = alone
    good = member(launch, (2, 4), (3, 5), (4, 6), 60.0)
    entry.learn(Class(np.dtype(np.float32), "row"), "float", 2, [good])
    for m, n, k in itertools.product(range(1, 6), range(2, 7), range(3, 8)):
        calls.clear()
        a, b = whole((m, k)), whole((k, n))
        result = matmul(a, b)
        fits = 2 <= m <= 4 and 3 <= n <= 5 and 4 <= k <= 6 and m * n * k <= 60
        assert bool(calls) is not fits
        assert result is None if calls else np.array_equal(result, a @ b)


def test_a_product_worth_several_threads_is_planned_when_it_comes_back(alone):
    matmul, calls, launch = alone
    entry.learn(Class(np.dtype(np.float32), "row"), "float", 2, [member(launch, work=100.0, most=1000.0)])
    soon = entry_layout.SOON
    for n, wanted in ((4, [0] * (soon + 1)), (8, [*[0] * (soon - 1), 1, 1]), (12, [*range(1, soon + 2)])):
        a = whole((n, n))
        seen = []
        for _ in range(soon + 1):
            result = matmul(a, a)
            seen.append(len(calls))
            assert result is None or np.array_equal(result, a @ a)
        assert seen == wanted
        calls.clear()


def test_a_job_is_as_long_as_compiled_code_expects():
    assert ctypes.sizeof(ctypes.c_int64) * len(JOB) == entry_layout.size(JOB)
    assert entry_layout.ENTRY_BYTES % 64 == 0
    assert {
        entry_layout.place(entry_layout.hashed([i])) < entry_layout.SETS * entry_layout.WAYS for i in range(99)
    } == {True}
