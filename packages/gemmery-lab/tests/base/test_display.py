"""Records in a notebook: tables and text in its own colors, whatever they contain."""

import numpy as np
import pytest

import gemmery as gm
import gemmery_lab as lab
import records
from gemmery import display


def test_text_is_escaped():
    assert "<script" not in display.table([("<script>", "<b>&")], ["<i>"])
    assert display.preformatted("a < b") == "<pre>a &lt; b</pre>"


def test_nothing_sets_a_color():
    text = display.table([("a", "b")], ["c", "d"])
    assert "color" not in text
    assert "background" not in text


def test_an_explanation_is_a_table_of_its_facts():
    found = gm.explain(np.ones((64, 64), np.float32), np.ones((64, 64), np.float32))
    text = found._repr_html_()
    assert text.startswith("<table>")
    for name, said in ((" rung", found.rung), ("bound by", found.bound), ("why", found.reason)):
        assert f">{name.strip()}</th>" in text
        assert said in text
    assert str(found).splitlines()[0] == "f32 -> f32, m x n x k = 64 x 64 x 64; A row, B row, C row"
    assert f"rung       {found.rung}: " in str(found)


def test_measurements_are_a_table():
    run = records.ladder()
    text = run._repr_html_()
    assert text.count("<tr>") == 1 + len(run.measurements)
    assert f"{run.measurements[0].gflops:,.4g}" in text
    refused = [m for m in run.measurements if m.refused]
    assert all(f"not run: {m.refused}" in text.replace("&gt;", ">") for m in refused)


def test_what_the_emulator_counted_is_shown():
    pytest.importorskip("cuda.bindings")
    run = gm.emulate("__global__ void f(float* x) { x[threadIdx.x] = 1; }", "f", 1, 32, [np.zeros(32, np.float32)])
    assert run._repr_html_().startswith("<iframe")
    assert "Counters of f by line" in run._repr_html_()
    ladder = lab.emulated_ladder(["simt_naive", "mma_f64"], [16], device="t4")
    text = ladder._repr_html_()
    assert text.count("<tr>") == 3
    assert ">right</td>" in text
    assert "not run: " in text
