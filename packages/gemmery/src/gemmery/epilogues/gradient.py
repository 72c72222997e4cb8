"""The gradient of an epilogue, as another one: what its sums and operands contribute to a loss, element by element."""

from __future__ import annotations

import math
from collections.abc import Collection

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
    builder = _Derivatives(graph)
    order = [*(f"{SUM}{i}" for i in range(graph.sums)), *(operand.name for operand in graph.operands)]
    numbers = {
        f"{SUM}{node.value}" if node.op == "sum" else node.value: number
        for number, node in enumerate(graph.nodes)
        if node.op in ("sum", "operand")
    }
    adjoints = builder.reverse()
    reached = tuple(name for name in order if numbers.get(name) in adjoints and (names is None or name in names))
    outputs = [GraphOutput(adjoints[numbers[name]]) for name in reached]
    gradients = (
        GraphOperand(f"{COTANGENT}{place}", "column" if output.kind == "column" else "")
        for place, output in enumerate(graph.outputs)
    )
    return builder.graph(outputs, (*graph.operands, *gradients)), reached


class _Derivatives(GraphBuilder):
    """The nodes of a graph and those of the sums' chain rule, from the outputs backward."""

    def __init__(self, graph: EpilogueGraph) -> None:
        super().__init__(graph.nodes)
        self._graph, self._kinds = graph, graph.kinds()
        self._adjoints: dict[int, int] = {}

    def reverse(self) -> dict[int, int]:
        """Return for each node of the graph that outputs depend on the node of its gradient."""
        for place, output in enumerate(self._graph.outputs):
            self._accumulate(output.node, self.add("operand", value=f"{COTANGENT}{place}"))
        for number in range(len(self._graph.nodes) - 1, -1, -1):
            if number in self._adjoints:
                self._step(number, self._adjoints[number])
        return self._adjoints

    def _accumulate(self, number: int, term: int) -> None:
        before = self._adjoints.get(number)
        self._adjoints[number] = term if before is None else self.add("add", before, term)

    def _times(self, x: int, number: float) -> int:
        return self.add("multiply", x, self.constant(number))

    def _step(self, number: int, g: int) -> None:
        """Add the gradient of a node to those of its inputs."""
        op, inputs, _ = self.nodes[number]
        add, unity = self.add, self.constant(1.0)
        if op in STATISTICS:
            x = inputs[0]
            # What reads a statistic in each column is added up; a gradient that came as a column is one number a row.
            g = g if self._is_column(g) else add("row_sum", g)
            if op == "row_sum":
                self._accumulate(x, g)
            elif op == "row_sum_of_squares":
                self._accumulate(x, add("multiply", self._times(g, 2.0), x))
            elif op == "row_log_sum_exp":
                self._accumulate(x, add("multiply", g, add("exp", add("subtract", x, number))))
            else:
                largest = add("where", add("equal", x, number), unity, self.constant(0.0))
                self._accumulate(x, add("multiply", g, add("divide", largest, add("row_sum", largest))))
            return
        if op == "where":
            nothing = self.constant(0.0)
            self._accumulate(inputs[1], add("where", inputs[0], g, nothing))
            self._accumulate(inputs[2], add("where", inputs[0], nothing, g))
        elif op in ("minimum", "maximum"):
            x, y = inputs
            wins = "less" if op == "minimum" else "greater"
            half, nothing = self._times(g, 0.5), self.constant(0.0)
            equal = add("equal", x, y)
            for one_side, other in ((x, y), (y, x)):
                share = add("where", add(wins, one_side, other), g, add("where", equal, half, nothing))
                self._accumulate(one_side, share)
        elif op in ("add", "subtract"):
            self._accumulate(inputs[0], g)
            self._accumulate(inputs[1], g if op == "add" else add("negative", g))
        elif op == "multiply":
            x, y = inputs
            self._accumulate(x, add("multiply", g, y))
            self._accumulate(y, add("multiply", g, x))
        elif op == "divide":
            x, y = inputs
            quotient = add("divide", g, y)
            self._accumulate(x, quotient)
            self._accumulate(y, add("negative", add("multiply", quotient, number)))
        elif len(inputs) == 1:
            slope = self._slope(op, inputs[0], number, g)
            if slope is not None:
                self._accumulate(inputs[0], slope)

    def _slope(self, op: str, x: int, y: int, g: int) -> int | None:
        """Return g times the derivative of y = op(x); None where that is 0."""
        add, unity = self.add, self.constant(1.0)
        if op in ("cast",):
            return g
        if op == "negative":
            return add("negative", g)
        if op == "exp":
            return add("multiply", g, y)
        if op == "log":
            return add("divide", g, x)
        if op == "sqrt":
            return add("divide", self._times(g, 0.5), y)
        if op == "rsqrt":
            return add("multiply", self._times(g, -0.5), add("multiply", y, add("multiply", y, y)))
        if op == "tanh":
            return add("multiply", g, add("subtract", unity, add("multiply", y, y)))
        if op == "sigmoid":
            return add("multiply", g, add("multiply", y, add("subtract", unity, y)))
        if op == "erf":
            return add("multiply", self._times(g, 2 / math.sqrt(math.pi)), self._bell(x, -1.0))
        if op == "silu":
            s = add("sigmoid", x)
            return add("multiply", g, add("add", s, add("multiply", y, add("subtract", unity, s))))
        if op == "gelu":
            below = self._times(add("add", unity, add("erf", self._times(x, math.sqrt(0.5)))), 0.5)
            density = self._times(self._bell(x, -0.5), 1 / math.sqrt(2 * math.pi))
            return add("multiply", g, add("add", below, add("multiply", x, density)))
        nothing = self.constant(0.0)
        if op == "relu":
            return add("where", add("greater", x, nothing), g, nothing)
        if op == "absolute":
            negative = add("where", add("less", x, nothing), add("negative", g), nothing)
            return add("where", add("greater", x, nothing), g, negative)
        return None  # rint, and conditions

    def _bell(self, x: int, factor: float) -> int:
        """Return exp(factor * x * x)."""
        return self.add("exp", self._times(self.add("multiply", x, x), factor))

    def _is_column(self, number: int) -> bool:
        """Return True for a node with one number a row."""
        columns = {f"{COTANGENT}{i}" for i, output in enumerate(self._graph.outputs) if output.kind == "column"}
        columns |= {operand.name for operand in self._graph.operands if operand.kind == "column"}
        operands = tuple(GraphOperand(name, "column") for name in sorted(columns))
        others = {node.value for node in self.nodes if node.op == "operand"} - columns
        known = EpilogueGraph(tuple(self.nodes), (), (*operands, *(GraphOperand(name, "matrix") for name in others)))
        return known.kinds()[number] == "column"
