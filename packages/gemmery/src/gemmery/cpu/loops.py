"""The five loops around the micro-kernel: C = epilogue(alpha A B + beta C), in blocks of mc, kc and nc.

Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34(3), 2008, as BLIS orders it:
columns of C by nc, k by kc (a panel of B is packed), rows by mc (a block of A is packed), then tiles.

If C is narrower than the accumulator (float16, bfloat16) and k takes several blocks, sums are kept in a buffer of the
accumulator's type and rounded once, after the last block. If k takes more than FAN blocks, each run of FAN of them is
summed in another buffer, and `run` adds its sums to C as if they were those of a block. Blocks of complex products are
counted in real numbers: two for each element in nc and kc.

C is updated from the accumulators of a tile. The first block of k adds beta C, and the last one applies the epilogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

from gemmery.cpu import pack, pack_complex, tile_unit
from gemmery.cpu.abi import Args
from gemmery.cpu.ir import Function, Module, Value, Var
from gemmery.cpu.ir_types import SIZES
from gemmery.cpu.long_k import even, in_order
from gemmery.cpu.panels import (
    STACK,
    WIDENED,
    buffers,
    depth,
    fan,
    operands,
    panel_bytes,
    steps_of,
    tiled_bytes,
    widened,
)
from gemmery.cpu.target import SHALLOW, Target, Tile
from gemmery.cpu.ukernel import ABREAST, AHEAD, Product, RegisterTile, load_cells, register_tile, tile_loop
from gemmery.cpu.update import PARAMS, is_plain, rounds_whole, update_edge, update_rounded, update_whole

_PREFETCH = 16  # steps of k by which A is prefetched ahead of its use

_RUN = (("i64", "m"), ("i64", "n"), ("ptr", "kept"), ("i64", "row"))
_TILES = (
    ("i64", "mc"), ("i64", "nc"), ("i64", "kc"), ("i64", "right"), ("ptr", "a"), ("ptr", "b"), ("i64", "b_panel"),
)  # fmt: skip


def packed(target: Target, product: Product, sizes: Tile | None = None, once: bool = False) -> Module:
    """Return the module of the packed product of some element types; its entry is `packed`.

    With `once` that entry takes a B that the other one, `panels`, has packed whole: see `panels.whole`.

    It serves operands of any strides, since packing chooses its way at run time. Code for all of them takes LLVM 20 ms
    longer than code for one layout of A and of B.

    Its loops:
        for each block of nc columns of B:          # stays in L3
            for each block of kc rows of it:
                pack B[kc, nc]
                for each block of mc rows of A:
                    pack A[mc, kc]                  # stays in L2
                    for each panel j of B:          # kc x nr, stays in L1
                        for each panel i of A:
                            the loop over p, as in packed_panels
    """
    module = Module(target)
    register = register_tile(target, product, sizes)
    a, b = operands(product, register)
    routines_a = tile_unit.ROUTINES_A if product.on_tiles else pack.ROUTINES
    routines_b = tile_unit.ROUTINES_B if product.on_tiles else pack.ROUTINES
    if product.is_complex:
        routines_a, routines_b = pack_complex.ROUTINES_A, pack_complex.ROUTINES_B
    pack.pack(module, a, routines_a)
    if not product.bits:
        pack.pack(module, b, routines_b)
    if product.on_tiles:
        tile_unit.define(module, product, register)
        if widened(product, once):
            with module.function("widen", *_WIDEN, local=True) as f:
                _divide(f, product, register)
    else:
        _small_tiles(module, product, register, once)
        _tiles(module, product, register, once)
        if wide := widened(product, once):
            with module.function("widen", *_WIDEN, local=True) as f:
                _widen(f, product, wide, register)
            _small_tiles(module, wide, register, prefix="wide_")
            _tiles(module, wide, register, prefix="wide_")
    if product.rounds:
        with module.function("run", *_RUN, *PARAMS, local=True) as f:
            update_edge(f, product, register, f["kept"], f["row"], f.index(0), f.index(0), f["m"], f["n"])
    if once and not product.bits:
        with module.function("panels", ("ptr", "args")) as f:
            pack.pack_whole(f, b)
    with module.function("packed", ("ptr", "args")) as f, tile_unit.configured(f, product):
        _five_loops(f, product, register, once)
    return module


def packed_panels(target: Target, product: Product) -> Module:
    """Return the module that packs all of A and B, then multiplies them as one block; its entry is `packed_panels`.

    Its loops:
        pack B: panels of nr columns, the elements of each p adjacent
        pack A: panels of mr rows, the elements of each p adjacent
        for each panel j of B:
            for each panel i of A:
                sums[mr, nr] = 0, in registers
                for p in 0..k:
                    sums += (mr elements of i) * (nr elements of j)
                C[i..., j...] = sums
    """
    module = Module(target)
    register = register_tile(target, product)
    a, b = operands(product, register)
    pack.pack(module, a, pack.ROUTINES)
    pack.pack(module, b, pack.ROUTINES)
    _small_tiles(module, product, register)
    _tiles(module, product, register)
    with module.function("packed_panels", ("ptr", "args")) as f:
        args, yes = Args(f, f["args"]), f.const("i1", 1)
        m, n, k, c, c_row = args.m, args.n, args.k, args.c, args.c_row
        to_a = args.workspace
        to_b = to_a + buffers(product, register, m, k, n)[0]
        f.call("pack_b", n, k, args.b, args.b_col, args.b_row, to_b)
        f.call("pack_a", m, k, args.a, args.a_row, args.a_col, to_a)
        f.call(
            "tiles", m, n, k, n, to_a, to_b, panel_bytes(b, k), c, c_row, c, c_row,
            args.alpha, args.beta, args.bias, args.bias_step, yes, yes,
        )  # fmt: skip
    return module


def _five_loops(f: Function, product: Product, register: RegisterTile, once: bool) -> None:
    args = Args(f, f["args"])
    parts, panels = product.parts, operands(product, register)[1]
    m, n, k = args.m, args.n * parts, args.k * parts
    mc, nc, kc = (
        even(f, total, block, unit)
        for total, block, unit in (
            (m, args.mc, register.mr), (n, args.nc, register.nr), (k, args.kc, product.block_unit * parts)
        )
    )  # fmt: skip
    (a, a_row, a_col), (b, b_row, b_col) = (args.a, args.a_row, args.a_col), (args.b, args.b_row, args.b_col)
    c, c_row, alpha, beta, bias, bias_step = args.c, args.c_row, args.alpha, args.beta, args.bias, args.bias_step
    unity, nothing = (_scalar(f, product, number) for number in (1, 0))
    widens = _widens(f, product, register, once, m)
    a_size, b_size = _buffers(f, product, register, (mc, kc, nc), once, widens)
    part = f.min(kc, depth(product, register)) if product.on_tiles else kc  # of k, for which A is packed at once
    to_a = f.select((a_size + b_size <= STACK) & (k <= part), f.buffer(STACK), args.workspace)
    to_b = to_a + a_size
    tiled, spare_row = to_b + b_size, nc * SIZES[product.scalar]
    spare = tiled + tiled_bytes(product, register, mc, nc) if product.on_tiles else tiled
    run = kc * fan(product) if product.rounds else f.max(k, 1)
    several, below = k > run, f.select(args.below > 0, args.below - 1, args.n)
    with f.loop(0, n, nc) as j, f.loop(0, f.max(k, 1), run) as q:
        wide, end = f.min(n - j, nc), f.min(f.max(k, 1), q + run)
        tile_c, tile_bias = c + j * product.out_size, bias + j // parts * bias_step
        sums, sums_row = tile_c, c_row
        if product.sums_apart:
            sums, sums_row = spare + f.select(several, m, f.index(0)) * spare_row, spare_row
        skipped = f.max(j // parts - below, 0) // mc * mc  # blocks of rows above the diagonal
        # A run among several is summed in `kept`, as if that were C.
        start, factor = f.select(several, nothing, beta), f.select(several, unity, alpha)
        to, to_row = f.select(several, spare, tile_c), f.select(several, spare_row, c_row)
        partial, partial_row = f.select(several, spare, sums), f.select(several, spare_row, sums_row)
        with f.loop(q, end, kc) as p:
            deep, first, last = f.min(k - p, kc), p.equals(q), (p + kc >= k) & (several ^ True)
            b_panels, b_panel = to_b, panel_bytes(panels, deep)
            if once:  # strides of blocks and, by column, of panels
                b_panels, b_panel = b + p // kc * b_row + j // parts * b_col, b_col * (register.nr // parts)
            else:
                f.call("pack_b", wide, deep, b + p // parts * b_row + j // parts * b_col, b_col, b_row, to_b)
            if widens is not None:
                b_panels, b_panel = _widen_if(f, product, register, widens, wide, deep, b_panels, b_panel, to_b)
            scale = f.select(first, start, unity)
            with f.loop(skipped, m, mc) as i:
                tall = f.min(m - i, mc)
                if product.on_tiles:
                    # Sums that are kept apart from C stay in L2 if all blocks of rows use the same memory for them.
                    tile_unit.block(
                        f, product, register, (tall, wide, deep, i + below - j),
                        (a + i * a_row + p * a_col, a_row, a_col), (to_a, b_panels, b_panel, tiled),
                        (to + i * to_row, to_row,
                         partial + (f.select(k <= kc, f.index(0), i) if product.sums_apart else i) * partial_row,
                         partial_row, factor, scale, tile_bias, bias_step, first, last),
                        j.equals(0) | (m > mc) | (k > part), unity,
                    )  # fmt: skip
                else:
                    f.call("pack_a", tall, deep, a + i * a_row + p // parts * a_col, a_row, a_col, to_a)
                    _tiles_of(
                        f, product, register, widens, (tall, wide, deep, (i + below) * parts - j, to_a),
                        (b_panels, b_panel, to_b),
                        (to + i * to_row, to_row, partial + i * partial_row, partial_row, factor, scale, tile_bias,
                         bias_step, first, last),
                    )  # fmt: skip
        if product.rounds:
            with f.if_(several):
                first, last = q.equals(0), end >= k
                f.call(
                    "run", m, wide, spare, nc, tile_c, c_row, sums, sums_row,
                    alpha, f.select(first, beta, unity), tile_bias, bias_step, first, last,
                )  # fmt: skip


def _scalar(f: Function, product: Product, number: int) -> Value:
    """Return the address of a number as alpha and beta are stored."""
    at = f.buffer(16)
    f.store(f.const(product.scalar, number), at)
    f.store(f.zero(product.scalar), at + SIZES[product.scalar])
    return at


def _buffers(
    f: Function,
    product: Product,
    register: RegisterTile,
    block: tuple[Value, Value, Value],
    once: bool,
    widens: Value | None,
) -> tuple[Value, Value]:
    """Return the bytes of the packed block of A and of B; of a B that was packed before, of its widened panels."""
    mc, kc, nc = block
    a_size, b_size = buffers(product, register, mc, kc, f.index(0) if once else nc)
    if wide := widened(product, once):
        assert widens is not None
        b_size = f.select(widens, buffers(wide, register, mc, kc, nc)[1], b_size)
    return a_size, b_size


def _widens(f: Function, product: Product, register: RegisterTile, once: bool, m: Value) -> Value | None:
    """Return whether a block of panels of B is widened; None for those that are never."""
    if not widened(product, once):
        return None
    return f.const("i1", 1) if product.on_tiles else m > WIDENED * register.mr


def _widen_if(
    f: Function, product: Product, register: RegisterTile, widens: Value, *block: Value
) -> tuple[Value, Value]:
    """Widen a block of panels where it is to be; return the address and the bytes of those that the tile unit reads."""
    _, deep, b_panels, b_panel, to_b = block
    with f.if_(widens):
        f.call("widen", *block)
    return (to_b, panel_bytes(operands(product, register)[1], deep)) if product.on_tiles else (b_panels, b_panel)


def _tiles_of(
    f: Function,
    product: Product,
    register: RegisterTile,
    widens: Value | None,
    sizes: tuple[Value, ...],
    panels: tuple[Value, Value, Value],
    rest: tuple[Value, ...],
) -> None:
    """Multiply a packed block of A by panels of B, which are as they lie or were widened."""
    b_panels, b_panel, to_b = panels
    if widens is not None:
        wide = widened(product, once=True)
        assert wide
        with f.if_(widens):
            f.call("wide_tiles", *sizes, to_b, panel_bytes(operands(wide, register)[1], sizes[2]), *rest)
    with nullcontext() if widens is None else f.if_(widens ^ True):
        f.call("tiles", *sizes, b_panels, b_panel, *rest)


_WIDEN = (("i64", "nc"), ("i64", "kc"), ("ptr", "b"), ("i64", "b_panel"), ("ptr", "to"))


def _widen(f: Function, product: Product, wide: Product, register: RegisterTile) -> None:
    """Write a block of panels of B as the numbers that steps multiply."""
    (old, new), cells = (operands(each, register)[1].row for each in (product, wide)), register.lanes * product.group
    steps = steps_of(product, f["kc"])
    with f.loop(0, (f["nc"] + (register.nr - 1)) // register.nr) as j, f.loop(0, steps) as p:
        row, to = f["b"] + j * f["b_panel"] + p * old, f["to"] + (j * steps + p) * new
        for v in range(register.nv):
            cell = load_cells(f, product, register, row, v * (old // register.nv))
            f.store(cell, to + v * cells * SIZES[product.packed])


def _divide(f: Function, product: Product, register: RegisterTile) -> None:
    """Write a block of panels of float16, each of which is rows of a matrix, as panels of halves."""
    panels, nr, apart = operands(product, register)[1], register.nr, f.index(2)
    with f.loop(0, f["nc"], nr) as j:
        source, to = f["b"] + j // nr * f["b_panel"], f["to"] + j // nr * panel_bytes(panels, f["kc"])
        f.call("pack_b_copy", f.min(f["nc"] - j, nr), f["kc"], source, apart, apart * nr, to)


def _tiles(
    module: Module, product: Product, register: RegisterTile, once: bool = False, prefix: str = ""
) -> None:  # fmt: skip
    """Define `tiles`: the two loops over the register tiles of an mc x nc block, columns outside."""
    mr, nr = register.mr, register.nr
    with module.function(f"{prefix}tiles", *_TILES, *PARAMS, local=True) as f:
        mc, nc, kc = f["mc"], f["nc"], f["kc"]
        panels_a, panels_b = operands(product, register)
        a_panel, b_panel = panel_bytes(panels_a, kc), f["b_panel"]
        tile_buffer = f.buffer(mr * nr * SIZES[product.accumulator])
        # Going down columns keeps a panel of B in L1. A product with small k mainly writes C, and going along rows
        # writes it page by page (4096 x 4096 x 32, f64, Zen 4: 50 GFLOP/s, against 44 down columns).
        along = kc <= SHALLOW
        done = _few_rows(f, product, register, tile_buffer) if once else f.index(0)
        outer, inner = in_order(f, along, (mc, mr), (nc - done, nr))
        with f.loop(0, *outer) as x, f.loop(0, *inner) as y:
            i, j = f.select(along, x, y), f.select(along, y, x) + done
            with f.if_(j < f["right"] + (i + mr) * product.parts):  # else a symmetric product does not need the tile
                c = f["c"] + i * f["c_row"] + j * product.out_size
                a, b = f["a"] + i // mr * a_panel, f["b"] + j // nr * b_panel
                steps = steps_of(product, kc)
                coming = b + b_panel + i // mr * (steps * (panels_b.row // AHEAD))
                rows, columns = f.min(mc - i, mr), f.min(nc - j, nr)
                whole = is_plain(f, product, register, rows, columns)
                with _smaller(f, register, rows, columns, (steps, a, b, tile_buffer), once, prefix):
                    for r in range(mr):
                        for v in range(0, nr * product.out_size, 64):
                            f.prefetch(c + f["c_row"] * r + v, write=True)
                    totals = tile_loop(f, product, register, steps, a, b, _PREFETCH, coming, once=once)
                    if product.sums_apart:
                        _keep(f, product, register, totals, tile_buffer)
                    else:
                        with f.if_(whole):
                            update_whole(f, product, register, totals, c)
                        with f.else_():
                            _keep(f, product, register, totals, tile_buffer)
                if rounds_whole(product):
                    with f.if_(whole):
                        update_rounded(f, product, register, tile_buffer, i, j)
                with f.if_(whole ^ True):
                    update_edge(f, product, register, tile_buffer, nr, i, j, rows, columns)


def _few_rows(f: Function, product: Product, register: RegisterTile, tile_sums: Value) -> Value:
    """Compute one row or two in tiles of several panels, and return how many columns are done."""
    steps, nc, count = steps_of(product, f["kc"]), f["nc"], f.var(f.index(0))
    for rows in (1, 2):
        count.value = f.select(f["mc"].equals(rows), f.index(_abreast(product, rows)), count.value)
    wide = f.max(count.value, 1) * register.nr
    done = f.select(count.value > 0, nc // wide * wide, f.index(0))
    with f.loop(0, done, wide) as j:
        operands = steps, f["a"], f["b"] + j // register.nr * f["b_panel"], f["b_panel"], tile_sums
        for rows in (1, 2):
            with f.if_(f["mc"].equals(rows)):
                f.call(f"abreast_{rows}", *operands)
        update_edge(f, product, register, tile_sums, wide, 0, j, f["mc"], wide)
    return done


def _abreast(product: Product, rows: int) -> int:
    """Return the panels of a tile for one row or two; a register of 2 x 2 sums has two rows."""
    return ABREAST // (2 if product.in_blocks else rows)


def _narrow(register: RegisterTile) -> list[int]:
    """Return the widths, in vectors, of the tiles for the last columns of C (see `pack.used`)."""
    return [vectors for vectors in (1, 2) if vectors < register.nv]


def _small_tiles(
    module: Module, product: Product, register: RegisterTile, once: bool = False, prefix: str = ""
) -> None:  # fmt: skip
    """Define `tile_1(steps, a, b, kept)` and `tile_2`: the first one or two vectors of a tile, stored in `kept`.

    A product with 8 columns of f32 computes 16 of them instead of 64 (8 x 8 x 8, Zen 4: 95 ns instead of 140). As
    functions of their own, these loops take no registers from the loop of whole tiles. `rows_2` and `rows_4`,
    and with `once` `rows_1`, are the first rows of a tile.
    """

    def define(name: str, vectors: int = 0, rows: int = 0) -> None:
        abreast = vectors > register.nv
        params = (
            ("i64", "steps"),
            ("ptr", "a"),
            ("ptr", "b"),
            *((("i64", "apart"),) if abreast else ()),
            ("ptr", "kept"),
        )
        with module.function(f"{prefix}{name}", *params, local=True) as f:
            operands = f["steps"], f["a"], f["b"], _PREFETCH
            apart = f["apart"] if abreast else None
            totals = tile_loop(f, product, register, *operands, vectors=vectors, rows=rows, apart=apart, once=once)
            _keep(f, product, register, totals, f["kept"])

    for vectors in _narrow(register):
        define(f"tile_{vectors}", vectors=vectors)
    for rows in _few(register, once):
        define(f"rows_{rows}", rows=rows)
        if once and rows < ABREAST:
            define(f"abreast_{rows}", vectors=register.nv * _abreast(product, rows), rows=rows)


def _few(register: RegisterTile, once: bool) -> list[int]:
    """Return the heights, in rows, of the tiles for the last rows of C.

    8 x 1024 x 1024 with a transposed B, Zen 4, as 6 rows and 2 and as two tiles of 6: f32 393 and 457 us, f64 648 and
    867. Two heights take LLVM 25 ms, once.
    """
    return [rows for rows in ((1, 2, 4) if once else (2, 4)) if rows < register.mr]


@contextmanager
def _smaller(
    f: Function,
    register: RegisterTile,
    rows: Value,
    columns: Value,
    operands: tuple[Value, ...],
    once: bool,
    prefix: str,
) -> Iterator[None]:
    """Call the smallest of the small tiles that holds `columns` or `rows`, or run the body if none does."""
    small = [(f"tile_{vectors}", columns <= vectors * register.lanes) for vectors in _narrow(register)]
    small += [(f"rows_{few}", rows <= few) for few in _few(register, once)]
    with ExitStack() as otherwise:
        for name, holds in small:
            with f.if_(holds):
                f.call(f"{prefix}{name}", *operands)
            otherwise.enter_context(f.else_())
        yield


def _keep(f: Function, product: Product, register: RegisterTile, totals: list[list[Var]], edge: Value) -> None:
    """Store a tile's accumulators in a buffer for the whole tile, or for the panels that it has."""
    size, lanes, wide = SIZES[product.accumulator], register.lanes, max(register.nv, len(totals[0]))
    for r, row in enumerate(totals):
        for v, total in enumerate(row):
            f.store(total.value, edge + (r * wide + v) * lanes * size, align=lanes * size)
