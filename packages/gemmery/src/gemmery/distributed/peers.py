"""The overlapped products between GPUs of one host: copy engines push rows into symmetric memory, each behind a signal.

A gather is one launch, which waits for rows itself (`arriving.py`), or two ordinary products, as a scattered sum. With
a copy engine they hide nearly all of the transfer of a large product. A tile that reads a peer's rows in place fetches
them once for every column of tiles, so rows are copied once; results that the epilogue stores over the link take longer
than a copy (docs/findings/products_over_ranks.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gemmery import api
from gemmery.distributed import arriving
from gemmery.distributed.groups import capturing, exchange, spans, timeout
from gemmery.errors import DeviceError

FREE, ARRIVED = 0, 1  # channels of signals: what I sent was read; what I send is there
LEAST_WORK = 1.0e11  # operations of a product, below which fewer of them take less time than they hide

_torch: Any = torch
multiply: Any = api.matmul
_spaces: dict[str, dict[object, Any]] = {}  # by group: its buffers, or None where it has no peer access


class PeerBuffer:
    """Symmetric memory of one shape for the ranks of a group, its signals, and a stream for the copies."""

    def __init__(self, group: Any, shape: tuple[int, ...], like: Any) -> None:
        """Allocate on every rank; all ranks call it together."""
        from torch.distributed import _symmetric_memory

        memory: Any = _symmetric_memory
        self.rank, self.ranks, self.timeout = group.rank(), group.size(), int(timeout(group).total_seconds() * 1e3)
        self.buffer = memory.empty(*shape, dtype=like.dtype, device=like.device)
        self.handle = memory.rendezvous(self.buffer, group)
        # The allocation zeroes the signals on a stream: on a busy GPU that came after a peer's first signal, and wiped
        # it out. No rank signals before all have zeroed theirs.
        _torch.cuda.synchronize(like.device)
        exchange(group)(None)
        self.there = [self.handle.get_buffer(peer, shape, like.dtype) for peer in range(self.ranks)]
        self.side = _torch.cuda.Stream(like.device)
        self.others = [(self.rank + away) % self.ranks for away in range(1, self.ranks)]
        for peer in self.others:
            self.tell(peer, FREE)

    def tell(self, peer: int, channel: int) -> None:
        """Signal a peer when the current stream gets here."""
        self.handle.put_signal(peer, channel, self.timeout)

    def wait(self, peer: int, channel: int) -> None:
        """Let the current stream wait for a peer's signal, and fail after the group's timeout."""
        self.handle.wait_signal(peer, channel, self.timeout)

    def push(self, peer: int, what: Any, place: Any) -> None:
        """Copy rows into a place of a peer's buffer, once the peer has read what was there."""
        self.wait(peer, FREE)
        self.there[peer][place].copy_(what, non_blocking=True)
        self.tell(peer, ARRIVED)


class Gather(PeerBuffer):
    """all_gather(x) @ w for parts of x of some numbers of rows."""

    def __init__(self, group: Any, rows: tuple[int, ...], x: Any) -> None:
        """Allocate a buffer for the rows of all ranks."""
        super().__init__(group, (sum(rows), x.shape[1]), x)
        self.rows, self.places = rows, spans(rows)
        self._launches: dict[object, arriving.ArrivingProduct | None] = {}

    def __call__(self, x: Any, w: Any, keep: bool) -> tuple[Any, Any]:
        """Return the product, and the gathered rows if they are kept."""
        main: Any = torch.cuda.current_stream()
        x, full = x.contiguous(), self.buffer
        out = x.new_empty((full.shape[0], w.shape[1]))
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            for peer in self.others:
                self.push(peer, x, self.places[self.rank])
        launch = arriving.prepared(self._launches, x, full, w, out, self.rank, self.rows)
        groups = grouped(self.rank, self.rows, 2.0 * x.shape[1] * w.shape[1])
        if keep or (launch is None and len(groups) == 1):
            full[self.places[self.rank]].copy_(x)
        if launch is not None:
            flags = self.handle.signal_pad_ptrs[self.rank] + 4 * ARRIVED * self.ranks
            launch(x, full, w, out, main.cuda_stream, flags, self.timeout / 1e3)
            for peer in self.others:
                self.wait(peer, ARRIVED)
        else:
            multiply_arriving(self.rank, self.rows, groups, x, full, w, out, lambda peer: self.wait(peer, ARRIVED))
        stored = full.clone() if keep else x.new_empty((0, x.shape[1]))
        for peer in self.others:
            self.tell(peer, FREE)
        main.wait_stream(self.side)
        return out, stored


class Scatter(PeerBuffer):
    """The sum of x @ w over ranks, of which each rank gets some rows."""

    def __init__(self, group: Any, rows: tuple[int, ...], x: Any, n: int) -> None:
        """Allocate a buffer for the parts of all ranks."""
        super().__init__(group, (group.size(), max(rows), n), x)
        self.rows, self.places = rows, spans(rows)

    def __call__(self, x: Any, w: Any) -> Any:
        """Return the sum."""
        main: Any = torch.cuda.current_stream()
        mine = self.rows[self.rank]
        staged = x.new_empty((x.shape[0], w.shape[1]))
        for group in grouped(self.rank, self.rows, 2.0 * x.shape[1] * w.shape[1], last=True):
            if group == [self.rank]:
                multiply(x[self.places[self.rank]], w, out=self.buffer[self.rank, :mine])
                continue
            for rows in joined([self.places[peer] for peer in group]):
                multiply(x[rows], w, out=staged[rows])
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                for peer in group:
                    if peer == self.rank:
                        self.buffer[peer, :mine].copy_(staged[self.places[peer]])
                    else:
                        self.push(peer, staged[self.places[peer]], (self.rank, slice(self.rows[peer])))
        for peer in reversed(self.others):
            self.wait(peer, ARRIVED)
        main.wait_stream(self.side)
        parts = self.buffer[:, :mine]
        out = torch.add(parts[0], parts[1]) if self.ranks == 2 else torch.sum(parts, 0, dtype=parts.dtype)
        for peer in self.others:
            self.tell(peer, FREE)
        return out


def multiply_arriving(
    rank: int,
    rows: Sequence[int],
    groups: list[list[int]],
    x: Any,
    full: Any,
    w: Any,
    out: Any,
    wait: Callable[..., None],
) -> None:
    """Multiply the rows of each group of ranks into `out`, when they have come to `full`; own ones alone are x."""
    places = spans(rows)
    for sources in groups:
        for source in sources:
            if source != rank:
                wait(source)
        for cut in joined([places[source] for source in sources]):
            multiply(x if sources == [rank] else full[cut], w, out=out[cut])


def grouped(rank: int, rows: Sequence[int], work_a_row: float, last: bool = False, least: float = 0) -> list[list[int]]:
    """Return whose rows are multiplied together: own ones first (or last), the others as they come.

    Each product has at least `least` operations, by default LEAST_WORK: small ones are one product of all rows.

    >>> grouped(0, (2048, 2048), 2.0e8), grouped(0, (128, 128), 2.0e8)
    ([[0], [1]], [[0, 1]])
    """
    ranks = len(rows)
    order = [(rank + away if last else rank - away) % ranks for away in range(1, ranks)]
    least = least or LEAST_WORK
    if work_a_row * sum(rows) < least and (not last or least < LEAST_WORK):
        return [[rank, *order]]
    groups: list[list[int]] = [[]]
    for source in order:
        if groups[-1] and work_a_row * sum(rows[other] for other in groups[-1]) >= least:
            groups.append([])
        groups[-1].append(source)
    return [*groups, [rank]] if last else [[rank], *groups]


def joined(places: Sequence[slice]) -> list[slice]:
    """Return the same rows as few slices in order.

    >>> joined([slice(4, 6), slice(0, 2), slice(2, 4), slice(8, 9), slice(6, 6)])
    [slice(0, 6, None), slice(8, 9, None)]
    """
    result: list[slice] = []
    for place in sorted((p for p in places if p.start < p.stop), key=lambda p: int(p.start)):
        if result and result[-1].stop == place.start:
            result[-1] = slice(result[-1].start, place.stop)
        else:
            result.append(place)
    return result


def gathering(group: Any, rows: tuple[int, ...], x: Any) -> Any:
    """Return the space for all_gather(x) @ w of a group, or None without peer access."""
    key = ("gather", rows, x.shape[1], x.dtype)
    if not x.shape[1] * sum(rows):
        return None
    return _space(group, key, x, lambda: Gather(group, rows, x))


def scattering(group: Any, rows: tuple[int, ...], x: Any, n: int) -> Any:
    """Return the space for the scattered sum of x @ w of a group, or None without peer access."""
    key = ("scatter", rows, n, x.dtype)
    if not n * sum(rows):
        return None
    return _space(group, key, x, lambda: Scatter(group, rows, x, n))


def _space(group: Any, key: object, x: Any, make: Callable[[], Any]) -> Any:
    """Return the space of a key, made by all ranks of the group together or by none."""
    forget()
    spaces = _spaces.setdefault(group.group_name, {})
    if "peers" not in spaces:
        if capturing(x):
            raise DeviceError("a CUDA graph captures the first product of this group: call it once before the capture")
        spaces["peers"] = all(exchange(group)(_reaches_peers(x.device)))
    if not spaces["peers"]:
        return None
    if key not in spaces:
        if capturing(x):
            raise DeviceError("a CUDA graph captures the first product of this shape: call it once before the capture")
        spaces[key] = make()
    return spaces[key]


def _reaches_peers(device: Any) -> bool:
    """Return True if this device reads and writes the memory of all others that the process sees."""
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    return bool(others) and all(torch.cuda.can_device_access_peer(device.index, other) for other in others)


def forget() -> None:
    """Free the buffers of groups that were destroyed."""
    alive = set(dist.distributed_c10d._world.pg_names.values()) if _spaces else set()
    for name in [name for name in _spaces if name not in alive]:
        del _spaces[name]
