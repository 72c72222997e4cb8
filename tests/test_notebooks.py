"""The notebooks run from top to bottom without a GPU, and their checks tell a right answer from a wrong one."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from gemmery import limits
from gemmery.cuda import nvrtc
from gemmery.errors import DeviceError
from gemmery.limits import Bandwidth
from gemmery_lab import on_cpu

pytest.importorskip("matplotlib", reason="notebooks draw with Matplotlib")
BOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
PLACE = "def place(lane, i): return lane // 4 + {below} * (i // 2), lane % 4 * 2 + i % 2"
# An exercise cell with a right answer, and with a wrong one.
ANSWERS = {
    "01_cpu_ladder": ("answer = (4, 24)", "answer = (6, 16)"),
    "02_memory_and_banks": ("answer = 'row ^ column'", "answer = 'column ^ (row & 1)'"),
    "03_tensor_cores": (PLACE.format(below=8), PLACE.format(below=4)),
    "04_quantized_decode": ("answer = (5, 32)", "answer = (6, 1024)"),
}
COMPILED = {"02_memory_and_banks", "03_tensor_cores"}  # their kernels need NVRTC


@pytest.fixture
def quick(monkeypatch):
    """Measured limits cost a second each, and comparisons two: a reader waits for them, and a test need not."""
    monkeypatch.setattr(limits, "peak", lambda dtype, threads: 100.0 * threads)
    monkeypatch.setattr(limits, "bandwidth", lambda threads: Bandwidth(20.0, 18.0))
    monkeypatch.setattr(on_cpu, "SHARE", 0.02)


def cells(path):
    return json.loads(path.read_text())["cells"]


def tagged(path, tag):
    """The text of the one cell with a tag."""
    (cell,) = [cell for cell in cells(path) if tag in cell["metadata"].get("tags", ())]
    return "".join(cell["source"])


def execute(code, names):
    """Run a cell as a notebook does, which displays the value of its last line."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is None:
        return ""
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return value._repr_html_() if hasattr(value, "_repr_html_") else str(value)


def test_there_is_one_for_each_part_of_the_course():
    assert [path.stem for path in BOOKS] == sorted(ANSWERS)


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    """Outputs are times of one machine, and pictures that git cannot compare."""
    book = json.loads(path.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert book["metadata"]["kernelspec"]["name"] == "python3"
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    assert "".join(book["cells"][0]["source"]).startswith("# ")
    assert "check" in book["cells"][-1]["metadata"]["tags"]
    assert "exercise" in book["cells"][-2]["metadata"]["tags"]


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_checks_its_exercise(path, quick, capsys, recwarn):
    import matplotlib.pyplot as plt

    if path.stem in COMPILED:
        try:
            nvrtc.bindings()
        except DeviceError as error:
            pytest.skip(str(error))
    plt.switch_backend("agg")
    names, pages, pictures = {"__name__": "__main__"}, [], 0
    for cell in cells(path):
        if cell["cell_type"] == "code":
            pages.append(execute("".join(cell["source"]), names))
            pictures += len(plt.get_fignums())
            plt.close("all")
    assert "No answer yet" in capsys.readouterr().out
    assert pictures >= 2
    assert any("<iframe" in page and "svg" in page for page in pages) == (path.stem in COMPILED)
    assert [str(warning.message) for warning in recwarn] == []
    right, wrong = ANSWERS[path.stem]
    execute(right, names)
    execute(tagged(path, "check"), names)
    assert "Right" in capsys.readouterr().out
    execute(wrong, names)
    with pytest.raises(AssertionError):
        execute(tagged(path, "check"), names)


@pytest.mark.many(4)
@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_jupyter_runs_a_notebook(path, tmp_path):
    """The same in a kernel of its own, where Jupyter is installed: CI does not install it."""
    nbformat = pytest.importorskip("nbformat", reason="Jupyter is not installed")
    client = pytest.importorskip("nbclient", reason="Jupyter is not installed")
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    client.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_types_no_figure(path):
    """What is fast is measured by the reader."""
    text = "".join("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "markdown")
    assert re.findall(r"\d[\d.,]* ?(?:×(?! \d)|GFLOP|TFLOP|GB/s|ms\b|us\b|µs)", text) == []
