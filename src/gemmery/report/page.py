"""A run, or the ladder on the emulator, as one self-contained HTML page: no script, font or image from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.ticker import LogLocator, NullFormatter

from gemmery.bench.record import MachineRecord, Run
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.diff import pseudocode
from gemmery.ladder.rung import Rung
from gemmery.pages import numerals, rendering
from gemmery.pages.pictures import pictures
from gemmery.pages.svg import NUMBER, RIVAL, SERIES, TOKENS, Plot, annotate, axes, legend, name_rows, render
from gemmery.report import words
from gemmery.report.emulated_tables import (
    COUNTED,
    ROOF,
    by_size,
    complaints,
    described,
    emulated_sheets,
    over_parent,
    overviews,
    peaks,
    predicted_sheets,
    verdict,
)
from gemmery.report.figures import drawn
from gemmery.report.tables import over_fastest, results, tabulated, tree
from gemmery.report.words import Group, banner, doubts, fullest, gain, gains, label, largest
from gemmery.rung_counts import EmulatedLadder, EmulatedRung

LEAD = (
    "Every rung is one kernel for the same matrix product, C = A B, and changes one thing in the rung that it grew "
    "from, its parent. This page shows what each change gained on this machine, next to {}."
)


def page(run: Run, rungs: Sequence[Rung] = ()) -> str:
    """Return the page of a run.

    >>> Path("ladder.html").write_text(page(run, CPU))  # doctest: +SKIP
    """
    of = results(run, rungs)
    problems, climbed, gpu = of.problems, of.climbed, run.machine.gpu.name
    over = gains(climbed, problems) if problems else {}
    fastest = largest(problems) if problems else None
    title, library = words.title(run), "cuBLAS, the vendor's library" if gpu else "the library that NumPy calls"
    return rendering.render(
        "run.html",
        __package__,
        title=f"{title} on {words.processor(run.machine)[0]}",
        heading=title,
        where=" · ".join([*words.processor(run.machine), words.when(run)]),
        warning=banner(run),
        lead=LEAD.format(library) if problems else "",
        tiles=_tiles(fastest) if fastest and not doubts(run) else (),
        tiles_of=f"{words.shape(fastest.first)}, {words.types(fastest.first)}" if fastest else "",
        plots=drawn(of),
        branches=tree(climbed) if len(climbed) > 1 else (),
        gains={rung.name: f"{over[rung.name]} {rung.parent}" for rung in climbed if over.get(rung.name)},
        gains_at=words.shape(fullest(problems).first) if problems else "",
        sheets=tabulated(of),
        lessons=[(rung, _measured(rung, problems), pseudocode(rung.source, rung.name)) for rung in climbed],
        gpu=bool(gpu),
        facts=_facts(run.machine),
        footer=f"gemmery {run.machine.gemmery}, {words.when(run)}",
    )


def _tiles(group: Group) -> list[tuple[str, str]]:
    """The key figures of a problem of the ladder."""
    ran = [m for m in group.rungs if m.seconds]
    if not ran:
        return []
    best = max(ran, key=lambda m: m.gflops)
    tiles = [(numerals.digits(words.reached(best)), f"{words.rate(best)} by {best.kernel}")]
    if part := words.share(best):
        peak = numerals.digits(words.reached(best, best.peak_gflops))
        tiles.append((numerals.percent(part), f"of the measured peak, {peak}"))
    if over := over_fastest(best, group):
        tiles.append((numerals.times(*over[1]), f"the speed of {label(over[0], group)}"))
    if best is not ran[0]:
        tiles.append((numerals.times(ran[0].seconds / best.seconds), f"the speed of {ran[0].kernel}"))
    return tiles


def _measured(rung: Rung, problems: Sequence[Group]) -> str:
    """A rung's gain over its parent at every size, or its times if it has none, and its config."""
    own = [(group, m) for group in problems for m in group.rungs if m.kernel == rung.name]
    if rung.parent:
        results = [f"{over} at {words.shape(m)}" for group, m in own if (over := gain(m, rung.parent, group))]
    else:
        results = [f"{numerals.duration(m.seconds)} at {words.shape(m)}" for _, m in own if m.seconds]
    configs = {f"{key} {value}" for _, m in own for key, value in rung.explicit(m.config).items()}
    against = f"Against {rung.parent}: " if rung.parent else ""
    return (f"{against}{', '.join(results)}." if results else "") + (
        f" With {', '.join(sorted(configs))}." if configs else ""
    )


def _facts(machine: MachineRecord) -> list[tuple[str, str]]:
    """The properties of a machine by name; those without a value are not shown."""
    gpu = machine.gpu
    power = f"{gpu.power_w:g} W" if gpu.power_w else "unknown: NVML is not found"
    device = [
        ("GPU", gpu.name),
        ("Compute capability", f"{gpu.capability / 10:.1f}"),
        ("Multiprocessors", str(gpu.sms)),
        ("L2", numerals.size(gpu.l2)),
        ("Clock, at most", f"{gpu.clock_mhz} MHz"),
        ("Power limit", power),
        ("Driver", f"{gpu.driver or 'unknown'}, CUDA {gpu.cuda}"),
        ("NVRTC", gpu.nvrtc),
    ]
    return [
        *(device if gpu.name else []),
        ("CPU", machine.cpu),
        ("Instruction set", machine.isa),
        ("Cores", str(machine.cores)),
        *((name, numerals.size(size)) for name, size in words.caches(machine) if not gpu.name),
        ("System", machine.os),
        ("Python", machine.python),
        ("NumPy", f"{machine.numpy}, {machine.blas}"),
        ("llvmlite", machine.llvmlite),
    ]


ROW = 26  # height of a rung
INTRODUCTION = (
    "Each rung multiplied two small matrices here. Its result was checked, and what it did was counted; no time was "
    "measured. Read the first table from top to bottom: what falls from a rung to the next is what the rung saves. "
    '"Rung by rung" says what each changes, and draws its costliest access to memory.'
)
COLOURS = dict(zip(("compute", "memory", "shared", "issue"), (RIVAL, *SERIES[1:4]), strict=True))


def emulated_page(ladder: EmulatedLadder) -> str:
    """Return the page of a ladder, or of a sweep, whose rungs have names of their own."""
    ran = {rung.rung for rung in ladder.rungs}
    rungs = tuple(rung for rung in CUDA if rung.name in ran)
    title = "The ladder" if rungs else "The sweep"
    return rendering.render(
        "emulated.html",
        __package__,
        title=f"{title} on the emulator, as {ladder.device.name}",
        heading=f"{title}, emulated",
        where=f"{described(ladder.device)}, on the emulator · {ladder.started[:16].replace('T', ' ')} UTC",
        verdict=verdict(ladder),
        introduction=INTRODUCTION if rungs else "",
        complaints=complaints(ladder),
        overviews=(*overviews(ladder), *predicted_sheets(ladder)),
        meaning=(COUNTED, ROOF, peaks(ladder.device)),
        branches=tree(rungs),
        gains={run.rung: over_parent(ladder, run) for run in by_size(ladder)[-1]} if ladder.rungs else {},
        roofs=roofs(ladder),
        lessons=list(_lessons(ladder, rungs)),
        sheets=emulated_sheets(ladder),
    )


def _lessons(ladder: EmulatedLadder, rungs: Sequence[Rung]) -> Iterator[tuple[Rung, str, Plot | None]]:
    """Each rung with its claims, and a picture of its costliest access to shared memory, or else to global memory."""
    explained: set[str] = set()
    for rung in rungs:
        counters = {name.replace("_a_", " per ").replace("_", " "): value for name, value in rung.expect.items()}
        claims = ", ".join(f"{name} {value:g}" for name, value in counters.items())
        note = f"Expected where all tiles are whole: {claims}." if claims else ""
        yield rung, note, _picture(ladder, rung.name, explained)


def _picture(ladder: EmulatedLadder, name: str, explained: set[str]) -> Plot | None:
    """The picture of a rung; the kinds of pictures on the page so far are `explained`, and are not again."""
    run = next((run for run in ladder.rungs if run.rung == name and not run.refused), None)
    if run is None:
        return None
    plots = {plot.name: plot for plot in pictures(run.chosen, run.source, f"{name}-", frozenset(explained))}
    for kind in ("banks", "sectors"):
        if plot := plots.get(f"{name}-{kind}-1"):
            explained.add(kind)
            return plot
    return None


def roofs(ladder: EmulatedLadder) -> tuple[Plot, ...]:
    """A figure for each size: every rung that ran with its four roofs."""
    sizes = [[run for run in runs if not run.refused] for runs in by_size(ladder)]
    return tuple(_roofs(runs[0].size, runs) for runs in sizes if runs)


def _roofs(size: int, rungs: list[EmulatedRung]) -> Plot:
    times = [time * 1e6 for run in rungs for time in run.roofs.values() if time]
    with axes(ROW * len(rungs) + 90) as on:
        on.set_xscale("log")
        low, high = min(times) / 1.5, max(times) * 1.6
        for place, run in enumerate(rungs):
            top = run.roof_seconds * 1e6
            on.barh(place, top - low, left=low, height=0.5, color=TOKENS["soft"], linewidth=0)
            annotate(on, numerals.digits(top), (top, place), (9, 0), va="center", size=11)
        for name, colour in COLOURS.items():
            points = [(run.roofs[name] * 1e6, place) for place, run in enumerate(rungs) if run.roofs[name]]
            if points:
                x, y = zip(*points, strict=True)
                on.plot(x, y, "o", color=colour, label=name, zorder=4)
        on.set(xlim=(low, high), ylim=(len(rungs) - 0.4, -0.6))
        name_rows(on, range(len(rungs)), [_label(run, rungs[0]) for run in rungs], code_size=11)
        on.xaxis.set_major_locator(LogLocator(10))
        on.xaxis.set_major_formatter(NUMBER)
        on.xaxis.set_minor_formatter(NullFormatter())
        legend(on)
        on.set_xlabel("µs")
        svg = render(on, f"roofs-{size}", f"the four roofs of every rung at n = {size}")
    caption = (
        "Each dot is the time under one limit of the device, without caches, with which it may take less; the bar "
        "reaches to the longest, the roof. Shorter is better. The axis is logarithmic."
    )
    return Plot(f"roofs-{size}", f"The roofs of every rung, n = {size}", caption, svg)


def _label(run: EmulatedRung, first: EmulatedRung) -> str:
    vector = ", vector" if 1 in (run.m, run.n) else ""
    dtype = f", {run.dtype}" if run.dtype != first.dtype else ""
    return f"{run.rung}{dtype}{vector}"
