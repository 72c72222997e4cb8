"""Trace a function of the sums of a product: it is called once with symbols, and what it does to them is the graph.

Symbols take Python's operators, NumPy's ufuncs, `np.where`, `np.clip`, functions of PyTorch with the names of
operations, and the functions below. What has no node (a branch on a value, an array in a closure) is refused with its
line.
"""

# No `from __future__ import annotations` here: help() would show annotations as strings.
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from gemmery import dtypes
from gemmery.epilogues.graph import (
    BINARY,
    COMPARISONS,
    CONDITIONS,
    EpilogueGraph,
    GraphBuilder,
    GraphOperand,
    GraphOutput,
)
from gemmery.errors import ArgumentError, brief
from gemmery.tuples import NamedTuple

_ROW_WAY = "gm.row_sum, gm.row_sum_of_squares, gm.row_maximum and gm.row_log_sum_exp run over the columns of a row"

# Names of NumPy's ufuncs and of PyTorch's functions that are operations under another name, or several.
_ALIASES: dict[str, Callable[..., "EpilogueSymbol"]] = {
    "true_divide": lambda x, y: _node("divide", x, y),
    "div": lambda x, y: _node("divide", x, y),
    "sub": lambda x, y: _node("subtract", x, y),
    "mul": lambda x, y: _node("multiply", x, y),
    "neg": lambda x: _node("negative", x),
    "abs": lambda x: _node("absolute", x),
    "fabs": lambda x: _node("absolute", x),
    "positive": lambda x: x,
    "square": lambda x: _node("multiply", x, x),
    "reciprocal": lambda x: _node("divide", 1.0, x),
    "power": lambda x, y: _power(x, y),  # noqa: PLW0108 # defined below
    "pow": lambda x, y: _power(x, y),  # noqa: PLW0108 # as well
    "round": lambda x: _node("rint", x),
    "isnan": lambda x: _node("not_equal", x, x),
    "clip": lambda x, low, high: _node("minimum", _node("maximum", x, low), high),
    **{f"{logic}_{op}": (lambda *x, op=op: _node(op, *x)) for logic in ("logical", "bitwise") for op in ("and", "or")},
    "logical_not": lambda x: _node("not", x),
    "invert": lambda x: _node("not", x),
    **dict(
        zip(
            ("lt", "le", "gt", "ge", "eq", "ne"),
            ((lambda x, y, op=op: _node(op, x, y)) for op in COMPARISONS),
            strict=True,
        )
    ),
}
_SAME = {
    *("negative", "absolute", "exp", "log", "tanh", "erf", "sqrt", "rsqrt", "sigmoid", "silu", "gelu", "relu", "rint"),
    *("where", *BINARY, *COMPARISONS),
}


class EpilogueSymbol:
    """A number of each element of C while an epilogue is traced."""

    __slots__ = ("builder", "number")

    def __init__(self, builder: GraphBuilder, number: int) -> None:
        self.builder, self.number = builder, number

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> "EpilogueSymbol":
        if method != "__call__" or options:
            _refuse(f"np.{ufunc.__name__}{'.' + method if method != '__call__' else ' with options'}", _ROW_WAY)
        return _by_name(f"np.{ufunc.__name__}", ufunc.__name__, inputs)

    def __array_function__(self, function: Any, types: Any, inputs: Any, options: Any) -> "EpilogueSymbol":
        if function.__name__ not in ("where", "clip", "round") or options:
            _refuse(f"np.{function.__name__}", _ROW_WAY)
        return _by_name(f"np.{function.__name__}", function.__name__, inputs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, inputs: Any = (), options: Any = None) -> "EpilogueSymbol":
        if options and any(value not in (None, False, "none") for value in options.values()):
            _refuse(f"{function.__name__} with options", "write it by operators and the functions of gm")
        return _by_name(f"torch's {function.__name__}", function.__name__.strip("_"), inputs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f".{name} of a symbol", f"a symbol is one number of C; {_ROW_WAY}")

    def __bool__(self) -> NoReturn:  # noqa: PLE0304 # it returns nothing
        _refuse(
            "a branch on a symbol (if, and, or, not, min, max, a chain of comparisons)",
            "use gm.where(condition, x, y), &, |, ~, gm.maximum or gm.minimum",
        )

    def __float__(self) -> float:
        _refuse("a symbol as a number (float, a function of math)", "use np.exp, np.log, np.tanh, gm.erf and the like")

    __int__ = __index__ = __complex__ = __round__ = __float__

    def __iter__(self) -> Any:
        _refuse("a loop over a symbol, or its elements", f"a symbol is one number of C; {_ROW_WAY}")

    __len__ = __iter__

    def __getitem__(self, key: Any) -> Any:
        _refuse("an element of a symbol", f"a symbol is one number of C; {_ROW_WAY}")

    def __array__(self, *args: Any, **options: Any) -> Any:
        _refuse("a symbol as an array", "call the function on symbols alone, by operators, ufuncs and functions of gm")

    def __hash__(self) -> int:
        return hash((id(self.builder), self.number))

    def __pos__(self) -> "EpilogueSymbol":
        return self

    def __pow__(self, exponent: Any) -> "EpilogueSymbol":
        return _power(self, exponent)


def _operators() -> None:
    """Give EpilogueSymbol Python's operators."""
    pairs = {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "and": "and", "or": "or"}
    for name, op in pairs.items():
        setattr(EpilogueSymbol, f"__{name}__", lambda x, y, op=op: _node(op, x, y))
        setattr(EpilogueSymbol, f"__r{name}__", lambda x, y, op=op: _node(op, y, x))
    for name, op in zip(("lt", "le", "gt", "ge", "eq", "ne"), COMPARISONS, strict=True):
        setattr(EpilogueSymbol, f"__{name}__", lambda x, y, op=op: _node(op, x, y))
    for name, op in (("neg", "negative"), ("abs", "absolute"), ("invert", "not")):
        setattr(EpilogueSymbol, f"__{name}__", lambda x, op=op: _node(op, x))
    for name in _REFUSED_OPERATORS:
        setattr(EpilogueSymbol, f"__{name}__", lambda x, y, name=name: _refuse(f"the operator of __{name}__", _WAY))


_REFUSED_OPERATORS = (
    "rpow", "mod", "rmod", "floordiv", "rfloordiv", "matmul", "rmatmul", "xor", "rxor", "lshift", "rshift",
)  # fmt: skip
_WAY = "an epilogue has + - * /, comparisons, & | ~, squares, NumPy's ufuncs of the same and gm's functions"
_operators()


def _refuse(what: str, way_out: str) -> NoReturn:
    """Raise the error for what cannot be traced, with the line of the caller's function."""
    frame: Any = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("gemmery", "numpy", "torch"):
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    raise ArgumentError(f"{where}: an epilogue cannot be traced through {what}: {way_out}")


def _by_name(called: str, name: str, inputs: tuple[Any, ...]) -> EpilogueSymbol:
    if name in _ALIASES:
        return _ALIASES[name](*inputs)
    if name not in _SAME:
        _refuse(called, _WAY)
    return _node(name, *inputs)


def _node(op: str, *inputs: Any, value: str = "") -> EpilogueSymbol:
    """Return the symbol of an operation on symbols and numbers."""
    builder = next((x.builder for x in inputs if isinstance(x, EpilogueSymbol)), None)
    if builder is None:
        _refuse(f"{op} of {brief(inputs[0])}", "gm's functions take the symbols of a function passed as an epilogue")
    numbers = tuple(_number(builder, x) for x in inputs)
    truths = [builder.nodes[number].op in CONDITIONS for number in numbers]
    expected = {"where": [True, False, False], "and": [True] * 2, "or": [True] * 2, "not": [True]}
    if truths != expected.get(op, [False] * len(numbers)):
        if op in expected:
            _refuse(f"{op} of a number where a condition belongs", "compare it first, such as x > 0")
        _refuse(f"{op} of a condition", "use gm.where(condition, 1, 0) for a number")
    return EpilogueSymbol(builder, builder.add(op, *numbers, value=value))


def _number(builder: GraphBuilder, x: Any) -> int:
    if isinstance(x, EpilogueSymbol):
        if x.builder is not builder:
            _refuse("a symbol of another trace", "use the parameters of this function alone")
        return x.number
    if isinstance(x, (bool, int, float, np.integer, np.floating)) or (isinstance(x, np.ndarray) and x.ndim == 0):
        return builder.constant(float(x))
    if hasattr(x, "shape") or isinstance(x, (list, tuple)):
        _refuse(
            f"an array from outside the function, {brief(x)}",
            "make it a parameter, and pass it by that name: f(name=array), or operands={'name': array}",
        )
    _refuse(f"{brief(x)}, a {type(x).__name__}", "pass numbers and parameters alone")


def _power(x: Any, exponent: Any) -> EpilogueSymbol:
    if exponent in (0.5, -0.5) and not isinstance(exponent, EpilogueSymbol):
        return _node("sqrt" if exponent == 0.5 else "rsqrt", x)
    if isinstance(exponent, EpilogueSymbol) or exponent not in range(1, 9):
        _refuse("a power", "exponents can be 0.5, -0.5 and 1 to 8; else use np.exp(y * np.log(x))")
    total: EpilogueSymbol = x
    for _ in range(int(exponent) - 1):
        total = _node("multiply", total, x)
    return total


def _function(op: str, text: str) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        return _node(op, x)

    function.__name__ = function.__qualname__ = op
    function.__doc__ = f"{text}\n\nRaises ArgumentError for what is no symbol of an epilogue that is being traced."
    return function


silu = _function("silu", "Return x / (1 + exp(-x)), in an epilogue.")
gelu = _function("gelu", "Return x times the share of a normal distribution below x (by erf), in an epilogue.")
relu = _function("relu", "Return the larger of x and 0, NaN for NaN, in an epilogue.")
sigmoid = _function("sigmoid", "Return 1 / (1 + exp(-x)), in an epilogue.")
erf = _function("erf", "Return the error function of x, in an epilogue.")
rsqrt = _function("rsqrt", "Return 1 / sqrt(x), in an epilogue.")
row_sum = _function("row_sum", "Return the sum of x over the columns of each row, in a fixed order, in an epilogue.")
row_sum_of_squares = _function("row_sum_of_squares", "Return the sum of x * x over the columns of each row.")
row_maximum = _function("row_maximum", "Return the largest x of each row, NaN where there is one, in an epilogue.")
row_log_sum_exp = _function(
    "row_log_sum_exp", "Return log(sum(exp(x))) over the columns of each row, without overflow."
)


def where(condition: Any, x: Any, y: Any) -> Any:
    """Return x where the condition holds, else y, in an epilogue.

    >>> import numpy as np, gemmery as gm
    >>> gm.matmul(np.eye(2), np.array([[-1.0], [2.0]]), epilogue=lambda c: gm.where(c < 0, 0.1 * c, c))
    array([[-0.1],
           [ 2. ]])

    Raises ArgumentError for a condition that is a number.
    """
    return _node("where", condition, x, y)


def maximum(x: Any, y: Any) -> Any:
    """Return the larger of x and y, NaN where one is, in an epilogue."""
    return _node("maximum", x, y)


def minimum(x: Any, y: Any) -> Any:
    """Return the smaller of x and y, NaN where one is, in an epilogue."""
    return _node("minimum", x, y)


def cast(x: Any, dtype: Any) -> Any:
    """Return x rounded to an element type, in an epilogue; an output that is a cast has that type.

    `dtype` is float64, float32, float16, bfloat16, float8_e4m3 or float8_e5m2, which take numbers beyond their largest
    to it, or int8, which also does so; x is rounded to nearest, ties to even, and a NaN becomes the int8 0.

    Raises ArgumentError for x that is no symbol, and DTypeError for another type.
    """
    name = str(dtype).removeprefix("torch.")
    name = np.dtype(dtype).name if name.startswith("<class") else name
    known = ("f64", "f32", "f16", "bf16", "e4m3", "e5m2", "int8")
    name = {"float8_e4m3": "e4m3", "float8_e5m2": "e5m2"}.get(name) or dtypes.resolve(name, known)
    return _node("cast", x, value=name)


def rint(x: Any) -> Any:
    """Return x rounded to an integer, to nearest, ties to even, in an epilogue."""
    return _node("rint", x)


def row_index(x: Any) -> Any:
    """Return the number of the row in which x is, from 0, in an epilogue."""
    return (
        EpilogueSymbol(x.builder, x.builder.add("row_index"))
        if isinstance(x, EpilogueSymbol)
        else _node("row_index", x)
    )


def column_index(x: Any) -> Any:
    """Return the number of the column in which x is, from 0, in an epilogue."""
    return (
        EpilogueSymbol(x.builder, x.builder.add("column_index"))
        if isinstance(x, EpilogueSymbol)
        else _node("column_index", x)
    )


class BoundEpilogue(NamedTuple):
    """An epilogue with its operands: what `epilogue=` of `gm.matmul` takes."""

    epilogue: "Epilogue"
    operands: Mapping[str, Any]


class Epilogue:
    """A function of the sums of a product and of operands, traced when it is first used."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__doc__, self.__name__ = function.__doc__, getattr(function, "__name__", "epilogue")
        if isinstance(function, np.ufunc):
            function = _spelled(function)
        parameters = inspect.signature(function).parameters.values()
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            raise ArgumentError(f"epilogue {self.__name__} takes *args or **options: name each operand")
        self.function = function
        self.parameters = tuple(p.name for p in parameters)
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self._graphs: dict[int, EpilogueGraph] = {}

    def __repr__(self) -> str:
        return f"<epilogue {self.__name__}({', '.join(self.parameters)})>"

    def __call__(self, **operands: Any) -> BoundEpilogue:
        """Bind arrays or numbers to parameters by name: (m, n), (m, 1), (n,) or () of a product of m rows, n columns.

        Raises ArgumentError for a name that is no parameter.
        """
        unknown = [name for name in operands if name not in self.parameters]
        if unknown:
            raise ArgumentError(
                f"epilogue {self.__name__} has no operand {unknown[0]!r}; it has {', '.join(self.parameters)}"
            )
        return BoundEpilogue(self, operands)

    def graph(self, sums: int = 1) -> EpilogueGraph:
        """Return the graph of this function, whose first `sums` parameters are the sums of products.

        >>> Epilogue(lambda c, b: relu(c + b)).graph().text
        'sum:0;operand:b;add 0 1;relu 2|3 matrix|b'

        Raises ArgumentError, with the line, for what cannot be traced.
        """
        if sums not in self._graphs:
            self._graphs[sums] = _traced(self, sums)
        return self._graphs[sums]


class GraphEpilogue(Epilogue):
    """An epilogue that is a graph already, such as a gradient."""

    def __init__(self, name: str, graph: EpilogueGraph, sums: int) -> None:
        self.__name__, self.function, self.defaults = name, self.__call__, {}
        self.parameters = (*(f"sum{i}" for i in range(sums)), *(operand.name for operand in graph.operands))
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
    result = traced.function(*symbols)
    results = result if isinstance(result, tuple) else (result,)
    outputs = []
    for place, output in enumerate(results):
        which = f"output {place} of epilogue {name}" if len(results) > 1 else f"the result of epilogue {name}"
        if not isinstance(output, EpilogueSymbol):
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
