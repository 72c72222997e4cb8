"""The cases of matmul, tensordot and vecdot in the array API's own test suite, on NumPy's namespace with gemmery's.

It runs where ARRAY_API_TESTS_DIR names a checkout, with its submodule, of https://github.com/data-apis/array-api-tests.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = "(matmul or tensordot or vecdot) and not special"
EXAMPLES = 200  # products per case
SHARED = Path(__file__).parents[1] / "shared"


@pytest.mark.process
@pytest.mark.skipif("ARRAY_API_TESTS_DIR" not in os.environ, reason="ARRAY_API_TESTS_DIR names no array-api-tests")
def test_the_array_api():
    folder = Path(os.environ["ARRAY_API_TESTS_DIR"])
    pytest.importorskip("ndindex", reason="ndindex, which array-api-tests needs, is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CASES]
    files = [f"array_api_tests/{name}.py" for name in ("test_linalg", "test_signatures", "test_has_names")]
    done = subprocess.run(
        [*command, *files, "--max-examples", str(EXAMPLES), "--derandomize", "--disable-deadline"],
        cwd=folder,
        env={
            **os.environ,
            "ARRAY_API_TESTS_MODULE": "array_api_namespace",
            "PYTHONPATH": os.pathsep.join([str(SHARED), *sys.path]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
