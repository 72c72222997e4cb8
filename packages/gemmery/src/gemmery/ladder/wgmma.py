"""The rungs on tensor cores by wgmma, from tiles that tensor copies bring: sm_90a."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from gemmery import dtypes
from gemmery.cuda import choose, traced_function
from gemmery.cuda.choose import complete, legal
from gemmery.cuda.choose.cost import ROW, at_a_time, exchanged, is_swapped, quickest
from gemmery.cuda.choose.data import TURNED, Instance
from gemmery.cuda.constants import ASKED, FACTORS
from gemmery.cuda.geometry import (
    BAND,
    C_NAMES,
    Geometry,
    MapBox,
    describable,
    element,
    epilogue,
    instance,
    target,
    template,
    tiles,
)
from gemmery.errors import RefusedError
from gemmery.ladder import gpu
from gemmery.ladder.gpu import gpu_rung, in_groups, sums_in_f32
from gemmery.problem import Config, Problem

_HALF = ("f16", "bf16")
_SPACE = {"bm": (64, 128), "bn": (64, 128, 256), "stages": (2, 3, 4)}
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
    reason = describable(rows, "a") or describable(rows, "b")
    return sums_in_f32(problem) or (f"{reason}; wgmma_epilogue packs such operands" if reason else "")


def operand_boxes(problem: Problem, tile: Instance) -> tuple[MapBox, MapBox]:
    """Return the boxes of A and of B that one copy moves: 128 bytes along the adjacent side.

    Blocks that share an operand copy parts of the other side of it. A box has no more rows than A, or columns than B: a
    copy takes five times as long for one beyond the edge as for one of the matrix.
    """
    bk, (bm, bn, _, cm, cn, *_) = ROW // dtypes.get(problem.dtype).size, tile
    rows = min(bm, problem.m) if cn == 1 else bm // cn
    a = (bk, bk // cn) if problem.a_layout == "col" else (bk, rows)
    columns = min(bn, problem.n) if cm == 1 or bn % (8 * cm) else bn // cm  # the latter in turns: see tma.cuh
    if traced_function.is_paired(problem):
        columns = bn // 2
    b = (bk, columns) if problem.b_layout == "col" else (64, bk // cm)
    return MapBox("a", a), MapBox("b", b)


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


def staged(
    name: str,
    problem: Problem,
    tile: Instance,
    warpgroups: legal.Consumers,
    blocks: int,
    *parameters: object,
    operands: tuple[MapBox, ...] = (),  # (): as they lie
    of: str = "",  # the type in C++ of what is multiplied, where it is not that of the operands
    apart: bool = False,
    room: int = 0,  # bytes of shared memory behind the pieces
    **others: Any,
) -> Geometry:
    """A kernel whose first warpgroup is the producer, and whose others stage pieces of C that tensor copies write."""
    cluster, matrices = tile.cm * tile.cn, choose.APART if apart else 1
    fixed = element(problem), C_NAMES[problem.out], steps(problem), legal.tiling(problem, tile, warpgroups, apart, of)
    kernel = template(f"{name}{'_cluster' * (cluster > 1 and 'cluster' not in others)}", *fixed, *parameters)
    shared = legal.shared_bytes(problem, tile, warpgroups) + room
    boxes = operands or operand_boxes(problem._replace(m=problem.m // matrices), tile)
    maps, others = (*boxes, piece_box(problem, tile, warpgroups)), {"cluster": cluster, "apart": matrices, **others}
    return launch(name, kernel, blocks, warpgroups.warpgroups + 1, shared, tile[:2], maps, overlaps=True, **others)


def _unstaged(name: str, problem: Problem, config: Config, barriers: int = 16, producers: int = 1) -> Geometry:
    """A kernel that stores C element by element, with so many bytes of barriers a stage, and so many producers.

    A tile per block; with a `band`, as many blocks as run at a time, in clusters of cm x cn, which take tiles in turn.
    """
    tile, stays = tile_of(config), "band" in config
    blocks = grid(problem, tile, target(problem).sms) if stays else tiles(problem, tile.bm, tile.bn)[0]
    if tile.bm in (8, 192):
        raise RefusedError(f"bm={tile.bm}: wgmma_epilogue alone has such tiles; use 64, 128 or 256 rows")
    shared = legal.ring_bytes(problem, tile) + barriers * tile.stages
    check(legal.refused(problem, tile, shared))
    warpgroups = legal.Consumers(min(tile.bm // 64, 2))
    kernel, count = instance(name, problem, legal.tiling(problem, tile, warpgroups)), warpgroups.warpgroups + producers
    order = {"overlaps": producers > 0, "cluster": tile.cm * tile.cn, "band": config.get("band", BAND)}
    return launch(name, kernel, blocks, count, shared, tile[:2], operand_boxes(problem, tile), **order)


def tile_of(config: Config) -> Instance:
    """Return the instance of a config."""
    return Instance(config["bm"], config["bn"], config["stages"], config.get("cm", 1), config.get("cn", 1))


def _epilogue(name: str, problem: Problem, config: Config) -> Geometry:
    """The library's kernel, after a launch that packs what tensor copies or wgmma cannot read where it lies."""
    tile = tile_of(config)
    check(legal.illegal(gpu.as_read(problem), tile))
    if _turns(problem, tile):
        return replace(_turned(problem.transposed(), exchanged(tile), config), tile=tile[:2], swapped=True)
    if is_swapped(tile.bm):
        in_place = partial(_in_place, name, exchanged(tile), False)
        return replace(gpu.library(in_place, problem.transposed(), config), tile=tile[:2], swapped=True)
    apart = not gpu.packed(problem) and choose.takes_rows_apart(problem, tile, target(problem))
    return gpu.library(partial(_in_place, name, tile, apart), problem, config)


def _resolve(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced, by what suits the product's size."""
    if all(config.values()):
        return config
    device = target(problem)
    if traced_function.is_traced(problem):
        return complete(complete(config, choose.traced_choices(gpu.as_read(problem), device)), {"blocks": device.sms})
    # Swapped tiles have 64, 128 or 256 columns and no cluster: left out where the config sets a part of the tile.
    whole = not any(config[key] for key in ("bm", "bn", "stages", "cm", "cn"))
    choices = choose.chosen(gpu.as_read(problem), device, split=False, swapped=whole)
    turned = quickest(TURNED, problem.m, problem.n, problem.batch, device.sms)
    if whole and _turns(problem, turned):
        choices |= turned._asdict()
    return complete(complete(config, choices), {"blocks": device.sms})


def _turns(problem: Problem, tile: Instance) -> bool:
    """Return True if a plain product multiplies a B by rows of 32 bits from registers, and does not copy it first."""
    plain = not (problem.epilogue or problem.scaled or problem.scales)
    kind = problem.dtype, problem.out, problem.b_layout, problem.c_layout, gpu.packed(problem)
    fits = tile.bn in (64, 128) and tile.bm % 32 == 0 and tile.cm * tile.cn == 1
    return plain and fits and kind == ("f32", "f32", "row", "row", 2) and not describable(problem, "b")


def _turned(problem: Problem, tile: Instance, config: Config) -> Geometry:
    """The launch for C' = B' A', as its kernel takes it: warps load B', whose k is not adjacent."""
    warpgroups, device = legal.Consumers(tile.bm // 64), target(problem)
    tiling = legal.tiling(problem, tile, warpgroups)
    boxes = operand_boxes(problem, tile)
    return launch(
        "wgmma_turned",
        template("wgmma_turned", element(problem), C_NAMES[problem.out], tiling),
        grid(problem, tile, config["blocks"]),
        warpgroups.warpgroups + 1,
        legal.ring_bytes(problem, tile) + 16 * tile.stages,
        tile[:2],
        tuple(box._replace(promotion=gpu.promotion(problem, i)) for i, box in enumerate(boxes)),
        overlaps=True,
        band=config["band"],
        ahead=-choose.begins_at_once(problem, tile, device),
    )


def _in_place(name: str, tile: Instance, apart: bool, problem: Problem, config: Config) -> Geometry:
    """The launch for operands that tensor copies read where they lie."""
    warpgroups, device = legal.consumers(problem, tile), target(problem)
    if traced_function.exchanges(problem):
        return _rows(problem, tile, config)
    return staged(
        name,
        problem,
        tile,
        warpgroups,
        grid(problem, tile, config["blocks"]),
        band=config["band"],
        ahead=choose.lines_ahead(problem, tile, device) or -choose.begins_at_once(problem, tile, device),
        apart=apart,
    )


def _rows(problem: Problem, tile: Instance, config: Config) -> Geometry:
    """The launch whose blocks tell each other numbers of rows: one for each tile of a band, all resident."""
    rows, columns = -(-problem.m // tile.bm), problem.n // tile.bn
    if tile.bm != 128 or tile.cm * tile.cn > 1 or problem.n % tile.bn or not 0 < columns <= config["blocks"]:
        raise RefusedError(f"n={problem.n}, {tile.bm} x {tile.bn}: blocks exchange numbers of rows of whole tiles")
    if problem.batch > 1 or problem.c_layout != "row" or problem.alignments[2] % 8:
        raise RefusedError("blocks exchange numbers of rows of one C by rows, aligned to 8 bytes")
    band = min(config["band"], rows, config["blocks"] // columns)
    kernel = template("wgmma_rows", element(problem), C_NAMES[problem.out], steps(problem), legal.tiling(
        problem, tile, legal.Consumers(2)))  # fmt: skip
    shared = legal.ring_bytes(problem, tile) + 16 * tile.stages
    words = 4 * rows * (tile.bm * columns + tile.bm // 16)
    return launch("wgmma_rows", kernel, band * columns, 3, shared, tile[:2], operand_boxes(problem, tile), band=band,
                  counters=words, together=True)  # fmt: skip


def steps(problem: Problem) -> int | str:
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
    factors = FACTORS * (problem.scales == "outer")
    if traced_function.is_traced(problem):
        return f"{problem.epilogue} | {factors}" if factors else problem.epilogue
    if not problem.epilogue and not problem.scaled:
        return factors
    if problem.scaled or problem.scales or problem.dtype not in _HALF:
        return factors | ASKED
    return epilogue(problem)


def piece_box(problem: Problem, tile: Instance, warpgroups: legal.Consumers) -> MapBox:
    """Return the box of C that a warp copies out: 16 rows of a piece's columns, or 16 columns if C has such."""
    size, columns = dtypes.get(problem.out).size, warpgroups.columns
    if problem.c_layout == "col":
        return MapBox("c", (16, columns), swizzle=16 * size, required=True)
    return MapBox("c", (columns, 16), swizzle=columns * size, required=tile.bm == 192)


def grid(problem: Problem, tile: Instance, blocks: int) -> int:
    """Return the blocks of the clusters that run at a time on so many multiprocessors; no more than there are tiles."""
    cluster = tile.cm * tile.cn
    columns = tile.bn * tile.cn // (1 + traced_function.is_paired(problem))
    return min(tiles(problem, tile.bm * tile.cm, columns)[0], max(1, at_a_time(cluster, blocks))) * cluster


def check(reason: str) -> None:
    """Raise RefusedError if there is a reason."""
    if reason:
        raise RefusedError(reason)


def refuses_library(problem: Problem) -> str:
    """Refuse groups, factors of blocks, float32 that must not be rounded, and types of results that it has not."""
    if reason := in_groups(problem):
        return reason
    if problem.scales == "blocks":
        return "scales='blocks': wgmma_blockscaled applies factors of blocks"
    if problem.dtype == "f32" and problem.precision != "tf32":
        return "tensor cores cut f32 to 10 bits of fraction: allow it with precision='tf32' (commands: --dtype tf32)"
    if problem.out == "int32":
        whole = problem.dtype == "int8" and not (problem.epilogue or problem.scaled or problem.scales)
        return "" if whole else "it writes int32 only as the plain product of int8: ask for another result type"
    if problem.out not in (*_HALF, "f32") and not traced_function.exchanges(problem):
        return f"it writes f16, bf16, f32, and int32 of int8, not {problem.out}"
    return ""


DTYPES = (*_HALF, "f32", *dtypes.TENSOR_FLOAT8, "int8")
BOUNDS = {"tf32": aligned_sums_tf32, **dict.fromkeys(dtypes.TENSOR_FLOAT8, aligned_sums_8_bits), "int8": exact_sums}

# A rung of products in half precision that tensor maps describe.
_half_rung = partial(gpu_rung, dtypes=_HALF, refuses=refuses_maps, bound=aligned_sums, expect=_EXPECT)
WGMMA = (
    _half_rung(
        "wgmma_tma",
        idea="the hardware brings whole tiles, swizzled, and multiplies them from shared memory",
        parent="mma_pipelined",
        geometry=partial(_unstaged, barriers=8, producers=0),
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
        geometry=_unstaged,
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
        geometry=_unstaged,
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
        geometry=_unstaged,
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
        mixed=dtypes.TENSOR_FLOAT8,
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
