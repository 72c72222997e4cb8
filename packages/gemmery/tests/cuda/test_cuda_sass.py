"""Counts of instructions, in recorded machine code and in compiled kernels."""

import pytest

from gemmery.cuda import nvrtc, sass
from gemmery.errors import DeviceError

NEEDS_NVDISASM = pytest.mark.skipif(not sass.nvdisasm(), reason=sass.MISSING)


# Written by nvdisasm for sm_80, cut: a loop without arithmetic inside a loop with it, and constants made by HFMA2.
RECORDED = """\
	.target	sm_80

//--------------------- .text._Zother --------------------------
	.section	.text._Zother,"ax",@progbits
_Zother:
.text._Zother:
        /*0000*/                   EXIT ;

//--------------------- .text._Zkernel --------------------------
	.section	.text._Zkernel,"ax",@progbits
_Zkernel:
.text._Zkernel:
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
        /*0010*/                   HFMA2.MMA R9, -RZ, RZ, 0, 0 ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   LDG.E.128.CONSTANT R4, [R20.64] ;
        /*0040*/                   LDG.E R25, [R34.64] ;
        /*0050*/                   STS.128 [R3], R4 ;
.L_x_3:
        /*0060*/                   LDGSTS.E.BYPASS.128 [R3], [R34.64] ;
        /*0070*/               @P1 BRA `(.L_x_3) ;
        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0090*/                   LDS.64 R6, [R3] ;
        /*00a0*/                   LDSM.16.M88.4 R8, [R3] ;
        /*00b0*/                   FFMA R9, R20, R25, R9 ;
        /*00c0*/                   FFMA R9, R21, R24, R9 ;
        /*00d0*/              @!P2 BRA `(.L_x_1) ;
.L_x_2:
        /*00e0*/                   STG.E.U16 [R2.64], R9 ;
        /*00f0*/                   EXIT ;
.L_x_4:
        /*0100*/                   BRA `(.L_x_4);
        /*0110*/                   NOP;
"""


@pytest.fixture
def code():
    return sass.instructions(sass.section(RECORDED, "_Zkernel"))


@pytest.mark.compiler
def test_each_instruction_is_read(code):
    assert [one.address for one in code] == list(range(0, 0x120, 16))
    assert code[3] == sass.SassInstruction(0x30, "LDG.E.128.CONSTANT", "R4, [R20.64]")
    assert [one.target for one in code if one.opcode == "BRA"] == [0xE0, 0x60, 0x30, 0x100]


@pytest.mark.compiler
def test_kinds_are_counted_those_that_matter_first(code):
    assert list(sass.counts(code).items()) == [
        ("FFMA", 2),
        ("LDG.128", 1),
        ("LDG.32", 1),
        ("LDGSTS.128", 1),
        ("STG.16", 1),
        ("LDS.64", 1),
        ("LDSM.4", 1),
        ("STS.128", 1),
        ("BAR", 1),
        ("BRA", 4),
        ("EXIT", 1),
        ("HFMA2", 1),
        ("IMAD", 1),
    ]


@pytest.mark.compiler
def test_the_main_loop_is_the_innermost_that_multiplies(code):
    loop = sass.main_loop(code)
    assert (loop[0].address, loop[-1].address) == (0x30, 0xD0)
    assert sass.main_loop(code[-3:]) == ()


@pytest.mark.compiler
def test_of_nested_loops_with_arithmetic_the_inner_is_taken():
    line = "        /*{:04x}*/                   {} ;\n"
    text = ".L_a:\n" + line.format(0, "FFMA R0, R0, R0, R0") + line.format(16, "FFMA R0, R0, R0, R0")
    text += ".L_b:\n" + line.format(32, "DFMA R0, R0, R0, R0") + line.format(48, "@P0 BRA `(.L_b)")
    text += line.format(64, "@P1 BRA `(.L_a)")
    assert [one.opcode for one in sass.main_loop(sass.instructions(text))] == ["DFMA", "BRA"]


LINE = "        /*{:04x}*/                   {} ;\n"
NESTED = (  # a step of a tile: two loads, then an inner loop of 2 FFMA that runs four times
    ".L_a:\n"
    + LINE.format(0, "LDG.E R4, [R2.64]")
    + LINE.format(16, "STS [R3], R4")
    + ".L_b:\n"
    + LINE.format(32, "LDS R5, [R3]")
    + LINE.format(48, "FFMA R0, R5, R5, R0")
    + LINE.format(64, "FFMA R1, R5, R5, R1")
    + LINE.format(80, "@P0 BRA `(.L_b)")
    + LINE.format(96, "BAR.SYNC 0x0")
    + LINE.format(112, "@P1 BRA `(.L_a)")
)


# A loop of two products of warpgroups that waits once; a wait that fails is repeated behind the kernel's end.
WARPGROUPS = """
.L_x_1:
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R4 ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x256x16.F32 R24, gdesc[UR8], R24 ;
        /*0040*/                   HGMMA.64x256x16.F32 R24, gdesc[UR8], R24 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
        /*0070*/                   STG.E.U16 [R2.64], R9 ;
        /*0080*/                   EXIT ;
.L_x_2:
        /*0090*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R4 ;
        /*00a0*/               @P0 BRA `(.L_x_3) ;
        /*00b0*/                   BRA `(.L_x_2) ;
"""


@pytest.mark.compiler
def test_code_behind_the_end_of_the_kernel_belongs_to_no_loop():
    counts = sass.counts(sass.main_loop(sass.instructions(WARPGROUPS)))
    assert counts == {
        "HGMMA.64x256x16.F32": 2,
        "SYNCS": 1,
        "WARPGROUP.ARRIVE": 1,
        "WARPGROUP.DEPBAR": 1,
        "BRA": 2,
    }


@pytest.mark.compiler
def test_a_step_counts_the_inner_loop_as_often_as_it_runs():
    code = sass.instructions(NESTED)
    found, passes = sass.step(code, multiplies=8 * 32)
    assert passes == 4
    assert found == {"FFMA": 8, "LDG.32": 1, "LDS.32": 4, "STS.32": 1, "BAR": 1, "BRA": 5}


@pytest.mark.compiler
@pytest.mark.parametrize("multiplies", [0, 7 * 32, 32])
def test_a_step_is_unknown_where_the_passes_of_its_inner_loop_are(multiplies):
    assert sass.step(sass.instructions(NESTED), multiplies) == ({}, 0)


@pytest.mark.compiler
def test_a_main_loop_that_loads_from_global_memory_is_a_whole_step(code):
    assert sass.loading_loop(code) == ()
    assert sass.step(code, 0) == (sass.counts(sass.main_loop(code)), 1)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("FFMA", 32),
        ("FFMA2", 64),
        ("DFMA", 32),
        ("HMMA.16816.F32.BF16", 16 * 8 * 16),
        ("HMMA.1688.F32", 16 * 8 * 8),
        ("DMMA.884", 8 * 8 * 4),
        ("DMMA.16x8x4", 16 * 8 * 4),
        ("HGMMA.64x256x16.F32", 64 * 256 * 16 // 4),
        ("HMMA.STRANGE", 0),
        ("LDS.128", 0),
    ],
)
def test_multiply_adds_of_a_warp_follow_the_shape(name, each):
    assert sass.multiply_adds({name: 3}) == 3 * each


@pytest.mark.compiler
def test_bytes_a_thread_loads_for_a_multiply_add(code):
    found = sass.counts(sass.main_loop(code))
    assert sass.bytes_each(found, "global") == (16 + 4) / 2
    assert sass.bytes_each(found, "shared") == 8 / 2
    assert sass.bytes_each({"HMMA.16816.F32": 4, "LDG.128": 1}, "global") == 0
    assert sass.bytes_each({"FFMA2": 8, "LDS.128": 4}, "shared") == 4


@pytest.mark.compiler
def test_constants_made_by_hfma2_are_no_tensor_cores(code):
    assert not sass.on_tensor_cores(sass.counts(code))
    assert sass.on_tensor_cores({"DMMA.8x8x4": 1})
    assert sass.on_tensor_cores({"HGMMA.64x256x16.F32": 2})


@pytest.mark.compiler
def test_a_kernel_that_is_not_there_is_an_error():
    with pytest.raises(DeviceError, match="_Zother, _Zkernel"):
        sass.section(RECORDED, "_Znothing")


@pytest.mark.compiler
def test_without_nvdisasm_the_way_out_is_said(monkeypatch):
    monkeypatch.setattr(sass, "nvdisasm", lambda: "")
    with pytest.raises(DeviceError, match="pip install nvidia-cuda-nvdisasm"):
        sass.disassembled(b"", "_Zkernel")


@pytest.mark.compiler
@NEEDS_NVDISASM
def test_what_nvdisasm_cannot_read_is_an_error():
    with pytest.raises(DeviceError, match="nvdisasm failed"):
        sass.disassembled(b"no machine code", "_Zkernel")


@pytest.mark.compiler
def test_ptx_is_counted_by_opcode():
    text = ".visible .entry k(\n\t.param .b64 p\n)\n{\n\t.reg .b32 %r<3>;\n\tld.param.b64 \t%rd1, [p];\n$L__BB0_1:\n"
    text += "\t// begin inline asm\n\tfma.rn.f32 %f1, %f2, %f3, %f4;\n\t// end inline asm\n"
    text += "\tmma.sync.m8n8k4 {%f1,%f2}, {%f3},\n\t{%f4};\n"
    text += "\t@%p1 bra \t$L__BB0_1;\n\tfma.rn.f32 \t%f1, %f2, %f3, %f4;\n\tret;\n}\n"
    assert sass.ptx_counts(text) == {"fma.rn.f32": 2, "bra": 1, "ld.param.b64": 1, "mma.sync.m8n8k4": 1, "ret": 1}


@pytest.mark.compiler
def test_every_instruction_of_a_line_of_ptx_is_counted():
    """Inline assembly may have several on a line, in braces, after a label, under a predicate."""
    text = ".entry k(\n)\n{\n\t{ .reg .pred p; setp.ne.b32 p, %r1, 0; wgmma.mma_async.sync.m64n64k16.f32.f16.f16 "
    text += "{%f1, %f2}, %rd1, %rd2, p, 1, 1; }\n\t{ mov.b64 {lo, hi}, %rd1; }\nwait: @!p bra wait; @p ret;\n"
    text += "\t.loc\t1 7 3, function_name $L__info_string0, inlined_at 1 9 1\n\tfma.rn.f32 %f1, %f2, %f3, %f4;\n"
    text += "\tcall.uni (retval0), vprintf, (param0, param1);\n}\n"
    assert sass.ptx_counts(text) == {
        "bra": 1,
        "call.uni": 1,
        "fma.rn.f32": 1,
        "mov.b64": 1,
        "ret": 1,
        "setp.ne.b32": 1,
        "wgmma.mma_async.sync.m64n64k16.f32.f16.f16": 1,
    }


@pytest.mark.compiler
@NEEDS_NVDISASM
@pytest.mark.many
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_a_compiled_tile_loads_two_elements_for_each_row_of_it(arch):
    made = nvrtc.compiled("simt_smem.cu", "simt_smem<double, double, 0, 8>", arch)
    code = sass.instructions(sass.disassembled(made.cubin, made.entry))
    found = sass.counts(sass.main_loop(code))
    assert found["DFMA"] % 8 == 0
    assert found["LDG.64"] == found["STS.64"] == 2 * found["DFMA"] / 8
    assert sass.bytes_each(found, "global") == 2
    assert sass.ptx_counts(made.ptx)["fma.rn.f64"] % 8 == 0
