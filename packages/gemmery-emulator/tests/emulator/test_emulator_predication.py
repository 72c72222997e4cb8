"""Which loads behind a short branch count as executed by the warps that branch around them."""

import numpy as np
import pytest

from gemmery_emulator.counters.merging import predicated
from gemmery_emulator.lower import lowered
from gemmery_emulator.machine import LaunchConfig
from gemmery_emulator.memory import Global
from gemmery_emulator.ptx.module import parse
from gemmery_emulator.run import emulated

PTX = """.version 9.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 p)
{{
    .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>;
    .shared .align 16 .b8 s[64];
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, %tid.x;
    mov.f32 %f1, 0f00000000;
    setp.ge.u32 %p1, %r1, 40;
    {branch}
{body}
L:  mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    st.global.f32 [%rd4], %f1;
    ret;
}}"""
LOAD = "    ld.global.f32 %f1, [%rd1];\n"
MOVE = "    mov.f32 %f2, %f1;\n"
ADD = "    add.f32 %f1, %f1, %f1;\n"
BRANCH = "@%p1 bra L;"


def kernel(body, branch=BRANCH):
    return parse(PTX.format(body=body, branch=branch)).kernels["k"]


def loads(body):
    """Loads that warps executed in the merged view and as PTX says: of four warps two have threads below 40."""
    memory = Global({"x": 512})
    parameters = np.array([memory.address("x")], np.uint64).tobytes()
    run = emulated(lowered(kernel(body)), LaunchConfig((1, 1, 1), (128, 1, 1), parameters, 0), memory, check=False)
    assert run.merged.global_ == run.as_ptx.global_
    assert run.merged.global_.loads.requests == 2
    return run.merged.instructions["ld"], run.as_ptx.instructions["ld"]


def test_a_skipped_load_is_executed_by_all():
    """Four warps execute it, two of them in vain: the requests are those of two in either view."""
    assert loads(LOAD) == (4, 2)


def test_moves_are_free():
    """Six instructions and any number of moves are as short as a predicate takes; one more is a branch."""
    assert loads(LOAD + 5 * ADD + 4 * MOVE) == (4, 2)
    assert loads(LOAD + 6 * ADD) == (2, 2)


@pytest.mark.parametrize(
    "body",
    [
        "    st.global.f32 [%rd1], %f1;\n",
        "    ld.shared.f32 %f1, [s];\n",
        "    bar.sync 0;\n",
        "    @%p2 bra L;\n",
        "M:\n",
    ],
)
def test_what_stays_a_branch(body):
    """A store, shared memory, a barrier, another branch, a way in from elsewhere."""
    assert predicated(kernel(LOAD + ADD))
    assert not predicated(kernel(LOAD + body + ADD))


def test_only_branches_around():
    """Neither arithmetic without a load, nor a jump that all take, nor a loop."""
    assert not predicated(kernel(ADD))
    assert not predicated(kernel(LOAD, "bra L;"))
    assert not predicated(kernel(f"M:\n{LOAD}    @%p1 bra M;\n", ""))
