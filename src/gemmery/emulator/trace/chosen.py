"""Choose the accesses and branches of a trace for pictures: the costliest, or those of a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemmery import banks
from gemmery.emulator.counters.counts import Frames
from gemmery.emulator.trace import Divergence, TileLayout, Trace, WarpAccess
from gemmery.errors import ArgumentError

LOADS = ("ld", "ldmatrix")
MOST_OF_LINE = 6  # pictures of each kind


Steps = Mapping[str, tuple[int, int]]  # strides of arrays in global memory, in bytes: between rows, and between columns


@dataclass(frozen=True)
class Chosen:
    """The accesses, tiles and branches that are shown."""

    shared: tuple[WarpAccess, ...] = ()
    tiles: tuple[TileLayout, ...] = ()
    global_: tuple[WarpAccess, ...] = ()
    divergences: tuple[Divergence, ...] = ()
    untraced: tuple[str, ...] = ()  # operands without a known tile, although shared memory is written and read


def chosen(trace: Trace, steps: Steps, line: str = "") -> Chosen:
    """Choose the loads and stores with the most bank conflicts and the most wasted sectors, the tiles, and the branch
    with the most idle lanes.

    `steps` names the operands whose tiles are shown. `line`, such as "simt_smem.cu:18", selects all accesses and
    branches of this line, also where it is inlined.

    Raises ArgumentError for a line without an access or a divergent branch; the message lists the lines with one.
    """
    shared = [_worst(warps, _conflicts) for (_, _, space), warps in trace.accesses.items() if space == "shared"]
    global_ = [_worst(warps, _in_vain) for (_, _, space), warps in trace.accesses.items() if space == "global"]
    parted = list(trace.divergences.values())
    tiles = _tiles(trace, steps)
    if not line:
        return Chosen(
            _of_each(shared, _conflicts, loads=1),
            tiles,
            _of_each(global_, _in_vain, loads=2),
            tuple(sorted(parted, key=_idle, reverse=True)[:1]),
            _untraced(shared, tiles, steps),
        )
    found = Chosen(
        _costliest((one for one in shared if _is_at(one, line)), _conflicts, MOST_OF_LINE),
        tuple(tile for tile in tiles if any(_is_at(one, line) for one in (tile.store, tile.load))),
        _costliest((one for one in global_ if _is_at(one, line)), _in_vain, MOST_OF_LINE),
        tuple(one for one in parted if _is_at(one, line)),
    )
    if found == Chosen():
        raise ArgumentError(f"line {line!r}: it has no memory access and no divergent branch; {_known(trace, line)}")
    return found


def _known(trace: Trace, line: str) -> str:
    """List the lines of the same file that can be shown, or else those of the kernels' files."""
    found: tuple[WarpAccess | Divergence, ...]
    found = (*(warps[0] for warps in trace.accesses.values()), *trace.divergences.values())
    file = line.rpartition(":")[0]
    within = {place for one in found for place in _frames(one) if place.file == file}
    places = sorted(within or {one.line for one in found}, key=lambda place: (place.file, place.number))
    return f"lines that have: {', '.join(map(str, places))}" if places else "no line has"


def served(access: WarpAccess) -> banks.Served:
    """Return the cost of an access to shared memory."""
    return banks.served(*_arrays(access), access.width, access.kind)


def moved(access: WarpAccess) -> banks.Moved:
    """Return the cost of an access to global memory."""
    return banks.moved(*_arrays(access), access.width)


def _arrays(access: WarpAccess) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    active = np.array([[address is not None for address in access.addresses]])
    addresses = np.array([[address or 0 for address in access.addresses]])
    return addresses, None if active.all() else active


def _conflicts(access: WarpAccess) -> tuple[int, ...]:
    found = served(access)
    return found.conflicts, found.wavefronts


def _in_vain(access: WarpAccess) -> tuple[int, ...]:
    found = moved(access)
    return found.sectors - -(-found.used // banks.SECTOR), found.sectors


def _idle(found: Divergence) -> int:
    return sum(stretch.instructions * stretch.lanes.count(False) for stretch in found.stretches)


def _is_at(one: WarpAccess | Divergence | None, line: str) -> bool:
    return one is not None and line in map(str, _frames(one))


def _frames(one: WarpAccess | Divergence) -> Frames:
    return one.frames or (one.line,)


def _worst(warps: Sequence[WarpAccess], cost: Callable[[WarpAccess], tuple[int, ...]]) -> WarpAccess:
    """Return the costliest warp, the first of equals; warps with the same pattern are examined once."""
    return max({_pattern(one): one for one in reversed(warps)}.values(), key=lambda one: (cost(one), -one.warp))


def _pattern(access: WarpAccess) -> tuple[int | None, ...]:
    """Return the addresses of the lanes relative to each other and to the banks."""
    start = min(address for address in access.addresses if address is not None) // 128 * 128
    return tuple(None if address is None else address - start for address in access.addresses)


def _of_each(
    accesses: Sequence[WarpAccess], cost: Callable[[WarpAccess], tuple[int, ...]], loads: int
) -> tuple[WarpAccess, ...]:
    """Return the costliest loads and the costliest store."""
    reading, writing = (lambda one: one.kind in LOADS), (lambda one: one.kind not in LOADS)
    return (*_costliest(filter(reading, accesses), cost, loads), *_costliest(filter(writing, accesses), cost, 1))


def _costliest(
    accesses: Iterable[WarpAccess], cost: Callable[[WarpAccess], tuple[int, ...]], most: int
) -> tuple[WarpAccess, ...]:
    """Return the costliest accesses; of those with the same pattern the first."""
    found: dict[object, WarpAccess] = {}
    for one in sorted(accesses, key=cost, reverse=True):
        found.setdefault((_frames(one), one.opcode, _pattern(one)), one)
    return tuple(found.values())[:most]


def _tiles(trace: Trace, steps: Steps) -> tuple[TileLayout, ...]:
    """Return the tile of each operand in each launch, with its first store and the first load from it."""
    found = []
    for launch in sorted({launch for launch, _ in trace.sources}):
        shared = [
            _worst(warps, _conflicts)
            for (number, _, space), warps in trace.accesses.items()
            if (number, space) == (launch, "shared")
        ]
        for name, (down, across) in steps.items():
            lies = trace.arrays[name]
            held = {
                at: element(of - lies.start, down, across)
                for (number, at), of in trace.sources.items()
                if number == launch and of in lies
            }
            touching = [one for one in shared if any(address in held for address in one.addresses)]
            store = next((one for one in touching if one.kind in ("st", "cp.async")), None)
            load = next((one for one in touching if one.kind in LOADS), None)
            if store and load:
                found.append(TileLayout(name, held, store, load))
    return tuple(found)


def _untraced(shared: Sequence[WarpAccess], tiles: Sequence[TileLayout], steps: Steps) -> tuple[str, ...]:
    """Return the operands if none has a known tile, although shared memory is written and read."""
    kinds = {one.kind in LOADS for one in shared}
    return tuple(steps) if len(kinds) == 2 and not tiles else ()


def element(away: int, down: int, across: int) -> tuple[int, int]:
    """Return the row and the column of the element `away` bytes after the first.

    >>> element(256 + 8, down=256, across=4)
    (1, 2)
    """
    if down >= across:
        return away // down, away % down // across
    return away % across // down, away // across
