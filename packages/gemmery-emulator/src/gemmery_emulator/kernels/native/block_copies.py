"""Code of cp.async and of its groups, which all threads commit and wait for together.

A copy is two accesses: one that reads global memory, and one that writes shared memory once its threads wait. Until
then its bytes, and where they go, are in one of some rows, in the order in which copies began. The machine has them, or
compiled code (`CopyRows`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import vector
from gemmery_emulator.findings.races import CLOCK_AT, INDEX, INDEX_AT, THREAD, UNDER_WAY
from gemmery_emulator.kernels.native.block_accesses import OF_ACCESS, frames_of
from gemmery_emulator.kernels.native.buffers import Buffers
from gemmery_emulator.kernels.native.frames import ACCESS, CONTEXT, COPY, LANES, WIDEST, WORD, FrameFields, Record
from gemmery_emulator.kernels.native.translation import AsyncCopy, Translation
from gemmery_emulator.machine import Machine
from gemmery_emulator.reach import Copies, Copy

ROOM = 32  # copies under way; a power of two
_MOVED = {4: "i32", 8: "i64", 16: vector(2, "i64")}  # what holds so many bytes


def add_to(module: Module) -> None:
    """Add `copy` and `group`."""
    for add in (_readers, _begin, _land, _copy, _group):
        add(module)


def _row(f: Function, g: FrameFields, number: Value | int) -> tuple[FrameFields, Value, Value]:
    """Return the record of a copy, where its bytes are and where they go."""
    place = (g.get("copy_first") + number) & (g.get("copy_room") - 1)
    record, row = FrameFields(f, g.pointer("copies") + place * (len(COPY) * WORD), COPY), place * g.get("threads")
    return record, g.pointer("copy_data") + row * WIDEST, g.pointer("copy_places") + row * WORD


def _by_width(f: Function, width: Value, body: Callable[[str, int], None]) -> None:
    """Run the code for copies of so many bytes."""
    f.switch(width, {size: partial(body, kind, size) for size, kind in _MOVED.items()})


def _readers(module: Module) -> None:
    """Find out who reads, in `reads`: 2 if all threads do, 1 if some thread reads only some bytes, else 0."""
    with module.function("readers", ("ptr", "ctx"), ("ptr", "mask"), local=True, returns="i64") as f:
        g, flags = FrameFields(f, f["ctx"], CONTEXT), vector(LANES, "i8")
        some, every = f.var(f.zero(flags)), f.var(f.const(flags, 3))
        with f.loop(0, g.get("threads"), LANES) as t:
            own = f.load(flags, g.pointer("reads") + t) & (f.load(flags, f["mask"] + t) * 3)
            f.store(own, g.pointer("reads") + t)
            some.value, every.value = some.value | own, every.value & own
        joined, common = (
            f.intrinsic(f"llvm.vector.reduce.{how}.v{LANES}i8", "i8", each.value)
            for how, each in (("or", some), ("and", every))
        )
        g.leave_if((joined & 2).differs(0))
        f.ret(f.emit("i64", f"zext {common.equals(1)} to i64") << 1)


def _begin(module: Module) -> None:
    """Fetch the bytes of a copy, zeros for those who do not read."""
    with module.function("begin", *OF_ACCESS, ("ptr", "reads"), local=True, returns="i64") as f:
        (g, d), mask, wide = frames_of(f), f["mask"], vector(LANES, "i64")
        threads, sources, memory = g.get("threads"), g.pointer("sources"), g.pointer("memory")
        record, data, places = _row(f, g, g.get("copy_count"))
        f.store(f["desc"], record.at("desc"), 8)
        record.set("group", g.get("committed"))
        with f.loop(0, threads, LANES) as t:
            place = f.load(wide, g.pointer("addresses") + t * WORD) + f.load(wide, g.pointer("bases") + t * WORD)
            f.store(f.select(g.flagged(mask, t), place, f.const(wide, -1)), places + t * WORD)

        def fetch(kind: str, size: int) -> None:
            with f.loop(0, threads) as t:
                value = f.var(f.zero(kind))
                with f.if_(g.byte(f["reads"], t).differs(0)):
                    value.value = f.load(kind, memory + g.word(sources, t))
                f.store(value.value, data + t * size)

        _by_width(f, d.get("width"), fetch)
        g.add("copy_count", 1)
        f.ret(f.index(0))


def _land(module: Module) -> None:
    """Write the bytes of the copy that began first."""
    with module.function("land", ("ptr", "ctx"), local=True, returns="i64") as f:
        g = FrameFields(f, f["ctx"], CONTEXT)
        record, data, places = _row(f, g, 0)
        d = FrameFields(f, record.pointer("desc"), ACCESS)
        threads, shift, written = g.get("threads"), g.get("shift"), g.pointer("written")
        with f.if_(g.get("races").differs(0)), f.loop(0, g.over(threads, g.get("alike"), "udiv")) as t:
            place = g.word(places, t)
            with f.if_(place >= 0):
                first = ((place - g.word(g.pointer("bases"), t)) >> shift) + g.word(g.pointer("begins"), t)
                stamp = (g.word(g.pointer("clock"), t >> 5) << CLOCK_AT) + (d.get("mark") & ~UNDER_WAY)
                stamp = stamp + g.word(g.pointer("own_lane"), t)
                with f.loop(first, first + (d.get("width") >> shift)) as piece:
                    then = g.word(written, piece)
                    own = ((then ^ stamp) & (THREAD | INDEX << INDEX_AT)).equals(0)
                    with f.if_(g.both(own, (then & UNDER_WAY).differs(0))):
                        g.put(written, piece, stamp)

        def write(kind: str, size: int) -> None:
            with f.loop(0, threads) as t, f.if_(g.word(places, t) >= 0):
                f.store(f.load(kind, data + t * size), g.pointer("shared") + g.word(places, t))

        _by_width(f, d.get("width"), write)
        g.add("copy_first", 1)
        g.add("copy_count", -1)
        f.ret(f.index(0))


def _copy(module: Module) -> None:
    """Check both ends of a copy, keep and count them, and begin it; 1 if Python has to execute it."""
    with module.function("copy", *OF_ACCESS, returns="i64") as f:
        (g, _), ctx, desc, mask = frames_of(f), f["ctx"], f["desc"], f["mask"]
        ends = [
            (g.at(name), g.pointer(name), g.pointer(to))
            for name, to in (("addresses", "sources"), ("found", "read_found"))
        ]
        g.leave_if(g.get("copy_count") >= g.get("copy_room"))
        who, reads = g.called("readers", ctx, mask), f.var(g.pointer("reads"))
        g.leave_if(who.equals(1))
        with f.if_(who.equals(2)):
            reads.value = g.pointer("full")

        def at_source(name: str) -> Value:
            for field, _, source in ends:
                f.store(source, field, 8)
            result = g.called(name, ctx, desc, reads.value)
            for field, target, _ in ends:
                f.store(target, field, 8)
            return result

        target = ctx, desc + len(ACCESS) * WORD, mask
        for name in ("within", "disordered"):
            g.leave_if(at_source(name).differs(0))
            g.leave_if(g.called(name, *target).differs(0))
        at_source("tally")
        g.called("tally", *target)
        g.called("begin", *target, reads.value)
        f.ret(f.index(0))


def _group(module: Module) -> None:
    """Commit a group, or wait for all but the latest ones; 1 if Python has to, as where only some threads do."""
    with module.function("group", *OF_ACCESS, returns="i64") as f:
        g, d = frames_of(f)
        g.leave_if(g.get("copy_room").equals(0))
        g.leave_if(f.emit("i1", f"icmp ne {f['mask']}, {g.pointer('full').text}"))
        g.add("committed", d.get("stores"))
        newest = g.get("committed") - 1 - d.get("pending")
        with f.while_() as again:
            again.until(g.get("copy_count").equals(0))
            again.until(_row(f, g, 0)[0].get("group") > newest)
            g.called("land", f["ctx"])
        f.ret(f.index(0))


class CopyRows:
    """The copies of a chunk, which either the machine has or compiled code."""

    def __init__(
        self, machine: Machine, context: Record, records: Record, own: Buffers, translation: Translation
    ) -> None:
        self._translation = translation
        self._copies, self._context, self._own = machine.unit(Copies), context, own
        self._rows = Record(COPY, ROOM)
        self._places, self._data = own.copies(ROOM)
        self._addresses = {
            index: records.address(number + 1)
            for index, number in translation.number.items()
            if isinstance(translation.forms[index], AsyncCopy)
        }
        self._lent = False
        context.set("copies", self._rows.words)
        context.set("copy_places", self._places)
        context.set("copy_data", self._data)

    def lend(self) -> None:
        """Let compiled code have the copies, if all threads have begun as many groups."""
        copies, context = self._copies, self._context
        if self._lent:
            return
        fits = isinstance(copies.committed, int) and len(copies.under_way) <= ROOM
        fits = fits and all(isinstance(each.group, int) for each in copies.under_way)
        context.set("copy_room", ROOM if fits else 0)
        if not fits:
            return
        self._lent = True
        context.set("copy_first", 0)
        context.set("copy_count", len(copies.under_way))
        context.set("committed", copies.committed)
        for row, copy in enumerate(copies.under_way):
            self._rows.set("desc", self._addresses[copy.index], row)
            self._rows.set("group", copy.group, row)
            width = copy.data.shape[1]
            self._places[row] = -1
            self._places[row, copy.threads] = copy.rows * width
            self._data[row, : width * self._own.threads].reshape(-1, width)[copy.threads] = copy.data

    def give_back(self) -> None:
        """Let the machine have them."""
        if not self._lent:
            return
        self._lent = False
        indices = {address: index for index, address in self._addresses.items()}
        first, under_way = self._context.get("copy_first"), list[Copy]()
        for row in (np.arange(first, first + self._context.get("copy_count")) % ROOM).tolist():
            index = indices[self._rows.get("desc", row)]
            form: Any = self._translation.forms[index]
            threads = np.flatnonzero(self._places[row] >= 0)
            places, width = self._places[row, threads], form.ends[1].width
            data = self._data[row, : width * self._own.threads].reshape(-1, width)[threads]
            offsets = places - self._own.bases[threads]
            under_way.append(Copy(index, places // width, offsets, data, threads, self._rows.get("group", row)))
        self._copies.resume(under_way, self._context.get("committed"))
