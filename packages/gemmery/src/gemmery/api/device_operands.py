"""What a product on a device reads: the element types of its operands, its precision, and factors.

Factors, `scale_a` and `scale_b`, that are numbers become a part of alpha; arrays go to the kernel.
"""

# No `from __future__ import annotations` here: help() would show annotations as strings.
from functools import lru_cache
from typing import Any

from gemmery import arrays, config, dtypes
from gemmery.api.device_call import NO_SCALES, CheckedCall, OperandScales, located, table
from gemmery.api.options import NUMBER, dtype_name, scalar
from gemmery.api.promote import can_cast, kernel_types, promoted, widened
from gemmery.arrange import Ints
from gemmery.arrays import View, view
from gemmery.cuda import driver
from gemmery.cuda.geometry import Scaling
from gemmery.errors import ArgumentError, DTypeError, RefusedError, ShapeError, brief, is_one
from gemmery.keywords import Options

_HOPPER = 90  # the only compute capability with wgmma, by which 8-bit types and factors are multiplied
ROUNDED = ("bf16", "f16", "f32")  # results of 8-bit types, and of operands with factors
_FEW_ROWS, _SMALL = 16, 1 << 28  # rows or columns of C, and multiply-adds, up to which mixed types are not converted
BLOCK = 128  # rows and columns of an operand that share a factor
SCALED = (*dtypes.TENSOR_FLOAT8, "int8", "f16", "bf16")  # element types of operands that may have factors


def types(a: View, b: View, dtype: Any, c: View | None = None, old: View | None = None) -> tuple[str, str]:
    """Return the type to which A and B are converted, and that of the result.

    `dtype` is what `dtype=` names. Where it names none, that of `old`, the C that beta multiplies, or of `c`, which is
    `out`, decides on results of float8 and int8.

    Raises DTypeError for types that the device does not multiply.
    """
    dtype, wide = None if dtype is None else dtype_name(dtype), old or c
    if a.dtype in dtypes.FLOAT8 or b.dtype in dtypes.FLOAT8:
        return _of_float8(a, b, dtype or (wide and wide.dtype))
    common = promoted(a.dtype, b.dtype)
    if dtype is None and wide is not None and common == "int8" and can_cast(common, wide.dtype, "safe"):
        dtype = wide.dtype
    result = common if dtype is None else widened(common, dtype)
    result = result if old is None else promoted(result, old.dtype)
    return common if common == "int8" and result in ROUNDED else operand_type(common, result), result


def operand_type(common: str, result: str) -> str:
    """Return the type in which a device reads A and B that promote to `common`, for a product of type `result`."""
    return "bool" if result == "bool" else kernel_types(common, result)[0]


def stay_mixed(call: CheckedCall) -> bool:
    """Return True if a kernel widens A and B of two types as it loads them: float8, and small products on CUDA cores.

    Others are converted before: that takes a small part of a large product, which then runs by a faster kernel.
    """
    a, b = call.a, call.b
    if a.dtype == b.dtype or a.dtype in dtypes.FLOAT8:
        return a.dtype != b.dtype
    kinds = {dtypes.get(dtype).kind for dtype in (call.common, call.result)}
    if min(len(a.shape), len(b.shape)) < 2 or call.options.precision is not None or kinds & {"c", "b"}:
        return False
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    return min(m, n) > 1 and (min(m, n) <= _FEW_ROWS or (call.common not in ("f16", "bf16") and m * n * k <= _SMALL))


def _of_float8(a: View, b: View, dtype: str | None) -> tuple[str, str]:
    """Return the type of A and that of the product where an operand is float8; B may be the other kind."""
    long = dtypes.get(a.dtype).numpy
    if a.dtype != b.dtype and not {a.dtype, b.dtype}.issubset(dtypes.TENSOR_FLOAT8):
        raise DTypeError(
            f"a is {long} and b is {dtypes.get(b.dtype).numpy}: on a device float8 is multiplied by float8 only; "
            "convert both operands to float16, which holds every value of 8-bit types, or to another type"
        )
    result = dtype or "bf16"
    if result in ROUNDED:
        return a.dtype, result
    raise DTypeError(
        f"a product of {long} into {dtypes.get(result).numpy} on {a.device}: the result can be bfloat16, float16 or "
        "float32; pass one of them as dtype=, or an out of that type"
    )


def on_card(call: CheckedCall) -> CheckedCall:
    """Return a checked call with what applies on devices alone: precision and factors, if the card has kernels for it.

    Raises DTypeError where it has none, and RefusedError for a precision that it cannot have.
    """
    a, b, options, common, result = call.a, call.b, call.options, call.common, call.result
    precision = options.precision
    if call.offsets is None:
        precision = None if options.semiring else resolved(precision, common, result, a.device)
    options = options._replace(precision=precision, batch_invariant=bool(options.batch_invariant))
    factors = scales(options, a, b, common, result, call.offsets is not None and len(b.shape) == 3)
    check_capability(common, result, bool(factors.kind), a.device)
    if options.alpha == 0:  # BLAS then reads neither A nor B
        a = a._replace(shape=(*a.shape[:-1], 0), dtype=common)
        b = b._replace(shape=(*b.shape[:-2], 0, *b.shape[-1:]) if len(b.shape) > 1 else (0,), dtype=common)
    if factors.factor != 1:
        options = options._replace(alpha=scalar("scale_a times scale_b", options.alpha * factors.factor, result))
    return call._replace(a=a, b=b, options=options, scales=factors)


@lru_cache
def check_capability(dtype: str, result: str, has_factors: bool, device: str) -> None:
    """Raise DTypeError if a device has no kernels for 8-bit types, or for operands with arrays of factors."""
    eight = dtype in dtypes.TENSOR_FLOAT8 or (dtype == "int8" and result in ROUNDED)
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
_KNOWN: dict[tuple[str, str], tuple[str, ...]] = {  # by the types of operands and of the result
    ("f32", "f32"): config.FLOAT32_PRECISIONS,
    ("complex64", "complex64"): tuple(name for name in config.FLOAT32_PRECISIONS if name != "f32_plus"),
    **dict.fromkeys((("f64", "f64"), ("complex128", "complex128")), (_OF_FLOAT64,)),
}
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
    effective, known = checked(precision, common, result), _KNOWN.get((common, result), ())
    if effective is None and len(known) > 1:
        default = get_float32_precision()
        effective = default if default in known else None
    if effective in _ON_HOPPER and driver.find(device).capability != _HOPPER:
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
    if precision is not None and not is_one(precision, _KNOWN.get((common, result), ())):
        raise ArgumentError(
            f"precision={brief(precision)} of a product of {dtypes.get(common).numpy} into "
            f"{dtypes.get(result).numpy}: {_CHOICES}, for float32 products, and {_OF_FLOAT64!r} for float64; leave it "
            "out for others"
        )
    return None if precision is None else str(precision)


def scales(options: Options, a: View, b: View, common: str, result: str, grouped: bool = False) -> OperandScales:
    """Return the factors of A and B for `scale_a` and `scale_b` of the options; if `grouped`, of rows and of groups.

    `common` is the type in which A and B are multiplied, `result` that of C.

    Raises ShapeError, DTypeError, DeviceError, LayoutError or ArgumentError for factors that are neither one number nor
    as many as an operand has rows, columns or blocks.
    """
    factor, of_a, of_b = _read_scales(options, a, common, result)
    if of_a is None and of_b is None:
        return NO_SCALES._replace(factor=factor)
    if grouped:
        of_a = of_a and _spread("scale_a", of_a, (a.shape[0], 1))
        of_b = of_b and _spread("scale_b", of_b, (b.shape[0], b.shape[2]))
        (row, _), (group, column) = of_a.strides if of_a else (0, 0), of_b.strides if of_b else (0, 0)
        return OperandScales("outer", factor, of_a, of_b, Scaling("outer", row // 4, 0, group // 4, column // 4))
    m, k = a.shape[-2] if len(a.shape) > 1 else 1, a.shape[-1]
    n = b.shape[-1] if len(b.shape) > 1 else 1
    alone = len(a.shape) <= 2 and len(b.shape) <= 2
    each_row, each_column = _along(of_a, alone, (m,), (m, 1)), _along(of_b, alone, (n,), (1, n))
    if each_row is not None and each_column is not None:
        return OperandScales("outer", factor, of_a, of_b, Scaling("outer", each_row, 0, 0, each_column))
    pieces, columns = -(-k // BLOCK), -(-n // BLOCK)
    blocks = (m, pieces), (pieces, columns)
    if alone and of_a is not None and of_b is not None and (of_a.shape, of_b.shape) == blocks:
        if common not in dtypes.FLOAT8:
            raise DTypeError(
                f"factors of blocks of {BLOCK} apply to float8 products, not to {dtypes.get(common).numpy}: pass one "
                f"for each row of a, shape ({m},), and one for each column of b, shape ({n},)"
            )
        return OperandScales("blocks", factor, of_a, of_b, Scaling("blocks", *_steps(of_a), *_steps(of_b)))
    have = ", ".join(f"{name} of shape {z.shape}" for name, z in (("scale_a", of_a), ("scale_b", of_b)) if z)
    if not alone:
        raise ShapeError(f"{have}: with batch dimensions (shapes {a.shape} and {b.shape}) each operand has one factor")
    both = f", or, for blocks of {BLOCK}, both have the shapes {blocks[0]} and {blocks[1]}"
    raise ShapeError(
        f"{have} for operands of shapes {a.shape} and {b.shape}: scale_a is one number or has the shape ({m},), "
        f"scale_b is one number or has the shape ({n},){both if a.dtype in dtypes.FLOAT8 else ''}"
    )


def _read_scales(options: Options, a: View, common: str, result: str) -> tuple[float, View | None, View | None]:
    """Return the product of the factors that are numbers, and those that are arrays of float32 on the device of A."""
    factor, read = 1.0, []
    for name, value in (("scale_a", options.scale_a), ("scale_b", options.scale_b)):
        if value is not None and (common not in SCALED or result not in ROUNDED):
            have, into = dtypes.get(common).numpy, dtypes.get(result).numpy
            raise DTypeError(
                f"scale_a and scale_b of a product of {have} into {into}: they apply to products of float8, int8, "
                "float16 and bfloat16 into bfloat16, float16 and float32; pass dtype=, or multiply the operands by "
                "them first"
            )
        z = None
        if isinstance(value, NUMBER):
            factor *= scalar(name, value, "f32").real
        elif isinstance(value, str | bytes | complex):
            raise ArgumentError(f"{name}={brief(value)} must be a number, or an array of float32 on the device")
        elif value is not None:
            z = located(view(value))
            arrays.together(**{"a": a, name: z})
            if z.dtype != "f32":
                raise DTypeError(f"{name} is {dtypes.get(z.dtype).numpy}; factors are float32: convert it first")
        read.append(z)
    return factor, read[0], read[1]


def _spread(name: str, z: View, shape: Ints) -> View:
    """Return factors as an array of this shape, with a stride of 0 where they are fewer."""
    if z.shape in ((), (1,)):
        return z._replace(shape=shape, strides=(0, 0))
    if z.shape == shape[:1]:
        return z._replace(shape=shape, strides=(z.strides[0], 0))
    if z.shape == shape:
        return z._replace(strides=(z.strides[0], 0 if shape[1] == 1 else z.strides[1]))
    what = "one for each row of a" if name == "scale_a" else "one for each group, or for each column of each"
    raise ShapeError(f"{name} has shape {z.shape}; it must be one number, or {what}: shape {shape[:1]} or {shape}")


def _along(z: View | None, alone: bool, *shapes: Ints) -> int | None:
    """Return the elements from a factor to the next, or 0 for a single factor; None if z has none of the shapes.

    An operand with batch dimensions, which is not `alone`, has a single factor.
    """
    if z is None or z.shape in ((), (1,), (1, 1)):
        return 0
    return sum(_steps(z)) if alone and z.shape in shapes else None


def _steps(z: View) -> Ints:
    """Return the elements from one factor to the next along each dimension, 0 along those of length 1."""
    return tuple(0 if n == 1 else stride // 4 for n, stride in zip(z.shape, z.strides, strict=True))
