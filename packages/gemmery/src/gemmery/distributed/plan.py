"""The cheapest way to multiply two matrices that ranks hold in parts, its traffic, memory and time, as data.

Along each dimension of the mesh the ranks cut m, n or k, or all do the same. Cutting m along one dimension and n along
another is the two-dimensional algorithm SUMMA (van de Geijn and Watts, 1997), and a third dimension that cuts k makes
it the 2.5-dimensional one (Solomonik and Demmel, 2011). Every way is priced, and the cheapest taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

from gemmery import dtypes
from gemmery.distributed.layouts import (
    Distribution,
    Part,
    Partial,
    Placement,
    Replicate,
    Shard,
    check_placements,
    coordinates,
    even,
    sources,
    traffic,
    words,
)
from gemmery.errors import ArgumentError, ShapeError

STEP_BYTES = 32 << 20  # operands that come in larger parts come in steps, each while the last is multiplied
MOST_STEPS = 8
LEAST_LENGTH = 512  # of a step: smaller products take longer than the transfers that they hide
EVERY = 16  # in meshes of more ranks, the traffic of three is counted


@dataclass(frozen=True)
class Speeds:
    """The speeds of one rank and its links, of which a plan predicts times.

    `flops` are operations of the local product a second, `inside` and `between` bytes a second that a rank receives
    from ranks of its host and of other hosts, while it sends as much; `latency` seconds from a rank's decision to send
    until the receiver goes on; `memory` bytes a second.
    """

    flops: float
    inside: float
    between: float
    latency: float
    memory: float
    ranks_a_host: int = 8

    def seconds(self, inside: float, between: float, messages: int) -> float:
        """Return the time in which a rank receives so many bytes from its host and from others."""
        return inside / self.inside + between / self.between + messages * self.latency


# One H200 a rank, bf16: docs/findings/products_over_ranks.md has the measurements; 400 Gb/s between hosts.
H200 = Speeds(flops=785e12, inside=350e9, between=50e9, latency=15e-6, memory=4.0e12)
# One core of a server a rank, float32, ranks that share its memory.
CORE = Speeds(flops=100e9, inside=2e9, between=1e9, latency=100e-6, memory=8e9, ranks_a_host=64)


@dataclass(frozen=True)
class ProductPlan:
    """How ranks multiply: what each receives of A and B, which product it computes, and how parts of C are joined.

    `ways` has a letter for each dimension of the mesh: m, n or k, which ranks along it cut, or "-" where all compute
    the same. `a` and `b` are what ranks hold, `a_target` and `b_target` what they multiply, `c` its result, and `out`
    the result that is asked for. `steps` are pieces of `along`, of which the next comes while one is multiplied.
    `received` and `stored` are bytes, `arrival`, `product` and `joining` seconds, of the rank that has most.
    """

    ways: str
    dtype: str
    result: str
    a: Distribution
    b: Distribution
    a_target: Distribution
    b_target: Distribution
    c: Distribution
    out: Distribution
    steps: int
    received: int
    stored: int
    arrival: float
    product: float
    joining: float

    @property
    def algorithm(self) -> str:
        """The name by which the field knows it."""
        cuts = [way for way in self.ways if way != "-"]
        if len(set(cuts)) == 3:
            return "2.5-dimensional SUMMA"
        if set(cuts) == {"m", "n"}:
            return "SUMMA"
        if not cuts:
            return "the same product on every rank"
        return "cut along " + " and ".join(dict.fromkeys(cuts))

    @property
    def along(self) -> str:
        """The side that steps cut: that of the one operand that moves, whose parts of C need no sum, or k."""
        if self.a == self.a_target:
            return "n"
        return "m" if self.b == self.b_target else "k"

    def piece(self, rank: int, step: int) -> tuple[int, int]:
        """Return the part of m, n or k that a rank multiplies in a step.

        Along k ranks begin in different places, so that no rank must send to all others at once; ranks that compute the
        same begin in the same place.
        """
        along, at = self.along, step
        start, stop = self.c.boxes[rank][:2] if along == "m" else self.b_target.boxes[rank][2:]
        if along == "k":
            start, stop = self.a_target.boxes[rank][2:]
            place = coordinates(rank, self.a.mesh)
            first = sum(at for at, way in zip(place, self.ways, strict=True) if way != "-")
            at = (first * self.steps // max(self.a.mesh) + step) % self.steps
        length = stop - start
        return start + length * at // self.steps, start + length * (at + 1) // self.steps

    def operands(self, rank: int, step: int) -> tuple[Part, Part]:
        """Return the parts of A and of B that a rank multiplies in a step."""
        a, b, piece = self.a_target.boxes[rank], self.b_target.boxes[rank], self.piece(rank, step)
        if self.along == "m":
            return Part(*piece, a.left, a.right), b
        if self.along == "n":
            return a, Part(b.top, b.bottom, *piece)
        return Part(a.top, a.bottom, *piece), Part(*piece, b.left, b.right)

    @property
    def hidden(self) -> float:
        """Seconds of transfer during which the rank multiplies."""
        return min(self.arrival, self.product) * (self.steps - 1) / self.steps

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return self.arrival + self.product - self.hidden + self.joining

    @cached_property
    def links(self) -> dict[tuple[int, int], int]:
        """Bytes that each rank sends to each other one: {(sender, receiver): bytes}."""
        total: dict[tuple[int, int], int] = {}
        for source, target, size in self._moves():
            for link, elements in traffic(source, target).items():
                total[link] = total.get(link, 0) + elements * size
        return dict(sorted(total.items()))

    def _moves(self) -> Iterator[tuple[Distribution, Distribution, int]]:
        element = dtypes.get(self.dtype).size
        yield self.a, self.a_target, element
        yield self.b, self.b_target, element
        yield self.c, self.out, element_of_sums(self.dtype, self.result, self.c)

    def __str__(self) -> str:
        """Return the plan in words, with the traffic of each link of up to EVERY ranks."""
        (m, k), n = self.a.shape, self.b.shape[1]
        ranks = math.prod(self.a.mesh)
        moves = ("A", self.a, self.a_target), ("B", self.b, self.b_target), ("C", self.c, self.out)
        lines = [
            f"{m} x {n} x {k} {self.dtype} over {ranks} ranks ({' x '.join(map(str, self.a.mesh))}): {self.algorithm}",
            ", ".join(
                f"{name} {words(source.placements)} -> {words(target.placements)}" for name, source, target in moves
            ),
            f"a rank receives at most {_bytes(self.received)} and keeps {_bytes(self.stored)}",
            f"predicted {_time(self.seconds)}: product {_time(self.product)}, joining C {_time(self.joining)}",
            f"operands {_time(self.arrival)} in {self.steps} steps, of which products hide {_time(self.hidden)}",
        ]
        if ranks <= EVERY:
            lines += [f"rank {sender} -> rank {to}: {_bytes(count)}" for (sender, to), count in self.links.items()]
        return "\n".join(lines)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


def element_of_sums(dtype: str, result: str, c: Distribution) -> int:
    """Return the bytes of an element of C on its way: summands of half-precision products stay float32."""
    return dtypes.get(sums_in(dtype, result)).size if c.partial else dtypes.get(result).size


def sums_in(dtype: str, result: str) -> str:
    """Return the type in which parts of a sum are kept: float32 for narrower floats, else that of the result."""
    return "f32" if dtypes.get(result).kind == "f" and dtypes.get(result).size < 4 else result


def cut(way: str, operand: str) -> Placement:
    """Return the placement of A, B or C along a dimension of the mesh whose ranks cut `way`."""
    sides = {"a": "mk", "b": "kn", "c": "mn"}[operand]
    if way in sides:
        return Shard(sides.index(way))
    return Partial() if operand == "c" and way == "k" else Replicate()


@lru_cache(maxsize=1024)
def plan(
    a: Distribution,
    b: Distribution,
    dtype: str,
    result: str = "",
    out: tuple[Placement, ...] | None = None,
    speeds: Speeds = CORE,
    steps: int = 0,
    ways: str = "",
) -> ProductPlan:
    """Return the way that takes the least predicted time, the first of equals in the order m, n, k.

    `out` are the placements of the result; without them it stays as the product leaves it, and sums over k become rows.
    `steps` and `ways` of the user replace the choice.

    Raises ShapeError if the shapes or the meshes do not fit, ArgumentError for placements that do not.
    """
    if a.mesh != b.mesh:
        raise ShapeError(f"A lies on a mesh {a.mesh}, B on {b.mesh}: redistribute one of them to the other's mesh")
    if a.shape[1] != b.shape[0]:
        raise ShapeError(f"{a.shape} times {b.shape}: A must have as many columns as B has rows")
    if out is not None:
        check_placements(a.mesh, out)
    if ways and (len(ways) != len(a.mesh) or set(ways) - set("mnk-")):
        raise ArgumentError(f"ways {ways!r}: give m, n, k or - for each of the {len(a.mesh)} dimensions of the mesh")
    if steps < 0:
        raise ArgumentError(f"steps={steps}: give at least 1, or 0 for the best number")
    every = [ways] if ways else ["".join(letters) for letters in product("mnk-", repeat=len(a.mesh))]
    result = result or dtypes.written(dtype)
    return min((_priced(a, b, dtype, result, out, speeds, steps, way) for way in every), key=lambda p: p.seconds)


def _priced(
    a: Distribution,
    b: Distribution,
    dtype: str,
    result: str,
    out: tuple[Placement, ...] | None,
    speeds: Speeds,
    steps: int,
    ways: str,
) -> ProductPlan:
    target = [_target(source, tuple(cut(way, name) for way in ways)) for source, name in ((a, "a"), (b, "b"))]
    if any(x[2:] != y[:2] for x, y in zip(target[0].boxes, target[1].boxes, strict=True)):  # k is cut elsewhere
        target = [even(x.shape, x.mesh, x.placements) for x in target]
    boxes = tuple(Part(*x[:2], *y[2:]) for x, y in zip(target[0].boxes, target[1].boxes, strict=True))
    shape, places = (a.shape[0], b.shape[1]), tuple(cut(way, "c") for way in ways)
    c = Distribution(shape, a.mesh, places, boxes)
    places_of_c = tuple(Shard(0) if isinstance(place, Partial) else place for place in places) if out is None else out
    out_now = _target(c, places_of_c)
    draft = ProductPlan(ways, dtype, result, a, b, target[0], target[1], c, out_now, 1, 0, 0, 0.0, 0.0, 0.0)
    return _timed(draft, speeds, steps)


def _target(source: Distribution, placements: tuple[Placement, ...]) -> Distribution:
    """Return the layout of these placements: what is held, if it has them, whatever the sizes of its parts."""
    return source if source.placements == placements else even(source.shape, source.mesh, placements)


def _timed(draft: ProductPlan, speeds: Speeds, steps: int) -> ProductPlan:
    count = len(draft.c.boxes)
    ranks = range(count) if count <= EVERY else sorted({0, count // 2, count - 1})
    of_a, of_b, of_c = ([_received(*move, rank, speeds) for rank in ranks] for move in draft._moves())
    element, sums = dtypes.get(draft.dtype).size, element_of_sums(draft.dtype, draft.result, draft.c)
    coming = [x[0] + y[0] for x, y in zip(of_a, of_b, strict=True)]
    depths = [box.shape[1] for box in draft.a_target.boxes]
    longest = {
        "k": max(depths),
        "m": max(c[1] - c[0] for c in draft.c.boxes),
        "n": max(c[3] - c[2] for c in draft.c.boxes),
    }
    most = max(1, min(MOST_STEPS, max(coming) // STEP_BYTES, longest[draft.along] // LEAST_LENGTH))
    work = max(2 * draft.c.boxes[rank].size * depths[rank] / speeds.flops for rank in ranks)
    wide = dtypes.get(sums_in(draft.dtype, draft.result)).size  # C is read and written in each further step
    again = max(2 * wide * draft.c.boxes[rank].size / speeds.memory for rank in ranks) * (draft.along == "k")
    arrival = max(x[1] + y[1] for x, y in zip(of_a, of_b, strict=True))
    if not steps:
        steps = min(range(1, most + 1), key=lambda count: again * count - min(arrival, work) * (count - 1) / count)
    stored, joined = 0, 0.0
    for rank, x, y, z in zip(ranks, of_a, of_b, of_c, strict=True):
        box = draft.c.boxes[rank]
        source = draft.a.boxes[rank].size + draft.b.boxes[rank].size
        pieces = -(-min(2, steps) * (x[0] + y[0]) // steps)
        stored = max(stored, element * source + pieces + sums * box.size + z[0] + sums * draft.out.boxes[rank].size)
        joined = max(joined, z[1] + (z[0] + sums * box.size) / speeds.memory if draft.c != draft.out else 0.0)
    received = max(x[0] + y[0] + z[0] for x, y, z in zip(of_a, of_b, of_c, strict=True))
    work += again * (steps - 1)
    return replace(draft, steps=steps, received=received, stored=stored, arrival=arrival, product=work, joining=joined)


def _received(source: Distribution, target: Distribution, element: int, rank: int, speeds: Speeds) -> tuple[int, float]:
    """Return the bytes that a rank receives, and the time."""
    near = far = messages = 0
    host = rank // speeds.ranks_a_host
    for sender, box in sources(source, target.placements, target.boxes[rank], rank):
        if sender != rank:
            messages += 1
            near += box.size * element * (sender // speeds.ranks_a_host == host)
            far += box.size * element * (sender // speeds.ranks_a_host != host)
    return near + far, speeds.seconds(near, far, messages)


@dataclass(frozen=True)
class RankEvent:
    """What one rank does from `start` to `end`, in seconds: "send", "multiply" or "add"; `part` is whose rows."""

    rank: int
    what: str
    part: int
    start: float
    end: float


def gather_events(m: int, n: int, k: int, ranks: int, speeds: Speeds = H200, size: int = 2) -> tuple[RankEvent, ...]:
    """Return what ranks do in `all_gather_matmul`: x (m, k) in parts of rows, w (k, n) in parts of columns.

    A rank sends its rows to the others in turn, multiplies its own, then those that came, one part after the other.

    >>> events = gather_events(8192, 28672, 8192, 2)
    >>> [(event.what, event.part) for event in events if event.rank == 0]
    [('send', 0), ('multiply', 0), ('multiply', 1)]
    """
    work = 2 * m * n * k / ranks**2 / speeds.flops
    events = []
    for rank in range(ranks):
        sent = 0.0
        arrives = {}
        for away in range(1, ranks):
            start, sent = sent, sent + _message_seconds(rank, (rank + away) % ranks, m * k * size / ranks, speeds)
            events.append(RankEvent(rank, "send", rank, start, sent))
            arrives[(rank - away) % ranks] = sent  # all ranks send at the same pace
        now = 0.0
        for away in range(ranks):
            part = (rank - away) % ranks
            start = max(now, arrives.get(part, 0.0))
            now = start + work
            events.append(RankEvent(rank, "multiply", part, start, now))
    return tuple(events)


def scatter_events(m: int, n: int, k: int, ranks: int, speeds: Speeds = H200, size: int = 2) -> tuple[RankEvent, ...]:
    """Return what ranks do in `matmul_reduce_scatter`: x (m, k) in parts of columns, w (k, n) in parts of rows.

    A rank multiplies the rows of others first, sends each part while it multiplies the next, and at last adds to its
    own what came, in the order of ranks.
    """
    work = 2 * m * n * k / ranks**2 / speeds.flops
    part_bytes = m * n * size / ranks
    events = []
    for rank in range(ranks):
        now = sent = 0.0
        for away in range(1, ranks):
            to = (rank + away) % ranks
            events.append(RankEvent(rank, "multiply", to, now, now + work))
            now += work
            start = max(now, sent)
            sent = start + _message_seconds(rank, to, part_bytes, speeds)
            events.append(RankEvent(rank, "send", to, start, sent))
        events.append(RankEvent(rank, "multiply", rank, now, now + work))
        start = max(now + work, sent)
        events.append(RankEvent(rank, "add", rank, start, start + (ranks + 1) * part_bytes / speeds.memory))
    return tuple(events)


def _message_seconds(sender: int, receiver: int, count: float, speeds: Speeds) -> float:
    near = sender // speeds.ranks_a_host == receiver // speeds.ranks_a_host
    return speeds.seconds(count if near else 0, 0 if near else count, 1)


def length(events: Sequence[RankEvent]) -> float:
    """Return the seconds until the last event ends."""
    return max((event.end for event in events), default=0.0)
