"""Races in tensor memory: what nothing orders with a product or a copy that another thread started, or with a warp.

The clocks are those of shared memory. A word stands for one column of 16 lanes.
"""

from __future__ import annotations

import numpy as np

from gemmery_emulator.blackwell.tensor_memory import COLUMNS, HALF, LANES
from gemmery_emulator.findings import messages
from gemmery_emulator.findings.messages import Collection
from gemmery_emulator.findings.orders import Orders, Words
from gemmery_emulator.findings.races import INDEX, INDEX_AT, THREAD, History
from gemmery_emulator.findings.shared_races import Followed
from gemmery_emulator.machine import Machine

WORD = 4


class TensorRaces:
    """Follows the accesses of a chunk of blocks to tensor memory."""

    def __init__(self, machine: Machine, orders: Orders, followed: Followed, collection: Collection) -> None:
        self._machine, self._followed, self._collection = machine, followed, collection
        self._operations = orders.operations
        if orders.tensor_memory:
            size = LANES // HALF * COLUMNS * WORD
            self._history = History(followed.clocks, machine.block_threads, size, self._conflict)
            followed.histories.append(self._history)

    def access(self, index: int, threads: Words, addresses: Words, what: str) -> None:
        """Threads access words (threads, words), themselves or by an operation that begins or lands."""
        threads, addresses = self._followed.pieces(threads, addresses)
        if what == "reads":
            self._history.reads(index, addresses, threads, WORD)
        elif what == "lands":
            self._history.lands(index, addresses, threads, WORD, then=True)
        else:
            self._history.writes(index, addresses, threads, WORD, asynchronous=what == "begins")

    def _conflict(self, kind: str, index: int, threads: Words, addresses: Words, others: Words) -> None:
        """Report a conflict, unless one thread's operations follow each other."""
        instructions = others >> INDEX_AT & INDEX
        own = threads % self._machine.block_threads == others & THREAD
        if kind == "uninitialised":
            bad = self._operations[np.full(threads.shape, index)]
        else:
            bad = ~(own & self._operations[index] & self._operations[instructions])
        if not bad.any():
            return
        first, machine = int(bad.argmax()), self._machine
        other, thread = int(instructions[first]), messages.thread(machine, int(threads[first]))
        half, column = divmod(int(addresses[first]) // WORD, COLUMNS)
        where = f"column {column} of tensor memory (lanes {half * HALF} to {half * HALF + HALF - 1})"
        does = "uses" if self._operations[index] else "reads" if self._name(index) == "tcgen05.ld" else "writes"
        at = self._collection.line(machine, other)
        if kind == "uninitialised":
            message = f"{thread} adds to {where}, which nothing has written: the first product must not add"
        elif kind == "not landed" or (self._operations[other] and not own[first]):
            way_out = "wait at the mbarrier of a tcgen05.commit that follows it"
            message = f"{thread} {does} {where}, which the {self._name(other)} at {at} may still use: {way_out}"
        else:
            second = messages.thread(machine, int(others[first] & THREAD), False)
            message = (
                f"{thread} {does} {where}, which {second} uses at {at}; nothing orders the two: let one arrive at a "
                "barrier where the other waits, with tcgen05.fence::before_thread_sync and ::after_thread_sync"
            )
        kind, pair = ("uninitialised", None) if kind == "uninitialised" else ("race", other)
        count = int(bad.sum()) * self._followed.alike
        self._collection.add(machine, kind, index, int(threads[first]), count, message, pair)

    def _name(self, index: int) -> str:
        return self._machine.kernel.instructions[index].opcode.name
