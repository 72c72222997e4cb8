"""Code that checks an access to memory and counts it.

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
from gemmery_emulator.kernels.native.frames import ACCESS, CONTEXT, ENTRY, LANES, RELATIVE, WORD, FrameFields

_HALVES = range(0, WARP, LANES)
_DRAW = random.Random(0)
_FACTORS = [[_DRAW.getrandbits(63) | 1 for _ in range(LANES)] for _ in range(WARP // LANES)]
_WIDE = vector(LANES, "i64")
OF_ACCESS = (("ptr", "ctx"), ("ptr", "desc"), ("ptr", "mask"))  # what such functions take


def add_to(module: Module) -> None:
    """Add `access`."""
    for add in (_seek, _look, _list, _find, _within, _alike, _in_order, _tally, _access):
        add(module)


def frames_of(f: Function) -> tuple[FrameFields, FrameFields]:
    """Return the records of the launch and of the access."""
    return FrameFields(f, f["ctx"], CONTEXT), FrameFields(f, f["desc"], ACCESS)


class _Warp:
    """What the lanes of a warp access: relative to the line of the first one, 0 for inactive lanes."""

    def __init__(self, f: Function, g: FrameFields, mask: Value, t: Value, offset: Value) -> None:
        self._f, self._g, self._mask, self._t, self._offset = f, g, mask, t, offset
        self.bits = g.bits_of(g.flagged(mask, t, WARP))

    def read(self, whole: bool) -> None:
        """Load the addresses; `whole` where all lanes are known to be active."""
        f, addresses = self._f, self._g.pointer("addresses")
        first = f.index(0) if whole else f.intrinsic("llvm.cttz.i64", "i64", self.bits, Value(f, "i1", "true"))
        self.line = (self._g.word(addresses, self._t + first) + self._offset) & -128
        base = f.broadcast(self.line - self._offset, LANES)
        self.relative = [f.load(_WIDE, addresses + (self._t + half) * WORD) - base for half in _HALVES]
        if not whole:
            self._masks = [self._g.flagged(self._mask, self._t + half) for half in _HALVES]
            each = zip(self._masks, self.relative, strict=True)
            self.relative = [f.select(mask, own, f.zero(_WIDE)) for mask, own in each]

    def same(self, entry: Value, own: Value) -> Value:
        """Whether an entry is for this access by these lanes."""
        f = self._f
        equal = self._g.both(f.load("i64", entry, 8).equals(own), f.load("i64", entry + WORD, 8).equals(self.bits))
        apart = f.zero(_WIDE)
        for half, relative in zip(_HALVES, self.relative, strict=True):
            apart = apart | (f.load(_WIDE, entry + (RELATIVE + half) * WORD) ^ relative)
        return self._g.both(equal, f.bitcast(apart.differs(0), f"i{LANES}").equals(0))

    def bounds(self) -> tuple[Value, ...]:
        """Return the least and the greatest of the active lanes' addresses, and all their bits."""
        f = self._f
        least, most = f.const(_WIDE, 1 << 62), f.const(_WIDE, -(1 << 62))
        low, high, joined = least, most, f.zero(_WIDE)
        for mask, own in zip(self._masks, self.relative, strict=True):
            low = f.overloaded("llvm.smin", low, f.select(mask, own, least))
            high = f.overloaded("llvm.smax", high, f.select(mask, own, most))
            joined = joined | own
        each = (("smin", low), ("smax", high), ("or", joined))
        return tuple(f.intrinsic(f"llvm.vector.reduce.{how}.v{LANES}i64", "i64", value) for how, value in each)

    def in_rows(self, width: Value) -> Value:
        """Whether all lanes are active, and in each vector their addresses are equal or follow each other."""
        f, grouped = self._f, self.bits.equals(2**WARP - 1)
        steps = f.ramp(_WIDE) * f.broadcast(width, LANES)
        for own in self.relative:
            start = f.broadcast(f.emit("i64", f"extractelement {own}, i64 0"), LANES)
            equal, following = (f.bitcast(own.equals(each), f"i{LANES}").equals(-1) for each in (start, start + steps))
            grouped = self._g.both(grouped, f.emit("i1", f"or {equal}, {following.text}"))
        return self._g.number_of(grouped)

    def hashed(self, own: Value) -> Value:
        """Return a number that differs for most accesses."""
        f = self._f
        result = self.bits * 0x9E3779B97F4A7C15 + own * 0x2545F4914F6CDD1D
        for relative, factors in zip(self.relative, _FACTORS, strict=True):
            times = Value(f, _WIDE, "<" + ", ".join(f"i64 {factor}" for factor in factors) + ">")
            result = result + f.intrinsic(f"llvm.vector.reduce.add.v{LANES}i64", "i64", relative * times)
        return (result ^ (result >> 29)) * 0x9E3779B97F4A7C15


def _seek(module: Module) -> None:
    """Return the number of the entry for what a warp accesses, a new one where there is none."""
    with module.function("seek", *OF_ACCESS, ("i64", "t"), ("i64", "own"), local=True, returns="i64") as f:
        g, d = frames_of(f)
        entries, slots, warp = g.pointer("entries"), g.pointer("slots"), _Warp(f, g, f["mask"], f["t"], d.get("offset"))
        warp.read(False)
        hashed = warp.hashed(f["own"])
        at, place = f.var((hashed >> 32) & (frames.SLOTS - 1)), f.var(f.index(0))
        with f.while_() as again:
            place.value = g.listed(slots, at.value) - 1
            with f.if_(place.value < 0):
                used = g.get("used")
                place.value = used
                new = entries + used * (ENTRY * WORD)
                numbers = (f["own"], warp.bits, f.index(0), hashed, warp.in_rows(d.get("width")))
                for offset, value in enumerate((*numbers, *warp.bounds())):
                    f.store(value, new + offset * WORD, 8)
                for half, own in zip(_HALVES, warp.relative, strict=True):
                    f.store(own, new + (RELATIVE + half) * WORD)
                g.set("used", used + 1)
                f.store(f.emit("i32", f"trunc {used + 1} to i32"), slots + at.value * 4, 4)
            again.until(warp.same(entries + place.value * (ENTRY * WORD), f["own"]))
            at.value = (at.value + 1) & (frames.SLOTS - 1)
        f.ret(place.value)


def _look(module: Module) -> None:
    """Find the bounds of an access, and in `found` the entry of each warp."""
    with module.function("look", *OF_ACCESS, local=True, returns="i64") as f:
        g, d = frames_of(f)
        entry_of_warp, entries, other_end = g.pointer("found"), g.pointer("entries"), g.pointer("read_found")
        number, offset, paired = d.get("number"), d.get("offset"), d.get("paired").differs(0)
        least, most, every = f.var(f.index(1 << 62)), f.var(f.index(-(1 << 62))), f.var(f.index(0))
        place, own, latest = f.var(f.index(0)), f.var(number), f.var(d.get("latest"))
        with f.loop(0, g.get("threads"), WARP) as t:
            warp = _Warp(f, g, f["mask"], t, offset)
            place.value = f.index(frames.NOT_ACTIVE)
            with f.if_(paired):
                own.value = number + ((g.word(other_end, t >> 5) + 1) << frames.PAIR_AT)

            def seek(whole: bool, warp: _Warp = warp, t: Value = t) -> None:
                warp.read(whole)
                with f.if_(f.emit("i1", f"xor {warp.same(entries + latest.value * (ENTRY * WORD), own.value)}, true")):
                    latest.value = g.called("seek", f["ctx"], f["desc"], f["mask"], t, own.value)
                place.value = latest.value
                entry = entries + latest.value * (ENTRY * WORD)
                low, high, joined = (f.load("i64", entry + each * WORD, 8) for each in frames.BOUNDS)
                least.value = f.min(least.value, warp.line + low)
                most.value = f.max(most.value, warp.line + high)
                every.value = every.value | joined

            with f.if_(warp.bits.equals(2**WARP - 1)):
                seek(True)
            with f.else_(), f.if_(warp.bits.differs(0)):
                seek(False)
            g.put(entry_of_warp, t >> 5, place.value)
        for name, value in (("least", least), ("most", most), ("every", every)):
            g.set(name, value.value)
        d.set("latest", latest.value)
        f.ret(f.index(0))


def _list(module: Module) -> None:
    """List the active lanes, and return how many they are."""
    with module.function("list", ("ptr", "ctx"), ("ptr", "mask"), local=True, returns="i64") as f:
        g = FrameFields(f, f["ctx"], CONTEXT)
        threads, lanes, n = g.get("threads"), g.pointer("lanes"), f.var(f.index(0))
        f.store(g.pointer("every_lane"), g.at("listed"), 8)
        g.leave_if(f.emit("i1", f"icmp eq {f['mask']}, {g.pointer('full').text}"), threads)
        f.store(lanes, g.at("listed"), 8)
        with f.loop(0, threads) as t:
            f.store(f.emit("i32", f"trunc {t} to i32"), lanes + n.value * 4, 4)
            n.value = n.value + g.byte(f["mask"], t)
        f.ret(n.value)


def _find(module: Module) -> None:
    """Return the place of the array that holds an access; -1 if none does."""
    params = (("ptr", "ctx"), ("i64", "address"), ("i64", "width"))
    with module.function("find", *params, local=True, returns="i64") as f:
        g = FrameFields(f, f["ctx"], CONTEXT)
        arrays, place = g.pointer("arrays"), f.var(f.index(-1))
        with f.loop(0, g.get("array_count")) as k:
            start, stop = g.word(arrays, k * 2), g.word(arrays, k * 2 + 1)
            inside = g.both(f["address"] >= start, f["address"] + f["width"] <= stop)
            place.value = f.select(inside, k, place.value)
        f.ret(place.value)


def _within(module: Module) -> None:
    """Whether Python has to look at where an access goes; its bounds, and the entries of its warps."""
    with module.function("within", *OF_ACCESS, local=True, returns="i64") as f:
        g, d = frames_of(f)
        width, shared = d.get("width"), d.get("shared").differs(0)
        g.leave_if(d.get("seen").equals(0))
        g.leave_if(d.get("refused").differs(0))
        g.leave_if(g.get("used") + g.get("warps") * 2 > f.index(frames.ENTRIES))
        g.called("look", f["ctx"], f["desc"], f["mask"])
        least, most = g.get("least"), g.get("most")
        g.leave_if(least > most, 0)  # nobody is active
        g.leave_if((g.get("every") & (width - 1)).differs(0))
        with f.if_(shared):
            outside = f.emit("i1", f"or {least < 0}, {(most > g.get('shared_limit') - width).text}")
            g.leave(g.number_of(outside))
        arrays, addresses = g.pointer("arrays"), g.pointer("addresses")
        place = f.var(g.called("find", f["ctx"], least, width))
        g.leave_if(place.value < 0)
        g.leave_if(most + width <= g.word(arrays, place.value * 2 + 1), 0)
        n = g.called("list", f["ctx"], f["mask"])
        with f.loop(0, n) as i:
            address = g.word(addresses, g.listed(g.pointer("listed"), i)) + d.get("offset")
            start, stop = g.word(arrays, place.value * 2), g.word(arrays, place.value * 2 + 1)
            with f.if_(f.emit("i1", f"or {address < start}, {(address + width > stop).text}")):
                place.value = g.called("find", f["ctx"], address, width)
                g.leave_if(place.value < 0)
        f.ret(f.index(0))


def _alike(module: Module) -> None:
    """Whether the threads of some block do something else than those of the first."""
    with module.function("unlike", ("ptr", "ctx"), ("ptr", "mask"), local=True, returns="i64") as f:
        g, mask, flags = FrameFields(f, f["ctx"], CONTEXT), f["mask"], vector(LANES, "i8")
        addresses, entry_of_warp, first_warps = g.pointer("addresses"), g.pointer("found"), g.get("block_threads") >> 5
        apart, following = f.var(f.zero(_WIDE)), f.var(f.index(0))
        with f.loop(first_warps, g.get("warps")) as w:
            like = following.value
            following.value = f.select((like + 1).equals(first_warps), f.index(0), like + 1)
            place, t, there = g.word(entry_of_warp, w), like * WARP, w * WARP
            bits = g.word(g.pointer("entries"), f.max(place, f.index(0)) * ENTRY + 1)
            lane = f.intrinsic("llvm.cttz.i64", "i64", bits, Value(f, "i1", "false")) & (WARP - 1)
            same = g.both(place.equals(g.word(entry_of_warp, like)), place >= 0)
            moved = g.word(addresses, there + lane) ^ g.word(addresses, t + lane)
            with f.if_(f.emit("i1", f"xor {g.both(same, moved.equals(0))}, true")):
                for half in _HALVES:
                    here = f.load(flags, mask + t + half)
                    unlike = f.load(flags, mask + there + half) ^ here
                    differs = f.load(_WIDE, addresses + (there + half) * WORD)
                    differs = differs ^ f.load(_WIDE, addresses + (t + half) * WORD)
                    differs = f.select(g.flagged(mask, t + half), differs, f.zero(_WIDE))
                    apart.value = apart.value | f.convert("zext", unlike, "i64") | differs
        f.ret(f.intrinsic(f"llvm.vector.reduce.or.v{LANES}i64", "i64", apart.value))


def _in_order(module: Module) -> None:
    """Keep an access in the histories; 1 if Python has to look at what orders it, before anything has changed."""
    with module.function("disordered", *OF_ACCESS, local=True, returns="i64") as f:
        g, d = frames_of(f)

        def races(name: str, share: Value | None = None) -> None:
            n = g.called("list", f["ctx"], f["mask"])
            n = n if share is None else g.over(n, share, "udiv")
            g.leave(g.called(name, f["ctx"], f["desc"], g.pointer("listed"), n))

        with f.if_(d.get("shared").differs(0)):
            g.leave_if(g.get("races").equals(0), 0)
            with f.if_(g.get("alike") > f.index(1)):  # one block stands for all, as long as all do the same
                g.leave_if(g.called("unlike", f["ctx"], f["mask"]).differs(0))
            races("shared_races", g.get("alike"))
        g.leave_if(d.get("follows").equals(0), 0)
        races("grid_races")
        f.ret(f.index(0))


def _tally(module: Module) -> None:
    """Count what each warp accesses."""
    with module.function("tally", *OF_ACCESS, local=True, returns="i64") as f:
        g = FrameFields(f, f["ctx"], CONTEXT)
        entries, entry_of_warp = g.pointer("entries"), g.pointer("found")
        latest, times = f.var(f.index(frames.NOT_ACTIVE)), f.var(f.index(0))  # of warps that do the same in turn

        def settle() -> None:
            with f.if_(latest.value >= 0):
                total = latest.value * ENTRY + 2
                g.put(entries, total, g.word(entries, total) + times.value)

        with f.loop(0, g.get("warps")) as w:
            place = g.word(entry_of_warp, w)
            with f.if_(place.differs(latest.value)):
                settle()
                latest.value, times.value = place, f.index(0)
            times.value = times.value + 1
        settle()
        f.ret(f.index(0))


def _access(module: Module) -> None:
    """Check an access, keep it for later checks and count it; 1 if Python has to execute it."""
    with module.function("access", *OF_ACCESS, returns="i64") as f:
        g, d = frames_of(f)
        for check in ("within", "disordered"):
            g.leave_if(g.called(check, f["ctx"], f["desc"], f["mask"]).differs(0))
        g.called("tally", f["ctx"], f["desc"], f["mask"])
        with f.if_(d.get("kept").differs(0)):  # for pictures of what a later store copies
            stored, threads = d.pointer("kept"), g.get("threads")
            offset = f.broadcast(d.get("offset"), LANES)
            with f.loop(0, threads, LANES) as t:
                f.store(f.load(_WIDE, g.pointer("addresses") + t * WORD) + offset, stored + t * WORD)
                f.store(f.load(vector(LANES, "i8"), f["mask"] + t), stored + (threads * WORD + t))
        f.ret(f.index(0))
