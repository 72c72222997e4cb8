"""The module of the compiled builtins: one function each, and what they share.

Operands and results of different element types are converted by NumPy, before or after. A pair of types is Python's at
first. It tells the table to which type the pair promotes, and whether a result may be cast to the type of an `out`;
from then on shapes do not matter.

`matmul(a, b)` and `matmul(a, b, out)` of matrices have a short path: the same table, without a record of the call. It
saves 0.03 us of an 8 x 8 product (0.13 -> 0.10 us). Whatever it does not take, goes the general way, whose look-up is
here too: the key of a call, and the entry of the table that has it.
"""

from __future__ import annotations

from gemmery.cpu import entry_arguments as arguments
from gemmery.cpu import entry_epilogue, entry_family, entry_run, entry_tensors, jit, objects
from gemmery.cpu import entry_layout as layout
from gemmery.cpu.abi import Args
from gemmery.cpu.atomics import call
from gemmery.cpu.entry_arguments import read, same, unpacked
from gemmery.cpu.entry_layout import ARGUMENTS, CALL, ENTRY, HEAD, OPERAND, PAIR, at, size
from gemmery.cpu.entry_run import RAISED, UNKNOWN, copy_words, special
from gemmery.cpu.ir import Function, Module, Value, Var
from gemmery.cpu.layout import JOB, JOB_AT
from gemmery.cpu.target import Target
from gemmery.tuples import NamedTuple


def module(target: Target) -> Module:
    """Return the module of `NAME(self, args, count, names)` for each builtin, which computes or calls Python."""
    module = Module(target)
    shared = (
        arguments.define_read, arguments.define_number, define_find, entry_run.define_launch,
        entry_run.define_execute, entry_run.define_copied, entry_run.define_aside, entry_run.define_prepared,
        define_pair, define_as_type, define_with_bias,
        define_converted, define_cast, entry_family.define_member,
        entry_run.define_product, entry_epilogue.define,
    )  # fmt: skip
    entry_tensors.define(module)
    for define in shared:
        define(module)
    for name in layout.BUILTINS:
        with module.function(name, "self", "args", ("i64", "count"), "names", returns="ptr") as f:
            _builtin(f, name)
    return module


def python(target: Target) -> Module:
    """Return the module of builtins that only call Python, for the time until the others are compiled."""
    module = Module(target)
    params = ("args", ("i64", "count"), "names")
    for name in layout.BUILTINS:
        # With a function of its own that reads the table, HOLE stays a constant that no offset is added to.
        with module.function(f"call_{name}", "table", *params, local=True, returns="ptr") as f:
            head = Args(f, f["table"], HEAD)
            function = getattr(head, f"python_{name}")
            f.ret(f.result_of(head.vectorcall, "ptr", function, f["args"], f["count"], f["names"]))
        with module.function(name, "self", *params, returns="ptr") as f:
            table = f.emit("ptr", f"inttoptr i64 {jit.HOLE} to ptr")
            f.ret(call(f, "ptr", f"call_{name}", table, f["args"], f["count"], f["names"]))
    return module


def _builtin(f: Function, name: str) -> None:
    table = f.emit("ptr", f"inttoptr i64 {jit.HOLE} to ptr")
    head = Args(f, table, HEAD)
    slots, record = f.buffer(size(ARGUMENTS)), f.buffer(size(CALL))
    answer = f.var(special(f, UNKNOWN))
    if name == "matmul":
        matrices(f, table, answer)
        entry_epilogue.again(f, head, table, answer)
    with (
        f.if_(f.is_null(answer.value)),
        f.if_(arguments.parse(f, head, name, slots)),
        f.if_(arguments.operands(f, head, name, table, slots, record)),
    ):
        if name == "matmul" or name in layout.CONTRACTION:
            answer.value = call(f, "ptr", "product", table, record)
        else:
            fields = Args(f, record, CALL)
            into_tensor = fields.tensors.differs(0) & (f.is_null(fields.out_object) ^ True)
            with f.if_(f.is_null(fields.old_object) | into_tensor):
                answer.value = call(f, "ptr", "product", table, record)
            with f.else_():
                answer.value = call(f, "ptr", "aside", table, record)
    with f.if_(f.is_null(answer.value)):
        python = getattr(head, f"python_{name}")
        answer.value = f.result_of(head.vectorcall, "ptr", python, f["args"], f["count"], f["names"])
    with f.else_():
        raised = f.emit("i64", f"ptrtoint {answer.value} to i64").equals(RAISED)
        answer.value = f.select(raised, f.null, answer.value)
    f.ret(answer.value)


_FLAGS = 0x1 | 0x10 | 0x100  # NPY_ARRAY_C_CONTIGUOUS, _FORCECAST, _ALIGNED


def define_pair(module: Module) -> None:
    """Define `pair(table, first, second, use)`: what the table knows of two element types, or NULL."""
    words = (("i64", name) for name in ("first", "second", "use"))
    with module.function("pair", "table", *words, local=True, returns="ptr") as f:
        result = f.var(f.null)
        index = (f["first"] * layout.FACTORS[0] + f["second"] * layout.FACTORS[1]) >> (65 - layout.PAIRS.bit_length())
        with f.loop(0, layout.PROBES) as i:
            place = f["table"] + layout.PAIRS_AT + (index + i) * size(PAIR)
            pair = Args(f, place, PAIR)
            match = pair.first.equals(f["first"]) & pair.second.equals(f["second"]) & pair.use.equals(f["use"])
            with f.if_(match):
                result.value = place
        f.ret(result.value)


def define_as_type(module: Module) -> None:
    """Define `as_type(table, array, descr)`: a contiguous copy, as in np.errstate(all="ignore"); NULL with an error."""
    with module.function("as_type", "table", "array", "descr", local=True, returns="ptr") as f:
        head, answer = Args(f, f["table"], HEAD), f.var(f.null)
        token = f.result_of(head.set_context, "ptr", head.error_state, head.ignoring)
        with f.if_(f.is_null(token) ^ True):
            f.call_address(head.incref, f["descr"])  # from_array takes over a reference
            answer.value = f.result_of(head.from_array, "ptr", f["array"], f["descr"], f.const("i32", _FLAGS))
            f.result_of(head.reset_context, "i32", head.error_state, token)
            f.call_address(head.decref, token)
        f.ret(answer.value)


def define_with_bias(module: Module) -> None:
    """Define `with_bias(table, call)`: the product with the bias converted to the kernel's type, else UNKNOWN.

    The call is then Python's, or the bias was as it must be: a record never has a bias that is gone.
    """
    with module.function("with_bias", "table", "call", local=True, returns="ptr") as f:
        table, record = f["table"], f["call"]
        head, fields, answer = Args(f, table, HEAD), Args(f, record, CALL), f.var(special(f, UNKNOWN))
        good = fields.bias_kind.equals(layout.ARRAY_BIAS) & fields.a_element.equals(fields.b_element)
        with f.if_(good & f.is_null(fields.dtype) & fields.tensors.equals(0)):
            pair = call(f, "ptr", "pair", table, fields.a_element, fields.bias_element, f.index(layout.BIAS))
            with f.if_(f.is_null(pair) ^ True):
                bias = f.buffer(size(OPERAND))
                place = record + at(CALL, "bias_object")
                copy_words(f, place, bias, len(OPERAND))
                copy = call(f, "ptr", "as_type", table, fields.bias_object, Args(f, pair, PAIR).descr)
                answer.value = special(f, RAISED)
                with f.if_(f.is_null(copy) ^ True):
                    answer.value = special(f, UNKNOWN)
                    with f.if_(read(f, head, copy, place)):
                        answer.value = call(f, "ptr", "product", table, record)
                    f.call_address(head.decref, copy)
                    copy_words(f, bias, place, len(OPERAND))
        f.ret(answer.value)


def define_converted(module: Module) -> None:
    """Define `converted(table, call, pair)`: the product of operands converted to the type to which they promote.

    Afterwards the call's record is that of the copies, which are gone: without a result the call is Python's.
    """
    with module.function("converted", "table", "call", "pair", local=True, returns="ptr") as f:
        head, fields = Args(f, f["table"], HEAD), Args(f, f["call"], CALL)
        answer, copies = f.var(special(f, UNKNOWN)), [f.var(f.null), f.var(f.null)]
        descr, good = Args(f, f["pair"], PAIR).descr, f.var(f.const("i1", 1))
        element = f.load("i64", descr + objects.ELEMENT)
        for name, copy in zip("ab", copies, strict=True):
            with f.if_(good.value & getattr(fields, f"{name}_element").differs(element)):
                copy.value = call(f, "ptr", "as_type", f["table"], getattr(fields, f"{name}_object"), descr)
                with f.if_(f.is_null(copy.value)):
                    answer.value, good.value = special(f, RAISED), f.const("i1", 0)
                with f.else_():
                    good.value = read(f, head, copy.value, f["call"] + at(CALL, f"{name}_object"))
        with f.if_(good.value):
            answer.value = call(f, "ptr", "product", f["table"], f["call"])
        for copy in copies:
            with f.if_(f.is_null(copy.value) ^ True):
                f.call_address(head.decref, copy.value)
        f.ret(answer.value)


def define_cast(module: Module) -> None:
    """Define `cast(table, call)`: a product whose `out` is contiguous and of a type to which the result may be cast."""
    with module.function("cast", "table", "call", local=True, returns="ptr") as f:
        fields, answer = Args(f, f["call"], CALL), f.var(special(f, UNKNOWN))
        contiguous = (fields.out_flags & (objects.C_CONTIGUOUS | objects.F_CONTIGUOUS)).differs(0)
        good = f.is_null(fields.out_object) ^ True
        good = good & contiguous & (fields.out_flags & objects.WRITEABLE).differs(0)
        good = good & f.is_null(fields.dtype) & fields.a_element.equals(fields.b_element)
        with f.if_(good & fields.out_element.differs(fields.a_element) & (fields.options & layout.BETA).equals(0)):
            pair = call(f, "ptr", "pair", f["table"], fields.a_element, fields.out_element, f.index(layout.CAST))
            with f.if_(f.is_null(pair) ^ True):
                answer.value = call(f, "ptr", "aside", f["table"], f["call"])
        f.ret(answer.value)


# ---- the short path, and the look-up ----

_RECORD = JOB_AT["kernel"] // 8  # words of a job that a kernel reads


class MatrixFields(NamedTuple):
    """The fields of a 2-D array: words of the key, address, flags."""

    words: tuple[Value, ...]
    data: Value
    descr: Value


def matrices(f: Function, table: Value, answer: Var) -> None:
    """Set `answer` to the result of a call with two or three positional arguments, or `out` by name."""
    head, args, out = Args(f, table, HEAD), f["args"], f.var(f.null)
    _find_out(f, head, out)
    with f.if_(f.is_null(out.value) ^ True):
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
    with f.if_(f.is_null(names)):
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
        null, zero, two = f.null, f.const("i32", 0), f.const("i32", 2)
        shape = place + at(ENTRY, "c_shape_0")
        array = f.result_of(head.new_array, "ptr", head.array_type, entry.c_descr, two, shape, null, null, zero, null)
        answer.value = array
        with f.if_(f.is_null(array)):
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
    with module.function("find", "table", "call", local=True, returns="ptr") as f:
        match = f.var(f.null)
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
    has_out = f.is_null(fields.out_object) ^ True
    out = f.select(has_out, fields.out_ndim + 1, f.index(0))
    first = fields.a_ndim | fields.b_ndim << 8 | out << 16 | fields.bias_kind << 24 | fields.options << 32
    _word(f, at_word, at_factor, total, first)
    for name in ("a", "b"):
        _array(f, at_word, at_factor, total, name)
    with f.if_(has_out):
        _array(f, at_word, at_factor, total, "out")
    with f.if_(f.is_null(fields.bias_object) ^ True):
        _array(f, at_word, at_factor, total, "bias")
    for passed in (fields.dtype, fields.threads):
        with f.if_(f.is_null(passed) ^ True):
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
