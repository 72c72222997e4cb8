"""The fixture `emulate` of pytest: findings and limits of counters, with the lines in the message."""

import subprocess
import sys

import pytest

from gemmery.errors import ArgumentError
from gemmery_emulator.pytest import Emulate

KERNEL = """
__global__ void f(const float* x, float* y) {
  __shared__ float s[32][STRIDE];
  int i = threadIdx.x, j = threadIdx.y;
  s[j][i] = x[STEP * (j * 32 + i)];
  BARRIER;
  if (LAST) y[j * 32 + i] = s[i][j];
}"""
TEST = """
import numpy as np
X = np.arange(2048, dtype=np.float32)

def run(emulate, stride=33, step=1, barrier="__syncthreads()", last="true", **limits):
    options = (f"-DSTRIDE={stride}", f"-DSTEP={step}", f"-DBARRIER={barrier}", f"-DLAST={last}")
    y = np.zeros(1024, np.float32)
    return emulate(KERNEL, "f", 1, (32, 32), [X, y], options=options, **limits)

def test_right(emulate):
    assert run(emulate, bank_conflicts=0, bytes_a_sector=32, divergent_branches=0).kernel == "f"

def test_conflicts(emulate):
    run(emulate, stride=32, bank_conflicts=2)

def test_race(emulate):
    run(emulate, barrier="")

def test_race_that_is_known(emulate):
    run(emulate, barrier="", findings=-1)

FLAG = "__global__ void f(int* flag) { *flag = 1; }"

def test_equal_stores(emulate):
    emulate(FLAG, "f", 1, 64, [np.zeros(1, np.int32)])

def test_equal_stores_that_are_not_allowed(emulate):
    emulate(FLAG, "f", 1, 64, [np.zeros(1, np.int32)], warnings=0)

def test_sectors(emulate):
    run(emulate, step=2, bytes_a_sector=30)
"""
MESSAGES = (
    ("test_conflicts", "992 bank conflicts, and at most 2 are allowed", "kernel.cu:7: 992  if (LAST) y"),
    ("test_race", "1 finding, and at most 0 are allowed", "kernel.cu:7: race: thread"),
    ("test_equal_stores_that_are_not_allowed", "1 warning, and at most 0", "kernel.cu:1: equal stores: thread"),
    ("test_sectors", "21.3 of the 32 bytes of a sector", "kernel.cu:5: 4,096 unused bytes  s[j][i] = x"),
)


@pytest.mark.process
def test_a_test_fails_with_the_line_of_its_kernel(tmp_path):
    pytest.importorskip("cuda.bindings")
    path = tmp_path / "test_kernel.py"
    path.write_text(f"KERNEL = {KERNEL!r}\n{TEST}")
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "gemmery_emulator.pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
    ]
    output = subprocess.run([*line, path], capture_output=True, text=True, check=False).stdout
    assert "4 failed, 3 passed" in output, output
    for name, what, place in MESSAGES:
        part = output.partition(f" {name} ")[2].partition("____")[2]
        assert what in part, output
        assert place in part, output


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ({"findings": float("nan")}, r"findings=nan: pass a whole number >= 0, or -1 for any number"),
        ({"warnings": -2}, r"warnings=-2: pass a whole number"),
        ({"bank_conflicts": float("nan")}, r"bank_conflicts=nan: pass a whole number >= 0, or None for no limit"),
        ({"divergent_branches": "2"}, r"divergent_branches='2': pass a whole number"),
        ({"bytes_a_sector": float("nan")}, r"bytes_a_sector=nan: pass a number from 0 to 32"),
        ({"bytes_a_sector": 33}, r"bytes_a_sector=33: pass a number from 0 to 32"),
    ],
)
def test_a_limit_that_would_never_fail_is_refused(limit, words):
    with pytest.raises(ArgumentError, match=words):
        Emulate()(KERNEL, "f", 1, 32, [], **limit)
