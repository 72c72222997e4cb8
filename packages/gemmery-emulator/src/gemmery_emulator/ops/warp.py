"""Instructions by which the lanes of a warp exchange values: shuffles, votes, matches, reductions.

NVIDIA, Parallel Thread Execution ISA 9.0, "Parallel Synchronization and Communication Instructions". A lane's
membermask names the lanes it waits for; lanes with different masks, such as tiles of 16 lanes, form separate groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gemmery.dtypes import Array
from gemmery_emulator.fragments import transposed
from gemmery_emulator.op import NUMPY, Op

LANES = np.arange(32, dtype="i4")
# The value of an inactive lane, which the ISA leaves undefined: all bits set, which is a NaN and shows.
UNDEFINED = np.uint32(0xFFFFFFFF)


def _bits(lanes: Array) -> Array:
    """A mask of 32 bits for each last axis of 32 lanes."""
    return np.packbits(lanes, axis=-1, bitorder="little").view("u4")


def _once(x: Array) -> Array:
    """One row for all warps if the array repeats one value."""
    return x[:1] if x.strides[0] == 0 else x


# ---- shfl ----


# The lane that each lane reads, from its own number, b, and the lanes of its segment.
_SHUFFLES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "up": lambda lane, b, segment: lane - b,
    "down": lambda lane, b, segment: lane + b,
    "bfly": lambda lane, b, segment: lane ^ b,
    "idx": lambda lane, b, segment: lane & segment | b & ~segment,
}


def sources(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """The lane that each lane reads in a shfl.sync.up, .down, .bfly or .idx, itself if the source is out of range, and
    whether it is in range: (warps, 32), or one row for all warps.
    """
    b, c = (_once(x).astype("i4") for x in (b, c))
    segment = c >> 8 & 31
    limit = LANES & segment | c & 31 & ~segment
    source = _SHUFFLES[mode](LANES, b & 31, segment)
    inside = source >= limit if mode == "up" else source <= limit
    source, inside = np.broadcast_arrays(np.where(inside, source, LANES), inside)
    return source, inside


def _shfl(mode: str, active: Array, a: Array, b: Array, c: Array, _mask: Array) -> Any:
    source, inside = sources(mode, b, c)
    if len(source) == 1:
        values, there = a[:, source[0]], active[:, source[0]]
    else:
        values, there = (np.take_along_axis(x, source, axis=1) for x in (a, active))
    if not there.all():
        values = np.where(there, values, UNDEFINED)
    return values, np.broadcast_to(inside, a.shape)


# ---- votes ----


def _ballot(active: Array, a: Array, mask: Array) -> Any:
    return _bits(active & a) & mask


_VOTES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "all": lambda active, a, mask: _ballot(active, ~a, mask) == 0,
    "any": lambda active, a, mask: _ballot(active, a, mask) != 0,
    "uni": lambda active, a, mask: (_ballot(active, ~a, mask) == 0) | (_ballot(active, a, mask) == 0),
}


def _elect(active: Array, mask: Array) -> tuple[Array, Array]:
    """The lowest participating lane."""
    members = _bits(active) & mask
    leader = np.bitwise_count(~members & (members - np.uint32(1))).astype("u4")
    return leader, leader == LANES


# ---- match ----


def _match_any(active: Array, a: Array, mask: Array) -> Array:
    same = _bits(a[:, :, None] == a[:, None, :])[..., 0]
    return same & _bits(active) & mask


def _match_all(active: Array, a: Array, mask: Array) -> tuple[Array, Array]:
    members = _bits(active) & mask
    agree = _match_any(active, a, mask) == members
    return np.where(agree, members, np.uint32(0)), agree


# ---- redux ----


def _redux(fold: np.ufunc, identity: Any, magnitude: bool, active: Array, a: Array, mask: Array) -> Any:
    a = np.abs(a) if magnitude else a
    if (mask == mask[:, :1]).all():
        members = active & (mask >> LANES.astype("u4") & 1).astype(bool)
        folded = fold.reduce(np.where(members, a, identity), axis=1, keepdims=True, dtype=a.dtype)
        return np.broadcast_to(folded, a.shape)
    members = active[:, None, :] & (mask[:, :, None] >> LANES.astype("u4") & 1).astype(bool)
    return fold.reduce(np.where(members, a[:, None, :], identity), axis=2, dtype=a.dtype)


def _reductions() -> dict[str, Op]:
    table = {}

    def add(name: str, kind: str, fold: np.ufunc, identity: float, magnitude: bool = False) -> None:
        meaning = partial(_redux, fold, np.dtype(NUMPY[kind]).type(identity), magnitude)
        table[f"redux.sync.{name}.{kind}"] = _op((kind,), (kind, "b32"), meaning, "redux")

    for kind in ("u32", "s32"):
        limits = np.iinfo(NUMPY[kind])
        add("add", kind, np.add, 0)
        add("min", kind, np.minimum, limits.max)
        add("max", kind, np.maximum, limits.min)
    add("and", "b32", np.bitwise_and, 0xFFFFFFFF)
    add("or", "b32", np.bitwise_or, 0)
    add("xor", "b32", np.bitwise_xor, 0)
    # sm_100a. Without .NaN any number beats a NaN, so NaN is the identity.
    for magnitude in (False, True):
        infix = ".abs" * magnitude
        add(f"min{infix}", "f32", np.fmin, np.nan, magnitude)
        add(f"max{infix}", "f32", np.fmax, np.nan, magnitude)
        add(f"min{infix}.NaN", "f32", np.minimum, np.inf, magnitude)
        add(f"max{infix}.NaN", "f32", np.maximum, -np.inf, magnitude)
    return table


def _op(results: tuple[str, ...], operands: tuple[str, ...], meaning: Callable[..., Any], kind: str) -> Op:
    """An instruction whose lanes wait for those that the last operand names."""
    return Op(results, operands, meaning, "warp", kind=kind, lanes="mask", effect=True)


TABLE: dict[str, Op] = {
    **{f"shfl.sync.{mode}.b32": _op(("b32", "pred"), ("b32",) * 4, partial(_shfl, mode), "shfl") for mode in _SHUFFLES},
    **{f"vote.sync.{name}.pred": _op(("pred",), ("pred", "b32"), meaning, "vote") for name, meaning in _VOTES.items()},
    "vote.sync.ballot.b32": _op(("b32",), ("pred", "b32"), _ballot, "vote"),
    "activemask.b32": Op(
        *(("b32",), (), lambda active: np.broadcast_to(_bits(active), active.shape), "warp"), kind="vote"
    ),
    "elect.sync": _op(("b32", "pred"), ("b32",), _elect, "elect"),
    **{f"match.any.sync.{kind}": _op(("b32",), (kind, "b32"), _match_any, "match") for kind in ("b32", "b64")},
    **{f"match.all.sync.{kind}": _op(("b32", "pred"), (kind, "b32"), _match_all, "match") for kind in ("b32", "b64")},
    **_reductions(),
    "movmatrix.sync.aligned.m8n8.trans.b16": Op(
        *(("b32",), ("b32",), lambda active, a: transposed(a), "warp"), kind="movmatrix", lanes="warp", effect=True
    ),
}
