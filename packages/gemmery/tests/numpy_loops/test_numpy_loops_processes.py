"""gemmery's loops under NumPy's own tests, in forked children and in subinterpreters."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from gemmery.cpu import pool

if not pool.address():
    pytest.skip("gemmery.numpy needs Linux", allow_module_level=True)

NUMPY = Path(np.__file__).parent
HAS_TESTS = importlib.util.find_spec("numpy._core.tests.test_multiarray") is not None
# Files, and what to run of them; `make test` runs the first row alone, since all of test_multiarray takes 6 minutes.
CASES = [
    ("_core/tests/test_multiarray.py", "matmul or Matmul or TestDot or TestInner"),
    ("_core/tests/test_ufunc.py", "matmul or vecdot or matvec or vecmat or signature or gufunc"),
    ("linalg/tests/test_linalg.py", "Power or MultiDot or Pinv or vecdot or matmul"),
    ("_core/tests/test_multiarray.py", ""),
    ("_core/tests/test_ufunc.py", ""),
    ("linalg/tests/test_linalg.py", ""),
    ("linalg/tests/test_regression.py", ""),
    ("linalg/tests/test_deprecations.py", ""),
]
TOO_LARGE = "huge"  # of memory: 18 GB


def results(name, chosen, plugin):
    """The outcome of each of NumPy's tests in a process of its own, and all that pytest wrote."""
    chosen = f"({chosen}) and not {TOO_LARGE}" if chosen else f"not {TOO_LARGE}"
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=short", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-W", "ignore:Passing a non-Collection", "-p", plugin, str(NUMPY / name), "-k", chosen]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")  # in place of the project's configuration
        command += ["-c", "pytest.ini"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=folder)
    lines = done.stdout.splitlines()
    outcomes = dict(reversed(line.split(" ", 1)) for line in lines if re.match(r"(PASSED|FAILED|ERROR) ", line))
    return {test.partition(" - ")[0]: outcome for test, outcome in outcomes.items()}, done.stdout


def check(name, chosen):
    """Fail for a test that passes with NumPy's own loops alone."""
    outcomes, text = results(name, chosen, "loops_installed")
    end = text[-4000:]
    assert outcomes, end
    failed = {test for test, outcome in outcomes.items() if outcome != "PASSED"}
    if failed:
        before, _ = results(name, chosen, "no:loops_installed")
        failed -= {test for test, outcome in before.items() if outcome != "PASSED"}
    assert not failed, end
    if "test_multiarray" in name:
        assert int(re.search(r"gemmery computed (\d+) products", text)[1]) > 1000, end


@pytest.mark.process
@pytest.mark.skipif(not HAS_TESTS, reason="this NumPy was installed without its tests")
@pytest.mark.many(8)
@pytest.mark.parametrize(("name", "chosen"), CASES, ids=lambda text: text or "whole")
def test_numpys_tests_that_passed_pass_with_the_loops(name, chosen):
    check(name, chosen)


def run(code, *arguments):
    """The output of a Python program, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FORK = """
import os, time
import numpy as np, gemmery.numpy
from gemmery import tiers
from gemmery import numpy as installing
gemmery.numpy.install()
installing.count(True)
a = np.arange(900).reshape(30, 30).astype("i4")
exact = a.dot(a)
assert (a @ a == exact).all()  # asks for kernels, which the parent may be compiling when it forks
child = os.fork()
late = time.monotonic() + 60
while not sum(row.products for row in installing.counts()):
    assert (a @ a == exact).all() and time.monotonic() < late
    time.sleep(0.001)
x = np.ones((800, 800), "f2")
installing.install(wait=True)
assert (x @ x == 800).all()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("both")
"""

SUBINTERPRETER = """
import numpy as np, gemmery.numpy
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
gemmery.numpy.install(wait=True)
a = np.arange(900).reshape(30, 30).astype("i4")
exact = a.dot(a)
inner = '''
import warnings
warnings.simplefilter("ignore")
try:
    import numpy as np
except ImportError:
    pass
else:
    a = np.arange(900).reshape(30, 30).astype("i4")
    assert (a @ a == a.dot(a)).all()
    try:
        import gemmery.numpy
        with gemmery.numpy.install("int32"):
            for _ in range(1000):
                assert (a @ a == a.dot(a)).all()
    except ImportError:
        pass
    assert (a @ a == a.dot(a)).all()
'''
for _ in range(2):
    try:
        new = interpreters.create(isolated=False)
    except TypeError:
        new = interpreters.create("legacy")
    failed = interpreters.run_string(new, inner)
    assert failed is None, failed
    assert (a @ a == exact).all()
    interpreters.destroy(new)
assert (a @ a == exact).all()
print("both")
"""


@pytest.mark.process
def test_a_forked_child_multiplies_and_asks_for_kernels_itself():
    assert run(FORK).endswith("both\n")


@pytest.mark.process
def test_subinterpreters_multiply_beside_the_loops():
    assert run(SUBINTERPRETER).endswith("both\n")


@pytest.mark.process
def test_without_tiers_every_kernel_is_there_after_install():
    code = """
import numpy as np, gemmery.numpy
from gemmery import numpy as installing
gemmery.numpy.install("int8")
installing.count(True)
a = np.ones((50, 50), "i1")
assert (a @ a == 50).all()
print([(row.products, row.numpys) for row in installing.counts()])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GEMMERY_TIERS": "off"},
    )
    assert done.stdout == "[(1, 0)]\n", done.stderr
