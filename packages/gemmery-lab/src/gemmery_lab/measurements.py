"""Records of timings and checks, and a device to take them on: operands, what can be run on them, rivals, limits.

The ladder, sweeps and suites know nothing else of a CPU (`on_cpu`) or a GPU (`on_cuda`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from gemmery import verify
from gemmery.ladder.rung import Growth, Rung
from gemmery.problem import Config
from gemmery_lab.measure.record import MachineRecord, Measurement
from gemmery_lab.measure.timing import Comparison, Contestant, Ratio, Rival, Sample, Timing
from gemmery_lab.measure.work import Work

TF32 = 2.0**14 + 8  # two factors rounded to 11 bits each, 2^-10 together, in units of f32's 2^-24
WRONG = 1e9  # error over bound of a result with unexpected NaN or infinity: JSON has no infinity


class MachineLimits(NamedTuple):
    """The measured limits of a kernel: the peak of its unit in GFLOP/s, memory in GB/s; 0 if not measured."""

    peak: float = 0.0
    read: float = 0.0
    copy: float = 0.0


UNMEASURED = MachineLimits()


def blank(suite: str, kernel: str, work: Work, threads: int, **known: Any) -> Measurement:
    """Return a record of `kernel` on `work` without times, as for a refusal."""
    same = ("m", "n", "k", "dtype", "out", "batch", "case", "precision")
    fields: dict[str, Any] = {name: getattr(work, name) for name in same}
    fields |= {"flops": work.problem.flops, "bytes": work.problem.bytes}
    fields |= {"seconds": 0.0, "best": 0.0, "p95": 0.0, "samples": 0}
    return Measurement(suite=suite, kernel=kernel, threads=threads, **fields, **known)


def timed(
    plain: Measurement, timing: Timing, versus: Mapping[str, Ratio] | None = None, limits: MachineLimits = UNMEASURED
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


def error(c: Any, a: Any, b: Any, bound: Growth, normwise: bool = False) -> float:
    """Return the largest |c - reference| over its bound; vectors are checked as matrices of one column.

    Above 2e8 operations only some rows are compared: the extended-precision reference runs at 0.3 GFLOP/s.
    """
    if b.ndim == 1:
        b, c = b[:, None], c[:, None]
    checked = verify.check(c, a, b, bound, normwise=normwise, most_flops=2e8)
    return min(checked.error_over_bound, WRONG)


Begin = Callable[[str], None]  # tells what begins to be measured


@dataclass(frozen=True)
class Runnable:
    """Something that multiplies the operands of a work, ready to be checked and timed."""

    sampler: Callable[[], Sample]
    error: Callable[[], float] | None = None  # runs one product: its error over its bound; None if it is not checked
    note: str = ""


TURNS = 3  # of each contestant in a race without rests


@dataclass(frozen=True)
class Race:
    """Contestants that took turns without rest; by name: the mean watts, and the median clock in MHz."""

    comparison: Comparison
    watts: Mapping[str, float]
    clocks: Mapping[str, int]


class Opponent(Protocol):
    """A rival that can run here; `runs` is the library, its version and its kernels."""

    @property
    def name(self) -> str: ...
    @property
    def runs(self) -> str: ...


class Stage(Protocol):
    """The operands of one work on a device. Each method raises RefusedError for what does not take them."""

    def rung(self, rung: Rung, config: Config, threads: int) -> Runnable:
        """Build a rung for the operands; `config` is complete."""

    def product(self, config: Config, threads: int) -> Runnable:
        """Take `gemmery.matmul` as a user would call it, with the options of `config`."""

    def rival(self, opponent: Any) -> Runnable:
        """Let a rival of the same backend prepare them."""


class Backend(Protocol):
    """A device to time rungs on, next to rivals."""

    device: str  # as in a Problem: "cpu", "cuda:0", or the name of a card
    ladder: tuple[Rung, ...]
    machine: MachineRecord
    rivals: Sequence[Rival]  # all libraries that may run beside it, installed or not
    pilot: int  # the side at which a rung's time at its first size is predicted
    slow_parent: float  # seconds of a call from which a parent takes no turns

    def product_for(self, rung: Rung, n: int, like: Work) -> Work:
        """Return the product that shows a rung at size n, in the types of `like`."""

    def rival(self, name: str, threads: int) -> Opponent:
        """Return a rival that can run here. Raises RefusedError with the reason if it cannot."""

    def ladder_rivals(self) -> Sequence[str]:
        """Return the names of rivals, of which the ladder takes the first that multiplies the operands."""

    def stage(self, work: Work) -> Stage:
        """Make the operands of a work. Raises RefusedError if there is not enough memory."""

    def share(self, threads: int) -> float:
        """Return the seconds for one comparison of a rung with its parent and a rival."""

    def replaces(self, samples: int, known: int, fastest: bool) -> bool:
        """Return True if a rival's new timing is the one to record. It has `samples` and the old one `known`; in
        `fastest` its turns were with the fastest rung so far.
        """

    def blank(self, suite: str, kernel: str, work: Work, threads: int, **known: Any) -> Measurement:
        """Return a record without times, as for a refusal."""
        return blank(suite, kernel, work, threads, **known)

    def limits(self, record: Measurement, begin: Begin) -> MachineLimits:
        """Return the limits of a record's kernel; the first call measures them."""

    def sustained(self, contestants: Sequence[Contestant], turn: float) -> Race | None:
        """Time contestants in turns of so many seconds without rest; None if the device has no limit of power."""
        return None

    def clock(self) -> int:
        """Return the median clock in MHz since the last call; 0 if it is unknown."""
        return 0

    def children(self) -> tuple[int, ...]:
        """Return the IDs of the processes that it started, which do not count as load."""
        return ()

    def close(self) -> None:
        """End what it started."""
        return


def square(like: Work, n: int) -> Work:
    """Return the product of two squares of side n, in the types of `like`."""
    return Work(n, n, n, like.dtype, like.out, precision=like.precision)
