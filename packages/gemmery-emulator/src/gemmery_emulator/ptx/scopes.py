"""Resolve the names and numbers of operands within their scopes, and read the declarations of variables.

NVIDIA, Parallel Thread Execution ISA 9.0, "Identifiers", "Constants", "Instruction Operands", "State Spaces", "Types"
and "Variables".
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from gemmery.errors import EmulationError
from gemmery_emulator.ptx import Address, Immediate, Not, Operand, Register, Special, Symbol, Variable, Vector

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
    """Split at the commas outside brackets.

    >>> parts("%r1,[%rd1,{%r2,%r3}]")
    ['%r1', '[%rd1,{%r2,%r3}]']
    """
    if "[" not in text and "{" not in text and "(" not in text:
        return text.split(",") if text else []
    pieces: list[str] = _PARTS.findall(text)
    if ",".join(pieces) != text:
        raise EmulationError(f"{text!r}: operands must be separated by commas, and every bracket must be closed")
    return pieces


def free_name(name: str, bound: Mapping[str, object]) -> str:
    """Return a name, with a number if it is bound: "out.2"."""
    free, number = name, 2
    while free in bound:
        free = f"{name}.{number}"
        number += 1
    return free


def integer(text: str) -> int | None:
    """Read 42, -5, 0x2A, 052, 0b101010, 42U; returns None for other texts."""
    match = _INTEGER.fullmatch(text)
    if not match:
        return None
    digits = match[2]
    octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
    try:
        value = int(digits, 8 if octal else 0)
    except ValueError:  # 089
        return None
    return -value if match[1] == "-" else value


def number(text: str) -> float | None:
    """Read 0f3F800000, 0d..., 1.5, 1e-3; returns None for other texts."""
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
            raise EmulationError(f"{text}: a constant has at most 64 bits")
        return Immediate(value)
    if text == "WARP_SZ":
        return Immediate(32)
    if text[:2] in ("0f", "0F", "0d", "0D") and number(text) is not None:
        return Immediate(int(text[2:], 16), "f32" if text[1] in "fF" else "f64")
    real = number(text)
    return None if real is None else Immediate(struct.unpack("<Q", struct.pack("<d", real))[0], "f64")


@dataclass
class Scope:
    """The names between two braces; `outer` holds those around them. A duplicate name gets a number: "out.2"."""

    outer: Scope | None = None
    suffix: str = ""  # for all names of a device function, which is inlined into its callers
    types: dict[str, str] = field(default_factory=dict)  # all registers of the function, name -> type
    memory: dict[str, Variable] = field(default_factory=dict)  # all variables of the function
    used: set[str] = field(default_factory=set)  # variables that the function uses
    functions: dict[str, int] = field(default_factory=dict)  # of the module, with their addresses
    pointed: set[str] = field(default_factory=set)  # functions whose address is used
    registers: dict[str, Register] = field(default_factory=dict)  # by the name as written
    ranges: dict[str, tuple[int, str]] = field(default_factory=dict)  # %r<10>: "%r" -> 10, "b32"
    variables: dict[str, Variable] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)  # .branchtargets, .calltargets, .callprototype
    read: dict[str, Operand] = field(default_factory=dict)  # operands that were read before, by their text

    def inside(self) -> Scope:
        """Return a new scope within this one, in the same function."""
        return Scope(self, self.suffix, self.types, self.memory, self.used, self.functions, self.pointed)

    def _outward(self) -> Iterator[Scope]:
        """Yield this scope, then those around it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer

    def declare(self, name: str, type_: str) -> Register:
        """Declare a register in this scope."""
        register = self.registers[name] = Register(free_name(name + self.suffix, self.types), type_)
        self.types[register.name] = type_
        self.read.pop(name, None)
        return register

    def add(self, declared: Variable) -> Variable:
        """Add a variable to this scope; returns it under its unique name."""
        variable = replace(declared, name=free_name(declared.name + self.suffix, self.memory))
        self.variables[declared.name] = self.memory[variable.name] = variable
        return variable

    def register(self, name: str) -> Register | None:
        """Find a register by name in this scope or those around it."""
        prefix = name.rstrip("0123456789")
        for scope in self._outward():
            if name in scope.registers:
                return scope.registers[name]
            count, type_ = scope.ranges.get(prefix, (0, ""))
            if count and prefix != name and int(name[len(prefix) :]) < count:
                return scope.declare(name, type_)
        return None

    def variable(self, name: str) -> Variable | None:
        """Find a variable or parameter by name in this scope or those around it."""
        for scope in self._outward():
            if name in scope.variables:
                self.used.add(name)
                return scope.variables[name]
        return None

    def label(self, name: str) -> str:
        """Return the unique name of a label."""
        for scope in self._outward():
            if name in scope.labels:
                return scope.labels[name]
        raise EmulationError(
            f"label {name!r} is not defined in this function, and a branch must stay within its function"
        )

    def table(self, name: str) -> list[str]:
        """Return the labels of a .branchtargets."""
        for scope in self._outward():
            if name in scope.tables:
                return scope.tables[name]
        raise EmulationError(f"{name!r} is not a list of targets or a prototype of this function")

    def operands(self, text: str) -> tuple[Operand, ...]:
        """Read all operands of an instruction; raises EmulationError with the text of an invalid one."""
        text = "".join(text.split())
        return tuple([self.operand(part) for part in parts(text)])

    def operand(self, text: str) -> Operand:
        """Read one operand, written without blanks."""
        operand = self.read.get(text)
        if operand is None:
            operand = self.read[text] = self._operand(text)
        return operand

    def _operand(self, text: str) -> Operand:
        if not text:
            raise EmulationError("an operand is missing between commas")
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
        if text in self.functions:
            self.pointed.add(text)
            return Immediate(self.functions[text])
        constant = _constant(text)
        if constant is not None:
            return constant
        # Read variable+8 outside brackets; any other text is an error.
        name, offset = _split(text)
        variable = self.variable(name)
        if variable is None or not offset:
            what = "register, special register, variable or number"
            raise EmulationError(f"{text!r} is not a {what} that is declared here: declare it before its use")
        return Symbol(variable.name, offset)

    def _memory(self, text: str) -> Address:
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
            raise EmulationError(
                f"{text!r}: an address must be a register, a variable or a number, plus an optional number"
            )
        return Address(base, offset, tuple(coordinates))


def _split(text: str) -> tuple[str, int]:
    """Split %rd1+-4 into %rd1 and -4."""
    for sign in "+-":
        name, split, rest = text.partition(sign)
        offset = integer(rest) if split and name else None
        if offset is not None:
            if abs(offset) >= LARGEST // 2:
                raise EmulationError(f"{text}: an offset has at most 64 bits")
            return name, offset if sign == "+" else -offset
    return text, 0


SIZES = {f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64, 128)} | {"f16x2": 4, "bf16x2": 4}
REGISTERS = frozenset((*SIZES, "pred", "bf16", "tf32"))  # types of registers; which ones are modeled each use decides
MOST, MOST_LOCAL = 1 << 38, 512 << 10  # bytes of a variable
_VARIABLE = re.compile(
    r"""(?:\.(?:extern|visible|weak|common)\s+)* \.(?P<space>shared|local|global|const|param)(?:::\w+)? \s*
        (?P<words>(?:\.attribute\s*\([^)]*\)\s*|\.align\s+\d+\s*|\.\w+\s*)+)
        (?P<name>[\w$%]+) \s* (?P<lengths>(?:\[[^\]]*\]\s*)*) (?:=\s*(?P<values>.*))?""",
    re.VERBOSE | re.DOTALL,
)

_POINTER = re.compile(r"(?:generic\((?P<generic>[\w$%.]+)\)|(?P<plain>[A-Za-z_$%][\w$%.]*))(?P<more>[+-]\d+)?")


def variable(text: str) -> tuple[Variable, str]:
    """Read `.shared .align 16 .b8 tile[4096]` as a variable at offset 0; returns it with its type.

    Raises EmulationError for text that is not a declaration.
    """
    match = _VARIABLE.fullmatch(text.strip())
    words = re.findall(r"\.(\w+)(?:\s+(\d+))?", match["words"]) if match else []
    type_ = next((word for word, _ in reversed(words) if word in SIZES), "")
    if not match or not type_:
        raise EmulationError("this is not a declaration: a variable is declared as .shared .align 16 .b8 name[4096]")
    length = next((int(word[1:]) for word, _ in words if word in ("v2", "v4", "v8")), 1)
    align = max(SIZES[type_] * length, 1)
    align = next((int(value or 0) for word, value in words if word == "align" and "ptr" not in dict(words)), align)
    if align < 1 or align & align - 1:
        raise EmulationError(f".align {align}: an alignment must be a power of two")
    data, pointers = _constants(match["values"], type_) if match["values"] else (b"", ())
    for length_text in re.findall(r"\[([^\]]*)\]", match["lengths"]):
        count = integer(length_text.strip()) if length_text.strip() else len(data) // SIZES[type_]
        if count is None:
            raise EmulationError(f"[{length_text}]: a length must be a number")
        length *= count
    size = SIZES[type_] * length
    if size > MOST or (match["space"] == "local" and size > MOST_LOCAL):
        raise EmulationError(
            f"{size} bytes are more than a device has: a variable has at most {MOST}, a local one {MOST_LOCAL}"
        )
    if len(data) > size:
        raise EmulationError(f"{len(data)} bytes of initial values for {size} bytes")
    data = data.ljust(size, b"\0") if data else b""
    return Variable(match["name"], match["space"], 0, size, align, data, pointers), type_


def laid_out(variables: list[Variable], start: int = 0) -> tuple[dict[str, Variable], int]:
    """Place variables one after the other, aligned; returns them with their size in bytes.

    Variables without a size (`extern .shared x[]`) all begin at the end, at the largest of their alignments, as with
    ptxas.
    """
    placed = {}
    for declared in variables:
        if declared.size:
            offset = -(-start // declared.align) * declared.align
            placed[declared.name] = replace(declared, offset=offset)
            start = offset + declared.size
    align = max((declared.align for declared in variables if not declared.size), default=1)
    start = -(-start // align) * align
    placed |= {declared.name: replace(declared, offset=start) for declared in variables if not declared.size}
    return placed, start


def _constants(text: str, type_: str) -> tuple[bytes, tuple[tuple[int, str, int], ...]]:
    """Read {1, 0x2A, {3, 4}}, 0f3F800000 or generic(x)+4 as bytes of a type, and the addresses in them."""
    packed: list[bytes] = []
    pointers: list[tuple[int, str, int]] = []
    size = SIZES[type_]
    for item in filter(None, ("".join(part.split()) for part in re.split(r"[{},]", text))):
        whole, real = integer(item), number(item)
        pointer = _POINTER.fullmatch(item)
        if type_ in ("f32", "f64") and (real is not None or whole is not None):
            packed.append(struct.pack("<f" if size == 4 else "<d", whole if real is None else real))
        elif whole is not None:
            packed.append((whole % (1 << 8 * size)).to_bytes(size, "little"))
        elif pointer and size == 8:
            pointers.append((size * len(packed), pointer["generic"] or pointer["plain"], int(pointer["more"] or 0)))
            packed.append(bytes(size))
        else:
            raise EmulationError(f"initial value {item}: numbers and addresses of 8 bytes are modeled")
    return b"".join(packed), tuple(pointers)
