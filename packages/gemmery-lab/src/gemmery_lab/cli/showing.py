"""The output of commands: progress, a table or JSON, a page, a file, and the exit code."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from gemmery.errors import ArgumentError
from gemmery_emulator.pages.writing import as_json, check_page, console, write_page

if TYPE_CHECKING:
    from gemmery.ladder.rung import Rung
    from gemmery_lab.event import OnEvent, OnStep, RunEvent
    from gemmery_lab.measure.record import Measurement, Run
    from gemmery_lab.report.terminal import Growing
    from gemmery_lab.rung_counts import EmulatedLadder, EmulatedRung, PredictedRung

INTERRUPTED = 130
R = TypeVar("R")
S = TypeVar("S")


@dataclass(frozen=True)
class Output:
    """The output of a command: a table or JSON on stdout, and a page at `html` or in the folder out/, or no page.

    Made before anything is measured. Raises ArgumentError for options that contradict each other and for a place that
    cannot be written, InstallError where the page cannot be drawn.
    """

    json: bool = False
    html: Path | None = None
    no_html: bool = False

    def __post_init__(self) -> None:
        if self.html is not None and self.no_html:
            raise ArgumentError(f"--html {self.html} --no-html: give one of them")
        if self.has_page:
            check_page(self.html or Path("out", "page.html"), "matplotlib", "jinja2")

    @property
    def has_page(self) -> bool:
        """True if a page is written: not with `no_html`, and not with `json` unless `html` is given."""
        return self.html is not None or not (self.no_html or self.json)

    def say(self, text: str) -> None:
        """Write a line after the table, or to stderr if stdout is for JSON."""
        (sys.stderr if self.json else sys.stdout).write(f"{text}\n")

    def write(self, name: str, started: str, text: str) -> None:
        """Write the page and print its path."""
        path = self.html or Path("out") / f"{name}-{started[:19].replace(':', '')}.html"
        self.say(f"page: {write_page(path, text)}")


def print_records(json: bool, records: object, show: Callable[[Console], None]) -> None:
    """Print records as JSON, or as `show` does."""
    if json:
        sys.stdout.write(f"{as_json(records)}\n")
    else:
        show(console())


def followed(
    run: Callable[[OnStep[S]], R],
    progress: Callable[[Console], Growing[S]],
    show: Callable[[R, Console], None],
    partly: Callable[[list[S]], R],
    output: Output,
    expected: str = "",
) -> tuple[R, bool]:
    """Run with progress on stderr, then show the result; return it, and whether Ctrl-C cut it short.

    `run` is called with what receives its steps; `partly` makes a result of those before Ctrl-C. `expected` is printed
    at the start: the time it takes.
    """
    so_far: list[S] = []

    def on_step(what: str, done: int, total: int, record: S | None) -> None:
        display.announce(expected)
        so_far.extend([record] if record is not None else [])
        display.update(what, done, total, record)

    interrupted = False
    with progress(Console(stderr=True)) as display:
        try:
            result = run(on_step)
        except KeyboardInterrupt:
            if not so_far:
                raise
            result, interrupted = partly(so_far), True
    print_records(output.json, result, partial(show, result))
    return result, interrupted


def ended(interrupted: bool, faults: Sequence[str] = ()) -> int:
    """Print a line for each fault, and that Ctrl-C cut the results short; return the exit code."""
    sys.stderr.writelines(f"gemmery: {fault}\n" for fault in faults)
    if interrupted:
        sys.stderr.write("gemmery: interrupted; the results so far are above\n")
    return INTERRUPTED if interrupted else 1 if faults else 0


def timed(
    measure: Callable[[OnEvent], Run],
    rungs: Sequence[Rung],
    show: Callable[[Run, Console], None],
    output: Output,
    expected: str = "",
) -> tuple[Run, bool]:
    """Show what `measure` times, as `followed` does."""
    from gemmery_lab.report import terminal

    runs: list[Run] = []

    def run(on_step: OnStep[Measurement]) -> Run:
        def on_event(event: RunEvent) -> None:
            runs[:] = [event.run] if event.run else runs
            on_step(event.what, event.done, event.total, event.measurement)

        return measure(on_event)

    return followed(run, partial(terminal.progress, rungs), show, lambda _: runs[0], output, expected)


def measured(
    name: str,
    measure: Callable[[OnEvent], Run],
    output: Output,
    rungs: Sequence[Rung] = (),
    store: Path | None = None,
    expected: str = "",
) -> int:
    """Measure and show the records; 1 when a result is outside its error bound, 130 after Ctrl-C.

    `rungs` are those of the records, () for the CPU's. `store` is the folder to which `measure` appends records.
    """
    from gemmery_lab import measurements
    from gemmery_lab.asked import registry
    from gemmery_lab.measure import record
    from gemmery_lab.report import terminal

    rungs = rungs or registry("cpu")
    run, interrupted = timed(measure, rungs, lambda run, console: terminal.show(run, rungs, console), output, expected)
    if output.has_page:
        from gemmery_lab.report.page import page

        output.write(name, run.started, page(run, rungs))
    skipped = any(m.refused.startswith(measurements.SLOW) for m in run.measurements)
    if skipped:
        sys.stderr.write("gemmery: some rungs were skipped as too slow; raise the limit with --seconds\n")
    if store is not None:
        output.say(f"records: {record.path(store, run.machine.name)}")
    if run.measurements and not (interrupted or skipped or any(each.seconds for each in run.measurements)):
        return ended(False, ["nothing was timed; the reasons are above"])
    return ended(interrupted, () if interrupted else outside(run))


def counted(
    count: Callable[[OnStep[EmulatedRung]], EmulatedLadder],
    card: str,
    instead_of: str,
    output: Output,
    expected: str = "",
    predict: Callable[..., tuple[PredictedRung, ...]] | None = None,
) -> int:
    """Run the ladder on the emulator and show it; 1 when something is wrong, 130 after Ctrl-C.

    `instead_of` is the reason why it does not run on a GPU, which is printed; "" when the emulator was asked for.
    `predict` predicts the times of named rungs.
    """
    from gemmery_lab.asked import emulated_card
    from gemmery_lab.measure import record
    from gemmery_lab.report.emulated_tables import complaints, emulated_progress, show_emulated
    from gemmery_lab.rung_counts import EmulatedLadder

    started = record.now()

    def partly(rungs: list[EmulatedRung]) -> EmulatedLadder:
        return EmulatedLadder(emulated_card(card), started, tuple(rungs))

    def with_times(on_rung: OnStep[EmulatedRung]) -> EmulatedLadder:
        ladder = count(on_rung)
        names = [rung.rung for rung in ladder.rungs if not rung.refused]
        if predict is None or not names:  # without names, every rung would be predicted
            return ladder
        predicted = predict(dict.fromkeys(names), on_rung=lambda what, done, total, _: on_rung(what, done, total, None))
        return replace(ladder, predicted=predicted)

    announce(instead_of, card)
    ladder, interrupted = followed(with_times, emulated_progress, show_emulated, partly, output, expected)
    if output.has_page:
        from gemmery_lab.report.page import emulated_page

        output.write("emulated", ladder.started, emulated_page(ladder))
    return ended(interrupted, complaints(ladder))


def announce(missing: str, card: str) -> None:
    """Print that the emulator takes the place of a GPU, and why; nothing for "", where it was asked for."""
    if missing:
        instead = f"using the emulator as {card} instead, which counts instead of timing"
        sys.stderr.write(f"gemmery: no CUDA device ({missing}): {instead}\n")


def check_store(folder: Path | None) -> Path | None:
    """Make the folder of the records and return it. Raises ArgumentError if no file can be written there."""
    if folder is None:
        return None
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(None, "it is not a folder")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ArgumentError(f"store {str(folder)!r}: {error.strerror}; choose another folder with --store") from error
    return folder


def outside(run: Run) -> list[str]:
    """Return a line for each result outside its error bound."""
    from gemmery_lab.report import words

    wrong = (m for m in run.measurements if not words.passed(m))
    return [f"{m.kernel} is outside its error bound at {words.shape(m)}, {words.types(m)}" for m in wrong]


@contextmanager
def bar(total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show progress on a terminal; yield what shows how many are done, of how many, and what comes next."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, total, name="": bar.update(task, completed=done, total=total, description=name)
