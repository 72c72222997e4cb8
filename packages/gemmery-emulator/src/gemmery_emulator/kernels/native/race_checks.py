"""Code that looks for races of an access: it keeps what is in order, and leaves the rest to Python.

The tables and their stamps are those of findings/races.py and findings/grid.py, and what is kept in them is the same.
"""

from __future__ import annotations

from collections.abc import Callable

from gemmery.cpu.ir import Function, Module, Value
from gemmery_emulator.findings.races import CLOCK_AT, THREAD, UNDER_WAY
from gemmery_emulator.kernels.native.frames import (
    ACCESS,
    CONTEXT,
    FrameFields,
    called,
    leave,
    leave_if,
    listed,
    number_of,
    over,
    put,
    word,
)


def add_to(module: Module) -> None:
    """Add `shared_races` and `grid_races`."""
    _shared_unordered(module)
    _grid_unordered(module)
    _shared(module)
    _grid(module)


def _shared_unordered(module: Module) -> None:
    """Whether nothing orders an earlier access of another thread before thread `t`, whose stamp is `own`."""
    params = (("ptr", "ctx"), ("i64", "then"), ("i64", "own"), ("i64", "t"))
    with module.function("shared_unordered", *params, local=True, returns="i64") as f:
        g, then = FrameFields(f, f["ctx"], CONTEXT), f["then"]
        leave_if(f, (then & UNDER_WAY).differs(0))
        leave_if(f, ((then ^ f["own"]) & THREAD).equals(0), 0)
        row = (f["t"] >> 5) * g.get("each_warp") + ((then & THREAD) >> 5)
        f.ret(number_of(f, (then >> CLOCK_AT) > word(f, g.pointer("known"), row)))


def _grid_unordered(module: Module) -> None:
    """The same for an earlier access to global memory."""
    params = (("ptr", "ctx"), ("i64", "then"), ("i64", "own"), ("i64", "t"))
    with module.function("grid_unordered", *params, local=True, returns="i64") as f:
        g, then, t = FrameFields(f, f["ctx"], CONTEXT), f["then"], f["t"]
        someone, one_block = g.get("someone"), g.get("one_block")
        apart = then ^ f["own"]
        leave_if(f, (apart & someone).equals(0), 0)
        leave_if(f, (apart & one_block).differs(0))
        threads, warps = g.get("block_threads"), g.get("each_warp")
        second = (then & (someone - one_block)) >> g.get("thread_at")
        block = over(f, t, threads, "udiv") * g.get("many")
        own_warp = over(f, t, threads, "urem") >> 5
        row = (block * warps + own_warp) * warps + (second >> 5)
        f.ret(number_of(f, (then >> g.get("clock_at")) > word(f, g.pointer("known"), row)))


class _Touched:
    """What the lanes of an access touch: a place, a thread and a stamp for each, in arrays."""

    def __init__(self, f: Function, g: FrameFields, count: Value) -> None:
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
        g, d, n = FrameFields(f, f["ctx"], CONTEXT), FrameFields(f, f["desc"], ACCESS), f["n"]
        addresses, before, clock, own_lane = (g.pointer(name) for name in ("addresses", "before", "clock", "own_lane"))
        written, read, read_too = (g.pointer(name) for name in ("written", "read", "read_too"))
        shift, own_index, begins = g.get("shift"), d.get("mark"), g.pointer("begins")
        pieces, least_clock = d.get("width") >> shift, (g.get("seen_by_all") + 1) << CLOCK_AT
        stores, bad = d.get("stores").differs(0), f.var(f.index(0))
        touched = _Touched(f, g, n * pieces)

        def check(table: Value, place: Value, stamp: Value, t: Value) -> None:
            then = word(f, table, place)
            with f.if_(then >= least_clock):
                bad.value = bad.value + called(f, "shared_unordered", f["ctx"], then, stamp, t)

        with f.loop(0, n) as i:
            t = listed(f, f["lanes"], i)
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
                    bad.value = bad.value + number_of(f, word(f, written, place).equals(0))
        leave_if(f, bad.value.differs(0))

        def another(a: Value, b: Value) -> Value:
            return ((a ^ b) & THREAD).differs(0)

        def take(table: Value) -> Callable[[Value, Value, Value], None]:
            def add_pair(number: Value, place: Value, stamp: Value) -> None:
                put(f, before, number, word(f, table, place))

            return add_pair

        def keep(table: Value) -> Callable[[Value, Value, Value], None]:
            return lambda number, place, stamp: put(f, table, place, stamp)

        with f.if_(stores):
            touched.each(take(written))
            touched.each(keep(written))

            def lost(number: Value, place: Value, stamp: Value) -> None:
                bad.value = bad.value + number_of(f, another(stamp, word(f, written, place)))

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
            bad.value = bad.value + number_of(f, another(stamp, last))

        touched.each(move_earlier)
        leave_if(f, bad.value.equals(0), 0)

        def move_lost(number: Value, place: Value, stamp: Value) -> None:
            with f.if_(another(stamp, word(f, read, place))):
                put(f, read_too, place, stamp)

        touched.each(move_lost)
        f.ret(f.index(0))


def _grid(module: Module) -> None:
    """The same for global memory."""
    params = (("ptr", "ctx"), ("ptr", "desc"), ("ptr", "lanes"), ("i64", "n"))
    with module.function("grid_races", *params, local=True, returns="i64") as f:
        g, d, n = FrameFields(f, f["ctx"], CONTEXT), FrameFields(f, f["desc"], ACCESS), f["n"]
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
            t = listed(f, f["lanes"], i)
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
        leave_if(f, bad.value.differs(0))
        for name in ("updated", "updated_too"):
            check_table(name)

        def widen(name: str) -> None:
            g.set(f"{name}_low", f.min(g.get(f"{name}_low"), low.value))
            g.set(f"{name}_high", f.max(g.get(f"{name}_high"), high.value))

        def clash(table: Value) -> Callable[[Value, Value, Value], None]:
            def counted(number: Value, place: Value, stamp: Value) -> None:
                bad.value = bad.value + number_of(f, at(table, place).differs(stamp))

            return counted

        with f.if_(stores):
            for name in ("last", "other"):
                check_table(name)
            leave_if(f, bad.value.differs(0))
            touched.each(lambda number, place, stamp: put(f, before, number, at(grid, place)))
            touched.each(lambda number, place, stamp: store(grid, place, stamp))
            touched.each(clash(grid))
            with f.if_(bad.value.differs(0)):
                touched.each(lambda number, place, stamp: store(grid, place, word(f, before, number)), backwards=True)
                leave(f, 1)
            widen("written")
            leave(f, 0)
        leave_if(f, bad.value.differs(0))
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
