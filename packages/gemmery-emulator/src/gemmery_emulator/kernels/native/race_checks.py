"""Code that looks for races of an access: it keeps what is in order, and leaves the rest to Python.

The tables and their stamps are those of findings/races.py and findings/grid.py, and what is kept in them is the same.
"""

from __future__ import annotations

from collections.abc import Callable

from gemmery.cpu.ir import Function, Module, Value
from gemmery_emulator.findings.races import CLOCK_AT, THREAD, UNDER_WAY
from gemmery_emulator.kernels.native.frames import ACCESS, CONTEXT, FrameFields


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
        g.leave_if((then & UNDER_WAY).differs(0))
        g.leave_if(((then ^ f["own"]) & THREAD).equals(0), 0)
        row = (f["t"] >> 5) * g.get("each_warp") + ((then & THREAD) >> 5)
        f.ret(g.number_of((then >> CLOCK_AT) > g.word(g.pointer("known"), row)))


def _grid_unordered(module: Module) -> None:
    """The same for an earlier access to global memory."""
    params = (("ptr", "ctx"), ("i64", "then"), ("i64", "own"), ("i64", "t"))
    with module.function("grid_unordered", *params, local=True, returns="i64") as f:
        g, then, t = FrameFields(f, f["ctx"], CONTEXT), f["then"], f["t"]
        someone, one_block = g.get("someone"), g.get("one_block")
        apart = then ^ f["own"]
        g.leave_if((apart & someone).equals(0), 0)
        g.leave_if((apart & one_block).differs(0))
        threads, warps = g.get("block_threads"), g.get("each_warp")
        second = (then & (someone - one_block)) >> g.get("thread_at")
        block = g.over(t, threads, "udiv") * g.get("many")
        own_warp = g.over(t, threads, "urem") >> 5
        row = (block * warps + own_warp) * warps + (second >> 5)
        f.ret(g.number_of((then >> g.get("clock_at")) > g.word(g.pointer("known"), row)))


Each = Callable[[Value, Value, Value], None]  # what to do with an element: its number, its place and its stamp


class _Touched:
    """What the lanes of an access touch: a place, a thread and a stamp for each, in arrays."""

    def __init__(self, f: Function) -> None:
        self.f, self.g, self.d = f, FrameFields(f, f["ctx"], CONTEXT), FrameFields(f, f["desc"], ACCESS)
        names = ("where", "stamps", "who", "before", "addresses", "clock")
        self._where, self._stamps, self._threads, self.before, self._addresses, self._clock = map(self.g.pointer, names)
        self.bad, self.stores = f.var(f.index(0)), self.d.get("stores").differs(0)

    def at(self, table: Value, place: Value) -> Value:
        """Load the stamp of a place."""
        return self.g.word(table, place)

    def store(self, table: Value, place: Value, stamp: Value) -> None:
        """Store the stamp of a place."""
        self.g.put(table, place, stamp)

    def touch(
        self, shift: Value, own: Callable[[Value], tuple[Value, Value]], check: Callable[[Value, Value, Value], None]
    ) -> None:
        """List what is touched and check it: `own` gives where a thread's places begin and its stamp; `check` takes a
        place, a stamp and a thread.
        """
        f, pieces, offset = self.f, self.d.get("width") >> shift, self.d.get("offset")
        self._count = f["n"] * pieces
        with f.loop(0, f["n"]) as i:
            t = self.g.listed(f["lanes"], i)
            begin, stamp = own(t)
            first = ((self.g.word(self._addresses, t) + offset) >> shift) + begin
            with f.loop(0, pieces) as piece:
                place = first + piece
                for table, value in ((self._where, place), (self._stamps, stamp), (self._threads, t)):
                    self.g.put(table, i * pieces + piece, value)
                check(place, stamp, t)

    def clock(self, row: Value) -> Value:
        """Return the clock of a warp."""
        return self.g.word(self._clock, row)

    def each(self, body: Each, backwards: bool = False) -> None:
        """For each element: its number, its place and its stamp."""
        f = self.f
        with f.loop(0, self._count) as k:
            number = self._count - 1 - k if backwards else k
            body(number, self.g.word(self._where, number), self.g.word(self._stamps, number))

    def replace(self, table: Value) -> None:
        """Keep the stamps in a table, and in `before` those that it had."""
        self.each(lambda number, place, stamp: self.g.put(self.before, number, self.at(table, place)))
        self.each(lambda number, place, stamp: self.store(table, place, stamp))

    def written(self, table: Value, lost: Callable[[Value, Value], Value]) -> None:
        """Keep stores; where a thread has lost its place to another, leave the table as it was, for Python."""
        f = self.f
        self.replace(table)
        self.count(lambda place, stamp: lost(stamp, self.at(table, place)))
        with f.if_(self.bad.value.differs(0)):
            self.each(
                lambda number, place, stamp: self.store(table, place, self.g.word(self.before, number)), backwards=True
            )
            self.g.leave(1)

    def count(self, condition: Callable[[Value, Value], Value]) -> None:
        """Count the elements for which a condition of the place and the stamp holds."""

        def add(number: Value, place: Value, stamp: Value) -> None:
            self.bad.value = self.bad.value + self.g.number_of(condition(place, stamp))

        self.each(add)


def _shared(module: Module) -> None:
    """Check an access of the first `n` listed lanes to shared memory, then keep it; 1 if Python has to look at it."""
    params = (("ptr", "ctx"), ("ptr", "desc"), ("ptr", "lanes"), ("i64", "n"))
    with module.function("shared_races", *params, local=True, returns="i64") as f:
        touched = _Touched(f)
        g, bad = touched.g, touched.bad
        written, read, read_too, begins, own_lane = (
            g.pointer(name) for name in ("written", "read", "read_too", "begins", "own_lane")
        )
        own_index, least_clock = touched.d.get("mark"), (g.get("seen_by_all") + 1) << CLOCK_AT

        def own(t: Value) -> tuple[Value, Value]:
            return g.word(begins, t), (touched.clock(t >> 5) << CLOCK_AT) + own_index + g.word(own_lane, t)

        def check(table: Value, place: Value, stamp: Value, t: Value) -> None:
            then = g.word(table, place)
            with f.if_(then >= least_clock):
                bad.value = bad.value + g.called("shared_unordered", f["ctx"], then, stamp, t)

        def check_all(place: Value, stamp: Value, t: Value) -> None:
            check(written, place, stamp, t)
            with f.if_(touched.stores):
                check(read, place, stamp, t)
                check(read_too, place, stamp, t)
            with f.else_():
                bad.value = bad.value + g.number_of(g.word(written, place).equals(0))

        def another(a: Value, b: Value) -> Value:
            return ((a ^ b) & THREAD).differs(0)

        touched.touch(g.get("shift"), own, check_all)
        g.leave_if(bad.value.differs(0))
        with f.if_(touched.stores):
            touched.written(written, another)
            g.leave(0)
        touched.replace(read)

        def move_earlier(number: Value, place: Value, stamp: Value) -> None:
            earlier, last = g.word(touched.before, number), g.word(read, place)
            with f.if_(another(earlier, last)):
                g.put(read_too, place, earlier)
            bad.value = bad.value + g.number_of(another(stamp, last))

        def move_lost(number: Value, place: Value, stamp: Value) -> None:
            with f.if_(another(stamp, g.word(read, place))):
                g.put(read_too, place, stamp)

        touched.each(move_earlier)
        g.leave_if(bad.value.equals(0), 0)
        touched.each(move_lost)
        f.ret(f.index(0))


class _GridTouched(_Touched):
    """The same for global memory, whose tables may have stamps of 4 bytes."""

    def __init__(self, f: Function) -> None:
        super().__init__(f)
        self._narrow, self._result = self.g.get("narrow").differs(0), f.var(f.index(0))
        self._someone, self._one_block = self.g.get("someone"), self.g.get("one_block")
        self.low, self.high = f.var(f.index(1 << 62)), f.var(f.index(-1))

    def at(self, table: Value, place: Value) -> Value:
        f = self.f
        with f.if_(self._narrow):
            self._result.value = f.emit("i64", f"zext {f.load('i32', table + place * 4, 4)} to i64")
        with f.else_():
            self._result.value = self.g.word(table, place)
        return self._result.value

    def store(self, table: Value, place: Value, stamp: Value) -> None:
        f = self.f
        with f.if_(self._narrow):
            f.store(f.emit("i32", f"trunc {stamp} to i32"), table + place * 4, 4)
        with f.else_():
            self.g.put(table, place, stamp)

    def check(self, then: Value, stamp: Value, t: Value) -> None:
        """Note an earlier access of another thread that nothing orders."""
        f = self.f
        with f.if_(self.g.both(then.differs(0), ((then ^ stamp) & self._someone).differs(0))):
            self.bad.value = self.bad.value + self.g.called("grid_unordered", f["ctx"], then, stamp, t)

    def check_table(self, name: str) -> None:
        """Check the accesses in a table, if there is one."""
        table = self.g.pointer(name)
        with self.f.if_(self.f.emit("i1", f"icmp ne {table}, null")):
            self.each(
                lambda number, place, stamp: self.check(
                    self.at(table, place), stamp, self.g.word(self._threads, number)
                )
            )

    def widen(self, name: str) -> None:
        """Note that places of a table have stamps."""
        f, g = self.f, self.g
        g.set(f"{name}_low", f.min(g.get(f"{name}_low"), self.low.value))
        g.set(f"{name}_high", f.max(g.get(f"{name}_high"), self.high.value))

    def keep_other(self, place: Value, candidate: Value, latest: Value) -> None:
        """Keep a thread besides the last one, of another block if possible."""
        f, other, one_block = self.f, self.g.pointer("other"), self._one_block
        with f.if_(self.g.both(((candidate ^ latest) & self._someone).differs(0), candidate.differs(0))):
            now = self.at(other, place)
            free = f.emit("i1", f"or {now.equals(0)}, {((now ^ latest) & one_block).equals(0).text}")
            free = f.emit("i1", f"or {free}, {((candidate ^ latest) & one_block).differs(0).text}")
            with f.if_(free):
                self.store(other, place, candidate)

    def keep_read(self) -> None:
        """Keep two threads that read each place."""
        f, last, before = self.f, self.g.pointer("last"), self.before
        self.replace(last)
        self.count(lambda place, stamp: self.at(last, place).differs(stamp))
        with f.if_(self.bad.value.equals(0)):
            self.each(lambda number, place, stamp: self.keep_other(place, self.g.word(before, number), stamp))
            self.g.leave(0)

        def unmark(number: Value, place: Value, stamp: Value) -> None:
            """Lanes whose place a later one reads too count once."""
            with f.if_(self.at(last, place).differs(stamp)):
                self.g.put(before, number, f.index(-1))

        def settle(number: Value, place: Value, stamp: Value) -> None:
            earlier = self.g.word(before, number)
            with f.if_(earlier.differs(-1)):
                first = self.at(last, place)
                self.store(last, place, stamp)
                self.keep_other(place, earlier, stamp)
                self.keep_other(place, first, stamp)

        self.each(unmark)
        self.each(
            lambda number, place, stamp: self.store(last, place, stamp), backwards=True
        )  # of each place the first
        self.each(settle)


def _grid(module: Module) -> None:
    """The same for global memory."""
    params = (("ptr", "ctx"), ("ptr", "desc"), ("ptr", "lanes"), ("i64", "n"))
    with module.function("grid_races", *params, local=True, returns="i64") as f:
        touched = _GridTouched(f)
        g, bad, grid, flag, clock_at = (
            touched.g, touched.bad, touched.g.pointer("grid"), touched.g.get("atomic"), touched.g.get("clock_at")
        )  # fmt: skip
        own_stamp, own_clock, access = g.pointer("own_stamp"), g.pointer("own_clock"), touched.d.get("access")

        def own(t: Value) -> tuple[Value, Value]:
            return f.index(0), (touched.clock(g.word(own_clock, t)) << clock_at) + g.word(own_stamp, t) + access

        def check(place: Value, stamp: Value, t: Value) -> None:
            touched.low.value, touched.high.value = f.min(touched.low.value, place), f.max(touched.high.value, place)
            then = touched.at(grid, place)
            bad.value = bad.value | f.select(touched.stores, then & flag, f.index(0))
            touched.check((then | flag) ^ flag, stamp, t)

        touched.touch(g.get("grid_shift"), own, check)
        g.leave_if(bad.value.differs(0))
        for name in ("updated", "updated_too"):
            touched.check_table(name)
        with f.if_(touched.stores):
            for name in ("last", "other"):
                touched.check_table(name)
            g.leave_if(bad.value.differs(0))
            touched.written(grid, lambda stamp, then: then.differs(stamp))
            touched.widen("written")
            g.leave(0)
        g.leave_if(bad.value.differs(0))
        touched.widen("read")
        touched.keep_read()
        f.ret(f.index(0))
