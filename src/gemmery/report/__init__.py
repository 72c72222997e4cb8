"""Records -> a live table, Markdown, JSON; SVG figures in `figures`, and one self-contained HTML page in `page`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemmery.report.diff import show_difference
    from gemmery.report.emulated import Counting, complaints, show_emulated
    from gemmery.report.exhibits import Exhibiting, list_exhibits, show_emulated_exhibit, show_exhibit
    from gemmery.report.terminal import Progressing, findings, show
    from gemmery.report.text import as_json, markdown

_HOME = {
    "show_difference": "diff",
    **dict.fromkeys(("Counting", "complaints", "show_emulated"), "emulated"),
    **dict.fromkeys(("Exhibiting", "list_exhibits", "show_emulated_exhibit", "show_exhibit"), "exhibits"),
    **dict.fromkeys(("Progressing", "findings", "show"), "terminal"),
    **dict.fromkeys(("as_json", "markdown"), "text"),
}

__all__ = [
    "Counting",
    "Exhibiting",
    "Progressing",
    "as_json",
    "complaints",
    "findings",
    "list_exhibits",
    "markdown",
    "show",
    "show_difference",
    "show_emulated",
    "show_emulated_exhibit",
    "show_exhibit",
]


def __getattr__(name: str) -> Any:
    """A public name, loaded when it is first used: the CPU's ladder needs nothing of the emulator."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'gemmery.report' has no attribute {name!r}")
    value = getattr(import_module(f"gemmery.report.{home}"), name)
    globals()[name] = value
    return value
