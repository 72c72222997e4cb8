"""Modifiers in any order, as ptxas takes them: one spelling for each instruction."""

import re

import numpy as np
import pytest

import gemmery as gm
from gemmery_emulator.control import BARRIERS
from gemmery_emulator.instructions import COMPUTED, canonical

HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"
TYPE = re.compile(r"([busf]\d+|bf16|tf32|e\dm\d|pred)(x\d)?")
FIRST = re.compile(
    r"(mul|mad|mul24|mad24|madc|dp2a)\.(lo|hi|wide)|shf\.[lr]|div\.full|cvt\.pack|wmma\.mma"
    r"|barrier(\.cta)?\.arrive|\w+(\.cta|\.warp)?"
)
SPELLED = [*COMPUTED, *BARRIERS]


def shuffled(opcode, random):
    """The same opcode, its modifiers in another order, its types and layouts in theirs."""
    first = FIRST.match(opcode)[0]
    words = opcode.removeprefix(first).split(".")[1:]
    types = iter([word for word in words if TYPE.fullmatch(word)])
    layouts = iter([word for word in words if word in ("row", "col")])
    mixed = [words[place] for place in random.permutation(len(words))]
    turns = [
        next(types) if TYPE.fullmatch(word) else next(layouts) if word in ("row", "col") else word for word in mixed
    ]
    return ".".join((first, *turns))


def test_every_opcode_is_found_in_other_spellings():
    """min.relu.s32 and min.s32.relu are both in the tables: one stands for the other."""
    random = np.random.default_rng(0)
    twins = {"min.relu.s32", "max.relu.s32", "min.relu.s16x2", "max.relu.s16x2"}
    others = {shuffled(opcode, random): opcode for opcode in SPELLED if ".relu" not in opcode or opcode not in twins}
    wrong = {other: opcode for other, opcode in others.items() if canonical(other) != opcode and other not in SPELLED}
    assert wrong == {}
    assert len(others.keys() - set(SPELLED)) > 3000


def test_a_spelling_of_the_tables_stays():
    assert [canonical(opcode) for opcode in SPELLED] == SPELLED


@pytest.mark.parametrize(
    ("written", "spelled"),
    [
        ("ldmatrix.sync.aligned.x4.m8n8.trans.shared.b16", "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"),
        (
            "wmma.mma.sync.aligned.row.col.m8n8k4.f64.f64.f64.f64.rn",
            "wmma.mma.sync.aligned.row.col.m8n8k4.rn" + 4 * ".f64",
        ),
        ("cp.async.shared.global.cg", "cp.async.cg.shared.global"),
        ("ld.f32.global.nc", "ld.global.nc.f32"),
        ("bar.red.u32.popc", "bar.red.popc.u32"),
        ("fence.gpu.sc", "fence.sc.gpu"),
        # Not another order but another instruction, or none.
        ("mul.s32.lo", "mul.s32.lo"),
        ("cvt.rn.f64.f32", "cvt.rn.f64.f32"),
        ("add.rn.rn.f32", "add.rn.rn.f32"),
        ("cvta.global.to.u64", "cvta.global.to.u64"),
        ("cp.async.ca.global.shared", "cp.async.ca.global.shared"),
        ("mma.sync.aligned.m16n8k16.col.row.f32.f16.f16.f32", "mma.sync.aligned.m16n8k16.col.row.f32.f16.f16.f32"),
        ("bra.uni", "bra.uni"),
        ("exit", "exit"),
    ],
)
def test_spellings_of_opcodes(written, spelled):
    assert canonical(written) == spelled


def test_three_operands_of_min_and_max():
    """NaN counts only where .NaN says so; min.f32 and max.f32 have three operands from sm_100 on."""
    x = np.array([[1, 5, 3], [np.nan, 2, 1], [-1, np.nan, np.nan], [np.nan] * 3, [-0.0, 0.0, -0.0]], np.float32)
    y = np.zeros((4, 5), np.float32)
    ways = ("max", "min", "max.NaN", "min.ftz.NaN")
    body = " ".join(f"{way}.f32 %f4, %f1, %f2, %f3; st.global.f32 [%rd4+{20 * i}], %f4;" for i, way in enumerate(ways))
    text = f"""{HEAD}.visible .entry f(.param .u64 x, .param .u64 y) {{
      .reg .f32 %f<5>; .reg .b64 %rd<5>; .reg .b32 %r1;
      ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; mov.u32 %r1, %tid.x;
      mul.wide.u32 %rd3, %r1, 12; add.u64 %rd3, %rd1, %rd3; mul.wide.u32 %rd4, %r1, 4; add.u64 %rd4, %rd2, %rd4;
      ld.global.f32 %f1, [%rd3]; ld.global.f32 %f2, [%rd3+4]; ld.global.f32 %f3, [%rd3+8];
      {body} ret; }}"""
    gm.emulate(text, "f", 1, 5, [x, y])
    nan = np.nan
    expected = [[5, 2, -1, nan, 0], [1, 1, -1, nan, -0.0], [5, nan, nan, nan, 0], [1, nan, nan, nan, -0.0]]
    np.testing.assert_array_equal(y, np.array(expected, np.float32))
    assert np.signbit(y[1, 4])
    assert not np.signbit(y[0, 4])


POINTERS = """
__device__ float x[4] = {1, 2, 3, 4};
__device__ float* p = x + 1;
__constant__ float* both[2] = {x, x + 2};
struct S { float* a; int n; };
__device__ S s = {x + 3, 7};
__device__ S* to = &s;
__device__ const char* names[2] = {"ab", "cd"};
__device__ int one(int n) { return n; }
__device__ int (*table[2])(int) = {one, one};
extern "C" __global__ void follow(float* y) {
  y[0] = p[0]; y[1] = both[1][0]; y[2] = s.a[0]; y[3] = names[1][0]; y[4] = to->n; y[5] = to->a[0];
}
extern "C" __global__ void moved(float* y) { y[0] = *p; }
extern "C" __global__ void held(unsigned long long* y) { y[0] = (unsigned long long)table[y[0]]; }
"""


def test_variables_that_begin_with_addresses_of_others():
    y = np.zeros(6, np.float32)
    assert gm.emulate(POINTERS, "follow", 1, 1, [y]).findings == ()
    assert y.tolist() == [2, 3, 4, ord("c"), 7, 4]


def test_a_table_of_functions_is_read_as_addresses_too():
    first, second = np.zeros(1, np.uint64), np.ones(1, np.uint64)
    gm.emulate(POINTERS, "held", 1, 1, [first])
    gm.emulate(POINTERS, "held", 1, 1, [second])
    assert first[0] == second[0] > 1  # both are of one function


def test_a_special_register_without_a_value_is_refused_where_it_is_reached():
    body = "setp.ne.u32 %p1, %r1, 0; @%p1 bra END; mov.u32 %r1, %aggr_smem_size; END:"
    text = f"""{HEAD}.visible .entry f(.param .u32 n) {{ .reg .pred %p1; .reg .b32 %r1;
      ld.param.u32 %r1, [n]; {body} ret; }}"""
    gm.emulate(text, "f", 1, 1, [np.int32(1)])
    with pytest.raises(gm.EmulationError, match="special register %aggr_smem_size"):
        gm.emulate(text, "f", 1, 1, [np.int32(0)])
