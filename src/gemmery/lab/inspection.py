"""inspect(): what a GPU rung or an exhibit is made of and what it asks of a device, without running it."""

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
from gemmery.lab.counted import counted, counted_exhibit, small
from gemmery.lab.exhibits import EMULATED
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.exhibits import EXHIBITS, Exhibit
from gemmery.ladder.exhibits import find as find_exhibit
from gemmery.ladder.inspection import Emulated, Inspection
from gemmery.ladder.rung import Config, Rung
from gemmery.ladder.rung import find as find_rung
from gemmery.problem import Problem

SIDE = 4096
NAMES = frozenset(one.name for one in EXHIBITS)
LAPTOP = "h200"  # the device that is looked at where there is none


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
    """Registers, shared memory, occupancy, roofline and code of a rung for C[m, n] = A[m, k] B[k, n], and what each
    line of it does to memory; or the same of an exhibit, for an array of n elements.

    `m` and `k` are `n` unless said, which is 4096 unless said; a rung that takes only vectors gets a row for m, and a
    B whose columns are contiguous, as on the ladder. `dtype` is the rung's first unless said, "tf32" for f32 by tensor
    cores. `device` is "cuda", a card ("a100") or an architecture ("sm_80"); unless said the one that is there, else
    "h200". No GPU is needed.

    The counters are taken on the emulator, with sides of at most 256; `counters=False` leaves them out. `line`,
    "simt_smem.cu:18", chooses whose accesses are shown as pictures, else the costliest are.

    >>> found = inspect("simt_naive", n=1024, device="sm_80")
    >>> found.kernels[-1].spilled, found.loads.intensity
    (0, 0.25)

    Raises ArgumentError for a rung of the CPU, an unknown one, an unknown key of its config, or a line that does
    nothing to memory; RefusedError where the rung or the device does not take the product.
    """
    if rung in NAMES:
        if m or k or dtype:
            raise ArgumentError(f"exhibit {rung} takes one array of n floats: leave out m, k and dtype")
        return _exhibit(find_exhibit(rung), n, config or {}, _device(device), line, counters)
    row = _on_gpu(rung)
    chosen = _device(device)
    problem = _problem(row, m, n, k, dtype or row.dtypes[0], chosen)
    full = {**row.default, **_checked(row, config or {})}
    reason = row.refuses(problem)
    full = full if reason else {**row.settled(problem, full)}  # what is counted smaller has the tile asked for
    geometry = _launch(row.geometry, problem, full, config) if row.geometry and not reason else None
    reason = reason or (refusal(geometry, chosen) if geometry else "it has no launch to look at")
    if reason or geometry is None:
        raise RefusedError(f"rung {rung}: {reason}")
    launches = inspected(row.name, row.idea, problem, row.stated(full), geometry, chosen)
    run, missing = _counted(counted, row, small(problem), full, chosen.arch, line) if counters else (None, "")
    return Inspection(**_fields(launches), emulated=run, not_emulated=missing)


def together(rungs: Sequence[str]) -> None:
    """Refuse to put a rung beside an exhibit: their counters are not of the same work. Raises ArgumentError."""
    kinds = {rung in NAMES: rung for rung in rungs}
    if len(kinds) > 1:
        _on_gpu(kinds[False])
        raise ArgumentError(f"{kinds[True]} is an exhibit and {kinds[False]} a rung: take two of a kind")


def _exhibit(
    shown: Exhibit, n: int, config: Mapping[str, int], device: Device, line: str, counters: bool
) -> Inspection:
    """What is known of an exhibit for n elements, as many as a GPU is given unless said; EMULATED are counted."""
    show = shown.show
    if not _is_whole(n) or n < 0:
        raise ArgumentError(f"n={n!r}: a number of elements must be a whole number >= 1")
    full, elements = {**shown.default, **_checked(shown, config)}, n or show.n
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
    """The launch; where a config was given that the kernel does not take, an ArgumentError."""
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
    """What the emulator counts, or why it cannot."""
    try:
        return count(*given), ""
    except (EmulationError, RefusedError) as error:
        return None, str(error)


def _on_gpu(name: str) -> Rung:
    if any(rung.name == name for rung in CPU):
        known = ", ".join(rung.name for rung in CUDA)
        raise ArgumentError(
            f"rung {name!r} runs on the CPU, and `inspect` looks at launches on a GPU; it knows: {known}"
        )
    if not any(rung.name == name for rung in CUDA):
        known = ", ".join([*(one.name for one in CUDA), *(one.name for one in EXHIBITS)])
        raise ArgumentError(f"rung {name!r} is not in the ladder on a GPU, and no exhibit; known: {known}")
    return find_rung(CUDA, name)


def _device(name: str) -> Device:
    if name:
        return find(name)
    return find(LAPTOP if driver.missing() else "cuda")


def _problem(rung: Rung, m: int, n: int, k: int, dtype: str, device: Device) -> Problem:
    for option, side in (("m", m), ("n", n), ("k", k)):
        if not _is_whole(side) or side < 0:
            raise ArgumentError(f"{option}={side!r}: a side must be a whole number >= 1")
    precision = "tf32" if dtype == "tf32" else ""
    element = "f32" if precision else dtype
    if element not in C_NAMES or element not in rung.dtypes:
        raise ArgumentError(f"dtype {dtype!r}: rung {rung.name} is written for {', '.join(rung.dtypes)}")
    side = n or SIDE
    where = f"cuda:{device.ordinal}" if device.ordinal >= 0 else device.name
    square = Problem(m or side, side, k or side, element, element, device=where, precision=precision)
    if m in (0, 1) and rung.refuses(replace(square, m=side)):
        row = replace(square, m=1, b_layout="col")
        return square if rung.refuses(row) else row
    return square


def _is_whole(given: object) -> bool:
    return isinstance(given, Integral)


def _checked(rung: Rung | Exhibit, config: Mapping[str, int]) -> Mapping[str, int]:
    known = dict.fromkeys([*rung.space, *rung.default])
    for key in config:
        if key not in known:
            having = f"it has {', '.join(known)}" if known else "it has nothing to set"
            raise ArgumentError(f"config {key!r}: {rung.name} does not know it; {having}")
        if not _is_whole(config[key]):
            raise ArgumentError(f"config {key!r}: {config[key]!r} is no whole number")
    return config
