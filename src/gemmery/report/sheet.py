"""Records as sheets, tables of text for the terminal, Markdown and HTML to lay out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gemmery import dtypes
from gemmery.bench.record import Machine, Measurement
from gemmery.ladder.rung import Rung
from gemmery.report import words
from gemmery.report.doubts import ANY

IDEA = "what it changed"
MMA = "mma.sync"  # the unit of tensor cores whose peak is measured


@dataclass(frozen=True)
class Cell:
    """One cell of text. `bar` is a fraction of the peak, drawn as a bar; `tone` is "best", "bad" or "faint".

    `margin` is the spread of a ratio, shown if there is room.
    """

    text: str
    bar: float | None = None
    tone: str = ""
    margin: str = ""


@dataclass(frozen=True)
class Sheet:
    """A table of text. With `aside`, the second column is a remark on the first, shown if there is room."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    aside: bool = False

    @property
    def left(self) -> tuple[int, ...]:
        """The left-aligned columns; the others are right-aligned."""
        return (0, 1) if self.aside else (0,)


@dataclass(frozen=True)
class Group:
    """Measurements of one problem: the rungs in the order of the ladder, then the rivals."""

    rungs: tuple[Measurement, ...]
    rivals: tuple[Measurement, ...]

    @property
    def all(self) -> tuple[Measurement, ...]:
        """Rungs and rivals that ran."""
        return tuple(m for m in (*self.rungs, *self.rivals) if m.seconds)

    @property
    def one(self) -> Measurement:
        """Any one of them, for what they have in common."""
        return (*self.rungs, *self.rivals)[0]


def groups(measurements: Iterable[Measurement], rungs: Sequence[Rung]) -> tuple[Group, ...]:
    """Group measurements by problem: squares first, the smallest first."""
    order = {rung.name: index for index, rung in enumerate(rungs)}
    found: dict[tuple[object, ...], list[Measurement]] = {}
    for m in measurements:
        found.setdefault((not is_square(m), m.flops, m.m, m.n, m.k, m.dtype, m.out, m.precision), []).append(m)
    return tuple(
        Group(
            tuple(sorted((m for m in same if m.kernel in order), key=lambda m: order[m.kernel])),
            tuple(m for m in same if m.kernel not in order),
        )
        for _, same in sorted(found.items())
    )


def largest(found: Sequence[Group]) -> Group:
    """Return the group with the most operations, of squares if there are any: the one a summary is about."""
    squares = [group for group in found if is_square(group.one)]
    return max(squares or found, key=lambda group: group.one.flops)


def fullest(found: Sequence[Group]) -> Group:
    """Return the group in which most rungs ran, and the largest of these: it shows the whole ladder."""
    return max(found, key=lambda group: (sum(m.seconds > 0 for m in group.rungs), group.one.flops))


def is_square(measurement: Measurement) -> bool:
    """Return True for one product of squares, unless it shows the use that one rung is meant for."""
    return measurement.m == measurement.n == measurement.k and measurement.batch == 1 and not measurement.case


def speedup(measurement: Measurement, rival: str, group: Group) -> tuple[float, float] | None:
    """Return (speed-up over `rival`, spread), from pairs of measurements if there are any, else from the medians."""
    if not measurement.seconds or measurement.kernel == rival:
        return None
    if rival in measurement.versus:
        return measurement.versus[rival], measurement.spread.get(rival, 0.0)
    for other in group.all:
        if other.kernel == rival:
            return other.seconds / measurement.seconds, measurement.spread.get(ANY, 0.0)
    return None


def rival(group: Group) -> str:
    """Return the rival to compare with: the first that ran, else one that could not."""
    named = [m.kernel for m in group.rivals if m.seconds] + [m.kernel for m in group.rivals]
    return named[0] if named else "cublas" if group.one.unit else "numpy"


def limits(measurements: Iterable[Measurement]) -> str:
    """Return the peak and bandwidth measured in the same run, for each number of threads or unit of a GPU."""
    stated = []
    measurements = tuple(measurements)
    measured = {(m.threads, m.dtype): m for m in measurements if m.peak_gflops and not m.unit}
    for threads in sorted({threads for threads, _ in measured}):
        same = [m for (count, _), m in measured.items() if count == threads]
        peaks = [f"{words.digits(m.peak_gflops)} {words.rate(m)} {m.dtype}" for m in same]
        bandwidth = f"{words.digits(same[0].bandwidth_gbs)} GB/s"
        stated.append(f"{', '.join(peaks)}, {bandwidth} on {words.cores(threads)}")
    on_gpu = [m for m in measurements if m.peak_gflops and m.unit]
    units = {(m.unit, m.precision or m.dtype): m for m in on_gpu}
    for (unit, dtype), m in units.items():
        stated.append(f"{words.digits(words.reached(m, m.peak_gflops))} {words.rate(m)} {dtype} on {unit}")
    if on_gpu:
        one, clocks = on_gpu[0], sorted({m.clock_mhz for m in on_gpu if m.clock_mhz})
        copied = f", {words.digits(one.copy_gbs)} copied" if one.copy_gbs else ""
        stated.append(f"memory {words.digits(one.bandwidth_gbs)} GB/s read{copied}")
        stated += [f"multiprocessors at {words.between(clocks)} MHz while timed"] if clocks else []
    if any(unit == MMA and dtype != "f64" for unit, dtype in units):
        stated.append("Hopper's wgmma, which cuBLAS uses there, is faster than mma.sync")
    return f"measured limits: {'; '.join(stated)}" if stated else ""


def ladder_sheet(group: Group, rungs: Sequence[Rung], machine: Machine) -> Sheet:
    """One problem: all rungs, then the rivals."""
    by_name = {rung.name: rung for rung in rungs}
    against, (unit, scale) = rival(group), words.tick(group.one)
    versus = f"× {words.kernel(against)}"
    head = ("rung", IDEA, unit, words.rate(group.one), "% of peak", "× parent", versus, "error/bound")
    best = max((m.gflops for m in group.all), default=0.0)
    rows, notes = [], []
    for m in (*group.rungs, *group.rivals):
        rung = by_name.get(m.kernel)
        name = named(m, group)
        idea = Cell(rung.idea if rung else m.note or machine.blas, tone="faint")
        if m.refused:
            rows.append((Cell(name, tone="faint"), idea, Cell("not run", tone="faint"), *[Cell("")] * 5))
            notes.append(f"{name} did not run: {m.refused}")
            continue
        over_parent = speedup(m, rung.parent, group) if rung and rung.parent else None
        rows.append(
            (
                Cell(name, tone="best" if m.gflops == best else ""),
                idea,
                Cell(words.digits(m.seconds * scale)),
                Cell(words.digits(words.reached(m))),
                Cell(words.percent(words.share(m)), bar=words.share(m)),
                Cell(words.times(*(over_parent or (None,)))),
                Cell(words.times(*(speedup(m, against, group) or (None,)))),
                error(m),
            )
        )
        notes += [f"{name}: {m.note}"] if rung and m.note else []
    notes += _unwritten(group, rungs)
    title = f"{words.shape(group.one)}, {words.types(group.one)}"
    return Sheet(title, head, tuple(rows), notes_below((*group.rungs, *group.rivals), notes), aside=True)


def _unwritten(group: Group, rungs: Sequence[Rung]) -> list[str]:
    """The rungs left out because they are for other element types."""
    ran, dtype = {m.kernel for m in group.rungs}, group.one.dtype
    left = [
        f"{rung.name} ({', '.join(rung.dtypes)})" for rung in rungs if rung.name not in ran and dtype not in rung.dtypes
    ]
    return [f"not for {dtype}: {', '.join(left)}"] if left else []


def other_shapes(found: Sequence[Group], rungs: Sequence[Rung]) -> Sheet:
    """Problems that are not squares, and problems that one rung is meant for, with their bandwidth."""
    parents = {rung.name: rung.parent for rung in rungs if rung.parent}
    ideas = {rung.name: rung.idea for rung in rungs} | {m.kernel: m.note for group in found for m in group.rivals}
    against, (unit, scale) = rival(found[0]), words.tick(found[0].one)
    versus = f"× {words.kernel(against)}"
    head = ("rung", IDEA, "shape", unit, words.rate(found[0].one), "GB/s", versus, "× parent", "error/bound")
    rows, notes = [], []
    for group in found:
        for m in (*group.rungs, *group.rivals):
            name, idea = Cell(named(m, group)), Cell(ideas.pop(m.kernel, ""), tone="faint")  # shown once
            if m.refused:
                rows.append((name, idea, Cell(words.shape(m)), Cell("not run", tone="faint"), *[Cell("")] * 5))
                notes.append(f"{name.text} did not run at {words.shape(m)}: {m.refused}")
                continue
            parent = parents.get(m.kernel, "")
            over = speedup(m, parent, group) if parent else None
            rows.append(
                (
                    name,
                    idea,
                    Cell(words.shape(m)),
                    Cell(words.digits(m.seconds * scale)),
                    Cell(words.digits(words.reached(m))),
                    Cell(words.digits(m.bytes / m.seconds / 1e9)),
                    Cell(words.times(*(speedup(m, against, group) or (None,)))),
                    Cell(words.times(*over) if over else ""),
                    error(m),
                )
            )
    measured = [m for group in found for m in group.all]
    return Sheet(
        f"Other shapes, {words.types(found[0].one)}", head, tuple(rows), notes_below(measured, notes), aside=True
    )


def notes_below(measurements: Iterable[Measurement], notes: Iterable[str]) -> tuple[str, ...]:
    """Return the limits measured in the same run, then each note once."""
    return tuple(filter(None, dict.fromkeys([limits(measurements), *notes])))


def named(measurement: Measurement, group: Group) -> str:
    """Return the name of a rung or a rival; with the threads if the rival ran with several numbers of them."""
    same = {m.threads for m in group.rivals if m.kernel == measurement.kernel}
    return words.kernel(measurement.kernel) + (f", {words.cores(measurement.threads)}" if len(same) > 1 else "")


def error(measurement: Measurement) -> Cell:
    """Return the largest error as a fraction of its bound."""
    if not measurement.checked:
        return Cell("")
    if not words.passed(measurement):
        return Cell(f"{measurement.error:.2g} !", tone="bad")
    return Cell(f"{measurement.error:.2g}")


def by_size(measurements: Sequence[Measurement]) -> Sheet:
    """Rate by n: a row for each n, a column for each kernel."""
    kernels = tuple(dict.fromkeys(m.kernel for m in measurements))
    by_place = {(m.n, m.kernel): m for m in measurements}
    rows = []
    for n in sorted({m.n for m in measurements}):
        best = max(m.gflops for m in measurements if m.n == n)
        rows.append((Cell(f"{n}"), *(_rate(by_place.get((n, kernel)), best) for kernel in kernels)))
    one = measurements[0]
    notes = [f"{m.kernel} at n = {m.n} did not run: {m.refused}" for m in measurements if m.refused]
    title = f"{words.rate(one)} against n, {words.types(one)}"
    head = ("n", *(words.kernel(kernel) for kernel in kernels))
    return Sheet(title, head, tuple(rows), notes_below(measurements, notes))


def _rate(measurement: Measurement | None, best: float) -> Cell:
    if measurement is None:
        return Cell("")
    if measurement.refused:
        return Cell("not run", tone="faint")
    text = words.digits(words.reached(measurement))
    return Cell(text, tone="best" if measurement.gflops == best else "")


def working_set(measurement: Measurement) -> int:
    """Return the bytes of the three blocks that a blocked product works on."""
    return 3 * measurement.config["block"] ** 2 * dtypes.get(measurement.dtype).size


def side(cache: int, dtype: str) -> float:
    """Return the side of the largest three square blocks that fit in a cache of so many bytes."""
    return math.sqrt(cache / (3 * dtypes.get(dtype).size))


def by_block(measurements: Sequence[Measurement], machine: Machine) -> Sheet:
    """Time by the side of a block, and the cache that three blocks fit into; rivals have no block."""
    best = min((m.seconds for m in measurements if m.seconds and "block" in m.config), default=0.0)
    rows, known = [], words.caches(machine)
    largest = "memory" if known else ""  # the caches are not known while the table grows
    for m in sorted(measurements, key=lambda m: m.config.get("block", math.inf)):
        blocked = "block" in m.config
        fits = next((name for name, held in known if blocked and working_set(m) <= held), largest)
        rows.append(
            (
                Cell(str(m.config["block"]) if blocked else words.kernel(m.kernel)),
                Cell(words.size(working_set(m)) if blocked else ""),
                Cell(fits if blocked else ""),
                Cell("not run", tone="faint")
                if m.refused
                else Cell(words.digits(m.seconds * 1e3), tone="best" if blocked and m.seconds == best else ""),
                Cell(words.digits(words.reached(m)) if m.seconds else ""),
                Cell(words.percent(words.share(m)), bar=words.share(m)),
            )
        )
    one = measurements[0]
    head = ("block", "three blocks", "fit in", "ms", words.rate(one), "% of peak")
    notes = [f"block {m.config.get('block', '')} did not run: {m.refused}" for m in measurements if m.refused]
    title = f"{words.shape(one)}, {words.types(one)}"
    return Sheet(title, head, tuple(rows), notes_below(measurements, notes))
