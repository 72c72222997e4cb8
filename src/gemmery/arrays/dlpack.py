"""Memory behind `__dlpack__`, read from its capsule: NumPy's own reader knows no bfloat16.

Source: dlpack.h of DLPack 1.0.
"""

from __future__ import annotations

import ctypes
from typing import Any

from gemmery import dtypes
from gemmery.arrays.memory import View, contiguous, elsewhere


class Tensor(ctypes.Structure):
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

    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class ManagedTensorVersioned(ctypes.Structure):
    """dlpack.h, DLManagedTensorVersioned; before version 1 the tensor came first and alone."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_OTHERS = {4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 14: "oneapi"}
_READ_ONLY = 1
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


def read(obj: Any) -> View:
    """The memory that an object with `__dlpack__` exports.

    The capsule is kept, not consumed: dropping it gives the memory back. Before DLPack 1 a capsule could not say
    that it is read-only, so such memory is not written. Memory of a CUDA device is ordered with its legacy default
    stream, which the exporter is told to make wait.

    Raises DeviceError for memory that is neither the CPU's nor a CUDA device's, DTypeError for other element types.
    """
    kind, ordinal = (int(x) for x in obj.__dlpack_device__())
    if kind in (_CPU, _CUDA_HOST):
        return _viewed(_capsule(obj, {}), "cpu", obj)
    if kind in (_CUDA, _CUDA_MANAGED):
        return _viewed(_capsule(obj, {"stream": 1}), f"cuda:{ordinal}", obj)
    raise elsewhere(_OTHERS.get(kind, f"DLPack type {kind}"))


def _capsule(obj: Any, options: dict[str, Any]) -> Any:
    try:
        return obj.__dlpack__(max_version=(1, 0), **options)
    except TypeError:
        return obj.__dlpack__(**options)


def _viewed(capsule: Any, device: str, obj: Any) -> View:
    if _capsule_is(capsule, b"dltensor_versioned"):
        managed = ManagedTensorVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        tensor, writable = managed.tensor, not managed.flags & _READ_ONLY
    else:
        tensor, writable = Tensor.from_address(_capsule_pointer(capsule, b"dltensor")), False
    kind_name = _CODES.get(tensor.code, f"DLPack type {tensor.code} of ")
    row = dtypes.get(f"{kind_name}{tensor.bits}" + (f" in {tensor.lanes} lanes" if tensor.lanes != 1 else ""))
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        strides = tuple(row.size * step for step in tensor.strides[: tensor.ndim])
    else:
        strides = contiguous(shape, row.size)
    address = (tensor.data or 0) + tensor.byte_offset
    return View(address, shape, strides, row.name, device, 0, writable, (capsule, obj))
