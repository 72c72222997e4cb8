"""The hardware's fused multiply-add as a NumPy ufunc, which NumPy itself does not offer."""

from __future__ import annotations

import ctypes
import functools
from typing import cast

import numpy as np

from gemmery.cpu import jit, target, workspace
from gemmery.cpu.ir import SIZES, Function, Module, Value, vector
from gemmery.cpu.target import Target

_UNROLL = 2  # vectors a turn of the loop
_TYPES = {"float": "f", "double": "d"}  # of LLVM, and NumPy's character for it


@functools.cache
def fma() -> np.ufunc | None:
    """x * y + z rounded once, of float32 and float64 arrays; None where the CPU has no instruction for it.

    >>> fused = fma()
    >>> float(fused(1 + 2.0**-52, 1 - 2.0**-52, -1.0)) == -(2.0**-104) if fused else True
    True
    """
    host = target.host()
    if not host.has_fma:
        return None
    loops = jit.load(host, "fused multiply-add loops", lambda: _module(host))
    return _ufunc([loops[f"fma_{element}"] for element in _TYPES], "".join(4 * kind for kind in _TYPES.values()))


def _ufunc(loops: list[int], types: str) -> np.ufunc:
    """A ufunc of three inputs and one output, through NumPy's C interface (PyUFunc_FromFuncAndData)."""
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
    for kept in (functions, data, kinds):
        workspace.forever(kept)
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
    """A PyUFuncGenericFunction: vectors while the output is contiguous and each input contiguous or one scalar."""
    size, type_ = SIZES[element], vector(lanes, element)
    bases = [f.load("ptr", f["args"] + 8 * i) for i in range(4)]
    steps = [f.load("i64", f["steps"] + 8 * i) for i in range(4)]
    count = f.load("i64", f["dimensions"])
    fast = steps[3].equals(size)
    sources = []
    for base, step in zip(bases[:3], steps[:3], strict=True):
        scalar = step.equals(0)
        fast = fast & (step.equals(size) | scalar)
        # A scalar is read from a whole vector of it, again and again: its step is 0.
        spread = f.buffer(lanes * size)
        f.store(f.broadcast(f.load(element, base), lanes), spread)
        sources.append(f.select(scalar, spread, base))
    turn = lanes * _UNROLL
    whole = f.select(fast, count & -turn, f.index(0))

    def at(base: Value, step: Value, i: Value) -> Value:
        return base + i * step

    with f.loop(0, whole, turn) as i:
        places = [i + lanes * j for j in range(_UNROLL)]
        # All is read before anything is written: the output may be one of the inputs.
        inputs = [[f.load(type_, at(s, step, p)) for s, step in zip(sources, steps[:3], strict=True)] for p in places]
        for place, values in zip(places, inputs, strict=True):
            f.store(f.fma(*values), at(bases[3], steps[3], place))
    with f.loop(whole, count) as i:
        values = [f.load(element, at(base, step, i)) for base, step in zip(bases[:3], steps[:3], strict=True)]
        f.store(f.fma(*values), at(bases[3], steps[3], i))
