"""The barriers of a block or a warp: their opcodes and operands.

PTX ISA 9.0, "bar", "barrier", "bar.warp.sync".
"""

from __future__ import annotations

# "bar" is always aligned and has no modifier for it.
_FORMS = [(name, how) for name in ("bar", "bar.cta", "barrier", "barrier.cta") for how in ("", ".aligned")]
_NAMES = [f"{name}.{{}}{how}" for name, how in _FORMS if name.startswith("barrier") or not how]
ARRIVE = frozenset(name.format("arrive") for name in _NAMES)
WARP_SYNC = "bar.warp.sync"
SYNC = frozenset((WARP_SYNC, *(name.format("sync") for name in _NAMES)))
# bar.red: how a block's predicates are combined, and the type of the result that every thread gets.
REDUCTIONS = {
    f"{name.format(f'red.{way}')}.{kind}": (way, kind)
    for way, kind in (("popc", "u32"), ("and", "pred"), ("or", "pred"))
    for name in _NAMES
}
NAMES = frozenset((WARP_SYNC, *(f"{name}.{way}" for name in ("bar", "barrier") for way in ("sync", "arrive", "red"))))
WHOLE_WARP = -1  # the barrier number that observers receive for bar.warp.sync


def operands(opcode: str) -> tuple[int, ...]:
    """The numbers of operands that a barrier may have; none if the opcode is not a barrier."""
    if opcode in REDUCTIONS:
        return 3, 4
    if opcode in ARRIVE:
        return (2,)
    return (1,) if opcode == WARP_SYNC else (1, 2) if opcode in SYNC else ()
