"""float8 products with factors for blocks, of whole numbers and powers of two, so that every sum is exact."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

BLOCK = 128  # of k, and columns of B, that have one factor
ELEMENTS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@dataclass(frozen=True)
class ScaledOperands:
    """A (m, k), B (k, n) with adjacent elements of k, and their factors."""

    a: np.ndarray
    b: np.ndarray
    a_scale: np.ndarray  # (m, blocks of k)
    b_scale: np.ndarray  # (blocks of k, blocks of n)

    @property
    def wide(self) -> tuple[np.ndarray, np.ndarray]:
        """A and B times their factors, in float64."""
        (_, k), (_, n) = self.a.shape, self.b.shape
        a_scale = np.repeat(self.a_scale.astype(np.float64), BLOCK, 1)[:, :k]
        b_scale = np.repeat(np.repeat(self.b_scale.astype(np.float64), BLOCK, 0)[:k], BLOCK, 1)[:, :n]
        return self.a.astype(np.float64) * a_scale, self.b.astype(np.float64) * b_scale

    @property
    def product(self) -> np.ndarray:
        """C, exactly."""
        a, b = self.wide
        return a @ b


def scaled_operands(m: int, n: int, k: int, name: str = "e4m3", across: bool = False) -> ScaledOperands:
    """Return operands of -2 ... 2 with factors 1/8 ... 8; `across` stores the factors of A block by block."""
    draw = np.random.default_rng([m, n, k])
    blocks, columns = -(-k // BLOCK), -(-n // BLOCK)
    a, b = (draw.integers(-2, 3, shape).astype(np.float32).astype(ELEMENTS[name]) for shape in ((m, k), (n, k)))
    factors = [
        np.ldexp(np.float32(1), draw.integers(-3, 4, shape)).astype(np.float32)
        for shape in ((blocks, m) if across else (m, blocks), (blocks, columns))
    ]
    return ScaledOperands(a, b.T, factors[0].T if across else factors[0], factors[1])
