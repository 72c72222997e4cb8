"""Kernels of PTX texts, ready for any launch, and why a driver would refuse one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from gemmery.cpu import fused
from gemmery.cuda import nvrtc
from gemmery.cuda.device import GRID, LIMITS, STATIC_SHARED
from gemmery_emulator import exact
from gemmery_emulator.kernels.native.engine import engine
from gemmery_emulator.lower import LoweredKernel, lowered
from gemmery_emulator.machine import Dims, LaunchConfig
from gemmery_emulator.ptx import PtxKernel, PtxModule
from gemmery_emulator.ptx.module import parse

Arithmetic = Callable[..., Any]
BLOCK = (1024, 1024, 64)  # largest sides of a block in threads, on every device
CLUSTER = 16  # blocks; kernels must opt in to more than 8


@lru_cache(maxsize=64)
def parsed(text: str, wrappers: frozenset[str]) -> PtxModule:
    """Return the kernels of a PTX text; each text is read once."""
    return parse(text, wrappers)


@lru_cache(maxsize=64)
def prepared(text: str, kernel: str, wrappers: frozenset[str] = nvrtc.WRAPPERS) -> LoweredKernel:
    """Return a kernel of a PTX text, ready for any launch; `wrappers` are those of `parse`, by default the rungs'."""
    program = lowered(parsed(text, wrappers).kernels[kernel], faster())
    return replace(program, engine=engine, sibling=lambda name: prepared(text, name, wrappers))


def prepared_anew(text: str, kernel: str) -> LoweredKernel:
    """Read and lower a kernel of a rung's PTX text without the cache."""
    return replace(lowered(parse(text, nvrtc.WRAPPERS).kernels[kernel], faster()), engine=engine)


def faster() -> Mapping[Arithmetic, Arithmetic]:
    """Return compiled functions for those of `emulator.exact`, if the CPU has the instruction."""
    pairs: tuple[tuple[Arithmetic, Arithmetic | None], ...] = (
        (exact.fma, fused.fma()),
        (exact.chain, fused.chain()),
        (exact.added, fused.added()),
    )
    return {slow: fast for slow, fast in pairs if fast is not None}


def refusal(kernel: PtxKernel, launch: LaunchConfig, capability: int) -> str:
    """Return why a driver would refuse a launch; "" if it would not."""
    return (
        _refused_threads(kernel, launch)
        or _refused_memory(kernel, launch, capability)
        or _refused_cluster(kernel, launch, capability)
    )


def _refused_threads(kernel: PtxKernel, launch: LaunchConfig) -> str:
    for name, sides, most in (("grid", launch.grid, GRID), ("block", launch.block, BLOCK)):
        if any(side > limit for side, limit in zip(sides, most, strict=True)):
            return f"{name}={sides}: it exceeds {most}; use a grid-stride loop or another shape"
    threads = launch.block_threads
    if threads > BLOCK[0]:
        return f"block={launch.block}: {threads} threads, but a block has at most {BLOCK[0]}"
    least = three(kernel.limits.get("maxntid", launch.block))
    if threads > least[0] * least[1] * least[2]:
        return (
            f"block={launch.block}: {threads} threads, but the kernel was compiled for at most "
            f"{least[0] * least[1] * least[2]}: launch fewer, or raise its __launch_bounds__"
        )
    needed = three(kernel.limits.get("reqntid", launch.block))
    return "" if needed == launch.block else f"block={launch.block}: the kernel was compiled for blocks of {needed}"


def _refused_memory(kernel: PtxKernel, launch: LaunchConfig, capability: int) -> str:
    limits = LIMITS[max(row for row in LIMITS if row <= capability)]
    if kernel.shared > STATIC_SHARED:
        return (
            f"it declares {kernel.shared} bytes of shared memory, but at most {STATIC_SHARED} can be static: "
            "declare it `extern __shared__` and pass shared="
        )
    if kernel.shared + launch.shared > limits.shared:
        return (
            f"shared={launch.shared} and {kernel.shared} declared bytes: a block has at most {limits.shared} on "
            f"sm_{capability}; use less, or pass the arch= of a device with more"
        )
    return ""


def _refused_cluster(kernel: PtxKernel, launch: LaunchConfig, capability: int) -> str:
    sides, needed = launch.cluster, kernel.limits.get("reqnctapercluster")
    if needed and three(needed) != sides:
        return f"cluster={sides}: the kernel was compiled for clusters of {three(needed)}"
    blocks = launch.together
    if blocks == 1:
        return ""
    if capability < 90:
        return f"cluster={sides}: sm_{capability} has no clusters; pass arch='sm_90' or a newer one"
    if blocks > CLUSTER:
        return f"cluster={sides}: {blocks} blocks, but a cluster has at most {CLUSTER}"
    if any(whole % side for whole, side in zip(launch.grid, sides, strict=True)):
        return f"cluster={sides}: each side of grid={launch.grid} must be a multiple of the cluster's side"
    return ""


def three(numbers: tuple[int, ...]) -> Dims:
    """Return up to three numbers as three sides."""
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


NAMED = 24  # kernels that a message lists


def listed(names: Sequence[str]) -> str:
    """The first of some names."""
    return ", ".join(names[:NAMED]) + (" ..." if len(names) > NAMED else "")
