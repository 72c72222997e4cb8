"""The rungs that multiply on int8 tensor cores in pieces: float64 by residues, and whole numbers by their bytes."""

from __future__ import annotations

from dataclasses import replace
from math import prod, sqrt

from gemmery import dtypes
from gemmery.cuda import choose
from gemmery.cuda.choose import complete, legal
from gemmery.cuda.choose.cost import quickest
from gemmery.cuda.choose.data import DIGITS, DIGITS_WIDE, RESIDUES, Instance
from gemmery.cuda.constants import (
    DIGITS_DEEP,
    DIGITS_TALL,
    DIGITS_THREADS,
    MOST_DIGITS,
    OZAKI_DEEP,
    OZAKI_SIDES,
    OZAKI_TALL,
    OZAKI_THREADS,
)
from gemmery.cuda.geometry import C_NAMES, Geometry, MapBox, instance, target, template, tiles
from gemmery.errors import RefusedError
from gemmery.ladder import wgmma
from gemmery.ladder.general import on_cuda_cores
from gemmery.ladder.gpu import WHOLE, beside, gpu_rung, in_groups, whole
from gemmery.problem import Config, Problem

MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197)  # of ozaki.cuh
MOST = 65_536  # k: sums of products of residues stay below 2^30
SHALLOW = 16  # k below which CUDA cores multiply float64 itself
_COUNTS = (15, 14)  # of moduli
_ROW = 128  # bytes of k in a stage
_BLOCKS = 4  # of the other launches on a multiprocessor


def norms(k: int, count: int = _COUNTS[0]) -> float:
    """Return g(k) of the bound g(k) u |a| |b| of an element, from the norms of its row of A and its column of B.

    Half the product M of all moduli is at least the square of a scaled norm, and less than four times as much as one
    scaled by twice as much would be. So an integer, rounded, is off by at most eta |a| before scaling, eta^2 = 2 / M,
    and by 2^-16 of that more for the room that sums of rounded numbers need. The sum of k products is off by 2 sqrt(k)
    eta |a| |b|, and k eta^2. Putting it together rounds once.

    >>> norms(4096) < 8, norms(4096, 14) < 60
    (True, True)
    """
    eta = sqrt(2 / prod(MODULI[:count])) * (1 + 2.0**-16)
    return (2 * sqrt(k) * eta + k * eta * eta) * 2.0**53 + 1.01


# ---- launches ----


def _refuses(problem: Problem) -> str:
    """Refuse what it cannot sum exactly, and types of results that it does not write."""
    if reason := in_groups(problem):
        return reason
    if problem.out != "f64":
        return f"it writes f64, not {problem.out}"
    if problem.k > MOST:
        return f"k={problem.k}: int32 holds sums of {MOST} products of residues; cut k, or take mma_f64"
    return ""


def _tile(problem: Problem, config: Config) -> Instance:
    """Return the tile of a config, or that whose rounds take least time."""
    fits = [each for each in RESIDUES if config["bn"] in (0, each.bn)]
    if not fits:
        raise RefusedError(
            f"bn={config['bn']}: its tiles have {' or '.join(str(t.bn) for t in RESIDUES)} columns, or 0"
        )
    return quickest(fits, problem.m, problem.n, problem.batch * config["moduli"], target(problem).sms)


def _resolve(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced, by what suits the product's size."""
    if config["moduli"] not in _COUNTS:
        raise RefusedError(f"moduli={config['moduli']}: it takes 14, or 15 for one more digit")
    tile, device = _tile(problem, config), target(problem)
    band, blocks = choose.order(tile, problem.m, problem.n, problem.batch * config["moduli"], device)
    return complete(config, {"bn": tile.bn, "band": band, "blocks": blocks or device.sms})


def _other(source: str, name: str, problem: Problem, blocks: int, *parameters: object) -> Geometry:
    """A launch beside that of the product."""
    most = max(1, min(blocks, _BLOCKS * target(problem).sms))
    return beside(source, name, most, OZAKI_THREADS, "double", C_NAMES[problem.out], *parameters)


def _residues(name: str, problem: Problem, config: Config) -> Geometry:
    """All launches; where integers cannot stand for the operands, CUDA cores take the place of most.

    From the product on, they do not overlap: blocks that wait beside those of the product take 8 % of its time.
    """
    if problem.k < SHALLOW:
        return on_cuda_cores(problem)
    count, tile, both = config["moduli"], _tile(problem, config), (problem.m, problem.n)
    shape, grid = (count, tile.bm, tile.bn), tiles(problem, tile.bm, tile.bn)[0]
    # The workspace: exponents, sums, residues of A and of B, by rows of so many bytes.
    pitch, start = whole(problem.k, _ROW), whole(1) + sum(whole(4 * problem.batch * side) for side in both)
    start += whole(grid * tile.bm * tile.bn * count)
    of_a, of_b = (whole(count * problem.batch * side * pitch) for side in both)
    boxes = (
        MapBox(operand, (_ROW, min(rows, side)), packed=place, pitch=pitch, element="int8", parts=count)
        for operand, side, rows, place in (("a", problem.m, tile.bm, start), ("b", problem.n, tile.bn, start + of_a))
    )
    sides = problem.batch * sum(both)
    squares = (-(-sides // OZAKI_TALL) + 1) * -(-problem.k // OZAKI_DEEP)
    # The product multiplies residues, which lie in the workspace with k adjacent.
    tiling = legal.tiling(problem._replace(a_layout="row", b_layout="col"), tile, legal.Consumers(2), name="i8")
    kernel = template("ozaki_product", "double", C_NAMES[problem.out], tiling, count)
    blocks, shared = min(grid * count, config["blocks"]), tile.stages * ((tile.bm + tile.bn) * _ROW + 16)
    before = (
        replace(_other("ozaki_residues", "ozaki_begin", problem, 1), block=(1, 1, 1)),
        _other("ozaki_residues", "ozaki_scales", problem, -(-sides // OZAKI_SIDES) + 1, *shape),
        _other("ozaki_residues", "ozaki_residues", problem, squares, *shape),
        wgmma.launch("ozaki_product", kernel, blocks, 3, shared, tile[:2], ()),
        replace(on_cuda_cores(problem, "ozaki_simt"), needs=90),
    )
    return replace(
        _other(name, name, problem, grid * tile.bm * tile.bn // 4 // OZAKI_THREADS),
        kernel=instance(name, problem, *shape),
        overlaps=False,
        workspace=start + of_a + of_b,
        before=before,
        maps=tuple(boxes),
        band=config["band"],
        tile=tile[:2],
    )


OZAKI = (
    gpu_rung(
        "ozaki_int8",
        idea="float64 by int8 tensor cores: residues modulo 15 numbers, and the Chinese remainder theorem",
        parent="mma_f64",
        one_sided=True,
        dtypes=("f64",),
        refuses=_refuses,
        bound=lambda k: k * norms(k, min(_COUNTS)),  # of u max|A| max|B|, for the fewest moduli
        geometry=_residues,
        resolve=_resolve,
        space={"moduli": _COUNTS, "bn": (0, 128, 256), "band": (0, 8, 16), "blocks": (0, 8)},
        default={"moduli": 15, "bn": 0, "band": 0, "blocks": 0},
        expect={"local_requests": 0},
        normwise=True,
        lesson=(
            "Tensor cores multiply int8 thirty times as fast as float64. Rounded to integers of 58 bits, a product of "
            "matrices is exact, and its residues modulo a small number need only the residues of the operands: bytes. "
            "Fifteen coprime numbers up to 256 have a product of 118 bits, enough for every sum, so fifteen int8 "
            "products tell the result. Scales belong to rows and columns, so small elements beside large ones lose "
            "digits: the error is relative to norms, and not to each product."
        ),
    ),
)


SHALLOW_DIGITS = 32  # k below which a stage is mostly zeros
_WORK, _NARROW = 1 << 29, 128  # multiply-adds from which tiles fill the card, and the rows and columns that one has
_SPLITTING = 8  # of the launch that splits on a multiprocessor


def digits(dtype: str, out: str) -> int:
    """Return the signed bytes that stand for an element of an operand, modulo 256 to the bytes of an element of C.

    A number of an unsigned type, or of two bytes and more, may carry into one byte more than it has.

    >>> digits("int32", "int32"), digits("int8", "int32"), digits("uint8", "int32"), digits("int16", "int64")
    (4, 1, 2, 3)
    """
    row = dtypes.get(dtype)
    return min(dtypes.get(out).size, 1 if row.name in ("int8", "bool") else row.size + 1)


def digit_products(dtype: str, out: str) -> int:
    """Return how many int8 products of the operands' size a product of whole numbers takes.

    >>> [digit_products(name, name) for name in ("int8", "int16", "int32", "int64")], digit_products("uint8", "int32")
    ([1, 3, 10, 36], 4)
    """
    count, most = digits(dtype, out), dtypes.get(out).size
    return sum(i + j < most for i in range(count) for j in range(count))


def digits_pay(problem: Problem) -> bool:
    """Return True for whole numbers of which CUDA cores would take longer, by a count of tiles and of products.

    >>> [digits_pay(Problem(n, n, n, "int32", "int32")) for n in (512, 1024)]
    [False, True]
    """
    work = problem.batch * problem.m * problem.n * problem.k
    return problem.dtype in WHOLE and work >= _WORK and min(problem.m, problem.n) >= _NARROW


def _refuses_digits(problem: Problem) -> str:
    """Refuse what it does not sum exactly, and what has too little k to fill a stage."""
    if problem.groups:
        return in_groups(problem)
    if 1 in (problem.m, problem.n):
        return f"C is {problem.m} x {problem.n}: to split a matrix takes longer than to multiply it; use simt_pipelined"
    if problem.activation:
        return f"activations are of floats, not of {problem.out}: apply {problem.epilogue} to the result"
    if dtypes.get(problem.out).kind not in "iub":
        return f"it writes whole numbers, not {problem.out}"
    if not SHALLOW_DIGITS <= problem.k <= MOST_DIGITS:
        return f"k={problem.k}: sums of bytes are exact for {SHALLOW_DIGITS} to {MOST_DIGITS}; use simt_pipelined"
    return ""


def _digits_tile(problem: Problem, config: Config) -> Instance:
    """Return the tile of a config, or that whose rounds take least time."""
    known = DIGITS_WIDE if dtypes.get(problem.out).size == 8 else DIGITS
    fits = [each for each in known if config["bn"] in (0, each.bn) and config["cm"] in (0, each.cm)]
    if not fits:
        names = ", ".join(f"bn={each.bn} with cm={each.cm}" for each in known)
        raise RefusedError(f"bn={config['bn']}, cm={config['cm']}: its tiles for {problem.out} have {names}, or 0")
    return quickest(fits, problem.m, problem.n, problem.batch, target(problem).sms)


def _resolve_digits(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced, by what suits the product's size."""
    tile, device = _digits_tile(problem, config), target(problem)
    band, blocks = choose.order(tile, problem.m, problem.n, problem.batch, device)
    return complete(config, {"bn": tile.bn, "cm": tile.cm, "band": band, "blocks": blocks or device.sms})


def _digits(name: str, problem: Problem, config: Config) -> Geometry:
    """The launch that splits the operands, and that of the product."""
    tile, count = _digits_tile(problem, config), digits(problem.dtype, problem.out)
    pitch, sides = whole(problem.k, _ROW), (problem.m, problem.n)
    of_a, of_b = (whole(count * problem.batch * side * pitch) for side in sides)
    split = problem._replace(dtype="int8", a_layout="row", b_layout="col")  # what is multiplied
    boxes = tuple(
        box._replace(packed=place, pitch=pitch, element="int8", parts=count)
        for box, place in zip(wgmma.operand_boxes(split, tile), (0, of_a), strict=True)
    )
    squares = sum(-(-problem.batch * side // DIGITS_TALL) for side in sides) * -(-problem.k // DIGITS_DEEP)
    blocks, parameters = min(squares, _SPLITTING * target(problem).sms), (C_NAMES[problem.dtype], C_NAMES[problem.out])
    first = beside("digits_split", "digits_split", blocks, DIGITS_THREADS, *parameters, count, count)
    tiling = legal.tiling(split._replace(c_layout="row"), tile, legal.Consumers(2), name="i8")
    kernel = instance(name, problem, tiling, count, count)
    shared = legal.ring_bytes(split, tile) + 16 * tile.stages
    blocks = wgmma.grid(problem, tile, config["blocks"])
    product = wgmma.launch(name, kernel, blocks, 3, shared, tile[:2], boxes, cluster=tile.cm * tile.cn)
    return replace(product, workspace=of_a + of_b, before=(first,), band=config["band"], overlaps=True)


INTEGERS = (
    gpu_rung(
        "wgmma_digits",
        idea="whole numbers by int8 tensor cores: their bytes, and the products of bytes that C does not drop",
        parent="wgmma_persistent",
        dtypes=WHOLE,
        refuses=_refuses_digits,
        bound=wgmma.exact_sums,
        geometry=_digits,
        resolve=_resolve_digits,
        space={"bn": (0, 128, 256), "cm": (0, 1, 2), "band": (0, 8, 16), "blocks": (0, 8)},
        default={"bn": 0, "cm": 0, "band": 0, "blocks": 0},
        expect={"local_requests": 0},
        lesson=(
            "A number of 32 bits is four signed bytes, and its product with another sixteen products of bytes. C drops "
            "what is beyond its own bytes, so six of them are not needed; for 64 bits, 28 of 64. Of an H200, tensor "
            "cores do 1,979 TOP/s of bytes, CUDA cores 33 of 32 bits (data sheet). What wraps may wrap early: the "
            "products of one weight are added in one accumulator, which is shifted by 8 bits before the next weight."
        ),
    ),
)
