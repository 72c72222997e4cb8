"""Your own rung: a kernel and a row; the ladder checks it and times it with its parent and NumPy.

`simd_row` loads and stores a vector of C for every multiply-add. Here ROWS vectors of C, one per row, stay in registers
while k runs: one load of B serves ROWS multiply-adds, and C is stored once.
"""

import hashlib
from pathlib import Path

from gemmery import dtypes
from gemmery.cpu import jit
from gemmery.cpu.abi import Args
from gemmery.cpu.ir import Matrix, Module
from gemmery.cpu.ir_types import SIZES, vector
from gemmery.cpu.launch import Blocks, Launch
from gemmery.cpu.target import host
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import Rung, find
from gemmery_lab.climb import RungPlan, climb
from gemmery_lab.experiments import LADDER

ROWS = 12


def simd_tile(target, dtype):
    """Return the kernel's module: loops over tiles of C, with the loop over k inside."""
    module = Module(target)
    element = dtypes.get(dtype).llvm
    lanes = target.lanes(SIZES[element])
    wide = vector(lanes, element)

    with module.function("simd_tile", ("ptr", "args")) as f:
        args = Args(f, f["args"])
        m, n, k = args.m, args.n, args.k
        a = Matrix(f, args.a, element, args.a_row, args.a_col)
        b = Matrix(f, args.b, element, args.b_row)
        c = Matrix(f, args.c, element, args.c_row)
        whole = m // ROWS * ROWS
        for start, stop, rows in ((f.index(0), whole, ROWS), (whole, m, 1)):
            with f.loop(start, stop, rows) as i, f.loop(0, n, lanes) as j:
                mask = f.first_lanes(f.min(n - j, lanes), lanes)
                totals = [f.var(f.zero(wide)) for _ in range(rows)]
                with f.loop(0, k) as p:
                    row = f.load_masked(wide, b.at(p, j), mask)
                    for r, total in enumerate(totals):
                        total.value = f.fma(f.broadcast(a[i + r, p], lanes), row, total.value)
                for r, total in enumerate(totals):
                    f.store_masked(total.value, c.at(i + r, j), mask)
    return module


def build(problem, config):
    """Compile the kernel or read it from the cache. Its name is the cache key, so it must change with this file."""
    target, element = host(), dtypes.get(problem.dtype)
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    found = jit.load(target, f"simd_tile_{problem.dtype}_{source}", lambda: simd_tile(target, problem.dtype))
    return Launch(found["simd_tile"], element.llvm, element.size, lambda m, n, k: Blocks())


parent = find(CPU, "simd_row")
own = Rung(
    name="simd_tile",
    idea="a tile of C stays in registers while k runs",
    parent=parent.name,
    dtypes=("f32", "f64"),
    refuses=parent.refuses,
    build=build,
)

run = climb(LADDER, RungPlan([(parent, {}), (own, {})], (255,), "f32", kind="cpu", device="cpu", threads=1))
for m in run.measurements:
    checked = f"error {m.error:.2g} of its bound" if m.checked else ""
    print(f"{m.kernel:10} {m.gflops:8.2f} GFLOP/s {m.gflops / m.peak_gflops:5.0%} of the peak  {checked}")
    if m.kernel == own.name:
        print(f"{'':10} {m.versus[parent.name]:8.2f} x {parent.name}, {m.versus['numpy']:.2f} x NumPy")
assert all(m.error <= 1 for m in run.measurements)
