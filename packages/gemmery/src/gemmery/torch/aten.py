"""PyTorch's own products on the CPU by gemmery, where measurements on this machine say that they are faster."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from gemmery import api, cache, config
from gemmery.cpu import jit, threads
from gemmery.cpu.target import host
from gemmery.errors import RefusedError
from gemmery.torch.operators import product

_torch: Any = torch
TYPES = ("float16", "bfloat16", "int8", "int16", "int32", "int64")
THIN = (1, 512, 512)
_SHAPES = (THIN, (32, 32, 32), (128, 128, 128), (512, 512, 512))  # m, n, k
_FASTER = 1.2  # least ratio of the times: a measurement varies
_THIN_ROWS = 8  # products with fewer rows or columns go by that of THIN
_libraries: list[Any] = []

Ratios = Mapping[str, Mapping[str, float]]  # element type -> shape -> PyTorch's time / gemmery's


def install(ratios: Ratios | None = None) -> AbstractContextManager[object]:
    """Let PyTorch's `mm`, `bmm`, `addmm` and `_int_mm` on the CPU be gemmery's where that is faster.

    >>> with install({"float16": {"32x32x32": 9.0}}):
    ...     torch.ones(64, 64, dtype=torch.float16) @ torch.ones(64, 1, dtype=torch.float16)[:, 0] == 64
    ... # doctest: +SKIP

    `ratios` are PyTorch's times divided by gemmery's, by element type and shape; without them they are measured now (2
    s), once for this CPU, this PyTorch and these numbers of threads, and kept in the cache folder. Every other product
    is passed on to PyTorch's kernel, which takes 2 to 3 us longer. Gradients, torch.compile and autocast are as before,
    since the kernels below autograd are exchanged. As a context manager it ends with `uninstall`.

    Raises RefusedError for a PyTorch without `torch.library.get_kernel`.
    """
    if not hasattr(_torch.library, "get_kernel"):
        raise RefusedError(f"PyTorch {torch.__version__} has no torch.library.get_kernel: install 2.10 or newer")
    if not _libraries:
        table = measured() if ratios is None else ratios
        least = {getattr(torch, name): _limits(row) for name, row in table.items()}
        library = _torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # that a kernel is overridden
            for name, ours in _OURS.items():
                library.impl(name, _replacement(name, ours, least), "CPU", with_keyset=True)
        _libraries.append(library)
    stack = ExitStack()
    stack.callback(uninstall)
    return stack


def uninstall() -> None:
    """Give PyTorch its own kernels back; without an `install` it does nothing."""
    while _libraries:
        _libraries.pop()._destroy()


def measured() -> Ratios:
    """Return PyTorch's times divided by gemmery's on this machine, measured unless the cache folder has them."""
    place = f"{torch.__version__} {host().cpu} {torch.get_num_threads()} {threads.get()}"
    key, folder = cache.key("torch", jit.version(), place.encode()), config.cache_dir()
    stored = cache.read(folder, key)
    if stored is None:
        table = {name: {"x".join(map(str, shape)): _ratio(name, *shape) for shape in _SHAPES} for name in TYPES}
        stored = json.dumps(table).encode()
        cache.write(folder, key, stored)
    ratios: Ratios = json.loads(stored)
    return ratios


def _ratio(name: str, m: int, n: int, k: int) -> float:
    a, b = torch.ones((m, k), dtype=getattr(torch, name)), torch.ones((k, n), dtype=getattr(torch, name))
    functions: tuple[Callable[..., Any], ...] = (torch.mm, product)
    best = [float("inf")] * 2
    for _ in range(4):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function(a, b)
            best[i] = min(best[i], time.perf_counter() - start)
    return best[0] / best[1]


def _limits(row: Mapping[str, float]) -> tuple[bool, int]:
    """Return whether thin products are faster, and the multiply-adds from which all the others are (0: none)."""
    thin, least = "x".join(map(str, THIN)), 0
    for shape, ratio in reversed([*row.items()]):
        m, n, k = map(int, shape.split("x"))
        if shape == thin:
            continue
        if ratio < _FASTER:
            break
        least = m * n * k
    return row.get(thin, 0) >= _FASTER, least


def _addmm(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    gemm: Any = api.gemm
    return gemm(alpha, a, b, beta, c.expand(a.shape[0], b.shape[1]).contiguous()) if beta else gemm(alpha, a, b)


def _int_mm(a: Any, b: Any) -> Any:
    multiply: Any = api.matmul
    return multiply(a, b, dtype=torch.int32)


_OURS: dict[str, Callable[..., Any]] = {"mm": product, "bmm": product, "addmm": _addmm, "_int_mm": _int_mm}


def _fits(name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return False for arguments that PyTorch refuses, in its own words, or whose factors only it takes."""
    *c, a, b = arguments
    batched = name == "bmm"
    if not a.ndim == b.ndim == 2 + batched or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        return False
    whole = a.dtype.is_floating_point or all(isinstance(x, int) for x in options.values())
    shape = (a.shape[0], b.shape[1])
    adds = all(
        x.ndim <= 2 and all(own in (1, n) for own, n in zip(x.shape[::-1], shape[::-1], strict=False)) for x in c
    )
    return whole and adds and (name != "_int_mm" or a.dtype is torch.int8)


def _replacement(name: str, ours: Callable[..., Any], least: Mapping[Any, tuple[bool, int]]) -> Callable[..., Any]:
    """Return a kernel of an operator: gemmery's for products within the limits, else PyTorch's."""
    own = _torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: Any, *arguments: Any, **options: Any) -> Any:
        a, b = arguments[-2:]
        limits = least.get(a.dtype)
        if limits and all(x.dtype is a.dtype for x in arguments) and _fits(name, arguments, options):
            m, n = a.shape[-2], b.shape[-1]
            thin, from_ = limits
            if thin if min(m, n) < _THIN_ROWS else from_ and m * n * a.shape[-1] >= from_:
                return ours(*(x.detach() if x.requires_grad else x for x in arguments), **options)
        return own.call_boxed(keys, *arguments, **options)

    return kernel
