"""Measured limits of a machine: the peak of its multiply-adds and the bandwidth of its memory.

Reference: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemmery import dtypes
from gemmery.cpu import arm, jit, tile_unit
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import lanes_of, size_of, vector
from gemmery.cpu.target import Target, host
from gemmery.cpu.ukernel import MATRICES, STEPS, arm_step
from gemmery.errors import ArgumentError
from gemmery.problem import Problem

SAMPLES = 20
ALONE_SECONDS = 0.003  # shorter than a time slice: on a busy machine some samples still run undisturbed
TOGETHER_SECONDS = 0.02  # starting the threads takes 0.05 ms
_UNIT = {"f16": "f32", "complex64": "f32", "complex128": "f64"} | {
    f"uint{bits}": f"int{bits}" for bits in (8, 16, 32, 64)
}
_SMALLEST, _LARGEST = 64 << 20, 1 << 30  # bytes read for the bandwidth: more than any L3


@dataclass(frozen=True)
class Bandwidth:
    """Memory bandwidth in 10**9 bytes per second: reads only, and a copy (bytes read plus bytes written)."""

    read: float
    copy: float


@dataclass(frozen=True)
class Bound:
    """The performance that a problem can reach on a machine, and the limit that sets it."""

    gflops: float
    by: str  # "compute" or "memory"


def attainable(problem: Problem, peak_gflops: float, bandwidth_gbs: float, cache: int = 0) -> Bound:
    """Return the roofline of a problem: the peak, or its operations per byte times the bandwidth if that is less.

    A problem whose operands fit into `cache` bytes is not limited by memory.

    >>> attainable(Problem(4096, 1, 4096, "f32", "f32"), peak_gflops=100.0, bandwidth_gbs=20.0)
    Bound(gflops=9.99..., by='memory')
    """
    by_memory = problem.intensity * bandwidth_gbs
    if problem.bytes <= cache or by_memory >= peak_gflops:
        return Bound(peak_gflops, "compute")
    return Bound(by_memory, "memory")


def unit(dtype: str, target: Target | None = None) -> str:
    """Return the element type whose multiply-adds set the peak of `dtype`: f32 for f16, which is widened.

    bf16 and int8 use the tile unit or dot-product instructions of a CPU that has them, else they are widened too.
    """
    target = target or host()
    name = _UNIT.get(dtypes.get(dtype).name, dtypes.get(dtype).name)
    if (name in STEPS and target.has_tiles) or arm_step(target, name):
        return name
    if name == "bf16" and not target.has_bf16_dot:
        return "f32"
    return "int16" if name == "int8" and not target.has_vnni else name


def peak(dtype: str, threads: int = 1) -> float:
    """Measure 10**9 operations per second of multiply-adds for `dtype`, on `threads` cores, in registers only.

    Returns the best of several samples.

    Raises ArgumentError for threads below 1.
    """
    if threads < 1:
        raise ArgumentError(f"threads={threads}: it must be at least 1")
    target, name = host(), unit(dtype)
    kernel = _function(f"peak_{name}", lambda: _peak_module(target, name), ctypes.c_int64, ctypes.c_void_p)
    buffers = [_aligned(64 * (_accumulators(target) + 2)) for _ in range(threads)]
    per_step = _accumulators(target) * 2 * target.vector_bytes // dtypes.get(name).size
    by = arm_step(target, name)
    if by and by[0] in MATRICES:  # 2 x 2 sums of 8 bytes of k
        per_step *= 2
    if name in STEPS and target.has_tiles:
        per_step = tile_unit.PEAK_STEP // dtypes.get(name).size

    def run(index: int, steps: int) -> None:
        kernel(steps, buffers[index].ctypes.data)

    return _best(run, threads) * per_step * threads / 1e9


def bandwidth(threads: int = 1) -> Bandwidth:
    """Measure the memory bandwidth of `threads` cores together, on an array of four times the last-level cache.

    Raises ArgumentError for threads below 1.
    """
    if threads < 1:
        raise ArgumentError(f"threads={threads}: it must be at least 1")
    target = host()
    block = 8 * target.vector_bytes
    size = min(max(4 * target.l3, _SMALLEST), _LARGEST) // threads // block * block
    source, copy = _aligned(size * threads), _aligned(size * threads)
    parameters = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    read = _function("bandwidth_read", lambda: _stream_module(target, "bandwidth_read", False), *parameters)
    write = _function("bandwidth_copy", lambda: _stream_module(target, "bandwidth_copy", True), *parameters)
    sums = _aligned(block * threads)

    def reading(index: int, times: int) -> None:
        for _ in range(times):
            read(size, source.ctypes.data + index * size, sums.ctypes.data + index * block)

    def copying(index: int, times: int) -> None:
        for _ in range(times):
            write(size, source.ctypes.data + index * size, copy.ctypes.data + index * size)

    total, passes = size * threads / 1e9, 7  # one pass takes milliseconds
    return Bandwidth(_best(reading, threads, passes) * total, 2 * _best(copying, threads, passes) * total)


def _accumulators(target: Target) -> int:
    """Return how many independent sums hide the latency of a multiply-add and fit in the register file."""
    return 24 if target.isa == "avx512" or target.is_arm else 12


def _peak_module(target: Target, name: str) -> Module:
    """A loop of independent multiply-adds on registers; each sum has its own start, or LLVM would merge them."""
    module = Module(target)
    if name in STEPS and target.has_tiles:
        tile_unit.define_peak(module, f"peak_{name}", name)
        return module
    with module.function(f"peak_{name}", ("i64", "n"), ("ptr", "p")) as f:
        sums = {"bf16": "float", "int8": "i32"}.get(name, dtypes.get(name).llvm)
        wide = vector(target.vector_bytes // size_of(sums), sums)
        x, y = f.load(wide, f["p"]), f.load(wide, f["p"] + 64)
        places = [f["p"] + 64 * (2 + i) for i in range(_accumulators(target))]
        totals = [f.var(f.load(wide, place)) for place in places]
        with f.loop(0, f["n"]):
            for total in totals:
                total.value = _multiply_add(f, name, total.value, x, y)
        for total, place in zip(totals, places, strict=True):
            f.store(total.value, place)
    return module


def _multiply_add(f: Function, name: str, total: Value, x: Value, y: Value) -> Value:
    """One step. Floats and integers run total * x + y: with x * y instead, the product would leave the loop."""
    if by := arm_step(f.target, name):
        return arm.instruction(f, by[0], dtypes.get(name).llvm, total, x, y)
    if name == "bf16":
        pair = vector(2 * lanes_of(x.type), "bfloat")
        return f.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", x.type, total, f.bitcast(x, pair), f.bitcast(y, pair))
    if name == "int8":
        four = vector(4 * lanes_of(x.type), "i8")
        return f.intrinsic("llvm.x86.avx512.vpdpbusd.512", x.type, total, f.bitcast(x, four), f.bitcast(y, four))
    return f.fma(total, x, y)


def _stream_module(target: Target, name: str, copy: bool) -> Module:
    """Read `n` bytes, eight vectors per step, and add them up into `to`, or store them there."""
    module = Module(target)
    with module.function(name, ("i64", "n"), ("ptr", "from"), ("ptr", "to")) as f:
        width = target.vector_bytes
        wide = vector(width // 8, "i64")
        totals = [f.var(f.zero(wide)) for _ in range(8)]
        with f.loop(0, f["n"], 8 * width) as i:
            for lane, total in enumerate(totals):
                value = f.load(wide, f["from"] + i + lane * width)
                if copy:
                    f.store(value, f["to"] + i + lane * width)
                else:
                    total.value = total.value + value
        if not copy:
            for lane, total in enumerate(totals):
                f.store(total.value, f["to"] + lane * width)
    return module


def _function(name: str, generate: Callable[[], Module], *parameters: type) -> Callable[..., None]:
    """Return a compiled function that releases the GIL while it runs."""
    address = jit.load(host(), name, generate)[name]
    call: Callable[..., None] = ctypes.CFUNCTYPE(None, *parameters)(address)
    return call


def _aligned(size: int) -> NDArray[np.uint8]:
    """Return `size` bytes aligned to a cache line, with every page touched and every byte 0x3f.

    That is 0.75 in f32 and bf16 and 0.0005 in f64: sums do not overflow or become subnormal, which is 3 times slower.
    """
    whole = np.full(size + 64, 0x3F, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + size]


def _best(run: Callable[[int, int], None], threads: int, samples: int = SAMPLES) -> float:
    """Return the steps per second of `run(thread, steps)` on `threads` threads at once, the best of the samples."""
    with ThreadPoolExecutor(threads) as pool:

        def seconds(steps: int) -> float:
            start = time.perf_counter()
            if threads == 1:
                run(0, steps)
            else:
                list(pool.map(run, range(threads), [steps] * threads))
            return time.perf_counter() - start

        def quickest(steps: int, of: int) -> float:
            return max(min(seconds(steps) for _ in range(of)), 1e-9)

        least = ALONE_SECONDS if threads == 1 else TOGETHER_SECONDS
        steps = 1
        while (elapsed := quickest(steps, of=3)) < least:
            steps = min(16 * steps, max(2 * steps, int(1.2 * steps * least / elapsed)))
        return steps / quickest(steps, of=samples)
