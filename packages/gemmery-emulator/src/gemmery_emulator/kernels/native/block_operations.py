"""Instructions that only compute, as code for a vector of threads: what their steps do by NumPy, recorded.

A step finds `TracedLanes` in place of arrays in the registers, for which each call of a NumPy function and each
conversion adds the code with the same bits. An instruction whose step does anything else stays with NumPy: those of
half precision, with directed roundings, and with functions that NumPy computes by its own approximation. The payloads
of NaNs are not modeled.

Shuffles, votes and reductions whose lanes all take part find in memory what each lane of the warp holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from gemmery.banks import WARP
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES, element_of, mangle, vector, with_element
from gemmery.cpu.target import Target
from gemmery.errors import EmulationError
from gemmery_emulator import exact
from gemmery_emulator.instructions import opcode
from gemmery_emulator.kernels.native.frames import LANES
from gemmery_emulator.op import NUMPY
from gemmery_emulator.ops.warp import source_of
from gemmery_emulator.steps import Faster

Exchange = Callable[..., tuple["TracedLanes", ...]]  # of what a warp holds, the number of a thread, and operands
# LLVM's type of values of a NumPy type.
TYPES = {"?": "i1", "f4": "float", "f8": "double"} | {
    f"{sign}{size}": f"i{8 * size}" for sign in "ui" for size in (1, 2, 4, 8)
}
_COMPARED = {"equal": "eq", "not_equal": "ne", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"}
_PLAIN = {  # one instruction, by the kind of the operands: "f" of floats, "i" of integers and flags
    **{("i", f"bitwise_{name}"): name for name in ("and", "or", "xor")},
    **{(kind, name): f"{'f' * (kind == 'f')}{text}" for kind in "fi"
       for name, text in (("add", "add"), ("subtract", "sub"), ("multiply", "mul"))},
    ("f", "divide"): "fdiv", ("i", "floor_divide"): "udiv", ("i", "remainder"): "urem",
}  # fmt: skip
_INTRINSIC = {
    "absolute": "fabs", "sqrt": "sqrt", "copysign": "copysign", "rint": "rint", "trunc": "trunc", "floor": "floor",
    "ceil": "ceil",
}  # fmt: skip


def lanes(element: str) -> str:
    """Return the type of a vector of one value for each thread."""
    return vector(LANES, element)


def emit(f: Function, text: str, type_: str, *values: Value) -> Value:
    """Add an instruction whose operands share one type."""
    return f.emit(type_, f"{text} {values[0]}" + "".join(f", {value.text}" for value in values[1:]))


def compare(f: Function, text: str, a: Value, b: Value) -> Value:
    """Add a comparison."""
    return emit(f, text, with_element(a.type, "i1"), a, b)


def flipped(f: Function, a: Value) -> Value:
    """Return the complement of all bits."""
    return emit(f, "xor", a.type, a, f.const(a.type, 1 if element_of(a.type) == "i1" else -1))


def splat(f: Function, number: Any, dtype: str) -> Value:
    """Return a constant in every lane."""
    type_ = TYPES[dtype]
    if dtype[0] == "f":
        bits = int(np.asarray(number).view(f"u{number.itemsize}"))
        return f.bitcast(f.const(lanes(f"i{8 * number.itemsize}"), bits), lanes(type_))
    return f.const(lanes(type_), int(number))


class UncodedError(TypeError):
    """A function does what has no code."""


class TracedLanes(NDArrayOperatorsMixin):
    """The values of a vector of threads, which NumPy's functions take for an array."""

    ndim = 1

    def __init__(self, f: Function, value: Value, dtype: np.dtype[Any]) -> None:
        if _key(dtype) not in TYPES:
            raise UncodedError(dtype)
        self.f, self.value, self.dtype, self.itemsize = f, value, dtype, dtype.itemsize

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise UncodedError("an array")

    def __getitem__(self, place: Any) -> TracedLanes:
        if place != ():
            raise UncodedError(place)
        return self

    def any(self) -> bool:
        """Whether any is set: code has to expect it."""
        return True

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, dtype: Any = None, **other: Any) -> Any:
        if method != "__call__" or other:
            raise UncodedError(ufunc)
        kinds = tuple(each.dtype if hasattr(each, "dtype") else type(each) for each in inputs)  # np.float64 is a float
        *kinds_in, kind_out = _loop(ufunc, kinds, None if dtype is None else np.dtype(dtype))
        values = [self._lanes(each, kind) for each, kind in zip(inputs, kinds_in, strict=True)]
        return TracedLanes(self.f, self._called(ufunc.__name__, kinds_in[0], *values), kind_out)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.ndim:
            return self.ndim
        if function is np.clip and len(args) == 3:
            return np.minimum(np.maximum(args[0], args[1]), args[2])
        if function is not np.where or len(args) != 3:
            raise UncodedError(function)
        condition, *sides = args
        kind = np.result_type(*(each.dtype if hasattr(each, "dtype") else each for each in sides))
        values = (self._lanes(each, kind) for each in sides)
        return TracedLanes(self.f, self.f.select(self._lanes(condition, np.dtype(np.bool_)), *values), kind)

    def astype(self, kind: Any) -> TracedLanes:
        """The same numbers as another type."""
        dtype = np.dtype(kind)
        return TracedLanes(self.f, self._lanes(self, dtype), dtype)

    def view(self, kind: Any) -> TracedLanes:
        """The same bits as another type."""
        dtype = np.dtype(kind)
        if dtype.itemsize != self.itemsize or _key(dtype) not in TYPES:
            raise UncodedError(dtype)
        return TracedLanes(self.f, self.f.bitcast(self.value, lanes(TYPES[_key(dtype)])), dtype)

    def _lanes(self, number: Any, dtype: np.dtype[Any]) -> Value:
        """Values, or one number for all lanes, converted to a type."""
        f, key = self.f, _key(dtype)
        if key not in TYPES:
            raise UncodedError(dtype)
        if not isinstance(number, TracedLanes):
            return splat(f, np.asarray(number).astype(dtype)[()], key)
        value, of = number.value, number.dtype
        if dtype == of:
            return value
        if dtype.kind == "b":
            return compare(f, "fcmp une" if of.kind == "f" else "icmp ne", value, f.zero(value.type))
        if dtype.kind == of.kind == "f":
            how = "fpext" if dtype.itemsize > of.itemsize else "fptrunc"
        elif dtype.kind == "f" or of.kind == "f":
            signed = "s" if "i" in (dtype.kind, of.kind) else "u"
            how = f"{signed}itofp" if dtype.kind == "f" else f"fpto{signed}i"
        else:
            wider = of.kind == "b" or dtype.itemsize > of.itemsize
            how = "trunc" if not wider else "sext" if of.kind == "i" else "zext"
        return f.convert(how, value, TYPES[key])

    def _called(self, name: str, kind: np.dtype[Any], a: Value, *others: Value) -> Value:
        """The code of a NumPy function of operands of one type."""
        f, (b, *_) = self.f, (*others, a)
        floats, signed = kind.kind == "f", kind.kind == "i"
        if text := _PLAIN.get(("f" if floats else "i", name), ""):
            if signed and name in ("floor_divide", "remainder"):
                raise UncodedError(name)
            return emit(f, text, a.type, a, b)
        if name in _COMPARED:
            order = _COMPARED[name]
            if floats:
                return compare(f, f"fcmp {'u' if order == 'ne' else 'o'}{order}", a, b)
            sign = "" if order in ("eq", "ne") else "s" if signed else "u"
            return compare(f, f"icmp {sign}{order}", a, b)
        if name in ("minimum", "maximum"):
            if floats:  # NaN if one is
                first = compare(f, "fcmp olt" if name == "minimum" else "fcmp ogt", a, b)
                return f.select(emit(f, "or", first.type, first, compare(f, "fcmp uno", a, a)), a, b)
            return f.overloaded(f"llvm.{'s' if signed else 'u'}{name[:3]}", a, b)
        if name in ("left_shift", "right_shift"):
            return self._shifted(name, kind, a, b)
        if name in _INTRINSIC and floats:
            return f.overloaded(f"llvm.{_INTRINSIC[name]}", *((a, b) if others else (a,)))
        if name == "negative":
            return emit(f, "fneg", a.type, a) if floats else emit(f, "sub", a.type, f.zero(a.type), a)
        if name in ("invert", "logical_not") and not floats and (name == "invert" or kind.kind == "b"):
            return flipped(f, a)
        if name == "absolute" and signed:
            return f.select(a < 0, emit(f, "sub", a.type, f.zero(a.type), a), a)
        if name == "bitwise_count":
            return f.convert("trunc", f.overloaded("llvm.ctpop", a), "i8")
        if floats:
            return self._of_float(name, kind, a)
        raise UncodedError(name)

    def _shifted(self, name: str, kind: np.dtype[Any], a: Value, count: Value) -> Value:
        """Counts beyond the width give zeros, or the sign."""
        f, most = self.f, 8 * kind.itemsize - 1
        near = f.overloaded("llvm.umin", count, f.const(count.type, most))
        if name == "right_shift" and kind.kind == "i":
            return emit(f, "ashr", a.type, a, near)
        value = emit(f, "shl" if name == "left_shift" else "lshr", a.type, a, near)
        beyond = compare(f, "icmp ugt", count, f.const(count.type, most))
        return f.select(beyond, f.zero(a.type), value)

    def _of_float(self, name: str, kind: np.dtype[Any], a: Value) -> Value:
        f = self.f
        if name == "isnan":
            return compare(f, "fcmp uno", a, a)
        if name == "signbit":
            return f.bitcast(a, lanes(f"i{8 * kind.itemsize}")) < 0
        if name == "reciprocal":
            return emit(f, "fdiv", a.type, f.const(a.type, 1.0), a)
        if name in ("isfinite", "isinf"):
            infinity = splat(f, kind.type(np.inf), _key(kind))
            return compare(f, "fcmp olt" if name == "isfinite" else "fcmp oeq", f.overloaded("llvm.fabs", a), infinity)
        raise UncodedError(name)


def _key(dtype: np.dtype[Any]) -> str:
    """The name of a NumPy type in TYPES."""
    return "?" if dtype.kind == "b" else dtype.str[1:]


@lru_cache(maxsize=1024)
def _loop(ufunc: np.ufunc, kinds: tuple[Any, ...], dtype: np.dtype[Any] | None) -> tuple[np.dtype[Any], ...]:
    """The types that a NumPy function converts operands to, and that of its result."""
    if ufunc.nout != 1:
        raise UncodedError(ufunc)
    if dtype is None:
        return ufunc.resolve_dtypes((*kinds, None))
    return ufunc.resolve_dtypes((*kinds, None), signature=(*(None,) * ufunc.nin, dtype))


def _fused(x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    traced = next(each for each in (x, y, z) if isinstance(each, TracedLanes))
    if not traced.f.target.has_fma:
        raise UncodedError("fma")
    values = (traced._lanes(each, traced.dtype) for each in (x, y, z))
    return TracedLanes(traced.f, traced.f.fma(*values), traced.dtype)


FASTER: Faster = {exact.fma: _fused}  # for steps that are recorded


def value_of(f: Function, lanes_or_number: Any, dtype: str) -> Value:
    """The values of a NumPy type that a step has made, or a number of constants alone."""
    if not isinstance(lanes_or_number, TracedLanes):
        return splat(f, np.dtype(dtype).type(lanes_or_number), dtype)
    if _key(lanes_or_number.dtype) != dtype:
        raise UncodedError(lanes_or_number.dtype)
    return lanes_or_number.value


class _Unknown(dict[int, Any]):
    """Registers whose values do not matter."""

    def __init__(self, f: Function, stored: Sequence[str]) -> None:
        super().__init__()
        self.registers, self._f, self._stored = self, f, stored

    def __getattr__(self, name: str) -> Any:
        """Refuse a step that reads more of a warp than its registers, such as which lanes are active."""
        raise UncodedError(name)

    def __missing__(self, slot: int) -> TracedLanes:
        kind = self._stored[slot]
        return TracedLanes(self._f, Value(self._f, lanes(TYPES[kind]), "poison"), np.dtype(kind))


_coded: dict[tuple[Any, ...], bool] = {}


def has_code(target: Target, kinds: tuple[object, ...], step: Callable[..., Any], stored: Sequence[str]) -> bool:
    """Whether a step of an instruction of these kinds writes code; `stored` are the NumPy types of registers."""
    if (target, kinds) not in _coded:
        trial = Module(target).function("trial")
        registers = _Unknown(trial, stored)
        try:
            step(registers, None)
            for slot, value in registers.items():
                value_of(trial, value, stored[slot])
            _coded[target, kinds] = True
        except (EmulationError, UncodedError):
            _coded[target, kinds] = False
    return _coded[target, kinds]


# ---- whole warps ----


_REDUCTIONS = {"add": "add", "and": "and", "or": "or", "xor": "xor", "min": "{}min", "max": "{}max"}


def exchange(spelling: str) -> Exchange | None:
    """Return a function that adds the code of an instruction; None if it has none.

    It takes the address of what the lanes of the warp hold, the number of the first thread, then the other operands.
    """
    read = opcode(spelling)
    name, mode, kind = read.name, read.modifiers[-1], read.type
    if name == "shfl":
        return partial(_shuffle, mode)
    if name == "vote" and mode in _VOTES:
        return partial(_vote, mode)
    if name == "redux" and mode in _REDUCTIONS and kind in ("u32", "s32", "b32"):
        return partial(_reduced, _REDUCTIONS[mode].format(kind[0]), np.dtype(NUMPY[kind]))
    return None


def gathered(f: Function, type_: str, places: Value, mask: Value) -> Value:
    """Load a value from each address of a vector whose mask bit is set; the others are zero."""
    name = f"llvm.masked.gather.{mangle(type_)}.v{LANES}p0"
    return f.intrinsic(name, type_, places, f.const("i32", SIZES[element_of(type_)]), mask, f.zero(type_))


def _shuffle(mode: str, f: Function, passed: Value, t: Value, b: Any, c: Any) -> tuple[TracedLanes, ...]:
    kind, dtype = lanes("i32"), np.dtype(np.int32)
    lane = f.broadcast(f.emit("i32", f"trunc {t & (WARP - 1)} to i32"), LANES) + f.ramp(kind)
    source, inside = source_of(mode, TracedLanes(f, lane, dtype), *(each.astype(dtype) for each in (b, c)))
    places = f.emit(lanes("ptr"), f"getelementptr i32, {passed}, {source.value}")
    return TracedLanes(f, gathered(f, kind, places, f.const(lanes("i1"), 1)), np.dtype(np.uint32)), inside


def _reduced(how: str, dtype: np.dtype[Any], f: Function, passed: Value, t: Value) -> tuple[TracedLanes, ...]:
    name = f"llvm.vector.reduce.{how}.v{WARP}i32"
    result = f.intrinsic(name, "i32", f.load(vector(WARP, "i32"), passed))
    return (TracedLanes(f, f.broadcast(result, LANES), dtype),)


_VOTES: dict[str, Callable[[Value], Value]] = {
    "all": lambda bits: bits.equals(2**WARP - 1),
    "any": lambda bits: bits.differs(0),
    "uni": lambda bits: ((bits + 1) & (2**WARP - 1)) < 2,
    "ballot": lambda bits: bits.f.emit("i32", f"trunc {bits} to i32"),
}


def _vote(mode: str, f: Function, passed: Value, t: Value) -> tuple[TracedLanes, ...]:
    flags = f.bitcast(f.load(vector(WARP, "i8"), passed).differs(0), f"i{WARP}")
    result = f.broadcast(_VOTES[mode](f.emit("i64", f"zext {flags} to i64")), LANES)
    return (TracedLanes(f, result, np.dtype(np.uint32 if mode == "ballot" else np.bool_)),)
