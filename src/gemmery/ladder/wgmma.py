"""The rungs on tensor cores by wgmma, from tiles that tensor copies bring: sm_90a."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from gemmery import dtypes
from gemmery.cuda import hopper, hopper_model
from gemmery.cuda.geometry import (
    BAND,
    C_NAMES,
    Geometry,
    MapBox,
    describable,
    element,
    epilogue,
    instance,
    layouts,
    target,
    template,
    tiles,
)
from gemmery.cuda.hopper_model import Instance
from gemmery.cuda.tiles import complete
from gemmery.errors import RefusedError
from gemmery.ladder import wgmma_routes
from gemmery.ladder.gpu import gpu_rung
from gemmery.problem import Config, Problem

_ROW = 128  # bytes of k in a stage, and of a row of a tile in shared memory
_HALF = ("f16", "bf16")
_SPACE = {"bm": (64, 128), "bn": (64, 128, 256), "stages": (2, 3, 4)}
_SHARED = 232_448  # bytes that a block of sm_90 may have
_BIAS = 2048  # bytes of the bias of a tile's columns, for each of two warpgroups
_WIDTHS = (112, 144)  # of tiles, beside multiples of 32
_SWAPPED = (32, 96, 112, 136, 144, 152, 160, 176, 208, 224)  # rows of tiles of C' = B' A', columns of wgmma
_MOST_SUMS = 256 * 192  # of a tile: 192 for each of 256 threads
_OVERLAPPED = 128 * 288  # most sums of a tile that stays in registers, packed, while the next one is multiplied
_FACTORS, _ASKED = 16, 32  # of the EPILOGUE of staged.cuh
_EXPECT = {"local_requests": 0, "bank_conflicts": 0, "load_requests": 0}  # threads load nothing


def aligned_sums(k: int) -> float:
    """Return f(k) of the bound f(k) u |A||B| of wgmma in half precision, u = 2^-24.

    One step adds 16 products to a sum: all 17 are aligned to the largest exponent and cut to 25 bits of fraction, which
    costs each up to u / 2 of the largest, and a zero nothing; the result is cut to 24 bits, up to 2 u of it. That is
    u / 2 for each product, and 2.5 u for each step.
    """
    return 0.5 * k + 2.5 * -(-k // 16)


def aligned_sums_tf32(k: int) -> float:
    """Return f(k) for tf32, 8 products a step; wgmma cuts operands, which costs 2^14 u more than to round them."""
    return 0.5 * k + 2.5 * -(-k // 8) + 2.0**14


def aligned_sums_8_bits(k: int) -> float:
    """Return f(k) for float8: 32 products and the sum are cut to 13 bits of fraction, 2^11 u of the largest each."""
    return 2.0**11 * (k + -(-k // 32)) + 2.0 * -(-k // 32)


def exact_sums(_: int) -> float:
    """Return f(k) for int8, whose sums are exact."""
    return 0.0


def refuses_maps(problem: Problem) -> str:
    """Refuse what a tensor map cannot describe, and what only the last of these rungs has."""
    rows = problem.by_rows()
    if problem.epilogue:
        return f"it multiplies and scales, and has no {problem.epilogue}; wgmma_epilogue has it"
    if problem.out not in (*_HALF, "f32"):
        return f"it sums in f32 and writes f16, bf16 and f32, not {problem.out}"
    reason = describable(rows, "a") or describable(rows, "b")
    return f"{reason}; wgmma_epilogue packs such operands" if reason else ""


def wgmma_tiles(problem: Problem, bm: int, bn: int, stages: int, cm: int = 1, cn: int = 1, apart: bool = False) -> str:
    """Return the WgmmaTiles of wgmma.cuh; they are swapped if C is column-major."""
    swapped = problem.c_layout == "col"
    count = 7 if swapped else 6 if apart else 3 if cm == cn == 1 else 5
    shape = (bm, bn, stages, cm, cn, apart, swapped)[:count]
    return template("WgmmaTiles", element(problem), *layouts(problem), *shape)


def operand_boxes(problem: Problem, bm: int, bn: int, cm: int = 1, cn: int = 1) -> tuple[MapBox, MapBox]:
    """Return the boxes of A and of B that one copy moves: 128 bytes along the adjacent side.

    Blocks that share an operand copy parts of the other side of it. A box has no more rows than A, or columns than B: a
    copy takes five times as long for one beyond the edge as for one of the matrix.
    """
    bk = _ROW // dtypes.get(problem.dtype).size
    rows = min(bm, problem.m) if cn == 1 else bm // cn
    a = (64, bk // cn) if problem.a_layout == "col" else (bk, rows)
    columns = min(bn, problem.n) if cm == 1 else bn // cm
    b = (bk, columns) if problem.b_layout == "col" else (64, bk // cm)
    return MapBox("a", a), MapBox("b", b)


def ring_bytes(problem: Problem, bm: int, bn: int, stages: int) -> int:
    """Return the bytes of the stages in shared memory; boxes of B that are 64 columns wide may extend beyond bn."""
    wide = bn if problem.b_layout == "col" else -(-bn // 64) * 64
    return stages * (bm + wide) * _ROW


def launch(
    name: str,
    kernel: str,
    blocks: int,
    warpgroups: int,
    shared: int,
    tile: tuple[int, int],
    maps: tuple[MapBox, ...],
    **others: Any,
) -> Geometry:
    """Return the launch of a kernel whose blocks fill a multiprocessor; `others` are fields of a Geometry."""
    what: dict[str, Any] = {"needs": 90, "instructions": "wgmma and tensor copies", "alone": True, **others}
    return Geometry(
        f"{name}.cu", kernel, (blocks, 1, 1), (128 * warpgroups, 1, 1), shared, tile=tile, maps=maps, **what
    )


def _tma(name: str, problem: Problem, config: Config) -> Geometry:
    """A tile per block; all its threads wait and multiply."""
    bm, bn, stages = config["bm"], config["bn"], config["stages"]
    shared = ring_bytes(problem, bm, bn, stages) + 8 * stages
    _check_rows(bm)
    check(problem, bm, bn, stages, 1, 1, shared)
    kernel = instance(name, problem, wgmma_tiles(problem, bm, bn, stages))
    blocks, maps = tiles(problem, bm, bn)[0], operand_boxes(problem, bm, bn)
    return launch(name, kernel, blocks, min(bm // 64, 2), shared, (bm, bn), maps)


def _specialized(name: str, problem: Problem, config: Config) -> Geometry:
    """A tile per block, whose first warpgroup is the producer."""
    bm, bn, stages = config["bm"], config["bn"], config["stages"]
    return _by_roles(name, problem, bm, bn, stages, tiles(problem, bm, bn)[0])


def _persistent(name: str, problem: Problem, config: Config) -> Geometry:
    """As many blocks as run at a time, in clusters of cm x cn if there are such, which take tiles in turn."""
    bm, bn, stages, cm, cn = (config.get(key, 1) for key in ("bm", "bn", "stages", "cm", "cn"))
    cluster = cm * cn
    count = min(tiles(problem, bm * cm, bn * cn)[0], clusters(target(problem).sms, cluster))
    product = _by_roles(name, problem, bm, bn, stages, count * cluster, cm, cn)
    return replace(product, cluster=cluster, band=config["band"])


def _epilogue(name: str, problem: Problem, config: Config) -> Geometry:
    """The library's kernel, after a launch that packs what tensor copies or wgmma cannot read where it lies."""
    shape = config["bm"], config["bn"], config["cm"]
    if hopper_model.is_swapped(config["bm"]):
        if reason := illegal_swapped(wgmma_routes.as_read(problem), config):
            raise RefusedError(reason)
        of_c = {"bm": "bn", "bn": "bm", "cm": "cn", "cn": "cm"}
        exchanged = {key: config[of_c.get(key, key)] for key in config}
        product = wgmma_routes.library(partial(_in_place, name, apart=False), problem.transposed(), exchanged)
        return replace(product, tile=shape[:2], swapped=True)
    apart = not wgmma_routes.packed(problem) and hopper.takes_rows_apart(problem, *shape)
    return wgmma_routes.library(partial(_in_place, name, apart=apart), problem, config)


def _resolve(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced, by what suits the product's size."""
    if all(config.values()):
        return config
    device = target(problem)
    # Swapped tiles have 64, 128 or 256 columns and no cluster: left out where the config sets a part of the tile.
    whole = not any(config[key] for key in ("bm", "bn", "stages", "cm", "cn"))
    choices = hopper.chosen(wgmma_routes.as_read(problem), device, split=False, swapped=whole)
    return complete(complete(config, choices), {"blocks": device.sms})


def _in_place(name: str, problem: Problem, config: Config, apart: bool) -> Geometry:
    """The launch for operands that tensor copies read where they lie."""
    problem = problem if problem.k else problem._replace(a_layout="row", b_layout="col")  # nothing of them is read
    bm, bn, stages, cm, cn, blocks = (config[key] for key in ("bm", "bn", "stages", "cm", "cn", "blocks"))
    shared = shared_bytes(problem, bm, bn, stages)
    check(problem, bm, bn, stages, cm, cn, shared)
    if bm == 192 and not hopper.plain_halves(problem):
        raise RefusedError("bm=192: it takes plain products of halves and a C with a tensor map")
    cluster, matrices = cm * cn, hopper.APART if apart else 1
    tile, tiling = Instance(bm, bn, stages, cm, cn), wgmma_tiles(problem, bm, bn, stages, cm, cn, apart)
    count = min(tiles(problem, bm * cm, bn * cn)[0], clusters(blocks, cluster))
    return launch(
        name,
        template(f"{name}{'_cluster' * (cluster > 1)}", element(problem), C_NAMES[problem.out], steps(problem), tiling),
        count * cluster,
        consumers(problem, bm) + 1,
        shared,
        (bm, bn),
        (*operand_boxes(problem._replace(m=problem.m // matrices), bm, bn, cm, cn), piece_box(problem, bm, bn)),
        overlaps=True,
        cluster=cluster,
        band=config["band"],
        ahead=hopper.lines_ahead(problem, tile, target(problem)) or -hopper.begins_at_once(problem, target(problem)),
        apart=matrices,
    )


def steps(problem: Problem) -> int:
    """Return the EPILOGUE of staged.cuh: FACTORS if there are any but of blocks, and what else follows the product.

    A bias and an activation of 16-bit types have an image for each kind. Other types have no general kernel that serves
    while an image is compiled: there, as with alpha and beta, one image is ASKED for whatever follows.

    >>> plain = Problem(1, 1, 1, "e4m3", "bf16", scales="outer")
    >>> (
    ...     steps(plain),
    ...     steps(plain._replace(epilogue="relu")),
    ...     steps(plain._replace(dtype="f16", scales="", epilogue="relu")),
    ... )
    (16, 48, 4)
    """
    factors = _FACTORS * (problem.scales == "outer")
    if not problem.epilogue and not problem.scaled:
        return factors
    if problem.scaled or problem.scales or problem.dtype not in _HALF:
        return factors | _ASKED
    return epilogue(problem)


def piece_box(problem: Problem, bm: int, bn: int) -> MapBox:
    """Return the box of C that a warp copies out: 16 rows of the COLUMNS of staged.cuh, or 16 columns if C has such."""
    size, warpgroups = dtypes.get(problem.out).size, consumers(problem, bm)
    wide = bn // 2 if bm == 192 and warpgroups == 2 else bn  # of a warpgroup
    columns = 64 if wide % 64 == 0 and warpgroups < 3 and _overlapped(problem, bm, bn) else 32
    if problem.c_layout == "col":
        return MapBox("c", (16, columns), swizzle=16 * size, required=True)
    return MapBox("c", (columns, 16), swizzle=columns * size, required=bm == 192)


def consumers(problem: Problem, bm: int) -> int:
    """Return the number of warpgroups that multiply a tile of bm rows.

    Of 192, two have all rows and half of the columns each, where a column of B is a row of its box; else three have 64.
    """
    return 3 if bm == 192 and problem.b_layout == "row" else max(1, min(bm // 64, 2))


def _overlapped(problem: Problem, bm: int, bn: int) -> bool:
    """Return True if a finished tile stays in registers, packed, while the next one is multiplied."""
    return dtypes.get(problem.out).size == 2 and bm * bn <= _OVERLAPPED


def staging_bytes(problem: Problem, bm: int, bn: int, buffers: int = 2) -> int:
    """Return the bytes behind a ring: the buffers of all warps for pieces of C, of 16 rows, and a bias."""
    rows, columns = piece_box(problem, bm, bn).box
    return consumers(problem, bm) * 4 * buffers * rows * columns * dtypes.get(problem.out).size + _BIAS


def shared_bytes(problem: Problem, bm: int, bn: int, stages: int) -> int:
    """Return the bytes of a ring, of the pieces of C and of the barriers.

    Sums of 32 bits get four buffers for each warp where they have room, the TURNS_OF of staged.cuh.
    """
    shared = ring_bytes(problem, bm, bn, stages) + 16 * stages
    has_room = dtypes.get(problem.out).size == 4 and shared + staging_bytes(problem, bm, bn, 4) <= _SHARED
    return shared + staging_bytes(problem, bm, bn, 4 if has_room else 2)


def clusters(blocks: int, cluster: int) -> int:
    """Return how many clusters run at a time; 4 blocks do not always find room together: 30 on 132 multiprocessors."""
    return max(1, blocks // cluster * (10 if cluster > 2 else 11) // 11)


def illegal(problem: Problem, bm: int, bn: int, stages: int, cm: int, cn: int, shared: int) -> str:
    """Return why a kernel cannot have this tile, ring and cluster for a problem; "" if it can."""
    if bm == 192 and (bn not in (64, 128, 192) or cn > 1):
        return f"bm={bm}, bn={bn}, cn={cn}: a tile of 192 rows has 64, 128 or 192 columns, and a cluster along m alone"
    if bm == 8 and (problem.m > 8 or problem.a_layout == "col" or cm * cn > 1):
        return f"bm=8, cm={cm}, cn={cn}: it takes at most 8 rows, of A by rows, by blocks alone; use 64"
    swapped = problem.c_layout == "col"  # of which `illegal_swapped` knows the widths; its bm and bn are exchanged
    tile = f"bm={bn}, bn={bm}" if swapped else f"bm={bm}, bn={bn}"
    if bm not in (8, 64, 128, 192, 256) or (bn % 32 * (bn not in _WIDTHS) and not swapped) or not 32 <= bn <= 256:
        sides = "8, 64, 128, 192 or 256 rows and 32, 64, 96, 112, 128, 144, 160, ... 256 columns"
        return f"bm={bm}, bn={bn}: a tile has {sides}"
    if bn % 32 and not _overlapped(problem, bm, bn):
        return f"{tile}: only tiles that leave packed, of results of 16 bits, are such; use 128 x 128"
    if bm * bn > _MOST_SUMS:
        return f"{tile}: {bm * bn // 256} sums for each thread that multiplies, which has room for 192"
    if stages < 2:
        return f"stages={stages}: one is filled while another is read; use 2 or more"
    if shared > _SHARED:
        return f"stages={stages} of {tile}: {shared} bytes of shared memory, of {_SHARED}; use fewer stages"
    if cm * cn not in (1, 2, 4, 8):
        return f"cm={cm}, cn={cn}: a cluster has 1, 2, 4 or 8 blocks"
    if bn % (8 * cm) and problem.b_layout == "col":
        return f"bn={bn}, cm={cm}: the {cm} blocks of a column of the cluster copy multiples of 8 columns of B each"
    return ""


def illegal_swapped(problem: Problem, config: Config) -> str:
    """Return why a product cannot be taken as C' = B' A', whose tiles have bm columns for wgmma; "" if it can."""
    bm, bn, cm, cn = (config[key] for key in ("bm", "bn", "cm", "cn"))
    if bm not in _SWAPPED or bn not in (64, 128, 256) or cm * cn > 1:
        rows = ", ".join(map(str, _SWAPPED))
        return (
            f"bm={bm}, bn={bn}, cm={cm}, cn={cn}: a tile has 8, 64, 128, 192 or 256 rows; or {rows}, which take "
            "64, 128 or 256 columns and no cluster"
        )
    reason = hopper.refuses_swapped(problem)
    return reason and f"bm={bm}: {reason}; use 64, 128 or 256 rows"


def _check_rows(bm: int) -> None:
    if bm in (8, 192):
        raise RefusedError(f"bm={bm}: wgmma_epilogue alone has such tiles; use 64, 128 or 256 rows")


def check(problem: Problem, bm: int, bn: int, stages: int, cm: int, cn: int, shared: int) -> None:
    """Raise RefusedError for what `illegal` tells."""
    if reason := illegal(problem, bm, bn, stages, cm, cn, shared):
        raise RefusedError(reason)


def refuses_library(problem: Problem) -> str:
    """Refuse groups, factors of blocks, float32 that must not be rounded, and types of results that it has not."""
    if problem.groups:
        return f"groups={problem.groups}: wgmma_grouped multiplies groups of rows"
    if problem.scales == "blocks":
        return "scales='blocks': wgmma_blockscaled applies factors of blocks"
    if problem.dtype == "f32" and problem.precision != "tf32":
        return "tensor cores cut f32 to 10 bits of fraction: allow it with precision='tf32' (commands: --dtype tf32)"
    if problem.out == "int32":
        whole = problem.dtype == "int8" and not (problem.epilogue or problem.scaled or problem.scales)
        return "" if whole else "it writes int32 only as the plain product of int8: ask for another result type"
    if problem.out not in (*_HALF, "f32"):
        return f"it writes f16, bf16, f32, and int32 of int8, not {problem.out}"
    return ""


def _by_roles(
    name: str, problem: Problem, bm: int, bn: int, stages: int, blocks: int, cm: int = 1, cn: int = 1
) -> Geometry:
    """A warpgroup that brings tiles, and one or two that multiply."""
    shared = ring_bytes(problem, bm, bn, stages) + 16 * stages
    _check_rows(bm)
    check(problem, bm, bn, stages, cm, cn, shared)
    kernel = instance(name, problem, wgmma_tiles(problem, bm, bn, stages, cm, cn))
    maps = operand_boxes(problem, bm, bn, cm, cn)
    return launch(name, kernel, blocks, min(bm // 64, 2) + 1, shared, (bm, bn), maps, overlaps=True)


DTYPES = (*_HALF, "f32", *dtypes.FLOAT8, "int8")
BOUNDS = {"tf32": aligned_sums_tf32, **dict.fromkeys(dtypes.FLOAT8, aligned_sums_8_bits), "int8": exact_sums}

# A rung of products in half precision that tensor maps describe.
_half_rung = partial(gpu_rung, dtypes=_HALF, refuses=refuses_maps, bound=aligned_sums, expect=_EXPECT)
WGMMA = (
    _half_rung(
        "wgmma_tma",
        idea="the hardware brings whole tiles, swizzled, and multiplies them from shared memory",
        parent="mma_pipelined",
        geometry=_tma,
        space=_SPACE,
        default={"bm": 128, "bn": 128, "stages": 4},
        lesson=(
            "A tensor map describes a matrix once; from then on one thread asks for a box of it, and the copy engine "
            "computes addresses, swizzles, fills in zeros beyond the edges and counts bytes at an mbarrier. wgmma "
            "reads both operands from shared memory, so no register holds a fragment, and 128 threads multiply "
            "64 x 128 x 16 in one instruction. But every thread still waits for each stage, and no product is under "
            "way while the next stage is asked for."
        ),
    ),
    _half_rung(
        "wgmma_specialized",
        idea="one warpgroup only brings tiles, two only multiply; they meet at mbarriers",
        parent="wgmma_tma",
        geometry=_specialized,
        space=_SPACE,
        default={"bm": 128, "bn": 256, "stages": 4},
        lesson=(
            "With roles instead of turns there is no barrier of all threads left in the loop: the producer runs ahead "
            "until the ring is full, and a stage is handed back while the next products are under way. One thread can "
            "feed two warpgroups, so the registers of the others in its warpgroup go to the consumers by setmaxnreg, "
            "which makes room for a tile of 128 x 256. What is left between tiles: a block starts with an empty ring, "
            "and ends with stores that nothing overlaps."
        ),
    ),
    _half_rung(
        "wgmma_persistent",
        idea="a block takes one tile after another, in an order that shares operands in L2",
        parent="wgmma_specialized",
        geometry=_persistent,
        space={**_SPACE, "band": (1, 4, 8, 16)},
        default={"bm": 128, "bn": 256, "stages": 4, "band": BAND},
        lesson=(
            "The ring goes on across tiles, so the first stages of the next tile come while this one is stored, and a "
            "block is set up once. The kernel, not the hardware, now chooses the order of tiles: in bands, those under "
            "way together cover about a square, which needs the fewest rows of A and columns of B from memory. The "
            "number of tiles in the last round matters more than before: 133 tiles on 132 multiprocessors take two."
        ),
    ),
    _half_rung(
        "wgmma_cluster",
        idea="two blocks of a cluster copy half of their common operand each, to both",
        parent="wgmma_persistent",
        geometry=_persistent,
        space={**_SPACE, "cm": (1, 2, 4), "cn": (1, 2), "band": (1, 4, 8, 16)},
        default={"bm": 128, "bn": 256, "stages": 4, "cm": 2, "cn": 1, "band": BAND},
        lesson=(
            "A copy can arrive in the shared memory of several blocks at once, so a cluster asks L2 for a common "
            "operand only once. In return its blocks depend on each other: a stage must be empty in all of them "
            "before any of them fills it. That pays where requests to L2 are the limit, as with rows that do not "
            "begin at lines of 128 bytes; where they are not, blocks that run freely are as fast or faster."
        ),
    ),
    gpu_rung(
        "wgmma_epilogue",
        idea="C leaves by tensor copies while the next tile is multiplied; one image for every shape",
        parent="wgmma_cluster",
        dtypes=DTYPES,
        refuses=refuses_library,
        bound=aligned_sums,
        bounds=BOUNDS,
        geometry=_epilogue,
        resolve=_resolve,
        space={
            "bm": (0, 8, 64, 112, 128, 136, 144, 152, 176, 192, 208, 224, 256),
            "bn": (0, 32, 64, 96, 128, 160, 192, 224, 256),
            "stages": (0, 2, 3, 4, 5, 6, 8),
            "cm": (0, 1, 2),
            "cn": (0, 1, 2),
            "band": (0, 4, 8, 16),
            "blocks": (0, 128),
        },
        expect={**_EXPECT, "store_requests": 0},
        lesson=(
            "The end of a tile is time in which tensor cores wait. Packed to 16 bits, the finished sums fit in "
            "registers beside those of the next tile, and leave while it is multiplied: stmatrix arranges rows, and a "
            "tensor copy writes them, swizzled so that neither meets a bank conflict. Since a copy leaves out what is "
            "beyond the edges, no element is tested. The usual steps after it, a bias, an activation, factors, "
            "have images of their own: jumps over the steps of other products would wait for instructions."
        ),
    ),
)
