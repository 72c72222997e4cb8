"""The configuration of a wgmma kernel for a product: from a table of measured winners, else by a model of its time.

The instances are few, so that a new shape hardly ever compiles one: what differs between shapes is the order of the
tiles, the grid and the split of k, which are arguments of the kernel, and which of INSTANCES it runs.
"""

from __future__ import annotations

from functools import lru_cache
from math import log2

from gemmery import dtypes
from gemmery.cuda import hopper_model as model
from gemmery.cuda.device import Device
from gemmery.cuda.geometry import describable
from gemmery.cuda.hopper_model import ROW, Demand, Instance, demand_of, is_swapped, straddles
from gemmery.cuda.hopper_table import MEASURED, SizeClass
from gemmery.problem import Problem

KEYS = ("bm", "bn", "stages", "cm", "cn", "band", "splits", "blocks")
# fmt: off
#            bm   bn stages cm cn known
INSTANCES = (
    Instance(128, 256,    4, 1, 1),
    Instance(256, 192,    3, 1, 1),
    Instance(256, 160,    4, 1, 2),
    Instance(256, 160,    3, 1, 2),  # where boxes of B are wider
    Instance(256, 128,    4, 1, 1, "measured"),
    Instance(192, 192,    4, 2, 1),
    Instance(128, 224,    4, 1, 1),
    Instance(128, 256,    4, 2, 1),
    Instance(128, 224,    4, 2, 1),
    Instance(128, 192,    4, 2, 1),
    Instance(128, 160,    5, 1, 1),
    Instance(128, 144,    5, 1, 1),
    Instance(128, 128,    6, 1, 1),
    Instance(128, 112,    6, 1, 1),
    Instance(128, 128,    6, 2, 1),
    Instance(128,  96,    6, 1, 1),
    Instance( 64, 128,    8, 2, 1),
    Instance(128,  64,    8, 1, 1),
    Instance(128,  32,    9, 1, 1),  # where tiles of 64 rows do not suit
    Instance(256, 192,    3, 1, 2, "straddle"),
    Instance( 64, 160,    6, 2, 1, "straddle"),
    Instance(128, 192,    4, 4, 2, "straddle"),  # clusters of 8 ask L2 for each row once for 2 or 4 of their blocks
    Instance(128, 160,    5, 2, 4, "straddle"),
    Instance(128, 128,    6, 4, 2, "straddle"),
    Instance(128, 112,    6, 2, 4, "straddle"),
    Instance(128,  96,    6, 2, 4, "straddle"),
    Instance( 64,  96,    8, 2, 4, "straddle"),
    Instance( 64,  96,    8, 4, 1, "straddle"),
    Instance( 64,  64,    8, 2, 4, "straddle"),
    Instance( 64,  64,    8, 4, 2, "straddle"),
    Instance( 64,  96,    8, 1, 1),
    Instance( 64,  96,    8, 2, 1),
    Instance( 64,  64,   12, 1, 1),
    Instance( 64,  64,    8, 1, 1),
    Instance( 64,  64,   12, 2, 1),
    Instance( 64,  32,    8, 1, 1, "whole"),
    Instance( 64,  32,   16, 1, 1, "whole"),
    Instance(224, 128,    4, 1, 1),  # this one and those up to 152 by 64: of C' = B' A'
    Instance(208, 128,    4, 1, 1),
    Instance(176, 128,    5, 1, 1),
    Instance(152, 128,    5, 1, 1),
    Instance(144, 256,    4, 1, 1),
    Instance(136, 256,    4, 1, 1),
    Instance(136, 128,    6, 1, 1),
    Instance(112, 128,    6, 1, 1),
    Instance(152,  64,    7, 1, 1),
    Instance(  8,  32,   24, 1, 1),  # 64 rows are multiplied
    Instance(  8,  64,   12, 1, 1, "measured"),
    Instance(  8,  96,   10, 1, 1, "measured"),
    Instance(  8, 112,    8, 1, 1, "measured"),
)
# fmt: on
WHOLE_TILE = 36864  # sums that stay in registers, packed, while the next tile is multiplied
DEEP = 1024  # k from which a split may pay
SPLITS = (2, 4)  # blocks of a cluster that share the k of a tile
SPLIT_TILES = ((128, 64, 1, 1), (128, 128, 1, 1))

MANY_ROUNDS = 40  # from which a narrower band is faster: 16384 squared by 1.9 %
FEW, FEW_COLUMNS = 8, 32  # rows of C that are a size class of their own, and columns of their tiles by the model
FEW_DEPTH = 4096  # k from which so many rows are known to gain from tiles of their own
# Where rows straddle, 256 by 192 that share A are the fastest for some sizes. In more rounds they vary: at n = 4040
# they take 225 us where 128 by 256 takes 184, at 5400 583 us where 256 by 160 takes 431 (H100,
# benchmarks/tuning/straddling-nvidia-h100.jsonl). Other tiles for such rows, most of them in clusters of 8, were timed
# in few rounds alone.
STRADDLING_ROUNDS, CLUSTER_ROUNDS = 2, 4
# A copy takes five times as long for a row beyond the edge as for one of the matrix. With pairs of 64 rows that do not
# overlap, 66 rows by 4096 with k = 8192 take 36.5 us, 100 27.4 and 116 22.0; with 128 by 32, 21.2, 22.4, 22.8. Smaller
# sides were not timed; where rows straddle lines, pairs are faster. Pairs that overlap were not timed here.
UNEVEN, UNEVEN_SIDE = range(65, 112), 4096
MOST_AHEAD = 8192  # elements of C of a tile whose B is asked for ahead, as in wgmma_epilogue.cu
# Lines of each column of B that L2 is asked for while the launches before end, by rows of a tile. Of 4 to 32 lines,
# these were the fastest on an H100: by 4096 x 4096, 1 and 8 rows take 5 and 6 % less time, 64 4 %, 128 2 %. On an H200,
# whose memory is faster, 8 lines are for every tile: of 4 to 24, 1 to 128 rows lose up to 1 % with 4 and 2 % with 12.
# A wider tile of 8 rows asks for as many in all: of 2 to 8, 112 columns are as fast with 2 to 6.
LINES_AHEAD = {8: 12, 64: 8, 128: 4}
FAST_MEMORY, LINES_OF_FAST = 4000, 8  # GB/s
BRIEF, BRIEF_AREA = 2048, 1 << 22  # bytes of k and elements of C up to which a product is brief: about 20 us
LEAST_SWAPPED = 64  # rows of C up to which no tile of C' = B' A' was timed
APART = ROW // model.PACKED  # rows of multiples of so many bytes that are so far apart begin at one place of a line
APART_TILES = ((192, 192), (64, 128))  # that gain from such rows


def chosen(problem: Problem, device: Device, split: bool = True, swapped: bool = True) -> dict[str, int]:
    """Return the configuration for a problem with a row-major C; `blocks` 0 stands for all multiprocessors.

    Only kernels that can add up parts of k `split` it. Tiles may be of C' = B' A' unless `swapped` is False.

    >>> from gemmery.cuda.device import KNOWN
    >>> chosen(Problem(8192, 8192, 8192, "bf16", "bf16", b_layout="col"), KNOWN["h200"])["blocks"]
    128
    """
    return dict(zip(KEYS, _chosen(problem, device, split and not problem.invariant, swapped), strict=True))


@lru_cache(maxsize=4096)
def _chosen(problem: Problem, device: Device, split: bool, swapped: bool) -> tuple[int, ...]:
    """Return the values of KEYS; a plan asks for those of a problem five times, for 30 us each."""
    tile, splits = measured(problem, device, split, swapped) or modelled(problem, device, split, swapped)
    rows, columns = -(-problem.m // tile.bm), -(-problem.n // tile.bn)
    ordered = (model.exchanged(tile), columns, rows) if is_swapped(tile.bm) else (tile, rows, columns)
    band, blocks = order(*ordered, problem.batch, device.sms)
    return tile.bm, tile.bn, tile.stages, tile.cm, tile.cn, band, splits, blocks if splits == 1 else 0


def suits(problem: Problem, bm: int, bn: int, swapped: bool = True) -> bool:
    """Return True if a tile may have this shape for a problem: see `illegal` of ladder/wgmma.py."""
    if bm == FEW and (problem.m > FEW or problem.a_layout == "col" or problem.k < FEW_DEPTH):
        return False
    if is_swapped(bm):
        timed = problem.m > LEAST_SWAPPED and not straddles(demand_of(problem))
        return swapped and timed and not refuses_swapped(problem)
    whole = problem.a_layout == "row" and problem.k * dtypes.get(problem.dtype).size % ROW == 0
    uneven = problem.m in UNEVEN and whole and min(problem.n, problem.k) >= UNEVEN_SIDE
    if (bm == 64 and uneven) or ((bm, bn) == (128, 32) and not uneven):
        return False
    return (bm != 192 or plain_halves(problem)) and (bn % 32 == 0 or dtypes.get(problem.out).size == 2)


def refuses_swapped(problem: Problem) -> str:
    """Return why no tiles can compute C' = B' A' of a product with a row-major C; "" if some can.

    stmatrix transposes elements of 16 bits, and only a tensor copy then writes C.
    """
    sizes = dtypes.get(problem.dtype).size, dtypes.get(problem.out).size
    if sizes != (2, 2) or problem.a_layout != "row":
        return "it is for elements of 16 bits and an A by rows"
    return describable(problem, "c")


def may_split(m: int, n: int, k: int, batch: int, device: Device) -> bool:
    """Return False for products whose k the model does not split: those of many tiles or of few steps."""
    return k >= DEEP and -(-m // 128) * -(-n // 64) * batch <= 2 * device.sms


def measured(problem: Problem, device: Device, split: bool = True, swapped: bool = True) -> tuple[Instance, int] | None:
    """Return the instance and split that were the fastest for a product as large as this one; None if none was timed.

    Products are as large as each other if they have as many tiles, and k within 1/8 of an octave; rows that
    straddle lines of the L2 cache set them apart, and so do at most FEW rows of C.
    """
    winner = MEASURED.get(device.sms, {}).get(size_class(problem))
    if winner is None or problem.batch > 1:
        return None
    bm, bn, stages, cm, cn, splits = winner
    if (splits > 1 and not split) or not suits(problem, bm, bn, swapped):
        return None
    return Instance(bm, bn, stages, cm, cn), splits


def outruns_gemv(problem: Problem) -> bool:
    """Return True if tiles multiply one row by a B of adjacent rows in less time than gemv_vectorized.

    That one adds up parts of k in a second launch: at n = 4096, k = 1024 it takes 5.7 us, and tiles 4.2. Of 48 sizes
    of n and k, 512 to 128256, in bf16 on an H200, this misses two, where tiles take 0.97 and 0.96 of its time.

    >>> row = Problem(1, 4096, 1024, "bf16", "bf16")
    >>> outruns_gemv(row), outruns_gemv(row._replace(n=14336, k=4096)), outruns_gemv(row._replace(b_layout="col"))
    (True, False, False)
    """
    n, k = problem.n, problem.k
    if problem.m != 1 or problem.batch > 1 or problem.a_layout == "col" or problem.b_layout == "col":
        return False
    size, out, _ = kind(problem)
    if (size, out) != (2, 2) or describable(problem, "a") or describable(problem, "b") or min(n, k) < 512:
        return False
    return (k <= 1536 and n <= 32 * k) or (k <= 3072 and 4096 <= n < 16384) or (k <= 4096 and n in (4096, 8192))


def has_room(tile: Instance, demand: Demand, device: Device) -> bool:
    """Return True if shared memory has room for a tile's ring, mbarriers, and pieces of C on their way out.

    Boxes of B that are 64 columns wide may extend beyond the tile.
    """
    wide = -(-tile.bn // 64) * 64 if demand.boxed else tile.bn
    halves = demand.finish < model.FINISH[4] and (tile.bm * tile.bn > WHOLE_TILE or is_swapped(tile.bm))
    return tile.stages * (tile.bm + wide) * ROW + (16384 if halves else 32768) + 3072 <= device.limits.shared


def plain_halves(problem: Problem) -> bool:
    """Return True if a tile of 192 rows can compute a product.

    Of the 232 registers of a thread, 144 have sums and 72 packed ones; of three warpgroups, 96 and 48 of 160. That
    leaves none for more than to copy plain sums to a C with a tensor map.
    """
    plain = not (problem.epilogue or problem.scaled or problem.scales)
    halves = dtypes.get(problem.dtype).size == dtypes.get(problem.out).size == 2
    return plain and halves and not describable(problem, "c")


def modelled(problem: Problem, device: Device, split: bool = True, swapped: bool = True) -> tuple[Instance, int]:
    """Return the instance and split that take the fewest cycles by the model."""
    demand = demand_of(problem)
    known = [tile for tile in INSTANCES if is_known(tile, demand, device)]
    whole = [tile for tile in known if suits(problem, tile.bm, tile.bn, swapped)]
    roomy = [tile for tile in whole if has_room(tile, demand, device)]
    # No block of a cluster is without rows or columns.
    full = [tile for tile in roomy if tile.bm * (tile.cm - 1) < demand.m and tile.bn * (tile.cn - 1) < demand.n]
    choices = [(tile, 1) for tile in full or whole]  # a device that has room for none of them refuses the kernel
    if split and may_split(problem.m, problem.n, problem.k, problem.batch, device):
        alone = [tile for tile in INSTANCES if (tile.bm, tile.bn, tile.cm, tile.cn) in SPLIT_TILES]
        cut = [(tile, splits) for tile in alone for splits in SPLITS]
        choices += [each for each in cut if model.shared_turns(demand, *each, device.sms)]
    return min(choices, key=lambda choice: model.cycles(demand, choice[0], choice[1], device))


def is_known(tile: Instance, demand: Demand, device: Device) -> bool:
    """Return True if the model knows where a tile is fast.

    Where rows straddle, 64 by 64 was faster than 64 by 32 at each of 48 sizes: at n = 600 5.1 us, not 8.0 (H100).
    """
    if tile.known == "straddle":
        tiles = -(-demand.m // (tile.bm * tile.cm)) * -(-demand.n // (tile.bn * tile.cn)) * demand.batch
        rounds = STRADDLING_ROUNDS if tile.bm == 256 else CLUSTER_ROUNDS
        return straddles(demand) and tiles <= rounds * model.at_a_time(tile.cm * tile.cn, device.sms)
    if tile.known == "whole":
        return demand.m <= 64 or not straddles(demand)
    return tile.known == "all"


def size_class(problem: Problem) -> SizeClass:
    """Return what products have in common that one configuration suits: a key of the table of winners.

    >>> square = Problem(1024, 1024, 1024, "bf16", "bf16")
    >>> size_class(square), size_class(square._replace(m=1000)) == size_class(square)
    ((2, 2, 'TT', 16, 32, 40, False), True)
    >>> [size_class(square._replace(m=m))[3] for m in (1, 8, 9, 64, 65)]
    [0, 0, 1, 1, 2]
    """
    rows = 0 if problem.m <= FEW else -(-problem.m // 64)
    depth = round(4 * log2(max(problem.k, 1)))
    return (*kind(problem), rows, -(-problem.n // 32), depth, straddles(demand_of(problem)))


def kind(problem: Problem) -> tuple[int, int, str]:
    """Return the bytes of an element of A and B, those of C, and how A and B lie in memory.

    That is "T" where k is adjacent in A, and "N" where k is adjacent in B.

    >>> kind(Problem(64, 64, 64, "bf16", "bf16", b_layout="col")), kind(Problem(64, 64, 64, "f16", "f32"))
    ((2, 2, 'TN'), (2, 4, 'TT'))
    """
    size, out = dtypes.get(problem.dtype).size, dtypes.get(problem.out).size
    if size != 2:  # packed first where k is not adjacent
        return size, out, "TN"
    a, b = "N" if problem.a_layout == "col" else "T", "T" if problem.b_layout == "row" else "N"
    return size, out, a + b


def lines_ahead(problem: Problem, tile: Instance, device: Device) -> int:
    """Return the lines of each column of B that blocks ask L2 for while the launches before them end.

    That is for few rows, where B comes from memory and a block reads columns of its own, and a k that the ring does not
    hold.

    >>> from gemmery.cuda.device import KNOWN
    >>> row, tile = Problem(1, 4096, 4096, "bf16", "bf16", b_layout="col"), Instance(8, 32, 24, 1, 1)
    >>> (
    ...     [lines_ahead(row, tile, KNOWN[name]) for name in ("h100", "h200")],
    ...     lines_ahead(row._replace(m=9), tile, KNOWN["h100"]),
    ... )
    ([12, 8], 0)
    """
    lines = problem.k * dtypes.get(problem.dtype).size // ROW
    if problem.m > tile.bm * tile.cm or tile.bm * tile.bn > MOST_AHEAD or problem.b_layout != "col":
        return 0
    if lines <= tile.stages:
        return 0
    most = LINES_AHEAD.get(tile.bm, 0)
    if most and device.bandwidth > FAST_MEMORY:
        most = LINES_OF_FAST
    return min(lines, most * FEW_COLUMNS // tile.bn if tile.bm == FEW else most)


def begins_at_once(problem: Problem, device: Device) -> bool:
    """Return True if the next launch may begin at once after a brief product where memory is fast, whatever the tile.

    Large tiles gain if it begins late (see lets_next_begin in wgmma_specialized.cu), brief products lose: on an H200
    n = 1024 takes 5.87 us where it took 5.35, and 2048 in int8 15.8 where it took 14.9. On an H100 n = 1024 gains.

    >>> from gemmery.cuda.device import KNOWN
    >>> squares = [Problem(n, n, n, "bf16", "bf16", b_layout="col") for n in (1024, 2048)]
    >>> [[begins_at_once(each, KNOWN[name]) for each in squares] for name in ("h100", "h200")]
    [[False, False], [True, False]]
    """
    brief = problem.k * dtypes.get(problem.dtype).size <= BRIEF and problem.batch * problem.m * problem.n <= BRIEF_AREA
    return brief and device.bandwidth > FAST_MEMORY


def takes_rows_apart(problem: Problem, bm: int, bn: int, cm: int) -> bool:
    """Return True if tiles have every APART-th row of A and C.

    Where rows of A straddle lines of the L2 cache, every APART-th one has the same k at the beginnings of lines. A tile
    of such rows, whose k begins there, brings whole lines. That is done where it takes no more tiles.

    >>> problem = Problem(3000, 3000, 3000, "bf16", "bf16", b_layout="col")
    >>> [takes_rows_apart(each, 192, 192, 2) for each in (problem, problem._replace(m=2999), problem._replace(m=4000))]
    [True, False, False]
    """
    if (bm, bn) not in APART_TILES or problem.m % APART or problem.batch > 1 or problem.a_layout != "row":
        return False
    if demand_of(problem).a_more == 0 or not plain_halves(problem):
        return False
    return -(-problem.m // (APART * bm * cm)) * APART <= -(-problem.m // (bm * cm))


def order(tile: Instance, rows: int, columns: int, batch: int, sms: int) -> tuple[int, int]:
    """Return the tiles in a column of the order in which they are taken, and the blocks of the grid (0: all).

    A round then covers about a square of C.

    >>> order(INSTANCES[0], 64, 32, 1, 132)
    (16, 128)
    >>> pairs = Instance(128, 224, 4, 2, 1)
    >>> order(pairs, 21, 12, 1, 132)  # 11 x 12 pairs of blocks: two rounds of 66, and of 64 three
    (6, 0)
    """
    tiles = -(-rows // tile.cm) * tile.cm * -(-columns // tile.cn) * tile.cn * batch
    side = (sms * tile.bn / tile.bm) ** 0.5
    most = 8 if side < 11 or tiles > MANY_ROUNDS * sms else 16 if side >= 14 else 12
    clusters = max(1, -(-rows // tile.cm))  # on top of each other
    band = -(-clusters // -(-clusters * tile.cm // most))  # of equal bands: 3000 squared gains 0.7 %
    return band, model.grid(tiles, sms)
