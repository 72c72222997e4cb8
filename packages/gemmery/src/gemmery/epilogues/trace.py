"""Trace a function of the sums of a product: it is called once with symbols, and what it does to them is the graph."""

# No `from __future__ import annotations` here: help() would show annotations as strings.
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gemmery.epilogues.functions_of_symbols import EpilogueSymbol, cast, maximum, row_maximum, silu
from gemmery.epilogues.graph import CONDITIONS, EpilogueGraph, GraphBuilder, GraphOperand, GraphOutput
from gemmery.errors import ArgumentError, brief
from gemmery.tuples import NamedTuple


class BoundEpilogue(NamedTuple):
    """An epilogue with its operands: what `epilogue=` of `gm.matmul` takes."""

    epilogue: "Epilogue"
    operands: Mapping[str, Any]


class Epilogue:
    """A function of the sums of a product and of operands, traced when it is first used."""

    # Recipes of products that came before (`api.finished`), where compiled code finds them: in the first slot.
    __slots__ = ("recipes", "__dict__", "__weakref__")  # noqa: RUF023

    recipes: "tuple[bytes, ...]"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__doc__, self.__name__ = function.__doc__, getattr(function, "__name__", "epilogue")
        if isinstance(function, np.ufunc):
            function = _spelled(function)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:  # of functions that are compiled
            name = self.__name__
            raise ArgumentError(f"epilogue {name} does not say what it takes: pass lambda c: {name}(c)") from error
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            raise ArgumentError(f"epilogue {self.__name__} takes *args or **options: name each operand")
        self.function = function
        self.parameters = tuple(p.name for p in parameters)
        self.by_name = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self._graphs: dict[int, EpilogueGraph] = {}
        self.recipes = ()

    def __repr__(self) -> str:
        return f"<epilogue {self.__name__}({', '.join(self.parameters)})>"

    def __call__(self, /, **operands: Any) -> BoundEpilogue:
        """Bind arrays or numbers to parameters by name: (m, n), (m, 1), (n,) or () of a product of m rows, n columns.

        Raises ArgumentError for a name that is no parameter.
        """
        for name in operands:
            if name not in self.parameters:
                raise ArgumentError(
                    f"epilogue {self.__name__} has no operand {name!r}; it has {', '.join(self.parameters)}"
                )
        # As BoundEpilogue(self, ...), which takes 0.15 us longer.
        return tuple.__new__(BoundEpilogue, (self, {**self.defaults, **operands} if self.defaults else operands))

    def graph(self, sums: int = 1) -> EpilogueGraph:
        """Return the graph of this function, whose first `sums` parameters are the sums of products.

        >>> Epilogue(lambda c, b: np.maximum(c + b, 0.5)).graph().text
        'sum:0;operand:b;add 0 1;constant:0x1.0000000000000p-1;maximum 2 3|4 matrix|b'

        Raises ArgumentError, with the line, for what cannot be traced.
        """
        if sums not in self._graphs:
            self._graphs[sums] = _traced(self, sums)
        return self._graphs[sums]


class GraphEpilogue(Epilogue):
    """An epilogue that is a graph already, such as a gradient."""

    def __init__(self, name: str, graph: EpilogueGraph, sums: int) -> None:
        self.__name__, self.function, self.defaults, self.recipes = name, self.__call__, {}, ()
        self.parameters = (*(f"sum.{i}" for i in range(sums)), *(operand.name for operand in graph.operands))
        self._graphs = {sums: graph}


def _spelled(ufunc: np.ufunc) -> Callable[..., Any]:
    """Return a ufunc as a function of its inputs, without its options."""
    return (lambda x: +ufunc(x)) if ufunc.nin == 1 else (lambda x, y: +ufunc(x, y))


def epilogue(function: Callable[..., Any]) -> Epilogue:
    """Make a function of the sums of a product an epilogue, which `gm.matmul` applies before it stores C.

    >>> import numpy as np, gemmery as gm
    >>> @gm.epilogue
    ... def gated(c, up, scale):
    ...     return scale * gm.relu(c) * up
    >>> gm.matmul(np.eye(2), [[1.0], [-1.0]], epilogue=gated(up=np.full((2, 1), 3.0), scale=0.5))
    array([[1.5],
           [0. ]])

    The function takes the sum first, or two for two weights, then operands, which are bound by name; it returns a
    number or a tuple of them. It is called once, with symbols.

    Raises ArgumentError for a function with *args or **options.
    """
    return function if isinstance(function, Epilogue) else Epilogue(function)


def _traced(traced: Epilogue, sums: int) -> EpilogueGraph:
    name, code = traced.__name__, getattr(traced.function, "__code__", None)
    line = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
    if len(traced.parameters) < sums:
        raise ArgumentError(f"{line}epilogue {name} needs a parameter for each of {sums} sums")
    builder = GraphBuilder()
    symbols = [EpilogueSymbol(builder, builder.add("sum", value=str(i))) for i in range(sums)]
    operands = traced.parameters[sums:]
    symbols += [EpilogueSymbol(builder, builder.add("operand", value=operand)) for operand in operands]
    pairs = list(zip(traced.parameters, symbols, strict=True))
    keywords = {parameter: symbol for parameter, symbol in pairs if parameter in traced.by_name}
    result = traced.function(*(symbol for parameter, symbol in pairs if parameter not in keywords), **keywords)
    results = result if isinstance(result, tuple) else (result,)
    outputs = []
    for place, output in enumerate(results):
        which = f"output {place} of epilogue {name}" if len(results) > 1 else f"the result of epilogue {name}"
        if not isinstance(output, EpilogueSymbol) or output.builder is not builder:
            raise ArgumentError(f"{line}{which} is {brief(output)}: return a number that depends on the sum")
        node = builder.nodes[output.number]
        if node.op in CONDITIONS:
            raise ArgumentError(f"{line}{which} is a condition: return gm.where(condition, 1, 0)")
        if output.number not in _reads_sums(builder):
            raise ArgumentError(f"{line}{which} does not depend on the sum: compute it without the product")
        outputs.append(GraphOutput(output.number, "matrix", node.value if node.op == "cast" else ""))
    if not outputs:
        raise ArgumentError(f"{line}epilogue {name} returns nothing: return a number that depends on the sum")
    return builder.graph(outputs, [GraphOperand(operand) for operand in operands])


def _reads_sums(builder: GraphBuilder) -> set[int]:
    """Return the nodes whose numbers depend on a sum."""
    reads = set[int]()
    for number, node in enumerate(builder.nodes):
        if node.op == "sum" or not reads.isdisjoint(node.inputs):
            reads.add(number)
    return reads


@epilogue
def swiglu(gate: Any, up: Any) -> Any:
    """Return silu(gate) * up of two products: `gm.matmul(x, (w_gate, w_up), epilogue=gm.swiglu)`."""
    return silu(gate) * up


def quantize_rows(format: str, top: float) -> Epilogue:  # noqa: A002 # as users say
    """Return the epilogue that makes codes of 8 bits of rows, and a factor a row, as `gm.quantize_rows` does."""

    def quantize_rows(c: Any) -> Any:
        factor = maximum(row_maximum(abs(c)) / top, 2.0**-126)
        return cast(c * (1.0 / factor), format), cast(factor, "float32")

    return Epilogue(quantize_rows)
