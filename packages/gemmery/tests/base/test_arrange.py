"""Batches as runs of a three-dimensional kernel: the number of runs, and that they are the same product."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gemmery.arrange import arrange, layout, result_shape
from gemmery.errors import ShapeError


def arranged(a, b, c, **options):
    return arrange(a.shape, a.strides, b.shape, b.strides, c.shape, c.strides, c.itemsize, **options)


def by_hand(a, b, c, form):
    """Run the form with NumPy on the memory of a, b and c."""
    for offsets in form.offsets():
        sizes = (form.batch, form.m, form.k), (form.batch, form.k, form.n), (form.batch, form.m, form.n)
        x, y, z = (
            np.ndarray(size, base.dtype, memory, int(base.ctypes.data - memory.ctypes.data) + offset, strides)
            for (base, memory), size, strides, offset in zip(
                (a, b, c), sizes, (form.a, form.b, form.c), offsets, strict=True
            )
        )
        z[...] = x @ y


def memory_of(x):
    while x.base is not None:
        x = x.base
    return x


def numbers(*shape):
    return np.random.default_rng(0).integers(-9, 9, shape).astype(float)


CASES = {  # what is multiplied -> kernel runs, and the (batch, m, n, k) of each
    "matrices": (lambda: (numbers(3, 4), numbers(4, 5)), 1, (1, 3, 5, 4)),
    "vectors": (lambda: (numbers(4), numbers(4)), 1, (1, 1, 1, 4)),
    "matrix and vector": (lambda: (numbers(3, 4), numbers(4)), 1, (1, 3, 1, 4)),
    "vector and batch": (lambda: (numbers(4), numbers(6, 4, 5)), 1, (6, 1, 5, 4)),
    "one batch dimension": (lambda: (numbers(6, 3, 4), numbers(6, 4, 5)), 1, (6, 3, 5, 4)),
    "two that one stride walks": (lambda: (numbers(2, 6, 3, 4), numbers(2, 6, 4, 5)), 1, (12, 3, 5, 4)),
    "one B for all: more rows": (lambda: (numbers(2, 6, 3, 4), numbers(4, 5)), 1, (1, 36, 5, 4)),
    "rows out of a batch of vectors": (lambda: (numbers(6, 1, 4), numbers(4, 5)), 1, (1, 6, 5, 4)),
    "one A for vectors: more columns": (lambda: (numbers(3, 4), numbers(6, 4, 1)), 1, (1, 3, 6, 4)),
    "an outer product of batches": (lambda: (numbers(7, 1, 3, 4), numbers(6, 4, 5)), 6, (7, 3, 5, 4)),
    "lengths of one": (lambda: (numbers(1, 6, 1, 3, 4), numbers(6, 1, 4, 5)), 1, (6, 3, 5, 4)),
    "reversed": (lambda: (numbers(6, 3, 4)[::-1], numbers(6, 4, 5)), 1, (6, 3, 5, 4)),
    "both reversed as one": (lambda: (numbers(2, 6, 3, 4)[::-1, ::-1], numbers(2, 6, 4, 5)), 1, (12, 3, 5, 4)),
    "two strides": (lambda: (numbers(2, 6, 3, 4)[::-1], numbers(2, 6, 4, 5)), 2, (6, 3, 5, 4)),
    "transposed batch": (lambda: (numbers(6, 2, 3, 4).swapaxes(0, 1), numbers(2, 6, 4, 5)), 2, (6, 3, 5, 4)),
    "every other matrix of B": (lambda: (numbers(6, 3, 4), numbers(12, 4, 5)[::2]), 1, (6, 3, 5, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_takes_as_few_runs_as_it_can(name):
    make, runs, (batch, m, n, k) = CASES[name]
    a, b = make()
    c = np.zeros(result_shape(a.shape, b.shape))
    form = arranged(a, b, c)
    assert (form.runs, form.batch, form.m, form.n, form.k) == (runs, batch, m, n, k)
    by_hand((a, memory_of(a)), (b, memory_of(b)), (c, c), form)
    assert np.array_equal(c, a @ b)


def test_without_more_columns_a_shared_a_is_a_batch():
    a, b, c = numbers(3, 4), numbers(6, 4, 1), np.zeros((6, 3, 1))
    form = arranged(a, b, c, more_columns=False)
    assert (form.batch, form.m, form.n) == (6, 3, 1)


def test_every_form_of_a_random_batch_is_the_product():
    draw = np.random.default_rng(1)
    for one, two in itertools.product(itertools.product((1, 2, 3), repeat=3), repeat=2):
        shape = tuple(max(x, y) for x, y in zip(one, two, strict=True) if 1 in (x, y) or x == y)
        if len(shape) < 3:
            continue
        a, b = numbers(*one, 2, 3), numbers(*two, 3, 2)
        order = draw.permutation(5)
        c = np.zeros(np.array([*shape, 2, 2])[order]).transpose(np.argsort(order))
        form = arranged(a, b, c)
        by_hand((a, a), (b, b), (c, memory_of(c)), form)
        assert np.array_equal(c, a @ b)


PAIRS = ((1, 1), (1, 2), (3, 1), (2, 2))  # lengths of one batch dimension in A and in B


@pytest.mark.parametrize("more_columns", [True, False])
def test_a_contiguous_c_keeps_adjacent_elements(more_columns):
    for pairs in itertools.product(PAIRS, repeat=4):
        one, two = zip(*pairs, strict=True)
        for m, n in itertools.product((1, 2), repeat=2):
            a, b = numbers(*one, m, 3), numbers(*two, 3, n)
            c = np.zeros(result_shape(a.shape, b.shape))
            form = arranged(a, b, c, more_columns=more_columns)
            assert layout(form.m, form.n, *form.c[1:], 8) != "any"
            by_hand((a, a), (b, b), (c, c), form)
            assert np.array_equal(c, a @ b)


def test_loops_are_walked_without_a_list_of_them():
    a, b = np.zeros((1, 1)), np.zeros((1, 1))
    many = (10**4,) * 4
    a, b = np.broadcast_to(a, (*many, 1, 1)), np.broadcast_to(b, (*many, 1, 1))
    strides = (10**13, 8, 10**10, 8 * 10**4, 8, 8)
    form = arrange(a.shape, strides, b.shape, strides[::-1], (*many, 1, 1), strides, 8)
    assert form.runs == 10**12
    assert sum(1 for _ in itertools.islice(form.offsets(), 100)) == 100


def test_layouts_have_names():
    assert layout(4, 5, 40, 8, 8) == "row"
    assert layout(4, 5, -48, 8, 8) == "row"
    assert layout(4, 5, 0, 8, 8) == "row"
    assert layout(4, 1, 8, 999, 8) == "row"
    assert layout(4, 5, 8, 32, 8) == "col"
    assert layout(1, 5, 999, 32, 8) == "col"
    assert layout(4, 5, 40, -8, 8) == "any"


def test_shapes_follow_numpy():
    for one, two in itertools.product(
        [(3,), (2, 3), (1, 2, 3), (4, 2, 3), (5, 1, 2, 3)], [(3,), (3, 6), (4, 3, 6), (1, 3, 6)]
    ):
        assert result_shape(one, two) == np.matmul(np.zeros(one), np.zeros(two)).shape
    with pytest.raises(ShapeError, match="batch dimensions"):
        result_shape((2, 2, 3), (3, 3, 6))
