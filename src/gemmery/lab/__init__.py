"""The commands as functions that return records and print nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmery import load_lazily

if TYPE_CHECKING:
    from gemmery.lab.asked import emulated_card as emulated_card
    from gemmery.lab.asked import ordinal as ordinal
    from gemmery.lab.asked import registry as registry
    from gemmery.lab.climb import ladder as ladder
    from gemmery.lab.emulated_rungs import OnRung as OnRung
    from gemmery.lab.emulated_rungs import emulated_ladder as emulated_ladder
    from gemmery.lab.event import OnEvent as OnEvent
    from gemmery.lab.event import RunEvent as RunEvent
    from gemmery.lab.exhibit_runs import emulated_exhibit as emulated_exhibit
    from gemmery.lab.exhibit_runs import exhibit as exhibit
    from gemmery.lab.exhibit_runs import exhibited_on as exhibited_on
    from gemmery.lab.exhibit_runs import predicted as predicted
    from gemmery.lab.health import Diagnosis as Diagnosis
    from gemmery.lab.health import doctor as doctor
    from gemmery.lab.health import prune as prune
    from gemmery.lab.predicted_rungs import predicted_ladder as predicted_ladder
    from gemmery.lab.suites import bench as bench
    from gemmery.lab.sweeps import emulated_sweep as emulated_sweep
    from gemmery.lab.sweeps import sweep as sweep
    from gemmery.lab.verification import Verification as Verification
    from gemmery.lab.verification import verify as verify
    from gemmery.lab.workload import chain as chain
    from gemmery.ladder.diff import Difference as Difference
    from gemmery.ladder.diff import diff as diff

_HOMES = {
    "gemmery.lab.asked": (
        "emulated_card",
        "ordinal",
        "registry",
    ),
    "gemmery.lab.workload": ("chain",),
    "gemmery.lab.emulated_rungs": (
        "OnRung",
        "emulated_ladder",
    ),
    "gemmery.lab.event": (
        "RunEvent",
        "OnEvent",
    ),
    "gemmery.lab.exhibit_runs": (
        "emulated_exhibit",
        "exhibit",
        "exhibited_on",
        "predicted",
    ),
    "gemmery.lab.health": (
        "Diagnosis",
        "doctor",
        "prune",
    ),
    "gemmery.lab.climb": ("ladder",),
    "gemmery.lab.verification": (
        "Verification",
        "verify",
    ),
    "gemmery.lab.predicted_rungs": ("predicted_ladder",),
    "gemmery.lab.suites": ("bench",),
    "gemmery.lab.sweeps": (
        "emulated_sweep",
        "sweep",
    ),
    "gemmery.ladder.diff": (
        "Difference",
        "diff",
    ),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)  # noqa: PLE0605

if not TYPE_CHECKING:  # with it type checkers would accept any name
    __getattr__ = load_lazily(__name__, _HOMES)  # `ladder` needs nothing of the emulator
