"""The first rungs: a triple loop, its loops reordered, a vector row, and square blocks.

They compute C = A B, without alpha, beta or epilogue, so that the loops are the textbook's.
"""

from __future__ import annotations

from gemmery import dtypes
from gemmery.cpu.abi import Args
from gemmery.cpu.ir import Function, Matrix, Module, Value
from gemmery.cpu.ir_types import SIZES, vector
from gemmery.cpu.target import Target


def _operands(f: Function, dtype: str) -> tuple[Args, Matrix, Matrix, Matrix]:
    args = Args(f, f["args"])
    element = dtypes.get(dtype).llvm
    a = Matrix(f, args.a, element, args.a_row, args.a_col)
    b = Matrix(f, args.b, element, args.b_row, args.b_col)
    c = Matrix(f, args.c, element, args.c_row, args.c_col)
    return args, a, b, c


def _clear(f: Function, c: Matrix, m: Value, n: Value) -> None:
    with f.loop(0, m) as i, f.loop(0, n) as j:
        c[i, j] = f.zero(c.element)


def scalar_naive(target: Target, dtype: str) -> Module:
    """Return the module of C[i, j] = sum of A[i, p] * B[p, j], with loops i, j, p."""
    module = Module(target)
    with module.function("scalar_naive", ("ptr", "args")) as f:
        args, a, b, c = _operands(f, dtype)
        m, n, k = args.m, args.n, args.k
        with f.loop(0, m) as i, f.loop(0, n) as j:
            total = f.var(f.zero(c.element))
            with f.loop(0, k) as p:
                total.value = f.fma(a[i, p], b[p, j], total.value)
            c[i, j] = total.value
    return module


def scalar_reordered(target: Target, dtype: str) -> Module:
    """Return the module with the same three loops as i, p, j: B and C are walked along their rows."""
    module = Module(target)
    with module.function("scalar_reordered", ("ptr", "args")) as f:
        args, a, b, c = _operands(f, dtype)
        m, n, k = args.m, args.n, args.k
        _clear(f, c, m, n)
        with f.loop(0, m) as i, f.loop(0, k) as p:
            scale = a[i, p]
            with f.loop(0, n) as j:
                c[i, j] = f.fma(scale, b[p, j], c[i, j])
    return module


def _row_times_scalar(
    f: Function, scale: Value, b: Matrix, c: Matrix, i: Value, p: Value, j0: Value, j1: Value
) -> None:
    """Compute C[i, j0:j1] += scale * B[p, j0:j1], one vector per step and a masked one at the end."""
    lanes = f.target.lanes(SIZES[c.element])
    wide = vector(lanes, c.element)
    scales = f.broadcast(scale, lanes)
    last = j0 + (j1 - j0) // lanes * lanes
    with f.loop(j0, last, lanes) as j:
        f.store(f.fma(scales, b.vector(p, j, lanes), c.vector(i, j, lanes)), c.at(i, j))
    with f.if_(last < j1):
        mask = f.first_lanes(j1 - last, lanes)
        row = f.load_masked(wide, b.at(p, last), mask)
        old = f.load_masked(wide, c.at(i, last), mask)
        f.store_masked(f.fma(scales, row, old), c.at(i, last), mask)


def _with_adjacent_columns(f: Function, x: Matrix) -> Matrix:
    return Matrix(f, x.base, x.element, x.row)


def simd_row(target: Target, dtype: str) -> Module:
    """Return the module that broadcasts an element of A and multiply-adds it over a row of B into a row of C."""
    module = Module(target)
    with module.function("simd_row", ("ptr", "args")) as f:
        args, a, b, c = _operands(f, dtype)
        b, c = _with_adjacent_columns(f, b), _with_adjacent_columns(f, c)
        m, n, k = args.m, args.n, args.k
        _clear(f, c, m, n)
        with f.loop(0, m) as i, f.loop(0, k) as p:
            _row_times_scalar(f, a[i, p], b, c, i, p, f.index(0), n)
    return module


def simd_blocked(target: Target, dtype: str) -> Module:
    """Return the module of `simd_row` inside square blocks of side `kc`, so that a block of B stays in cache."""
    module = Module(target)
    with module.function("simd_blocked", ("ptr", "args")) as f:
        args, a, b, c = _operands(f, dtype)
        b, c = _with_adjacent_columns(f, b), _with_adjacent_columns(f, c)
        m, n, k, side = args.m, args.n, args.k, args.kc
        _clear(f, c, m, n)
        with f.loop(0, m, side) as i0, f.loop(0, k, side) as p0, f.loop(0, n, side) as j0:
            i1, p1, j1 = f.min(i0 + side, m), f.min(p0 + side, k), f.min(j0 + side, n)
            with f.loop(i0, i1) as i, f.loop(p0, p1) as p:
                _row_times_scalar(f, a[i, p], b, c, i, p, j0, j1)
    return module
