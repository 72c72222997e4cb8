"""Every example in a docstring gives what it says, those apart that are marked as too long to run."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

SOURCES = sorted((Path(__file__).parents[1] / "packages").glob("*/src"))
MODULES = sorted(
    ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
    for source in SOURCES
    for path in source.rglob("*.py")
    if ">>>" in path.read_text()
)

# Parts whose modules cannot be imported without a package.
NEEDS = (
    ("jax", "jax", "JAX"),
    ("torch", "torch", "PyTorch"),
    ("distributed.dask", "dask", "Dask"),
    ("distributed.overlap", "torch", "PyTorch"),
    ("distributed.peers", "torch", "PyTorch"),
    ("distributed.styles", "torch", "PyTorch"),
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module(name):
    for part, library, words in NEEDS:
        if f"{name}.".startswith(f"gemmery.{part}."):
            pytest.importorskip(library, reason=f"{words} is not installed")
    module = import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    for example in finder.find(module, name, extraglobs={"np": np}):
        failures: list[str] = []
        runner.run(example, out=failures.append)
        assert not failures, "".join(failures)


@pytest.mark.parametrize("name", ["gemmery", "gemmery.numpy", "gemmery.jax", "gemmery.distributed"])
def test_completion_offers_what_is_public_alone(name):
    if name == "gemmery.jax":
        pytest.importorskip("jax")
    module = import_module(name)
    assert set(dir(module)) - {"__version__", "dask"} == set(module.__all__)


def test_the_public_functions_have_examples():
    assert {"gemmery", "gemmery.api.products", "gemmery.api.explanation"} <= set(MODULES)
