"""Code that checks an access to memory, counts it and moves its data.

An access is checked before anything changes. Whatever is not plainly in order - an address outside an array, a place
that another thread may race for, memory that nobody has written - is left to Python, which repeats the instruction with
the checks that find and report faults. So a finding has one place in the source.

What an access costs is counted by pattern: what a warp accesses, relative to a line of 128 bytes, and how often it does
so. Python looks up what each pattern costs.
"""

from __future__ import annotations

import random

from gemmery.banks import WARP
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import vector
from gemmery_emulator.kernels.native import frames
from gemmery_emulator.kernels.native.frames import (
    ACCESS,
    CONTEXT,
    ENTRY,
    LANES,
    RELATIVE,
    WORD,
    FrameFields,
    byte,
    called,
    leave_if,
    listed,
    number_of,
    over,
    put,
    word,
)

_HALVES = range(0, WARP, LANES)
_DRAW = random.Random(0)
_FACTORS = [[_DRAW.getrandbits(63) | 1 for _ in range(LANES)] for _ in range(WARP // LANES)]


def add_to(module: Module) -> None:
    """Add `access`."""
    _look(module)
    _count(module)
    _move(module)
    _access(module)


class _Warp:
    """What the lanes of a warp access: relative to the line of the first one, 0 for inactive lanes."""

    def __init__(self, f: Function, g: FrameFields, mask: Value, t: Value) -> None:
        wide, flags = vector(LANES, "i64"), vector(LANES, "i8")
        self._f, self._g, self._t, self._wide = f, g, t, wide
        self.bits, self._masks = f.index(0), []
        for half in range(0, WARP, LANES):
            some = f.emit(vector(LANES, "i1"), f"icmp ne {f.load(flags, mask + t + half)}, zeroinitializer")
            self._masks.append(some)
            part = f.emit("i64", f"zext {f.bitcast(some, f'i{LANES}')} to i64")
            self.bits = self.bits | (part << half if half else part)

    def read(self, whole: bool) -> None:
        """Load the addresses; `whole` where all lanes are known to be active."""
        f, addresses = self._f, self._g.pointer("addresses")
        first = f.index(0) if whole else f.intrinsic("llvm.cttz.i64", "i64", self.bits, Value(f, "i1", "true"))
        self.line = word(f, addresses, self._t + first) & -128
        base = f.broadcast(self.line, LANES)
        self.relative = [f.load(self._wide, addresses + (self._t + half) * WORD) - base for half in _HALVES]
        if not whole:
            each = zip(self._masks, self.relative, strict=True)
            self.relative = [f.select(mask, own, f.zero(self._wide)) for mask, own in each]

    def same(self, entry: Value, number: Value) -> Value:
        """Whether an entry is for this access by these lanes."""
        f = self._f
        equal = f.load("i64", entry, 8).equals(number)
        equal = f.emit("i1", f"and {equal}, {f.load('i64', entry + WORD, 8).equals(self.bits).text}")
        apart = f.zero(self._wide)
        for half, own in zip(_HALVES, self.relative, strict=True):
            apart = apart | (f.load(self._wide, entry + (RELATIVE + half) * WORD) ^ own)
        alike = f.intrinsic(f"llvm.vector.reduce.or.v{LANES}i64", "i64", apart).equals(0)
        return f.emit("i1", f"and {equal}, {alike.text}")

    def bounds(self) -> tuple[Value, Value, Value]:
        """Return the least and the greatest of the active lanes' addresses, and all their bits."""
        f, name = self._f, f"v{LANES}i64"
        low, high, joined = f.const(self._wide, 1 << 62), f.const(self._wide, -(1 << 62)), f.zero(self._wide)
        for mask, own in zip(self._masks, self.relative, strict=True):
            low = f.overloaded("llvm.smin", low, f.select(mask, own, f.const(self._wide, 1 << 62)))
            high = f.overloaded("llvm.smax", high, f.select(mask, own, f.const(self._wide, -(1 << 62))))
            joined = joined | own
        return (
            f.intrinsic(f"llvm.vector.reduce.smin.{name}", "i64", low),
            f.intrinsic(f"llvm.vector.reduce.smax.{name}", "i64", high),
            f.intrinsic(f"llvm.vector.reduce.or.{name}", "i64", joined),
        )


def _look(module: Module) -> None:
    """Find the bounds of an access, and in `found` the entry of each warp, as far as that is the latest one."""
    with module.function("look", ("ptr", "ctx"), ("ptr", "desc"), ("ptr", "mask"), local=True, returns="i64") as f:
        g, d = FrameFields(f, f["ctx"], CONTEXT), FrameFields(f, f["desc"], ACCESS)
        number, latest, entry_of_warp = d.get("number"), d.get("latest"), g.pointer("found")
        entry = g.pointer("entries") + latest * (ENTRY * WORD)
        least, most, every = f.var(f.index(1 << 62)), f.var(f.index(-(1 << 62))), f.var(f.index(0))
        place = f.var(f.index(0))

        def widen(warp: _Warp, low: Value, high: Value, joined: Value) -> None:
            least.value = f.min(least.value, warp.line + low)
            most.value = f.max(most.value, warp.line + high)
            every.value = every.value | joined

        with f.loop(0, g.get("threads"), WARP) as t:
            warp = _Warp(f, g, f["mask"], t)
            place.value = f.index(frames.NOT_ACTIVE)

            def seek(whole: bool, warp: _Warp = warp) -> None:
                warp.read(whole)
                known = warp.same(entry, number)
                with f.if_(known):
                    place.value = latest
                    widen(warp, *(f.load("i64", entry + each * WORD, 8) for each in frames.BOUNDS))
                with f.else_():
                    place.value = f.index(frames.NOT_FOUND)
                    widen(warp, *warp.bounds())

            with f.if_(warp.bits.equals(2**WARP - 1)):
                seek(True)
            with f.else_(), f.if_(warp.bits.differs(0)):
                seek(False)
            put(f, entry_of_warp, t >> 5, place.value)
        for name, value in (("least", least), ("most", most), ("every", every)):
            g.set(name, value.value)
        f.ret(f.index(0))


def _count(module: Module) -> None:
    """Count what each warp accesses."""
    with module.function("count", ("ptr", "ctx"), ("ptr", "desc"), ("ptr", "mask"), local=True, returns="i64") as f:
        g, d = FrameFields(f, f["ctx"], CONTEXT), FrameFields(f, f["desc"], ACCESS)
        entries, slots, entry_of_warp, number = (
            g.pointer("entries"),
            g.pointer("slots"),
            g.pointer("found"),
            d.get("number"),
        )

        def again_at(place: Value) -> None:
            times = entries + (place * ENTRY + 2) * WORD
            f.store(f.load("i64", times, 8) + 1, times, 8)

        with f.loop(0, g.get("warps")) as w:
            place = word(f, entry_of_warp, w)
            with f.if_(place >= 0):
                again_at(place)
            with f.else_(), f.if_(place.equals(frames.NOT_FOUND)):
                warp = _Warp(f, g, f["mask"], w * WARP)
                warp.read(False)
                latest = d.get("latest")
                known = warp.same(entries + latest * (ENTRY * WORD), number)
                with f.if_(known):
                    put(f, entry_of_warp, w, latest)
                    again_at(latest)
                with f.else_():
                    bits, relative = warp.bits, warp.relative
                    hashed = bits * 0x9E3779B97F4A7C15 + number * 0x2545F4914F6CDD1D
                    for own, factors in zip(relative, _FACTORS, strict=True):
                        times = Value(f, own.type, "<" + ", ".join(f"i64 {factor}" for factor in factors) + ">")
                        hashed = hashed + f.intrinsic(f"llvm.vector.reduce.add.v{LANES}i64", "i64", own * times)
                    hashed = hashed ^ f.emit("i64", f"lshr {hashed}, 29")
                    hashed = hashed * 0x9E3779B97F4A7C15
                    at = f.var(f.emit("i64", f"lshr {hashed}, 32") & (frames.SLOTS - 1))
                    with f.while_() as again:
                        occupied = f.emit("i64", f"sext {f.load('i32', slots + at.value * 4, 4)} to i64")
                        with f.if_(occupied.equals(0)):
                            used = g.get("used")
                            new = entries + used * (ENTRY * WORD)
                            numbers = (number, bits, f.index(0), hashed, _form(f, d, bits, relative), *warp.bounds())
                            for offset, value in enumerate(numbers):
                                f.store(value, new + offset * WORD, 8)
                            for half, own in zip(_HALVES, relative, strict=True):
                                f.store(own, new + (RELATIVE + half) * WORD)
                            g.set("used", used + 1)
                            f.store(f.emit("i32", f"trunc {used + 1} to i32"), slots + at.value * 4, 4)
                        now = f.emit("i64", f"sext {f.load('i32', slots + at.value * 4, 4)} to i64") - 1
                        same = warp.same(entries + now * (ENTRY * WORD), number)
                        with f.if_(same):
                            again_at(now)
                            d.set("latest", now)
                            put(f, entry_of_warp, w, now)
                        again.until(same)
                        at.value = (at.value + 1) & (frames.SLOTS - 1)
        f.ret(f.index(0))


def _form(f: Function, d: FrameFields, bits: Value, relative: list[Value]) -> Value:
    """Whether in each vector of lanes the addresses are equal, or follow each other without gaps."""
    wide, flag = relative[0].type, vector(LANES, "i1")
    ramp = Value(f, wide, "<" + ", ".join(f"i64 {lane}" for lane in range(LANES)) + ">")
    steps, grouped = ramp * f.broadcast(d.get("width"), LANES), bits.equals(2**WARP - 1)
    for own in relative:
        start = f.broadcast(f.emit("i64", f"extractelement {own}, i64 0"), LANES)
        equal, following = (
            f.bitcast(f.emit(flag, f"icmp eq {own}, {expected.text}"), f"i{LANES}").equals(-1)
            for expected in (start, start + steps)
        )
        either = f.emit("i1", f"or {equal}, {following.text}")
        grouped = f.emit("i1", f"and {grouped}, {either.text}")
    return number_of(f, grouped)


def _access(module: Module) -> None:
    """Check an access, keep it for later checks and count it; 1 if Python has to execute it."""
    wide, flags = vector(LANES, "i64"), vector(LANES, "i8")
    with module.function("access", ("ptr", "ctx"), ("ptr", "desc"), ("ptr", "mask"), returns="i64") as f:
        g, d, mask = FrameFields(f, f["ctx"], CONTEXT), FrameFields(f, f["desc"], ACCESS), f["mask"]
        threads, width, shared = g.get("threads"), d.get("width"), d.get("shared").differs(0)
        addresses = g.pointer("addresses")
        leave_if(f, d.get("seen").equals(0))
        leave_if(f, d.get("refused").differs(0))
        leave_if(f, g.get("used") + g.get("warps") > f.index(frames.ENTRIES))
        bad = f.var(f.index(0))
        called(f, "look", f["ctx"], f["desc"], mask)
        least, most, every = g.get("least"), g.get("most"), g.get("every")
        leave_if(f, least > most, 0)  # nobody is active
        leave_if(f, (every & (width - 1)).differs(0))
        lanes, n = f.var(g.pointer("every_lane")), f.var(threads)
        with f.if_(f.emit("i1", f"icmp ne {mask}, {g.pointer('full').text}")):
            lanes.value, n.value = g.pointer("lanes"), f.index(0)
            with f.loop(0, threads) as t:
                f.store(f.emit("i32", f"trunc {t} to i32"), lanes.value + n.value * 4, 4)
                n.value = n.value + byte(f, mask, t)
        with f.if_(shared):
            outside = f.emit("i1", f"or {least < 0}, {(most > g.get('shared_limit') - width).text}")
            leave_if(f, outside)
            with f.if_(g.get("races").differs(0)):
                alike = g.get("alike")
                with f.if_(alike > f.index(1)):  # one block stands for all, as long as all do the same
                    own, apart = g.get("block_threads"), f.var(f.zero(wide))
                    entry_of_warp, first_warps = g.pointer("found"), own >> 5
                    with f.loop(first_warps, g.get("warps")) as w:
                        like = over(f, w, first_warps, "urem")
                        place, t, there = word(f, entry_of_warp, w), like * WARP, w * WARP
                        bits = word(f, g.pointer("entries"), f.max(place, f.index(0)) * ENTRY + 1)
                        lane = f.intrinsic("llvm.cttz.i64", "i64", bits, Value(f, "i1", "false")) & (WARP - 1)
                        same = place.equals(word(f, entry_of_warp, like))
                        same = f.emit("i1", f"and {same}, {(place >= 0).text}")
                        moved = word(f, addresses, there + lane) ^ word(f, addresses, t + lane)
                        same = f.emit("i1", f"and {same}, {moved.equals(0).text}")
                        with f.if_(f.emit("i1", f"xor {same}, true")):
                            for half in _HALVES:
                                here = f.load(flags, mask + t + half)
                                unlike = f.load(flags, mask + there + half) ^ here
                                apart.value = apart.value | f.convert("zext", unlike, "i64")
                                some = f.emit(vector(LANES, "i1"), f"icmp ne {here}, zeroinitializer")
                                differs = f.load(wide, addresses + (there + half) * WORD)
                                differs = differs ^ f.load(wide, addresses + (t + half) * WORD)
                                apart.value = apart.value | f.select(some, differs, f.zero(wide))
                    n.value = over(f, n.value, alike, "udiv")
                leave_if(f, called(f, "shared_races", f["ctx"], f["desc"], lanes.value, n.value).differs(0))
        with f.else_():
            starts, stops = f.var(f.index(0)), f.var(f.index(-1))
            arrays, arrays_count = g.pointer("arrays"), g.get("array_count")

            def find(address: Value) -> None:
                """Find the array that holds an access."""
                starts.value, stops.value = f.index(0), f.index(-1)
                with f.loop(0, arrays_count) as k:
                    start, stop = word(f, arrays, k * 2), word(f, arrays, k * 2 + 1)
                    inside = f.emit("i1", f"and {address >= start}, {(address + width <= stop).text}")
                    with f.if_(inside):
                        starts.value, stops.value = start, stop

            find(least)
            with f.if_(most + width > stops.value), f.loop(0, n.value) as i:
                address = word(f, addresses, listed(f, lanes.value, i))
                outside = f.emit("i1", f"or {address < starts.value}, {(address + width > stops.value).text}")
                with f.if_(outside):
                    find(address)
                    bad.value = bad.value | number_of(f, stops.value < 0)
            leave_if(f, bad.value.differs(0))
            with f.if_(d.get("follows").differs(0)):
                leave_if(f, called(f, "grid_races", f["ctx"], f["desc"], lanes.value, n.value).differs(0))
        called(f, "count", f["ctx"], f["desc"], mask)
        with f.if_(d.get("kept").differs(0)):  # for pictures of what a later store copies
            stored = d.pointer("kept")
            with f.loop(0, threads, LANES) as t:
                f.store(f.load(wide, addresses + t * WORD), stored + t * WORD)
                f.store(f.load(flags, mask + t), stored + (threads * WORD + t))
        with f.if_(d.get("elements").differs(0)):
            called(f, "move", f["ctx"], f["desc"], mask)
        f.ret(f.index(0))


def _move(module: Module) -> None:
    """Load or store the elements of the active lanes, which registers of the same size hold."""
    with module.function("move", ("ptr", "ctx"), ("ptr", "desc"), ("ptr", "mask"), local=True, returns="i64") as f:
        g, d = FrameFields(f, f["ctx"], CONTEXT), FrameFields(f, f["desc"], ACCESS)
        addresses, registers, bases = (g.pointer(name) for name in ("addresses", "registers", "bases"))
        shared, stores, warps = d.get("shared").differs(0), d.get("stores").differs(0), g.get("warps")
        entries, entry_of_warp = g.pointer("entries"), g.pointer("found")
        memory = f.select(shared, g.pointer("shared"), g.pointer("memory"))
        inside = f.select(shared, f.index(-1), f.index(0))
        whole = d.get("elements").equals(1)

        def moves(size: int, stores: bool, place: int, name: str) -> None:
            values, type_ = f.load("ptr", registers + d.get(name) * WORD, 8), f"i{8 * size}"
            wide = vector(LANES, type_)

            def one_by_one(start: Value, count: int) -> None:
                with f.loop(start, start + count) as lane, f.if_(byte(f, f["mask"], lane).differs(0)):
                    offset = word(f, addresses, lane) + (word(f, bases, lane) & inside) + place * size
                    at, here = memory + offset, values + lane * size
                    source, to = (here, at) if stores else (at, here)
                    f.store(f.load(type_, source, size), to, size)

            with f.loop(0, warps) as warp:
                entry, t = word(f, entry_of_warp, warp), warp * WARP
                with f.if_(entry >= f.index(0)):
                    with f.if_(word(f, entries, entry * ENTRY + frames.FORM).differs(0)):
                        base = word(f, bases, t) & inside
                        with f.loop(t, t + WARP, LANES) as group:
                            address, here = word(f, addresses, group), values + group * size
                            there = memory + (address + base + place * size)
                            equal = address.equals(word(f, addresses, group + 1))
                            with f.if_(f.select(equal, Value(f, "i1", "false"), whole)):
                                source, to = (here, there) if stores else (there, here)
                                f.store(f.load(wide, source), to)
                            with f.else_():
                                if stores:
                                    one_by_one(group, LANES)
                                else:
                                    with f.if_(equal):
                                        f.store(f.broadcast(f.load(type_, there, size), LANES), here)
                                    with f.else_():
                                        one_by_one(group, LANES)
                    with f.else_():
                        one_by_one(t, WARP)

        for size in (4, 8):
            for place, name in enumerate(("first", "second", "third", "fourth")):
                fits = f.emit("i1", f"and {d.get('size').equals(size)}, {(d.get('elements') > f.index(place)).text}")
                with f.if_(fits):
                    with f.if_(stores):
                        moves(size, True, place, name)
                    with f.else_():
                        moves(size, False, place, name)
        f.ret(f.index(0))
