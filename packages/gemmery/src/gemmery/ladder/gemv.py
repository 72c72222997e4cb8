"""The rungs for matrix-vector products, y = W x, with m or n equal to 1; and for few rows times packed weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from gemmery import dtypes
from gemmery.cuda import traced_function
from gemmery.cuda.choose import complete
from gemmery.cuda.device import GRID, WARP
from gemmery.cuda.geometry import Geometry, instance, sum_size, target, template, vector
from gemmery.errors import RefusedError
from gemmery.ladder.gpu import cut_off, gpu_rung
from gemmery.ladder.rung import without_vector
from gemmery.problem import Config, Problem

# Kernels of gemv_vectorized for columns of W, for those whose k the blocks of a cluster share, and for parts of k.
_COLUMNS, _CLUSTER, _FINISH = "gemv_columns", "gemv_cluster", "gemv_finish"
# Blocks of a cluster that share k, by the blocks of columns that there are at most; more would wait for each other.
_CLUSTERS = ((8, 8), (32, 4), (256, 2))
_MOST_OF_HALVES = 128  # blocks of columns of elements of 16 bits: 14336 x 4096 takes 1.08 of the time by clusters
_LARGEST_TEAM = 1024  # threads of a block
_MOST_CHUNKS = 8  # of 16 bytes, in flight in a thread
_MOST_SPLIT = 64  # blocks that share k
_BLOCKS = 128  # enough to keep a large device busy
_LINE = 128  # bytes of memory requested together
# Blocks of 512 threads with all of k from which an H200 runs some multiprocessors longer than others: half as
# many, for twice the columns and half of k each, take 0.74 of the time at 32000 x 4096, but 1.06 at 17000 x 3000.
_UNEVEN = 300


def _is_column(problem: Problem) -> bool:
    """Return True if C is a column, so that the matrix is A; if C is a row, the matrix is B transposed."""
    return problem.n == 1


def _results(problem: Problem) -> int:
    """Return the number of elements of y."""
    return problem.m if _is_column(problem) else problem.n


def _thread(name: str, problem: Problem, config: Config) -> Geometry:
    """One thread per result; with a `tile` in the config, x comes by such tiles into shared memory."""
    kernel = instance(name, problem, _is_column(problem), *([config["tile"]] if "tile" in config else []))
    return Geometry(f"{name}.cu", kernel, *_grid(problem, config["threads"], config["threads"]))


def _warp(name: str, problem: Problem, config: Config) -> Geometry:
    """One warp per `r` results; `smem` 1 keeps x in shared memory.

    Raises RefusedError if `r` does not divide the 32 lanes, or the threads are not whole warps.
    """
    r, threads, smem = config["r"], config["threads"], bool(config["smem"])
    if r not in (1, 2, 4, 8, 16):
        raise RefusedError(f"r = {r}: 32 lanes are shared by 1, 2, 4, 8 or 16 results; for 32 use gemv_thread")
    if threads % WARP:
        raise RefusedError(f"{threads} threads per block: shuffles need whole warps; use a multiple of 32")
    kernel = instance(name, problem, _is_column(problem), r, smem, config["tile"] if smem else 1)
    return Geometry(f"{name}.cu", kernel, *_grid(problem, threads // WARP * r, threads))


def _grid(problem: Problem, each: int, threads: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the grid for all results, `each` per block, and every product of the batch, and the threads of a block."""
    return (-(-_results(problem) // each), min(problem.batch, GRID[1]), 1), (threads, 1, 1)


def _vectorized(name: str, problem: Problem, config: Config) -> Geometry:
    """16-byte loads along the contiguous side of W; zeros of the config are chosen by the shape.

    Raises RefusedError for numbers of threads that are not powers of two, or too many for a block.
    """
    for key, value in config.items():
        if value & (value - 1):
            raise RefusedError(f"{key} = {value}: threads and rows are divided by halves; use a power of two, or 0")
    # Columns of W are contiguous and have more than one element.
    contiguous = problem.a_layout == "col" if _is_column(problem) else problem.b_layout == "row"
    by_columns = contiguous and _results(problem) > 1
    if traced_function.is_paired(problem) and (by_columns or _is_column(problem)):
        raise RefusedError("two weights in one launch: k is adjacent in both, and C is a row")
    return _columns(problem, config) if by_columns else _rows(name, problem, config)


def _rows(name: str, problem: Problem, config: Config) -> Geometry:
    # Elements of a row of W, and of x, per access; the kernel itself checks an x that is a column.
    vec = vector(problem, 0) if problem.a_layout == "row" else 1
    if not _is_column(problem):
        vec = min(vec, vector(problem, 1)) if problem.b_layout == "col" else 1
    rows_in_all = _results(problem) * problem.batch
    chunks = max(1, problem.k // vec)
    team = config["team"] or _team(chunks, rows_in_all)
    weights = 1 + traced_function.is_paired(problem)
    split = config["split"] or (_split(chunks // (4 * team), rows_in_all) if weights == 1 else 1)
    rows = config["rows"] or weights
    if weights == 2 and (split > 1 or rows % 2 or problem.batch > 1):
        raise RefusedError(f"rows = {rows}, split = {split}: a team has rows of both weights, and all of k")
    steps = config["steps"] or min(_power_above(-(-chunks // (team * split))), 2)
    if not rows <= team <= _LARGEST_TEAM:
        raise RefusedError(
            f"rows = {rows}, team = {team}: each member stores a row, so rows <= team <= {_LARGEST_TEAM}"
        )
    if rows * steps > _MOST_CHUNKS:
        raise RefusedError(f"rows = {rows}, steps = {steps}: at most {_MOST_CHUNKS} chunks fit a thread's registers")
    threads = max(team, config["threads"] or (128 if rows_in_all * team < 1 << 14 else 256))
    step = vec * team * split * steps
    # The Cover of gemv_vectorized.cu: whether steps of so many elements end with k, or one step is all of k.
    cover = "PARTS" if vec == 1 or problem.k % step else "ONCE" if problem.k == step else "WHOLE"
    parameters = (vec, cover, team, rows, steps, threads)
    return _launches(problem, config, name, parameters, threads // team * rows // weights, threads, split)


def _columns(problem: Problem, config: Config) -> Geometry:
    vec, in_all = vector(problem, 0 if _is_column(problem) else 1), _results(problem) * problem.batch
    size = dtypes.get(problem.dtype).size
    lanes = config["team"] or min(32, _LINE // (vec * size))
    if not config["team"] and lanes == 8 and size == 2 and problem.batch == 1 and in_all > _UNEVEN * lanes * vec:
        lanes = 16
    if lanes > 32:
        raise RefusedError(f"team = {lanes}: with contiguous columns a team is part of a warp; use at most 32")
    groups, narrow = -(-in_all // (lanes * vec)), lanes * vec * size <= _LINE
    device = target(problem)
    clustered = config["cluster"] and narrow and device.capability >= 90
    split = config["split"] or _split(problem.k // 256, groups, 4 * _BLOCKS)
    most = next((blocks for count, blocks in _CLUSTERS if clustered and groups <= count), 1)
    if not config["split"] and split <= _CLUSTERS[0][1] and most > 1:
        split = min(most, 1 << max(0, (problem.k // 256).bit_length() - 1))
    alone = groups * split <= device.sms
    # Loads of bf16 stay under way where its last row is used first, which takes the registers of two blocks.
    if size == 2 and not alone and not config["split"] and (problem.dtype == "bf16" or groups > _MOST_OF_HALVES):
        clustered, split = False, _split(problem.k // 256, groups, 4 * _BLOCKS)
    clustered = clustered and 1 < split <= _CLUSTERS[0][1]
    # Rows of W that a thread requests at once: half as many where it has few.
    deep = problem.k * lanes >= 16 * split * 512
    steps = config["steps"] or (max(2, vec if deep else vec // 2) if clustered else 2)
    threads = config["threads"] or max(64, min(512, _power_above(problem.k) * lanes // steps))
    parameters = (vec, lanes, steps, threads // WARP)
    if clustered:
        product = _launches(
            problem,
            config,
            _CLUSTER,
            (*parameters, split, alone and problem.dtype != "f16"),
            lanes * vec,
            threads,
            1,
            split,
        )
        return replace(product, needs=90, instructions="mapa", cluster=split)
    return _launches(problem, config, _COLUMNS, parameters, lanes * vec, threads, split)


def _split(most: int, blocks: int, enough: int = _BLOCKS) -> int:
    """Return how many blocks share k if there are few: another launch adds up, so each needs plenty of work."""
    split = 1
    while split < _MOST_SPLIT and 2 * split <= most and 2 * split * blocks <= enough:
        split *= 2
    return split


def _launches(
    problem: Problem,
    config: Config,
    name: str,
    parameters: tuple[object, ...],
    each: int,
    threads: int,
    split: int,
    cluster: int = 1,
) -> Geometry:
    """The kernel, and the one that adds up the parts of k if several blocks have them that are no `cluster`."""
    (along, batches, _), block = _grid(problem, each, threads)
    blocks = along * cluster, batches, 1
    overlaps, device = False, target(problem)
    if config["overlap"] and problem.device != "cpu" and device.capability >= 90:
        # If all blocks run at once: otherwise they would take places from the launch before, while it ends (f16,
        # 4096 x 4096: 9.7 us instead of 9.1).
        overlaps = blocks[0] * blocks[1] * split * threads <= device.sms * device.limits.warps_sm * WARP
    launch = template("GemvLaunch", _is_column(problem), problem.batch > 1, split > 1, overlaps)
    kernel = instance(name, problem, launch, *parameters)
    product = Geometry(f"{name}.cu", kernel, blocks, block, overlaps=overlaps)
    if split == 1:
        return product
    lanes = min(32, split)
    return Geometry(
        f"{_FINISH}.cu",
        instance(_FINISH, problem, _is_column(problem), split, lanes),
        *_grid(problem, 128 // lanes, 128),
        workspace=_results(problem) * problem.batch * split * sum_size(problem),
        before=(replace(product, grid=(blocks[0], blocks[1], split)),),
    )


def _team(chunks: int, rows_in_all: int) -> int:
    """Return the threads per row: two chunks each, in whole cache lines, up to 256; more if rows are few."""
    most = 256
    while most < _LARGEST_TEAM and 2 * most * rows_in_all <= _BLOCKS * _LARGEST_TEAM:
        most *= 2
    return min(most, _power_above(chunks), max(8, _power_above(-(-chunks // 2))))


def _power_above(number: int) -> int:
    """Return the smallest power of two that is not below the number.

    >>> [_power_above(n) for n in (1, 2, 3, 1000)]
    [1, 2, 4, 1024]
    """
    return 1 << max(0, number - 1).bit_length()


_gemv_rung = partial(gpu_rung, refuses=without_vector)
GEMV = (
    _gemv_rung(
        "gemv_thread",
        idea="one thread per result of y = W x",
        parent="simt_naive",
        geometry=_thread,
        space={"threads": (32, 64, 128, 256)},
        default={"threads": 128},
        expect={"divergent_branches": 0, "load_sectors_a_request": 16.5, "load_bytes_a_sector": 4},
        lesson=(
            "Each thread reads its own row of W, so the 32 lanes of a warp read 32 rows at once: every load touches 32 "
            "sectors and uses 2 or 4 bytes of each. With few results most of the device is idle. If the columns of W "
            "are contiguous instead, the same code is coalesced."
        ),
    ),
    _gemv_rung(
        "gemv_thread_smem",
        idea="each block reads x once, into shared memory",
        parent="gemv_thread",
        geometry=_thread,
        space={"threads": (32, 64, 128, 256), "tile": (512, 1024, 2048, 4096)},
        default={"threads": 128, "tile": 2048},
        expect={"divergent_branches": 0, "bank_conflicts": 0},
        lesson=(
            "All threads need the same x, and x is small: shared memory broadcasts one word to a whole warp. But W is "
            "nearly all the traffic and is read only once; staging x saves only what the L1 cache already served, and "
            "costs two barriers per tile."
        ),
    ),
    _gemv_rung(
        "gemv_warp",
        idea="a warp computes r results with 32 / r lanes each, and sums by XOR shuffles",
        parent="gemv_thread",
        geometry=_warp,
        space={"r": (1, 2, 4, 8, 16), "smem": (0, 1), "threads": (32, 64, 128, 256), "tile": (512, 1024, 2048, 4096)},
        default={"r": 1, "smem": 0, "threads": 128, "tile": 2048},
        expect={"bank_conflicts": 0, "load_sectors_a_request": 4, "load_bytes_a_sector": 32},
        lesson=(
            "Lanes next to each other read adjacent elements of one row of W, so a warp's load touches r rows instead "
            "of 32. There are 32 / r times as many threads, so a short y fills the device sooner. The price is log2(32 "
            "/ r) shuffles per result, and idle lanes when k is smaller than 32 / r."
        ),
    ),
    _gemv_rung(
        "gemv_vectorized",
        idea="16-byte loads, several rows in flight per thread, k shared by part of a warp or up to many blocks",
        parent="gemv_warp",
        geometry=_vectorized,
        space={
            "team": (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
            "rows": (0, 1, 2, 4),
            "steps": (0, 1, 2, 4, 8),
            "threads": (0, 64, 128, 256, 512),
            "split": (0, 1, 2, 4, 8, 16, 32, 64),
            "overlap": (0, 1),
            "cluster": (0, 1),
        },
        default={"team": 0, "rows": 0, "steps": 0, "threads": 0, "split": 0, "overlap": 1, "cluster": 1},
        expect={"bank_conflicts": 0, "load_bytes_a_sector": 32},
        lesson=(
            "y = W x does two operations per element it reads, so all that matters is how early W is requested and "
            "that enough of it is in flight: wide loads, several of them before the first is used, and no idle "
            "threads. Below a megabyte most of the time is the launch itself, so the kernel starts while the launch "
            "before it on the stream ends, prefetches its part of W, and only then waits."
        ),
    ),
)


# ---- few rows times a matrix of 8 or 4 bits an element, by mma: sm_80 ----

MOST_ROWS = 64  # of x; with more, W is better unpacked once
_MOST_PLAIN = 8  # of x with a W that is not packed, which other rungs multiply by more rows
_STEP = 64  # bytes of a row of W in a step of a warp


def step(bits: int) -> int:
    """Return the elements of k in a step, which must have one factor.

    >>> step(4), step(8)
    (128, 64)
    """
    return 8 * _STEP // bits


def _refuses(problem: Problem) -> str:
    """Refuse many rows, other results than those that mma sums, and packed formats that a step does not fit."""
    p = problem.by_rows()
    most = MOST_ROWS if p.bits else _MOST_PLAIN
    if p.m > most:
        return f"m = {p.m}: it multiplies at most {most} rows by a matrix; use mma_pipelined"
    if p.out == "f64":
        return "it sums in f32 and writes f32, f16, bf16, not f64"
    if p.bits not in (0, 8, 4):
        return f"elements of {p.bits} bits: it unpacks 8 and 4"
    if p.bits and (p.group % step(p.bits) or p.k % p.group):
        return (
            f"groups of {p.group} in k={p.k}: of {p.bits} bits a group is a multiple of {step(p.bits)} elements, and "
            "k one of groups"
        )
    if p.bits and (p.batch > 1 or p.a_layout != "row" or p.alignments[0] % 16 or p.alignments[1] % 16):
        return "a packed matrix is multiplied by rows at multiples of 16 bytes, without a batch"
    return ""


def _quantized(name: str, problem: Problem, config: Config) -> Geometry:
    """A block for each 16 rows of W, or a multiple, and up to 64 of x; its warps share k."""
    tiles, eights, steps, warps = (config[key] for key in ("tiles", "eights", "steps", "warps"))
    device, aligned = target(problem), vector(problem, 0) == vector(problem, 1) == 8
    # Rows of W and x are read in pieces of 16 bytes.
    wide = bool(problem.bits) or (problem.b_layout == "col" and problem.k % 8 == 0 and aligned)
    ring = warps * steps * tiles * 1024 if wide else 0
    parts = -(-problem.m // (8 * eights))
    resident = max(1, config["blocks"] * device.sms // parts)
    blocks = min(-(-problem.n // (16 * tiles)) * problem.batch, resident), parts, 1
    overlaps = device.capability >= 90
    launch = template("GemvLaunch", False, problem.batch > 1, False, overlaps)
    shape = problem.bits or 16, problem.group or 1, wide, tiles, eights, steps, warps, config["blocks"]
    return Geometry(
        f"{name}.cu",
        instance(name, problem, launch, template("PackedTiles", *shape)),
        blocks,
        (warps * WARP, 1, 1),
        shared=ring + 2 * warps * tiles * eights * 512,
        needs=80,
        instructions="mma.m16n8k16",
        overlaps=overlaps,
        tile=(8 * eights, 16 * tiles),
    )


def _resolve(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced: few rows of W leave k to more warps of a block."""
    sms, tall = target(problem).sms, -(-problem.n // 16)
    eights = config["eights"] or (1 if problem.m <= 8 else 2 if problem.m <= 16 else 4)
    if eights == 1:
        tiles = config["tiles"] or (2 if problem.bits == 4 and tall > 16 * sms else 1)
        warps = 4 if tiles > 1 else 16 if tall <= 2 * sms else 8
        resident = 16 if tiles > 1 or tall <= sms else 32 if warps == 16 else 24
    elif eights == 2:
        tiles = config["tiles"] or (2 if tall > 1.5 * sms else 1)
        tall = -(-tall // tiles)
        warps, resident = 16 if tall <= sms else 8 if tall <= 2 * sms else 4, 16
    else:
        tiles, warps, resident = config["tiles"] or 1, 4, 12
    blocks = max(1, resident // (config["warps"] or warps))
    return complete(config, {"tiles": tiles, "eights": eights, "steps": 3, "warps": warps, "blocks": blocks})


GEMV_QUANTIZED = (
    gpu_rung(
        "gemv_quantized",
        idea="W is read in 8 or 4 bits an element, unpacked in registers and multiplied by mma",
        parent="gemv_vectorized",
        dtypes=("f16", "bf16"),
        refuses=_refuses,
        bound=cut_off,
        geometry=_quantized,
        resolve=_resolve,
        space={
            "tiles": (0, 1, 2, 4),
            "eights": (0, 1, 2, 4),
            "steps": (0, 1, 2, 4),
            "warps": (0, 4, 8, 16),
            "blocks": (0, 1, 2, 3, 4),
        },
        expect={"bank_conflicts": 0, "local_requests": 0, "load_bytes_a_sector": 32},
        lesson=(
            "Time is bytes of W by bandwidth, so 4 bits an element could take a quarter of the time of 16. But then "
            "instructions limit it: each element is unpacked, converted and multiplied. A mask puts 4 bits into the "
            "last bits of a number whose last bit counts one, and a subtraction leaves the exact integer: three "
            "instructions for two elements. Tensor cores multiply: 16 rows of W are the left operand of mma and up "
            "to 8 rows of x the right one, so 8 rows take hardly longer than one. The elements may come in any order "
            "of k, if it is the same in both operands: each lane keeps the 16 bytes that it loaded. Blocks stay for "
            "all their rows of W, and request the next while they multiply."
        ),
    ),
)
