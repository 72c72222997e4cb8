"""emulate(): run any CUDA C++ or PTX kernel on the CPU, and count what it does."""

# No `from __future__ import annotations` here: help() would show annotations as strings.

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from errno import ENOMEM
from functools import lru_cache, partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from gemmery.cuda import include, nvrtc
from gemmery.errors import ArgumentError, CheckError, CompileError, not_installed, unknown
from gemmery_emulator.arguments import BoundArguments, bound, resident
from gemmery_emulator.findings import Finding
from gemmery_emulator.kernels.kernel_run import KernelRun, with_page
from gemmery_emulator.kernels.launch_checks import Sides, architecture, argument, dims, steps, type_error
from gemmery_emulator.kernels.programs import listed, parsed, prepared, refusal
from gemmery_emulator.kernels.project import as_nvcc_reads
from gemmery_emulator.kernels.python_kernels import FORMS, launch_of
from gemmery_emulator.lockstep import LIMIT
from gemmery_emulator.lower import LoweredKernel
from gemmery_emulator.machine import LaunchConfig
from gemmery_emulator.ptx import Line, PtxKernel
from gemmery_emulator.run import Drawable, Rerun, emulated
from gemmery_emulator.trace import Trace


class CompiledKernel(NamedTuple):
    """A kernel, what was left out of its source, what was compiled, and warnings: words, and the file and line."""

    program: LoweredKernel
    left_out: tuple[str, ...]
    made_from: nvrtc.CompilerInput | None
    warnings: tuple[tuple[str, str, int], ...] = ()


NO_WRAPPERS: frozenset[str] = frozenset()  # no file of a user's source consists of wrappers
SOURCE = "kernel.cu"  # the name of a source passed as text, in findings and lines
SYNCHRONIZES = (
    "since CUDA 12 a kernel cannot wait for those that it launches: launch what follows in cudaStreamTailLaunch"
)
APART = "-rdc=true"  # which launches from kernels need
_LAUNCHED = (
    r"kernel launch from __device__|device-side kernel launch could not"
    r'|"cuda(?:StreamFireAndForget|StreamTailLaunch|GetLastError)" is undefined'
)


@overload
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
) -> KernelRun: ...


@overload  # of a kernel that is an object: its grid, its block, but for Triton's, and its arguments
def emulate(
    source: Any,
    kernel: Any = None,
    grid: Any = None,
    block: Any = None,
    args: Any = None,
    shared: int = 0,
    arch: str = "sm_90",
    **options: Any,
) -> KernelRun: ...


def emulate(
    source: Any,
    kernel: Any = None,
    grid: Any = None,
    block: Any = None,
    args: Any = None,
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
    **names: Any,
) -> KernelRun:
    """Run a kernel of CUDA C++, PTX, Triton, Numba or CuPy on NumPy arrays, in place, and count, without a GPU.

    `source` is CUDA C++, compiled for `arch` ("sm_90", "RTX3090"), or PTX, as text or as the path of a file. `kernel`
    is the name of a function, an instance of a template ("add<4>") or a symbol. `grid`, `block` and `cluster` are
    numbers or tuples of up to three; `shared` is bytes of dynamic shared memory; `options` the compiler's ("-DN=4",).
    In `args`, arrays, tensors and buffers are passed as their addresses, NumPy scalars by value, None as a null
    pointer, bytes or a tuple of members as a struct, and a list as an array of pointers. `variables` sets `__device__`
    and `__constant__` variables to arrays, by name. `merge` counts adjacent accesses as ptxas merges them; `check`
    looks for faults; `seed` shuffles the order of blocks and warps, to show results that depend on it. A kernel that
    does not end within `seconds` of processor time, or `max_steps` basic blocks, is an error; both are of the thread
    blocks that run together. With `strict` findings are an error, too.

    A kernel that is an object is called without a name: `emulate(kernel, grid, args, num_warps=4, BLOCK=64)` of Triton,
    where `names` are parameters and Triton's options, and `emulate(kernel, grid, block, args)` of Numba and CuPy.

    >>> import numpy as np, gemmery as gm
    >>> x = np.arange(64, dtype=np.float32)
    >>> code = "__global__ void twice(float* x) { x[threadIdx.x] *= 2; }"
    >>> run = gm.emulate(code, "twice", 1, 64, [x])
    >>> x[:3].tolist(), run.global_.loads.sectors, run.flops, run.findings
    ([0.0, 2.0, 4.0], 8, 64, ())

    Raises EmulationError for instructions that are not modeled, CompileError, LayoutError, ArgumentError for launches
    that a driver would refuse, and with `strict` CheckError for findings. The arrays are then unchanged.
    """
    arch = architecture(arch)
    capability = int(arch.removeprefix("sm_").rstrip("af"))
    texts: Mapping[str, str] | None = None
    called = kernel
    if not isinstance(source, str | Path):
        sides_and_args = [value for value in (kernel, grid, block, args) if value is not None]
        launched = launch_of(source, sides_and_args, shared, tuple(options), names, arch)
        source, called, kernel, grid, block, args, shared, options, texts = launched
        names = {}
    for name in names:
        raise unknown(f"emulate() takes no {name!r}", name, (*signature(emulate).parameters,)[:-1])
    sides = dims("grid", grid), dims("block", block)
    reason = type_error(
        kernel, args, shared, options, variables, seed, max_steps, seconds, merge=merge, check=check, strict=strict
    )
    if reason:
        raise ArgumentError(reason)
    text, name, folder = read_source(source)
    program, left_out, made_from, warnings = compiled_kernel(text, name, folder, kernel, arch, tuple(options))
    compiled_for = program.kernel.limits.get("reqnctapercluster", (1,))
    clustered = dims("cluster", compiled_for if cluster is None else cluster)
    launch = LaunchConfig(*sides, b"", shared, clustered)
    reason = refusal(program.kernel, launch, capability)
    if reason:
        raise ArgumentError(f"kernel {called}: {reason}")
    args = [argument(place, value) for place, value in enumerate(args)]
    if len(args) != len(program.kernel.parameters) and (inside := _parameters(text, kernel, name, folder)):
        listed_c = " or ".join(f"({', '.join(parameters)})" for parameters in inside)
        count = f"{len(args)} argument{'s' * (len(args) != 1)}"
        raise ArgumentError(f"{count}: {kernel}{listed_c} takes {len(program.kernel.parameters)}; pass one for each")
    limits = {"seed": seed, "max_steps": max_steps, "seconds": seconds}
    compiled = CompiledKernel(program, left_out, made_from, warnings)
    bind = lambda: bound(program.kernel, args, variables, resident())  # noqa: E731
    try:
        return run_launch(
            compiled, launch, bind, texts or {name: text}, called, steps(args), check, merge, strict, **limits
        )
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != ENOMEM:
            raise
        size = sum(each.nbytes for each in args if isinstance(each, np.ndarray)) / 2**20
        what = (
            f"the launch has {size:,.0f} MiB of arrays, and with its checks the emulator takes up to three times that"
        )
        raise MemoryError(f"{what}: pass smaller arrays or check=False, or allow the process more memory") from None


def run_launch(
    compiled: CompiledKernel,
    launch: LaunchConfig,
    bind: Callable[[], BoundArguments],
    texts: Mapping[str, str],
    called: str,
    matrices: Mapping[str, tuple[int, int]],
    check: bool = True,
    merge: bool = True,
    strict: bool = False,
    **limits: Any,
) -> KernelRun:
    """Run a compiled kernel on what `bind` returns, when it is predicted later, too; `texts` are its sources."""
    program, left_out, made_from, warnings = compiled
    trace = Trace() if check else None
    arguments = bind()
    launch = replace(launch, parameters=arguments.parameters)
    observers = (trace,) if trace else ()
    run = emulated(program, launch, arguments.memory, check=check, merge=merge, observers=observers, **limits)
    if strict and run.findings:
        faults = "".join(f"\n{finding}" for finding in run.findings)
        raise CheckError(f"kernel {called}: strict=True allows no findings, and there are {len(run.findings)}:{faults}")
    arguments.write_back()
    drawable = Drawable(trace, texts, matrices) if trace else None
    rerun = Rerun(program, bind, partial(_resources, program.kernel, made_from))
    nobody, name = (0, 0, 0), next(iter(texts), SOURCE)
    own = ((words, name, line) for line, words in made_from.warnings) if made_from else ()  # of the compiler
    every = (*warnings, *own)
    warned = tuple(Finding("source", Line(file, line), words, nobody, nobody) for words, file, line in every)
    warned += run.warnings
    return with_page(
        replace(run, kernel=called or run.kernel, left_out=left_out, drawable=drawable, rerun=rerun, warnings=warned)
    )


def _resources(kernel: PtxKernel, made_from: nvrtc.CompilerInput | None, arch: str) -> tuple[int, int, bytes]:
    """Return the registers of a thread, 0 where they are not known, the bytes of static shared memory, and the code."""
    if made_from is None:
        return 0, kernel.shared, b""
    code = made_from.code(kernel.name, arch)
    return code.report.registers, code.report.shared, code.cubin


def read_source(source: str | Path) -> tuple[str, str, Path | None]:
    """Return the text of a source, its name in lines, and the folder of its file."""
    if isinstance(source, Path):
        return _read(source), source.name, source.parent
    if hasattr(source, "encode") and "{" in source:
        return source.rstrip("\0"), SOURCE, None  # with which CuTe DSL ends PTX
    if hasattr(source, "encode") and source.endswith((".cu", ".ptx", ".cuh")):
        return read_source(Path(source))
    raise ArgumentError(f"source={source!r}: {FORMS}")


NONE = "has no kernel (no __global__ function): give a file that defines one, or the one that includes this file"


def _is_ptx(text: str) -> bool:
    return re.search(r"^\s*\.version\s", text, re.MULTILINE) is not None


def compiled_kernel(
    text: str, name: str, folder: Path | None, kernel: str, arch: str, options: tuple[str, ...] = ()
) -> CompiledKernel:
    """Compile a kernel of CUDA C++ or read one of PTX."""
    if _is_ptx(text):
        return CompiledKernel(_read_ptx(text, kernel, arch, options), (), None)
    from gemmery_emulator.kernels.project import headers_of, including

    headers = "#include" in re.sub(r"[ \t]", "", text)
    toolkit = include.folders() if headers else ()
    texts, empty, wheels = headers_of(text, options, folder, toolkit) if headers else ({}, [], ())
    beside = (*texts.items(), *((header, "") for header in empty), *((wheel, "") for wheel in wheels))
    # A file whose name is a macro, or an option's, may have changed.
    knows = not re.search(r"#\s*include\s+\w", text) and not any(
        re.match("--?(pre-)?inc|-I$", each) for each in options
    )
    compile_it = _compiled if knows else _compiled.__wrapped__
    try:
        return compile_it(text, name, folder, kernel, arch, options, beside, toolkit)
    except ModuleNotFoundError as error:  # of the parser of C++, which PTX does not need
        raise not_installed(error, "emulating CUDA C++") from None
    except CompileError:
        whole = including(folder, name) if folder is not None else None
        if whole is None or whole.name in texts:
            raise
        with suppress(CompileError, ArgumentError):
            compiled = compiled_kernel(_read(whole), whole.name, whole.parent, kernel, arch, options)
            note = f"it does not compile by itself, and was compiled as a part of {whole.name}, which includes it"
            return compiled._replace(warnings=(*compiled.warnings, (note, name, 1)))
        raise


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
    from gemmery_emulator.kernels.device_part import device_part, expression, uncut
    from gemmery_emulator.kernels.source_kernels import meant
    from gemmery_emulator.kernels.source_program import program_of

    compile_anew = _compiled.__wrapped__
    program, part, ptx = program_of(text, name, options, folder, toolkit), None, None
    if program.is_device_code:
        with suppress(CompileError):  # it may need what nvcc declares without an include
            standard = include.STANDARD if toolkit else {}
            ptx = nvrtc.ptx_alone(text, name, expression(kernel), arch, inside, standard, toolkit)
    try:
        if ptx is None:
            part = device_part(program, kernel, arch, options, toolkit)
            ptx = part.ptx
    except CompileError as error:
        if "nv_mangled_name" in str(error):
            if (other := meant(text, kernel, name, folder)) != kernel:
                return compiled_kernel(text, name, folder, other, arch, options)
            raise CompileError(f"{_OF_NAMES.sub('', str(error)).rstrip()};\n{_WAYS}") from None
        if re.search(_LAUNCHED, str(error)) and "<<<" in text and APART not in options:
            return compile_anew(text, name, folder, kernel, arch, (*options, APART), beside, toolkit)
        if re.search(r'"cudaDeviceSynchronize" is undefined', str(error)):
            raise CompileError(f"{error}\n{SYNCHRONIZES}") from None
        calls_host = f"({name}, line" in str(error)  # a function of the file itself
        if any(each.startswith("-I") for each in options) and not calls_host:
            with suppress(CompileError):
                ptx = uncut(program, kernel, arch, inside, toolkit)
        if ptx is None:
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
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(f"source={str(path)!r} cannot be read ({reason}): pass the path of a file") from None
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    data = data if wide else data.rstrip(b"\0")
    if (b"\0" in data) != wide or (wide and len(data) % 2):
        raise ArgumentError(f"source={str(path)!r} is not text: pass a file of CUDA C++ or PTX")
    try:  # NVRTC reads no byte order mark, which editors of Windows write
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:  # an older encoding, in comments
        text = data.decode("latin-1")
    return as_nvcc_reads(text, path.name)


# What NVRTC says about the statement that it adds for the name of a kernel, which nobody wrote.
_OF_NAMES = re.compile(
    r"^__nv_name_map\(\d+\): error: Error in parsing.*\n|__nv_name_map\(\d+\): error: |"
    r"^.*#pragma nv_mangled_name.*\n\s*\^\s*\n|^\d+ errors? detected in the compilation.*$",
    re.MULTILINE,
)


_WAYS = (
    "name an instance of a template with its arguments (add<4>), and one of several overloads with its parameters "
    "(add(float*, int)) or by its symbol (_Z3addPf)"
)


def _only(names: list[str], kernel: str) -> str:
    """Find a kernel by its name or by a part of its symbol."""
    matches = [name for name in names if name == kernel] or [name for name in names if kernel in name]
    if len(matches) != 1:
        raise ArgumentError(f"kernel {kernel!r}: this PTX has {', '.join(names)}; name one of them")
    return matches[0]


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
        raise ArgumentError(f"{name} {f'has the kernels {listed(names)}: name one' if names else NONE}")
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
