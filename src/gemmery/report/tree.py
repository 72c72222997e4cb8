"""The tree of the rungs on a page: each rung under its parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from gemmery.ladder.rung import Rung


def tree(rungs: Sequence[Rung], gains: Mapping[str, str]) -> str:
    """Nested lists of the rungs under their parents, each with its gain over the parent in words, where it has one."""
    named = {rung.name: rung for rung in rungs}
    below: dict[str, list[Rung]] = {}
    for rung in rungs:
        below.setdefault(rung.parent if rung.parent and rung.parent in named else "", []).append(rung)
    return f"<div class=scroll>{_branch(below, gains, '')}</div>"


def anchor(name: str) -> str:
    """The id of a rung's part of the page."""
    return f"rung-{name}"


def _branch(below: Mapping[str, Sequence[Rung]], gains: Mapping[str, str], name: str) -> str:
    items = "".join(
        f'<li><a href="#{escape(anchor(rung.name))}"><code>{escape(rung.name)}</code></a>'
        + (f" <span class=gain>{escape(gains[rung.name])}</span>" if gains.get(rung.name) else "")
        + f" <span class=faint>{escape(rung.idea)}</span>{_branch(below, gains, rung.name)}</li>"
        for rung in below.get(name, ())
    )
    return f"<ul class=tree>{items}</ul>" if items else ""
