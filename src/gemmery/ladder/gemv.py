"""The rungs for matrix-vector products."""

from __future__ import annotations

from gemmery.cuda import gemv
from gemmery.cuda.launch import builder
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

_EVERY = ("f32", "f64", "f16", "bf16")


def _no_vector(problem: Problem) -> str:
    if problem.m == 1 or problem.n == 1:
        return ""
    return f"it multiplies a matrix by a vector: m or n must be 1, and C is {problem.m} x {problem.n}"


GEMV: tuple[Rung, ...] = (
    Rung(
        name="gemv_thread",
        idea="one thread per result of y = W x",
        parent="simt_naive",
        dtypes=_EVERY,
        refuses=_no_vector,
        build=builder(gemv.thread),
        geometry=gemv.thread,
        space={"threads": (32, 64, 128, 256)},
        default={"threads": 128},
        expect={"divergent_branches": 0, "load_sectors_a_request": 16.5, "load_bytes_a_sector": 4},
        lesson=(
            "Each thread reads its own row of W, so the 32 lanes of a warp read 32 rows at once: every load touches 32 "
            "sectors and uses 2 or 4 bytes of each. With few results most of the device is idle. If the columns of W "
            "are contiguous instead, the same code is coalesced."
        ),
        source="cuda/kernels/gemv_thread.cu",
    ),
    Rung(
        name="gemv_thread_smem",
        idea="each block reads x once, into shared memory",
        parent="gemv_thread",
        dtypes=_EVERY,
        refuses=_no_vector,
        build=builder(gemv.thread_smem),
        geometry=gemv.thread_smem,
        space={"threads": (32, 64, 128, 256), "tile": (512, 1024, 2048, 4096)},
        default={"threads": 128, "tile": 2048},
        expect={"divergent_branches": 0, "bank_conflicts": 0},
        lesson=(
            "All threads need the same x, and x is small: shared memory broadcasts one word to a whole warp. But W is "
            "nearly all the traffic and is read only once; staging x saves only what the L1 cache already served, and "
            "costs two barriers per tile."
        ),
        source="cuda/kernels/gemv_thread_smem.cu",
    ),
    Rung(
        name="gemv_warp",
        idea="a warp computes r results with 32 / r lanes each, and sums by XOR shuffles",
        parent="gemv_thread",
        dtypes=_EVERY,
        refuses=_no_vector,
        build=builder(gemv.warp),
        geometry=gemv.warp,
        space={"r": (1, 2, 4, 8, 16), "smem": (0, 1), "threads": (32, 64, 128, 256), "tile": (512, 1024, 2048, 4096)},
        default={"r": 1, "smem": 0, "threads": 128, "tile": 2048},
        expect={"bank_conflicts": 0, "load_sectors_a_request": 4, "load_bytes_a_sector": 32},
        lesson=(
            "Lanes next to each other read adjacent elements of one row of W, so a warp's load touches r rows instead "
            "of 32. There are 32 / r times as many threads, so a short y fills the device sooner. The price is log2(32 "
            "/ r) shuffles per result, and idle lanes when k is smaller than 32 / r."
        ),
        source="cuda/kernels/gemv_warp.cu",
    ),
    Rung(
        name="gemv_vectorized",
        idea="16-byte loads, several rows in flight per thread, k shared by part of a warp or up to many blocks",
        parent="gemv_warp",
        dtypes=_EVERY,
        refuses=_no_vector,
        build=builder(gemv.vectorized),
        geometry=gemv.vectorized,
        space={
            "team": (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
            "rows": (0, 1, 2, 4),
            "steps": (0, 1, 2, 4, 8),
            "threads": (0, 64, 128, 256, 512),
            "split": (0, 1, 2, 4, 8, 16, 32, 64),
            "overlap": (0, 1),
        },
        default={"team": 0, "rows": 0, "steps": 0, "threads": 0, "split": 0, "overlap": 1},
        expect={"bank_conflicts": 0, "load_bytes_a_sector": 32},
        lesson=(
            "y = W x does two operations per element it reads, so all that matters is how early W is requested and "
            "that enough of it is in flight: wide loads, several of them before the first is used, and no idle "
            "threads. Below a megabyte most of the time is the launch itself, so the kernel starts while the launch "
            "before it on the stream ends, prefetches its part of W, and only then waits."
        ),
        source="cuda/kernels/gemv_vectorized.cu",
    ),
)
