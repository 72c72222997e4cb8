"""Gradients of the operators where autograd records them.

`torch.library.register_autograd` does the same, but refuses torch.func.grad inside torch.func.vmap, and takes longer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from gemmery.torch.gradients import Formula, have_tangents

_C: Any = torch._C


def compiled_key(ctx: Any) -> tuple[int]:
    """Return what compiled autograd tells functions apart by: autograd.Function has this method, its base has not."""
    return (ctx._autograd_function_id,)


def register(library: Any, name: str, formula: Formula) -> None:
    """Record calls of an operator whose arguments need gradients."""
    operator = getattr(torch.ops.gemmery, name).default
    count = len(operator._schema.arguments)

    def forward(ctx: Any, *inputs: Any) -> Any:
        *operands, keys = inputs
        # Levels of torch.func below this one differentiate the product too; autograd.Function has switched that off.
        levels = _C._are_functorch_transforms_active()
        with torch.set_grad_enabled(levels), _set_fwd_grad_enabled(levels), _C._AutoDispatchBelowAutograd():
            result = operator.redispatch(keys, *operands)
            formula.setup_context(ctx, tuple(operands), result)
        return result

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return *formula.backward(ctx, *grads), None

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    methods["_compiled_autograd_key"] = staticmethod(compiled_key)
    function: Any = type(f"gemmery_{name}", (_SingleLevelFunction,), methods)

    def kernel(keys: Any, *inputs: Any) -> Any:
        keys &= _C._after_autograd_keyset
        if have_tangents(inputs):
            return formula.forward(operator, inputs)
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
            missing = count - len(inputs)  # the dispatcher leaves out arguments that have their default, None
            inputs = (*inputs, *(None,) * missing, keys)
            if not _C._are_functorch_transforms_active():
                return function.apply(*inputs)
            with enable_single_level_autograd_function():  # each level of torch.func gets here by itself
                return function.apply(*inputs)
        with _C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys, *inputs)

    library.impl(name, kernel, "Autograd", with_keyset=True)
