"""A product to be timed: its problem, the layout of its operands, and how it is called."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmery import dtypes
from gemmery.errors import ArgumentError
from gemmery.problem import Problem

BLOCK = 128  # elements of k, and columns of B, that share a factor
PIECE = 1 << 22  # elements that one thread draws at a time: normal numbers take 16 ns each
LAYOUTS = ("row", "col", "strided")
OF_A = "transposed a"  # the layout of a B that is A's memory
CALLS = ("out", "new")


@dataclass(frozen=True)
class Work:
    """C[m, n] = A[m, k] @ B[k, n], `batch` times, as a user would call it.

    A layout is "row", "col" (the transposed view of a row-major matrix) or "strided" (every second row and
    column of a larger one); that of B also OF_A. `call` "out" writes into an existing array, "new" allocates one.
    With `vector`, B and C are 1-D. In a suite of kind "calls", `call` is a key of `bench.expressions.CALLS`. The same
    Work has the same operands in every process.
    """

    m: int
    n: int
    k: int
    dtype: str
    out: str
    batch: int = 1
    a_layout: str = "row"
    b_layout: str = "row"
    call: str = "out"
    vector: bool = False
    seed: int = 0
    name: str = ""  # of the comparison it belongs to
    precision: str = ""  # "tf32" where products of f32 may keep 10 bits of fraction
    arrays: str = ""  # whose arrays a call of `bench.expressions` gets, "numpy" or "torch"
    scales: str = ""  # float32 factors of A and B: "one" of each, or of "blocks" of 128
    groups: int = 0  # matrices B, each multiplied by some of the m rows of A; 0: one B for all

    @property
    def problem(self) -> Problem:
        """The problem that dispatch sees."""
        known = {"row": "row", "col": "col", "strided": "any"}
        a = known[self.a_layout]
        b = {"row": "col", "col": "row", "any": "any"}[a] if self.b_layout == OF_A else known[self.b_layout]
        like = Problem(self.m, self.n, self.k, self.dtype, self.out, self.batch, a, b, precision=self.precision)
        return like._replace(scales={"one": "outer"}.get(self.scales, self.scales), groups=self.groups)

    @property
    def case(self) -> str:
        """How it differs from the plain product of its shape, as text: "a transposed, allocating"."""
        layouts = (("a", self.a_layout), ("b", self.b_layout))
        words = {"col": "transposed", "strided": "strided", OF_A: "= a.T"}
        parts = [f"{name} {words[layout]}" for name, layout in layouts if layout in words]
        how = {"out": "", "new": "allocating"}.get(self.call, self.call)
        factors = {"one": "a factor each", "blocks": "factors of blocks"}.get(self.scales, "")
        groups = f"{self.groups} groups" if self.groups else ""
        tensors = "tensors" if self.arrays == "torch" else ""
        return ", ".join(filter(None, [self.name, *parts, how, tensors, factors, groups]))

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        types = self.precision or (self.dtype if self.dtype == self.out else f"{self.dtype} -> {self.out}")
        return f"{batch}{self.m}x{self.n}x{self.k} {types}{', ' if self.case else ''}{self.case}"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of an element type; bfloat16 and float8 come from ml_dtypes.

    Raises ArgumentError if ml_dtypes is needed and not installed.
    """
    row = dtypes.get(name)
    if row.stored == row.numpy:
        return np.dtype(row.numpy)
    try:
        import ml_dtypes
    except ImportError:
        raise ArgumentError(f"dtype {name}: NumPy has no {row.numpy}; pip install ml_dtypes") from None
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, row.numpy))
    return dtype


def operands(work: Work) -> tuple[Any, Any, Any]:
    """Return A, B and C of a Work as NumPy arrays: standard normal floats, integers over their whole range; C is zero.

    C is None if the call allocates it.
    """
    rng = np.random.default_rng(work.seed)
    batch = (work.batch,) if work.batch > 1 else ()
    a = _matrix(rng, work.dtype, (*batch, work.m, work.k), work.a_layout)
    matrices = (work.groups,) if work.groups else batch
    if work.b_layout == OF_A:
        b = a.swapaxes(-1, -2)
    else:
        b = _matrix(rng, work.dtype, (*matrices, work.k, work.n), work.b_layout)
    c = np.zeros((*batch, work.m, work.n), numpy_dtype(work.out))
    if work.vector:
        b, c = b[..., 0], c[..., 0]
    return a, b, None if work.call == "new" else c


def offsets(work: Work) -> Any:
    """Return the ends of the rows of each group, of uneven sizes, as int32.

    >>> offsets(Work(100, 8, 8, "bf16", "bf16", groups=4)).tolist()[-1]
    100
    """
    rng = np.random.default_rng(work.seed)
    shares = rng.exponential(size=work.groups)
    return np.cumsum(rng.multinomial(work.m, shares / shares.sum())).astype(np.int32)


def factors(work: Work) -> tuple[Any, Any]:
    """Return the factors of A and of B, powers of two: one each, or of each row and column by blocks of 128.

    Those of blocks have adjacent rows of A, and adjacent blocks of k of B, as PyTorch needs them.
    """
    pieces = -(-work.k // BLOCK)
    shapes = ((1,), (1,)) if work.scales == "one" else ((pieces, work.m), (-(-work.n // BLOCK), pieces))
    rng = np.random.default_rng(work.seed)
    a, b = (np.exp2(rng.integers(-2, 3, shape)).astype(np.float32) for shape in shapes)
    return a.T, b.T


def _matrix(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], layout: str) -> Any:
    *batch, rows, columns = shape
    stored = {"row": (rows, columns), "col": (columns, rows), "strided": (2 * rows, 2 * columns)}[layout]
    filled = _random(rng, dtype, (*batch, *stored))
    if layout == "col":
        return filled.swapaxes(-1, -2)
    return filled[..., ::2, ::2] if layout == "strided" else filled


def _random(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return random elements; large arrays are drawn by all cores, each piece from a stream of its own."""
    size = math.prod(shape)
    if size <= PIECE:
        return _drawn(rng, dtype, shape)
    flat = np.empty(size, numpy_dtype(dtype))
    pieces = [flat[start : start + PIECE] for start in range(0, size, PIECE)]

    def draw(stream: np.random.Generator, piece: Any) -> None:
        piece[:] = _drawn(stream, dtype, piece.shape)

    with ThreadPoolExecutor() as pool:
        list(pool.map(draw, rng.spawn(len(pieces)), pieces))
    return flat.reshape(shape)


def _drawn(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    kind, to = dtypes.get(dtype).kind, numpy_dtype(dtype)
    if kind in "iu":
        limits = np.iinfo(to)
        return rng.integers(limits.min, limits.max, shape, to, endpoint=True)
    if kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(to)
    return rng.standard_normal(shape, np.float64 if dtype == "f64" else np.float32).astype(to, copy=False)
