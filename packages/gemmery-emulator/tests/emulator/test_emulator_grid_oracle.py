"""Races in global memory against an oracle that keeps every access and a clock for each thread, on random kernels."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmery_emulator.arguments import memory_of
from gemmery_emulator.lower import lowered
from gemmery_emulator.machine import LaunchConfig, Observer
from gemmery_emulator.ptx.module import parse
from gemmery_emulator.run import emulated

BLOCKS, THREADS = 3, 64
HEAD = """.version 8.0
.target sm_80
.address_size 64
.visible .entry f(.param .u64 x, .param .u64 flag) {
.reg .b64 %d<20>; .reg .b32 %r<20>; .reg .pred %p<9>;
ld.param.u64 %d1, [x]; ld.param.u64 %d9, [flag]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
mad.lo.u32 %r3, %r2, 64, %r1; xor.b32 %r4, %r3, 63; xor.b32 %r5, %r3, 1; xor.b32 %r6, %r3, 32; mov.u32 %r7, 5;
setp.eq.u32 %p1, %r1, 0; setp.lt.u32 %p2, %r1, 32; setp.eq.u32 %p3, %r2, 1; setp.eq.u32 %p4, %r3, %r3;
"""
PLACES = {"own": 3, "mirrored": 4, "next lane": 5, "next warp": 6, "of all blocks": 1, "one": 7}
GUARDS = ("%p4", "%p1", "%p2", "%p3")
ACCESSES = {
    "store": "st.global.u32 [%d2], %r9;",
    "load": "ld.global.u32 %r8, [%d2];",
    "update": "red.global.add.u32 [%d2], 1;",
    "both": "ld.global.u32 %r8, [%d2];\n@{guard} st.global.u32 [%d2], %r9;",
    "apart": "ld.global.u32 %r8, [%d2];\nbar.sync 0;\n@{guard} st.global.u32 [%d2], %r9;",
}
ORDERS = {
    "barrier": "bar.sync 0;",
    "warp": "bar.warp.sync 0xffffffff;",
    "handover": "bar.sync 0;\n@%p1 membar.gl;\n@%p1 atom.global.add.u32 %r8, [%d9], 1;\n@%p1 membar.gl;\nbar.sync 0;",
    "flag": "bar.sync 0;\n@%p1 membar.gl;\n@%p1 red.global.add.u32 [%d9], 1;\nbar.sync 0;",
    "lane": "@%p1 membar.gl;\n@%p1 atom.global.add.u32 %r8, [%d9], 1;\n@%p1 membar.gl;\nbar.sync 0;",
    "no fence": "bar.sync 0;\n@%p1 atom.global.add.u32 %r8, [%d9], 1;\nbar.sync 0;",
}
STEPS = st.one_of(
    st.tuples(st.sampled_from(sorted(ACCESSES)), st.sampled_from(sorted(PLACES)), st.sampled_from(GUARDS)),
    st.tuples(st.sampled_from(sorted(ORDERS))),
)


def source(steps):
    """A kernel of these steps; each store writes a value that no other thread and no other store writes."""
    lines = [HEAD]
    for number, step in enumerate(steps):
        if len(step) == 1:
            lines.append(ORDERS[step[0]])
            continue
        kind, place, guard = step
        lines.append(f"mad.lo.u32 %r9, %r3, 64, {number + 1}; mad.wide.u32 %d2, %r{PLACES[place]}, 4, %d1;")
        lines.append(f"@{guard} " + ACCESSES[kind].format(guard=guard))
    return "\n".join([*lines, "ret; }"])


class Oracle(Observer):
    """All accesses, and a vector of clocks for each thread; `pairs` are the instructions that race."""

    def __init__(self):
        count = BLOCKS * THREADS
        self.clocks = np.eye(count, dtype=int)
        (self.heard, self.at_fence), self.told = np.zeros((2, count, count), int), {}
        self.accesses = {}  # address -> (thread, clock, kind, instruction)
        self.pairs = set()
        self.of_writes = set()  # those of which the earlier access writes

    def access(self, machine, event):
        mask = np.ones(machine.threads, bool) if event.mask is None else event.mask
        addresses = np.broadcast_to(event.addresses, mask.shape)
        for thread in np.flatnonzero(mask).tolist():
            before = self.accesses.setdefault(int(addresses[thread]), [])
            for other, clock, kind, index in before:
                reads, updates = kind == event.kind == "ld", kind == event.kind and kind in ("red", "atom")
                updates |= {kind, event.kind} == {"red", "atom"}
                if other != thread and not (reads or updates) and self.clocks[thread, other] < clock:
                    self.pairs.add((event.index, index))
                    if kind != "ld":
                        self.of_writes.add((event.index, index))
            before.append((thread, self.clocks[thread, thread], event.kind, event.index))
            if event.kind in ("atom", "red"):
                told = self.told.setdefault(int(addresses[thread]), np.zeros(len(self.clocks), int))
                if event.kind == "atom":
                    self.heard[thread] = np.maximum(self.heard[thread], told)
                np.maximum(told, self.at_fence[thread], out=told)

    def barrier(self, machine, index, barrier, mask):
        mask = np.ones(machine.threads, bool) if mask is None else mask
        each = 32 if barrier < 0 else THREADS
        for first in range(0, machine.threads, each):
            who = first + np.flatnonzero(mask[first : first + each])
            if len(who):
                self.clocks[who] = self.clocks[who].max(axis=0)
                self.clocks[who, who] += 1

    def fenced(self, machine, index, mask):
        for thread in np.flatnonzero(np.ones(machine.threads, bool) if mask is None else mask).tolist():
            self.clocks[thread] = np.maximum(self.clocks[thread], self.heard[thread])
            self.at_fence[thread] = self.clocks[thread]
            self.clocks[thread, thread] += 1


@settings(max_examples=3 * settings().max_examples // 5)
@given(st.lists(STEPS, min_size=2, max_size=9), st.sampled_from([None, 1, 2]))
def test_a_race_is_found_where_there_is_one(steps, seed):
    """Each pair of instructions that is told races, and something is told wherever anything does.

    But one lane is taken to publish that the others of its warp have read.
    """
    (kernel,) = parse(source(steps)).kernels.values()
    memory = memory_of({"x": np.zeros(BLOCKS * THREADS, np.uint32), "flag": np.zeros(1, np.uint32)})
    parameters = b"".join(memory.address(name).to_bytes(8, "little") for name in ("x", "flag"))
    oracle = Oracle()
    launch = LaunchConfig((BLOCKS, 1, 1), (THREADS, 1, 1), parameters)
    found = emulated(lowered(kernel), launch, memory, observers=(oracle,), seed=seed).findings
    pairs = {(kernel.instructions[one].ptx_line, kernel.instructions[other].ptx_line) for one, other in oracle.pairs}
    told = {(one.line.number, one.other.number) for one in found if one.kind == "race"}
    assert {one.kind for one in found} <= {"race"}
    assert told <= pairs, source(steps)
    some = {(kernel.instructions[one].ptx_line, kernel.instructions[other].ptx_line) for one, other in oracle.of_writes}
    assert told or not (some if ("lane",) in steps else pairs), source(steps)
