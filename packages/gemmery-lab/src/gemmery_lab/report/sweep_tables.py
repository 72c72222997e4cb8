"""Sweeps over one key of a config or one side of the product as sheets, and the limits of the machine on their axes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from gemmery import dtypes
from gemmery_emulator.pages import numerals
from gemmery_lab.experiments import Axis, Experiment
from gemmery_lab.measure.record import MachineRecord, Measurement
from gemmery_lab.report import words
from gemmery_lab.report.sheet import (
    Cell,
    Columns,
    Sheet,
    entry,
    error,
    limits,
    measured,
    not_run,
    rate,
    ratio,
    share,
    tabulate,
)

BLOCK = 1024  # threads: CUDA Programming Guide, "Technical Specifications per Compute Capability"


def along(measurements: Sequence[Measurement], axis: Axis) -> dict[str, tuple[Measurement, ...]]:
    """The records of each rung and config by name, along the axis; the config is named where a rung has several."""
    kernels: dict[str, list[Measurement]] = {}
    for m in measurements:
        kernels.setdefault(m.kernel, []).append(m)
    variants: dict[str, list[Measurement]] = {}
    for kernel, same in kernels.items():
        differing = [
            key
            for key in dict.fromkeys(key for m in same for key in m.config)
            if key != axis.key and len({m.config.get(key) for m in same}) > 1
        ]
        for m in sorted(same, key=lambda m: axis.of(m) or 0):
            config = "".join(f", {key} {m.config[key]}" for key in differing if key in m.config)
            variants.setdefault(f"{words.kernel(kernel)}{config}", []).append(m)
    return {name: tuple(same) for name, same in variants.items()}


def by_key(measurements: Sequence[Measurement], experiment: Experiment) -> Sheet:
    """Return a row for each value of a key, for each rung."""
    axis, ran = experiment.axis, [m for m in measurements if m.seconds]
    best = {m.kernel: min(other.seconds for other in ran if other.kernel == m.kernel) for m in ran}
    rival = next((name for m in ran for name in m.versus if name in words.RIVALS), "cublas")
    variants = along(measurements, axis)
    names = {id(m): name for name, same in variants.items() for m in same}

    def value(m: Measurement) -> str:
        return "" if axis.of(m) is None else str(axis.of(m))

    columns = [
        ("rung", lambda m: names[id(m)]),
        (axis.label, value),
        *measured(
            [
                ("ms", lambda m: entry(m, _milliseconds, best[m.kernel] if axis.of(m) else 0.0)),
                (words.rate(measurements[0]), rate),
                ("% of peak", share),
                (f"× {words.kernel(rival)}", lambda m: ratio(m, rival)),
                ("error/bound", error),
            ],
            absent="refused",
        ),
    ]
    rows = [m for same in variants.values() for m in same]
    notes = [limits(ran), *(note for name, same in variants.items() for note in _refusals(name, same, axis))]
    title = f"{experiment.title}, {words.shape(measurements[0])}, {words.types(measurements[0])}"
    return tabulate(title, columns, rows, notes)


def by_side(measurements: Sequence[Measurement], experiment: Experiment) -> Sheet:
    """Return microseconds: a row for each variant, a column for each length."""
    axis, ran = experiment.axis, [m for m in measurements if m.seconds]
    own = [m for m in ran if m.kernel not in words.RIVALS]
    values = sorted({axis.of(m) or 0 for m in measurements})
    best = {value: min((m.seconds for m in own if axis.of(m) == value), default=0.0) for value in values}
    variants = along(measurements, axis)

    def time(m: Measurement | None, best: float) -> Cell:
        return entry(m, lambda m: numerals.digits(m.seconds * 1e6), best, absent="refused")

    rows = [(name, {axis.of(m): m for m in same}) for name, same in variants.items()]
    columns: Columns[tuple[str, dict[int | None, Measurement]]] = [
        ("µs", lambda row: row[0]),
        *((str(value), lambda row, value=value: time(row[1].get(value), best[value])) for value in values),
    ]
    fixed = f"{'K' if axis.side == 'n' else 'N'} = {_fixed(measurements[0], axis)}"
    notes = [limits(ran), *(note for name, same in variants.items() for note in _refusals(name, same, axis))]
    return tabulate(f"{experiment.title}, {fixed}, {words.types(measurements[0])}", columns, rows, notes)


def by_config(measurements: Sequence[Measurement], experiment: Experiment) -> Sheet:
    """Return a row for each config of each exhibit, with its ratio to its parent."""
    columns = [
        ("exhibit", lambda m: m.kernel),
        (experiment.axis.label, lambda m: ", ".join(f"{key} {value}" for key, value in m.config.items())),
        *measured(
            [
                ("time", lambda m: numerals.duration(m.seconds)),
                ("× parent", lambda m: next((ratio(m, parent) for parent in m.versus), "")),
                ("error/bound", error),
            ],
            absent="refused",
        ),
    ]
    notes = [f"{m.kernel} at {m.config}: {m.refused}" for m in measurements if m.refused]
    return tabulate(experiment.title, columns, measurements, notes)


def by_size(measurements: Sequence[Measurement]) -> Sheet:
    """Return rates: a row for each n, a column for each kernel."""
    by_place = {(m.n, m.kernel): m for m in measurements}
    sizes = sorted({m.n for m in measurements})
    best = {n: min((m.seconds for m in measurements if m.n == n and m.seconds), default=0.0) for n in sizes}
    kernels = dict.fromkeys(m.kernel for m in measurements)
    columns: Columns[int] = [
        ("n", str),
        *((words.kernel(name), lambda n, name=name: entry(by_place.get((n, name)), rate, best[n])) for name in kernels),
    ]
    notes = not_run(measurements, lambda m: f"{m.kernel} at n = {m.n}")
    title = f"{words.rate(measurements[0])} against n, {words.types(measurements[0])}"
    return tabulate(title, columns, sizes, [limits(measurements), *notes])


def working_set(measurement: Measurement) -> int:
    """Return the bytes of the three blocks that a blocked product works on."""
    return 3 * measurement.config["block"] ** 2 * dtypes.get(measurement.dtype).size


def side(cache: int, dtype: str) -> float:
    """Return the side of the largest three square blocks that fit in a cache of so many bytes."""
    return math.sqrt(cache / (3 * dtypes.get(dtype).size))


def by_block(measurements: Sequence[Measurement], machine: MachineRecord) -> Sheet:
    """Return times by the side of a block, and the cache that three blocks fit into; rivals have no block."""
    best = min((m.seconds for m in measurements if m.seconds and "block" in m.config), default=0.0)
    caches = words.caches(machine)
    memory = "memory" if caches else ""  # the caches are not known while the table grows

    def blocked(of: Callable[[Measurement], str]) -> Callable[[Measurement], str]:
        return lambda m: of(m) if "block" in m.config else ""

    columns: Columns[Measurement] = [
        ("block", lambda m: str(m.config.get("block", words.kernel(m.kernel)))),
        ("three blocks", blocked(lambda m: numerals.size(working_set(m)))),
        ("fit in", blocked(lambda m: next((name for name, size in caches if working_set(m) <= size), memory))),
        ("ms", lambda m: entry(m, _milliseconds, best if "block" in m.config else 0.0)),
        (words.rate(measurements[0]), rate),
        ("% of peak", share),
    ]
    rows = sorted(measurements, key=lambda m: m.config.get("block", math.inf))
    notes = not_run(measurements, lambda m: f"block {m.config.get('block', '')}")
    title = f"{words.shape(measurements[0])}, {words.types(measurements[0])}"
    return tabulate(title, columns, rows, [limits(measurements), *notes])


def _milliseconds(measurement: Measurement) -> str:
    return numerals.digits(measurement.seconds * 1e3)


def _refusals(name: str, same: Sequence[Measurement], axis: Axis) -> list[str]:
    """The reasons why a line was not run, each once with the values that share it."""
    reasons: dict[str, list[Measurement]] = {}
    for m in same:
        if m.refused:
            reasons.setdefault(re.sub(r"\d+", "", m.refused), []).append(m)
    values = {reason: [str(v) for m in same if (v := axis.of(m)) is not None] for reason, same in reasons.items()}
    where = {reason: f" at {', '.join(at)}" if at else "" for reason, at in values.items()}
    return [f"{name}{where[reason]}: {same[0].refused}" for reason, same in reasons.items()]


def marks(measurements: Sequence[Measurement], axis: Axis, machine: MachineRecord) -> tuple[tuple[float, str], ...]:
    """The limits of the device as places on the axis and their names."""
    if axis.threads:  # a config that does not fit for another reason is refused with it
        return ((BLOCK ** (1 / axis.threads), f"{BLOCK:,} threads, the limit of a block"),)
    if not (axis.side and machine.gpu.l2):
        return ()
    fills = machine.gpu.l2 / (_fixed(measurements[0], axis) * dtypes.get(measurements[0].dtype).size)
    return ((fills, f"W fills L2, {numerals.size(machine.gpu.l2)}"),)


def _fixed(m: Measurement, axis: Axis) -> int:
    """The side of the matrix that is not varied, which another run may have fixed elsewhere."""
    return m.k if axis.side == "n" else m.n
