"""Files as people have them: headers elsewhere in a project, old encodings, and what nvcc takes and NVRTC does not."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery.errors import ArgumentError, CompileError
from gemmery_emulator.kernels.kernel import emulate
from gemmery_emulator.kernels.source_kernels import kernels_of

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


def test_the_folder_of_one_header_has_the_others(tmp_path):
    for place, value in (("src", 7), ("old", 8)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "tuning.h").write_text(f"#define VALUE {value}\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / "src/first.h").write_text("")
    file = tmp_path / "tests/k.cu"
    file.parent.mkdir()
    file.write_text('#include "first.h"\n' + KERNEL.format(header="tuning.h"))
    assert value_of(file) == 7


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


def warned(file, kernel="f"):
    """The value that a kernel writes, and what its run warns of."""
    x = np.zeros(4, np.int32)
    run = emulate(file, kernel, 1, 4, [x])
    assert (x == x[0]).all()
    return int(x[0]), [str(each) for each in run.warnings]


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("#ifdef GPU", "#endif", "GPU is not defined, and counts as 1"),
        ("#if defined(GPU) && !defined(OTHER)", "#endif", "GPU is not defined"),
        ("#if WIDTH == 3", "#endif", "WIDTH is not defined, and counts as 3"),
        ("#ifndef GPU\n#else", "#endif", "GPU is not defined"),
        ("#if defined(FIRST) || defined(SECOND)", "#endif", "FIRST is not defined"),
        ("#ifdef __CUDACC__", "#endif", ""),
        ("#if CUDART_VERSION >= 11000", "#endif", ""),
        ("#ifdef OTHER\n#error\n#else", "#endif", ""),
    ],
)
def test_a_kernel_between_if_and_endif(tmp_path, before, after, says):
    file = tmp_path / "k.cu"
    file.write_text(f"{before}\n__global__ void f(int* x) {{ x[threadIdx.x] = 7; }}\n{after}\nint main() {{}}\n")
    value, warnings = warned(file)
    assert value == 7
    assert [says in each for each in warnings] == [True] * bool(says)


def test_what_if_0_leaves_out_is_no_kernel():
    assert kernels_of("#if 0\n__global__ void old() {}\n#else\n__global__ void f() {}\n#endif") == {"f": ("f",)}


def test_overloads_are_named_by_their_parameters():
    text = """#include <iostream>
    __global__ void f(int* x, int n) { x[threadIdx.x] = n; }
    __global__ void f(const int* y, int* x) { x[threadIdx.x] = 2; }
    int main() {}"""
    assert kernels_of(text)["f"] == ("f(int*, int)", "f(const int*, int*)")
    x = np.zeros(4, np.int32)
    emulate(text, "f(int*, int)", 1, 4, [x, 9])
    assert x.tolist() == [9] * 4
    emulate(text, "f(const int*, int*)", 1, 4, [x.copy(), x])
    assert x.tolist() == [2] * 4
    with pytest.raises(ArgumentError, match=r"f\(const int\*, int\*\)"):
        emulate(text, "f", 1, 4, [x, 9])


@pytest.mark.parametrize(
    "text",
    [
        # std::sqrt() of the library for devices is another function than sqrt()
        (
            "#include <complex>\nusing namespace std;\n__global__ void f(int* x) {\n"
            "  complex<float> one(1, 2);\n  x[threadIdx.x] = sqrt(25.0) + one.imag() + min(0.0f, cosf(0)); }\n"
        ),
        (
            "#include <utility>\nusing namespace std;\n__global__ void f(int* x) {\n"
            "  pair<int, int> both = make_pair(3, 4);\n  x[threadIdx.x] = both.first + both.second * fabs(-1.0); }\n"
        ),
        (
            "#include <thrust/version.h>\n#include <thrust/sort.h>\n#if THRUST_VERSION < 100500\n#error\n#endif\n"
            "__global__ void f(int* x) { x[threadIdx.x] = 7; }\n"
        ),
        (
            "#include <iostream>\nstatic const float WHOLE = 14;\nstatic const float HALF = WHOLE / 2;\n"
            "const double TABLE[2] = {0, 1};\n"
            "__global__ void f(int* x) { const float factor = TABLE[1]; x[threadIdx.x] = HALF * factor; }\n"
        ),
        (
            "#include <iostream>\n#define CODE [[nodiscard]] __device__\n#define EARLY constexpr \n"
            "struct Pair { typedef int Side; CODE static EARLY Side size() { return 2; }\n"
            "  CODE EARLY int at(Side i) const { return i + 5; } };\n"
            "__global__ void f(int* x) { Pair pair; x[threadIdx.x] = pair.at(2) * Pair::size() / 2; }\n"
        ),
        (
            "#include <iostream>\n__device__ int twice(auto x) { return 2 * x; }\n"
            "__global__ void f(int* x) { x[threadIdx.x] = twice(3) + 1; }\n"
        ),
        (
            "#include <GL/glew.h>\nstruct Light { GLfloat place[4]; GLuint buffer; };\n__constant__ Light light;\n"
            "__global__ void f(int* x) { x[threadIdx.x] = sizeof(Light) / 4 + 2 + light.buffer; }\n"
        ),
        (  # a variable of the name of what makes its value
            "#include <iostream>\nnamespace lab { __device__ int value() { return 7; } }\n"
            "void run() { std::cout << 1; }\n"
            "__global__ void f(int* x) { const int value = lab::value(); x[threadIdx.x] = value; }\n"
        ),
        (
            "#include <iostream>\n"
            "struct Base { virtual __host__ void move() = 0; __device__ int get() { return 7; } };\n"
            "template <class T> struct Array : Base { __host__\nvoid move() override { std::cout << 1; }\n"
            "  __host__ __device__ friend Array<T> operator+<>(const Array<T>& a, const Array<T>& b); };\n"
            "template <class T> Array<T> operator+(const Array<T>& a, const Array<T>&) { std::cout << 1; return a; }\n"
            "__global__ void g(Array<int> a, int* x) { x[0] = a.get(); }\n"
            "__global__ void f(int* x) { x[threadIdx.x] = ((Array<int>*)x)->get(); }\n"
        ),
        (
            "#include <iostream>\n#if !ALONE\n__global__ void g(int* x) { x[0] = 1; }\n#else\n"
            "__global__ void f(int* x) { x[threadIdx.x] = 7; }\n#endif\n"
        ),
        (  # a function of the host that a member calls, which nobody calls on the device
            "#include <iostream>\nint side(int t) { return t; }\n"
            "struct Tile { __host__ __device__ int side_of(int t) const { return side(t); } int n = 7; };\n"
            "__global__ void f(int* x) { Tile tile; x[threadIdx.x] = tile.n; }\n"
        ),
        (
            "#include <iostream>\nstruct Room { int* at; __device__ explicit Room(int n) { cudaMalloc(&at, n); }\n"
            "  __device__ ~Room() { cudaFree(at); } };\n"
            "__global__ void f(int* x) { x[threadIdx.x] = 7; if (blockDim.x > 99) { Room room(4); *x = *room.at; } }\n"
        ),
        (
            "#include <concepts>\n#include <iostream>\ntemplate <class T> requires (std::integral<T>) struct Pair {\n"
            "  [[nodiscard]] friend __device__ constexpr Pair<T> operator+(const Pair<T>& a, const Pair& b) {\n"
            "    return {a.x + b.x}; }\n  T x; };\n"
            "__global__ void f(int* x) { x[threadIdx.x] = (Pair<int>{3} + Pair<int>{4}).x; }\n"
        ),
    ],
)
@pytest.mark.many(3)
def test_what_nvcc_takes_of_the_library(tmp_path, text):
    file = tmp_path / "k.cu"
    file.write_text(f"{text}int main() {{}}\n")
    assert value_of(file) == 7


def test_a_part_of_another_file(tmp_path):
    (tmp_path / "all.cu").write_text('#define VALUE 7\n__constant__ int more;\n#include "parts/k.cu"\nint main() {}\n')
    (tmp_path / "parts").mkdir()
    file = tmp_path / "parts/k.cu"
    file.write_text("__global__ void f(int* x) { x[threadIdx.x] = VALUE + more; }\n")
    value, warnings = warned(file)
    assert value == 7
    assert len(warnings) == 1
    assert "as a part of all.cu, which includes it" in warnings[0]
    (tmp_path / "other.cu").write_text('#include "parts/k.cu"\n')  # of two files neither is taken
    with pytest.raises(CompileError, match="VALUE"):
        value_of(tmp_path / "parts/k.cu")


def test_headers_of_a_library_that_no_parser_can_cut(tmp_path):
    for folder, value in (("one", 3), ("two", 4)):  # two headers of one name, each included from beside it
        (tmp_path / "lib" / folder).mkdir(parents=True)
        (tmp_path / "lib" / folder / "common.h").write_text(f"#define {folder.upper()} {value}\n")
        (tmp_path / "lib" / folder / "all.h").write_text('#include "common.h"\n')
    file = tmp_path / "k.cu"
    file.write_text(
        "#include <one/all.h>\n#include <two/all.h>\n#include <iostream>\n"
        "__global__ void f(int* x) { x[threadIdx.x] = std::remove_extent_t<int[3]>(ONE) + TWO; }\n"
    )
    x = np.zeros(4, np.int32)
    emulate(file, "f", 1, 4, [x], options=(f"-I{tmp_path / 'lib'}",))
    assert x.tolist() == [7] * 4


def test_ptx_that_ends_with_a_zero_byte(tmp_path):  # as CuTe DSL keeps it
    text = """.version 8.0\n.target sm_80\n.address_size 64
    .visible .entry f(.param .align 8 .b8 f_param_0[8]) { .reg .b64 %a; .reg .b32 %i;
      ld.param.b64 %a, [f_param_0]; mov.u32 %i, 7; st.global.u32 [%a], %i; ret; }\n\0"""
    (tmp_path / "f.ptx").write_text(text)
    for source in (text, tmp_path / "f.ptx"):
        x = np.zeros(4, np.int32)
        emulate(source, "f", 1, 1, [(x,)])  # a tensor whose shape is known is a struct with its address
        assert x.tolist() == [7, 0, 0, 0]
