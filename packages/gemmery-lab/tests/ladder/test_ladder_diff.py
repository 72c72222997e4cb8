"""The difference of two rungs: code, facts, refusals, and how it is shown."""

import io
import re
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

import gemmery
import gemmery_lab as lab
from gemmery.errors import ArgumentError
from gemmery.ladder import diff as differences
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.diff import source
from gemmery.ladder.rung import find
from gemmery_lab import cli
from gemmery_lab.report.terminal import difference_page, show_difference


def test_rungs_of_one_file_are_cut_to_the_functions_that_make_them():
    text = source(find(CPU, "simd_blocked"))
    assert "def simd_blocked(" in text
    assert "def _row_times_scalar(" in text
    assert "def simd_row(" not in text


def test_every_rung_has_a_source():
    for rung in (*CPU, *CUDA):
        assert source(rung).strip(), rung.name


def test_the_lines_turn_one_source_into_the_other():
    found = lab.diff("simt_naive", "simt_smem")
    old, new = (source(find(CUDA, name)).splitlines() for name in ("simt_naive", "simt_smem"))
    lines = found.lines[2 : next(place for place, line in enumerate(found.lines) if " uses, " in line)]
    removed = [line[1:] for line in lines if line.startswith("-")]
    added = [line[1:] for line in lines if line.startswith("+")]
    assert removed
    assert added
    assert len(old) - len(removed) == len(new) - len(added)
    assert not [line for line in removed if line not in old]
    assert not [line for line in added if line not in new]


def only(old, new):
    """Definitions that only one of two rungs uses, by its name."""
    found = {old: [], new: []}
    for line in lab.diff(old, new).lines:
        if line.startswith(("---", "+++")):
            rung = line.split()[2] if " only " in line else ""
        elif line.startswith("@@") and rung:
            found[rung].append(line.removeprefix("@@ ").removesuffix(" @@"))
    return found[old], found[new]


@pytest.mark.parametrize(
    ("old", "new", "removed", "added"),
    [
        ("simt_vectorized", "simt_padded", ["ThreadTiling", "SideMajor"], []),
        ("simt_padded", "simt_swizzled", ["KMajor"], []),
        ("simt_padded", "simt_warptile", [], []),
        (
            "simt_warptile",
            "simt_pipelined",
            ["multiply_tiles", "multiply_in_registers"],
            [
                *(
                    "PartOfK",
                    "store_shared",
                    "packed_row",
                    "packed_panel",
                    "a_panel",
                    "packed_a",
                    "packed_b",
                    "b_panel",
                ),
                *("along_k", "partial_sums", "mapa", "barrier_cluster_arrive", "barrier_cluster_wait"),
                *("st_shared_cluster_v4", "st_shared_cluster_v4", "ld_shared_v4"),
                *("clear", "cp_async_commit_group", "cp_async_wait_group", "ld_shared_v4"),
                *(*["ZeroOf"] * 2, *["PadsWithZeros"] * 2),
            ],
        ),
        ("simt_naive", "simt_uncoalesced", [], []),
    ],
)
def test_the_idea_of_a_rung_is_shown_where_it_is_in_a_header(old, new, removed, added):
    assert only(old, new) == (removed, added)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("simt_smem", "simt_threadtile", "+template <class Tiles, class S> struct ThreadTiling {"),
        ("simt_vectorized", "simt_padded", "+template <class Tiles, class S> struct StripTiling {"),
        ("simt_padded", "simt_swizzled", "+template <class S, int SIDE, int BK, class Load> struct XorSwizzle {"),
        (
            "simt_padded",
            "simt_warptile",
            "+template <class Tiles, int WM, int WN, class S, bool SINGLE = false> struct WarpTiling {",
        ),
        ("wmma_f64", "wmma_f16", "+template <> struct WmmaFragment<tf32> {"),
        (
            "gemv_thread",
            "gemv_thread_smem",
            "+__device__ __forceinline__ void stage(S (&x)[TILE], const Gemv<T>& g, int first) {",
        ),
    ],
)
def test_the_idea_of_a_rung_is_in_its_file(old, new, line):
    found = lab.diff(old, new)
    files = next((place for place, text in enumerate(found.lines) if " uses, " in text), None)
    assert line in found.lines[:files]


# Rungs that repeat more than a quarter of their lines: at most how many percent, and why.
REPEATS = {
    "simt_uncoalesced": (40, "it is its parent with i and j exchanged, which is all that it shows: 3 of 8 lines"),
    "gemv_thread_smem": (30, "a loop over the batch, and the sum of a result"),
    "wgmma_cluster": (50, "its idea is in cluster.cuh, and its file a kernel of 8 lines with an attribute"),
    "split_paired": (40, "its idea is how a part of a sum is added, and its kernel has six lines"),
}


def code(rung):
    """The lines of a rung's file that are neither comments nor braces alone."""
    lines = (line.strip() for line in source(rung).splitlines())
    return Counter(line for line in lines if re.search(r"\w", line) and not line.startswith("//"))


@pytest.mark.parametrize("rung", [rung for rung in CUDA if rung.parent], ids=lambda rung: rung.name)
def test_a_rung_repeats_little_of_its_parent(rung):
    """Its file holds what is new: shared code is in headers, and an idea of the parent in the parent's file."""
    lines = code(rung)
    percent = 100 * (lines & code(find(CUDA, rung.parent))).total() / lines.total()
    most, why = REPEATS.get(rung.name, (25, ""))
    assert percent <= most, f"{percent:.0f} % of the lines are its parent's: {why}"
    assert percent > 25 or not why, "it repeats little: take it out of the table"


def test_a_register_tile_is_shown_from_its_header():
    found = lab.diff("simt_smem", "simt_threadtile")
    for name in ("fragment", "outer_product", "multiply_tiles", "multiply_in_registers"):
        assert f"@@ {name} @@" in found.lines
    place = found.lines.index("@@ multiply_tiles @@")
    assert found.lines[place + 1].startswith("+// Adds the BK outer products")
    assert "+    outer_product(a, b, sums);" in found.lines
    assert "+++ only simt_threadtile uses, cuda/kernels/registers.cuh" in found.lines


def test_a_rung_on_its_parents_kernel_adds_to_it():
    """packed_threaded runs packed's kernel, and takes nothing away."""
    removed, added = only("packed", "packed_threaded")
    assert removed == []
    assert {"_make", "entries", "started"} <= set(added)


def test_rungs_of_two_python_files_differ_in_the_functions_that_they_use():
    removed, added = only("packed", "direct")
    assert "packed" in removed
    assert "direct" in added
    assert "workspace_bytes" not in removed  # of the same file, and no part of the kernel
    assert not [line for line in lab.diff("packed", "direct").lines if "import" in line]


def test_every_definition_of_a_header_has_a_name():
    headers = sorted(Path(gemmery.__file__).parent.glob("cuda/kernels/*.cuh"))
    assert len(headers) > 10
    for header in headers:
        known = differences.of_header(f"cuda/kernels/{header.name}")
        assert known, header.name
        assert all(one.name.isidentifier() for one in known), header.name
        inside = sum(one.text.count("{") for one in known)
        spaces = len(re.findall(r"^namespace", header.read_text(), re.MULTILINE))
        lines = header.read_text().replace("\\\n", "").splitlines()
        outside = sum(line.count("{") for line in lines if line.startswith(("//", "#")))
        assert 0 <= header.read_text().count("{") - inside - spaces <= outside, header.name  # nothing is left out


def test_what_is_said_of_them_is_compared():
    facts = {fact.name: (fact.old, fact.new) for fact in lab.diff("simt_naive", "simt_smem").facts}
    tile = find(CUDA, "simt_smem").default["tile"]
    assert facts["config tile"] == ("", str(tile))
    assert facts["threads per block"] == ("32 x 8", f"{tile} x {tile}")
    assert facts["parent"] == ("simt_single_block", "simt_naive")
    assert facts["dtypes"][1].startswith(facts["dtypes"][0])  # it takes more


def test_rungs_of_one_source_differ_in_their_facts_alone(monkeypatch):
    monkeypatch.setattr("gemmery.ladder.diff.in_python", lambda source, entry: ())
    found = lab.diff("packed", "packed_threaded")
    assert found.lines == ()
    assert "idea" in [fact.name for fact in found.facts]
    shown = io.StringIO()
    show_difference(found, Console(file=shown))
    assert "run the same code" in shown.getvalue()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [("simt_naive", "nothing", "'nothing' is not in the ladder"), ("packed", "packed", "compared with itself")],
)
def test_a_rung_that_cannot_be_compared_is_an_error(old, new, said):
    with pytest.raises(ArgumentError, match=said):
        lab.diff(old, new)


def test_a_terminal_shows_it_in_colors():
    shown = io.StringIO()
    show_difference(
        lab.diff("simd_row", "simd_blocked"),
        Console(file=shown, force_terminal=True, color_system="standard", width=99),
    )
    assert "\x1b[31m-def simd_row(" in shown.getvalue()
    assert "\x1b[32m+def simd_blocked(" in shown.getvalue()


def test_a_page_shows_it_escaped():
    page = difference_page(lab.diff("simt_naive", "simt_smem"))
    assert "<span class=added>+template &lt;class T" in page
    assert "<span class=removed>" in page
    assert "#include <" not in page


def test_the_command_writes_a_page_where_asked(tmp_path, capsys):
    assert cli.run(["ladder", "diff", "simd_row", "simd_blocked", "--html", str(tmp_path / "d.html")]) == 0
    assert "-def simd_row(" in capsys.readouterr().out
    assert (tmp_path / "d.html").read_text().startswith("<!doctype html>")
    assert cli.run(["ladder", "diff", "simd_row", "simd_row"]) == 2
