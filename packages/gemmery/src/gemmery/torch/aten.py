"""PyTorch's own products on the CPU by gemmery, where measurements on this machine say that they are faster."""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch

from gemmery import api, cache, config
from gemmery.api.grouped import grouped_matmul
from gemmery.cpu import jit, threads
from gemmery.cpu.target import host
from gemmery.errors import ArgumentError, RefusedError, brief
from gemmery.torch.operators import product

_torch: Any = torch
TYPES = ("float16", "bfloat16", "int8", "int16", "int32", "int64")
# Operators of which a type has rows of its own in the table, since PyTorch's other products say nothing of their times.
APART = ("_grouped_mm float16", "_grouped_mm bfloat16", "_scaled_mm float8_e4m3fn", "_scaled_mm float8_e5m2")
_GROUPS = 4
_ENOUGH = 0.1  # seconds of a measurement after which it is not repeated
THIN = (1, 512, 512)
_SHAPES = (THIN, (32, 32, 32), (128, 128, 128), (512, 512, 512))  # m, n, k
_FASTER = 1.2  # least ratio of the times: a measurement varies
_THIN_ROWS = 8  # products with fewer rows or columns go by that of THIN
_libraries: list[Any] = []

Ratios = Mapping[str, Mapping[str, float]]  # element type -> shape -> PyTorch's time / gemmery's


def install(ratios: Ratios | None = None) -> AbstractContextManager[object]:
    """Let PyTorch's products on the CPU be gemmery's where that is faster.

    They are `mm`, `bmm`, `addmm`, `baddbmm`, `_int_mm`, `_grouped_mm` and, of float8, `_scaled_mm`.

    >>> with install({"float16": {"32x32x32": 9.0}}):
    ...     torch.ones(64, 64, dtype=torch.float16) @ torch.ones(64, 1, dtype=torch.float16)[:, 0] == 64
    ... # doctest: +SKIP

    `ratios` are PyTorch's times divided by gemmery's, by element type, for the last two by "_grouped_mm float16" and
    the like, and shape; without them they are measured now (10 s), once for this CPU, this PyTorch and these numbers of
    threads, and kept in the cache folder. Every other product is passed on to PyTorch's kernel, which takes 2 to 3 us
    longer. Gradients, torch.compile and autocast are as before, since the kernels below autograd are exchanged. As a
    context manager it ends with `uninstall`.

    Raises ArgumentError for ratios of another form, and RefusedError for a PyTorch without `torch.library.get_kernel`.
    """
    if ratios is not None:
        _check_ratios(ratios)
    if not hasattr(_torch.library, "get_kernel"):
        raise RefusedError(f"PyTorch {torch.__version__} has no torch.library.get_kernel: install 2.10 or newer")
    if not _libraries:
        table = measured() if ratios is None else ratios
        least = {name: _limits(row) for name, row in table.items()}
        library = _torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # that a kernel is overridden
            for name, ours in _OURS.items():
                library.impl(name, _replacement(name, ours, least), "CPU", with_keyset=True)
        _libraries.append(library)
    stack = ExitStack()
    stack.callback(uninstall)
    return stack


def _check_ratios(ratios: Any) -> None:
    """Raise ArgumentError unless these are numbers by element type and shape."""
    known, form = (*TYPES, *APART), re.compile(r"\d+x\d+x\d+")
    for name, row in ratios.items() if isinstance(ratios, Mapping) else ((ratios, None),):
        numbers = row.items() if isinstance(row, Mapping) else (("", row),)
        if name not in known or not all(form.fullmatch(str(x)) and isinstance(y, int | float) for x, y in numbers):
            raise ArgumentError(
                f"ratios={brief(ratios)}: pass a dict of {', '.join(known)}, each with a dict of shapes, such as "
                "{'float16': {'32x32x32': 2.0}}, or leave it out to measure them"
            )


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
        table = {
            name: {"x".join(map(str, shape)): _ratio(name, *shape) for shape in _SHAPES} for name in (*TYPES, *APART)
        }
        stored = json.dumps(table).encode()
        cache.write(folder, key, stored)
    ratios: Ratios = json.loads(stored)
    return ratios


def _ratio(name: str, m: int, n: int, k: int) -> float:
    operator, _, type_ = name.rpartition(" ")
    a, b = (torch.ones(shape).to(getattr(torch, type_)) for shape in ((m, k), (k, n)))
    operands: tuple[Any, ...] = (a, b)
    if operator == "_scaled_mm":
        operands = (a, b.t().contiguous().t(), torch.ones(()), torch.ones(()), None, None, torch.bfloat16)
    elif operator:  # each group has as many rows as the shape says
        ends = torch.arange(1, _GROUPS + 1, dtype=torch.int32) * m
        operands = a.repeat(_GROUPS, 1), b.expand(_GROUPS, k, n).contiguous(), ends
    functions = (getattr(torch, operator or "mm"), _OURS[operator or "mm"])
    best, end = [float("inf")] * 2, 0.0
    for _ in range(4):
        if end and time.perf_counter() > end:
            break
        end = end or time.perf_counter() + _ENOUGH
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function(*operands)
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
    return gemm(alpha, a, b, beta, c.expand(*a.shape[:-1], b.shape[-1]).contiguous()) if beta else gemm(alpha, a, b)


def _int_mm(a: Any, b: Any) -> Any:
    multiply: Any = api.matmul
    return multiply(a, b, dtype=torch.int32)


def _scaled_mm(
    a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None, scale_result: Any = None, out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Any:  # fmt: skip
    multiply: Any = api.matmul
    total = multiply(a.half(), b.half(), dtype=torch.float32).mul_(scale_a).mul_(scale_b)  # float16 has all of float8
    return (total if bias is None else total.add_(bias)).to(out_dtype)


def _grouped_mm(a: Any, b: Any, offs: Any, bias: Any = None, out_dtype: Any = None) -> Any:
    return grouped_matmul(a, b, offsets=offs)


_OURS: dict[str, Callable[..., Any]] = {
    "mm": product, "bmm": product, "addmm": _addmm, "baddbmm": _addmm, "_int_mm": _int_mm, "_scaled_mm": _scaled_mm,
    "_grouped_mm": _grouped_mm,
}  # fmt: skip


def _fits(name: str, *arguments: Any, **options: Any) -> bool:
    """Return False for arguments that PyTorch refuses, in its own words, or whose types or factors only it takes."""
    *c, a, b = arguments
    batched = name in ("bmm", "baddbmm")
    if not a.ndim == b.ndim == 2 + batched or a.shape[:-2] != b.shape[:-2]:
        return False
    whole = a.dtype.is_floating_point or all(isinstance(x, int) for x in options.values())
    shape = (*a.shape[:-1], b.shape[-1])
    adds = all(
        x.dtype is a.dtype
        and x.ndim <= len(shape)
        and all(own in (1, n) for own, n in zip(x.shape[::-1], shape[::-1], strict=False))
        for x in c
    )
    return whole and adds and (name != "_int_mm" or a.dtype is torch.int8)


def _plain_scales(
    a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None, scale_result: Any = None, out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> bool:  # fmt: skip
    """Return True for float8 with a scale for each operand, or for rows of A and columns of B."""
    sides = ((1, 1), (a.shape[0], b.shape[1]))
    scales = any((scale_a.numel(), scale_b.numel()) == side for side in sides)
    rows = scale_a.numel() == 1 or scale_a.shape == (a.shape[0], 1)
    plain = scale_result is None and out_dtype in (torch.bfloat16, torch.float16, torch.float32)
    return plain and scales and rows and scale_a.dtype is scale_b.dtype is torch.float32


def _plain_groups(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> bool:
    """Return True for groups of rows or along k whose result PyTorch stores without gaps."""
    whole = b.shape[-1] * a.itemsize % 16 == 0 and out_dtype in (None, a.dtype)
    return offs is not None and bias is None and a.ndim == 2 and whole


_TAKES: dict[str, Callable[..., bool]] = {"_scaled_mm": _plain_scales, "_grouped_mm": _plain_groups}


def _replacement(name: str, ours: Callable[..., Any], least: Mapping[str, tuple[bool, int]]) -> Callable[..., Any]:
    """Return a kernel of an operator: gemmery's for products within the limits, else PyTorch's."""
    own, takes = _torch.library.get_kernel(f"aten::{name}", "CPU"), _TAKES.get(name) or partial(_fits, name)
    place = name in ("addmm", "baddbmm")  # of A: C is before it
    prefix = f"{name} " if name in _TAKES else ""
    rows = ((key.removeprefix(prefix), limits) for key, limits in least.items() if key.startswith(prefix))
    limits_of = {getattr(torch, key, None): limits for key, limits in rows}

    def kernel(keys: Any, *arguments: Any, **options: Any) -> Any:
        a, b = arguments[place : place + 2]
        limits = limits_of.get(a.dtype)
        if limits and a.dtype is b.dtype and a.shape[-1] == b.shape[-2] and takes(*arguments, **options):
            (m, k), n = a.shape[-2:], b.shape[-1]
            if name == "_grouped_mm":
                groups = max(len(arguments[2]), 1)
                m, k = (m, k // groups) if b.ndim == 2 else (m // groups, k)
            thin, from_ = limits
            if thin if min(m, n) < _THIN_ROWS else from_ and m * n * k >= from_:
                tensors = (x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in arguments)
                return ours(*tensors, **options)
        return own.call_boxed(keys, *arguments, **options)

    return kernel
