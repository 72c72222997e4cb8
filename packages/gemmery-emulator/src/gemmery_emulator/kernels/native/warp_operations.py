"""Instructions of warps whose lanes all take part, as code: shuffles, votes and reductions.

What each lane holds is in memory, so that a lane can read that of any other.
"""

from __future__ import annotations

from collections.abc import Callable

from gemmery.banks import WARP
from gemmery.cpu.ir import Function, Value
from gemmery.cpu.ir_types import vector
from gemmery_emulator.instructions import opcode
from gemmery_emulator.kernels.native.block_operations import Emit, flipped, lanes
from gemmery_emulator.kernels.native.frames import LANES

_REDUCTIONS = {"add": "add", "and": "and", "or": "or", "xor": "xor", "min": "{}min", "max": "{}max"}
_SHUFFLES: dict[str, Callable[[Value, Value, Value], Value]] = {
    "up": lambda lane, b, mask: lane - b,
    "down": lambda lane, b, mask: lane + b,
    "bfly": lambda lane, b, mask: lane ^ b,
    "idx": lambda lane, b, mask: (lane & mask) | (b & flipped(lane.f, mask)),
}


def exchange(spelling: str) -> Emit | None:
    """Return a function that adds the code of an instruction; None if it has none.

    It takes the address of what the lanes of the warp hold, the number of the first thread, then the other operands.
    """
    read = opcode(spelling)
    name, mode, kind = read.name, read.modifiers[-1], read.type
    if name == "shfl" and mode in _SHUFFLES:
        return _shuffle(mode)
    if name == "vote" and mode in _VOTES:
        return lambda f, held, t: _vote(f, held, mode)
    if name == "redux" and mode in _REDUCTIONS and kind in ("u32", "s32", "b32"):
        how = _REDUCTIONS[mode].format(kind[0])
        wide = vector(WARP, "i32")
        return lambda f, held, t: f.broadcast(
            f.intrinsic(f"llvm.vector.reduce.{how}.v{WARP}i32", "i32", f.load(wide, held)), LANES
        )
    return None


def _shuffle(mode: str) -> Emit:
    def shuffled(f: Function, held: Value, t: Value, b: Value, c: Value) -> tuple[Value, Value]:
        kind = lanes("i32")
        ramp = Value(f, kind, "<" + ", ".join(f"i32 {lane}" for lane in range(LANES)) + ">")
        lane = f.broadcast(f.emit("i32", f"trunc {t & (WARP - 1)} to i32"), LANES) + ramp
        mask = (c >> 8) & 31
        limit = (lane & mask) | (c & 31 & flipped(f, mask))
        source = _SHUFFLES[mode](lane, b & 31, mask)
        inside = source >= limit if mode == "up" else source <= limit
        places = f.emit(lanes("ptr"), f"getelementptr i32, {held}, {f.select(inside, source, lane)}")
        return f.gather(kind, places), inside

    return shuffled


_VOTES: dict[str, Callable[[Value], Value]] = {
    "all": lambda bits: bits.equals(2**WARP - 1),
    "any": lambda bits: bits.differs(0),
    "uni": lambda bits: ((bits + 1) & (2**WARP - 1)) < 2,
    "ballot": lambda bits: bits.f.emit("i32", f"trunc {bits} to i32"),
}


def _vote(f: Function, held: Value, mode: str) -> Value:
    flags = f.bitcast(f.load(vector(WARP, "i8"), held).differs(0), f"i{WARP}")
    return f.broadcast(_VOTES[mode](f.emit("i64", f"zext {flags} to i64")), LANES)
