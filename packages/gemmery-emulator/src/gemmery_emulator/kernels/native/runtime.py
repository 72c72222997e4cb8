"""Code that is the same for every kernel: the turn of blocks, the checks of an access, and the count of its patterns.

An access is checked before anything changes. Whatever is not plainly in order - an address outside an array, a place
that another thread may race for, memory that nobody has written - is left to Python, which repeats the instruction with
the checks that find and report faults. So a finding has one place in the source.

What an access costs is counted by pattern: what a warp accesses, relative to a line of 128 bytes, and how often it does
so. Python looks up what each pattern costs.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import vector
from gemmery.cpu.target import Target
from gemmery_emulator.findings.races import CLOCK_AT, INDEX_AT, THREAD, UNDER_WAY
from gemmery_emulator.kernels.native import layout
from gemmery_emulator.kernels.native.layout import ACCESS, BLOCK, CONTEXT, ENTRY, LANES, RELATIVE, WORD, Fields, leave

WARP = 32
_DRAW = random.Random(0)
_FACTORS = [[_DRAW.getrandbits(63) | 1 for _ in range(LANES)] for _ in range(WARP // LANES)]


def module(target: Target) -> Module:
    """Return the code: `run` runs blocks, `access` checks and counts an access."""
    module = Module(target)
    _shared_unordered(module)
    _grid_unordered(module)
    _shared(module)
    _grid(module)
    _count(module)
    _move(module)
    _access(module)
    _run(module)
    return module


def called(f: Function, name: str, *values: Value) -> Value:
    """Call a function of the module that returns a number."""
    return f.result_of(Value(f, "ptr", f"@{name}"), "i64", *values)


def word(f: Function, table: Value, place: Value) -> Value:
    """Load a number from a table of 64-bit words."""
    return f.load("i64", table + place * WORD, 8)


def put(f: Function, table: Value, place: Value, value: Value) -> None:
    """Store a number in a table of 64-bit words."""
    f.store(value, table + place * WORD, 8)


def byte(f: Function, table: Value, place: Value) -> Value:
    """Load a flag."""
    return f.emit("i64", f"zext {f.load('i8', table + place)} to i64")


def over(f: Function, a: Value, b: Value, op: str) -> Value:
    """Add an unsigned division or remainder."""
    return f.emit("i64", f"{op} {a}, {b.text}")


def _leave_if(f: Function, condition: Value, value: int = 1) -> None:
    with f.if_(condition):
        leave(f, value)


# ---- races ----


def _shared_unordered(module: Module) -> None:
    """Whether nothing orders an earlier access of another thread before thread `t`, whose stamp is `own`."""
    params = (("ptr", "ctx"), ("i64", "then"), ("i64", "own"), ("i64", "t"))
    with module.function("shared_unordered", *params, local=True, returns="i64") as f:
        g, then = Fields(f, f["ctx"], CONTEXT), f["then"]
        _leave_if(f, (then & UNDER_WAY).differs(0))
        _leave_if(f, ((then ^ f["own"]) & THREAD).equals(0), 0)
        row = (f["t"] >> 5) * g.get("each_warp") + ((then & THREAD) >> 5)
        f.ret(_number(f, (then >> CLOCK_AT) > word(f, g.pointer("known"), row)))


def _grid_unordered(module: Module) -> None:
    """The same for an earlier access to global memory."""
    params = (("ptr", "ctx"), ("i64", "then"), ("i64", "own"), ("i64", "t"))
    with module.function("grid_unordered", *params, local=True, returns="i64") as f:
        g, then, t = Fields(f, f["ctx"], CONTEXT), f["then"], f["t"]
        someone, one_block = g.get("someone"), g.get("one_block")
        apart = then ^ f["own"]
        _leave_if(f, (apart & someone).equals(0), 0)
        _leave_if(f, (apart & one_block).differs(0))
        threads, warps = g.get("block_threads"), g.get("each_warp")
        second = (then & (someone - one_block)) >> g.get("thread_at")
        block = over(f, t, threads, "udiv") * g.get("many")
        own_warp = over(f, t, threads, "urem") >> 5
        row = (block * warps + own_warp) * warps + (second >> 5)
        f.ret(_number(f, (then >> g.get("clock_at")) > word(f, g.pointer("known"), row)))


def _number(f: Function, flag: Value) -> Value:
    return f.emit("i64", f"zext {flag} to i64")


def _listed(f: Function, lanes: Value, i: Value) -> Value:
    return f.emit("i64", f"sext {f.load('i32', lanes + i * 4, 4)} to i64")


class _Touched:
    """What the lanes of an access touch: a place, a thread and a stamp for each, in arrays."""

    def __init__(self, f: Function, g: Fields, count: Value) -> None:
        self._f, self._count = f, count
        self._where, self._stamps, self._threads = (g.pointer(name) for name in ("where", "stamps", "who"))

    def put(self, number: Value, place: Value, stamp: Value, t: Value) -> None:
        """Put an element into the arrays."""
        for table, value in ((self._where, place), (self._stamps, stamp), (self._threads, t)):
            put(self._f, table, number, value)

    def thread(self, number: Value) -> Value:
        """Return the thread of an element."""
        return word(self._f, self._threads, number)

    def each(self, body: Callable[[Value, Value, Value], None], backwards: bool = False) -> None:
        """For each element: its number, its place and its stamp."""
        f = self._f
        with f.loop(0, self._count) as k:
            number = self._count - 1 - k if backwards else k
            body(number, word(f, self._where, number), word(f, self._stamps, number))


def _shared(module: Module) -> None:
    """Check an access of the first `n` listed lanes to shared memory, then keep it; 1 if Python has to look at it."""
    params = (("ptr", "ctx"), ("ptr", "desc"), ("ptr", "lanes"), ("i64", "n"))
    with module.function("shared_races", *params, local=True, returns="i64") as f:
        g, d, n = Fields(f, f["ctx"], CONTEXT), Fields(f, f["desc"], ACCESS), f["n"]
        addresses, before, clock, own_lane = (g.pointer(name) for name in ("addresses", "before", "clock", "own_lane"))
        written, read, read_too = (g.pointer(name) for name in ("written", "read", "read_too"))
        shift, own_index, begins = g.get("shift"), d.get("index") << INDEX_AT, g.pointer("begins")
        pieces, seen = d.get("width") >> shift, (g.get("seen_by_all") + 1) << CLOCK_AT
        stores, bad = d.get("stores").differs(0), f.var(f.index(0))
        touched = _Touched(f, g, n * pieces)

        def check(table: Value, place: Value, stamp: Value, t: Value) -> None:
            then = word(f, table, place)
            with f.if_(then >= seen):
                bad.value = bad.value + called(f, "shared_unordered", f["ctx"], then, stamp, t)

        with f.loop(0, n) as i:
            t = _listed(f, f["lanes"], i)
            first = (word(f, addresses, t) >> shift) + word(f, begins, t)
            stamp = (word(f, clock, t >> 5) << CLOCK_AT) + own_index + word(f, own_lane, t)
            with f.loop(0, pieces) as piece:
                place = first + piece
                touched.put(i * pieces + piece, place, stamp, t)
                check(written, place, stamp, t)
                with f.if_(stores):
                    check(read, place, stamp, t)
                    check(read_too, place, stamp, t)
                with f.else_():
                    bad.value = bad.value + _number(f, word(f, written, place).equals(0))
        _leave_if(f, bad.value.differs(0))

        def another(a: Value, b: Value) -> Value:
            return ((a ^ b) & THREAD).differs(0)

        def take(table: Value) -> Callable[[Value, Value, Value], None]:
            def taken(number: Value, place: Value, stamp: Value) -> None:
                put(f, before, number, word(f, table, place))

            return taken

        def keep(table: Value) -> Callable[[Value, Value, Value], None]:
            return lambda number, place, stamp: put(f, table, place, stamp)

        with f.if_(stores):
            touched.each(take(written))
            touched.each(keep(written))

            def lost(number: Value, place: Value, stamp: Value) -> None:
                bad.value = bad.value + _number(f, another(stamp, word(f, written, place)))

            touched.each(lost)
            with f.if_(bad.value.differs(0)):  # two threads write one place: as it was, for Python to report it
                touched.each(
                    lambda number, place, stamp: put(f, written, place, word(f, before, number)), backwards=True
                )
                leave(f, 1)
            leave(f, 0)
        touched.each(take(read))
        touched.each(keep(read))

        def move_earlier(number: Value, place: Value, stamp: Value) -> None:
            earlier, last = word(f, before, number), word(f, read, place)
            with f.if_(another(earlier, last)):
                put(f, read_too, place, earlier)
            bad.value = bad.value + _number(f, another(stamp, last))

        touched.each(move_earlier)
        _leave_if(f, bad.value.equals(0), 0)

        def move_lost(number: Value, place: Value, stamp: Value) -> None:
            with f.if_(another(stamp, word(f, read, place))):
                put(f, read_too, place, stamp)

        touched.each(move_lost)
        f.ret(f.index(0))


def _grid(module: Module) -> None:
    """The same for global memory."""
    params = (("ptr", "ctx"), ("ptr", "desc"), ("ptr", "lanes"), ("i64", "n"))
    with module.function("grid_races", *params, local=True, returns="i64") as f:
        g, d, n = Fields(f, f["ctx"], CONTEXT), Fields(f, f["desc"], ACCESS), f["n"]
        addresses, before, clock = (g.pointer(name) for name in ("addresses", "before", "clock"))
        own_stamp, own_clock = g.pointer("own_stamp"), g.pointer("own_clock")
        shift, narrow, clock_at = g.get("grid_shift"), g.get("narrow").differs(0), g.get("clock_at")
        someone, one_block, flag = g.get("someone"), g.get("one_block"), g.get("atomic")
        access, pieces, stores = d.get("access"), d.get("width") >> g.get("grid_shift"), d.get("stores").differs(0)
        result, bad = f.var(f.index(0)), f.var(f.index(0))
        low, high = f.var(f.index(1 << 62)), f.var(f.index(-1))
        touched = _Touched(f, g, n * pieces)

        def at(table: Value, place: Value) -> Value:
            with f.if_(narrow):
                result.value = f.emit("i64", f"zext {f.load('i32', table + place * 4, 4)} to i64")
            with f.else_():
                result.value = word(f, table, place)
            return result.value

        def store(table: Value, place: Value, value: Value) -> None:
            with f.if_(narrow):
                f.store(f.emit("i32", f"trunc {value} to i32"), table + place * 4, 4)
            with f.else_():
                put(f, table, place, value)

        def check(then: Value, stamp: Value, t: Value) -> None:
            apart = f.emit("i1", f"and {then.differs(0)}, {((then ^ stamp) & someone).differs(0).text}")
            with f.if_(apart):
                bad.value = bad.value + called(f, "grid_unordered", f["ctx"], then, stamp, t)

        def check_table(name: str) -> None:
            table = g.pointer(name)
            with f.if_(f.emit("i1", f"icmp ne {table}, null")):
                touched.each(lambda number, place, stamp: check(at(table, place), stamp, touched.thread(number)))

        grid = g.pointer("grid")
        with f.loop(0, n) as i:
            t = _listed(f, f["lanes"], i)
            time = word(f, clock, word(f, own_clock, t))
            stamp = (time << clock_at) + word(f, own_stamp, t) + access
            first = word(f, addresses, t) >> shift
            low.value, high.value = f.min(low.value, first), f.max(high.value, first + pieces - 1)
            with f.loop(0, pieces) as piece:
                place = first + piece
                touched.put(i * pieces + piece, place, stamp, t)
                then = at(grid, place)
                flagged = f.select(stores, then & flag, f.index(0))
                bad.value = bad.value | flagged
                check((then | flag) ^ flag, stamp, t)
        _leave_if(f, bad.value.differs(0))
        for name in ("updated", "updated_too"):
            check_table(name)

        def widen(name: str) -> None:
            g.set(f"{name}_low", f.min(g.get(f"{name}_low"), low.value))
            g.set(f"{name}_high", f.max(g.get(f"{name}_high"), high.value))

        def clash(table: Value) -> Callable[[Value, Value, Value], None]:
            def counted(number: Value, place: Value, stamp: Value) -> None:
                bad.value = bad.value + _number(f, at(table, place).differs(stamp))

            return counted

        with f.if_(stores):
            for name in ("last", "other"):
                check_table(name)
            _leave_if(f, bad.value.differs(0))
            touched.each(lambda number, place, stamp: put(f, before, number, at(grid, place)))
            touched.each(lambda number, place, stamp: store(grid, place, stamp))
            touched.each(clash(grid))
            with f.if_(bad.value.differs(0)):
                touched.each(
                    lambda number, place, stamp: store(grid, place, word(f, before, number)), backwards=True
                )
                leave(f, 1)
            widen("written")
            leave(f, 0)
        _leave_if(f, bad.value.differs(0))
        last, other = g.pointer("last"), g.pointer("other")
        widen("read")

        def replace(place: Value, candidate: Value, latest: Value) -> None:
            """Keep a thread besides the last one, of another block if possible."""
            differs = ((candidate ^ latest) & someone).differs(0)
            with f.if_(f.emit("i1", f"and {differs}, {candidate.differs(0).text}")):
                now = at(other, place)
                free = f.emit("i1", f"or {now.equals(0)}, {((now ^ latest) & one_block).equals(0).text}")
                free = f.emit("i1", f"or {free}, {((candidate ^ latest) & one_block).differs(0).text}")
                with f.if_(free):
                    store(other, place, candidate)

        touched.each(lambda number, place, stamp: put(f, before, number, at(last, place)))
        touched.each(lambda number, place, stamp: store(last, place, stamp))
        touched.each(clash(last))
        with f.if_(bad.value.equals(0)):
            touched.each(lambda number, place, stamp: replace(place, word(f, before, number), stamp))
            leave(f, 0)

        def unmark(number: Value, place: Value, stamp: Value) -> None:
            """Lanes whose place a later one reads too count once."""
            with f.if_(at(last, place).differs(stamp)):
                put(f, before, number, f.index(-1))

        def settle(number: Value, place: Value, stamp: Value) -> None:
            earlier = word(f, before, number)
            with f.if_(earlier.differs(-1)):
                first = at(last, place)
                store(last, place, stamp)
                replace(place, earlier, stamp)
                replace(place, first, stamp)

        touched.each(unmark)
        touched.each(lambda number, place, stamp: store(last, place, stamp), backwards=True)  # of each place the first
        touched.each(settle)
        f.ret(f.index(0))


# ---- counts ----


def _count(module: Module) -> None:
    """Count what each warp accesses."""
    wide, flags = vector(LANES, "i64"), vector(LANES, "i8")
    with module.function(
        "count", ("ptr", "ctx"), ("ptr", "desc"), ("ptr", "mask"), local=True, returns="i64"
    ) as f:
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
                            for place, value in enumerate((number, bits, f.index(0), hashed, _form(f, d, bits, relative))):
                                f.store(value, new + place * WORD, 8)
                            for half, own in zip(halves, relative, strict=True):
                                f.store(own, new + (RELATIVE + half) * WORD)
                            g.set("used", used + 1)
                            f.store(
                                f.emit("i32", f"trunc {used + 1} to i32"), slots + at.value * 4, 4
                            )
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
        _leave_if(f, d.get("seen").equals(0))
        _leave_if(f, d.get("refused").differs(0))
        _leave_if(f, g.get("used") + g.get("warps") > f.index(layout.ENTRIES))
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
        _leave_if(f, least > most, 0)  # nobody is active
        _leave_if(f, (every & (width - 1)).differs(0))
        lanes, n = f.var(g.pointer("every_lane")), f.var(threads)
        with f.if_(f.emit("i1", f"icmp ne {mask}, {g.pointer('full').text}")):
            lanes.value, n.value = g.pointer("lanes"), f.index(0)
            with f.loop(0, threads) as t:
                f.store(f.emit("i32", f"trunc {t} to i32"), lanes.value + n.value * 4, 4)
                n.value = n.value + byte(f, mask, t)
        with f.if_(shared):
            outside = f.emit("i1", f"or {least < 0}, {(most > g.get('shared_limit') - width).text}")
            _leave_if(f, outside)
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
                    _leave_if(f, together.differs(0))
                    n.value = over(f, n.value, alike, "udiv")
                _leave_if(f, called(f, "shared_races", f["ctx"], f["desc"], lanes.value, n.value).differs(0))
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
                address = word(f, addresses, _listed(f, lanes.value, i))
                outside = f.emit("i1", f"or {address < starts.value}, {(address + width > stops.value).text}")
                with f.if_(outside):
                    find(address)
                    bad.value = bad.value | _number(f, stops.value < 0)
            _leave_if(f, bad.value.differs(0))
            with f.if_(d.get("follows").differs(0)):
                _leave_if(f, called(f, "grid_races", f["ctx"], f["desc"], lanes.value, n.value).differs(0))
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
                        with f.else_(), f.loop(t, t + WARP) as lane:
                            with f.if_(byte(f, f["mask"], lane).differs(0)):
                                offset = word(f, addresses, lane) + (word(f, bases, lane) & inside) + place * size
                                at, here = memory + offset, values + lane * size
                                if stores:
                                    f.store(f.load(type_, here, size), at, size)
                                else:
                                    f.store(f.load(type_, at, size), here, size)

        for size in (4, 8):
            for place, name in enumerate(("first", "second", "third", "fourth")):
                fits = f.emit("i1", f"and {d.get('size').equals(size)}, {(d.get('elements') > f.index(place)).text}")
                with f.if_(fits):
                    with f.if_(stores):
                        moves(size, True, place, name)
                    with f.else_():
                        moves(size, False, place, name)
        f.ret(f.index(0))


# ---- turns ----


def _run(module: Module) -> None:
    """Run the block of the threads whose turn it is, over and over; returns why it stopped."""
    flags, places_type = vector(LANES, "i8"), vector(LANES, "i32")
    with module.function("run", ("ptr", "ctx"), returns="i64") as f:
        g = Fields(f, f["ctx"], CONTEXT)
        threads, stop, all_warps = g.get("threads"), g.get("stop"), g.get("warps")
        places, own_mask, full, ran, goes = (g.pointer(name) for name in ("places", "mask", "full", "ran", "goes"))
        blocks = g.pointer("blocks")
        count, warps, at = f.var(threads), f.var(all_warps), f.var(f.index(0))
        together = f.var(Value(f, "i1", "true"))
        with f.while_() as again:
            _leave_if(f, g.get("steps") >= g.get("budget"), layout.ENOUGH)
            together.value = g.get("uniform").differs(0)
            at.value = g.get("at")
            with f.if_(together.value):
                count.value, warps.value = threads, all_warps
            with f.else_():
                lowest = f.var(f.const(places_type, 2**31 - 1))
                with f.loop(0, threads, LANES) as t:
                    lowest.value = f.overloaded("llvm.smin", lowest.value, f.load(places_type, places + t * 4))
                least = f.intrinsic(f"llvm.vector.reduce.smin.v{LANES}i32", "i32", lowest.value)
                at.value = f.emit("i64", f"sext {least} to i64")
                _leave_if(f, at.value >= stop, layout.NOBODY)
                here = f.broadcast(least, LANES)
                count.value, warps.value = f.index(0), f.index(0)
                with f.loop(0, threads, WARP) as t:
                    inside = f.index(0)
                    for half in range(0, WARP, LANES):
                        there = f.load(places_type, places + (t + half) * 4)
                        some = f.emit(vector(LANES, "i1"), f"icmp eq {there}, {here.text}")
                        f.store(f.convert("zext", some, "i8"), own_mask + t + half)
                        bits = f.emit("i64", f"zext {f.bitcast(some, f'i{LANES}')} to i64")
                        inside = inside + f.overloaded("llvm.ctpop", bits)
                    count.value = count.value + inside
                    warps.value = warps.value + f.emit("i64", f"zext {inside.differs(0)} to i64")
                with f.if_(count.value.equals(threads)):
                    g.set("uniform", 1)
                    together.value = Value(f, "i1", "true")
            g.set("at", at.value)
            _leave_if(f, at.value >= stop, layout.NOBODY)
            mask = f.select(together.value, full, own_mask)
            base = blocks + at.value * (len(BLOCK) * WORD)
            b = Fields(f, base, BLOCK)
            code = b.pointer("ready")
            _leave_if(f, f.is_null(code), layout.UNKNOWN)
            parted = f.emit("i1", f"xor {together.value}, true")
            _leave_if(
                f, f.emit("i1", f"and {parted}, {b.get('gathers').differs(0).text}"), layout.UNKNOWN
            )
            b.add("every_warp", warps.value)
            b.add("every_thread", count.value)
            g.add("elapsed", g.get("ended") - b.get("first"))
            g.set("ended", b.get("last"))
            g.add("steps", 1)
            with f.if_(together.value):
                f.store(Value(f, "i8", "1"), ran + threads)  # a flag for all
            with f.else_(), f.loop(0, threads, LANES) as t:
                f.store(f.load(flags, ran + t) | f.load(flags, own_mask + t), ran + t)
            stopped = f.result_of(code, "i64", f["ctx"], mask, b.get("first"))
            with f.if_(stopped.differs(0)):
                f.line(f"ret {stopped + (layout.INSIDE - 1)}")
                f._label(f"after{f._fresh()}")
            way = b.get("way")
            _leave_if(f, way.equals(layout.ELSEWHERE), layout.END)

            def go(block: Value, mask: Value = mask) -> None:
                with f.if_(together.value):
                    g.set("at", block)
                with f.else_():
                    put_there = f.broadcast(f.emit("i32", f"trunc {block} to i32"), LANES)
                    with f.loop(0, threads, LANES) as t:
                        some = f.emit(vector(LANES, "i1"), f"icmp ne {f.load(flags, mask + t)}, zeroinitializer")
                        f.store(f.select(some, put_there, f.load(places_type, places + t * 4)), places + t * 4)

            following = at.value + 1
            with f.if_(way.equals(layout.FOLLOWS)):
                go(following)
            with f.if_(way.equals(layout.MEETS)):
                late = g.get("clock_limit") <= g.get("ticks")
                _leave_if(f, f.emit("i1", f"or {parted}, {late.text}"), layout.END)
                with f.if_(g.get("clocked").differs(0)):
                    each, clock, known = g.get("each_warp"), g.pointer("clock"), g.pointer("known")
                    least = f.var(f.index(1 << 62))
                    with f.loop(0, g.get("clocked")) as block:
                        with f.loop(0, each) as warp, f.loop(0, each) as other:
                            seen = word(f, clock, block * each + other)
                            put(f, known, (block * each + warp) * each + other, seen)
                        with f.loop(0, each) as warp:
                            place = block * each + warp
                            least.value = f.min(least.value, word(f, clock, place))
                            put(f, clock, place, word(f, clock, place) + 1)
                    g.add("ticks", 1)
                    g.set("seen_by_all", least.value)
                go(following)
            with f.if_(way.equals(layout.BRANCHES)):
                target = b.get("target")
                with f.if_(b.get("guarded").equals(0)):
                    go(target)
                with f.else_():
                    going, parting = f.var(f.index(0)), f.var(f.index(0))
                    with f.loop(0, threads, WARP) as t:
                        jumps, actives = f.index(0), f.index(0)
                        for half in range(0, WARP, LANES):
                            some = f.load(flags, mask + t + half)
                            taken = f.load(flags, goes + t + half) & some
                            f.store(taken, goes + t + half)
                            for vector_, add in ((taken, True), (some, False)):
                                flag = f.emit(vector(LANES, "i1"), f"icmp ne {vector_}, zeroinitializer")
                                bits = f.emit("i64", f"zext {f.bitcast(flag, f'i{LANES}')} to i64")
                                bits = bits << half if half else bits
                                jumps, actives = (jumps | bits, actives) if add else (jumps, actives | bits)
                        going.value = going.value + f.overloaded("llvm.ctpop", jumps)
                        apart = f.emit("i1", f"and {jumps.differs(0)}, {jumps.differs(actives).text}")
                        parting.value = parting.value + f.emit("i64", f"zext {apart} to i64")
                    new = f.emit("i1", f"and {parting.value.differs(0)}, {b.get('diverged').equals(0).text}")
                    _leave_if(f, new, layout.END)
                    b.add("branches", warps.value)
                    b.add("divergent", parting.value)
                    with f.if_(going.value.equals(0)):
                        go(following)
                    with f.else_():
                        with f.if_(going.value.equals(count.value)):
                            go(target)
                        with f.else_():
                            away = f.broadcast(f.emit("i32", f"trunc {target} to i32"), LANES)
                            stay = f.broadcast(f.emit("i32", f"trunc {following} to i32"), LANES)
                            with f.loop(0, threads, LANES) as t:
                                some = f.emit(
                                    vector(LANES, "i1"), f"icmp ne {f.load(flags, mask + t)}, zeroinitializer"
                                )
                                taken = f.emit(
                                    vector(LANES, "i1"), f"icmp ne {f.load(flags, goes + t)}, zeroinitializer"
                                )
                                there = f.select(some, stay, f.load(places_type, places + t * 4))
                                f.store(f.select(taken, away, there), places + t * 4)
                            g.set("uniform", 0)
        f.ret(f.index(layout.ENOUGH))
