"""The rungs whose sums over k have parts: shared by the blocks of a cluster, or each with factors of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gemmery import dtypes
from gemmery.cuda import hopper
from gemmery.cuda.geometry import C_NAMES, Geometry, element, target, template, tiles
from gemmery.cuda.hopper_model import Instance
from gemmery.cuda.tiles import complete
from gemmery.errors import RefusedError
from gemmery.ladder import wgmma
from gemmery.ladder.gpu import gpu_rung
from gemmery.ladder.wgmma_routes import packing
from gemmery.problem import Config, Problem

_HALF = ("f16", "bf16")
_EXPECT = {"local_requests": 0, "bank_conflicts": 0}
_SPLITS = (2, 4, 8)  # blocks of a cluster
_HALVES = {"bm": 128, "bn": 128, "stages": 6, "splits": 2}  # where the library would not split k
_SCALED_TILES = (  # their speeds: one warpgroup adds parts while nobody multiplies, 64 columns read A twice as often
    Instance(128, 128, 6, 1, 1),
    Instance(128, 64, 8, 1, 1, speed=85),
    Instance(64, 128, 8, 1, 1, speed=70),
    Instance(64, 64, 8, 1, 1, speed=60),
)
_BLOCK = 128  # of k, and of columns of B, that have a factor of their own


def turns(count: int, blocks: int, splits: int) -> tuple[int, int]:
    """Return how many tiles stay whole, and how many turns the clusters take at the others, 1 / splits of a tile each.

    >>> turns(288, 132, 2)  # 2 rounds, and 24 tiles for 66 clusters
    (264, 1)
    >>> turns(288, 108, 2)  # 72 tiles for 54 clusters would be two halves
    (288, 0)
    """
    rounds, rest = divmod(count, blocks)
    parts = -(-rest // (blocks // splits))
    return (count, 0) if parts >= splits else (rounds * blocks, parts)


def split_refusal(bm: int, bn: int, stages: int, splits: int) -> str:
    """Return why the blocks of a cluster cannot share a tile; "" if they can."""
    if splits not in _SPLITS:
        return f"splits={splits}: 2, 4 or 8 blocks of a cluster share the k of a tile"
    if bm not in (64, 128, 256):
        return f"bm={bm}: the warpgroups of a tile that is shared lie below each other; use 64, 128 or 256 rows"
    if bn % (8 * splits):
        return f"bn={bn}, splits={splits}: each block finishes a part of the columns, a multiple of 8"
    if 4 * bm * bn > stages * (bm + bn) * 128:
        return (
            f"bm={bm}, bn={bn}, stages={stages}: the sums of a tile meet in the ring; use a smaller tile or more stages"
        )
    return ""


def _in_parts(bound: Callable[[int], float]) -> Callable[[int], float]:
    """Return f(k) of sums in up to 8 parts: adding those rounds 7 times."""
    return lambda k: bound(k) + 7


def _refuses_streamk(problem: Problem) -> str:
    """Refuse products whose k must not be split."""
    if problem.invariant:
        return "it splits k by the number of tiles, so that the bits of a row depend on m: take wgmma_epilogue"
    return wgmma.refuses_library(problem)


def _streamk(name: str, problem: Problem, config: Config) -> Geometry:
    """Clusters of `splits` blocks that stay: whole tiles for each block, then shared ones for each cluster."""
    splits, bm, bn, stages = config["splits"], config["bm"], config["bn"], config["stages"]
    if reason := split_refusal(bm, bn, stages, splits):
        raise RefusedError(reason)
    most = config["blocks"] // splits or wgmma.clusters(target(problem).sms, splits)
    count = min(tiles(problem, bm, bn)[0], most)
    return replace(_persistent(name, problem, config, count * splits, splits), cluster=splits)


def _resolve_streamk(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 but that of `blocks` replaced; 0 blocks are all multiprocessors."""
    choice = hopper.chosen(problem, target(problem))
    return complete(config, choice if choice["splits"] > 1 else {**choice, **_HALVES})


def _persistent(name: str, problem: Problem, config: Config, blocks: int, *parameters: int) -> Geometry:
    """A grid of blocks with a producer, whose tile and ring are those of the config, and C by tensor copies."""
    problem = problem if problem.k else problem._replace(a_layout="row", b_layout="col")  # nothing of them is read
    bm, bn, stages = config["bm"], config["bn"], config["stages"]
    shared = wgmma.shared_bytes(problem, bm, bn, stages)
    wgmma.check(problem, bm, bn, stages, 1, 1, shared)
    tiling = wgmma.wgmma_tiles(problem, bm, bn, stages)
    kernel = template(name, element(problem), C_NAMES[problem.out], wgmma.steps(problem), tiling, *parameters)
    maps = *wgmma.operand_boxes(problem, bm, bn), wgmma.piece_box(problem, bm, bn)
    warpgroups, band = min(bm // 64, 2) + 1, config["band"]
    return wgmma.launch(name, kernel, blocks, warpgroups, shared, (bm, bn), maps, overlaps=True, band=band)


def promoted(k: int) -> float:
    """Return f(k) of the bound f(k) u |A||B| of float8 products that are added in f32 every 128 of k, u = 2^-24.

    Within 128 of k a step adds 32 products to a sum: all 33 are aligned to the largest exponent and cut to 13 bits of
    fraction, each by up to 2^-13 = 2048 u of the largest. Four steps cost up to 4 x 33 x 2048 u of the sum of their
    |a||b|. The parts do not add to that: each has its own |A||B|. A product of two factors and the sum of ceil(k / 128)
    parts round once each.
    """
    steps = min(4, -(-k // 32))
    return steps * 33 * 2048 + -(-k // _BLOCK) + 4


def _refuses_blocks(problem: Problem) -> str:
    """Refuse factors of whole rows and columns, and products that have no place for factors of blocks."""
    if problem.scales == "outer":
        return "it has a factor for each 128 of k: factors of whole rows and columns are applied to the finished sum"
    if problem.scales and problem.c_layout == "col":
        return "factors belong to rows of A and to blocks of columns of B: store C row by row"
    if problem.scales and problem.batch > 1:
        return f"its factors are those of one product, not of a batch of {problem.batch}"
    if problem.out not in (*_HALF, "f32"):
        return f"it sums in f32 and writes f16, bf16 and f32, not {problem.out}"
    return ""


def _resolve_blockscaled(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 but that of `blocks` replaced: by the tile whose rounds take least time.

    >>> keys = ("bm", "bn", "stages", "band", "blocks")
    >>> case = Problem(8192, 8192, 8192, "e4m3", "bf16", b_layout="col", device="h200", scales="blocks")
    >>> _resolve_blockscaled(case, dict.fromkeys(keys, 0))
    {'bm': 128, 'bn': 128, 'stages': 6, 'band': 11, 'blocks': 128}
    """
    sms = target(problem).sms
    rounds = [-(-tiles(problem, tile.bm, tile.bn)[0] // sms) * tile.bm * tile.bn / tile.speed for tile in _SCALED_TILES]
    tile = _SCALED_TILES[rounds.index(min(rounds))]
    bm, bn = config["bm"] or tile.bm, config["bn"] or tile.bn
    rows, columns = -(-problem.m // bm), -(-problem.n // bn)
    band, blocks = hopper.order(tile, rows, columns, problem.batch, sms)
    stages = 6 if bm == bn == 128 else 8
    return complete(config, {"bm": bm, "bn": bn, "stages": stages, "band": band, "blocks": blocks})


def _blockscaled(name: str, problem: Problem, config: Config) -> Geometry:
    """Blocks that stay, with two warpgroups that add parts by CUDA cores beside the products of tensor cores."""
    bm, bn = config["bm"], config["bn"]
    if bm not in (64, 128) or bn not in (64, 128):
        raise RefusedError(f"bm={bm}, bn={bn}: a thread has a sum and two parts of each element: use 64 or 128")
    blocks = min(tiles(problem, bm, bn)[0], config["blocks"] or target(problem).sms)
    return _persistent(name, problem, config, blocks)


SPLIT = (
    gpu_rung(
        "wgmma_streamk",
        one_sided=True,
        idea="the blocks of a cluster share the k of the tiles of the last round",
        parent="wgmma_epilogue",
        dtypes=wgmma.DTYPES,
        refuses=_refuses_streamk,
        bound=_in_parts(wgmma.aligned_sums),
        bounds={
            "tf32": _in_parts(wgmma.aligned_sums_tf32),
            **dict.fromkeys(dtypes.FLOAT8, _in_parts(wgmma.aligned_sums_8_bits)),
            "int8": wgmma.exact_sums,
        },
        geometry=packing(_streamk),
        resolve=_resolve_streamk,
        space={
            "bm": (0, 64, 128, 256),
            "bn": (0, 64, 128, 192, 256),
            "stages": (0, 3, 4, 6, 8),
            "splits": (0, 2, 4, 8),
            "band": (0, 1, 8, 16),
            "blocks": (0, 8, 128),
        },
        expect={**_EXPECT, "load_requests": 0},
        lesson=(
            "Whole tiles take whole rounds: 2.18 rounds last as long as 3. Where the last round has few tiles, the "
            "blocks of a cluster take a part of k of one tile each, send each other their sums through the shared "
            "memory of the cluster, and finish a part of the columns each: 2.18 rounds last 2.5. The hardware starts a "
            "cluster together and has a barrier for it, so nothing waits for a block that has not begun. k is split "
            "at the end only: until then neighbours read the same parts of A and B out of the L2 cache."
        ),
    ),
    gpu_rung(
        "wgmma_blockscaled",
        idea="tensor cores sum 128 of k, CUDA cores scale that and add it in f32",
        parent="wgmma_epilogue",
        dtypes=dtypes.FLOAT8,
        refuses=_refuses_blocks,
        bound=promoted,
        geometry=packing(_blockscaled),
        resolve=_resolve_blockscaled,
        space={"bm": (0, 64, 128), "bn": (0, 64, 128), "stages": (0, 3, 6, 8), "band": (0, 1, 8, 16), "blocks": (0, 8)},
        expect=_EXPECT,
        lesson=(
            "Eight bits have little range, so every 128 of k has factors: one for a row of A, one for 128 x 128 of B. "
            "They cannot wait for the end of the sum, and tensor cores have no place for them. So a sum ends every 128 "
            "of k, and 64 multiply-adds of each thread scale it and add it to another. A warpgroup has registers for "
            "two parts: while it adds one, the products of the other are under way. What tensor cores cut off, 13 bits "
            "behind the largest term, is no longer carried from one part to the next."
        ),
    ),
)
