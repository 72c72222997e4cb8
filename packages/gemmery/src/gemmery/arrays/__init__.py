"""Views of the memory of any array, and results of the same kind as the operands.

NumPy arrays, PyTorch tensors, CuPy arrays and objects with `__dlpack__`, `__cuda_array_interface__`,
`__array_interface__` or the buffer protocol are read without a copy. Other objects that NumPy can convert (nested
lists, `__array__`) are copied. Objects whose product is not the product of their numbers are refused: sparse, masked
and nested arrays, DataFrames and others with `__array_ufunc__`, tensor subclasses with `__torch_dispatch__`. A result
has the kind of the first operand that is not a plain NumPy array or list:

| operand | result |
| --- | --- |
| NumPy array, list, buffer other than a memoryview | NumPy array |
| subclass of a NumPy array | the same subclass, by its `__array_wrap__`; np.matrix is an array in contractions |
| PyTorch tensor | PyTorch tensor |
| CuPy array | CuPy array |
| memoryview | memoryview |
| `__dlpack__` and `__array_namespace__` (JAX) | an array of that library, by its `from_dlpack` |
| `__dlpack__` alone, CPU | NumPy array |
| `__dlpack__` or `__cuda_array_interface__` alone, CUDA device | `gemmery.cuda.ordered.DeviceArray`, which has both |
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gemmery import dtypes
from gemmery.arrays import pytorch
from gemmery.arrays.reading import SHORT, cupy_view, numpy_view, unchanged, view
from gemmery.arrays.views import (
    View,
    alignment,
    contiguous,
    library,
    once_converted,
    operands,
    overlap,
    reach,
    repeats,
    same,
    together,
)
from gemmery.dtypes import Array
from gemmery.errors import DTypeError, LayoutError, ShapeError

__all__ = [  # what other modules of this part define
    "View",
    "alignment",
    "contiguous",
    "library",
    "once_converted",
    "operands",
    "overlap",
    "reach",
    "repeats",
    "same",
    "together",
    "unchanged",
    "view",
]


def kind(*operands: object) -> object:
    """Return the operand whose kind the result has: the first that is neither a plain NumPy array nor a list."""
    for array in operands:
        if type(array) is not np.ndarray and not isinstance(array, list | tuple):
            return array
    return operands[0]


def empty(array: Any, shape: tuple[int, ...], dtype: str) -> View:
    """Return the View of a new C-contiguous array of the library and device of `array`, which `wrap` finishes."""
    if library(array, "torch", "Tensor") is not None:
        return pytorch.empty(array, shape, dtype)
    cupy = library(array, "cupy", "ndarray")
    if cupy is not None:
        with array.device:
            return cupy_view(cupy.empty(shape, numpy_dtype(dtype)))
    own = array.dtype if isinstance(array, np.ndarray) else None
    if SHORT.get(own) != dtype:
        own = numpy_dtype(dtype)  # else the operand's dtype: NumPy has two for int64, and returns the operand's
    return numpy_view(_memory(shape, own))


def _memory(shape: tuple[int, ...], dtype: Any) -> Array:
    """Uninitialized memory; NumPy raises MemoryError or, for more bytes or dimensions than it can count, ValueError."""
    try:
        return np.empty(shape, dtype)
    except ValueError as error:
        raise ShapeError(f"a result of shape {shape} is too large for an array: {error}") from error


def allocates(array: object) -> bool:
    """Return True if `empty` can allocate on the device of `array`: for PyTorch and CuPy."""
    return (library(array, "torch", "Tensor") or library(array, "cupy", "ndarray")) is not None


def scratch(shape: tuple[int, ...], dtype: str) -> View:
    """Return uninitialized C-contiguous memory for intermediate results."""
    memory = _memory(shape, dtypes.get(dtype).stored)
    return View(memory.ctypes.data, shape, memory.strides, dtype, owner=memory)


def wrap(like: object, result: Any) -> Any:
    """Convert an array from `empty` to the kind of `like`; a NumPy array without dimensions becomes a scalar."""
    if type(result) is not np.ndarray:
        return result
    if type(like) is not np.ndarray:
        if isinstance(like, np.ndarray):
            return _wrapped(like, result)
        if isinstance(like, memoryview) and result.dtype.kind != "V":  # bfloat16 has no format of a buffer
            return memoryview(result)  # type: ignore[arg-type]
        if hasattr(like, "__dlpack__") and hasattr(like, "__array_namespace__"):
            return like.__array_namespace__().from_dlpack(_exporter(result))
    return result if result.ndim else result[()]


def _wrapped(like: Array, result: Array) -> Any:
    """What `__array_wrap__` makes of a result; before NumPy 2 it took the array alone."""
    if isinstance(like, np.matrix) and result.ndim > 2:  # which it refuses
        return result
    try:
        return like.__array_wrap__(result, None, result.ndim == 0)
    except TypeError:
        return like.__array_wrap__(result)


def _exporter(result: Array) -> Any:
    """Return an object that exports a result by DLPack, which NumPy does not in bfloat16."""
    if result.dtype.kind != "V":
        return result
    from gemmery.arrays import dlpack

    return dlpack.Exported(view(result))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's element type for gemmery's `name`; for bfloat16 ml_dtypes must have been imported."""
    row = dtypes.get(name)
    if row.stored == row.numpy:
        return np.dtype(row.numpy)
    foreign = getattr(sys.modules.get("ml_dtypes"), row.numpy, None)
    if foreign is None:
        raise DTypeError(f"NumPy has no {row.numpy}: import ml_dtypes, which adds it, or ask for a type that NumPy has")
    result: np.dtype[Any] = np.dtype(foreign)
    return result


def converted(source: View, dtype: str) -> View:
    """Copy to C-contiguous memory of another element type, rounding to nearest, ties to even."""
    try:
        values = np.ascontiguousarray(_cast(source, dtype))
    except ValueError as error:  # more bytes or dimensions than NumPy can count
        raise ShapeError(f"an operand of shape {source.shape} is too large to be converted: {error}") from error
    return View(values.ctypes.data, source.shape, values.strides, dtype, owner=values)


def astype(array: Any, dtype: str) -> Any:
    """Convert an array on a device by its own library, on that library's stream.

    Raises DTypeError if the array's library is neither PyTorch nor CuPy.
    """
    if allocates(array):
        if hasattr(array, "to"):
            return array.to(getattr(sys.modules["torch"], dtypes.get(dtype).numpy))
        with array.device:
            return array.astype(numpy_dtype(dtype))
    raise DTypeError(
        f"a {type(array).__name__} must be converted to {dtypes.get(dtype).numpy} first: gemmery converts arrays on a "
        "device only for PyTorch and CuPy"
    )


def assign(target: Any, source: Any) -> None:
    """Copy an array on a device into another of any element type; both must be of one library."""
    if hasattr(target, "copy_"):
        target.copy_(source)
    else:
        with target.device:
            target[...] = source


def written(array: object) -> None:
    """Tell autograd that a tensor was written: backward() then raises if it needs the old values."""
    torch = library(array, "torch", "Tensor")
    if torch is not None:
        torch.autograd.graph.increment_version(array)


def store(source: View, target: View) -> None:
    """Copy `source` into the memory of `target`, of the same shape and any element type."""
    memory(target)[...] = _cast(source, target.dtype)


def as_numpy(x: View) -> Array:
    """Return a NumPy array of the memory of an array on the CPU, without a copy; the array itself if it is one.

    Raises DTypeError for bfloat16 unless ml_dtypes has been imported.
    """
    if type(x.owner) is np.ndarray:
        return x.owner
    return memory(x).view(numpy_dtype(x.dtype))


class _Memory:
    """A View that NumPy can read through `__array_interface__`."""

    def __init__(self, source: View, typestr: str) -> None:
        self.owner = source.owner
        self.__array_interface__ = {
            "data": (source.pointer, False),
            "shape": source.shape,
            "strides": source.strides,
            "typestr": typestr,
            "version": 3,
        }


def memory(source: View) -> Array:
    """Return the memory of `source` as a NumPy array without a copy; bfloat16 as uint16, float8 as uint8."""
    if source.device != "cpu":
        raise LayoutError(f"a {type(source.owner).__name__} on a device: pass a tensor of PyTorch or an array of CuPy")
    return np.asarray(_Memory(source, np.dtype(dtypes.get(source.dtype).stored).str))


def _cast(source: View, dtype: str) -> Array:
    """Return the elements of `source` converted to `dtype`; bfloat16, the upper half of a float32, as uint16."""
    values = memory(source)
    if source.dtype == dtype:
        return values
    with np.errstate(all="ignore"):
        if source.dtype == "bf16":
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if dtype != "bf16":
            return values.astype(np.dtype(dtypes.get(dtype).numpy))
        single = values.astype(np.float32)
    bits = single.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(single), (bits >> np.uint32(16)) | np.uint32(0x40), nearest).astype(np.uint16)
