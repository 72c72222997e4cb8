"""Calls of every kind on small arrays, each next to the expression that a user of NumPy or PyTorch writes for it.

The names in an expression are: a, b, c (n x n), x, y, bias (n), batches p, q (4 x n x n), r (2 x 1 x n x n),
s (3 x n x n), t (n x 4 x n), w (b in float64), u and v (every second row and column of larger matrices), g, h
(bfloat16), out, wide (n x n in float32 and float64, which receive results).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gemmery.errors import RefusedError
from gemmery_lab.measure.timing import Sample, expression
from gemmery_lab.measure.work import Work, numpy_dtype


class Expressions(NamedTuple):
    """One kind of call as three expressions; that of PyTorch is "" where it has none."""

    ours: str
    numpy: str
    torch: str = ""


_TABLES = tomllib.loads(Path(__file__).with_name("calls.toml").read_text(encoding="utf-8"))
CALLS = {name: Expressions(**row) for name, row in _TABLES.items()}
ARRAYS = ("numpy", "torch")  # the kinds of arrays, which are also the rivals
Convert = Callable[[Any], Any]


def text(work: Work, library: str) -> str:
    """Return the expression of a call in "ours", "numpy" or "torch"; raise RefusedError where there is none."""
    expression: str = getattr(CALLS[work.call], library)
    if not expression:
        raise RefusedError(f"{library} has no such call on its arrays")
    return expression


def operands(work: Work, library: str) -> dict[str, Any]:
    """Return the arrays that the expression of a call names, the same in every process."""
    n, rng = work.n, np.random.default_rng(work.seed)
    shapes = {"a": (n, n), "b": (n, n), "c": (n, n), "x": (n,), "y": (n,), "bias": (n,)}
    shapes |= {"p": (4, n, n), "q": (4, n, n), "r": (2, 1, n, n), "s": (3, n, n), "t": (n, 4, n), "u": (2 * n, 2 * n)}
    shapes |= {"v": (2 * n, 2 * n), "g": (n, n), "h": (n, n)}
    arrays: dict[str, Any] = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    arrays["w"] = arrays["b"].astype(np.float64)
    arrays |= {name: arrays[name][::2, ::2] for name in "uv"}
    arrays |= {"out": np.zeros((n, n), np.float32), "wide": np.zeros((n, n))}
    names = compile(text(work, library), work.call, "eval").co_names
    if {"g", "h"} & set(names):
        arrays |= {name: arrays[name].astype(numpy_dtype("bf16")) for name in "gh"}
    return {name: array for name, array in arrays.items() if name in names}


def sample(work: Work, library: str, modules: Mapping[str, Any], convert: Convert = lambda array: array) -> Sample:
    """Return a sampler of a call in "ours", "numpy" or "torch"; `convert` makes a library's array of NumPy's.

    `modules` are the libraries by their names in the expressions: {"np": numpy}.
    """
    arrays = {name: convert(array) for name, array in operands(work, library).items()}
    return expression(text(work, library), {**modules, **arrays})


def result(work: Work, library: str, names: Mapping[str, Any]) -> Any:
    """Return the value of the expression of a call in "ours", "numpy" or "torch"."""
    values: list[Any] = []
    expression(f"values.append({text(work, library)})", {**names, "values": values})(1, 0)
    return values[0]


def error(work: Work, result: Any) -> float:
    """Return the largest error of a result, given as a NumPy array, over its bound.

    The bound is that of k products and the few operations around them, rounded in float32 and once more to the type of
    the result. NumPy's expression in float64 gives the reference, and of absolute values the size that the bound needs:
    no expression subtracts.
    """
    arrays = {name: np.asarray(array, np.float64) for name, array in operands(work, "numpy").items()}
    exact = _evaluated(work, arrays)
    if result.shape != exact.shape:
        return np.inf
    size = _evaluated(work, {name: np.abs(array) for name, array in arrays.items()})
    last = 2.0**-8 if CALLS[work.call].ours == "gm.matmul(g, h)" else 0.0
    bound = ((work.n + 4) * 2.0**-24 + last) * size
    difference = np.abs(np.asarray(result, np.float64) - exact)
    ratio = float(np.max(difference / bound, initial=0.0))
    return ratio if ratio <= np.inf else np.inf  # NaN is not


def _evaluated(work: Work, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    copies = {name: array.copy() for name, array in arrays.items()}
    return np.array(result(work, "numpy", {"np": np, **copies}))
