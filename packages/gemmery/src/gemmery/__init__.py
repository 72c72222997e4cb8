"""Fast matrix products in Python, and the ladder of kernels behind them.

>>> import numpy as np, gemmery as gm
>>> gm.matmul(np.eye(2), np.ones((2, 1)))
array([[1.],
       [1.]])
"""

# No `from __future__ import annotations` here: it is a file to read before the handler below is there.
import _frozen_importlib
import os
import sys
import time
from _thread import get_ident

_FORK_TIMEOUT = 10.0  # s that a fork waits for other threads
_PACKAGES = ("gemmery", "gemmery_emulator", "gemmery_lab")


def _importing() -> bool:
    """Return True while another thread imports a part of the three packages, or compiles."""
    try:
        locks = [(name, lock()) for name, lock in getattr(_frozen_importlib, "_module_locks", {}).items()]
    except RuntimeError:  # an import begins or ends at this moment
        return True
    others = any(name.partition(".")[0] in _PACKAGES and lock and lock.owner != get_ident() for name, lock in locks)
    jit = sys.modules.get("gemmery.cpu.jit")
    return others or sys.modules["_imp"].lock_held() or getattr(jit, "compiling_elsewhere", bool)()


def _before_fork() -> None:
    """Wait for imports in other threads: otherwise their locks would stay held in the child, which would hang.

    Parts are imported when they are first used, 15 ms for a first product. What such a product compiles is waited for
    too: its own handler was not there yet when the fork began.
    """
    late = time.monotonic() + _FORK_TIMEOUT
    while _importing() and time.monotonic() < late:
        time.sleep(500e-6)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)

from importlib import import_module  # noqa: E402 - after the handler: what is imported before it is not waited for

TYPE_CHECKING = False  # type checkers assume True; importing `typing` would take 2 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gemmery.api import gemm as gemm
    from gemmery.api import gemv as gemv
    from gemmery.api import get_num_threads as get_num_threads
    from gemmery.api import matmul as matmul
    from gemmery.api import set_num_threads as set_num_threads
    from gemmery.api.checkpoints import from_checkpoint as from_checkpoint
    from gemmery.api.checkpoints import load_quantized as load_quantized
    from gemmery.api.checkpoints import save_quantized as save_quantized
    from gemmery.api.contractions import einsum as einsum
    from gemmery.api.contractions import tensordot as tensordot
    from gemmery.api.contractions import vecdot as vecdot
    from gemmery.api.device_operands import get_float32_precision as get_float32_precision
    from gemmery.api.device_operands import set_float32_precision as set_float32_precision
    from gemmery.api.explanation import Explanation as Explanation
    from gemmery.api.explanation import explain as explain
    from gemmery.api.grouped import grouped_matmul as grouped_matmul
    from gemmery.api.packing import PackedMatrix as PackedMatrix
    from gemmery.api.packing import pack as pack
    from gemmery.api.quantized import QuantizedMatrix as QuantizedMatrix
    from gemmery.api.quantized import quantize as quantize
    from gemmery.api.quantized import quantize_rows as quantize_rows
    from gemmery.api.splitting import SplitOperand as SplitOperand
    from gemmery.api.splitting import split as split
    from gemmery.api.warm import Warmed as Warmed
    from gemmery.api.warm import warm as warm
    from gemmery.epilogues.functions_of_symbols import cast as cast
    from gemmery.epilogues.functions_of_symbols import column_index as column_index
    from gemmery.epilogues.functions_of_symbols import erf as erf
    from gemmery.epilogues.functions_of_symbols import gelu as gelu
    from gemmery.epilogues.functions_of_symbols import maximum as maximum
    from gemmery.epilogues.functions_of_symbols import minimum as minimum
    from gemmery.epilogues.functions_of_symbols import relu as relu
    from gemmery.epilogues.functions_of_symbols import rint as rint
    from gemmery.epilogues.functions_of_symbols import row_index as row_index
    from gemmery.epilogues.functions_of_symbols import row_log_sum_exp as row_log_sum_exp
    from gemmery.epilogues.functions_of_symbols import row_maximum as row_maximum
    from gemmery.epilogues.functions_of_symbols import row_sum as row_sum
    from gemmery.epilogues.functions_of_symbols import row_sum_of_squares as row_sum_of_squares
    from gemmery.epilogues.functions_of_symbols import rsqrt as rsqrt
    from gemmery.epilogues.functions_of_symbols import sigmoid as sigmoid
    from gemmery.epilogues.functions_of_symbols import silu as silu
    from gemmery.epilogues.functions_of_symbols import where as where
    from gemmery.epilogues.trace import epilogue as epilogue
    from gemmery.epilogues.trace import swiglu as swiglu
    from gemmery.errors import ArgumentError as ArgumentError
    from gemmery.errors import CacheError as CacheError
    from gemmery.errors import CheckError as CheckError
    from gemmery.errors import CompileError as CompileError
    from gemmery.errors import DeviceError as DeviceError
    from gemmery.errors import DTypeError as DTypeError
    from gemmery.errors import EmulationError as EmulationError
    from gemmery.errors import GemmeryError as GemmeryError
    from gemmery.errors import InstallError as InstallError
    from gemmery.errors import LayoutError as LayoutError
    from gemmery.errors import RefusedError as RefusedError
    from gemmery.errors import ShapeError as ShapeError
    from gemmery_emulator.arguments import device_memory as device_memory
    from gemmery_emulator.hopper.tensormap import tensor_map as tensor_map
    from gemmery_emulator.kernels.kernel import emulate as emulate
    from gemmery_emulator.textures import texture as texture
    from gemmery_lab.inspection.notebook import inspect as inspect

__version__ = "0.1.0"

_HOMES = {
    "gemmery.api": ("gemm", "gemv", "get_num_threads", "matmul", "set_num_threads"),
    "gemmery.api.checkpoints": ("from_checkpoint", "load_quantized", "save_quantized"),
    "gemmery.api.contractions": ("einsum", "tensordot", "vecdot"),
    "gemmery.api.explanation": ("Explanation", "explain"),
    "gemmery.api.grouped": ("grouped_matmul",),
    "gemmery.api.device_operands": ("get_float32_precision", "set_float32_precision"),
    "gemmery.api.packing": ("PackedMatrix", "pack"),
    "gemmery.api.quantized": ("QuantizedMatrix", "quantize", "quantize_rows"),
    "gemmery.api.splitting": ("SplitOperand", "split"),
    "gemmery.api.warm": ("Warmed", "warm"),
    "gemmery.epilogues.functions_of_symbols": (
        "cast",
        "column_index",
        "erf",
        "gelu",
        "maximum",
        "minimum",
        "relu",
        "rint",
        "row_index",
        "row_log_sum_exp",
        "row_maximum",
        "row_sum",
        "row_sum_of_squares",
        "rsqrt",
        "sigmoid",
        "silu",
        "where",
    ),
    "gemmery.epilogues.trace": ("epilogue", "swiglu"),
    "gemmery_emulator.arguments": ("device_memory",),
    "gemmery_emulator.kernels.kernel": ("emulate",),
    "gemmery_emulator.hopper.tensormap": ("tensor_map",),
    "gemmery_emulator.textures": ("texture",),
    "gemmery.errors": (
        "ArgumentError",
        "CacheError",
        "CheckError",
        "CompileError",
        "DTypeError",
        "DeviceError",
        "EmulationError",
        "GemmeryError",
        "InstallError",
        "LayoutError",
        "RefusedError",
        "ShapeError",
    ),
    "gemmery_lab.inspection.notebook": ("inspect",),
}


_ELSEWHERE = {  # the names that other libraries have for products
    "dot": "matmul, or gm.tensordot(a, b, 1) for more than two dimensions",
    "inner": "einsum('...i,...i->...', a, b), or gm.matmul(a, b.T) for matrices",
    "outer": "tensordot(a, b, 0)",
    "vdot": "vecdot",
    "multi_dot": "einsum('ij,jk,kl->il', a, b, c)",
    "matvec": "gemv, or gm.matmul(a, x[..., None])[..., 0] for batches",
    "vecmat": "matmul(x, a), or gm.matmul(x[..., None, :], a)[..., 0, :] for batches",
    "mv": "gemv",
    **dict.fromkeys(("mm", "bmm"), "matmul"),
    **dict.fromkeys(("addmm", "baddbmm"), "gemm(alpha, a, b, beta, c)"),
}


def load_lazily(package: str, homes: "Mapping[str, tuple[str, ...]]") -> "Callable[[str], object]":
    """Return `__getattr__` of a package whose public names are loaded from other modules when they are first used."""
    home = {name: module for module, names in homes.items() for name in names}

    def attribute(name: str) -> object:
        if name not in home:
            instead = f": use gm.{_ELSEWHERE[name]}" if package == "gemmery" and name in _ELSEWHERE else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{instead}")
        try:
            value = getattr(import_module(home[name]), name)
        except ModuleNotFoundError as error:
            from gemmery.errors import not_installed

            raise not_installed(error, f"{package}.{name}") from error
        setattr(sys.modules[package], name, value)
        return value

    return attribute


__all__ = sorted(name for names in _HOMES.values() for name in names)  # noqa: PLE0605

if not TYPE_CHECKING:  # with it type checkers would accept any name
    __getattr__ = load_lazily(__name__, _HOMES)

    def __dir__():
        return [*__all__, "__version__"]
