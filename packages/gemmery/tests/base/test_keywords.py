"""The table of options agrees with signatures, types, documentation, the compiled entry, and what functions do."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

import gemmery as gm
from gemmery.api import products
from gemmery.keywords import DEFAULTS, LIKE_NUMPY, NAMES, NO_OPTIONS, OPTIONS, Options

FUNCTIONS = sorted(NAMES)
ON_DEVICES = [
    (function, name)
    for function in ("matmul", "explain", "gemm")
    for name in sorted(NAMES[function])
    if OPTIONS[name].on_cpu
]
EYE = np.eye(3, dtype=np.float32)


def call(function, **options):
    return getattr(gm, function)(*((1.0, EYE, EYE) if function == "gemm" else (EYE, EYE)), **options)


def test_the_table_and_the_record_have_the_options_that_type_checkers_know():
    assert set().union(*NAMES.values()) == set(OPTIONS)
    assert [name for name in Options._fields if name not in ("alpha", "beta", "old")] == list(OPTIONS)
    assert {name: getattr(NO_OPTIONS, name) for name in OPTIONS} == DEFAULTS
    assert {row.default for row in OPTIONS.values()} == {None, False}  # that the compiled entry compares with


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_signature_ends_with_the_options_of_the_table(function):
    last = inspect.signature(getattr(gm, function)).parameters.values()
    keywords = [p for p in last if p.kind is p.KEYWORD_ONLY][-len(NAMES[function]) :]
    assert {p.name: p.default for p in keywords} == {name: DEFAULTS[name] for name in NAMES[function]}
    assert any(p.kind is p.VAR_KEYWORD for p in last) == (function in LIKE_NUMPY)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_documentation_describes_every_option(function):
    text = getattr(gm, function).__doc__
    assert function == "explain" or not [name for name in NAMES[function] if f"`{name}`" not in text]
    guide = (Path(__file__).parents[4] / "docs" / "gpu.md").read_text()
    assert not [name for name, row in OPTIONS.items() if row.on_cpu and name not in guide]


@pytest.mark.parametrize(("function", "name"), ON_DEVICES)
def test_an_option_of_devices_is_refused_on_the_cpu_with_the_way_out(function, name):
    value = next(iter(OPTIONS[name].values), 2.0)
    with pytest.raises(gm.ArgumentError, match=f"{name}=.* {OPTIONS[name].on_cpu}"):
        call(function, **{name: value})


@pytest.mark.parametrize("function", ["matmul", "gemm"])
def test_an_option_with_its_default_stays_in_the_compiled_entry(function, monkeypatch):
    for _ in range(2):
        expected = call(function)
    monkeypatch.setattr(products, "product", lambda *arguments: pytest.fail("Python"))
    for name in NAMES[function]:
        assert np.array_equal(call(function, **{name: DEFAULTS[name]}), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_unknown_option_is_named(function):
    first = {"einsum": ("ij,jk", EYE, EYE), "gemm": (1.0, EYE, EYE)}.get(function, (EYE, EYE))
    with pytest.raises(TypeError, match=rf"{function}\(\) got an unexpected keyword argument 'thread'"):
        getattr(gm, function)(*first, thread=1)
