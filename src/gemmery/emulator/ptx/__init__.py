"""What PTX text is made of: instructions with their operands, kernels, variables. `parse` reads it.

NVIDIA, Parallel Thread Execution ISA 9.0, "Syntax", "State Spaces, Types, and Variables" and
"Instruction Operands".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """A line of the source that `.loc` names; without line info the line of the PTX text, in file "ptx"."""

    file: str  # "simt_naive.cu": as the compiler was told, without folders
    number: int
    wraps: bool = field(default=False, compare=False)  # within a function that is an instruction

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Register:
    """A register, predicates among them: %r1, %p3. The sink `_` is a register of that name and no type."""

    name: str
    type: str  # as declared: "pred", "b32", "f64"


@dataclass(frozen=True)
class Immediate:
    """A constant: an int for 42 and 0x2A, its bits for 0f3F800000 ("f32") and 0d... ("f64")."""

    bits: int
    type: str = ""  # "f32", "f64", "pred" of WARP_SZ-free constants; "" takes the instruction's type


@dataclass(frozen=True)
class Special:
    """%tid.x, %laneid, %clock64."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """The address of a variable or a parameter, plus bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Not:
    """!%p1 as an operand."""

    register: Register


@dataclass(frozen=True)
class Vector:
    """{%f1, %f2}, and %r1|%p1 where an instruction gives two results."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Memory:
    """[%rd1+4], [variable], [tensor_map, {%r1, %r2}]."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()  # of a tensor


@dataclass(frozen=True)
class Label:
    """Where a branch goes, as it is called in Kernel.labels."""

    name: str


Operand = Register | Immediate | Special | Symbol | Not | Vector | Memory | Label


@dataclass(frozen=True)
class Instruction:
    """One statement of a kernel."""

    opcode: str  # with all that follows, as opcodes.py spells it: "ld.global.v4.f32"
    operands: tuple[Operand, ...]
    line: Line  # outermost: of the kernel's file where the code was inlined into it
    inner: Line  # innermost: where the code itself stands
    text: str  # as written, blanks squeezed, its guard included
    ptx_line: int  # in the PTX text, from 1
    guard: Register | None = None
    negated: bool = False  # @!%p1
    frames: tuple[Line, ...] = ()  # the calls that were inlined, `line` first and `inner` last


def calling(frames: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return frames without those at the end that wrap an instruction: they belong to the line that calls them.

    >>> [str(line) for line in calling((Line("mma.cu", 7), Line("tile.cuh", 12), Line("ptx.cuh", 3, wraps=True)))]
    ['mma.cu:7', 'tile.cuh:12']
    """
    last = len(frames)
    while last > 1 and frames[last - 1].wraps:
        last -= 1
    return frames[:last]


@dataclass(frozen=True)
class Variable:
    """A name for memory: `offset` in its space, which starts at 0 for each kernel (shared, local) or module."""

    name: str
    space: str  # "shared", "local", "global", "const"
    offset: int
    size: int  # bytes; 0 for `extern .shared x[]`
    align: int
    data: bytes = b""  # initial values of global and const variables; b"" is zeros
    pointers: tuple[tuple[int, str, int], ...] = ()  # in them: where, the address of which variable, plus bytes


@dataclass(frozen=True)
class Parameter:
    """What a launch passes, where it lies among all that is passed."""

    name: str
    type: str  # "u64"; "b8" for a struct
    offset: int
    size: int


@dataclass(frozen=True)
class Kernel:
    """An entry point, device functions inlined."""

    name: str
    parameters: tuple[Parameter, ...]
    registers: Mapping[str, str]  # name -> type
    variables: Mapping[str, Variable]  # shared and local ones of the kernel, and all of the module
    shared: int  # bytes of static shared memory, rounded up for `extern .shared` variables, which begin there
    local: int  # bytes of local memory a thread
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]  # name -> index of an instruction, or len(instructions)
    limits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # "maxntid", "reqntid", "reqnctapercluster"


@dataclass(frozen=True)
class Module:
    """All kernels of a PTX text."""

    version: str  # "9.0"
    target: str  # "sm_90a"
    kernels: Mapping[str, Kernel]


def parse(text: str, wrappers: Collection[str] = ()) -> Module:
    r"""Read all kernels of a PTX text as NVRTC, Triton, Numba or a person wrote it.

    `wrappers` names source files whose functions are an instruction each: `calling` leaves their lines out.

    >>> module = parse(".version 8.0\n.target sm_90\n.visible .entry f() { .reg .b32 %r<2>; mov.b32 %r1, 42; ret; }")
    >>> module.kernels["f"].instructions[0].text
    'mov.b32 %r1, 42'

    Raises EmulationError for what is not understood, with its line.
    """
    from gemmery.emulator.ptx.module import module

    return module(text, wrappers)
