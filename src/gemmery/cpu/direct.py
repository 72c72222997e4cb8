"""Products without packing: small ones, where packing costs more than it saves, and skinny ones.

A is read in place, one element broadcast at a time, so it may have any strides; the rows of B and C must be
contiguous. m, n, k and strides are run-time values; a module is made for the few tile shapes into which an m x n
product is cut (`cut`), so a handful of modules serves every size.

Each element of C is one chain of fused multiply-adds over k, as in the packed product within a block of k: for k up to
one block both give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

from gemmery import dtypes
from gemmery.cpu.abi import Args
from gemmery.cpu.ir import SIZES, Function, Module, Value, Var, vector
from gemmery.cpu.target import Target, direct_tile


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

    @property
    def name(self) -> str:
        """A name that says everything above: part of the cache key."""
        flags = "".join(letter for letter, on in (("m", self.masked), ("s", self.scaled)) if on)
        rows, columns = f"{self.mr}-{self.mr_edge}", f"{self.nv}-{self.nv_edge}"
        return f"direct_{self.dtype}_{self.a_layout}_{rows}x{columns}{flags}"


def cut(target: Target, dtype: str, a_layout: str, m: int, n: int, k: int, scaled: bool, rows: int = 0) -> Cut:
    """Choose tiles for an m x n product: as wide as C, then as tall as the registers allow, of nearly equal height.

    `rows` above 0 sets the height instead. Rows of A a multiple of 4 KiB apart share one set of the L1 cache, which has
    8 ways or more, so such a tile has at most 8 rows (2048 x 16 x 2048, f32, Zen 4: 54 GFLOP/s with 16 rows, 107 with
    8).
    """
    most_rows, most_vectors = direct_tile(target)
    size = dtypes.get(dtype).size
    lanes = target.lanes(size)
    vectors = -(-n // lanes)
    nv = min(vectors, most_vectors)
    tallest = most_rows if nv == most_vectors else min(16, most_rows * most_vectors // nv)
    if a_layout == "row" and k * size % 4096 == 0:
        tallest = min(tallest, 8)
    tallest = rows or tallest
    count = -(-m // tallest)
    mr = -(-m // count)
    whole = n // (nv * lanes) * nv
    masked = n % lanes != 0
    return Cut(dtype, a_layout, mr, m % mr, nv if whole else 0, vectors - whole, masked, scaled)


def direct(target: Target, shape: Cut) -> Module:
    """Return the module for a `Cut`; its entry is `direct`."""
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
        scale = (f.load(element, args.alpha), f.load(element, args.beta)) if shape.scaled else None
        tile = _Tile(f, element, lanes, k, a_row, a_col, b_row, c_row, scale)
        size = SIZES[element]

        down = m // shape.mr * shape.mr
        across = n // (shape.nv * lanes) * (shape.nv * lanes) if shape.nv else f.index(0)
        left = n - across - (shape.nv_edge - 1) * lanes
        mask = f.first_lanes(left, lanes) if shape.masked else None

        def rows(j: Value, nv: int, mask: Value | None) -> None:
            """Compute one column of tiles."""
            for start, stop, mr in ((f.index(0), down, shape.mr), (down, m, shape.mr_edge)):
                if mr:
                    with f.loop(start, stop, mr) as i:
                        _tile(tile, mr, nv, mask, a + i * a_row, b + j * size, c + i * c_row + j * size)

        # Edges are loops of one step or none: a thread's part of a product may have no edge.
        if shape.nv:
            with f.loop(0, across, shape.nv * lanes) as j:
                rows(j, shape.nv, None)
        if shape.nv_edge:
            with f.loop(across, n, shape.nv_edge * lanes) as j:
                rows(j, shape.nv_edge, mask)
    return module


class _Tile(NamedTuple):
    """The values that all tiles of a call share."""

    f: Function
    element: str
    lanes: int
    k: Value
    a_row: Value
    a_col: Value
    b_row: Value
    c_row: Value
    scale: tuple[Value, Value] | None


def _tile(t: _Tile, mr: int, nv: int, mask: Value | None, a: Value, b: Value, c: Value) -> None:
    """Compute one mr x (nv vectors) tile of C over all of k."""
    f, size = t.f, SIZES[t.element]
    wide = vector(t.lanes, t.element)
    totals = [[f.var(f.zero(wide)) for _ in range(nv)] for _ in range(mr)]
    # x86 addresses base, base + a_row and base + 2 a_row from one base and one index: one base for every three rows.
    bases = [f.var(a + t.a_row * r) for r in range(0, mr, 3)]
    row = f.var(b)
    with f.loop(0, t.k):
        at = row.value
        columns = [f.load_masked(wide, at + v * t.lanes * size, mask if v == nv - 1 else None) for v in range(nv)]
        row.value = at + t.b_row
        for third, base in enumerate(bases):
            from_here = base.value
            for r in range(3 * third, min(3 * third + 3, mr)):
                one = f.load(t.element, from_here + t.a_row * (r % 3), align=size)
                scale = f.broadcast(one, t.lanes)
                for v in range(nv):
                    totals[r][v].value = f.fma(scale, columns[v], totals[r][v].value)
            base.value = from_here + t.a_col
    for r in range(mr):
        for v in range(nv):
            at = c + t.c_row * r + v * t.lanes * size
            _store(t, totals[r][v], at, mask if v == nv - 1 else None)


def _store(t: _Tile, total: Var, at: Value, mask: Value | None) -> None:
    f = t.f
    if t.scale:
        alpha, beta = t.scale
        total.value = total.value * f.broadcast(alpha, t.lanes)
        with f.if_(beta.differs(0)):
            old = f.load_masked(vector(t.lanes, t.element), at, mask)
            total.value = f.fma(old, f.broadcast(beta, t.lanes), total.value)
    value = total.value
    f.store_masked(value, at, mask)
