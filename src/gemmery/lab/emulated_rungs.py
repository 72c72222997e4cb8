"""The GPU's ladder without a GPU: every rung at a small size on the emulator, checked and counted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np

from gemmery.bench import record
from gemmery.bench.work import Work, operands
from gemmery.cuda import nvrtc, sass
from gemmery.cuda.device import Device
from gemmery.cuda.roofline import roofs, unit
from gemmery.emulation.counters import source_lines
from gemmery.emulator.run import EmulatedRun
from gemmery.emulator.trace import Trace
from gemmery.emulator.trace.selection import select
from gemmery.errors import EmulationError, RefusedError
from gemmery.experiments import LADDER
from gemmery.lab import asked, measurements
from gemmery.lab.asked import emulated_card
from gemmery.lab.emulated_product import EmulationOptions, Gemm, launch_of, problem_of, run_rung
from gemmery.lab.event import followed
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem
from gemmery.rung_counts import EmulatedLadder, EmulatedRung, RungCounts

MOST = 1024  # a side: the longest rung takes half a minute there
SMALL = 32  # side for the rung of one block
ALIGNED = 128  # `Rung.expect` is about sides that are multiples of this, so that all tiles are whole

OnRung = Callable[[str, int, int, EmulatedRung | None], None]  # what, done, total, and the record of a finished rung


def emulated_ladder(
    rungs: Sequence[str] = (),
    sizes: Sequence[int] = (),
    dtype: str = "",
    device: str = "",
    on_rung: OnRung = lambda *_: None,
) -> EmulatedLadder:
    """Run the GPU's ladder on the emulator: square products, checked, with the counters of a profiler.

    `rungs` are names, all by default. `sizes` defaults to those of `experiments.LADDER`. `dtype` defaults to f32, or to
    a rung's first type where it does not take f32; with a `dtype`, rungs that do not take it are left out unless they
    are named. `device` is the card of cuda/device.py to compile for, whose limits count; it defaults to "h200". A rung
    that takes no squares gets a row and a matrix whose columns are contiguous.

    >>> run = emulated_ladder(["simt_uncoalesced"], [64], device="a100")
    >>> run.rungs[0].counts.load_sectors_a_request
    16.5

    A rung that the card or the emulator cannot run is recorded with the reason in `refused`. Raises ArgumentError for
    an unknown rung, dtype or device, or a size that is not in 1 ... 1024.
    """
    card = emulated_card(device)
    lengths = asked.sides(sizes or LADDER.points["emulator"].sizes, MOST)
    dtype = dtype and asked.element_type(dtype, "emulator")
    element = "f32" if dtype == "tf32" else dtype
    takers = [rung for rung in asked.rungs(rungs, "emulator") if rungs or not element or element in rung.dtypes]
    works = [(rung, n, product_for(rung, n, dtype, card)) for n in lengths for rung in takers]

    def counted(rung: Rung, n: int, work: Work) -> EmulatedRung:
        return replace(emulated_rung(rung, work, card), size=n)

    started = record.now()
    steps = [(f"{rung.name}, {work}", partial(counted, rung, n, work)) for rung, n, work in works]
    return EmulatedLadder(card, started, followed(steps, on_rung))


def product_for(rung: Rung, n: int, dtype: str, card: Device) -> Work:
    """The product for a rung at size n: two squares, small ones for the rung of one block, else a row times W'."""
    precision = "tf32" if dtype == "tf32" else ""
    element = "f32" if precision else dtype or ("f32" if takes_f32(rung) else rung.dtypes[0])
    square = Work(n, n, n, element, asked.result_type(element), precision=precision)
    small, vector = (replace(square, m=side, n=side, k=side) for side in (min(n, SMALL), n))
    for work in (square, small, replace(vector, m=1, b_layout="col")):
        if not rung.refuses(work.problem._replace(device=card.name)):
            return work
    return square


def emulated_rung(rung: Rung, work: Work, card: Device, config: Mapping[str, int] | None = None) -> EmulatedRung:
    """One rung on random operands, with its error, counters and findings; C holds NaN or the largest integer before."""
    full = {**rung.default, **(config or {})}
    plain = EmulatedRung(rung.name, work.n, work.m, work.n, work.k, work.precision or work.dtype, rung.explicit(full))
    gemm = Gemm(*(x if x.ndim == 3 else x[None] for x in operands(work)))
    gemm.c.fill(np.iinfo(gemm.c.dtype).max if gemm.c.dtype.kind == "i" else np.nan)
    problem = problem_of(gemm, work.dtype, work.out, card.name, precision=work.precision)
    start, trace = time.perf_counter(), Trace()
    try:
        runs = run_rung(rung, problem, full, gemm, EmulationOptions(observers=(trace,)))
    except (EmulationError, RefusedError) as refused:
        return replace(plain, refused=str(refused))
    seconds = time.perf_counter() - start
    together = reduce(add, runs)
    steps = {name: (x.strides[1], x.strides[2]) for name, x in (("A", gemm.a), ("B", gemm.b))}
    drawn = select(trace, steps, "")
    counts = _counts(together)
    codes = (nvrtc.ptx(each.source, each.kernel, card.arch) for each in launch_of(rung, problem, full).launches)
    on = unit(work.dtype, (opcode for code in codes for opcode in sass.ptx_counts(code.text)))
    limits = roofs(card, on, counts.flops, counts.sectors, counts.wavefronts, counts.warp_instructions)
    times: dict[str, Any] = {f"{name}_seconds": seconds for name, seconds in limits.items()}
    return replace(
        plain,
        config=rung.explicit(rung.resolve(problem, full)),
        tile=rung.geometry(problem, full).tile if rung.geometry else (0, 0),
        blocks=math.prod(runs[-1].launch.grid),
        error=measurements.error(gemm.c, gemm.a, gemm.b, _bound(rung, problem), rung.normwise),
        counts=counts,
        kinds=dict(together.instructions.most_common()),
        intensity=together.intensity,
        unit=on,
        **times,
        expected=dict(rung.expect) if expects(rung, work) and not config else {},
        findings=tuple(map(str, together.findings)),
        chosen=drawn,
        source=source_lines(drawn),
        seconds=seconds,
    )


def expects(rung: Rung, work: Work) -> bool:
    """True for the products that `Rung.expect` is about: whole tiles, of f32 or the rung's first type.

    For the rung of one block this is its largest product, 32 x 32 x 32.
    """
    sides = {work.n, work.k} if work.m == 1 else {work.m, work.n, work.k}
    larger = replace(work, m=ALIGNED, n=ALIGNED, k=ALIGNED)
    one_block = work.m == SMALL and bool(rung.refuses(larger.problem))
    whole = all(side % (SMALL if one_block else ALIGNED) == 0 for side in sides)
    return whole and not work.precision and work.dtype == ("f32" if takes_f32(rung) else rung.dtypes[0])


def takes_f32(rung: Rung) -> bool:
    """True for a rung that takes f32 itself, not only as tf32."""
    return any(not rung.refuses(Problem(m, 1, 1, "f32", "f32")) for m in (1, 2)) and "f32" in rung.dtypes


def _bound(rung: Rung, problem: Problem) -> Callable[[int], float]:
    """f(k) of the rung's bound, plus the error of rounding A and B to 10 bits of fraction for tf32."""
    bound = rung.bound_of(problem.dtype, problem.precision)
    return (lambda k: bound(k) + measurements.TF32) if problem.precision == "tf32" else bound


def _counts(run: EmulatedRun) -> RungCounts:
    moved, shared = run.global_, run.shared
    return RungCounts(
        flops=run.flops,
        warp_instructions=sum(run.instructions.values()),
        requests=moved.requests,
        sectors=moved.sectors,
        load_sectors_a_request=moved.loads.sectors_a_request,
        store_sectors_a_request=moved.stores.sectors_a_request,
        load_bytes_a_sector=moved.loads.used_a_sector,
        store_bytes_a_sector=moved.stores.used_a_sector,
        bytes=moved.bytes,
        local_requests=run.local.requests,
        wavefronts=shared.wavefronts,
        shared_load_wavefronts=shared.loads.wavefronts,
        shared_store_wavefronts=shared.stores.wavefronts,
        wavefronts_ideal=shared.wavefronts_ideal,
        bank_conflicts=shared.bank_conflicts,
        branches=run.branches,
        divergent_branches=run.divergent_branches,
        load_requests=moved.loads.requests,
        store_requests=moved.stores.requests,
        copies=moved.bulk.requests,
        copied_bytes=moved.bulk.used,
    )
