"""The ladder on the emulator as data: counters of each rung, its error, its roofs, and predicted times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gemmery import display
from gemmery.cuda.device import WARP, Device
from gemmery.cuda.pipes import LAUNCH, NEXT, USABLE, Pipes, clocks_of
from gemmery.emulator.pace.demand import KINDS
from gemmery.emulator.pace.multiprocessor import UNITS, Paced, shares
from gemmery.emulator.ptx import Line
from gemmery.emulator.trace.selection import Selection

FEW_WARPS = 12  # of a multiprocessor; below it instructions of a warp that depend on each other are not hidden
TENSOR = ("tensor", "tensor_tf32", "tensor_8")  # kinds of instructions of tensor cores
MANY = 4  # rounds of blocks from which on a multiprocessor begins a block whenever another ends


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
    shared_load_wavefronts: int = 0
    shared_store_wavefronts: int = 0  # with those of cp.async
    wavefronts_ideal: int = 0  # of so many bytes, 128 each
    bank_conflicts: int = 0
    branches: int = 0  # conditional ones, by warp
    divergent_branches: int = 0
    load_requests: int = 0  # of threads to global memory, without bulk copies
    store_requests: int = 0
    copies: int = 0  # bulk and tensor copies, to shared memory and out of it
    copied_bytes: int = 0  # that they move; a copy to several blocks counts once


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
    def roofs(self) -> Mapping[str, float]:
        """The least seconds under each limit of a device that the grid fills, if caches hold nothing."""
        return {name: getattr(self, f"{name}_seconds") for name in ("compute", "memory", "shared", "issue")}

    @property
    def roof_seconds(self) -> float:
        """The longest of the roofs: the product cannot take less."""
        return max(self.roofs.values())

    @property
    def limit(self) -> str:
        """The name of the longest roof."""
        return max(self.roofs, key=lambda name: self.roofs[name])

    @property
    def unmet(self) -> tuple[str, ...]:
        """Counters that differ from what the rung claims."""
        return tuple(name for name, value in self.expected.items() if getattr(self.counts, name) != value)

    @property
    def wrong(self) -> tuple[str, ...]:
        """Its faults, a line each: a result outside its bound, findings, claims that do not hold."""
        outside = () if self.error <= 1 else (f"is outside its error bound: {self.error:.3g} times it",)
        broken = tuple(
            f"claims {name} = {self.expected[name]:g}, and has {getattr(self.counts, name):g}" for name in self.unmet
        )
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
class LaunchShape:
    """A launch, and how much of a multiprocessor its blocks take."""

    blocks: int
    threads: int  # of a block
    resident: int  # blocks that a multiprocessor runs at once
    cluster: int = 1
    bytes: float = float("inf")  # of all arrays
    lines: tuple[Line, ...] = ()  # of each instruction


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a kernel on a card."""

    card: str
    seconds: float
    bound: str  # the longest of the terms
    terms: Mapping[
        str, float
    ]  # seconds, if nothing else took time: units of a multiprocessor, "memory", "waits", "launch"
    lines: Mapping[str, float] = field(default_factory=dict)  # by line of the source, the share of what bounds it
    doubts: tuple[str, ...] = ()  # what the prediction does not take into account
    fits: str = ""  # registers of a thread, and what a multiprocessor runs at once

    def __str__(self) -> str:
        """The time, what bounds it, and the lines that take most of it."""
        parts = [f"predicted on {self.card}: {self.seconds * 1e6:,.4g} us, bound by {self.bound}"]
        longest = sorted(self.terms.items(), key=lambda term: -term[1])[:5]
        parts.append(", ".join(f"{name} {seconds * 1e6:,.4g} us" for name, seconds in longest if seconds))
        parts += [f"{line}: {share:.0%}" for line, share in self.largest()]
        return "\n".join([*parts, *(f"not taken into account: {doubt}" for doubt in self.doubts)])

    def largest(self, count: int = 5) -> list[tuple[str, float]]:
        """Return the lines with the largest shares of what bounds the time."""
        return sorted(self.lines.items(), key=lambda item: -item[1])[:count]

    def _repr_html_(self) -> str:
        return display.preformatted(str(self))

    def __add__(self, other: Prediction) -> Prediction:
        """Add a launch that follows; what bounds the longer one bounds both."""
        terms = {name: self.terms.get(name, 0.0) + other.terms.get(name, 0.0) for name in {**self.terms, **other.terms}}
        longer = self if self.seconds > other.seconds else other
        doubts = tuple(dict.fromkeys(self.doubts + other.doubts))
        return Prediction(self.card, self.seconds + other.seconds, longer.bound, terms, longer.lines, doubts)


def predict_launch(
    device: Device,
    pipes: Pipes,
    shape: LaunchShape,
    samples: Sequence[Paced],
    beyond: float = 0.0,
    *,
    follows: bool = False,
) -> Prediction:
    """Predict a launch from one sample of its blocks, or from two with loops of different lengths.

    With two, `beyond` is how far the loops of the launch are from the first, in steps from the first to the second.
    `follows` says that another launch comes directly before.
    """
    first, last = samples[0], samples[-1]
    running = last.blocks
    amounts = np.maximum(first.amounts + (last.amounts - first.amounts) * beyond, 0) / running
    clocks = clocks_of(device, pipes)
    by_unit = shares(clocks)
    units = by_unit @ amounts.sum(axis=0)  # clocks of one block
    idle = [max(sample.clocks - sample.busy, 0.0) for sample in (first, last)]  # clocks in which all blocks wait
    waits = max(float(idle[0] * (1 - beyond) + idle[1] * beyond), 0.0)
    each = -(-shape.blocks // device.sms)  # blocks of the busiest multiprocessor
    if running > 2 and last.barriers and each > running:  # blocks of later rounds begin at other times
        waits *= 2 / running

    def seconds(clocks: float) -> float:
        """The time of all blocks of a multiprocessor, of which one takes so many clocks of a unit."""
        return clocks * each / (device.clock * 1e9)

    rounds = each / shape.resident if each >= MANY * shape.resident else -(-each // shape.resident)
    waiting = waits * rounds / (device.clock * 1e9)
    moved = sum(
        min((start + (end - start) * beyond) / running * shape.blocks, shape.bytes)
        for start, end in ((first.loaded, last.loaded), (first.written, last.written))
    )
    terms = {name: seconds(float(clocks)) for name, clocks in zip(UNITS, units, strict=True)}
    longest = max(terms, key=lambda name: terms[name])
    kinds = amounts.sum(axis=0)
    tensor = (float(kinds[KINDS.index(name)]) * clocks[name] * pipes.tensor for name in TENSOR)  # at their peak
    cooled = pipes.heat * seconds(sum(tensor))
    memory = moved / (device.bandwidth * 1e9 * USABLE)
    launch = NEXT if follows else LAUNCH
    total = launch + max(terms[longest] + cooled + waiting, memory)
    terms |= {"memory": memory, "waits": waiting, "launch": launch}
    bound = max(terms, key=lambda name: terms[name])
    shared_out = {"memory": "L2", "launch": longest}.get(bound, bound)  # what is told apart by line
    lines = _lines(shape, by_unit, amounts, shared_out, last)
    return Prediction(device.name, total, bound, terms, lines, _doubts(shape, last, device))


def _lines(
    shape: LaunchShape, by_unit: NDArray[np.float64], amounts: NDArray[np.float64], bound: str, sample: Paced
) -> dict[str, float]:
    """The share of each line in what a launch is bound by."""
    clocks = sample.waits if bound == "waits" else amounts @ by_unit[list(UNITS).index(bound)]
    total = float(clocks.sum())
    sums: dict[str, float] = {}
    for line, each in zip(shape.lines, clocks, strict=False):
        if each:
            sums[str(line)] = sums.get(str(line), 0.0) + float(each) / total
    return sums


def _doubts(shape: LaunchShape, sample: Paced, device: Device) -> tuple[str, ...]:
    kinds = sample.amounts.sum(axis=0)
    warps = sample.blocks * -(-shape.threads // WARP)
    doubts = {
        "warps with different roles, which wait for each other": sample.apart,
        "waits for bulk copies: they count as hidden": kinds[KINDS.index("bulk")] > 0,
        f"few warps: {warps} on a multiprocessor, so that dependent instructions wait": warps < FEW_WARPS,
        f"the size of the L2 cache: {shape.bytes / 2**20:,.0f} MiB of arrays, {device.l2 >> 20} MiB of L2":
            device.l2 < shape.bytes < float("inf"),
        "contention of atomics": kinds[KINDS.index("atomics")] > 0,
        "local memory, to which registers are spilled": sample.spills,
    }  # fmt: skip
    return tuple(doubt for doubt, applies in doubts.items() if applies)


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
    refused: str = ""

    @property
    def ratio(self) -> float:
        """The predicted time over the measured one, 0 without a record."""
        return self.prediction.seconds / self.measured if self.prediction and self.measured else 0.0


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
