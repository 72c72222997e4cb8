"""Instructions that only compute, as code for a vector of threads, with the bits of their meanings in NumPy.

An instruction without an entry here stays with NumPy. So do those with `.ftz`, `.sat` and directed roundings, those of
half precision, and functions that NumPy computes by its own approximation. The payloads of NaNs are not modeled there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gemmery.cpu.ir import Function, Value
from gemmery.cpu.ir_types import element_of, vector, with_element
from gemmery_emulator.instructions import opcode
from gemmery_emulator.kernels.native.frames import LANES

Emit = Callable[..., Value | tuple[Value, ...]]
# LLVM's type of values of a NumPy type.
TYPES = {"?": "i1", "f4": "float", "f8": "double"} | {
    f"{sign}{size}": f"i{8 * size}" for sign in "ui" for size in (1, 2, 4, 8)
}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_ORDER = ("lt", "le", "gt", "ge")
_FLOATS = {
    "eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge",
    "equ": "ueq", "neu": "une", "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge", "num": "ord", "nan": "uno",
}  # fmt: skip


def lanes(element: str) -> str:
    """Return the type of a vector of one value for each thread."""
    return vector(LANES, element)


def emitter(spelling: str, has_fma: bool) -> Emit | None:
    """Return a function that adds the code of an instruction; None if it has none."""
    read = opcode(spelling)
    name, words = read.name, [*read.modifiers, *read.types]
    kind = words[-1] if words else ""
    if name == "setp":
        return _setp(words)
    if spelling in _PLAIN:
        return _PLAIN[spelling]
    if kind in ("f32", "f64") and name != "cvt":
        return _floating(name, words[:-1], has_fma)
    if name == "cvt":
        return _convert(words)
    if kind[:1] in ("u", "s", "b") and kind[1:] in ("16", "32", "64"):
        return _integer(name, words[:-1], kind)
    if kind == "pred" and name in ("and", "or", "xor", "not"):
        return _integer(name, words[:-1], kind)
    return None


def emit(f: Function, text: str, type_: str, *values: Value) -> Value:
    """Add an instruction whose operands share one type."""
    return f.emit(type_, f"{text} {values[0]}" + "".join(f", {value.text}" for value in values[1:]))


def compare(f: Function, text: str, a: Value, b: Value) -> Value:
    """Add a comparison."""
    return emit(f, text, with_element(a.type, "i1"), a, b)


def flipped(f: Function, a: Value) -> Value:
    """Return the complement of all bits."""
    return emit(f, "xor", a.type, a, f.const(a.type, 1 if element_of(a.type) == "i1" else -1))


# ---- integers ----


def _integer(name: str, words: Sequence[str], kind: str) -> Emit | None:
    signed = kind[0] == "s"
    letter = "s" if signed else "u"
    simple = {"add": "add", "sub": "sub", "and": "and", "or": "or", "xor": "xor"}
    if name in simple and not words:
        return lambda f, a, b: emit(f, simple[name], a.type, a, b)
    if name in ("mul", "mad") and words in (["lo"], ["wide"], ["hi"]):
        return _product(name, words[0], kind)
    if words:
        return None
    if name == "not":
        return flipped
    if name == "neg":
        return lambda f, a: emit(f, "sub", a.type, f.zero(a.type), a)
    if name in ("min", "max"):
        return lambda f, a, b: f.overloaded(f"llvm.{letter}{name}", a, b)
    if name == "abs":
        return lambda f, a: f.select(
            compare(f, "icmp slt", a, f.zero(a.type)), emit(f, "sub", a.type, f.zero(a.type), a), a
        )
    if name in ("shl", "shr"):
        return _shift(name, kind)
    if name == "selp":
        return _selp
    if name in ("div", "rem"):
        return _divide(name, signed)
    if name in ("bfi", "bfe") and kind[1:] in ("32", "64"):
        return _field(name, kind)
    if name in ("popc", "clz", "brev") and kind == "b32":
        return _counted(name)
    return None


def _selp(f: Function, a: Value, b: Value, p: Value) -> Value:
    return f.select(p, a, b)


def _counted(name: str) -> Emit:
    if name == "popc":
        return lambda f, a: f.overloaded("llvm.ctpop", a)
    if name == "brev":
        return lambda f, a: f.overloaded("llvm.bitreverse", a)

    def zeros(f: Function, a: Value) -> Value:
        return f.intrinsic(f"llvm.ctlz.v{LANES}i32", a.type, a, Value(f, "i1", "false"))

    return zeros


def _product(name: str, part: str, kind: str) -> Emit | None:
    bits, signed = int(kind[1:]), kind[0] == "s"
    if part != "lo" and bits == 64:
        return None
    extend = "sext" if signed else "zext"

    def times(f: Function, a: Value, b: Value, *c: Value) -> Value:
        if part != "lo":
            a, b = (f.convert(extend, x, f"i{2 * bits}") for x in (a, b))
        whole = emit(f, "mul", a.type, a, b)
        if part == "hi":
            whole = f.convert("trunc", emit(f, "lshr", a.type, whole, f.const(a.type, bits)), f"i{bits}")
        return emit(f, "add", whole.type, whole, c[0]) if c else whole

    return times


def _shift(name: str, kind: str) -> Emit:
    bits, signed = int(kind[1:]), kind[0] == "s"

    def shifted(f: Function, a: Value, count: Value) -> Value:
        limit = f.const(count.type, bits - 1)
        beyond = compare(f, "icmp ugt", count, limit)
        near = f.overloaded("llvm.umin", count, limit)
        near = f.convert("zext" if bits > 32 else "trunc", near, f"i{bits}") if bits != 32 else near
        text = "shl" if name == "shl" else "ashr" if signed else "lshr"
        value = emit(f, text, a.type, a, near)
        return value if text == "ashr" else f.select(beyond, f.zero(a.type), value)

    return shifted


def _field(name: str, kind: str) -> Emit:
    """Insert bits into a number, or extract them: `length` of them at bit `start`; of 32 bits both are bytes."""
    left, right, bits = _shift("shl", kind), _shift("shr", kind), int(kind[1:])

    def shifted(f: Function, a: Value, *others: Value) -> Value:
        start, length = (x & 255 if bits == 32 else x for x in others[-2:])
        inside = left(f, f.const(a.type, 1), length) - 1
        if name == "bfi":
            field = left(f, inside, start)
            return (left(f, a, start) & field) | (others[0] & flipped(f, field))
        result = right(f, a, start) & inside
        if kind[0] == "u":
            return result
        last = f.overloaded("llvm.umin", start, f.const(start.type, bits)) + length - 1
        sign = f.select(length.equals(0), f.zero(a.type), 0 - (right(f, a, last) & 1))
        return result | (sign & flipped(f, inside))

    return shifted


def _divide(name: str, signed: bool) -> Emit:
    """Divide magnitudes, so that nothing overflows; all ones where the divisor is zero."""

    def divided(f: Function, a: Value, b: Value) -> Value:
        zero, unit = f.zero(a.type), f.const(a.type, 1)
        nothing = compare(f, "icmp eq", b, zero)
        x, y = a, b
        if signed:
            x, y = (f.select(compare(f, "icmp slt", v, zero), emit(f, "sub", a.type, zero, v), v) for v in (a, b))
        y = f.select(nothing, unit, y)
        result = emit(f, "udiv" if name == "div" else "urem", a.type, x, y)
        if signed:
            sign = emit(f, "xor", a.type, a, b) if name == "div" else a
            negative = compare(f, "icmp slt", sign, zero)
            result = f.select(negative, emit(f, "sub", a.type, zero, result), result)
        return f.select(nothing, f.const(a.type, -1), result)

    return divided


def _lop3(f: Function, a: Value, b: Value, c: Value, table: int) -> Value:
    """Any function of three bits."""
    result = f.zero(a.type)
    for place in range(8):
        if table >> place & 1:
            parts = [x if place >> at & 1 else flipped(f, x) for x, at in ((a, 2), (b, 1), (c, 0))]
            term = emit(f, "and", a.type, emit(f, "and", a.type, parts[0], parts[1]), parts[2])
            result = emit(f, "or", a.type, result, term)
    return result


def _prmt(f: Function, a: Value, b: Value, selector: int) -> Value:
    """Four of eight bytes, by a constant."""
    result = f.zero(a.type)
    for place in range(4):
        which = selector >> 4 * place & 15
        byte = emit(f, "lshr", a.type, b if which & 4 else a, f.const(a.type, (which & 3) << 3))
        byte = emit(f, "and", a.type, byte, f.const(a.type, 255))
        if which & 8:
            negative = compare(f, "icmp ugt", byte, f.const(a.type, 127))
            byte = f.select(negative, f.const(a.type, 255), f.zero(a.type))
        moved = emit(f, "shl", a.type, byte, f.const(a.type, 8 * place))
        result = emit(f, "or", a.type, result, moved)
    return result


def _funnel(direction: str, mode: str) -> Emit:
    def shifted(f: Function, a: Value, b: Value, count: Value) -> Value:
        if mode == "wrap":
            near = emit(f, "and", count.type, count, f.const(count.type, 31))
        else:
            near = f.overloaded("llvm.umin", count, f.const(count.type, 32))
        low, high, near = (f.convert("zext", x, "i64") for x in (a, b, near))
        both = emit(f, "or", low.type, emit(f, "shl", low.type, high, f.const(low.type, 32)), low)
        if direction == "l":
            both = emit(f, "lshr", low.type, emit(f, "shl", low.type, both, near), f.const(low.type, 32))
        else:
            both = emit(f, "lshr", low.type, both, near)
        return f.convert("trunc", both, "i32")

    return shifted


# Those whose last operand is a constant, as a Python number.
WITH_CONSTANT: dict[str, Emit] = {"lop3.b32": _lop3, "prmt.b32": _prmt}
_PLAIN: dict[str, Emit] = {
    **WITH_CONSTANT,
    **{f"shf.{way}.{mode}.b32": _funnel(way, mode) for way in "lr" for mode in ("wrap", "clamp")},
}

# ---- comparisons ----


def _setp(words: Sequence[str]) -> Emit | None:
    """One result, or with `both` its complement as well."""
    compares, *joins, kind = words
    if len(joins) > 1 or (joins and joins[0] not in ("and", "or", "xor")):
        return None
    if kind in ("f32", "f64"):
        text = f"fcmp {_FLOATS[compares]}" if compares in _FLOATS else ""
    elif kind[:1] in ("u", "s", "b") and kind[1:] in ("16", "32", "64"):
        order = _UNSIGNED.get(compares, compares)
        text = f"icmp {order}" if order in ("eq", "ne") else ""
        if order in _ORDER:
            text = f"icmp {'s' if kind[0] == 's' else 'u'}{order}"
    else:
        text = ""
    if not text:
        return None

    def compared(f: Function, a: Value, b: Value, *c: Value, both: bool = False) -> Value | tuple[Value, ...]:
        first = compare(f, text, a, b)
        results: tuple[Value, ...] = (first, flipped(f, first)) if both else (first,)
        if joins:
            results = tuple(emit(f, joins[0], each.type, each, c[0]) for each in results)
        return results if both else results[0]

    return compared


# ---- floats ----


def _floating(name: str, words: Sequence[str], has_fma: bool) -> Emit | None:
    if list(words) in ([], ["rn"]) and name in ("add", "sub", "mul"):
        return lambda f, a, b: emit(f, f"f{name}", a.type, a, b)
    if list(words) == ["rn"] and name in ("fma", "mad"):
        return (lambda f, a, b, c: f.fma(a, b, c)) if has_fma else None
    if list(words) == ["rn"] or (list(words) == ["full"] and name == "div"):
        if name == "div":
            return lambda f, a, b: emit(f, "fdiv", a.type, a, b)
        if name == "rcp":
            return lambda f, a: emit(f, "fdiv", a.type, f.const(a.type, 1.0), a)
        if name == "sqrt":
            return lambda f, a: f.overloaded("llvm.sqrt", a)
    if words:
        return None
    if name == "selp":
        return _selp
    if name == "neg":
        return lambda f, a: emit(f, "fneg", a.type, a)
    if name == "abs":
        return lambda f, a: f.overloaded("llvm.fabs", a)
    if name in ("min", "max"):
        return _extreme(name)
    return None


def _extreme(name: str) -> Emit:
    """The other operand where one is NaN; -0 is less than +0."""
    text = "fcmp olt" if name == "min" else "fcmp ogt"

    def picked(f: Function, a: Value, b: Value) -> Value:
        integers = lanes("i32" if element_of(a.type) == "float" else "i64")
        result = f.select(compare(f, text, a, b), a, b)
        result = f.select(compare(f, "fcmp uno", b, b), a, result)
        result = f.select(compare(f, "fcmp uno", a, a), b, result)
        sides = f.bitcast(a, integers), f.bitcast(b, integers)
        joined = f.bitcast(emit(f, "or" if name == "min" else "and", integers, *sides), a.type)
        zero = f.zero(a.type)
        zeros = emit(f, "and", lanes("i1"), compare(f, "fcmp oeq", a, b), compare(f, "fcmp oeq", result, zero))
        return f.select(zeros, joined, result)

    return picked


# ---- conversions ----


def _convert(words: Sequence[str]) -> Emit | None:
    *how, to, of = words
    whole = {f"{kind}{bits}" for kind in "us" for bits in (8, 16, 32, 64)}
    wide = {"f32": "float", "f64": "double"}
    if not how and to in whole and of in whole:
        element = f"i{to[1:]}"
        if int(to[1:]) <= int(of[1:]):
            return lambda f, a: f.convert("trunc", a, element)
        return lambda f, a: f.convert("sext" if of[0] == "s" else "zext", a, element)
    if how == ["rn"] and to in wide and of in whole:
        return lambda f, a: f.convert("sitofp" if of[0] == "s" else "uitofp", a, wide[to])
    if not how and (to, of) == ("f64", "f32"):
        return lambda f, a: f.convert("fpext", a, "double")
    if how == ["rn"] and (to, of) == ("f32", "f64"):
        return lambda f, a: f.convert("fptrunc", a, "float")
    if not how and to == of and to in wide:
        return lambda f, a: a
    if how == ["rzi"] and of in wide and to in ("s32", "u32") and (of, to) != ("f64", "u32"):
        return _cut(to, of)
    return None


def _cut(to: str, of: str) -> Emit:
    """Round toward zero and clamp; NaN is 0, of f64 the number with only the top bit set."""
    low, high = (-(2.0**31), 2.0**31) if to == "s32" else (0.0, 2.0**32)
    least, most = (-(2**31), 2**31 - 1) if to == "s32" else (0, -1)

    def converted(f: Function, a: Value) -> Value:
        wide = f.convert("fpext", a, "double")
        nan = compare(f, "fcmp uno", wide, wide)
        below = compare(f, "fcmp ole", wide, f.const(wide.type, low))
        above = compare(f, "fcmp oge", wide, f.const(wide.type, high))
        outside = emit(f, "or", nan.type, emit(f, "or", nan.type, below, above), nan)
        inside = f.convert("trunc", f.convert("fptosi", f.select(outside, f.zero(wide.type), wide), "i64"), "i32")
        result = f.select(below, f.const(inside.type, least), f.select(above, f.const(inside.type, most), inside))
        return f.select(nan, f.const(inside.type, 0 if of == "f32" else -(2**31)), result)

    return converted
