"""The output of commands: progress, a table or JSON, a page, a file, and the exit code."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from gemmery.errors import ArgumentError
from gemmery.pages.writing import check_page, console, write_page

if TYPE_CHECKING:
    from gemmery.bench.record import Run
    from gemmery.lab.emulated_rungs import OnRung
    from gemmery.lab.event import OnEvent, RunEvent
    from gemmery.ladder.rung import Rung
    from gemmery.rung_counts import EmulatedLadder, EmulatedRung, PredictedRung

INTERRUPTED = 130
R = TypeVar("R")


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
    from gemmery.pages.writing import as_json

    if json:
        sys.stdout.write(f"{as_json(records)}\n")
    else:
        show(console())


def measured(
    name: str,
    measure: Callable[[OnEvent], Run],
    output: Output,
    rungs: Sequence[Rung] = (),
    store: Path | None = None,
    expected: str = "",
) -> int:
    """Measure with progress on stderr, then show the records; 1 when a result is outside its error bound.

    `rungs` are those of the records, () for the CPU's. `store` is the folder to which `measure` appends records.
    `expected` is printed at the start: the time it takes. After Ctrl-C the records so far are shown; the code is 130.
    """
    from gemmery.bench import record
    from gemmery.lab import measurements
    from gemmery.lab.asked import registry
    from gemmery.report import terminal

    rungs, progress = rungs or registry("cpu"), Console(stderr=True)
    so_far: list[Run] = []

    def on_event(event: RunEvent) -> None:
        display.announce(expected)
        so_far[:] = [event.run] if event.run else so_far
        display.update(event.what, event.done, event.total, event.measurement)

    with terminal.progress(rungs, progress) as display:
        run, interrupted = completed(partial(measure, on_event), so_far, lambda: so_far[0])
    print_records(output.json, run, partial(terminal.show, run, rungs))
    if output.has_page:
        from gemmery.report.page import page

        output.write(name, run.started, page(run, rungs))
    skipped = any(m.refused.startswith(measurements.SLOW) for m in run.measurements)
    if skipped:
        sys.stderr.write("gemmery: some rungs were skipped as too slow; raise the limit with --seconds\n")
    if store is not None:
        output.say(f"records: {record.path(store, run.machine.name)}")
    if interrupted:
        return said_interrupted()
    if run.measurements and not skipped and not any(each.seconds for each in run.measurements):
        sys.stderr.write("gemmery: nothing was timed; the reasons are above\n")
        return 1
    return judged(run)


def completed(run: Callable[[], R], so_far: Sized, partly: Callable[[], R]) -> tuple[R, bool]:
    """Return all results, or after Ctrl-C those so far if there are any, and whether they were cut short."""
    try:
        return run(), False
    except KeyboardInterrupt:
        if not so_far:
            raise
        return partly(), True


def said_interrupted() -> int:
    """Print that Ctrl-C cut the results short; return the exit code."""
    sys.stderr.write("gemmery: interrupted; the results so far are above\n")
    return INTERRUPTED


def counted(
    count: Callable[[OnRung], EmulatedLadder],
    card: str,
    instead_of: str,
    output: Output,
    expected: str = "",
    predict: Callable[..., tuple[PredictedRung, ...]] | None = None,
) -> int:
    """Run the ladder on the emulator with progress on stderr, then show it; 1 when something is wrong.

    `instead_of` is the reason why it does not run on a GPU, which is printed; "" when the emulator was asked for.
    `expected` and Ctrl-C are as in `measured`. `predict` predicts the times of named rungs.
    """
    from gemmery.bench import record
    from gemmery.lab.asked import emulated_card
    from gemmery.report import emulated_tables
    from gemmery.report.page import emulated_page
    from gemmery.rung_counts import EmulatedLadder

    if instead_of:
        sys.stderr.write(f"gemmery: {instead(instead_of, card)}\n")
    so_far: list[EmulatedRung] = []
    started = record.now()

    def on_rung(what: str, done: int, total: int, rung: EmulatedRung | None) -> None:
        display.announce(expected)
        so_far.extend([rung] if rung else [])
        display.update(what, done, total, rung)

    def with_times() -> EmulatedLadder:
        ladder = count(on_rung)
        names = [rung.rung for rung in ladder.rungs if not rung.refused]
        if predict is None or not names:  # without names, every rung would be predicted
            return ladder
        predicted = predict(dict.fromkeys(names), on_rung=lambda what, done, total, _: on_rung(what, done, total, None))
        return replace(ladder, predicted=predicted)

    with emulated_tables.emulated_progress(Console(stderr=True)) as display:
        partly = partial(EmulatedLadder, emulated_card(card), started)
        ladder, interrupted = completed(with_times, so_far, lambda: partly(tuple(so_far)))
    print_records(output.json, ladder, partial(emulated_tables.show_emulated, ladder))
    if output.has_page:
        output.write("emulated", ladder.started, emulated_page(ladder))
    wrong = emulated_tables.complaints(ladder)
    sys.stderr.writelines(f"gemmery: {fault}\n" for fault in wrong)
    return said_interrupted() if interrupted else 1 if wrong else 0


def instead(missing: str, card: str) -> str:
    """Return the line that announces the emulator in place of a GPU."""
    return f"no CUDA device ({missing}): using the emulator as {card} instead, which counts instead of timing"


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


def judged(run: Run) -> int:
    """Print a line for each result outside its error bound; return 1 if there are any."""
    from gemmery.report import words

    wrong = [m for m in run.measurements if not words.passed(m)]
    for m in wrong:
        sys.stderr.write(f"gemmery: {m.kernel} is outside its error bound at {words.shape(m)}, {words.types(m)}\n")
    return 1 if wrong else 0
