"""Roofline arithmetic: the least time that a kernel's work takes under each limit of a device.

Reference: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmery import dtypes
from gemmery.cuda.device import Device
from gemmery.problem import Problem

_UNITS = {"f32": "f32", "f64": "f64", "f16": "f32", "bf16": "f32"}  # CUDA cores sum half precision in f32
_TENSOR_UNITS = {"f32": "tensor_tf32", "f64": "tensor_f64", "f16": "tensor", "bf16": "tensor"}
WAVEFRONTS = 1  # of shared memory, a clock and multiprocessor: 128 bytes
ISSUED = 4  # warp instructions, a clock and multiprocessor: one by each of its four schedulers


@dataclass(frozen=True)
class Roofline:
    """Work and traffic of a kernel, and the performance that two limits of a device allow."""

    flops: float
    bytes: float
    peak: float  # GFLOP/s
    bandwidth: float  # GB/s
    intensity: float  # operations a byte
    attainable: float  # GFLOP/s: the bandwidth times the intensity, or the peak when that is less
    by: str  # "memory" or "compute"


def roofline(flops: float, moved: float, peak: float, bandwidth: float) -> Roofline:
    """Return the roofline of `flops` operations on `moved` bytes, for a peak in GFLOP/s and a bandwidth in GB/s.

    >>> roofline(2, 8, peak=346.5, bandwidth=86.4).attainable
    21.6
    """
    intensity = flops / moved if moved else 0.0
    by_memory = bandwidth * intensity
    by = "memory" if by_memory < peak else "compute"
    return Roofline(flops, moved, peak, bandwidth, intensity, min(peak, by_memory), by)


def unit(dtype: str, tensor: bool) -> str:
    """The unit that multiplies elements of a type, on tensor cores or on CUDA cores: a field of device.Rates.

    >>> unit("f16", tensor=True), unit("f16", tensor=False)
    ('tensor', 'f32')
    """
    return (_TENSOR_UNITS if tensor else _UNITS)[dtype]


def loaded(problem: Problem, bm: int, bn: int) -> float:
    """Bytes of A and B that blocks of bm x bn elements of C load: A once per bn columns, B once per bm rows.

    >>> loaded(Problem(1024, 1024, 1024, "f32", "f32"), 1, 1) / 1024**3
    8.0
    """
    of_a = problem.m * problem.k * -(-problem.n // bn)
    of_b = problem.k * problem.n * -(-problem.m // bm)
    return float(problem.batch * (of_a + of_b) * dtypes.get(problem.dtype).size)


def on_chip(device: Device, wavefronts: int, instructions: int) -> tuple[float, float]:
    """Seconds that wavefronts of shared memory take, and that warp instructions take to issue.

    Both assume that the work is spread evenly over all multiprocessors of the device, at its boost clock.

    >>> from gemmery.cuda.device import KNOWN
    >>> [f"{seconds:.1e}" for seconds in on_chip(KNOWN["h200"], 25_600, 86_880)]
    ['9.8e-08', '8.3e-08']
    """
    clocks = device.sms * device.clock * 1e9
    return wavefronts / (WAVEFRONTS * clocks), instructions / (ISSUED * clocks)
