"""What the commands do, as functions that return records and print nothing."""

from gemmery.lab.event import Event, OnEvent
from gemmery.lab.exhibits import exhibit, exhibited_on, predicted
from gemmery.lab.gpu.chain import chain
from gemmery.lab.health import Finding, doctor
from gemmery.lab.inspection import inspect
from gemmery.lab.rungs import ladder, registry
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
    "bench",
    "chain",
    "diff",
    "doctor",
    "exhibit",
    "exhibited_on",
    "inspect",
    "ladder",
    "predicted",
    "registry",
    "sweep",
]
