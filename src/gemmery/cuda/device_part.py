"""Compile the device part of a whole program: what its kernels need, without main(), host functions and their headers.

A compiler of device code stops at std::cout. So the text is split into declarations, those that no kernel reaches by
name are left out, and so is each in which the compiler still has an error. Lines keep their numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from gemmery.cuda import include, nvrtc
from gemmery.cuda.declarations import Declaration, Macro, Split, blanked, device_words, macros_of
from gemmery.errors import CompileError

_INCLUDE = re.compile(r"\s*#\s*include\s*([<\"])([^>\"]+)[>\"]")
_ERROR = re.compile(r"(?:^|(?<=: ))([^\s()]+)\((\d+)\): (?:catastrophic )?error:? ?(.*)", re.MULTILINE)
_WITHIN = re.compile(r"at line (\d+)(?: of (\S+))?")
_OF_LIBRARY = re.compile(r'namespace "std" has no member|"(numeric_limits|is_same|enable_if|conditional)\w*" is undef')
_LIBRARY = ("algorithm", "array", "functional", "limits", "numeric", "tuple", "type_traits", "utility")
_MISSING = re.compile(r'cannot open source file "([^"]+)"')
_BESIDE = ("", "include", "inc", "common", "Common", "utils", "common/inc")  # folders of a project's headers
_UP = 5  # folders above a file in which they are looked for
_ROUNDS = 16
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


_TYPES = {
    ("cublas", "cudnn", "torch/", "ATen/", "c10/", "nccl"): "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n",
    ("cufft",): "typedef float2 cufftComplex; typedef double2 cufftDoubleComplex; typedef float cufftReal;\n",
}  # of the headers of libraries, by the beginnings of their names


@dataclass(frozen=True)
class DevicePart:
    """The PTX of a program's kernels, and what was left out of its file: "main() (line 40)"."""

    ptx: nvrtc.Ptx
    left_out: tuple[str, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)  # of what does not compile, by name


@dataclass
class DeviceProgram:
    """The texts of a file and of its own headers, by the names in #include, and what is left out of them."""

    name: str
    splits: dict[str, Split]
    empty: list[str]  # headers without a file
    wheels: tuple[str, ...]  # folders of headers that packages of Python bring
    broken: set[tuple[str, int]] = field(default_factory=set)  # declarations with an error: file, and where they start
    words: dict[str, str] = field(default_factory=dict)  # names in those -> the first error
    library: bool = False  # whether a kernel needs more of the C++ library than the prelude has

    @property
    def macros(self) -> Mapping[str, Macro]:
        """The macros of all files."""
        return self.splits[self.name].macros

    def reached(self) -> dict[str, list[Declaration]]:
        """The declarations of each file that its kernels need."""
        every = [(file, each) for file, split in self.splits.items() for each in split.declarations]
        every = [(file, each) for file, each in every if (file, each.start) not in self.broken]
        by_name: dict[str, list[tuple[str, Declaration]]] = {}
        for file, each in every:
            for name in each.names:
                by_name.setdefault(name, []).append((file, each))
        kernels = device_words(self.macros, frozenset({"__global__"}))
        marked = device_words(self.macros)
        reached = {
            (file, each.start): each
            for file, each in every
            if each.stays or each.head & kernels or ("operator" in each.names and each.head & marked)
        }
        followed: set[str] = set()
        words = {word for each in reached.values() for word in each.uses} | {"operator"} & by_name.keys()
        while words - followed:
            word = (words - followed).pop()
            followed.add(word)
            if word in self.macros:
                words |= self.macros[word].words
            for file, each in by_name.get(word, ()):
                if (file, each.start) not in reached:
                    reached[file, each.start] = each
                    words |= each.uses
        return {file: [each for (at, _), each in reached.items() if at == file] for file in self.splits}

    def texts(self) -> dict[str, str]:
        """The text of each file with spaces in place of what is left out."""
        reached = self.reached()
        texts = {}
        for file, split in self.splits.items():
            stays = {each.start for each in reached[file]}
            parts = [(each.start, each.stop) for each in split.declarations if each.start not in stays]
            inside = [
                (member.start, member.stop)
                for each in reached[file]
                if each.body[1]
                for member in split.members(each)
                if (file, member.start) in self.broken
            ]
            texts[file] = blanked(split.text, parts + inside, split.directives)
        return texts

    def leave_out(self, errors: str) -> bool:
        """Leave out what has errors, a struct's member rather than the struct; False if there is nothing more."""
        if not self.library and _OF_LIBRARY.search(errors):
            self.library = True
            return True
        reached, before = self.reached(), len(self.broken) + len(self.empty)
        self.empty += [name for name in _MISSING.findall(errors) if name not in self.empty]
        if "/thrust/" in errors:  # it is for host code: its headers do not compile here
            self.empty += [name for name in self._included("thrust/") if name not in self.empty]
        for file, line, words in self._places(errors):
            for each in reached.get(file, ()):
                if not each.first <= line <= each.last:
                    continue
                members = self.splits[file].members(each) if each.body[1] else ()
                inner = [it for it in members if it.first <= line <= it.last and (file, it.start) not in self.broken]
                if each.title.removesuffix("()") in self.macros.keys() - device_words(self.macros):
                    inner = [it for it in reached[file] if it.title == each.title]  # calls of one macro fail alike
                for it in inner or [each]:
                    self.broken.add((file, it.start))
                    self.words |= {name: words for name in it.names if it is each and name not in self.words}
        return len(self.broken) + len(self.empty) > before

    def _included(self, start: str) -> Iterator[str]:
        """The headers of a library that the files include."""
        for split in self.splits.values():
            includes = (_INCLUDE.match(directive.value) for directive in split.directives)
            yield from (each[2] for each in includes if each and each[2].startswith(start))

    def _places(self, errors: str) -> Iterator[tuple[str, int, str]]:
        """The file, line and words of each error, and of the line of the program that led to one in a header."""
        starts = [*(match.start() for match in _ERROR.finditer(errors)), len(errors)]
        for start, stop in pairwise(starts):
            part = errors[start:stop]
            match = _ERROR.match(part)
            if match is None:
                continue
            places = [(match[1], int(match[2]))]
            places += [(at[2] or match[1], int(at[1])) for at in _WITHIN.finditer(part)]
            for file, line in places:
                known = file if file in self.splits else os.path.basename(file)
                if known in self.splits:
                    yield known, line, part.strip()
                    break

    @property
    def errors(self) -> dict[str, str]:
        """The first error of each name that is left out, with no other declaration of that name."""
        reached = {name for each in self.reached().values() for it in each for name in it.names}
        return {name: words for name, words in self.words.items() if name not in reached}

    def dropped(self) -> tuple[str, ...]:
        """What of the file itself is left out, by title and line."""
        split, reached = self.splits[self.name], self.reached()[self.name]
        starts = {each.start for each in reached}
        return tuple(
            f"{each.title} (line {each.first})"
            for each in split.declarations
            if each.start not in starts and each.names and not each.title.startswith("static_assert")
        )


def device_part(
    text: str, name: str, kernel: str, arch: str, options: tuple[str, ...] = (), folder: Path | None = None
) -> DevicePart:
    """Compile a program's kernel to PTX, without its host code; `folder` is that of its file.

    Raises CompileError with the compiler's words where they concern the kernel, or where nothing more can be left out.
    """
    toolkit = include.folders()
    program = program_of(text, name, options, folder, toolkit)
    if not any(each.head & device_words(program.macros, frozenset({"__global__"})) for each in _all(program)):
        raise CompileError(f"{name} has no kernel: it has no __global__ function")
    function = re.match(r"(?:\w+::)*(\w+)", kernel)
    toolkit += program.wheels
    for _ in range(_ROUNDS):
        texts = program.texts()
        whole = texts.pop(name)
        beside = _standard(program.library) | {header: _stand_in(header) for header in program.empty}
        beside |= texts | {PRELUDE: _prelude(program.library)}
        try:
            ptx = nvrtc.ptx_alone(whole, name, kernel, arch, options, beside, toolkit, first=PRELUDE)
        except CompileError as error:
            changed = program.leave_out(str(error))
            errors = program.errors
            if changed and (function is None or function[1] not in errors):
                continue
            words = _first_cause(errors, function[1] if function else "")
            text = f"kernel {kernel} of {name} did not compile for {arch}: {words}" if words else str(error)
            raise CompileError(f"{text}{_package(program)}") from None
        return DevicePart(ptx, program.dropped(), program.errors)
    raise CompileError(f"{name}: after {_ROUNDS} attempts the compiler still has errors{_package(program)}")


def _first_cause(errors: Mapping[str, str], name: str) -> str:
    """The error in what a name needs: of a function that was left out, not that its name is then unknown."""
    cause = ""
    while name in errors and errors[name] != cause:
        cause = errors[name]
        unknown = re.search(r'"(?:\w+::)*(\w+)(?:<.*>)?" is undefined', cause)
        name = unknown[1] if unknown else ""
    return cause


def _all(program: DeviceProgram) -> Iterator[Declaration]:
    for split in program.splits.values():
        yield from split.declarations


def program_of(
    text: str, name: str, options: tuple[str, ...], folder: Path | None, toolkit: tuple[str, ...]
) -> DeviceProgram:
    """Read a file's own headers, and those of their own."""
    folders = [Path(flag[2:]) for flag in options if flag.startswith("-I")] + _searched(folder)
    splits, empty, wheels = {name: Split(text)}, list[str](), set[str]()
    pending: list[tuple[str, Path | None]] = [(name, folder)]
    while pending:
        file, beside = pending.pop()
        for directive in splits[file].directives:
            included = _INCLUDE.match(directive.value)
            if not included or included[2] in splits or included[2] in empty:
                continue
            header = included[2]
            path = _first(header, ([beside] if beside else []) + folders)
            if header in include.STANDARD or (path is None and _is_in(header, toolkit)):
                continue
            if path is None and include.wheel(header):
                wheels.add(include.wheel(header))
                continue
            if path is None:
                empty.append(header)
                continue
            splits[header] = Split(path.read_text(encoding="utf-8", errors="replace"))
            pending.append((header, path.parent))
    macros = macros_of([directive for split in splits.values() for directive in split.directives])
    for split in splits.values():
        split.macros = macros
    return DeviceProgram(name, splits, empty, tuple(sorted(wheels)))


def _first(header: str, folders: Iterable[Path]) -> Path | None:
    return next((path for folder in folders if (path := folder / header).is_file()), None)


def _searched(folder: Path | None) -> list[Path]:
    """The folders of a project's headers: beside its file, and in those above it."""
    if folder is None:
        return []
    above = [folder.resolve(), *folder.resolve().parents][:_UP]
    return [path for parent in above for part in _BESIDE if (path := parent / part).is_dir()]


def _is_in(header: str, folders: tuple[str, ...]) -> bool:
    return any(os.path.exists(os.path.join(folder, header)) for folder in folders)


def _standard(whole: bool) -> dict[str, str]:
    """Headers of the C++ library: empty ones, because the prelude has most of what kernels use, or the `whole` ones."""
    return include.STANDARD if whole else dict.fromkeys(include.STANDARD, "")


@lru_cache
def _prelude(whole: bool) -> str:
    """What is included first; the `whole` library takes a second to compile."""
    library = "".join(f"#include <{name}>\n" for name in _LIBRARY) if whole else ""
    return files(__package__).joinpath("prelude.h").read_text(encoding="utf-8") + library


def _stand_in(header: str) -> str:
    """The text in place of a header that is not here: those of libraries bring types that kernels use."""
    return next((text for starts, text in _TYPES.items() if header.startswith(starts)), "")


def _package(program: DeviceProgram) -> str:
    """What to install for headers that are missing."""
    needed = {
        package: header for header in program.empty for start, package in _PACKAGES.items() if header.startswith(start)
    }
    lines = (f"\n{header} is not here: pip install {package}" for package, header in needed.items())
    return "".join(lines)
