"""The operators under torch.func.vmap: one product for all elements of the batch, not one for each."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gemmery.api.options import check_activation
from gemmery.errors import ShapeError

ACTIVATIONS: dict[str, Any] = {"relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}


def activated(x: Any, activation: Any) -> Any:
    """Return activation(x), or x where there is none. Raises ArgumentError for an unknown one."""
    if activation is None:
        return x
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        check_activation(activation, "f32")  # raises
    return ACTIVATIONS[activation](x)


def check_weight(shape: Any) -> None:
    """Raise ShapeError unless the weight of a linear layer is a matrix."""
    if len(shape) != 2:
        raise ShapeError(
            f"weight has shape {tuple(shape)}; a linear layer's is (out_features, in_features): use "
            "gemmery.torch.matmul for batches of matrices"
        )


def matmul(info: Any, dims: tuple[Any, ...], a: Any, b: Any, precision: str | None = None) -> tuple[Any, int]:
    """Return the products of a batch, which is dimension 0 of the result."""
    multiply = torch.ops.gemmery.matmul
    in_a, in_b = dims[0], dims[1]
    x = a if in_a is None else a.movedim(in_a, 0)
    y = b if in_b is None else b.movedim(in_b, 0)
    left, right = x.ndim - (in_a is not None), y.ndim - (in_b is not None)
    if in_b is None and right <= 2:
        return multiply(x, y, precision), 0  # all rows times one matrix or vector
    if in_a is None and left == 2 and right == 1:
        return multiply(y, x.mT, precision), 0  # a matrix times all vectors: (x y)^T = y^T x^T
    if left == 1:
        x = x.unsqueeze(-2)
    if right == 1:
        y = y.unsqueeze(-1)
    most = max(left, right, 2)
    result = multiply(_aligned(x, in_a, max(left, 2), most), _aligned(y, in_b, max(right, 2), most), precision)
    if right == 1:
        result = result.squeeze(-1)
    if left == 1:
        result = result.squeeze(-1 if right == 1 else -2)
    return result, 0


def _aligned(x: Any, dim: int | None, ndim: int, most: int) -> Any:
    """Return an operand whose batch dimension, if it has one, lies before `most` others."""
    return x if dim is None else x[(slice(None), *(None,) * (most - ndim))]


def linear(
    info: Any,
    dims: tuple[Any, ...],
    input: Any,  # noqa: A002
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    precision: str | None = None,
) -> tuple[Any, int]:
    """Return a batch of layers: fused where all have the same weight and bias."""
    of_input, of_weight, of_bias = (*dims, None)[:3]  # arguments that have their default are left out
    if of_weight is None and of_bias is None:
        return torch.ops.gemmery.linear(input.movedim(of_input, 0), weight, bias, activation, precision), 0
    if of_weight is not None:
        weight, of_weight = weight.movedim(of_weight, 0), 0
        check_weight(weight.shape[1:])
    result = matmul(info, (of_input, of_weight), input, weight.mT, precision)[0]
    if of_bias is not None:
        batched = of_input is not None or of_weight is not None
        bias = _aligned(bias.movedim(of_bias, 0), 0, bias.ndim - 1, result.ndim - batched)
    if bias is not None:
        result = result + bias
    return activated(result, activation), 0
