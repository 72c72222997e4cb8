"""Numbers of 8 and 4 bits and the factors of their groups, in the arithmetic of NumPy, CuPy or PyTorch.

All functions take arrays of one library and return arrays of it. They use the functions that the three have alike, so
that the bits are the same in all, and so that PyTorch can trace them.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.errors import DTypeError
from gemmery.tuples import NamedTuple


class CodeFormat(NamedTuple):
    """How the elements of a quantized matrix are stored."""

    bits: int
    top: float  # the largest magnitude of a code
    group: int = 0  # elements along k with one factor, where the format fixes them
    offset: int = 0  # what a stored integer has more than its value


FORMATS = {
    "int8": CodeFormat(8, 127),
    "int4": CodeFormat(4, 7, offset=8),
    "float8_e4m3": CodeFormat(8, 448),
    "mxfp4": CodeFormat(4, 6, 32),
    "nvfp4": CodeFormat(4, 6, 16),
}
_E4M3_TOP = 448
_MOST_AT_ONCE = 1 << 24  # elements that are quantized at a time: several float32 arrays of as many are needed


def library_of(array: Any) -> Any:
    """Return the module of PyTorch or CuPy if the array is of one of them, else NumPy's."""
    return arrays.library(array, "torch", "Tensor") or arrays.library(array, "cupy", "ndarray") or np


def name_of(array: Any) -> str:
    """Return gemmery's name of the array's element type."""
    return dtypes.get(str(array.dtype).removeprefix("torch.")).name


def dtype_of(xp: Any, name: str) -> Any:
    """Return a library's element type; for bfloat16 and float8 of NumPy ml_dtypes must have been imported."""
    return arrays.numpy_dtype(name) if xp is not sys.modules.get("torch") else getattr(xp, dtypes.get(name).numpy)


def cast(array: Any, name: str) -> Any:
    """Return the array in another element type, rounded to nearest, ties to even."""
    dtype = dtype_of(library_of(array), name)
    return array.to(dtype) if hasattr(array, "to") else array.astype(dtype, copy=False)


def bits_of(array: Any, name: str) -> Any:
    """Return the same memory as elements of another type of the same size."""
    return array.view(dtype_of(library_of(array), name))


def paired(codes: Any) -> Any:
    """Return 4-bit codes two in a byte: an even column in the low half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def single(packed: Any) -> Any:
    """Return the 4-bit codes of bytes, one in a byte."""
    xp = library_of(packed)
    return xp.stack((packed & 15, packed >> 4), -1).reshape((*packed.shape[:-1], 2 * packed.shape[-1]))


def over(x: Any, number: float) -> Any:
    """Return x by a number, rounded once: by a number alone PyTorch multiplies by its inverse on a device."""
    return x / library_of(x).full_like(x, number)


def to_e4m3(x: Any) -> Any:
    """Return float32 numbers as codes of e4m3: to nearest, ties to even, 448 beyond the largest.

    >>> to_e4m3(np.array([1.0, -1.0625, 1e9, 2.0**-9], np.float32))
    array([ 56, 184, 126,   1], dtype=uint8)
    """
    xp = library_of(x)
    bits = bits_of(x, "int32")
    size = xp.clip(xp.abs(x), None, _E4M3_TOP)
    whole = bits_of(size, "int32")
    normal = (whole + 0x7FFFF + ((whole >> 20) & 1) >> 20) - (120 << 3)
    code = xp.where(size < 2.0**-6, cast(xp.round(xp.where(size < 2.0**-6, size, 0) * 512), "int32"), normal)
    sign = (bits >> 31) & 0x80
    return cast(xp.where(x == x, code | sign, 0x7F), "uint8")


def from_e4m3(codes: Any) -> Any:
    """Return codes of e4m3 as float32.

    >>> from_e4m3(np.array([56, 184, 126, 1], np.uint8)).tolist()
    [1.0, -1.0, 448.0, 0.001953125]
    """
    xp, wide = library_of(codes), cast(codes, "int16")
    size = wide & 0x7F
    half = bits_of((wide >> 7) * -0x8000 | size << 7, "f16")  # exponents of float16 are 8 more
    return xp.where(size == 0x7F, xp.nan, cast(half, "f32") * 256)


def to_e2m1(x: Any) -> Any:
    """Return float32 numbers as codes of e2m1, 0 to 15: to nearest, ties to even, 6 beyond the largest.

    >>> to_e2m1(np.array([0.25, 0.75, -2.5, 100.0], np.float32))
    array([ 0,  2, 12,  7], dtype=uint8)
    """
    size = library_of(x).abs(x)
    code = cast(size > 0.25, "uint8") + cast(size >= 0.75, "uint8") + cast(size > 1.25, "uint8")
    code = code + cast(size >= 1.75, "uint8") + cast(size > 2.5, "uint8") + cast(size >= 3.5, "uint8")
    code = code + cast(size > 5, "uint8")
    return code | cast(x < 0, "uint8") << 3


def from_e2m1(codes: Any) -> Any:
    """Return codes of e2m1, 0 to 15, as float32.

    >>> from_e2m1(np.arange(8, dtype=np.uint8)).tolist(), from_e2m1(np.array([15], np.uint8)).tolist()
    ([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], [-6.0])
    """
    wide = cast(codes, "int16")
    half = bits_of((wide >> 3) * -0x8000 | (wide & 7) << 9, "f16")  # exponents of float16 are 14 more
    return cast(half, "f32") * 2.0**14


def from_e8m0(codes: Any) -> Any:
    """Return codes of e8m0, which are powers of two, as float32; 255 is NaN.

    >>> from_e8m0(np.array([0, 127, 254, 255], np.uint8)).tolist()
    [5.877471754111438e-39, 1.0, 1.7014118346046923e+38, nan]
    """
    xp, wide = library_of(codes), cast(codes, "int32")
    value = bits_of(xp.where(wide == 0, 1 << 22, wide << 23), "f32")
    return xp.where(wide == 255, xp.nan, value)


def _limits(dtype: str) -> tuple[float, float, float]:
    """Return the largest number of a floating-point type, its least normal one, and the step after 1."""
    row = dtypes.get(dtype)
    step = 2 * row.unit_roundoff
    return (2 - step) * 2.0 ** (1 - row.normal), 2.0**row.normal, step


def _rounded(largest: Any, top: float, dtype: str) -> Any:
    """Return factors in `dtype`, subnormal ones rounded up: rounded down, `top` of them would not reach the weight.

    float16 has subnormal factors for every group below 0.0077. `top` times the factor of a finite group is finite.
    """
    xp, (most, normal, step) = library_of(largest), _limits(dtype)
    most = min(most, float(xp.finfo(largest.dtype).max))  # PyTorch compares float32 with no larger number
    scales = over(largest, top)
    scales = xp.where(largest <= most, xp.clip(scales, None, most / top * (1 - step)), scales)
    return cast(xp.where((scales > 0) & (scales < normal), scales + normal * step / 2, scales), dtype)


def _levels(groups: Any, steps: Any, top: float, least: float) -> Any:
    """Return groups by their factors as whole numbers; 0 where a group has no factor, or no numbers."""
    xp = library_of(groups)
    levels = groups / xp.where(steps > 0, steps, 1)
    levels = xp.where((steps > 0) & (levels == levels), levels, 0)
    return xp.clip(xp.round(levels), least, top)


class Parts(NamedTuple):
    """The arrays of a quantized matrix."""

    packed: Any
    scales: Any
    zeros: Any = None
    scale: Any = None


def encoded(w: Any, format_: str, group: int, dtype: str, zero_points: bool = False) -> Parts:
    """Return a weight (..., n, k) in a format, whose factors have the type `dtype` where the format leaves it open."""
    xp = library_of(w)
    scale = _scale_of_all(w) if format_ == "nvfp4" else None
    n, k = w.shape[-2:]
    each = max(1, _MOST_AT_ONCE // max(1, k * int(np.prod(w.shape[:-2]))))
    if n <= each:
        return _encoded(w, format_, group, dtype, zero_points, scale)._replace(scale=scale)
    parts = [_encoded(w[..., i : i + each, :], format_, group, dtype, zero_points, scale) for i in range(0, n, each)]
    packed, scales, zeros = (
        None if column[0] is None else xp.concatenate(column, -2) for column in list(zip(*parts, strict=True))[:3]
    )
    return Parts(packed, scales, zeros, scale)


def _scale_of_all(w: Any) -> Any:
    """Return the factor of each matrix of NVFP4: that of its largest finite element is the largest of e4m3."""
    xp, size = library_of(w), library_of(w).abs(cast(w, "f32"))
    finite = xp.where(size < xp.inf, size, 0)
    largest = xp.amax(finite, (-2, -1)) if 0 not in w.shape else finite.sum((-2, -1))
    scale = xp.asarray(over(largest, 6 * _E4M3_TOP))
    return xp.asarray(xp.where(scale > 0, scale, 1), dtype=scale.dtype)


def _encoded(w: Any, format_: str, group: int, dtype: str, zero_points: bool, scale: Any) -> Parts:
    row, k = FORMATS[format_], w.shape[-1]
    xp, wide = library_of(w), "f64" if name_of(w) == "f64" and format_ in ("int8", "int4") else "f32"
    groups = cast(w, wide).reshape((*w.shape[:-1], k // group if group else 0, group))
    largest = xp.amax(xp.abs(groups), -1) if group else groups.sum(-1)
    whole = (*w.shape[:-1], k)
    if format_ == "mxfp4":  # OCP Microscaling Formats 1.0: the exponent of the largest, less that of the largest e2m1
        scales = cast(xp.clip((bits_of(largest, "int32") >> 23) - 2, 0, None), "uint8")
        scales = xp.where(largest < xp.inf, scales, 255)
        return Parts(paired(to_e2m1(groups / from_e8m0(scales)[..., None]).reshape(whole)), scales)
    if format_ == "nvfp4":
        scales = to_e4m3(xp.where(largest < xp.inf, over(largest, 6) / scale[..., None, None], xp.nan))
        steps = (from_e4m3(scales) * scale[..., None, None])[..., None]
        values = xp.where(steps > 0, groups / xp.where(steps > 0, steps, 1), 0)
        return Parts(paired(to_e2m1(values).reshape(whole)), scales)
    if zero_points and group:
        low, high = (xp.clip(z, *to) for z, to in ((xp.amin(groups, -1), (None, 0)), (xp.amax(groups, -1), (0, None))))
        scales = _rounded(high - low, 15, dtype)
        steps = cast(scales, wide)
        zeros = _levels(-low, steps, 15, 0)
        codes = xp.clip(_levels(groups, steps[..., None], 1e9, -1e9) + zeros[..., None], 0, 15)
        return Parts(paired(cast(codes, "uint8").reshape(whole)), scales, cast(zeros, dtype))
    scales = _rounded(largest, row.top, dtype)
    steps = cast(scales, wide)[..., None]
    if format_ == "float8_e4m3":
        return Parts(to_e4m3(xp.where(steps > 0, groups / xp.where(steps > 0, steps, 1), 0)).reshape(whole), scales)
    levels = _levels(groups, steps, row.top, -row.top).reshape(whole)
    if format_ == "int8":
        return Parts(cast(levels, "int8"), scales)
    return Parts(paired(cast(levels + row.offset, "uint8")), scales)


def decoded(parts: Parts, format_: str, dtype: str) -> Any:
    """Return the weight (..., n, k) in a floating-point type: (code - zero point) times factor, rounded to `dtype`.

    Differences and products are those of float32 numbers, rounded to float32; of float64 where `dtype` or factors are.
    """
    packed, scales, zeros, scale = parts
    row, wide = FORMATS[format_], "f64" if "f64" in (dtype, name_of(scales)) else "f32"
    values = cast(values_of(packed, format_), wide)
    factors = cast(scales, wide) if scale is None and not row.group else cast(row_factors(scales, scale, format_), wide)
    k, count = values.shape[-1], factors.shape[-1]
    values = values.reshape((*factors.shape, k // count if count else 0))
    if zeros is not None:
        values = values - cast(zeros, name_of(values))[..., None]
    elif row.offset:
        values = values - row.offset
    return cast(values * factors[..., None], dtype).reshape((*packed.shape[:-1], k))


def values_of(packed: Any, format_: str) -> Any:
    """Return what codes are, before zero points: those of int4 from 0 to 15, others of their own type."""
    codes = single(packed) if FORMATS[format_].bits == 4 else packed
    if format_ in ("int8", "int4"):
        return codes
    return from_e4m3(codes) if format_ == "float8_e4m3" else from_e2m1(codes)


def row_factors(scales: Any, scale: Any, format_: str) -> Any:
    """Return the factors of groups in float32; those of NVFP4 are rounded products with the factor of the matrix."""
    if format_ == "mxfp4":
        return from_e8m0(scales)
    if format_ == "nvfp4":
        return from_e4m3(scales) * scale[..., None, None]
    return cast(scales, "f32")


def levels(parts: Parts, format_: str) -> tuple[Any, Any, int] | None:
    """Return int8 levels (n, k), float32 factors and the bits of a level, by which a matrix is exact.

    None for a matrix that has none: codes of e4m3, and zero points that are no integers near 0.
    """
    packed, scales, zeros, scale = parts
    row = FORMATS[format_]
    if format_ == "float8_e4m3" or name_of(scales) == "f64":
        return None
    factors, codes = row_factors(scales, scale, format_), values_of(packed, format_)
    if format_ not in ("int8", "int4"):
        return cast(codes * 2, "int8"), factors / 2, 8
    if zeros is None:
        return cast(codes, "int8") - row.offset if row.offset else codes, factors, row.bits
    xp, near = library_of(zeros), cast(zeros, "f32")
    if row.bits == 8 or bool((near != xp.round(near)).any()) or bool((xp.abs(near) > 64).any()):
        return None
    count = scales.shape[-1]
    shape = (*scales.shape, codes.shape[-1] // count if count else 0)
    return (cast(codes, "int8").reshape(shape) - cast(near, "int8")[..., None]).reshape(codes.shape), factors, 8


def checked_dtype(dtype: str, what: str) -> str:
    """Return the name of a real floating-point type of 16 bits or more. Raises DTypeError for another one."""
    row = dtypes.get(dtype)
    if row.kind != "f" or row.size == 1:
        raise DTypeError(f"{what} is {row.numpy}: it can be float64, float32, float16 and bfloat16; convert it first")
    return row.name
