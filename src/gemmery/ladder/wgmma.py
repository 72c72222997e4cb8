"""The rungs on tensor cores by wgmma, from tiles that tensor copies bring: sm_90a."""

from __future__ import annotations

from dataclasses import replace

from gemmery import dtypes
from gemmery.cuda.geometry import (
    BAND,
    Geometry,
    MapBox,
    describable,
    element,
    instance,
    layouts,
    target,
    template,
    tiles,
)
from gemmery.errors import RefusedError
from gemmery.ladder.gpu import gpu_rung
from gemmery.problem import Config, Problem

_ROW = 128  # bytes of k in a stage, and of a row of a tile in shared memory
_HALF = ("f16", "bf16")
_NEEDS = 90
_INSTRUCTIONS = "wgmma and tensor copies"
_SPACE = {"bm": (64, 128, 256), "bn": (32, 64, 128, 192, 256), "stages": (2, 3, 4, 6)}
_EXPECT = {"local_requests": 0, "bank_conflicts": 0, "load_requests": 0}  # threads load nothing


def aligned_sums(k: int) -> float:
    """Return f(k) of the bound f(k) u |A||B| of wgmma in half precision, u = 2^-24.

    One step adds 16 products to a sum: all 17 are aligned to the largest exponent and cut to 25 bits of fraction, which
    costs each up to u / 2 of the largest, and a zero nothing; the result is cut to 24 bits, up to 2 u of it. That is
    u / 2 for each product, and 2.5 u for each step.
    """
    return 0.5 * k + 2.5 * -(-k // 16)


def refuses_maps(problem: Problem) -> str:
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


def _specialized(name: str, problem: Problem, config: Config) -> Geometry:
    """A tile per block, whose first warpgroup is the producer."""
    bm, bn, stages = config["bm"], config["bn"], config["stages"]
    _check_tile(bm, bn, stages)
    return _by_roles(name, problem, bm, bn, stages, tiles(problem, bm, bn)[0])


def _persistent(name: str, problem: Problem, config: Config) -> Geometry:
    """As many blocks as the device runs at a time, which take tiles in turn."""
    bm, bn, stages = config["bm"], config["bn"], config["stages"]
    _check_tile(bm, bn, stages)
    blocks = min(tiles(problem, bm, bn)[0], target(problem).sms)
    return replace(_by_roles(name, problem, bm, bn, stages, blocks), band=config["band"])


def _cluster(name: str, problem: Problem, config: Config) -> Geometry:
    """Clusters of cm x cn blocks."""
    bm, bn, stages, cm, cn = (config[key] for key in ("bm", "bn", "stages", "cm", "cn"))
    _check_tile(bm, bn, stages)
    _check_cluster(problem, bm, bn, cm, cn)
    clusters = min(tiles(problem, bm * cm, bn * cn)[0], target(problem).sms // (cm * cn))
    return replace(
        _by_roles(name, problem, bm, bn, stages, clusters * cm * cn, cm, cn), cluster=cm * cn, band=config["band"]
    )


def _by_roles(
    name: str, problem: Problem, bm: int, bn: int, stages: int, blocks: int, cm: int = 1, cn: int = 1
) -> Geometry:
    """A warpgroup that brings tiles, and one or two that multiply."""
    return Geometry(
        f"{name}.cu",
        instance(name, problem, wgmma_tiles(problem, bm, bn, stages, cm, cn)),
        (blocks, 1, 1),
        (min(bm // 64, 2) * 128 + 128, 1, 1),
        shared=ring_bytes(problem, bm, bn, stages) + 16 * stages,
        needs=_NEEDS,
        instructions=_INSTRUCTIONS,
        alone=True,
        overlaps=True,
        tile=(bm, bn),
        maps=operand_boxes(problem, bm, bn, cm, cn),
    )


def _check_cluster(problem: Problem, bm: int, bn: int, cm: int, cn: int) -> None:
    if cm * cn not in (1, 2, 4):
        raise RefusedError(f"cm={cm}, cn={cn}: a cluster has 1, 2 or 4 blocks")
    a, b = (64 if problem.a_layout == "col" else 8), (8 if problem.b_layout == "col" else 64)
    if bm % (a * cn) or (cm > 1 and bn % (b * cm)):
        raise RefusedError(
            f"bm={bm}, bn={bn}, cm={cm}, cn={cn}: the {cn} blocks of a row copy multiples of {a} rows of A, "
            f"and the {cm} of a column multiples of {b} columns of B"
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
        refuses=refuses_maps,
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
    gpu_rung(
        "wgmma_specialized",
        idea="one warpgroup only brings tiles, two only multiply; they meet at mbarriers",
        parent="wgmma_tma",
        dtypes=_HALF,
        refuses=refuses_maps,
        bound=aligned_sums,
        geometry=_specialized,
        space=_SPACE,
        default={"bm": 128, "bn": 256, "stages": 4},
        expect=_EXPECT,
        lesson=(
            "With roles instead of turns there is no barrier of all threads left in the loop: the producer runs ahead "
            "until the ring is full, and a stage is handed back while the next products are under way. One thread can "
            "feed two warpgroups, so the registers of the others in its warpgroup go to the consumers by setmaxnreg, "
            "which makes room for a tile of 128 x 256. What is left between tiles: a block starts with an empty ring, "
            "and ends with stores that nothing overlaps."
        ),
    ),
    gpu_rung(
        "wgmma_persistent",
        idea="a block takes one tile after another, in an order that shares operands in L2",
        parent="wgmma_specialized",
        dtypes=_HALF,
        refuses=refuses_maps,
        bound=aligned_sums,
        geometry=_persistent,
        space={**_SPACE, "band": (1, 4, 8, 16)},
        default={"bm": 128, "bn": 256, "stages": 4, "band": BAND},
        expect=_EXPECT,
        lesson=(
            "The ring goes on across tiles, so the first stages of the next tile come while this one is stored, and a "
            "block is set up once. The kernel, not the hardware, now chooses the order of tiles: in bands, those under "
            "way together cover about a square, which needs the fewest rows of A and columns of B from memory. The "
            "number of tiles in the last round matters more than before: 133 tiles on 132 multiprocessors take two."
        ),
    ),
    gpu_rung(
        "wgmma_cluster",
        idea="two blocks of a cluster copy half of their common operand each, to both",
        parent="wgmma_persistent",
        dtypes=_HALF,
        refuses=refuses_maps,
        bound=aligned_sums,
        geometry=_cluster,
        space={**_SPACE, "cm": (1, 2, 4), "cn": (1, 2), "band": (1, 4, 8, 16)},
        default={"bm": 128, "bn": 256, "stages": 4, "cm": 2, "cn": 1, "band": BAND},
        expect=_EXPECT,
        lesson=(
            "A copy can arrive in the shared memory of several blocks at once, so a cluster asks L2 for a common "
            "operand only once. In return its blocks depend on each other: a stage must be empty in all of them "
            "before any of them fills it. That pays where requests to L2 are the limit, as with rows that do not "
            "begin at lines of 128 bytes; where they are not, blocks that run freely are as fast or faster."
        ),
    ),
)
