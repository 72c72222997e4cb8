"""The rungs on CUDA cores with one element of C per thread: from one block to tiles in shared memory."""

from __future__ import annotations

from gemmery.cuda import simt
from gemmery.cuda.device import LIMITS
from gemmery.cuda.launch import builder
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

_EVERY = ("f32", "f64", "f16", "bf16")
_ALONG_ROWS = {"divergent_branches": 0, "store_sectors_a_request": 4, "store_bytes_a_sector": 32}
_FROM_TILES = {**_ALONG_ROWS, "bank_conflicts": 0, "load_sectors_a_request": 4, "load_bytes_a_sector": 32}
_MOST_THREADS = max(limits.threads for limits in LIMITS.values())


def _takes(problem: Problem) -> str:
    """Refuse nothing."""
    return ""


def _one_block(problem: Problem) -> str:
    threads = problem.m * problem.n
    if threads > _MOST_THREADS:
        return f"C has {threads} elements and a block at most {_MOST_THREADS} threads: use simt_naive"
    return ""


SIMT = (
    Rung(
        name="simt_single_block",
        idea="one thread per element of C, all in one block",
        parent=None,
        dtypes=_EVERY,
        refuses=_one_block,
        build=builder(simt.single_block),
        geometry=simt.single_block,
        expect={**_ALONG_ROWS, "load_sectors_a_request": 2.5},
        lesson=(
            "A block has at most 1024 threads, so C has at most 1024 elements: 32 x 32. One block also runs on a "
            "single multiprocessor, however many the device has."
        ),
        source="cuda/kernels/simt_single_block.cu",
    ),
    Rung(
        name="simt_naive",
        idea="one thread per element of C, many blocks",
        parent="simt_single_block",
        dtypes=_EVERY,
        refuses=_takes,
        build=builder(simt.naive),
        geometry=simt.naive,
        space={"threads": (32, 64, 128, 256, 512, 1024)},
        default={"threads": 256},
        expect={**_ALONG_ROWS, "load_sectors_a_request": 2.5},
        lesson=(
            "Two loads per multiply-add make memory the limit. The 32 lanes of a warp share an element of A and read "
            "32 adjacent elements of B, so each load is one request for one cache line."
        ),
        source="cuda/kernels/simt_naive.cu",
    ),
    Rung(
        name="simt_uncoalesced",
        idea="simt_naive with x and y of the thread swapped, to show what thread order costs",
        parent="simt_naive",
        dtypes=_EVERY,
        refuses=_takes,
        build=builder(simt.uncoalesced),
        geometry=simt.uncoalesced,
        space={"threads": (32, 64, 128, 256, 512, 1024)},
        default={"threads": 256},
        expect={"divergent_branches": 0, "load_sectors_a_request": 16.5, "store_sectors_a_request": 32},
        lesson=(
            "A deliberate dead end. The lanes of a warp read 32 different rows of A, so a request that touched 4 "
            "sectors of memory now touches 32: the same work takes several times as long."
        ),
        source="cuda/kernels/simt_uncoalesced.cu",
    ),
    Rung(
        name="simt_linear",
        idea="one-dimensional blocks, thread id -> (i, j), each thread adding to C in global memory",
        parent="simt_naive",
        dtypes=_EVERY,
        refuses=_takes,
        build=builder(simt.linear),
        geometry=simt.linear,
        space={"threads": (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)},
        default={"threads": 256},
        expect=_ALONG_ROWS,
        lesson=(
            "With fewer than 32 threads per block, lanes of every warp stay idle: half the threads take twice the "
            "time. From 64 threads on there are enough warps and the curve is flat. The device refuses 1025 threads."
        ),
        source="cuda/kernels/simt_linear.cu",
    ),
    Rung(
        name="simt_packed",
        idea="a first kernel copies A and B into square blocks, contiguous and padded with zeros",
        parent="simt_naive",
        dtypes=_EVERY,
        refuses=_takes,
        build=builder(simt.packed),
        geometry=simt.packed,
        space={"layout": (0, 1), "block": (8, 16, 32)},
        default={"layout": 0, "block": 32},
        expect=_ALONG_ROWS,
        lesson=(
            "On a CPU packing avoids cache misses. Here it saves address arithmetic: inside a block all offsets are "
            "constants. With layout 1, B is stored column by column as a CPU would want it, and the lanes of a warp no "
            "longer read adjacent elements."
        ),
        source="cuda/kernels/simt_packed.cu",
    ),
    Rung(
        name="simt_smem",
        idea="a block reads each tile of A and B once, into shared memory",
        parent="simt_naive",
        dtypes=_EVERY,
        refuses=_takes,
        build=builder(simt.smem),
        geometry=simt.smem,
        space={"tile": (2, 4, 8, 16, 32)},
        default={"tile": 16},
        expect=_FROM_TILES,
        lesson=(
            "Each element of a 32 x 32 tile is read from memory once and used 32 times, so the limit is no longer "
            "global memory but shared memory, with two loads per multiply-add. Small tiles leave warps half empty and "
            "reuse each element less."
        ),
        source="cuda/kernels/simt_smem.cu",
    ),
    Rung(
        name="simt_smem_transposed",
        idea="B's tile transposed, and both tiles stored without bank conflicts",
        parent="simt_smem",
        dtypes=_EVERY,
        refuses=_takes,
        build=builder(simt.smem_transposed),
        geometry=simt.smem_transposed,
        space={"tile": (8, 16, 32), "swizzle": (0, 1)},
        default={"tile": 32, "swizzle": 1},
        expect=_FROM_TILES,
        lesson=(
            "With k contiguous in both tiles, one load fetches 16 bytes. Stored plainly (swizzle 0), rows are 32 banks "
            "apart and the lanes of a warp queue for the same four banks; with chunks permuted differently in each row "
            "they do not."
        ),
        source="cuda/kernels/simt_smem_transposed.cu",
    ),
)
