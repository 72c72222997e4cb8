"""Weights of 8 or 4 bits, `gm.quantize`, and activations of 8 bits made while a layer runs, `gm.quantize_rows`."""

# No `from __future__ import annotations` here: help() would show annotations as strings.
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api import array_libraries
from gemmery.api.codes import (
    FORMATS,
    Parts,
    bits_of,
    cast,
    checked_dtype,
    decoded,
    encoded,
    levels,
    library_of,
    name_of,
    over,
    to_e4m3,
)
from gemmery.api.options import dtype_name, viewed
from gemmery.arrange import Ints
from gemmery.arrays import view
from gemmery.cpu.packed_levels import PackedLevels
from gemmery.errors import ArgumentError, DTypeError, LayoutError, ShapeError, brief, is_one, unknown

if TYPE_CHECKING:
    from gemmery.keywords import DTypeLike
else:  # help() shows it
    DTypeLike = Any

FormatName = Literal["int8", "int4", "float8_e4m3", "mxfp4", "nvfp4"]
VERSION = 1  # of a pickle and of a file, and of the order of bytes
_INTEGERS = "int8", "int4"  # formats that may have zero points


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedMatrix:
    """A weight of 8 or 4 bits an element: what `gm.quantize` returns. It never changes.

    >>> import numpy as np, gemmery as gm
    >>> gm.quantize(np.ones((256, 8), np.float32), "int4", 128)
    QuantizedMatrix(shape=(256, 8), format=int4, group=128, factors=float32, nbytes=1088)

    `shape` is (k, n), that of the right operand of a product, or (groups, k, n). Memory has a row of k elements for
    each of the n columns. `group` elements of such a row have one factor. The arrays are contiguous:

    | format | `packed` | `scales` |
    | --- | --- | --- |
    | int8 | int8 (n, k) | (n, k / group), floating-point |
    | int4 | uint8 (n, k / 2), the code of an even k in the low half, 8 more than its value | the same |
    | float8_e4m3 | uint8 (n, k), codes of e4m3 | the same |
    | mxfp4 | uint8 (n, k / 2), codes of e2m1 (sign, 2 bits of exponent, 1 of fraction) | uint8 (n, k / 32), e8m0 |
    | nvfp4 | as mxfp4 | uint8 (n, k / 16), e4m3; `scale` () is one float32 for the matrix |

    `zeros` (n, k / group), in the type of `scales`, are the zero points of int8 and int4, or None: an element is the
    code less the zero point, times the factor, where a code of int4 is 0 to 15; without them the zero point of int4 is
    8.
    """

    format: str
    packed: Any
    scales: Any
    zeros: Any = None
    scale: Any = None
    _copies: dict[str, Any] = field(default_factory=dict, init=False)  # copies for the CPU

    def __post_init__(self) -> None:
        """Check that the arrays belong together. Raises ArgumentError, ShapeError or DTypeError."""
        if not is_one(self.format, FORMATS):
            raise unknown(f"format={brief(self.format)}: no format of weights has this name", self.format, FORMATS)
        parts = [z for z in (self.packed, self.scales, self.zeros, self.scale) if z is not None]
        if len({library_of(z) for z in parts}) > 1 or not all(
            hasattr(z, "dtype") for z in (*parts, self.packed, self.scales)
        ):
            kinds = ", ".join(type(z).__name__ for z in parts)
            raise ArgumentError(f"parts of a quantized matrix are {kinds}: pass arrays of one library")
        row, shape, factors = FORMATS[self.format], tuple(self.packed.shape), tuple(self.scales.shape)
        k = shape[-1] * 8 // row.bits if len(shape) > 1 else 0
        alone = len(shape) == len(factors) and shape[:-1] == factors[:-1] and len(shape) > 1
        if not alone or (k % factors[-1] if factors[-1] else k) or (row.group and k != factors[-1] * row.group):
            each = f"{row.group}" if row.group else "equally many"
            raise ShapeError(
                f"packed has shape {shape} and scales {factors}: {self.format} has rows of {8 // row.bits} elements a "
                f"byte, and as many rows of factors, one for each {each} elements; pass such arrays"
            )
        has, needs = name_of(self.packed), "int8" if self.format == "int8" else "uint8"
        kind = name_of(self.scales)
        if has != needs or (kind != "uint8" if row.group else dtypes.get(kind).kind != "f" or kind in dtypes.FLOAT8):
            raise DTypeError(
                f"packed is {dtypes.get(has).numpy} and scales are {dtypes.get(kind).numpy}: {self.format} has "
                f"{needs} and {'uint8' if row.group else 'floating-point'} factors; convert them, or view them as these"
            )
        if (self.scale is None) == (self.format == "nvfp4") or (
            self.zeros is not None and self.format not in _INTEGERS
        ):
            raise ArgumentError(f"{self.format} with zeros and scale: int8 and int4 may have zeros, nvfp4 has a scale")
        if self.scale is not None and (tuple(self.scale.shape) != shape[:-2] or name_of(self.scale) != "f32"):
            raise ShapeError(
                f"scale has shape {tuple(self.scale.shape)}: pass one float32 for each matrix, {shape[:-2]}"
            )
        if self.zeros is not None and (tuple(self.zeros.shape) != factors or name_of(self.zeros) != kind):
            raise ShapeError(f"zeros have shape {tuple(self.zeros.shape)}: pass one, of their type, for each factor")

    @property
    def shape(self) -> Ints:
        """The shape of the matrix, (k, n), or of the matrices, (groups, k, n)."""
        *groups, n, width = self.packed.shape
        return (*groups, width * 8 // FORMATS[self.format].bits, n)

    @property
    def group(self) -> int:
        """The elements along k that have one factor."""
        return int(self.shape[-2] // max(1, self.scales.shape[-1]))

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        return sum(int(z.nbytes) for z in (self.packed, self.scales, self.zeros, self.scale) if z is not None)

    @property
    def parts(self) -> Parts:
        """The four arrays."""
        return Parts(self.packed, self.scales, self.zeros, self.scale)

    def __repr__(self) -> str:
        kind = {"mxfp4": "e8m0", "nvfp4": "e4m3"}.get(self.format) or dtypes.get(name_of(self.scales)).numpy
        points = ", zeros" if self.zeros is not None else ""
        return (
            f"QuantizedMatrix(shape={self.shape}, format={self.format}, group={self.group}, factors={kind}{points}, "
            f"nbytes={self.nbytes})"
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Raise LayoutError: only a product reads it."""
        raise LayoutError("a quantized matrix is no array: pass it to gm.matmul as b, or call its dequantize()")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (VERSION, self.format, *self.parts)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, group: Any) -> "QuantizedMatrix":
        """Return a matrix of several, or several, without a copy."""
        if len(self.shape) < 3:
            raise ShapeError(f"a quantized matrix of shape {self.shape} has no groups: only a stack of them is indexed")
        return QuantizedMatrix(self.format, *(None if z is None else z[group] for z in self.parts))

    @staticmethod
    def stack(matrices: Sequence["QuantizedMatrix"]) -> "QuantizedMatrix":
        """Return matrices of one shape and format as one of shape (groups, k, n), for `gm.grouped_matmul`.

        >>> import numpy as np, gemmery as gm
        >>> gm.QuantizedMatrix.stack([gm.quantize(np.eye(4), "int8")] * 3).shape
        (3, 4, 4)

        Raises ShapeError for matrices that differ in shape, format or zero points, and ArgumentError for an empty
        list or what is no QuantizedMatrix.
        """
        listed = isinstance(matrices, list | tuple | QuantizedMatrix)
        strange = [z for z in matrices if type(z) is not QuantizedMatrix] if listed else [matrices]
        if strange or not matrices:
            what = f"{brief(strange[0])} is no quantized matrix" if strange else "there are no matrices"
            raise ArgumentError(f"stack: {what}; pass a list of what gm.quantize returns")
        first = matrices[0]
        if any((z.format, z.shape, z.group) != (first.format, first.shape, first.group) for z in matrices):
            raise ShapeError("matrices of a stack have one shape, format and group: quantize them alike")
        xp, columns = library_of(first.packed), list(zip(*(z.parts for z in matrices), strict=True))
        if any(len({z is None for z in column}) > 1 for column in columns):
            raise ShapeError("some matrices of the stack have zero points and some have none: quantize them alike")
        return QuantizedMatrix(first.format, *(None if z[0] is None else xp.stack(list(z)) for z in columns))

    def to(self, device: Any) -> "QuantizedMatrix":
        """Return it with PyTorch's tensors on another device.

        Raises ArgumentError for arrays of another library.
        """
        if not hasattr(self.packed, "to"):
            raise ArgumentError("arrays of NumPy and CuPy have no other device: quantize a tensor of PyTorch")
        return QuantizedMatrix(self.format, *(None if z is None else z.to(device) for z in self.parts))

    def dequantize(self, dtype: DTypeLike | None = None) -> Any:
        """Return the matrix that it stands for, of its shape, in the type of its factors or another one.

        >>> import numpy as np, gemmery as gm
        >>> gm.quantize(np.array([[7.0], [-3.2]], np.float32), "int4").dequantize()
        array([[ 7.],
               [-3.]], dtype=float32)

        An element is the difference of code and zero point times the factor, each step in float32 (in float64 if
        `dtype` or the factors are), rounded to `dtype`. A factor of nvfp4 is that of its 16 elements times `scale`,
        rounded to float32. mxfp4 and nvfp4 become float32 unless `dtype` says otherwise.
        """
        own = "f32" if FORMATS[self.format].group else name_of(self.scales)
        name = own if dtype is None else checked_dtype(dtype_name(dtype), "dtype")
        with np.errstate(all="ignore"):
            return decoded(self.parts, self.format, name).swapaxes(-1, -2)

    def panels(self) -> PackedLevels | None:
        """Return its levels in panels for the CPU, made once; None for formats without levels, and other devices."""
        if "levels" not in self._copies:
            exact = levels(self.parts, self.format) if 0 not in self.shape and len(self.shape) == 2 else None
            self._copies["levels"] = exact and PackedLevels(np.asarray(exact[0]), np.asarray(exact[1]), exact[2])
        panels: PackedLevels | None = self._copies["levels"]
        return panels


array_libraries.QUANTIZED.add(QuantizedMatrix)


def _restored(version: int, format_: str, *parts: Any) -> QuantizedMatrix:
    """Return a matrix from its pickle. Raises LayoutError for one of another version."""
    check_version(version, "a pickle")
    return QuantizedMatrix(format_, *parts)


def check_version(version: Any, what: str) -> None:
    """Raise LayoutError unless this gemmery reads this version."""
    if version != VERSION:
        raise LayoutError(
            f"{what} has quantized matrices of version {brief(version)}, and this gemmery reads version {VERSION}: "
            "quantize the weights again, or use the gemmery that wrote it"
        )


def quantize(
    w: Any,
    format: FormatName,  # noqa: A002 # as users say
    group: int | None = None,
    *,
    zero_points: bool = False,
    dtype: DTypeLike | None = None,
) -> QuantizedMatrix:
    """Return a weight in 8 or 4 bits an element, as the right operand of many products.

    >>> import numpy as np, gemmery as gm
    >>> w = np.arange(-8, 8, dtype=np.float32).reshape(4, 4) / 2
    >>> qw = gm.quantize(w, "int8")
    >>> gm.matmul(np.ones((1, 4), np.float32), qw).round(1)
    array([[-4., -2.,  0.,  2.]], dtype=float32)

    `w` is (k, n), or (groups, k, n), of float64, float32, float16 or bfloat16: an array of NumPy, PyTorch or CuPy, and
    the result has arrays of the same library and device. Pass `w.T` for the weight of a layer, (n, k).

    - `format`: "int8", "int4" and "float8_e4m3" have a factor for each `group` elements along k of a column; None is
      one for each column; 128, 64 and 32 are usual for int4. "mxfp4" has a power of two for each 32 elements (OCP
      Microscaling Formats 1.0), "nvfp4" a factor of e4m3 for each 16 and one of float32 for all.
    - `zero_points`: for int4, each group has its own range of 16 codes from its least to its largest element and 0.
      Otherwise codes are symmetric: -7 to 7, -127 to 127.
    - `dtype`: of the factors, by default that of w. GPU kernels multiply packed weights by an x of this type.

    An element differs from that of w by at most half a factor (int8, int4), or by the rounding of e4m3 and e2m1. The
    factor of a symmetric group is its largest magnitude divided by 7 or 127, or by 448 for e4m3, rounded to `dtype`. A
    group that has an infinity or a NaN is NaN as a whole afterwards, and so are products with it. It is not refused,
    because the host would have to wait for a GPU to look for one.

    Raises ArgumentError for another format and for a group that is no positive number, ShapeError where the group does
    not divide k or two 4-bit elements do not share a byte, and DTypeError for other element types.
    """
    if not is_one(format, FORMATS):
        raise unknown(f"format={brief(format)}: no format of weights has this name", format, FORMATS)
    row = FORMATS[format]
    y = viewed("w", w)
    own = checked_dtype(y.dtype, "w")
    if len(y.shape) < 2:
        raise ShapeError(f"w has shape {y.shape}; what is quantized is (k, n), or (groups, k, n): pass a matrix")
    k = y.shape[-2]
    group = checked_group(format, group, k)
    if not isinstance(zero_points, bool | np.bool_):
        raise ArgumentError(f"zero_points={brief(zero_points)}: pass True or False")
    if zero_points and format != "int4":
        raise ArgumentError(f"zero_points=True of {format}: int4 has them; leave them out")
    if dtype is not None and row.group:
        raise ArgumentError(f"dtype={brief(dtype)}: the factors of {format} have a type of their own; leave it out")
    factors = own if dtype is None else checked_dtype(dtype_name(dtype), "dtype")
    array = w if arrays.allocates(w) else arrays.as_numpy(y)
    with np.errstate(all="ignore"):
        return QuantizedMatrix(format, *encoded(array.swapaxes(-1, -2), format, group, factors, bool(zero_points)))


def checked_group(format_: str, group: Any, k: int) -> int:
    """Return the elements along k with one factor. Raises ArgumentError or ShapeError for a group that none has."""
    row = FORMATS[format_]
    if group is None:
        group = row.group or k
    if isinstance(group, bool) or not isinstance(group, int | np.integer) or group < (1 if k else 0):
        raise ArgumentError(f"group={brief(group)}: a group is a number of elements along k; 128 is usual")
    if row.group and group != row.group:
        raise ArgumentError(f"group={brief(group)}: {format_} has groups of {row.group}; leave it out")
    if k % max(1, group):
        raise ShapeError(
            f"k={k} is no multiple of {brief(group)}, the group of {format_}: pad w with rows of zeros, or pass a "
            "group that divides k"
        )
    if row.bits == 4 and group % 2:
        raise ShapeError(
            f"a group of {group} in k={k}: two elements of {format_} share a byte, so that a group is even; pad w with "
            "a row of zeros, or take int8"
        )
    return int(group)


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

    A factor is the largest magnitude of its row, as float32, divided by 448 or 127, and at least 2**-126. A code is the
    element times the inverse of the factor, both rounded to float32, then to nearest, ties to even. A row with an
    infinity or a NaN has no other numbers afterwards. All libraries and devices give the same bits.

    On a CUDA device of compute capability 8.0 or more (8.9 for float8_e4m3) it is one launch, which reads x once.

    Raises ArgumentError for another format, ShapeError for what has no rows, and DTypeError for other element types.
    """
    bare = format is None and isinstance(x, str)
    format = x if bare else format  # noqa: A001 # as users say
    if format is None or not is_one(format, CODES):
        raise unknown(f"format={brief(format)}: rows are not quantized to it", format, CODES)
    name, top = CODES[format]
    if bare:
        from gemmery.epilogues import trace

        return trace.quantize_rows(format, top)
    v = viewed("x", x)
    checked_dtype(v.dtype, "x")
    if not v.shape:
        raise ShapeError("x has no dimensions: pass rows, (..., k)")
    array = x if arrays.allocates(x) else arrays.as_numpy(v)
    if v.dtype == "f64":
        with np.errstate(all="ignore"):
            array = cast(array, "f32")
    (*outer, k), count = v.shape, math.prod(v.shape[:-1])
    rows = array.reshape(count, k)
    codes, factors = (arrays.empty(array, shape, kind) for shape, kind in (((count, k), "int8"), ((count, 1), "f32")))
    run: Any = "the CPU"
    if v.device != "cpu":
        from gemmery.api.device_call import still
        from gemmery.api.packed import prepare_rows

        flat = view(rows)
        run = prepare_rows(still(flat), still(codes._replace(dtype=name)))
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
