"""`make test` runs about one case in ten of tests with many: still each of those tests, and each rung."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import conftest
from gemmery.ladder.cuda import CUDA

ROOT = Path(__file__).parents[1]
FILES = (
    "packages/gemmery-lab/tests/emulator/test_emulator_ladder.py",
    "packages/gemmery-lab/tests/emulator/test_emulator_mutants.py",
    "packages/gemmery/tests/cuda/test_cuda_compile.py",
    "packages/gemmery-lab/tests/cuda/test_cuda_factors.py",
    "packages/gemmery/tests/ladder/test_ladder.py",
)
# Collects files whole, and thins out what was collected.
COLLECT = """
import json, sys
import pytest

class Collected:
    def pytest_collection_finish(self, session):
        import conftest
        few = conftest.few_of(session.items)
        print("CASES", json.dumps([[item.nodeid for item in each] for each in (session.items, few)]))

sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Collected()]))
"""

pytest.importorskip("cuda.bindings")


def collected(*arguments):
    """The cases that are collected, and those of them that --few leaves."""
    command = [sys.executable, "-c", COLLECT, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("CASES "))
    return json.loads(line.removeprefix("CASES "))


@pytest.fixture(scope="module")
def cases():
    return collected(*FILES)


@pytest.mark.process
def test_every_test_keeps_some_of_its_cases(cases):
    every, few = (Counter(case.partition("[")[0] for case in each) for each in cases)
    assert set(few) == set(every)
    thinned = {name for name in every if few[name] < every[name]}
    assert len(thinned) > 20
    assert all(few[name] >= every[name] // conftest.MANY for name in thinned)
    assert sum(few[name] for name in thinned) < sum(every[name] for name in thinned) / 6


@pytest.mark.process
def test_every_rung_is_left_in_thinned_tests_of_the_emulator(cases):
    every, few = (Counter(case.partition("[")[0] for case in each) for each in cases)
    thinned = [case for case in cases[1] if few[case.partition("[")[0]] < every[case.partition("[")[0]]]
    file = "packages/gemmery-lab/tests/emulator/test_emulator_ladder.py::"
    left = {part for case in thinned if case.startswith(file) for part in case.partition("[")[2].rstrip("]").split("-")}
    assert {rung.name for rung in CUDA} - left == set()


@pytest.fixture
def run(tmp_path):
    """Run pytest with this conftest.py in a folder that has the texts of some files, and return its output."""

    def run_pytest(*arguments, missing=False, **texts):
        for name, text in texts.items():
            (tmp_path / f"test_{name}.py").write_text(text)
        (tmp_path / "conftest.py").write_text(Path(conftest.__file__).read_text())
        (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\nmarkers =\n  many: few\n  sampled: fewer\n")
        environment = os.environ | ({"MISSING": "1"} if missing else {})
        command = [sys.executable, "-m", "pytest", "-v", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        return done.stdout

    return run_pytest


@pytest.mark.process
def test_tests_that_are_named_keep_every_case(run):
    text = (
        "import pytest\n@pytest.mark.many\n@pytest.mark.parametrize('n', range(33))\ndef test_some(n): pass\n"
        "def test_inside(sample, pytestconfig):\n"
        "    assert len(sample(range(9), 3)) == (9 if 'test_some.py' in pytestconfig.args else 3)\n"
    )
    assert "4 passed, 30 deselected" in run("--few", some=text)
    assert "34 passed" in run("--few", "test_some.py")


@pytest.mark.process
def test_what_is_left_without_a_marker_in_a_sampled_file_and_inside_a_test(run):
    """In one run, because each takes 1.4 s."""
    many = "import pytest\n@pytest.mark.parametrize('n', range(42))\ndef test_many(n): pass\n"
    tests = "\n".join(f"def test_{name}(): pass" for name in "abcdefg")
    inside = (
        "seen = []\n"
        "def test_one(sample): seen.append(sample(range(10), 3))\n"
        "def test_two(sample): seen.append(sample(range(10), 3))\n"
        "def test_three(sample): seen.append(sample(range(10), 3))\n"
        "def test_all(sample):\n"
        "    assert sample('a', 3) == ['a']\n"
        "    assert all(len(each) < 10 and each == list(range(each[0], 10, 3)) for each in seen)\n"
        "    assert len({each[0] for each in seen}) > 1\n"
    )
    output = run(
        "--few",
        many=many,
        usual=many.replace("42", "40").replace("many", "usual"),
        sampled=f"import pytest\npytestmark = pytest.mark.sampled(3)\n{tests}\n",
        inside=inside,
    )
    assert f"{14 + 40 + 3 + 4} passed, {28 + 4} deselected" in output
    assert [name for name in "abcdefg" if f"test_{name} PASSED" in output] == ["a", "d", "g"]


@pytest.mark.process
def test_what_a_run_skipped_can_be_run(run):
    some = (
        "import os, pytest\n"
        "here = pytest.mark.skipif('MISSING' in os.environ, reason='missing')\n"
        "@here\n@pytest.mark.parametrize('n', [1, 2])\ndef test_first(n): pass\n"
        "def test_second(): pass\n"
    )
    other = (
        "import os, pytest\nif 'MISSING' in os.environ: pytest.skip('missing', allow_module_level=True)\n"
        "def test_third(): pass\n"
    )
    assert "2 passed" in run("-n", "2", missing=True, some=some, other=other, none="def test_fourth(): pass\n")
    assert "3 passed, 1 deselected" in run("--skipped")


@pytest.mark.process
def test_files_for_a_device_are_skipped_whole_where_none_is(run, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/test_some.py").write_text("def test_first(): pass\ndef test_second(): pass\n")
    other = "def test_third(): pass\n"
    output = run("--few", "-rs", other=other)
    assert "1 passed, 1 skipped" in output
    assert f"SKIPPED [1] {Path('gpu/test_some.py')}" in output
    assert "3 passed" in run(other=other)
    assert "2 passed" in run("--few", "gpu/test_some.py")


def test_every_file_in_a_folder_for_a_device_has_the_marker():
    files = list(ROOT.glob("packages/*/tests/gpu/test_*.py"))
    assert len(files) > 20
    for file in files:
        assert re.search(r"^pytestmark = \[\s*pytest\.mark\.gpu,", file.read_text(), re.MULTILINE), file
