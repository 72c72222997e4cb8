"""The time the emulator takes for GPU rungs on one core, and to prepare their kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import threadpoolctl

from gemmery.bench import timing
from gemmery.bench.record import Measurement
from gemmery.bench.work import Work, operands
from gemmery.cuda import nvrtc
from gemmery.cuda.device import Device
from gemmery.emulation.programs import prepared_anew
from gemmery.errors import GemmeryError, RefusedError
from gemmery.lab import measurements
from gemmery.lab.asked import emulated_card
from gemmery.lab.contest import Task, entrant
from gemmery.lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung
from gemmery.lab.emulated_rungs import emulated_rung
from gemmery.lab.session import Session
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

COUNTED, CHECKED, READY = "counted", "counted and checked", "parsed and lowered"
ROUNDS, LEAST = 9, 3  # rounds, and the least number of them however long they take


def emulator_speed(session: Session, task: Task) -> list[Measurement]:
    """Time the rungs of a task on the emulator; the session is that of the CPU."""
    return speeds(task.suite, task.work, task.labels, task.seconds)


def speeds(suite: str, work: Work, labels: Sequence[str], seconds: float) -> list[Measurement]:
    """Time each rung on one product: with counters alone, with all checks too, and the preparation of its kernel.

    A run copies the operands, emulates every block of a prepared kernel and copies C back. Libraries have one thread.
    There are fewer rounds if they take longer than `seconds`.

    Raises ArgumentError for a label that is not a rung.
    """
    card, rows = emulated_card(""), []
    with threadpoolctl.threadpool_limits(1):
        for label in labels:
            contender = entrant(label, CUDA)
            plain = measurements.blank(suite, label, work, 1, config=contender.config)
            plain = replace(plain, case="", flops=0, bytes=0)
            try:
                if contender.rung is None:
                    raise RefusedError("it is not one kernel: name a rung for the GPU")
                config = {**contender.rung.default, **contender.config}
                rows += _timed(plain, contender.rung, work, config, card, seconds)
            except GemmeryError as refused:
                rows.append(replace(plain, refused=str(refused)))
    return rows


def _timed(
    plain: Measurement, rung: Rung, work: Work, config: Mapping[str, int], card: Device, seconds: float
) -> list[Measurement]:
    """Check a rung, which also prepares it, then time it in each of the ways in turn."""
    checked = emulated_rung(rung, work, card, config)
    if checked.refused:
        raise RefusedError(checked.refused)
    gemm = Gemm(*(x if x.ndim == 3 else x[None] for x in operands(work)))
    problem = problem_of(gemm, work.dtype, work.out, card.name, precision=work.precision)
    ways: dict[str, Callable[[], object]] = {
        COUNTED: partial(run_rung, rung, problem, config, gemm, EmulationOptions(check=False)),
        CHECKED: partial(run_rung, rung, problem, config, gemm),
        READY: _preparation(rung, problem, config, card),
    }
    timings = timing.tally(_rounds(ways, seconds)).timings
    plain = replace(plain, note=f"PTX of NVRTC {nvrtc.version()} for {card.arch}")
    rows = [measurements.timed(replace(plain, case=way), timings[way]) for way in ways]
    error = max(checked.error, 2.0 if checked.findings else 0.0)
    return [replace(row, error=error, checked=True) if row.case != READY else row for row in rows]


def _preparation(rung: Rung, problem: Problem, config: Mapping[str, int], card: Device) -> Callable[[], object]:
    """The function that prepares the PTX of a rung's last launch for the emulator."""
    assert rung.geometry is not None
    geometry = rung.geometry(problem, config)
    ptx = nvrtc.ptx(geometry.source, geometry.kernel, card.arch)
    return partial(prepared_anew, ptx.text, ptx.entry)


def _rounds(ways: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, dict[int, float]]:
    """Time the ways in turn: seconds by way and round."""
    times: dict[str, dict[int, float]] = {way: {} for way in ways}
    spent = 0.0
    for index in range(ROUNDS):
        if index >= LEAST and spent > seconds:
            break
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            times[way][index] = time.perf_counter() - start
            spent += times[way][index]
    return times
