"""What the machine tells its observers while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gemmery.emulator.op import Mask

if TYPE_CHECKING:
    from gemmery.emulator.simt import Machine


@dataclass(frozen=True, slots=True)
class Access:
    """One memory instruction of all the warps that execute it together."""

    index: int  # of the instruction in its kernel
    space: str  # "global", "shared", "local"
    kind: str  # "ld", "st", "atom", "red"; "ldmatrix", "stmatrix"; "cp.async" (both ends, one event each); "bulk"
    addresses: Any  # int64, one a thread (threads,) or a scalar for all; of shared memory from the block's own zero
    mask: Mask  # threads that access; None is all
    width: int  # bytes a thread
    values: Any = None  # of "st": what is written, for each element of the vector one a thread or one for all


class Observer:
    """Told of each event before it takes effect; does nothing by itself."""

    def start(self, machine: Machine) -> None:
        """A chunk of blocks begins."""

    def access(self, machine: Machine, event: Access) -> None:
        """Threads load or store; those that fault are no longer in the event's mask."""

    def landed(self, machine: Machine, index: int, addresses: NDArray[np.int64], threads: NDArray[np.int64]) -> None:
        """What cp.async `index` fetched is written to shared memory: its threads waited for it."""

    def executed(self, machine: Machine, first: int, last: int, warps: int, threads: int) -> None:
        """Instructions first ... last - 1 were executed by so many warps, with so many threads active in all.

        Guarded instructions count as executed, as the profiler counts them.
        """

    def branch(self, machine: Machine, index: int, taken: Any, active: Mask) -> None:
        """A conditional branch: `taken` is a bool for each thread, or one for all."""

    def barrier(self, machine: Machine, index: int, barrier: int, mask: Mask) -> None:
        """These threads leave a barrier that is complete for their blocks (their warps: barrier -1)."""

    def ordered(
        self, machine: Machine, index: int, threads: NDArray[np.int64], addresses: NDArray[np.int64], acquired: bool
    ) -> None:
        """Threads arrive at mbarriers of their blocks, or are let pass by them (`acquired`): all before is seen."""

    def bulk(
        self, machine: Machine, index: int, threads: NDArray[np.int64], addresses: NDArray[np.int64], what: str
    ) -> None:
        """Units beside the threads reach 16 bytes of shared memory at each of `addresses` (threads, pieces).

        `what` is "begins" of a copy into it that is on its way, "lands" when it is there, or "reads".
        """

    def initialised(
        self, machine: Machine, index: int, threads: NDArray[np.int64], addresses: NDArray[np.int64]
    ) -> None:
        """Threads make mbarriers of 8 bytes of their blocks' shared memory."""

    def fenced(self, machine: Machine, index: int, mask: Mask) -> None:
        """These threads execute a fence; after fence.proxy.async units beside the threads see what they have seen."""

    def warpgroup(self, machine: Machine, index: int, threads: NDArray[np.int64]) -> None:
        """The four warps from each of these threads on have waited together for their products."""

    def misused(self, machine: Machine, index: int, threads: NDArray[np.int64], message: str) -> None:
        """These threads break a rule: "arrives at ..." in words."""

    def mismatched(self, machine: Machine, index: int, threads: NDArray[np.int64], message: str) -> None:
        """These threads execute a warp's instruction with lanes that do not fit together: "executes ..." in words."""

    def fault(self, machine: Machine, event: Access, kind: str, mask: NDArray[np.bool_]) -> None:
        """These threads do not access: "outside" their memory or "misaligned"."""

    def diverged(self, machine: Machine, index: int, mask: NDArray[np.bool_]) -> None:
        """These threads wait at barrier `index` while others of their block wait at another."""

    def deadlock(self, machine: Machine, index: int, mask: NDArray[np.bool_]) -> None:
        """These threads wait at instruction `index` for what no remaining thread can do."""

    def finish(self, machine: Machine) -> None:
        """The chunk has ended."""
