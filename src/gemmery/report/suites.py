"""A suite's records as sheets: products compared with rivals, rungs against each other, compilations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gemmery.bench.record import Measurement
from gemmery.report import words
from gemmery.report.sheet import Cell, Sheet, notes_below

OWN = "gm.matmul"  # the name of gemmery's product in records of suites, also in "gm.matmul, cold cache"


def products(heading: str, measurements: Sequence[Measurement]) -> list[Sheet]:
    """Return a sheet for each tournament of rungs, then one for each number of threads."""
    cases = tournaments(measurements)
    rest = [m for m in measurements if m.case not in cases]
    return [
        *(_tournament(case, [m for m in measurements if m.case == case]) for case in cases),
        *(_compared(heading, [m for m in rest if m.threads == count]) for count in sorted({m.threads for m in rest})),
    ]


def tournaments(measurements: Iterable[Measurement]) -> tuple[str, ...]:
    """Return the cases of a suite in which rungs took turns, in order of appearance."""
    cases = (m.case for m in measurements if m.case and not is_own(m) and m.kernel not in words.RIVALS)
    return tuple(dict.fromkeys(cases))


def by_case(heading: str, measurements: Sequence[Measurement]) -> Sheet:
    """A row for each kernel, and product if there are several; a column for each way to prepare or run it."""
    ran = [m for m in measurements if m.seconds]
    ways = tuple(dict.fromkeys(m.case for m in ran))
    of_one = len({(m.kernel, m.dtype) for m in ran}) == len({_of_way(m) for m in ran})
    rows = []
    for key in dict.fromkeys(map(_of_way, ran)):
        taken = {m.case: m for m in ran if _of_way(m) == key}
        first = next(iter(taken.values()))
        named = (first.kernel, first.dtype) if of_one else (first.kernel, words.shape(first), first.dtype)
        times = (Cell(words.duration(taken[way].seconds) if way in taken else "") for way in ways)
        rows.append((Cell(", ".join(named)), *times))
    notes = tuple(f"{m.kernel} was not run for {m.dtype}: {m.refused}" for m in measurements if m.refused)
    return Sheet(heading, ("kernel", *ways), tuple(rows), notes)


def _of_way(m: Measurement) -> tuple[object, ...]:
    return m.kernel, m.m, m.n, m.k, m.dtype


def _tournament(case: str, measurements: Sequence[Measurement]) -> Sheet:
    """Rungs against each other: a row for each product, a column for each rung; times if calls are short."""
    took_part = {m.kernel for m in measurements if m.seconds}
    absent = [m for m in measurements if m.kernel in words.RIVALS and m.kernel not in took_part]
    measurements = [m for m in measurements if m not in absent]
    kernels = tuple(dict.fromkeys(m.kernel for m in measurements))
    problems: dict[str, dict[str, Measurement]] = {}
    for m in measurements:
        problems.setdefault(f"{words.shape(m)}, {words.types(m)}", {})[m.kernel] = m
    vectors = all(1 in (m.m, m.n) for m in measurements)
    short = all(m.seconds < 1e-4 and m.batch == 1 and (vectors or not m.unit) for m in measurements)
    rows, notes = [], []
    for problem, by_kernel in problems.items():
        ran = [m for m in by_kernel.values() if m.seconds]
        best = min((m.seconds for m in ran), default=0.0)
        cells = [_entry(by_kernel.get(kernel), best, short) for kernel in kernels]
        peak = words.digits(words.reached(ran[0], ran[0].peak_gflops)) if ran else ""
        rows.append((Cell(problem), *cells, *([] if short else [Cell(peak)])))
        notes += [
            f"{words.kernel(m.kernel)} did not run {problem}: {m.refused}" for m in by_kernel.values() if m.refused
        ]
    notes += [f"{words.kernel(m.kernel)} did not run: {m.refused}" for m in absent]
    unit = "time of a call" if short else words.rate(measurements[0])
    head = ("product", *(words.kernel(kernel) for kernel in kernels), *([] if short else ["peak"]))
    title = f"{case}: {unit}{_on_threads(measurements)}"
    return Sheet(title, head, tuple(rows), tuple(dict.fromkeys(notes)))


def _entry(measurement: Measurement | None, best: float, short: bool) -> Cell:
    if measurement is None or measurement.refused:
        return Cell("not run" if measurement else "", tone="faint")
    text = words.duration(measurement.seconds) if short else words.digits(words.reached(measurement))
    return Cell(text, tone="best" if measurement.seconds == best else "")


def is_own(measurement: Measurement) -> bool:
    """Return True for gemmery's product, False for a rival's."""
    return measurement.kernel.startswith(OWN)


def _compared(heading: str, measurements: Sequence[Measurement]) -> Sheet:
    """A suite on one number of threads: gemmery's products with their speed-up over each rival, and who did not run."""
    shown = [m for m in measurements if is_own(m)]
    rivals = tuple(dict.fromkeys(rival for m in shown for rival in m.versus))
    called = any(m.kernel == OWN and m.seconds for m in shown) and not any(m.peak_gflops for m in shown)
    timed_only = called or all(m.kernel != OWN for m in shown)  # neither calls nor first calls have a rate
    rates = () if timed_only else (_rate_of(shown), "% of peak", "GB/s")
    head = (
        "product",
        "call" if called else "rung",
        "time",
        *rates,
        *(f"× {words.kernel(rival)}" for rival in rivals),
    )
    rows = []
    for m in shown:
        work = Cell(product(m))
        if m.refused:
            rows.append((work, Cell(""), Cell("not run", tone="faint"), *[Cell("")] * (len(head) - 3)))
            continue
        share = words.share(m)
        speed = (
            Cell(words.digits(words.reached(m))),
            Cell(words.percent(share), bar=share),
            Cell(words.digits(m.bytes / m.seconds / 1e9)),
        )
        ratios = [(m.versus.get(rival), m.spread.get(rival, 0.0)) for rival in rivals]
        rows.append(
            (
                work,
                Cell(m.note, tone="faint"),
                Cell(words.duration(m.seconds)),
                *(() if timed_only else speed),
                *(Cell(words.times(*pair), tone=standing(*pair), margin=_margin(*pair)) for pair in ratios),
            )
        )
    notes = [f"{_who(m)} did not run: {m.refused}" for m in measurements if m.refused]
    title = f"{heading}{_on_threads(measurements)}"
    return Sheet(title, head, tuple(rows), notes_below(shown, notes), aside=True)


def _on_threads(measurements: Sequence[Measurement]) -> str:
    """The number of threads; "" on a GPU."""
    return "" if any(m.unit for m in measurements) else f", {words.cores(measurements[0].threads)}"


def _margin(ratio: float | None, spread: float) -> str:
    return f"± {float(f'{spread:.1g}'):g}" if ratio is not None and 0 < spread < math.inf else ""


def _rate_of(measurements: Sequence[Measurement]) -> str:
    """GFLOP/s, or Gop/s if there are integers."""
    rates = {words.rate(m) for m in measurements}
    return rates.pop() if len(rates) == 1 else "Gop/s"


def _who(measurement: Measurement) -> str:
    return product(measurement) if is_own(measurement) else words.kernel(measurement.kernel)


def product(measurement: Measurement) -> str:
    """Return the product of a suite as text: "8 × 1024 × 1024, f32, allocating"."""
    how = measurement.kernel.removeprefix(OWN).removeprefix(", ")
    return ", ".join(filter(None, [words.shape(measurement), words.types(measurement), measurement.case, how]))


def standing(ratio: float | None, spread: float) -> str:
    """Return the tone of a ratio: "bad" for a loss beyond the spread, "best" for a gain, "" for a tie."""
    if ratio is None:
        return ""
    return "bad" if ratio < 1 - spread else "best" if ratio > 1 + spread else ""
