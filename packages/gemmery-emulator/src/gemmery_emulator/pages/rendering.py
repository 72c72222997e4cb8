"""Pages from the templates in templates/: every text is escaped, and an unknown name is an error."""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from gemmery_emulator.pages.svg import schemes, variables


def render(template: str, package: str, **values: Any) -> str:
    """Return a page from a template of a package, which may use those of this one.

    >>> render("exhibit.html", "gemmery_lab.report", title="a", exhibit=EXHIBITS[0], where="", ...)  # doctest: +SKIP
    '<!doctype html>...'
    """
    return _environment(package).get_template(template).render(values)


def framed(page: str, title: str) -> str:
    """A page as a frame in another one, dark or light as the background behind it, light where that is unknown."""
    light = page.replace('<html lang="en">', '<html lang="en" data-scheme="light">', 1)
    return render("frame.html", __package__, page=light, title=title)


@functools.cache
def _environment(package: str) -> Environment:
    packages = dict.fromkeys((package, __package__))
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["style"] = _style
    return environment


@functools.cache
def _style() -> str:
    css = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return f"{variables()}\n{schemes()}\n{css}"
