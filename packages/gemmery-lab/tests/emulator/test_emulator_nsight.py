"""The emulator's counts against what Nsight Compute counted on an H200 while the same kernels ran."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

from gemmery.cuda import nvrtc
from gemmery_emulator.counters.counts import Counts
from gemmery_emulator.ptx import Line
from gemmery_lab.measure.work import Work

ROOT = Path(__file__).parents[4]


def loaded():
    """benchmarks/nsight_compare.py, which is a script."""
    spec = importlib.util.spec_from_file_location("nsight_compare", ROOT / "benchmarks" / "nsight_compare.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # where its dataclass looks for itself
    spec.loader.exec_module(script)
    return script


nsight = loaded()
FILE = ROOT / "benchmarks" / "nsight" / "nvidia-h200.jsonl"
ALL = nsight.stored(FILE)
ROWS = [row for row in ALL if not nsight.aside(row)]
MANY_STEPS = ("simt_uncoalesced", "simt_packed", "simt_linear", "wmma_f64")


def is_quick(row):
    """Below about 5 seconds; benchmarks/nsight_compare.py takes them all."""
    simt = row["rung"].startswith("simt") and row["work"]["m"] > 16
    return row["rung"] not in MANY_STEPS and (not simt or row["work"]["dtype"] == "f32")


def named(row):
    return f"{row['rung']}-{nsight.kind(row)}-{row['work']['b_layout']}"


@pytest.mark.many
@pytest.mark.parametrize("row", [pytest.param(row, id=named(row)) for row in ROWS if is_quick(row)])
def test_counts_are_the_profilers(row):
    """All counts of a launch and of each place in its source, equal to the digit but for what is known to differ.

    Those are requests, sectors, wavefronts and their ideal, instructions by kind; and the bytes of C.
    """
    found, digest = nsight.emulated(row)
    assert digest == row["c"]
    known = set(nsight.known(row))
    assert set(nsight.differences(row, found)) == known
    if nsight.alike(row):  # lines are only taken for each other where that explains something
        launches = zip(found, row["launches"], strict=True)
        assert not known.issuperset(one for pair in launches for one in nsight.by_place(*pair, frozenset()))


@pytest.mark.parametrize("row", [pytest.param(row, id=named(row)) for row in ROWS if nsight.known(row)])
def test_known_differences_are_of_the_records(row):
    """What the table says was measured is what the file says, also of products that take long to emulate."""
    theirs = sum((Counter(nsight.measured(launch)) for launch in row["launches"]), Counter())
    in_all = [one for one in nsight.known(row) if " at " not in one.name]
    assert {one.name: one.theirs for one in in_all} == {one.name: theirs[one.name] for one in in_all}
    assert all(one.ours != one.theirs for one in nsight.known(row))


def test_every_known_difference_is_of_a_product():
    """No line of the table stands for a product that the file does not hold."""
    products = {(row["rung"], nsight.kind(row)) for row in ALL}
    tables = nsight.noted()
    listed = [*(one for table in tables["known"] for one in table["counts"])]
    listed += [one for table in tables["alike"] for one in table["lines"]]
    assert {tuple(one[:2]) for one in listed} <= products


LEFT_OUT = [row for row in ALL if nsight.aside(row)]


def test_each_product_that_is_not_compared_is_in_the_file():
    assert len(LEFT_OUT) == sum(len(table["products"]) for table in nsight.noted()["aside"])


@pytest.mark.many
@pytest.mark.parametrize("row", LEFT_OUT, ids=named)
def test_what_is_not_compared_differs(row):
    """Its launches have other PTX than was measured, or other counts; C is the same if the PTX is."""
    geometry = nsight.geometry_of(row)
    names = [launch.kernel for launch in geometry.launches]
    if nvrtc.version() == nsight.machine(FILE)["gpu"]["nvrtc"] and names == [one["kernel"] for one in row["launches"]]:
        texts = [nvrtc.compiled(one.source, one.kernel, nsight.ARCH).ptx for one in geometry.launches]
        if [nsight.ptx_digest(text) for text in texts] == [one["ptx"] for one in row["launches"]]:
            found, digest = nsight.emulated(row)
            assert digest == row["c"]
            assert set(nsight.differences(row, found)) != set()


def test_a_place_is_where_lines_cannot_be_told_apart():
    """A difference is found at its line, also where two others cancel it in the whole launch."""
    launch = {
        "memory": [
            {"file": "k.cu", "line": line, "opcode": "LDS", "executed": 4, "wavefronts": 4, "ideal": 4, "sectors": 0}
            for line in (1, 2)
        ]
    }
    more, less = (Counts(instructions=Counter(ld=count)) for count in (5, 3))
    one, two, three = (Line("k.cu", number) for number in (1, 2, 3))

    def loads(frames):
        found = nsight.by_place(Counts(frames=frames), launch, frozenset())
        return [str(difference) for difference in found if difference.name.startswith("ld at")]

    apart = ["ld at k.cu:1: 5 emulated, 4 measured", "ld at k.cu:2: 3 emulated, 4 measured"]
    assert sorted(loads({(one,): more, (two,): less})) == apart
    assert sorted(loads({(three, one): more, (three, two): less})) == apart
    assert not loads({(one, three): more, (one, two): less})  # the code of line 2 may be said to be at line 1


def test_kernels_are_those_that_were_measured():
    """The same launches, and with the same compiler the same PTX."""
    for row in ROWS:
        geometry = nsight.geometry_of(row)
        for launch, one in zip(row["launches"], geometry.launches, strict=True):
            assert (launch["kernel"], tuple(launch["grid"]), tuple(launch["block"]), launch["shared"]) == (
                one.kernel,
                one.grid,
                one.block,
                one.shared,
            ), Work(**row["work"])
    if ROWS and nvrtc.version() == nsight.machine(FILE)["gpu"]["nvrtc"]:
        for launch in ROWS[0]["launches"]:
            made = nvrtc.compiled(nsight.geometry_of(ROWS[0]).source, launch["kernel"], nsight.ARCH)
            assert nsight.ptx_digest(made.ptx) == launch["ptx"]
