"""Products on the tile unit (Intel AMX): 16 x 48 sums in three tile registers, for bfloat16 and 8-bit integers.

A tile register holds 16 rows of 64 bytes. One instruction adds the products of a tile of A (16 rows, 64 bytes of k) and
one of B (64 bytes of k, as 16 cells of 4 bytes, for 16 columns) to a tile of sums, in 16 cycles. The panel of B is
packed as for dot products; in that of A a row's 64 bytes of k are adjacent, so where A is row-major it need not be
packed (Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter 20).

Its loops:
    for each block of nc columns of B, and of kc of its rows:
        pack B[kc, nc]
        for each block of mc rows of A:
            pack A[mc, a chain of k], unless it is read in place    # stays in L2
            for each panel j of B:
                for each part of k, 36 KiB of the panel:            # stays in L1
                    for each 16 rows i of A:
                        three tiles of sums += A[i, part] * B[part, j]
                        store the tiles in L2, or after the last part in C
    Where such a chain of A is too large for L2, the loop over parts is outside and packs A part by part.

A step of three products loads a tile of A, from L2, and three of B, from L1. 2 x 2 tiles of sums load half as many
lines of B, and one register more is in use: from n = 512 to 2048, 16 x 48 sums are 1.1 to 1.3 times as fast beside
busy neighbors, and 1.0 to 1.2 times in a quieter run (docs/findings/tile_unit.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from gemmery import dtypes
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES, vector
from gemmery.cpu.long_k import even, in_order
from gemmery.cpu.pack import Routine, copy_transposed, interleave, load, pack_each, panel, put, row_at, transpose
from gemmery.cpu.panels import CHAIN, Panels, depth, operands, panel_bytes, steps_of
from gemmery.cpu.target import SHALLOW
from gemmery.cpu.ukernel import STEPS, TILE_BYTES, TILE_ROWS, Product, RegisterTile
from gemmery.cpu.update import PARAMS, is_plain, update_edge, update_rounded, update_stored

_SIDE = 2  # rows and columns of tiles in a step of the peak
_A, _B = _SIDE * _SIDE, _SIDE * _SIDE + _SIDE  # its registers of A and of B follow those of the sums
# Operations of a step of `define_peak`, times the bytes of an element.
PEAK_STEP = _A * 2 * TILE_ROWS * TILE_ROWS * TILE_BYTES
_SUM = 4  # bytes
# The palette; bytes of a row of each register from byte 16 on, its rows from byte 48 on.
_CONFIG = (1, 0, 0x0040_0040_0040_0040, 0x0040_0040_0040_0040, 0, 0, 0x1010_1010_1010_1010, 0)
_SUMS = (
    ("i64", "steps"), "a", ("i64", "a_row"), ("i64", "a_step"), "b", "coming",
    ("i64", "coming_step"), ("i64", "coming_line"), "from", ("i1", "adds"), "to", ("i64", "to_row"),
)  # fmt: skip
# What `tiles` takes besides C: the block, its panels, the sums that stay tiles, whether these begin and end here,
# whether they are C as they are, and how much of their k came before.
_TILES = (
    ("i64", "mc"), ("i64", "nc"), ("i64", "kc"), ("i64", "right"),
    "a", ("i64", "a_row"), ("i64", "a_step"), ("i64", "a_panel"), "b", ("i64", "b_panel"),
    "tiled", ("i1", "away"), ("i1", "begins"), ("i1", "ends"), ("i1", "direct"),
    ("i64", "before"),
)  # fmt: skip
_RESIDENT = 512 << 10  # bytes of a block of A, over a chain of k, up to which panels of B go by one at a time
_MENDED = 4  # rows of a tile whose sums are computed at once where some are not finite
_FEW_PANELS = 4  # of B, for which a tile of A whose rows straddle cache lines is loaded from its place
_PAGE = 4096  # bytes apart that 16 rows of A fall into one set of L1, which holds 12 lines
_AWAY = 1 << 20  # bytes of a packed B from which on the next panel is prefetched into L2
_STREAM_AHEAD = 4096  # bytes of the panel by which few of its lines are prefetched while one tile of A uses it
_ROWS_AHEAD = 4  # rows of A that packing prefetches ahead: bf16, n = 2048: 1.15 times as fast
_SWEEP, _CELLS_AHEAD = 4, 8  # panels of B that are packed at once, and cells of k that are prefetched ahead


def configured(f: Function, product: Product) -> AbstractContextManager[None]:
    """Give the tile registers their shape for the body, if the product uses them."""
    return shaped(f) if product.on_tiles else nullcontext()


@contextmanager
def shaped(f: Function) -> Iterator[None]:
    """Give all tile registers their shape, and release them after the body: else a switch of threads saves 8 KiB."""
    config = f.buffer(8 * len(_CONFIG))
    for at, word in enumerate(_CONFIG):
        f.store(f.const("i64", word), config + 8 * at)
    instruction(f, "ldtilecfg", config)
    yield
    instruction(f, "tilerelease")


def block(
    f: Function,
    product: Product,
    register: RegisterTile,
    sizes: tuple[Value, Value, Value, Value],
    a: tuple[Value, Value, Value],
    panels: tuple[Value, Value, Value, Value],
    rest: Sequence[Value],
    packs: Value,
    unity: Value,
) -> None:
    """Add a block of A, mc x kc, times a packed block of B to C, in chains of k that one register sums.

    `sizes` are those of `tiles`, `a` is an address and the strides of rows and of k, `panels` are the buffer for A, the
    panels of B and the bytes of one, and the buffer for sums that stay tiles between the parts of a chain.

    A is read in place where each row of a tile is a cache line of it, and packed if `packs`: at once, if a chain of the
    block stays in L2, else for each part. NumPy's arrays begin 16 bytes after a line, or anywhere.
    """
    tall, wide, deep, right = sizes
    source, a_row, a_col = a
    to_a, to_b, b_panel, tiled = panels
    *to, alpha, beta, bias, bias_step, first, last = rest
    of_a, of_b = operands(product, register)
    whole = (tall & (TILE_ROWS - 1)).equals(0) & (deep & (product.unit - 1)).equals(0) & a_col.equals(of_a.element)
    lines = ((f.emit("i64", f"ptrtoint {source} to i64") | a_row) & (TILE_BYTES - 1)).equals(0)
    spread = (a_row & (_PAGE - 1)).differs(0)
    in_place = (
        whole & (not product.halved) & ((wide <= register.nr) | spread & (lines | (wide <= _FEW_PANELS * register.nr)))
    )
    chain = even(f, deep, CHAIN, product.unit) if product.rounds else f.max(deep, 1)
    away = (wide + (register.nr - 1)) // register.nr * b_panel > _AWAY
    with f.loop(0, f.max(deep, 1), chain) as q:
        long, begins, ends = f.min(deep - q, chain), first & q.equals(0), last & (q + chain >= deep)
        scale = f.select(q.equals(0), beta, unity)
        # A part of a panel need not stay in L1 where only one tile of A goes by.
        most = f.select(tall <= register.mr, f.max(long, 1), f.index(depth(product, register)))
        part = even(f, long, most, product.unit)
        # Panel by panel, the sums between parts are those of one panel, and all of k of the block of A stays in L2.
        resident = (tall * long * of_a.element <= _RESIDENT) | product.halved
        sweep = f.select(resident, f.index(register.nr), wide)
        with f.if_(resident & packs & (in_place ^ True)):
            f.call("pack_a", tall, long, source + q * a_col, a_row, a_col, to_a)
        with f.loop(0, wide, sweep) as j, f.loop(0, f.max(long, 1), part) as p:
            some, short, at = f.min(wide - j, sweep), f.min(long - p, part), source + (q + p) * a_col
            with f.if_(packs & ((in_place | resident) ^ True)):
                f.call("pack_a", tall, short, at, a_row, a_col, to_a)
            packed = to_a + f.select(resident, p // of_a.group * of_a.row, f.index(0))
            f.call(
                "tiles", tall, some, short, right - j, f.select(in_place, at, packed),
                f.select(in_place, a_row, f.index(TILE_BYTES)),
                f.select(in_place, f.index(TILE_BYTES), f.index(register.mr * TILE_BYTES * product.forms)),
                f.select(in_place, a_row * register.mr, panel_bytes(of_a, f.select(resident, long, short))),
                to_b + j // register.nr * b_panel + (q + p) // product.group * of_b.row, b_panel, tiled, away,
                p.equals(0), p + part >= long, _is_sum(f, product, alpha, scale, bias, ends), p,
                to[0] + j * product.out_size, to[1], to[2] + j * SIZES[product.scalar], to[3],
                alpha, scale, bias + j * bias_step, bias_step, begins, ends,
            )  # fmt: skip


def _is_sum(f: Function, product: Product, alpha: Value, beta: Value, bias: Value, ends: Value) -> Value:
    """Return True if C is the sums as they are: alpha is 1, beta 0, and nothing is added or converted."""
    if dtypes.get(product.out).llvm != product.accumulator or product.halved:  # which are looked at first
        return f.const("i1", 0)
    bare = ends ^ True if product.activation else (ends ^ True) | f.is_null(bias)
    return bare & f.load(product.scalar, alpha).equals(1) & f.load(product.scalar, beta).equals(0)


def define(module: Module, product: Product, register: RegisterTile) -> None:
    """Define `tiles`, and what it calls: `sums_RxC`, the sums of R x C tiles of two panels, and `finish`."""
    for rows in range(1, register.mr // TILE_ROWS + 1):
        for columns in range(1, register.nv + 1):
            _define_sums(module, product, register, rows, columns)
    _define_finish(module, product, register)
    if product.halved:
        _define_mend(module, product, register)
    _define_tiles(module, product, register)


def _define_sums(module: Module, product: Product, register: RegisterTile, rows: int, columns: int) -> None:
    """Define `sums_RxC`: sums from those at `from` if it `adds`, else from zero, stored at `to`.

    A part of a panel of B must stay in L1, and a tile of A is used once by it: so loads of A say that. All tiles of B
    pass through one register. Each step prefetches its share of the panel of B that comes next, and of C.

    A tile of B times both forms of one of A are the four products of the halves. The unit sums the first and the
    second products of cells apart, then adds both: A and B exchanged give the same bits.
    """
    forms = product.forms
    last, row, lines = rows * columns, register.nr * _SUM, register.mr * register.nr // 256
    is_c, whole = dtypes.get(product.out).llvm == product.accumulator, last == register.mr // TILE_ROWS * register.nv
    with module.function(f"sums_{rows}x{columns}", *_SUMS, local=True) as f:
        sums = [(r, c, columns * r + c) for r in range(rows) for c in range(columns)]
        with f.if_(f["adds"]):
            for r, c, total in sums:
                load_tile(f, total, f["from"] + r * TILE_ROWS * row + c * TILE_BYTES, row, once=True)
        with f.else_():
            for _, _, total in sums:
                instruction(f, "tilezero", f.const("i8", total))
        with f.loop(0, f["steps"]) as p:
            a, b = f["a"] + p * f["a_step"], f["b"] + p * (TILE_ROWS * row)
            for r in range(rows * forms):
                load_tile(f, last + r, a + f["a_row"] * (r * TILE_ROWS), f["a_row"], once=True)
            for c in range(columns):
                load_tile(f, last + rows * forms, b + c * TILE_BYTES, row)
                for r in range(rows * forms):
                    registers = columns * (r // forms) + c, last + r, last + rows * forms
                    instruction(f, product.step, *(f.const("i8", number) for number in registers))
            for line in range(lines if whole else 0):
                f.prefetch(f["coming"] + p * f["coming_step"] + f["coming_line"] * line, locality=2)
            if is_c:
                for r, c in ((r, c) for r in range(2) for c in range(columns)):
                    to_row = f["to_row"] * ((p * 2 + r) & (rows * TILE_ROWS - 1))
                    f.prefetch(f["to"] + to_row + c * TILE_BYTES, write=True)
        for r, c, total in sums:
            at = f["to"] + f["to_row"] * (r * TILE_ROWS) + c * TILE_BYTES
            instruction(f, "tilestored64", f.const("i8", total), at, f["to_row"])


def _define_finish(module: Module, product: Product, register: RegisterTile) -> None:
    """Define `finish(i, j, rows, columns, stored, ...)`: update C at (i, j) from the sums of a tile in a buffer."""
    params = (("i64", "i"), ("i64", "j"), ("i64", "rows"), ("i64", "columns"), "stored", *PARAMS)
    with module.function("finish", *params, local=True) as f:
        i, j, rows, columns, stored = f.parameters[:5]
        with f.if_(is_plain(f, product, register, rows, columns)):
            if product.sums_apart:
                update_rounded(f, product, register, stored, i, j)
            elif dtypes.get(product.out).llvm == product.accumulator:
                update_stored(f, product, register, stored, f["c"] + i * f["c_row"] + j * product.out_size)
        with f.else_():
            update_edge(f, product, register, stored, register.nr, i, j, rows, columns)


def _define_tiles(module: Module, product: Product, register: RegisterTile) -> None:
    """Define `tiles`: the loops over the register tiles of a block of C, columns outside.

    Sums that end go to C at once if they are C as they are and whole, else to one of two buffers. What is in a buffer
    is stored in C after the next sums have been started, and so while they are computed.
    """
    mr, nr = register.mr, register.nr
    size = mr * nr * _SUM
    with module.function("tiles", *_TILES, *PARAMS, local=True) as f:
        mc, nc, buffers = f["mc"], f["nc"], f.buffer(2 * size)
        place, waits, old_i, old_j = (f.var(f.zero(kind)) for kind in ("i64", "i1", "i64", "i64"))
        wide, steps = (nc + (nr - 1)) // nr, steps_of(product, f["kc"])
        of_a, of_b = operands(product, register)

        def finish() -> None:
            i, j = old_i.value, old_j.value
            at = buffers + (place.value ^ size)
            if product.halved:
                a = f["a"] + i // mr * f["a_panel"] + f["before"] // of_a.group * -of_a.row
                b = f["b"] + j // nr * f["b_panel"] + f["before"] // of_b.group * -of_b.row
                f.call("mend", f.min(mc - i, mr), f["before"] + f["kc"], a, b, at)
            f.call("finish", i, j, f.min(mc - i, mr), f.min(nc - j, nr), at, *f.parameters[len(_TILES) :])

        along, few = f["kc"] <= SHALLOW, mc <= mr
        # From a step to the next, and from a line to the next: all of the panel goes by for one tile of A.
        apart = [
            f.select(few, f.index(nr * TILE_BYTES // by), f.index(mr * nr // 4 // by)) for by in (1, mr * nr // 256)
        ]
        outer, inner = in_order(f, along, (mc, mr), (nc, nr))
        with f.loop(0, *outer) as x, f.loop(0, *inner) as y:
            i, j = f.select(along, x, y), f.select(along, y, x)
            with f.if_(j < f["right"] + (i + mr)):  # else a symmetric product does not need the tile
                rows, columns = f.min(mc - i, mr), f.min(nc - j, nr)
                direct = f["direct"] & rows.equals(mr) & columns.equals(nr)
                tiled = f["tiled"] + (i // mr * wide + j // nr) * size
                c = f["c"] + i * f["c_row"] + j * product.out_size
                to = f.select(f["ends"], f.select(direct, c, buffers + place.value), tiled)
                to_row = f.select(f["ends"] & direct, f["c_row"], f.index(nr * _SUM))
                a, b = f["a"] + i // mr * f["a_panel"], f["b"] + j // nr * f["b_panel"]
                next_panel = f.select(f["away"], f["b_panel"] + i // mr * (steps * (mr * nr // 4)), f.index(0))
                coming = b + f.select(few, f.index(_STREAM_AHEAD), next_panel)
                values = (
                    steps, a, f["a_row"], f["a_step"], b, coming, *apart, tiled, f["begins"] ^ True, to, to_row
                )  # fmt: skip
                _choose(f, register, rows, columns, values)
                with f.if_(waits.value):
                    finish()
                waits.value = f["ends"] & (direct ^ True)
                with f.if_(waits.value):
                    old_i.value, old_j.value, place.value = i, j, place.value ^ size
        with f.if_(waits.value):
            finish()


def _define_mend(module: Module, product: Product, register: RegisterTile) -> None:
    """Define `mend(rows, k, a, b, stored)`: compute those sums of a tile that are not finite by multiply-adds.

    Sums of finite numbers are finite. An infinity times a half that is zero is NaN, so each sum with a number that is
    not finite has one that is not, and then may be NaN in the place of an infinity.
    """
    lanes, row = register.lanes, register.nr * _SUM
    wide = vector(lanes, "float")
    params = (("i64", "rows"), ("i64", "k"), "a", "b", "stored")

    def numbers(cells: Value) -> Value:
        upper, lower = f.bitcast(cells << 16, wide), f.bitcast(cells & -0x10000, wide)
        return upper + f.select(lower.equals(lower), lower, f.zero(wide))

    with module.function("mend", *params, local=True) as f:
        strange = f.var(f.zero(wide))
        with f.loop(0, f["rows"]) as r, f.loop(0, row, lanes * _SUM) as at:
            strange.value = f.fma(f.load(wide, f["stored"] + r * row + at), f.zero(wide), strange.value)
        bits = f.bitcast(strange.value.differs(0), f"i{lanes}")
        with f.if_(bits.differs(0)), f.loop(0, f["rows"], _MENDED) as r:
            sums = [[f.var(f.zero(wide)) for _ in range(register.nv)] for _ in range(_MENDED)]
            with f.loop(0, f["k"]) as p:
                a = f["a"] + p // TILE_ROWS * (product.forms * TILE_ROWS * TILE_BYTES) + (p & (TILE_ROWS - 1)) * _SUM
                b, cells = f["b"] + p * row, vector(lanes, "i32")
                columns = [numbers(f.load(cells, b + v * TILE_BYTES)) for v in range(register.nv)]
                for i, totals in enumerate(sums):
                    scale = numbers(f.broadcast(f.load("i32", a + (r + i) * TILE_BYTES), lanes))
                    for column, total in zip(columns, totals, strict=True):
                        total.value = f.fma(scale, column, total.value)
            for i, totals in enumerate(sums):
                for v, total in enumerate(totals):
                    at = f["stored"] + (r + i) * row + v * TILE_BYTES
                    old = f.load(wide, at)
                    f.store(f.select((old * 0.0).equals(0), old, total.value), at)


def _choose(f: Function, register: RegisterTile, rows: Value, columns: Value, values: Sequence[Value]) -> None:
    """Call the smallest of the functions for tiles that has `rows` and `columns`."""
    with ExitStack() as larger:
        for r in range(1, register.mr // TILE_ROWS + 1):
            for c in range(1, register.nv + 1):
                with f.if_((rows <= r * TILE_ROWS) & (columns <= c * TILE_ROWS)):
                    f.call(f"sums_{r}x{c}", *values)
                larger.enter_context(f.else_())


def define_peak(module: Module, name: str, dtype: str) -> None:
    """Define `name(n, p)`: `n` times four products of tiles of bf16 or int8, which stay in their registers."""
    with module.function(name, ("i64", "n"), "p") as f, shaped(f):
        for number in range(_A, _B + _SIDE):
            load_tile(f, number, f["p"], TILE_BYTES)
        with f.loop(0, f["n"]):
            for total in range(_A):
                registers = total, _A + total // _SIDE, _B + total % _SIDE
                instruction(f, STEPS[dtype], *(f.const("i8", register) for register in registers))


def load_tile(f: Function, register: int, at: Value, row: Value | int, once: bool = False) -> None:
    """Load a tile register from 16 rows of 64 bytes, `row` bytes apart."""
    instruction(f, "tileloaddt164" if once else "tileloadd64", f.const("i8", register), at, f.index(row))


def instruction(f: Function, name: str, *values: Value) -> None:
    """Add an instruction of the tile unit by LLVM's name; register numbers are constants of type i8."""
    f.module.declare(f"declare void @llvm.x86.{name}({', '.join(value.type for value in values)})")
    f.call(f"llvm.x86.{name}", *values)


def _pack_rows(f: Function, panels: Panels) -> None:
    """Pack rows of A, whose elements are adjacent along k: 64 bytes of each, zeros past its end."""
    k, cell = f["k"], panels.group
    whole = k // cell * cell
    # A tile of few rows has others in its register, whose sums nobody reads.
    with f.loop(0, f["count"], panels.width) as i, f.loop(0, f.min(f["count"] - i, panels.width)) as r:
        row, to = row_at(f, i + r), panel(f, panels, i) + r * TILE_BYTES

        def move(p: Value, mask: Value | None, row: Value, to: Value) -> None:
            f.prefetch(row + f["across"] * _ROWS_AHEAD + p * panels.element)
            put(f, panels, load(f, panels, row + p * panels.element, cell, mask), to + p // cell * panels.row)

        with f.loop(0, whole, cell) as p:
            move(p, None, row, to)
        with f.if_(whole < k):
            move(whole, f.first_lanes(k - whole, cell), row, to)


def _pack_columns(f: Function, panels: Panels) -> None:
    """Pack columns of A, whose elements are adjacent down the rows."""
    k, count = f["k"], f["count"]
    with (
        f.loop(0, count, panels.width) as i,
        f.loop(0, _rows(f, panels, i), TILE_ROWS) as first,
        f.loop(0, k, panels.group) as p,
    ):
        _transpose(f, panels, i, first, p)


def _pack_cells(f: Function, panels: Panels) -> None:
    """Pack columns of B whose elements are adjacent across: several panels of a row at once, as it lies in memory."""
    k, count, group = f["k"], f["count"], panels.product.group
    whole, width, sweep = k // group * group, panels.width, _SWEEP * panels.width

    def step(first: Value, p: Value, rows: list[Value], exists: Sequence[Value | None]) -> None:
        with f.loop(first, f.min(first + sweep, count), width) as i:
            to = panel(f, panels, i) + p // group * panels.row
            sources = [row + i * panels.element for row in rows]

            def cells(masks: Sequence[Value | None]) -> None:
                for v, mask in enumerate(masks):
                    at = v * TILE_ROWS
                    loaded = [load(f, panels, row + at * panels.element, TILE_ROWS, mask) for row in sources]
                    known = [
                        x if yes is None else f.select(yes, x, f.zero(x.type))
                        for x, yes in zip(loaded, exists, strict=True)
                    ]
                    f.store(interleave(f, known), to + at * 4)

            with f.if_(count - i >= width):
                for row in sources:
                    f.prefetch(row + f["along"] * (_CELLS_AHEAD * group))
                cells([None] * (width // TILE_ROWS))
            with f.else_():
                cells([f.first_lanes(f.max(count - i - v, 0), TILE_ROWS) for v in range(0, width, TILE_ROWS)])

    with f.loop(0, count, sweep) as first:
        with f.loop(0, whole, group) as p:
            step(first, p, [f["source"] + (p + g) * f["along"] for g in range(group)], [None] * group)
        with f.if_(whole < k):
            rows = [f["source"] + f.min(whole + g, k - 1) * f["along"] for g in range(group)]
            step(first, whole, rows, [None, *[whole + g < k for g in range(1, group)]])
    nothing = f.zero(vector(TILE_ROWS, "i32"))
    padding = (k + (group - 1)) // group, panels.steps(k)
    with f.loop(0, count, width) as i, f.loop(*padding) as p, f.loop(0, panels.row, TILE_BYTES) as at:
        f.store(nothing, panel(f, panels, i) + p * panels.row + at)


def _rows(f: Function, panels: Panels, i: Value) -> Value:
    """Return the rows that are read of the panel from row `i` on: those of one tile, or of two."""
    return f.select(f["count"] - i > TILE_ROWS, f.index(panels.width), f.index(TILE_ROWS))


def _transpose(f: Function, panels: Panels, i: Value, first: Value, p: Value) -> None:
    """Pack 16 rows from `first` on of the panel of row `i`, and 64 bytes of k from `p` on."""
    k, group, count = f["k"], panels.product.group, f["count"]
    source, rest = f["source"] + (i + first) * panels.element, f.max(count - i - first, 0)
    cells = []
    for at in range(0, panels.group, group):
        rows = []
        for q in range(at, at + group):
            exists = f.first_lanes(f.select(p + q < k, rest, f.index(0)), TILE_ROWS)
            rows.append(load(f, panels, source + (p + q) * f["along"], TILE_ROWS, exists))
        cells.append(f.bitcast(interleave(f, rows), vector(TILE_ROWS, "i32")))
    to = panel(f, panels, i) + first * TILE_BYTES + p // panels.group * panels.row
    for r, row in enumerate(transpose(f, cells)):
        put(f, panels, row, to + r * TILE_BYTES)


ROUTINES_A: Mapping[str, Routine] = {"copy": _pack_columns, "transpose": _pack_rows, "each": pack_each}
ROUTINES_B: Mapping[str, Routine] = {"copy": _pack_cells, "transpose": copy_transposed, "each": pack_each}
