"""What the rows of CUDA rungs share: what follows from a rung's name, its usual types, refusals and bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from gemmery.cuda.geometry import Geometry
from gemmery.cuda.launch import CudaLaunch
from gemmery.ladder.rung import Growth, Rung, as_given
from gemmery.problem import Config, Problem

EVERY = ("f32", "f64", "f16", "bf16")
ON_TENSOR_CORES = ("f16", "bf16", "f32")  # the types that they multiply and sum in f32
_NOTHING: Mapping[str, tuple[int, ...]] = MappingProxyType({})


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


def cut_off(k: int) -> float:
    """Return f(k) for tensor cores, which align 4 products and a sum to the largest of them and truncate each.

    A truncation is worth two roundings, and there are 5 for every 4 products (Fasi, Higham, Mikaitis and Pranesh 2021).
    """
    return 2.5 * k + 2


def gpu_rung(
    name: str,
    *,
    idea: str,
    parent: str | None,
    lesson: str,
    geometry: Callable[[str, Problem, Config], Geometry],
    expect: Mapping[str, float],
    dtypes: tuple[str, ...] = EVERY,
    refuses: Callable[[Problem], str] = takes_all,
    bound: Growth = float,
    space: Mapping[str, tuple[int, ...]] = _NOTHING,
    default: Config = MappingProxyType({}),
    resolve: Callable[[Problem, Config], Config] = as_given,
    bounds: Mapping[str, Growth] = MappingProxyType({}),
    one_sided: bool = False,
) -> Rung:
    """Return the row of the kernel NAME in kernels/NAME.cu; `geometry` takes that name, a problem and a config."""
    launches = partial(geometry, name)

    def build(problem: Problem, config: Config) -> CudaLaunch:
        return CudaLaunch(problem, config, launches)

    return Rung(
        name=name,
        idea=idea,
        parent=parent,
        dtypes=dtypes,
        refuses=refuses,
        build=build,
        bound=bound,
        space=space,
        default=default,
        expect=expect,
        lesson=lesson,
        source=f"cuda/kernels/{name}.cu",
        geometry=launches,
        resolve=resolve,
        bounds=bounds,
        one_sided=one_sided,
    )
