"""The declarations of a CUDA C++ file by a parser that needs no headers (tree-sitter), with the words that each uses.

What the grammar does not know is replaced by spaces before it parses: directives, all but one of the branches of #if
that open different brackets, attributes, and macros that stand for attributes. So offsets stay those of the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import tree_sitter_cuda
from tree_sitter import Language, Node, Parser, Query, QueryCursor

LANGUAGE = Language(tree_sitter_cuda.language())
_TOKEN = re.compile(
    r"""(?P<comment>//(?:\\\r?\n|[^\n])*|/\*.*?\*/)
    |(?P<directive>^[ \t]*\#(?:\\\r?\n|/\*.*?\*/|[^\n])*)
    |(?P<text>(?:u8|[uUL])?R"(?P<ends>[^()\\\s]{0,16})\(.*?\)(?P=ends)"|"(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])*')
    |(?P<bracket>[][(){}])""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_DEFINE = re.compile(r"\s*#\s*define\s+(\w+)(\([^)]*\))?(.*)", re.DOTALL)
WORD = re.compile(r"[A-Za-z_]\w*")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\\\r?\n", re.DOTALL)
_ARGUMENTS = r"\s*\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)"
_WITH_ARGUMENTS = (
    *("__launch_bounds__", "__align__", "__attribute__", "alignas", "__declspec", "__cluster_dims__", "__maxnreg__"),
    "__block_size__",
)
DEVICE = frozenset({"__global__", "__device__", "__constant__", "__shared__", "__managed__"})
_PLAIN = DEVICE | {
    *("__host__", "__grid_constant__", "__forceinline__", "__noinline__", "__inline__", "__inline", "__forceinline"),
    *("__restrict__", "__restrict", "__extension__", "__volatile__", "__const__"),
}
_IN_ATTRIBUTES = frozenset({*_PLAIN, *_WITH_ARGUMENTS, "inline", "static", "extern", "C", "always_inline", "noinline"})
_IN_ATTRIBUTES |= {"constexpr", "nodiscard", "maybe_unused"}
# Macros of libraries that stand for attributes, by their names.
_OF_LIBRARY = re.compile(r"\b[A-Z_]*(?:DEVICE|GLOBAL|INLINE|HOST|EXPORT|API|CALLABLE|UNROLL)[A-Z_]*\b(?=\s+[A-Za-z_~])")
_WORDS = Query(LANGUAGE, "[(identifier) (type_identifier) (namespace_identifier) (field_identifier)] @word")
_LOCAL = Query(
    LANGUAGE,
    """(parameter_declaration declarator: (identifier) @name)
    (optional_parameter_declaration declarator: (identifier) @name)
    (declaration declarator: (identifier) @name) (init_declarator declarator: (identifier) @name)
    (pointer_declarator declarator: (identifier) @name) (array_declarator declarator: (identifier) @name)
    (reference_declarator (identifier) @name)
    (type_parameter_declaration (type_identifier) @type) (variadic_type_parameter_declaration (_) @type)
    (optional_type_parameter_declaration name: (type_identifier) @type)""",
)
_NAMES = Query(
    LANGUAGE,
    """(declaration declarator: (identifier) @name) (init_declarator declarator: (identifier) @name)
    (pointer_declarator declarator: (_) @name) (array_declarator declarator: (_) @name)
    (reference_declarator (identifier) @name) (function_declarator declarator: (_) @name)
    (field_declaration declarator: (field_identifier) @name)
    (type_definition declarator: (type_identifier) @name) (alias_declaration name: (_) @name)
    (enumerator name: (identifier) @name) (namespace_alias_definition name: (_) @name)
    (using_declaration (_) @name) (concept_definition name: (identifier) @name)
    [(struct_specifier name: (_) @name) (class_specifier name: (_) @name) (union_specifier name: (_) @name)
     (enum_specifier name: (_) @name)]""",
)
_TYPES = ("struct_specifier", "class_specifier", "union_specifier")
_BODIES = ("compound_statement", "field_declaration_list", "enumerator_list", "initializer_list", "try_statement")
_HEAD = 400  # letters before a brace that tell what it opens
_SCOPE = re.compile(rb'(?:\b(?:inline\s+)?namespace(?:\s+([\w:]+))?|\bextern\s*"C(?:\+\+)?")\s*$')
_OF_OPERATOR = re.compile(rb"(\boperator\s*[^\s\w(<]{1,2})<>")  # of a friend: an instance
_EDGE = re.compile(
    r"(?:(?:inline\s+)?namespace\b[\s\w:]*\{\s*|\}\s*|extern\s*\"C\"\s*\{)+"
)  # macros for braces of namespaces
_BODY = re.compile(
    rb"(?:\)(?:\s|const\b|volatile\b|noexcept\b|override\b|final\b|mutable\b|try\b|&)*(?:->[^;{}()]*)?|\})$"
)


class Macro(NamedTuple):
    """A macro's parameters, None for one that takes no arguments, and its text."""

    parameters: tuple[str, ...] | None
    text: str

    def expanded(self, arguments: str) -> str:
        """Its text for arguments, "a, b"; a comma inside brackets counts as one between arguments."""
        parts = [part.strip() for part in arguments.split(",")]
        values = dict(zip(self.parameters or (), parts, strict=False)) | {"__VA_ARGS__": ",".join(parts)}
        text = WORD.sub(lambda word: values.get(word[0], word[0]), self.text.replace("\\\n", "\n"))
        return re.sub(r"\s*##\s*", "", text)


@dataclass(frozen=True)
class Declaration:
    """A function, variable, type or macro call between two offsets of a text."""

    title: str  # "main()", "struct Pair", "table"
    kind: str  # "function", "type", "call" of a macro, "using" of a namespace, or the parser's name
    start: int
    stop: int
    first: int  # line
    names: frozenset[str]  # that it declares
    head: frozenset[str]  # words outside of its braces
    body: tuple[int, int]  # offsets of a function's body or of what is between the braces of a type; (0, 0) for none
    scope: str  # the namespaces around it that have a name: "lab::inner"
    node: Node
    source: Source
    members: tuple[Declaration, ...] = ()
    is_pure: bool = False  # whether it has no body, and `= default` or `= delete`

    @property
    def place(self) -> tuple[str, int]:
        """The file and the start."""
        return self.source.file, self.start


class Source:
    """A text with its declarations, those in namespaces and `extern "C"` each for itself."""

    def __init__(self, text: str, file: str = "", macros: Mapping[str, Macro] | None = None) -> None:
        self.text, self.file = text, file
        self.tokens = [(at.lastgroup or "", at.start(), at.end()) for at in _TOKEN.finditer(text)]
        self.fixed = list[tuple[int, int]]()  # what is never left out: directives, and the braces of namespaces
        self.directives = [(start, stop) for kind, start, stop in self.tokens if kind == "directive"]
        self.fixed += self.directives
        self.bare = bytearray()  # the text without comments, directives and the braces of namespaces
        self.macros = macros_of(self) if macros is None else macros

    @cached_property
    def words(self) -> tuple[bytes, bytes]:
        """The text in one byte for each letter, with spaces for directives and comments; and for attributes, too."""
        plain = bytearray(self.text.encode("ascii", "replace"))
        for kind, start, stop in self.tokens:
            if kind in ("directive", "comment"):
                _blank(plain, start, stop)
        for start, stop in self._other_branches():
            _blank(plain, start, stop)
        if edges := [name for name, it in self.macros.items() if it.parameters is None and _EDGE.fullmatch(it.text)]:
            for edge in re.finditer(rf"\b(?:{'|'.join(edges)})\b".encode(), bytes(plain)):
                self.fixed.append(edge.span())
                _blank(plain, *edge.span())
        pattern, _ = _patterns(tuple(sorted(self.macros.items())))
        known = _OF_OPERATOR.sub(rb"\1  ", bytes(plain).replace(b"__typeof__", b"decltype  "))
        parsed = bytearray(pattern.sub(lambda part: re.sub(rb"[^\n]", b" ", part[0]), known))
        return bytes(plain), bytes(parsed)

    @cached_property
    def outline(self) -> tuple[Node, list[tuple[int, int, str]]]:
        """The parser's tree of what stands outside of functions and namespaces, where it finds its way even if their
        text has errors; and the namespaces, from brace to brace, with their names.
        """
        plain, parsed = self.words
        self.bare = bytearray(plain)
        text, scopes = bytearray(parsed), list[tuple[int, int, str]]()
        opened: list[tuple[int, str, int]] = []  # an offset, what begins there, and the offset of the words before
        for place in (start for kind, start, _ in self.tokens if kind == "bracket" and parsed[start] != 32):
            sign = chr(parsed[place])
            if sign in "([{":
                before = parsed[max(0, place - _HEAD) : place].rstrip()
                kind, begin = "other", place
                if sign == "{" and all(each in ("scope", "type") for _, each, _ in opened):
                    statement = re.split(rb"[;{}]", before)[-1]
                    if scope := _SCOPE.search(before):
                        kind, begin = (
                            "scope",
                            place - (len(before) - scope.start()) - (place - max(0, place - _HEAD) - len(before)),
                        )
                    elif _BODY.search(before):
                        kind = "body"
                    elif re.search(rb"\b(struct|class|union)\b", statement) and not re.search(
                        rb"=|\benum\b", statement
                    ):
                        kind = "type"
                opened.append((place, kind, begin))
            elif opened:
                start, kind, begin = opened.pop()
                if kind == "body":
                    _blank(text, start + 1, place)
                elif kind == "scope":
                    name = _SCOPE.search(parsed[begin:start])
                    scopes.append((start, place, ((name and name[1]) or b"").decode()))
                    self.fixed += [(begin, start + 1), (place, place + 1)]
                    for each in (text, self.bare):
                        _blank(each, begin, start + 1)
                        _blank(each, place, place + 1)
        self.fixed.sort()
        _, calls = _patterns(tuple(sorted(self.macros.items())))
        for call in calls.finditer(bytes(text)) if calls else ():  # of a macro that stands for declarations
            _blank(text, *call.span(1))
            text[call.end() - 1 : call.end()] = b";"
        return Parser(LANGUAGE).parse(bytes(text)).root_node, sorted(scopes)

    def _other_branches(self) -> Iterator[tuple[int, int]]:
        """The branches of #if after the first, if one of them opens another number of brackets than it closes."""
        groups: list[list[tuple[int, int]]] = []  # of each #if the offset and depth where a branch begins
        depth = 0
        for kind, start, stop in self.tokens:
            if kind == "bracket":
                depth += 1 if self.text[start] in "([{" else -1
            elif kind == "directive":
                word = re.match(r"[ \t]*#\s*(\w*)", self.text[start:stop])
                if word and word[1] in ("if", "ifdef", "ifndef"):
                    groups.append([(stop, depth)])
                elif word and groups and word[1] in ("else", "elif", "endif"):
                    groups[-1].append((start, depth))
                    begin = groups[-1][0][1]
                    if word[1] != "endif":
                        groups[-1].append((stop, begin))
                        depth = begin
                        continue
                    *_, after = group = groups.pop()
                    if len(group) > 2 and any(end != begin for _, end in group[1::2]):
                        depth = group[1][1]
                        yield group[1][0], after[0]

    def conditions(self, at: int) -> list[tuple[str, int]]:
        """The conditions of the #if, #ifdef and #elif around an offset, with their lines."""
        opened = list[tuple[str, int]]()
        for start, stop in self.directives:
            word = re.match(r"\s*#\s*(\w+)(.*)", _COMMENT.sub(" ", self.text[start:stop]), re.DOTALL)
            if start > at or word is None:
                continue
            condition = {"ifdef": f"defined({word[2].strip()})", "ifndef": f"!defined({word[2].strip()})"}
            if word[1].startswith("if"):
                opened.append((condition.get(word[1], word[2].strip()), start))
            elif word[1] in ("elif", "else") and opened:
                before = opened[-1][0]
                negated = before[1:] if re.fullmatch(r"!\W*(?:defined\W*)?\w+\W*", before) else f"!({before})"
                opened[-1] = (word[2].strip() if word[1] == "elif" else negated, opened[-1][1])
            elif word[1] == "endif" and opened:
                opened.pop()
        return [(condition, self.text.count("\n", 0, start) + 1) for condition, start in opened]

    @cached_property
    def root(self) -> Node:
        """The parser's tree."""
        return Parser(LANGUAGE).parse(self.words[1]).root_node

    @cached_property
    def declarations(self) -> tuple[Declaration, ...]:
        """The declarations in the order of the text."""
        return tuple(self._within(self.outline[0], 0))

    def _within(self, container: Node, at: int) -> Iterator[Declaration]:
        pending: Node | None = None  # what the parser could not read, up to the declaration after it
        for node in container.children:
            if node.type in ("{", "}", ";", ":", "access_specifier", "comment"):
                if node.type != "comment" and pending is None:
                    at = node.end_byte
                continue
            if node.type == "ERROR" and node.next_sibling is not None and node.next_sibling.type != "}":
                pending = pending or node
                continue
            after, stop = node.next_sibling, node.end_byte
            stop = after.end_byte if after is not None and after.type == ";" else stop
            yield self._declaration(node, at, stop)
            at, pending = stop, None

    def _declaration(self, node: Node, at: int, stop: int) -> Declaration:
        plain, _ = self.words
        start = at + len(self.bare[at:stop]) - len(self.bare[at:stop].lstrip())
        scope = "::".join(name for begin, end, name in self.outline[1] if begin < start < end and name)
        inner = node
        while inner.type in ("template_declaration", "linkage_specification", "friend_declaration"):
            inner = inner.named_children[-1]
        body = _body(inner)
        span = (body.start_byte, body.end_byte) if body is not None else (0, 0)
        before, behind = (plain[start : span[0]], plain[span[1] : stop]) if body else (plain[start:stop], b"")
        head = frozenset(WORD.findall((before + b" " + behind).decode()))
        kind, names, title, members = inner.type, list[str](), "", tuple[Declaration, ...]()
        if (
            kind == "expression_statement"
            and inner.named_children
            and inner.named_children[0].type in ("call_expression", "identifier")
        ):
            called = WORD.match(plain[inner.start_byte : stop].decode())
            title, kind = f"{called[0] if called else ''}()", "call"
            names = WORD.findall(plain[inner.start_byte : stop].decode())[1:]
        elif inner.type == "using_declaration" and b" namespace " in before:
            kind, title = "using", "using namespace"
        else:
            names = self._names(inner, body)
            title = names[0] if names else (min(head) if head else node.type)
            function = function_of(inner)
            if function is not None:
                macro, typed = self.macros.get(title), inner.child_by_field_name("type") is not None
                kind = "function" if typed or b"->" not in before else "guide"
                kind = "call" if macro and macro.parameters is not None and not typed else kind
                title = f"{title}()"
            elif body is not None and body.type == "field_declaration_list":
                kind = "type"
                members = tuple(self._within(body, body.start_byte))
            if inner.type in (*_TYPES, "enum_specifier"):
                title = f"{inner.children[0].type} {title}"
        pure = kind == "function" and body is None and bool(re.search(rb"=\s*(default|delete)\s*;?\s*$", before))
        line = self.text.count("\n", 0, start) + 1
        return Declaration(
            title, kind, start, stop, line, frozenset(names), head, span, scope, inner, self, members, pure
        )

    def _names(self, node: Node, body: Node | None) -> list[str]:
        """The names that a declaration declares, the one in its title first."""
        names: list[tuple[int, str]] = []
        function = function_of(node)
        if function is not None:
            declared = function.child_by_field_name("declarator")
            text = (declared.text or b"").decode() if declared else ""
            words = WORD.findall(re.sub(r"<.*>", "", text, flags=re.DOTALL))
            return ["operator"] if "operator" in words or function.type == "operator_cast" else words[::-1]
        for captured in QueryCursor(_NAMES).captures(node).get("name", ()):
            inside = body is not None and body.start_byte <= captured.start_byte < body.end_byte
            if (
                captured.text
                and not (inside and not _is_in(captured, "enumerator"))
                and not _is_in(captured, "parameter_list", node)
            ):
                word = WORD.findall(captured.text.decode().partition("<")[0])
                names += [(captured.start_byte, word[-1])] if word else []
        ordered = [name for _, name in sorted(names)]
        return ordered[::-1] if node.type == "type_definition" else ordered

    def expansion(self, call: Declaration) -> Source:
        """What a call of a macro stands for."""
        text = self.words[0][call.start : call.stop].decode()
        called, inside = call.title.removesuffix("()"), text.partition("(")[2].rpartition(")")[0]
        return Source(self.macros[called].expanded(inside) if called in self.macros else "", self.file, self.macros)

    def uses(self, node: Declaration, start: int = 0, stop: int = 0) -> set[str]:
        """The words of a declaration, or of a part, that may name others, members as ".name": not its own variables."""
        start, stop = (start, stop) if stop else (node.start, node.stop)
        every, own = QueryCursor(_WORDS), QueryCursor(_LOCAL)
        every.set_byte_range(start, stop)
        own.set_byte_range(start, stop)
        is_function = node.kind in ("function", "guide")
        local = own.captures(self.root) if is_function else dict[str, list[Node]]()
        hidden = {kind: {each.text for each in some} for kind, some in local.items()}
        plain, parsed = self.words
        words = set[str]()
        for each in every.captures(self.root).get("word", ()):
            text = (each.text or b"").decode()
            kind = {"identifier": "name", "type_identifier": "type"}.get(each.type, "")
            if each.type == "field_identifier" and text not in self.macros:
                of_call = each.parent is not None and each.parent.type in ("field_expression", "template_method")
                words |= {f".{text}"} if of_call else set()
            elif each.text not in hidden.get(kind, ()) or parsed[each.start_byte - 2 : each.start_byte] == b"::":
                words.add(text)
        for word in re.finditer(rb"[A-Za-z_]\w*", plain[start:stop]):  # of attributes
            if parsed[start + word.start()] == 32:
                words.add(word[0].decode())
        return words


def _is_in(node: Node | None, kind: str, outer: Node | None = None) -> bool:
    while node is not None and node != outer:
        if node.type == kind:
            return True
        node = node.parent if outer is not None or node.parent is None or node.parent.type == kind else None
    return False


def function_of(node: Node) -> Node | None:
    """The declarator of a function, None for other declarations."""
    declarator = node.child_by_field_name("declarator")
    while declarator is not None and declarator.type in ("pointer_declarator", "reference_declarator"):
        declarator = declarator.child_by_field_name("declarator") or declarator.named_children[-1]
    if declarator is None or declarator.type not in ("function_declarator", "operator_cast"):
        return None
    inner = declarator.child_by_field_name("declarator")
    return None if inner is not None and inner.type == "parenthesized_declarator" else declarator


def _body(node: Node) -> Node | None:
    """The braces of a definition, those of a type also where it is the beginning of a typedef or a variable."""
    for child in (node, node.child_by_field_name("type")):
        if child is not None:
            for inner in child.children:
                if inner.type in _BODIES:
                    return inner
    return None


def _blank(text: bytearray, start: int, stop: int) -> None:
    text[start:stop] = re.sub(rb"[^\n]", b" ", text[start:stop])


@lru_cache(maxsize=16)
def _patterns(macros: tuple[tuple[str, Macro], ...]) -> tuple[re.Pattern[bytes], re.Pattern[bytes] | None]:
    """What attributes match, those that macros stand for too, and calls of macros that no semicolon follows."""
    plain, called, size = set(_PLAIN), set(_WITH_ARGUMENTS), 0
    while len(plain) + len(called) > size:  # a macro may name another
        size = len(plain) + len(called)
        for name, macro in macros:
            words = set(re.findall(r"\w+", re.sub(r"\(.*\)", "", macro.text))) - set(macro.parameters or ())
            if words <= _IN_ATTRIBUTES | plain | called and re.fullmatch(r"[\w\s\"(),\[\]]*", macro.text):
                (plain if macro.parameters is None else called).add(name)
    whole = {name for name, macro in macros if macro.parameters is not None} - called
    names = "|".join(sorted(plain, key=len, reverse=True))
    calls = "|".join(sorted(called, key=len, reverse=True))
    pattern = rf"\b(?:{calls})\b{_ARGUMENTS}|\b(?:{names})\b|{_OF_LIBRARY.pattern}|\[\[[\w\s:,().\"]*\]\]"
    after = "|".join(sorted(whole, key=len, reverse=True))
    inside = _ARGUMENTS.replace(r"\s*\(", r"\s*\((", 1)[:-2] + r")\)"
    ends = rf"^[ \t]*(?:{after})\b{inside}\s(?=\s*(?:[A-Za-z_}}]|\Z))" if after else ""
    return re.compile(pattern.encode()), re.compile(ends.encode(), re.MULTILINE) if ends else None


def macros_of(source: Source) -> dict[str, Macro]:
    """The macros that a text defines, by name; of several definitions the text of all."""
    macros: dict[str, Macro] = {}
    for start, stop in source.directives:
        defined = _DEFINE.match(source.text[start:stop])
        if defined:
            name, parameters, text = defined[1], defined[2], defined[3].strip()
            before = macros[name].text + " " if name in macros else ""
            macros[name] = Macro(tuple(WORD.findall(parameters)) if parameters else None, before + text)
    return macros


def marks(macros: Mapping[str, Macro], words: frozenset[str] = DEVICE) -> frozenset[str]:
    """The marks of device code, and the macros that contain one."""
    known = set(words)
    while further := {name for name, macro in macros.items() if known & set(WORD.findall(macro.text))} - known:
        known |= further
    return frozenset(known)


def blanked(source: Source, parts: Collection[tuple[int, int, str]], also: Collection[int] = ()) -> str:
    """A text with spaces for some parts, or with a text that begins them, but not for line ends and directives; `also`
    are the offsets of directives that are no exception.
    """
    pieces, done = list[str](), 0
    for start, stop, begin_with in sorted(parts):
        inside = [(begin, end) for begin, end in source.fixed if start <= begin < stop and begin not in also]
        pieces += [source.text[done:start], begin_with]
        bounds = [start, *(bound for pair in inside for bound in pair), max(stop, *(end for _, end in inside), 0)]
        for place, (begin, end) in enumerate(pairwise(bounds)):
            pieces.append(source.text[begin:end] if place % 2 else re.sub(r"[^\n]", " ", source.text[begin:end]))
        done = bounds[-1]
    return "".join([*pieces, source.text[done:]])
