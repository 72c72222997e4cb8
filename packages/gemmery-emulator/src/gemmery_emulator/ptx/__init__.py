"""The parts of a PTX text: instructions with their operands, kernels, variables. `module.parse` reads them.

NVIDIA, Parallel Thread Execution ISA 9.0, "Syntax", "State Spaces, Types, and Variables" and
"Instruction Operands".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """A line of the source, from `.loc`; without line information a line of the PTX text, in file "ptx"."""

    file: str  # "simt_naive.cu": the compiler's name for it, without folders
    number: int
    wraps: bool = field(default=False, compare=False)  # whether its function only wraps an instruction

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Register:
    """A register, which may be a predicate: %r1, %p3. The sink `_` is a register of that name without a type."""

    name: str
    type: str  # as declared: "pred", "b32", "f64"


@dataclass(frozen=True)
class Immediate:
    """A constant: an integer for 42 and 0x2A, the bits for 0f3F800000 ("f32") and 0d... ("f64")."""

    bits: int
    type: str = ""  # "f32", "f64", "pred"; "" takes the instruction's type


@dataclass(frozen=True)
class Special:
    """%tid.x, %laneid, %clock64."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """The address of a variable or a parameter, plus an offset in bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Not:
    """!%p1 as an operand."""

    register: Register


@dataclass(frozen=True)
class Vector:
    """{%f1, %f2}, or %r1|%p1 for the two results of an instruction."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """[%rd1+4], [variable], [tensor_map, {%r1, %r2}]."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()  # of a tensor


@dataclass(frozen=True)
class Label:
    """The target of a branch: a key of PtxKernel.labels."""

    name: str


@dataclass(frozen=True)
class Opcode:
    """What an instruction does; `instructions.opcode` takes the text apart, once.

    >>> from gemmery_emulator.instructions import opcode
    >>> read = opcode("ld.global.nc.v4.f32")
    >>> read.name, read.modifiers, read.types, read.space, str(read)
    ('ld', ('global', 'nc', 'v4'), ('f32',), 'global', 'ld.global.nc.v4.f32')
    """

    name: str  # the words that name an instruction: "ld", "cp.async.bulk", "mbarrier.try_wait.parity"
    modifiers: tuple[str, ...]  # the other words in order; of "call vprintf" the function
    types: tuple[str, ...]
    spelling: str  # with its modifiers in the manual's order
    family: str  # the first word of the name, which related instructions share: "cp", "mbarrier"
    space: str  # "global", "shared", "shared::cluster", "local", "const", "param"; "" if it names none

    def __str__(self) -> str:
        return self.spelling

    @property
    def type(self) -> str:
        """The last type, which is that of the values in memory or of the last operand; "" without types."""
        return self.types[-1] if self.types else ""

    @property
    def is_bulk(self) -> bool:
        """Whether it is a bulk copy, or waits for some."""
        return self.family == "cp" and ".bulk" in self.name


Operand = Register | Immediate | Special | Symbol | Not | Vector | Address | Label


def names_of(operands: Iterable[Operand]) -> list[str]:
    """The names of registers in operands."""
    names: list[str] = []
    for operand in operands:
        match operand:
            case Register(name=name) | Not(register=Register(name=name)):
                names.append(name)
            case Vector(elements=elements):
                names += names_of(elements)
            case Address(base=base, coordinates=coordinates):
                names += names_of((base, *coordinates))
    return names


@dataclass(frozen=True)
class Instruction:
    """One instruction of a kernel."""

    opcode: Opcode
    operands: tuple[Operand, ...]
    line: Line  # outermost: for inlined code the line of the kernel's file
    inner: Line  # innermost: the line of the code itself
    text: str  # as written, with its guard, white space reduced to single blanks
    ptx_line: int  # in the PTX text, from 1
    guard: Register | None = None
    negated: bool = False  # @!%p1
    frames: tuple[Line, ...] = ()  # the calls that were inlined, `line` first and `inner` last


def calling(frames: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return frames without the wrappers of an instruction at their end, which belong to the line that calls them.

    >>> [str(line) for line in calling((Line("mma.cu", 7), Line("tile.cuh", 12), Line("ptx.cuh", 3, wraps=True)))]
    ['mma.cu:7', 'tile.cuh:12']
    """
    last = len(frames)
    while last > 1 and frames[last - 1].wraps:
        last -= 1
    return frames[:last]


@dataclass(frozen=True)
class Variable:
    """A variable in memory; `offset` is in its space, which starts at 0 for each kernel (shared, local) or module."""

    name: str
    space: str  # "shared", "local", "global", "const"
    offset: int
    size: int  # bytes; 0 for `extern .shared x[]`
    align: int
    data: bytes = b""  # initial values of global and const variables; b"" means zeros
    pointers: tuple[tuple[int, str, int], ...] = ()  # addresses in `data`: offset, variable, bytes to add


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel; `offset` is in bytes among all parameters."""

    name: str
    type: str  # "u64"; "b8" for a struct
    offset: int
    size: int


@dataclass(frozen=True, eq=False)
class PtxKernel:
    """An entry point, with its device functions inlined; what is derived from it is kept by its identity."""

    name: str
    parameters: tuple[Parameter, ...]
    registers: Mapping[str, str]  # name -> type
    variables: Mapping[str, Variable]  # shared and local ones of the kernel, and all global ones of the module
    shared: int  # bytes of static shared memory, rounded up for `extern .shared` variables, which begin there
    local: int  # bytes of local memory per thread
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]  # name -> index of an instruction, or len(instructions)
    limits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # "maxntid", "reqntid", "reqnctapercluster"
    entries: Mapping[int, str] = field(default_factory=dict)  # kernels that the module may launch, by their addresses


@dataclass(frozen=True)
class PtxModule:
    """The kernels of a PTX text."""

    version: str  # "9.0"
    target: str  # "sm_90a"
    kernels: Mapping[str, PtxKernel]
