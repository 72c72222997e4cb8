"""The operator `gemmery::quantized_linear`: a layer whose weight has 8 or 4 bits an element.

There is no kernel that reads packed weights. The weight is computed in the input's type: on a CUDA device the whole of
it, on the CPU for few rows of input a part after the other, each of which is still in cache for its product.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmery import api
from gemmery.errors import DTypeError, ShapeError
from gemmery.torch import batching
from gemmery.torch.eager import multiply
from gemmery.torch.gradients import Formula, before_activation, rows
from gemmery.torch.operators import define, layer, linear
from gemmery.torch.quantization import dequantize

BITS = {torch.int8: 8, torch.uint8: 4}  # of an element, by the type of the packed tensor
_PART = 1 << 20  # bytes of the weight that are computed at a time
_FEW = 64  # rows of the input; with more, a product of the whole weight takes longer than to compute it


def weight_format(packed: Any, scales: Any) -> tuple[int, Any]:
    """Return bits and columns of a group. Raises DTypeError and ShapeError for tensors that are no packed weight."""
    if packed.dtype not in BITS or not scales.is_floating_point():
        raise DTypeError(
            f"packed is {packed.dtype} and scales are {scales.dtype}: 8-bit weights are int8, 4-bit weights uint8 with "
            "two columns a byte, and factors are floating-point numbers, as gemmery.torch.quantize returns them"
        )
    bits = BITS[packed.dtype]
    columns = packed.shape[-1] * 8 // bits
    groups = scales.shape[-1]
    if packed.ndim != 2 or scales.ndim != 2 or packed.shape[0] != scales.shape[0] or (groups and columns % groups):
        raise ShapeError(
            f"packed has shape {tuple(packed.shape)} and scales {tuple(scales.shape)}: pass n rows of {8 // bits} "
            "columns an element, and n rows of factors, one for each group of columns, all groups equally wide"
        )
    return bits, columns // groups if groups else 1


def unpacked(packed: Any, scales: Any, dtype: torch.dtype) -> Any:
    """Return the weight, (n, k) or a batch of them."""
    bits = BITS[packed.dtype]
    return dequantize(packed, scales, bits, packed.shape[-1] * 8 // bits // max(1, scales.shape[-1]), dtype)


def quantized_layer(
    input: Any,  # noqa: A002
    packed: Any,
    scales: Any,
    bias: Any = None,
    activation: Any = None,
    precision: str | None = None,
) -> Any:
    """Return activation(input @ weight.T + bias) for tensors with memory."""
    bits, _ = weight_format(packed, scales)
    n, k = packed.shape[0], packed.shape[1] * 8 // bits
    part = max(1, _PART // max(1, k * input.element_size()))
    few = input.numel() <= _FEW * k and input.shape[-1:] == (k,) and (bias is None or bias.shape == (n,))
    if input.is_cuda or not few or n <= part or precision is not None:
        return layer(input, unpacked(packed, scales, input.dtype), bias, activation, precision)
    result = input.new_empty((*input.shape[:-1], n))
    for start in range(0, n, part):
        of = slice(start, start + part)
        weight, product = unpacked(packed[of], scales[of], input.dtype), result[..., of]
        api.matmul(input, weight.t(), product, bias=None if bias is None else bias[of], activation=activation)
    return result


def _fake(
    input: Any,  # noqa: A002
    packed: Any,
    scales: Any,
    bias: Any = None,
    activation: str | None = None,
    precision: str | None = None,
) -> Any:
    bits, _ = weight_format(packed, scales)
    weight = input.new_empty((packed.shape[0], packed.shape[1] * 8 // bits))
    return linear(input, weight, bias, activation, precision)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, packed, scales, bias, ctx.activation, ctx.precision = inputs
    again = bias if ctx.activation in ("gelu", "silu") else None
    ctx.save_for_backward(x, packed, scales, again, output if ctx.activation == "relu" else None)
    ctx.bias_shape = None if bias is None else bias.shape


def _backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    """Return the gradients of input, factors and bias; levels have none."""
    x, packed, scales, bias, output = ctx.saved_tensors
    weight = unpacked(packed, scales, x.dtype)
    grad = before_activation(ctx, grad, output, lambda: linear(x, weight, bias, None, ctx.precision))
    grad_x = grad_scales = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = multiply(grad, weight, ctx.precision)
    if ctx.needs_input_grad[2]:
        levels = unpacked(packed, torch.ones_like(scales), x.dtype)
        of_levels = multiply(rows(grad).mT, rows(x), ctx.precision) * levels
        grad_scales = of_levels.unflatten(-1, (scales.shape[-1], -1)).sum(-1).to(scales.dtype)
    if ctx.needs_input_grad[3]:
        grad_bias = grad.sum_to_size(ctx.bias_shape)
    return grad_x, None, grad_scales, grad_bias, None, None


def _batch(
    info: Any,
    dims: tuple[Any, ...],
    input: Any,  # noqa: A002
    packed: Any,
    scales: Any,
    bias: Any = None,
    activation: str | None = None,
    precision: str | None = None,
) -> tuple[Any, int]:
    """Return a batch of layers: one product, of the rows of all inputs or of the weights of all."""
    of_input, of_packed, of_scales, of_bias = (*dims, None)[:4]
    if of_packed is None and of_scales is None and of_bias is None:
        x = input.movedim(of_input, 0)
        return torch.ops.gemmery.quantized_linear(x, packed, scales, bias, activation, precision), 0
    if of_packed is not None:
        packed = packed.movedim(of_packed, 0)
    if of_scales is not None:
        scales = scales.movedim(of_scales, 0)
    if of_scales is None and of_packed is not None:
        scales = scales.expand(packed.shape[0], *scales.shape)
    if of_packed is None and of_scales is not None:
        packed = packed.expand(scales.shape[0], *packed.shape)
    dim = None if of_packed is None and of_scales is None else 0
    weight = unpacked(packed, scales, input.dtype)
    return batching.linear(info, (of_input, dim, of_bias), input, weight, bias, activation, precision)


def _forward(operator: Any, inputs: tuple[Any, ...]) -> Any:
    x, packed, scales, *rest = inputs
    return linear(x, unpacked(packed, scales, x.dtype), *rest)


QUANTIZED_LINEAR = Formula(_keep, _backward, _forward)

quantized_linear = define(
    "quantized_linear(Tensor input, Tensor packed, Tensor scales, Tensor? bias=None, str? activation=None, "
    "str? precision=None) -> Tensor",
    quantized_layer,
    _fake,
    QUANTIZED_LINEAR,
    _batch,
)
