"""NumPy's own tests of einsum, dot, inner, vdot, tensordot, vecdot and multi_dot, run against gemmery.

A call that gemmery refuses in words goes to NumPy: operands of element types that have no kernel, and options that are
NumPy's alone. What is refused is counted, and `EXCLUDED` names the tests of something else, each with its reason.
"""

from __future__ import annotations

import importlib
import inspect

import numpy as np
import pytest

import gemmery as gm

pytest.importorskip("numpy._core.tests.test_einsum", reason="this NumPy was installed without its tests")
MODULES = {
    "numpy._core.tests.test_einsum": ("TestEinsum",),
    "numpy._core.tests.test_numeric": ("TestTensordot",),
    "numpy._core.tests.test_multiarray": ("TestDot", "TestInner", "TestVdot"),
    "numpy._core.tests.test_ufunc": ("TestUfunc",),
    "numpy.linalg.tests.test_linalg": ("TestMultiDot", "TestTensorinv", "TestTensorsolve"),
}
EXCLUDED = {
    "TestDot.test_huge_vectordot": "it takes 18 GB of memory",
    "TestDot.test_dot_3args_errors": "it expects that dot refuses an `out` that is not C-contiguous; gemmery writes it",
    "TestUfunc.test_get_signature": "it reads an attribute of ufuncs, and multiplies nothing",
    "TestEinsum.test_output_order": "a new result is C-contiguous, unless a batch's elements are adjacent: see einsum",
}
numpys = {name: getattr(np, name) for name in ("einsum", "tensordot", "dot", "inner", "vdot", "vecdot")}
served, refused = [], []


def serve(name, ours):
    """Return a function that calls gemmery's, and NumPy's for a call that gemmery refuses before it writes."""

    def call(*arguments, **options):
        try:
            result = ours(*arguments, **options)
        except gm.GemmeryError:
            refused.append(name)
            return numpys[name](*arguments, **options)
        served.append(name)
        return result

    return call


def dot(a, b, out=None):
    a, b = np.asanyarray(a), np.asanyarray(b)
    return gm.tensordot(a, b, ((-1,), (max(-2, -b.ndim),)), out=out) if a.ndim and b.ndim else numpys["dot"](a, b, out)


OURS = {
    "einsum": gm.einsum,
    "tensordot": gm.tensordot,
    "vecdot": gm.vecdot,
    "dot": dot,
    "inner": lambda a, b: gm.tensordot(a, b, ((-1,), (-1,))),
    "vdot": lambda a, b: gm.vecdot(np.ravel(a), np.ravel(b)),
}


def cases():
    """Yield every test that calls one of the functions, with each of its parameters."""
    for module, names in MODULES.items():
        for name in names:
            of_class = getattr(importlib.import_module(module), name)
            for attribute, function in inspect.getmembers(of_class, inspect.isfunction):
                # The names in its code: to read the source of a function takes 5 ms.
                uses = not OURS.keys().isdisjoint(inspect.unwrap(function).__code__.co_names)
                if attribute.startswith("test") and (uses or name in ("TestEinsum", "TestMultiDot")):
                    for run in runs(function):
                        yield pytest.param(module, name, attribute, run, id=f"{name}.{attribute}-{len(str(run))}")


def runs(function):
    """Return the arguments of each run of a test."""
    every = [{}]
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            keys, values = mark.args
            keys = [key.strip() for key in keys.split(",")] if isinstance(keys, str) else list(keys)
            rows = [getattr(value, "values", value if len(keys) > 1 else (value,)) for value in values]
            every = [{**run, **dict(zip(keys, row, strict=True))} for run in every for row in rows]
    return every


@pytest.mark.many
@pytest.mark.parametrize(("module", "name", "test", "run"), [*cases()])
def test_numpys_test_passes(module, name, test, run, monkeypatch):
    if f"{name}.{test}" in EXCLUDED:
        pytest.skip(EXCLUDED[f"{name}.{test}"])
    home = importlib.import_module(module)
    for function, ours in OURS.items():
        monkeypatch.setattr(np, function, serve(function, ours))
        for place in (home, importlib.import_module("numpy.linalg._linalg")):
            if hasattr(place, function):
                monkeypatch.setattr(place, function, serve(function, ours))
    subject = getattr(home, name)()
    if hasattr(subject, "setup_method"):
        subject.setup_method()
    getattr(subject, test)(**run)


def test_most_calls_are_served(monkeypatch):
    served.clear()
    refused.clear()
    home = "numpy._core.tests.test_einsum"
    test_numpys_test_passes(home, "TestEinsum", "test_einsum_sums_float64", {}, monkeypatch)
    assert len(served) > 9 * len(refused)  # which ask for casting="unsafe"
