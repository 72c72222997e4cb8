"""Random products of float32 in parts: batches of small ones, of numbers whose errors arise in different ways."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gemmery.dtypes import Array
from gemmery.lab.random_products import RandomProduct
from gemmery.ladder import float32_bounds

_MOST = 3e6  # multiplications of a batch: all elements are compared
_LARGEST = 200  # products in a batch
_KS = (1, 4, 15, 16, 17, 63, 64, 65, 127, 128, 129)
_READ, _WRITTEN = ("row", "col", "padded", "padded col", "aligned", "odd", "strided"), ("row", "col", "padded", "odd")
Drawn = Callable[[tuple[int, ...], int, np.random.Generator, np.random.Generator], Array]


def drawn(seed: int, precision: str) -> RandomProduct:
    """Return the batch of a seed, of one of the precisions of float32 that sum in parts.

    >>> drawn(3, "f32_strict").k
    16
    """
    draw = np.random.default_rng([seed, 4])
    sides = 6.5 if draw.random() < 0.95 else 9.5  # a few have whole tiles
    m, n = (int(2 ** draw.uniform(0, sides)) for _ in range(2))
    k = int(draw.choice(_KS)) if draw.random() < 0.3 else int(2 ** draw.uniform(5, 10.5))
    k = 4 * k if draw.random() < 0.02 else k
    batch = int(np.clip(_MOST / (m * n * k), 1, _LARGEST))
    layouts = str(draw.choice(_READ)), str(draw.choice(_READ)), str(draw.choice(_WRITTEN))
    is_scaled = bool(draw.random() < 0.2)
    return RandomProduct(
        seed,
        precision,
        "gemm" if is_scaled else "matmul",
        m,
        n,
        k,
        batch,
        "f32",
        layouts,
        ((False, False), (True, False), (False, True))[int(draw.choice([0, 0, 1, 2])) if batch > 1 else 0],
        whole=False,
        alpha=-0.5 if is_scaled else 1.0,
        beta=0.75 if is_scaled else 0.0,
        bias=not is_scaled and bool(draw.random() < 0.2),
        # What is small is left to CUDA cores, unless the choice must not depend on m.
        invariant=precision == "f32_tensor" and not is_scaled,
        spread=str(draw.choice(list(SPREADS))),
    )


def values(product: RandomProduct, shape: tuple[int, ...], operand: int) -> Array:
    """Return the numbers of A (0) or B (1)."""
    own, both = np.random.default_rng([product.seed, 5 + operand]), np.random.default_rng([product.seed, 7])
    with np.errstate(over="ignore"):
        return np.asarray(SPREADS[product.spread](shape, operand, own, both).astype(np.float32))


def growth(product: RandomProduct) -> Callable[[int], float]:
    """Return f(k) of what a precision promises: for all methods that the device may choose from."""
    bounds = {"f32_strict": float32_bounds.three_parts, "f32_plus": float32_bounds.pairs}
    promised = bounds.get(product.dtype, float)
    return lambda k: promised(k) if k >= float32_bounds.SHALLOW else max(float(k), promised(k))


def _of_k(numbers: Array, operand: int) -> Array:
    """Return what belongs to each k, along the side of an operand that is summed."""
    return np.asarray(numbers if operand == 0 else numbers[:, None])


def _k(shape: tuple[int, ...], operand: int) -> int:
    return shape[-1] if operand == 0 else shape[-2]


def _sizes(spread: float) -> Drawn:
    """Numbers of many sizes."""
    return lambda shape, _, own, both: own.standard_normal(shape) * np.exp(spread * own.standard_normal(shape))


def _rows(shape: tuple[int, ...], operand: int, own: np.random.Generator, _: np.random.Generator) -> Array:
    """Rows of A, or columns of B, of very different sizes."""
    powers = own.integers(-40, 41, (shape[-2], 1) if operand == 0 else (1, shape[-1]))
    return np.asarray(np.ldexp(own.standard_normal(shape), powers))


def _graded(steps: int) -> Drawn:
    """Columns of A that are as much larger as the rows of B that they meet are smaller."""

    def graded(shape: tuple[int, ...], operand: int, own: np.random.Generator, both: np.random.Generator) -> Array:
        powers = both.integers(-1, 2, _k(shape, operand)) * steps
        return np.asarray(np.ldexp(own.standard_normal(shape), _of_k(-powers if operand else powers, operand)))

    return graded


def _cut(shape: tuple[int, ...], operand: int, own: np.random.Generator, _: np.random.Generator) -> Array:
    """Products that are a little smaller than what a sum that begins with 1 keeps."""
    numbers = np.full(shape, 2.0**-13) if operand else 2.0**-12 * (1 + own.random(shape) / 8)
    numbers[(..., 0) if operand == 0 else (..., 0, slice(None))] = 1
    return numbers


def _cancelling(shape: tuple[int, ...], operand: int, own: np.random.Generator, _: np.random.Generator) -> Array:
    """Sums of which the second half almost takes back the first."""
    numbers, half = own.standard_normal(shape), _k(shape, operand) // 2
    first, second = (
        (..., slice(start, start + half)) if operand == 0 else (..., slice(start, start + half), slice(None))
        for start in (0, half)
    )
    numbers[second] = numbers[first] * (1 + 2.0**-20 if operand else -1)
    return numbers


SPREADS: dict[str, Drawn] = {
    "normal": lambda shape, _, own, both: own.standard_normal(shape),
    "positive": lambda shape, _, own, both: own.random(shape),
    "wide": _sizes(2),
    "wider": _sizes(4),
    "rows": _rows,
    "graded": _graded(16),
    "steep": _graded(30),
    "cut": _cut,
    "integers": lambda shape, _, own, both: own.integers(-(2**20), 2**20, shape),
    "cancelling": _cancelling,
}
