"""Random products: their options, or batches of float32 in parts, drawn by a seed, and operands of any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gemmery.dtypes import FLOAT8, TENSOR_FLOAT8, Array
from gemmery.epilogues.random_epilogues import random_epilogue
from gemmery.keywords import ACTIVATIONS, SEMIRINGS
from gemmery.ladder import float32_parts
from gemmery_lab.measure.work import numpy_dtype

# Integers, bools and complex numbers; and float32 in a semiring.
OTHERS = ("int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128")
RINGS = tuple(name for name in SEMIRINGS if name != "or_and")
TYPES = {
    "cpu": ("f16", "bf16", "f32", "f64", "int8", *OTHERS, *RINGS),
    "cuda": ("f16", "bf16", "tf32", *TENSOR_FLOAT8, "int8", *OTHERS, *RINGS),
}
PARTS = ("f32_tensor", "f32_strict", "f32_plus")  # float32 with one of these precisions, in batches
GUARD = 64  # bytes of ones before and after a matrix, NaN in every floating type
HALF = ("f16", "bf16")

_LONGEST, _LONGER = 700, 5000
_MOST = 2e8  # multiplications
_FINISHED, _FINISHED_MOST = 0.2, 1e5  # how many products have an epilogue, and the elements of C
OPERANDS = ("p", "q", "r")  # the names of its operands
_SYMMETRIC = 0.05  # how many of the products that may be have the transposed A as B
_LARGE, _LARGE_MOST = 0.005, 2e9  # how many products have three long sides, and their multiplications
_EXACT_K = 2000  # beyond it, sums of products of numbers up to 2 no longer fit the 13 bits that float8 sums have
_KS = (0, 1, 8, 63, 64, 65)
_STORED = ("row", "col", "padded", "padded col", "aligned", "odd", "strided")  # layouts that C may have
_READ = (*_STORED, "one row")
_PARTS_MOST = 3e6  # multiplications of a batch: all elements are compared
_PARTS_LARGEST = 200  # products in a batch
_PARTS_KS = (1, 4, 15, 16, 17, 63, 64, 65, 127, 128, 129)
_PARTS_WRITTEN = ("row", "col", "padded", "odd")
Drawn = Callable[[tuple[int, ...], int, np.random.Generator, np.random.Generator], Array]


@dataclass(frozen=True)
class RandomProduct:
    """A product with its options; `seed` and `dtype` determine the others."""

    seed: int
    dtype: str  # of A and B; "tf32" and those of PARTS: f32 with that precision
    function: str  # "matmul", "gemm" or "grouped_matmul"
    m: int
    n: int
    k: int
    batch: int
    out: str
    layouts: tuple[str, str, str]
    shared: tuple[bool, bool]  # A or B is one matrix for the whole batch
    whole: bool  # small whole numbers, whose sums are exact
    alpha: float = 1.0
    beta: float = 0.0
    bias: bool = False
    activation: str = ""
    scales: str = ""  # "", "numbers", "outer" or "blocks"
    invariant: bool = False
    symmetric: bool = False  # B is A transposed, in A's memory: C is equal to its transpose to the last bit
    ends: tuple[int, ...] = ()  # of the groups in the rows of A
    deep: bool = False  # groups are along k instead
    spread: str = ""  # of the numbers of products in parts: SPREADS
    epilogue: str = ""  # the text of a function of the sums, of one weight or two, and of operands
    weights: int = 1

    @property
    def element(self) -> str:
        """The element type of A and B."""
        return "f32" if self.precision or self.semiring else self.dtype

    @property
    def semiring(self) -> str | None:
        """What the call names as `semiring`."""
        return self.dtype if self.dtype in RINGS else None

    @property
    def precision(self) -> str | None:
        """What the call names as `precision`."""
        return self.dtype if self.dtype == "tf32" or self.dtype in PARTS else None

    def __str__(self) -> str:
        """The product in one line: what differs from a plain one."""
        shape = f"{self.batch} x " * (self.batch > 1) + f"{self.m} x {self.n} x {self.k}"
        shared = [f"one {name} for all" for name, is_shared in zip("AB", self.shared, strict=True) if is_shared]
        numbers = [f"alpha={self.alpha}", f"beta={self.beta}"] if self.function == "gemm" else []
        options = [f"scales={self.scales}"] * bool(self.scales) + ["batch_invariant"] * self.invariant
        options += ["B is A transposed"] * self.symmetric
        options += [f"{self.weights} weights, epilogue {self.epilogue}"] * bool(self.epilogue)
        options += ["bias"] * self.bias + [self.activation] * bool(self.activation)
        options += ["groups along k"] * self.deep
        options += [f"groups end at {', '.join(map(str, self.ends))}"] * bool(self.ends)
        parts = [*shared, *numbers, *options, f"{'whole' if self.whole else self.spread or 'normal'} numbers"]
        return f"{self.function} {shape}, {self.dtype} -> {self.out}, {' / '.join(self.layouts)}, {', '.join(parts)}"


def drawn(seed: int, types: Sequence[str], kind: str) -> RandomProduct:
    """Return the product of a seed for a kind of device, "cpu" or "cuda", or the batch of small ones.

    >>> drawn(3, ["f16", "bf16"], "cpu") == drawn(3, [drawn(3, ["f16", "bf16"], "cpu").dtype], "cpu")
    True
    """
    dtype = str(np.random.default_rng([seed, 1]).choice(list(types)))
    if dtype in PARTS:
        return batch_in_parts(seed, dtype)
    if dtype in (*OTHERS, *RINGS):
        return plain_product(seed, dtype)
    draw = np.random.default_rng([seed, 0])
    functions = ["matmul"] * 3 + ["grouped_matmul"] * (dtype != "tf32") + ["gemm"] * (dtype not in (*FLOAT8, "int8"))
    function = str(draw.choice(functions))
    batch = int(draw.integers(2, 6)) if draw.random() < 0.25 and function != "grouped_matmul" else 1
    large = np.random.default_rng([seed, 2]).random() < _LARGE  # their tiles differ from those of small ones
    m, n, k = _sides(draw, batch, bool(large))
    unscaled = kind == "cpu" or function == "gemm" or dtype in ("tf32", "f32")
    in_blocks = batch == 1 and dtype in FLOAT8 and function == "matmul"
    kinds = ["", "numbers", *["outer"] * (batch == 1), *["blocks"] * in_blocks]
    scales = "" if unscaled else str(draw.choice(kinds))
    out = str(draw.choice(_results(dtype, scales, function)))
    epilogue = function != "gemm" and out not in ("int8", "int32")
    layouts = (str(draw.choice(_READ)), str(draw.choice(_READ)), str(draw.choice(_STORED)))
    shared, whole = _shared(draw, batch), bool(draw.random() < 0.5)
    product = replace(
        RandomProduct(seed, dtype, function, m, n, k, batch, out, layouts, shared, whole, scales=scales),
        alpha=float(draw.choice([1.0, 1.5, -0.5])) if function == "gemm" else 1.0,
        beta=float(draw.choice([0.0, 1.0, -0.75])) if function == "gemm" else 0.0,
        bias=epilogue and bool(draw.random() < 0.3),
        activation=str(draw.choice(["", "", *ACTIVATIONS])) if epilogue else "",
        # Products with a vector have a kernel for each shape: few of them wait for a compiler.
        invariant=kind != "cpu" and function != "gemm" and bool(draw.random() < (0.5 if min(m, n) > 1 else 0.9)),
        ends=_ends(draw, m) if function == "grouped_matmul" else (),
    )
    # Not on a device, whose approximations for results of 16 bits the reference has no bounds for.
    if kind == "cpu" and function == "matmul" and m * n * batch <= _FINISHED_MOST:
        own = np.random.default_rng([seed, 8])
        if own.random() < _FINISHED:
            weights = int(own.integers(1, 3))
            text, _ = random_epilogue(own, OPERANDS[: int(own.integers(0, 4))], weights)
            result = "f32" if dtype == "int8" else out
            plain = replace(product, bias=False, activation="", invariant=False)
            return replace(plain, out=result, epilogue=text, weights=weights)
    again = np.random.default_rng([seed, 4])
    if product.ends and k and again.random() < 0.4:
        scales = scales if scales in ("", "numbers") else "blocks" * (dtype in FLOAT8)
        return replace(product, ends=_ends(again, k), deep=True, bias=False, scales=scales)
    if product.ends or any(product.shared) or np.random.default_rng([seed, 3]).random() >= _SYMMETRIC:
        return product
    return replace(product, n=m, bias=False, beta=0.0, scales="", out=_results(dtype, "", function)[0], symmetric=True)


def plain_product(seed: int, dtype: str) -> RandomProduct:
    """Return the product of a seed, of a type of OTHERS or a semiring of RINGS; large ones are of whole tiles at times.

    >>> plain_product(3, "int64").out, plain_product(3, "min_plus").out
    ('int64', 'f32')
    """
    draw = np.random.default_rng([seed, 8])
    batch = int(draw.integers(2, 6)) if draw.random() < 0.25 else 1
    m, n, k = _sides(draw, batch, draw.random() < 2 * _LARGE)
    layouts = str(draw.choice(_READ)), str(draw.choice(_READ)), str(draw.choice(_STORED))
    scaled = dtype not in ("bool", *RINGS) and bool(draw.random() < 0.3)
    out = "f32" if dtype in RINGS else dtype
    if dtype in OTHERS[:6] and not scaled and draw.random() < 0.2:
        out = dtype.rstrip("0123456789") + "64"
    product = RandomProduct(seed, dtype, "gemm" if scaled else "matmul", m, n, k, batch, out, layouts,
                            _shared(draw, batch), whole=bool(draw.random() < 0.5))  # fmt: skip
    return replace(product, alpha=float(draw.choice([2, -1])), beta=float(draw.choice([0, 3]))) if scaled else product


def _sides(draw: np.random.Generator, batch: int, large: bool) -> tuple[int, int, int]:
    """Return m, n and k: mostly small, half of them multiples of 16, k often one at which loops begin or end."""
    sides: list[int] = []
    for _ in range(3):
        low, high = (_LONGEST, _LONGER) if large or draw.random() < 0.02 else (1, _LONGEST)
        side = int(np.exp(draw.uniform(np.log(low), np.log(high + 1))))
        sides.append(-(-side // 16) * 16 if draw.random() < 0.5 else side)
    if draw.random() < 0.25:
        sides[2] = int(draw.choice(_KS))
    while batch * sides[0] * sides[1] * max(1, sides[2]) > (_LARGE_MOST if large else _MOST):
        longest = 2 if large else sides.index(max(sides))
        sides[longest] //= 2
    return sides[0], sides[1], sides[2]


def _shared(draw: np.random.Generator, batch: int) -> tuple[bool, bool]:
    """Return whether A or B is one matrix for the whole batch."""
    kind = int(draw.choice([0, 0, 1, 2])) if batch > 1 else 0
    return kind == 1, kind == 2


def _results(dtype: str, scales: str, function: str) -> list[str]:
    """Return the element types that C may have."""
    if dtype == "int8":
        return ["bf16", "f16", "f32"] if scales else ["int32"]
    if dtype in FLOAT8:
        return ["bf16", "f16", "f32"]
    return [dtype, "f32"] if dtype in HALF and function != "gemm" else ["f32" if dtype == "tf32" else dtype]


def _ends(draw: np.random.Generator, rows: int) -> tuple[int, ...]:
    """Return where groups end; some groups have no rows, and the last rows sometimes belong to no group."""
    cuts = sorted(int(cut) for cut in draw.integers(0, rows + 1, int(draw.integers(0, 8))))
    last = rows if draw.random() < 0.7 else int(draw.integers(max([1, *cuts]), rows + 1))
    return (*cuts, last)


def values(product: RandomProduct, shape: tuple[int, ...], dtype: str, draw: np.random.Generator) -> Array:
    """Return random numbers of an element type."""
    kind = numpy_dtype(dtype)
    if dtype in ("int8", "int32") and product.dtype == "int8":
        return draw.integers(-128, 128, shape).astype(kind)
    if kind.kind in "iub":
        bits = draw.integers(0, 256, (*shape, kind.itemsize), np.uint8)
        return np.asarray(bits[..., 0] < 16) if kind.kind == "b" else bits.view(kind)[..., 0]
    if kind.kind == "c":
        parts = [draw.standard_normal(shape) for _ in range(2)]
        real, imaginary = (np.rint(part) if product.whole else part for part in parts)
        return np.asarray(real + 1j * imaginary, kind)
    if product.whole:
        most = 8 if product.dtype not in FLOAT8 else 2 if product.k <= _EXACT_K else 1
        return draw.integers(-most, most + 1, shape).astype(np.float32).astype(kind)
    return draw.standard_normal(shape, np.float64 if kind == np.float64 else np.float32).astype(kind)


@dataclass(frozen=True)
class MatrixImage:
    """Matrices in memory with guards around them."""

    memory: Array  # bytes
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    offset: int  # elements

    def matrices(self, memory: Array | None = None) -> Array:
        """Return the matrices in this memory, or in a copy of it."""
        size = self.dtype.itemsize
        steps = tuple(step * size for step in self.strides)
        inside = self.memory if memory is None else memory
        return np.ndarray(self.shape, self.dtype, inside.data, self.offset * size, steps)


def image(numbers: Array, layout: str) -> MatrixImage:
    """Return (..., rows, columns) in memory of a layout; of "one row" the first row is repeated."""
    *batch, rows, columns = numbers.shape
    size = numbers.itemsize
    wide = -(-columns * size // 16) * 16 // size
    row, column = {
        "row": (columns, 1),
        "col": (1, rows),
        "padded": (columns + 3, 1),
        "padded col": (1, rows + 5),
        "aligned": (wide + 16 // size, 1),
        "odd": (columns, 1),
        "strided": (2 * columns + 1, 2),
        "one row": (0, 1),
    }[layout]
    each = max(1, row * (rows - 1) + column * (columns - 1) + 1) if rows and columns else 1
    each = -(-each * size // 16) * 16 // size if layout in ("aligned", "col", "padded col") else each
    offset = GUARD // size + (layout == "odd")
    count = batch[0] if batch else 1
    memory = np.full((offset + max(1, count) * each) * size + GUARD, 0xFF, np.uint8)
    placed = MatrixImage(memory, numbers.dtype, numbers.shape, (*([each] if batch else []), row, column), offset)
    placed.matrices()[...] = numbers[..., :1, :] if layout == "one row" else numbers
    return placed


def batch_in_parts(seed: int, precision: str) -> RandomProduct:
    """Return the batch of a seed, of one of the precisions of float32 that sum in parts.

    >>> batch_in_parts(3, "f32_strict").k
    16
    """
    draw = np.random.default_rng([seed, 4])
    sides = 6.5 if draw.random() < 0.95 else 9.5  # a few have whole tiles
    m, n = (int(2 ** draw.uniform(0, sides)) for _ in range(2))
    k = int(draw.choice(_PARTS_KS)) if draw.random() < 0.3 else int(2 ** draw.uniform(5, 10.5))
    k = 4 * k if draw.random() < 0.02 else k
    batch = int(np.clip(_PARTS_MOST / (m * n * k), 1, _PARTS_LARGEST))
    layouts = str(draw.choice(_STORED)), str(draw.choice(_STORED)), str(draw.choice(_PARTS_WRITTEN))
    is_scaled = bool(draw.random() < 0.2)
    function, shared = "gemm" if is_scaled else "matmul", _shared(draw, batch)
    return replace(
        RandomProduct(seed, precision, function, m, n, k, batch, "f32", layouts, shared, whole=False),
        alpha=-0.5 if is_scaled else 1.0,
        beta=0.75 if is_scaled else 0.0,
        bias=not is_scaled and bool(draw.random() < 0.2),
        # What is small is left to CUDA cores, unless the choice must not depend on m.
        invariant=precision == "f32_tensor" and not is_scaled,
        spread=str(draw.choice(list(SPREADS))),
    )


def values_in_parts(product: RandomProduct, shape: tuple[int, ...], operand: int) -> Array:
    """Return the numbers of A (0) or B (1)."""
    own, both = np.random.default_rng([product.seed, 5 + operand]), np.random.default_rng([product.seed, 7])
    with np.errstate(over="ignore"):
        return np.asarray(SPREADS[product.spread](shape, operand, own, both).astype(np.float32))


def growth_in_parts(product: RandomProduct) -> Callable[[int], float]:
    """Return f(k) of what a precision promises: for all methods that the device may choose from."""
    bounds = {"f32_strict": float32_parts.three_parts, "f32_plus": float32_parts.pairs}
    promised = bounds.get(product.dtype, float)
    return lambda k: promised(k) if k >= float32_parts.SHALLOW else max(float(k), promised(k))


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
        return np.asarray(np.ldexp(own.standard_normal(shape), -powers[:, None] if operand else powers))

    return graded


def _cut(shape: tuple[int, ...], operand: int, own: np.random.Generator, _: np.random.Generator) -> Array:
    """Products that are a little smaller than what a sum that begins with 1 keeps."""
    numbers = np.full(shape, 2.0**-13) if operand else 2.0**-12 * (1 + own.random(shape) / 8)
    numbers[(..., 0) if operand == 0 else (..., 0, slice(None))] = 1
    return numbers


def _canceling(shape: tuple[int, ...], operand: int, own: np.random.Generator, _: np.random.Generator) -> Array:
    """Sums of which the second half almost takes back the first."""
    numbers, half = own.standard_normal(shape), _k(shape, operand) // 2
    along = numbers if operand == 0 else numbers.swapaxes(-1, -2)
    along[..., half : 2 * half] = along[..., :half] * (1 + 2.0**-20 if operand else -1)
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
    "canceling": _canceling,
}
