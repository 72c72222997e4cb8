"""The commands that measure or count: ladder, bench, sweep, exhibit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Context

import gemmery_lab as lab
from gemmery.errors import ArgumentError
from gemmery_emulator.pages.writing import HtmlToo, place
from gemmery_lab import asked, experiments
from gemmery_lab.cli import parser
from gemmery_lab.cli.parser import Action, As, Html, Json, Keep, NoHtml, app, argument, ladder_app, option, texts
from gemmery_lab.experiments import CHAIN, DISTRIBUTED, LADDER, SWEEPS

if TYPE_CHECKING:
    from gemmery.ladder.exhibits import Exhibit
    from gemmery_lab.measure.record import OnStep
    from gemmery_lab.rung_counts import EmulatedLadder, EmulatedRung, PredictedRung

SIZES = {device: ",".join(map(str, points.sizes)) for device, points in LADDER.points.items()}  # the defaults
SWEPT_ON = {device: ", ".join(sweep.name for sweep in SWEEPS if device in sweep.devices) for device in ("cpu", "cuda")}


@ladder_app.callback(invoke_without_command=True, **texts("ladder"))
def ladder(
    context: Context,
    rungs: Annotated[str, option("rungs")] = "",
    sizes: Annotated[
        str, option("sizes", show_default="{cpu}; GPU: {cuda}; emulator: {emulator}".format(**SIZES))
    ] = "",
    dtype: Annotated[str, option("ladder.dtype")] = "",
    threads: Annotated[int, option("threads", min=0)] = 0,
    seconds: Annotated[float, option("seconds")] = 5.0,
    device: Annotated[str, option("ladder.device")] = "",
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
    for name in _on_command_line(context) if context.invoked_subcommand else ():
        flag = "--as" if name == "card" else f"--{name.replace('_', '-')}"
        raise ArgumentError(f"{flag}: `ladder {context.invoked_subcommand}` runs no rungs; leave it out")
    if context.invoked_subcommand:
        return None
    where, reason = asked.place(device or ("emulator" if card else "cpu"), card), None
    if where.kind == "emulator":
        _check_counting(context)
        reason = ""
    elif where.kind == "cuda" and "store" not in _on_command_line(context):
        from gemmery.cuda import driver

        reason = driver.missing() or None
    rung_names = parser.names(rungs)
    lengths, kind = parser.numbers("--sizes", sizes), where.kind if reason is None else "emulator"
    from gemmery_lab.climb import expected, meant, planned

    type_ = dtype or ("" if kind == "emulator" else "f32")
    plan = planned(LADDER, rung_names, lengths, type_, str(where), threads, seconds, kind)
    output = parser.Output(json, html, no_html)
    lengths = plan.sizes if lengths else ()
    if kind == "emulator":
        from gemmery.cpu.target import cores
        from gemmery.cuda.pipes import predictable

        emulated_as = where.card or asked.EMULATED_AS
        count = partial(lab.emulated_ladder, rung_names, lengths, plan.dtype, emulated_as)
        processes = min(4, cores(), len(plan.variants) // 4)  # each loads the emulator, as long as 4 predictions take
        predict = partial(lab.predicted_ladder, rung_names, (), plan.dtype, emulated_as, processes=processes)
        duration = expected(plan, larger=True)
        known = predict if emulated_as in predictable() else None
        return partial(counted, count, emulated_as, reason or "", output, duration, known)
    measure = partial(lab.ladder, rung_names, lengths, plan.dtype, threads, seconds, device=str(where), store=store)
    parser.check_store(store)
    special = sum(meant(rung, plan.dtype) is not None for rung, _ in plan.variants) if kind == "cpu" else 0
    duration = expected(plan, special) + parser.threads_in_words(threads)
    return partial(parser.measured, LADDER.name, measure, output, asked.registry(kind), store, duration)


def _on_command_line(context: Context) -> list[str]:
    """The parameters that the command line names."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def _check_counting(context: Context) -> None:
    """Raise ArgumentError for options that have no meaning on the emulator."""
    for name in ("seconds", "store"):
        if name in _on_command_line(context):
            raise ArgumentError(f"--{name}: the emulator measures no times; leave it out")


def counted(
    count: Callable[[OnStep[EmulatedRung]], EmulatedLadder],
    card: str,
    instead_of: str,
    output: parser.Output,
    expected: str = "",
    predict: Callable[..., tuple[PredictedRung, ...]] | None = None,
) -> int:
    """Run the ladder on the emulator and show it; 1 when something is wrong, 130 after Ctrl-C.

    `instead_of` is the reason why it does not run on a GPU, which is printed; "" when the emulator was asked for.
    `predict` predicts the times of the same rungs on large products.
    """
    from gemmery_lab.measure import record
    from gemmery_lab.report.emulated_tables import complaints, emulated_progress, show_emulated
    from gemmery_lab.rung_counts import EmulatedLadder

    partly = partial(EmulatedLadder, asked.emulated_card(card), record.now())

    def with_times(on_rung: OnStep[EmulatedRung]) -> EmulatedLadder:
        if predict is None:
            return count(on_rung)
        counted = threading.Event()  # before it rungs are counted, and only that is shown

        def tell(what: str, done: int, total: int, _: object) -> None:
            if counted.is_set():
                on_rung(f"predicting {what}", done, total, None)

        with ThreadPoolExecutor(1) as beside:  # which waits for processes
            times = beside.submit(predict, on_rung=tell)
            ladder = count(on_rung)
            counted.set()
            return replace(ladder, predicted=times.result())

    announce(instead_of, card)
    ladder, interrupted = parser.followed(with_times, emulated_progress, show_emulated, partly, output, expected)
    if output.has_page:
        from gemmery_lab.report.ladder_steps import step_pages
        from gemmery_lab.report.page import emulated_page

        output.write("emulated", ladder.started, emulated_page(ladder), step_pages(ladder))
    return parser.ended(interrupted, complaints(ladder))


def announce(absent: str, card: str) -> None:
    """Print that the emulator takes the place of a GPU, and why; nothing for "", where it was asked for."""
    if absent:
        instead = f"using the emulator as {card} instead, which counts instead of timing"
        sys.stderr.write(f"gemmery: no CUDA device ({absent}): {instead}\n")


@app.command(**texts("bench"))
def bench(
    suites: Annotated[list[str] | None, argument("bench.suites")] = None,
    rivals: Annotated[str, option("bench.rivals")] = "",
    threads: Annotated[int, option("bench.threads", min=0)] = 0,
    seconds: Annotated[float, option("bench.seconds")] = 3.0,
    device: Annotated[str, option("bench.device", "--device")] = "",
    workload: Annotated[str, option("bench.workload")] = "",
    n: Annotated[str, option("bench.n", "--n", show_default=",".join(map(str, CHAIN.points["cuda"].sizes)))] = "",
    repeats: Annotated[int | None, option("bench.repeats", min=1)] = None,
    dtype: Annotated[str, option("bench.dtype", "--dtype")] = "",
    store: Annotated[Path | None, option("bench.store", callback=place)] = None,
    no_store: Annotated[bool, option("bench.no_store", "--no-store")] = False,
    json: Json = False,
    html: Html = None,
    no_html: NoHtml = False,
) -> Action:
    """Time gemmery's product and rival libraries in turn on suites of problems, and keep the records."""
    from gemmery_lab.measure import record

    asked.budget(seconds)
    if no_store and store is not None:
        raise ArgumentError(f"--store {store} --no-store: give one of them")
    if device:
        asked.ordinal(device)
    if workload:
        if workload not in (CHAIN.name, DISTRIBUTED.name):
            raise ArgumentError(f"workload {workload!r} is not known; there are {CHAIN.name} and {DISTRIBUTED.name}")
        if suites or rivals or threads:
            raise ArgumentError(f"--workload {workload}: it takes no suites, --rivals or --threads; leave them out")
        known, kind = (CHAIN, "cuda") if workload == CHAIN.name else (DISTRIBUTED, "cpu")
        sides = asked.sides(parser.numbers("--n", n) or known.points[kind].sizes)
        dtype = asked.element_type(dtype or known.dtype, "cuda" if device.startswith("cuda") else kind)
    else:
        for flag, value in (("--n", n), ("--repeats", repeats), ("--dtype", dtype)):
            if value:
                raise ArgumentError(f"{flag} {value}: suites set it themselves; the option is for --workload chain")
        loaded = asked.suites(suites or (), parser.names(rivals), device)
    output = parser.Output(json, html, no_html)
    from gemmery_lab.suites import expected

    folder = parser.check_store(None if no_store else store or record.results_folder())
    if workload == DISTRIBUTED.name:
        return partial(_over_ranks, sides, dtype, device or "cpu", seconds, folder, output)
    if workload:
        chain = partial(lab.chain, sides, repeats or 10, dtype, device or "cuda", seconds, folder)
        return partial(parser.measured, CHAIN.name, chain, output, store=folder)
    measure = partial(lab.bench, suites or (), parser.names(rivals), threads, seconds, folder, device=device)
    duration = expected(loaded, threads, seconds) + parser.threads_in_words(threads)
    return partial(parser.measured, "bench", measure, output, store=folder, expected=duration)


def _over_ranks(
    sides: tuple[int, ...], dtype: str, device: str, seconds: float, folder: Path | None, output: parser.Output
) -> int:
    """Measure on every rank; the first one shows and stores what all measured."""
    from gemmery_lab import over_ranks

    ranks = over_ranks.launched(device)
    measure = partial(over_ranks.distributed, sides, dtype, device, seconds, folder, ranks=ranks)
    if ranks.rank == 0:
        return parser.measured(DISTRIBUTED.name, measure, output, store=folder)
    measure()
    return 0


@app.command(**texts("sweep"))
def sweep(
    context: Context,
    experiment: Annotated[
        str,
        argument("sweep.experiment", help=f"{SWEPT_ON['cpu']} (CPU); {SWEPT_ON['cuda']} (GPU).", show_default=False),
    ],
    n: Annotated[int | None, option("sweep.n", "--n", min=1)] = None,
    sizes: Annotated[str, option("sweep.sizes")] = "",
    rungs: Annotated[str, option("rungs")] = "",
    dtype: Annotated[str, option("sweep.dtype")] = "f32",
    threads: Annotated[int, option("threads", min=0)] = 0,
    seconds: Annotated[float, option("seconds")] = 5.0,
    device: Annotated[str, option("sweep.device", "--device")] = "",
    card: As = "",
    store: Keep = None,
    json: Json = False,
    html: Html = None,
    no_html: NoHtml = False,
) -> Action:
    """Vary one quantity, keep the others fixed, and draw the curve with the machine's limits.

    Sweeps of a GPU rung's config also run on the emulator, which counts accesses instead of measuring times.
    """
    from gemmery_lab.climb import expected, planned

    varied, rung_names = experiments.sweep(experiment), parser.names(rungs)
    if n is not None and sizes:
        raise ArgumentError(f"--n {n} --sizes {sizes}: give one of them; --n is for an experiment at one size")
    if n is not None and not varied.axis.key:
        having = ", ".join(sweep.name for sweep in SWEEPS if sweep.axis.key)
        raise ArgumentError(f"--n {n}: only {having} run at one size; give --sizes {n} for `sweep {experiment}`")
    lengths = (n,) if n is not None else parser.numbers("--sizes", sizes)
    where = asked.place(device or "emulator", card) if device or card else None
    emulated = where is not None and where.kind == "emulator"
    if emulated:
        _check_counting(context)
        device = str(where)
    kind = "emulator" if emulated else ""
    plan = planned(varied, rung_names, lengths, dtype, device, threads, seconds, kind)
    parser.check_store(store)
    output = parser.Output(json, html, no_html)
    if emulated:
        count = partial(lab.emulated_sweep, experiment, rung_names, lengths, dtype, device)
        return partial(counted, count, device, "", output)
    measure = partial(lab.sweep, experiment, rung_names, lengths, dtype, threads, seconds, device=device, store=store)
    every = (*asked.registry("cpu"), *asked.registry("cuda"))
    duration = expected(plan) + parser.threads_in_words(threads)
    return partial(parser.measured, f"sweep-{experiment}", measure, output, every, store, duration)


@app.command(**texts("exhibit"))
def exhibit(
    name: Annotated[str, argument("exhibit.name")] = "",
    device: Annotated[str, option("exhibit.device")] = "",
    card: As = "",
    seconds: Annotated[float, option("exhibit.seconds")] = 0.3,
    store: Keep = None,
    json: Json = False,
    html: HtmlToo = None,
) -> Action:
    """Show one effect of the hardware with a small kernel.

    Counts are predicted, then measured on a GPU or counted on the emulator.
    """
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
        return partial(_list, json)
    selected, output = find(name), parser.Output(json, html, html is None)
    parser.check_store(store)
    missing = ""
    if where.kind == "cuda":
        from gemmery.cuda import driver

        missing = driver.missing()
    if where.kind == "emulator" or (missing and store is None):
        return partial(_count, selected, where.card or asked.EMULATED_AS, missing, output)
    return partial(_measure, selected, str(where), seconds, store, output)


def _list(json: bool) -> int:
    from gemmery.ladder.exhibits import EXHIBITS
    from gemmery_lab.report.exhibit_results import list_exhibits

    fields = ("name", "idea", "lesson", "parent")
    rows = [{field: getattr(exhibit, field) for field in fields} for exhibit in EXHIBITS]
    parser.print_records(json, rows, partial(list_exhibits, EXHIBITS))
    return 0


def _measure(exhibit: Exhibit, device: str, seconds: float, store: Path | None, output: parser.Output) -> int:
    """Measure an exhibit; 1 when a result is wrong. After Ctrl-C the configs so far are shown."""
    from gemmery_lab.report.exhibit_results import exhibit_page, show_exhibit

    measure = partial(lab.exhibit, exhibit.name, device, seconds, store=store)
    run, interrupted = parser.timed(measure, (), partial(show_exhibit, exhibit), output)
    if output.has_page:
        output.write("exhibit", run.started, exhibit_page(exhibit, run))
    return parser.ended(interrupted, () if interrupted else parser.outside(run))


def _count(exhibit: Exhibit, card: str, missing: str, output: parser.Output) -> int:
    """Count an exhibit on the emulator; 1 when a count is not as predicted.

    `missing` is the reason why there is no GPU, which is printed; "" when the emulator was asked for.
    """
    from gemmery.ladder.exhibits import EMULATED
    from gemmery_lab.measure import record
    from gemmery_lab.report.exhibit_results import emulated_exhibit_page, exhibit_progress, show_emulated_exhibit

    announce(missing, card)
    count, show = partial(lab.emulated_exhibit, exhibit.name, EMULATED, card), partial(show_emulated_exhibit, exhibit)
    runs, interrupted = parser.followed(count, exhibit_progress, show, tuple, output)
    if output.has_page:
        output.write("exhibit", record.now(), emulated_exhibit_page(exhibit, runs))
    return parser.ended(interrupted, [f"{exhibit.name} at {run.config} {line}" for run in runs for line in run.wrong])
