"""Compile the device part of a whole program: what its kernels need, without main(), host functions and their headers.

A compiler of device code stops at std::cout. So the text is split into declarations. Those that no kernel reaches by
name are left out, and so are the bodies of the host's functions, and each declaration in which the compiler still has
an error. A type keeps all of its members or none, so that no member moves. Lines keep their numbers.

Names of kernels and of their parameters, and launches, are read as the text has them.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from gemmery.cuda import include, nvrtc
from gemmery.cuda.declarations import Split, macros_of
from gemmery.cuda.device_program import ABSENT, INCLUDE, UNMARKED, DeviceProgram
from gemmery.errors import ArgumentError, CompileError

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


# ---- names ----

NAMED = 24  # kernels that a message lists


def kernels_of(text: str, name: str = "kernel.cu", folder: Path | None = None) -> dict[str, tuple[str, ...]]:
    """The kernels of a program, each with its namespace; of a template the instances that the program launches.

    >>> kernels_of("template <int N> __global__ void f(int* x) { *x = N; } int main() { f<4><<<1, 1>>>(0); }")
    {'f': ('f<4>',)}
    >>> kernels_of("namespace lab { __global__ void g(int* x) { *x = 1; } }")
    {'lab::g': ('lab::g',)}
    """
    program = program_of(text, name, (), folder, include.folders())
    whole = program.splits[name]
    instances: dict[str, tuple[str, ...]] = {}
    for each in whole.declarations:
        if not each.head & program.kernel_marks or "()" not in each.title:
            continue
        name_alone = each.title.removesuffix("()")
        called = f"{each.scope}::{name_alone}" if each.scope else name_alone
        is_template = "template" in each.head and not re.search(r"\btemplate\s*<\s*>", text[each.start : each.stop])
        if is_template:
            launched = re.findall(rf"\b{name_alone}\s*(<[^;{{}}()]*?>)\s*<<<", text)
            instances[called] = tuple(dict.fromkeys(f"{called}{' '.join(each.split())}" for each in launched))
        else:
            instances.setdefault(called, (called,))
    return instances


def listed(names: Sequence[str]) -> str:
    """The first of some names."""
    return ", ".join(names[:NAMED]) + (" ..." if len(names) > NAMED else "")


def meant(text: str, kernel: str, name: str = "kernel.cu", folder: Path | None = None) -> str:
    """The kernel that a name may mean without its namespace, or without the arguments of a template.

    Raises ArgumentError if there is none, or several.

    >>> meant("namespace lab { template <int N> __global__ void f() {} void g() { f<4><<<1, 1>>>(); } }", "f")
    'lab::f<4>'
    """
    known = kernels_of(text, name, folder)
    called, angle, arguments = kernel.partition("<")
    candidates = [each for each in known if each == called.strip() or each.endswith(f"::{called.strip()}")]
    if angle:
        instances = [f"{each}<{arguments}" for each in candidates]
    else:
        instances = [instance for each in candidates for instance in known[each] or (each,)]
    if len(instances) == 1:
        return instances[0]
    every = [instance for each, launched in known.items() for instance in launched or (each,)]
    if instances:
        raise ArgumentError(f"kernel={kernel!r}: {name} has {listed(instances)}; name one of them")
    raise ArgumentError(f"kernel={kernel!r}: {name} has the kernels {listed(every)}; name one of them")


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_OF_TYPES = {"bool", "char", "const", "double", "float", "int", "long", "short", "signed", "unsigned", "__restrict__"}
_BRACKETS = dict(zip(")]>}", "([<{", strict=True))


def declared(
    text: str, kernel: str, name: str = "kernel.cu", folder: Path | None = None
) -> tuple[tuple[str, ...], ...]:
    """The parameters of a kernel in C, for each definition of that name.

    >>> declared("__global__ void add(const float*  x, int n = 3) {}", "add")
    (('const float* x', 'int n'),)
    """
    program = program_of(text, name, (), folder, include.folders())
    called = kernel.partition("<")[0].rpartition("::")[2].strip()
    definitions = dict[tuple[str, ...], None]()
    for each in program.splits[name].declarations:
        if each.head & program.kernel_marks and each.title == f"{called}()":
            alone = _COMMENT.sub(" ", text[each.start : each.stop])
            start = re.search(rf"\b{re.escape(called)}\s*\(", alone)
            if start:
                parts = (part.partition("=")[0] for part in _separated(alone[start.end() :]))
                definitions[tuple(" ".join(part.split()) for part in parts)] = None
    return tuple(definitions)


def names_of(definitions: Iterable[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """The names of parameters in C, for each definition of a kernel; "" for one that is not known.

    >>> names_of(declared("__global__ void add(const float* x, float (&y)[4], int n = 3) {}", "add"))
    {('x', '', 'n')}
    """
    return {tuple(map(_parameter_name, each)) for each in definitions}


_NAMED = re.compile(
    r"#define[ \t]+(\w+)[ \t]+([^\n]+)|\bdim3\s+(\w+)\s*(?:=\s*dim3\s*)?([({][^;]*[)}])\s*;|"
    r"\b(?:int|unsigned|long|size_t|float|double|auto|u?int\d+_t)\s+(\w+)\s*=\s*([^;,]+)[;,]"
)
_SUFFIX = re.compile(r"\b((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)[uUlLfF]*\b|\b(\d+\.)[fF]")
_CAST = re.compile(r"\((?:unsigned|int|long|float|double|size_t)+\)|\b(?:static_cast\s*<[^>]*>|dim3)(?=\s*\()")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.LShift: operator.lshift}


def launch_of(text: str, kernel: str) -> tuple[Any, Any, tuple[Any, ...]]:
    r"""The grid, the block and the arguments of the first launch of a kernel, None for what the text does not tell.

    >>> launch_of("#define N 1000\nint main() { dim3 b(16, 16); f<<<(N + 15) / 16, b>>>(x, N, 2.5f); }", "f")
    (63, (16, 16), (None, 1000, 2.5))
    """
    text = _COMMENT.sub(" ", text).replace("->", ".")
    values: dict[str, str] = {}
    for match in _NAMED.finditer(text):
        name, value = next(pair for pair in zip(match.groups()[::2], match.groups()[1::2], strict=True) if pair[0])
        values[name] = value if values.get(name, value) == value else ""  # of two values neither is known
    called = re.escape(kernel.partition("<")[0].rpartition("::")[2].strip())
    launch = re.search(rf"\b{called}\s*(?:<[^;{{}}]*?>)?\s*<<<(.*?)>>>\s*\(([^;]*)\)\s*;", text, re.DOTALL)
    if launch is None:
        return None, None, ()
    grid, block, *_ = (_value(part, values) for part in [*_separated(launch[1]), "", ""])
    return grid, block, tuple(_value(part, values) for part in _separated(launch[2]))


def _value(expression: str, values: Mapping[str, str], depth: int = 0) -> Any:
    """The value of an expression of C in numbers and names of constants; None if it has others."""
    plain = (
        _CAST.sub("", _SUFFIX.sub(lambda match: match[1] or match[2], expression)).replace("{", "(").replace("}", ")")
    )
    try:
        return _computed(ast.parse(plain.strip(), mode="eval").body, values, depth)
    except (ArithmeticError, LookupError, RecursionError, SyntaxError, TypeError, ValueError):
        return None


def _computed(node: ast.expr, values: Mapping[str, str], depth: int) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.Name) and depth < NAMED:
        return _value(values[node.id], values, depth + 1)
    if isinstance(node, ast.Tuple):
        sides = tuple(_computed(side, values, depth) for side in node.elts)
        return sides if all(isinstance(side, int) for side in sides) else None
    if isinstance(node, ast.BinOp):
        left, right = (_computed(side, values, depth) for side in (node.left, node.right))
        if isinstance(node.op, ast.Div):
            return left // right if isinstance(left, int) and isinstance(right, int) else left / right
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand, values, depth)
    raise ValueError


def _separated(text: str) -> list[str]:
    """The parts between commas outside of brackets, up to the bracket that ends them all."""
    parts, open_brackets = [""], []
    for letter in text:
        if letter in _BRACKETS.values():
            open_brackets.append(letter)
        elif letter in _BRACKETS:
            if not open_brackets:
                break
            if open_brackets[-1] == _BRACKETS[letter]:
                open_brackets.pop()
        if letter == "," and not open_brackets:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def _parameter_name(declared: str) -> str:
    """The last word of a parameter's type and name; "" where that may be no name."""
    word = re.fullmatch(r".*[\s*&](\w+)\s*(\[[^\]]*\]\s*)*", declared.partition("=")[0].strip(), re.DOTALL)
    return word[1] if word and "(" not in declared and word[1] not in _OF_TYPES else ""
