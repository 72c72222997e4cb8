"""The difference of two rungs in colours, in a terminal and as a page."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemmery.ladder.diff import Difference

KINDS = {"---": "file", "+++": "file", "@": "hunk", "+": "added", "-": "removed"}  # by the beginning of a line
STYLES = {"file": "bold", "hunk": "cyan", "added": "green", "removed": "red", "": ""}
SAME = "Both rungs run the same code; they differ only in the facts above."


def show_difference(difference: Difference, console: Console) -> None:
    """Print the facts that differ, then the difference of the code."""
    table = Table(box=None, show_header=True, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", difference.old, difference.new):
        table.add_column(name, overflow="fold")
    for fact in difference.facts:
        table.add_row(Text(fact.name, style="dim"), Text(fact.old, style="red"), Text(fact.new, style="green"))
    console.print(table)
    console.print()
    for line in difference.lines:
        console.print(Text(line, style=STYLES[_kind(line)]), soft_wrap=True)
    if not difference.lines:
        console.print(Text(SAME, style="dim"))


def difference_page(difference: Difference) -> str:
    """Return the same as one self-contained HTML page."""
    from gemmery.pages.rendering import render

    title = f"From {difference.old} to {difference.new}"
    lines = [(_kind(line), line) for line in difference.lines] or [("", SAME)]
    return render("difference.html", __package__, title=title, difference=difference, lines=lines)


def _kind(line: str) -> str:
    """The kind of a line of code, "" for one that both rungs have."""
    return next((kind for beginning, kind in KINDS.items() if line.startswith(beginning)), "")
