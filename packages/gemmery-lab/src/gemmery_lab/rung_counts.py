"""The ladder on the emulator as data: counters of each rung, its error, its roofs, and predicted times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np

from gemmery import display
from gemmery.cuda.device import Device
from gemmery_emulator.kernels.prediction import Prediction
from gemmery_emulator.run import EmulatedRun
from gemmery_emulator.trace.selection import Selection


def _read(path: str) -> Any:
    """A counter, 0 without a run, that `of` reads from one by the names of attributes."""
    return field(default=0, metadata={"path": path})


@dataclass(frozen=True)
class RungCounts:
    """Counters of all launches of a rung together: the names that `Rung.expect` may hold.

    Adjacent accesses count as ptxas merges them. Caches are not modeled: bytes are those asked of L1.
    """

    flops: int = _read("flops")  # executed; a multiply-add is two
    warp_instructions: int = 0
    requests: int = _read("global_.requests")  # warps' accesses to global memory
    sectors: int = _read("global_.sectors")  # of 32 bytes
    load_sectors_a_request: float = _read("global_.loads.sectors_a_request")
    store_sectors_a_request: float = _read("global_.stores.sectors_a_request")
    load_bytes_a_sector: float = _read("global_.loads.used_a_sector")  # that a lane asked for
    store_bytes_a_sector: float = _read("global_.stores.used_a_sector")
    bytes: int = _read("global_.bytes")  # of global memory: 32 a sector
    local_requests: int = _read("local.requests")  # to spilled registers and arrays of a thread
    wavefronts: int = _read("shared.wavefronts")  # of shared memory
    shared_load_wavefronts: int = _read("shared.loads.wavefronts")
    shared_store_wavefronts: int = _read("shared.stores.wavefronts")  # with those of cp.async
    wavefronts_ideal: int = _read("shared.wavefronts_ideal")  # of so many bytes, 128 each
    bank_conflicts: int = _read("shared.bank_conflicts")
    branches: int = _read("branches")  # conditional ones, by warp
    divergent_branches: int = _read("divergent_branches")
    load_requests: int = _read("global_.loads.requests")  # of threads to global memory, without bulk copies
    store_requests: int = _read("global_.stores.requests")
    copies: int = _read("global_.bulk.requests")  # bulk and tensor copies, to shared memory and out of it
    copied_bytes: int = _read("global_.bulk.used")  # that they move; a copy to several blocks counts once

    @classmethod
    def of(cls, run: EmulatedRun) -> RungCounts:
        """Return the counters of a run."""
        counters = {each.name: attrgetter(each.metadata["path"])(run) for each in fields(cls) if each.metadata}
        return cls(warp_instructions=run.instructions.total(), **counters)


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
    unit: str = ""  # the unit that multiplies: a field of device.Rates
    blocks: int = 0  # of the launch that multiplies
    tile: tuple[int, int] = (0, 0)  # of C, that one block computes
    compute_seconds: float = 0.0  # operations at the peak of that unit
    memory_seconds: float = 0.0  # bytes at the bandwidth of the device's memory
    shared_seconds: float = 0.0  # wavefronts of shared memory, 1 a clock and multiprocessor
    issue_seconds: float = 0.0  # warp instructions, 4 a clock and multiprocessor
    # The claims of the rung; {} for products that they are not about.
    expected: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    chosen: Selection = field(default_factory=Selection)  # accesses for pictures
    source: Mapping[str, str] = field(default_factory=dict)  # the text of the lines of these accesses
    seconds: float = 0.0  # that the emulator took

    @property
    def operations(self) -> int:
        """Operations of the product, a multiply-add as two."""
        return 2 * self.m * self.n * self.k

    @property
    def roofs(self) -> Mapping[str, float]:
        """The least seconds under each limit of a device that the grid fills, if caches hold nothing."""
        return {name: getattr(self, f"{name}_seconds") for name in ("compute", "memory", "shared", "issue")}

    @property
    def roof_seconds(self) -> float:
        """The longest of the roofs: the product cannot take less."""
        return max(self.roofs.values())

    @property
    def limit(self) -> str:
        return max(self.roofs, key=lambda name: self.roofs[name])

    @property
    def unmet(self) -> tuple[str, ...]:
        """Counters that differ from what the rung claims."""
        return tuple(name for name, value in self.expected.items() if getattr(self.counts, name) != value)

    @property
    def wrong(self) -> tuple[str, ...]:
        """Its faults, a line each: a result outside its bound, findings, claims that do not hold."""
        outside = () if self.error <= 1 else (f"is outside its error bound: {self.error:.3g} times it",)
        claims = ((name, self.expected[name], getattr(self.counts, name)) for name in self.unmet)
        broken = tuple(f"claims {name} = {claim:g}, and has {count:g}" for name, claim, count in claims)
        return (*outside, *(f"has a finding at {finding}" for finding in self.findings), *broken)


@dataclass(frozen=True)
class EmulatedLadder:
    """The rungs in the order of the ladder, at each size, compiled for `device`."""

    device: Device
    started: str  # UTC, ISO 8601
    rungs: tuple[EmulatedRung, ...]
    predicted: tuple[PredictedRung, ...] = ()  # times on the device, of products that it has records of

    def _repr_html_(self) -> str:
        """Counters and roofs as a table, which a notebook displays."""
        head = ("rung", "m × n × k", "type", "sectors", "wavefronts", "bank conflicts", "roof, µs", "limit", "result")
        rows: list[tuple[str, ...]] = []
        for rung in self.rungs:
            product = (rung.rung, f"{rung.m} × {rung.n} × {rung.k}", rung.dtype)
            if rung.refused:
                rows.append((*product, f"not run: {rung.refused}"))
                continue
            counts = (rung.counts.sectors, rung.counts.wavefronts, rung.counts.bank_conflicts)
            roof = (f"{rung.roof_seconds * 1e6:.3g}", rung.limit, "; ".join(rung.wrong) or "right")
            rows.append((*product, *(f"{count:,}" for count in counts), *roof))
        return display.table(rows, head)

    def gain(self, rung: EmulatedRung, parent: str | None) -> float:
        """How many times shorter its roof is than its parent's at the same product; 0 where they cannot be compared."""
        for other in self.rungs:
            same = all(getattr(other, name) == getattr(rung, name) for name in ("size", "m", "n", "k", "dtype"))
            if other.rung == parent and same and other.roof_seconds and rung.roof_seconds:
                return other.roof_seconds / rung.roof_seconds
        return 0.0


@dataclass(frozen=True)
class PredictedRung:
    """One rung at one product: refused, or its predicted time and that of the newest record."""

    rung: str
    m: int
    n: int
    k: int
    dtype: str
    config: Mapping[str, int] = field(default_factory=dict)
    prediction: Prediction | None = None
    measured: float = 0.0  # seconds, 0 without a record
    unit: str = ""  # the unit that multiplies: a field of device.Rates
    refused: str = ""

    @property
    def ratio(self) -> float:
        """The predicted time over the measured one, 0 without a record."""
        return self.prediction.seconds / self.measured if self.prediction and self.measured else 0.0

    def rate(self, seconds: float = 0.0) -> float:
        """The predicted operations a second, or those of a product that takes so many `seconds`; 0 if refused."""
        seconds = seconds or (self.prediction.seconds if self.prediction else 0.0)
        return 2.0 * self.m * self.n * self.k / seconds if seconds else 0.0


@dataclass(frozen=True)
class Agreement:
    """How well predicted times agree with records."""

    count: int
    rank: float  # correlation of the ranks (Spearman)
    error: float  # median of |predicted / measured - 1|


def agreement(rungs: Sequence[PredictedRung]) -> Agreement | None:
    """Compare predicted times with the records, None with fewer than three.

    >>> from dataclasses import replace
    >>> row = PredictedRung("simt_naive", 8, 8, 8, "f32", prediction=Prediction("h200", 2e-6, "issue", {}))
    >>> agreement([replace(row, measured=seconds) for seconds in (2e-6, 3e-6, 1e-6)]).error
    0.33333333333333337
    """
    known = [rung for rung in rungs if rung.ratio]
    if len(known) < 3:
        return None
    pairs = np.array([(rung.prediction.seconds, rung.measured) for rung in known if rung.prediction])
    ranks = pairs.argsort(axis=0).argsort(axis=0)
    varies = ranks.std(axis=0).all()
    rank = float(np.corrcoef(ranks[:, 0], ranks[:, 1])[0, 1]) if varies else 0.0
    return Agreement(len(known), rank, float(np.median([abs(rung.ratio - 1) for rung in known])))
