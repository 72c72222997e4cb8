"""Instruction sets: the same tests in a process limited to a narrower one, and code that recorded CPUs can run."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gemmery import config, dtypes
from gemmery.config import ISAS
from gemmery.cpu import batched, direct, gemv, images, jit, llvm, loops
from gemmery.cpu.target import Target, host, instruction_set
from gemmery.problem import Problem

pytestmark = pytest.mark.sampled(3)

TESTS = Path(__file__).parents[1]
NARROWER = ISAS[: ISAS.index(host().isa)]
FORBIDDEN = {
    "avx2": r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])|vpdp", "generic": r"%[yz]mm|\tv[a-z]",
    "neon_dot": "mmla|bfdot|\tz[0-9]", "neon": "mmla|dot\t|fmlal|\tz[0-9]",
}  # fmt: skip
PROBLEMS = [
    Problem(8, 8, 8, name, out, epilogue=epilogue)
    for name in dtypes.NAMES
    for out in dtypes.NAMES
    for epilogue in ("", "bias+gelu", "bias+silu")
    if not images.packed_refuses(Problem(8, 8, 8, name, out, epilogue=epilogue))
]
# Which features an instruction needs, any one of them, by a pattern of its text.
PATTERNS = {
    r"haddp|addsubp|movddup|movs[hl]dup|lddqu": {"pni"},
    r"pshufb|palignr|phadd|phsub|pabs[bwd]|psign|pmaddubsw|pmulhrsw": {"ssse3"},
    r"round[sp][sd]|pmulld|pmuldq|p(?:min|max)(?:s[bd]|u[wd])\b|p?blend|pmov[sz]x|p(?:extr|insr)[bdq]|ptest|packusdw"
    r"|insertps|extractps|movntdqa|pcmpeqq": {"sse4_1"},
    r"pcmpgtq|crc32": {"sse4_2"},
    r"popcnt[lqw]?\s": {"popcnt"},
    r"lzcnt": {"abm"},
    r"andn[lq]|bls(?:i|r|msk)|tzcnt|bextr": {"bmi1"},
    r"(?:mulx|sarx|shlx|shrx|rorx|pdep|pext|bzhi)[lq]?\s": {"bmi2"},
    r"movbe": {"movbe"},
    r"v[a-z]": {"avx"},
    r".*%ymm": {"avx"},
    r"vp[a-z0-9]+\s.*%ymm|vbroadcasti|vpermq|vpermpd|vpermd|vpermps|vpbroadcast|vpgather|vgather|vpsllv|vpsrlv"
    r"|vextracti|vinserti": {"avx2"},
    r"vf(?:n?m(?:add|sub)|maddsub|msubadd)[0-9]": {"fma"},
    r"vf(?:n?m(?:add|sub))[sp][sd]": {"fma4"},
    r"vcvt(?:ph2ps|ps2ph)\s": {"f16c"},
    r".*%zmm|k[a-z]+[bwdq]\s.*%k[0-7]": {"avx512f"},
    r".*(?:%[xy]mm(?:1[6-9]|2\d|3[01])|\{%k[0-7]\}.*%[xy]mm)": {"avx512vl"},
    r"vp(?:add|sub|mull|mov|sra|srl|sll|max[su]|min[su]|avg)w\s.*%zmm|vmovdqu(?:8|16)": {"avx512bw"},
    r"vpmullq|v(?:and|or|xor)p[sd]\s.*%zmm": {"avx512dq"},
    r"vpdp(?:bus|wss)ds?\s": {"avx512_vnni"},
    r"\{vex\}\s+vpdp(?:bus|wss)ds?\s": {"avx_vnni"},
    r"vpdp(?:bss|bsu|buu)ds?\s": {"avx_vnni_int8"},
    r"vdpbf16ps|vcvtne2ps2bf16": {"avx512_bf16"},
    r"(?:\{vex\}\s+)?vcvtneps2bf16": {"avx512_bf16", "avx_ne_convert"},
    r"vcvtne[eo](?:bf16|ph)2ps|vbcstne": {"avx_ne_convert"},
    r"vpmadd52": {"avx512ifma"},
    r"\{vex\}\s+vpmadd52": {"avx_ifma"},
    r"v(?:add|sub|mul|div|min|max|sqrt|fn?madd\d+|fn?msub\d+)[ps]h\s|vmovw|vmovsh\s|vcvt(?:ph2psx|ps2phx)": {
        "avx512_fp16"
    },
    r"vpermb|vpermi2b|vpermt2b|vpmultishiftqb": {"avx512vbmi"},
    r"vpcompress[bw]|vpexpand[bw]|vpsh[lr]d": {"avx512_vbmi2"},
    r"vpopcnt[bw]": {"avx512_bitalg"},
    r"vpopcnt[dq]": {"avx512_vpopcntdq"},
    r"v?gf2p8": {"gfni"},
    r"tile|tdp|tload": {"amx_tile"},
}  # fmt: skip
NEEDS = [(re.compile(rf"\t(?:{pattern})"), needed) for pattern, needed in PATTERNS.items()]
CALL = re.compile(r"\t(?:call|jmp)q?\s+([A-Za-z_][\w@]*)")
LEVELS = {"avx2": "x86-64-v3", "generic": "x86-64"}
CPUS = tomllib.loads((TESTS / "data" / "cpus.toml").read_text())
# Kernels that between them have every step of the micro-kernel, every conversion, and an epilogue that computes.
FEW = [
    Problem(8, 8, 8, name, out, epilogue=epilogue)
    for name, out, epilogue in [
        ("f32", "f32", "bias+gelu"), ("f16", "f16", ""), ("bf16", "f32", ""), ("int8", "int32", ""),
        ("uint16", "uint16", ""), ("int64", "int64", ""),
    ]
]  # fmt: skip
x86 = pytest.mark.skipif(host().machine not in ("x86_64", "amd64"), reason="LLVM here compiles for another machine")
PACKED = (
    "cpu/test_cpu_packed.py", "cpu/test_cpu_epilogue.py", "cpu/test_cpu_isa.py::test_this_process_is_limited_as_asked",
)  # fmt: skip
PARTS = [
    pytest.param((*PACKED, "-k", "f32 or limited"), id="packed-f32"),
    pytest.param((*PACKED, "-k", "not f32"), id="packed"),
    pytest.param(("ladder/test_ladder.py", "-k", "test_layouts and not packed"), id="ladder"),
    pytest.param(("api/test_api_packing.py", "-k", "not fork and not f64 and not uint"), id="once"),
]


@pytest.mark.process
@pytest.mark.many
@pytest.mark.parametrize("isa", NARROWER)
@pytest.mark.parametrize("part", PARTS)
def test_the_kernels_are_right_when_limited_to(isa, part):
    command = [sys.executable, "-m", "pytest", f"--isa={isa}", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run([*command, *part], cwd=TESTS, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-500:]
    assert int(passed[1]) > 50


def test_this_process_is_limited_as_asked(pytestconfig):
    limit = pytestconfig.getoption("--isa")
    assert host().isa == limit if limit else config.isa_limit() is None


@pytest.mark.many
@pytest.mark.parametrize("isa", NARROWER)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: "-".join(filter(None, (p.dtype, p.out, p.epilogue))))
def test_code_keeps_to_its_registers_and_instructions(isa, problem):
    """Building the kernel also shows that it calls nothing: an image with an outside reference is a CompileError."""
    target = host().limited(isa)
    made = images.product(target, problem)

    def generate():
        return loops.packed(target, made)

    assert jit.load(target, f"packed_{made.name}", generate)["packed"]
    code = llvm.assembly(target, made.name, generate)
    found = re.search(FORBIDDEN[isa], code)
    assert not found, code[found.start() - 200 : found.end() + 50]
    assert "packed:" in code


def features(name):
    """The extensions of a recorded CPU, those of the CPUs that it is like included."""
    cpu = CPUS[name]
    return frozenset(cpu["has"]) | (features(cpu["like"]) if "like" in cpu else frozenset())


def in_llvm(feature):
    """LLVM's name of an extension that Linux calls `feature`."""
    odd = {"abm": "lzcnt", "bmi1": "bmi", "lahf_lm": "sahf", "pni": "sse3", "sse4_1": "sse4.1", "sse4_2": "sse4.2"}
    return odd.get(feature) or feature.replace("amx_", "amx-").replace("_", "")


EVERY = frozenset().union(*(features(name) for name in CPUS))


def modules(target):
    """(name, module) of kernels of every kind for a target."""
    for problem in FEW:
        made = images.product(target, problem)
        yield made.name, loops.packed(target, made)
        once = images.product(target, problem._replace(b_layout="packed"))
        yield f"{once.name} once", loops.packed(target, once, once=True)
    yield "gemv", gemv.gemv(target, images.gemv_product(Problem(8, 1, 8, "int32", "int32")), 6)
    yield "direct", direct.direct(target, direct.cut(target, "f64", "row", 13, 37, 9, True))
    yield "batched", batched.batched(target, batched.Small(5, 7, 9, "int32", "int32", "i32"))


@pytest.fixture(params=CPUS)
def cpu(request, monkeypatch):
    """A recorded CPU, as the target of a process that runs on it."""
    having = features(request.param)
    monkeypatch.setattr(llvm, "host_cpu", lambda: CPUS[request.param]["llvm"])
    monkeypatch.setattr(llvm, "host_features", lambda: {in_llvm(name): name in having for name in EVERY})
    return Target(instruction_set(having), having, request.param)


def lacking(code, having):
    """(instruction, feature) for instructions that a CPU without the feature does not have, and calls that leave."""
    lines = dict.fromkeys(code.splitlines())
    local = {line.rstrip(":") for line in lines if line.endswith(":")}
    calls = [(line.strip(), "outside") for line in lines if (call := CALL.match(line)) and call[1] not in local]
    return calls + [
        (line.strip(), *sorted(needed))
        for line in lines
        for pattern, needed in NEEDS
        if not needed & having and pattern.match(line)
    ]


@pytest.mark.many
@x86
def test_code_for_a_recorded_cpu_uses_what_that_cpu_has(cpu):
    for name, module in modules(cpu):
        assert not lacking(llvm.assembly(cpu, name, lambda made=module: made), cpu.features), name


@x86
@pytest.mark.parametrize(("isa", "plain"), [("avx2", "haswell"), ("generic", "x86-64")])
def test_limited_every_recorded_cpu_is_one_plain_cpu(cpu, isa, plain):
    limited = cpu.limited(isa)
    if ISAS.index(cpu.isa) < ISAS.index(isa):
        assert limited == cpu
    else:
        assert limited == Target(isa, features(plain), cpu.cpu, llvm=LEVELS[isa])


@pytest.mark.many
@x86
@pytest.mark.parametrize(("isa", "plain"), [("avx2", "haswell"), ("generic", "x86-64")])
def test_code_for_a_plain_cpu_uses_what_that_cpu_has(isa, plain):
    target = Target(isa, features(plain), llvm=LEVELS[isa])
    for name, module in modules(target):
        assert not lacking(llvm.assembly(target, name, lambda made=module: made), target.features), name


@pytest.mark.many
@x86
@pytest.mark.parametrize(
    ("name", "some"),
    [
        ("zen_5", {"avx512_bf16", "avx512_vnni", "avx512f", "avx512vl"}),
        ("alder_lake", {"avx", "avx2", "avx_vnni", "f16c", "fma"}),
        ("nehalem", {"sse4_1", "ssse3"}),
    ],
)
def test_instructions_that_a_cpu_lacks_are_seen(name, some):
    having = features(name)
    target = Target(instruction_set(having), having, llvm=CPUS[name]["llvm"])
    code = "".join(llvm.assembly(target, kind, lambda made=module: made) for kind, module in modules(target))
    for feature in some:
        assert feature in {needed for _, needed in lacking(code, having - {feature})}, feature
