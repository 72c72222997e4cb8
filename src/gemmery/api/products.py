"""matmul, gemm and gemv."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from gemmery import arrays, config
from gemmery.api import quick
from gemmery.api.compute import PLAIN, Terms, product
from gemmery.api.options import ASKED_NOTHING, Asked, epilogue, named, no_precision, scalar, thread_count
from gemmery.api.promote import promoted, widened
from gemmery.arrange import result_shape
from gemmery.arrays import View, view
from gemmery.cpu import entry
from gemmery.cpu import threads as cpu_threads
from gemmery.errors import ArgumentError, ShapeError


def matmul(
    a: Any,
    b: Any,
    /,
    out: Any = None,
    *,
    dtype: Any = None,
    bias: Any = None,
    activation: str | None = None,
    threads: int | None = None,
    precision: str | None = None,
) -> Any:
    """The matrix product of two arrays, with the semantics of `numpy.matmul`.

    >>> import numpy as np, gemmery as gm
    >>> a = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> gm.matmul(a, a)
    array([[ 7., 10.],
           [15., 22.]])
    >>> gm.matmul(a, [[1.0], [-1.0]], bias=1.5, activation="relu")
    array([[0.5],
           [0.5]])

    `a` is (..., m, k) or (k,), `b` is (..., k, n) or (k,); batch dimensions broadcast. Either may be a NumPy array, a
    tensor of PyTorch, an array of CuPy, anything with `__dlpack__`, `__cuda_array_interface__` or the buffer protocol,
    or a nested list; the result is of the same kind (see `gemmery.arrays`). Transposed, strided and broadcast operands
    are read where they are.

    - `out`: an array of the result's shape, of any strides, that receives the result and is returned. It may overlap
      an operand. Its element type must take the result by NumPy's "same_kind" rule.
    - `dtype`: a wider element type for the result, as NumPy spells it: "int32" for int8, "float32" for float16. The
      sum is kept in it, so nothing wraps and nothing is rounded in between.
    - `bias`: n numbers, or one, added to every row; then `activation`: "relu", "gelu" (x times the normal distribution
      function, by erf, PyTorch's default) or "silu". Both are applied while C is in cache.
    - `threads`: how many to use, instead of what `get_num_threads` says; of the CPU only.
    - `precision`: "tf32" lets tensor cores of a CUDA device round float32 operands to 10 bits of fraction.

    float16 and bfloat16 are summed in float32 and rounded once; where the processor has a bfloat16 dot product, that
    takes magnitudes below 2**-126 for zero. Integers wrap, as NumPy's do. Element types that differ are promoted by
    NumPy's rules.

    Arrays on a CUDA device are multiplied there, in float64, float32, float16 and bfloat16, on the current stream of
    a's library: nothing waits, and a CUDA graph may capture it. All operands must be on that device; those of other
    element types are converted by PyTorch or CuPy. `bias` may be a number or a vector on the device.

    Raises ShapeError (a ValueError) for shapes that cannot be multiplied, DTypeError (a TypeError) for element types
    that are not served, LayoutError for an `out` that is read-only or whose elements share memory, DeviceError for
    operands that are not on one device, ArgumentError for options outside their range. `out` is not written before all
    is checked.
    """
    if dtype is None and bias is None and activation is None and threads is None and precision is None:
        return _entry(a, b, out)
    return _matmul(a, b, out, dtype=dtype, bias=bias, activation=activation, threads=threads, precision=precision)


def _matmul(
    a: Any,
    b: Any,
    /,
    out: Any = None,
    *,
    dtype: Any = None,
    bias: Any = None,
    activation: str | None = None,
    threads: int | None = None,
    precision: str | None = None,
) -> Any:
    """matmul for products that the compiled entry has not met."""
    plain = dtype is None and bias is None and activation is None and threads is None and precision is None
    way = quick.WAYS.get(type(a))
    if way is not None and plain:
        done = way(a, b, out, "matmul", None)
        if done is not None:
            return done
    x, y = view(a), view(b)
    if x.device != "cpu" or y.device != "cpu":
        from gemmery.api import device

        asked = ASKED_NOTHING if plain else Asked(dtype, bias, activation, threads, precision)
        return device.product("matmul", a, b, x, y, out, asked)
    no_precision(precision)
    common = promoted(x.dtype, y.dtype)
    result = common if dtype is None else widened(common, named(dtype))
    if plain:
        terms = PLAIN
        _compile_entry()
    else:
        name, row = epilogue(bias, activation, x, y, result)
        terms = Terms(epilogue=name, bias=row, threads=thread_count(threads))
    return product(a, b, x, y, common, result, out, terms)


@functools.cache
def _compile_entry() -> None:
    """Put the compiled entry in the place of gm.matmul, once a product on the CPU needs it."""
    global _entry
    if config.fast_entry():
        _entry = entry.builtin(_matmul, "matmul", "gemmery", f"{_SIGNATURE}\n--\n\n{matmul.__doc__}")
        for module in ("gemmery", "gemmery.api"):
            sys.modules[module].matmul = _entry  # type: ignore[attr-defined]


_matmul.__name__ = _matmul.__qualname__ = "matmul"  # as errors about its arguments name it
_entry: Callable[..., Any] = _matmul
_SIGNATURE = "matmul(a, b, /, out=None, *, dtype=None, bias=None, activation=None, threads=None, precision=None)"


def gemm(
    alpha: complex,
    a: Any,
    b: Any,
    beta: complex = 0.0,
    c: Any = None,
    *,
    out: Any = None,
    threads: int | None = None,
    precision: str | None = None,
) -> Any:
    """alpha a @ b + beta c, the GEMM of BLAS, as a new array or in `out`; `out=c` updates c in place.

    >>> import numpy as np, gemmery as gm
    >>> a, c = np.ones((2, 3)), np.full((2, 2), 10.0)
    >>> gm.gemm(2.0, a, a.T, -1.0, c)
    array([[-4., -4.],
           [-4., -4.]])

    `a` is (..., m, k), `b` (..., k, n) and `c` (..., m, n). Transposed views are read where they are: pass `a.T`. The
    element type of the result is that to which a, b and c promote. As in BLAS, with beta = 0 the old c is not read
    (NaN in it does not matter) and may be None, and with alpha = 0 neither a nor b is read. alpha and beta of integer
    products must be whole numbers. Arrays on a CUDA device, `threads` and `precision` are as in `matmul`.

    Raises what `matmul` raises, and ArgumentError for an alpha or beta that the element type cannot hold.
    """
    if c is out and threads is None and precision is None:
        done = quick.scaled(a, b, out, "gemm", alpha, beta)
        if done is not None:
            return done
    x, y = view(a), view(b)
    if len(x.shape) < 2 or len(y.shape) < 2:
        raise ShapeError(f"shapes {x.shape} and {y.shape}: gemm takes matrices; gm.gemv and gm.matmul take vectors")
    return _scaled("gemm", alpha, a, b, x, y, beta, c, out, threads, precision)


def gemv(
    a: Any,
    x: Any,
    y: Any = None,
    *,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    out: Any = None,
    threads: int | None = None,
    precision: str | None = None,
) -> Any:
    """alpha a @ x + beta y, the GEMV of BLAS, as a new vector or in `out`; `out=y` updates y in place.

    >>> import numpy as np, gemmery as gm
    >>> gm.gemv(np.eye(3)[::-1], np.array([1.0, 2.0, 3.0]), alpha=2.0)
    array([6., 4., 2.])

    `a` is (m, k), `x` is (k,), `y` is (m,), each of any strides; element types and zero alpha and beta as in `gemm`.

    Raises what `gemm` raises.
    """
    if y is out and threads is None and precision is None:
        done = quick.scaled(a, x, out, "gemv", alpha, beta)
        if done is not None:
            return done
    matrix, vector = view(a), view(x)
    if len(matrix.shape) != 2 or len(vector.shape) != 1:
        raise ShapeError(
            f"shapes {matrix.shape} and {vector.shape}: gemv takes a matrix and a vector; gm.matmul takes batches"
        )
    return _scaled("gemv", alpha, a, x, matrix, vector, beta, y, out, threads, precision)


def set_num_threads(count: int | None) -> None:
    """Let every product from now on use `count` threads; None goes back to the cores that the process may use.

    >>> import gemmery as gm
    >>> gm.set_num_threads(1)

    Raises ArgumentError below 1.
    """
    cpu_threads.set_(count)


def get_num_threads() -> int:
    """Threads a product uses: what `set_num_threads` was given, else GEMMERY_NUM_THREADS, else the cores allowed."""
    return cpu_threads.get()


def _scaled(
    name: str,
    alpha: complex,
    a: Any,
    b: Any,
    x: View,
    y: View,
    beta: complex,
    c: Any,
    out: Any,
    threads: int | None,
    precision: str | None,
) -> Any:
    """gemm and gemv once the number of dimensions is right."""
    if x.device != "cpu" or y.device != "cpu":
        from gemmery.api import device

        asked = Asked(threads=threads, precision=precision, alpha=alpha, beta=beta, old=c)
        return device.product(name, a, b, x, y, out, asked)
    no_precision(precision)
    common = result = promoted(x.dtype, y.dtype)
    old = None if c is None else view(c)
    arrays.together(a=x, b=y, c=old)
    if old is not None:
        shape = result_shape(x.shape, y.shape)
        if old.shape != shape:
            raise ShapeError(f"c has shape {old.shape}, the product {shape}: they must be equal")
        result = promoted(common, old.dtype)
    alpha, beta = scalar("alpha", alpha, result), scalar("beta", beta, result)
    if beta == 0:
        old = None
    elif old is None:
        raise ArgumentError(f"beta={beta} and no c: give the array that beta multiplies, or beta=0")
    return product(a, b, x, y, common, result, out, Terms(alpha, beta, old, threads=thread_count(threads)))
