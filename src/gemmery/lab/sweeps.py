"""sweep(): one quantity varied, everything else held: the experiments behind the ladder's curves."""

from __future__ import annotations

from collections.abc import Sequence

from gemmery.bench.record import Run
from gemmery.lab.event import OnEvent, ignore

EXPERIMENTS = ("size", "block")


def sweep(
    experiment: str,
    rungs: Sequence[str] = (),
    sizes: Sequence[int] = (),
    dtype: str = "f32",
    threads: int = 0,
    seconds: float = 5.0,
    on_event: OnEvent = ignore,
) -> Run:
    """Measure a curve: "size" is time against n for chosen rungs beside NumPy, "block" the side of `simd_blocked`.

    In "block", `sizes` is the one n it runs at (default 2048) and `Measurement.config["block"]` is what varies;
    mark it with the cache sizes of `Run.machine`. `rungs` () takes the experiment's own. `seconds` is the limit
    of one call, as in `ladder`. The measurements' `suite` is "sweep_size" or "sweep_block".

    >>> run = sweep("block", sizes=[1024])  # doctest: +SKIP

    Raises ArgumentError for an unknown experiment, rung, dtype or size.
    """
    raise NotImplementedError
