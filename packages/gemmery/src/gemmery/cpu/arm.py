"""A step of the micro-kernel on ARM: multiply-adds by an element, dot products, and products of blocks of 2 x 2 sums.

A row of A is loaded as vectors, and each instruction takes its factor from one lane of them ("by element" in Arm's
manuals), so that six rows take two or three loads and no instruction that spreads a number over a register. An MMLA
instruction multiplies two rows of A by two columns of B, 8 bytes of k of each: its four sums are one register, and the
rows of C are put together after the last step.

Reference: Arm Architecture Reference Manual for A-profile architecture (DDI 0487), C7.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gemmery.cpu.ir_types import element_of, mangle, vector
from gemmery.dtypes import SIZES

if TYPE_CHECKING:
    from gemmery.cpu.ir import Function, Value, Var

_BYTES = 16  # of a register of NEON, and of a segment of one of SVE
# The types in an intrinsic's name; that of bfmmla has none.
_SUFFIX = {"bfmmla": "", "fmlal": ".v4f32.v8f16", "fmlal2": ".v4f32.v8f16"}
_INTEGERS = ".v4i32.v16i8"


def instruction(f: Function, name: str, element: str, total: Value, x: Value, y: Value) -> Value:
    """Return total + the products of x and y by the instruction of that name; x and y hold elements of that type."""
    wide = vector(f.target.vector_bytes // SIZES[element], element)
    x, y = f.bitcast(x, wide), f.bitcast(y, wide)
    if f.target.has_sve:
        return _by_sve(f, name if name == "bfmmla" else f"{name}.nxv4i32", total, x, y)
    return f.intrinsic(f"llvm.aarch64.neon.{name}{_SUFFIX.get(name, _INTEGERS)}", total.type, total, x, y)


def _by_sve(f: Function, name: str, total: Value, *operands: Value) -> Value:
    """Return total + products by an instruction of SVE, whose vectors are as long as registers."""
    first, *others = (_scalable(f, value) if "x" in value.type else value for value in (total, *operands))
    product = f.intrinsic(f"llvm.aarch64.sve.{name}", first.type, first, *others)
    extract = f"llvm.vector.extract.{mangle(total.type)}.{_name(total.type)}"
    return f.intrinsic(extract, total.type, product, f.index(0))


def _scalable(f: Function, x: Value) -> Value:
    """Return a vector as long as a register of SVE as that register."""
    from gemmery.cpu.ir import Value

    whole = f"<vscale x {_BYTES // SIZES[element_of(x.type)]} x {element_of(x.type)}>"
    name = f"llvm.vector.insert.{_name(x.type)}.{mangle(x.type)}"
    return f.intrinsic(name, whole, Value(f, whole, "poison"), x, f.index(0))


def _name(type_: str) -> str:
    """Return LLVM's suffix for a register of SVE with elements as those of a vector."""
    element = element_of(type_)
    return f"nxv{mangle(vector(_BYTES // SIZES[element], element)).removeprefix('v')}"


def step(
    f: Function,
    name: str,
    packed: str,
    cell: str,
    a: Value,
    b: Value,
    totals: list[list[Var]],
    column: Callable[[int], Value],
) -> None:
    """Add the products of a step of k, whose rows of A's and B's panels are at `a` and `b`, to the sums of a tile.

    The instruction is `name`; cells of the type `cell` hold elements of the type `packed`. `column(v)` loads vector v
    of the row of B, for all but "fmlal" and the products of blocks. The last vector of A reaches into the next step,
    since mr is no multiple of its lanes: panels end with more than a vector of slack.
    """
    size = SIZES[cell]
    vectors = range(len(totals[0]))
    if name.endswith("mmla"):
        width = f.target.vector_bytes
        pairs = [_in_each_segment(f, "i64", a + row * size, size) for row in range(0, len(totals), 2)]
        for v in vectors:
            for half in range(2):
                columns = f.load(vector(width // 8, "i64"), b + (2 * v + half) * width, align=size)
                for number, pair in enumerate(pairs):
                    total = totals[2 * number + half][v]
                    total.value = instruction(f, name, packed, total.value, pair, columns)
        return
    lanes = _BYTES // size
    if name == "fmlal":  # of the lower four columns in a register, fmlal2 of the upper four
        halves = [f.load(vector(8, "half"), b + v // 2 * _BYTES, align=size) for v in vectors if v % 2 == 0]
        columns_of = [halves[v // 2] for v in vectors]
    else:
        columns_of = [column(v) for v in vectors]
    for i, row in enumerate(totals):
        if i % lanes == 0:
            some = _in_each_segment(f, cell, a + i * size, size)
        factor = f.shuffle(some, some, [i % lanes] * f.target.lanes(size))
        for v in vectors:
            total = row[v]
            if name == "fma" and f.target.has_sve and cell in ("float", "double"):
                lane = f.const("i32", i % lanes)
                total.value = _by_sve(f, f"fmla.lane.{_name(total.value.type)}", total.value, columns_of[v], some, lane)
            elif name == "fma":
                total.value = f.fma(factor, columns_of[v], total.value)
            else:
                each = "fmlal2" if name == "fmlal" and v % 2 else name
                total.value = instruction(f, each, packed, total.value, columns_of[v], factor)


def _in_each_segment(f: Function, element: str, at: Value, align: int) -> Value:
    """Load 16 bytes, once, or into each segment of a register of SVE."""
    lanes = _BYTES // SIZES[element]
    some = f.load(vector(lanes, element), at, align=align)
    segments = f.target.vector_bytes // _BYTES
    return some if segments == 1 else f.shuffle(some, some, [*range(lanes)] * segments)


def unfold(f: Function, totals: list[list[Var]]) -> None:
    """Put the sums of a tile of 2 x 2 blocks into rows: each pair of registers holds two rows of its columns."""
    blocks = range(0, 2 * f.target.vector_bytes // 4, 4)  # of four sums each, in both
    first, second = ([at + part for at in blocks for part in (row, row + 1)] for row in (0, 2))
    for i in range(0, len(totals), 2):
        for left, right in zip(totals[i], totals[i + 1], strict=True):
            x, y = left.value, right.value
            left.value, right.value = f.shuffle(x, y, first), f.shuffle(x, y, second)
