"""Products of float64 by residues as the rules say, bit for bit, with Python's integers."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import numpy as np

from gemmery.ladder.int8_pieces import MODULI

U = 2.0**-53


def scaling(x, count):
    """The t of each row: the largest for which 2^t times the norm is at most the root of half the moduli's product."""
    limit = Fraction(prod(MODULI[:count]), 2) * (1 - Fraction(1, 2**16))
    exponents = []
    for row in x:
        squares = sum(Fraction(float(v)) ** 2 for v in row)
        t = 0
        while squares and squares * 4**t <= limit:
            t += 1
        while squares * Fraction(4) ** t > limit:
            t -= 1
        exponents.append(t)
    return np.array(exponents)


def integers(x, exponents):
    """Rounded to nearest, ties to even; as Python's integers."""
    scaled = np.rint(np.ldexp(x, exponents[:, None]))
    return np.array([[int(v) for v in row] for row in scaled], object).reshape(x.shape)


def expected(a, b, count=15):
    """The product as ozaki_int8 computes it; exact, where residues tell the sum."""
    rows, columns = scaling(a, count), scaling(b.T, count)
    exact = integers(a, rows) @ integers(b.T, columns).T
    rounded = np.array([[float(v) for v in row] for row in exact]).reshape(exact.shape)
    return np.ldexp(rounded, -rows[:, None] - columns[None])
