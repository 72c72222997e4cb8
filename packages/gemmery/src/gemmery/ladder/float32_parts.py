"""The rungs that multiply float32 on tensor cores, each element split into two or three numbers of 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from gemmery.ladder.general import on_cuda_cores
from gemmery.ladder.gpu import gpu_rung, in_groups, sums_in_f32
from gemmery.problem import Config, Problem

# ---- error bounds: f(k) of |C - AB| <= f(k) u |A||B|, u = 2^-24 ----
# CUDA cores keep k u: three parts do so from 16 of k on, two from 87 on. Below 16, CUDA cores multiply. Pairs begin at
# 4 of k, from where on their error is smaller than that of CUDA cores, if not their bound.

SHALLOW, PAIRED_SHALLOW = 16, 4  # k below which CUDA cores multiply
DEEP = 128  # k from which three parts are summed over 64 of k in tensor cores, below it over 16
PAIRED_DEPTH = 32  # the same for pairs, whatever k


def depth_of(k: int) -> int:
    """Return the k of three parts that tensor cores sum before CUDA cores add it."""
    return 64 if k >= DEEP else 16


def _in_core(depth: int) -> float:
    """Return f of the sum of `depth` of k that tensor cores keep, of its own |A||B|.

    A step adds 16 products to a sum. All 17 are aligned to the largest exponent and cut to 25 bits of fraction, which
    costs each up to u / 2 of the largest; the result is cut to 24 bits, up to 2 u of it. That is 10.5 u a step.
    """
    return 10.5 * -(-depth // 16)


def two_parts(k: int) -> float:
    """Return f(k) of the bound f(k) u |A||B| of two halves, or of three bfloat16 where the guard takes those.

    Two halves keep a scaled element x to 2 u |x| or 2^-36, and the product of low parts, which is left out, is below
    4 u |a||b|, or more where an element is below 2^-13: 8 u, and what the guard limits to 3/8 k u. Tensor cores sum the
    high products of 64 of k; CUDA cores round once for each such part. The two corrections stay in tensor cores: twice
    as many steps, of sums below 2 x 2^-11 |A||B|. 1 % is for terms of second order.
    """
    if k < SHALLOW:
        return float(k)
    corrections = 2 * _in_core(k) * 2.0**-10
    halves = 8 + 1.01 * (_in_core(min(64, k)) + -(-k // 64) + corrections) + 0.375 * k
    return max(halves, three_parts(k))


def three_parts(k: int) -> float:
    """Return f(k) for three bfloat16.

    They are the element, exactly. Of nine products two of those that are left out are below u |a||b|, and the third far
    below: 2.1 u. Tensor cores sum the other six over a part of k, the smallest first: the sum they cut is below 3.1 x
    2^-16 |A||B| in the first three, 2.1 x 2^-8 in the next two, and 1.02 in the last. The steps of all six cost 1.04
    times those of one. CUDA cores round once for each part of k.
    """
    if k < SHALLOW:
        return float(k)
    depth = depth_of(k)
    return 2.1 + 1.04 * _in_core(depth) + 1.01 * -(-k // depth)


def pairs(k: int) -> float:
    """Return f(k) for three bfloat16 that are summed in pairs: it hardly grows.

    The errors of n = k / 32 additions are exact and below n u |A||B| together; only their own sum rounds, to a total of
    n^2 u^2 / 2. What remains is what three parts leave out, the steps of 32 of k, and one rounding at the end.
    """
    if k < PAIRED_SHALLOW:
        return float(k)
    return 2.1 + 1.04 * _in_core(min(PAIRED_DEPTH, k)) + 1.01 + (k / PAIRED_DEPTH) ** 2 * 2.0**-25


@dataclass(frozen=True)
class Float32Scheme:
    """The method that multiplies these operands, the guard's verdict about them, and the error bound of an element."""

    name: str  # "fp16x3", "bf16x6", "paired" (bf16x6 with sums in two numbers) or "float32"
    verdict: str  # "" where no numbers decide
    formula: str  # f(k) of the bound f(k) u |A| |B|, u = 2^-24
    bound: float  # f of this k

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What `explain` prints."""
        guard = [("guard", self.verdict)] if self.verdict else []
        error = f"at most f(k) u |A| |B| in each element, u = 2^-24, f(k) = {self.formula}: {self.bound:.4g} for this k"
        return [("scheme", f"{self.name}: {_METHODS[self.name]}"), *guard, ("error", error)]


_METHODS = {
    "fp16x3": "two halves for each float32, three products on tensor cores",
    "bf16x6": "three bfloat16 for each float32, six products on tensor cores",
    "paired": "three bfloat16 for each float32, six products on tensor cores, sums in two numbers",
    "float32": "CUDA cores",
}
FORMULAS: dict[str, tuple[Callable[[int], float], str]] = {
    "fp16x3": (two_parts, "8 + 1.01 (42 + ceil(k / 64) + 0.0013 k) + 3/8 k"),
    "bf16x6": (three_parts, "2.1 + 0.68 c + 1.01 ceil(k / c), c = 64, or 16 below k = 128"),
    "paired": (pairs, "25 + (k / 32)^2 2^-25"),
    "float32": (float, "k"),
}
ENOUGH = "two halves will do: no element is too small for them"
INEXACT = "an element is too small for two halves beside the largest of its row or column: it takes three bfloat16"
NOT_FINITE = "an operand has Inf or NaN: CUDA cores multiply"


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

_split_rung = partial(gpu_rung, one_sided=True, dtypes=("f32",), refuses=_refuses, expect={"local_requests": 0})


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
            "toward zero instead of rounding them, and cuts of positive sums add up as k grows. So CUDA cores take "
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
