"""The table of instructions: every entry is found by its opcode, and is all that an instruction needs."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

import gemmery as gm
import gemmery_emulator
from gemmery_emulator import instructions
from gemmery_emulator.instructions import COMPUTED, OTHERS, TABLE, UNKNOWN, find, opcode
from gemmery_emulator.op import Op
from gemmery_emulator.ptx.module import parse
from gemmery_emulator.steps import Handler

SOURCE = Path(gemmery_emulator.__file__).parent
TEXT_METHODS = {"split", "partition", "rpartition", "startswith", "endswith", "removeprefix", "removesuffix", "replace"}
BODY = """.version 8.0
.target sm_90
.address_size 64
.visible .entry f(.param .u64 x) {{
  .reg .b32 %r<9>; .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [x];
  ld.global.u32 %r1, [%rd1];
  {}
  st.global.u32 [%rd1], %r2;
  ret;
}}"""


@pytest.mark.parametrize(
    ("text", "name", "modifiers", "types", "space"),
    [
        ("ld.global.nc.v4.f32", "ld", ("global", "nc", "v4"), ("f32",), "global"),
        ("st.shared::cta.u32", "st", ("shared::cta",), ("u32",), "shared"),
        ("ld.param::entry.u64", "ld", ("param::entry",), ("u64",), "param"),
        ("st.shared::cluster.u32", "st", ("shared::cluster",), ("u32",), "shared::cluster"),
        ("cvt.f32.rn.s32", "cvt", ("rn",), ("f32", "s32"), ""),
        ("mul.wide.u32", "mul", ("wide",), ("u32",), ""),
        ("cp.async.shared.global.cg", "cp.async", ("cg", "shared", "global"), (), "shared"),
        ("cp.async.bulk.wait_group.read", "cp.async.bulk.wait_group", ("read",), (), ""),
        ("mbarrier.try_wait.parity.shared.b64", "mbarrier.try_wait.parity", ("shared",), ("b64",), "shared"),
        (
            "wmma.load.a.sync.aligned.row.m16n16k16.f16",
            "wmma.load",
            ("a", "sync", "aligned", "row", "m16n16k16"),
            ("f16",),
            "",
        ),
        ("barrier.cluster.arrive.relaxed", "barrier.cluster.arrive", ("relaxed",), (), ""),
        ("frobnicate.quickly.b32", "frobnicate", ("quickly",), ("b32",), ""),
        ("bra.uni", "bra", ("uni",), (), ""),
    ],
)
def test_the_parts_of_an_opcode(text, name, modifiers, types, space):
    read = opcode(text)
    assert (read.name, read.modifiers, read.types, read.space) == (name, modifiers, types, space)
    assert sorted(str(read).split(".")) == sorted(text.split("."))


def test_words_out_of_their_place_name_no_instruction():
    assert find(opcode("cvta.u64.to.global")) is UNKNOWN
    assert find(opcode("cvta.to.global.u64")) is TABLE["cvta"]


def test_every_entry_is_found_by_its_opcode():
    lost = [key for key, entry in TABLE.items() if find(opcode(key)) is not entry]
    assert lost == []
    assert len(COMPUTED) > 5000
    assert len(OTHERS) > 80


def test_an_instruction_that_computes_is_one_entry(monkeypatch):
    monkeypatch.setitem(instructions.TABLE, "frobnicate.b32", Op(("b32",), ("b32",), np.invert, kind="frobnicate"))
    x = np.array([5], np.uint32)
    run = gm.emulate(BODY.format("frobnicate.b32 %r2, %r1;"), "f", 1, 1, [x])
    assert x.tolist() == [~5 & 0xFFFFFFFF]
    assert run.instructions["frobnicate"] == 1


def test_an_instruction_that_needs_the_machine_is_one_entry(monkeypatch):
    def count_threads(lowering, instruction, index):
        write = lowering.write(instruction.operands[0], "u32", instruction)
        return lambda machine, mask: write(machine.registers, mask, np.uint32(machine.threads))

    spelled = re.compile(r"muster\.loudly\.u32")
    monkeypatch.setitem(instructions.TABLE, "muster", Handler(step=count_threads, spelled=spelled))
    x = np.array([5], np.uint32)
    run = gm.emulate(BODY.format("muster.loudly.u32 %r2;"), "f", 1, 1, [x])
    assert x.tolist() == [32]
    assert run.instructions["muster"] == 1
    with pytest.raises(gm.EmulationError, match=r"instruction 'muster.quietly.u32 %r2' \(ptx:8\) is not modeled"):
        gm.emulate(BODY.format("muster.quietly.u32 %r2;"), "f", 1, 1, [x])


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("add.u32 %r2, %r1, 1;", ["%r2"]),
        ("st.global.u32 [%rd1], %r1;", []),
        ("ld.global.v2.u32 {%r2, %r3}, [%rd1];", ["%r2", "%r3"]),
        ("atom.global.add.u32 %r2, [%rd1], %r1;", ["%r2"]),
        ("red.global.add.u32 [%rd1], %r1;", []),
        ("redux.sync.add.s32 %r2, %r1, -1;", ["%r2"]),
        ("bar.sync %r1;", []),
        ("nanosleep.u32 %r1;", []),
    ],
)
def test_the_registers_that_an_instruction_writes(statement, names):
    kernel = parse(BODY.format(statement)).kernels["f"]
    assert [register.name for register in instructions.written(kernel.instructions[2])] == names


def dissections(tree):
    """The lines that take the text of an opcode apart."""

    def is_text(node):
        match node:
            case ast.Attribute(attr="opcode" | "spelling") | ast.Name(id="opcode" | "spelling"):
                return True
            case ast.Call(func=ast.Name(id="str"), args=[inner]):
                return is_text(inner)
        return False

    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=method)) if method in TEXT_METHODS and is_text(value):
                yield node.lineno
            case ast.Subscript(value=value) if is_text(value):
                yield node.lineno
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[text]) if is_text(text):
                yield node.lineno


@pytest.mark.parametrize(
    "line", ["one.opcode.split('.')", "str(opcode).partition('.')", "'.cas.' in one.opcode.spelling", "spelling[:2]"]
)
def test_a_dissection_is_seen(line):
    assert list(dissections(ast.parse(line))) == [1]


def test_only_the_reader_takes_opcodes_apart():
    places = {path.name: list(dissections(ast.parse(path.read_text()))) for path in SOURCE.rglob("*.py")}
    assert {name: lines for name, lines in places.items() if lines} == {"instructions.py": places["instructions.py"]}
