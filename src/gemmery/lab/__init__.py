"""What the commands do, as functions that return records and print nothing."""

from gemmery.lab.emulated import OnRung, emulated_card, emulated_ladder
from gemmery.lab.event import Event, OnEvent
from gemmery.lab.exhibits import emulated_exhibit, exhibit, exhibited_on, predicted
from gemmery.lab.gpu.chain import chain
from gemmery.lab.health import Finding, doctor
from gemmery.lab.inspection import inspect
from gemmery.lab.rungs import check_of_gpu, ladder, on_gpu, registry
from gemmery.lab.suites import bench
from gemmery.lab.sweeps import AT_ONE_SIZE, EXPERIMENTS, sweep
from gemmery.ladder.diff import Difference, diff
from gemmery.ladder.inspection import Inspection

__all__ = [
    "AT_ONE_SIZE",
    "EXPERIMENTS",
    "Difference",
    "Event",
    "Finding",
    "Inspection",
    "OnEvent",
    "OnRung",
    "bench",
    "chain",
    "check_of_gpu",
    "diff",
    "doctor",
    "emulated_card",
    "emulated_exhibit",
    "emulated_ladder",
    "exhibit",
    "exhibited_on",
    "inspect",
    "ladder",
    "on_gpu",
    "predicted",
    "registry",
    "sweep",
]
