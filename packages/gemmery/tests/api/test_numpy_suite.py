"""NumPy's own tests of matmul, from the installed wheel, run against gm.matmul.

There are two lists of exceptions. Operands of element types that gemmery refuses go to NumPy, after the refusal is
checked. Tests about something other than a product are left out. An entry that is no longer needed fails.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import gemmery as gm

suite = pytest.importorskip("numpy._core.tests.test_multiarray", reason="this NumPy was installed without its tests")

NOT_SUPPORTED = {
    "g": "long double: no vector unit has it",
    "G": "complex long double: no vector unit has it",
    "O": "objects: their arithmetic is Python's",
}
EXCLUDED = {
    "TestMatmulOperator.test_array_priority_override": "about Python's @, which gm.matmul does not take part in",
    "TestMatmulOperator.test_matmul_raises": "about Python's @: of a scalar np.matmul too says ValueError",
}
refused: set[str] = set()
numpys_own = np.matmul


def served(a, b, *args, **options):
    """Run gm.matmul, or np.matmul for operands that gemmery refuses."""
    characters = {np.asarray(x).dtype.char for x in (a, b)} & set(NOT_SUPPORTED)
    if not characters:
        return gm.matmul(a, b, *args, **options)
    with pytest.raises(gm.DTypeError):
        gm.matmul(a, b, *args, **options)
    refused.update(characters)
    return numpys_own(a, b, *args, **options)


def cases():
    """Yield every test of the classes, with each of its parameters."""
    for name in ("TestMatmul", "TestMatmulOperator"):
        for attribute, function in inspect.getmembers(getattr(suite, name), inspect.isfunction):
            if not attribute.startswith("test"):
                continue
            runs = [{}]
            for mark in getattr(function, "pytestmark", []):
                if mark.name == "parametrize":
                    key, values = mark.args
                    runs = [{**run, key: getattr(value, "values", (value,))[0]} for run in runs for value in values]
            yield f"{name}.{attribute}", runs


CASES = dict(cases())


def go(case, matmul, monkeypatch):
    """Run one of NumPy's tests with `matmul` instead of NumPy's."""
    name, test = case.split(".")
    subject = getattr(suite, name)()
    monkeypatch.setattr(subject, "matmul", matmul, raising=False)
    monkeypatch.setattr(np, "matmul", matmul)
    for run in CASES[case]:
        getattr(subject, test)(**run)


@pytest.mark.parametrize("case", [case for case in CASES if case not in EXCLUDED])
def test_numpys_test_passes(case, monkeypatch):
    go(case, served, monkeypatch)


@pytest.mark.parametrize("case", EXCLUDED)
def test_an_exclusion_is_still_needed(case, monkeypatch):
    assert case in CASES, f"NumPy has no {case} any more: drop the exclusion"
    with pytest.raises((AssertionError, gm.GemmeryError)):
        go(case, gm.matmul, monkeypatch)


def test_every_type_that_is_not_supported_is_met_and_refused(monkeypatch):
    go("TestMatmul.test_shapes", served, monkeypatch)
    assert refused == set(NOT_SUPPORTED)


def test_the_three_classes_are_run():
    common = {name for name, _ in inspect.getmembers(suite.MatmulCommon, inspect.isfunction) if name.startswith("test")}
    assert len(common) >= 8
    for name in ("TestMatmul", "TestMatmulOperator"):
        assert common <= {case.split(".")[1] for case in CASES if case.startswith(f"{name}.")}
    assert len(CASES["TestMatmul.test_dot_equivalent"]) > 30
