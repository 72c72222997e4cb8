"""The parser, the options that several commands share, and how one command line runs.

Every error is one line on stderr, except a compiler's.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
import tomllib
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from gemmery.errors import EXTRAS, ArgumentError, CompileError, GemmeryError, InstallError, missing
from gemmery_emulator.pages.writing import place

Action = Callable[[], int]  # a parsed command line: it runs outside the parser and returns the exit code

_WORDS = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))


def texts(command: str) -> dict[str, Any]:
    """Return the line of a command in the list of all, and the examples below its help."""
    return dict(_WORDS[command])


def option(words: str, *flags: str, **settings: Any) -> Any:
    """Return an option with its words in commands.toml."""
    return typer.Option(*flags, **_WORDS["options"][words], **settings)


def argument(words: str, **settings: Any) -> Any:
    """Return an argument with its words in commands.toml."""
    return typer.Argument(**_WORDS["options"][words], **settings)


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
ladder_app = typer.Typer(rich_markup_mode=None)
app.add_typer(ladder_app, name="ladder", short_help="Time every rung against NumPy or cuBLAS.")

Version = Annotated[bool, option("version", "--version", is_eager=True)]


@app.callback(invoke_without_command=True)
def gemmery(context: typer.Context, version: Version = False) -> None:
    """Fast matrix products, and the ladder of kernels that leads to them."""
    if version:
        from gemmery_lab.measure import record

        sys.stdout.write(f"gemmery {record.version('gemmery')}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        sys.stdout.write(f"{context.get_help()}\n")


_DIGITS = 18  # of a number on the command line: more are no size of anything


As = Annotated[str, option("as", "--as")]
Json = Annotated[bool, option("json", "--json")]
Html = Annotated[Path | None, option("html", callback=place)]
NoHtml = Annotated[bool, option("nohtml", "--no-html")]
Keep = Annotated[Path | None, option("keep", "--store", callback=place)]


def threads_in_words(threads: int) -> str:
    """Return a warning about more threads than cores to append to a line, "" if there are not more."""
    from gemmery.cpu import target

    cores = target.cores()
    return f"; {threads} threads share {cores} core{'s' * (cores != 1)}" if threads > cores else ""


def names(text: str) -> tuple[str, ...]:
    """Split `a,b` into names; "" has none."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Split `1,2` into whole numbers; "" has none. Raises ArgumentError for anything else."""
    parts = names(text)
    for name in parts:
        if not name.isdecimal():
            raise ArgumentError(f"{option} {text}: {name!r} is not a whole number >= 0; write {option} 256,1024")
    return tuple(_whole(option, name) for name in parts)


def _whole(option: str, digits: str) -> int:
    """Return the number; Python reads none of more than 4,300 digits."""
    count = len(digits.removeprefix("-"))
    if count > _DIGITS:
        raise ArgumentError(f"{option}: a number of {count:,} digits; {_DIGITS} digits are the most")
    return int(digits)


def settings(text: str) -> dict[str, int]:
    """Split `bm=128,bk=16` into whole numbers by name. Raises ArgumentError for anything else."""
    values = {}
    for part in names(text):
        name, _, number = part.partition("=")
        if not number.removeprefix("-").isdecimal():
            raise ArgumentError(f"--config {text}: {part!r} is not KEY=NUMBER; write --config bm=128,bk=16")
        if name in values:
            raise ArgumentError(f"--config {text}: {name} is given twice; give it once")
        values[name] = _whole(f"--config {name}", number)
    return values


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; an error is one line on stderr, except a compiler's.

    >>> run(["ladder", "--sizes", "0"])
    2
    """
    try:
        action = app(list(arguments), prog_name="gemmery", standalone_mode=False)
        code = int(action() if callable(action) else action or 0)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            _drop_output()
            return _complain(f"output: {error.strerror}; write it to another place", 1)
        if error.filename is None:
            raise
        return _complain(f"{error.filename}: {error.strerror}; choose another place", 1)
    except MemoryError as error:
        return _complain(f"out of memory: {error}; take smaller sizes", 1)
    except CompileError as error:  # it shows the place in the source
        sys.stderr.write(f"gemmery: {str(error).strip()}\n")
        return 1
    except GemmeryError as error:
        return _complain(str(error), 2 if isinstance(error, ArgumentError | InstallError) else 1)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS["lab"]:
            raise
        return _complain(missing("lab", f"the commands need {library}"), 2)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        way_out = f"see `{context.command_path if context else 'gemmery'} --help`"
        return _complain(f"{shlex.join(arguments)}: {_plain(error.format_message())}; {way_out}", 2)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    return code


def _plain(message: str) -> str:
    """Return a message of the parser without the words of its library.

    >>> _plain("Invalid value for '--n': Input should be a valid integer, unable to parse string as an integer")
    "Invalid value for '--n': it must be an integer"
    """
    plain = message.rstrip(".").partition(", unable to parse")[0]
    for words, ours in (("a valid integer", "an integer"), ("a valid number", "a number"), ("Input should", "it must")):
        plain = plain.replace(words, ours)
    return plain


def _drop_output() -> None:
    """Let nothing of the output be written at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"gemmery: {' '.join(message.split())}\n")
    return code


def main() -> None:
    """Run the command line of this process and exit."""
    if sys.stdout is None:  # closed by the caller
        sys.exit(_complain("output: stdout is closed; leave it open, or send it to a file", 1))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without × gets ? instead of a traceback
    sys.exit(run(sys.argv[1:]))
