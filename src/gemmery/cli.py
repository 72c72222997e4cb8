"""The command `gemmery`: parses, calls `lab`, hands the records to `report`, and turns errors into one line.

Exit codes: 0 fine; 1 a result outside its bound, or a finding of `doctor`; 2 bad usage; 130 interrupted.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gemmery.errors import ArgumentError, GemmeryError

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as missing:
    print(f"gemmery: the commands need {missing.name}: pip install 'gemmery[lab]'", file=sys.stderr)  # noqa: T201
    raise SystemExit(2) from None

if TYPE_CHECKING:
    from gemmery.bench.record import Run
    from gemmery.lab import Inspection, OnEvent
    from gemmery.ladder.rung import Rung

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
ladder_app = typer.Typer(rich_markup_mode=None)
app.add_typer(ladder_app, name="ladder")
EXTRA = {"matplotlib", "ml_dtypes", "rich", "threadpoolctl", "typer"}  # what `gemmery[lab]` installs
Action = Callable[[], int]  # what a command line asks for: it runs outside the parser, and returns the exit code

option, argument = typer.Option, typer.Argument
Rungs = Annotated[str, option(metavar="A,B", help="Only these rungs.", show_default="every rung")]
Sizes = Annotated[
    str, option(metavar="N,M", help="Sides of the square matrices.", show_default="512,1024,2048; twice that on a GPU")
]
DType = Annotated[str, option(metavar="TYPE", help="Element type: f32, f64, f16, bf16, i8, ...; tf32 on a GPU.")]
Device = Annotated[str, option(metavar="NAME", help="cpu, cuda, or cuda:N for the Nth GPU.")]
Threads = Annotated[int, option(metavar="N", min=0, help="Threads, 0 for every core.")]
Seconds = Annotated[float, option(metavar="S", help="A rung that takes longer for one product is not run.")]
Json = Annotated[bool, option("--json", help="Records as JSON on stdout, and nothing else there.")]
Html = Annotated[Path | None, option(metavar="PATH", help="Where to write the page.", show_default="out/...html")]
NoHtml = Annotated[bool, option("--no-html", help="Write no page.")]

Suites = Annotated[list[str] | None, argument(metavar="SUITE", help="Names or paths of suites.", show_default="all")]
Rivals = Annotated[str, option(metavar="A,B", help="Only these rivals.", show_default="every one")]
SuiteThreads = Annotated[int, option(metavar="N", min=0, help="Threads instead of the suite's.", show_default="keep")]
Budget = Annotated[float, option(metavar="S", help="Seconds spent on one product by all who run it.")]
Keep = Annotated[Path | None, option("--store", metavar="DIR", help="Append the records to a file there.")]
Store = Annotated[Path | None, option(metavar="DIR", help="Keep records there.", show_default="benchmarks/results")]
NoStore = Annotated[bool, option("--no-store", help="Keep no records.")]

Experiment = Annotated[
    str,
    argument(
        metavar="EXPERIMENT",
        help="size, block (CPU); threads, tile, stages, gemv (against N), gemv_k (GPU).",
        show_default=False,
    ),
]
Side = Annotated[int | None, option("--n", metavar="N", min=1, help="The one size.", show_default="the experiment's")]
SweptSizes = Annotated[str, option(metavar="N,M", help="The sizes that are varied.", show_default="the experiment's")]
SweptOn = Annotated[
    str, option("--device", metavar="NAME", help="cpu, cuda, or cuda:N.", show_default="the experiment's")
]
Workload = Annotated[str, option(metavar="NAME", help="chain: R = A (A + B) on a GPU, in place of suites.")]
Ns = Annotated[str, option("--n", metavar="N,M", help="The sides of a workload.", show_default="2048,4096")]
Repeats = Annotated[int, option(metavar="N", help="Steps of a workload.")]
SuiteDevice = Annotated[
    str, option("--device", metavar="NAME", help="cpu, cuda or cuda:N.", show_default="the suites'")
]
Version = Annotated[bool, option("--version", is_eager=True, help="Show the version and exit.")]


@app.callback(invoke_without_command=True)
def gemmery(context: typer.Context, version: Version = False) -> None:
    """Matrix products at the speed of the machine, and the ladder of kernels that leads there."""
    if version:
        from gemmery.bench import record

        sys.stdout.write(f"gemmery {record.version('gemmery')}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        sys.stdout.write(f"{context.get_help()}\n")


@ladder_app.callback(
    invoke_without_command=True,
    epilog="""\b
    Examples:
      gemmery ladder
      gemmery ladder --sizes 256,1024 --rungs simd_row,packed
      gemmery ladder --dtype f64 --html f64.html
      gemmery ladder --device cuda --dtype f16
      gemmery ladder --json > ladder.json
      gemmery ladder diff simd_row simd_blocked""",
)
def ladder(
    context: typer.Context,
    rungs: Rungs = "",
    sizes: Sizes = "",
    dtype: DType = "f32",
    threads: Threads = 0,
    seconds: Seconds = 5.0,
    device: Device = "cpu",
    store: Keep = None,
    json: Json = False,
    html: Html = None,
    no_html: NoHtml = False,
) -> Action | None:
    """Run every rung, check it, time it beside NumPy or cuBLAS, and show what each idea bought."""
    from gemmery import lab

    if context.invoked_subcommand is not None:
        return None
    chosen = _numbers("--sizes", sizes)
    measure = partial(lab.ladder, _names(rungs), chosen, dtype, threads, seconds, device=device)
    return partial(_report, "ladder", measure, json, html, no_html, store, lab.registry(device))


@ladder_app.command(
    epilog="""\b
    Examples:
      gemmery ladder diff simt_smem simt_threadtile"""
)
def diff(
    old: Annotated[str, argument(metavar="OLD", help="A rung.", show_default=False)],
    new: Annotated[str, argument(metavar="NEW", help="Another one.", show_default=False)],
    html: Annotated[Path | None, option(metavar="PATH", help="Write a page there, too.", show_default=False)] = None,
) -> Action:
    """Show what changed between two rungs: what is said of them, and the difference of their sources."""
    return partial(_diff, old, new, html)


@app.command(
    epilog="""\b
    Examples:
      gemmery bench
      gemmery bench square_f32 skinny --threads 1
      gemmery bench my_suite.toml --rivals numpy --no-store
      gemmery bench gpu_square gpu_gemv
      gemmery bench --workload chain --n 4096 --repeats 20"""
)
def bench(
    suites: Suites = None,
    rivals: Rivals = "",
    threads: SuiteThreads = 0,
    seconds: Budget = 3.0,
    device: SuiteDevice = "",
    workload: Workload = "",
    n: Ns = "",
    repeats: Repeats = 10,
    dtype: DType = "f32",
    store: Store = None,
    no_store: NoStore = False,
    json: Json = False,
    html: Html = None,
    no_html: NoHtml = False,
) -> Action:
    """Time gemmery's product and the rival libraries in turn on suites of problems, and keep the records."""
    from gemmery import lab
    from gemmery.lab.suites import results_folder

    folder = None if no_store else store or results_folder()
    if workload:
        if workload != "chain" or suites:
            raise ArgumentError(f"--workload {workload}: the one there is, chain, runs without suites")
        sizes = _numbers("--n", n) or (2048, 4096)
        chain = partial(lab.chain, sizes, repeats, dtype, device or "cuda", seconds, folder)
        return partial(_report, "chain", chain, json, html, no_html)
    measure = partial(lab.bench, suites or (), _names(rivals), threads, seconds, folder, device=device)
    return partial(_report, "bench", measure, json, html, no_html)


@app.command(
    epilog="""\b
    Examples:
      gemmery sweep size --rungs simd_row,packed
      gemmery sweep block --n 2048
      gemmery sweep size --device cuda --dtype f16
      gemmery sweep threads --n 8192
      gemmery sweep gemv --dtype f16"""
)
def sweep(
    experiment: Experiment,
    n: Side = None,
    sizes: SweptSizes = "",
    rungs: Rungs = "",
    dtype: DType = "f32",
    threads: Threads = 0,
    seconds: Seconds = 5.0,
    device: SweptOn = "",
    store: Keep = None,
    json: Json = False,
    html: Html = None,
    no_html: NoHtml = False,
) -> Action:
    """Vary one quantity, hold the others, and draw the curve with the machine's limits marked."""
    from gemmery import lab
    from gemmery.ladder.cpu import CPU
    from gemmery.ladder.cuda import CUDA

    if n is not None and sizes:
        raise ArgumentError(f"--n {n} --sizes {sizes}: say one of them; --n is for an experiment at one size")
    if n is not None and experiment not in lab.AT_ONE_SIZE:
        having = ", ".join(lab.AT_ONE_SIZE)
        raise ArgumentError(f"--n {n}: it is the one size of {having}; say --sizes {n} for `sweep {experiment}`")
    chosen = (n,) if n is not None else _numbers("--sizes", sizes)
    measure = partial(lab.sweep, experiment, _names(rungs), chosen, dtype, threads, seconds, device=device)
    return partial(_report, f"sweep-{experiment}", measure, json, html, no_html, store, (*CPU, *CUDA))


@app.command(
    epilog="""\b
    Examples:
      gemmery inspect simt_naive
      gemmery inspect simt_smem --n 2048 --config tile=16 --device sm_80
      gemmery inspect mma_pipelined --dtype bf16 --device h200 --sass"""
)
def inspect(
    rung: Annotated[str, argument(metavar="RUNG", help="A rung of the GPU.", show_default=False)],
    m: Annotated[int, option(metavar="M", min=0, help="Rows of C.", show_default="n")] = 0,
    n: Annotated[int, option(metavar="N", min=0, help="Columns of C.", show_default="4096")] = 0,
    k: Annotated[int, option(metavar="K", min=0, help="Columns of A.", show_default="n")] = 0,
    dtype: Annotated[str, option(metavar="TYPE", help="f32, f64, f16, bf16, tf32.", show_default="its first")] = "",
    config: Annotated[str, option(metavar="KEY=V,...", help="Instead of the rung's own.", show_default="its own")] = "",
    device: Annotated[
        str, option(metavar="NAME", help="cuda, a card (a100) or sm_80.", show_default="the one here, else h200")
    ] = "",
    ptx: Annotated[bool, option("--ptx", help="Show the PTX.")] = False,
    sass: Annotated[bool, option("--sass", help="Show the machine code.")] = False,
    json: Json = False,
    html: Annotated[Path | None, option(metavar="PATH", help="Write a page there, too.", show_default=False)] = None,
) -> Action:
    """Say what a GPU rung is made of and what it asks of a device, without running it: no GPU is needed."""
    from gemmery import lab

    look = partial(lab.inspect, rung, m, n, k, dtype, _settings(config), device)
    return partial(_inspect, look, ptx, sass, json, html)


def _inspect(look: Callable[[], Inspection], ptx: bool, sass: bool, json: bool, html: Path | None) -> int:
    from gemmery import report
    from gemmery.cuda.inspection import without_code
    from gemmery.report.inspection import inspection_page

    found = look()
    if json:
        sys.stdout.write(f"{report.as_json(without_code(found, ptx, sass))}\n")
    else:
        report.show_inspection(found, _console(), ptx, sass)
    if html is not None:
        (sys.stderr if json else sys.stdout).write(f"page: {_write_page(html, inspection_page(found))}\n")
    return 0


@app.command(
    epilog="""\b
    Examples:
      gemmery exhibit
      gemmery exhibit bank_stride
      gemmery exhibit reduce_strided --json"""
)
def exhibit(
    name: Annotated[str, argument(metavar="[NAME]", help="An exhibit.", show_default="list them")] = "",
    device: Annotated[str, option(metavar="NAME", help="The GPU: cuda, or cuda:N.")] = "cuda",
    seconds: Annotated[float, option(metavar="S", help="Seconds spent on one config.")] = 0.3,
    store: Keep = None,
    json: Json = False,
) -> Action:
    """Show one effect of the hardware by a kernel of its own: predicted without a GPU, measured with one."""
    return partial(_exhibit, name, device, seconds, store, json)


def _exhibit(name: str, device: str, seconds: float, store: Path | None, json: bool) -> int:
    from gemmery import lab, report
    from gemmery.cuda import driver, nvrtc
    from gemmery.ladder.exhibits import EXHIBITS, find

    if not name:
        report.list_exhibits(EXHIBITS, _console())
        return 0
    shown, missing = find(name), driver.missing()
    run = None if missing and not json else lab.exhibit(name, device, seconds, store=store)
    if run is not None and json:
        sys.stdout.write(f"{report.as_json(run)}\n")
    else:
        source = nvrtc.text(Path(shown.source).name)
        report.show_exhibit(shown, source, lab.predicted(shown), run, missing, _console())
    return _judged(run) if run is not None else 0


@app.command(
    epilog="""\b
    Examples:
      gemmery doctor
      gemmery doctor --json"""
)
def doctor(json: Json = False) -> Action:
    """Say what was found on this machine, and what to do about anything that is wrong."""
    return partial(_doctor, json)


def _diff(old: str, new: str, html: Path | None) -> int:
    from gemmery import lab, report

    found = lab.diff(old, new)
    report.show_difference(found, _console())
    if html is not None:
        from gemmery.report.diff import difference_page

        sys.stdout.write(f"page: {_write_page(html, difference_page(found))}\n")
    return 0


def _doctor(json: bool) -> int:
    from gemmery import lab, report

    found = lab.doctor()
    if json:
        sys.stdout.write(f"{report.as_json(found)}\n")
    else:
        report.findings([(one.name, one.value, one.ok, one.advice) for one in found], _console())
    return 0 if all(one.ok for one in found) else 1


def _report(
    name: str,
    measure: Callable[[OnEvent], Run],
    json: bool,
    html: Path | None,
    no_html: bool,
    store: Path | None = None,
    rungs: Sequence[Rung] = (),
) -> int:
    """Measure with progress on stderr, then show the records as asked; 1 when a result is outside its bound.

    `rungs` are those that the records are of, () for the CPU's.
    """
    from gemmery import report
    from gemmery.bench import record
    from gemmery.ladder.cpu import CPU

    rungs = rungs or CPU
    page = None if no_html or (json and html is None) else _page_writer(name, html)
    with report.Progressing(rungs, Console(stderr=True)) as shown:
        run = measure(lambda event: shown.update(event.what, event.done, event.total, event.measurement))
    if store is not None:
        record.append(record.path(store, run.machine.name), run)
    if json:
        sys.stdout.write(f"{report.as_json(run)}\n")
    else:
        report.show(run, rungs, _console())
    if page is not None:
        path = page(run, rungs)
        (sys.stderr if json else sys.stdout).write(f"page: {path}\n")
    return _judged(run)


def _page_writer(name: str, path: Path | None) -> Callable[[Run, Sequence[Rung]], Path]:
    """What writes the page; asked for before anything is measured, so that what is missing is said then."""
    from gemmery.report.page import page

    def write(run: Run, rungs: Sequence[Rung]) -> Path:
        chosen = path or Path("out") / f"{name}-{run.started[:19].replace(':', '')}.html"
        return _write_page(chosen, page(run, rungs))

    return write


def _write_page(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"page {str(path)!r}: {error.strerror}; choose another place with --html") from error
    return path


def _judged(run: Run) -> int:
    """1, with a line for each, when a result is outside its error bound."""
    from gemmery.report import words

    wrong = [m for m in run.measurements if not words.passed(m)]
    for m in wrong:
        sys.stderr.write(f"gemmery: {m.kernel} is outside its error bound at {words.shape(m)}, {words.types(m)}\n")
    return 1 if wrong else 0


class _Console(Console):
    """A console that leaves a closed pipe to `main`."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console() -> Console:
    return _Console(highlight=False, soft_wrap=False)


def _names(text: str) -> tuple[str, ...]:
    """`a,b` as names; "" is none."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _settings(text: str) -> dict[str, int]:
    """`bm=128,bk=16` as whole numbers by name."""
    found = {}
    for part in _names(text):
        name, _, number = part.partition("=")
        if not number.removeprefix("-").isdecimal():
            raise ArgumentError(
                f"--config {text}: {part!r} sets no whole number; write them as in --config bm=128,bk=16"
            )
        found[name] = int(number)
    return found


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """`1,2` as whole numbers; "" is none."""
    names = _names(text)
    for name in names:
        if not name.isdecimal():
            raise ArgumentError(f"{option} {text}: {name!r} is no whole number; write them as in {option} 256,1024")
    return tuple(int(name) for name in names)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every error is one line on stderr.

    >>> run(["ladder", "--sizes", "0"])
    2
    """
    try:
        asked = app(list(arguments), prog_name="gemmery", standalone_mode=False)
        code = int(asked() if callable(asked) else asked or 0)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to be flushed at exit
        return 141
    except OSError as error:
        if error.filename is None:
            raise
        return _complain(f"{error.filename}: {error.strerror}; choose another place", 1)
    except GemmeryError as error:
        return _complain(str(error), 2 if isinstance(error, ArgumentError) else 1)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRA:
            raise
        return _complain(f"the commands need {library}: pip install 'gemmery[lab]'", 2)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        way_out = f"`{context.command_path if context else 'gemmery'} --help` shows what can be said"
        return _complain(f"{shlex.join(arguments)}: {error.format_message().rstrip('.')}; {way_out}", 2)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    return code


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"gemmery: {' '.join(message.split())}\n")
    return code


def main() -> None:
    """Run the command line of this process and exit."""
    sys.exit(run(sys.argv[1:]))
