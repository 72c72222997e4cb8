"""Print the errors of float32 in parts next to those of CUDA cores, from the emulator, which rounds as an H200 does.

A unit is u |A||B|, u = 2^-24, element by element; a cell is the largest of 24 x 24. The last row multiplies halves,
whose sums stay in tensor cores from the first product to the last.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from gemmery.lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find

SIDE, DEPTHS = 24, (64, 1024, 4096)
ROWS = ("simt_general", "split_fp16x3", "split_bf16x6", "split_paired", "wgmma_epilogue")
Matrix = NDArray[np.float64]


def normal(draw: np.random.Generator, k: int) -> tuple[Matrix, Matrix]:
    """Return standard normal numbers."""
    return draw.standard_normal((SIDE, k)), draw.standard_normal((k, SIDE))


def positive(draw: np.random.Generator, k: int) -> tuple[Matrix, Matrix]:
    """Return numbers from 0 to 1."""
    return draw.random((SIDE, k)), draw.random((k, SIDE))


def wide(draw: np.random.Generator, k: int, spread: float = 2) -> tuple[Matrix, Matrix]:
    """Return numbers of many sizes."""
    a, b = (
        (draw.random(shape) - 0.5) * np.exp(spread * draw.standard_normal(shape)) for shape in ((SIDE, k), (k, SIDE))
    )
    return a, b


def graded(draw: np.random.Generator, k: int) -> tuple[Matrix, Matrix]:
    """Return columns of A that are as much larger as the rows of B that they meet are smaller."""
    a, b = normal(draw, k)
    powers = draw.integers(-16, 17, k)
    return np.ldexp(a, powers), np.ldexp(b, -powers[:, None])


KINDS = {"normal": normal, "positive": positive, "wide": wide, "wider": partial(wide, spread=4), "graded": graded}


def error(name: str, a: Matrix, b: Matrix) -> float:
    """Return the largest error of a rung, in units."""
    kind, element = (np.float16, "f16") if name.startswith("wgmma") else (np.float32, "f32")
    x, y = a.astype(kind), b.astype(kind)
    c = np.zeros((1, SIDE, SIDE), np.float32)
    gemm = Gemm(x[None], y[None], c)
    problem = problem_of(gemm, element, "f32", "h200")
    run_rung(find(CUDA, name), problem, {}, gemm, EmulationOptions(check=False))
    x, y = x.astype(np.float64), y.astype(np.float64)
    return float((abs(c[0] - x @ y) / (abs(x) @ abs(y))).max() * 2**24)


def main() -> None:
    """Print a block for each k."""
    for k in DEPTHS:
        print(f"\nk = {k}".ljust(17), *(f"{kind:>9}" for kind in KINDS))  # noqa: T201
        for name in ROWS:
            kinds = [kind for kind in KINDS if name != "wgmma_epilogue" or kind in ("normal", "positive")]
            cells = [f"{error(name, *KINDS[kind](np.random.default_rng(k), k)):9.2f}" for kind in kinds]
            print(name.ljust(16), *cells)  # noqa: T201


if __name__ == "__main__":
    main()
