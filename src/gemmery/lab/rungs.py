"""ladder(): every rung at a few sizes, checked, and timed beside NumPy."""

from __future__ import annotations

from collections.abc import Sequence

from gemmery.bench.record import Run
from gemmery.lab.event import OnEvent, ignore


def ladder(
    rungs: Sequence[str] = (),
    sizes: Sequence[int] = (512, 1024, 2048),
    dtype: str = "f32",
    threads: int = 0,
    seconds: float = 5.0,
    on_event: OnEvent = ignore,
) -> Run:
    """Climb the ladder: each rung on square matrices, checked against the reference and timed beside NumPy.

    `rungs` are names, () for every one. `threads` is what the threaded rungs may use, 0 for every core; the
    others run on one. `seconds` is how long one call of a rung may take: a slower one is not run but recorded
    with the reason in `refused`. `versus` of a measurement holds "numpy" and the rung's parent. A rung outside
    its error bound has `error` > 1.

    >>> run = ladder(["simd_row", "packed"], sizes=[256])  # doctest: +SKIP

    Raises ArgumentError for an unknown rung, dtype or size below 1.
    """
    raise NotImplementedError
