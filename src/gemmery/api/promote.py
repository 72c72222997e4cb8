"""Which element type a product is computed in and returned in: NumPy's rules, with bfloat16 beside them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gemmery import dtypes
from gemmery.errors import DTypeError

_WITH_BFLOAT = {
    "bf16",
    "i8",
    "u8",
    "f32",
    "f64",
    "c64",
    "c128",
}  # types that bfloat16 promotes with; above it, or within it


@lru_cache
def promoted(a: str, b: str) -> str:
    """The element type that holds both, as `numpy.result_type` says; bfloat16 as ml_dtypes says.

    >>> promoted("f32", "i64"), promoted("u8", "i8"), promoted("bf16", "f32")
    ('f64', 'i16', 'f32')

    Raises DTypeError for a pair that no type holds: bfloat16 with float16 or with wide integers.
    """
    if a == b:
        return a
    if "bf16" in (a, b):
        other = b if a == "bf16" else a
        if other not in _WITH_BFLOAT:
            long = dtypes.get(other).numpy
            raise DTypeError(f"bfloat16 and {long} have no common element type: convert both to float32 first")
        return other if other[0] in "fc" else "bf16"
    return dtypes.get(np.promote_types(dtypes.get(a).numpy, dtypes.get(b).numpy).name).name


@lru_cache
def can_cast(source: str, target: str, rule: str) -> bool:
    """`numpy.can_cast` with rule "safe" or "same_kind"; bfloat16 is cast like a float16 that is not one."""
    if rule == "safe" and source != target and "bf16" in (source, target):
        return target in ("f32", "f64", "c64", "c128") or source in ("i8", "u8")
    stand_in = {"bf16": "float16"}
    wide, narrow = (stand_in.get(name, dtypes.get(name).numpy) for name in (source, target))
    return bool(np.can_cast(wide, narrow, rule))  # type: ignore[arg-type]


@lru_cache
def widened(common: str, wanted: str) -> str:
    """`wanted`, the element type asked for with `dtype=`, if it holds every value of `common`; else a DTypeError."""
    if not can_cast(common, wanted, "safe"):
        have, want = dtypes.get(common).numpy, dtypes.get(wanted).numpy
        raise DTypeError(
            f"dtype={want!r} does not hold every {have}: ask for a wider type, or convert the operands first"
        )
    return wanted


@lru_cache
def kernel_types(common: str, result: str) -> tuple[str, str]:
    """(element type of A and B, of C) that a kernel is asked for; operands are converted to the first.

    Kernels widen within one kind of number. Modulo 2**bits signed and unsigned products have the same bits.

    >>> kernel_types("i8", "i32"), kernel_types("u8", "i32"), kernel_types("i32", "f64")
    (('i8', 'i32'), ('u8', 'u32'), ('f64', 'f64'))
    """
    inside, outside = dtypes.get(common), dtypes.get(result)
    if inside.kind == outside.kind and inside.kind != "c":
        return common, result
    if inside.kind in "iu" and outside.kind in "iu":
        return common, f"{inside.kind}{8 * outside.size}"
    return result, result
