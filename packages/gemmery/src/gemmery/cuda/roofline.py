"""How much of a device a launch fills, and the time that a kernel's work takes under each limit of it.

Reference: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009; NVIDIA,
CUDA Programming Guide, "Multiprocessor Level" and "Technical Specifications per Compute Capability". The rules of
occupancy are those of the driver's cuOccupancyMaxActiveBlocksPerMultiprocessor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gemmery import dtypes
from gemmery.cuda.device import WARP, Device
from gemmery.problem import Problem

_UNITS = {"f32": "f32", "f64": "f64", "f16": "f32", "bf16": "f32"}  # CUDA cores sum half precision in f32
_PRODUCT = re.compile(r"(?:wmma\.|wgmma\.|tcgen05\.)?mma(?:_async)?\.")
_TENSOR_UNITS = {"f64": "tensor_f64", "tf32": "tensor_tf32"}  # types in opcodes of PTX; the others are half precision
_TENSOR_UNITS |= dict.fromkeys(
    (*(row.ptx for row in dtypes.DTYPES if row.size == 1 and row.ptx), "f8f6f4", "i8"), "tensor_8"
)
WAVEFRONTS = 1  # of shared memory, a clock and multiprocessor: 128 bytes
REGISTER_UNIT = 256  # registers are allocated to a warp in this unit
PARTITIONS = 4  # of a multiprocessor, each with 1/4 of its registers and warps
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


@dataclass(frozen=True)
class Occupancy:
    """How much of a device one launch fills."""

    limits: dict[str, int]  # blocks per multiprocessor that each resource allows
    by: tuple[str, ...]  # the resources that limit it
    blocks: int  # that a multiprocessor runs at once
    warps: int
    most_warps: int  # that a multiprocessor holds
    share: float  # of its warps
    slots: int  # blocks that the whole device runs at once
    waves: float  # how often the grid fills the device
    tail: float  # share of the device used by the last wave; 1 if waves are whole
    filled: float  # share of the device's time used by blocks, if all take equally long


def occupancy(device: Device, threads: int, registers: int, shared: int, grid: int = 1) -> Occupancy:
    """Return the occupancy of `grid` blocks of `threads`, with `registers` per thread and `shared` bytes per block.

    >>> from gemmery.cuda.device import card
    >>> occupancy(card("a100"), threads=256, registers=128, shared=32 << 10).limits
    {'registers': 2, 'shared memory': 4, 'warps': 8, 'blocks': 32}
    """
    limits = device.limits
    warps = -(-threads // WARP)
    most = {
        "registers": registered_warps(limits.registers_sm, registers) // warps,
        "shared memory": limits.shared_sm // shared_allocated(device.capability, shared),
        "warps": limits.warps_sm // warps,
        "blocks": limits.blocks_sm,
    }
    blocks = min(most.values())
    slots = blocks * device.sms
    return Occupancy(
        limits=most,
        by=tuple(name for name, number in most.items() if number == blocks),
        blocks=blocks,
        warps=blocks * warps,
        most_warps=limits.warps_sm,
        share=blocks * warps / limits.warps_sm,
        slots=slots,
        waves=grid / slots if slots else 0.0,
        tail=(grid % slots or slots) / slots if slots else 0.0,
        filled=grid / (slots * -(-grid // slots)) if slots and grid else 0.0,
    )


def registered_warps(registers_sm: int, registers: int) -> int:
    """Return the warps whose registers fit: each warp's are rounded up to REGISTER_UNIT, in one partition."""
    each = -(-max(registers, 1) * WARP // REGISTER_UNIT) * REGISTER_UNIT
    return registers_sm // PARTITIONS // each * PARTITIONS


def shared_allocated(capability: int, shared: int) -> int:
    """Return the shared memory that a block takes: from sm_80 on plus a kilobyte for the system, in whole units."""
    unit, reserved = (128, 1024) if capability >= 80 else (256, 0)
    return max(-(-(shared + reserved) // unit) * unit, 1)
