"""Count, find and move bits within an integer: PTX ISA 9.0, "Integer Arithmetic Instructions".

Counts beyond the width need no special case: NumPy's shifts then give zeros, or the sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmery.emulator.op import NUMPY, Meaning, Op, Values
from gemmery.emulator.ops.integer import WORDS, bits, choose, unsigned

NONE = np.uint32(0xFFFFFFFF)  # the result of bfind and fns if there is no such bit


def popc(a: Values) -> Values:
    """Count the set bits."""
    return np.bitwise_count(a).astype(np.uint32)


def filled(a: Values) -> Values:
    """Return a mask of the highest set bit and all bits below it."""
    for shift in (1, 2, 4, 8, 16, 32)[: 5 if a.itemsize == 4 else 6]:
        a = a | a >> shift
    return a


def clz(a: Values) -> Values:
    """Count the zeros above the highest set bit."""
    return 8 * a.itemsize - popc(filled(a))


def bfind(a: Values) -> Values:
    """Return the position of the highest bit that is not a sign bit."""
    return popc(filled(unsigned(a ^ (a >> 8 * a.itemsize - 1) if a.dtype.kind == "i" else a))) - np.uint32(1)


def bfind_shiftamt(a: Values) -> Values:
    """Return the left shift that makes the highest bit that is not a sign bit the first."""
    place = bfind(a)
    return choose(place == NONE, NONE, 8 * a.itemsize - 1 - place)


def brev(a: Values) -> Values:
    """Reverse the bits: swap neighbours, then neighbouring pairs, and so on."""
    width = 8 * a.itemsize
    for shift in (1, 2, 4, 8, 16, 32)[: 5 if width == 32 else 6]:
        mask = (2**width - 1) // (2**shift + 1)
        a = (a >> shift & mask) | (a & mask) << shift
    return a


def ones(kind: type[np.unsignedinteger[Any]], count: Values) -> Values:
    """Return a mask of the lowest `count` bits; all bits for counts beyond the width."""
    return ~(kind(np.iinfo(kind).max) << count.astype(kind))


def fns(mask: Values, base: Values, offset: Values) -> Values:
    """Return the position of the |offset|-th set bit from bit `base`, downwards if negative; for 0, `base` itself."""
    place = np.arange(32, dtype=np.uint32)
    mask, base, offset = (np.asarray(x)[..., None] for x in (mask, base, offset))
    up = offset >= 0
    candidates = (mask >> place & 1).astype(bool) & np.where(up, place >= base, place <= base) & (base < 32)
    candidates &= (offset != 0) | (place == base)
    rising = np.cumsum(candidates, axis=-1)
    rank = np.where(up, rising, rising[..., -1:] - rising + candidates)
    hit = candidates & (rank == np.maximum(np.abs(offset.astype(np.int64)), 1))
    return choose(hit.any(axis=-1), hit.argmax(axis=-1).astype(np.uint32), NONE)


def byte_of(x: Values, width: int) -> Values:
    """Return a start or length as a byte. The ISA leaves larger values open; an H200 uses them in 64-bit forms."""
    return x & 255 if width == 32 else x


def bfe(kind: str) -> Meaning:
    """Return `length` bits from `start`; the bits above are zeros, or the sign, which is the last bit of the field."""
    width = bits(kind)
    word = np.dtype(NUMPY[f"u{width}"]).type

    def meaning(a: Values, start: Values, length: Values) -> Values:
        start, length = byte_of(start, width), byte_of(length, width)
        field = unsigned(a >> start.astype(a.dtype))
        inside = ones(word, length)
        if kind[0] == "u":
            return field & inside
        last = (np.minimum(start, width) + length - 1).astype(a.dtype)
        sign = choose(length == 0, word(0), unsigned(-(a >> last & 1)))
        return (field & inside | sign & ~inside).view(a.dtype)

    return meaning


def bfi(kind: str) -> Meaning:
    """Insert the lower `length` bits of a into b at bit `start`."""
    width = bits(kind)
    word = np.dtype(NUMPY[kind]).type

    def meaning(a: Values, b: Values, start: Values, length: Values) -> Values:
        start = byte_of(start, width).astype(word)
        field = ones(word, byte_of(length, width)) << start
        return (a << start & field) | (b & ~field)

    return meaning


def limited(count: Values, mode: str) -> Values:
    """Limit a count to 0 to 32 ("clamp") or 0 to 31 ("wrap")."""
    return np.minimum(count, 32) if mode == "clamp" else count & 31


def szext(mode: str) -> Meaning:
    """Return the lower `count` bits, with zeros or the sign above."""

    def meaning(a: Values, count: Values) -> Values:
        unused = (32 - limited(count, mode)).astype(a.dtype)
        return a << unused >> unused

    return meaning


def bmsk(mode: str) -> Meaning:
    """Return `count` ones from bit `start`."""
    return lambda start, count: ones(np.uint32, limited(count, mode)) << limited(start, mode)


def op(result: str, operands: tuple[str, ...], meaning: Meaning) -> Op:
    """An entry of this file."""
    return Op((result,), operands, meaning, kind="bits")


TABLE: dict[str, Op] = {
    **{f"popc.{t}": op("u32", (t,), popc) for t in ("b32", "b64")},
    **{f"clz.{t}": op("u32", (t,), clz) for t in ("b32", "b64")},
    **{f"bfind.{t}": op("u32", (t,), bfind) for t in WORDS},
    **{f"bfind.shiftamt.{t}": op("u32", (t,), bfind_shiftamt) for t in WORDS},
    **{f"brev.{t}": op(t, (t,), brev) for t in ("b32", "b64")},
    "fns.b32": op("b32", ("b32", "b32", "s32"), fns),
    **{f"bfe.{t}": op(t, (t, "u32", "u32"), bfe(t)) for t in WORDS},
    **{f"bfi.{t}": op(t, (t, t, "u32", "u32"), bfi(t)) for t in ("b32", "b64")},
    **{f"szext.{mode}.{t}": op(t, (t, "u32"), szext(mode)) for mode in ("clamp", "wrap") for t in ("u32", "s32")},
    **{f"bmsk.{mode}.b32": op("b32", ("u32", "u32"), bmsk(mode)) for mode in ("clamp", "wrap")},
}
