"""What a command does with records: progress, a table or JSON, a page, a file, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gemmery.errors import ArgumentError

if TYPE_CHECKING:
    from gemmery.bench.record import Run
    from gemmery.lab import OnEvent, OnRung
    from gemmery.ladder.emulated import EmulatedLadder
    from gemmery.ladder.rung import Rung


def measured(
    name: str,
    measure: Callable[[OnEvent], Run],
    json: bool,
    html: Path | None,
    no_html: bool,
    rungs: Sequence[Rung] = (),
    store: Path | None = None,
) -> int:
    """Measure with progress on stderr, then show the records as asked; 1 when a result is outside its bound.

    `rungs` are those that the records are of, () for the CPU's. `store` is the folder to which `measure` appends them.
    """
    from gemmery import report
    from gemmery.bench import record
    from gemmery.ladder.cpu import CPU

    rungs = rungs or CPU
    page = None if no_html or (json and html is None) else _page_writer(name, html)
    with report.Progressing(rungs, Console(stderr=True)) as shown:
        run = measure(lambda event: shown.update(event.what, event.done, event.total, event.measurement))
    if json:
        sys.stdout.write(f"{report.as_json(run)}\n")
    else:
        report.show(run, rungs, console())
    if page is not None:
        path = page(run, rungs)
        (sys.stderr if json else sys.stdout).write(f"page: {path}\n")
    if store is not None:
        (sys.stderr if json else sys.stdout).write(f"records: {record.path(store, run.machine.name)}\n")
    return judged(run)


def counted(
    count: Callable[[OnRung], EmulatedLadder], instead_of: str, json: bool, html: Path | None, no_html: bool
) -> int:
    """Climb the ladder on the emulator with progress on stderr, then show it as asked; 1 when something is wrong.

    `instead_of` says why it is not a GPU's ladder, which is announced; "" when the emulator was asked for.
    """
    from gemmery import report
    from gemmery.report.emulated import emulated_page

    if instead_of:
        said = f"no CUDA device ({instead_of}): on the emulator instead, as an h200; --device emulator says so too"
        sys.stderr.write(f"gemmery: {said}\n")
    with report.Counting(Console(stderr=True)) as shown:
        ladder = count(shown.update)
    if json:
        sys.stdout.write(f"{report.as_json(ladder)}\n")
    else:
        report.show_emulated(ladder, console())
    if html is not None or not (no_html or json):
        path = write_page(html or _dated("emulated", ladder.started), emulated_page(ladder))
        (sys.stderr if json else sys.stdout).write(f"page: {path}\n")
    wrong = report.complaints(ladder)
    sys.stderr.writelines(f"gemmery: {one}\n" for one in wrong)
    return 1 if wrong else 0


def _page_writer(name: str, path: Path | None) -> Callable[[Run, Sequence[Rung]], Path]:
    """What writes the page; asked for before anything is measured, so that what is missing is said then."""
    from gemmery.report.page import page

    def write(run: Run, rungs: Sequence[Rung]) -> Path:
        return write_page(path or _dated(name, run.started), page(run, rungs))

    return write


def _dated(name: str, started: str) -> Path:
    return Path("out") / f"{name}-{started[:19].replace(':', '')}.html"


def write_page(path: Path, text: str, option: str = "--html") -> Path:
    """Write what an option asks for, folders included; return its path. Raises ArgumentError where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        what = "page" if option == "--html" else "picture"
        raise ArgumentError(f"{what} {str(path)!r}: {error.strerror}; choose another place with {option}") from error
    return path


def judged(run: Run) -> int:
    """1, with a line for each, when a result is outside its error bound."""
    from gemmery.report import words

    wrong = [m for m in run.measurements if not words.passed(m)]
    for m in wrong:
        sys.stderr.write(f"gemmery: {m.kernel} is outside its error bound at {words.shape(m)}, {words.types(m)}\n")
    return 1 if wrong else 0


class _Console(Console):
    """A console that leaves a closed pipe to `line.run`."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """A console on stdout, as wide as the terminal."""
    return _Console(highlight=False, soft_wrap=False)
