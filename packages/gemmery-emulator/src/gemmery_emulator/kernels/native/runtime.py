"""Code that is the same for every kernel: the turns of blocks, as lockstep.py has them."""

from __future__ import annotations

from gemmery.banks import WARP
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import vector
from gemmery.cpu.target import Target
from gemmery_emulator.kernels.native import block_accesses, block_copies, frames, race_checks
from gemmery_emulator.kernels.native.frames import BLOCK, CONTEXT, LANES, WORD, FrameFields

_FLAGS, _PLACES = vector(LANES, "i8"), vector(LANES, "i32")


def module(target: Target) -> Module:
    """Return the code: `run` runs blocks, `access`, `copy` and `group` are called by them."""
    module = Module(target)
    for part in (race_checks, block_accesses, block_copies):
        part.add_to(module)
    with module.function("run", ("ptr", "ctx"), returns="i64") as f:
        _Turns(f).run()
    return module


class _Turns:
    """Runs the block of the threads whose turn it is, over and over, until something stops it."""

    def __init__(self, f: Function) -> None:
        self._f, self._g = f, FrameFields(f, f["ctx"], CONTEXT)
        self._threads, self._places = self._g.get("threads"), self._g.pointer("places")
        self._count, self._warps = f.var(self._threads), f.var(self._g.get("warps"))
        self._at, self._together = f.var(f.index(0)), f.var(Value(f, "i1", "true"))

    def run(self) -> None:
        f, g = self._f, self._g
        with f.while_():
            g.leave_if(g.get("steps") >= g.get("budget"), frames.ENOUGH)
            self._choose()
            at = self._at.value
            g.set("at", at)
            g.leave_if(at >= g.get("stop"), frames.NOBODY)
            self._mask = f.select(self._together.value, g.pointer("full"), g.pointer("mask"))
            self._block = FrameFields(f, g.pointer("blocks") + at * (len(BLOCK) * WORD), BLOCK)
            self._parted = f.emit("i1", f"xor {self._together.value}, true")
            self._execute()
            way, following = self._block.get("way"), at + 1
            g.leave_if(way.equals(frames.ELSEWHERE), frames.END)
            with f.if_(way.equals(frames.FOLLOWS)):
                self._go(following)
            with f.if_(way.equals(frames.MEETS)):
                self._meet()
                self._go(following)
            with f.if_(way.equals(frames.BRANCHES)):
                with f.if_(self._block.get("guarded").equals(0)):
                    self._go(self._block.get("target"))
                with f.else_():
                    self._branch(following)
        f.ret(f.index(frames.ENOUGH))

    def _choose(self) -> None:
        """Find the block whose turn it is, and its threads."""
        f, g, threads, places = self._f, self._g, self._threads, self._places
        self._together.value, self._at.value = g.get("uniform").differs(0), g.get("at")
        with f.if_(self._together.value):
            self._count.value, self._warps.value = threads, g.get("warps")
        with f.else_():
            lowest = f.var(f.const(_PLACES, 2**31 - 1))
            with f.loop(0, threads, LANES) as t:
                lowest.value = f.overloaded("llvm.smin", lowest.value, f.load(_PLACES, places + t * 4))
            least = f.intrinsic(f"llvm.vector.reduce.smin.v{LANES}i32", "i32", lowest.value)
            self._at.value = f.emit("i64", f"sext {least} to i64")
            g.leave_if(self._at.value >= g.get("stop"), frames.NOBODY)
            here, own_mask = f.broadcast(least, WARP), g.pointer("mask")
            self._count.value, self._warps.value = f.index(0), f.index(0)
            with f.loop(0, threads, WARP) as t:
                some = f.load(vector(WARP, "i32"), places + t * 4).equals(here)
                f.store(f.convert("zext", some, "i8"), own_mask + t)
                inside = f.overloaded("llvm.ctpop", g.bits_of(some))
                self._count.value = self._count.value + inside
                self._warps.value = self._warps.value + g.number_of(inside.differs(0))
            with f.if_(self._count.value.equals(threads)):
                g.set("uniform", 1)
                self._together.value = Value(f, "i1", "true")

    def _execute(self) -> None:
        """Run the block; where lanes wait for each other, only those of whole warps do."""
        f, g, b = self._f, self._g, self._block
        code, gathers, warps, count = b.pointer("ready"), b.get("gathers"), self._warps.value, self._count.value
        g.leave_if(f.is_null(code), frames.UNKNOWN)
        g.leave_if(g.both(self._parted, (warps * gathers) > count), frames.UNKNOWN)
        b.add("every_warp", warps)
        b.add("every_thread", count)
        g.add("elapsed", g.get("ended") - b.get("first"))
        g.set("ended", b.get("last"))
        g.add("steps", 1)
        ran = g.pointer("ran")
        with f.if_(self._together.value):
            f.store(Value(f, "i8", "1"), ran + self._threads)  # a flag for all
        with f.else_(), f.loop(0, self._threads, LANES) as t:
            f.store(f.load(_FLAGS, ran + t) | f.load(_FLAGS, self._mask + t), ran + t)
        stopped = f.result_of(code, "i64", f["ctx"], self._mask, b.get("first"))
        g.leave_if(stopped.differs(0), stopped + (frames.INSIDE - 1))

    def _go(self, block: Value) -> None:
        """Send the threads of the block on."""
        f = self._f
        with f.if_(self._together.value):
            self._g.set("at", block)
        with f.else_():
            self._send(self._mask, block)

    def _send(self, mask: Value, block: Value) -> None:
        f = self._f
        place = f.broadcast(f.emit("i32", f"trunc {block} to i32"), LANES)
        with f.loop(0, self._threads, LANES) as t:
            at = self._places + t * 4
            f.store(f.select(self._g.flagged(mask, t), place, f.load(_PLACES, at)), at)

    def _meet(self) -> None:
        """Let all threads pass a barrier together: each warp knows then what any of its block has done."""
        f, g = self._f, self._g
        late = g.get("clock_limit") <= g.get("ticks")
        g.leave_if(f.emit("i1", f"or {self._parted}, {late.text}"), frames.END)
        with f.if_(g.get("clocked").differs(0)):
            each, clock, known = g.get("each_warp"), g.pointer("clock"), g.pointer("known")
            oldest = f.var(f.index(1 << 62))
            with f.loop(0, g.get("clocked")) as block:
                with f.loop(0, each) as warp, f.loop(0, each) as other:
                    g.put(known, (block * each + warp) * each + other, g.word(clock, block * each + other))
                with f.loop(0, each) as warp:
                    place = block * each + warp
                    oldest.value = f.min(oldest.value, g.word(clock, place))
                    g.put(clock, place, g.word(clock, place) + 1)
            g.add("ticks", 1)
            g.set("seen_by_all", oldest.value)

    def _branch(self, following: Value) -> None:
        """Send those whom a branch takes to its target, and the others on."""
        f, g, b, mask, goes = self._f, self._g, self._block, self._mask, self._g.pointer("goes")
        going, parting = f.var(f.index(0)), f.var(f.index(0))
        with f.loop(0, self._threads, WARP) as t:
            wide = vector(WARP, "i8")
            branching = f.load(wide, goes + t) & f.load(wide, mask + t)
            f.store(branching, goes + t)
            jumps, actives = (g.bits_of(g.flagged(table, t, WARP)) for table in (goes, mask))
            going.value = going.value + f.overloaded("llvm.ctpop", jumps)
            parting.value = parting.value + g.number_of(g.both(jumps.differs(0), jumps.differs(actives)))
        g.leave_if(g.both(parting.value.differs(0), b.get("diverged").equals(0)), frames.END)
        b.add("branches", self._warps.value)
        b.add("divergent", parting.value)
        with f.if_(going.value.equals(0)):
            self._go(following)
        with f.else_():
            with f.if_(going.value.equals(self._count.value)):
                self._go(b.get("target"))
            with f.else_():
                self._send(mask, following)
                self._send(goes, b.get("target"))
                g.set("uniform", 0)
