"""Products of a matrix with its own transpose on a device: half of C is computed, and mirrored; and sums, no rungs.

C is halved again and again: the lower left part is one product, the two parts on the diagonal are halved in the same
way, as one batch, down to squares on the diagonal, which are computed whole. All are products of parts of A and of
B for the kernel that multiplies the whole. What remains of n below them is a product of few rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from gemmery import arrange, dtypes
from gemmery.arrange import Arrangement
from gemmery.arrays import View, alignment
from gemmery.cuda.geometry import Geometry, instance, vector
from gemmery.cuda.launch import CudaLaunch, Ready, Scalars
from gemmery.errors import DeviceError, DTypeError, LayoutError, RefusedError, ShapeError
from gemmery.problem import Config, Problem

Build = Callable[[Problem], object]  # the kernel of the whole product, for a part of it

# From so many rows and so deep a k on, the launches that make up half of a product take less time than one of all: at
# 4096 three rounds of 132 tiles take the place of four, and the mirror image 0.1 of a round.
LEAST, DEEP = 4096, 512
SMALLEST = 1024  # least side of the squares on the diagonal: eight of them fill a card of 132 multiprocessors twice
UNIT = 256  # of which their side is a multiple: whole tiles, and addresses as aligned as A's


def pieces(n: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield blocks of C that cover what is on and below the diagonal, as (batch, rows, columns, row, step).

    The first of a batch begins at (row, 0), the next is `step` down and `step` to the right of it.

    >>> list(pieces(8192))
    [(1, 4096, 4096, 4096, 8192), (2, 2048, 2048, 2048, 4096), (4, 1024, 1024, 1024, 2048), (8, 1024, 1024, 0, 1024)]
    """
    levels = max((n // SMALLEST).bit_length() - 1, 0)
    side = (n >> levels) // UNIT * UNIT
    for level in range(levels):
        half = side << (levels - 1 - level)
        yield 1 << level, half, half, half, 2 * half
    yield 1 << levels, side, side, 0, side
    covered = side << levels
    if covered < n:
        yield 1, n - covered, n, covered, 0


class Halved:
    """What runs a product that is symmetric if A and B have one address: then half of it, else all."""

    def __init__(self, whole: Ready, build: Build, form: Arrangement, problem: Problem) -> None:
        self.whole, self.workspace, self.kept, self.maps = whole, whole.workspace, whole.kept, whole.maps
        self.halves = _is_large(form) and not any(whole.kept)
        self._made_of = build, form, problem
        self._parts: list[tuple[Ready, int, int]] = []

    def __call__(
        self, a: int, b: int, c: int, stream: int, bias: int = 0, workspace: int = 0,
        scalars: Scalars | None = None, extra: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Put the launches on a stream, as those of the whole product."""
        if a != b or (scalars is not None and scalars[1]):
            self.whole(a, b, c, stream, bias, workspace, scalars, extra)
            return
        if not self._parts:
            self._make()
        for run, first, place in self._parts:
            run(a + first, b, c + place, stream, bias, workspace, scalars, extra)
        self._mirror(c, c, c, stream)

    def _make(self) -> None:
        build, form, problem = self._made_of
        parts: list[tuple[Ready, int, int]] = []
        if self.halves:
            with contextlib.suppress(RefusedError, LayoutError):
                parts = [_part(build, form, problem, *piece) for piece in pieces(problem.n)]
        if not parts or any(run.workspace > self.workspace for run, _, _ in parts):  # the caller allocates as for all
            parts = [(self.whole, 0, 0)]
        self._mirror = mirroring(problem, View(0, (form.batch, form.m, form.n), form.c, problem.out))
        self._parts = parts


def _part(
    build: Build, form: Arrangement, problem: Problem, batch: int, rows: int, columns: int, row: int, step: int
) -> tuple[Ready, int, int]:
    """Return the launches of a piece, by the rung of the whole product, and where its A and its C begin."""
    (_, a_row, a_col), (_, b_row, b_col), (_, c_row, c_col) = form.a, form.b, form.c
    part = problem._replace(m=rows, n=columns, batch=batch)
    a = View(0, (batch, rows, form.k), (step * a_row, a_row, a_col), problem.dtype)
    b = View(0, (batch, form.k, columns), (step * b_col, b_row, b_col), problem.dtype)
    c = View(0, (batch, rows, columns), (step * (c_row + c_col), c_row, c_col), problem.out)
    kernel = build(part)
    assert isinstance(kernel, CudaLaunch)
    return kernel.ready(a, b, c), row * a_row, row * c_row


def _is_large(form: Arrangement) -> bool:
    return form.batch == 1 and form.n >= LEAST and form.k >= DEEP


def halved(run: Ready, build: Build, one_sided: bool, form: Arrangement, problem: Problem) -> Ready | Halved:
    """Return what runs a product: a `Halved` if B may be the transposed A, and half of the product is worth it.

    What a `one_sided` rung computes is mirrored whatever its size, so that C is symmetric.
    """
    square = form.m == form.n > 1 and form.a == (form.b[0], form.b[2], form.b[1]) and form.runs == 1
    plain = problem.c_layout == "row" and not problem.has_bias and not problem.scales and not problem.split
    worth = square and plain and (_is_large(form) or one_sided)
    return Halved(run, build, form, problem) if worth else run


_SIDE, _ROWS = 32, 8  # of a tile; rows of a block's threads


def mirroring(problem: Problem, c: View) -> Ready:
    """Return a function that mirrors square matrices of the shape and strides of C, at any address."""
    batch, n, _ = c.shape
    bare = Problem(n, n, 0, problem.dtype, problem.out, batch, c_layout=problem.c_layout, device=problem.device)
    a, b = (View(0, (batch, *sides), (0, 0, 0), problem.dtype) for sides in ((n, 0), (0, n)))
    tiles = -(-n // _SIDE)
    grid, block = (tiles * (tiles + 1) // 2, batch, 1), (_SIDE, _ROWS, 1)

    def geometry(problem: Problem, _: Config) -> Geometry:
        return Geometry("mirror.cu", instance("mirror", problem, _SIDE), grid, block)

    return CudaLaunch(bare, {}, geometry).ready(a, b, c)


def addition(a: View, b: View, c: View) -> CudaLaunch:
    """Return a function that computes C = A + B on three views of this shape (batch, m, n) and these strides.

    The chain of products R = A (A + B) needs it. Raises ShapeError, DTypeError or DeviceError if the three differ.
    """
    for what, error in (("shape", ShapeError), ("dtype", DTypeError), ("device", DeviceError)):
        values = [getattr(view, what) for view in (a, b, c)]
        if len(set(values)) > 1:
            raise error(f"A + B = C with a {what} of {', '.join(map(str, values))}: the three must be equal")
    (batch, m, n), size = c.shape, dtypes.get(c.dtype).size

    def place(view: View) -> tuple[str, int]:
        """Return the layout, and the alignment of the pointer and of all strides but that of adjacent elements."""
        steps = [step for step, length in zip(view.strides, view.shape, strict=True) if length > 1 and step != size]
        return arrange.layout(m, n, view.strides[1], view.strides[2], size), alignment(view.pointer, tuple(steps))

    (x, of_x), (y, of_y), (z, of_z) = place(a), place(b), place(c)
    alignments = of_x, of_y, of_z
    problem = Problem(m, n, 0, a.dtype, c.dtype, batch, x, y, z, device=c.device, alignments=alignments)
    return CudaLaunch(problem, {"threads": 256}, geometry_of_sum)


def geometry_of_sum(problem: Problem, config: Config) -> Geometry:
    """One thread per chunk of a row, as wide as one access may be in A, B and C."""
    rows = (problem.a_layout, problem.b_layout, problem.c_layout) == ("row", "row", "row")
    width, threads = min(vector(problem, operand) for operand in range(3)) if rows else 1, config["threads"]
    packs = problem.batch * problem.m * -(-problem.n // width)
    return Geometry("simt_add.cu", instance("simt_add", problem, width), (-(-packs // threads), 1, 1), (threads, 1, 1))
