"""The images on a device of the kernels that serve every product of their types."""

from __future__ import annotations

import struct
from functools import partial

from gemmery import dtypes, tiers
from gemmery.arrays import View
from gemmery.cuda import driver
from gemmery.cuda.choose.cost import quickest
from gemmery.cuda.choose.data import MMA_GENERAL, SIMT_GENERAL, Tiling
from gemmery.cuda.geometry import GeometryOf, tiles, whole_pieces
from gemmery.cuda.launch import Ready, first_arguments, packed_scalars, product_argument, scalars_of
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple


class LoadedKernel(NamedTuple):
    """A kernel on a device: its handle, its block, its bytes of shared memory."""

    function: int
    threads: int
    shared: int


class Images:
    """The images that serve one element type on one device, for results of that type and no activation.

    The one with the smallest tile serves every product; the others are made in the background. `geometry` is that of
    the general rung of the type.
    """

    def __init__(self, dtype: str, ordinal: int, geometry: GeometryOf) -> None:
        size = dtypes.get(dtype).size
        self.dtype = dtype
        self.ordinal = ordinal
        self._halves = size == 2
        self._geometry = geometry
        self._sms = driver.device(ordinal).sms
        self._probe = Problem(8, 8, 8, dtype, dtype, device=f"cuda:{ordinal}")
        self._fixed = struct.Struct(f"=5Q11q4i{scalars_of(dtype).format[1:]}")
        self._one = packed_scalars(1, 0, dtype)
        first, *others = MMA_GENERAL if self._halves else SIMT_GENERAL
        self._smallest = first.bm
        self._others = () if size > 4 else tuple(others)
        self._present = {first.bm: self._image(first)}
        self._tiles: tuple[Tiling, ...] = (first,)  # of present images

    def _image(self, tile: Tiling) -> LoadedKernel:
        launch = self._geometry(self._probe, {"tile": tile.bm})
        function = int(driver.function(launch.source, launch.kernel, self.ordinal, launch.shared))
        return LoadedKernel(function, launch.block[0], launch.shared)

    def make_others(self) -> None:
        """Make the images with larger tiles in the background."""
        for tile in self._others:
            tiers.aside(("image", self.dtype, self.ordinal, tile.bm), partial(self._add, tile))

    def _add(self, tile: Tiling) -> None:
        self._present[tile.bm] = self._image(tile)
        self._tiles = (*self._tiles, tile)

    def ready(
        self, m: int, n: int, k: int, a: tuple[int, int], b: tuple[int, int], c: tuple[int, int], addresses: int
    ) -> Ready:
        """Return the launch of C = A B, by the strides of rows and columns in elements.

        `addresses` are those of A and B, combined by OR, as far as they decide on alignment.
        """
        side = self._smallest
        if m > side and n > side and len(self._tiles) > 1 and (not self._halves or _whole(m, n, k, a, b, addresses)):
            side = quickest(self._tiles, m, n, 1, self._sms).bm
        function, threads, shared = self._present[side]
        argument = self._fixed.pack(0, 0, 0, 0, 0, 0, *a, 0, *b, 0, *c, 0, 0, m, n, k, 1, *self._one)
        grid = -(-m // side) * -(-n // side)
        launch = first_arguments(function, (grid, 1, 1), (threads, 1, 1), shared)
        return Ready([launch], argument, self.ordinal, 0, False, out=self.dtype)

    def launch(self, problem: Problem, a: View, b: View, c: View, bias: View | None) -> Ready:
        """Return the launch of any product of this element type."""
        p = problem.by_rows()
        side = self._smallest
        if p.m > side and p.n > side and len(self._tiles) > 1 and (not self._halves or whole_pieces(p)):
            side = quickest(self._tiles, p.m, p.n, p.batch, self._sms).bm
        function, threads, shared = self._present[side]
        argument = product_argument(problem, a, b, c, bias)
        launch = first_arguments(function, tiles(p, side, side), (threads, 1, 1), shared)
        return Ready([launch], argument, self.ordinal, 0, problem.c_layout == "col", out=self.dtype)


def _whole(m: int, n: int, k: int, a: tuple[int, int], b: tuple[int, int], addresses: int) -> bool:
    """As `whole_pieces`, for two-byte elements by their strides."""
    a_row, a_col = a
    b_row, b_col = b
    elements = a_row | k if a_col == 1 else a_col | m if a_row == 1 else 1
    elements |= b_row | n if b_col == 1 else b_col | k if b_row == 1 else 1
    return k > 1 and (addresses | elements * 2) % 16 == 0


_images: dict[tuple[str, int], Images] = {}


def images(dtype: str, ordinal: int, geometry: GeometryOf) -> Images:
    """Return the images of an element type, made at the first call. Raises the errors of `driver.function`."""
    key = dtype, ordinal
    present = _images.get(key)
    if present is None:
        present = _images.setdefault(key, Images(dtype, ordinal, geometry))
        present.make_others()
    return present


def present(dtype: str, ordinal: int) -> Images | None:
    """Return the images of an element type if they are made."""
    return _images.get((dtype, ordinal))
