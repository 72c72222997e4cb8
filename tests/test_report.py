"""Reports say what the records say, in every form, and ask nothing of the outside."""

import io
import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

import chromium
import gemmery_lab as lab
import records
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery.problem import Problem
from gemmery_emulator.pages import numerals, svg
from gemmery_emulator.pages.writing import as_json
from gemmery_lab.report import sheet, tables, terminal, words
from gemmery_lab.report.curves import roofline
from gemmery_lab.report.page import emulated_page, figures, page
from gemmery_lab.report.tables import sheets
from records import markdown
from site_pages.stored import TYPE, Stored, query

pytestmark = pytest.mark.sampled(3)

RUNS = {run.__name__: run() for run in (records.ladder, records.sweep_block, records.sweep_size, records.bench)}


@pytest.fixture(params=RUNS, scope="module")
def run(request):
    return RUNS[request.param]


def shown(run, width):
    console = Console(width=width, force_terminal=False, record=True, file=io.StringIO())
    terminal.show(run, records.RUNGS, console)
    return console.export_text()


def row(text, name):
    """The words of the first line that begins with `name`."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


class Page(HTMLParser):
    """What a browser would fetch, run, or trip over."""

    VOID = frozenset({"meta", "br", "img", "link", "hr", "input"})

    def __init__(self, text):
        super().__init__()
        self.outside, self.open, self.ids, self.text = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("script", "link", "iframe", "object", "embed", "img"):
            self.outside.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data", "srcset") and not value.startswith("#"):
                self.outside.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.001234, "0.00123"),
        (0.9996, "1.00"),
        (9.996, "10.0"),
        (99.96, "100"),
        (117.4, "117"),
        (65078.2, "65,078"),
    ],
)
def test_three_digits(value, text):
    assert numerals.digits(value) == text


def test_units():
    assert [numerals.duration(t) for t in (2.5, 0.0123, 4.2e-5, 4.2e-8)] == ["2.50 s", "12.3 ms", "42.0 µs", "42.0 ns"]
    assert [numerals.size(b) for b in (0, 768, 32768, 1 << 20, 3 << 29)] == [
        "unknown",
        "768 bytes",
        "32 KiB",
        "1 MiB",
        "1.5 GiB",
    ]


def test_a_difference_within_the_spread_is_a_tie():
    assert numerals.times(1.01, 0.02) == "~1.01×"
    assert numerals.times(1.03, 0.02) == "1.03×"
    assert numerals.times(0.97, 0.02) == "0.970×"


def test_nan_does_not_pass():
    m = RUNS["ladder"].measurements[0]
    assert words.passed(replace(m, error=1.0))
    assert not words.passed(replace(m, error=1.01))
    assert not words.passed(replace(m, error=math.nan))
    assert words.passed(replace(m, error=math.nan, checked=False))


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_table_fits_its_terminal(run, width):
    text = shown(run, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text


def test_what_is_not_square_has_a_table_of_its_own():
    *squares, others = sheets(RUNS["ladder"], records.RUNGS)
    assert [s.title for s in squares] == ["n = 512, f32", "n = 1024, f32", "n = 2048, f32"]
    assert others.title == "Other shapes, f32"
    assert [[cell.text for cell in r[:1] + r[2:7]] for r in others.rows][:2] == [
        ["gemv", "1 × 512 × 512", "0.0514", "10.2", "20.5", "1.03×"],
        ["NumPy", "1 × 512 × 512", "0.0530", "9.90", "19.9", ""],
    ]


def test_every_table_of_a_stored_ladder_is_one_table_in_80_columns():
    stored = Stored(Path(__file__).parents[1])
    runs = [(run, CPU) for run in stored.newest_of_each(query("ladder machine=cpu"), *TYPE)]
    runs += [(run, CUDA) for run in stored.newest_of_each(query("ladder machine=gpu"), *TYPE)]
    tables = [sheet for run, rungs in runs for sheet in sheets(run, rungs)]
    assert sum(sheet.title.startswith("Other shapes") for sheet in tables) >= 3
    laid = {sheet.title: terminal.laid_out(sheet, 80) for sheet in tables}
    assert [title for title, parts in laid.items() if sum(isinstance(part, Table) for part in parts) > 1] == []


@pytest.mark.parametrize("width", [80, 160])
def test_the_ladder_in_a_terminal(width):
    text = shown(RUNS["ladder"], width)
    packed = row(text, "packed")
    assert packed[-6:] == ["2.60", "103", "88.9%", "7.28×", "1.04×", "0.037"]
    assert "not run" in text
    assert "strassen did not run: one level of it needs n >= 1024, and n is 512" in text
    for rung in records.RUNGS:
        assert rung.idea.split()[0] in text
    assert "Made-up CPU <1>" in text


@pytest.mark.parametrize("width", [80, 160])
def test_the_terminal_shows_each_rung_below_its_parent(width):
    text = shown(RUNS["ladder"], width)
    tree = text[text.index("Each rung below its parent, × the speed of its parent at n =") :].splitlines()
    depth = {line.split()[0]: len(line) - len(line.lstrip()) for line in tree[1:] if line.strip()}
    for rung in records.RUNGS:
        if rung.parent:
            assert depth[rung.name] == depth[rung.parent] + 2
    assert depth["gemv"] == depth["scalar_naive"]
    packed = next(line.split() for line in tree if line.split()[:1] == ["packed"])
    assert packed[1] == "8.61×"


def test_a_rung_outside_its_bound_is_marked():
    good = RUNS["ladder"].measurements[0]
    for error in (1.5, math.nan):
        cell = sheet.error(replace(good, error=error))
        assert cell.tone == "bad"
        assert "!" in cell.text


def test_without_pairwise_ratios_the_medians_are_compared():
    a, b = (records.measurement("ladder", name, 64, speed) for name, speed in (("simd_row", 10.0), ("numpy", 40.0)))
    (group,) = words.groups([a, b], records.RUNGS)
    assert words.speedup(a, "numpy", group) == (pytest.approx(0.25), 0.0)
    assert words.speedup(a, "torch", group) is None
    assert words.speedup(b, "numpy", group) is None


def test_no_cache_is_named_while_the_caches_are_not_known():
    run = replace(RUNS["sweep_block"], machine=terminal.NOWHERE)
    (growing,) = sheets(run, ())
    assert {row[2].text for row in growing.rows} == {""}


def test_blocks_are_set_against_the_caches():
    (found,) = sheets(RUNS["sweep_block"], ())
    assert [(r[0].text, r[2].text) for r in found.rows] == [
        ("8", "L1d"),
        ("16", "L1d"),
        ("32", "L1d"),
        ("64", "L2"),
        ("128", "L2"),
        ("256", "L2"),
        ("512", "L3"),
        ("1024", "L3"),
        ("2048", "memory"),
        ("NumPy", ""),
    ]
    assert [r[3].text for r in found.rows if r[3].tone == "best"] == ["1,297"]
    assert tables.side(3 * 100 * 100 * 4, "f32") == 100


def test_markdown_has_a_cell_for_every_column(run):
    text = markdown(run, records.RUNGS)
    tables = [re.findall(r"(?<!\\)\|", line) for line in text.splitlines() if line.startswith("|")]
    assert len(tables) > 2
    assert text.count("\n## ") == len(sheets(run, records.RUNGS))
    for part in text.split("\n## ")[1:]:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in part.splitlines() if line.startswith("|")}) == 1


def test_json_holds_every_record(run):
    found = json.loads(as_json(run))
    assert found["machine"]["cpu"] == records.MACHINE.cpu
    assert len(found["measurements"]) == len(run.measurements)
    assert found["measurements"][0]["seconds"] == run.measurements[0].seconds


def test_the_page_needs_nothing_else(run):
    text = page(run, records.RUNGS)
    found = Page(text)
    assert found.outside == []
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    assert not re.search(r"@import|url\((?!#)", text)
    assert set(re.findall(r"https?://[^\s\"<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "prefers-color-scheme: dark" in text


def test_the_page_says_what_was_measured():
    text = " ".join(Page(page(RUNS["ladder"], records.RUNGS)).text)
    for rung in records.RUNGS:
        assert rung.name in text
        assert rung.idea[1:] in text
    for said in ("Made-up CPU <1>", "32 KiB", "88.9%", "7.28×", "openblas 0.3.31", "one level of it needs n >= 1024"):
        assert said in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ladder", ["ladder", "curves", "roofline-ladder"]),
        ("sweep_size", ["curves", "seconds"]),
        ("sweep_block", ["blocks"]),
        ("bench", ["standing-skinny_f32", "roofline-skinny_f32"]),
    ],
)
def test_every_run_has_its_figures(name, expected):
    assert [plot.name for plot in figures(RUNS[name], records.RUNGS)] == expected


def test_figures_take_their_colors_from_the_page(run):
    for plot in figures(run, records.RUNGS):
        assert not re.search(r"#[0-9a-fA-F]{6}", plot.svg)
        assert set(re.findall(r"var\(--(\w+)\)", plot.svg)) <= set(svg.PALETTE)
        ElementTree.fromstring(svg.standalone(plot.svg))


def test_figures_are_the_same_every_time(run):
    assert figures(run, records.RUNGS) == figures(run, records.RUNGS)


def test_the_bars_are_as_long_as_the_rates():
    plot = figures(RUNS["ladder"], records.RUNGS)[0]
    paths = re.findall(
        r'<path d="M ([\d.]+) [\d.]+ \nL ([\d.]+)[^"]*"[^>]*style="fill: var\(--(?:accent|soft)\)', plot.svg
    )
    lengths = [float(right) - float(left) for left, right in paths]
    rates = records.SPEEDS[2048][: len(records.SQUARE)]
    assert len(lengths) == len(rates)
    assert lengths == pytest.approx([rate * lengths[5] / rates[5] for rate in rates], rel=1e-3, abs=1e-2)


def test_the_caption_of_the_bars_explains_the_mark_of_a_tie():
    run = RUNS["ladder"]
    ties = replace(run, measurements=tuple(replace(m, spread=dict.fromkeys(m.versus, 99)) for m in run.measurements))
    assert ">~" not in figures(run, records.RUNGS)[0].svg
    assert "~" not in figures(run, records.RUNGS)[0].caption
    assert ">~" in figures(ties, records.RUNGS)[0].svg
    assert "~ marks a tie" in figures(ties, records.RUNGS)[0].caption


@pytest.mark.skipif(chromium.PROGRAM is None, reason="chromium is not installed")
def test_the_words_of_a_rung_have_the_room_beside_its_name(tmp_path):
    path = tmp_path / "ladder.html"
    path.write_text(emulated_page(lab.emulated_ladder(["simt_naive", "simt_smem"], [16])), encoding="utf-8")
    with chromium.browser() as browser:
        browser.open(path, 1280, "light")
        assert browser.value("document.querySelector('dl.rungs dd').clientWidth") > 500


def test_the_caption_of_the_bars_names_parents_that_were_not_measured():
    run = RUNS["ladder"]
    few = replace(run, measurements=tuple(m for m in run.measurements if m.kernel not in {"simd_row", "packed"}))
    assert "Parents" not in figures(run, records.RUNGS)[0].caption
    assert " Parents without a measurement: simd_row, packed." in figures(few, records.RUNGS)[0].caption


def test_lines_across_the_bars_leave_room_for_the_ideas():
    plot = figures(RUNS["ladder"], records.RUNGS)[0]
    upright = re.findall(r'd="M ([\d.]+) ([\d.]+) \nL ([\d.]+) ([\d.]+) \n"([^>]*)', plot.svg)
    spans = [
        sorted((float(y), float(end)))
        for x, y, other, end, style in upright
        if x == other and re.search(r"var\(--(ink|rival)\)", style)
    ]
    places = re.findall(r'y="([\d.]+)" transform="[^"]+">([^<]+)</text>', plot.svg)
    heights = {text: float(y) for y, text in places}
    ideas = [escape(rung.idea, quote=False) for rung in records.SQUARE]
    assert len(spans) > 2 * len(ideas) > 0
    for idea in ideas:
        middle = heights[idea] - 4  # of letters 11 high, from their base line
        assert not [span for span in spans if span[0] < middle < span[1]], idea


def test_a_roofline_of_many_kernels_names_one_bandwidth_once_and_leaves_every_name_inside():
    base = next(m for m in RUNS["ladder"].measurements if m.seconds and m.bandwidth_gbs and words.is_square(m))
    ran = [
        replace(base, kernel=f"rung_{index}", threads=1 + index % 2, seconds=base.seconds * (1 + index / 100))
        for index in range(24)
    ]
    drawing = roofline([replace(m, peak_gflops=base.peak_gflops * m.threads) for m in ran], "ladder", True).svg
    assert re.findall(r">(memory [^<]+)</text>", drawing) == [f"memory {numerals.digits(base.bandwidth_gbs)} GB/s"]
    heights = sorted(float(y) for y, name in re.findall(r'y="(-?[\d.]+)" transform="[^"]+">(rung_\d+)', drawing))
    assert len(heights) == 24
    assert heights[0] > 8  # base lines of letters of 12
    assert min(right - left for left, right in itertools.pairwise(heights)) > 14


def test_a_run_in_which_nothing_ran_still_has_a_page():
    refused = tuple(replace(m, seconds=0.0, refused="it would take too long") for m in RUNS["ladder"].measurements)
    text = page(replace(RUNS["ladder"], measurements=refused), records.RUNGS)
    assert "it would take too long" in text
    assert "<svg" not in text


def test_names_are_escaped():
    hostile = replace(records.MACHINE, cpu="<script>alert(1)</script>", blas="a & b | c")
    run = replace(RUNS["ladder"], machine=hostile)
    assert "<script" not in page(run, records.RUNGS)
    assert "[red]" in shown(replace(run, machine=replace(hostile, cpu="[red]")), 80)


def test_labels_are_moved_apart():
    assert svg.spread([1.0, 1.1, 5.0], gap=1.0) == [pytest.approx(0.55), pytest.approx(1.55), 5.0]
    crowded = svg.spread([3.0, 3.0, 3.0, 2.5, 9.0], gap=1.0)
    ordered = sorted(crowded)
    assert all(b - a >= 0.999 for a, b in itertools.pairwise(ordered))


def test_progress_is_lines_where_there_is_no_terminal(capsys):
    first, *_ = RUNS["ladder"].measurements
    with terminal.progress(records.RUNGS, Console(stderr=True, force_terminal=False)) as progress:
        progress.update("scalar_naive, 512", 0, 2)
        progress.update("scalar_naive, 512", 1, 2, first)
        progress.update("strassen, 512", 2, 2, replace(first, kernel="strassen", refused="too small", seconds=0.0))
    assert capsys.readouterr().err.splitlines() == [
        "1/2 scalar_naive, n = 512, f32: 251 ms, 1.07 GFLOP/s",
        "2/2 strassen, n = 512, f32: not run, too small",
    ]


def test_progress_on_a_terminal_shows_the_rows_so_far(capsys):
    with terminal.progress(records.RUNGS, Console(stderr=True, force_terminal=True, width=80)) as progress:
        for done, m in enumerate(RUNS["ladder"].measurements[:3], 1):
            progress.update(m.kernel, done, 3, m)
    err = capsys.readouterr().err
    assert re.search(r"scalar_reordered +76.7 +3.50 +3.01% +3.27×", err)
    assert "3/3" in err
    assert "what it changed" not in err


def test_named_tuples_are_dictionaries_in_json():
    found = json.loads(as_json([{"problem": Problem(2, 3, 4, "f32", "f32")}, RUNS["ladder"].machine]))
    assert (found[0]["problem"]["m"], found[0]["problem"]["dtype"]) == (2, "f32")
    assert found[0]["problem"]["alignments"] == [16, 16, 16]
    assert found[1]["gpu"]["name"] == ""
