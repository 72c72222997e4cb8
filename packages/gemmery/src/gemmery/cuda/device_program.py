"""The declarations of a program that its kernels need, and what of them is left out where the compiler has an error."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gemmery.cuda.declarations import Declaration, Macro, Split, blanked, device_words
from gemmery.errors import CompileError

INCLUDE = re.compile(r"^\s*#\s*include\s*([<\"])([^>\"]+)[>\"]", re.MULTILINE)
_ERROR = re.compile(r"(?:^|(?<=: ))([^\s()]+)\((\d+)\): (?:catastrophic )?error:? ?(.*)", re.MULTILINE)
_WITHIN = re.compile(r"at line (\d+)(?: of (\S+))?")
_OF_LIBRARY = re.compile(r'namespace "std" has no member|"(numeric_limits|is_same|enable_if|conditional)\w*" is undef')
_NAME = re.compile(r"\b[A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)*(?:\s*<)?")
_MISSING = re.compile(r'cannot open source file "([^"]+)"')
_UNKNOWN = re.compile(r"is undefined|has no member|qualified name|must be a class or namespace|is not a template")
_MARKED = re.compile(r"[A-Z_]*(?:DEVICE|GLOBAL|KERNEL|CALLABLE|CCCL|_CG_|CUDA)[A-Z_]*")  # macros of libraries
_NO_MEMBER = {"using", "typedef", "friend", "static", "static_assert"}  # what takes no bytes of a struct
_FUNCTION = re.compile(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)")
UNMARKED = "--device-as-default-execution-space"
_HOST = (
    "it is a function of the host, which nvcc refuses there: mark it __device__, or take unmarked functions as device "
    f"code with the option {UNMARKED}"
)
ABSENT = "gemmery_absent_"  # a variable that stays in the PTX


@dataclass
class DeviceProgram:
    """The texts of a file and of its own headers, by the names in #include, and what is left out of them."""

    name: str
    splits: dict[str, Split]
    empty: list[str]  # headers without a file
    wheels: tuple[str, ...]  # folders of headers that packages of Python bring
    arguments: frozenset[str] = frozenset()  # words of the kernel's name: what only the arguments of its template name
    unmarked: bool = False  # whether functions without a mark are device code
    broken: dict[tuple[str, int], bool] = field(default_factory=dict)  # by file and start: whether no head is left
    causes: dict[tuple[str, int], str] = field(default_factory=dict)  # the first error of each
    unknown: list[str] = field(default_factory=list)  # types that are only declared, as "std::mutex" or "List<"
    library: bool = False  # whether a kernel needs more of the C++ library than the prelude has

    @property
    def macros(self) -> Mapping[str, Macro]:
        """The macros of all files."""
        return self.splits[self.name].macros

    @cached_property
    def marked(self) -> frozenset[str]:
        """The words that mark device code."""
        return device_words(self.macros)

    @cached_property
    def kernel_marks(self) -> frozenset[str]:
        """The words that mark kernels."""
        return device_words(self.macros, frozenset({"__global__"}))

    def is_host(self, each: Declaration) -> bool:
        """Whether a definition is a function of the host, which nvcc does not let a kernel call."""
        marks = self.marked | {"constexpr", "consteval"}
        is_function = each.is_function and each.code[1] > 0 and not self.unmarked
        return is_function and not each.head & marks and not any(map(_MARKED.fullmatch, each.head))

    def reached(self) -> list[Declaration]:
        """The declarations that its kernels need."""
        every = [each for split in self.splits.values() for each in split.declarations]
        every = [each for each in every if not self.broken.get(each.place)]
        by_name: dict[str, list[Declaration]] = {}
        for each in every:
            for name in each.names:
                by_name.setdefault(name, []).append(each)
        reached = {
            each.place: each
            for each in every
            if each.stays or each.head & self.kernel_marks or ("operator" in each.names and each.head & self.marked)
        }
        followed: set[str] = set()
        words = (
            {word for each in reached.values() for word in each.uses} | {"operator"} & by_name.keys() | self.arguments
        )
        while words - followed:
            word = (words - followed).pop()
            followed.add(word)
            if word in self.macros:
                words |= self.macros[word].words
            for each in by_name.get(word, ()):
                if each.place not in reached:
                    reached[each.place] = each
                    words |= each.head if self.is_host(each) else each.uses
        return list(reached.values())

    def texts(self) -> dict[str, str]:
        """The text of each file with spaces in place of what is left out."""
        reached = self.reached()
        stays, texts = {each.place for each in reached}, {}
        for file, split in self.splits.items():
            parts = [(each.start, each.stop) for each in split.declarations if each.place not in stays]
            inside = [cut for each in reached if each.file == file for cut in self._cuts(each)]
            ends = [start for start, _, has_end in inside if has_end]
            texts[file] = blanked(split.text, parts + [cut[:2] for cut in inside], split.directives, ends)
        return texts

    def _cuts(self, each: Declaration) -> Iterator[tuple[int, int, bool]]:
        """The parts of a declaration that are left out, and whether a ";" takes their place."""
        is_host, split = self.is_host(each), self.splits[each.file]
        if self.broken.get(each.place) or (is_host and each.is_member):
            yield each.start, each.stop, False
        elif is_host or each.place in self.broken:
            words = re.finditer(r"\b__host__\b", split.text[each.start : each.code[0]] if is_host else "")
            yield from ((each.start + word.start(), each.start + word.end(), False) for word in words)
            yield *each.code, True
        else:
            for member in split.members(each):
                yield from self._cuts(member)

    def leave_out(self, errors: str) -> bool:
        """Leave out what has errors: a function's body, then all of it; of a type all members, whose places depend on
        each other. A type that is not known is declared. False if there is nothing more.
        """
        if not self.library and _OF_LIBRARY.search(errors):
            self.library = True
            return True
        before = len(self.empty), len(self.unknown), dict(self.broken)
        self.empty += [name for name in _MISSING.findall(errors) if name not in self.empty]
        if "/thrust/" in errors:  # it is for host code: its headers do not compile here
            headers = (header for header, _, _ in self._includes() if header.startswith("thrust/"))
            self.empty += [header for header in headers if header not in self.empty]
        reached, declared = self.reached(), set[tuple[str, int]]()
        for file, line, column, words in self._places(errors):
            split = self.splits[file]
            at = [0, *split.lines][line - 1] + column if column >= 0 else -1
            for chain in self._chains([each for each in reached if each.file == file], line, at):
                if chain[-1].place not in declared and self._leave(chain, at, words):
                    declared.add(chain[-1].place)  # its other errors may follow from that
        return (len(self.empty), len(self.unknown), self.broken) != before

    def _chains(
        self, some: Iterable[Declaration], line: int, at: int, outer: tuple[Declaration, ...] = ()
    ) -> Iterator[tuple[Declaration, ...]]:
        """The declarations at an error, each after those around it; by the line if the offset is not known."""
        here = [it for it in some if it.first <= line <= it.last and not self.broken.get(it.place)]
        exact = [it for it in here if it.start <= at < it.stop]
        for each in exact or (here if at < 0 or not outer else ()):
            inner = list(self._chains(self.splits[each.file].members(each), line, at, (*outer, each)))
            yield from inner or [(*outer, each)]

    def _leave(self, chain: tuple[Declaration, ...], at: int, words: str) -> bool:
        """Leave out what an error is in; True if a type is declared instead."""
        each, outer = chain[-1], chain[:-1]
        if self.is_host(each) and "referenced but not defined" in words:
            words = f"the kernel calls {each.title} ({each.file}, line {each.first}): {_HOST}"
        if each.title.removesuffix("()") in self.macros.keys() - self.marked and not outer:
            for it in self.splits[each.file].declarations:
                if it.title == each.title:  # calls of one macro fail alike
                    self._break(it, words, whole=True)
            return False
        in_body = bool(each.code[1]) and (at < 0 or each.code[0] <= at)
        is_alone = not each.code[1] and (each.is_function or bool(each.head & {"typedef", "using"}))
        declares = bool(outer) or is_alone
        name = self._type_at(each.file, at) if declares and not in_body and _UNKNOWN.search(words) else ""
        if name and name not in self.unknown:
            self.unknown.append(name)
            return True
        if each.is_function and not (in_body and each.place not in self.broken):
            is_needed = bool(outer) and bool(each.head & (self.marked | {"virtual"}))
            self._break_type(outer, words) if is_needed else self._break(each, words, whole=True)
        elif each.is_function or each.head & _NO_MEMBER or not (outer or each.body[1]):
            self._break(each, words, whole=each.is_member)
        else:
            self._break_type(chain if each.body[1] else outer, words)
        return False

    def _break(self, each: Declaration, words: str, *, whole: bool = False) -> None:
        self.broken[each.place] = whole or each.place in self.broken or not each.code[1]
        self.causes.setdefault(each.place, words)

    def _break_type(self, chain: tuple[Declaration, ...], words: str) -> None:
        """Leave out the members of the innermost type that has a name: of those around it, it is a member."""
        types = [each for each in chain if each.code[1]] or chain[:1]
        where = f"{types[-1].title} (line {types[-1].first}) is left out, because a member does not compile"
        self._break(types[-1], words if words.startswith(types[-1].title) else f"{where}: {words}")

    def _type_at(self, file: str, at: int) -> str:
        """The name at an offset with the names around it, and with "<" if it is that of a template."""
        text = self.splits[file].text
        names = _NAME.finditer(text, text.rfind("\n", 0, max(at, 0)) + 1)
        name = next((name for name in names if name.end() > at), None)
        return "".join(name[0].split()) if name and name.start() <= at else ""

    def declared(self) -> str:
        """Declarations of the types that are not known: a pointer to one has 8 bytes."""
        texts = []
        for name in self.unknown:
            *scopes, last = name.removesuffix("<").split("::")
            begin = "".join(f"namespace {scope} {{ " for scope in scopes)
            texts.append(f"{begin}{'template <class...> ' * name.endswith('<')}struct {last};{' }' * len(scopes)}\n")
        return "".join(texts)

    def _includes(self) -> Iterator[tuple[str, str, int]]:
        """The headers that the files include, with the file and line of each #include."""
        for file, split in self.splits.items():
            for directive in split.directives:
                if included := INCLUDE.match(directive.value):
                    yield included[2], file, split.line(directive.start)

    def _places(self, errors: str) -> Iterator[tuple[str, int, int, str]]:
        """The file, line, column (-1 for none) and words of each error, or of the line that led to one in a header."""
        matches = list(_ERROR.finditer(errors))
        stops = [*(match.start() for match in matches[1:]), len(errors)]
        for match, stop in zip(matches, stops, strict=True):
            part = errors[match.start() : stop]
            caret = re.search(r"^  ([ \t]*)\^", part, re.MULTILINE)
            places = [(match[1], int(match[2]), len(caret[1]) if caret else -1)]
            places += [(at[2] or match[1], int(at[1]), -1) for at in _WITHIN.finditer(part)]
            for file, line, column in places:
                known = file if file in self.splits else os.path.basename(file)
                if known in self.splits:
                    yield known, line, column, part.strip()
                    break

    def all(self, some: Iterable[Declaration] | None = None) -> Iterator[Declaration]:
        """All declarations, or some, and those inside types."""
        every = [each for split in self.splits.values() for each in split.declarations]
        pending = every if some is None else list(some)
        while pending:
            each = pending.pop()
            yield each
            pending += self.splits[each.file].members(each)

    @property
    def errors(self) -> dict[str, str]:
        """The first error of each name that is left out, with no other declaration of that name."""
        whole = {name for it in self.reached() if it.place not in self.broken for name in it.names}
        left_out = [(it, self.causes[it.place]) for it in self.all() if it.place in self.causes]
        return {name: words for it, words in left_out for name in it.names - whole}

    def cause(self, name: str) -> str:
        """The error in what a name needs: of a function or type that was left out, not that its name is unknown."""
        errors, cause = dict(self.errors), ""
        types = {name for each in self.all() if each.body[1] for name in each.names & errors.keys()}
        while name in errors:
            cause = errors.pop(name)
            unknown = re.search(r'identifier "(?:\w+::)*(\w+)', cause)
            needed = {word for each in self.all() if name in each.names for word in each.uses & types & errors.keys()}
            name = unknown[1] if unknown and unknown[1] in errors else min(needed, default="")
        return cause

    def dropped(self) -> tuple[str, ...]:
        """What of the file itself is left out, by title and line."""
        stays = {each.place for each in self.reached() if not self.is_host(each)}
        return tuple(
            f"{each.title} (line {each.first})"
            for each in self.splits[self.name].declarations
            if each.place not in stays and each.names and not each.title.startswith("static_assert")
        )

    def uncalled(self, ptx: str, kernel: str) -> None:
        """Raise CompileError if a kernel calls a function that has no body here: the host's, or one that is broken."""
        parts = re.split(r"^(?=(?:\.(?:visible|weak|extern) )*\.(?:entry|func)\b)", ptx, flags=re.MULTILINE)
        bodies = {match[1]: part for part in parts if (match := _FUNCTION.search(part))}
        pending, called = [kernel] if kernel in bodies else [], set[str]()
        while pending:
            called.add(symbol := pending.pop())
            if "{" in bodies[symbol]:
                pending += (set(re.findall(r"\w+", bodies[symbol])) & bodies.keys()) - called
        without = [symbol for symbol in called if bodies[symbol].startswith(".extern")]
        for each in self.all():
            name = each.title.removesuffix("()")
            is_one = any(f"{len(name)}{name}" in symbol or symbol == name for symbol in without)
            if is_one and (each.place in self.causes or self.is_host(each)):
                words = _HOST if self.is_host(each) else self.cause(name) or self.causes[each.place]
                raise CompileError(f"the kernel calls {each.title} ({each.file}, line {each.first}): {words}")

    def absent(self, ptx: str) -> Iterator[tuple[str, str, int]]:
        """The headers without a file that a compilation included, with the file and line of each #include."""
        for number in sorted(set(map(int, re.findall(rf"{ABSENT}(\d+)", ptx)))):
            yield next(include for include in self._includes() if include[0] == self.empty[number])

    def replaced(self) -> Iterator[tuple[str, str, int]]:
        """The functions of device code that are left out though another has their name: words, file and line."""
        titles = {it.title for it in self.all(self.reached()) if it.is_function}
        for each in self.all():
            if self.broken.get(each.place) and each.title in titles and each.head & self.marked:
                words = self.causes[each.place]
                yield f"this {each.title} is left out, and calls of it take another one: {words}", each.file, each.first
