"""Split the text of a CUDA C++ file into its declarations, without the meaning that only a compiler knows."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<comment>//(?:\\\r?\n|[^\n])*|/\*.*?\*/)
    |(?P<directive>^[ \t]*\#(?:\\\r?\n|/\*.*?\*/|[^\n])*)
    |(?P<text>(?:u8|[uUL])?R"(?P<ends>[^()\\\s]{0,16})\(.*?\)(?P=ends)"|"(?:\\.|[^"\\\n])*")
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.]|'\w)*)
    |(?P<letter>(?:u8|[uUL])?'(?:\\.|[^'\\\n])*')
    |(?P<word>[A-Za-z_]\w*)
    |(?P<sign>::|\S)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_MACRO = re.compile(r"\s*#\s*define\s+(\w+)(\([^)]*\))?(.*)", re.DOTALL)
_WORD = re.compile(r"[A-Za-z_]\w*")
DEVICE = frozenset({"__global__", "__device__", "__constant__", "__shared__", "__managed__"})
# Words before a "(" that do not name what is declared.
_ATTRIBUTES = frozenset(
    {"__launch_bounds__", "__attribute__", "__align__", "alignas", "decltype", "__declspec", "__cluster_dims__"}
    | {"__maxnreg__", "__block_size__", "noexcept", "requires", "explicit", "if", "while", "for", "sizeof"}
    | {"typeof", "__typeof__"}
)
_AGGREGATES = frozenset({"struct", "class", "union", "enum"})
_OPENS, _CLOSES = frozenset("([{"), frozenset(")]}")


class Token(NamedTuple):
    """A word, number, sign, string or directive of a text, and where it stands."""

    kind: str
    value: str
    start: int
    stop: int


@dataclass(frozen=True)
class Macro:
    """The words of a macro's text; `called` if it takes arguments, `whole` if its text is one or more declarations."""

    words: frozenset[str]
    called: bool
    whole: bool


@dataclass(frozen=True)
class Declaration:
    """A function, variable, type or macro call between two offsets of a text, with the words that matter for it."""

    title: str  # "main()", "struct Pair", "table"
    start: int
    stop: int
    first: int  # lines
    last: int
    names: frozenset[str]  # that it declares
    uses: frozenset[str]  # all its words
    head: frozenset[str]  # words outside of its braces
    stays: bool = False  # `using namespace` and the like
    body: tuple[int, int] = (0, 0)  # tokens between the braces of a struct
    scope: str = ""  # the namespaces around it that have a name: "lab::inner"
    is_function: bool = False
    code: tuple[int, int] = (0, 0)  # offsets of what a ";" can replace: a function's body, a named type's members
    file: str = ""

    @property
    def place(self) -> tuple[str, int]:
        """The file and the start."""
        return self.file, self.start

    @property
    def is_member(self) -> bool:
        """Whether it is a function of a struct that stands outside of it: void S::f() {}."""
        return self.is_function and len(self.names) > 1


class Split:
    """The declarations of a text, those in namespaces and `extern "C"` each for itself."""

    def __init__(self, text: str, file: str = "") -> None:
        self.text, self.file = text, file
        self.lines = [at.end() for at in re.finditer("\n", text)]
        every = [Token(at.lastgroup or "", at[0], at.start(), at.end()) for at in _TOKEN.finditer(text)]
        self.directives = [token for token in every if token.kind == "directive"]
        self.tokens = [token for token in every if token.kind not in ("comment", "directive")]
        self.macros: Mapping[str, Macro] = macros_of(self.directives)

    @cached_property
    def declarations(self) -> tuple[Declaration, ...]:
        """The declarations in the order of the text."""
        return tuple(self.within(0, len(self.tokens)))

    def members(self, declaration: Declaration) -> tuple[Declaration, ...]:
        """The declarations inside a struct; none in others."""
        return tuple(self.within(*declaration.body)) if declaration.body[1] else ()

    def line(self, offset: int) -> int:
        """The line of an offset, from 1."""
        return bisect_right(self.lines, offset) + 1

    @cached_property
    def values(self) -> list[str]:
        """The tokens' texts."""
        return [token.value for token in self.tokens]

    def within(self, at: int, stop: int) -> Iterator[Declaration]:
        """The declarations between two tokens."""
        values = self.values
        scopes: list[str] = []
        while at < stop:
            if values[at] in ("}", ";") or (
                values[at] in ("public", "private", "protected") and values[at + 1 : at + 2] == [":"]
            ):
                if values[at] == "}" and scopes:
                    scopes.pop()
                at += 1 if values[at] in ("}", ";") else 2
                continue
            inside = _scope(values, at, stop)
            if inside:
                words = values[at : inside - 1]
                scopes.append("".join(words[words.index("namespace") + 1 :]) if "namespace" in words else "")
                at = inside
                continue
            end, braces = self._end(values, at, stop)
            yield self._declaration(at, end, braces, "::".join(filter(None, scopes)))
            at = end

    def _end(self, values: Sequence[str], at: int, stop: int) -> tuple[int, tuple[int, int]]:
        """The token after a declaration, and the first braces in it that no parentheses surround."""
        depth, braces, opened, assigned = 0, (0, 0), 0, False
        aggregate, start, macro = False, at, self.macros.get(values[at])
        # Whether it begins with a macro that stands for declarations: MAKE(f32).
        is_call = macro is not None and macro.called and macro.whole and values[at + 1] == "("
        while values[start : start + 2] == ["template", "<"]:
            start = min(_after(values, start + 1), stop)
        for place in range(start, stop):
            value = values[place]
            if self.tokens[place].kind not in ("sign", "word"):
                continue
            if value in _OPENS:
                if not depth and value == "{":
                    opened = place
                    aggregate = aggregate or _is_aggregate(values[start:place])
                depth += 1
            elif value in _CLOSES:
                depth -= 1
                if depth < 0:
                    return max(place, at + 1), braces
                after = values[place + 1] if place + 1 < stop else ""
                if not depth and value == "}":
                    braces = braces if braces[1] else (opened + 1, place)
                    if not assigned and not aggregate and after not in {*",{=.)", ";"}:
                        return place + 1, braces
                elif not depth and value == ")" and after not in ("{", ";") and is_call:
                    return place + 1, braces
            elif not depth and value == ";":
                return place + 1, braces
            elif not depth and value == "=":
                assigned = assigned or "operator" not in values[max(at, place - 2) : place]
        return stop, braces

    def _declaration(self, at: int, end: int, braces: tuple[int, int], scope: str) -> Declaration:
        tokens = self.tokens[at:end]
        head = [token for place, token in enumerate(tokens, at) if not braces[0] <= place < braces[1]]
        title, names = _title_and_names(head, self.tokens[slice(*braces)], self.macros)
        words = [token.value for token in head if token.kind == "word"]
        is_type = bool(_AGGREGATES & set(words)) and "()" not in title
        is_function = title.endswith("()") and title[:-2] not in self.macros.keys() - device_words(self.macros)
        is_named = is_type and names and words[:1] != ["typedef"] and self.values[braces[1] + 1 : end] == [";"]
        code = (0, 0)
        if braces[1] and (is_function or is_named):
            code = self._cut(at, end, braces), tokens[-1].stop if is_function else self.tokens[braces[1]].stop
        start, stop = tokens[0].start, tokens[-1].stop
        place = title, start, stop, self.line(start), self.line(stop - 1)
        uses = frozenset(token.value for token in tokens if token.kind == "word")
        stays = words[:2] == ["using", "namespace"] or words[:1] == ["namespace"]
        body = braces if is_type and "enum" not in words else (0, 0)
        return Declaration(*place, names, uses, frozenset(words), stays, body, scope, is_function, code, self.file)

    def _cut(self, at: int, end: int, braces: tuple[int, int]) -> int:
        """The offset where a definition's body begins, or the bases or initialisers before it."""
        while self.values[at : at + 2] == ["template", "<"]:
            at = _after(self.values, at + 1)
        depth = 0
        for place in range(at, end):
            value = self.values[place]
            if not depth and value in (":", "{"):
                return self.tokens[place].start
            depth += (value in _OPENS) - (value in _CLOSES)
        return self.tokens[braces[0] - 1].start


def macros_of(directives: Sequence[Token]) -> dict[str, Macro]:
    """The macros that directives define, by name; of several definitions all words."""
    macros: dict[str, Macro] = {}
    for directive in directives:
        defined = _MACRO.match(directive.value)
        if not defined:
            continue
        name, parameters, text = defined[1], defined[2], defined[3].rstrip()
        words = frozenset(_WORD.findall(text))
        whole = text.endswith(("}", ";", ")")) or not text
        known = macros.get(name)
        macros[name] = Macro(words | known.words if known else words, parameters is not None, whole)
    return macros


def device_words(macros: Mapping[str, Macro], marks: frozenset[str] = DEVICE) -> frozenset[str]:
    """The marks of device code, and the macros that contain one."""
    words = set(marks)
    while further := {name for name, macro in macros.items() if macro.words & words} - words:
        words |= further
    return frozenset(words)


def blanked(
    text: str, parts: Sequence[tuple[int, int]], directives: Sequence[Token], ends: Collection[int] = ()
) -> str:
    """A text with spaces in place of some parts, but not of line ends and directives, and ";" at the offsets `ends`."""
    pieces, done = [], 0
    for start, stop in sorted(parts):
        pieces.append(text[done:start])
        inside = [(token.start, token.stop) for token in directives if start <= token.start < stop]
        for before, after in zip(
            [start, *(end for _, end in inside)], [*(begin for begin, _ in inside), stop], strict=True
        ):
            pieces.append(re.sub(r"[^\n]", " ", text[before:after]))
            pieces.extend(text[begin:end] for begin, end in inside if begin == after)
        done = stop
    letters = "".join([*pieces, text[done:]])
    for place in ends:
        letters = f"{letters[:place]};{letters[place + 1 :]}"
    return letters


def _scope(values: Sequence[str], at: int, stop: int) -> int:
    """The token after `namespace name {` or `extern "C" {`; 0 if no scope opens here."""
    place = at + 1 if values[at] == "inline" else at
    if values[place : place + 1] == ["namespace"]:
        place += 1
        while place < stop and (values[place] == "::" or _WORD.fullmatch(values[place])):
            place += 1
        return place + 1 if place < stop and values[place] == "{" else 0
    if values[at] == "extern" and at + 2 < stop and values[at + 1][0] == '"' and values[at + 2] == "{":
        return at + 3
    return 0


def _is_aggregate(before: Sequence[str]) -> bool:
    """Whether a brace after these words begins a type and not the body of a function."""
    ends_as_one = bool(before) and before[-1] in (")", "const", "override", "noexcept")
    words = [value if _WORD.fullmatch(value) else "" for value in before]
    return bool(_AGGREGATES & set(before)) and not (ends_as_one and _call(before, words) >= 0)


def _title_and_names(
    head: Sequence[Token], body: Sequence[Token], macros: Mapping[str, Macro]
) -> tuple[str, frozenset[str]]:
    """The title of a declaration, and all names that it declares, rather too many than too few."""
    start = 0
    while [token.value for token in head[start : start + 2]] == ["template", "<"]:
        start = _after([token.value for token in head], start + 1)
    head = head[start:] or head
    values = [token.value for token in head]
    words = [token.value if token.kind == "word" else "" for token in head]
    if "operator" in words:
        return "operator()", frozenset({"operator"})
    kind = next((value for value in words if value in _AGGREGATES), "")
    typedef = words[0] in ("typedef", "using")
    call = -1 if typedef else _call(values, words)
    if call >= 0 and not (kind and "{" in values and values.index("{") < call):
        called = {words[call]}
        if words[call] in macros:
            called |= {word for word in words[call + 1 :] if word}
        place = call
        while place >= 2 and values[place - 1] == "::":
            called.add(words[place := place - 2])
        return f"{words[call]}()", frozenset(called)
    names = []
    for place, word in enumerate(words):
        after = values[place + 1] if place + 1 < len(values) else ";"
        before = values[place - 1] if place else ""
        if word and (after in {*"=[;,{:)"} or before in _AGGREGATES or (before == "*" and typedef)):
            names.append(word)
    if kind == "enum":
        names += [token.value for token in body if token.kind == "word"]
    names = [name for name in names if name not in ("final", "const", "alignas", "__align__", *_AGGREGATES)]
    first = names[0] if names else words[0] or values[0]
    return (f"{kind} {first}" if kind and not typedef else first), frozenset(names)


def _call(values: Sequence[str], words: Sequence[str]) -> int:
    """The place of the word that a function's parentheses follow; -1 for none."""
    depth = 0
    for place, value in enumerate(values):
        if value == "=" and not depth:
            return -1
        if value in _OPENS:
            if value == "(" and not depth and place:
                name = place - 1
                if values[name] == ">":
                    name = _before_angle(values, name)
                # Neither a pointer to a function, nor the type of one among the arguments of a template.
                after = values[_after(values, place) :][:1]
                if name >= 0 and words[name] and words[name] not in _ATTRIBUTES and after not in (["("], ["["], [">"]):
                    return name
            if value == "{":
                return -1
            depth += 1
        elif value in _CLOSES:
            depth -= 1
    return -1


def _after(values: Sequence[str], at: int) -> int:
    """The place after the bracket that closes the one at a place; an angle bracket in parentheses compares."""
    depth = angles = 0
    for place in range(at, len(values)):
        value = values[place]
        depth += (value in _OPENS) - (value in _CLOSES)
        angles += 0 if depth else (value == "<") - (value == ">")
        if not angles and not depth:
            return place + 1
    return len(values)


def _before_angle(values: Sequence[str], at: int) -> int:
    depth = 0
    for place in range(at, -1, -1):
        depth += (values[place] == ">") - (values[place] == "<")
        if not depth:
            return place - 1
    return -1
