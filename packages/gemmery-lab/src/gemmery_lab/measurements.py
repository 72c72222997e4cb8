"""Records of timings and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from gemmery import verify
from gemmery_lab.measure.record import Measurement
from gemmery_lab.measure.timing import Ratio, Timing
from gemmery_lab.measure.work import Work

TF32 = 2.0**14 + 8  # two factors rounded to 11 bits each, 2^-10 together, in units of f32's 2^-24
WRONG = 1e9  # error over bound of a result with unexpected NaN or infinity: JSON has no infinity


class MachineLimits(NamedTuple):
    """The measured limits of a kernel: the peak of its unit in GFLOP/s, memory in GB/s; 0 if not measured."""

    peak: float = 0.0
    read: float = 0.0
    copy: float = 0.0


def blank(suite: str, kernel: str, work: Work, threads: int, **known: Any) -> Measurement:
    """Return a record of `kernel` on `work` without times, as for a refusal."""
    same = ("m", "n", "k", "dtype", "out", "batch", "case", "precision")
    fields: dict[str, Any] = {name: getattr(work, name) for name in same}
    fields |= {"flops": work.problem.flops, "bytes": work.problem.bytes}
    fields |= {"seconds": 0.0, "best": 0.0, "p95": 0.0, "samples": 0}
    return Measurement(suite=suite, kernel=kernel, threads=threads, **fields, **known)


def timed(
    plain: Measurement,
    timing: Timing,
    versus: Mapping[str, Ratio] | None = None,
    limits: MachineLimits = MachineLimits(),  # noqa: B008 (a constant)
) -> Measurement:
    """Return the record with its times, its ratios to others, and the limits measured in the same run."""
    ratios = versus or {}
    return replace(
        plain,
        **vars(timing),
        peak_gflops=limits.peak,
        bandwidth_gbs=limits.read,
        copy_gbs=limits.copy,
        versus={name: ratio.median for name, ratio in ratios.items()},
        spread={name: ratio.spread for name, ratio in ratios.items()},
    )


SLOW = "predicted to take"  # the start of the reason why a slow rung is not run


def too_slow(predicted: float, limit: float) -> str:
    """Return the reason not to run a rung whose call would take so many seconds, "" if it is within the limit.

    >>> too_slow(68.2, 5.0)
    'predicted to take 68 s a call, above the limit of 5 s'
    """
    return "" if predicted <= limit else f"{SLOW} {predicted:.2g} s a call, above the limit of {limit:g} s"


def error(c: Any, a: Any, b: Any, bound: Callable[[int], float], normwise: bool = False) -> float:
    """Return the largest |c - reference| over its bound; vectors are checked as matrices of one column.

    Above 2e8 operations only some rows are compared: the extended-precision reference runs at 0.3 GFLOP/s.
    """
    if b.ndim == 1:
        b, c = b[:, None], c[:, None]
    checked = verify.check(c, a, b, bound, normwise=normwise, most_flops=2e8)
    return min(checked.error_over_bound, WRONG)
