"""The rules of GPU memory against the counters of an H200, and against a rule written lane by lane."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gemmery.banks import moved, served

PATTERNS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "memory_patterns_h200.jsonl").read_text().splitlines()
]
LANES = np.arange(32)


def warp(pattern):
    """Addresses and active lanes of a measured pattern, one warp."""
    active = [int(pattern["active"], 16) >> lane & 1 for lane in range(32)]
    return np.array([pattern["offsets"]]), np.array([active], bool)


def counted(pattern):
    """The counters that the rules give for a pattern, by the profiler's names."""
    kind, space, *_ = pattern["op"].split(".")
    addresses, active = warp(pattern)
    if space == "global":
        return {"sectors": moved(addresses, active, pattern["bytes"]).sectors}
    width = 4 * int(space.removeprefix("x")) if kind == "ldmatrix" else pattern["bytes"]
    found = served(addresses, active, width, kind)
    return {"wavefronts": found.wavefronts, "wavefronts_ideal": found.ideal, "bank_conflicts": found.conflicts}


def test_every_measured_pattern_is_predicted():
    """Wavefronts, ideal, bank conflicts and sectors equal on every line of the file."""
    wrong = [
        f"line {number}, {pattern['op']}, {pattern['label']}, {name}: {value} counted, {pattern[name]} measured"
        for number, pattern in enumerate(PATTERNS, 1)
        for name, value in counted(pattern).items()
        if name in pattern and value != pattern[name]
    ]
    assert wrong == []
    assert len(PATTERNS) == 1237
    measured = Counter(name for pattern in PATTERNS for name in pattern if name in counted(pattern))
    assert measured == {"wavefronts": 962, "bank_conflicts": 962, "wavefronts_ideal": 507, "sectors": 275}


def by_hand(addresses, active, width, kind):
    """Wavefronts of one warp, counted word by word."""
    lanes = [int(at) if on else None for at, on in zip(addresses, active, strict=True)]
    size = min(32, 128 // width)
    pairs = [[(lanes[n], lanes[n ^ apart]) for n in range(32)] for apart in (1, 2)]
    if kind == "ld" and any(all(x == y or None in (x, y) for x, y in found) for found in pairs):
        size = min(32, 2 * size)
    total = 0
    for first in range(0, 32, size):
        words = {at // 4 + k for at in lanes[first : first + size] if at is not None for k in range(max(1, width // 4))}
        total += max(Counter(word % 32 for word in words).values(), default=0)
    return total


@pytest.mark.parametrize("kind", ["ld", "st"])
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_many_warps_at_once_cost_what_each_costs_alone(width, kind):
    """Warps of all sorts in one call, idle ones among them, against the count word by word."""
    random = np.random.default_rng(width)
    elements = np.concatenate(
        [
            random.integers(0, 4096, (20, 32)),
            random.integers(0, 4096, (20, 16)).repeat(2, axis=1),  # n and n ^ 1 agree
            random.integers(0, 64, (20, 1)) + LANES * random.integers(0, 40, (20, 1)),
        ]
    )
    active = random.random(elements.shape) < random.choice([0, 0.1, 0.5, 1], (60, 1))
    addresses = width * elements
    expected = [by_hand(*lanes, width, kind) for lanes in zip(addresses, active, strict=True)]
    found = served(addresses, active, width, kind)
    assert found.wavefronts == sum(expected)
    assert found.requests == np.count_nonzero(active.any(axis=1))
    alone = [served(addresses[[n]], active[[n]], width, kind) for n in range(60)]
    assert [one.wavefronts for one in alone] == expected
    assert found == tuple(map(sum, zip(*alone, strict=True)))


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
def test_sectors_of_many_warps(width):
    """Sectors and bytes used in any order of addresses, against sets."""
    random = np.random.default_rng(width)
    rows = [random.integers(0, 200, (9, 32)), LANES + random.integers(0, 99, (9, 1)), np.zeros((3, 32), int)]
    addresses = width * np.concatenate(rows)
    for active in (None, random.random(addresses.shape) < 0.4, np.zeros(addresses.shape, bool)):
        lanes = [row if active is None else row[active[n]] for n, row in enumerate(addresses)]
        assert moved(addresses, active, width) == (
            sum(len(row) > 0 for row in lanes),
            sum(len(set(row // 32)) for row in lanes),
            sum(len(set(row)) for row in lanes) * width,
        )


def test_matrices_cost_one_wavefront_for_eight_rows_without_conflict():
    """Rows 16 bytes apart are free of conflicts, rows 128 bytes apart meet in the same four banks."""
    for kind in ("ldmatrix", "stmatrix"):
        assert served(16 * LANES[None], None, 16, kind) == (1, 4, 4, 0)
        assert served(128 * LANES[None], None, 16, kind) == (1, 32, 4, 28)
        assert served(128 * LANES[None], None, 4, kind) == (1, 8, 1, 7)


@pytest.mark.parametrize("kind", ["ldmatrix", "stmatrix"])
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_lanes_that_give_no_address_cost_nothing(kind, matrices):
    random = np.random.default_rng(matrices)
    rows = 16 * random.integers(0, 64, (50, 32))
    active = np.tile(8 * matrices > LANES, (50, 1))
    expected = [
        max(Counter(row // 16 % 8 for row in {*group}).values())
        for row in rows[:, : 8 * matrices]
        for group in row.reshape(-1, 8)
    ]
    found = served(rows, active, 16, kind)
    assert found == (50, sum(expected), 50 * matrices, sum(expected) - 50 * matrices)
    assert found == served(rows, None, 4 * matrices, kind)
