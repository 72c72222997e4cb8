"""Which rung runs a problem on a CUDA device, and why."""

from __future__ import annotations

from collections.abc import Iterator

from gemmery.cuda import device, geometry
from gemmery.cuda.device import Device
from gemmery.cuda.launch import too_large
from gemmery.dispatch.candidate import Candidate
from gemmery.errors import RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Config
from gemmery.problem import Problem

_RUNGS = {rung.name: rung for rung in CUDA}

# Tiles of C a block computes, from those that reuse most to those that leave no multiprocessor without work.
_TILES: dict[str, tuple[Config, ...]] = {
    "mma_pipelined": (
        {"bm": 128, "bn": 256, "wm": 64, "wn": 64, "stages": 4},
        {"bm": 128, "bn": 128, "wm": 64, "wn": 64, "stages": 3},
        {"bm": 64, "bn": 64, "wm": 32, "wn": 32, "stages": 4},
    ),
    "mma_f64": (
        {"bm": 128, "bn": 128, "wm": 64, "wn": 32, "stages": 4},
        {"bm": 64, "bn": 64, "wm": 32, "wn": 32, "stages": 4},
        {"bm": 32, "bn": 32, "wm": 16, "wn": 16, "stages": 4},
    ),
    "simt_pipelined": (
        {"bm": 128, "bn": 128, "wm": 64, "wn": 32, "tm": 8, "tn": 8},
        {"bm": 64, "bn": 64, "wm": 32, "wn": 32, "tm": 8, "tn": 4},
        {"bm": 32, "bn": 32, "wm": 16, "wn": 32, "tm": 4, "tn": 4},
    ),
}
_FAST_F64 = (80, 90, 100)  # capabilities whose tensor cores multiply in double faster than their CUDA cores
_MANY = 8  # products of a batch from which each may have less than a multiprocessor
_SMALL = 16  # sides of C up to which such a product fits one small block


def candidates(problem: Problem) -> Iterator[Candidate]:
    """The rungs that suit this problem on its device, best first; the last take every problem."""
    p, found = _upright(problem), device.find(problem.device)
    for name, reason in suited(p, found):
        if name not in _RUNGS:
            continue
        for config in _configs(name, p, found):
            yield Candidate(_RUNGS[name], {**_RUNGS[name].default, **config}, reason)


def refusal(problem: Problem, candidate: Candidate) -> str:
    """Why this rung does not take the problem on its device, in words; "" when it does."""
    rung, config, _ = candidate
    p = _upright(problem)
    if p.dtype not in rung.dtypes:
        return f"it does not serve {p.dtype}"
    reason = rung.refuses(p) or too_large(p)
    if reason or rung.geometry is None:
        return reason
    try:
        return geometry.refusal(rung.geometry(p, config), device.find(p.device))
    except RefusedError as error:
        return str(error)


def suited(p: Problem, found: Device) -> list[tuple[str, str]]:
    """Names of rungs worth asking for a problem with rows in C, best first, each with the reason in words."""
    choices = []
    if p.m == 1 or p.n == 1:
        vector = "one operand is a vector: the matrix is read once, at the bandwidth of memory"
        choices += [("gemv_vectorized", vector), ("gemv_warp", vector)]
    if p.batch >= _MANY and max(p.m, p.n) <= _SMALL:
        choices.append(("simt_smem", f"{p.batch} products of {p.m} x {p.n}: a small block for each"))
    if p.dtype in ("f16", "bf16") or p.precision == "tf32":
        what = p.precision or p.dtype
        choices.append(("mma_pipelined", f"{what}: tensor cores, fed by a ring of tiles in shared memory"))
        if found.capability < 80 and p.dtype == "f16":
            choices.append(("wmma_f16", f"tensor cores of sm_{found.capability} multiply f16"))
    if p.dtype == "f64" and found.capability in _FAST_F64:
        choices.append(("mma_f64", f"tensor cores of sm_{found.capability} multiply in double, twice as fast"))
    exact = f"{p.dtype} on CUDA cores: tiles in registers, the next loaded while this one is multiplied"
    choices.append(("simt_pipelined", exact))
    choices.append(("simt_smem", "no faster rung takes it; this one takes every layout"))
    choices.append(("simt_naive", "no faster rung takes it; this one takes every problem"))
    return choices


def _configs(name: str, p: Problem, found: Device) -> list[Config]:
    """The largest tile that gives every multiprocessor one, then smaller ones, then larger ones."""
    if name == "simt_smem":
        side = max(p.m, p.n)
        return [{"tile": 8 if side <= 8 else 16 if side <= 16 else 32}]
    tiles = _TILES.get(name)
    if not tiles:
        return [{}]
    full = [i for i, one in enumerate(tiles) if geometry.tiles(p, one["bm"], one["bn"])[0] >= found.sms]
    first = full[0] if full else len(tiles) - 1
    return [*tiles[first:], *reversed(tiles[:first])]


def _upright(problem: Problem) -> Problem:
    """The problem as kernels see it: C in rows."""
    return problem.transposed() if problem.c_layout == "col" else problem
