"""The machine as instructions and observers know it: its launch, its threads and memory, and the events it reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from gemmery_emulator.memory import Global, Own
from gemmery_emulator.op import Flags, Indices, Mask, Values
from gemmery_emulator.ptx import Line, PtxKernel


class Places:
    """The basic blocks of a chunk's threads: one number while all are together, else one per thread."""

    def __init__(self, threads: int, stop: int) -> None:
        self.at = 0  # the block of the latest step; of all threads while `each` is None
        self.each: NDArray[np.int32] | None = None
        self.stop = stop  # the block of threads that have ended
        self._threads = threads

    def part(self) -> NDArray[np.int32]:
        """The blocks of all threads, as an array from now on."""
        if self.each is None:
            self.each = np.full(self._threads, self.at, np.int32)
        return self.each

    def go(self, mask: Mask, block: int) -> None:
        """Send threads to a block."""
        if mask is None and self.each is None:
            self.at = block
        else:
            self.part()[slice(None) if mask is None else mask] = block

    def running(self) -> Flags:
        """The threads that have not ended."""
        if self.each is None:
            return np.full(self._threads, self.at != self.stop)
        return self.each < self.stop


Dims = tuple[int, int, int]
UnitState = TypeVar("UnitState")


@dataclass(frozen=True)
class LaunchConfig:
    """The configuration of a launch."""

    grid: Dims
    block: Dims
    parameters: bytes = b""
    shared: int = 0  # bytes of dynamic shared memory
    cluster: Dims = (1, 1, 1)

    @property
    def block_threads(self) -> int:
        """Threads of a block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def together(self) -> int:
        """Blocks of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]


def unraveled(index: Any, shape: Dims) -> tuple[Any, Any, Any]:
    """The coordinates of numbers of blocks or threads, as (x, y, z)."""
    x, y, z = shape
    return index % x, index // x % y, index // (x * y) % max(z, 1)


class Machine(Protocol):
    """A chunk of blocks that runs in lock step. Threads are numbered through its blocks, each padded to whole warps."""

    kernel: PtxKernel
    launch: LaunchConfig
    block_ids: Indices  # of the chunk's blocks in the grid
    blocks: int
    block_threads: int  # in whole warps
    threads: int  # of all blocks
    warps: int
    registers: list[Any]  # by slot: a NumPy scalar while all threads agree, else an array with one value per thread
    memory: Global
    shared: Own
    local: Own
    slots: dict[str, int]  # of registers
    followed: frozenset[int]  # slots of registers that may be read before they are written
    parameters: NDArray[np.uint8]
    places: Places
    ran: Mask  # the threads that execute the current basic block
    failed: Any  # the threads whose latest wait failed
    elapsed: int  # instructions executed before the current basic block, less the number of its first one
    changes: int  # of what threads sleep for; each one wakes them
    observers: Observers
    at_end: list[Callable[[], None]]  # called when all threads have ended

    def spread(self, value: Values) -> NDArray[Any]:
        """A value as an array with one element per thread."""

    def unit(self, kind: Callable[[Machine], UnitState]) -> UnitState:
        """The state of a unit, such as the copies under way: `kind(machine)`, made when it is first asked for."""


@dataclass(frozen=True, slots=True)
class Access:
    """One memory instruction, for all warps that execute it together."""

    index: int  # of the instruction in its kernel
    space: str  # "global", "shared", "local"
    kind: str  # "ld", "st", "atom", "red"; "ldmatrix", "stmatrix"; "cp.async" (both ends, one event each); "bulk"
    addresses: Any  # int64, one per thread or a scalar for all; for shared memory offsets in the block's part
    mask: Mask  # the active threads; None means all
    width: int  # bytes per thread
    values: Any = None  # of "st": the values written; for each element of the vector one per thread, or one for all


@dataclass(frozen=True, slots=True)
class BarrierEvent:
    """What happens to mbarriers of the chunk's blocks; one element for each of `addresses`.

    `what` is "waits" (a wait begins or fails again), "passes", "arrives", "expects" (an arrival that expects bytes) or
    "ends" (a phase; by no thread).
    """

    index: int  # of the instruction; -1 for "ends"
    what: str
    threads: Indices  # empty for "ends"
    blocks: Indices  # of the chunk, which have the mbarriers
    addresses: Indices  # offsets in their shared memory
    amounts: Indices  # arrivals; of "expects" bytes


@dataclass(frozen=True, slots=True)
class CopyEvent:
    """Bulk copies to shared memory that threads start with one instruction."""

    index: int
    threads: Indices  # that start them
    blocks: Indices  # of the chunk, whose shared memory is written
    addresses: Indices  # (copies, pieces of 16 bytes) in the blocks' shared memory, in the order of the box
    barriers: Indices  # offsets in the blocks' shared memory
    source: int  # address of the tensor, or of the first copy's bytes
    box: tuple[int, ...]  # elements, from the innermost dimension; of a copy without a tensor its bytes
    size: int  # bytes of an element
    coordinates: Indices  # (copies, dimensions) from the innermost
    swizzle: int  # bytes


@dataclass(frozen=True)
class Rows:
    """Arrays with one row for each thread, copy or arrival, beside what all rows share."""

    def only(self, some: Flags) -> Self:
        """Return the selected rows."""
        return replace(self, **{each.name: _selected(getattr(self, each.name), some) for each in fields(self)})


SomeRows = TypeVar("SomeRows", bound=Rows)


def landed(
    under_way: list[SomeRows], ready: Callable[[SomeRows], Flags], land: Callable[[SomeRows], None]
) -> list[SomeRows]:
    """Land the rows that are ready, one instruction after the other, and return those that are not."""
    remaining = []
    for each in under_way:
        some = ready(each)
        if some.any():
            land(each if some.all() else each.only(some))
        if not some.all():
            remaining.append(each.only(~some) if some.any() else each)
    return remaining


def _selected(rows: Any, some: Flags) -> Any:
    """The rows of an array, of several, or of what has rows itself; anything else stands for all rows."""
    if isinstance(rows, tuple):
        return tuple(_selected(each, some) for each in rows)
    return rows.only(some) if isinstance(rows, Rows) else rows[some] if isinstance(rows, np.ndarray) else rows


# What bulk copies access in global memory: their threads, an address for each, and the bytes at each address.
Pieces = tuple[Indices, Indices, int]


class Observer:
    """Receives each event before it takes effect; this base class does nothing with it."""

    def start(self, machine: Machine) -> None:
        """A chunk of blocks starts."""

    def access(self, machine: Machine, event: Access) -> None:
        """Threads load or store; those that fault are not in the event's mask."""

    def landed(self, machine: Machine, index: int, addresses: Indices, threads: Indices) -> None:
        """The data of cp.async `index` is written to shared memory, because its threads waited for it."""

    def executed(self, machine: Machine, first: int, last: int, warps: int, threads: int) -> None:
        """Instructions first ... last - 1 were executed by `warps` warps, with `threads` active threads in total.

        Guarded instructions count as executed, as the profiler counts them.
        """

    def branch(self, machine: Machine, index: int, jumps: Any, active: Mask) -> None:
        """A conditional branch: `jumps` is one bool per thread, or one for all."""

    def barrier(self, machine: Machine, index: int, barrier: int, mask: Mask) -> None:
        """These threads leave a barrier that is complete for their blocks (their warps: barrier -1)."""

    def converged(self, machine: Machine, mask: Mask) -> None:
        """These threads have waited for others of their warps, at a shuffle or an instruction of matrices."""

    def ordered(self, machine: Machine, index: int, threads: Indices, addresses: Indices, acquired: bool) -> None:
        """Threads arrive at mbarriers of their blocks, or pass them (`acquired`) and see everything before."""

    def bulk(self, machine: Machine, index: int, threads: Indices, addresses: Indices, what: str) -> None:
        """Asynchronous units access 16 bytes of shared memory at each of `addresses` (threads, pieces).

        `what` is "begins" for the start of a copy to shared memory, "lands" for its end, or "reads".
        """

    def sends(self, machine: Machine, index: int, threads: Indices, blocks: Indices, barriers: Indices) -> None:
        """Threads start stores that complete at mbarriers of these blocks; `access` tells what they write."""

    def transferred(self, machine: Machine, index: int, places: Callable[[], Pieces]) -> None:
        """Bulk copies read global memory, as they begin, or write it, when their threads wait for them."""

    def tensor(self, machine: Machine, index: int, threads: Indices, addresses: Indices, what: str) -> None:
        """Threads access words of their blocks' tensor memory at each of `addresses` (threads, words).

        A word stands for one column of 16 lanes. `what` is "reads" or "writes"; "begins" for the start of a product or
        copy that writes, "lands" for its end.
        """

    def initialized(self, machine: Machine, index: int, threads: Indices, addresses: Indices) -> None:
        """Threads initialize mbarriers of 8 bytes in their blocks' shared memory."""

    def mbarrier(self, machine: Machine, event: BarrierEvent) -> None:
        """Threads wait at mbarriers, pass them or arrive at them, or phases end."""

    def copied(self, machine: Machine, event: CopyEvent) -> None:
        """Threads start bulk copies to shared memory; `bulk` tells when one lands."""

    def multiplied(self, machine: Machine, index: int, threads: Indices) -> None:
        """The warpgroups that begin with these threads start a product; `warpgroup` tells when they wait."""

    def fenced(self, machine: Machine, index: int, mask: Mask) -> None:
        """These threads execute a fence; after fence.proxy.async, asynchronous units see what the threads saw."""

    def warpgroup(self, machine: Machine, index: int, threads: Indices) -> None:
        """The four warps from each of these threads on have waited together for their products."""

    def misused(self, machine: Machine, index: int, threads: Indices, message: str) -> None:
        """These threads break a rule; `message` says which, as in "arrives at ..."."""

    def mismatched(self, machine: Machine, index: int, threads: Indices, message: str) -> None:
        """These threads execute a warp's instruction with the wrong lanes; `message` says which rule is broken."""

    def undefined(self, machine: Machine, index: int, threads: Indices, use: Line) -> None:
        """These threads read at `index` what they have not written, and use what comes of it at a line."""

    def fault(self, machine: Machine, event: Access, kind: str, mask: Flags) -> None:
        """The accesses of these threads are dropped: they are "outside" their memory or "misaligned"."""

    def diverged(self, machine: Machine, index: int, mask: Flags) -> None:
        """These threads wait at barrier `index` while others of their block wait at another."""

    def deadlock(self, machine: Machine, index: int, mask: Flags, members: NDArray[np.uint32] | None) -> None:
        """These threads wait at instruction `index` for something that no remaining thread can do.

        At bar.warp.sync, `members` holds the mask that each thread names.
        """

    def finish(self, machine: Machine) -> None:
        """The chunk has ended."""

    def parts(self) -> Sequence[Observer]:
        """After `start`: those that receive the events of the chunk, mostly this observer alone."""
        return (self,)


class Observers(Observer):
    """Several observers as one: each event goes to those that do something with it. False if there are none."""

    def __init__(self, each: Sequence[Observer]) -> None:
        self._any = bool(each)
        for name, nothing in vars(Observer).items():
            if not name.startswith("_"):
                takers = (getattr(taker, name) for taker in each if getattr(type(taker), name) is not nothing)
                setattr(self, name, _all_of(tuple(takers)))

    def __bool__(self) -> bool:
        return self._any


def _all_of(takers: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def tell(*event: Any) -> None:
        for take in takers:
            take(*event)

    return takers[0] if len(takers) == 1 else tell


def active(machine: Machine, mask: Mask) -> Indices:
    """The indices of the threads in a mask."""
    return np.arange(machine.threads) if mask is None else np.flatnonzero(mask)


def report_misuse(machine: Machine, index: int, threads: Indices, message: str) -> None:
    """Tell the observers of threads that break a rule, if there are any."""
    if len(threads):
        machine.observers.misused(machine, index, threads, message)
