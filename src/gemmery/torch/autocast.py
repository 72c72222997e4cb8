"""The operators inside torch.autocast: floating-point operands are converted to its element type."""

from __future__ import annotations

from typing import Any

import torch

KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


def register(library: Any, name: str) -> None:
    """Convert the floating-point tensors among an operator's arguments."""
    operator = getattr(torch.ops.gemmery, name).default
    for device, key in KEYS.items():
        library.impl(name, _converting(operator, device, key), key.name)


def _converting(operator: Any, device: str, key: Any) -> Any:
    keys = torch._C.DispatchKeySet(key)

    def kernel(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*(_converted(x, dtype) for x in arguments))

    return kernel


def _converted(x: Any, dtype: torch.dtype) -> Any:
    """Return a tensor in the type of autocast; float64 and 8-bit types stay, as in PyTorch's own operators."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype.itemsize not in (2, 4):
        return x
    return x.to(dtype)
