"""The short path of `matmul(a, b)` and `matmul(a, b, out)` of matrices: the same table, without a record of the call.

It saves 0.03 us of an 8 x 8 product (0.13 -> 0.10 us). Whatever it does not take, goes the general way,
whose look-up is here too: the key of a call, and the entry of the table that has it.
"""

from __future__ import annotations

from gemmery.cpu import entry_layout as layout
from gemmery.cpu import objects
from gemmery.cpu.abi import Args
from gemmery.cpu.entry_arguments import is_null, same, unpacked
from gemmery.cpu.entry_layout import CALL, ENTRY, HEAD, OPERAND, at, size
from gemmery.cpu.entry_run import UNKNOWN, copy_words, special
from gemmery.cpu.ir import Function, Module, Value, Var
from gemmery.cpu.layout import JOB, JOB_AT
from gemmery.tuples import NamedTuple

_RECORD = JOB_AT["kernel"] // 8  # words of a job that a kernel reads


class MatrixFields(NamedTuple):
    """The fields of a 2-D array: words of the key, address, flags."""

    words: tuple[Value, ...]
    data: Value
    descr: Value


def matrices(f: Function, table: Value, answer: Var) -> None:
    """Set `answer` to the result of a call with two or three positional arguments, or `out` by name."""
    head, args, out = Args(f, table, HEAD), f["args"], f.var(Value(f, "ptr", "null"))
    _find_out(f, head, out)
    with f.if_(is_null(f, out.value) ^ True):
        a, b = f.load("ptr", args), unpacked(f, head, f.load("ptr", args + 8))
        has_out = same(f, out.value, head.none) ^ True
        good = f.var(_is_matrix(f, head, a) & _is_matrix(f, head, b))
        with f.if_(good.value & has_out):
            good.value = _is_matrix(f, head, out.value)
        with f.if_(good.value):
            _look_up(f, table, head, (a, b, out.value), has_out, answer)


def _find_out(f: Function, head: Args, out: Var) -> None:
    """Set `out` to that of a call (a, b), (a, b, out) or (a, b, out=out): None if missing, NULL for other calls."""
    names, count = f["names"], f["count"]
    with f.if_(is_null(f, names)):
        with f.if_(count.equals(2)):
            out.value = head.none
        with f.if_(count.equals(3)):
            out.value = f.load("ptr", f["args"] + 16)
    with f.else_():
        one_name = count.equals(2) & f.load("i64", names + objects.TUPLE_SIZE).equals(1)
        with f.if_(one_name), f.if_(same(f, f.load("ptr", names + objects.TUPLE_ITEMS), head.name_out)):
            out.value = f.load("ptr", f["args"] + 16)


def _is_matrix(f: Function, head: Args, x: Value) -> Value:
    good = f.var(f.const("i1", 0))
    with f.if_(same(f, f.load("ptr", x + objects.TYPE), head.array_type)):
        good.value = f.load("i32", x + objects.NDIM).equals(2)
    return good.value


def _matrix(f: Function, x: Value) -> MatrixFields:
    descr = f.load("ptr", x + objects.DESCR)
    shape, strides = f.load("ptr", x + objects.SHAPE), f.load("ptr", x + objects.STRIDES)
    words = [f.load("i64", descr + objects.ELEMENT)]
    for i in range(2):
        words += [f.load("i64", shape + 8 * i), f.load("i64", strides + 8 * i)]
    return MatrixFields(tuple(words), f.load("i64", x + objects.DATA), descr)


def _look_up(
    f: Function, table: Value, head: Args, arrays: tuple[Value, Value, Value], has_out: Value, answer: Var
) -> None:
    """Find the entry of matrices, and run its job if it is plain."""
    a, b = _matrix(f, arrays[0]), _matrix(f, arrays[1])
    first = f.select(has_out, f.index(2 | 2 << 8 | 3 << 16), f.index(2 | 2 << 8))
    base = (first, *a.words, *b.words)
    total, out = f.var(_sum(base, 0)), f.buffer(48)
    with f.if_(has_out):
        matrix = _matrix(f, arrays[2])
        for i, word in enumerate((*matrix.words, matrix.data)):
            f.store(word, out + 8 * i)
        total.value = total.value + _sum(matrix.words, len(base))
    key_hash = total.value | 1
    index = (set_of(key_hash)) * layout.WAYS
    way = f.index(layout.WAYS)
    for i in range(layout.WAYS):
        way = f.select(
            f.load("i64", table + (layout.HASHES_AT + 8 * i) + index * 8, align=8).equals(key_hash), f.index(i), way
        )
    with f.if_(way < layout.WAYS):
        place = table + layout.ENTRIES_AT + (index + way) * layout.ENTRY_BYTES
        entry = Args(f, place, ENTRY)
        # A result inherits the metadata of a dtype, so those that have some are left to Python.
        metadata = f.load("i64", a.descr + objects.METADATA) | f.load("i64", b.descr + objects.METADATA)
        count = f.select(has_out, f.index(len(base) + 5), f.index(len(base)))
        wrong = f.var(_difference(entry, base, 0) | metadata | entry.quick ^ count)
        with f.if_(has_out):
            words = [f.load("i64", out + 8 * i) for i in range(5)]
            wrong.value = wrong.value | _difference(entry, words, len(base))
        with f.if_(wrong.value.equals(0) & a.data.differs(0) & b.data.differs(0)):
            _finish(f, head, entry, place, arrays, (a, b), (has_out, f.load("i64", out + 40)), answer)


def _sum(words: tuple[Value, ...], start: int) -> Value:
    total = words[0] * layout.FACTORS[start]
    for word, factor in zip(words[1:], layout.FACTORS[start + 1 :], strict=False):
        total = total + word * factor
    return total


def _difference(entry: Args, words: tuple[Value, ...] | list[Value], start: int) -> Value:
    different: list[Value] = [word ^ getattr(entry, f"key_{start + i}") for i, word in enumerate(words)]
    total = different[0]
    for word in different[1:]:
        total = total | word
    return total


def _finish(
    f: Function,
    head: Args,
    entry: Args,
    place: Value,
    arrays: tuple[Value, Value, Value],
    operands: tuple[MatrixFields, MatrixFields],
    target: tuple[Value, Value],
    answer: Var,
) -> None:
    """Check or allocate the result, and run a copy of the job here."""
    has_out, data = target[0], f.var(target[1])
    good = f.var(f.const("i1", 1))
    with f.if_(has_out):
        flags = f.load("i32", arrays[2] + objects.FLAGS)
        good.value = (flags & objects.WRITEABLE).differs(0)
        low, high = data.value + entry.c_low, data.value + entry.c_high
        for name, matrix in zip("ab", operands, strict=True):
            start, end = (matrix.data + getattr(entry, f"{name}_{which}") for which in ("low", "high"))
            good.value = good.value & ((high <= start) | (end <= low))
        with f.if_(good.value):
            f.call_address(head.incref, arrays[2])
            answer.value = arrays[2]
    with f.else_():
        # The job is copied after this. Nobody replaces the entry meanwhile: new_array keeps the GIL, and the garbage
        # collector, which runs any code, does not count arrays.
        f.call_address(head.incref, entry.c_descr)  # new_array takes over a reference
        null, zero, two = Value(f, "ptr", "null"), f.const("i32", 0), f.const("i32", 2)
        shape = place + at(ENTRY, "c_shape_0")
        array = f.result_of(head.new_array, "ptr", head.array_type, entry.c_descr, two, shape, null, null, zero, null)
        answer.value = array
        with f.if_(is_null(f, array)):
            f.call_address(head.clear_error)  # the call is Python's: it tries again and says why
            answer.value, good.value = special(f, UNKNOWN), f.const("i1", 0)
        with f.else_():
            data.value = f.load("i64", array + objects.DATA)
    with f.if_(good.value):
        job_at = f.buffer(-(-size(JOB) // 64) * 64)
        copy_words(f, place + at(ENTRY, f"job_{JOB[0][0]}"), job_at, _RECORD)
        job = Args(f, job_at, JOB)
        a, b = operands
        for name, value in (("a", a.data), ("b", b.data), ("c", data.value)):
            f.store(value, job_at + JOB_AT[name], align=8)
        job.alpha, job.beta = job_at + JOB_AT["alpha_value"], job_at + JOB_AT["beta_value"]
        f.call_address(entry.job_kernel, job_at)


_KEY_AT = at(CALL, "key_0")


def set_of(key_hash: Value) -> Value:
    """Return the number of the set where a key may be, as `entry_layout.place` does."""
    return (key_hash ^ key_hash >> layout.MIX) * layout.FACTORS[1] >> (64 - layout.SET_BITS)


def define_find(module: Module) -> None:
    """Define `find(table, call)`: writes the key of a call, returns its entry or NULL."""
    with module.function("find", ("ptr", "table"), ("ptr", "call"), local=True, returns="ptr") as f:
        match = f.var(Value(f, "ptr", "null"))
        fields = Args(f, f["call"], CALL)
        words = 7 + 2 * (fields.a_ndim + fields.b_ndim + fields.out_ndim + fields.bias_ndim)
        with f.if_(words <= layout.MOST_WORDS):
            key_hash = _key(f, fields)
            at_set = set_of(key_hash)
            hashes = f["table"] + (layout.HASHES_AT + at_set * (8 * layout.WAYS))
            with f.loop(0, layout.WAYS) as way, f.if_(f.load("i64", hashes + way * 8, align=8).equals(key_hash)):
                entry = f["table"] + (layout.ENTRIES_AT + (at_set * layout.WAYS + way) * layout.ENTRY_BYTES)
                with f.if_(_equal(f, fields, entry)):
                    match.value = entry
        f.ret(match.value)


def _key(f: Function, fields: Args) -> Value:
    """Write the key: numbers of dimensions and options; then element, lengths and strides of each array."""
    at_word, at_factor = f.var(f["call"] + _KEY_AT), f.var(f["table"] + layout.FACTORS_AT)
    total = f.var(f.index(0))
    has_out = is_null(f, fields.out_object) ^ True
    out = f.select(has_out, fields.out_ndim + 1, f.index(0))
    first = fields.a_ndim | fields.b_ndim << 8 | out << 16 | fields.bias_kind << 24 | fields.options << 32
    _word(f, at_word, at_factor, total, first)
    for name in ("a", "b"):
        _array(f, at_word, at_factor, total, name)
    with f.if_(has_out):
        _array(f, at_word, at_factor, total, "out")
    with f.if_(is_null(f, fields.bias_object) ^ True):
        _array(f, at_word, at_factor, total, "bias")
    for passed in (fields.dtype, fields.threads):
        with f.if_(is_null(f, passed) ^ True):
            _word(f, at_word, at_factor, total, f.emit("i64", f"ptrtoint {passed} to i64"))
    start, stop = (f.emit("i64", f"ptrtoint {x} to i64") for x in (f["call"] + _KEY_AT, at_word.value))
    fields.count = (stop - start) >> 3
    fields.hash = total.value | 1
    return fields.hash


def _word(f: Function, at_word: Var, at_factor: Var, total: Var, word: Value) -> None:
    f.store(word, at_word.value, align=8)
    total.value = total.value + word * f.load("i64", at_factor.value, align=8)
    at_word.value, at_factor.value = at_word.value + 8, at_factor.value + 8


def _array(f: Function, at_word: Var, at_factor: Var, total: Var, name: str) -> None:
    operand = Args(f, f["call"] + at(CALL, f"{name}_object"), OPERAND)
    _word(f, at_word, at_factor, total, operand.element)
    shape, strides, unit = operand.shape, operand.strides, operand.unit
    with f.loop(0, operand.ndim) as i:
        _word(f, at_word, at_factor, total, f.load("i64", shape + i * 8, align=8))
        _word(f, at_word, at_factor, total, f.load("i64", strides + i * 8, align=8) * unit)


def _equal(f: Function, fields: Args, entry: Value) -> Value:
    """Return whether the entry has this key; the first word of an entry is the number of its words."""
    entry_at = Args(f, entry, ENTRY)
    count, different = fields.count, f.var(f.index(0))
    with f.if_(entry_at.count.equals(count)), f.loop(0, count) as i:
        mine, other = (f.load("i64", x + i * 8, align=8) for x in (f["call"] + _KEY_AT, entry + 8))
        different.value = different.value | (mine ^ other)
    with f.else_():
        different.value = 1
    return different.value.equals(0)
