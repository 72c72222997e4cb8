"""What a command says about a launch that takes long: how much of it has run, and about how long the rest takes."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

FIRST = 5.0  # seconds before the first line; each further one comes after four times as long
LONG = 20.0  # seconds left from which on a line is written
UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


def announcer(write: Callable[[str], object], clock: Callable[[], float] = monotonic) -> Callable[[int, int], None]:
    """Return what a launch calls before each chunk with the blocks that have run and all blocks of the grid.

    >>> times = iter([0.0, 10.0])
    >>> call = announcer(lambda text: print(text.partition("; ")[2], end=""), lambda: next(times))
    >>> for done in (0, 5):
    ...     call(done, 1000)
    the others take about 33 minutes. Ctrl-C ends this; a smaller --grid finds most faults, too
    """
    begin, after = -1.0, FIRST

    def announce(done: int, blocks: int) -> None:
        nonlocal begin, after
        now = clock()
        if begin < 0:
            begin = now
        past = now - begin
        if not done or past < after:
            return
        after = 4 * past
        rest = past / done * (blocks - done)
        if rest >= LONG:
            write(
                f"gemmery: {done:,} of {blocks:,} blocks have run in {_written(past)}; the others take about "
                f"{_written(rest)}. Ctrl-C ends this; a smaller --grid finds most faults, too\n"
            )

    return announce


def _written(seconds: float) -> str:
    for size, unit in UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} seconds"
