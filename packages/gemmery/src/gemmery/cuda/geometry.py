"""Launches as data: how a kernel is launched for a problem. No device is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

from gemmery import dtypes
from gemmery.cuda import constants, driver, traced_function
from gemmery.cuda.device import GRID, OLDEST, Device
from gemmery.problem import Config, Problem
from gemmery.tuples import NamedTuple

C_NAMES = {row.name: row.cpp for row in dtypes.DTYPES if row.cpp}
BAND = 8
LAYOUTS = {"row": "ROW", "col": "COL", "any": "ANY"}
LARGEST_SIDE = 2_000_000_000  # kernels index rows and columns by 32 bits, and step beyond the end by less than 2^27


class MapBox(NamedTuple):
    """The tensor map of one operand of the product with a row-major C: what one copy of it moves, and from where.

    The inner side is the one whose elements are adjacent. A packed operand lies K-major in the workspace.
    """

    operand: str  # "a", "b" or "c"
    box: tuple[int, int]  # elements along the inner and the outer side
    swizzle: int = 128  # bytes of a row in which 16-byte pieces are exchanged; 0: none
    # Bytes from the workspace's start, where an earlier launch packed the operand if no batch shares it; -1: in place.
    packed: int = -1
    pitch: int = 0  # bytes between rows of the packed operand
    promotion: int = 256  # bytes fetched into L2 at a time: 0, 64, 128, 256
    required: bool = False  # of C: the kernel cannot write it otherwise
    element: str = ""  # of the packed operand; "": the operand's own
    parts: int = 1  # of which an element of the packed operand consists, each a matrix of its own
    split: int = 0  # parts of an operand that was split before: they lie elsewhere, and its room stays empty; 0: none
    deep: int = 1  # boxes next to each other along rows, 128 bytes each, that one copy moves


class Scaling(NamedTuple):
    """What a launch must know of factors in advance. A step of 0: the same factor."""

    kind: str = ""  # as Problem.scales
    a_row: int = 0  # elements from one row, or block of k, of A to the next
    a_k: int = 0
    b_k: int = 0
    b_column: int = 0  # or from block to block of columns


@dataclass(frozen=True)
class Geometry:
    """One launch; those in `before` prepare it, in order, with the same arguments."""

    source: str  # file in kernels/: "simt_smem.cu"
    kernel: str  # the instance of its template: "simt_smem<float, float, 0, 32>"
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0  # bytes of dynamic shared memory
    workspace: int = 0  # bytes of scratch memory, for all launches together
    counters: int = 0  # bytes that are zero before the launch and after it, and no other one uses at the time
    before: tuple[Geometry, ...] = ()
    needs: int = 70  # compute capability required by its instructions
    instructions: str = ""  # those instructions, if `needs` is above the minimum
    tile: tuple[int, int] = (1, 1)  # rows and columns of C for which a block loads A and B once
    together: bool = False  # its blocks wait for each other: the driver starts all of them or none
    overlaps: bool = False  # may start before the previous launch on the stream has ended: it waits by itself
    maps: tuple[MapBox, ...] = ()  # in the order a, b, c; the kernels' argument is then a TmaProduct
    alone: bool = False  # no other compute capability has its instructions, not even a later one
    band: int = BAND  # rows of tiles in a band of the order of persistent blocks
    ahead: int = 0  # lines of each column of B that L2 is asked for while the launches before end; -1: see tma.cuh
    cluster: int = 1  # blocks of a cluster, which the kernel declares; the grid is a multiple of it
    apart: int = 1  # A and C are taken as so many matrices of a batch; the i-th has rows i, i + apart, i + 2 apart ...
    swapped: bool = False  # the product is taken as C' = B' A', with a column-major C'

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def launches(self) -> tuple[Geometry, ...]:
        """All launches, in order."""
        return (*self.before, self)


GeometryOf = Callable[[Problem, Config], Geometry]  # how a rung is launched for a problem


def epilogue(problem: Problem) -> int | str:
    """Return the EPILOGUE of epilogue.cuh, or the name of a traced function.

    >>> epilogue(Problem(1, 1, 1, "f32", "f32", epilogue="bias+relu", scaled=True))
    7
    """
    if traced_function.is_traced(problem):
        return problem.epilogue
    function: int = getattr(constants, problem.activation.upper()) if problem.activation else 0
    return int(problem.scaled) | 2 * problem.has_bias | function


def element(problem: Problem) -> str:
    """Return the C++ type of the elements of A and B; where they differ, the one that names both."""
    if problem.semiring:
        return template("InRing", C_NAMES[problem.dtype], problem.semiring.upper())
    if problem.b_dtype:
        names = C_NAMES[problem.dtype], C_NAMES[problem.b_dtype]
        return "".join(names) if problem.dtype in dtypes.FLOAT8 else template("Mixed", *names)
    return "tf32" if problem.precision == "tf32" and problem.dtype == "f32" else C_NAMES[problem.dtype]


def instance(name: str, problem: Problem, *parameters: object) -> str:
    """Return a template instance with its arguments: the types, the epilogue, then the kernel's own.

    >>> instance("simt_smem", Problem(1, 1, 1, "f16", "f32"), 32)
    'simt_smem<f16, float, 0, 32>'
    """
    return template(name, element(problem), C_NAMES[problem.out], epilogue(problem), *parameters)


def template(name: str, *parameters: object) -> str:
    """Return a C++ template with its arguments.

    >>> template("ThreadTiles", 128, 128, 8, 8, 8)
    'ThreadTiles<128, 128, 8, 8, 8>'
    """
    texts = (str(int(value)) if isinstance(value, bool) else str(value) for value in parameters)
    return f"{name}<{', '.join(texts)}>"


def sum_size(problem: Problem) -> int:
    """Return the bytes of the type in which a kernel sums: of a log_sum_exp, the largest term and a sum."""
    return dtypes.get(dtypes.get(problem.out).accumulator).size * (1 + (problem.semiring == "log_sum_exp"))


def layouts(problem: Problem) -> tuple[str, str]:
    """Return the Layout of A and of B, as templates name it."""
    return LAYOUTS[problem.a_layout], LAYOUTS[problem.b_layout]


def access(problem: Problem, widths: Sequence[int] = ()) -> str:
    """Return the Access of tiling.cuh: the layouts of A and B, and the elements of A, B and C per access."""
    return template("Access", *layouts(problem), *(widths or accesses(problem)))


def tiles(problem: Problem, bm: int, bn: int) -> tuple[int, int, int]:
    """Return the one-dimensional grid of tile.cuh: a block per bm x bn tile of each matrix."""
    return (-(-problem.m // bm) * -(-problem.n // bn) * problem.batch, 1, 1)


def vector(problem: Problem, operand: int, most: int = 16) -> int:
    """Return the elements of A (0), B (1) or C (2) per access of at most `most` bytes, by their alignment.

    One if they are not adjacent, and if a row (a column of a "col" matrix) has one element: the stride to the next may
    have any alignment.
    """
    layout = (problem.a_layout, problem.b_layout, problem.c_layout)[operand]
    if layout == "any" or contiguous(problem)[operand] == 1:
        return 1
    name = (problem.dtype, problem.b_dtype or problem.dtype, problem.out)[operand]
    size = dtypes.get(name).size
    return max(1, min(most, problem.alignments[operand]) // size)


def contiguous(problem: Problem) -> tuple[int, int, int]:
    """Return the elements of a row of A, B and C, or of a column where those are adjacent."""
    return _along(problem, problem.m, problem.n, problem.k)


def accesses(problem: Problem, bm: int = 0, bn: int = 0, bk: int = 0) -> tuple[int, int, int]:
    """Return the elements of A, B and C per access.

    They divide the contiguous side of the matrix and that of its tile, if given, so that no access crosses an edge.
    """
    sides, edges = contiguous(problem), _along(problem, bm, bn, bk)
    a, b, c = (gcd(vector(problem, operand), sides[operand], edges[operand]) for operand in range(3))
    return a, b, c


def describable(problem: Problem, operand: str) -> str:
    """Return why no tensor map can describe an operand ("a", "b" or "c") where it lies, with the value; "" if one can.

    >>> describable(Problem(8, 8, 9, "f16", "f16", alignments=(2, 16, 16)), "a")
    "A's address and strides are multiples of 2 bytes only: a tensor map needs 16"
    """
    place = "abc".index(operand)
    name, layout = operand.upper(), (problem.a_layout, problem.b_layout, problem.c_layout)[place]
    if problem.k == 0 and operand != "c":
        return ""  # no element of it is copied
    if layout == "any":
        return f"neither the rows nor the columns of {name} have adjacent elements: a tensor map needs one of them"
    if contiguous(problem)[place] == 1:
        return f"{name} has one element along the side where elements are adjacent: a tensor map needs more"
    if problem.alignments[place] % 16:
        return (
            f"{name}'s address and strides are multiples of {problem.alignments[place]} bytes only: "
            "a tensor map needs 16"
        )
    row = contiguous(problem)[place] * dtypes.get(problem.out).size
    if operand == "c" and row % 16:  # on an H200 a copy to global memory also wrote what follows the row's end
        return f"rows of C have {row} bytes: tensor copies write 16 bytes at a time"
    return ""


def whole_pieces(problem: Problem) -> bool:
    """Return True if the contiguous sides of A and B consist of 16-byte pieces at multiples of 16 bytes."""
    pieces = 16 // dtypes.get(problem.dtype).size
    return problem.k > 1 and accesses(problem)[:2] == (pieces, pieces)


def _along(problem: Problem, m: int, n: int, k: int) -> tuple[int, int, int]:
    """Of matrices m x k, k x n and m x n in the problem's layouts, the sides along which elements are adjacent."""
    return (
        m if problem.a_layout == "col" else k,
        k if problem.b_layout == "col" else n,
        m if problem.c_layout == "col" else n,
    )


def target(problem: Problem) -> Device:
    """Return the device that a problem is for, an H200 for a problem of no device."""
    return driver.find("h200" if problem.device == "cpu" else problem.device)


def refusal(geometry: Geometry, device: Device) -> str:
    """Return why the device cannot run this, with the number and the limit; "" if it can."""
    for launch in geometry.launches:
        needs = max(launch.needs, OLDEST) if device.ordinal >= 0 else launch.needs
        if needs > device.capability or (launch.alone and needs < device.capability):
            what = f" ({launch.instructions})" if launch.instructions else ""
            return f"it needs sm_{needs}{'a' * launch.alone}{what}; {device.name} is sm_{device.capability}"
        if launch.threads > device.limits.threads:
            return f"{launch.threads} threads per block: {device.name} runs at most {device.limits.threads}"
        if launch.shared > device.limits.shared:
            return f"{launch.shared} bytes of shared memory per block: {device.name} has {device.limits.shared}"
        if launch.grid[0] % launch.cluster:
            return f"{launch.grid[0]} blocks in x: a grid consists of whole clusters of {launch.cluster}"
        for axis, blocks, most in zip("xyz", launch.grid, GRID, strict=True):
            if blocks > most:
                return f"{blocks} blocks in {axis}: a grid has at most {most} there; make the product smaller"
    return ""
