"""The clock, power and power limit of a device, and the driver's version, from the driver's management library.

Reference: NVIDIA, NVML API. The library comes with the driver; without it all values are 0.
"""

from __future__ import annotations

import statistics
from functools import lru_cache
from typing import Any

from gemmery.cuda import driver

_SM_CLOCK = 1  # NVML_CLOCK_SM
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT
_NOT_FOUND = "the driver's libnvidia-ml.so.1 is not found"


class Monitor:
    """Reads a device's clock while it works, and its power if `reads_power`; `missing` is the reason if it cannot."""

    def __init__(self, ordinal: int = 0) -> None:
        self._clocks: list[int] = []
        self._watts: list[float] = []
        self.reads_power = False
        self._handle, self.missing = 0, _NOT_FOUND
        nvml = _library()
        if nvml is not None:
            uuid = driver.uuid(ordinal)
            try:
                self._handle, self.missing = nvml.device_get_handle_by_uuid(uuid), ""
            except nvml.NvmlError as error:
                self.missing = f"NVML cannot find {uuid}: {error}"

    def look(self) -> None:
        """Record the current clock, and the power."""
        clock = self._number("device_get_clock_info", _SM_CLOCK)
        if clock:
            self._clocks.append(clock)
        watts = self._power() if self.reads_power else 0.0
        if watts:
            self._watts.append(watts)

    def clock(self) -> int:
        """Return the median of the clocks recorded since the last call, in MHz; 0 if there are none."""
        median = round(statistics.median(self._clocks)) if self._clocks else 0
        self._clocks.clear()
        return median

    def power(self) -> float:
        """Return the mean of the watts recorded since the last call; 0 if there are none."""
        mean = statistics.fmean(self._watts) if self._watts else 0.0
        self._watts.clear()
        return mean

    def forget(self) -> None:
        """Drop what was recorded since the last calls."""
        self._clocks.clear()
        self._watts.clear()

    @property
    def most_clock(self) -> int:
        """The highest clock of the multiprocessors, in MHz."""
        return self._number("device_get_max_clock_info", _SM_CLOCK)

    @property
    def power_limit(self) -> float:
        """The device's current power limit in watts."""
        return self._number("device_get_enforced_power_limit") / 1e3

    def _power(self) -> float:
        """Return the watts of this moment; the usual reading is a mean over a second."""
        nvml = _library()
        if self.missing or nvml is None:
            return 0.0
        field = nvml.FieldValue(1)
        field.field_id = _POWER_INSTANT
        try:
            nvml.device_get_field_values(self._handle, field)
        except nvml.NvmlError:
            return 0.0
        return float(field.value["ui_val"][0]) / 1e3 if int(field.nvml_return) == 0 else 0.0

    def _number(self, name: str, *options: int) -> int:
        return 0 if self.missing else int(_result_of(name, self._handle, *options) or 0)


@lru_cache
def _library() -> Any:
    """Return the bindings, initialized; None without the driver's library or in bindings older than 13.2."""
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
    return str(_result_of("system_get_driver_version") or "")


def _result_of(name: str, *arguments: object) -> Any:
    """Return the result of a function of the library; None without the library, and where it fails."""
    nvml = _library()
    if nvml is None:
        return None
    try:
        return getattr(nvml, name)(*arguments)
    except nvml.NvmlError:
        return None
