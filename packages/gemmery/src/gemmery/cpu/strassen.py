"""Fewer multiplications: one or two levels of Strassen's scheme around the packed product.

A, B and C are cut into quadrants, and 7 products of sums of quadrants replace 8 products. No sum is stored: packing
reads all quadrants of a sum and adds them while it writes the panel, and a tile goes from the registers to every
quadrant of C that needs it (Huang, Smith, Henry and van de Geijn, "Strassen's algorithm reloaded", SC16). Two levels
work in the same way with 16 blocks and 49 products. Rows and columns beyond a multiple of 2 or 4 are added by plain
products.

The error is bounded by the norms of A and B, not element by element: an element of C far smaller than its neighbors
may have no correct digit. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 23.2.2.
One NaN or infinity may make all of C NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemmery import dtypes
from gemmery.cpu import jit, pack
from gemmery.cpu.abi import Args
from gemmery.cpu.build import even
from gemmery.cpu.ir import Function, FunctionParameter, Module, Value, Var
from gemmery.cpu.ir_types import SIZES, vector
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.panels import Panels, operands, panel_bytes
from gemmery.cpu.target import Target, host, tile
from gemmery.cpu.ukernel import Product, RegisterTile, register_tile, tile_loop
from gemmery.problem import Problem

_TWO_LEVELS = 4096  # smallest side for which 49 products are faster than 7: at 3072 they tie
_ROOM = 4096  # bytes that a transposing pack may write past its last panel, rounded up
_CHUNK = 4096  # elements of a sum of blocks that are added at a time and then packed: they stay in L1

Signs = tuple[int, ...]  # of the blocks of a matrix, row by row: 1, -1 or 0 for none


@dataclass(frozen=True)
class Term:
    """(sum of blocks of A) (sum of blocks of B), added to some blocks of C."""

    a: Signs
    b: Signs
    c: Signs


FORMS = {
    # Strassen, "Gaussian elimination is not optimal", 1969. Quadrants in the order 11, 12, 21, 22.
    "strassen": (
        Term((1, 0, 0, 1), (1, 0, 0, 1), (1, 0, 0, 1)),
        Term((0, 0, 1, 1), (1, 0, 0, 0), (0, 0, 1, -1)),
        Term((1, 0, 0, 0), (0, 1, 0, -1), (0, 1, 0, 1)),
        Term((0, 0, 0, 1), (-1, 0, 1, 0), (1, 0, 1, 0)),
        Term((1, 1, 0, 0), (0, 0, 0, 1), (-1, 1, 0, 0)),
        Term((-1, 0, 1, 0), (1, 1, 0, 0), (0, 0, 0, 1)),
        Term((0, 1, 0, -1), (0, 0, 1, 1), (1, 0, 0, 0)),
    ),
    # Winograd's form of it, as in Higham, section 23.1.
    "winograd": (
        Term((1, 0, 0, 0), (1, 0, 0, 0), (1, 1, 1, 1)),
        Term((0, 1, 0, 0), (0, 0, 1, 0), (1, 0, 0, 0)),
        Term((1, 1, -1, -1), (0, 0, 0, 1), (0, 1, 0, 0)),
        Term((0, 0, 0, 1), (1, -1, -1, 1), (0, 0, -1, 0)),
        Term((0, 0, 1, 1), (-1, 1, 0, 0), (0, 1, 0, 1)),
        Term((-1, 0, 1, 1), (1, -1, 0, 1), (0, 1, 1, 1)),
        Term((1, 0, -1, 0), (0, -1, 0, 1), (0, 0, 1, 1)),
    ),
}


def scheme(form: str, levels: int) -> tuple[Term, ...]:
    """Return the products of a scheme of so many levels, over 2**levels x 2**levels blocks."""
    terms: tuple[Term, ...] = (Term((1,), (1,), (1,)),)
    for level in range(levels):
        side = 2**level
        terms = tuple(
            Term(_nested(x.a, y.a, side), _nested(x.b, y.b, side), _nested(x.c, y.c, side))
            for x in FORMS[form]
            for y in terms
        )
    return terms


def _nested(outer: Signs, inner: Signs, side: int) -> Signs:
    """Return the signs of the blocks of a 2 x 2 matrix whose quadrants are side x side blocks."""
    return tuple(
        outer[i // side * 2 + j // side] * inner[i % side * side + j % side]
        for i in range(2 * side)
        for j in range(2 * side)
    )


def bound(k: int, levels: int = 2, winograd: bool = True) -> float:
    """Return f(k) of the normwise bound f(k) u max|A| max|B|; by default for the loosest choice.

    Higham, theorems 23.2 and 23.3: 12**levels (k0**2 + 5 k0) - 5 k with k0 = k / 2**levels for Strassen's form, and
    18 and 6 instead of 12 and 5 for Winograd's, which adds sums of sums.
    """
    growth, additions = (18, 6) if winograd else (12, 5)
    rest = -(-k // 2**levels)
    return float(growth**levels * (rest * rest + additions * rest) - additions * k)


def build(problem: Problem, config: Mapping[str, int]) -> Launch:
    """Return the kernel of 7**levels products of sums of blocks; it runs on the caller's thread.

    By default there are two levels from n = 4096 on. `winograd` = 1 uses Winograd's form. It needs 15 additions instead
    of 18 where sums are stored and reused. Here no sum is stored, and its longer sums cost 28 reads of blocks and 14
    updates per level, against 24 and 12 in Strassen's form.
    """
    target, sizes = host(), tile(host())
    levels = config.get("levels") or (2 if min(problem.m, problem.n, problem.k) >= _TWO_LEVELS else 1)
    form = "winograd" if config.get("winograd") else "strassen"
    element = dtypes.get(problem.dtype).llvm
    product = Product(problem.dtype, problem.out, element, element)
    entries = jit.load(
        target, f"{form}{levels}_{product.name}", lambda: strassen(target, product, scheme(form, levels))
    )
    register, side = register_tile(target, product), 2**levels
    # Twice the depth and width of the packed product's blocks: C is updated and A packed half as often.
    kc, nc = config.get("kc", 2 * sizes.kc), config.get("nc", 2 * sizes.nc)

    def blocks(m: int, n: int, k: int) -> Blocks:
        tall, wide = even(m // side, sizes.mc, register.mr), even(n // side, nc, register.nr)
        deep = even(k // side, kc, 1)
        return Blocks(tall, deep, wide, _workspace_bytes(product, register, tall, deep, wide))

    return Launch(entries["strassen"], element, SIZES[element], blocks)


def _workspace_bytes(product: Product, register: RegisterTile, mc: int, kc: int, nc: int) -> int:
    a, b = operands(product, register)
    return mc // a.width * panel_bytes(a, kc) + nc // b.width * panel_bytes(b, kc) + 4 * _ROOM


_SUM = (("i64", "outer"), ("i64", "inner"), "source", ("i64", "outer_step"), ("i64", "inner_step"))
_TERMS = ("terms", ("i64", "terms_count"))


def strassen(target: Target, product: Product, terms: Sequence[Term]) -> Module:
    """Return the module of one scheme; its entry is `strassen`.

    Its loops:
        for each of 7 products (49 at two levels):
            the five loops of packed, in which
                pack A: a sum of quadrants of A
                pack B: a sum of quadrants of B
                C: the tile is added to several quadrants, each with its sign
    """
    module = Module(target)
    register = register_tile(target, product)
    for panels in operands(product, register):
        pack.pack(module, panels, pack.ROUTINES)
        _pack_sum(module, panels)
    with module.function("add", *_SUM, *_TERMS, "to", local=True) as f:
        _add(f, product)
    _tiles(module, product, register)
    _multiply(module, product, register)
    with module.function("clear", "args", local=True) as f:
        _clear(f, product, Args(f, f["args"]))
    with module.function("strassen", "args") as f:
        _scheme(f, product, terms)
    return module


@dataclass(frozen=True)
class Blocked:
    """A matrix as blocks of equal strides: the first one, the strides, and a list of blocks.

    The list is `count` entries of 16 bytes: the distance of a block from the first one, and its sign as an element.
    """

    at: Value
    row: Value
    col: Value
    terms: Value
    count: Value

    @property
    def values(self) -> tuple[Value, ...]:
        """Return the arguments for a function that takes these blocks."""
        return self.at, self.row, self.col, self.terms, self.count


class _Operand:
    """Return a matrix of the whole product, with space for a list of its blocks."""

    def __init__(self, f: Function, at: Value, row: Value, col: Value, blocks: int) -> None:
        self.f, self.at, self.row, self.col = f, at, row, col
        self.room = f.buffer(16 * blocks)

    def blocks(self, product: Product, signs: Signs, rows: Value, columns: Value) -> Blocked:
        """Return the blocks with a nonzero sign, of rows x columns each."""
        side = round(len(signs) ** 0.5)
        nonzero = [(i, sign) for i, sign in enumerate(signs) if sign]
        for number, (i, sign) in enumerate(nonzero):
            away = rows * (i // side) * self.row + columns * (i % side) * self.col
            self.f.store(away, self.room + 16 * number)
            self.f.store(self.f.const(product.accumulator, sign), self.room + (16 * number + 8))
        return Blocked(self.at, self.row, self.col, self.room, self.f.index(len(nonzero)))

    def whole(self, product: Product, i: Value, j: Value) -> Blocked:
        """Return the matrix from element (i, j) on, as one block."""
        block = self.blocks(product, (1,), self.f.index(0), self.f.index(0))
        return Blocked(self.at + i * self.row + j * self.col, self.row, self.col, block.terms, block.count)


def _scheme(f: Function, product: Product, terms: Sequence[Term]) -> None:
    """Compute every product of the scheme, then the rows and columns outside the blocks."""
    args = Args(f, f["args"])
    size, side = SIZES[product.accumulator], round(len(terms[0].a) ** 0.5)
    m, n, k = args.m, args.n, args.k
    a = _Operand(f, args.a, args.a_row, args.a_col, len(terms[0].a))
    b = _Operand(f, args.b, args.b_row, args.b_col, len(terms[0].b))
    c = _Operand(f, args.c, args.c_row, f.index(size), len(terms[0].c))
    f.call("clear", f["args"])
    tall, wide, deep = m // side, n // side, k // side
    for term in terms:
        f.call(
            "multiply", tall, wide, deep,
            *a.blocks(product, term.a, tall, deep).values,
            *b.blocks(product, term.b, deep, wide).values,
            *c.blocks(product, term.c, tall, wide).values,
            f["args"],
        )  # fmt: skip
    core_m, core_n, core_k = tall * side, wide * side, deep * side

    def plain(rows: Value, columns: Value, depth: Value, i: Value, j: Value, p: Value) -> None:
        f.call(
            "multiply", rows, columns, depth,
            *a.whole(product, i, p).values, *b.whole(product, p, j).values, *c.whole(product, i, j).values, f["args"],
        )  # fmt: skip

    zero = f.index(0)
    plain(core_m, core_n, k - core_k, zero, zero, core_k)
    plain(m, n - core_n, k, zero, core_n, zero)
    plain(m - core_m, core_n, k, core_m, zero, zero)


def _clear(f: Function, product: Product, args: Args) -> None:
    """Compute C = beta C, by rows; the products are added to it afterwards."""
    element, lanes = product.accumulator, f.target.lanes(SIZES[product.accumulator])
    wide, size = vector(lanes, element), SIZES[element]
    n, c, c_row, beta = args.n, args.c, args.c_row, f.load(element, args.beta)
    betas = f.broadcast(beta, lanes)
    with f.if_(beta.differs(1)), f.loop(0, args.m) as i, f.loop(0, n, lanes) as j:
        at, mask = c + i * c_row + j * size, f.first_lanes(n - j, lanes)
        scaled = f.var(f.zero(wide))
        with f.if_(beta.differs(0)):
            scaled.value = f.load_masked(wide, at, mask) * betas
        f.store_masked(scaled.value, at, mask)


def _multiply(module: Module, product: Product, register: RegisterTile) -> None:
    """Define `multiply`: the five loops for sums of blocks; the product is added to every listed block of C."""
    sides = [("i64", side) for side in "mnk"]
    params: list[FunctionParameter] = []
    for name in "abc":
        steps, count = (("i64", f"{name}_{step}") for step in ("row", "col")), ("i64", f"{name}_count")
        params += [name, *steps, f"{name}_terms", count]
    with module.function("multiply", *sides, *params, "args", local=True) as f:
        args = Args(f, f["args"])
        size = SIZES[product.accumulator]
        m, n, k, mc, kc, nc = f["m"], f["n"], f["k"], args.mc, args.kc, args.nc
        a, b, c = (Blocked(*f.parameters[start : start + 5]) for start in (3, 8, 13))
        panels_a, _ = operands(product, register)
        to_a = args.workspace
        to_b = to_a + (mc // register.mr * panel_bytes(panels_a, kc) + (2 * _ROOM - 1)) // _ROOM * _ROOM
        with f.loop(0, n, nc) as j, f.loop(0, k, kc) as p:
            wide, deep = f.min(n - j, nc), f.min(k - p, kc)
            from_b = b.at + p * b.row + j * b.col
            f.call("pack_b_sum", wide, deep, from_b, b.col, b.row, b.terms, b.count, to_b)
            with f.loop(0, m, mc) as i:
                tall = f.min(m - i, mc)
                from_a = a.at + i * a.row + p * a.col
                f.call("pack_a_sum", tall, deep, from_a, a.row, a.col, a.terms, a.count, to_a)
                at = c.at + i * c.row + j * size
                f.call("tiles", tall, wide, deep, to_a, to_b, at, c.row, c.terms, c.count, args.alpha)


def _pack_sum(module: Module, panels: Panels) -> None:
    """Define `<name>_sum`: pack a sum of blocks, added chunk by chunk in L1; a single block is packed directly."""
    size, width = SIZES[panels.product.packed], panels.width
    depth = 1 << ((_CHUNK // width).bit_length() - 1)
    with module.function(f"{panels.name}_sum", *pack.PARAMS[:-1], *_TERMS, "to", local=True) as f:
        count, k, across, along, terms, to = (f[name] for name in ("count", "k", "across", "along", "terms", "to"))
        first = f["source"] + f.load("i64", terms)
        with f.if_(f["terms_count"].equals(1)):
            f.call(panels.name, count, k, first, across, along, to)
        with f.else_():
            room = f.buffer(depth * width * size)
            with f.loop(0, count, width) as i, f.loop(0, k, depth) as p:
                some, deep = f.min(count - i, width), f.min(k - p, depth)
                at = f["source"] + i * across + p * along
                panel = to + i // width * panel_bytes(panels, k) + p * panels.row
                with f.if_(across.equals(size)):
                    f.call("add", deep, some, at, along, across, terms, f["terms_count"], room)
                    f.call(panels.name, some, deep, room, f.index(size), some * size, panel)
                with f.else_():
                    f.call("add", some, deep, at, across, along, terms, f["terms_count"], room)
                    f.call(panels.name, some, deep, room, deep * size, f.index(size), panel)


def _add(f: Function, product: Product) -> None:
    """Compute to[o, i] = sum of sign * source[o, i] over two or more blocks, two at a time; `to` is contiguous."""
    count = f["terms_count"]
    _add_blocks(f, product, f.index(0), 2, first=True)
    even_count = count // 2 * 2
    with f.loop(2, even_count, 2) as t:
        _add_blocks(f, product, t, 2)
    with f.if_(even_count < count):
        _add_blocks(f, product, even_count, 1)


def _add_blocks(f: Function, product: Product, t: Value, count: int, first: bool = False) -> None:
    """Add `count` blocks of the list from the t-th on, by vectors where rows are contiguous."""
    element, size, step, inner = product.accumulator, SIZES[product.accumulator], f["inner_step"], f["inner"]
    lanes = f.target.lanes(size)
    whole = f.select(step.equals(size), inner // lanes * lanes, f.index(0))
    entries = [f["terms"] + (t + number) * 16 for number in range(count)]
    blocks = [f["source"] + f.load("i64", entry) for entry in entries]
    signs = [f.load(element, entry + 8) for entry in entries]
    wide_signs = [f.broadcast(sign, lanes) for sign in signs]

    def add(type_: str, rows: list[Value], scales: list[Value], at: Value) -> None:
        some = [f.load(type_, row) for row in rows]
        total = some[0] * scales[0] if first else f.fma(some[0], scales[0], f.load(type_, at))
        for value, scale in zip(some[1:], scales[1:], strict=True):
            total = f.fma(value, scale, total)
        f.store(total, at)

    with f.loop(0, f["outer"]) as o:
        rows, to = [block + o * f["outer_step"] for block in blocks], f["to"] + o * inner * size
        with f.loop(0, whole, lanes) as i:
            add(vector(lanes, element), [row + i * size for row in rows], wide_signs, to + i * size)
        with f.loop(whole, inner) as i:
            add(element, [row + i * step for row in rows], signs, to + i * size)


def _tiles(module: Module, product: Product, register: RegisterTile) -> None:
    """Define `tiles`: an mc x nc block of the product, each register tile is added to every listed block of C."""
    sides = [("i64", side) for side in ("mc", "nc", "kc")]
    mr, nr, size = register.mr, register.nr, SIZES[product.accumulator]
    with module.function("tiles", *sides, "a", "b", "c", ("i64", "c_row"), *_TERMS, "alpha", local=True) as f:
        mc, nc, kc, c_row = f["mc"], f["nc"], f["kc"], f["c_row"]
        a_panel, b_panel = (panel_bytes(panels, kc) for panels in operands(product, register))
        tile_buffer = f.buffer(mr * nr * size)
        alpha = f.load(product.accumulator, f["alpha"])
        with f.loop(0, nc, nr) as j, f.loop(0, mc, mr) as i:
            c = f["c"] + i * c_row + j * size
            with f.loop(0, f["terms_count"]) as t:
                block = c + f.load("i64", f["terms"] + t * 16)
                for r in range(mr):
                    for v in range(0, nr * size, 64):
                        f.prefetch(block + c_row * r + v, write=True)
            a, b = f["a"] + i // mr * a_panel, f["b"] + j // nr * b_panel
            totals = tile_loop(f, product, register, kc, a, b, 16)
            rows, columns = f.min(mc - i, mr), f.min(nc - j, nr)
            with f.if_(rows.equals(mr) & columns.equals(nr)), f.loop(0, f["terms_count"]) as t:
                entry = f["terms"] + t * 16
                scale = f.load(product.accumulator, entry + 8) * alpha
                _add_whole(f, register, totals, c + f.load("i64", entry), scale)
            with f.else_():
                for number, total in enumerate(total for line in totals for total in line):
                    f.store(total.value, tile_buffer + number * register.lanes * size, align=64)
                with f.loop(0, f["terms_count"]) as t:
                    entry = f["terms"] + t * 16
                    scale = f.load(product.accumulator, entry + 8) * alpha
                    _add_edge(f, register, tile_buffer, c + f.load("i64", entry), scale, rows, columns)


def _add_whole(f: Function, register: RegisterTile, totals: list[list[Var]], c: Value, scale: Value) -> None:
    """Compute C += scale * tile, from the registers."""
    size, lanes = SIZES[scale.type], register.lanes
    scales = f.broadcast(scale, lanes)
    for r, row in enumerate(totals):
        for v, total in enumerate(row):
            at = c + f["c_row"] * r + v * lanes * size
            f.store(f.fma(total.value, scales, f.load(vector(lanes, scale.type), at)), at)


def _add_edge(
    f: Function, register: RegisterTile, tile_buffer: Value, c: Value, scale: Value, rows: Value, columns: Value
) -> None:
    """Compute C += scale * tile for the part of an edge tile inside C, from memory."""
    size, lanes = SIZES[scale.type], register.lanes
    wide = vector(lanes, scale.type)
    scales = f.broadcast(scale, lanes)
    with f.loop(0, rows) as r, f.loop(0, columns, lanes) as v:
        at, mask = c + r * f["c_row"] + v * size, f.first_lanes(columns - v, lanes)
        tile = f.load(wide, tile_buffer + (r * register.nr + v) * size)
        f.store_masked(f.fma(tile, scales, f.load_masked(wide, at, mask)), at, mask)
