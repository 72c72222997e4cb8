"""The command that measures the constants of the CPU's model: tune."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

from gemmery.errors import ArgumentError
from gemmery_lab.cli.parser import INTERRUPTED, Action, Json, app, bar, option, texts

if TYPE_CHECKING:
    from gemmery_lab.tuning import Tuning


@app.command(**texts("tune"))
def tune(
    minutes: Annotated[float, option("tune.minutes")] = 10.0,
    fresh: Annotated[bool, option("tune.fresh", "--fresh")] = False,
    json: Json = False,
) -> Action:
    """Measure what gemmery otherwise takes from a model of the caches, and write a table that products then use.

    Sizes of blocks, the limits between rungs, and the work that is worth another thread. No bit of a result depends on
    the table. Run it while nothing else runs. After Ctrl-C the next run goes on where this one was.
    """
    if not 0 < minutes <= _MOST:
        raise ArgumentError(f"--minutes {minutes:g}: it must be above 0 and at most {_MOST}")
    return partial(_tune, minutes, fresh, json)


_MOST = 24 * 60


def _tune(minutes: float, fresh: bool, json: bool) -> int:
    import gemmery_lab as lab
    from gemmery_emulator.pages.writing import as_json

    try:
        with bar() as progress:
            tuning = lab.tune(minutes, fresh, lambda what, done, total: progress(done, total, what))
    except KeyboardInterrupt:
        sys.stderr.write("gemmery: interrupted; `gemmery tune` goes on where it was\n")
        return INTERRUPTED
    sys.stdout.write(f"{as_json(tuning) if json else in_words(tuning)}\n")
    return 0


def in_words(tuning: Tuning) -> str:
    """Return a line for each question, what makes them doubtful, and where the table is."""
    from gemmery import load
    from gemmery.cpu import target

    lines = []
    for each in tuning.outcomes:
        changes = (
            f"{key} {old:g}" + f" -> {each.after[key]:g}" * (old != each.after[key]) for key, old in each.before.items()
        )
        result = "not measured: give it more --minutes"
        if each.score:
            as_before = "kept; the best other one takes " * (each.before == each.after)
            result = f"{as_before}{each.score.time:.3f} ± {each.score.spread:.3f} of the time"
        lines.append(f"{each.question:30}{', '.join(changes):34}{result}")
    cores, busy = target.cores(), max((each.score.busy for each in tuning.outcomes if each.score), default=0.0)
    if busy > load.limit(cores):
        lines.append(f"other processes used up to {busy:.1f} of {cores} cores: measure again on a quiet machine")
    return "\n".join([*lines, f"{tuning.seconds:.0f} s; table: {tuning.path}"])
