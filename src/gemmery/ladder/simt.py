"""The rungs on CUDA cores, one element of C a thread: from one block to tiles in shared memory."""

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
    """Nothing is refused."""
    return ""


def _one_block(problem: Problem) -> str:
    threads = problem.m * problem.n
    if threads > _MOST_THREADS:
        return (
            f"{problem.m} x {problem.n} elements of C take {threads} threads of one block, which has at most "
            f"{_MOST_THREADS}: use simt_naive"
        )
    return ""


SIMT = (
    Rung(
        name="simt_single_block",
        idea="one thread for each element of C, all in one block",
        parent=None,
        dtypes=_EVERY,
        refuses=_one_block,
        build=builder(simt.single_block),
        geometry=simt.single_block,
        expect={**_ALONG_ROWS, "load_sectors_a_request": 2.5},
        lesson="A block has at most 1024 threads, so C has at most 1024 elements: 32 x 32. And one block runs on one "
        "multiprocessor, however many the device has.",
        source="cuda/kernels/simt_single_block.cu",
    ),
    Rung(
        name="simt_naive",
        idea="many blocks, one thread for each element of C",
        parent="simt_single_block",
        dtypes=_EVERY,
        refuses=_takes,
        build=builder(simt.naive),
        geometry=simt.naive,
        space={"threads": (32, 64, 128, 256, 512, 1024)},
        default={"threads": 256},
        expect={**_ALONG_ROWS, "load_sectors_a_request": 2.5},
        lesson="Two loads for every multiply-add: the memory wall. The 32 lanes of a warp share an element of A and "
        "read 32 neighbours of B, so each load is one request for one line.",
        source="cuda/kernels/simt_naive.cu",
    ),
    Rung(
        name="simt_uncoalesced",
        idea="the same with x and y of the thread swapped: what the order of threads is worth",
        parent="simt_naive",
        dtypes=_EVERY,
        refuses=_takes,
        build=builder(simt.uncoalesced),
        geometry=simt.uncoalesced,
        space={"threads": (32, 64, 128, 256, 512, 1024)},
        default={"threads": 256},
        expect={"divergent_branches": 0, "load_sectors_a_request": 16.5, "store_sectors_a_request": 32},
        lesson="A dead end, on purpose. The lanes of a warp read 32 rows of A, and a request that touched 4 sectors of "
        "memory now touches 32: the same work, several times slower.",
        source="cuda/kernels/simt_uncoalesced.cu",
    ),
    Rung(
        name="simt_linear",
        idea="a line of threads, thread id -> (i, j), each adding to C in global memory",
        parent="simt_naive",
        dtypes=_EVERY,
        refuses=_takes,
        build=builder(simt.linear),
        geometry=simt.linear,
        space={"threads": (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)},
        default={"threads": 256},
        expect=_ALONG_ROWS,
        lesson="Below 32 threads a block, lanes of every warp stay empty: half the threads, twice the time. From 64 on "
        "enough warps are there and the curve is flat; 1025 threads the device refuses.",
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
        lesson="Packing pays on a CPU, where it saves misses. Here it saves the arithmetic of addresses: inside a "
        "block they are constants. With layout 1, B lies down its columns as a CPU would want it, and the lanes of a "
        "warp no longer read neighbours.",
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
        lesson="A tile of side 32 is read from memory once for 32 uses, so memory is no longer the wall: shared memory "
        "is, with two loads for every multiply-add. Small tiles leave warps half empty and use each element less.",
        source="cuda/kernels/simt_smem.cu",
    ),
    Rung(
        name="simt_smem_transposed",
        idea="B's tile transposed, both stored so that no two threads of a warp hit one bank",
        parent="simt_smem",
        dtypes=_EVERY,
        refuses=_takes,
        build=builder(simt.smem_transposed),
        geometry=simt.smem_transposed,
        space={"tile": (8, 16, 32), "swizzle": (0, 1)},
        default={"tile": 32, "swizzle": 1},
        expect=_FROM_TILES,
        lesson="With k side by side in both tiles, one load brings 16 bytes. Stored plainly (swizzle 0) the rows lie "
        "32 banks apart and the lanes of a warp queue for the same four; in an order of its own for each row, they do "
        "not.",
        source="cuda/kernels/simt_smem_transposed.cu",
    ),
)
