"""Compile CUDA C++ to machine code, and read the compiler's report; needs no GPU.

NVIDIA, NVRTC documentation: name expressions give the symbol of a template's instance.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from gemmery import cache, config
from gemmery.cuda import constants, traced_function
from gemmery.errors import CompileError, DeviceError, missing

# With a driver, NVRTC uses its own cache, which returns no log: the report would be all zeros.
OPTIONS = ("--std=c++17", "--ptxas-options=-v", "-lineinfo", "--device-as-default-execution-space", "--no-cache")
# Files of kernels/ whose functions each wrap one instruction.
WRAPPERS = frozenset({"ptx.cuh", "ptx_hopper.cuh", "types.cuh"})
_PLAIN = re.compile(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*")  # a function's name or a symbol, no instance of a template
# ptxas's words for wgmma that waits for each product, and for setmaxnreg that it ignores: C7508 to C7519.
_SERIALIZED = re.compile(r"(\(C75(?:0[89]|1\d)\).*)")
# A warning of the compiler, up to the blank line after it; and those about what no code uses, and unknown pragmas.
_WARNING = re.compile(r"^(\S+\(\d+\): warning #).*?\n\n|^Remark: The warnings.*?\n\n", re.MULTILINE | re.DOTALL)
_SUPPRESSED = "-diag-suppress=177,550,1675"
_PARENT = re.compile(r'^#include "(\w+\.cu)"', re.MULTILINE)
_FIGURES = ("smem", "stack frame", "spill stores", "spill loads")
_ERROR = "error:"  # in place of the entry, in the cache: no symbol has a colon
PTX_OPTIONS = tuple(option for option in OPTIONS if not option.startswith("--ptxas"))


@dataclass(frozen=True)
class Report:
    """The figures that ptxas reports for a kernel."""

    registers: int  # per thread
    shared: int  # bytes of static shared memory
    stack: int  # bytes of local memory
    spill_stores: int  # bytes
    spill_loads: int


@dataclass(frozen=True)
class Code:
    """A compiled kernel."""

    entry: str  # its symbol
    arch: str
    cubin: bytes
    report: Report


def code(source: str, kernel: str, arch: str) -> Code:
    """Return the instance `kernel` of a template in kernels/`source` as machine code, from the cache if possible.

    >>> code("simt_naive.cu", "simt_naive<float, float, 0>", "sm_80").report.spill_stores
    0

    Raises CompileError with the compiler's words, DeviceError when NVRTC is not installed.
    """
    key = _name(source, kernel, arch)
    stored = cache.read(config.cache_dir(), key)
    if stored is None:
        texts = traced_function.texts(kernel)
        program = compiled(source, kernel, arch, OPTIONS, texts)
        _cached(_ptx_key(source, kernel, arch, texts), lambda: program)  # the same as without ptxas
        head = json.dumps([program.entry, *astuple(report(program.log, program.entry))])
        stored = b"%b\n%b" % (head.encode(), program.cubin)
        cache.write(config.cache_dir(), key, stored)
    head_of_stored, _, cubin = stored.partition(b"\n")
    entry, *figures = json.loads(head_of_stored)
    return Code(entry, arch, cubin, Report(*figures))


def stored(source: str, kernel: str, arch: str) -> int:
    """Return the bytes of a kernel's machine code in the cache, 0 if it is not there."""
    return len(cache.read(config.cache_dir(), _name(source, kernel, arch)) or b"")


@dataclass(frozen=True)
class Program:
    """The output of NVRTC for a source."""

    entry: str
    ptx: str
    cubin: bytes
    log: str


def compiled(
    source: str,
    kernel: str,
    arch: str,
    options: tuple[str, ...] = OPTIONS,
    texts: Mapping[str, str] | None = None,
    *,
    alone: bool = False,
) -> Program:
    """Compile without the cache; `arch` is "sm_90a" for machine code and PTX. `texts` replaces files in kernels/ or
    adds to them, by file name; with `alone` the source does not see kernels/.

    `kernel` is a function's name, an instance of a template or a symbol ("_Z3addPf"); "" compiles all functions.
    Raises CompileError with the compiler's words, also for machine code in which products by wgmma do not overlap.
    """
    nvrtc = bindings()
    whole = texts[source] if texts and source in texts else text(source)
    sources = {**({} if alone else {**headers(), **ancestors(whole)}), **(texts or {})}
    sources.pop(source, None)
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            whole.encode(),
            source.encode(),
            len(sources),
            [content.encode() for content in sources.values()],
            [name.encode() for name in sources],
        )
    )
    is_expression = bool(kernel) and not kernel.startswith("_Z")
    try:
        if is_expression:
            _checked(nvrtc.nvrtcAddNameExpression(program, kernel.encode()))
        first = () if alone else (f"--pre-include={constants.HEADER}",)
        flags = [f"-arch={arch}", *options, *first]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = _bytes(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            what = f"kernel {kernel} of {source}" if kernel else source
            if "--gpu-architecture" in log:
                known = ", ".join(f"sm_{number}" for number in _checked(nvrtc.nvrtcGetSupportedArchs()))
                log = f"NVRTC {version()} does not support it; use one of {known}, or pass PTX"
            log = _WARNING.sub("", log)
            raise CompileError(f"{what} did not compile for {arch}: {log.strip()}")
        entry = _checked(nvrtc.nvrtcGetLoweredName(program, kernel.encode())).decode() if is_expression else kernel
        ptx = _bytes(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).decode()
        cubin = _bytes(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, whole=True)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    loss = serialized(log, entry) if cubin and "wgmma.mma_async" in ptx else ""
    if loss:
        raise CompileError(f"kernel {kernel} of {source} multiplies by wgmma and is slow on {arch}: {loss}")
    return Program(entry, ptx, cubin, log)


def serialized(log: str, entry: str) -> str:
    """Return why products by wgmma do not overlap in a compiled kernel, by the output of ptxas -v; "" if they do.

    ptxas compiles such a kernel without an error, and it then runs at a fraction of its speed.
    """
    warnings = [match[1].strip() for match in _SERIALIZED.finditer(log)]
    if warnings:
        return f"{'; '.join(warnings)}. Touch sums only after wgmma_wait_group<0> on every path"
    figures = report(log, entry)
    if figures.stack or figures.spill_stores or figures.spill_loads:
        return (
            f"{figures.stack} bytes of local memory, {figures.spill_stores} stored and {figures.spill_loads} loaded by "
            "spills, where it must use none: make the tile smaller, or give the warpgroups more registers by setmaxnreg"
        )
    return ""


@dataclass(frozen=True)
class CompilerInput:
    """What NVRTC compiles, all but the architecture."""

    name: str  # of the source
    kernel: str  # "" for all functions
    flags: tuple[str, ...]
    sources: Mapping[str, str]
    warnings: tuple[tuple[int, str], ...] = ()  # of the compiler about the source itself: line, text

    def code(self, entry: str, arch: str) -> Code:
        """Compile to machine code, with its figures for a kernel; raises CompileError."""
        flags = ("--ptxas-options=-v", *self.flags)
        program = compiled(self.name, self.kernel, arch, flags, self.sources, alone=True)
        return Code(entry, arch, program.cubin, report(program.log, entry))


@dataclass(frozen=True)
class Ptx:
    """A kernel as PTX, with the lines of its source."""

    entry: str
    text: str
    made_from: CompilerInput | None = field(default=None, compare=False)  # for a source that is not a rung's


def ptx(source: str, kernel: str, arch: str, texts: Mapping[str, str] | None = None) -> Ptx:
    """Compile the instance `kernel` of a template to PTX, or read it from the cache; ptxas does not run.

    `texts` replaces files in kernels/ or adds to them, by file name: `source` may be among them.
    Raises CompileError with the compiler's words, DeviceError when NVRTC is not installed.
    """
    texts = {**traced_function.texts(kernel), **(texts or {})}
    virtual = arch.replace("sm_", "compute_")
    return _cached(_ptx_key(source, kernel, arch, texts), lambda: compiled(source, kernel, virtual, PTX_OPTIONS, texts))


def _ptx_key(source: str, kernel: str, arch: str, texts: Mapping[str, str]) -> tuple[str, ...]:
    """Return all that the PTX of a kernel depends on."""
    whole = texts.get(source) or text(source)
    sources = {**headers(), **ancestors(whole), source: whole, **texts}
    return source, kernel, arch, *PTX_OPTIONS, *(part for item in sorted(sources.items()) for part in item)


def ptx_alone(
    text: str,
    name: str,
    kernel: str,
    arch: str,
    options: tuple[str, ...] = (),
    beside: Mapping[str, str] | None = None,
    toolkit: tuple[str, ...] = (),
    first: str = "",
) -> Ptx:
    """Compile a kernel of anyone's source to PTX, or read it from the cache.

    `name` is what lines and the compiler's messages call the source, `beside` are headers by name, `first` the one of
    them that is included before the source, and `toolkit` are the folders of NVIDIA's headers. All functions of a
    source are compiled together, an instance of a template by itself. A source that includes files of the user's which
    `beside` lacks is compiled each time, because they may have changed.
    Raises CompileError with the compiler's words, DeviceError when NVRTC is not installed.
    """
    before = (f"--pre-include={first}",) if first else ()
    sources = {**(beside or {}), name: text}
    # nvcc has __int128 where the host's compiler has it, as those of Linux have.
    wide = sys.platform == "linux" and any("__int128" in each for each in sources.values())
    wide_flag = ("--device-int128",) if wide and "--device-int128" not in options else ()
    folders = (f"-I{folder}" for folder in toolkit)
    major, minor = map(int, version().split("."))
    # What nvcc defines; not __GNUC__, with which the headers of CCCL need those of the host.
    macros = {"__NVCC__": 1, "__linux__": 1, "__unix__": 1, "__x86_64__": 1, "CUDA_VERSION": 1000 * major + 10 * minor}
    defined = (f"-D{macro}={value}" for macro, value in macros.items())
    flags = (*PTX_OPTIONS, _SUPPRESSED, *defined, *options, *wide_flag, *before, *folders)
    parts = (text, name, arch, *flags, *(part for item in sorted((beside or {}).items()) for part in item))
    keeps = _stays(text, options, beside or {})

    virtual = arch.replace("sm_", "compute_")
    if _PLAIN.fullmatch(kernel):
        whole = _cached(parts, lambda: compiled(name, "", virtual, flags, sources, alone=True), keeps).text
        symbol = symbol_of(kernel, whole)
        if symbol:
            return Ptx(symbol, whole, CompilerInput(name, "", flags, sources, _warnings(whole, name)))
    ptx = _cached((*parts, kernel), lambda: compiled(name, kernel, virtual, flags, sources, alone=True), keeps)
    return replace(ptx, made_from=CompilerInput(name, kernel, flags, sources, _warnings(ptx.text, name)))


def _warnings(ptx: str, name: str) -> tuple[tuple[int, str], ...]:
    """Return the warnings about a source, which follow its PTX as comments."""
    warnings = re.findall(rf"^// {re.escape(name)}\((\d+)\): warning #\d+-D: (.*)$", ptx, re.MULTILINE)
    return tuple((int(line), text) for line, text in dict.fromkeys(warnings))


def symbol_of(kernel: str, ptx: str) -> str:
    """Return the symbol of a kernel in a PTX text by its name; "" if there is none or more than one.

    >>> symbol_of("inner::add", ".visible .entry _ZN5inner3addEPfi(")
    '_ZN5inner3addEPfi'
    """
    *outer, name = (f"{len(part)}{part}" for part in kernel.split("::"))
    mangled = f"N{''.join(outer)}{name}E" if outer else f"{name}(?!I)"
    symbols: list[str] = re.findall(rf"\.entry ({re.escape(kernel)}|_Z{mangled}\w*)\(", ptx)
    return symbols[0] if len(symbols) == 1 else ""


def _stays(text: str, options: tuple[str, ...], beside: Mapping[str, str]) -> bool:
    """Whether a source includes only headers of `beside` and the compiler's own, which change only with its version."""
    folders = [flag.partition("=")[2] or flag[2:] for flag in options if flag.startswith(("-I", "--include-path="))]
    if any(flag in ("-I", "--include-path") or flag.startswith(("-include", "--pre-include")) for flag in options):
        return False
    for line in re.findall(r"^[ \t]*(?:#|%:)[ \t]*include\b(.*)", text, re.MULTILINE):
        if any(f"{before}{name}{after}" in line for before, after in ("<>", '""') for name in beside):
            continue
        header = re.match(r"[ \t]*<([^<>]+)>", line)
        if not header or any(os.path.exists(os.path.join(folder, header[1])) for folder in folders):
            return False
    return True


def _cached(parts: tuple[str, ...], make: Callable[[], Program], keeps: bool = True) -> Ptx:
    """Return PTX from the cache, or make it; `parts` is all that it depends on, except the compiler's version."""
    key = cache.key("ptx", version(), version().encode(), *(part.encode() for part in parts))
    stored = cache.read(config.cache_dir(), key) if keeps else None
    if stored is None:
        try:
            program = make()
            warnings = "".join(f"// {each[0].splitlines()[0]}\n" for each in _WARNING.finditer(program.log) if each[1])
            stored = f"{program.entry}\n{program.ptx}\n{warnings}".encode()
        except CompileError as error:  # a program's host code takes several attempts, and each a second
            if "nvrtc-builtins" in str(error):
                raise  # a part of the compiler is missing, and may come
            stored = f"{_ERROR}\n{error}".encode()
        if keeps:
            cache.write(config.cache_dir(), key, stored)
    entry, _, whole = stored.decode().partition("\n")
    if entry == _ERROR:
        raise CompileError(whole)
    return Ptx(entry, whole)


def report(log: str, entry: str) -> Report:
    """Return the figures of one kernel from the output of ptxas -v."""
    part = log.partition(f"Compiling entry function '{entry}'")[2].partition("Compiling entry")[0]

    words = r"Used (\d+) registers", *(rf"(\d+) bytes {what}" for what in _FIGURES)
    return Report(*(int(match[1]) if (match := re.search(each, part)) else 0 for each in words))


@lru_cache
def headers() -> dict[str, str]:
    """The shared device code, by file name."""
    folder = files(__package__).joinpath("kernels")
    paths = [path for path in folder.iterdir() if path.name.endswith(".cuh")]
    return {constants.HEADER: constants.TEXT} | {path.name: path.read_text(encoding="utf-8") for path in paths}


@lru_cache
def text(source: str) -> str:
    """A kernel's file."""
    return files(__package__).joinpath("kernels", source).read_text(encoding="utf-8")


def ancestors(whole: str) -> dict[str, str]:
    """The files of other kernels that the text of a kernel includes, by name: its parent, and that one's."""
    texts = {name: text(name) for name in _PARENT.findall(whole)}
    return {name: part for parent in texts.values() for name, part in ancestors(parent).items()} | texts


@lru_cache
def version() -> str:
    """NVRTC's version, "13.5"."""
    return ".".join(map(str, _checked(bindings().nvrtcVersion())))


@lru_cache
def _shared() -> bytes:
    """A digest of the headers, on which every kernel's code depends."""
    return cache.digest(*(part.encode() for item in sorted(headers().items()) for part in item))


def _version(source: str) -> str:
    """Return what names the version of a kernel's sources in the cache."""
    whole = text(source)
    return cache.digest(_shared(), whole.encode(), *(part.encode() for part in ancestors(whole).values())).hex()[:12]


def versions() -> frozenset[str]:
    """Return what names the versions of all kernels in the cache."""
    names = (path.name for path in files(__package__).joinpath("kernels").iterdir())
    return frozenset(_version(name) for name in names if name.endswith(".cu"))


def _name(source: str, kernel: str, arch: str) -> str:
    whole = text(source)
    parts = (
        kernel,
        version(),
        source,
        whole,
        *ancestors(whole).values(),
        *traced_function.texts(kernel).values(),
        arch,
        *OPTIONS,
    )
    return cache.key("cuda", _version(source), _shared(), *(part.encode() for part in parts))


@lru_cache
def bindings() -> Any:
    """Return NVIDIA's bindings of NVRTC; raises DeviceError if they or the library are not installed."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise DeviceError(missing("cuda", "CUDA kernels need NVRTC")) from error
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings are installed, but not the library
        raise DeviceError(missing("cuda", f"NVRTC is not found ({error})")) from error
    return nvrtc


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status.value:
        message = bindings().nvrtcGetErrorString(status)[1].decode()
        raise CompileError(f"NVRTC failed: {message}")
    return values[0] if len(values) == 1 else values


def _bytes(program: Any, size: Any, get: Any, whole: bool = False) -> bytes:
    """Return one of NVRTC's outputs; text ends at its first zero byte."""
    data = bytes(_checked(size(program)))
    _checked(get(program, data))
    return data if whole else data.rstrip(b"\0")
