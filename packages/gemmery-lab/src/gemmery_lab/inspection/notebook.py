"""`gm.inspect()`: the records of one rung or two, in a terminal and as the page that notebooks display too."""

# No `from __future__ import annotations` here: help() would show annotations as strings.

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gemmery.errors import ArgumentError, not_installed
from gemmery_emulator.kernels.kernel_run import KernelRun, KernelRuns, paired_pictures, with_page
from gemmery_emulator.run import EmulatedRun
from gemmery_lab.inspection import records, side_by_side
from gemmery_lab.inspection.gather import inspections
from gemmery_lab.inspection.records import AnyInspection, AnyPair, Inspection
from gemmery_lab.inspection.sections import codes, lesson, sections, subject, untraced

if TYPE_CHECKING:
    from rich.console import Console


class NotebookInspection(records.Inspection):
    """A rung for one problem on one device; a notebook displays it as a page with its pictures."""

    def __repr__(self) -> str:
        """One line, without the code of its kernels."""
        return f"<Inspection of {self.rung}: {subject(self)}>"

    def _repr_html_(self) -> str:
        return _framed(self)


class NotebookCpuInspection(records.CpuInspection):
    """A CPU rung for one problem; a notebook displays it as a page."""

    __repr__ = NotebookInspection.__repr__
    _repr_html_ = NotebookInspection._repr_html_


class NotebookSideBySide(records.SideBySide):
    """Two rungs for the same product on the same device; a notebook displays them side by side."""

    def __repr__(self) -> str:
        """One line, without the code of their kernels."""
        return f"<Comparison of {self.old.rung} and {self.new.rung}: {subject(self.new, config=False)}>"

    def _repr_html_(self) -> str:
        return _framed(self)


class NotebookCpuSideBySide(records.CpuSideBySide):
    """Two CPU rungs for the same product; a notebook displays them side by side."""

    __repr__ = NotebookSideBySide.__repr__
    _repr_html_ = NotebookSideBySide._repr_html_


DISPLAYED: Mapping[type, Callable[..., Any]] = {
    records.Inspection: NotebookInspection,
    records.CpuInspection: NotebookCpuInspection,
    records.SideBySide: NotebookSideBySide,
    records.CpuSideBySide: NotebookCpuSideBySide,
}


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
    first, *second = (each() for each in inspections(names, m, n, k, dtype, config, device, line, counters))
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

    console.print(Text(side_by_side.title(pair), style="bold"))
    console.print(Text(subject(pair.new, config=False), style="dim"))
    for inspection in (pair.old, pair.new):
        console.print(Text.assemble((f"{inspection.rung}: ", "dim"), inspection.idea))
    if glance := side_by_side.glance(pair):
        console.print(Text(glance))
    for section in side_by_side.sections(pair):
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
        title=side_by_side.title(pair),
        glance=side_by_side.glance(pair),
        rungs=[(rung, lesson(rung.rung)) for rung in (pair.old, pair.new)],
        subject=subject(pair.new, config=False),
        sections=side_by_side.sections(pair),
        pairs=paired_pictures([(rung.rung, rung.emulated) for rung in (pair.old, pair.new)]),
    )
