"""The commands that measure: ladder, bench, sweep."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Option

from gemmery.errors import ArgumentError
from gemmery_emulator.pages.writing import place
from gemmery_lab.cli.app import (
    Action,
    As,
    ElementType,
    Html,
    Json,
    Keep,
    NoHtml,
    Rungs,
    Seconds,
    Threads,
    app,
    ladder_app,
    names,
    numbers,
    threads_in_words,
)
from gemmery_lab.cli.showing import Output, check_store, counted, measured
from gemmery_lab.experiments import BUILT_IN, CHAIN, LADDER, SWEEPS

if TYPE_CHECKING:
    from gemmery_lab.asked import DeviceChoice

SIZES = {
    (plan.name, device): ",".join(map(str, points.sizes)) for plan in BUILT_IN for device, points in plan.points.items()
}  # the defaults, as options take them
SWEPT_ON = {device: ", ".join(sweep.name for sweep in SWEEPS if device in sweep.devices) for device in ("cpu", "cuda")}

Sizes = Annotated[
    str,
    Option(
        metavar="N,M",
        help="Sides of the squares.",
        show_default="; ".join(
            f"{name}{SIZES[LADDER.name, device]}"
            for name, device in (("", "cpu"), ("GPU: ", "cuda"), ("emulator: ", "emulator"))
        ),
    ),
]
LadderDevice = Annotated[
    str, Option(metavar="NAME", help="cpu, cuda, cuda:N (Nth GPU), emulator, or a card to emulate.", show_default="cpu")
]
LadderDType = Annotated[
    str,
    Option(
        metavar="TYPE",
        help="Element type: f32 or float32, f64, f16, bf16, int8, ...; tf32 on a GPU.",
        show_default="f32",
    ),
]

Suites = Annotated[list[str] | None, Argument(metavar="SUITE", help="Names or paths of suites.", show_default="all")]
Rivals = Annotated[str, Option(metavar="A,B", help="Only these rivals.", show_default="the suites'")]
SuiteThreads = Annotated[int, Option(metavar="N", min=0, help="Number of threads.", show_default="the suites'")]
Budget = Annotated[float, Option(metavar="S", help="Seconds for one product, shared by all libraries.")]
SuiteDevice = Annotated[
    str, Option("--device", metavar="NAME", help="cpu, cuda or cuda:N.", show_default="the suites'")
]
Workload = Annotated[str, Option(metavar="NAME", help="chain: R = A (A + B) on a GPU, instead of suites.")]
WorkloadSides = Annotated[
    str, Option("--n", metavar="N,M", help="Sides of the workload's matrices.", show_default=SIZES[CHAIN.name, "cuda"])
]
Repeats = Annotated[int | None, Option(metavar="N", min=1, help="Steps of the workload.", show_default="10")]
WorkDType = Annotated[str, Option("--dtype", metavar="TYPE", help="Element type of the workload.", show_default="f32")]
BenchStore = Annotated[
    Path | None,
    Option(metavar="DIR", help="Append records to a file there.", show_default="your data folder", callback=place),
]
NoStore = Annotated[bool, Option("--no-store", help="Keep no records.")]

SweepName = Annotated[
    str,
    Argument(
        metavar="EXPERIMENT",
        help=f"{SWEPT_ON['cpu']} (CPU); {SWEPT_ON['cuda']} (GPU).",
        show_default=False,
    ),
]
SweepSide = Annotated[
    int | None,
    Option("--n", metavar="N", min=1, help="The size at which a config is varied.", show_default="the experiment's"),
]
SweptSizes = Annotated[str, Option(metavar="N,M", help="Sizes to vary.", show_default="the experiment's")]
SweptOn = Annotated[
    str,
    Option("--device", metavar="NAME", help="cpu, cuda, cuda:N, emulator, or a card.", show_default="the experiment's"),
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
    device: LadderDevice = "",
    card: As = "",
    store: Keep = None,
    json: Json = False,
    html: Html = None,
    no_html: NoHtml = False,
) -> Action | None:
    """Check and time every rung next to NumPy or cuBLAS, and show what each step gains.

    The emulator needs no GPU. It counts instructions and memory accesses instead of measuring times, and takes the
    place of a GPU where there is none.
    """
    from gemmery_lab import asked

    if context.invoked_subcommand is not None:
        _nothing_before(context)
        return None
    where = asked.place(device or ("emulator" if card else "cpu"), card)
    reason = _emulated_for(context, where)
    lengths, kind = numbers("--sizes", sizes), where.kind if reason is None else "emulator"
    from gemmery_lab.climb import Conditions, expected, meant, planned

    type_ = dtype or ("" if kind == "emulator" else "f32")
    plan = planned(LADDER, names(rungs), lengths, type_, Conditions(str(where), threads, seconds), kind)
    output = Output(json, html, no_html)
    import gemmery_lab as lab

    lengths = plan.sizes if lengths else ()
    if kind == "emulator":
        from gemmery.cuda.pipes import predictable

        emulated_as = where.card or asked.EMULATED_AS
        count = partial(lab.emulated_ladder, names(rungs), lengths, plan.dtype, emulated_as)
        predict = partial(lab.predicted_ladder, sizes=lengths, dtype=plan.dtype, card=emulated_as)
        duration = expected(plan, larger=not lengths)
        known = predict if emulated_as in predictable() else None
        return partial(counted, count, emulated_as, reason or "", output, duration, known)
    measure = partial(lab.ladder, names(rungs), lengths, plan.dtype, threads, seconds, device=str(where), store=store)
    check_store(store)
    special = sum(meant(rung, plan.dtype) is not None for rung, _ in plan.variants) if kind == "cpu" else 0
    duration = expected(plan, special) + threads_in_words(threads)
    return partial(measured, LADDER.name, measure, output, asked.registry(kind), store, duration)


def _emulated_for(context: Context, where: DeviceChoice) -> str | None:
    """Why the ladder runs on the emulator: "" when it was asked for, or what CUDA lacks; None when it does not.

    Raises ArgumentError for options that have no meaning there.
    """
    if where.kind == "emulator":
        _emulator_only_counts(context)
        return ""
    if where.kind == "cuda":
        from gemmery.cuda import driver

        return None if _is_given(context, "store") else driver.missing() or None
    return None


def _emulator_only_counts(context: Context) -> None:
    """Raise ArgumentError for options that have no meaning on the emulator."""
    for option in ("seconds", "store"):
        if _is_given(context, option):
            raise ArgumentError(f"--{option}: the emulator measures no times; leave it out")


def _is_given(context: Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _nothing_before(context: Context) -> None:
    for name in context.params:
        if _is_given(context, name):
            option = "--as" if name == "card" else f"--{name.replace('_', '-')}"
            raise ArgumentError(f"{option}: `ladder {context.invoked_subcommand}` runs no rungs; leave it out")


@app.command(
    short_help="Time suites of products against other libraries.",
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
    n: WorkloadSides = "",
    repeats: Repeats = None,
    dtype: WorkDType = "",
    store: BenchStore = None,
    no_store: NoStore = False,
    json: Json = False,
    html: Html = None,
    no_html: NoHtml = False,
) -> Action:
    """Time gemmery's product and rival libraries in turn on suites of problems, and keep the records."""
    from gemmery_lab import asked
    from gemmery_lab.measure import record

    asked.budget(seconds)
    if no_store and store is not None:
        raise ArgumentError(f"--store {store} --no-store: give one of them")
    if device:
        asked.ordinal(device)
    if workload:
        if workload != CHAIN.name:
            raise ArgumentError(f"workload {workload!r} is not known; the only one is {CHAIN.name}")
        if suites or rivals or threads:
            raise ArgumentError("--workload chain: it takes no suites, --rivals or --threads; leave them out")
        sides = asked.sides(numbers("--n", n) or CHAIN.points["cuda"].sizes)
        dtype = asked.element_type(dtype or CHAIN.dtype, "cuda")
    else:
        for option, value in (("--n", n), ("--repeats", repeats), ("--dtype", dtype)):
            if value:
                raise ArgumentError(f"{option} {value}: suites set it themselves; the option is for --workload chain")
        loaded = asked.suites(suites or (), names(rivals), device)
    output = Output(json, html, no_html)
    import gemmery_lab as lab
    from gemmery_lab.suites import expected

    folder = check_store(None if no_store else store or record.results_folder())
    if workload:
        chain = partial(lab.chain, sides, repeats or 10, dtype, device or "cuda", seconds, folder)
        return partial(measured, CHAIN.name, chain, output, store=folder)
    measure = partial(lab.bench, suites or (), names(rivals), threads, seconds, folder, device=device)
    duration = expected(loaded, threads, seconds) + threads_in_words(threads)
    return partial(measured, "bench", measure, output, store=folder, expected=duration)


@app.command(
    short_help="Vary one quantity and draw the curve.",
    epilog="""\b
    Examples:
      gemmery sweep size --rungs simd_row,packed
      gemmery sweep block --n 2048
      gemmery sweep size --device cuda --dtype f16
      gemmery sweep threads --n 8192
      gemmery sweep tile --device emulator --as a100
      gemmery sweep gemv --dtype f16""",
)
def sweep(
    context: Context,
    experiment: SweepName,
    n: SweepSide = None,
    sizes: SweptSizes = "",
    rungs: Rungs = "",
    dtype: ElementType = "f32",
    threads: Threads = 0,
    seconds: Seconds = 5.0,
    device: SweptOn = "",
    card: As = "",
    store: Keep = None,
    json: Json = False,
    html: Html = None,
    no_html: NoHtml = False,
) -> Action:
    """Vary one quantity, keep the others fixed, and draw the curve with the machine's limits.

    Sweeps of a GPU rung's config also run on the emulator, which counts accesses instead of measuring times.
    """
    import gemmery_lab as lab
    from gemmery_lab import asked, experiments
    from gemmery_lab.climb import Conditions, expected, planned

    varied = experiments.sweep(experiment)
    if n is not None and sizes:
        raise ArgumentError(f"--n {n} --sizes {sizes}: give one of them; --n is for an experiment at one size")
    if n is not None and not varied.axis.key:
        having = ", ".join(sweep.name for sweep in SWEEPS if sweep.axis.key)
        raise ArgumentError(f"--n {n}: only {having} run at one size; give --sizes {n} for `sweep {experiment}`")
    lengths = (n,) if n is not None else numbers("--sizes", sizes)
    where = asked.place(device or "emulator", card) if device or card else None
    emulated = where is not None and where.kind == "emulator"
    how = Conditions(str(where) if emulated else device, threads, seconds)
    if emulated:
        _emulator_only_counts(context)
    plan = planned(varied, names(rungs), lengths, dtype, how, "emulator" if emulated else "")
    check_store(store)
    output = Output(json, html, no_html)
    if emulated:
        count = partial(lab.emulated_sweep, experiment, names(rungs), lengths, dtype, how.device)
        return partial(counted, count, how.device, "", output)
    measure = partial(lab.sweep, experiment, names(rungs), lengths, dtype, threads, seconds, device=device, store=store)
    every = (*asked.registry("cpu"), *asked.registry("cuda"))
    duration = expected(plan) + threads_in_words(threads)
    return partial(measured, f"sweep-{experiment}", measure, output, every, store, duration)
