"""The first rungs: a triple loop, its loops reordered, a vector row, square blocks, and tiles of C in registers.

They compute C = A B, without alpha, beta or epilogue, so that the loops are the textbook's.
"""

from __future__ import annotations

from gemmery import dtypes
from gemmery.cpu.abi import Args
from gemmery.cpu.ir import Function, Matrix, Module, Value
from gemmery.cpu.ir_types import SIZES, vector
from gemmery.cpu.pack import interleave
from gemmery.cpu.target import Target, tile
from gemmery.cpu.tile_unit import instruction, load_tile, shaped
from gemmery.cpu.ukernel import TILE_BYTES, TILE_ROWS, Product


def _operands(f: Function, dtype: str, vectors: bool = False) -> tuple[Args, Matrix, Matrix, Matrix]:
    """Return the arguments, and A, B and C; with `vectors` the columns of B and C are adjacent."""
    args = Args(f, f["args"])
    element = dtypes.get(dtype).llvm
    a = Matrix(f, args.a, element, args.a_row, args.a_col)
    b = Matrix(f, args.b, element, args.b_row, None if vectors else args.b_col)
    c = Matrix(f, args.c, element, args.c_row, None if vectors else args.c_col)
    return args, a, b, c


def _clear(f: Function, c: Matrix, m: Value, n: Value) -> None:
    with f.loop(0, m) as i, f.loop(0, n) as j:
        c[i, j] = f.zero(c.element)


def scalar_naive(target: Target, dtype: str) -> Module:
    """Return the module of C[i, j] = sum of A[i, p] * B[p, j], with loops i, j, p.

    Its loops:
        for i in 0..m:
            for j in 0..n:
                sum = 0
                for p in 0..k:
                    sum += A[i, p] * B[p, j]
                C[i, j] = sum
    """
    module = Module(target)
    with module.function("scalar_naive", "args") as f:
        args, a, b, c = _operands(f, dtype)
        m, n, k = args.m, args.n, args.k
        with f.loop(0, m) as i, f.loop(0, n) as j:
            total = f.var(f.zero(c.element))
            with f.loop(0, k) as p:
                total.value = f.fma(a[i, p], b[p, j], total.value)
            c[i, j] = total.value
    return module


def scalar_reordered(target: Target, dtype: str) -> Module:
    """Return the module with the same three loops as i, p, j: B and C are walked along their rows.

    Its loops:
        C = 0
        for i in 0..m:
            for p in 0..k:
                for j in 0..n:
                    C[i, j] += A[i, p] * B[p, j]
    """
    module = Module(target)
    with module.function("scalar_reordered", "args") as f:
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
        f.store(f.fma(scales, f.load(wide, b.at(p, j)), f.load(wide, c.at(i, j))), c.at(i, j))
    with f.if_(last < j1):
        mask = f.first_lanes(j1 - last, lanes)
        row = f.load_masked(wide, b.at(p, last), mask)
        old = f.load_masked(wide, c.at(i, last), mask)
        f.store_masked(f.fma(scales, row, old), c.at(i, last), mask)


def simd_row(target: Target, dtype: str) -> Module:
    """Return the module that broadcasts an element of A and multiply-adds it over a row of B into a row of C.

    Its loops:
        C = 0
        for i in 0..m:
            for p in 0..k:
                scale = A[i, p] in every lane
                for j in 0..n by one vector:
                    C[i, j...] += scale * B[p, j...]
    """
    module = Module(target)
    with module.function("simd_row", "args") as f:
        args, a, b, c = _operands(f, dtype, vectors=True)
        m, n, k = args.m, args.n, args.k
        _clear(f, c, m, n)
        with f.loop(0, m) as i, f.loop(0, k) as p:
            _row_times_scalar(f, a[i, p], b, c, i, p, f.index(0), n)
    return module


def simd_blocked(target: Target, dtype: str) -> Module:
    """Return the module of `simd_row` inside square blocks of side `kc`, so that a block of B stays in cache.

    Its loops:
        C = 0
        for each block i0 of m, p0 of k, j0 of n:
            for i in block i0:
                for p in block p0:
                    scale = A[i, p] in every lane
                    for j in block j0 by one vector:
                        C[i, j...] += scale * B[p, j...]
    """
    module = Module(target)
    with module.function("simd_blocked", "args") as f:
        args, a, b, c = _operands(f, dtype, vectors=True)
        m, n, k, side = args.m, args.n, args.k, args.kc
        _clear(f, c, m, n)
        with f.loop(0, m, side) as i0, f.loop(0, k, side) as p0, f.loop(0, n, side) as j0:
            i1, p1, j1 = f.min(i0 + side, m), f.min(p0 + side, k), f.min(j0 + side, n)
            with f.loop(i0, i1) as i, f.loop(p0, p1) as p:
                _row_times_scalar(f, a[i, p], b, c, i, p, j0, j1)
    return module


def simd_tile(target: Target, dtype: str) -> Module:
    """Return the module that keeps a tile of C, mr rows of nv vectors, in registers while p runs.

    Its loops:
        for each tile of nr columns j of C:
            for each tile of mr rows i:
                sums[mr, nr] = 0, in registers
                for p in 0..k:
                    row = B[p, j...], nr elements
                    for r in 0..mr:
                        sums[r] += A[i + r, p] * row
                C[i..., j...] = sums
    """
    module = Module(target)
    with module.function("simd_tile", "args") as f:
        args, a, b, c = _operands(f, dtype, vectors=True)
        m, n, k, mr, nv = args.m, args.n, args.k, tile(target).mr, tile(target).nv
        lanes = target.lanes(SIZES[c.element])
        last = n // (nv * lanes) * (nv * lanes)
        for start, stop, vectors in ((f.index(0), last, nv), (last, n, 1)):
            with f.loop(start, stop, vectors * lanes) as j, f.loop(0, m, mr) as i:
                # Rows below the last one are the last one again, which gets the same sums again.
                rows = [f.min(i + r, m - 1) for r in range(mr)]
                _sums_in_registers(
                    f, k, a, b, c, rows, j, [None] * nv if vectors > 1 else [f.first_lanes(n - j, lanes)]
                )
    return module


def _sums_in_registers(
    f: Function, k: Value, a: Matrix, b: Matrix, c: Matrix, rows: list[Value], j: Value, masks: list[Value | None]
) -> None:
    """Compute C[rows, j...], a vector for each mask, of which None is a whole one."""
    lanes = f.target.lanes(SIZES[c.element])
    wide = vector(lanes, c.element)
    vectors = [(j + v * lanes, mask) for v, mask in enumerate(masks)]
    sums = [[f.var(f.zero(wide)) for _ in vectors] for _ in rows]
    with f.loop(0, k) as p:
        row = [f.load_masked(wide, b.at(p, at), mask) for at, mask in vectors]
        for i, of_row in zip(rows, sums, strict=True):
            scales = f.broadcast(a[i, p], lanes)
            for part, total in zip(row, of_row, strict=True):
                total.value = f.fma(scales, part, total.value)
    for i, of_row in zip(rows, sums, strict=True):
        for (at, mask), total in zip(vectors, of_row, strict=True):
            f.store_masked(total.value, c.at(i, at), mask)


def amx_tile(target: Target, product: Product) -> Module:
    """Return the module that keeps 2 x 2 tiles of C in registers of the tile unit while p runs; nothing is packed.

    Its loops:
        for each 32 rows i of C:
            for each 32 columns j:
                sums[2][2] = 0, in tile registers
                for p in 0..k by 64 bytes:
                    right[2] = two tiles of B[p..., j...], in cells of 4 bytes of k    # anew for every i
                    left[2] = two tiles of A[i..., p...], as they lie
                    for r, s in 2 x 2:
                        sums[r][s] += left[r] * right[s]
                C[i..., j...] = sums
    """
    module, side, row = Module(target), 2 * TILE_ROWS, 2 * TILE_BYTES
    size, group, unit = SIZES[product.packed], product.group, product.unit
    element = f"i{8 * size}"
    with module.function("amx_tile", "args") as f, shaped(f):
        args = Args(f, f["args"])
        m, n, k, a_row = args.m, args.n, args.k, args.a_row
        left, right, stored = f.buffer(side * TILE_BYTES), f.buffer(TILE_ROWS * row), f.buffer(side * row)
        with f.loop(0, m, side) as i, f.loop(0, n, side) as j:
            for total in range(4):
                instruction(f, "tilezero", f.const("i8", total))
            with f.loop(0, k, unit) as p:
                a, whole = args.a + i * a_row + p * size, (i + side <= m) & (p + unit <= k)
                with f.if_(whole ^ True), f.loop(0, side) as line:
                    exists = f.first_lanes(f.select(i + line < m, k - p, f.index(0)), unit)
                    f.store(f.load_masked(vector(unit, element), a + line * a_row, exists), left + line * TILE_BYTES)
                with f.loop(0, TILE_ROWS) as cell:
                    for half in (0, TILE_ROWS):
                        rows = []
                        for at in (p + cell * group + g for g in range(group)):
                            exists = f.first_lanes(f.select(at < k, f.max(n - j - half, 0), f.index(0)), TILE_ROWS)
                            source = args.b + at * args.b_row + (j + half) * size
                            rows.append(f.load_masked(vector(TILE_ROWS, element), source, exists))
                        f.store(interleave(f, rows), right + cell * row + half * 4)
                start, apart = f.select(whole, a, left), f.select(whole, a_row, f.index(TILE_BYTES))
                for r in range(2):
                    load_tile(f, 4 + r, start + apart * (r * TILE_ROWS), apart)
                    load_tile(f, 6 + r, right + r * TILE_BYTES, row)
                for total in range(4):
                    registers = total, 4 + total // 2, 6 + total % 2
                    instruction(f, product.step, *(f.const("i8", number) for number in registers))
            for total in range(4):
                at = stored + total // 2 * TILE_ROWS * row + total % 2 * TILE_BYTES
                instruction(f, "tilestored64", f.const("i8", total), at, f.index(row))
            with f.loop(0, f.min(m - i, side)) as line:
                for half in (0, TILE_ROWS):
                    sums = f.load(vector(TILE_ROWS, product.accumulator), stored + line * row + half * 4)
                    to = args.c + (i + line) * args.c_row + (j + half) * 4
                    f.store_masked(sums, to, f.first_lanes(f.max(n - j - half, 0), TILE_ROWS))
    return module
