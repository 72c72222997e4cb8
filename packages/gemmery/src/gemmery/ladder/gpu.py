"""What the rows of CUDA rungs share: what follows from a rung's name, its usual types, refusals, bounds and packing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from gemmery import dtypes
from gemmery.cuda.constants import PACK_THREADS
from gemmery.cuda.geometry import Geometry, MapBox, contiguous, describable, instance, target, template, tiles
from gemmery.cuda.launch import CudaLaunch
from gemmery.cuda.tensormaps import PACKED_APART
from gemmery.errors import RefusedError
from gemmery.ladder.rung import Rung, as_given
from gemmery.problem import Config, Problem

EVERY = ("f32", "f64", "f16", "bf16")
WHOLE = tuple(row.name for row in dtypes.DTYPES if row.kind in "iub")
OTHERS = tuple(row.name for row in dtypes.DTYPES if row.name not in (*EVERY, *dtypes.TENSOR_FLOAT8))  # on CUDA cores
ON_TENSOR_CORES = ("f16", "bf16", "f32")  # the types that they multiply and sum in f32


def takes_all(problem: Problem) -> str:
    """Refuse nothing."""
    return ""


def off_tensor_cores(problem: Problem) -> str:
    """Refuse what tensor cores would round, and results that they do not sum."""
    if problem.dtype == "f32" and problem.precision != "tf32":
        return "tensor cores round f32 to 10 bits of fraction: allow it with precision='tf32' (commands: --dtype tf32)"
    if problem.out not in ON_TENSOR_CORES:
        return f"it sums in f32 and writes {', '.join(ON_TENSOR_CORES)}, not {problem.out}"
    return ""


def in_groups(problem: Problem) -> str:
    """Refuse groups of rows, and of k."""
    if problem.k_groups:
        return f"k_groups={problem.k_groups}: wgmma_grouped_k multiplies groups along k"
    return f"groups={problem.groups}: wgmma_grouped multiplies groups of rows" if problem.groups else ""


def sums_in_f32(problem: Problem) -> str:
    """Refuse results of other types than sums in f32 are rounded to."""
    written = problem.out in ("f16", "bf16", "f32")
    return "" if written else f"it sums in f32 and writes f16, bf16 and f32, not {problem.out}"


def cut_off(k: int) -> float:
    """Return f(k) for tensor cores, which align 4 products and a sum to the largest of them and truncate each.

    A truncation is worth two roundings, and there are 5 for every 4 products (Fasi, Higham, Mikaitis and Pranesh 2021).
    """
    return 2.5 * k + 2


def whole(count: int, multiple: int = 256) -> int:
    """Return a number of bytes, rounded up; in a workspace everything begins at a multiple of 256."""
    return -(-count // multiple) * multiple


def of_tiles(
    name: str, problem: Problem, side: tuple[int, int], threads: int, *parameters: object, **fields: Any
) -> Geometry:
    """Return the launch of a kernel by its own name, with a block for each tile of C of these sides.

    `parameters` are those of its instance, `fields` others of a Geometry.
    """
    kernel, grid = instance(name, problem, *parameters), tiles(problem, *side)
    return Geometry(f"{name}.cu", kernel, grid, (threads, 1, 1), tile=side, **fields)


def beside(
    source: str, name: str, blocks: int, threads: int, *parameters: object, instructions: str = "griddepcontrol"
) -> Geometry:
    """Return a launch in front of a product's, which overlaps others: the kernel `name` in a file of its own."""
    grid, block, kernel = (blocks, 1, 1), (threads, 1, 1), template(name, *parameters)
    return Geometry(f"{source}.cu", kernel, grid, block, needs=90, instructions=instructions, overlaps=True)


def gpu_rung(
    name: str,
    *,
    geometry: Callable[[str, Problem, Config], Geometry],
    dtypes: tuple[str, ...] = EVERY,
    refuses: Callable[[Problem], str] = takes_all,
    resolve: Callable[[Problem, Config], Config] = as_given,
    space: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    default: Config | None = None,
    **fields: Any,
) -> Rung:
    """Return the row of the kernel NAME in kernels/NAME.cu; `geometry` takes that name, a problem and a config.

    The config that `geometry` gets has every choice made, by `resolve`; without a `default` it makes all of them, for
    the problem. `fields` are the others of a Rung.
    """
    fields |= {"space": space, "default": dict.fromkeys(space, 0) if default is None else default, "resolve": resolve}

    def launches(problem: Problem, config: Config) -> Geometry:
        return geometry(name, problem, resolve(problem, config))

    def build(problem: Problem, config: Config) -> CudaLaunch:
        return CudaLaunch(problem, config, launches)

    source = f"cuda/kernels/{name}.cu"
    return Rung(name, dtypes=dtypes, refuses=refuses, build=build, source=source, geometry=launches, **fields)


# A row of products on tensor cores.
tensor_rung = partial(gpu_rung, dtypes=ON_TENSOR_CORES, refuses=off_tensor_cores, bound=cut_off)


# ---- which operands tensor copies read in place and write by themselves, and the launch that packs the others ----
# A tensor map describes rows of adjacent elements that begin at multiples of 16 bytes, in ascending order. wgmma reads
# elements of 8 and 32 bits only where those of k are adjacent. Every other operand is copied to rows of k first.

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
    blocks, element = min(parts, _BLOCKS * target(problem).sms), _BITS[dtypes.get(problem.dtype).size]
    pack = beside("wgmma_pack", "wgmma_pack", blocks, PACK_THREADS, element, bits)
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
