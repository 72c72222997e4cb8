"""The five loops around the micro-kernel: C = epilogue(alpha A B + beta C), in blocks of mc, kc and nc.

Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34(3), 2008, as BLIS orders it:
columns of C by nc, k by kc (a panel of B is packed), rows by mc (a block of A is packed), then tiles.

If C is narrower than the accumulator (float16, bfloat16) and k takes several blocks, sums are kept in a buffer of the
accumulator's type and rounded once, after the last block. Blocks of complex products are counted in real numbers: two
for each element in nc and kc.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gemmery.cpu import atomics, pack, pack_complex
from gemmery.cpu.abi import Args
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES
from gemmery.cpu.panels import STACK, buffers, operands, panel_bytes, steps_of
from gemmery.cpu.target import SHALLOW, Target, Tile, tile
from gemmery.cpu.ukernel import AHEAD, Product, RegisterTile, register_tile, tile_loop
from gemmery.cpu.update import PARAMS, is_plain, keep, update_edge, update_whole

_PREFETCH = 16  # steps of k by which A is prefetched ahead of its use

_TILES = (("i64", "mc"), ("i64", "nc"), ("i64", "kc"), ("ptr", "a"), ("ptr", "b"), *PARAMS)


def packed(target: Target, product: Product, sizes: Tile | None = None) -> Module:
    """Return the module of the packed product of some element types; its entry is `packed`.

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
    register = register_tile(target, product, sizes or tile(target))
    a, b = operands(product, register)
    routines_a, routines_b = (
        (pack_complex.ROUTINES_A, pack_complex.ROUTINES_B) if product.is_complex else (pack.ROUTINES, pack.ROUTINES)
    )
    pack.pack(module, a, routines_a)
    pack.pack(module, b, routines_b)
    _even(module)
    _narrow_tiles(module, product, register)
    _tiles(module, product, register)
    with module.function("packed", ("ptr", "args")) as f:
        _five_loops(f, product, register)
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
    _narrow_tiles(module, product, register)
    _tiles(module, product, register)
    with module.function("packed_panels", ("ptr", "args")) as f:
        args, yes = Args(f, f["args"]), f.const("i1", 1)
        m, n, k, c, c_row = args.m, args.n, args.k, args.c, args.c_row
        to_a = args.workspace
        to_b = to_a + buffers(product, register, m, k, n)[0]
        f.call("pack_b", n, k, args.b, args.b_col, args.b_row, to_b)
        f.call("pack_a", m, k, args.a, args.a_row, args.a_col, to_a)
        f.call(
            "tiles", m, n, k, to_a, to_b, c, c_row, c, c_row, args.alpha, args.beta, args.bias, args.bias_step, yes, yes
        )
    return module


def _five_loops(f: Function, product: Product, register: RegisterTile) -> None:
    args = Args(f, f["args"])
    parts = product.parts
    m, n, k = args.m, args.n * parts, args.k * parts
    mc, nc, kc = (
        atomics.call(f, "i64", "even", f.max(total, 1), block, f.index(unit))
        for total, block, unit in (
            (m, args.mc, register.mr), (n, args.nc, register.nr), (k, args.kc, product.group * parts)
        )
    )  # fmt: skip
    a, a_row, a_col = args.a, args.a_row, args.a_col
    b, b_row, b_col = args.b, args.b_row, args.b_col
    c, c_row = args.c, args.c_row
    alpha, beta, bias, bias_step = args.alpha, args.beta, args.bias, args.bias_step
    unit_scale = f.buffer(16)
    f.store(f.const(product.scalar, 1), unit_scale)
    f.store(f.zero(product.scalar), unit_scale + SIZES[product.scalar])
    a_size, b_size = buffers(product, register, mc, kc, nc)
    on_stack = (a_size + b_size <= STACK) & (k <= kc)
    to_a = f.select(on_stack, f.buffer(STACK), args.workspace)
    to_b = to_a + a_size
    sums = to_b + b_size
    apart = product.sums_apart
    sums_row = nc * SIZES[product.scalar] if apart else c_row
    with f.loop(0, n, nc) as j, f.loop(0, f.max(k, 1), kc) as p:
        wide, deep = f.min(n - j, nc), f.min(k - p, kc)
        first, last = p.equals(0), p + kc >= k
        f.call("pack_b", wide, deep, b + p // parts * b_row + j // parts * b_col, b_col, b_row, to_b)
        scale = f.select(first, beta, unit_scale)
        with f.loop(0, m, mc) as i:
            tall = f.min(m - i, mc)
            f.call("pack_a", tall, deep, a + i * a_row + p // parts * a_col, a_row, a_col, to_a)
            tile_c = c + i * c_row + j * product.out_size
            partial = sums + i * sums_row if apart else tile_c
            f.call(
                "tiles", tall, wide, deep, to_a, to_b, tile_c, c_row, partial, sums_row,
                alpha, scale, bias + j // parts * bias_step, bias_step, first, last,
            )  # fmt: skip


def _even(module: Module) -> None:
    """Define `even`, the size of blocks: all of `total` if it fits in one, else as `build.even` divides it."""
    with module.function("even", ("i64", "total"), ("i64", "block"), ("i64", "unit"), local=True, returns="i64") as f:
        total, block, unit = f["total"], f["block"], f["unit"]
        size = f.var(total)
        with f.if_(block < total):
            count = (total + (block - 1)) // block
            each = (total + count - 1) // count
            size.value = (each + unit - 1) // unit * unit
        f.ret(size.value)


def _in_order(
    f: Function, first: Value, x: tuple[Value, int], y: tuple[Value, int]
) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
    """Return the (stop, step) of two nested loops: x outside when `first`, else y."""
    (x_stop, x_step), (y_stop, y_step) = ((stop, f.index(step)) for stop, step in (x, y))
    outer = f.select(first, x_stop, y_stop), f.select(first, x_step, y_step)
    return outer, (f.select(first, y_stop, x_stop), f.select(first, y_step, x_step))


def _tiles(module: Module, product: Product, register: RegisterTile) -> None:
    """Define `tiles`: the two loops over the register tiles of an mc x nc block, columns outside."""
    mr, nr = register.mr, register.nr
    with module.function("tiles", *_TILES, local=True) as f:
        mc, nc, kc = f["mc"], f["nc"], f["kc"]
        a_panel, b_panel = (panel_bytes(panels, kc) for panels in operands(product, register))
        tile_buffer = f.buffer(mr * nr * SIZES[product.accumulator])
        # Going down columns keeps a panel of B in L1. A product with small k mainly writes C, and going along rows
        # writes it page by page (4096 x 4096 x 32, f64, Zen 4: 50 GFLOP/s, against 44 down columns).
        along = kc <= SHALLOW
        outer, inner = _in_order(f, along, (mc, mr), (nc, nr))
        with f.loop(0, *outer) as x, f.loop(0, *inner) as y:
            i, j = f.select(along, x, y), f.select(along, y, x)
            c = f["c"] + i * f["c_row"] + j * product.out_size
            a, b = f["a"] + i // mr * a_panel, f["b"] + j // nr * b_panel
            steps = steps_of(product, kc)
            coming = b + b_panel + i // mr * (steps * AHEAD)
            rows, columns = f.min(mc - i, mr), f.min(nc - j, nr)
            whole = is_plain(f, product, register, rows, columns)
            with _narrower(f, register, columns, (steps, a, b, tile_buffer)):
                for r in range(mr):
                    for v in range(0, nr * product.out_size, 64):
                        f.prefetch(c + f["c_row"] * r + v, write=True)
                totals = tile_loop(f, product, register, steps, a, b, _PREFETCH, coming)
                with f.if_(whole):
                    update_whole(f, product, register, totals, c)
                with f.else_():
                    keep(f, product, register, totals, tile_buffer)
            with f.if_(whole ^ True):
                update_edge(f, product, register, tile_buffer, i, j, rows, columns)


def _narrow(register: RegisterTile) -> list[int]:
    """Return the widths, in vectors, of the tiles for the last columns of C (see `pack.used`)."""
    return [vectors for vectors in (1, 2) if vectors < register.nv]


def _narrow_tiles(module: Module, product: Product, register: RegisterTile) -> None:
    """Define `tile_1(steps, a, b, kept)` and `tile_2`: the first one or two vectors of a tile, stored in `kept`.

    A product with 8 columns of f32 computes 16 of them instead of 64 (8 x 8 x 8, Zen 4: 95 ns instead of 140). As
    functions of their own, these loops take no registers from the loop of whole tiles.
    """
    for vectors in _narrow(register):
        params = (("i64", "steps"), ("ptr", "a"), ("ptr", "b"), ("ptr", "kept"))
        with module.function(f"tile_{vectors}", *params, local=True) as f:
            totals = tile_loop(f, product, register, f["steps"], f["a"], f["b"], _PREFETCH, vectors=vectors)
            keep(f, product, register, totals, f["kept"])


@contextmanager
def _narrower(f: Function, register: RegisterTile, columns: Value, operands: tuple[Value, ...]) -> Iterator[None]:
    """Call the narrowest of the narrow tiles that holds `columns`, or run the body if none does."""
    with ExitStack() as otherwise:
        for vectors in _narrow(register):
            with f.if_(columns <= vectors * register.lanes):
                f.call(f"tile_{vectors}", *operands)
            otherwise.enter_context(f.else_())
        yield
