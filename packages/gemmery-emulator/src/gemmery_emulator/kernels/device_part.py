"""Compile the device part of a whole program: what its kernel needs, without main(), host functions and their headers.

A compiler of device code stops at std::cout. A pointer needs no type: names that the compiler does not know outside of
functions are declared, and it runs again. Then its errors are explained.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gemmery.cuda import include, nvrtc
from gemmery.errors import CompileError
from gemmery_emulator.kernels.declarations import Declaration
from gemmery_emulator.kernels.project import is_in
from gemmery_emulator.kernels.source_program import UNMARKED, SourceProgram
from gemmery_emulator.kernels.stand_ins import (
    ABSENT,
    HOST_LIBRARIES,
    LIBRARY,
    OF_HOST,
    PRELUDE,
    USING,
    library_of,
    prelude,
    stand_ins,
    types_of,
)

# Types of the C++ library whose members stand elsewhere than in the host's.
_MOVED = re.compile(r"\bstd\s*::\s*(complex|tuple|bitset|optional|variant)\b")
_WITHOUT_MASK = re.compile(r"\b(__(?:shfl(?:_up|_down|_xor)?|any|all|ballot))\s*\(")
_EMPTY = "is not here and counts as empty: in #if, the macros that it defines are not defined"
# Headers of host code that some device code includes; their packages bring them.
_PACKAGES = {
    **dict.fromkeys(("cutlass/", "cute/"), "nvidia-cutlass"), **dict.fromkeys(("cub/", "thrust/"), "nvidia-cuda-cccl"),
    "curand": "nvidia-curand", "cufft": "nvidia-cufft",
}  # fmt: skip
_HOST = (
    "it is a function of the host, which nvcc refuses there: mark it __device__, or take unmarked functions as device "
    f"code with the option {UNMARKED}"
)
_HOST_CODE = "the kernel needs what only host code has: put that under #ifndef __CUDACC_RTC__, or pass nvcc's PTX"
_ERROR = re.compile(r"(?:^|: )([^\s()]+)\((\d+)\): (?:catastrophic )?error:? ?(.*)\n.*\n  ([ \t]*)\^", re.MULTILINE)
_NEWER = re.compile(r"error: \"auto\" is not allowed here|\b(?:concept|requires|consteval)\b")  # what C++20 has
# The bytes of containers of the host, by 8, as GCC's library has them: members of types that kernels take.
_WORDS = {
    "vector": 3, "string": 4, "list": 3, "deque": 10, "queue": 10, "stack": 10, "map": 6, "set": 6, "multimap": 6,
    "unordered_map": 7, "unordered_set": 7, "function": 4, "mutex": 5, "thread": 1, "unique_ptr": 1, "shared_ptr": 2,
}  # fmt: skip
NONE = "is undefined"
_UNKNOWN = re.compile(
    r"is undefined|has no member|qualified name|must be a class or namespace|is not a template|must be a namespace name"
)
_NOT_THERE = re.compile(r'identifier "(?:\w+::)*(\w+)" is undefined|has no member "(\w+)"')
_NAME = re.compile(r"\b[A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)*(?:\s*<)?")


@dataclass(frozen=True)
class DevicePart:
    """The PTX of a program's kernels, and what was left out of its file: "main() (line 40)"."""

    ptx: nvrtc.Ptx
    left_out: tuple[str, ...] = ()
    warnings: tuple[tuple[str, str, int], ...] = ()  # what may change the result: words, and the file and line


def _unknown(program: SourceProgram, errors: str) -> list[str]:
    """The names outside of functions that the compiler does not know: "std::mutex", or "List<" of a template."""
    names = list[str]()
    for file, line, words, column in _ERROR.findall(errors):
        source = program.sources.get(file) or program.sources.get(os.path.basename(file))
        if source is None or not _UNKNOWN.search(words):
            continue
        begin = sum(map(len, source.text.splitlines(keepends=True)[: int(line) - 1]))
        at = begin + len(column)
        name = next((it for it in _NAME.finditer(source.text, begin) if it.end() > at), None)
        if (
            name
            and name.start() <= at
            and name[0] not in ("concept", "requires", "operator")
            and not any(_is_in_body(each, at) for each in source.declarations)
        ):
            is_namespace = re.search(r"\bnamespace\s+(\w+\s*=\s*)?$", source.text[begin : name.start()])
            names += [f"namespace {name[0].strip()}" if is_namespace else "".join(name[0].split())]
    return list(dict.fromkeys(names))


def _uncalled(program: SourceProgram, errors: str) -> set[tuple[str, int]]:
    """The places of member functions that nobody calls by name and whose bodies have names that are not known."""
    places = {(os.path.basename(file), int(line)) for file, line, words, _ in _ERROR.findall(errors) if NONE in words}
    some = (it for it, owner in program.each() if owner and it.kind == "function" and it.body[1])
    rest = (it for it in some if not {own := it.title[:-2], f".{own}"} & program.words)
    return {
        it.place for it in rest if any(
            (os.path.basename(it.source.file), it.first + below) in places
            for below in range(it.source.text.count("\n", it.start, it.stop) + 1)
        )
    }  # fmt: skip


def _notes(program: SourceProgram, errors: str) -> str:
    """What explains the compiler's errors: functions of the host, and headers that are not here."""
    names = {name for places in _NOT_THERE.findall(errors) for name in places if name}
    lines = [
        f"the kernel calls {each.title} ({each.source.file}, line {each.first}): {_HOST}"
        for each, owner in program.each()
        if each.kind == "function" and each.title[:-2] in names and program.is_host(each, owner)
    ]
    places = ((start, header) for header in program.missing for start in _PACKAGES if header.startswith(start))
    packages = {_PACKAGES[start]: header for start, header in places}
    lines += [f"{header} is not here: pip install {package}" for package, header in packages.items()]
    others = [it for it in program.missing if not OF_HOST.fullmatch(it) and it not in packages.values()]
    if 'namespace "std" has no member' in errors:
        lines.append(_HOST_CODE)
    if others and _UNKNOWN.search(errors):
        lines.append(f"not here, and empty: {', '.join(others)}; name their folders with options=('-IFOLDER',)")
    return "".join(f"\n{line}" for line in lines)


def _moved(program: SourceProgram, library: bool) -> Iterator[tuple[str, str, int]]:
    """Types of the C++ library that are members and have other bytes here, and shuffles and votes that nvcc
    refuses: words, and the file and line.
    """
    for each, owner in (it for it in program.each() if it[0].place in program.reached and not it[0].members):
        text = each.source.text[each.start : each.stop]
        of_type = owner.title if library and owner and each.kind == "field_declaration" else ""
        for name in _MOVED.findall(text) if of_type else ():
            words = f"std::{name} may have another alignment and order of members than the host's library"
            yield f"{words}: pass the values of {of_type} by themselves", each.source.file, each.first
        for name in set(_WITHOUT_MASK.findall(text)) - program.by_name.keys() - program.macros.keys():
            words = f"nvcc refuses {name}() for sm_70 and newer, and here the lanes that are active take part"
            yield f"{words}: call {name}_sync() with a mask of lanes", each.source.file, each.first


def _is_in_body(each: Declaration, at: int) -> bool:
    inside = each.body[0] <= at < each.body[1]
    return inside and (each.kind == "function" or any(_is_in_body(it, at) for it in each.members))


def _declared(names: Sequence[str]) -> str:
    """Declarations of types that are not known: a pointer to one has 8 bytes, a container of the host's its own."""
    texts = []
    for name in names:
        if name.startswith("namespace "):
            texts.append(f"{name} {{}}\n")
            continue
        *scopes, last = name.removesuffix("<").split("::")
        begin = "".join(f"namespace {scope} {{ " for scope in scopes)
        body = f" {{ void* words[{_WORDS[last]}]; }}" if scopes == ["std"] and last in _WORDS else ""
        texts.append(f"{begin}{'template <class...> ' * name.endswith('<')}struct {last}{body};{' }' * len(scopes)}\n")
    return "".join(texts)


def device_part(
    program: SourceProgram, kernel: str, arch: str, options: tuple[str, ...], toolkit: tuple[str, ...]
) -> DevicePart:
    """Compile a program's kernel to PTX, without its host code.

    Raises CompileError with the compiler's words.
    """
    kernels = program.kernels()
    if not kernels:
        raise CompileError(f"{program.name} has no kernel: it has no __global__ function")
    called = re.split(r"[<(]", kernel)[0].rpartition("::")[2].strip()
    every_name = {name for each in kernels for name in each.names}
    names_in = {name for name in every_name if f"{len(name)}{name}" in called}
    roots = [each for each in kernels if each.names & (names_in if called.startswith("_Z") else {called})] or kernels
    guards = program.guards(roots, options)
    passed = (*options, *(f"-D{name}={value}" for name, (value, *_) in guards.items()))
    program.reached = program.reach(roots, set(re.findall(r"[A-Za-z_]\w*", kernel)))
    texts = program.texts()
    every = " ".join(texts.values())
    included = {header for header, _, _ in program.includes()}
    library, unqualified = library_of(every, included, program.by_name, toolkit)
    # The prelude has most of what kernels use of the C++ library.
    standard = {it: text if library else "" for it, text in include.STANDARD.items()} | dict.fromkeys(library, "")
    empty = [*program.missing, *sorted(it for it in included if it.startswith(HOST_LIBRARIES))]
    empty = [it for it in empty if it not in library]
    beside = standard | stand_ins(empty, every, toolkit)
    if library:
        texts = {file: USING.sub(lambda at: at[0].replace("std", "_gm"), text) for file, text in texts.items()}
    whole = texts.pop(program.name)
    # Before the library, whose fabsf() would be another one for it.
    complex_numbers = "#include <cuComplex.h>\n" if "omplex" in every and is_in("cuComplex.h", toolkit) else ""
    names = list[str]()
    while True:
        beside |= texts | {PRELUDE: prelude(library, complex_numbers, unqualified) + _declared(names)}
        try:
            ptx = _compiled(program, whole, kernel, arch, passed, beside, toolkit)
            break
        except CompileError as error:
            if _NEWER.search(str(error)) and not any("-std=" in each for each in passed):
                passed += ("-std=c++20",)
            elif uncalled := _uncalled(program, str(error)) - program.bodiless:
                program.bodiless |= uncalled
                return device_part(program, kernel, arch, options, toolkit)
            elif names or not (names := _unknown(program, str(error))):
                raise CompileError(f"{error}{_notes(program, str(error))}") from None
    absent = [int(number) for number in sorted(set(re.findall(rf"{ABSENT}(\d+)", ptx.text)))]
    first = [next(it for it in program.includes() if it[0] == empty[number]) for number in absent]
    warnings = tuple((f"{header} {_EMPTY}", file, line) for header, file, line in first if not types_of(header))
    warnings += tuple(_moved(program, bool(library)))
    warnings += tuple(
        (f"{name} is not defined, and counts as {value}: the kernel stands in #if {condition}", file, line)
        for name, (value, condition, file, line) in guards.items()
    )
    headers = tuple(f"{header} (line {line})" for header, _, line in first)
    alone = replace(ptx, text=re.sub(rf"^.*\b\w*{ABSENT}\d+.*\n", "", ptx.text, flags=re.MULTILINE))
    return DevicePart(alone, headers + program.dropped(), warnings)


def uncut(
    program: SourceProgram, kernel: str, arch: str, options: tuple[str, ...], toolkit: tuple[str, ...]
) -> nvrtc.Ptx:
    """Compile a file with all that it includes, as headers of device code need it that no parser can cut."""
    whole = program.sources[program.name].text
    library = tuple(it for it in LIBRARY if is_in(f"cuda/std/{it}", toolkit))
    first = {PRELUDE: prelude(library, "#include <cuda.h>\n" if "cuda.h" in program.missing else "")}
    beside = dict.fromkeys(include.STANDARD, "") | stand_ins(program.missing, whole, toolkit) | first
    return _compiled(program, whole, kernel, arch, options, beside, toolkit)


def _compiled(
    program: SourceProgram, whole: str, kernel: str, arch: str, options: tuple[str, ...], beside: dict[str, str],
    toolkit: tuple[str, ...],
) -> nvrtc.Ptx:  # fmt: skip
    folders = (*toolkit, *program.wheels)
    return nvrtc.ptx_alone(whole, program.name, expression(kernel), arch, options, beside, folders, first=PRELUDE)


def expression(kernel: str) -> str:
    """The address of a kernel in C++, of an overload the one with its parameters.

    >>> expression("lab::add<4>"), expression("add(float*, int)")
    ('lab::add<4>', '(void (*)(float*, int))add')
    """
    overload = re.fullmatch(r"([\w:]+)\s*(\(.*\))", kernel)
    return f"(void (*){overload[2]}){overload[1]}" if overload else kernel
