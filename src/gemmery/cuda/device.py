"""What a CUDA device allows: the one at hand, or one that is only named."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gemmery.errors import DeviceError


@dataclass(frozen=True)
class Limits:
    """What an architecture allows, from table "Technical Specifications per Compute Capability" of the CUDA guide."""

    threads: int  # a block
    shared: int  # bytes of shared memory a block may use, opted into
    shared_sm: int  # bytes of shared memory of a multiprocessor
    registers_sm: int
    warps_sm: int
    blocks_sm: int


@dataclass(frozen=True)
class Device:
    """One device, present or named."""

    name: str
    capability: int  # 90 for sm_90
    sms: int
    limits: Limits
    l2: int  # bytes
    clock: float  # GHz, boost
    bandwidth: float  # GB/s of its memory, by the data sheet; 0 when unknown
    ordinal: int = -1  # of the driver, when it is present

    @property
    def arch(self) -> str:
        """What its code is compiled for: with the instructions of this architecture alone where there are such."""
        return f"sm_{self.capability}{'a' if self.capability >= 90 else ''}"


STATIC_SHARED = 48 << 10  # bytes of shared memory a block may use without asking
GRID = (2**31 - 1, 65535, 65535)  # blocks

LIMITS = {
    70: Limits(1024, 96 << 10, 96 << 10, 65536, 64, 32),
    75: Limits(1024, 64 << 10, 64 << 10, 65536, 32, 16),
    80: Limits(1024, 163 << 10, 164 << 10, 65536, 64, 32),
    86: Limits(1024, 99 << 10, 100 << 10, 65536, 48, 16),
    89: Limits(1024, 99 << 10, 100 << 10, 65536, 48, 24),
    90: Limits(1024, 227 << 10, 228 << 10, 65536, 64, 32),
    100: Limits(1024, 227 << 10, 228 << 10, 65536, 64, 32),
    120: Limits(1024, 99 << 10, 100 << 10, 65536, 48, 24),
}
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")  # what the kernels are compiled for

# Data sheets and architecture white papers of the vendor.
KNOWN = {
    row.name: row
    for row in (
        Device("h200", 90, 132, LIMITS[90], 50 << 20, 1.98, 4800.0),
        Device("h100", 90, 132, LIMITS[90], 50 << 20, 1.98, 3350.0),
        Device("a100", 80, 108, LIMITS[80], 40 << 20, 1.41, 1555.0),
        Device("rtx3090", 86, 82, LIMITS[86], 6 << 20, 1.695, 936.0),
        Device("rtx4090", 89, 128, LIMITS[89], 72 << 20, 2.52, 1008.0),
        Device("rtx5090", 120, 170, LIMITS[120], 96 << 20, 2.407, 1792.0),
        Device("b200", 100, 148, LIMITS[100], 126 << 20, 1.965, 8000.0),
        Device("2080ti", 75, 68, LIMITS[75], 5632 << 10, 1.545, 616.0),
        Device("t4", 75, 40, LIMITS[75], 4 << 20, 1.59, 320.0),
    )
}


@lru_cache(maxsize=64)
def find(name: str) -> Device:
    """A device by what a View or a Problem calls it ("cuda:0"), or by a name of the table ("a100").

    >>> find("a100").arch
    'sm_80'

    Raises DeviceError for a device that is neither present nor known.
    """
    if name.startswith("cuda"):
        from gemmery.cuda import driver

        return driver.device(int(name.partition(":")[2] or 0))
    if name not in KNOWN:
        raise DeviceError(f"device {name!r} is neither present nor known; known: cuda, {', '.join(KNOWN)}")
    return KNOWN[name]
