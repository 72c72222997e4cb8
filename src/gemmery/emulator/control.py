"""Instructions that end a basic block, which the machine itself executes: branches, ends of threads, barriers.

PTX ISA 9.0, "Control Flow Instructions", "bar", "barrier", "bar.warp.sync".
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmery.emulator.op import Entry

WARP_SYNC = "bar.warp.sync"
WHOLE_WARP = -1  # the barrier number that observers receive for bar.warp.sync


@dataclass(frozen=True, kw_only=True)
class End(Entry):
    """An instruction that ends a basic block."""

    way: str  # "branch", "switch", "exit", "trap", "barrier"
    writes: bool = False
    orders: bool = True


@dataclass(frozen=True, kw_only=True)
class Barrier(End):
    """A barrier of a block or a warp; after a result there are its number, a count of threads, and a predicate."""

    way: str = "barrier"
    operands: tuple[int, ...]  # how many it may have
    arrives: bool = False  # whether threads go on at once
    reduction: tuple[str, str] = ("", "")  # how predicates are combined: "popc", "and", "or"; the type of the result


def _barriers() -> dict[str, Barrier]:
    # "bar" is always aligned and has no modifier for it.
    forms = [f"{name}.{{}}{how}" for name in ("barrier", "barrier.cta") for how in ("", ".aligned")]
    table = {WARP_SYNC: Barrier(kind="bar.warp", operands=(1,))}
    for form in ("bar.{}", "bar.cta.{}", *forms):
        table[form.format("sync")] = Barrier(kind="bar", operands=(1, 2))
        table[form.format("arrive")] = Barrier(kind="bar", operands=(2,), arrives=True)
        for way, kind in (("popc", "u32"), ("and", "pred"), ("or", "pred")):
            spelling = f"{form.format(f'red.{way}')}.{kind}"
            table[spelling] = Barrier(kind="bar", operands=(3, 4), reduction=(way, kind), writes=True)
    return table


BARRIERS = _barriers()
TABLE: dict[str, Entry] = {
    "bra": End(way="branch"),
    "brx": End(way="switch"),
    "ret": End(way="exit"),
    "exit": End(way="exit", kind="ret"),
    "trap": End(way="trap"),
    **BARRIERS,
}
