"""Arithmetic of f32 and f64: PTX ISA 9.0, section 9.7.3.

The approximations of the hardware (ex2.approx, rcp.approx ...) are not known bit by bit: they are the correctly rounded
values here, which lie within the errors that the ISA states. NaNs carry no payload worth comparing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmery.emulator import exact
from gemmery.emulator.op import Op, Values

Meaning = Callable[..., Any]


def flushed(x: Values) -> Values:
    """Subnormal float32 as zeros of their sign."""
    small = np.abs(x) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), x), x)[()]


def saturated(x: Values) -> Values:
    """Clamped to 0 ... 1, NaN to +0."""
    kind = np.asarray(x).dtype.type
    # fmax takes the number where the other is NaN; the addition makes +0 of -0.
    return np.fmin(np.fmax(x, kind(0)), kind(1)) + kind(0)


def modified(meaning: Meaning, modifiers: str) -> Meaning:
    """A meaning with ".ftz" (subnormal inputs and results are zeros) and ".sat" applied."""
    ftz, sat = ".ftz" in modifiers, ".sat" in modifiers
    if not modifiers:
        return meaning

    def changed(*operands: Values) -> Values:
        result = meaning(*map(flushed, operands)) if ftz else meaning(*operands)
        result = flushed(result) if ftz else result
        return saturated(result) if sat else result

    return changed


NEAREST: dict[str, tuple[Meaning, str, int]] = {  # meaning, kind, operands
    "add": (np.add, "fadd", 2),
    "sub": (np.subtract, "fadd", 2),
    "mul": (np.multiply, "fmul", 2),
    "fma": (exact.fma, "fma", 3),
}
DIRECTED = {
    "add": exact.directed_add,
    "sub": exact.directed_sub,
    "mul": exact.directed_mul,
    "fma": exact.directed_fma,
}


def _arithmetic() -> dict[str, Op]:
    """add, sub, mul, fma and mad in all roundings; without one, add, sub and mul round to nearest."""
    table = {}
    for name, (nearest, kind, count) in NEAREST.items():
        for rounding in ("", ".rn", ".rz", ".rm", ".rp"):
            if name == "fma" and not rounding:
                continue
            base = nearest if rounding in ("", ".rn") else DIRECTED[name](rounding[1:])
            for type_ in ("f32", "f64"):
                for modifiers in ("", ".ftz", ".sat", ".ftz.sat") if type_ == "f32" else ("",):
                    meaning = modified(base, modifiers)
                    op = Op((type_,), (type_,) * count, meaning, kind=kind, flops=2 if name == "fma" else 1)
                    for spelled in (name, "mad") if name == "fma" else (name,):
                        table[f"{spelled}{rounding}{modifiers}.{type_}"] = op
    return table


FLOATING: dict[str, Op] = _arithmetic()
