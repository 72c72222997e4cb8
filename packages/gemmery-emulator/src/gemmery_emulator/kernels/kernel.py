"""emulate(): run any CUDA C++ or PTX kernel on the CPU, and count what it does."""

# No `from __future__ import annotations` here: help() would show annotations as strings.

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from errno import ENOMEM
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmery import arrays
from gemmery.cuda import include, nvrtc
from gemmery.cuda.device import LIMITS, architecture
from gemmery.errors import ArgumentError, CheckError, CompileError, DeviceError, not_installed
from gemmery_emulator.arguments import bound, resident
from gemmery_emulator.findings import Finding
from gemmery_emulator.kernels.kernel_run import KernelRun, with_page
from gemmery_emulator.kernels.programs import listed, parsed, prepared, refusal, three
from gemmery_emulator.lockstep import LIMIT
from gemmery_emulator.lower import LoweredKernel
from gemmery_emulator.machine import Dims, LaunchConfig
from gemmery_emulator.ptx import Line, PtxKernel
from gemmery_emulator.run import Drawable, Rerun, emulated
from gemmery_emulator.trace import Trace

Sides = int | Sequence[int]


class CompiledKernel(NamedTuple):
    """A kernel, what was left out of its source, what was compiled, and warnings: words, and the file and line."""

    program: LoweredKernel
    left_out: tuple[str, ...]
    made_from: nvrtc.CompilerInput | None
    warnings: tuple[tuple[str, str, int], ...] = ()


NO_WRAPPERS: frozenset[str] = frozenset()  # no file of a user's source consists of wrappers
SOURCE = "kernel.cu"  # the name of a source passed as text, in findings and lines
LAUNCHES = "launches from kernels (dynamic parallelism) are not modelled: call emulate() for each of them"


def emulate(
    source: str | Path,
    kernel: str,
    grid: Sides,
    block: Sides,
    args: Sequence[Any],
    shared: int = 0,
    arch: str = "sm_90",
    *,
    options: Sequence[str] = (),
    variables: Mapping[str, NDArray[Any]] | None = None,
    cluster: Sides | None = None,
    merge: bool = True,
    check: bool = True,
    seed: int | None = None,
    max_steps: int = LIMIT,
    seconds: float = 60,
    strict: bool = False,
) -> KernelRun:
    """Run a CUDA C++ or PTX kernel on NumPy arrays, in place, and count what it does, without a GPU.

    `source` is CUDA C++, compiled for `arch` ("sm_90", "RTX3090"), or PTX, as text or as the path of a file. `kernel`
    is the name of a function, an instance of a template ("add<4>") or a symbol. `grid`, `block` and `cluster` are
    numbers or tuples of up to three; `shared` is bytes of dynamic shared memory; `options` the compiler's ("-DN=4",).
    In `args`, arrays, tensors and buffers are passed as their addresses, NumPy scalars by value, None as a null
    pointer, bytes or a tuple of members as a struct, and a list as an array of pointers. `variables` sets `__device__`
    and `__constant__` variables to arrays, by name. `merge` counts adjacent accesses as ptxas merges them; `check`
    looks for faults; `seed` shuffles the order of blocks and warps, to show results that depend on it. A kernel that
    does not end within `seconds` of processor time, or `max_steps` basic blocks, is an error; both are of the thread
    blocks that run together. With `strict` findings are an error, too.

    >>> import numpy as np, gemmery as gm
    >>> x = np.arange(64, dtype=np.float32)
    >>> code = "__global__ void twice(float* x) { x[threadIdx.x] *= 2; }"
    >>> run = gm.emulate(code, "twice", 1, 64, [x])
    >>> x[:3].tolist(), run.global_.loads.sectors, run.flops, run.findings
    ([0.0, 2.0, 4.0], 8, 64, ())

    Raises EmulationError for instructions that are not modelled, CompileError, LayoutError, ArgumentError for launches
    that a driver would refuse, and with `strict` CheckError for findings. The arrays are then unchanged.
    """
    arch = _architecture(arch)
    capability = int(arch.removeprefix("sm_").rstrip("af"))
    dims = _dims("grid", grid), _dims("block", block)
    reason = _type_error(kernel, args, shared, options, variables, seed, max_steps, seconds)
    if reason:
        raise ArgumentError(reason)
    text, name, folder = read_source(source)
    program, left_out, made_from, warnings = compiled_kernel(text, name, folder, kernel, arch, tuple(options))
    compiled_for = program.kernel.limits.get("reqnctapercluster", (1,))
    clustered = _dims("cluster", compiled_for if cluster is None else cluster)
    launch = LaunchConfig(*dims, b"", shared, clustered)
    reason = refusal(program.kernel, launch, capability)
    if reason:
        raise ArgumentError(f"kernel {kernel}: {reason}")
    args = [_argument(place, value) for place, value in enumerate(args)]
    if len(args) != len(program.kernel.parameters) and (inside := _parameters(text, kernel, name, folder)):
        listed_c = " or ".join(f"({', '.join(parameters)})" for parameters in inside)
        count = f"{len(args)} argument{'s' * (len(args) != 1)}"
        raise ArgumentError(f"{count}: {kernel}{listed_c} takes {len(program.kernel.parameters)}; pass one for each")
    trace = Trace() if check else None
    try:
        arguments = bound(program.kernel, args, variables, resident())
        launch = replace(launch, parameters=arguments.parameters)
        run = emulated(
            program,
            launch,
            arguments.memory,
            check=check,
            merge=merge,
            seed=seed,
            max_steps=max_steps,
            seconds=seconds,
            observers=(trace,) if trace else (),
        )
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != ENOMEM:
            raise
        size = sum(each.nbytes for each in args if isinstance(each, np.ndarray)) / 2**20
        what = (
            f"the launch has {size:,.0f} MiB of arrays, and with its checks the emulator takes up to three times that"
        )
        raise MemoryError(f"{what}: pass smaller arrays or check=False, or allow the process more memory") from None
    if strict and run.findings:
        texts = "".join(f"\n{finding}" for finding in run.findings)
        raise CheckError(f"kernel {kernel}: strict=True allows no findings, and there are {len(run.findings)}:{texts}")
    arguments.write_back()
    drawable = Drawable(trace, {name: text}, _steps(args)) if trace else None
    rerun = Rerun(
        program,
        lambda: bound(program.kernel, args, variables, resident()),
        partial(_resources, program.kernel, made_from),
    )
    nobody = (0, 0, 0)
    own = ((words, name, line) for line, words in made_from.warnings) if made_from else ()  # of the compiler
    every = (*warnings, *own)
    warned = tuple(Finding("source", Line(file, line), words, nobody, nobody) for words, file, line in every)
    warned += run.warnings
    return with_page(
        replace(run, kernel=kernel or run.kernel, left_out=left_out, drawable=drawable, rerun=rerun, warnings=warned)
    )


def _resources(kernel: PtxKernel, made_from: nvrtc.CompilerInput | None, arch: str) -> tuple[int, int]:
    """Return the registers of a thread, 0 where they are not known, and the bytes of static shared memory."""
    if made_from is None:
        return 0, kernel.shared
    figures = made_from.report(kernel.name, arch)
    return figures.registers, figures.shared


def _argument(place: int, value: Any) -> Any:
    """Return an array on the memory of a tensor, a buffer or what DLPack describes; any other argument as it is."""
    if isinstance(value, np.ndarray | np.generic | bytes | bytearray | int | float | None):
        return value
    if isinstance(value, list | tuple):
        inside = [_argument(place, each) for each in value]
        return inside if isinstance(value, list) else tuple(inside)
    torch = arrays.library(value, "torch", "Tensor")
    if torch is not None:
        if value.device.type != "cpu":
            raise ArgumentError(f"argument {place} is a tensor on {value.device}: pass tensor.cpu()")
        if value.layout != torch.strided:
            raise ArgumentError(f"argument {place} is a tensor of layout {value.layout}: pass tensor.to_dense()")
        plain = value.detach()
        return (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()
    try:
        if hasattr(value, "__array_interface__"):
            return np.asarray(value)
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
        return np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        if hasattr(value, "__dlpack__"):
            raise ArgumentError(f"argument {place} cannot be read on the CPU ({error}): pass a NumPy array") from None
        return value  # a tensor map, or what no kernel takes


def _steps(args: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """Return the strides of the matrices among a kernel's arguments."""
    arrays = {f"argument {place}": value for place, value in enumerate(args) if isinstance(value, np.ndarray)}
    return {name: (array.strides[0], array.strides[1]) for name, array in arrays.items() if array.ndim == 2}


def _type_error(
    kernel: Any, args: Any, shared: Any, options: Any, variables: Any, seed: Any, max_steps: Any, seconds: Any
) -> str:
    """Return what is wrong with the type of an argument; "" if nothing is."""
    if not isinstance(kernel, str):
        return f"kernel={kernel!r}: pass the name of a kernel as a string"
    if not isinstance(args, list | tuple):
        return f"args is of type {type(args).__name__}: pass a list of the kernel's arguments, such as [x, y]"
    if not isinstance(shared, int | np.integer) or shared < 0:
        return f"shared={shared!r}: pass the bytes of shared memory, a whole number >= 0"
    if not isinstance(options, list | tuple) or not all(isinstance(option, str) for option in options):
        return f"options={options!r}: pass a tuple of strings, one for each option, such as ('-DN=4',)"
    if not isinstance(variables, Mapping | None):
        return f"variables is of type {type(variables).__name__}: pass a dictionary of arrays, such as {{'table': x}}"
    if seed is not None and (not isinstance(seed, int | np.integer) or seed < 0):
        return f"seed={seed!r}: pass a whole number >= 0, or None for ascending order"
    if not isinstance(max_steps, int | np.integer) or max_steps < 1:
        return f"max_steps={max_steps!r}: pass a whole number >= 1"
    if not isinstance(seconds, int | float) or not seconds > 0:
        return f"seconds={seconds!r}: pass a number > 0, or math.inf for no limit"
    return ""


def read_source(source: str | Path) -> tuple[str, str, Path | None]:
    """Return the text of a source, its name in lines, and the folder of its file."""
    if isinstance(source, Path):
        return _read(source), source.name, source.parent
    if hasattr(source, "encode") and "{" in source:
        return source, SOURCE, None
    if hasattr(source, "encode") and source.endswith((".cu", ".ptx", ".cuh")):
        return read_source(Path(source))
    raise ArgumentError(f"source={source!r}: pass the text of a kernel, or a pathlib.Path of its file")


def _is_ptx(text: str) -> bool:
    return re.search(r"^\s*\.version\s", text, re.MULTILINE) is not None


def compiled_kernel(
    text: str, name: str, folder: Path | None, kernel: str, arch: str, options: tuple[str, ...] = ()
) -> CompiledKernel:
    """Compile a kernel of CUDA C++ or read one of PTX."""
    if _is_ptx(text):
        return CompiledKernel(_read_ptx(text, kernel, arch, options), (), None)
    try:  # PTX needs no parser of C++
        from gemmery_emulator.kernels.device_part import headers_of
    except ModuleNotFoundError as error:
        raise not_installed(error, "emulating CUDA C++") from None
    headers = "#include" in re.sub(r"[ \t]", "", text)
    toolkit = include.folders() if headers else ()
    texts, empty, wheels = headers_of(text, options, folder, toolkit) if headers else ({}, [], ())
    beside = (*texts.items(), *((header, "") for header in empty), *((wheel, "") for wheel in wheels))
    # A file whose name is a macro, or an option's, may have changed.
    knows = not re.search(r"#\s*include\s+\w", text) and not any(
        re.match("--?(pre-)?inc|-I$", each) for each in options
    )
    compile_it = _compiled if knows else _compiled.__wrapped__
    return compile_it(text, name, folder, kernel, arch, options, beside, toolkit)


@lru_cache(maxsize=64)
def _compiled(
    text: str,
    name: str,
    folder: Path | None,
    kernel: str,
    arch: str,
    options: tuple[str, ...],
    beside: tuple[tuple[str, str], ...],
    toolkit: tuple[str, ...],
) -> CompiledKernel:
    """Compile a kernel; `beside` are the headers of its own, on which it depends."""
    inside = options if folder is None else (*options, f"-I{folder}")
    from gemmery_emulator.kernels.device_part import device_part, program_of
    from gemmery_emulator.kernels.source_kernels import meant

    program, part, ptx = program_of(text, name, options, folder, toolkit), None, None
    if program.is_device_code:
        with suppress(CompileError):  # it may need what nvcc declares without an include
            ptx = nvrtc.ptx_alone(text, name, kernel, arch, inside, include.STANDARD if toolkit else {}, toolkit)
    try:
        if ptx is None:
            part = device_part(program, kernel, arch, options, toolkit)
            ptx = part.ptx
    except CompileError as error:
        if "nv_mangled_name" in str(error):
            if (other := meant(text, kernel, name, folder)) != kernel:
                return compiled_kernel(text, name, folder, other, arch, options)
            raise CompileError(f"{_OF_NAMES.sub('', str(error)).rstrip()};\n{_WAYS}") from None
        if re.search(r'"cudaDeviceSynchronize" is undefined|kernel launch from __device__', str(error)):
            raise CompileError(f"{error}\n{LAUNCHES}") from None
        raise
    lowered = prepared(ptx.text, _only(list(parsed(ptx.text, NO_WRAPPERS).kernels), ptx.entry), NO_WRAPPERS)
    return CompiledKernel(lowered, part.left_out if part else (), ptx.made_from, part.warnings if part else ())


def _read_ptx(text: str, kernel: str, arch: str, options: tuple[str, ...]) -> LoweredKernel:
    if options:
        raise ArgumentError(
            f"options={options}: PTX is not compiled, so it takes no options; pass the CUDA C++ source instead"
        )
    module = parsed(text, NO_WRAPPERS)
    target = re.match(r"sm_(\d+)", module.target)
    if target and int(target[1]) > int(arch.removeprefix("sm_").rstrip("af")):
        raise ArgumentError(
            f"arch={arch!r}: this PTX is for {module.target}, and older devices cannot run it; "
            f"pass arch={module.target!r}"
        )
    return prepared(text, _only(list(module.kernels), kernel), NO_WRAPPERS)


def _read(path: Path) -> str:
    """Read a text file; raises ArgumentError if that fails."""
    try:
        return path.read_text(encoding="utf-8-sig")  # NVRTC reads no byte order mark, which editors of Windows write
    except OSError as error:
        raise ArgumentError(
            f"source={str(path)!r} cannot be read ({error.strerror}): pass the path of a file"
        ) from None
    except UnicodeDecodeError:
        raise ArgumentError(f"source={str(path)!r} is not text in UTF-8: pass a file of CUDA C++ or PTX") from None


# What NVRTC says about the statement that it adds for the name of a kernel, which nobody wrote.
_OF_NAMES = re.compile(
    r"^__nv_name_map\(\d+\): error: Error in parsing.*\n|__nv_name_map\(\d+\): error: |"
    r"^.*#pragma nv_mangled_name.*\n\s*\^\s*\n|^\d+ errors? detected in the compilation.*$",
    re.MULTILINE,
)


_WAYS = (
    "name an instance of a template with its arguments (add<4>), and one of several overloads by its symbol (_Z3addPf)"
)


def _only(names: list[str], kernel: str) -> str:
    """Find a kernel by its name or by a part of its symbol."""
    matches = [name for name in names if name == kernel] or [name for name in names if kernel in name]
    if len(matches) != 1:
        raise ArgumentError(f"kernel {kernel!r}: this PTX has {', '.join(names)}; name one of them")
    return matches[0]


def _architecture(arch: Any) -> str:
    try:
        return architecture(arch)
    except (AttributeError, DeviceError) as error:  # not a string, or an unknown name
        reason = f"; {error}" if isinstance(error, DeviceError) else ""
        raise ArgumentError(
            f"arch={arch!r}: pass an architecture from sm_{min(LIMITS)} on, such as 'sm_80' or 'sm_90a', or a card, "
            f"such as 'rtx3090'{reason}"
        ) from None


def _dims(name: str, value: Sides) -> Dims:
    sides = tuple(value) if isinstance(value, Sequence) else (value,)
    try:
        whole = [int(side) for side in sides]
    except (TypeError, ValueError, OverflowError):
        whole = []
    if not 1 <= len(whole) <= 3 or any(a != b or a < 1 for a, b in zip(whole, sides, strict=True)):
        raise ArgumentError(f"{name}={value!r}: pass a whole number >= 1, or a tuple of up to three")
    return three(tuple(whole))


def only_kernel(source: str | Path) -> str:
    """Return the name of a source's only kernel, of a template the only instance that the source launches.

    Raises ArgumentError, which lists them, if there are none or several.
    """
    text, name, folder = read_source(source)
    if _is_ptx(text):
        names = list(parsed(text, NO_WRAPPERS).kernels)
    else:
        from gemmery_emulator.kernels.source_kernels import kernels_of

        names = [each for kernel, instances in kernels_of(text, name, folder).items() for each in instances or [kernel]]
    if len(names) != 1:
        none = "no __global__ function; give a file with a kernel"
        raise ArgumentError(f"{name} has {f'the kernels {listed(names)}: name one' if names else none}")
    return names[0]


def written_launch(source: str | Path, kernel: str) -> tuple[tuple[tuple[str, ...], ...], Any, Any, tuple[Any, ...]]:
    """Return a kernel's parameters in C, for each definition of that name; the grid, block and arguments of its launch,
    None for what is unknown. PTX has no names and no launches.
    """
    text, name, folder = read_source(source)
    if _is_ptx(text):
        return (), None, None, ()
    from gemmery_emulator.kernels.source_kernels import launch_of

    return _parameters(text, kernel, name, folder), *launch_of(text, kernel)


def _parameters(text: str, kernel: str, name: str, folder: Path | None) -> tuple[tuple[str, ...], ...]:
    """A kernel's parameters in C, for each definition of that name; PTX has no names."""
    if _is_ptx(text):
        return ()
    from gemmery_emulator.kernels.source_kernels import declared

    return declared(text, kernel, name, folder)
