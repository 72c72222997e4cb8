"""A CUDA program's files as declarations: which are device code, and which a kernel reaches.

A kernel keeps the declarations that it reaches by name, and of these no function of the host: nvcc does not let a
kernel call one, so no result depends on it. A type keeps all of its members that take bytes. What is left out becomes
spaces: lines and columns of the compiler's errors are the user's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gemmery_emulator.kernels.declarations import Declaration, Macro, Source, blanked, marks
from gemmery_emulator.kernels.project import INCLUDE, headers_of
from gemmery_emulator.kernels.stand_ins import HOST_LIBRARIES

# Macros of libraries that mark device code, by their names.
_MARKED = re.compile(r"[A-Z_]*(?:DEVICE|GLOBAL|KERNEL|CALLABLE|CCCL|_CG_|CUDA)[A-Z_]*")
UNMARKED = "--device-as-default-execution-space"
_OF_HOST = re.compile(r"\b__host__\b")
_OF_TYPE = re.compile(r"\b__(?:host|device)__\b")
_NUMBER = re.compile(r"(?<!constexpr )\b(const)\s+(?:float|double)\s+\w+\s*=(?!=)")
# A condition that a macro makes true: X, defined(X), X == 2.
_ASKED = re.compile(r"[\s(]*(?:defined\b[\s(]*)?([A-Za-z_]\w*)\b[\s)]*(?:[=>]=\s*(\d+)[\s)]*)?")
_UNNAMED = {"begin", "end", "get"}  # members that the compiler calls, beside constructors and operators
_CONDITIONAL = ("alias_declaration", "type_definition", "enum_specifier", "using_declaration")


@dataclass
class SourceProgram:
    """The texts of a file and of its own headers, by the names in #include."""

    name: str
    sources: dict[str, Source]
    missing: list[str]  # headers without a file
    wheels: tuple[str, ...]  # folders of headers that packages of Python bring
    unmarked: bool = False  # whether functions without a mark are device code
    reached: set[tuple[str, int]] = field(default_factory=set)  # the places of what a kernel reaches
    words: frozenset[str] = frozenset()  # that these use
    bodiless: set[tuple[str, int]] = field(default_factory=set)  # the places of member functions that stay without one

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

    def each(self, owner: Declaration | None = None) -> Iterator[tuple[Declaration, Declaration | None]]:
        """All declarations, also those inside types, each with its type."""
        for each in self.all if owner is None else owner.members:
            yield each, owner
            yield from self.each(each) if each.members else ()

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
        return not (self.missing or of_host or any(self.is_host(*each) for each in self.each()))

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

    @cached_property
    def by_name(self) -> dict[str, list[Declaration]]:
        """The declarations of device code by the names that need them: a member's is its own, or its type where none
        calls it by name, an operator's those of its parameters.
        """
        types = {name for each in self.all if each.kind == "type" for name in each.names}
        by_name: dict[str, list[Declaration]] = {}
        for each in self.all:
            names: frozenset[str] | set[str] = each.names
            if each.kind == "call":
                names = frozenset(name for it in each.source.expansion(each).declarations for name in it.names)
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
        self.words = frozenset(words)
        return reached

    @cached_property
    def virtual(self) -> frozenset[str]:
        """The titles of virtual functions, which others override without a word."""
        return frozenset(each.title for each, owner in self.each() if owner and "virtual" in each.head)

    def _stays(self, member: Declaration, owner: Declaration) -> bool:
        is_virtual = member.kind == "function" and member.title in self.virtual
        if "friend" in member.head and member.kind == "function" and not member.body[1]:  # what is left out has none
            return any(it.kind == "function" and it.names & member.names and not self.is_host(it) for it in self.all)
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
                text = " ".join(expansion.text[it.start : it.stop] for it in some)
                yield each.start, each.stop, text.replace("\n", " ")
        elif owner is None and each.kind == "declaration" and not each.head & self.marked:
            # NVRTC takes it for a variable of the device, whose value may name no other one.
            if const := _NUMBER.search(each.source.words[0].decode(), each.start, each.stop):
                yield *const.span(1), "constexpr"
        elif each.kind == "type" and each.body[1] and not each.source.text[each.body[1] + 1 : each.stop].strip("; \n"):
            # NVRTC refuses the marks of a type that declares no variable, which nvcc does not look at.
            yield from _without(_OF_TYPE, each, each.body[0])
        elif each.kind == "declaration" and "__host__" in each.head:  # of a variable: the same
            yield from _without(_OF_HOST, each, each.stop)
        elif owner and each.kind == "function" and not self._is_device(each):
            yield from _without(_OF_HOST, each, each.body[0] or each.stop)
            if each.body[1] and self.is_host(each, owner):  # it is virtual: its place in the table stays
                yield *each.body, ";"
        elif each.place in self.bodiless:
            yield *each.body, ";"
        for member in each.members if each.place in self.reached else ():
            yield from self._cuts(member, each)

    def includes(self) -> Iterator[tuple[str, str, int]]:
        """The headers that the files include, with the file and line of each #include."""
        for file, source in self.sources.items():
            for start, stop in source.directives:
                if included := INCLUDE.match(source.text[start:stop]):
                    yield included[2], file, source.text.count("\n", 0, start) + 1

    def dropped(self) -> tuple[str, ...]:
        """What no kernel of the file needs, by title and line."""
        reached = self.reach(self.kernels(), set())
        return tuple(
            f"{each.title} (line {each.first})"
            for each in self.sources[self.name].declarations
            if each.place not in reached | self.reached and (each.names or each.kind == "call")
        )


def _without(mark: re.Pattern[str], each: Declaration, stop: int) -> Iterator[tuple[int, int, str]]:
    """The places of a mark between the start of a declaration and another offset, as parts that are left out."""
    yield from ((*word.span(), "") for word in mark.finditer(each.source.words[0].decode(), each.start, stop))


def _owners(function: Declaration) -> frozenset[str]:
    """The names before that of a function: void S::f() {}."""
    return function.names - {function.title.removesuffix("()")}


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
