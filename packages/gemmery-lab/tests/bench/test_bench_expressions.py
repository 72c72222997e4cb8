"""Calls of every kind: each library's expression is the same product, and a wrong result is found."""

import re
from dataclasses import replace

import numpy as np
import pytest

import gemmery as gm
import gemmery_lab as lab
from gemmery.errors import RefusedError
from gemmery_lab.measure import expressions, libraries
from gemmery_lab.measure.expressions import CALLS
from gemmery_lab.measure.work import Work

LIBRARIES = {"ours": "gm.", "numpy": "np.", "torch": "torch."}


def work(call: str, n: int = 8, arrays: str = "numpy") -> Work:
    return Work(n, n, n, "f32", "f32", call=call, arrays=arrays)


def value(call: str, library: str, n: int = 8) -> np.ndarray:
    """The result of an expression as an array of NumPy."""
    one, convert, names = work(call, n), lambda array: array, {"gm": gm, "np": np}
    if library == "torch":
        names["torch"] = pytest.importorskip("torch")
        convert = libraries.as_tensor
    arrays = {name: convert(array) for name, array in expressions.operands(one, library).items()}
    made = expressions.result(one, library, {**names, **arrays})
    return np.asarray(made.float().numpy() if library == "torch" else made)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("call", CALLS)
def test_every_expression_of_a_call_is_the_same_product(call, library):
    if not getattr(CALLS[call], library):
        pytest.skip(f"{library} has no such call")
    assert LIBRARIES[library] in expressions.text(work(call), library)
    assert expressions.error(work(call), value(call, library)) <= 1


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_result_of_a_call_is_found(call):
    good = np.array(value(call, "numpy"), np.float64)
    worst = good.copy().reshape(-1)
    worst[-1] += 1.0
    assert expressions.error(work(call), worst.reshape(good.shape)) > 1
    worst[-1] = np.nan
    assert expressions.error(work(call), worst.reshape(good.shape)) > 1
    assert expressions.error(work(call), good[..., None]) > 1


def test_an_operand_that_is_not_named_is_not_made():
    assert set(expressions.operands(work("gemm, alpha, beta"), "ours")) == {"a", "b", "c"}
    assert set(expressions.operands(work("gemm, out"), "numpy")) == {"a", "b", "out"}
    views = expressions.operands(work("strided views"), "ours")
    assert {view.strides for view in views.values()} == {(2 * 16 * 4, 8)}


def test_a_call_that_a_library_does_not_have_is_refused():
    with pytest.raises(RefusedError, match="torch has no such call"):
        expressions.text(work("f32 by f64"), "torch")


def test_a_suite_of_calls_records_both_expressions(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('kind = "calls"\nrivals = ["numpy"]\n[[product]]\nsquare = [4]\ncall = ["gemm, alpha", "x @ y"]')
    run = lab.bench([str(file)], seconds=0.001)
    ours = {m.case: m for m in run.measurements if m.kernel == "gm.matmul"}
    assert set(ours) == {"gemm, alpha", "x @ y"}
    assert all(m.checked and m.error <= 1 and m.seconds > 0 and set(m.versus) == {"numpy"} for m in ours.values())
    assert ours["gemm, alpha"].note == "gm.gemm(2.0, a, b) against 2.0 * np.matmul(a, b)"


def test_tensors_are_compared_with_pytorch_alone(tmp_path):
    pytest.importorskip("torch")
    file = tmp_path / "mine.toml"
    file.write_text('kind = "calls"\n[[product]]\nsquare = [4]\ncall = ["bfloat16"]\narrays = "torch"')
    run = lab.bench([str(file)], rivals=["numpy", "torch"], seconds=0.001)
    (ours,) = (m for m in run.measurements if m.kernel == "gm.matmul")
    assert ours.case == "bfloat16, tensors"
    assert set(ours.versus) == {"torch"}
    assert ours.checked
    assert ours.error <= 1


def test_tensors_without_pytorch_are_refused(monkeypatch, tmp_path):
    absent = [p if p.name != "torch" else replace(p, missing=lambda: "not here") for p in libraries.RIVALS]
    monkeypatch.setattr(libraries, "RIVALS", tuple(absent))
    file = tmp_path / "mine.toml"
    file.write_text('kind = "calls"\nrivals = ["numpy"]\n[[product]]\nsquare = [4]\ncall = ["a @ b"]\narrays = "torch"')
    run = lab.bench([str(file)], seconds=0.001)
    (ours,) = (m for m in run.measurements if m.kernel == "gm.matmul")
    assert re.search("not here", ours.refused)
