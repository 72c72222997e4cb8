"""The operators in forward mode: the tangent of a product is a sum of products with the tangents of its operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from gemmery.torch.batching import activated, check_weight

Forward = Callable[[Any, tuple[Any, ...]], Any]  # (operator, its inputs, of which some have a tangent) -> the result

_unpack: Any = forward_ad.unpack_dual
_make: Any = forward_ad.make_dual


def present(inputs: tuple[Any, ...]) -> bool:
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


def layer(operator: Any, inputs: tuple[Any, ...]) -> Any:
    """Return the result of `gemmery::linear`."""
    x, weight, bias, activation, precision = (*inputs, None, None, None)[:5]
    check_weight(weight.shape)
    result = torch.ops.gemmery.matmul(x, weight.mT, precision)
    result = result if bias is None else result + bias
    return activated(result, activation)
