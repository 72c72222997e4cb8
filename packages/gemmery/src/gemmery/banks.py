"""The cost of the memory accesses of warps: sectors of global memory, wavefronts of shared memory.

The rules reproduce the counters of Nsight Compute on an H200, and were found by measuring single warps:
`tests/data/memory_patterns_h200.jsonl` holds patterns with their counters. Shared memory has 32 banks of 4 bytes; a
wavefront reads one word from each bank, for all lanes that access it.

All functions take `addresses` in bytes, integers (warps, 32), each a multiple of `width`, the bytes per lane; and
`active`, booleans of that shape, or None for all lanes. They return the sum over the warps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

WARP = 32  # lanes
BANKS, BANK = 32, 4  # of shared memory; bytes of one
SECTOR = 32  # bytes
ROWS = 8  # of a matrix that ldmatrix and stmatrix move, 16 bytes each

Integers = NDArray[Any]
Active = NDArray[np.bool_] | None


class Moved(NamedTuple):
    """The cost of accesses to global memory."""

    requests: int  # warps with an active lane
    sectors: int
    used: int  # bytes that at least one lane accessed


class Served(NamedTuple):
    """The cost of accesses to shared memory."""

    requests: int  # warps with an active lane
    wavefronts: int
    ideal: int  # wavefronts that so many bytes need: the profiler's memory_l1_wavefronts_shared_ideal
    conflicts: int  # wavefronts beyond one for each group of lanes served together


def moved(addresses: Integers, active: Active, width: int) -> Moved:
    """Return the requests, sectors and used bytes of accesses to global memory.

    >>> moved(4 * np.arange(32).reshape(1, 32), None, 4)
    Moved(requests=1, sectors=4, used=128)
    """
    addresses, active = _working(addresses, active)
    if active is None:
        return Moved(len(addresses), _distinct(addresses >> 5), width * _distinct(addresses))
    filled = np.where(active, addresses, _largest(addresses, active))
    return Moved(len(filled), _distinct(filled >> 5), width * _distinct(filled))


def served(addresses: Integers, active: Active, width: int, kind: str) -> Served:
    """Return the requests, wavefronts and bank conflicts of accesses to shared memory.

    `kind` is "ld", "st", "atom", "red", "cp.async" (its writes), "ldmatrix" or "stmatrix". The last two move one, two
    or four matrices: `width` is 4, 8 or 16 bytes a lane, and the first 8, 16 or 32 lanes give the rows' addresses.
    A matrix without active rows costs nothing, so that a width of 16 with 8 active lanes also means one matrix.

    >>> served(8 * np.arange(32).reshape(1, 32), None, 4, "ld")  # every second bank, two words in each
    Served(requests=1, wavefronts=2, ideal=1, conflicts=1)
    """
    addresses, active = _working(addresses, active)
    if kind in ("ldmatrix", "stmatrix"):
        return _matrices(addresses, active, width // BANK)
    if kind in ("atom", "red"):  # one lane after the other, even for the same word
        plain = _together(addresses, active, width, WARP * BANK // max(width, BANK))
        wavefronts = _crowd(addresses, active, max(width, BANK))
        total = int(wavefronts.sum())
        return plain._replace(wavefronts=total, conflicts=total - int(np.count_nonzero(wavefronts)))
    element = max(width, BANK)
    lanes = WARP * BANK // element
    paired = _are_paired(addresses, active) if kind == "ld" and lanes < WARP else np.False_
    if paired.all():
        return _together(addresses, active, width, 2 * lanes)
    if not paired.any():
        return _together(addresses, active, width, lanes)
    wide = _together(addresses[paired], None if active is None else active[paired], width, 2 * lanes)
    rest = _together(addresses[~paired], None if active is None else active[~paired], width, lanes)
    return Served(*(ours + theirs for ours, theirs in zip(wide, rest, strict=True)))


def copied(addresses: Integers, sources: Integers, active: Active, fetched: Active, width: int, bypass: bool) -> Served:
    """Return the wavefronts of the writes of cp.async, which depend on both ends, also the `sources` in global memory.

    `fetched` are the active lanes that read; the others write zeros. `bypass` is .cg, which bypasses the L1 cache.
    Conflicts are those of a store to the same addresses.

    >>> rows = np.arange(32).reshape(1, 32)
    >>> copied(16 * rows, 16 * rows, None, None, 16, bypass=True).wavefronts
    4
    >>> copied(16 * rows, 16 * rows + 1024 * (rows // 4), None, None, 16, bypass=True).wavefronts  # 64 bytes of a line
    8
    """
    everywhere = np.ones(addresses.shape, np.bool_)
    active = everywhere if active is None else active
    fetched = active if fetched is None else fetched & active
    plain = served(addresses, active, width, "st")
    if bypass:
        zeros = served(addresses, active & ~fetched, width, "st")
        return plain._replace(wavefronts=zeros.wavefronts + _transfers(addresses, sources, fetched))
    near, far = _crowd(addresses, active, width), _crowd(sources, fetched, width)
    wavefronts = np.maximum(near, far)
    both = (near > 1) & (far > 1)
    if both.any():  # else two lanes never conflict at both ends
        wavefronts[both] = _most_sharing(
            _places(addresses, active, width)[both], _places(sources, fetched, width)[both]
        )
    return plain._replace(wavefronts=int(wavefronts.sum()))


def _most_sharing(ours: Integers, theirs: Integers) -> Integers:
    """Return for each group the largest number of lanes that share one of two places with a lane, itself included."""
    lanes = ours.shape[1]
    sharing = np.ones(ours.shape, np.uint8)
    ours, theirs = (np.tile(places.astype(np.uint8), 2) for places in (ours, theirs))
    for apart in range(1, lanes):
        others = slice(apart, apart + lanes)
        sharing += (ours[:, :lanes] == ours[:, others]) | (theirs[:, :lanes] == theirs[:, others])
    most: Integers = sharing.max(axis=1).astype(np.int64)
    return most


def _transfers(addresses: Integers, sources: Integers, fetched: NDArray[np.bool_]) -> int:
    """Return the number of writes of .cg: sectors, or halves of them, from one line to one row of all banks.

    Sectors are written together if the same halves are needed, and the two lowest bits of their place in the line and
    in the row, counted in halves, differ in the same way.
    """
    to, source, idle = addresses >> 4, sources >> 4, -1 - np.arange(WARP)
    fetched = fetched & (
        _before(np.where(fetched, to, idle)) == 0
    )  # of two lanes that write one place, only the first does
    line, row, ways = source >> 3, to >> 3, (to ^ source) & 3
    readers = np.where(fetched, (source << 12) + (row << 1) + (ways & 1), idle)
    turn = _before(readers[:, ::-1])[:, ::-1]  # of two lanes that read one place, the last comes first
    key = (((line << 11) + row << 2) + ways << 5) + turn  # 2^47 bytes of memory have 2^40 lines
    halves = np.sort(np.where(fetched, (key << 4) + ((source & 4) << 1) + (to & 7), idle << 4), axis=1)
    whole = np.zeros(halves.shape, np.bool_)
    whole[:, 1:] = halves[:, 1:] ^ halves[:, :-1] == 1
    whole[:, :-1] |= whole[:, 1:]
    return _distinct((halves >> 4 << 2) + np.where(whole, 2, halves & 1)) - int(np.count_nonzero(~fetched))


def _before(values: Integers) -> Integers:
    """Return for each lane of a row the number of lanes before it with the same value."""
    counts = np.zeros(values.shape, np.int64)
    ordered = np.sort(values, axis=1)
    again = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if again.any():
        values, counted = values[again], counts[again]
        for apart in range(1, WARP):
            counted[:, apart:] += values[:, apart:] == values[:, :-apart]
        counts[again] = counted
    return counts


def _places(addresses: Integers, active: Active, width: int) -> Integers:
    """Return the place of each lane in a row of 128 bytes, in groups of 128 bytes; idle lanes get unique places."""
    lanes = WARP * BANK // width
    places = (addresses // width % lanes).reshape(-1, lanes)
    return places if active is None else np.where(active.reshape(-1, lanes), places, lanes + np.arange(lanes))


def _crowd(addresses: Integers, active: Active, width: int) -> Integers:
    """Return for each group of 128 bytes the most lanes at one place of a row, counting equal addresses separately."""
    places = _places(addresses, None, width)
    rows = places + places.shape[1] * np.arange(len(places))[:, None]
    used = rows if active is None else rows[active.reshape(rows.shape)]
    most: Integers = np.bincount(used.ravel(), minlength=rows.size).reshape(rows.shape).max(axis=1)
    return most


def _together(addresses: Integers, active: Active, width: int, lanes: int) -> Served:
    """Return the cost if groups of `lanes` adjacent lanes are served together."""
    element = max(width, BANK)
    wavefronts = _wavefronts(_elements(addresses, element), active, lanes, WARP * BANK // element)
    asking = WARP if active is None else active.sum(axis=1)
    ideal = np.minimum(wavefronts.sum(axis=1), -(-asking * width // (BANKS * BANK)))
    total = int(wavefronts.sum())
    return Served(len(addresses), total, int(ideal.sum()), total - int(np.count_nonzero(wavefronts)))


def _matrices(addresses: Integers, active: Active, matrices: int) -> Served:
    """Return the cost of ldmatrix and stmatrix: the rows of each matrix are served together."""
    lanes = ROWS * matrices
    rows = _elements(addresses[:, :lanes], 2 * ROWS)
    wavefronts = _wavefronts(rows, None if active is None else active[:, :lanes], ROWS, ROWS)
    total, ideal = int(wavefronts.sum()), int(np.count_nonzero(wavefronts))
    return Served(len(addresses), total, ideal, total - ideal)


def _elements(addresses: Integers, size: int) -> NDArray[np.int32]:
    """Return the index of the element at each address, as 4 bytes, which sort faster than 8; `size` is a power of 2."""
    return (addresses >> (size.bit_length() - 1)).astype(np.int32)


def _working(addresses: Integers, active: Active) -> tuple[Integers, Active]:
    """Return the warps with an active lane; the mask is None if all their lanes are active."""
    if active is None or active.all():
        return addresses, None
    some = active.any(axis=1)
    addresses, active = addresses[some], active[some]
    return addresses, None if active.all() else active


def _are_paired(addresses: Integers, active: Active) -> NDArray[np.bool_]:
    """Return the warps in which all lanes n and n ^ 1, or all n and n ^ 2, agree; an idle lane agrees with any."""
    paired = np.zeros(len(addresses), np.bool_)
    for apart in (1, 2):
        first, second = _partners(addresses, apart)
        agree = first == second
        if active is not None:
            mine, other = _partners(active, apart)
            agree |= ~(mine & other)
        paired |= agree.all(axis=(1, 2))
    return paired


def _partners(lanes: NDArray[Any], apart: int) -> tuple[NDArray[Any], NDArray[Any]]:
    pairs = lanes.reshape(-1, WARP // (2 * apart), 2, apart)
    return pairs[:, :, 0], pairs[:, :, 1]


def _wavefronts(elements: Integers, active: Active, lanes: int, places: int) -> Integers:
    """Return wavefronts (warps, groups): the most different elements at one of the `places` of a row of all banks."""
    shape = len(elements), elements.shape[1] // lanes
    groups = elements.reshape(-1, lanes)
    if active is not None:
        groups = np.where(active.reshape(-1, lanes), groups, _largest(groups, active.reshape(-1, lanes)))
    counts = np.ones(len(groups), np.int64)
    crowded = groups.max(axis=1) - groups.min(axis=1) >= places  # else no two elements share a place
    if crowded.any():
        counts[crowded] = _most_at_a_place(groups[crowded], places)
    if active is not None:
        counts *= active.reshape(-1, lanes).any(axis=1)
    return counts.reshape(shape)


def _most_at_a_place(groups: Integers, places: int) -> Integers:
    above = groups >> (places.bit_length() - 1)
    keys = np.sort(((groups & (places - 1)) << 24) | above, axis=1)  # 2^31 bytes have 2^24 rows of banks
    rows = np.arange(0, len(groups) * places, places, dtype=np.int32)[:, None]
    place = rows + (keys >> 24)
    new = np.ones(keys.shape, np.bool_)
    np.not_equal(keys[:, 1:], keys[:, :-1], out=new[:, 1:])
    counted = np.bincount(place[new], minlength=len(groups) * places)
    most: Integers = counted.reshape(-1, places).max(axis=1)
    return most


def _largest(values: Integers, active: NDArray[np.bool_]) -> Integers:
    """Return the largest value of the active lanes of each row, as a column: idle lanes with it change nothing."""
    largest: Integers = values.max(axis=1, where=active, initial=0, keepdims=True)
    return largest


def _distinct(values: Integers) -> int:
    """Return the number of different values in each row, summed over the rows."""
    flat = values.ravel()  # one pass over everything is faster than many short ones
    if np.count_nonzero(flat[1:] < flat[:-1]) != np.count_nonzero(values[1:, 0] < values[:-1, -1]):
        flat = np.sort(values, axis=1).ravel()
    changes = flat[1:] != flat[:-1]
    between = changes[WARP - 1 :: WARP]
    return len(values) + int(np.count_nonzero(changes) - np.count_nonzero(between))
