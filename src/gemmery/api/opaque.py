"""Keep torch.compile out of gemmery's functions: it breaks its graph around a call, and runs the call as it is.

Left alone it traces NumPy and ctypes calls line by line: 95 lines of warnings, and calls that take 40 times as long.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

waiting = True  # until PyTorch has been imported and knows the functions
_codes: list[CodeType] = []
_REASON = "gemmery runs kernels of its own, which PyTorch cannot trace: use torch.matmul where one graph is required"


def opaque(function: F) -> F:
    """Mark a function as one that torch.compile calls and does not trace.

    A marked function must begin with `if opaque.waiting and opaque.settle(): return itself(...)`. When PyTorch is
    imported after gemmery, torch.compile may be tracing the first call already; the call that is made then is not.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined] # what torch.compiler.disable sets
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    _codes.append(function.__code__)
    settle()
    return function


def settle() -> bool:
    """Once PyTorch is imported, let it skip the marked functions and all that they call; True when it was done now."""
    global waiting
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "_C"):  # not imported, or while it is being imported
        return False
    if "torch._dynamo" in sys.modules:  # this may run inside a function that is being compiled
        torch._dynamo.disable(_skip)(torch)
    else:
        _skip(torch)
    waiting = False
    return True


def _skip(torch: Any) -> None:
    """What torch.compiler.disable does, without importing the compiler (2 s) or its wrapper around each call (2 us)."""
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for code in _codes:
            frames.set_code_exec_strategy(code, skip)
    except AttributeError:  # PyTorch before 2.7: products are right, but traced
        return


# The compiled entry is a builtin function, which cannot be marked: torch.compile leaves it alone, and warns.
warnings.filterwarnings("ignore", "Dynamo does not know how to trace the builtin `gemmery\\.")
