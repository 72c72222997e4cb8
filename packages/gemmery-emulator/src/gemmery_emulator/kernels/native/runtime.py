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
    """Whether nothing orders an earlier access of another thread before thread `t`."""
    with module.function(
        "shared_unordered", ("ptr", "ctx"), ("i64", "then"), ("i64", "t"), local=True, returns="i64"
    ) as f:
        g, then, t = Fields(f, f["ctx"], CONTEXT), f["then"], f["t"]
        threads, warps = g.get("block_threads"), g.get("each_warp")
        other = then & THREAD
        _leave_if(f, other.equals(over(f, t, threads, "urem")), 0)
        _leave_if(f, (then & UNDER_WAY).differs(0))
        row = (t >> 5) * warps + (other >> 5)
        late = (then >> CLOCK_AT) > word(f, g.pointer("known"), row)
        f.ret(f.emit("i64", f"zext {late} to i64"))


def _grid_unordered(module: Module) -> None:
    """The same for an earlier access to global memory, whose stamp is `own`."""
    params = (("ptr", "ctx"), ("i64", "then"), ("i64", "own"), ("i64", "t"))
    with module.function("grid_unordered", *params, local=True, returns="i64") as f:
        g, then, t = Fields(f, f["ctx"], CONTEXT), f["then"], f["t"]
        someone, one_block = g.get("someone"), g.get("one_block")
        apart = then ^ f["own"]
        _leave_if(f, then.equals(0), 0)
        _leave_if(f, (apart & someone).equals(0), 0)
        _leave_if(f, (apart & one_block).differs(0))
        threads, warps = g.get("block_threads"), g.get("each_warp")
        second = (then & (someone - one_block)) >> g.get("thread_at")
        block = over(f, t, threads, "udiv") * g.get("many")
        own_warp = over(f, t, threads, "urem") >> 5
        row = (block * warps + own_warp) * warps + (second >> 5)
        late = (then >> g.get("clock_at")) > word(f, g.pointer("known"), row)
        f.ret(f.emit("i64", f"zext {late} to i64"))


def _shared(module: Module) -> None:
    """Check an access of the first `n` listed lanes to shared memory, then keep it; 1 if Python has to look at it."""
    params = (("ptr", "ctx"), ("ptr", "desc"), ("i64", "n"))
    with module.function("shared_races", *params, local=True, returns="i64") as f:
        g, d, n = Fields(f, f["ctx"], CONTEXT), Fields(f, f["desc"], ACCESS), f["n"]
        threads, own_index = g.get("block_threads"), d.get("index") << INDEX_AT
        lanes, addresses, before = (g.pointer(name) for name in ("lanes", "addresses", "before"))
        written, read, read_too = (g.pointer(name) for name in ("written", "read", "read_too"))
        shift, clock = g.get("shift"), g.pointer("clock")
        granules = g.get("granules")
        pieces = d.get("width") >> shift

        def each(body: Callable[[Value, Value, Value], None]) -> None:
            """For each lane and granule: its number, its place and its thread."""
            with f.loop(0, n) as i:
                t = f.emit("i64", f"sext {f.load('i32', lanes + i * 4, 4)} to i64")
                block = over(f, t, threads, "udiv") * granules
                first = (word(f, addresses, t) >> shift) + block
                with f.loop(0, pieces) as piece:
                    body(i * pieces + piece, first + piece, t)

        def stamp(t: Value) -> Value:
            own = over(f, t, threads, "urem")
            return (word(f, clock, t >> 5) << CLOCK_AT) + own_index + own

        bad = f.var(f.index(0))

        def check(place: Value, t: Value, table: Value) -> None:
            bad.value = bad.value + called(f, "shared_unordered", f["ctx"], word(f, table, place), t)

        def check_read(number: Value, place: Value, t: Value) -> None:
            never = f.emit("i64", f"zext {word(f, written, place).equals(0)} to i64")
            bad.value = bad.value + never
            check(place, t, written)

        def check_write(number: Value, place: Value, t: Value) -> None:
            under_way = f.emit("i64", f"zext {(word(f, written, place) & UNDER_WAY).differs(0)} to i64")
            bad.value = bad.value + under_way
            for table in (written, read, read_too):
                check(place, t, table)

        def take(table: Value) -> Callable[[Value, Value, Value], None]:
            def taken(number: Value, place: Value, t: Value) -> None:
                put(f, before, number, word(f, table, place))

            return taken

        def keep(table: Value) -> Callable[[Value, Value, Value], None]:
            return lambda number, place, t: put(f, table, place, stamp(t))

        def move_earlier(number: Value, place: Value, t: Value) -> None:
            earlier = word(f, before, number)
            with f.if_(((earlier ^ word(f, read, place)) & THREAD).differs(0)):
                put(f, read_too, place, earlier)

        def move_lost(number: Value, place: Value, t: Value) -> None:
            own = stamp(t)
            with f.if_(((own ^ word(f, read, place)) & THREAD).differs(0)):
                put(f, read_too, place, own)

        def lost(number: Value, place: Value, t: Value) -> None:
            apart = ((stamp(t) ^ word(f, written, place)) & THREAD).differs(0)
            bad.value = bad.value + f.emit("i64", f"zext {apart} to i64")

        with f.if_(d.get("stores").equals(0)):
            each(check_read)
            _leave_if(f, bad.value.differs(0))
            each(take(read))
            each(keep(read))
            each(move_earlier)
            each(move_lost)
            leave(f, 0)
        each(check_write)
        _leave_if(f, bad.value.differs(0))
        each(take(written))
        each(keep(written))
        each(lost)
        with f.if_(bad.value.differs(0)):  # two threads write one place: as it was, for Python to report it
            each(lambda number, place, t: put(f, written, place, word(f, before, number)))
            leave(f, 1)
        f.ret(f.index(0))


def _grid(module: Module) -> None:
    """The same for global memory."""
    params = (("ptr", "ctx"), ("ptr", "desc"), ("i64", "n"))
    with module.function("grid_races", *params, local=True, returns="i64") as f:
        g, d, n = Fields(f, f["ctx"], CONTEXT), Fields(f, f["desc"], ACCESS), f["n"]
        lanes, addresses, before = (g.pointer(name) for name in ("lanes", "addresses", "before"))
        threads, shift, narrow = g.get("block_threads"), g.get("grid_shift"), g.get("narrow").differs(0)
        clock, clock_at, thread_at, block_at = g.pointer("clock"), *(
            g.get(name) for name in ("clock_at", "thread_at", "block_at")
        )
        someone, one_block, first_block, many = (
            g.get(name) for name in ("someone", "one_block", "first_block", "many")
        )
        warps, access, pieces = g.get("each_warp"), d.get("access"), d.get("width") >> g.get("grid_shift")
        result = f.var(f.index(0))

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

        def stamp(t: Value) -> Value:
            block, own = over(f, t, threads, "udiv"), over(f, t, threads, "urem")
            time = word(f, clock, block * many * warps + (own >> 5))
            return (time << clock_at) + ((block + first_block) << block_at) + (own << thread_at) + access

        def each(body: Callable[[Value, Value, Value], None], backwards: bool = False) -> None:
            count = n * pieces
            with f.loop(0, count) as k:
                number = count - 1 - k if backwards else k
                i = over(f, number, pieces, "udiv")
                t = f.emit("i64", f"sext {f.load('i32', lanes + i * 4, 4)} to i64")
                body(number, (word(f, addresses, t) >> shift) + over(f, number, pieces, "urem"), t)

        bad = f.var(f.index(0))

        def check(name: str, place: Value, t: Value) -> None:
            table = g.pointer(name)
            with f.if_(f.emit("i1", f"icmp ne {table}, null")):
                then = at(table, place)
                bad.value = bad.value + called(f, "grid_unordered", f["ctx"], then, stamp(t), t)

        def check_all(number: Value, place: Value, t: Value) -> None:
            then = at(g.pointer("grid"), place)
            flag = g.get("atomic")
            bad.value = bad.value + f.emit("i64", f"zext {((then & flag) & stores).differs(0)} to i64")
            own = (then | flag) ^ flag
            bad.value = bad.value + called(f, "grid_unordered", f["ctx"], own, stamp(t), t)
            for name in ("updated", "updated_too"):
                check(name, place, t)
            with f.if_(stores.differs(0)):
                for name in ("last", "other"):
                    check(name, place, t)

        def widen(name: str, place: Value) -> None:
            g.set(f"{name}_low", f.min(g.get(f"{name}_low"), place))
            g.set(f"{name}_high", f.max(g.get(f"{name}_high"), place))

        stores = f.index(0) - d.get("stores")  # all ones for a store
        each(check_all)
        _leave_if(f, bad.value.differs(0))
        with f.if_(stores.differs(0)):
            table = g.pointer("grid")
            each(lambda number, place, t: put(f, before, number, at(table, place)))
            each(lambda number, place, t: store(table, place, stamp(t)))

            def lost(number: Value, place: Value, t: Value) -> None:
                apart = at(table, place).differs(stamp(t))
                bad.value = bad.value + f.emit("i64", f"zext {apart} to i64")
                widen("written", place)

            each(lost)
            with f.if_(bad.value.differs(0)):
                each(lambda number, place, t: store(table, place, word(f, before, number)), backwards=True)
                leave(f, 1)
            leave(f, 0)
        table, other = g.pointer("last"), g.pointer("other")
        _leave_if(f, f.is_null(table))
        clashes = f.var(f.index(0))

        def replace(place: Value, candidate: Value, last: Value) -> None:
            """Keep a thread besides the last one, of another block if possible."""
            differs = ((candidate ^ last) & someone).differs(0)
            with f.if_(f.emit("i1", f"and {differs}, {candidate.differs(0).text}")):
                now = at(other, place)
                free = f.emit("i1", f"or {now.equals(0)}, {((now ^ last) & one_block).equals(0).text}")
                free = f.emit("i1", f"or {free}, {((candidate ^ last) & one_block).differs(0).text}")
                with f.if_(free):
                    store(other, place, candidate)

        each(lambda number, place, t: put(f, before, number, at(table, place)))

        def last_one(number: Value, place: Value, t: Value) -> None:
            store(table, place, stamp(t))
            widen("read", place)

        each(last_one)

        def clash(number: Value, place: Value, t: Value) -> None:
            apart = at(table, place).differs(stamp(t))
            clashes.value = clashes.value + f.emit("i64", f"zext {apart} to i64")

        each(clash)

        def when_last(body: Callable[[Value, Value, Value], None]) -> Callable[[Value, Value, Value], None]:
            def those(number: Value, place: Value, t: Value) -> None:
                mark = word(f, before, number)
                with f.if_(mark.differs(-1)):
                    body(number, place, t)

            return those

        with f.if_(clashes.value.equals(0)):
            each(lambda number, place, t: replace(place, word(f, before, number), stamp(t)))
            leave(f, 0)

        def unmark(number: Value, place: Value, t: Value) -> None:
            """Lanes whose place a later one reads too count once."""
            with f.if_(at(table, place).differs(stamp(t))):
                put(f, before, number, f.index(-1))

        each(unmark)
        each(lambda number, place, t: store(table, place, stamp(t)), backwards=True)  # now the first lane of each place

        def settle(number: Value, place: Value, t: Value) -> None:
            first, own = at(table, place), stamp(t)
            store(table, place, own)
            replace(place, word(f, before, number), own)
            replace(place, first, own)

        each(when_last(settle))
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
            with f.if_(bits.differs(0)):
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
                            for place, value in enumerate((number, bits, f.index(0), hashed)):
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
                        again.until(found)
                        at.value = (at.value + 1) & (layout.SLOTS - 1)
        f.ret(f.index(0))


def _access(module: Module) -> None:
    """Check an access, keep it for later checks and count it; 1 if Python has to execute it."""
    with module.function("access", ("ptr", "ctx"), ("ptr", "desc"), ("ptr", "mask"), returns="i64") as f:
        g, d, mask = Fields(f, f["ctx"], CONTEXT), Fields(f, f["desc"], ACCESS), f["mask"]
        threads, width, shared = g.get("threads"), d.get("width"), d.get("shared").differs(0)
        addresses, lanes = g.pointer("addresses"), g.pointer("lanes")
        _leave_if(f, d.get("seen").equals(0))
        _leave_if(f, d.get("refused").differs(0))
        _leave_if(f, g.get("used") + g.get("warps") > f.index(layout.ENTRIES))
        count = f.var(f.index(0))
        with f.loop(0, threads) as t:
            f.store(f.emit("i32", f"trunc {t} to i32"), lanes + count.value * 4, 4)
            count.value = count.value + byte(f, mask, t)
        n = count.value
        _leave_if(f, n.equals(0), 0)
        bad, starts, stops = f.var(f.index(0)), f.var(f.index(0)), f.var(f.index(-1))
        arrays, arrays_count, limit = g.pointer("arrays"), g.get("array_count"), g.get("shared_limit") - width
        with f.loop(0, n) as i:
            t = f.emit("i64", f"sext {f.load('i32', lanes + i * 4, 4)} to i64")
            address = word(f, addresses, t)
            bad.value = bad.value | (address & (width - 1))
            with f.if_(shared):
                outside = f.emit("i1", f"or {address < 0}, {(address > limit).text}")
                bad.value = bad.value | f.emit("i64", f"zext {outside} to i64")
            with f.else_():
                end = address + width
                outside = f.emit("i1", f"or {address < starts.value}, {(end > stops.value).text}")
                with f.if_(outside):
                    starts.value, stops.value = f.index(0), f.index(-1)
                    with f.loop(0, arrays_count) as k:
                        start, stop = word(f, arrays, k * 2), word(f, arrays, k * 2 + 1)
                        inside = f.emit("i1", f"and {address >= start}, {(end <= stop).text}")
                        with f.if_(inside):
                            starts.value, stops.value = start, stop
                    bad.value = bad.value | f.emit("i64", f"zext {stops.value < 0} to i64")
        _leave_if(f, bad.value.differs(0))
        with f.if_(shared):
            with f.if_(g.get("races").differs(0)):
                own, followed = g.get("block_threads"), g.get("followed")
                with f.if_(g.get("alike") > f.index(1)):  # one block stands for all, as long as all do the same
                    with f.loop(own, threads) as t:
                        first = over(f, t, own, "urem")
                        here, there = byte(f, mask, t), byte(f, mask, first)
                        apart = word(f, addresses, t) ^ word(f, addresses, first)
                        bad.value = bad.value | (here ^ there) | f.select(here.differs(0), apart, f.index(0))
                    _leave_if(f, bad.value.differs(0))
                checked = f.var(f.index(0))
                with f.loop(0, n) as i:
                    t = f.emit("i64", f"sext {f.load('i32', lanes + i * 4, 4)} to i64")
                    checked.value = checked.value + f.emit("i64", f"zext {t < followed} to i64")
                with f.if_(checked.value > f.index(0)):
                    _leave_if(f, called(f, "shared_races", f["ctx"], f["desc"], checked.value).differs(0))
        with f.else_(), f.if_(d.get("follows").differs(0)):
            _leave_if(f, called(f, "grid_races", f["ctx"], f["desc"], n).differs(0))
        f.ret(called(f, "count", f["ctx"], f["desc"], mask))


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
                    with f.loop(0, g.get("clocked")) as block:
                        with f.loop(0, each) as warp, f.loop(0, each) as other:
                            seen = word(f, clock, block * each + other)
                            put(f, known, (block * each + warp) * each + other, seen)
                        with f.loop(0, each) as warp:
                            place = block * each + warp
                            put(f, clock, place, word(f, clock, place) + 1)
                    g.add("ticks", 1)
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
