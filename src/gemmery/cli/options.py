"""Options that several commands share, and how lists in them are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from gemmery.errors import ArgumentError
from gemmery.pages.writing import place

_DIGITS = 18  # of a number on the command line: more are no size of anything


Rungs = Annotated[str, Option(metavar="A,B", help="Only these rungs.", show_default="all")]
ElementType = Annotated[
    str, Option(metavar="TYPE", help="Element type: f32 or float32, f64, f16, bf16, int8; tf32 on a GPU.")
]
Threads = Annotated[int, Option(metavar="N", min=0, help="Number of threads, 0 for one per core.")]
Seconds = Annotated[float, Option(metavar="S", help="Skip rungs predicted to exceed S seconds per call.")]
As = Annotated[
    str, Option("--as", metavar="CARD", help="Emulate this card, such as a100 or rtx3090.", show_default="h200")
]
Json = Annotated[bool, Option("--json", help="Print the records as JSON instead of tables.")]
Html = Annotated[
    Path | None,
    Option(metavar="PATH", help="Write the page there.", show_default="out/...html", callback=place),
]
NoHtml = Annotated[bool, Option("--no-html", help="Write no page.")]
Keep = Annotated[
    Path | None, Option("--store", metavar="DIR", help="Append the records to a file there.", callback=place)
]


def threads_in_words(threads: int) -> str:
    """Return a warning about more threads than cores to append to a line, "" if there are not more."""
    from gemmery.cpu import target

    cores = target.cores()
    return f"; {threads} threads share {cores} core{'s' * (cores != 1)}" if threads > cores else ""


def names(text: str) -> tuple[str, ...]:
    """Split `a,b` into names; "" has none."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Split `1,2` into whole numbers; "" has none. Raises ArgumentError for anything else."""
    parts = names(text)
    for name in parts:
        if not name.isdecimal():
            raise ArgumentError(f"{option} {text}: {name!r} is not a whole number >= 0; write {option} 256,1024")
    return tuple(_whole(option, name) for name in parts)


def _whole(option: str, digits: str) -> int:
    """Return the number; Python reads none of more than 4,300 digits."""
    count = len(digits.removeprefix("-"))
    if count > _DIGITS:
        raise ArgumentError(f"{option}: a number of {count:,} digits; {_DIGITS} digits are the most")
    return int(digits)


def settings(text: str) -> dict[str, int]:
    """Split `bm=128,bk=16` into whole numbers by name. Raises ArgumentError for anything else."""
    values = {}
    for part in names(text):
        name, _, number = part.partition("=")
        if not number.removeprefix("-").isdecimal():
            raise ArgumentError(f"--config {text}: {part!r} is not KEY=NUMBER; write --config bm=128,bk=16")
        if name in values:
            raise ArgumentError(f"--config {text}: {name} is given twice; give it once")
        values[name] = _whole(f"--config {name}", number)
    return values
