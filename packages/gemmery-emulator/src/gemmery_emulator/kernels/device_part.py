"""Compile the device part of a whole program: what its kernel needs, without main(), host functions and their headers.

A compiler of device code stops at std::cout. So a kernel keeps the declarations that it reaches by name, and of these
no function of the host: nvcc does not let a kernel call one, so no result depends on it. A type keeps all of its
members that take bytes. What is left out becomes spaces: lines and columns of the compiler's errors are the user's.
A pointer needs no type: names that the compiler does not know outside of functions are declared, and it runs again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from gemmery.cuda import include, nvrtc
from gemmery.errors import CompileError
from gemmery_emulator.kernels.declarations import Declaration, Macro, Source, blanked, marks
from gemmery_emulator.kernels.project import INCLUDE, headers_of, is_in
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

# Macros of libraries that mark device code, by their names.
_MARKED = re.compile(r"[A-Z_]*(?:DEVICE|GLOBAL|KERNEL|CALLABLE|CCCL|_CG_|CUDA)[A-Z_]*")
# Types of the C++ library whose members stand elsewhere than in the host's.
_MOVED = re.compile(r"\bstd\s*::\s*(complex|tuple|bitset|optional|variant)\b")
_WITHOUT_MASK = re.compile(r"\b(__(?:shfl(?:_up|_down|_xor)?|any|all|ballot))\s*\(")
_EMPTY = "is not here and counts as empty: in #if, the macros that it defines are not defined"
# Headers of host code that some device code includes; their packages bring them.
_PACKAGES = {
    "cutlass/": "nvidia-cutlass",
    "cute/": "nvidia-cutlass",
    "curand": "nvidia-curand",
    "cufft": "nvidia-cufft",
    "cub/": "nvidia-cuda-cccl",
    "thrust/": "nvidia-cuda-cccl",
}
UNMARKED = "--device-as-default-execution-space"
_HOST = (
    "it is a function of the host, which nvcc refuses there: mark it __device__, or take unmarked functions as device "
    f"code with the option {UNMARKED}"
)
HOST_CODE = (
    "the kernel needs what only host code has: put that under #ifndef __CUDACC_RTC__, or pass the PTX that `nvcc -ptx` "
    "makes"
)
_ERROR = re.compile(r"(?:^|: )([^\s()]+)\((\d+)\): (?:catastrophic )?error:? ?(.*)\n.*\n  ([ \t]*)\^", re.MULTILINE)
_NEWER = re.compile(r"error: \"auto\" is not allowed here|\"(?:concept|requires|consteval)\"")  # what C++20 has
# The bytes of containers of the host, by 8, as GCC's library has them: members of types that kernels take.
_WORDS = {
    "vector": 3, "string": 4, "list": 3, "deque": 10, "queue": 10, "stack": 10, "map": 6, "set": 6, "multimap": 6,
    "unordered_map": 7, "unordered_set": 7, "function": 4, "mutex": 5, "thread": 1, "unique_ptr": 1, "shared_ptr": 2,
}  # fmt: skip
_OF_TYPE = re.compile(r"\b__(?:host|device)__\b")
_NUMBER = re.compile(r"(?<!constexpr )\b(const)\s+(?:float|double)\s+\w+\s*=(?!=)")
# A condition that a macro makes true: X, defined(X), X == 2.
_ASKED = re.compile(r"[\s(]*(?:defined\b[\s(]*)?([A-Za-z_]\w*)\b[\s)]*(?:[=>]=\s*(\d+)[\s)]*)?")
_UNKNOWN = re.compile(
    r"is undefined|has no member|qualified name|must be a class or namespace|is not a template|must be a namespace name"
)
_NOT_THERE = re.compile(r'identifier "(?:\w+::)*(\w+)" is undefined|has no member "(\w+)"')
_NAME = re.compile(r"\b[A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)*(?:\s*<)?")
_UNNAMED = {"begin", "end", "get"}  # members that the compiler calls, beside constructors and operators
_CONDITIONAL = ("alias_declaration", "type_definition", "enum_specifier", "using_declaration")


@dataclass(frozen=True)
class DevicePart:
    """The PTX of a program's kernels, and what was left out of its file: "main() (line 40)"."""

    ptx: nvrtc.Ptx
    left_out: tuple[str, ...] = ()
    warnings: tuple[tuple[str, str, int], ...] = ()  # what may change the result: words, and the file and line


@dataclass
class SourceProgram:
    """The texts of a file and of its own headers, by the names in #include."""

    name: str
    sources: dict[str, Source]
    missing: list[str]  # headers without a file
    wheels: tuple[str, ...]  # folders of headers that packages of Python bring
    unmarked: bool = False  # whether functions without a mark are device code
    reached: set[tuple[str, int]] = field(default_factory=set)  # the places of what a kernel reaches

    @property
    def macros(self) -> Mapping[str, Macro]:
        """The macros of all files."""
        return self.sources[self.name].macros

    @cached_property
    def fragments(self) -> dict[str, set[tuple[str, int]]]:
        """The headers that are included between the braces of a type or a function, of which all is reached, with the
        places of their #include.
        """
        places: dict[str, set[tuple[str, int]]] = {}
        for source in self.sources.values():
            for start, stop in source.directives:
                included = INCLUDE.match(source.text[start:stop])
                inside = any(each.body[0] < start < each.body[1] for each in source.declarations)
                if included and included[2] in self.sources and inside:
                    places.setdefault(included[2], set()).add((source.file, start))
        return places

    @cached_property
    def marked(self) -> frozenset[str]:
        """The words that mark device code."""
        return marks(self.macros)

    @cached_property
    def kernel_marks(self) -> frozenset[str]:
        """The words that mark kernels."""
        return marks(self.macros, frozenset({"__global__"}))

    @cached_property
    def all(self) -> tuple[Declaration, ...]:
        """The declarations of all files, without those inside types."""
        return tuple(each for source in self.sources.values() for each in source.declarations)

    @cached_property
    def of_types(self) -> frozenset[tuple[str, str]]:
        """The type and the name of member functions with a body outside of it, of which one has a mark."""
        inside = ((name, it) for each in self.all for name in each.names for it in each.members if not it.body[1])
        outside = ((name, it) for it in self.all if it.kind == "function" for name in _owners(it))
        return frozenset(
            (name, it.title) for name, it in (*inside, *outside) if it.kind == "function" and self._is_device(it)
        )

    @cached_property
    def calls(self) -> frozenset[str]:
        """The macros with arguments that do not stand for attributes."""
        return frozenset(name for name, it in self.macros.items() if it.parameters and re.search(r"[{};]", it.text))

    def _each(self, owner: Declaration | None = None) -> Iterator[tuple[Declaration, Declaration | None]]:
        """All declarations, also those inside types, each with its type."""
        for each in self.all if owner is None else owner.members:
            yield each, owner
            yield from self._each(each) if each.members else ()

    def _is_device(self, each: Declaration) -> bool:
        known = self.marked | {"constexpr", "consteval"}
        return any(it in known or (it not in self.macros and _MARKED.fullmatch(it)) for it in each.head)

    def is_host(self, each: Declaration, owner: Declaration | None = None) -> bool:
        """Whether a declaration is a function of the host, which nvcc does not let a kernel call."""
        if each.kind == "call":
            return all(self.is_host(it) for it in each.source.expansion(each).declarations)
        if each.kind != "function" or each.is_pure or self.unmarked or self._is_device(each):
            return False
        typeless = each.node.child_by_field_name("type") is None and b"operator" not in (each.node.text or b"")
        if (owner and typeless and not each.names & owner.names) or each.head & self.calls:
            return False  # a macro, which may stand for members of any kind
        owners = _owners(each) if owner is None else () if each.body[1] else owner.names
        return not any((name, each.title) in self.of_types for name in owners)

    @property
    def is_device_code(self) -> bool:
        """Whether nothing is to be left out of it."""
        of_host = any(header.startswith(HOST_LIBRARIES) for header, _, _ in self.includes())
        return not (self.missing or of_host or any(self.is_host(*each) for each in self._each()))

    def kernels(self, file: str = "") -> list[Declaration]:
        """The kernels of all files or of one, those that macros make, too."""
        marked = (each for each in self.expanded if each.head & self.kernel_marks)  # what does not parse, too
        some = (each for each in marked if not file or each.source.file == file)
        return [each for each in some if all(words != "0" for words, _ in each.source.conditions(each.start))]

    def guards(self, kernels: Sequence[Declaration], options: Sequence[str]) -> dict[str, tuple[str, str, str, int]]:
        """The macros that nobody defines and that #if around some kernels ask for: the value, the condition, and the
        file and line.
        """
        known = {"CUDA_VERSION", "CUDART_VERSION"}
        known |= {match[1] for it in options if (match := re.match(r"(?:-D|--define-macro=)\s*(\w+)", it))}
        needed_macros: dict[str, tuple[str, str, str, int]] = {}
        for each in kernels:
            for condition, line in each.source.conditions(each.start):
                for term in condition.split("&&"):
                    ways = [it for way in term.split("||") if (it := _ASKED.fullmatch(way))]
                    names = {way[1] for way in ways}
                    if not names or names & (known | self.macros.keys()) or any(it.startswith("__") for it in names):
                        continue
                    needed_macros.setdefault(ways[0][1], (ways[0][2] or "1", condition, each.source.file, line))
        return needed_macros

    @cached_property
    def expanded(self) -> tuple[Declaration, ...]:
        """The declarations of all files, and in place of calls of macros what these declare."""
        some = list[Declaration]()
        for each in self.all:
            some += each.source.expansion(each).declarations if each.kind == "call" else (each,)
        return tuple(some)

    def _calls(self, each: Declaration) -> set[str]:
        """The names that a call of a macro declares."""
        return {name for it in each.source.expansion(each).declarations for name in it.names}

    @cached_property
    def by_name(self) -> dict[str, list[Declaration]]:
        """The declarations of device code by the names that need them: a member's is its own, or its type where none
        calls it by name, an operator's those of its parameters.
        """
        types = {name for each in self.all if each.kind == "type" for name in each.names}
        by_name: dict[str, list[Declaration]] = {}
        for each in self.all:
            names = self._calls(each) if each.kind == "call" else each.names
            if "operator" in names:
                names = each.head & types or names
            elif each.kind == "function":
                of_types, own = _owners(each) & types, each.title.removesuffix("()")
                is_called = own not in of_types | _UNNAMED and each.title not in self.virtual
                names = {own, f".{own}"} if of_types and is_called else of_types or names
            for name in names if not self.is_host(each) else ():
                by_name.setdefault(name, []).append(each)
        return by_name

    def reach(self, roots: Sequence[Declaration], words: set[str]) -> set[tuple[str, int]]:
        """The places of the declarations that some of them need, and the names in `words`."""
        reached, followed, words = set[tuple[str, int]](), set[str](), words | {"operator"}
        pending = [*roots, *(each for each in self.all if each.kind == "using")]
        optional: dict[str, list[Declaration]] = {}
        for name in self.fragments:
            words |= set(re.findall(r"[A-Za-z_]\w*", self.sources[name].text))
        while pending or words - followed:
            for each in pending:
                if each.place in reached:
                    continue
                reached.add(each.place)
                if not each.members:
                    words |= each.source.uses(each)
                    continue
                for start, stop in ((each.start, each.body[0]), (each.body[1], each.stop)):
                    words |= each.source.uses(each, start, stop)
                pending += [it for it in each.members if self._stays(it, each)]
                for it in filter(self.is_optional, each.members):
                    for name in (word for each in it.names for word in (each, f".{each}")):
                        optional.setdefault(name, []).append(it)
                        followed.discard(name)
            rest = words - followed
            followed |= rest
            for word in rest & self.macros.keys():
                words |= set(re.findall(r"[A-Za-z_]\w*", self.macros[word].text))
            pending = [each for word in rest for each in (*self.by_name.get(word, ()), *optional.get(word, ()))]
        return reached

    @cached_property
    def virtual(self) -> frozenset[str]:
        """The titles of virtual functions, which others override without a word."""
        return frozenset(each.title for each, owner in self._each() if owner and "virtual" in each.head)

    def _stays(self, member: Declaration, owner: Declaration) -> bool:
        is_virtual = member.kind == "function" and member.title in self.virtual
        return not self.is_optional(member) and (is_virtual or not self.is_host(member, owner))

    def is_optional(self, member: Declaration) -> bool:
        """Whether a member takes no bytes of a type and no part in its calls, so that only its name needs it."""
        if member.kind == "function" or member.names & _UNNAMED:
            return False
        is_type = bool(member.body[1]) and bool(member.names) and f" {min(member.names)}" in member.title
        return member.kind in _CONDITIONAL or "static" in member.head or (is_type and len(member.names) == 1)

    def texts(self) -> dict[str, str]:
        """The text of each file with spaces in place of what is left out."""
        texts = {}
        for file, source in self.sources.items():
            if file in self.fragments:
                texts[file] = source.text
                continue
            parts = [part for each in source.declarations for part in self._cuts(each)]
            also = {start for each in self.fragments.values() for it, start in each if it == file}
            texts[file] = blanked(source, parts, also)
        return texts

    def _cuts(self, each: Declaration, owner: Declaration | None = None) -> Iterator[tuple[int, int, str]]:
        """The parts of a declaration that are left out, with the text in their place."""
        if each.place not in self.reached:
            yield each.start, each.stop, ""
        elif each.kind == "call":
            expansion = each.source.expansion(each)
            some = [it for it in expansion.declarations if not self.is_host(it, owner)]
            if len(some) < len(expansion.declarations):  # it declares functions of the host, too
                yield (
                    each.start,
                    each.stop,
                    " ".join(expansion.text[it.start : it.stop] for it in some).replace("\n", " "),
                )
        elif owner is None and each.kind == "declaration" and not each.head & self.marked:
            # NVRTC takes it for a variable of the device, whose value may name no other one.
            if const := _NUMBER.search(each.source.words[0].decode(), each.start, each.stop):
                yield *const.span(1), "constexpr"
        elif each.kind == "type" and each.body[1] and not each.source.text[each.body[1] + 1 : each.stop].strip("; \n"):
            # NVRTC refuses the marks of a type that declares no variable, which nvcc does not look at.
            for mark in _OF_TYPE.finditer(each.source.words[0].decode(), each.start, each.body[0]):
                yield *mark.span(), ""
        elif self.is_host(each, owner) and each.body[1]:  # it is virtual: its place in the table stays
            yield *each.body, ";"
        for member in each.members if each.place in self.reached else ():
            yield from self._cuts(member, each)

    def includes(self) -> Iterator[tuple[str, str, int]]:
        """The headers that the files include, with the file and line of each #include."""
        for file, source in self.sources.items():
            for start, stop in source.directives:
                if included := INCLUDE.match(source.text[start:stop]):
                    yield included[2], file, source.text.count("\n", 0, start) + 1

    def unknown(self, errors: str) -> list[str]:
        """The names outside of functions that the compiler does not know: "std::mutex", or "List<" of a template."""
        names = list[str]()
        for file, line, words, column in _ERROR.findall(errors):
            source = self.sources.get(file) or self.sources.get(os.path.basename(file))
            if source is None or not _UNKNOWN.search(words):
                continue
            begin = sum(map(len, source.text.splitlines(keepends=True)[: int(line) - 1]))
            at = begin + len(column)
            name = next((it for it in _NAME.finditer(source.text, begin) if it.end() > at), None)
            if (
                name
                and name.start() <= at
                and name[0] not in ("concept", "requires")
                and not any(_is_in_body(each, at) for each in source.declarations)
            ):
                is_namespace = re.search(r"\bnamespace\s+(\w+\s*=\s*)?$", source.text[begin : name.start()])
                names += [f"namespace {name[0].strip()}" if is_namespace else "".join(name[0].split())]
        return list(dict.fromkeys(names))

    def notes(self, errors: str) -> str:
        """What explains the compiler's errors: functions of the host, and headers that are not here."""
        names = {name for places in _NOT_THERE.findall(errors) for name in places if name}
        lines = [
            f"the kernel calls {each.title} ({each.source.file}, line {each.first}): {_HOST}"
            for each, owner in self._each()
            if each.kind == "function" and each.title[:-2] in names and self.is_host(each, owner)
        ]
        packages = {
            package: header
            for header in self.missing
            for start, package in _PACKAGES.items()
            if header.startswith(start)
        }
        lines += [f"{header} is not here: pip install {package}" for package, header in packages.items()]
        others = [it for it in self.missing if not OF_HOST.fullmatch(it) and it not in packages.values()]
        if 'namespace "std" has no member' in errors:
            lines.append(HOST_CODE)
        if others and _UNKNOWN.search(errors):
            lines.append(f"not here, and empty: {', '.join(others)}; name their folders with options=('-IFOLDER',)")
        return "".join(f"\n{line}" for line in lines)

    def moved(self, library: bool) -> Iterator[tuple[str, str, int]]:
        """Types of the C++ library that are members and have other bytes here, and shuffles and votes that nvcc
        refuses: words, and the file and line.
        """
        for each, owner in (it for it in self._each() if it[0].place in self.reached and not it[0].members):
            text = each.source.text[each.start : each.stop]
            of_type = owner.title if library and owner and each.kind == "field_declaration" else ""
            for name in _MOVED.findall(text) if of_type else ():
                words = f"std::{name} may have another alignment and order of members than the host's library"
                yield f"{words}: pass the values of {of_type} by themselves", each.source.file, each.first
            for name in set(_WITHOUT_MASK.findall(text)) - self.by_name.keys() - self.macros.keys():
                words = f"nvcc refuses {name}() for sm_70 and newer, and here the lanes that are active take part"
                yield f"{words}: call {name}_sync() with a mask of lanes", each.source.file, each.first

    def dropped(self) -> tuple[str, ...]:
        """What no kernel of the file needs, by title and line."""
        reached = self.reach(self.kernels(), set())
        return tuple(
            f"{each.title} (line {each.first})"
            for each in self.sources[self.name].declarations
            if each.place not in reached | self.reached and (each.names or each.kind == "call")
        )


def _owners(function: Declaration) -> frozenset[str]:
    """The names before that of a function: void S::f() {}."""
    return function.names - {function.title.removesuffix("()")}


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
    symbols = {f"{len(name)}{name}": name for each in kernels for name in each.names}
    called_names = (
        {name for symbol, name in symbols.items() if symbol in called} if called.startswith("_Z") else {called}
    )
    roots = [each for each in kernels if each.names & called_names] or kernels
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
            ptx = nvrtc.ptx_alone(
                whole,
                program.name,
                expression(kernel),
                arch,
                passed,
                beside,
                (*toolkit, *program.wheels),
                first=PRELUDE,
            )
        except CompileError as error:
            if _NEWER.search(str(error)) and not any("-std=" in each for each in passed):
                passed += ("-std=c++20",)
                continue
            unknown = [] if names else program.unknown(str(error))
            if unknown:
                names = unknown
                continue
            raise CompileError(f"{error}{program.notes(str(error))}") from None
        break
    absent = [int(number) for number in sorted(set(re.findall(rf"{ABSENT}(\d+)", ptx.text)))]
    first = [next(it for it in program.includes() if it[0] == empty[number]) for number in absent]
    warnings = tuple((f"{header} {_EMPTY}", file, line) for header, file, line in first if not types_of(header))
    warnings += tuple(program.moved(bool(library)))
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
    beside = dict.fromkeys(include.STANDARD, "") | stand_ins(program.missing, whole, toolkit)
    beside |= {PRELUDE: prelude(library, "#include <cuda.h>\n" if "cuda.h" in program.missing else "")}
    return nvrtc.ptx_alone(
        whole, program.name, expression(kernel), arch, options, beside, (*toolkit, *program.wheels), first=PRELUDE
    )


def expression(kernel: str) -> str:
    """The address of a kernel in C++, of an overload the one with its parameters.

    >>> expression("lab::add<4>"), expression("add(float*, int)")
    ('lab::add<4>', '(void (*)(float*, int))add')
    """
    overload = re.fullmatch(r"([\w:]+)\s*(\(.*\))", kernel)
    return f"(void (*){overload[2]}){overload[1]}" if overload else kernel


def program_of(
    text: str, name: str, options: tuple[str, ...], folder: Path | None, toolkit: tuple[str, ...]
) -> SourceProgram:
    """Read a file's own headers, and those of their own."""
    texts, empty, wheels = headers_of(text, options, folder, toolkit)
    macros = dict[str, Macro]()
    sources = {file: Source(whole, file) for file, whole in {name: text, **texts}.items()}
    for source in sources.values():
        macros |= source.macros
    for source in sources.values():
        source.macros = macros
    return SourceProgram(name, sources, empty, wheels, UNMARKED in options)
