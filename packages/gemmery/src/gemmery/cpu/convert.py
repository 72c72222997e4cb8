"""Element conversions between memory and registers, lane by lane.

bfloat16 is the upper half of a float32. Widening is a shift; narrowing rounds to nearest even by adding 0x7FFF plus
the last kept bit, and keeps NaNs quiet. float16 uses the CPU's conversions (F16C, NEON), which a CPU with fused
multiply-adds has, or integer arithmetic.
"""

from __future__ import annotations

from gemmery.cpu.ir import Function, Value
from gemmery.cpu.ir_types import vector, with_element
from gemmery.dtypes import DType


def load_as(f: Function, memory: DType, element: str, at: Value, lanes: int, mask: Value | None) -> Value:
    """Load `lanes` adjacent elements (0: one scalar) of type `memory` as `element`; masked-off lanes are zero."""
    raw = "i16" if memory.name == "bf16" else memory.llvm
    type_ = vector(lanes, raw) if lanes else raw
    loaded = f.load_masked(type_, at, mask)
    return widen(f, loaded, memory, element)


def store_as(f: Function, new: Value, memory: DType, at: Value, mask: Value | None = None) -> None:
    """Convert to `memory`'s type, rounding once (integers wrap), and store; masked-off lanes are not touched."""
    f.store_masked(narrow(f, new, memory), at, mask)


def widen(f: Function, value: Value, memory: DType, element: str) -> Value:
    """Convert from the type in memory to a wider or equal register type."""
    if memory.name == "bf16":
        if element == "bfloat":
            return f.bitcast(value, with_element(value.type, "bfloat"))
        bits = f.convert("zext", value, "i32") << 16
        return f.convert("fpext", f.bitcast(bits, with_element(value.type, "float")), element)
    if memory.name == "f16" and element != "half" and not f.target.has_fma:
        single = _half_to_float(f, f.bitcast(value, with_element(value.type, "i16")))
        return f.convert("fpext", single, element)
    if memory.kind in "iu":
        if element in ("float", "double"):
            return f.convert("sitofp" if memory.kind == "i" else "uitofp", value, element)
        return f.convert("sext" if memory.kind == "i" else "zext", value, element)
    return f.convert("fpext", value, element)


def narrow(f: Function, value: Value, memory: DType) -> Value:
    """Convert from a register type to the type in memory, rounding once; integers wrap."""
    if memory.name == "bf16":
        return _float_to_bfloat(f, value)
    if memory.name == "f16" and not f.target.has_fma:
        return f.bitcast(_float_to_half(f, value), with_element(value.type, "half"))
    if memory.kind in "iu":
        return f.convert("trunc", value, memory.llvm)
    return f.convert("fptrunc", value, memory.llvm)


def _float_to_bfloat(f: Function, value: Value) -> Value:
    bits = f.bitcast(value, with_element(value.type, "i32"))
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    quiet = (bits >> 16) | 0x40
    is_nan = value.differs(value)
    return f.convert("trunc", f.select(is_nan, quiet, rounded), "i16")


def _half_to_float(f: Function, bits16: Value) -> Value:
    """Widen float16: shift exponent and fraction and scale by 2**112, which is exact for all finite numbers."""
    bits = f.convert("zext", bits16, "i32")
    magnitude = (bits & 0x7FFF) << 13
    type_ = with_element(bits.type, "float")
    scaled = f.bitcast(magnitude, type_) * 2.0**112
    special = f.bitcast(magnitude | 0x7F800000, type_)
    value = f.select((bits & 0x7C00).equals(0x7C00), special, scaled)
    return f.bitcast(f.bitcast(value, bits.type) | ((bits & 0x8000) << 16), type_)


def _float_to_half(f: Function, value: Value) -> Value:
    """Narrow to float16: round to nearest even in integer arithmetic; for subnormals, add 0.5, whose ulp is 2**-24."""
    integers = with_element(value.type, "i32")
    bits = f.bitcast(value, integers)
    sign = (bits >> 16) & 0x8000
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + ((magnitude >> 13) & 1) + (0xFFF - (112 << 23))) >> 13
    tiny = f.bitcast(f.bitcast(magnitude, value.type) + 0.5, integers) - 0x3F000000
    finite = f.select(magnitude < (113 << 23), tiny, normal)
    overflow = f.select(magnitude > 0x7F800000, f.const(integers, 0x7E00), f.const(integers, 0x7C00))
    whole = f.select(magnitude >= 0x47800000, overflow, finite)
    return f.convert("trunc", whole | sign, "i16")
