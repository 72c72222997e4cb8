"""Records -> a live table, Markdown, JSON; SVG figures in `figures`, and one self-contained HTML page in `page`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmery import load_lazily

if TYPE_CHECKING:
    from gemmery.report.difference import show_difference as show_difference
    from gemmery.report.emulated_tables import complaints as complaints
    from gemmery.report.emulated_tables import emulated_progress as emulated_progress
    from gemmery.report.emulated_tables import show_emulated as show_emulated
    from gemmery.report.exhibit_results import exhibit_progress as exhibit_progress
    from gemmery.report.exhibit_results import list_exhibits as list_exhibits
    from gemmery.report.exhibit_results import show_emulated_exhibit as show_emulated_exhibit
    from gemmery.report.exhibit_results import show_exhibit as show_exhibit
    from gemmery.report.terminal import findings as findings
    from gemmery.report.terminal import progress as progress
    from gemmery.report.terminal import show as show
    from gemmery.report.text import as_json as as_json
    from gemmery.report.text import markdown as markdown

_HOMES = {
    "gemmery.report.difference": ("show_difference",),
    "gemmery.report.emulated_tables": ("complaints", "emulated_progress", "show_emulated"),
    "gemmery.report.exhibit_results": ("exhibit_progress", "list_exhibits", "show_emulated_exhibit", "show_exhibit"),
    "gemmery.report.terminal": ("findings", "progress", "show"),
    "gemmery.report.text": ("as_json", "markdown"),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)  # noqa: PLE0605

if not TYPE_CHECKING:  # with it type checkers would accept any name
    __getattr__ = load_lazily(__name__, _HOMES)  # the CPU's ladder needs nothing of the emulator
