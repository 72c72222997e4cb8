"""The examples in docstrings give what they say; those of lab, report and bench are of whole runs, and shown only."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if ">>>" in path.read_text() and path.parent.name not in {"lab", "report", "bench"}
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module(name):
    module = import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    attempted = 0
    for example in finder.find(module, name, extraglobs={"np": np}):
        failures: list[str] = []
        attempted += runner.run(example, out=failures.append).attempted
        assert not failures, "".join(failures)
    assert attempted


def test_the_public_functions_have_examples():
    assert {"gemmery", "gemmery.api.products", "gemmery.api.explanation"} <= set(MODULES)
