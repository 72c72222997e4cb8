"""gm.emulate's arguments and launches: what is taken, what is refused, what an error says."""

import array
import re

import numpy as np
import pytest

import gemmery as gm

N = 64
X = np.random.default_rng(1).uniform(-4, 4, N).astype(np.float32)
TWICE = "__global__ void twice(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }"


# ---- arguments ----


def copied(x, kind="unsigned char", size=1):
    """What a kernel that copies elements of a C++ type makes of an array."""
    y, count = np.zeros_like(x), x.nbytes // size
    code = f"""__global__ void copy(const {kind}* x, {kind}* y, int n) {{
      if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x]; }}"""
    assert gm.emulate(code, "copy", 1, max(count, 1), [x, y, np.int32(count)]).findings == ()
    return y


@pytest.mark.parametrize(
    "x",
    [
        np.arange(8, dtype=np.float16),
        np.arange(8, dtype=np.uint8),
        np.array([True, False]),
        np.arange(4) * (1 + 2j),
        np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(3.5),
        np.zeros((0, 3)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6.0).reshape(2, 3).T,
        np.array([b"ab", b"cd"]),
        np.array(["2026-11-20"], "datetime64[D]"),
    ],
    ids=lambda x: f"{x.dtype}{x.shape}",
)
def test_arrays_of_any_type_and_order(x):
    y = copied(x)
    assert y.tobytes("A") == x.tobytes("A")


def test_bfloat16_of_another_package():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.arange(8).astype(ml_dtypes.bfloat16)
    assert (copied(x, "unsigned short", 2) == x).all()


def test_one_array_twice_and_a_view():
    x = np.arange(N, dtype=np.float32)
    code = "__global__ void add(float* x, const float* y) { x[threadIdx.x] += y[threadIdx.x]; }"
    gm.emulate(code, "add", 1, N, [x, x])
    np.testing.assert_array_equal(x, 2.0 * np.arange(N))
    gm.emulate(code, "add", 1, 32, [x[32:], x[:32]])
    np.testing.assert_array_equal(x[32:], 2.0 * np.arange(32, N) + 2.0 * np.arange(32))


def test_scalars_and_structs():
    code = """#include <cuda_fp16.h>
    struct Pair { float a; int b[3]; };
    __global__ void each(float* z, __half h, float2 c, bool q, char s, double d, Pair p, unsigned u, long long w) {
      z[0] = __half2float(h) + c.y + q + s + d + p.a + p.b[2] + u + w; }"""
    pair = np.array([(0.25, (1, 2, 3))], dtype=[("a", "f4"), ("b", "i4", 3)])[0]
    z = np.zeros(1, np.float32)
    given = [z, np.float16(1.5), np.complex64(1 + 2j), np.True_, np.int8(-3), 4.0, pair, 7, np.int64(-1)]
    gm.emulate(code, "each", 1, 1, given)
    assert z[0] == 1.5 + 2 + 1 - 3 + 4 + 0.25 + 3 + 7 - 1
    given[6] = pair.tobytes()
    z[0] = 0
    gm.emulate(code, "each", 1, 1, given)
    assert z[0] == 14.75


def test_variables_of_the_module():
    code = """__constant__ float scale[2] = {1, 2}; __device__ int calls = 5; __device__ float sums[4];
    __global__ void f(float* z) { sums[threadIdx.x] = scale[threadIdx.x & 1] * z[threadIdx.x];
      atomicAdd(&calls, 1); z[threadIdx.x] = calls > 0; }"""
    z, sums, calls = np.arange(4, dtype=np.float32), np.zeros(4, np.float32), np.zeros(1, np.int32)
    gm.emulate(code, "f", 1, 4, [z], variables={"sums": sums, "calls": calls})
    assert (sums.tolist(), calls[0]) == ([0, 2, 2, 6], 4)
    gm.emulate(code, "f", 1, 4, [np.ones(4, np.float32)], variables={"sums": sums, "scale": np.float32([10, 20])})
    assert sums.tolist() == [10, 20, 10, 20]


class Tensor:
    """An array of another library, whose repr is long."""

    def __repr__(self):
        return "tensor([\n" + "0., " * 100


OVERLAP = np.zeros(N, np.float32)
FOREIGN = np.zeros(N, np.dtype(np.float32).newbyteorder())
ARGUMENTS = {
    "too few": (
        [X],
        gm.ArgumentError,
        r"1 argument: twice\(float\* x, int n\) takes 2; pass one",
    ),
    "too many": ([X, 1, 2], gm.ArgumentError, "3 arguments.*takes 2"),
    "a list": (
        [[1.0, 2.0], 1],
        gm.ArgumentError,
        r"argument 0\[0\] is 1.0: .*pass arrays.*or instead of it a NumPy array",
    ),
    "an array of another library": ([Tensor(), 1], gm.ArgumentError, "argument 0 is of type Tensor, .*or an array"),
    "an array for a list": (
        X,
        gm.ArgumentError,
        r"args is of type ndarray: pass a list of the kernel's arguments, such as \[x, y\]",
    ),
    "a number for an array": ([1.5, 1], gm.ArgumentError, "argument 0 is 1.5 of type float, .*pointer.*an array"),
    "an array for a number": ([X, X], gm.ArgumentError, "argument 1 is an array of float32.*4 bytes.*numpy.uint32"),
    "None for a number": ([X, None], gm.ArgumentError, "argument 1 is None.*pass a whole number, or a numpy.uint32"),
    "a float for an int": ([X, 1.0], gm.ArgumentError, "argument 1 is 1.0 of type float.*numpy.uint32"),
    "another size": ([X, np.int64(1)], gm.ArgumentError, "argument 1 is 1 of type int64.*4 bytes.*numpy.uint32"),
    "float bits": ([X, np.float32(1)], gm.ArgumentError, "argument 1 is 1.0 of type float32.*numpy.uint32"),
    "too large": ([X, 2**32], gm.ArgumentError, "argument 1 is 4294967296.*pass a number of 32 bits"),
    "bytes": ([X, b"abc"], gm.ArgumentError, "argument 1 is 3 bytes.*pass 4 bytes"),
    "gaps": ([np.zeros((8, 8))[:, ::2], 1], gm.LayoutError, "argument 0 has strides.*ascontiguousarray"),
    "text": ([np.array(["a"]), 1], gm.ArgumentError, "argument 0 holds text.*int8"),
    "objects": ([np.array([None]), 1], gm.ArgumentError, "argument 0 holds Python objects.*astype"),
    "byte order": ([FOREIGN, 1], gm.LayoutError, "argument 0 has the non-native byte order.*astype"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_a_wrong_argument_is_refused_in_words(case):
    args, error, words = ARGUMENTS[case]
    with pytest.raises(error, match=words):
        gm.emulate(TWICE, "twice", 1, N, args)


def test_overlapping_arrays_are_refused():
    code = "__global__ void f(float* x, float* y) { x[0] = y[0]; }"
    with pytest.raises(gm.LayoutError, match="argument 1 overlaps argument 0: pass one array and an offset"):
        gm.emulate(code, "f", 1, 1, [OVERLAP[1:], OVERLAP[:-1]])


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"nowhere": X}, "variable 'nowhere': this module has table"),
        ({"table": X}, "variable table has 16 bytes, but the array has 256: pass an array of that size"),
        ({"table": [1.0]}, r"variable table is \[1.0\]: pass a NumPy array"),
    ],
)
def test_a_wrong_variable_is_refused(variables, words):
    code = "__device__ float table[4]; __global__ void f(float* z) { z[0] = table[0]; }"
    with pytest.raises(gm.ArgumentError, match=words):
        gm.emulate(code, "f", 1, 1, [np.zeros(1, np.float32)], variables=variables)


def test_a_read_only_array_may_be_read_and_not_written():
    code = "__global__ void f(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }"
    x, y = X.copy(), np.zeros_like(X)
    x.flags.writeable = False
    gm.emulate(code, "f", 1, N, [x, y])
    np.testing.assert_array_equal(y, x)
    other = np.zeros_like(X)
    swapped = "__global__ void f(float* z, float* x, const float* y) { z[threadIdx.x] = x[threadIdx.x] = 1 + y[0]; }"
    with pytest.raises(
        gm.LayoutError, match="argument 1 is read-only, but the kernel writes to it: pass a writable copy"
    ):
        gm.emulate(swapped, "f", 1, N, [other, x, y])
    assert not other.any()
    np.testing.assert_array_equal(x, X)


def test_an_error_leaves_arrays_as_they_were():
    code = """__global__ void f(long long* z) { z[threadIdx.x] = 1; __syncthreads();
      int at; if (blockIdx.x == 1) { asm volatile("mov.u32 %0, %%smid;" : "=r"(at)); z[threadIdx.x] = at; } }"""
    z = np.zeros(64, np.int64)
    with pytest.raises(gm.EmulationError, match=r"special register %smid of .*\(kernel.cu:2\) is not modeled"):
        gm.emulate(code, "f", 2, 64, [z])
    assert not z.any()
    gm.emulate(code, "f", 1, 64, [z])  # it is not reached
    assert z.all()


# ---- launches ----

BOUNDED = "__global__ void __launch_bounds__(64) f(float* x) { x[0] = 1; }"
LARGE = (
    "__global__ void f(float* x) { __shared__ float s[13000]; s[threadIdx.x] = x[0]; __syncthreads(); x[0] = s[99]; }"
)
DYNAMIC = "__global__ void f(float* x) { extern __shared__ float s[]; s[threadIdx.x] = 1; x[0] = s[threadIdx.x]; }"
FIXED = "__global__ void __cluster_dims__(2, 1, 1) f(float* x) { x[0] = 1; }"
PLAIN = "__global__ void f(float* x) { x[0] = 1; }"
LAUNCHES = {
    "no blocks": (PLAIN, (0, 1), {}, "grid=0: pass a whole number >= 1, or a tuple of up to three"),
    "half a block": (PLAIN, (1.5, 1), {}, "grid=1.5: pass a whole number"),
    "words": (PLAIN, (1, "64"), {}, "block='64': pass a whole number"),
    "four sides": (PLAIN, ((1, 1, 1, 1), 1), {}, r"grid=\(1, 1, 1, 1\).*up to three"),
    "a tall grid": (
        PLAIN,
        ((1, 65536), 1),
        {},
        r"grid=\(1, 65536, 1\): it exceeds \(2147483647, 65535, 65535\); use a grid-stride loop",
    ),
    "a deep block": (PLAIN, (1, (1, 1, 65)), {}, r"block=\(1, 1, 65\): it exceeds \(1024, 1024, 64\)"),
    "many threads": (PLAIN, (1, (64, 32)), {}, r"2048 threads, but a block has at most 1024"),
    "launch bounds": (
        BOUNDED,
        (1, 65),
        {},
        "65 threads, but the kernel was compiled for at most 64.*__launch_bounds__",
    ),
    "static shared": (
        LARGE,
        (1, 32),
        {},
        "declares 52000 bytes of shared memory, but at most 49152 can be static.*extern",
    ),
    "dynamic shared": (DYNAMIC, (1, 32), {"shared": 232449}, "block has at most 232448 on sm_90"),
    "of that device": (DYNAMIC, (1, 32), {"shared": 65537, "arch": "sm_75"}, "block has at most 65536 on sm_75.*arch"),
    "negative shared": (DYNAMIC, (1, 32), {"shared": -1}, r"shared=-1: .* >= 0"),
    "clusters before Hopper": (PLAIN, (4, 1), {"cluster": 2, "arch": "sm_80"}, "sm_80 has no clusters.*sm_90"),
    "a large cluster": (PLAIN, (32, 1), {"cluster": 32}, "32 blocks, but a cluster has at most 16"),
    "an odd grid": (PLAIN, (3, 1), {"cluster": 2}, r"each side of grid=\(3, 1, 1\) must be a multiple"),
    "its own cluster": (FIXED, (4, 1), {"cluster": 4}, r"the kernel was compiled for clusters of \(2, 1, 1\)"),
    "its own cluster, odd": (FIXED, (3, 1), {}, "must be a multiple of the cluster's"),
    "no architecture": (
        PLAIN,
        (1, 1),
        {"arch": "hopper"},
        "arch='hopper': .*such as 'sm_80'.*neither present nor known",
    ),
    "a misspelled card": (PLAIN, (1, 1), {"arch": "rtx3009"}, "arch='rtx3009': .* did you mean 'rtx3090'"),
    "half a byte of shared memory": (DYNAMIC, (1, 1), {"shared": 1.5}, "shared=1.5: .* whole number >= 0"),
    "a negative seed": (PLAIN, (1, 1), {"seed": -1}, "seed=-1: pass a whole number >= 0, or None"),
    "a file by its name": ("kernel.cu", (1, 1), {}, "source='kernel.cu' cannot be read .*: pass the path of a file"),
    "bytes": (b"__global__ void f() {}", (1, 1), {}, "source=b'__global.* the text of a kernel"),
    "a string of options": (PLAIN, (1, 1), {"options": "-DN=4"}, "options='-DN=4': pass a tuple of strings"),
    "a number among options": (PLAIN, (1, 1), {"options": (4,)}, r"options=\(4,\): pass a tuple of strings"),
    "a number for an architecture": (PLAIN, (1, 1), {"arch": 90}, "arch=90: .*such as 'sm_80'"),
    "no shared memory": (PLAIN, (1, 1), {"shared": None}, "shared=None: .* whole number >= 0"),
    "no steps": (PLAIN, (1, 1), {"max_steps": 0}, "max_steps=0: pass a whole number >= 1"),
    "half a seed": (PLAIN, (1, 1), {"seed": 1.5}, "seed=1.5: pass a whole number >= 0"),
    "bytes for an architecture": (PLAIN, (1, 1), {"arch": b"sm_80"}, "arch=b'sm_80': .*such as 'sm_80'"),
    "an array for a flag": (PLAIN, (1, 1), {"check": np.ones(2)}, r"check=array\(\[1., 1.\]\): pass True or False"),
    "a text for a flag": (PLAIN, (1, 1), {"strict": "no"}, "strict='no': pass True or False"),
    "a large array": (PLAIN, (1, 1), {"seed": np.zeros((9, 9))}, r"^seed=.{40}: pass a whole number >= 0"),
    "a list of variables": (
        PLAIN,
        (1, 1),
        {"variables": [1]},
        "variables is of type list: pass a dictionary of arrays",
    ),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_a_launch_that_a_driver_refuses_is_an_error(case):
    code, dims, options, words = LAUNCHES[case]
    x = np.zeros(4, np.float32)
    with pytest.raises(gm.ArgumentError, match=words):
        gm.emulate(code, "f", *dims, [x], **options)
    assert not x.any()


@pytest.mark.parametrize(("arch", "number"), [("RTX3090", 860), ("h100", 900), ("SM_80", 800), ("7.5", 750)])
def test_a_kernel_is_compiled_for_a_card_by_its_name(arch, number):
    x = np.zeros(1, np.int32)
    gm.emulate("__global__ void f(int* x) { *x = __CUDA_ARCH__; }", "f", 1, 1, [x], arch=arch)
    assert x[0] == number


def test_launches_at_the_limits():
    x = np.zeros(1, np.float32)
    for code, block, options in ((DYNAMIC, 32, {"shared": 232448}), (BOUNDED, 64, {}), (FIXED, 1, {"cluster": 2})):
        x[0] = 0
        gm.emulate(code, "f", 2, block, [x], **options)
        assert x[0] == 1


def test_blocks_of_a_required_size():
    text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry f(.param .u64 x) .reqntid 8, 2 { ret; }"
    with pytest.raises(
        gm.ArgumentError, match=r"block=\(16, 1, 1\): the kernel was compiled for blocks of \(8, 2, 1\)"
    ):
        gm.emulate(text, "f", 1, 16, [None])
    assert gm.emulate(text, "f", 1, (8, 2), [None]).findings == ()
    with pytest.raises(
        gm.ArgumentError, match="this PTX is for sm_80, and older devices cannot run it; pass arch='sm_80'"
    ):
        gm.emulate(text, "f", 1, (8, 2), [None], arch="sm_75")
    with pytest.raises(gm.ArgumentError, match="PTX is not compiled"):
        gm.emulate(text, "f", 1, (8, 2), [None], options=("-DN=1",))
    with pytest.raises(gm.ArgumentError, match="kernel 'g': this PTX has f; name one of them"):
        gm.emulate(text, "g", 1, (8, 2), [None])


@pytest.mark.parametrize("option", ["swizzle", "steps"])
def test_arrays_as_options_of_a_tensor_map_are_refused(option):
    """Not with NumPy's words about truth values."""
    with pytest.raises(gm.GemmeryError, match=option):
        gm.tensor_map(np.zeros((16, 16), np.float32), (8, 8), **{option: np.ones(5)})


POINTERS_INSIDE = """
struct Inner { float* p; int n; };
struct Outer { char c; Inner in; double d; };
__global__ void list(float** p, const float* const* q) { p[1][threadIdx.x] = q[0][threadIdx.x] + q[1][threadIdx.x]; }
__global__ void structs(Outer s, Outer* t) {
  s.in.p[threadIdx.x] = s.in.n + s.d + t[1].in.p[threadIdx.x] + t[1].d;
}"""


def outer(p, n, d):
    """An Outer, member by member."""
    return (np.int8(1), (p, np.int32(n)), np.float64(d))


class Shared:
    """Memory that another library shares."""

    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.array = array


def test_lists_are_arrays_of_pointers_and_tuples_structs():
    """At the offsets of C++; an array that is passed twice is one."""
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    assert gm.emulate(POINTERS_INSIDE, "list", 1, 32, [[None, y], [x, x]]).findings == ()
    assert np.array_equal(y, 2 * x)
    args = [outer(Shared(y), 3, 0.5), [outer(None, 1, 2), outer(x, 7, 100)]]
    assert gm.emulate(POINTERS_INSIDE, "structs", 1, 32, args).findings == ()
    assert np.array_equal(y, x + 103.5)
    run = gm.emulate(POINTERS_INSIDE, "list", 1, 40, [[None, y], [x, x]])
    assert "beyond the 128 of argument 1[0]" in run.findings[0].message


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([(0, 3), []], "argument 0.0 is 0, whose size"),
        ([(np.int32(3),), []], "argument 0 is 4 bytes, but the kernel reads a struct of 32 bytes"),
        ([outer(None, 1, 2), [None, (None, None)]], "elements have 8, 16 bytes"),
        ([[None], []], "argument 0 is a list, which is passed as its address"),
    ],
)
def test_a_struct_that_does_not_fit_is_refused(args, message):
    """With the member that is wrong."""
    with pytest.raises(gm.ArgumentError, match=re.escape(message)):
        gm.emulate(POINTERS_INSIDE, "structs", 1, 32, args)


def test_tensors_and_buffers_are_arrays():
    code = "__global__ void f(float* x) { x[threadIdx.x] += threadIdx.x; }"
    buffer, view = array.array("f", [1.0] * 4), memoryview(bytearray(16)).cast("f")
    for argument in (buffer, view):
        gm.emulate(code, "f", 1, 4, [argument])
    assert list(buffer) == [1, 2, 3, 4]
    assert list(view) == [0, 1, 2, 3]
    torch = pytest.importorskip("torch")
    tensor, half = torch.zeros(4, requires_grad=True), torch.zeros(4, dtype=torch.bfloat16)
    gm.emulate(code, "f", 1, 4, [tensor])
    assert tensor.tolist() == [0, 1, 2, 3]
    halves = "#include <cuda_bf16.h>\n__global__ void g(__nv_bfloat16* x) { x[threadIdx.x] = 1.5f; }"
    gm.emulate(halves, "g", 1, 4, [half])
    assert half.tolist() == [1.5] * 4
    with pytest.raises(gm.ArgumentError, match=r"argument 0 is a tensor on meta: pass tensor.cpu\(\)"):
        gm.emulate(code, "f", 1, 4, [torch.zeros(4, device="meta")])
    with pytest.raises(gm.ArgumentError, match=r"argument 0 is a tensor of layout torch.sparse_coo: pass tensor.to_d"):
        gm.emulate(code, "f", 1, 4, [torch.zeros(4).to_sparse()])
    with pytest.raises(
        gm.ArgumentError, match=r"argument 0 cannot be read on the CPU .*conjugate.*: pass a NumPy array"
    ):
        gm.emulate(code, "f", 1, 4, [torch.zeros(4, dtype=torch.complex64).conj()])


def test_device_memory_keeps_addresses_over_launches():
    """A list that one kernel links and another walks; outside of the block the arrays are as any others."""
    code = """struct Node { Node* next; long long value; };
    __global__ void link(Node* nodes, int n) {
      if (threadIdx.x < n) nodes[threadIdx.x] = {threadIdx.x + 1 < n ? nodes + threadIdx.x + 1 : nullptr, threadIdx.x};
    }
    __global__ void walk(Node** heads, long long* sum) {
      for (Node* at = heads[0]; at; at = at->next) *sum += at->value;
    }"""
    with gm.device_memory() as memory:
        nodes, total = memory.zeros((8, 2), np.int64), np.zeros(1, np.int64)
        heads = memory.array([memory.address(nodes, 3 * 16)])
        gm.emulate(code, "link", 1, 32, [nodes, 8])
        later = memory.zeros(5)
        assert gm.emulate(code, "walk", 1, 1, [heads, total]).findings == ()
        assert memory.address(nodes) + 16 == nodes[0, 0]
        with pytest.raises(gm.ArgumentError, match="this array is not in device memory"):
            memory.address(total)
    assert total[0] == 3 + 4 + 5 + 6 + 7
    assert not later.any()
    assert gm.emulate(code, "walk", 1, 1, [heads, total]).findings[0].kind == "out of bounds"


def test_a_view_of_an_array_in_device_memory_is_an_address_inside_it():
    code = """__global__ void f(float* x, const float* y, float** table) { x[0] += y[1]; *table[0] = 7; }"""
    with gm.device_memory() as memory:
        x = memory.array(np.arange(8, dtype=np.float32).reshape(2, 4))
        run = gm.emulate(code, "f", 1, 1, [x[1, 2:], x[0], [x[1]]])
        assert run.findings == ()
        assert x.tolist() == [[0, 1, 2, 3], [7, 5, 7, 7]]
        past = code.replace("y[1]", "y[8]")
        assert gm.emulate(past, "f", 1, 1, [x, x[0], [x]]).findings[0].kind == "out of bounds"
        with pytest.raises(gm.LayoutError, match="no gaps"):
            gm.emulate(code, "f", 1, 1, [x[:, 1], x, [x]])


def test_device_memory_that_has_ended_takes_no_arrays():
    with gm.device_memory() as memory:
        kept = memory.zeros(4)
    with pytest.raises(gm.ArgumentError, match="has ended: make its arrays inside the with block"):
        memory.zeros(4)
    assert kept.tolist() == [0, 0, 0, 0]
    with gm.device_memory() as outer, gm.device_memory() as inner:
        outer.zeros(2)
        first = inner.address(inner.zeros(2))
    with gm.device_memory() as alone:
        assert alone.address(alone.zeros(2)) == first  # the outer one's arrays are not in the launches of the inner one


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda memory: memory.zeros(-1), r"shape=-1 and .* make no array \(negative.*pass whole numbers >= 0"),
        (lambda memory: memory.zeros(1 << 60), r"zeros\(\): shape=1152921504606846976"),
        (lambda memory: memory.array([object()]), "this holds Python objects, but a kernel needs numbers"),
        (lambda memory: memory.array([[1], [1, 2]]), r"array\(\): NumPy makes no array of this"),
        (lambda memory: memory.address(np.zeros(2)), "this array is not in device memory"),
    ],
)
def test_what_device_memory_does_not_take(make, words):
    with gm.device_memory() as memory, pytest.raises(gm.ArgumentError, match=words):
        make(memory)


def test_a_masked_array_is_refused():
    masked = np.ma.array(np.ones(32, "f4"), mask=np.arange(32) == 0)
    with pytest.raises(gm.LayoutError, match=r"argument 0 is a MaskedArray.*x\.filled\(0\)"):
        gm.emulate("__global__ void f(float* x) { x[threadIdx.x] = 1; }", "f", 1, 32, [masked])


@pytest.mark.parametrize(("pointee", "dtype"), [("int4", "f2"), ("uint4", "u1"), ("float4", "f2"), ("float2", "i1")])
def test_short_elements_are_copied_by_wide_types(pointee, dtype):
    code = f"__global__ void f({pointee}* a) {{ a[1] = a[0]; }}"
    array = np.arange(32).astype(dtype)
    gm.emulate(code, "f", 1, 1, [array])
    size = {"2": 8, "4": 16}[pointee[-1]]
    assert array.view("u1")[:size].tolist() == array.view("u1")[size : 2 * size].tolist()


def test_a_source_is_the_path_of_a_file_too(tmp_path):
    (tmp_path / "k.cu").write_text("__global__ void f(int* x) { *x = 5; }")
    x = np.zeros(1, np.int32)
    gm.emulate(str(tmp_path / "k.cu"), "f", 1, 1, [x])
    assert x[0] == 5
    with pytest.raises(
        gm.ArgumentError, match=r"argument 0 is 1.5 of type float.*pass a whole number, or a numpy.uint32"
    ):
        gm.emulate("__global__ void f(int n) {}", "f", 1, 1, [1.5])
