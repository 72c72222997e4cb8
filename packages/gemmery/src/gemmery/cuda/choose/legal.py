"""Which tiles kernels with wgmma can have for a product, and what a block then holds in shared memory."""

from __future__ import annotations

from functools import lru_cache

from gemmery import dtypes
from gemmery.cuda import traced_function
from gemmery.cuda.choose.cost import ROW, exchanged, is_swapped
from gemmery.cuda.choose.data import FEW, INSTANCES, Instance
from gemmery.cuda.constants import BIAS_BYTES, MOST_OVERLAPPED
from gemmery.cuda.geometry import describable, element, layouts, template
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

SHARED = 232_448  # bytes that a block of sm_90 may have
MOST_SUMS = 256 * 192  # of a tile: 192 for each of 256 threads
WIDTHS = (112, 144)  # of tiles, beside multiples of 32
# Rows of tiles of C' = B' A', columns of wgmma.
SWAPPED = (32, 48, 56, *range(72, 121, 8), *range(136, 161, 8), 176, 200, 208, 224)


class Consumers(NamedTuple):
    """The warpgroups that multiply a tile, and the pieces of C that their warps stage: the Consumers of wgmma.cuh."""

    warpgroups: int
    columns: int = 32  # of a piece, which has 16 rows
    buffers: int = 2  # pieces that a warp has in shared memory

    def bytes(self, size: int) -> int:
        """Return the bytes behind a ring: the buffers of all warps, for elements of so many bytes, and a bias."""
        return self.warpgroups * 4 * self.buffers * 16 * self.columns * size + BIAS_BYTES


def consumers(problem: Problem, tile: Instance, most: int = 4) -> Consumers:
    """Return what multiplies a tile, with at most so many buffers for each warp.

    Of 192 rows, two warpgroups have all rows and half of the columns each, where a column of B is a row of its box;
    else three have 64. Sums of 32 bits get four buffers where they have room.
    """
    beside = tile.bm == 192 and problem.b_layout != "row"
    count = 3 if tile.bm == 192 and not beside else max(1, min(tile.bm // 64, 2))
    size, wide = dtypes.get(problem.out).size, tile.bn // 2 if beside or traced_function.is_paired(problem) else tile.bn
    columns = 64 if wide % 64 == 0 and count < 3 and overlapped(problem, tile) else 32
    four = Consumers(count, columns, 4)
    roomy = most == 4 and size == 4 and ring_bytes(problem, tile) + 16 * tile.stages + four.bytes(size) <= SHARED
    return four if roomy else Consumers(count, columns)


def overlapped(problem: Problem, tile: Instance) -> bool:
    """Return True if a finished tile stays in registers, packed, while the next one is multiplied."""
    return dtypes.get(problem.out).size == 2 and tile.bm * tile.bn <= 256 * MOST_OVERLAPPED


def tiling(problem: Problem, tile: Instance, warpgroups: Consumers, apart: bool = False, name: str = "") -> str:
    """Return the WgmmaTiles of wgmma.cuh, swapped if C is column-major; `name` is that of parts in C++, if any."""
    swapped = problem.c_layout == "col"
    count = 8 if swapped else 7 if apart else 6 if tile.cm * tile.cn > 1 else 4
    shape = (*tile[:3], template("Consumers", *warpgroups), tile.cm, tile.cn, apart, swapped)[:count]
    return template("WgmmaTiles", name or element(problem), *layouts(problem), *shape)


def ring_bytes(problem: Problem, tile: Instance) -> int:
    """Return the bytes of the stages in shared memory; boxes of B that are 64 columns wide may extend beyond bn."""
    wide = tile.bn if problem.b_layout == "col" else -(-tile.bn // 64) * 64
    return tile.stages * (tile.bm + wide) * ROW


def shared_bytes(problem: Problem, tile: Instance, warpgroups: Consumers) -> int:
    """Return the bytes of a ring, of the pieces of C and of the barriers."""
    return ring_bytes(problem, tile) + 16 * tile.stages + warpgroups.bytes(dtypes.get(problem.out).size)


def instances(problem: Problem) -> tuple[Instance, ...]:
    """Return the instances that are legal for a product with a row-major C."""
    plain = not (problem.epilogue or problem.scaled or problem.scales)
    mapped = 16 if describable(problem, "c") == "" else 1
    rows, sides = min(problem.m, FEW + 1), (problem.a_layout, problem.b_layout)
    return _instances(
        Problem(rows, 64, 64, problem.dtype, problem.out, 1, *sides, scaled=not plain, alignments=(16, 16, mapped))
    )


@lru_cache(maxsize=256)
def _instances(problem: Problem) -> tuple[Instance, ...]:
    return tuple(tile for tile in INSTANCES if not illegal(problem, tile))


def illegal(problem: Problem, tile: Instance) -> str:
    """Return why wgmma_epilogue cannot have this tile, ring and cluster for a product, as it reads it; "" if it can.

    Tiles of rows that wgmma does not have are of C' = B' A'.
    """
    if is_swapped(tile.bm):
        if reason := _illegal_swapped(problem, tile):
            return reason
        problem, tile = problem.transposed(), exchanged(tile)
    return refused(problem, tile, shared_bytes(problem, tile, consumers(problem, tile)))


def refused(problem: Problem, tile: Instance, shared: int) -> str:
    """Return why a kernel with so many bytes of shared memory cannot have a tile, ring and cluster; "" if it can."""
    bm, bn, stages, cm, cn, *_ = tile
    if bm == 192 and (bn not in (64, 128, 192) or cn > 1):
        return f"bm={bm}, bn={bn}, cn={cn}: a tile of 192 rows has 64, 128 or 192 columns, and a cluster along m alone"
    if bm == FEW and (problem.m > FEW or problem.a_layout == "col" or cm * cn > 1):
        return f"bm=8, cm={cm}, cn={cn}: it takes at most 8 rows, of A by rows, by blocks alone; use 64"
    swapped = problem.c_layout == "col"  # of which `_illegal_swapped` knows the widths; its bm and bn are exchanged
    sides = f"bm={bn}, bn={bm}" if swapped else f"bm={bm}, bn={bn}"
    if bm not in (8, 64, 128, 192, 256) or (bn % 32 * (bn not in WIDTHS) and not swapped) or not 32 <= bn <= 256:
        known = "8, 64, 128, 192 or 256 rows and 32, 64, 96, 112, 128, 144, 160, ... 256 columns"
        return f"bm={bm}, bn={bn}: a tile has {known}"
    if bn % 32 and not overlapped(problem, tile):
        return f"{sides}: only tiles that leave packed, of results of 16 bits, are such; use 128 x 128"
    if bm * bn > MOST_SUMS:
        return f"{sides}: {bm * bn // 256} sums for each thread that multiplies, which has room for 192"
    if stages < 2:
        return f"stages={stages}: one is filled while another is read; use 2 or more"
    if shared > SHARED:
        return f"stages={stages} of {sides}: {shared} bytes of shared memory, of {SHARED}; use fewer stages"
    if cm * cn not in (1, 2, 4, 8):
        return f"cm={cm}, cn={cn}: a cluster has 1, 2, 4 or 8 blocks"
    whole = 128 if problem.b_layout == "row" else 16 if bn >= 64 and overlapped(problem, tile) else 64
    if traced_function.is_paired(problem) and (cm > 1 or is_swapped(bm) or bn % whole):
        return f"bn={bn}, cm={cm}: half of a tile's columns are of each weight, in whole pieces; use bn=128, cm=1"
    if bm == 192 and not plain_halves(problem):
        return "bm=192: it takes plain products of halves and a C with a tensor map"
    return ""


def _illegal_swapped(problem: Problem, tile: Instance) -> str:
    """Return why a product cannot be taken as C' = B' A', whose tiles have bm columns for wgmma; "" if it can."""
    bm, bn, *_ = tile
    if bm not in SWAPPED or bn not in (64, 128, 256):
        rows = ", ".join(map(str, SWAPPED))
        return f"bm={bm}, bn={bn}: a tile has 8, 64, 128, 192 or 256 rows; or {rows}, which take 64, 128 or 256 columns"
    reason = refuses_swapped(problem)
    return reason and f"bm={bm}: {reason}; use 64, 128 or 256 rows"


def refuses_swapped(problem: Problem) -> str:
    """Return why no tiles can compute C' = B' A' of a product with a row-major C; "" if some can.

    stmatrix transposes elements of 16 bits, and only a tensor copy then writes C.
    """
    sizes = dtypes.get(problem.dtype).size, dtypes.get(problem.out).size
    if sizes != (2, 2) or problem.a_layout != "row":
        return "it is for elements of 16 bits and an A by rows"
    return describable(problem, "c")


def plain_halves(problem: Problem) -> bool:
    """Return True if a tile of 192 rows can compute a product.

    Of the 232 registers of a thread, 144 have sums and 72 packed ones; of three warpgroups, 96 and 48 of 160. That
    leaves none for more than to copy plain sums to a C with a tensor map.
    """
    plain = not (problem.epilogue or problem.scaled or problem.scales)
    halves = dtypes.get(problem.dtype).size == dtypes.get(problem.out).size == 2
    return plain and halves and not describable(problem, "c")


def split_refusal(tile: Instance, splits: int) -> str:
    """Return why the blocks of a cluster cannot share the k of a tile; "" if they can."""
    bm, bn, stages, cm, cn, *_ = exchanged(tile) if is_swapped(tile.bm) else tile
    if not 2 <= splits <= 8 // (cm * cn):
        return f"splits={splits}: 2 to 8 blocks of a cluster share the k of a tile, or fewer where they share operands"
    if bm not in (64, 128, 256):
        return f"bm={bm}: the warpgroups of a tile that is shared lie below each other; use 64, 128 or 256 rows"
    if 4 * bm * -(-bn // 8 // splits) * 8 * splits > stages * (bm + bn) * ROW:
        return (
            f"bm={bm}, bn={bn}, stages={stages}: the sums of a tile meet in the ring; use a smaller tile or more stages"
        )
    return ""
