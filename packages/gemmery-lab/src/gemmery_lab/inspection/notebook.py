"""`gm.inspect()`: the records of one rung, or of two side by side, in a terminal and as the page of notebooks too."""

# No `from __future__ import annotations` here: help() would show annotations as strings.

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gemmery.cuda.sass import arithmetic, is_notable, multiply_adds, ordered
from gemmery.errors import ArgumentError, not_installed
from gemmery_emulator.kernels.counters import COSTS, COUNTS, Row, Section, counts_section, marked, number_rows
from gemmery_emulator.kernels.kernel_run import KernelRun, KernelRuns, paired_pictures, with_page
from gemmery_emulator.pages import numerals
from gemmery_emulator.run import EmulatedRun
from gemmery_lab.inspection import records
from gemmery_lab.inspection.gather import inspections
from gemmery_lab.inspection.records import (
    AnyInspection,
    AnyPair,
    CpuSideBySide,
    Inspection,
    SideBySide,
    roof_seconds,
    size,
)
from gemmery_lab.inspection.sections import (
    BARRIERS_NOTE,
    CACHES_NOTE,
    COSTS_NOTE,
    ROOFS_NOTE,
    codes,
    configured,
    launch_facts,
    lesson,
    sections,
    subject,
    untraced,
)

if TYPE_CHECKING:
    from rich.console import Console


def _displayed(kind: type) -> Any:
    """A kind of record that a notebook displays as a page, and that is one line without the code of its kernels."""

    def one_line(record: Any) -> str:
        if isinstance(record, AnyInspection):
            return f"<Inspection of {record.rung}: {subject(record)}>"
        return f"<Comparison of {record.old.rung} and {record.new.rung}: {subject(record.new, config=False)}>"

    own = {"__doc__": kind.__doc__, "__module__": __name__, "__repr__": one_line, "_repr_html_": _framed}
    return type(f"Notebook{kind.__name__}", (kind,), own)


def inspect(
    rung: str | EmulatedRun,
    other: str | EmulatedRun = "",
    *,
    m: int = 0,
    n: int = 0,
    k: int = 0,
    dtype: str = "",
    config: Mapping[str, int] | None = None,
    device: str = "",
    line: str = "",
    counters: bool = True,
) -> AnyInspection | AnyPair | KernelRun | KernelRuns:
    """Show the resources, occupancy, roofline and memory counters by line of a GPU rung, or of two side by side.

    Of a CPU rung show its loops, its inner loop in assembly, its loads and stores in a model of the caches, and roofs.

    The product is C[m, n] = A[m, k] B[k, n]; an exhibit takes an array of n elements instead. `n` defaults to 4096 (512
    on the CPU), `m` and `k` to `n`. A rung that takes only vectors gets m = 1 and a B whose columns are contiguous, as
    on the ladder. `dtype` defaults to the first that the rungs take; "tf32" is f32 on tensor cores. `device` is "cuda",
    a card ("a100") or an architecture ("sm_80"); it defaults to the device of this machine, or "h200" without one. No
    GPU is needed.

    The emulator takes the counters, with sides of at most 256; `counters=False` leaves them out. `line`, such as
    "simt_smem.cu:18", chooses the line whose accesses are drawn; the default is the costliest.

    >>> inspection = inspect("simt_smem", n=1024, device="h200")
    >>> inspection.kernels[-1].spilled, inspection.emulated.total.bank_conflicts
    (0, 0)

    A run of `gm.emulate` is inspected alone or beside another run, without the other arguments.

    Raises ArgumentError for an unknown rung, config or line, RefusedError where the rung does not take the product.
    """
    if isinstance(rung, EmulatedRun) or isinstance(other, EmulatedRun):
        if m or n or k or dtype or config or device or line:
            raise ArgumentError("inspect(run): m, n, k, dtype, config, device and line are for rungs; leave them out")
        if isinstance(rung, EmulatedRun) and isinstance(other, EmulatedRun):
            return KernelRuns(rung, other)
        if isinstance(rung, EmulatedRun) and not other:
            return with_page(rung)
        raise ArgumentError(f"inspect({rung!r}, {other!r}): compare two runs, or two rungs")
    names = [rung, *([other] if other else [])]
    product = {"m": m, "n": n, "k": k, "dtype": dtype, "config": config}
    first, *second = (each() for each in inspections(names, device, line, counters, **product))
    record = records.paired(first, *second) if second else first
    page: AnyInspection | AnyPair = DISPLAYED[type(record)](
        **{field.name: getattr(record, field.name) for field in fields(record)}
    )
    return page


def _framed(record: AnyInspection | AnyPair) -> str:
    """The page of one rung or of two, in a frame."""
    try:
        from gemmery_emulator.pages.rendering import framed

        if isinstance(record, AnyInspection):
            return framed(inspection_page(record), f"gemmery inspect {record.rung}")
        return framed(side_by_side_page(record), f"gemmery inspect {record.old.rung} {record.new.rung}")
    except ModuleNotFoundError as error:
        raise not_installed(error, "the page of gemmery.inspect") from error


KINDS = (records.Inspection, records.CpuInspection, records.SideBySide, records.CpuSideBySide)
DISPLAYED = {kind: _displayed(kind) for kind in KINDS}
NotebookInspection = DISPLAYED[records.Inspection]


def show_inspection(inspection: AnyInspection, console: "Console", ptx: bool = False, sass: bool = False) -> None:
    """Print an inspection, and the requested code."""
    from rich.text import Text

    from gemmery_emulator.kernels.terminal_tables import show_section

    console.print(Text.assemble((inspection.rung, "bold"), (f": {inspection.idea}", "dim")))
    console.print(Text(subject(inspection), style="dim"))
    for section in sections(inspection):
        show_section(section, console)
    for title, text in codes(inspection, ptx, sass):
        console.print()
        console.print(Text(title, style="bold"))
        console.print(Text(text), soft_wrap=True)


def show_side_by_side(pair: AnyPair, console: "Console") -> None:
    """Print the facts of both, with the differences in colour."""
    from rich.text import Text

    from gemmery_emulator.kernels.terminal_tables import show_pair

    console.print(Text(f"{pair.old.rung} and {pair.new.rung}", style="bold"))
    console.print(Text(subject(pair.new, config=False), style="dim"))
    for inspection in (pair.old, pair.new):
        console.print(Text.assemble((f"{inspection.rung}: ", "dim"), inspection.idea))
    if changes := glance(pair):
        console.print(Text(changes))
    for section in differences(pair):
        show_pair(section, console)


def inspection_page(inspection: AnyInspection) -> str:
    """The page of one rung or exhibit."""
    from gemmery_emulator.pages.pictures import pictures  # load matplotlib
    from gemmery_emulator.pages.rendering import render
    from gemmery_lab.report.curves import roofline_plot

    counts, device, roofline = inspection.emulated, "the CPU", None
    if isinstance(inspection, Inspection):
        device = inspection.device.name
        roofline = roofline_plot(inspection.rung, device, inspection.loads, inspection.once)
    return render(
        "inspection.html",
        __package__,
        title=f"{inspection.rung} on {device}",
        inspection=inspection,
        lesson=lesson(inspection.rung),
        subject=subject(inspection),
        sections=sections(inspection),
        roofline=None if inspection.exhibit else roofline,
        plots=pictures(counts.chosen, counts.source) if counts else (),
        untraced=untraced(counts) if counts and counts.chosen.untraced else "",
        codes=codes(inspection),
    )


def side_by_side_page(pair: AnyPair) -> str:
    """The page of two, with the pictures of both."""
    from gemmery_emulator.pages.rendering import render

    return render(
        "side_by_side.html",
        __package__,
        title=f"{pair.old.rung} and {pair.new.rung}",
        glance=glance(pair),
        rungs=[(rung, lesson(rung.rung)) for rung in (pair.old, pair.new)],
        subject=subject(pair.new, config=False),
        sections=differences(pair),
        pairs=paired_pictures([(rung.rung, rung.emulated) for rung in (pair.old, pair.new)]),
    )


AT_BARRIERS = {
    "copies": "tensor copies",
    "bytes": "bytes of these",
    "waits": "waits of warpgroups",
    "slept": "of these while a phase is under way",
    "arrivals": "arrivals of threads",
    "phases": "phases",
    "products": "products of warpgroups",
}
ROOFS = ("compute", "memory", "shared", "issue", "roof")  # costs, too


def glance(pair: AnyPair) -> str:
    """The costs that differ, in a sentence: "Bank conflicts 12,288 → 0; sectors 8,192 → 6,144, 0.750×."."""
    before, after = pair.old.emulated, pair.new.emulated
    both = [f"{size(x, x.exhibit)}, {x.problem.precision or x.problem.dtype}" for x in (pair.old, pair.new)]
    if both[0] != both[1]:
        return f"Different products, so the counts do not compare: {both[0]}, and {both[1]}."
    if isinstance(pair, CpuSideBySide):
        numbers, times = _costs(pair)
        rows = [row for row in (*numbers.rows, times.rows[-1]) if row[3:] not in ((), ("",))]
        each = "; ".join(f"{name} {old} → {new}, {ratio}" for name, old, new, ratio in rows)
        return f"For 1,000 multiply-adds: {each} cycles." if rows else ""
    if not before or not after:
        return ""
    changes = []
    for name in COSTS:
        old, new = getattr(before.total, name), getattr(after.total, name)
        if old != new:
            ratio = f", {numerals.times(new / old)}" if old and new else ""
            changes.append(f"{COUNTS[name]} {old:,} → {new:,}{ratio}")
    text = "; ".join(changes) or "the counters are the same"
    old_roofs, new_roofs = roof_seconds(pair.old), roof_seconds(pair.new)
    if old_roofs and new_roofs:
        old, new = max(old_roofs.values()), max(new_roofs.values())
        first, second = (numerals.digits(1e6 * seconds) for seconds in (old, new))
        text += f"; roof {first} → {second} µs, {numerals.times(new / old)}" if first != second else ""
    return f"{text[0].upper()}{text[1:]}."


def differences(pair: AnyPair) -> tuple[Section, ...]:
    """Counters and roofs where both rungs were emulated, launches, instructions; or costs and loops of CPU rungs."""
    if isinstance(pair, CpuSideBySide):
        return _costs(pair)
    before, after = pair.old.emulated, pair.new.emulated
    old, new = (dict(launch_facts(rung.kernels[-1], rung)) for rung in (pair.old, pair.new))
    if pair.old.config or pair.new.config:
        old, new = {"config": configured(pair.old), **old}, {"config": configured(pair.new), **new}
    facts = [(name, old.get(name, ""), new.get(name, "")) for name in dict.fromkeys([*old, *new])]
    result = [_counters(pair), _roofs(pair), _section(pair, "Launch", facts), _machine(pair), _barriers(pair)]
    if before and after:
        result.append(_section(pair, "Instructions executed, by kind", number_rows(before.kinds, after.kinds)))
    return tuple(section for section in result if section)


def _costs(pair: CpuSideBySide) -> tuple[Section, ...]:
    """What 1,000 multiply-adds of two CPU rungs need, in numbers and in cycles."""
    both = pair.old, pair.new
    old, new = ({name: cost.count for name, cost in rung.costs.items()} for rung in both)
    slow, fast = ({name: cost.cycles for name, cost in rung.costs.items()} for rung in both)
    slow["roof"], fast["roof"] = max(slow.values()), max(fast.values())
    number, time = "For 1,000 multiply-adds", "The least cycles for these, at assumed rates"
    return (
        _section(pair, number, number_rows(old, new), f"{COSTS_NOTE} {CACHES_NOTE}", costs=old),
        _section(pair, time, number_rows(slow, fast), costs=slow),
    )


def _section(pair: AnyPair, title: str, rows: Iterable[Row], note: str = "", costs: Collection[str] = ()) -> Section:
    return marked((pair.old.rung, pair.new.rung), title, rows, note, costs)


def _counters(pair: SideBySide) -> Section | None:
    """The counters of both, or the reason why one of them has none."""
    before, after = pair.old.emulated, pair.new.emulated
    if not before or not after:
        reasons = [(rung.rung, rung.not_emulated, "") for rung in (pair.old, pair.new) if rung.not_emulated]
        return _section(pair, "Not counted", reasons) if reasons else None
    place = f"at {size(before, pair.old.exhibit)}, on the emulator"
    return counts_section((pair.old.rung, pair.new.rung), f"Counters, {place}", before, after)


def _roofs(pair: SideBySide) -> Section | None:
    """The roofs of both in microseconds, and the longest of each."""
    old, new = ({name: 1e6 * time for name, time in roof_seconds(rung).items()} for rung in (pair.old, pair.new))
    if not old or not new:
        return None
    first, second = (max(times, key=lambda name: times[name]) for times in (old, new))
    rows = number_rows({**old, "roof": old[first]}, {**new, "roof": new[second]})
    title = "Roofs of these counts on a full device, µs"
    return _section(pair, title, (*rows, ("limit", first, second, "")), ROOFS_NOTE, costs=ROOFS)


def _machine(pair: SideBySide) -> Section | None:
    """Machine instructions of both main loops for the same number of multiply-adds, or of the whole kernels."""
    kernels = pair.old.kernels[-1], pair.new.kernels[-1]
    loops = [kernel.step or kernel.loop for kernel in kernels]
    adds = [multiply_adds(loop) for loop in loops]
    if not all(adds):
        old, new = (kernel.counts for kernel in kernels)
        whole = "Machine instructions of the whole kernel"
        return _section(pair, whole, number_rows(old, new)) if old and new else None
    span = max(adds)
    scaled = [{name: n * span / own for name, n in loop.items()} for loop, own in zip(loops, adds, strict=True)]
    kinds = [{name: n for name, n in loop.items() if arithmetic({name: 1})} for loop in scaled]
    (name, number), *others = kinds[0].items()
    same = f"{number:,.0f} {name}" if kinds[0] == kinds[1] and not others else f"{span:,} multiply-adds of a warp"
    note = f"Both columns count the main loop over {same}, so that loops of different length compare."
    if names := [kernel.name.partition("<")[0] for kernel in kernels if not kernel.step]:
        note += f" The loop around that of {' and '.join(names)} is left out."
    notable = [name for name in ordered({**scaled[0], **scaled[1]}) if is_notable(name)]
    grouped = [{name: loop.get(name, 0) for name in notable} for loop in scaled]
    for group, loop in zip(grouped, scaled, strict=True):
        group["others"] = sum(loop.values()) - sum(group.values())
    rows = number_rows(*grouped)
    return _section(pair, f"Machine instructions of the main loop per {same}", rows, note)


def _barriers(pair: SideBySide) -> Section | None:
    """What the first blocks do at their mbarriers, where both kernels have some."""
    timelines = [run.emulated.chosen.timeline if run.emulated else None for run in (pair.old, pair.new)]
    counts = [{text: timeline.counts[name] for name, text in AT_BARRIERS.items()} for timeline in timelines if timeline]
    if len(counts) < 2:
        return None
    old, new = counts
    return _section(pair, "Barriers of the first block", number_rows(old, new), BARRIERS_NOTE)
