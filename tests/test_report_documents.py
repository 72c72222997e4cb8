"""Documents are generated from records alone."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import records
from gemmery.errors import ArgumentError
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery_lab.measure import record, suite
from gemmery_lab.measure.processes import COMPARED
from gemmery_lab.measure.record import Run
from gemmery_lab.report.sheet import table
from site_pages.documents import Documents, main, refusals, sentence, tree_lines
from site_pages.overviews import overview

GPU_RUNS = record.read(Path(__file__).parents[1] / "packages/gemmery-lab/tests" / "data" / "h200.jsonl")
NAME = records.MACHINE.name
OTHER = replace(records.MACHINE, name="other-avx512-16c", cpu="Another CPU", cores=16)


def keep(root, run):
    record.append(record.path(root / "benchmarks" / "results", run.machine.name), run)


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """A checkout without records, and two suites."""
    for folder in ("benchmarks", "docs", "suites"):
        (tmp_path / folder).mkdir()
    for name in ("skinny", "skinny_f32"):
        (tmp_path / "suites" / f"{name}.toml").write_text('about = "Thin ones"\n[[product]]\nsquare = [4]\n')
    monkeypatch.setattr(suite, "SUITES", tmp_path / "suites")
    return tmp_path


@pytest.fixture
def root(empty):
    """A checkout with records of a ladder and of a suite."""
    for run in (records.ladder(), replace(records.bench(), started="2026-11-20T11:00:00.000000+00:00")):
        keep(empty, run)
    return empty


def filled(root, text, name="README.md", rungs=records.RUNGS):
    path = root / name
    path.write_text(text)
    return Documents(root, rungs).fill(path, path.read_text())


def test_a_value(root):
    text = "gains <!-- value: skinny_f32 numpy m=8 -->?<!-- end --> over NumPy"
    assert filled(root, text) == text.replace("?", "3.52×")
    for what, said in (("rate", "32.0 GFLOP/s"), ("share", "27.5%"), ("time", "524 µs"), ("torch", "2.00×")):
        assert f">{said}<" in filled(root, f"<!-- value: skinny_f32 {what} m=8 --><!-- end -->")


def test_a_value_of_a_rung(root):
    assert "106 GFLOP/s" in filled(root, "<!-- value: ladder rate kernel=packed n=1024 m=1024 --><!-- end -->")


def test_a_table(root):
    text = filled(root, "before\n<!-- table: ladder n=1024 m=1024 -->\nold\n<!-- end -->\nafter\n")
    assert "| packed |" in text
    assert "| 20.3 | 106 |" in text
    assert records.MACHINE.cpu in text
    assert "Measured 2026-11-20 10:00 UTC" in text
    assert "old" not in text
    assert text.startswith("before\n<!-- table:")
    assert text.endswith("<!-- end -->\nafter\n")


def test_a_ratio_has_its_spread(root):
    assert "| **3.52×** ± 0.03 |" in filled(root, "<!-- table: skinny_f32 -->\n<!-- end -->")


def test_the_newest_run_that_holds_a_suite_counts_alone(root):
    run = records.bench()
    newer = tuple(replace(m, versus={"numpy": 9.0}) for m in run.measurements if m.m == 8 and m.versus)
    keep(root, replace(run, started="2026-11-21T00:00:00.000000+00:00", measurements=newer))
    text = filled(root, "<!-- table: skinny_f32 -->\n<!-- end -->\n<!-- table: ladder n=512 m=512 -->\n<!-- end -->")
    assert "9.00×" in text
    assert "2048 × 2048" not in text  # the older run's
    assert "Measured 2026-11-20 10:00" in text  # the ladder's, though its file has a newer run


def test_every_machine_has_its_own_table(root):
    keep(root, replace(records.bench(), machine=OTHER))
    text = filled(root, "<!-- table: skinny_f32 -->\n<!-- end -->")
    assert text.index(records.MACHINE.cpu) < text.index("Another CPU, avx512, 16 cores")
    assert text.count("| 8 × 1024 × 1024, f32 |") == 2
    for said, there, absent in (("first", records.MACHINE, OTHER), (OTHER.name, OTHER, records.MACHINE)):
        one = filled(root, f"<!-- table: skinny_f32 machine={said} -->\n<!-- end -->")
        assert there.cpu in one
        assert absent.cpu not in one
    with pytest.raises(ArgumentError, match="2 records"):
        filled(root, "<!-- value: skinny_f32 rate m=8 --><!-- end -->")


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("table: skinny", "Not measured yet: `gemmery bench skinny --store benchmarks/results` stores the records."),
        ("figure: skinny standing-skinny", "Not measured yet: `gemmery bench skinny --store"),
        ("overview: skinny", "Not measured yet: `gemmery bench skinny --store"),
        ("table: skinny machine=far", "Not measured on `far` yet"),
        ("figure: ladder ladder", "`gemmery ladder --store benchmarks/results` stores the records."),
        ("table: sweep_block", "gemmery sweep block"),
        ("value: skinny rate m=8", "(not measured yet)"),
        ("figure: ladder ladder machine=gpu", "Not measured on a GPU yet: `gemmery ladder --device cuda --store"),
        ("figure: sweep_size machine=gpu dtype=f16", "`gemmery sweep size --device cuda --dtype f16 --store"),
        ("table: sweep_stages dtype=f64", "`gemmery sweep stages --dtype f64 --store"),
        ("table: sweep_gemv dtype=f16", "`gemmery sweep gemv --dtype f16 --store"),
    ],
)
def test_without_records_words_say_so(empty, marker, said):
    assert said in filled(empty, f"<!-- {marker} -->\n<!-- end -->")


def test_a_figure_is_written_beside_the_documents(root):
    (root / "docs" / "ladder.md").write_text("<!-- figure: ladder ladder roofline-ladder -->\n<!-- end -->\n")
    main(root)
    text = (root / "docs" / "ladder.md").read_text()
    links = re.findall(r'src="([^"]+)"', text)
    assert links == [f"figures/{NAME}-ladder.svg", f"figures/{NAME}-roofline-ladder.svg"]
    assert all((root / "docs" / link).read_text().startswith("<svg") for link in links)
    stale = root / "docs" / "figures" / "old.svg"
    stale.write_text("<svg/>")
    main(root)
    assert (root / "docs" / "ladder.md").read_text() == text
    assert not stale.exists()


def test_a_document_that_is_built_has_its_text_elsewhere(root):
    (root / "site_pages").mkdir()
    (root / "site_pages" / "results.md").write_text(text := "# All\n<!-- table: skinny_f32 -->\n<!-- end -->\n")
    (root / "docs" / "results.md").write_text("of old")
    main(root)
    assert (root / "docs" / "results.md").read_text().startswith("# All\n<!-- table: skinny_f32 -->\n*")
    assert (root / "site_pages" / "results.md").read_text() == text


def test_an_overview_takes_the_fastest_rival_of_each_problem(root):
    text = filled(root, "<!-- overview: skinny_f32 -->\n<!-- end -->")
    assert "| Thin ones | 5 | 0.961× | 1.28× | 2.00× |" in text  # 8 x 1024 x 1024: 3.52 times NumPy, 2 times PyTorch
    (slow,) = (m for m in records.bench().measurements if m.n == 1 and m.versus)
    worse = replace(slow, versus={"numpy": 0.5, "torch": 0.9}, spread={"numpy": 0.01, "torch": 0.01})
    keep(root, Run(records.MACHINE, "2026-11-22T00:00:00.000000+00:00", (worse,)))
    text = filled(root, "<!-- overview: skinny_f32 -->\n<!-- end -->")
    assert "| 0.500× | 0.500× | 0.500× | 8.43% to 8.43% | 4096 × 1 × 4096, f32 (0.500×) |" in text


def test_an_overview_of_new_shapes_has_a_row_for_each_state():
    (product, *_) = records.bench().measurements
    rows = tuple(replace(product, suite="new_shapes", kernel="gm.matmul", case=case) for case in COMPARED)
    sheet = overview(Run(records.MACHINE, "2026-11-22T10:00:00.000000+00:00", rows), {"new_shapes": "New shapes"})
    assert table(sheet).splitlines()[1].endswith("---: | :--- |")  # the last column has words
    cached = "kernels cached", "kernels cached, after the first product"
    states = "nothing compiled", *cached, "all shapes met before", "kernels cached, the longest call"
    assert [row[0].text for row in sheet.rows] == [f"New shapes ({state})" for state in states]


def test_a_summary_is_an_overview_of_one_machine_without_the_losses(root):
    keep(root, replace(records.bench(), machine=OTHER))
    text = filled(root, "<!-- summary: skinny_f32 machine=first -->\n<!-- end -->")
    assert "| suite | min | median | max | % of peak |" in text
    assert "| Thin ones | 0.961× | 1.28× | 2.00× |" in text
    assert "slower" not in text
    assert OTHER.cpu not in text
    assert filled(root, "<!-- overview: skinny_f32 -->\n<!-- end -->").count("| Thin ones | 5 |") == 2


def test_each_rival_is_named_once(root):
    torch = "PyTorch 2, oneDNN"
    notes = {"cublas": ("cuBLAS 13, torch.mm", "cuBLAS 13, torch.mv"), "torch": (f"{torch}; no wider result", torch)}
    found = [
        records.measurement("duel", kernel, n, 90.0, note=note)
        for kernel, said in notes.items()
        for n, note in enumerate(said, 512)
    ]
    keep(root, Run(records.MACHINE, "2026-11-22T00:00:00.000000+00:00", tuple(found)))
    text = filled(root, "<!-- table: duel -->\n<!-- end -->")
    assert "; cuBLAS 13, torch.mm and torch.mv; PyTorch 2, oneDNN; no wider result. Measured" in text


def test_a_picture_is_a_figure_with_one_line_below(root):
    text = filled(root, "<!-- picture: ladder ladder dtype=f32 -->\n<!-- end -->")
    assert re.findall(r'src="([^"]+)"', text) == [f"docs/figures/{NAME}-ladder-f32.svg"]
    assert f"*The ladder at n = 2048, f32, on {records.MACHINE.cpu}, " in text
    assert "**" not in text


def test_the_ladder_is_drawn_at_the_largest_size_at_which_most_rungs_ran(root):
    run = records.ladder()
    large = [replace(m, m=4096, n=4096, k=4096, flops=2 * 4096**3) for m in run.measurements if m.m == m.n == 2048]
    large = [replace(m, seconds=0.0, refused="too slow") if m.kernel == "scalar_naive" else m for m in large]
    marker = "<!-- figure: ladder ladder dtype=f32 -->\n<!-- end -->"
    keep(root, Run(run.machine, "2026-11-23T00:00:00.000000+00:00", (*run.measurements, *large)))
    text = filled(root, marker)
    assert "**The ladder at n = 2048, f32**" in text
    assert "Not run" not in text
    keep(root, Run(run.machine, "2026-11-24T00:00:00.000000+00:00", tuple(large)))
    text = filled(root, marker)
    assert "**The ladder at n = 4096, f32**" in text
    assert "Not run: scalar_naive." in text


def test_rungs_that_took_turns_stand_side_by_side(root):
    found = [
        records.measurement("duel", kernel, 512, speed, case="which one", versus={"numpy": 1.0})
        for kernel, speed in (("direct", 101.0), ("packed kc=64", 95.0), ("numpy", 90.0))
    ]
    keep(root, Run(records.MACHINE, "2026-11-22T00:00:00.000000+00:00", tuple(found)))
    text = filled(root, "<!-- table: duel case='which one' -->\n<!-- end -->")
    assert "**which one: GFLOP/s, 1 thread**" in text
    assert "| product | direct | packed kc=64 | NumPy | peak |" in text
    assert "| n = 512, f32 | **101** | 95.0 | 90.0 | 116 |" in text


def test_the_rungs(root):
    text = filled(root, "<!-- rungs -->\n<!-- end -->")
    for rung in records.RUNGS:
        assert f"| `{rung.name}` |" in text
    assert filled(root, text) == text


def test_the_ladder_says_of_each_rung_what_it_is_teaches_and_gave(root):
    (root / "docs" / "published.toml").write_text(
        '[[figure]]\nrung = "packed"\nsource = "an old chip"\nby = "n"\nmilliseconds = { 512 = 1234 }\n'
    )
    text = filled(root, "<!-- ladder: dtype=f32 -->\n<!-- end -->", "docs/ladder.md", CPU)
    for rung in CPU:
        assert f"\n## {rung.name}\n" in text
        assert rung.lesson in text
        assert f"](../packages/gemmery/src/gemmery/{rung.source})" in text
        for reason in refusals(rung):
            assert f"- Not supported: {reason}." in text
    packed = text[text.index("## packed\n") : text.index("## packed_threaded")]
    assert "GFLOP/s | % of peak |" in packed
    assert "| n = 1024, f32 | 106 | 91.1% |" in packed
    assert "% of peak | × parent |" in text[text.index("## simd_row\n") : text.index("## simd_blocked")]
    assert "| Published, an old chip | n = 512 |\n| :--- | ---: |\n| ms | 1,234 |\n" in packed
    assert "\n| `kc` | 128, 256, 512, 1024 |\n" in packed


def on_a_gpu(dtype, started, rate=1000.0, **more):
    """Return a run of one rung, in records like those of a GPU."""
    ran = next(m for run in GPU_RUNS for m in run.measurements if m.suite == "ladder" and m.kernel == "simt_smem")
    machine = next(run.machine for run in GPU_RUNS)
    taken = replace(ran, dtype=dtype, out=dtype, seconds=ran.flops / (1e9 * rate), versus={}, **more)
    return Run(machine, f"2026-11-{started}T00:00:00.000000+00:00", (taken,))


def test_the_ladder_of_the_gpu_takes_each_type_from_its_newest_run(root):
    for run in (
        on_a_gpu("f32", 20, 1000.0),
        on_a_gpu("f32", 21, 2000.0),
        on_a_gpu("f32", 22, 3000.0, precision="tf32"),
        on_a_gpu("f64", 23, 4000.0),
    ):
        keep(root, run)
    text = filled(root, "<!-- ladder: gpu -->\n<!-- end -->", "docs/ladder_gpu.md", CPU)
    assert "## simt_smem" not in text  # these are not the GPU's rungs
    path = root / "docs" / "ladder_gpu.md"
    text = Documents(root, CPU, CUDA).fill(path, path.read_text())
    assert [rung.name for rung in CUDA] == re.findall(r"^## (\w+)$", text, re.MULTILINE)
    section = text[text.index("## simt_smem\n") : text.index("## simt_smem_transposed")]
    assert section.count("| NVIDIA H200, sm_90, ") == 1
    assert re.findall(r"\| (\w+) \| (\d.00) \|", section.replace("n = 2048, ", "")) == [
        ("f32", "2.00"),
        ("f64", "4.00"),
        ("tf32", "3.00"),
    ]
    assert "AMD" not in section


def test_markers_are_for_machines_of_one_kind(root):
    keep(root, on_a_gpu("f32", 21))
    for kind, there, absent in (("cpu", "| packed |", "H200"), ("gpu", "H200", "| packed |")):
        text = filled(root, f"<!-- table: ladder machine={kind} -->\n<!-- end -->", rungs=(*records.RUNGS, *CUDA))
        assert there in text
        assert absent not in text
    assert "H200" not in filled(root, "<!-- ladder: dtype=f32 -->\n<!-- end -->", "docs/ladder.md", CPU)


def test_a_rung_that_begins_with_a_name_keeps_it_small():
    assert [sentence(words) for words in ("the same", "a tile", "x is read", "mma.sync in double", "7 products")] == [
        "The same",
        "A tile",
        "x is read",
        "mma.sync in double",
        "7 products",
    ]


@pytest.mark.parametrize(("rungs", "opening"), [(CPU, '"""'), (CUDA, "// ")])
def test_every_rung_has_a_lesson_and_a_source_that_is_there(rungs, opening):
    import gemmery

    package = re.sub(r"__init__\.py$", "", gemmery.__file__)
    for rung in rungs:
        assert len(rung.lesson) > 80, f"{rung.name}: a lesson has more than 80 characters"
        assert rung.source
        with open(package + rung.source) as file:
            assert file.read(3) == opening


def test_the_tree_puts_each_rung_under_its_parent():
    lines = tree_lines(records.RUNGS)
    assert len(lines) == len(records.RUNGS)
    assert lines[0].startswith("scalar_naive ")
    depth = {line.split()[0]: len(line) - len(line.lstrip()) for line in lines}
    assert all(depth[r.name] == (depth[r.parent] + 2 if r.parent else 0) for r in records.RUNGS)


def test_the_files_of_a_folder_are_listed_with_the_first_lines_of_their_docstrings(root):
    (root / "a" / "b").mkdir(parents=True)
    for name, said in (("c.py", "One. Two."), ("b/__init__.py", "Packs."), ("b/d.py", "Long " * 30)):
        (root / "a" / name).write_text(f'"""{said}\n\nMore.\n"""\n')
    (root / "a" / "b" / "e.py").touch()
    lines = filled(root, "<!-- files: a -->\n<!-- end -->").splitlines()
    assert lines[2:4] == ["a/", "  c.py" + 18 * " " + "One. Two."]
    assert lines[4:6] == ["a/b/" + 20 * " " + "Packs.", "  d.py" + 18 * " " + ("Long " * 19).strip()]
    assert lines[6:8] == [24 * " " + ("Long " * 11).strip(), "  e.py"]


def test_a_document_without_markers_stays(root):
    assert filled(root, "# 12.5 GFLOP/s\n\ntext <!-- a remark -->\n") == "# 12.5 GFLOP/s\n\ntext <!-- a remark -->\n"


@pytest.mark.parametrize(
    "marker",
    [
        "table",
        "table: nosuite",
        "value: nosuite rate",
        "value: skinny_f32 rate",  # names five records
        "value: skinny_f32 mkl m=8",
        "value: skinny_f32 m=8",
        "value: skinny_f32 rate color=red",
        "figure: ladder nosuch",
    ],
)
def test_a_marker_that_names_nothing_is_an_error(root, marker):
    with pytest.raises(ArgumentError):
        filled(root, f"<!-- {marker} --><!-- end -->")
