"""A matrix product as a value: shapes, types and layouts, operations and bytes."""

from __future__ import annotations

from collections.abc import Mapping

from gemmery import dtypes
from gemmery.tuples import NamedTuple

Config = Mapping[str, int]  # the parameters of a rung, by name

_TRANSPOSED = {"row": "col", "col": "row", "any": "any"}
_OTHER = str.maketrans("ab", "ba")


class Problem(NamedTuple):
    """C[m, n] = alpha * A[m, k] @ B[k, n] + beta * C, `batch` times.

    Layouts: "row" when the elements of a row are adjacent, "col" when those of a column are, "any" for
    every other pair of strides. A matrix of one column fits both and counts as "row". B may also be "packed".
    """

    m: int
    n: int
    k: int
    dtype: str  # of A and B
    out: str  # of C
    batch: int = 1
    a_layout: str = "row"
    b_layout: str = "row"
    c_layout: str = "row"
    epilogue: str = ""  # "", "bias", "relu", "bias+relu", ... (`graph.usual`), or the name of a traced function
    scaled: bool = False  # alpha != 1 or beta != 0
    device: str = "cpu"
    precision: str = ""  # how f32 may be multiplied: config.FLOAT32_PRECISIONS; or f64: f64_normwise; "": as it is
    alignments: tuple[int, int, int] = (16, 16, 16)  # bytes of which pointer and strides of A, B, C are multiples
    scales: str = ""  # float32 factors: "outer" of rows of A and columns of B, "blocks" of 128 of k as well
    invariant: bool = False  # the bits of a row of C must not depend on m
    groups: int = 0  # products of one kind with rows of A of their own; 0: an ordinary product
    bits: int = 0  # of an element of B, where B is packed with a factor for each group of a column; 0: of type dtype
    group: int = 0  # elements of a column of B that share a factor
    levels: str = ""  # the kind of an element of B, where cuda/weights.py arranged B; "": B is packed by rows, or not
    interleaved: bool = False  # elements of A, B and C are adjacent along the batch
    b_dtype: str = ""  # of B where it is another one
    semiring: str = ""  # what takes the place of addition and multiplication: keywords.SEMIRINGS; "": they themselves
    split: str = ""  # which of A and B were split before, of float32 in parts: "", "a", "b" or "ab"
    k_groups: int = 0  # products with parts of k of their own, one part after the other, and a matrix of C; 0: one
    gathered: bool = False  # the rows of A of groups are those that an index names

    def transposed(self) -> Problem:
        """Return the same product as C' = B' A'."""
        return self._replace(
            m=self.n,
            n=self.m,
            dtype=self.b_dtype or self.dtype,
            b_dtype=self.b_dtype and self.dtype,
            a_layout=_TRANSPOSED[self.b_layout],
            b_layout=_TRANSPOSED[self.a_layout],
            c_layout=_TRANSPOSED[self.c_layout],
            alignments=(self.alignments[1], self.alignments[0], self.alignments[2]),
            split="".join(sorted(self.split.translate(_OTHER))),
        )

    @property
    def has_bias(self) -> bool:
        """True where a number for each column is added to the sums."""
        return self.epilogue.startswith("bias")

    @property
    def activation(self) -> str:
        """What comes after the bias."""
        return activation_of(self.epilogue)

    def by_rows(self) -> Problem:
        """Return the product with a row-major C: a column-major C becomes C' = B' A'."""
        return self.transposed() if self.c_layout == "col" else self

    @property
    def flops(self) -> int:
        """Number of multiplications and additions; a complex multiply-add counts 4 + 4."""
        each = 8 if dtypes.get(self.dtype).kind == "c" else 2
        return each * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Least number of bytes moved: each input read once, C written once."""
        inputs = (self.m * self.k + max(1, self.groups) * self.k * self.n) * dtypes.get(self.dtype).size
        return self.batch * (inputs + max(1, self.k_groups) * self.m * self.n * dtypes.get(self.out).size)

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


def activation_of(epilogue: str) -> str:
    """Return what comes after the bias in an epilogue of a Problem.

    >>> activation_of("bias+relu"), activation_of("bias"), activation_of("gelu")
    ('relu', '', 'gelu')
    """
    return epilogue.removeprefix("bias").removeprefix("+")
