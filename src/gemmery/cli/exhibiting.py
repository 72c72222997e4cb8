"""The command `exhibit`: the list of exhibits, one on a GPU, or one on the emulator."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gemmery.cli.showing import Output, completed, instead, judged, print_records, said_interrupted

if TYPE_CHECKING:
    from gemmery.bench.record import Run
    from gemmery.lab import RunEvent
    from gemmery.ladder.exhibits import EmulatedExhibit, Exhibit


def listed(json: bool) -> int:
    """List the exhibits."""
    from gemmery.ladder.exhibits import EXHIBITS
    from gemmery.report.exhibit_results import list_exhibits

    names = ("name", "idea", "lesson", "parent")
    rows = [{name: getattr(exhibit, name) for name in names} for exhibit in EXHIBITS]
    print_records(json, rows, partial(list_exhibits, EXHIBITS))
    return 0


def on_gpu(exhibit: Exhibit, device: str, seconds: float, store: Path | None, output: Output) -> int:
    """Measure an exhibit; 1 when a result is wrong. After Ctrl-C the configs so far are shown."""
    from gemmery import lab
    from gemmery.cuda import nvrtc
    from gemmery.report import exhibit_results

    source, so_far = nvrtc.text(Path(exhibit.source).name), list["Run"]()

    def on_event(event: RunEvent) -> None:
        so_far[:] = [event.run] if event.run else so_far

    measure = partial(lab.exhibit, exhibit.name, device, seconds, on_event=on_event, store=store)
    run, interrupted = completed(measure, so_far, lambda: so_far[0])
    ran = [m.config for m in run.measurements]
    predicted = [row for row in lab.predicted(exhibit) if dict(row[0]) in ran]
    print_records(output.json, run, partial(exhibit_results.show_exhibit, exhibit, source, predicted, run))
    if output.has_page:
        output.write("exhibit", run.started, exhibit_results.exhibit_page(exhibit, source, predicted, run))
    return said_interrupted() if interrupted else judged(run)


def on_emulator(exhibit: Exhibit, card: str, missing: str, output: Output) -> int:
    """Count an exhibit on the emulator; 1 when a count is not as predicted.

    `missing` is the reason why there is no GPU, which is printed; "" when the emulator was asked for.
    """
    from gemmery import lab
    from gemmery.bench import record
    from gemmery.cuda import nvrtc
    from gemmery.report import exhibit_results

    if missing:
        sys.stderr.write(f"gemmery: {instead(missing, card)}\n")
    source, so_far = nvrtc.text(Path(exhibit.source).name), list["EmulatedExhibit"]()
    with exhibit_results.exhibit_progress(Console(stderr=True)) as progress:

        def on_config(what: str, done: int, total: int, run: EmulatedExhibit | None) -> None:
            so_far.extend([run] if run else [])
            progress.update(what, done, total, run)

        count = partial(lab.emulated_exhibit, exhibit.name, device=card, on_config=on_config)
        _, interrupted = completed(count, so_far, lambda: tuple(so_far))
    print_records(output.json, so_far, partial(exhibit_results.show_emulated_exhibit, exhibit, source, so_far))
    if output.has_page:
        output.write("exhibit", record.now(), exhibit_results.emulated_exhibit_page(exhibit, source, so_far))
    wrong = [f"gemmery: {exhibit.name} at {run.config} {line}\n" for run in so_far for line in run.wrong]
    sys.stderr.writelines(wrong)
    return said_interrupted() if interrupted else 1 if wrong else 0
