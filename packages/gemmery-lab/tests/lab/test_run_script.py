"""`gemmery run`: the script's own arguments, exit code and traceback, and the summary of its products."""

import re
import subprocess
import sys

import pytest

from gemmery.cpu import pool
from gemmery_lab import cli

pytestmark = [pytest.mark.process, pytest.mark.skipif(not pool.address(), reason="gemmery.numpy needs Linux")]
SCRIPT = """
import sys
import numpy as np
import beside
assert __name__ == "__main__" and sys.argv[1:] == ["--size", "40"], sys.argv
a = np.ones((40, 40), "i2")
while True:
    assert (a @ a == 40).all()
    beside.turn()
    if beside.turns == 3000:
        sys.exit(beside.code)
"""
BESIDE = """
turns, code = 0, 7
def turn():
    global turns
    turns += 1
"""


def gemmery(folder, *arguments):
    command = [sys.executable, "-m", "gemmery", "run", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text(BESIDE)
    return tmp_path


@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"], ["--types", "float32", "script.py"]])
def test_a_script_runs_and_its_products_are_counted(folder, how):
    done = gemmery(folder, *how, "--size", "40")
    assert done.returncode == 7, done.stderr
    assert done.stdout == ""
    [row] = re.findall(r"int16, medium: ([\d,]+) products in .* s.*; ([\d,]+) by NumPy's loop", done.stderr)
    assert sum(int(number.replace(",", "")) for number in row) == 3000
    assert "estimates" in done.stderr


def test_an_exception_of_the_script_is_shown(folder):
    done = gemmery(folder, "script.py")
    assert done.returncode == 1
    assert "AssertionError" in done.stderr
    assert "script.py" in done.stderr
    assert "no product of these types ran" in done.stderr


def test_a_missing_script_and_an_unknown_type(folder, capsys):
    assert cli.run(["run", "none.py", "--its-own"]) == 2
    assert capsys.readouterr().err.startswith("gemmery: script 'none.py': there is no such file")
    assert cli.run(["run", "--types", "float128", __file__]) == 2
    assert capsys.readouterr().err.startswith("gemmery: --types: dtype 'float128'")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    for wrong in (["package"], ["-m", "package"], ["-m", "no.such.module"]):
        done = gemmery(folder, *wrong)
        assert done.returncode == 2
        assert re.fullmatch(r"gemmery: (script|module) '.*'.*; give the path of .*\n", done.stderr), done.stderr
    (folder / "runs.py").write_text("import runpy; runpy.run_module('nowhere')")
    done = gemmery(folder, "runs.py")
    assert done.returncode == 1
    assert "runs.py" in done.stderr
    assert done.stderr.endswith("No module named nowhere\ngemmery: no product of these types ran\n")
