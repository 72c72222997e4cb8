"""Kernels that are objects of Python, for emulate(): of Triton, of Numba's @cuda.jit, and CuPy's RawKernel."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from gemmery.errors import ArgumentError, CompileError, InstallError, brief
from gemmery_emulator.kernels import triton_kernels
from gemmery_emulator.kernels.triton_kernels import PythonLaunch

FORMS = (
    "pass the text of a kernel, a pathlib.Path of its file, or a kernel of Triton (@triton.jit), Numba (@cuda.jit) or "
    "CuPy (RawKernel)"
)
_INSTALL = (
    "Numba finds no NVVM, with which it compiles kernels: pip install numba-cuda nvidia-nvvm nvidia-cuda-nvrtc "
    "nvidia-cuda-cccl, or install a CUDA toolkit"
)


def launch_of(
    kernel: Any, launch: Sequence[Any], shared: int, options: Sequence[str], names: dict[str, Any], arch: str
) -> PythonLaunch:
    """The launch of a kernel's object; `given` are its grid, its block, but for Triton's, and its arguments.

    Raises ArgumentError for other objects and for missing arguments, CompileError, and InstallError without a compiler.
    """
    if triton_kernels.is_kernel(kernel):
        grid, args = _positional(kernel, launch, ("grid", "args"))
        return triton_kernels.launch(kernel, grid, args, names, arch)
    for name, value in names.items():
        raise ArgumentError(f"{name}={brief(value)}: only kernels of Triton take further names; leave it out")
    is_numba = hasattr(kernel, "py_func") and hasattr(kernel, "targetoptions")
    if not is_numba and not (isinstance(getattr(kernel, "code", None), str) and hasattr(kernel, "name")):
        raise ArgumentError(f"source={brief(kernel)}: {FORMS}")
    grid, block, args = _positional(kernel, launch, ("grid", "block", "args"))
    if is_numba:
        return _of_numba(kernel, grid, block, args, shared, arch)
    own = tuple(str(option) for option in getattr(kernel, "options", ()) or ())
    called = kernel.name
    return PythonLaunch(kernel.code, called, called, grid, block, list(args), shared, (*own, *options))


def _positional(kernel: Any, launch: Sequence[Any], names: tuple[str, ...]) -> list[Any]:
    if len(launch) != len(names):
        called = getattr(kernel, "__name__", type(kernel).__name__)
        raise ArgumentError(f"{called}: {len(launch)} values are given; call emulate(kernel, {', '.join(names)})")
    return list(launch)


def _of_numba(kernel: Any, grid: Any, block: Any, args: Sequence[Any], shared: int, arch: str) -> PythonLaunch:
    """Compile a kernel of Numba for the types of its arguments, which become the values that its launcher passes."""
    from importlib import import_module

    # Of its own package, which another one may stand in for.
    cuda = import_module(type(kernel).__module__.removesuffix(".dispatcher"))
    if isinstance(args, Mapping):
        names = kernel.py_func.__code__.co_varnames[: kernel.py_func.__code__.co_argcount]
        if set(args) != set(names):
            raise ArgumentError(f"args has {', '.join(args)}: {kernel.__name__} takes {', '.join(names)}; pass these")
        args = [args[name] for name in names]
    args = [value.numpy() if hasattr(value, "numpy") and not hasattr(value, "ctypes") else value for value in args]
    for place, value in enumerate(args):
        if not isinstance(value, bool | int | float | complex | np.generic | np.ndarray | tuple):
            raise ArgumentError(
                f"argument {place} is {brief(value)}: pass a NumPy array, a number or a tuple of numbers"
            )
    capability = divmod(int(arch.removeprefix("sm_").rstrip("af")), 10)
    options_of = {name: kernel.targetoptions.get(name) for name in ("fastmath", "opt")}
    known = {name: value for name, value in options_of.items() if value is not None}
    try:
        types = tuple(kernel.typeof_pyval(value) for value in args)
        with _device_of(type(kernel).__module__, capability):
            ptx, _ = cuda.compile_ptx(kernel.py_func, types, lineinfo=True, cc=capability, **known)
    except Exception as error:  # of many classes, and of either package
        if re.search(r"(?i)nvvm|libdevice|nvrtc", f"{type(error).__name__} {error}") and "Typing" not in str(error):
            raise InstallError(f"{_INSTALL} ({' '.join(str(error).split())[:200]})") from error
        raise CompileError(f"Numba does not compile {kernel.__name__} for {arch}: {error}") from error
    file = Path(kernel.py_func.__code__.co_filename)
    texts = {file.name: file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""}
    values = [part for value in args for part in _flat(value)]
    return PythonLaunch(ptx, kernel.__name__, "", grid, block, values, shared, (), texts)


@contextmanager
def _device_of(module: str, capability: tuple[int, int]) -> Iterator[None]:
    """Numba's own CUDA target asks the current device for its capability when a kernel calls a function."""
    dispatcher = sys.modules[module]
    current = getattr(dispatcher, "get_current_device", None)
    if current is not None:
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if current is not None:
            dispatcher.get_current_device = current  # type: ignore[attr-defined]


def _flat(value: Any) -> list[Any]:
    """The values that Numba passes for an argument: of an array seven and more, of a tuple those of its elements."""
    if isinstance(value, np.ndarray) and value.ndim:
        return [0, 0, value.size, value.itemsize, value, *value.shape, *value.strides]
    if isinstance(value, tuple):
        return [part for each in value for part in _flat(each)]
    if isinstance(value, complex | np.complexfloating):
        kind = np.float32 if isinstance(value, np.complex64) else np.float64
        return [kind(value.real), kind(value.imag)]
    if isinstance(value, bool | np.bool_):
        return [np.uint8(value)]
    return [np.float64(value) if type(value) is float else np.int64(value) if type(value) is int else value]
