"""64-bit ARM: features by the auxiliary vector, instructions of the inner loops, images, and products where it runs.

The code is compiled for several CPUs on every machine; `make test-arm` runs it under QEMU's emulation of them.
"""

from __future__ import annotations

import os
import re
import struct

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery import verify
from gemmery.config import ARM_ISAS
from gemmery.cpu import assembly, elf, images, jit, llvm, loops, target
from gemmery.cpu.ir import Module
from gemmery.cpu.target import ARM_FEATURES, Target, host, hwcaps, instruction_set
from gemmery.errors import CompileError
from gemmery.problem import Problem
from operands import numpy_dtype, random

V8_2 = ("asimdhp", "asimddp")
ALL = (*V8_2, "asimdfhm", "i8mm", "bf16")
CPUS = {"cortex-a72": (), "cortex-a76": V8_2, "neoverse-n1": V8_2, "apple-m1": (*V8_2, "asimdfhm"), "neoverse-v2": ALL}
# The instruction of the inner loop's 24 multiply-adds, by element types, and the feature that it needs; best first.
STEPS = {
    ("f32", "f32"): [("fmla", "")],
    ("f64", "f64"): [("fmla", "")],
    ("f16", "f16"): [("fmlal", "asimdfhm"), ("fmla", "")],
    ("bf16", "bf16"): [("bfmmla", "bf16"), ("fmla", "")],
    ("bf16", "f32"): [("bfmmla", "bf16"), ("fmla", "")],
    ("int8", "int32"): [("smmla", "i8mm"), ("sdot", "asimddp"), ("mla", "")],
    ("uint8", "uint32"): [("ummla", "i8mm"), ("udot", "asimddp"), ("mla", "")],
    ("int32", "int32"): [("mla", "")],
}


def cpu(name):
    features = frozenset({"asimd", "atomics", *CPUS[name]})
    return Target(instruction_set(features), features, name, "aarch64", llvm=name)


@pytest.mark.many
@pytest.mark.parametrize("name", CPUS)
@pytest.mark.parametrize(("dtype", "out"), STEPS)
def test_the_inner_loop_is_multiply_adds_and_no_register_is_spilled(name, dtype, out):
    cpu_ = cpu(name)
    types = images.product(cpu_, Problem(8, 8, 8, dtype, out))
    step = next(step for step, needs in STEPS[dtype, out] if not needs or needs in cpu_.features)
    loop = assembly.inner_loop(llvm.assembly(cpu_, types.name, lambda: loops.packed(cpu_, types)), "tiles")
    names = [line.partition(" ")[0] for line in loop]
    assert sum(each.removesuffix("2") == step for each in names) == 24, loop
    assert not [line for line in loop if "[sp" in line]
    loads, spreads = sum(each in ("ldr", "ldp") for each in names), sum(each in ("dup", "ld1r") for each in names)
    assert spreads == 0
    assert loads <= 7
    assert len(loop) <= 24 + 14


@pytest.mark.many
@pytest.mark.parametrize("bits", [256, 512])
@pytest.mark.parametrize(("dtype", "out"), STEPS)
def test_the_inner_loop_of_sve_has_whole_registers_and_no_spill(dtype, out, bits):
    v1 = Target(
        f"sve_{bits}", frozenset({"asimd", "atomics", *ALL, "sve"}), "neoverse-v1", "aarch64", llvm="neoverse-v1"
    )
    types = images.product(v1, Problem(8, 8, 8, dtype, out))
    loop = assembly.inner_loop(llvm.assembly(v1, types.name, lambda: loops.packed(v1, types)), "tiles")
    names = {"int32": ("mla", "mad"), "f16": ("fmla",)}.get(dtype, (STEPS[dtype, out][0][0],))
    adds = [line for line in loop if line.partition(" ")[0] in names]
    assert len(adds) == 24, loop
    assert all(re.match(r"\w+ z\d+", line) for line in adds)
    assert not [line for line in loop if "[sp" in line]
    assert len(loop) <= 24 + 22


@pytest.mark.many
@pytest.mark.parametrize(("dtype", "out"), [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("int8", "int32")])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_inner_loop_of_several_panels_keeps_sums_in_registers(dtype, out, rows):
    cpu_ = cpu("neoverse-v2")
    types = images.product(cpu_, Problem(8, 8, 8, dtype, out, b_layout="packed"))
    code = llvm.assembly(cpu_, f"once_{types.name}", lambda: loops.packed(cpu_, types, once=True))
    loop = assembly.inner_loop(code, f"abreast_{rows}")
    assert sum(assembly.multiply_adds(line) > 0 for line in loop) == 16
    assert not [line for line in loop if "[sp" in line]


@pytest.mark.many(4)
@pytest.mark.parametrize(("dtype", "out"), STEPS)
def test_a_limited_cpu_has_the_instructions_of_its_level_alone(dtype, out):
    whole = cpu("neoverse-v2")
    forbidden = {
        "neon": "[su]dot|fmlal|[su]mmla|bfmmla|bfdot",
        "neon_dot": "[su]mmla|bfmmla|bfdot",
        "neon_mmla": "usdot",
    }
    for isa in ("neon", "neon_dot", "neon_mmla"):
        limited = whole.limited(isa)
        assert limited.isa == isa
        types = images.product(limited, Problem(8, 8, 8, dtype, out))
        code = llvm.assembly(limited, types.name, lambda limited=limited, types=types: loops.packed(limited, types))
        assert not re.search(rf"\t(?:{forbidden[isa]})2?\t", code)
        assert not re.search(r"\tz\d", code)


def test_a_level_limits_cpus_of_its_architecture_that_have_it():
    whole = cpu("neoverse-n1")
    assert whole.isa == "neon_dot"
    assert whole.limited("neon_mmla") == whole
    assert whole.limited("avx2") == whole
    assert whole.limited("neon").features == {"asimd", "atomics"}
    x86 = Target("avx512", frozenset({"avx512f"}))
    assert x86.limited("neon") == x86


def test_features_are_those_of_the_auxiliary_vector(tmp_path):
    auxv = tmp_path / "auxv"

    def write(*entries):
        auxv.write_bytes(b"".join(struct.pack("<QQ", *entry) for entry in (*entries, (0, 0))))
        return hwcaps(str(auxv))

    assert write((6, 4096)) == frozenset()
    assert write((16, 0b10), (26, 0)) == {"asimd"}
    # What Linux gives on Neoverse V2 is all of these; on N1 those of the first word up to dot products.
    assert write((16, 0xFFFFFFFF), (26, 0xFFFFFFFF)) == {name for name, *_ in ARM_FEATURES}
    assert write((16, 1 << 20 | 1 << 10 | 1 << 8 | 1 << 1), (26, 0)) == {"asimddp", "asimdhp", "atomics", "asimd"}
    assert write((26, 1 << 13)) == {"i8mm"}
    assert write((26, 1 << 14)) == {"bf16"}
    assert hwcaps(str(tmp_path / "missing")) == frozenset()


def test_an_image_refers_to_its_constants_and_functions():
    """adrp, ldr and b of an object for ARM, decoded by hand from the image."""
    cpu_ = cpu("neoverse-n1")

    def generate():
        module = Module(cpu_)
        with module.function("inner", ("ptr", "to")) as f:
            ramp = ", ".join(f"i32 {number}" for number in (3, 1, 4, 1))
            f.line(f"store <4 x i32> <{ramp}>, ptr %to, align 1")
        with module.function("outer", ("ptr", "to")) as f:
            f.call("inner", f["to"])
            f.call("inner", f["to"] + 16)
        return module

    image, entries = elf.flatten(jit._object(cpu_, "test_image", str(generate())))
    assert set(entries) == {"outer", "inner"}
    words = struct.unpack(f"<{len(image) // 4}I", image[: len(image) // 4 * 4])
    page = next(at for at, word in enumerate(words) if word & 0x9F000000 == 0x90000000)
    pages = (words[page] >> 5 & 0x7FFFF) << 2 | words[page] >> 29 & 3
    load = next(word for word in words[page:] if word & 0xFFC00000 == 0x3DC00000)  # ldr of a whole vector register
    at = (page * 4 & ~0xFFF) + (pages << 12) + (load >> 10 & 0xFFF) * 16
    assert struct.unpack_from("<4i", image, at) == (3, 1, 4, 1)
    branches = [at for at, word in enumerate(words) if word & 0x7C000000 == 0x14000000]
    assert branches
    assert {4 * (at + (words[at] & 0x3FFFFFF ^ 0x2000000) - 0x2000000) for at in branches} == {entries["inner"]}


def test_an_image_for_arm_that_needs_something_outside_is_refused():
    cpu_ = cpu("neoverse-n1")
    text = "declare void @outside()\ndefine void @f() {\n call void @outside()\n ret void\n}"
    with pytest.raises(CompileError, match=r"'outside': a kernel may only refer to itself"):
        elf.flatten(jit._object(cpu_, "test_outside", text))


@pytest.mark.parametrize("offset", [0, 8, 0xFFFF, 1 << 20])
def test_the_hole_of_an_image_for_arm_is_filled_with_its_offset(monkeypatch, offset):
    monkeypatch.setattr(elf, "ON_ARM", True)
    register, number, hole = 7, 0x123456789ABCDEF0, jit.HOLE
    value = hole + offset
    built = [0xD2800000 | (value & 0xFFFF) << 5 | register]
    built += [0xF2800000 | part << 21 | (value >> 16 * part & 0xFFFF) << 5 | register for part in (1, 2, 3)]
    other = 0xD2800000 | 5 << 5 | 8  # movz x8, #5, between them
    image = struct.pack("<6I", built[0], other, *built[1:], other) + b"end"
    filled = elf.fill(image, hole, number)
    words = struct.unpack_from("<6I", filled)
    parts = [words[at] >> 5 & 0xFFFF for at in (0, 2, 3, 4)]
    assert sum(part << 16 * at for at, part in enumerate(parts)) == number + offset
    assert (words[1], words[5], filled[24:]) == (other, other, b"end")


@pytest.mark.skipif(not host().is_arm, reason="this machine is no ARM")
def test_this_process_has_the_instructions_of_the_cpu_that_is_emulated():
    wanted = os.environ.get("EMULATED_ISA")
    assert host().isa == wanted if wanted else host().isa in ARM_ISAS
    assert target.sve_bytes(host().features) in (0, 16, 32, 64, 128, 256)
    assert not host().has_sve or target.sve_bytes(host().features) == host().vector_bytes


@pytest.mark.skipif(not host().is_arm, reason="this machine is no ARM")
@pytest.mark.parametrize(("dtype", "out"), STEPS)
def test_products_of_every_step_of_the_micro_kernel(dtype, out):
    """Around 2, 4, 6 and 16 of m and n, and 4 and 8 of k; in blocks of k; every layout."""
    if (dtype, out) == ("bf16", "f32"):
        out = "bf16"
    for m, n, k in [
        (2, 3, 1),
        (6, 16, 4),
        (7, 17, 9),
        (5, 15, 7),
        (13, 5, 33),
        (12, 32, 64),
        (19, 37, 1101),
        (3, 50, 2051),
    ]:
        a, b = random((m, k), dtype, m), random((k, n), dtype, n)
        for a_, b_ in [(a, b), (np.asfortranarray(a), b), (a, np.asfortranarray(b)), (a[::-1], b[:, ::-1])]:
            result = gm.matmul(a_, b_, dtype=numpy_dtype(out))
            assert verify.check(result, a_, b_, verify.blocked).error_over_bound <= 1, (m, n, k)


@pytest.mark.skipif(not host().is_arm, reason="this machine is no ARM")
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_what_is_not_finite_stays_in_its_row_and_column(dtype):
    """BFMMLA and FMLAL: blocks of 2 x 2 sums share registers, but no values."""
    a, b = random((9, 40), dtype, 1), random((40, 35), dtype, 2)
    a[3, 5], a[4, 6], b[7, 11] = np.nan, np.inf, -np.inf
    result = gm.matmul(a, b).astype(np.float32)
    assert np.isnan(result[3]).all()
    others = np.delete(np.delete(result, [3, 4], 0), 11, 1)
    assert np.isfinite(others).all()
    assert not np.isfinite(result[4]).any()
    assert not np.isfinite(result[:, 11]).any()
    assert verify.check(gm.matmul(a, b), a, b, verify.blocked).ok


@pytest.mark.skipif(not host().is_arm, reason="this machine is no ARM")
def test_bfmmla_rounds_and_flushes_as_the_bound_says():
    ones = np.ones((8, 8), ml_dtypes.bfloat16)
    huge = np.full((8, 8), 2.0**100).astype(ml_dtypes.bfloat16)
    tiny = np.full((8, 8), 2.0**-130).astype(ml_dtypes.bfloat16)
    for a, b in [(ones, ones), (huge, huge), (huge, tiny), (tiny, huge), (tiny, tiny), (huge, -huge)]:
        assert verify.check(gm.matmul(a, b), a, b, verify.blocked).ok
    flushed = (gm.matmul(tiny, huge) == 0).all()
    assert flushed == ("bf16" in host().features)
