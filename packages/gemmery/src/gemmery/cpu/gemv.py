"""GEMV: y = alpha A x + beta y in one pass over A, at the speed of memory.

The product is one column of C, or one row; a row is the transposed product, x' B, with the strides of B swapped.
It has three forms, by the strides of A (negative strides are walked from the other end):

- `dots`: rows are contiguous. It takes several rows at once, so that a vector of x is loaded once for all of them.
- `axpys`: columns are contiguous. It takes several columns at once, so that a vector of y is loaded and stored once
  for all of them; y stays in L1.
- `each`: neither. It goes element by element, several rows at once.

Contiguous here includes a stride of two elements (`a[::2, ::2]`): two vectors are loaded and every second element is
kept. Every element of y is summed in the same order, at any position and for any number of rows. `axpys` and `each`
add real numbers in the order and the blocks of k of the other kernels; `dots` adds by lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from gemmery import dtypes
from gemmery.cpu import gemv_forms
from gemmery.cpu.abi import Args
from gemmery.cpu.convert import load_as, store_as
from gemmery.cpu.epilogue import finished
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES, vector
from gemmery.cpu.long_k import define_fold, even, in_levels
from gemmery.cpu.target import Target, k_block
from gemmery.cpu.ukernel import SHORT, Product, vector_room

_FINISH = (
    ("i64", "count"), "sums", "y", ("i64", "y_step"),
    "bias", ("i64", "bias_step"), "alpha", "beta",
)  # fmt: skip
_LANES_BLOCK = 4096  # real numbers of k whose sums by lanes are added at once
_ALL = (
    ("i64", "m"), ("i64", "k"), "a", ("i64", "row"), ("i64", "col"), "x", ("i64", "x_step"),
    "y", ("i64", "y_step"), "bias", ("i64", "bias_step"), "args",
)  # fmt: skip


def gemv(target: Target, product: Product, columns: int) -> Module:
    """Return the module of one product with n == 1 or m == 1; its entry is `gemv`.

    It works on `mc` rows and `kc` columns of A at a time; the workspace holds their sums and their part of x. `nc` is 1
    for a column of C, 0 for a row.

    Its loops:
        where rows of A are contiguous:
            for each few rows i:
                for each vector p: sums[i...] += A[i..., p...] * x[p...]
        where columns are:
            for each few columns p:
                for each vector i: y[i...] += A[i..., p...] * x[p...]
    """
    module = Module(target)
    forms: dict[str, Callable[[Function], None]] = {
        "dots_1": lambda f: gemv_forms.dots(f, product, 1),
        "axpys_1": lambda f: gemv_forms.axpys(f, product, 1, columns),
        "each": lambda f: gemv_forms.each(f, product),
    }
    if gemv_forms.reads_ahead(target, product):
        forms["dots_ahead"] = lambda f: gemv_forms.dots(f, product, 1, ahead=True)
    if not product.is_complex:
        forms["dots_2"] = lambda f: gemv_forms.dots(f, product, 2)
        forms["axpys_2"] = lambda f: gemv_forms.axpys(f, product, 2, columns)
    for name, body in forms.items():
        with module.function(name, *gemv_forms.PARAMS, local=True) as f:
            body(f)
    with module.function("pack_x", ("i64", "k"), "x", ("i64", "step"), "to", local=True) as f:
        gemv_forms.pack_x(f, product)
    with module.function("finish", *_FINISH, local=True) as f:
        _finish(f, product)
    define_fold(module, product.accumulator)
    with module.function("column", *_ALL, local=True) as f:
        _column(f, product)
    with module.function("gemv", "args") as f:
        _entry(f)
    return module


def _entry(f: Function) -> None:
    args = Args(f, f["args"])
    a, a_row, a_col, b, b_row, b_col = args.a, args.a_row, args.a_col, args.b, args.b_row, args.b_col
    column = (args.m, args.k, a, a_row, a_col, b, b_row, args.c, args.c_row, args.bias, f.index(0), f["args"])
    row = (args.n, args.k, b, b_col, b_row, a, a_col, args.c, args.c_col, args.bias, args.bias_step, f["args"])
    # Not by the width: the last part of a row may be one column wide, and is summed in the order of the other parts.
    with f.if_(args.nc.equals(1)):
        f.call("column", *column)
    with f.else_():
        f.call("column", *row)


def _column(f: Function, product: Product) -> None:
    """Loop over blocks of rows, and in each over blocks of columns; then store the rows."""
    args = Args(f, f["args"])
    size, element = SIZES[product.accumulator], dtypes.get(product.dtype)
    m, k = f["m"], f["k"]
    from_end = f["col"] < 0
    a, x = _last(f, from_end, f["a"], f["col"], k), _last(f, from_end, f["x"], f["x_step"], k)
    col, x_step = f.select(from_end, 0 - f["col"], f["col"]), f.select(from_end, 0 - f["x_step"], f["x_step"])
    from_end = f["row"] < 0
    a, y = _last(f, from_end, a, f["row"], m), _last(f, from_end, f["y"], f["y_step"], m)
    bias = _last(f, from_end, f["bias"], f["bias_step"], m)
    row, y_step = f.select(from_end, 0 - f["row"], f["row"]), f.select(from_end, 0 - f["y_step"], f["y_step"])
    bias_step = f.select(from_end, 0 - f["bias_step"], f["bias_step"])
    mc, kc = args.mc, args.kc
    stack = f.buffer(vector_room(product, SHORT, SHORT))
    sums = f.select((mc <= SHORT) & (kc <= SHORT), stack, args.workspace)
    apart = mc * (product.parts * size) + 64
    room = sums + apart * 3
    by_lanes = col.equals(element.size)
    if not product.is_complex:
        by_lanes = by_lanes | col.equals(2 * element.size)
    # Each lane of `dots` adds a part of a block, and all lanes are added once a block: its blocks are longer.
    in_order = even(f, k, f.min(kc, f.index(k_block(f.target, product.parts))))
    block = f.min(kc, f.select(by_lanes, f.index(_LANES_BLOCK // product.parts), in_order))
    with f.loop(0, m, mc) as i:
        count, lanes = f.min(m - i, mc), f.target.lanes(size)
        lines = (count * product.parts + (lanes - 1)) // lanes
        with f.loop(0, lines) as line:
            f.store(f.zero(vector(lanes, product.accumulator)), sums + line * (lanes * size))

        def add(p: Value, stop: Value) -> None:
            """Add a block of A x to the sums."""
            deep, part = stop - p, f.var(x + p * x_step)
            in_place = element.llvm == product.accumulator and not product.is_complex
            with f.if_(x_step.differs(size)) if in_place else nullcontext():
                f.call("pack_x", deep, part.value, x_step, room)
                part.value = room
            _choose(f, product, (count, deep, a + i * row + p * col, row, col, part.value, sums))

        totals = in_levels(f, k, block, sums, apart, lines, add)
        f.call("finish", count, totals, y + i * y_step, y_step, bias + i * bias_step, bias_step, args.alpha, args.beta)


def _last(f: Function, from_end: Value, at: Value, step: Value, count: Value) -> Value:
    """Return the address of the first element of a walk, which is the last in memory when `from_end`."""
    return at + f.select(from_end, (count - 1) * step, f.index(0))


def _choose(f: Function, product: Product, operands: tuple[Value, ...]) -> None:
    """Call the way for A's strides: row (from row to row) and col (from column to column)."""
    row, col, size = operands[3], operands[4], dtypes.get(product.dtype).size
    forms = [("dots_1", col, 1), ("axpys_1", row, 1)]
    if not product.is_complex:
        forms += [("dots_2", col, 2), ("axpys_2", row, 2)]

    def choose(rest: list[tuple[str, Value, int]]) -> None:
        if not rest:
            f.call("each", *operands)
            return
        name, stride, apart = rest[0]
        with f.if_(stride.equals(apart * size)):
            if name == "dots_1" and gemv_forms.reads_ahead(f.target, product):
                with f.if_(operands[0] * operands[1] * size > gemv_forms.ahead_from(f.target, product)):
                    f.call("dots_ahead", *operands)
                with f.else_():
                    f.call(name, *operands)
            else:
                f.call(name, *operands)
        with f.else_():
            choose(rest[1:])

    choose(forms)


def _finish(f: Function, product: Product) -> None:
    """Store y = activation(alpha sums + beta y + bias): by vectors where y is contiguous, then one by one."""
    out, size = dtypes.get(product.out), SIZES[product.accumulator]
    count, y_step, bias_step = f["count"], f["y_step"], f["bias_step"]
    if product.is_complex:
        with f.loop(0, count) as i:
            _finish_pair(f, product, i)
        return
    lanes = f.target.lanes(size)
    adjacent = y_step.equals(out.size) & (f.is_null(f["bias"]) | bias_step.equals(size))
    masked = f.target.isa == "avx512"
    if masked:  # a vector with one sum would wait until that has been stored
        adjacent = adjacent & (count >= 4)
    whole = f.select(adjacent, count if masked else count // lanes * lanes, f.index(0))
    with f.loop(0, whole, lanes) as i:
        _finish_some(f, product, i, lanes, f.first_lanes(count - i, lanes) if masked else None)
    with f.loop(whole, count) as i:
        _finish_some(f, product, i, 0, None)


def _finish_some(f: Function, product: Product, i: Value, lanes: int, mask: Value | None) -> None:
    """Store `lanes` elements of y, or one (0)."""
    out, element = dtypes.get(product.out), product.accumulator
    type_ = vector(lanes, element) if lanes else element

    def all_lanes(scalar: Value) -> Value:
        return f.broadcast(scalar, lanes) if lanes else scalar

    beta = f.load(element, f["beta"])
    y = f["y"] + i * f["y_step"]
    total = f.var(f.load(type_, f["sums"] + i * SIZES[element]) * all_lanes(f.load(element, f["alpha"])))
    with f.if_(beta.differs(0)):
        total.value = f.fma(load_as(f, out, element, y, lanes, mask), all_lanes(beta), total.value)
    with f.if_(f.is_null(f["bias"]) ^ True):
        sums, row = total.value, f.load_masked(type_, f["bias"] + i * f["bias_step"], mask)
        total.value = finished(f, "bias", sums, row)
    store_as(f, finished(f, product.activation, total.value), out, y, mask)


def _finish_pair(f: Function, product: Product, i: Value) -> None:
    """Store one complex element of y."""
    element, size = product.accumulator, SIZES[product.accumulator]
    y = f["y"] + i * f["y_step"]
    real, imaginary = (f.var(f.zero(element)) for _ in range(2))

    def add(at: Value, scalar: Value) -> None:
        """Add a product; with a real scalar, an infinite part does not make the other one NaN."""
        x, z = f.load(element, at), f.load(element, at + size)
        u, v = f.load(element, scalar), f.load(element, scalar + size)
        real.value, imaginary.value = f.fma(x, u, real.value), f.fma(z, u, imaginary.value)
        with f.if_(v.differs(0)):
            real.value, imaginary.value = real.value - z * v, f.fma(x, v, imaginary.value)

    add(f["sums"] + i * (2 * size), f["alpha"])
    beta = [f.load(element, f["beta"] + part * size).differs(0) for part in range(2)]
    with f.if_(beta[0] | beta[1]):
        add(y, f["beta"])
    with f.if_(f.is_null(f["bias"]) ^ True):
        for part, total in enumerate((real, imaginary)):
            total.value = total.value + f.load(element, f["bias"] + i * f["bias_step"] + part * size)
    for part, total in enumerate((real, imaginary)):
        f.store(total.value, y + part * size)
