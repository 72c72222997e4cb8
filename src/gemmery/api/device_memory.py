"""Memory on a CUDA device for one call: results, scratch, copies of operands that the result would overwrite."""

from __future__ import annotations

import math
from typing import Any

from gemmery import arrays, dtypes
from gemmery.arrange import Ints
from gemmery.arrays import View
from gemmery.cuda import ordered
from gemmery.cuda.array import DeviceArray
from gemmery.errors import LayoutError


def apart(a: Any, source: View, target: View, stream: int, owners: list[object]) -> View:
    """Return `source`, or a copy of the memory that it spans where that overlaps `target`."""
    if not arrays.overlap(source, target):
        return source
    low, high = arrays.reach(source.shape, source.strides, source.dtype)
    memory, its_view = scratch(a, high - low, source, stream)
    owners.append(memory)
    ordered.copy(source.pointer + low, its_view.pointer, high - low, stream, ordinal(source))
    return source._replace(pointer=its_view.pointer - low)


def copy(source: Any, its_view: View, target: Any, its_target: View) -> None:
    """Copy an array into another of the same shape."""
    size = dtypes.get(its_view.dtype).size
    alike = its_view.dtype == its_target.dtype and its_view.strides == its_target.strides
    if alike and its_view.strides == arrays.contiguous(its_view.shape, size):
        count = math.prod(its_view.shape) * size
        ordered.copy(its_view.pointer, its_target.pointer, count, its_target.stream, ordinal(its_target))
        return
    if type(source) is not type(target) or isinstance(source, DeviceArray):
        raise LayoutError(
            f"a {type(source).__name__} with strides {its_view.strides} cannot be copied into a "
            f"{type(target).__name__}; pass arrays of one library, or contiguous arrays of the result's element type"
        )
    arrays.assign(target, source)


def new(a: Any, shape: Ints, dtype: str, x: View) -> tuple[Any, View]:
    """Allocate with a's library on the device of x, or with the driver where that library does not allocate."""
    if arrays.allocates(a):
        return arrays.empty(a, shape, dtype)
    array = DeviceArray(shape, dtype, ordinal(x), x.stream)
    return array, array.view


def scratch(a: Any, size: int, x: View, stream: int) -> tuple[object, View]:
    """Allocate bytes for the duration of a call, as `new` does."""
    if arrays.allocates(a):
        return arrays.empty(a, (size,), "uint8")
    memory = ordered.Scratch(size, stream, ordinal(x))
    return memory, View(memory.pointer, (size,), (1,), "uint8", x.device, stream)


def number(value: Any, dtype: str, a: Any, x: View, owners: list[object]) -> View:
    """Return a number of the host in scratch memory, where the stream of x writes it."""
    owner, memory = scratch(a, dtypes.get(dtype).size, x, x.stream)
    owners.append(owner)
    ordered.put(float(value), dtype, memory.pointer, x.stream, ordinal(x))
    return memory._replace(dtype=dtype)


def ordinal(z: View) -> int:
    """Return the number of the device of a view."""
    return int(z.device.partition(":")[2])


def finished(a: Any, array: Any) -> Any:
    """Return an array from `new`, to which all work has been launched, as an array of a's library."""
    if not isinstance(array, DeviceArray):
        return array
    array.finished()
    return a.__array_namespace__().from_dlpack(array) if hasattr(a, "__array_namespace__") else array
