"""The ladder on the emulator as sheets and sentences, with predicted times, and these in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from rich.console import Console, Group
from rich.text import Text

from gemmery.cuda.device import Device
from gemmery.cuda.pipes import origin, predictable
from gemmery.ladder.cuda import CUDA
from gemmery_emulator.kernels.counters import IDEAL_WAVEFRONTS
from gemmery_emulator.pages import numerals
from gemmery_lab.report import words
from gemmery_lab.report.sheet import Cell, Columns, Sheet, tabulate
from gemmery_lab.report.terminal import Growing, laid_out
from gemmery_lab.rung_counts import EmulatedLadder, EmulatedRung, PredictedRung, agreement

KINDS = {
    "fma": ("fma",),
    "mma": ("mma",),
    "loads": ("ld", "ldmatrix"),
    "stores": ("st", "stmatrix"),
    "cp.async": ("cp.async",),
    "barriers": ("bar",),
}  # instructions with a column of their own
PARENTS = {rung.name: rung.parent for rung in CUDA}
CHOOSING = {rung.name for rung in CUDA if rung.default.get("bm") == 0}
BAR = 15  # characters that the longest bar has more than the shortest
COUNTED, ROOF, MEANING = (words.NOTES[name] for name in ("counted", "emulated_roof", "predicted"))

Runs = Sequence[EmulatedRung]


def overviews(ladder: EmulatedLadder) -> tuple[Sheet, ...]:
    """One table for each size: what each rung counted, its roof, and how that compares with its parent's."""
    return tuple(_overview(ladder, runs) for runs in by_size(ladder) if not all(run.refused for run in runs))


def emulated_sheets(ladder: EmulatedLadder) -> tuple[Sheet, ...]:
    """For each size: global memory; shared memory and branches; the roofs; instructions by kind; the checks."""
    sheets = []
    for runs in by_size(ladder):
        shared = _sheet("Shared memory and branches", runs, _counters(words.WORDS["shared"]), _wavefronts(runs))
        sheets += [_memory(runs), shared, _roofs(runs), _kinds(runs), _checks(runs)]
    return tuple(sheets)


def verdict(ladder: EmulatedLadder) -> str:
    """The checks of all rungs in a sentence."""
    ran = [run for run in ladder.rungs if not run.refused]
    if not ran:
        return f"No rung ran: {'; '.join(dict.fromkeys(f'{run.rung}, {run.refused}' for run in ladder.rungs))}."
    right = sum(run.error <= 1 for run in ran)
    count, unmet = sum(len(run.findings) for run in ran), sum(len(run.unmet) for run in ran)
    findings = numerals.plural(count, "finding") if count else "no findings"
    claims = f"{numerals.plural(unmet, 'counter')} not as expected" if unmet else "all counters are as expected"
    absent = len(ladder.rungs) - len(ran)
    refused = f"; {numerals.plural(absent, 'rung')} did not run" if absent else ""
    return f"{right} of {len(ran)} results are right, {findings}, {claims}{refused}."


def complaints(ladder: EmulatedLadder) -> tuple[str, ...]:
    """The faults of the rungs, a line each; () when there are none."""
    return tuple(f"{run.rung}, {_shape(run)}, {run.dtype}: it {fault}" for run in ladder.rungs for fault in run.wrong)


def described(device: Device) -> str:
    """The device in a line."""
    where = f"{device.name}: {device.arch}, {device.sms} multiprocessors at {device.clock:.4g} GHz"
    return f"{where}, {numerals.digits(device.bandwidth)} GB/s"


def peaks(device: Device) -> str:
    """The peaks that the roofs come from, in a sentence."""
    known = {name: device.peak(unit) for unit, name in words.UNITS.items() if device.peak(unit)}
    listed = "; ".join(f"{numerals.digits(peak)} by {name}" for name, peak in known.items())
    return f"Peaks in GFLOP/s: {listed}."


def _shape(run: EmulatedRung) -> str:
    """`n = 256`, or all three sides where they differ."""
    return f"n = {run.n}" if run.m == run.n == run.k else f"{run.m} × {run.n} × {run.k}"


def by_size(ladder: EmulatedLadder) -> list[list[EmulatedRung]]:
    """Return the rungs of each size, in the order of the ladder."""
    sizes = dict.fromkeys(run.size for run in ladder.rungs)
    return [[run for run in ladder.rungs if run.size == size] for size in sizes]


def _sheet(title: str, runs: Runs, columns: Columns[EmulatedRung], notes: Sequence[str] = ()) -> Sheet:
    """A row for each rung that ran."""
    ran = [run for run in runs if not run.refused]
    return tabulate(f"{title}, n = {runs[0].size}", [("rung", lambda run: run.rung), *columns], ran, notes)


def _number(value: float) -> Cell:
    """A count, or a figure; zeros are faint."""
    text = f"{value:,}" if isinstance(value, int) else numerals.digits(value)
    return Cell(text if value else "0", tone="" if value else "faint")


def _counters(names: dict[str, str]) -> Columns[EmulatedRung]:

    def cell(run: EmulatedRung, name: str) -> Cell:
        return _number(getattr(run.counts, name))

    return [(head, partial(cell, name=name)) for name, head in names.items()]


def over_parent(ladder: EmulatedLadder, run: EmulatedRung) -> str:
    """Return the gain of a rung over its parent by their roofs, "" without one."""
    parent = PARENTS.get(run.rung)
    factor = ladder.gain(run, parent)
    return f"{numerals.digits(factor)}× {parent}" if factor else ""


def gains(ladder: EmulatedLadder) -> dict[str, str]:
    """Return the gain of each rung over its parent: by predicted times where there are any, else by roofs."""
    if not ladder.predicted:
        return {run.rung: over_parent(ladder, run) for runs in by_size(ladder)[-1:] for run in runs}
    factors = {row.rung: predicted_gain(ladder, row) for row in ladder.predicted}
    return {rung: f"{numerals.digits(factor)}× {PARENTS[rung]}" for rung, factor in factors.items() if factor}


def _overview(ladder: EmulatedLadder, runs: Runs) -> Sheet:
    names = {name: name.replace("_", " ") for name in ("sectors", "wavefronts", "bank_conflicts")}
    columns: Columns[EmulatedRung] = [
        *_counters({**names, "warp_instructions": "instructions"}),
        ("roof, µs", lambda run: _number(run.roof_seconds * 1e6)),
        *([] if ladder.predicted else [("limit", lambda run: run.limit)]),  # a prediction knows better
        ("× parent", partial(over_parent, ladder)),
    ]
    ran = [run for run in runs if not run.refused]
    return _sheet("Counters and roofs", runs, columns, [*_products(runs), *_tiles(ran, ladder.device)])


def _products(runs: Runs) -> list[str]:
    """Notes on rungs with another product than most, and on those that did not run."""
    others: dict[str, list[str]] = {}
    for run in runs:
        if not run.refused and (not run.m == run.n == run.k == run.size or run.dtype != runs[0].dtype):
            others.setdefault(f"{_shape(run)}, {run.dtype}", []).append(run.rung)
    listed = "; ".join(f"{product}: {', '.join(names)}" for product, names in others.items())
    notes = [f"Other products: {listed}."] if listed else []
    return notes + [f"{run.rung} did not run: {run.refused}" for run in runs if run.refused]


def _tiles(ran: Runs, device: Device) -> list[str]:
    """How full the grids leave the device, and which rungs chose their tiles by the size of the product."""
    notes = []
    if few := [run for run in ran if run.blocks < device.sms]:
        least, most = min(run.blocks for run in few), max(run.blocks for run in few)
        blocks = numerals.plural(least, "block") if least == most else f"{least} to {most} blocks"
        have, all_of = ("has", "The grid") if len(few) == 1 else ("have", "All grids")
        which = all_of if len(few) == len(ran) else f"{len(few)} of {len(ran)} grids"
        fewer = f"{which} {have} {blocks} at this size, fewer than the {device.sms} multiprocessors"
        notes.append(f"{fewer}; the roofs are those of larger products.")
    if tiles := [f"{run.rung} {run.tile[0]} × {run.tile[1]}" for run in ran if run.rung in CHOOSING]:
        notes.append(
            f"Rungs that choose their tile by the size of the product: {', '.join(tiles)}. Smaller tiles fill the "
            "device, and load more."
        )
    return notes


def _memory(runs: Runs) -> Sheet:
    note = "Bytes used are those of a 32-byte sector that a lane requests."
    return _sheet("Global memory", runs, _counters(words.WORDS["memory"]), [note, *_products(runs)])


def _wavefronts(runs: Runs) -> list[str]:
    """Why wavefronts are not the sum of conflicts and of those for the bytes, for each rung where they are not."""
    counts = {run.rung: run.counts for run in runs}
    rests = {name: own.wavefronts - own.bank_conflicts - own.wavefronts_ideal for name, own in counts.items()}
    fewer = ", ".join(f"{name} {-rest:,}" for name, rest in rests.items() if rest < 0)
    extra = ", ".join(f"{name} {rest:,}" for name, rest in rests.items() if rest > 0)
    shared = "Fewer, because lanes that read the same words share a wavefront of a wide load"
    copied = "More without a conflict, because cp.async takes a wavefront for each line of global memory and row of "
    copied += "banks that it joins"
    causes = ((shared, fewer), (copied, extra))
    return [IDEAL_WAVEFRONTS, *(f"{cause}: {rungs}." for cause, rungs in causes if rungs)]


def _roofs(runs: Runs) -> Sheet:
    def roof(run: EmulatedRung, name: str) -> Cell:
        time = run.roofs[name]
        return Cell(numerals.digits(time * 1e6), tone="best" if name == run.limit else "" if time else "faint")

    columns: Columns[EmulatedRung] = [
        ("Mflop", lambda run: _number(run.counts.flops / 1e6)),
        ("MB", lambda run: _number(run.counts.bytes / 1e6)),
        ("flops a byte", lambda run: _number(run.intensity)),
        *((f"{name}, µs", lambda run, name=name: roof(run, name)) for name in runs[0].roofs),
        ("blocks", lambda run: _number(run.blocks)),
    ]
    return _sheet("Roofs: times without caches", runs, columns)


def _kinds(runs: Runs) -> Sheet:
    def count(run: EmulatedRung, column: str) -> int:
        return sum(number for kind, number in run.kinds.items() if kind in KINDS[column])

    present = [column for column in KINDS if any(count(run, column) for run in runs)]

    def others(run: EmulatedRung) -> Cell:
        return _number((run.counts.warp_instructions - sum(count(run, column) for column in present)) / 1e3)

    columns: Columns[EmulatedRung] = [
        *((column, lambda run, column=column: _number(count(run, column) / 1e3)) for column in present),
        ("others", others),
    ]
    return _sheet("Warp instructions by kind, in thousands", runs, columns)


def _checks(runs: Runs) -> Sheet:
    def claims(run: EmulatedRung) -> Cell:
        if run.unmet:
            return Cell(f"{len(run.unmet)} differ !", tone="bad")
        return Cell("as expected" if run.expected else "")

    columns: Columns[EmulatedRung] = [
        ("error/bound", lambda run: f"{run.error:.2g}" if run.error <= 1 else Cell(f"{run.error:.2g} !", tone="bad")),
        ("findings", lambda run: Cell(f"{len(run.findings)} !", tone="bad") if run.findings else "none"),
        ("counters", claims),
    ]
    notes = [f"{run.rung} {fault}" for run in runs for fault in run.wrong]
    if any(not run.refused and not run.expected for run in runs):
        notes.append("Counters are expected of products without partial tiles, and not of every rung.")
    return _sheet("Checks", runs, columns, notes)


def emulated_progress(console: Console) -> Growing[EmulatedRung]:
    """Return the progress of an emulated ladder; `update` it with every rung."""
    return Growing(console, _line, lambda runs: [_memory(runs)], lambda run: run.size)


def _line(run: EmulatedRung) -> str:
    what = f"{run.rung}, {_shape(run)}, {run.dtype}"
    if run.refused:
        return f"{what}: not run, {run.refused}"
    counts = f"{run.counts.sectors:,} sectors, {run.counts.bank_conflicts:,} bank conflicts"
    return f"{what}: {counts}, error/bound {run.error:.2g}" + "".join(f"; it {fault}" for fault in run.wrong)


def show_emulated(ladder: EmulatedLadder, console: Console) -> None:
    """Print one table for each size, what it means, and the verdict."""
    for sheet in (*predicted_sheets(ladder, drawn=True), *overviews(ladder)):
        console.print(Group(*laid_out(sheet, console.width)))
    if any(not run.refused for run in ladder.rungs):
        for text in (COUNTED, ROOF, f"{described(ladder.device)}. {peaks(ladder.device)}"):
            console.print(Text(text, style="dim"))
        if (name := ladder.device.name) not in (known := predictable()):
            missing = f"No times are predicted for {name}, whose latencies are not known"
            console.print(Text(f"{missing}; they are for {', '.join(known)}.", style="dim"))
    faults = complaints(ladder)
    console.print(Text(verdict(ladder), style="bold red" if faults else "bold"))
    for fault in faults:
        console.print(Text(fault, style="red"))


def predicted_sheets(ladder: EmulatedLadder, drawn: bool = False) -> tuple[Sheet, ...]:
    """One table of all predicted times, with bars of characters if `drawn`; none where nothing was predicted."""
    if not any(row.prediction for row in ladder.predicted):
        return ()
    device, largest = ladder.device, max(row.n for row in ladder.predicted)
    rates = [row.rate() for row in ladder.predicted if row.prediction and row.m == row.k == largest]

    def bar(row: PredictedRung) -> Cell:
        span = math.log(max(rates) / min(rates)) if rates and row.prediction else 0.0  # of one rung there are no bars
        length = round(1 + BAR * math.log(row.rate() / min(rates)) / span) if span else 0
        return Cell(("█" * length).ljust(BAR + 1, "░")[: BAR + 1])

    def step(row: PredictedRung) -> str:
        factor = predicted_gain(ladder, row)
        return f"{numerals.digits(factor)}×" if factor else ""

    def share(row: PredictedRung) -> Cell:
        peak = device.peak(row.unit) * 1e9 if row.unit and not row.rung.startswith(words.IN_PARTS) else 0.0
        return Cell(numerals.percent(row.rate() / peak), bar=row.rate() / peak) if peak and row.prediction else Cell("")

    def of_record(row: PredictedRung, text: str) -> str:
        return text if row.measured else ""

    recorded: Columns[PredictedRung] = [
        ("measured", lambda row: of_record(row, numerals.digits(row.rate(row.measured) / 1e12))),
        ("measured, µs", lambda row: of_record(row, numerals.digits(row.measured * 1e6))),
        ("ratio", lambda row: of_record(row, f"{row.ratio:.2f}")),
    ]
    recorded = recorded if any(row.measured for row in ladder.predicted) else []
    columns: Columns[PredictedRung] = [
        ("rung", lambda row: row.rung),
        *([("", bar)] if drawn else []),
        ("TFLOP/s", lambda row: numerals.digits(row.rate() / 1e12) if row.prediction else ""),
        *recorded[:1],
        ("× parent", step),
        ("bound by", lambda row: row.prediction.bound if row.prediction else Cell("not predicted", tone="faint")),
        ("type", lambda row: row.dtype),
        ("m × n × k", lambda row: "" if row.m == row.k == largest else f"{row.m} × {row.n} × {row.k}"),
        ("% peak", share),
        ("µs", lambda row: numerals.digits(row.prediction.seconds * 1e6) if row.prediction else ""),
        *recorded[1:],
    ]
    name, both = device.name, agreement(ladder.predicted)
    records = f"Too few of these products have records of {name} here; a clone of the sources has some of h200."
    if both is not None:
        records = f"Against {numerals.plural(both.count, 'record')} of {name}: rank correlation {both.rank:.3f}, "
        records += f"median error {both.error:.1%}."
    notes = [records, MEANING, origin(device), *_doubts(ladder)]
    return (tabulate(f"The ladder at n = {largest}, predicted on {name}", columns, ladder.predicted, notes),)


def predicted_gain(ladder: EmulatedLadder, row: PredictedRung) -> float:
    """Return how many times as fast as its parent a rung is predicted to be; 0 where they cannot be compared."""
    for other in ladder.predicted:
        if other.rung == PARENTS.get(row.rung) and (other.m, other.n, other.k) == (row.m, row.n, row.k):
            return row.rate() / other.rate() if other.rate() else 0.0
    return 0.0


def _doubts(ladder: EmulatedLadder) -> list[str]:
    """What the predictions do not take into account, each with its rungs, and what was not predicted."""
    rungs: dict[str, list[str]] = {}
    for row in ladder.predicted:
        for doubt in row.prediction.doubts if row.prediction else ():
            rungs.setdefault(doubt.partition(":")[0], []).append(row.rung)
    notes = [f"Not modeled: {doubt}, in {numerals.plural(len(set(names)), 'rung')}." for doubt, names in rungs.items()]
    return notes + [f"{row.rung} is not predicted: {row.refused}" for row in ladder.predicted if row.refused]
