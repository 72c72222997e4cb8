"""Reports of GPU runs, from records of a GPU: their words, units and limits."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import records
from gemmery.ladder.cuda import CUDA
from gemmery_emulator.pages import numerals
from gemmery_lab.measure import record
from gemmery_lab.report import terminal, words
from gemmery_lab.report.page import figures, page
from gemmery_lab.report.tables import sheets
from records import markdown

RUNS = record.read(Path(__file__).parents[1] / "data" / "h200.jsonl")
OF_CPUS = re.compile(r"NumPy|llvmlite|\bthreads?\b|\bms\b|GFLOP/s")


def named(suite):
    """The run that holds records of a suite, with nothing else in it."""
    run = next(run for run in RUNS if any(m.suite == suite for m in run.measurements))
    return replace(run, measurements=tuple(m for m in run.measurements if m.suite == suite))


LADDER = named("ladder")


def without_rival(run):
    """The same run without PyTorch and CuPy."""
    from gemmery_lab.on_cuda import NO_RIVAL

    return replace(
        run,
        measurements=tuple(
            replace(m, seconds=0.0, refused=NO_RIVAL, note="")
            if m.kernel == "cublas"
            else replace(m, versus={name: ratio for name, ratio in m.versus.items() if name != "cublas"})
            for m in run.measurements
        ),
    )


def shown(run, width=400):  # nothing folds
    console = Console(width=width, force_terminal=False, record=True, file=io.StringIO())
    terminal.show(run, CUDA, console)
    return console.export_text()


def beyond_rungs(text):
    """The text without the ideas and lessons of rungs."""
    for said in [rung.idea for rung in CUDA] + [m.refused for m in LADDER.measurements if m.refused]:
        text = text.replace(said, "")
    return text


def test_the_recorded_run_is_of_a_gpu_and_whole():
    assert LADDER.machine.gpu.name == "NVIDIA H200"
    kernels = {m.kernel for m in LADDER.measurements}
    assert "cublas" in kernels
    assert len(kernels & {rung.name for rung in CUDA}) >= 12
    assert all(words.passed(m) for m in LADDER.measurements)


@pytest.mark.parametrize("text", [shown, lambda run: markdown(run, CUDA)], ids=["terminal", "markdown"])
def test_nothing_is_said_of_the_cpu_where_the_gpu_did_the_work(text):
    said = text(LADDER)
    assert OF_CPUS.findall(beyond_rungs(said)) == []
    assert "cuBLAS" in said


def test_the_machine_is_named_with_its_driver_its_clock_and_its_power_limit():
    gpu = LADDER.machine.gpu
    for text in (shown(LADDER), markdown(LADDER, CUDA), page(LADDER, CUDA)):
        flat = " ".join(text.split())
        for value in (gpu.name, f"{gpu.clock_mhz} MHz", f"{gpu.power_w:g} W", gpu.driver):
            assert value in flat


def test_rates_are_in_tflops_and_the_share_is_of_the_unit_that_a_rung_runs_on():
    for sheet in sheets(LADDER, CUDA):
        assert "TFLOP/s" in sheet.head
        column = sheet.head.index("TFLOP/s")
        by_name = {m.kernel: m for m in LADDER.measurements if words.shape(m) in sheet.title and m.seconds}
        for row in sheet.rows:
            m = by_name.get(row[0].text)
            if m is not None:
                assert row[column].text == numerals.digits(m.gflops / 1e3)
                assert row[column + 1].text == numerals.percent(m.gflops / m.peak_gflops)


def test_limits_name_their_units_and_say_that_hopper_has_a_faster_way():
    halves = [m for m in LADDER.measurements if m.unit == "mma.sync" and m.seconds and m.dtype != "f64"]
    notes = " ".join(note for sheet in sheets(LADDER, CUDA) for note in sheet.notes)
    for m in LADDER.measurements:
        if m.seconds:
            assert f"{numerals.digits(m.peak_gflops / 1e3)} TFLOP/s {m.dtype} on {m.unit}" in notes
    assert ("Hopper's wgmma" in notes) == bool(halves)
    assert "GB/s read" in notes
    assert "MHz while timed" in notes


def test_a_rung_that_cannot_run_says_why():
    refused = [m for m in LADDER.measurements if m.refused]
    assert refused
    text = " ".join(shown(LADDER).split())
    for m in refused:
        assert m.refused in text


def test_rungs_of_other_types_are_left_out_and_named():
    (dtype,) = {m.dtype for m in LADDER.measurements}
    text = " ".join(shown(LADDER).split())
    others = [rung for rung in CUDA if dtype not in rung.dtypes]
    assert others
    for rung in others:
        assert f"{rung.name} ({', '.join(rung.dtypes)})" in text


def test_without_a_library_the_table_says_what_to_install():
    text = " ".join(shown(without_rival(LADDER)).split())
    assert "cuBLAS did not run: no cuBLAS to compare with: pip install torch" in text
    assert "× cuBLAS" in sheets(without_rival(LADDER), CUDA)[0].head
    page(without_rival(LADDER), CUDA)


def test_the_figures_draw_each_unit_and_cublas():
    plots = {plot.name: plot for plot in figures(LADDER, CUDA)}
    units = {m.unit for m in LADDER.measurements if m.seconds and m.m == m.n}
    bars = plots["ladder"]
    for unit in units:
        assert f"peak, {unit}" in bars.svg
    assert "cuBLAS" in bars.svg
    assert "cuBLAS 13.1 in the same run" in bars.caption
    assert "TFLOP/s" in bars.svg
    drawn = beyond_rungs("".join(plot.svg + plot.caption for plot in plots.values()))
    assert not re.search(r"NumPy|GFLOP/s|\d threads", drawn)


def test_the_page_says_how_a_gpu_is_measured():
    text = page(LADDER, CUDA)
    assert "between two events on the device" in text
    assert "the speed of cuBLAS" in text
    assert "the library that NumPy calls" not in text
    assert "runs in its own process" not in text


def test_a_page_of_the_cpu_speaks_of_it_as_before():
    text = page(records.ladder(), records.RUNGS)
    assert "the library that NumPy calls" in text
    assert "the speed of NumPy" in text
    assert "events on the device" not in text


def test_a_tf32_product_is_called_one():
    m = replace(LADDER.measurements[0], precision="tf32")
    assert words.types(m) == "tf32"


def test_what_a_figure_of_a_gpu_is_in():
    m = next(m for m in LADDER.measurements if m.seconds)
    assert words.rate(m) == "TFLOP/s"
    assert words.reached(m) == m.gflops / 1e3
    assert words.tick(m) == ("µs", 1e6)
    cpu = replace(m, unit="")
    assert (words.rate(cpu), words.reached(cpu), words.tick(cpu)) == ("GFLOP/s", m.gflops, ("ms", 1e3))


def test_compilations_are_a_table_of_kernels_and_ways():
    (sheet,) = sheets(named("gpu_compile"), CUDA)
    assert sheet.head == ("kernel", "cold", "on disk", "in memory")
    assert sheet.rows[0][0].text == "simt_naive, f32"
    assert all(len(row) == 4 for row in sheet.rows)


def test_a_line_of_progress_says_no_rate_where_nothing_is_computed():
    from gemmery_lab.report.terminal import _line

    assert "FLOP" not in _line(named("gpu_compile").measurements[0])
    assert "TFLOP/s" in _line(next(m for m in LADDER.measurements if m.seconds))


def test_a_tournament_too_wide_for_its_terminal_is_folded():
    """Each rung and each time is shown once and in full in 80 columns, with labels in each part of the table."""
    one = replace(LADDER.measurements[0], suite="gpu_gemv", case="gemv, k = 128", refused="", note="", versus={})
    times = {f"gemv_warp r={r} smem={smem}": r + smem / 4 for smem in (0, 1) for r in (1, 2, 4, 8, 16)}
    taken = [
        replace(one, kernel=kernel, m=1, n=n, k=128, seconds=1e-6 * factor + 1e-9 * n)
        for n in (1, 4096)
        for kernel, factor in times.items()
    ]
    run = replace(LADDER, measurements=tuple(taken))
    narrow, wide = (shown(run, width).split("NVIDIA")[0] for width in (80, 400))
    assert max(len(line.rstrip()) for line in narrow.splitlines()) <= 80
    assert set(narrow.replace("─", "").split()) == set(wide.replace("─", "").split())
    for word in (numerals.duration(1e-6).split()[-1], "gemv_warp", "smem=0", "smem=1", "r=16"):
        assert narrow.count(word) == wide.count(word) > 0
    parts = wide.count("product"), narrow.count("product"), narrow.count("1 × 4096 × 128, ")
    assert parts[0] == 1 < parts[1] == parts[2]


def test_a_tournament_of_vectors_is_drawn_against_their_length():
    one = next(m for m in LADDER.measurements if m.seconds and m.m == 1)
    entered = [
        replace(one, suite="gpu_gemv", case="gemv, k = 128", kernel=kernel, n=n, k=128, seconds=1e-6 * n)
        for kernel in ("gemv_warp r=4", "cublas")
        for n in (64, 3000)
    ]
    (plot,) = figures(replace(LADDER, measurements=tuple(entered)), CUDA)
    assert plot.name == "vectors-gemv-k-128"
    assert "gemv_warp r=4" in plot.svg
    assert figures(replace(LADDER, measurements=tuple(m for m in entered if m.n == 64)), CUDA) == ()


def test_no_share_of_the_peak_of_another_unit():
    """Rungs that multiply parts of elements on tensor cores have no share of the peak of CUDA cores."""
    whole = next(m for m in LADDER.measurements if m.seconds and m.peak_gflops)
    assert words.share(replace(whole, kernel="split_fp16x3", seconds=whole.flops / 2.95e9 / whole.peak_gflops)) is None
    assert words.share(replace(whole, kernel="ozaki_int8")) is None
    assert words.share(replace(whole, kernel="cublas", seconds=whole.flops / 1.195e9 / whole.peak_gflops)) is None
    assert words.share(whole) == whole.gflops / whole.peak_gflops


def test_a_rival_is_named_with_its_version():
    cublas = next(m for m in LADDER.measurements if m.kernel == "cublas" and m.seconds)
    assert words.versioned("cublas", [replace(cublas, note="cuBLAS 13.6.0.2 by PyTorch 2.14")]) == "cuBLAS 13.6"
    assert words.versioned("numpy", [cublas]) == "NumPy"
