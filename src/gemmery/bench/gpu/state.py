"""A device's driver version, power limit and clocks, from the driver's management library.

Reference: NVIDIA, NVML API. The library comes with the driver; without it all values are 0.
"""

from __future__ import annotations

import ctypes
import statistics
from functools import lru_cache

from gemmery.bench.record import Gpu
from gemmery.cuda import driver, nvrtc

_SM_CLOCK = 1  # NVML_CLOCK_SM


class Monitor:
    """Reads a device's clock while it works; `missing` is the reason if it cannot, else ""."""

    def __init__(self, ordinal: int = 0) -> None:
        self._device = ctypes.c_void_p()
        self._seen: list[int] = []
        self.missing = "the driver's libnvidia-ml.so.1 is not found"
        library = _library()
        if library is not None:
            named = driver.uuid(ordinal).encode()
            status = library.nvmlDeviceGetHandleByUUID(named, ctypes.byref(self._device))
            self.missing = f"NVML cannot find {named.decode()} (status {status})" if status else ""

    def look(self) -> None:
        """Record the current clock."""
        clock = self._number("nvmlDeviceGetClockInfo", _SM_CLOCK)
        if clock:
            self._seen.append(clock)

    def seen(self) -> int:
        """Return the median of the clocks recorded since the last call, in MHz; 0 if there are none."""
        found = round(statistics.median(self._seen)) if self._seen else 0
        self._seen.clear()
        return found

    @property
    def most_clock(self) -> int:
        """The highest clock of the multiprocessors, in MHz."""
        return self._number("nvmlDeviceGetMaxClockInfo", _SM_CLOCK)

    @property
    def power_limit(self) -> float:
        """The device's current power limit in watts."""
        return self._number("nvmlDeviceGetEnforcedPowerLimit") / 1e3

    def _number(self, name: str, *options: int) -> int:
        found = ctypes.c_uint()
        library = _library()
        if self.missing or library is None or getattr(library, name)(self._device, *options, ctypes.byref(found)):
            return 0
        return found.value


@lru_cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def driver_version() -> str:
    """Return the driver's version, "580.95.05"; "" if NVML is missing."""
    library, text = _library(), ctypes.create_string_buffer(96)
    if library is None or library.nvmlSystemGetDriverVersion(text, len(text)):
        return ""
    return text.value.decode()


def describe(ordinal: int = 0) -> Gpu:
    """Return the fingerprint of a device.

    >>> describe().name  # doctest: +SKIP
    'NVIDIA H200'

    Raises DeviceError if there is no such device.
    """
    found, monitor = driver.device(ordinal), Monitor(ordinal)
    return Gpu(
        name=found.name,
        capability=found.capability,
        sms=found.sms,
        l2=found.l2,
        clock_mhz=monitor.most_clock or round(found.clock * 1e3),
        power_w=monitor.power_limit,
        driver=driver_version(),
        cuda=driver.version(),
        nvrtc=nvrtc.version(),
    )
