"""The rungs that multiply float32 on tensor cores, each element split into two or three numbers of 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from gemmery.cuda import choose
from gemmery.cuda.choose import complete, legal
from gemmery.cuda.choose.cost import quickest
from gemmery.cuda.choose.data import PAIRED_PARTS, PARTS, Instance
from gemmery.cuda.constants import KEPT_PARTS, MOST_PARTS
from gemmery.cuda.geometry import Geometry, MapBox, target
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
from gemmery.ladder.gpu import gpu_rung, in_groups, sums_in_f32
from gemmery.problem import Config, Problem

# ---- launches ----


def _refuses(problem: Problem) -> str:
    """Refuse factors, groups, and results that these rungs do not write."""
    scaled = "factors belong to products of 8 bits: multiply float32 by them first" if problem.scales else ""
    return in_groups(problem) or scaled or sums_in_f32(problem)


def _tile(tiled: tuple[Instance, ...], problem: Problem, config: Config) -> Instance:
    """Return the tile of a config, or that whose rounds take least time."""
    fits = [each for each in tiled if config["bm"] in (0, each.bm) and config["bn"] in (0, each.bn)]
    if not fits:
        shapes = ", ".join(f"{each.bm} x {each.bn}" for each in tiled)
        raise RefusedError(f"bm={config['bm']}, bn={config['bn']}: its tiles are {shapes}; use one of them, or 0")
    device = target(problem)
    best = quickest(fits, problem.m, problem.n, problem.batch, device.sms)
    return best._replace(cm=2) if choose.shares_columns(problem, best, device) else best


def _resolve(tiled: tuple[Instance, ...], problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced, by what suits the product's size."""
    tile, device = _tile(tiled, problem, config), target(problem)
    band, blocks = choose.order(tile, problem.m, problem.n, problem.batch, device)
    return complete(config, {"bm": tile.bm, "bn": tile.bn, "band": band, "blocks": blocks or device.sms})


def _in_parts(
    name: str,
    problem: Problem,
    config: Config,
    tiled: tuple[Instance, ...] = PARTS,
    depth: Callable[[int], int] = depth_of,  # the k that tensor cores sum
    shallow: int = SHALLOW,  # k below which CUDA cores multiply
    two: bool = False,
) -> Geometry:
    """Three parts, whatever the operands hold but Inf and NaN, which CUDA cores multiply.

    Or `two` parts; behind the guard, three of them, and float32 itself: the device chooses, the others do nothing.
    """
    if problem.k < shallow:
        return on_cuda_cores(problem)
    first, *others = ("TwoParts", "ThreeParts") if two else ("ThreeParts",)
    before = (
        float32_pre_pass.begin(problem),
        *float32_pre_pass.split(problem, first, asked_for=True),
        replace(on_cuda_cores(problem, "split_simt"), needs=90, overlaps=True),  # with the guard
        *(launch for scheme in others for launch in float32_pre_pass.split(problem, scheme, asked_for=False)),
    )
    # The parts lie in the workspace with k adjacent.
    tile, read = _tile(tiled, problem, config), problem._replace(a_layout="row", b_layout="col", precision="")
    a, b, end, pitch = float32_pre_pass.places(problem)
    element, warpgroups = "f16" if two else "bf16", legal.consumers(read, tile, most=2)
    boxes = (
        MapBox(
            operand,
            (float32_pre_pass.ROW // 2, min(rows, side) if sharers == 1 else rows // sharers),
            packed=place,
            pitch=pitch,
            element=element,
            parts=MOST_PARTS,
            split=KEPT_PARTS * (operand in problem.split),
        )
        for operand, side, rows, place, sharers in (
            ("a", problem.m, tile.bm, a, tile.cn),
            ("b", problem.n, tile.bn, b, tile.cm),
        )
    )
    other = (legal.tiling(read, tile, warpgroups, name="bf16"),) if two else ()
    fields: dict[str, Any] = {"of": element, "workspace": end, "band": config["band"], "before": before}
    blocks, parameters = wgmma.grid(problem, tile, config["blocks"]), (*other, depth(problem.k))
    return wgmma.staged(name, read, tile, warpgroups, blocks, *parameters, operands=tuple(boxes), **fields)


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
        geometry=partial(_in_parts, two=True),
        resolve=partial(_resolve, PARTS),
        space=_space(PARTS),
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
        geometry=_in_parts,
        resolve=partial(_resolve, PARTS),
        space=_space(PARTS),
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
        geometry=partial(_in_parts, tiled=PAIRED_PARTS, depth=lambda _: PAIRED_DEPTH, shallow=PAIRED_SHALLOW),
        resolve=partial(_resolve, PAIRED_PARTS),
        space=_space(PAIRED_PARTS),
        lesson=(
            "Seven additions in place of one give the sum of two float32 and what its rounding lost, exactly. The lost "
            "parts have a sum of their own, and the two meet at the end, rounded once. What remains is the error of 32 "
            "of k in tensor cores, whatever k is. The second number takes registers, so the tile has 96 columns; the "
            "additions take time, so two warpgroups take turns: one multiplies while the other adds."
        ),
    ),
)
