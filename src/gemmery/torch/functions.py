"""The functions that users call. They take the short way where they can, and the operators elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from gemmery.torch import operators
from gemmery.torch.batching import ACTIVATIONS
from gemmery.torch.eager import PLAIN, is_compiling, watched
from gemmery.torch.gradients import LINEAR, MATMUL, Formula


def recorded(compute: Callable[..., Any], formula: Formula) -> Callable[..., Any]:
    """Return `compute` with gradients: as the operator's, but called by autograd without the dispatcher."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        result = compute(*inputs)
        formula.setup_context(ctx, inputs, result)
        return result

    methods = {"forward": staticmethod(forward), "backward": staticmethod(formula.backward)}
    function: Any = type(compute.__name__, (torch.autograd.Function,), methods)
    applied: Callable[..., Any] = function.apply
    return applied


_recorded_product = recorded(operators.product, MATMUL)
_recorded_layer = recorded(operators.layer, LINEAR)


def matmul(a: torch.Tensor, b: torch.Tensor, *, precision: Literal["tf32"] | None = None) -> torch.Tensor:
    """Return the product of two tensors, as torch.matmul does, with gradients.

    >>> import torch, gemmery.torch
    >>> a = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    >>> c = gemmery.torch.matmul(a, torch.tensor([1.0, -1.0]))
    >>> c.sum().backward()
    >>> a.grad
    tensor([[ 1., -1.],
            [ 1., -1.]])

    `a` is (..., m, k) or (k,), `b` is (..., k, n) or (k,), of the same element type and on the same device; batch
    dimensions broadcast. Transposed, strided and broadcast tensors are not copied. The result is contiguous, of the
    same element type (bfloat16 for float8). `precision="tf32"` allows a CUDA device to round float32 operands to 10
    bits of fraction, in the backward pass too.

    Inside torch.compile, torch.autocast and torch.func it is the operator `torch.ops.gemmery.matmul`.

    Raises the errors of `gemmery.matmul`, and DTypeError for two element types.
    """
    if is_compiling() or type(a) not in PLAIN or type(b) not in PLAIN or watched():
        result: torch.Tensor = operators.matmul(a, b, precision)
    elif torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        result = _recorded_product(a, b, precision)
    else:
        result = operators.product(a, b, precision)
    return result


def linear(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Literal["relu", "gelu", "silu"] | None = None,
    *,
    precision: Literal["tf32"] | None = None,
) -> torch.Tensor:
    """Return activation(input @ weight.T + bias), as torch.nn.functional.linear does, with gradients.

    >>> import torch, gemmery.torch
    >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> gemmery.torch.linear(torch.tensor([[1.0, -1.0]]), weight, bias=torch.ones(3), activation="relu")
    tensor([[0., 0., 0.]])

    `input` is (..., in_features), `weight` (out_features, in_features), `bias` (out_features,) or None; the result is
    (..., out_features). `activation` is "relu", "gelu" (computed with erf, PyTorch's default) or "silu". Bias and
    activation are applied while the product is in cache or registers, so that it is written once; where gradients are
    recorded, gelu and silu are applied separately, because their gradients need what they were applied to.
    `precision` is as in `matmul`.

    Inside torch.compile, torch.autocast and torch.func it is the operator `torch.ops.gemmery.linear`.

    Raises the errors of `gemmery.matmul`, DTypeError for two element types, and ShapeError for a weight that is not a
    matrix.
    """
    records = torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if records and activation in ("gelu", "silu"):
        before = linear(input, weight, bias, None, precision=precision)
        activated: torch.Tensor = ACTIVATIONS[activation](before)
        return activated
    plain = type(input) in PLAIN and type(weight) in PLAIN and (bias is None or type(bias) in PLAIN)
    if is_compiling() or not plain or watched():
        result: torch.Tensor = operators.linear(input, weight, bias, activation, precision)
    elif records:
        result = _recorded_layer(input, weight, bias, activation, precision)
    else:
        result = operators.layer(input, weight, bias, activation, precision)
    return result
