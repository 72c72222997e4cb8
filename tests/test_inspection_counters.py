"""inspect(): counters by source line, pictures, two rungs side by side, and notebooks."""

import html
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console

import gemmery as gm
from gemmery.cuda import sass
from gemmery.errors import ArgumentError
from gemmery_emulator.kernels.counters import EmulatorCounts, LineCounts
from gemmery_emulator.kernels.terminal_tables import SHORT, fitted
from gemmery_emulator.pages.writing import as_json
from gemmery_emulator.trace import Divergence, Stretch, TileLayout, WarpAccess
from gemmery_emulator.trace.selection import Selection
from gemmery_lab import cli
from gemmery_lab.inspection.gather import inspect_rung, shared_dtype
from gemmery_lab.inspection.notebook import (
    differences,
    glance,
    inspection_page,
    show_inspection,
    show_side_by_side,
    side_by_side_page,
)
from gemmery_lab.inspection.records import CompiledLaunch, Inspection, SideBySide
from gemmery_lab.inspection.sections import sections
from gemmery_lab.report.curves import roofline_plot
from site_pages.pictures import FOLDER, drawn

pytestmark = pytest.mark.sampled(3)

NEEDS_NVDISASM = pytest.mark.skipif(not sass.nvdisasm(), reason=sass.MISSING)
SIDE = 256  # of what is emulated


@pytest.fixture(scope="module")
def smem():
    return inspect_rung("simt_smem", n=1024, config={"tile": 16}, device="sm_80")


@pytest.fixture(scope="module")
def vectorized():
    return inspect_rung("simt_vectorized", n=SIDE, device="sm_80")


@pytest.fixture(scope="module")
def naive():
    return inspect_rung("simt_naive", n=1024, device="sm_80")


def at(found, code):
    """The counts of the line that begins with this code."""
    return next(one for one in found.emulated.lines if one.code.startswith(code))


def test_lines_count_what_arithmetic_says(smem):
    loop, a, b = at(smem, "if (PadsWithZeros"), at(smem, "a[y][x] ="), at(smem, "b[y][x] =")
    warps_loading = 2 * SIDE**3 // 16 // 32  # each tile once for each of SIDE / 16 tiles of C beside it
    assert loop.flops == 2 * SIDE**3
    assert loop.requests == loop.bank_conflicts == 0
    for load in (a, b):
        assert load.requests == load.wavefronts == warps_loading // 2
        assert load.sectors == 4 * load.requests
        assert load.used == 32 * load.sectors
        assert load.flops == 0
    assert loop.wavefronts == 3 * SIDE**3 // 32 // 2  # 1.5 a multiply-add, as the profiler counts on an H200


def test_the_total_is_the_sum_of_the_lines(smem):
    total = smem.emulated.total
    for name in ("instructions", "wavefronts", "requests", "sectors", "used", "flops", "divergent_branches"):
        assert getattr(total, name) == sum(getattr(one, name) for one in smem.emulated.lines if not one.depth)
    assert sum(smem.emulated.kinds.values()) == total.instructions
    assert smem.emulated.kinds["fma"] == SIDE**3 // 32


def test_launch_facts_stay_those_of_the_size_asked_for(smem):
    assert smem.problem.n == 1024
    assert smem.kernels[-1].grid == (64 * 64, 1, 1)
    assert (smem.emulated.problem.m, smem.emulated.problem.n, smem.emulated.problem.k) == (SIDE,) * 3


def test_the_table_stands_beside_the_source(smem):
    (section,) = [section for section in sections(smem) if section.title.startswith("Counters")]
    assert section.title == "Counters by line of simt_smem.cu, at 256 × 256 × 256, on the emulator"
    assert section.head[0] == "line"
    assert section.head[-1] == "source"
    assert section.rows[-1][0] == "total"
    loop = next(row for row in section.rows if row[-1].startswith("if (PadsWithZeros"))
    assert f"{2 * SIDE**3:,}" in loop
    shown = io.StringIO()
    show_inspection(smem, Console(file=shown, width=140))
    assert "a[y][x] = a_or_zero<S>" in shown.getvalue()
    narrow = io.StringIO()
    show_inspection(smem, Console(file=narrow, width=80))
    assert "a[y][x] = a_or_zero<S>" not in narrow.getvalue()
    assert all(len(line) <= 80 for line in narrow.getvalue().splitlines())


def test_a_line_that_calls_all_is_followed_by_what_it_calls(vectorized):
    whole = at(vectorized, "multiply_in_registers")
    inside = vectorized.emulated.lines[vectorized.emulated.lines.index(whole) + 1 :]
    assert (whole.depth, whole.flops, whole.requests > 0) == (0, 2 * SIDE**3, True)
    called = [one for one in inside if one.depth == 1]
    for name in ("wavefronts", "bank_conflicts", "requests", "sectors", "used", "flops"):
        assert sum(getattr(one, name) for one in called) == getattr(whole, name)
    # Loads of A and of B are told apart; the multiply-add, one line of types.cuh, counts at the line that calls it.
    a, b = (next(one for one in inside if one.code.startswith(f"{x}_load.fetch")) for x in "ab")
    assert a.requests == b.requests == SIDE**2 * (SIDE // 128) // 128  # a warp moves 128 elements at once
    product = next(one for one in inside if one.code.startswith("sums[i][j] = multiply_add"))
    assert (product.line.partition(":")[0], product.depth, product.flops) == ("registers.cuh", 3, 2 * SIDE**3)
    assert not any(one.line.startswith(("types.cuh", "ptx")) for one in vectorized.emulated.lines)


@pytest.mark.parametrize("width", [50, 80, 100, 120, 200])
def test_a_figure_is_whole_or_rounded_or_left_out(width, vectorized):
    """No figure is cut off: it is in the table as it is, or rounded to three digits."""
    (section,) = [section for section in sections(vectorized) if section.title.startswith("Counters")]
    table = fitted(section, width)
    head, rows, note = table.head, table.rows, table.notes[len(section.notes) :]
    assert sum(2 + max(map(len, column)) for column in zip(head, *rows, strict=True)) <= width
    names = [SHORT.get(name, name) if note else name for name in section.head]
    assert {"line", "conflicts", "wavefronts"} <= {section.head[names.index(name)] for name in head}
    for row, whole in zip(rows, section.rows, strict=True):
        for name, cell in zip(head, row, strict=True):
            full = whole[names.index(name)]
            if note and cell[-1:] in ("k", "M"):
                value = float(cell[:-1]) * {"k": 1e3, "M": 1e6}[cell[-1]]
                assert abs(value - int(full.replace(",", ""))) <= 0.005 * value
            else:
                assert cell in (full, full.replace(",", "")) or (name == "source" and full.startswith(cell[:-1]))
    assert bool(note) == (width <= 120)
    assert ("source" in head) == (width >= 120)


def test_the_page_has_the_pictures(smem):
    page = inspection_page(smem)
    titles = re.findall(r"<figure><h2>(.+?)</h2>", page)
    assert titles[:2] == ["The tile of A in shared memory", "The tile of B in shared memory"]
    assert any(title.startswith("Banks of ld.shared") for title in titles)
    assert any(title.startswith("Sectors of ") for title in titles)
    assert page.count("<figure>") == page.count("<figcaption>") == page.count("<svg ") - 1  # of the roofline


def test_the_roofline_has_both_points_under_their_roofs(smem):
    plot = roofline_plot(smem.rung, smem.device.name, smem.loads, smem.once)
    assert plot is not None
    for said in ("as it loads", "each element once", f"peak {smem.loads.peak:,.0f}", "memory 1,555 GB/s"):
        assert said in plot.svg
    assert plot.svg in inspection_page(smem)
    assert roofline_plot(smem.rung, smem.device.name, replace(smem.loads, bandwidth=0.0), smem.once) is None


def test_a_line_chooses_the_pictures():
    found = inspect_rung("simt_smem", n=256, device="sm_80", line="simt_smem.cu:18")
    assert {str(one.line) for one in (*found.emulated.chosen.shared, *found.emulated.chosen.global_)} == {
        "simt_smem.cu:18"
    }
    with pytest.raises(ArgumentError, match=r"simt_smem\.cu:19.*lines that have: .*simt_smem\.cu:18"):
        inspect_rung("simt_smem", n=256, device="sm_80", line="simt_smem.cu:19")


def test_what_differs_between_two_rungs_is_marked(naive, smem):
    found = SideBySide(naive, smem)
    rows = {name: row for section in differences(found) for name, *row in section.rows}
    before, after = naive.emulated.total.sectors, smem.emulated.total.sectors
    assert rows["sectors of global memory"] == [f"{before:,}", f"{after:,}", f"{after / before:.3f}×"]
    assert rows["flops"] == [f"{2 * SIDE**3:,}"] * 2 + [""]
    assert f"sectors of global memory {before:,} → {after:,}" in glance(found)
    page = side_by_side_page(found)
    assert '<td class="fewer">' in page
    assert page.count("<h1>") == 1
    shown = io.StringIO()
    show_side_by_side(found, Console(file=shown, width=100))
    assert "wavefronts of shared memory" in shown.getvalue()


def test_two_rungs_are_compared_in_a_type_that_both_take():
    """simt_smem takes f32 first, mma_pipelined only as tf32; wmma_f64 takes nothing but f64."""
    both = gm.inspect("simt_smem", "mma_pipelined", n=64, device="h200")
    assert both.old.problem.dtype == both.new.problem.dtype == "f16"
    assert shared_dtype(["simt_smem", "wmma_f64"], n=64, device="h200") == "f64"
    assert shared_dtype(["wmma_f16", "wmma_f64"], n=64, device="h200") == ""
    assert shared_dtype(["simt_smem"]) == shared_dtype(["bank_stride", "copy_coalesced"]) == ""


def test_counts_of_different_products_are_not_compared(naive):
    other = inspect_rung("wmma_f64", n=1024, device="sm_80", counters=False)
    assert glance(SideBySide(naive, other)) == (
        "Different products, so the counts do not compare: 1024 × 1024 × 1024, f32, and 1024 × 1024 × 1024, f64."
    )


def test_the_command_takes_two_rungs(tmp_path, capsys):
    line = "inspect simt_naive simt_smem --n 256 --device sm_80"
    assert cli.run([*line.split(), "--html", str(tmp_path / "both.html")]) == 0
    assert "simt_naive and simt_smem" in capsys.readouterr().out
    assert "Sectors of" in (tmp_path / "both.html").read_text()
    assert cli.run([*line.split(), "--json"]) == 0
    one, other = json.loads(capsys.readouterr().out)
    assert (one["rung"], other["rung"]) == ("simt_naive", "simt_smem")
    assert one["emulated"]["total"]["sectors"] > other["emulated"]["total"]["sectors"] > 0


def test_pictures_are_files_that_stand_alone(tmp_path, capsys):
    line = "inspect simt_naive --n 256 --device sm_80 --svg"
    assert cli.run([*line.split(), str(tmp_path)]) == 0
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["simt_naive-sectors-1.svg", "simt_naive-sectors-2.svg", "simt_naive-sectors-3.svg"]
    assert capsys.readouterr().out.count("picture: ") == 3
    for name in written:
        text = (tmp_path / name).read_text()
        assert ElementTree.fromstring(text).get("role") == "img"
        assert "--accent:" in text


def framed_page(found):
    """The page in the frame that a notebook displays, which is light until it has loaded."""
    frame = found._repr_html_()
    page = html.unescape(re.search(r'srcdoc="([^"]+)"', frame)[1])
    assert '<html lang="en" data-scheme="light">' in page
    assert "dataset.scheme" in html.unescape(re.search(r'onload="([^"]+)"', frame)[1])
    assert ':root[data-scheme="light"] { color-scheme: light; --paper: #ffffff;' in page
    assert ':root[data-scheme="dark"] { color-scheme: dark; --paper: #15171c;' in page
    return page.replace(' data-scheme="light"', "", 1)


def test_a_notebook_displays_the_page():
    found = gm.inspect("simt_smem", n=256, device="sm_80")
    assert framed_page(found) == inspection_page(found)
    both = gm.inspect("simt_naive", "simt_smem", n=256, device="sm_80")
    assert framed_page(both) == side_by_side_page(both)
    assert re.fullmatch("<Inspection of simt_smem: 256 × 256 × 256, [^\n]{,120}>", repr(found))
    assert re.fullmatch("<Comparison of simt_naive and simt_smem: 256 × 256 × 256, [^\n]{,120}>", repr(both))


@NEEDS_NVDISASM
def test_counters_can_be_left_out():
    found = gm.inspect("simt_smem", n=256, device="sm_80", counters=False)
    assert (found.emulated, found.not_emulated) == (None, "")
    assert [section.title for section in sections(found)] == ["Launch", "Roofline", "Instructions"]
    assert "<figure>" not in framed_page(found)


def test_a_rung_that_the_emulator_does_not_know_says_why(monkeypatch):
    from gemmery_emulator import instructions

    monkeypatch.delitem(instructions.TABLE, "fma.rn.f32")
    found = inspect_rung("simt_linear", n=96, device="sm_86")
    assert found.emulated is None
    assert "fma.rn.f32" in found.not_emulated
    (section,) = [section for section in sections(found) if section.title.startswith("Counters")]
    assert section.rows == (("not counted", found.not_emulated),)


def test_an_exhibit_is_looked_at_like_a_rung():
    found = inspect_rung("divergence_split", config={"steps": 64}, device="sm_80")
    warps = found.emulated.problem.n // 32
    assert found.emulated.total.divergent_branches == warps
    assert found.emulated.total.flops == 2 * 64 * found.emulated.problem.n
    (split,) = found.emulated.chosen.divergences
    assert split.taken.count(True) == split.taken.count(False) == 16
    assert "Roofline" not in [section.title for section in sections(found)]
    page = inspection_page(found)
    assert "4,194,304 elements, f32, steps 64" in page
    assert "Lanes at the branch of divergence_split.cu:10" in page


@pytest.mark.parametrize(
    ("record", "keys"),
    [
        (Inspection, "rung idea problem config device kernels tile workspace unit loads once emulated exhibit"),
        (CompiledLaunch, "name source arch grid block registers spilled occupancy counts loop step multiply_adds ptx"),
        (EmulatorCounts, "problem lines total kinds chosen source"),
        (LineCounts, "line code instructions wavefronts bank_conflicts requests sectors used flops depth"),
        (Selection, "shared tiles global_ divergences untraced"),
        (WarpAccess, "line inner opcode space kind width addresses warp frames"),
        (TileLayout, "operand held store load"),
        (Divergence, "line taken active stretches warp frames"),
        (Stretch, "first last instructions lanes busiest"),
    ],
)
def test_no_key_of_the_json_changes_its_name(record, keys):
    assert set(keys.split()) <= {field.name for field in fields(record)}


@NEEDS_NVDISASM
def test_the_main_loop_has_a_column_where_there_is_one(smem):
    """It is a loop that multiplies and adds. Two kernels are compared by their loops, or else by all of their code."""
    without = inspect_rung("bank_stride", config={"stride": 32}, device="sm_80")
    heads = [
        section.head for found in (smem, without) for section in sections(found) if section.title == "Instructions"
    ]
    assert heads == [("kind", "kernel", "main loop"), ("kind", "kernel")]
    titles = [
        [section.title for section in differences(SideBySide(found, found)) if section.title.startswith("Machine")]
        for found in (smem, without)
    ]
    assert titles == [
        ["Machine instructions of the main loop per 16 FFMA"],
        ["Machine instructions of the whole kernel"],
    ]


def machine(old, new):
    return next(one for one in differences(SideBySide(old, new)) if one.title.startswith("Machine"))


@NEEDS_NVDISASM
def test_main_loops_of_different_length_are_compared_over_the_same_multiply_adds(vectorized):
    """The inner loop of simt_vectorized is 2 steps of k, the main loop of simt_padded the 8 of a tile."""
    padded = inspect_rung("simt_padded", n=SIDE, device="sm_80", counters=False)
    (old,), (new,) = vectorized.kernels, padded.kernels
    assert (old.loop["FFMA"], old.passes, old.step["FFMA"]) == (128, 4, 512)
    assert (new.loop["FFMA"], new.passes, new.step["FFMA"]) == (512, 1, 512)
    found = machine(vectorized, padded)
    assert found.title == "Machine instructions of the main loop per 512 FFMA"
    rows = {name: row for name, *row in found.rows}
    assert rows["FFMA"] == ["512", "512", ""]
    assert rows["LDG.128"] == ["2", "2", ""]
    assert rows["BAR"] == ["2", "2", ""]
    (kernel,) = json.loads(as_json(vectorized))["kernels"]
    assert kernel["multiply_adds"] == 32 * kernel["step"]["FFMA"] == 32 * 512
    (section,) = [section for section in sections(vectorized) if section.title == "Instructions"]
    assert section.head == ("kind", "kernel", "main loop", "step: 4 passes of it")
    assert found.notes[0] in html.unescape(side_by_side_page(SideBySide(vectorized, padded)))


def test_two_rungs_are_ranked_by_their_roofs():
    vectorized, padded = (inspect_rung(name, n=128, device="h200") for name in ("simt_vectorized", "simt_padded"))
    found = SideBySide(vectorized, padded)
    rows = {name: row for one in differences(found) if one.title.startswith("Roofs") for name, *row in one.rows}
    assert rows["compute"][0] == rows["compute"][1]
    assert rows["limit"][:2] == ["shared", "issue"]
    clocks = 132 * 1.98e9
    assert float(rows["shared"][0]) == pytest.approx(1e6 * vectorized.emulated.total.wavefronts / clocks, rel=0.01)
    assert float(rows["issue"][1]) == pytest.approx(1e6 * padded.emulated.total.instructions / 4 / clocks, rel=0.01)
    assert f"roof {rows['roof'][0]} → {rows['roof'][1]} µs" in glance(found)
    (section,) = [section for section in sections(vectorized) if section.title.startswith("Counters")]
    assert f"Roofs of these counts on a full device: shared {rows['shared'][0]} µs, issue" in section.notes[-1]


@NEEDS_NVDISASM
def test_tensor_cores_and_cuda_cores_are_compared_by_multiply_adds():
    cuda, tensor = (
        inspect_rung(name, n=128, dtype="f64", device="sm_80", counters=False) for name in ("simt_smem", "wmma_f64")
    )
    found = machine(cuda, tensor)
    assert found.title == "Machine instructions of the main loop per 32,768 multiply-adds of a warp"
    rows = {name: row for name, *row in found.rows}
    assert rows["DFMA"][:2] == ["1,024", "0"]
    assert rows["DMMA.884"][:2] == ["0", "128"]


def test_the_banks_of_an_exhibit():
    found = inspect_rung("bank_stride", config={"stride": 32, "steps": 16}, device="sm_80")
    worst = found.emulated.chosen.shared[0]
    assert worst.addresses == tuple(worst.addresses[0] + 128 * lane for lane in range(32))
    assert found.emulated.total.bank_conflicts == 31 * 16 * found.emulated.problem.n // 32


def test_the_pictures_of_the_documents_are_those_of_the_kernels():
    """`make docs` updates them."""
    for name, text in drawn().items():
        assert (Path(__file__).parents[1] / FOLDER / name).read_text() == text, name
        assert ElementTree.fromstring(text).get("viewBox").startswith("-16 -16 896 ")
