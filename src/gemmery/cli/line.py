"""Runs one command line: every error is one line on stderr, except a compiler's."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Sequence
from io import TextIOWrapper

import typer

from gemmery.cli.app import app
from gemmery.errors import EXTRAS, ArgumentError, CompileError, GemmeryError, InstallError, missing


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
