"""The records of suites as sheets: products next to the rivals', tournaments of rungs, first products, models."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from gemmery_emulator.pages import numerals
from gemmery_lab.measure.processes import CASES, FIRST, PIECES, REST, WORST
from gemmery_lab.measure.record import Measurement
from gemmery_lab.report import sheet, words
from gemmery_lab.report.sheet import ByKernel, Cell, Columns, Sheet, tabulate

OWN = "gm.matmul"  # the name of gemmery's product in records of suites, also in "gm.matmul, cold cache"
RIVAL = "torch"  # of the layers of a model
MANY = 8  # products of a table that has an average


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


def _tournament(case: str, measurements: Sequence[Measurement]) -> Sheet:
    """Rungs against each other: a row for each product, a column for each rung; times if calls are short."""
    took_part = {m.kernel for m in measurements if m.seconds}
    absent = [m for m in measurements if m.kernel in words.RIVALS and m.kernel not in took_part]
    measurements = [m for m in measurements if m not in absent]
    problems = sheet.pivoted(measurements, lambda m: f"{words.shape(m)}, {words.types(m)}")
    vectors = all(1 in (m.m, m.n) for m in measurements)
    short = all(m.seconds < 1e-4 and m.batch == 1 and (vectors or not m.unit) for m in measurements)

    def peak(row: tuple[str, ByKernel]) -> str:
        ran = [m for m in row[1].values() if m.seconds]
        return numerals.digits(words.reached(ran[0], ran[0].peak_gflops)) if ran else ""

    columns: Columns[tuple[str, ByKernel]] = [
        ("product", lambda row: row[0]),
        *sheet.kernels(problems, _duration if short else sheet.rate),
        *([] if short else [("peak", peak)]),
    ]
    refused = ((problem, m) for problem, own in problems.items() for m in own.values() if m.refused)
    notes = [f"{words.kernel(m.kernel)} did not run {problem}: {m.refused}" for problem, m in refused]
    unit = "time of a call" if short else words.rate(measurements[0])
    title = f"{case}: {unit}{_on_threads(measurements)}"
    return tabulate(title, columns, problems.items(), [*notes, *sheet.not_run(absent)])


def is_own(measurement: Measurement) -> bool:
    """Return True for gemmery's product, False for a rival's."""
    return measurement.kernel.startswith(OWN)


def _compared(heading: str, measurements: Sequence[Measurement]) -> Sheet:
    """A suite on one number of threads: gemmery's products with their speed-up over each rival, and who did not run."""
    own = [m for m in measurements if is_own(m)]
    called = any(m.kernel == OWN and m.seconds for m in own) and not any(m.peak_gflops for m in own)
    timed_only = called or all(m.kernel != OWN for m in own)  # neither calls nor first calls have a rate
    units = {words.rate(m) for m in own}
    unit = units.pop() if len(units) == 1 else "Gop/s"
    rates: Columns[Measurement] = [(unit, sheet.rate), ("% of peak", sheet.share), ("GB/s", sheet.bandwidth)]
    power: Columns[Measurement] = [
        ("W", lambda m: f"{m.power_w:.0f}" if m.power_w else ""),
        ("J", lambda m: numerals.digits(m.joules) if m.joules else ""),
    ]

    def over(m: Measurement, rival: str) -> Cell:
        ratio, spread = m.versus.get(rival), m.spread.get(rival, 0.0)
        is_narrow = ratio is not None and 0 < spread < numerals.WIDE * ratio
        margin = f"± {float(f'{spread:.1g}'):g}" if is_narrow else ""
        return Cell(numerals.times(ratio, spread), tone=standing(ratio, spread), margin=margin)

    rivals = dict.fromkeys(rival for m in own for rival in m.versus)
    columns: Columns[Measurement] = [
        ("product", product),
        ("call" if called else "rung", lambda m: Cell("" if m.refused else m.note, tone="" if m.refused else "faint")),
        *sheet.measured(
            ("time", lambda m: numerals.duration(m.seconds)),
            *([] if timed_only else rates),
            *(power if any(m.power_w for m in own) else []),
            *((f"× {words.versioned(name, measurements)}", partial(over, rival=name)) for name in rivals),
        ),
    ]
    refused = sheet.not_run(measurements, lambda m: product(m) if is_own(m) else words.kernel(m.kernel))
    notes = [sheet.limits(own), *_means(own), *refused]
    return tabulate(f"{heading}{_on_threads(measurements)}", columns, own, notes, aside=True)


def _means(measurements: Sequence[Measurement]) -> list[str]:
    """Return the geometric mean and the lowest ratio to each rival over many products on a GPU."""
    notes = []
    for rival in dict.fromkeys(rival for m in measurements for rival in m.versus):
        ratios = {product(m): m.versus[rival] for m in measurements if m.unit and rival in m.versus}
        if len(ratios) >= MANY:
            mean, lowest = statistics.geometric_mean(ratios.values()), min(ratios, key=ratios.__getitem__)
            notes.append(
                f"{numerals.times(mean)} {words.kernel(rival)} on geometric average over {len(ratios)} products, at "
                f"least {numerals.times(ratios[lowest])} ({lowest})."
            )
    return notes


def _on_threads(measurements: Sequence[Measurement]) -> str:
    """The number of threads; "" on a GPU."""
    return "" if any(m.unit for m in measurements) else f", {words.cores(measurements[0].threads)}"


def product(measurement: Measurement) -> str:
    """Return the product of a suite as text: "8 × 1024 × 1024, f32, allocating"."""
    how = measurement.kernel.removeprefix(OWN).removeprefix(", ")
    return ", ".join(filter(None, [words.shape(measurement), words.types(measurement), measurement.case, how]))


def standing(ratio: float | None, spread: float) -> str:
    """Return the tone of a ratio: "bad" for a loss beyond the spread, "best" for a gain, "" for a tie."""
    if ratio is None:
        return ""
    return "bad" if ratio < 1 - spread else "best" if ratio > 1 + spread else ""


def by_case(heading: str, measurements: Sequence[Measurement]) -> list[Sheet]:
    """Return a row for each kernel, and product if there are several; a column for each way to prepare or run it."""
    ran = [m for m in measurements if m.seconds]
    by_product = sheet.pivoted(ran, lambda m: (m.kernel, m.m, m.n, m.k, m.dtype), lambda m: m.case)
    rows = [(next(iter(cases.values())), cases) for cases in by_product.values()]
    of_one = len({(m.kernel, m.dtype) for m, _ in rows}) == len(rows)  # product
    ways = dict.fromkeys(m.case for m in ran)
    columns: Columns[tuple[Measurement, dict[str, Measurement]]] = [
        ("kernel", lambda row: ", ".join([row[0].kernel, *([] if of_one else [words.shape(row[0])]), row[0].dtype])),
        *((way, lambda row, way=way: _duration(row[1].get(way))) for way in ways),
    ]
    notes = [f"{m.kernel} was not run for {m.dtype}: {m.refused}" for m in measurements if m.refused]
    return [tabulate(heading, columns, rows, notes)]


def _duration(measurement: Measurement | None) -> str:
    return numerals.duration(measurement.seconds) if measurement and measurement.seconds else ""


def first_products(heading: str, measurements: Sequence[Measurement]) -> list[Sheet]:
    """Return a row for each first product and state of the cache, with its time, its pieces and its ratios.

    Records of versions that did not time the pieces are shown as products.
    """
    if not any(m.case in PIECES for m in measurements):
        return products(heading, measurements)
    key = operator.attrgetter("kernel", "m", "n", "k", "dtype", "threads")
    pieces = sheet.pivoted(measurements, key, lambda m: m.case)
    columns = [
        ("product", lambda m: f"{words.shape(m)}, {words.types(m)}, {words.kernel(m.kernel)}"),
        ("first product", _duration),
        *((name, lambda m, name=name: _duration(pieces[key(m)].get(name))) for name in PIECES),
        *_ratios(rival for m in measurements for rival in m.versus),
    ]
    rows = [m for m in measurements if not m.case and m.seconds]
    title = f"{heading}, {words.cores(measurements[0].threads)}"
    return [tabulate(title, columns, rows, sheet.not_run(measurements))]


def _ratios(rivals: Iterable[str]) -> list[tuple[str, Callable[[Measurement], str]]]:
    return [(f"× {words.kernel(rival)}", partial(sheet.ratio, rival=rival)) for rival in dict.fromkeys(rivals)]


def new_shapes(heading: str, measurements: Sequence[Measurement]) -> list[Sheet]:
    """Return a row for each element type, number of threads and state of the cache, with the rival's total."""
    by_key = {(m.kernel, m.dtype, m.threads, m.case): m for m in measurements}
    rivals = dict.fromkeys(m.kernel for m in measurements if m.kernel in words.RIVALS and m.seconds)

    def part(m: Measurement, name: str, kernel: str = "") -> Measurement | None:
        return by_key.get((kernel or m.kernel, m.dtype, m.threads, name))

    def of_worst(of: Callable[[Measurement], str], m: Measurement) -> str:
        longest = part(m, f"{m.case}, {WORST}")
        return of(longest) if longest else ""

    columns: Columns[Measurement] = [
        ("products", lambda m: f"{m.dtype}{f', {words.cores(m.threads)}' if m.threads else ''}, {m.case}"),
        ("all", lambda m: numerals.duration(m.seconds)),
        (f"of it the {FIRST}", lambda m: _duration(part(m, f"{m.case}, {FIRST}"))),
        (WORST, lambda m: _duration(part(m, f"{m.case}, {WORST}"))),
        *((words.kernel(rival), lambda m, rival=rival: _duration(part(m, "", rival))) for rival in rivals),
        *_ratios(rivals),
        *((f"{head}, {REST}", lambda m, of=of: of(part(m, f"{m.case}, {REST}") or m)) for head, of in _ratios(rivals)),
        *((f"{head}, {WORST}", partial(of_worst, of)) for head, of in _ratios(rivals)),
    ]
    title = f"{heading}: {measurements[0].batch} products with sides up to {measurements[0].m}"
    return [tabulate(title, columns, [m for m in measurements if m.case in CASES], sheet.not_run(measurements))]


def is_of_model(measurement: Measurement) -> bool:
    """Return True for a record of a model's step, which reads or makes `m` tokens."""
    return "layers" in measurement.config


def tokens(heading: str, measurements: Sequence[Measurement]) -> Sheet:
    """Return tokens a second: a row for each way to run the model, a column for each kind of linear layers.

    In brackets is the ratio to PyTorch's layers in the same rounds.
    """
    by_case, last = sheet.pivoted(measurements, lambda m: m.case), {m.kernel: m for m in measurements}

    def rate(m: Measurement) -> str:
        """Tokens a second, and the ratio to PyTorch's layers."""
        over = sheet.ratio(m, RIVAL)
        return numerals.digits(m.m / m.seconds) + (f" ({over})" if over else "")

    columns: Columns[tuple[str, ByKernel]] = [("tokens a second", lambda row: row[0]), *sheet.kernels(by_case, rate)]
    config = ", ".join(f"{name} {value:,}" for name, value in measurements[0].config.items())
    sizes = ((words.kernel(m.kernel), numerals.amount(m.bytes, "B"), m.note) for m in last.values())
    layers = [f"{name}: {size} in linear layers; {note}" for name, size, note in sizes]
    notes = [config, *layers, *sheet.not_run(measurements)]
    return tabulate(f"{heading}, {words.types(measurements[0])}", columns, by_case.items(), notes)
