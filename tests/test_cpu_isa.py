"""The narrower instruction sets: the same tests in a process limited to them, and no wider instruction in the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gemmery import config, dtypes
from gemmery.config import ISAS
from gemmery.cpu import build, jit, loops
from gemmery.cpu.target import host
from gemmery.problem import Problem

HERE = Path(__file__).parent
NARROWER = ISAS[: ISAS.index(host().isa)]
FORBIDDEN = {"avx2": r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])|vpdp", "generic": r"%[yz]mm|\tv[a-z]"}
PROBLEMS = [
    Problem(8, 8, 8, name, out, epilogue=epilogue)
    for name in dtypes.NAMES
    for out in dtypes.NAMES
    for epilogue in ("", "bias+gelu", "bias+silu")
    if not build.packed_refuses(Problem(8, 8, 8, name, out, epilogue=epilogue))
]
PARTS = [
    ("test_cpu_packed.py", "test_cpu_epilogue.py", "test_cpu_isa.py::test_this_process_is_limited_as_asked"),
    ("test_ladder.py", "-k", "test_layouts and not packed"),
]


@pytest.mark.parametrize("isa", NARROWER)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part[0])
def test_the_kernels_are_right_when_limited_to(isa, part):
    command = [sys.executable, "-m", "pytest", f"--isa={isa}", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run([*command, *part], cwd=HERE, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-500:]
    assert int(passed[1]) > 50


def test_this_process_is_limited_as_asked(pytestconfig):
    limit = pytestconfig.getoption("--isa")
    assert host().isa == limit if limit else config.isa_limit() is None


@pytest.mark.parametrize("isa", NARROWER)
@pytest.mark.parametrize("layouts", [("row", "row"), ("col", "col")], ids="-".join)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: "-".join(filter(None, (p.dtype, p.out, p.epilogue))))
def test_code_keeps_to_its_registers_and_instructions(isa, problem, layouts):
    """Building the kernel also shows that it calls nothing: an image with an outside reference is a CompileError."""
    target = host().limited(isa)
    made = build.product(target, problem)

    def generate():
        return loops.packed(target, made, *layouts)

    assert jit.load(target, f"packed_{made.name}_{'_'.join(layouts)}", generate)["packed"]
    code = jit.assembly(target, made.name, generate)
    found = re.search(FORBIDDEN[isa], code)
    assert not found, code[found.start() - 200 : found.end() + 50]
    assert "packed:" in code
