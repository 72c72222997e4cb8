"""The lane and register of a warp that hold each element of a matrix, and the instructions that load and store them.

NVIDIA, Parallel Thread Execution ISA 9.0, "Warp Level Matrix Instructions": ldmatrix, stmatrix, wmma.load, wmma.store,
in which all lanes of a warp take part, and the matrix fragments of mma.sync. All
consist of one pattern: 8 rows of 4 words along k, where lane 4 r + w holds word w of row r.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np

from gemmery.dtypes import DTYPES, Array
from gemmery.errors import EmulationError
from gemmery_emulator import reach
from gemmery_emulator.machine import Machine, report_misuse
from gemmery_emulator.op import NUMPY, Mask
from gemmery_emulator.ptx import Instruction, Opcode, Vector
from gemmery_emulator.steps import Handler, Lowering, Read, Step, Write, refused

_FOUR_WORDS = {4: np.dtype("c16"), 8: np.dtype("V32")}  # of a row of a pattern, copied as one

BITS = {row.ptx: 8 * row.size for row in DTYPES if row.ptx} | {"tf32": 32}
WMMA_16 = ("m16n16k16", "m32n8k16", "m8n32k16")  # shapes for elements of 8 and 16 bits
BY_COLUMNS = ("m8n32k16",)  # two neighboring sums of a lane are in a column of C


def per_chunk(kind: str) -> int:
    """Number of elements along k in the 4 words of a pattern."""
    return 4 if kind == "f64" else 128 // BITS[kind]


@dataclass(frozen=True)
class Side:
    """A, or B transposed: `blocks` of 8 rows times `chunks` of 4 words along k, one register per lane for each."""

    type: str  # of the elements: "f16"
    blocks: int
    chunks: int
    tile: int = 1  # blocks per machine instruction: their registers come before those of the next chunk
    copies: int = 1  # number of times that wmma repeats the registers

    @property
    def registers(self) -> int:
        return self.blocks * self.chunks * self.copies

    @property
    def depth(self) -> int:
        """Number of elements along k."""
        return self.chunks * per_chunk(self.type)

    def register(self, block: int, chunk: int) -> int:
        """Return the register that holds a pattern."""
        first = block - block % self.tile
        return first * self.chunks + chunk * self.tile + block % self.tile


def gathered(registers: Sequence[Array], side: Side) -> Array:
    """Return the words of a fragment, whose registers are (warps, 32), as an array (warps, rows, words along k)."""
    warps, word = len(registers[0]), registers[0].dtype
    fours = np.empty((warps, side.blocks, 8, side.chunks), _FOUR_WORDS[word.itemsize])
    for block, chunk in product(range(side.blocks), range(side.chunks)):
        fours[:, block, :, chunk] = np.ascontiguousarray(registers[side.register(block, chunk)]).view(fours.dtype)
    return fours.view(word).reshape(warps, 8 * side.blocks, 4 * side.chunks)


# ---- wmma ----
# The ISA does not specify its fragments. The machine code of ptxas for sm_90 uses the patterns above, with mma.sync on
# two halves, of n for m16n16k16 and of m for m32n8k16; m8n32k16 is B^T A^T on two halves of n, so that its sums are in
# columns. A and B of f16 take 8 registers, of which the first ones matter; the others repeat them.


def extents(shape: str) -> tuple[int, int, int]:
    """Return m, n, k of "m16n8k16"."""
    match = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", shape)
    if match is None:
        raise EmulationError(f"{shape!r} is not a shape of a matrix instruction, such as m16n16k16")
    m, n, k = map(int, match.groups())
    return m, n, k


def wmma_side(operand: str, shape: str, kind: str) -> Side:
    """Return the side A or B ("a", "b") of a wmma instruction."""
    m, n, k = extents(shape)
    blocks = (m if operand == "a" else n) // 8
    # The machine instruction takes 16 lines of one operand and 8 of the other.
    by_16 = m > 8 if operand == "a" else shape in BY_COLUMNS
    chunks = k // per_chunk(kind)
    return Side(kind, blocks, chunks, 2 if by_16 else 1, 8 // (blocks * chunks) if kind == "f16" else 1)


@dataclass(frozen=True)
class Piece:
    """One machine instruction of a wmma load or store.

    The address of each lane, in elements, is `major` times the stride plus `minor`. With `matrices` these are the
    addresses of the 8 rows of 16 bytes of a matrix for each register, as for ldmatrix.
    """

    major: Array  # int64 (32,), or (8 * registers,) with `matrices`
    minor: Array
    registers: tuple[int, ...]  # registers of the fragment, one for each value of a lane
    dtype: str  # of a value
    shift: int = 0  # position of a byte in its register, in bits
    matrices: bool = False
    transposed: bool = False  # each register is the transpose of the fragment's 8 x 8 matrix

    @property
    def width(self) -> int:
        """Bytes per lane."""
        return np.dtype(self.dtype).itemsize * len(self.registers)

    def put(self, values: Sequence[Array], fragment: list[Any]) -> None:
        """Put loaded values into the fragment's registers."""
        for register, value in zip(self.registers, values, strict=True):
            if self.dtype == "u1":
                shifted = value.astype("u4") << np.uint32(self.shift)
                fragment[register] = fragment[register] | shifted if self.shift else shifted
            else:
                fragment[register] = transposed(value) if self.transposed and not self.matrices else value

    def get(self, fragment: Sequence[Array]) -> list[Array]:
        """Return the values of the fragment's registers to store."""
        return [transposed(fragment[i]) if self.transposed else fragment[i] for i in self.registers]


@dataclass(frozen=True)
class Fragment:
    """The machine instructions of a wmma.load or wmma.store."""

    pieces: tuple[Piece, ...]
    type: str  # of the registers: "b32", "f32", "s32", "f64"
    registers: int
    copies: int  # number of times that the registers are repeated
    size: int  # bytes of an element
    stride: int  # elements, if the instruction has no stride operand


_WMMA = re.compile(
    r"wmma\.(?:load\.([abc])|store\.d)\.sync\.aligned\.(row|col)\.(m\d+n\d+k\d+)"
    r"(?:\.(global|shared(?:::cta)?))?\.(\w+)"
)
_WMMA_TYPES = {
    **{(operand, shape): ("f16", "bf16", "s8", "u8") for operand in "ab" for shape in WMMA_16},
    **{("c", shape): ("f16", "f32", "s32") for shape in WMMA_16},
    **{(operand, "m16n16k8"): ("tf32",) for operand in "ab"},
    ("c", "m16n16k8"): ("f32",),
    **{(operand, "m8n8k4"): ("f64",) for operand in "abc"},
}
_LANE = np.arange(32)


@cache
def wmma_fragment(opcode: Opcode) -> Fragment:
    """Return the memory accesses of a wmma.load or wmma.store, as ptxas generates them for sm_90.

    >>> from gemmery_emulator.instructions import opcode
    >>> fragment = wmma_fragment(opcode("wmma.load.a.sync.aligned.row.m16n16k16.shared.f16"))
    >>> [piece.registers for piece in fragment.pieces]
    [(0, 1, 2, 3)]

    Raises EmulationError for forms that are not modeled.
    """
    match = _WMMA.fullmatch(str(opcode))
    operand, layout, shape, space, kind = match.groups() if match else ("",) * 5
    operand = operand or "c"
    if match is None or kind not in _WMMA_TYPES.get((operand, shape), ()):
        raise EmulationError(f"{opcode} is not modeled: wmma is limited to f16, bf16, tf32, f64, s8 and u8")
    m, n, k = extents(shape)
    height, width = {"a": (m, k), "b": (k, n), "c": (m, n)}[operand]
    stride = width if layout == "row" else height
    if operand == "c":
        return _sums(shape, kind, layout, stride)
    side, size = wmma_side(operand, shape, kind), BITS[kind] // 8
    along = (layout == "row") == (operand == "a")  # whether memory is contiguous along k
    if space is not None and space.startswith("shared") and (size == 2 or (size == 1 and along)):
        pieces = _by_ldmatrix(side, along)
    else:
        word = "f8" if size == 8 else "u4"
        pieces = _by_lane(side, 1, max(1, 4 // size), size, word, along)
    return Fragment(pieces, "f64" if size == 8 else "b32", side.registers, side.copies, size, stride)


def _sums(shape: str, kind: str, layout: str, stride: int) -> Fragment:
    m, n, _ = extents(shape)
    by_columns = shape in BY_COLUMNS
    lines, along = (n, m) if by_columns else (m, n)
    side = Side(kind, lines // 8, along // 8, lines // 8)
    size, word = {"f16": (2, "u4"), "f32": (4, "f4"), "s32": (4, "u4"), "f64": (8, "f8")}[kind]
    count = 1 if kind == "f16" else 2
    pieces = _by_lane(side, count, 2, size, word, (layout == "row") != by_columns)
    return Fragment(pieces, "b32" if kind == "f16" else kind, count * side.registers, 1, size, stride)


def _patterns(side: Side) -> list[tuple[int, int]]:
    """Return the block and chunk of each pattern, in the order of their registers."""
    patterns = product(range(side.blocks), range(side.chunks))
    return sorted(patterns, key=lambda pattern: side.register(*pattern))


def _by_lane(side: Side, count: int, run: int, size: int, word: str, along: bool) -> tuple[Piece, ...]:
    """Each lane accesses its own elements, `run` in `held` registers: together if the line is contiguous (`along`)."""
    pieces = []
    for number, (block, chunk) in enumerate(_patterns(side)):
        registers = tuple(range(number * count, (number + 1) * count))
        line, first = 8 * block + _LANE // 4, 4 * run * chunk + _LANE % 4 * run
        if along:
            pieces.append(Piece(line, first, registers, word))
        elif size == 2:  # pairs along the other direction, transposed by MOVM
            pieces.append(Piece(8 * chunk + _LANE // 4, 8 * block + _LANE % 4 * 2, registers, word, transposed=True))
        elif size == 1:
            pieces += [Piece(first + i, line, registers, "u1", 8 * i) for i in range(run)]
        else:
            pieces += [Piece(first + i, line, registers[i : i + 1], word) for i in range(run)]
    return tuple(pieces)


def _by_ldmatrix(side: Side, along: bool) -> tuple[Piece, ...]:
    """LDSM of 4 matrices, or of 2 if elements are bytes."""
    patterns, row = _patterns(side), np.arange(8)
    at_once, elements = (2, 16) if BITS[side.type] == 8 else (4, 8)  # elements: in 16 bytes
    pieces = []
    for first in range(0, len(patterns), at_once):
        group = patterns[first : first + at_once]
        lines = np.concatenate([8 * block + row if along else 0 * row + 8 * block for block, _ in group])
        ks = np.concatenate([0 * row + elements * chunk if along else 8 * chunk + row for _, chunk in group])
        major, minor = (lines, ks) if along else (ks, lines)
        registers = tuple(range(first, first + len(group)))
        pieces.append(Piece(major, minor, registers, "u4", matrices=True, transposed=not along))
    return tuple(pieces)


# ---- matrices of 8 x 8 in 16 bits: lane 4 r + w holds elements 2 w and 2 w + 1 of row r ----


def transposed(register: Array) -> Array:
    """Return the transpose of a matrix; both are a register (warps, 32)."""
    matrix = np.ascontiguousarray(register).view("u2").reshape(-1, 8, 8)
    return np.ascontiguousarray(matrix.transpose(0, 2, 1)).view("u4").reshape(register.shape)


_MATRICES = re.compile(r"(?:ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?(?:\.shared(?:::cta)?)?\.b16")


def matrices(opcode: Opcode) -> tuple[int, bool]:
    """Return how many matrices an ldmatrix or stmatrix moves, and whether it transposes them.

    >>> from gemmery_emulator.instructions import opcode
    >>> matrices(opcode("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"))
    (4, True)

    Raises EmulationError for other forms: m16n16 and m8n16 of b8.
    """
    match = _MATRICES.fullmatch(str(opcode))
    if match is None:
        raise EmulationError(
            f"{opcode} is not modeled: it is limited to m8n8, .x1, .x2 or .x4, of b16, with or without .trans"
        )
    return int(match[1]), match[2] is not None


def loaded(rows: Array, transposing: bool) -> list[Array]:
    """Return registers (warps, 32) with the matrices whose rows are (warps, 8 * matrices, 16 bytes)."""
    words = np.ascontiguousarray(rows).view("u4").reshape(len(rows), -1, 32)
    registers = [np.ascontiguousarray(words[:, i]) for i in range(words.shape[1])]
    return [transposed(register) for register in registers] if transposing else registers


def stored(registers: Sequence[Array], transposing: bool) -> Array:
    """Return the rows (warps, 8 * matrices, 16 bytes as uint8) of matrices in registers (warps, 32)."""
    words = np.stack([transposed(register) if transposing else register for register in registers], axis=1)
    return words.view("u1").reshape(len(words), -1, 16)


ROW = 16  # bytes of a row of an 8 x 8 matrix of 16-bit elements


def _fragment(opcode: Opcode) -> Fragment:
    """The pieces of a load or store; ldmatrix and stmatrix are one piece, whose rows' addresses the lanes give."""
    if opcode.family == "wmma":
        return wmma_fragment(opcode)
    count, trans = matrices(opcode)
    row = np.arange(8 * count)
    piece = Piece(row, 0 * row, tuple(range(count)), "u4", matrices=True, transposed=trans)
    return Fragment((piece,), "b32", count, 1, 2, 8)


def _move(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """ldmatrix, stmatrix, wmma.load and wmma.store; wmma.mma only computes."""
    fragment, loads = _fragment(instruction.opcode), instruction.opcode.name in ("ldmatrix", "wmma.load")
    place, registers, *strides = instruction.operands
    if loads:
        place, registers = registers, place
    if not isinstance(registers, Vector):
        raise refused(instruction)
    if len(registers.elements) != fragment.registers or len(strides) > (instruction.opcode.family == "wmma"):
        raise refused(instruction, f"{len(registers.elements)} registers:")
    address = lowering.address(place, instruction)
    apart: Read = lowering.read(strides[0], "u32", instruction) if strides else lambda _: np.uint32(fragment.stride)
    of_wmma = instruction.opcode.family == "wmma"
    moved = _Moved(index, instruction.opcode.space, fragment, address, apart if of_wmma else None)
    flat = lowering.flat((registers,))
    if loads:
        return partial(moved.load, [lowering.write(register, fragment.type, instruction) for register in flat])
    return partial(moved.store, [lowering.read(register, fragment.type, instruction) for register in flat])


@dataclass(frozen=True)
class _Moved:
    """A load or store of a fragment."""

    index: int
    space: str
    fragment: Fragment
    address: Read
    apart: Read | None  # elements from row to row; None if the lanes give the addresses of rows

    def _lanes(self, machine: Machine, piece: Piece) -> Any:
        """The address of each lane for a piece; lanes beyond the rows of a matrix repeat the first."""
        start, size = self.address(machine.registers), self.fragment.size
        if self.apart is None:
            return start
        stride = self.apart(machine.registers).astype(np.int64)
        rules = (stride * size, 16, "with {} bytes from row to row"), (start, 32, "at address {:#x}")
        for value, rule, what in rules:
            bad = np.flatnonzero(np.broadcast_to(value % rule != 0, (machine.threads,)))
            if bad.size:
                name = machine.kernel.instructions[self.index].opcode.name
                does = f"executes {name} {what.format(int(machine.spread(value)[bad[0]]))}"
                report_misuse(machine, self.index, bad, f"{does}: it must be a multiple of {rule} bytes")
        major, minor = (
            np.concatenate([part, np.repeat(part[:1], 32 - len(part))]) for part in (piece.major, piece.minor)
        )
        base, step = (machine.spread(value).reshape(-1, 32) for value in (start, stride))
        return (base + (major * step + minor) * size).reshape(-1)

    def load(self, writes: Sequence[Write], machine: Machine, mask: Mask) -> None:
        """Load the pieces of the fragment to registers."""
        fragment = self.fragment
        parts: list[Any] = [None] * fragment.registers
        for piece in fragment.pieces:
            lanes = self._lanes(machine, piece)
            if piece.matrices:
                some = _some(machine, mask, piece)
                rows = reach.rows(machine, self.index, self.space, lanes, some).reshape(machine.warps, 32, ROW // 4)
                piece.put(loaded(rows[:, : len(piece.major)], piece.transposed), parts)
            else:
                kind, count = piece.dtype, len(piece.registers)
                values = reach.load(machine, self.index, self.space, lanes, mask, kind, count, piece.width)
                piece.put([value.reshape(machine.warps, 32) for value in values], parts)
        filled = parts[: fragment.registers // fragment.copies] * fragment.copies
        for write, value in zip(writes, filled, strict=True):
            write(machine.registers, mask, value.reshape(-1).view(NUMPY[fragment.type]))

    def store(self, reads: Sequence[Read], machine: Machine, mask: Mask) -> None:
        """Store registers as the pieces of the fragment."""
        parts = [machine.spread(read(machine.registers)).reshape(machine.warps, 32) for read in reads]
        for piece in self.fragment.pieces:
            lanes = self._lanes(machine, piece)
            if piece.matrices:
                rows = np.zeros((machine.warps, 32, ROW // 4), np.uint32)
                rows[:, : len(piece.major)] = stored(parts, piece.transposed).view(np.uint32)
                values = [np.ascontiguousarray(rows[..., word]).reshape(-1) for word in range(ROW // 4)]
                some = _some(machine, mask, piece)
                reach.store(machine, self.index, self.space, lanes, some, values, "u4", ROW, "stmatrix")
            else:
                values = [np.ascontiguousarray(value).view(piece.dtype).reshape(-1) for value in piece.get(parts)]
                reach.store(machine, self.index, self.space, lanes, mask, values, piece.dtype, piece.width)


def _some(machine: Machine, mask: Mask, piece: Piece) -> Mask:
    """Return the mask of the lanes that give the address of a row; None for all."""
    count = len(piece.major)
    if count == 32:
        return mask
    every = np.tile(np.arange(32) < count, machine.warps)
    return every if mask is None else every & mask


def _count(opcode: Opcode) -> tuple[str, int]:
    """A wmma.load or wmma.store counts as the machine instructions that ptxas makes of it."""
    pieces = wmma_fragment(opcode).pieces
    return "ldmatrix" if pieces[0].matrices else "st" if opcode.name == "wmma.store" else "ld", len(pieces)


TABLE = {
    "ldmatrix": Handler(step=_move, lanes="warp"),
    "stmatrix": Handler(step=_move, lanes="warp"),
    "wmma.load": Handler(step=_move, lanes="warp", count=_count),
    "wmma.store": Handler(step=_move, lanes="warp", count=_count),
}
