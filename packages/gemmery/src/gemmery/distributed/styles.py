"""Tensor-parallel layers whose communication hides behind their products, as styles of PyTorch's parallel modules."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import tensor
from torch.distributed.tensor import parallel

from gemmery.distributed.overlap import all_gather_matmul, matmul_reduce_scatter
from gemmery.errors import ArgumentError, brief

_tensor: Any = tensor
_parallel: Any = parallel
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "wq", "wk", "wv", "w1", "w3")
ROWS = ("o_proj", "down_proj", "wo", "w2")


def parallelize(model: Any, mesh: Any, columns: tuple[str, ...] = COLUMNS, rows: tuple[str, ...] = ROWS) -> Any:
    """Spread the linear layers of a transformer over a mesh of one dimension, in place, and return it.

    The tokens of its input and output are spread over the ranks: x is (batch, tokens / ranks, features). Layers named
    in `columns` gather them and have a part of the features each, those in `rows` scatter the sum. Attention between
    them has a part of the heads of all tokens. The names are those of Llama.

    >>> gd.parallelize(block, init_device_mesh("cuda", (2,)))  # doctest: +SKIP

    Raises ArgumentError if the model has no layer of these names.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model={model!r} is no torch.nn.Module: pass the model whose layers to spread")
    names: Any
    for names in (columns, rows):
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ArgumentError(f"columns or rows is {brief(names)}: pass a tuple of the names of layers")
    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, torch.nn.Linear) and last in (*columns, *rows):
            plan[name] = GatherColumns() if last in columns else ScatterRows()
    if not plan:
        raise ArgumentError(
            f"no linear layer of this model is called {', '.join((*columns, *rows))}: pass its names as columns= and "
            "rows="
        )
    return _parallel.parallelize_module(model, mesh, plan)


class GatherColumns(_parallel.ColwiseParallel):
    """A style for `parallelize_module`: y = all_gather(x) @ weight.T, of which each rank has some columns.

    `dim` is the dimension of x that is spread over the ranks, 0 or 1; the first one needs no copy.
    """

    def __init__(self, dim: int = 1) -> None:
        """Take the dimension of the tokens."""
        super().__init__(input_layouts=_tensor.Shard(dim))
        self.dim = dim

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        _check(module)
        self._partition_linear_fn("", module, device_mesh)
        group = device_mesh.get_group()

        def forward(x: Any) -> Any:
            first, shape = _rows(x, self.dim)
            y = all_gather_matmul(first, module.weight.to_local().t(), group)
            y = y if module.bias is None else y + module.bias.to_local()
            return _unrolled(y, shape, self.dim)

        module.forward = forward
        return module


class ScatterRows(_parallel.RowwiseParallel):
    """A style for `parallelize_module`: this rank's tokens of the sum over ranks of x @ weight.T.

    `dim` is the dimension of x that is spread over the ranks, 0 or 1; the first one needs no copy.
    """

    def __init__(self, dim: int = 1) -> None:
        """Take the dimension of the tokens."""
        super().__init__(output_layouts=_tensor.Shard(dim))
        self.dim = dim

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        _check(module)
        self._partition_linear_fn("", module, device_mesh)
        group, ranks, me = device_mesh.get_group(), device_mesh.size(), device_mesh.get_local_rank()
        partial = [_tensor.Partial()]

        def forward(x: Any) -> Any:
            first, shape = _rows(x, self.dim)
            batch = 1 if len(shape) < 3 else shape[1]
            tokens = first.shape[0] // batch
            step = -(-tokens // ranks)
            rows = [batch * min(step, max(0, tokens - rank * step)) for rank in range(ranks)]
            y = matmul_reduce_scatter(first, module.weight.to_local().t(), group, rows)
            y = y if module.bias is None else y + module.bias.to_local(grad_placements=partial)
            return _unrolled(y, (rows[me] // batch, *shape[1:]), self.dim)

        module.forward = forward
        return module


def _check(module: Any) -> None:
    if not isinstance(module, torch.nn.Linear):
        raise ArgumentError(f"{type(module).__name__} is no linear layer: use PyTorch's own styles for it")


def _rows(x: Any, dim: int) -> tuple[Any, tuple[int, ...]]:
    """Return x as a matrix whose rows are in the order of the tokens, and its shape with the tokens first."""
    first = x if dim == 0 or x.ndim == 2 else x.transpose(0, dim)
    return first.flatten(0, -2), tuple(first.shape)


def _unrolled(y: Any, shape: tuple[int, ...], dim: int) -> Any:
    """Return rows as a tensor of the shape before `_rows`, with other numbers of tokens and features."""
    if len(shape) == 2:
        return y
    y = y.unflatten(0, (-1, *shape[1:-1]) if shape[0] else (0, *shape[1:-1]))
    return y if dim == 0 else y.transpose(0, dim)
