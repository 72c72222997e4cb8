"""The CPU's fused multiply-add as a NumPy ufunc, which NumPy does not have, and chains of it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import cast

import numpy as np

from gemmery.cpu import jit, target, workspace
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES, vector
from gemmery.cpu.target import Target
from gemmery.dtypes import Array

_UNROLL = 2  # vectors per iteration of the loop
_TYPES = {"float": "f", "double": "d"}  # LLVM's type, and NumPy's character for it


@functools.cache
def fma() -> np.ufunc | None:
    """Return a ufunc of x * y + z, rounded once, for float32 and float64; None where the CPU has no such instruction.

    >>> fused = fma()
    >>> float(fused(1 + 2.0**-52, 1 - 2.0**-52, -1.0)) == -(2.0**-104) if fused else True
    True
    """
    host = target.host()
    if not host.has_fma:
        return None
    loops = jit.load(host, "fused multiply-add loops", lambda: _module(host))
    return _ufunc([loops[f"fma_{element}"] for element in _TYPES], "".join(4 * kind for kind in _TYPES.values()))


@functools.cache
def chain() -> Callable[..., tuple[Array, Array]] | None:
    """Return a function that computes 8 x 4 by 4 x 8 products as the emulator's `exact.chain` does, 20 times as fast.

    None where the CPU has no fused multiply-add.

    >>> ones, zeros = np.ones((1, 32)), np.zeros((1, 32))
    >>> chained = chain()
    >>> chained is None or [float(side[0, 0]) for side in chained(ones, ones, zeros, zeros)] == [4.0, 4.0]
    True
    """
    host = target.host()
    if not host.has_fma:
        return None
    address = jit.load(host, "chains of fused multiply-adds", lambda: _chains(host))["chain"]
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 6, ctypes.c_int64)(address)

    def chained(a: Array, b: Array, c0: Array, c1: Array) -> tuple[Array, Array]:
        # The words of B of one k, every other line, in a row: a vector for each side of the sums.
        lines = np.ascontiguousarray(b.reshape(-1, 4, 2, 4).transpose(0, 3, 2, 1), np.float64)
        inputs = [np.ascontiguousarray(x, np.float64) for x in (a, c0, c1)]
        d0, d1 = np.empty(inputs[0].shape), np.empty(inputs[0].shape)
        run(*(x.ctypes.data for x in (inputs[0], lines, *inputs[1:], d0, d1)), len(lines))
        return d0, d1

    return chained


def _chains(target: Target) -> Module:
    """Compute, for each warp, 8 rows of a vector for the even columns and one for the odd ones, over 4 steps of k."""
    module = Module(target)
    names = ("a", "b", "c0", "c1", "d0", "d1")
    row, warp = 4 * SIZES["double"], 32 * SIZES["double"]
    four = vector(4, "double")
    with (
        module.function("chain", *(("ptr", name) for name in names), ("i64", "warps")) as f,
        f.loop(0, f["warps"]) as i,
    ):
        a, b, *sides = (f[name] + i * warp for name in names)
        lines = [[f.load(four, b + (2 * k + side) * row) for side in range(2)] for k in range(4)]
        for r in range(8):
            words = [f.broadcast(f.load("double", a + r * row + 8 * k), 4) for k in range(4)]
            for side in range(2):
                total = f.load(four, sides[side] + r * row)
                for k in range(4):
                    total = f.fma(words[k], lines[k][side], total)
                f.store(total, sides[2 + side] + r * row)
    return module


def _ufunc(loops: list[int], types: str) -> np.ufunc:
    """Make a ufunc of three inputs and one output with NumPy's C interface (PyUFunc_FromFuncAndData)."""
    capsule = np._core._multiarray_umath._UFUNC_API  # type: ignore[attr-defined]
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    make = ctypes.cast(pointer(capsule, None), ctypes.POINTER(ctypes.c_void_p))[1]
    text, number = ctypes.c_char_p, ctypes.c_int
    prototype = ctypes.PYFUNCTYPE(
        ctypes.py_object, *[ctypes.c_void_p] * 3, number, number, number, number, text, text, number
    )
    functions = (ctypes.c_void_p * len(loops))(*loops)
    data = (ctypes.c_void_p * len(loops))()
    kinds = (ctypes.c_char * len(types)).from_buffer_copy(bytes(np.dtype(kind).num for kind in types))
    # NumPy keeps pointers to these, not copies.
    for buffer in (functions, data, kinds):
        workspace.forever(buffer)
    no_identity = -1
    name, doc = b"fma", b"x * y + z rounded once"
    return cast(
        np.ufunc,
        prototype(cast(int, make))(
            ctypes.addressof(functions),
            ctypes.addressof(data),
            ctypes.addressof(kinds),
            len(loops),
            3,
            1,
            no_identity,
            name,
            doc,
            0,
        ),
    )


def _module(target: Target) -> Module:
    module = Module(target)
    for element in _TYPES:
        pointers = tuple(("ptr", name) for name in ("args", "dimensions", "steps", "data"))
        with module.function(f"fma_{element}", *pointers) as f:
            _loop(f, element, target.lanes(SIZES[element]))
    return module


def _loop(f: Function, element: str, lanes: int) -> None:
    """Define a PyUFuncGenericFunction: vectorized if the output is contiguous and each input contiguous or a scalar."""
    size, type_ = SIZES[element], vector(lanes, element)
    bases = [f.load("ptr", f["args"] + 8 * i) for i in range(4)]
    steps = [f.load("i64", f["steps"] + 8 * i) for i in range(4)]
    count = f.load("i64", f["dimensions"])
    fast = steps[3].equals(size)
    sources = []
    for base, step in zip(bases[:3], steps[:3], strict=True):
        scalar = step.equals(0)
        fast = fast & (step.equals(size) | scalar)
        # A scalar is read from a vector filled with it, with a step of 0.
        spread = f.buffer(lanes * size)
        f.store(f.broadcast(f.load(element, base), lanes), spread)
        sources.append(f.select(scalar, spread, base))
    turn = lanes * _UNROLL
    whole = f.select(fast, count & -turn, f.index(0))

    def at(base: Value, step: Value, i: Value) -> Value:
        return base + i * step

    with f.loop(0, whole, turn) as i:
        places = [i + lanes * j for j in range(_UNROLL)]
        # Everything is read before anything is written, since the output may be one of the inputs.
        inputs = [[f.load(type_, at(s, step, p)) for s, step in zip(sources, steps[:3], strict=True)] for p in places]
        for place, values in zip(places, inputs, strict=True):
            f.store(f.fma(*values), at(bases[3], steps[3], place))
    with f.loop(whole, count) as i:
        values = [f.load(element, at(base, step, i)) for base, step in zip(bases[:3], steps[:3], strict=True)]
        f.store(f.fma(*values), at(bases[3], steps[3], i))
