"""Keeps torch.compile from tracing gemmery's functions: it breaks its graph around a call and runs the call as it is.

Otherwise it would trace Python code around NumPy and ctypes, with 95 lines of warnings and calls that take 40 times as
long.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

waiting = True  # until PyTorch has been imported and told of the functions
_codes: list[CodeType] = []
_REASON = "gemmery runs kernels of its own, which PyTorch cannot trace: use torch.matmul where one graph is required"


def opaque(function: F) -> F:
    """Mark a function that torch.compile must call and not trace.

    A marked function begins with `if opaque.waiting and opaque.settle(): return itself(...)`. If PyTorch is imported
    after gemmery, torch.compile may already be tracing the first call; it does not trace the second.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined] # what torch.compiler.disable sets
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    _codes.append(function.__code__)
    settle()
    return function


def settle() -> bool:
    """Make PyTorch skip the marked functions and all that they call; return True if this call did so."""
    global waiting
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "_C"):  # not imported, or not completely
        return False
    if "torch._dynamo" in sys.modules:  # this may run inside a function that is being compiled
        disable = getattr(sys.modules["torch._dynamo"], "disable", None)
        if disable is None:  # another thread imports it
            return False
        disable(_skip)(torch)
    else:
        _skip(torch)
    waiting = False
    return True


def _skip(torch: Any) -> None:
    """Do what torch.compiler.disable does, without importing the compiler (2 s) and without a wrapper (2 us a call)."""
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for code in _codes:
            frames.set_code_exec_strategy(code, skip)
    except AttributeError:  # an older PyTorch traces the functions: slow but correct
        return


# The compiled entry is a builtin function, which cannot be marked: torch.compile leaves it alone, and warns.
warnings.filterwarnings("ignore", "Dynamo does not know how to trace the builtin `gemmery\\.")
