"""The command `exhibit`: the list of exhibits, one on a GPU, or one on the emulator."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gemmery.cli.showing import Output, completed, console, instead, judged, said_interrupted

if TYPE_CHECKING:
    from gemmery.bench.record import Run
    from gemmery.lab import RunEvent
    from gemmery.ladder.exhibits import EmulatedExhibit, Exhibit


def listed(json: bool) -> int:
    """List the exhibits."""
    from gemmery import report
    from gemmery.ladder.exhibits import EXHIBITS

    if json:
        rows = [
            {"name": exhibit.name, "idea": exhibit.idea, "lesson": exhibit.lesson, "parent": exhibit.parent}
            for exhibit in EXHIBITS
        ]
        sys.stdout.write(f"{report.as_json(rows)}\n")
    else:
        report.list_exhibits(EXHIBITS, console())
    return 0


def on_gpu(exhibit: Exhibit, device: str, seconds: float, store: Path | None, output: Output) -> int:
    """Measure an exhibit; 1 when a result is wrong. After Ctrl-C the configs so far are shown."""
    from gemmery import lab, report
    from gemmery.cuda import nvrtc

    source, so_far = nvrtc.text(Path(exhibit.source).name), list["Run"]()

    def on_event(event: RunEvent) -> None:
        so_far[:] = [event.run] if event.run else so_far

    measure = partial(lab.exhibit, exhibit.name, device, seconds, on_event=on_event, store=store)
    run, interrupted = completed(measure, so_far, lambda: so_far[0])
    ran = [m.config for m in run.measurements]
    predicted = [row for row in lab.predicted(exhibit) if dict(row[0]) in ran]
    if output.json:
        sys.stdout.write(f"{report.as_json(run)}\n")
    else:
        report.show_exhibit(exhibit, source, predicted, run, console())
    if output.has_page:
        from gemmery.report.exhibit_results import exhibit_page

        output.write("exhibit", run.started, exhibit_page(exhibit, source, predicted, run))
    return said_interrupted() if interrupted else judged(run)


def on_emulator(exhibit: Exhibit, card: str, missing: str, output: Output) -> int:
    """Count an exhibit on the emulator; 1 when a count is not as predicted.

    `missing` is the reason why there is no GPU, which is printed; "" when the emulator was asked for.
    """
    from gemmery import lab, report
    from gemmery.bench import record
    from gemmery.cuda import nvrtc

    if missing:
        sys.stderr.write(f"gemmery: {instead(missing, card)}\n")
    source, so_far = nvrtc.text(Path(exhibit.source).name), list["EmulatedExhibit"]()
    with report.exhibit_progress(Console(stderr=True)) as progress:

        def on_config(what: str, done: int, total: int, run: EmulatedExhibit | None) -> None:
            so_far.extend([run] if run else [])
            progress.update(what, done, total, run)

        count = partial(lab.emulated_exhibit, exhibit.name, device=card, on_config=on_config)
        _, interrupted = completed(count, so_far, lambda: tuple(so_far))
    if output.json:
        sys.stdout.write(f"{report.as_json(so_far)}\n")
    else:
        report.show_emulated_exhibit(exhibit, source, so_far, console())
    if output.has_page:
        from gemmery.report.exhibit_results import emulated_exhibit_page

        output.write("exhibit", record.now(), emulated_exhibit_page(exhibit, source, so_far))
    wrong = [f"gemmery: {exhibit.name} at {run.config} {line}\n" for run in so_far for line in run.wrong]
    sys.stderr.writelines(wrong)
    return said_interrupted() if interrupted else 1 if wrong else 0
