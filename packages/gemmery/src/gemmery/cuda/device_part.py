"""Compile the device part of a whole program: what its kernels need, without main(), host functions and their headers.

A compiler of device code stops at std::cout. So the text is split into declarations. Those that no kernel reaches by
name are left out, and so are the bodies of the host's functions, and each declaration in which the compiler still has
an error. A type keeps all of its members or none, so that no member moves. Lines keep their numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from gemmery.cuda import include, nvrtc
from gemmery.cuda.declarations import Split, macros_of
from gemmery.cuda.device_program import ABSENT, INCLUDE, UNMARKED, DeviceProgram
from gemmery.errors import CompileError

_LIBRARY = ("algorithm", "array", "functional", "limits", "numeric", "tuple", "type_traits", "utility")
_BESIDE = ("", "include", "inc", "common", "Common", "utils", "common/inc")  # folders of a project's headers
_UP = 5  # folders above a file in which they are looked for
# Headers of the host's libraries, which have no macros for kernels: C++'s have no dot in their names.
_OF_HOST = re.compile(
    r"[a-z_]+|sys/\w+\.h|(unistd|time|getopt|errno|signal|pthread|dirent|fcntl|memory|malloc|ctype|locale|wchar|inttypes"
    r"|stdbool|stdarg|strings|omp)\.h"
)
_CUB = "cub/cub.cuh"  # it includes host code; the headers of its parts do not
_OF_CUB = re.compile(r"\b(Block|Warp)([A-Z]\w+)")
_EMPTY = "is not here and counts as empty: in #if, the macros that it defines are not defined"
PRELUDE = "gemmery_prelude.h"
# Headers of host code that some device code includes; their packages bring them.
_PACKAGES = {
    "cutlass/": "nvidia-cutlass",
    "cute/": "nvidia-cutlass",
    "curand": "nvidia-curand",
    "cufft": "nvidia-cufft",
    "cub/": "nvidia-cuda-cccl",
    "thrust/": "nvidia-cuda-cccl",
}


_HANDLES = {
    "cublasContext": "cublasHandle_t", "cublasLtContext": "cublasLtHandle_t", "cudnnContext": "cudnnHandle_t",
    "cusparseContext": "cusparseHandle_t", "cusolverDnContext": "cusolverDnHandle_t", "ncclComm": "ncclComm_t",
    "curandGenerator_st": "curandGenerator_t",
}  # fmt: skip
_LIBRARIES = "".join(f"typedef struct {name}* {handle};\n" for name, handle in _HANDLES.items())
_MAP = "typedef struct CUtensorMap_st { alignas(64) unsigned long long opaque[16]; } CUtensorMap;\n"
_TYPES = {
    ("cublas", "cudnn", "torch/", "ATen/", "c10/", "nccl"): "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
    + _LIBRARIES,
    ("cusparse", "cusolver", "curand"): _LIBRARIES,
    ("cufft",): "typedef float2 cufftComplex; typedef double2 cufftDoubleComplex; typedef float cufftReal;\n"
    "typedef int cufftHandle;\n",
    ("cuda.h", "cudaTypedefs.h"): _MAP,
}  # of the headers of libraries, by the beginnings of their names


@dataclass(frozen=True)
class DevicePart:
    """The PTX of a program's kernels, and what was left out of its file: "main() (line 40)"."""

    ptx: nvrtc.Ptx
    left_out: tuple[str, ...] = ()
    warnings: tuple[tuple[str, str, int], ...] = ()  # what may change the result: words, and the file and line


def has_host_functions(program: DeviceProgram) -> bool:
    """Whether a program's kernels may call functions of the host, by their names."""
    return any(map(program.is_host, program.all(program.reached())))


def device_part(
    text: str, name: str, kernel: str, arch: str, options: tuple[str, ...] = (), folder: Path | None = None
) -> DevicePart:
    """Compile a program's kernel to PTX, without its host code; `folder` is that of its file.

    Raises CompileError with the compiler's words where they concern the kernel, or where nothing more can be left out.
    """
    toolkit = include.folders()
    program = program_of(text, name, options, folder, toolkit)
    program.arguments = frozenset(re.findall(r"[A-Za-z_]\w*", kernel))
    if not any(each.head & program.kernel_marks for each in program.all()):
        raise CompileError(f"{name} has no kernel: it has no __global__ function")
    function = re.match(r"(?:\w+::)*(\w+)", kernel)
    toolkit += program.wheels
    while True:
        texts = program.texts()
        whole = texts.pop(name)
        # The prelude has most of what kernels use of the C++ library.
        standard = include.STANDARD if program.library else dict.fromkeys(include.STANDARD, "")
        beside = standard | _stand_ins(program, toolkit)
        beside |= texts | {PRELUDE: _prelude(program.library) + program.declared()}
        try:
            ptx = nvrtc.ptx_alone(whole, name, kernel, arch, options, beside, toolkit, first=PRELUDE)
        except CompileError as error:
            changed = program.leave_out(str(error))
            if changed and (function is None or function[1] not in program.errors):
                continue
            words = program.cause(function[1]) if function else ""
            text = f"kernel {kernel} of {name} did not compile for {arch}: {words}" if words else str(error)
            raise CompileError(f"{text}{_package(program)}") from None
        program.uncalled(ptx.text, ptx.entry)
        absent = list(program.absent(ptx.text))
        warnings = [(f"{header} {_EMPTY}", file, line) for header, file, line in absent if not _types_of(header)]
        headers = tuple(f"{header} (line {line})" for header, _, line in absent)
        alone = replace(ptx, text=re.sub(rf"^.*\b\w*{ABSENT}\d+.*\n", "", ptx.text, flags=re.MULTILINE))
        return DevicePart(alone, headers + program.dropped(), (*warnings, *program.replaced()))


def headers_of(
    text: str, options: Sequence[str], folder: Path | None, toolkit: tuple[str, ...]
) -> tuple[dict[str, str], list[str], tuple[str, ...]]:
    """The texts of a program's own headers, the headers without a file, and the folders of packages with others."""
    folders = [Path(flag[2:]) for flag in options if flag.startswith("-I")] + _searched(folder)
    texts, empty, wheels = dict[str, str](), list[str](), set[str]()
    pending: list[tuple[str, Path | None]] = [(text, folder)]
    while pending:
        whole, beside = pending.pop()
        for included in INCLUDE.finditer(whole):
            header = included[2]
            if header in texts or header in empty:
                continue
            places = (each / header for each in ([beside] if beside else []) + folders)
            path = next((each for each in places if each.is_file()), None)
            if header in include.STANDARD or (path is None and _is_in(header, toolkit)):
                continue
            if path is not None:
                texts[header] = path.read_text(encoding="utf-8", errors="replace")
                pending.append((texts[header], path.parent))
            elif include.wheel(header):
                wheels.add(include.wheel(header))
            else:
                empty.append(header)
    return texts, empty, tuple(sorted(wheels))


def program_of(
    text: str, name: str, options: tuple[str, ...], folder: Path | None, toolkit: tuple[str, ...]
) -> DeviceProgram:
    """Read a file's own headers, and those of their own."""
    texts, empty, wheels = headers_of(text, options, folder, toolkit)
    splits = {file: Split(whole, file=file) for file, whole in {name: text, **texts}.items()}
    macros = macros_of([directive for split in splits.values() for directive in split.directives])
    for split in splits.values():
        split.macros = macros
    return DeviceProgram(name, splits, empty, wheels, unmarked=UNMARKED in options)


def _searched(folder: Path | None) -> list[Path]:
    """The folders of a project's headers: beside its file, and in those above it."""
    if folder is None:
        return []
    above = [folder.resolve(), *folder.resolve().parents][:_UP]
    return [path for parent in above for part in _BESIDE if (path := parent / part).is_dir()]


def _is_in(header: str, folders: tuple[str, ...]) -> bool:
    return any(os.path.exists(os.path.join(folder, header)) for folder in folders)


@lru_cache
def _prelude(whole: bool) -> str:
    """What is included first; the `whole` library takes a second to compile."""
    library = "".join(f"#include <{name}>\n" for name in _LIBRARY) if whole else ""
    return files(__package__).joinpath("prelude.h").read_text(encoding="utf-8") + library


def _types_of(header: str) -> str:
    """The types of a library that kernels use, for a header that is not here."""
    return next((text for starts, text in _TYPES.items() if header.startswith(starts)), "")


def _stand_ins(program: DeviceProgram, toolkit: tuple[str, ...]) -> dict[str, str]:
    """The texts in place of headers that are not here, each with a mark that it was included."""
    texts = {}
    for number, header in enumerate(program.empty):
        is_silent = _OF_HOST.fullmatch(header) or header == _CUB
        mark = "" if is_silent else f"__device__ __attribute__((used)) char {ABSENT}{number};\n"
        texts[header] = f"#pragma once\n{_types_of(header)}{mark}"
    whole = " ".join(split.text for split in program.splits.values())
    parts = {(kind.lower(), re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()) for kind, name in _OF_CUB.findall(whole)}
    names = sorted(f"cub/{kind}/{kind}_{name}.cuh" for kind, name in parts)
    return texts | {_CUB: "".join(f"#include <{name}>\n" for name in names if _is_in(name, toolkit))}


def _package(program: DeviceProgram) -> str:
    """What to install for headers that are missing."""
    needed = {
        package: header for header in program.empty for start, package in _PACKAGES.items() if header.startswith(start)
    }
    lines = (f"\n{header} is not here: pip install {package}" for package, header in needed.items())
    return "".join(lines)
