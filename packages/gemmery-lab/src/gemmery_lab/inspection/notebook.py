"""`gm.inspect()`: the records of one rung, or of two side by side, in a terminal and as the page of notebooks too."""

# No `from __future__ import annotations` here: help() would show annotations as strings.

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gemmery.errors import ArgumentError, brief, not_installed
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.exhibits import EXHIBITS, Exhibit
from gemmery.ladder.rung import Rung
from gemmery_emulator.kernels.counters import EmulatorCounts
from gemmery_emulator.kernels.kernel_run import KernelRun, KernelRuns, paired_pictures, with_page
from gemmery_emulator.run import EmulatedRun
from gemmery_lab.inspection import records
from gemmery_lab.inspection.gather import inspections
from gemmery_lab.inspection.records import AnyInspection, AnyPair, CpuInspection, Inspection
from gemmery_lab.inspection.sections import differences, glance, sections, subject

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
    if not isinstance(other, str | EmulatedRun | None):
        raise ArgumentError(f"other={brief(other)}: pass the name of a rung, or a run of gm.emulate")
    if not isinstance(line, str):
        raise ArgumentError(f"line={brief(line)}: pass FILE:LINE as text, such as 'simt_smem.cu:18'")
    if isinstance(rung, EmulatedRun) or isinstance(other, EmulatedRun):
        if m or n or k or dtype or config or device or line:
            raise ArgumentError("inspect(run): m, n, k, dtype, config, device and line are for rungs; leave them out")
        if isinstance(rung, EmulatedRun) and isinstance(other, EmulatedRun):
            return KernelRuns(rung, other)
        if isinstance(rung, EmulatedRun) and not other:
            return with_page(rung)
        raise ArgumentError(f"inspect({brief(rung)}, {brief(other)}): compare two runs, or two rungs")
    names = [rung, *([other] if other else [])]
    product = {"m": m, "n": n, "k": k, "dtype": dtype, "config": config}
    first, *second = (each() for each in inspections(names, device, line, counters, **product))
    record = records.paired(first, *second) if second else first
    page: AnyInspection | AnyPair = DISPLAYED[type(record)](**vars(record))
    return page


def _framed(record: AnyInspection | AnyPair) -> str:
    """The page of one rung or of two, in a frame."""
    try:
        from gemmery_emulator.pages.writing import framed

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
    """Print the facts of both, with the differences in color."""
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
    from gemmery_emulator.pages.writing import render
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
    from gemmery_emulator.pages.writing import render

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


def codes(inspection: AnyInspection, ptx: bool = True, sass: bool = True) -> list[tuple[str, str]]:
    """Titles and texts of the code of every launch, or of a CPU rung's module."""
    if isinstance(inspection, CpuInspection):
        name = inspection.rung
        rows = [("LLVM IR", name, inspection.ir, ptx), ("Assembly", name, inspection.assembly, sass)]
    else:
        pairs = [(("PTX", x.name, x.ptx, ptx), ("SASS", x.name, x.sass or x.missing, sass)) for x in inspection.kernels]
        rows = [row for pair in pairs for row in pair]
    return [(f"{kind} of {name}", text) for kind, name, text, is_shown in rows if is_shown]


def lesson(name: str) -> str:
    """What a reader learns from a rung or an exhibit."""
    rows: tuple[Rung | Exhibit, ...] = (*CPU, *CUDA, *EXHIBITS)
    return next((row.lesson for row in rows if row.name == name), "")


def untraced(counts: EmulatorCounts) -> str:
    """The reason why there is no picture of a tile."""
    known = "the contents of shared memory are known only where a kernel stores what it loaded from global memory"
    tile = f"There is no picture of the tile of {' or '.join(counts.chosen.untraced)}"
    return f"{tile}: {known}, unchanged or converted. This one stores other values."
