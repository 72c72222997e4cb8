"""Conversions: PTX ISA 9.0, sections 9.7.9.21 (cvt) and 9.7.9.22 (cvt.pack)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmery.emulator.op import NUMPY, Op, Values
from gemmery.emulator.ops.floating import flushed

Meaning = Callable[..., Any]

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
WHOLE: dict[str, Meaning] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _cast(to: str) -> Meaning:
    kind = np.dtype(NUMPY[to])
    return lambda x: x.astype(kind)


def _to_integer(to: str, of: str, rounding: str) -> Meaning:
    """A float rounded to a whole number and clamped to the range of the integer type."""
    kind = np.dtype(NUMPY[to])
    limits = np.iinfo(kind)
    # NaN is 0 of an f32 in up to 32 bits, else the one value with only the top bit set.
    nan = 0 if of != "f64" and kind.itemsize < 8 else 1 << (8 * kind.itemsize - 1)
    nan_value = np.array(nan, f"u{kind.itemsize}").view(kind)[()]
    whole = WHOLE[rounding]

    def convert(x: Values) -> Values:
        rounded = whole(x)
        low, high = rounded < float(limits.min), rounded >= float(limits.max + 1)
        outside = low | high | np.isnan(rounded)
        result = np.where(outside, 0, rounded).astype(kind)[()]
        if not outside.any():
            return result
        clamped = np.where(low, kind.type(limits.min), np.where(high, kind.type(limits.max), nan_value))
        return np.where(outside, clamped, result)[()]

    return convert


def _ftz(meaning: Meaning) -> Meaning:
    return lambda x: meaning(flushed(x))


def _op(to: str, of: str, meaning: Meaning) -> Op:
    return Op((to,), (of,), meaning, kind="cvt")


CONVERT: dict[str, Op] = {}
CONVERT |= {f"cvt.{to}.{of}": _op(to, of, _cast(to)) for to in INTEGERS for of in INTEGERS}
CONVERT |= {f"cvt.rn.{to}.{of}": _op(to, of, _cast(to)) for to in ("f32", "f64", "f16") for of in INTEGERS}
CONVERT |= {f"cvt.{to}.{of}": _op(to, of, _cast(to)) for to, of in (("f32", "f16"), ("f64", "f16"), ("f64", "f32"))}
CONVERT |= {f"cvt.rn.{to}.{of}": _op(to, of, _cast(to)) for to, of in (("f16", "f32"), ("f16", "f64"), ("f32", "f64"))}
CONVERT |= {
    f"cvt.{rounding}.{to}.{of}": _op(to, of, _to_integer(to, of, rounding))
    for rounding in WHOLE
    for to in INTEGERS
    for of in ("f32", "f64", "f16")
}
CONVERT |= {
    f"cvt.{rounding}.ftz.{to}.f32": _op(to, "f32", _ftz(_to_integer(to, "f32", rounding)))
    for rounding in WHOLE
    for to in INTEGERS
}
