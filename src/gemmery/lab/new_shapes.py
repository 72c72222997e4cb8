"""Products of shapes that a process never met: with an empty cache, with a warm one, and met before."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gemmery import config
from gemmery.bench import libraries, timing
from gemmery.bench import new_shapes as shapes
from gemmery.bench.new_shapes import COMPARED, EMPTY, FIRST, MET, REST, WARM, WORST
from gemmery.bench.record import Measurement
from gemmery.bench.work import Work
from gemmery.errors import GemmeryError
from gemmery.lab import results

OURS = "gm.matmul"
ROUNDS, LEAST = 9, 3  # rounds, and the least number of them however long they take
_SOURCES = str(Path(__file__).parents[2])
_START = "import sys; sys.path.insert(0, {!r}); from gemmery.lab.passes import main; main({!r}, {!r}, {!r})"
_CLEARED = (*libraries.STEERING, "GEMMERY_", "PYTHONDONTWRITEBYTECODE")
Times = Mapping[str, list[float]]


def new_shapes(
    plain: Measurement, work: Work, threads: int, rivals: Sequence[str], seconds: float, device: str = "cpu"
) -> list[Measurement]:
    """Time the products of a work in new processes, and return records like `plain`.

    A round is one process with an empty cache and one with a cache that has met these products; each also runs the
    rival. There are fewer rounds if they take longer than `seconds`.
    """
    plain = replace(plain, flops=shapes.flops(work), bytes=0, case="")
    taken: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as warm:
        run(work, threads, warm, device)
        spent = 0.0
        for index in range(ROUNDS):
            if index >= LEAST and spent > seconds:
                break
            with tempfile.TemporaryDirectory() as empty:
                times = {EMPTY: run(work, threads, empty, device), WARM: run(work, threads, warm, device)}
            for label, value in _labelled(times).items():
                taken.setdefault(label, {})[index] = value
            spent += sum(sum(sum(one) for one in each.values()) for each in times.values())
    rival = next(iter(rivals), "")
    theirs = taken.pop("")
    rows = []
    for label, rounds in taken.items():
        found = timing.tally({label: rounds, rival: theirs} if rival and label in COMPARED else {label: rounds})
        rows.append(results.timed(replace(plain, case=label), found.timings[label], (0.0, 0.0), found.versus))
    if rival:
        found = timing.tally({rival: theirs})
        rows.append(results.timed(replace(plain, kernel=rival), found.timings[rival], (0.0, 0.0)))
    return rows


def _labelled(times: Mapping[str, Times]) -> dict[str, float]:
    """Return the seconds of one round by label; "" is the rival."""
    found = {}
    for state, each in times.items():
        first, new, worst = each["first"][0], each["new"][0], each["worst"][0]
        found[state] = first + new
        found |= {f"{state}, {FIRST}": first, f"{state}, {REST}": new, f"{state}, {WORST}": worst}
    found[MET] = statistics.median(times[WARM]["again"])
    return {**found, "": statistics.median(times[WARM]["rival"])}


def run(work: Work, threads: int, cache: str, device: str = "cpu") -> dict[str, list[float]]:
    """Return the seconds of the passes of a new process with the cache folder `cache`.

    Raises GemmeryError with the last line of the process if it fails.
    """
    rest = timing.IDLE_SECONDS if threads > 1 else 0.0
    number = {name: str(threads) for name in (*libraries.THREADS, "GEMMERY_NUM_THREADS") if threads}
    done = subprocess.run(
        [sys.executable, "-c", _START.format(_SOURCES, asdict(work), device, rest)],
        env=config.child_environment(_CLEARED, {**number, "GEMMERY_CACHE_DIR": cache}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise GemmeryError(f"products of new shapes failed in their process: {last[0]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: value if isinstance(value, list) else [value] for name, value in found.items()}
