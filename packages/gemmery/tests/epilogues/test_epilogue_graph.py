"""Tracing of functions to graphs, what is refused with its line, and the reference with its error bound."""

import inspect
import pickle
import re

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery.epilogues import graph as graphs
from gemmery.epilogues.gradient import gradient
from gemmery.epilogues.graph import GraphOperand, by_sums_and_maxima, parse
from gemmery.epilogues.random_epilogues import random_epilogue
from gemmery.epilogues.reference import evaluate, rounded
from gemmery.epilogues.trace import Epilogue

OUTSIDE = np.ones(3)


def traced(function, sums=1):
    return Epilogue(function).graph(sums)


def test_a_graph_is_what_the_function_does():
    graph = traced(lambda c, b, scale: (gm.gelu(c + b) * scale, c + b))
    assert graph.text == "sum:0;operand:b;operand:scale;add 0 1;gelu 3;multiply 4 2|5 matrix;3 matrix|b;scale"
    assert parse(graph.text) == graph == pickle.loads(pickle.dumps(graph))
    assert graph.sums == 1
    assert traced(lambda c, d: c * d, 2).sums == 2


@pytest.mark.parametrize("seed", range(40))
def test_a_graph_is_made_again_from_its_text(seed):
    _, epilogue = random_epilogue(np.random.default_rng(seed), ("p", "q"), 1 + seed % 2)
    graph = epilogue.graph(1 + seed % 2)
    bound = graph.bound(
        [GraphOperand(operand.name, "row", "bf16") for operand in graph.operands], ["f32"] * len(graph.outputs)
    )
    assert parse(graph.text) == graph
    assert parse(bound.text) == bound
    assert all(max(node.inputs, default=-1) < number for number, node in enumerate(graph.nodes))


@pytest.mark.parametrize(
    ("function", "spelled"),
    [
        (np.exp, lambda c: np.exp(c) if c is not None else c),
        (lambda c: c**2, lambda c: c * c),
        (lambda c: c**3, lambda c: c * c * c),
        (lambda c: c**0.5, np.sqrt),
        (lambda c: np.power(c, -0.5), gm.rsqrt),
        (np.square, lambda c: c * c),
        (np.reciprocal, lambda c: 1 / c),
        (lambda c: np.clip(c, 0, 6), lambda c: gm.minimum(gm.maximum(c, 0), 6)),
        (lambda c: np.where(c < 0, 0, c), lambda c: gm.where(c < 0, 0, c)),
        (lambda c: np.where(np.isnan(c), 0, c), lambda c: gm.where(c != c, 0, c)),
        (lambda c: np.where(~(c < 0) & (c <= 1) | (c == 2), 0, c),
         lambda c: gm.where(np.logical_or(np.logical_and(np.logical_not(c < 0), c <= 1), c == 2), 0, c)),
        (lambda c: gm.minimum(c, 1), lambda c: np.clip(c, None, 1)),
        (lambda c: abs(-c), lambda c: np.absolute(np.negative(c))),
        (lambda c: +c + np.float32(1), lambda c: c + 1.0),
        (lambda c: 2 - c, lambda c: np.subtract(np.array(2), c)),
    ],
)  # fmt: skip
def test_spellings_of_an_operation_are_one(function, spelled):
    assert traced(function).text == traced(spelled).text


def test_functions_of_pytorch_are_traced():
    torch = pytest.importorskip("torch")
    graph = traced(lambda c: torch.where(c > 0, torch.nn.functional.silu(c), torch.exp(c)) + torch.sigmoid(c))
    assert graph.text == traced(lambda c: gm.where(c > 0, gm.silu(c), np.exp(c)) + gm.sigmoid(c)).text


def branch(c):
    return c if c > 0 else -c


def closure(c):
    return c * OUTSIDE


def closure_reversed(c):
    return OUTSIDE + c


def as_number(c):
    return float(c)


def reduced(c):
    return np.sum(c)


def method(c):
    return c.sum()


def unknown_ufunc(c):
    return np.arctan(c)


def largest(c):
    return max(c, 0)


def chained(c):
    return gm.where(0 < c < 1, c, 0)


def remainder(c):
    return c % 2


def looped(c):
    return sum(c)


def number_as_condition(c):
    return gm.where(c, 1, 0)


def condition_as_number(c):
    return (c > 0) * c


def power(c):
    return c**9.5


def text(c):
    return c + "1"


def decimals(c):
    return np.round(c, 2)


def powers(c):
    return c ** np.arange(2)


def complex_number(c):
    return c + np.array(1j)


def scaled_sum(c):
    return pytest.importorskip("torch").add(c, c, alpha=0)


REFUSED = {
    decimals: "round to decimals",
    powers: "a power",
    complex_number: "array(0.+1.j)",
    scaled_sum: "add with options",
    branch: "gm.where",
    closure: "make it a parameter",
    closure_reversed: "make it a parameter",
    as_number: "np.exp",
    reduced: "gm.row_sum",
    method: "gm.row_sum",
    unknown_ufunc: "np.arctan",
    largest: "gm.maximum",
    chained: "gm.where",
    remainder: "operator %",
    looped: "gm.row_sum",
    number_as_condition: "compare it first",
    condition_as_number: "gm.where",
    power: "np.exp",
    text: "a str",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_what_cannot_be_traced_is_refused_with_its_line(function):
    line = inspect.getsourcelines(function)[1] + 1
    with pytest.raises(gm.ArgumentError, match=re.escape(REFUSED[function])) as error:
        traced(function)
    assert str(error.value).startswith(f"{__file__}:{line}: ")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda c: 3.0, "is 3.0: return a number that depends on the sum"),
        (lambda c: None, "is None"),
        (lambda c: (), "returns nothing"),
        (lambda c: c > 0, "is a condition"),
        (lambda c, b: b * 2, "does not depend on the sum"),
        (lambda c, b: (c, b), "output 1 of epilogue <lambda> does not depend on the sum"),
    ],
)
def test_results_that_are_none_are_refused(function, words):
    with pytest.raises(gm.ArgumentError, match=re.escape(words)):
        traced(function)


def test_a_symbol_of_another_trace_is_no_result():
    symbols = []
    traced(lambda c: symbols.append(c) or c)
    with pytest.raises(gm.ArgumentError, match="return a number"):
        traced(lambda c: symbols[0])


def test_functions_without_symbols_are_refused():
    with pytest.raises(gm.ArgumentError, match="epilogue=3 is no function"):
        gm.epilogue(3)
    with pytest.raises(gm.ArgumentError, match="take the symbols of a function"):
        gm.silu(1.0)
    with pytest.raises(gm.ArgumentError, match="name each operand"):
        gm.epilogue(lambda *c: c)
    with pytest.raises(gm.ArgumentError, match="no operand 'x'; it has c, up"):
        gm.epilogue(lambda c, up: c + up)(x=1)
    with pytest.raises(gm.ArgumentError, match="a parameter for each of 2 sums"):
        traced(lambda c: c, 2)
    with pytest.raises(gm.DTypeError, match="not supported"):
        traced(lambda c: gm.cast(c, "complex64"))


def test_kinds_follow_from_operands_and_statistics():
    graph = traced(lambda c, r, q: (c + r, gm.row_sum(c) * q, c / gm.row_maximum(c)))
    graph = graph.bound([GraphOperand("r", "row"), GraphOperand("q", "column")])
    kinds = graph.kinds()
    assert [kinds[output.node] for output in graph.outputs] == ["matrix", "column", "matrix"]
    simple = by_sums_and_maxima(traced(lambda c: (gm.row_log_sum_exp(c), gm.row_sum_of_squares(c))))
    assert {simple.nodes[number].op for number in simple.statistics} == {"row_maximum", "row_sum"}


@pytest.mark.parametrize("seed", range(30))
def test_statistics_by_sums_and_maxima_have_the_same_values(seed):
    draw = np.random.default_rng(seed)
    _, epilogue = random_epilogue(draw, ("p",))
    graph, c = epilogue.graph(), draw.standard_normal((5, 7))
    values = (evaluate(g, [c], {"p": 0.5}) for g in (graph, by_sums_and_maxima(graph)))
    for x, y in zip(*values, strict=True):
        assert np.allclose(x.value, y.value, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", ["f16", "bf16", "e4m3", "e5m2", "f32"])
def test_rounding_of_the_reference(name):
    kind = {"f16": np.float16, "f32": np.float32, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn,
            "e5m2": ml_dtypes.float8_e5m2}[name]  # fmt: skip
    draw = np.random.default_rng(1)
    x = np.concatenate([draw.standard_normal(2000) * 2.0 ** draw.integers(-30, 16, 2000), np.arange(-64, 64) / 1024])
    x = x.astype(np.float32).astype(np.float64)
    largest = {"e4m3": 448.0, "e5m2": 57344.0}.get(name, np.inf)
    with np.errstate(over="ignore"):
        expected = np.clip(x, -largest, largest).astype(kind).astype(np.float64)
    np.testing.assert_array_equal(rounded(x, name), expected)


def test_an_error_bound_counts_the_rounding_of_constants():
    """0.1 and float32's 0.1 differ by more than the rounding of what is left of 0.1 - 0.09999999."""
    graph = traced(lambda c: c - 0.1)
    c = np.array([[0.09999999]])
    (estimate,) = evaluate(graph, [c], {}, [0.0], 2.0**-24)
    assert abs(estimate.value - (c - float(np.float32(0.1)))) <= estimate.error


@pytest.mark.parametrize("op", [*graphs.UNARY, *graphs.BINARY])
def test_an_error_bound_holds_for_shifted_inputs(op):
    if op == "cast":
        op_text, more = "cast:bf16", ""
    else:
        op_text, more = op, " 1" if op in graphs.BINARY else ""
    graph = parse(f"sum:0;sum:1;{op_text} 0{more}|2 matrix|")
    draw = np.random.default_rng(2)
    x, y = draw.standard_normal((2, 40, 50)) * 2
    if op in ("log", "sqrt", "rsqrt"):
        x = abs(x)
    error = 0.01 * draw.random((40, 50))
    (estimate,) = evaluate(graph, [x, y], {}, [error, error])
    with np.errstate(all="ignore"):
        for _ in range(20):
            moved = [z + error * draw.uniform(-1, 1, z.shape) for z in (x, y)]
            (other,) = evaluate(graph, moved, {})
            apart = abs(other.value - estimate.value)
            assert ((apart <= estimate.error * (1 + 1e-9) + 1e-15) | np.isnan(other.value)).all()


def test_the_gradient_leaves_out_what_outputs_do_not_read():
    derived, names = gradient(traced(lambda c, b, unused: gm.relu(c) + gm.rint(b)))
    assert names == ("sum.0",)
    assert [operand.name for operand in derived.operands] == ["gradient.0"]
    assert "gelu" not in gradient(traced(gm.gelu))[0].text
