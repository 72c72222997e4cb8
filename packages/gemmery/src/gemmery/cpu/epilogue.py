"""The operations of an epilogue on vectors of float32 or float64, and the functions among them that no CPU has.

gelu(x) = x Phi(x) and silu(x) = x / (1 + exp(-x)), both by exponentials of negative numbers, so that nothing overflows
and the small results of negative x keep their relative accuracy. The relative error is at most 7 u for gelu, 4 u for
silu and sigmoid, 3 u for exp, 4 u for log, 6 u for tanh and erf, down to the smallest normal number, in gelu and silu
of what multiplies x; u is 2**-24 or 2**-53. NaN stays, gelu and silu of -inf are NaN (-inf times 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gemmery import dtypes
from gemmery.cpu.convert import narrow, store_as, widen
from gemmery.cpu.ir import Function, Value
from gemmery.cpu.ir_types import SIZES, element_of, lanes_of, vector, with_element
from gemmery.dtypes import DType
from gemmery.epilogues.graph import COMPARISONS, EpilogueGraph, Node, usual
from gemmery.tuples import NamedTuple


class _Format(NamedTuple):
    """The constants of the approximations for a floating-point type."""

    integer: str
    exponent_at: int  # bits below the exponent
    bias: int
    upper: int  # mask that keeps few enough bits of a number for its square to be exact
    ln2: tuple[float, float]  # ln 2 in two parts; n times the first is exact
    terms: int  # terms of the series of exp on |r| <= ln(2) / 2; the next one is below u / 8
    tail: tuple[float, ...]  # coefficients of `_upper_tail`
    silent: tuple[float, float]  # smallest t for which exp(-t * t / 2) and exp(-t) are zero
    largest: float  # exp of it is infinite
    saturated: float  # tanh of it is 1
    logarithm: int  # terms of the series of artanh
    erf: int  # terms of the series of erf up to 1
    up: int  # 2**up times exp of a negative number that is not silent is a normal number

    @property
    def rounder(self) -> float:
        """Adding this rounds a number to an integer, which is then in the lowest bits."""
        return float(3 << (self.exponent_at - 1))


# (t + 4) exp(t * t / 2) (1 - Phi(t)) as a polynomial in s = (t - 4) / (t + 4), which maps 0 ... inf to -1 ... 1: the
# Chebyshev interpolant of that degree, computed with 50 digits, in powers of s; its relative error is 1e-9 and 5e-17.
# The mapping is that of Shepherd and Laframboise, Math. Comp. 36 (1981), 249-253.
_TAIL_FLOAT = (
    0.75528514, -0.6078966, 0.38713738, -0.18652199, 0.060396645, -0.007538689, -0.003479943, 0.0016242476,
    0.00013364042, -0.00021777107, -1.7259923e-06, 2.1979044e-05,
)  # fmt: skip
_TAIL_DOUBLE = (
    0.7552851304157514, -0.6078966419718921, 0.3871374007422269, -0.18652185795965176, 0.06039657489034808,
    -0.007540188966996623, -0.0034796923564507777, 0.0016308184627789688, 0.00013334420755153713,
    -0.00023109498674854848, -1.9076685133202144e-06, 3.514498813160344e-05, 7.145802592193101e-07,
    -5.921289422115028e-06, -6.249141680900659e-07, 1.0242368988565404e-06, 2.6468456126470355e-07,
    -1.5916439391794904e-07, -7.874694430470838e-08, 1.7419125179458914e-08, 1.6051942514282524e-08,
    -4.1774838524334276e-10, -1.6858481937278877e-09, -1.493647950995503e-10,
)  # fmt: skip
_LN2_FLOAT = (0.693359375, -2.12194440e-4)
_LN2_DOUBLE = (float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33"))
_FORMATS = {
    "float": _Format("i32", 23, 127, 0xFFFFF000, _LN2_FLOAT, 8, _TAIL_FLOAT, (18.0, 110.0), 90.0, 10.0, 5, 12, 110),
    "double": _Format(
        "i64", 52, 1023, 0xFFFFFFFFF8000000, _LN2_DOUBLE, 14, _TAIL_DOUBLE, (40.0, 750.0), 710.0, 20.0, 12, 20, 140
    ),
}


def finished(f: Function, name: str, total: Value, bias: Value | None = None) -> Value:
    """Return the usual epilogue of this name of sums in registers, one or a vector; `bias` is that of their columns."""
    graph = usual(name)
    leaves = {"sum": total, "operand": bias or total}
    return lower(f, graph, total.type, lambda node: leaves[node.op])(graph.outputs[0].node)


def bias_of(
    f: Function, element: str, bias: Value, step: Value, first: Value | int, lanes: int, mask: Value | None,
    parts: int = 1,
) -> Value:  # fmt: skip
    """Load the bias of a vector of columns from `first` on, numbers of `parts`; a step of 0 repeats one of them."""
    number = f.load(vector(parts, element), bias)
    row = f.var(f.shuffle(number, number, [lane % parts for lane in range(lanes)]))
    with f.if_(step.differs(0)):
        row.value = f.load_masked(vector(lanes, element), bias + first * SIZES[element], mask)
    return row.value


def lower(f: Function, graph: EpilogueGraph, type_: str, leaf: Callable[[Node], Value]) -> Callable[[int], Value]:
    """Return the function that computes a node of a graph, once, in vectors of `type_`.

    `leaf` returns the values of sums, operands, numbers of rows and columns, and statistics.
    """
    values: dict[int, Value] = {}

    def compute(number: int) -> Value:
        waiting = [number]  # not by recursion: a graph may be deeper than Python's stack
        while waiting:
            node = graph.nodes[waiting[-1]]
            inputs = node.inputs if node.op == "cast" or node.op in _OPERATIONS else ()
            missing = [i for i in reversed(inputs) if i not in values]
            if missing:
                waiting += missing
            elif (place := waiting.pop()) not in values:
                if node.op == "constant":
                    values[place] = f.const(type_, node.number)
                elif node.op == "cast":
                    values[place] = rounded(f, values[inputs[0]], dtypes.get(node.value))
                else:
                    values[place] = _OPERATIONS[node.op](f, *map(values.__getitem__, inputs)) if inputs else leaf(node)
        return values[number]

    return compute


def _relu(f: Function, x: Value) -> Value:
    # A comparison that is false for NaN keeps NaN: max(x, 0) would drop it.
    return f.select(x < 0, f.zero(x.type), x)


def _gelu(f: Function, x: Value) -> Value:
    tail = _upper_tail(f, _magnitude(f, x, _FORMATS[element_of(x.type)].silent[0]))
    return x * f.select(x < 0, tail, 1.0 - tail)


def _sigmoid(f: Function, x: Value) -> Value:
    return _keep_nan(f, x, _share(f, x))


def _share(f: Function, x: Value) -> Value:
    """Return 1 / (1 + exp(-x)), some number for NaN: both sides of the fraction times a power of two."""
    form = _FORMATS[element_of(x.type)]
    whole = 1.0 if _has_scale(f, x) else 2.0**form.up
    t = _magnitude(f, x, form.silent[1])
    small = _exp(f, f.emit(x.type, f"fneg {t}"), up=form.up)
    return _divide(f, f.select(x < 0, small, f.const(x.type, whole)), small + whole)


def exponential(f: Function, x: Value) -> Value:
    """Return exp(x): infinity beyond the largest number."""
    low, high = _FORMATS[element_of(x.type)].silent[1] * -1, _FORMATS[element_of(x.type)].largest
    limited = f.select(x < low, f.const(x.type, low), f.select(x > high, f.const(x.type, high), x))
    return _exp(f, limited)


def logarithm(f: Function, x: Value) -> Value:
    """Return log(x) = e ln 2 + 2 artanh((m - 1) / (m + 1)) for x = m 2**e, m from sqrt(1/2) to sqrt(2)."""
    form = _FORMATS[element_of(x.type)]
    subnormal = x < 2.0 ** (1 - form.bias)
    up = form.exponent_at + 9
    bits = _bits(f, f.select(subnormal, x * 2.0**up, x))
    half = _bits(f, f.const(x.type, math.sqrt(0.5)))
    # The exponent as a float: added to the bits of `rounder`, an integer is a number.
    shifted = ((bits + (form.bias << form.exponent_at) - half) >> form.exponent_at) - form.bias
    m = f.bitcast(bits - (shifted << form.exponent_at), x.type)
    e = f.bitcast(shifted + _bits(f, f.const(x.type, form.rounder)), x.type) - form.rounder
    e = f.select(subnormal, e - float(up), e)
    s = _divide(f, m - 1.0, m + 1.0)
    series = _polynomial(f, tuple(2 / (2 * i + 1) for i in range(form.logarithm)), s * s)
    value = e * form.ln2[0] + f.fma(s, series, e * form.ln2[1])
    infinite, nothing = f.const(x.type, math.inf), f.zero(x.type)
    value = f.select(x.equals(math.inf), infinite, f.select(x.equals(0), nothing - infinite, value))
    return f.select(x >= 0, value, f.const(x.type, math.nan))


def _tanh(f: Function, x: Value) -> Value:
    """Return t / (t + 2) for t = exp(2 |x|) - 1, which small |x| get without cancellation."""
    form = _FORMATS[element_of(x.type)]
    y = _magnitude(f, x, form.saturated) * 2.0
    rounded = f.fma(y, f.const(x.type, 1 / math.log(2)), f.const(x.type, form.rounder))
    n = rounded - form.rounder
    rest = (y - n * form.ln2[0]) - n * form.ln2[1]
    series = rest * _polynomial(f, tuple(1 / math.factorial(i + 1) for i in range(form.terms)), rest)
    integer = _bits(f, rounded) - _bits(f, f.const(x.type, form.rounder))
    power = f.bitcast((integer + form.bias) << form.exponent_at, x.type)
    t = f.fma(power, series, power - 1.0)
    value = _divide(f, t, t + 2.0)
    return _keep_nan(f, x, f.select(x < 0, f.zero(x.type) - value, value))


def _erf(f: Function, x: Value) -> Value:
    """Return the error function: by its series up to 1, else by the upper tail of a normal distribution."""
    form = _FORMATS[element_of(x.type)]
    t = _magnitude(f, x, form.silent[0] / math.sqrt(2))
    inner = f.select(t < 1.0, t, f.const(x.type, 1.0))
    terms = tuple(2 / math.sqrt(math.pi) * (-1.0) ** i / (math.factorial(i) * (2 * i + 1)) for i in range(form.erf))
    near = inner * _polynomial(f, terms, inner * inner)
    far = 1.0 - _upper_tail(f, t * math.sqrt(2)) * 2.0
    value = f.select(t < 1.0, near, far)
    return _keep_nan(f, x, f.select(x < 0, f.zero(x.type) - value, value))


def _rint(f: Function, x: Value) -> Value:
    """Return the nearest integer: adding the least number whose unit is 1 rounds a magnitude below it."""
    least = 2.0 ** _FORMATS[element_of(x.type)].exponent_at
    size = f.overloaded("llvm.fabs", x)
    whole = (size + least) - least
    return f.select(size < least, f.select(x < 0, f.emit(x.type, f"fneg {whole}"), whole), x)


def _keep_nan(f: Function, x: Value, value: Value) -> Value:
    return f.select(x.differs(x), x, value)


def larger(f: Function, x: Value, y: Value) -> Value:
    """Return the larger of x and y, NaN where one is."""
    return f.select((x > y) | x.differs(x), x, y)


def _smaller(f: Function, x: Value, y: Value) -> Value:
    return f.select((x < y) | x.differs(x), x, y)


def rounded(f: Function, x: Value, memory: DType) -> Value:
    """Return numbers rounded to those of an element type: of one byte, numbers beyond the largest become that."""
    element = element_of(x.type)
    if memory.size >= (8 if element == "double" else 4):
        return x
    if memory.kind == "i":
        whole = _rint(f, x)
        limited = f.select(whole < -128.0, f.const(x.type, -128), f.select(whole > 127.0, f.const(x.type, 127), whole))
        return f.select(x.differs(x), f.zero(x.type), limited)
    if memory.size == 1:
        single = _to_float8(f, to_single(f, x), memory)
        return f.convert("fpext", single, element)
    single = f.convert("fptrunc", x, "float") if memory.size == 4 else narrow(f, to_single(f, x), memory)
    return widen(f, single, memory, element)


def to_single(f: Function, x: Value) -> Value:
    """Return float64 as float32 rounded to odd, which any narrower type then rounds as if once; float32 as it is.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Trans. Computers 57(4), 2008.
    """
    if element_of(x.type) == "float":
        return x
    near = f.convert("fptrunc", x, "float")
    back = f.convert("fpext", near, "double")
    magnitude, own = (f.select(y < 0, f.zero(y.type) - y, y) for y in (back, x))
    bits = f.bitcast(near, with_element(x.type, "i32"))
    bits = f.select(magnitude > own, bits - 1, bits)
    return f.bitcast(f.select(back.differs(x), bits | 1, bits), near.type)


def _to_float8(f: Function, x: Value, memory: DType) -> Value:
    """Return float32 rounded to a float of 8 bits: above its subnormal numbers by integers, among them by addition."""
    shift = 23 - memory.fraction
    bits = _bits(f, x)
    normal = (bits + ((bits >> shift) & 1) + ((1 << (shift - 1)) - 1)) & -(1 << shift)
    step = 1.5 * 2.0 ** (23 + memory.normal - memory.fraction)
    size = f.bitcast(bits & 0x7FFFFFFF, x.type)
    value = f.select(size < 2.0**memory.normal, (x + step) - step, f.bitcast(normal, x.type))
    most = (2 - 2.0**-memory.fraction * (1 + (memory.name == "e4m3"))) * 2.0 ** (8 if memory.name == "e4m3" else 15)
    limited = f.select(value > most, f.const(x.type, most), f.select(value < -most, f.const(x.type, -most), value))
    return _keep_nan(f, x, limited)


def store_output(f: Function, x: Value, memory: DType, at: Value, mask: Value | None = None) -> None:
    """Convert a result to its type in memory, rounding once, and store it."""
    if memory.size == 1:
        f.store_masked(codes_of(f, rounded(f, x, memory), memory), at, mask)
    elif memory.size == 2:
        store_as(f, to_single(f, x), memory, at, mask)
    else:
        f.store_masked(f.convert("fpext" if memory.size == 8 else "fptrunc", x, memory.llvm), at, mask)


def codes_of(f: Function, x: Value, memory: DType) -> Value:
    """Return numbers that `rounded` returned as bytes in memory: int8, or the bits of a float of 8 bits."""
    if memory.kind == "i":
        return f.convert("trunc", f.convert("fptosi", x, "i32"), "i8")
    single = f.convert("fptrunc", x, "float")
    bits = _bits(f, single)
    size = f.bitcast(bits & 0x7FFFFFFF, single.type)
    shift = 23 - memory.fraction
    normal = ((bits & 0x7FFFFFFF) - ((126 + memory.normal) << 23)) >> shift
    small = f.convert("fptosi", size * 2.0 ** (memory.fraction - memory.normal), "i32")
    code = f.select(size < 2.0**memory.normal, small, normal)
    code = f.select(single.differs(single), f.const(code.type, 0x7F), code) | ((bits >> 24) & 0x80)
    return f.convert("trunc", code, "i8")


def _upper_tail(f: Function, t: Value) -> Value:
    """Return 1 - Phi(t) for t >= 0, the probability of a normal number above t."""
    form = _FORMATS[element_of(t.type)]
    # Rounding t * t would cost the exponential a relative error of t * t * u, so t * t is an exact square plus a rest.
    head = f.bitcast(_bits(f, t) & form.upper, t.type)
    decay = _exp(f, head * head * -0.5, (t - head) * (t + head) * -0.5, form.up)
    decay = decay if _has_scale(f, t) else decay * 2.0**-form.up
    inverse = _divide(f, f.const(t.type, 1), t + 4.0)
    return decay * (_polynomial(f, form.tail, (t - 4.0) * inverse) * inverse)


def _exp(f: Function, high: Value, low: Value | None = None, up: int = 0) -> Value:
    """Return exp(high + low), low the smaller; the result may be subnormal. Of negative numbers, 2**up times it.

    Where the CPU has an instruction for 2**n, it is not multiplied by 2**up.
    """
    form = _FORMATS[element_of(high.type)]
    total = high if low is None else high + low
    rounded = f.fma(total, f.const(high.type, 1 / math.log(2)), f.const(high.type, form.rounder))
    n = rounded - form.rounder
    ln2 = [f.const(high.type, -part) for part in form.ln2]
    rest = f.fma(n, ln2[0], high)
    rest = f.fma(n, ln2[1], rest) if low is None else rest + f.fma(n, ln2[1], low)
    return _scaled(f, _polynomial(f, tuple(1 / math.factorial(i) for i in range(form.terms)), rest), n, rounded, up)


def _has_scale(f: Function, x: Value) -> bool:
    """Return whether one instruction multiplies such vectors by 2**n."""
    return f.target.isa == "avx512" and lanes_of(x.type) * SIZES[element_of(x.type)] == 64


def _scaled(f: Function, x: Value, n: Value, rounded: Value, up: int) -> Value:
    """Return x 2**n, rounded once, or x 2**(n + up), which is normal; `rounded` is n plus the rounder."""
    form, element = _FORMATS[element_of(x.type)], element_of(x.type)
    if _has_scale(f, x):
        suffix = "ps" if element == "float" else "pd"
        every = Value(f, f"i{lanes_of(x.type)}", "-1")
        return f.intrinsic(f"llvm.x86.avx512.mask.scalef.{suffix}.512", x.type, x, n, x, every, f.const("i32", 4))
    integer = _bits(f, rounded) - _bits(f, f.const(x.type, form.rounder))
    if up:
        return x * f.bitcast((integer + (form.bias + up)) << form.exponent_at, x.type)
    half = integer >> 1  # without the sign, which the shift below would lose
    for part in (half, integer - half):
        x = x * f.bitcast((part + form.bias) << form.exponent_at, x.type)
    return x


def _polynomial(f: Function, coefficients: tuple[float, ...], x: Value) -> Value:
    """Return the sum of coefficients[i] x**i, by Horner's rule."""
    total = f.const(x.type, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = f.fma(total, x, f.const(x.type, coefficient))
    return total


def _magnitude(f: Function, x: Value, most: float) -> Value:
    """Return the smaller of |x| and `most`; `most` for NaN."""
    t = f.overloaded("llvm.fabs", x)
    return f.select(t < most, t, f.const(x.type, most))


def _bits(f: Function, x: Value) -> Value:
    return f.bitcast(x, with_element(x.type, _FORMATS[element_of(x.type)].integer))


def _divide(f: Function, x: Value, y: Value) -> Value:
    return f.emit(x.type, f"fdiv {x}, {y.text}")


_FUNCTIONS: dict[str, Callable[[Function, Value], Value]] = {
    "relu": _relu, "gelu": _gelu, "sigmoid": _sigmoid, "exp": exponential, "log": logarithm, "tanh": _tanh,
    "erf": _erf, "rint": _rint,
    "silu": lambda f, x: x * _share(f, x),
    "sqrt": lambda f, x: f.overloaded("llvm.sqrt", x),
    "rsqrt": lambda f, x: _divide(f, f.const(x.type, 1), f.overloaded("llvm.sqrt", x)),
    "negative": lambda f, x: f.emit(x.type, f"fneg {x}"),
    "absolute": lambda f, x: f.overloaded("llvm.fabs", x),
    "not": lambda f, x: x ^ 1,
}  # fmt: skip
_COMPARED: tuple[Callable[[Value, Value], Value], ...] = (
    lambda x, y: x < y, lambda x, y: x <= y, lambda x, y: x > y, lambda x, y: x >= y,
    lambda x, y: x.equals(y), lambda x, y: x.differs(y),
)  # fmt: skip
_OPERATIONS: dict[str, Callable[..., Value]] = {
    **_FUNCTIONS,
    "add": lambda f, x, y: x + y, "subtract": lambda f, x, y: x - y, "multiply": lambda f, x, y: x * y,
    "divide": _divide, "minimum": _smaller, "maximum": larger,
    "and": lambda f, x, y: x & y, "or": lambda f, x, y: x | y,
    "where": lambda f, condition, x, y: f.select(condition, x, y),
    **{op: (lambda f, x, y, how=how: how(x, y)) for op, how in zip(COMPARISONS, _COMPARED, strict=True)},
}  # fmt: skip
