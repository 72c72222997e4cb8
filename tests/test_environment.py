"""Every test runs in an environment that the tests made: nothing that a shell exports reaches it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import DISTORTING
from gemmery_lab.measure import libraries

SHELL = {
    "GEMMERY_ISA": "generic",
    "GEMMERY_NUM_THREADS": "many",
    "MKL_CBWR": "COMPATIBLE",
    "NO_COLOR": "1",
    "COLUMNS": "20",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENBLAS_L2_SIZE": "512",
    "OPENBLAS_VERBOSE": "2",
}


def distorting(environment):
    """Names of variables that distort; threadpoolctl sets one when it is imported, and conftest.py another."""
    meant = "KMP_DUPLICATE_LIB_OK", "GEMMERY_TABLE"
    return sorted(name for name in environment if name.startswith(DISTORTING) and name not in meant)


@pytest.mark.process
def test_nothing_that_distorts_is_set_here():
    code = "import os, numpy; print(*os.environ, sep='\\n')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not distorting(os.environ)
    assert not distorting(child.split())


@pytest.mark.parametrize("turn", [1, 2])
def test_what_a_test_sets_is_gone_in_the_next(turn):
    assert "OPENBLAS_L2_SIZE" not in os.environ
    assert "PATH" in os.environ
    os.environ["OPENBLAS_L2_SIZE"] = str(turn)
    del os.environ["PATH"]


@pytest.mark.process
def test_a_shell_that_exports_them_changes_nothing():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(
        [*command, "-k", "not shell"], cwd=Path(__file__).parent, env={**os.environ, **SHELL}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "core:" not in done.stdout.lower()  # OpenBLAS with OPENBLAS_VERBOSE=2 names its kernels when it is loaded
    assert "core:" not in done.stderr.lower()
    assert "6 passed" in done.stdout


def test_every_variable_that_steers_a_rival_is_cleared():
    assert not [prefix for prefix in libraries.STEERING if not prefix.startswith(DISTORTING)]


@pytest.mark.parametrize("time", ["first", "second"])
def test_a_raised_limit_of_recursion_is_lowered_again(time):
    assert sys.getrecursionlimit() < 12_345
    sys.setrecursionlimit(12_345)
