"""Which lane and register of a warp holds which element of a matrix.

NVIDIA, Parallel Thread Execution ISA 9.0, "Warp-level Matrix Instructions": the matrix fragments of mma.sync. All are
made of one pattern: 8 rows of 4 words of k, where lane 4 r + w holds word w of row r.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.errors import EmulationError

Array = NDArray[Any]

_FOUR_WORDS = {4: np.dtype("c16"), 8: np.dtype("V32")}  # of a row of a pattern, copied as one


BITS = {"f64": 64, "tf32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
WMMA_16 = ("m16n16k16", "m32n8k16", "m8n32k16")  # shapes for elements of 8 and 16 bits


def per_chunk(kind: str) -> int:
    """Elements along k in the 4 words of a pattern."""
    return 4 if kind == "f64" else 128 // BITS[kind]


@dataclass(frozen=True)
class Side:
    """A, or B transposed: `blocks` of 8 rows times `chunks` of 4 words along k, one register a lane for each."""

    type: str  # of the elements: "f16"
    blocks: int
    chunks: int
    tile: int = 1  # blocks that a machine instruction takes: their registers come before those of the next chunk
    copies: int = 1  # how often wmma repeats the registers

    @property
    def registers(self) -> int:
        return self.blocks * self.chunks * self.copies

    @property
    def depth(self) -> int:
        """Elements along k."""
        return self.chunks * per_chunk(self.type)

    def register(self, block: int, chunk: int) -> int:
        """The register that holds a pattern."""
        first = block - block % self.tile
        return first * self.chunks + chunk * self.tile + block % self.tile


def gathered(registers: Sequence[Array], side: Side) -> Array:
    """The words of a fragment, each register (warps, 32): an array (warps, rows, words of k)."""
    warps, word = len(registers[0]), registers[0].dtype
    fours = np.empty((warps, side.blocks, 8, side.chunks), _FOUR_WORDS[word.itemsize])
    for block, chunk in product(range(side.blocks), range(side.chunks)):
        fours[:, block, :, chunk] = np.ascontiguousarray(registers[side.register(block, chunk)]).view(fours.dtype)
    return fours.view(word).reshape(warps, 8 * side.blocks, 4 * side.chunks)


# ---- wmma ----
# The ISA leaves its fragments open. What ptxas makes of it for sm_90, read from its machine code, is mma.sync's on two
# halves: m16n16k16 of n, m32n8k16 of m; m8n32k16 is B^T A^T on two halves of n, so that a lane's two sums lie in a
# column, unless they are f16, which it transposes back. f16 is handed out in 8 registers of which the first ones
# count; the others repeat them.


def extents(shape: str) -> tuple[int, int, int]:
    """m, n, k of "m16n8k16"."""
    found = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", shape)
    if found is None:
        raise EmulationError(f"{shape!r} is no shape of a matrix instruction, as m16n16k16 is")
    m, n, k = map(int, found.groups())
    return m, n, k


def wmma_side(operand: str, shape: str, kind: str) -> Side:
    """A or B ("a", "b") of a wmma instruction."""
    m, n, k = extents(shape)
    blocks = (m if operand == "a" else n) // 8
    by_16 = m > 8 if operand == "a" else m == 8 and n > 8  # HMMA takes 16 rows of this operand, 8 of the other
    chunks = k // per_chunk(kind)
    copies = 8 // (blocks * chunks) if kind == "f16" else 1
    return Side(kind, blocks, chunks, 2 if by_16 else 1, copies)


def sums_transposed(shape: str, kind: str) -> bool:
    """Whether a lane's two neighbouring sums lie in a column of C."""
    return shape == "m8n32k16" and kind != "f16"


# ---- matrices of 8 x 8 in 16 bits: lane 4 r + w holds elements 2 w and 2 w + 1 of row r ----


def transposed(register: Array) -> Array:
    """The transpose of a matrix, both a register (warps, 32)."""
    matrix = np.ascontiguousarray(register).view("u2").reshape(-1, 8, 8)
    return np.ascontiguousarray(matrix.transpose(0, 2, 1)).view("u4").reshape(register.shape)
