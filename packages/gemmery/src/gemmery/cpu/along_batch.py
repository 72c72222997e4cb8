"""A batch whose products interleave: the elements (i, j) of all of them are adjacent in memory, in A, B and C alike.

A vector holds one element of as many products as it has lanes, so a product of matrices is one of vectors: nothing is
broadcast, and no lane is summed with another. A tile of up to 2 x 2 elements stays in registers while k runs, and
blocks of k are summed apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from gemmery import dtypes
from gemmery.cpu import jit
from gemmery.cpu.abi import Args
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES, vector
from gemmery.cpu.jit import Image
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.split import Unit
from gemmery.cpu.target import Target, host
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

TILE = 2  # rows and columns of C in registers
VECTORS = 2  # of each element: a cache line of f32 and AVX2
DEEP = 256  # steps of k that are summed apart


def refuses(problem: Problem) -> str:
    """Return why a problem whose products interleave cannot run here; "" where it can."""
    row = dtypes.get(problem.dtype)
    if problem.epilogue or problem.scaled:
        return "of interleaved products it computes only C = A B, without alpha, beta, bias or activation"
    if problem.out != problem.dtype or row.kind == "c" or dtypes.get(row.accumulator).llvm != row.llvm:
        return "interleaved products are summed in vectors of C: float32, float64 and integers of 32 and 64 bits only"
    return ""


def build(problem: Problem, config: Mapping[str, int]) -> Launch:
    """Return the kernel, which runs a whole batch in one call."""
    m, n, k, target, row = problem.m, problem.n, max(problem.k, 1), host(), dtypes.get(problem.dtype)
    entry = jit.load_together(target, image(target, problem.dtype))["along_batch"]
    moved, blocks = ((m + n) * k + m * n) * row.size, Blocks()
    unit = Unit(0, 0, max(moved / 25, 2 * m * n * k / 25) / k)  # 25 bytes or operations per ns
    return Launch(entry, row.llvm, row.size, lambda m, n, k: blocks, unit=unit, at_once=True)


def image(target: Target, dtype: str) -> Image:
    """Return the image of the kernel of one element type."""
    llvm = dtypes.get(dtype).llvm
    return f"along_batch_{llvm}", lambda: along_batch(target, llvm)


def along_batch(target: Target, element: str) -> Module:
    """Return the module; its entry is `along_batch`."""
    module = Module(target)
    with module.function("along_batch", "args") as f:
        fields, lanes = Args(f, f["args"]), target.lanes(SIZES[element])
        args = Loaded(*(getattr(fields, name) for name in Loaded._fields))
        batch = args.batch
        whole = batch // (lanes * VECTORS) * (lanes * VECTORS)
        with f.loop(0, whole, lanes * VECTORS) as v:
            _products(f, args, element, v, VECTORS, None)
        with f.loop(whole, batch, lanes) as v:
            _products(f, args, element, v, 1, f.first_lanes(batch - v, lanes))
    return module


class Loaded(NamedTuple):
    """The fields of the record, loaded once: LLVM would load them again after each store to C."""

    m: Value
    n: Value
    k: Value
    batch: Value
    a: Value
    a_row: Value
    a_col: Value
    b: Value
    b_row: Value
    b_col: Value
    c: Value
    c_row: Value
    c_col: Value


def _products(f: Function, args: Loaded, element: str, v: Value, vectors: int, mask: Value | None) -> None:
    """Compute C of the products from v on, as many as the vectors have lanes."""
    m, n = args.m, args.n
    tall, wide = m // TILE * TILE, n // TILE * TILE
    for i0, i1, rows in ((f.index(0), tall, TILE), (tall, m, 1)):
        for j0, j1, columns in ((f.index(0), wide, TILE), (wide, n, 1)):
            with f.loop(i0, i1, rows) as i, f.loop(j0, j1, columns) as j:
                _tile(f, args, element, (v, i, j), (rows, columns, vectors), mask)


def _tile(
    f: Function, args: Loaded, element: str, at: tuple[Value, ...], shape: tuple[int, int, int], mask: Value | None
) -> None:
    (v, i, j), (rows, columns, vectors) = at, shape
    size, lanes = SIZES[element], f.target.lanes(SIZES[element])
    type_, apart = vector(lanes, element), lanes * size
    a = [args.a + v * size + (i + r) * args.a_row for r in range(rows)]
    b = [args.b + v * size + (j + c) * args.b_col for c in range(columns)]
    places = [(r, c, x) for r in range(rows) for c in range(columns) for x in range(vectors)]
    totals = {place: f.var(f.zero(type_)) for place in places}
    a_col, b_row, k = args.a_col, args.b_row, args.k
    with f.loop(0, k, DEEP) as start:
        sums = {place: f.var(f.zero(type_)) for place in places}
        with f.loop(start, f.min(start + DEEP, k)) as p:
            left = [[f.load_masked(type_, x + p * a_col + z * apart, mask) for z in range(vectors)] for x in a]
            right = [[f.load_masked(type_, y + p * b_row + z * apart, mask) for z in range(vectors)] for y in b]
            for r, c, x in places:
                sums[r, c, x].value = f.fma(left[r][x], right[c][x], sums[r, c, x].value)
        for place in places:
            totals[place].value = totals[place].value + sums[place].value
    for r, c, x in places:
        to = args.c + v * size + (i + r) * args.c_row + (j + c) * args.c_col + x * apart
        f.store_masked(totals[r, c, x].value, to, mask)
