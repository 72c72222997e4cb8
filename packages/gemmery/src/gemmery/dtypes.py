"""Element types: size, accumulator, rounding, and their names in each library and language."""

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
    """One element type; a name is "" where a language has no such type.

    `accumulator` is the type in which products of two elements are summed; `unit_roundoff` is 2**-p for p bits of
    significand, and 0 for integers, which wrap.
    """

    name: str
    size: int
    kind: str  # f float, c complex, i signed, u unsigned, b bool
    accumulator: str
    unit_roundoff: float
    normal: int  # exponent of the least normal number
    numpy: str  # PyTorch's name too, and that of ml_dtypes where NumPy has no such type
    stored: str  # NumPy's type of the same bits
    dlpack: int  # its code
    xla: int  # its number in `XLA_FFI_DataType`
    llvm: str  # a complex element is two of these
    cpp: str = ""  # of kernels on devices
    ptx: str = ""  # in opcodes of products
    tensor_map: str = ""  # of CUDA's driver
    largest: float = 0.0  # to which casts take what is larger; 0 where they make it an infinity

    @property
    def fraction(self) -> int:
        """Bits of a float that are stored after the leading one."""
        return int(1 / self.unit_roundoff).bit_length() - 2


DTYPES = (
    DType("f64", 8, "f", "f64", 2.0**-53, -1022, "float64", "float64", 2, 12, "double", "double", "f64"),
    DType("f32", 4, "f", "f32", 2.0**-24, -126, "float32", "float32", 2, 11, "float", "float", "f32", "FLOAT32"),
    DType("f16", 2, "f", "f32", 2.0**-11, -14, "float16", "float16", 2, 10, "half", "f16", "f16", "FLOAT16"),
    DType("bf16", 2, "f", "f32", 2.0**-8, -126, "bfloat16", "uint16", 4, 16, "bfloat", "bf16", "bf16", "BFLOAT16"),
    DType("complex64", 8, "c", "complex64", 2.0**-24, -126, "complex64", "complex64", 5, 15, "float", "complex64"),
    DType(
        "complex128", 16, "c", "complex128", 2.0**-53, -1022, "complex128", "complex128", 5, 18, "double", "complex128"
    ),
    DType("int8", 1, "i", "int32", 0.0, 0, "int8", "int8", 0, 2, "i8", "i8", "s8", "UINT8", 127.0),
    DType("int16", 2, "i", "int32", 0.0, 0, "int16", "int16", 0, 3, "i16", "i16"),
    DType("int32", 4, "i", "int32", 0.0, 0, "int32", "int32", 0, 4, "i32", "int", "", "INT32"),
    DType("int64", 8, "i", "int64", 0.0, 0, "int64", "int64", 0, 5, "i64", "i64"),
    DType("uint8", 1, "u", "uint32", 0.0, 0, "uint8", "uint8", 1, 6, "i8", "u8", "u8"),
    DType("uint16", 2, "u", "uint32", 0.0, 0, "uint16", "uint16", 1, 7, "i16", "u16"),
    DType("uint32", 4, "u", "uint32", 0.0, 0, "uint32", "uint32", 1, 8, "i32", "u32"),
    DType("uint64", 8, "u", "uint64", 0.0, 0, "uint64", "uint64", 1, 9, "i64", "u64"),
    # A product of bools is the "or" of "and"s: pairs are counted in uint32 and the counts compared with 0.
    DType("bool", 1, "b", "uint32", 0.0, 0, "bool", "bool", 6, 1, "i8", "flag"),
    # Which devices of compute capability 9.0 multiply, and CPUs do not.
    DType("e4m3", 1, "f", "f32", 2.0**-4, -6, "float8_e4m3fn", "uint8", 10, 20, "i8", "e4m3", "e4m3", "UINT8", 448.0),
    DType("e5m2", 1, "f", "f32", 2.0**-3, -14, "float8_e5m2", "uint8", 12, 19, "i8", "e5m2", "e5m2", "UINT8", 57344.0),
)

# Bytes of LLVM's types.
SIZES = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "ptr": 8}

FLOAT8 = tuple(row.name for row in DTYPES if row.kind == "f" and row.size == 1)  # that devices alone multiply
TENSOR_FLOAT8 = tuple(row.name for row in DTYPES if row.name in FLOAT8 and row.ptx)  # by tensor cores
NAMES = tuple(row.name for row in DTYPES if row.kind != "b" and row.name not in FLOAT8)  # that CPUs multiply as numbers
CASTS = (*(row.name for row in DTYPES if row.kind == "f" and row.ptx), "int8")  # to which an epilogue rounds
BY_NAME = {row.name: row for row in DTYPES if row.name not in FLOAT8}
BY_NUMPY_NAME = {row.numpy: row for row in BY_NAME.values()}
_BY_ANY_NAME = {row.numpy: row for row in DTYPES} | {row.name: row for row in DTYPES}

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
    return "bf16" if name in FLOAT8 else name


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
    from difflib import get_close_matches  # brings `re`, which a product does not need

    names = {**{name: name for name in (*known, *also)}, **{get(name).numpy: name for name in known}}
    alike = dict.fromkeys(names[match] for match in get_close_matches(lower, names, 3))
    close = [repr(name) for name in alike][:2]
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
