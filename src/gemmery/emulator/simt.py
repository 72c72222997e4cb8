"""The machine: runs all threads of a chunk of blocks in lock step, those at the lowest instruction first.

A register is a NumPy scalar while all threads of the chunk agree, else an array with one value per thread. Threads are
numbered through the blocks, each block padded to whole warps. Where threads diverge, those at the lowest basic block
run first, so they converge where their paths join; barriers hold threads until no other thread can run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.emulator import barriers, convergence, reach, specials, spinning
from gemmery.emulator.copies import Copies
from gemmery.emulator.events import Access, Observer
from gemmery.emulator.hopper import bulk, cluster, mbarrier, products
from gemmery.emulator.lower import Block, Program
from gemmery.emulator.memory import Global, Own
from gemmery.emulator.op import Mask, Values
from gemmery.emulator.ptx import Kernel

WARP = 32
Dims = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
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


class Machine:
    """One chunk of blocks; `run` executes it to its end."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        memory: Global,
        block_ids: NDArray[np.int64],
        observers: Sequence[Observer] = (),
        warp_order: np.random.Generator | None = None,
        max_steps: int = spinning.MOST,
    ) -> None:
        self.program: Program = program
        self.kernel: Kernel = program.kernel
        self.launch: Launch = launch
        self.block_ids: NDArray[np.int64] = block_ids
        self.blocks: int = len(block_ids)
        self.block_threads: int = -(-launch.block_threads // WARP) * WARP
        self.threads: int = self.blocks * self.block_threads
        self.warps = self.threads // WARP
        self.observers = tuple(observers)
        self.memory = memory
        self.shared_bytes: int = program.kernel.shared + launch.shared
        self.shared = Own(self.blocks, self.shared_bytes, self.threads)
        self.local = Own(self.threads, program.kernel.local, self.threads)
        self.parameters = np.frombuffer(launch.parameters or b"\0", np.uint8)
        self.copies = Copies()
        self._max_steps = max_steps
        self.registers = list(program.zeros)
        for name, slot in program.provided.items():
            self.registers[slot] = specials.value(self, name)
        # The basic block of each thread; None while all are at `at`, otherwise the block of the latest step.
        self.at = 0
        self.places: NDArray[np.int32] | None = None
        self.waiting = barriers.Waiting(self)
        self.failed: Any = False  # the threads whose latest wait failed
        self.order: NDArray[np.int64] | None = None
        self.undefined: dict[int, convergence.Undefined] = {}  # by shuffle
        self.ran: Mask = None  # the threads of the latest step
        self.yielding: Mask = None  # threads that loop until another one writes, and let the others run
        idle = np.arange(self.threads) % self.block_threads >= launch.block_threads
        if idle.any():
            self.places = np.where(idle, program.stop, 0).astype(np.int32)
        if warp_order is not None:
            self.order = self._shuffled(warp_order)
            self.part()

    def _shuffled(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """The turn of each thread: warp by warp, or by warpgroups if the kernel uses wgmma."""
        grouped = any(one.opcode.startswith("wgmma") for one in self.kernel.instructions)
        each, warps = 4 if grouped else 1, self.block_threads // WARP
        turns = generator.permutation(self.blocks * -(-warps // each)).reshape(self.blocks, -1)
        return np.repeat(np.repeat(turns, each, axis=1)[:, :warps], WARP)

    # ---- control flow ----

    def run(self) -> None:
        """Run every thread to its end."""
        for observer in self.observers:
            observer.start(self)
        endless = spinning.Spinning(self._max_steps)
        while self._step():
            endless.look(self)
        self.bulk.finish()
        for observer in self.observers:
            observer.finish(self)

    def part(self) -> NDArray[np.int32]:
        """The places of all threads, as an array from now on."""
        if self.places is None:
            self.places = np.full(self.threads, self.at, np.int32)
        return self.places

    def _step(self) -> bool:
        """Execute one basic block of the threads whose turn it is; False when all have ended."""
        if self.places is None:
            if self.at == self.program.stop:
                return False
            self._execute(self.program.blocks[self.at], None, self.at)
            return True
        ready = self.waiting.ready(self.places)
        if ready is None:
            return self.waiting.resolve(self.places)
        if self.yielding is not None:
            if (ready & ~self.yielding).any():
                ready = ready & ~self.yielding
            else:
                self.yielding = None
        if self.order is not None:
            rank = np.where(ready, self.order, self.warps)
            ready = rank == rank.min()
        at = int(np.where(ready, self.places, self.program.stop).min())
        mask = (self.places == at) & ready  # the place of a thread that waits at a barrier is already the next one
        if mask.all():
            self.places, mask = None, None
        self.at, self.ran = at, mask
        self._execute(self.program.blocks[at], mask, at)
        if self.order is not None:
            self.part()
        return True

    def _execute(self, block: Block, mask: Mask, at: int) -> None:
        if block.gathering is not None and mask is not None:
            mask = self.waiting.gather(block.gathering, mask)
            if not mask.any():
                return
        warps = self.warps if mask is None else int(mask.reshape(-1, WARP).any(axis=1).sum())
        threads = self.threads if mask is None else int(mask.sum())
        for observer in self.observers:
            observer.executed(self, block.first, block.last, warps, threads)
        for step in block.steps:
            step(self, mask)
        if block.waits:
            mask = self.waiting.sleep(mask)
            if mask is not None and not mask.any():
                return
        end = block.end
        if end is None:
            self._go(mask, at + 1)
        elif end.opcode.startswith("bra"):
            self._branch(block, mask, at, block.targets[0])
        elif end.opcode.startswith("brx"):
            self._switch(block, mask)
        elif end.opcode.split(".")[0] in ("ret", "exit", "trap"):
            if end.opcode == "trap":
                self._trap(block, mask)
            self._branch(block, mask, at, self.program.stop)
        else:
            self.waiting.arrive(block, mask, at)

    def _go(self, mask: Mask, place: int) -> None:
        if mask is None and self.places is None:
            self.at = place
        else:
            places = self.part()
            places[slice(None) if mask is None else mask] = place

    def _branch(self, block: Block, mask: Mask, at: int, target: int) -> None:
        if block.guard is None:
            self._go(mask, target)
            return
        taken = block.guard(self.registers)
        for observer in self.observers:
            observer.branch(self, block.last - 1, taken, mask)
        if taken.ndim == 0:
            self._go(mask, target if taken else at + 1)
            return
        going = taken if mask is None else taken & mask
        count = int(np.count_nonzero(going))
        if count == 0:
            self._go(mask, at + 1)
        elif count == (self.threads if mask is None else np.count_nonzero(mask)):
            self._go(mask, target)
        else:
            self._go(mask, at + 1)
            self.part()[going] = target

    def _switch(self, block: Block, mask: Mask) -> None:
        assert block.guard is not None
        chosen = self.spread(block.guard(self.registers))
        places = np.array(block.targets, np.int32)[np.minimum(chosen, len(block.targets) - 1)]
        self.places = places if mask is None else np.where(mask, places, self.part())

    def _trap(self, block: Block, mask: Mask) -> None:
        """Threads trap: a device stops the launch; here they end, and the observers are told."""
        taken = np.ones(self.threads, bool) if block.guard is None else self.spread(block.guard(self.registers))
        threads = np.flatnonzero(taken if mask is None else taken & mask)
        if threads.size:
            what = "fails an assert()" if "__assertfail" in self.kernel.instructions[block.last - 1].text else "traps"
            self.misuse(block.last - 1, threads, f"{what}: on a device the launch ends here with an error")

    # ---- asynchronous units ----

    @cached_property
    def mbarriers(self) -> mbarrier.Mbarriers:
        """The mbarriers of all blocks."""
        return mbarrier.Mbarriers(self)

    @cached_property
    def bulk(self) -> bulk.Bulk:
        """The bulk copies in flight."""
        return bulk.Bulk(self)

    @cached_property
    def products(self) -> products.Products:
        """The warpgroup products in flight."""
        return products.Products(self)

    @cached_property
    def peers(self) -> cluster.Peers:
        """Shared memory of the blocks of a cluster."""
        return cluster.Peers(self)

    @cached_property
    def cluster_barrier(self) -> cluster.Barrier:
        """The barrier of each cluster."""
        return cluster.Barrier(self)

    def order_by(self, index: int, threads: NDArray[np.int64], addresses: NDArray[np.int64], acquired: bool) -> None:
        """Report that threads arrived at mbarriers or passed; equal threads of a cluster's blocks count as one."""
        if acquired:
            threads, addresses = self.peers.alike(threads, addresses)
        for observer in self.observers if len(threads) else ():
            observer.ordered(self, index, threads, addresses, acquired)

    def misuse(self, index: int, threads: NDArray[np.int64], message: str) -> None:
        """Report threads that break a rule."""
        for observer in self.observers:
            observer.misused(self, index, threads, message)

    # ---- memory ----

    load, rows, store, copy = reach.load, reach.rows, reach.store, reach.copy
    checked, placed = reach.checked, reach.placed

    def spread(self, value: Values) -> NDArray[Any]:
        """A value as an array with one element per thread."""
        return value if value.ndim else np.broadcast_to(value, (self.threads,))

    def space(self, space: str) -> Global | Own:
        """The memory of a state space."""
        return {"shared": self.shared, cluster.SPACE: self.shared, "local": self.local}.get(space, self.memory)

    def emit(self, event: Access) -> None:
        """Report an access."""
        for observer in self.observers:
            observer.access(self, event)
