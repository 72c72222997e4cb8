"""Figures in doubt: a banner, ties and no headline, in every form."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

import records
from gemmery_emulator.pages import numerals
from gemmery_lab.report import tables, terminal, words
from gemmery_lab.report.page import page
from gemmery_lab.report.terminal import summary
from gemmery_lab.report.words import over_fastest
from records import markdown


def busy(run, load=0.8):
    """The run with somebody else's load during one of its measurements."""
    first, *others = run.measurements
    return replace(run, measurements=(replace(first, load=load), *others))


def upside_down(run):
    """The run with a peak of two threads below that of one."""
    return replace(
        run, measurements=tuple(replace(m, peak_gflops=233.0 if m.threads == 1 else 125.0) for m in run.measurements)
    )


RUNS = (records.ladder(), records.sweep_block(), records.sweep_size(), records.bench())


def printed(run):
    console = Console(width=160, force_terminal=False, record=True, file=io.StringIO())
    terminal.show(run, records.RUNGS, console)
    return console.export_text()


@pytest.mark.many(3)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.measurements[0].suite)
def test_a_quiet_run_is_trusted(run):
    assert words.doubts(run) == ()
    assert words.weighed(run) is run
    assert "Unreliable" not in printed(run) + page(run, records.RUNGS) + markdown(run, records.RUNGS)


@pytest.mark.many(3)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.measurements[0].suite)
def test_load_is_a_banner_in_every_form(run):
    said = "Other processes used up to 0.8 of the 2 cores during the measurement."
    for text in (printed(busy(run)), page(busy(run), records.RUNGS), markdown(busy(run), records.RUNGS)):
        assert "Unreliable figures" in text
        assert said in re.sub(r"\s+", " ", text)


def test_a_little_load_is_no_doubt():
    assert words.doubts(busy(records.ladder(), 0.3)) == ()
    assert words.doubts(busy(records.ladder(), 0.31)) != ()


def test_a_peak_that_falls_with_threads_is_impossible():
    (said,) = words.doubts(upside_down(records.ladder()))
    assert "f32 peak of 2 threads, 125 GFLOP/s, is below that of 1 thread, 233 GFLOP/s" in said
    assert "Unreliable figures" in page(upside_down(records.ladder()), records.RUNGS)


@pytest.mark.parametrize("spoil", [busy, upside_down])
def test_all_ratios_are_ranges_and_there_is_no_headline(spoil):
    run = spoil(records.ladder())
    ratios = [
        cell.text for s in tables.sheets(run, records.RUNGS) for row in s.rows for cell in row if "×" in cell.text
    ]
    ratios = [text for text in ratios if re.fullmatch(r"[\d.,~–]+×", text)]
    assert ratios
    plain = [float(text.strip("~×")) for text in ratios if "–" not in text]
    assert [ratio for ratio in plain if ratio > 0.01] == []  # the smallest have no room for one
    assert "class=tiles" not in page(run, records.RUNGS).replace('"', "")
    assert "class=tiles" in page(records.ladder(), records.RUNGS).replace('"', "")
    assert summary(tables.results(run, records.RUNGS)) == ""
    suite = spoil(records.bench()) if spoil is busy else busy(records.bench())
    tones = {cell.tone for s in tables.sheets(suite, ()) for row in s.rows for cell in row if "×" in cell.text}
    assert "bad" not in tones
    assert "±" not in re.sub("<[^>]*>", "", markdown(suite, ()).partition("\n\n")[2])


def test_a_ladder_closes_with_one_line():
    line = summary(tables.results(records.ladder(), records.RUNGS))
    assert line == (
        "n = 2048, f32: packed_threaded reaches 209 GFLOP/s, 90.0% of the peak, 1.03× NumPy, 2 threads; "
        "largest step: packed, 8.61× simd_blocked"
    )
    assert re.sub(r"\s+", " ", printed(records.ladder())).strip().endswith(line)
    assert summary(tables.results(records.bench())) == ""


def test_the_headline_is_against_the_fastest_rival():
    run = records.ladder()
    quick = tuple(
        replace(m, seconds=m.seconds / 4) if (m.kernel, m.threads, m.batch) == ("numpy", 1, 1) else m
        for m in run.measurements
    )
    slower = replace(run, measurements=quick)
    assert "0.496× NumPy, 1 thread;" in summary(tables.results(slower, records.RUNGS))
    assert "<b>0.496×</b><span>the speed of NumPy, 1 thread</span>" in page(slower, records.RUNGS)
    group = words.largest([g for g in words.groups(run.measurements, records.RUNGS) if words.is_square(g.first)])
    best = next(m for m in group.rungs if m.kernel == "packed_threaded")
    fastest, (ratio, spread) = over_fastest(best, group)
    assert (fastest.threads, ratio) == (2, fastest.seconds / best.seconds)
    assert spread == max(0.02, abs(ratio - best.versus["numpy"]))


def test_a_ratio_is_that_of_the_rates_in_its_row():
    """One rule for both columns: a table that shows two rates shows their ratio."""
    run = records.ladder()
    group = words.largest([g for g in words.groups(run.measurements, records.RUNGS) if words.is_square(g.first)])
    own = max((m for m in group.rungs if "numpy" in m.versus), key=lambda m: m.gflops)
    (rival,) = [m for m in group.rivals if m.kernel == "numpy" and m.threads == own.threads]
    apart = replace(own, versus={**own.versus, "numpy": 1.5 * rival.seconds / own.seconds}, spread={"numpy": 0.01})
    ratio, spread = words.speedup(apart, "numpy", group)
    assert ratio == rival.seconds / own.seconds == pytest.approx(own.gflops / rival.gflops, rel=0.01)
    assert spread == pytest.approx(0.5 * ratio)  # reaches to what the pairs say
    assert "–" in words.gain(apart, "numpy", group)


def test_a_large_gain_on_a_busy_machine_is_a_range_and_no_tie():
    assert numerals.times(4.05, 0.95) == "3.1–5×"
    assert numerals.times(1.0, 2.0) == "0–3×"
    (m, *_) = [m for m in words.weighed(busy(records.bench())).measurements if m.versus]
    assert all(m.spread[name] >= words.BUSY * ratio for name, ratio in m.versus.items())
