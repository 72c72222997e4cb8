"""Shapes and strides of operands as one batch of plain products, and the loops around it.

Kernels take three dimensions, (batch, rows, columns), with one stride each. This module brings broadcasting, 1-D
operands and any number of batch dimensions into that form without moving an element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from gemmery.errors import ShapeError
from gemmery.tuples import NamedTuple

Ints = tuple[int, ...]
Three = tuple[int, int, int]
Loop = tuple[int, Three]  # how often, and the step of A, B and C in bytes


class Arrangement(NamedTuple):
    """`batch` products of (m, k) by (k, n); strides in bytes are (batch, row, column).

    `loops` are the batch dimensions that are left around the kernel, innermost first: none unless the batch cannot be
    walked with one stride.
    """

    m: int
    n: int
    k: int
    batch: int
    a: Three
    b: Three
    c: Three
    loops: tuple[Loop, ...] = ()

    @property
    def runs(self) -> int:
        """Number of times that the kernel runs."""
        return math.prod(length for length, _ in self.loops)

    def offsets(self) -> Iterable[Three]:
        """Return for each run of the kernel the bytes to add to the pointers of A, B and C."""
        return _listed(self.loops) if self.runs <= _FEW else _walked(self.loops)


_FEW = 512  # runs whose offsets are kept for the next product: at most 20 MB in all


def _walked(loops: tuple[Loop, ...]) -> Iterator[Three]:
    if not loops:
        yield (0, 0, 0)
        return
    length, (a, b, c) = loops[0]
    for x, y, z in _walked(loops[1:]):
        for i in range(length):
            yield x + i * a, y + i * b, z + i * c


@lru_cache(maxsize=256)
def _listed(loops: tuple[Loop, ...]) -> tuple[Three, ...]:
    return tuple(_walked(loops))


@lru_cache(maxsize=4096)
def result_shape(a: Ints, b: Ints) -> Ints:
    """Return the shape of a product, by NumPy's rules for matmul.

    >>> result_shape((5, 1, 2, 3), (4, 3, 7))
    (5, 4, 2, 7)
    >>> result_shape((3,), (3,))
    ()

    Raises ShapeError for scalars, for inner dimensions that differ and for batches that do not broadcast.
    """
    if not a or not b:
        raise ShapeError(f"shapes {a} and {b}: a scalar is not a matrix or vector; multiply by it with *")
    inner = b[-2] if len(b) > 1 else b[0]
    if a[-1] != inner:
        turned = [name for name, fits in (("first", inner in a[-2:-1]), ("second", a[-1] in b[1:][-1:])) if fits]
        advice = f": transpose the {' or the '.join(turned)}?" if turned else ""
        raise ShapeError(
            f"shapes {a} and {b}: the last dimension of the first is {a[-1]}, but the "
            f"{'second to last' if len(b) > 1 else 'only'} one of the second is {inner}; they must be equal{advice}"
        )
    batch = _broadcast(a[:-2], b[:-2])
    if batch is None:
        raise ShapeError(
            f"shapes {a} and {b}: the batch dimensions {a[:-2]} and {b[:-2]} do not broadcast; "
            "each pair must be equal or contain a 1"
        )
    return (*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


def arrange(
    a_shape: Ints,
    a_strides: Ints,
    b_shape: Ints,
    b_strides: Ints,
    c_shape: Ints,
    c_strides: Ints,
    size: int,
    more_columns: bool = True,
) -> Arrangement:
    """Return the fewest runs of a three-dimensional kernel that make up the product.

    Adjacent batch dimensions that one stride walks are merged; a batch that shares B becomes more rows of one product,
    and (with `more_columns`) one that shares A more columns, as long as the elements of C stay adjacent in rows or in
    columns. Of the batches that are left, the kernel's is the one along which elements of all operands are adjacent,
    else the longest. `size` is that of C's elements in bytes; C must not be empty.
    """
    if len(b_shape) == 1:
        b_shape, b_strides = (*b_shape, 1), (*b_strides, 0)
        c_shape, c_strides = (*c_shape, 1), (*c_strides, 0)
    if len(a_shape) == 1:
        a_shape, a_strides = (1, *a_shape), (0, *a_strides)
        c_shape, c_strides = (*c_shape[:-1], 1, c_shape[-1]), (*c_strides[:-1], 0, c_strides[-1])
    *batch, m, n = c_shape
    k = a_shape[-1]
    (a_row, a_col), (b_row, b_col), (c_row, c_col) = a_strides[-2:], b_strides[-2:], c_strides[-2:]
    a_steps = _steps(a_shape[:-2], a_strides[:-2], len(batch))
    b_steps = _steps(b_shape[:-2], b_strides[:-2], len(batch))
    groups = _groups(batch, a_steps, b_steps, c_strides[:-2])

    def adjacent(m: int, n: int, row: int, col: int) -> bool:
        return layout(m, n, row, col, size) != "any"

    anyway = not adjacent(m, n, c_row, c_col)  # then nothing is lost
    m, a_row, c_row = _fold(groups, m, a_row, c_row, 0, lambda m, row: anyway or adjacent(m, n, row, c_col))
    if more_columns:
        n, b_col, c_col = _fold(groups, n, b_col, c_col, 1, lambda n, col: anyway or adjacent(m, n, c_row, col))
    interleaved = (size, size, size)
    inner = max(groups, key=lambda group: (group[1] == interleaved, group[0]), default=(1, (0, 0, 0)))
    if groups:
        groups.remove(inner)
    count, (a_batch, b_batch, c_batch) = inner
    c_row, c_col = _plain(m, n, c_row, c_col, size)
    return Arrangement(
        m, n, k, count, (a_batch, a_row, a_col), (b_batch, b_row, b_col), (c_batch, c_row, c_col), tuple(groups)
    )


def layout(rows: int, columns: int, row: int, column: int, size: int) -> str:
    """Return "row" where the elements of a row are adjacent in memory, "col" where those of a column are, else "any".

    >>> layout(4, 5, 20, 4, size=4), layout(4, 5, 4, 16, size=4), layout(4, 5, 40, 8, size=4)
    ('row', 'col', 'any')
    """
    if columns == 1 or column == size:
        return "row"
    return "col" if rows == 1 or row == size else "any"


def _broadcast(a: Ints, b: Ints) -> Ints | None:
    """Return the common shape of two batches, or None."""
    result = []
    for x, y in itertools.zip_longest(reversed(a), reversed(b), fillvalue=1):
        if x != y and 1 not in (x, y):
            return None
        result.append(y if x == 1 else x)
    return tuple(reversed(result))


def _steps(shape: Ints, strides: Ints, count: int) -> Ints:
    """Return the strides of `count` batch dimensions: 0 where one matrix is repeated."""
    missing = count - len(shape)
    return (0,) * missing + tuple(0 if n == 1 else stride for n, stride in zip(shape, strides, strict=True))


def _groups(batch: Sequence[int], a: Ints, b: Ints, c: Ints) -> list[Loop]:
    """Merge adjacent batch dimensions that one stride walks in all three operands; innermost first."""
    groups: list[Loop] = []
    for length, *strides in zip(reversed(batch), reversed(a), reversed(b), reversed(c), strict=True):
        if length == 1:
            continue
        x, y, z = strides
        if groups:
            inside, (p, q, r) = groups[-1]
            if (x, y, z) == (p * inside, q * inside, r * inside):
                groups[-1] = (inside * length, (p, q, r))
                continue
        groups.append((length, (x, y, z)))
    return groups


def _fold(
    groups: list[Loop], length: int, step: int, c_step: int, walked: int, allowed: Callable[[int, int], bool]
) -> tuple[int, int, int]:
    """Take a batch that shares B as more rows of A (`walked` 0), or one that shares A as more columns of B (1).

    The result is (length, step, step of C), which `allowed(length, step of C)` must take.
    """
    for group in groups:
        count, strides = group
        own, shared, out = strides[walked], strides[1 - walked], strides[2]
        if shared == 0 and (length == 1 or (own == step * length and out == c_step * length)):
            folded = (count, own, out) if length == 1 else (length * count, step, c_step)
            if allowed(folded[0], folded[2]):
                groups.remove(group)
                return folded
    return length, step, c_step


def _plain(rows: int, columns: int, row: int, column: int, size: int) -> tuple[int, int]:
    """Return the strides of C, those of adjacent elements for dimensions of length 1."""
    if columns == 1:
        column = size
    if rows == 1:
        row = columns * size if column == size else size
    return row, column
