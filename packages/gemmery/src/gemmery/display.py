"""HTML of records for a notebook, without a style of its own: it takes the notebook's colors, light or dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Rows of text as a table; the first cell of a row is its label.

    >>> table([("rung", "packed")]).count("<th")
    1
    """

    def cells(tag: str, texts: Iterable[str]) -> str:
        return "".join(f'<{tag} style="text-align: left">{escape(text)}</{tag}>' for text in texts)

    top = f"<thead><tr>{cells('th', head)}</tr></thead>" if head else ""
    lines = "".join(f"<tr>{cells('th', row[:1])}{cells('td', row[1:])}</tr>" for row in rows)
    return f"<table>{top}<tbody>{lines}</tbody></table>"


def preformatted(text: str) -> str:
    """Text in columns, as it is."""
    return f"<pre>{escape(text)}</pre>"
