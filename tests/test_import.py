"""Importing is cheap: nothing is loaded before it is used."""

from __future__ import annotations

import subprocess
import sys

import gemmery as gm


def modules_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded once `code` has run."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return set(done.stdout.split())


def test_importing_loads_neither_numpy_nor_anything_heavier():
    added = modules_after("import gemmery; gemmery.GemmeryError") - modules_after("")
    assert not added & {"numpy", "typing", "llvmlite", "ctypes", "torch", "matplotlib", "rich", "typer", "ml_dtypes"}
    assert {name for name in added if name.startswith("gemmery")} == {"gemmery", "gemmery.errors"}


def test_llvm_is_loaded_by_the_first_product_that_is_compiled():
    assert "llvmlite" not in modules_after("import gemmery; gemmery.matmul; gemmery.explain")
    compiled = modules_after(
        "import os, tempfile\n"
        "os.environ['GEMMERY_CACHE_DIR'] = tempfile.mkdtemp()\n"
        "import gemmery\n"
        "gemmery.matmul([[1.0]], [[1.0]])"
    )
    assert "llvmlite" in compiled
    assert not compiled & {"torch", "matplotlib", "rich", "typer", "ml_dtypes"}


def test_every_public_name_is_there_and_documented():
    assert set(gm.__all__) <= set(dir(gm))
    for name in gm.__all__:
        assert getattr(gm, name).__doc__, name
    assert gm.__version__


def test_an_unknown_name_is_an_attribute_error():
    try:
        gm.matmull  # noqa: B018
    except AttributeError as error:
        assert "matmull" in str(error)  # noqa: PT017
    else:
        raise AssertionError
