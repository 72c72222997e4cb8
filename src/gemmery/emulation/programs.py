"""Kernels of PTX texts, ready for any launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from gemmery.cpu import fused
from gemmery.cuda import nvrtc
from gemmery.emulator import exact
from gemmery.emulator.lower import LoweredKernel, lowered
from gemmery.emulator.ptx import PtxModule
from gemmery.emulator.ptx.module import parse

Arithmetic = Callable[..., Any]


@lru_cache(maxsize=64)
def parsed(text: str, wrappers: frozenset[str]) -> PtxModule:
    """Return the kernels of a PTX text; each text is read once."""
    return parse(text, wrappers)


@lru_cache(maxsize=64)
def prepared(text: str, kernel: str, wrappers: frozenset[str] = nvrtc.WRAPPERS) -> LoweredKernel:
    """Return a kernel of a PTX text, ready for any launch; `wrappers` are those of `parse`, by default the rungs'."""
    return lowered(parsed(text, wrappers).kernels[kernel], faster())


def prepared_anew(text: str, kernel: str) -> LoweredKernel:
    """Read and lower a kernel of a rung's PTX text without the cache."""
    return lowered(parse(text, nvrtc.WRAPPERS).kernels[kernel], faster())


def faster() -> Mapping[Arithmetic, Arithmetic]:
    """Return compiled functions for those of `emulator.exact`, if the CPU has the instruction."""
    pairs: tuple[tuple[Arithmetic, Arithmetic | None], ...] = (
        (exact.fma, fused.fma()),
        (exact.chain, fused.chain()),
        (exact.added, fused.added()),
    )
    return {slow: fast for slow, fast in pairs if fast is not None}
