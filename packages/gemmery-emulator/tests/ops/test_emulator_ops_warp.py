"""Shuffles, votes, matches and reductions of the emulator against the ISA's pseudo-code, lane by lane."""

import math
from itertools import product

import numpy as np
import pytest

from gemmery_emulator.op import NUMPY
from gemmery_emulator.ops.warp import EXCHANGES as WARP
from gemmery_emulator.ops.warp import UNDEFINED

FULL = 0xFFFFFFFF
WARPS = 6


@pytest.fixture(autouse=True)
def quiet():
    """The emulator's results."""
    with np.errstate(all="ignore"):
        yield


# ---- oracles: of one warp; `active` and each operand are lists of 32, and so is each result


def bit(mask, lane):
    return mask >> lane & 1


def shuffled(mode):
    def shfl(active, a, b, c, _mask):
        values, inside = [], []
        for lane in range(32):
            bval, cval, segmask = b[lane] & 31, c[lane] & 31, c[lane] >> 8 & 31
            max_lane, min_lane = (lane & segmask) | (cval & ~segmask & 31), lane & segmask
            if mode == "up":
                j, p = lane - bval, lane - bval >= max_lane
            elif mode == "down":
                j, p = lane + bval, lane + bval <= max_lane
            elif mode == "bfly":
                j, p = lane ^ bval, lane ^ bval <= max_lane
            else:
                j = min_lane | (bval & ~segmask & 31)
                p = j <= max_lane
            j = j if p else lane
            values.append(a[j] if active[j] else int(UNDEFINED))
            inside.append(p)
        return values, inside

    shfl.__name__ = mode
    return shfl


def members(active, mask):
    return [lane for lane in range(32) if active[lane] and bit(mask, lane)]


def by_lane(function):
    """An oracle made of a function of a lane's values and the lanes that participate with it."""

    def oracle(active, *operands):
        *values, masks = operands
        results = [function(lane, members(active, masks[lane]), *values) for lane in range(32)]
        return tuple(map(list, zip(*results, strict=True))) if isinstance(results[0], tuple) else (results,)

    return oracle


def ballot(_lane, group, a):
    return sum(1 << j for j in group if a[j])


def match_any(lane, group, a):
    return sum(1 << j for j in group if a[j] == a[lane])


def match_all(lane, group, a):
    agree = all(a[j] == a[lane] for j in group)
    return (sum(1 << j for j in group) if agree else 0), agree


def elect(lane, group):
    return min(group), lane == min(group)


def reduced(fold, kind):
    def redux(_lane, group, a):
        value = a[group[0]]
        for j in group[1:]:
            value = fold(value, a[j])
        return value if kind == "f32" else (value + 2**31) % 2**32 - 2**31 if kind == "s32" else value % 2**32

    return by_lane(redux)


def float_fold(name, magnitude, keeps_nan):
    def fold(x, y):
        x, y = (abs(x), abs(y)) if magnitude else (x, y)
        if math.isnan(x) or math.isnan(y):
            return math.nan if keeps_nan or (math.isnan(x) and math.isnan(y)) else y if math.isnan(x) else x
        return min(x, y) if name == "min" else max(x, y)

    return fold


def transposed(_active, a):
    halves = [[a[4 * row + column // 2] >> 16 * (column % 2) & 0xFFFF for column in range(8)] for row in range(8)]
    return ([halves[2 * (lane % 4)][lane // 4] | halves[2 * (lane % 4) + 1][lane // 4] << 16 for lane in range(32)],)


ORACLES = {
    **{f"shfl.sync.{mode}.b32": shuffled(mode) for mode in ("up", "down", "bfly", "idx")},
    "vote.sync.all.pred": by_lane(lambda _, group, a: all(a[j] for j in group)),
    "vote.sync.any.pred": by_lane(lambda _, group, a: any(a[j] for j in group)),
    "vote.sync.uni.pred": by_lane(lambda _, group, a: len({a[j] for j in group}) == 1),
    "vote.sync.ballot.b32": by_lane(ballot),
    "activemask.b32": lambda active: ([sum(1 << j for j in range(32) if active[j])] * 32,),
    "elect.sync": by_lane(elect),
    **{f"match.any.sync.{kind}": by_lane(match_any) for kind in ("b32", "b64")},
    **{f"match.all.sync.{kind}": by_lane(match_all) for kind in ("b32", "b64")},
    **{f"redux.sync.add.{kind}": reduced(lambda x, y: x + y, kind) for kind in ("u32", "s32")},
    **{f"redux.sync.min.{kind}": reduced(min, kind) for kind in ("u32", "s32")},
    **{f"redux.sync.max.{kind}": reduced(max, kind) for kind in ("u32", "s32")},
    "redux.sync.and.b32": reduced(lambda x, y: x & y, "b32"),
    "redux.sync.or.b32": reduced(lambda x, y: x | y, "b32"),
    "redux.sync.xor.b32": reduced(lambda x, y: x ^ y, "b32"),
    **{
        f"redux.sync.{name}{'.abs' * magnitude}{'.NaN' * keeps}.f32": reduced(float_fold(name, magnitude, keeps), "f32")
        for name, magnitude, keeps in product(("min", "max"), (False, True), (False, True))
    },
    "movmatrix.sync.aligned.m8n8.trans.b16": transposed,
}

# ---- operands


def some(rng, kind):
    """Values of a type, (warps, 32): few different ones in the last warps, all alike in the very last."""
    if kind == "pred":
        values = rng.random((WARPS, 32)) < 0.5
        values[-1], values[-2] = True, False
        return values
    if kind == "f32":
        values = rng.standard_normal((WARPS, 32)).astype("f4")
        values[1, 3:9:2] = np.nan
        values[2, :4] = (np.inf, -np.inf, -1e-45, 3e38)
    else:
        values = rng.integers(0, 2**64, (WARPS, 32), dtype="u8").astype(NUMPY[kind])
        values[-2] = values[-2] & 1 if kind == "b32" else values[-2] % 2
        values[0, 1] = values[0, 0] ^ (1 << 8 * values.itemsize - 2)  # differs in an upper bit alone
    values[-1] = np.nan if kind == "f32" else values[-1, 0]
    return values


def masks(rng):
    """Active lanes and membermasks: whole warps, tiles of 16 and of 4, ragged ends, random lanes."""
    active = np.ones((WARPS, 32), bool)
    member = np.full((WARPS, 32), FULL, "u4")
    lanes = np.arange(32, dtype="u4")
    member[1] = np.where(lanes < 16, 0xFFFF, 0xFFFF0000)
    member[2] = np.uint32(15) << (lanes & 28)
    active[3, 9:] = False
    member[3] = 0x1FF
    active[4] = rng.random(32) < 0.5
    active[4, 7] = True
    member[4] = sum(1 << j for j in range(32) if active[4, j])
    active[5, 20:] = False  # ended, but still in the mask
    return active, member


def check(opcode, active, operands):
    """Against the oracle, for the active lanes."""
    op = WARP[opcode]
    given = [value.astype(NUMPY[kind]) for value, kind in zip(operands, op.operands, strict=True)]
    found = op.meaning(active, *given)
    found = found if isinstance(found, tuple) else (found,)
    assert len(found) == len(op.results)
    for result, kind in zip(found, op.results, strict=True):
        assert (result.shape, result.dtype) == (active.shape, np.dtype(NUMPY[kind])), opcode
    for warp, lanes in enumerate(active):
        if lanes.any():
            at = np.flatnonzero(lanes)
            expected = by_warp(ORACLES[opcode], lanes, [value[warp] for value in given])
            for result, wanted in zip(found, expected, strict=True):
                np.testing.assert_array_equal(result[warp, at], np.array(wanted, result.dtype)[at], f"{opcode} {warp}")


def by_warp(oracle, active, operands):
    return oracle(active.tolist(), *(operand.tolist() for operand in operands))


# ---- tests


@pytest.mark.parametrize("opcode", [opcode for opcode in ORACLES if not opcode.startswith("shfl")])
def test_groups_of_lanes(opcode):
    rng = np.random.default_rng(11)
    op = WARP[opcode]
    for shift, tiles in product(range(WARPS), (True, False)):  # each kind of values meets each kind of mask
        active, member = masks(rng)
        if not tiles:
            member = np.repeat(member.max(axis=1, keepdims=True), 32, axis=1)
        values = [np.roll(some(rng, kind), shift, axis=0) for kind in op.operands]
        if op.operands and "movmatrix" not in opcode:
            values[-1] = member
        check(opcode, active, values)


CLAMPS = [
    segment << 8 | clamp for segment in (0, 16, 24, 28, 30) for clamp in (0, 31, 7)
]  # c as CUDA makes it, and odd


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("c", CLAMPS)
def test_shuffles(mode, c):
    rng = np.random.default_rng(c)
    active, member = masks(rng)
    for b in (0, 1, 2, 5, 16, 31, 33):
        check(
            f"shfl.sync.{mode}.b32",
            active,
            [some(rng, "b32"), np.full((WARPS, 32), b), np.full((WARPS, 32), c), member],
        )


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_lanes_shuffle_from_where_each_says(mode):
    rng = np.random.default_rng(7)
    active, member = masks(rng)
    b, c = rng.integers(0, 2**32, (2, WARPS, 32), dtype="u4")
    check(f"shfl.sync.{mode}.b32", active, [some(rng, "b32"), b, c, member])


@pytest.mark.parametrize("opcode", ORACLES)
def test_repeated_scalars_are_taken_as_arrays_are(opcode):
    active, op = np.ones((WARPS, 32), bool), WARP[opcode]
    scalars = [np.asarray(value, NUMPY[kind]) for value, kind in zip((3, 2, 0x1F, FULL), op.operands, strict=False)]
    if op.operands and "movmatrix" not in opcode:
        scalars[-1] = np.uint32(FULL)
    repeated = op.meaning(active, *(np.broadcast_to(x, active.shape) for x in scalars))
    written = op.meaning(active, *(np.full(active.shape, x) for x in scalars))
    np.testing.assert_array_equal(repeated, written)


def test_a_lane_that_is_not_there_gives_no_number():
    active = np.ones((1, 32), bool)
    active[0, 8:] = False
    b, c, mask = (np.full((1, 32), x, "u4") for x in (16, 31, FULL))
    value, inside = WARP["shfl.sync.down.b32"].meaning(active, np.zeros((1, 32), "u4"), b, c, mask)
    assert np.isnan(value.view("f4")[0, :8]).all()
    assert inside[0, :16].all()


def test_the_table_and_the_oracles_are_one_set():
    assert set(ORACLES) == set(WARP)
    assert {op.scope for op in WARP.values()} == {"warp"}
