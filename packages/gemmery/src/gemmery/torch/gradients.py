"""The gradients of the operators, which are products too: of transposed views, without a copy; tangents; batches.

The tangent of a product is a sum of products with the tangents of its operands. Under torch.func.vmap the elements of a
batch are one product, not one for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import _C  # type: ignore[attr-defined,unused-ignore]
from torch.autograd import forward_ad
from torch.nn import functional

from gemmery import api, dtypes, keywords
from gemmery.api.options import check_activation
from gemmery.epilogues.gradient import COTANGENT, gradient
from gemmery.epilogues.graph import LOGICAL, STATISTICS, EpilogueGraph, usual
from gemmery.errors import ArgumentError, DeviceError, LayoutError, ShapeError
from gemmery.tuples import NamedTuple

# ---- the short way of a product that nothing in PyTorch watches: gemmery's own call, without the dispatcher ----
# The dispatcher takes 4 us, and 6 us where gradients are recorded (PyTorch 2.13), for it calls Python functions for
# autograd and for the device. A product of tiny matrices takes 1 us, and torch.nn.functional.linear as `linear` does.

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # other types may define their own arithmetic

_autocast = _C._is_any_autocast_enabled
_tracing, _functions, _dispatches = _C._is_tracing, _C._len_torch_function_stack, _C._len_torch_dispatch_stack
_transforms = _C._are_functorch_transforms_active
is_compiling = torch.compiler.is_compiling


def watched() -> bool:
    """Return True if a mode or transform of PyTorch must see the operators: it then gets them from the dispatcher."""
    return (
        _autocast()
        or _functions() > 0
        or _dispatches() > 0
        or _transforms()
        or forward_ad._current_level >= 0
        or _tracing()
    )


def multiply(a: Any, b: Any, precision: str | None = None) -> Any:
    """Return a @ b inside a gradient's formula, where gradients are seldom recorded."""
    by_operator = is_compiling() or type(a) not in PLAIN or type(b) not in PLAIN or watched()
    if by_operator or (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)):
        return torch.ops.gemmery.matmul(a, b, precision)
    product: Any = api.matmul  # an attribute that the first product replaces
    try:
        return product(a, b) if precision is None else product(a, b, precision=precision)
    except (LayoutError, DeviceError):  # batches of torch.autograd.grad(is_grads_batched=True); tensors without memory
        return torch.ops.gemmery.matmul(a, b, precision)


# ---- gradients ----

Forward = Callable[[Any, tuple[Any, ...]], Any]  # (operator, its inputs, of which some have a tangent) -> the result


class Formula(NamedTuple):
    """What an operator keeps for its backward pass, that pass, and its result in forward mode."""

    setup_context: Callable[..., None]
    backward: Callable[..., tuple[Any, ...]]
    forward: Forward


def rows(x: Any) -> Any:
    """Return a tensor (..., k) as a matrix (rows, k)."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, ctx.precision = inputs
    ctx.save_for_backward(a, b)


def _matmul_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    """Return dA = dC B^H and dB = A^H dC, summed over the batches that an operand was repeated for."""
    a, b = ctx.saved_tensors
    x, y = a.unsqueeze(0) if a.ndim == 1 else a, b.unsqueeze(1) if b.ndim == 1 else b
    grad = grad.unsqueeze(-1) if b.ndim == 1 else grad
    grad = grad.unsqueeze(-2) if a.ndim == 1 else grad
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = multiply(grad, y.mH, ctx.precision).sum_to_size(x.shape).reshape(a.shape)
    if ctx.needs_input_grad[1]:
        if y.ndim == 2:  # one product over the rows of all batches
            grad_b = multiply(rows(x).mH, rows(grad), ctx.precision).reshape(b.shape)
        else:
            grad_b = multiply(x.mH, grad, ctx.precision).sum_to_size(y.shape).reshape(b.shape)
    return grad_a, grad_b, None


def keep_layer(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what the backward pass of a layer needs, whatever its weight consists of."""
    *operands, bias, ctx.activation, ctx.precision = inputs
    again = bias if ctx.activation in ("gelu", "silu") else None
    ctx.save_for_backward(*operands, again, output if ctx.activation == "relu" else None)
    ctx.bias_shape = None if bias is None else bias.shape


def _linear_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    """Return the gradients of input, weight and bias."""
    x, weight, bias, output = ctx.saved_tensors
    grad = before_activation(ctx, grad, output, x, weight, bias)
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = multiply(grad, weight.conj(), ctx.precision)
    if ctx.needs_input_grad[1]:
        grad_weight = multiply(rows(grad).mT, rows(x).conj(), ctx.precision)
    if ctx.needs_input_grad[2]:
        grad_bias = grad.sum_to_size(ctx.bias_shape)
    return grad_x, grad_weight, grad_bias, None, None


def before_activation(ctx: Any, grad: Any, output: Any, x: Any, weight: Any, bias: Any) -> Any:
    """Return the gradient of what the activation was applied to.

    It is that of its graph, of the product, which the fused forward pass does not write: it is computed again.
    `gemmery.torch.linear` keeps it instead, by calling the activation separately where gradients are recorded. relu's
    follows from its output, and PyTorch has one kernel for it: its graph takes 10 us more.
    """
    if ctx.activation is None:
        return grad
    if ctx.activation == "relu":
        return torch.ops.aten.threshold_backward(grad, output, 0)
    before = torch.ops.gemmery.linear(x, weight, bias, None, ctx.precision)
    return evaluated(_DERIVATIVES[ctx.activation], [before], {f"{COTANGENT}0": grad})[0]


_unpack: Any = forward_ad.unpack_dual
_make: Any = forward_ad.make_dual


def have_tangents(inputs: tuple[Any, ...]) -> bool:
    """Return True if an input has a tangent."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(x, torch.Tensor) and _unpack(x).tangent is not None for x in inputs)


def bilinear(operator: Any, inputs: tuple[Any, ...]) -> Any:
    """Return the result of an operator that is linear in each of its first two operands."""
    (a, of_a), (b, of_b), *rest = (_unpack(inputs[0]), _unpack(inputs[1]), *inputs[2:])
    terms = [] if of_a is None else [operator(of_a, b, *rest)]
    terms += [] if of_b is None else [operator(a, of_b, *rest)]
    return _make(operator(a, b, *rest), sum(terms[1:], terms[0]))


def _layer_with_tangents(operator: Any, inputs: tuple[Any, ...]) -> Any:
    """Return the result of `gemmery::linear`."""
    x, weight, bias, activation, precision = (*inputs, None, None, None)[:5]
    check_weight(weight.shape)
    result = torch.ops.gemmery.matmul(x, weight.mT, precision)
    result = result if bias is None else result + bias
    return activated(result, activation)


MATMUL = Formula(_keep_operands, _matmul_backward, bilinear)
LINEAR = Formula(keep_layer, _linear_backward, _layer_with_tangents)


def evaluated(graph: EpilogueGraph, sums: Sequence[Any], operands: Mapping[str, Any]) -> list[Any]:
    """Return the outputs of a graph by PyTorch's functions, which all of PyTorch sees through.

    Sums of 16 bits are computed with in float32. Outputs have the type of the sums, or their own.

    Raises ArgumentError for casts to 8 bits.
    """
    dtype = sums[0].dtype
    values: list[Any] = []
    sums = [x.float() if dtype.itemsize < 4 else x for x in sums]
    whole = sums[0]
    for op, inputs, value in graph.nodes:
        x = [values[i] for i in inputs]
        if op == "sum":
            values.append(sums[int(value)])
        elif op == "constant" or (op == "operand" and not isinstance(operands[value], torch.Tensor)):
            number = float.fromhex(value) if op == "constant" else operands[value]
            values.append(torch.full((), number, dtype=whole.dtype, device=whole.device))
        elif op == "operand":
            values.append(operands[value])
        elif op in ("row_index", "column_index"):
            numbers = torch.arange(whole.shape[-1 - (op == "row_index")], dtype=whole.dtype, device=whole.device)
            values.append(numbers[:, None] if op == "row_index" else numbers)
        elif op == "cast":
            if dtypes.get(value).size == 1:
                raise ArgumentError(f"a cast to {value}: codes of 8 bits have no derivatives; leave the cast out")
            near = x[0].to(getattr(torch, dtypes.get(value).numpy)).to(whole.dtype)
            values.append(near.detach() + (x[0] - x[0].detach()).nan_to_num())  # its derivative is 1
        else:
            x = [x[0].broadcast_to(whole.shape)] if op in STATISTICS else x
            values.append((_FUNCTIONS.get(op) or getattr(torch, op))(*x))
    types = [getattr(torch, dtypes.get(output.dtype).numpy) if output.dtype else dtype for output in graph.outputs]
    shapes = [whole.shape if output.kind == "matrix" else (-1, 1) for output in graph.outputs]
    each = zip(graph.outputs, types, shapes, strict=True)
    return [values[output.node].broadcast_to(shape).to(type_) for output, type_, shape in each]


# Of operations for which PyTorch has another name.
_FUNCTIONS: dict[str, Any] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "rint": torch.round,
    "equal": torch.eq,
    **{op: getattr(torch, f"logical_{op}") for op in LOGICAL},
    "row_sum": lambda x: x.sum(-1, keepdim=True),
    "row_sum_of_squares": lambda x: (x * x).sum(-1, keepdim=True),
    "row_maximum": lambda x: x.amax(-1, keepdim=True),
    "row_log_sum_exp": lambda x: x.logsumexp(-1, keepdim=True),
}
ACTIVATIONS: dict[str, Any] = {name: getattr(functional, name) for name in keywords.ACTIVATIONS}
_DERIVATIVES = {name: gradient(usual(name))[0] for name in ("gelu", "silu")}


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


def batched_matmul(info: Any, dims: tuple[Any, ...], a: Any, b: Any, precision: str | None = None) -> tuple[Any, int]:
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


def batched_linear(
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
    result = batched_matmul(info, (of_input, of_weight), input, weight.mT, precision)[0]
    if of_bias is not None:
        batched = of_input is not None or of_weight is not None
        bias = _aligned(bias.movedim(of_bias, 0), 0, bias.ndim - 1, result.ndim - batched)
    if bias is not None:
        result = result + bias
    return activated(result, activation), 0
