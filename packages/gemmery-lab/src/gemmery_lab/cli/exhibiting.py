"""The command `exhibit`: the list of exhibits, one on a GPU, or one on the emulator."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Argument, Option

from gemmery.errors import ArgumentError
from gemmery_emulator.pages.writing import HtmlToo
from gemmery_lab.cli.app import Action, As, Json, Keep, app
from gemmery_lab.cli.showing import Output, announce, check_store, ended, followed, outside, print_records, timed

if TYPE_CHECKING:
    from gemmery.ladder.exhibits import EmulatedExhibit, Exhibit
    from gemmery_lab.measure.record import Run
    from gemmery_lab.report.exhibit_results import Predicted


@app.command(
    short_help="Show one effect of GPU hardware.",
    epilog="""\b
    Examples:
      gemmery exhibit
      gemmery exhibit bank_stride
      gemmery exhibit bank_stride --device emulator --as a100
      gemmery exhibit reduce_strided --json""",
)
def exhibit(
    name: Annotated[str, Argument(metavar="NAME", help="An exhibit.", show_default="list them")] = "",
    device: Annotated[
        str, Option(metavar="NAME", help="cuda, cuda:N, emulator, or a card to emulate.", show_default="cuda")
    ] = "",
    card: As = "",
    seconds: Annotated[float, Option(metavar="S", help="Seconds for each config.")] = 0.3,
    store: Keep = None,
    json: Json = False,
    html: HtmlToo = None,
) -> Action:
    """Show one effect of the hardware with a small kernel.

    Counts are predicted, then measured on a GPU or counted on the emulator.
    """
    from gemmery.ladder.exhibits import find
    from gemmery_lab import asked

    where = asked.place(device or ("emulator" if card else "cuda"), card)
    asked.budget(seconds)
    if where.kind == "cpu":
        raise ArgumentError("--device cpu: exhibits run on a GPU: use cuda, cuda:N, or emulator")
    if where.kind == "emulator" and store is not None:
        raise ArgumentError("--store: the emulator measures no times; leave it out")
    if not name:
        if html is not None:
            raise ArgumentError(f"--html {html}: name an exhibit; the list has no page")
        return partial(_listed, json)
    selected, output = find(name), Output(json, html, html is None)
    check_store(store)
    missing = ""
    if where.kind == "cuda":
        from gemmery.cuda import driver

        missing = driver.missing()
    if where.kind == "emulator" or (missing and store is None):
        return partial(_on_emulator, selected, where.card or asked.EMULATED_AS, missing, output)
    return partial(_on_gpu, selected, str(where), seconds, store, output)


def _listed(json: bool) -> int:
    from gemmery.ladder.exhibits import EXHIBITS
    from gemmery_lab.report.exhibit_results import list_exhibits

    names = ("name", "idea", "lesson", "parent")
    rows = [{name: getattr(exhibit, name) for name in names} for exhibit in EXHIBITS]
    print_records(json, rows, partial(list_exhibits, EXHIBITS))
    return 0


def _on_gpu(exhibit: Exhibit, device: str, seconds: float, store: Path | None, output: Output) -> int:
    """Measure an exhibit; 1 when a result is wrong. After Ctrl-C the configs so far are shown."""
    import gemmery_lab as lab
    from gemmery.cuda import nvrtc
    from gemmery_lab.report.exhibit_results import exhibit_page, show_exhibit

    source = nvrtc.text(Path(exhibit.source).name)

    def predicted(run: Run) -> Predicted:
        ran = [m.config for m in run.measurements]
        return [row for row in lab.predicted(exhibit) if dict(row[0]) in ran]

    def show(run: Run, console: Console) -> None:
        show_exhibit(exhibit, source, predicted(run), run, console)

    measure = partial(lab.exhibit, exhibit.name, device, seconds, store=store)
    run, interrupted = timed(lambda on_event: measure(on_event=on_event), (), show, output)
    if output.has_page:
        output.write("exhibit", run.started, exhibit_page(exhibit, source, predicted(run), run))
    return ended(interrupted, () if interrupted else outside(run))


def _on_emulator(exhibit: Exhibit, card: str, missing: str, output: Output) -> int:
    """Count an exhibit on the emulator; 1 when a count is not as predicted.

    `missing` is the reason why there is no GPU, which is printed; "" when the emulator was asked for.
    """
    import gemmery_lab as lab
    from gemmery.cuda import nvrtc
    from gemmery_lab.measure import record
    from gemmery_lab.report.exhibit_results import emulated_exhibit_page, exhibit_progress, show_emulated_exhibit

    source = nvrtc.text(Path(exhibit.source).name)

    def show(runs: tuple[EmulatedExhibit, ...], console: Console) -> None:
        show_emulated_exhibit(exhibit, source, runs, console)

    announce(missing, card)
    count = partial(lab.emulated_exhibit, exhibit.name, device=card)
    runs, interrupted = followed(lambda on_config: count(on_config=on_config), exhibit_progress, show, tuple, output)
    if output.has_page:
        output.write("exhibit", record.now(), emulated_exhibit_page(exhibit, source, runs))
    wrong = [f"{exhibit.name} at {run.config} {line}" for run in runs for line in run.wrong]
    return ended(interrupted, wrong)
