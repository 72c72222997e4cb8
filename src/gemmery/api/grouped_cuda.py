"""Grouped products on a CUDA device: one launch that reads the offsets there, or a product for each group."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api import device_memory
from gemmery.api.compute import writable
from gemmery.api.device_types import check_capability, located, types
from gemmery.api.groups import check_group_bias, host_ends, multiply_groups
from gemmery.api.options import check_activation, check_values, dtype_name, epilogue_name
from gemmery.api.prepared import limiting_steps
from gemmery.api.scales import check_scaled, read_scale
from gemmery.arrange import Ints, layout
from gemmery.arrays import View, view
from gemmery.cuda import driver, ordered
from gemmery.cuda.geometry import Scaling
from gemmery.cuda.launch import CudaLaunch, Ready
from gemmery.dispatch.cuda import grouped
from gemmery.errors import DeviceError, DTypeError, LayoutError, RefusedError, ShapeError
from gemmery.keywords import Options
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

_NUMBER = (int, float, np.number)
_Steps = tuple[int, int] | None  # bytes between groups or rows, and between columns; None for what there is not


class GroupInputs(NamedTuple):
    """The inputs of a grouped product, in the element types that its kernel reads."""

    x: View
    y: View
    bias: View | None  # accumulators, (groups, n)
    a_scale: View | None  # (rows, 1)
    b_scale: View | None  # (groups, n)
    factor: float  # the product of the scales that are numbers
    owners: list[object]  # of converted memory, alive until the launch


def product(a: Any, b: Any, offsets: Any, views: tuple[View, View, View], shape: Ints, out: Any, terms: Options) -> Any:
    """Return the products of the groups; the views are those of a, b and the offsets, `shape` is the result's."""
    x, y, where = map(located, views)
    target = None if out is None else located(view(out))
    arrays.together(a=x, b=y, out=target)
    _check_offsets(x, where)
    common, result = types(x, y, None if terms.dtype is None else dtype_name(terms.dtype), target and target.dtype)
    if target is not None:
        _check_target(target, shape, result)
    if terms.activation is not None:
        check_activation(terms.activation, result)
    inputs = _inputs(a, b, x, y, common, result, terms)
    array, fresh = device_memory.new(a, shape, result, x) if target is None else (out, target)
    if 0 not in (*shape, y.shape[0]):  # without groups, a kernel has neither a matrix nor an offset to read
        _compute(a, b, offsets, where, inputs, array, fresh, terms)
    if out is None:
        return device_memory.finished(a, array)
    arrays.written(out)
    return out


def _check_offsets(x: View, where: View) -> None:
    """Raise unless the offsets are on the host, or as a kernel reads them on the device of a."""
    if where.device == "cpu":
        return
    arrays.together(a=x, offsets=where)
    if where.dtype != "int32":
        raise DTypeError(
            f"offsets are {dtypes.get(where.dtype).numpy} on {where.device}, and kernels read int32; convert them, in "
            "PyTorch with offsets.int()"
        )
    if where.shape[0] > 1 and where.strides != (4,):
        raise LayoutError(f"offsets have a stride of {where.strides[0]} bytes; pass a contiguous array of int32")


def _check_target(target: View, shape: Ints, result: str) -> None:
    """Raise unless `out` takes the result as it is: rows that belong to no group keep their values."""
    writable(target, shape, result)
    if target.dtype != result:
        have, want = dtypes.get(target.dtype).numpy, dtypes.get(result).numpy
        raise DTypeError(f"out is {have} and the result {want}; pass an out of {want}, or dtype={have!r}")


def _inputs(a: Any, b: Any, x: View, y: View, common: str, result: str, terms: Options) -> GroupInputs:
    """Return A, B, bias and factors in the element types that a kernel reads."""
    owners: list[object] = []
    (groups, _, n), rows = y.shape, x.shape[0]
    bias = None if terms.bias is None else _bias(terms.bias, a, x, groups, n, result, owners)
    if terms.scale_a is not None or terms.scale_b is not None:
        check_scaled(common, result)
    a_number, a_scale = read_scale("scale_a", terms.scale_a, x)
    b_number, b_scale = read_scale("scale_b", terms.scale_b, x)
    a_scale = None if a_scale is None else _spread("scale_a", a_scale, (rows, 1))
    b_scale = None if b_scale is None else _spread("scale_b", b_scale, (groups, n))
    check_capability(common, a_scale is not None or b_scale is not None, x.device)
    x, y = (_converted(array, z, common, owners) for array, z in ((a, x), (b, y)))
    return GroupInputs(x, y, bias, a_scale, b_scale, a_number * b_number, owners)


def _converted(array: Any, its_view: View, dtype: str, owners: list[object]) -> View:
    """Return an operand in another element type."""
    if its_view.dtype == dtype:
        return its_view
    owners.append(arrays.astype(array, dtype))
    return view(owners[-1])


def _bias(bias: Any, a: Any, x: View, groups: int, n: int, result: str, owners: list[object]) -> View:
    """Return accumulators on the device, one for each column of each group; the stream writes a number there."""
    shape, accumulator = (groups, n), dtypes.get(result).accumulator
    if isinstance(bias, _NUMBER):
        return device_memory.number(bias, accumulator, a, x, owners)._replace(shape=shape, strides=(0, 0))
    rows = located(view(bias))
    arrays.together(a=x, bias=rows)
    check_group_bias(rows, groups, n, result)
    owners.append(bias)
    rows = _converted(bias, rows, accumulator, owners)
    each = rows.strides[0] if len(rows.shape) == 2 else 0
    step = 0 if rows.shape in ((), (1,)) else rows.strides[-1]
    return rows._replace(shape=shape, strides=(each, step))


def _spread(name: str, factors: View, most: Ints) -> View:
    """Return factors as an array of the shape `most`, with a stride of 0 where they are fewer."""
    shape, steps = factors.shape, factors.strides
    if shape in ((), (1,)):
        return factors._replace(shape=most, strides=(0, 0))
    if shape == most[:1]:
        return factors._replace(shape=most, strides=(steps[0], 0))
    if shape == most:
        return factors._replace(strides=(steps[0], 0 if shape[1] == 1 else steps[1]))
    what = "one for each row of a" if name == "scale_a" else "one for each group, or for each column of each"
    raise ShapeError(f"{name} has shape {shape}; it must be one number, or {what}: shape {most[:1]} or {most}")


def _compute(
    a: Any, b: Any, offsets: Any, where: View, inputs: GroupInputs, array: Any, target: View, terms: Options
) -> None:
    """Write the products to `target`, the view of `array`."""
    stream, ordinal = inputs.x.stream, device_memory.ordinal(inputs.x)
    run = prepared(*_terms(inputs, target, terms))
    captured = bool(stream) and driver.captures(stream)
    if isinstance(run, str) or (captured and where.device == "cpu"):
        if not arrays.allocates(a):
            raise LayoutError(f"a {type(a).__name__} cannot be cut into groups: pass arrays of PyTorch or CuPy")
        _one_by_one(a, b, _read(offsets, where, target.shape[0], captured), inputs, array, target, terms)
        return
    owners, read = list(inputs.owners), (inputs.x, inputs.y, inputs.bias, inputs.a_scale, inputs.b_scale)
    if where.device == "cpu":
        ends = np.array(host_ends(offsets, target.shape[0]), np.int32)
        owner, where = device_memory.scratch(a, ends.nbytes, inputs.x, stream)
        owners.append(owner)
        ordered.bring(ends.ctypes.data, where.pointer, ends.nbytes, stream, ordinal)
    others = {z.stream for z in (*read, target, where) if z is not None} - {stream}
    for other in others:
        ordered.wait(stream, other, ordinal)
    x, y, bias, a_scale, b_scale = (
        0 if z is None else device_memory.apart(a, z, target, stream, owners).pointer for z in read
    )
    workspace = 0
    if run.workspace:
        owner, place = device_memory.scratch(a, run.workspace, inputs.x, stream)
        owners.append(owner)
        workspace = place.pointer
    run(x, y, target.pointer, stream, bias, workspace, (inputs.factor, 0.0), (a_scale, b_scale, where.pointer))
    for other in others:
        ordered.wait(other, stream, ordinal)


def _one_by_one(a: Any, b: Any, ends: list[int], inputs: GroupInputs, array: Any, target: View, terms: Options) -> None:
    """Write a product for each group; to other memory first where `array` overlaps what later groups read."""
    read = [located(view(z)) for z in (a, b, terms.bias) if z is not None and not isinstance(z, _NUMBER)]
    read += [z for z in (inputs.a_scale, inputs.b_scale) if z is not None]
    if not any(arrays.overlap(z, target) for z in read):
        multiply_groups(a, b, ends, array, terms)
        return
    apart, _ = device_memory.new(a, target.shape, target.dtype, inputs.x)
    multiply_groups(a, b, ends, apart, terms)
    source, rows = apart[: ends[-1]], array[: ends[-1]]
    device_memory.copy(source, view(source), rows, view(rows))


def _read(offsets: Any, where: View, rows: int, captured: bool) -> list[int]:
    """Return the ends of the groups, copied from the device if they are there: then the host waits for its stream."""
    if where.device == "cpu":
        return host_ends(offsets, rows)
    if captured:
        raise DeviceError(
            "a CUDA graph captures this stream, and no kernel of this product reads offsets on the device; pass them "
            "as a list, which the graph keeps"
        )
    return clamped(offsets.tolist(), rows)


def clamped(ends: list[int], rows: int) -> list[int]:
    """Return ends as kernels use them: at least the one before, at most the number of rows.

    >>> clamped([3, 1, 9, -1], 5)
    [3, 3, 5, 5]
    """
    result, last = [], 0
    for end in ends:
        last = max(last, min(end, rows))
        result.append(last)
    return result


def _terms(inputs: GroupInputs, target: View, terms: Options) -> tuple[Any, ...]:
    """Return the arguments of `prepared`: what a launch must know before it has addresses."""
    bare = tuple(View(z.pointer & 15, z.shape, z.strides, z.dtype, z.device) for z in (inputs.x, inputs.y, target))
    steps = tuple(None if z is None else z.strides for z in (inputs.bias, inputs.a_scale, inputs.b_scale))
    epilogue = epilogue_name(inputs.bias, terms.activation)
    check_values(terms)
    return *bare, steps, epilogue, inputs.factor != 1, bool(terms.batch_invariant)


@lru_cache(maxsize=1024)
def prepared(
    x: View,
    y: View,
    c: View,
    steps: tuple[_Steps, _Steps, _Steps],
    epilogue: str,
    scaled: bool,
    invariant: bool,
) -> Ready | str:
    """Return the launch for operands of these shapes and strides, or why no kernel reads their offsets."""
    groups, _, n = y.shape
    bias_step, a_step, b_step = steps
    scales = "outer" if a_step or b_step else ""
    problem = described(x, y, c)._replace(epilogue=epilogue, scaled=scaled, scales=scales, invariant=invariant)
    try:
        candidate = grouped(problem)
    except RefusedError as refused:
        return str(refused)
    kernel = candidate.rung.build(problem, candidate.config)
    assert isinstance(kernel, CudaLaunch)
    bias = None if bias_step is None else View(0, (groups, n), bias_step, dtypes.get(problem.out).accumulator)
    scaling = None
    if problem.scales:
        (row, _), (group, column) = a_step or (0, 0), b_step or (0, 0)
        scaling = Scaling(problem.scales, row // 4, 0, group // 4, column // 4)
    a, c = (z._replace(shape=(groups, *z.shape), strides=(0, *z.strides)) for z in (x, c))  # all groups share them
    return kernel.ready(a, y, c, bias, scaling)


def described(x: View, y: View, c: View) -> Problem:
    """Return the problem of a grouped product; the views' pointers are their lowest four bits."""
    (groups, k, n), rows = y.shape, x.shape[0]
    layouts, alignments = [], []
    for z, (high, wide) in zip((x, y, c), ((rows, k), (k, n), (rows, n)), strict=True):
        size, (row, column) = dtypes.get(z.dtype).size, z.strides[-2:]
        layouts.append(layout(high, wide, row, column, size))
        matrices, along = (groups, z.strides[0]) if z is y else (1, 0)
        steps = limiting_steps(layouts[-1], matrices, high, wide, (along, row, column), size)
        alignments.append(arrays.alignment(z.pointer, steps))
    return Problem(
        rows,
        n,
        k,
        x.dtype,
        c.dtype,
        1,
        layouts[0],
        layouts[1],
        layouts[2] if layouts[2] == "row" else "any",
        device=c.device,
        alignments=(alignments[0], alignments[1], alignments[2]),
        groups=groups,
    )
