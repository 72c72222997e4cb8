"""The steps of a basic block joined to functions of the registers, against the same steps one by one."""

import random

import numpy as np
import pytest

from gemmery_emulator import lower
from gemmery_emulator.machine import LaunchConfig
from gemmery_emulator.memory import Global
from gemmery_emulator.ptx.module import parse
from gemmery_emulator.run import run

HEAD = """.version 9.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 out)
{
    .reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<6>; .reg .f32 %f<4>; .reg .b16 %h<3>;
    .shared .align 16 .b8 s[1024];
    ld.param.u64 %rd0, [out];
    mov.u32 %r7, %tid.x;
    mad.wide.u32 %rd0, %r7, 64, %rd0;
    mul.lo.u32 %r7, %r7, 4;
    st.shared.u32 [%r7], %r7;
"""
COMPUTED = (
    "add.s32 {r}, {r}, {s};",
    "sub.u32 {r}, {s}, {r};",
    "mul.lo.s32 {r}, {r}, 3;",
    "mad.lo.s32 {r}, {r}, {r}, {s};",
    "shr.s32 {r}, {r}, 2;",
    "shl.b32 {r}, {r}, 1;",
    "xor.b32 {r}, {r}, {s};",
    "min.s32 {r}, {r}, {s};",
    "mov.u32 {r}, {r};",
    "mov.u32 {r}, %tid.x;",
    "mov.b32 {f}, {r};",
    "mov.b32 {r}, {f};",
    "cvt.rn.f32.s32 {f}, {r};",
    "add.f32 {f}, {f}, {f};",
    "cvt.s64.s32 {d}, {r};",
    "cvt.u32.u64 {r}, {d};",
    "add.s64 {d}, {d}, {d};",
    "cvt.u16.u32 {h}, {r};",
    "add.s16 {h}, {h}, {h};",
    "cvt.s32.s16 {r}, {h};",
    "setp.lt.s32 {p}, {r}, {s};",
    "setp.eq.u32 {p}|{p}, {r}, {s};",
    "and.pred {p}, {p}, !{p};",
    "selp.b32 {r}, {r}, {s}, {p};",
    "@{p} add.s32 {r}, {r}, 5;",
    "@!{p} mov.u32 {r}, {s};",
    "ld.shared.u32 {r}, [%r7];",
    "st.shared.u32 [%r7], {r};",
    "mov.b64 {d}, {{{r}, {r}}};",
    "mov.b64 {d}, 7;",
    "xor.b64 {d}, {d}, {d};",
    "@{p} or.b64 {d}, {d}, 64;",
    "cvt.s8.s32 {h}, {r};",
    "or.b16 {h}, {h}, 256;",
)
BARRIERS = ("bar.sync 0;", "bar.warp.sync -1;")


def program(seed):
    """Random code: forward branches that threads take or not, and a loop around all of it."""
    chance = random.Random(seed)
    names = {"r": ("%r", 6), "f": ("%f", 4), "d": ("%rd", 6), "h": ("%h", 3), "p": ("%p", 4)}

    def spelled(form):
        while "{" in form.replace("{{", ""):
            before, _, after = form.partition("{")
            kind = after[0]
            if kind == "{":
                return "".join((before, "{", spelled(after[1:].replace("}}", "}"))))
            name, count = names.get(kind, ("%r", 6))
            first = 1 if kind == "d" else 0
            value = f"{name}{chance.randrange(first, count)}"
            if kind == "s" and chance.random() < 0.3:
                value = str(chance.randrange(100))
            form = before + value + after[2:]
        return form

    lines = ["mov.u32 %r6, 0;", "TOP:"]
    for part in range(4):
        lines += [spelled(chance.choice(COMPUTED)) for _ in range(chance.randrange(2, 14))]
        lines += [f"@%p{chance.randrange(4)} bra L{part};"]
        lines += [spelled(chance.choice(COMPUTED)) for _ in range(chance.randrange(1, 8))]
        lines += [f"L{part}:", chance.choice(BARRIERS)]
    lines += ["add.s32 %r6, %r6, 1;", "setp.lt.s32 %p0, %r6, 5;", "@%p0 bra TOP;"]
    lines += [f"st.global.u32 [%rd0+{4 * place}], %r{place};" for place in range(6)]
    lines += [f"st.global.f32 [%rd0+{24 + 4 * place}], %f{place};" for place in range(4)]
    lines += ["st.global.u16 [%rd0+40], %h0;", "st.global.u64 [%rd0+48], %rd1;", "st.global.u64 [%rd0+56], %rd2;"]
    return HEAD + "\n".join(lines) + "\nret;\n}"


def results(text):
    """The registers of all threads at the end."""
    memory = Global({"out": 64 * 96})
    launch = LaunchConfig((1, 1, 1), (96, 1, 1), np.uint64(memory.address("out")).tobytes())
    run(lower.lowered(parse(text).kernels["k"]), launch, memory)
    return memory.bytes("out").copy()


@pytest.mark.many
@pytest.mark.parametrize("seed", range(120))
def test_joined_steps_compute_what_single_steps_do(seed, monkeypatch):
    """Whatever is written under a mask, moved, read as another type or guarded, in blocks that diverge and loop."""
    text = program(seed)
    joined = results(text)
    monkeypatch.setattr(lower, "joined", lambda lowering, blocks: blocks)
    assert (joined == results(text)).all(), text


def test_a_copy_is_not_put_over_a_newer_value():
    """A register of one block: first a copy, then computed, then partly overwritten."""
    code = "mov.b64 %rd3, 7; xor.b64 %rd3, %rd3, 3; setp.lt.u32 %p0, %r7, 16; @%p0 or.b64 %rd3, %rd3, 64;"
    text = f"{HEAD}{code} cvt.u32.u64 %r0, %rd3; st.global.u32 [%rd0], %r0; ret;}}"
    assert results(text).view(np.uint32)[::16].tolist() == [68] * 4 + [4] * 92
