"""Puts a product on the current stream of a's library, and allocates memory there for one call.

The memory is results, scratch, and copies of operands that the result would overwrite. The stream waits for those of
the other operands, which then wait for the product.
"""

from __future__ import annotations

import math
from typing import Any

from gemmery import arrays, dtypes
from gemmery.api.device_operands import Inputs
from gemmery.api.prepared import TieredLaunch
from gemmery.arrange import Ints
from gemmery.arrays import View
from gemmery.cuda import ordered
from gemmery.cuda.array import DeviceArray
from gemmery.errors import LayoutError


def enqueue(
    served: TieredLaunch, inputs: Inputs, target: View, scalars: tuple[float, float], old: View | None = None
) -> None:
    """Write a product to `target`, whose element type is the result's, with alpha and beta.

    `old` is the memory of an array that is copied into that of `target` before.
    """
    stream, ordinal = inputs.x.stream, inputs.x.ordinal
    run = served.next(stream)
    others = {z.stream for z in (*inputs.read, inputs.offsets, target, old) if z is not None} - {stream}
    for other in others:
        ordered.wait(stream, other, ordinal)
    read = [z and apart(inputs.x, z, target) for z in inputs.read]  # keeps copies alive until the launch
    x, y, bias, *factors = (0 if z is None else z.pointer for z in read)
    workspace = scratch(inputs.x, run.workspace) if run.workspace else None
    if old is not None:  # after all memory is allocated
        copy(old, target)
    extra: tuple[int, ...] = ()
    if any(inputs.parts) and any(run.kept):
        extra = (*(part if is_kept else 0 for part, is_kept in zip(inputs.parts, run.kept, strict=True)), 0)
    elif inputs.scales.kind or inputs.offsets is not None:
        extra = (*factors, 0 if inputs.offsets is None else inputs.offsets.pointer)
    for first, second, third in served.form.offsets():
        addresses = x + first, y + second, target.pointer + third
        run(*addresses, stream, bias, 0 if workspace is None else workspace.pointer, scalars, extra)
    for other in others:
        ordered.wait(other, stream, ordinal)


def apart(x: View, source: View, target: View) -> View:
    """Return `source`, or a copy of the memory that it spans where that overlaps `target`."""
    if not arrays.overlap(source, target):
        return source
    low, high = arrays.reach(source.shape, source.strides, source.dtype)
    memory = scratch(x, high - low)
    ordered.copy(source.pointer + low, memory.pointer, high - low, x.stream, x.ordinal)
    return source._replace(pointer=memory.pointer - low, owner=memory)


def copy(source: View, target: View) -> None:
    """Copy an array into another of the same shape."""
    size = dtypes.get(source.dtype).size
    alike = source.dtype == target.dtype and source.strides == target.strides
    if alike and source.strides == arrays.contiguous(source.shape, size):
        count = math.prod(source.shape) * size
        ordered.copy(source.pointer, target.pointer, count, target.stream, target.ordinal)
        return
    if type(source.array) is not type(target.array) or isinstance(source.array, DeviceArray):
        raise LayoutError(
            f"a {type(source.array).__name__} with strides {source.strides} cannot be copied into a "
            f"{type(target.array).__name__}; pass arrays of one library, or contiguous arrays of the result's element "
            "type"
        )
    arrays.assign(target.array, source.array)


def new(x: View, shape: Ints, dtype: str) -> View:
    """Allocate on the device of x with its library, or with the driver where that library does not allocate."""
    if arrays.allocates(x.array):
        return arrays.empty(x.array, shape, dtype)
    return DeviceArray(shape, dtype, x.ordinal, x.stream).view


def scratch(x: View, size: int) -> View:
    """Allocate bytes for the duration of a call, as `new` does."""
    if arrays.allocates(x.array):
        return arrays.empty(x.array, (size,), "uint8")
    memory = ordered.Scratch(size, x.stream, x.ordinal)
    return View(memory.pointer, (size,), (1,), "uint8", x.device, x.stream, owner=memory)


def number(value: Any, dtype: str, x: View) -> View:
    """Return a number of the host in scratch memory, where the stream of x writes it."""
    memory = scratch(x, dtypes.get(dtype).size)
    ordered.put(float(value), dtype, memory.pointer, x.stream, x.ordinal)
    return memory._replace(dtype=dtype)


def finished(x: View, target: View) -> Any:
    """Return the array of memory from `new`, to which all work has been launched, as an array of x's library."""
    made: Any = target.array
    if not isinstance(made, DeviceArray):
        return made
    made.finished()
    like: Any = x.array
    return like.__array_namespace__().from_dlpack(made) if hasattr(like, "__array_namespace__") else made
