"""The commands that compute products, or prepare for them: verify, warm."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Option

from gemmery.cli.app import Action, app
from gemmery.cli.options import Json, names
from gemmery.errors import ArgumentError, DeviceError, DTypeError

if TYPE_CHECKING:
    from gemmery.lab.verification import Verification


@app.command(
    short_help="Compare random products with the reference.",
    epilog="""\b
    Examples:
      gemmery verify
      gemmery verify --device cuda --products 10000
      gemmery verify --device cuda --dtype e4m3 --seed 71 --products 1
      gemmery verify --device cuda --dtype f32_tensor,f32_plus --products 100000

    \b
    With GEMMERY_TIERS=off each product runs the kernel for its shape at once,
    and waits until it is compiled.""",
)
def verify(
    device: Annotated[str, Option(metavar="NAME", help="cpu, cuda, or cuda:N for the Nth GPU.")] = "cpu",
    products: Annotated[int, Option(metavar="N", min=1, help="How many.")] = 1000,
    dtype: Annotated[
        list[str] | None,
        Option(metavar="A,B", help="Only these: f16, bf16, tf32, e4m3, int8, f32_tensor ...", show_default="all"),
    ] = None,
    seed: Annotated[int, Option(metavar="S", min=0, help="The first product's; the next has S + 1.")] = 0,
    json: Json = False,
) -> Action:
    """Compute random products of all kinds, and compare each with one of higher precision.

    Shapes, layouts, alignments, batches, groups, epilogues, factors and results are drawn by a seed. A product that is
    wrong is shown with the command that repeats it; the exit code is then 1.
    """
    types = [name for text in dtype or () for name in names(text)]
    return partial(_verify, device, products, types, seed, json)


def _verify(device: str, products: int, types: list[str], seed: int, json: bool) -> int:
    from gemmery import lab
    from gemmery.pages.writing import as_json

    with _bar(products) as progress:
        verified = lab.verify(products, device, types, seed, progress)
    sys.stdout.write(f"{as_json(verified) if json else in_words(verified)}\n")
    return 0 if verified.ok else 1


def in_words(verified: Verification) -> str:
    """Return what was compared, and each wrong product with the command that repeats it."""
    from gemmery.pages import numerals

    counts = ", ".join(f"{count} {name}" for name, count in sorted(verified.types.items()))
    first, last = verified.seed, verified.seed + verified.seeds - 1
    seeds = f"seeds {first} to {last}" if first < last else f"seed {first}"
    summary = (
        f"{numerals.plural(verified.products, 'product')} ({counts}) on {verified.device}, {seeds}, "
        f"{verified.seconds:.3g} s: {len(verified.wrong) or 'none'} wrong; "
        f"the others reach at most {verified.worst:.3g} of their bounds"
    )
    lines = [summary]
    for wrong in verified.wrong:
        again = f"gemmery verify --device {verified.device} --dtype {wrong.dtype} --seed {wrong.seed} --products 1"
        lines += [f"{wrong.product}", f"  {wrong.reason}", f"  again: {again}"]
    return "\n".join(lines)


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
        types = [
            dtypes.resolve(name, (*dtypes.BY_NAME, *dtypes.FLOAT8)) for text in dtype or () for name in names(text)
        ]
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
    import gemmery
    from gemmery.pages.writing import as_json

    with _bar() as progress:
        warmed = gemmery.warm(types or None, device, threads=threads or None, progress=progress)
    sys.stdout.write(f"{as_json(warmed) if json else warmed}\n")
    return 0


@contextmanager
def _bar(total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show progress on a terminal; yield what shows how many are done, of how many, and what comes next."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, total, name="": bar.update(task, completed=done, total=total, description=name)
