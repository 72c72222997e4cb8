"""The machine: all threads of a chunk of blocks in lock step, those with the lowest instruction first.

A register is a NumPy scalar while all threads of the chunk agree, else an array of one value a thread. Threads lie in
the order of their blocks, each block filled up to whole warps. Where they part, those at the lowest basic block go
first, which brings them together again where their ways meet; barriers hold threads until nobody else can move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.emulator import barriers, specials
from gemmery.emulator.copies import Copies, Copy
from gemmery.emulator.events import Access, Observer
from gemmery.emulator.hopper import bulk, cluster, mbarrier, products
from gemmery.emulator.lower import Block, Program
from gemmery.emulator.memory import LOCAL_WINDOW, SHARED_WINDOW, Global, Own
from gemmery.emulator.op import Mask, Values
from gemmery.emulator.ptx import Kernel
from gemmery.emulator.spinning import Spinning

WARP = 32
PEERS_WINDOW = SHARED_WINDOW + (1 << cluster.RANK_AT)
_ZEROS = {"global": 0, "shared": SHARED_WINDOW, cluster.SPACE: SHARED_WINDOW, "local": LOCAL_WINDOW}
Dims = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """What a kernel is launched with."""

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
    """One chunk of blocks; `run` takes it to its end."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        memory: Global,
        block_ids: NDArray[np.int64],
        observers: Sequence[Observer] = (),
        warp_order: np.random.Generator | None = None,
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
        self.registers = list(program.zeros)
        for name, slot in program.provided.items():
            self.registers[slot] = specials.value(self, name)
        # The basic block of each thread; None while all are at `at`, which else is where the latest step was.
        self.at = 0
        self.places: NDArray[np.int32] | None = None
        self.waiting = barriers.Waiting(self)
        self.failed: Any = False  # of a wait: which threads have to wait on
        self.order: NDArray[np.int64] | None = None
        idle = np.arange(self.threads) % self.block_threads >= launch.block_threads
        if idle.any():
            self.places = np.where(idle, program.stop, 0).astype(np.int32)
        if warp_order is not None:
            self.order = self._shuffled(warp_order)
            self.part()

    def _shuffled(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """The turn of each thread: warp by warp, or four together where the kernel has products of warpgroups."""
        grouped = any(one.opcode.startswith("wgmma") for one in self.kernel.instructions)
        each, warps = 4 if grouped else 1, self.block_threads // WARP
        turns = generator.permutation(self.blocks * -(-warps // each)).reshape(self.blocks, -1)
        return np.repeat(np.repeat(turns, each, axis=1)[:, :warps], WARP)

    # ---- the course of threads ----

    def run(self) -> None:
        """Take every thread to its end."""
        for observer in self.observers:
            observer.start(self)
        spinning = Spinning()
        while self._step():
            spinning.look(self)
        self.bulk.finish()
        for observer in self.observers:
            observer.finish(self)

    def part(self) -> NDArray[np.int32]:
        """The threads' places, as an array from now on."""
        if self.places is None:
            self.places = np.full(self.threads, self.at, np.int32)
        return self.places

    def _step(self) -> bool:
        """One basic block of the threads whose turn it is; False when all have ended."""
        if self.places is None:
            if self.at == self.program.stop:
                return False
            self._execute(self.program.blocks[self.at], None, self.at)
            return True
        ready = self.waiting.ready(self.places)
        if ready is None:
            return self.waiting.resolve(self.places)
        if self.order is not None:
            rank = np.where(ready, self.order, self.warps)
            ready = rank == rank.min()
        at = int(np.where(ready, self.places, self.program.stop).min())
        mask = (self.places == at) & ready  # a thread that waits at a barrier is already where it will go on
        if mask.all():
            self.places, mask = None, None
        self.at = at
        self._execute(self.program.blocks[at], mask, at)
        if self.order is not None:
            self.part()
        return True

    def _execute(self, block: Block, mask: Mask, at: int) -> None:
        warps = self.warps if mask is None else int(mask.reshape(-1, WARP).any(axis=1).sum())
        threads = self.threads if mask is None else int(mask.sum())
        for observer in self.observers:
            observer.executed(self, block.first, block.last, warps, threads)
        for step in block.steps:
            step(self, mask)
        if block.waits:
            mask = self.waiting.sleep(mask, at)
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
        """Threads stop the launch; here they alone end, and the observers are told."""
        taken = np.ones(self.threads, bool) if block.guard is None else self.spread(block.guard(self.registers))
        threads = np.flatnonzero(taken if mask is None else taken & mask)
        if threads.size:
            what = "fails an assert()" if "__assertfail" in self.kernel.instructions[block.last - 1].text else "traps"
            self.misuse(block.last - 1, threads, f"{what}: on a device the launch ends here with an error")

    # ---- what works beside the threads ----

    @cached_property
    def mbarriers(self) -> mbarrier.Mbarriers:
        """The mbarriers of all blocks."""
        return mbarrier.Mbarriers(self)

    @cached_property
    def bulk(self) -> bulk.Bulk:
        """The bulk copies under way."""
        return bulk.Bulk(self)

    @cached_property
    def products(self) -> products.Products:
        """The products of warpgroups under way."""
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
        """Tell the observers that threads arrived at mbarriers, or passed; a cluster's threads of one number as one."""
        if acquired:
            threads, addresses = self.peers.alike(threads, addresses)
        for observer in self.observers if len(threads) else ():
            observer.ordered(self, index, threads, addresses, acquired)

    def misuse(self, index: int, threads: NDArray[np.int64], message: str) -> None:
        """Tell the observers of threads that break a rule."""
        for observer in self.observers:
            observer.misused(self, index, threads, message)

    # ---- memory ----

    def spread(self, value: Values) -> NDArray[Any]:
        """A value as an array of one a thread."""
        return value if value.ndim else np.broadcast_to(value, (self.threads,))

    def load(
        self, index: int, space: str, addresses: Values, mask: Mask, kind: str, count: int, width: int
    ) -> list[Any]:
        """`count` values a thread; threads that fault get zeros."""
        if space == "":
            return self._load_generic(index, addresses, mask, kind, count, width)
        if space == "param":
            return self._parameter(addresses, kind, count)
        memory = self.space(space)
        addresses, mask, faulty = self.checked(index, space, "ld", addresses, mask, width)
        values = memory.load(addresses, kind, count, width)
        return values if faulty is None else [np.where(faulty, np.zeros_like(value), value) for value in values]

    def rows(self, index: int, space: str, addresses: Values, mask: Mask, what: str) -> NDArray[np.uint32]:
        """16 bytes a thread, as rows of four words."""
        if space == "":
            ((space, addresses, mask),) = self._spaces(addresses, mask)
        addresses, mask, faulty = self.checked(index, space, what, addresses, mask, 16)
        memory = self.space(space)
        found = memory.view("u4", 4).take(self.spread(addresses + memory.base) >> 4, axis=0)
        return found if faulty is None else np.where(faulty[:, None], np.uint32(0), found)

    def store(
        self,
        index: int,
        space: str,
        addresses: Values,
        mask: Mask,
        values: list[Any],
        kind: str,
        width: int,
        what: str = "st",
    ) -> None:
        """Write a value, or the elements of a vector, of each thread of the mask."""
        if space == "":
            for name, part, some in self._spaces(addresses, mask):
                self.store(index, name, part, some, values, kind, width, what)
            return
        addresses, mask, _ = self.checked(index, space, what, addresses, mask, width, values)
        if mask is None or mask.any():
            self.space(space).store(addresses, values, mask, kind, width, self.threads)

    def copy(self, index: int, to: Values, source: Values, mask: Mask, width: int, taken: Any) -> None:
        """Begin a cp.async: the bytes that are `taken` (None: all), then zeros."""
        reading = mask
        if taken is not None:
            some = np.broadcast_to(taken > 0, (self.threads,))
            reading = some if mask is None else some & mask
            if reading.all():
                reading = None
        kind = f"u{width}" if width < 16 else "u8"
        rows = np.zeros((self.threads, width), np.uint8)
        if reading is None or reading.any():
            source, reading, _ = self.checked(index, "global", "cp.async", source, reading, width)
            values = self.memory.load(source, kind, max(1, width // 8), width)
            fetched = np.stack([self.spread(value) for value in values], axis=-1).view(np.uint8)
            rows = fetched if reading is None else np.where(reading[:, None], fetched, rows)
        if taken is not None and np.any((taken > 0) & (taken < width)):
            rows = np.where(np.arange(width) < np.broadcast_to(taken, (self.threads,))[:, None], rows, np.uint8(0))
        to, mask, _ = self.checked(index, "shared", "cp.async", to, mask, width)
        to = self.spread(to)
        place = (to + self.shared.base) >> width.bit_length() - 1
        threads = np.arange(self.threads)
        if mask is not None:
            place, to, rows, threads = place[mask], to[mask], rows[mask], threads[mask]
        self.copies.add(Copy(index, place, to, rows, threads, 0))

    def emit(self, event: Access) -> None:
        """Tell the observers of an access."""
        for observer in self.observers:
            observer.access(self, event)

    def space(self, space: str) -> Global | Own:
        """The memory of a space."""
        return {"shared": self.shared, cluster.SPACE: self.shared, "local": self.local}.get(space, self.memory)

    def checked(
        self,
        index: int,
        space: str,
        what: str,
        addresses: Values,
        mask: Mask,
        width: int,
        values: list[Any] | None = None,
    ) -> tuple[Values, Mask, Mask]:
        """Addresses that may be followed, of the threads that are left, and those that faulted; observers are told."""
        if mask is not None and addresses.ndim:
            addresses = np.where(mask, addresses, addresses[mask.argmax()])
        if space == cluster.SPACE and not (addresses >> cluster.RANK_AT).any():
            space = "shared"
        faulty = None
        low = int(np.bitwise_or.reduce(addresses)) if addresses.ndim else int(addresses)
        if low & width - 1:
            faulty = self._fault(index, space, what, addresses, mask, width, "misaligned", addresses & width - 1 != 0)
        memory = self.peers if space == cluster.SPACE else self.space(space)
        outside = memory.outside(addresses, mask, width)
        if outside is not None:
            more = self._fault(index, space, what, addresses, mask, width, "outside", outside)
            faulty = more if faulty is None else faulty | more
        if faulty is not None:
            mask = ~faulty if mask is None else mask & ~faulty
            some = self.spread(addresses)[mask.argmax()] if mask.any() else self.space(space).safe
            addresses = np.where(mask, addresses, some)
        if space != "const" and (mask is None or mask.any()):
            self.emit(Access(index, space, what, addresses, mask, width, values))
        if space == cluster.SPACE:
            addresses = self.peers.relative(addresses)
        return addresses, mask, faulty

    def _fault(
        self, index: int, space: str, what: str, addresses: Values, mask: Mask, width: int, kind: str, bad: Any
    ) -> NDArray[np.bool_]:
        threads = np.array(np.broadcast_to(bad, (self.threads,)))
        if mask is not None:
            threads &= mask
        event = Access(index, space.partition("::")[0], what, addresses, mask, width)
        for observer in self.observers:
            observer.fault(self, event, kind, threads)
        return threads

    def placed(self, space: str, addresses: Values, mask: Mask) -> list[tuple[str, Values, Mask]]:
        """Addresses by the space they lie in: the one that is named, or of generic ones ("") each."""
        return self._spaces(addresses, mask) if space == "" else [(space, addresses, mask)]

    def _spaces(self, addresses: Values, mask: Mask) -> list[tuple[str, Values, Mask]]:
        """Generic addresses, by the space they lie in."""
        if mask is not None and addresses.ndim:
            addresses = np.where(mask, addresses, addresses[mask.argmax()])
        low, high = int(addresses.min()), int(addresses.max())
        for name, start, stop in (
            ("global", -(1 << 63), SHARED_WINDOW),
            ("shared", SHARED_WINDOW, PEERS_WINDOW),
            (cluster.SPACE, PEERS_WINDOW, LOCAL_WINDOW),
            ("local", LOCAL_WINDOW, 1 << 62),
        ):
            away = np.int64(_ZEROS[name])
            if start <= low and high < stop:
                return [(name, addresses - away, mask)]
        found: list[tuple[str, Values, Mask]] = []
        for name, inside, away in (
            ("global", addresses < SHARED_WINDOW, np.int64(0)),
            ("shared", (addresses >= SHARED_WINDOW) & (addresses < PEERS_WINDOW), np.int64(SHARED_WINDOW)),
            (cluster.SPACE, (addresses >= PEERS_WINDOW) & (addresses < LOCAL_WINDOW), np.int64(SHARED_WINDOW)),
            ("local", addresses >= LOCAL_WINDOW, np.int64(LOCAL_WINDOW)),
        ):
            some = inside if mask is None else inside & mask
            if some.any():
                found.append((name, addresses - away, some))
        return found

    def _load_generic(self, index: int, addresses: Values, mask: Mask, kind: str, count: int, width: int) -> list[Any]:
        values: list[Any] = []
        for name, part, some in self._spaces(addresses, mask):
            found = self.load(index, name, part, some, kind, count, width)
            chosen = np.ones(1, bool) if some is None else some
            values = [np.where(chosen, *pair) for pair in zip(found, values, strict=True)] if values else found
        return values

    def _parameter(self, addresses: Values, kind: str, count: int) -> list[Any]:
        size = np.dtype(kind).itemsize
        if addresses.ndim and (addresses == addresses[0]).all():
            addresses = addresses[0]
        if addresses.ndim:
            rows = self.parameters[addresses[:, None] + np.arange(size * count)].view(kind)
            return [np.ascontiguousarray(rows[:, place]) for place in range(count)]
        first = int(addresses)
        return list(self.parameters[first : first + size * count].copy().view(kind))
