"""GEMV: y = alpha A x + beta y in one pass over A, at the speed of memory.

A column of C or a row of C is such a product; a row is the transposed one, x' B, with the strides of B swapped.
Three ways over A, by its strides (negative ones are walked from the other end):

- `dots`: the elements of a row are adjacent. Several rows at once, so that a vector of x is loaded once for all.
- `axpys`: the elements of a column are adjacent. Several columns at once, so that a vector of y is loaded and stored
  once for all of them; y stays in L1.
- `each`: neither. Element by element, several rows at once.

"Adjacent" means one apart, or two apart (`a[::2, ::2]`): then two vectors are loaded and every second element kept.
Every element of y is summed in the same order wherever it lies, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gemmery import dtypes
from gemmery.cpu import jit
from gemmery.cpu.abi import Args
from gemmery.cpu.build import epilogue
from gemmery.cpu.convert import load_as, store_as, widen
from gemmery.cpu.epilogue import activate
from gemmery.cpu.ir import SIZES, Function, Module, Value, lanes_of, vector
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.split import Unit
from gemmery.cpu.target import Target, host
from gemmery.cpu.ukernel import Product
from gemmery.problem import Problem

VECTORS = 2  # partial sums of a row of `dots`, in vectors
SCALARS = 8  # rows of `each` in one pass: one chain of multiply-adds each
UNIT = 64  # rows of A that threads share out: whole cache lines of y
BANDWIDTH = 40.0  # bytes a ns that one core reads, between the 25 of memory and the 70 of a cache


def build(problem: Problem, config: Mapping[str, int]) -> Launch:
    """The kernel of one column (n == 1) or one row (m == 1) of C, taking mc rows and kc columns of A at a time."""
    target, product = host(), _product(problem)
    columns = config.get("columns") or _columns(target, problem)
    found = jit.load(target, f"gemv{columns}_{product.name}", lambda: gemv(target, product, columns))
    size, mc, kc = dtypes.get(problem.dtype).size, config["mc"], config["kc"]
    blocks = Blocks(mc=mc, kc=kc, workspace=(mc + kc) * SIZES[product.accumulator])
    unit = Unit(UNIT, UNIT, UNIT * size / BANDWIDTH)
    out_size = dtypes.get(problem.out).size
    return Launch(found["gemv"], product.accumulator, out_size, lambda m, n, k: blocks, unit=unit)


def _columns(target: Target, problem: Problem) -> int:
    """Columns of `axpys` in one pass: 8 streams read memory best; in cache, 8 columns may want the same L1 set."""
    matrix = problem.m * problem.n * problem.k * dtypes.get(problem.dtype).size
    return 8 if matrix > (target.l3 or 1 << 25) // 2 else 6


def _product(problem: Problem) -> Product:
    """Every element is widened to the accumulator as it is loaded: bandwidth is the limit, not arithmetic."""
    bias, activation = epilogue(problem)
    element = dtypes.get(dtypes.get(problem.out).accumulator).llvm
    return Product(problem.dtype, problem.out, element, element, activation=activation, bias=bias)


_WAY = (
    ("i64", "count"), ("i64", "k"), ("ptr", "a"), ("i64", "row"), ("i64", "col"), ("ptr", "x"), ("ptr", "sums"),
)  # fmt: skip
_FINISH = (
    ("i64", "count"), ("ptr", "sums"), ("ptr", "y"), ("i64", "y_step"),
    ("ptr", "bias"), ("i64", "bias_step"), ("ptr", "alpha"), ("ptr", "beta"),
)  # fmt: skip
_ALL = (
    ("i64", "m"), ("i64", "k"), ("ptr", "a"), ("i64", "row"), ("i64", "col"), ("ptr", "x"), ("i64", "x_step"),
    ("ptr", "y"), ("i64", "y_step"), ("ptr", "bias"), ("i64", "bias_step"), ("ptr", "args"),
)  # fmt: skip


def gemv(target: Target, product: Product, columns: int) -> Module:
    """The module of one product with n == 1 or m == 1; its entry is `gemv`.

    `mc` rows and `kc` columns of A are taken at a time; the workspace holds their sums and their part of x.
    """
    module = Module(target)
    ways: dict[str, Callable[[Function, Product], None]] = {
        "dots_1": lambda f, product: _dots(f, product, 1),
        "axpys_1": lambda f, product: _axpys(f, product, 1, columns),
        "dots_2": lambda f, product: _dots(f, product, 2),
        "axpys_2": lambda f, product: _axpys(f, product, 2, columns),
        "each": _each,
    }
    for name, body in ways.items():
        with module.function(name, *_WAY, local=True) as f:
            body(f, product)
    with module.function("pack_x", ("i64", "k"), ("ptr", "x"), ("i64", "step"), ("ptr", "to"), local=True) as f:
        _pack_x(f, product)
    with module.function("finish", *_FINISH, local=True) as f:
        _finish(f, product)
    with module.function("column", *_ALL, local=True) as f:
        _column(f, product)
    with module.function("gemv", ("ptr", "args")) as f:
        _entry(f)
    return module


def _entry(f: Function) -> None:
    args = Args(f, f["args"])
    a, a_row, a_col, b, b_row, b_col = args.a, args.a_row, args.a_col, args.b, args.b_row, args.b_col
    column = (args.m, args.k, a, a_row, a_col, b, b_row, args.c, args.c_row, args.bias, f.index(0), f["args"])
    row = (args.n, args.k, b, b_col, b_row, a, a_col, args.c, args.c_col, args.bias, args.bias_step, f["args"])
    with f.if_(args.n.equals(1)):
        f.call("column", *column)
    with f.else_():
        f.call("column", *row)


def _column(f: Function, product: Product) -> None:
    """Blocks of rows; for each its columns in blocks, then the way out."""
    args = Args(f, f["args"])
    size, element = SIZES[product.accumulator], dtypes.get(product.dtype)
    m, k = f["m"], f["k"]
    from_end = f["col"] < 0
    a, x = _last(f, from_end, f["a"], f["col"], k), _last(f, from_end, f["x"], f["x_step"], k)
    col, x_step = _turned(f, from_end, f["col"]), _turned(f, from_end, f["x_step"])
    from_end = f["row"] < 0
    a, y = _last(f, from_end, a, f["row"], m), _last(f, from_end, f["y"], f["y_step"], m)
    bias = _last(f, from_end, f["bias"], f["bias_step"], m)
    row, y_step = _turned(f, from_end, f["row"]), _turned(f, from_end, f["y_step"])
    bias_step = _turned(f, from_end, f["bias_step"])
    mc, kc, sums = args.mc, args.kc, args.workspace
    with f.loop(0, m, mc) as i:
        count = f.min(m - i, mc)
        with f.loop(0, count) as r:
            f.store(f.zero(product.accumulator), sums + r * size)
        with f.loop(0, k, kc) as p:
            deep = f.min(k - p, kc)
            part = f.var(x + p * x_step)
            if element.llvm == product.accumulator:
                with f.if_(x_step.differs(size)):
                    part.value = _packed_x(f, deep, part.value, x_step, sums + mc * size)
            else:
                part.value = _packed_x(f, deep, part.value, x_step, sums + mc * size)
            _choose(f, element.size, (count, deep, a + i * row + p * col, row, col, part.value, sums))
        f.call("finish", count, sums, y + i * y_step, y_step, bias + i * bias_step, bias_step, args.alpha, args.beta)


def _last(f: Function, from_end: Value, at: Value, step: Value, count: Value) -> Value:
    """Where a walk begins: at the last element when it goes from the end."""
    return at + f.select(from_end, (count - 1) * step, f.index(0))


def _turned(f: Function, from_end: Value, step: Value) -> Value:
    return f.select(from_end, 0 - step, step)


def _packed_x(f: Function, k: Value, x: Value, step: Value, to: Value) -> Value:
    f.call("pack_x", k, x, step, to)
    return to


def _choose(f: Function, size: int, given: tuple[Value, ...]) -> None:
    """Call the way that suits A's strides: row (from row to row) and col (from column to column)."""
    row, col = given[3], given[4]
    ways = [("dots_1", col, 1), ("axpys_1", row, 1), ("dots_2", col, 2), ("axpys_2", row, 2)]

    def choose(rest: list[tuple[str, Value, int]]) -> None:
        if not rest:
            f.call("each", *given)
            return
        name, stride, apart = rest[0]
        with f.if_(stride.equals(apart * size)):
            f.call(name, *given)
        with f.else_():
            choose(rest[1:])

    choose(ways)


def _pack_x(f: Function, product: Product) -> None:
    """Elements of x in the accumulator's type, side by side."""
    memory, size = dtypes.get(product.dtype), SIZES[product.accumulator]
    lanes = f.target.lanes(size)
    k, step = f["k"], f["step"]
    whole = f.select(step.equals(memory.size), k // lanes * lanes, f.index(0))
    with f.loop(0, whole, lanes) as p:
        f.store(load_as(f, memory, product.accumulator, f["x"] + p * memory.size, lanes, None), f["to"] + p * size)
    with f.loop(whole, k) as p:
        f.store(load_as(f, memory, product.accumulator, f["x"] + p * step, 0, None), f["to"] + p * size)


def _cells(f: Function, product: Product, at: Value, apart: int, left: Value | None = None) -> Value:
    """A vector of A's elements `apart` from each other, as accumulators; only `left` of them when given, then zeros.

    Two apart: the second load begins at the last element of the first, so that nothing past the last one is read.
    """
    memory = dtypes.get(product.dtype)
    lanes = f.target.lanes(SIZES[product.accumulator])
    raw = vector(lanes, "i16" if memory.name == "bf16" else memory.llvm)

    def load(first: int) -> Value:
        if left is None:
            return f.load(raw, at + first * memory.size)
        mask = f.first_lanes(left * apart - (apart - 1) - first, lanes)
        return f.load_masked(raw, at + first * memory.size, mask)

    if apart == 1:
        return widen(f, load(0), memory, product.accumulator)
    order = [2 * j if 2 * j < lanes else 2 * j + 1 for j in range(lanes)]
    return widen(f, f.shuffle(load(0), load(lanes - 1), order), memory, product.accumulator)


def _dots(f: Function, product: Product, apart: int) -> None:
    """sums[i] += row i of A times x. As many rows at once as leave half of the registers to loads."""
    count = f["count"]
    rows = 8 if f.target.isa == "avx512" else 4
    whole = count // rows * rows
    with f.loop(0, whole, rows) as i:
        _dot_rows(f, product, apart, i, rows)
    with f.loop(whole, count) as i:
        _dot_rows(f, product, apart, i, 1)


def _dot_rows(f: Function, product: Product, apart: int, i: Value, rows: int) -> None:
    size, memory = SIZES[product.accumulator], dtypes.get(product.dtype).size
    lanes = f.target.lanes(size)
    wide = vector(lanes, product.accumulator)
    k, x, step = f["k"], f["x"], apart * memory
    a = [f["a"] + (i + r) * f["row"] for r in range(rows)]
    totals = [[f.var(f.zero(wide)) for _ in range(VECTORS)] for _ in range(rows)]
    whole = k // (lanes * VECTORS) * (lanes * VECTORS)
    with f.loop(0, whole, lanes * VECTORS) as p:
        for v in range(VECTORS):
            q = p + v * lanes
            some = f.load(wide, x + q * size)
            for r in range(rows):
                totals[r][v].value = f.fma(_cells(f, product, a[r] + q * step, apart), some, totals[r][v].value)
    with f.loop(whole, k, lanes) as p:
        some = f.load_masked(wide, x + p * size, f.first_lanes(k - p, lanes))
        for r in range(rows):
            cells = _cells(f, product, a[r] + p * step, apart, k - p)
            totals[r][0].value = f.fma(cells, some, totals[r][0].value)
    for r in range(rows):
        at = f["sums"] + (i + r) * size
        f.store(f.load(product.accumulator, at) + _sum_lanes(f, _sum([total.value for total in totals[r]])), at)


def _sum(values: list[Value]) -> Value:
    """The sum of some values in pairs."""
    while len(values) > 1:
        values = [x + y for x, y in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _sum_lanes(f: Function, value: Value) -> Value:
    """The sum of a vector's lanes, halves onto each other."""
    while (lanes := lanes_of(value.type)) > 1:
        low, high = list(range(lanes // 2)), list(range(lanes // 2, lanes))
        value = f.shuffle(value, value, low) + f.shuffle(value, value, high)
    return f.emit(value.type[1:-1].split(" x ")[1], f"extractelement {value}, i64 0")


def _axpys(f: Function, product: Product, apart: int, columns: int) -> None:
    """sums += column p of A times x[p], for every p in order."""
    k = f["k"]
    whole = k // columns * columns
    with f.loop(0, whole, columns) as p:
        _axpy_columns(f, product, apart, p, columns)
    with f.loop(whole, k) as p:
        _axpy_columns(f, product, apart, p, 1)


def _axpy_columns(f: Function, product: Product, apart: int, p: Value, columns: int) -> None:
    size, memory = SIZES[product.accumulator], dtypes.get(product.dtype).size
    lanes = f.target.lanes(size)
    wide = vector(lanes, product.accumulator)
    count, sums = f["count"], f["sums"]
    scales = [f.broadcast(f.load(product.accumulator, f["x"] + (p + c) * size), lanes) for c in range(columns)]
    a = [f["a"] + (p + c) * f["col"] for c in range(columns)]
    whole = count // lanes * lanes
    with f.loop(0, whole, lanes) as i:
        total = f.load(wide, sums + i * size)
        for c in range(columns):
            total = f.fma(_cells(f, product, a[c] + i * (apart * memory), apart), scales[c], total)
        f.store(total, sums + i * size)
    with f.if_(whole < count):
        left = count - whole
        mask = f.first_lanes(left, lanes)
        total = f.load_masked(wide, sums + whole * size, mask)
        for c in range(columns):
            total = f.fma(_cells(f, product, a[c] + whole * (apart * memory), apart, left), scales[c], total)
        f.store_masked(total, sums + whole * size, mask)


def _each(f: Function, product: Product) -> None:
    """sums[i] += row i of A times x, element by element."""
    count = f["count"]
    whole = count // SCALARS * SCALARS
    with f.loop(0, whole, SCALARS) as i:
        _each_rows(f, product, i, SCALARS)
    with f.loop(whole, count) as i:
        _each_rows(f, product, i, 1)


def _each_rows(f: Function, product: Product, i: Value, rows: int) -> None:
    size, memory = SIZES[product.accumulator], dtypes.get(product.dtype)
    a = [f["a"] + (i + r) * f["row"] for r in range(rows)]
    totals = [f.var(f.zero(product.accumulator)) for _ in range(rows)]
    with f.loop(0, f["k"]) as p:
        scale = f.load(product.accumulator, f["x"] + p * size)
        for r in range(rows):
            cell = load_as(f, memory, product.accumulator, a[r] + p * f["col"], 0, None)
            totals[r].value = f.fma(cell, scale, totals[r].value)
    for r in range(rows):
        at = f["sums"] + (i + r) * size
        f.store(f.load(product.accumulator, at) + totals[r].value, at)


def _finish(f: Function, product: Product) -> None:
    """y = activation(alpha sums + beta y + bias): by vectors where y's elements are adjacent, then one by one."""
    out, size = dtypes.get(product.out), SIZES[product.accumulator]
    lanes = f.target.lanes(size)
    count, y_step, bias_step = f["count"], f["y_step"], f["bias_step"]
    adjacent = y_step.equals(out.size)
    if product.bias:
        adjacent = adjacent & bias_step.equals(size)
    whole = f.select(adjacent, count // lanes * lanes, f.index(0))
    with f.loop(0, whole, lanes) as i:
        _finish_some(f, product, i, lanes)
    with f.loop(whole, count) as i:
        _finish_some(f, product, i, 0)


def _finish_some(f: Function, product: Product, i: Value, lanes: int) -> None:
    """`lanes` elements of y, or one (0)."""
    out, element = dtypes.get(product.out), product.accumulator
    type_ = vector(lanes, element) if lanes else element

    def all_lanes(scalar: Value) -> Value:
        return f.broadcast(scalar, lanes) if lanes else scalar

    beta = f.load(element, f["beta"])
    y = f["y"] + i * f["y_step"]
    total = f.var(f.load(type_, f["sums"] + i * SIZES[element]) * all_lanes(f.load(element, f["alpha"])))
    with f.if_(beta.differs(0)):
        total.value = f.fma(load_as(f, out, element, y, lanes, None), all_lanes(beta), total.value)
    value = total.value
    if product.bias:
        value = value + f.load(type_, f["bias"] + i * f["bias_step"])
    store_as(f, activate(f, product.activation, value, out), out, y)
