"""The micro-kernel: an mr x nr tile of C held in registers while k runs.

The contract between packing, micro-kernel and loops is `Product`: what lies in memory, what lies in the panels,
and what is accumulated. A panel of A is k / group rows of mr cells, a panel of B k / group rows of nr cells; a
cell is `group` consecutive elements along k, which one dot-product instruction eats at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmery import dtypes
from gemmery.cpu.ir import SIZES, Function, Value, Var, vector
from gemmery.cpu.target import Target, Tile, tile


@dataclass(frozen=True)
class Product:
    """Which types a packed product reads, packs, accumulates and writes (gemmery's short names).

    The steps are
    - "fma": one multiply-add an element;
    - "dot_bf16": two bfloat16 a lane (`vdpbf16ps`). The instruction reads bfloat16 below 2**-126 in magnitude as zero
      and writes sums below it as zero, so an element may lose 2**-126 (sum |a| + sum |b| + k) beside its rounding;
    - "dot_i16": two int16 a lane (`vpdpwssd`, or `pmaddwd` and an addition), exact modulo 2**32;
    - "dot_i8": four bytes a lane (`vpdpbusd`), exact modulo 2**32. It multiplies unsigned by signed, so A's sign bit is
      flipped in packing, which moves A by 128, and the accumulators start from what that is worth (`seeded`).

    Complex products are real ones of twice the columns and twice the depth, by packing alone: the 1m method of Van Zee,
    "Implementing high-performance complex matrix multiplication via the 1m method", SIAM J. Sci. Comput. 42(5), 2020.
    A row of A holds (re, im) as two steps of k; a row of B becomes the rows (re, im) and (-im, re). m, n and k inside
    the loops then count real numbers.
    """

    dtype: str  # of A and B in memory
    out: str  # of C in memory
    packed: str  # element of the panels, LLVM's name
    accumulator: str  # element of the tile, LLVM's name
    group: int = 1
    step: str = "fma"
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
    def scalar(self) -> str:
        """The LLVM type of alpha, beta and of the sum on its way to C: the accumulator's, or C's when that is wider."""
        out = dtypes.get(self.out)
        return out.llvm if out.kind in "iu" and out.size > SIZES[self.accumulator] else self.accumulator

    @property
    def out_size(self) -> int:
        """Bytes of an element of C; of a complex one, of each component."""
        return SIZES[dtypes.get(self.out).llvm]

    @property
    def parts(self) -> int:
        """Real numbers in an element of C: 2 when it is complex."""
        return 2 if self.is_complex else 1

    @property
    def is_complex(self) -> bool:
        """True when elements are pairs of real numbers."""
        return dtypes.get(self.dtype).kind == "c"

    @property
    def is_signed(self) -> bool:
        """False for unsigned integers."""
        return dtypes.get(self.dtype).kind != "u"

    @property
    def seeded(self) -> bool:
        """True when each panel of B opens with a row of numbers from which the accumulators start."""
        return self.step == "dot_i8"


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
    bits = 8 * f.target.vector_bytes
    cells = vector(f.target.lanes(SIZES[product.packed]), product.packed)
    a, b = f.bitcast(a, cells), f.bitcast(b, cells)
    if product.step == "dot_bf16":
        return f.intrinsic(f"llvm.x86.avx512bf16.dpbf16ps.{bits}", total.type, total, a, b)
    if product.step == "dot_i8":
        unsigned, signed = (a, b) if product.is_signed else (b, a)
        return f.intrinsic(f"llvm.x86.avx512.vpdpbusd.{bits}", total.type, total, unsigned, signed)
    if product.step == "dot_i16":
        if f.target.has_vnni:
            return f.intrinsic(f"llvm.x86.avx512.vpdpwssd.{bits}", total.type, total, a, b)
        name = "llvm.x86.avx512.pmaddw.d.512" if bits == 512 else "llvm.x86.avx2.pmadd.wd"
        return total + f.intrinsic(name, total.type, a, b)
    raise ValueError(product.step)


AHEAD = 16  # bytes of the next panel of B that a step asks for: 16 tiles of 6 rows ask for 256 bytes, one step of it
AHEAD_FROM = 256  # bytes of a step of B's panel from which that pays: a narrower panel is asked for too often


def tile_loop(
    f: Function,
    product: Product,
    tile: Shape,
    steps: Value,
    a: Value,
    b: Value,
    prefetch: int,
    coming: Value | None = None,
) -> list[list[Var]]:
    """The k loop over packed panels: accumulators [mr][nv], each a vector.

    Per step: nv loads of B, mr broadcasts of A, mr * nv multiply-adds. With 6 x 4 vectors of AVX-512 that is
    24 independent chains, which covers a latency of 4 cycles on two ports with room to spare. The panel of A is
    prefetched `prefetch` steps ahead: it comes from L2, the panel of B from L1 and L2 by the hardware. The next
    panel of B comes from L3, which no prefetcher sees coming: each tile asks L2 for its share of it, AHEAD bytes a
    step from `coming` on (Emerald Rapids, n = 2048: f32 209 to 222 GFLOP/s, f64 100 to 108).
    """
    cell, size = product.cell, SIZES[product.cell]
    wide = vector(tile.lanes, product.accumulator)
    cells = vector(tile.lanes, cell)
    row = tile.nr * size
    if product.seeded:
        starts = [f.load(wide, b + v * tile.lanes * size, align=size) for v in range(tile.nv)]
        b = b + row
    else:
        starts = [f.zero(wide)] * tile.nv
    totals = [[f.var(start) for start in starts] for _ in range(tile.mr)]
    with f.loop(0, steps) as p:
        a_row = a + p * (tile.mr * size)
        b_row = b + p * row
        columns = [f.load(cells, b_row + v * tile.lanes * size, align=size) for v in range(tile.nv)]
        f.prefetch(a_row + prefetch * tile.mr * size)
        if coming is not None and row >= AHEAD_FROM:
            f.prefetch(coming + p * AHEAD, locality=2)
        for i in range(tile.mr):
            scale = f.broadcast(f.load(cell, a_row + i * size, align=size), tile.lanes)
            for v in range(tile.nv):
                totals[i][v].value = multiply_add(f, product, scale, columns[v], totals[i][v].value)
    return totals
