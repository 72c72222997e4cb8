"""The CUDA driver: devices, contexts, memory, streams, events, graphs, modules; its errors in words.

Reference: NVIDIA, CUDA Driver API. Contexts are the primary ones, which PyTorch and CuPy use too.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from gemmery.cuda import nvrtc
from gemmery.cuda.device import LIMITS, STATIC_SHARED, WARP, Device, Limits, card
from gemmery.errors import DeviceError
from gemmery.errors import missing as missing_extra

_NO_DEVICE = "a CUDA driver is installed, but it finds no device: check CUDA_VISIBLE_DEVICES"
_WAYS_OUT = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free arrays on the device, or use smaller ones",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernel was compiled for another architecture",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an operand's memory does not match its shape and strides; start a new process",
}


def missing() -> str:
    """Return what is missing for CUDA, in one line; "" if there is a device to run on."""
    try:
        return "" if count() else _NO_DEVICE
    except DeviceError as error:
        return str(error)


@lru_cache
def api() -> Any:
    """Return the bindings, with the driver initialized.

    Raises DeviceError if the bindings, the driver or a device are missing, or the driver is older than the bindings.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(missing_extra("cuda", "CUDA needs its Python bindings")) from error
    try:
        status = driver.cuInit(0)
        if status[0] == driver.CUresult.CUDA_ERROR_NO_DEVICE:
            raise DeviceError(_NO_DEVICE)
        _check(driver, status)
        speaks = int(_check(driver, driver.cuDriverGetVersion()))
    except RuntimeError as error:  # libcuda is missing
        raise DeviceError("no CUDA driver is installed on this machine") from error
    if speaks // 1000 < driver.CUDA_VERSION // 1000:
        raise DeviceError(
            f"the driver supports CUDA {_dotted(speaks)}, the Python bindings {_dotted(driver.CUDA_VERSION)}: update "
            f"the driver, or pip install 'cuda-bindings=={speaks // 1000}.*' 'nvidia-cuda-nvrtc=={speaks // 1000}.*'"
        )
    return driver


def check(result: tuple[Any, ...]) -> Any:
    """Return the result of a driver call without its status; raise DeviceError if that is an error."""
    return _check(api(), result)


def _check(driver: Any, result: tuple[Any, ...]) -> Any:
    status = result[0]
    if status.value:
        name = getattr(status, "name", str(status))
        text = driver.cuGetErrorString(status)[1]
        words = text.decode() if isinstance(text, bytes) else name
        way_out = _WAYS_OUT.get(name, "")
        raise DeviceError(f"CUDA driver: {words} ({name})" + (f"; {way_out}" if way_out else ""))
    return result[1] if len(result) == 2 else result[1:]


def count() -> int:
    """Return the number of CUDA devices that this process may use."""
    return int(check(api().cuDeviceGetCount()))


@lru_cache
def device(ordinal: int = 0) -> Device:
    """Return the driver's description of a device.

    Raises DeviceError if there is no such device.
    """
    if not 0 <= ordinal < count():
        raise DeviceError(f"there is no device cuda:{ordinal}: the driver finds {count()}")
    driver = api()
    handle = check(driver.cuDeviceGet(ordinal))

    def attribute(name: str) -> int:
        key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(driver.cuDeviceGetAttribute(key, handle)))

    capability = 10 * attribute("COMPUTE_CAPABILITY_MAJOR") + attribute("COMPUTE_CAPABILITY_MINOR")
    limits = Limits(
        threads=attribute("MAX_THREADS_PER_BLOCK"),
        shared=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") or STATIC_SHARED,
        shared_sm=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        registers_sm=attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        warps_sm=attribute("MAX_THREADS_PER_MULTIPROCESSOR") // WARP,
        blocks_sm=attribute("MAX_BLOCKS_PER_MULTIPROCESSOR") or LIMITS[75].blocks_sm,
    )
    name = check(driver.cuDeviceGetName(128, handle)).split(b"\0")[0].decode()
    return Device(
        name=name,
        capability=capability,
        sms=attribute("MULTIPROCESSOR_COUNT"),
        limits=limits,
        l2=attribute("L2_CACHE_SIZE"),
        clock=attribute("CLOCK_RATE") / 1e6,
        bandwidth=2 * attribute("MEMORY_CLOCK_RATE") * attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8e6,
        ordinal=ordinal,
        tensor_share=0.5 if "GeForce" in name else 1.0,
    )


@lru_cache(maxsize=64)
def find(name: str) -> Device:
    """Return a present device ("cuda:0"), or a known one: a card or an architecture.

    >>> find("a100").arch
    'sm_80'

    Raises DeviceError for a device that is neither present nor known.
    """
    kind, _, number = name.strip().lower().partition(":")
    if kind == "cuda" and (number.isdecimal() or ":" not in name):
        return device(int(number or 0))
    return card(name)


def version() -> str:
    """Return the CUDA version supported by the driver: "13.0"."""
    return _dotted(int(check(api().cuDriverGetVersion())))


def _dotted(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


@lru_cache
def context(ordinal: int) -> Any:
    """Return the primary context of a device."""
    return check(api().cuDevicePrimaryCtxRetain(check(api().cuDeviceGet(ordinal))))


@contextmanager
def on(ordinal: int) -> Iterator[None]:
    """Make a device's primary context current in this thread, and restore the previous one afterwards."""
    driver = api()
    check(driver.cuCtxPushCurrent(context(ordinal)))
    try:
        yield
    finally:
        check(driver.cuCtxPopCurrent())


def in_context(ordinal: int, function: Callable[..., tuple[Any, ...]], *arguments: object) -> Any:
    """Return the result of a function of the driver, called in the context of a device."""
    with on(ordinal):
        return check(function(*arguments))


_functions: dict[tuple[int, str, str, str], Any] = {}
_opted: dict[tuple[int, str, str, str], int] = {}  # bytes of shared memory
_loading = threading.RLock()  # the garbage collector may run code that loads another kernel


def function(source: str, kernel: str, ordinal: int, shared: int = 0) -> Any:
    """Return a kernel on a device, compiled or read from the cache, and loaded once; `shared` bytes are opted into.

    Raises CompileError, or DeviceError if the device rejects it.
    """
    arch = device(ordinal).arch
    key = ordinal, source, kernel, arch
    handle = _functions.get(key)
    if handle is None:
        with _loading:
            handle = _functions.get(key)
            if handle is None:
                code = nvrtc.code(source, kernel, arch)
                with on(ordinal), relaxed():
                    module = check(api().cuModuleLoadData(code.cubin))
                    handle = check(api().cuModuleGetFunction(module, code.entry.encode()))
                _functions[key] = handle
    if shared > _opted.get(key, STATIC_SHARED):
        attribute = api().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        in_context(ordinal, api().cuFuncSetAttribute, handle, attribute, shared)
        _opted[key] = shared
    return handle


def is_loaded(source: str, kernel: str, name: str) -> bool:
    """Return True if `function` returns a kernel on a device ("cuda:0") without loading it."""
    card = find(name)
    return (card.ordinal, source, kernel, card.arch) in _functions


@contextmanager
def relaxed() -> Iterator[None]:
    """Allow what a stream capture in this thread forbids by default: loading code allocates memory."""
    mode = api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(api().cuThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        check(api().cuThreadExchangeStreamCaptureMode(before))


def captures(stream: int) -> bool:
    """Return True while a stream records its launches for a CUDA graph."""
    cuda = api()
    status, state = cuda.cuStreamIsCapturing(stream)[:2]
    return int(status) == 0 and int(state) == 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


def launch_config(
    x: int, y: int, z: int, width: int, height: int, depth: int, shared: int, early: bool, together: bool = False
) -> Any:
    """Return a launch config for `cuLaunchKernelEx`.

    An `early` kernel may start before the previous launch on the stream has ended, and waits by itself (CUDA guide,
    "Programmatic Dependent Launch and Synchronization"). Blocks that run `together` are a cooperative launch.
    """
    driver = api()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
    config.blockDimX, config.blockDimY, config.blockDimZ = width, height, depth
    config.sharedMemBytes = shared
    if early:
        overlap = driver.CUlaunchAttribute()
        overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [overlap], 1
    if together:
        whole = driver.CUlaunchAttribute()
        whole.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        whole.value.cooperative = 1
        config.attrs, config.numAttrs = [*config.attrs[: config.numAttrs], whole], config.numAttrs + 1
    return config


def launching(
    function: Any, grid: tuple[int, int, int], block: tuple[int, int, int], ordinal: int, *arguments: Any
) -> Callable[[int], None]:
    """Return a function that puts a launch on a stream; `arguments` are the kernel's, in types of ctypes."""

    def put(stream: int) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        at = ctypes.addressof(pointers)
        in_context(ordinal, api().cuLaunchKernel, function, *grid, *block, 0, stream, at, 0)

    return put


class Memory:
    """Memory on a device, freed with the object."""

    def __init__(self, size: int, ordinal: int = 0) -> None:
        self.size, self.ordinal, self.pointer = size, ordinal, 0
        self.pointer = int(in_context(ordinal, api().cuMemAlloc, max(size, 1)))

    def write(self, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        """Copy a contiguous array to the device, and wait until it is there: some streams wait for no other."""
        with on(self.ordinal):
            check(api().cuMemcpyHtoD(self.pointer + offset, array.ctypes.data, array.nbytes))
            check(api().cuStreamSynchronize(0))  # of pageable memory the copy returns once it is staged

    def read(self, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        """Copy it back into a contiguous array."""
        in_context(self.ordinal, api().cuMemcpyDtoH, array.ctypes.data, self.pointer + offset, array.nbytes)

    def fill(self, byte: int, offset: int = 0, size: int | None = None) -> None:
        """Set all bytes, or `size` bytes from `offset` on."""
        in_context(
            self.ordinal, api().cuMemsetD8, self.pointer + offset, byte, self.size - offset if size is None else size
        )

    def copy(self, source: int, target: int, size: int) -> None:
        """Copy bytes within it, from one offset to another."""
        in_context(self.ordinal, api().cuMemcpyDtoD, self.pointer + target, self.pointer + source, size)

    def __del__(self) -> None:
        if self.pointer:
            with on(self.ordinal):
                api().cuMemFree(self.pointer)


def room(ordinal: int = 0) -> int:
    """Return the free memory of a device, in bytes."""
    return int(in_context(ordinal, api().cuMemGetInfo)[0])


def uuid(ordinal: int = 0) -> str:
    """Return the name of a device in the vendor's tools, independent of CUDA_VISIBLE_DEVICES: "GPU-5d3c..."."""
    digits = check(api().cuDeviceGetUuid(check(api().cuDeviceGet(ordinal)))).bytes.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32]))


def synchronize(ordinal: int = 0) -> None:
    """Wait for all work of the device; raise DeviceError if a kernel failed."""
    in_context(ordinal, api().cuCtxSynchronize)


class Stream:
    """A new stream, which waits for no other."""

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal, self.handle = ordinal, 0
        self.handle = int(in_context(ordinal, api().cuStreamCreate, api().CUstream_flags.CU_STREAM_NON_BLOCKING.value))

    def synchronize(self) -> None:
        """Wait until it is empty."""
        in_context(self.ordinal, api().cuStreamSynchronize, self.handle)

    def __del__(self) -> None:
        if self.handle:
            with on(self.ordinal):
                api().cuStreamDestroy(self.handle)


class Event:
    """An event on a stream."""

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self._handle: Any = None
        self._handle = in_context(ordinal, api().cuEventCreate, 0)

    def record(self, stream: int = 0) -> None:
        """Record the event after the work put on the stream so far."""
        in_context(self.ordinal, api().cuEventRecord, self._handle, stream)

    def since(self, earlier: Event) -> float:
        """Seconds from an earlier event to this one; waits for it."""
        with on(self.ordinal):
            check(api().cuEventSynchronize(self._handle))
            return float(check(api().cuEventElapsedTime(earlier._handle, self._handle))) / 1e3

    def __del__(self) -> None:
        if self._handle is not None:
            with on(self.ordinal):
                api().cuEventDestroy(self._handle)


class Graph:
    """The work put on a stream within the block, to be launched repeatedly."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._executable: Any = None

    def __enter__(self) -> Graph:
        mode = api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(api().cuStreamBeginCapture(self._stream.handle, mode))
        return self

    def __exit__(self, *_: object) -> None:
        captured = check(api().cuStreamEndCapture(self._stream.handle))
        self._executable = check(api().cuGraphInstantiate(captured, 0))
        check(api().cuGraphDestroy(captured))

    def launch(self) -> None:
        """Put it on the stream it was captured from."""
        check(api().cuGraphLaunch(self._executable, self._stream.handle))

    def __del__(self) -> None:
        if self._executable is not None:
            api().cuGraphExecDestroy(self._executable)
