"""Launches of the kernels that serve every product of their element types: layouts and edges are values, not instances.

An image serves all shapes, strides, alignments, batches, alpha, beta and biases; an activation has an image of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import partial

from gemmery import dtypes, tiers
from gemmery.arrays import View
from gemmery.cuda import device, driver
from gemmery.cuda.geometry import Geometry, instance, tiles, vector
from gemmery.cuda.launch import Ready, arguments
from gemmery.errors import RefusedError
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

Config = Mapping[str, int]
HALVES, SINGLES = ("f16", "bf16"), ("f32", "f64")

# By the side of a block's tile: a warp's rows and columns, stages, and the speed on a full device, in percent.
MMA = {64: (32, 16, 4, 45), 128: (64, 32, 3, 100)}
# bk, wm, wn, tm, tn, stages, and the speed; in f64 only the first.
SIMT = {32: (16, 16, 16, 4, 2, 3, 50), 64: (16, 32, 32, 8, 4, 3, 80), 128: (8, 64, 32, 8, 8, 3, 100)}
SMALLEST_MMA, SMALLEST_SIMT = {64: MMA[64]}, {32: SIMT[32]}  # they serve every product
Table = Mapping[int, tuple[int, ...]]
ROW = 128  # bytes of k in a tile of mma
PAD, PAD_MMA = 4, 8  # elements after each row of the sums in shared memory


def mma(problem: Problem, config: Config) -> Geometry:
    """Tensor cores, from a ring of tiles of 64 of k."""
    side = config["tile"] or _tile(problem, MMA if whole_pieces(problem) else SMALLEST_MMA)
    small = side in SMALLEST_MMA
    wm, wn, stages, _ = MMA[side]
    if not small and not whole_pieces(problem):
        raise RefusedError(
            f"tile={side} of alignments {problem.alignments[:2]}: its copies are 16 bytes wide; use tile={min(MMA)}"
        )
    return Geometry(
        "mma_general.cu",
        instance("mma_general", _of_activation(problem), side, side, wm, wn, stages, small),
        tiles(problem, side, side),
        (side * side // (wm * wn) * 32, 1, 1),
        shared=max(stages * 2 * side * ROW, side * (side + PAD_MMA) * 4),
        needs=80,
        instructions="mma.m16n8k16 and cp.async",
        tile=(side, side),
    )


def simt(problem: Problem, config: Config) -> Geometry:
    """CUDA cores, from a ring of tiles copied element by element."""
    size = dtypes.get(problem.dtype).size
    side = config["tile"] or _tile(problem, SIMT if size == 4 else SMALLEST_SIMT)
    if size == 8 and side not in SMALLEST_SIMT:
        raise RefusedError(f"tile={side} of f64: its sums take too many registers; use tile={min(SIMT)}")
    bk, wm, wn, tm, tn, stages, _ = SIMT[side]
    return Geometry(
        "simt_general.cu",
        instance("simt_general", _of_activation(problem), side, side, bk, wm, wn, tm, tn, stages),
        tiles(problem, side, side),
        (side * side // (tm * tn), 1, 1),
        shared=max(stages * bk * 2 * (side + PAD) * size, side * (side + PAD) * size),
        needs=80,
        instructions="cp.async",
        tile=(side, side),
    )


def whole_pieces(problem: Problem) -> bool:
    """Whether the contiguous sides of A and B consist of 16-byte pieces at multiples of 16 bytes."""
    p = problem
    sides = p.m if p.a_layout == "col" else p.k, p.k if p.b_layout == "col" else p.n
    layouts = p.a_layout, p.b_layout
    return p.k > 1 and all(
        layout != "any" and vector(p, i) == 8 and side % 8 == 0
        for i, (layout, side) in enumerate(zip(layouts, sides, strict=True))
    )


def _tile(problem: Problem, table: Table) -> int:
    sms = device.find("h200" if problem.device == "cpu" else problem.device).sms
    return quickest(problem.m, problem.n, problem.batch, sms, table)


def quickest(m: int, n: int, batch: int, sms: int, table: Table) -> int:
    """Return the side with which the busiest multiprocessor finishes first."""

    def time(side: int) -> float:
        return -(-(-(-m // side) * -(-n // side) * batch) // sms) * side * side / table[side][-1]

    return min(table, key=time)


def _of_activation(problem: Problem) -> Problem:
    """Return the problem for the name of an instance: alpha, beta and a bias are values."""
    parts = [part for part in problem.epilogue.split("+") if part not in ("", "bias")]
    return problem._replace(epilogue="+".join(parts), scaled=False, precision="")


class Image(NamedTuple):
    """A kernel on a device: its handle, its block, its bytes of shared memory."""

    function: int
    threads: int
    shared: int


class Images:
    """The images that serve one element type on one device, for results of that type and no activation.

    The one with the smallest tile serves every product; the others are made in the background.
    """

    def __init__(self, dtype: str, ordinal: int) -> None:
        self.dtype = dtype
        self.halves = dtype in HALVES
        self.size = dtypes.get(dtype).size
        self.ordinal = ordinal
        self._sms = driver.device(ordinal).sms
        self._probe = Problem(8, 8, 8, dtype, dtype, device=f"cuda:{ordinal}")
        self._table: Table = MMA if self.halves else SIMT
        self._smallest = min(self._table)
        self._number = struct.Struct("=5Q11q4i2d" if dtype == "f64" else "=5Q11q4i2f")
        self._present = {self._smallest: self._image(self._smallest)}
        self._rows: dict[int, tuple[int, ...]] = {self._smallest: self._table[self._smallest]}  # of present images

    def _image(self, side: int) -> Image:
        made = (mma if self.halves else simt)(self._probe, {"tile": side})
        handle = int(driver.function(made.source, made.kernel, self.ordinal, made.shared))
        return Image(handle, made.block[0], made.shared)

    def make_others(self) -> None:
        """Make the images with larger tiles in the background."""
        for side in sorted(self._table) if self.dtype != "f64" else ():
            if side != self._smallest:
                tiers.aside(("image", self.dtype, self.ordinal, side), partial(self._add, side))

    def _add(self, side: int) -> None:
        self._present[side] = self._image(side)
        self._rows = {**self._rows, side: self._table[side]}

    def ready(
        self, m: int, n: int, k: int, a: tuple[int, int], b: tuple[int, int], c: tuple[int, int], addresses: int
    ) -> Ready:
        """Return the launch of C = A B, by the strides of rows and columns in elements.

        `addresses` are those of A and B, combined by OR, as far as they decide on alignment.
        """
        side = self._smallest
        if m > side and n > side and len(self._rows) > 1 and (not self.halves or _whole(m, n, k, a, b, addresses)):
            side = quickest(m, n, 1, self._sms, self._rows)
        function, threads, shared = self._present[side]
        argument = self._number.pack(0, 0, 0, 0, 0, 0, *a, 0, *b, 0, *c, 0, 0, m, n, k, 1, 1.0, 0.0)
        grid = -(-m // side) * -(-n // side)
        return Ready([(function, grid, 1, 1, threads, 1, 1, shared)], argument, self.ordinal, 0, False)

    def launch(self, problem: Problem, a: View, b: View, c: View, bias: View | None) -> Ready:
        """Return the launch of any product of this element type."""
        transposed = problem.c_layout == "col"
        p = problem.by_rows()
        side = self._smallest
        if p.m > side and p.n > side and len(self._rows) > 1 and (not self.halves or whole_pieces(p)):
            side = quickest(p.m, p.n, p.batch, self._sms, self._rows)
        function, threads, shared = self._present[side]
        argument = arguments(p, transposed, a, b, c, 1.0, 0.0, bias, 0)
        step = (function, *tiles(p, side, side), threads, 1, 1, shared)
        return Ready([step], argument, self.ordinal, 0, transposed)


def _whole(m: int, n: int, k: int, a: tuple[int, int], b: tuple[int, int], addresses: int) -> bool:
    """As `whole_pieces`, for two-byte elements by their strides."""
    a_row, a_col = a
    b_row, b_col = b
    elements = a_row | k if a_col == 1 else a_col | m if a_row == 1 else 1
    elements |= b_row | n if b_col == 1 else b_col | k if b_row == 1 else 1
    return k > 1 and (addresses | elements * 2) % 16 == 0


_images: dict[tuple[str, int], Images] = {}


def images(dtype: str, ordinal: int) -> Images:
    """Return the images of an element type, made at the first call. Raises the errors of `driver.function`."""
    key = dtype, ordinal
    found = _images.get(key)
    if found is None:
        found = _images.setdefault(key, Images(dtype, ordinal))
        found.make_others()
    return found


def present(dtype: str, ordinal: int) -> Images | None:
    """Return the images of an element type if they are made."""
    return _images.get((dtype, ordinal))
