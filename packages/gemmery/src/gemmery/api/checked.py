"""A call whose arguments have been checked, on the CPU or on a device, and the one place where they are checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api.device_call import NO_SCALES, DeviceCall, OperandScales, still
from gemmery.api.options import (
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
from gemmery.keywords import NO_OPTIONS, Options, for_kernel
from gemmery.tuples import NamedTuple

NUMBER = (int, float, complex, np.number)


class CheckedCall(NamedTuple):
    """A call with its memory, whose arguments have been checked."""

    a: View
    b: View
    c: View  # without memory and strides until it is allocated
    options: Options = NO_OPTIONS  # alpha, beta, threads, precision and semiring as kernels take them
    common: str = ""  # the type in which A and B are multiplied
    result: str = ""  # that of C
    old: View | None = None  # what beta multiplies
    bias: View | None = None
    epilogue: str = ""
    operands: tuple[Any, Any] = (None, None)  # A and B as the caller of a product on the CPU passed them
    # Of calls on a device:
    scales: OperandScales = NO_SCALES
    parts: tuple[int, int] = (0, 0)  # addresses of those of A and of B, where they were split before
    offsets: View | None = None  # the ends of groups of rows

    @property
    def read(self) -> tuple[View | None, ...]:
        """A, B, the bias, and the factors of A and of B."""
        return self.a, self.b, self.bias, self.scales.a, self.scales.b

    @property
    def scaled(self) -> bool:
        """Whether alpha and beta change the product."""
        return bool(self.options.alpha != 1 or self.options.beta != 0)

    def still(self) -> DeviceCall:
        """Return a call on a device without its memory."""
        bias = None if self.bias is None else self.bias.strides
        split = "".join(operand for operand, pointer in zip("ab", self.parts, strict=True) if pointer)
        return DeviceCall(
            still(self.a), still(self.b), still(self.c), bias, self.epilogue, self.scaled, for_kernel(self.options),
            self.scales.scaling, split, self.offsets is not None,
        )  # fmt: skip


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


def located(z: View) -> View:
    """Return the view with the number of its device, which `__cuda_array_interface__` does not contain.

    Raises LayoutError for an address or strides that are no multiples of the element size: a kernel that reads such
    elements ends with an error after which the process cannot use the device.
    """
    if z.device == "cpu":
        return z
    size = dtypes.get(z.dtype).size
    if z.pointer % size and 0 not in z.shape:
        raise LayoutError(
            f"address {z.pointer:#x} of elements of {size} bytes: it must be a multiple of the element size on a "
            "device; copy the array first"
        )
    for n, stride in zip(z.shape, z.strides, strict=True):
        if n > 1 and stride % size:
            raise LayoutError(
                f"strides {z.strides} of elements of {size} bytes: they must be multiples of the element size "
                "on a device; copy the array first"
            )
    if z.device != "cuda":
        return z
    from gemmery.cuda import ordered

    return z._replace(device=f"cuda:{ordered.where(z.pointer) if z.pointer else 0}")


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
