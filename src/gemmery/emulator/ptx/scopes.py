"""What the names and numbers in an operand stand for, where they stand.

NVIDIA, Parallel Thread Execution ISA 9.0, "Identifiers", "Constants" and "Instruction Operands".
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from gemmery.emulator.ptx import (
    Immediate,
    Memory,
    Not,
    Operand,
    Register,
    Special,
    Symbol,
    Variable,
    Vector,
)
from gemmery.errors import EmulationError

LARGEST = 1 << 64
SINK = Register("_", "")
SPECIALS = frozenset(
    [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
    + [f"%{name}.{axis}" for name in ("clusterid", "nclusterid") for axis in "xyz"]
    + [f"%cluster_{name}.{axis}" for name in ("ctaid", "nctaid") for axis in "xyz"]
    + ["%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster"]
    + [f"%lanemask_{order}" for order in ("eq", "le", "lt", "ge", "gt")]
    + ["%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid"]
    + ["%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"]
    + ["%total_smem_size", "%dynamic_smem_size", "%aggr_smem_size"]
    + ["%reserved_smem_offset_begin", "%reserved_smem_offset_end", "%reserved_smem_offset_cap"]
    + ["%reserved_smem_offset_0", "%reserved_smem_offset_1"]
    + [f"%envreg{i}" for i in range(32)]
)
_PARTS = re.compile(r"\{[^{}]*\}|\[[^\[\]]*\]|\([^()]*\)|[^,{}\[\]()]+")
_INTEGER = re.compile(r"([+-]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?")
_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")


def parts(text: str) -> list[str]:
    """Split at the commas that stand in no bracket.

    >>> parts("%r1,[%rd1,{%r2,%r3}]")
    ['%r1', '[%rd1,{%r2,%r3}]']
    """
    if "[" not in text and "{" not in text and "(" not in text:
        return text.split(",") if text else []
    found: list[str] = _PARTS.findall(text)
    if ",".join(found) != text:
        raise EmulationError(f"{text!r}: operands are separated by commas, and each bracket is closed")
    return found


def _free(name: str, taken: Mapping[str, object]) -> str:
    free, number = name, 2
    while free in taken:
        free = f"{name}.{number}"
        number += 1
    return free


def integer(text: str) -> int | None:
    """42, -5, 0x2A, 052, 0b101010, 42U; None when it is none."""
    found = _INTEGER.fullmatch(text)
    if not found:
        return None
    digits = found[2]
    octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
    try:
        value = int(digits, 8 if octal else 0)
    except ValueError:  # 089
        return None
    return -value if found[1] == "-" else value


def number(text: str) -> float | None:
    """0f3F800000, 0d..., 1.5, 1e-3; None when it is none."""
    sign = -1.0 if text[0] == "-" else 1.0
    digits = text.lstrip("+-")
    for prefix, layout, length in (("0f", ">f", 8), ("0d", ">d", 16)):
        if digits[:2].lower() == prefix and len(digits) == length + 2:
            try:
                return sign * float(struct.unpack(layout, bytes.fromhex(digits[2:]))[0])
            except ValueError:
                return None
    return float(text) if _FLOAT.fullmatch(text) else None


def _constant(text: str) -> Immediate | None:
    value = integer(text)
    if value is not None:
        if not -LARGEST < value < LARGEST:
            raise EmulationError(f"{text}: a constant has 64 bits")
        return Immediate(value)
    if text == "WARP_SZ":
        return Immediate(32)
    if text[:2] in ("0f", "0F", "0d", "0D") and number(text) is not None:
        return Immediate(int(text[2:], 16), "f32" if text[1] in "fF" else "f64")
    real = number(text)
    return None if real is None else Immediate(struct.unpack("<Q", struct.pack("<d", real))[0], "f64")


@dataclass
class Scope:
    """The names between two braces, and in `outer` those around them. A name that is taken gets a number: "out.2"."""

    outer: Scope | None = None
    suffix: str = ""  # of all names of a device function, so that it can be put into its callers
    taken: dict[str, str] = field(default_factory=dict)  # all registers of the function, name -> type
    memory: dict[str, Variable] = field(default_factory=dict)  # all variables of the function
    seen: set[str] = field(default_factory=set)  # variables that the function names
    registers: dict[str, Register] = field(default_factory=dict)  # by the name as written
    ranges: dict[str, tuple[int, str]] = field(default_factory=dict)  # %r<10>: "%r" -> 10, "b32"
    variables: dict[str, Variable] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)  # .branchtargets
    read: dict[str, Operand] = field(default_factory=dict)  # operands met before, by their text

    def inside(self) -> Scope:
        """A scope within this one, of the same function."""
        return Scope(self, self.suffix, self.taken, self.memory, self.seen)

    def _outward(self) -> Iterator[Scope]:
        """The scope itself, then those around it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer

    def declare(self, name: str, type_: str) -> Register:
        """A register of this scope."""
        made = self.registers[name] = Register(_free(name + self.suffix, self.taken), type_)
        self.taken[made.name] = type_
        self.read.pop(name, None)
        return made

    def add(self, declared: Variable) -> Variable:
        """A variable of this scope, as the function calls it."""
        made = replace(declared, name=_free(declared.name + self.suffix, self.memory))
        self.variables[declared.name] = self.memory[made.name] = made
        return made

    def register(self, name: str) -> Register | None:
        """The register of that name here or around."""
        prefix = name.rstrip("0123456789")
        for scope in self._outward():
            if name in scope.registers:
                return scope.registers[name]
            count, type_ = scope.ranges.get(prefix, (0, ""))
            if count and prefix != name and int(name[len(prefix) :]) < count:
                return scope.declare(name, type_)
        return None

    def variable(self, name: str) -> Variable | None:
        """The variable or parameter of that name here or around."""
        for scope in self._outward():
            if name in scope.variables:
                self.seen.add(name)
                return scope.variables[name]
        return None

    def label(self, name: str) -> str:
        """A label as its function calls it."""
        for scope in self._outward():
            if name in scope.labels:
                return scope.labels[name]
        raise EmulationError(f"label {name!r} is nowhere in this function: each branch goes to a label of its function")

    def table(self, name: str) -> list[str]:
        """The labels of a .branchtargets."""
        for scope in self._outward():
            if name in scope.tables:
                return scope.tables[name]
        raise EmulationError(f"{name!r} names no .branchtargets of this function")

    def operands(self, text: str) -> tuple[Operand, ...]:
        """All operands of an instruction; raises EmulationError with the text that is not understood."""
        text = "".join(text.split())
        return tuple([self.operand(part) for part in parts(text)])

    def operand(self, text: str) -> Operand:
        """One operand, without blanks."""
        found = self.read.get(text)
        if found is None:
            found = self.read[text] = self._operand(text)
        return found

    def _operand(self, text: str) -> Operand:
        if not text:
            raise EmulationError("an operand is missing: operands are separated by commas")
        first = text[0]
        if first == "[" and text[-1] == "]":
            return self._memory(text)
        if first == "{" and text[-1] == "}":
            return Vector(tuple(self.operand(part) for part in parts(text[1:-1])))
        if first == "!":
            inner = self.operand(text[1:])
            if isinstance(inner, Register):
                return Not(inner)
        if "|" in text:
            return Vector(tuple(self.operand(part) for part in text.split("|")))
        if text == "_":
            return SINK
        register = self.register(text)
        if register is not None:
            return register
        if text in SPECIALS:
            return Special(text)
        variable = self.variable(text)
        if variable is not None:
            return Symbol(variable.name)
        constant = _constant(text)
        if constant is not None:
            return constant
        return self._sum(text)

    def _sum(self, text: str) -> Operand:
        """sym+8 outside brackets; all that is left is not understood."""
        name, offset = _split(text)
        variable = self.variable(name)
        if variable is None or not offset:
            what = "register, special register, variable or number"
            raise EmulationError(f"{text!r} is no {what} declared here: declare it before its use")
        return Symbol(variable.name, offset)

    def _memory(self, text: str) -> Memory:
        """[%rd1+4], [variable+4], [64], [%rd1, {%r1, %r2}]."""
        address, *rest = parts(text[1:-1]) or [""]
        coordinates: list[Operand] = []
        for part in rest:
            read = self.operand(part)
            coordinates += read.elements if isinstance(read, Vector) else [read]
        name, offset = _split(address)
        base = self.operand(name)
        if isinstance(base, Symbol):
            base, offset = Symbol(base.name, base.offset + offset), 0
        if not isinstance(base, (Register, Symbol, Immediate)):
            raise EmulationError(f"{text!r}: an address is a register, a variable or a number, plus a number")
        return Memory(base, offset, tuple(coordinates))


def _split(text: str) -> tuple[str, int]:
    """%rd1+-4 -> %rd1, -4."""
    for sign in "+-":
        name, found, rest = text.partition(sign)
        offset = integer(rest) if found and name else None
        if offset is not None:
            if abs(offset) >= LARGEST // 2:
                raise EmulationError(f"{text}: an offset has 64 bits")
            return name, offset if sign == "+" else -offset
    return text, 0
