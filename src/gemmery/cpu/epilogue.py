"""What is applied to a tile of C on its way out: activations, vectorized."""

from __future__ import annotations

from gemmery.cpu.ir import Function, Value

ACTIVATIONS = ("relu", "gelu", "silu")


def activate(f: Function, activation: str, value: Value) -> Value:
    """The activation of every lane; "" leaves the value as it is."""
    if not activation:
        return value
    if activation == "relu":
        # A comparison that is false for NaN keeps NaN: max(x, 0) would drop it.
        return f.select(value < 0, f.zero(value.type), value)
    raise ValueError(activation)
