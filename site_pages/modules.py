"""The modules of a folder, each with the first line of its docstring, as a list for docs/design.md."""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path
from textwrap import fill

WIDTH, COLUMN = 120, 24  # of the document's lines, and where the docstrings begin


def listing(root: Path, folder: str) -> str:
    """A block of text with a line for each package below `folder`, followed by those of its modules."""
    files = sorted((root / folder).rglob("*.py"), key=lambda file: (file.parent, file))
    lines = []
    for package, modules in groupby(files, key=lambda file: file.parent):
        firsts = {module.name: _first_line(module) for module in modules}
        lines.append(_line(f"{package.relative_to((root / folder).parent).as_posix()}/", firsts.pop("__init__.py", "")))
        lines += [_line(f"  {name}", first) for name, first in firsts.items()]
    return "\n".join(("```", *lines, "```"))


def _line(place: str, first: str) -> str:
    text = f"{place:{COLUMN - 2}}  {first}"
    return fill(text, WIDTH, subsequent_indent=" " * COLUMN, break_on_hyphens=False, break_long_words=False).rstrip()


def _first_line(module: Path) -> str:
    return (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").partition("\n")[0]
