"""Clocks and power of a device, read through a stand-in for NVML; without the library all are unknown."""

import sys

import pytest

from gemmery.cuda import nvml
from gemmery.cuda.nvml import Monitor


class NvmlError(Exception):
    """As the bindings raise it."""


class Library:
    """NVML with one device, whose clock is each of `clocks` in turn; an exception there is raised."""

    NvmlError = NvmlError

    def __init__(self, clocks=(), known=("GPU-one",)):
        self.clocks, self.known = iter(clocks), known

    def init_v2(self):
        """Nothing to prepare."""

    def device_get_handle_by_uuid(self, uuid):
        if uuid not in self.known:
            raise NvmlError("Not Found")
        return 7

    def device_get_clock_info(self, handle, kind):
        assert (handle, kind) == (7, 1)
        clock = next(self.clocks)
        if isinstance(clock, Exception):
            raise clock
        return clock

    class FieldValue:
        def __init__(self, size):
            self.value, self.nvml_return = {"ui_val": [0]}, 0

    def device_get_field_values(self, handle, field):
        assert (handle, field.field_id) == (7, 186)
        field.value["ui_val"][0] = 650_000

    def device_get_max_clock_info(self, handle, kind):
        assert (handle, kind) == (7, 1)
        return 1980

    def device_get_enforced_power_limit(self, handle):
        assert handle == 7
        return 700_500

    def system_get_driver_version(self):
        return "580.95.05"


@pytest.fixture
def install(monkeypatch):
    nvml._library.cache_clear()
    monkeypatch.setattr(nvml.driver, "uuid", lambda ordinal: ("GPU-one", "GPU-two")[ordinal])

    def bindings(library):
        monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", library)
        monkeypatch.delattr("cuda.bindings.nvml", raising=False)
        if library is not None:
            monkeypatch.setattr("cuda.bindings.nvml", library, raising=False)

    yield bindings
    nvml._library.cache_clear()


def test_clocks_are_the_median_of_what_was_recorded_since_the_last(install):
    install(Library([1500, 1700, NvmlError("busy"), 1800, 1200]))
    monitor = Monitor(0)
    for _ in range(4):
        monitor.look()
    assert (monitor.clock(), monitor.clock()) == (1700, 0)
    monitor.look()
    assert monitor.clock() == 1200


def test_power_is_the_mean_of_what_was_recorded_while_it_was_asked_for(install):
    install(Library([1500] * 4))
    monitor = Monitor(0)
    monitor.look()
    assert monitor.power() == 0
    monitor.reads_power = True
    monitor.look()
    monitor.look()
    assert (monitor.power(), monitor.power()) == (650.0, 0)
    monitor.look()
    monitor.forget()
    assert (monitor.power(), monitor.clock()) == (0, 0)


def test_limits_and_the_drivers_version(install):
    install(Library())
    monitor = Monitor(0)
    assert (monitor.missing, monitor.most_clock, monitor.power_limit) == ("", 1980, 700.5)
    assert nvml.driver_version() == "580.95.05"


def test_a_device_that_nvml_does_not_know_has_no_clock(install):
    install(Library())
    monitor = Monitor(1)
    monitor.look()
    assert monitor.missing == "NVML cannot find GPU-two: Not Found"
    assert (monitor.clock(), monitor.most_clock, monitor.power_limit) == (0, 0, 0.0)


def fails(error):
    library = Library()
    library.init_v2 = lambda: (_ for _ in ()).throw(error)
    return library


@pytest.mark.parametrize("library", [None, fails(RuntimeError("no library")), fails(NvmlError("Driver Not Loaded"))])
def test_without_the_library_all_is_unknown(install, library):
    install(library)
    monitor = Monitor(0)
    monitor.look()
    assert monitor.missing == "the driver's libnvidia-ml.so.1 is not found"
    assert (monitor.clock(), monitor.most_clock, monitor.power_limit) == (0, 0, 0.0)
    assert nvml.driver_version() == ""
