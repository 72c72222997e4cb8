"""inspect(): resources, occupancy, roofline and counters of a GPU rung or an exhibit, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from typing import Any

from gemmery.cuda import driver, inspection
from gemmery.cuda.device import Device, find
from gemmery.cuda.geometry import C_NAMES, Geometry, refusal
from gemmery.cuda.inspection import inspected
from gemmery.cuda.roofline import roofline
from gemmery.errors import ArgumentError, EmulationError, RefusedError
from gemmery.lab import asked
from gemmery.lab.counted import counted, counted_exhibit, small
from gemmery.lab.exhibits import EMULATED
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.exhibits import EXHIBITS, Exhibit
from gemmery.ladder.exhibits import find as find_exhibit
from gemmery.ladder.inspection import Emulated, Inspection
from gemmery.ladder.rung import Rung
from gemmery.ladder.rung import find as find_rung
from gemmery.problem import Config, Problem

SIDE = 4096
NAMES = frozenset(one.name for one in EXHIBITS)
LAPTOP = "h200"  # the default device of a machine without a GPU


def inspect(
    rung: str,
    m: int = 0,
    n: int = 0,
    k: int = 0,
    dtype: str = "",
    config: Mapping[str, int] | None = None,
    device: str = "",
    line: str = "",
    counters: bool = True,
) -> Inspection:
    """Return registers, shared memory, occupancy, roofline, code and memory counters by line of a GPU rung.

    The product is C[m, n] = A[m, k] B[k, n]; an exhibit takes an array of n elements instead. `n` defaults to 4096, `m`
    and `k` to `n`. A rung that takes only vectors gets m = 1 and a B whose columns are contiguous, as on the ladder.
    `dtype` defaults to the rung's first; "tf32" is f32 on tensor cores. `device` is "cuda", a card ("a100") or an
    architecture ("sm_80"); it defaults to the device of this machine, or "h200" without one. No GPU is needed.

    The emulator takes the counters, with sides of at most 256; `counters=False` leaves them out. `line`, such as
    "simt_smem.cu:18", chooses the line whose accesses are drawn; the default is the costliest.

    >>> found = inspect("simt_naive", n=1024, device="sm_80")
    >>> found.kernels[-1].spilled, found.loads.intensity
    (0, 0.25)

    Raises ArgumentError for a CPU rung, an unknown rung, an unknown key of its config, or a line without memory
    accesses; RefusedError where the rung or the device does not take the product.
    """
    if not issubclass(type(rung), str):
        raise ArgumentError(f"rung is {rung!r}: pass its name as text")
    if rung in NAMES:
        if m or k or dtype:
            raise ArgumentError(f"exhibit {rung} takes one array of n floats: leave out m, k and dtype")
        return _exhibit(find_exhibit(rung), n, config or {}, _device(device), line, counters)
    row = _on_gpu(rung)
    chosen = _device(device)
    problem = _problem(row, m, n, k, asked.spelled(dtype) or row.dtypes[0], chosen)
    full = {**row.default, **asked.keys(row, config or {})}
    reason = row.refuses(problem)
    full = full if reason else {**row.settled(problem, full)}  # the smaller product that is counted has the same tile
    geometry = _launch(row.geometry, problem, full, config) if row.geometry and not reason else None
    reason = reason or (refusal(geometry, chosen) if geometry else "it has no launch to inspect")
    if reason or geometry is None:
        raise RefusedError(f"rung {rung}: {reason}")
    launches = inspected(row.name, row.idea, problem, row.stated(full), geometry, chosen)
    run, missing = _counted(counted, row, small(problem), full, chosen.arch, line) if counters else (None, "")
    return Inspection(**_fields(launches), emulated=run, not_emulated=missing)


def shared_dtype(rungs: Sequence[str], m: int = 0, n: int = 0, k: int = 0, device: str = "") -> str:
    """The first element type of the first rung that all rungs take for such a product; "" where there is none."""
    rows, chosen = [rung for name in rungs for rung in CUDA if rung.name == name], _device(device)
    if len(rows) < 2:
        return ""
    for dtype in rows[0].dtypes:
        if dtype in C_NAMES and all(
            dtype in row.dtypes and not row.refuses(_problem(row, m, n, k, dtype, chosen)) for row in rows
        ):
            return dtype
    return ""


def _exhibit(
    shown: Exhibit, n: int, config: Mapping[str, int], device: Device, line: str, counters: bool
) -> Inspection:
    """The inspection of an exhibit for n elements, by default as many as fill a GPU; EMULATED of them are counted."""
    show = shown.show
    if not _is_whole(n) or n < 0:
        raise ArgumentError(f"n={n!r}: a number of elements must be a whole number >= 1")
    full, elements = {**shown.default, **asked.keys(shown, config)}, n or show.n
    geometry = _launch(show.launch, elements, full, config)
    reason = refusal(geometry, device)
    if reason:
        raise RefusedError(f"exhibit {shown.name}: {reason}")
    work = Problem(1, elements, 1, "f32", "f32", device=device.name)
    launches = inspected(shown.name, shown.idea, work, full, geometry, device)
    moved = 4 * (elements + show.results(elements, full))
    once = roofline(show.operations(elements, full), moved, device.peak(launches.unit), device.bandwidth)
    fewer = min(elements, EMULATED)
    run, missing = _counted(counted_exhibit, shown, fewer, full, device.arch, line) if counters else (None, "")
    known = _fields(replace(launches, loads=once, once=once))
    return Inspection(**known, emulated=run, not_emulated=missing, exhibit=True)


def _launch(
    launch: Callable[[Any, Config], Geometry], of: Any, full: Config, given: Mapping[str, int] | None
) -> Geometry:
    """The launch; an ArgumentError where the caller's config is one that the kernel does not take."""
    try:
        return launch(of, full)
    except RefusedError as refused:
        if not given:
            raise
        said = ",".join(f"{key}={value}" for key, value in given.items())
        raise ArgumentError(f"config {said}: {refused}") from None


def _fields(launches: inspection.Inspection) -> dict[str, Any]:
    return {one.name: getattr(launches, one.name) for one in fields(launches)}


def _counted(count: Callable[..., Emulated], *given: Any) -> tuple[Emulated | None, str]:
    """The emulator's counters, or the reason why there are none."""
    try:
        return count(*given), ""
    except (EmulationError, RefusedError) as error:
        return None, str(error)


def _on_gpu(name: str) -> Rung:
    asked.inspectable(name)
    return find_rung(CUDA, name)


def _device(name: str) -> Device:
    if name:
        return find(LAPTOP if name.strip().lower() == "emulator" else name)
    return find(LAPTOP if driver.missing() else "cuda")


def _problem(rung: Rung, m: int, n: int, k: int, dtype: str, device: Device) -> Problem:
    for option, side in (("m", m), ("n", n), ("k", k)):
        if not _is_whole(side) or side < 0:
            raise ArgumentError(f"{option}={side!r}: a side must be a whole number >= 1")
    precision = "tf32" if dtype == "tf32" else ""
    element = "f32" if precision else dtype
    if element not in C_NAMES or element not in rung.dtypes:
        raise ArgumentError(f"dtype {dtype!r}: rung {rung.name} takes {', '.join(rung.dtypes)}")
    side = n or SIDE
    where = f"cuda:{device.ordinal}" if device.ordinal >= 0 else device.name
    square = Problem(m or side, side, k or side, element, element, device=where, precision=precision)
    if m in (0, 1) and rung.refuses(square._replace(m=side)):
        row = square._replace(m=1, b_layout="col")
        return square if rung.refuses(row) else row
    return square


def _is_whole(given: object) -> bool:
    return isinstance(given, Integral)
