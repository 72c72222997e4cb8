"""How C is updated from the sums of a tile: scaled, added to C or to sums that are kept apart, finished and rounded."""

from __future__ import annotations

from gemmery import dtypes
from gemmery.cpu.convert import narrow, store_as, widen
from gemmery.cpu.epilogue import bias_of, finished
from gemmery.cpu.ir import Function, Value, Var
from gemmery.cpu.ir_types import SIZES, lanes_of, vector
from gemmery.cpu.pack_complex import times_i
from gemmery.cpu.ukernel import SEMIRINGS, Product, RegisterTile, added

# C, sums kept apart, the scalars, the bias of the columns, and whether these are the first and the last block of k.
PARAMS = (
    "c", ("i64", "c_row"), "sums", ("i64", "sums_row"), "alpha", "beta",
    "bias", ("i64", "bias_step"), ("i1", "first"), ("i1", "last"),
)  # fmt: skip


def update_edge(
    f: Function,
    product: Product,
    register: RegisterTile,
    edge: Value,
    row: Value | int,
    i: Value | int,
    j: Value | int,
    rows: Value,
    columns: Value,
) -> None:
    """Add `rows` x `columns` of the sums in `edge`, `row` numbers in a row, to C at (i, j)."""
    size, lanes = SIZES[product.accumulator], register.lanes
    with f.loop(0, rows) as r, f.loop(0, columns, lanes) as v:
        tile = f.load(vector(lanes, product.accumulator), edge + (r * row + v) * size)
        _update_vector(f, product, tile, i + r, j + v, f.first_lanes(columns - v, lanes))


def rounds_whole(product: Product) -> bool:
    """Return whether `update_rounded` may finish whole tiles: sums apart from C, and no semiring."""
    return product.sums_apart and product.step not in SEMIRINGS


def is_plain(f: Function, product: Product, register: RegisterTile, rows: Value, columns: Value) -> Value:
    """Return True for a whole tile that needs no mask, conversion or epilogue, with real alpha and beta.

    Where sums are kept apart from C, `update_rounded` does what is left of these, except beta.
    """
    whole = rows.equals(register.mr) & columns.equals(register.nr)
    if rounds_whole(product):
        return whole & (f.load(product.scalar, f["beta"]).equals(0) | (f["first"] ^ True))
    if dtypes.get(product.out).llvm != product.accumulator:
        return whole & False
    if product.is_complex:
        size = SIZES[product.scalar]
        for scalar in (f["alpha"], f["beta"]):
            whole = whole & f.load(product.scalar, scalar + size).equals(0)
    bare = f["last"] ^ True
    return whole & (bare if product.activation else bare | f.is_null(f["bias"]))


def update_whole(f: Function, product: Product, register: RegisterTile, totals: list[list[Var]], c: Value) -> None:
    """Compute C = alpha * tile, plus beta * C if beta is not zero, from the registers."""
    wide = vector(register.lanes, product.accumulator)
    size = SIZES[product.accumulator]
    alpha = f.broadcast(f.load(product.accumulator, f["alpha"]), register.lanes)
    beta = f.load(product.accumulator, f["beta"])
    places = [
        (f["c_row"] * r, v * register.lanes * size, totals[r][v])
        for r in range(register.mr)
        for v in range(register.nv)
    ]
    with f.if_(beta.differs(0)):
        betas = f.broadcast(beta, register.lanes)
        for row, column, total in places:
            at = c + row + column
            old = f.load(wide, at)
            adds = added(f, product, old, total.value) if product.step in SEMIRINGS else None
            f.store(adds or f.fma(old, betas, total.value * alpha), at)
    with f.else_():
        for row, column, total in places:
            f.store(total.value * alpha, c + row + column)


def update_stored(f: Function, product: Product, register: RegisterTile, stored: Value, c: Value) -> None:
    """Compute C = alpha * tile, plus beta * C if beta is not zero, from a whole tile in a buffer."""
    wide, size = vector(register.lanes, product.accumulator), SIZES[product.accumulator]
    alpha = f.broadcast(f.load(product.accumulator, f["alpha"]), register.lanes)
    beta = f.load(product.accumulator, f["beta"])
    betas = f.broadcast(beta, register.lanes)

    def rows(adds: bool) -> None:
        with f.loop(0, register.mr) as r:
            for v in range(register.nv):
                at = c + f["c_row"] * r + v * register.lanes * size
                total = f.load(wide, stored + (r * register.nv + v) * register.lanes * size) * alpha
                f.store(f.fma(f.load(wide, at), betas, total) if adds else total, at)

    with f.if_(beta.differs(0)):
        rows(adds=True)
    with f.else_():
        rows(adds=False)


def update_rounded(
    f: Function, product: Product, register: RegisterTile, stored: Value, i: Value, j: Value
) -> None:  # fmt: skip
    """Add alpha times a whole tile in a buffer to the sums, without beta; the last block of k finishes them in C."""
    wide, size, out = vector(register.lanes, product.scalar), SIZES[product.scalar], dtypes.get(product.out)
    alpha = f.broadcast(f.load(product.scalar, f["alpha"]), register.lanes)

    def rows(begins: bool, rounds: bool) -> None:
        with f.loop(0, register.mr) as r:
            c, sums = f["c"] + (i + r) * f["c_row"], f["sums"] + (i + r) * f["sums_row"]
            for v in range(register.nv):
                at = j + v * register.lanes
                total = f.load(wide, stored + (r * register.nv + v) * register.lanes * size) * alpha
                if not begins:
                    total = total + f.load(wide, sums + at * size)
                if rounds:
                    _store_rounded(f, product, _epilogue(f, product, total, at, None), c + at * out.size, None)
                else:
                    f.store(total, sums + at * size)

    for begins in (True, False):
        for rounds in (True, False):
            with f.if_((f["first"] ^ (not begins)) & (f["last"] ^ (not rounds))):
                rows(begins, rounds)


def _update_vector(f: Function, product: Product, tile: Value, i: Value, j: Value, mask: Value) -> None:
    """Update C in the general case, one masked vector of the tile at a time."""
    out, apart = dtypes.get(product.out), product.sums_apart
    wide = vector(lanes_of(tile.type), product.scalar)
    at = f["c"] + i * f["c_row"] + j * product.out_size
    sum_at = f["sums"] + i * f["sums_row"] + j * SIZES[product.scalar]
    if SIZES[product.scalar] > SIZES[product.accumulator]:
        tile = f.convert("sext" if product.is_signed else "zext", tile, product.scalar)
    total = f.var(_times(f, product, tile, f["alpha"]))
    with f.if_(f["first"] & _is_not_zero(f, product, f["beta"])):
        total.value = _times(f, product, _load_c(f, product, at, mask), f["beta"], total.value)
    with f.if_(f["first"] ^ True):
        old = f.load_masked(wide, sum_at, mask) if apart else _load_c(f, product, at, mask)
        total.value = added(f, product, old, total.value)
    with f.if_(f["last"]):
        _store_rounded(f, product, _epilogue(f, product, total.value, j, mask), at, mask)
    with f.else_():
        f.store_masked(total.value if apart else narrow(f, total.value, out), sum_at if apart else at, mask)


def _store_rounded(f: Function, product: Product, value: Value, at: Value, mask: Value | None) -> None:
    """Store a vector of C, rounded once; on the tile unit bfloat16 by the instruction that goes with it."""
    out = dtypes.get(product.out)
    if product.on_tiles and out.name == "bf16":
        lanes = lanes_of(value.type)
        rounded = f.intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", vector(lanes, "bfloat"), value)
        f.store_masked(f.bitcast(rounded, vector(lanes, "i16")), at, mask)
    else:
        store_as(f, value, out, at, mask)


def _times(f: Function, product: Product, value: Value, scalar: Value, plus: Value | None = None) -> Value:
    """Return value * (the scalar at an address) + plus; a zero imaginary part is skipped."""
    lanes = lanes_of(value.type)
    real = f.broadcast(f.load(product.scalar, scalar), lanes)
    result = f.var(value * real if plus is None else f.fma(value, real, plus))
    if product.is_complex:
        imaginary = f.load(product.scalar, scalar + SIZES[product.scalar])
        with f.if_(imaginary.differs(0)):
            result.value = f.fma(times_i(f, value), f.broadcast(imaginary, lanes), result.value)
    return result.value


def _is_not_zero(f: Function, product: Product, scalar: Value) -> Value:
    nonzero = f.load(product.scalar, scalar).differs(0)
    if product.is_complex:
        nonzero = nonzero | f.load(product.scalar, scalar + SIZES[product.scalar]).differs(0)
    return nonzero


def _load_c(f: Function, product: Product, at: Value, mask: Value) -> Value:
    out = dtypes.get(product.out)
    raw = f.load_masked(vector(lanes_of(mask.type), "i16" if out.name == "bf16" else out.llvm), at, mask)
    return widen(f, raw, out, product.scalar)


def _epilogue(f: Function, product: Product, value: Value, j: Value, mask: Value | None) -> Value:
    """Add the bias of the columns, unless its pointer is null, and apply the activation to the tile in registers."""
    total, lanes = f.var(value), lanes_of(value.type)
    element = dtypes.get(dtypes.get(product.out).accumulator).llvm
    with f.if_(f.is_null(f["bias"]) ^ True):
        row = bias_of(f, element, f["bias"], f["bias_step"], j, lanes, mask, product.parts)
        row = f.convert("trunc", row, product.scalar) if SIZES[element] > SIZES[product.scalar] else row
        total.value = finished(f, "bias", value, row)
    return finished(f, product.activation, total.value)
