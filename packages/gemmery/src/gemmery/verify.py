"""The product in higher precision, the error bound of a kernel, and the check of a result against both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery import config, dtypes
from gemmery.dtypes import Array
from gemmery.epilogues.graph import EpilogueGraph, usual
from gemmery.epilogues.reference import Estimate, evaluate
from gemmery.errors import ArgumentError, CheckError
from gemmery.keywords import ACTIVATIONS

SampleIndex = tuple[Any, ...]  # the compared matrices, an index for each batch dimension, and the compared rows
EXTENDED = np.finfo(np.longdouble).nmant > 52  # 64 bits of significand on x86; on many ARM systems it is float64 again
LIMB = 16  # bits of an integer that one exact float64 product carries


@dataclass(frozen=True)
class Checked:
    """How far a result is from the reference: the largest error over its bound, and where."""

    error_over_bound: float  # <= 1 keeps the promise; inf where a NaN or an infinity is in the wrong place
    worst: tuple[int, ...]  # index of that element in the result
    got: complex
    expected: complex
    bound: float
    sampled: bool  # True when only some rows were compared

    @property
    def ok(self) -> bool:
        """True when every compared element is within its bound."""
        return self.error_over_bound <= 1.0


def reference(
    a: Array,
    b: Array,
    *,
    out: str,
    alpha: complex = 1,
    beta: complex = 0,
    c: Array | None = None,
    bias: Array | None = None,
    activation: str = "",
) -> Array:
    """Return activation(alpha a @ b + beta c + bias), computed in higher precision than that of any kernel.

    float32, float16, bfloat16 and complex64 are multiplied in float64; float64 and complex128 in extended
    precision, or by the compensated dot product of Ogita, Rump and Oishi (2005) where the machine has none.
    Integers are exact modulo 2**bits of `out`; bools are exact. `a` is (..., m, k), `b` (..., k, n).

    >>> reference(np.array([[3]], np.int8), np.array([[100]], np.int8), out="int8")
    array([[44]], dtype=int8)

    Raises ArgumentError for an unknown activation.
    """
    kind = dtypes.get(out).kind
    if kind == "b":
        return np.asarray(_integer_reference(a, b, "uint64", 1, 0, None, None) != 0)
    if kind in "iu":
        exact = _integer_reference(a, b, out, int(alpha.real), int(beta.real), c, bias)
        return _followed(exact, 0.0, a.dtype, out, None, activation).value
    return _followed(_sums(a, b, alpha, beta, c), 0.0, a.dtype, out, bias, activation).value


def bound(
    a: Array,
    b: Array,
    f_of_k: Callable[[int], float] = float,
    *,
    out: str,
    alpha: complex = 1,
    beta: complex = 0,
    c: Array | None = None,
    bias: Array | None = None,
    activation: str = "",
    normwise: bool = False,
) -> Array:
    """Return the largest error that each element may have before its final rounding: f(k) u (|a| @ |b|) and more.

    `f_of_k` is k, that of any order of additions, or `blocked`, or a rung's.
    `u` is the accumulator's unit roundoff. alpha and beta c add three roundings; the error passes through the addition
    of a bias and an activation, which add their own (`epilogues.reference`). A component of a complex product is a sum
    of 2 k real products. Each product that underflows adds up to one smallest subnormal number; the bfloat16 dot
    instruction also treats subnormal operands and sums as zero. With `normwise`, max|a| max|b| replaces |a| @ |b|
    (Higham 2002, section 23.2.2).
    """
    size_a, size_b = np.abs(_wide(a)).astype(np.float64), np.abs(_wide(b)).astype(np.float64)
    source = dtypes.get(a.dtype.name)
    unit, tiny = _unit(source.accumulator), _tiny(source.accumulator)
    k = a.shape[-1]
    with np.errstate(all="ignore"):
        magnitude = size_a @ size_b
        if normwise and magnitude.size and k:
            most_a, most_b = (np.max(size, initial=0, where=np.isfinite(size)) for size in (size_a, size_b))
            magnitude = np.full_like(magnitude, most_a * most_b)
        growth = math.sqrt(2) * f_of_k(2 * k) if source.kind == "c" else f_of_k(k)
        total = growth * unit * magnitude + 2 * k * tiny
        if source.name == "bf16":
            normal = 2.0**-126
            # BFMMLA adds pairs, each addition off by up to two roundings, and flushes products and both sums of a pair.
            total += unit * magnitude * (config.ON_ARM * (k % 2))
            total += normal * (size_a.sum(-1)[..., :, None] + size_b.sum(-2)[..., None, :] + k * (1 + config.ON_ARM))
        total = total * abs(alpha)
        after = magnitude * abs(alpha)
        if beta != 0 and c is not None:
            after = after + np.abs(_wide(c)).astype(np.float64) * abs(beta)
        if alpha != 1 or beta != 0:
            total = total + 3 * unit * after
    if bias is not None or activation:
        total = _followed(_sums(a, b, alpha, beta, c), total, a.dtype, out, bias, activation).error
    return np.asarray(total, np.float64)


def blocked(k: int) -> float:
    """Return f(k) of the kernels of a CPU: 256 to 1536 of k are summed apart, then 1024 such sums, then those sums.

    >>> [blocked(k) for k in (1000, 100_000, 10_000_000)]
    [1000, 1926.625, 2598.14697265625]
    """
    return min(k, 1536 + k / 256, 2560 + k / 2**18)


def check(
    result: Array,
    a: Array,
    b: Array,
    f_of_k: Callable[[int], float] = float,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    c: Array | None = None,
    bias: Array | None = None,
    activation: str = "",
    normwise: bool = False,
    most_flops: float = 4e8,
    seed: int = 0,
) -> Checked:
    """Compare `result` with the reference, element by element, against the bound plus one final rounding.

    Above `most_flops` a seeded sample of rows (and of matrices of a batch) is compared, which always includes the first
    and the last. NaN and infinities must be where the reference has them. Integers and bools must be equal.

    >>> a = b = np.eye(2)
    >>> check(a @ b, a, b).ok, check(a @ b + 1e-9, a, b).ok
    (True, False)
    """
    if result.ndim < 2:
        raise ArgumentError(f"result has shape {result.shape}; it must have at least two dimensions, (..., m, n)")
    where, picked = _sample(result.shape, 2 * result.size * a.shape[-1], most_flops, seed)
    result = _take(result, result.shape[:-2], where)
    a, b = _take(a, picked, where), _take(b, picked, (*where[:-1], slice(None)))
    c = None if c is None or beta == 0 else _take(c, picked, where)
    out = dtypes.get(result.dtype.name).name
    if dtypes.get(out).kind in "iub":
        expected = reference(a, b, out=out, alpha=alpha, beta=beta, c=c, bias=bias, activation=activation)
        ratio = np.where(result == expected, 0.0, math.inf)
        return _worst(ratio, result, expected, np.zeros(expected.shape), where)
    errors = bound(a, b, f_of_k, out=out, alpha=alpha, beta=beta, c=c, normwise=normwise)
    expected, error = _followed(_sums(a, b, alpha, beta, c), errors, a.dtype, out, bias, activation)
    allowed = (error + _unit(out) * np.abs(expected) + _tiny(out)).astype(np.float64)
    return _worst(_ratio(result, expected, allowed, out), result, expected, allowed, where)


def check_outputs(
    results: Sequence[Array],
    graph: EpilogueGraph,
    a: Array,
    weights: Sequence[Array],
    operands: Mapping[str, Any],
    f_of_k: Callable[[int], float] = blocked,
) -> list[Checked]:
    """Compare what an epilogue returned with its graph in higher precision, as `check` does a product.

    `graph` has the types of its outputs, and the kinds of its operands. The bound is that of the sums, passed on and
    added to by every operation (`gemmery.epilogues.reference`), and one final rounding.

    Returns a comparison for each output.
    """
    source = dtypes.get(a.dtype.name)
    exact = source.kind in "iu"
    out = source.accumulator
    double = out == "f64" or any(output.dtype == "f64" for output in graph.outputs)
    wide = np.longdouble if double and EXTENDED else np.float64
    with np.errstate(all="ignore"):
        if exact:
            sums = [_integer_reference(a, b, out, 1, 0, None, None).astype(wide) for b in weights]
            unit = _unit("f64" if double else "f32")
            errors: list[Any] = [np.abs(total) * unit for total in sums]
        else:
            sums = [_accurate_product(a, b).astype(wide) for b in weights]
            errors = [bound(a, b, f_of_k, out=out) for b in weights]
            unit = _unit("f64" if double else out)
        read = {name: np.asarray(value).astype(wide) for name, value in operands.items()}
        if not double:
            read = {name: value.astype(np.float32).astype(wide) for name, value in read.items()}
        estimates = evaluate(graph, sums, read, errors, unit)
        checks = []
        for result, output, estimate in zip(results, graph.outputs, estimates, strict=True):
            # A type of one byte is written as the graph's cast rounds, which its error covers.
            own = 0.0 if dtypes.get(output.dtype).size == 1 else 1.0
            allowed = estimate.error + own * (_unit(output.dtype) * np.abs(estimate.value) + _tiny(output.dtype))
            ratio = _ratio(result.astype(wide), estimate.value, allowed, output.dtype)
            nothing = (slice(None),)
            checks.append(_worst(np.where(np.isinf(allowed), 0.0, ratio), result, estimate.value, allowed, nothing))
    return checks


def check_semiring(result: Array, a: Array, b: Array, semiring: str, most_flops: float = 4e8, seed: int = 0) -> Checked:
    """Compare a product in a semiring of floats with the reference, as `check` does.

    The least and the largest are of sums or products in the accumulator's type, to the last bit. log_sum_exp may be off
    by u (k (2 log(k) + 8) + 4 (|a| + |b|)), of the largest finite |a| of its row and |b| of its column.

    >>> a = np.eye(2)
    >>> check_semiring(np.array([[0.0, 1.0], [1.0, 0.0]]), a, a, "min_plus").ok
    True
    """
    where, picked = _sample(result.shape, 8 * result.size * a.shape[-1], most_flops, seed)
    result = _take(result, result.shape[:-2], where)
    a, b = _take(a, picked, where), _take(b, picked, (*where[:-1], slice(None)))
    out, k = dtypes.get(result.dtype.name).name, a.shape[-1]
    accumulator = dtypes.get(dtypes.get(out).accumulator)
    adds = semiring == "log_sum_exp"
    a, b = (_wide(z) if adds else z.astype(accumulator.numpy) for z in (a, b))
    start = np.inf if semiring == "min_plus" else -np.inf
    combine = {"min_plus": np.fmin, "log_sum_exp": np.logaddexp}.get(semiring, np.fmax)
    expected = np.full((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), start, a.dtype)
    with np.errstate(all="ignore"):
        for i in range(k):
            x, y = a[..., :, i, None], b[..., None, i, :]
            expected = combine(expected, x * y if semiring == "max_times" else x + y)
        sizes = [np.where(np.isfinite(z), np.abs(z), 0).max(axis, initial=0) for z, axis in ((a, -1), (b, -2))]
    largest = (sizes[0][..., :, None] + sizes[1][..., None, :]).astype(np.float64)
    allowed = adds * accumulator.unit_roundoff * (k * (2 * math.log(max(k, 1)) + 8) + 4 * largest)
    if adds or out != accumulator.name:  # it is rounded
        allowed = allowed + _unit(out) * np.abs(expected).astype(np.float64) + _tiny(out)
    return _worst(_ratio(result, expected, allowed, out), result, expected, allowed, where)


def require(result: Array, a: Array, b: Array, f_of_k: Callable[[int], float] = float, **options: object) -> Checked:
    """Run `check`, and raise CheckError with the worst element if it is not within its bound."""
    checked = check(result, a, b, f_of_k, **options)  # type: ignore[arg-type]
    if not checked.ok:
        raise CheckError(
            f"element {checked.worst} is {checked.got}, the reference is {checked.expected}: off by "
            f"{checked.error_over_bound:.3g} times the bound {checked.bound:.3g}"
        )
    return checked


def _unit(name: str) -> float:
    return dtypes.get(name).unit_roundoff


def _tiny(name: str) -> float:
    """Return the smallest subnormal number of a floating type."""
    row = dtypes.get(name)
    return row.unit_roundoff * 2.0 ** (row.normal + 1)


def _wide(x: Array) -> Array:
    """Return `x` in the type of the reference."""
    name = dtypes.get(x.dtype.name).name
    if name in ("f64", "complex128"):
        wider = {"f64": np.longdouble, "complex128": np.clongdouble}[name]
        return x.astype(wider) if EXTENDED else x
    return x.astype(np.complex128 if name == "complex64" else np.float64)


def _accurate_product(a: Array, b: Array) -> Array:
    name = dtypes.get(a.dtype.name).name
    if name not in ("f64", "complex128") or EXTENDED:
        return np.asarray(np.matmul(_wide(a), _wide(b)))
    if name == "f64":
        return _compensated_product(a, b)
    real = _compensated_product(np.concatenate((a.real, -a.imag), -1), np.concatenate((b.real, b.imag), -2))
    imaginary = _compensated_product(np.concatenate((a.real, a.imag), -1), np.concatenate((b.imag, b.real), -2))
    return real + 1j * imaginary


@np.errstate(all="ignore")
def _compensated_product(a: Array, b: Array) -> Array:
    """Return a @ b as if in twice the precision of float64, rounded once (Ogita, Rump and Oishi 2005, Dot2)."""
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    high, low = np.zeros(shape), np.zeros(shape)
    for i in range(a.shape[-1]):
        x, y = a[..., :, i, None], b[..., None, i, :]
        product = np.asarray(x * y)
        x1, x2 = _split(x)
        y1, y2 = _split(y)
        product_error = x2 * y2 - (((product - x1 * y1) - x2 * y1) - x1 * y2)
        total = high + product
        back = total - high
        low = low + ((high - (total - back)) + (product - back) + product_error)
        high = total
    finite = np.isfinite(high)
    return np.where(finite, high + np.where(finite, low, 0.0), high)


def _split(x: Array) -> tuple[Array, Array]:
    """Return two halves of 26 bits whose sum is x (Dekker 1971)."""
    scaled = np.asarray(x * 134217729.0)  # 2**27 + 1
    high = np.asarray(scaled - (scaled - x))
    return high, np.asarray(x - high)


def _integer_reference(
    a: Array, b: Array, out: str, alpha: int, beta: int, c: Array | None, bias: Array | None
) -> Array:
    """Return the product modulo 2**bits, from exact float64 products of 16-bit limbs."""

    def wrap(value: int) -> np.uint64:
        return np.uint64(value % 2**64)

    with np.errstate(over="ignore"):
        total = _limb_product(_bits(a), _bits(b), dtypes.get(out).size * 8) * wrap(alpha)
        if beta != 0 and c is not None:
            total = total + _bits(c) * wrap(beta)
        if bias is not None:
            total = total + _bits(bias)
    return total.astype(np.dtype(dtypes.get(out).numpy))


def _bits(x: Array) -> NDArray[np.uint64]:
    return x.astype(np.int64).view(np.uint64)


def _limb_product(a: NDArray[np.uint64], b: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """Return a @ b modulo 2**bits. Sums of 2**20 products of two limbs stay below 2**53, so float64 is exact."""
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    total = np.zeros(shape, np.uint64)
    count = max(1, bits // LIMB)

    def limb(x: NDArray[np.uint64], i: int) -> NDArray[np.float64]:
        return ((x >> np.uint64(LIMB * i)) & np.uint64(0xFFFF)).astype(np.float64)

    for start in range(0, a.shape[-1], 2**20):
        some_a, some_b = a[..., start : start + 2**20], b[..., start : start + 2**20, :]
        for i in range(count):
            for j in range(count - i):
                exact = np.matmul(limb(some_a, i), limb(some_b, j)).astype(np.uint64)
                total = total + (exact << np.uint64(LIMB * (i + j)))
    return total


@np.errstate(all="ignore")
def _sums(a: Array, b: Array, alpha: complex, beta: complex, c: Array | None) -> Array:
    """Return alpha a @ b + beta c of floating-point numbers."""
    value = _accurate_product(a, b)
    value = value if alpha == 1 else value * alpha
    return value if beta == 0 or c is None else value + _wide(c) * beta


def _followed(
    sums: Array, errors: Array | float, source: Any, out: str, bias: Array | None, activation: str
) -> Estimate:  # fmt: skip
    """Return sums after a bias and an activation, which kernels may approximate, and the errors that pass through."""
    if activation and activation not in ACTIVATIONS:
        raise ArgumentError(f"activation {activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    if bias is None and not activation:
        return Estimate(sums, np.asarray(errors))
    accumulator = dtypes.get(dtypes.get(out).accumulator)
    unit = accumulator.unit_roundoff
    operands = {} if bias is None else {"bias": _wide(bias.astype(accumulator.numpy))}
    if source.kind in "iu":  # exact sums are rounded
        errors = errors + unit * np.abs(sums)
    name = "bias+" * (bias is not None) + activation
    (estimate,) = evaluate(usual(name, out), [sums], operands, [errors], unit, approximate=True)
    return estimate


def _sample(shape: tuple[int, ...], flops: float, most: float, seed: int) -> tuple[SampleIndex, tuple[int, ...]]:
    """Return the matrices and rows to compare, as (indices of each batch dimension ..., rows), and the batch shape."""
    batch, rows = shape[:-2], shape[-2]
    if flops <= most:
        return (*(slice(None) for _ in batch), slice(None)), batch
    share = most / flops
    matrices = math.prod(batch)
    draw = np.random.default_rng(seed)

    def some(count: int, keep: float) -> NDArray[np.intp]:
        size = min(count, max(4, int(count * keep)))
        inner = draw.choice(count, size, replace=False)
        return np.unique(np.concatenate((inner, [0, count - 1]))).astype(np.intp)

    if matrices > 1:
        indices = some(matrices, share)
        share = min(1.0, share * matrices / len(indices))
        return (*np.unravel_index(indices, batch), some(rows, share)), batch
    return (*(np.zeros(1, np.intp) for _ in batch), some(rows, share)), batch


def _take(x: Array, batch: tuple[int, ...], where: SampleIndex) -> Array:
    """Return the sampled matrices and rows of `x`; a sampled batch becomes one dimension."""
    if isinstance(where[0], slice):
        return x
    x = np.broadcast_to(x, batch + x.shape[-2:])
    picked = x[where[:-1]] if batch else x
    return np.asarray(picked[..., where[-1], :])


def _ratio(result: Array, expected: Array, allowed: Array, out: str) -> NDArray[np.float64]:
    """Return |result - expected| / allowed; inf where a NaN or an infinity is in the wrong place."""
    with np.errstate(all="ignore"):
        got = result.astype(expected.dtype)
        difference = np.abs(got - expected).astype(np.float64)
        ratio = np.where(difference == 0, 0.0, difference / allowed)
        # A value that may round to more than the largest finite one may have become an infinity of its sign.
        row = dtypes.get(out)
        largest = (2 - 2 * row.unit_roundoff) * 2.0 ** (1 - row.normal)
        overflows = (np.abs(expected).astype(np.float64) + allowed >= largest) & np.isinf(got)
        right = (np.isnan(got) & np.isnan(expected)) | (got == expected)
        if np.iscomplexobj(got):  # which component of a complex number is not finite depends on the order of operations
            right |= (overflows | ~np.isfinite(expected)) & ~np.isfinite(got)
        else:
            right |= overflows & (np.signbit(got) == np.signbit(expected)) & ~np.isnan(expected)
        usual = np.isfinite(got) & np.isfinite(expected) & ~np.isnan(ratio)
    return np.asarray(np.where(usual, ratio, np.where(right, 0.0, math.inf)))


def _worst(ratio: NDArray[np.float64], result: Array, expected: Array, allowed: Array, where: SampleIndex) -> Checked:
    sampled = not isinstance(where[0], slice)
    if not ratio.size:
        return Checked(0.0, (), 0.0, 0.0, 0.0, sampled)
    at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    index = tuple(int(i) for i in at)
    if sampled:
        picked = [np.asarray(axis) for axis in where]
        batch = tuple(int(axis[index[0]]) for axis in picked[:-1])
        index = (*batch, int(picked[-1][index[-2]]), index[-1])
    return Checked(float(ratio[at]), index, complex(result[at]), complex(expected[at]), float(allowed[at]), sampled)
