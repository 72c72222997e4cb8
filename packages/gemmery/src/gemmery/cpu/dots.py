"""Few columns of C, or few rows: dot products of the rows of A with the columns of B, each summed by lanes.

A tile that runs along a row of C would leave most lanes empty, and packing A would copy more than is multiplied. Here
vectors run along k, as in `gemv`: each vector of A is read once, in memory order, for all columns. Rows of A must be
contiguous; columns of B that are not are copied, a block of k at a time. Few rows are the transposed product,
C' = B' A', with strides swapped: then columns of B must be contiguous, as in `x @ w.T`, and B is read once, unpacked.

Every element is summed in the same order, whatever m, n and the layout of B are: lanes of a block of k, then the lanes
by halves, then the blocks in levels (`long_k`).
"""

from __future__ import annotations

from functools import partial

from gemmery import dtypes
from gemmery.cpu.abi import Args
from gemmery.cpu.gemv_forms import sum_lanes
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES, lanes_of, vector
from gemmery.cpu.long_k import define_fold, in_levels
from gemmery.cpu.target import DOTS_APART, DOTS_BLOCK, DOTS_ROWS, Target, dots_columns

_COPY = ("b", ("i64", "b_row"), ("i64", "b_col"), ("i64", "k"), "to")
_PARAMS = (
    ("i64", "count"), ("i64", "k"), "a", ("i64", "a_row"), "b", ("i64", "b_column"), "sums",
    ("i64", "column"),
)  # fmt: skip


def dots(target: Target, dtype: str) -> Module:
    """Return the module of an element type; its entry is `dots`, C = alpha A B + beta C.

    Its loops:
        for each 1024 rows of C:
            for each block of k:
                columns = B[block, :] as they lie, or a copy with contiguous columns
                for each few rows i: for each vector p of the block:
                    sums[i..., :] += A[i..., p...] * columns[p..., :]
            C[rows, :] = sums
    """
    module, element = Module(target), dtypes.get(dtype).llvm
    most = dots_columns(target, SIZES[element])
    for n in range(2, most + 1):
        with module.function(f"dots_{n}", *_PARAMS, local=True) as f:
            for i, rows in f.in_steps(f["count"], _height(target, n)):
                _rows(f, element, i, rows, n)
        with module.function(f"copy_{n}", *_COPY, local=True) as f:
            _copy(f, element, n)
    define_fold(module, element)
    with module.function("dots", "args") as f:
        _entry(f, element, most)
    return module


def _copy(f: Function, element: str, n: int) -> None:
    """Copy n columns of B to contiguous ones: by vectors where rows of 2 or 4 numbers follow each other."""
    size, lanes = SIZES[element], f.target.lanes(SIZES[element])
    wide, whole = vector(lanes, element), f.index(0)
    if n in (2, 4):
        adjacent = f["b_col"].equals(size) & f["b_row"].equals(n * size)
        whole = f.select(adjacent, f["k"] // lanes * lanes, f.index(0))
        with f.loop(0, whole, lanes) as p:
            rows = [f.load(wide, f["b"] + (p * n + lanes * i) * size) for i in range(n)]
            for j, column in enumerate(_columns(f, rows)):
                f.store(column, f["to"] + (DOTS_APART * j + p) * size)
    row = f.var(f["b"] + whole * f["b_row"])
    with f.loop(whole, f["k"]) as p:
        at = row.value
        for j in range(n):
            f.store(f.load(element, at + f["b_col"] * j, align=size), f["to"] + (DOTS_APART * j + p) * size, align=size)
        row.value = at + f["b_row"]


def _columns(f: Function, rows: list[Value]) -> list[Value]:
    """Return the columns of a matrix whose rows of 2 or 4 numbers lie one after the other in as many vectors."""
    if len(rows) == 1:
        return rows
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    every = range(2 * lanes_of(rows[0].type))
    even, odd = ([f.shuffle(x, y, list(every[first::2])) for x, y in pairs] for first in (0, 1))
    columns = zip(_columns(f, even), _columns(f, odd), strict=True)
    return [column for pair in columns for column in pair]


def _height(target: Target, n: int) -> int:
    """Return the rows of a tile, a power of two: its sums leave registers for a vector of A and n of B."""
    room = 24 if target.isa == "avx512" else 8
    return 1 << (room // n).bit_length() - 1 if room // n < 8 else 8


def _rows(f: Function, element: str, i: Value, rows: int, n: int) -> None:
    """Add the products of `rows` rows of A with all columns to their sums.

    Each step prefetches what lies below it in the next `rows` rows, as `streamed` does: hardware prefetchers begin anew
    in each row (893 x 3 x 515, f32, Zen 4, A in memory: 146 us without, 86; in a cache 31 and 32).
    """
    size, lanes = SIZES[element], f.target.lanes(SIZES[element])
    wide = vector(lanes, element)
    a = [f["a"] + (i + r) * f["a_row"] for r in range(rows)]
    b = [f["b"] + f["b_column"] * j for j in range(n)]
    totals = [[f.var(f.zero(wide)) for _ in range(rows)] for _ in range(n)]
    for p, mask in f.in_vectors(f["k"], lanes):
        for row in a if mask is None else ():
            f.prefetch(row + f["a_row"] * rows + p * size, locality=2)
        columns = [f.load_masked(wide, column + p * size, mask) for column in b]
        for r, row in enumerate(a):
            cells = f.load_masked(wide, row + p * size, mask)
            for j, column in enumerate(columns):
                totals[j][r].value = f.fma(cells, column, totals[j][r].value)
    for j, of_column in enumerate(totals):
        total, at = sum_lanes(f, [row.value for row in of_column]), f["sums"] + f["column"] * j + i * size
        f.store(f.load(total.type, at) + total, at)


def _entry(f: Function, element: str, most: int) -> None:
    args, size = Args(f, f["args"]), SIZES[element]
    lanes = f.target.lanes(size)
    few_rows, k = args.nc.equals(1), args.k
    (m, n), (a, b) = _swapped(f, few_rows, args.m, args.n), _swapped(f, few_rows, args.a, args.b)
    a_row, b_col = _swapped(f, few_rows, args.a_row, args.b_col)
    b_row = f.select(few_rows, args.a_col, args.b_row)
    c_steps = _swapped(f, few_rows, args.c_row, args.c_col)
    sums, apart = args.workspace, f.index(most * DOTS_ROWS * size)
    columns = sums + apart * 3
    with f.loop(0, m, DOTS_ROWS) as i:
        count = f.min(m - i, DOTS_ROWS)
        column = (count + (lanes - 1)) // lanes * lanes * size  # bytes of the sums of a column
        lines = column * n // (lanes * size)
        with f.loop(0, lines) as line:
            f.store(f.zero(vector(lanes, element)), sums + line * (lanes * size))

        def add(p: Value, stop: Value, i: Value = i, count: Value = count, column: Value = column) -> None:
            """Add the products of a block of k to the sums."""
            deep = stop - p
            columns_at, b_column = f.var(b + p * b_row), f.var(b_col)
            with f.if_(b_row.differs(size)):
                copied = columns_at.value, b_row, b_col, deep, columns
                f.switch(n, {j: partial(f.call, f"copy_{j}", *copied) for j in range(2, most + 1)})
                columns_at.value, b_column.value = columns, f.index(DOTS_APART * size)
            rows_at = a + i * a_row + p * size
            operands = count, deep, rows_at, a_row, columns_at.value, b_column.value, sums, column
            f.switch(n, {j: partial(f.call, f"dots_{j}", *operands) for j in range(2, most + 1)})

        totals = in_levels(f, k, f.index(DOTS_BLOCK), sums, apart, lines, add)
        _finish(f, element, args, i, count, n, c_steps, totals, column)


def _swapped(f: Function, swap: Value, first: Value, second: Value) -> tuple[Value, Value]:
    """Return two values, in the other order where `swap` is true."""
    return f.select(swap, second, first), f.select(swap, first, second)


def _finish(
    f: Function, element: str, args: Args, i: Value, count: Value, n: Value, c_steps: tuple[Value, Value],
    totals: Value, column: Value,
) -> None:  # fmt: skip
    """Store the rows of C from row i on: alpha times the sums plus beta C."""
    size, (c_row, c_col) = SIZES[element], c_steps
    alpha, beta = f.load(element, args.alpha), f.load(element, args.beta)
    c = args.c + i * c_row
    for scaled in (False, True):
        condition = beta.differs(0)
        with f.if_(condition if scaled else condition ^ True), f.loop(0, count) as r, f.loop(0, n) as j:
            at = c + r * c_row + j * c_col
            total = f.load(element, totals + j * column + r * size) * alpha
            f.store(f.fma(f.load(element, at), beta, total) if scaled else total, at)
