"""One run of a command on a GPU: its stream, its rivals, and the limits of the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gemmery.bench import cublas, device_roofline, machine
from gemmery.bench.cublas import Caller, Placed
from gemmery.bench.record import Measurement
from gemmery.bench.replays import Put, replays
from gemmery.bench.resident import Resident
from gemmery.bench.roofline import Bandwidth
from gemmery.bench.timing import Ratio, Sample, Timing
from gemmery.bench.work import Work
from gemmery.cuda import driver
from gemmery.cuda.driver import Stream
from gemmery.cuda.nvml import Monitor
from gemmery.errors import DeviceError
from gemmery.lab import results
from gemmery.lab.event import OnEvent
from gemmery.lab.session import Session

ON_CUDA_CORES = ("simt_", "gemv_")  # prefixes of rungs that do not use tensor cores
NO_RIVAL = "no cuBLAS to compare with: pip install torch, or cupy-cuda13x"


@dataclass(frozen=True)
class Limits:
    """The limits of a kernel: GFLOP/s of its unit, GB/s of memory."""

    peak: float
    bandwidth: Bandwidth


class GpuSession(Session):
    """State of one run on a device.

    Raises DeviceError if there is none; the message tells what is missing.
    """

    def __init__(self, total: int, on_event: OnEvent, device: int, store: Path | None = None) -> None:
        reason = driver.missing()
        if reason:
            raise DeviceError(f"device cuda:{device}: {reason}")
        super().__init__(total, on_event, machine.gpu_fingerprint(device), store)
        self.stream = Stream(device)
        self.monitor = Monitor(device)
        self._unit_peaks: dict[tuple[str, str], float] = {}
        self._bandwidth: Bandwidth | None = None

    @property
    def device(self) -> str:
        """The name of the device in a View or a Problem."""
        return f"cuda:{self.stream.ordinal}"

    def sampler(self, put: Put, sets: int) -> Sample:
        """Return a sampler of `put` that records clocks."""
        return replays(put, self.stream, sets, self.monitor.look)

    def resident(self, work: Work) -> Resident:
        """Copy the operands of `work` to the device."""
        return Resident(work, self.stream)

    def rival(self, placed: Placed, resident: Resident) -> Sample:
        """Return a sampler of a rival's product that records clocks."""
        return placed.sample(resident, self.monitor.look)

    def installed(self, wanted: Sequence[str] = ()) -> tuple[Caller, ...]:
        """Return the installed rivals among these names; () means all."""
        chosen = [cublas.find(name) for name in wanted] or cublas.RIVALS
        return tuple(rival for rival in chosen if not rival.missing())

    def unit(self, kernel: str, work: Work) -> tuple[str, str]:
        """Return the element type and the unit whose peak bounds a kernel."""
        tensor, capability = not kernel.startswith(ON_CUDA_CORES), driver.device(self.stream.ordinal).capability
        return device_roofline.unit(work.precision or work.dtype, tensor, capability)

    def blank(self, suite: str, kernel: str, work: Work, **known: Any) -> Measurement:
        """Return a record of a kernel without times, as for a refusal."""
        return results.blank(suite, kernel, work, 0, unit=self.unit(kernel, work)[1], **known)

    def kernel_limits(self, kernel: str, work: Work) -> Limits:
        """Return the limits of a kernel; the first call measures them."""
        dtype, unit = self.unit(kernel, work)
        if (dtype, unit) not in self._unit_peaks:
            self.begin(f"peak of {dtype} on {unit}")
            self._unit_peaks[dtype, unit] = device_roofline.peak(dtype, unit, self.stream)
        if self._bandwidth is None:
            self.begin("bandwidth of the device's memory")
            self._bandwidth = device_roofline.bandwidth(self.stream)
        return Limits(self._unit_peaks[dtype, unit], self._bandwidth)

    def timed(
        self, plain: Measurement, found: Timing, work: Work, versus: Mapping[str, Ratio] | None = None, clock: int = 0
    ) -> Measurement:
        """Return the record with its times, its ratios to others, the limits of its kernel and its clock."""
        limits = self.kernel_limits(plain.kernel, work)
        made = results.timed(plain, found, (limits.peak, limits.bandwidth.read), versus)
        return replace(made, copy_gbs=limits.bandwidth.copy, clock_mhz=clock)
