"""Records in words, the same wherever one is shown, alone and by problem; and what makes figures unreliable."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gemmery import load
from gemmery.ladder.rung import Rung
from gemmery_emulator.pages import numerals
from gemmery_lab import experiments
from gemmery_lab.measure.record import MachineRecord, Measurement, Run

WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RIVALS: dict[str, str] = WORDS["rivals"]
UNITS: dict[str, str] = WORDS["units"]
NOTES: dict[str, str] = WORDS["notes"]
IN_PARTS = ("split_", "ozaki_")  # rungs that multiply parts of elements: the peak in a record is of another unit


def share(measurement: Measurement) -> float | None:
    """Return the fraction of the measured peak that was reached; None if no peak of its unit was measured."""
    if not measurement.peak_gflops or not measurement.seconds or measurement.kernel.startswith(IN_PARTS):
        return None
    part = measurement.gflops / measurement.peak_gflops
    return part if part < 1.1 else None  # wgmma's beside the peak of mma.sync


def passed(measurement: Measurement) -> bool:
    """Return True unless a check found an element outside its bound (NaN is outside)."""
    return not measurement.checked or measurement.error <= 1


def rate(measurement: Measurement) -> str:
    """Return the unit of its rate: GFLOP/s, Gop/s for integers, TFLOP/s on a GPU."""
    return "Gop/s" if measurement.dtype[0] in "iu" else "TFLOP/s" if measurement.unit else "GFLOP/s"


def reached(measurement: Measurement, gflops: float | None = None) -> float:
    """Return its rate, or `gflops`, in the unit of `rate`."""
    value = measurement.gflops if gflops is None else gflops
    return value / 1e3 if measurement.unit else value


def tick(measurement: Measurement) -> tuple[str, float]:
    """Return the unit for times of one product and its number per second: ms, or µs on a GPU."""
    return ("µs", 1e6) if measurement.unit else ("ms", 1e3)


def kernel(name: str) -> str:
    """Return the common name of a rival, or the name of a rung."""
    return RIVALS.get(name) or name.removeprefix("gm.matmul, ")


def versioned(name: str, records: Sequence[Measurement]) -> str:
    """Return the common name of a rival with the version of cuBLAS that its records name: "cuBLAS 13.1"."""
    note = next((m.note for m in records if m.kernel == name and m.note), "")
    version = re.match(r"cuBLAS \d+\.\d+", note)
    return kernel(name).replace("cuBLAS", version[0]) if version else kernel(name)


def cores(count: int) -> str:
    """Return `1 thread` or `2 threads`."""
    return f"{count} thread{'s' if count != 1 else ''}"


def place(measurement: Measurement) -> str:
    """Return where it ran: "2 threads", or the unit of a GPU."""
    return measurement.unit or cores(measurement.threads)


def types(measurement: Measurement) -> str:
    """Return the element types: "f32", "tf32", or "int8 → int32" if the result is wider."""
    if measurement.precision:
        return measurement.precision
    return measurement.dtype if measurement.dtype == measurement.out else f"{measurement.dtype} → {measurement.out}"


def shape(measurement: Measurement) -> str:
    """Return the problem without its element types: "n = 1024", "8 × 1024 × 1024", "10,000 of 3 × 3 × 3"."""
    m, n, k = measurement.m, measurement.n, measurement.k
    if measurement.batch > 1:
        return f"{measurement.batch:,} of {m} × {n} × {k}"
    return f"n = {n}" if m == n == k else f"{m} × {n} × {k}"


def caches(machine: MachineRecord) -> tuple[tuple[str, int], ...]:
    """Return the caches of known size, the nearest first; for a run on a GPU, those of the GPU."""
    if machine.gpu.name:
        return (("L2", machine.gpu.l2),)
    return tuple((name, size) for name, size in (("L1d", machine.l1d), ("L2", machine.l2), ("L3", machine.l3)) if size)


def title(run: Run) -> str:
    """Return the title of a run."""
    titles = {experiments.of(measurement).title for measurement in run.measurements}
    return titles.pop() if len(titles) == 1 else experiments.COMPARED


def machine(machine: MachineRecord) -> str:
    """Return the machine of a run in one line."""
    gpu = machine.gpu
    if gpu.name:
        power = f", {gpu.power_w:g} W" if gpu.power_w else ""
        device = f"{gpu.name}, sm_{gpu.capability}, {gpu.sms} multiprocessors, up to {gpu.clock_mhz} MHz{power}"
        software = f"driver {gpu.driver or 'unknown'}, CUDA {gpu.cuda}, NVRTC {gpu.nvrtc}, Python {machine.python}"
        version = f", gemmery {machine.gemmery}" if machine.gemmery else ""
        return f"{device}, L2 {numerals.size(gpu.l2)}; {software}{version}"
    sizes = ", ".join(f"{name} {numerals.size(size)}" for name, size in caches(machine))
    names = {"Python": "python", "NumPy": "numpy", "llvmlite": "llvmlite", "gemmery": "gemmery"}
    versions = [f"{name} {version}" for name, field in names.items() if (version := getattr(machine, field))]
    hardware = f"{machine.cpu}, {machine.isa}, {machine.cores} cores, {sizes}"
    return f"{hardware}; {machine.os}; {', '.join(versions)}; NumPy runs {machine.blas}"


def processor(machine: MachineRecord) -> tuple[str, str]:
    """Return the CPU and its instruction set, or the GPU and its architecture."""
    gpu = machine.gpu
    return (gpu.name, f"sm_{gpu.capability}") if gpu.name else (machine.cpu, machine.isa)


def when(run: Run) -> str:
    """Return the start of a run to the minute, in UTC."""
    return run.started[:16].replace("T", " ") + " UTC"


ANY = "*"  # among the spreads of a record: the spread of every ratio, as a share of it
BUSY = 0.25  # share of a ratio by which it varies at least where the figures are unreliable
SHARED = 0.98  # two threads may share one core, so their peak may be this much of the peak of one


@dataclass(frozen=True)
class Group:
    """Measurements of one problem: the rungs in the order of the ladder, then the rivals."""

    rungs: tuple[Measurement, ...]
    rivals: tuple[Measurement, ...]

    @property
    def every(self) -> tuple[Measurement, ...]:
        return (*self.rungs, *self.rivals)

    @property
    def all(self) -> tuple[Measurement, ...]:
        """Rungs and rivals that ran."""
        return tuple(m for m in self.every if m.seconds)

    @property
    def first(self) -> Measurement:
        """Any of them, for what they have in common."""
        return self.every[0]


def groups(measurements: Iterable[Measurement], rungs: Sequence[Rung]) -> tuple[Group, ...]:
    """Group measurements by problem: squares first, the smallest first."""
    order = {rung.name: index for index, rung in enumerate(rungs)}
    problems: dict[tuple[object, ...], list[Measurement]] = {}
    for m in measurements:
        problems.setdefault((not is_square(m), m.flops, m.m, m.n, m.k, m.dtype, m.out, m.precision), []).append(m)
    grouped = []
    for _, same in sorted(problems.items()):
        own = sorted((m for m in same if m.kernel in order), key=lambda m: order[m.kernel])
        grouped.append(Group(tuple(own), tuple(m for m in same if m.kernel not in order)))
    return tuple(grouped)


def largest(problems: Sequence[Group]) -> Group:
    """Return the group with the most operations, of squares if there are any: the one a summary is about."""
    squares = [group for group in problems if is_square(group.first)]
    return max(squares or problems, key=lambda group: group.first.flops)


def fullest(problems: Sequence[Group]) -> Group:
    """Return the group in which most rungs ran, and the largest of these: it shows the whole ladder."""
    return max(problems, key=lambda group: (sum(m.seconds > 0 for m in group.rungs), group.first.flops))


def is_square(measurement: Measurement) -> bool:
    """Return True for one product of squares, unless it shows the use that one rung is meant for."""
    return measurement.m == measurement.n == measurement.k and measurement.batch == 1 and not measurement.case


def speedup(measurement: Measurement, rival: str | None, group: Group) -> tuple[float, float] | None:
    """Return (speed-up over `rival`, spread): the ratio of the rates that a table shows of both.

    The spread is that of pairs of measurements, and reaches at least to the median of their ratios.
    """
    if not rival or not measurement.seconds or measurement.kernel == rival:
        return None
    paired, spread = measurement.versus.get(rival), measurement.spread.get(rival, 0.0)
    same = sorted((m for m in group.all if m.kernel == rival), key=lambda m: m.threads != measurement.threads)
    if not same:
        return (paired, spread) if paired else None
    ratio = same[0].seconds / measurement.seconds
    reach = abs(ratio - paired) if paired else 0.0
    return ratio, max(spread, reach, measurement.spread.get(ANY, 0.0) * ratio)


def over_fastest(measurement: Measurement, group: Group) -> tuple[Measurement, tuple[float, float]] | None:
    """Return the fastest rival of a problem and (speed-up over it, spread); None if no rival ran.

    A rival that ran with several numbers of threads may be faster with fewer of them. The spread is the one of the
    turns that the rung and the rival took with the same number of threads.
    """
    ran = [m for m in group.rivals if m.seconds]
    if not ran or not measurement.seconds:
        return None
    fastest = min(ran, key=lambda m: m.seconds)
    spread = (speedup(measurement, fastest.kernel, group) or (0.0, 0.0))[1]
    return fastest, (fastest.seconds / measurement.seconds, spread)


def gain(measurement: Measurement, rival: str | None, group: Group) -> str:
    """Return the speed-up over a rival or a parent as text, "" where there is none."""
    return numerals.times(*(speedup(measurement, rival, group) or (None,)))


def gains(rungs: Sequence[Rung], problems: Sequence[Group]) -> dict[str, str]:
    """Return the gain of each rung over its parent as text, in the problem that most of them ran."""
    group = fullest(problems)
    own = {m.kernel: m for m in group.rungs}
    return {rung.name: gain(own[rung.name], rung.parent, group) for rung in rungs if rung.name in own}


def rival(group: Group) -> str:
    """Return the rival to compare with: the first that ran, else one that could not."""
    names = [m.kernel for m in group.rivals if m.seconds] + [m.kernel for m in group.rivals]
    return names[0] if names else "cublas" if group.first.unit else "numpy"


def label(measurement: Measurement, group: Group) -> str:
    """Return the name of a rung or a rival; with the threads if the rival ran with several numbers of them."""
    same = {m.threads for m in group.rivals if m.kernel == measurement.kernel}
    name = versioned(measurement.kernel, [measurement])
    return name + (f", {cores(measurement.threads)}" if len(same) > 1 else "")


def doubts(run: Run) -> tuple[str, ...]:
    """Return the reasons why the figures of a run are unreliable, one sentence each."""
    busy = max((m.load for m in run.measurements), default=0.0)
    reasons = []
    if busy > load.limit(run.machine.cores):
        there = numerals.plural(run.machine.cores, "core")
        reasons.append(f"Other processes used up to {busy:.1f} of the {there} during the measurement.")
    peaks = {(m.dtype, m.threads): m for m in run.measurements if m.peak_gflops and not m.unit}
    for (dtype, threads), m in sorted(peaks.items()):
        fewer = [peak for (name, count), peak in peaks.items() if name == dtype and count < threads]
        higher = max(fewer, key=lambda peak: peak.peak_gflops, default=m)
        if m.peak_gflops < SHARED * higher.peak_gflops:
            own, other = (f"{cores(x.threads)}, {numerals.digits(x.peak_gflops)} {rate(x)}" for x in (m, higher))
            reasons.append(f"The measured {dtype} peak of {own}, is below that of {other}: impossible.")
    return tuple(reasons)


def banner(run: Run) -> str:
    """Return the warning to show with unreliable figures, "" for reliable ones."""
    reasons = " ".join(doubts(run))
    warning = f"Unreliable figures: {reasons} Ratios are shown as ranges. Measure again on an idle machine."
    return warning if reasons else ""


def weighed(run: Run) -> Run:
    """Return the run with a wide spread of all ratios if the figures are unreliable."""
    if not doubts(run):
        return run
    rows = []
    for m in run.measurements:
        wide = {name: max(m.spread.get(name, 0.0), BUSY * ratio) for name, ratio in m.versus.items()}
        rows.append(replace(m, spread={ANY: BUSY, **wide}))
    return replace(run, measurements=tuple(rows))
