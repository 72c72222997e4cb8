"""Random functions of the sums of products, and how far their results on a device may be from the reference."""

from __future__ import annotations

import random

import numpy as np

import gemmery as gm
from gemmery import dtypes
from gemmery.epilogues.graph import EpilogueGraph
from gemmery.epilogues.reference import evaluate, rounded
from gemmery.epilogues.trace import Epilogue

UNARY = (gm.relu, gm.silu, gm.gelu, gm.sigmoid, np.tanh, gm.erf, np.negative, np.absolute)
GUARDED = (  # of numbers that may be anything
    lambda x: np.exp(gm.minimum(x, 3.0)),
    lambda x: np.log(1.0 + np.absolute(x)),
    lambda x: np.sqrt(np.absolute(x) + 0.25),
    lambda x: gm.rsqrt(x * x + 1.0),
    lambda x: x / (1.0 + np.absolute(x)),
    lambda x: gm.cast(x, "bfloat16"),
)
BINARY = (np.add, np.subtract, np.multiply, gm.maximum, gm.minimum)
ROWS = (gm.row_sum, gm.row_maximum, gm.row_sum_of_squares, gm.row_log_sum_exp)


def function(seed: int, sums: int = 1, statistics: bool = False, outputs: int = 1) -> Epilogue:
    """Return a random function of so many sums and of the operands x0 (m, n), x1 (n,), x2 (m, 1) and x3, a number."""

    def body(*given):
        draw = random.Random(seed)
        values = list(given)
        for _ in range(draw.randint(3, 8)):
            x, y = draw.choice(values), draw.choice(values)
            kind = draw.randrange(10)
            if kind < 3:
                z = draw.choice(UNARY)(x)
            elif kind < 5:
                z = draw.choice(GUARDED)(x)
            elif kind == 5:
                z = gm.where(x < y, x * draw.choice((0.5, -2.0)), y)
            elif kind == 6:
                z = gm.where(gm.row_index(x) >= gm.column_index(x), x, draw.choice((0.0, -1.0)))
            else:
                z = draw.choice(BINARY)(x, y)
            values.append(z if draw.random() < 0.7 else z * 0.125)
        if statistics:
            values.append(values[-1] - draw.choice(ROWS)(gm.minimum(values[-1], 8.0)))
        last = values[-1] + given[0] * 0.5 + (given[1] * 0.25 if sums == 2 else 0.0)
        more = [values[-1 - i] + given[0] for i in range(1, outputs)]
        return (last, *more) if outputs > 1 else last

    if sums == 2:
        return Epilogue(lambda c, d, x0, x1, x2, x3: body(c, d, x0, x1, x2, x3))  # noqa: PLW0108 # it names operands
    return Epilogue(lambda c, x0, x1, x2, x3: body(c, x0, x1, x2, x3))  # noqa: PLW0108 # as well


def check(results, graph: EpilogueGraph, totals, operands, out: str, unit: float = 2.0**-24) -> None:
    """Compare results with the reference; `totals` are exact sums.

    Kernels for results of 16 bits have gelu within 2**-11 of itself, 1/8 of a rounding to bfloat16, and 16 units of its
    argument: as if sums, which all follow from, were off by so much, and by as much of 4 where operands move them.
    """
    off = [2.0**-18 * (np.abs(total) + 4) if dtypes.get(out).size == 2 else 0.0 for total in totals]
    expected = evaluate(graph, totals, operands, (*off, 0.0)[:2], unit)
    for result, (value, error) in zip(results, expected, strict=True):
        own = dtypes.get(out)
        size = np.abs(value) + error
        more = 2.0**-10 * size if own.size == 2 else 16 * unit * size
        bound = error + more + own.unit_roundoff * size + own.unit_roundoff * 2.0 ** (own.normal + 1)
        got = np.asarray(result, np.float64)
        close = np.abs(got - value) <= bound
        beyond = ~np.isfinite(rounded(size, out)) | ~np.isfinite(error)
        right = close | beyond | (np.isnan(got) & np.isnan(value))
        assert right.all(), (graph.text, np.nanmax(np.abs(got - value) / bound))
