"""One fault of a kernel, with its line, its thread and a remedy; the collection of those of a run, and their texts.

These name "thread 3 of block 0", "byte 132 of shared memory", and the causes of races.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gemmery_emulator.findings import pointers
from gemmery_emulator.machine import Dims, Machine, unraveled
from gemmery_emulator.memory import PAGE
from gemmery_emulator.ptx import Instruction, Label, Line, PtxKernel, calling
from gemmery_emulator.symbols import last_name

_LAST = "the last one to write wins: let one thread write there, or use an atomic"
_EQUAL = "both store the same value, and C++ leaves it undefined: let one thread store it, or use an atomic"
SKIPS = (
    "has ended where others of its block wait: if it skips the barrier by a condition such as if (i < n), put "
    "the barrier after the branch, so that all threads of the block reach it"
)
_COPIED = (
    "nothing orders the copy and the other access: wait for the copy (cp.async.bulk.wait_group, or its mbarrier), and "
    "put a barrier between the two"
)
OWN = frozenset(("cta", "cluster"))  # scopes of atomics that other blocks may not see
READING = ("wmma.load", "tcgen05.mma", "tcgen05.cp")
_BLOCKS = "read it in a later launch, or hand it over with an atomic and __threadfence() on both sides"


def lines(line: Line, inner: Line | None) -> str:
    """Two lines as "simt_padded.cu:19 (load.cuh:61)", or one if both are the same."""
    return str(line) if inner in (None, line) else f"{line} ({inner})"


def done_at(instruction: Instruction) -> Line:
    """The innermost line of an instruction, wrappers of single instructions left out."""
    return calling(instruction.frames or (instruction.line,))[-1]


def line_of(machine: Machine, index: int) -> str:
    """The line of an instruction, with the inlined line."""
    instruction = machine.kernel.instructions[index]
    return lines(instruction.line, done_at(instruction))


def indices(machine: Machine, thread: int) -> tuple[Dims, Dims]:
    """blockIdx and threadIdx of a thread of the chunk."""
    number, own = divmod(thread, machine.block_threads)
    return unraveled(int(machine.block_ids[number]), machine.launch.grid), unraveled(own, machine.launch.block)


def thread(machine: Machine, number: int, with_block: bool = True) -> str:
    """A thread of the chunk, as "thread 3 of block 0"."""
    own = f"thread {_short(number % machine.block_threads, machine.launch.block)}"
    return f"{own} of {block(machine, number // machine.block_threads)}" if with_block else own


def block(machine: Machine, number: int) -> str:
    """A block of the chunk, as "block 3"."""
    return f"block {_short(int(machine.block_ids[number]), machine.launch.grid)}"


def address(machine: Machine, space: str, at: int) -> str:
    """An address, as "byte 132 of shared memory (tile, byte 4)"."""
    if space == "global":
        variable = machine.memory.nearest(at)
        array, start = (variable.name, variable.start) if variable and variable.start <= at else ("", 0)
    else:
        array, start = variable_at(machine.kernel, space, at)
    inside = f" ({array}, byte {at - start})" if array else ""
    return f"address {at:#x}{inside}" if space == "global" else f"byte {at} of {space} memory{inside}"


def beyond(machine: Machine, space: str, at: int, width: int, index: int, reach: pointers.Reach) -> str:
    """How far an access is outside its memory, and what to do about it."""
    if space != "global":
        size, whose = (machine.shared.size, "block") if space == "shared" else (machine.kernel.local, "thread")
        far = f"{-at} bytes before them" if at < 0 else f"it ends {at + width - size} bytes beyond them"
        return f"byte {at} of {space} memory: a {whose} has {size} bytes, {far}; bound the index, or ask for more"
    heap = machine.memory.heap
    if heap is not None and heap.start <= at < heap.stop:
        return heap.beyond(at, width)
    reached = reach.arrays[index]  # that the address is computed from; None if they are not known
    arrays = [array for array in machine.memory.allocations if reached is None or array.name in reached]
    # By the distance of the access before an array, or the bytes that it reaches beyond it.
    array = min(arrays, key=lambda each: each.start - at if at < each.start else at + width - each.stop, default=None)
    if index in reach.nulls or array is None or (reached is None and 0 <= at < PAGE and at < array.start - at):
        return f"address {at:#x}, which is in no array: a null pointer? Pass an array, or check the pointer"
    if at < array.start:
        return f"address {at:#x}, {array.start - at} bytes before {array.name}; bound the index"
    far = f"ending {at + width - array.stop} bytes beyond the {array.size} of {array.name}"
    return f"address {at:#x}, {far}; bound the index, or allocate more"


def race(machine: Machine, index: int, number: int, where: int, other: int, own: int, atomic: bool, reason: str) -> str:
    """A race in shared memory: an access of a thread, and an earlier one of thread `own` of the same block.

    `reason` is the cause if it is known.
    """
    second = number - number % machine.block_threads + own
    if reason:
        cause = reason
    elif in_bulk(machine, index) and second != number and second // 32 == number // 32:
        cause = _unordered(machine, index, other, "__syncwarp()")
    elif in_bulk(machine, index) or in_bulk(machine, other):
        cause = "nothing orders the two: wait at the mbarrier or barrier that the other side arrives at"
    elif _both_store(machine, index, other):
        cause = _LAST
    elif atomic_way := pointers.update(machine.kernel, index, other):
        cause = _unordered_update(atomic_way)
    elif second == number:
        cause = "its own copy may land later: wait for its group first"
    else:
        one_warp = second // 32 == number // 32
        cause = _unordered(machine, index, other, "__syncwarp()" if one_warp else "__syncthreads()")
    here, there = does(machine, index), does(machine, other, atomic)
    return (
        f"{thread(machine, number)} {here} {address(machine, 'shared', where)}, which "
        f"{thread(machine, second, False)} {there} at {line_of(machine, other)}; {cause}"
    )


def unfenced(machine: Machine, index: int, thread_of: int, at: int, other: int, *_: object) -> str:
    """A bulk copy of global memory that a thread has stored."""
    copies = f"{thread(machine, thread_of)} copies {address(machine, 'global', at)} by the async proxy"
    way = "without a fence.proxy.async since: put one after the store, before what orders the two"
    return f"{copies}, which was written at {line_of(machine, other)} {way}"


def grid_race(
    machine: Machine, index: int, number: int, where: int, other: int, place: tuple[int, int], reason: str
) -> str:
    """A race in global memory: an access of a thread, and an earlier one of thread `place` (block, thread)."""
    block, own = place
    launch, mine = machine.launch, int(machine.block_ids[number // machine.block_threads])
    one_block = block == mine
    here, there = (does(machine, each, globally=True) for each in (index, other))
    opcodes = [machine.kernel.instructions[each].opcode for each in (index, other)]
    if reason:
        cause = reason
    elif way := pointers.update(machine.kernel, index, other):
        cause = _unordered_update(way)
    elif (
        not one_block
        and all(each.name in ("atom", "red") for each in opcodes)
        and any(not OWN.isdisjoint(each.modifiers) for each in opcodes)
    ):
        cause = "they are atomic within one block or cluster: use device scope, atomicAdd() and not atomicAdd_block()"
    elif not one_block:
        both = here == there == "writes"
        cause = f"blocks run in any order: {'give each its own elements, or use an atomic' if both else _BLOCKS}"
    elif _both_store(machine, index, other):
        cause = _LAST
    elif any(opcode.is_bulk for opcode in opcodes):
        cause = _COPIED
    else:
        one_warp = own // 32 == number % machine.block_threads // 32
        cause = _unordered(machine, index, other, "__syncwarp()" if one_warp else "__syncthreads()")
    second = f"thread {_short(own, launch.block)}" + ("" if one_block else f" of block {_short(block, launch.grid)}")
    return (
        f"{thread(machine, number)} {here} {address(machine, 'global', where)}, which {second} "
        f"{there} at {line_of(machine, other)}; {cause}"
    )


def reason(machine: Machine, kind: str, released: int | None) -> str:
    """Why two accesses race: both store the same value, or an instruction has `released` what another lane wrote."""
    if kind == EQUAL or released is None:
        return _EQUAL if kind == EQUAL else ""
    opcode = machine.kernel.instructions[released].opcode
    fenced = opcode.family != "mbarrier" and {"release", "acq_rel"}.isdisjoint(opcode.modifiers)
    line, where = line_of(machine, released), "the fence there" if fenced else "that line"
    return f"another lane of its warp publishes it at {line} and does not wait for it: put __syncwarp() before {where}"


def _unordered(machine: Machine, index: int, other: int, barrier: str) -> str:
    """What to do about an access and an earlier one of the same block, which a barrier would order."""
    kernel, (here, there) = machine.kernel, (machine.kernel.instructions[each] for each in (index, other))
    first, second = done_at(there), done_at(here)
    jumps = ((at, each.operands) for at, each in enumerate(kernel.instructions) if each.opcode.name == "bra")
    targets = ((at, kernel.labels[each.name]) for at, labels in jumps for each in labels if isinstance(each, Label))
    again = other > index and any(start <= index and other <= at for at, start in targets)
    if again or (first.file == second.file and second.number < first.number):  # a loop, or one that is unrolled
        way = f"{line_of(machine, other)} {does(machine, other)} it in one pass of a loop, and "
        way += f"{line_of(machine, index)} {does(machine, index)} it in the next: put {barrier} after {first}"
        return f"{way}, at the end of the loop"
    if first == second and not in_bulk(machine, index):
        return f"both are one statement: read into a variable, then {barrier}, then write"
    if barrier == "__syncwarp()":
        return f"lanes of one warp: put {barrier} between the two"
    return f"no barrier in between: put {barrier} there"


def mbarrier(machine: Machine, at: int, phase: int, expected: int, pending: int, missing: int) -> str:
    """The state of an mbarrier where threads wait for ever, and what to check."""
    if pending == expected and not missing:
        check = "nothing has arrived in it: check the parity that is waited for, and that threads arrive in each pass"
    elif pending > 0:
        check = "check the number of arrivals that it was initialized for, and that all of them are made"
    else:
        check = "check the bytes that are expected against those of the copies"
    lacks = (
        f"{pending} of {expected} arrivals and {missing} bytes are missing"
        if missing >= 0
        else f"{-missing} bytes too many"
    )
    where = address(machine, "shared", at)
    return f"waits for ever at the mbarrier at {where}: in its phase {phase} {lacks}; {check}"


def _both_store(machine: Machine, index: int, other: int) -> bool:
    both = does(machine, index) == does(machine, other) == "writes"
    return both and line_of(machine, index) == line_of(machine, other)


def _unordered_update(way: str) -> str:
    return f"another thread may update it between the read and the write, and one update is lost: use {way}"


def in_bulk(machine: Machine, index: int) -> bool:
    """Whether an instruction is a bulk copy."""
    return machine.kernel.instructions[index].opcode.is_bulk


def does(machine: Machine, index: int, atomic: bool = False, globally: bool = False) -> str:
    """What an access does: "reads", "writes" or "updates"; bulk copies read one end and write the other."""
    opcode = machine.kernel.instructions[index].opcode
    if opcode.family in ("atom", "red") or atomic or (globally and opcode.name.startswith("cp.reduce")):
        return "updates"
    if opcode.is_bulk:
        return "reads" if ("bulk_group" in opcode.modifiers) != globally else "writes"
    reads = opcode.family in ("ld", "ldu", "ldmatrix", "wgmma") or opcode.name in READING
    return "reads" if reads else "writes"


def variable_at(kernel: PtxKernel, space: str, at: int) -> tuple[str, int]:
    """The last variable of a kernel that begins at or before an address, and where it begins; "" if there is none."""
    variables = kernel.variables.values()
    before = [variable for variable in variables if variable.space == space and variable.offset <= at]
    last = max(before, key=lambda variable: variable.offset, default=None)
    if last is None:
        return "", 0
    return last_name(last.name) if last.name.startswith("_ZZ") else last.name, last.offset  # of a function's variable


def _short(index: int, shape: Dims) -> str:
    """A place as a number if the shape has one dimension, else as (x, y, z)."""
    return str(index % shape[0] if shape[1] == shape[2] == 1 else unraveled(index, shape))


EQUAL, SKIPPED, UNWRITTEN = WARNINGS = ("equal stores", "skipped barrier", "unwritten")
LATE = "misuse at the end"  # a misuse that is seen when all threads have ended, which other faults may lead to
# Causes come first, and what may follow from them after them.
ORDER = ("out of bounds", "misaligned", "deadlock", "divergent barrier", "warp mask", "misuse", "not landed", "race")


@dataclass(frozen=True)
class Finding:
    """One fault at one line, or between two lines, with the first thread that committed it.

    `kind` is "out of bounds", "misaligned", "uninitialized", "not landed", "race", "divergent barrier",
    "deadlock", "warp mask" or "misuse"; of a warning "equal stores", "skipped barrier",
    "unwritten" or "source".

    >>> print(Finding("uninitialized", Line("sum.cu", 7), "thread 1 of block 0 reads byte 4 ...", (0, 0, 0), (1, 0, 0)))
    sum.cu:7: uninitialized: thread 1 of block 0 reads byte 4 ...
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
        return f"{lines(self.line, self.inner)}: {self.kind}: {self.message}"


class Collection:
    """The findings of a run, one for each kind and pair of lines."""

    def __init__(self) -> None:
        self._findings: dict[tuple[str, str, str], tuple[int, Finding]] = {}  # by kind and both lines, with strengths

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
        some = [
            (ranks.get(key[0], len(ORDER)), finding) for key, (_, finding) in self._findings.items() if selects(key)
        ]
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
        key = kind, line_of(machine, index), "" if other is None else line_of(machine, other)
        if key in self._findings:
            before, known = self._findings[key]
            count += known.count
            if strength <= before:
                self._findings[key] = before, replace(known, count=count)
                return
        instruction = machine.kernel.instructions[index]
        second = None if other is None else machine.kernel.instructions[other].line
        text = message if isinstance(message, str) else message()
        block_and_thread, inner = indices(machine, thread), done_at(instruction)
        kind = "misuse" if kind == LATE else kind
        self._findings[key] = strength, Finding(kind, instruction.line, text, *block_and_thread, second, count, inner)
