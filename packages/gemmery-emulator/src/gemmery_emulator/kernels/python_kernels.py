"""Kernels that are objects of Python, for emulate(): of Triton, of Numba's @cuda.jit, and CuPy's RawKernel.

Triton compiles its kernels itself, without a device, for the arguments of one launch.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from gemmery.cuda import include, nvrtc
from gemmery.errors import ArgumentError, CompileError, EmulationError, InstallError, brief, unknown
from gemmery_emulator.hopper.tensormap import tensor_map

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
    if type(kernel).__module__.startswith("triton.runtime") and hasattr(kernel, "fn"):  # also with choices around it
        grid, args = _positional(kernel, launch, ("grid", "args"))
        return _of_triton(kernel, grid, args, names, arch)
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
    return PythonLaunch(_linked(ptx, arch), kernel.__name__, "", grid, block, values, shared, (), texts)


def _linked(ptx: str, arch: str) -> str:
    """PTX of Numba with what its launcher links where a kernel calls this_grid().sync()."""
    if "cudaCGSynchronize" not in ptx:
        return ptx
    own = nvrtc.ptx_alone(_GRID, "grid.cu", "first", arch, ("-rdc=true",), toolkit=include.folders()).text
    functions = re.findall(r"^\.visible \.func.*?^\}", own, re.DOTALL | re.MULTILINE)
    return re.sub(r"\.extern \.func[^;]*?cudaCG\w+[^;]*;", "", ptx) + "\n".join(functions)


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


_GRID = """#include <cooperative_groups.h>
extern "C" __device__ unsigned long long cudaCGGetIntrinsicHandle(cudaCGScope) { return 1; }
extern "C" __device__ cudaError_t cudaCGSynchronize(unsigned long long, unsigned) {
  return cooperative_groups::this_grid().sync(), cudaSuccess; }
extern "C" __global__ void first() {}
"""
# Triton's names of element types, by NumPy's and PyTorch's.
TYPES = {
    **{f"float{bits}": f"fp{bits}" for bits in (16, 32, 64)},
    **{f"{sign}int{bits}": f"{sign or 'i'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bfloat16": "bf16", "bool": "u1", "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
}  # fmt: skip
ALIGNED = 16  # what Triton knows of a pointer or a whole number: that it is a multiple of this
SWIZZLES = (0, 32, 64, 128)  # bytes, by the number in a compiled kernel's description of a tensor descriptor


class PythonLaunch(NamedTuple):
    """One launch of a kernel that is an object of Python: its source or PTX, and what emulate() is called with."""

    text: str
    name: str  # of the kernel
    symbol: str  # by which the text knows it; "" for the only one
    grid: Any
    block: Any
    args: list[Any]
    shared: int = 0
    options: tuple[str, ...] = ()
    texts: Mapping[str, str] | None = None  # the Python files, by the names in lines


def _of_triton(
    kernel: Any, grid: Any, args: Sequence[Any] | Mapping[str, Any], names: dict[str, Any], arch: str
) -> PythonLaunch:
    """Compile a kernel for its arguments; `names` are parameters and Triton's options, such as num_warps.

    Raises ArgumentError for arguments that do not fit the kernel's parameters, and CompileError with Triton's words.
    """
    function, names = _innermost(kernel, names)
    rules = _heuristics(kernel)
    values = _by_name(function, args, names, {name for each in rules for name in each})
    for each in rules:
        values |= {name: rule(values) for name, rule in each.items()}
    options = _options({name: value for name, value in names.items() if name not in function.arg_names})
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    hints: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(function.params):
        value = values[parameter.name]
        kind, constant, aligned = _kind(parameter, value)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = constant
        elif aligned:
            hints[place,] = [["tt.divisibility", ALIGNED]]
    compiled = _compiled(function, signature, constants, hints, arch, options)
    sides = grid(values) if callable(grid) else grid
    sides = list(sides) if isinstance(sides, Sequence) else [sides]
    sides[0] = sides[0] * compiled.metadata.num_ctas if isinstance(sides[0], int | np.integer) else sides[0]
    passed = _passed(values, signature, getattr(compiled.metadata, "tensordesc_meta", None) or [])
    text = compiled.asm["ptx"]
    threads = compiled.metadata.num_warps * 32
    if line := next((line for line in text.splitlines() if line.startswith(".reqntid")), ""):
        threads = int(line.split()[1].rstrip(","))  # more, where warps have roles of their own
    if getattr(compiled.metadata, "global_scratch_size", 0):
        raise EmulationError(
            f"{function.__name__} makes tensor descriptors on the device, in memory that its launcher adds; "
            "pass triton.tools.tensor_descriptor.TensorDescriptor objects instead"
        )
    file = Path(function.fn.__code__.co_filename)
    texts = {file.name: _text(file, function)}
    # Two pointers to memory for its own use, which Triton's launcher adds.
    args = [*passed, None, None] if ".param" in text else passed
    return PythonLaunch(text, function.__name__, "", tuple(sides), threads, args, compiled.metadata.shared, (), texts)


def _text(file: Path, function: Any) -> str:
    """The file of a function, or of one from a notebook its lines alone, with their numbers."""
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    try:
        lines, first = inspect.getsourcelines(function.fn)
    except (OSError, TypeError):
        return ""
    return "\n" * (first - 1) + "".join(lines)


def _innermost(kernel: Any, names: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The function itself, and the names with what autotuning would try first, where nothing is given."""
    while not hasattr(kernel, "params"):
        if configs := getattr(kernel, "configs", ()):
            first = configs[0]
            options = {name: getattr(first, name, None) for name in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
            known = {name: value for name, value in options.items() if value is not None}
            names = {**first.kwargs, **known, **names}
        kernel = kernel.fn
    return kernel, names


def _heuristics(kernel: Any) -> list[Mapping[str, Callable[[Any], Any]]]:
    rules: list[Mapping[str, Callable[[Any], Any]]] = []
    while not hasattr(kernel, "params"):
        rules += [kernel.values] if isinstance(getattr(kernel, "values", None), Mapping) else []
        kernel = kernel.fn
    return rules


def _by_name(
    function: Any, args: Sequence[Any] | Mapping[str, Any], names: Mapping[str, Any], later: set[str]
) -> dict[str, Any]:
    """Each parameter's argument, by position, by name, or its default; `later` are those that heuristics give."""
    known = list(function.arg_names)
    if isinstance(args, Mapping):
        values = dict(args)
    else:
        if len(args) > len(known):
            raise ArgumentError(
                f"{len(args)} arguments: {function.__name__} takes {', '.join(known)}; pass one for each"
            )
        values = dict(zip(known, args, strict=False))
    for name in values:
        if name not in known:
            raise unknown(f"args has {name!r}, which is no parameter of {function.__name__}", name, known)
    for name in known:
        if name in names and name in values:
            raise ArgumentError(f"{name}={brief(names[name])}: args has it too; pass it once")
    values |= {name: names[name] for name in known if name in names}
    defaults = {each.name: each.default for each in function.params if each.has_default}
    lacks = [name for name in known if name not in {*values, *defaults, *later}]
    if lacks:
        raise ArgumentError(f"{function.__name__} lacks {', '.join(lacks)}: add them to args, or as {lacks[0]}=...")
    return {name: values.get(name, defaults.get(name)) for name in known}


def _kind(parameter: Any, value: Any) -> tuple[str, Any, bool]:
    """Triton's type of an argument, its value if it is compiled into the kernel, and whether it is a multiple of 16."""
    name, special = parameter.name, not parameter.do_not_specialize
    if parameter.is_constexpr or value is None or type(value).__name__ == "constexpr":
        return "constexpr", getattr(value, "value", value) if type(value).__name__ == "constexpr" else value, False
    written = getattr(parameter, "annotation_type", "")
    if hasattr(value, "block_shape"):
        sides = ",".join(str(side) for side in value.block_shape)
        return f"tensordesc<{_element(name, value.base)}[{sides}]>", None, False
    if isinstance(value, bool | np.bool_):
        return written or "u1", None, False
    if isinstance(value, int | np.integer):
        if special and value == 1 and not written:
            return "constexpr", 1, False
        kind = written or (_element(name, value) if isinstance(value, np.integer) else _whole(name, value))
        return kind, None, special and not parameter.do_not_specialize_on_alignment and value % ALIGNED == 0
    if isinstance(value, float):
        return written or "fp32", None, False
    if isinstance(value, np.generic):
        return written or _element(name, value), None, False
    if not hasattr(value, "dtype"):
        raise ArgumentError(
            f"{name} is {brief(value)}: pass an array, a number or None, or mark the parameter tl.constexpr"
        )
    address = value.data_ptr() if hasattr(value, "data_ptr") else np.asarray(value).ctypes.data
    aligned = special and not parameter.do_not_specialize_on_alignment and address % ALIGNED == 0
    return written or f"*{_element(name, value)}", None, aligned


def _element(name: str, value: Any) -> str:
    """Triton's name of an element type."""
    kind = str(value.dtype).removeprefix("torch.")
    if kind not in TYPES:
        raise ArgumentError(f"{name} has elements of type {kind}; Triton has {', '.join(TYPES)}")
    return TYPES[kind]


def _whole(name: str, value: int) -> str:
    for bits, kind in ((31, "i32"), (63, "i64")):
        if -(1 << bits) <= value < 1 << bits:
            return kind
    if 0 <= value < 1 << 64:
        return "u64"
    raise ArgumentError(f"{name}={brief(value)}: pass a number of 64 bits")


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Check the names of Triton's options."""
    from triton.backends.nvidia.compiler import CUDAOptions

    known = set(CUDAOptions.__dataclass_fields__)
    for name, value in options.items():
        if name not in known:
            raise unknown(
                f"{name}={brief(value)}: neither a parameter of the kernel nor an option of Triton", name, known
            )
    return options


def _compiled(
    function: Any, signature: dict[str, str], constants: dict[str, Any], hints: Any, arch: str, options: dict[str, Any]
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=hints)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_").rstrip("af")), 32)
    try:
        return triton.compile(source, target=target, options=options)
    except Exception as error:  # of many classes: what its stages raise has no common one
        raise CompileError(f"Triton does not compile {function.__name__} for {arch}: {error}") from error


def _passed(values: Mapping[str, Any], signature: Mapping[str, str], metas: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The arguments of the compiled kernel: a tensor descriptor is a map, its shape and its strides."""
    passed: list[Any] = []
    descriptions = iter(metas)
    for name, kind in signature.items():
        value = values[name]
        if kind.startswith("tensordesc"):
            array = value.base if isinstance(value.base, np.ndarray) else value.base.numpy()
            meta = next(descriptions, {})
            box = tuple(meta.get("block_size", value.block_shape))
            swizzle = SWIZZLES[meta.get("swizzle", 0)]
            view = np.lib.stride_tricks.as_strided(
                array, tuple(value.shape), tuple(step * array.itemsize for step in value.strides)
            )
            passed += [tensor_map(view, box, swizzle=swizzle), *map(np.int32, value.shape)]
            passed += [np.int64(step) for step in value.strides]
        elif kind != "constexpr":
            passed.append(_number(kind, value) if isinstance(value, bool | int | float | np.generic) else value)
    return passed


def _number(kind: str, value: Any) -> Any:
    """A number of the type that Triton gives a parameter: whole numbers as they are, others in its bits."""
    by_kind = {kind: np.dtype(name) for name, kind in TYPES.items() if name in np.sctypeDict and kind != "u1"}
    if kind == "u1":
        return np.uint8(value)  # of one byte in PTX
    return by_kind[kind].type(value) if kind in by_kind else value
