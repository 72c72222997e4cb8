"""The factors of a product's operands, scale_a and scale_b: numbers become a part of alpha, arrays go to the kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api.device_types import ROUNDED, located
from gemmery.api.options import scalar
from gemmery.arrange import Ints
from gemmery.arrays import View, view
from gemmery.cuda.geometry import Scaling
from gemmery.errors import ArgumentError, DTypeError, ShapeError, brief
from gemmery.keywords import Options
from gemmery.tuples import NamedTuple

BLOCK = 128  # rows and columns of an operand that share a factor
SCALED = (*dtypes.FLOAT8, "int8", "f16", "bf16")  # element types of operands that may have factors
_NUMBER = (int, float, np.number)


class OperandScales(NamedTuple):
    """The factors of A and B in C = (scale_a A) (scale_b B)."""

    kind: str = ""  # as Problem.scales: "" where there are only numbers
    factor: float = 1.0  # the product of the numbers
    a: View | None = None
    b: View | None = None
    scaling: Scaling | None = None  # None without arrays


NO_SCALES = OperandScales()


def scales(options: Options, x: View, y: View, common: str, result: str) -> OperandScales:
    """Return the factors of A and B, whose views are x and y, for `scale_a` and `scale_b` of the options.

    `common` is the type in which A and B are multiplied, `result` that of C.

    Raises ShapeError, DTypeError, DeviceError, LayoutError or ArgumentError for factors that are neither one number nor
    as many as an operand has rows, columns or blocks.
    """
    if options.scale_a is None and options.scale_b is None:
        return NO_SCALES
    check_scaled(common, result)
    factor_a, a = read_scale("scale_a", options.scale_a, x)
    factor_b, b = read_scale("scale_b", options.scale_b, x)
    factor = factor_a * factor_b
    if a is None and b is None:
        return OperandScales(factor=factor)
    m, k = x.shape[-2] if len(x.shape) > 1 else 1, x.shape[-1]
    n = y.shape[-1] if len(y.shape) > 1 else 1
    alone = len(x.shape) <= 2 and len(y.shape) <= 2
    by_row = a is None or a.shape in _outer(m, (m, 1), alone)
    by_column = b is None or b.shape in _outer(n, (1, n), alone)
    if by_row and by_column:
        a_row = 0 if a is None or not a.shape else _step(a, 0)
        b_column = 0 if b is None or not b.shape else _step(b, -1)
        return OperandScales("outer", factor, a, b, Scaling("outer", a_row, 0, 0, b_column))
    pieces, columns = -(-k // BLOCK), -(-n // BLOCK)
    if alone and a is not None and b is not None and a.shape == (m, pieces) and b.shape == (pieces, columns):
        if common not in dtypes.FLOAT8:
            raise DTypeError(
                f"factors of blocks of {BLOCK} apply to float8 products, not to {dtypes.get(common).numpy}: pass one "
                f"for each row of a, shape ({m},), and one for each column of b, shape ({n},)"
            )
        scaling = Scaling("blocks", _step(a, 0), _step(a, 1), _step(b, 0), _step(b, 1))
        return OperandScales("blocks", factor, a, b, scaling)
    raise _wrong_shape(x, y, a, b)


def check_scaled(common: str, result: str) -> None:
    """Raise DTypeError unless operands of type `common` may have factors in a product of type `result`."""
    if common not in SCALED or result not in ROUNDED:
        have, into = dtypes.get(common).numpy, dtypes.get(result).numpy
        raise DTypeError(
            f"scale_a and scale_b of a product of {have} into {into}: they apply to products of float8, int8, float16 "
            "and bfloat16 into bfloat16, float16 and float32; pass dtype=, or multiply the operands by them first"
        )


def read_scale(name: str, value: Any, x: View) -> tuple[float, View | None]:
    """Return a number and no array, or 1 and an array of float32 on the device of x."""
    if value is None:
        return 1.0, None
    if isinstance(value, _NUMBER):
        return scalar(name, value, "f32").real, None
    if isinstance(value, str | bytes | complex):
        raise ArgumentError(f"{name}={brief(value)} must be a number, or an array of float32 on the device")
    factors = located(view(value))
    arrays.together(**{"a": x, name: factors})
    if factors.dtype != "f32":
        raise DTypeError(f"{name} is {dtypes.get(factors.dtype).numpy}; factors are float32: convert it first")
    return 1.0, factors


def _outer(count: int, matrix: Ints, alone: bool) -> tuple[Ints, ...]:
    """Return the shapes of one factor, and of one for each of `count` rows or columns."""
    single = ((), (1,), (1, 1))
    return (*single, (count,), matrix) if alone else single


def _step(factors: View, axis: int) -> int:
    """Return the elements from one factor to the next along an axis."""
    return 0 if factors.shape[axis] == 1 else factors.strides[axis] // 4


def _wrong_shape(x: View, y: View, a: View | None, b: View | None) -> ShapeError:
    """Return the error for factors of shapes that mean nothing together."""
    have = ", ".join(f"{name} of shape {z.shape}" for name, z in (("scale_a", a), ("scale_b", b)) if z is not None)
    if len(x.shape) > 2 or len(y.shape) > 2:
        return ShapeError(f"{have}: with batch dimensions (shapes {x.shape} and {y.shape}) each operand has one factor")
    (m, k), n = x.shape if len(x.shape) == 2 else (1, *x.shape), y.shape[-1] if len(y.shape) > 1 else 1
    pieces, columns = -(-k // BLOCK), -(-n // BLOCK)
    blocks = f", or, for blocks of {BLOCK}, both have the shapes ({m}, {pieces}) and ({pieces}, {columns})"
    return ShapeError(
        f"{have} for operands of shapes {x.shape} and {y.shape}: scale_a is one number or has the shape ({m},), "
        f"scale_b is one number or has the shape ({n},){blocks if x.dtype in dtypes.FLOAT8 else ''}"
    )
