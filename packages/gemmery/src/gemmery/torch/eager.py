"""The short way of a product that nothing in PyTorch watches: gemmery's own call, without the dispatcher.

The dispatcher takes 4 us, and 6 us where gradients are recorded (PyTorch 2.13), for it calls Python functions for
autograd and for the device. A product of tiny matrices takes 1 us, and torch.nn.functional.linear as long as `linear`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import _C  # type: ignore[attr-defined,unused-ignore]
from torch.autograd import forward_ad

from gemmery import api
from gemmery.errors import DeviceError, LayoutError

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
