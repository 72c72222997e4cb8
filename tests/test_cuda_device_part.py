"""Whole programs: what is device code, what is left out of them, and what nvcc declares without an include."""

import json
from pathlib import Path

import numpy as np
import pytest

import gemmery as gm
from gemmery.cuda.declarations import Split, blanked, device_words
from gemmery.cuda.kernel_names import kernels_of

PROGRAM = """#include <iostream>
#include <vector>
#include "missing_helper.h"
#define CHECK(call) do { auto status = call; if (status) std::cerr << "}" << status; } while (0)
namespace config { constexpr int width = 32; /* } */ }
template <typename T> struct Pair {
  T first, second;
  __device__ T sum() const { return first + second; }
  FILE* file() const { return fopen("{", "r"); }
};
static std::vector<float> host_data;
const char* banner = R"(not code: { " )";
inline int rounded(int n) { return (n + config::width - 1) / config::width; }
__device__ float twice(float x) { return 2 * x; }
extern "C" __global__ void __launch_bounds__(64) twice_of(const float* x, float* y, uint n) {
  uint i = blockIdx.x * blockDim.x + threadIdx.x;
  Pair<float> pair{twice(x[i]), INFINITY};
  if (i < n) y[i] = std::min(pair.sum(), float(std::sqrt(4)) * pair.first) + rounded(1) - 1;
}
template <typename T, int N = (4 > 3)> __global__ void scaled(T* x) { x[threadIdx.x] *= N; }
void launch(float* x) { CHECK(cudaMalloc(&x, 4)); twice_of<<<1, 64>>>(x, x, 64); scaled<float, 3><<<1, 1>>>(x); }
int main(int argc, char** argv) {
  for (auto& value : host_data) std::cout << value << '}' << std::endl;
}
"""


@pytest.fixture(autouse=True)
def compiler():
    pytest.importorskip("cuda.bindings")


def test_a_whole_program_runs_and_says_what_was_left_out():
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    run = gm.emulate(PROGRAM, "twice_of", 1, 64, [x, y, 64])
    np.testing.assert_array_equal(y, 4 * x)
    assert run.left_out == ("host_data (line 11)", "banner (line 12)", "launch() (line 21)", "main() (line 22)")
    assert run.lines["kernel.cu:17"].global_.stores.requests == 0
    assert run.lines["kernel.cu:18"].global_.stores.requests == 2
    assert "main() (line 22)" in str(run)


def test_an_instance_of_a_template_of_a_program():
    x = np.ones(32, np.float32)
    gm.emulate(PROGRAM, "scaled<float, 5>", 1, 32, [x])
    assert (x == 5).all()
    assert kernels_of(PROGRAM) == {"twice_of": ("twice_of",), "scaled": ("scaled<float, 3>",)}


def test_the_declarations_of_a_program():
    split = Split(PROGRAM)
    marks = device_words(split.macros)
    titles = {each.title: bool(each.head & marks) for each in split.declarations}
    assert titles == {
        "width": False, "struct Pair": False, "host_data": False, "banner": False, "rounded()": False,
        "twice()": True, "twice_of()": True, "scaled()": True, "launch()": False, "main()": False,
    }  # fmt: skip
    whole = blanked(PROGRAM, [(each.start, each.stop) for each in split.declarations], split.directives)
    assert whole.count("\n") == PROGRAM.count("\n")
    assert [line.split()[0] for line in whole.splitlines() if line.strip() and line[0] == "#"] == ["#include"] * 3 + [
        "#define"
    ]


@pytest.mark.parametrize(
    ("code", "titles"),
    [
        ("#define KERNEL(n) __global__ void n(float* x) {}\nKERNEL(a)\nKERNEL(b)\nint c;", ["KERNEL()"] * 2 + ["c"]),
        ("enum Kind { A, B = 2 }; typedef struct { int x; } Point;", ["enum Kind", "Point"]),
        ("int a[2] = {1, 2}, b; auto f = [](int x) { return x; };", ["a", "f"]),
        ("S operator+(S a, S b) { return a; } bool operator==(S a, S b) { return 1; }", ["operator()"] * 2),
        ("template <> struct T<float> { enum { v }; }; template <class U> U g(U x) { return x; }", ["struct T", "g()"]),
        ("A::A(int x) : b{x}, c(1) {} int d = 1'000; char e = '\"';", ["A()", "d", "e"]),
    ],
)
def test_where_a_declaration_ends(code, titles):
    assert [each.title for each in Split(code).declarations] == titles


def test_what_nvcc_declares_without_an_include():
    code = """#include <cfloat>
    __global__ void f(double* x) {
      uint8_t a = 255; ushort b = 3; int64_t c = INT_MAX;
      x[0] = sqrt(9) + pow(2, 3) + a + b; x[1] = c; x[2] = FLT_MAX; x[3] = M_PI; x[4] = NAN;
      x[5] = std::max(3, 4) + std::floor(2.5) + std::pow(x[0], 0) + std::abs(-2.0);
    }"""
    x = np.zeros(6)
    gm.emulate(code, "f", 1, 1, [x])
    expected = [269, 2**31 - 1, float(np.finfo(np.float32).max), np.pi, np.nan, 9]
    np.testing.assert_array_equal(x, expected)


def test_an_error_is_that_of_what_the_kernel_needs():
    code = """#include <iostream>
    __device__ float deep(float x) { return missing + x; }
    __global__ void f(float* x) { x[0] = deep(2); }
    int main() { std::cout << 1; }"""
    with pytest.raises(gm.CompileError, match=r'kernel.cu\(2\): error: identifier "missing" is undefined'):
        gm.emulate(code, "f", 1, 1, [np.zeros(1, np.float32)])


def test_headers_of_a_project_are_split_too(tmp_path):
    (tmp_path / "common").mkdir()
    header = "#include <fstream>\nstd::ofstream log_file;\n__device__ inline float half_of(float x) { return x / 2; }\n"
    (tmp_path / "common" / "math_tools.h").write_text(header)
    source = tmp_path / "kernels" / "own.cu"
    source.parent.mkdir()
    source.write_text(
        '#include "math_tools.h"\n__global__ void f(float* x) { *x = half_of(*x); }\nint main() { log_file; }'
    )
    x = np.ones(1, np.float32)
    run = gm.emulate(source, "f", 1, 1, [x])
    assert x[0] == 0.5
    assert run.left_out == ("main() (line 3)",)


def test_public_kernels_compile_as_they_are():
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "public_kernels.json"
    listed = json.loads(path.read_text())
    rows = listed["rows"]
    assert len(rows) == listed["files"] >= 300
    assert sum(row["compiled"] for row in rows) == listed["compiled"] >= 0.85 * len(rows)
    assert sum(len(row["understood"]) for row in rows) == listed["understood"]
    assert listed["understood"] >= 0.97 * (listed["understood"] + listed["refused"])


def test_public_kernels_compute_what_they_should():
    """Or are refused in words, or the record says what is wrong in the kernel: a finding is never left unexplained."""
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "public_results.json"
    listed = json.loads(path.read_text())
    rows = listed["rows"]
    assert len(rows) == listed["cases"] >= 200
    assert len({(row["path"], row["kernel"]) for row in rows}) == len(rows)
    for row in rows:
        assert row["result"] in ("right", "refused", "fault of the kernel")
        assert row.get("words") if row["result"] == "refused" else row["error"] <= 1 or row["fault"]
        assert not row.get("findings") or row["fault"]


def test_what_a_macro_needs_is_needed():
    code = """#include <iostream>
    __device__ float following(float x) { return x + 1; }
    #define NEXT(x) following(x)
    __global__ void f(float* x) { *x = NEXT(*x); }
    int main() { std::cout << 1; }"""
    x = np.ones(1, np.float32)
    gm.emulate(code, "f", 1, 1, [x])
    assert x[0] == 2


def test_headers_of_a_library_for_host_code_are_left_out():
    code = """#include <thrust/sort.h>
    #include <cufft.h>
    __global__ void f(cufftComplex* x) { x->y += x->x; }
    int main() { thrust::sort(nullptr, nullptr); }"""
    x = np.ones(2, np.float32)
    gm.emulate(code, "f", 1, 1, [x])
    assert x.tolist() == [1, 2]
