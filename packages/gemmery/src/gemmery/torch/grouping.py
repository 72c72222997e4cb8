"""The operator `gemmery::grouped_mm`, and `gemmery::grouped_mm_weights`, which the gradient of its matrices needs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from gemmery import api
from gemmery.api.grouped import grouped_matmul
from gemmery.arrange import result_shape
from gemmery.errors import DeviceError, ShapeError
from gemmery.torch.gradients import Formula, bilinear
from gemmery.torch.operators import check_types, define, result_type, without_memory


def products(a: Any, b: Any, offs: Any) -> Any:
    """Return each group's rows of a times the group's matrix of b, for tensors with memory."""
    check_types(a, b, "gemmery.grouped_matmul")
    try:
        return grouped_matmul(a, b, offsets=offs)
    except DeviceError:
        if without_memory(a, b, offs):
            return _fake_products(a, b, offs)
        raise


def _fake_products(a: Any, b: Any, offs: Any) -> Any:
    check_types(a, b, "gemmery.grouped_matmul")
    if a.ndim != 2 or b.ndim != 3:
        raise ShapeError(
            f"grouped_mm multiplies a of shape (rows, k) by b of shape (groups, k, n) (got {tuple(a.shape)} and "
            f"{tuple(b.shape)})"
        )
    if a.shape[1] != b.shape[1]:
        result_shape(tuple(map(int, a.shape)), tuple(map(int, b.shape[1:])))  # raises
    return a.new_empty((a.shape[0], b.shape[2]), dtype=result_type(a))


def _weights(a: Any, grad: Any, offs: Any) -> Any:
    """Return for each group the product of its rows of a, transposed, and those of grad: (groups, k, n)."""
    result = a.new_empty((offs.shape[0], a.shape[1], grad.shape[1]))
    if offs.is_cuda and torch.cuda.is_current_stream_capturing():
        raise DeviceError(
            "a CUDA graph captures this stream, and the gradient of grouped_mm's matrices needs the offsets on the "
            "host: pass offs as a tensor on the CPU, which the graph keeps"
        )
    multiply: Any = api.matmul
    last = 0
    for group, (start, end) in enumerate(pairwise((0, *offs.tolist()))):
        start, end = max(start, last), min(max(end, last), a.shape[0])  # noqa: PLW2901 # as kernels use offsets
        multiply(a[start:end].t(), grad[start:end], out=result[group])
        last = end
    return result


def _fake_weights(a: Any, grad: Any, offs: Any) -> Any:
    return a.new_empty((offs.shape[0], a.shape[1], grad.shape[1]))


def _inside(x: Any, offs: Any) -> Any:
    """Return x with zeros in the rows of no group, in which a grouped product has undefined values."""
    if offs.shape[0] == 0:
        return torch.zeros_like(x)
    rows = torch.arange(x.shape[0], device=x.device)
    return x.masked_fill((rows >= _wide(offs)[-1].to(x.device))[:, None], 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _products_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    a, b, offs = ctx.saved_tensors
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = _inside(torch.ops.gemmery.grouped_mm(grad, b.mH, offs), offs)
    if ctx.needs_input_grad[1]:
        grad_b = torch.ops.gemmery.grouped_mm_weights(a.conj(), grad, offs)
    return grad_a, grad_b, None


def _weights_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    a, b, offs = ctx.saved_tensors
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = _inside(torch.ops.gemmery.grouped_mm(b, grad.mH, offs).conj(), offs)
    if ctx.needs_input_grad[1]:
        grad_b = _inside(torch.ops.gemmery.grouped_mm(a.conj(), grad, offs), offs)
    return grad_a, grad_b, None


def _batch_of_products(info: Any, dims: tuple[Any, ...], a: Any, b: Any, offs: Any) -> tuple[Any, int]:
    """Return a batch of grouped products as one."""
    multiply, (in_a, in_b, in_offs), count = torch.ops.gemmery.grouped_mm, dims, info.batch_size
    offs = _wide(offs)
    if in_offs is None and in_b is None:  # the rows of all elements, group by group
        a = a.movedim(in_a, 1)
        return multiply(a.flatten(0, 1), b, offs * count).unflatten(0, a.shape[:2]), 1
    if in_offs is None and in_a is None:  # the columns of all matrices of a group
        b = b.movedim(in_b, 2)
        return multiply(a, b.flatten(2), offs).unflatten(1, b.shape[2:]), 1
    a, b, offs = (_repeated(x, dim, count) for x, dim in zip((a, b, offs), dims, strict=True))
    rows = a.shape[1]
    ends = torch.cat((offs[:, :-1], torch.full_like(offs[:, :1], rows)), 1)  # rows of no group: any product will do
    return multiply(a.flatten(0, 1), b.flatten(0, 1), _chained(ends, rows)).unflatten(0, a.shape[:2]), 0


def _batch_of_weights(info: Any, dims: tuple[Any, ...], a: Any, grad: Any, offs: Any) -> tuple[Any, int]:
    multiply, (in_a, in_grad, in_offs), count = torch.ops.gemmery.grouped_mm_weights, dims, info.batch_size
    if in_offs is None and in_grad is None:
        a = a.movedim(in_a, 1)
        return multiply(a.flatten(1), grad, offs).unflatten(1, a.shape[1:]), 1
    if in_offs is None and in_a is None:
        grad = grad.movedim(in_grad, 1)
        return multiply(a, grad.flatten(1), offs).unflatten(2, grad.shape[1:]), 2
    a, grad, offs = (_repeated(x, dim, count) for x, dim in zip((a, grad, _wide(offs)), dims, strict=True))
    rows, groups = a.shape[1], offs.shape[1]
    ends = torch.cat((offs, torch.full_like(offs[:, :1], rows)), 1)  # a group of those of no group
    result = multiply(a.flatten(0, 1), grad.flatten(0, 1), _chained(ends, rows))
    return result.unflatten(0, (count, groups + 1))[:, :groups], 0


def _wide(offs: Any) -> Any:
    """Return offsets in a type that counts the rows of a whole batch: int64, or on a CUDA device what kernels read."""
    return offs if offs.is_cuda or offs.is_floating_point() or offs.is_complex() else offs.to(torch.int64)


def _repeated(x: Any, dim: int | None, count: int) -> Any:
    """Return an operand with the batch as its first dimension."""
    return x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)


def _chained(ends: Any, rows: int) -> Any:
    """Return the ends of the groups of all elements of a batch, whose rows follow each other."""
    first = torch.arange(ends.shape[0], device=ends.device, dtype=ends.dtype) * rows
    return (ends + first[:, None]).flatten()


GROUPED_MM = Formula(_keep, _products_backward, bilinear)

grouped_mm = define(
    "grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor", products, _fake_products, GROUPED_MM, _batch_of_products
)
grouped_mm_weights = define(
    "grouped_mm_weights(Tensor a, Tensor grad, Tensor offs) -> Tensor",
    _weights,
    _fake_weights,
    Formula(_keep, _weights_backward, bilinear),
    _batch_of_weights,
    tags=(torch.Tag.cudagraph_unsafe,),  # it reads the offsets on the host
)
