"""Commands that are no benchmarks: tune, ladder diff and explain, inspect, doctor, verify, predict, warm, run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import gemmery_lab as lab
from gemmery import dtypes
from gemmery.errors import ArgumentError, DeviceError
from gemmery_emulator.kernels import command, file_checks
from gemmery_emulator.pages import writing
from gemmery_emulator.pages.writing import HtmlToo, as_json, console
from gemmery_lab import asked
from gemmery_lab.cli import parser
from gemmery_lab.cli.parser import Action, As, Json, app, argument, ladder_app, option, texts

if TYPE_CHECKING:
    from gemmery_lab.inspection.records import AnyInspection
    from gemmery_lab.tuning import Tuning
    from gemmery_lab.verification import Verification


@ladder_app.command(**texts("diff"))
def diff(
    old: Annotated[str, argument("diff.old", show_default=False)],
    new: Annotated[str, argument("diff.new", show_default=False)],
    html: HtmlToo = None,
) -> Action:
    """Show how two rungs differ: their rows in the ladder, and the code that only one of them uses.

    The two kernels are compared line by line. Functions and types in headers are listed where only one rung uses them.
    """
    if html is not None:
        writing.check_page(html, "jinja2")

    def run() -> int:
        from gemmery_lab.report.terminal import difference_page, show_difference

        difference = lab.diff(old, new)
        show_difference(difference, console())
        if html is not None:
            sys.stdout.write(f"page: {writing.write_page(html, difference_page(difference))}\n")
        return 0

    return run


@ladder_app.command(**texts("explain"))
def explain(
    old: Annotated[str, argument("diff.old", show_default=False)],
    new: Annotated[str, argument("diff.new", show_default=False)],
    dtype: Annotated[str, option("ladder.dtype")] = "",
    card: As = "",
    timeline: Annotated[Path | None, option("explain.timeline", show_default=False, callback=writing.place)] = None,
    html: HtmlToo = None,
) -> Action:
    """Explain a step of the GPU's ladder: the counters, the predicted time and the lines that moved.

    Both rungs run on the emulator, on a small product; their times are predicted for a large one.
    """
    from gemmery.cuda.pipes import predictable

    emulated_as, type_ = asked.emulated_card(card).name, asked.stepped(old, new, dtype)
    if html is not None:
        writing.check_page(html, "matplotlib", "jinja2")
    if timeline is not None:
        writing.check_trace(timeline)
        if emulated_as not in predictable():
            raise ArgumentError(f"--timeline {timeline}: no times are predicted for {emulated_as}; leave it out")

    def run() -> int:
        from gemmery_lab.on_emulator import rung_timeline
        from gemmery_lab.report.ladder_steps import show_step, step, step_page

        ladder = lab.emulated_ladder([old, new], dtype=type_, device=emulated_as)
        for each in ladder.rungs:
            if each.refused:
                raise ArgumentError(f"rung {each.rung}: {each.refused}; explain another step, or another --dtype")
        if emulated_as in predictable():
            ladder = replace(ladder, predicted=lab.predicted_ladder([old, new], dtype=type_, card=emulated_as))
        explained = step(ladder, old, new)
        drawn = explained.times and (html is not None or timeline is not None)
        timelines = [rung_timeline(row, emulated_as) for row in explained.times or ()] if drawn else []
        show_step(explained, console())
        if html is not None:
            sys.stdout.write(f"page: {writing.write_page(html, step_page(explained, timelines))}\n")
        if timeline is not None:
            if not timelines:
                raise ArgumentError(f"--timeline {timeline}: the time of {old} or {new} is not predicted; leave it out")
            written = writing.write_page(timeline, timelines[-1].trace(), "--timeline")
            sys.stdout.write(f"timeline: {written}, of {new}, for ui.perfetto.dev\n")
        return 0

    return run


@app.command(**texts("tune"))
def tune(
    minutes: Annotated[float, option("tune.minutes")] = 10.0,
    fresh: Annotated[bool, option("tune.fresh", "--fresh")] = False,
    json: Json = False,
) -> Action:
    """Measure what gemmery otherwise takes from a model of the caches, and write a table that products then use.

    Sizes of blocks, the limits between rungs, and the work that is worth another thread. No bit of a result depends on
    the table. Run it while nothing else runs. After Ctrl-C the next run goes on where this one was.
    """
    if not 0 < minutes <= _MOST:
        raise ArgumentError(f"--minutes {minutes:g}: it must be above 0 and at most {_MOST}")
    return partial(_tune, minutes, fresh, json)


_MOST = 24 * 60


def _tune(minutes: float, fresh: bool, json: bool) -> int:
    try:
        with parser.bar() as progress:
            tuning = lab.tune(minutes, fresh, lambda what, done, total: progress(done, total, what))
    except KeyboardInterrupt:
        sys.stderr.write("gemmery: interrupted; `gemmery tune` goes on where it was\n")
        return parser.INTERRUPTED
    sys.stdout.write(f"{as_json(tuning) if json else tuning_in_words(tuning)}\n")
    return 0


def tuning_in_words(tuning: Tuning) -> str:
    """Return a line for each question, what makes them doubtful, and where the table is."""
    from gemmery import load
    from gemmery.cpu import target

    lines = []
    for each in tuning.outcomes:
        new = each.after
        changes = (f"{key} {old:g}" + f" -> {new[key]:g}" * (old != new[key]) for key, old in each.before.items())
        result = "not measured: give it more --minutes"
        if each.score:
            as_before = "kept; the best other one takes " * (each.before == each.after)
            result = f"{as_before}{each.score.time:.3f} ± {each.score.spread:.3f} of the time"
        lines.append(f"{each.question:30}{', '.join(changes):34}{result}")
    cores, busy = target.cores(), max((each.score.busy for each in tuning.outcomes if each.score), default=0.0)
    if busy > load.limit(cores):
        lines.append(f"other processes used up to {busy:.1f} of {cores} cores: measure again on a quiet machine")
    table = f"table: {tuning.path}" if tuning.path else "no table, since the model's constants stay"
    return "\n".join([*lines, f"{tuning.seconds:.0f} s; {table}"])


@app.command(**texts("inspect"))
def inspect(
    rung: Annotated[str, argument("inspect.rung", show_default=False)],
    other: Annotated[str, argument("inspect.other", show_default=False)] = "",
    m: Annotated[int | None, option("inspect.m", min=1)] = None,
    n: Annotated[int | None, option("inspect.n", min=1)] = None,
    k: Annotated[int | None, option("inspect.k", min=1)] = None,
    dtype: Annotated[
        str, option("inspect.dtype", help=f"f32, f64, f16, bf16, tf32, {', '.join(dtypes.FLOAT8)}, int8.")
    ] = "",
    config: Annotated[str, option("inspect.config")] = "",
    device: Annotated[str, option("inspect.device")] = "",
    card: As = "",
    line: Annotated[str, option("inspect.line")] = "",
    ptx: Annotated[bool, option("inspect.ptx", "--ptx")] = False,
    sass: Annotated[bool, option("inspect.sass", "--sass")] = False,
    json: Annotated[bool, option("inspect.json", "--json")] = False,
    html: HtmlToo = None,
    svg: Annotated[Path | None, option("inspect.svg", "--svg", show_default=False, callback=writing.place)] = None,
) -> Action:
    """Show a kernel's resources, occupancy, roofline and per-line memory counters; no GPU is needed.

    Of a CPU rung show its loops, inner loop in assembly, roofs, and accesses in a model of the caches.
    """
    names = [rung, *([other] if other else [])]
    asked.inspectable(*names)
    keys = parser.settings(config)
    device, dtype = asked.looked_at(device, card), asked.spelled(dtype)
    for flag, code in (("--ptx", ptx), ("--sass", sass)):
        if code and other and not json:
            raise ArgumentError(f"{flag}: side by side, no code is shown; inspect one of them, or add --json")
    if html is not None:
        writing.check_page(html, "jinja2")
    if svg is not None:
        writing.check_writable(svg / "picture.svg", "--svg")
    from gemmery_lab.inspection.gather import inspections

    inspect_each = inspections(names, device, line, m=m or 0, n=n or 0, k=k or 0, dtype=dtype, config=keys)

    def run() -> int:
        from gemmery_lab.inspection import notebook
        from gemmery_lab.inspection.records import paired, without_code

        first, *second = inspections = [inspect_rung() for inspect_rung in inspect_each]
        pair = paired(first, *second) if second else None
        if json:
            texts = [as_json(without_code(inspection, ptx, sass)) for inspection in inspections]
            sys.stdout.write(f"[{', '.join(texts)}]\n" if pair else f"{texts[0]}\n")
        elif pair:
            notebook.show_side_by_side(pair, console())
        else:
            notebook.show_inspection(first, console(), ptx, sass)
        written = list[str]()
        if html is not None:
            page = notebook.side_by_side_page(pair) if pair else notebook.inspection_page(first)
            written.append(f"page: {writing.write_page(html, page)}\n")
        if svg is not None:
            pictures = _pictures(inspections).items()
            written += [f"picture: {writing.write_page(svg / name, text, '--svg')}\n" for name, text in pictures]
        (sys.stderr if json else sys.stdout).writelines(written)
        return 0

    return run


def _pictures(inspections: Sequence[AnyInspection]) -> dict[str, str]:
    from gemmery_emulator.pages.pictures import files

    every = [(each.rung, each.emulated) for each in inspections]
    texts = [files(rung, counts.chosen, counts.source) for rung, counts in every if counts]
    return {name: text for each in texts for name, text in each.items()}


@app.command(**texts("doctor"))
def doctor(json: Json = False, prune: Annotated[bool, option("doctor.prune", "--prune")] = False) -> Action:
    """Show what gemmery finds on this machine, and how to fix what is wrong."""

    def run() -> int:
        from gemmery_lab.report.terminal import findings

        checks = (*([lab.prune()] if prune else []), *lab.doctor())
        parser.print_records(json, checks, partial(findings, [astuple(check) for check in checks]))
        return 0 if all(check.ok for check in checks) else 1

    return run


app.command(short_help=command.SHORT_HELP, epilog=command.EPILOG)(command.emulate)
app.command(short_help=file_checks.SHORT_HELP)(file_checks.faults)
app.command(short_help=file_checks.SERVES)(file_checks.mcp)


@app.command(**texts("verify"))
def verify(
    device: Annotated[str, option("verify.device")] = "cpu",
    products: Annotated[int, option("verify.products", min=1)] = 1000,
    dtype: Annotated[list[str] | None, option("verify.dtype")] = None,
    seed: Annotated[int, option("verify.seed", min=0)] = 0,
    json: Json = False,
) -> Action:
    """Compute random products of all kinds, and compare each with one of higher precision.

    Shapes, layouts, alignments, batches, groups, epilogues, factors and results are drawn by a seed. A product that is
    wrong is shown with the command that repeats it; the exit code is then 1.
    """
    types = [name for text in dtype or () for name in parser.names(text)]

    def run() -> int:
        with parser.bar(products) as progress:
            verified = lab.verify(products, device, types, seed, progress)
        sys.stdout.write(f"{as_json(verified) if json else in_words(verified)}\n")
        return 0 if verified.ok else 1

    return run


def in_words(verified: Verification) -> str:
    """Return what was compared, and each wrong product with the command that repeats it."""
    from gemmery_emulator.pages import numerals

    counts = ", ".join(f"{count} {name}" for name, count in sorted(verified.types.items()))
    first, last = verified.seed, verified.seed + verified.seeds - 1
    seeds = f"seeds {first} to {last}" if first < last else f"seed {first}"
    summary = (
        f"{numerals.plural(verified.products, 'product')} ({counts}) on {verified.device}, {seeds}, "
        f"{verified.seconds:.3g} s: {len(verified.wrong) or 'none'} wrong; "
        f"the others reach at most {verified.worst:.3g} of their bounds"
    )
    lines = [summary]
    for wrong in verified.wrong:
        again = f"gemmery verify --device {verified.device} --dtype {wrong.dtype} --seed {wrong.seed} --products 1"
        lines += [f"{wrong.product}", f"  {wrong.reason}", f"  again: {again}"]
    return "\n".join(lines)


@app.command(**texts("predict"))
def predict(json: Json = False) -> Action:
    """Predict the share of its peak that each micro-kernel for ARM reaches on a few cores; no ARM is needed.

    The inner loops are compiled for each core, and llvm-mca of LLVM 17 or newer predicts their cycles.
    """

    def run() -> int:
        from gemmery_lab.inspection import cpu_rung
        from gemmery_lab.report.terminal import laid_out

        rows, screen = cpu_rung.predict(), console()
        parser.print_records(json, rows, lambda _: screen.print(*laid_out(cpu_rung.sheet(rows), screen.width)))
        return 0

    return run


@app.command(**texts("warm"))
def warm(
    dtype: Annotated[list[str] | None, option("warm.dtype")] = None,
    device: Annotated[str, option("warm.device")] = "cpu",
    threads: Annotated[int, option("warm.threads", min=0)] = 0,
    json: Json = False,
) -> Action:
    """Compile and store the kernels that products need, so that no product waits for a compiler; no GPU is needed."""
    place = device.strip().lower()
    asked_for, known = [name for text in dtype or () for name in parser.names(text)], (*dtypes.BY_NAME, *dtypes.FLOAT8)
    types = [asked.resolved(name, known, where="--dtype: ") for name in asked_for]
    if place != "cpu" and place.partition(":")[0] != "cuda":
        from gemmery.cuda.device import card

        try:
            card(place)
        except DeviceError as error:
            raise ArgumentError(f"--device: {error}; or cpu") from None

    def run() -> int:
        import gemmery

        names = [dtypes.get(name).numpy for name in types]
        with parser.bar() as progress:
            warmed = gemmery.warm(names or None, place, threads=threads or None, progress=progress)
        sys.stdout.write(f"{as_json(warmed) if json else warmed}\n")
        return 0

    return run


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True}, **texts("run"))
def run(
    target: Annotated[str, argument("run.target", show_default=False)],
    arguments: Annotated[list[str] | None, argument("run.arguments", show_default=False)] = None,
    module: Annotated[bool, option("run.module", "-m")] = False,
    types: Annotated[str, option("run.types", "--types")] = "",
) -> Action:
    """Run a script with gemmery behind NumPy's products, and say at its end how many ran and what they took."""
    known = ("f32", "f64", "complex64", "complex128")
    names = [dtypes.get(asked.resolved(name, known, where="--types: ")).numpy for name in parser.names(types)]
    if not module and not Path(target).exists():
        raise ArgumentError(f"script {target!r}: there is no such file; give its path, or -m and the name of a module")

    def go() -> int:
        import traceback

        from gemmery_lab.cli import script

        code: object = 0
        try:
            script.run(target, arguments or (), names, module)
        except SystemExit as end:
            code = end.code
        except script.UnrunnableError:
            raise
        except Exception:
            traceback.print_exc()
            code = 1
        sys.stderr.write(f"{script.text(script.summary())}\n")
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
        return code if isinstance(code, int) else int(code is not None)

    return go
