"""The rung that multiplies whole numbers on int8 tensor cores, by their bytes."""

from __future__ import annotations

from dataclasses import replace

from gemmery import dtypes
from gemmery.cuda import choose
from gemmery.cuda.choose import complete, legal
from gemmery.cuda.choose.cost import quickest
from gemmery.cuda.choose.data import DIGITS, DIGITS_WIDE, Instance
from gemmery.cuda.constants import DIGITS_DEEP, DIGITS_TALL, DIGITS_THREADS, MOST_DIGITS
from gemmery.cuda.geometry import C_NAMES, Geometry, instance, target, template
from gemmery.errors import RefusedError
from gemmery.ladder import wgmma
from gemmery.ladder.gpu import WHOLE, gpu_rung, in_groups, whole
from gemmery.problem import Config, Problem

SHALLOW = 32  # k below which a stage is mostly zeros
_WORK, _NARROW = 1 << 29, 128  # multiply-adds from which tiles fill the card, and the rows and columns that one has
_ROW = 128  # bytes of k in a stage
_BLOCKS = 8  # of the launch that splits on a multiprocessor


def digits(dtype: str, out: str) -> int:
    """Return the signed bytes that stand for an element of an operand, modulo 256 to the bytes of an element of C.

    A number of an unsigned type, or of two bytes and more, may carry into one byte more than it has.

    >>> digits("int32", "int32"), digits("int8", "int32"), digits("uint8", "int32"), digits("int16", "int64")
    (4, 1, 2, 3)
    """
    row = dtypes.get(dtype)
    return min(dtypes.get(out).size, 1 if row.name in ("int8", "bool") else row.size + 1)


def products(dtype: str, out: str) -> int:
    """Return how many int8 products of the operands' size a product of whole numbers takes.

    >>> [products(name, name) for name in ("int8", "int16", "int32", "int64")], products("uint8", "int32")
    ([1, 3, 10, 36], 4)
    """
    count, most = digits(dtype, out), dtypes.get(out).size
    return sum(i + j < most for i in range(count) for j in range(count))


def pays(problem: Problem) -> bool:
    """Return True for whole numbers of which CUDA cores would take longer, by a count of tiles and of products.

    >>> [pays(Problem(n, n, n, "int32", "int32")) for n in (512, 1024)]
    [False, True]
    """
    work = problem.batch * problem.m * problem.n * problem.k
    return problem.dtype in WHOLE and work >= _WORK and min(problem.m, problem.n) >= _NARROW


def _refuses(problem: Problem) -> str:
    """Refuse what it does not sum exactly, and what has too little k to fill a stage."""
    if problem.groups:
        return in_groups(problem)
    if 1 in (problem.m, problem.n):
        return f"C is {problem.m} x {problem.n}: to split a matrix takes longer than to multiply it; use simt_pipelined"
    if problem.epilogue.split("+")[-1] not in ("", "bias"):
        return f"activations are of floats, not of {problem.out}: apply {problem.epilogue} to the result"
    if dtypes.get(problem.out).kind not in "iub":
        return f"it writes whole numbers, not {problem.out}"
    if not SHALLOW <= problem.k <= MOST_DIGITS:
        return f"k={problem.k}: sums of bytes are exact for {SHALLOW} to {MOST_DIGITS}; use simt_pipelined"
    return ""


def _tile(problem: Problem, config: Config) -> Instance:
    """Return the tile of a config, or that whose rounds take least time."""
    known = DIGITS_WIDE if dtypes.get(problem.out).size == 8 else DIGITS
    fits = [each for each in known if config["bn"] in (0, each.bn) and config["cm"] in (0, each.cm)]
    if not fits:
        names = ", ".join(f"bn={each.bn} with cm={each.cm}" for each in known)
        raise RefusedError(f"bn={config['bn']}, cm={config['cm']}: its tiles for {problem.out} have {names}, or 0")
    return quickest(fits, problem.m, problem.n, problem.batch, target(problem).sms)


def _resolve(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced, by what suits the product's size."""
    tile, device = _tile(problem, config), target(problem)
    band, blocks = choose.order(tile, problem.m, problem.n, problem.batch, device)
    return complete(config, {"bn": tile.bn, "cm": tile.cm, "band": band, "blocks": blocks or device.sms})


def _digits(name: str, problem: Problem, config: Config) -> Geometry:
    """The launch that splits the operands, and that of the product."""
    tile, count = _tile(problem, config), digits(problem.dtype, problem.out)
    pitch, sides = whole(problem.k, _ROW), (problem.m, problem.n)
    of_a, of_b = (whole(count * problem.batch * side * pitch) for side in sides)
    split = problem._replace(dtype="int8", a_layout="row", b_layout="col")  # what is multiplied
    boxes = tuple(
        box._replace(packed=place, pitch=pitch, element="int8", parts=count)
        for box, place in zip(wgmma.operand_boxes(split, tile), (0, of_a), strict=True)
    )
    squares = sum(-(-problem.batch * side // DIGITS_TALL) for side in sides) * -(-problem.k // DIGITS_DEEP)
    first = Geometry(
        "digits_split.cu",
        template("digits_split", C_NAMES[problem.dtype], C_NAMES[problem.out], count, count),
        (min(squares, _BLOCKS * target(problem).sms), 1, 1),
        (DIGITS_THREADS, 1, 1),
        needs=90,
        instructions="griddepcontrol",
        overlaps=True,
    )
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
        refuses=_refuses,
        bound=wgmma.exact_sums,
        geometry=_digits,
        resolve=_resolve,
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
