"""The clock and power limit of a device, and the driver's version, from the driver's management library.

Reference: NVIDIA, NVML API. The library comes with the driver; without it all values are 0.
"""

from __future__ import annotations

import statistics
from functools import lru_cache
from typing import Any

from gemmery.cuda import driver

_SM_CLOCK = 1  # NVML_CLOCK_SM
_NOT_FOUND = "the driver's libnvidia-ml.so.1 is not found"


class Monitor:
    """Reads a device's clock while it works; `missing` is the reason if it cannot, else ""."""

    def __init__(self, ordinal: int = 0) -> None:
        self._clocks: list[int] = []
        self._handle, self.missing = 0, _NOT_FOUND
        nvml = _library()
        if nvml is not None:
            uuid = driver.uuid(ordinal)
            try:
                self._handle, self.missing = nvml.device_get_handle_by_uuid(uuid), ""
            except nvml.NvmlError as error:
                self.missing = f"NVML cannot find {uuid}: {error}"

    def look(self) -> None:
        """Record the current clock."""
        clock = self._number("device_get_clock_info", _SM_CLOCK)
        if clock:
            self._clocks.append(clock)

    def clock(self) -> int:
        """Return the median of the clocks recorded since the last call, in MHz; 0 if there are none."""
        median = round(statistics.median(self._clocks)) if self._clocks else 0
        self._clocks.clear()
        return median

    @property
    def most_clock(self) -> int:
        """The highest clock of the multiprocessors, in MHz."""
        return self._number("device_get_max_clock_info", _SM_CLOCK)

    @property
    def power_limit(self) -> float:
        """The device's current power limit in watts."""
        return self._number("device_get_enforced_power_limit") / 1e3

    def _number(self, name: str, *options: int) -> int:
        nvml = _library()
        if self.missing or nvml is None:
            return 0
        try:
            return int(getattr(nvml, name)(self._handle, *options))
        except nvml.NvmlError:
            return 0


@lru_cache
def _library() -> Any:
    """Return the bindings, initialised; None without the driver's library or in bindings older than 13.2."""
    try:
        from cuda.bindings import nvml
    except ImportError:
        return None
    try:
        nvml.init_v2()
    except (RuntimeError, nvml.NvmlError):  # the first is that the library is missing
        return None
    return nvml


def driver_version() -> str:
    """Return the driver's version, "580.95.05"; "" if NVML is missing."""
    nvml = _library()
    if nvml is None:
        return ""
    try:
        return str(nvml.system_get_driver_version())
    except nvml.NvmlError:
        return ""
