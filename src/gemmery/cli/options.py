"""The options that several commands share, and lists in them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import CallbackParam, Option

from gemmery.errors import ArgumentError


def place(option: CallbackParam, given: Path | None) -> Path | None:
    """Where an option says to write. Raises ArgumentError for "-", which elsewhere stands for stdout."""
    if given == Path("-"):
        raise ArgumentError(f"{option.opts[-1]} -: stdout has the tables, or what --json asks for; give a path")
    return given


Rungs = Annotated[str, Option(metavar="A,B", help="Only these rungs.", show_default="every rung")]
DType = Annotated[str, Option(metavar="TYPE", help="Element type: f32, f64, f16, bf16, i8, ...; tf32 on a GPU.")]
Threads = Annotated[int, Option(metavar="N", min=0, help="Threads, 0 for every core.")]
Seconds = Annotated[float, Option(metavar="S", help="A rung that takes longer for one product is not run.")]
Json = Annotated[bool, Option("--json", help="Records as JSON on stdout, and nothing else there.")]
Html = Annotated[
    Path | None,
    Option(metavar="PATH", help="Where to write the page.", show_default="out/...html", callback=place),
]
HtmlToo = Annotated[
    Path | None,
    Option("--html", metavar="PATH", help="Write a page there, too.", show_default=False, callback=place),
]
NoHtml = Annotated[bool, Option("--no-html", help="Write no page.")]
Keep = Annotated[
    Path | None, Option("--store", metavar="DIR", help="Append the records to a file there.", callback=place)
]


def names(text: str) -> tuple[str, ...]:
    """`a,b` as names; "" is none."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(option: str, text: str) -> tuple[int, ...]:
    """`1,2` as whole numbers; "" is none. Raises ArgumentError for anything else."""
    found = names(text)
    for name in found:
        if not name.isdecimal():
            raise ArgumentError(f"{option} {text}: {name!r} is no whole number; write them as in {option} 256,1024")
    return tuple(int(name) for name in found)


def settings(text: str) -> dict[str, int]:
    """`bm=128,bk=16` as whole numbers by name. Raises ArgumentError for anything else."""
    found = {}
    for part in names(text):
        name, _, number = part.partition("=")
        if not number.removeprefix("-").isdecimal():
            raise ArgumentError(
                f"--config {text}: {part!r} sets no whole number; write them as in --config bm=128,bk=16"
            )
        found[name] = int(number)
    return found
