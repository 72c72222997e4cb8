"""The configuration of a wgmma kernel for a product: from a table of measured winners, else by a model of its time.

The instances are few, so that a new shape hardly ever compiles one: what differs between shapes is the order of the
tiles, the grid and the split of k, which are arguments of the kernel, and which of INSTANCES it runs. A tile that is
legal (`legal`) and known to be fast for such a product is taken if it costs least (`cost`); `data` was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import log2

from gemmery import dtypes
from gemmery.cuda import traced_function
from gemmery.cuda.choose import cost, legal
from gemmery.cuda.choose.cost import ROW, Demand, demand_of, is_swapped, straddles
from gemmery.cuda.choose.data import (
    BATCHED,
    BATCHED_ROUNDS,
    BATCHED_TALL,
    BATCHED_TILES,
    FEW,
    FEW_TILES,
    GROUPS,
    INSTANCES,
    MANY,
    MANY_FACTORED,
    MANY_TILES,
    MOST_FACTORED,
    MOST_GATHERED,
    PAIRED,
    PAIRED_FEW,
    PAIRED_TWICE,
    SHALLOW_FACTORED,
    SHARED_DEPTH,
    SMALL,
    WINNERS,
    Instance,
    Residuals,
    SizeClass,
    card,
)
from gemmery.cuda.constants import MOST_AHEAD
from gemmery.cuda.device import Device
from gemmery.cuda.geometry import describable
from gemmery.problem import Config, Problem

KEYS = ("bm", "bn", "stages", "cm", "cn", "band", "splits", "blocks")
APART = ROW // cost.PACKED  # rows of multiples of so many bytes that are so far apart begin at one place of a line


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
    of_batch = batched(problem, device)
    choice = (of_batch, 1) if of_batch else measured(problem, device, split, swapped)
    tile, splits = choice or modeled(problem, device, split, swapped)
    band, blocks = order(tile, problem.m, problem.n, problem.batch, device)
    shallow = problem.scales and problem.k <= SHALLOW_FACTORED
    if shallow and problem.m * problem.n > MANY_FACTORED * device.sms * tile.bm * tile.bn:
        blocks = 0
    return tile.bm, tile.bn, tile.stages, tile.cm, tile.cn, band, splits, 0 if splits > 1 or of_batch else blocks


def batched(problem: Problem, device: Device) -> Instance | None:
    """Return the tile for batches of small products in 16 bits, of which memory limits the time; None for others.

    >>> from gemmery.cuda.device import KNOWN
    >>> many = Problem(96, 96, 96, "f16", "f16", batch=2000)
    >>> [batched(many._replace(m=m, n=m), KNOWN["h200"])[:3] for m in (96, 160)]
    [(128, 128, 4), (64, 192, 4)]
    """
    m, n, size = problem.m, problem.n, dtypes.get(problem.dtype).size
    if problem.batch < 2 or max(m, n, problem.k) > BATCHED or min(m, n) <= SMALL or problem.epilogue or size != 2:
        return None
    if dtypes.get(problem.out).size != size or problem.batch * -(-m // 64) < BATCHED_ROUNDS * device.sms:
        return None
    return BATCHED_TALL if 64 < m <= 96 and 64 < n <= 128 else BATCHED_TILES[-(-n // 64) - 1]


def traced_choices(problem: Problem, device: Device) -> dict[str, int]:
    """Return the configuration for a product that a traced function follows, where tiles have rows of C.

    That is the one of the plain product, or for two weights of one as wide as both, if a tile may have halves of them.
    """
    if traced_function.exchanges(problem):
        return dict(zip(KEYS, (128, 256 if problem.n % 256 == 0 else 128, 4, 1, 1, 16, 1, device.sms), strict=True))
    paired = traced_function.is_paired(problem)
    whole = problem._replace(n=2 * problem.n) if paired else problem
    plain = whole._replace(epilogue="", scaled=True)
    tile, _ = measured(plain, device, False, False) or modeled(plain, device, False, False)
    tiles_of_few = -(-problem.n // 128) * problem.batch
    if paired and FEW < problem.m <= 64 and device.sms / 2 < tiles_of_few <= device.sms:
        tile = PAIRED_FEW
    if twice := paired and takes_two_blocks(problem, device):
        tile = PAIRED_TWICE[FEW if problem.m <= FEW else 64]
    if paired and tile[:2] == (128, 256) and problem.m > 512:
        tile = PAIRED
    # Of two weights, tiles of other widths than whole pieces were timed where all are one round (seeds 40 and 41 in
    # benchmarks/tuning/epilogues-nvidia-h200.jsonl): 12 x 6248 x 7232 takes 44.9 us, and by whole pieces 46.7.
    by_pieces = paired and not twice and problem.n * problem.batch > PAIRED_TWICE[FEW].bn // 2 * device.sms

    def suits(each: Instance) -> bool:
        return not legal.illegal(problem, each) and not (by_pieces and each.bn % 64)

    if not suits(tile):
        demand = demand_of(plain)
        tiles = [each for each in INSTANCES if not is_swapped(each.bm) and suits(each)]
        tile = min(tiles, key=lambda each: (cost.cycles(demand, each, 1, device), -each.stages))
    band, blocks = order(tile, whole.m, whole.n, whole.batch, device)
    return dict(zip(KEYS, (*tile[:5], band, 1, 2 * device.sms if twice else blocks), strict=True))


def takes_two_blocks(problem: Problem, device: Device) -> bool:
    """Return True if a product of two weights has tiles of PAIRED_TWICE, two for nearly every multiprocessor.

    >>> from gemmery.cuda.device import KNOWN
    >>> few = Problem(16, 14336, 4096, "bf16", "bf16", b_layout="col")
    >>> [takes_two_blocks(each, KNOWN["h200"]) for each in (few, few._replace(m=65), few._replace(n=11008))]
    [True, False, False]
    """
    sizes = dtypes.get(problem.dtype).size, dtypes.get(problem.out).size
    tiles, room = -(-problem.n // (PAIRED_TWICE[FEW].bn // 2)) * problem.batch, 2 * device.sms
    return problem.m <= 64 and problem.b_layout == "col" and sizes == (2, 2) and room - room // 20 <= tiles <= room


def grouped_columns(problem: Problem, device: Device) -> int:
    """Return the columns of the tiles of a product of groups of rows."""
    return min(GROUPS, key=lambda tile: cost.grouped_cycles(problem, tile, device.sms)).bn


def follows_index(problem: Problem, device: Device) -> bool:
    """Return True if a product whose kernel loads rows that an index names takes less time than one after a copy.

    >>> from gemmery.cuda.device import KNOWN
    >>> experts = Problem(8192, 1536, 2048, "bf16", "bf16", b_layout="col", groups=64, gathered=True)
    >>> [follows_index(each, KNOWN["h200"]) for each in (experts, experts._replace(n=7168))]
    [True, False]
    """
    return -(-problem.n // grouped_columns(problem, device)) <= MOST_GATHERED


def may_split(m: int, n: int, k: int, batch: int, device: Device) -> bool:
    """Return False for products whose k the model does not split: those of many tiles or of few steps."""
    limits = card(device)
    return k >= limits.split_depth and -(-m // 128) * -(-n // 64) * batch <= limits.split_tiles * device.sms


def may_share(m: int, n: int, k: int, batch: int, device: Device) -> bool:
    """Return False for products of float32 whose k the blocks of a tile on CUDA cores never share."""
    most = MANY_TILES if device.capability >= 90 else FEW_TILES  # many were timed where clusters share k
    return k >= SHARED_DEPTH and min(m, n) > 1 and m * n * batch <= most * device.sms


def measured(problem: Problem, device: Device, split: bool = True, swapped: bool = True) -> tuple[Instance, int] | None:
    """Return the instance and split that were the fastest for a product as large as this one; None if none was timed.

    Products are as large as each other if they have as many tiles, and k within 1/8 of an octave; rows that
    straddle lines of the L2 cache set them apart, and so do at most FEW rows of C.
    """
    winner = WINNERS.get(device.sms, {}).get(size_class(problem))
    if winner is None or problem.batch > 1 or (problem.m <= FEW and problem.n > card(device).few_columns):
        return None
    tile, splits = Instance(*winner[:5]), winner[5]
    demand = demand_of(problem)
    if (splits > 1 and not split) or not _timed(problem, demand, device, swapped)(tile):
        return None
    if legal.illegal(_as_read(problem, demand), tile):
        return None
    return tile, splits


def streams_batch(problem: Problem, device: Device) -> bool:
    """Return True for batches of small products of which a block streams many.

    With long sides there must be many: 1000 of 32 x 32 in float32 take 6.2 us by tiles, and 6.6 so, and 100 in float64
    2.8 and 3.6.

    >>> from gemmery.cuda.device import KNOWN
    >>> many = Problem(8, 8, 8, "f32", "f32", batch=1000)
    >>> [streams_batch(each, KNOWN["h200"]) for each in (many, many._replace(batch=2), many._replace(m=32))]
    [True, False, False]
    """
    longest = max(problem.m, problem.n, problem.k)
    if problem.batch < MANY or longest > SMALL or problem.k == 0 or problem.invariant:
        return False
    least = {"f32": 16, "f64": 4}.get(problem.dtype, 0)
    return longest <= 24 or problem.batch >= least * device.sms


def outruns_gemv(problem: Problem, device: Device) -> bool:
    """Return True if tiles multiply one row by a B of adjacent rows in less time than gemv_vectorized.

    >>> from gemmery.cuda.device import KNOWN
    >>> row = Problem(1, 4096, 1024, "bf16", "bf16")
    >>> rows = row, row._replace(n=14336, k=4096), row._replace(b_layout="col")
    >>> [outruns_gemv(each, KNOWN["h200"]) for each in rows]
    [True, False, False]
    """
    n, k, limits = problem.n, problem.k, card(device)
    if problem.m != 1 or problem.batch > 1 or problem.a_layout == "col" or problem.b_layout == "col":
        return False
    if kind(problem)[:2] != (2, 2) or describable(problem, "a") or describable(problem, "b"):
        return False
    ranges = limits.one_row_columns if min(n, k) >= limits.one_row else ()
    return any(k <= depth and n in columns and n <= ratio * k for depth, columns, ratio in ranges)


def modeled(problem: Problem, device: Device, split: bool = True, swapped: bool = True) -> tuple[Instance, int]:
    """Return the instance and split that take the fewest cycles by the model."""
    demand, limits = demand_of(problem), card(device)
    fitted = fitted_for(problem, demand, device)
    choices = [(tile, 1) for tile in candidates(problem, demand, device, swapped)]
    deep = problem.k >= limits.split_depth
    if split and (deep if fitted else may_split(problem.m, problem.n, problem.k, problem.batch, device)):
        legals = [each for each in legal.instances(_as_read(problem, demand)) if swapped or not is_swapped(each.bm)]
        tiles: dict[tuple[int, ...], Instance] = {tile[:5]: tile for tile in legals}
        names = fitted.tiles if fitted else limits.split
        cut = [(tiles[name[:5]], name[5]) for name in names if name[5] > 1 and name[:5] in tiles]
        choices += [each for each in cut if cost.shared_turns(demand, *each, device.sms)]
    times = [(cost.cycles(demand, *each, device), -each[0].stages, each) for each in choices]
    if fitted:
        near = fitted.near * min(times)[0]
        times = [
            (cycles * cost.residual(demand, *each, device.sms, fitted), stages, each)
            for cycles, stages, each in times
            if cycles <= near
        ]
    return min(times, key=lambda each: each[:2])[2]


def fitted_for(problem: Problem, demand: Demand, device: Device) -> Residuals | None:
    """Return what was fitted to times of products like this one beside the model; None if there is nothing.

    >>> from gemmery.cuda.device import KNOWN
    >>> few = Problem(300, 4096, 1000, "bf16", "bf16", b_layout="col")
    >>> others = few._replace(k=1024), few._replace(m=600)
    >>> [bool(fitted_for(each, demand_of(each), KNOWN["h200"])) for each in (few, *others)]
    [True, False, False]
    """
    fitted = card(device).residuals
    if fitted is None or problem.batch > 1 or not 0 < problem.m <= fitted.rows or problem.scales:
        return None
    if not straddles(demand):
        return None
    suits = kind(problem) == (2, 2, "TN") and problem.n in fitted.sides and problem.k in fitted.sides
    return fitted if suits else None


def candidates(problem: Problem, demand: Demand, device: Device, swapped: bool = True) -> list[Instance]:
    """Return the instances that a product may have and the model knows; no block of a cluster lacks rows or columns."""
    is_timed = _timed(problem, demand, device, swapped)
    legals = legal.instances(_as_read(problem, demand))
    fitted = fitted_for(problem, demand, device)
    timed = fitted.tiles if fitted else {}
    known = [tile for tile in legals if is_timed(tile) and ((*tile[:5], 1) in timed or is_known(tile, demand, device))]
    full = [tile for tile in known if tile.bm * (tile.cm - 1) < demand.m and tile.bn * (tile.cn - 1) < demand.n]
    return full or known  # a product without elements has no rows for any


def _as_read(problem: Problem, demand: Demand) -> Problem:
    """Return the product with the layout of B in which copies bring it: packed with k adjacent unless it is boxed."""
    return problem if demand.boxed else problem._replace(b_layout="col")


def _timed(problem: Problem, demand: Demand, device: Device, swapped: bool) -> Callable[[Instance], bool]:
    """Return what tells whether a tile was timed for products of a problem's kind, and fast."""
    limits, size = card(device), dtypes.get(problem.dtype).size
    whole = problem.a_layout == "row" and problem.k * size % ROW == 0
    uneven = problem.m in limits.uneven and whole and min(problem.n, problem.k) >= limits.uneven_side
    turned = swapped and problem.m > limits.least_swapped
    turned = turned and (problem.m <= limits.most_straddling or not straddles(demand))

    def is_timed(tile: Instance) -> bool:
        bm = tile.bm
        if demand.boxed and not tile.boxed:
            return False
        if problem.scales and bm * tile.bn > MOST_FACTORED:
            return False
        if is_swapped(bm):
            # A block whose rows are all beyond the edge keeps its cluster waiting: 168 x 1880 x 7312 took 36.9 us so.
            return turned and not uneven and -(-problem.m // bm) % tile.cm == 0
        if bm == FEW:
            return problem.k >= limits.few_depth
        return not uneven if bm == 64 else uneven or (bm, tile.bn) != (128, 32)

    return is_timed


def is_known(tile: Instance, demand: Demand, device: Device) -> bool:
    """Return True if the model knows where a tile is fast."""
    if tile.known == "straddle":
        tiles = -(-demand.m // (tile.bm * tile.cm)) * -(-demand.n // (tile.bn * tile.cn)) * demand.batch
        rounds = card(device).straddling_rounds
        most = rounds.get(tile.bm, rounds[0]) * cost.at_a_time(tile.cm * tile.cn, device.sms)
        return straddles(demand) and tiles <= most
    if tile.known == "whole":
        return demand.m <= card(device).whole_rows or not straddles(demand)
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
    lines, limits = problem.k * dtypes.get(problem.dtype).size // ROW, card(device)
    if problem.m > tile.bm * tile.cm or tile.bm * tile.bn > MOST_AHEAD or problem.b_layout != "col":
        return 0
    if traced_function.is_paired(problem) and tile in PAIRED_TWICE.values():
        return 0  # blocks of two launches are there at a time, and lines changed nothing: see begins_at_once
    if lines <= tile.stages:
        return 0
    most = limits.lines_ahead.get(tile.bm, 0)
    return min(lines, most * limits.ahead_columns // tile.bn if tile.bm == FEW else most)


def begins_at_once(problem: Problem, tile: Instance, device: Device) -> bool:
    """Return True if the next launch may begin at once: after a brief product, and where it finds room.

    >>> from gemmery.cuda.device import KNOWN
    >>> squares = [Problem(n, n, n, "bf16", "bf16", b_layout="col") for n in (1024, 2048)]
    >>> [[begins_at_once(each, INSTANCES[0], KNOWN[name]) for each in squares] for name in ("h100", "h200")]
    [[False, False], [True, False]]
    """
    depth, area = card(device).brief
    if traced_function.is_paired(problem) and tile in PAIRED_TWICE.values():
        return True
    return problem.k * dtypes.get(problem.dtype).size <= depth and problem.batch * problem.m * problem.n <= area


def takes_rows_apart(problem: Problem, tile: Instance, device: Device) -> bool:
    """Return True if tiles have every APART-th row of A and C.

    Where rows of A straddle lines of the L2 cache, every APART-th one has the same k at the beginnings of lines. A tile
    of such rows, whose k begins there, brings whole lines. That is done where it takes no more tiles.

    >>> from gemmery.cuda.device import KNOWN
    >>> problem, tile = Problem(3000, 3000, 3000, "bf16", "bf16", b_layout="col"), Instance(192, 192, 4, 2, 1)
    >>> [takes_rows_apart(problem._replace(m=m), tile, KNOWN["h200"]) for m in (3000, 2999, 4000)]
    [True, False, False]
    """
    if (tile.bm, tile.bn) not in card(device).apart or problem.m % APART or problem.batch > 1:
        return False
    if problem.a_layout != "row" or demand_of(problem).a_more == 0 or not legal.plain_halves(problem):
        return False
    rows = tile.bm * tile.cm
    return -(-problem.m // (APART * rows)) * APART <= -(-problem.m // rows)


def shares_columns(problem: Problem, tile: Instance, device: Device) -> bool:
    """Return True if two blocks of a cluster share the columns of B of a tile of float32 in parts."""
    limits, rows = card(device), -(-problem.m // tile.bm)
    rounds = rows * -(-problem.n // tile.bn) * problem.batch / device.sms
    enough = problem.m >= limits.sharing_rows * tile.bm
    return tile.bm == 128 and enough and rounds >= limits.sharing_rounds[tile.bn]


def order(tile: Instance, m: int, n: int, batch: int, device: Device) -> tuple[int, int]:
    """Return the tiles in a column of the order in which they are taken, and the blocks of the grid (0: all).

    A round then covers about a square of C.

    >>> from gemmery.cuda.device import KNOWN
    >>> order(INSTANCES[0], 8192, 8192, 1, KNOWN["h200"])
    (16, 128)
    >>> pairs = Instance(128, 224, 4, 2, 1)
    >>> order(pairs, 2600, 2600, 1, KNOWN["h200"])  # 11 x 12 pairs of blocks: two rounds of 66, and of 64 three
    (6, 0)
    """
    if is_swapped(tile.bm):
        tile, m, n = cost.exchanged(tile), n, m
    limits, sms, rows, columns = card(device), device.sms, -(-m // tile.bm), -(-n // tile.bn)
    tiles = -(-rows // tile.cm) * tile.cm * -(-columns // tile.cn) * tile.cn * batch
    side = (sms * tile.bn / tile.bm) ** 0.5
    most = next(band for least, band in limits.bands if side >= least)
    most = limits.narrow_band if tiles > limits.many_rounds * sms else most
    clusters = max(1, -(-rows // tile.cm))  # on top of each other
    band = -(-clusters // -(-clusters * tile.cm // most))  # of equal bands: 3000 squared gains 0.7 %
    return band, cost.grid(tiles, sms)


def complete(config: Config, choices: Mapping[str, int]) -> dict[str, int]:
    """Return the config with every 0 replaced by the choice for its key, if there is one.

    >>> complete({"bm": 0, "bn": 64, "blocks": 0}, {"bm": 128, "bn": 128})
    {'bm': 128, 'bn': 64, 'blocks': 0}
    """
    return {key: value or choices.get(key, 0) for key, value in config.items()}
