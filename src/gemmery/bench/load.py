"""The load of other processes during a measurement.

A core that another process uses for a third of the time makes a kernel look slow in some rounds and not in others. The
load average of `uptime` reacts too late (it is a mean over a minute) and includes the measurement itself, so this file
reads the time that the system accounts to each core and subtracts the time of this process and its rivals.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

LIMIT = 0.3  # cores that others may use before figures are unreliable
SHORTEST = 0.25  # seconds between two readings: the kernel accounts in ticks of 10 ms
_STAT = "/proc/stat"
_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, and steal: taken by other virtual machines


def limit(cores: int) -> float:
    """Return the load above which figures are unreliable: LIMIT, or a fiftieth of the cores if there are many.

    >>> limit(2), limit(128)
    (0.3, 2.56)
    """
    return max(LIMIT, cores / 50)


@dataclass(frozen=True)
class Reading:
    """Seconds since some moment, and seconds that the cores have been busy in all and for this process."""

    at: float
    busy: float
    own: float


def nobody() -> tuple[int, ...]:
    """No other process belongs to the measurement."""
    return ()


class Meter:
    """Reads how many cores other processes used since the last reading.

    `children` returns the numbers of processes whose time belongs to the measurement. Without /proc/stat the load is 0.
    """

    def __init__(self, children: Callable[[], Iterable[int]] = nobody) -> None:
        self._children = children
        self._last = self._read()
        self._load = 0.0

    def load(self) -> float:
        """Cores that others used on average since the last call; the previous value when that was a moment ago."""
        now = self._read()
        if now.at - self._last.at >= SHORTEST:
            self._load = others(self._last, now)
            self._last = now
        return self._load

    def _read(self) -> Reading:
        return Reading(time.perf_counter(), _busy(), _own(self._children()))


def others(first: Reading, last: Reading) -> float:
    """Cores that other processes used on average between two readings."""
    elapsed = last.at - first.at
    used = (last.busy - first.busy) - (last.own - first.own)
    return round(max(used, 0.0) / elapsed, 2) if elapsed > 0 else 0.0


def watch(seconds: float = SHORTEST) -> float:
    """Return the cores that other processes use, measured over a short time."""
    meter = Meter()
    time.sleep(seconds)
    return meter.load()


def _busy() -> float:
    """Seconds that the cores which this process may use were busy since the system started; 0 when unknown."""
    try:
        with open(_STAT, encoding="ascii") as file:
            rows = [line.split() for line in file if line.startswith("cpu")]
    except OSError:
        return 0.0
    allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = sum(int(row[1 + column]) for row in rows if row[0] in allowed for column in _BUSY if 1 + column < len(row))
    return ticks / os.sysconf("SC_CLK_TCK")


def _own(children: Iterable[int]) -> float:
    """Seconds of processor time of this process, of its children that have ended, and of those named."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_of, children))


def _of(process: int) -> float:
    """Seconds of processor time of a process; 0 when it has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # before it is the name, which may contain spaces
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
