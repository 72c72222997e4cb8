"""The commands that measure: ladder, bench, sweep, exhibit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Option

from gemmery.cli.app import (
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
from gemmery.cli.showing import Output, check_store, counted, measured
from gemmery.errors import ArgumentError
from gemmery.experiments import BUILT_IN, CHAIN, LADDER, SWEEPS
from gemmery.pages.writing import place

if TYPE_CHECKING:
    from gemmery.lab.asked import DeviceChoice

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
    from gemmery.lab import asked

    if context.invoked_subcommand is not None:
        _nothing_before(context)
        return None
    where = asked.place(device or ("emulator" if card else "cpu"), card)
    lengths, selected = asked.sides(numbers("--sizes", sizes)), asked.rungs(names(rungs), where.kind)
    dtype = asked.element_type(dtype, where.kind) if dtype else ""
    asked.limit(seconds)
    if where.kind != "cpu":
        asked.no_threads(threads, str(where))
    reason = _emulated_for(context, where)
    output = Output(json, html, no_html)
    from gemmery import lab
    from gemmery.lab.climb import expected, meant

    if reason is not None:
        from gemmery.cuda.pipes import predictable
        from gemmery.lab.emulated_rungs import MOST

        emulated_as = where.card or asked.EMULATED_AS
        duration = expected(len(selected), lengths, "emulator")
        count = partial(lab.emulated_ladder, names(rungs), asked.sides(lengths, MOST), dtype, emulated_as)
        predict = None
        if emulated_as in predictable():
            predict = partial(lab.predicted_ladder, sizes=lengths, dtype=dtype, card=emulated_as)
        return partial(counted, count, emulated_as, reason, output, duration, predict)
    measure = partial(
        lab.ladder, names(rungs), lengths, dtype or "f32", threads, seconds, device=str(where), store=store
    )
    check_store(store)
    special = sum(meant(rung, dtype or "f32") is not None for rung in selected) if where.kind == "cpu" else 0
    duration = f"{expected(len(selected), lengths, where.kind, special)}{threads_in_words(threads)}"
    return partial(measured, LADDER.name, measure, output, asked.registry(where.kind), store, duration)


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
    from gemmery.bench import suite
    from gemmery.lab import asked

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
        loaded = [suite.load(suite.find(name)) for name in suites or ()]
        for rival in names(rivals):
            asked.rival(rival, device or (loaded[0].device if loaded else "cpu"))
    output = Output(json, html, no_html)
    from gemmery import lab
    from gemmery.lab.suites import expected, results_folder

    folder = check_store(None if no_store else store or results_folder())
    if workload:
        chain = partial(lab.chain, sides, repeats or 10, dtype, device or "cuda", seconds, folder)
        return partial(measured, CHAIN.name, chain, output, store=folder)
    measure = partial(lab.bench, suites or (), names(rivals), threads, seconds, folder, device=device)
    every = (suite.load(suite.find(name)) for name in suite.names())
    kind = asked.place(device or "cpu").kind
    duration = expected(loaded or [candidate for candidate in every if candidate.device == kind], threads, seconds)
    duration += threads_in_words(threads)
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
    from gemmery import lab
    from gemmery.lab import asked
    from gemmery.lab.climb import MOST_EMULATED, Conditions, countable, expected, planned

    if n is not None and sizes:
        raise ArgumentError(f"--n {n} --sizes {sizes}: give one of them; --n is for an experiment at one size")
    at_one_size = [sweep.name for sweep in SWEEPS if sweep.axis.key]
    if n is not None and experiment not in at_one_size:
        having = ", ".join(at_one_size)
        raise ArgumentError(f"--n {n}: only {having} run at one size; give --sizes {n} for `sweep {experiment}`")
    lengths = (n,) if n is not None else numbers("--sizes", sizes)
    if card or (device and asked.place(device).kind == "emulator"):
        _emulator_only_counts(context)
        asked.no_threads(threads, "the emulator")
        emulated_as, output = asked.place(device or "emulator", card).card, Output(json, html, no_html)
        countable(experiment)
        count = partial(
            lab.emulated_sweep, experiment, names(rungs), asked.sides(lengths, MOST_EMULATED), dtype, emulated_as
        )
        return partial(counted, count, emulated_as, "", output)
    plan = planned(experiment, names(rungs), lengths, dtype, Conditions(device, threads, seconds))
    check_store(store)
    output = Output(json, html, no_html)
    measure = partial(lab.sweep, experiment, names(rungs), lengths, dtype, threads, seconds, device=device, store=store)
    duration = expected(len(plan.variants), plan.sizes, plan.kind) + threads_in_words(threads)
    every = (*asked.registry("cpu"), *asked.registry("cuda"))
    return partial(measured, f"sweep-{experiment}", measure, output, every, store, duration)


@app.command(
    short_help="Show one effect of GPU hardware.",
    epilog="""\b
    Examples:
      gemmery exhibit
      gemmery exhibit bank_stride
      gemmery exhibit bank_stride --device emulator --as a100
      gemmery exhibit reduce_strided --json""",
)
def exhibit(
    name: Annotated[str, Argument(metavar="NAME", help="An exhibit.", show_default="list them")] = "",
    device: Annotated[
        str, Option(metavar="NAME", help="cuda, cuda:N, emulator, or a card to emulate.", show_default="cuda")
    ] = "",
    card: As = "",
    seconds: Annotated[float, Option(metavar="S", help="Seconds for each config.")] = 0.3,
    store: Keep = None,
    json: Json = False,
    html: Annotated[
        Path | None,
        Option("--html", metavar="PATH", help="Also write a page there.", show_default=False, callback=place),
    ] = None,
) -> Action:
    """Show one effect of the hardware with a small kernel.

    Counts are predicted, then measured on a GPU or counted on the emulator.
    """
    from gemmery.cli.exhibiting import listed, on_emulator, on_gpu
    from gemmery.lab import asked
    from gemmery.ladder.exhibits import find

    where = asked.place(device or ("emulator" if card else "cuda"), card)
    asked.budget(seconds)
    if where.kind == "cpu":
        raise ArgumentError("--device cpu: exhibits run on a GPU: use cuda, cuda:N, or emulator")
    if where.kind == "emulator" and store is not None:
        raise ArgumentError("--store: the emulator measures no times; leave it out")
    if not name:
        if html is not None:
            raise ArgumentError(f"--html {html}: name an exhibit; the list has no page")
        return partial(listed, json)
    selected, output = find(name), Output(json, html, html is None)
    check_store(store)
    missing = ""
    if where.kind == "cuda":
        from gemmery.cuda import driver

        missing = driver.missing()
    if where.kind == "emulator" or (missing and store is None):
        return partial(on_emulator, selected, where.card or asked.EMULATED_AS, missing, output)
    return partial(on_gpu, selected, str(where), seconds, store, output)
