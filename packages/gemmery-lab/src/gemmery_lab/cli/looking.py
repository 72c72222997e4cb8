"""The commands that time nothing: ladder diff, inspect, doctor, verify, warm, and the emulator's emulate."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from gemmery import dtypes
from gemmery.errors import ArgumentError, DeviceError, DTypeError
from gemmery_emulator.kernels import command
from gemmery_emulator.pages.writing import HtmlToo, check_page, check_writable, console, place, write_page
from gemmery_lab.cli.app import Action, As, Json, app, ladder_app, names, settings
from gemmery_lab.cli.showing import bar, print_records

if TYPE_CHECKING:
    from gemmery_lab.inspection.records import AnyInspection
    from gemmery_lab.verification import Verification


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
    import gemmery_lab as lab
    from gemmery_lab.report.terminal import difference_page, show_difference

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
    from gemmery_lab import asked

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
    from gemmery_lab.inspection.gather import inspections

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
    from gemmery_emulator.pages.writing import as_json
    from gemmery_lab.inspection.notebook import show_inspection, show_side_by_side
    from gemmery_lab.inspection.records import paired, without_code

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
        from gemmery_lab.inspection.notebook import inspection_page, side_by_side_page

        page = side_by_side_page(pair) if pair else inspection_page(first)
        messages.write(f"page: {write_page(html, page)}\n")
    if svg is not None:
        for path in _write_pictures(svg, inspections):
            messages.write(f"picture: {path}\n")
    return 0


def _write_pictures(folder: Path, inspections: Sequence[AnyInspection]) -> list[Path]:
    from gemmery_emulator.pages.pictures import files

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
    import gemmery_lab as lab
    from gemmery_lab.report.terminal import findings

    checks = (*([lab.prune()] if prune else []), *lab.doctor())
    print_records(json, checks, partial(findings, [astuple(check) for check in checks]))
    return 0 if all(check.ok for check in checks) else 1


app.command(short_help=command.SHORT_HELP, epilog=command.EPILOG)(command.emulate)


@app.command(
    short_help="Compare random products with the reference.",
    epilog="""\b
    Examples:
      gemmery verify
      gemmery verify --device cuda --products 10000
      gemmery verify --device cuda --dtype e4m3 --seed 71 --products 1
      gemmery verify --device cuda --dtype f32_tensor,f32_plus --products 100000

    \b
    With GEMMERY_TIERS=off each product runs the kernel for its shape at once,
    and waits until it is compiled.""",
)
def verify(
    device: Annotated[str, Option(metavar="NAME", help="cpu, cuda, or cuda:N for the Nth GPU.")] = "cpu",
    products: Annotated[int, Option(metavar="N", min=1, help="How many.")] = 1000,
    dtype: Annotated[
        list[str] | None,
        Option(metavar="A,B", help="Only these: f16, bf16, tf32, e4m3, int8, f32_tensor ...", show_default="all"),
    ] = None,
    seed: Annotated[int, Option(metavar="S", min=0, help="The first product's; the next has S + 1.")] = 0,
    json: Json = False,
) -> Action:
    """Compute random products of all kinds, and compare each with one of higher precision.

    Shapes, layouts, alignments, batches, groups, epilogues, factors and results are drawn by a seed. A product that is
    wrong is shown with the command that repeats it; the exit code is then 1.
    """
    types = [name for text in dtype or () for name in names(text)]
    return partial(_verify, device, products, types, seed, json)


def _verify(device: str, products: int, types: list[str], seed: int, json: bool) -> int:
    import gemmery_lab as lab
    from gemmery_emulator.pages.writing import as_json

    with bar(products) as progress:
        verified = lab.verify(products, device, types, seed, progress)
    sys.stdout.write(f"{as_json(verified) if json else in_words(verified)}\n")
    return 0 if verified.ok else 1


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


@app.command(
    short_help="Compile and store kernels before they are needed.",
    epilog="""\b
    Examples:
      gemmery warm
      gemmery warm --dtype f32,bf16
      gemmery warm --device h200 --dtype bf16

    \b
    In a Dockerfile, for the user that runs the program:
      ENV GEMMERY_CACHE_DIR=/opt/gemmery
      RUN gemmery warm

    \b
    Kernels suit one kind of CPU: a machine of another kind compiles its own.
    `gemmery doctor` shows what is stored.""",
)
def warm(
    dtype: Annotated[
        list[str] | None,
        Option(metavar="A,B", help="Only these element types: f32, f64, bf16 ...", show_default="all"),
    ] = None,
    device: Annotated[str, Option(metavar="NAME", help="cpu, cuda, a card (h200) or sm_90.")] = "cpu",
    threads: Annotated[
        int, Option(metavar="N", min=0, help="Kernels compiled at the same time, 0 for one per core.")
    ] = 0,
    json: Json = False,
) -> Action:
    """Compile and store the kernels that products need, so that no product waits for a compiler; no GPU is needed."""
    from gemmery import dtypes

    place = device.strip().lower()
    try:
        types = [
            dtypes.resolve(name, (*dtypes.BY_NAME, *dtypes.FLOAT8)) for text in dtype or () for name in names(text)
        ]
        if place != "cpu" and place.partition(":")[0] != "cuda":
            from gemmery.cuda.device import card

            card(place)
    except DTypeError as error:
        raise ArgumentError(f"--dtype: {error}") from None
    except DeviceError as error:
        raise ArgumentError(f"--device: {error}; or cpu") from None
    if dtype and not types:
        raise ArgumentError(f"--dtype {' '.join(dtype)!r} names no element type: leave it out for all")
    return partial(_warm, [dtypes.get(name).numpy for name in types], place, threads, json)


def _warm(types: list[str], device: str, threads: int, json: bool) -> int:
    import gemmery
    from gemmery_emulator.pages.writing import as_json

    with bar() as progress:
        warmed = gemmery.warm(types or None, device, threads=threads or None, progress=progress)
    sys.stdout.write(f"{as_json(warmed) if json else warmed}\n")
    return 0
