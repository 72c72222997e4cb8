"""The commands that measure: ladder, bench, sweep, exhibit."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Argument, Context, Option

from gemmery.cli.app import Action, app, ladder_app
from gemmery.cli.options import DType, Html, Json, Keep, NoHtml, Rungs, Seconds, Threads, names, numbers, place
from gemmery.cli.showing import console, counted, judged, measured
from gemmery.cuda.device import KNOWN
from gemmery.errors import ArgumentError

if TYPE_CHECKING:
    from gemmery.ladder.exhibits import Exhibit

Sizes = Annotated[
    str,
    Option(
        metavar="N,M", help="Sides of the squares.", show_default="512,1024,2048; on a GPU twice that, emulated 256"
    ),
]
Device = Annotated[str, Option(metavar="NAME", help="cpu, cuda, cuda:N for the Nth GPU, or emulator.")]
LadderDType = Annotated[
    str, Option(metavar="TYPE", help="Element type: f32, f64, f16, bf16, i8, ...; tf32 on a GPU.", show_default="f32")
]
As = Annotated[
    str,
    Option("--as", metavar="CARD", help=f"What the emulator runs as: {', '.join(KNOWN)}.", show_default="h200"),
]

Suites = Annotated[list[str] | None, Argument(metavar="SUITE", help="Names or paths of suites.", show_default="all")]
Rivals = Annotated[str, Option(metavar="A,B", help="Only these rivals.", show_default="every one")]
SuiteThreads = Annotated[int, Option(metavar="N", min=0, help="Threads instead of the suite's.", show_default="keep")]
Budget = Annotated[float, Option(metavar="S", help="Seconds spent on one product by all who run it.")]
SuiteDevice = Annotated[
    str, Option("--device", metavar="NAME", help="cpu, cuda or cuda:N.", show_default="the suites'")
]
Workload = Annotated[str, Option(metavar="NAME", help="chain: R = A (A + B) on a GPU, in place of suites.")]
Sides = Annotated[str, Option("--n", metavar="N,M", help="The sides of a workload.", show_default="2048,4096")]
Repeats = Annotated[int | None, Option(metavar="N", min=1, help="Steps of a workload.", show_default="10")]
WorkDType = Annotated[str, Option("--dtype", metavar="TYPE", help="Element type of a workload.", show_default="f32")]
Store = Annotated[
    Path | None,
    Option(metavar="DIR", help="Append records to a file there.", show_default="your data folder", callback=place),
]
NoStore = Annotated[bool, Option("--no-store", help="Keep no records.")]

Experiment = Annotated[
    str,
    Argument(
        metavar="EXPERIMENT",
        help="size, block (CPU); threads, tile, stages, gemv (against N), gemv_k (GPU).",
        show_default=False,
    ),
]
Side = Annotated[int | None, Option("--n", metavar="N", min=1, help="The one size.", show_default="the experiment's")]
SweptSizes = Annotated[str, Option(metavar="N,M", help="The sizes that are varied.", show_default="the experiment's")]
SweptOn = Annotated[
    str, Option("--device", metavar="NAME", help="cpu, cuda, or cuda:N.", show_default="the experiment's")
]


@ladder_app.callback(
    invoke_without_command=True,
    epilog="""\b
    Examples:
      gemmery ladder
      gemmery ladder --sizes 256,1024 --rungs simd_row,packed
      gemmery ladder --dtype f64 --html f64.html
      gemmery ladder --device cuda --dtype f16
      gemmery ladder --device emulator --as rtx3090
      gemmery ladder --json > ladder.json
      gemmery ladder diff simd_row simd_blocked""",
)
def ladder(
    context: Context,
    rungs: Rungs = "",
    sizes: Sizes = "",
    dtype: LadderDType = "",
    threads: Threads = 0,
    seconds: Seconds = 5.0,
    device: Device = "cpu",
    card: As = "",
    store: Keep = None,
    json: Json = False,
    html: Html = None,
    no_html: NoHtml = False,
) -> Action | None:
    """Run every rung, check it, time it beside NumPy or cuBLAS, and show what each idea bought.

    On the emulator, which needs no GPU and stands in where there is none, rungs are counted instead of timed.
    """
    from gemmery import lab

    if context.invoked_subcommand is not None:
        _nothing_before(context)
        return None
    chosen = numbers("--sizes", sizes)
    reason = _emulated_for(context, device, card, dtype)
    if reason is not None:
        count = partial(lab.emulated_ladder, names(rungs), chosen, dtype, card)
        return partial(counted, count, reason, json, html, no_html)
    measure = partial(lab.ladder, names(rungs), chosen, dtype or "f32", threads, seconds, device=device, store=store)
    return partial(measured, "ladder", measure, json, html, no_html, lab.registry(device), store)


def _emulated_for(context: Context, device: str, card: str, dtype: str) -> str | None:
    """Why the emulator climbs: "" when it was asked to, or what CUDA lacks; None when it does not.

    Raises ArgumentError for options that have no meaning there.
    """
    from gemmery import lab
    from gemmery.cuda import driver

    emulator = device == "emulator"
    if card and not emulator:
        raise ArgumentError(f"--as {card}: it is for the emulator; say --device emulator too")
    if emulator:
        for option in ("threads", "seconds", "store"):
            if _said(context, option):
                raise ArgumentError(f"--{option}: the emulator counts, and takes no times; leave it out")
        lab.emulated_card(card)
        return ""
    if lab.on_gpu(device):
        lab.check_of_gpu(dtype or "f32", context.params["threads"], device)
        return None if _said(context, "store") else driver.missing() or None
    return None


def _said(context: Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _nothing_before(context: Context) -> None:
    for name in context.params:
        if _said(context, name):
            option = "--as" if name == "card" else f"--{name.replace('_', '-')}"
            raise ArgumentError(f"{option}: `ladder {context.invoked_subcommand}` runs nothing; leave it out")


@app.command(
    short_help="Time suites of products beside other libraries.",
    epilog="""\b
    Examples:
      gemmery bench
      gemmery bench square_f32 skinny --threads 1
      gemmery bench my_suite.toml --rivals numpy --no-store
      gemmery bench gpu_square gpu_gemv
      gemmery bench --workload chain --n 4096 --repeats 20""",
)
def bench(
    suites: Suites = None,
    rivals: Rivals = "",
    threads: SuiteThreads = 0,
    seconds: Budget = 3.0,
    device: SuiteDevice = "",
    workload: Workload = "",
    n: Sides = "",
    repeats: Repeats = None,
    dtype: WorkDType = "",
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
        if workload != "chain" or suites or rivals or threads:
            raise ArgumentError(
                f"--workload {workload}: the one there is, chain, runs without suites, --rivals and --threads"
            )
        sides = numbers("--n", n) or (2048, 4096)
        chain = partial(lab.chain, sides, repeats or 10, dtype or "f32", device or "cuda", seconds, folder)
        return partial(measured, "chain", chain, json, html, no_html, store=folder)
    for option, value in (("--n", n), ("--repeats", repeats), ("--dtype", dtype)):
        if value:
            raise ArgumentError(f"{option} {value}: a suite says that itself; the option is for --workload chain")
    measure = partial(lab.bench, suites or (), names(rivals), threads, seconds, folder, device=device)
    return partial(measured, "bench", measure, json, html, no_html, store=folder)


@app.command(
    short_help="Vary one quantity, and draw the curve.",
    epilog="""\b
    Examples:
      gemmery sweep size --rungs simd_row,packed
      gemmery sweep block --n 2048
      gemmery sweep size --device cuda --dtype f16
      gemmery sweep threads --n 8192
      gemmery sweep gemv --dtype f16""",
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
    chosen = (n,) if n is not None else numbers("--sizes", sizes)
    measure = partial(lab.sweep, experiment, names(rungs), chosen, dtype, threads, seconds, device=device, store=store)
    return partial(measured, f"sweep-{experiment}", measure, json, html, no_html, (*CPU, *CUDA), store)


@app.command(
    short_help="Show one effect of a GPU's hardware.",
    epilog="""\b
    Examples:
      gemmery exhibit
      gemmery exhibit bank_stride
      gemmery exhibit reduce_strided --json""",
)
def exhibit(
    name: Annotated[str, Argument(metavar="NAME", help="An exhibit.", show_default="list them")] = "",
    device: Annotated[str, Option(metavar="NAME", help="The GPU: cuda, or cuda:N.")] = "cuda",
    seconds: Annotated[float, Option(metavar="S", help="Seconds spent on one config.")] = 0.3,
    store: Keep = None,
    json: Json = False,
) -> Action:
    """Show one effect of the hardware by a kernel of its own: predicted, and measured on a GPU or else emulated."""
    return partial(_exhibit, name, device, seconds, store, json)


def _exhibit(name: str, device: str, seconds: float, store: Path | None, json: bool) -> int:
    from gemmery import lab, report
    from gemmery.cuda import driver, nvrtc
    from gemmery.ladder.exhibits import EXHIBITS, find

    lab.exhibited_on(device, seconds)
    if not name:
        report.list_exhibits(EXHIBITS, console())
        return 0
    shown, missing = find(name), driver.missing()
    source = nvrtc.text(Path(shown.source).name)
    if missing and store is None:
        return _exhibit_emulated(shown, source, missing, json)
    run = lab.exhibit(name, device, seconds, store=store)
    if json:
        sys.stdout.write(f"{report.as_json(run)}\n")
    else:
        report.show_exhibit(shown, source, lab.predicted(shown), run, console())
    return judged(run)


def _exhibit_emulated(shown: Exhibit, source: str, missing: str, json: bool) -> int:
    """What the emulator counts in the place of a GPU, which is announced; 1 when it is not what was predicted."""
    from gemmery import lab, report

    sys.stderr.write(
        f"gemmery: no CUDA device ({missing}): on the emulator instead, which counts, and takes no times\n"
    )
    with report.Exhibiting(Console(stderr=True)) as progress:
        emulated = lab.emulated_exhibit(shown.name, on_config=progress.update)
    if json:
        sys.stdout.write(f"{report.as_json(emulated)}\n")
    else:
        report.show_emulated_exhibit(shown, source, emulated, console())
    wrong = [f"gemmery: {shown.name} at {one.config} {line}\n" for one in emulated for line in one.wrong]
    sys.stderr.writelines(wrong)
    return 1 if wrong else 0
