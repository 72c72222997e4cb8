"""Element types: size, accumulator, unit roundoff, and their names in LLVM, NumPy and elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from time import time_ns

from gemmery.errors import DTypeError, brief
from gemmery.tuples import NamedTuple

TYPE_CHECKING = False  # type checkers assume True; importing `typing` takes 2 ms, and NumPy's types more
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"  # a NumPy array of any element type, in annotations

# When the sources of kernels began to be imported: every other one imports this module first. A file that changes later
# is not what this process runs.
IMPORTED_AT = time_ns()


class DType(NamedTuple):
    """One element type.

    `accumulator` is the type in which products of two elements are summed; `unit_roundoff` is 2**-p for p bits of
    significand, and 0 for integers, which wrap.
    """

    name: str
    size: int
    kind: str  # f float, c complex, i signed, u unsigned, b bool
    accumulator: str
    llvm: str  # a complex element is two of these
    numpy: str
    unit_roundoff: float


_ROWS = (
    DType("f64", 8, "f", "f64", "double", "float64", 2.0**-53),
    DType("f32", 4, "f", "f32", "float", "float32", 2.0**-24),
    DType("f16", 2, "f", "f32", "half", "float16", 2.0**-11),
    DType("bf16", 2, "f", "f32", "bfloat", "bfloat16", 2.0**-8),
    DType("complex64", 8, "c", "complex64", "float", "complex64", 2.0**-24),
    DType("complex128", 16, "c", "complex128", "double", "complex128", 2.0**-53),
    DType("int8", 1, "i", "int32", "i8", "int8", 0.0),
    DType("int16", 2, "i", "int32", "i16", "int16", 0.0),
    DType("int32", 4, "i", "int32", "i32", "int32", 0.0),
    DType("int64", 8, "i", "int64", "i64", "int64", 0.0),
    DType("uint8", 1, "u", "uint32", "i8", "uint8", 0.0),
    DType("uint16", 2, "u", "uint32", "i16", "uint16", 0.0),
    DType("uint32", 4, "u", "uint32", "i32", "uint32", 0.0),
    DType("uint64", 8, "u", "uint64", "i64", "uint64", 0.0),
)

# Bytes of LLVM's types.
SIZES = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "ptr": 8}

# A product of bools is the "or" of "and"s: pairs are counted in uint32 and the counts compared with 0.
BOOL = DType("bool", 1, "b", "uint32", "i8", "bool", 0.0)

# Eight bits with 4 or 5 of exponent, which devices of compute capability 9.0 multiply, and CPUs do not.
FP8 = {
    "e4m3": DType("e4m3", 1, "f", "f32", "i8", "float8_e4m3fn", 2.0**-4),
    "e5m2": DType("e5m2", 1, "f", "f32", "i8", "float8_e5m2", 2.0**-3),
}

NAMES = tuple(row.name for row in _ROWS)  # the types of numbers, which kernels of the CPU multiply
BY_NAME = {row.name: row for row in (*_ROWS, BOOL)}
BY_NUMPY_NAME = {row.numpy: row for row in BY_NAME.values()}
_BY_ANY_NAME = {**BY_NUMPY_NAME, **{row.numpy: row for row in FP8.values()}, **BY_NAME, **FP8}

# NumPy's short codes, and others, with one meaning. Codes of integers have two.
_CODES = {
    "f2": "f16",
    "f4": "f32",
    "f8": "f64",
    "c8": "complex64",
    "c16": "complex128",
    "c64": "complex64",
    "c128": "complex128",
    "half": "f16",
    "single": "f32",
    "double": "f64",
}


def supported() -> str:
    """Return the supported element types in words, for messages."""
    return ", ".join(BY_NUMPY_NAME)


def get(name: str) -> DType:
    """Return the element type called `name`, by gemmery's name or NumPy's.

    >>> get("f32") is get("float32")
    True

    Raises DTypeError for a type that is not supported.
    """
    row = _BY_ANY_NAME.get(name)
    if row is None:
        raise DTypeError(
            f"dtype {name!r} is not supported; gemmery multiplies {supported()}: convert with astype first"
        )
    return row


def written(name: str) -> str:
    """Return the type of C that a product of this type has unless another is asked for: float8 is not one.

    >>> written("e4m3"), written("f16")
    ('bf16', 'f16')
    """
    return "bf16" if name in FP8 else name


def resolve(spelling: object, known: Iterable[str] = NAMES, also: Iterable[str] = ()) -> str:
    """Return gemmery's name of an element type, however it is spelled.

    >>> resolve("float32"), resolve("F32"), resolve("f4"), resolve("half"), resolve("int8")
    ('f32', 'f32', 'f32', 'f16', 'int8')

    `known` are the names that are allowed; `also` lists names that are no element types and are returned as they are,
    such as "tf32".

    Raises DTypeError for a code such as "i8", which is int64 to NumPy and int8 to others, and for anything else that is
    no name; the message suggests names that are spelled alike.
    """
    known, also = tuple(known), tuple(also)
    if not isinstance(spelling, str):
        raise DTypeError(f"dtype {brief(spelling)}: write the name of a type, such as 'f32'")
    lower = spelling.strip().lower()
    if meanings := meanings_of_code(lower):
        raise DTypeError(f"dtype {spelling!r} {meanings}")
    row = _BY_ANY_NAME.get(_CODES.get(lower, lower))
    name = row.name if row else lower
    if name in known or name in also:
        return name
    close = _alike(lower, known, also)
    meant = f"; did you mean {' or '.join(close)}?" if close else "."
    raise DTypeError(f"dtype {brief(spelling)} is not supported{meant} Supported: {', '.join((*known, *also))}")


def meanings_of_code(code: str) -> str:
    """Return why the code of an integer is refused: it counts bytes in NumPy and bits elsewhere; else "".

    >>> meanings_of_code("i8")
    "counts bytes in NumPy (int64) and bits elsewhere (int8): write 'int64' or 'int8'"
    """
    kind = {"i": "int", "u": "uint"}.get(code[:1])
    if not kind or not code[1:].isdecimal() or len(code) > 3:
        return ""
    in_bytes, in_bits = f"{kind}{8 * int(code[1:])}", f"{kind}{code[1:]}"
    names = " or ".join(repr(name) for name in (in_bytes, in_bits) if name in _BY_ANY_NAME)
    return names and f"counts bytes in NumPy ({in_bytes}) and bits elsewhere ({in_bits}): write {names}"


def _alike(spelling: str, known: tuple[str, ...], also: tuple[str, ...]) -> list[str]:
    """At most two names that are spelled like `wanted`, as literals."""
    from difflib import get_close_matches  # brings `re`, which a product does not need

    names = {**{name: name for name in (*known, *also)}, **{get(name).numpy: name for name in known}}
    close = dict.fromkeys(names[match] for match in get_close_matches(spelling, names, 3))
    return [repr(name) for name in close][:2]
