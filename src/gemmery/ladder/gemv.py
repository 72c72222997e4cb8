"""The rungs for a matrix times a vector."""

from __future__ import annotations

from gemmery.cuda import gemv
from gemmery.cuda.launch import builder
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

_EVERY = ("f32", "f64", "f16", "bf16")


def _no_vector(problem: Problem) -> str:
    if problem.m == 1 or problem.n == 1:
        return ""
    return f"C is {problem.m} x {problem.n}: these rungs take a row or a column; take simt_smem or the tensor cores"


GEMV: tuple[Rung, ...] = (
    Rung(
        name="gemv_thread",
        idea="one thread for each result of y = W x",
        parent="simt_naive",
        dtypes=_EVERY,
        refuses=_no_vector,
        build=builder(gemv.thread),
        geometry=gemv.thread,
        space={"threads": (32, 64, 128, 256)},
        default={"threads": 128},
        expect={"divergent_branches": 0, "load_sectors_a_request": 16.5, "load_bytes_a_sector": 4},
        lesson=(
            "A thread walks along its own row of W, so the 32 lanes of a warp read 32 rows at once: every load touches "
            "32 sectors, and each sector is fetched for 2 or 4 bytes at a time. With few results most of the device "
            "has nothing to do. When columns of W are contiguous instead, the same code is coalesced."
        ),
        source="cuda/kernels/gemv_thread.cu",
    ),
    Rung(
        name="gemv_thread_smem",
        idea="x is read once a block, into shared memory",
        parent="gemv_thread",
        dtypes=_EVERY,
        refuses=_no_vector,
        build=builder(gemv.thread_smem),
        geometry=gemv.thread_smem,
        space={"threads": (32, 64, 128, 256), "tile": (512, 1024, 2048, 4096)},
        default={"threads": 128, "tile": 2048},
        expect={"divergent_branches": 0, "bank_conflicts": 0},
        lesson=(
            "All threads need the same x, and x is small: shared memory serves one word to a whole warp at once. But W "
            "is read once and is all the traffic, so staging x saves what the L1 cache served already, and costs two "
            "barriers a tile."
        ),
        source="cuda/kernels/gemv_thread_smem.cu",
    ),
    Rung(
        name="gemv_warp",
        idea="a warp computes r results, 32 / r lanes each, and adds up by XOR shuffles",
        parent="gemv_thread",
        dtypes=_EVERY,
        refuses=_no_vector,
        build=builder(gemv.warp),
        geometry=gemv.warp,
        space={"r": (1, 2, 4, 8, 16), "smem": (0, 1), "threads": (32, 64, 128, 256), "tile": (512, 1024, 2048, 4096)},
        default={"r": 1, "smem": 0, "threads": 128, "tile": 2048},
        expect={"bank_conflicts": 0, "load_sectors_a_request": 4, "load_bytes_a_sector": 32},
        lesson=(
            "Lanes side by side on one row of W read neighbours: a load of a warp touches r pieces of rows instead of "
            "32. There are 32 / r times as many threads, so a short y fills the device sooner. The price is "
            "log2(32 / r) shuffles a result, and idle lanes when k is shorter than their number."
        ),
        source="cuda/kernels/gemv_warp.cu",
    ),
    Rung(
        name="gemv_vectorized",
        idea="16-byte loads, several rows in flight in a thread, k shared by a part of a warp up to many blocks",
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
            "y = W x does two operations for every element it reads, so all that counts is how soon W is under way and "
            "that enough of it is in flight: wide loads, several of them before the first is used, and no thread "
            "without a load. Below a megabyte the launch itself is most of the time: so it begins while the one before "
            "it on the stream ends, sends for its lines of W, and only then waits."
        ),
        source="cuda/kernels/gemv_vectorized.cu",
    ),
)
