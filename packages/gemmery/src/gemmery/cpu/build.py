"""Make a callable kernel from (problem, config), for each CPU rung.

Each builder imports the modules that it needs, since importing all of them would delay a first product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from gemmery import dtypes
from gemmery.cpu import jit
from gemmery.cpu.images import (
    COLUMNS,
    direct_image,
    dots_image,
    gemv_image,
    gemv_product,
    halved,
    load,
    once_entries,
    packed_image,
    product,
    streamed_image,
)
from gemmery.cpu.launch import Blocks, Launch, Sharing
from gemmery.cpu.panels import STACK, buffers, operands, whole, workspace_bytes
from gemmery.cpu.split import Unit
from gemmery.cpu.target import (
    DOTS_APART,
    DOTS_BLOCK,
    DOTS_ROWS,
    Target,
    constants,
    direct_tile,
    dots_columns,
    host,
    k_block,
)
from gemmery.cpu.ukernel import (
    ABREAST,
    SHORT,
    TILE_ROWS,
    Product,
    register_tile,
    sizes_of,
    vector_room,
)
from gemmery.problem import Config, Problem


def textbook(rung: str) -> Callable[[Problem, Config], Launch]:
    """Return the builder of one of the first rungs."""

    def build(problem: Problem, config: Config) -> Launch:
        from gemmery.cpu import simple

        target = host()
        generate = getattr(simple, rung)
        entries = jit.load(target, f"{rung}_{problem.dtype}", lambda: generate(target, problem.dtype))
        blocks = Blocks(kc=config.get("block", 0))
        element = dtypes.get(problem.dtype)
        return Launch(entries[rung], element.llvm, element.size, lambda m, n, k: blocks)

    return build


def amx_tile(problem: Problem, config: Config) -> Launch:
    """Return the kernel of one block of tiles at a time, which packs nothing."""
    from gemmery.cpu import simple

    target = host()
    types = product(target, problem)
    entries = jit.load(target, f"amx_tile_{types.name}", lambda: simple.amx_tile(target, types))
    return Launch(entries["amx_tile"], types.scalar, dtypes.get(problem.out).size, lambda m, n, k: Blocks())


def _in_memory(types: Product) -> Product:
    """Return the product that has the panels of a B packed once: that by vectors, where halves are made of them."""
    return types._replace(packed="float", group=1, step="fma") if types.halved and types.stored else types


# OpenBLAS 0.3.34 adds along k in vectors where C is that small and B column-major, or C a few columns wide. Its error
# is then 1.7 roundings for 40 x 300 x 5 in f32 (AVX-512), that of one chain of 300 is 13.7.
SMALL_C = 1024
_SHORT_CHAIN = 128


def chain(problem: Problem) -> int:
    """Return the most elements of k that one chain adds; it depends on m only where the bits of a row may.

    Short chains everywhere would cost squares 2 to 24 % of their time: C is loaded and stored once a block.
    """
    p, target = problem, host()
    whole = k_block(target)
    if p.dtype not in ("f32", "f64") or p.out != p.dtype or p.epilogue:
        return whole
    narrow = p.b_layout in ("row", "packed") and p.n <= target.lanes(dtypes.get(p.dtype).size)
    small = p.b_layout == "col" and p.m * p.n <= SMALL_C and not p.invariant
    return min(whole, _SHORT_CHAIN) if narrow or small else whole


def packed_kc(target: Target, types: Product) -> int:
    """Return kc of panels of these types, in real numbers: at most 384 for complex128, as NumPy's chains are."""
    kc = sizes_of(target, types).kc * types.group
    return min(kc, 384) if types.is_complex and types.accumulator == "double" else kc


def block_sides(target: Target, types: Product) -> tuple[int, int]:
    """Return (mc, nc) of panels of these types."""
    sizes = sizes_of(target, types) if types.on_tiles else constants(target)
    return sizes.mc, sizes.nc


def packed(problem: Problem, config: Config) -> Launch:
    """Return the packed product's kernel; mc, kc and nc of the config override the target's."""
    p, longest = problem.by_rows(), chain(problem)
    kc = 0 if longest == k_block(host()) else longest
    types = product(host(), p)
    return packed_once(types, kc) if p.b_layout == "packed" else _packed(types, *_block_config(config, kc))


def amx_halves(problem: Problem, config: Config) -> Launch:
    """Return the packed product's kernel for float16 as two bfloat16 on the tile unit."""
    p = problem.by_rows()
    types = halved(product(host(), p))
    return packed_once(types) if p.b_layout == "packed" else _packed(types, *_block_config(config, 0))


def _block_config(config: Config, kc: int) -> tuple[int, int, int]:
    return config.get("mc", 0), config.get("kc", kc), config.get("nc", 0)


@cache
def _packed(types: Product, mc: int, kc: int, nc: int) -> Launch:
    target = host()
    (tall, wide), register, sized = block_sides(target, types), register_tile(target, types), mc or kc or nc
    mc, kc, nc = mc or tall, kc or packed_kc(target, types), nc or wide

    narrow = nc if types.on_tiles or sized else min(nc, _NARROW)

    def blocks(m: int, n: int, k: int) -> Blocks:
        deep = even_kc(types, k, kc)
        tall, wide = even(m, mc, register.mr), even(n * types.parts, narrow if m <= mc else nc, register.nr)
        return Blocks(tall, deep, wide, workspace_bytes(target, types, m, k * types.parts, tall, deep, wide))

    step = _step(register.mr * register.nv) * types.parts / types.group
    unit = Unit(register.mr, register.nr // types.parts, step, _PACK, nc, read=_read(types.dtype))
    if types.on_tiles:
        unit = unit._replace(rows=TILE_ROWS, columns=TILE_ROWS, step=_TILE_STEP * types.forms / types.unit)
    problem = Problem(2, 2, 2, types.dtype, types.out)
    entry = load(target, problem, packed_image(target, types))["packed"]
    shares = partial(_sharing, types) if types.on_tiles and not sized else None
    return Launch(entry, types.scalar, dtypes.get(types.out).size, blocks, unit=unit, shares=shares)


def _sharing(types: Product, n: int, k: int) -> Sharing:
    """Return how threads share a B of k x n that is packed once for all of them (16 threads, n = 4096, bfloat16: 29 ms
    where each packs what it reads, 15 where it was packed before).
    """
    launch, panels = packed_once(types), operands(types, register_tile(host(), types))[1]
    size = whole(panels, k, n, even_kc(types, k, packed_kc(host(), types))).size
    return Sharing(launch, once_entries(types)["panels"], size, panels.width)


@cache
def packed_once(types: Product, kc: int = 0) -> Launch:
    """Return the kernel of products with a B that was packed once, in blocks of kc numbers of k, 0: the target's."""
    target = host()
    (mc, nc), register = block_sides(target, types), register_tile(target, types)
    most, panels = kc or packed_kc(target, types), operands(_in_memory(types), register)[1]

    def blocks(m: int, n: int, k: int) -> Blocks:
        deep = even_kc(types, k, most)
        tall, wide = even(m, mc, register.mr), even(n * types.parts, nc, register.nr)
        return Blocks(tall, deep, wide, workspace_bytes(target, types, m, k * types.parts, tall, deep, wide, once=True))

    step = _step(register.mr * register.nv) * types.parts / types.group
    if types.on_tiles:
        step = _TILE_STEP * types.forms * register.mr * register.nv / (TILE_ROWS * types.unit)
    # A part begins where a panel begins: on the tile unit at a multiple of three tiles, not of one. Parts read the same
    # panels from L3 or memory again, as they would pack them.
    read = _read(types.dtype)
    few = 1 if types.on_tiles else ABREAST
    unit = Unit(register.mr, register.nr // types.parts, step, read, wide=nc, read=read, few=few)

    @cache
    def steps(k: int, n: int) -> tuple[int, int]:
        block, panel, _ = whole(panels, k * types.parts, n * types.parts, even_kc(types, k, most))
        return block, panel // unit.columns

    entry, size = once_entries(types)["packed"], dtypes.get(types.out).size
    return Launch(entry, types.scalar, size, blocks, unit=unit, b_steps=steps)


def even_kc(types: Product, k: int, kc: int) -> int:
    """Return the numbers of k in a block of at most kc."""
    return even(k * types.parts, kc, types.block_unit * types.parts)


def packed_panels(problem: Problem, config: Config) -> Launch:
    """Return the kernel that packs all of A and B at once; it runs on the caller's thread."""
    from gemmery.cpu import loops

    target, types = host(), product(host(), problem)
    entries = jit.load(target, f"packed_panels_{types.name}", lambda: loops.packed_panels(target, types))

    def blocks(m: int, n: int, k: int) -> Blocks:
        return Blocks(m, k, n, sum(buffers(types, register_tile(target, types), m, k, n)) + 64)

    return Launch(entries["packed_panels"], types.scalar, dtypes.get(problem.out).size, blocks)


# The largest nc for up to mc rows, which read a panel of B once, from L2. Milliseconds, B transposed, a thread: Emerald
# Rapids, 4096 x 4096, nc of 2048, 256, 128: 4 rows, f32 12.1, 7.9, 7.3, f64 22.4, 14.6, 13.9; 32 rows, f64 38.9, 33.0,
# 31.3. Zen 4, 2048 x 2048, f64, nc of 2048, 256, 128, 64: 4 rows 4.8, 2.7, 2.7, 2.7; 64 rows 15.2, 12.6, 12.5, 13.3.
_NARROW = 128


_PACK = 0.3  # ns to pack an element: 0.15 to 0.6 by layout


# ns of a product of tile registers: 16 cycles at 2.5 GHz. Parts are multiples of one tile, since those of three leave
# some threads 1.1 times the work of others at n = 1024.
_TILE_STEP = 6.25


def _step(vectors: int) -> float:
    """Return the ns of one step of k on a tile of so many vectors: two multiply-adds per cycle at 3 GHz."""
    return vectors / 6


def _read(dtype: str) -> float:
    """Return the ns in which one core loads an element from L3 or memory: 10 to 25 bytes per ns, by the CPU."""
    return dtypes.get(dtype).size / 16


def even(total: int, block: int, unit: int) -> int:
    """Return the block size that makes no more blocks than `block` does, all of nearly equal size, in whole units.

    Blocks of 512 would split 1025 into 512 + 512 + 1, and the last block would pack as much as it multiplies.
    """
    count = max(1, -(-total // block))
    each = -(-total // count)
    return max(unit, -(-each // unit) * unit)


def direct_refuses(problem: Problem) -> str:
    """Return why the kernels without packing cannot run a problem; "" when they can."""
    p = problem.by_rows()
    if p.out != p.dtype:
        return f"it accumulates in C, so C must be {p.dtype}, not {p.out}"
    if p.epilogue:
        return "it has no epilogue (bias, activation); use packed"
    if p.b_layout != "row" or p.c_layout != "row":
        return "it loads vectors along the rows of B and C, so the elements of a row must be adjacent in memory"
    return ""


def direct(problem: Problem, config: Config) -> Launch:
    """Return the kernel without packing: the general one, or with `specialized` one with tiles for the problem's shape.

    `mr` of the config is the height of those tiles.
    """
    p = problem.by_rows()
    blocks = Blocks(kc=chain(problem))
    if config.get("specialised") or config.get("mr"):
        return _specialized(p, config.get("mr", 0), blocks)
    least = max(least for least in direct_columns(p.dtype) if least <= max(p.n, 2))
    return general(p.dtype, least, blocks, p.semiring)


def _specialized(p: Problem, mr: int, blocks: Blocks) -> Launch:
    from gemmery.cpu import direct as unpacked

    target = host()
    cut = unpacked.cut(target, p.dtype, p.a_layout, p.m, p.n, p.k, p.scaled, mr, p.semiring)
    entries = jit.load_together(target, (cut.name, lambda: unpacked.direct(target, cut)))
    element = dtypes.get(p.dtype)
    nv = cut.nv or cut.nv_edge
    unit = Unit(cut.mr, nv * target.lanes(element.size), _step(cut.mr * nv), read=_read(p.dtype))
    return Launch(entries["direct"], element.llvm, element.size, lambda m, n, k: blocks, unit=unit)


@cache
def direct_columns(dtype: str) -> list[int]:
    """Return the numbers of columns from which on C is cut for threads differently."""
    lanes = host().lanes(dtypes.get(dtype).size)
    return sorted({2, *(least for least in (4, 8) if least < lanes), lanes + 1})  # beyond a vector chains are longer


@cache
def general(dtype: str, least: int, blocks: Blocks, semiring: str = "") -> Launch:
    """Return the kernel without packing for every shape, to be cut as a C of at least so many columns is."""
    target, element = host(), dtypes.get(dtype)
    entries = load(target, Problem(2, 2, 2, dtype, dtype), direct_image(target, dtype, semiring))
    lanes = target.lanes(element.size)
    nv = 1 if least <= lanes else direct_tile(target)[1]
    each = _step(1) / lanes * max(lanes / least, _RAGGED)
    unit = Unit(_ROWS, nv * lanes, _step(_ROWS * nv), each=each, read=_read(dtype))

    def sized(m: int, n: int, k: int) -> Blocks:
        return room_for_copies(target, blocks, m, n, k, element.size)

    return Launch(entries["direct"], element.llvm, element.size, sized, unit=unit)


def room_for_copies(target: Target, blocks: Blocks, m: int, n: int, k: int, size: int) -> Blocks:
    """Return blocks of `direct` with room, in bytes as `mc` too, for the copy of a block of B that no stack holds."""
    vectors = min(direct_tile(target)[1], -(-n // target.lanes(size)))
    room = min(k, blocks.kc) * vectors * target.vector_bytes
    copies = 0 < target.copied <= m and vectors > 1
    return blocks._replace(mc=room, workspace=room) if copies and room > STACK else blocks


def dots_refuses(problem: Problem) -> str:
    """Return why dot products cannot run a problem; "" when they can."""
    p = problem.by_rows()
    most = dots_columns(host(), dtypes.get(p.dtype).size)
    if dots_few_rows(p):
        p = p.transposed()
    if not 2 <= p.n <= most:
        return f"C must have 2 columns of {p.dtype} to half of a vector, here {most}, not {p.n}"
    if p.a_layout != "row":
        return "it loads vectors along the rows of A, so the elements of a row must be adjacent in memory"
    if p.out != p.dtype:
        return f"it adds in the type of A and B, so C must be {p.dtype}, not {p.out}"
    return "it has no epilogue (bias, activation); use packed" if p.epilogue else ""


def dots_few_rows(problem: Problem) -> bool:
    """Return True where `dots` computes C' = B' A': C, row-major, has few rows and more columns than it takes."""
    most = dots_columns(host(), dtypes.get(problem.dtype).size)
    return 2 <= problem.m <= most < problem.n and problem.b_layout == "col"


def dots(problem: Problem, config: Config) -> Launch:
    """Return the kernel of few columns of C, or of few rows, which sums by lanes."""
    return _dots(problem.dtype, dots_few_rows(problem.by_rows()))


@cache
def _dots(dtype: str, few_rows: bool) -> Launch:
    target, element = host(), dtypes.get(dtype)
    entry = load(target, Problem(2, 2, 2, dtype, dtype), dots_image(target, dtype))["dots"]
    # The sums on three levels, and copied columns of B.
    room = dots_columns(target, element.size) * (3 * DOTS_ROWS + DOTS_APART) * element.size
    blocks = Blocks(DOTS_ROWS, DOTS_BLOCK, int(few_rows), room)
    each = _step(1) / target.lanes(element.size) * 1.5  # 0.5 for loads and the sums of lanes
    rows, columns = (0, _VECTOR_ROWS) if few_rows else (_VECTOR_ROWS, 0)
    unit = Unit(rows, columns, 0, each=each, read=_read(dtype))
    return Launch(entry, element.llvm, element.size, lambda m, n, k: blocks, unit=unit)


_ROWS = 4  # in which threads divide the rows of C; each then chooses tiles of nearly equal height
_RAGGED = 1.25  # time of a C wider than a vector, relative to one of whole tiles


def gemv(problem: Problem, config: Config) -> Launch:
    """Return the kernel of one column (n == 1) or one row (m == 1) of C, in blocks of mc rows and kc columns of A."""
    down_columns = problem.b_layout == "row" if problem.n > 1 else problem.a_layout == "col"
    rows, columns = _LONG_ROWS if down_columns else _VECTOR_ROWS, config.get("columns", COLUMNS)
    kc = min(config["kc"], chain(problem)) if down_columns and problem.n > 1 else config["kc"]
    return _gemv(problem.dtype, problem.out, problem.epilogue, columns, config["mc"], kc, rows)


@cache
def _gemv(dtype: str, out: str, epilogue: str, columns: int, mc: int, kc: int, rows: int) -> Launch:
    target, problem, size = host(), Problem(2, 1, 2, dtype, out, epilogue=epilogue), dtypes.get(dtype).size
    types = gemv_product(problem)
    entry = load(target, problem, gemv_image(target, types, columns))["gemv"]
    room = vector_room(types, mc, kc)
    unit = Unit(rows, rows, rows * size / _BANDWIDTH, each=size / _BANDWIDTH)
    out_size = dtypes.get(out).size

    def blocks(m: int, n: int, k: int) -> Blocks:
        short = max(m, n, k) <= SHORT
        return Blocks(min(mc, SHORT), min(kc, SHORT), int(n == 1)) if short else Blocks(mc, kc, int(n == 1), room)

    return Launch(entry, types.accumulator, out_size, blocks, unit=unit)


_VECTOR_ROWS = 64  # unit in which threads divide the rows of A: whole cache lines of y
_LONG_ROWS = 1024  # the same for contiguous columns: shorter pieces would not be streams for the prefetcher
_BANDWIDTH = 40.0  # bytes per ns that one core reads: 25 from memory, 70 from a cache


def streamed(problem: Problem, config: Config) -> Launch:
    """Return the kernel for few rows and a B larger than L2; `depth` and `nv` of the config override the defaults."""
    from gemmery.cpu import streamed as streams

    p, target = problem.by_rows(), host()
    depth, nv = streams.sizes(target, p.m)
    shape = streams.Streams(p.dtype, config.get("depth", depth), config.get("nv", nv))
    entries = load(target, p, streamed_image(target, shape))
    element = dtypes.get(p.dtype)
    room = (target.l2 or 1 << 20) // 2
    step = shape.nv * target.lanes(element.size)

    def blocks(m: int, n: int, k: int) -> Blocks:
        nc = even(n, max(room // (m * element.size), step), step)
        return Blocks(kc=chain(problem), nc=nc, workspace=streams.workspace_bytes(target, shape, m, nc))

    unit = Unit(0, step, p.m * _step(shape.nv), read=_read(p.dtype))
    return Launch(entries["streamed"], element.llvm, element.size, blocks, unit=unit)


def forget() -> None:
    """Drop the kernels that are kept with the constants under which they were built."""
    for builder in (_packed, packed_once, general, _gemv):  # with the cuts for threads that each has made
        builder.cache_clear()
