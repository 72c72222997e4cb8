"""Whole programs on the emulator: main() with allocations, copies, launches, cuBLAS, faults of the host, refusals."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from gemmery.errors import ArgumentError, CompileError, EmulationError, InstallError
from gemmery_emulator.kernels import host_part, host_runtime
from gemmery_emulator.kernels.command import emulate
from gemmery_emulator.kernels.device_heap import DeviceHeap
from gemmery_emulator.kernels.host_part import host_texts
from gemmery_emulator.kernels.source_kernels import kernels_of
from gemmery_emulator.kernels.source_program import program_of

pytestmark = [
    pytest.mark.sampled(3),
    pytest.mark.compiler,
    pytest.mark.skipif(not any(map(host_part.shutil.which, host_part.COMPILERS)), reason="there is no C++ compiler"),
]
SHORT = "#include <cstdio>\n#include <cuda_runtime.h>\n"  # compiled in a third of the time
HEAD = """
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <cuda_runtime.h>
#define CHECK(x) { cudaError_t e = (x); if (e) { printf("%s at %d\\n", cudaGetErrorString(e), __LINE__); exit(7); } }
"""


def run(body, *words, capfd=None, **options):
    """Run a program; returns its run and what it printed."""
    program = host_runtime.run_program(f"{HEAD}{body}", words, **options)
    return program, capfd.readouterr().out if capfd else ""


def test_a_program(capfd):
    program, out = run(
        """
        __constant__ float factor[2];
        __device__ int calls = 5;
        __device__ float twice(float x) { return 2 * x; }
        template <typename T, int N> __global__ void scale(T* x, int n) {
          int i = blockIdx.x * blockDim.x + threadIdx.x;
          if (i < n) x[i] = twice(x[i]) * N * factor[0];
          if (i == 0) printf("call %d\\n", ++calls);
        }
        namespace lab { __global__ void add(const float* a, const float* b, float* c, int n) {
          int i = blockIdx.x * blockDim.x + threadIdx.x;
          if (i < n) c[i] = a[i] + b[i];
        } }
        int main(int argc, char** argv) {
          const int n = atoi(argv[1]);
          std::vector<float> a(n), b(n), c(n);
          for (int i = 0; i < n; i++) a[i] = i, b[i] = 2 * i;
          float *d_a, *d_b, *d_c;
          CHECK(cudaMalloc(&d_a, n * sizeof(float)));
          CHECK(cudaMalloc((void**)&d_b, n * sizeof(float)));
          CHECK(cudaMalloc(&d_c, n * sizeof(float)));
          CHECK(cudaMemcpy(d_a, a.data(), n * sizeof(float), cudaMemcpyHostToDevice));
          cudaStream_t stream;
          cudaStreamCreate(&stream);
          CHECK(cudaMemcpyAsync(d_b, b.data(), n * sizeof(float), cudaMemcpyHostToDevice, stream));
          float f[2] = {0.5f, 1};
          CHECK(cudaMemcpyToSymbol(factor, f, sizeof f));
          dim3 block(256), grid((n + block.x - 1) / block.x);
          lab::add<<<grid, block, 0, stream>>>(d_a, d_b, d_c, n);
          printf("host\\n");
          scale<float, 3><<<grid, block>>>(d_c, n);
          scale<float, 1>
              <<<(n + 255) / 256, 256>>>(d_c, n);
          CHECK(cudaDeviceSynchronize());
          CHECK(cudaMemcpy(c.data(), d_c, n * sizeof(float), cudaMemcpyDeviceToHost));
          int count;
          CHECK(cudaMemcpyFromSymbol(&count, calls, sizeof count));
          for (int i = 0; i < n; i++) if (c[i] != 9 * i) return 3;
          printf("%s %d\\n", argv[0], count);
        }""",
        "1000",
        capfd=capfd,
    )
    assert out == "host\ncall 6\ncall 7\nkernel.cu 7\n"
    assert (program.status, program.notes) == (0, ())
    assert program.launches == {"lab::add": 1, "scale<float, 3>": 1, "scale<float, 1>": 1}
    assert [each.findings for each in program.runs] == [()] * 3
    assert program.runs[0].flops == 1000


@pytest.mark.parametrize(
    ("body", "words", "status"),
    [
        ("float* p; cudaMalloc(&p, 64); k<<<1, 2048>>>(p); CHECK(cudaGetLastError());", "2048 threads|exceeds", 7),
        ("float* p; cudaMalloc(&p, 64); k<<<0, 32>>>(p); return cudaGetLastError();", "no side may be 0", 9),
        ("float x[4], *p; cudaMalloc(&p, 8); CHECK(cudaMemcpy(p, x, 16, cudaMemcpyHostToDevice));", "8 bytes of p", 7),
        ("float x[4], *p; cudaMalloc(&p, 16); CHECK(cudaMemcpy(p, x, 16, cudaMemcpyDeviceToHost));",
         "device to host, but to the device's", 7),
        ("float* p; cudaMalloc(&p, 16); cudaFree(p); return cudaFree(p);", "free already", 1),
        ("float* p; cudaMalloc(&p, 16); p[1] = 3;", r"device memory \(p \(line 7\)\): copy it", 139),
        ("int none = 0; int* p = &none; return 4 / *p;", "division of a whole number by zero", 136),
        ("abort();", r"ended by abort\(\)", 134),
        ("std::vector<int> x; return x.at(1);", r"ended by abort\(\)", 134),
        ("volatile char x[64 << 20]; x[0] = 1; return x[0];", "its stack was full", 139),
        ("static int (*f)(int) = [](int n) { volatile char x[4096]; x[n & 1] = 1; return f(n + 1) + x[0]; }; f(0);",
         "its stack was full", 139),
        ("int* p = 0; cudaError_t e = cudaMalloc(&p, 1ull << 60); return e;", "", 2),
    ],
)  # fmt: skip
def test_faults_of_the_host(body, words, status):
    program, _ = run(f"__global__ void k(float* x) {{ x[threadIdx.x] = 1; }} int main() {{ {body} }}")
    assert program.status == status
    assert len(program.notes) == bool(words)
    assert all(re.search(words, note) for note in program.notes), program.notes


def test_a_finding_names_the_allocation():
    program, _ = run("""__global__ void k(float* x) { x[threadIdx.x] = 1; }
    int main() { float *first, *second; cudaMalloc(&first, 4 * 32); cudaMalloc(&second, 64); k<<<1, 32>>>(first);
      k<<<1, 32>>>(second); }""")
    (finding,) = program.runs[0].findings
    assert finding.kind == "out of bounds"
    assert "of second (line 8)" in str(finding)
    assert program.launches == {"k": 2}


def test_managed_memory_with_pointers_in_it(capfd):
    program, out = run(
        """
        struct Node { int value; Node* next; };
        __global__ void total(Node* first, int* sum) { for (Node* n = first; n; n = n->next) *sum += n->value++; }
        int main() {
          Node* nodes; int* sum;
          CHECK(cudaMallocManaged(&nodes, 5 * sizeof(Node)));
          CHECK(cudaMallocManaged((void**)&sum, sizeof(int)));
          for (int i = 0; i < 5; i++) nodes[i] = {i + 1, i < 4 ? nodes + i + 1 : nullptr};
          *sum = 100;
          total<<<1, 1>>>(nodes, sum);
          CHECK(cudaDeviceSynchronize());
          for (Node* n = nodes; n; n = n->next) printf("%d ", n->value);
          printf("%d\\n", *sum);
          CHECK(cudaFree(nodes));
        }""",
        capfd=capfd,
    )
    assert out == "2 3 4 5 6 115\n"
    assert program.runs[0].findings == ()


def test_structs_halves_and_calls_by_address(capfd):
    _, out = run(
        """
        #include <cuda_fp16.h>
        struct Shape { char kind; double size; int3 sides; };
        __global__ void fill(__half* x, Shape shape, unsigned char step = 2) {
          x[threadIdx.x] = __float2half(shape.size * shape.sides.z + step * threadIdx.x);
        }
        template <class K> void start(K kernel, __half* x, Shape shape) { kernel<<<1, 4>>>(x, shape, 1); }
        int main() {
          __half x[4], *d;
          cudaMalloc(&d, sizeof x);
          Shape shape = {'a', 0.25, make_int3(1, 2, 3)};
          start(fill, d, shape);
          cudaMemcpy(x, d, sizeof x, cudaMemcpyDefault);
          printf("%g %g\\n", float(x[0]), __half2float(x[3]));
          unsigned char step = 4;
          void* args[] = {&d, &shape, &step};
          CHECK(cudaLaunchKernel((void*)fill, dim3(1), dim3(4), args, 0, 0));
          cudaMemcpy(x, d, sizeof x, cudaMemcpyDeviceToHost);
          printf("%g\\n", float(x[3]));
        }""",
        capfd=capfd,
    )
    assert out == "0.75 3.75\n12.75\n"


@pytest.mark.parametrize("letter", ["S", "D"])
def test_cublas(letter, capfd):
    rng = np.random.default_rng(0)
    m, n, k = 5, 4, 3
    a, b, c = rng.integers(-4, 4, (m, k)), rng.integers(-4, 4, (n, k)), rng.integers(-4, 4, (m, n))
    listed = [", ".join(map(str, x.T.ravel())) for x in (a, b, c)]
    kind = {"S": "float", "D": "double"}[letter]
    program, out = run(
        f"""
        #include <cublas_v2.h>
        int main() {{
          typedef {kind} T;
          T a[] = {{ {listed[0]} }}, b[] = {{ {listed[1]} }}, c[] = {{ {listed[2]} }}, dot, alpha = 2, beta = -1;
          T *d_a, *d_b, *d_c;
          cudaMalloc(&d_a, sizeof a); cudaMalloc(&d_b, sizeof b); cudaMalloc(&d_c, sizeof c);
          cublasHandle_t handle;
          cublasCreate(&handle);
          cublasSetMatrix({m}, {k}, sizeof(T), a, {m}, d_a, {m});
          cublasSetMatrix({n}, {k}, sizeof(T), b, {n}, d_b, {n});
          cudaMemcpy(d_c, c, sizeof c, cudaMemcpyHostToDevice);
          if (cublas{letter}gemm(handle, CUBLAS_OP_N, CUBLAS_OP_T, {m}, {n}, {k}, &alpha, d_a, {m}, d_b, {n}, &beta,
                                 d_c, {m})) return 1;
          cublas{letter}gemv(handle, CUBLAS_OP_T, {m}, {k}, &alpha, d_a, {m}, d_c, 1, &beta, d_b, 2);
          cublas{letter}dot(handle, {m}, d_a, 1, d_c, 1, &dot);
          cudaMemcpy(c, d_c, sizeof c, cudaMemcpyDeviceToHost);
          cudaMemcpy(b, d_b, sizeof b, cudaMemcpyDeviceToHost);
          for (T x : c) printf("%g ", x);
          for (T x : b) printf("%g ", x);
          printf("%g", dot);
          cublasDestroy(handle);
        }}""",
        capfd=capfd,
    )
    assert program.status == 0
    expected = 2 * a @ b.T - c
    flat = b.T.ravel().copy()
    flat[: 2 * k : 2] = 2 * a.T @ expected[:, 0] - flat[: 2 * k : 2]
    assert [int(word) for word in out.split()] == [*expected.T.ravel(), *flat, a[:, 0] @ expected[:, 0]]


def test_times_of_a_card_are_predicted(capfd):
    body = """
    __global__ void k(float* x) { x[blockIdx.x * blockDim.x + threadIdx.x] += 1; }
    int main() {
      float *x, ms; cudaMalloc(&x, 4 << 20);
      cudaEvent_t begin, end; cudaEventCreate(&begin); cudaEventCreate(&end);
      cudaEventRecord(begin);
      for (int i = 0; i < 3; i++) k<<<4096, 256>>>(x);
      cudaEventRecord(end);
      cudaEventElapsedTime(&ms, begin, end);
      cudaDeviceProp p; cudaGetDeviceProperties(&p, 0);
      printf("%s %d %d %.9f", p.name, p.multiProcessorCount, p.major, ms);
    }"""
    program, out = run(body, capfd=capfd, card="a100")
    assert re.match(r"gemmery's emulator as a100 108 8 ", out)
    assert abs(float(out.split()[-1]) / 1e3 - program.seconds) <= 1e-9
    assert 0 < program.seconds < 1e-3
    assert program.launches == {"k": 3}


def test_threads_of_the_host(capfd):
    _, out = run(
        """
        #include <thread>
        __global__ void k(int* x, int by) { atomicAdd(x, by); }
        int main() {
          int *x, sum; cudaMalloc(&x, 4); cudaMemset(x, 0, 4);
          std::vector<std::thread> all;
          for (int i = 1; i <= 4; i++) all.emplace_back([=] { int* y; cudaMalloc(&y, i << 20); k<<<1, i>>>(x, i); });
          for (auto& each : all) each.join();
          cudaMemcpy(&sum, x, 4, cudaMemcpyDeviceToHost);
          printf("%d", sum);
        }""",
        capfd=capfd,
    )
    assert out == "30"


def test_parameters_of_many_forms(capfd):
    _, out = run(
        """
        struct Pair { char kind; short values[2]; };
        template <class... T> __global__ void sum(int* to, T... values) { *to = (values + ... + 0); }
        __global__ void rows(int (*x)[4], const int, Pair pair, long last = 5) {
          x[1][threadIdx.x] = pair.values[1] + last;
        }
        template <typename = void, int N = 3> __global__ void plain(int* x) { *x = N; }
        int main() {
          int *x, y[8];
          cudaMalloc(&x, sizeof y);
          cudaMemset(x, 0, sizeof y);
          rows<<<1, 4>>>((int(*)[4])x, 7, Pair{'a', {1, 2}});
          sum<<<1, 1>>>(x, 3, 4, short(5));
          sum<<<1, 1>>>(x + 1);
          plain<><<<1, 1>>>(x + 2);
          CHECK(cudaMemcpy(y, x, sizeof y, cudaMemcpyDeviceToHost));
          for (int each : y) printf("%d ", each);
        }""",
        capfd=capfd,
    )
    assert out == "12 0 3 0 7 7 7 7 "


def test_several_files(tmp_path, capfd):
    (tmp_path / "kernels.cuh").write_text("#pragma once\n__global__ void k(int* x) { *x = 4; }\n")
    (tmp_path / "other.cpp").write_text("int three() { return 3; }\n")
    file = tmp_path / "main.cu"
    file.write_text(
        SHORT + '#include "kernels.cuh"\nint three();\n'
        "int main() { int *x, y; cudaMalloc(&x, 4); k<<<1, 1>>>(x); cudaMemcpy(&y, x, 4, cudaMemcpyDeviceToHost); "
        'printf("%d", y + three()); }'
    )
    host_runtime.run_program(file)  # the only file beside it that has it
    (tmp_path / "third.c").write_text("int three() { return 5; }\n")
    with pytest.raises(CompileError, match=r"three.*--option other\.cpp"):
        host_runtime.run_program(file)
    host_runtime.run_program(file, options=(str(tmp_path / "other.cpp"),))
    assert capfd.readouterr().out == "77"


def test_a_file_of_c_is_compiled_as_c(tmp_path, capfd):
    (tmp_path / "clock.c").write_text("int new = 3;\nstatic int twice(int class) { return 2 * class; }\n"
                                      "int\nticks(void)\n{ return twice(new); }\n")  # fmt: skip
    file = tmp_path / "main.cu"
    file.write_text(SHORT + 'extern "C" int ticks(void);\nint main() { printf("%d", ticks()); }')
    host_runtime.run_program(file)
    assert capfd.readouterr().out == "6"


@pytest.mark.many(2)
@pytest.mark.parametrize(
    "loop",
    [
        "while (go) {}",
        "while (go) { std::vector<int> some(go * 1000); go = some.size() > 0; }",  # malloc() has locks
        "while (go) usleep(100000);",
        "while (go) cudaMemset(x, 0, 4);",
    ],
)
def test_a_loop_of_the_host_that_does_not_end(loop, capfd):
    program, out = run(
        f"""#include <unistd.h>
        __global__ void k(int* x) {{ *x = 1; }}
        int main() {{ int* x; cudaMalloc(&x, 4); k<<<1, 1>>>(x); puts("before"); volatile int go = 1; {loop} }}""",
        capfd=capfd,
        seconds=0.2,
    )
    assert program.status == 128 + signal.SIGVTALRM
    assert out == "before\n"
    assert program.launches == {"k": 1}
    (note,) = program.notes
    assert "main() was ended after 0.2 seconds of its own code" in note
    assert "--seconds" in note
    assert run("int main() { return 3; }")[0].status == 3  # the next program runs


def test_time_in_launches_is_not_the_hosts():
    program, _ = run(
        """__global__ void k(int* x) { for (int i = 0; i < 20000; i++) *x += i; }
        int main() { int* x; cudaMalloc(&x, 4); k<<<1, 1>>>(x); return 5; }""",
        seconds=0.05,
    )
    assert (program.status, program.notes) == (5, ())


def test_launches_without_an_end(monkeypatch):
    monkeypatch.setattr(host_runtime, "MOST_LAUNCHES", 20)
    with pytest.raises(EmulationError, match="20 launches: a loop of main"):
        run("__global__ void k() {} int main() { while (true) k<<<1, 1>>>(); }")


def test_what_ran_is_not_said_to_be_left_out():
    program, _ = run("int helper() { return 1; } __global__ void k() {} int main() { helper(); k<<<1, 1>>>(); }")
    assert program.runs[0].left_out == ()
    assert "not compiled" not in str(program.runs[0])


def test_the_timers_of_samples(capfd):
    run(
        """#include <helper_timer.h>
        int main() {
          StopWatchLinux watch; watch.start(); watch.stop(); watch.start(); watch.stop();
          StopWatchInterface* other; sdkCreateTimer(&other); sdkStartTimer(&other); sdkStopTimer(&other);
          printf("%d", watch.getAverageTime() <= watch.getTime() && sdkGetTimerValue(&other) >= 0);
        }""",
    )
    assert capfd.readouterr().out == "1"


def test_refusals(monkeypatch):
    with pytest.raises(CompileError, match=r"kernel\.cu:8:.*nothing"):
        run("int main() {\n return nothing; }")
    with pytest.raises(CompileError, match="no main"):
        run("__global__ void k() {}")
    with pytest.raises(CompileError, match="has no body of it"):
        run("__global__ void k() {} int main();")
    with pytest.raises(CompileError, match=r"mpi\.h is not here: .*-IFOLDER; the kernels alone run without --run"):
        run("#include <mpi.h>\n__global__ void k() {} int main() {}")
    with pytest.raises(CompileError, match=r"thrust/sort\.h is of Thrust or CUB, which need a GPU") as refused:
        run("#include <thrust/sort.h>\n__global__ void k() {} int main() {}")
    assert "   from " not in str(refused.value)
    with pytest.raises(CompileError, match="undefined"):  # of a kernel, when it is launched
        run("__global__ void k(int* x) { *x = nothing; } int main() { k<<<1, 1>>>(0); }")
    monkeypatch.setattr(host_part.shutil, "which", lambda name: None)
    with pytest.raises(InstallError, match="compiler of C"):
        run("int main() {}")


def test_what_formatters_and_other_systems_write(capfd):
    program, out = run(
        """template <int N> __global__ void k(int* x) { *x = N; }
        void main() { int *x, y = 1; cudaMalloc(&x, 4); k<5> << <dim3(y << 2 >> 2), 1 >> > (x);
          cudaMemcpy(&y, x, 4, cudaMemcpyDeviceToHost); printf("%d", y << 1); }""",
        capfd=capfd,
    )
    assert (out, program.launches) == ("10", {"k<5>": 1})


def test_launches_in_the_text():
    text = """
#define RUN(k) k<<<1, n >> 1>>>(x)
int main() {
  a::f<3, int><<<dim3(1, 2), 64>>>(x, g(1));  // h<<<1, 1>>>(x)
  puts("k<<<1>>>(x)");
  (*pointer)<<<n, 1>>>(x);
}"""
    found = host_texts(program_of(text, "a.cu", (), None, ()))["a.cu"]
    assert (
        found
        == """
#define RUN(k) (gemmery::configure(1, n >> 1), k(x))
int main() {
  (gemmery::configure(dim3(1, 2), 64), a::f<3, int>(x, g(1)));  // h<<<1, 1>>>(x)
  puts("k<<<1>>>(x)");
  (gemmery::configure(n, 1), (*pointer)(x));
}"""
    )


def test_the_heap_uses_what_is_freed_again():
    heap = DeviceHeap(1 << 22)
    first, second = heap.allocate("a", 1000), heap.allocate("b", 1000)
    heap.data[first.start : first.stop] = 7
    assert heap.free(first.start)
    assert not heap.free(first.start + 4)
    third = heap.allocate("c", 900)
    assert third.start == first.start
    assert not heap.data[third.start : third.stop].any()
    assert second.start - third.stop >= 512
    assert heap.allocate("d", 1 << 23) is None
    large = heap.allocate("e", 3 << 20)
    assert heap.holding(large.start + 5) is large
    assert heap.memory({second.start: "table"}).address("table") == second.start


def test_json_is_alone_on_stdout(tmp_path: Path, capfd):
    file = tmp_path / "p.cu"
    file.write_text('#include <cstdio>\n__global__ void k() { printf("device "); }\n'
                    'int main() { printf("host "); k<<<1, 1>>>(); return 0; }\n')  # fmt: skip
    assert emulate(file, run=True, json=True)() == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["status"] == 0
    assert ("device" in err, "host" in err) == (True, True)


def test_the_command(tmp_path: Path):
    file = tmp_path / "p.cu"
    file.write_text("__global__ void k(int* x) { x[threadIdx.x] = 1; }\nint main(int n, char** w) {\n"
                    "  int* x; cudaMalloc(&x, 128); k<<<1, 32>>>(x); return n; }\n")  # fmt: skip
    assert emulate(file, run=True, arg=["two", "three"])() == 3
    with pytest.raises(ArgumentError, match="--grid with --run"):
        emulate(file, run=True, grid="4")


def test_kernels_and_functions_of_files_beside_the_program(tmp_path):
    (tmp_path / "k.cu").write_text("__global__ void k(int* x) { *x += 4; }\nint three() { return 3; }\n")
    main = "int *x; cudaMallocManaged(&x, 4); *x = three(); k<<<1, 1>>>(x); cudaDeviceSynchronize(); return *x - 7;"
    file = tmp_path / "main.cu"
    file.write_text(f"__global__ void k(int* x);\nint three();\nint main() {{ {main} }}\n")
    program = host_runtime.run_program(file)
    assert (program.status, program.launches, program.notes) == (0, {"k": 1}, ())
    assert kernels_of(file.read_text(), file.name, tmp_path) == {}
