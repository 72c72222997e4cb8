"""Element types: size, accumulator, rounding, and the name each layer knows them by."""

from __future__ import annotations

from dataclasses import dataclass

from gemmery.errors import DTypeError


@dataclass(frozen=True)
class DType:
    """One element type.

    `accumulator` is the type a product of two such elements is summed in, `unit_roundoff` is 2**-p for
    p bits of significand (0 for integers, which wrap).
    """

    name: str
    size: int
    kind: str  # f float, c complex, i signed, u unsigned
    accumulator: str
    llvm: str  # a complex element is two of these
    numpy: str
    unit_roundoff: float


_ROWS = (
    DType("f64", 8, "f", "f64", "double", "float64", 2.0**-53),
    DType("f32", 4, "f", "f32", "float", "float32", 2.0**-24),
    DType("f16", 2, "f", "f32", "half", "float16", 2.0**-11),
    DType("bf16", 2, "f", "f32", "bfloat", "bfloat16", 2.0**-8),
    DType("c64", 8, "c", "c64", "float", "complex64", 2.0**-24),
    DType("c128", 16, "c", "c128", "double", "complex128", 2.0**-53),
    DType("i8", 1, "i", "i32", "i8", "int8", 0.0),
    DType("i16", 2, "i", "i32", "i16", "int16", 0.0),
    DType("i32", 4, "i", "i32", "i32", "int32", 0.0),
    DType("i64", 8, "i", "i64", "i64", "int64", 0.0),
    DType("u8", 1, "u", "u32", "i8", "uint8", 0.0),
    DType("u16", 2, "u", "u32", "i16", "uint16", 0.0),
    DType("u32", 4, "u", "u32", "i32", "uint32", 0.0),
    DType("u64", 8, "u", "u64", "i64", "uint64", 0.0),
)

BY_NAME = {row.name: row for row in _ROWS}
BY_NUMPY_NAME = {row.numpy: row for row in _ROWS}
NAMES = tuple(BY_NAME)


def served() -> str:
    """The served element types in words, for messages."""
    return ", ".join(row.numpy for row in _ROWS)


def get(name: str) -> DType:
    """The element type called `name`, by gemmery's short name or NumPy's long one.

    >>> get("f32") is get("float32")
    True

    Raises DTypeError for a type that is not served.
    """
    found = BY_NAME.get(name) or BY_NUMPY_NAME.get(name)
    if found is None:
        raise DTypeError(f"dtype {name!r} is not served; gemmery multiplies {served()}: convert with astype first")
    return found
