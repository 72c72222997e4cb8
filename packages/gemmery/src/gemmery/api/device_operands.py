"""What a product on a device reads: where its operands are, their element types, precision, and factors.

Factors, `scale_a` and `scale_b`, that are numbers become a part of alpha; arrays go to the kernel.
"""

# No `from __future__ import annotations` here: help() would show annotations as strings.
from functools import lru_cache
from typing import Any

import numpy as np

from gemmery import arrays, config, dtypes
from gemmery.api.device_call import DeviceCall, still, table
from gemmery.api.options import dtype_name, scalar
from gemmery.api.promote import can_cast, kernel_types, promoted, widened
from gemmery.arrange import Ints
from gemmery.arrays import View, view
from gemmery.cuda import driver, ordered
from gemmery.cuda.geometry import Scaling
from gemmery.errors import ArgumentError, DTypeError, LayoutError, RefusedError, ShapeError, brief, is_one
from gemmery.keywords import Options, for_kernel
from gemmery.tuples import NamedTuple

_HOPPER = 90  # the only compute capability with wgmma, by which 8-bit types and factors are multiplied
ROUNDED = ("bf16", "f16", "f32")  # results of 8-bit types, and of operands with factors
_FEW_ROWS, _SMALL = 16, 1 << 28  # rows or columns of C, and multiply-adds, up to which mixed types are not converted
BLOCK = 128  # rows and columns of an operand that share a factor
SCALED = (*dtypes.FLOAT8, "int8", "f16", "bf16")  # element types of operands that may have factors
NUMBER = (int, float, complex, np.number)


class OperandScales(NamedTuple):
    """The factors of A and B in C = (scale_a A) (scale_b B)."""

    kind: str = ""  # as Problem.scales: "" where there are only numbers
    factor: float = 1.0  # the product of the numbers
    a: View | None = None
    b: View | None = None
    scaling: Scaling | None = None  # None without arrays


NO_SCALES = OperandScales()


class Inputs(NamedTuple):
    """The inputs of a product, in the element types that its kernel reads."""

    x: View
    y: View
    bias: View | None = None  # accumulators
    epilogue: str = ""
    scales: OperandScales = NO_SCALES
    parts: tuple[int, int] = (0, 0)  # addresses of those of A and of B, where they were split before
    offsets: View | None = None  # the ends of groups of rows
    old: View | None = None  # what beta multiplies

    @property
    def read(self) -> tuple[View | None, ...]:
        """A, B, the bias, and the factors of A and of B."""
        return self.x, self.y, self.bias, self.scales.a, self.scales.b

    def call(self, target: View, scaled: bool, options: Options) -> DeviceCall:
        """Return the product into `target` without its memory."""
        bias = None if self.bias is None else self.bias.strides
        split = "".join(letter for letter, address in zip("ab", self.parts, strict=True) if address)
        x, y, c = map(still, (self.x, self.y, target))
        kernel, scaling, grouped = for_kernel(options), self.scales.scaling, self.offsets is not None
        return DeviceCall(x, y, c, bias, self.epilogue, scaled, kernel, scaling, split, grouped)


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
    for step, length in zip(z.strides, z.shape, strict=True):
        if length > 1 and step % size:
            raise LayoutError(
                f"strides {z.strides} of elements of {size} bytes: they must be multiples of the element size "
                "on a device; copy the array first"
            )
    return z._replace(device=f"cuda:{ordered.where(z.pointer) if z.pointer else 0}") if z.device == "cuda" else z


def types(x: View, y: View, dtype: Any, like: View | None = None) -> tuple[str, str]:
    """Return the type to which A and B are converted, and that of the result.

    `dtype` is what `dtype=` names. `like` is `out` or the C that beta multiplies, whose type decides on results of
    float8 and int8 that `dtype=` does not.

    Raises DTypeError for types that the device does not multiply.
    """
    dtype = None if dtype is None else dtype_name(dtype)
    if x.dtype in dtypes.FLOAT8 or y.dtype in dtypes.FLOAT8:
        return _of_float8(x, y, dtype or (like and like.dtype))
    common = promoted(x.dtype, y.dtype)
    if dtype is None and like is not None and common == "int8" and can_cast(common, like.dtype, "safe"):
        dtype = like.dtype
    if common == "int8" and dtype in ROUNDED:
        return common, dtype
    result = common if dtype is None else widened(common, dtype)
    return operand_type(common, result), result


def operand_type(common: str, result: str) -> str:
    """Return the type in which a device reads A and B that promote to `common`, for a product of type `result`."""
    return "bool" if result == "bool" else kernel_types(common, result)[0]


def stay_mixed(x: View, y: View, common: str, result: str, precision: str | None) -> bool:
    """Return True if a kernel widens A and B of two types as it loads them: float8, and small products on CUDA cores.

    Others are converted before: that takes a small part of a large product, which then runs by a faster kernel.
    """
    if x.dtype == y.dtype or x.dtype in dtypes.FLOAT8:
        return x.dtype != y.dtype
    kinds = {dtypes.get(name).kind for name in (common, result)}
    if min(len(x.shape), len(y.shape)) < 2 or precision is not None or kinds & {"c", "b"}:
        return False
    m, n, k = x.shape[-2], y.shape[-1], x.shape[-1]
    return min(m, n) > 1 and (min(m, n) <= _FEW_ROWS or (common not in ("f16", "bf16") and m * n * k <= _SMALL))


def _of_float8(x: View, y: View, dtype: str | None) -> tuple[str, str]:
    """Return the type of A and that of the product where an operand is float8; B may be the other kind."""
    long, other = (dtypes.get(z.dtype).numpy for z in (x, y))
    if not {x.dtype, y.dtype}.issubset(dtypes.FLOAT8):
        raise DTypeError(
            f"a is {long} and b is {other}: on a device float8 is multiplied by float8 only; convert both "
            "operands to float16, which holds every value of 8-bit types, or to another type"
        )
    result = dtype or "bf16"
    if result in ROUNDED:
        return x.dtype, result
    raise DTypeError(
        f"a product of {long} into {dtypes.get(result).numpy} on {x.device}: the result can be bfloat16, float16 or "
        "float32; pass one of them as dtype=, or an out of that type"
    )


@lru_cache
def check_capability(dtype: str, result: str, has_factors: bool, device: str) -> None:
    """Raise DTypeError if a device has no kernels for 8-bit types, or for operands with arrays of factors."""
    eight = dtype in dtypes.FLOAT8 or (dtype == "int8" and result in ROUNDED)
    card = driver.find(device) if eight or has_factors else None
    if card is not None and card.capability != _HOPPER:
        long = dtypes.get(dtype).numpy
        what = f"{long} operands" if eight else f"arrays of factors of {long} operands"
        way = "convert the operands to float16" if eight else "multiply the operands by them first"
        raise DTypeError(
            f"{what} on {card.name}: only devices of compute capability 9.0 (Hopper) multiply them, and this one has "
            f"{card.capability // 10}.{card.capability % 10}; {way}"
        )


_OF_FLOAT64 = "f64_normwise"
_ON_HOPPER = {"f32_plus": "take 'f32_strict', or float64 operands", _OF_FLOAT64: "leave it out for float64 itself"}
_CHOICES = f"it can be {', '.join(map(repr, config.FLOAT32_PRECISIONS[:-1]))} or {config.FLOAT32_PRECISIONS[-1]!r}"
_UNSET = "unset"  # the environment has not been asked
_default: str | None = _UNSET


def set_float32_precision(precision: config.Float32Precision | None) -> None:
    """Set how float32 products on a device may be computed from now on; None restores the default.

    >>> import gemmery as gm
    >>> gm.set_float32_precision("f32_tensor")
    >>> gm.get_float32_precision()
    'f32_tensor'
    >>> gm.set_float32_precision(None)

    It applies where a call names no `precision`, to products of float32 into float32; `matmul` has the values. The
    default is GEMMERY_FLOAT32_PRECISION, else plain float32. A product captured in a CUDA graph stays as it was.

    Raises ArgumentError for any other value.
    """
    global _default
    if precision is not None and not is_one(precision, config.FLOAT32_PRECISIONS):
        raise ArgumentError(f"precision={brief(precision)}: {_CHOICES}, or None for the default")
    _default = config.float32_precision() if precision is None else precision
    table.forget()  # what it has was prepared with the precision of before


def get_float32_precision() -> str | None:
    """Return how float32 products on a device may be computed; None for plain float32.

    It is what was passed to `set_float32_precision`, else GEMMERY_FLOAT32_PRECISION, else None.

    >>> import gemmery as gm
    >>> gm.get_float32_precision() is None
    True
    """
    global _default
    if _default == _UNSET:
        _default = config.float32_precision()
    return _default


def resolved(precision: Any, common: str, result: str, device: str) -> str | None:
    """Return the precision of a product of `common` into `result` on a device: that of the call, or the default.

    Raises ArgumentError for one that the product cannot have, RefusedError for one that the device cannot have.
    """
    effective = checked(precision, common, result)
    if effective is None and (common, result) in (("f32", "f32"), ("complex64", "complex64")):
        effective = get_float32_precision()
        effective = None if common == "complex64" and effective == "f32_plus" else effective
    if effective in _ON_HOPPER and driver.find(device).capability != 90:
        card = driver.find(device)
        raise RefusedError(
            f"precision={effective!r} on {card.name}: only devices of compute capability 9.0 (Hopper) have it, and "
            f"this one has {card.capability // 10}.{card.capability % 10}; {_ON_HOPPER[effective]}"
        )
    return effective


def checked(precision: Any, common: str, result: str) -> str | None:
    """Return the precision that a call names, or None.

    Raises ArgumentError for one that a product of `common` into `result` cannot have on any device.
    """
    if precision is None:
        return None
    float32 = (common, result) == ("f32", "f32") or (common == result == "complex64" and precision != "f32_plus")
    float64 = (common, result) in (("f64", "f64"), ("complex128", "complex128"))
    known = config.FLOAT32_PRECISIONS if float32 else (_OF_FLOAT64,) if float64 else ()
    if not (isinstance(precision, str) and precision in known):  # `in` compares an array element by element
        raise ArgumentError(
            f"precision={brief(precision)} of a product of {dtypes.get(common).numpy} into "
            f"{dtypes.get(result).numpy}: {_CHOICES}, for float32 products, and {_OF_FLOAT64!r} for float64; leave it "
            "out for others"
        )
    return str(precision)


def scales(options: Options, x: View, y: View, common: str, result: str) -> OperandScales:
    """Return the factors of A and B, whose views are x and y, for `scale_a` and `scale_b` of the options.

    `common` is the type in which A and B are multiplied, `result` that of C.

    Raises ShapeError, DTypeError, DeviceError, LayoutError or ArgumentError for factors that are neither one number nor
    as many as an operand has rows, columns or blocks.
    """
    factor, a, b = _read_scales(options, x, common, result)
    if a is None and b is None:
        return NO_SCALES if factor == 1 else OperandScales(factor=factor)
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


def group_scales(options: Options, x: View, y: View, common: str, result: str) -> OperandScales:
    """Return the factors of the rows of A and of the groups of B, as `scales` does for one product."""
    factor, a, b = _read_scales(options, x, common, result)
    if a is None and b is None:
        return NO_SCALES if factor == 1 else OperandScales(factor=factor)
    a = None if a is None else _spread("scale_a", a, (x.shape[0], 1))
    b = None if b is None else _spread("scale_b", b, (y.shape[0], y.shape[2]))
    (row, _), (group, column) = (0, 0) if a is None else a.strides, (0, 0) if b is None else b.strides
    return OperandScales("outer", factor, a, b, Scaling("outer", row // 4, 0, group // 4, column // 4))


def _read_scales(options: Options, x: View, common: str, result: str) -> tuple[float, View | None, View | None]:
    """Return the product of the factors that are numbers, and those that are arrays of float32 on the device of x."""
    product, read = 1.0, []
    for name, value in (("scale_a", options.scale_a), ("scale_b", options.scale_b)):
        if value is not None and (common not in SCALED or result not in ROUNDED):
            have, into = dtypes.get(common).numpy, dtypes.get(result).numpy
            raise DTypeError(
                f"scale_a and scale_b of a product of {have} into {into}: they apply to products of float8, int8, "
                "float16 and bfloat16 into bfloat16, float16 and float32; pass dtype=, or multiply the operands by "
                "them first"
            )
        factors = None
        if isinstance(value, NUMBER):
            product *= scalar(name, value, "f32").real
        elif isinstance(value, str | bytes | complex):
            raise ArgumentError(f"{name}={brief(value)} must be a number, or an array of float32 on the device")
        elif value is not None:
            factors = located(view(value))
            arrays.together(**{"a": x, name: factors})
            if factors.dtype != "f32":
                raise DTypeError(f"{name} is {dtypes.get(factors.dtype).numpy}; factors are float32: convert it first")
        read.append(factors)
    return product, read[0], read[1]


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
