"""Few rows of A against a large B: B is read once, in order, and C is kept in L2.

A register tile that runs down k jumps a whole row of B per step: for a B larger than L2 every step is a new page,
which no prefetcher follows. This kernel instead walks `depth` rows of B in parallel, as streams. Each vector of C is
loaded, gets `depth` multiply-adds and is stored. C is traversed k / depth times, so the sums of `nc` columns stay in
L2, packed: m rows a power of two apart would share one set of the L1 cache. The `depth` columns of A are packed for the
same reason. An element of C is one chain of fused multiply-adds over a block of k; the sums of blocks are kept apart.
"""

from __future__ import annotations

import itertools

from gemmery import dtypes
from gemmery.cpu.abi import Args
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES, vector
from gemmery.cpu.long_k import define_fold, even, in_levels
from gemmery.cpu.target import Target
from gemmery.tuples import NamedTuple


class Streams(NamedTuple):
    """The sizes of one module: rows of B walked together, and vectors of each per step."""

    dtype: str
    depth: int
    nv: int

    @property
    def name(self) -> str:
        """A name that says everything above: part of the cache key."""
        return f"streamed_{self.dtype}_{self.depth}x{self.nv}"


def sizes(target: Target, m: int) -> tuple[int, int]:
    """Return (depth, nv) for m rows: depth * nv vectors of B and nv sums stay in registers.

    For few rows, more of B is in flight. For more rows, each load and store of a sum serves more multiply-adds, and
    each number of A that is spread over a register more vectors (16 x 2048 x 2048, f64, Emerald Rapids: 2.7 ms by 8 x 2
    and 8 x 3, 3.8 by 4 x 4; 64 rows: 10.4, 9.6 and 14.8). With AVX2 4 x 3 fill its 16 registers, with 10 loads and
    stores for 12 multiply-adds, 4 x 2 with 8 for 8.
    """
    if target.isa != "avx512":
        return (4, 3) if target.isa == "avx2" else (4, 2)
    if m <= 6:
        return 8, 2
    return (8, 3) if target.is_intel else (4, 4)


def streamed(target: Target, shape: Streams) -> Module:
    """Return the module; its entry is `streamed`, C = alpha A B + beta C.

    Its loops:
        for each block of nc columns of B:
            sums[m, nc] = 0, packed, in L2
            for each `depth` rows p of B:
                for each vector j of the block:
                    rows = B[p..., j...], `depth` vectors, each from a stream of its own
                    for i in 0..m:
                        sums[i, j...] += A[i, p...] * rows, `depth` multiply-adds
            C = sums
    """
    module = Module(target)
    element = dtypes.get(shape.dtype).llvm
    lanes, size = target.lanes(SIZES[element]), SIZES[element]
    step = shape.nv * lanes
    with module.function("block", *_BLOCK, local=True) as f:
        _block(f, element, lanes, shape.nv, shape.depth)
    with module.function("row", *_BLOCK, local=True) as f:
        _block(f, element, lanes, shape.nv, 1)
    with module.function("finish", *_FINISH, local=True) as f:
        _finish(f, element, lanes, shape.nv)
    define_fold(module, element)
    with module.function("streamed", "args") as f:
        args = Args(f, f["args"])
        m, n, k, nc, c, c_row = args.m, args.n, args.k, args.nc, args.c, args.c_row
        a, a_row, a_col, b, b_row = args.a, args.a_row, args.a_col, args.b, args.b_row
        alpha, beta, sums = args.alpha, args.beta, args.workspace
        apart = (nc + (step - 1)) // step * step * m * size
        column, block = sums + apart * 3, even(f, k, args.kc)
        with f.loop(0, n, nc) as j:
            wide = f.min(n - j, nc)
            lines = (wide + (step - 1)) // step * m * shape.nv
            with f.loop(0, lines) as line:
                f.store(f.zero(vector(lanes, element)), sums + line * (lanes * size))

            def add(first: Value, end: Value) -> None:
                """Add the products of a block of k to the sums."""
                deep = first + (end - first) // shape.depth * shape.depth
                for name, start, stop, depth in (("block", first, deep, shape.depth), ("row", deep, end, 1)):
                    with f.loop(start, stop, depth) as p:
                        with f.loop(0, m) as i:
                            for u in range(depth):
                                number = f.load(element, a + i * a_row + (p + u) * a_col)
                                f.store(number, column + (i * depth + u) * size)
                        f.call(name, m, wide, column, b + p * b_row + j * size, b_row, sums)

            totals = in_levels(f, k, block, sums, apart, lines, add)
            f.call("finish", m, wide, totals, c + j * size, c_row, alpha, beta)
    return module


def workspace_bytes(target: Target, shape: Streams, m: int, nc: int) -> int:
    """Return the bytes of the sums of `nc` columns, on three levels, and of the packed columns of A."""
    size = dtypes.get(shape.dtype).size
    step = shape.nv * target.lanes(size)
    return (3 * -(-nc // step) * step + shape.depth) * m * size


def _finish(f: Function, element: str, lanes: int, nv: int) -> None:
    """Compute C = alpha * sums + beta * C."""
    m, n, size, step = f["m"], f["n"], SIZES[element], nv * lanes
    alpha = f.broadcast(f.load(element, f["alpha"]), lanes)
    beta = f.load(element, f["beta"])
    with f.loop(0, n, step) as j, f.loop(0, m) as i:
        for v in range(nv):
            at = f["c"] + i * f["c_row"] + (j + v * lanes) * size
            mask = f.first_lanes(f.max(n - j - v * lanes, 0), lanes)
            total = f.var(f.load(vector(lanes, element), f["sums"] + (j * m + i * step + v * lanes) * size) * alpha)
            with f.if_(beta.differs(0)):
                old = f.load_masked(vector(lanes, element), at, mask)
                total.value = f.fma(old, f.broadcast(beta, lanes), total.value)
            f.store_masked(total.value, at, mask)


_FINISH = (
    ("i64", "m"), ("i64", "n"), "sums", "c", ("i64", "c_row"), "alpha", "beta",
)  # fmt: skip

_LINE = 64  # bytes of a cache line
_BLOCK = (("i64", "m"), ("i64", "n"), "a", "b", ("i64", "b_row"), "sums")


def _block(f: Function, element: str, lanes: int, nv: int, depth: int) -> None:
    """Compute sums += a (m x depth, packed) times `depth` rows of B.

    Each tile prefetches what lies below it in the next `depth` rows: a row is about as long as a page, at whose end a
    hardware prefetcher begins anew. Into L2, since a core waits for more lines there than in L1 (20 x 856 x 503, f32,
    Zen 4, B in memory: 243 us without, 187 into L1, 171 into L2; B in a cache: 165, 167, 165).
    """
    m, n, size, step = f["m"], f["n"], SIZES[element], nv * lanes

    def tile(j: Value, masks: list[Value | None]) -> None:
        rows = [
            [
                f.load_masked(vector(lanes, element), f["b"] + f["b_row"] * u + (j + v * lanes) * size, masks[v])
                for v in range(nv)
            ]
            for u in range(depth)
        ]
        if depth > 1:
            for u, line in itertools.product(range(depth), range(0, step * size, _LINE)):
                f.prefetch(f["b"] + f["b_row"] * (depth + u) + j * size + line, locality=2)
        with f.loop(0, m) as i:
            at = f["sums"] + (j * m + i * step) * size
            totals = [f.load(vector(lanes, element), at + v * lanes * size) for v in range(nv)]
            for u in range(depth):
                scale = f.broadcast(f.load(element, f["a"] + (i * depth + u) * size), lanes)
                totals = [f.fma(scale, rows[u][v], totals[v]) for v in range(nv)]
            for v in range(nv):
                f.store(totals[v], at + v * lanes * size)

    across = n // step * step
    with f.loop(0, across, step) as j:
        tile(j, [None] * nv)
    with f.if_(across < n):
        tile(across, [f.first_lanes(f.max(n - across - v * lanes, 0), lanes) for v in range(nv)])
