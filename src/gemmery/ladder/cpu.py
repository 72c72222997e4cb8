"""The CPU ladder, from the triple loop to the speed of the machine."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from gemmery import dtypes
from gemmery.cpu import build
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

_FLOATS = ("f32", "f64")


def _later(module: str, name: str) -> Callable[..., Any]:
    """A function of a kernel's module, which is imported when it is first called: a product needs one of them."""

    def call(*given: Any) -> Any:
        return getattr(import_module(f"gemmery.cpu.{module}"), name)(*given)

    return call


def _plain(problem: Problem) -> str:
    """What the first rungs refuse: they are loops over C as it lies, in one type."""
    if problem.epilogue or problem.scaled:
        return "it is C = A B and nothing else: no alpha, beta, bias or activation"
    if problem.out != problem.dtype:
        return f"it sums in C itself, so C must be {problem.dtype}, not {problem.out}"
    return ""


def _rows(problem: Problem) -> str:
    """What a vector along rows needs: neighbours in B and C."""
    if problem.b_layout != "row" or problem.c_layout != "row":
        return "it loads vectors along the rows of B and C, so their elements must be adjacent there"
    return _plain(problem)


def _packed(problem: Problem) -> str:
    if problem.c_layout == "any":
        return "it stores vectors of C, so C's elements must be adjacent along rows or columns"
    return build.packed_refuses(problem)


def _gemv(problem: Problem) -> str:
    if problem.m != 1 and problem.n != 1:
        return f"it multiplies a matrix by one vector, and neither m nor n is 1 in {problem.m} x {problem.n}"
    return build.packed_refuses(problem)


def _batched(problem: Problem) -> str:
    from gemmery.cpu import batched

    parts = batched.numbers(problem)
    if parts * max(problem.m, problem.n, problem.k) > batched.LARGEST:
        return f"its code is made for one shape, with m, n and k up to {batched.LARGEST}, complex up to half of that"
    if 1 in (problem.m, problem.n) and problem.m * problem.n * problem.k > batched.LARGEST_VECTOR:
        return f"of matrices with more than {batched.LARGEST_VECTOR} elements times vectors, gemv makes less work"
    if parts == 2 and (problem.scaled or problem.epilogue):
        return "a complex product is C = A B here and nothing else; packed scales it"
    return _packed(problem)


def _strassen(problem: Problem) -> str:
    if problem.epilogue:
        return "it has no epilogue; packed has"
    if problem.out != problem.dtype:
        return f"it adds to C itself, so C must be {problem.dtype}, not {problem.out}"
    return _packed(problem)


CPU = (
    Rung(
        name="scalar_naive",
        idea="C[i,j] += A[i,k] * B[k,j], loops i, j, k",
        parent=None,
        dtypes=_FLOATS,
        refuses=_plain,
        build=build.textbook("scalar_naive"),
        lesson=(
            "The definition, as three loops. B is read down its columns, so each multiply-add waits for "
            "another cache line, and all of them form one chain: the CPU does one where it could do dozens."
        ),
        source="cpu/simple.py",
    ),
    Rung(
        name="scalar_reordered",
        idea="loops i, k, j: B and C are walked along rows",
        parent="scalar_naive",
        dtypes=_FLOATS,
        refuses=_plain,
        build=build.textbook("scalar_reordered"),
        lesson=(
            "Two loops change places and nothing else. Now the inner loop walks B and C along their rows: "
            "every byte of a cache line is used, the prefetchers follow, and the multiply-adds no longer wait "
            "for each other."
        ),
        source="cpu/simple.py",
    ),
    Rung(
        name="simd_row",
        idea="one element of A broadcast, fused multiply-add over a row of B",
        parent="scalar_reordered",
        dtypes=_FLOATS,
        refuses=_rows,
        build=build.textbook("simd_row"),
        lesson=(
            "A vector instruction does the same to a whole vector of neighbours. It needs neighbours: the "
            "order of the loops before it made them. What limits it now is C, loaded and stored for every "
            "multiply-add."
        ),
        source="cpu/simple.py",
    ),
    Rung(
        name="simd_blocked",
        idea="the same inside square blocks that fit a cache",
        parent="simd_row",
        dtypes=_FLOATS,
        refuses=_rows,
        build=build.textbook("simd_blocked"),
        space={"block": (8, 16, 32, 64, 128, 256, 512, 1024, 2048)},
        default={"block": 512},
        lesson=(
            "A block of B that stays in a cache is read many times from there. It pays once B outgrows the "
            "cache, and costs a little before that: sweep the side of the block and see the caches."
        ),
        source="cpu/simple.py",
    ),
    Rung(
        name="packed",
        idea="a register tile of C, panels packed in the order they are read, five loops",
        parent="simd_blocked",
        dtypes=dtypes.NAMES,
        refuses=_packed,
        build=build.packed,
        space={"mc": (48, 96, 192, 384), "kc": (128, 256, 512, 1024), "nc": (512, 1024, 2048, 4096)},
        lesson=(
            "A tile of C stays in registers while k runs, so that a step loads few vectors for many multiply-"
            "adds, and panels are rewritten in the order in which they are read: no stride, no page, no cache "
            "set gets in the way. Each of the five loops keeps one block in one cache. This is how every fast "
            "library does it."
        ),
        source="cpu/loops.py",
    ),
    Rung(
        name="packed_threaded",
        idea="the same over the cores: C is cut along m and n, each thread packs what its part reads",
        parent="packed",
        dtypes=dtypes.NAMES,
        refuses=_packed,
        build=build.packed,
        space={"mc": (48, 96, 192, 384), "kc": (128, 256, 512, 1024), "nc": (512, 1024, 2048, 4096)},
        lesson=(
            "C is cut along m and n, never along k: no two threads add to one element, so any number of "
            "threads gives the same bits. Each packs what it reads; that is more packing, and no waiting. "
            "Workers spin for a moment, then sleep: a product too short to be worth waking them runs alone."
        ),
        source="cpu/pool.py",
    ),
    Rung(
        name="direct",
        idea="register tiles on A and B where they lie, cut to the shape: nothing is packed",
        parent="packed",
        dtypes=_FLOATS,
        refuses=build.direct_refuses,
        build=build.direct,
        space={"mr": (4, 8, 12, 16)},
        lesson=(
            "Packing is work for m k + k n elements and pays by m n k. A small or thin product has too little "
            "of the latter: a tile in registers over A and B where they lie is then faster, as long as B "
            "stays in cache. Rows of A a multiple of 4 KiB apart share one set of L1, so such a tile must be "
            "low."
        ),
        source="cpu/direct.py",
    ),
    Rung(
        name="streamed",
        idea="few rows of A: B is read once, as streams, and C's sums are kept packed in L2",
        parent="direct",
        dtypes=_FLOATS,
        refuses=build.direct_refuses,
        build=build.streamed,
        space={"depth": (2, 4, 8), "nv": (1, 2, 4)},
        lesson=(
            "Few rows against a large B are bound by reading B. A tile that runs down k jumps a page a step, "
            "and no prefetcher follows; rows of B walked side by side are streams that it does. C is then "
            "passed over many times, so it is kept as packed sums in L2."
        ),
        source="cpu/streamed.py",
    ),
    Rung(
        name="gemv",
        idea="one vector: A is read once, in the order it lies, several rows or columns at a time",
        parent="simd_row",
        dtypes=dtypes.NAMES,
        refuses=_gemv,
        build=_later("gemv", "build"),
        space={"mc": (1024, 2048, 4096, 8192), "kc": (1024, 2048, 4096, 8192), "columns": (4, 6, 8)},
        default={"mc": 4096, "kc": 4096},
        lesson=(
            "One multiply-add for every element of A: memory decides, and the kernel's whole task is to read "
            "A once, in order, with enough loads in flight. A row-major A is read as dot products, a "
            "transposed one as sums of columns; neither is copied."
        ),
        source="cpu/gemv.py",
    ),
    Rung(
        name="batched",
        idea="many small products: C in registers, the shape in the code, the loop over the batch compiled",
        parent="direct",
        dtypes=dtypes.NAMES,
        refuses=_batched,
        build=_later("batched", "build"),
        lesson=(
            "For matrices of a few elements the call, the loops and the edges cost more than the product. "
            "With m, n and k known when the code is made there are no edges and no branches, and the loop "
            "over the batch is compiled with the product inside."
        ),
        source="cpu/batched.py",
    ),
    Rung(
        name="strassen",
        idea="7 products of sums of quadrants instead of 8, summed while packing: opt-in, for its bound is weaker",
        parent="packed",
        dtypes=_FLOATS,
        refuses=_strassen,
        build=_later("strassen", "build"),
        bound=_later("strassen", "bound"),
        space={"levels": (1, 2), "winograd": (0, 1), "kc": (512, 1024), "nc": (1024, 2048)},
        normwise=True,
        lesson=(
            "Seven products instead of eight, for more additions, which cost memory traffic unless they are "
            "done while packing and while C is written. It wins once the products are large enough, and "
            "passes the peak of the machine in operations that count as n cubed. The error is bounded by "
            "norms alone, so it is never chosen unasked."
        ),
        source="cpu/strassen.py",
    ),
)
