"""Read the statements of one function: resolve their names, find their source lines, and what a pointer may call.

NVIDIA, Parallel Thread Execution ISA 9.0, "Syntax", "Control Flow Instructions" (call, .calltargets, .callprototype)
and "Debugging Directives".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gemmery.errors import EmulationError
from gemmery_emulator.instructions import opcode
from gemmery_emulator.ptx import Immediate, Instruction, Label, Line, Opcode, Operand, Register, Variable, Vector
from gemmery_emulator.ptx.scopes import REGISTERS, SIZES, Scope, free_name, parts, variable

FIRST = 1 << 43  # the address of the first function; there is no memory there
STEP = 4  # bits: functions are 16 bytes apart
SWITCH = "brx.through"  # the opcode of a branch by the address of a function
NAME = "call through"  # of an opcode, whose only modifier is a prototype, or whose modifiers are functions
_PROTOTYPE = re.compile(r"\.callprototype\s*(?:\(([^()]*)\))?\s*_\s*(?:\(([^()]*)\))?.*", re.DOTALL)


def address(number: int) -> int:
    """Return the address of a function by its number."""
    return FIRST + (number << STEP)


def signature(results: Iterable[int], parameters: Iterable[int]) -> str:
    """Return the sizes of results and parameters as text, which only functions of one prototype share.

    >>> signature([4], [8, 4])
    '(4) _ (8, 4)'
    """
    return " _ ".join(f"({', '.join(map(str, sizes))})" for sizes in (results, parameters))


def prototype(text: str) -> str:
    """Read `.callprototype (.param .b32 _) _ (.param .b64 _)` as a signature."""
    match = _PROTOTYPE.fullmatch(text)
    if not match:
        raise EmulationError("this is not a prototype: .callprototype (.param .b32 _) _ (.param .b64 _)")
    return signature(*(map(_size, filter(str.strip, (group or "").split(","))) for group in match.groups()))


def _size(declaration: str) -> int:
    words = declaration.split()
    if words[0] == ".reg" and len(words) == 3 and words[1][1:] in SIZES:
        return SIZES[words[1][1:]]
    return variable(declaration)[0].size


def through(targets: Collection[str]) -> Opcode:
    """Return the opcode of a call through a pointer, to functions by name or to those of a signature."""
    return Opcode(NAME, tuple(targets), (), NAME, "call", "")


def reachable(call: Opcode, signatures: Mapping[str, str]) -> list[str]:
    """Return the functions that a call may reach; `signatures` has those whose address is used."""
    targets = call.modifiers
    return [name for name, own in signatures.items() if name in targets or own in targets]


def case(address: Any) -> Any:
    """Return the place of a function's address in the table of a call, far beyond its end for other addresses."""
    return (address ^ np.uint64(FIRST)) >> np.uint64(STEP)


def with_functions(declared: Variable, functions: Mapping[str, int]) -> Variable:
    """Write the addresses of functions into a variable's initial values."""
    data, others = bytearray(declared.data), []
    for at, name, offset in declared.pointers:
        if name in functions:
            data[at : at + 8] = (functions[name] + offset).to_bytes(8, "little")
        else:
            others.append((at, name, offset))
    return replace(declared, data=bytes(data), pointers=tuple(others))


_STATEMENT = re.compile(
    r"""\s*(?:
        (?P<location> \.loc \s+ (\d+) \s+ (\d+) \s+ (\d+) (?:[^\n]*inlined_at \s+ (\d+) \s+ (\d+) \s+ (\d+))? [^\n]*)
      | (?P<label> [\w$%]+ \s* : (?!:))
      | (?P<instruction> (?:@\s*(?P<negated>!?)\s*(?P<guard>[\w$%]+)\s+)? (?P<opcode>[a-z][\w.:]*)
        (?P<operands>[^;{}]*(?:\{[^;{}]*\}[^;{}]*)*) ;)
      | (?P<brace> [{}])
      | (?P<directive> \.(?:"[^"]*"|[^;"])* ;)
    )""",
    re.VERBOSE,
)
_REGISTERS = re.compile(r"\.reg\s*\.(\w+)\s+([^.].*)", re.DOTALL)
_RANGE = re.compile(r"([\w$%]+)(?:<(\d+)>)?")


class Body:
    """The body of one function, whose first character after the opening brace is `text[at]`."""

    def __init__(
        self, text: str, at: int, scope: Scope, files: Mapping[str, str], wrappers: Collection[str] = ()
    ) -> None:
        self.text, self.at, self.scope, self.files, self.wrappers = text, at, scope, files, wrappers
        self.function = scope  # the function's own scope, within the module's
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self._branches: list[tuple[int, Scope]] = []  # resolved at the end, because labels may follow their branches
        self._table = ""  # the last label: the name of a .branchtargets that follows
        self._frames: tuple[Line, ...] = ()
        self._places: dict[tuple[str, ...], tuple[Line, ...]] = {}  # the latest frames of each place
        self._lines: dict[tuple[str, str], Line] = {}
        self._counted, self._number = at, text.count("\n", 0, at) + 1

    def read(self) -> int:
        """Read up to the closing brace; returns the position after it."""
        text = self.text
        depth = 1
        try:
            while depth:
                match = _STATEMENT.match(text, self.at)
                if not match:
                    raise EmulationError("a statement must end with a semicolon, and every brace must be closed")
                kind = match.lastgroup
                if kind == "instruction":
                    self._instruction(match)
                elif kind == "location":
                    self._location(match)
                elif kind == "label":
                    self._labeled(match["label"][:-1].strip())
                elif kind == "directive":
                    self._directive(match["directive"][:-1].strip())
                else:
                    depth += self._brace(match["brace"])
                self.at = match.end()
            # Replace the labels of branches by their unique names.
            for index, scope in self._branches:
                instruction = self.instructions[index]
                *first, label = instruction.operands
                assert isinstance(label, Label)
                target: Operand
                if instruction.opcode.name == "brx":
                    target = Vector(tuple(Label(scope.label(name)) for name in scope.table(label.name)))
                else:
                    target = Label(scope.label(label.name))
                self.instructions[index] = replace(instruction, operands=(*first, target))
        except EmulationError as error:
            raise EmulationError(f"{place(text, self.at)}: {error}") from None
        return self.at

    def _instruction(self, match: re.Match[str]) -> None:
        statement, negated, guard, text, operands = match.group("instruction", "negated", "guard", "opcode", "operands")
        start = match.start("instruction")
        self._number += self.text.count("\n", self._counted, start)
        self._counted = start
        self.at = start
        register = self.scope.operand(guard) if guard else None
        if register is not None and not isinstance(register, Register):
            raise EmulationError(f"{guard} is no predicate register, and only those can guard an instruction")
        what = opcode(text)
        read: tuple[Operand, ...]
        if text in ("bra", "bra.uni"):
            self._branches.append((len(self.instructions), self.scope))
            read = (Label("".join(operands.split())),)
        elif text in ("brx.idx", "brx.idx.uni"):
            self._branches.append((len(self.instructions), self.scope))
            index, _, table = operands.partition(",")
            read = (self.scope.operand(index.strip()), Label(table.strip()))
        elif text in ("call", "call.uni"):
            what, read = self._call(operands)
        else:
            read = self.scope.operands(operands)
        if what.type == "f32":
            read = tuple([_single(operand) if type(operand) is Immediate else operand for operand in read])
        frames, written = self._frames or (Line("ptx", self._number),), " ".join(statement[:-1].split())
        self.instructions.append(
            Instruction(what, read, frames[0], frames[-1], written, self._number, register, bool(negated), frames)
        )

    def _call(self, operands: str) -> tuple[Opcode, tuple[Operand, ...]]:
        """Read (results), function, (parameters) as the opcode "call function" with two vectors as operands."""
        rest = parts("".join(operands.split()))
        results = rest.pop(0) if rest and rest[0].startswith("(") else "()"
        name = rest.pop(0) if rest else ""
        parameters = rest.pop(0) if rest and rest[0].startswith("(") else "()"
        passed = tuple(Vector(self.scope.operands(group[1:-1])) for group in (results, parameters))
        if pointer := self.scope.register(name):
            if len(rest) != 1:
                raise EmulationError("a call through a pointer ends with its prototype or the list of its targets")
            return through(self.scope.table(rest[0])), (*passed, pointer)
        if not name or rest:
            raise EmulationError("a call has results, a function and parameters: call (%r1), f, (%r2)")
        return Opcode("call", (name,), (), f"call {name}", "call", ""), passed

    def _location(self, match: re.Match[str]) -> None:
        """Read `.loc 2 19 5, function_name f, inlined_at 1 14 7`; the caller may itself have been inlined."""
        place, around = match.group(2, 3, 4), match.group(5, 6, 7)
        if place[1] == "0":  # code that the compiler moved; like ptxas, count it to the line before
            return
        inner = self._at(place)
        if around[0] is not None:
            above = self._places.get(around) or (self._at(around),)
            recursive = above.index(inner) if inner in above else len(above)
            frames = (*above[:recursive], inner)
        else:  # after a line 0 NVRTC omits inlined_at
            frames = self._places.get(place) or (inner,)
        self._frames = self._places[place] = frames

    def _at(self, place: tuple[str, ...]) -> Line:
        key = (place[0], place[1])
        line = self._lines.get(key)
        if line is None:
            file = self.files.get(key[0], f"file {key[0]}")
            line = self._lines[key] = Line(file, int(key[1]), file in self.wrappers)
        return line

    def _labeled(self, name: str) -> None:
        if name in self.scope.labels:
            raise EmulationError(f"label {name} is defined twice: labels must be unique")
        unique = self.scope.labels[name] = free_name(name, self.labels)
        self.labels[unique] = len(self.instructions)
        self._table = name

    def _directive(self, text: str) -> None:
        word = (text[1:].replace(".", " ").split(maxsplit=1) or [""])[0]
        if word == "reg":
            self._registers(text)
        elif word in ("branchtargets", "calltargets", "callprototype"):
            if self._table not in self.scope.labels:
                raise EmulationError(f"{text} has no name: a label stands in front of it, as in `table: .{word} ...;`")
            del self.labels[self.scope.labels.pop(self._table)]
            names = [name.strip() for name in text[len(word) + 1 :].split(",")]
            self.scope.tables[self._table] = [prototype(text)] if word == "callprototype" else names
            if word == "calltargets":
                self.scope.pointed.update(names)
        elif word != "pragma":
            self.scope.add(variable(text)[0])

    def _registers(self, text: str) -> None:
        match = _REGISTERS.fullmatch(text)
        if not match:
            raise EmulationError(
                "registers are declared as .reg .b32 %r<10>, a, b (vectors of registers are not modeled)"
            )
        type_ = match[1]
        if type_ not in REGISTERS:
            raise EmulationError(f"registers of type .{type_} are not modeled: .b32, .f32, .pred and others are")
        for item in match[2].split(","):
            names = _RANGE.fullmatch(item.strip())
            if not names:
                raise EmulationError(f"{item.strip()!r} is not the name of a register")
            if names[2]:
                self.scope.ranges[names[1]] = (int(names[2]), type_)
            else:
                self.scope.declare(names[1], type_)

    def _brace(self, brace: str) -> int:
        if brace == "{":
            self.scope = self.scope.inside()
            return 1
        if self.scope is not self.function and self.scope.outer is not None:
            self.scope = self.scope.outer
        return -1


def _single(constant: Immediate) -> Immediate:
    """The constant of an f32 instruction, rounded if it is written as 1.5 or 0d..."""
    if constant.type != "f64":
        return constant
    with np.errstate(over="ignore"):
        return Immediate(int(np.uint64(constant.bits).view("f8").astype("f4").view("u4")), "f32")


def place(text: str, at: int) -> str:
    """Describe the line at a position for an error: "PTX line 12: mov.u32 %r1, %r2;"."""
    rest = text[at:]
    at += len(rest) - len(rest.lstrip())
    line = " ".join(text[at : at + 200].partition("\n")[0].split())
    return f"PTX line {text.count(chr(10), 0, at) + 1}: {line or 'the end of the text'}"
