"""Conversions: PTX ISA 9.0, "Data Movement and Conversion Instructions": cvt, cvt.pack.

Between integers and f16, bf16, f32, f64; to tf32, to pairs of 16-bit floats, to and from pairs of 8-bit floats.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np

from gemmery import dtypes
from gemmery_emulator import exact
from gemmery_emulator.exact import from_bf16, packed, to_bf16, to_f16, unpacked, where
from gemmery_emulator.op import NUMPY, Meaning, Op, Values
from gemmery_emulator.ops.floating import SAT, flushed, saturated

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
BYTES = ("u8", "s8")  # which are not converted to and from bf16
FLOATS = ("bf16", "f16", "f32", "f64")
MODES = ("rn", "rz", "rm", "rp")
WHOLE: dict[str, Meaning] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _op(to: str, of: str, meaning: Meaning, count: int = 1) -> Op:
    return Op((to,), (of,) * count, meaning, kind="cvt")


def _of_float(of: str) -> Meaning:
    """Return a value as float32, or as float64 if it is one."""
    if of == "bf16":
        return from_bf16
    return (lambda x: x.astype(np.float32)) if of == "f16" else (lambda x: x)


def _to(to: str, mode: str = "rn") -> Meaning:
    """Convert a float32, or a float64 that is exact or rounded to odd, to another type; an integer to another one."""
    if to == "tf32":
        return partial(_to_tf32, mode)
    if to == "bf16":
        return lambda x: to_bf16(x, mode)
    if to == "f16":
        return lambda x: to_f16(x, mode)
    kind = np.dtype(NUMPY[to])
    return (lambda x: x.astype(kind)) if mode == "rn" else partial(_directed, kind, mode)


def _directed(kind: np.dtype[Any], mode: str, x: Values) -> Values:
    nearest = x.astype(kind)
    return exact.step(nearest, x - nearest, mode)


def _chain(*steps: Meaning | None) -> Meaning:
    """Compose functions, the first one first."""
    functions = [step for step in steps if step]

    def chained(x: Values) -> Values:
        for step in functions:
            x = step(x)
        return x

    return chained if len(functions) > 1 else functions[0]


# integers


def _between_integers() -> dict[str, Op]:
    """Truncate or extend, and with .sat clamp."""
    table = {}
    for to, of in product(INTEGERS, INTEGERS):
        table[f"cvt.{to}.{of}"] = _op(to, of, _to(to))
        target, source = np.iinfo(NUMPY[to]), np.iinfo(NUMPY[of])
        if target.min > source.min or target.max < source.max:
            table[f"cvt.sat.{to}.{of}"] = _op(to, of, _clamped(to, of))
    return table


def _clamped(to: str, of: str) -> Meaning:
    target, source = np.iinfo(NUMPY[to]), np.iinfo(NUMPY[of])
    low, high = (source.dtype.type(v) for v in (max(target.min, source.min), min(target.max, source.max)))
    return lambda x: np.clip(x, low, high).astype(target.dtype)


def _packed_integers(to: str, a: Values, b: Values, *c: Values) -> Values:
    """Pack a above b; with 8 bits each, the low half of c goes above both."""
    bits = np.uint32(to[1:])
    mask = (np.uint32(1) << bits) - np.uint32(1)
    high, low = (_clamped(to, "s32")(x).astype(np.uint32) & mask for x in (a, b))
    pair = low | high << bits
    return pair | c[0] << np.uint32(16) if c else pair


def _pack() -> dict[str, Op]:
    """cvt.pack.sat of 8 and of 16 bits."""
    forms = [(to, ("s32", "b32")) for to in ("u8", "s8")] + [(to, ("s32",)) for to in ("u16", "s16")]
    return {
        f"cvt.pack.sat.{to}.{'.'.join(types)}": Op(("b32",), ("s32", *types), partial(_packed_integers, to), kind="cvt")
        for to, types in forms
    }


def _from_integers() -> dict[str, Op]:
    """Convert to floats, in all roundings."""
    table = {}
    for mode, to, of in product(MODES, FLOATS, INTEGERS):
        if to == "bf16" and of in BYTES:
            continue
        if to == "f64" and of in ("u64", "s64") and mode != "rn":
            meaning: Meaning = partial(_rounded_sum, mode)
        elif to in ("f32", "f64") and mode == "rn":
            meaning = _to(to)
        else:
            meaning = _chain(lambda x: exact.odd_sum(*_halves(x)), _to(to, mode))
        table[f"cvt.{mode}.{to}.{of}"] = _op(to, of, meaning)
    return table


def _halves(x: Values) -> tuple[Values, Values]:
    """Split an integer into two float64 with that sum."""
    if x.dtype.itemsize < 8:
        return x.astype(np.float64), np.float64(0)
    kind = x.dtype.type
    return (x >> kind(32)) * np.float64(2**32), (x & kind(0xFFFFFFFF)).astype(np.float64)


def _rounded_sum(mode: str, x: Values) -> Values:
    return exact.step(*exact.two_sum(*_halves(x)), mode)


def _to_integer(to: str, of: str, rounding: str) -> Meaning:
    """Round a float to a whole number, and clamp it to the range of the integer type."""
    kind = np.dtype(NUMPY[to])
    limits = np.iinfo(kind)
    # NaN becomes 0 if both types have at most 32 bits, else the value with only the top bit set.
    nan = 0 if of != "f64" and kind.itemsize < 8 else 1 << (8 * kind.itemsize - 1)
    nan_value = np.array(nan, f"u{kind.itemsize}").view(kind)[()]
    whole, widened = WHOLE[rounding], _of_float(of)

    def convert(x: Values) -> Values:
        rounded = whole(widened(x))
        low, high = rounded < float(limits.min), rounded >= float(limits.max + 1)
        outside = low | high | np.isnan(rounded)
        if not outside.any():
            return rounded.astype(kind)
        inside = where(outside, rounded.dtype.type(0), rounded).astype(kind)
        clamped = where(low, kind.type(limits.min), where(high, kind.type(limits.max), nan_value))
        return where(outside, clamped, inside)

    return convert


def _to_integers() -> dict[str, Op]:
    """Convert in the four roundings to whole numbers; .sat changes nothing."""
    table = {}
    for rounding, to, of, sat in product(WHOLE, INTEGERS, FLOATS, ("", ".sat")):
        if of == "bf16" and (sat or to in BYTES):
            continue
        meaning = _to_integer(to, of, rounding)
        table[f"cvt.{rounding}{sat}.{to}.{of}"] = _op(to, of, meaning)
        if of == "f32":
            table[f"cvt.{rounding}.ftz{sat}.{to}.{of}"] = _op(to, of, _chain(flushed, meaning))
    return table


# floats


def _between_floats() -> dict[str, Op]:
    """Widen without rounding, narrow in four roundings, or round to whole numbers; .ftz if one type is f32."""
    table = {}
    for to, of, modifiers in product(FLOATS, FLOATS, SAT):
        if (".ftz" in modifiers and "f32" not in (to, of)) or (".sat" in modifiers and "bf16" in (to, of)):
            continue
        # The hardware (H200) does not flush to f16: the smallest f32 rounded up is the smallest f16.
        before = flushed if of == "f32" and to != "f16" and ".ftz" in modifiers else None
        after = _chain(
            flushed if to == "f32" and ".ftz" in modifiers else (lambda x: x),
            saturated if ".sat" in modifiers else None,
        )
        if to == of and to != "bf16":
            table[f"cvt{modifiers}.{to}.{of}"] = _op(to, of, _chain(before, after))
            for rounding, whole in WHOLE.items():
                table[f"cvt.{rounding}{modifiers}.{to}.{of}"] = _op(to, of, _chain(before, whole, after))
        elif np.dtype(NUMPY[to]).itemsize > np.dtype(NUMPY[of]).itemsize:
            meaning = _chain(before, _of_float(of), _to(to, "rn"), after)
            table[f"cvt{modifiers}.{to}.{of}"] = _op(to, of, meaning)
        elif to != of:
            for mode in MODES:
                meaning = _chain(before, _of_float(of), _to(to, mode), after)
                table[f"cvt.{mode}{modifiers}.{to}.{of}"] = _op(to, of, meaning)
    for rounding, whole in WHOLE.items():
        table[f"cvt.{rounding}.bf16.bf16"] = _op("bf16", "bf16", _chain(from_bf16, whole, to_bf16))
    return table


def _limited(largest: float) -> Meaning:
    """.satfinite: clamp to the largest number, also infinity."""
    return lambda x: where(np.abs(x) > largest, np.copysign(np.asarray(x).dtype.type(largest), x), x)


def _relu(x: Values) -> Values:
    """Replace negative numbers by 0; keep NaN."""
    zero = np.asarray(x).dtype.type(0)
    return np.maximum(x, zero) + zero


LARGEST = {
    "f16": 65504.0,
    "bf16": float(np.uint32(0x7F7F0000).view(np.float32)),
    "tf32": float(np.uint32(0x7F7FE000).view(np.float32)),
}


def _rectified_or_limited() -> dict[str, Op]:
    """Convert f32 to f16, bf16 and tf32, and to pairs of 16 bits with the first operand in the upper half."""
    table = {}
    for to, mode, relu, finite in product(LARGEST, ("rn", "rz", "rna"), ("", ".relu"), ("", ".satfinite")):
        if mode == "rna" and (relu or to != "tf32"):
            continue
        meaning = _chain(_relu if relu else None, _limited(LARGEST[to]) if finite else None, _to(to, mode))
        modifiers = finite + relu if to == "tf32" else relu + finite
        table[f"cvt.{mode}{modifiers}.{to}.f32"] = _op(to, "f32", meaning)
        if to != "tf32":
            table[f"cvt.{mode}{modifiers}.{to}x2.f32"] = _op(f"{to}x2", "f32", partial(_paired, meaning), 2)
    return table


def _paired(meaning: Meaning, high: Values, low: Values) -> Values:
    return packed(np.stack(np.broadcast_arrays(meaning(low), meaning(high)), axis=-1))


def _to_tf32(mode: str, x: Values) -> Values:
    """Return the bits of a float32 rounded to 10 bits: ties to even ("rn") or away from zero ("rna"), or truncated."""
    bits = np.asarray(x).view(np.uint32)
    half: dict[str, Any] = {"rna": np.uint32(0x1000), "rn": (bits >> np.uint32(13) & np.uint32(1)) + np.uint32(0xFFF)}
    short = (bits + half.get(mode, np.uint32(0))) & np.uint32(0xFFFFE000)
    return where(np.isnan(x), np.uint32(0x7FFFFFFF), where(np.isinf(x), bits, short))


# 8-bit floats


def decoded(type_: str) -> Any:
    """The float16 of each of the 256 codes. Only types whose name ends with "fn" have no infinity, and one NaN."""
    row = dtypes.get(type_)
    codes = (np.arange(128, dtype=np.uint16) << np.uint16(10 - row.fraction)).clip(max=0x7C00)
    values = codes.view(np.float16) * np.float16(2.0 ** (14 + row.normal))  # the bias of float16 is 15
    last = 1 if row.numpy.endswith("fn") else 1 << row.fraction
    values[-last:] = [np.nan] if last == 1 else [np.inf] + [np.nan] * (last - 1)
    values = np.concatenate([values, -values])
    values[np.isnan(values)] = np.uint16(0x7FFF).view(np.float16)
    return values


def _to_8_bits(type_: str) -> Meaning:
    """Return the codes of the nearest 8-bit floats, ties to even, clamped to the largest."""
    values = decoded(type_)[:128].astype(np.float64)
    values = values[np.isfinite(values)]
    middles = (values[1:] + values[:-1]) / 2

    def encode(x: Values) -> Values:
        size = np.abs(x)
        below = np.searchsorted(middles, size)  # the code, except for ties with an odd code
        above = np.searchsorted(middles, size, side="right")
        code = where(below % 2 == 1, above, below).astype(np.uint8)
        return where(np.isnan(x), np.uint8(0x7F), code | np.signbit(x).astype(np.uint8) << np.uint8(7))

    return encode


def _two_codes(encode: Meaning, high: Values, low: Values) -> Values:
    return encode(low) | encode(high).astype(np.uint16) << np.uint16(8)


def _codes_of_pair(encode: Meaning, x: Values) -> Values:
    """The same for a register that holds two float16."""
    parts = unpacked(x).view(np.float16)
    return _two_codes(encode, parts[..., 1][()], parts[..., 0][()])


def _pair_of_codes(values: Any, x: Values) -> Values:
    return packed(values[np.stack([x & np.uint16(0xFF), x >> np.uint16(8)], axis=-1)])


def _8_bits() -> dict[str, Op]:
    """Pairs of 8-bit floats: from two f32 and from f16x2, and to f16x2."""
    table = {}
    for type_, relu in product(dtypes.TENSOR_FLOAT8, ("", ".relu")):
        codes, values = f"{type_}x2", decoded(type_)
        encode = _chain(_relu if relu else None, _to_8_bits(type_))
        table[f"cvt.rn.satfinite{relu}.{codes}.f32"] = _op(codes, "f32", partial(_two_codes, encode), 2)
        table[f"cvt.rn.satfinite{relu}.{codes}.f16x2"] = _op(codes, "f16x2", partial(_codes_of_pair, encode))
        wide = partial(_pair_of_codes, _relu(values) if relu else values)
        table[f"cvt.rn{relu}.f16x2.{codes}"] = _op("f16x2", codes, wide)
    return table


TABLE: dict[str, Op] = {
    **_between_integers(),
    **_pack(),
    **_from_integers(),
    **_to_integers(),
    **_between_floats(),
    **_rectified_or_limited(),
    **_8_bits(),
}
