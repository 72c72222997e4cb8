"""Records -> a live table, Markdown, JSON; SVG figures in `figures`, and one self-contained HTML page in `page`."""

from gemmery.report.diff import show_difference
from gemmery.report.emulated import Counting, complaints, show_emulated
from gemmery.report.exhibits import Exhibiting, list_exhibits, show_emulated_exhibit, show_exhibit
from gemmery.report.inspection import show_inspection
from gemmery.report.side_by_side import show_comparison
from gemmery.report.terminal import Progressing, findings, show
from gemmery.report.text import as_json, markdown

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
    "show_comparison",
    "show_difference",
    "show_emulated",
    "show_emulated_exhibit",
    "show_exhibit",
    "show_inspection",
]
