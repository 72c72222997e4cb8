"""Launches as data: how a kernel is launched for a problem. No device is needed."""

from __future__ import annotations

from dataclasses import dataclass

from gemmery.cuda.device import GRID, Device
from gemmery.problem import Problem

C_NAMES = {"f64": "double", "f32": "float", "f16": "f16", "bf16": "bf16"}
ACTIVATIONS = {"": 0, "relu": 4, "gelu": 8, "silu": 12}
LAYOUTS = {"row": "ROW", "col": "COL", "any": "ANY"}
LARGEST_SIDE = 2_000_000_000  # kernels index rows and columns by 32 bits, and step beyond the end by less than 2^27


@dataclass(frozen=True)
class Geometry:
    """One launch; those in `before` prepare it, in order, with the same arguments."""

    source: str  # file in kernels/: "simt_smem.cu"
    kernel: str  # the instance of its template: "simt_smem<float, float, 0, 32>"
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0  # bytes of dynamic shared memory
    workspace: int = 0  # bytes of scratch memory, for all launches together
    before: tuple[Geometry, ...] = ()
    needs: int = 75  # compute capability required by its instructions
    instructions: str = ""  # those instructions, if `needs` is above the minimum
    tile: tuple[int, int] = (1, 1)  # rows and columns of C for which a block loads A and B once
    overlaps: bool = False  # may start before the previous launch on the stream has ended: it waits by itself

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.block[0] * self.block[1] * self.block[2]


def epilogue(problem: Problem) -> int:
    """Return the EPILOGUE of epilogue.cuh.

    >>> epilogue(Problem(1, 1, 1, "f32", "f32", epilogue="bias+relu", scaled=True))
    7
    """
    parts = problem.epilogue.split("+") if problem.epilogue else []
    activation = next((part for part in parts if part != "bias"), "")
    return int(problem.scaled) | 2 * ("bias" in parts) | ACTIVATIONS[activation]


def element(problem: Problem) -> str:
    """Return the C++ type of the elements of A and B."""
    return problem.precision or C_NAMES[problem.dtype]


def instance(name: str, problem: Problem, *parameters: object) -> str:
    """Return a template instance with its arguments: the types, the epilogue, then the kernel's own.

    >>> instance("simt_smem", Problem(1, 1, 1, "f16", "f32"), 32)
    'simt_smem<f16, float, 0, 32>'
    """
    given = (element(problem), C_NAMES[problem.out], epilogue(problem), *parameters)
    return f"{name}<{', '.join(str(int(x)) if isinstance(x, bool) else str(x) for x in given)}>"


def tiles(problem: Problem, bm: int, bn: int) -> tuple[int, int, int]:
    """Return the one-dimensional grid of tile.cuh: a block per bm x bn tile of each matrix."""
    return (-(-problem.m // bm) * -(-problem.n // bn) * problem.batch, 1, 1)


def vector(problem: Problem, operand: int, most: int = 16) -> int:
    """Return the elements of A (0), B (1) or C (2) per access of at most `most` bytes, by their alignment.

    One if a row (a column of a "col" matrix) has one element: the stride to the next may have any alignment.
    """
    size = 8 if (name := (problem.out if operand == 2 else problem.dtype)) == "f64" else 4 if name == "f32" else 2
    rows, columns = ((problem.m, problem.k), (problem.k, problem.n), (problem.m, problem.n))[operand]
    layout = (problem.a_layout, problem.b_layout, problem.c_layout)[operand]
    if (rows if layout == "col" else columns) == 1:
        return 1
    return max(1, min(most, problem.alignments[operand]) // size)


def refusal(geometry: Geometry, device: Device) -> str:
    """Return why the device cannot run this, with the number and the limit; "" if it can."""
    for one in (*geometry.before, geometry):
        if one.needs > device.capability:
            what = f" ({one.instructions})" if one.instructions else ""
            return f"it needs sm_{one.needs}{what}; {device.name} is sm_{device.capability}"
        if one.threads > device.limits.threads:
            return f"{one.threads} threads per block: {device.name} runs at most {device.limits.threads}"
        if one.shared > device.limits.shared:
            return f"{one.shared} bytes of shared memory per block: {device.name} has {device.limits.shared}"
        for axis, blocks, most in zip("xyz", one.grid, GRID, strict=True):
            if blocks > most:
                return f"{blocks} blocks in {axis}: a grid has at most {most} there; make the product smaller"
    return ""
