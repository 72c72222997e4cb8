"""Results of the kind that was given, and conversion between element types."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gemmery import dtypes
from gemmery.arrays import pytorch
from gemmery.arrays.memory import View
from gemmery.arrays.reading import SHORT, Array, view
from gemmery.errors import DTypeError


def kind(*operands: object) -> object:
    """The operand whose kind the result takes: the first that is neither a plain NumPy array nor a list."""
    for obj in operands:
        if type(obj) is not np.ndarray and not isinstance(obj, list | tuple):
            return obj
    return operands[0]


def empty(like: object, shape: tuple[int, ...], dtype: str) -> tuple[Any, View]:
    """Uninitialised memory for a result of the kind of `like`, C-contiguous, and its View; `wrap` finishes it."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return pytorch.empty(shape, dtype, like, torch)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(like, cupy.ndarray):
        with like.device:
            made = cupy.empty(shape, numpy_dtype(dtype))
        return made, view(made)
    own = like.dtype if isinstance(like, np.ndarray) else None
    if SHORT.get(own) != dtype:
        own = numpy_dtype(dtype)  # else the operand's: NumPy has two names for int64, and gives back the one it got
    array = np.empty(shape, own)
    return array, view(array)


def allocates(like: object) -> bool:
    """True when `empty` makes an array on the device of `like`: PyTorch's and CuPy's."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    return (torch is not None and isinstance(like, torch.Tensor)) or (
        cupy is not None and isinstance(like, cupy.ndarray)
    )


def scratch(shape: tuple[int, ...], dtype: str) -> View:
    """Uninitialised C-contiguous memory that nobody else sees."""
    memory = np.empty(shape, np.uint16 if dtype == "bf16" else dtypes.get(dtype).numpy)
    return View(memory.ctypes.data, shape, memory.strides, dtype, owner=memory)


def wrap(like: object, result: Any) -> Any:
    """The array or tensor that `empty` made as an object of the kind of `like`; no dimensions make a NumPy scalar."""
    if type(result) is not np.ndarray:
        return result
    if type(like) is not np.ndarray:
        if isinstance(like, np.ndarray):
            return like.__array_wrap__(result)
        if isinstance(like, memoryview):
            return memoryview(result)  # type: ignore[arg-type]
        if hasattr(like, "__dlpack__") and hasattr(like, "__array_namespace__"):
            return like.__array_namespace__().from_dlpack(_exporter(result))
    return result if result.ndim else result[()]


def _exporter(result: Array) -> Any:
    """Return an object that exports a result by DLPack, which NumPy does not in bfloat16."""
    if result.dtype.kind != "V":
        return result
    from gemmery.arrays import dlpack

    return dlpack.Exported(view(result))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy element type of gemmery's `name`; bfloat16 is ml_dtypes', which whoever uses it has imported."""
    if name != "bf16":
        return np.dtype(dtypes.get(name).numpy)
    extra = sys.modules.get("ml_dtypes")
    if extra is None:
        raise DTypeError("NumPy has no bfloat16 of its own: import ml_dtypes, or ask for dtype='float32'")
    found: np.dtype[Any] = np.dtype(extra.bfloat16)
    return found


def converted(source: View, dtype: str) -> View:
    """`source` copied to C-contiguous memory of another element type; rounds to nearest, ties to even."""
    values = np.ascontiguousarray(_cast(source, dtype))
    return View(values.ctypes.data, source.shape, values.strides, dtype, owner=values)


def astype(obj: Any, dtype: str) -> Any:
    """An array on a device converted by its own library, in the order of that library's stream.

    Raises DTypeError where there is no such library.
    """
    if allocates(obj):
        if hasattr(obj, "to"):
            return obj.to(getattr(sys.modules["torch"], dtypes.get(dtype).numpy))
        with obj.device:
            return obj.astype(numpy_dtype(dtype))
    raise DTypeError(
        f"{type(obj).__name__} is not {dtypes.get(dtype).numpy}, and only PyTorch and CuPy convert here: "
        "convert it first"
    )


def assign(target: Any, source: Any) -> None:
    """Copy an array on a device into another of any element type, by the library of both."""
    if hasattr(target, "copy_"):
        target.copy_(source)
    else:
        with target.device:
            target[...] = source


def written(obj: object) -> None:
    """Tell the library of an array that its memory was written; only PyTorch's wants to know."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        pytorch.written(obj, torch)


def store(source: View, target: View) -> None:
    """Copy `source` into the memory of `target`, of the same shape and any element type."""
    _raw(target)[...] = _cast(source, target.dtype)


class _Memory:
    """A View as NumPy's array interface."""

    def __init__(self, source: View, typestr: str) -> None:
        self.owner = source.owner
        self.__array_interface__ = {
            "data": (source.pointer, False),
            "shape": source.shape,
            "strides": source.strides,
            "typestr": typestr,
            "version": 3,
        }


def _raw(source: View) -> Array:
    """The memory of `source` as a NumPy array without a copy; bfloat16 as its 16 bits."""
    stored = "uint16" if source.dtype == "bf16" else dtypes.get(source.dtype).numpy
    return np.asarray(_Memory(source, np.dtype(stored).str))


def _cast(source: View, dtype: str) -> Array:
    """The elements of `source` as `dtype`; bfloat16, the upper half of a float32, as its 16 bits."""
    values = _raw(source)
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
