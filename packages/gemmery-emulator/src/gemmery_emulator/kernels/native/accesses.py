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
from gemmery_emulator.kernels.native import layout
from gemmery_emulator.kernels.native.layout import (
    ACCESS,
    CONTEXT,
    ENTRY,
    LANES,
    RELATIVE,
    WORD,
    Fields,
    byte,
    called,
    leave_if,
    listed,
    number_of,
    over,
    put,
    word,
)

_DRAW = random.Random(0)
_FACTORS = [[_DRAW.getrandbits(63) | 1 for _ in range(LANES)] for _ in range(WARP // LANES)]


def add_to(module: Module) -> None:
    """Add `access`."""
    _count(module)
    _move(module)
    _access(module)


def _count(module: Module) -> None:
    """Count what each warp accesses."""
    wide, flags = vector(LANES, "i64"), vector(LANES, "i8")
    with module.function("count", ("ptr", "ctx"), ("ptr", "desc"), ("ptr", "mask"), local=True, returns="i64") as f:
        g, d = Fields(f, f["ctx"], CONTEXT), Fields(f, f["desc"], ACCESS)
        addresses, entries, slots = (g.pointer(name) for name in ("addresses", "entries", "slots"))
        number, halves = d.get("number"), range(0, WARP, LANES)
        with f.loop(0, g.get("threads"), WARP) as t:
            bits, masks = f.index(0), []
            for half in halves:
                some = f.load(flags, f["mask"] + t + half)
                mask = f.emit(vector(LANES, "i1"), f"icmp ne {some}, zeroinitializer")
                masks.append(mask)
                part = f.emit("i64", f"zext {f.bitcast(mask, f'i{LANES}')} to i64")
                bits = bits | (part << half if half else part)
            with f.if_(bits.equals(0)):
                put(f, g.pointer("found"), t >> 5, f.index(-1))
            with f.else_():
                first = f.intrinsic("llvm.cttz.i64", "i64", bits, Value(f, "i1", "true"))
                base = f.broadcast(word(f, addresses, t + first) & -128, LANES)
                relative = [
                    f.select(mask, f.load(wide, addresses + (t + half) * WORD) - base, f.zero(wide))
                    for half, mask in zip(halves, masks, strict=True)
                ]

                def same(entry: Value, bits: Value = bits, relative: list[Value] = relative) -> Value:
                    """Whether an entry is for this access by these lanes."""
                    equal = f.load("i64", entry, 8).equals(number)
                    equal = f.emit("i1", f"and {equal}, {f.load('i64', entry + WORD, 8).equals(bits).text}")
                    for half, own in zip(halves, relative, strict=True):
                        kept = f.load(wide, entry + (RELATIVE + half) * WORD)
                        alike = f.bitcast(f.emit(vector(LANES, "i1"), f"icmp eq {kept}, {own.text}"), f"i{LANES}")
                        equal = f.emit("i1", f"and {equal}, {alike.equals(-1).text}")
                    return equal

                latest = entries + d.get("latest") * (ENTRY * WORD)
                known = same(latest)
                put(f, g.pointer("found"), t >> 5, d.get("latest"))
                with f.if_(known):
                    f.store(f.load("i64", latest + 2 * WORD, 8) + 1, latest + 2 * WORD, 8)
                with f.else_():
                    hashed = bits * 0x9E3779B97F4A7C15 + number * 0x2545F4914F6CDD1D
                    for own, factors in zip(relative, _FACTORS, strict=True):
                        times = Value(f, wide, "<" + ", ".join(f"i64 {factor}" for factor in factors) + ">")
                        hashed = hashed + f.intrinsic(f"llvm.vector.reduce.add.v{LANES}i64", "i64", own * times)
                    hashed = hashed ^ f.emit("i64", f"lshr {hashed}, 29")
                    hashed = hashed * 0x9E3779B97F4A7C15
                    at = f.var(f.emit("i64", f"lshr {hashed}, 32") & (layout.SLOTS - 1))
                    with f.while_() as again:
                        held = f.emit("i64", f"sext {f.load('i32', slots + at.value * 4, 4)} to i64")
                        entry = entries + (held - 1) * (ENTRY * WORD)
                        with f.if_(held.equals(0)):
                            used = g.get("used")
                            new = entries + used * (ENTRY * WORD)
                            for place, value in enumerate(
                                (number, bits, f.index(0), hashed, _form(f, d, bits, relative))
                            ):
                                f.store(value, new + place * WORD, 8)
                            for half, own in zip(halves, relative, strict=True):
                                f.store(own, new + (RELATIVE + half) * WORD)
                            g.set("used", used + 1)
                            f.store(f.emit("i32", f"trunc {used + 1} to i32"), slots + at.value * 4, 4)
                        now = f.emit("i64", f"sext {f.load('i32', slots + at.value * 4, 4)} to i64")
                        entry = entries + (now - 1) * (ENTRY * WORD)
                        found = same(entry)
                        with f.if_(found):
                            f.store(f.load("i64", entry + 2 * WORD, 8) + 1, entry + 2 * WORD, 8)
                            d.set("latest", now - 1)
                            put(f, g.pointer("found"), t >> 5, now - 1)
                        again.until(found)
                        at.value = (at.value + 1) & (layout.SLOTS - 1)
        f.ret(f.index(0))


def _form(f: Function, d: Fields, bits: Value, relative: list[Value]) -> Value:
    """Whether the addresses of all lanes are equal, or follow each other without gaps."""
    wide, flag = relative[0].type, vector(LANES, "i1")
    start = f.broadcast(f.emit("i64", f"extractelement {relative[0]}, i64 0"), LANES)
    width = f.broadcast(d.get("width"), LANES)
    equal = following = bits.equals(2**WARP - 1)
    for half, own in enumerate(relative):
        ramp = Value(f, wide, "<" + ", ".join(f"i64 {half * LANES + lane}" for lane in range(LANES)) + ">")
        for expected, first in ((start, True), (start + width * ramp, False)):
            same = f.bitcast(f.emit(flag, f"icmp eq {own}, {expected.text}"), f"i{LANES}").equals(-1)
            if first:
                equal = f.emit("i1", f"and {equal}, {same.text}")
            else:
                following = f.emit("i1", f"and {following}, {same.text}")
    return f.select(equal, f.index(layout.EQUAL), f.select(following, f.index(layout.CONSECUTIVE), f.index(0)))


def _access(module: Module) -> None:
    """Check an access, keep it for later checks and count it; 1 if Python has to execute it."""
    wide, flags = vector(LANES, "i64"), vector(LANES, "i8")
    with module.function("access", ("ptr", "ctx"), ("ptr", "desc"), ("ptr", "mask"), returns="i64") as f:
        g, d, mask = Fields(f, f["ctx"], CONTEXT), Fields(f, f["desc"], ACCESS), f["mask"]
        threads, width, shared = g.get("threads"), d.get("width"), d.get("shared").differs(0)
        addresses = g.pointer("addresses")
        leave_if(f, d.get("seen").equals(0))
        leave_if(f, d.get("refused").differs(0))
        leave_if(f, g.get("used") + g.get("warps") > f.index(layout.ENTRIES))
        bad, low, high, joined = (
            f.var(value) for value in (f.index(0), f.const(wide, 1 << 62), f.const(wide, -(1 << 62)), f.zero(wide))
        )
        with f.loop(0, threads, LANES) as t:
            some = f.emit(vector(LANES, "i1"), f"icmp ne {f.load(flags, mask + t)}, zeroinitializer")
            each = f.load(wide, addresses + t * WORD)
            joined.value = joined.value | f.select(some, each, f.zero(wide))
            low.value = f.overloaded("llvm.smin", low.value, f.select(some, each, f.const(wide, 1 << 62)))
            high.value = f.overloaded("llvm.smax", high.value, f.select(some, each, f.const(wide, -(1 << 62))))
        least, most, every = (
            f.intrinsic(f"llvm.vector.reduce.{how}.v{LANES}i64", "i64", each.value)
            for how, each in (("smin", low), ("smax", high), ("or", joined))
        )
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
                    with f.loop(1, alike) as block, f.loop(0, own, LANES) as t:
                        there = block * own + t
                        here = f.load(flags, mask + t)
                        unlike = f.load(flags, mask + there) ^ here
                        apart.value = apart.value | f.convert("zext", unlike, "i64")
                        some = f.emit(vector(LANES, "i1"), f"icmp ne {here}, zeroinitializer")
                        differs = f.load(wide, addresses + there * WORD) ^ f.load(wide, addresses + t * WORD)
                        apart.value = apart.value | f.select(some, differs, f.zero(wide))
                    together = f.intrinsic(f"llvm.vector.reduce.or.v{LANES}i64", "i64", apart.value)
                    leave_if(f, together.differs(0))
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
            kept = d.pointer("kept")
            with f.loop(0, threads, LANES) as t:
                f.store(f.load(wide, addresses + t * WORD), kept + t * WORD)
                f.store(f.load(flags, mask + t), kept + (threads * WORD + t))
        with f.if_(d.get("elements").differs(0)):
            called(f, "move", f["ctx"], f["desc"], mask)
        f.ret(f.index(0))


def _move(module: Module) -> None:
    """Load or store the elements of the active lanes, which registers of the same size hold."""
    with module.function("move", ("ptr", "ctx"), ("ptr", "desc"), ("ptr", "mask"), local=True, returns="i64") as f:
        g, d = Fields(f, f["ctx"], CONTEXT), Fields(f, f["desc"], ACCESS)
        addresses, registers, bases = (g.pointer(name) for name in ("addresses", "registers", "bases"))
        shared, stores, warps = d.get("shared").differs(0), d.get("stores").differs(0), g.get("warps")
        entries, found = g.pointer("entries"), g.pointer("found")
        memory = f.select(shared, g.pointer("shared"), g.pointer("memory"))
        inside = f.select(shared, f.index(-1), f.index(0))
        whole = d.get("elements").equals(1)

        def moves(size: int, stores: bool, place: int, name: str) -> None:
            values, type_ = f.load("ptr", registers + d.get(name) * WORD, 8), f"i{8 * size}"
            wide = vector(LANES, type_)
            with f.loop(0, warps) as warp:
                entry = word(f, found, warp)
                with f.if_(entry >= f.index(0)):
                    form = word(f, entries, entry * ENTRY + layout.FORM)
                    t = warp * WARP
                    first = memory + (word(f, addresses, t) + (word(f, bases, t) & inside) + place * size)
                    consecutive = f.emit("i1", f"and {whole}, {form.equals(layout.CONSECUTIVE).text}")
                    with f.if_(consecutive):
                        for half in range(0, WARP, LANES):
                            here, there = values + (t + half) * size, first + half * size
                            if stores:
                                f.store(f.load(wide, here), there)
                            else:
                                f.store(f.load(wide, there), here)
                    with f.else_():
                        equal = form.equals(layout.EQUAL)
                        with f.if_(f.emit("i1", "and i1 false, false") if stores else equal):
                            one = f.broadcast(f.load(type_, first, size), LANES)
                            for half in range(0, WARP, LANES):
                                f.store(one, values + (t + half) * size)
                        with f.else_(), f.loop(t, t + WARP) as lane, f.if_(byte(f, f["mask"], lane).differs(0)):
                            offset = word(f, addresses, lane) + (word(f, bases, lane) & inside) + place * size
                            at, here = memory + offset, values + lane * size
                            source, to = (here, at) if stores else (at, here)
                            f.store(f.load(type_, source, size), to, size)

        for size in (4, 8):
            for place, name in enumerate(("first", "second", "third", "fourth")):
                fits = f.emit("i1", f"and {d.get('size').equals(size)}, {(d.get('elements') > f.index(place)).text}")
                with f.if_(fits):
                    with f.if_(stores):
                        moves(size, True, place, name)
                    with f.else_():
                        moves(size, False, place, name)
        f.ret(f.index(0))
