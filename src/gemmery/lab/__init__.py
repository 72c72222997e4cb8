"""What the commands do, as functions that return records and print nothing."""

from gemmery.lab.event import Event, OnEvent
from gemmery.lab.health import Finding, doctor
from gemmery.lab.rungs import ladder
from gemmery.lab.suites import bench
from gemmery.lab.sweeps import EXPERIMENTS, sweep

__all__ = ["EXPERIMENTS", "Event", "Finding", "OnEvent", "bench", "doctor", "ladder", "sweep"]
