"""What the accesses of warps cost a GPU's memory: sectors of global memory, wavefronts of shared memory.

The rules are those that Nsight Compute's counters follow on an H200, each found by measuring warps one at a time:
`tests/data/memory_patterns_h200.jsonl` holds patterns with their counters. Shared memory has 32 banks of 4 bytes; a
wavefront takes from each bank one word, for as many lanes as want it.

All functions take `addresses` in bytes, integers (warps, 32), each a multiple of `width`, the bytes a lane moves; and
`active`, booleans of that shape, or None for all lanes. What they return is the sum over the warps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LANES = 32  # of a warp
BANKS, BANK = 32, 4  # of shared memory; bytes of one
SECTOR = 32  # bytes
ROWS = 8  # of a matrix that ldmatrix and stmatrix move, 16 bytes each

Integers = NDArray[Any]
Active = NDArray[np.bool_] | None


class Moved(NamedTuple):
    """What accesses to global memory cost."""

    requests: int  # warps with an active lane
    sectors: int
    used: int  # bytes that at least one lane asked for


class Served(NamedTuple):
    """What accesses to shared memory cost."""

    requests: int  # warps with an active lane
    wavefronts: int
    ideal: int  # wavefronts that so many bytes need: what the profiler calls memory_l1_wavefronts_shared_ideal
    conflicts: int  # wavefronts beyond one for each group of lanes that are served together


def moved(addresses: Integers, active: Active, width: int) -> Moved:
    """Requests, sectors and bytes used by accesses to global memory.

    >>> moved(4 * np.arange(32).reshape(1, 32), None, 4)
    Moved(requests=1, sectors=4, used=128)
    """
    addresses, active = _working(addresses, active)
    if active is None:
        return Moved(len(addresses), _distinct(addresses >> 5), width * _distinct(addresses))
    filled = np.where(active, addresses, _largest(addresses, active))
    return Moved(len(filled), _distinct(filled >> 5), width * _distinct(filled))


def served(addresses: Integers, active: Active, width: int, kind: str) -> Served:
    """Requests, wavefronts and bank conflicts of accesses to shared memory.

    `kind` is "ld", "st", "atom", "red", "cp.async" (its writes), "ldmatrix" or "stmatrix". The last two move one, two
    or four matrices: `width` is 4, 8 or 16 bytes a lane, and the first 8, 16 or 32 lanes give the rows' addresses.
    A matrix whose rows are all inactive is left out, so that a width of 16 with 8 active lanes is one matrix, too.

    >>> served(8 * np.arange(32).reshape(1, 32), None, 4, "ld")  # every second bank, each asked for two words
    Served(requests=1, wavefronts=2, ideal=1, conflicts=1)
    """
    addresses, active = _working(addresses, active)
    if kind in ("ldmatrix", "stmatrix"):
        return _matrices(addresses, active, width // BANK)
    if kind in ("atom", "red"):  # one lane after the other, also where they want the same word
        plain = _together(addresses, active, width, LANES * BANK // max(width, BANK))
        wavefronts = _crowd(addresses, active, max(width, BANK))
        total = int(wavefronts.sum())
        return plain._replace(wavefronts=total, conflicts=total - int(np.count_nonzero(wavefronts)))
    element = max(width, BANK)
    lanes = LANES * BANK // element
    paired = _are_paired(addresses, active) if kind == "ld" and lanes < LANES else np.False_
    if paired.all():
        return _together(addresses, active, width, 2 * lanes)
    if not paired.any():
        return _together(addresses, active, width, lanes)
    wide = _together(addresses[paired], None if active is None else active[paired], width, 2 * lanes)
    rest = _together(addresses[~paired], None if active is None else active[~paired], width, lanes)
    return Served(*(ours + theirs for ours, theirs in zip(wide, rest, strict=True)))


def copied(addresses: Integers, sources: Integers, active: Active, fetched: Active, width: int, bypass: bool) -> Served:
    """Wavefronts of what cp.async writes: they depend on both ends, the `sources` in global memory too.

    `fetched` are the active lanes that read; the others write zeros. `bypass` is .cg, past the L1 cache. Conflicts are
    those of a store to the same addresses.

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
    if both.any():  # else whom a lane meets at one end it does not meet at the other
        wavefronts[both] = _met(_places(addresses, active, width)[both], _places(sources, fetched, width)[both])
    return plain._replace(wavefronts=int(wavefronts.sum()))


def _met(ours: Integers, theirs: Integers) -> Integers:
    """For each group of lanes the most that one of them meets at either of its two places, itself among them."""
    lanes = ours.shape[1]
    met = np.ones(ours.shape, np.uint8)
    ours, theirs = (np.tile(places.astype(np.uint8), 2) for places in (ours, theirs))
    for apart in range(1, lanes):
        others = slice(apart, apart + lanes)
        met += (ours[:, :lanes] == ours[:, others]) | (theirs[:, :lanes] == theirs[:, others])
    most: Integers = met.max(axis=1).astype(np.int64)
    return most


def _transfers(addresses: Integers, sources: Integers, fetched: NDArray[np.bool_]) -> int:
    """How often .cg writes shared memory: sectors, or halves of them, from one line to one row of all banks.

    Together go those of which the same halves are wanted, and whose place in the line differs alike from that in the
    row in its two lowest bits, counted in halves.
    """
    to, source, idle = addresses >> 4, sources >> 4, -1 - np.arange(LANES)
    fetched = fetched & (_before(np.where(fetched, to, idle)) == 0)  # where two write one place, the first lane does
    line, row, ways = source >> 3, to >> 3, (to ^ source) & 3
    readers = np.where(fetched, (source << 12) + (row << 1) + (ways & 1), idle)
    turn = _before(readers[:, ::-1])[:, ::-1]  # where two read one place, the last lane comes first
    key = (((line << 11) + row << 2) + ways << 5) + turn  # of 2^47 bytes of memory there are 2^40 lines
    halves = np.sort(np.where(fetched, (key << 4) + ((source & 4) << 1) + (to & 7), idle << 4), axis=1)
    whole = np.zeros(halves.shape, np.bool_)
    whole[:, 1:] = halves[:, 1:] ^ halves[:, :-1] == 1
    whole[:, :-1] |= whole[:, 1:]
    return _distinct((halves >> 4 << 2) + np.where(whole, 2, halves & 1)) - int(np.count_nonzero(~fetched))


def _before(values: Integers) -> Integers:
    """For each lane of a row how many before it have its value."""
    found = np.zeros(values.shape, np.int64)
    ordered = np.sort(values, axis=1)
    again = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if again.any():
        values, counted = values[again], found[again]
        for apart in range(1, LANES):
            counted[:, apart:] += values[:, apart:] == values[:, :-apart]
        found[again] = counted
    return found


def _places(addresses: Integers, active: Active, width: int) -> Integers:
    """For each 128 bytes' worth of lanes the place of each in a row of 128 bytes; idle lanes have one of their own."""
    lanes = LANES * BANK // width
    places = (addresses // width % lanes).reshape(-1, lanes)
    return places if active is None else np.where(active.reshape(-1, lanes), places, lanes + np.arange(lanes))


def _crowd(addresses: Integers, active: Active, width: int) -> Integers:
    """For each 128 bytes' worth of lanes the most that want one place of a row, equal addresses each for itself."""
    places = _places(addresses, None, width)
    rows = places + places.shape[1] * np.arange(len(places))[:, None]
    wanted = rows if active is None else rows[active.reshape(rows.shape)]
    most: Integers = np.bincount(wanted.ravel(), minlength=rows.size).reshape(rows.shape).max(axis=1)
    return most


def _together(addresses: Integers, active: Active, width: int, lanes: int) -> Served:
    """The cost where so many neighbouring lanes are served together."""
    element = max(width, BANK)
    wavefronts = _wavefronts(_elements(addresses, element), active, lanes, LANES * BANK // element)
    asking = LANES if active is None else active.sum(axis=1)
    ideal = np.minimum(wavefronts.sum(axis=1), -(-asking * width // (BANKS * BANK)))
    total = int(wavefronts.sum())
    return Served(len(addresses), total, int(ideal.sum()), total - int(np.count_nonzero(wavefronts)))


def _matrices(addresses: Integers, active: Active, matrices: int) -> Served:
    """The cost of ldmatrix and stmatrix: the rows of each matrix are served together."""
    lanes = ROWS * matrices
    rows = _elements(addresses[:, :lanes], 2 * ROWS)
    wavefronts = _wavefronts(rows, None if active is None else active[:, :lanes], ROWS, ROWS)
    total, ideal = int(wavefronts.sum()), int(np.count_nonzero(wavefronts))
    return Served(len(addresses), total, ideal, total - ideal)


def _elements(addresses: Integers, size: int) -> NDArray[np.int32]:
    """Which element of so many bytes, a power of two, lies at each address; in 4 bytes, which sort quicker than 8."""
    return (addresses >> (size.bit_length() - 1)).astype(np.int32)


def _working(addresses: Integers, active: Active) -> tuple[Integers, Active]:
    """The warps with an active lane; no mask where all lanes of those are."""
    if active is None or active.all():
        return addresses, None
    some = active.any(axis=1)
    addresses, active = addresses[some], active[some]
    return addresses, None if active.all() else active


def _are_paired(addresses: Integers, active: Active) -> NDArray[np.bool_]:
    """Warps in which every lane n agrees with lane n ^ 1, or every one with n ^ 2; an idle lane agrees with all."""
    found = np.zeros(len(addresses), np.bool_)
    for apart in (1, 2):
        first, second = _partners(addresses, apart)
        agree = first == second
        if active is not None:
            one, other = _partners(active, apart)
            agree |= ~(one & other)
        found |= agree.all(axis=(1, 2))
    return found


def _partners(lanes: NDArray[Any], apart: int) -> tuple[NDArray[Any], NDArray[Any]]:
    pairs = lanes.reshape(-1, LANES // (2 * apart), 2, apart)
    return pairs[:, :, 0], pairs[:, :, 1]


def _wavefronts(elements: Integers, active: Active, lanes: int, places: int) -> Integers:
    """Wavefronts (warps, groups): the most different elements at one of the `places` of a row of all banks."""
    shape = len(elements), elements.shape[1] // lanes
    groups = elements.reshape(-1, lanes)
    if active is not None:
        groups = np.where(active.reshape(-1, lanes), groups, _largest(groups, active.reshape(-1, lanes)))
    found = np.ones(len(groups), np.int64)
    crowded = groups.max(axis=1) - groups.min(axis=1) >= places  # else no two elements share a place
    if crowded.any():
        found[crowded] = _most_at_a_place(groups[crowded], places)
    if active is not None:
        found *= active.reshape(-1, lanes).any(axis=1)
    return found.reshape(shape)


def _most_at_a_place(groups: Integers, places: int) -> Integers:
    above = groups >> (places.bit_length() - 1)
    keys = np.sort(((groups & (places - 1)) << 24) | above, axis=1)  # of 2^31 bytes there are 2^24 rows of banks
    rows = np.arange(0, len(groups) * places, places, dtype=np.int32)[:, None]
    place = rows + (keys >> 24)
    new = np.ones(keys.shape, np.bool_)
    np.not_equal(keys[:, 1:], keys[:, :-1], out=new[:, 1:])
    counted = np.bincount(place[new], minlength=len(groups) * places)
    most: Integers = counted.reshape(-1, places).max(axis=1)
    return most


def _largest(values: Integers, active: NDArray[np.bool_]) -> Integers:
    """The largest of the active lanes of each row, as a column: what idle lanes may hold without being noticed."""
    largest: Integers = values.max(axis=1, where=active, initial=0, keepdims=True)
    return largest


def _distinct(values: Integers) -> int:
    """How many different values the rows hold, each row for itself."""
    flat = values.ravel()  # one pass over everything is quicker than many short ones
    if np.count_nonzero(flat[1:] < flat[:-1]) != np.count_nonzero(values[1:, 0] < values[:-1, -1]):
        flat = np.sort(values, axis=1).ravel()
    changes = flat[1:] != flat[:-1]
    between = changes[LANES - 1 :: LANES]
    return len(values) + int(np.count_nonzero(changes) - np.count_nonzero(between))
