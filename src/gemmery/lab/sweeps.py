"""sweep(): one quantity varied, everything else held: the experiments behind the ladder's curves."""

from __future__ import annotations

from collections.abc import Sequence

from gemmery.bench.record import Run
from gemmery.errors import ArgumentError
from gemmery.lab.event import OnEvent, ignore
from gemmery.lab.rungs import climb
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import Rung, find

EXPERIMENTS = ("size", "block")
SIZES = (64, 128, 256, 512, 1024, 2048)
SIZE_RUNGS = ("simd_row", "simd_blocked", "direct", "packed")
BLOCK_RUNG, BLOCK_SIZE = "simd_blocked", 2048


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
    if experiment not in EXPERIMENTS:
        raise ArgumentError(f"experiment {experiment!r} is not known; known: {', '.join(EXPERIMENTS)}")
    if experiment == "size":
        chosen = [find(CPU, name) for name in rungs or SIZE_RUNGS]
        return climb("sweep_size", [(rung, {}) for rung in chosen], sizes or SIZES, dtype, threads, seconds, on_event)
    if len(sizes) > 1:
        raise ArgumentError(f"sizes {list(sizes)}: the block side is varied at one size; give one")
    n = sizes[0] if sizes else BLOCK_SIZE
    configs = [
        (rung, {"block": side}) for rung in (blocked(name) for name in rungs or [BLOCK_RUNG]) for side in sides(rung, n)
    ]
    return climb("sweep_block", configs, [n], dtype, threads, seconds, on_event)


def blocked(name: str) -> Rung:
    """The rung called `name`, which must have a block side to vary."""
    rung = find(CPU, name)
    if "block" not in rung.space:
        having = ", ".join(other.name for other in CPU if "block" in other.space)
        raise ArgumentError(f"rung {name!r} has no block to vary; these have: {having}")
    return rung


def sides(rung: Rung, n: int) -> tuple[int, ...]:
    """The block sides worth trying at size n: those of the rung's space up to the first that holds the whole matrix."""
    smaller = tuple(side for side in sorted(rung.space["block"]) if side < n)
    whole = tuple(side for side in sorted(rung.space["block"]) if side >= n)[:1]
    return smaller + whole
