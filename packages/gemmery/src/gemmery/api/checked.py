"""A call whose arguments have been checked, on the CPU or on a device, as data, and what its memory must be."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api.device_call import NO_SCALES, DeviceCall, OperandScales, still
from gemmery.api.promote import can_cast
from gemmery.arrange import Ints
from gemmery.arrays import View
from gemmery.errors import DTypeError, LayoutError, ShapeError
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
