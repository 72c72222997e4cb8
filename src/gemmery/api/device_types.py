"""Element types on a device: where a view is, and the types in which its products are computed and returned."""

from __future__ import annotations

from functools import lru_cache

from gemmery import dtypes
from gemmery.api.promote import promoted, widened
from gemmery.arrays import View
from gemmery.cuda import driver, ordered
from gemmery.errors import DTypeError, LayoutError

SERVED = ("f64", "f32", "f16", "bf16")
_HOPPER = 90  # the only compute capability with wgmma, by which 8-bit types and factors are multiplied
ROUNDED = ("bf16", "f16", "f32")  # results of 8-bit types, and of operands with factors


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


def types(x: View, y: View, dtype: str | None, like: str | None) -> tuple[str, str]:
    """Return the type to which A and B are converted, and that of the result.

    `dtype` is the type that `dtype=` names. `like` is that of `out` or of the C that beta multiplies, which decides on
    results of 8-bit types that `dtype=` does not.

    Raises DTypeError for types that the device does not multiply.
    """
    eight = [name for name in (x.dtype, y.dtype) if name == "int8" or name in dtypes.FLOAT8]
    if eight:
        return _of_eight_bits(x, y, dtype or like)
    for z in (x, y):
        if z.dtype not in SERVED:
            raise unserved(z)
    common = promoted(x.dtype, y.dtype)
    result = common if dtype is None else widened(common, dtype)
    if result not in SERVED:
        raise DTypeError(f"dtype={dtypes.get(result).numpy!r} is not supported on {x.device}; pass float64 or float32")
    return common, result


def unserved(z: View) -> DTypeError:
    """Return the error for an operand of a type that devices do not multiply."""
    return DTypeError(
        f"{dtypes.get(z.dtype).numpy} on {z.device}: devices multiply float64, float32, float16 and bfloat16, and "
        "float8 and int8 where their compute capability is 9.0; convert the operand, or move it to the CPU, which "
        "multiplies every type but float8"
    )


def _of_eight_bits(x: View, y: View, dtype: str | None) -> tuple[str, str]:
    """Return the types of a product of which an operand is float8 or int8."""
    long, other = (dtypes.get(z.dtype).numpy for z in (x, y))
    if x.dtype != y.dtype:
        raise DTypeError(
            f"a is {long} and b is {other}: on a device float8 and int8 are multiplied by their own type only; convert "
            "both operands to float16, which holds every value of 8-bit types, or to another type"
        )
    whole = x.dtype == "int8"
    result = dtype or ("int8" if whole else "bf16")
    if result in ROUNDED or (whole and result == "int32"):
        return x.dtype, result
    wraps = " sums would wrap around;" if result == "int8" else ""
    raise DTypeError(
        f"a product of {long} into {dtypes.get(result).numpy} on {x.device}:{wraps} the result can be "
        f"{'int32, ' if whole else ''}bfloat16, float16 or float32; pass one of them as dtype=, or an out of that type"
    )


@lru_cache
def check_capability(dtype: str, has_factors: bool, device: str) -> None:
    """Raise DTypeError if a device has no kernels for 8-bit types, or for operands with arrays of factors."""
    eight = dtype == "int8" or dtype in dtypes.FLOAT8
    card = driver.find(device) if eight or has_factors else None
    if card is not None and card.capability != _HOPPER:
        long = dtypes.get(dtype).numpy
        what = f"{long} operands" if eight else f"arrays of factors of {long} operands"
        way = "convert the operands to float16" if eight else "multiply the operands by them first"
        raise DTypeError(
            f"{what} on {card.name}: only devices of compute capability 9.0 (Hopper) multiply them, and this one has "
            f"{card.capability // 10}.{card.capability % 10}; {way}"
        )
