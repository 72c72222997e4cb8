"""A model of the time that a wgmma kernel takes for a product: rounds of tiles, each of steps along k and an end."""

from __future__ import annotations

from typing import Literal

from gemmery import dtypes
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

ROW = 128  # bytes of k, or of adjacent rows or columns, that one row of a tile has in shared memory
STRADDLING = 317  # that cost as much of the L2 cache as such a row that touches two lines of it
PACKED = 16  # bytes: operands whose rows are no multiples of it are packed to whole lines

# Cycles of a multiprocessor, fitted to times on an H200. A step multiplies ROW bytes of k, for every element type.
STEP_AREA = 32  # elements of C of a tile for which a step multiplies in a cycle
LINE_RATE = 76  # bytes that the L2 cache delivers to a multiprocessor in a cycle
START = 4150  # of a launch among others
PAIRED = 1500  # more, where its blocks are paired and rows straddle
LAST = 0.033  # of an element of the last tile, whose end nothing hides
FINISH = {2: 0.009, 4: 0.1}  # of an element of every tile, by the bytes of an element of C
FINISH_NARROW = 0.05  # of two bytes, next to operands of one byte
EXCHANGE, EXCHANGE_ELEMENT = 1500, 0.24  # adding up the parts of a tile in a cluster
# Of few rows (columns), B (A) comes from memory while it is multiplied. 128 x 4096 x k lasts as long with every tile
# and 8 stages, in which 4.2 MB of B are under way: 3.2 TB/s, 1.3 us for a request; with k in halves, and 8.4 MB, 3.9.
# With 16 stages 64 x 4096 x 4096 takes 10.6 us; but with 12 those 128 rows take no less than with 8.
STREAMED = 128  # rows or columns of C
LATENCY = 2400  # cycles from the request for a stage to its products
MEMORY_RATE = 2090  # bytes that memory delivers in a cycle, 4.15 TB/s
READ_ONCE, FEW_ROWS = 0.96, 256  # of the time where clusters share the columns of B of so few rows of C


class Instance(NamedTuple):
    """What a kernel is compiled for. `speed` is that of its products while operands come in time, in percent.

    `known` says which products the model may choose it for: "all"; "straddle", those whose rows straddle lines of L2;
    "whole", those whose rows do not, or whose C has at most 64 rows; "measured", none but those in the table.
    """

    bm: int  # rows and columns of C of a tile
    bn: int
    stages: int
    cm: int  # blocks of a cluster along m, which share columns of B, and along n, which share rows of A
    cn: int
    speed: int
    known: Literal["all", "straddle", "whole", "measured"] = "all"


class Demand(NamedTuple):
    """What a product asks of every instance."""

    m: int
    n: int
    steps: int  # of ROW bytes of k
    batch: int
    a_line: int  # bytes from the L2 cache for a row of a tile of A, and of B
    b_line: int
    finish: float  # cycles to finish an element of C
    boxed: bool  # B comes in boxes of 128 bytes along n


def demand_of(problem: Problem) -> Demand:
    """Return what a product asks of every instance.

    A row of a tile touches two lines of the L2 cache unless rows begin at multiples of a line. Operands that tensor
    copies cannot read are packed to such rows first.
    """
    size, out = dtypes.get(problem.dtype).size, dtypes.get(problem.out).size
    a = problem.m if problem.a_layout == "col" else problem.k
    b = problem.k if problem.b_layout == "col" else problem.n
    a_line, b_line = (
        STRADDLING if aligned >= PACKED and side * size % PACKED == 0 and side * size % ROW != 0 else ROW
        for side, aligned in zip((a, b), problem.alignments[:2], strict=True)
    )
    finish = FINISH_NARROW if size == 1 and out == 2 else FINISH[out]
    boxed = size == 2 and problem.b_layout == "row"
    return Demand(problem.m, problem.n, -(-problem.k * size // ROW), problem.batch, a_line, b_line, finish, boxed)


def straddles(demand: Demand) -> bool:
    """Return True if rows of tiles touch two lines of the L2 cache."""
    return demand.a_line + demand.b_line > 2 * ROW


def shared_turns(demand: Demand, tile: Instance, splits: int, sms: int) -> int:
    """Return the turns that clusters take at the tiles after whole rounds, 1 / splits of a round each; 0 if splitting
    them does not save time.

    >>> demand = demand_of(Problem(3072, 3072, 3072, "bf16", "bf16", b_layout="col"))
    >>> shared_turns(
    ...     demand, Instance(128, 256, 4, 1, 1, 100), 2, 132
    ... )  # 288 tiles: 2 rounds, and 24 tiles for 66 clusters
    1
    """
    clusters = at_a_time(splits, sms)
    tiles = -(-demand.m // tile.bm) * -(-demand.n // tile.bn) * demand.batch
    turns = -(-(tiles % (clusters * splits)) // clusters)
    return turns if turns < splits else 0


def at_a_time(cluster: int, sms: int) -> int:
    """Return how many clusters of so many blocks run at a time; some of 4 do not find room together."""
    return sms // cluster if cluster <= 2 else sms // cluster * 10 // 11


def cycles(demand: Demand, tile: Instance, splits: int, sms: int) -> float:
    """Return the cycles that a product takes by the model: rounds of tiles, each of steps and an end."""
    bm, bn, _, cm, cn = tile[:5]
    tiles = -(-demand.m // (bm * cm)) * -(-demand.n // (bn * cn)) * demand.batch
    area, cluster = bm * bn, cm * cn

    def last(steps: int, blocks: int) -> float:
        return steps * step_cycles(demand, tile, blocks) + area * demand.finish

    once = READ_ONCE if cm > 1 and bm < demand.m <= FEW_ROWS else 1
    if splits == 1:
        at_once = at_a_time(cluster, sms)
        rounds, rest = divmod(tiles, at_once)
        each = rounds * last(demand.steps, at_once * cluster) + (rest > 0) * last(demand.steps, rest * cluster)
        return START + LAST * area + once * each + (PAIRED if cluster > 1 and straddles(demand) else 0)
    blocks = at_a_time(splits, sms) * splits
    part = last(-(-demand.steps // splits), min(tiles * splits, blocks)) + EXCHANGE + EXCHANGE_ELEMENT * area
    whole = tiles // blocks * last(demand.steps, blocks)
    return START + LAST * area + whole + shared_turns(demand, tile, splits, sms) * part


def step_cycles(demand: Demand, tile: Instance, blocks: int) -> float:
    """Return the cycles of a step: until its products are done, its lines have come from the L2 cache, and, where C has
    few rows (columns), those of B (A) from memory.

    >>> demand = demand_of(Problem(1, 4096, 4096, "bf16", "bf16", b_layout="col"))
    >>> [round(step_cycles(demand, Instance(64, 32, stages, 1, 1, 74), 128)) for stages in (8, 16)]
    [305, 253]
    """
    bm, bn, stages, cm, cn, speed = tile[:6]
    multiplied = bm * bn * 100 / (STEP_AREA * speed)
    wide = -(-bn // 64) * 64 if demand.boxed else min(bn, demand.n)
    brought = (demand.a_line * min(bm, demand.m) / cn + demand.b_line * wide / cm) / LINE_RATE
    if min(demand.m, demand.n) > STREAMED or 0 in (demand.m, demand.n):
        return max(multiplied, brought)
    waited = LATENCY / stages * max(0, 1 - stages / demand.steps) if demand.steps else 0
    # Of the longer side, for a block: blocks of the same rows or columns share what they read.
    lines = bn / -(-demand.m // bm) if demand.m <= STREAMED else bm / -(-demand.n // bn)
    read = blocks * lines * ROW / MEMORY_RATE
    queued: float = (waited**4 + read**4) ** 0.25  # near the rate of memory, requests wait for others
    return max(multiplied, brought, queued)
