"""Print the errors of float32 in parts next to those of CUDA cores, from the emulator, which rounds as an H200 does.

A unit is u |A||B|, u = 2^-24, element by element; a cell is the largest of 24 x 24. The last row multiplies halves,
whose sums stay in tensor cores from the first product to the last.

`python benchmarks/float32_errors.py cuda` multiplies on a GPU, by the API, and a cell is the largest of 1024 x 1024.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery_lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung

SIDE, DEPTHS = 24, (64, 1024, 4096)
GPU_SIDE, GPU_DEPTHS = 1024, (64, 1024, 4096, 16_384)
ROWS = ("simt_general", "split_fp16x3", "split_bf16x6", "split_paired", "wgmma_epilogue")
Matrix = NDArray[np.float64]


def normal(draw: np.random.Generator, k: int, side: int = SIDE) -> tuple[Matrix, Matrix]:
    """Return standard normal numbers."""
    return draw.standard_normal((side, k)), draw.standard_normal((k, side))


def positive(draw: np.random.Generator, k: int, side: int = SIDE) -> tuple[Matrix, Matrix]:
    """Return numbers from 0 to 1."""
    return draw.random((side, k)), draw.random((k, side))


def wide(draw: np.random.Generator, k: int, side: int = SIDE, spread: float = 2) -> tuple[Matrix, Matrix]:
    """Return numbers of many sizes."""
    a, b = (
        (draw.random(shape) - 0.5) * np.exp(spread * draw.standard_normal(shape)) for shape in ((side, k), (k, side))
    )
    return a, b


def graded(draw: np.random.Generator, k: int, side: int = SIDE) -> tuple[Matrix, Matrix]:
    """Return columns of A that are as much larger as the rows of B that they meet are smaller."""
    a, b = normal(draw, k, side)
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


def error_on_gpu(name: str, a: Matrix, b: Matrix) -> float:
    """Return the largest error of a product by the API, in units; `name` is a rung or cublas."""
    import torch

    import gemmery as gm

    kind = torch.float16 if name.startswith("wgmma") else torch.float32
    x, y = (torch.from_numpy(z).cuda().to(kind) for z in (a, b))
    options: dict[str, Any] = {"precision": PRECISIONS[name]} if name in PRECISIONS else {}
    # Without this, products that gain no time are left to CUDA cores.
    options |= {"batch_invariant": True} if name == "split_fp16x3" else {}
    options |= {"dtype": "float32"} if kind == torch.float16 else {}
    c = torch.matmul(x, y) if name == "cublas" else gm.matmul(x, y, **options)
    x, y = x.double(), y.double()
    return float(((c.double() - x @ y).abs() / (x.abs() @ y.abs())).max() * 2**24)


PRECISIONS = {"split_fp16x3": "f32_tensor", "split_bf16x6": "f32_strict", "split_paired": "f32_plus"}


def main(on_gpu: bool) -> None:
    """Print a block for each k."""
    measured, rows = (error_on_gpu, ("cublas", *ROWS)) if on_gpu else (error, ROWS)
    side = GPU_SIDE if on_gpu else SIDE
    for k in GPU_DEPTHS if on_gpu else DEPTHS:
        print(f"\nk = {k}".ljust(17), *(f"{kind:>9}" for kind in KINDS), flush=True)  # noqa: T201
        operands = {kind: KINDS[kind](np.random.default_rng(k), k, side) for kind in KINDS}
        for name in rows:
            kinds = [kind for kind in KINDS if name != "wgmma_epilogue" or kind in ("normal", "positive")]
            cells = [f"{measured(name, *operands[kind]):9.2f}" for kind in kinds]
            print(name.ljust(16), *cells)  # noqa: T201


if __name__ == "__main__":
    main("cuda" in sys.argv[1:])
