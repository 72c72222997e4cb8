"""Steps of the ladder: the counters and the time that moved, on pages and in the terminal."""

import re

import pytest

import gemmery_lab as lab
from gemmery_emulator.pages.numerals import digits
from gemmery_lab import cli
from gemmery_lab.report.ladder_steps import picture, sheets, step_page, step_pages, steps, summary
from gemmery_lab.report.page import emulated_page
from gemmery_lab.rung_counts import EmulatedLadder

NAMES = ["simt_naive", "simt_smem", "simt_threadtile"]


@pytest.fixture(scope="module")
def ladder() -> EmulatedLadder:
    counted = lab.emulated_ladder(NAMES, [64])
    return EmulatedLadder(counted.device, counted.started, counted.rungs, lab.predicted_ladder(NAMES, [256]))


def test_steps_are_those_between_rungs_that_ran(ladder):
    titles = [step.title for step in steps(ladder)]
    assert titles[0] == "From simt_naive to simt_smem"
    assert all(title.split()[1] in NAMES and title.split()[3] in NAMES for title in titles)
    assert steps(EmulatedLadder(ladder.device, "", ladder.rungs[:1])) == ()


def test_a_step_says_what_moved(ladder):
    step = steps(ladder)[0]
    counted, times = sheets(step)
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in counted.rows}
    before, after = (run.counts.sectors for run in (step.old, step.new))
    assert rows["sectors"][:2] == [f"{before:,}", f"{after:,}"]
    assert "flops" not in rows  # both multiply as much
    ratios = [float(cells[2]) for cells in rows.values() if cells[2]]
    assert all(abs(ratio - 1) > 0.02 for ratio in ratios)
    took = [float(cell.text.replace(",", "")) for cell in times.rows[0][1:]]
    assert took == pytest.approx([row.prediction.seconds * 1e6 for row in step.times], rel=0.01)
    assert f"{step.before.prediction.bound} bounded simt_naive" in summary(step)


def test_a_step_without_predictions_has_counters_alone(ladder):
    step = steps(EmulatedLadder(ladder.device, "", ladder.rungs))[0]
    assert len(sheets(step)) == 1
    assert picture(step) is None
    assert "Predicted" not in step_page(step)


def test_a_page_has_the_lines_the_counters_and_a_picture(ladder):
    page = step_page(steps(ladder)[0])
    assert page.count("<svg") == 1
    assert "Counters that moved" in page
    assert re.search(r"class=removed>-.*simt_single_block.cu", page)
    assert set(step_pages(ladder)) >= {"steps/simt_naive-simt_smem.html"}


def test_the_ladders_page_has_predicted_gains_where_there_are_some(ladder):
    """The roofs of 64 x 64 say another thing about a large product."""
    page = emulated_page(ladder)
    tree = page[page.index("Rungs under their") : page.index("The factor is")]
    before, after = (step := steps(ladder)[0]).times
    assert f"{digits(before.prediction.seconds / after.prediction.seconds)}× {step.old.rung}" in tree
    assert "The factor is the parent&#39;s predicted time over the rung&#39;s." in page
    without = emulated_page(EmulatedLadder(ladder.device, "", ladder.rungs))
    assert "The factor is the parent&#39;s roof over the rung&#39;s." in without


def test_the_ladders_page_links_to_a_page_of_each_step(tmp_path, capsys):
    path = tmp_path / "ladder.html"
    code = cli.run(["ladder", "--device", "emulator", "--as", "a100", "--rungs", "simt_naive,simt_smem",
                          "--sizes", "32", "--html", str(path)])  # fmt: skip
    assert code == 0
    links = re.findall(r'href="(steps/[^"]+)"', path.read_text())
    assert links == ["steps/simt_naive-simt_smem.html"]
    assert "From simt_naive to simt_smem" in (tmp_path / links[0]).read_text()


def test_explain_prints_a_step_and_refuses_what_is_none(tmp_path, capsys):
    path = tmp_path / "step.html"
    assert cli.run(["ladder", "explain", "simt_naive", "simt_smem", "--html", str(path)]) == 0
    text = capsys.readouterr().out
    assert "Counters that moved" in text
    assert "Predicted on h200" in text
    assert "+++ simt_smem" in text
    assert path.exists()
    for names, reason in (
        (("simt_smem", "simt_smem"), "compared with itself"),
        (("simt_smem", "packed"), "packed"),
        (("simt_naive", "mma_f64", "--dtype", "f16"), "mma_f64"),
    ):
        assert cli.run(["ladder", "explain", *names]) == 2
        assert reason in capsys.readouterr().err
