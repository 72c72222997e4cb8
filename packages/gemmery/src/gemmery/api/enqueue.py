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
from gemmery.cuda.ordered import DeviceArray
from gemmery.errors import LayoutError


def enqueue(
    a: Any,
    served: TieredLaunch,
    inputs: Inputs,
    target: View,
    scalars: tuple[float, float],
    old: tuple[Any, View, Any] | None = None,
) -> None:
    """Write a product to `target`, whose element type is the result's, with alpha and beta.

    `old` are an array, its view and the array of `target`, into which the first is copied before.
    """
    x, stream, device = inputs.x, inputs.x.stream, ordinal(inputs.x)
    run = served.next(stream)
    read = (x, inputs.y, inputs.bias, inputs.scales.a, inputs.scales.b)
    used = (*read, inputs.offsets, target, None if old is None else old[1])
    others = {z.stream for z in used if z is not None} - {stream}
    for other in others:
        ordered.wait(stream, other, device)
    owners = [*inputs.owners]
    a_start, b_start, bias, *factors = (0 if z is None else apart(a, z, target, stream, owners).pointer for z in read)
    workspace = 0
    if run.workspace:
        memory, its_view = scratch(a, run.workspace, x, stream)
        owners.append(memory)
        workspace = its_view.pointer
    if old is not None:  # after all memory is allocated
        copy(*old, target)
    extra: tuple[int, ...] = ()
    if any(inputs.parts) and any(run.kept):
        extra = (*(part if is_kept else 0 for part, is_kept in zip(inputs.parts, run.kept, strict=True)), 0)
    elif inputs.scales.kind or inputs.offsets is not None:
        extra = (*factors, 0 if inputs.offsets is None else inputs.offsets.pointer)
    for first, second, third in served.form.offsets():
        addresses = a_start + first, b_start + second, target.pointer + third
        run(*addresses, stream, bias, workspace, scalars, extra)
    for other in others:
        ordered.wait(other, stream, device)


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
