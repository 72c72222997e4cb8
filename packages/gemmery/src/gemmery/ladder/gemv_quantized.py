"""The rung for few rows times a matrix of 8 or 4 bits an element, by mma: sm_80."""

from __future__ import annotations

from gemmery.cuda.choose import complete
from gemmery.cuda.device import WARP
from gemmery.cuda.geometry import Geometry, instance, target, template, vector
from gemmery.ladder.gpu import cut_off, gpu_rung
from gemmery.problem import Config, Problem

MOST_ROWS = 64  # of x; with more, W is better unpacked once
_MOST_PLAIN = 8  # of x with a W that is not packed, which other rungs multiply by more rows
_STEP = 64  # bytes of a row of W in a step of a warp


def step(bits: int) -> int:
    """Return the elements of k in a step, which must have one factor.

    >>> step(4), step(8)
    (128, 64)
    """
    return 8 * _STEP // bits


def _refuses(problem: Problem) -> str:
    """Refuse many rows, other results than those that mma sums, and packed formats that a step does not fit."""
    p = problem.by_rows()
    most = MOST_ROWS if p.bits else _MOST_PLAIN
    if p.m > most:
        return f"m = {p.m}: it multiplies at most {most} rows by a matrix; use mma_pipelined"
    if p.out == "f64":
        return "it sums in f32 and writes f32, f16, bf16, not f64"
    if p.bits not in (0, 8, 4):
        return f"elements of {p.bits} bits: it unpacks 8 and 4"
    if p.bits and (p.group % step(p.bits) or p.k % p.group):
        return (
            f"groups of {p.group} in k={p.k}: of {p.bits} bits a group is a multiple of {step(p.bits)} elements, and "
            "k one of groups"
        )
    if p.bits and (p.batch > 1 or p.a_layout != "row" or p.alignments[0] % 16 or p.alignments[1] % 16):
        return "a packed matrix is multiplied by rows at multiples of 16 bytes, without a batch"
    return ""


def _wide(problem: Problem) -> bool:
    """Return True if rows of W and x are read in pieces of 16 bytes."""
    p = problem
    return bool(p.bits) or (p.b_layout == "col" and p.k % 8 == 0 and vector(p, 0) == vector(p, 1) == 8)


def _quantized(name: str, problem: Problem, config: Config) -> Geometry:
    """A block for each 16 rows of W, or a multiple, and up to 64 of x; its warps share k."""
    tiles, eights, steps, warps = (config[key] for key in ("tiles", "eights", "steps", "warps"))
    ring = warps * steps * tiles * 1024 if _wide(problem) else 0
    device = target(problem)
    parts = -(-problem.m // (8 * eights))
    resident = max(1, config["blocks"] * device.sms // parts)
    blocks = min(-(-problem.n // (16 * tiles)) * problem.batch, resident), parts, 1
    overlaps = device.capability >= 90
    launch = template("GemvLaunch", False, problem.batch > 1, False, overlaps)
    shape = template(
        "PackedTiles",
        problem.bits or 16,
        problem.group or 1,
        _wide(problem),
        tiles,
        eights,
        steps,
        warps,
        config["blocks"],
    )
    return Geometry(
        f"{name}.cu",
        instance(name, problem, launch, shape),
        blocks,
        (warps * WARP, 1, 1),
        shared=ring + 2 * warps * tiles * eights * 512,
        needs=80,
        instructions="mma.m16n8k16",
        overlaps=overlaps,
        tile=(8 * eights, 16 * tiles),
    )


def _resolve(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced: few rows of W leave k to more warps of a block."""
    sms, tall = target(problem).sms, -(-problem.n // 16)
    eights = config["eights"] or next(each for each in (1, 2, 4) if 8 * each >= problem.m or each == 4)
    if eights == 1:
        tiles = config["tiles"] or (2 if problem.bits == 4 and tall > 16 * sms else 1)
        warps = 4 if tiles > 1 else 16 if tall <= 2 * sms else 8
        resident = 16 if tiles > 1 or tall <= sms else 32 if warps == 16 else 24
    elif eights == 2:
        tiles = config["tiles"] or (2 if tall > 1.5 * sms else 1)
        tall = -(-tall // tiles)
        warps, resident = 16 if tall <= sms else 8 if tall <= 2 * sms else 4, 16
    else:
        tiles, warps, resident = config["tiles"] or 1, 4, 12
    blocks = max(1, resident // (config["warps"] or warps))
    return complete(config, {"tiles": tiles, "eights": eights, "steps": 3, "warps": warps, "blocks": blocks})


GEMV_QUANTIZED = (
    gpu_rung(
        "gemv_quantized",
        idea="W is read in 8 or 4 bits an element, unpacked in registers and multiplied by mma",
        parent="gemv_vectorized",
        dtypes=("f16", "bf16"),
        refuses=_refuses,
        bound=cut_off,
        geometry=_quantized,
        resolve=_resolve,
        space={
            "tiles": (0, 1, 2, 4),
            "eights": (0, 1, 2, 4),
            "steps": (0, 1, 2, 4),
            "warps": (0, 4, 8, 16),
            "blocks": (0, 1, 2, 3, 4),
        },
        expect={"bank_conflicts": 0, "local_requests": 0, "load_bytes_a_sector": 32},
        lesson=(
            "Time is bytes of W by bandwidth, so 4 bits an element could take a quarter of the time of 16. But then "
            "instructions limit it: each element is unpacked, converted and multiplied. A mask puts 4 bits into the "
            "last bits of a number whose last bit counts one, and a subtraction leaves the exact integer: three "
            "instructions for two elements. Tensor cores multiply: 16 rows of W are the left operand of mma and up "
            "to 8 rows of x the right one, so 8 rows take hardly longer than one. The elements may come in any order "
            "of k, if it is the same in both operands: each lane keeps the 16 bytes that it loaded. Blocks stay for "
            "all their rows of W, and request the next while they multiply."
        ),
    ),
)
