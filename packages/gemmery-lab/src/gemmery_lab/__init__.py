"""The commands as functions that return records and print nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmery import load_lazily

if TYPE_CHECKING:
    from gemmery.ladder.diff import diff as diff
    from gemmery_lab.climb import ladder as ladder
    from gemmery_lab.climb import sweep as sweep
    from gemmery_lab.exhibit_runs import emulated_exhibit as emulated_exhibit
    from gemmery_lab.exhibit_runs import exhibit as exhibit
    from gemmery_lab.health import Diagnosis as Diagnosis
    from gemmery_lab.health import doctor as doctor
    from gemmery_lab.health import prune as prune
    from gemmery_lab.launches import chain as chain
    from gemmery_lab.measure.record import RunEvent as RunEvent
    from gemmery_lab.on_emulator import emulated_ladder as emulated_ladder
    from gemmery_lab.on_emulator import emulated_sweep as emulated_sweep
    from gemmery_lab.on_emulator import predicted_ladder as predicted_ladder
    from gemmery_lab.over_ranks import distributed as distributed
    from gemmery_lab.suites import bench as bench
    from gemmery_lab.tuning import tune as tune
    from gemmery_lab.verification import verify as verify

_HOMES = {
    "gemmery_lab.launches": ("chain",),
    "gemmery_lab.on_emulator": ("emulated_ladder", "emulated_sweep", "predicted_ladder"),
    "gemmery_lab.measure.record": ("RunEvent",),
    "gemmery_lab.exhibit_runs": ("emulated_exhibit", "exhibit"),
    "gemmery_lab.health": ("Diagnosis", "doctor", "prune"),
    "gemmery_lab.tuning": ("tune",),
    "gemmery_lab.verification": ("verify",),
    "gemmery_lab.over_ranks": ("distributed",),
    "gemmery_lab.suites": ("bench",),
    "gemmery_lab.climb": ("ladder", "sweep"),
    "gemmery.ladder.diff": ("diff",),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)  # noqa: PLE0605

if not TYPE_CHECKING:  # with it type checkers would accept any name
    __getattr__ = load_lazily(__name__, _HOMES)  # `ladder` needs nothing of the emulator
