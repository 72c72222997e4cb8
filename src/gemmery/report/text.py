"""Records as text: Markdown for documents, and JSON for other programs."""

from __future__ import annotations

from collections.abc import Sequence

from gemmery.bench.record import MachineRecord, Run
from gemmery.ladder.rung import Rung
from gemmery.pages import numerals
from gemmery.report import words
from gemmery.report.problems import banner
from gemmery.report.sheet import Cell, Sheet
from gemmery.report.tables import sheets


def machine(machine: MachineRecord) -> str:
    """Return the machine of a run in one line."""
    if machine.gpu.name:
        return _gpu(machine)
    caches = ", ".join(f"{name} {numerals.size(size)}" for name, size in words.caches(machine))
    versions = {
        "Python": machine.python,
        "NumPy": machine.numpy,
        "llvmlite": machine.llvmlite,
        "gemmery": machine.gemmery,
    }
    software = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    hardware = f"{machine.cpu}, {machine.isa}, {machine.cores} cores, {caches}"
    return f"{hardware}; {machine.os}; {software}; NumPy runs {machine.blas}"


def _gpu(machine: MachineRecord) -> str:
    gpu = machine.gpu
    power = f", {gpu.power_w:g} W" if gpu.power_w else ""
    device = f"{gpu.name}, sm_{gpu.capability}, {gpu.sms} multiprocessors, up to {gpu.clock_mhz} MHz{power}"
    software = f"driver {gpu.driver or 'unknown'}, CUDA {gpu.cuda}, NVRTC {gpu.nvrtc}, Python {machine.python}"
    version = f", gemmery {machine.gemmery}" if machine.gemmery else ""
    return f"{device}, L2 {numerals.size(gpu.l2)}; {software}{version}"


def table(sheet: Sheet) -> str:
    """Return a sheet as a table, without its title."""
    texts = {*sheet.left_aligned, *sheet.sentences}
    lines = [
        _line(sheet.head),
        _line([":---" if index in texts else "---:" for index in range(len(sheet.head))]),
        *(_line([_marked(cell) for cell in row]) for row in sheet.rows),
    ]
    notes = "".join(f"\n{note}\n" for note in sheet.notes)
    return "\n".join(lines) + "\n" + notes


def _marked(cell: Cell) -> str:
    text = f"**{cell.text}**" if cell.tone == "best" and cell.text else cell.text
    return f"{text} {cell.margin}" if cell.margin else text


def markdown(run: Run, rungs: Sequence[Rung] = ()) -> str:
    """Return a run as Markdown: the machine, then a table for each sheet.

    >>> print(markdown(run, CPU))  # doctest: +SKIP
    # The ladder
    ...
    """
    parts = [f"# {words.title(run)}\n", f"{machine(run.machine)}. Measured {words.when(run)}.\n"]
    parts += [f"**{warning}**\n"] if (warning := banner(run)) else []
    parts += [f"## {sheet.title}\n\n{table(sheet)}" for sheet in sheets(run, rungs)]
    return "\n".join(parts)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
