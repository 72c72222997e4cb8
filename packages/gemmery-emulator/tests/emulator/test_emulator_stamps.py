"""The table of stamps against a plain array, its memory, and findings with and without packed rows."""

from __future__ import annotations

import numpy as np
import pytest

import gemmery as gm
from gemmery_emulator.findings import global_races, stamps
from gemmery_emulator.findings.grid import GridHistory, StampFields
from gemmery_emulator.findings.stamps import ROW, Stamps

pytestmark = pytest.mark.skipif(not stamps.RETURNS, reason="rows are packed only where single pages can be given back")

ROWS = 40


@pytest.fixture
def often(monkeypatch):
    """Search for patterns after each access."""
    monkeypatch.setattr(stamps, "LEAST", 16)


class Plain:
    """A table beside an array of all its stamps."""

    def __init__(self, size, narrow=False):
        self.table, self.array = Stamps(size, narrow), np.zeros(size, np.int64)

    def write(self, places, values):
        low, high = int(places.min()), int(places.max())
        before = self.table.written_at(places, low, high)
        np.testing.assert_array_equal(before[places], self.array[places])
        before[places] = values
        self.array[places] = values

    def check(self):
        every, some = np.arange(len(self.array)), np.flatnonzero(self.array)
        assert self.table.touches(0, some[0])
        assert self.table.touches(some[-1], some[-1])
        np.testing.assert_array_equal(self.table.at(every, 0, len(every) - 1)[every], self.array)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_table_holds_what_was_written(seed, narrow):
    """Steps of threads, vectors, columns, random places and overwritten ones, with splits in between.

    A narrow table becomes wide after half of the turns.
    """
    random = np.random.default_rng(seed)
    both = Plain(ROWS * ROW + 100, narrow)
    packed = 0
    for turn in range(60):
        size = len(both.array)
        start, count = int(random.integers(size - 9)), int(random.integers(1, 8 * ROW))
        if turn % 2:  # one after the other
            start = min(turn * 3 * ROW // 2, size - 9)
        step = int(random.choice([1, 1, 1, 2, ROW]))
        places = np.arange(start, size, step)[:count]
        if random.random() < 0.1:
            places = random.permutation(size)[:count]
        apart, top = (1, 26) if narrow and turn < 30 else (10, 40)
        values = (np.arange(len(places)) // random.choice([1, 4]) << apart) + (turn + 1 << top)
        if narrow and turn == 30:
            both.table = both.table.moved(1, narrow=False)
        both.write(places, values)
        both.table._interval, both.table._most = 16, 99  # it would search less often, and keep fewer patterns
        packed += int(both.table._packed.sum())
        if turn in (20, 40):
            both.table, both.array = both.table.moved(2, narrow and turn < 30), np.repeat(both.array, 2)
        if turn % 10 == 9:
            both.check()
    assert packed > (50 if narrow else 100)  # rows, over all turns


@pytest.mark.usefixtures("often")
def test_rows_of_one_pattern_are_packed_and_have_no_memory():
    """All but those that are written last; each has the stamps of its threads again when it is read."""
    both = Plain(ROWS * ROW)
    for start in range(0, ROWS * ROW, 4 * ROW):
        places = np.arange(start, start + 4 * ROW)
        both.write(places, places << 10 | 1 << 50)
    assert both.table._packed.tolist() == [True] * (ROWS - 4) + [False] * 4
    assert not both.table._rows[:-4].any()  # given back: the system has zeros there
    assert len(both.table._numbers) == 1
    both.check()


@pytest.mark.usefixtures("often")
def test_rows_with_empty_places_are_packed_once_nobody_fills_them():
    """Every fourth place is written, at first; later the next ones are."""
    both = Plain(ROWS * ROW)
    for start in (0, 1):
        for first in range(0, ROWS * ROW, 2 * ROW):
            places = np.arange(first + start, first + 2 * ROW, 4)
            both.write(places, places << 10 | 1 << 50)
            if first == 2 * ROW and start == 0:
                assert not both.table._packed.any()
        assert both.table._packed.tolist() == [True] * (ROWS - 4) + [False] * 4
        assert len(both.table._numbers) == 1 + start
    both.check()


@pytest.mark.usefixtures("often")
def test_rows_without_a_pattern_stay_as_they_are():
    both = Plain(ROWS * ROW)
    random = np.random.default_rng(0)
    for _ in range(6):
        both.write(np.arange(ROWS * ROW), random.integers(1, 1 << 60, ROWS * ROW))
    assert np.count_nonzero(both.table._packed) <= both.table._most
    assert both.table._interval > 16  # it searches less often
    both.check()


@pytest.mark.usefixtures("often")
def test_rows_of_one_hash_are_compared(monkeypatch):
    """A hash says where to look, not what is equal."""
    monkeypatch.setattr(stamps, "_FACTORS", np.zeros(ROW, np.int64))
    both = Plain(8 * ROW)
    for row in range(8):
        both.write(np.arange(row * ROW, row * ROW + ROW), 1 + np.arange(ROW) * (row // 2 + 1))
    both.check()


def test_a_small_table_is_never_packed():
    table = Stamps(stamps.LEAST)
    assert not table._packs
    assert Stamps(stamps.LEAST + 1)._packs


def test_a_narrow_table_has_half_the_memory():
    """Both as a small one and as one of pages."""
    for size in (64, stamps.LEAST + 1):
        narrow, wide = Stamps(size, narrow=True), Stamps(size)
        places = np.arange(64)
        for table in (narrow, wide):
            table.written_at(places, 0, 63)[places] = places + (1 << 32) - 64
        assert 2 * narrow._data.itemsize == wide._data.itemsize
        np.testing.assert_array_equal(
            narrow.moved(1, narrow=False).at(places, 0, 63)[places], wide.at(places, 0, 63)[places]
        )


RACES = {
    "the next element": "{ int i = blockIdx.x * blockDim.x + threadIdx.x; x[i] = x[i + 1] * 2; }",
    "mirrored": """{ int i = blockIdx.x * blockDim.x + threadIdx.x; x[i] *= 2;
        if (i % 1024 == 77) x[n - 1 - i] = i; }""",
    "pieces of a vector": """{ int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n / 4) ((float4*)x)[i] = make_float4(i, 1, 2, 3);
        __syncthreads(); ((unsigned char*)x)[i] = i; }""",
    "two passes": """{ int step = 8192, first = blockIdx.x * blockDim.x + threadIdx.x;
        for (int i = first % step; i < n; i += step) x[i] += i;
        for (int i = first % step; i < n; i += step) x[n - 1 - i] *= i; }""",
    "updates": """{ int i = blockIdx.x * blockDim.x + threadIdx.x; atomicAdd(&x[i / 3], 1);
        if (i % 4096 == 5) x[i / 2] = i; }""",
    "none": "{ int i = blockIdx.x * blockDim.x + threadIdx.x; x[i] *= 2; }",
}


@pytest.mark.parametrize("case", sorted(RACES))
def test_findings_are_the_same_with_packed_rows(case, monkeypatch):
    """The same pairs of lines, threads, addresses and counts."""
    n = 1 << 15
    code = f'extern "C" __global__ void f(float* x, int n)\n{RACES[case]}'
    told, searches = [], []
    search = Stamps._search
    monkeypatch.setattr(Stamps, "_search", lambda self: (search(self), searches.append(self._packed.sum()))[0])
    for least in (1 << 20, 512):
        monkeypatch.setattr(stamps, "LEAST", least)
        run = gm.emulate(code, "f", n // 256, 256, [np.ones(n + 1, np.float32), np.int32(n)])
        told.append([str(one) for one in (*run.findings, *run.warnings)])
    assert told[0] == told[1]
    assert bool(told[0]) == (case != "none")
    assert max(searches) >= 4  # rows that were packed at one time


ORDERED = """extern "C" __global__ void f(float* x) {
  int i = blockIdx.x * 256 + threadIdx.x, j = blockIdx.x * 256 + 255 - threadIdx.x;
  __syncthreads();
  x[i] += 1;
  BARRIER
  x[j] *= 2;
}"""


def test_later_clocks_make_a_narrow_table_wide(monkeypatch):
    """With a first clock of 2^31 the second one does not fit in 4 bytes."""
    move, moved, told = GridHistory._move, [], []

    def late(*given):
        fields = StampFields(*given)
        fields.clock_at, fields.narrow_clock = 31, 1
        return fields

    for fields in (StampFields, late):
        monkeypatch.setattr(global_races, "StampFields", fields)
        monkeypatch.setattr(GridHistory, "_move", lambda self, times: (moved.append(times), move(self, times)))
        for barrier in ("", "__syncthreads();"):
            run = gm.emulate(ORDERED.replace("BARRIER", barrier), "f", 4, 256, [np.ones(1024, np.float32)])
            told.append([str(one) for one in run.findings])
    assert moved.count(1) == 2
    assert told[:2] == told[2:]
    assert told[0]
    assert not told[1]
