"""From views to compiled code: the loop over the batch, the parts of a product, and what a call needs."""

from __future__ import annotations

import ctypes
import struct
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import probes
from gemmery.cpu import build, images, launch, pool, split, target, workspace
from gemmery.cpu.split import Grid, Unit, grid
from gemmery.problem import Problem
from operands import place, random

COSTLY = 1e6  # ns of a step that make every thread worth waking


def packed(a, b, c, threads, **options):
    batch, m, n = c.array.shape
    kernel = build.packed(Problem(m, n, a.array.shape[2], a.name, c.name, batch), {})
    kernel(a.view, b.view, c.view, threads=threads, **options)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("layouts", "shared"),
    [("CCC", ""), ("CCC", "a"), ("CCC", "b"), ("reversed reversed C", ""), ("C C rows reversed", "ab")],
)
def test_a_batch_is_the_products_one_by_one(layouts, shared, threads, monkeypatch):
    monkeypatch.setattr(
        target, "override", target.constants()._replace(worth=1)
    )  # small as it is, it is cut for threads
    first, second, third = layouts.split(" ", 2) if " " in layouts else layouts
    batch, m, n, k = 9, 7, 66, 5
    a = place(random((batch, m, k), "f32", 1), "f32", first, "a" in shared)
    b = place(random((batch, k, n), "f32", 2), "f32", second, "b" in shared)
    c = place(np.full((batch, m, n), np.nan, np.float32), "f32", third)
    packed(a, b, c, threads)
    for i in range(batch):
        alone = place(np.full((1, m, n), np.nan, np.float32), "f32")
        packed(
            place(a.array[i : i + 1].copy(), "f32"), place(b.array[i : i + 1].copy(), "f32"), alone, 1
        )  # fmt: skip
        assert np.array_equal(c.array[i], alone.array[0])
    assert c.untouched_around()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_kernel_that_runs_the_batch_itself_is_called_once_for_a_part(at_once, threads):
    kernel = probes.mark(Unit(0, 0, COSTLY), at_once)
    array, view = probes.zeros(50, 2, 3)
    kernel(view, view, view, threads=threads)
    called = array.any(axis=(1, 2))
    parts = grid(kernel.unit, 50, 2, 3, 3, threads)
    expected = np.arange(50) % parts.products == 0 if at_once else np.ones(50, bool)
    assert np.array_equal(called, expected)
    assert array.max() == 1


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 16, 300])
@pytest.mark.parametrize(
    "unit", [Unit(6, 64, COSTLY), Unit(1, 1, COSTLY), Unit(0, 16, COSTLY), Unit(8, 0, COSTLY), None]
)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 6, 64), (1, 7, 65), (2, 100, 1), (3, 5, 500), (40, 3, 4), (1, 257, 263)]
)
def test_every_element_belongs_to_one_part(shape, unit, threads):
    array, view = probes.zeros(*shape)
    a = view._replace(shape=(shape[0], shape[1], 8))
    probes.mark(unit)(a, view, view, threads=threads)
    assert (array == 1).all()


@given(
    some.integers(0, 40), some.integers(0, 900), some.integers(0, 900), some.integers(1, 2000), some.integers(1, 70),
    some.sampled_from([Unit(6, 64, 4.0, 0.3), Unit(12, 32, 4.0), Unit(0, 128, 9.0), Unit(4, 0, 2.0, read=0.25)]),
)  # fmt: skip
def test_parts_are_whole_tiles_for_no_more_threads_than_pay(batch, m, n, k, threads, unit):
    cut = grid(unit, batch, m, n, k, threads)
    assert cut.threads <= threads
    if not (batch and m and n):
        assert cut.parts == 0
        return
    work = batch * unit.work(m, n, k)
    assert cut.threads == 1 or cut.threads * target.constants().worth <= work
    assert cut.parts == 1 or cut.threads > 1
    assert cut.parts <= split.FINEST * cut.threads + batch
    for total, each, count, whole in (
        (m, cut.rows, cut.row_parts, unit.rows),
        (n, cut.columns, cut.column_parts, unit.columns),
        (batch, cut.products, cut.groups, 1),
    ):
        assert (count - 1) * each < total <= count * each
        assert count == 1 or (whole and each % whole == 0)


def test_a_product_that_is_not_worth_it_runs_on_one_thread():
    assert grid(Unit(6, 64, 4.0, 0.3), 1, 16, 16, 16, 16) == Grid(1, 1, 1, 1, 16, 16, 1)
    assert grid(None, 5, 4000, 4000, 4000, 16) == Grid(1, 1, 1, 1, 4000, 4000, 5)
    assert grid(Unit(6, 64, 4.0, 0.3), 1, 256, 256, 256, 16).threads == 16


def test_loads_that_take_longer_than_arithmetic_are_worth_threads():
    few_rows = Unit(4, 16, 0.1)
    assert grid(few_rows, 1, 4, 1000, 1000, 16).threads == 1
    assert grid(few_rows._replace(read=0.25), 1, 4, 1000, 1000, 16).threads == 16
    assert grid(few_rows._replace(read=0.25), 1, 4, 1000, 40, 16).threads == 1


def test_panels_side_by_side_leave_two_parts_for_each_of_several_threads():
    unit = Unit(6, 64, 4.0, few=4)
    shapes = ((1, 4096, 1, 256), (1, 4096, 2, 256), (1, 4096, 16, 128), (2, 4096, 16, 128), (1, 640, 16, 64))
    for m, n, threads, columns in shapes:
        assert unit.of(m, n, threads).columns == columns, (m, n, threads)


def test_a_batch_is_cut_between_products_and_skinny_ones_along_their_long_side():
    unit = Unit(6, 64, 4.0, 0.3)
    batch = grid(unit, 1000, 64, 64, 64, 4)
    assert (batch.row_parts, batch.column_parts, batch.groups > 4) == (1, 1, True)
    wide, tall = grid(unit, 1, 6, 4096, 1024, 4), grid(unit, 1, 4096, 64, 1024, 4)
    assert (wide.row_parts, wide.column_parts >= 4) == (1, True)
    assert (tall.column_parts, tall.row_parts >= 4) == (1, True)


def test_a_column_major_c_is_the_transposed_product():
    a, b = random((1, 70, 30), "f64", 1), random((1, 30, 90), "f64", 2)
    plain, turned = np.full((1, 70, 90), np.nan), np.full((1, 70, 90), np.nan)
    rows, columns = place(plain, "f64"), place(turned, "f64", "F")
    packed(place(a, "f64"), place(b, "f64"), rows, 1)
    packed(place(a, "f64"), place(b, "f64"), columns, 2, alpha=1.0)
    assert np.array_equal(rows.array, columns.array)
    assert columns.untouched_around()


@pytest.mark.parametrize(
    ("element", "value", "expected"),
    [
        ("float", 0.5, struct.pack("<f", 0.5)),
        ("double", -3, struct.pack("<d", -3)),
        ("float", 2 - 1j, struct.pack("<ff", 2, -1)),
        ("i16", 70000, struct.pack("<H", 70000 % 65536)),
        ("i32", -1, struct.pack("<i", -1)),
        ("i64", -(2.0**40), struct.pack("<q", -(2**40))),
    ],
)
def test_scalars_lie_in_memory_as_the_kernel_reads_them(element, value, expected):
    found = launch.scalar(element, value)
    assert len(found) == 16
    assert found[: len(expected)] == expected


@pytest.mark.skipif(not pool.address(), reason="this system has no compiled pool")
@pytest.mark.parametrize("threads", [1, 2])
def test_no_memory_for_panels_is_an_error_before_anything_is_written(threads):
    array, view = probes.zeros(1, 40, 40)
    unit = Unit(1, 1, COSTLY)
    with pytest.raises(MemoryError):
        probes.mark(unit, workspace=1 << 60)(view, view, view, threads=threads)
    assert not array.any()
    probes.mark(unit, workspace=1 << 20)(view, view, view, threads=threads)
    assert (array == 1).all()


@pytest.mark.skipif(not pool.address(), reason="this system has no compiled pool")
def test_a_workspace_is_used_again():
    _, view = probes.zeros(1, 40, 40)
    probes.mark(workspace=3 << 20)(view, view, view)
    _, address, size = probes.slot(0)
    assert size >= 3 << 20
    kept = ctypes.c_int64.from_address(address)
    kept.value = 12345
    for bytes_ in (1 << 20, 3 << 20):
        probes.mark(workspace=bytes_)(view, view, view)
    assert probes.slot(0) == (0, address, size)
    assert kept.value == 12345


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", ["f32", "int16"])
def test_python_threads_give_the_same_bits(name, threads):
    m, n, k = 150, 200, 90
    a, b = place(random((2, m, k), name, 1), name), place(random((2, k, n), name, 2), name)
    first, second = (place(random((2, m, n), name, 3), name) for _ in range(2))
    kernel = build.packed(Problem(m, n, k, name, name, 2, scaled=True), {})
    kernel(a.view, b.view, first.view, alpha=2, beta=-1, threads=threads)
    assert pool.run_on_python_threads(kernel.job(a.view, b.view, second.view, 2, -1, None, threads)) == 0
    assert first.array.tobytes() == second.array.tobytes()
    assert second.untouched_around()


def test_a_size_that_no_memory_has_is_a_memory_error():
    for size in (1 << 60, 1 << 70):
        with pytest.raises(MemoryError, match=str(size)):
            workspace.pages(size)
        with pytest.raises(MemoryError, match=str(size)), workspace.borrowed(size):
            pass


def test_python_threads_without_memory_write_nothing(monkeypatch):
    array, view = probes.zeros(1, 40, 40)
    job = probes.mark(Unit(1, 1, COSTLY), workspace=1 << 60).job(view, view, view, 1, 0, None, 4)
    with pytest.raises(MemoryError):
        pool.run_on_python_threads(job)
    assert not array.any()


def test_python_threads_do_the_parts_of_a_helper_without_memory(monkeypatch):
    array, view = probes.zeros(1, 40, 40)
    owner, borrowed = threading.get_ident(), workspace.borrowed

    def scarce(size):
        if threading.get_ident() != owner:
            raise MemoryError
        return borrowed(size)

    monkeypatch.setattr(workspace, "borrowed", scarce)
    pool.run_on_python_threads(probes.mark(Unit(1, 1, COSTLY), workspace=64).job(view, view, view, 1, 0, None, 4))
    assert (array == 1).all()


def sharing(name, least, monkeypatch):
    """The packed product of a type that shares every packed B from so many bytes on, as the tile unit's does."""
    types = images.product(target.host(), Problem(2, 2, 2, name, name))
    kernel = build._packed.__wrapped__(types, 0, 0, 0)
    kernel._shares = lambda n, k: build._sharing(types, n, k)
    monkeypatch.setattr(launch, "_LEAST", least)
    monkeypatch.setattr(target, "override", target.constants()._replace(worth=1))
    return kernel


@pytest.mark.skipif(not pool.address(), reason="the compiled pool shares panels")
@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("name", ["f32", "f64", "int16"])
def test_threads_that_share_a_packed_b_give_the_same_bits(name, threads, monkeypatch):
    """Several parts of packing and of the product, of which the last have fewer columns; alpha, beta and a second C."""
    kernel, jobs = sharing(name, 1, monkeypatch), 0
    for m, n, k in ((700, 200, 90), (300, 65, 1600), (1300, 257, 30)):
        a, b = (random((1, *shape), name, at) for at, shape in enumerate(((m, k), (k, n))))
        old, expected = (place(random((1, m, n), name, 3), name) for _ in range(2))
        a, b = place(a, name), place(b, name)
        kernel(a.view, b.view, expected.view, alpha=3, beta=2, threads=1)
        jobs += kernel.job(a.view, b.view, old.view, 1, 0, None, threads)[launch.JOB_AT["pack"] :][:8] != bytes(8)
        kernel(a.view, b.view, old.view, alpha=3, beta=2, threads=threads)
        assert old.array.tobytes() == expected.array.tobytes(), (m, n, k)
        assert old.untouched_around()
        assert b.untouched()
    assert jobs == 3


@pytest.mark.skipif(not pool.address(), reason="the compiled pool shares panels")
def test_a_product_by_its_own_transpose_shares_panels_too(monkeypatch):
    kernel = sharing("f32", 1, monkeypatch)
    if split._HALF % kernel._shares(600, 200).columns:
        pytest.skip("only panels of the tile unit, and of AVX2, divide a part of such a product")
    x = place(random((1, 600, 200), "f32", 1), "f32", "F")
    y = x.view._replace(shape=(1, 200, 600), strides=(x.view.strides[0], *x.view.strides[:0:-1]))
    one, many = (place(np.full((1, 600, 600), np.nan, np.float32), "f32") for _ in range(2))
    kernel(x.view, y, one.view, threads=1)
    kernel(x.view, y, many.view, threads=2)
    assert one.array.tobytes() == many.array.tobytes()


def test_what_is_small_or_runs_on_one_thread_packs_for_itself(monkeypatch):
    for least, threads in ((1, 1), (1 << 40, 3)):
        kernel = sharing("f32", least, monkeypatch)
        a, b, c = (place(random((1, *shape), "f32", 0), "f32") for shape in ((700, 90), (90, 200), (700, 200)))
        job = kernel.job(a.view, b.view, c.view, 1, 0, None, threads)
        assert job[launch.JOB_AT["pack"] :][:40] == bytes(40)
