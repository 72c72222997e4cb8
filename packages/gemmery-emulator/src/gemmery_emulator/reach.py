"""Memory accesses of threads: loads, stores and copies of checked addresses, in any state space.

Copies of cp.async are under way by thread and group; one lands when its thread waits for it (PTX ISA 9.0,
"Data Movement and Conversion Instructions: Non-bulk copy").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.errors import EmulationError
from gemmery_emulator.hopper import cluster
from gemmery_emulator.hopper.cluster import Lifetimes
from gemmery_emulator.machine import Access, Machine, Rows, active, landed
from gemmery_emulator.memory import LOCAL_WINDOW, SHARED_WINDOW, Global, Own
from gemmery_emulator.op import Flags, Mask, Values, highest, lowest


@dataclass(frozen=True)
class Copy(Rows):
    """The copies of one instruction, for the threads that executed it."""

    index: int  # of the instruction
    rows: NDArray[np.int64]  # places in the chunk's shared memory, in rows of `data`
    addresses: NDArray[np.int64]  # the same as byte offsets in the block's part
    data: NDArray[Any]  # (copies, width) bytes
    threads: NDArray[np.int64]
    group: Any  # group of each copy's thread, from 0; an int while all agree


class Copies:
    """The copies under way of a chunk of blocks."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.committed: Any = 0  # groups of each thread; an int while all agree
        self.bytes = 0  # of data that has not landed
        self.under_way: list[Copy] = []  # in the order in which they began

    def resume(self, under_way: list[Copy], committed: Any) -> None:
        """Go on with these copies, after compiled code had them."""
        self.under_way, self.committed = under_way, committed
        self.bytes = sum(copy.data.nbytes for copy in under_way)

    def add(self, copy: Copy) -> None:
        """Start copies; they belong to the group that their threads commit next."""
        group = self.committed if isinstance(self.committed, int) else self.committed[copy.threads]
        self.under_way.append(replace(copy, group=group))
        self.bytes += copy.data.nbytes

    def commit(self, mask: Mask) -> None:
        """Close the group of these threads."""
        if mask is None:
            self.committed = self.committed + 1
            return
        if isinstance(self.committed, int):
            self.committed = np.full(self._machine.threads, self.committed, np.int64)
        self.committed = self.committed + mask

    def wait(self, mask: Mask, pending: int) -> None:
        """Land all groups of these threads except the latest `pending` ones."""
        newest = self.committed - 1 - pending

        def ready(copy: Copy) -> Flags:
            ended = copy.group <= (newest if isinstance(newest, int) else newest[copy.threads])
            return np.asarray(ended if mask is None else ended & mask[copy.threads])

        self.resume(landed(self.under_way, ready, self._land), self.committed)

    def wait_all(self, mask: Mask) -> None:
        """Land all copies of these threads."""
        self.commit(mask)
        self.wait(mask, 0)

    def _land(self, copy: Copy) -> None:
        machine = self._machine
        machine.observers.landed(machine, copy.index, copy.addresses, copy.threads)
        machine.shared.view("u1", copy.data.shape[1])[copy.rows] = copy.data


IN_FLIGHT = 1 << 30  # bytes of copies that no thread has waited for, at most
PEERS_WINDOW = SHARED_WINDOW + (1 << cluster.RANK_AT)
# The generic addresses of each space, and that of its byte 0.
_WINDOWS = (
    ("global", -(1 << 63), SHARED_WINDOW, 0),
    ("shared", SHARED_WINDOW, PEERS_WINDOW, SHARED_WINDOW),
    (cluster.SPACE, PEERS_WINDOW, LOCAL_WINDOW, SHARED_WINDOW),
    ("local", LOCAL_WINDOW, (1 << 63) - 1, LOCAL_WINDOW),
)


def load(
    machine: Machine, index: int, space: str, addresses: Values, mask: Mask, kind: str, count: int, width: int
) -> list[Any]:
    """Load `count` values per thread; threads that fault get zeros."""
    if space == "":
        values: list[Any] = []
        for name, part, some in placed(machine, "", addresses, mask):
            loaded, lanes = load(machine, index, name, part, some, kind, count, width), np.ones(1, bool)
            lanes = lanes if some is None else some
            values = [np.where(lanes, *pair) for pair in zip(loaded, values, strict=True)] if values else loaded
        return values
    if space == "param":
        return _parameter(machine, addresses, kind, count)
    memory = memory_of(machine, space)
    addresses, mask, faulty = checked(machine, index, space, "ld", addresses, mask, width)
    values = memory.load(addresses, kind, count, width)
    return values if faulty is None else [np.where(faulty, np.zeros_like(value), value) for value in values]


def rows(machine: Machine, index: int, space: str, addresses: Values, mask: Mask) -> NDArray[np.uint32]:
    """Load 16 bytes per thread, as rows of four words."""
    ((space, addresses, mask),) = placed(machine, space, addresses, mask)
    addresses, mask, faulty = checked(machine, index, space, "ldmatrix", addresses, mask, 16)
    memory = memory_of(machine, space)
    words = memory.view("u4", 4).take(machine.spread(addresses + memory.base) >> 4, axis=0)
    return words if faulty is None else np.where(faulty[:, None], np.uint32(0), words)


def store(
    machine: Machine,
    index: int,
    space: str,
    addresses: Values,
    mask: Mask,
    values: list[Any],
    kind: str,
    width: int,
    what: str = "st",
) -> None:
    """Store a value, or the elements of a vector, for each thread of the mask."""
    for name, part, threads in placed(machine, space, addresses, mask):
        safe, some, _ = checked(machine, index, name, what, part, threads, width, values)
        if some is None or np.count_nonzero(some):
            memory_of(machine, name).store(safe, values, some, kind, width, machine.threads)


def copy(machine: Machine, index: int, to: Values, source: Values, mask: Mask, width: int, count: Any) -> None:
    """Start a cp.async of the first `count` bytes (None: all), filled up with zeros."""
    rows = np.zeros((machine.threads, width), np.uint8)
    for size, some in _sizes(machine, mask, width, count):
        rows[:, :size] |= _fetched(machine, index, source, some, width, size)
    to, mask, _ = checked(machine, index, "shared", "cp.async", to, mask, width)
    to = machine.spread(to)
    place = (to + machine.shared.base) >> width.bit_length() - 1
    threads = np.arange(machine.threads)
    if mask is not None:
        place, to, rows, threads = place[mask], to[mask], rows[mask], threads[mask]
    copies = machine.unit(Copies)
    copies.add(Copy(index, place, to, rows, threads, 0))
    if copies.bytes > IN_FLIGHT:
        raise EmulationError(
            f"more than {IN_FLIGHT >> 20} MiB of cp.async at {machine.kernel.instructions[index].line} have not been "
            "waited for: wait for them (cp.async.wait_group) inside the loop"
        )


def _sizes(machine: Machine, mask: Mask, width: int, count: Any) -> list[tuple[int, Mask]]:
    """Return the numbers of bytes that threads read by a cp.async, and the threads that read so many."""
    if count is None:
        return [(width, mask)]
    sizes: list[tuple[int, Mask]] = []
    read = np.clip(np.broadcast_to(count, (machine.threads,)), 0, width)
    for size in np.flatnonzero(np.bincount(read if mask is None else read[mask])[1:]) + 1:  # faster than np.unique
        some = read == size if mask is None else (read == size) & mask
        sizes.append((int(size), None if some.all() else some))
    return sizes


def _fetched(machine: Machine, index: int, source: Values, mask: Mask, width: int, size: int) -> NDArray[np.uint8]:
    """Return the first `size` of `width` bytes from each thread's address; zeros for threads that do not read."""
    source, mask, _ = checked(machine, index, "global", "cp.async", source, mask, width, size=size)
    values = machine.memory.load(source, f"u{width}" if width < 16 else "u8", max(1, width // 8), width)
    fetched = np.stack([machine.spread(value) for value in values], axis=-1).view(np.uint8)[:, :size]
    return fetched if mask is None else np.where(mask[:, None], fetched, np.uint8(0))


def checked(
    machine: Machine,
    index: int,
    space: str,
    what: str,
    addresses: Values,
    mask: Mask,
    width: int,
    values: list[Any] | None = None,
    size: int = 0,
) -> tuple[Values, Mask, Mask]:
    """Check addresses and report the access; return safe addresses, the mask that is left, and the faulty threads.

    `size` is the number of bytes accessed where that is less than `width`, of which addresses are multiples; the
    access is reported with the power of two below.
    """
    reached = size or width
    if mask is not None and addresses.ndim:
        addresses = np.where(mask, addresses, addresses[mask.argmax()])
    if space == cluster.SPACE and not (addresses >> cluster.RANK_AT).any():
        space = "shared"
    faulty = None
    low = int(np.bitwise_or.reduce(addresses)) if addresses.ndim else int(addresses)
    if low & width - 1:
        faulty = _fault(machine, index, space, what, addresses, mask, width, "misaligned", addresses & width - 1 != 0)
    memory = machine.unit(cluster.Peers) if space == cluster.SPACE else memory_of(machine, space)
    # No address is larger than all of them joined by or, nor negative if that is not.
    inside = isinstance(memory, Own) and 0 <= low <= memory.size - reached
    outside = None if inside else memory.outside(addresses, mask, reached)
    if outside is not None:
        beyond = _fault(machine, index, space, what, addresses, mask, reached, "outside", outside)
        faulty = beyond if faulty is None else faulty | beyond
    if faulty is not None:
        mask = ~faulty if mask is None else mask & ~faulty
        some = machine.spread(addresses)[mask.argmax()] if mask.any() else memory_of(machine, space).safe
        addresses = np.where(mask, addresses, some)
    if space != "const" and (mask is None or np.count_nonzero(mask)):
        machine.observers.access(
            machine, Access(index, space, what, addresses, mask, 1 << reached.bit_length() - 1, values)
        )
    if space == cluster.SPACE:
        # Threads access the shared memory of the blocks that their addresses name.
        threads = active(machine, mask)
        blocks = cluster.resolved(
            machine.spread(addresses)[threads], threads // machine.block_threads, cluster.size(machine)
        )
        machine.unit(Lifetimes).accesses(index, threads, blocks)
        addresses = machine.unit(cluster.Peers).relative(addresses)
    return addresses, mask, faulty


def memory_of(machine: Machine, space: str) -> Global | Own:
    """The memory of a state space."""
    if space in ("shared", cluster.SPACE):
        return machine.shared
    return machine.local if space == "local" else machine.memory


def _fault(
    machine: Machine, index: int, space: str, what: str, addresses: Values, mask: Mask, width: int, kind: str, bad: Any
) -> Flags:
    threads = np.array(np.broadcast_to(bad, (machine.threads,)))
    if mask is not None:
        threads &= mask
    inside = addresses & cluster.OFFSET if space == cluster.SPACE else addresses
    event = Access(index, space.partition("::")[0], what, inside, mask, width)
    machine.observers.fault(machine, event, kind, threads)
    return threads


def placed(machine: Machine, space: str, addresses: Values, mask: Mask) -> list[tuple[str, Values, Mask]]:
    """Addresses by state space: the named one, or those that generic addresses ("") fall in."""
    if space:
        return [(space, addresses, mask)]
    if mask is not None and addresses.ndim:
        addresses = np.where(mask, addresses, addresses[mask.argmax()])
    low, high = (lowest(addresses), highest(addresses)) if addresses.ndim else (int(addresses), int(addresses))
    for name, start, stop, zero in _WINDOWS:
        if start <= low and high < stop:
            return [(name, addresses - np.int64(zero), mask)]
    parts: list[tuple[str, Values, Mask]] = []
    for name, start, stop, zero in _WINDOWS:
        inside = (addresses >= start) & (addresses < stop)
        threads = inside if mask is None else inside & mask
        if threads.any():
            parts.append((name, addresses - np.int64(zero), threads))
    return parts


def _parameter(machine: Machine, addresses: Values, kind: str, count: int) -> list[Any]:
    size = np.dtype(kind).itemsize
    if addresses.ndim and (addresses == addresses[0]).all():
        addresses = addresses[0]
    if addresses.ndim:
        rows = machine.parameters[addresses[:, None] + np.arange(size * count)].view(kind)
        return [np.ascontiguousarray(rows[:, place]) for place in range(count)]
    first = int(addresses)
    return list(machine.parameters[first : first + size * count].copy().view(kind))
