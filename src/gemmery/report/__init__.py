"""Records -> a live table, Markdown, SVG figures, and one self-contained HTML page."""

from gemmery.report.markdown import markdown
from gemmery.report.page import page
from gemmery.report.terminal import Progressing, findings, show

__all__ = ["Progressing", "findings", "markdown", "page", "show"]
