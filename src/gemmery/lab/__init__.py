"""The commands as functions that return records and print nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gemmery.errors import not_installed

if TYPE_CHECKING:
    from gemmery.lab.asked import emulated_card, ordinal, registry
    from gemmery.lab.chain import chain
    from gemmery.lab.emulated import OnRung, emulated_ladder
    from gemmery.lab.event import Event, OnEvent
    from gemmery.lab.exhibits import emulated_exhibit, exhibit, exhibited_on, predicted
    from gemmery.lab.health import Finding, doctor, prune
    from gemmery.lab.rungs import ladder
    from gemmery.lab.suites import bench
    from gemmery.lab.sweeps import emulated_sweep, sweep
    from gemmery.ladder.diff import Difference, diff

_HOME = {
    **dict.fromkeys(("emulated_card", "ordinal", "registry"), "gemmery.lab.asked"),
    **dict.fromkeys(("OnRung", "emulated_ladder"), "gemmery.lab.emulated"),
    **dict.fromkeys(("Event", "OnEvent"), "gemmery.lab.event"),
    **dict.fromkeys(("emulated_exhibit", "exhibit", "exhibited_on", "predicted"), "gemmery.lab.exhibits"),
    "chain": "gemmery.lab.chain",
    **dict.fromkeys(("Finding", "doctor", "prune"), "gemmery.lab.health"),
    "ladder": "gemmery.lab.rungs",
    "bench": "gemmery.lab.suites",
    **dict.fromkeys(("emulated_sweep", "sweep"), "gemmery.lab.sweeps"),
    **dict.fromkeys(("Difference", "diff"), "gemmery.ladder.diff"),
}

__all__ = [
    "Difference",
    "Event",
    "Finding",
    "OnEvent",
    "OnRung",
    "bench",
    "chain",
    "diff",
    "doctor",
    "emulated_card",
    "emulated_exhibit",
    "emulated_ladder",
    "emulated_sweep",
    "exhibit",
    "exhibited_on",
    "ladder",
    "ordinal",
    "predicted",
    "prune",
    "registry",
    "sweep",
]


if not TYPE_CHECKING:  # with it type checkers would accept any name

    def __getattr__(name):
        """Load a public name when it is first used: `ladder` needs nothing of the emulator."""
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'gemmery.lab' has no attribute {name!r}")
        try:
            value = getattr(import_module(home), name)
        except ModuleNotFoundError as error:
            raise not_installed(error, f"gemmery.lab.{name}") from error
        globals()[name] = value
        return value
