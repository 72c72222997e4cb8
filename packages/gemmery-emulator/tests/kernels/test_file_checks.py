"""Checks of files for faults: launches in comments, programs, kernels alone; the hook's and the action's own files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from gemmery.errors import ArgumentError
from gemmery_emulator.kernels import written_arguments
from gemmery_emulator.kernels.file_checks import faults, faults_of, launches_of

ROOT = Path(__file__).parents[4]
RACE = """__global__ void f(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = s[63 - threadIdx.x];
}
"""
LAUNCH = "// gemmery: --grid 1 --block=64 --arg f32[64]=arange\n"


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "k.cu"
        path.write_text(text)
        return path

    return write


@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (LAUNCH + RACE, [5]),
        (LAUNCH.replace("64]", "32]") + RACE, [4, 5, 5]),
        (LAUNCH + RACE.replace("  x[", "  __syncthreads(); x["), []),
        (RACE, []),  # nothing says how it is launched
        (RACE.replace("s[63", "t[63"), [4]),
        (RACE + "int main() { float* x; cudaMalloc(&x, 256); f<<<1, 64>>>(x); }", [4]),
        (RACE.replace("  x[", "  __syncthreads(); x[") + "int main() { return 3; }", [0]),
        ("#define N 3\nint main() { return N; }", []),  # no kernel
        (
            "/* gemmery: -k g<2> -a 3 */\ntemplate <int N> __global__ void g(int n) { n == N ? __trap() : void(); }",
            [],
        ),
        ("// gemmery: -k g\n__global__ void g(int n) {}", [0]),
        ("// gemmery: --blocks 4\n__global__ void g() {}", [0]),
        (LAUNCH + LAUNCH + RACE, [6, 6]),
    ],
)
def test_faults_of_a_file(file, text, lines):
    path = file(text)
    found = list(faults_of(path))
    assert sorted(each.line for each in found if each.counts) == lines, [str(each) for each in found]
    assert faults([path])() == bool(lines)


def test_the_forms_of_a_fault(file, capsys):
    path = file(LAUNCH + RACE)
    assert faults([path], github=True)() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"::error file={path},line=5::k.cu:5: race: thread 0")
    assert lines[1] == "1 fault in 1 file"
    with pytest.raises(ArgumentError, match=r"x\.cu: there is no such file"):
        faults([Path("x.cu")])
    with pytest.raises(ArgumentError, match="it is a folder"):
        faults([path.parent])
    with pytest.raises(ArgumentError, match=r"looked for in \.cu and \.cuh files"):
        faults([Path(__file__)])


@pytest.mark.parametrize("text", ["// gemmery: --grid", "// gemmery: 4 5", "// gemmery: --seed 3", "// gemmery: it's"])
def test_launches_that_are_refused(text):
    with pytest.raises(ArgumentError, match="gemmery: "):
        launches_of(text)


def test_a_size_of_shared_memory_that_is_none_is_a_fault_of_its_file(file):
    (fault,) = faults_of(file(f"// gemmery: --shared 1k --arg f32[64]\n{RACE}"))
    assert "--shared 1k" in str(fault)


def test_what_the_hook_installs():
    """A hook installs the package without extras: it names those of the extra `cuda`, and of `lab`, which that has."""
    hook = (ROOT / ".pre-commit-hooks.yaml").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.findall(r"^    - (\S+)$", hook, re.MULTILINE))
    assert named == {*extras["lab"], *extras["cuda"]} - {"gemmery[lab]"}
    action = (ROOT / ".github" / "actions" / "faults" / "action.yml").read_text()
    assert "gemmery faults --github -- " in action


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "cut.npz"])
def test_damaged_files_of_arrays_are_refused(name, tmp_path):
    np.savez(tmp_path / "whole.npz", k=np.ones(3))
    data = {"x.npy": b"", "x.npz": b"PK\3\4junk", "cut.npz": (tmp_path / "whole.npz").read_bytes()[:99]}[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ArgumentError, match="cannot be read"):
        written_arguments.argument(f"{tmp_path / name}:k")


F = "template <class T> __global__ void f(T* x) { *x = 1; }\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("inline int f() { return 1; }", r"k\.cu has no kernel \(no __global__ function\): give a file that defines"),
        (
            "#include <none/there.h>\n__global__ void f() {}\nint main() { f<<<1, 1>>>(); }",
            r"main\(\) does not run here, and each kernel is only compiled: .*none/there\.h: No such file",
        ),
        ("__global__ void f() {}\nint main() { cuQuit(); f<<<1, 1>>>(); }", "only compiled: .*cuQuit"),
        (F, r"k\.cu: f was not compiled: .* -k \"f<\.\.\.>\""),
        (
            F + "template <class scalar_t> void g(scalar_t* x) { f<scalar_t><<<1, 1>>>(x); }",
            r"f<scalar_t> was not",
        ),
    ],
)
def test_what_is_not_checked_is_said_and_is_no_fault(file, capsys, text, words):
    path = file(text)
    assert faults([path], github=True)() == 0
    note, count = capsys.readouterr().out.splitlines()
    assert note.startswith(f"::notice file={path},line=1::")
    assert re.search(words, note)
    assert count == "0 faults in 1 file"


def test_a_program_whose_kernels_are_in_a_header_runs(file, tmp_path):
    (tmp_path / "f.cuh").write_text(RACE)
    text = '#import "f.cuh"\nint main() { float* x; cudaMalloc(&x, 256); f<<<1, 64>>>(x); }'
    assert [each.line for each in faults_of(file(text))] == [0]


def test_a_file_that_includes_itself_once(file):
    text = '#pragma once\n#import "k.cu"\ntemplate <class T> __global__ void f(T* x) { *x = 1; }\n'
    assert list(faults_of(file(f"{text}void g() {{ f<int><<<1, 1>>>(nullptr); }}"))) == []
