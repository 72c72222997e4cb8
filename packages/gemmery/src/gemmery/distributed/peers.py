"""The overlapped products between GPUs of one host: copy engines push rows into symmetric memory, each behind a signal.

A gather is one launch, `ArrivingProduct`, which waits for rows itself, or two ordinary products, as a scattered sum.
With a copy engine they hide nearly all of the transfer of a large product. A tile that reads a peer's rows in place
fetches them once for every column of tiles, so rows are copied once; results that the epilogue stores over the link
take longer than a copy (docs/findings/products_over_ranks.md).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from gemmery import api
from gemmery.api.device_call import DeviceCall, described
from gemmery.api.prepared import operand_views
from gemmery.arrays import view
from gemmery.cuda import driver, tensormaps
from gemmery.cuda.geometry import Geometry
from gemmery.cuda.launch import CudaLaunch
from gemmery.distributed.groups import capturing, exchange, spaces_of, spans, timeout
from gemmery.errors import DeviceError, LayoutError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Config, Problem

FREE, ARRIVED = 0, 1  # channels of signals: what I sent was read; what I send is there
RUNG = find(CUDA, "wgmma_epilogue")
# Signals are kernels of PyTorch's, of one warp. If each multiprocessor had a block that waits for one, none could run.
FREE_SMS = 1
_TAIL = struct.Struct("=2iQ48x")  # behind the argument and the map of the own rows: see Gathered in wgmma_gathered.cu
LEAST_WORK = 1.0e11  # operations of a product, below which fewer of them take less time than they hide

_torch: Any = torch
multiply: Any = api.matmul


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
        """Copy rows into a place of a peer's buffer, of which the peer has said that it is FREE."""
        self.there[peer][place].copy_(what, non_blocking=True)
        self.tell(peer, ARRIVED)


class Gather(PeerBuffer):
    """all_gather(x) @ w for parts of x of some numbers of rows."""

    def __init__(self, group: Any, rows: tuple[int, ...], x: Any) -> None:
        """Allocate a buffer for the rows of all ranks."""
        super().__init__(group, (sum(rows), x.shape[1]), x)
        self.rows, self.places = rows, spans(rows)
        self._launches: dict[object, ArrivingProduct | None] = {}

    def __call__(self, x: Any, w: Any, keep: bool) -> tuple[Any, Any]:
        """Return the product, and the gathered rows if they are kept."""
        main: Any = torch.cuda.current_stream()
        x, full = x.contiguous(), self.buffer
        out = x.new_empty((full.shape[0], w.shape[1]))
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            for peer in self.others:
                self.wait(peer, FREE)
                self.push(peer, x, self.places[self.rank])
        launch = arriving_product(self._launches, x, full, w, out, self.rank, self.rows)
        groups = grouped(self.rank, self.rows, 2.0 * x.shape[1] * w.shape[1])
        if keep or (launch is None and len(groups) == 1):
            full[self.places[self.rank]].copy_(x)
        if launch is not None:
            flags = self.handle.signal_pad_ptrs[self.rank] + 4 * ARRIVED * self.ranks
            launch(x, full, w, out, main.cuda_stream, flags, self.timeout / 1e3)
        else:
            multiply_arriving(self.rank, self.rows, groups, x, full, w, out, lambda peer: self.wait(peer, ARRIVED))
        stored = full.clone() if keep else x.new_empty((0, x.shape[1]))
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            for peer in self.others:
                self.tell(peer, FREE)
        if launch is not None:  # meanwhile; the launch has read these signals
            for peer in self.others:
                self.wait(peer, ARRIVED)
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
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            for peer in self.others:  # a signal takes 3 us, here beside the first product
                self.wait(peer, FREE)
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


def space_of(kind: Callable[..., Any], group: Any, rows: tuple[int, ...], x: Any, *n: int) -> Any:
    """Return the space of a group for a `Gather` or, with n columns, a `Scatter`; None without peer access.

    All ranks of the group make it together, or none.
    """
    key, sides = (kind, rows, x.dtype, *(n or x.shape[1:])), (sum(rows), *(n or x.shape[1:]))
    if not all(sides):
        return None
    spaces = spaces_of(group)
    if "peers" not in spaces:
        if capturing(x):
            raise DeviceError("a CUDA graph captures the first product of this group: call it once before the capture")
        spaces["peers"] = all(exchange(group)(_reaches_peers(x.device)))
    if not spaces["peers"]:
        return None
    if key not in spaces:
        if capturing(x):
            raise DeviceError("a CUDA graph captures the first product of this shape: call it once before the capture")
        spaces[key] = kind(group, rows, x, *n)
    return spaces[key]


def _reaches_peers(device: Any) -> bool:
    """Return True if this device reads and writes the memory of all others that the process sees."""
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    return bool(others) and all(torch.cuda.can_device_access_peer(device.index, other) for other in others)


class ArrivingProduct:
    """all_gather(x) @ w in one launch, `wgmma_gathered`, for operands of some shapes and strides.

    Two launches, of own rows and of the others', each have a last wave of few tiles: 4096 x 14336 x 4096 over two H200
    takes 341 us so, and 311 in one (docs/findings/products_over_ranks.md).
    """

    def __init__(self, full: Any, w: Any, out: Any, rank: int, rows: int) -> None:
        """Prepare it for the gathered rows, of which each rank sends `rows`.

        Raises RefusedError or LayoutError for what the kernel does not multiply.
        """
        call = DeviceCall(view(full), view(w), view(out))
        form, problem = described(call)
        if reason := RUNG.refusal(problem):
            raise RefusedError(reason)
        config = gathered_config(problem.by_rows(), rows)
        launch = CudaLaunch(problem, config, lambda problem, config: gathered_geometry(problem, config, rows))
        self._run = launch.ready(*operand_views(form, problem, None), room=tensormaps.BYTES + _TAIL.size)
        of_a = next(each.shape for each in self._run.maps if each.operand == "a")
        self._own = of_a._replace(extents=(of_a.extents[0], rows, 1))
        self._begin, self._each = rank * rows, rows

    def __call__(self, x: Any, full: Any, w: Any, out: Any, stream: int, flags: int, limit: float) -> None:
        """Put the launch on a stream. `flags` is the address of a word for each rank's rows, `limit` in seconds."""
        own, a, b, c = (view(each).pointer for each in (x, full, w, out))
        with driver.on(self._run.ordinal):
            map_of_own = tensormaps.encoded(self._own, own)
        tail = map_of_own + _TAIL.pack(self._begin, self._each, int(limit * 1e9))
        self._run(a, b, c, stream, extra=(0, 0, flags), operands=tail)


def gathered_config(problem: Problem, rows: int) -> Config:
    """Return the tile for pieces of so many rows: that of the whole product, or of one piece if it fills the device.

    Of one wave of tiles, those of other pieces would only wait for their rows. Tiles that are a wave for each piece are
    smaller and multiply meanwhile. Raises RefusedError if neither can be had.
    """
    config, sms = RUNG.resolve(problem, RUNG.default), driver.find(problem.device).sms
    if -(-problem.m // config["bm"]) * -(-problem.n // config["bn"]) <= sms:
        of_piece = RUNG.resolve(problem._replace(m=rows), RUNG.default)
        with suppress(RefusedError):
            gathered_geometry(problem, of_piece, rows)
            return of_piece
    return config


def gathered_geometry(problem: Problem, config: Config, rows: int) -> Geometry:
    """Return the launch of `wgmma_gathered` for pieces of so many rows. Raises RefusedError if there is none."""
    assert RUNG.geometry is not None
    whole, each = RUNG.geometry(problem, config), config["bm"] * config["cm"]
    in_place = not (whole.before or whole.swapped or whole.apart > 1 or config["cn"] > 1)
    if not in_place or problem.a_layout != "row" or rows % each:
        raise RefusedError(f"pieces of {rows} rows: it takes whole tiles of {each}, and K-major rows in place")
    sms = driver.find(problem.device).sms
    if whole.grid[0] > sms - FREE_SMS:
        raise RefusedError(f"{whole.grid[0]} blocks on {sms} multiprocessors: {FREE_SMS} must be free for signals")
    # A band of tiles that holds rows of two pieces would have the first blocks wait.
    of_piece = rows // each
    band = next(band for band in range(min(whole.band, of_piece), 0, -1) if of_piece % band == 0)
    kernel = whole.kernel.replace(RUNG.name, "wgmma_gathered", 1)
    return replace(whole, source="wgmma_gathered.cu", kernel=kernel, band=band)


def arriving_product(
    launches: dict[object, ArrivingProduct | None],
    x: Any,
    full: Any,
    w: Any,
    out: Any,
    rank: int,
    rows: tuple[int, ...],
) -> ArrivingProduct | None:
    """Return the launch for operands of this kind, which `launches` keep, or None where two products must do."""
    of_w = view(w)
    if view(x).pointer % tensormaps.ALIGNMENT:
        return None
    key = of_w.shape, of_w.strides, of_w.pointer % tensormaps.ALIGNMENT
    if key not in launches:
        launches[key] = None
        if len(set(rows)) == 1 and all(of_w.shape):
            with suppress(RefusedError, LayoutError):
                launches[key] = ArrivingProduct(full, w, out, rank, rows[0])
    return launches[key]
