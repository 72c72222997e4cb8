"""The gradient of an epilogue, as another one: what its sums and operands contribute to a loss, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from gemmery.epilogues.functions_of_symbols import EpilogueSymbol, erf, row_sum, sigmoid, where
from gemmery.epilogues.graph import STATISTICS, EpilogueGraph, GraphBuilder, GraphOperand, GraphOutput

# The gradients of outputs, "gradient.0", "gradient.1", and the sums, by names that no parameter can have.
COTANGENT, SUM = "gradient.", "sum."


def gradient(graph: EpilogueGraph, names: Collection[str] | None = None) -> tuple[EpilogueGraph, tuple[str, ...]]:
    """Return the graph of the gradients, and the names of its outputs: "sum.0", "sum.1", then operands, or some.

    Its sums are those of `graph`, its operands those of `graph` and the gradients of the outputs. Each output is
    (m, n): that of an operand of another shape must be added over the dimensions in which it was repeated. Where the
    function has no derivative, it is PyTorch's: 0 for relu and absolute at 0, halves for the minimum and maximum of
    equal numbers, 1 for casts, 0 for rint. A sum or operand that the outputs do not depend on is left out.

    >>> from gemmery.epilogues.graph import parse
    >>> derived, outputs = gradient(parse("sum:0;operand:b;add 0 1;relu 2|3 matrix|b"))
    >>> outputs
    ('sum.0', 'b')
    """
    builder = GraphBuilder(graph.nodes)
    gradients = tuple(
        GraphOperand(f"{COTANGENT}{place}", "column" if output.kind == "column" else "")
        for place, output in enumerate(graph.outputs)
    )
    operands = (*graph.operands, *gradients)
    adjoints = _adjoints(graph, builder, {operand.name for operand in operands if operand.kind == "column"})
    order = [*(f"{SUM}{i}" for i in range(graph.sums)), *(operand.name for operand in graph.operands)]
    numbers = {
        f"{SUM}{node.value}" if node.op == "sum" else node.value: number
        for number, node in enumerate(graph.nodes)
        if node.op in ("sum", "operand")
    }
    reached = tuple(name for name in order if numbers.get(name) in adjoints and (names is None or name in names))
    return builder.graph([GraphOutput(adjoints[numbers[name]].number) for name in reached], operands), reached


def _adjoints(graph: EpilogueGraph, builder: GraphBuilder, columns: Collection[str]) -> dict[int, Any]:
    """Return for each node of the graph that outputs depend on the symbol of its gradient, from the outputs backward.

    `columns` are the operands that have one number a row.
    """
    symbols: list[Any] = [EpilogueSymbol(builder, number) for number in range(len(graph.nodes))]
    adjoints: dict[int, Any] = {}

    def accumulate(number: int, term: Any) -> None:
        adjoints[number] = adjoints[number] + term if number in adjoints else term

    def is_column(number: int) -> bool:
        names = {node.value for node in builder.nodes if node.op == "operand"}
        operands = tuple(GraphOperand(name, "column" if name in columns else "") for name in names)
        return EpilogueGraph(tuple(builder.nodes), (), operands).kinds()[number] == "column"

    for place, output in enumerate(graph.outputs):
        accumulate(output.node, EpilogueSymbol(builder, builder.add("operand", value=f"{COTANGENT}{place}")))
    for number, (op, inputs, _) in reversed(list(enumerate(graph.nodes))):
        if number not in adjoints or op not in _TERMS:
            continue
        g = adjoints[number]
        # What reads a statistic in each column is added up; a gradient that came as a column is one number a row.
        g = row_sum(g) if op in STATISTICS and not is_column(g.number) else g
        terms = _TERMS[op](g, symbols[number], *(symbols[i] for i in inputs))
        for i, term in zip(inputs, terms if isinstance(terms, tuple) else (terms,), strict=True):
            if term is not None:
                accumulate(i, term)
    return adjoints


def _divided(g: Any, y: Any, a: Any, b: Any) -> tuple[Any, Any]:
    quotient = g / b
    return quotient, -(quotient * y)


def _shared(g: Any, first: Any, second: Any, both: Any) -> tuple[Any, Any]:
    """Return the gradients of two numbers of which one is taken, or of `both` a half each."""
    half = where(both, g * 0.5, 0.0)
    return where(first, g, half), where(second, g, half)


def _of_silu(g: Any, y: Any, x: Any) -> Any:
    share = sigmoid(x)
    return g * (share + y * (1.0 - share))


def _of_gelu(g: Any, y: Any, x: Any) -> Any:
    below = (1.0 + erf(x * math.sqrt(0.5))) * 0.5
    return g * (below + x * (np.exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))))


def _of_maximum(g: Any, y: Any, x: Any) -> Any:
    largest = where(x == y, 1.0, 0.0)
    return g * (largest / row_sum(largest))


# Of y = op(x) or op(a, b): g times the derivative by each input, from g, y and the inputs; 0 of other operations.
_TERMS: dict[str, Callable[..., Any]] = {
    "add": lambda g, y, a, b: (g, g),
    "subtract": lambda g, y, a, b: (g, -g),
    "multiply": lambda g, y, a, b: (g * b, g * a),
    "divide": _divided,
    "minimum": lambda g, y, a, b: _shared(g, a < b, b < a, a == b),
    "maximum": lambda g, y, a, b: _shared(g, a > b, b > a, a == b),
    "where": lambda g, y, condition, a, b: (None, where(condition, g, 0.0), where(condition, 0.0, g)),
    "cast": lambda g, y, x: g,
    "negative": lambda g, y, x: -g,
    "absolute": lambda g, y, x: where(x > 0.0, g, where(x < 0.0, -g, 0.0)),
    "relu": lambda g, y, x: where(x > 0.0, g, 0.0),
    "exp": lambda g, y, x: g * y,
    "log": lambda g, y, x: g / x,
    "sqrt": lambda g, y, x: g * 0.5 / y,
    "rsqrt": lambda g, y, x: g * -0.5 * (y * (y * y)),
    "tanh": lambda g, y, x: g * (1.0 - y * y),
    "sigmoid": lambda g, y, x: g * (y * (1.0 - y)),
    "erf": lambda g, y, x: g * (2 / math.sqrt(math.pi)) * np.exp(x * x * -1.0),
    "silu": _of_silu,
    "gelu": _of_gelu,
    "row_sum": lambda g, y, x: g,
    "row_sum_of_squares": lambda g, y, x: g * 2.0 * x,
    "row_log_sum_exp": lambda g, y, x: g * np.exp(x - y),
    "row_maximum": _of_maximum,
}
