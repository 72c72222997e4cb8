"""Choose the accesses and branches of a trace for pictures: the costliest, or those of a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gemmery import banks
from gemmery.errors import ArgumentError
from gemmery_emulator.counters.counts import Frames
from gemmery_emulator.findings.messages import variable_at
from gemmery_emulator.op import Flags, Indices
from gemmery_emulator.trace import Divergence, TileLayout, Trace, WarpAccess
from gemmery_emulator.trace.pipeline import CopiedTile, Timeline

LOADS = ("ld", "ldmatrix")
MOST_OF_LINE = 6  # pictures of each kind


Steps = Mapping[str, tuple[int, int]]  # strides of arrays in global memory, in bytes: between rows, and between columns


@dataclass(frozen=True)
class Selection:
    """The accesses, tiles and branches that are shown."""

    shared: tuple[WarpAccess, ...] = ()
    tiles: tuple[TileLayout, ...] = ()
    global_: tuple[WarpAccess, ...] = ()
    divergences: tuple[Divergence, ...] = ()
    untraced: tuple[str, ...] = ()  # operands without a known tile, although shared memory is written and read
    copied: tuple[CopiedTile, ...] = ()  # brought by tensor copies
    timeline: Timeline | None = None  # of a kernel with mbarriers


def select(trace: Trace, steps: Steps, line: str = "") -> Selection:
    """Choose the loads and stores with the most bank conflicts and the most wasted sectors, the tiles, and the branch
    with the most idle lanes.

    `steps` names the operands whose tiles are shown. `line`, such as "simt_smem.cu:18", selects all accesses and
    branches of this line, also where it is inlined.

    Raises ArgumentError for a line without an access or a divergent branch and for what is no text; the message lists
    the lines with one.
    """
    if not hasattr(line or "", "rpartition"):
        raise ArgumentError(f"line={line!r}: name a line with its file, such as 'kernel.cu:6'; {_known(trace, '')}")
    shared = [_worst(warps, _conflicts) for (_, _, space), warps in trace.accesses.items() if space == "shared"]
    global_ = [_worst(warps, _in_vain) for (_, _, space), warps in trace.accesses.items() if space == "global"]
    parted = list(trace.divergences.values())
    tiles = _tiles(trace, steps)
    if not line:
        return Selection(
            _of_each(shared, _conflicts, loads=1),
            tiles,
            _of_each(global_, _in_vain, loads=2),
            tuple(sorted(parted, key=_idle, reverse=True)[:1]),
            tuple(steps) if len({access.kind in LOADS for access in shared}) == 2 and not tiles else (),
        )
    selection = Selection(
        _costliest((access for access in shared if _is_at(access, line)), _conflicts, MOST_OF_LINE),
        tuple(tile for tile in tiles if any(_is_at(access, line) for access in (tile.store, tile.load))),
        _costliest((access for access in global_ if _is_at(access, line)), _in_vain, MOST_OF_LINE),
        tuple(access for access in parted if _is_at(access, line)),
    )
    if selection == Selection():
        wrong = "it has no memory access and no divergent branch" if ":" in line else "write it as FILE:LINE"
        raise ArgumentError(f"line {line!r}: {wrong}; {_known(trace, line)}")
    return selection


def _known(trace: Trace, line: str) -> str:
    """List the lines of the same file that can be shown, or else those of the kernels' files."""
    drawable: tuple[WarpAccess | Divergence, ...]
    drawable = (*(warps[0] for warps in trace.accesses.values()), *trace.divergences.values())
    file = line.rpartition(":")[0]
    within = {place for it in drawable for place in _frames(it) if place.file == file}
    places = sorted(within or {it.line for it in drawable}, key=lambda place: (place.file, place.number))
    return f"lines that have: {', '.join(map(str, places))}" if places else "no line has"


def served(access: WarpAccess) -> banks.Served:
    """Return the cost of an access to shared memory."""
    return banks.served(*_arrays(access), access.width, access.kind)


def moved(access: WarpAccess) -> banks.Moved:
    """Return the cost of an access to global memory."""
    return banks.moved(*_arrays(access), access.width)


def _arrays(access: WarpAccess) -> tuple[Indices, Flags | None]:
    active = np.array([[address is not None for address in access.addresses]])
    addresses = np.array([[address or 0 for address in access.addresses]])
    return addresses, None if active.all() else active


def _conflicts(access: WarpAccess) -> tuple[int, ...]:
    cost = served(access)
    return cost.conflicts, cost.wavefronts


def _in_vain(access: WarpAccess) -> tuple[int, ...]:
    cost = moved(access)
    return cost.sectors - -(-cost.used // banks.SECTOR), cost.sectors


def _idle(divergence: Divergence) -> int:
    return sum(stretch.instructions * stretch.lanes.count(False) for stretch in divergence.stretches)


def _is_at(access: WarpAccess | Divergence | None, line: str) -> bool:
    return access is not None and line in map(str, _frames(access))


def _frames(access: WarpAccess | Divergence) -> Frames:
    return access.frames or (access.line,)


def _worst(warps: Sequence[WarpAccess], cost: Callable[[WarpAccess], tuple[int, ...]]) -> WarpAccess:
    """Return the costliest warp, the first of equals; warps with the same pattern are examined once."""
    return max(
        {_pattern(access): access for access in reversed(warps)}.values(),
        key=lambda access: (cost(access), -access.warp),
    )


def _pattern(access: WarpAccess) -> tuple[int | None, ...]:
    """Return the addresses of the lanes relative to each other and to the banks."""
    start = min(address for address in access.addresses if address is not None) // 128 * 128
    return tuple(None if address is None else address - start for address in access.addresses)


def _of_each(
    accesses: Sequence[WarpAccess], cost: Callable[[WarpAccess], tuple[int, ...]], loads: int
) -> tuple[WarpAccess, ...]:
    """Return the costliest loads and the costliest store."""
    reading, writing = (lambda access: access.kind in LOADS), (lambda access: access.kind not in LOADS)
    return (*_costliest(filter(reading, accesses), cost, loads), *_costliest(filter(writing, accesses), cost, 1))


def _costliest(
    accesses: Iterable[WarpAccess], cost: Callable[[WarpAccess], tuple[int, ...]], most: int
) -> tuple[WarpAccess, ...]:
    """Return the costliest accesses; of those with the same pattern the first."""
    costliest: dict[object, WarpAccess] = {}
    for access in sorted(accesses, key=cost, reverse=True):
        costliest.setdefault((_frames(access), access.opcode, _pattern(access)), access)
    return tuple(costliest.values())[:most]


def _tiles(trace: Trace, steps: Steps) -> tuple[TileLayout, ...]:
    """Return the tile of each operand in each launch, with its first store and the first load from it."""
    tiles = []
    for launch in sorted({launch for launch, _ in trace.sources}):
        shared = [
            _worst(warps, _conflicts)
            for (number, _, space), warps in trace.accesses.items()
            if (number, space) == (launch, "shared")
        ]
        for name, (down, across) in steps.items():
            lies = trace.arrays[name]
            contents = {
                at: element(of - lies.start, down, across)
                for (number, at), of in trace.sources.items()
                if number == launch and of in lies
            }
            touching = [access for access in shared if any(address in contents for address in access.addresses)]
            store = next((access for access in touching if access.kind in ("st", "cp.async")), None)
            load = next((access for access in touching if access.kind in LOADS), None)
            if store and load:
                at = next(address for address in store.addresses if address is not None)
                variable, _ = variable_at(trace.kernel, "shared", at) if trace.kernel else ("", 0)
                called = f"{name}, {variable}," if name.startswith("argument") and variable else name
                tiles.append(TileLayout(called, contents, store, load))
    return tuple(tiles)


def element(away: int, down: int, across: int) -> tuple[int, int]:
    """Return the row and the column of the element `away` bytes after the first.

    >>> element(256 + 8, down=256, across=4)
    (1, 2)
    """
    if down >= across:
        return away // down, away % down // across
    return away % across // down, away // across
