"""The three forms of a GEMV; each adds A x to the sums of its rows.

A complex product is two real ones over the same A, its elements read as pairs: (re, im) times (xr, -xi) gives the
real part, times (xi, xr) the imaginary one. x is packed as these two vectors, and sums are pairs. Products with A's
real parts are summed apart from those with its imaginary ones, as in `ukernel.tile_loop`.
"""

from __future__ import annotations

import itertools

from gemmery import dtypes
from gemmery.cpu.convert import load_as, widen
from gemmery.cpu.ir import Function, Value
from gemmery.cpu.ir_types import SIZES, element_of, lanes_of, vector
from gemmery.cpu.target import Target
from gemmery.cpu.ukernel import Product

PARAMS = (
    ("i64", "count"), ("i64", "k"), "a", ("i64", "row"), ("i64", "col"), "x", "sums",
)  # fmt: skip
VECTORS = 2  # partial sums of a row of `dots`, in vectors
SCALARS = 8  # sums in one pass of `each`, a chain of multiply-adds for each
# Bytes by which `dots` prefetches rows on Zen 5. One row times w.T, one thread, us, with eight rows, four, four and
# prefetches: 4096 x 16384, f32 7416, 6683, 6403; 4096 x 8192, f64 8544, 7867, 7278; in L3, 1024 x 1024, f32 38.3, 38.0,
# 38.8. On Zen 4 prefetches took 54 to 62 us there.
# Smaller matrices take longer with them: 300 x 400, f32 3.85 without, 4.17; 1500 x 3000, f32 193, 207, f64 630, 592.
_AHEAD = 1024


def pack_x(f: Function, product: Product) -> None:
    """Pack x contiguously in the accumulator's type; a complex x becomes two vectors of pairs."""
    memory, size = dtypes.get(product.dtype), SIZES[product.accumulator]
    lanes = f.target.lanes(size)
    k, step, to = f["k"], f["step"], f["to"]
    if product.is_complex:
        with f.loop(0, k) as p:
            real, imaginary = (_real(f, product, f["x"] + p * step + q * SIZES[memory.llvm]) for q in range(2))
            for number, value in enumerate((real, imaginary * -1, imaginary, real)):
                f.store(value, to + (k * (number // 2) + p) * (2 * size) + number % 2 * size)
        return
    whole = f.select(step.equals(memory.size), k // lanes * lanes, f.index(0))
    with f.loop(0, whole, lanes) as p:
        f.store(load_as(f, memory, product.accumulator, f["x"] + p * memory.size, lanes, None), to + p * size)
    with f.loop(whole, k) as p:
        f.store(_real(f, product, f["x"] + p * step), to + p * size)


def _real(f: Function, product: Product, at: Value) -> Value:
    """Load one real number as an accumulator."""
    return load_as(f, dtypes.get(product.dtype), product.accumulator, at, 0, None)


def _cells(f: Function, product: Product, at: Value, apart: int, rest: Value | None = None) -> Value:
    """Load a vector of A's numbers, `apart` elements from each other, as accumulators; with `left`, so many and zeros.

    For a distance of two, the second load begins at the last number of the first, so it does not read past the end.
    """
    memory = dtypes.get(product.dtype)
    lanes, size = f.target.lanes(SIZES[product.accumulator]), SIZES[memory.llvm]
    raw = vector(lanes, "i16" if memory.name == "bf16" else memory.llvm)

    def load(first: int) -> Value:
        if rest is None:
            return f.load(raw, at + first * size)
        mask = f.first_lanes(rest * apart - (apart - 1) - first, lanes)
        return f.load_masked(raw, at + first * size, mask)

    if apart == 1:
        return widen(f, load(0), memory, product.accumulator)
    order = [2 * j if 2 * j < lanes else 2 * j + 1 for j in range(lanes)]
    return widen(f, f.shuffle(load(0), load(lanes - 1), order), memory, product.accumulator)


def dots(f: Function, product: Product, apart: int, ahead: bool = False) -> None:
    """Compute sums[i] += row i of A times x, with as many rows at once as leave half of the registers for loads.

    Two rows of every second element: with four, LLVM takes 5 ms longer and f32 and f64 are no faster. With AVX2 they
    are (1024 x 1024 of 2048 x 2048, f64, Zen 3: 433 us with four, 602 with two). With `ahead`, four rows
    with prefetches (`_AHEAD`).
    """
    size, step, parts = SIZES[product.accumulator], apart * _number_size(product), product.parts
    lanes = f.target.lanes(size)
    wide = vector(lanes, product.accumulator)
    isa = f.target.isa
    most = 2 if apart == 2 and isa != "avx2" else (8 if isa == "avx512" and not ahead else 4) // parts
    for i, rows in f.in_steps(f["count"], most):
        k = f["k"] * parts
        x = [f["x"] + k * (part * size) for part in range(parts)]
        a = [f["a"] + (i + r) * f["row"] for r in range(rows)]
        totals = [[[f.var(f.zero(wide)) for _ in range(VECTORS)] for _ in x] for _ in a]
        whole = k // (lanes * VECTORS) * (lanes * VECTORS)
        with f.loop(0, whole, lanes * VECTORS) as p:
            if ahead:
                for row, line in itertools.product(a, range(0, lanes * VECTORS * step, 64)):
                    f.prefetch(row + p * step + (_AHEAD + line))
            for v in range(VECTORS):
                q = p + v * lanes
                some = [f.load(wide, vector_x + q * size) for vector_x in x]
                for row, of_row in zip(a, totals, strict=True):
                    cells = _cells(f, product, row + q * step, apart)
                    for vector_x, of_part in zip(some, of_row, strict=True):
                        of_part[v].value = f.fma(cells, vector_x, of_part[v].value)
        with f.loop(whole, k, lanes) as p:
            some = [f.load_masked(wide, vector_x + p * size, f.first_lanes(k - p, lanes)) for vector_x in x]
            for row, of_row in zip(a, totals, strict=True):
                cells = _cells(f, product, row + p * step, apart, k - p)
                for vector_x, of_part in zip(some, of_row, strict=True):
                    of_part[0].value = f.fma(cells, vector_x, of_part[0].value)
        at = f["sums"] + i * (parts * size)
        total = sum_lanes(f, [_sum([total.value for total in of_part]) for of_row in totals for of_part in of_row])
        f.store(f.load(total.type, at) + total, at)


def reads_ahead(target: Target, product: Product) -> bool:
    """Return True where rows beyond L2 are prefetched: other types were not measured, nor other CPUs but Zen 4."""
    return target.is_zen5 and product.dtype in ("f32", "f64")


def ahead_from(target: Target, product: Product) -> int:
    """Return the bytes of a part of A above which its rows are prefetched: L2, and of f32 most of L3."""
    return (target.l2 or 1 << 20) if product.dtype == "f64" else 3 * (target.l3 or 32 << 20) // 4


def _number_size(product: Product) -> int:
    """Return the bytes of a real number in memory."""
    return SIZES[dtypes.get(product.dtype).llvm]


def _sum(values: list[Value]) -> Value:
    """Return the sum of some values, added in pairs."""
    while len(values) > 1:
        values = [x + y for x, y in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def sum_lanes(f: Function, values: list[Value]) -> Value:
    """Return the sum of each vector's lanes, added by halves, in one vector; a scalar for one vector.

    Two vectors share an addition: the halves of both are as many lanes as one has. So the sums of 8 vectors of 16 lanes
    take 8 additions in place of 32.
    """
    count, whole = len(values), lanes_of(values[0].type)
    block = whole  # lanes of a vector that hold the partial sums of one of the values
    while block > 1:
        pairs = list(zip(values[::2], values[1::2], strict=True)) if len(values) > 1 else [(values[0], values[0])]
        lanes = lanes_of(values[0].type) * min(len(values), 2)
        low = [lane for lane in range(lanes) if lane % block < block // 2]
        values = [f.shuffle(x, y, low) + f.shuffle(x, y, [lane + block // 2 for lane in low]) for x, y in pairs]
        block //= 2
    while len(values) > 1:  # more vectors than lanes
        every = list(range(2 * lanes_of(values[0].type)))
        values = [f.shuffle(x, y, every) for x, y in zip(values[::2], values[1::2], strict=True)]
    return values[0] if count > 1 else f.emit(element_of(values[0].type), f"extractelement {values[0]}, i64 0")


def axpys(f: Function, product: Product, apart: int, columns: int) -> None:
    """Compute sums += column p of A times x[p], for every p in order."""
    for p, some in f.in_steps(f["k"], columns):
        _axpy_columns(f, product, apart, p, some)


def _axpy_columns(f: Function, product: Product, apart: int, p: Value, columns: int) -> None:
    size, step = SIZES[product.accumulator], apart * _number_size(product)
    lanes = f.target.lanes(size)
    wide = vector(lanes, product.accumulator)
    count, sums = f["count"] * product.parts, f["sums"]
    scales = [_scales(f, product, p + c, lanes) for c in range(columns)]
    a = [f["a"] + (p + c) * f["col"] for c in range(columns)]
    whole = count // lanes * lanes

    def add(total: Value, i: Value, rest: Value | None) -> Value:
        pairs = [f.zero(wide)] * 2
        for column, scale in zip(a, scales, strict=True):
            cells = _cells(f, product, column + i * step, apart, rest)
            if product.is_complex:
                swapped = f.shuffle(cells, cells, [lane ^ 1 for lane in range(lanes)])
                pairs = [f.fma(x, y, s) for x, y, s in zip((cells, swapped), scale, pairs, strict=True)]
            else:
                total = f.fma(cells, scale[0], total)
        return total + (pairs[0] + pairs[1]) if product.is_complex else total

    with f.loop(0, whole, lanes) as i:
        f.store(add(f.load(wide, sums + i * size), i, None), sums + i * size)
    with f.if_(whole < count):
        mask = f.first_lanes(count - whole, lanes)
        total = f.load_masked(wide, sums + whole * size, mask)
        f.store_masked(add(total, whole, count - whole), sums + whole * size, mask)


def _scales(f: Function, product: Product, p: Value, lanes: int) -> list[Value]:
    """Return x[p] in every lane; for complex types, xr for (re, im), and (-xi, xi) for (im, re)."""
    element, size = product.accumulator, SIZES[product.accumulator]
    if not product.is_complex:
        return [f.broadcast(f.load(element, f["x"] + p * size), lanes)]
    at = f["x"] + p * (2 * size)
    real, minus, plus = (
        f.broadcast(f.load(element, where), lanes) for where in (at, at + size, at + f["k"] * (2 * size))
    )
    return [real, f.shuffle(minus, plus, [lane + lane % 2 * lanes for lane in range(lanes)])]


def each(f: Function, product: Product) -> None:
    """Compute sums[i] += row i of A times x, number by number."""
    size, element, parts = SIZES[product.accumulator], product.accumulator, product.parts
    for i, rows in f.in_steps(f["count"], SCALARS // parts):
        a = [f["a"] + (i + r) * f["row"] for r in range(rows)]
        totals = [[[f.var(f.zero(element)) for _ in range(parts)] for _ in range(parts)] for _ in range(rows)]
        with f.loop(0, f["k"]) as p:
            for q in range(parts):
                x = [f["x"] + (f["k"] * (part * parts) + p * parts + q) * size for part in range(parts)]
                scales = [f.load(element, at) for at in x]
                for row, of_row in zip(a, (of_rows[q] for of_rows in totals), strict=True):
                    number = _real(f, product, row + p * f["col"] + q * _number_size(product))
                    for scale, total in zip(scales, of_row, strict=True):
                        total.value = f.fma(number, scale, total.value)
        for index, sums in enumerate(sums for of_row in totals for sums in zip(*of_row, strict=True)):
            at = f["sums"] + i * (parts * size) + index * size
            f.store(f.load(element, at) + _sum([each.value for each in sums]), at)
