"""Which operands tensor copies read in place and write by themselves, and the launch that packs the others.

A tensor map describes rows of adjacent elements that begin at multiples of 16 bytes, in ascending order. wgmma reads
elements of 8 and 32 bits only where those of k are adjacent. Every other operand is copied to rows of k first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from gemmery import dtypes
from gemmery.cuda.constants import PACK_THREADS
from gemmery.cuda.geometry import Geometry, MapBox, contiguous, describable, target, template
from gemmery.cuda.tensormaps import PACKED_APART
from gemmery.errors import RefusedError
from gemmery.ladder.gpu import whole
from gemmery.problem import Config, Problem

ALIGNED = 16  # bytes of which tensor maps take addresses and strides
LINE = 128  # bytes of a line of L2, and of k in a stage: a packed row begins at a multiple of them

_BITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int"}  # bytes of an element -> its type in wgmma_pack.cu
_BLOCKS = 4  # of the packing launch on a multiprocessor
_PART = 4096  # bytes of a packed operand that a block copies at a time, at least

InPlace = Callable[[Problem, Config], Geometry]  # a product whose operands tensor copies can read


def packed(problem: Problem) -> int:
    """Return which operands of a product, as its kernel takes it, are packed first: bit 0 stands for A, bit 1 for B.

    >>> packed(Problem(64, 64, 64, "bf16", "bf16")), packed(Problem(64, 63, 63, "bf16", "bf16", alignments=(2, 2, 2)))
    (0, 3)
    >>> packed(Problem(64, 64, 64, "int8", "int32"))  # B is not k-major
    2
    """
    if problem.k == 0:
        return 0
    half = dtypes.get(problem.dtype).size == 2
    starts_anywhere = problem.groups > 0  # but along the adjacent side, a box starts at a multiple of 16 bytes
    a = describable(problem, "a") == "" and ((half and not starts_anywhere) or problem.a_layout == "row")
    b = describable(problem, "b") == "" and (half or problem.b_layout == "col")
    return (not a) + 2 * (not b)


def as_read(problem: Problem) -> Problem:
    """Return the product as its kernel reads it: operands that are packed, or have no elements, are k-major."""
    bits = packed(problem) if problem.k else 3
    a, b, c = problem.alignments
    return problem._replace(
        a_layout="row" if bits & 1 else problem.a_layout,
        b_layout="col" if bits & 2 else problem.b_layout,
        alignments=(ALIGNED if bits & 1 else a, ALIGNED if bits & 2 else b, c),
    )


def pitch(problem: Problem) -> int:
    """Return the bytes from one row of a packed operand to the next.

    >>> pitch(Problem(4095, 4097, 4099, "bf16", "bf16"))
    8320
    """
    return whole(problem.k * dtypes.get(problem.dtype).size, LINE)


def promotion(problem: Problem, operand: int) -> int:
    """Return the bytes that L2 fetches at a time for tensor copies of A (0) or B (1).

    A row of a tile is 128 bytes. Where rows do not begin at lines of L2, it touches two of them; fetching 256 bytes
    would make that four. The pitch of a padded matrix is not known here: it is taken to be that of its elements.
    """
    return 256 if contiguous(problem)[operand] * dtypes.get(problem.dtype).size % LINE == 0 else 128


def library(in_place: InPlace, problem: Problem, config: Config) -> Geometry:
    """Return the launches of any product, as its kernel takes it, from those of one that is read in place."""
    product = in_place(as_read(problem), config)
    ahead = min(product.ahead, 0) if packed(problem) & 2 else product.ahead  # a packed B is not there yet
    product = replace(product, maps=tuple(_routed(box, problem) for box in product.maps), ahead=ahead)
    return with_packing(product, problem) if packed(problem) else product


def packing(geometry: Callable[[str, Problem, Config], Geometry]) -> Callable[[str, Problem, Config], Geometry]:
    """Return the geometry of a row for any product, after a launch that packs what cannot be read where it lies."""
    return lambda name, problem, config: library(partial(geometry, name), problem, config)


def _routed(box: MapBox, problem: Problem) -> MapBox:
    """Return the box of an operand that is packed or read in place; that of C as it is."""
    operand, bits = "abc".index(box.operand), packed(problem)
    if bits >> operand & 1:
        place = _room(problem, 1) if operand == 0 and bits & 2 else 0
        return box._replace(packed=place, pitch=pitch(problem))
    return box if box.operand == "c" else box._replace(promotion=promotion(problem, operand))


def with_packing(product: Geometry, problem: Problem) -> Geometry:
    """Return a product after the launch that packs its operands; the operands take the start of the workspace."""
    if product.workspace:
        raise RefusedError(
            f"{product.workspace} bytes of scratch memory beside packed operands: choose a config that does not split k"
        )
    bits = packed(problem)
    operands = [operand for operand in (0, 1) if bits >> operand & 1]
    parts = sum(-(-_rows(problem, each) * pitch(problem) // _PART) + _matrices(problem, each) for each in operands)
    pack = Geometry(
        "wgmma_pack.cu",
        template("wgmma_pack", _BITS[dtypes.get(problem.dtype).size], bits),
        (min(parts, _BLOCKS * target(problem).sms), 1, 1),
        (PACK_THREADS, 1, 1),
        needs=90,
        instructions="griddepcontrol",
        overlaps=True,
    )
    room = sum(_room(problem, operand) for operand in operands)
    return replace(product, before=(pack, *product.before), workspace=room)


def _matrices(problem: Problem, operand: int) -> int:
    """Return the matrices of A (0) or B (1): groups share A. Whether a batch repeats one, only strides tell."""
    return problem.groups if problem.groups and operand else problem.batch


def _rows(problem: Problem, operand: int) -> int:
    """Return the rows of k of a packed operand."""
    return _matrices(problem, operand) * (problem.m, problem.n)[operand]


def _room(problem: Problem, operand: int) -> int:
    """Return the bytes of a packed operand."""
    return whole(_rows(problem, operand) * pitch(problem), PACKED_APART)
