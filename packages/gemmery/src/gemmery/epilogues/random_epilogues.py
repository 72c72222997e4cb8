"""Random epilogues as text, for tests and `gemmery verify`: every operation, nested as a user would write it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemmery.epilogues import functions_of_symbols
from gemmery.epilogues.trace import Epilogue

_UNARY = (
    "-({})", "abs({})", "np.exp(np.minimum({}, 5))", "np.log(abs({}) + 0.25)", "np.tanh({})", "erf({})",
    "np.sqrt(abs({}) + 0.125)", "rsqrt(abs({}) + 0.5)", "sigmoid({})", "silu({})", "gelu({})", "relu({})",
    "rint({})", "cast({}, 'float16')", "cast({}, 'bfloat16')", "cast({}, 'float8_e4m3')", "({}) ** 2",
)  # fmt: skip
_BINARY = (
    "({} + {})", "({} - {})", "({} * {})", "({} / (1 + abs({})))", "np.maximum({}, {})", "minimum({}, {})",
)  # fmt: skip
_CONDITIONS = ("{} < {}", "{} <= {}", "({} > 0.5) & ~({} != 0)", "({} == 0) | ({} >= 1)")
_STATISTICS = ("row_sum({})", "row_sum_of_squares({})", "row_maximum({})", "row_log_sum_exp({})")


def expression(draw: np.random.Generator, names: Sequence[str], depth: int) -> str:
    """Return a random expression of parameters with these names, nested to a depth.

    >>> expression(np.random.default_rng(4), ("c",), 1)
    '(c * -1.64)'
    """
    if depth == 0:
        rest = ("column_index({})", "row_index({})") if draw.random() < 0.1 else ("{}",)
        if draw.random() < 0.15:
            return f"{draw.normal():.3}"
        return str(draw.choice(rest)).format(draw.choice(list(names)))
    below = [expression(draw, names, depth - 1) for _ in range(4)]
    kind = draw.random()
    if kind < 0.45:
        return str(draw.choice(_UNARY)).format(_with_symbol(below[0], names))
    if kind < 0.85:
        return str(draw.choice(_BINARY)).format(_with_symbol(below[0], names), below[1])
    condition = str(draw.choice(_CONDITIONS)).format(_with_symbol(below[0], names), _with_symbol(below[1], names))
    return f"where({condition}, {below[2]}, {below[3]})"


def _with_symbol(text: str, names: Sequence[str]) -> str:
    """Return an expression that is a symbol: numbers alone are no epilogue."""
    return text if any(name in text for name in names) else f"({names[0]} + {text})"


def random_epilogue(draw: np.random.Generator, operands: Sequence[str] = (), sums: int = 1) -> tuple[str, Epilogue]:
    """Return the text of a random epilogue with one to three results, some of them statistics of rows, and itself."""
    names = (*("cd"[:sums]), *operands)
    parts = [f"c + ({expression(draw, names, int(draw.integers(1, 4)))})" for _ in range(int(draw.integers(1, 3)))]
    parts[0] = " + ".join((*names, f"({parts[0]})"))
    if draw.random() < 0.3:
        statistic = str(draw.choice(_STATISTICS)).format(_with_symbol(expression(draw, names, 1), names) + " + c")
        parts.append(statistic if draw.random() < 0.5 else f"c / (1 + abs({statistic}))")
    text = f"lambda {', '.join(names)}: ({', '.join(parts)},)"
    return text, of_text(text)


def of_text(text: str) -> Epilogue:
    """Return the epilogue that the text of a lambda spells."""
    return Epilogue(eval(text, {**vars(functions_of_symbols)}))  # noqa: S307 # of `random_epilogue`
