"""What a tile costs: by its area and speed, or with wgmma by a model, rounds of tiles of steps along k and an end."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import product
from math import ceil, exp, gcd, log2
from typing import TypeVar

from gemmery import dtypes
from gemmery.cuda.choose.data import (
    FEW,
    SIMT_COSTS,
    SIMT_STEP,
    Instance,
    Residuals,
    SimtCosts,
    Tiling,
    card,
)
from gemmery.cuda.device import KNOWN, WARP, Device
from gemmery.cuda.geometry import accesses
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

ROW = 128  # bytes of k, or of adjacent rows or columns, that one row of a tile has in shared memory
# More bytes, which cost as much of the L2 cache as a row whose pitch is no multiple of ROW costs more: so many, divided
# by the largest power of two of the pitch, when all multiprocessors read. Of a pitch of 16 bytes, 7 of 8 rows touch two
# lines, and most begin within a sector of 32 bytes; of 64, every other row touches two.
STRADDLING = 3370
PACKED = 16  # bytes: operands whose rows are no multiples of it are packed to whole lines

# Cycles of a multiprocessor, fitted to times on an H100 and an H200. A step multiplies ROW bytes of k, for every
# element type. For an element of C, tensor cores take 1 / STEP_AREA. Shared memory serves, for each 64 rows of a tile,
# these rows of A and all columns of B, and what copies write: below 128 by 144 that takes longer.
STEP_AREA = 32
SERVED = 148.4  # bytes of these in a cycle; by count it is 128, but not all of them seem to take their turn
LINE_RATE = 68.5  # bytes that the L2 cache delivers to a multiprocessor in a cycle
START = 8000  # of a launch among others
HIDDEN = 1340  # of these, where half of the multiprocessors are free for the next launch
PAIRED = 3030  # more, where blocks are paired
END = 1180  # of each tile of 64 rows or more, while its warpgroups do not multiply
LAST = 0.16  # of an element of the last tile, whose end nothing hides
FINISH = {2: 0.0, 4: 0.1}  # more, of an element of every tile, by the bytes of an element of C
FINISH_NARROW = 0.04  # of two bytes, next to operands of one byte
SHARED = 1.09  # of the time of steps, where the blocks of a cluster share those of a tile
EXCHANGE, EXCHANGE_ELEMENT = 930, 0.171  # adding up the parts of a tile in a cluster
# Rounds of a grid of all multiprocessors are no rectangles of C: blocks read what no others do at that time.
MANY, RAGGED = 5, 1.04  # rounds from which that counts, and how much
# Of few rows (columns), B (A) comes from memory while it is multiplied. 128 x 4096 x k lasts as long with every tile
# and 8 stages, in which 4.2 MB of B are under way: 3.2 TB/s, 1.3 us for a request; with k in halves, and 8.4 MB, 3.9.
# With 16 stages 64 x 4096 x 4096 takes 10.6 us; but with 12 those 128 rows take no less than with 8.
STREAMED = 128  # rows or columns of C
READ_ONCE, PAIRED_ONCE = 0.925, 700  # of the time, where clusters share columns of B; and in place of PAIRED
LATENCY = 1570  # cycles from the request for a stage to its products
MEMORY = 0.58  # bytes in a cycle, for each GB/s of memory; fitted beside LATENCY, it is 1.15 of what these are


SCHEDULERS, CLOCK = 4, 1750  # of a multiprocessor; cycles of a microsecond

AnyTile = TypeVar("AnyTile", Tiling, Instance)


def share(tile: Tiling | Instance, m: int, n: int, batch: int, sms: int, splits: int = 1) -> int:
    """Return the elements of C that the busiest multiprocessor computes, each of them over one of `splits` parts of k.

    >>> from gemmery.cuda.choose.data import MMA_PIPELINED
    >>> share(MMA_PIPELINED[2], 1024, 1024, 1, 132)
    16384
    """
    blocks = -(-m // tile.bm) * -(-n // tile.bn) * batch * splits
    return -(-blocks // sms) * tile.bm * tile.bn


def quickest(tiles: Iterable[AnyTile], m: int, n: int, batch: int, sms: int) -> AnyTile:
    """Return the tile with which the busiest multiprocessor finishes first."""
    return min(tiles, key=lambda tile: share(tile, m, n, batch, sms) / tile.speed)


# In units of one element of C by ROW bytes of k on one multiprocessor, 31 ps on an H200: filling and emptying a ring,
# in steps; a launch that adds up parts, 3 us; writing and reading a sum of one part, 8 bytes at 3 TB/s.
RING, ADDITION, ADDITION_ELEMENT = 6, 97_000, 0.09


def quickest_split(tiles: Iterable[Tiling], splits: Iterable[int], problem: Problem, sms: int) -> tuple[Tiling, int]:
    """Return the tile and the parts of k with which a product by mma.sync takes least time.

    A multiprocessor computes its share of the tiles one after the other, each in proportion to its area.
    """
    m, n, batch = problem.m, problem.n, problem.batch
    steps = -(-problem.k * dtypes.get(problem.dtype).size // ROW)

    def time(choice: tuple[Tiling, int]) -> float:
        tile, parts = choice
        addition = ADDITION + ADDITION_ELEMENT * batch * m * n * parts if parts > 1 else 0
        return share(tile, m, n, batch, sms, parts) / (tile.speed / 100) * (-(-steps // parts) + RING) + addition

    return min(product(tiles, splits), key=time)


@lru_cache(maxsize=1024)
def quickest_shared(
    tiles: tuple[Tiling, ...], splits: tuple[int, ...], problem: Problem, device: Device
) -> tuple[Tiling, int]:
    """Return the tile and the parts of k with which float32 on CUDA cores takes least time."""

    def cycles(choice: tuple[Tiling, int]) -> float:
        return shared_cycles(problem, *choice, device)

    return min(product(tiles, splits), key=cycles)


def shared_cycles(problem: Problem, tile: Tiling, splits: int, device: Device, costs: SimtCosts = SIMT_COSTS) -> float:
    """Return about the cycles of float32 on CUDA cores with so many blocks to a tile, but for those of every launch.

    The busiest multiprocessor has all its blocks at a time, and each of its schedulers has whole warps: one block of
    two warps takes as long as two. The fewer warps a scheduler has, the more it waits.
    """
    batch, m, n, k = problem.batch, problem.m, problem.n, problem.k
    rounds = shared_rounds(-(-m // tile.bm) * -(-n // tile.bn) * batch, splits, device.sms)
    warps = tile.bm * tile.bn / (tile.tm * tile.tn * WARP)
    turns, resident = (ceil(blocks * warps / SCHEDULERS) for blocks in (rounds, min(rounds, tile.blocks or rounds)))
    steps = ceil(ceil(k / SIMT_STEP) / splits)
    a_width, b_width = copy_widths(problem)
    copies = (tile.bm / a_width + tile.bn / b_width) * SIMT_STEP / WARP
    issued = turns * tile.tm * tile.tn * SIMT_STEP * 100 / tile.speed
    each = issued * (1 + costs.idle / resident) + rounds * costs.copy * copies
    moved = 4 * batch * ((m + n) * k + 2 * m * n) / costs.memory
    brought = 4 * rounds * (tile.bm + tile.bn) * steps * SIMT_STEP / costs.l2
    busy: float = ((steps * each) ** 4 + moved**4 + brought**4 + (steps * costs.wait) ** 4) ** 0.25 + costs.fill
    if splits == 1:
        return busy
    return busy + rounds * tile.bm * tile.bn * costs.sum + (device.capability < 90) * costs.launch


def packed_cycles(problem: Problem, tile: Tiling, splits: int, device: Device, costs: SimtCosts = SIMT_COSTS) -> float:
    """Return the same where a launch before copies B, whose k is adjacent, to rows of n: it reads and writes all."""
    a, _, c = problem.alignments
    by_rows = problem._replace(b_layout="row", alignments=(a, PACKED, c))
    copy = costs.pack + 8 * problem.batch * problem.k * problem.n / costs.copied
    return copy + shared_cycles(by_rows, tile, splits, device, costs)


# Clusters of so many blocks for which 132 multiprocessors have room in each of several rounds. It is more than in a
# round alone: blocks of a cluster may begin on a multiprocessor that still has another's. With these the model is
# nearest to the times of runs 2 and 3, and also of run 6, in benchmarks/tuning/float32-tiles-nvidia-h200.jsonl. For 81
# clusters of 3, as 576 squared had, 41 would be two rounds, 14.0 us, where run 10 timed 18.6.
SHARED_ROOM = {3: 40, 4: 31, 5: 23, 6: 19, 7: 16, 8: 15}


def shared_rounds(tiles: int, splits: int, sms: int) -> int:
    """Return the blocks that the busiest multiprocessor has, where `splits` of a cluster share a tile.

    >>> [shared_rounds(tiles, 7, 132) for tiles in (15, 16, 32, 33)]
    [1, 2, 2, 3]
    """
    if tiles <= at_a_time(splits, sms):
        return 1
    return max(2, -(-tiles // max(1, sms * SHARED_ROOM.get(splits, 132 // splits) // 132)))


@lru_cache(maxsize=1024)
def copy_widths(problem: Problem) -> tuple[int, int]:
    """Return the elements of A and of B that float32 on CUDA cores copies to shared memory at a time.

    They are single ones where k is adjacent, unless it is so in both, in pieces of four.
    """
    a, b, _ = accesses(problem)
    along_k = problem.a_layout == "row", problem.b_layout == "col"
    if all(along_k) and a == b == 4:
        return 4, 4
    return 1 if along_k[0] else a, 1 if along_k[1] else b


class Demand(NamedTuple):
    """What a product asks of every instance."""

    m: int
    n: int
    steps: int  # of ROW bytes of k
    batch: int
    a_more: float  # bytes from the L2 cache for a row of a tile of A, and of B, beyond ROW, if all read
    b_more: float
    finish: float  # cycles to finish an element of C
    boxed: bool  # B comes in boxes of 128 bytes along n


def demand_of(problem: Problem) -> Demand:
    """Return what a product asks of every instance.

    Rows of a tile straddle lines of the L2 cache unless rows begin at multiples of a line. Operands that tensor copies
    cannot read are packed to such rows first.
    """
    size, out = dtypes.get(problem.dtype).size, dtypes.get(problem.out).size
    a = problem.m if problem.a_layout == "col" else problem.k
    b = problem.k if problem.b_layout == "col" else problem.n
    a_more, b_more = (
        STRADDLING / gcd(pitch, ROW) if aligned >= PACKED and pitch % PACKED == 0 and pitch % ROW != 0 else 0.0
        for pitch, aligned in zip((a * size, b * size), problem.alignments[:2], strict=True)
    )
    finish = FINISH_NARROW if size == 1 and out == 2 else FINISH[out]
    boxed = size == 2 and problem.b_layout == "row"
    return Demand(problem.m, problem.n, -(-problem.k * size // ROW), problem.batch, a_more, b_more, finish, boxed)


def is_swapped(bm: int) -> bool:
    """Return True if tiles of so many rows are of C' = B' A': wgmma takes 64 rows at a time, and columns in eights.

    >>> [is_swapped(bm) for bm in (8, 64, 128, 136)]
    [False, False, False, True]
    """
    return bm % 64 != 0 and bm != FEW


def exchanged(tile: Instance) -> Instance:
    """Return the tile of C' for a tile of C."""
    return tile._replace(bm=tile.bn, bn=tile.bm, cm=tile.cn, cn=tile.cm)


def swapped(demand: Demand) -> Demand:
    """Return what the product C' = B' A' asks of every instance."""
    return demand._replace(m=demand.n, n=demand.m, a_more=demand.b_more, b_more=demand.a_more, boxed=False)


def straddles(demand: Demand) -> bool:
    """Return True if rows of tiles touch two lines of the L2 cache."""
    return demand.a_more + demand.b_more > 0


def shared_turns(demand: Demand, tile: Instance, splits: int, sms: int) -> int:
    """Return the turns that clusters take at the tiles after whole rounds, 1 / splits of a round each; 0 if splitting
    them does not save time. Where their blocks share operands, too, clusters have no whole tiles.

    >>> demand = demand_of(Problem(3072, 3072, 3072, "bf16", "bf16", b_layout="col"))
    >>> shared_turns(demand, Instance(128, 256, 4, 1, 1), 2, 132)  # 288 tiles: 2 rounds, and 24 tiles for 66 clusters
    1
    """
    cluster = tile.cm * tile.cn
    clusters = at_a_time(splits * cluster, sms)
    tiles = -(-demand.m // (tile.bm * tile.cm)) * -(-demand.n // (tile.bn * tile.cn)) * demand.batch
    turns = -(-(tiles if cluster > 1 else tiles % (clusters * splits)) // clusters)
    return turns if turns < splits else 0


def at_a_time(cluster: int, sms: int) -> int:
    """Return how many clusters of so many blocks run at a time; some of 4 do not find room together: 30 on 132."""
    room = {3: 39, 5: 22, 6: 17, 7: 15}.get(cluster)  # of 132, by cuOccupancyMaxActiveClusters on an H200
    return sms * room // 132 if room else sms // cluster if cluster <= 2 else sms // cluster * 10 // 11


def grid(tiles: int, sms: int) -> int:
    """Return the blocks of the grid for so many tiles, whole columns of them; 0 for all multiprocessors.

    A grid of whole columns is faster if it takes as many rounds: blocks that run together share rows and columns of the
    operands.
    """
    whole = sms - sms % 16
    return whole if -(-tiles // whole) == -(-tiles // sms) else 0


def cycles(demand: Demand, tile: Instance, splits: int, device: Device) -> float:
    """Return the cycles that a product takes by the model: rounds of tiles, each of steps and an end."""
    if is_swapped(tile.bm):
        return cycles(swapped(demand), exchanged(tile), splits, device)
    bm, bn, stages, cm, cn, *_ = tile
    tiles = -(-demand.m // (bm * cm)) * -(-demand.n // (bn * cn)) * demand.batch
    area, cluster, sms = bm * bn, cm * cn, device.sms
    end = END * min(1, bm / 64) + area * demand.finish

    def last(steps: int, blocks: int) -> float:
        step = step_cycles(demand, tile, blocks / sms)
        return steps * max(step, streamed_cycles(demand, tile, blocks, device)) + end

    start = START + LAST * area
    if splits == 1:
        at_once = min(at_a_time(cluster, sms), card(device).fours if cluster == 4 else sms)
        rounds, rest = divmod(tiles, at_once)
        busy = rounds * last(demand.steps, at_once * cluster) + (rest > 0) * last(demand.steps, rest * cluster)
        busy *= RAGGED if rounds + (rest > 0) >= MANY and grid(tiles * cluster, sms) == 0 else 1
        if cluster > 1:
            shared = streams(demand) and not straddles(demand) and cm > 1 and bm < demand.m
            start += PAIRED_ONCE if shared else PAIRED
            busy *= READ_ONCE if shared else 1
    else:
        blocks = at_a_time(splits * cluster, sms) * splits * cluster
        part = SHARED * last(-(-demand.steps // splits), min(tiles * splits * cluster, blocks))
        part += EXCHANGE + EXCHANGE_ELEMENT * area
        whole = 0 if cluster > 1 else tiles // blocks
        busy = whole * last(demand.steps, blocks) + shared_turns(demand, tile, splits, sms) * part
    if 2 * tiles * cluster * splits <= sms and (demand.steps <= stages or not streams(demand)):
        start -= HIDDEN
    return start + busy


def residual(demand: Demand, tile: Instance, splits: int, sms: int, fitted: Residuals) -> float:
    """Return what the time of a product by a tile is to that by the model, as fitted to measured times."""
    kinds, features = kinds_and_features(demand, tile, splits, sms)
    each = zip(kinds, fitted.classes, strict=True)
    total = sum(of * value * x for of, values in each if of for value, x in zip(values, features, strict=True))
    return exp(total + fitted.tiles.get((*tile[:5], splits), 0.0))


def kinds_and_features(
    demand: Demand, tile: Instance, splits: int, sms: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return what counts of a tile and of a product: residuals have a term for each pair."""
    turned = is_swapped(tile.bm)
    if turned:
        demand, tile = swapped(demand), exchanged(tile)
    bm, bn, _, cm, cn, *_ = tile
    cluster, area = cm * cn, log2(bm * bn / 4096)
    blocks = -(-demand.m // (bm * cm)) * -(-demand.n // (bn * cn)) * cluster * splits
    strays = max(demand.a_more, demand.b_more) / STRADDLING * PACKED  # 1 for an odd multiple of 16 bytes
    depth, rounds = log2(max(demand.steps, 1) / 32), log2(max(blocks, 1) / sms)
    rows = log2(min(demand.n, bn) / bn) if turned else log2(min(demand.m, bm) / bm)
    idle = min(rounds, 0)
    features = (1, strays, depth, idle, max(rounds, 0), strays * depth, strays * idle, rows)
    kinds = (cluster > 1, cluster >= 4, cluster >= 8, splits >= 2, splits >= 4, splits >= 8, turned)
    areas = area, area * area, abs(log2(bm / bn))
    return (*kinds, *areas, turned and bn <= 64, splits > 1 and cluster > 1), features


def streams(demand: Demand) -> bool:
    """Return True if C has so few rows (columns) that B (A) comes from memory while it is multiplied."""
    return 0 < min(demand.m, demand.n) <= STREAMED


def step_cycles(demand: Demand, tile: Instance, busy: float) -> float:
    """Return the cycles of a step: until its products are done, and its lines have come from the L2 cache.

    `busy` is the share of the multiprocessors that read at a time.
    """
    bm, bn, _, cm, cn, *_ = tile
    wide = -(-bn // 64) * 64 if demand.boxed else min(bn, demand.n)
    a_line, b_line = ROW + demand.a_more * busy, ROW + demand.b_more * busy
    brought = (a_line * min(bm, demand.m) / cn + b_line * wide / cm) / LINE_RATE
    if not straddles(demand):
        return max(multiplied(tile), brought)
    both: float = (multiplied(tile) ** 6 + brought**6) ** (1 / 6)  # stages come at uneven times
    return both


def streamed_cycles(demand: Demand, tile: Instance, blocks: int, device: Device) -> float:
    """Return the cycles until a step's lines of B (A) have come from memory where C has few rows (columns), else 0.

    >>> demand = demand_of(Problem(1, 4096, 4096, "bf16", "bf16", b_layout="col"))
    >>> tiles = Instance(64, 32, 8, 1, 1), Instance(64, 32, 16, 1, 1)
    >>> [round(streamed_cycles(demand, tile, 128, KNOWN["h200"])) for tile in tiles]
    [215, 189]
    """
    bm, bn, stages, *_ = tile
    if not streams(demand):
        return 0
    waited = LATENCY / stages * max(0, 1 - stages / demand.steps) if demand.steps else 0
    # Of the longer side, for a block: blocks of the same rows or columns share what they read.
    wide = -(-bn // 64) * 64 if demand.boxed else bn
    lines = wide / -(-demand.m // bm) if demand.m <= STREAMED else bm / -(-demand.n // bn)
    rate = MEMORY * (device.bandwidth or KNOWN["h200"].bandwidth)  # bytes in a cycle
    read = blocks * lines * ROW / rate
    queued: float = (waited**4 + read**4) ** 0.25  # near the rate of memory, requests wait for others
    return queued


def multiplied(tile: Instance) -> float:
    """Return the cycles of a step of a tile whose operands have come: of tensor cores, or of shared memory.

    >>> [round(multiplied(Instance(bm, bn, 4, 1, 1))) for bm, bn in ((64, 64), (128, 64), (128, 128), (128, 256))]
    [221, 386, 552, 1024]
    """
    rows, columns = max(tile.bm, 64), tile.bn
    served = rows // 64 * (64 + columns) + tile.bm + columns
    return max(rows * columns / STEP_AREA, served * ROW / SERVED)


# ---- groups of rows ----

GROUP_ROWS, GROUP_BLOCK = 128, 64  # rows of a tile, and of the part of it that one warpgroup multiplies
# Bytes from the L2 cache in a cycle, and cycles to finish an element of C.
GROUP_LINE_RATE, GROUP_FINISH = 76, {2: 0.009, 4: 0.1}


def grouped_cycles(problem: Problem, tile: Instance, sms: int) -> float:
    """Return about the cycles that tiles of groups take: rounds of them, the last one half full.

    A step of 128 bytes of k lasts until its products are done, or until its rows have come from the L2 cache.
    """
    long, short = expected_tiles(problem)
    rounds = (long + short) * -(-problem.n // tile.bn) / sms
    high = GROUP_ROWS if 4 * long > short else GROUP_BLOCK  # of tiles that decide when a round ends
    area = high * tile.bn
    steps = -(-problem.k * dtypes.get(problem.dtype).size // ROW)
    step = max(area * 100 / (STEP_AREA * tile.speed), (high + tile.bn) * ROW / GROUP_LINE_RATE)
    each = steps * step + area * GROUP_FINISH[dtypes.get(problem.out).size]
    return each * (rounds + 0.5 if rounds > 1 else 1)


def expected_tiles(problem: Problem) -> tuple[float, float]:
    """Return how many rows of tiles groups have, those of more than a block of 64 rows and the others.

    The host does not know where groups end. They are uneven: sizes are taken to be distributed exponentially, so that
    the last tile of a group has any number of rows.

    >>> [round(each, 1) for each in expected_tiles(Problem(1024, 4096, 7168, "bf16", "bf16", groups=8))]
    [7.7, 5.0]
    """
    if not problem.groups:
        whole, rest = divmod(problem.m, GROUP_ROWS)
        return problem.batch * (whole + (rest > GROUP_BLOCK)), problem.batch * (0 < rest <= GROUP_BLOCK)
    mean = max(problem.m, 1) / problem.groups
    every = min(problem.groups, problem.m) / (1 - exp(-GROUP_ROWS / mean))
    long = every * exp(-GROUP_BLOCK / mean)
    return long, every - long


# ---- batches of small products ----

TINY = 8  # sides up to which a block is as many threads as hide its waits, whatever bytes that takes
BATCH_ROOM = 14 << 10  # bytes of a block's larger products: several blocks run at a time, and wait for memory in turn
BATCH_BLOCKS = 8  # for a multiprocessor, at least: 1000 products of f16 16 x 16 take 2.1 us, by fours 2.5


def batch_products(problem: Problem, sms: int, threads: int) -> int:
    """Return the products of a block of those that stream a batch, each for so many threads."""
    batch, products = problem.batch, 1
    tiny = max(problem.m, problem.n, problem.k) <= TINY
    most = 128 // threads if tiny else min(256 // threads, BATCH_ROOM * batch // max(1, problem.bytes))
    while 2 * products <= most and (products * threads < 32 or batch >= 2 * BATCH_BLOCKS * sms * products):
        products *= 2
    return products


def batch_tile(problem: Problem, sms: int) -> tuple[int, int, int]:
    """Return the products of a block of simt_batched, and the rows and columns of C of a thread.

    >>> batch_tile(Problem(4, 4, 4, "f32", "f32", batch=200_000), 132)
    (128, 4, 4)
    """
    m, n, size = problem.m, problem.n, dtypes.get(problem.dtype).size
    tiny = max(m, n) <= TINY
    most, widest = 8 if tiny and size == 8 else 16, 8 if tiny else 4  # elements of C, and of a side
    tn = max(side for side in range(1, widest + 1) if n % side == 0)
    tm = max(side for side in range(1, widest + 1) if m % side == 0 and side * tn <= most)
    return batch_products(problem, sms, m // tm * (n // tn)), tm, tn
