"""Arithmetic of the emulator as compiled code: fused multiply-adds, and the sums of tensor cores.

It has the bits of what the emulator has in NumPy: the CPU's fused multiply-add as a ufunc, which NumPy does not have,
chains of it, and sums of products as tensor cores add them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

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
    places = [ctypes.addressof(buffer) for buffer in (functions, data, kinds)]
    return cast(np.ufunc, prototype(cast(int, make))(*places, len(loops), 3, 1, no_identity, name, doc, 0))


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
    with f.loop(0, whole, turn) as i:
        places = [i + lanes * j for j in range(_UNROLL)]
        # Everything is read before anything is written, since the output may be one of the inputs.
        inputs = [[f.load(type_, s + p * step) for s, step in zip(sources, steps[:3], strict=True)] for p in places]
        for place, values in zip(places, inputs, strict=True):
            f.store(f.fma(*values), bases[3] + place * steps[3])
    with f.loop(whole, count) as i:
        values = [f.load(element, base + i * step) for base, step in zip(bases[:3], steps[:3], strict=True)]
        f.store(f.fma(*values), bases[3] + i * steps[3])


# Sums of tensor cores: a vector holds 8 neighboring ones. Each number is taken apart into a significand in float32 and
# an exponent, so the product of two significands is exact, and cutting it where the largest exponent says is one
# conversion to int32. Products of f16 and float8 are exact in float32 themselves, which saves half of the work.
_LANES = 8
_ROWS = 4  # of sums that are computed together, so that the CPU need not wait for each result
_TURN = 4  # elements of k in a turn of the loops; a tensor core adds at least as many at once
_FLOATS, _INTS, _WIDE, _LONG = (vector(_LANES, kind) for kind in ("float", "i32", "double", "i64"))
_BIAS = 127
_SPECIAL, _ZERO, _LEAST = 1 << 20, -(1 << 12), -133  # exponents of infinity and NaN, of zero; the least to align to
_SIGNIFICAND = -(1 << 31) | (1 << 23) - 1  # the sign and the fraction of a float32
_NAN = 0x7FFFFFFF
_NEAR = -14  # least exponent of types whose products are normal numbers of float32


@functools.cache
def added() -> Callable[[Array, Array, Array, Any], Array]:
    """Return a function that adds as the emulator's `exact.added` does, 20 times as fast."""
    host = target.host()
    entries = jit.load(host, "sums of tensor cores", lambda: _sums(host))
    prototype = ctypes.CFUNCTYPE(None, *_arguments(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32))
    near, far = prototype(entries["near"]), prototype(entries["far"])

    def compiled(before: Array, a: Array, b: Array, rule: Any) -> Array:
        (groups, m, k), n = a.shape, b.shape[1]
        panels = b.reshape(groups, n // _LANES, _LANES, k).swapaxes(2, 3)
        a, b = (np.ascontiguousarray(x, np.float32) for x in (a, panels))
        before = np.ascontiguousarray(before, np.float32)
        sums, parts = np.empty_like(before), np.empty(2 * (a.size + b.size), np.uint32)
        lost = 52 - rule.result
        (near if min(rule.a, rule.b) >= _NEAR else far)(
            *(x.ctypes.data for x in (before, a, b, parts, sums)),
            *(groups, m, n, k, rule.depth),
            *((1 << lost) - 1, 1 << lost if rule.halves else 0),
            *(rule.a, rule.b, rule.aligned),
        )
        return sums

    return compiled


def _arguments(pointer: Any, long: Any, number: Any) -> list[Any]:
    """Return the types of the arguments, in order."""
    return [pointer] * 5 + [long] * 7 + [number] * 3


_NAMES = [
    "before",
    "a",
    "b",
    "parts",
    "sums",
    "groups",
    "m",
    "n",
    "k",
    "depth",
    "lost",
    "odd",
    "a_normal",
    "b_normal",
    "aligned",
]


def _sums(target: Target) -> Module:
    module = Module(target)
    params = tuple(zip(_arguments("ptr", "i64", "i32"), _NAMES, strict=True))
    for name in ("near", "far"):
        with module.function(name, *params) as f:
            _define(f, name == "near")
    return module


def _define(f: Function, near: bool) -> None:
    """Add to all sums; `near` if all products are normal numbers of float32."""
    m, n, k = f["m"], f["n"], f["k"]
    size_a, size_b = f["groups"] * m * k * 4, f["groups"] * n * k * 4
    sides = [
        _Side(f["a"], f["parts"], f["parts"] + size_a),
        _Side(f["b"], f["parts"] + 2 * size_a, f["parts"] + 2 * size_a + size_b),
    ]
    for side, normal, size in zip(sides, ("a_normal", "b_normal"), (size_a, size_b), strict=True):
        with f.loop(0, size, 4 * _LANES) as at:
            significand, exponent = _apart(f, f.load(_FLOATS, side.numbers + at), f.broadcast(f[normal], _LANES))
            f.store(exponent, side.exponents + at)
            if not near:
                f.store(significand, side.significands + at)
    if near:
        sides = [replace(side, significands=side.numbers) for side in sides]
    with f.loop(0, f["groups"]) as group, f.loop(0, n, _LANES) as column, f.loop(0, m, _ROWS) as row:
        lines = [group * m + row + i for i in range(_ROWS)]
        ats = [(line * n + column) * 4 for line in lines]
        sums = [f.var(f.load(_FLOATS, f["before"] + at)) for at in ats]
        with f.loop(0, k, f["depth"]) as start:
            places = [(line * k + start) * 4 for line in lines], ((group * n + column) * k + start * _LANES) * 4
            after = _at_once(f, [each.value for each in sums], sides, places, near)
            for each, value in zip(sums, after, strict=True):
                each.value = value
        for each, at in zip(sums, ats, strict=True):
            f.store(each.value, f["sums"] + at)


@dataclass(frozen=True)
class _Side:
    """The addresses of the elements of A or B, and of what they are taken apart into."""

    numbers: Value
    exponents: Value
    significands: Value


def _apart(f: Function, numbers: Value, normal: Value) -> tuple[Value, Value]:
    """Return significands and exponents; those of numbers below the least normal one are of its exponent."""
    bits = f.bitcast(numbers, _INTS)
    field = (bits >> 23) & 255
    exponent = field - _BIAS
    usual = exponent >= normal
    significand = f.bitcast((bits & _SIGNIFICAND) | (_BIAS << 23), _FLOATS)
    grown = numbers * f.bitcast((_BIAS - normal) << 23, _FLOATS)
    exponent = f.select(usual, exponent, normal)
    exponent = f.select(numbers.equals(0.0), f.const(_INTS, _ZERO), exponent)
    return f.select(usual, significand, grown), f.select(field.equals(255), f.const(_INTS, _SPECIAL), exponent)


def _at_once(
    f: Function, before: list[Value], sides: list[_Side], places: tuple[list[Value], Value], near: bool
) -> list[Value]:
    """Add the products of `depth` elements of k to 8 sums of each row; `places` are where these begin in A and in B."""
    (a, b), (lines, panel) = sides, places

    def of_a(base: Value, line: Value, k: Value, kind: str) -> Value:
        return f.broadcast(f.load(kind, base + line + k * 4), _LANES)

    def of_b(base: Value, k: Value, kind: str) -> Value:
        return f.load(kind, base + panel + k * (4 * _LANES))

    def exponents(line: Value, k: Value) -> Value:
        return of_a(a.exponents, line, k, "i32") + of_b(b.exponents, k, _INTS)

    def power(exponent: Value) -> Value:
        field = f.overloaded("llvm.smax", exponent, f.zero(_INTS))
        return f.bitcast(f.overloaded("llvm.smin", field, f.const(_INTS, 254)) << 23, _FLOATS)

    starts = [_apart(f, each, f.const(_INTS, 1 - _BIAS)) for each in before]
    largest = [f.var(f.overloaded("llvm.smax", exponent, f.const(_INTS, _LEAST))) for _, exponent in starts]
    with f.loop(0, f["depth"], _TURN) as first:
        for i, (line, most) in product(range(_TURN), zip(lines, largest, strict=True)):
            most.value = f.overloaded("llvm.smax", most.value, exponents(line, first + i))
    shifts = [f.broadcast(f["aligned"] + _BIAS, _LANES) - most.value for most in largest]
    scales = [power(shift) for shift in shifts]  # at its limits all products are zero, or cut to zero
    # The 16 products below 2^27 and the sum before are too many for one int32.
    halves = []
    for (significand, exponent), shift in zip(starts, shifts, strict=True):
        own = f.convert("fptosi", significand * power(exponent + shift), "i32")
        halves.append((f.var(f.zero(_INTS)), f.var(own)))
    with f.loop(0, f["depth"], _TURN) as first:
        for i, row in product(range(_TURN), range(_ROWS)):
            k, half = first + i, halves[row][i % 2]
            term = of_a(a.significands, lines[row], k, "float") * of_b(b.significands, k, _FLOATS)
            scale = scales[row] if near else power(exponents(lines[row], k) + shifts[row])
            half.value = half.value + f.convert("fptosi", term * scale, "i32")
    aligned = f.broadcast(f.convert("sext", f["aligned"], "i64"), _LANES)
    sums = []
    for most, pair in zip(largest, halves, strict=True):
        whole, other = (f.convert("sitofp", half.value, "double") for half in pair)
        unit = (f.convert("sext", most.value, "i64") - aligned + 1023) << 52
        sums.append(f.var(_rounded(f, (whole + other) * f.bitcast(unit, _WIDE))))
    for row, most in enumerate(largest):
        special = most.value > _SPECIAL // 2
        with f.if_(f.intrinsic(f"llvm.vector.reduce.or.v{_LANES}i1", "i1", special)):
            total = f.var(f.convert("fpext", before[row], "double"))
            with f.loop(0, f["depth"]) as k:
                factors = of_a(a.numbers, lines[row], k, "float"), of_b(b.numbers, k, _FLOATS)
                wide = [f.convert("fpext", value, "double") for value in factors]
                total.value = total.value + wide[0] * wide[1]
            usual = f.convert("fptrunc", total.value, "float")
            usual = f.select(usual.differs(usual), f.bitcast(f.const(_INTS, _NAN), _FLOATS), usual)
            sums[row].value = f.select(special, usual, sums[row].value)
    return [each.value for each in sums]


def _rounded(f: Function, sums: Value) -> Value:
    """Cut toward zero to float32, or round to odd."""
    bits, lost = f.bitcast(sums, _LONG), f.broadcast(f["lost"], _LANES)
    cut = bits & (lost ^ -1)
    odd = f.select((bits & lost).differs(0), f.broadcast(f["odd"], _LANES), f.zero(_LONG))
    rounded = f.var(f.convert("fptrunc", f.bitcast(cut | odd, _WIDE), "float"))
    small = (f.overloaded("llvm.fabs", sums) < 2.0**-126) & sums.differs(0.0)
    with f.if_(f.intrinsic(f"llvm.vector.reduce.or.v{_LANES}i1", "i1", small)):
        # Below the least normal number of float32 the last bit of the result has a fixed place.
        place = f.overloaded("llvm.ctpop", lost) - (126 + 52)
        up, down = (f.bitcast((place * sign + 1023) << 52, _WIDE) for sign in (-1, 1))
        tiny = f.convert("fptrunc", f.overloaded("llvm.trunc", sums * up) * down, "float")
        rounded.value = f.select(small, tiny + 0.0, rounded.value)  # never a negative zero
    return rounded.value
