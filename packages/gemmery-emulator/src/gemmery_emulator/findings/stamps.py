"""A table with a stamp for each place of global memory, which packs rows of places that follow a pattern.

A stamp has 8 bytes, or 4 while all fit in them, and there may be one for each byte of an array. But threads mostly take
places in turn: in a row of places the stamps then differ by the same steps as in many other rows. Such a row is kept as
its greatest stamp and the number of its pattern; its page of memory goes back to the system until the row is accessed
again. Irregular rows stay as they are.

The latest plain reads are in no table yet, because a write of the same threads may follow: a thread that reads places
and then writes them, as in `x[i] *= 2`, needs one stamp for both. What races with the read races with the write too.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery_emulator.findings.orders import Words
from gemmery_emulator.op import Flags

ROW = max(512, mmap.PAGESIZE // 8)  # places: a page of memory; twice as many in a narrow table
LEAST = 1 << 20  # places in use between two searches for patterns: their stamps take 8 MiB
AT_ONCE = 256  # rows that are compared together: they fit in a core's L2
EMPTY = -(1 << 62)  # in a pattern, a place that nobody accessed
RETURNS = sys.platform == "linux"  # whether the system takes single pages back and gives zeros for them


class Stamps:
    """The stamps of `size` places, zeros at first; those of a narrow table are less than 2^32."""

    def __init__(self, size: int, narrow: bool = False) -> None:
        self.size, self._narrow = size, narrow
        kind: type[np.unsignedinteger | np.signedinteger] = np.uint32 if narrow else np.int64
        self._row = 2 * ROW if narrow else ROW  # places
        self.low, self.high = size, -1  # the first and the last place that was written
        self._packs = RETURNS and size > LEAST
        if not self._packs:
            self._data = np.zeros(size, kind)
            return
        rows = -(-size // self._row)
        self._pages = mmap.mmap(-1, rows * ROW * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page stays as long as one of its rows is written out
            with contextlib.suppress(OSError):  # of a system that has none
                self._pages.madvise(mmap.MADV_NOHUGEPAGE)
        self._data = np.frombuffer(self._pages, kind)
        self._rows = self._data.reshape(rows, self._row)
        self._used, self._open, self._packed = np.zeros((3, rows), np.bool_)  # since the last search; before it
        self._top, self._pattern = np.zeros(rows, np.int64), np.zeros(rows, np.int32)
        self._searches, self._packed_in = 0, np.zeros(rows, np.int32)
        self._patterns = np.zeros((16, self._row), np.int64)
        self._numbers: dict[int, int] = {}  # of patterns, by hash
        self._most = max(rows >> 6, 8)  # patterns: they take 1/64 of what they may save
        self._since, self._interval = 0, LEAST  # places in use since the last search, and how many until the next
        self._unpacked = 0  # rows of those that the last search packed

    @property
    def data(self) -> NDArray[Any] | None:
        """All stamps; None where rows may be packed."""
        return None if self._packs else self._data

    def touches(self, low: int, high: int) -> bool:
        """Whether any place from `low` to `high` may have a stamp."""
        return self.low <= high and low <= self.high

    def at(self, places: Words, low: int, high: int) -> NDArray[Any]:
        """The table, in which these places from `low` to `high` may be read; until the next call."""
        if self._packs:
            self._write_out(places, low, high)
        return self._data

    def written_at(self, places: Words, low: int, high: int) -> NDArray[Any]:
        """The same to read and to write."""
        self.low, self.high = min(self.low, low), max(self.high, high)
        if self._packs:
            if self._since > self._interval:
                self._search()
            self._use(self._rows_of(places, low, high))
            self._write_out(places, low, high)
        return self._data

    def empty(self, low: int, high: int) -> int:
        """How many places from `low` to before `high` have no stamp."""
        count = high - low - int(np.count_nonzero(self._data[low:high]))  # the data of a packed row are zeros
        if not self._packs:
            return count
        rows = np.arange(low // self._row, -(-high // self._row))
        rows = rows[self._packed[rows]]
        inside = (rows * self._row >= low) & ((rows + 1) * self._row <= high)
        stamped = self._patterns != EMPTY
        count -= int(stamped.sum(axis=1)[self._pattern[rows[inside]]].sum())
        for row in rows[~inside].tolist():  # at most the first and the last
            begin = row * self._row
            count -= int(stamped[self._pattern[row], max(low - begin, 0) : high - begin].sum())
        return count

    def moved(self, times: int, narrow: bool) -> Stamps:
        """The same stamps in a table where each place is `times` places."""
        other = Stamps(times * self.size, narrow)
        if self.high >= 0:
            self._move(other, times)
        return other

    def _move(self, other: Stamps, times: int) -> None:
        """Move the stamps to an empty table with `times` as many places, each row to two of it."""
        other.low, other.high = times * self.low, times * self.high + times - 1
        if not self._packs:
            some = np.flatnonzero(self._data)
            for part in range(times):
                other._data[times * some + part] = self._data[some]
            if other._packs:
                other._use(times * some // other._row)
            return
        row = other._row
        for rows in _batches(np.flatnonzero(self._used | self._open | self._packed)):
            stamps = np.repeat(self._content(rows), times, axis=1)
            packed = self._packed[rows]
            self._give_back(rows)
            for part in (0, 1):
                some = 2 * rows + part
                inside = some < len(other._rows)
                other._rows[some[inside]] = stamps[inside, part * row : (part + 1) * row]
                other._use(some[inside])
                other._pack(some[inside & packed])

    def _rows_of(self, places: Words, low: int, high: int) -> slice | Words:
        """The rows of places: as a range where these are close together."""
        first, last = low // self._row, high // self._row
        close = last - first <= 1 + 4 * places.size // self._row
        return slice(first, last + 1) if close else places // self._row

    def _write_out(self, places: Words, low: int, high: int) -> None:
        """Write out what is packed of these places."""
        rows = self._rows_of(places, low, high)
        packed = self._packed[rows]
        if packed.any():
            some = rows.start + np.flatnonzero(packed) if isinstance(rows, slice) else np.unique(rows[packed])
            for batch in _batches(some):
                self._rows[batch] = self._content(batch)
            self._packed[some] = False
            self._use(some)
            self._unpacked += int(np.count_nonzero(self._packed_in[some] == self._searches - 1))

    def _use(self, rows: slice | Words) -> None:
        """Rows are in use until the next search."""
        used = self._used[rows]
        self._since += self._row * int(used.size - np.count_nonzero(used))
        self._used[rows] = True

    def _search(self) -> None:
        """Pack the rows that have a pattern: full ones, and those that nobody wrote to since the last search."""
        examined = np.flatnonzero(self._used | self._open)
        packed = sum(self._pack(rows, self._used[rows]) for rows in _batches(examined))
        self._used[:] = False
        # Search less often where it helps little, or where what was packed is needed at once.
        if 2 * packed < len(examined) or 2 * self._unpacked > packed:
            self._interval *= 2
        self._since = self._unpacked = 0
        self._searches += 1

    def _pack(self, rows: Words, filling: Flags | bool = False) -> int:
        """Pack rows, except those with empty places that are being filled; returns how many."""
        stamps = self._rows[rows].astype(np.int64, copy=False)
        top, bottom = stamps.max(axis=1), stamps.min(axis=1)
        self._open[rows] = top > 0
        ready = (top > 0) & ((bottom > 0) | np.logical_not(filling))
        if not ready.all():
            rows, top, bottom, stamps = rows[ready], top[ready], bottom[ready], stamps[ready]
        if not rows.size:
            return 0
        empty = stamps == 0 if not bottom.all() else None
        stamps -= top[:, None]
        if empty is not None:
            stamps[empty] = EMPTY
        numbers = self._numbers_of(stamps)
        known = numbers >= 0
        rows = rows[known]
        self._top[rows], self._pattern[rows] = top[known], numbers[known]
        self._packed[rows], self._open[rows], self._used[rows] = True, False, False
        self._packed_in[rows] = self._searches
        self._give_back(rows)
        return len(rows)

    def _numbers_of(self, stamps: Words) -> Words:
        """The number of each row's pattern; -1 where there is none."""
        numbers = np.full(len(stamps), -1)
        hashes = stamps @ _FACTORS[: self._row]
        keys, first, which = np.unique(hashes, return_index=True, return_inverse=True)
        for place, key in enumerate(keys.tolist()):
            number = self._numbers.get(key)
            if number is None:
                number = len(self._numbers)
                if number >= self._most:
                    continue
                if number == len(self._patterns):
                    self._patterns = np.concatenate([self._patterns, np.zeros_like(self._patterns)])
                self._patterns[number] = stamps[first[place]]
                self._numbers[key] = number
            some = np.flatnonzero(which == place) if len(keys) > 1 else slice(None)
            same = (stamps[some] == self._patterns[number]).all(axis=1)
            numbers[some] = np.where(same, number, -1)
        return numbers

    def _give_back(self, rows: Words) -> None:
        """Free the pages of rows."""
        for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            if run.size:
                self._pages.madvise(mmap.MADV_DONTNEED, int(run[0]) * ROW * 8, len(run) * ROW * 8)  # both kinds: a page

    def _content(self, rows: Words) -> Words:
        """The stamps of rows, packed or not."""
        stamps = self._rows[rows].astype(np.int64, copy=False)
        packed: Flags = self._packed[rows]
        some = rows[packed]
        stamps[packed] = np.maximum(self._patterns[self._pattern[some]] + self._top[some][:, None], 0)
        return stamps


# Odd factors of a hash; rows of one hash are compared before they count as equal.
_FACTORS = np.random.default_rng(0).integers(-(1 << 62), 1 << 62, 2 * ROW) * 2 + 1


def _batches(rows: Words) -> Iterator[Words]:
    return (rows[start : start + AT_ONCE] for start in range(0, len(rows), AT_ONCE))


MOST = 2  # reads: one of a chunk takes some MiB


@dataclass(frozen=True)
class ReadPlaces:
    """Threads of a chunk have read places, from `low` to `high`."""

    access: int
    places: Words
    stamps: Words
    low: int
    high: int

    def touches(self, low: int, high: int) -> bool:
        """Whether it may have read a place from `low` to `high`."""
        return self.low <= high and low <= self.high


class LatestReads:
    """The reads in turn; `keep` puts one into a table."""

    def __init__(self, keep: Callable[[ReadPlaces], None]) -> None:
        self._keep = keep
        self._reads: list[ReadPlaces] = []

    def add(self, read: ReadPlaces) -> None:
        """Threads read."""
        self._reads.append(read)
        if len(self._reads) > MOST:
            self._keep(self._reads.pop(0))

    def before(self, write: ReadPlaces, thread_at: int) -> ReadPlaces | None:
        """The read of what the same threads now write, if it is the latest one there and at the same clocks."""
        for read in reversed(self._reads):
            if read.touches(write.low, write.high):
                same = np.array_equal(read.places, write.places)
                return read if same and not np.count_nonzero((read.stamps ^ write.stamps) >> thread_at) else None
        return None

    def settle(self, low: int, high: int, spared: ReadPlaces | None = None) -> None:
        """Keep the reads up to the last one from `low` to `high`, but for one that is later than these."""
        touched = (number for number, read in enumerate(self._reads, 1) if read.touches(low, high))
        count = max((number for number in touched if self._reads[number - 1] is not spared), default=0)
        reads, self._reads = self._reads[:count], self._reads[count:]
        for read in reads:
            self._keep(read)

    def settle_all(self) -> None:
        """Keep all reads."""
        reads, self._reads = self._reads, []
        for read in reads:
            self._keep(read)

    def drop(self, read: ReadPlaces) -> None:
        """Forget a read."""
        self._reads = [each for each in self._reads if each is not read]
