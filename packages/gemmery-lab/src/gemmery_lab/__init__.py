"""The commands as functions that return records and print nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmery import load_lazily

if TYPE_CHECKING:
    from gemmery.lab.climb import ladder as ladder
    from gemmery.lab.climb import sweep as sweep
    from gemmery.lab.event import RunEvent as RunEvent
    from gemmery.lab.exhibit_runs import emulated_exhibit as emulated_exhibit
    from gemmery.lab.exhibit_runs import exhibit as exhibit
    from gemmery.lab.exhibit_runs import predicted as predicted
    from gemmery.lab.health import Diagnosis as Diagnosis
    from gemmery.lab.health import doctor as doctor
    from gemmery.lab.health import prune as prune
    from gemmery.lab.launches import chain as chain
    from gemmery.lab.on_emulator import emulated_ladder as emulated_ladder
    from gemmery.lab.on_emulator import emulated_sweep as emulated_sweep
    from gemmery.lab.on_emulator import predicted_ladder as predicted_ladder
    from gemmery.lab.suites import bench as bench
    from gemmery.lab.verification import verify as verify
    from gemmery.ladder.diff import diff as diff

_HOMES = {
    "gemmery.lab.launches": ("chain",),
    "gemmery.lab.on_emulator": ("emulated_ladder", "emulated_sweep", "predicted_ladder"),
    "gemmery.lab.event": ("RunEvent",),
    "gemmery.lab.exhibit_runs": ("emulated_exhibit", "exhibit", "predicted"),
    "gemmery.lab.health": ("Diagnosis", "doctor", "prune"),
    "gemmery.lab.verification": ("verify",),
    "gemmery.lab.suites": ("bench",),
    "gemmery.lab.climb": ("ladder", "sweep"),
    "gemmery.ladder.diff": ("diff",),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)  # noqa: PLE0605

if not TYPE_CHECKING:  # with it type checkers would accept any name
    __getattr__ = load_lazily(__name__, _HOMES)  # `ladder` needs nothing of the emulator
