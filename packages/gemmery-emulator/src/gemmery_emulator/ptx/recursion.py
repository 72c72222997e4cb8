"""Which functions of a kernel may call themselves, and the local memory that their calls have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gemmery_emulator.ptx import Instruction
from gemmery_emulator.ptx.body import Body
from gemmery_emulator.ptx.scopes import laid_out

RECURSIONS = 1024  # calls of functions that call themselves in each other, fewer if they have local memory
STACK = 8192  # bytes of a thread's local memory for these functions


class Recursion:
    """The functions that may call themselves, also by others, and the local memory that each call of one has."""

    def __init__(self, bodies: Mapping[str, Body], called: Callable[[Instruction], list[str]]) -> None:
        calls = {
            name: {each for instruction in body.instructions for each in called(instruction)}
            for name, body in bodies.items()
        }
        self.beyond = {name: _closure(name, calls) for name in bodies}  # what each may call, and what that may
        self.names = [name for name in bodies if name in self.beyond[name]]
        own = [each for name in self.names for each in bodies[name].scope.memory.values()]
        self.local, size = laid_out([each for each in own if each.space == "local"])
        self.size = -(-size // 16) * 16
        self.most = min(RECURSIONS, STACK // self.size) if self.size else RECURSIONS

    def meets(self, name: str, around: str) -> bool:
        """Whether a call of a function may call the one around it again."""
        return bool(around) and around in self.beyond[name]


def _closure(name: str, calls: Mapping[str, set[str]]) -> set[str]:
    reached, callers = set[str](), [name]
    while callers:
        new = calls.get(callers.pop(), set()) - reached
        reached |= new
        callers += new
    return reached
