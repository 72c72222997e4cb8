"""matmul, gemm and gemv: arguments are checked and handed to the CPU or to a device."""

# No `from __future__ import annotations` here: help() would show annotations as strings.
import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

from gemmery import config
from gemmery.api import array_libraries, opaque
from gemmery.api.array_libraries import NO_PARTS, SPLIT, Keywords
from gemmery.api.checked import checked_call
from gemmery.api.compute import product
from gemmery.api.options import check_operands, filling, own_options, single, viewed
from gemmery.arrange import result_shape
from gemmery.arrays import View
from gemmery.cpu import entry
from gemmery.cpu.packed_once import Packed
from gemmery.errors import ArgumentError, DTypeError, ShapeError
from gemmery.keywords import DEFAULTS, NAMES, NO_OPTIONS, Options, documented, takes_options

if TYPE_CHECKING:
    from typing import Unpack

    from numpy.typing import NDArray

    from gemmery.keywords import Foreign, GemmOptions, GemvOptions, MatmulOptions, Out, Plain

_OPTIONS = NAMES["matmul"]


@opaque.opaque
@takes_options
def _matmul(a: Any, b: Any, /, out: Any = None, **keywords: Any) -> Any:
    """Return the matrix product of two arrays, with the semantics of `numpy.matmul`.

    >>> import numpy as np, gemmery as gm
    >>> a = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> gm.matmul(a, a)
    array([[ 7., 10.],
           [15., 22.]])
    >>> gm.matmul(a, [[1.0], [-1.0]], bias=1.5, activation="relu")
    array([[0.5],
           [0.5]])

    `a` is (..., m, k) or (k,), `b` is (..., k, n) or (k,); batch dimensions broadcast. Each may be a NumPy array, a
    PyTorch tensor, a CuPy array, any object with `__dlpack__`, `__cuda_array_interface__` or the buffer protocol, or a
    nested list; the result is of the same kind (see `gemmery.arrays`). Views of any strides are not copied.

    - `out`: an array of the result's shape, with any strides, that receives the result and is returned. It may overlap
      an operand. The result must be castable to its element type by NumPy's "same_kind" rule.
    - `dtype`: a wider element type for the sum and the result, so that nothing wraps or is rounded in between: "int32"
      for int8, "float32" (or "f32") for float16.
    - `bias`: n numbers, or one, added to every row.
    - `activation`: applied after the bias, while C is in cache: "relu", "gelu" (by erf, PyTorch's default) or "silu".
    - `epilogue`: a function of the product's element, or `gm.epilogue` of one with its operands bound, that is applied
      before the result is stored; `b` may be a tuple of two matrices, whose products are the function's first two
      parameters. It may return several results. See docs/guides/epilogues.md.
    - `operands`: the arrays and numbers for the other parameters of `epilogue`, by name, unless they are bound to it.
    - `threads`: the number of CPU threads for this call, instead of `get_num_threads()`.
    - `precision`, of float32 on a CUDA device: "tf32" allows tensor cores to round operands to 10 bits of fraction.
      "f32_tensor" allows any method with the bound of float32, k u |A| |B|: on Hopper tensor cores, from operands that
      are split into halves. "f32_strict" splits in a way that does not depend on values: no element changes the bits of
      another row. "f32_plus" also keeps sums in two numbers: at most 26 u |A| |B| up to k = 65536, on Hopper only.
      Where it is None, `set_float32_precision` decides. Of float64 on Hopper, "f64_normwise" allows int8 tensor cores,
      with an error relative to the norms of a row of A and a column of B, about 0.1 u of them for random numbers.
    - `scale_a`, `scale_b`, on a CUDA device: factors of float8, int8, float16 or bfloat16 operands; C is the product of
      scale_a A and scale_b B, before bias and activation. A factor is a number, or a float32 array on the device whose
      shape says what it belongs to: (1,) or () the operand; (m,) or (m, 1) the rows of A; (n,) or (1, n) the columns of
      B; for float8 also (m, ceil(k / 128)) with (ceil(k / 128), ceil(n / 128)): each row of A in 128 of k, each block
      of 128 x 128 of B. Where a shape fits two of these, both mean the same product.
    - `semiring`: what takes the place of a b, and of the sum over k: "min_plus" (a + b, the least), "max_plus",
      "max_times", "log_sum_exp" (a + b, log(sum(exp(...)))) of floats, "or_and" of bools. Where k is 0 that is inf,
      -inf, -inf, -inf and False. The least and the largest leave NaN out, as np.fmin and np.fmax do; log_sum_exp keeps
      it. There is no bias, activation, precision or factor with it.
    - `batch_invariant`: True gives a row of C the same bits whatever the number of rows of A: no kernel that adds in
      another order is chosen by that number. Some products of few rows are slower with it: on a CPU those of one row
      by a B with contiguous columns, or in complex types.

    Different element types are promoted by NumPy's rules. Integers wrap, as in NumPy. A product of bools is bool: true
    where both elements of any pair are true. float16 and bfloat16 are summed in float32 and rounded once, as
    are the parts of PyTorch's complex32.

    A real floating-point product on the CPU differs from the exact one by at most f(k) u |A| |B| in each element, terms
    for underflow, and one rounding to the type of C; f(k) is at most k, and at most 1536 + k / 256. The same call gives
    the same bits, with any number of threads, except where docs/promises.md says so, which has all bounds; with
    GEMMERY_TIERS=off there are no exceptions.

    NumPy's `out=(c,)` is taken, as is an `out` with more batches, which are filled. Other options of `numpy.matmul` may
    have their defaults. `np.errstate` has no effect: overflow gives infinities without a warning.

    Arrays on a CUDA device are multiplied there, on the current stream of a's library, in all of these types; compute
    capability 9.0 also multiplies float8 (into bfloat16; float16 or float32 by `dtype` or `out`), and int8 by `dtype`
    or `out` into bfloat16, float16 or float32. The call does not wait for the result, and a CUDA graph can capture it.
    `bias` may be a number or a vector on the device.

    Raises ShapeError for shapes that cannot be multiplied, DTypeError for element types that are not supported,
    LayoutError for an `out` that is read-only or whose elements share memory, DeviceError for operands on different
    devices, ArgumentError for options outside their range, and MemoryError; `out` is then as it was.
    """
    if opaque.waiting and opaque.settle():
        return _matmul(a, b, out, **keywords)
    if keywords:  # as `own_options`, which takes longer
        if not _OPTIONS.issuperset(keywords):
            keywords = own_options("matmul", keywords)
        for name, value in keywords.items():
            if value is not DEFAULTS[name]:
                break
        else:
            keywords = {}
        if keywords.get("epilogue") is not None:
            from gemmery.api import finished

            _compile_entries()
            return finished.product(a, b, out, Options(**keywords), multiply)
        check_operands(keywords.get("operands"))
    out = single(out)
    path = array_libraries.PATHS.get(type(a))
    if path is not None:
        done = path(a, b, out, "matmul", None, keywords or None)
        if done is not None:
            return done
    return _product("matmul", a, b, out, Options(**keywords) if keywords else NO_OPTIONS, keywords)


def _product(name: str, a: Any, b: Any, out: Any, options: Options, keywords: Keywords) -> Any:
    """Return a product that no fast path of a device has, of the function `name`."""
    parts = NO_PARTS
    if SPLIT and not SPLIT.isdisjoint((type(a), type(b))):
        from gemmery.api import splitting

        a, b, parts = splitting.sources(a, b, options.precision)
        done = array_libraries.served(a, b, out, "matmul", None, keywords, parts) if name == "matmul" else None
        if done is not None:
            return done
    if name == "matmul" and type(b) in array_libraries.QUANTIZED:
        from gemmery.api.quantized_products import product as by_codes

        _compile_entries()
        return by_codes(a, b, out, options, multiply)
    if name == "matmul" and (halves := _of_halves(a, b, out, keywords)) is not None:
        return halves
    x, y = viewed("a", a), b.memory if isinstance(b, Packed) else viewed("x" if name == "gemv" else "b", b)
    _check_dimensions(name, x, y)
    if x.device != "cpu" or y.device != "cpu":
        from gemmery.api import on_device

        return on_device.product(name, x, y, out, options, keywords, parts)
    if out is not None and name == "matmul":
        x, y = filling(x, y, viewed("out", out).shape)
    call = checked_call(name, x, y, out, options, operands=(a, b))
    _compile_entries()
    return product(call, out)


def _check_dimensions(name: str, a: View, b: View) -> None:
    """Raise ShapeError for operands of gemm that are no matrices, and of gemv that are not a matrix and a vector."""
    if name == "gemv" and (len(a.shape) != 2 or len(b.shape) != 1):
        raise ShapeError(
            f"gemv multiplies a matrix and a vector (got shapes {a.shape} and {b.shape}); use gm.matmul for other "
            "shapes"
        )
    if name == "gemm" and (len(a.shape) < 2 or len(b.shape) < 2):
        raise ShapeError(
            f"gemm multiplies matrices (got shapes {a.shape} and {b.shape}); use gm.gemv or gm.matmul for vectors"
        )


multiply: Callable[..., Any] = _matmul  # or the compiled entry, from the first product on
by_python = _matmul  # beneath the compiled entry, which it tells of the job


if TYPE_CHECKING:  # mypy attaches a block to the function after it only if it contains nothing but overloads

    @overload
    def matmul(a: Plain, b: Plain, /, out: None = None, **options: Unpack[MatmulOptions]) -> NDArray[Any]: ...
    @overload
    def matmul(
        a: Foreign | Plain, b: Foreign | Plain, /, out: None = None, **options: Unpack[MatmulOptions]
    ) -> Foreign: ...
    @overload
    def matmul(a: Any, b: Any, /, out: Out, **options: Unpack[MatmulOptions]) -> Out: ...
    @overload
    def matmul(a: Any, b: Any, /, out: Any = None, **options: Unpack[MatmulOptions]) -> Any: ...


@opaque.opaque
@functools.wraps(_matmul)
def matmul(a: Any, b: Any, /, out: Any = None, **options: Any) -> Any:  # noqa: D103 # it has that of _matmul
    # A precision takes the same short way: at n = 512 that is 0.3 to 0.8 us more than none, and by `_matmul` 6.
    if not options or (len(options) == 1 and type(options.get("precision")) is str):
        path = array_libraries.PATHS.get(type(a))
        if path is not None:
            done = path(a, b, out, "matmul", None, options or None)
            if done is not None:
                return done
    return multiply(a, b, out, **options)


@opaque.opaque
@takes_options
def _gemm(
    alpha: complex, a: Any, b: Any = ..., beta: complex = 0.0, c: Any = None, *, out: Any = None, **keywords: Any
) -> Any:
    """Return alpha a @ b + beta c, the GEMM of BLAS, as a new array or in `out`; `out=c` updates c in place.

    >>> import numpy as np, gemmery as gm
    >>> a, c = np.ones((2, 3)), np.full((2, 2), 10.0)
    >>> gm.gemm(2.0, a, a.T, -1.0, c)
    array([[-4., -4.],
           [-4., -4.]])

    `a` is (..., m, k), `b` (..., k, n) and `c` (..., m, n). For a transposed operand pass `a.T`: views are not copied.
    The element type of the result is the one to which a, b and c promote. As in BLAS, c is not read when beta is 0 (it
    may contain NaN, or be None), and a and b are not read when alpha is 0. alpha and beta of integer products must be
    integers. CUDA arrays, `threads` and `precision` are as in `matmul`.

    Raises the errors of `matmul`, and ArgumentError for an alpha or beta that the element type cannot represent.
    """
    if b is ...:
        raise TypeError("gemm() takes alpha before a and b: call gm.gemm(1.0, a, b), or gm.matmul(a, b)")
    if opaque.waiting and opaque.settle():
        return _gemm(alpha, a, b, beta, c, out=out, **keywords)
    return _scaled("gemm", a, b, c, out, alpha, beta, keywords)


_gemm_entry: Callable[..., Any] = _gemm


if TYPE_CHECKING:

    @overload
    def gemm(
        alpha: complex, a: Plain, b: Plain, beta: complex = 0.0, c: Plain | None = None, **options: Unpack[GemmOptions]
    ) -> NDArray[Any]: ...
    @overload
    def gemm(
        alpha: complex, a: Foreign, b: Foreign, beta: complex = 0.0, c: Any = None, **options: Unpack[GemmOptions]
    ) -> Foreign: ...
    @overload
    def gemm(
        alpha: complex, a: Any, b: Any, beta: complex = 0.0, c: Any = None, *, out: Out, **options: Unpack[GemmOptions]
    ) -> Out: ...
    @overload
    def gemm(
        alpha: complex, a: Any, b: Any, beta: complex = 0.0, c: Any = None, **options: Unpack[GemmOptions]
    ) -> Any: ...


@opaque.opaque
@functools.wraps(_gemm)
def gemm(*arguments: Any, **options: Any) -> Any:  # noqa: D103 # it has that of _gemm
    return _gemm_entry(*arguments, **options)


@opaque.opaque
@takes_options
def _gemv(
    a: Any, x: Any, y: Any = None, *, alpha: complex = 1.0, beta: complex = 0.0, out: Any = None, **keywords: Any
) -> Any:
    """Return alpha a @ x + beta y, the GEMV of BLAS, as a new vector or in `out`; `out=y` updates y in place.

    >>> import numpy as np, gemmery as gm
    >>> gm.gemv(np.eye(3)[::-1], np.array([1.0, 2.0, 3.0]), alpha=2.0)
    array([6., 4., 2.])

    `a` is (m, k), `x` is (k,), `y` is (m,), each with any strides. Element types, alpha and beta, `threads` and
    `precision` are as in `gemm`.

    Raises the errors of `gemm`.
    """
    if opaque.waiting and opaque.settle():
        return _gemv(a, x, y, alpha=alpha, beta=beta, out=out, **keywords)
    return _scaled("gemv", a, x, y, out, alpha, beta, keywords)


_gemv_entry: Callable[..., Any] = _gemv


if TYPE_CHECKING:

    @overload
    def gemv(a: Plain, x: Plain, y: Plain | None = None, **options: Unpack[GemvOptions]) -> NDArray[Any]: ...
    @overload
    def gemv(a: Foreign, x: Foreign, y: Any = None, **options: Unpack[GemvOptions]) -> Foreign: ...
    @overload
    def gemv(a: Any, x: Any, y: Any = None, *, out: Out, **options: Unpack[GemvOptions]) -> Out: ...
    @overload
    def gemv(a: Any, x: Any, y: Any = None, *, out: Any = None, **options: Unpack[GemvOptions]) -> Any: ...


@opaque.opaque
@functools.wraps(_gemv)
def gemv(*arguments: Any, **options: Any) -> Any:  # noqa: D103 # it has that of _gemv
    return _gemv_entry(*arguments, **options)


@functools.cache
def _compile_entries() -> None:
    """Replace gm.matmul, gm.gemm and gm.gemv by the compiled entry, at the first product on the CPU."""
    global multiply, _gemm_entry, _gemv_entry
    if config.fast_entry():
        multiply, _gemm_entry, _gemv_entry = compiled({"matmul": _matmul, "gemm": _gemm, "gemv": _gemv})


def compiled(functions: dict[str, Callable[..., Any]]) -> Sequence[Callable[..., Any]]:
    """Return the compiled entries of functions, in whose place the package has them from then on."""
    entries = entry.builtins(functions, [*map(documented, functions.values())])
    for module in (sys.modules["gemmery"], sys.modules["gemmery.api"]):
        for name, function in zip(functions, entries, strict=True):
            setattr(module, name, function)
    return entries


def _scaled(name: str, a: Any, b: Any, c: Any, out: Any, alpha: Any, beta: Any, keywords: Keywords) -> Any:
    """Return what gemm or gemv does; the vectors of gemv are b and c."""
    out = single(out)
    if keywords:
        keywords = own_options(name, keywords)
    done = array_libraries.scaled(a, b, c, out, name, alpha, beta, keywords)
    if done is not None:
        return done
    return _product(name, a, b, out, Options(**keywords, alpha=alpha, beta=beta, old=c), keywords)


def _of_halves(a: Any, b: Any, out: Any, options: dict[str, Any]) -> Any:
    """Return the product of two complex32 tensors of PyTorch, by their float16 parts; None if neither is one.

    A row (re, im) of A times the rows (re, im) and (-im, re) of B is one of C: sums are float32, rounded once.
    Raises DTypeError for another type beside complex32, and ArgumentError for options that it does not have.
    """
    torch: Any = sys.modules.get("torch")
    half = getattr(torch, "complex32", torch)
    types = [getattr(x, "dtype", None) for x in (a, b)]
    if half is None or not any(type_ is half for type_ in types):
        return None
    if not all(type_ is half for type_ in types):
        raise DTypeError(f"the operands are {types[0]} and {types[1]}: convert both to complex32 or to complex64")
    for name in options:
        if name not in ("threads", "batch_invariant", "dtype"):
            raise ArgumentError(f"{name}= does not apply to complex32: convert the operands to complex64")
    dtype = options.get("dtype")
    if dtype is not None and str(dtype).removeprefix("torch.") not in ("complex32", "complex64"):
        raise DTypeError(f"dtype={dtype}: a product of complex32 is complex32 or complex64")
    result_shape(tuple(a.shape), tuple(b.shape))
    wide = dtype is not None and str(dtype).endswith("64")
    rows, columns = (torch.view_as_real(x.resolve_conj()) for x in (a, b if b.ndim > 1 else b[:, None]))
    turned = torch.stack((-columns[..., 1], columns[..., 0]), -1)
    both = torch.stack((columns, turned), -3).flatten(-2).flatten(-3, -2)
    own = {**options, "dtype": torch.float32 if wide else None}
    parts = multiply(rows.flatten(-2), both, **{name: value for name, value in own.items() if value is not None})
    result = torch.view_as_complex(parts.unflatten(-1, (-1, 2)))
    result = result if b.ndim > 1 else result[..., 0]
    if out is None:
        return result
    if out.shape != result.shape or not out.is_complex():
        raise ShapeError(f"out is {out.dtype} of shape {tuple(out.shape)}, and the product {tuple(result.shape)}")
    return out.copy_(result)
