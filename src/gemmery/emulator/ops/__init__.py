"""All instructions that only compute, by their full opcodes."""

from collections.abc import Mapping

from gemmery.emulator.op import Op
from gemmery.emulator.ops.bitfield import BITFIELD
from gemmery.emulator.ops.compare import COMPARE
from gemmery.emulator.ops.convert import CONVERT
from gemmery.emulator.ops.floating import FLOATING
from gemmery.emulator.ops.half import HALF
from gemmery.emulator.ops.integer import INTEGER
from gemmery.emulator.ops.logic import LOGIC
from gemmery.emulator.ops.mma import MMA
from gemmery.emulator.ops.warp import WARP


def merged(*parts: Mapping[str, Op]) -> dict[str, Op]:
    """Merge tables; raises ValueError for an opcode that two of them define."""
    table: dict[str, Op] = {}
    for part in parts:
        twice = table.keys() & part.keys()
        if twice:
            raise ValueError(f"{sorted(twice)} are defined twice: keep each opcode in one file of ops/")
        table |= part
    return table


TABLE: dict[str, Op] = merged(INTEGER, BITFIELD, LOGIC, COMPARE, FLOATING, HALF, CONVERT, MMA, WARP)
