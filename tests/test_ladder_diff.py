"""What changed between two rungs: sources, facts, refusals, and how it is shown."""

import io

import pytest
from rich.console import Console

from gemmery import cli, lab, report
from gemmery.errors import ArgumentError
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.diff import source
from gemmery.ladder.rung import find
from gemmery.report.diff import difference_page


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
    removed = [line[1:] for line in found.lines[2:] if line.startswith("-")]
    added = [line[1:] for line in found.lines[2:] if line.startswith("+")]
    assert removed
    assert added
    assert len(old) - len(removed) == len(new) - len(added)
    assert not [line for line in removed if line not in old]
    assert not [line for line in added if line not in new]


def test_what_is_said_of_them_is_compared():
    facts = {fact.name: (fact.old, fact.new) for fact in lab.diff("simt_naive", "simt_smem").facts}
    tile = find(CUDA, "simt_smem").default["tile"]
    assert facts["config tile"] == ("", str(tile))
    assert facts["threads a block"] == ("32 x 8", f"{tile} x {tile}")
    assert facts["parent"] == ("simt_single_block", "simt_naive")
    assert "dtypes" not in facts  # the same


def test_rungs_of_one_source_differ_in_their_facts_alone(monkeypatch):
    monkeypatch.setattr("gemmery.ladder.diff.source", lambda rung: "the same\n")
    found = lab.diff("packed", "packed_threaded")
    assert found.lines == ()
    assert "idea" in [fact.name for fact in found.facts]
    shown = io.StringIO()
    report.show_difference(found, Console(file=shown))
    assert "same source" in shown.getvalue()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [("simt_naive", "nothing", "'nothing' is not in the ladder"), ("packed", "packed", "compared with itself")],
)
def test_a_rung_that_cannot_be_compared_is_an_error(old, new, said):
    with pytest.raises(ArgumentError, match=said):
        lab.diff(old, new)


def test_a_terminal_shows_it_in_colours():
    shown = io.StringIO()
    report.show_difference(
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
