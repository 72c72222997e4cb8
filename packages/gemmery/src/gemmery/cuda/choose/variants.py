"""The variant of the kernel for weights of few bits: the one that costs least by a model of its time."""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from gemmery.cuda.choose.data import QUANTIZED, QuantizedCosts, QuantizedTile, quantized_costs
from gemmery.cuda.device import Device
from gemmery.problem import Config, Problem

if TYPE_CHECKING:
    from gemmery.cuda.weights import Format

_STEP, _PART, _LINE = 128, 64, 144  # of k, rows of a chunk, bytes of a token's results of a chunk in shared memory
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
    crowded = form.kind in ("e4m3", "e2m1") or form.group in (16, 32) or problem.epilogue.endswith(("gelu", "silu"))
    rows, invariant = problem.m, problem.invariant
    if problem.groups:  # as one W of all groups' rows; most of these have fewer tokens than two deviations more
        mean = -(-problem.m // problem.groups)
        rows, form = min(problem.m, mean + int(2 * mean**0.5)), form._replace(n=form.n * problem.groups)
    choice = dict(_best(rows, form, device, invariant, crowded, tuple(part.items())))
    if problem.groups:
        choice |= {"splits": 1, "runs": 0}  # the device decides
        if choice["resident"] == 2 and not invariant:
            choice["ways"] = 1  # a block has many tiles: twice the rows for each end of one
    while problem.groups and choice["stages"] > 2 * choice["ways"]:  # room for where groups end
        tile = QuantizedTile(*(choice[name] for name in QuantizedTile._fields))
        results = tile.warpgroups // tile.ways * tile.blocks * tile.tokens * _LINE
        if shared_bytes(form, tile, tile.stages)[0] + results + 8 * problem.groups + 8 <= most_shared(tile.resident):
            break
        choice["stages"] -= choice["ways"]
    return choice


@lru_cache(maxsize=4096)
def _best(
    m: int, form: Format, device: Device, invariant: bool, crowded: bool, part: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, int], ...]:
    """Return the values; a `crowded` kernel spills where it has 128 sums for each thread."""
    tiles = [tile for tile in QUANTIZED if all(getattr(tile, key, value) == value for key, value in part)] or QUANTIZED
    roomy = [tile for tile in tiles if tile.tokens * tile.blocks < 224 or not crowded]
    pairs = [(tile, splits) for tile in roomy for splits in (0, 1, 2, 4, 8)]
    pairs = [(tile, splits) for tile, splits in pairs if suits(m, form, tile, splits, device, invariant)]
    costs = quantized_costs(device)
    tile, splits = min(pairs or [(tiles[0], 1)], key=lambda pair: cycles(m, form, pair[0], pair[1], device, costs))
    names = dict(zip(QuantizedTile._fields, tile, strict=True))
    names |= {"stages": stages(form, tile), "splits": splits or 1, "runs": 0 if splits else device.sms}
    return tuple(names.items())


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


def shared_bytes(form: Format, tile: QuantizedTile, depth: int) -> tuple[int, int]:
    """Return the bytes of shared memory of a block with so many stages, and those of them that results may take."""
    parts = tile.warpgroups // tile.ways * tile.blocks
    ring = depth * (tile.tokens * _STEP * 2 + parts * form.chunk) + (tile.ways - 1) * parts * tile.tokens * _PART * 4
    return ring + 16 * depth + 4 * tile.warpgroups, ring


def most_shared(resident: int) -> int:
    """Return the bytes of shared memory of each of so many blocks of a multiprocessor."""
    return _WHOLE // resident - _BLOCK


def stages(form: Format, tile: QuantizedTile) -> int:
    """Return the stages of a tile that fit; 0 if there are too few."""
    depth, parts = tile.stages, tile.warpgroups // tile.ways * tile.blocks
    while depth >= 2 * tile.ways and shared_bytes(form, tile, depth)[0] > most_shared(tile.resident):
        depth -= tile.ways
    if depth < 2 * tile.ways or parts * tile.tokens * _LINE > shared_bytes(form, tile, depth)[1]:
        return 0
    return depth


def suits(m: int, form: Format, tile: QuantizedTile, splits: int, device: Device, invariant: bool) -> bool:
    """Return True for variants that the model compares for a product.

    With `invariant` they add in one order whatever m is: consumers take turns in pairs, and n and k say how many blocks
    share the k of a tile.
    """
    if not stages(form, tile):
        return False
    tiles, steps = _tiles(m, form, tile), form.places[1]
    if invariant:
        return tile.ways == 2 and splits == _fixed_splits(form, device)
    if tile.tokens < min(m, 48) or (tile.tokens >= 2 * m and tile.tokens > 8):
        return False
    if splits == 0:
        return tiles > device.sms
    return splits == 1 or (splits <= steps and tiles * splits <= device.sms * tile.resident)


def _fixed_splits(form: Format, device: Device) -> int:
    """Return the blocks that share the k of a tile of 128 rows and up to 64 tokens, whatever the tokens are."""
    tiles, steps = -(-form.n // 128), form.places[1]
    return max(s for s in (1, 2, 4, 8) if s == 1 or (tiles * s <= device.sms and s * 4 <= steps))


def _tiles(m: int, form: Format, tile: QuantizedTile) -> int:
    rows = _PART * tile.warpgroups // tile.ways * tile.blocks
    return -(-form.n // rows) * -(-m // tile.tokens)


def cycles(m: int, form: Format, tile: QuantizedTile, splits: int, device: Device, costs: QuantizedCosts) -> float:
    """Return the cycles of a product: what takes longest in a step, over the rounds of blocks, and the ends.

    A step waits for the bytes of W from memory, for those of W and tokens from L2, for tensor cores, for the issue of
    instructions, for the turn of one consumer, for the thread that asks for it, or for what it asked for a ring ago.
    """
    parts, steps = tile.warpgroups // tile.ways * tile.blocks, form.places[1]
    tiles, slots = _tiles(m, form, tile), device.sms * tile.resident
    rounds = -(-tiles * splits // slots) if splits else 1
    at_once = tiles * splits / rounds if splits else slots
    beside = -(-int(at_once) // device.sms)  # blocks of a multiprocessor
    w_bytes, x_bytes = parts * form.chunk, tile.tokens * _STEP * 2
    step = max(
        w_bytes * at_once / costs.memory,
        (w_bytes + x_bytes) * at_once / costs.l2,
        beside * parts * 8 * (max(tile.tokens, 16) / 2 + costs.product),
        beside * parts * costs.issue,
        costs.turn / tile.ways,
        costs.bring,
        costs.latency / stages(form, tile),
    )
    total = rounds * (steps / splits * step + costs.end) if splits else tiles * steps / slots * step * costs.cut
    total += costs.start[tile.resident - 1] + (0 if splits else costs.end)
    if splits != 1:
        total += costs.split + parts * _PART * tile.tokens * 8 / costs.exchange
    return total
