"""What products allocate: nothing is written to `out` where memory runs out, and little is kept between products."""

from __future__ import annotations

import inspect
import resource
import sys
import tracemalloc

import numpy as np
import pytest

import gemmery as gm
from fences import survives
from gemmery.api import explanation
from gemmery.cpu import entry
from gemmery.cpu.target import cores

pytestmark = pytest.mark.sampled(3)


def limit_memory(spare: int) -> None:
    """Let this process allocate `spare` bytes more."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    size = pages * resource.getpagesize() + spare
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("batch", [(), (3,)])
def test_out_is_not_written_where_there_is_no_memory_for_panels(batch):
    n = 700
    a, c = np.ones((*batch, n, n), np.float32), np.full((*batch, n, n), 5, np.float32)
    a = a.swapaxes(-1, -2)  # in rows neither A nor B, so both are packed
    out = np.full_like(c, 7)
    for made in (gm.gemm(2.0, a, a, 1.0, c), gm.matmul(a, a, out=np.empty_like(c))):  # compiled, and met before
        assert made.min() == made.max()

    def call():
        limit_memory(1 << 18)
        with pytest.raises(MemoryError, match=r"packed panels|allocate"):
            gm.gemm(2.0, a, a, 1.0, c, out=out)
        assert out.min() == out.max() == 7
        with pytest.raises(MemoryError):
            gm.matmul(a, a, out=out)
        assert out.min() == out.max() == 7

    assert survives(call)


def test_a_batch_that_no_stride_walks_leaves_little_behind():
    draw = np.random.default_rng(0)
    gm.matmul(np.ones((2, 1, 1)), np.ones((2, 1, 1)))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for n in range(10, 16):
        a = draw.integers(0, 9, (n, n, n, n, 1, 1)).astype(float).transpose(2, 1, 0, 3, 4, 5)
        b = draw.integers(0, 9, (n, n, n, n, 1, 1)).astype(float).transpose(1, 3, 2, 0, 4, 5)
        assert np.array_equal(gm.matmul(a, b), a @ b)
    del a, b
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kept < 500_000


def test_a_product_is_prepared_once(monkeypatch):
    entry.forget()
    stored, remember = [], entry.remember
    monkeypatch.setattr(entry, "remember", lambda *arguments: (stored.append(arguments), remember(*arguments)))
    a, b, c = np.ones((5, 61)), np.ones((61, 7)), np.ones((5, 7))
    calls = (
        lambda: gm.matmul(a, b),
        lambda: gm.gemm(2.0, a, b),
        lambda: gm.gemm(2.0, a, b, -1.0, c),
        lambda: gm.gemv(a, b[:, 0]),
        lambda: gm.gemm(1.0, a, b),
    )
    first = [call() for call in calls]
    if not inspect.isbuiltin(gm.matmul):
        pytest.skip("no compiled entry on this interpreter")
    assert len(stored) <= 4  # the vector is one of a family of kernels
    many = len(stored)
    for _ in range(3):
        assert all(np.array_equal(call(), value) for call, value in zip(calls, first, strict=True))
    assert len(stored) == many


@pytest.mark.parametrize(("alpha", "beta"), [(1, 0), (1.0, 0.0), (1, 0.0)])
def test_gemm_that_scales_nothing_is_matmul(alpha, beta):
    draw = np.random.default_rng(0)
    for dtype in ("f4", "f8", "i4", "c8"):
        a, b = draw.integers(0, 9, (4, 5)).astype(dtype), draw.integers(0, 9, (5, 6)).astype(dtype)
        for _ in range(2):
            result = gm.gemm(alpha, a, b, beta)
            assert result.dtype == dtype
            assert np.array_equal(result, a @ b)
            out = np.empty((4, 6), dtype)
            assert gm.gemm(alpha, a, b, beta, out=out) is out
            assert np.array_equal(out, a @ b)
            assert gm.gemm(alpha, a, b, beta, np.ones((4, 6), "c16")).dtype == np.complex128  # c promotes, unread
        with pytest.raises(gm.ShapeError):
            gm.gemm(alpha, a, a, beta)
        with pytest.raises(gm.LayoutError):
            gm.gemm(alpha, a, b, beta, out=np.broadcast_to(out[:1], (4, 6)))
    with pytest.raises(gm.ShapeError, match="multiplies matrices"):
        gm.gemm(alpha, a, b[0], beta)


@pytest.mark.parametrize("count", [2, np.int64(2), np.uint8(2), np.array(2)])
def test_any_whole_number_of_threads(count):
    a = np.ones((60, 60))
    assert (gm.matmul(a, a, threads=count) == 60).all()
    assert (gm.gemm(2.0, a, a, threads=count) == 120).all()
    gm.set_num_threads(count)
    try:
        assert gm.get_num_threads() == 2
        assert type(gm.get_num_threads()) is int
    finally:
        gm.set_num_threads(None)


BAD_COUNTS = [0, -1, 1.0, 2.5, True, "2", 10**9, 10**5000, [2], np.array([2]), np.bool_(True)]


@pytest.mark.parametrize("count", BAD_COUNTS, ids=lambda count: type(count).__name__)
def test_other_numbers_of_threads_are_refused(count):
    a = np.ones((3, 3))
    calls = (
        lambda: gm.matmul(a, a, threads=count),
        lambda: gm.gemm(2.0, a, a, threads=count),
        lambda: gm.gemv(a, a[0], threads=count),
        lambda: gm.explain(a, a, threads=count),
        lambda: gm.set_num_threads(count),
    )
    for call in calls:
        with pytest.raises(gm.ArgumentError, match=r"threads.*integer from 1 to \d+"):
            call()


def test_explain_measures_no_more_threads_than_there_are_cores(monkeypatch):
    measured = []
    monkeypatch.setattr(
        explanation, "_limits", lambda dtype, threads: (measured.append(threads), (100.0, 10.0, 0.0))[1]
    )
    a = np.ones((64, 64), np.float32)
    assert [gm.explain(a, a, threads=count).threads for count in (1, 200, 256)] == [1, 200, 256]
    assert measured == [1, min(200, cores()), min(256, cores())]


@pytest.mark.parametrize(("load", "marked"), [(0.0, False), (50.0, True)])
def test_explain_marks_figures_of_a_busy_machine(load, marked, monkeypatch):
    monkeypatch.setattr(explanation, "_limits", lambda dtype, threads: (100.0, 10.0, load))
    a = np.ones((64, 64), np.float32)
    found = gm.explain(a, a)
    assert ("unreliable other processes used 50 of " in str(found)) == marked
    assert ("while the machine was measured" in found._repr_html_()) == marked
