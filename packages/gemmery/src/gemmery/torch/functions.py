"""The functions that users call. They take the short way where they can, and the operators elsewhere.

DTensor is told which operands each device needs a part of, for which part of the result. FlopCounterMode is told the
operations, of which a multiplication and an addition count as two, bias and activation as nothing, as in PyTorch's own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.flop_counter

from gemmery.arrays.pytorch import NESTED
from gemmery.errors import ArgumentError, LayoutError, brief
from gemmery.keywords import Activation, Precision
from gemmery.torch import operators, quantization
from gemmery.torch.gradients import ACTIVATIONS, LINEAR, MATMUL, PLAIN, Formula, is_compiling, watched


def check_tensors(function: str, **arguments: Any) -> None:
    """Raise ArgumentError unless arguments are tensors, or objects that take the place of one; a bias may be None.

    Raises LayoutError for nested tensors.
    """
    register_sharding()  # a DTensor may be among them
    for name, x in arguments.items():
        if getattr(x, "is_nested", False) is True:
            raise LayoutError(f"{name}: {NESTED}")
        if hasattr(type(x), "__torch_function__") or (name == "bias" and x is None):
            continue
        raise ArgumentError(
            f"{name} is {brief(x)} ({type(x).__name__}), and gemmery.torch.{function} takes tensors: pass one, for "
            f"example torch.as_tensor({name})"
        )


def recorded(compute: Callable[..., Any], formula: Formula) -> Callable[..., Any]:
    """Return `compute` with gradients: as the operator's, but called by autograd without the dispatcher.

    Inside torch.func this is not called.
    """

    def forward(ctx: Any, *inputs: Any) -> Any:
        result = compute(*inputs)
        formula.setup_context(ctx, inputs, result)
        return result

    applied: Callable[..., Any] = operators.recorded_function(compute.__name__, forward, formula.backward).apply
    return applied


_recorded_product = recorded(operators.product, MATMUL)
_recorded_layer = recorded(operators.layer, LINEAR)
_recorded_packed = recorded(quantization.quantized_layer, quantization.QUANTIZED_LINEAR)
_recorded_groups = recorded(operators.products, operators.GROUPED_MM)


def matmul(a: torch.Tensor, b: torch.Tensor, *, precision: Precision | None = None) -> torch.Tensor:
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
    same element type (bfloat16 for float8). `precision` says how a CUDA device may multiply float32, as in
    `gemmery.matmul`, in the backward pass too.

    Inside torch.compile, torch.autocast and torch.func it is the operator `torch.ops.gemmery.matmul`.

    Raises the errors of `gemmery.matmul`, and DTypeError for two element types.
    """
    plain = type(a) in PLAIN and type(b) in PLAIN
    if not plain:
        check_tensors("matmul", a=a, b=b)
    if is_compiling() or not plain or watched():
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
    activation: Activation | None = None,
    *,
    precision: Precision | None = None,
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
    plain = type(input) in PLAIN and type(weight) in PLAIN and (bias is None or type(bias) in PLAIN)
    if not plain:
        check_tensors("linear", input=input, weight=weight, bias=bias)
    records = torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if records and activation in ("gelu", "silu"):
        before = linear(input, weight, bias, None, precision=precision)
        activated: torch.Tensor = ACTIVATIONS[activation](before)
        return activated
    if is_compiling() or not plain or watched():
        result: torch.Tensor = operators.linear(input, weight, bias, activation, precision)
    elif records:
        result = _recorded_layer(input, weight, bias, activation, precision)
    else:
        result = operators.layer(input, weight, bias, activation, precision)
    return result


def quantized_linear(
    input: torch.Tensor,  # noqa: A002
    packed: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    *,
    precision: Precision | None = None,
) -> torch.Tensor:
    """Return activation(input @ weight.T + bias) for a weight of 8 or 4 bits an element, with gradients.

    >>> import torch, gemmery.torch
    >>> packed, scales = gemmery.torch.quantize(torch.tensor([[7.0, -3.0, 0.0, 14.0]]), bits=4, group=2)
    >>> gemmery.torch.quantized_linear(torch.ones(1, 4), packed, scales)
    tensor([[18.]])

    `input` is (..., in_features). `packed` and `scales` are what `gemmery.torch.quantize` returns: for 8 bits int8 of
    shape (out_features, in_features), for 4 bits uint8 of shape (out_features, in_features / 2), and the factors
    (out_features, groups). An element of the weight is its level times the factor of its group, in the input's element
    type. The other arguments and the result are as in `linear`. The input, the factors and the bias have gradients.

    On a CUDA device of compute capability 8.0 or more, a kernel multiplies up to 64 rows of float16 or bfloat16 by the
    packed weight, if the factors have the same type and the groups are multiples of 128 columns (of 64 for 8 bits).
    It multiplies the sum of each group by its factor, in float32, so that no element of the weight is rounded.
    Otherwise the weight is computed at each call; on the CPU, a product of at most 64 rows computes it in parts that
    stay in cache. Inside torch.compile, torch.autocast and torch.func this is the operator
    `torch.ops.gemmery.quantized_linear`; where no kernel reads packed weights, torch.compile for a CUDA device gets the
    weight's computation by itself, which it makes one kernel of.

    Raises the errors of `gemmery.matmul`, DTypeError and ShapeError for tensors that are no packed weight.
    """
    plain = {type(input), type(packed), type(scales)} <= PLAIN and (bias is None or type(bias) in PLAIN)
    if not plain:
        check_tensors("quantized_linear", input=input, packed=packed, scales=scales, bias=bias)
    needs_grad = input.requires_grad or scales.requires_grad or (bias is not None and bias.requires_grad)
    records = torch.is_grad_enabled() and needs_grad
    if records and activation in ("gelu", "silu"):
        before = quantized_linear(input, packed, scales, bias, None, precision=precision)
        activated: torch.Tensor = ACTIVATIONS[activation](before)
        return activated
    if is_compiling() and input.is_cuda and not torch.is_autocast_enabled("cuda"):
        bits, group = quantization.weight_format(packed, scales)
        if not quantization.reads_packed(input, scales, bits, group):
            weight = quantization.dequantize(packed, scales, bits, input.dtype)
            return linear(input, weight, bias, activation, precision=precision)
    if is_compiling() or not plain or watched():
        result: torch.Tensor = quantization.quantized_linear(input, packed, scales, bias, activation, precision)
    elif records:
        result = _recorded_packed(input, packed, scales, bias, activation, precision)
    else:
        result = quantization.quantized_layer(input, packed, scales, bias, activation, precision)
    return result


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Return the products of groups of rows, each with a matrix of its own, as layers of experts need them.

    >>> import torch, gemmery.torch
    >>> tokens, experts = torch.arange(8.0).reshape(4, 2), torch.stack([torch.eye(2), -torch.eye(2), torch.ones(2, 2)])
    >>> gemmery.torch.grouped_mm(tokens, experts, torch.tensor([1, 1, 4]))  # one row, none, three
    tensor([[ 0.,  1.],
            [ 5.,  5.],
            [ 9.,  9.],
            [13., 13.]])

    `a` is (rows, k) and contains the rows of all groups, one group after the other; `b` is (groups, k, n), with any
    strides: `weights.mT` for weights of (groups, n, k). Group g has the rows from offs[g - 1] (0 for the first) up to,
    not including, offs[g]. The result is (rows, n); rows from the last offset on belong to no group, and their values
    are undefined. `offs` are `groups` integers, on the CPU, or as int32 on the device of `a`, where they are not read
    back: the gradient of `b` is one launch, too, of groups along k.

    Inside torch.compile, torch.autocast and torch.func it is the operator `torch.ops.gemmery.grouped_mm`.

    Raises the errors of `gemmery.grouped_matmul`, and DTypeError for two element types.
    """
    plain = type(a) in PLAIN and type(b) in PLAIN and type(offs) in PLAIN
    if not plain:
        check_tensors("grouped_mm", a=a, b=b, offs=offs)
    if is_compiling() or not plain or watched():
        result: torch.Tensor = operators.grouped_mm(a, b, offs)
    elif torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        result = _recorded_groups(a, b, offs)
    else:
        result = operators.products(a, b, offs)
    return result


Placements = list[tuple[list[Any], list[Any]]]  # of the result, and of the arguments; for one side of a mesh
_registered: list[bool] = []


def register_sharding() -> None:
    """Register the operators with DTensor, once, where a program has imported it, which takes seconds."""
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    if _registered or tensor is None:
        return
    from torch.distributed.tensor import experimental
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    known: Any = tensor.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for operator, rule in ((operators.matmul, _cut_matmul), (operators.linear, _cut_linear)):
        experimental.register_sharding(operator)(rule)
        # Answers are kept by the tensors and by all arguments from this one on, an activation among them.
        known[operator] = RuntimeSchemaInfo(2, needs_pytree=True)
    _registered.append(True)


def _cut_matmul(a: Any, b: Any, precision: str | None = None) -> Placements:
    """Return how a product can be cut: along m, n, a batch dimension, or k, which leaves sums to be added."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole, sums = Replicate(), Partial()
    has_m, has_n = a.ndim > 1, b.ndim > 1
    batch = max(a.ndim - 2, b.ndim - 2, 0)
    ways: list[tuple[list[Any], list[Any]]] = [
        ([whole], [whole, whole]),
        ([sums], [Shard(a.ndim - 1), Shard(max(b.ndim - 2, 0))]),
        ([sums], [sums, whole]),
        ([sums], [whole, sums]),
    ]
    if has_m:
        ways.append(([Shard(batch)], [Shard(a.ndim - 2), whole]))
    if has_n:
        ways.append(([Shard(batch + has_m)], [whole, Shard(b.ndim - 1)]))
    for dim in range(batch):
        own = [dim - batch + x.ndim - 2 for x in (a, b)]
        cut = [Shard(i) if i >= 0 and x.shape[i] > 1 else whole for x, i in zip((a, b), own, strict=True)]
        ways.append(([Shard(dim)], cut))
    return [(result, [*operands, None]) for result, operands in ways]


def _cut_linear(
    x: Any, weight: Any, bias: Any = None, activation: str | None = None, precision: str | None = None
) -> Placements:
    """Return how a layer can be cut: as its product, with the weight transposed, but no sums under an activation."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    ways: list[tuple[list[Any], list[Any]]] = [
        ([Replicate()], [Replicate(), Replicate(), Replicate()]),
        ([Shard(x.ndim - 1)], [Replicate(), Shard(0), Shard(0)]),
        *(([Shard(dim)], [Shard(dim), Replicate(), Replicate()]) for dim in range(x.ndim - 1)),
    ]
    if activation is None:  # one device adds the bias: the others have zeros
        ways.append(([Partial()], [Shard(x.ndim - 1), Shard(1), Partial()]))
    return [(result, [*operands[: 2 if bias is None else 3], None, None]) for result, operands in ways]


_counter: Any = torch.utils.flop_counter  # parts of PyTorch have no types
_PRODUCTS = (operators.matmul, operators.linear, quantization.quantized_linear, operators.grouped_mm)


def register_flops() -> None:
    """Let FlopCounterMode count the operators."""
    packets = [operator.overloadpacket for operator in _PRODUCTS]
    # Of a product: k, the last side of A, for each element of the result.
    _counter.register_flop_formula(packets)(lambda a, *_, out_shape=None, **__: 2 * math.prod(out_shape) * a[-1])
    # Of the gradients of all matrices of B: each row of A belongs to one of them.
    gradient = _counter.register_flop_formula(operators.grouped_mm_weights.overloadpacket)
    gradient(lambda a, grad, *_, **__: 2 * math.prod(a) * grad[-1])
