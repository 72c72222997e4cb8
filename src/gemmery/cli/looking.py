"""The commands that measure nothing: ladder diff, inspect, doctor, and the emulator's emulate."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from gemmery import dtypes
from gemmery.cli.app import Action, app, ladder_app
from gemmery.cli.options import As, Json, settings
from gemmery.cli.showing import print_records
from gemmery.emulation import command
from gemmery.errors import ArgumentError
from gemmery.pages.writing import HtmlToo, check_page, check_writable, console, place, write_page

if TYPE_CHECKING:
    from gemmery.inspection.records import AnyInspection


@ladder_app.command(
    short_help="Show what changed between two rungs.",
    epilog="""\b
    Examples:
      gemmery ladder diff simt_smem simt_threadtile""",
)
def diff(
    old: Annotated[str, Argument(metavar="OLD", help="A rung.", show_default=False)],
    new: Annotated[str, Argument(metavar="NEW", help="Another rung.", show_default=False)],
    html: HtmlToo = None,
) -> Action:
    """Show how two rungs differ: their rows in the ladder, and the code that only one of them uses.

    The two kernels are compared line by line. Functions and types in headers are listed where only one rung uses them.
    """
    if html is not None:
        check_page(html, "jinja2")
    return partial(_diff, old, new, html)


def _diff(old: str, new: str, html: Path | None) -> int:
    from gemmery import lab
    from gemmery.report.difference import difference_page, show_difference

    difference = lab.diff(old, new)
    show_difference(difference, console())
    if html is not None:
        sys.stdout.write(f"page: {write_page(html, difference_page(difference))}\n")
    return 0


@app.command(
    short_help="Show a kernel's resources, occupancy and memory counters.",
    epilog="""\b
    Examples:
      gemmery inspect simt_naive
      gemmery inspect simt_smem --n 2048 --config tile=16 --device sm_80
      gemmery inspect simt_smem --line simt_smem.cu:21 --html smem.html
      gemmery inspect simt_padded simt_swizzled
      gemmery inspect simd_tile packed_panels
      gemmery inspect bank_stride --config stride=32 --svg pictures
      gemmery inspect mma_pipelined --dtype bf16 --device h200 --sass

    \b
    The object of --json has rung, problem, config, device, kernels (for each:
    registers, occupancy, counts, loop, step ...), loads and once (the
    roofline), and emulated: lines (line, code, depth, counters; those of
    depth 0 add up to total), kinds, chosen (what pictures show, lane by
    lane). To compare two kernels, divide the counts of `step`, one pass of
    the loop that loads from global memory, by its `multiply_adds`. Fields
    may be added; none changes its name or meaning.""",
)
def inspect(
    rung: Annotated[str, Argument(metavar="RUNG", help="A rung, or an exhibit.", show_default=False)],
    other: Annotated[str, Argument(metavar="[RUNG]", help="Another, side by side.", show_default=False)] = "",
    m: Annotated[int | None, Option(metavar="M", min=1, help="Rows of C.", show_default="n")] = None,
    n: Annotated[
        int | None,
        Option(
            metavar="N", min=1, help="Columns of C, or elements of an exhibit.", show_default="4096, of a CPU rung 512"
        ),
    ] = None,
    k: Annotated[int | None, Option(metavar="K", min=1, help="Columns of A.", show_default="n")] = None,
    dtype: Annotated[
        str,
        Option(
            metavar="TYPE",
            help=f"f32, f64, f16, bf16, tf32, {', '.join(dtypes.FLOAT8)}, int8.",
            show_default="the first that the rungs take",
        ),
    ] = "",
    config: Annotated[str, Option(metavar="KEY=V,...", help="Config values.", show_default="the rung's own")] = "",
    device: Annotated[
        str, Option(metavar="NAME", help="cuda, a card (a100) or sm_80.", show_default="the one here, else h200")
    ] = "",
    card: As = "",
    line: Annotated[
        str, Option(metavar="FILE:LINE", help="Draw the accesses of this line.", show_default="the costliest")
    ] = "",
    ptx: Annotated[bool, Option("--ptx", help="Show the PTX; of a CPU rung LLVM's IR.")] = False,
    sass: Annotated[bool, Option("--sass", help="Show the machine code.")] = False,
    json: Annotated[bool, Option("--json", help="Print JSON; a list when two rungs are given.")] = False,
    html: HtmlToo = None,
    svg: Annotated[
        Path | None,
        Option("--svg", metavar="FOLDER", help="Write the pictures to files.", show_default=False, callback=place),
    ] = None,
) -> Action:
    """Show a kernel's resources, occupancy, roofline and per-line memory counters; no GPU is needed.

    Of a CPU rung show its loops, inner loop in assembly, roofs, and accesses in a model of the caches.
    """
    from gemmery.lab import asked

    names = [rung, *([other] if other else [])]
    asked.inspectable(*names)
    keys = settings(config)
    device, dtype = asked.looked_at(device, card), asked.spelled(dtype)
    asked.takes(names, dtype, keys)
    for option, code in (("--ptx", ptx), ("--sass", sass)):
        if code and other and not json:
            raise ArgumentError(f"{option}: side by side, no code is shown; inspect one of them, or add --json")
    if html is not None:
        check_page(html, "jinja2")
    if svg is not None:
        check_writable(svg / "picture.svg", "--svg")
    from gemmery.inspection.gather import inspections

    inspect_each = inspections(names, m or 0, n or 0, k or 0, dtype, keys, device, line)
    return partial(_inspect, inspect_each, ptx, sass, json, html, svg)


def _inspect(
    inspect_each: Sequence[Callable[[], AnyInspection]],
    ptx: bool,
    sass: bool,
    json: bool,
    html: Path | None,
    svg: Path | None,
) -> int:
    from gemmery.inspection.console import show_inspection, show_side_by_side
    from gemmery.inspection.records import paired, without_code
    from gemmery.pages.writing import as_json

    first, *second = inspections = [inspect_rung() for inspect_rung in inspect_each]
    pair = paired(first, *second) if second else None
    messages = sys.stderr if json else sys.stdout
    if json:
        texts = [as_json(without_code(inspection, ptx, sass)) for inspection in inspections]
        sys.stdout.write(f"[{', '.join(texts)}]\n" if pair else f"{texts[0]}\n")
    elif pair:
        show_side_by_side(pair, console())
    else:
        show_inspection(first, console(), ptx, sass)
    if html is not None:
        from gemmery.inspection.pages import inspection_page, side_by_side_page

        page = side_by_side_page(pair) if pair else inspection_page(first)
        messages.write(f"page: {write_page(html, page)}\n")
    if svg is not None:
        for path in _write_pictures(svg, inspections):
            messages.write(f"picture: {path}\n")
    return 0


def _write_pictures(folder: Path, inspections: Sequence[AnyInspection]) -> list[Path]:
    from gemmery.pages.pictures import files

    texts: dict[str, str] = {}
    for inspection in inspections:
        if inspection.emulated:
            texts |= files(inspection.rung, inspection.emulated.chosen, inspection.emulated.source)
    return [write_page(folder / name, text, "--svg") for name, text in texts.items()]


@app.command(
    short_help="Show what gemmery finds on this machine.",
    epilog="""\b
    Examples:
      gemmery doctor
      gemmery doctor --json
      gemmery doctor --prune""",
)
def doctor(
    json: Json = False,
    prune: Annotated[
        bool, Option("--prune", help="First remove what other versions of gemmery left in the cache folder.")
    ] = False,
) -> Action:
    """Show what gemmery finds on this machine, and how to fix what is wrong."""
    return partial(_doctor, json, prune)


def _doctor(json: bool, prune: bool) -> int:
    from gemmery import lab
    from gemmery.report.terminal import findings

    checks = (*([lab.prune()] if prune else []), *lab.doctor())
    print_records(json, checks, partial(findings, [astuple(check) for check in checks]))
    return 0 if all(check.ok for check in checks) else 1


app.command(short_help=command.SHORT_HELP, epilog=command.EPILOG)(command.emulate)
