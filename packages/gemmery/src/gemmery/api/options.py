"""Checks of the options of a product: dtype, alpha and beta, bias and activation, threads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api.promote import can_cast
from gemmery.arrange import Ints, result_shape
from gemmery.arrays import View, view
from gemmery.cpu import threads as cpu_threads
from gemmery.errors import ArgumentError, DTypeError, ShapeError, brief
from gemmery.keywords import ACTIVATIONS, NO_OPTIONS, OPTIONS, Options


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


def added(function: str) -> str:
    """Return the name of the parameter of gemm or gemv that beta multiplies."""
    return "y" if function == "gemv" else "c"


def check_added(function: str, old: View, shape: Ints) -> None:
    """Raise ShapeError unless what beta multiplies has the shape of the product."""
    if old.shape != shape:
        what = added(function)
        raise ShapeError(f"{what} has shape {old.shape}, but the product has shape {shape}; they must be equal")


def check_beta(function: str, beta: complex, old: View | None) -> None:
    """Raise ArgumentError if there is nothing that beta could multiply."""
    if beta != 0 and old is None:
        what = added(function)
        raise ArgumentError(f"beta={brief(beta)} needs {what}, which beta multiplies; pass {what}, or beta=0")


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


def epilogue(bias: Any, activation: str | None, x: View, y: View, result: str) -> tuple[str, View | None, View | None]:
    """Return the epilogue's name in a Problem, and the bias twice: as it is, and as accumulators for kernels.

    Those are n and contiguous, or one with stride 0.
    """
    result_shape(x.shape, y.shape)  # bad shapes are reported before a bad epilogue
    n = y.shape[-1] if len(y.shape) > 1 else 1
    bias_view, row = None, None
    if bias is not None:
        if result == "bool":
            raise DTypeError("bias cannot be added to a bool product; pass dtype='int32' to count instead")
        bias_view = view(bias)
        arrays.together(a=x, bias=bias_view)
        check_bias(bias_view, n, result)
        row = arrays.converted(bias_view, dtypes.get(result).accumulator)
        step = 0 if bias_view.shape in ((), (1,)) else row.strides[0]
        row = row._replace(shape=(n,), strides=(step,))
    if activation is not None:
        check_activation(activation, result)
    return epilogue_name(bias, activation), bias_view, row


def epilogue_name(bias: Any, activation: str | None) -> str:
    """Return the name in a Problem of what follows the product."""
    return "+".join(part for part in ("" if bias is None else "bias", activation or "") if part)


def check_bias(bias: View, n: int, result: str) -> None:
    """Raise ShapeError or DTypeError unless this is a bias for n columns of element type `result`."""
    if bias.shape not in ((), (1,), (n,)):
        raise ShapeError(f"bias has shape {bias.shape}; it must be one number, or one for each column: shape ({n},)")
    if not can_cast(bias.dtype, result, "same_kind"):
        have, want = dtypes.get(bias.dtype).numpy, dtypes.get(result).numpy
        raise DTypeError(f"bias is {have} but the result is {want}; convert the bias to {want} first")


def check_activation(activation: Any, result: str) -> None:
    """Raise ArgumentError for an unknown activation, and DTypeError for a result that is not real floating-point."""
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ArgumentError(f"activation={brief(activation)} must be one of {', '.join(ACTIVATIONS)}, or None")
    if dtypes.get(result).kind != "f":
        raise DTypeError(
            f"activation={activation!r} needs a real floating-point result, not {dtypes.get(result).numpy}; convert "
            "the operands first"
        )
