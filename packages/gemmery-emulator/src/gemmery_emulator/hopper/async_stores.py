"""st.async and red.async: stores and updates of shared memory of a cluster, which complete bytes at an mbarrier there.

PTX ISA 9.0, "Data Movement and Conversion Instructions: st.async" and "Parallel Synchronization and Communication
Instructions: red.async". Like bulk copies they land when a thread waits for the mbarrier, and only as many as end its
phase: as late as possible, so that a missing wait is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmery.errors import EmulationError
from gemmery_emulator import reach
from gemmery_emulator.atomics import CHANGES, Change, changed
from gemmery_emulator.hopper import cluster
from gemmery_emulator.hopper.cluster import Lifetimes
from gemmery_emulator.hopper.mbarrier import Mbarriers, Needed, of
from gemmery_emulator.machine import Machine, Rows, landed, report_misuse
from gemmery_emulator.memory import SHARED_WINDOW
from gemmery_emulator.op import LENGTHS, NUMPY, Indices, Kinds, Mask, sort_by_kind
from gemmery_emulator.ptx import Instruction
from gemmery_emulator.steps import Handler, Lowering, Step, refused

WORD = 4  # bytes of the narrowest store
_COMPLETES: Kinds = {"space": (cluster.SPACE,), "completes": ("mbarrier::complete_tx::bytes",)}
_STORED: Kinds = {
    **_COMPLETES,
    "type": (*(f"{kind}{bits}" for kind in "bus" for bits in (32, 64)), "f32", "f64"),
    "length": ("v2", "v4"),
    "order": ("weak",),
}
_UPDATED: Kinds = {
    **_COMPLETES,
    "type": ("u32", "s32", "u64", "b32"),
    "operation": ("inc", "dec", "min", "max", "add", "and", "or", "xor"),
    "order": ("relaxed",),
    "scope": ("cluster",),
}
_ELSEWHERE = (
    "stores to shared memory of one block of its cluster, and completes at an mbarrier of another: map both addresses "
    "to the same rank (mapa)"
)


@dataclass(frozen=True)
class AsyncStore(Rows):
    """The stores or updates of one instruction, one row for each thread."""

    index: int
    threads: Indices
    places: Indices  # bytes in the chunk's shared memory
    values: tuple[Any, ...]  # for each element of the vector, as `kind`
    barriers: Indices
    kind: str  # NumPy's
    change: Change | None  # None for a store

    @property
    def words(self) -> Indices:
        """The words of shared memory that each row writes: (rows, words)."""
        count = np.dtype(self.kind).itemsize * len(self.values) // WORD
        words: Indices = self.places[:, None] // WORD + np.arange(count)
        return words


class AsyncStores:
    """The stores under way of a chunk of blocks."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._mbarriers = machine, machine.unit(Mbarriers)
        self._mbarriers.landing.append(self._land_for)
        self._stores: list[AsyncStore] = []
        self._rows = 0
        # For each word of shared memory: how many stores are under way to it, and the latest one.
        self.count, self.index, self.thread = np.zeros((3, machine.shared.data.size // WORD), np.int64)

    def start(self, store: AsyncStore) -> None:
        """Start stores; threads that pass the mbarrier later see everything the issuing threads did before."""
        words = store.words
        np.add.at(self.count, words, 1)
        self.index[words], self.thread[words] = store.index, store.threads[:, None]
        self._stores.append(store)
        self._rows += len(store.threads)
        if self._rows * WORD > reach.IN_FLIGHT:
            line = self._machine.kernel.instructions[store.index].line
            raise EmulationError(
                f"more than {reach.IN_FLIGHT >> 20} MiB of asynchronous stores at {line} have not been waited for: "
                "wait at their mbarrier inside the loop"
            )
        self._machine.changes += 1  # threads that sleep on the mbarrier may continue now

    def _land_for(self, needed: Needed) -> None:
        self._stores = landed(self._stores, lambda store: needed(store.barriers), self._land)

    def _land(self, store: AsyncStore) -> None:
        self._rows -= len(store.threads)
        np.subtract.at(self.count, store.words, 1)
        width = np.dtype(store.kind).itemsize * len(store.values)
        view, rows = self._machine.shared.view(store.kind, len(store.values)), store.places // width
        if store.change is not None:
            changed(view, rows, None, store.change, None, list(store.values))
        elif len(store.values) == 1:
            view[rows] = store.values[0]
        else:
            view[rows] = np.stack(store.values, axis=1)
        self._mbarriers.complete(store.barriers, width)


def _step(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """The step of an st.async or red.async."""
    opcode, updates = instruction.opcode, instruction.opcode.name == "red.async"
    words = sort_by_kind((*opcode.modifiers, *opcode.types), _UPDATED if updates else _STORED)
    needs = {"type", "completes", *(("operation", "order", "scope") if updates else ())}
    if words is None or not needs <= words.keys():
        raise refused(instruction)
    kind, count = words["type"], LENGTHS.get(words.get("length", ""), 1)
    change = CHANGES.get((words["operation"], kind)) if updates else None
    to, source, barrier = instruction.operands
    reads = [lowering.read(element, kind, instruction) for element in lowering.flat((source,))]
    width = np.dtype(NUMPY[kind]).itemsize * count
    if len(reads) != count or width > 16 or (updates and change is None):
        raise refused(instruction)
    where, mark = lowering.address(to, instruction), lowering.address(barrier, instruction)
    window = 0 if "space" in words else SHARED_WINDOW
    name = "red" if updates else "st"

    def step(machine: Machine, mask: Mask) -> None:
        registers = machine.registers
        values = [machine.spread(read(registers)) for read in reads]
        addresses = machine.spread(where(registers) - window)
        inside, some, _ = reach.checked(machine, index, cluster.SPACE, name, addresses, mask, width)
        threads = np.arange(machine.threads) if some is None else np.flatnonzero(some)
        places = machine.spread(inside + machine.shared.base)[threads]
        senders, barriers = machine.unit(Mbarriers).places(index, threads, of(mark(registers), threads) - window)
        places = places[np.isin(threads, senders)]
        apart = barriers * 8 // machine.shared.stride != places // machine.shared.stride
        report_misuse(machine, index, senders[apart], _ELSEWHERE)
        store = AsyncStore(
            index, senders, places, tuple(value[senders] for value in values), barriers, NUMPY[kind], change
        ).only(~apart)
        if len(store.threads):
            _start(machine, store)

    return step


def _start(machine: Machine, store: AsyncStore) -> None:
    """Tell the observers of stores whose addresses are right, and start them."""
    mbarriers, lifetimes, each = machine.unit(Mbarriers), machine.unit(Lifetimes), machine.block_threads
    if lifetimes.clustered:
        lifetimes.arrives(store.index, store.threads, store.barriers, mbarriers.phases(store.barriers))
    blocks, offsets = store.places // machine.shared.stride, mbarriers.offsets(store.barriers)
    # In the block that receives, a store counts as one by the thread with the same number.
    there, first = np.unique(store.threads % each + blocks * each, return_index=True)
    cluster.report_order(machine, store.index, there, offsets[first], acquired=False)
    machine.observers.sends(machine, store.index, store.threads, blocks, offsets)
    machine.unit(AsyncStores).start(store)


TABLE = {
    "st.async": Handler(step=_step, operands=(3,), kind="st.async", orders=True, writes=False),
    "red.async": Handler(step=_step, operands=(3,), kind="red.async", orders=True, writes=False),
}
