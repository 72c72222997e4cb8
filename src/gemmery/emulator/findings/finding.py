"""A fault of a kernel, with its line, its thread and a remedy; and the collection of those found in a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gemmery.emulator.findings import messages
from gemmery.emulator.machine import Dims, Machine
from gemmery.emulator.ptx import Line

EQUAL, SKIPPED, UNWRITTEN = WARNINGS = ("equal stores", "skipped barrier", "unwritten")
LATE = "misuse at the end"  # a misuse that is seen when all threads have ended, which other faults may lead to
# Causes come first, and what may follow from them after them.
ORDER = ("out of bounds", "misaligned", "deadlock", "divergent barrier", "warp mask", "misuse", "not landed", "race")


@dataclass(frozen=True)
class Finding:
    """One fault at one line, or between two lines, with the first thread that committed it.

    `kind` is "out of bounds", "misaligned", "uninitialised", "not landed", "race", "divergent barrier",
    "deadlock", "warp mask" or "misuse"; of a warning "equal stores", "skipped barrier",
    "unwritten" or "source".

    >>> print(Finding("uninitialised", Line("sum.cu", 7), "thread 1 of block 0 reads byte 4 ...", (0, 0, 0), (1, 0, 0)))
    sum.cu:7: uninitialised: thread 1 of block 0 reads byte 4 ...
    """

    kind: str
    line: Line
    message: str
    block: Dims
    thread: Dims
    other: Line | None = None  # of a race: the access it races with; of a copy: where it starts
    count: int = 1  # occurrences over all threads and blocks
    inner: Line | None = None  # the inlined line, when `line` is the one that it was inlined into

    def __str__(self) -> str:
        return f"{messages.lines(self.line, self.inner)}: {self.kind}: {self.message}"


class Collection:
    """The findings of a run, one for each kind and pair of lines."""

    def __init__(self) -> None:
        self._findings: dict[tuple[str, str, str], Finding] = {}  # by kind and both lines
        self._strengths: dict[tuple[str, str, str], int] = {}
        self._lines: dict[int, str] = {}  # of instructions

    def sorted(self) -> tuple[Finding, ...]:
        """All findings so far, causes first; warnings are not among them."""
        return self._sorted(lambda key: key[0] not in WARNINGS)

    def warnings(self) -> tuple[Finding, ...]:
        """What need not be a fault; equal stores between lines that have no race of another kind."""
        racing = {frozenset(lines) for kind, *lines in self._findings if kind == "race"}
        return self._sorted(
            lambda key: key[0] in (SKIPPED, UNWRITTEN) or (key[0] == EQUAL and frozenset(key[1:]) not in racing)
        )

    def _sorted(self, selects: Callable[[tuple[str, str, str]], bool]) -> tuple[Finding, ...]:
        ranks = {kind: rank for rank, kind in enumerate(ORDER)} | {LATE: len(ORDER) + 1}
        some = [(ranks.get(key[0], len(ORDER)), finding) for key, finding in self._findings.items() if selects(key)]
        some.sort(key=lambda it: (it[0], it[1].line.file, it[1].line.number, it[1].kind))
        return tuple(finding for _, finding in some)

    def add(
        self,
        machine: Machine,
        kind: str,
        index: int,
        thread: int,
        count: int,
        message: str | Callable[[], str],
        other: int | None = None,
        strength: int = 0,
    ) -> None:
        """Add a finding at an instruction, or count it if it is known: a kernel may have the same race many times.

        Of a race the pair is told that needs the strongest order: 1 of two warps, 2 of two blocks, 3 of a unit that
        reads for itself.
        """
        key = kind, self.line(machine, index), "" if other is None else self.line(machine, other)
        known = self._findings.get(key)
        if known is not None:
            count += known.count
            if strength <= self._strengths[key]:
                self._findings[key] = replace(known, count=count)
                return
        self._strengths[key] = strength
        instruction = machine.kernel.instructions[index]
        second = None if other is None else machine.kernel.instructions[other].line
        text = message if isinstance(message, str) else message()
        block_and_thread, inner = messages.indices(machine, thread), messages.done_at(instruction)
        kind = "misuse" if kind == LATE else kind
        self._findings[key] = Finding(kind, instruction.line, text, *block_and_thread, second, count, inner)

    def line(self, machine: Machine, index: int) -> str:
        """The line of an instruction, with the inlined line."""
        if index not in self._lines:
            self._lines[index] = messages.line_of(machine, index)
        return self._lines[index]
