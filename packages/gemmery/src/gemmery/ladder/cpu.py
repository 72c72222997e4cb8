"""The CPU ladder, from the triple loop to the packed product on all cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from gemmery import dtypes
from gemmery.cpu import build, images, target
from gemmery.ladder.rung import Rung, without_vector
from gemmery.problem import Problem

_FLOATS = ("f32", "f64")
_SUMS = {"bf16": "f32", "int8": "int32", "uint8": "uint32"}  # what the tile unit multiplies, and its sums


def _later(module: str, name: str) -> Callable[..., Any]:
    """Return a function whose module is imported by its first call: a product needs one kernel, a mistake none."""

    def call(*arguments: Any) -> Any:
        return getattr(import_module(f"gemmery.{module}"), name)(*arguments)

    return call


blocked = _later("verify", "blocked")  # f(k) of sums in blocks


def _plain(problem: Problem) -> str:
    """Refusals of the first rungs, which loop over C in place, in one type."""
    if problem.epilogue or problem.scaled:
        return "it computes only C = A B, without alpha, beta, bias or activation"
    return _in_one_type(problem)


def _in_one_type(problem: Problem) -> str:
    different = problem.out != problem.dtype
    return f"it accumulates in C, so C must be {problem.dtype}, not {problem.out}" if different else ""


def _rows(problem: Problem) -> str:
    """Refusals of rungs that load vectors along the rows of B and C."""
    if problem.b_layout != "row" or problem.c_layout != "row":
        return "it loads vectors along the rows of B and C, so the elements of a row must be adjacent in memory"
    return _plain(problem)


def _packed(problem: Problem) -> str:
    if problem.c_layout == "any":
        return "it stores vectors of C, so elements of C must be adjacent along rows or columns"
    return images.packed_refuses(problem)


def _batched(problem: Problem) -> str:
    from gemmery.cpu import along_batch, batched

    if problem.interleaved:
        return along_batch.refuses(problem)
    parts = batched.numbers(problem)
    vectors = problem.m == problem.n == 1 and parts == 1
    if parts * max(problem.m, problem.n, 0 if vectors else problem.k) > batched.LARGEST:
        most = batched.LARGEST
        return f"its code is specialized to the shape: m, n and k must be at most {most}, {most // 2} if complex"
    if 1 in (problem.m, problem.n) and problem.m * problem.n * problem.k > batched.LARGEST_VECTOR:
        return f"gemv is better for a vector and a matrix of more than {batched.LARGEST_VECTOR} elements"
    if parts == 2 and (problem.scaled or problem.epilogue):
        return "for complex types it computes only C = A B; use packed for alpha, beta, bias and activation"
    return _packed(problem)


def _strassen(problem: Problem) -> str:
    if problem.epilogue:
        return "it has no epilogue (bias, activation); use packed"
    return _in_one_type(problem) or _packed(problem)


def _tiles(problem: Problem) -> str:
    """Refusals of the packed product on the tile unit."""
    if problem.dtype not in _SUMS:
        return f"the tile unit multiplies {', '.join(_SUMS)}, not {problem.dtype}"
    return target.without_tiles() or _packed(problem)


def _halves(problem: Problem) -> str:
    """Refusals of float16 on the tile unit, whose sums are float32."""
    if problem.dtype != "f16":
        return f"it multiplies f16 by halves, not {problem.dtype}"
    if problem.out == "f64":
        return "its sums are float32, so C must be f16 or f32, not f64: use packed"
    return target.without_tiles() or _packed(problem)


def _unpacked_tiles(problem: Problem) -> str:
    """Refusals of the rung that reads tiles of A in place and stores those of C."""
    if problem.out != _SUMS.get(problem.dtype, problem.out):
        return f"it stores the sums of the tile unit, so C must be {_SUMS[problem.dtype]}, not {problem.out}"
    if problem.a_layout != "row":
        return "it loads tiles along the rows of A, so the elements of a row must be adjacent in memory"
    return _tiles(problem) or _rows(problem._replace(out=problem.dtype))


def _textbook(name: str, refuses: Callable[[Problem], str] = _rows, **fields: Any) -> Rung:
    """Return the row of a kernel that loops over C in place."""
    return Rung(name, dtypes=_FLOATS, refuses=refuses, build=build.textbook(name), source="cpu/simple.py", **fields)


_packed_rung = partial(
    Rung,
    dtypes=dtypes.NAMES,
    refuses=_packed,
    build=build.packed,
    bound=blocked,
    mixed=("int8", "uint8"),
    space={"mc": (48, 96, 192, 384), "kc": (128, 256, 512, 1024), "nc": (512, 1024, 2048, 4096)},
)
_TILE_SPACE = {"mc": (64, 128, 256, 512), "kc": (512, 1024, 2048, 4096), "nc": (512, 1024, 2048)}
_INTEGERS = tuple(row.name for row in dtypes.DTYPES if row.kind in "iu")
_direct_rung = partial(Rung, dtypes=_FLOATS, refuses=build.direct_refuses, bound=blocked)

CPU = (
    _textbook(
        "scalar_naive",
        idea="C[i,j] += A[i,k] * B[k,j], loops i, j, k",
        parent=None,
        refuses=_plain,
        lesson=(
            "The definition, as three loops. B is read down its columns, so every multiply-add misses a cache line; "
            "and each adds to the same element of C, so each waits for the one before it. The CPU does one where it "
            "could do dozens."
        ),
    ),
    _textbook(
        "scalar_reordered",
        idea="loops i, k, j: B and C are read along rows",
        parent="scalar_naive",
        refuses=_plain,
        lesson=(
            "Only the order of two loops changes. The inner loop now runs along the rows of B and C: every byte of a "
            "cache line is used, the prefetchers can follow, and the multiply-adds no longer depend on each other."
        ),
    ),
    _textbook(
        "simd_row",
        idea="one element of A broadcast, fused multiply-add over a row of B",
        parent="scalar_reordered",
        lesson=(
            "A vector instruction applies one operation to a whole vector of adjacent elements, and the loop order of "
            "the parent rung made them adjacent. The limit is now C, which is loaded and stored for every "
            "multiply-add."
        ),
    ),
    _textbook(
        "simd_blocked",
        idea="simd_row inside square blocks that fit in a cache",
        parent="simd_row",
        space={"block": (8, 16, 32, 64, 128, 256, 512, 1024, 2048)},
        default={"block": 512},
        lesson=(
            "A block of B that stays in a cache is read from there many times. This pays once B no longer fits in the "
            "cache, and costs a little before that: sweep the side of the block to see the caches."
        ),
    ),
    _textbook(
        "simd_tile",
        idea="a tile of C stays in registers while k runs; A and B are read in place",
        parent="simd_blocked",
        lesson=(
            "C leaves the inner loop: its sums are in registers until k ends. A step loads nr elements of B and mr of "
            "A for mr x nr multiply-adds; the parent rung loads two vectors and stores one for each. A and B are read "
            "where they are: each step of k goes to another row of B, which is another page once rows are 4 KiB long."
        ),
    ),
    Rung(
        name="packed_panels",
        idea="simd_tile reads A and B from panels, copies in the order in which it reads them",
        parent="simd_tile",
        dtypes=_FLOATS,
        refuses=lambda problem: _plain(problem) or _packed(problem),
        build=build.packed_panels,
        lesson=(
            "Packing copies m k + k n elements once, and the tile then reads consecutive memory: steps stay on a "
            "page, and rows do not compete for one set of a cache. Operands of any layout become the same panels. All "
            "of A and B is packed as one block, so with a large k a panel of B no longer fits in L1, nor the panels "
            "of A in L2."
        ),
        source="cpu/loops.py",
    ),
    _packed_rung(
        name="packed",
        semirings=True,
        idea="five loops around packed_panels: each keeps one block in one cache",
        parent="packed_panels",
        lesson=(
            "Blocks of nc columns, kc steps and mc rows are chosen so that a packed block of B stays in L3, one of A "
            "in L2 and a panel of B in L1. Each is read from there many times before the next one comes, whatever the "
            "size of the product. A product that fits anyway gains nothing; a large one does. Every fast library "
            "works this way."
        ),
        source="cpu/loops.py",
    ),
    _packed_rung(
        name="packed_threaded",
        idea="packed on all cores: C is cut along m and n, and each thread packs what its part reads",
        parent="packed",
        lesson=(
            "C is cut along m and n, never along k: no two threads add to the same element, so any number of threads "
            "gives the same bits. Each thread packs its own panels; some are packed twice, but no thread waits. "
            "Workers spin briefly, then sleep; a product too short to justify waking them runs on one thread."
        ),
        source="cpu/pool.py",
    ),
    Rung(
        name="amx_tile",
        idea="simd_tile on the tile unit (AMX): 2 x 2 tiles of 16 x 16 sums; A is read in place, nothing is packed",
        parent="simd_tile",
        dtypes=tuple(_SUMS),
        refuses=_unpacked_tiles,
        build=build.amx_tile,
        lesson=(
            "One instruction adds 16 x 16 sums of 64 bytes of k in 16 cycles: 1024 multiply-adds a cycle in int8. Two "
            "tiles of A and two of B serve four products, one load a product, which is as fast as the unit. But the "
            "unit wants 4 bytes of k of a column side by side. They lie in two or four rows of B, and to interleave "
            "them again for every 32 rows of C takes several times as long as the products."
        ),
        source="cpu/simple.py",
    ),
    _packed_rung(
        name="amx_packed",
        idea="packed on the tile unit: B is interleaved once, A is read in place, sums stay tiles between blocks of k",
        parent="amx_tile",
        dtypes=tuple(_SUMS),
        refuses=_tiles,
        space=_TILE_SPACE,
        lesson=(
            "The unit is so fast that bringing and writing tiles takes the time. So a part of a panel of B stays in L1 "
            "while A goes by, with loads that say used once; A is not copied where its rows are whole chunks of 64 "
            "bytes; sums stay tiles in L2 until a chain of k ends, and are written while the next ones are computed."
        ),
        source="cpu/tile_unit.py",
    ),
    _packed_rung(
        name="amx_threaded",
        idea="amx_packed on all cores: a large B is packed once for all, and each thread has a tile unit of its own",
        parent="amx_packed",
        dtypes=tuple(_SUMS),
        refuses=_tiles,
        space=_TILE_SPACE,
        lesson=(
            "Each core has a tile unit, so the products divide well; packing does not: with 4 x 4 parts each column of "
            "B would be packed by four threads. So all threads pack a large B together before they multiply. A thread "
            "shapes its tile registers when its part begins and releases them "
            "when it ends, since every switch of threads would save them otherwise, 8 KiB each time."
        ),
        source="cpu/pool.py",
    ),
    _packed_rung(
        name="amx_halves",
        idea="amx_packed for float16: a number is the sum of two bfloat16, and a product of numbers is four of halves",
        parent="amx_packed",
        dtypes=("f16",),
        refuses=_halves,
        build=build.amx_halves,
        space={"mc": (64, 128, 256), "kc": (256, 512, 768, 1024), "nc": (512, 1024, 2048)},
        lesson=(
            "The unit has no float16, but a multiply-add of bfloat16 costs it an eighth of one by vectors. The first 8 "
            "of a number's 11 bits are one bfloat16, the others a second one, and their four products are exact in "
            "float32: four cheap products replace an expensive one, and no bit is lost. But an infinity times a half "
            "that is zero is NaN, so sums that are not finite are computed again by multiply-adds."
        ),
        source="cpu/tile_unit.py",
    ),
    _direct_rung(
        name="direct",
        idea="small or thin products: tiles of a height and width chosen for the shape; nothing is packed",
        parent="simd_tile",
        dtypes=(*_FLOATS, *_INTEGERS),
        build=build.direct,
        semirings=True,
        space={"mr": (4, 8, 12, 16), "specialised": (0, 1)},
        lesson=(
            "Packing copies m k + k n elements to speed up m n k multiply-adds. In small or thin products there are "
            "too few of the latter. A register tile that reads A and B in place is then faster, as long as B stays in "
            "cache. Rows of A that are a multiple of 4 KiB apart map to the same L1 set, so for them the tile must "
            "have few rows."
        ),
        source="cpu/direct.py",
    ),
    _direct_rung(
        name="streamed",
        idea="few rows of A: B is read once, as parallel streams, and the sums of C are kept packed in L2",
        parent="direct",
        build=build.streamed,
        space={"depth": (2, 4, 8), "nv": (1, 2, 4)},
        lesson=(
            "With few rows of A the limit is reading B. A tile that runs down k jumps one page per step, which no "
            "prefetcher follows; several rows of B read in parallel are streams that prefetchers do follow. C is then "
            "passed over many times, so its sums are kept packed in L2."
        ),
        source="cpu/streamed.py",
    ),
    Rung(
        name="gemv",
        idea="matrix times vector: A is read once, in memory order, several rows or columns at a time",
        parent="simd_row",
        dtypes=dtypes.NAMES,
        refuses=lambda problem: without_vector(problem) or images.packed_refuses(problem),
        build=build.gemv,
        bound=blocked,
        space={"mc": (1024, 2048, 4096, 8192), "kc": (1024, 2048, 4096), "columns": (4, 6, 8)},
        default={"mc": 4096, "kc": 4096},
        lesson=(
            "There is one multiply-add per element of A, so memory is the limit: the kernel must read A once, in "
            "order, with enough loads in flight. A row-major A is read as dot products, a transposed one as sums of "
            "columns; neither is copied."
        ),
        source="cpu/gemv.py",
    ),
    Rung(
        name="dots",
        idea="few columns or rows of C: vectors run along k, and one of the larger operand serves all of them",
        parent="gemv",
        dtypes=_FLOATS,
        refuses=build.dots_refuses,
        build=build.dots,
        bound=blocked,
        lesson=(
            "Where C is narrower than half of a vector, a tile along its rows leaves most lanes empty: it takes as "
            "many multiply-adds for two columns as for sixteen. Vectors along k are full, and A is read once, in "
            "memory order, as for a single vector. Adding the lanes costs a few additions a row, so a short k gains "
            "nothing."
        ),
        source="cpu/dots.py",
    ),
    Rung(
        name="batched",
        idea="many small products: C in registers, sizes fixed at compile time, the loop over the batch compiled",
        parent="direct",
        dtypes=dtypes.NAMES,
        refuses=_batched,
        build=_later("cpu.batched", "build"),
        lesson=(
            "For matrices of a few elements the call, the loops and the edges cost more than the product. With m, n "
            "and k fixed at compile time there are no edges and no branches, and the loop over the batch is compiled "
            "together with the product."
        ),
        source="cpu/batched.py",
    ),
    Rung(
        name="strassen",
        idea="7 products of sums of quadrants instead of 8, summed while packing: opt-in, its error bound is weaker",
        parent="packed",
        dtypes=_FLOATS,
        refuses=_strassen,
        build=_later("cpu.strassen", "build"),
        bound=_later("cpu.strassen", "bound"),
        space={"levels": (1, 2), "winograd": (0, 1), "kc": (512, 1024), "nc": (1024, 2048)},
        normwise=True,
        lesson=(
            "Seven products instead of eight, at the price of more additions. These would cost memory traffic, so they "
            "are done while packing and while C is written. It wins for large products and can exceed the machine's "
            "peak, counted in the operations of the plain product. Its error is bounded only in norm, so it is never "
            "chosen by default."
        ),
        source="cpu/strassen.py",
    ),
)
