"""The two products of tensor-parallel layers, whose communication hides behind the product.

A rank multiplies its own rows while those of others arrive, and sends parts of a sum while it multiplies the next part.
On GPUs of one host with peer access copy engines carry them (`peers.py`), and CPUs of one host share memory
(`one_host.py`); everywhere else messages of the process group do, which NCCL sends on a stream of its own and Gloo
from its own thread. Flux (Chang et al., 2024) and the asynchronous tensor parallelism of PyTorch hide the same
transfers by tiles and by chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gemmery import api
from gemmery.distributed import peers
from gemmery.distributed.groups import capturing, exchange, group_name, resolve, spans
from gemmery.distributed.one_host import host_space
from gemmery.distributed.ranks import agree
from gemmery.errors import ArgumentError, DTypeError, ShapeError

_distributed: Any = dist  # parts of PyTorch have no types
_torch: Any = torch
_library: Any = torch.library
multiply: Any = api.matmul
LEAST_ON_CORES = 2.0e10  # as LEAST_WORK of peers.py: 0.2 s of a core, where a second product packs w again


def all_gather_matmul(x: Any, w: Any, group: Any = None, rows: Sequence[int] | None = None) -> Any:
    """Return the rows of every rank times this rank's columns: all_gather(x) @ w.

    x is (rows, k), of any number of rows on each rank; w is (k, n). `group` is a process group, or None for all ranks.
    The ranks tell each other their shapes first, which takes longer than a small product on a GPU. With `rows`, the
    number of rows of each rank, they do not, nor under torch.compile and CUDA graphs, where all have as many rows.
    Autograd records it.

    >>> y = gd.all_gather_matmul(x, w)  # x (m / ranks, k), w (k, n / ranks), y (m, n / ranks)  # doctest: +SKIP

    Raises ShapeError, DTypeError or ArgumentError, the same one on every rank, if an argument does not fit.
    """
    name = group_name(group)
    if not torch.compiler.is_compiling():
        rows = _rows_to_gather(x, w, rows, name)
    return torch.ops.gemmery.all_gather_matmul(x, w, list(rows or []), name, False)[0]


def matmul_reduce_scatter(x: Any, w: Any, group: Any = None, rows: Sequence[int] | None = None) -> Any:
    """Return this rank's rows of the sum over ranks of x @ w.

    x is (m, k), w (k, n), with a part of k on each rank. Rank r gets `rows[r]` rows, by default ceil(m / ranks), of
    which the last ranks may have fewer. Parts are added in an order that depends on nothing but the number of ranks.
    The ranks tell each other their shapes first, unless `rows` are given or a CUDA graph captures the product.

    >>> y = gd.matmul_reduce_scatter(x, w)  # x (m, k / ranks), w (k / ranks, n), y (m / ranks, n)  # doctest: +SKIP

    Raises ShapeError, DTypeError or ArgumentError, the same one on every rank, if an argument does not fit.
    """
    name = group_name(group)
    if not torch.compiler.is_compiling():
        rows = _rows_to_scatter(x, w, rows, name)
    return torch.ops.gemmery.matmul_reduce_scatter(x, w, list(rows or []), name)


def _operands_error(x: Any, w: Any) -> Exception | None:
    if not isinstance(x, torch.Tensor) or not isinstance(w, torch.Tensor):
        return ArgumentError(f"x is a {type(x).__name__}, w a {type(w).__name__}: pass tensors")
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        return ShapeError(f"x {tuple(x.shape)} and w {tuple(w.shape)}: x must be (rows, k) and w (k, n)")
    if x.dtype != w.dtype:
        return DTypeError(f"x is {x.dtype}, w is {w.dtype}: convert one of them, both must have one type")
    if x.device != w.device:
        return ArgumentError(f"x is on {x.device}, w on {w.device}: move one of them")
    return None


def _agreed(function: str, x: Any, w: Any, same: Callable[[], Any], rows: Sequence[int] | None, name: str) -> list[int]:
    """Return the rows of x on each rank, after the ranks agreed, if they can and `rows` does not say it."""
    group, wrong = resolve(name), _operands_error(x, w)
    if rows is not None or capturing(x):
        if wrong is not None:
            raise wrong
        return list(rows) if rows is not None else [x.shape[0]] * group.size()
    return agree(exchange(group), function, same() if wrong is None else {}, 0 if wrong else x.shape[0], wrong)


def _rows_to_gather(x: Any, w: Any, rows: Sequence[int] | None, name: str) -> list[int]:
    counts = _agreed("all_gather_matmul", x, w, lambda: {"k": x.shape[-1], "dtype": x.dtype}, rows, name)
    group = resolve(name)
    if len(counts) != group.size() or counts[group.rank()] != x.shape[0]:
        raise ShapeError(f"rows {counts} for {group.size()} ranks, and x has {x.shape[0]}: give each rank's rows of x")
    return counts


def _rows_to_scatter(x: Any, w: Any, rows: Sequence[int] | None, name: str) -> list[int]:
    _agreed("matmul_reduce_scatter", x, w, lambda: {"m": x.shape[0], "n": w.shape[-1], "dtype": x.dtype}, rows, name)
    m, ranks = x.shape[0], resolve(name).size()
    step = -(-m // ranks)
    counts = [min(step, max(0, m - rank * step)) for rank in range(ranks)] if rows is None else list(rows)
    if len(counts) != ranks or sum(counts) != m or min(counts, default=0) < 0:
        raise ShapeError(f"rows {counts} for {ranks} ranks and {m} rows of x: give one number for each, of sum {m}")
    return counts


def swap(outgoing: Any, incoming: Any, to: int, source: int, group: Any) -> list[Any]:
    """Start to send one tensor to a rank of the group and to receive one from another; return what to wait for."""
    operations = []
    for function, tensor, peer in ((_distributed.isend, outgoing, to), (_distributed.irecv, incoming, source)):
        if tensor.numel():
            operations.append(
                _distributed.P2POp(function, tensor, _distributed.get_global_rank(group, peer), group=group)
            )
    return _distributed.batch_isend_irecv(operations) if operations else []


def _finished(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _gather(x: Any, w: Any, rows: Sequence[int], name: str, keep: bool) -> tuple[Any, Any]:
    rows, group = list(rows) or _rows_to_gather(x, w, None, name), resolve(name)
    if x.is_cuda:
        space = peers.space_of(peers.Gather, group, tuple(rows), x)
        if space is not None:
            result: tuple[Any, Any] = space(x, w, keep)
            return result
    rank, ranks, places = group.rank(), group.size(), spans(rows)
    space = None if x.is_cuda else host_space(group, (sum(rows), x.shape[1]), x.dtype)
    if space is not None:
        full = space.half((sum(rows), x.shape[1]), x.dtype)
        full[places[rank]].copy_(x)
        space.written(full.shape, x.dtype)
        return multiply(full, w), full.clone() if keep else x.new_empty((0, x.shape[1]))
    x, waits = x.contiguous(), {}
    full, out = (x.new_empty((sum(rows), side)) for side in (x.shape[1], w.shape[1]))
    for away in range(1, ranks):
        to, source = (rank + away) % ranks, (rank - away) % ranks
        waits[source] = swap(x, full[places[source]], to, source, group)
    groups = peers.grouped(rank, rows, 2.0 * x.shape[1] * w.shape[1], least=_least(x))
    if keep or len(groups) == 1:
        full[places[rank]].copy_(x)
    peers.multiply_arriving(rank, rows, groups, x, full, w, out, lambda peer: _finished(waits[peer]))
    return out, full if keep else x.new_empty((0, x.shape[1]))


def _scatter(x: Any, w: Any, rows: Sequence[int], name: str) -> Any:
    rows, group = list(rows) or _rows_to_scatter(x, w, None, name), resolve(name)
    if x.is_cuda:
        space = peers.space_of(peers.Scatter, group, tuple(rows), x, w.shape[1])
        if space is not None:
            return space(x, w)
    rank, ranks, places = group.rank(), group.size(), spans(rows)
    shape = ranks, x.shape[0], w.shape[1]
    space = None if x.is_cuda else host_space(group, shape, x.dtype)
    if space is not None:
        every = space.half(shape, x.dtype)
        multiply(x, w, out=every[rank])
        space.written(shape, x.dtype)
        return added(every[:, places[rank]])
    products = x.new_empty((x.shape[0], w.shape[1]))
    parts = [products[places[rank]] if peer == rank else x.new_empty((rows[rank], w.shape[1])) for peer in range(ranks)]
    works = []
    for peers_of_product in peers.grouped(rank, rows, 2.0 * x.shape[1] * w.shape[1], last=True, least=_least(x)):
        for cut in peers.joined([places[peer] for peer in peers_of_product]):
            multiply(x[cut], w, out=products[cut])
        for to in peers_of_product:
            source = (2 * rank - to) % ranks
            if to != rank:
                works += swap(products[places[to]], parts[source], to, source, group)
    _finished(works)
    return added(parts)


def _least(x: Any) -> float:
    """Return the operations of a product below which fewer products of more rows take less time."""
    return peers.LEAST_WORK if x.is_cuda else LEAST_ON_CORES


def added(parts: Any) -> Any:
    """Return the sum of tensors in the order of ranks; narrow floats are added in float32."""
    kind = parts[0].dtype
    narrow = kind.is_floating_point and kind.itemsize < 4
    total = parts[0].to(torch.float32) if narrow else parts[0]
    for i, part in enumerate(parts[1:]):
        total = total + part if i == 0 else total.add_(part)
    return total.to(kind)


@_library.custom_op("gemmery::all_gather_matmul", mutates_args=())  # type: ignore[untyped-decorator,unused-ignore]
def gather_operator(
    x: torch.Tensor, w: torch.Tensor, rows: Sequence[int], group: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all_gather(x) @ w and, if `keep`, all_gather(x)."""
    return _gather(x, w, rows, group, keep)


@_library.custom_op("gemmery::matmul_reduce_scatter", mutates_args=())  # type: ignore[untyped-decorator,unused-ignore]
def scatter_operator(x: torch.Tensor, w: torch.Tensor, rows: Sequence[int], group: str) -> torch.Tensor:
    """Return this rank's rows of the sum of x @ w over ranks."""
    part: torch.Tensor = _scatter(x, w, rows, group)
    return part


@gather_operator.register_fake  # type: ignore[untyped-decorator,unused-ignore]
def _(x: Any, w: Any, rows: Any, group: str, keep: bool) -> tuple[Any, Any]:
    m = sum(rows) if rows else x.shape[0] * resolve(group).size()
    return x.new_empty((m, w.shape[1])), x.new_empty((m if keep else 0, x.shape[1]))


@scatter_operator.register_fake  # type: ignore[untyped-decorator,unused-ignore]
def _(x: Any, w: Any, rows: Any, group: str) -> Any:
    ranks, rank = resolve(group).size(), resolve(group).rank()
    step = -(-x.shape[0] // ranks)
    mine = rows[rank] if rows else _torch.sym_min(step, _torch.sym_max(0, x.shape[0] - rank * step))
    return x.new_empty((mine, w.shape[1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, ctx.rows, ctx.group, *_ = inputs
    ctx.save_for_backward(x, w)


def _gather_backward(ctx: Any, grad: Any, grad_full: Any) -> tuple[Any, ...]:
    """dX is a product whose sum over ranks is scattered; dW needs the rows of all again, which were not kept."""
    x, w = ctx.saved_tensors
    grad_x = grad_w = None
    if ctx.needs_input_grad[0]:
        grad_x = scatter_operator(grad, w.mH, ctx.rows, ctx.group)
    if ctx.needs_input_grad[1]:
        full = gather_operator(x, w[:, :0], ctx.rows, ctx.group, True)[1]
        grad_w = torch.ops.aten.mm(full.mH, grad)
    return grad_x, grad_w, None, None, None


def _scatter_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    """dX is a product of the gathered gradient, and dW another one of the same rows."""
    x, w = ctx.saved_tensors
    grad_x, full = gather_operator(grad, w.mH, ctx.rows, ctx.group, ctx.needs_input_grad[1])
    grad_w = torch.ops.aten.mm(x.mH, full) if ctx.needs_input_grad[1] else None
    return grad_x, grad_w, None, None


gather_operator.register_autograd(_gather_backward, setup_context=_keep)
scatter_operator.register_autograd(_scatter_backward, setup_context=_keep)
