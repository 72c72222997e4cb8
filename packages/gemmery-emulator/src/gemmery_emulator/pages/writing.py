"""What a command writes: JSON, and the page or picture that an option asks for, checked before anything runs.

Pages are made from the templates in templates/: every text is escaped, and an unknown name is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import CallbackParam, Option

from gemmery.errors import ArgumentError, InstallError, missing

if TYPE_CHECKING:
    from jinja2 import Environment

STARTS = (b"<!doctype html", b"<html", b"<svg", b"<?xml")  # of pages and pictures


def place(option: CallbackParam, path: Path | None) -> Path | None:
    """The path of an option. Raises ArgumentError for "-", which stands for stdout in other programs."""
    if path == Path("-"):
        raise ArgumentError(f"{option.opts[-1]} -: stdout is for tables and JSON; give a path")
    return path


HtmlToo = Annotated[
    Path | None, Option("--html", metavar="PATH", help="Also write a page there.", show_default=False, callback=place)
]


def check_page(path: Path, *libraries: str) -> None:
    """Check that a page can be drawn with these libraries and written there.

    Raises InstallError for a library that is missing, ArgumentError if the file cannot be written.
    """
    for library in filter(_is_missing, libraries):
        raise InstallError(missing("lab", f"the page needs {library}"), name=library)
    check_writable(path)


def _is_missing(package: str) -> bool:
    try:
        return find_spec(package) is None
    except ValueError:  # sys.modules marks it as missing
        return True


def check_trace(path: Path) -> None:
    """Make the folder of a trace. Raises ArgumentError if the file cannot be written."""
    check_writable(path, "--timeline", (b"{",), "trace")


def check_writable(
    path: Path, option: str = "--html", starts: tuple[bytes, ...] = STARTS, what: str = "page or picture"
) -> None:
    """Make the folder of a file. Raises ArgumentError if the file cannot be written, or is none that `starts` so."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            path.open("ab").close()
        if path.is_file():  # a pipe is not read
            with path.open("rb") as file:
                start = file.read(64).lstrip().lower()
            if start and not start.startswith(starts):
                raise FileExistsError(None, f"it exists and is no {what}")
    except OSError as error:
        raise _unwritable(path, error, option) from error


def write_page(path: Path, text: str, option: str = "--html") -> Path:
    """Write a file that an option asks for, with its folders; return its path.

    Raises ArgumentError if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error, option) from error
    return path


def _unwritable(path: Path, error: OSError, option: str) -> ArgumentError:
    what = {"--html": "page", "--timeline": "timeline"}.get(option, "picture")
    return ArgumentError(f"{what} {str(path)!r}: {error.strerror}; choose another place with {option}")


class _Console(Console):
    """A console that lets the command handle a closed pipe."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """Return a console on stdout, as wide as the terminal."""
    return _Console(highlight=False, soft_wrap=False)


def as_json(record: Any) -> str:
    """Return a dataclass or a named tuple, or several, as JSON.

    >>> as_json(Diagnosis("cores", "2"))  # doctest: +SKIP
    '{"name": "cores", "value": "2", "ok": true, "advice": ""}'
    """
    return json.dumps(as_plain(record), allow_nan=False)


def as_plain(value: Any) -> Any:
    """Return a value in which dataclasses and named tuples are dictionaries, and tuples are lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: as_plain(part) for name, part in zip(value._fields, value, strict=True)}
    if isinstance(value, dict):
        return {key: as_plain(part) for key, part in value.items()}
    return [as_plain(part) for part in value] if isinstance(value, list | tuple) else value


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
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

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
    from gemmery_emulator.pages.svg import schemes, variables  # loads matplotlib

    css = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return f"{variables()}\n{schemes()}\n{css}"
