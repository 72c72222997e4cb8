"""The rungs on tensor cores by wgmma, from tiles that tensor copies bring: sm_90a."""

from __future__ import annotations

from gemmery import dtypes
from gemmery.cuda.geometry import Geometry, MapBox, describable, element, instance, layouts, template, tiles
from gemmery.errors import RefusedError
from gemmery.ladder.gpu import gpu_rung
from gemmery.problem import Config, Problem

_ROW = 128  # bytes of k in a stage, and of a row of a tile in shared memory
_HALF = ("f16", "bf16")
_NEEDS = 90
_INSTRUCTIONS = "wgmma and tensor copies"
_SPACE = {"bm": (64, 128, 256), "bn": (32, 64, 128, 192, 256), "stages": (2, 3, 4, 6)}
_EXPECT = {"local_requests": 0, "bank_conflicts": 0}


def aligned_sums(k: int) -> float:
    """Return f(k) of the bound f(k) u |A||B| of wgmma in half precision, u = 2^-24.

    One step adds 16 products to a sum: all 17 are aligned to the largest exponent and cut to 25 bits of fraction, which
    costs each up to u / 2 of the largest, and a zero nothing; the result is cut to 24 bits, up to 2 u of it. That is
    u / 2 for each product, and 2.5 u for each step.
    """
    return 0.5 * k + 2.5 * -(-k // 16)


def _refuses(problem: Problem) -> str:
    """Refuse what a tensor map cannot describe."""
    rows = problem.by_rows()
    if problem.out not in (*_HALF, "f32"):
        return f"it sums in f32 and writes f16, bf16 and f32, not {problem.out}"
    return describable(rows, "a") or describable(rows, "b")


def wgmma_tiles(problem: Problem, bm: int, bn: int, stages: int, cm: int = 1, cn: int = 1) -> str:
    """Return the WgmmaTiles of wgmma.cuh."""
    shape = (bm, bn, stages) if cm == cn == 1 else (bm, bn, stages, cm, cn)
    return template("WgmmaTiles", element(problem), *layouts(problem), *shape)


def operand_boxes(problem: Problem, bm: int, bn: int, cm: int = 1, cn: int = 1) -> tuple[MapBox, MapBox]:
    """Return the boxes of A and of B that one copy moves: 128 bytes along the adjacent side."""
    bk = _ROW // dtypes.get(problem.dtype).size
    a = (64, bk) if problem.a_layout == "col" else (bk, bm // cn)
    b = (bk, bn // cm) if problem.b_layout == "col" else (64, bk)
    return MapBox("a", a), MapBox("b", b)


def ring_bytes(problem: Problem, bm: int, bn: int, stages: int) -> int:
    """Return the bytes of the stages in shared memory; boxes of B that are 64 columns wide may extend beyond bn."""
    wide = bn if problem.b_layout == "col" else -(-bn // 64) * 64
    return stages * (bm + wide) * _ROW


def _tma(name: str, problem: Problem, config: Config) -> Geometry:
    """A tile per block; all its threads wait and multiply."""
    bm, bn, stages = config["bm"], config["bn"], config["stages"]
    _check_tile(bm, bn, stages)
    return Geometry(
        f"{name}.cu",
        instance(name, problem, wgmma_tiles(problem, bm, bn, stages)),
        tiles(problem, bm, bn),
        (min(bm // 64, 2) * 128, 1, 1),
        shared=ring_bytes(problem, bm, bn, stages) + 8 * stages,
        needs=_NEEDS,
        instructions=_INSTRUCTIONS,
        alone=True,
        tile=(bm, bn),
        maps=operand_boxes(problem, bm, bn),
    )


def _check_tile(bm: int, bn: int, stages: int) -> None:
    if bm not in (64, 128, 256) or bn % 32 or not 32 <= bn <= 256 or bm * bn > 256 * 192:
        raise RefusedError(
            f"bm={bm}, bn={bn}: a tile has 64, 128 or 256 rows and 32, 64, ... 256 columns, at most 256 x 192 in all"
        )
    if stages < 2:
        raise RefusedError(f"stages={stages}: one is filled while another is read; use 2 or more")


WGMMA = (
    gpu_rung(
        "wgmma_tma",
        idea="the hardware brings whole tiles, swizzled, and multiplies them from shared memory",
        parent="mma_pipelined",
        dtypes=_HALF,
        refuses=_refuses,
        bound=aligned_sums,
        geometry=_tma,
        space=_SPACE,
        default={"bm": 128, "bn": 128, "stages": 4},
        expect=_EXPECT,
        lesson=(
            "A tensor map describes a matrix once; from then on one thread asks for a box of it, and the copy engine "
            "computes addresses, swizzles, fills in zeros beyond the edges and counts bytes at an mbarrier. wgmma "
            "reads both operands from shared memory, so no register holds a fragment, and 128 threads multiply "
            "64 x 128 x 16 in one instruction. But every thread still waits for each stage, and no product is under "
            "way while the next stage is asked for."
        ),
    ),
)
