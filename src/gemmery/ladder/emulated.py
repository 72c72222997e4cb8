"""The ladder on the emulator as data: what each rung counted, whether it was right, and the roof over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gemmery.cuda.device import Device


@dataclass(frozen=True)
class RungCounts:
    """Counters of all launches of a rung together: the names that `Rung.expect` may hold.

    Adjacent accesses count as ptxas merges them. Caches are not modelled: bytes are those asked of L1.
    """

    flops: int = 0  # executed; a multiply-add is two
    warp_instructions: int = 0
    requests: int = 0  # warps' accesses to global memory
    sectors: int = 0  # of 32 bytes
    load_sectors_a_request: float = 0.0
    store_sectors_a_request: float = 0.0
    load_bytes_a_sector: float = 0.0  # that a lane asked for
    store_bytes_a_sector: float = 0.0
    bytes: int = 0  # of global memory: 32 a sector
    local_requests: int = 0  # to spilled registers and arrays of a thread
    wavefronts: int = 0  # of shared memory
    wavefronts_ideal: int = 0
    bank_conflicts: int = 0
    branches: int = 0  # conditional ones, by warp
    divergent_branches: int = 0


@dataclass(frozen=True)
class EmulatedRung:
    """One rung at one product: refused, or run, checked and counted."""

    rung: str
    size: int  # the side that was asked for
    m: int
    n: int
    k: int
    dtype: str  # of A, B and C; "tf32" where 10 bits of fraction are kept
    config: Mapping[str, int]
    refused: str = ""
    error: float = 0.0  # the largest error over its bound: at most 1 where the result is right
    counts: RungCounts = RungCounts()
    kinds: Mapping[str, int] = field(default_factory=dict)  # warps' instructions by kind, the most frequent first
    intensity: float = 0.0  # operations for each byte of global memory
    unit: str = ""  # what multiplies: a field of device.Rates
    compute_seconds: float = 0.0  # operations at the peak of that unit
    memory_seconds: float = 0.0  # bytes at the bandwidth of the device's memory
    expected: Mapping[str, float] = field(default_factory=dict)  # what the rung claims; {} at a product it does not
    findings: tuple[str, ...] = ()
    seconds: float = 0.0  # that the emulator took

    @property
    def roof_seconds(self) -> float:
        """The longer of the two: where the roof is when every byte asked of L1 comes from memory."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def unmet(self) -> tuple[str, ...]:
        """Counters that are not what the rung claims."""
        return tuple(name for name, value in self.expected.items() if getattr(self.counts, name) != value)

    @property
    def wrong(self) -> tuple[str, ...]:
        """What is wrong with it, a line each: a result outside its bound, a finding, a claim that does not hold."""
        outside = () if self.error <= 1 else (f"is outside its error bound: {self.error:.3g} times it",)
        broken = tuple(
            f"claims {name} = {self.expected[name]:g}, and has {getattr(self.counts, name):g}" for name in self.unmet
        )
        return (*outside, *(f"has a finding at {one}" for one in self.findings), *broken)


@dataclass(frozen=True)
class EmulatedLadder:
    """The rungs in the order of the ladder, at each size, as `device` would run them."""

    device: Device
    started: str  # UTC, ISO 8601
    rungs: tuple[EmulatedRung, ...]
