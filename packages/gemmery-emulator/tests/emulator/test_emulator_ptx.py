"""PTX is read as it is written: every rung's, Triton's, Numba's and each feature of the language in a few lines.

The files in data/ptx, and how they are launched (x is NumPy's array, all of C order):

- triton_add.ptx: add(x, y, out, n, then two null pointers that Triton's launcher adds), f32, n i32; BLOCK = 256
  elements a block: grid (n + 255) // 256, block 128, shared 0. out = x + y.
- triton_matmul.ptx: matmul(a, b, c, m, n, k, row strides of a, b, c, two null pointers), a and b f16, c f32, ints i32;
  32 x 32 tiles of C: grid ((m + 31) // 32, (n + 31) // 32), block 128, shared 4096. It ran with m, n, k = 100, 90, 72.
- triton_softmax.ptx: softmax(x, out, n, two null pointers), f32, n <= 128 columns, a row a block: grid rows, block 128,
  shared 16.
- All pointers to Triton's kernels are aligned to 16 bytes. Compiled for sm_80 by Triton 3.6.
- numba_add.ptx: add(x, y, out), each a 1-d f32 array given as seven 64-bit values: parent (0), meminfo (0), elements,
  itemsize, data pointer, shape, stride in bytes. Any grid and block of one dimension with a thread for each element.
- numba_matmul.ptx: matmul(a, b, c), each a 2-d f32 array given as nine: parent (0), meminfo (0), elements, itemsize,
  data pointer, rows, columns, both strides in bytes; block (16, 16), grid ((columns + 15) // 16, (rows + 15) // 16).
- Compiled for sm_90 by numba-cuda 0.30 with line information.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from gemmery import dtypes
from gemmery.errors import EmulationError
from gemmery.ladder.cuda import CUDA
from gemmery.problem import Problem
from gemmery_emulator.ptx import (
    Address,
    Immediate,
    Label,
    Line,
    Not,
    Register,
    Special,
    Symbol,
    Vector,
)
from gemmery_emulator.ptx.module import parse

TILE = Address(Register("%rd1", "b64"), 0, (Register("%r2", "b32"), Register("%r3", "b32")))
SAMPLES = sorted((Path(__file__).parents[1] / "data" / "ptx").glob("*.ptx"))
R1, R2, R3 = (Register(f"%r{i}", "b32") for i in (1, 2, 3))
RD1, P1, P2 = Register("%rd1", "b64"), Register("%p1", "pred"), Register("%p2", "pred")


def kernel(body, before="", limits=""):
    """One kernel with that body, some registers declared."""
    registers = ".reg .pred %p<4>; .reg .b32 %r<10>; .reg .b64 %rd<4>; .reg .f32 %f<9>; .reg .f64 %fd<3>;"
    head = f".version 8.0\n.target sm_90\n.address_size 64\n{before}\n"
    text = f"{head}.visible .entry k(.param .u64 k_param_0, .param .u32 n)\n{limits} {{ {registers}\n{body}\n}}"
    return parse(text).kernels["k"]


def operands(statement, **options):
    return kernel(statement, **options).instructions[0].operands


def statements(text):
    """Instructions counted another way: semicolons between the braces, less those of directives."""
    text = re.sub(r"//[^\n]*", "", text)
    start = text.index("\n{\n")
    body = text[start : text.index("\n}\n", start)]
    directives = re.findall(r"(?<!\w)\.(?:reg|shared|local|param|pragma)\b[^;]*;", body)
    return body.count(";") - len(directives)


@pytest.mark.many
@pytest.mark.parametrize("rung", CUDA, ids=lambda rung: rung.name)
def test_every_statement_of_a_rung_is_read_and_stands_in_its_file(rung):
    nvrtc = pytest.importorskip("gemmery.cuda.nvrtc")
    pytest.importorskip("cuda.bindings")
    shapes = [(512, 512, 512), (512, 1, 512), (1, 512, 512), (32, 32, 32)]
    problems = [
        Problem(*shape, name, dtypes.written(name), device="h200") for name in rung.dtypes[::-1] for shape in shapes
    ]
    geometry = next(rung.geometry(problem, rung.default) for problem in problems if not rung.refuses(problem))
    program = nvrtc.compiled(geometry.source, geometry.kernel, "sm_90a")
    found = parse(program.ptx).kernels[program.entry]
    assert len(found.instructions) == statements(program.ptx) > 10
    assert {one.line.file for one in found.instructions} == {geometry.source}
    above = nvrtc.ancestors(nvrtc.text(geometry.source))
    last = len(nvrtc.text(geometry.source).splitlines())
    assert all(1 <= one.line.number <= last for one in found.instructions)
    assert {one.inner.file for one in found.instructions} <= {geometry.source, *nvrtc.headers(), *above}
    assert len({one.inner.file for one in found.instructions}) > 1
    written = program.ptx.splitlines()
    assert all(str(one.opcode) in written[one.ptx_line - 1] for one in found.instructions)
    targets = [one.operands[-1].name for one in found.instructions if one.opcode.name == "bra"]
    assert set(targets) <= set(found.labels)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_samples_of_other_compilers_are_read(path):
    text = path.read_text()
    module = parse(text)
    (found,) = module.kernels.values()
    assert len(found.instructions) == statements(text) > 20
    assert {one.line.file for one in found.instructions} <= {"kernels.py", "standard.py"}
    if path.stem.startswith("triton"):
        assert found.limits == {"reqntid": (128,)}
        assert [one.size for one in found.parameters[-2:]] == [8, 8]


def test_facts_of_other_compilers_are_kept():
    found = {path.stem: parse(path.read_text()) for path in SAMPLES}
    assert (found["triton_add"].version, found["triton_add"].target) == ("8.7", "sm_80")
    (matmul,) = found["triton_matmul"].kernels.values()
    assert [one.offset for one in matmul.parameters] == [0, 8, 16, 24, 28, 32, 36, 40, 44, 48, 56]
    assert (matmul.variables["global_smem"].size, matmul.shared) == (0, 0)
    (tiled,) = found["numba_matmul"].kernels.values()
    assert (tiled.shared, len(tiled.parameters)) == (2048, 27)


@pytest.mark.parametrize(
    ("statement", "read"),
    [
        ("add.s32 %r1, %r2, -5;", (R1, R2, Immediate(-5))),
        ("mov.b32 %r1, 0x2A;", (R1, Immediate(42))),
        ("mov.b32 %r1, 0xFFFFFFFFU;", (R1, Immediate(0xFFFFFFFF))),
        ("mov.b32 %r1, 052;", (R1, Immediate(42))),
        ("mov.b32 %r1, 0b101010;", (R1, Immediate(42))),
        ("mov.b32 %r1, WARP_SZ;", (R1, Immediate(32))),
        ("mov.f32 %f1, 0f3F800000;", (Register("%f1", "f32"), Immediate(0x3F800000, "f32"))),
        ("mov.f32 %f1, 1.5;", (Register("%f1", "f32"), Immediate(0x3FC00000, "f32"))),
        ("mov.f64 %fd1, 0d3FF0000000000000;", (Register("%fd1", "f64"), Immediate(0x3FF0000000000000, "f64"))),
        ("mov.f64 %fd1, -2.0;", (Register("%fd1", "f64"), Immediate(0xC000000000000000, "f64"))),
        ("mov.u32 %r1, %tid.x;", (R1, Special("%tid.x"))),
        ("mov.b64 %rd1, k_param_0;", (RD1, Symbol("k_param_0"))),
        ("ld.param.u32 %r1, [n+4];", (R1, Address(Symbol("n", 4)))),
        ("ld.global.u32 %r1, [%rd1+-4];", (R1, Address(RD1, -4))),
        ("ld.global.u32 %r1, [%rd1-4];", (R1, Address(RD1, -4))),
        ("ld.global.u32 %r1, [ %rd1 + 0 ];", (R1, Address(RD1))),
        ("ld.shared.u32 %r1, [64];", (R1, Address(Immediate(64)))),
        ("ld.global.v2.u32 { %r1, %r2 }, [%rd1];", (Vector((R1, R2)), Address(RD1))),
        ("mov.b64 {_, %r2}, %rd1;", (Vector((Register("_", ""), R2)), RD1)),
        ("setp.eq.s32 %p1|%p2, %r1, 1;", (Vector((P1, P2)), R1, Immediate(1))),
        ("setp.eq.and.s32 %p1, %r1, %r2, !%p2;", (P1, R1, R2, Not(P2))),
        ("cp.tensor.2d.shared::cta [%r1], [%rd1, {%r2, %r3}], [%r2+8];", (Address(R1), TILE, Address(R2, 8))),
        ("fence.mbarrier_init.release.cluster;", ()),
        ("ret;", ()),
    ],
)
def test_an_operand_is_read(statement, read):
    found = kernel(statement).instructions[0]
    assert found.operands == read
    assert str(found.opcode) == re.match(r"[\w.:]+", statement)[0]


def test_a_guard_and_the_text_are_kept():
    found = kernel("@!%p1   add.s32  %r1,\n\t%r2, 1;").instructions[0]
    assert (found.guard, found.negated, found.ptx_line) == (P1, True, 7)
    assert found.text == "@!%p1 add.s32 %r1, %r2, 1"
    assert not kernel("@%p1 bra L; L: ret;").instructions[0].negated


def test_names_in_blocks_are_their_own():
    block = "{ .reg .pred out; .reg .b32 %r1; setp.eq.s32 out, %r1, %r2; @out bra done; done: }"
    found = kernel(f"mov.b32 %r1, 0; {block} {block} mov.b32 %r1, 1;")
    first, one, _, two, _, last = found.instructions
    assert first.operands[0] == last.operands[0] == R1
    assert [each.operands[0].name for each in (one, two)] == ["out", "out.2"]
    assert [each.operands[1].name for each in (one, two)] == ["%r1.2", "%r1.3"]
    assert one.operands[2] == two.operands[2] == R2
    assert found.labels == {"done": 3, "done.2": 5}
    assert found.instructions[4].operands == (Label("done.2"),)
    assert found.registers["out.2"] == "pred"


def test_a_label_at_the_end_is_behind_the_last_instruction():
    assert kernel("bra.uni END; END:").labels == {"END": 1}


@pytest.mark.parametrize("space", [" ", "\n\t\t"])
def test_a_table_of_labels_becomes_labels(space):
    found = kernel(f"ts: .branchtargets{space}A, B; brx.idx %r1, ts; A: ret; B: ret;")
    assert found.instructions[0].operands == (R1, Vector((Label("A"), Label("B"))))
    assert found.labels == {"A": 1, "B": 2}


def test_limits():
    words = ".maxntid 128, 2, 1 .minnctapersm 2 .maxnreg 64 .explicitcluster .reqnctapercluster 2, 1, 1"
    assert kernel("ret;", limits=words).limits == {
        "maxntid": (128, 2, 1),
        "minnctapersm": (2,),
        "maxnreg": (64,),
        "explicitcluster": (),
        "reqnctapercluster": (2, 1, 1),
    }


def test_parameters_lie_as_a_struct_does():
    listed = ".param .u32 a, .param .align 8 .b8 s[12], .param .u64 .ptr .global .align 16 p, .param .f32 f"
    found = parse(f".entry k({listed}) {{ ret; }}").kernels["k"].parameters
    assert [(one.name, one.type, one.offset, one.size) for one in found] == [
        ("a", "u32", 0, 4),
        ("s", "b8", 8, 12),
        ("p", "u64", 24, 8),
        ("f", "f32", 32, 4),
    ]


def test_shared_and_local_memory_is_laid_out_as_ptxas_does():
    """Offsets as in the machine code of ptxas 13.0 for the same declarations: they decide about bank conflicts."""
    body = ".shared .align 1 .b8 a[3]; .shared .f64 b[2][2]; .local .align 16 .b8 depot[20];"
    body += "mov.u32 %r1, used; mov.u32 %r1, x;"
    outside = ".shared .b32 used; .shared .b32 unused[9]; .extern .shared .align 16 .b8 x[];"
    found = kernel(body, before=outside)
    at = {name: (one.space, one.offset, one.size) for name, one in found.variables.items()}
    assert at == {
        "a": ("shared", 0, 3),
        "b": ("shared", 8, 32),
        "used": ("shared", 40, 4),
        "x": ("shared", 48, 0),
        "depot": ("local", 0, 20),
    }
    assert (found.shared, found.local) == (48, 20)  # up to where x begins


def test_dynamic_shared_memory_begins_where_the_strictest_of_its_names_may():
    """As ptxas 13.0 does: 513 bytes count as 528, and both names are offset 528."""
    outside = ".extern .shared .align 16 .b8 x[]; .extern .shared .b8 y[]; .extern .shared .align 64 .b8 unused[];"
    found = kernel(".shared .b8 s[513]; mov.u32 %r1, x; mov.u32 %r1, y;", before=outside)
    assert found.shared == 528
    assert {name: one.offset for name, one in found.variables.items()} == {"s": 0, "x": 528, "y": 528}
    assert kernel(".shared .b8 s[513];", before=outside).shared == 513


def test_initial_values():
    outside = (
        ".const .align 4 .b8 c[3] = {1, 0x2, 255}; .global .f32 f[2][2] = {{0f3F800000, 2.0}, {3}};"
        ".visible .global .align 8 .u64 u = 7; .global .s16 s[] = {-1, 5}; .common .global .u32 zero;"
    )
    found = kernel("ret;", before=outside).variables
    assert found["c"].data == bytes([1, 2, 255])
    assert found["f"].data == struct.pack("<4f", 1, 2, 3, 0)
    assert (found["u"].data, found["u"].offset) == (struct.pack("<Q", 7), 16)
    assert (found["s"].data, found["s"].size) == (struct.pack("<2h", -1, 5), 4)
    assert found["zero"].data == b""
    assert (found["f"].space, found["c"].space, found["c"].offset) == ("global", "const", 0)


def test_lines_follow_what_was_inlined_where():
    body = """
    mov.b32 %r1, 0;
    .loc 1 10 3
    mov.b32 %r1, 1;
    .loc 2 24 51, function_name $L__info_string2, inlined_at 1 16 7
    mov.b32 %r1, 2;
    .loc 3 11 3, function_name $L__info_string3, inlined_at 2 24 51
    mov.b32 %r1, 3;
    mov.b32 %r1, 4;
    .loc 2 24 51, function_name $L__info_string2, inlined_at 1 18 7
    .loc 3 11 3, function_name $L__info_string3, inlined_at 2 24 51
    mov.b32 %r1, 5;
    .loc 1 19 1
    mov.b32 %r1, 6;
    .loc 2 0 1
    mov.b32 %r1, 7;
    .loc 3 11 3
    ret;
    """
    files = '\n.file 1 "/some/folder/k.cu"\n.file 2 "C:\\other\\a.cuh", 12, 34\n.file 3 "b.cuh"'
    section = "\n.section .debug_str\n{\n$L__info_string0:\n.b8 95,90\n}\n.section .debug_macinfo { }"
    text = f".entry k() {{ .reg .b32 %r<2>; {body} }}{files}{section}"
    found = parse(text).kernels["k"].instructions
    assert [str(one.line) for one in found[1:]] == [
        "k.cu:10",
        "k.cu:16",
        *["k.cu:16"] * 2,
        "k.cu:18",
        *["k.cu:19"] * 2,
        "k.cu:18",
    ]
    inner = ["k.cu:10", "a.cuh:24", *["b.cuh:11"] * 3, *["k.cu:19"] * 2, "b.cuh:11"]
    assert [str(one.inner) for one in found[1:]] == inner
    frames = [" ".join(map(str, one.frames)) for one in found[1:]]
    deep = "a.cuh:24 b.cuh:11"
    assert frames == [
        "k.cu:10",
        "k.cu:16 a.cuh:24",
        *[f"k.cu:16 {deep}"] * 2,
        f"k.cu:18 {deep}",
        *["k.cu:19"] * 2,
        f"k.cu:18 {deep}",
    ]
    assert found[0].line == found[0].inner == Line("ptx", 2)
    assert found[0].frames == (Line("ptx", 2),)


def test_frames_of_what_calls_itself_stay_finite():
    again = ".loc 1 5 3, function_name $L__info_string0, inlined_at 1 9 3\n mov.b32 %r1, 1;\n"
    back = ".loc 1 9 3, function_name $L__info_string0, inlined_at 1 5 3\n mov.b32 %r1, 1;\n"
    text = f'.entry k() {{ .reg .b32 %r<2>; {(again + back) * 50} ret; }}\n.file 1 "k.cu"'
    found = parse(text).kernels["k"].instructions
    assert all(len(set(one.frames)) == len(one.frames) <= 2 for one in found)


def test_comments_and_pragmas_are_passed_over():
    found = kernel('/* a; { \n */ .pragma "nounroll; // not";\n// b; }\nret; // c', before="// }\n/* { */")
    assert [(str(one.opcode), one.ptx_line) for one in found.instructions] == [("ret", 11)]


DOUBLE = """
.func (.param .b32 out) twice(.param .b32 x) {
  .reg .b32 %r<3>; .reg .pred %p1;
  ld.param.b32 %r1, [x]; setp.eq.s32 %p1, %r1, 0; @%p1 bra zero;
  add.s32 %r2, %r1, %r1; st.param.b32 [out+0], %r2; ret;
  zero: st.param.b32 [out+0], 0; ret;
}"""
CALL = "{ .param .b32 a; .param .b32 r; st.param.b32 [a+0], %r1; call.uni (r), twice, (a); ld.param.b32 %r2, [r+0]; }"


def run(instructions, labels, registers):
    """The few instructions of these tests, executed by hand."""
    at = 0
    while at < len(instructions):
        one = instructions[at]
        at += 1
        if one.guard is not None and registers.get(one.guard.name, False) == one.negated:
            continue
        to, *given = one.operands or (None,)
        values = [x.bits if isinstance(x, Immediate) else registers.get(x.name) for x in given]
        if str(one.opcode) == "bra":
            at = labels[to.name]
        elif one.opcode.name == "mov":
            registers[to.name] = values[0]
        elif str(one.opcode) == "add.s32":
            registers[to.name] = values[0] + values[1]
        elif str(one.opcode) == "setp.eq.s32":
            registers[to.name] = values[0] == values[1]
        elif str(one.opcode) != "ret":
            raise AssertionError(one)
    return registers


@pytest.mark.parametrize(("given", "expected"), [(0, 0), (5, 20), (-3, -12)])
def test_a_called_function_stands_in_the_place_of_each_call(given, expected):
    found = kernel(f"{CALL} mov.b32 %r1, %r2; {CALL} ret;", before=DOUBLE)
    after = run(found.instructions, found.labels, {"%r1": given})
    assert after["%r2"] == expected
    assert {str(one.opcode) for one in found.instructions} <= {"mov.b32", "add.s32", "setp.eq.s32", "bra", "ret"}
    assert set(after) <= set(found.registers)


def test_parameters_in_registers_and_a_guarded_call():
    outside = ".func (.reg .b32 out) more(.reg .b32 x) { add.s32 out, x, 1; ret; }"
    found = kernel("@%p1 call (%r2), more, (%r1); @!%p1 call (%r3), more, (7); ret;", before=outside)
    assert run(found.instructions, found.labels, {"%r1": 4, "%p1": True}).get("%r2") == 5
    after = run(found.instructions, found.labels, {"%r1": 4, "%p1": False})
    assert (after["%r3"], "%r2" in after) == (8, False)


def test_a_function_that_is_not_here_stays_a_call_by_its_name():
    outside = ".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 v);"
    body = "{ .param .b64 a; .param .b64 b; .param .b32 r; st.param.b64 [a], %rd1; call.uni (r), vprintf, (a, b); }"
    found = kernel(body, before=outside).instructions
    assert [str(one.opcode) for one in found] == ["mov.b64", "call vprintf"]


@pytest.mark.parametrize(
    ("body", "outside", "words"),
    [
        ("add.s32 %r1, %r2, %r10;", "", r"PTX line 7: add.s32 %r1, %r2, %r10;: '%r10' is not a register"),
        ("add.s32 %r1, %q, 1;", "", "'%q' is not a register.*declare it"),
        ("ld.shared.u32 %r1, [tile];", "", "'tile' is not a register"),
        ("bra NOWHERE;", "", "label 'NOWHERE' is not defined in this function"),
        ("A: A: ret;", "", "label A is defined twice"),
        ("mov.b32 %r1, %r2", "", "semicolon"),
        ("{ ret;", "", "brace must be closed"),
        ("ld.u32 %r1, [%rd1;", "", "every bracket must be closed"),
        ("mov.b32 %r1,, %r2;", "", "an operand is missing between commas"),
        ("mov.b32 %r1, %r2 add.s32 %r1, %r1, %r1;", "", "is not a register"),
        ("@%rx bra A; A: ret;", "", "'%rx' is not a register"),
        ("mov.b32 %r1, 089;", "", "'089' is not a register"),
        ("mov.f32 %f1, 0f3F80;", "", "'0f3F80' is not a register"),
        (".reg .v4 .f32 v;", "", "vectors of registers are not modeled"),
        ("call %rd1, (%r1);", "", "ends with its prototype or the list of its targets"),
        ("ret;", ".global .u64 p = {0xff(name)};", "initial value 0xff.name.: numbers and addresses of 8 bytes"),
        ("ret;", ".global .u32 p = {name};", "numbers and addresses of 8 bytes are modeled"),
        ("ret;", ".global .b8 p[1] = {1, 2};", "2 bytes of initial values for 1 bytes"),
        ("ret;", "nonsense", "PTX line 4: nonsense"),
        ("call f, (%r1);", ".func f() { ret; }", "pass as many as declared"),
    ],
)
def test_bad_text_is_refused_with_its_line(body, outside, words):
    with pytest.raises(EmulationError, match=words) as caught:
        kernel(body, before=outside)
    assert "PTX line" in str(caught.value)


def test_a_text_without_a_kernel_is_refused():
    with pytest.raises(EmulationError, match=r"no \.entry"):
        parse(".version 8.0\n.target sm_90\n")
