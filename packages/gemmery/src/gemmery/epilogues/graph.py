"""What is done to the sums of a product, as a graph: operations in order, outputs, and the operands they read.

A node names an operation, and the nodes that it reads by their numbers, which are smaller than its own: a backend
lowers `graph.nodes` in one loop, in float32 or float64. A graph is a value: equal graphs have equal `text`, which keys
kernels, and from which `parse` makes the graph again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from gemmery.tuples import NamedTuple

LEAVES = ("sum", "operand", "constant", "row_index", "column_index")
UNARY = (
    "negative", "absolute", "exp", "log", "tanh", "erf", "sqrt", "rsqrt", "sigmoid", "silu", "gelu", "relu", "rint",
    "cast",
)  # fmt: skip
BINARY = ("add", "subtract", "multiply", "divide", "minimum", "maximum")
COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
LOGICAL = ("and", "or", "not")
# Of a row of C: each reads the numbers of all its columns, and is added in a fixed order of them.
STATISTICS = ("row_sum", "row_sum_of_squares", "row_maximum", "row_log_sum_exp")
CONDITIONS = (*COMPARISONS, *LOGICAL)  # nodes that are true or false
INPUTS = {  # of an operation
    **dict.fromkeys(LEAVES, 0),
    **dict.fromkeys((*UNARY, *STATISTICS, "not"), 1),
    **dict.fromkeys((*BINARY, *COMPARISONS, "and", "or"), 2),
    "where": 3,
}
KINDS = ("number", "column", "row", "matrix")  # shapes (), (m, 1), (n,), (m, n) of operands, sets of nodes and outputs


class Node(NamedTuple):
    """An operation, the numbers of the nodes that it reads, and what it needs besides.

    `value` is, of a sum "0", or "1" for that of the second weight; of an operand its name; of a constant its number as
    `float.hex` writes it; of a cast gemmery's name of the type to which it rounds. The number goes on in the type in
    which the graph is computed. `row_index` and `column_index` are those of the element in its matrix, as numbers.
    `where` reads (condition, then, otherwise). NaN passes through minimum, maximum and relu; comparisons with it are
    false, except not_equal.
    """

    op: str
    inputs: tuple[int, ...] = ()
    value: str = ""

    @property
    def number(self) -> float:
        """Return the number of a constant."""
        return float.fromhex(self.value)


class GraphOperand(NamedTuple):
    """An array or a number that a graph reads; kind and type are "" until arrays are bound to it."""

    name: str
    kind: str = ""
    dtype: str = ""  # of its elements in memory, gemmery's name; a "number" is passed as the type of the arithmetic


class GraphOutput(NamedTuple):
    """A result: a "matrix" (m, n), or a "column" (m, 1) with a number for each row."""

    node: int
    kind: str = "matrix"
    dtype: str = ""  # "": the type of the product's result


class EpilogueGraph(NamedTuple):
    """What follows the sums of a product: nodes in order, outputs, and operands in the order of the parameters."""

    nodes: tuple[Node, ...]
    outputs: tuple[GraphOutput, ...]
    operands: tuple[GraphOperand, ...] = ()

    @property
    def text(self) -> str:
        """Return the graph on one line, a key of kernels.

        >>> EpilogueGraph((Node("sum", (), "0"), Node("relu", (0,))), (GraphOutput(1),)).text
        'sum:0;relu 0|1 matrix|'
        """
        nodes = (" ".join((f"{op}:{value}" if value else op, *map(str, inputs))) for op, inputs, value in self.nodes)
        outputs = (" ".join((str(node), kind, dtype)).strip() for node, kind, dtype in self.outputs)
        operands = (" ".join(operand).strip() for operand in self.operands)
        return f"{';'.join(nodes)}|{';'.join(outputs)}|{';'.join(operands)}"

    @property
    def sums(self) -> int:
        """Return the number of products whose sums are read: 1, or 2 with a second weight."""
        return 1 + any(node.op == "sum" and node.value == "1" for node in self.nodes)

    @property
    def statistics(self) -> tuple[int, ...]:
        """Return the nodes that are statistics of rows, in order."""
        return tuple(number for number, node in enumerate(self.nodes) if node.op in STATISTICS)

    @property
    def after_rows(self) -> frozenset[int]:
        """Return the nodes that read statistics, by whatever way: they wait for whole rows of sums."""
        late = set[int]()
        for number, node in enumerate(self.nodes):
            if any(i in late or self.nodes[i].op in STATISTICS for i in node.inputs):
                late.add(number)
        return frozenset(late)

    def kinds(self) -> tuple[str, ...]:
        """Return for each node over what it varies, one of KINDS; an operand without a kind counts as a matrix."""
        operands = {operand.name: operand.kind or "matrix" for operand in self.operands}
        kinds: list[str] = []
        own = {"sum": "matrix", "constant": "number", "row_index": "column", "column_index": "row"}
        for op, inputs, value in self.nodes:
            if op in STATISTICS:
                kinds.append("column")
            elif op == "operand":
                kinds.append(operands[value])
            elif op in own:
                kinds.append(own[op])
            else:
                read = {kinds[i] for i in inputs} - {"number"}
                kinds.append("number" if not read else read.pop() if len(read) == 1 else "matrix")
        return tuple(kinds)

    def bound(self, operands: Iterable[GraphOperand], dtypes: Iterable[str] = ()) -> EpilogueGraph:
        """Return the graph with the kinds and types of operands, and types of outputs where they have none."""
        types = tuple(dtypes) or ("",) * len(self.outputs)
        outputs = (output._replace(dtype=output.dtype or own) for output, own in zip(self.outputs, types, strict=True))
        return self._replace(operands=tuple(operands), outputs=tuple(outputs))


def parse(text: str) -> EpilogueGraph:
    """Return the graph with this text.

    >>> parse("sum:0;operand:u;add 0 1|2 matrix bf16|u matrix f32").outputs
    (GraphOutput(node=2, kind='matrix', dtype='bf16'),)
    """
    nodes, outputs, operands = (part.split(";") if part else [] for part in text.split("|"))

    def node(words: list[str]) -> Node:
        op, _, value = words[0].partition(":")
        return Node(op, tuple(map(int, words[1:])), value)

    return EpilogueGraph(
        tuple(node(words.split(" ")) for words in nodes),
        tuple(GraphOutput(int(words.split(" ")[0]), *words.split(" ")[1:]) for words in outputs),
        tuple(GraphOperand(*words.split(" ")) for words in operands),
    )


class GraphBuilder:
    """A graph under construction: a node that is there already is not added again."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes: list[Node] = []
        self._numbers: dict[Node, int] = {}
        for node in nodes:
            self.add(node.op, *node.inputs, value=node.value)

    def add(self, op: str, *inputs: int, value: str = "") -> int:
        """Return the number of a node."""
        assert len(inputs) == INPUTS[op], (op, inputs)
        node = Node(op, inputs, value)
        if node not in self._numbers:
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self._numbers[node]

    def constant(self, number: float) -> int:
        """Return the number of the node of a constant."""
        return self.add("constant", value=float(number).hex())

    def graph(self, outputs: Iterable[GraphOutput], operands: Iterable[GraphOperand] = ()) -> EpilogueGraph:
        """Return the graph of the nodes that outputs need, and of the operands that these read."""
        outputs = tuple(outputs)
        used, waiting = set[int](), [output.node for output in outputs]
        while waiting:
            number = waiting.pop()
            if number not in used:
                used.add(number)
                waiting += self.nodes[number].inputs
        new = {number: place for place, number in enumerate(sorted(used))}
        nodes = tuple(
            node._replace(inputs=tuple(new[i] for i in node.inputs))
            for number, node in enumerate(self.nodes)
            if number in new
        )
        names = {node.value for node in nodes if node.op == "operand"}
        return EpilogueGraph(
            nodes,
            tuple(output._replace(node=new[output.node]) for output in outputs),
            tuple(operand for operand in operands if operand.name in names),
        )


@cache
def usual(name: str, dtype: str = "") -> EpilogueGraph:
    """Return the graph of the epilogue that a Problem names by its steps, those of `bias=` and `activation=`.

    >>> usual("bias+gelu", "f16").text
    'sum:0;operand:bias;add 0 1;gelu 2|3 matrix f16|bias row'
    """
    builder = GraphBuilder()
    node = builder.add("sum", value="0")
    for step in filter(None, name.split("+")):
        if step == "bias":
            node = builder.add("add", node, builder.add("operand", value=step))
        else:
            node = builder.add(step, node)
    return builder.graph([GraphOutput(node, "matrix", dtype)], [GraphOperand("bias", "row")])


def by_sums_and_maxima(graph: EpilogueGraph) -> EpilogueGraph:
    """Return the graph with its other statistics as formulas of `row_sum` and `row_maximum`.

    log(sum(exp(x))) is the largest x plus the logarithm of sum(exp(x - largest)), where a largest x that is infinite
    counts as 0 in both.
    """
    builder, new = GraphBuilder(), list[int]()
    for op, inputs, value in graph.nodes:
        read = tuple(new[i] for i in inputs)
        if op == "row_sum_of_squares":
            new.append(builder.add("row_sum", builder.add("multiply", *read, *read)))
        elif op == "row_log_sum_exp":
            largest = builder.add("row_maximum", *read)
            finite = builder.add("less", builder.add("absolute", largest), builder.constant(float("inf")))
            start = builder.add("where", finite, largest, builder.constant(0.0))
            total = builder.add("row_sum", builder.add("exp", builder.add("subtract", *read, start)))
            new.append(builder.add("add", builder.add("log", total), start))
        else:
            new.append(builder.add(op, *read, value=value))
    outputs = (output._replace(node=new[output.node]) for output in graph.outputs)
    return builder.graph(outputs, graph.operands)
