"""Every example runs in an empty folder, and what it prints about itself is true."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gemmery.cuda import driver
from gemmery_lab import cli

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NEEDS = {
    "04_torch_and_dlpack": "torch",
    "08_arrays_on_a_gpu": "torch",
    "09_look_at_a_gpu_kernel": "cuda",
    "10_emulate": "cuda",
    "11_llama": "transformers",
    "12_convert_a_checkpoint": "safetensors",
}
SAYS = {
    "01_matmul": "same bits:    True",
    "02_half_and_int8": "an error:            dtype='int32' cannot represent",
    "03_batched_and_epilogue": "layer:     True",
    "04_torch_and_dlpack": "bf16 -> f32: torch.float32 True",
    "05_explain": "rung       gemv",
    "06_climb_the_ladder": "packed",
    "07_your_own_rung": "x simd_row",
    "08_arrays_on_a_gpu": driver.missing() or "captured:     True",
    "09_look_at_a_gpu_kernel": "h200  sm_90a",
    "10_emulate": "rows of 33: correct True, 0 bank conflicts",
    "11_llama": "decode, eager",
    "12_convert_a_checkpoint": "sums of columns are exact: True",
    "13_epilogue_functions": "two weights: True",
    "14_shortest_paths": "pairs with a path, the longest",
    "15_route_tokens": "two experts a token: True",
}


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_runs_as_printed(capsys):
    """Its blocks of Python one after the other; the comment after each print is what it prints."""
    pytest.importorskip("cuda.bindings")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL))
    exec(compile(code, "README.md", "exec"), {})
    printed = re.findall(r"^print\(.*\) +# (.*)", code, re.MULTILINE)
    assert len(printed) == 3
    assert capsys.readouterr().out.splitlines() == printed


def test_the_command_of_the_readme_emulates_a_file(tmp_path, monkeypatch, capsys):
    pytest.importorskip("cuda.bindings")
    (command,) = re.findall(r"^gemmery (emulate .*)", README, re.MULTILINE)
    monkeypatch.chdir(ROOT)
    page = tmp_path / "page.html"
    assert cli.run([str(page) if word == "page.html" else word for word in shlex.split(command)]) == 1  # it has faults
    assert "transpose.cu:8  race" in capsys.readouterr().out
    assert "transpose.cu" in page.read_text(encoding="utf-8")


def test_the_examples_are_numbered_and_each_is_expected_to_say_something():
    assert [path.stem for path in EXAMPLES] == sorted(SAYS)
    assert [int(path.stem[:2]) for path in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))


@pytest.mark.process
@pytest.mark.many(3)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example(path, tmp_path):
    if path.stem in NEEDS and importlib.util.find_spec(NEEDS[path.stem]) is None:
        pytest.skip(f"{NEEDS[path.stem]} is not installed")
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[path.stem] in done.stdout
    assert not re.search(r"\bFalse\b|\bnan\b|\binf\b", done.stdout)
    assert list(tmp_path.iterdir()) == []
