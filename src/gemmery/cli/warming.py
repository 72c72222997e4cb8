"""The command that compiles kernels in advance: warm."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

from typer import Option

from gemmery.cli.app import Action, app
from gemmery.cli.options import Json, names
from gemmery.errors import ArgumentError, DeviceError, DTypeError


@app.command(
    short_help="Compile and store kernels before they are needed.",
    epilog="""\b
    Examples:
      gemmery warm
      gemmery warm --dtype f32,bf16
      gemmery warm --device h200 --dtype bf16

    \b
    In a Dockerfile, for the user that runs the program:
      ENV GEMMERY_CACHE_DIR=/opt/gemmery
      RUN gemmery warm

    \b
    Kernels suit one kind of CPU: a machine of another kind compiles its own.
    `gemmery doctor` shows what is stored.""",
)
def warm(
    dtype: Annotated[
        list[str] | None,
        Option(metavar="A,B", help="Only these element types: f32, f64, bf16 ...", show_default="all"),
    ] = None,
    device: Annotated[str, Option(metavar="NAME", help="cpu, cuda, a card (h200) or sm_90.")] = "cpu",
    threads: Annotated[
        int, Option(metavar="N", min=0, help="Kernels compiled at the same time, 0 for one per core.")
    ] = 0,
    json: Json = False,
) -> Action:
    """Compile and store the kernels that products need, so that no product waits for a compiler; no GPU is needed."""
    from gemmery import dtypes

    place = device.strip().lower()
    try:
        types = [dtypes.resolve(name, (*dtypes.BY_NAME, *dtypes.FP8)) for text in dtype or () for name in names(text)]
        if place != "cpu" and place.partition(":")[0] != "cuda":
            from gemmery.cuda.device import card

            card(place)
    except DTypeError as error:
        raise ArgumentError(f"--dtype: {error}") from None
    except DeviceError as error:
        raise ArgumentError(f"--device: {error}; or cpu") from None
    if dtype and not types:
        raise ArgumentError(f"--dtype {' '.join(dtype)!r} names no element type: leave it out for all")
    return partial(_warm, [dtypes.get(name).numpy for name in types], place, threads, json)


def _warm(types: list[str], device: str, threads: int, json: bool) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    import gemmery
    from gemmery import report

    columns = BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        warmed = gemmery.warm(
            types or None,
            device,
            threads=threads or None,
            progress=lambda done, total, name: bar.update(task, completed=done, total=total, description=name),
        )
    sys.stdout.write(f"{report.as_json(warmed) if json else warmed}\n")
    return 0
