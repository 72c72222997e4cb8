"""The five loops around the micro-kernel: C = epilogue(alpha A B + beta C), in blocks of mc, kc and nc.

Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34(3), 2008, as BLIS orders it:
columns of C by nc, k by kc (a panel of B is packed), rows by mc (a block of A is packed), then tiles.

A product whose C is narrower than its accumulator (float16, bfloat16) and whose k takes several blocks sums in a
buffer of the accumulator's type and is rounded once, after the last block.
"""

from __future__ import annotations

from gemmery import dtypes
from gemmery.cpu.abi import Args
from gemmery.cpu.convert import narrow, store_as, widen
from gemmery.cpu.epilogue import activate
from gemmery.cpu.ir import SIZES, Function, Module, Value, Var, vector
from gemmery.cpu.pack import Panels, pack
from gemmery.cpu.target import Target, Tile, tile
from gemmery.cpu.ukernel import Product, Shape, shape, tile_loop

_PREFETCH = 16  # steps of A ahead of its use
SLACK = 64  # bytes that a transposing pack may write past its last panel

_TILES = (
    ("i64", "mc"),
    ("i64", "nc"),
    ("i64", "kc"),
    ("ptr", "a"),
    ("ptr", "b"),
    ("ptr", "c"),
    ("i64", "c_row"),
    ("ptr", "sums"),
    ("i64", "sums_row"),
    ("ptr", "alpha"),
    ("ptr", "beta"),
    ("ptr", "bias"),
    ("i64", "bias_step"),
    ("i1", "first"),
    ("i1", "last"),
)


def sums_apart(product: Product) -> bool:
    """True when partial sums over k must not be kept in C: rounding them would round more than once."""
    return dtypes.get(product.out).kind == "f" and dtypes.get(product.out).llvm != product.accumulator


def packed(target: Target, product: Product, sizes: Tile | None = None) -> Module:
    """The module of one packed product; its entry is `packed`."""
    module = Module(target)
    register = shape(target, product, sizes or tile(target))
    a = Panels("pack_a", register.mr, product)
    b = Panels("pack_b", register.nr, product)
    pack(module, a)
    pack(module, b)
    _tiles(module, product, register)
    with module.function("packed", ("ptr", "args")) as f:
        _five_loops(f, product, register)
    return module


def workspace_bytes(target: Target, product: Product, m: int, mc: int, kc: int, nc: int) -> int:
    """Bytes of the buffers that one thread needs for blocks of these sizes."""
    register = shape(target, product)
    cell = SIZES[product.cell]
    steps = -(-kc // product.group)
    a = -(-mc // register.mr) * register.mr * steps * cell + SLACK
    b = -(-nc // register.nr) * register.nr * steps * cell + SLACK
    sums = m * nc * SIZES[product.accumulator] if sums_apart(product) else 0
    return _aligned(a) + _aligned(b) + sums + 64


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _five_loops(f: Function, product: Product, register: Shape) -> None:
    args = Args(f, f["args"])
    size, out = dtypes.get(product.dtype).size, dtypes.get(product.out).size
    m, n, k, mc, kc, nc = args.m, args.n, args.k, args.mc, args.kc, args.nc
    a, a_row, a_col = args.a, args.a_row, args.a_col
    b, b_row, b_col = args.b, args.b_row, args.b_col
    c, c_row = args.c, args.c_row
    alpha, beta, bias, bias_step = args.alpha, args.beta, args.bias, args.bias_step
    one = f.buffer(SIZES[product.accumulator])
    f.store(f.const(product.accumulator, 1), one)
    cell = SIZES[product.cell]
    steps = (kc + (product.group - 1)) // product.group
    panels_a = (mc + (register.mr - 1)) // register.mr * (register.mr * cell) * steps + SLACK
    panels_b = (nc + (register.nr - 1)) // register.nr * (register.nr * cell) * steps + SLACK
    to_a = args.workspace
    to_b = to_a + (panels_a + 63 & -64)
    sums = to_b + (panels_b + 63 & -64)
    sums_row = nc * SIZES[product.accumulator]
    with f.loop(0, n, nc) as j:
        wide = f.min(n - j, nc)
        with f.loop(0, k, kc) as p:
            deep = f.min(k - p, kc)
            first, last = p.equals(0), p + kc >= k
            f.call("pack_b", wide, deep, b + p * b_row + j * b_col, b_col, b_row, to_b)
            scale = f.select(first, beta, one)
            with f.loop(0, m, mc) as i:
                tall = f.min(m - i, mc)
                f.call("pack_a", tall, deep, a + i * a_row + p * a_col, a_row, a_col, to_a)
                tile_c = c + i * c_row + j * out
                partial = sums + i * sums_row if sums_apart(product) else tile_c
                row = sums_row if sums_apart(product) else c_row
                f.call(
                    "tiles", tall, wide, deep, to_a, to_b, tile_c, c_row, partial, row,
                    alpha, scale, bias + j * bias_step, bias_step, first, last,
                )  # fmt: skip


def _tiles(module: Module, product: Product, register: Shape) -> None:
    """Define `tiles`: the two loops over the register tiles of an mc x nc block, columns outside."""
    mr, nr = register.mr, register.nr
    out = dtypes.get(product.out).size
    with module.function("tiles", *_TILES, local=True) as f:
        mc, nc, kc = f["mc"], f["nc"], f["kc"]
        steps = (kc + (product.group - 1)) // product.group
        a_panel, b_panel = steps * (mr * SIZES[product.cell]), steps * (nr * SIZES[product.cell])
        kept = f.buffer(mr * nr * SIZES[product.accumulator])
        with f.loop(0, nc, nr) as j, f.loop(0, mc, mr) as i:
            c = f["c"] + i * f["c_row"] + j * out
            for r in range(mr):
                for v in range(0, nr * out, 64):
                    f.prefetch(c + f["c_row"] * r + v, write=True)
            a, b = f["a"] + i // mr * a_panel, f["b"] + j // nr * b_panel
            totals = tile_loop(f, product, register, steps, a, b, _PREFETCH)
            rows, columns = f.min(mc - i, mr), f.min(nc - j, nr)
            with f.if_(_plain(f, product, register, rows, columns)):
                _update_whole(f, product, register, totals, c)
            with f.else_():
                _spill(f, register, totals, kept)
                _update_rows(f, product, register, kept, rows, columns, i, j)


def _plain(f: Function, product: Product, register: Shape, rows: Value, columns: Value) -> Value:
    """A whole tile that goes to C as it is: no edge, no conversion, no epilogue due."""
    whole = rows.equals(register.mr) & columns.equals(register.nr)
    if dtypes.get(product.out).llvm != product.accumulator:
        return whole & False
    return whole & (f["last"] ^ True) if product.activation or product.bias else whole


def _update_whole(f: Function, product: Product, register: Shape, totals: list[list[Var]], c: Value) -> None:
    """C = alpha * tile, plus beta * C when beta is not zero, straight from the registers."""
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
            f.store(f.fma(f.load(wide, at), betas, total.value * alpha), at)
    with f.else_():
        for row, column, total in places:
            f.store(total.value * alpha, c + row + column)


def _spill(f: Function, register: Shape, totals: list[list[Var]], kept: Value) -> None:
    for r, row in enumerate(totals):
        for v, total in enumerate(row):
            value = total.value
            f.store(value, kept + (r * register.nv + v) * register.lanes * _lane_bytes(value), align=64)


def _lane_bytes(value: Value) -> int:
    return SIZES[value.type[1:-1].split(" x ")[1]]


def _update_rows(
    f: Function, product: Product, register: Shape, kept: Value, rows: Value, columns: Value, i: Value, j: Value
) -> None:
    """The general way out, a row at a time under masks: edges, conversions, partial sums apart, epilogue."""
    out, size, lanes = dtypes.get(product.out), SIZES[product.accumulator], register.lanes
    wide = vector(lanes, product.accumulator)
    alpha = f.broadcast(f.load(product.accumulator, f["alpha"]), lanes)
    beta = f.load(product.accumulator, f["beta"])
    betas = f.broadcast(beta, lanes)
    masks = [f.first_lanes(f.max(columns - v * lanes, 0), lanes) for v in range(register.nv)]
    with f.loop(0, rows) as r:
        c = f["c"] + (i + r) * f["c_row"] + j * out.size
        partial = f["sums"] + (i + r) * f["sums_row"] + j * (size if sums_apart(product) else out.size)
        for v, mask in enumerate(masks):
            at, sum_at = c + v * lanes * out.size, partial + v * lanes * (size if sums_apart(product) else out.size)
            total = f.var(f.load(wide, kept + r * (register.nr * size) + v * lanes * size) * alpha)
            with f.if_(f["first"]):
                with f.if_(beta.differs(0)):
                    old = widen(f, _load_masked_c(f, product, at, mask), out, product.accumulator)
                    total.value = f.fma(old, betas, total.value)
            with f.else_():
                if sums_apart(product):
                    total.value = total.value + f.load_masked(wide, sum_at, mask)
                else:
                    old = widen(f, _load_masked_c(f, product, at, mask), out, product.accumulator)
                    total.value = total.value + old
            with f.if_(f["last"]):
                done = _epilogue(f, product, total.value, j + v * lanes, mask)
                store_as(f, done, out, at, mask)
            with f.else_():
                if sums_apart(product):
                    f.store_masked(total.value, sum_at, mask)
                else:
                    f.store_masked(narrow(f, total.value, out), at, mask)


def _load_masked_c(f: Function, product: Product, at: Value, mask: Value) -> Value:
    out = dtypes.get(product.out)
    lanes = int(mask.type[1:].split(" ", 1)[0])
    return f.load_masked(vector(lanes, "i16" if out.name == "bf16" else out.llvm), at, mask)


def _epilogue(f: Function, product: Product, value: Value, column: Value, mask: Value) -> Value:
    """Bias of the columns added, then the activation, while the tile is in registers."""
    if product.bias:
        at = f["bias"] + column * f["bias_step"]
        lanes = int(mask.type[1:].split(" ", 1)[0])
        wide = vector(lanes, product.accumulator)
        row = f.var(f.broadcast(f.load(product.accumulator, f["bias"]), lanes))
        with f.if_(f["bias_step"].differs(0)):
            row.value = f.load_masked(wide, at, mask)
        value = value + row.value
    return activate(f, product.activation, value)
