"""Code that is the same for every kernel: the turns of blocks, as lockstep.py has them."""

from __future__ import annotations

from gemmery.banks import WARP
from gemmery.cpu.ir import Module, Value
from gemmery.cpu.ir_types import vector
from gemmery.cpu.target import Target
from gemmery_emulator.kernels.native import block_accesses, frames, race_checks
from gemmery_emulator.kernels.native.frames import BLOCK, CONTEXT, LANES, WORD, FrameFields, leave_if, put, word


def module(target: Target) -> Module:
    """Return the code: `run` runs blocks, `access` checks and counts an access."""
    module = Module(target)
    race_checks.add_to(module)
    block_accesses.add_to(module)
    _run(module)
    return module


def _run(module: Module) -> None:
    """Run the block of the threads whose turn it is, over and over; returns why it stopped."""
    flags, places_type = vector(LANES, "i8"), vector(LANES, "i32")
    with module.function("run", ("ptr", "ctx"), returns="i64") as f:
        g = FrameFields(f, f["ctx"], CONTEXT)
        threads, stop, all_warps = g.get("threads"), g.get("stop"), g.get("warps")
        places, own_mask, full, ran, goes = (g.pointer(name) for name in ("places", "mask", "full", "ran", "goes"))
        blocks = g.pointer("blocks")
        count, warps, at = f.var(threads), f.var(all_warps), f.var(f.index(0))
        together = f.var(Value(f, "i1", "true"))
        with f.while_():
            leave_if(f, g.get("steps") >= g.get("budget"), frames.ENOUGH)
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
                leave_if(f, at.value >= stop, frames.NOBODY)
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
            leave_if(f, at.value >= stop, frames.NOBODY)
            mask = f.select(together.value, full, own_mask)
            base = blocks + at.value * (len(BLOCK) * WORD)
            b = FrameFields(f, base, BLOCK)
            code = b.pointer("ready")
            leave_if(f, f.is_null(code), frames.UNKNOWN)
            parted = f.emit("i1", f"xor {together.value}, true")
            leave_if(f, f.emit("i1", f"and {parted}, {b.get('gathers').differs(0).text}"), frames.UNKNOWN)
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
                f.line(f"ret {stopped + (frames.INSIDE - 1)}")
                f._label(f"after{f._fresh()}")
            way = b.get("way")
            leave_if(f, way.equals(frames.ELSEWHERE), frames.END)

            def go(block: Value, mask: Value = mask) -> None:
                with f.if_(together.value):
                    g.set("at", block)
                with f.else_():
                    put_there = f.broadcast(f.emit("i32", f"trunc {block} to i32"), LANES)
                    with f.loop(0, threads, LANES) as t:
                        some = f.emit(vector(LANES, "i1"), f"icmp ne {f.load(flags, mask + t)}, zeroinitializer")
                        f.store(f.select(some, put_there, f.load(places_type, places + t * 4)), places + t * 4)

            following = at.value + 1
            with f.if_(way.equals(frames.FOLLOWS)):
                go(following)
            with f.if_(way.equals(frames.MEETS)):
                late = g.get("clock_limit") <= g.get("ticks")
                leave_if(f, f.emit("i1", f"or {parted}, {late.text}"), frames.END)
                with f.if_(g.get("clocked").differs(0)):
                    each, clock, known = g.get("each_warp"), g.pointer("clock"), g.pointer("known")
                    oldest = f.var(f.index(1 << 62))
                    with f.loop(0, g.get("clocked")) as block:
                        with f.loop(0, each) as warp, f.loop(0, each) as other:
                            latest_clock = word(f, clock, block * each + other)
                            put(f, known, (block * each + warp) * each + other, latest_clock)
                        with f.loop(0, each) as warp:
                            place = block * each + warp
                            oldest.value = f.min(oldest.value, word(f, clock, place))
                            put(f, clock, place, word(f, clock, place) + 1)
                    g.add("ticks", 1)
                    g.set("seen_by_all", oldest.value)
                go(following)
            with f.if_(way.equals(frames.BRANCHES)):
                target = b.get("target")
                with f.if_(b.get("guarded").equals(0)):
                    go(target)
                with f.else_():
                    going, parting = f.var(f.index(0)), f.var(f.index(0))
                    with f.loop(0, threads, WARP) as t:
                        jumps, actives = f.index(0), f.index(0)
                        for half in range(0, WARP, LANES):
                            some = f.load(flags, mask + t + half)
                            branching = f.load(flags, goes + t + half) & some
                            f.store(branching, goes + t + half)
                            for vector_, add in ((branching, True), (some, False)):
                                flag = f.emit(vector(LANES, "i1"), f"icmp ne {vector_}, zeroinitializer")
                                bits = f.emit("i64", f"zext {f.bitcast(flag, f'i{LANES}')} to i64")
                                bits = bits << half if half else bits
                                jumps, actives = (jumps | bits, actives) if add else (jumps, actives | bits)
                        going.value = going.value + f.overloaded("llvm.ctpop", jumps)
                        apart = f.emit("i1", f"and {jumps.differs(0)}, {jumps.differs(actives).text}")
                        parting.value = parting.value + f.emit("i64", f"zext {apart} to i64")
                    new = f.emit("i1", f"and {parting.value.differs(0)}, {b.get('diverged').equals(0).text}")
                    leave_if(f, new, frames.END)
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
                                branching = f.emit(
                                    vector(LANES, "i1"), f"icmp ne {f.load(flags, goes + t)}, zeroinitializer"
                                )
                                there = f.select(some, stay, f.load(places_type, places + t * 4))
                                f.store(f.select(branching, away, there), places + t * 4)
                            g.set("uniform", 0)
        f.ret(f.index(frames.ENOUGH))
