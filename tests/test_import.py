"""Importing is cheap: nothing is loaded before it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gemmery as gm

PTX = Path(__file__).parent / "data" / "ptx" / "triton_add.ptx"


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


def test_emulating_ptx_needs_nothing_of_cuda():
    loaded = modules_after(
        "import pathlib, numpy, gemmery\n"
        "sys.modules['cuda'] = None  # as where the bindings are not installed\n"
        f"ptx = pathlib.Path({str(PTX)!r})\n"
        "x = numpy.ones(256, numpy.float32)\n"
        "out = numpy.zeros_like(x)\n"
        "gemmery.emulate(ptx, 'add', 1, 128, [x, x, out, numpy.int32(256), None, None])\n"
        "assert (out == 2).all()"
    )
    assert "gemmery.emulator" in loaded
    assert not loaded & {"cuda.bindings", "torch", "matplotlib", "rich", "typer", "ml_dtypes"}
    assert not loaded & {"gemmery.bench", "gemmery.lab.suites", "gemmery.lab.emulated", "gemmery.report"}


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
