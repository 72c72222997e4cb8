"""Operations on memory in stream order, which a graph may capture: only `free_after_all` and `fetch` wait.

Reference: NVIDIA, CUDA Driver API, stream-ordered memory allocator, stream and event management.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable

from gemmery.cuda import driver


def allocate(size: int, stream: int, ordinal: int) -> int:
    """Return the address of `size` bytes for work put on the stream from now on.

    Raises DeviceError if the device is out of memory.
    """
    return int(driver.in_context(ordinal, driver.api().cuMemAllocAsync, max(size, 1), stream))


def free(pointer: int, stream: int, ordinal: int) -> None:
    """Free them after the work put on the stream so far."""
    driver.in_context(ordinal, driver.api().cuMemFreeAsync, pointer, stream)


def free_after_all(pointer: int, ordinal: int) -> None:
    """Free them after all work of the device; waits, and uses no stream, which may no longer exist."""
    driver.synchronize(ordinal)
    driver.in_context(ordinal, driver.api().cuMemFree, pointer)


class Scratch:
    """Memory for the duration of a call, in the order of its stream."""

    def __init__(self, size: int, stream: int, ordinal: int) -> None:
        self._stream, self._ordinal = stream, ordinal
        self.pointer = allocate(size, stream, ordinal)

    def __del__(self) -> None:
        if pointer := getattr(self, "pointer", 0):
            free(pointer, self._stream, self._ordinal)


def copy(source: int, target: int, size: int, stream: int, ordinal: int) -> None:
    """Copy bytes from one address to another."""
    driver.in_context(ordinal, driver.api().cuMemcpyDtoDAsync, target, source, size, stream)


def bring(source: int, target: int, size: int, stream: int, ordinal: int) -> None:
    """Copy bytes of the host. The driver keeps them until then, so they may be freed at once; a graph would not."""
    driver.in_context(ordinal, driver.api().cuMemcpyHtoDAsync, target, source, size, stream)


def fetch(source: int, size: int, ordinal: int) -> bytes:
    """Return bytes of the device; all work that writes them must have ended."""
    memory = ctypes.create_string_buffer(size)
    driver.in_context(ordinal, driver.api().cuMemcpyDtoH, ctypes.addressof(memory), source, size)
    return memory.raw


def put(number: float, dtype: str, pointer: int, stream: int, ordinal: int) -> None:
    """Write one number of type "f32" or "f64"; its bits travel with the commands, not through memory of the host."""
    words = struct.unpack("<2I", struct.pack("<d", number)) if dtype == "f64" else (_bits(number),)
    with driver.on(ordinal):
        for i, word in enumerate(words):
            driver.check(driver.api().cuMemsetD32Async(pointer + 4 * i, word, 1, stream))


class Mark:
    """An event on a stream, for other streams to wait for; the stream itself may no longer exist by then."""

    def __init__(self, stream: int, ordinal: int) -> None:
        api = driver.api()
        self._ordinal = ordinal
        with driver.on(ordinal):
            self._event = driver.check(api.cuEventCreate(api.CUevent_flags.CU_EVENT_DISABLE_TIMING.value))
            driver.check(api.cuEventRecord(self._event, stream))

    def before(self, stream: int) -> None:
        """Make `stream` wait for it."""
        driver.in_context(self._ordinal, driver.api().cuStreamWaitEvent, stream, self._event, 0)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        event = getattr(self, "_event", None)
        if event is not None and not ending():  # the driver frees what a process leaves
            with driver.on(self._ordinal):
                driver.api().cuEventDestroy(event)  # the driver keeps it until it has completed


def wait(stream: int, other: int, ordinal: int) -> None:
    """Make `stream` wait for the work put on `other` so far."""
    Mark(other, ordinal).before(stream)


def where(pointer: int) -> int:
    """Return the ordinal of the device whose memory an address is in.

    Raises DeviceError for an address outside device memory.
    """
    api = driver.api()
    return int(
        driver.check(api.cuPointerGetAttribute(api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer))
    )


def _bits(number: float) -> int:
    """A float32's; an infinity where it has nothing as large."""
    try:
        bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    except OverflowError:
        bits = 0x7F800000 if number > 0 else 0xFF800000
    return bits
