"""`matmul` and `explain`: products of matrices that lie in parts on the ranks of torch.distributed or of MPI.

Every rank computes the same plan from the shapes that all told each other, then sends what the plan says. Sums over
ranks are added in the order of ranks, so a result has the same bits from run to run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gemmery import api, dtypes
from gemmery.arrays import view
from gemmery.distributed.layouts import (
    Distribution,
    Part,
    Partial,
    Placement,
    Replicate,
    Shard,
    even,
    of_parts,
    sources,
)
from gemmery.distributed.plan import CORE, H200, ProductPlan, RankEvent, Speeds, check_choice, plan, sums_in
from gemmery.distributed.ranks import MpiRanks, Ranks, TorchRanks, agree
from gemmery.errors import ArgumentError, DTypeError, ShapeError, brief

multiply: Any = api.matmul
accumulate: Any = api.gemm

# Of the last call with such arguments on a rank: the shapes of all ranks' parts, and the plan.
_plans: dict[object, tuple[list[Any], ProductPlan]] = {}
_MOST_PLANS = 1024
_Places = tuple[Placement, ...]


def matmul(
    a: Any,
    b: Any,
    *,
    group: Any = None,
    placements: tuple[Any, Any] | None = None,
    mesh: tuple[int, ...] | None = None,
    out: Any = None,
    dtype: Any = None,
    steps: int = 0,
    ways: str = "",
    trace: list[RankEvent] | None = None,
) -> Any:
    """Return the product of two matrices that ranks hold in parts.

    DTensors have their mesh and placements, and the result is one too. For tensors and NumPy arrays, which are this
    rank's part, `group` is a process group (None: all ranks) or an mpi4py communicator, `placements` those of A and of
    B, for one dimension or as a tuple for each of `mesh`. The parts may have any sizes, also none.

    `out` are the placements of the result; without them it is left as the cheapest way leaves it, which `explain`
    tells. `dtype` is its element type, `steps` and `ways` replace what the plan chooses, and `trace` gets what this
    rank did, in seconds.

    >>> c = gd.matmul(a, b, group=MPI.COMM_WORLD, placements=(gd.Shard(0), gd.Replicate()))  # doctest: +SKIP

    Raises ShapeError, DTypeError or ArgumentError, the same one on every rank, before any part is sent.
    """
    ranks, mesh, pair, parts = _operands(a, b, group, placements, mesh)
    wrong: Exception | None = None
    try:
        check_choice(steps, ways)
        of_a, of_b, of_c, element, result, shapes = _checked(ranks, mesh, pair, parts, out, dtype)
    except Exception as error:  # whatever it is: the other ranks wait
        wrong, of_a, of_b, of_c, element, result, shapes = error, (), (), None, "", "", []
    same = {
        "mesh": mesh,
        "placements of a": of_a,
        "placements of b": of_b,
        "out": of_c,
        "dtype": (element, result),
        "steps": steps,
        "ways": ways,
    }
    speeds = _speeds(parts[0])
    call = ranks.rank, speeds, tuple(shapes), tuple(same.items())
    known, guess = _plans.get(call, (None, None)) if not wrong else (None, None)
    part = None if guess is None or trace is not None else _multiplied_ahead(ranks, guess, *parts)
    answers = agree(ranks.exchange, "matmul", same, shapes, wrong)
    if guess is None or answers != known:
        a_source, b_source = (
            of_parts([shapes[i] for shapes in answers], mesh, places) for i, places in enumerate((of_a, of_b))
        )
        schedule, part = plan(a_source, b_source, element, result, of_c, speeds, steps, ways), None
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[call] = answers, schedule
    else:
        schedule = guess
    if part is None:
        part = run(ranks, schedule, *parts, trace)
    return _distributed(part, schedule, a) if _is_dtensor(a) else part


def _checked(
    ranks: Ranks, mesh: Any, pair: Any, parts: tuple[Any, Any], out: Any, dtype: Any
) -> tuple[_Places, _Places, _Places | None, str, str, list[tuple[int, ...]]]:
    """Return placements of A, B and C, both element types and the shapes of this rank's parts; raise what is wrong."""
    if not isinstance(mesh, tuple) or math.prod(mesh) != ranks.size:
        raise ArgumentError(f"mesh {brief(mesh)} for {ranks.size} ranks: pass a tuple of numbers with that product")
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise ArgumentError("placements are missing: give those of a and of b, such as (Shard(0), Replicate())")
    of_a, of_b = map(_placements, pair)
    if any(not hasattr(x, "is_cuda" if isinstance(ranks, TorchRanks) else "dtype") for x in parts):
        kinds = ", ".join(type(x).__name__ for x in parts)
        raise ArgumentError(f"operands are {kinds}: pass tensors to a process group, arrays to a communicator")
    for part in parts:
        view(part)  # raises if this rank alone cannot read it
    of_c = None if out is None else _placements(out)
    element, result = _types(*parts, dtype)
    shapes = [tuple(part.shape) for part in parts]
    if any(len(shape) != 2 for shape in shapes):
        raise ShapeError(f"parts of shapes {shapes}: both must be matrices, with two dimensions")
    return of_a, of_b, of_c, element, result, shapes


def _multiplied_ahead(ranks: Ranks, guess: ProductPlan, a: Any, b: Any) -> Any:
    """Return this rank's part by the plan of an earlier call, if no rank sends anything in it; else None.

    A GPU multiplies while the ranks still tell each other their shapes, which takes them 0.2 to 1 ms.
    """
    if guess.links:
        return None
    with suppress(Exception):  # after the ranks agreed, the same call fails in words
        return run(ranks, guess, a, b)
    return None


def explain(
    a: Any,
    b: Any,
    *,
    out: Any = None,
    dtype: Any = None,
    speeds: Speeds | None = None,
    steps: int = 0,
    ways: str = "",
) -> ProductPlan:
    """Return the plan of a product: who sends what to whom, memory, and predicted times; print it to read it.

    `a` and `b` are DTensors, or layouts (`gd.even(shape, mesh, placements)`) with `dtype`, for which no ranks are
    needed. `speeds` has the speeds; by default those of an H200 for DTensors on GPUs and layouts, or of a CPU's core.

    >>> import gemmery.distributed as gd
    >>> a = gd.even((4096, 4096), (2, 2), (gd.Shard(0), gd.Shard(1)))
    >>> gd.explain(a, a, dtype="bf16").algorithm
    'SUMMA'

    Raises ShapeError, DTypeError or ArgumentError if an argument does not fit.
    """
    check_choice(steps, ways)
    if not isinstance(speeds, Speeds | None):
        raise ArgumentError(f"speeds={brief(speeds)}: pass a gd.Speeds, such as gd.H200")
    of_c = None if out is None else _placements(out)
    if isinstance(a, Distribution) and isinstance(b, Distribution):
        element = dtypes.resolve("f32" if dtype is None else dtype)
        return plan(a, b, element, dtypes.written(element), of_c, speeds or H200, steps, ways)
    if not (_is_dtensor(a) and _is_dtensor(b)):
        raise ArgumentError("explain takes two DTensors, or two layouts of gd.even(shape, mesh, placements)")
    element, result = _types(a, b, dtype)
    source = [even(tuple(x.shape), tuple(x.device_mesh.shape), _placements(x.placements)) for x in (a, b)]
    return plan(source[0], source[1], element, result, of_c, speeds or _speeds(a), steps, ways)


def _speeds(x: Any) -> Speeds:
    return H200 if getattr(x, "is_cuda", False) else CORE


def _is_dtensor(x: Any) -> bool:
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def _placements(places: Any) -> _Places:
    return tuple(map(_placement, places if isinstance(places, Sequence) else (places,)))


def _placement(place: Any) -> Placement:
    """Return a placement of ours for one of ours or of PyTorch's."""
    kind = type(place).__name__
    if kind == "Shard":
        return Shard(place.dim % 2 if place.dim in (-2, -1) else place.dim)
    if kind == "Replicate":
        return Replicate()
    if kind == "Partial" and getattr(place, "reduce_op", "sum") == "sum":
        return Partial()
    raise ArgumentError(f"placement {place!r} is not known: use Shard, Replicate or Partial sums; redistribute first")


def _types(a: Any, b: Any, dtype: Any) -> tuple[str, str]:
    """Return the element types of the operands and of the result."""
    names = [dtypes.resolve(str(x.dtype).removeprefix("torch.")) for x in (a, b)]
    if names[0] != names[1]:
        raise DTypeError(f"a is {names[0]}, b is {names[1]}: convert one of them, both must have one type")
    return names[0], dtypes.written(names[0]) if dtype is None else dtypes.resolve(dtype)


def _operands(
    a: Any, b: Any, group: Any, placements: tuple[Any, Any] | None, mesh: tuple[int, ...] | None
) -> tuple[Ranks, tuple[int, ...], Any, tuple[Any, Any]]:
    """Return the ranks, their mesh, the placements of both operands as they are given, and this rank's parts."""
    ranks: Ranks
    if _is_dtensor(a) and _is_dtensor(b):
        if a.device_mesh != b.device_mesh:
            raise ArgumentError(f"a is on {a.device_mesh}, b on {b.device_mesh}: redistribute one to the other's mesh")
        grid = a.device_mesh
        members = grid.mesh.flatten().tolist()
        if grid.get_coordinate() is None:
            raise ArgumentError(f"this rank is not in {grid}: call matmul on its ranks alone")
        local = a.to_local(), b.to_local()
        ranks = TorchRanks(_group_of(grid, members), members, local[0].device)
        return ranks, tuple(grid.shape), (a.placements, b.placements), local
    if _is_dtensor(a) or _is_dtensor(b):
        raise ArgumentError("one operand is a DTensor: both must be, or both must be this rank's parts")
    if hasattr(group, "Get_rank"):  # process groups of PyTorch have an allgather, too
        ranks = MpiRanks(group)
    else:
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ArgumentError("there is no process group: call torch.distributed.init_process_group first")
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            raise ArgumentError(f"group={brief(group)}: pass a process group of PyTorch or a communicator of mpi4py")
        ranks = TorchRanks(group, dist.get_process_group_ranks(group), getattr(a, "device", None))
    return ranks, mesh or (ranks.size,), placements, (a, b)


def _group_of(grid: Any, members: list[int]) -> Any:
    """Return a process group of all ranks of a mesh."""
    import torch.distributed as dist

    if grid.ndim == 1:
        return grid.get_group()
    if sorted(members) == list(range(dist.get_world_size())):
        return dist.group.WORLD
    return grid._flatten().get_group()


def _distributed(part: Any, schedule: ProductPlan, like: Any) -> Any:
    """Return a DTensor of this rank's part."""
    from torch.distributed import tensor

    known = {Replicate(): tensor.Replicate(), Partial(): tensor.Partial()}
    places = [tensor.Shard(x.dim) if isinstance(x, Shard) else known[x] for x in schedule.out.placements]
    m, n = schedule.out.shape
    result: Any = tensor.DTensor
    return result.from_local(part, like.device_mesh, places, run_check=False, shape=(m, n), stride=(n, 1))


def run(ranks: Ranks, schedule: ProductPlan, a: Any, b: Any, trace: list[RankEvent] | None = None) -> Any:
    """Run a plan: return this rank's part of the result."""
    sums = sums_in(schedule.dtype, schedule.result)
    along, box = schedule.along, schedule.c.boxes[ranks.rank]
    stored = sums if schedule.c.partial or (along == "k" and schedule.steps > 1) else schedule.result
    clock = _Clock(ranks.rank, trace)
    pending = _arriving(ranks, schedule, a, b, 0)
    total: Any = None
    for step in range(schedule.steps):
        with clock.of("wait", step):
            x, y = [take() for take in pending]
        if step + 1 < schedule.steps:
            pending = _arriving(ranks, schedule, a, b, step + 1)
        with clock.of("multiply", step):
            if total is None and (along == "k" or schedule.steps == 1):
                total = multiply(x, y, dtype=dtypes.get(stored).numpy)
            elif along != "k":
                total = ranks.empty(box.shape, stored) if total is None else total
                start, stop = (end - box[0 if along == "m" else 2] for end in schedule.piece(ranks.rank, step))
                multiply(x, y, out=total[start:stop] if along == "m" else total[:, start:stop])
            else:
                accumulate(1, x, y, 1, total, out=total)
    if not schedule.c.partial:
        total = ranks.cast(total, schedule.result)
    if schedule.c != schedule.out:
        stored = sums if schedule.c.partial else schedule.result
        with clock.of("add", 0):
            total = _moved(ranks, schedule.c, schedule.out, schedule.out.boxes, total, stored, stored)()
    return ranks.cast(total, schedule.result)


class _Clock:
    """The events of a rank, where they are wanted."""

    def __init__(self, rank: int, events: list[RankEvent] | None) -> None:
        self.rank, self.events = rank, events

    @contextmanager
    def of(self, what: str, part: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.events is not None:
            self.events.append(RankEvent(self.rank, what, part, start, time.perf_counter()))


def _arriving(ranks: Ranks, schedule: ProductPlan, a: Any, b: Any, step: int) -> list[Callable[[], Any]]:
    """Start the transfers of a step's operands; return functions that wait for them."""
    pairs = [schedule.operands(rank, step) for rank in range(ranks.size)]
    sums = sums_in(schedule.dtype, schedule.dtype)
    return [
        _moved(ranks, source, target, boxes, part, schedule.dtype, sums)
        for source, target, boxes, part in (
            (schedule.a, schedule.a_target, [pair[0] for pair in pairs], a),
            (schedule.b, schedule.b_target, [pair[1] for pair in pairs], b),
        )
    ]


def _moved(
    ranks: Ranks,
    source: Distribution,
    target: Distribution,
    boxes: Sequence[Part],
    part: Any,
    dtype: str,
    sums: str,
) -> Callable[[], Any]:
    """Start to bring each rank its box of `target`; return the function that waits for this rank's and returns it.

    `part` is what this rank holds, in `dtype`; summands are added in `sums`.
    """
    me = ranks.rank
    own = source.boxes[me]
    if source == target:  # every rank has what it wants
        result = _cut(part, own, boxes[me])
        return lambda: result
    pieces = list(sources(source, target.placements, boxes[me], me))
    leaving = [
        (receiver, ranks.packed(_cut(part, own, box)))
        for receiver in range(ranks.size)
        if receiver != me
        for sender, box in sources(source, target.placements, boxes[receiver], receiver)
        if sender == me
    ]
    if pieces == [(me, boxes[me])]:  # nothing comes
        finished, whole = ranks.start(leaving, ()), _cut(part, own, boxes[me])
        return lambda: (finished(), whole)[1]
    whole = ranks.empty(boxes[me].shape, sums if source.partial else dtype)
    arrays = []
    for sender, box in pieces:
        place = _cut(whole, boxes[me], box)
        if sender == me:
            arrays.append(_cut(part, own, box))
        elif box[2:] == boxes[me][2:] and not source.partial:  # whole rows, where they are needed
            arrays.append(place)
        else:
            arrays.append(ranks.empty(box.shape, dtype))
    arriving = [(sender, array) for (sender, _), array in zip(pieces, arrays, strict=True) if sender != me]
    finished = ranks.start(leaving, arriving)

    def take() -> Any:
        finished()
        if source.partial or len(pieces) == 0:
            whole[...] = 0
        for (sender, box), array in zip(pieces, arrays, strict=True):
            place = _cut(whole, boxes[me], box)
            if source.partial:
                place += array
            elif sender == me or box[2:] != boxes[me][2:]:
                place[...] = array
        return ranks.cast(whole, dtype)

    return take


def _cut(part: Any, own: Part, box: Part) -> Any:
    """Return a box of the matrix from the part that has it; an empty one where the part has none of it."""
    rows, columns = box.top - own.top, box.left - own.left
    return part[rows : rows + box.shape[0], columns : columns + box.shape[1]]
