"""A weight of 8 or 4 bits an element, packed once: panels of levels, widened by each step, and a factor for each group.

A block of k is a group. Each of its panels begins with a row of factors, by which the micro-kernel multiplies the sums.
A byte of 4-bit levels has those of two columns, a vector of columns apart, each plus 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gemmery.arrays import View
from gemmery.cpu import workspace
from gemmery.cpu.build import packed_once
from gemmery.cpu.target import host
from gemmery.cpu.ukernel import Product, register_tile

if TYPE_CHECKING:
    from gemmery.dtypes import Array

LONGEST = 512  # elements of k in a block; a longer group is halved
DTYPES = ("f32", "f16", "bf16")  # of the other operand and of the result


def types(dtype: str, activation: str, bits: int) -> Product:
    """Return the product of A and C of `dtype` by levels of so many bits: sums are float32."""
    return Product(dtype, dtype, "float", "float", activation=activation, stored=f"levels{bits}")


class PackedLevels:
    """The panels of a weight whose levels are (n, k) and factors (n, groups): `w[j, p]` is their product."""

    def __init__(self, levels: Array, factors: Array, bits: int) -> None:
        n, k = levels.shape
        while k // factors.shape[1] > LONGEST and k // factors.shape[1] % 2 == 0:
            factors = factors.repeat(2, 1)
        register, blocks = register_tile(host(), types("f32", "", bits)), factors.shape[1]
        nr, group, panels = register.nr, k // blocks, -(-n // register.nr)
        wide = np.zeros((panels * nr, k), np.int8)
        wide[:n] = levels
        cells = wide.reshape(panels, nr, blocks, group).transpose(2, 0, 3, 1)
        if bits == 4:
            pairs = (cells + 8).view(np.uint8).reshape(blocks, panels, group, -1, 2, register.lanes)
            cells = (pairs[..., 0, :] | pairs[..., 1, :] << 4).view(np.int8)
        rows = np.zeros((panels * nr, blocks), np.float32)
        rows[:n] = factors
        heads = np.ascontiguousarray(rows.reshape(panels, nr, blocks).transpose(2, 0, 1)).view(np.int8)
        whole = np.concatenate([heads.reshape(blocks, panels, -1), cells.reshape(blocks, panels, -1)], axis=-1)
        self.n, self.k, self.group, self.bits, self.nbytes = n, k, group, bits, whole.nbytes
        self._block = workspace.fresh(whole.nbytes, large=True)
        self._block[:] = whole.data.cast("B")
        self._at = workspace.address(self._block)

    def multiply(self, x: View, out: View, bias: View | None, activation: str, threads: int) -> None:
        """Write activation(x Wᵀ + bias) to `out`: x is (1, m, k), `out` (1, m, n) in rows, a bias n float32."""
        kernel = packed_once(types(x.dtype, activation, self.bits), self.group)
        weight = View(self._at, (1, self.k, self.n), (0, 0, 0), x.dtype)
        kernel(x, weight, out, bias=bias, threads=threads)
