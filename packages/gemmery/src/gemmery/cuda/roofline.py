"""Roofline arithmetic: the time that a kernel's work takes under each limit of a device.

Reference: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gemmery import dtypes
from gemmery.cuda.device import Device
from gemmery.problem import Problem

_UNITS = {"f32": "f32", "f64": "f64", "f16": "f32", "bf16": "f32"}  # CUDA cores sum half precision in f32
_PRODUCT = re.compile(r"(?:wmma\.|wgmma\.|tcgen05\.)?mma(?:_async)?\.")
_TENSOR_UNITS = {"f64": "tensor_f64", "tf32": "tensor_tf32"}  # types in opcodes of PTX; the others are half precision
_TENSOR_UNITS |= dict.fromkeys(
    (*(row.ptx for row in dtypes.DTYPES if row.size == 1 and row.ptx), "f8f6f4", "i8"), "tensor_8"
)
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


def unit(dtype: str, opcodes: Iterable[str]) -> str:
    """The unit on which a kernel multiplies, by its opcodes in PTX: a field of device.Rates.

    Without a product on tensor cores it is the CUDA cores', for elements of a type.

    >>> unit("f64", ["wgmma.mma_async.sync.m64n128k32.s32.s8.s8"]), unit("f16", ["fma.rn.f32"])
    ('tensor_8', 'f32')
    """
    for opcode in filter(_PRODUCT.match, opcodes):
        units = {_TENSOR_UNITS[part] for part in re.split(r"\.|::", opcode) if part in _TENSOR_UNITS}
        return units.pop() if units else "tensor"
    return _UNITS.get(dtype, "f32")


def loaded(problem: Problem, bm: int, bn: int) -> float:
    """Bytes of A and B that blocks of bm x bn elements of C load: A once per bn columns, B once per bm rows.

    >>> loaded(Problem(1024, 1024, 1024, "f32", "f32"), 1, 1) / 1024**3
    8.0
    """
    of_a = problem.m * problem.k * -(-problem.n // bn)
    of_b = problem.k * problem.n * -(-problem.m // bm)
    return float(problem.batch * (of_a + of_b) * dtypes.get(problem.dtype).size)


def roofs(device: Device, unit: str, flops: int, sectors: int, wavefronts: int, instructions: int) -> dict[str, float]:
    """The seconds that counted work takes under each limit of a device without caches.

    They assume that the work is spread evenly over all multiprocessors of the device, at its boost clock, and that
    every sector of 32 bytes comes from memory; a device with caches may take less.

    >>> from gemmery.cuda.device import KNOWN
    >>> limits = roofs(KNOWN["h200"], "f32", 2 * 128**3, 8_192, 25_600, 86_888)
    >>> {name: f"{seconds * 1e6:.3f} us" for name, seconds in limits.items()}
    {'compute': '0.063 us', 'memory': '0.055 us', 'shared': '0.098 us', 'issue': '0.083 us'}
    """
    clocks = device.sms * device.clock * 1e9
    return {
        "compute": flops / (device.peak(unit) * 1e9),
        "memory": 32 * sectors / (device.bandwidth * 1e9),
        "shared": wavefronts / (WAVEFRONTS * clocks),
        "issue": instructions / (ISSUED * clocks),
    }
