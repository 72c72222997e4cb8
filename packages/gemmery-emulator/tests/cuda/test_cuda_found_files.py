"""Files as people have them: headers elsewhere in a project, old encodings, and what nvcc takes and NVRTC does not."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery.errors import ArgumentError, CompileError
from gemmery_emulator.kernels.kernel import emulate

KERNEL = '#include "{header}"\n__global__ void f(int* x) {{ x[threadIdx.x] = VALUE; }}\nint main() {{}}\n'


@pytest.fixture(autouse=True)
def compiler():
    pytest.importorskip("cuda.bindings")


def value_of(file):
    x = np.zeros(4, np.int32)
    emulate(file, "f", 1, 4, [x])
    assert (x == x[0]).all()
    return int(x[0])


@pytest.mark.parametrize("header", ["tuning.h", "core/tuning.h", "../../far/core/tuning.h"])
def test_a_header_elsewhere_in_the_project(tmp_path, header):
    (tmp_path / ".git").mkdir()
    for folder in ("far/away/core", "src/deep", ".hidden/core"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "far/away/core/tuning.h").write_text('#include "more.h"\n#define VALUE (3 + MORE)\n')
    (tmp_path / "far/away/core/more.h").write_text("#define MORE 4\n")
    (tmp_path / ".hidden/core/tuning.h").write_text("#define VALUE 9\n")
    file = tmp_path / "src/deep/k.cu"
    file.write_text(KERNEL.format(header=header))
    if ".." in header:  # another path is another file
        with pytest.raises(CompileError, match="VALUE"):
            value_of(file)
    else:
        assert value_of(file) == 7


def test_of_two_headers_neither_is_taken(tmp_path):
    (tmp_path / ".git").mkdir()
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tuning.h").write_text(f"#define VALUE {value}\n")
    (tmp_path / "src").mkdir()
    file = tmp_path / "src/k.cu"
    file.write_text(KERNEL.format(header="tuning.h"))
    with pytest.raises(CompileError, match=r"not here, and empty: tuning\.h"):
        value_of(file)


def test_without_a_project_nothing_else_is_searched(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tuning.h").write_text("#define VALUE 1\n")
    (tmp_path / "src").mkdir()
    file = tmp_path / "src/k.cu"
    file.write_text(KERNEL.format(header="tuning.h"))
    with pytest.raises(CompileError, match="VALUE"):
        value_of(file)


def test_old_encodings_and_a_last_backslash(tmp_path):
    file = tmp_path / "k.cu"
    file.write_bytes(
        b"// caf\xe9\n#define VALUE \\\n  5\n__global__ void f(int* x) { x[threadIdx.x] = VALUE; } // \\\n"
    )
    assert value_of(file) == 5
    (tmp_path / "tuning.h").write_bytes(b"#define VALUE 6\n#define OTHER \\\n   1 \\\n")
    file.write_text(KERNEL.format(header="tuning.h"))
    assert value_of(file) == 6
    file.write_bytes("__global__ void f(int* x) { x[threadIdx.x] = 8; }".encode("utf-16"))
    assert value_of(file) == 8
    for data in (b"{\0\1\2", b"\xff\xfe{"):
        file.write_bytes(data)
        with pytest.raises(ArgumentError, match="is not text"):
            value_of(file)


@pytest.mark.parametrize(
    "text",
    [
        "__global__ void f(int* x) { register int value = 7; x[threadIdx.x] = value; } int main() {}",
        (
            "#include <gtest/gtest.h>\nusing namespace testing::internal;\nusing namespace absent;\n"
            "__global__ void f(int* x) { x[threadIdx.x] = 7; }"
        ),
        (
            "struct Base { virtual int value() = 0; virtual void free() = 0; };\n"
            "struct Seven : Base { __device__ int value() { return 7; } void free() { cudaFree(this); } };\n"
            "__global__ void f(int* x) { Seven seven; x[threadIdx.x] = seven.value(); } int main() {}"
        ),
    ],
)
def test_what_nvcc_takes(tmp_path, text):
    file = tmp_path / "k.cu"
    file.write_text(text)
    assert value_of(file) == 7
