"""malloc and free in kernels, and new and delete: what they give, and the faults of those who use it."""

import re

import numpy as np
import pytest

import gemmery as gm
from gemmery_emulator.kernels.host_runtime import run_program

WAYS = pytest.mark.parametrize("way", ["numpy", "compiled"])
pytestmark = pytest.mark.filterwarnings("ignore:GEMMERY_EMULATOR=compiled:RuntimeWarning")


def emulated(body, *more, blocks=1, threads=32, before="", **options):
    x = np.zeros(blocks * threads, np.int32)
    code = f"""{before}
__global__ void f(int* x{"".join(f", int a{place}" for place, _ in enumerate(more))}) {{
int i = blockIdx.x * blockDim.x + threadIdx.x;
{body} }}"""
    run = gm.emulate(code, "f", blocks, threads, [x, *map(np.int32, more)], **options)
    return x, run


LISTS = """struct Node { int value; Node* next; __device__ Node(int v, Node* n) : value(v), next(n) {} };"""
RIGHT = {
    "malloc": ("int* p = (int*)malloc(12); p[0] = i; p[2] = 5; x[i] = p[0] + p[2]; free(p);", lambda i: i + 5),
    "new": ("long long* p = new long long[i + 1]; p[i] = i; x[i] = p[i]; delete[] p;", lambda i: i),
    "a list": (
        """Node* first = 0; for (int j = 0; j < i % 7; j++) first = new Node(j, first);
        while (first) { Node* n = first->next; x[i] += first->value; delete first; first = n; }""",
        lambda i: i % 7 * (i % 7 - 1) // 2,
    ),
    "of a block": (
        """__shared__ int* p; if (threadIdx.x == 0) p = (int*)malloc(4 * blockDim.x); __syncthreads();
        p[threadIdx.x] = i; __syncthreads(); x[i] = p[threadIdx.x ^ 1]; __syncthreads();
        if (threadIdx.x == 0) free(p);""",
        lambda i: i ^ 1,
    ),
    "atomics and vectors": (
        """int4* p = (int4*)malloc(32); p[1] = make_int4(i, 1, 2, 3); atomicAdd(&p[1].x, 2); x[i] = p[1].x + p[1].w;
        free(p);""",
        lambda i: i + 5,
    ),
    "nothing": ("free(0); delete (int*)0; malloc(8); x[i] = malloc(9 << 20) == 0;", lambda i: 1 + 0 * i),
}


@WAYS
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_has_no_findings(case, seed, way, monkeypatch):
    monkeypatch.setenv("GEMMERY_EMULATOR", way)
    body, expected = RIGHT[case]
    x, run = emulated(body, blocks=3, threads=64, before=LISTS, seed=seed)
    assert x.tolist() == expected(np.arange(192)).tolist()
    assert run.findings == ()


def test_both_ways_count_alike(monkeypatch):
    runs = []
    for way in ("numpy", "compiled"):
        monkeypatch.setenv("GEMMERY_EMULATOR", way)
        runs.append(emulated(RIGHT["a list"][0], before=LISTS)[1])
    assert runs[0].merged == runs[1].merged
    assert runs[0].as_ptx == runs[1].as_ptx
    assert runs[0].instructions["call malloc"] == 6


FAULTS = {  # a statement on each line, from line 4
    "beyond": ("int* p = (int*)malloc(12);\np[3] = i;", 5, "out of bounds", "4 bytes beyond the 12 bytes of malloc"),
    "read beyond": ("int* p = new int[2];\np[1] = 1; x[i] = p[1 + a0];", 5, "out of bounds", "beyond the 8 bytes"),
    "across the end": (
        "char* p = (char*)malloc(12);\n*(long long*)(p + 8) = i;", 5, "out of bounds", "4 bytes beyond the 12 bytes",
    ),
    "before": ("int* p = (int*)malloc(12);\np[-1] = i;", 5, "out of bounds", "4 bytes before the 12 bytes of malloc"),
    "far": ("char* p = (char*)malloc(12);\np[5000] = i;", 5, "out of bounds", "beyond the 12 bytes"),
    "use after free": (
        "int* p = (int*)malloc(4); p[0] = 1;\nfree(p);\nx[i] = p[0];",
        6, "out of bounds", r"in the 4 bytes of malloc\(\) at kernel.cu:4, freed at kernel.cu:5",
    ),
    "double free": (
        "int* p = (int*)malloc(4);\nfree(p);\nfree(p);", 6, "misuse", "at kernel.cu:4, freed at kernel.cu:5: free",
    ),
    "inside": ("int* p = (int*)malloc(8);\nfree(p + 1);", 5, "misuse", "which malloc.. did not give"),
    "an array": ("\nfree(x);", 5, "misuse", r"frees address 0x1000, which malloc\(\) did not give"),
    "uninitialized": (
        "int* p = (int*)malloc(8); p[0] = 1;\nx[i] = p[a0];", 5, "uninitialized", r"kernel.cu:4, byte 4\), which",
    ),
    "an update": ("int* p = (int*)malloc(8);\natomicAdd(p, 1);", 5, "uninitialized", "which no thread has written"),
    "null": ("int* p = (int*)malloc(9 << 20);\np[0] = i;", 5, "out of bounds", "a null pointer?"),
    "a race": (
        "__shared__ int* p; if (!i) p = (int*)malloc(4); __syncthreads();\np[0] = i;", 5, "race", "malloc.. at kernel",
    ),
}  # fmt: skip


@WAYS
@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_has_its_line(case, way, monkeypatch):
    monkeypatch.setenv("GEMMERY_EMULATOR", way)
    body, line, kind, words = FAULTS[case]
    _, run = emulated(body, 1)
    (finding,) = run.findings
    assert (finding.line.number, finding.kind) == (line, kind), str(finding)
    assert re.search(words, finding.message), str(finding)


def test_a_spent_heap_gives_null_until_something_is_freed():
    body = """char* last = 0; for (int j = 0; j < 9; j++) { char* p = (char*)malloc(1 << 20); x[j] = p != 0;
      if (p) last = p; } free(last); x[9] = malloc(1 << 20) != 0; x[10] = malloc(1) != 0;"""
    x, run = emulated(f"if (i == 0) {{ {body} }}")
    assert x[:11].tolist() == [1] * 8 + [0, 1, 0]
    assert run.findings == ()


def test_addresses_are_given_once_and_end():
    body = "for (int j = 0; j < 20; j++) { int* p = (int*)malloc(65536); x[i] += p != 0; free(p); }"
    x, run = emulated(body, threads=64)
    assert (x.tolist(), run.findings) == ([20] * 64, ())
    with pytest.raises(gm.EmulationError, match=r"kernel.cu:4: malloc.. gives 134,217,728 bytes in all, at most"):
        emulated(body.replace("20", "40"), threads=64)


PROGRAM = """
__global__ void make(int** p, int n) { *p = (int*)malloc(4 * n); if (*p) (*p)[0] = 7; }
__global__ void use(int** p, int* x) { *x = (*p)[0]; }
__global__ void end(int** p) { free(*p); }
int main() { int **p, *x, y = 0; cudaMalloc(&p, 8); cudaMalloc(&x, 4);
  LIMIT
  make<<<1, 1>>>(p, COUNT); use<<<1, 1>>>(p, x); end<<<1, 1>>>(p);
  cudaMemcpy(&y, x, 4, cudaMemcpyDeviceToHost); AGAIN return y; }"""


@pytest.mark.parametrize(
    ("limit", "n", "again", "status", "findings"),
    [
        ("", "4", "", 7, 0),
        ("", "4", "use<<<1, 1>>>(p, x);", 7, 1),
        ("", "3 << 20", "", 0, 1),
        ("cudaDeviceSetLimit(cudaLimitMallocHeapSize, 16 << 20);", "3 << 20", "", 7, 0),
        ("", "4", "y = cudaDeviceSetLimit(cudaLimitMallocHeapSize, 1 << 20);", 1, 0),
    ],
)
def test_a_program_keeps_its_heap(limit, n, again, status, findings):
    program = run_program(PROGRAM.replace("LIMIT", limit).replace("COUNT", n).replace("AGAIN", again))
    assert program.status == status
    assert sum(len(run.findings) for run in program.runs) == findings
