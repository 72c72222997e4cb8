"""The difference of two rungs in colours, in a terminal and as a page."""

from __future__ import annotations

import html

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemmery.ladder.diff import Difference

STYLES = {"@": "cyan", "+": "green", "-": "red"}  # by the first character of a line
CLASSES = {"@": "hunk", "+": "added", "-": "removed"}
LEGEND = (
    "<p class=legend><span class=removed>Red</span> is only in the first rung, <span class=added>green</span> only in "
    "the second. Definitions that both use are left out.</p>"
)
SAME = "Both rungs run the same code; they differ only in the facts above."


def show_difference(found: Difference, console: Console) -> None:
    """Print the facts that differ, then the difference of the code."""
    table = Table(box=None, show_header=True, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", found.old, found.new):
        table.add_column(name, overflow="fold")
    for fact in found.facts:
        table.add_row(Text(fact.name, style="dim"), Text(fact.old, style="red"), Text(fact.new, style="green"))
    console.print(table)
    console.print()
    for line in found.lines:
        style = "bold" if line.startswith(("---", "+++")) else STYLES.get(line[:1], "")
        console.print(Text(line, style=style), soft_wrap=True)
    if not found.lines:
        console.print(Text(SAME, style="dim"))


def difference_page(found: Difference) -> str:
    """The same as one self-contained HTML page."""
    from gemmery.report.page import document

    facts = "".join(
        f"<tr><td>{html.escape(fact.name)}</td><td>{html.escape(fact.old)}</td><td>{html.escape(fact.new)}</td></tr>"
        for fact in found.facts
    )
    head = f"<tr><th></th><th>{html.escape(found.old)}</th><th>{html.escape(found.new)}</th></tr>"
    lines = "".join(_line(line) for line in found.lines) or f"{SAME}\n"
    title = f"From {found.old} to {found.new}"
    return document(
        title,
        f"<header><h1>{html.escape(title)}</h1></header>",
        f"<section class=scroll><table class=words><thead>{head}</thead><tbody>{facts}</tbody></table></section>",
        LEGEND,
        f"<pre class='code wide'>{lines}</pre>",
    )


def _line(line: str) -> str:
    kind = "file" if line.startswith(("---", "+++")) else CLASSES.get(line[:1], "")
    text = html.escape(line)
    return f"<span class={kind}>{text}</span>\n" if kind else f"{text}\n"
