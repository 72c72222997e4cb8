"""Many small products in one call: m, n and k are constants of the code, and it loops over the batch.

C stays in registers, with a mask for its last columns; short rows use short vectors (four lanes for n = 3). Contiguous
matrices A and B are read in place. Others, and element types narrower than the accumulator, are first copied to a
buffer of a few hundred bytes on the stack.
Every element is summed over k in order, as in the other kernels.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from functools import reduce

from gemmery import dtypes
from gemmery.cpu import along_batch, jit
from gemmery.cpu.abi import Args
from gemmery.cpu.convert import load_as, store_as
from gemmery.cpu.epilogue import bias_of, finished
from gemmery.cpu.gemv_forms import sum_lanes
from gemmery.cpu.ir import Function, Module, Value, Var
from gemmery.cpu.ir_types import SIZES, vector
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.pack import transpose
from gemmery.cpu.pack_complex import times_i
from gemmery.cpu.split import Unit
from gemmery.cpu.target import Target, host, tile
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

LARGEST = 32  # largest m, n and k: A and B stay in L1, and the code stays short
LARGEST_VECTOR = 256  # largest number of elements of a matrix that is multiplied by a vector
DOT = 16  # elements from which vectors of a dot product run along k
UNROLLED = 128  # k is unrolled for tiles of up to this many multiply-adds

Scales = tuple[Value, Value, Value, Value]  # alpha, beta, bias, bias step


class Span(NamedTuple):
    """The columns in one vector, with a mask if there are fewer columns than lanes."""

    first: int
    lanes: int
    mask: Value | None


class Small(NamedTuple):
    """The repeated product: its shape, the element types in memory, and the accumulator's LLVM type.

    A complex product is a real one with twice the columns and twice the depth: rows of A stay (re, im, re, im, ...),
    a row of B becomes two, (re, im, ...) and (-im, re, ...). n and k then count real numbers.
    """

    m: int
    n: int
    k: int
    dtype: str
    out: str
    accumulator: str
    epilogue: str = ""
    a_transposed: bool = False  # A is column-major

    @property
    def name(self) -> str:
        """A name that says everything above: part of the cache key."""
        parts = (self.epilogue, "transposed" if self.a_transposed else "")
        tail = "".join(f"_{part}" for part in parts if part)
        return f"batched_{self.m}x{self.n}x{self.k}_{self.dtype}_{self.out}_{self.accumulator}{tail}"

    @property
    def plain(self) -> bool:
        """True when memory holds numbers of the accumulator's type and there is no epilogue."""
        same = self.memory_type == dtypes.get(self.out).llvm == self.accumulator
        return same and not self.is_complex and not self.epilogue

    @property
    def is_dot(self) -> bool:
        """True for a product of two vectors that are long enough for vectors along k."""
        return self.m == self.n == 1 and self.k >= DOT and not self.is_complex

    @property
    def a_shape(self) -> tuple[int, int]:
        """Rows and columns of A in memory order."""
        return (self.k, self.m) if self.a_transposed else (self.m, self.k)

    def a_at(self, i: int, p: Value) -> Value:
        """Return the index of A's element (i, p) in memory order."""
        return p * self.m + i if self.a_transposed else p + i * self.k

    @property
    def memory_type(self) -> str:
        """LLVM's type of the numbers in memory."""
        return dtypes.get(self.dtype).llvm

    @property
    def is_complex(self) -> bool:
        """True when elements are pairs of numbers."""
        return dtypes.get(self.dtype).kind == "c"


def build(problem: Problem, config: Mapping[str, int]) -> Launch:
    """Return the kernel of one small shape, or of products that interleave: it runs a whole batch in one call."""
    if problem.interleaved:
        return along_batch.build(problem, config)
    p, target, out = problem.by_rows(), host(), dtypes.get(problem.out)
    element = dtypes.get(out.accumulator).llvm
    parts = numbers(p)
    transposed = parts == 1 and p.a_layout == "col"
    small = Small(p.m, p.n * parts, p.k * parts, p.dtype, p.out, element, p.epilogue, transposed)
    entries = jit.load_together(target, (small.name, lambda: batched(target, small)))
    blocks = Blocks()
    return Launch(entries["batched"], element, out.size, lambda m, n, k: blocks, unit=_unit(small), at_once=True)


def numbers(problem: Problem) -> int:
    """Return the number of real numbers in an element: 2 for complex types."""
    return 2 if dtypes.get(problem.dtype).kind == "c" else 1


def _unit(small: Small) -> Unit:
    """Return the unit of work: a whole product, at 25 bytes or 50 operations per ns, whichever takes longer."""
    m, n, k = small.m, small.n, small.k
    moved = (m + n) * k * SIZES[small.memory_type] + m * n * SIZES[small.accumulator]
    return Unit(0, 0, max(moved / 25, 2 * m * n * k / 50) / max(k, 1))


def batched(target: Target, small: Small) -> Module:
    """Return the module of one small product; its entry is `batched`.

    Its loops:
        for each product of the batch:
            sums[m, n] = 0, in registers; m, n and k are constants
            for p in 0..k: sums += A[:, p] * B[p, :]
            C = sums
    """
    module = Module(target)
    params = ("source", ("i64", "row"), ("i64", "col"), "to")
    with module.function("copy_a", *params, local=True) as f:
        _copy(f, small, *small.a_shape, with_i=False)
    with module.function("copy_b", *params, local=True) as f:
        _copy(f, small, small.k // (2 if small.is_complex else 1), small.n, with_i=small.is_complex)
    with module.function("batched", "args") as f:
        _batch(f, small, Args(f, f["args"]))
    return module


def _batch(f: Function, small: Small, args: Args) -> None:
    """Loop over the products; contiguous ones without scaling or conversion have a separate loop."""
    a, b, c = args.a, args.b, args.c
    a_batch, b_batch, c_batch, c_row = args.a_batch, args.b_batch, args.c_batch, args.c_row
    strides_a = (args.a_col, args.a_row) if small.a_transposed else (args.a_row, args.a_col)
    strides_b = args.b_row, args.b_col
    scales = args.alpha, args.beta, args.bias, args.bias_step
    size = SIZES[small.accumulator]
    room_a, room_b = f.buffer(max(small.m * small.k, 1) * size), f.buffer(max(small.k * small.n, 1) * size)

    def general() -> None:
        with f.loop(0, args.batch) as i:
            new_a, new_b = i.equals(0) | a_batch.differs(0), i.equals(0) | b_batch.differs(0)
            here_a = _at_hand(f, small, "copy_a", a + i * a_batch, strides_a, room_a, new_a)
            here_b = _at_hand(f, small, "copy_b", b + i * b_batch, strides_b, room_b, new_b)
            _product(f, small, here_a, here_b, c + i * c_batch, c_row, scales)

    if not small.plain:
        general()
        return
    unscaled = f.load(small.accumulator, scales[0]).equals(1) & f.load(small.accumulator, scales[1]).equals(0)
    lies_a, lies_b = (
        _contiguous(f, small, strides, shape)
        for strides, shape in ((strides_a, small.a_shape), (strides_b, (small.k, small.n)))
    )
    with f.if_(unscaled & lies_a & lies_b & c_row.equals(small.n * size)), f.loop(0, args.batch) as i:
        at = a + i * a_batch, b + i * b_batch, c + i * c_batch
        if small.m * max(small.n, small.k) <= f.target.lanes(size):
            _whole_product(f, small, *at)
        else:
            _product(f, small, *at, small.n * size, None)
    with f.else_():
        general()


def _contiguous(f: Function, small: Small, strides: tuple[Value, Value], shape: tuple[int, int]) -> Value:
    """Return whether a matrix is contiguous; the stride of a dimension of length 1, which may be 0, does not matter."""
    size, (rows, columns) = dtypes.get(small.dtype).size, shape
    single_column = columns * SIZES[small.memory_type] == size
    row = strides[0].equals(columns * SIZES[small.memory_type]) if rows > 1 else f.const("i1", 1)
    return row if single_column else row & strides[1].equals(size)


def _at_hand(
    f: Function, small: Small, copy: str, source: Value, strides: tuple[Value, Value], room: Value, new: Value
) -> Value:
    """Return the address from which the product reads an operand: its own, or a copy made when the matrix is `new`."""
    if small.memory_type != small.accumulator or (small.is_complex and copy == "copy_b"):
        with f.if_(new):
            f.call(copy, source, *strides, room)
        return room
    at = f.var(source)
    shape = small.a_shape if copy == "copy_a" else (small.k, small.n)
    with f.if_(_contiguous(f, small, strides, shape) ^ True):
        with f.if_(new):
            f.call(copy, source, *strides, room)
        at.value = room
    return at.value


def _copy(f: Function, small: Small, rows: int, columns: int, with_i: bool) -> None:
    """Copy rows x columns numbers to contiguous accumulators, by vectors where rows or columns are contiguous.

    With `with_i`, each row is followed by the same row times i.
    """
    memory, size, number = dtypes.get(small.dtype), SIZES[small.accumulator], SIZES[small.memory_type]
    source, row, col, to = f["source"], f["row"], f["col"], f["to"]
    apart = columns * size * (2 if with_i else 1)
    with f.if_(col.equals(memory.size)), f.loop(0, rows) as i:
        for first, lanes, mask in _spans(f, small, columns):
            loaded = load_as(f, memory, small.accumulator, source + i * row + first * number, lanes, mask)
            at = to + i * apart + first * size
            f.store_masked(loaded, at, mask)
            if with_i:
                f.store_masked(times_i(f, loaded), at + columns * size, mask)
    with f.else_():
        if small.is_complex:
            _copy_each(f, small, rows, columns, with_i)
        else:
            with f.if_(row.equals(memory.size)):
                _copy_columns(f, small, rows, columns)
            with f.else_():
                _copy_each(f, small, rows, columns, with_i)


def _copy_columns(f: Function, small: Small, rows: int, columns: int) -> None:
    """Copy a matrix with contiguous columns: squares are transposed in registers."""
    memory, size = dtypes.get(small.dtype), SIZES[small.accumulator]
    lanes = min(f.target.lanes(size), _lanes(min(rows, columns)))
    for i, j in itertools.product(range(0, rows, lanes), range(0, columns, lanes)):
        tall, wide = min(lanes, rows - i), min(lanes, columns - j)
        mask_in, mask_out = (None if count == lanes else _first(f, count, lanes) for count in (tall, wide))
        some = [
            load_as(f, memory, small.accumulator, f["source"] + f["col"] * column + i * memory.size, lanes, mask_in)
            for column in range(j, j + wide)
        ]
        for r, row in enumerate(transpose(f, some)[:tall]):
            f.store_masked(row, f["to"] + ((i + r) * columns + j) * size, mask_out)


def _copy_each(f: Function, small: Small, rows: int, columns: int, with_i: bool) -> None:
    """Copy a matrix without contiguous rows or columns, element by element."""
    memory, size, number = dtypes.get(small.dtype), SIZES[small.accumulator], SIZES[small.memory_type]
    parts, apart = memory.size // number, columns * size * (2 if with_i else 1)
    with f.loop(0, rows) as i, f.loop(0, columns // parts) as j:
        element = f["source"] + i * f["row"] + j * f["col"]
        some = [load_as(f, memory, small.accumulator, element + part * number, 0, None) for part in range(parts)]
        at = f["to"] + i * apart + j * (parts * size)
        for part, value in enumerate(some):
            f.store(value, at + part * size)
        if with_i:
            f.store(some[1] * -1, at + columns * size)
            f.store(some[0], at + (columns + 1) * size)


def _spans(f: Function, small: Small, columns: int) -> list[Span]:
    """Return the vectors of a row; the last one is as short as possible."""
    widest = f.target.lanes(SIZES[small.accumulator])
    spans = []
    for first in range(0, columns, widest):
        rest = min(widest, columns - first)
        lanes = _lanes(rest)
        spans.append(Span(first, lanes, None if lanes == rest else _first(f, rest, lanes)))
    return spans


def _first(f: Function, count: int, lanes: int) -> Value:
    """Return a constant mask of the first `count` lanes."""
    bits = ", ".join(f"i1 {int(lane < count)}" for lane in range(lanes))
    return Value(f, vector(lanes, "i1"), f"<{bits}>")


def _product(
    f: Function, small: Small, a: Value, b: Value, c: Value, c_row: Value | int, scales: Scales | None
) -> None:
    """Compute C in tiles of as many rows and vectors as fit the registers."""
    sizes = tile(f.target)
    spans = _spans(f, small, small.n)
    for some in _even(len(spans), sizes.nv):
        vectors = spans[some.start : some.stop]
        for rows in _even(small.m, sizes.mr * sizes.nv // (len(vectors) * (2 if small.is_complex else 1))):
            totals = _tile(f, small, a, b, rows, vectors)
            _store(f, small, totals, c, c_row, rows, vectors, scales)


def _whole_product(f: Function, small: Small, a: Value, b: Value, c: Value) -> None:
    """Compute C in one vector: shuffles spread column p of A and row p of B over it.

    A 4 x 4 f32 product with AVX-512 is four multiply-adds and takes 2.5 ns; with one vector per row it takes 3.6 ns.
    """
    m, n, k, size, element = small.m, small.n, small.k, SIZES[small.accumulator], small.accumulator
    lanes = _lanes(m * n)
    cells = _load_first(f, element, a, m * k)
    total = f.zero(vector(lanes, element))
    for p in range(k):
        row = _load_first(f, element, b + p * n * size, n)
        cell = [p * m + lane // n if small.a_transposed else lane // n * k + p for lane in range(lanes)]
        column = f.shuffle(cells, cells, [at if lane < m * n else -1 for lane, at in enumerate(cell)])
        total = f.fma(column, f.shuffle(row, row, [lane % n for lane in range(lanes)]), total)
    f.store_masked(total, c, None if m * n == lanes else _first(f, m * n, lanes))


def _lanes(count: int) -> int:
    """Return the number of lanes of the shortest vector for `count` elements."""
    return max(2, 1 << (count - 1).bit_length())


def _load_first(f: Function, element: str, at: Value, count: int) -> Value:
    """Load `count` elements into the shortest vector that holds them."""
    lanes = _lanes(count)
    return f.load_masked(vector(lanes, element), at, None if lanes == count else _first(f, count, lanes))


def _even(total: int, most: int) -> list[range]:
    """Split range(total) into as few nearly equal ranges of at most `most` as possible."""
    count = -(-total // most)
    return [range(total * part // count, total * (part + 1) // count) for part in range(count)]


def _tile(f: Function, small: Small, a: Value, b: Value, rows: range, vectors: list[Span]) -> list[list[Var]]:
    """Return the sums of a tile; a complex one as in `ukernel.tile_loop`, those with A's real parts apart."""
    size, element = SIZES[small.accumulator], small.accumulator
    if small.is_dot:
        return [[f.var(f.broadcast(_dot(f, small, a, b), vectors[0].lanes))]]
    parts = 2 if small.is_complex else 1
    sums = [[[f.var(f.zero(vector(lanes, element))) for _, lanes, _ in vectors] for _ in rows] for _ in range(parts)]

    def step(p: Value, totals: list[list[Var]]) -> None:
        columns = [
            f.load_masked(vector(lanes, element), b + p * (small.n * size) + first * size, mask)
            for first, lanes, mask in vectors
        ]
        for r, row in enumerate(rows):
            scale = f.load(element, a + small.a_at(row, p) * size)
            for v, (_, lanes, _) in enumerate(vectors):
                totals[r][v].value = f.fma(f.broadcast(scale, lanes), columns[v], totals[r][v].value)

    if len(rows) * len(vectors) * small.k <= UNROLLED:
        for number in range(small.k):
            step(f.index(number), sums[number % parts])
    else:
        with f.loop(0, small.k, parts) as p:
            for part, totals in enumerate(sums):
                step(p + part, totals)
    for rest in sums[1:]:
        for row, others in zip(sums[0], rest, strict=True):
            for total, other in zip(row, others, strict=True):
                total.value = total.value + other.value
    return sums[0]


def _dot(f: Function, small: Small, a: Value, b: Value) -> Value:
    """Return a row of A times a column of B: vectors along k, in four sums.

    1000 products of 100 elements, f32, Zen 3: 0.53 of the time of np.vecdot, 1.7 one after the other.
    """
    element, size = small.accumulator, SIZES[small.accumulator]
    totals: dict[tuple[int, int], Value] = {}
    for number, (first, lanes, mask) in enumerate(_spans(f, small, small.k)):
        x, y = (f.load_masked(vector(lanes, element), at + first * size, mask) for at in (a, b))
        place = number % 4, lanes
        totals[place] = f.fma(x, y, totals[place]) if place in totals else x * y
    sums: dict[int, list[Value]] = {}
    for (_, lanes), total in totals.items():
        sums.setdefault(lanes, []).append(total)
    whole = [reduce(operator.add, some) for some in sums.values()]
    return reduce(operator.add, (sum_lanes(f, [total]) for total in whole))


def _store(
    f: Function,
    small: Small,
    totals: list[list[Var]],
    c: Value,
    c_row: Value | int,
    rows: range,
    vectors: list[Span],
    scales: Scales | None,
) -> None:
    """Store C = activation(alpha totals + beta C + bias), or the totals when there are no `scales`."""
    out, element = dtypes.get(small.out), small.accumulator
    places = [
        (c + f.index(row) * c_row + first * SIZES[out.llvm], first, lanes, mask, totals[r][v])
        for r, row in enumerate(rows)
        for v, (first, lanes, mask) in enumerate(vectors)
    ]
    if scales is None:
        for at, _, _, mask, total in places:
            store_as(f, total.value, out, at, mask)
        return
    alpha, beta = f.load(element, scales[0]), f.load(element, scales[1])
    for _, _, lanes, _, total in places:
        total.value = total.value * f.broadcast(alpha, lanes)
    with f.if_(beta.differs(0)):
        for at, _, lanes, mask, total in places:
            total.value = f.fma(load_as(f, out, element, at, lanes, mask), f.broadcast(beta, lanes), total.value)
    for at, first, lanes, mask, total in places:
        row = bias_of(f, element, *scales[2:], first, lanes, mask) if "bias" in small.epilogue else None
        store_as(f, finished(f, small.epilogue, total.value, row), out, at, mask)
