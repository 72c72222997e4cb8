"""The symbols and functions of an epilogue: what is done to them becomes nodes of its graph.

Symbols take Python's operators, NumPy's ufuncs, `np.where`, `np.clip`, functions of PyTorch with the names of
operations, and the functions below. What has no node (a branch on a value, an array in a closure) is refused with its
line.
"""

# No `from __future__ import annotations` here: help() would show annotations as strings.
import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from gemmery import dtypes
from gemmery.epilogues.graph import BINARY, COMPARISONS, CONDITIONS, INPUTS, UNARY, GraphBuilder
from gemmery.errors import ArgumentError, brief

_ROW_WAY = "gm.row_sum, gm.row_sum_of_squares, gm.row_maximum and gm.row_log_sum_exp run over the columns of a row"

# Operations by the names of NumPy's ufuncs and of PyTorch's functions; `cast` has a value besides.
_OPERATIONS = {op: op for op in (*UNARY, *BINARY, *COMPARISONS, "where") if op != "cast"} | {
    "true_divide": "divide", "div": "divide", "sub": "subtract", "mul": "multiply", "neg": "negative",
    "abs": "absolute", "fabs": "absolute", "invert": "not", "logical_not": "not",
    **{f"{logic}_{op}": op for logic in ("logical", "bitwise") for op in ("and", "or")},
    **dict(zip(("lt", "le", "gt", "ge", "eq", "ne"), COMPARISONS, strict=True)),
}  # fmt: skip
# Those that are several operations, or none.
_FORMULAS: dict[str, Callable[..., "EpilogueSymbol"]] = {
    "positive": lambda x: x,
    "square": lambda x: _node("multiply", x, x),
    "reciprocal": lambda x: _node("divide", 1.0, x),
    "power": lambda x, y: _power(x, y),  # noqa: PLW0108 # defined below
    "pow": lambda x, y: _power(x, y),  # noqa: PLW0108 # as well
    "round": lambda x, decimals=0: _node("rint", x) if not decimals else _refuse("round to decimals", _WAY),
    "isnan": lambda x: _node("not_equal", x, x),
    "clip": lambda x, low, high: _clip(x, low, high),  # noqa: PLW0108 # as well
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
        if options and any(value is not None and value is not False and value != "none" for value in options.values()):
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

    def __float__(self, *_: Any) -> float:
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
    for name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
        setattr(EpilogueSymbol, f"__{name}__", lambda *x, op=_OPERATIONS[name]: _node(op, *x))
    for name, sign in _REFUSED_OPERATORS.items():
        setattr(EpilogueSymbol, f"__{name}__", lambda x, y, sign=sign: _refuse(f"the operator {sign}", _WAY))


_REFUSED_OPERATORS = {
    "rpow": "**", "mod": "%", "rmod": "%", "floordiv": "//", "rfloordiv": "//", "divmod": "divmod", "matmul": "@",
    "rmatmul": "@", "xor": "^", "rxor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
_WAY = "write it with + - * /, comparisons, & | ~, small powers, np.exp, np.log, np.tanh and gm's functions"
_operators()


def _refuse(what: str, way_out: str) -> NoReturn:
    """Raise the error for what cannot be traced, with the line of the caller's function."""
    frame: Any = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("gemmery", "numpy", "torch"):
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    raise ArgumentError(f"{where}: an epilogue cannot be traced through {what}: {way_out}")


def _by_name(called: str, name: str, inputs: tuple[Any, ...]) -> EpilogueSymbol:
    if name in _FORMULAS:
        try:
            inspect.signature(_FORMULAS[name]).bind(*inputs)
        except TypeError:
            _refuse(f"{called} of {len(inputs)} arguments", _WAY)
        return _FORMULAS[name](*inputs)
    op = _OPERATIONS.get(name, "")
    if INPUTS.get(op) != len(inputs):
        _refuse(f"{called} of {len(inputs)} arguments" if op else called, _WAY)
    return _node(op, *inputs)


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
    if isinstance(x, (int, float, np.generic, np.ndarray)) and np.ndim(x) == 0 and np.asarray(x).dtype.kind in "biuf":
        return builder.constant(float(x))
    if hasattr(x, "shape") or isinstance(x, (list, tuple)):
        _refuse(
            f"an array from outside the function, {brief(x)}",
            "make it a parameter, and pass it by that name: f(name=array), or operands={'name': array}",
        )
    _refuse(f"{brief(x)}, a {type(x).__name__}", "pass numbers and parameters alone")


def _power(x: Any, exponent: Any) -> EpilogueSymbol:
    number = isinstance(exponent, (int, float, np.integer, np.floating))
    if number and exponent in (0.5, -0.5):
        return _node("sqrt" if exponent == 0.5 else "rsqrt", x)
    if not number or exponent not in range(1, 9):
        _refuse("a power", "exponents can be 0.5, -0.5 and 1 to 8; else use np.exp(y * np.log(x))")
    total: EpilogueSymbol = x
    for _ in range(int(exponent) - 1):
        total = _node("multiply", total, x)
    return total


def _clip(x: Any, low: Any, high: Any) -> Any:
    x = x if low is None else _node("maximum", x, low)
    return x if high is None else _node("minimum", x, high)


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
    short = name.removeprefix("float8_")
    return _node("cast", x, value=short if short in dtypes.FLOAT8 else dtypes.resolve(name, dtypes.CASTS))


def rint(x: Any) -> Any:
    """Return x rounded to an integer, to nearest, ties to even, in an epilogue."""
    return _node("rint", x)


def row_index(x: Any) -> Any:
    """Return the number of the row in which x is, from 0, in an epilogue."""
    return _place("row_index", x)


def column_index(x: Any) -> Any:
    """Return the number of the column in which x is, from 0, in an epilogue."""
    return _place("column_index", x)


def _place(op: str, x: Any) -> Any:
    return EpilogueSymbol(x.builder, x.builder.add(op)) if isinstance(x, EpilogueSymbol) else _node(op, x)
