"""Sweeps on a GPU over one key of a config or one side of a product, as a table and as a figure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemmery import dtypes
from gemmery.bench.record import Machine, Measurement
from gemmery.report import words
from gemmery.report.sheet import Cell, Sheet, error, limits

BLOCK = 1024  # threads: CUDA Programming Guide, "Technical Specifications per Compute Capability"


@dataclass(frozen=True)
class Axis:
    """The quantity that a sweep varies: a key of the config, or a side (n, k) of the product."""

    name: str
    label: str
    side: bool = False
    square: bool = False  # a block has value x value threads

    def of(self, m: Measurement) -> int | None:
        """Its value in a record; None in that of a rival, which has no such key."""
        if self.side:
            return m.n if self.name == "n" else m.k
        return m.config.get(self.name)


AXES = {
    "sweep_threads": Axis("threads", "threads per block"),
    "sweep_tile": Axis("tile", "side of a tile", square=True),
    "sweep_stages": Axis("stages", "stages"),
    "sweep_gemv": Axis("n", "N, the length of y", side=True),
    "sweep_gemv_k": Axis("k", "K, the length of x", side=True),
}
Lines = Mapping[str, tuple[Measurement, ...]]


def lines(measurements: Sequence[Measurement], axis: Axis) -> Lines:
    """The records of each rung and config by name, along the axis; the config is named where a rung has several."""
    kernels: dict[str, list[Measurement]] = {}
    for m in measurements:
        kernels.setdefault(m.kernel, []).append(m)
    found: dict[str, list[Measurement]] = {}
    for kernel, same in kernels.items():
        differing = [
            key
            for key in dict.fromkeys(key for m in same for key in m.config)
            if key != axis.name and len({m.config.get(key) for m in same}) > 1
        ]
        for m in sorted(same, key=lambda m: axis.of(m) or 0):
            config = "".join(f", {key} {m.config[key]}" for key in differing if key in m.config)
            found.setdefault(f"{words.kernel(kernel)}{config}", []).append(m)
    return {name: tuple(along) for name, along in found.items()}


def swept(measurements: Sequence[Measurement], suite: str) -> Sheet:
    """The table of a sweep: a row for each value of a key, or a column for each side."""
    axis = AXES[suite]
    return _by_side(measurements, axis) if axis.side else _by_key(measurements, axis)


def _by_key(measurements: Sequence[Measurement], axis: Axis) -> Sheet:
    ran = [m for m in measurements if m.seconds]
    best = {m.kernel: min(x.seconds for x in ran if x.kernel == m.kernel) for m in ran}
    rate = words.rate(measurements[0])
    rows: list[tuple[Cell, ...]] = []
    notes: list[str] = []
    for name, along in lines(measurements, axis).items():
        notes += _refusals(name, along, axis)
        for m in along:
            value = axis.of(m)
            shown = "" if value is None else str(value)
            if m.refused:
                rows.append((Cell(name), Cell(shown), Cell("refused", tone="faint"), *[Cell("")] * 4))
                continue
            ratio = next(((r, m.spread.get(rival, 0.0)) for rival, r in m.versus.items() if rival in words.RIVALS), ())
            rows.append(
                (
                    Cell(name),
                    Cell(shown),
                    Cell(words.digits(m.seconds * 1e3), tone="best" if value and m.seconds == best[m.kernel] else ""),
                    Cell(words.digits(words.reached(m))),
                    Cell(words.percent(words.share(m)), bar=words.share(m)),
                    Cell(words.times(*(ratio or (None,)))),
                    error(m),
                )
            )
    head = ("rung", axis.label, "ms", rate, "% of peak", "× cuBLAS", "error/bound")
    title = f"{words.SWEEPS[measurements[0].suite]}, {words.shape(measurements[0])}, {words.types(measurements[0])}"
    return Sheet(title, head, tuple(rows), _notes(ran, notes))


def _by_side(measurements: Sequence[Measurement], axis: Axis) -> Sheet:
    """Microseconds: a row for each variant, a column for each length."""
    values = sorted({axis.of(m) or 0 for m in measurements})
    ran = [m for m in measurements if m.seconds]
    best = {
        v: min((m.seconds for m in ran if axis.of(m) == v and m.kernel not in words.RIVALS), default=0) for v in values
    }
    rows, notes = [], []
    for name, along in lines(measurements, axis).items():
        by_value = {axis.of(m): m for m in along}
        rows.append((Cell(name), *(_microseconds(by_value.get(value), best[value]) for value in values)))
        notes += _refusals(name, along, axis)
    head = ("µs", *(str(value) for value in values))
    held = f"K = {measurements[0].k}" if axis.name == "n" else f"N = {measurements[0].n}"
    return Sheet(
        f"{words.SWEEPS[measurements[0].suite]}, {held}, {words.types(measurements[0])}",
        head,
        tuple(rows),
        _notes(ran, notes),
    )


def _refusals(name: str, along: Sequence[Measurement], axis: Axis) -> list[str]:
    """The reasons why a line was not run, each once with the values that share it."""
    reasons: dict[str, list[Measurement]] = {}
    for m in along:
        if m.refused:
            reasons.setdefault(re.sub(r"\d+", "", m.refused), []).append(m)
    values = {reason: [str(v) for m in same if (v := axis.of(m)) is not None] for reason, same in reasons.items()}
    where = {reason: f" at {', '.join(at)}" if at else "" for reason, at in values.items()}
    return [f"{name}{where[reason]}: {same[0].refused}" for reason, same in reasons.items()]


def _microseconds(m: Measurement | None, best: float) -> Cell:
    if m is None:
        return Cell("")
    if m.refused:
        return Cell("refused", tone="faint")
    return Cell(words.digits(m.seconds * 1e6), tone="best" if m.seconds == best else "")


def _notes(ran: Sequence[Measurement], notes: Sequence[str]) -> tuple[str, ...]:
    """The limits of the machine, and each reason once."""
    return tuple(filter(None, dict.fromkeys([limits(ran), *notes])))


def marks(measurements: Sequence[Measurement], axis: Axis, machine: Machine) -> tuple[tuple[float, str], ...]:
    """The limits of the device as places on the axis and their names."""
    if not axis.side:
        if axis.name == "stages":
            return ()  # a config that does not fit is refused with the reason
        return ((BLOCK**0.5 if axis.square else float(BLOCK), f"{BLOCK:,} threads, the limit of a block"),)
    if not machine.gpu.l2:
        return ()
    one = measurements[0]
    other = one.k if axis.name == "n" else one.n
    fills = machine.gpu.l2 / (other * dtypes.get(one.dtype).size)
    return ((fills, f"W fills L2, {words.size(machine.gpu.l2)}"),)
