"""The micro-kernel: an mr x nr tile of C held in registers while k runs.

The contract between packing, micro-kernel and loops is `Product`: what lies in memory, what lies in the panels,
and what is accumulated. A panel of A is k / group rows of mr cells, a panel of B k / group rows of nr cells; a
cell is `group` consecutive elements along k, which one dot-product instruction eats at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gemmery import dtypes
from gemmery.cpu.ir import SIZES, Function, Value, Var, vector
from gemmery.cpu.target import Target, Tile, tile


@dataclass(frozen=True)
class Product:
    """Which types a packed product reads, packs, accumulates and writes (gemmery's short names)."""

    dtype: str  # of A and B in memory
    out: str  # of C in memory
    packed: str  # element of the panels, LLVM's name
    accumulator: str  # element of the tile, LLVM's name
    group: int = 1
    step: str = "fma"  # or a dot product: "dot_bf16", "dot_i8"
    activation: str = ""  # "", "relu", "gelu", "silu"
    bias: bool = False

    @property
    def name(self) -> str:
        """A name that says everything above: part of the cache key."""
        tail = "".join(f"_{part}" for part in (self.activation, "bias" if self.bias else "") if part)
        return f"{self.dtype}_{self.out}_{self.packed}_{self.accumulator}_{self.step}{tail}"

    @property
    def cell(self) -> str:
        """The LLVM type of one panel cell, as wide as an accumulator when cells are groups."""
        return self.packed if self.group == 1 else f"i{8 * self.group * SIZES[self.packed]}"

    @property
    def is_complex(self) -> bool:
        return dtypes.get(self.dtype).kind == "c"


@dataclass(frozen=True)
class Shape:
    """A tile in elements of one accumulator type."""

    mr: int
    nv: int
    lanes: int

    @property
    def nr(self) -> int:
        """Columns of the tile."""
        return self.nv * self.lanes


def shape(target: Target, product: Product, sizes: Tile | None = None) -> Shape:
    """The register tile of a product on a target."""
    found = sizes or tile(target)
    return Shape(found.mr, found.nv, target.lanes(SIZES[product.accumulator]))


def multiply_add(f: Function, product: Product, a: Value, b: Value, total: Value) -> Value:
    """total + a * b for vectors of cells: one fused multiply-add, or one dot product of `group`."""
    if product.step == "fma":
        return f.fma(a, b, total)
    lanes = f.target.lanes(4)
    if product.step == "dot_bf16":
        pair = vector(2 * lanes, "bfloat")
        name = f"llvm.x86.avx512bf16.dpbf16ps.{8 * f.target.vector_bytes}"
        return f.intrinsic(name, total.type, total, f.bitcast(a, pair), f.bitcast(b, pair))
    raise ValueError(product.step)


Cells = Callable[[int], Value]


def tile_loop(
    f: Function,
    product: Product,
    tile: Shape,
    steps: Value,
    a: Value,
    b: Value,
    prefetch: int,
) -> list[list[Var]]:
    """The k loop over packed panels: accumulators [mr][nv], each a vector.

    Per step: nv loads of B, mr broadcasts of A, mr * nv multiply-adds. With 6 x 4 vectors of AVX-512 that is
    24 independent chains, which covers a latency of 4 cycles on two ports with room to spare. The panel of A is
    prefetched `prefetch` steps ahead: it comes from L2, the panel of B from L1 and L2 by the hardware.
    """
    cell, size = product.cell, SIZES[product.cell]
    wide = vector(tile.lanes, product.accumulator)
    cells = vector(tile.lanes, cell)
    totals = [[f.var(f.zero(wide)) for _ in range(tile.nv)] for _ in range(tile.mr)]
    with f.loop(0, steps) as p:
        a_row = a + p * (tile.mr * size)
        b_row = b + p * (tile.nr * size)
        columns = [f.load(cells, b_row + v * tile.lanes * size, align=size) for v in range(tile.nv)]
        f.prefetch(a_row + prefetch * tile.mr * size)
        for i in range(tile.mr):
            scale = f.broadcast(f.load(cell, a_row + i * size, align=size), tile.lanes)
            for v in range(tile.nv):
                totals[i][v].value = multiply_add(f, product, scale, columns[v], totals[i][v].value)
    return totals
