"""The types of the public functions, as type checkers and help() show them."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

import gemmery as gm
import gemmery_lab as lab
from gemmery import dtypes, keywords

CODE = """
from typing import Any
import numpy as np
import gemmery as gm

class Tensor:  # of PyTorch, to a type checker
    def data_ptr(self) -> int:
        return 0
    def __dlpack__(self, *, stream: int | None = -1, max_version: Any = None) -> object:
        return 0

class Float32:
    is_floating_point: bool

x, v, t, any_ = np.ones((2, 2), np.float32), np.ones(2), Tensor(), eval("0")
reveal_type(gm.matmul(x, x))  # ndarray
reveal_type(gm.matmul(x, [[1.0], [2.0]], bias=x[0], activation="relu", dtype="float64", threads=1))  # ndarray
reveal_type(gm.matmul(x, x, dtype=np.float64))  # ndarray
reveal_type(gm.matmul(t, t, dtype=Float32()))  # Tensor
reveal_type(gm.matmul(x, t))  # Tensor
reveal_type(gm.matmul(t, x, precision="tf32"))  # Tensor
reveal_type(gm.matmul(t, t, scale_a=t, scale_b=0.5, batch_invariant=True))  # Tensor
reveal_type(gm.matmul(x, x, out=t))  # Tensor
reveal_type(gm.matmul(memoryview(b""), x))  # Any
reveal_type(gm.matmul(any_, any_))  # Any
reveal_type(gm.gemm(1.0, x, x))  # ndarray
reveal_type(gm.gemm(1.0, x, x, 2.0, x, threads=2))  # ndarray
reveal_type(gm.gemm(1.0, t, t, 1j, t))  # Tensor
reveal_type(gm.gemm(1.0, t, t, out=x))  # ndarray
reveal_type(gm.gemv(x, v, alpha=2.0))  # ndarray
reveal_type(gm.gemv(t, t))  # Tensor
reveal_type(gm.gemv(t, t, out=x))  # ndarray
reveal_type(gm.grouped_matmul(x, x, offsets=[1], bias=x, activation="silu"))  # ndarray
reveal_type(gm.grouped_matmul(t, t, offsets=t))  # Tensor
reveal_type(gm.grouped_matmul(x, x, offsets=v, out=t))  # Tensor
reveal_type(gm.grouped_matmul([t, t], [t, t]))  # list
gm.grouped_matmul(x, x, offsets=v, activation="rellu")  # error
gm.matmul(x, x, activation="rellu")  # error
gm.matmul(x, x, dtype="floaty")  # error
gm.matmul(x, x, precision="fp8")  # error
gm.matmul(x, x, thread=3)  # error
gm.matmul(x, x, batch_invariant="yes")  # error
gm.gemm(1.0, x, x, precision="fp8")  # error
gm.gemv(x, x[0], gamma=2.0)  # error
gm.explain(x, x, activation="rellu")  # error
gm.explain(x, x, thread=3)  # error
gm.tensordot(x, x, precision="fp8")  # error
gm.nosuch  # error
gm.GemmeryError("x").nosuch  # error
"""


# Parts of which no signature of CODE names a type.
INSIDE = ("cpu", "cuda", "dispatch", "distributed", "epilogues", "jax", "ladder", "limits", "torch")
SETTINGS = f"""
[mypy]
strict = True
ignore_missing_imports = True
follow_imports = silent
show_error_codes = True
[mypy-{",".join(f"gemmery.{part}.*" for part in INSIDE)},gemmery_emulator.*,gemmery_lab.*,llvmlite.*]
follow_imports = skip
"""


def test_a_type_checker_knows_results_options_and_names(tmp_path, pytestconfig):
    """It reads the parts with public signatures alone, in 5 s: all would take 26.

    What it knows of NumPy stays in pytest's cache.
    """
    mypy = pytest.importorskip("mypy.api", reason="mypy is not installed")
    cache = getattr(pytestconfig, "cache", None)  # None with -p no:cacheprovider
    folder = cache.mkdir("mypy") if cache else tmp_path
    file = tmp_path / "use.py"
    file.write_text(CODE)
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS)
    said, errors, _ = mypy.run([f"--config-file={settings}", "--cache-dir", str(folder), str(file)])
    assert errors == ""
    found = {}
    for number, kind, text in re.findall(r"use\.py:(\d+): (error|note): (.*)", said):
        if revealed := re.match(r'Revealed type is "(?:\w+\.)*(\w+)', text):
            found[int(number)] = revealed[1]
        elif kind == "error":
            found[int(number)] = "error"
    lines = enumerate(CODE.splitlines(), 1)
    expected = {number: line.rpartition("  # ")[2] for number, line in lines if line.startswith(("reveal_type", "gm."))}
    assert found == expected, said


def test_names_of_options_are_those_that_are_accepted():
    names = set(get_args(keywords.DTypeName))
    assert names == set(dtypes.BY_NAME) | set(dtypes.BY_NUMPY_NAME)


def test_type_checkers_see_the_public_names_and_no_others():
    tree = ast.parse(Path(gm.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    imported = [name for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for name in node.names]
    seen = {name.asname for name in imported if name.asname}  # others are not exported again
    assert seen == set(gm.__all__)
    assert set(dir(gm)) == {*gm.__all__, "__version__"}


@pytest.mark.parametrize("package", [gm, lab])
def test_type_checkers_do_not_see_the_loader_of_names(package):
    body = ast.parse(Path(package.__file__).read_text()).body
    assert "__getattr__" not in {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", [name for name in gm.__all__ if name[0].islower()])
def test_help_shows_annotations_without_quotes(name):
    assert ": '" not in str(inspect.signature(getattr(gm, name)))
