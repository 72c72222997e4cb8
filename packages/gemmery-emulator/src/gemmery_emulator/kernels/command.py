"""The command that runs anyone's kernel without a GPU: emulate; and what it says of a launch that takes long."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from gemmery.errors import ArgumentError, CheckError, DeviceError
from gemmery_emulator.pages.writing import HtmlToo, check_page, check_trace, console, write_page

if TYPE_CHECKING:
    from gemmery_emulator.kernels.kernel_run import KernelRun

SHORT_HELP = "Run a kernel of your own without a GPU: counters, faults, pictures."
EPILOG = """\b
    Examples:
      gemmery emulate add.cu --grid 4 --block 256 --arg f32[1024]=random
          --arg f32[1024]=zeros --arg n=1024 --card h200
      gemmery emulate gemm.cu -k "gemm<float, 32>" --grid 4,4 --block 32,8
          --arg f32[128,128]=random --arg f32[128,128]=random
          --arg f32[128,128] --arg 128 --check reference.py:gemm --html gemm.html
      gemmery emulate old.cu --against new.cu --grid 8 --block 128 --arg x.npy

    \b
    An --arg for each parameter of the kernel, in their order:
      f32[64,32]=random  an array: f16 f32 f64 bf16 int8 ... uint64 bool, filled
                         with zeros ones arange random nan or a number
      x.npy, x.npz:key   an array from a file; the file stays as it is
      n=64, 0.5          a number for parameter n, or for the next one; of its
                         own type, or of another: i64=3
      null               a null pointer

    \b
    With --run the whole program runs, main() too: `gemmery emulate prog.cu
    --run --arg 1024`. Its host part is compiled by g++ or clang++.

    \b
    Without an --arg a command with those of the kernel is printed. Without
    --run, main() and other host code of the file is left out. The exit code is
    1 for a fault, and for a result that is not the reference's: FUNCTION takes
    the arguments before the launch, and returns the arrays after it, or writes
    to its own."""
FIRST = 5.0  # seconds before the first line; each further one comes after four times as long
LONG = 20.0  # seconds left from which on a line is written
UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


def emulate(
    file: Annotated[Path, Argument(metavar="FILE", help="CUDA C++ or PTX.", show_default=False)],
    grid: Annotated[str, Option(metavar="X,Y,Z", help="Blocks.", show_default="the file's <<< >>>, or 1")] = "",
    block: Annotated[str, Option(metavar="X,Y,Z", help="Threads of a block.", show_default="the same, or 32")] = "",
    kernel: Annotated[
        str, Option("--kernel", "-k", metavar="NAME", help='"add", "add<4>".', show_default="the only one")
    ] = "",
    arg: Annotated[
        list[str] | None, Option("--arg", "-a", metavar="ARG", help="An argument; see below.", show_default="none")
    ] = None,
    shared: Annotated[int, Option(metavar="BYTES", min=0, help="Dynamic shared memory.")] = 0,
    arch: Annotated[str, Option(metavar="NAME", help="sm_80, or a card: a100.")] = "sm_90",
    option: Annotated[
        list[str] | None,
        Option("--option", "-o", metavar="FLAG", help="For the compiler: -o -DN=4.", show_default="none"),
    ] = None,
    check: Annotated[
        str | None, Option(metavar="FILE:FUNCTION", help="What the arrays are after.", show_default="not checked")
    ] = None,
    tolerance: Annotated[
        float | None, Option(metavar="T", min=0, help="Of the check, of the largest element.", show_default="by type")
    ] = None,
    seed: Annotated[
        int | None, Option(metavar="S", min=0, help="Shuffle blocks and warps.", show_default="not")
    ] = None,
    against: Annotated[
        Path | None, Option(metavar="FILE", help="Another kernel, side by side.", show_default=False)
    ] = None,
    card: Annotated[
        str, Option(metavar="CARD", help="Predict the time on it: h200, a100, ...", show_default="not predicted")
    ] = "",
    line: Annotated[
        str, Option(metavar="FILE:LINE", help="Draw the accesses of this line.", show_default="the costliest")
    ] = "",
    timeline: Annotated[
        Path | None,
        Option(metavar="PATH", help="Write what each warp does on the card, for Perfetto.", show_default=False),
    ] = None,
    json: Annotated[bool, Option("--json", help="Print JSON; a list with --against.")] = False,
    seconds: Annotated[float, Option(metavar="S", min=0, help="Ends a kernel, or main(), that does not end.")] = 60,
    run: Annotated[bool, Option("--run", help="Run main(), too; each --arg is a word for it.")] = False,
    html: HtmlToo = None,
) -> Callable[[], int]:
    """Run a CUDA kernel on the CPU, count what it does line by line, and look for faults; no GPU is needed."""
    from gemmery_emulator.kernels import written_arguments

    if run:
        unused = {"--grid": grid, "--block": block, "--kernel": kernel, "--shared": shared, "--check": check}
        unused |= {"--against": against, "--seed": seed is not None, "--html": html, "--line": line}
        for name, value in (unused | {"--timeline": timeline}).items():
            if value:
                raise ArgumentError(f"{name} with --run: the program itself launches its kernels; leave it out")
        _checked_files([file])
        return partial(_run_whole, file, arg or [], arch, tuple(option or ()), card, json, seconds)
    texts = {"grid": grid, "block": block}
    sizes = {name: written_arguments.sides(f"--{name}", text) if text else None for name, text in texts.items()}
    values = [written_arguments.argument(text, place) for place, text in enumerate(arg or [])]
    expected = None if check is None else written_arguments.reference(check)
    _check_tolerance(tolerance, check)
    _check_card(card)
    files = [file, *([against] if against else [])]
    _checked_files(files)
    _check_outputs(card, against, line, html, timeline)
    limits: dict[str, Any] = {"shared": shared, "arch": arch, "seed": seed, "seconds": seconds}
    options = {**sizes, **limits, "options": tuple(option or ())}
    run_each = [partial(_run, path, kernel, arg or [], values, options, expected, tolerance or 0) for path in files]
    return partial(_emulate, run_each, bool(expected), card, line, json, html, timeline)


def _check_tolerance(tolerance: float | None, check: str | None) -> None:
    if tolerance is not None and (check is None or tolerance == inf):
        rule = "it needs --check; add that" if check is None else "it must be finite; write a number"
        raise ArgumentError(f"--tolerance {tolerance}: {rule}, or leave it out")


def _check_card(card: str) -> None:
    if card:
        from gemmery.cuda.pipes import pipes_of

        try:
            pipes_of(card)
        except DeviceError as error:
            raise ArgumentError(str(error)) from error


def _check_outputs(card: str, against: Path | None, line: str, html: Path | None, timeline: Path | None) -> None:
    """Check that the timeline and the page can be made, and written where they are asked for."""
    if timeline is not None and (not card or against is not None):
        way = "it is of one kernel; leave --against out" if card else "it is that of a card; add --card h200"
        raise ArgumentError(f"--timeline {timeline}: {way}")
    if timeline is not None:
        check_trace(timeline)
    if line and html is None:
        raise ArgumentError(f"--line {line}: the line is drawn on the page; add --html PATH")
    if html is not None:
        check_page(html, "jinja2", "matplotlib")


def _checked_files(files: Sequence[Path]) -> None:
    for path in files:
        if not path.is_file():
            reason = "it is a folder" if path.is_dir() else "there is no such file"
            raise ArgumentError(f"{path}: {reason}; give the path of a .cu or .ptx file")


def _run_whole(
    file: Path, words: Sequence[str], arch: str, options: tuple[str, ...], card: str, json: bool, seconds: float
) -> int:
    """Run a program with its main(); returns 1 for a fault, else main()'s own status."""
    from gemmery_emulator.kernels.host_runtime import run_program
    from gemmery_emulator.kernels.kernel_run import summary
    from gemmery_emulator.kernels.terminal_tables import show_run
    from gemmery_emulator.pages.writing import as_json
    from gemmery_emulator.run import progress

    before = progress.set(announcer(sys.stderr.write))
    try:
        with _to_stderr() if json else nullcontext():  # what the program prints is no JSON
            program = run_program(file, words, arch, options=options, card=card, seconds=seconds)
    finally:
        progress.reset(before)
    faults = bool(program.notes) or any(run.findings for run in program.runs)
    if json:
        kernels = [{**summary(run), "launches": program.launches[run.kernel]} for run in program.runs]
        whole = {"status": program.status, "kernels": kernels, "faults": program.notes, "seconds": program.seconds}
        sys.stdout.write(f"{as_json(whole)}\n")
    else:
        sys.stdout.write(f"main() returned {program.status}\n")
        for run in program.runs:
            count = program.launches[run.kernel]
            sys.stdout.write(f"\n{count} launch{'es' * (count != 1)} of {run.kernel}, added up; the last one:\n")
            show_run(run, console())
        if program.seconds is not None:
            sys.stdout.write(f"\npredicted for all launches on {card}: {program.seconds * 1e6:,.1f} us\n")
    sys.stderr.writelines(f"gemmery: {note}\n" for note in program.notes)
    return 1 if faults else program.status


@contextmanager
def _to_stderr() -> Iterator[None]:
    """Let all that this process prints, of C too, go to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _emulate(
    run_each: Sequence[Callable[[], tuple[KernelRun, str]]],
    checks: bool,
    card: str,
    line: str,
    json: bool,
    html: Path | None,
    timeline: Path | None,
) -> int:
    from gemmery_emulator.kernels.kernel_run import run_page, summary
    from gemmery_emulator.kernels.terminal_tables import show_prediction, show_run, show_runs
    from gemmery_emulator.pages.writing import as_json

    outcomes = [run_file() for run_file in run_each]
    runs = [run for run, _ in outcomes]
    wrong = [complaint for _, complaint in outcomes if complaint]
    predictions = [run.predict(card) for run in runs] if card else []
    timelines = [run.timeline(card) for run in runs] if card and (html is not None or timeline is not None) else []
    others = (runs[1] if len(runs) > 1 else None, line, predictions, timelines)
    page = run_page(runs[0], *others) if html is not None else ""
    # From here on nothing is refused, so that no output is cut short.
    for place, (run, complaint) in enumerate(outcomes):
        if not json:
            show_run(run, console())
            for prediction in predictions[place : place + 1]:
                show_prediction(prediction, console())
            sys.stdout.write("checked: the arrays are as the reference has them\n" if checks and not complaint else "")
    if json:
        parts = [summary(run) for run in runs]
        for part, prediction in zip(parts, predictions, strict=False):
            part["predicted"] = prediction
        texts = [as_json(part) for part in parts]
        sys.stdout.write(f"{texts[0]}\n" if len(texts) == 1 else f"[{', '.join(texts)}]\n")
    elif len(runs) > 1:
        show_runs(runs[0], runs[1], console())
    if html is not None:
        (sys.stderr if json else sys.stdout).write(f"page: {write_page(html, page)}\n")
    if timeline is not None:
        written = write_page(timeline, timelines[0].trace(), "--timeline")
        (sys.stderr if json else sys.stdout).write(f"timeline: {written}, for ui.perfetto.dev\n")
    sys.stderr.writelines(f"gemmery: {complaint}\n" for complaint in wrong)
    return 1 if wrong or any(run.findings for run in runs) else 0


def _run(
    file: Path,
    kernel: str,
    texts: Sequence[str],
    values: list[Any],
    options: dict[str, Any],
    expected: Any,
    tolerance: float,
) -> tuple[KernelRun, str]:
    """Run one file on copies of the arrays; returns what is wrong with the result, too."""
    import numpy as np

    from gemmery_emulator.kernels import written_arguments
    from gemmery_emulator.kernels.kernel import emulate, only_kernel, written_launch
    from gemmery_emulator.kernels.source_kernels import names_of
    from gemmery_emulator.run import progress

    kernel = kernel or only_kernel(file)
    definitions, grid, block, launched = written_launch(file, kernel)
    parameters = definitions[0] if definitions else ()
    if not values and parameters and all(value is not None for value in (*launched, launched or None)):
        values = list(launched)  # numbers alone
    elif not values and parameters:
        options_of = written_arguments.example(parameters, launched, grid, block)
        raise ArgumentError(f"{kernel}({', '.join(parameters)}) takes arguments; for example {options_of}")
    options = {**options, "grid": options["grid"] or grid or 1, "block": options["block"] or block or 32}
    if any(map(written_arguments.parameter, texts)):
        written_arguments.check_names(texts, kernel, names_of(definitions))
    arrays = [value.copy() if isinstance(value, np.ndarray) else value for value in values]
    before = progress.set(announcer(sys.stderr.write))
    try:
        run = emulate(file, kernel, args=arrays, **options)
    finally:
        progress.reset(before)
    try:
        if expected:
            written_arguments.check(expected, values, arrays, tolerance)
    except CheckError as error:
        return run, f"{file}: {error}"
    return run, ""


def announcer(write: Callable[[str], object], clock: Callable[[], float] = monotonic) -> Callable[[int, int], None]:
    """Return what a launch calls before each chunk with the blocks that have run and all blocks of the grid.

    >>> times = iter([0.0, 10.0])
    >>> call = announcer(lambda text: print(text.partition("; ")[2], end=""), lambda: next(times))
    >>> for done in (0, 5):
    ...     call(done, 1000)
    the others take about 33 minutes. Ctrl-C ends this; a smaller --grid finds most faults, too
    """
    begin, after = 0.0, FIRST

    def announce(done: int, blocks: int) -> None:
        nonlocal begin, after
        now = clock()
        if not done:  # of each launch of a program
            begin, after = now, FIRST
        past = now - begin
        if past < after:
            return
        after = 4 * past
        rest = past / done * (blocks - done)
        if rest >= LONG:
            write(
                f"gemmery: {done:,} of {blocks:,} blocks have run in {_written(past)}; the others take about "
                f"{_written(rest)}. Ctrl-C ends this; a smaller --grid finds most faults, too\n"
            )

    return announce


def _written(seconds: float) -> str:
    for size, unit in UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} seconds"
