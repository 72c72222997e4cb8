"""What the rows of CUDA rungs share: what follows from a rung's name, its usual types, refusals and bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from gemmery.cuda.geometry import Geometry, instance, tiles
from gemmery.cuda.launch import CudaLaunch
from gemmery.ladder.rung import Rung, as_given
from gemmery.problem import Config, Problem

EVERY = ("f32", "f64", "f16", "bf16")
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
    """Refuse groups of rows."""
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
