"""Cut a product into parts for threads: along the batch, m and n, never along k.

One thread sums each element of C, always in the same order, so results have the same bits for every number of threads.
Each part packs its own panels: this packs more in total, but no thread ever waits for another. On the tile unit a large
B is packed once by all threads, in a job before (`launch`).
"""

from __future__ import annotations

import math

from gemmery.cpu.target import constants
from gemmery.tuples import NamedTuple

PART = 300.0  # ns to take a part and set it up
FINEST = 4  # largest number of parts per thread
# Half of a symmetric product takes less time than all of it from so many rows and so large a k on, and if k is not much
# smaller than n: both read and write all of C (Zen 3, f32, 2048 x 2048: 1.2 of the time at k = 32, 0.7 at k = 128).
HALVED, HALVED_K, HALVED_RATIO = 48, 32, 32
_HALF = 48  # columns of which those of a part of a symmetric product are a multiple
SPARE = 1.04  # accepted slowdown by finer parts: with them, a thread that is interrupted delays the others less


class Unit(NamedTuple):
    """How a kernel may be cut, and its costs. Parts are multiples of rows x columns of C.

    `step` is the ns for one step of k on rows x columns, `pack` the ns to pack one element, 0 without packing.
    If `columns` or `rows` is 0, the kernel is not cut in that direction, and `step` is for its whole extent. `each`, if
    not 0, is the ns of one multiply-add, for a kernel whose costs do not go by whole steps. `read` is the ns to load
    one element of A or B from beyond L2, where the operands of a product of a new shape lie.
    """

    rows: int
    columns: int
    step: float
    pack: float = 0.0
    wide: int = 1024  # A is packed again after this many columns
    each: float = 0.0
    read: float = 0.0
    few: int = 1  # units of columns that are read side by side for one row; half as many for two

    def of(self, m: int, n: int, threads: int) -> Unit:
        """Return the unit for m rows, which spans several units of columns if each thread still gets two.

        With one each, all wait for the slowest core (one row, 4096 x 4096, f32, 16 threads of Emerald Rapids: 429 us,
        with two 354). A single thread needs one.
        """
        few = self.few // max(m, 1)
        while few > 1 and n < few * self.columns * (2 * threads if threads > 1 else 1):
            few //= 2
        return self if few < 2 else self._replace(columns=few * self.columns, step=few * self.step, few=1)

    def work(self, m: int, n: int, k: int) -> float:
        """Return the ns of an m x n x k product on one thread, loads included if they take longer than arithmetic."""
        return max(self.cost(m, n, k), k * (m + n) * self.read)

    def cost(self, m: int, n: int, k: int) -> float:
        """Return the ns of arithmetic and packing of an m x n x k product on one thread."""
        if self.each:
            return m * n * k * self.each
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
    wakes: bool = True  # large enough to wake sleepers, even if no other product follows

    @property
    def parts(self) -> int:
        """Return the total number of parts."""
        return self.groups * self.row_parts * self.column_parts


def grid(unit: Unit | None, batch: int, m: int, n: int, k: int, threads: int) -> Grid:
    """Return the parts of a product for at most this many threads; without a unit, for one thread.

    Every thread gets at least `worth` ns of work. A large batch is cut between products; otherwise each product is cut
    so that the last thread finishes as early as possible.
    """
    if not (batch and m and n):
        return Grid(1, 0, 0, 0, 0, 0, 0)
    work = batch * unit.work(m, n, k) if unit else 0
    usual = constants()
    useful, wakes = min(threads, int(work / usual.worth)), work > usual.wakes
    if unit is None or useful <= 1:
        return Grid(1, 1, 1, 1, m, n, batch)
    if batch >= FINEST * useful:
        products = -(-batch // (FINEST * useful))
        return Grid(useful, 1, 1, -(-batch // products), m, n, products, wakes)
    choices = {
        _cut(unit, batch, m, n, useful, row_parts, count // row_parts)
        for count in {-(-finer * useful // batch) for finer in range(1, FINEST + 1)}
        for row_parts in range(1, count + 1)
        if count % row_parts == 0
    }
    durations = {cut: _duration(cut, unit, k) for cut in choices}
    limit = SPARE * min(durations.values())
    best = max(choices, key=lambda cut: (durations[cut] <= limit, cut.parts, -durations[cut]))
    return best._replace(wakes=wakes, threads=min(best.threads, best.parts))


def worth_half(n: int, k: int) -> bool:
    """Return True if half of a symmetric n x n product takes less time than all of it."""
    return n >= HALVED and k >= HALVED_K and k * HALVED_RATIO > n


def halves(n: int, threads: int) -> tuple[int, int]:
    """Return the rows and columns of a part of a symmetric product for several threads; (0, 0) for one.

    Parts begin at multiples of their columns, those above the diagonal are empty, and rows are a multiple of columns.
    Up to four threads share columns of all rows, the longest first; more have about four parts each.
    """
    if threads < 2:
        return 0, 0
    count = 1 if threads <= 4 else math.isqrt(4 * threads - 1) + 1
    columns = _share(n, _HALF, 4 * threads if count == 1 else 2 * count)
    return (n if count == 1 else 2 * columns), columns


def most_alone(unit: Unit | None, m: int, n: int) -> int:
    """Return the most m n k batch for which the arithmetic of at least m x n elements is too short for two threads."""
    if unit is None:
        return 1 << 62
    worth = 2 * constants().worth
    if unit.each:
        return int(worth / unit.each) - 1
    # The costliest sizes, per row and per column, are the least one and the first that needs another tile.
    tiles = 1.0
    for size, tile in ((m, unit.rows), (n, unit.columns)):
        ragged = size + (-size % tile) + 1 if tile else size
        tiles *= max(-(-x // tile) / x for x in (size, ragged)) if tile else 1 / size
    packed = unit.pack * (1 / m + max(1 / n, 2 / (unit.wide + 1)))
    return int(worth / (tiles * unit.step + packed)) - 1


def _cut(unit: Unit, batch: int, m: int, n: int, threads: int, row_parts: int, column_parts: int) -> Grid:
    rows, columns = _share(m, unit.rows, row_parts), _share(n, unit.columns, column_parts)
    return Grid(threads, -(-m // rows), -(-n // columns), batch, rows, columns, 1)


def _share(total: int, unit: int, parts: int) -> int:
    """Return the size of each of `parts` nearly equal parts, in whole units."""
    if not unit:
        return total
    units = -(-total // unit)
    return -(-units // parts) * unit


def _duration(cut: Grid, unit: Unit, k: int) -> float:
    """Return the ns until the last part is done, if every thread takes its next part when it finishes one."""
    rounds = -(-cut.parts // cut.threads)
    return rounds * (unit.cost(cut.rows, cut.columns, k) + PART)
