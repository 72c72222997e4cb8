"""Products without packing: the general kernel has the bits of a chain of multiply-adds, and of the specialized one."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from gemmery.cpu import build, direct
from gemmery.cpu.fused import fma
from gemmery.cpu.target import host
from operands import LAYOUTS, numpy_dtype, place, problem, random

ROWS = ("C", "padded", "misaligned", "rows reversed")  # layouts with adjacent elements in rows
SCALARS = [(1, 0), (1, 1), (2.5, 0), (-0.5, 3), (0, 1)]
TYPES = ("f32", "f64")


def chain(a, b, old, alpha, beta):
    """alpha A B + beta C, each element one chain of multiply-adds over k."""
    add = fma() or (lambda x, y, z: x * y + z)
    totals = np.zeros(old.shape, old.dtype)
    for p in range(a.shape[2]):
        totals = add(a[:, :, p, None], b[:, None, p], totals)
    totals = totals * old.dtype.type(alpha)
    return totals if beta == 0 else add(old, old.dtype.type(beta), totals)


def multiply(a, b, c, alpha, beta, config):
    """The bytes of C; what is around C and the operands stays as it was."""
    kernel = build.direct(problem(a, b, c, scaled=(alpha, beta) != (1, 0)), config)
    kernel(a.view, b.view, c.view, alpha=alpha, beta=beta)
    assert a.untouched()
    assert b.untouched()
    assert c.untouched_around()
    return c.array.tobytes()


def operands(name, shape, layouts, old=None):
    m, n, k = shape
    values = random((1, m, k), name, 1), random((1, k, n), name, 2)
    a, b = (place(x, name, layout) for x, layout in zip(values, layouts, strict=False))
    # Without a beta the old C is not read: NaN there does not reach the result.
    return a, b, place(np.full((1, m, n), np.nan, numpy_dtype(name)) if old is None else old, name, layouts[2])


@pytest.mark.parametrize("name", TYPES)
def test_every_tile_has_the_bits_of_a_chain(name):
    """Every height alone and after taller tiles; widths that end a vector, or one column before or after."""
    lanes = host().lanes(numpy_dtype(name).itemsize)
    widths = sorted({1, 2, *(nv * lanes + more for nv in range(1, 5) for more in (-1, 0, 1))})
    draw = np.random.default_rng(1)
    for m in range(1, 36):
        for n in widths if m < 17 else draw.choice(widths, 3, replace=False):
            layouts = [str(draw.choice(kinds)) for kinds in (LAYOUTS, ROWS, ROWS)]
            alpha, beta = SCALARS[draw.integers(len(SCALARS))]
            k = int(draw.choice([0, 1, 2, 7]))
            old = random((1, m, int(n)), name, 3) if beta else None
            a, b, c = operands(name, (m, int(n), k), layouts, old)
            expected = chain(a.array, b.array, c.array.copy(), alpha, beta)
            assert multiply(a, b, c, alpha, beta, {}) == expected.tobytes(), (m, n, k, layouts, alpha, beta)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("layout", ROWS)
def test_many_rows_have_the_bits_of_few(name, layout):
    """Rows of so many that the first tile copies B: in every width of tiles, in one block of k and in several."""
    lanes = host().lanes(numpy_dtype(name).itemsize)
    for n in (1, lanes, lanes + 1, 3 * lanes - 1, 4 * lanes, 4 * lanes + 1, 7 * lanes + 3):
        for m, k in ((16, 9), (48, 1), (53, 29), (59, build.k_block(host()) + 9)):
            a, b, c = operands(name, (m, n, k), ("C", layout, layout))
            multiply(a, b, c, 1, 0, {})
            for first in range(0, m, 15):
                few = place(a.array[:, first : first + 15], name, "C")
                expected = place(np.full((1, few.array.shape[1], n), np.nan, numpy_dtype(name)), name, layout)
                bits = multiply(few, b, expected, 1, 0, {})
                assert c.array[:, first : first + 15].tobytes() == bits, (m, n, k, first)


@pytest.mark.process
def test_a_thread_with_a_small_stack_multiplies():
    """The copy of B is on the stack only where it is small: as shapes met often, and as new ones."""
    code = """
import threading
import numpy as np
import gemmery as gm

def products():
    for dtype in ("float32", "float64"):
        for k in (100, 300, 1100, *range(290, 300)):
            for _ in range(10):
                a, b = np.ones((200, k), dtype), np.ones((k, 256), dtype)
                results.append(bool((gm.matmul(a, b) == k).all()))

results = []
products()
threading.stack_size(64 << 10)
thread = threading.Thread(target=products)
thread.start()
thread.join()
print(len(results), all(results))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["520", "True"]), done.stderr


@pytest.mark.parametrize("name", TYPES)
def test_rows_in_one_set_of_the_cache_have_the_same_bits(name):
    k = 4096 // numpy_dtype(name).itemsize
    a, b, c = operands(name, (21, 5, k), ("C", "C", "C"))
    block = build.even(k, build.chain(problem(a, b, c)), 1)
    first, *later = (
        chain(a.array[..., p : p + block], b.array[:, p : p + block], c.array, 1, 0) for p in range(0, k, block)
    )
    assert multiply(a, b, c, 1, 0, {}) == sum(later, first).tobytes()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 8, 8), (5, 37, 3), (29, 33, 11), (3, 70, 40)])
def test_specialized_tiles_have_the_bits_of_general_ones(name, shape):
    draw = np.random.default_rng(shape)
    for alpha, beta in SCALARS[:4:2]:
        layouts = [str(draw.choice(kinds)) for kinds in (("C", "F", "padded", "reversed"), ROWS, ROWS)]
        bits = [
            multiply(*operands(name, shape, layouts), alpha, beta, config) for config in ({}, {"specialised": 1})
        ]  # fmt: skip
        assert bits[0] == bits[1], (alpha, beta, layouts)


def test_the_configs_choose_the_kernel():
    a, b, c = operands("f32", (9, 9, 9), "CCC")
    described = problem(a, b, c)
    general = build.direct(described, {})
    assert build.direct(described._replace(m=200, k=1, a_layout="col", scaled=True), {}) is general
    assert build.direct(described, {"specialised": 1}).address != general.address
    assert direct.cut(host(), "f32", "row", 9, 9, 9, False, 4).mr == 3  # three tiles of nearly equal height
