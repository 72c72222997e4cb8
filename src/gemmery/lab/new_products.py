"""Products of shapes that a process never met: with an empty cache, with a warm one, and met before."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from gemmery.bench import new_shapes as shapes
from gemmery.bench import timing
from gemmery.bench.new_shapes import COMPARED, EMPTY, FIRST, MET, REST, WARM, WORST
from gemmery.bench.record import Measurement
from gemmery.bench.work import Work
from gemmery.errors import RefusedError
from gemmery.lab import measurements, new_process
from gemmery.lab.contest import PRODUCT, Task
from gemmery.lab.session import Session

ROUNDS, LEAST = 9, 3  # rounds, and the least number of them however long they take
_START = "import sys; sys.path.insert(0, {!r}); from gemmery.lab.passes import main; main({!r}, {!r}, {!r})"
Times = Mapping[str, list[float]]


def new_shapes(session: Session, task: Task) -> list[Measurement]:
    """Time products of new shapes in new processes, next to NumPy, or cuBLAS through PyTorch, whose tensors they take.

    Raises RefusedError on a GPU without PyTorch among the rivals.
    """
    device = session.backend.device
    rivals = {rival.name: rival.runs for rival in task.rivals if device == "cpu" or rival.name == "cublas"}
    if device != "cpu" and not rivals:
        raise RefusedError("the products are of PyTorch's tensors; install torch and keep cublas among the rivals")
    plain = session.backend.blank(task.suite, PRODUCT, task.work, task.threads)
    rows = totals(plain, task.work, tuple(rivals), task.seconds, device)
    return [replace(m, note=rivals.get(m.kernel, "")) for m in rows]


def totals(
    plain: Measurement, work: Work, rivals: Sequence[str], seconds: float, device: str = "cpu"
) -> list[Measurement]:
    """Time the products of a work in new processes, and return records like `plain`.

    A round is one process with an empty cache and one with a cache that has met these products; each also runs the
    rival. There are fewer rounds if they take longer than `seconds`.
    """
    threads = plain.threads
    plain = replace(plain, flops=shapes.flops(work), bytes=0, case="")
    measured: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as warm:
        run(work, threads, warm, device)
        spent = 0.0
        for index in range(ROUNDS):
            if index >= LEAST and spent > seconds:
                break
            with tempfile.TemporaryDirectory() as empty:
                times = {EMPTY: run(work, threads, empty, device), WARM: run(work, threads, warm, device)}
            for label, value in _labelled(times).items():
                measured.setdefault(label, {})[index] = value
            spent += sum(sum(map(sum, each.values())) for each in times.values())
    rival = next(iter(rivals), "")
    theirs = measured.pop("")
    rows = []
    for label, rounds in measured.items():
        tally = timing.tally({label: rounds, rival: theirs} if rival and label in COMPARED else {label: rounds})
        rows.append(measurements.timed(replace(plain, case=label), tally.timings[label], tally.versus))
    if rival:
        rows.append(measurements.timed(replace(plain, kernel=rival), timing.tally({rival: theirs}).timings[rival]))
    return rows


def _labelled(times: Mapping[str, Times]) -> dict[str, float]:
    """Return the seconds of one round by label; "" is the rival."""
    seconds = {}
    for state, each in times.items():
        first, new, worst = each["first"][0], each["new"][0], each["worst"][0]
        seconds[state] = first + new
        seconds |= {f"{state}, {FIRST}": first, f"{state}, {REST}": new, f"{state}, {WORST}": worst}
    seconds[MET] = statistics.median(times[WARM]["again"])
    return {**seconds, "": statistics.median(times[WARM]["rival"])}


def run(work: Work, threads: int, cache: str, device: str = "cpu") -> dict[str, list[float]]:
    """Return the seconds of the passes of a new process with the cache folder `cache`.

    Raises GemmeryError with the last line of the process if it fails.
    """
    rest = timing.IDLE_SECONDS if threads > 1 else 0.0
    script = _START.format(new_process.SOURCES, asdict(work), device, rest)
    times = new_process.run_script(script, "products of new shapes", cache, threads)
    return {name: value if isinstance(value, list) else [value] for name, value in times.items()}
