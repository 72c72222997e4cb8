"""Products of groups by cublasLt itself, for which PyTorch 2.11 has no call; grouped_ways.py times them.

Sizes and addresses lie on the device. All that describes them is there before the clock starts: only the library's own
launches are timed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import byref, c_int32, c_int64, c_size_t, c_void_p
from typing import Any

import numpy as np

from gemmery import dtypes
from gemmery.cuda import driver
from gemmery.cuda.driver import Memory
from gemmery.errors import RefusedError
from gemmery.limits.device_limits import Put
from gemmery_lab.measure import work as works
from gemmery_lab.measure.torch_operands import Resident

LIBRARY = "libcublasLt.so.13"  # the one that PyTorch has loaded
FLOAT32, SUMS_IN_FLOAT32 = 0, 68  # types in the library's C interface
ELEMENTS = {"f16": 2, "bf16": 14}
WORKSPACE = 32 << 20  # bytes, as PyTorch gives cublasLt on Hopper

# The names of settings in the C interface: of a product, and of a choice of kernels, which asks for mean sizes.
SCALARS, TRANSPOSED_A, ALPHA_STEP, BETA_STEP = 2, 3, 39, 40
LARGEST_WORKSPACE, MEAN_K, MEAN_ROWS, MEAN_COLUMNS = 1, 13, 14, 15
ON_DEVICE = 1


class _Choice(ctypes.Structure):
    """A kernel that the library proposes."""

    _fields_ = (
        ("kernel", ctypes.c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int32),
        ("waves", ctypes.c_float),
        ("reserved", c_int32 * 4),
    )


def grouped(resident: Resident) -> Put:
    """Return what launches the products of all groups of a set of operands.

    Raises RefusedError if the library that is loaded has none for them, as on Hopper before version 13.4.
    """
    work, ordinal, stream = resident.work, resident.stream.ordinal, c_void_p(resident.stream.handle)
    if work.dtype not in ELEMENTS or work.out != work.dtype:
        raise RefusedError("cublasLt's products of groups are timed with bf16 and f16 alone")
    library, first, size = _library(), resident.sets[0], dtypes.get(work.dtype).size
    rows = np.diff(works.offsets(work), prepend=0)
    starts = np.cumsum(rows) - rows
    memory = list[Memory]()  # of the arrays below, of which the library knows the addresses alone

    def on_device(numbers: Any, kind: type = np.int32) -> c_void_p:
        array: np.ndarray[Any, Any] = np.ascontiguousarray(np.broadcast_to(numbers, work.groups), dtype=kind)
        memory.append(Memory(array.nbytes, ordinal))
        memory[-1].write(array)
        return c_void_p(memory[-1].pointer)

    def addresses(start: int, steps: Any) -> c_void_p:
        return on_device(start + np.asarray(steps, np.int64), np.int64)

    # The library's matrices lie by columns, so it multiplies C' = B' A': n rows, and a column for each row of A.
    m, n, k = on_device(rows), on_device(work.n), on_device(work.k)
    b_transposed = first.b.strides[1] == size  # as in weights of (n, k)
    b_shape = (k, n) if b_transposed else (n, k)
    a_step, b_step, c_step = first.a.strides[1], first.b.strides[2 if b_transposed else 1], first.c.strides[1]
    layouts = [
        _create(library.cublasLtGroupedMatrixLayoutCreate, ELEMENTS[work.dtype], work.groups, *shape, on_device(step))
        for shape, step in ((b_shape, b_step // size), ((k, m), a_step // size), ((n, m), c_step // size))
    ]
    product = _create(library.cublasLtMatmulDescCreate, SUMS_IN_FLOAT32, FLOAT32)
    modes = {SCALARS: c_int32(ON_DEVICE), TRANSPOSED_A: c_int32(b_transposed)}
    strides = {ALPHA_STEP: c_int64(1), BETA_STEP: c_int64(1)}
    _set(library.cublasLtMatmulDescSetAttribute, product, {**modes, **strides})
    preference = _create(library.cublasLtMatmulPreferenceCreate)
    means = {MEAN_K: work.k, MEAN_ROWS: work.n, MEAN_COLUMNS: max(1, work.m // work.groups)}
    wishes = {name: c_int64(number) for name, number in {LARGEST_WORKSPACE: WORKSPACE, **means}.items()}
    _set(library.cublasLtMatmulPreferenceSetAttribute, preference, wishes)
    b_layout, a_layout, c_layout = layouts
    choice, count = _Choice(), c_int32()
    with driver.on(ordinal):
        handle = _create(library.cublasLtCreate)
        proposed = preference, 1, byref(choice), byref(count)
        _check(
            library.cublasLtMatmulAlgoGetHeuristic(handle, product, b_layout, a_layout, c_layout, c_layout, *proposed)
        )
    factors = Memory(8, ordinal)
    factors.write(np.array([1, 0], np.float32))
    alpha, beta = addresses(factors.pointer, 0), addresses(factors.pointer + 4, 0)
    b_starts = np.arange(work.groups) * first.b.strides[0]
    sets = [
        (
            addresses(each.b.pointer, b_starts),
            addresses(each.a.pointer, starts * a_step),
            addresses(each.c.pointer, starts * c_step),
        )
        for each in resident.sets
    ]
    memory += [factors, Memory(WORKSPACE, ordinal)]

    def put(index: int) -> None:  # keeps the arrays and the operands
        b, a, c = sets[index]
        operands = alpha, b, b_layout, a, a_layout, beta, c, c_layout, c, c_layout
        workspace = c_void_p(memory[-1].pointer), c_size_t(WORKSPACE)
        with driver.on(resident.stream.ordinal):
            _check(library.cublasLtMatmul(handle, product, *operands, byref(choice), *workspace, stream))

    return put


def _library() -> Any:
    """Return the library, if it knows groups."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise RefusedError(f"cublasLt: {error}") from None
    if not hasattr(library, "cublasLtGroupedMatrixLayoutCreate"):
        raise RefusedError("this cublasLt has no products of groups: they came with 13.2, on Hopper with 13.4")
    return library


def _create(function: Callable[..., int], *arguments: object) -> c_void_p:
    """Return an object of the library, which lives as long as the process."""
    created = c_void_p()
    _check(function(byref(created), *arguments))
    return created


def _set(function: Callable[..., int], owner: c_void_p, values: Mapping[int, c_int32 | c_int64]) -> None:
    for name, value in values.items():
        _check(function(owner, name, byref(value), c_size_t(ctypes.sizeof(value))))


def _check(status: int) -> None:
    if status:
        raise RefusedError(f"cublasLt has no product of these groups: status {status}")
