"""The same bits for every number of threads and in every floating-point mode of the caller."""

from __future__ import annotations

import numpy as np
import pytest

import probes
from gemmery import dispatch
from gemmery.cpu import pool, target
from gemmery.cpu.split import Unit
from gemmery.cpu.target import host
from operands import LAYOUTS, STORED, numpy_dtype, place, problem, random
from probes import floating_mode

MODES = {"as it is": 0, "flushing": 0x8040, "upward": 0x4000, "toward zero": 0x6000}  # bits of MXCSR
NAMES = ("f32", "f64", "f16", "bf16", "complex64", "complex128", "int8", "int32", "int64")
LONG = (
    1,
    2,
    3,
    7,
    13,
    63,
    64,
    65,
    97,
    129,
    193,
    257,
    1023,
    1025,
)  # ends of tiles and of the parts of a row, and others
x86 = pytest.mark.skipif(host().machine not in ("x86_64", "amd64"), reason="the modes are those of MXCSR")
compiled = pytest.mark.skipif(not pool.address(), reason="this system has no compiled workers")


def shapes(draw):
    """(m, n, k): one row or one column half of the time."""
    long, middle, short = (int(draw.choice(LONG)) for _ in range(3))
    depth = int(draw.choice([1, 2, 17, 100, 333]))
    return [
        (1, long, depth), (1, long, 3 * depth), (long, 1, depth), (middle, long, depth), (long, short, depth),
        (min(short, 7), long, depth),
    ][draw.integers(0, 6)]  # fmt: skip


def operands(draw, name, shape, tiny):
    """A placed operand; where `tiny`, floats are small enough for some products to be subnormal."""
    x = random((1, *shape), name, int(draw.integers(1 << 30)))
    if tiny and name in ("f32", "f64", "complex64", "complex128"):
        x = (x * np.sqrt(np.finfo(x.real.dtype).tiny)).astype(x.dtype)
    return place(x, name, str(draw.choice(LAYOUTS)))


def product(a, b, out, stored, threads, scaled):
    """The bytes of a b in memory of its own, by a kernel made anew for this product."""
    c = place(np.ones((1, a.array.shape[1], b.array.shape[2]), numpy_dtype(out)), out, stored)
    described = problem(a, b, c, "", scaled)
    rung, config, _ = dispatch.choice(described)
    alpha, beta = (3, 2) if scaled else (1, 0)
    rung.build(described, config)(a.view, b.view, c.view, alpha=alpha, beta=beta, threads=threads)
    assert c.untouched_around()
    return c.array.tobytes()


@x86
@pytest.mark.parametrize("seed", range(8))
def test_no_bit_depends_on_the_number_of_threads(seed, monkeypatch):
    # Small products are cut for threads as large ones are.
    monkeypatch.setattr(target, "override", target.constants()._replace(worth=1))
    draw = np.random.default_rng(seed)
    for _ in range(30):
        name, stored, mode = str(draw.choice(NAMES)), str(draw.choice(STORED)), str(draw.choice(list(MODES)))
        (m, n, k), tiny, scaled = shapes(draw), bool(draw.integers(2)), bool(draw.integers(2))
        a, b = operands(draw, name, (m, k), tiny), operands(draw, name, (k, n), tiny)
        with floating_mode(MODES[mode]):
            bits = {threads: product(a, b, name, stored, threads, scaled) for threads in (1, 2, 3, 5, 17)}
        differing = [threads for threads in bits if bits[threads] != bits[1]]
        assert not differing, f"{name} {m} x {k} by {k} x {n}, C {stored}, {mode}, scaled: {scaled}"


@pytest.mark.parametrize("name", ["f32", "f64", "complex64", "complex128"])
@pytest.mark.parametrize("columns", [65, 129, 1025])
def test_the_last_column_of_a_row_is_summed_like_the_others(name, columns, monkeypatch):
    monkeypatch.setattr(target, "override", target.constants()._replace(worth=1))
    x, y = random((1, 1, 1000), name, 1), random((1, 1000, columns), name, 2)
    for layout_b in ("C", "F", "strided"):
        a, b = place(x, name), place(y, name, layout_b)
        transposed = place(y.transpose(0, 2, 1), name, layout_b), place(x.transpose(0, 2, 1), name)
        for first, second in [(a, b), transposed]:
            alone = product(first, second, name, "C", 1, False)
            for threads in (2, 16):
                assert product(first, second, name, "C", threads, False) == alone


@x86
@compiled
@pytest.mark.parametrize("change", MODES.values(), ids=MODES)
def test_workers_compute_in_the_mode_of_the_caller(change):
    """Each part waits until every thread has one, so that workers born in another mode have computed some."""
    gate, (array, view) = probes.Gate(), probes.zeros(1, 3, 1)
    probes.mark(Unit(1, 1, 1e6))(view, view, view, threads=3)
    with floating_mode(change) as mode:
        opener = probes.opened(gate, 3)
        probes.modes(Unit(1, 1, 1e6))(view, view, view, bias=gate.view, threads=3)
        opener.join()
    assert (array & 0xFFC0 == mode & 0xFFC0).all()  # the bits below are flags that arithmetic sets


@x86
def test_python_threads_compute_in_the_mode_of_the_caller():
    """The helper of the first product, born in the ordinary mode, works at the second as well."""
    for change in (0, 0x8040):
        gate, (array, view) = probes.Gate(), probes.zeros(1, 2, 1)
        job = probes.modes(Unit(1, 1, 1e6)).job(view, view, view, 1, 0, gate.view, 2)
        opener = probes.opened(gate, 2)
        with floating_mode(change) as mode:
            pool.run_on_python_threads(job)
        opener.join()
        assert (array & 0xFFC0 == mode & 0xFFC0).all()


@x86
@compiled
def test_the_mode_of_the_caller_stays_its_own():
    _, view = probes.zeros(1, 40, 40)
    with floating_mode(0x8040) as mode:
        probes.mark(Unit(1, 1, 1e6))(view, view, view, threads=3)
        with floating_mode(0) as after:
            assert after & 0xFFC0 == mode & 0xFFC0
