"""The operations of each operator, for `torch.utils.flop_counter.FlopCounterMode`.

A multiplication and an addition count as two, as in PyTorch's own formulas; bias and activation count as nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch.utils.flop_counter

from gemmery.torch import grouping, operators, packed_weights

_counter: Any = torch.utils.flop_counter  # parts of PyTorch have no types
_PRODUCTS = (operators.matmul, operators.linear, packed_weights.quantized_linear, grouping.grouped_mm)


def register() -> None:
    """Let FlopCounterMode count the operators."""
    _counter.register_flop_formula([operator.overloadpacket for operator in _PRODUCTS])(_of_product)
    _counter.register_flop_formula(grouping.grouped_mm_weights.overloadpacket)(_of_gradient)


def _of_product(a: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Return the operations of a product whose result has this shape: k = the last side of A for each element."""
    return 2 * math.prod(out_shape) * a[-1]


def _of_gradient(a: Any, grad: Any, *_: Any, **__: Any) -> int:
    """Return the operations of the gradients of all matrices of B: each row of A belongs to one of them."""
    return 2 * math.prod(a) * grad[-1]
