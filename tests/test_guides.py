"""The code of the guides runs: every block of Python in order, those for a GPU where there is one."""

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gemmery
from gemmery.cuda import driver

GUIDES = sorted((Path(__file__).parents[1] / "docs" / "guides").glob("*.md"))
NEEDS = {
    "epilogues": ("torch",),
    "accurate_float32": ("torch",),
    "fp8_inference": ("torch", "cuda"),
    "numpy": (),
    "packed_weights": (),
    "quantized_matrices": ("torch",),
    "ci_without_a_gpu": ("cuda",),
}
BLOCK = re.compile(r"(<!-- needs a GPU -->\n)?^```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[bool, str, str, str]]:
    """Return (needs a GPU, language, file, code) of each block."""
    return [(bool(gpu), language, file, code) for gpu, language, file, code in BLOCK.findall(text)]


def unknown_arguments(code: str) -> list[str]:
    """Return keywords of calls `gm.name(...)` that the function does not have."""
    wrong = []
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="gm"), attr=name), keywords=keywords):
                known = inspect.signature(inspect.unwrap(getattr(gemmery, name))).parameters
                wrong += [f"{name}({word.arg}=)" for word in keywords if word.arg and word.arg not in known]
    return wrong


def test_every_guide_is_expected():
    assert {path.stem for path in GUIDES} == NEEDS.keys()


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_calls_of_the_library_have_arguments_that_exist(path):
    code = [code for _, language, _, code in blocks(path.read_text()) if language == "python"]
    assert len(code) > 1
    assert [wrong for part in code for wrong in unknown_arguments(part)] == []
    assert unknown_arguments("gm.matmul(a, b, scale_c=1)") == ["matmul(scale_c=)"]


@pytest.mark.process
@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_the_code_of_a_guide_runs(path, tmp_path, monkeypatch):
    for package in NEEDS[path.stem]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": path.stem}
    for gpu, language, file, code in blocks(path.read_text()):
        if file:
            Path(file).write_text(code)
        if file.startswith("test_"):
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "gemmery_emulator.pytest",
                "--strict-markers",
                file,
            ]
            environment = {**os.environ, "PYTHONWARNINGS": "error"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
            assert done.returncode == 0, done.stdout
        elif language == "python" and not (gpu and driver.missing()):
            exec(compile(code, f"{path.name}", "exec"), names)
