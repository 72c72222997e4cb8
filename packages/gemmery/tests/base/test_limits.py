"""Peak and bandwidth kernels do what they count, and the roofline takes the lower limit."""

import ctypes

import numpy as np
import pytest

from gemmery import limits
from gemmery.cpu import llvm
from gemmery.cpu.target import Target, host
from gemmery.errors import ArgumentError
from gemmery.problem import Problem

PLAIN = Target("avx2", frozenset({"avx2", "fma"}))
DOTS = Target("avx512", frozenset({"avx512_vnni", "avx512_bf16"}))


@pytest.mark.parametrize(
    ("dtype", "target", "expected"),
    [
        ("f32", PLAIN, "f32"),
        ("f16", DOTS, "f32"),
        ("complex128", DOTS, "f64"),
        ("bf16", PLAIN, "f32"),
        ("bf16", DOTS, "bf16"),
        ("int8", PLAIN, "int16"),
        ("uint16", DOTS, "int16"),
        ("uint8", DOTS, "int8"),
        ("uint64", DOTS, "int64"),
    ],
)
def test_the_unit_that_sets_the_peak(dtype, target, expected):
    assert limits.unit(dtype, target) == expected


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("isa", ["avx512", "avx2", "generic"])
def test_the_peak_kernel_holds_the_multiply_adds_it_counts(dtype, isa):
    """As many multiply-adds in the loop as accumulators: none merged, none moved out."""
    target = host().limited(isa)
    if target.machine not in ("x86_64", "amd64") or target.isa != isa:
        pytest.skip(f"this CPU has no {isa}")
    name = limits.unit(dtype, target)
    text = llvm.assembly(target, f"peak_{name}", lambda: limits._peak_module(target, name))
    words = {"f32": ("vfmadd", "mulps"), "f64": ("vfmadd", "mulpd"), "bf16": ("vdpbf16ps",), "int8": ("vpdpbusd",)}
    words |= {"int16": ("pmullw",), "int32": ("pmulld", "pmuludq"), "int64": ("pmullq", "pmuludq")}
    count = sum(word in line for line in text.splitlines() for word in words[name])
    assert count >= limits._accumulators(target)


@pytest.mark.parametrize("copy", [False, True])
def test_the_bandwidth_kernel_touches_every_byte(copy):
    target = host()
    name = "bandwidth_copy" if copy else "bandwidth_read"
    kernel = limits._function(
        name, lambda: limits._stream_module(target, name, copy), ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p
    )
    size = 16 * 8 * target.vector_bytes
    source = np.random.default_rng(0).integers(-1000, 1000, size // 8)
    there = np.zeros(size // 8, np.int64)
    kernel(size, source.ctypes.data, there.ctypes.data)
    if copy:
        assert np.array_equal(there, source)
    else:
        assert there.sum() == source.sum()


def test_peak_and_bandwidth_are_measured():
    assert limits.peak("f32") > 0
    assert limits.peak("f32", threads=2) > 0
    found = limits.bandwidth()
    assert found.read > 0
    assert found.copy > 0


@pytest.mark.parametrize("measure", [lambda: limits.peak("f32", 0), lambda: limits.bandwidth(0)])
def test_at_least_one_thread(measure):
    with pytest.raises(ArgumentError, match="threads=0"):
        measure()


def test_a_large_product_is_bound_by_compute_and_a_vector_by_memory():
    square = Problem(4096, 4096, 4096, "f32", "f32")
    assert limits.attainable(square, 100.0, 20.0) == limits.Bound(100.0, "compute")
    vector = limits.attainable(Problem(4096, 1, 4096, "f32", "f32"), 100.0, 20.0)
    assert vector.by == "memory"
    assert vector.gflops == pytest.approx(2 * 4096**2 / (4 * (4096**2 + 2 * 4096)) * 20.0)


def test_operands_in_cache_do_not_wait_for_memory():
    vector = Problem(64, 1, 64, "f32", "f32")
    assert limits.attainable(vector, 100.0, 20.0).by == "memory"
    assert limits.attainable(vector, 100.0, 20.0, cache=1 << 20).by == "compute"


def test_an_empty_product_has_a_bound_that_is_a_number():
    empty = Problem(0, 0, 0, "f32", "f32")
    assert limits.attainable(empty, 100.0, 20.0) == limits.Bound(100.0, "compute")
