"""The arguments of a product as callers spell them: options, what NumPy's functions take besides, and their checks."""

# No `from __future__ import annotations` here: help() would show annotations as strings.
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from gemmery import dtypes
from gemmery.api.promote import can_cast, promoted, widened
from gemmery.arrange import Ints, result_shape
from gemmery.arrays import View, view
from gemmery.cpu import threads as cpu_threads
from gemmery.errors import ArgumentError, DTypeError, GemmeryError, LayoutError, ShapeError, brief
from gemmery.keywords import ACTIVATIONS, DEFAULTS, LIKE_NUMPY, NAMES, NO_OPTIONS, OPTIONS, SEMIRINGS, Options

NUMBER = (int, float, complex, np.number)  # types of options that are numbers
# The values that ask for what is done anyway, and the way out for others.
_NUMPYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "order": (("K", "A", "C"), "pass an out of that order, np.empty(shape, order='F'), or copy the result"),
    "casting": (("same_kind", "safe"), "convert an operand or the result with astype"),
    "axes": ((None,), "reorder the dimensions with np.moveaxis, or name them by letters in gm.einsum"),
    "axis": ((None,), "reorder the dimensions with np.moveaxis, or call gm.vecdot"),
    "keepdims": ((False,), "index the result with None"),
    "where": ((True,), "multiply a copy in which the other elements are 0"),
    "subok": ((True,), "pass np.asarray(x)"),
    "signature": ((None,), "pass dtype="),
}


def own_options(function: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return those keywords of a call of `function` that are its options; none where all have their defaults.

    Raises TypeError for a keyword that is no option, and the errors of `check_numpys`.
    """
    names = NAMES[function]
    if not names.issuperset(keywords):
        others = {name: value for name, value in keywords.items() if name not in names}
        if function not in LIKE_NUMPY:
            raise TypeError(f"{function}() got an unexpected keyword argument {next(iter(others))!r}")
        check_numpys(function, others)
        keywords = {name: value for name, value in keywords.items() if name in names}
    for name, value in keywords.items():
        if value is not DEFAULTS[name]:
            return keywords
    return {}


def record(function: str, keywords: dict[str, Any]) -> Options:
    """Return the options of a call of `function`, as `own_options` has them; NO_OPTIONS itself without any."""
    own = own_options(function, keywords)
    return Options(**own) if own else NO_OPTIONS


def check_numpys(function: str, keywords: Mapping[str, Any]) -> None:
    """Raise ArgumentError for an option that NumPy has and gemmery has not, TypeError for one that neither has."""
    for name, value in keywords.items():
        if name not in _NUMPYS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        values, way_out = _NUMPYS[name]
        if not any(value is known or (isinstance(value, str) and value == known) for known in values):
            raise ArgumentError(f"{function} has no {name}={brief(value)}: {way_out}")


def check_operands(operands: Any) -> None:
    """Raise ArgumentError for operands without an epilogue."""
    if operands is not None:
        raise ArgumentError(
            f"operands={brief(operands)} are those of epilogue=, which is not passed: pass a function, or leave it out"
        )


def single(out: Any) -> Any:
    """Return `out`, which NumPy also takes as a tuple of one array."""
    if type(out) is not tuple:
        return out
    if len(out) != 1:
        raise ArgumentError(f"out is a tuple of {len(out)}: pass one array, or a tuple of one")
    return out[0]


def in_order(result: Any, order: str) -> Any:
    """Return a new result of NumPy, or a number, with its elements in the order "C" or "F"."""
    if order not in ("C", "F") or np.isscalar(result):
        return result
    if isinstance(result, np.ndarray):
        return np.asanyarray(result, order=order)  # type: ignore[call-overload]
    raise ArgumentError(f"order={order!r} is for NumPy arrays, not for a {type(result).__name__}: pass an out instead")


def viewed(name: str, array: Any) -> View:
    """Return the memory of the argument called `name`, which an error names."""
    try:
        return view(array)
    except GemmeryError as error:
        if type(array).__module__.partition(".")[0] == "jax":
            raise LayoutError(
                f"{name} is a {type(array).__name__}: JAX is tracing, and gives no numbers: call gemmery.jax.matmul "
                "there"
            ) from error
        text = str(error)
        text = (
            f"{name} is{text.removeprefix('an operand is')}" if text.startswith("an operand is") else f"{name}: {text}"
        )
        raise type(error)(text) from error.__cause__


def filling(x: View, y: View, out: tuple[int, ...]) -> tuple[View, View]:
    """Return the operands, one of them repeated as often as an `out` with more batches than the product asks for."""
    shape = result_shape(x.shape, y.shape)
    ending = min(len(x.shape) - 1, 1) + min(len(y.shape) - 1, 1)
    batch, own = out[: len(out) - ending], y if len(y.shape) > 1 else x
    core = min(len(own.shape), 2)
    have, missing = own.shape[:-core], len(batch) - len(own.shape) + core
    narrow = [n for n, most in zip(reversed(shape[: len(shape) - ending]), reversed(batch), strict=False) if n != most]
    if shape == out or missing < 0 or len(out) < len(shape) or any(n != 1 for n in narrow):
        return x, y  # nothing to fill, or `compute` says what is wrong
    steps = (*(0,) * missing, *(0 if n == 1 else step for n, step in zip(have, own.strides, strict=False)))
    shape, steps = (*batch, *own.shape[-core:]), (*steps, *own.strides[-core:])
    wide = own._replace(shape=shape, strides=steps, owner=own)
    return (x, wide) if own is y else (wide, y)


def dtype_name(dtype: Any) -> str:
    """Return gemmery's name of `dtype`, in gemmery's, NumPy's, ml_dtypes' or PyTorch's spelling."""
    try:
        text = str(dtype).removeprefix("torch.")
    except Exception:  # of an object's own __str__
        text = brief(dtype)
    if text not in dtypes.BY_NAME and text not in dtypes.BY_NUMPY_NAME and not dtypes.meanings_of_code(text):
        try:
            name = np.dtype(dtype).name
        except Exception:  # TypeError, ValueError, or what an object's own `dtype` raises
            name = ""  # not one of NumPy's spellings
        text = name if name in dtypes.BY_NUMPY_NAME else text
    if text in dtypes.FLOAT8 or text in [dtypes.get(name).numpy for name in dtypes.FLOAT8]:
        raise DTypeError(f"dtype={text!r} is not a type of results; pass dtype='bfloat16' and convert the result")
    return dtypes.resolve(text, dtypes.BY_NAME)


def result_types(x: View, y: View, dtype: Any) -> tuple[str, str]:
    """Return the type to which A and B promote on the CPU, and that of the result, for what `dtype=` names."""
    common = promoted(x.dtype, y.dtype)
    return common, common if dtype is None else widened(common, dtype_name(dtype))


def scalar(name: str, value: Any, dtype: str) -> complex:
    """Return alpha or beta as a number by which the element type `dtype` can be multiplied.

    Raises ArgumentError for a value that is not a number, a fraction for integers, or a complex number for real types,
    and DTypeError for bools.
    """
    row = dtypes.get(dtype)
    if hasattr(value, "requires_grad"):
        view(value)  # raises if PyTorch records operations on this tensor: it would not see the product
    if row.kind == "b":
        raise DTypeError("gemm and gemv do not take bool operands alone; use gm.matmul, or convert one to int32 first")
    if type(value) is float and row.kind not in "iu":
        number: complex = value
    elif isinstance(value, str | bytes | bytearray) or getattr(value, "ndim", 0) != 0:
        raise ArgumentError(f"{name} must be a number (got {brief(value)})")
    elif row.kind in "iu":
        return _integer(name, value, row.numpy)
    else:
        try:
            number = complex(value)
        except OverflowError as error:
            raise ArgumentError(f"{name} must be a number below 2**1024 in magnitude (got {brief(value)})") from error
        except Exception as error:  # TypeError, ValueError, or what an object's own methods raise
            raise ArgumentError(f"{name} must be a number (got {brief(value)})") from error
        if row.kind == "f":
            if number.imag != 0:
                raise ArgumentError(
                    f"{name} must be real for {row.numpy} operands (got {brief(value)}); convert a or b to a complex "
                    "type first"
                )
            number = number.real
    if row.accumulator in ("f32", "complex64"):
        return _single(number.real) if row.kind == "f" else complex(_single(number.real), _single(number.imag))
    return number


def _single(value: float) -> float:
    """Return `value`, or an infinity where it rounds to one in float32."""
    return value if abs(value) < _SINGLE_OVERFLOWS or value != value else math.copysign(math.inf, value)


_SINGLE_OVERFLOWS = 2.0**128 - 2.0**103  # half a unit above the largest float32


def _integer(name: str, value: Any, long: str) -> int:
    """Return a scalar by which integers are multiplied."""
    if isinstance(value, complex) and value.imag == 0:
        value = value.real
    try:
        whole = int(value)
        exact = bool(whole == value)
    except Exception:  # TypeError, ValueError, OverflowError, or what an object's own methods raise
        whole, exact = 0, False
    if not exact:
        raise ArgumentError(
            f"{name} must be an integer for {long} operands (got {brief(value)}); convert a or b to float64 first"
        )
    return whole


def set_num_threads(count: int | None) -> None:
    """Set the number of CPU threads for all products from now on; None restores the default.

    >>> import gemmery as gm
    >>> gm.set_num_threads(1)

    The default is the number of cores that the process may use. Raises ArgumentError for a count that is not an
    integer from 1 to 256, or to the number of cores where there are more.
    """
    cpu_threads.set_(count)


def get_num_threads() -> int:
    """Return the number of CPU threads of a product.

    It is the count passed to `set_num_threads`, else GEMMERY_NUM_THREADS, else the number of cores that the process may
    use, at most OMP_NUM_THREADS and SLURM_CPUS_PER_TASK, and shared with an MPI job's other processes here.

    >>> import gemmery as gm
    >>> gm.get_num_threads() >= 1
    True
    """
    return cpu_threads.get()


def thread_count(threads: Any) -> int | None:
    """Return the number of threads that `threads=` asks for, or None."""
    return None if threads is None else cpu_threads.checked(threads)


_LIMITED = [(name, option) for name, option in OPTIONS.items() if option.default is False or option.values]
_ON_DEVICES = [(name, option) for name, option in OPTIONS.items() if option.on_cpu]


def check_values(options: Options) -> None:
    """Raise ArgumentError for options that have another value than True or False, or than the words they can be."""
    for name, option in _LIMITED:
        value = getattr(options, name)
        if option.default is False and not isinstance(value, bool | np.bool_):
            raise ArgumentError(f"{name}={brief(value)} must be True or False")
        if value is not None and option.values and not (isinstance(value, str) and value in option.values):
            raise ArgumentError(
                f"{name}={brief(value)}: on a CUDA device it can be {', '.join(map(repr, option.values))}; "
                f"{option.on_cpu}"
            )


def only_on_devices(options: Options) -> None:
    """Raise ArgumentError if an option of products on a CUDA device is passed for one on the CPU, or a wrong one."""
    if options is NO_OPTIONS:
        return
    check_values(options)
    for name, option in _ON_DEVICES:
        value = getattr(options, name)
        if value is not None:
            raise ArgumentError(f"{name}={brief(value)} applies to products on a CUDA device only; {option.on_cpu}")


_OF_NO_SEMIRING = {
    "bias": "add it to the result",
    "activation": "apply it to the result",
    "precision": "leave it out",
    **dict.fromkeys(("scale_a", "scale_b"), "multiply the operands by them first"),
}


def check_semiring(options: Options, common: str) -> str | None:
    """Return the semiring of a product of operands that promote to `common`; None for the usual one, which bools have.

    Raises ArgumentError for a name that is none and for options that it has not, DTypeError for other element types.
    """
    name: Any = options.semiring
    if name is None:
        return None
    if not isinstance(name, str) or name not in SEMIRINGS:
        raise ArgumentError(f"semiring={brief(name)} must be one of {', '.join(SEMIRINGS)}, or None")
    for option, way_out in _OF_NO_SEMIRING.items():
        if getattr(options, option) is not None:
            raise ArgumentError(f"semiring={name!r} has no {option}: {way_out}")
    long, kind = dtypes.get(common).numpy, dtypes.get(common).kind
    if name == "or_and":
        if kind != "b" or options.dtype is not None:
            raise DTypeError(f"semiring='or_and' takes bools, not {options.dtype or long}: pass a != 0 and b != 0")
        return None
    if kind != "f" or common in dtypes.FLOAT8:
        raise DTypeError(f"semiring={name!r} takes float64, float32, float16 and bfloat16, not {long}: convert first")
    return str(name)


def epilogue_name(bias: Any, activation: str | None, result: str) -> str:
    """Return the name in a Problem of what follows the product. Raises DTypeError for a bias of bools."""
    if bias is not None and result == "bool":
        raise DTypeError("bias cannot be added to a bool product; pass dtype='int32' to count instead")
    check_activation(activation, result)
    return "+".join(part for part in ("" if bias is None else "bias", activation or "") if part)


def check_bias(bias: View, shape: Ints, result: str) -> None:
    """Raise ShapeError or DTypeError unless this is a bias for results of type `result`.

    `shape` is (n,), of a product with n columns, or (groups, n) of grouped products.
    """
    if len(shape) == len(bias.shape) == 2 and bias.shape != shape:
        raise ShapeError(
            f"bias has shape {bias.shape}; it must be one number, one for each column: shape {shape[1:]}, or one for "
            f"each column of each group: shape {shape}"
        )
    if bias.shape not in ((), (1,), shape[-1:], shape):
        raise ShapeError(
            f"bias has shape {bias.shape}; it must be one number, or one for each column: shape {shape[-1:]}"
        )
    if not can_cast(bias.dtype, result, "same_kind"):
        have, want = dtypes.get(bias.dtype).numpy, dtypes.get(result).numpy
        raise DTypeError(f"bias is {have} but the result is {want}; convert the bias to {want} first")


def check_activation(activation: Any, result: str) -> None:
    """Raise ArgumentError for an unknown activation, and DTypeError for a result that is not real floating-point."""
    if activation is None:
        return
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ArgumentError(f"activation={brief(activation)} must be one of {', '.join(ACTIVATIONS)}, or None")
    if dtypes.get(result).kind != "f":
        raise DTypeError(
            f"activation={activation!r} needs a real floating-point result, not {dtypes.get(result).numpy}; convert "
            "the operands first"
        )


def host_ends(offsets: Any, rows: int, what: str = "rows") -> list[int]:
    """Return offsets in the memory of the host as a list. Raises ArgumentError for an order that no groups have."""
    ends: list[int] = np.asarray(offsets).tolist()
    for group, (start, end) in enumerate(pairwise((0, *ends))):
        if not start <= end <= rows:
            raise ArgumentError(
                f"offsets[{group}] is {end}, and must be from {start}, its first one, to {rows}, the {what} of a; "
                "offsets are the ends of groups, np.cumsum(sizes), and not their sizes"
            )
    return ends
