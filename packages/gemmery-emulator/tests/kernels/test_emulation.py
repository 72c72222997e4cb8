"""gm.emulate: how a kernel is named, what is not modeled, what a run tells."""

import doctest
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import gemmery as gm
from gemmery.cuda import nvrtc
from gemmery.cuda.include import folders as include_folders
from gemmery_emulator.kernels import kernel as lab_kernel
from gemmery_emulator.kernels import programs

pytestmark = pytest.mark.sampled(3)

X = np.ones(64, np.float32)


# ---- names and sources ----

SEVERAL = """
template <class T, int N> __global__ void fill(T* x) { x[threadIdx.x] = N; }
namespace inner { __global__ void fill(float* x) { x[threadIdx.x] = 5; } }
extern "C" __global__ void plain(float* x) { x[threadIdx.x] = 6; }
__global__ void over(float* x) { x[threadIdx.x] = VALUE; }
__global__ void over(int* x) { x[threadIdx.x] = 8; }
"""


@pytest.mark.parametrize(
    ("name", "value"), [("fill<float, 4>", 4), ("inner::fill", 5), ("plain", 6), ("_Z4overPf", 7), ("over(int*)", 8)]
)
def test_a_kernel_by_its_name(name, value):
    x = np.zeros(32, np.int32 if name == "over(int*)" else np.float32)
    run = gm.emulate(SEVERAL, name, 1, 32, [x], options=("-DVALUE=7",))
    assert (x == value).all()
    assert run.kernel == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "nowhere",
            r"kernel='nowhere': .* has the kernels fill, inner::fill, plain, over\(float\*\), over\(int\*\); name one",
        ),
        ("fill", r"kernel='fill': kernel\.cu has fill, inner::fill; name one of them"),
        ("over", r"kernel='over': kernel\.cu has over\(float\*\), over\(int\*\); name one of them"),
    ],
)
def test_a_kernel_that_is_not_there(name, words):
    with pytest.raises((gm.ArgumentError, gm.CompileError), match=words) as caught:
        gm.emulate(SEVERAL, name, 1, 32, [X], options=("-DVALUE=7",))
    assert "name_map" not in str(caught.value)
    assert "mangled" not in str(caught.value)
    with pytest.raises(gm.ArgumentError, match=r"kernel '_Z4overPd': this PTX has .*_Z4overPf"):
        gm.emulate(SEVERAL, "_Z4overPd", 1, 32, [X], options=("-DVALUE=7",))


SHORT = """
namespace lab { namespace inner { __global__ void add(float* x) { x[threadIdx.x] += 5; } }
template <class T> __global__ void scale(T* x) { x[threadIdx.x] *= 2; } }
namespace { template <int N> __global__ void fill(float* x) { x[threadIdx.x] = N; } }
extern "C" { __global__ void plain(float* x) { x[threadIdx.x] = 6; } }
inline namespace v1 { __global__ void last(float* x) { x[threadIdx.x] = 8; } }
void run(float* x) { lab::scale<float><<<1, 32>>>(x); fill<3><<<1, 32>>>(x); fill<4><<<1, 32>>>(x); }
"""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("add", 6),
        ("inner::add", 6),
        ("scale", 2),
        ("lab::scale", 2),
        ("scale<float>", 2),
        ("fill<4>", 4),
        ("plain", 6),
        ("last", 8),
    ],
)
def test_a_kernel_without_its_namespace_or_its_only_arguments(name, value):
    x = np.ones(32, np.float32)
    assert gm.emulate(SHORT, name, 1, 32, [x]).kernel == name
    assert (x == value).all()


def test_a_short_name_of_several_instances_is_refused():
    with pytest.raises(gm.ArgumentError, match=r"kernel='fill': kernel\.cu has fill<3>, fill<4>; name one of them"):
        gm.emulate(SHORT, "fill", 1, 32, [X])


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC has __int128 on Linux alone")
def test_integers_of_128_bits():
    code = """extern "C" __global__ void f(long long* x) {
      __int128 product = (__int128)x[threadIdx.x] * x[threadIdx.x];
      x[threadIdx.x] = product >> 64;
    }"""
    x = np.array([3, 1 << 40, -(1 << 62), (1 << 63) - 1], np.int64)
    expected = [value * value >> 64 for value in x.tolist()]
    gm.emulate(code, "f", 1, 4, [x])
    assert x.tolist() == expected


def test_an_error_of_the_compiler_is_its_own_words_alone():
    code = "__global__ void f(float* x) { int unused; x[0] = missing; }"
    with pytest.raises(gm.CompileError, match=r'kernel.cu\(1\): error: identifier "missing" is undefined') as caught:
        gm.emulate(code, "f", 1, 1, [X])
    assert "warning" not in str(caught.value)


def test_a_kernel_that_needs_host_code_is_refused_with_the_way_out():
    code = "#include <iostream>\n__global__ void f(float* x) { std::cout << *x; }\nint main() { std::cout << 1; }"
    with pytest.raises(gm.CompileError, match=r'no member "cout"(.|\n)*under #ifndef __CUDACC_RTC__, or pass nvcc'):
        gm.emulate(code, "f", 1, 1, [X])


def test_headers_of_the_library_that_device_code_has_too():
    code = """#include <float.h>
    #include <climits>
    #include <cstring>
    __global__ void f(float* x) { x[0] = FLT_MAX; x[1] = INT_MAX; memcpy(x + 2, x, 4); }"""
    x = np.zeros(3, np.float32)
    gm.emulate(code, "f", 1, 1, [x])
    assert x.tolist() == [np.finfo(np.float32).max, 2.0**31, np.finfo(np.float32).max]


def test_a_file_and_what_it_includes_beside_it(tmp_path):
    (tmp_path / "value.h").write_text("#define VALUE 3\n")
    source = tmp_path / "own.cu"
    source.write_text('#include "value.h"\n__global__ void f(float* x) {\n  x[threadIdx.x] = VALUE;\n}\n')
    x = np.zeros(32, np.float32)
    run = gm.emulate(source, "f", 1, 32, [x])
    assert (x == 3).all()
    assert [str(line) for line, counts in run.lines.items() if counts.global_.stores.requests] == ["own.cu:3"]
    (tmp_path / "value.h").write_text("#define VALUE 4\n")
    gm.emulate(source, "f", 1, 32, [x])
    assert (x == 4).all()


@pytest.mark.parametrize("header", ["types.cuh", "ptx.cuh"])
def test_a_header_of_the_user_keeps_its_lines_whatever_its_name(tmp_path, header):
    """types.cuh and ptx.cuh are lines of single instructions in this project's kernels alone."""
    (tmp_path / header).write_text("__device__ void put(float* x, int i) {\n  x[i] = 1;\n}\n")
    source = tmp_path / "mine.cu"
    source.write_text(f'#include "{header}"\n__global__ void f(float* x) {{\n  put(x, threadIdx.x + 1);\n}}\n')
    (one,) = gm.emulate(source, "f", 1, 32, [np.zeros(32, np.float32)]).findings
    assert (str(one.line), str(one.inner)) == ("mine.cu:3", f"{header}:2")


# ---- what is compiled and read again ----


@pytest.fixture
def work(monkeypatch):
    """How often NVRTC and the reader of PTX are asked, from empty caches."""
    asked = {"compile": 0, "parse": 0}
    programs.parsed.cache_clear()
    programs.prepared.cache_clear()
    lab_kernel._compiled.cache_clear()
    for module, name, kind in ((nvrtc, "compiled", "compile"), (programs, "parse", "parse")):
        work = getattr(module, name)

        def counting(*args, work=work, kind=kind, **options):
            asked[kind] += 1
            return work(*args, **options)

        monkeypatch.setattr(module, name, counting)
    return asked


def test_the_functions_of_a_source_are_compiled_together_and_read_once(work, tmp_path, monkeypatch):
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    for name in ("plain", "inner::fill", "_Z4overPf", "plain"):
        gm.emulate(SEVERAL, name, 1, 32, [np.zeros(32, np.float32)], options=("-DVALUE=7",))
    assert work == {"compile": 1, "parse": 1}
    for _ in range(2):
        gm.emulate(SEVERAL, "fill<float, 4>", 1, 32, [np.zeros(32, np.float32)], options=("-DVALUE=7",))
    assert work == {"compile": 2, "parse": 2}


@pytest.mark.parametrize(
    "include", ["#include <cuda_fp16.h>", "#include<cuda_fp16.h>", "  #  include   <cuda_fp16.h> // x"]
)
def test_a_source_with_headers_of_the_toolkit_is_compiled_once(work, tmp_path, monkeypatch, include):
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    include_folders.cache_clear()
    code = f"{include}\n__global__ void f(__half* x) {{ x[threadIdx.x] = __float2half(3.f); }}"
    for _ in range(2):
        x = np.zeros(4, np.float16)
        gm.emulate(code, "f", 1, 4, [x])
        assert (x == 3).all()
    include_folders.cache_clear()
    assert work == {"compile": 1, "parse": 1}


def test_headers_of_the_user_are_read_each_time_however_they_are_included(tmp_path):
    (tmp_path / "deep").mkdir()
    header = tmp_path / "deep" / "value.h"
    source = tmp_path / "own.cu"
    body = "__global__ void f(float* x) { x[0] = VALUE; }"
    ways = {
        "#include <deep/value.h>": (),
        "# include<value.h>": (f"-I{tmp_path / 'deep'}",),
        "#include  <value.h>": (f"--include-path={tmp_path / 'deep'}",),
        '#define WHICH "deep/value.h"\n#include WHICH': (),
        "": (f"--pre-include={header}",),
    }
    for include, options in ways.items():
        source.write_text(f"{include}\n{body}\n")
        for value in (3, 4):
            header.write_text(f"#define VALUE {value}\n")
            x = np.zeros(1, np.float32)
            gm.emulate(source, "f", 1, 1, [x], options=options)
            assert x[0] == value, include


def test_a_source_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "bytes.cu").write_bytes(b"\xff\xfe{")
    for path, words in (
        (Path("/nonexistent.cu"), "source='/nonexistent.cu' cannot be read .No such file or directory."),
        (tmp_path, "cannot be read .Is a directory."),
        (tmp_path / "bytes.cu", "is not text"),
    ):
        with pytest.raises(gm.ArgumentError, match=words):
            gm.emulate(path, "f", 1, 1, [X])


# ---- what is not modeled ----


REFUSED = {
    'int a; asm volatile("mov.u32 %0, %%smid;" : "=r"(a)); z[0] = a;': "special register %smid of .*kernel.cu:1",
    'int a = 1; asm volatile("vabsdiff4.u32.u32.u32.add %0, %0, %0, %0;" : "+r"(a)); z[0] = a;': (
        r"instruction 'vabsdiff4.*kernel.cu:1\) is not modeled: put plain C.. in its place"
    ),
    "z[0] = other(z[0]);": r"a call of other \(kernel.cu:1\) is not modeled: .*-DEMULATED",
    "z[0] = tex3D<float>((cudaTextureObject_t)z[0], 0, 0, 3);": r"instruction 'tex.3d.*kernel.cu:1\) is not modeled",
    "z[0] = down(z[0]);": r"down\(int\) is called at depth 1025 by thread 0 of block 0 \(kernel.cu:1\)",
}
BEFORE = {
    "other": 'extern "C" __device__ int other(int); ',
    "down": "__device__ __noinline__ int down(int n) { return n % 3 + down(n - 1) * n; } ",
}


@pytest.mark.parametrize("statement", REFUSED)
def test_what_is_not_modeled_is_an_error_with_its_line(statement):
    before = next((text for name, text in BEFORE.items() if name in statement), "")
    z = np.full(1, 7, np.int64)
    with pytest.raises(gm.EmulationError, match=REFUSED[statement]):
        gm.emulate(f"{before}__global__ void f(long long* z) {{ {statement} }}", "f", 1, 1, [z])
    assert z[0] == 7


def test_a_trap_and_an_assertion_are_findings():
    code = """#include <cassert>
    __global__ void f(int* x) {
      assert(x[threadIdx.x] < 40);
      x[threadIdx.x] = -1;
      if (threadIdx.x == 3) __trap();
    }"""
    x = np.arange(64, dtype=np.int32)
    run = gm.emulate(code, "f", 1, 64, [x])
    assert [(one.line.number, one.count) for one in run.findings] == [(3, 24), (5, 1)]
    assert "thread 40 of block 0 fails an assert()" in str(run.findings[0])
    assert "thread 3 of block 0 traps" in str(run.findings[1])
    assert (x == np.where(np.arange(64) < 40, -1, np.arange(64))).all()
    assert gm.emulate(code, "f", 1, 3, [np.zeros(3, np.int32)]).findings == ()


# ---- what a run tells ----

TRANSPOSE = """
__global__ void transpose(const float* x, float* y) {
  __shared__ float tile[32][32 + PAD];
  tile[threadIdx.y][threadIdx.x] = x[threadIdx.y * 32 + threadIdx.x];
  __syncthreads();
  y[threadIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}"""


def transposed(pad, **options):
    x = np.arange(1024, dtype=np.float32).reshape(32, 32)
    y = np.zeros_like(x)
    run = gm.emulate(TRANSPOSE, "transpose", 1, (32, 32), [x, y], options=(f"-DPAD={pad}",), **options)
    np.testing.assert_array_equal(y, x.T)
    return run


def test_bank_conflicts_of_a_transpose():
    """32 lanes read one column: 32 passes for each of 32 warps, 31 of them conflicts; a column more, and none."""
    assert transposed(1).shared.bank_conflicts == 0
    shared = transposed(0).shared
    assert (shared.loads.wavefronts, shared.loads.wavefronts_ideal, shared.loads.bank_conflicts) == (1024, 32, 992)
    assert (shared.stores.wavefronts, shared.stores.bank_conflicts) == (32, 0)
    assert shared.bank_conflicts == 992


def test_a_run_in_words():
    run = transposed(0)
    assert repr(run) == "<Run of transpose: 992 bank conflicts, 0 findings>"
    said = str(run)
    assert "transpose: grid 1 x 1 x 1, block 32 x 32 x 1" in said
    assert re.search(r"^global loads +32 +128 +4,096$", said, re.MULTILINE)
    assert re.search(r"^shared loads +32 +1,024 +32 +992$", said, re.MULTILINE)
    assert "kernel.cu:6: 992 bank conflicts" in said
    assert said.endswith("no findings")
    assert len(said.splitlines()) <= 12
    code = TRANSPOSE.replace("__syncthreads();", "")
    args = [np.arange(1024, dtype=np.float32), np.zeros(1024, np.float32)]
    broken = gm.emulate(code, "transpose", 1, (32, 32), args, options=("-DPAD=1",))
    assert "race" in str(broken)
    assert "1 finding>" in repr(broken)


def test_any_order_of_blocks_and_warps_gives_the_same():
    for seed in range(3):
        assert transposed(1, seed=seed).findings == ()


def test_merged_and_as_written():
    code = """__global__ void f(float* x) {
      __shared__ float s[64];
      float* own = s + 2 * threadIdx.x;
      own[0] = x[0];
      own[1] = x[1];
      x[threadIdx.x] = own[0] + own[1]; }"""
    counts = {
        merge: gm.emulate(code, "f", 1, 32, [np.zeros(32, np.float32)], merge=merge).shared for merge in (True, False)
    }
    assert (counts[False].stores.requests, counts[True].stores.requests) == (2, 1)
    assert (counts[False].bank_conflicts, counts[True].bank_conflicts) == (2, 0)  # every second bank, then all


def test_the_examples_of_the_document():
    """docs/emulator.md is right in what it shows, line by line."""
    path = Path(__file__).parents[4] / "docs" / "emulator.md"
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testfile(str(path), module_relative=False, optionflags=options)
    assert (failed, tried > 15) == (0, True)
