"""Products without packing: small ones, where packing costs more than it saves, and skinny ones.

A is read in place, one element broadcast at a time, so it may have any strides; the rows of B and C must be
contiguous. m, n, k, strides, alpha and beta are run-time values. There are two kinds of module:

- `general`: one for an element type, with a function for each height and width of the register tile; the call chooses
  among them. It serves every shape.
- `direct`: one for the few tile shapes into which an m x n product is cut (`cut`).

Each element of C is one chain of fused multiply-adds over a block of k in both, and the sums of blocks are added in
order, so their bits are the same, and those of the packed product (with alpha or beta, for k of one block).
"""

from __future__ import annotations

from functools import partial

from gemmery import dtypes
from gemmery.cpu.abi import Args
from gemmery.cpu.ir import Function, Module, Value, Var
from gemmery.cpu.ir_types import SIZES, vector
from gemmery.cpu.long_k import even
from gemmery.cpu.panels import STACK
from gemmery.cpu.target import Target, direct_tile
from gemmery.cpu.ukernel import SEMIRINGS, Product, added, multiply_add
from gemmery.tuples import NamedTuple


class Cut(NamedTuple):
    """The register tiles into which an m x n product is cut.

    Rows: tiles of `mr`, then one of `mr_edge` (0: none). Columns: tiles of `nv` vectors, then one of `nv_edge`
    vectors (0: none), its last vector under a mask when `masked`.
    """

    dtype: str
    a_layout: str
    mr: int
    mr_edge: int
    nv: int
    nv_edge: int
    masked: bool
    scaled: bool  # alpha is not 1, or beta is not 0
    semiring: str = ""

    @property
    def name(self) -> str:
        """A name that says everything above: part of the cache key."""
        flags = "".join(letter for letter, on in (("m", self.masked), ("s", self.scaled)) if on)
        rows, columns = f"{self.mr}-{self.mr_edge}", f"{self.nv}-{self.nv_edge}"
        return f"direct_{self.dtype}{self.semiring}_{self.a_layout}_{rows}x{columns}{flags}"


# Rows of A a multiple of 4 KiB apart share one set of the L1 cache, which has 8 ways or more, so tiles of such rows
# have at most 8 (2048 x 16 x 2048, f32, Zen 4: 54 GFLOP/s with 16 rows, 107 with 8).
_SAME_SET = 4096
_WAYS = 8
_LINE = 64  # bytes of a cache line
# A B that is not in a cache yet is read down k, a row per step, which no hardware prefetcher follows. Prefetching the
# columns of the next tile doubles the speed there (20 x 856 x 503, f32, Zen 5, B in memory: 65 GFLOP/s against 30).
# Tiles of fewer rows have no time for it: with 8 rows and B in a cache it costs 9 %.
_AHEAD_FROM = 10


def cut(
    target: Target, dtype: str, a_layout: str, m: int, n: int, k: int, scaled: bool, rows: int = 0, semiring: str = ""
) -> Cut:
    """Choose tiles for an m x n product: as wide as C, then as tall as the registers allow, of nearly equal height.

    `rows` above 0 sets the height instead.
    """
    most_rows, most_vectors = direct_tile(target)
    size = dtypes.get(dtype).size
    lanes = target.lanes(size)
    vectors = -(-n // lanes)
    nv = min(vectors, most_vectors)
    tallest = most_rows if nv == most_vectors else min(16, most_rows * most_vectors // nv)
    if a_layout == "row" and k * size % _SAME_SET == 0:
        tallest = min(tallest, _WAYS)
    count = -(-m // (rows or tallest))
    mr = -(-m // count)
    whole = n // (nv * lanes) * nv
    masked = n % lanes != 0
    return Cut(dtype, a_layout, mr, m % mr, nv if whole else 0, vectors - whole, masked, scaled, semiring)


def direct(target: Target, shape: Cut) -> Module:
    """Return the module for a `Cut`; its entry is `direct`.

    Its loops:
        mr, nv = tiles as wide as C, then as tall as the registers allow, of nearly equal height
        for each tile of nv vectors j of C, the last one narrower:
            for each tile of mr rows i, the last one lower:
                sums = 0, in registers
                for p in 0..k:
                    sums += A[i..., p] * B[p, j...]
                C[i..., j...] = sums
    """
    module = Module(target)
    element = dtypes.get(shape.dtype).llvm
    lanes = target.lanes(SIZES[element])
    with module.function("direct", ("ptr", "args")) as f:
        args = Args(f, f["args"])
        m, n, k = args.m, args.n, args.k
        a, b, c = args.a, args.b, args.c
        a_row, a_col, b_row, c_row = args.a_row, args.a_col, args.b_row, args.c_row
        if shape.a_layout == "row":
            a_col = f.index(SIZES[element])
        if shape.a_layout == "col":
            a_row = f.index(SIZES[element])
        size, block = SIZES[element], even(f, k, args.kc)

        down = m // shape.mr * shape.mr
        across = n // (shape.nv * lanes) * (shape.nv * lanes) if shape.nv else f.index(0)
        rest = n - across - (shape.nv_edge - 1) * lanes
        mask = f.first_lanes(rest, lanes) if shape.masked else None

        scale = (f.load(element, args.alpha), f.load(element, args.beta)) if shape.scaled else None
        product = _product(shape.dtype, shape.semiring)
        tile = _Tile(f, product, lanes, f.index(0), k, block, a_row, a_col, b_row, c_row, scale)

        def rows(j: Value, nv: int, mask: Value | None) -> None:
            """Compute one column of tiles."""
            for start, stop, mr in ((f.index(0), down, shape.mr), (down, m, shape.mr_edge)):
                if mr:
                    with f.loop(start, stop, mr) as i:
                        _compute(tile, mr, nv, mask, a + i * a_row, b + j * size, c + i * c_row + j * size, mask)

        # Edges are loops of one step or none: a thread's part of a product may have no edge.
        if shape.nv:
            with f.loop(0, across, shape.nv * lanes) as j:
                rows(j, shape.nv, None)
        if shape.nv_edge:
            with f.loop(across, n, shape.nv_edge * lanes) as j:
                rows(j, shape.nv_edge, mask)
    return module


def _product(dtype: str, semiring: str) -> Product:
    """Return the types of a product, which is added up in the elements of C, and its step."""
    element = dtypes.get(dtype).llvm
    return Product(dtype, dtype, element, element, step=semiring or "fma")


class _Tile(NamedTuple):
    """The values that all tiles of a function share."""

    f: Function
    product: Product
    lanes: int
    start: Value  # of k
    k: Value  # its end
    block: Value  # of k
    a_row: Value
    a_col: Value
    b_row: Value
    c_row: Value
    scale: tuple[Value, Value] | None = None

    @property
    def element(self) -> str:
        """The LLVM type of the elements of A, B and C."""
        return self.product.accumulator


def _compute(
    t: _Tile,
    mr: int,
    nv: int,
    mask: Value | None,
    a: Value,
    b: Value,
    c: Value,
    c_mask: Value | None,
    ahead: bool = False,
    copy: Value | None = None,
) -> None:
    """Compute one mr x (nv vectors) tile of A B, and store it block by block of k; the last vector under the mask.

    Each step prefetches a share of the rows of A below, into L2: each row is a stream of its own, as short as a page
    (947 x 11 x 327, f32, Zen 4, A in memory: 138 us without, 88; in a cache 86 and 86). With `ahead` it prefetches what
    the tile to the right reads of its row of B. All blocks of a tile come before the next tile, so that the rows of A
    are streams. What it reads of a block of B is written to `copy`.
    """
    f, size = t.f, SIZES[t.element]
    wide = vector(t.lanes, t.element)
    begins = SEMIRINGS[t.product.step][2] if t.product.step in SEMIRINGS else 0
    with f.loop(t.start, f.max(t.k, 1), t.block) as p:
        start = f.const(wide, begins)
        totals = [[f.var(start) for _ in range(nv)] for _ in range(mr)]
        # x86 addresses base, base + a_row and base + 2 a_row from one base and one index: one for every three rows.
        bases = [f.var(a + p * t.a_col + t.a_row * r) for r in range(0, mr, 3)]
        row = f.var(b + p * t.b_row)
        below = f.var(a + t.a_row * mr + p * (mr * size))
        to = None if copy is None else f.var(copy)
        with f.loop(0, f.min(t.k - p, t.block)):
            at = row.value
            columns = [f.load_masked(wide, at + v * t.lanes * size, mask if v == nv - 1 else None) for v in range(nv)]
            if to:
                for v, column in enumerate(columns):
                    f.store(column, to.value + v * t.lanes * size)
                to.value = to.value + nv * t.lanes * size
            if ahead:
                for line in range(0, nv * t.lanes * size, _LINE):
                    f.prefetch(at + nv * t.lanes * size + line)
            for line in range(0, mr * size, _LINE):
                f.prefetch(below.value + line, locality=2)
            below.value, row.value = below.value + mr * size, at + t.b_row
            for third, base in enumerate(bases):
                from_here = base.value
                for r in range(3 * third, min(3 * third + 3, mr)):
                    number = f.load(t.element, from_here + t.a_row * (r % 3), align=size)
                    scale = f.broadcast(number, t.lanes)
                    for v in range(nv):
                        totals[r][v].value = multiply_add(f, t.product, scale, columns[v], totals[r][v].value)
                base.value = from_here + t.a_col
        _store(t, totals, c, c_mask, p > 0)


def _store(t: _Tile, totals: list[list[Var]], c: Value, mask: Value | None, later: Value) -> None:
    """Store a tile: alpha times the sums plus beta C with a `scale`, else the sums; add to those of `later` blocks."""
    f, wide = t.f, vector(t.lanes, t.element)
    places = [
        (total, c + t.c_row * r + v * t.lanes * SIZES[t.element], mask if v == len(row) - 1 else None)
        for r, row in enumerate(totals)
        for v, total in enumerate(row)
    ]
    if t.scale is None:
        with f.if_(later):
            for total, at, last in places:
                total.value = added(f, t.product, f.load_masked(wide, at, last), total.value)
    for total, at, last in places:
        if t.scale:
            alpha, beta = t.scale[0], f.select(later, f.const(t.element, 1), t.scale[1])
            total.value = total.value * f.broadcast(alpha, t.lanes)
            with f.if_(beta.differs(0)):
                total.value = f.fma(f.load_masked(wide, at, last), f.broadcast(beta, t.lanes), total.value)
        f.store_masked(total.value, at, last)


# The general module.

_ROWS = (("ptr", "args"), ("i64", "j"), ("i64", "left"), ("i1", "plain"), ("ptr", "room"), ("i64", "block"))
_COLUMN = (
    ("ptr", "args"), ("i64", "first"), ("i64", "last"), ("i64", "start"), ("i64", "end"), ("ptr", "b"),
    ("i64", "b_row"), ("i64", "left"), ("ptr", "c"), ("i64", "c_row"), ("i64", "block"), ("ptr", "copy"),
)  # fmt: skip
_FINISH = (("ptr", "args"), ("ptr", "c"), ("i64", "mr"), ("i64", "nv"), ("i64", "left"), ("ptr", "room"))


class _Width(NamedTuple):
    """A width of tiles: `nv` vectors, the last one under a mask when `masked`, for at least `least` columns."""

    nv: int
    masked: bool
    least: int

    @property
    def name(self) -> str:
        return f"{self.nv}{'m' if self.masked else ''}"


def _widths(target: Target, lanes: int) -> list[_Width]:
    """Return the widths of the general module, widest first. With AVX-512 masks are free, so every tile has one."""
    most = range(direct_tile(target)[1], 0, -1)
    if target.isa == "avx512":
        return [_Width(nv, True, (nv - 1) * lanes + 1) for nv in most]
    return [*(_Width(nv, False, nv * lanes) for nv in most), _Width(1, True, 1)]


def heights(target: Target, nv: int, masked: bool = True) -> tuple[int, ...]:
    """Return the heights of the general module's tiles of `nv` vectors, in ascending order.

    Each costs 4 ms to compile. Those left out cost nothing: two tiles of half the height keep as many chains of
    multiply-adds in flight as the CPU can (with one vector and 13 or 15 rows, 10 to 20 % fewer).
    """
    rows, vectors = direct_tile(target)
    every = range(1, min(16, rows * vectors // nv) + 1)
    if target.isa == "avx512":
        return tuple(mr for mr in every if mr not in ((13, 15) if nv == 1 else (9, 11)))
    return tuple(mr for mr in every if mr in (1, 2, 3, 4, 6, 8, 12) or (mr < 7 and not masked))


def general(target: Target, dtype: str, semiring: str = "") -> Module:
    """Return the module for every shape of a type; its entry is `direct`, C = alpha A B + beta C."""
    module, product = Module(target), _product(dtype, semiring)
    element = product.accumulator
    lanes, size = target.lanes(SIZES[element]), SIZES[element]
    _finish(module, element, lanes)
    widths = _widths(target, lanes)
    for width in widths:
        for mr in heights(target, width.nv, width.masked):
            _column(module, product, lanes, mr, width)
        if _copies(target, width):
            _column(module, product, lanes, _copying(target, width), width, copies=True)
        _rows(module, width, lanes, size)
    copy = STACK // (lanes * size) if target.copied else 0
    largest = max(copy, *(heights(target, width.nv)[-1] * width.nv for width in widths))
    with module.function("direct", ("ptr", "args")) as f:
        args = Args(f, f["args"])
        n = args.n
        plain = f.load(element, args.alpha).equals(1) & f.load(element, args.beta).equals(0)
        room = f.buffer(largest * lanes * size)
        block = even(f, args.k, args.kc)
        j = f.var(f.index(0))

        def widest(rest: Value, widths: list[_Width]) -> None:
            """Run the widest tiles that fit the columns left."""
            if widths:
                nv, _, least = widths[0]
                fits = rest >= least
                if nv > 2:  # two tiles of 2 vectors, not one of 3 and one of 1
                    fits = fits & ((rest <= nv * lanes) | (rest > (nv + 1) * lanes))
                with f.if_(fits):
                    f.call(f"rows_{widths[0].name}", f["args"], j.value, rest - (nv - 1) * lanes, plain, room, block)
                    j.value = j.value + nv * lanes
                with f.else_():
                    widest(rest, widths[1:])

        with f.while_() as again:
            rest = n - j.value
            again.until(rest <= 0)
            widest(rest, widths)
    return module


def _rows(module: Module, width: _Width, lanes: int, size: int) -> None:
    """Define `rows_WIDTH`: all tiles of one width, down the rows, of nearly equal height.

    A tile that is not stored as it is goes to `room`, from where `finish` stores it: alpha and beta cost plain products
    nothing, and there is one copy of the code for them. So does one with a mask, except with AVX-512.
    """
    nv, every = width.nv, heights(module.target, width.nv, width.masked)
    tallest, row = every[-1], width.nv * lanes * size
    with module.function(f"rows_{width.name}", *_ROWS, local=True) as f:
        args = Args(f, f["args"])
        m, k, a_row, c, c_row = args.m, args.k, args.a_row, args.c + f["j"] * size, args.c_row
        start = f.select(args.below > 0, f.max(f["j"] + 1 - args.below, 0), f.index(0))
        same_set = (a_row & (_SAME_SET - 1)).equals(0) & args.a_col.equals(size)
        most = f.select(same_set, f.index(min(tallest, _WAYS)), f.index(tallest))
        # Each block of k of a B that is copied is one pass down the rows; a plain product needs no `room` for tiles.
        # A workspace of `mc` bytes has the copies that are too large for a thread's stack.
        copies, place = None, f["room"]
        if _copies(module.target, width):
            needs = f["block"] * row
            place = f.select(needs <= STACK, place, args.workspace)
            copies = f["plain"] & (m - start >= module.target.copied) & (needs <= f.max(args.mc, STACK))
            # A copy makes streams of A end with a block of k (2048 x 16 x 2048, f64, Zen 3: 7.6 ms, 5.2 in place).
            if module.target.isa == "avx2":
                copies = copies & ((args.b_row > 2 * _LINE) | (k <= f["block"]))
        span = f.max(k, 1) if copies is None else f.select(copies, f["block"], f.max(k, 1))
        with f.loop(0, f.max(k, 1), span) as p:
            done, b, b_row, end = f.var(start), f.var(args.b + f["j"] * size), f.var(args.b_row), f.min(k - p, span) + p
            if copies is not None:
                with f.if_(copies):
                    done.value = start + _copying(module.target, width)
                    f.call(
                        f"copying_{width.name}", f["args"], start, done.value, p, end, b.value, b_row.value, f["left"],
                        c, c_row, f["block"], place,
                    )  # fmt: skip
                    b.value, b_row.value = place + p * -row, f.index(row)
            with f.while_() as again:
                first, rest = done.value, m - done.value
                again.until(rest <= 0)
                height, last, to, step = f.var(rest), f.var(m), f.var(c), f.var(c_row)
                with f.if_(rest > most):
                    count = (rest + (most - 1)) // most
                    height.value = (rest + (count - 1)) // count
                for missing in range(1, tallest):
                    if missing not in every:
                        with f.if_(height.value.equals(missing)):
                            up, half = (min(mr for mr in every if mr >= x) for x in (missing, (missing + 1) // 2))
                            height.value = f.select(rest >= up, f.index(up), f.index(half))
                mr = height.value
                with f.if_(mr < rest):
                    last.value = first + rest // mr * mr
                with f.if_(_is_aside(f, width)):
                    last.value, to.value, step.value = first + mr, f["room"] + first * -row, f.index(row)
                done.value = last.value
                columns = (
                    f["args"], first, last.value, p, end, b.value, b_row.value, f["left"], to.value, step.value,
                    f["block"], f["room"],
                )  # fmt: skip
                f.switch(mr, {mr: partial(f.call, f"column_{mr}x{width.name}", *columns) for mr in every})
                with f.if_(_is_aside(f, width)):
                    f.call("finish", f["args"], c + first * c_row, mr, f.index(nv), f["left"], f["room"])


def _is_aside(f: Function, width: _Width) -> Value:
    """Return True if tiles of this width are stored by `finish`."""
    return f["plain"] ^ True if _stores_its_mask(f.target, width) else f.const("i1", 1)


def _copies(target: Target, width: _Width) -> bool:
    """Return True if the first tile of this width may copy what it reads of B."""
    return target.copied > 0 and _stores_its_mask(target, width)


def _copying(target: Target, width: _Width) -> int:
    """Return the rows of that tile."""
    return min(_WAYS, heights(target, width.nv, width.masked)[-1])


def _stores_its_mask(target: Target, width: _Width) -> bool:
    return not width.masked or target.isa == "avx512"


def _column(module: Module, product: Product, lanes: int, mr: int, width: _Width, copies: bool = False) -> None:
    """Define `column_MRxWIDTH`: tiles of mr rows, from row `first` to `last`, in the columns at `b`.

    With `copies` it is `copying_WIDTH`, which writes what it reads of B to `copy`, as rows of whole vectors.
    """
    name = f"copying_{width.name}" if copies else f"column_{mr}x{width.name}"
    with module.function(name, *_COLUMN, local=True) as f:
        args = Args(f, f["args"])
        a, b = args.a, f["b"]
        tile = _Tile(
            f, product, lanes, f["start"], f["end"], f["block"], args.a_row, args.a_col, f["b_row"], f["c_row"]
        )  # fmt: skip
        mask = f.first_lanes(f["left"], lanes) if width.masked else None
        c_mask = mask if _stores_its_mask(f.target, width) else None
        with f.loop(f["first"], f["last"], mr) as i:
            at = f["c"] + i * f["c_row"]
            copy, ahead = f["copy"] if copies else None, copies or mr >= _AHEAD_FROM
            _compute(tile, mr, width.nv, mask, a + i * tile.a_row, b, at, c_mask, ahead, copy)


def _finish(module: Module, element: str, lanes: int) -> None:
    """Define `finish`: C = alpha * (a tile in `room`) + beta * C, the last of its nv vectors with `left` columns."""
    size, wide = SIZES[element], vector(lanes, element)
    with module.function("finish", *_FINISH, local=True) as f:
        args = Args(f, f["args"])
        nv, c_row, wide_bytes = f["nv"], args.c_row, lanes * size
        alpha, beta = f.broadcast(f.load(element, args.alpha), lanes), f.load(element, args.beta)

        def rows(betas: Value | None) -> None:
            with f.loop(0, nv) as v:
                mask = f.first_lanes(f.select((v + 1).equals(nv), f["left"], f.index(lanes)), lanes)
                at, room = f.var(f["c"] + v * wide_bytes), f.var(f["room"] + v * wide_bytes)
                with f.loop(0, f["mr"]):
                    to, total = at.value, f.load(wide, room.value) * alpha
                    if betas:
                        total = f.fma(f.load_masked(wide, to, mask), betas, total)
                    f.store_masked(total, to, mask)
                    at.value, room.value = to + c_row, room.value + nv * wide_bytes

        with f.if_(beta.differs(0)):
            rows(f.broadcast(beta, lanes))
        with f.else_():
            rows(None)
