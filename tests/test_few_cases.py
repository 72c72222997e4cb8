"""`make test` runs one case in ten of tests with many: still each of those tests, and each rung."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import conftest
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def cases():
    """The cases of the ladders' tests, all of them and with --few."""
    files = ("test_ladder.py", "test_emulator_ladder.py", "test_cuda_compile.py")

    def collected(*options):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", *options, *files]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=300, check=True)
        return [line for line in done.stdout.splitlines() if "::" in line and not line.startswith("SKIPPED")]

    return collected(), collected("--few")


def test_every_test_keeps_a_tenth_of_its_cases(cases):
    every, few = (Counter(case.partition("[")[0] for case in each) for each in cases)
    assert set(few) == set(every)
    thinned = {name for name in every if few[name] < every[name]}
    assert len(thinned) > 10
    assert all(few[name] >= every[name] // conftest.MANY for name in thinned)
    assert sum(few[name] for name in thinned) < sum(every[name] for name in thinned) / 4


def test_every_rung_is_left(cases):
    left = {part for case in cases[1] for part in case.partition("[")[2].rstrip("]").split("-")}
    assert {rung.name for rung in (*CPU, *CUDA)} - left == set()
    shapes = [case for case in cases[1] if "test_emulator_ladder.py::test_shapes[" in case]
    assert len({case.partition("[")[2].partition("-")[0] for case in shapes}) >= len(CUDA) / 2
