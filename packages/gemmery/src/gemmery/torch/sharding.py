"""The operators on DTensors, and the operations that FlopCounterMode counts.

DTensor: which operands each device needs a part of, for which part of the result. FlopCounterMode: the operations, of
which a multiplication and an addition count as two, as in PyTorch's own formulas; bias and activation count as nothing.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch.utils.flop_counter

from gemmery.torch import operators, quantization

Placements = list[tuple[list[Any], list[Any]]]  # of the result, and of the arguments; for one side of a mesh
_registered: list[bool] = []


def register() -> None:
    """Register the operators with DTensor, once, where a program has imported it, which takes seconds."""
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    if _registered or tensor is None:
        return
    from torch.distributed.tensor import experimental
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    known: Any = tensor.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for operator, rule in ((operators.matmul, _matmul), (operators.linear, _linear)):
        experimental.register_sharding(operator)(rule)
        # Answers are kept by the tensors and by all arguments from this one on, an activation among them.
        known[operator] = RuntimeSchemaInfo(2, needs_pytree=True)
    _registered.append(True)


def _matmul(a: Any, b: Any, precision: str | None = None) -> Placements:
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


def _linear(
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
