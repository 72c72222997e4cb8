"""Memory in stream order, and arrays of it for results: a graph may capture all but `free_after_all` and `fetch`.

Reference: NVIDIA, CUDA Driver API, stream-ordered memory allocator, stream and event management.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np

from gemmery import dtypes
from gemmery.arrays import View, contiguous, dlpack
from gemmery.cuda import driver
from gemmery.errors import DeviceError, DTypeError


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
    api = driver.api()
    if api.cuCtxGetCurrent()[1] == driver.context(ordinal):  # to push and pop it takes longer than the copy
        driver.check(api.cuMemcpyDtoDAsync(target, source, size, stream))
    else:
        driver.in_context(ordinal, api.cuMemcpyDtoDAsync, target, source, size, stream)


def bring(source: int, target: int, size: int, stream: int, ordinal: int) -> None:
    """Copy bytes of the host. The driver keeps them until then, so they may be freed at once; a graph would not."""
    driver.in_context(ordinal, driver.api().cuMemcpyHtoDAsync, target, source, size, stream)


def fetch(source: int, size: int, ordinal: int) -> bytes:
    """Return bytes of the device; all work that writes them must have ended."""
    memory = ctypes.create_string_buffer(size)
    driver.in_context(ordinal, driver.api().cuMemcpyDtoH, ctypes.addressof(memory), source, size)
    return memory.raw


_slots: dict[tuple[int, int, int], tuple[int, int]] = {}  # of streams: the address of their counters, and the bytes
_slabs: dict[int, tuple[int, int]] = {}  # of devices: the next free address, and how many bytes follow
_SLAB, _PER_THREAD = 1 << 20, 2  # bytes; the handle that stands for another stream in each thread
_slotting = threading.RLock()  # the collector may run code of ours that takes it again


def counters(size: int, stream: int, ordinal: int) -> int:
    """Return the address of `size` bytes that are zero while no launch of the stream is under way.

    Launches on a stream follow each other, so they share counters. A launch in a graph has counters of its own, which
    are never freed: a graph may run beside its stream, though not beside itself.
    """
    if driver.captures(stream):
        with _slotting:
            return _slot(size, ordinal)
    key = ordinal, stream, threading.get_ident() if stream == _PER_THREAD else 0
    with _slotting:
        address, room = _slots.get(key, (0, 0))
        if room < size:
            room = max(4096, 1 << (size - 1).bit_length())
            address = _slot(room, ordinal)
            _slots[key] = address, room
    return address


def _slot(size: int, ordinal: int) -> int:
    """Return the address of zeros that no other call has, a multiple of 256."""
    size = -(-size // 256) * 256
    address, room = _slabs.get(ordinal, (0, 0))
    if room < size:
        room = max(_SLAB, size)
        with driver.on(ordinal), driver.relaxed():  # a stream of this thread may be captured
            api, stream = driver.api(), driver.Stream(ordinal)
            address = int(driver.check(api.cuMemAlloc(room)))
            driver.check(api.cuMemsetD8Async(address, 0, room, stream.handle))
            stream.synchronize()
    _slabs[ordinal] = address + size, room - size
    return address


def put(number: complex, dtype: str, pointer: int, stream: int, ordinal: int) -> None:
    """Write one number of an accumulator's type; its bits travel with the commands, not through memory of the host."""
    row = dtypes.get(dtype)
    value = int(number.real) % 2 ** (8 * row.size) if row.kind in "iu" else number if row.kind == "c" else number.real
    with np.errstate(over="ignore"):
        words = np.array([value]).astype(f"uint{8 * row.size}" if row.kind in "iu" else row.numpy).view(np.uint32)
    with driver.on(ordinal):
        for i, word in enumerate(words.tolist()):
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


def between(z: View, streams: set[int]) -> AbstractContextManager[None]:
    """Let the stream of an array wait for the work of these so far, and these for what it does meanwhile."""
    others = streams - {z.stream}
    return _between(z, others) if others else _ALONE


@contextmanager
def _between(z: View, others: set[int]) -> Iterator[None]:
    for other in others:
        wait(z.stream, other, z.ordinal)
    yield
    for other in others:
        wait(other, z.stream, z.ordinal)


_ALONE = nullcontext()  # takes 1 us less


def where(pointer: int) -> int:
    """Return the ordinal of the device whose memory an address is in.

    Raises DeviceError for an address outside device memory.
    """
    api = driver.api()
    return int(
        driver.check(api.cuPointerGetAttribute(api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer))
    )


class DeviceArray:
    """A C-contiguous array on a CUDA device; `cupy.asarray`, `torch.as_tensor` and `from_dlpack` accept it.

    It is for results of callers whose arrays belong to no library that could allocate one.

    It has `shape`, `dtype` ("float32") and `device`, and supports `__cuda_array_interface__` (but bfloat16 has no name
    there) and `__dlpack__`; both order the reader's stream after the product's. Deleting it waits for the
    whole device, because the streams that used it may no longer exist.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, ordinal: int, stream: int) -> None:
        self.shape = shape
        self.dtype = dtypes.get(dtype).numpy
        self.device = f"cuda:{ordinal}"
        self._name, self._ordinal, self._stream = dtype, ordinal, stream
        self._mark: Mark | None = None
        self._pointer = allocate(math.prod(shape) * dtypes.get(dtype).size, stream, ordinal)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype!r}, device={self.device!r})"

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        pointer = getattr(self, "_pointer", 0)
        if pointer and not ending():  # the driver frees what a process leaves
            with suppress(DeviceError):  # a failed context frees nothing
                free_after_all(pointer, self._ordinal)

    def finished(self) -> None:
        """Record that nothing after the work now on its stream writes it; the stream is not used after this."""
        self._mark = Mark(self._stream, self._ordinal)

    def _readable_on(self, stream: int) -> None:
        if self._mark is not None:
            self._mark.before(stream)

    @property
    def view(self) -> View:
        """A View of its memory."""
        strides = contiguous(self.shape, dtypes.get(self._name).size)
        return View(self._pointer, self.shape, strides, self._name, self.device, self._stream, True, self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._name == "bf16":
            raise DTypeError("__cuda_array_interface__ cannot describe bfloat16: use from_dlpack")
        self._readable_on(0)
        return {
            "shape": self.shape,
            "typestr": np.dtype(self.dtype).str,
            "data": (self._pointer, False),
            "strides": None,
            "stream": 1,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._ordinal

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
        if stream != -1:
            self._readable_on(0 if stream in (None, 1) else int(stream))
        return dlpack.capsule(self.view, 2, self._ordinal, versioned=max_version is not None and max_version[0] >= 1)
