"""How a product is cut into parts for threads: along the batch, m and n, never along k.

Every element of C is then summed by one thread in one order, so results have the same bits for every number of
threads. A part packs what it reads for itself: that costs more packing, and no thread ever waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# ns of work that make a thread worth waking: a futex wake and the sleeper's way onto a core take 5 to 50 us, and
# where that is late, the others have done its parts.
WORTH = 8_000
WAKES = 100_000  # ns of work in all that are worth waking sleepers for a single product
PART = 300.0  # ns to take a part and set it up
FINEST = 4  # parts a thread at most
SPARE = 1.04  # what finer parts may cost: a thread that is held up then delays the rest by less


@dataclass(frozen=True)
class Unit:
    """What a kernel may be cut along, and what it costs. Parts are whole multiples of rows x columns of C.

    `step`: ns for one step of k on rows x columns; `pack`: ns to pack one element, 0 when nothing is packed.
    `columns` or `rows` of 0: not to be cut that way, and `step` is for the whole of it.
    """

    rows: int
    columns: int
    step: float
    pack: float = 0.0
    wide: int = 1024  # A is packed once for every so many columns

    def cost(self, m: int, n: int, k: int) -> float:
        """ns of an m x n x k product on one thread."""
        tiles = (-(-m // self.rows) if self.rows else 1) * (-(-n // self.columns) if self.columns else 1)
        return k * (tiles * self.step + self.pack * (m * -(-n // self.wide) + n))


class Grid(NamedTuple):
    """groups x row_parts x column_parts parts, each `rows` x `columns` of C in `products` products."""

    threads: int
    row_parts: int
    column_parts: int
    groups: int
    rows: int
    columns: int
    products: int
    wakes: bool = True  # worth waking sleepers for, even if no other product follows

    @property
    def parts(self) -> int:
        """Parts in all."""
        return self.groups * self.row_parts * self.column_parts


def grid(unit: Unit | None, batch: int, m: int, n: int, k: int, threads: int) -> Grid:
    """The parts of a product for at most so many threads; without a unit, one thread.

    As many threads work as get WORTH ns each. A large batch is cut between products; else each product is cut, so that
    the last thread is done soonest.
    """
    if not (batch and m and n):
        return Grid(1, 0, 0, 0, 0, 0, 0)
    work = batch * unit.cost(m, n, k) if unit else 0
    useful = min(threads, int(work / WORTH))
    if unit is None or useful <= 1:
        return Grid(1, 1, 1, 1, m, n, batch)
    if batch >= FINEST * useful:
        products = -(-batch // (FINEST * useful))
        return Grid(useful, 1, 1, -(-batch // products), m, n, products, work > WAKES)
    choices = {
        _cut(unit, batch, m, n, useful, row_parts, count // row_parts)
        for count in {-(-finer * useful // batch) for finer in range(1, FINEST + 1)}
        for row_parts in range(1, count + 1)
        if count % row_parts == 0
    }
    durations = {found: _duration(found, unit, k) for found in choices}
    limit = SPARE * min(durations.values())
    best = max(choices, key=lambda found: (durations[found] <= limit, found.parts, -durations[found]))
    return best._replace(wakes=work > WAKES)


def _cut(unit: Unit, batch: int, m: int, n: int, threads: int, row_parts: int, column_parts: int) -> Grid:
    rows, columns = _share(m, unit.rows, row_parts), _share(n, unit.columns, column_parts)
    return Grid(threads, -(-m // rows), -(-n // columns), batch, rows, columns, 1)


def _share(total: int, unit: int, parts: int) -> int:
    """The size of each of `parts` nearly equal parts, in whole units."""
    if not unit:
        return total
    units = -(-total // unit)
    return -(-units // parts) * unit


def _duration(found: Grid, unit: Unit, k: int) -> float:
    """ns until the last part is done: every thread takes its next part when it is through with one."""
    rounds = -(-found.parts // found.threads)
    return rounds * (unit.cost(found.rows, found.columns, k) + PART)
