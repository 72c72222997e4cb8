"""The emulator's counts against what Nsight Compute counted on an H200 while the same kernels ran."""

import hashlib
import importlib.util
from pathlib import Path

import pytest

from gemmery.bench.work import Work
from gemmery.cuda import nvrtc

ROOT = Path(__file__).parent.parent


def loaded():
    """benchmarks/nsight.py, which is a script."""
    spec = importlib.util.spec_from_file_location("nsight", ROOT / "benchmarks" / "nsight.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


nsight = loaded()
ROWS = nsight.stored(ROOT / "benchmarks" / "nsight" / "nvidia-h200.jsonl")
TENSOR = ("mma_", "wmma_")  # how these units round their sums is not documented: the bytes of C may differ
# What is known to differ, and why.
DIFFERENT = {
    "simt_linear": {"requests_ld", "sectors_ld"},  # ptxas hands a stored sum on to the next load of it
    "mma_pipelined": {"stores_wavefronts"},  # in f16 the profiler takes half of B's cp.async for writes of zeros
}
MANY_STEPS = ("simt_uncoalesced", "simt_packed", "simt_linear")


def is_quick(row):
    """Below about 4 seconds; benchmarks/nsight.py --compare takes them all."""
    simt = row["rung"].startswith("simt") and row["work"]["m"] > 16
    return not simt or (row["work"]["dtype"] == "f32" and row["rung"] not in MANY_STEPS)


def named(row):
    return f"{row['rung']}-{row['work']['precision'] or row['work']['dtype']}-{row['work']['b_layout']}"


@pytest.mark.parametrize("row", [pytest.param(row, id=named(row)) for row in ROWS if is_quick(row)])
def test_counts_are_the_profilers(row):
    """Requests, sectors, wavefronts and their ideal, equal to the digit; of CUDA cores also the bytes of C."""
    found, digest = nsight.emulated(row)
    if not row["rung"].startswith(TENSOR):
        assert digest == row["c"]
    for launch, ours in zip(row["launches"], found, strict=True):
        theirs = nsight.measured(launch)
        wrong = {name: (ours[name], value) for name, value in theirs.items() if ours[name] != value}
        known = DIFFERENT.get(row["rung"], set())
        assert set(wrong) <= known, wrong


def test_kernels_are_those_that_were_measured():
    """The same launches, and with the same compiler the same PTX."""
    for row in ROWS:
        geometry = nsight.geometry_of(row)
        for launch, one in zip(row["launches"], (*geometry.before, geometry), strict=True):
            assert (launch["kernel"], tuple(launch["grid"]), tuple(launch["block"]), launch["shared"]) == (
                one.kernel,
                one.grid,
                one.block,
                one.shared,
            ), Work(**row["work"])
    if nvrtc.version() == nsight.machine(ROOT / "benchmarks" / "nsight" / "nvidia-h200.jsonl")["gpu"]["nvrtc"]:
        for launch in ROWS[0]["launches"]:
            made = nvrtc.compiled(nsight.geometry_of(ROWS[0]).source, launch["kernel"], nsight.ARCH)
            assert hashlib.sha256(made.ptx.encode()).hexdigest() == launch["ptx"]
