"""PTX that was damaged at random, and programs without bounds, are errors in words or run: never another exception."""

import random
import re
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import gemmery as gm
from gemmery.errors import EmulationError
from gemmery_emulator.arguments import bound
from gemmery_emulator.lower import lowered
from gemmery_emulator.machine import LaunchConfig
from gemmery_emulator.printing import WIDEST
from gemmery_emulator.ptx.module import parse
from gemmery_emulator.run import run

DATA = Path(__file__).parents[1] / "data" / "ptx"
# nvrtc_mixed.txt, by NVRTC 13.5: calls, a switch, printf, shared and local memory, cp.async, ldmatrix, atomics.
TEXTS = [(DATA / name).read_text() for name in ("nvrtc_mixed.txt", "numba_matmul.ptx", "triton_softmax.ptx")]
TOKEN = re.compile(r"[\w$%]+|\s+|.", re.DOTALL)
PIECES = (
    "0 1 -1 4294967296 99999999999999999999999 %r1 %rd1 %p1 %f1 .b128 .b65536 .align .f16 [ ] { } ; , ( ) _ . .v4 .u8 "
    '.pred 0f3F 1e999 " %tid.x bra ret call @ ! : | - + < > .v8 .s64 .param .shared .local .global .const .reg .func '
    ".entry .b8 0x .extern"
)
WORDS = tuple(re.findall(r"\S+", PIECES))
STEPS = 200  # basic blocks of a damaged kernel


def mutant(chance, text):
    """One to three tokens changed, left out, put in or exchanged, or the text cut off."""
    tokens = TOKEN.findall(text)
    for _ in range(chance.randint(1, 3)):
        place, other = chance.randrange(len(tokens)), chance.randrange(len(tokens))
        match chance.randrange(6):
            case 0:
                tokens[place] = chance.choice(WORDS)
            case 1:
                del tokens[place]
            case 2:
                tokens.insert(place, chance.choice(WORDS))
            case 3:
                tokens[place], tokens[other] = tokens[other], tokens[place]
            case 4:
                tokens[place] = chance.choice([one for one in tokens if one[0] == tokens[place][0]])
            case _ if chance.random() < 0.2:
                del tokens[place + 1 :]
    return "".join(tokens)


def launched(text):
    """Run each kernel of a PTX text on one warp, with zeros as arguments."""
    for kernel in parse(text).kernels.values():
        program = lowered(kernel)
        pointers = [one.size == 8 and one.type in ("u64", "b64") for one in kernel.parameters]
        args = [
            np.zeros(512, np.uint8) if pointer else bytes(one.size)
            for pointer, one in zip(pointers, kernel.parameters, strict=True)
        ]
        given = bound(kernel, args)
        if kernel.shared < 1 << 16 and kernel.local < 1 << 16:
            launch = LaunchConfig((1, 1, 1), (32, 1, 1), given.parameters, 1024)
            run(program, launch, given.memory, max_steps=STEPS)


@pytest.mark.many
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("text", range(len(TEXTS)))
def test_damaged_ptx_is_an_error_in_words_or_runs(text, seed):
    chance = random.Random(seed)
    for kernel in parse(TEXTS[text]).kernels.values():
        lowered(kernel)
    for number in range(45):
        damaged = mutant(chance, TEXTS[text])
        try:
            launched(damaged)
        except EmulationError:
            pass
        except Exception as error:
            raise AssertionError(f"mutant {number} of seed {seed}:\n{damaged}") from error


@pytest.mark.parametrize("way", ["fewer", "more", "others"])
def test_an_instruction_with_other_operands_is_an_error_in_words_or_is_taken(way):
    """Every instruction of taken.txt: an operand left out, put in, or another in its place."""
    registers = ".reg .pred p<9>; .reg .b16 h<40>; .reg .b32 r<99>; .reg .b64 d<40>; .reg .f32 f<40>; .reg .f64 g<40>;"
    chance = random.Random(0)
    barriers = ["bar.sync 0, 64;", "barrier.sync.aligned r1;", "bar.red.popc.u32 r1, 0, 32, p1;", "bar.arrive 1, 64;"]
    for line in [*(DATA / "taken.txt").read_text().splitlines(), *3 * barriers]:
        opcode, _, rest = line.rstrip(";").partition(" ")
        operands = re.findall(r"[^,\[\]{}]*\[[^\]]*\]|\{[^}]*\}|[^,]+", rest)
        new = chance.choice(["r1", "d1", "p1", "5", "[d1]", "{r1,r2}", "{}", "_", "!p1", "x", "%tid.x", "1.5"])
        place = chance.randrange(len(operands) + 1)
        operands[place : place + (way != "more")] = [] if way == "fewer" else [new]
        body = f"{registers} .reg .b128 q<9>; .shared .align 16 .b8 S[4096];\n{opcode} {', '.join(operands)};\nret;"
        text = f".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 x) {{ {body} }}"
        try:
            launched(text)
        except EmulationError:
            pass
        except Exception as error:
            raise AssertionError(text) from error


FOUND = {
    ".version\n.target sm_90\n.entry f() { ret; }": "",
    ".entry f() { .reg .b65536 %r<2>; mov.b32 %r1, 1; ret; }": "registers of type .b65536 are not modeled",
    ".entry f() { .reg .b32 %r<2>; ld.global.u32 %r1, [_]; ret; }": "",
    ".entry f() { .reg .b32 %r<2>; mov.b32 %r1, _; ret; }": "the sink _ as a source",
    ".entry f() { .reg .b32 %r<2>; mov.b32 %r1, 99999999999999999999; ret; }": "a constant has at most 64 bits",
    ".entry f() { .reg .b32 %r<2>; ld.u32 %r1, [%r1+9999999999999999999999]; ret; }": "an offset has at most 64 bits",
    ".entry f() { .shared .align 0 .b8 x[4]; ret; }": "an alignment must be a power of two",
    ".entry f() { .shared .align 3 .b8 x[4]; ret; }": "an alignment must be a power of two",
    ".entry f() { .local .b8 x[99999999999]; ret; }": "more than a device has",
    ".global .b8 x[9999999999999999]; .entry f() { ret; }": "more than a device has",
    ".entry f() { .reg .b32 %r<2>; bra.sometimes %r1; ret; }": "is not modeled",
    ".entry f() { . ; ret; }": "",
    ".entry f() { .branchtargets a; ret; }": "has no name",
    ".entry f() { L: .branchtargets a; .branchtargets b; ret; }": "has no name",
    ".entry f() { .reg .b32 %r<2>; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}; ret; }": "with these operands",
    ".entry f() { .reg .b64 %d<2>; cvta.global.u64 %d1; ret; }": "with these operands",
    ".func g(.reg) { ret; } .entry f() { ret; }": "a register is declared as .reg",
    ".entry f(.param .b128 x) { ret; }": "",
    """.extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b); .global .b8 text[3] = {37, 100, 0};
       .entry f() { .reg .b32 %r<2>; .reg .b64 %d<3>; mov.u64 %d1, text; .param .b64 p; .param .b64 q; .param .b32 r;
       st.param.b64 [p], %d1; st.param.b64 [q], 0; call.uni (r), vprintf, (p, q); ld.param.b32 %r1, [r]; ret; }""": "",
    """.func g(.param .b32 a) { .reg .b32 %r<2>; ld.param %r1, [a]; ret; }
       .entry f() { .param .b32 b; call g, (b); ret; }""": "parameters are read by ld",
}


@pytest.mark.parametrize("text", FOUND)
def test_what_damage_has_found_is_refused_in_words(text):
    """ "" where it does not matter which error it is, or whether it is one."""
    words = FOUND[text]
    if words:
        with pytest.raises(EmulationError, match=rf"(?s)(PTX line \d|ptx:\d).*{words}|{words}.*ptx:\d"):
            launched(text)
    else:
        with suppress(EmulationError):
            launched(text)


# ---- programs without bounds ----


def called(depth, twice):
    """f0 to f{depth}, each of which calls the one before it, once or twice."""
    functions = [".func f0() { ret; }"]
    for number in range(1, depth + 1):
        calls = f"call f{number - 1}, ();" * (2 if twice else 1)
        functions.append(f".func f{number}() {{ {calls} ret; }}")
    return "\n".join([*functions, f".visible .entry k() {{ call f{depth}, (); ret; }}"])


def test_calls_without_bound_are_refused_in_words():
    start = time.process_time()
    with pytest.raises(EmulationError, match="nested more than 64 deep"):
        parse(called(3000, twice=False))
    with pytest.raises(EmulationError, match="more than 262,144 instructions: every call copies its function"):
        parse(called(40, twice=True))
    assert len(parse(called(40, twice=False)).kernels["k"].instructions) < 200
    assert len(parse(called(10, twice=True)).kernels["k"].instructions) < 1 << 13
    assert time.process_time() - start < 30  # it does not begin to copy


@pytest.mark.parametrize("conversion", ["%1000000000d", "%.1000000000f", "%*d", "%-9999s", "%9999c"])
def test_a_wide_number_is_refused_in_words(conversion, capsys):
    more = "2000000000, " if "*" in conversion else ""
    value = {"f": "1.0", "s": '"x"'}.get(conversion[-1], "7")
    code = f'#include <cstdio>\n__global__ void f() {{ printf("{conversion}", {more}{value}); }}'
    with pytest.raises(EmulationError, match=rf"kernel.cu:2: printf: .* pads to .* characters; {WIDEST:,} at most"):
        gm.emulate(code, "f", 1, 1, [])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("side", [float("inf"), float("nan"), 1.5, "4", None, [], (1, float("inf"))])
def test_a_grid_that_is_no_number_is_refused_in_words(side):
    for name in ("grid", "block", "cluster"):
        if (name, side) != ("cluster", None):
            with pytest.raises(gm.ArgumentError, match=rf"{name}=.*whole number >= 1"):
                gm.emulate("__global__ void f() {}", "f", **({"grid": 1, "block": 1} | {name: side}), args=[])
