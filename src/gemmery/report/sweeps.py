"""Sweeps on a GPU over one key of a config or one side of a product, as a table and as a figure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gemmery import dtypes
from gemmery.bench.record import Machine, Measurement
from gemmery.experiments import Axis, Experiment
from gemmery.report import words
from gemmery.report.sheet import Cell, Sheet, error, limits

BLOCK = 1024  # threads: CUDA Programming Guide, "Technical Specifications per Compute Capability"


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
            if key != axis.key and len({m.config.get(key) for m in same}) > 1
        ]
        for m in sorted(same, key=lambda m: axis.of(m) or 0):
            config = "".join(f", {key} {m.config[key]}" for key in differing if key in m.config)
            found.setdefault(f"{words.kernel(kernel)}{config}", []).append(m)
    return {name: tuple(along) for name, along in found.items()}


def by_key(measurements: Sequence[Measurement], experiment: Experiment) -> Sheet:
    """Return a row for each value of a key, for each rung."""
    axis = experiment.axis
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
    title = f"{experiment.title}, {words.shape(measurements[0])}, {words.types(measurements[0])}"
    return Sheet(title, head, tuple(rows), _notes(ran, notes))


def by_side(measurements: Sequence[Measurement], experiment: Experiment) -> Sheet:
    """Return microseconds: a row for each variant, a column for each length."""
    axis = experiment.axis
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
    fixed = f"{'K' if axis.side == 'n' else 'N'} = {_fixed(measurements[0], axis)}"
    return Sheet(
        f"{experiment.title}, {fixed}, {words.types(measurements[0])}",
        head,
        tuple(rows),
        _notes(ran, notes),
    )


def by_config(measurements: Sequence[Measurement], experiment: Experiment) -> Sheet:
    """Return a row for each config of each exhibit, with its ratio to its parent."""
    rows = []
    for m in measurements:
        config = ", ".join(f"{key} {value}" for key, value in m.config.items())
        time = Cell("refused", tone="faint") if m.refused else Cell(words.duration(m.seconds))
        ratio = next(((ratio, m.spread.get(parent, 0.0)) for parent, ratio in m.versus.items()), ())
        rows.append((Cell(m.kernel), Cell(config), time, Cell(words.times(*(ratio or (None,)))), error(m)))
    notes = tuple(dict.fromkeys(f"{m.kernel} at {m.config}: {m.refused}" for m in measurements if m.refused))
    head = ("exhibit", experiment.axis.label, "time", "× parent", "error/bound")
    return Sheet(experiment.title, head, tuple(rows), notes)


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
    if axis.threads:  # a config that does not fit for another reason is refused with it
        return ((BLOCK ** (1 / axis.threads), f"{BLOCK:,} threads, the limit of a block"),)
    if not (axis.side and machine.gpu.l2):
        return ()
    fills = machine.gpu.l2 / (_fixed(measurements[0], axis) * dtypes.get(measurements[0].dtype).size)
    return ((fills, f"W fills L2, {words.size(machine.gpu.l2)}"),)


def _fixed(m: Measurement, axis: Axis) -> int:
    """The side of the matrix that is not varied, which another run may have fixed elsewhere."""
    return m.k if axis.side == "n" else m.n
