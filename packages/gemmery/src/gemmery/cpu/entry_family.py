"""Products of shapes that the table has not met: a kernel that takes every shape within limits, and a job made here.

Sizes and strides come from the arrays, as `arrange` finds them for Python: a batch that shares B is one product with
more rows, one that shares A (with one row) one with more columns.
"""

from __future__ import annotations

from gemmery.cpu import entry_layout as layout
from gemmery.cpu import symmetric
from gemmery.cpu.abi import Args
from gemmery.cpu.atomics import call
from gemmery.cpu.entry_layout import CALL, CLASS, ENTRY, MEMBER, at, size
from gemmery.cpu.entry_run import UNKNOWN, copy_words, special
from gemmery.cpu.ir import Function, Module, Value, Var
from gemmery.cpu.layout import JOB

# The product as the kernel sees it.
_NAMES = (
    "batch", "m", "n", "k", "a_batch", "a_row", "a_col", "b_batch", "b_row", "b_col", "c_batch", "c_row", "c_col",
)  # fmt: skip
SHAPE = tuple((name, "i64") for name in _NAMES)


def define_member(module: Module) -> None:
    """Define `member(table, call)`: the result of a call that a family takes, else UNKNOWN."""
    _define_shape(module)
    _define_class(module)
    with module.function("member", "table", "call", local=True, returns="ptr") as f:
        table, record = f["table"], f["call"]
        answer, shape, fields = f.var(special(f, UNKNOWN)), f.buffer(size(SHAPE) + 8), Args(f, record, CALL)
        few = (fields.a_ndim <= 3) & (fields.b_ndim <= 3)
        with f.if_(few & fields.a_element.equals(fields.b_element)):
            place = f.buffer(layout.ENTRY_BYTES)
            class_ = call(f, "ptr", "class", table, record, shape, place)
            with f.if_(f.is_null(class_) ^ True):
                often = f.var(f.index(layout.OFTEN))
                family = _family(f, class_, shape, often)
                with f.if_(f.is_null(family) ^ True), f.if_(_seldom(f, table, fields, shape, often.value)):
                    _entry(f, fields, class_, family, shape, place)
                    answer.value = call(f, "ptr", "prepared", table, record, place)
        f.ret(answer.value)


def _seldom(f: Function, table: Value, fields: Args, shape: Value, often: Value) -> Value:
    """Count the calls of this shape, by their work; return false at `often`, where Python makes an entry."""
    key_hash = fields.hash
    counter = table + layout.COUNTERS_AT + (key_hash >> (65 - layout.COUNTERS.bit_length())) * 16
    count = f.select(f.load("i64", counter, align=8).equals(key_hash), f.load("i64", counter + 8, align=8), f.index(0))
    f.store(key_hash, counter, align=8)
    after = count + 1 + (Args(f, shape, SHAPE).batch >> layout.PRODUCTS_BITS)
    f.store(after, counter + 8, align=8)
    return (count >= often) | (after < often)


def _define_class(module: Module) -> None:
    """Define `class(table, call, shape, place)`, which describes a product and its result, and returns its class."""
    with module.function("class", "table", "call", "shape", "place", local=True, returns="ptr") as f:
        fields, answer = Args(f, f["call"], CALL), f.var(f.null)
        good = f.var(call(f, "i64", "shape", f["call"], f["shape"], f["place"]))
        shape = Args(f, f["shape"], SHAPE)
        with f.if_(good.value.differs(0) & fields.bias_kind.equals(layout.ARRAY_BIAS)):
            good.value = _fits(f, fields, shape.n)
        with f.if_(good.value.differs(0)):
            b_layout = layout_of_b(f, shape, fields, "b_size")
            bias = f.select(fields.bias_kind.equals(layout.ARRAY_BIAS), fields.bias_element, f.index(0))
            key = (fields.a_element, fields.options, fields.bias_kind, bias, b_layout)
            total = key[0] * layout.FACTORS[0]
            for word, factor in zip(key[1:], layout.FACTORS[1:], strict=False):
                total = total + word * factor
            index = total >> (65 - layout.CLASSES.bit_length())
            with f.loop(0, layout.PROBES) as i:
                place = f["table"] + layout.CLASSES_AT + (index + i) * layout.CLASS_BYTES
                class_ = Args(f, place, CLASS)
                match = class_.families > 0
                for name, word in zip(layout.CLASS_KEY, key, strict=True):
                    match = match & getattr(class_, name).equals(word)
                with f.if_(match):
                    answer.value = place
        f.ret(answer.value)


def layout_of_b(f: Function, shape: Args, record: Args, size: str) -> Value:
    """Return the number of the layout of B, among LAYOUTS; the field `size` of a record has the bytes of an element."""
    by_rows = shape.n.equals(1) | shape.b_col.equals(getattr(record, size))
    by_columns = shape.k.equals(1) | shape.b_row.equals(getattr(record, size))
    row, col, neither = (f.index(layout.LAYOUTS.index(name)) for name in ("row", "col", "any"))
    return f.select(by_rows, row, f.select(by_columns, col, neither))


def _fits(f: Function, fields: Args, n: Value) -> Value:
    """Return 1 for a bias of one number, or of n contiguous ones."""
    good = f.var(fields.bias_ndim.equals(0))
    with f.if_(fields.bias_ndim.equals(1)):
        length, step = f.load("i64", fields.bias_shape), f.load("i64", fields.bias_strides) * fields.bias_unit
        good.value = length.equals(1) | (length.equals(n) & step.equals(fields.bias_size))
    return f.convert("zext", good.value, "i64")


def _define_shape(module: Module) -> None:
    """Define `shape(call, shape, place)`: sizes and strides, and the result's shape; 0 for what no family takes."""
    with module.function("shape", "call", "shape", "place", local=True, returns="i64") as f:
        fields, shape = Args(f, f["call"], CALL), Args(f, f["shape"], SHAPE)
        good = f.var(f.const("i1", 1))
        batches = {}
        for name in "ab":
            batches[name] = _operand(f, fields, shape, name)
        inner, a_count, b_count = f.load("i64", f["shape"] + size(SHAPE)), batches["a"], batches["b"]
        batch = f.max(a_count, b_count)
        for count in (a_count, b_count):
            good.value = good.value & (count.equals(1) | count.equals(batch))
        shape.batch = batch
        good.value = good.value & inner.equals(shape.k) & (batch > 0) & (shape.m > 0) & (shape.n > 0)
        with f.if_(good.value):
            _result(f, fields, shape, good)
        with f.if_(good.value & (shape.batch > 1)):
            _fold(f, fields, shape, good)
        f.ret(f.convert("zext", good.value, "i64"))


def _operand(f: Function, fields: Args, shape: Args, name: str) -> Value:
    """Read the sizes and strides of A or B; returns how many matrices it has. The k of B comes after the shape."""
    ndim: Value = getattr(fields, f"{name}_ndim")
    at_shape: Value = getattr(fields, f"{name}_shape")
    at_strides: Value = getattr(fields, f"{name}_strides")
    unit: Value = getattr(fields, f"{name}_unit")

    def last(words: Value, back: int) -> Value:
        return f.load("i64", words + (ndim - back) * 8)

    def stride(back: int) -> Value:
        return last(at_strides, back) * unit

    inner_at = f["shape"] + size(SHAPE)
    count, step = f.var(f.index(1)), f.var(f.index(0))
    with f.if_(ndim.equals(1)):
        if name == "a":
            shape.m, shape.a_row, shape.k, shape.a_col = 1, 0, last(at_shape, 1), stride(1)
        else:
            shape.n, shape.b_col, shape.b_row = 1, 0, stride(1)
            f.store(last(at_shape, 1), inner_at)
    with f.else_():
        if name == "a":
            shape.m, shape.a_row, shape.k, shape.a_col = last(at_shape, 2), stride(2), last(at_shape, 1), stride(1)
        else:
            shape.n, shape.b_col, shape.b_row = last(at_shape, 1), stride(1), stride(2)
            f.store(last(at_shape, 2), inner_at)
    with f.if_(ndim.equals(3)):
        count.value = last(at_shape, 3)
        step.value = f.select(count.value.equals(1), f.index(0), stride(3))
    setattr(shape, f"{name}_batch", step.value)
    return count.value


def _result(f: Function, fields: Args, shape: Args, good: Var) -> None:
    """Set the result's shape, and the strides of C: those of `out`, which must be row-major, or of a new array."""
    entry, element = Args(f, f["place"], ENTRY), fields.a_size
    lengths, ndim = f["place"] + at(ENTRY, "c_shape_0"), f.var(f.index(0))
    has_out = f.is_null(fields.out_object) ^ True
    has = (
        (fields.a_ndim.equals(3) | fields.b_ndim.equals(3), "batch"),
        (fields.a_ndim > 1, "m"),
        (fields.b_ndim > 1, "n"),
    )
    shape.c_col, shape.c_row = element, shape.n * element
    shape.c_batch = shape.m * shape.n * element
    out_shape, out_strides = fields.out_shape, fields.out_strides
    expected = f.index(0)
    for present, _ in has:
        expected = expected + f.convert("zext", present, "i64")
    good.value = (has_out ^ True) | (fields.out_element.equals(fields.a_element) & fields.out_ndim.equals(expected))
    for present, name in has:
        with f.if_(good.value & present):
            length = getattr(shape, name)
            f.store(length, lengths + ndim.value * 8)
            with f.if_(has_out):
                good.value = f.load("i64", out_shape + ndim.value * 8).equals(length)
                step = f.load("i64", out_strides + ndim.value * 8) * fields.out_unit
                # A dimension of length 1 has no stride: that of a new array stands for it.
                own = {"n": "c_col", "m": "c_row", "batch": "c_batch"}[name]
                setattr(shape, own, f.select(length.equals(1), getattr(shape, own), step))
            ndim.value = ndim.value + 1
    entry.c_ndim = ndim.value
    with f.if_(good.value & has_out):
        rows = shape.m.equals(1) | (shape.c_row >= shape.n * element)
        batches = shape.batch.equals(1) | (shape.c_batch >= shape.m * shape.c_row)
        good.value = shape.c_col.equals(element) & rows & batches


def _fold(f: Function, fields: Args, shape: Args, good: Var) -> None:
    """Take a batch that shares B as more rows, and one that shares A as more columns, as `arrange` does."""
    batch, one_row = shape.batch, shape.m.equals(1)
    walks = shape.a_batch.equals(shape.a_row * shape.m) & shape.c_batch.equals(shape.c_row * shape.m)
    with f.if_(shape.b_batch.equals(0) & (one_row | walks)):
        shape.a_row = f.select(one_row, shape.a_batch, shape.a_row)
        shape.c_row = f.select(one_row, shape.c_batch, shape.c_row)
        shape.m, shape.batch = shape.m * batch, 1
    with f.else_(), f.if_(shape.a_batch.equals(0)):
        one_column = shape.n.equals(1)
        walks = shape.b_batch.equals(shape.b_col * shape.n) & shape.c_batch.equals(shape.c_col * shape.n)
        # Of the columns that `arrange` would fold, those that make C column-major are Python's.
        folds = one_column | walks
        good.value = (folds ^ True) | (fields.options < 1 << layout.ACTIVATION_SHIFT) & fields.bias_kind.equals(0)
        good.value = good.value & ((folds ^ True) | shape.c_batch.equals(shape.c_col * shape.n))
        with f.if_(folds):
            shape.b_col = f.select(one_column, shape.b_batch, shape.b_col)
            shape.n, shape.batch = shape.n * batch, 1


def _family(f: Function, class_: Value, shape_at: Value, often: Var) -> Value:
    """Return the first family of a class that takes a product, or NULL; one worth threads is `often` at SOON."""
    shape, answer = Args(f, shape_at, SHAPE), f.var(f.null)
    m, n, k = (getattr(shape, name) for name in layout.LIMITS)
    work = f.convert("sitofp", m, "double")
    for factor in (n, k, shape.batch):  # as a float, which does not overflow
        work = work * f.convert("sitofp", factor, "double")
    families = Args(f, class_, CLASS).families
    with f.loop(0, families) as i, f.if_(f.is_null(answer.value)):
        place = class_ + size(CLASS) + i * size(MEMBER)
        family = Args(f, place, MEMBER)
        with f.if_((work <= family.most) & takes(f, family, shape)):
            answer.value = place
            often.value = f.select(work <= family.work, f.index(layout.OFTEN), f.index(layout.SOON))
    return answer.value


def takes(f: Function, family: Args, shape: Args) -> Value:
    """Return whether the lengths and strides of a product are within a family's limits."""
    good = (shape.k * shape.n <= family.b_elements) & (shape.m * shape.n <= family.c_elements)
    good = good & (family.a_col.equals(0) | family.a_col.equals(shape.a_col))
    for name in layout.LIMITS:
        length = getattr(shape, name)
        good = good & (getattr(family, f"{name}_low") <= length) & (length <= getattr(family, f"{name}_high"))
    return good


def _entry(f: Function, fields: Args, class_at: Value, family: Value, shape_at: Value, place: Value) -> None:
    """Make the entry of a product, as Python stores it for one that is met often."""
    entry, class_, shape = Args(f, place, ENTRY), Args(f, class_at, CLASS), Args(f, shape_at, SHAPE)
    copy_words(f, family + at(MEMBER, f"job_{JOB[0][0]}"), place + at(ENTRY, f"job_{JOB[0][0]}"), len(JOB))
    for name in _NAMES:
        setattr(entry, f"job_{name}", getattr(shape, name))
    entry.job_rows, entry.job_columns, entry.job_products = shape.m, shape.n, shape.batch
    number = fields.bias_kind.differs(layout.ARRAY_BIAS) | fields.bias_ndim.equals(0)
    step = f.var(f.index(0))
    with f.if_(number ^ True):
        step.value = f.select(f.load("i64", fields.bias_shape).equals(1), f.index(0), fields.bias_size)
    entry.job_bias_step = step.value
    entry.kind, entry.c_descr, entry.c_tensor, entry.c_fortran = layout.RUN, class_.c_descr, class_.c_tensor, 0
    entry.scalar, entry.runs, entry.transposed, entry.countdown = class_.scalar, 1, 0, 0
    _reach(f, entry, "a", fields.a_size, ((shape.m, shape.a_row), (shape.k, shape.a_col), (shape.batch, shape.a_batch)))
    _reach(f, entry, "b", fields.b_size, ((shape.k, shape.b_row), (shape.n, shape.b_col), (shape.batch, shape.b_batch)))
    _reach(f, entry, "c", fields.a_size, ((shape.m, shape.c_row), (shape.n, shape.c_col), (shape.batch, shape.c_batch)))
    entry.bias_low, entry.bias_high = 0, shape.n * fields.bias_size
    operations = shape.m * shape.n * shape.k * shape.batch * class_.operations
    is_long = operations >= layout.LONG
    entry.long = f.convert("zext", is_long, "i64")
    whole = symmetric.is_transposed(shape) ^ True
    entry.plain = f.convert("zext", (is_long ^ True) & whole & entry.job_workspace_bytes.equals(0), "i64")


def _reach(f: Function, entry: Args, name: str, element: Value, steps: tuple[tuple[Value, Value], ...]) -> None:
    """Set how far an operand reaches below and above its first element."""
    low, high = f.index(0), element
    for length, step in steps:
        span = (length - 1) * step
        low, high = low + f.min(span, 0), high + f.max(span, 0)
    setattr(entry, f"{name}_low", low)
    setattr(entry, f"{name}_high", high)
