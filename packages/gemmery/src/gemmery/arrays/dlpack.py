"""Reads and creates DLPack capsules; NumPy does neither for bfloat16.

Source: dlpack.h of DLPack 1.0; element types of 8 bits and fewer by 1.1.
"""

from __future__ import annotations

import ctypes
from typing import Any

from gemmery import dtypes
from gemmery.arrays.views import MOST_DIMENSIONS, Lent, View, check, contiguous, elsewhere, no_memory, only_on_devices
from gemmery.errors import DeviceError, GemmeryError, LayoutError, brief


class DLTensor(ctypes.Structure):
    """dlpack.h, DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class ManagedTensor(ctypes.Structure):
    """dlpack.h, DLManagedTensor."""

    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class ManagedTensorVersioned(ctypes.Structure):
    """dlpack.h, DLManagedTensorVersioned, of version 1.0 and later."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_HOST, _DEVICE = (_CPU, _CUDA_HOST), (_CUDA, _CUDA_MANAGED)
_OTHERS = {4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 14: "oneapi"}
_READ_ONLY = 1
_PLAIN, _VERSIONED = b"dltensor", b"dltensor_versioned"
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_NAMES = {  # codes of one width each
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    11: "float8_e4m3fnuz",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
    15: "float6_e2m3fn",
    16: "float6_e3m2fn",
    17: "float4_e2m1fn",
    **{row.dlpack: row.numpy for row in dtypes.DTYPES if row.dlpack >= 6},
}


def read(array: Any) -> View:
    """Return the memory that an object with `__dlpack__` exports.

    The capsule is kept and not consumed; its destructor frees the memory. A capsule before DLPack 1.0 cannot say
    whether its memory is read-only, so that memory is not written. Memory of a CUDA device is used on the legacy
    default stream, which the exporter makes wait.

    Raises DeviceError for memory of other devices, DTypeError for element types that are not supported, and LayoutError
    for a capsule that cannot be read.
    """
    kind, ordinal = _device(array)
    if kind not in (*_HOST, *_DEVICE):
        raise elsewhere(_OTHERS.get(kind, f"DLPack type {kind}"))
    lent = Lent(array, _capsule_of(array, {"stream": 1} if kind in _DEVICE else {}))
    tensor, writable = _tensor(lent.capsule, type(array).__name__)
    alike = tensor.device_type in _HOST if kind in _HOST else tensor.device_type in _DEVICE
    if not alike or (kind in _DEVICE and tensor.device_id != ordinal):
        raise DeviceError(
            f"__dlpack_device__ of {type(array).__name__} says {kind, ordinal}, and its capsule "
            f"{tensor.device_type, tensor.device_id}: they must be equal"
        )
    return _viewed(tensor, "cpu" if kind in _HOST else f"cuda:{ordinal}", writable, lent)


def _device(array: Any) -> tuple[int, int]:
    """Return the kind and the number of the device that an object says it is on."""
    device = array.__dlpack_device__()
    try:
        kind, ordinal = (int(x) for x in device)
    except (TypeError, ValueError) as error:
        raise LayoutError(
            f"__dlpack_device__ of {type(array).__name__} returned {brief(device)}: it must return two integers, the "
            "kind of the device and its number"
        ) from error
    return kind, ordinal


def _capsule_of(array: Any, options: dict[str, Any]) -> Any:
    try:
        try:
            return array.__dlpack__(max_version=(1, 0), **options)
        except TypeError:  # an exporter older than max_version
            return array.__dlpack__(**options)
    except GemmeryError:
        raise
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise LayoutError(f"{type(array).__name__} does not export its memory by DLPack: {reason}") from error


def _tensor(capsule: Any, name: str) -> tuple[DLTensor, bool]:
    """Return the tensor in a capsule, and whether it may be written."""
    if _is_valid(id(capsule), _VERSIONED):
        managed = ManagedTensorVersioned.from_address(_pointer_of(id(capsule), _VERSIONED))
        major, minor = managed.version
        if major > 1:  # the layout after the version is unknown
            raise LayoutError(
                f"{name} exports DLPack {major}.{minor}, and gemmery reads versions below 2.0: export with "
                "__dlpack__(max_version=(1, 0))"
            )
        return managed.tensor, not managed.flags & _READ_ONLY
    if _is_valid(id(capsule), _PLAIN):
        return DLTensor.from_address(_pointer_of(id(capsule), _PLAIN)), False
    for used in (b"used_" + _PLAIN, b"used_" + _VERSIONED):
        if _is_valid(id(capsule), used):
            raise LayoutError(f"the DLPack capsule of {name} has been consumed: export a new one")
    raise LayoutError(f"__dlpack__ of {name} returned a {type(capsule).__name__}, which is no DLPack capsule")


def _viewed(tensor: DLTensor, device: str, writable: bool, lent: Lent) -> View:
    called = f"the DLPack capsule of {type(lent.array).__name__}"
    if not 0 <= tensor.ndim <= MOST_DIMENSIONS or (tensor.ndim and not tensor.shape):
        raise LayoutError(
            f"{called} has {tensor.ndim} dimensions and {'a' if tensor.shape else 'no'} shape: it "
            f"needs a shape, of at most {MOST_DIMENSIONS} dimensions"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    row = dtypes.get(_element(tensor))
    if device == "cpu" and row.name in dtypes.FLOAT8:
        raise only_on_devices(row.numpy)
    if tensor.strides:
        strides = tuple(row.size * step for step in tensor.strides[: tensor.ndim])
    else:
        strides = contiguous(shape, row.size)
    check(called, shape, strides)
    if not tensor.data and 0 not in shape:
        raise no_memory(f"{called}, of shape {shape},")
    return View((tensor.data or 0) + tensor.byte_offset, shape, strides, row.name, device, 0, writable, lent)


def _element(tensor: DLTensor) -> str:
    """Return the name of a capsule's element type."""
    name = _NAMES.get(tensor.code)
    if name is None:
        kind = _KINDS.get(tensor.code, f"DLPack code {tensor.code} of ")
        name = f"{kind}{tensor.bits}"
    elif name == "bool" and tensor.bits != 8:
        name = f"bool of {tensor.bits} bits"
    return name + (f" in {tensor.lanes} lanes" if tensor.lanes != 1 else "")


class Exported:
    """CPU memory with `__dlpack__`, for bfloat16, which NumPy does not export."""

    def __init__(self, memory: View) -> None:
        self._memory = memory

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the CPU as DLPack numbers it."""
        return _CPU, 0

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
        """Return a capsule, which keeps the memory alive until its consumer is done."""
        return capsule(self._memory, _CPU, 0, versioned=max_version is not None and max_version[0] >= 1)


_exports: dict[int, tuple[object, ...]] = {}  # address of a managed tensor -> the objects that it refers to


def capsule(memory: View, kind: int, ordinal: int, versioned: bool) -> Any:
    """Return a capsule of some memory; it keeps the owner alive until its consumer is done.

    `kind` and `ordinal` are the device as DLPack numbers it.
    """
    row, count = dtypes.get(memory.dtype), len(memory.shape)
    shape = (ctypes.c_int64 * count)(*memory.shape)
    strides = (ctypes.c_int64 * count)(*(step // row.size for step in memory.strides))
    tensor = DLTensor(memory.pointer, kind, ordinal, count, row.dlpack, 8 * row.size, 1, shape, strides, 0)
    managed: ManagedTensor | ManagedTensorVersioned
    if versioned:
        managed = ManagedTensorVersioned((1, 0), None, ctypes.cast(_deleter, ctypes.c_void_p), 0, tensor)
    else:
        managed = ManagedTensor(tensor, None, ctypes.cast(_deleter, ctypes.c_void_p))
    address = ctypes.addressof(managed)
    _exports[address] = managed, memory, shape, strides
    return _new_capsule(address, _VERSIONED if versioned else _PLAIN, _destructor)


def _done(address: int, exports: dict[int, tuple[object, ...]] = _exports) -> None:
    """Free an export; a consumer calls this as the deleter, also when the globals of a module that ends are gone."""
    exports.pop(address, None)


def _dropped(capsule: int) -> None:
    """Free the export of a capsule that was not consumed; a consumed one has another name."""
    for name in (_PLAIN, _VERSIONED):
        if _is_valid(capsule, name):
            _exports.pop(_pointer_of(capsule, name), None)


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_done)
_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_dropped)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
