"""The rungs of products in parts: of k, for the blocks of a cluster or with factors of their own; of rows in groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gemmery import dtypes
from gemmery.cuda import choose
from gemmery.cuda.choose import complete, legal
from gemmery.cuda.choose.cost import GROUP_BLOCK, GROUP_ROWS, at_a_time, exchanged, is_swapped, quickest
from gemmery.cuda.choose.data import GROUPS, HALVES, SCALED, Instance
from gemmery.cuda.constants import BIAS_BYTES
from gemmery.cuda.geometry import Geometry, MapBox, describable, target, tiles
from gemmery.errors import RefusedError
from gemmery.ladder import gpu, wgmma
from gemmery.ladder.gpu import gpu_rung, packing, sums_in_f32
from gemmery.problem import Config, Problem

_EXPECT = {"local_requests": 0, "bank_conflicts": 0}
_BLOCK = 128  # of k, and of columns of B, that have a factor of their own
_PLACES = 16 * 24  # bytes of places of tiles, and their barriers
_WIDTHS = {tile.bn: tile for tile in GROUPS}
MOST_ENDS = BIAS_BYTES // 8  # of groups along k, whose ends and order lie in the place of a bias


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
    tile, splits = wgmma.tile_of(config), config["splits"]
    cluster = splits * tile.cm * tile.cn
    wgmma.check(legal.split_refusal(tile, splits) or legal.illegal(gpu.as_read(problem), tile))
    most = config["blocks"] // cluster or max(1, at_a_time(cluster, target(problem).sms))
    blocks = min(tiles(problem, tile.bm * tile.cm, tile.bn * tile.cn)[0], most) * cluster

    def in_place(product: Problem, _: Config) -> Geometry:
        turned = exchanged(tile) if is_swapped(tile.bm) else tile
        warpgroups = legal.consumers(product, turned)
        return wgmma.staged(name, product, turned, warpgroups, blocks, splits, cluster=cluster, band=config["band"])

    if is_swapped(tile.bm):
        return replace(gpu.library(in_place, problem.transposed(), config), tile=tile[:2], swapped=True)
    return gpu.library(in_place, problem, config)


def _resolve_streamk(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 but that of `blocks` replaced; 0 blocks are all multiprocessors."""
    choice = choose.chosen(problem, target(problem))
    if choice["splits"] == 1:  # the library would not split k
        choice |= dict(zip(("bm", "bn", "stages", "cm", "cn", "splits"), (*HALVES[:5], 2), strict=True))
    return complete(config, choice)


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
    return sums_in_f32(problem)


def _resolve_blockscaled(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 but that of `blocks` replaced: by the tile whose rounds take least time.

    >>> keys = ("bm", "bn", "stages", "band", "blocks")
    >>> case = Problem(8192, 8192, 8192, "e4m3", "bf16", b_layout="col", device="h200", scales="blocks")
    >>> _resolve_blockscaled(case, dict.fromkeys(keys, 0))
    {'bm': 128, 'bn': 128, 'stages': 6, 'band': 11, 'blocks': 128}
    """
    m, n, batch, device = problem.m, problem.n, problem.batch, target(problem)
    tile = quickest(SCALED, m, n, batch, device.sms)
    bm, bn = config["bm"] or tile.bm, config["bn"] or tile.bn
    band, blocks = choose.order(tile._replace(bm=bm, bn=bn), m, n, batch, device)
    stages = 6 if bm == bn == 128 else 8
    return complete(config, {"bm": bm, "bn": bn, "stages": stages, "band": band, "blocks": blocks})


def _blockscaled(name: str, problem: Problem, config: Config) -> Geometry:
    """Blocks that stay, with two warpgroups that add parts by CUDA cores beside the products of tensor cores."""
    bm, bn = config["bm"], config["bn"]
    if bm not in (64, 128) or bn not in (64, 128):
        raise RefusedError(f"bm={bm}, bn={bn}: a thread has a sum and two parts of each element: use 64 or 128")
    tile, blocks = Instance(bm, bn, config["stages"], 1, 1), config["blocks"] or target(problem).sms
    warpgroups, blocks = legal.consumers(problem, tile, most=2), min(tiles(problem, bm, bn)[0], blocks)
    wgmma.check(legal.refused(problem, tile, legal.shared_bytes(problem, tile, warpgroups)))
    return wgmma.staged(name, problem, tile, warpgroups, blocks, band=config["band"])


def _grouped(name: str, problem: Problem, config: Config) -> Geometry:
    """Blocks that take the tiles of all groups in turn: as many as there may be tiles, at most one a multiprocessor."""
    bn, stages = config["bn"], config["stages"]
    if bn not in _WIDTHS:
        raise RefusedError(f"bn={bn}: a tile has {', '.join(map(str, _WIDTHS))} columns")
    tile, most = _WIDTHS[bn]._replace(stages=stages), _WIDTHS[bn].stages
    if not 2 <= stages <= most:
        raise RefusedError(f"stages={stages}: a ring of tiles of {bn} columns has 2 to {most} stages")
    a, b = wgmma.operand_boxes(problem, tile)
    if problem.a_layout != "col":
        a = MapBox("a", (a.box[0], GROUP_BLOCK))
    if problem.b_layout == "col":
        b = MapBox("b", (b.box[0], bn))
    warpgroups = legal.consumers(problem, tile, most=2)
    blocks = max(1, min(most_tiles(problem, bn), config["blocks"]))
    room = _PLACES + 8 * tile.stages * problem.gathered  # barriers of stages that warps bring
    return wgmma.staged(name, problem, tile, warpgroups, blocks, problem.gathered, operands=(a, b), room=room)


def _refuses_grouped(problem: Problem) -> str:
    """Refuse what the library refuses, and an index of rows that warps cannot bring by 16 bytes."""
    if problem.gathered and (reason := describable(problem, "a")):
        return reason
    if problem.gathered and (problem.a_layout != "row" or problem.dtype not in ("f16", "bf16") or problem.k % 8):
        return f"an index names rows of A, {problem.dtype} with k = {problem.k}: it takes f16 and bf16, k by eights"
    return wgmma.refuses_library(problem._replace(groups=0, gathered=False))


def _refuses_depths(problem: Problem) -> str:
    """Refuse what has no place beside groups along k, and more of these than shared memory has ends of."""
    if problem.k_groups > MOST_ENDS:
        return f"k_groups={problem.k_groups}: a block keeps the ends of {MOST_ENDS}; take parts of them"
    if problem.has_bias or problem.scales == "outer":
        return "each product has its own sums over k, and no bias or factors of rows and columns: apply them afterwards"
    return wgmma.refuses_library(problem._replace(k_groups=0, scales=""))


def _depths(name: str, problem: Problem, config: Config) -> Geometry:
    """Blocks that take the tiles of all matrices of C in turn, at most one a multiprocessor."""
    bn, scaled = config["bn"], problem.scales == "blocks"
    if bn not in _WIDTHS or (scaled and bn > _BLOCK):
        raise RefusedError(f"bn={bn}: a tile has {', '.join(map(str, _WIDTHS))} columns, with factors at most {_BLOCK}")
    tile, most = _WIDTHS[bn]._replace(stages=config["stages"]), _WIDTHS[bn].stages
    if not 2 <= tile.stages <= most:
        raise RefusedError(f"stages={tile.stages}: a ring of tiles of {bn} columns has 2 to {most} stages")
    warpgroups = legal.consumers(problem, tile, most=2)
    blocks = max(1, min(tiles(problem, tile.bm, bn)[0] * (problem.k_groups or 1), config["blocks"]))
    return wgmma.staged(name, problem, tile, warpgroups, blocks, scaled, band=config["band"])


def _resolve_depths(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced: a tile of 128 columns where there are few, or with factors."""
    device, batch = target(problem), problem.k_groups or problem.batch
    narrow = problem.scales == "blocks" or tiles(problem, 128, 256)[0] * max(1, problem.k_groups) < device.sms
    tile = _WIDTHS[config["bn"] if config["bn"] in _WIDTHS else 128 if narrow else 256]
    band, _ = choose.order(tile, problem.m, problem.n, batch, device)
    return complete(config, {"bn": tile.bn, "stages": tile.stages, "band": band, "blocks": device.sms})


def most_tiles(problem: Problem, bn: int) -> int:
    """Return the number of tiles at most: the rows of each group may end within one."""
    columns = -(-problem.n // bn)
    if not problem.groups:
        return -(-problem.m // GROUP_ROWS) * columns * problem.batch
    return (problem.m // GROUP_ROWS + min(problem.groups, problem.m)) * columns


def _resolve_grouped(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced."""
    device = target(problem)
    bn = config["bn"] or choose.grouped_columns(problem, device)
    return complete(config, {"bn": bn, "stages": _WIDTHS[bn].stages if bn in _WIDTHS else 0, "blocks": device.sms})


SPLIT = (
    gpu_rung(
        "wgmma_streamk",
        one_sided=True,
        idea="the blocks of a cluster share the k of the tiles of the last round",
        parent="wgmma_epilogue",
        dtypes=wgmma.DTYPES,
        mixed=dtypes.TENSOR_FLOAT8,
        refuses=_refuses_streamk,
        bound=_in_parts(wgmma.aligned_sums),
        bounds={
            "tf32": _in_parts(wgmma.aligned_sums_tf32),
            **dict.fromkeys(dtypes.TENSOR_FLOAT8, _in_parts(wgmma.aligned_sums_8_bits)),
            "int8": wgmma.exact_sums,
        },
        geometry=_streamk,
        resolve=_resolve_streamk,
        space={
            "bm": (0, 64, 128, 256),
            "bn": (0, 64, 128, 192, 256),
            "stages": (0, 3, 4, 6, 8),
            "cm": (0, 1, 2),
            "cn": (0, 1, 2),
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
            "at the end only: until then neighbors read the same parts of A and B out of the L2 cache."
        ),
    ),
    gpu_rung(
        "wgmma_blockscaled",
        idea="tensor cores sum 128 of k, CUDA cores scale that and add it in f32",
        parent="wgmma_epilogue",
        dtypes=dtypes.TENSOR_FLOAT8,
        mixed=dtypes.TENSOR_FLOAT8,
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

GROUPED = (
    gpu_rung(
        "wgmma_grouped",
        idea="groups of rows, each times a matrix of its own: the device reads where they end",
        parent="wgmma_epilogue",
        dtypes=wgmma.DTYPES,
        mixed=dtypes.TENSOR_FLOAT8,
        refuses=_refuses_grouped,
        bound=wgmma.aligned_sums,
        bounds=wgmma.BOUNDS,
        geometry=packing(_grouped),
        resolve=_resolve_grouped,
        space={"bn": (0, *_WIDTHS), "stages": (0, 2, 3, 4), "blocks": (0, 1, 128)},
        expect={"local_requests": 0, "bank_conflicts": 0},
        lesson=(
            "A launch for each expert of a layer leaves multiprocessors idle at each end, and the host must know how "
            "many rows each has. Here all tiles of all groups are one list that blocks take in turn. The list is "
            "written nowhere: a thread walks along the ends of the groups and counts tiles until it comes to its own, "
            "a cached load and ten instructions for each group, once for the whole launch. With few rows per group the "
            "weights are what is moved, so of A only blocks of 64 rows that the group has are brought and multiplied."
        ),
    ),
    gpu_rung(
        "wgmma_grouped_k",
        idea="groups along k, a matrix of C for each, as the gradients of experts' weights are",
        parent="wgmma_grouped",
        dtypes=wgmma.DTYPES,
        refuses=_refuses_depths,
        bound=wgmma.aligned_sums,
        bounds=wgmma.BOUNDS,
        geometry=packing(_depths),
        resolve=_resolve_depths,
        space={"bn": (0, *_WIDTHS), "stages": (0, 2, 3, 4), "band": (0, 1, 8), "blocks": (0, 1, 128)},
        expect={"local_requests": 0, "bank_conflicts": 0},
        lesson=(
            "The gradient of an expert's weights sums over its tokens, so groups follow each other along k, and each "
            "has a result of its own. No group's length is a multiple of a step, and a tensor copy knows no end but "
            "that of the matrix: the last step of a group brings rows of the next one. Two warpgroups clear them in "
            "shared memory, once a tile, in both operands, since 0 times NaN is NaN. All tiles of a group take the "
            "same time, so those of the longest groups come first, and short ones fill the last round."
        ),
    ),
)
