"""What the counters make of the machine's events: memory, banks, instructions, branches, lines, both views."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gemmery as gm
from gemmery_emulator.counters import Counters, _cost, _counted
from gemmery_emulator.counters.counts import Banked, Counts, MemoryTraffic, SharedTraffic, Traffic
from gemmery_emulator.counters.merging import Merge
from gemmery_emulator.instructions import COMPUTED
from gemmery_emulator.machine import Access
from gemmery_emulator.ptx import Line
from gemmery_emulator.ptx.module import parse

PTX = """.version 9.0
.target sm_90
.address_size 64
.visible .entry k()
{
    .reg .pred %p<9>; .reg .b32 %r<19>; .reg .b64 %rd<9>; .reg .f32 %f<19>;
    .shared .align 16 .b8 s[4096];
    ld.global.f32 %f1, [%rd1];
    ld.shared.f32 %f2, [%r3];
    ld.shared.f32 %f3, [%r3+4];
    fma.rn.f32 %f4, %f1, %f2, %f3;
    @%p1 bra L;
    st.global.f32 [%rd1], %f4;
L:  cp.async.ca.shared.global [%r3], [%rd1], 4;
    ret;
}"""
KERNEL = parse(PTX).kernels["k"]
LOAD, FIRST, SECOND, FMA, BRANCH, STORE, COPY, END = range(8)
LANES = np.arange(32)


def machine(blocks=2, warps=2):
    """As much of a machine as the counters ask: `blocks` blocks of `warps` warps."""
    threads = 32 * blocks * warps
    return SimpleNamespace(
        kernel=KERNEL,
        blocks=blocks,
        warps=blocks * warps,
        threads=threads,
        block_threads=32 * warps,
        spread=lambda value: value if value.ndim else np.broadcast_to(value, (threads,)),
    )


def accessed(*events, on=None, merges=None):
    """The counters after some accesses by a machine, all its instructions executed once."""
    on = on or machine()
    counters = Counters(KERNEL, merges)
    counters.start(on)
    counters.executed(on, 0, END, on.warps, on.threads)
    for event in events:
        counters.access(on, event)
    counters.finish(on)
    return counters


def shared(addresses, mask=None, width=4, kind="ld", index=FIRST):
    """An access to shared memory."""
    return Access(index, "shared", kind, np.asarray(addresses), mask, width)


def moved(addresses, mask=None, width=4, kind="ld", index=LOAD):
    """An access to global memory."""
    return Access(index, "global", kind, np.asarray(addresses), mask, width)


def test_global_traffic():
    """Requests, sectors and bytes, of neighbors, of a stride, of one address, and of some lanes."""
    threads = np.arange(128)
    assert accessed(moved(4 * threads)).counts().global_.loads == Traffic(4, 16, 512)
    assert accessed(moved(32 * threads)).counts().global_.loads == Traffic(4, 128, 512)
    assert accessed(moved(np.int64(4096))).counts().global_.loads == Traffic(4, 4, 16)
    some = accessed(moved(4 * threads, threads < 40, kind="st", index=STORE)).counts().global_
    assert some == MemoryTraffic(stores=Traffic(2, 5, 160))
    assert (some.bytes, some.stores.sectors_a_request, some.stores.used_a_sector) == (160, 2.5, 32.0)
    assert accessed(moved(4 * threads, threads < 0)).counts().global_.loads == Traffic()


def test_a_step_of_a_loop_is_counted_anew_where_it_has_to_be():
    """The same addresses moved on by bytes that are no whole sectors touch more of them."""
    threads = np.arange(128)
    steps = [4 * threads, 4 * threads + 4, 4 * threads + 64, 8 * threads, np.zeros(128, int), np.full(128, 36)]
    one_by_one = [accessed(moved(step)).counts().global_.loads for step in steps]
    assert [one.sectors for one in one_by_one] == [16, 20, 16, 32, 4, 4]
    together = accessed(*map(moved, steps)).counts().global_.loads
    assert together == sum(one_by_one, Traffic())
    masked = accessed(moved(steps[0]), moved(steps[0], threads < 32), moved(steps[0])).counts().global_.loads
    assert masked == Traffic(9, 36, 3 * 384)


def test_shared_wavefronts():
    """Blocks alike and not, scalars, masks, and the same pattern moved on."""
    block = np.arange(64)
    alike = np.tile(8 * block, 2)
    assert accessed(shared(alike)).counts().shared.loads == Banked(4, 8, 4, 4)
    assert accessed(shared(alike), shared(alike + 4), shared(alike + 400)).counts().shared.loads == Banked(
        12, 24, 12, 12
    )
    apart = np.concatenate([8 * block, 4 * block])
    assert accessed(shared(apart)).counts().shared.loads == Banked(4, 6, 4, 2)
    assert accessed(shared(np.int64(16), width=16)).counts().shared.loads == Banked(4, 8, 8, 0)
    half = np.tile(block < 16, 2)
    found = accessed(shared(alike, half, kind="st", index=COPY)).counts().shared
    assert found == SharedTraffic(stores=Banked(2, 2, 2, 0))
    both = accessed(shared(alike, half), shared(alike)).counts().shared.loads
    assert both == Banked(6, 10, 6, 4)
    again = accessed(shared(alike), shared(alike // 2), shared(alike), shared(alike, half)).counts().shared.loads
    assert again == Banked(14, 22, 14, 8)
    assert accessed(shared(np.int64(0)), shared(alike * 0, half)).counts().shared.loads == Banked(6, 6, 6, 0)


@pytest.mark.parametrize("space", ["global", "shared", "local"])
def test_few_threads_are_counted_from_memory(space):
    random = np.random.default_rng(3)
    addresses = 4 * random.integers(0, 96, (4, 64))
    masks = [None, random.random(64) < 0.5, random.random(64) < 0.5]
    for _ in range(2):  # the second time from memory
        for own in (each + start for each in addresses for start in (0, 4, 32, 128, 1 << 20)):
            for mask in masks:
                for kind, width in (("ld", 4), ("st", 4), ("atom", 4), ("ld", 8)):
                    of_one = own & -width
                    assert _cost(of_one, mask, space, kind, width) == _counted(of_one, mask, space, kind, width)


def test_where_each_kind_counts():
    """Both ends of cp.async, matrices, atomics, bulk copies, local memory."""
    lanes = np.tile(LANES, 4)
    counts = accessed(
        shared(4 * lanes, kind="cp.async", index=COPY),
        moved(4 * lanes, kind="cp.async", index=COPY),
        shared(16 * lanes, width=16, kind="ldmatrix"),
        shared(4 * lanes, kind="atom"),
        moved(4 * lanes, kind="red"),
        moved(np.zeros(128, int), np.arange(128) == 0, 4096, "bulk"),
        Access(STORE, "local", "st", np.full(128, 8), None, 8),
    ).counts()
    assert counts.shared == SharedTraffic(Banked(4, 16, 16, 0), Banked(4, 4, 4, 0), Banked(4, 4, 4, 0))
    assert counts.global_.loads == counts.global_.atomics == Traffic(4, 16, 512)
    assert counts.global_.bulk == Traffic(1, 128, 4096)
    assert counts.local == MemoryTraffic(stores=Traffic(4, 32, 1024))
    assert counts.global_.bytes == 2 * 512 + 4096


def test_instructions_and_flops():
    """Ranges of instructions, some executed by fewer warps and threads."""
    counters, on = Counters(KERNEL), machine()
    counters.executed(on, 0, 5, 4, 128)
    counters.executed(on, 5, 6, 1, 20)
    counters.executed(on, 6, 8, 4, 128)
    counts = counters.counts()
    op = COMPUTED["fma.rn.f32"]
    assert counts.flops == 128 * op.flops == 256
    assert counts.instructions == Counter({"ld": 12, op.kind: 4, "bra": 4, "st": 1, "cp.async": 4, "ret": 4})
    assert counts.thread_instructions == 7 * 128 + 20
    assert counts.intensity == float("inf")
    with_store = accessed(moved(4 * np.arange(128), kind="st", index=STORE)).counts()
    assert with_store.intensity == 256 / 512


@pytest.mark.parametrize(
    ("taken", "active", "branches", "divergent"),
    [
        (np.bool_(True), None, 4, 0),
        (np.arange(128) < 32, None, 4, 0),
        (np.arange(128) < 40, None, 4, 1),
        (np.arange(128) % 2 == 0, None, 4, 4),
        (np.arange(128) % 2 == 0, np.arange(128) < 33, 2, 1),
        (np.bool_(False), np.arange(128) < 33, 2, 0),
    ],
)
def test_branches(taken, active, branches, divergent):
    """A warp diverges where its active threads disagree."""
    counters, on = Counters(KERNEL), machine()
    counters.executed(on, 0, 8, 4, 128)
    counters.branch(on, BRANCH, taken, active)
    counts = counters.counts()
    assert (counts.branches, counts.divergent_branches) == (branches, divergent)


def test_both_views():
    """Two loads off one base are two as the PTX says, and one of 8 bytes as ptxas merges them."""
    merge = Merge(FIRST, (FIRST, SECOND), 8, 0)
    lanes = np.tile(8 * LANES, 4)
    events = shared(lanes), shared(lanes + 4, index=SECOND)
    counters = accessed(*events, merges={FIRST: merge, SECOND: merge})
    as_ptx, merged = counters.counts(merged=False), counters.counts()
    assert as_ptx.shared.loads == Banked(8, 16, 8, 8)
    assert merged.shared.loads == Banked(4, 8, 8, 0)
    assert (as_ptx.instructions["ld"], merged.instructions["ld"]) == (12, 8)
    assert as_ptx.thread_instructions - merged.thread_instructions == 128
    assert counters.counts(only=[SECOND]) == Counts()
    assert counters.counts(only=[FIRST]).shared == merged.shared


def test_merged_stores():
    """Two stores become one request to the same sectors, whichever comes first."""
    behind = Merge(STORE, (STORE, COPY), 8, -4)
    lanes = 8 * np.arange(128)
    events = moved(lanes + 4, kind="st", index=STORE), moved(lanes, kind="st", index=COPY)
    counters = accessed(*events, merges={STORE: behind, COPY: behind})
    assert counters.counts(merged=False).global_.stores == Traffic(8, 64, 1024)
    assert counters.counts().global_.stores == Traffic(4, 32, 1024)


def test_lines_add_up():
    """Each line has what its instructions did; together they are everything."""
    counts = accessed(moved(4 * np.arange(128)), shared(np.tile(8 * LANES, 4))).counts()
    assert sum(counts.lines.values(), Counts()) == counts
    by_number = {line.number: found for line, found in counts.lines.items()}
    ptx_line = 1 + PTX[: PTX.index("ld.global")].count("\n")
    assert by_number[ptx_line].global_.loads.requests == 4
    assert by_number[ptx_line + 1].shared.bank_conflicts == 4
    assert list(counts.lines) == sorted(counts.lines, key=lambda line: line.number)
    assert all(isinstance(line, Line) for line in counts.lines)


def test_a_line_is_found_by_its_text():
    """Text "file:line" and the Line have the same counts; one that is not there raises with those that are."""
    lines = accessed(moved(4 * np.arange(128))).counts().lines
    first, *_ = lines
    assert all(lines[str(line)] is lines[line] is counts for line, counts in lines.items())
    for absent in ("k.cu:1", Line("k.cu", 1)):
        with pytest.raises(KeyError, match=f"k.cu:1: nothing was counted there; the lines with counts are: {first}, "):
            lines[absent]


def test_chunks_add_up():
    """Counters go on from one chunk of blocks to the next."""
    counters = accessed(moved(4 * np.arange(128)))
    one = counters.counts()
    small = machine(blocks=1)
    counters.start(small)
    counters.executed(small, 0, END, small.warps, small.threads)
    counters.access(small, moved(4 * np.arange(64)))
    assert counters.counts().global_.loads == one.global_.loads + Traffic(2, 8, 256)
    assert counters.counts().flops == one.flops * 3 // 2


def test_what_is_inlined_counts_at_its_frames_and_at_the_outermost_line():
    """Two calls of one function: each call's line has what it does there, and the frames tell where."""
    loc = ".loc 1 {} 1\n.loc 2 5 1, function_name $L__info_string0, inlined_at 1 {} 1\n"
    text = PTX.replace("    ld.global.f32", f"{loc.format(7, 7)}    ld.global.f32")
    text = text.replace("    st.global.f32", f"{loc.format(9, 9)}    st.global.f32")
    kernel = parse(f'{text}\n.file 1 "k.cu"\n.file 2 "a.cuh"').kernels["k"]
    counters = Counters(kernel)
    counters.executed(machine(), 0, END, 4, 128)
    counters.access(machine(), moved(4 * np.arange(128)))
    found, inlined = counters.counts(), Line("a.cuh", 5)
    assert list(found.frames) == [(Line("k.cu", 7), inlined), (Line("k.cu", 9), inlined)]
    assert {place[0]: one for place, one in found.frames.items()} == found.lines
    assert found.frames[Line("k.cu", 7), inlined].global_.loads == Traffic(4, 16, 512)
    assert sum(found.frames.values(), Counts()) == found


# ---- the measured patterns, each by an instruction of its own ----

PATTERNS = [
    json.loads(line)
    for line in (Path(__file__).parents[4] / "packages/gemmery/tests" / "data" / "memory_patterns_h200.jsonl")
    .read_text()
    .splitlines()
]


def instruction(op):
    """An instruction at [%rd4] or [%r4], as PTX writes it."""
    kind, *words = op.split(".")
    if kind in ("ldmatrix", "stmatrix"):
        count = int(words[0][1:])
        kind = f"{kind}.sync.aligned.m8n8.{'.'.join(words[:-1])}.shared.b16"
    else:
        count = int(words[1][1:]) if len(words) == 3 else 1
        kind = op
    where = "[%rd4]" if "global" in op else "[%r4]"
    registers = f"{{{', '.join(f'%x{i}' for i in range(count))}}}" if count > 1 or "matrix" in op else "%x0"
    return f"{kind} {where}, {registers};" if kind.startswith("st") else f"{kind} {registers}, {where};"


def counted_by_a_warp(op, pattern):
    """What gm.emulate counts of one instruction whose lanes are at the pattern's offsets."""
    text = f""".version 9.0
    .target sm_90
    .address_size 64
    .visible .entry f(.param .u64 offsets, .param .u64 held, .param .u32 active)
    {{
        .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .b32 %x<4>;
        .shared .align 128 .b8 s[16896];
        ld.param.u64 %rd1, [offsets]; ld.param.u64 %rd2, [held]; ld.param.u32 %r1, [active];
        mov.u32 %r2, %tid.x; mul.wide.u32 %rd3, %r2, 4; add.u64 %rd3, %rd1, %rd3; ld.global.u32 %r3, [%rd3];
        cvt.u64.u32 %rd4, %r3; add.u64 %rd4, %rd2, %rd4; mov.u32 %r4, s; add.u32 %r4, %r4, %r3;
        shr.u32 %r5, %r1, %r2; and.b32 %r5, %r5, 1; setp.ne.u32 %p1, %r5, 0;
        @%p1 {instruction(op)}
        ret;
    }}"""
    offsets, held = np.array(pattern["offsets"], np.uint32), np.zeros(16896, np.uint8)
    run = gm.emulate(text, "f", 1, 32, [offsets, held, np.uint32(int(pattern["active"], 16))], merge=False, check=False)
    *_, (_, counts) = (one for one in run.lines.items() if one[1].shared.requests or one[1].global_.requests)
    return counts


@pytest.mark.parametrize("op", sorted({pattern["op"] for pattern in PATTERNS}))
def test_the_emulator_counts_what_was_measured_of_a_pattern(op):
    """All patterns of matrices, a tenth of the others, which test_banks.py compares in full."""
    patterns = [pattern for pattern in PATTERNS if pattern["op"] == op]
    some = patterns if "matrix" in op else patterns[::10]
    wrong = []
    for pattern in some:
        counts = counted_by_a_warp(op, pattern)
        shared, moved = counts.shared, counts.global_
        found = {
            "wavefronts": shared.wavefronts,
            "wavefronts_ideal": shared.wavefronts_ideal,
            "bank_conflicts": shared.bank_conflicts,
            "sectors": moved.loads.sectors + moved.stores.sectors,
        }
        wrong += [(pattern["label"], name, value) for name, value in found.items() if pattern.get(name, value) != value]
    assert wrong == []


@pytest.mark.parametrize("trans", [".trans", ""])
@pytest.mark.parametrize("matrices", [1, 2, 4])
@pytest.mark.parametrize("kind", ["ldmatrix", "stmatrix"])
def test_matrices_cost_what_their_rows_do(kind, matrices, trans):
    """Rows 32 bytes apart meet two by two in the same banks; lanes beyond the rows cost nothing."""
    pattern = {"active": "ffffffff", "offsets": (32 * LANES).tolist()}
    shared = counted_by_a_warp(f"{kind}.x{matrices}{trans}.b16", pattern).shared
    assert (shared.requests, shared.wavefronts, shared.wavefronts_ideal) == (1, 2 * matrices, matrices)
