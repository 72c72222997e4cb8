"""The one place where the arguments of a call are checked, on the CPU and on devices."""

from __future__ import annotations

from typing import Any

from gemmery import arrays, dtypes
from gemmery.api.device_call import NO_SCALES, CheckedCall, located
from gemmery.api.options import (
    NUMBER,
    check_bias,
    check_semiring,
    check_values,
    epilogue_name,
    only_on_devices,
    result_types,
    scalar,
    thread_count,
    viewed,
)
from gemmery.api.promote import can_cast, promoted
from gemmery.arrange import Ints, result_shape
from gemmery.arrays import View
from gemmery.errors import ArgumentError, DTypeError, LayoutError, ShapeError, brief
from gemmery.keywords import Options


def checked_call(
    name: str, a: View, b: View, out: Any, options: Options, parts: tuple[int, int] = (0, 0),
    shape: Ints | None = None, offsets: View | None = None, operands: tuple[Any, Any] = (None, None),
) -> CheckedCall:  # fmt: skip
    """Return a call of the function `name` that has been checked: types, shape, options and factors.

    C is `out`, or has neither memory nor strides. Its shape follows from A and B, except with offsets.
    """
    added = "y" if name == "gemv" else "c"  # what beta multiplies
    c = None if out is None else viewed("out", out)
    old = None if options.old is None else viewed(added, options.old)
    on_cpu = a.device == "cpu"
    if not on_cpu:
        a, b, c, old = located(a), located(b), c and located(c), old and located(old)
    if not a.device == b.device == (c or a).device == (old or a).device:
        arrays.together(a=a, b=b, out=c, c=old)
    if on_cpu:
        only_on_devices(options)
        common, result = result_types(a, b, options.dtype)
        result = result if old is None else promoted(result, old.dtype)
    else:
        from gemmery.api import device_operands

        if old is not None and old.dtype in dtypes.FLOAT8:
            raise DTypeError(f"{added} is {dtypes.get(old.dtype).numpy}: what beta multiplies is float16 or wider")
        check_values(options)
        common, result = device_operands.types(a, b, options.dtype, c, old)
    shape = result_shape(a.shape, b.shape) if shape is None else shape
    epilogue, bias = epilogue_name(options.bias, options.activation, result), None
    if options.threads is not None or options.semiring is not None:
        options = options._replace(threads=thread_count(options.threads), semiring=check_semiring(options, common))
    if name in ("gemm", "gemv"):
        alpha, beta = scalar("alpha", options.alpha, result), scalar("beta", options.beta, result)
        options = options._replace(alpha=alpha, beta=beta)
    if options.beta != 0 and old is None:
        raise ArgumentError(f"beta={brief(options.beta)} needs {added}, which beta multiplies; pass {added}, or beta=0")
    if old is not None and old.shape != shape:
        raise ShapeError(f"{added} has shape {old.shape}, but the product has shape {shape}; they must be equal")
    if not on_cpu and isinstance(options.bias, NUMBER):
        options = options._replace(bias=scalar("bias", options.bias, result))
        bias = View(0, (), (), dtypes.get(result).accumulator, a.device, a.stream)
    elif options.bias is not None:
        bias = viewed("bias", options.bias)
        bias = bias if on_cpu else located(bias)
        arrays.together(a=a, bias=bias)
        check_bias(bias, bias_shape(b, offsets), result)
    if c is not None:
        writable(c, shape, result)
    c = c or View(0, shape, (), result, a.device, a.stream)
    old = None if on_cpu and options.beta == 0 else old
    call = CheckedCall(a, b, c, options, common, result, old, bias, epilogue, operands, NO_SCALES, parts, offsets)
    return call if on_cpu else device_operands.on_card(call)


def bias_shape(b: View, offsets: View | None = None) -> Ints:
    """Return the shape of a bias with a number for each column, of each group if there are several."""
    n: Ints = (b.shape[-1] if len(b.shape) > 1 else 1,)
    return (b.shape[0], *n) if offsets is not None and len(b.shape) == 3 else n


def writable(target: View, shape: Ints, result: str) -> None:
    """Raise unless `out` can be written and takes a result of this shape and element type."""
    if target.shape != shape:
        raise ShapeError(
            f"out has shape {target.shape}, and the product {shape}, to which it is non-broadcastable; pass an out of "
            "that shape"
        )
    if not can_cast(result, target.dtype, "same_kind"):
        have, want = dtypes.get(result).numpy, dtypes.get(target.dtype).numpy
        raise DTypeError(
            f"Cannot cast ufunc 'matmul' output from {have} to {want} with casting rule 'same_kind'; pass an out of "
            f"{have}"
        )
    if not target.writable:
        raise LayoutError(
            "out cannot be written in place: it is read-only, has a foreign byte order, or is not an array"
        )
    if arrays.repeats(target):
        raise LayoutError(
            f"out has strides {target.strides}, so its elements share memory; pass one whose elements do not overlap"
        )
