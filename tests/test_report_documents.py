"""Documents are filled from records, and from nothing else."""

import re
from dataclasses import replace

import pytest

import records
from gemmery.bench import record
from gemmery.errors import ArgumentError
from gemmery.report.documents import Documents, main

NAME = records.MACHINE.name


@pytest.fixture
def root(tmp_path):
    """A checkout with records of a ladder and of a suite."""
    file = record.path(tmp_path / "benchmarks" / "results", NAME)
    for run in (records.ladder(), replace(records.bench(), started="2026-11-20T11:00:00.000000+00:00")):
        record.append(file, run)
    (tmp_path / "docs").mkdir()
    return tmp_path


def filled(root, text, name="README.md"):
    path = root / name
    path.write_text(text)
    return Documents(root, records.RUNGS).fill(path)


def test_a_value(root):
    text = f"gains <!-- value: {NAME} skinny_f32 numpy m=8 -->?<!-- end --> over NumPy"
    assert filled(root, text) == text.replace("?", "3.52×")
    for what, said in (("rate", "32.0 GFLOP/s"), ("share", "27.5%"), ("time", "524 µs"), ("torch", "2.00×")):
        assert f">{said}<" in filled(root, f"<!-- value: {NAME} skinny_f32 {what} m=8 --><!-- end -->")


def test_a_value_of_a_rung(root):
    text = f"<!-- value: {NAME} ladder rate kernel=packed n=1024 m=1024 --><!-- end -->"
    assert "106 GFLOP/s" in filled(root, text)


def test_a_table(root):
    text = filled(root, f"before\n<!-- table: {NAME} ladder n=1024 m=1024 -->\nold\n<!-- end -->\nafter\n")
    assert "| packed |" in text
    assert "| 20.3 | 106 |" in text
    assert records.MACHINE.cpu in text
    assert "old" not in text
    assert text.startswith("before\n<!-- table:")
    assert text.endswith("<!-- end -->\nafter\n")


def test_the_newest_record_counts(root):
    run = records.bench()
    newer = tuple(replace(m, versus={"numpy": 9.0}) for m in run.measurements if m.m == 8 and m.versus)
    file = record.path(root / "benchmarks" / "results", NAME)
    record.append(file, replace(run, started="2026-11-21T00:00:00.000000+00:00", measurements=newer))
    assert "9.00×" in filled(root, f"<!-- value: {NAME} skinny_f32 numpy m=8 --><!-- end -->")


def test_a_figure_is_written_beside_the_documents(root):
    (root / "docs" / "ladder.md").write_text(f"<!-- figure: {NAME} ladder ladder -->\n<!-- end -->\n")
    main(root)
    text = (root / "docs" / "ladder.md").read_text()
    link = re.search(r'src="([^"]+)"', text)[1]
    assert (root / "docs" / link).read_text().startswith("<svg")
    main(root)
    assert (root / "docs" / "ladder.md").read_text() == text


def test_the_rungs(root):
    text = filled(root, "<!-- rungs -->\n<!-- end -->")
    for rung in records.RUNGS:
        assert f"| `{rung.name}` |" in text
    assert filled(root, text) == text


def test_a_document_without_markers_stays(root):
    assert filled(root, "# 12.5 GFLOP/s\n\ntext <!-- a remark -->\n") == "# 12.5 GFLOP/s\n\ntext <!-- a remark -->\n"


@pytest.mark.parametrize(
    "marker",
    [
        "value: nowhere skinny_f32 rate",
        f"value: {NAME} nosuite rate",
        f"value: {NAME} skinny_f32 rate",  # names five records
        f"value: {NAME} skinny_f32 mkl m=8",
        f"value: {NAME} skinny_f32 rate colour=red",
        f"figure: {NAME} ladder nosuch",
    ],
)
def test_a_marker_that_names_nothing_is_an_error(root, marker):
    with pytest.raises(ArgumentError):
        filled(root, f"<!-- {marker} --><!-- end -->")
