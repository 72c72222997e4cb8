"""The rungs that multiply float32 on tensor cores, each element split into two or three numbers of 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from gemmery.cuda import hopper
from gemmery.cuda.geometry import C_NAMES, Geometry, MapBox, target, template, tiles
from gemmery.cuda.hopper_model import Instance
from gemmery.cuda.tiles import complete
from gemmery.errors import RefusedError
from gemmery.ladder import float32_pre_pass, wgmma
from gemmery.ladder.float32_bounds import (
    PAIRED_DEPTH,
    PAIRED_SHALLOW,
    SHALLOW,
    depth_of,
    pairs,
    three_parts,
    two_parts,
)
from gemmery.ladder.general import on_cuda_cores
from gemmery.ladder.gpu import gpu_rung
from gemmery.problem import Config, Problem

# Tiles by the stages that fit and their speeds: a thread has three sets of sums of two parts, four of a pair.
_TILES = (Instance(128, 128, 6, 1, 1), Instance(64, 128, 6, 1, 1, speed=80), Instance(64, 64, 6, 1, 1, speed=65))
_PAIRED_TILES = (Instance(128, 96, 6, 1, 1), Instance(64, 96, 6, 1, 1, speed=80), Instance(64, 64, 6, 1, 1, speed=65))
# Rounds of tiles of so many columns from which two blocks of a cluster share them: less of the power that limits them.
_SHARED_FROM = {128: 6, 96: 16}


# ---- launches ----


def _refuses(problem: Problem) -> str:
    """Refuse factors, groups, and results that these rungs do not write."""
    if problem.groups:
        return f"groups={problem.groups}: wgmma_grouped multiplies groups of rows"
    if problem.scales:
        return "factors belong to products of 8 bits: multiply float32 by them first"
    if problem.out not in ("f32", "f16", "bf16"):
        return f"it sums in f32 and writes f16, bf16 and f32, not {problem.out}"
    return ""


def _guarded(problem: Problem) -> Geometry:
    """The guard, and the product on CUDA cores where an operand has Inf or NaN."""
    return replace(on_cuda_cores(problem, "split_simt"), needs=90, overlaps=True)


def _tile(tiled: tuple[Instance, ...], problem: Problem, config: Config) -> Instance:
    """Return the tile of a config, or that whose rounds take least time."""
    fits = [each for each in tiled if config["bm"] in (0, each.bm) and config["bn"] in (0, each.bn)]
    if not fits:
        shapes = ", ".join(f"{each.bm} x {each.bn}" for each in tiled)
        raise RefusedError(f"bm={config['bm']}, bn={config['bn']}: its tiles are {shapes}; use one of them, or 0")
    sms = target(problem).sms
    best = min(fits, key=lambda each: -(-tiles(problem, each.bm, each.bn)[0] // sms) * each.bm * each.bn / each.speed)
    rounds = tiles(problem, best.bm, best.bn)[0] / sms
    shares = best.bm == 128 and problem.m >= 16 * best.bm and rounds >= _SHARED_FROM[best.bn]
    return best._replace(cm=2) if shares else best


def _resolve(tiled: tuple[Instance, ...], problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced, by what suits the product's size."""
    tile, sms = _tile(tiled, problem, config), target(problem).sms
    band, blocks = hopper.order(tile, -(-problem.m // tile.bm), -(-problem.n // tile.bn), problem.batch, sms)
    return complete(config, {"bm": tile.bm, "bn": tile.bn, "band": band, "blocks": blocks or sms})


def _tiling(element: str, tile: Instance) -> str:
    return template("WgmmaTiles", element, "ROW", "COL", tile.bm, tile.bn, tile.stages, tile.cm, tile.cn)


def _product(
    name: str, element: str, tiled: tuple[Instance, ...], problem: Problem, config: Config, *parameters: object
) -> Geometry:
    """The launch that multiplies parts, which lie in the workspace with k adjacent."""
    tile = _tile(tiled, problem, config)
    bm, bn, stages, cm, cn, *_ = tile
    cluster = cm * cn
    count = min(tiles(problem, bm * cm, bn * cn)[0], wgmma.clusters(config["blocks"], cluster))
    a, b, end, pitch = float32_pre_pass.places(problem)
    boxes = (
        MapBox(
            operand,
            (float32_pre_pass.ROW // 2, min(rows, side) if sharers == 1 else rows // sharers),
            packed=place,
            pitch=pitch,
            element=element,
            parts=float32_pre_pass.PARTS,
            split=float32_pre_pass.KEPT_PARTS * (operand in problem.split),
        )
        for operand, side, rows, place, sharers in (("a", problem.m, bm, a, cn), ("b", problem.n, bn, b, cm))
    )
    return wgmma.launch(
        name,
        template(
            f"{name}{'_cluster' * (cluster > 1)}",
            "float",
            C_NAMES[problem.out],
            wgmma.steps(problem),
            _tiling(element, tile),
            *parameters,
        ),
        count * cluster,
        wgmma.consumers(problem, bm) + 1,
        stages * (bm + bn) * float32_pre_pass.ROW + wgmma.staging_bytes(problem, bm, bn) + 16 * stages,
        (bm, bn),
        (*boxes, wgmma.piece_box(problem, bm, bn)),
        workspace=end,
        overlaps=True,
        cluster=cluster,
        band=config["band"],
    )


def _fp16x3(name: str, problem: Problem, config: Config) -> Geometry:
    """Two parts; behind the guard, three of them, and float32 itself: the device chooses, the others do nothing."""
    if problem.k < SHALLOW:
        return on_cuda_cores(problem)
    before = (
        float32_pre_pass.begin(problem),
        *float32_pre_pass.split(problem, "TwoParts", asked_for=True),
        _guarded(problem),
        *float32_pre_pass.split(problem, "ThreeParts", asked_for=False),
    )
    other = _tiling("bf16", _tile(_TILES, problem, config))
    product = _product(name, "f16", _TILES, problem, config, other, depth_of(problem.k))
    return replace(product, before=before)


def _always_three(
    tiled: tuple[Instance, ...], depth: Callable[[int], int], shallow: int, name: str, problem: Problem, config: Config
) -> Geometry:
    """Three parts, whatever the operands hold but Inf and NaN; tensor cores sum the `depth` of k, k >= `shallow`."""
    if problem.k < shallow:
        return on_cuda_cores(problem)
    before = (
        float32_pre_pass.begin(problem),
        *float32_pre_pass.split(problem, "ThreeParts", asked_for=True),
        _guarded(problem),
    )
    product = _product(name, "bf16", tiled, problem, config, depth(problem.k))
    return replace(product, before=before)


# ---- when two parts pay; times on an H200, in microseconds and cycles of 1.7 GHz ----

_LAUNCHES, _HOST = (20.0, 40.0), 30.0  # on the device, of rows alone and with others; on the host
_PRE_PASS = 3.6e6, 2.5e6  # bytes in a microsecond, of rows that stay in registers and of others
_CYCLES, _END, _BUSY = 1700.0, 4000, 0.85  # of a microsecond; of the end of a tile; of tensor cores
_SIMT, _SIMT_LEAST, _SIMT_END = (42e6, 48e6), 4.0, 2.0  # operations in a microsecond, of whole rounds; likewise


def pays(problem: Problem) -> bool:
    """Return True if split_fp16x3 should take less time for a product than CUDA cores.

    >>> case = Problem(4096, 4096, 4096, "f32", "f32", device="h200", precision="f32_tensor")
    >>> pays(case), pays(case._replace(m=8))
    (True, False)
    """
    p, sms = problem.by_rows(), target(problem).sms
    tile = _tile(_TILES, p, {"bm": 0, "bn": 0})
    rounds = -(-tiles(p, tile.bm, tile.bn)[0] // sms)
    step = 3 * tile.bm * tile.bn / 32 / _BUSY
    product = rounds * (-(-p.k // 64) * step + _END) / _CYCLES
    operands = float32_pre_pass.in_registers(p)
    others = operands != 3
    sides = ((p.m, operands & 1), (p.n, operands & 2))
    pre_pass = sum(p.batch * side * p.k * 8 / _PRE_PASS[not fast] for side, fast in sides)
    rows, columns = -(-p.m // 64), -(-p.n // 64)
    waves = rows * columns * p.batch / sms
    simt = max(_SIMT_LEAST, p.flops / _SIMT[others] * max(1.0, 1 / waves) + _SIMT_END)
    return max(_HOST, _LAUNCHES[others] + pre_pass + product) < simt


# ---- rows ----

_split_rung = partial(
    gpu_rung,
    one_sided=True,
    dtypes=("f32",),
    refuses=_refuses,
    expect={"local_requests": 0},
)


def _space(tiled: tuple[Instance, ...]) -> dict[str, tuple[int, ...]]:
    sides = {key: (0, *sorted({getattr(tile, key) for tile in tiled})) for key in ("bm", "bn")}
    return {**sides, "band": (0, 8, 16), "blocks": (0, 8)}


SPLIT_FLOAT32 = (
    _split_rung(
        "split_fp16x3",
        idea="float32 as two halves: three products on tensor cores, as accurate as float32",
        parent="wgmma_epilogue",
        bound=two_parts,
        geometry=_fp16x3,
        resolve=partial(_resolve, _TILES),
        space=_space(_TILES),
        lesson=(
            "A float32 is the sum of two numbers of 11 bits, almost. Three of their four products count, and tensor "
            "cores do 15 in half precision while CUDA cores do one. The low number is scaled by 2^11: otherwise it "
            "would be too small for the exponents of half precision, and lose bits. Tensor cores cut their sums "
            "towards zero instead of rounding them, and cuts of positive sums add up as k grows. So CUDA cores take "
            "the sum over every 64 of k and add it to theirs, rounded. Small elements beside large ones still lose "
            "bits: the pre-pass sees them, and the device takes three bfloat16 instead."
        ),
    ),
    _split_rung(
        "split_bf16x6",
        idea="float32 as three bfloat16, exactly: six products, and no choice that depends on the values",
        parent="split_fp16x3",
        bound=three_parts,
        geometry=partial(_always_three, _TILES, depth_of, SHALLOW),
        resolve=partial(_resolve, _TILES),
        space=_space(_TILES),
        lesson=(
            "Three numbers of 8 bits are the 24 bits of a float32, and bfloat16 has its exponents: nothing is lost. Of "
            "the nine products, the three smallest are no larger than what float32 rounds off one product, so six "
            "suffice. The smallest are added first, since a cut is relative to the sum so far. It takes twice as long "
            "as two halves, and no element decides how another row is computed."
        ),
    ),
    _split_rung(
        "split_paired",
        idea="sums in two float32 each: the error no longer grows with k",
        parent="split_bf16x6",
        bound=pairs,
        geometry=partial(_always_three, _PAIRED_TILES, lambda _: PAIRED_DEPTH, PAIRED_SHALLOW),
        resolve=partial(_resolve, _PAIRED_TILES),
        space=_space(_PAIRED_TILES),
        lesson=(
            "Seven additions in place of one give the sum of two float32 and what its rounding lost, exactly. The lost "
            "parts have a sum of their own, and the two meet at the end, rounded once. What remains is the error of 32 "
            "of k in tensor cores, whatever k is. The second number takes registers, so the tile has 96 columns; the "
            "additions take time, so two warpgroups take turns: one multiplies while the other adds."
        ),
    ),
)
