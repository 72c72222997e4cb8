"""The element types in which a product is computed and returned: NumPy's rules, extended by bfloat16."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gemmery import dtypes
from gemmery.errors import DTypeError

_INTO_BFLOAT = ("bool", "int8", "uint8")  # bfloat16 holds every value of these
_ABOVE_BFLOAT = ("f32", "f64", "complex64", "complex128")


@lru_cache
def promoted(a: str, b: str) -> str:
    """Return the element type that holds both, by the rules of `numpy.result_type` and, for bfloat16, of ml_dtypes.

    >>> promoted("f32", "int64"), promoted("uint8", "int8"), promoted("bf16", "f32"), promoted("bool", "int8")
    ('f64', 'int16', 'f32', 'int8')

    Raises DTypeError for a pair that no type holds: bfloat16 with float16 or with wide integers.
    """
    if a == b:
        return a
    if "bf16" in (a, b):
        other = b if a == "bf16" else a
        if other not in (*_INTO_BFLOAT, *_ABOVE_BFLOAT):
            long = dtypes.get(other).numpy
            raise DTypeError(f"bfloat16 and {long} have no common element type; convert both to float32 first")
        return other if other in _ABOVE_BFLOAT else "bf16"
    return dtypes.get(np.promote_types(dtypes.get(a).numpy, dtypes.get(b).numpy).name).name


@lru_cache
def can_cast(source: str, target: str, rule: str) -> bool:
    """Return what `numpy.can_cast` says for rule "safe" or "same_kind"; bfloat16 is cast as a 16-bit float is.

    float8 is cast to no other type, and no other type to it.
    """
    if source in dtypes.FLOAT8 or target in dtypes.FLOAT8:
        return source == target
    if rule == "safe" and source != target and "bf16" in (source, target):
        return target in _ABOVE_BFLOAT or source in _INTO_BFLOAT
    stand_in = {"bf16": "float16"}
    wide, narrow = (stand_in.get(name, dtypes.get(name).numpy) for name in (source, target))
    return bool(np.can_cast(wide, narrow, rule))  # type: ignore[arg-type]


@lru_cache
def widened(common: str, result: str) -> str:
    """Return `wanted`, the type of `dtype=`; raise DTypeError unless it can represent every value of `common`."""
    if not can_cast(common, result, "safe"):
        have, want = dtypes.get(common).numpy, dtypes.get(result).numpy
        raise DTypeError(
            f"dtype={want!r} cannot represent every {have} value; pass a wider type, or convert the operands first"
        )
    return result


def mixed(a: str, b: str, result: str) -> bool:
    """Return True for int8 by uint8, or the reverse, into integers: kernels multiply them as they are.

    >>> mixed("uint8", "int8", "int32"), mixed("uint8", "uint8", "int32"), mixed("int8", "uint8", "f32")
    (True, False, False)
    """
    return a != b and {a, b} == {"int8", "uint8"} and dtypes.get(result).kind == "i"


@lru_cache
def kernel_types(common: str, result: str) -> tuple[str, str]:
    """Return the element types of a kernel: of A and B, to which operands are converted, and of C.

    Kernels widen within one kind of number. Modulo 2**bits signed and unsigned products have the same bits. For a
    product of bools, C counts the pairs of which both are true.

    >>> (
    ...     kernel_types("int8", "int32"),
    ...     kernel_types("uint8", "int32"),
    ...     kernel_types("int32", "f64"),
    ...     kernel_types("bool", "bool"),
    ... )
    (('int8', 'int32'), ('uint8', 'uint32'), ('f64', 'f64'), ('uint8', 'uint32'))
    """
    if result == "bool":
        return "uint8", "uint32"
    inside, outside = dtypes.get(common), dtypes.get(result)
    if inside.kind == outside.kind and inside.kind != "c":
        return common, result
    if inside.kind in "iu" and outside.kind in "iu":
        return common, f"{'int' if inside.kind == 'i' else 'uint'}{8 * outside.size}"
    return result, result
