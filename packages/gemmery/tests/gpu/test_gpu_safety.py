"""GPU rungs repeated, on several streams and threads at once, in graphs, and after errors."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gemmery import verify
from gemmery.cuda import driver
from gemmery.errors import DeviceError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gpu_operands import allowed, built, matrices, needed, place, problem, run
from operands import random

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())]

RUNGS = [pytest.param(rung, id=rung.name) for rung in CUDA]
SHAPES = [(130, 257, 300), (1, 1024, 1000), (20, 24, 300), (32, 16, 32)]  # one of them is for every rung


def prepared(rung):
    """A kernel of the rung in its first element type, its operands, and the result of a first run."""
    name = rung.dtypes[0]
    for shape in SHAPES:
        precision = needed(rung, name)
        a, b, c = matrices(shape, name, name, ("row", "col", "row"), guard=0)
        kernel = built(rung, problem(a, b, c, precision=precision))
        if kernel is not None:
            kernel(a.view(), b.view(), c.view())
            driver.synchronize()
            assert verify.check(c.result(), a.values, b.values, allowed(rung, precision), most_flops=1e7).ok
            return kernel, a, b, c, c.image().tobytes()
    raise AssertionError(f"{rung.name} takes none of {SHAPES}")


@pytest.mark.parametrize("rung", RUNGS)
def test_twenty_runs_give_the_same_bits(rung):
    kernel, a, b, c, first = prepared(rung)
    for _ in range(20):
        c.memory.fill(0xFF)
        kernel(a.view(), b.view(), c.view())
        driver.synchronize()
        assert c.image().tobytes() == first


@pytest.mark.parametrize("rung", RUNGS)
def test_two_streams_at_once(rung):
    kernel, a, b, c, first = prepared(rung)
    streams = [driver.Stream() for _ in range(2)]
    results = [replace(c, memory=driver.Memory(c.memory.size)) for _ in range(16)]
    for result in results:
        result.memory.fill(0xFF)
    driver.synchronize()
    for at, result in enumerate(results):
        kernel(a.view(), b.view(), result.view(streams[at % 2].handle))
    for stream in streams:
        stream.synchronize()
    assert {result.image().tobytes() for result in results} == {first}


def test_a_launch_that_begins_early_reads_what_the_one_before_wrote():
    """A chain of vector products between two vectors in turn, each of what the last one gave: an L1 may hold what
    either was before. Waiting in between changes no bit.
    """
    n = 256
    x, _, y = matrices((1, n, n), "f32", "f32", guard=0)
    w = place(random((1, n, n), "f32", 2) / np.float32(16), "f32", "col", guard=0)
    kernel = built(find(CUDA, "gemv_vectorized"), problem(x, w, y))
    assert kernel.geometry.overlaps == (driver.device().capability >= 90)

    def chain(wait):
        two = [replace(y, memory=driver.Memory(y.memory.size)) for _ in range(2)]
        for vector in two:
            vector.memory.fill(0xFF)
        driver.synchronize()
        given = [x, *(two[step % 2] for step in range(64))]
        for last, result in pairwise(given):
            kernel(last.view(), w.view(), result.view())
            if wait:
                driver.synchronize()
        driver.synchronize()
        return given[-1].image()

    expected = chain(wait=True)
    assert np.isfinite(y.within(expected)).all()
    for _ in range(20):
        assert np.array_equal(chain(wait=False), expected)


def test_ten_host_threads_at_once():
    """Each thread builds its own kernels and launches them on its own stream."""
    expected = {rung.name: prepared(rung)[4] for rung in CUDA}

    def work(number):
        stream = driver.Stream()
        for at in range(len(CUDA)):
            rung = CUDA[(at + number) % len(CUDA)]
            name = rung.dtypes[0]
            for shape in SHAPES:
                a, b, c = matrices(shape, name, name, ("row", "col", "row"), guard=0)
                kernel = built(rung, problem(a, b, c, precision=needed(rung, name)))
                if kernel is not None:
                    kernel(a.view(), b.view(), c.view(stream.handle))
                    stream.synchronize()
                    assert c.image().tobytes() == expected[rung.name], rung.name
                    break
        return number

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(work, range(10))) == list(range(10))


def test_one_launch_used_by_ten_threads():
    """The arguments of one call do not reach another, in any order of the threads."""
    kernel, a, b, c, first = prepared(find(CUDA, "simt_naive"))
    ready = kernel.ready(a.view(), b.view(), c.view())

    def work(number):
        stream = driver.Stream()
        results = [replace(c, memory=driver.Memory(c.memory.size)) for _ in range(100)]
        for result in results:
            result.memory.fill(0xFF)
        driver.synchronize()
        for result in results:
            ready(a.view().pointer, b.view().pointer, result.view().pointer, stream.handle)
        stream.synchronize()
        return {result.image().tobytes() for result in results}

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(10) as pool:
            assert set().union(*pool.map(work, range(10))) == {first}
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_graph_does_what_its_calls_did(rung):
    kernel, a, b, c, first = prepared(rung)
    stream = driver.Stream()
    with driver.on(0), driver.Graph(stream) as graph:
        kernel(a.view(), b.view(), c.view(stream.handle))
        kernel(a.view(), b.view(), c.view(stream.handle))
    c.memory.fill(0xFF)
    driver.synchronize()
    assert c.image().tobytes() != first, "capturing ran it"
    for _ in range(3):
        c.memory.fill(0xFF)
        driver.synchronize()
        with driver.on(0):
            graph.launch()
        stream.synchronize()
        assert c.image().tobytes() == first
    other = place(random(a.shape, a.name, 77), a.name, "row", guard=0)
    a.memory.write(other.before)
    with driver.on(0):
        graph.launch()
    stream.synchronize()
    assert verify.check(c.result(), other.values, b.values, allowed(rung, needed(rung, a.name)), most_flops=1e7).ok


def works():
    """Check a product: the context still works."""
    assert run(find(CUDA, "simt_naive"), *matrices((33, 35, 37), "f32", "f32"))
    return True


def test_after_a_refused_launch_the_device_works():
    rung = find(CUDA, "simt_linear")
    with pytest.raises(RefusedError, match="2048 threads per block"):
        rung.build(Problem(40, 40, 40, "f32", "f32", device="cuda:0"), {"threads": 2048})
    with pytest.raises(DeviceError, match="no device cuda:99"):
        rung.build(Problem(40, 40, 40, "f32", "f32", device="cuda:99"), rung.default)
    assert works()


def test_after_memory_ran_out_the_device_works():
    with pytest.raises(DeviceError, match="free arrays on the device"):
        driver.Memory(2**50)
    assert works()


def test_after_scratch_memory_ran_out_the_device_works():
    """Packed copies of a broadcast operand may need more than there is; C is then left alone."""
    rung = find(CUDA, "simt_packed")
    a, b, c = matrices((64, 64, 64), "f64", "f64", batch=2)
    kernel = rung.build(problem(a, b, c)._replace(m=8192, n=8192, k=8192, batch=2000), rung.default)
    with pytest.raises(DeviceError, match="free arrays on the device"):
        kernel(a.view(), b.view(), c.view())
    driver.synchronize()
    assert np.array_equal(c.image(), c.before)
    assert run(rung, a, b, c)
    assert works()
