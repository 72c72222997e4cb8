"""The number of cores that other processes use during a measurement.

A kernel looks slow in some rounds and not in others if another process uses its core 1/3 of the time. The load
average of `uptime` shows that too late, as it is a mean over a minute, and includes the measurement itself. This file
reads the busy time of each core and subtracts the time of this process and its rivals.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

LIMIT = 0.3  # cores used by others from which figures are unreliable
SHORTEST = 0.25  # seconds between two readings: the kernel counts in ticks of 10 ms
_STAT = "/proc/stat"
_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, and steal: taken by other virtual machines


def limit(cores: int) -> float:
    """Return the load from which figures are unreliable: LIMIT, or 2 % of many cores.

    >>> limit(2), limit(128)
    (0.3, 2.56)
    """
    return max(LIMIT, cores / 50)


@dataclass(frozen=True)
class Reading:
    """The time, and the busy seconds of the cores so far: of all processes, and of this one."""

    at: float
    busy: float
    own: float


class Meter:
    """Measures how many cores other processes use.

    `children` returns the IDs of processes that do not count as load. Without /proc/stat the load is 0.
    """

    def __init__(self, children: Callable[[], Iterable[int]] = tuple) -> None:
        self._children = children
        self._last = self._read()
        self._load = 0.0

    def load(self) -> float:
        """Return the mean number of cores used by others since the last call, or its value if that was just now."""
        now = self._read()
        if now.at - self._last.at >= SHORTEST:
            self._load = others(self._last, now)
            self._last = now
        return self._load

    def _read(self) -> Reading:
        return Reading(time.perf_counter(), _busy(), _own(self._children()))


def others(first: Reading, last: Reading) -> float:
    """Return the mean number of cores used by other processes between two readings."""
    elapsed = last.at - first.at
    used = (last.busy - first.busy) - (last.own - first.own)
    return round(max(used, 0.0) / elapsed, 2) if elapsed > 0 else 0.0


def watch() -> float:
    """Return the number of cores used by other processes, measured over SHORTEST seconds."""
    meter = Meter()
    time.sleep(SHORTEST)
    return meter.load()


def _busy() -> float:
    """Busy seconds since the start of the system of the cores this process may use; 0 if unknown."""
    try:
        with open(_STAT, encoding="ascii") as file:
            rows = [line.split() for line in file if line.startswith("cpu")]
    except OSError:
        return 0.0
    allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = sum(int(row[1 + column]) for row in rows if row[0] in allowed for column in _BUSY if 1 + column < len(row))
    return ticks / os.sysconf("SC_CLK_TCK")


def _own(children: Iterable[int]) -> float:
    """Seconds of processor time of this process, of its ended children, and of `children`."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_of, children))


def _of(process: int) -> float:
    """Seconds of processor time of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before may contain spaces
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
