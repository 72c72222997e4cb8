"""A run as one self-contained HTML page: no script, font or image from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from gemmery.bench.record import MachineRecord, Run
from gemmery.ladder.diff import pseudocode
from gemmery.ladder.rung import Rung
from gemmery.pages import numerals
from gemmery.pages.rendering import render
from gemmery.report import words
from gemmery.report.figures import drawn
from gemmery.report.ladder_tables import tree
from gemmery.report.problems import Group, banner, doubts, fullest, gain, gains, label, largest
from gemmery.report.tables import over_fastest, results, tabulated

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
    return render(
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
