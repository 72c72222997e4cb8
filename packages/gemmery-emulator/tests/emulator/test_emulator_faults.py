"""The fault of each kernel in tests/data/races.cu and warps.cu is found, and nothing in the repaired kernel."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from gemmery.cuda import nvrtc
from gemmery_emulator.kernels.kernel import emulate

pytest.importorskip("cuda.bindings")

FOLDER = Path(__file__).parents[1] / "data"
CASE = re.compile(r"^// (?:([a-z ]+), )?(\(.*?\)|\d+) x (\d+): .*\nKERNEL\((\w+)\)", re.MULTILINE)
CASES = {
    name: (file, kind or "race", tuple(map(int, re.findall(r"\d+", grid))), int(block))
    for file in ("races.cu", "warps.cu")
    for kind, grid, block, name in CASE.findall((FOLDER / file).read_text())
}
ARCH = "sm_90a"


@cache
def compiled(file, repaired):
    """The PTX of all kernels of a file."""
    options = ("-DREPAIRED",) if repaired else ()
    beside = {"faults.cuh": (FOLDER / "faults.cuh").read_text()}
    return nvrtc.ptx_alone((FOLDER / file).read_text(), file, "", ARCH, options, beside).text


def found(name, repaired=False, seed=None):
    """The kinds of what is found in one of the kernels, warnings included but for elements left unwritten."""
    file, _, grid, block = CASES[name]
    x, y, n = np.arange(8192, dtype=np.float32) % 61, np.zeros(8192, np.float32), np.zeros(8192, np.int32)
    run = emulate(compiled(file, repaired), name, grid, block, [x, y, n], arch=ARCH, seed=seed)
    return {one.kind for one in run.findings + run.warnings} - {"unwritten"}  # the arrays serve all kernels


def test_every_kernel_of_the_files_is_launched():
    """A comment in another form leaves none out."""
    for file in ("races.cu", "warps.cu"):
        text = (FOLDER / file).read_text()
        assert re.findall(r"^KERNEL\((\w+)\)", text, re.MULTILINE) == [name for name in CASES if CASES[name][0] == file]
    assert sum(kind == "race" for _, kind, _, _ in CASES.values()) >= 40
    assert sum(file == "warps.cu" for file, *_ in CASES.values()) >= 30


@pytest.mark.many(5)
@pytest.mark.parametrize("name", CASES)
def test_the_fault_is_found_and_the_repaired_kernel_has_none(name):
    """Its kind, in a run without a seed."""
    kinds = found(name)
    assert CASES[name][1] in kinds
    assert "race" not in kinds or CASES[name][1] != "equal stores"
    assert found(name, repaired=True) == set()
