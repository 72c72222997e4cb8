"""The variants of the kernel for weights of few bits, what they cost on a card, and the one that costs least."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

from gemmery.cuda.choose.data import FAST_MEMORY
from gemmery.cuda.device import Device
from gemmery.problem import Config, Problem
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from gemmery.cuda.weights import Format


class QuantizedTile(NamedTuple):
    """A variant of the kernel for weights of few bits; `stages` are the most that it may have."""

    tokens: int
    warpgroups: int  # that multiply
    blocks: int  # of 64 rows of W of each
    ways: int  # warpgroups that share rows, and take the steps of k in turn
    stages: int
    resident: int  # blocks on a multiprocessor


# Six warpgroups in three ways, clusters, and two blocks of 64 rows of a warpgroup, gained nothing
# (docs/findings/quantized_products.md).
QUANTIZED = (
    *(QuantizedTile(tokens, 4, 1, 4, 24, 1) for tokens in (8, 16, 24, 32, 48, 56, 64, 72)),  # 80 spill
    *(QuantizedTile(tokens, 4, 1, 2, 8, 1) for tokens in (8, 16, 24, 32, 48, 56, 64, 72, 80, 96)),
    *(QuantizedTile(tokens, 4, 1, 1, 8, 1) for tokens in (8, 16, 24, 32, 48, 64, 72, 80, 96)),
    *(QuantizedTile(tokens, 3, 1, 1, 8, 1) for tokens in range(72, 129, 8)),  # where 128 and 256 rows leave a round
    *(QuantizedTile(tokens, 2, 1, 2, 8, 2) for tokens in (8, 16, 24, 32)),
    *(QuantizedTile(tokens, 2, 1, 1, 8, 1) for tokens in (64, *range(80, 161, 8), 176, 192, 208, 256)),
)


GROUPED = (16, 24, 32, 48, 64, 80, 96)  # tokens of tiles of groups that have a W each, by four warpgroups


class QuantizedCosts(NamedTuple):
    """The model of these variants for one card, in cycles of a multiprocessor at 1.75 GHz and bytes in one of them all.

    Fitted to times of 438 products on an H200, `tiles`, `hard`, `fit` and `losers` in
    benchmarks/tuning/quantized-nvidia-h200.jsonl: the choice takes at most 5 % longer than the fastest for 95 %, and
    0.7 % longer on average.
    """

    memory: float = 2940  # bytes
    anew: float = 1.204  # times the bytes of W, where blocks are at other places of k
    l2: float = 5870
    product: float = 16.8  # more than half a cycle for each token, of wgmma with A in registers beside unpacking
    issue: float = 216  # of a chunk
    harder: float = 1.02  # times that, of formats with more instructions than those of 4 bits in bf16
    turn: float = 201  # of one consumer, for a step
    bring: float = 312  # of the thread that asks for a step
    free: float = 0.574  # of that, for the steps of the first ring
    latency: float = 2650  # from there until it has come
    # Stages of a ring that wait to be handed back, where no consumers take turns: of a free choice, and in an order.
    pending: tuple[float, float] = (2, 1)
    ahead: float = 0.246  # of the first ring's steps, which come while the launch before ends
    start: tuple[float, float] = (0, 600)  # of a launch, by blocks on a multiprocessor
    end: float = 3540  # of a block
    next: float = 481  # from a tile of a block to its next one
    store: float = 15.1  # bytes of results in a cycle
    cut: float = 5920  # of a block with parts of two tiles, beside one
    split: float = 603  # waiting for the blocks that share a tile
    part: float = 415  # of each of their parts
    exchange: float = 19.5  # bytes in a cycle of the sums that they write and read
    inside: float = 400  # the same of those that wait in shared memory, in one block
    # Rows and k from and up to which it takes less time to expand the weight first: 8192 rows by 14336 x 4096 take 1640
    # us by this kernel, 1510 by cuBLAS, and 41 to expand. With k = 28672 this kernel is the faster one.
    expanded_rows: int = 4096
    expanded_depth: int = 8192


_H200_QUANTIZED = QuantizedCosts()
_H100_QUANTIZED = QuantizedCosts(memory=1820)  # 0.7 of the bytes in a second; not timed


def quantized_costs(device: Device) -> QuantizedCosts:
    """Return the costs for a device: those of the card whose memory is most like its own."""
    return _H200_QUANTIZED if device.bandwidth > FAST_MEMORY else _H100_QUANTIZED


_CUT = 8  # steps that take as long as to add up the parts of a tile
_STEP, _PART, _LINE = 128, 64, 144  # of k, rows of a chunk, bytes of a token's results of a chunk in shared memory
_BRIEF = 40  # steps
_FEWEST, _BOTH_WAYS = 8, 48  # tokens of a group, up to which the model chooses, and two ways have few tiles
_FEW = 80  # tokens
_ALONE = {2: 152, 3: 104}  # most tokens whose sums each of so many consumers can hold twice
_MANY = (1, 16, 32, 64, 128, 256, 512)  # tokens
_WHOLE, _BLOCK = 233_472, 1024  # bytes of shared memory of a multiprocessor, and what each block takes beside its own


def variant_of(problem: Problem, form: Format, device: Device, part: Config = MappingProxyType({})) -> dict[str, int]:
    """Return the variant for a product, by the names of its parameters; of those that are as `part`, if there are any.

    >>> from gemmery.cuda.device import KNOWN
    >>> from gemmery.cuda.weights import Format
    >>> product = Problem(64, 8192, 28672, "bf16", "bf16", levels="int4", group=128)
    >>> variant = variant_of(product, Format(8192, 28672, "int4", 128, "bf16"), KNOWN["h200"])
    >>> variant["tokens"], variant["ways"], variant["splits"]
    (64, 2, 2)
    """
    rows = problem.m
    if problem.groups:  # as one W of all groups' rows; most of these have fewer tokens than two deviations more
        mean = -(-problem.m // problem.groups)
        rows, form = min(problem.m, mean + int(2 * mean**0.5)), form._replace(n=form.n * problem.groups)
    tight = problem.groups > 0 or problem.epilogue.endswith(("gelu", "silu"))
    order = _order(form, device) if problem.invariant else ()
    order = (order[0], 1) if order and problem.groups else order  # no blocks share the k of a group
    choice = dict(_best(rows, form, device, order, tight, tuple(part.items()))[1])
    if problem.groups:
        choice |= {"splits": 1, "runs": 0}  # the device decides
        # A product is as wide as a group is long, so a wide tile costs room alone. Where tiles of 256 rows would leave
        # multiprocessors idle, those of 128: 8 experts of 2048 x 7168 with 16 tokens each take 21.5 us, not 29.0.
        many = form.n > 256 * device.sms
        tokens = min((each for each in GROUPED if each >= rows), default=0)
        tile = QuantizedTile(tokens, 4, 1, 1 if many else 2, 8, 1)
        if not many and tokens > _BOTH_WAYS:
            tile = QuantizedTile(GROUPED[-1], 2, 1, 1, 8, 1)
        if tokens and rows > _FEWEST and not (order or part) and stages(form, tile, True):
            choice |= {**tile._asdict(), "stages": stages(form, tile, True)}
        elif choice["resident"] == 2 and many and not order:
            choice["ways"] = 1  # a block has many tiles: twice the rows for each end of one
    while problem.groups and choice["stages"] > 2 * choice["ways"]:  # room for where groups end
        tile = QuantizedTile(*(choice[name] for name in QuantizedTile._fields))
        if shared_bytes(form, tile, tile.stages, True) + 8 * problem.groups + 8 <= most_shared(tile.resident):
            break
        choice["stages"] -= choice["ways"]
    return choice


@lru_cache(maxsize=4096)
def _best(
    m: int, form: Format, device: Device, order: tuple[int, ...], tight: bool, part: tuple[tuple[str, int], ...]
) -> tuple[float, tuple[tuple[str, int], ...]]:
    """Return the cycles and the values; `tight`: the kernel needs more registers than others."""
    tiles = [tile for tile in QUANTIZED if all(getattr(tile, key, value) == value for key, value in part)] or QUANTIZED
    pairs = [(tile, splits) for tile in tiles if not (tight and _spills(tile)) for splits in (0, 1, 2, 4, 8)]
    pairs = [(tile, splits) for tile, splits in pairs if suits(m, form, tile, splits, device, order)]
    costs, ways, parts = quantized_costs(device), *(order or (1, 1))
    each = [(cycles(m, form, *pair, device, costs, order), pair) for pair in pairs or [(tiles[0], parts)]]
    least, (tile, splits) = min(each, key=lambda pair: pair[0])
    names = dict(zip(QuantizedTile._fields, tile, strict=True))
    shares = _shares(splits, order)
    names |= {"stages": stages(form, tile, not splits, shares > 1), "splits": splits or 1, "shares": shares}
    names["runs"] = 0 if splits else device.sms * tile.resident
    names["turns"] = ways if tile.ways == 1 else 1
    return least if pairs else inf, tuple(names.items())


def expands(m: int, form: Format, device: Device) -> bool:
    """Return True if a product of the expanded weight takes less time, expansion included.

    >>> from gemmery.cuda.device import KNOWN
    >>> from gemmery.cuda.weights import Format
    >>> form = Format(14336, 4096, "int4", 128, "bf16")
    >>> expands(2048, form, KNOWN["h200"]), expands(8192, form, KNOWN["h200"])
    (False, True)
    """
    costs = quantized_costs(device)
    return m >= costs.expanded_rows and form.k <= costs.expanded_depth


def shared_bytes(form: Format, tile: QuantizedTile, depth: int, stays: bool, keeps: bool = False) -> int:
    """Return the bytes of shared memory of a block with so many stages.

    Results, and what ways exchange, have their own if it `stays`; so have sums of a part of k that it `keeps`.
    """
    parts = tile.warpgroups // tile.ways * tile.blocks
    sums = parts * tile.tokens * _PART * 4
    ring = depth * (tile.tokens * _STEP * 2 + parts * form.chunk) + keeps * sums
    ends = parts * tile.tokens * _LINE + (tile.ways - 1) * sums
    return (ring + ends if stays else max(ring, ends)) + 16 * depth + 4 * (parts // tile.blocks)


def most_shared(resident: int) -> int:
    """Return the bytes of shared memory of each of so many blocks of a multiprocessor."""
    return _WHOLE // resident - _BLOCK


def stages(form: Format, tile: QuantizedTile, stays: bool = False, keeps: bool = False) -> int:
    """Return the stages of a tile that fit; 0 if there are too few."""
    depth = tile.stages
    least = max(2 * tile.ways, 3)
    while depth >= least and shared_bytes(form, tile, depth, stays, keeps) > most_shared(tile.resident):
        depth -= tile.ways
    return depth if depth >= least else 0


def tiles_cut(tiles: int, steps: int, blocks: int) -> int:
    """Return how many of the tiles that so many blocks have in turn they cut into equal runs of steps.

    None where that takes longer than the rest of a round; where many blocks would share a tile, a round more.
    """
    rest = tiles % blocks
    if tiles > blocks and (blocks - rest) * steps < blocks * _CUT:
        return 0
    return rest + blocks if tiles > blocks and 0 < 3 * rest < blocks else rest


def suits(m: int, form: Format, tile: QuantizedTile, splits: int, device: Device, order: tuple[int, ...] = ()) -> bool:
    """Return True for variants that the model compares for a product.

    With an `order` they add in one whatever m is: it says how many parts of k are summed alone, by a consumer each or
    by one after the other, and in how many blocks.
    """
    spills = _spills(tile) or (tile.resident == 2 and tile.tokens == 16)  # the latter with zero points and NVFP4
    if not stages(form, tile, not splits, _shares(splits, order) > 1) or (splits == 0 and spills):
        return False
    tiles, steps = _tiles(m, form, tile), form.places[1]
    if tile.tokens < min(m, 32 if m <= 64 else 48) or (tile.tokens >= 2 * m and tile.tokens > 8):
        return False
    # 64 tokens for 64 rows of W bring 16 KB of x for each 4 KB: 10 % slower with 72 steps or parts of k; with 13 steps
    # 960 x 1664 by 107 tokens takes 4.8 us, not 6.3.
    if tile.ways == 4 and tile.tokens > 32 and (splits != 1 or steps > _BRIEF):
        return False
    if order:
        ways, parts = order
        alone = tile.ways == 1 and tile.tokens <= _ALONE.get(tile.warpgroups, 0)
        if not (tile.ways == ways or alone) or 2 * ways * parts > max(steps, 2 * ways):
            return False
        shares = _shares(splits, order)  # by a block: one part, or a pair of two or four
        stays = tiles > device.sms and tile.tokens >= _FEW
        pair = shares == 2 and parts <= 4 and tile.ways == 1
        return (shares == 1 or pair) and splits <= parts and (splits > 0 or stays)
    if tile.ways == 1 and tile.warpgroups == 2 and tile.tokens < _FEW:  # only timed with an order
        return False
    if splits == 0:
        return tiles > device.sms
    if splits > 1 and tile.ways == 4 and 4 * tiles > device.sms:
        return False
    if 2 * tile.ways * splits > max(steps, 2):
        return False
    return splits == 1 or tiles * splits <= device.sms * tile.resident


def _shares(splits: int, order: tuple[int, ...]) -> int:
    """Return how many of the parts of k that an order has a block has."""
    return order[1] // max(splits, 1) if order else 1


def _spills(tile: QuantizedTile) -> bool:
    """Return True for a tile whose kernel spills where it needs more registers, as of blocks with many tiles."""
    if tile.warpgroups == 4:
        return tile.tokens >= {1: 64, 2: 56, 4: 32}[tile.ways]
    return tile.tokens == 256 or (tile.resident, tile.tokens) == (2, 32)


@lru_cache(maxsize=1024)
def _order(form: Format, device: Device) -> tuple[int, int]:
    """Return the parts of k that consumers sum and the blocks that share a tile, whatever the tokens are.

    Of all, those that cost least beside a free choice, on average over numbers of tokens.
    """

    def loss(order: tuple[int, int]) -> float:
        return sum(
            _best(m, form, device, order, False, ())[0] / _best(m, form, device, (), False, ())[0] for m in _MANY
        )

    return min(product((1, 2, 4), (1, 2, 4, 8)), key=loss)


def _tiles(m: int, form: Format, tile: QuantizedTile) -> int:
    rows = _PART * tile.warpgroups // tile.ways * tile.blocks
    return -(-form.n // rows) * -(-m // tile.tokens)


def cycles(
    m: int,
    form: Format,
    tile: QuantizedTile,
    splits: int,
    device: Device,
    costs: QuantizedCosts,
    order: tuple[int, ...] = (),
) -> float:
    """Return the cycles of a product: what takes longest in a step, over the steps of a block, and the ends of tiles.

    A step waits for the bytes of W from memory, for those of W and tokens from L2, for tensor cores, for the issue of
    instructions, for the turn of one consumer, for the thread that asks for it, or for what it asked for a ring ago.
    """
    parts, steps = tile.warpgroups // tile.ways * tile.blocks, form.places[1]
    tiles, slots, across = _tiles(m, form, tile), device.sms * tile.resident, -(-m // tile.tokens)
    cut = 0 if splits or order else tiles_cut(tiles, steps, slots)
    rounds = -(-tiles * splits // slots) if splits else -(-(tiles - cut) // slots)  # of whole tiles
    at_once = min(tiles * splits, slots) if splits else slots
    beside = -(-at_once // device.sms)  # blocks of a multiprocessor
    w_bytes, x_bytes = parts * form.chunk, tile.tokens * _STEP * 2
    own = rounds * steps / splits if splits else rounds * steps + cut * steps / slots
    shares = _shares(splits, order)
    depth, store = stages(form, tile, not splits, shares > 1), parts * _PART * tile.tokens * 2 / costs.store
    first = min(depth, own)
    hard = (form.kind, form.dtype) not in (("int4", "bf16"), ("int4_close", "f16")) or form.group in (16, 32)
    pending = costs.pending[bool(order)] if tile.ways == 1 else 0
    step = max(
        w_bytes * at_once / costs.memory * (costs.anew if cut else 1 / across),
        (w_bytes + x_bytes) * at_once / costs.l2,
        beside * parts * 8 * (max(tile.tokens, 16) / 2 + costs.product),
        beside * parts * costs.issue * (costs.harder if hard else 1),
        costs.turn / tile.ways,
        costs.bring * (1 - costs.free * first / own),
        costs.latency / (depth - pending),
    )
    total = (own - costs.ahead * first) * step + costs.start[tile.resident - 1] + costs.end + store
    total += (rounds - 1 + (cut > 0)) * (store + (costs.end if splits else costs.next)) + (cut > 0) * costs.cut
    total += rounds * (shares - 1) * parts * _PART * tile.tokens * 8 / costs.inside
    if splits > 1 or cut:
        total += costs.split + costs.part * max(splits, 2) + parts * _PART * tile.tokens * 8 / costs.exchange
    return total
