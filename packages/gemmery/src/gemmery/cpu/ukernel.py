"""The micro-kernel: an mr x nr tile of C held in registers while k runs.

The contract between packing, micro-kernel and loops is `Product`: the element types in memory and in the panels, and
the accumulator. A panel of A is k / group rows of mr cells, a panel of B k / group rows of nr cells; a cell is `group`
consecutive elements along k, which one dot-product instruction multiplies at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gemmery import dtypes
from gemmery.cpu.target import Target, Tile, tile
from gemmery.dtypes import SIZES
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from gemmery.cpu.ir import Function, Value, Var


TILE_ROWS, TILE_BYTES = 16, 64  # of a tile register, and bytes of a row of it
# Instructions of the tile unit, by the element type of A, and of B where that is another one.
STEPS = {
    "bf16": "tdpbf16ps", "int8": "tdpbssd", "uint8": "tdpbuud", "int8uint8": "tdpbsud", "uint8int8": "tdpbusd",
}  # fmt: skip
# Instructions of ARM by element type, the widest first: the feature, the instruction, elements of k in a cell.
ARM_STEPS = {
    "bf16": (("bf16", "bfmmla", 4),),
    "f16": (("asimdfhm", "fmlal", 1),),
    "int8": (("i8mm", "smmla", 8), ("asimddp", "sdot", 4)),
    "uint8": (("i8mm", "ummla", 8), ("asimddp", "udot", 4)),
}
# The steps of semirings: what takes the place of a product, the comparison that lets it in, and what they begin with.
SEMIRINGS = {
    "min_plus": ("add", "olt", float("inf")),
    "max_plus": ("add", "ogt", -float("inf")),
    "max_times": ("mul", "ogt", -float("inf")),
}
MATRICES = ("bfmmla", "smmla", "ummla")  # those that multiply two rows of A by two columns of B
# 8 KiB of k at once, which are summed part by part (see `tile_unit`): the sums of 256 x 1024 of C stay in L2 meanwhile
# (n = 4096, against blocks of 2 KiB: bf16 1.6 times as fast, int8 1.3).
_TILES = Tile(mr=16, nv=3, mc=256, kc=2048, nc=1024)
# Panels of halves are as wide, and blocks as deep, as those of a float16 B packed once, which serve vectors too.
# A block of A, of which each number is 8 bytes, is 768 KiB.
_HALVES = Tile(mr=16, nv=4, mc=128, kc=768, nc=1024)


class Product(NamedTuple):
    """The types that a packed product reads, packs, accumulates and writes (gemmery's names).

    The steps are
    - "fma": one multiply-add per element;
    - those of `SEMIRINGS`: a sum or product, and the least or largest of these; one that is NaN is left out. No step
      rounds but the first of the two;
    - "dot_bf16": two bfloat16 per lane (`vdpbf16ps`). The instruction reads bfloat16 below 2**-126 in magnitude as zero
      and writes sums below it as zero, so an element may lose 2**-126 (sum |a| + sum |b| + k) in addition to rounding;
    - "dot_i16": two int16 per lane (`vpdpwssd`, or `pmaddwd` and an addition), exact modulo 2**32;
    - "dot_i8": four bytes per lane (`vpdpbusd`), exact modulo 2**32. It multiplies unsigned by signed, so where A and B
      have one type packing flips A's sign bit, which shifts A by 128, and the accumulators start from the correction
      (`seeded`);
    - those of `STEPS`: the tile unit, 16 x 16 sums of 64 bytes of k (see `tile_unit`). It flushes bfloat16 as
      "dot_bf16" does, and adds two products at once; integers of any signs are exact modulo 2**32. An element of
      float16 is two bfloat16, whose four products are exact (`halved`);
    - "sdot", "udot", "smmla", "ummla": dot products of 4 or 8 bytes of ARM, exact modulo 2**32 (see `arm`);
    - "fmlal": one multiply-add per element of float16 to a float32 of ARM, rounded once;
    - "bfmmla": dot products of four bfloat16 of ARM. It adds two products, then adds that to the sum; each addition
      rounds to odd, which is off by up to two roundings to nearest: f(k) is k, k + 1 for an odd k. Operands, products
      and sums below 2**-126 are zero, so an element may lose 2**-126 (sum |a| + sum |b| + 2 k).

    Packing turns complex products into real ones of twice the columns and twice the depth: the 1m method of Van Zee,
    "Implementing high-performance complex matrix multiplication via the 1m method", SIAM J. Sci. Comput. 42(5), 2020.
    A row of A holds (re, im) as two steps of k; a row of B becomes the rows (re, im) and (-im, re). m, n and k inside
    the loops then count real numbers.
    """

    dtype: str  # of A and B in memory; `b_dtype` is that of B where it is another one
    out: str  # of C in memory
    packed: str  # element of the panels, LLVM's name
    accumulator: str  # element of the tile, LLVM's name
    group: int = 1
    step: str = "fma"
    activation: str = ""  # "", "relu", "gelu", "silu"
    # The narrower elements of B's panels, which each step widens: gemmery's name, or "levels8" and "levels4" with a row
    # of factors before each panel (`packed_levels`); "" for `packed`.
    stored: str = ""
    b_dtype: str = ""

    @property
    def on_tiles(self) -> bool:
        """True for the tile unit."""
        return self.step in STEPS.values()

    @property
    def halved(self) -> bool:
        """True for float16 on the tile unit: a cell of a panel is two bfloat16 that add up to an element."""
        return self.on_tiles and self.dtype == "f16"

    @property
    def forms(self) -> int:
        """The forms in which a panel of A has each cell: 2 of halves, (upper, lower) and (lower, upper)."""
        return 2 if self.halved else 1

    @property
    def block_unit(self) -> int:
        """The elements of k of which a block of several is a multiple: as with vectors where panels are of halves."""
        return 1 if self.halved else self.unit

    @property
    def unit(self) -> int:
        """The elements of k that a step of the micro-kernel takes."""
        return self.group * TILE_ROWS if self.on_tiles else self.group

    @property
    def in_blocks(self) -> bool:
        """True where a register holds 2 x 2 sums."""
        return self.step in MATRICES

    @property
    def name(self) -> str:
        """A name that says everything above: part of the cache key."""
        tail = "".join(f"_{part}" for part in (self.activation, self.stored) if part)
        return f"{self.dtype}{self.b_dtype}_{self.out}_{self.packed}_{self.accumulator}_{self.step}{tail}"

    @property
    def cell(self) -> str:
        """The LLVM type of a panel cell; groups are as wide as an accumulator."""
        return self.packed if self.group == 1 else f"i{8 * self.group * SIZES[self.packed]}"

    @property
    def scalar(self) -> str:
        """The LLVM type of alpha, beta and the scaled sum: the accumulator's, or C's if that is wider."""
        out = dtypes.get(self.out)
        return out.llvm if out.kind in "iu" and out.size > SIZES[self.accumulator] else self.accumulator

    @property
    def out_size(self) -> int:
        """The bytes of an element of C; for complex types, of each component."""
        return SIZES[dtypes.get(self.out).llvm]

    @property
    def parts(self) -> int:
        """The number of real numbers in an element of C: 2 for complex types."""
        return 2 if self.is_complex else 1

    @property
    def is_complex(self) -> bool:
        """True when elements are pairs of real numbers."""
        return dtypes.get(self.dtype).kind == "c"

    @property
    def is_signed(self) -> bool:
        """False for unsigned integers."""
        return bool(self.b_dtype) or dtypes.get(self.dtype).kind != "u"

    @property
    def sums_apart(self) -> bool:
        """True if sums over a block of k must not be kept in C, since they would be rounded more than once."""
        out = dtypes.get(self.out)
        return out.kind == "f" and out.llvm != self.accumulator

    @property
    def bits(self) -> int:
        """The bits of an element of B that has a factor, 8 or 4; 0 for others."""
        return int(self.stored.removeprefix("levels")) if self.stored.startswith("levels") else 0

    @property
    def rounds(self) -> bool:
        """False for integers, whose sums are exact in any order, and for semirings."""
        return dtypes.get(self.dtype).kind in "fc" and self.step not in SEMIRINGS

    @property
    def seeded(self) -> bool:
        """True when each panel of B starts with a row of initial values for sums, which int8 by uint8 skips."""
        return self.step == "dot_i8"


SHORT = 512  # length of vectors up to which gemv keeps sums and x on the stack, so that the call takes no workspace


def vector_room(product: Product, mc: int, kc: int) -> int:
    """Return the bytes that gemv needs for mc sums on three levels and kc numbers of x, packed twice if complex."""
    return (3 * mc + product.parts * kc) * product.parts * SIZES[product.accumulator] + 4 * 64


class RegisterTile(NamedTuple):
    """A tile in elements of one accumulator type."""

    mr: int
    nv: int
    lanes: int

    @property
    def nr(self) -> int:
        """The columns of the tile."""
        return self.nv * self.lanes


def sizes_of(target: Target, product: Product) -> Tile:
    """Return the sizes of a packed product on a target; kc counts cells of `group` elements."""
    if product.halved:
        return _HALVES
    return _TILES if product.on_tiles else tile(target)


def register_tile(target: Target, product: Product, sizes: Tile | None = None) -> RegisterTile:
    """Return the register tile of a product on a target."""
    sizes = sizes or sizes_of(target, product)
    return RegisterTile(sizes.mr, sizes.nv, target.lanes(SIZES[product.accumulator]))


def arm_step(target: Target, dtype: str) -> tuple[str, int] | None:
    """Return the instruction of ARM for products of a type, and the elements of k in a cell; None without one."""
    steps = ARM_STEPS.get(dtype, ()) if target.is_arm else ()
    features = target.features
    if target.has_sve:  # which has dot products of its own, and no fmlal before SVE2
        features = features - {"asimdfhm"} | {"asimddp"}
    return next(((name, group) for feature, name, group in steps if feature in features), None)


def multiply_add(f: Function, product: Product, a: Value, b: Value, total: Value) -> Value:
    """Return total + a * b for vectors of cells: one fused multiply-add, or one dot product of `group`."""
    if product.step == "fma":
        return f.fma(a, b, total)
    if product.step in SEMIRINGS:
        return added(f, product, a * b if SEMIRINGS[product.step][0] == "mul" else a + b, total)
    from gemmery.cpu.ir_types import vector

    bits = 8 * f.target.vector_bytes
    cells = vector(f.target.lanes(SIZES[product.packed]), product.packed)
    a, b = f.bitcast(a, cells), f.bitcast(b, cells)
    if product.step == "dot_bf16":
        return f.intrinsic(f"llvm.x86.avx512bf16.dpbf16ps.{bits}", total.type, total, a, b)
    if product.step == "dot_i8":
        # A of one type with B has its sign bit inverted.
        unsigned, signed = (a, b) if (product.dtype == "uint8") == bool(product.b_dtype) else (b, a)
        return f.intrinsic(f"llvm.x86.avx512.vpdpbusd.{bits}", total.type, total, unsigned, signed)
    if product.step == "dot_i16":
        if f.target.has_vnni:
            return f.intrinsic(f"llvm.x86.avx512.vpdpwssd.{bits}", total.type, total, a, b)
        name = "llvm.x86.avx512.pmaddw.d.512" if bits == 512 else "llvm.x86.avx2.pmadd.wd"
        return total + f.intrinsic(name, total.type, a, b)
    raise ValueError(product.step)


def added(f: Function, product: Product, new: Value, total: Value) -> Value:
    """Return the sum of two vectors of sums; in a semiring the less or larger of each two, `total` where `new` is NaN.

    That is one instruction of x86.
    """
    if product.step not in SEMIRINGS:
        return total + new
    return f.select(new < total if SEMIRINGS[product.step][1] == "olt" else new > total, new, total)


# Sums of C in vectors, times nv, of the tiles for one row and for two, which take several panels side by side. Each is
# a stream for the prefetchers: one alone leaves most of a core's requests to memory unused.
ABREAST = 4
AHEAD = 16  # tiles of a block of A, 6 rows each: a step of one prefetches 1/16 of a step of the next panel of B
# The smallest step of B's panel, in bytes, for which that pays: a narrower panel would be prefetched too often.
AHEAD_FROM = {"avx2": 64, "avx512": 256}
# Bytes of a panel of B by which its lines are prefetched where B was packed once: with few rows it comes from memory,
# and the hardware's prefetcher of one stream leaves most of a core's requests unused. One thread of Emerald Rapids,
# 4096 x 4096, f32: m = 4 from 10.7 to 14.0 GB/s of B, 16 from 8.0 to 9.2, 32 from 5.9 to 6.4; 512 as before.
STREAM_AHEAD = 4096


def _prefetch_stream(f: Function, panels: list[Value], size: int) -> None:
    """Prefetch a step of panels of B, STREAM_AHEAD of it."""
    for panel in panels:
        for line in range(0, size, 64):
            f.prefetch(panel + (STREAM_AHEAD + line))


def tile_loop(
    f: Function,
    product: Product,
    tile: RegisterTile,
    steps: Value,
    a: Value,
    b: Value,
    prefetch: int,
    coming: Value | None = None,
    vectors: int = 0,
    rows: int = 0,
    apart: Value | None = None,
    once: bool = False,
) -> list[list[Var]]:
    """Loop over k in packed panels; returns the accumulators [mr][nv], each a vector.

    Those of the first `rows` and `vectors` of a row are all, unless these are 0. More than nv vectors are those of
    several panels of B, from one to the next `apart` bytes. B that was packed `once` is prefetched STREAM_AHEAD.

    Each step has nv loads of B, mr broadcasts of A and mr * nv multiply-adds. With 6 x 4 vectors of AVX-512 these are
    24 independent chains, which more than covers a latency of 4 cycles on two ports. The panel of A comes from L2 and
    is prefetched `prefetch` steps ahead, except with AVX2, whose steps of 6 cycles that makes longer; the hardware
    prefetches the panel of B. The next panel of B comes from L3, which no hardware prefetcher anticipates: each tile
    prefetches its share into L2, from `coming` on (Emerald Rapids, n = 2048: f32 from 209 to 222 GFLOP/s, f64 from 100
    to 108).

    A complex product sums the products with A's real parts, then those with its imaginary ones, and adds the two sums.
    Then those of x y* and of y x* are conjugates of each other to the last bit, and x x* is real. One sum of both in
    turn would round x y* and y x* differently.
    """
    from gemmery.cpu import arm  # only to compile

    size = SIZES[product.cell]
    each = 8 * (dtypes.get(product.stored).size if product.stored and not product.bits else SIZES[product.packed])
    width = tile.lanes * product.group * (product.bits or each) // 8
    row, vectors = tile.nv * width, vectors or tile.nv
    rows = rows or tile.mr
    whole = rows + rows % 2 if product.in_blocks else rows
    panels = [b if apart is None else b + apart * i for i in range(-(-vectors // tile.nv))]

    starts, factors = _first_rows(f, product, tile, panels, vectors)
    if product.seeded or product.bits:
        panels = [panel + (row if product.seeded else tile.nr * size) for panel in panels]
    totals = [[f.var(start) for start in starts] for _ in range(whole)]
    parts = product.parts

    def walk(first: int) -> None:
        """Add the products of every step, or of every second one from `first` on."""
        with f.loop(first, steps, parts) as p:
            a_row = a + p * (tile.mr * size)
            b_rows = [panel + p * row for panel in panels]
            if f.target.isa != "avx2":
                f.prefetch(a_row + prefetch * tile.mr * size)
            _prefetch_stream(f, b_rows, row if once else 0)
            if coming is not None and row >= AHEAD_FROM.get(f.target.isa, 256):
                f.prefetch(coming + p * (row // AHEAD), locality=2)
            _step(f, product, tile, a_row, b_rows, totals, width)

    walk(0)
    if parts == 2:
        _added_apart(f, [total for row in totals for total in row], starts[0].type, width, walk)
    for of_row in totals:
        for total, factor in zip(of_row, factors, strict=False):
            total.value = total.value * factor
    if product.in_blocks:
        arm.unfold(f, totals)
    return totals[:rows]


def _first_rows(
    f: Function, product: Product, tile: RegisterTile, panels: list[Value], vectors: int
) -> tuple[list[Value], list[Value]]:  # fmt: skip
    """Return what sums begin with, and by what they are multiplied at the end: rows before those of panels, if any."""
    from gemmery.cpu.ir_types import vector

    size, wide = SIZES[product.cell], vector(tile.lanes, product.accumulator)

    def first_row(v: int) -> Value:
        return f.load(wide, panels[v // tile.nv] + v % tile.nv * tile.lanes * size, align=size)

    begins = SEMIRINGS[product.step][2] if product.step in SEMIRINGS else 0
    starts = [f.broadcast(f.const(product.accumulator, begins), tile.lanes) if begins else f.zero(wide)] * vectors
    if product.seeded and not product.b_dtype:
        starts = [first_row(v) for v in range(vectors)]
    return starts, [first_row(v) for v in range(vectors if product.bits else 0)]


def _added_apart(f: Function, totals: list[Var], wide: str, width: int, walk: Callable[[int], None]) -> None:
    """Add what the second walk makes from zero to sums, which wait in memory meanwhile."""
    room = f.buffer(len(totals) * width)
    places = [(total, room + at * width) for at, total in enumerate(totals)]
    for total, at in places:
        f.store(total.value, at, align=width)
        total.value = f.zero(wide)
    walk(1)
    for total, at in places:
        total.value = f.load(wide, at, align=width) + total.value


def _step(
    f: Function,
    product: Product,
    tile: RegisterTile,
    a: Value,
    b_rows: Sequence[Value],
    totals: list[list[Var]],
    width: int,
) -> None:
    """Add the products of a step of k, whose rows of the panels of A and B are at `a` and `b_rows`.

    A vector of B has `width` bytes.
    """
    from gemmery.cpu import arm  # only to compile
    from gemmery.cpu.ir_types import lanes_of

    def column(first: int, v: int) -> Value:
        panel, at = divmod(first + v, tile.nv)
        return load_cells(f, product, tile, b_rows[panel], at * width)

    if f.target.is_arm and product.step not in SEMIRINGS:
        for number, row_of_b in enumerate(b_rows):
            first = number * tile.nv
            some = [of_row[first : first + tile.nv] for of_row in totals]
            arm.step(f, product.step, product.packed, product.cell, a, row_of_b, some, partial(column, first))
        return
    size, columns = SIZES[product.cell], [column(0, v) for v in range(len(totals[0]))]
    for i, row in enumerate(totals):
        scale = f.broadcast(f.load(product.cell, a + i * size, align=size), lanes_of(columns[0].type))
        for total, each in zip(row, columns, strict=True):
            total.value = multiply_add(f, product, scale, each, total.value)


def load_cells(f: Function, product: Product, tile: RegisterTile, row: Value, at: int) -> Value:
    """Load the vector of cells of B that begins `at` bytes after the start of a row, in the element type of sums."""
    from gemmery.cpu.convert import load_as  # only to compile
    from gemmery.cpu.ir import Value
    from gemmery.cpu.ir_types import constant, vector

    cells = vector(tile.lanes, product.cell)
    if not product.stored:
        return f.load(cells, row + at, align=SIZES[product.cell])
    if product.bits != 4:
        memory = dtypes.get("int8" if product.bits else product.stored)
        return f.bitcast(load_as(f, memory, product.packed, row + at, tile.lanes * product.group, None), cells)
    levels = f.convert("zext", f.load(vector(tile.lanes, "i8"), row + at // tile.lanes * tile.lanes, align=1), "i32")
    if at % tile.lanes:  # the second of two vectors in the same bytes
        levels = levels >> 4
    if f.target.isa != "avx512":
        return f.convert("sitofp", (levels & 15) - 8, product.packed)
    # From a table of 16 numbers in a register, by the lowest 4 bits of each index.
    table = ", ".join(f"float {constant('float', level)}" for level in range(-8, 8))
    return f.intrinsic("llvm.x86.avx512.permvar.sf.512", cells, Value(f, cells, f"<{table}>"), levels)
