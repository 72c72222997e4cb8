"""A trace keeps what pictures show: first accesses by warp, what lies in shared memory, lanes around a branch."""

import numpy as np
import pytest

from gemmery import dtypes
from gemmery.errors import ArgumentError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.problem import Problem
from gemmery_emulator.lower import lowered
from gemmery_emulator.machine import LaunchConfig
from gemmery_emulator.memory import Global
from gemmery_emulator.ptx.module import parse
from gemmery_emulator.run import run
from gemmery_emulator.trace import Trace
from gemmery_emulator.trace.selection import select
from gemmery_lab.inspection.gather import count_rung

# Each thread copies x[t] to shared[t * 8] and reads shared[(t ^ 1) * 4] back; threads from 20 on add 1 to it.
KERNEL = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 k_x, .param .u64 k_y)
{
 .reg .pred %p<4>;
 .reg .b32 %r<16>;
 .reg .f32 %f<8>;
 .reg .b64 %rd<16>;
 .shared .align 4 .b8 held[2048];
 ld.param.u64 %rd1, [k_x];
 ld.param.u64 %rd2, [k_y];
 mov.u32 %r1, %tid.x;
 mul.wide.u32 %rd3, %r1, 4;
 add.s64 %rd4, %rd1, %rd3;
 ld.global.f32 %f1, [%rd4];
 mov.f32 %f5, %f1;
 shl.b32 %r2, %r1, 3;
 mov.u32 %r3, held;
 add.s32 %r4, %r3, %r2;
 st.shared.f32 [%r4], %f5;
 bar.sync 0;
 xor.b32 %r5, %r1, 1;
 shl.b32 %r6, %r5, 2;
 add.s32 %r7, %r3, %r6;
 ld.shared.f32 %f2, [%r7];
 setp.lt.u32 %p1, %r1, 20;
 @%p1 bra $L_end;
 add.f32 %f2, %f2, 0f3F800000;
 add.f32 %f2, %f2, 0f3F800000;
$L_end:
 add.s64 %rd5, %rd2, %rd3;
 st.global.f32 [%rd5], %f2;
 ret;
}
"""
THREADS = 64


def traced_by(text, chunk=THREADS):
    trace, memory = Trace(), Global({"x": 4 * THREADS * 3, "y": 4 * THREADS * 3})
    parameters = b"".join(memory.address(name).to_bytes(8, "little") for name in ("x", "y"))
    kernel = parse(text).kernels["k"]
    run(lowered(kernel), LaunchConfig((3, 1, 1), (THREADS, 1, 1), parameters), memory, [trace], chunk=chunk)
    return trace, memory, kernel


@pytest.fixture(scope="module")
def traced():
    return traced_by(KERNEL)


def accesses(trace, opcode):
    return next(warps for warps in trace.accesses.values() if warps[0].opcode == opcode)


def test_each_warp_of_the_first_block_is_kept_once(traced):
    trace, memory, _ = traced
    for opcode, space, address in (
        ("st.shared.f32", "shared", lambda t: 8 * t),
        ("ld.shared.f32", "shared", lambda t: 4 * (t ^ 1)),
        ("ld.global.f32", "global", lambda t: memory.address("x") + 4 * t),
        ("st.global.f32", "global", lambda t: memory.address("y") + 4 * t),
    ):
        warps = accesses(trace, opcode)
        assert [one.warp for one in warps] == [0, 1]
        assert {one.space for one in warps} == {space}
        assert [a for one in warps for a in one.addresses] == [address(t) for t in range(THREADS)]
    assert len(trace.accesses) == 4


def test_an_access_of_other_blocks_alone_is_not_kept():
    second = KERNEL.replace(
        "bar.sync 0;",
        "mov.u32 %r8, %ctaid.x; setp.eq.u32 %p2, %r8, 1;\n @%p2 st.shared.u8 [%r4], %r1;\n bar.sync 0;",
    )
    trace, _, _ = traced_by(second, chunk=3 * THREADS)
    assert len(trace.accesses) == 4
    assert all(warps for warps in trace.accesses.values())
    assert [one.opcode for one in select(trace, {"x": (64, 4)}).shared] == ["ld.shared.f32", "st.shared.f32"]


def test_an_access_is_kept_when_the_first_block_comes_to_it():
    looped = KERNEL.replace("bar.sync 0;", "mov.u32 %r8, %ctaid.x;\n$L_again: setp.eq.u32 %p2, %r8, 1;").replace(
        " xor.b32 %r5",
        " @%p2 st.shared.u8 [%r4], %r1;\n add.u32 %r8, %r8, 1; setp.lt.u32 %p3, %r8, 4;"
        " @%p3 bra $L_again;\n xor.b32 %r5",
    )
    trace, _, _ = traced_by(looped, chunk=3 * THREADS)
    assert [a for one in accesses(trace, "st.shared.u8") for a in one.addresses] == [8 * t for t in range(THREADS)]


@pytest.mark.many
@pytest.mark.parametrize("rung", CUDA, ids=lambda rung: rung.name)
def test_a_ragged_product_of_each_rung_has_its_pictures(rung):
    """Where a tile is larger than the product some accesses have no active lane in the first block."""
    dtype, taken = rung.dtypes[0], 0
    for m, n, k in ((1, 1, 1), (7, 7, 7), (1, 33, 33), (33, 33, 33), (33, 48, 48), (16, 16, 16)):
        problem = Problem(m, n, k, dtype, dtypes.written(dtype), device="h200")
        try:
            chosen = count_rung(rung, problem, rung.default, "sm_90a").chosen
        except RefusedError:
            continue
        assert chosen.global_ or chosen.timeline
        taken += 1
    assert taken


def test_what_lies_in_shared_memory_is_known_by_where_it_came_from(traced):
    trace, memory, _ = traced
    assert trace.sources == {(0, 8 * t): memory.address("x") + 4 * t for t in range(THREADS)}


def test_each_part_of_a_vector_has_its_own_source():
    wide = KERNEL.replace("%r1, 4", "%r1, 8").replace("ld.global.f32 %f1", "ld.global.v2.f32 {%f1, %f3}")
    trace, memory, _ = traced_by(wide.replace("st.shared.f32 [%r4], %f5", "st.shared.v2.f32 [%r4], {%f3, %f5}"))
    start = memory.address("x")
    expected = {(0, 8 * t): start + 8 * t + 4 for t in range(THREADS)}
    assert trace.sources == expected | {(0, 8 * t + 4): start + 8 * t for t in range(THREADS)}


def test_a_generic_store_is_followed_too():
    generic = KERNEL.replace(
        "st.shared.f32 [%r4], %f5", "cvt.u64.u32 %rd6, %r4; cvta.shared.u64 %rd7, %rd6;\n st.f32 [%rd7], %f5"
    )
    trace, memory, _ = traced_by(generic.replace("ld.global.f32", "ld.f32"))
    assert trace.sources == {(0, 8 * t): memory.address("x") + 4 * t for t in range(THREADS)}
    assert select(trace, {"x": (4 * 16, 4)}).untraced == ()


def test_a_tile_of_what_was_computed_is_not_known():
    trace, _, _ = traced_by(KERNEL.replace("mov.f32 %f5, %f1", "add.f32 %f5, %f1, %f1"))
    found = select(trace, {"x": (4 * 16, 4)})
    assert trace.sources == {}
    assert (found.tiles, found.untraced) == ((), ("x",))


def test_a_packed_register_comes_from_its_lower_half():
    packed = KERNEL.replace(".reg .f32 %f<8>;", ".reg .f32 %f<8>; .reg .b16 %h<4>;")
    packed = packed.replace("ld.global.f32 %f1, [%rd4];", "ld.global.v2.b16 {%h1, %h2}, [%rd4];")
    trace, memory, _ = traced_by(packed.replace("mov.f32 %f5, %f1;", "mov.b32 %f5, {%h1, %h2};"))
    assert trace.sources == {(0, 8 * t): memory.address("x") + 4 * t for t in range(THREADS)}


def test_a_parted_warp_is_followed_until_its_lanes_meet(traced):
    trace, _, kernel = traced
    (found,) = trace.divergences.values()
    assert found.warp == 0
    assert found.taken == tuple(lane < 20 for lane in range(32))
    assert found.active == (True,) * 32
    before, way, after = found.stretches
    assert before.lanes == after.lanes == (True,) * 32
    assert way.lanes == tuple(lane >= 20 for lane in range(32))
    assert (way.instructions, after.instructions) == (2, 3)
    line = next(one.line for one in kernel.instructions if one.opcode.name == "bra")
    assert found.line == line


def test_the_costliest_are_chosen_and_the_tile_with_its_store_and_load(traced):
    trace, _, _ = traced
    found = select(trace, {"x": (4 * 16, 4)})
    assert [one.opcode for one in found.shared] == ["ld.shared.f32", "st.shared.f32"]
    (tile,) = found.tiles
    assert tile.held[8 * 19] == (1, 3)
    assert (tile.store.opcode, tile.load.opcode) == ("st.shared.f32", "ld.shared.f32")
    assert len(found.divergences) == 1


def test_a_line_chooses_and_one_without_access_is_refused(traced):
    trace, _, _ = traced
    store = accesses(trace, "st.shared.f32")[0]
    found = select(trace, {}, str(store.line))
    assert [one.opcode for one in found.shared] == ["st.shared.f32"]
    assert found.global_ == found.divergences == ()
    with pytest.raises(ArgumentError, match=str(store.line)):
        select(trace, {}, "ptx:1")
    with pytest.raises(ArgumentError, match=f"write it as FILE:LINE; lines that have: .*{store.line}"):
        select(trace, {}, str(store.line.number))


def test_a_trace_changes_nothing(traced):
    _, memory, _ = traced
    assert not memory.bytes("y").view(np.float32)[:20].any()
    assert (memory.bytes("y").view(np.float32)[20:64] == 2).all()
