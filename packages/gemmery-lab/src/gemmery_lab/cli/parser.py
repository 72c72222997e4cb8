"""The parser, the options that several commands share, their output, and how one command line runs.

Output is progress, a table or JSON, a page and a file. Every error is one line on stderr, except a compiler's.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from gemmery.errors import EXTRAS, ArgumentError, CompileError, GemmeryError, InstallError, missing
from gemmery_emulator.pages.writing import as_json, check_page, console, place, write_page
from gemmery_lab import asked

if TYPE_CHECKING:
    from gemmery.ladder.rung import Rung
    from gemmery_lab.measure.record import Measurement, OnEvent, OnStep, Run, RunEvent
    from gemmery_lab.report.terminal import Growing

INTERRUPTED = 130
R = TypeVar("R")
S = TypeVar("S")
Action = Callable[[], int]  # a parsed command line: it runs outside the parser and returns the exit code

_WORDS = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))


def texts(command: str) -> dict[str, Any]:
    """Return the line of a command in the list of all, and the examples below its help."""
    return dict(_WORDS[command])


def option(words: str, *flags: str, **settings: Any) -> Any:
    """Return an option with its words in commands.toml."""
    return typer.Option(*flags, **_WORDS["options"][words], **settings)  # type: ignore[misc]  # no default among them


def argument(words: str, **settings: Any) -> Any:
    """Return an argument with its words in commands.toml."""
    return typer.Argument(**_WORDS["options"][words], **settings)


_OWN_WORDS = ("arguments", "arg")  # of `run` and `emulate`: a program may take an empty word


class _NonEmpty:
    """A command that takes no empty value: it would stand for everything, or for the working directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        command: Any = super()
        written, _, _ = command.make_parser(ctx).parse_args(args=list(args))
        for each in command.get_params(ctx):
            values, flag = written.get(each.name), each.opts[0]
            for value in values if isinstance(values, list | tuple) else [values]:
                if isinstance(value, str) and not value.strip(" ,") and each.name not in _OWN_WORDS:
                    name, form = (flag, f"{flag} {each.metavar}") if flag.startswith("-") else (each.metavar, "one")
                    way_out = f"write {form}{'' if each.required else ', or leave it out'}"
                    raise ArgumentError(f"{name} {value!r}: the value is empty; {way_out}")
        return list(command.parse_args(ctx, args))


class _Command(_NonEmpty, TyperCommand): ...


class _Group(_NonEmpty, TyperGroup): ...


class _Typer(typer.Typer):
    def command(self, name: str | None = None, **settings: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        return super().command(name, cls=_Command, **settings)


app = _Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
ladder_app = _Typer(rich_markup_mode=None, cls=_Group)
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


@dataclass(frozen=True)
class Output:
    """The output of a command: a table or JSON on stdout, and a page at `html` or in the folder out/, or no page.

    Made before anything is measured. Raises ArgumentError for options that contradict each other and for a place that
    cannot be written, InstallError where the page cannot be drawn.
    """

    json: bool = False
    html: Path | None = None
    no_html: bool = False

    def __post_init__(self) -> None:
        if self.html is not None and self.no_html:
            raise ArgumentError(f"--html {self.html} --no-html: give one of them")
        if self.has_page:
            check_page(self.html or Path("out", "page.html"), "matplotlib", "jinja2")

    @property
    def has_page(self) -> bool:
        """True if a page is written: not with `no_html`, and not with `json` unless `html` is given."""
        return self.html is not None or not (self.no_html or self.json)

    def say(self, text: str) -> None:
        """Write a line after the table, or to stderr if stdout is for JSON."""
        (sys.stderr if self.json else sys.stdout).write(f"{text}\n")

    def write(self, name: str, started: str, text: str, further: Mapping[str, str] | None = None) -> None:
        """Write the page and print its path; `further` pages are written beside it, and it links to them."""
        path = self.html or Path("out") / f"{name}-{started[:19].replace(':', '')}.html"
        for beside, page in (further or {}).items():
            write_page(path.parent / beside, page)
        self.say(f"page: {write_page(path, text)}")


def print_records(json: bool, records: object, show: Callable[[Console], None]) -> None:
    """Print records as JSON, or as `show` does."""
    if json:
        sys.stdout.write(f"{as_json(records)}\n")
    else:
        show(console())


def followed(
    run: Callable[[OnStep[S]], R],
    progress: Callable[[Console], Growing[S]],
    show: Callable[[R, Console], None],
    partly: Callable[[tuple[S, ...]], R],
    output: Output,
    expected: str = "",
) -> tuple[R, bool]:
    """Run with progress on stderr, then show the result; return it, and whether Ctrl-C cut it short.

    `run` is called with what receives its steps; `partly` makes a result of those before Ctrl-C. `expected` is printed
    at the start: the time it takes.
    """
    so_far: list[S] = []

    def on_step(what: str, done: int, total: int, record: S | None) -> None:
        display.announce(expected)
        so_far.extend([record] if record is not None else [])
        display.update(what, done, total, record)

    interrupted = False
    with progress(Console(stderr=True)) as display:
        try:
            result = run(on_step)
        except KeyboardInterrupt:
            if not so_far:
                raise
            result, interrupted = partly(tuple(so_far)), True
    print_records(output.json, result, partial(show, result))
    return result, interrupted


def ended(interrupted: bool, faults: Sequence[str] = ()) -> int:
    """Print a line for each fault, and that Ctrl-C cut the results short; return the exit code."""
    sys.stderr.writelines(f"gemmery: {fault}\n" for fault in faults)
    if interrupted:
        sys.stderr.write("gemmery: interrupted; the results so far are above\n")
    return INTERRUPTED if interrupted else 1 if faults else 0


def timed(
    measure: Callable[[OnEvent], Run],
    rungs: Sequence[Rung],
    show: Callable[[Run, Console], None],
    output: Output,
    expected: str = "",
) -> tuple[Run, bool]:
    """Show what `measure` times, as `followed` does."""
    from gemmery_lab.report import terminal

    runs: list[Run] = []

    def run(on_step: OnStep[Measurement]) -> Run:
        def on_event(event: RunEvent) -> None:
            runs[:] = [event.run] if event.run else runs
            on_step(event.what, event.done, event.total, event.measurement)

        return measure(on_event)

    return followed(run, partial(terminal.progress, rungs), show, lambda _: runs[0], output, expected)


def measured(
    name: str,
    measure: Callable[[OnEvent], Run],
    output: Output,
    rungs: Sequence[Rung] = (),
    store: Path | None = None,
    expected: str = "",
) -> int:
    """Measure and show the records; 1 when a result is outside its error bound, 130 after Ctrl-C.

    `rungs` are those of the records, () for the CPU's. `store` is the folder to which `measure` appends records.
    """
    from gemmery_lab import measurements
    from gemmery_lab.measure import record
    from gemmery_lab.report import terminal

    rungs = rungs or asked.registry("cpu")
    run, interrupted = timed(measure, rungs, lambda run, console: terminal.show(run, rungs, console), output, expected)
    if output.has_page:
        from gemmery_lab.report.page import page

        output.write(name, run.started, page(run, rungs))
    if skipped := any(m.refused.startswith(measurements.SLOW) for m in run.measurements):
        sys.stderr.write("gemmery: some rungs were skipped as too slow; raise the limit with --seconds\n")
    if store is not None:
        output.say(f"records: {record.path(store, run.machine.name)}")
    if run.measurements and not (interrupted or skipped or any(each.seconds for each in run.measurements)):
        return ended(False, ["nothing was timed; the reasons are above"])
    return ended(interrupted, () if interrupted else outside(run))


def check_store(folder: Path | None) -> Path | None:
    """Make the folder of the records and return it. Raises ArgumentError if no file can be written there."""
    if folder is None:
        return None
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(None, "it is not a folder")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ArgumentError(f"store {str(folder)!r}: {error.strerror}; choose another folder with --store") from error
    return folder


def outside(run: Run) -> list[str]:
    """Return a line for each result outside its error bound."""
    from gemmery_lab.report import words

    wrong = (m for m in run.measurements if not words.passed(m))
    return [f"{m.kernel} is outside its error bound at {words.shape(m)}, {words.types(m)}" for m in wrong]


@contextmanager
def bar(total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show progress on a terminal; yield what shows how many are done, of how many, and what comes next."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, total, name="": bar.update(task, completed=done, total=total, description=name)


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
    except (KeyboardInterrupt, typer.Abort):  # as the parser calls it
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
