"""Registers of one bank that multiply-adds read, in machine code."""

import numpy as np
import pytest

from gemmery.cuda import nvrtc
from gemmery_emulator.pace.register_banks import FFMA, bank_conflicts, code_of


def multiply_add(*registers, keeps=()):
    """The 16 bytes of an FFMA of sm_90: three registers, and the places that keep theirs for the next one."""
    a, b, c = registers
    low = FFMA | 7 << 12 | a << 24 | b << 32
    return low.to_bytes(8, "little") + (c | sum(1 << 58 + place for place in keeps)).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("code", "late"),
    [
        ([multiply_add(2, 4, 6)], 2.0),  # three of the even bank
        ([multiply_add(2, 5, 6)], 1.0),
        ([multiply_add(2, 5, 2)], 0.0),  # one register, read once
        ([multiply_add(2, 4, 6, keeps=(0,)), multiply_add(2, 5, 6)], 1.0),  # 2 and 0: the second reads one of each
        ([multiply_add(2, 4, 6, keeps=(1,)), multiply_add(2, 5, 6)], 1.5),  # kept at another place
        ([bytes(16), multiply_add(2, 4, 6)], 2.0),  # of multiply-adds alone
        ([bytes(16)], 0.0),
        ([], None),
    ],
)
def test_registers_of_one_bank_are_read_in_turn(code, late):
    assert bank_conflicts(b"".join(code), 1) == late


def test_a_bank_that_gives_two_registers_is_late_by_the_third():
    assert bank_conflicts(multiply_add(2, 4, 6), 2) == 1.0
    assert bank_conflicts(multiply_add(2, 5, 6), 2) == 0.0


def test_banks_are_those_of_one_kernel():
    body = "float a = x[0], b = x[1], c = x[2], d = x[3]; for (int i = 0; i < n; ++i) {{ {} }} x[4] = a + b + c + d;"
    loops = {"f": "a = fmaf(a, b, c);", "g": "a = fmaf(b, c, d); b = fmaf(c, d, a); c = fmaf(d, a, b);", "h": "a += b;"}
    text = "".join(f'extern "C" __global__ void {name}(float* x, int n) {{ {body.format(loop)} }}'
                   for name, loop in loops.items())  # fmt: skip
    cubin = nvrtc.compiled("a.cu", "", "sm_90", texts={"a.cu": text}, alone=True).cubin
    whole = np.frombuffer(cubin[: len(cubin) // 16 * 16], np.uint64).reshape(-1, 2)
    counts = {}
    for name in loops:
        words = np.frombuffer(code_of(cubin, name), np.uint64).reshape(-1, 2)
        counts[name] = int((words[:, 0] & 0xFFF == FFMA).sum())
    assert counts["f"] != counts["g"]
    assert min(counts["f"], counts["g"]) > 0 == counts["h"]
    assert sum(counts.values()) <= int((whole[:, 0] & 0xFFF == FFMA).sum())
    assert code_of(cubin, "k") == b""
