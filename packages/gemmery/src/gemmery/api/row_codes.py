"""Activations as codes of 8 bits, made while a layer runs: `gm.quantize_rows`."""

# No `from __future__ import annotations` here: help() would show annotations as strings.
import math
from typing import Any, Literal

import numpy as np

from gemmery import arrays
from gemmery.api.codes import bits_of, cast, checked_dtype, library_of, over, to_e4m3
from gemmery.api.options import viewed
from gemmery.api.packed import prepare_rows
from gemmery.arrays import view
from gemmery.epilogues import trace
from gemmery.errors import LayoutError, ShapeError, brief, unknown

CODES = {"float8_e4m3": ("e4m3", 448), "int8": ("int8", 127)}
_LEAST = 2.0**-126  # of a factor: its inverse is finite
_AT_ONCE = 1 << 17  # elements on the CPU, which stay in its cache for both passes


def quantize_rows(x: Any, format: Literal["float8_e4m3", "int8"] | None = None) -> Any:  # noqa: A002 # as users say
    """Return a matrix as codes of 8 bits, and one float32 factor for each row: the activations of a dynamic layer.

    >>> import numpy as np, gemmery as gm
    >>> codes, factors = gm.quantize_rows(np.array([[1.0, -2.0, 4.0]], np.float32), "int8")
    >>> codes
    array([[ 32, -64, 127]], dtype=int8)
    >>> (codes * factors).round(1)
    array([[ 1., -2.,  4.]], dtype=float32)

    `x` is (..., k), an array of NumPy, PyTorch or CuPy of float64, float32, float16 or bfloat16. Codes have its shape
    and the library's int8 or float8_e4m3fn (with NumPy of ml_dtypes, which must have been imported); factors have the
    shape (..., 1). `gm.matmul(codes, qw, scale_a=factors)` multiplies them by a quantized matrix.

    Without `x`, `quantize_rows("int8")` is an epilogue: `gm.matmul(a, b, epilogue=gm.quantize_rows("int8"))` returns
    the codes and factors of the product, whose sums are not rounded before.

    A factor is the largest magnitude of its row, as float32, by 448 or 127, and at least 2**-126. A code is the element
    times the inverse of the factor, both rounded to float32, then to nearest, ties to even. A row with an infinity or a
    NaN has no other numbers afterwards. All libraries and devices give the same bits.

    On a CUDA device of compute capability 8.0 or more (8.9 for float8_e4m3) it is one launch, which reads x once.

    Raises ArgumentError for another format, ShapeError for what has no rows, and DTypeError for other element types.
    """
    bare = format is None and isinstance(x, str)
    format = x if bare else format  # noqa: A001 # as users say
    if format not in CODES:
        raise unknown(f"format={brief(format)}: rows are not quantized to it", str(format), CODES)
    name, top = CODES[format]
    if bare:
        return trace.quantize_rows(format, top)
    v = viewed("x", x)
    checked_dtype(v.dtype, "x")
    if not v.shape:
        raise ShapeError("x has no dimensions: pass rows, (..., k)")
    array = x if arrays.allocates(x) else arrays.as_numpy(v) if v.device == "cpu" else None
    if array is None:
        raise LayoutError(f"a {type(x).__name__} on a device: pass a tensor of PyTorch or an array of CuPy")
    if v.dtype == "f64":
        with np.errstate(all="ignore"):
            array = cast(array, "f32")
    (*outer, k), count = v.shape, math.prod(v.shape[:-1])
    rows = array.reshape(count, k)
    codes, factors = (arrays.empty(array, shape, kind) for shape, kind in (((count, k), "int8"), ((count, 1), "f32")))
    run: Any = "the CPU"
    if v.device != "cpu":
        flat = view(rows)
        low = (z._replace(pointer=z.pointer & 15, stream=0, owner=None) for z in (flat, codes._replace(dtype=name)))
        run = prepare_rows(*low)
    if not isinstance(run, str):
        run(flat.pointer, flat.pointer, codes.pointer, flat.stream, 0, factors.pointer)
    else:
        each = max(1, _AT_ONCE // max(1, k)) if v.device == "cpu" else max(1, count)
        for first in range(0, count, each):
            part = slice(first, first + each)
            with np.errstate(all="ignore"):
                codes.array[part], factors.array[part] = _by_parts(rows[part], name, top)
    return bits_of(codes.array, name).reshape((*outer, k)), factors.array.reshape((*outer, 1))


def _by_parts(rows: Any, name: str, top: float) -> tuple[Any, Any]:
    """Return codes and factors of rows by the functions of their library."""
    xp, values = library_of(rows), cast(rows, "f32")
    size = bits_of(xp.abs(values), "int32")  # as integers NaN is the largest
    largest = xp.amax(size, -1)[:, None] if rows.shape[-1] else size.sum(-1)[:, None]
    factors = over(bits_of(cast(largest, "int32"), "f32"), top)
    factors = xp.where(factors < _LEAST, _LEAST, factors)
    scaled = values * (xp.ones_like(factors) / factors)
    if name == "e4m3":
        return bits_of(to_e4m3(scaled), "int8"), factors
    return cast(xp.round(xp.where(scaled == scaled, scaled, 0)), "int8"), factors
