"""The ladder on a device: every rung at a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gemmery.bench.record import Measurement, Run
from gemmery.bench.work import Work
from gemmery.lab.event import OnEvent
from gemmery.lab.gpu.level import GpuLevel, suited
from gemmery.lab.gpu.session import GpuSession
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung


def climb(
    suite: str,
    chosen: Sequence[tuple[Rung, Mapping[str, int]]],
    sizes: Sequence[int],
    like: Work,
    device: int,
    seconds: float,
    on_event: OnEvent,
    shape: Callable[[Rung, int, Work, str], Work] = suited,
    store: Path | None = None,
) -> Run:
    """Measure each (rung, config) at each size, smallest first, in the types of `like`; `shape` makes the product.

    Raises DeviceError if there is no such device.
    """
    session = GpuSession(len(chosen) * len(sizes), on_event, device, store)
    before: dict[int, Measurement] = {}
    for n in sorted(sizes):
        levels: dict[Work, GpuLevel] = {}
        try:
            for index, (rung, config) in enumerate(chosen):
                work = shape(rung, n, like, session.device)
                session.begin(f"{rung.name}, {work}")
                if work not in levels:
                    levels[work] = GpuLevel(session, suite, work, seconds, CUDA)
                m = levels[work].measure(rung, config, before.get(index))
                if not m.refused:
                    before[index] = m
                session.end(m)
        finally:  # also after Ctrl-C: the rungs so far were timed in turn with them
            for level in levels.values():
                session.add(*level.rivals())
    return session.run
