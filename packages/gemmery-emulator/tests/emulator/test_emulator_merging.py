"""Which accesses are merged: rules on small PTX, and against the machine code that ptxas makes."""

import subprocess
from collections import Counter

import pytest

from gemmery.cuda import nvrtc, sass
from gemmery_emulator.counters.merging import Low, low_bits, merged
from gemmery_emulator.ptx import Vector
from gemmery_emulator.ptx.module import parse

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


def kernel(body):
    """A kernel of the given instructions; %r1 is 16 times the thread, %rd1 comes from a parameter."""
    return parse(
        f""".version 9.0
        .target sm_90
        .address_size 64
        .visible .entry k(.param .u64 x)
        {{
            .reg .pred %p<9>; .reg .b32 %r<19>; .reg .b64 %rd<9>; .reg .f32 %f<19>; .reg .f64 %d<9>; .reg .b16 %h<9>;
            .shared .align 4 .b8 s[4096];
            mov.u32 %r0, %tid.x;
            shl.b32 %r1, %r0, 4;
            mov.u32 %r2, s;
            add.s32 %r3, %r2, %r1;
            ld.param.u64 %rd1, [x];
            setp.lt.u32 %p1, %r0, 16;
            {body}
            ret;
        }}"""
    ).kernels["k"]


def merges(body):
    """Of each merge: the instructions by their number in `body`, bytes, and the way to the lowest address."""
    found = merged(kernel(body))
    return sorted({(*(one - 6 for one in merge.members), merge.width, merge.offset) for merge in found.values()})


def loads(*offsets, base="%r3", kind="f32"):
    """Loads of shared memory at offsets from a base."""
    return "".join(f"ld.shared.{kind} %{kind[0]}{place}, [{base}+{at}];\n" for place, at in enumerate(offsets))


def ordered(order):
    """Two loads off a base that the first instruction shows to be aligned; ptxas 13.0 was asked the same."""
    first, second = (f"ld.{order}.global.f32 %f{1 + at // 4}, [%rd1+{at}];" for at in (0, 4))
    return f"ld.global.v2.f32 {{%f5, %f6}}, [%rd1+64];\n{first}\n{second}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (ordered("weak"), [(1, 2, 8, 0)]),
        (ordered("relaxed.gpu"), [(1, 2, 8, 0)]),
        (ordered("acquire.gpu"), [(1, 2, 8, 0)]),
        (ordered("volatile"), []),
        (ordered("mmio.relaxed.sys"), []),
        (loads(0, 4, 8, 12), [(0, 1, 2, 3, 16, 0)]),
        (loads(12, 8, 4, 0), [(0, 1, 2, 3, 16, -12)]),
        (loads(0, 4), [(0, 1, 8, 0)]),
        (loads(4, 8), []),
        (loads(0, 8), []),
        (loads(4, 8, 12), [(0, 1, 2, 16, -4)]),
        (loads(0, 4, 8, 12, 16, 20), [(0, 1, 2, 3, 16, 0), (4, 5, 8, 0)]),
        (loads(0, 4, base="%r2"), [(0, 1, 8, 0)]),  # a variable lies at a known place, whatever its alignment
        (loads(0, 4, base="s"), [(0, 1, 8, 0)]),
        (loads(0, 4, base="%r0"), []),  # a thread's number may be odd
        (loads(0, 8, kind="f64").replace("%f", "%d"), [(0, 1, 16, 0)]),
        (loads(0, 2, kind="b16").replace("%b", "%h"), []),
        ("ld.shared.f32 %f1, [%r3];\nadd.s32 %r4, %r3, 4;\nld.shared.f32 %f2, [%r4];", [(0, 2, 8, 0)]),
        ("ld.shared.f32 %f1, [%r3];\nor.b32 %r4, %r3, 4;\nld.shared.f32 %f2, [%r4];", [(0, 2, 8, 0)]),
        ("ld.shared.f32 %f1, [%r3];\nadd.s32 %r3, %r3, 4;\nld.shared.f32 %f2, [%r3+4];", []),
        ("ld.shared.f32 %f1, [%r3];\nadd.s32 %r4, %r0, %r3;\nld.shared.f32 %f2, [%r4+4];", []),
        ("ld.shared.v2.f32 {%f1, %f2}, [%r3];\nld.shared.f32 %f3, [%r3+8];", [(0, 1, 16, 0)]),
        ("ld.shared.f32 %f1, [%r3];\nst.shared.f32 [%r0], %f9;\nld.shared.f32 %f2, [%r3+4];", []),
        ("ld.shared.f32 %f1, [%r3];\nst.global.f32 [%rd1], %f9;\nld.shared.f32 %f2, [%r3+4];", [(0, 2, 8, 0)]),
        ("ld.shared.f32 %f1, [%r3];\nbar.sync 0;\nld.shared.f32 %f2, [%r3+4];", []),
        ("ld.shared.f32 %f1, [%r3];\nL: ld.shared.f32 %f2, [%r3+4];\n@%p1 bra L;", []),
        ("@%p1 ld.shared.f32 %f1, [%r3];\nld.shared.f32 %f2, [%r3+4];", []),
        ("@%p1 ld.shared.f32 %f1, [%r3];\n@%p1 ld.shared.f32 %f2, [%r3+4];", [(0, 1, 8, 0)]),
        ("st.shared.f32 [%r3], %f1;\nst.shared.f32 [%r3+4], %f2;", [(0, 1, 8, 0)]),
        ("".join(f"st.shared.f32 [%r3+{at}], %f1;\n" for at in (0, 4, 8)), [(0, 1, 8, 0)]),  # a store makes no hole
        ("st.shared.b16 [%r3], %h1;\nst.shared.b16 [%r3+2], %h2;", [(0, 1, 4, 0)]),
        ("".join(f"st.shared.b8 [%r3+{at}], %h1;\n" for at in range(4)), []),
        ("st.global.f32 [%rd1], %f1;\nst.global.f32 [%rd1+4], %f2;", []),  # nothing shows that it is aligned
        (
            "ld.global.v2.f32 {%f1, %f2}, [%rd1+8];\nst.global.f32 [%rd1], %f1;\nst.global.f32 [%rd1+4], %f2;",
            [(1, 2, 8, 0)],
        ),
    ],
)
def test_the_rules(body, expected):
    """Members, width and offset of every merge in a few instructions."""
    assert merges(body) == expected


def test_a_loop_keeps_the_alignment_that_each_turn_keeps():
    """Steps of 8 leave 8-byte accesses aligned and spoil those of 16."""
    found = low_bits(kernel("mov.u32 %r4, s;\nL: add.s32 %r4, %r4, 8;\n@%p1 bra L;\nadd.s32 %r5, %r4, 4;"))
    assert found["%r1"] == Low(4, 0)
    assert found["%r4"] == Low(3, 0)
    assert found["%r5"] == Low(3, 4)
    step = "mov.u32 %r4, s;\nL: {}add.s32 %r4, %r4, {};\n@%p1 bra L;"
    assert merges(step.format(loads(0, 4, base="%r4"), 8)) == [(1, 2, 8, 0)]
    assert merges(step.format(loads(0, 4, base="%r4"), 4)) == []


SHARED = "__shared__ float s[1024]; s[t] = x[t]; __syncthreads(); int i = 4 * (t & 31);"
COMPILED = {
    "four": SHARED + "y[t] = s[i] * s[i + 1] + s[i + 2] * s[i + 3];",
    "three": SHARED + "y[t] = s[i] * s[i + 1] + s[i + 2];",
    "middle": SHARED + "y[t] = s[i + 1] * s[i + 2];",
    "gap": SHARED + "y[t] = s[i] * s[i + 2];",
    "seven": SHARED + "i *= 2; y[t] = s[i] * s[i + 1] + s[i + 2] * s[i + 3] + s[i + 4] + s[i + 5] * s[i + 6];",
    "odd": SHARED + "i = 3 * t; y[t] = s[i] * s[i + 1];",
    "behind": SHARED + "i += 4; y[t] = s[i - 4] * s[i - 3] + s[i - 2] * s[i - 1];",
    "swizzled": SHARED + "i ^= t >> 5 << 2; y[t] = s[i] * s[i + 1] + s[i + 2] * s[i + 3];",
    "constant": SHARED + "y[t] = s[0] + s[1] + s[2] * s[3] + s[5] * s[6];",
    "vector": SHARED + "float2 a = *(float2*)(s + i); y[t] = a.x * a.y + s[i + 2] * s[i + 3];",
    "kinds": SHARED + "y[t] = s[i] + ((int*)s)[i + 1];",
    "stored": SHARED + "float a = s[i]; s[t] = a + 1; y[t] = a * s[i + 1];",
    "written": SHARED + "float a = s[i]; y[t] = a + 1; y[t + 999] = a * s[i + 1];",
    "barrier": SHARED + "float a = s[i]; __syncthreads(); y[t] = a * s[i + 1];",
    "fence": SHARED + "float a = s[i]; __threadfence(); y[t] = a * s[i + 1];",
    "shuffle": SHARED + "float a = __shfl_xor_sync(~0u, s[i], 1); y[t] = a * s[i + 1];",
    "atomic": SHARED + "float a = s[i]; atomicAdd(&y[t], a); y[t + 999] = a * s[i + 1];",
    "branch": SHARED + "float a = 0; if (x[t + 7] > 0) a = s[i] * s[i + 1]; y[t] = a;",
    "volatile_": "volatile __shared__ float s[1024]; s[t] = x[t]; __syncthreads(); y[t] = s[4 * t] * s[4 * t + 1];",
    "dynamic": "extern __shared__ float s[]; s[t] = x[t]; __syncthreads(); y[t] = s[4 * t] * s[4 * t + 1];",
    "doubles": "__shared__ double s[512]; s[t] = x[t]; __syncthreads(); y[t] = s[2 * t] * s[2 * t + 1];",
    "stores": SHARED + "s[i] = x[t]; s[i + 1] = x[t + 9]; s[i + 2] = x[t + 99]; __syncthreads(); y[t] = s[t];",
    "short_stores": "__shared__ short s[512]; s[2 * t] = x[t]; s[2 * t + 1] = x[t + 9]; __syncthreads(); y[t] = s[t];",
    "byte_stores": "__shared__ char s[512]; char* p = s + 4 * t; p[0] = x[t]; p[1] = x[t + 9]; p[2] = x[t + 99];"
    "p[3] = x[t + 77]; __syncthreads(); y[t] = s[t];",
    "anywhere": "y[4 * t] = 1; y[4 * t + 1] = 2; y[4 * t + 2] = x[t]; y[4 * t + 3] = 5;",
    "proven": "float2 v = *(float2*)(y + 2 * t); y[2 * t] = v.x + 1; y[2 * t + 1] = v.y + v.x;",
    "proven_loads": "float4 v = *(float4*)(x + 4 * t); y[t] = v.x + v.y + v.z + v.w + x[4 * t + 4] * x[4 * t + 5];",
}


def of_ptx(kernel):
    """How many loads and stores of each width there are once merged, by the names of machine instructions."""
    found, merge = Counter(), merged(kernel)
    for index, one in enumerate(kernel.instructions):
        name, words = one.opcode.name, one.opcode.modifiers
        space = {"global": "G", "shared": "S"}.get(next((w for w in words if w in ("global", "shared")), ""))
        if name in ("ld", "st") and space and (index not in merge or merge[index].first == index):
            vector = next((len(o.elements) for o in one.operands if isinstance(o, Vector)), 1)
            width = merge[index].width if index in merge else vector * BYTES[one.opcode.type.lstrip("fubs")]
            found[f"{name.upper()}{space}.{8 * width}"] += 1
    return found


def of_sass(text):
    """The same of a kernel's machine code."""
    counts = sass.counts(sass.instructions(text))
    return Counter({name: n for name, n in counts.items() if name.split(".")[0] in ("LDG", "LDS", "STG", "STS")})


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """All small kernels, compiled together: the PTX read, and the machine code of all."""
    head = 'extern "C" __global__ void {}(float* x, float* y) {{ int t = threadIdx.x; {} }}'
    text = "\n".join(head.format(name, body) for name, body in COMPILED.items())
    program = nvrtc.compiled("small.cu", "four", "sm_90", texts={"small.cu": text})
    cubin = tmp_path_factory.mktemp("small") / "small.cubin"
    cubin.write_bytes(program.cubin)
    done = subprocess.run([sass.nvdisasm(), "-c", cubin], capture_output=True, text=True, check=True)
    return parse(program.ptx), done.stdout


@pytest.mark.process
@pytest.mark.skipif(not sass.nvdisasm(), reason=sass.MISSING)
@pytest.mark.parametrize("name", COMPILED)
def test_what_ptxas_makes_of_small_kernels(compiled, name):
    """The same loads and stores of each width as in the machine code for sm_90."""
    module, text = compiled
    assert of_ptx(module.kernels[name]) == of_sass(sass.section(text, name))


RUNGS = [
    ("simt_threadtile.cu", "simt_threadtile<float, float, 0, ROW, ROW, ThreadTiles<128, 128, 8, 8, 8>, 2>"),
    ("simt_smem.cu", "simt_smem<double, double, 0, 16>"),
]


@pytest.mark.skipif(not sass.nvdisasm(), reason=sass.MISSING)
@pytest.mark.parametrize(("source", "instance"), RUNGS)
def test_what_ptxas_makes_of_rungs(source, instance):
    """The same loads and stores as in the machine code for sm_90a."""
    program = nvrtc.compiled(source, instance, "sm_90a")
    predicted = of_ptx(parse(program.ptx).kernels[program.entry])
    assert predicted == of_sass(sass.disassembled(program.cubin, program.entry))
    assert any(name.startswith("LDS.128") for name in predicted)
