"""The panels of packed operands as sizes: what a call needs to know of packing, without the code that generates it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from gemmery import dtypes
from gemmery.cpu.target import FAN, Target
from gemmery.cpu.ukernel import TILE_BYTES, Product, RegisterTile, register_tile
from gemmery.dtypes import SIZES
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from gemmery.cpu.ir import Value

STACK = 32 << 10  # bytes of panels up to which they are on the kernel's stack

Count = TypeVar("Count", int, "Value")


class Panels(NamedTuple):
    """One operand's packing."""

    name: str  # function name: "pack_a", "pack_b"
    width: int  # mr or nr
    product: Product
    seeded: bool = False  # each panel starts with a row of accumulators
    sign_inverted: bool = False  # sign bits are inverted
    deep: bool = False  # a cell is as long as a row of a tile register

    @property
    def group(self) -> int:
        """Return the elements of k in a cell."""
        return TILE_BYTES // SIZES[self.product.packed] if self.deep else self.product.group

    @property
    def row(self) -> int:
        """Return the bytes of one step of k."""
        bits = self.product.bits or 8 * SIZES[self.product.packed]
        return self.width * self.group * bits // 8 * self.forms

    @property
    def forms(self) -> int:
        """Return how often a step has its cells."""
        return self.product.forms if self.deep else 1

    @property
    def head(self) -> int:
        """Return the bytes before the first step: a row of initial sums or of factors."""
        return self.width * SIZES[self.product.accumulator] if self.seeded or self.product.bits else 0

    def steps(self, k: Count) -> Count:
        """Return the rows of a panel: one for each cell of k, padded with zeros to whole steps of the micro-kernel."""
        return steps_of(self.product, k) * (self.product.unit // self.group)

    @property
    def element(self) -> int:
        """Return the bytes of an element in memory; for complex types, of each component."""
        return SIZES[dtypes.get(self.product.dtype).llvm]


def operands(product: Product, register: RegisterTile) -> tuple[Panels, Panels]:
    """Return the packing of A and of B."""
    if product.halved:  # in memory or in panels, an element is float16
        product = product._replace(stored="")
    a = Panels(
        "pack_a", register.mr, product, sign_inverted=product.seeded and not product.b_dtype, deep=product.on_tiles
    )
    if product.bits:
        return a._replace(product=product._replace(stored="")), Panels("pack_b", register.nr, product)
    product = product._replace(dtype=product.b_dtype or product.dtype)
    if product.stored:  # bits are moved, not converted
        bits = 8 * dtypes.get(product.stored).size
        product = product._replace(dtype=f"uint{bits}", packed=f"i{bits}")
    return a, Panels("pack_b", register.nr, product, seeded=product.seeded)


def steps_of(product: Product, k: Count) -> Count:
    """Return the steps of the micro-kernel over k, of `unit` elements each, the last one padded with zeros."""
    return k if product.unit == 1 else (k + (product.unit - 1)) // product.unit


def panel_bytes(panels: Panels, k: Count) -> Count:
    """Return the bytes of one panel."""
    return panels.steps(k) * panels.row + panels.head


class Whole(NamedTuple):
    """All of a packed B, in bytes: blocks of k, of which each has a panel for every `width` columns."""

    block: int
    panel: int
    size: int


def whole(panels: Panels, k: int, n: int, kc: int) -> Whole:
    """Return the bytes of a B of k x n numbers in blocks of kc; a shorter last block lies as the others do."""
    panel = panel_bytes(panels, kc)
    block = -(-n // panels.width) * panel
    return Whole(block, panel, -(-k // kc) * block + slack(panels))


def slack(panels: Panels) -> int:
    """Return the bytes that packing may write past its last panel: a block of k as deep as a vector, and a vector."""
    return 64 // (panels.group * SIZES[panels.product.packed]) * panels.row + 64


def workspace_bytes(
    target: Target, product: Product, m: int, k: int, mc: int, kc: int, nc: int, once: bool = False
) -> int:
    """Return the bytes of one thread's buffers for blocks of these sizes, and for sums of C's m rows over blocks of k.

    If k is one block, the kernel has small buffers on its stack, and the call need not reserve any. With `once` B has
    been packed before, and needs none.
    """
    register = register_tile(target, product)
    wide = widened(product, once)
    a, b = buffers(product, register, mc, kc, 0 if once else nc)
    if wide and (product.on_tiles or m > WIDENED * register.mr):
        a, b = buffers(wide, register, mc, kc, nc)
    if k <= kc and a + b <= STACK and not (product.on_tiles and k > depth(product, register)):
        return 0
    rows = m if product.rounds and k > kc * fan(product) else 0
    if product.sums_apart and k > (min(kc, CHAIN) if product.on_tiles else kc):
        rows += mc if product.on_tiles and k <= kc else m
    tiled = tiled_bytes(product, register, mc, nc) if product.on_tiles else 0
    return a + b + tiled + rows * nc * SIZES[product.scalar] + 64


def widened(product: Product, once: bool) -> Product | None:
    """Return the product whose panels of B are the numbers that steps multiply; None if those of B are such already."""
    return product._replace(stored="") if once and product.stored and not product.bits else None


WIDENED = 8  # tiles down C from which on the panels of a block are widened once and not by each step of each tile
DEPTH = 36 << 10  # bytes of the part of a panel of B on the tile unit that stays in L1 (48 KiB) while A goes by
CHAIN = 1024  # elements of k that it sums in one chain where sums are rounded


def depth(product: Product, register: RegisterTile) -> int:
    """Return the elements of k in a part of a panel of B on the tile unit."""
    elements = max(DEPTH // (register.nr * TILE_BYTES), 1) * product.unit
    return min(elements, CHAIN) if product.rounds else elements


def fan(product: Product) -> int:
    """Return the blocks of k whose sums are added in one chain; each is up to four chains on the tile unit."""
    return FAN // 4 if product.on_tiles else FAN


def tiled_bytes(product: Product, register: RegisterTile, mc: Count, nc: Count) -> Count:
    """Return the bytes of the sums of a block of C that stay tiles between parts of k."""
    tall, wide = (mc + (register.mr - 1)) // register.mr, (nc + (register.nr - 1)) // register.nr
    return tall * wide * (register.mr * register.nr * SIZES[product.accumulator])


def buffers(product: Product, register: RegisterTile, mc: Count, kc: Count, nc: Count) -> tuple[Count, Count]:
    """Return the bytes of the packed block of A and of B, each a multiple of 64."""
    a, b = operands(product, register)
    tall, wide = (mc + (a.width - 1)) // a.width, (nc + (b.width - 1)) // b.width
    return _aligned(tall * panel_bytes(a, kc) + slack(a)), _aligned(wide * panel_bytes(b, kc) + slack(b))


def _aligned(size: Count) -> Count:
    return (size + 63) // 64 * 64
