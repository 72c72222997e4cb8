"""Records of whole models are shown as tokens a second, next to PyTorch's layers."""

import records
from gemmery_lab.experiments import ANY_SUITE, find
from gemmery_lab.measure.record import Measurement, Run
from gemmery_lab.report.sheet import table
from gemmery_lab.report.tables import sheets


def step(kernel, tokens, seconds, case="decode, eager", **more):
    return Measurement(
        "llama_tiny", kernel, tokens, 256, 256, "bf16", "bf16", 1, 0, seconds, seconds, seconds, 9, 10**9, 2 * 10**6,
        case=case, config={"layers": 2, "vocabulary": 1024}, note=f"note of {kernel}", **more,
    )  # fmt: skip


def test_a_model_has_a_row_for_each_way_to_run_it_and_a_column_for_each_kind_of_layers():
    rows = (
        step("torch", 512, 0.004, "prefill, eager"),
        step("gemmery", 512, 0.002, "prefill, eager", versus={"torch": 2.0}, spread={"torch": 0.01}),
        step("torch", 1, 0.001),
        step("gemmery", 1, 0.0008, versus={"torch": 1.25}, spread={"torch": 0.5}),
        step("gemmery, 4 bits", 1, 0.002, versus={"torch": 0.5}, spread={"torch": 0.01}),
    )
    assert find("llama_tiny").table == ANY_SUITE
    (sheet,) = sheets(Run(records.MACHINE, records.STARTED, rows), ())
    assert sheet.title == "llama tiny, bf16"
    assert sheet.head == ("tokens a second", "PyTorch", "gemmery", "gemmery, 4 bits")
    assert [[cell.text for cell in row] for row in sheet.rows] == [
        ["prefill, eager", "128,000", "256,000 (2.00×)", ""],
        ["decode, eager", "1,000", "1,250 (0.75–1.8×)", "500 (0.500×)"],
    ]
    assert [[cell.tone for cell in row] for row in sheet.rows] == [["", "", "best", ""], ["", "", "best", ""]]
    assert "layers 2, vocabulary 1,024" in sheet.notes
    assert "gemmery, 4 bits: 2.00 MB in linear layers; note of gemmery, 4 bits" in sheet.notes
    assert "| decode, eager | 1,000 |" in table(sheet)
