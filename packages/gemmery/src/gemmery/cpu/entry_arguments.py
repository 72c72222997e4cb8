"""The arguments of a call of the compiled builtins: positions and names -> the record of a call."""

from __future__ import annotations

from gemmery import keywords
from gemmery.cpu import entry_layout as layout
from gemmery.cpu import objects
from gemmery.cpu.abi import Args
from gemmery.cpu.atomics import call
from gemmery.cpu.entry_layout import ARGUMENTS, CALL, HEAD, OPERAND, at
from gemmery.cpu.ir import Function, Module, Value, Var

# Positions and names of the arguments, by builtin: at least as many positions as the second number.
POSITIONS = {
    "matmul": (("a", "b", "out"), 2),
    "gemm": (("alpha", "a", "b", "beta", "old"), 3),
    "gemv": (("a", "b", "old"), 2),
    "einsum": (("dtype", "a", "b"), 3),
    "tensordot": (("a", "b", "dtype"), 2),
    "vecdot": (("a", "b"), 2),
}
NAMES = {
    "matmul": {name: name for name in ("out", "bias", "activation", "dtype", "threads", "semiring")},
    "gemm": {"beta": "beta", "c": "old", "out": "out", "threads": "threads"},
    "gemv": {"y": "old", "alpha": "alpha", "beta": "beta", "out": "out", "threads": "threads"},
}
for _name in layout.CONTRACTION:  # with options they are Python's
    NAMES[_name] = {}
TENSOR = 2  # what `read` returns for a tensor
_EXACT = 1 << 53  # integers up to this have a double


def same(f: Function, x: Value, y: Value) -> Value:
    """Compare addresses."""
    return f.emit("i1", f"icmp eq {x}, {y.text}")


def read(f: Function, head: Args, x: Value, record: Value) -> Value:
    """Fill an operand's record; return whether x is an ndarray, no subclass, whose dtype has no metadata.

    A result inherits the metadata of a dtype, so those that have some are left to Python.
    """
    good = f.var(f.const("i1", 0))
    with f.if_(same(f, f.load("ptr", x + objects.TYPE), head.array_type)):
        descr, data = f.load("ptr", x + objects.DESCR), f.load("ptr", x + objects.DATA)
        operand = Args(f, record, OPERAND)
        operand.object, operand.data = x, data
        operand.ndim = f.convert("zext", f.load("i32", x + objects.NDIM), "i64")
        operand.shape, operand.strides = f.load("ptr", x + objects.SHAPE), f.load("ptr", x + objects.STRIDES)
        operand.element, operand.unit = f.load("i64", descr + objects.ELEMENT), 1
        operand.size = f.load("i64", descr + objects.SIZE)
        operand.flags = f.convert("zext", f.load("i32", x + objects.FLAGS), "i64")
        good.value = f.load("i64", descr + objects.METADATA).equals(0) & (f.is_null(data) ^ True)
    return good.value


def unpacked(f: Function, head: Args, x: Value) -> Value:
    """Return the array to be read in the place of an operand that was packed; any other operand as it is."""
    array = f.var(x)
    with f.if_(same(f, f.load("ptr", x + objects.TYPE), head.packed_type)):
        slot = f.load("ptr", x + objects.FIRST_SLOT)
        array.value = f.select(f.is_null(slot), x, slot)  # NULL in an object that was never made whole
    return array.value


def define_read(module: Module) -> None:
    """Define `read` for the operands that few calls have: 1 for an array, TENSOR for a tensor, else 0."""
    with module.function("read", "table", "x", "record", local=True, returns="i64") as f:
        head = Args(f, f["table"], HEAD)
        kind = f.var(f.convert("zext", read(f, head, f["x"], f["record"]), "i64"))
        with f.if_(kind.value.equals(0) & (f.is_null(head.tensors) ^ True)):
            kind.value = call(f, "i64", "read_tensor", head.tensors, f["x"], f["record"]) * TENSOR
        f.ret(kind.value)


def define_number(module: Module) -> None:
    """Define `number(table, x, record)`: a double, an integer, whether both are exact, the imaginary part.

    It reads Python's float, int and complex, and NumPy's float64 and float32; returns 0 for other objects, and for
    integers without a double.
    """
    with module.function("number", "table", "x", "record", local=True, returns="i64") as f:
        head, x, record = Args(f, f["table"], HEAD), f["x"], f["record"]
        type_, good = f.load("ptr", x + objects.TYPE), f.var(f.index(0))
        value, imag = f.var(f.const("double", 0)), f.var(f.const("double", 0))
        is_double = same(f, type_, head.float_type) | same(f, type_, head.double_type)
        is_single, is_complex = same(f, type_, head.single_type), same(f, type_, head.complex_type)
        with f.if_(is_double | is_complex):
            value.value = f.load("double", x + objects.FLOAT_VALUE)
        with f.if_(is_single):
            value.value = f.convert("fpext", f.load("float", x + objects.FLOAT_VALUE), "double")
        with f.if_(is_complex):
            imag.value = f.load("double", x + (objects.FLOAT_VALUE + 8))
        f.store(imag.value, record + 24)
        with f.if_(is_double | is_single | is_complex):
            number = value.value
            whole = f.var(f.index(0))
            with f.if_((number <= float(_EXACT)) & (number >= float(-_EXACT))):
                whole.value = f.convert("fptosi", number, "i64")
            f.store(number, record)
            f.store(whole.value, record + 8)
            exact = f.convert("sitofp", whole.value, "double").equals(number) & imag.value.equals(0)
            f.store(f.convert("zext", exact, "i64"), record + 16)
            good.value = 1
        with f.else_(), f.if_(same(f, type_, head.int_type)):
            overflow = f.buffer(8)
            integer = f.result_of(head.integer, "i64", x, overflow)
            f.store(f.convert("sitofp", integer, "double"), record)
            f.store(integer, record + 8)
            f.store(f.index(1), record + 16)
            small = (integer <= _EXACT) & (integer >= -_EXACT) & f.load("i32", overflow).equals(0)
            good.value = f.convert("zext", small, "i64")
        f.ret(good.value)


def parse(f: Function, head: Args, builtin: str, arguments: Value) -> Value:
    """Fill in the arguments of METH_FASTCALL; return whether every one has a place of its own."""
    positions, least = POSITIONS[builtin]
    args, count, names = f["args"], f["count"], f["names"]
    slots = Args(f, arguments, ARGUMENTS)
    for name, _ in ARGUMENTS:
        setattr(slots, name, f.null)
    good = f.var((count >= least) & (count <= len(positions)))
    with f.if_(good.value):
        for i, name in enumerate(positions):
            if i < least:
                setattr(slots, name, f.load("ptr", args + 8 * i))
            else:
                with f.if_(count > i):
                    setattr(slots, name, f.load("ptr", args + 8 * i))
        with f.if_(f.is_null(names) ^ True), f.loop(0, f.load("i64", names + objects.TUPLE_SIZE)) as number:
            _keyword(f, head, builtin, arguments, number, good)
    return good.value


def _keyword(f: Function, head: Args, builtin: str, arguments: Value, i: Value, good: Var) -> None:
    """Put the keyword argument number i in its place."""
    name = f.load("ptr", f["names"] + objects.TUPLE_ITEMS + i * 8)
    passed = f.load("ptr", f["args"] + (f["count"] + i) * 8)
    offset = f.index(-1)
    for keyword, slot in NAMES[builtin].items():
        offset = f.select(same(f, name, getattr(head, f"name_{keyword}")), f.index(at(ARGUMENTS, slot)), offset)
    with f.if_(offset >= 0):
        good.value = good.value & f.is_null(f.load("ptr", arguments + offset))
        f.store(passed, arguments + offset)
    with f.else_():
        default = f.const("i1", 0)
        if NAMES[builtin]:  # it takes its other options with their defaults
            for keyword in sorted(keywords.NAMES[builtin] - NAMES[builtin].keys()):
                usual = same(f, passed, head.none if keywords.DEFAULTS[keyword] is None else head.false)
                default = default | same(f, name, getattr(head, f"name_{keyword}")) & usual
        good.value = good.value & default


def operands(f: Function, head: Args, builtin: str, table: Value, arguments: Value, record: Value) -> Value:
    """Fill in the record of a call from its arguments; return whether the entry can take it."""
    slots, fields = Args(f, arguments, ARGUMENTS), Args(f, record, CALL)
    fields.options, fields.raw, fields.bias_kind, fields.beta = 0, 0, layout.NO_BIAS, f.const("double", 0)
    fields.out_object = fields.old_object = fields.bias_object = f.null
    fields.out_ndim = fields.bias_ndim = 0
    fields.tensors, fields.dtype, fields.threads = 0, f.null, f.null
    if builtin in ("matmul", "gemm"):
        slots.b = unpacked(f, head, slots.b)
    good = f.var(read(f, head, slots.a, record + at(CALL, "a_object")))
    with f.if_(good.value):
        good.value = read(f, head, slots.b, record + at(CALL, "b_object"))
    with f.if_(good.value ^ True):
        good.value = f.const("i1", 1)
        for name in ("a", "b"):
            _read_any(f, table, getattr(slots, name), record, name, good)
    a_ndim, b_ndim = fields.a_ndim, fields.b_ndim
    if builtin == "matmul":
        good.value = good.value & (a_ndim >= 1) & (b_ndim >= 1)
    elif builtin not in layout.CONTRACTION:
        shapes = (a_ndim >= 2) & (b_ndim >= 2) if builtin == "gemm" else a_ndim.equals(2) & b_ndim.equals(1)
        good.value = good.value & shapes
    _optional(f, head, table, slots.out, record, "out", good)
    if builtin == "matmul":
        _epilogue(f, head, table, slots, record, good)
    elif builtin in layout.CONTRACTION:
        fields.options = layout.CONTRACTION[builtin]
        fields.dtype = f.select(f.is_null(slots.dtype), head.none, slots.dtype)
    else:
        _scalars(f, head, table, slots, record, good)
    with f.if_(_passed(f, head, slots.threads)):
        fields.threads, fields.options = slots.threads, fields.options | layout.THREADS
    with f.if_(good.value & fields.tensors.differs(0)):
        good.value = call(f, "i64", "recorded", head.tensors).equals(0)
    return good.value


def _passed(f: Function, head: Args, x: Value) -> Value:
    return (f.is_null(x) ^ True) & (same(f, x, head.none) ^ True)


def _optional(f: Function, head: Args, table: Value, x: Value, record: Value, name: str, good: Var) -> None:
    """Read an array that may be missing or None."""
    with f.if_(_passed(f, head, x)):
        _read_any(f, table, x, record, name, good)


def _read_any(f: Function, table: Value, x: Value, record: Value, name: str, good: Var) -> None:
    """Read an array or a tensor, unless an argument has failed."""
    fields = Args(f, record, CALL)
    with f.if_(good.value):
        kind = call(f, "i64", "read", table, x, record + at(CALL, f"{name}_object"))
        good.value = kind.differs(0)
        fields.tensors = fields.tensors | kind & TENSOR


def _epilogue(f: Function, head: Args, table: Value, slots: Args, record: Value, good: Var) -> None:
    """Read the bias, the activation, the semiring and the dtype of a matmul."""
    fields = Args(f, record, CALL)
    bias, activation, dtype = slots.bias, slots.activation, slots.dtype
    with f.if_(_passed(f, head, dtype)):
        fields.dtype, fields.options = dtype, layout.WIDENS
    with f.if_(_passed(f, head, bias)):
        with f.if_(same(f, f.load("ptr", bias + objects.TYPE), head.float_type)):
            fields.bias_number, fields.bias_kind = f.load("double", bias + objects.FLOAT_VALUE), layout.NUMBER_BIAS
        with f.else_():
            fields.bias_kind = layout.ARRAY_BIAS
            _optional(f, head, table, bias, record, "bias", good)
    for passed, names, shift in (
        (activation, objects.ACTIVATIONS, layout.ACTIVATION_SHIFT),
        (slots.semiring, objects.SEMIRINGS, layout.SEMIRING_SHIFT),
    ):
        with f.if_(_passed(f, head, passed)):
            number = f.index(0)
            for i, name in enumerate(names, 1):
                number = f.select(same(f, passed, getattr(head, f"is_{name}")), f.index(i), number)
            good.value = good.value & number.differs(0)
            fields.options = fields.options | number << shift


def _scalars(f: Function, head: Args, table: Value, slots: Args, record: Value, good: Var) -> None:
    """Read alpha, beta and the C that beta multiplies, of gemm and gemv.

    Left to Python: alpha = 0, with which A and B are not read; a C that is not read, but may give the result its type.
    """
    fields = Args(f, record, CALL)
    zero = f.const("double", 0)
    fields.alpha, fields.alpha_integer, fields.beta_integer = f.const("double", 1), 1, 0
    fields.alpha_imag, fields.beta_imag = zero, zero
    integral = f.var(f.index(1))
    number = f.buffer(32)
    for name in ("alpha", "beta"):
        x = getattr(slots, name)
        with f.if_(good.value & (f.is_null(x) ^ True)):
            good.value = call(f, "i64", "number", table, x, number).differs(0)
            with f.if_(good.value):
                setattr(fields, name, f.load("double", number))
                setattr(fields, f"{name}_integer", f.load("i64", number + 8))
                setattr(fields, f"{name}_imag", f.load("double", number + 24))
                integral.value = integral.value & f.load("i64", number + 16)
    fields.integral = integral.value
    alpha, alpha_imag = fields.alpha, fields.alpha_imag.differs(0)
    beta = fields.beta.differs(0) | fields.beta_imag.differs(0)
    good.value = good.value & (alpha.differs(0) | alpha_imag)
    scales = f.convert("zext", alpha.differs(1) | alpha_imag | beta, "i64") * layout.SCALED
    fields.options = scales | f.convert("zext", beta, "i64") * layout.BETA
    old = slots.old
    has_old = _passed(f, head, old)
    is_out = same(f, old, fields.out_object)
    with f.if_(beta ^ True):
        good.value = good.value & ((has_old ^ True) | (is_out & fields.out_element.equals(fields.a_element)))
    with f.else_():
        good.value = good.value & has_old
        with f.if_(good.value & (is_out ^ True)):
            _read_any(f, table, old, record, "old", good)
