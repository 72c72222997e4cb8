"""An epilogue in NumPy, in higher precision than any kernel's, and the largest error that a kernel may make.

The error follows the graph: each operation passes on those of its inputs by its derivative over the range in which they
lie, and adds its own rounding. The sums begin with the bound of their product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gemmery import dtypes
from gemmery.dtypes import Array
from gemmery.epilogues.graph import COMPARISONS, EpilogueGraph, Node
from gemmery.tuples import NamedTuple

# Roundings, in units of the arithmetic, that a kernel's function may be off in relative terms; other operations: 1.
ROUNDINGS = {
    "exp": 4.0, "log": 4.0, "tanh": 8.0, "erf": 8.0, "sqrt": 2.0, "rsqrt": 4.0, "sigmoid": 8.0, "silu": 8.0,
    "gelu": 16.0, "divide": 2.0,
}  # fmt: skip
# What functions may be off besides where they are approximate: so many roundings of their argument, and gelu of results
# of bfloat16 a share of itself, 1/8 of the rounding that follows.
_APPROXIMATED, _APPROXIMATE, _SHORT_GELU = ("gelu", "silu", "sigmoid"), 16.0, 2.0**-11
_EXACT = ("negative", "absolute", "relu", "rint", "minimum", "maximum", "where", "and", "or", "not", *COMPARISONS)
_SLOPES = {"tanh": 1.0, "erf": 2 / math.sqrt(math.pi), "sigmoid": 0.25, "silu": 1.1, "gelu": 1.13}  # the largest
_LARGEST = {row.name: row.largest for row in dtypes.DTYPES if row.largest}  # to which casts take what is larger


class Estimate(NamedTuple):
    """The numbers of a node or an output, and how far a kernel's may be from them."""

    value: Array
    error: Array


def evaluate(
    graph: EpilogueGraph,
    sums: Sequence[Array],
    operands: Mapping[str, Any],
    errors: Sequence[Array | float] = (0.0, 0.0),
    unit: float = 0.0,
    approximate: bool | None = None,
) -> list[Estimate]:
    """Return each output of a graph, (..., m, n) or (..., m, 1), before it is rounded to its type in memory.

    `sums` are arrays of float64 or longdouble, in which all is computed; `errors` bound how far a kernel's sums are
    from them, and `unit` is the unit roundoff of its arithmetic. An operand is a number or an array that broadcasts.
    Where functions may be `approximate`, as those of results of 16 bits are on a device, their errors grow with their
    arguments.

    >>> from gemmery.epilogues.graph import parse
    >>> evaluate(parse("sum:0;relu 0|1 matrix|"), [np.array([[-1.0, 2.0]])], {})[0].value
    array([[0., 2.]])
    """
    shape, wide = sums[0].shape, sums[0].dtype
    real = sums[0].real.dtype
    short = all(output.dtype and dtypes.get(output.dtype).size <= 2 for output in graph.outputs)
    loose = 0.0 if not (short if approximate is None else approximate) or unit == 0 else _APPROXIMATE * unit
    shorter = _SHORT_GELU * bool(loose) * (graph.outputs[0].dtype == "bf16")
    nodes: list[Estimate] = []
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            if node.op == "sum":
                total = sums[int(node.value)]
                nodes.append(Estimate(total, np.broadcast_to(np.asarray(errors[int(node.value)], real), shape)))
            elif node.op in _LEAVES:
                value = np.asarray(_leaf(node, operands, shape), wide)
                # A kernel computes with a constant rounded to float32, if that is its arithmetic.
                rounds = node.op == "constant" and unit > 2.0**-50
                error = np.abs(value - np.float32(value)) if rounds else np.zeros_like(value.real)
                nodes.append(Estimate(value, error))
            else:
                inputs = [nodes[i] for i in node.inputs]
                result = _apply(node, inputs, unit, shape)
                if node.op in _APPROXIMATED and loose:
                    loss = loose * (np.abs(inputs[0].value) + inputs[0].error)
                    loss += shorter * (node.op == "gelu") * (np.abs(result.value) + result.error)
                    result = result._replace(error=result.error + np.where(np.isfinite(loss), loss, 0))
                nodes.append(result)
        shapes = {"matrix": shape, "column": (*shape[:-1], 1)}
        return [
            Estimate(*(np.broadcast_to(part, shapes[output.kind]) for part in nodes[output.node]))
            for output in graph.outputs
        ]


_LEAVES = ("operand", "constant", "row_index", "column_index")


def _leaf(node: Node, operands: Mapping[str, Any], shape: tuple[int, ...]) -> Any:
    if node.op == "operand":
        return operands[node.value]
    if node.op == "constant":
        return node.number
    return np.arange(shape[-2])[:, None] if node.op == "row_index" else np.arange(shape[-1])[None, :]


def _apply(node: Node, inputs: list[Estimate], unit: float, shape: tuple[int, ...]) -> Estimate:
    """Return the result of an operation on estimates."""
    values, errors = [x.value for x in inputs], [x.error for x in inputs]
    if node.op.startswith("row_"):
        return _statistic(node.op, np.broadcast_to(values[0], shape), np.broadcast_to(errors[0], shape), unit)
    value = _compute(node, *values)
    unsure = np.logical_or.reduce(np.broadcast_arrays(*(own > 0 for own in errors)))
    error = np.where(unsure, _passed_on(node.op, value, values, errors), 0)
    error = np.where(np.isnan(error), np.inf, error)
    if node.op == "cast":
        row = dtypes.get(node.value)
        most = np.minimum(np.abs(value) + error, _LARGEST.get(node.value, np.inf))
        if row.kind == "f":
            error = error + 2 * row.unit_roundoff * most * (error > 0) + _tiny(row) * (error > 0)
        else:
            error = np.where(error > 0, np.ceil(error), 0)
    elif node.op not in _EXACT:
        own = ROUNDINGS.get(node.op, 1.0) * unit * (np.abs(value) + error)
        # An exponential that underflows is off by half of the least number, which silu and gelu multiply by up to 750.
        least = 1024 * (2.0**-149 if unit > 2.0**-50 else 2.0**-1074)
        error = error + np.where(np.isfinite(value) & np.isfinite(error) & (unit > 0), own + least, 0)
    return Estimate(value, np.asarray(error))


def _compute(node: Node, *x: Array) -> Array:
    """Return an operation on arrays; conditions are 0 and 1."""
    op = node.op
    if op in FUNCTIONS:
        return np.asarray(FUNCTIONS[op](*x), x[0].dtype)
    if op == "cast":
        return rounded(x[0], node.value)
    return np.asarray(getattr(np, _NUMPYS.get(op, op))(*x), x[-1].dtype)


def _wide_erf(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x.astype(np.float64)))


def _gelu(x: Array) -> Array:
    """Return x erfc(-x / sqrt(2)) / 2, where what float64 drops of the argument is added by the slope of erfc."""
    exact = np.asarray(-x / np.sqrt(np.asarray(2, x.dtype)))
    near = exact.astype(np.float64)
    dropped = np.where(np.isfinite(exact), exact - near, 0)
    above = np.vectorize(math.erfc, otypes=[np.float64])(near)
    return np.asarray(x * 0.5 * (above - 2 / math.sqrt(math.pi) * np.exp(-exact * exact) * dropped))


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x < 0, small, 1) / (1 + small))


_NUMPYS = {"and": "logical_and", "or": "logical_or", "not": "logical_not"}
FUNCTIONS: dict[str, Any] = {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "erf": _wide_erf,
    "relu": lambda x: np.where(x < 0, 0, x),
    "where": lambda condition, x, y: np.where(condition != 0, x, y),
}


def rounded(x: Array, name: str) -> Array:
    """Return numbers rounded to nearest, ties to even, to the values of an element type."""
    row = dtypes.get(name)
    if row.kind == "i":
        return np.where(np.isnan(x), 0, np.clip(np.rint(x), -128, 127))
    if row.unit_roundoff < 2.0**-52 or name == "f64":
        return x.astype(np.float64).astype(x.dtype)
    _, exponent = np.frexp(x)
    step = np.ldexp(np.asarray(1, x.dtype), np.maximum(exponent - 1, row.normal) - row.fraction)
    nearest = np.where(np.isfinite(x), np.rint(x / step) * step, x)
    if name in _LARGEST:
        return np.asarray(np.clip(nearest, -_LARGEST[name], _LARGEST[name]))
    largest = (2 - 2 * row.unit_roundoff) * 2.0 ** (1 - row.normal)
    return np.asarray(np.where(np.abs(nearest) > largest, np.copysign(np.inf, x), nearest))


def _tiny(row: dtypes.DType) -> float:
    return row.unit_roundoff * 2.0 ** (row.normal + 1)


def _passed_on(op: str, value: Array, x: list[Array], e: list[Array]) -> Any:
    """Return how far a result may be from its value, whose inputs are up to `e` from theirs, before it is rounded."""
    if op in ("add", "subtract"):
        return e[0] + e[1]
    if op == "multiply":
        return np.abs(x[0]) * e[1] + np.abs(x[1]) * e[0] + e[0] * e[1]
    if op == "divide":
        far = np.abs(x[1]) - e[1]
        numerator = e[0] + np.abs(value) * e[1]
        return np.where(numerator > 0, np.where(far > 0, numerator / far, np.inf), 0)
    if op in ("minimum", "maximum"):
        return np.maximum(e[0], e[1])
    if op == "where":
        apart = np.abs(x[1] - x[2])
        return np.where(e[0] > 0, apart, 0) + np.maximum(e[1], e[2])
    if op in COMPARISONS:  # 1: the condition may be another one, since the numbers are closer than their errors
        close = e[0] + e[1]
        return np.where((close > 0) & ~(np.abs(x[0] - x[1]) > close), 1.0, 0.0)
    if op in ("and", "or", "not"):
        return np.max(np.broadcast_arrays(*e), axis=0)
    if op == "exp":
        return np.abs(value) * np.expm1(e[0])
    if op in ("log", "sqrt", "rsqrt"):
        low = x[0] - e[0]
        if op == "log":
            return np.where(low > 0, -np.log1p(-e[0] / x[0]), np.where(e[0] > 0, np.inf, 0))
        if op == "sqrt":  # of a number that may be negative: NaN or not
            return np.where(low >= 0, np.minimum(e[0] / np.sqrt(x[0]), np.sqrt(e[0])), np.where(e[0] > 0, np.inf, 0))
        return np.where(low > 0, 1 / np.sqrt(low) - value, np.where(e[0] > 0, np.inf, 0))
    if op == "rint":
        return np.where(e[0] > 0, np.ceil(e[0]) + 0.0, 0.0)
    return e[0] * _SLOPES.get(op, 1.0)


def _statistic(op: str, value: Array, error: Array, unit: float) -> Estimate:
    """Return a statistic of rows."""
    n = value.shape[-1]
    if op == "row_maximum":
        return Estimate(np.max(value, -1, keepdims=True, initial=-np.inf), np.max(error, -1, keepdims=True, initial=0))
    if op == "row_log_sum_exp":
        most = np.max(value, -1, keepdims=True, initial=-np.inf)
        finite = np.where(np.isfinite(most), most, 0)
        total = np.exp(value - finite).sum(-1, keepdims=True)
        result = np.log(total) + finite
        own = np.max(error, -1, keepdims=True, initial=0)
        apart = np.where(np.isfinite(value), np.abs(finite - value), 0)
        share = np.where(np.isfinite(value), np.exp(value - finite), 0) * apart
        return Estimate(result, own + unit * (n + 16 + np.abs(result) + share.sum(-1, keepdims=True)))
    terms = value * value if op == "row_sum_of_squares" else value
    each = 2 * np.abs(value) * error + error * error if op == "row_sum_of_squares" else error
    size = np.abs(terms).sum(-1, keepdims=True) + each.sum(-1, keepdims=True)
    return Estimate(terms.sum(-1, keepdims=True), each.sum(-1, keepdims=True) + (n + 1) * unit * size)
