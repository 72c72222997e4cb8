"""Products with an epilogue that come again: `matmul(a, b, epilogue=...)` by a recipe, without a step of Python.

A recipe is a bytes object in the first slot of the epilogue (`api.finished` makes it). Its products are those
of the table, into memory for sums; then the pass over their rows runs with a table of slots on the stack.
"""

from __future__ import annotations

from gemmery.cpu import entry_layout as layout
from gemmery.cpu import objects
from gemmery.cpu.abi import Args
from gemmery.cpu.atomics import call
from gemmery.cpu.entry_arguments import read, same
from gemmery.cpu.entry_layout import CALL, HEAD, KNOWN, MADE, RECIPE, at, size
from gemmery.cpu.entry_run import UNKNOWN, copy_words, is_object, special
from gemmery.cpu.ir import Function, Module, Value, Var
from gemmery.cpu.layout import JOB, JOB_AT
from gemmery.cpu.slots import WORDS

_BYTES = 32  # of a bytes object before its bytes
_MOST_MADE = layout.RECIPE_OUTPUTS + 2
_MOST_SLOTS = layout.RECIPE_OPERANDS + _MOST_MADE


def again(f: Function, head: Args, table: Value, answer: Var) -> None:
    """Set `answer` to the results of a call (a, b, epilogue=), or with operands= after it, that a recipe has."""
    names, null = f["names"], f.null
    with f.if_(f.is_null(answer.value) & (f.is_null(names) ^ True) & f["count"].equals(2)):
        first, count = f.load("ptr", names + objects.TUPLE_ITEMS), f.load("i64", names + objects.TUPLE_SIZE)
        with f.if_(same(f, first, head.name_epilogue)):
            passed = f.load("ptr", f["args"] + 16)
            type_, epilogue, bindings = f.load("ptr", passed + objects.TYPE), f.var(null), f.var(null)
            with f.if_(count.equals(1) & same(f, type_, head.epilogue_type)):
                epilogue.value = passed
            with f.if_(count.equals(1) & same(f, type_, head.bound_type)):
                function = f.load("ptr", passed + objects.TUPLE_ITEMS)
                is_plain = same(f, f.load("ptr", function + objects.TYPE), head.epilogue_type)
                epilogue.value = f.select(is_plain, function, null)
                bindings.value = f.load("ptr", passed + (objects.TUPLE_ITEMS + 8))
            with f.if_(count.equals(2) & same(f, type_, head.epilogue_type)):
                second = f.load("ptr", names + (objects.TUPLE_ITEMS + 8))
                bindings.value = f.load("ptr", f["args"] + 24)
                epilogue.value = f.select(same(f, second, head.name_operands), passed, null)
            with f.if_(f.is_null(epilogue.value) ^ True):
                a, b = f.load("ptr", f["args"]), f.load("ptr", f["args"] + 8)
                answer.value = call(f, "ptr", "by_recipe", table, epilogue.value, bindings.value, a, b)


def define(module: Module) -> None:
    """Define `by_recipe(table, epilogue, bindings, a, b)`: the results, UNKNOWN or RAISED; and what it calls."""
    _define_is_known(module)
    _define_follow(module)
    with module.function("by_recipe", "table", "epilogue", "bindings", "a", "b", local=True, returns="ptr") as f:
        head, answer = Args(f, f["table"], HEAD), f.var(special(f, UNKNOWN))
        recipes = f.load("ptr", f["epilogue"] + objects.FIRST_SLOT)
        good = f.var(f.is_null(recipes) ^ True)
        with f.if_(good.value & (f.is_null(f["bindings"]) ^ True)):
            good.value = same(f, f.load("ptr", f["bindings"] + objects.TYPE), head.dict_type)
        with f.if_(good.value):
            f.call_address(head.incref, recipes)  # another thread may replace them
            with f.loop(0, f.load("i64", recipes + objects.TUPLE_SIZE)) as i, f.if_(f.is_null(answer.value)):
                recipe = f.load("ptr", recipes + objects.TUPLE_ITEMS + i * 8) + _BYTES
                answer.value = call(f, "ptr", "follow", f["table"], recipe, f["bindings"], f["a"], f["b"])
            f.call_address(head.decref, recipes)
        f.ret(answer.value)


def _define_is_known(module: Module) -> None:
    """Define `is_known(table, x, known)`: 1 for an ndarray of this element type, shape and strides."""
    with module.function("is_known", "table", "x", "known", local=True, returns="i64") as f:
        x, different = f["x"], f.var(f.index(1))
        with f.if_(same(f, f.load("ptr", x + objects.TYPE), Args(f, f["table"], HEAD).array_type)):
            ndim = f.load("i64", f["known"], align=8)
            descr, data = f.load("ptr", x + objects.DESCR), f.load("i64", x + objects.DATA)
            element = f.load("i64", descr + objects.ELEMENT) ^ f.load("i64", f["known"] + 8, align=8)
            own = f.convert("zext", f.load("i32", x + objects.NDIM), "i64")
            different.value = element | (own ^ ndim) | f.load("i64", descr + objects.METADATA)
            with f.if_(different.value.equals(0) & data.differs(0)):
                shape, strides = f.load("ptr", x + objects.SHAPE), f.load("ptr", x + objects.STRIDES)
                with f.loop(0, ndim) as i:
                    for source, to in ((shape, 16), (strides, 24)):
                        other = f.load("i64", f["known"] + to + i * 16, align=8)
                        different.value = different.value | (f.load("i64", source + i * 8) ^ other)
        f.ret(f.convert("zext", different.value.equals(0), "i64"))


def _define_follow(module: Module) -> None:
    """Define `follow(table, recipe, bindings, a, b)`: the results of a call that has this recipe, UNKNOWN or RAISED."""
    with module.function("follow", "table", "recipe", "bindings", "a", "b", local=True, returns="ptr") as f:
        head, recipe = Args(f, f["table"], HEAD), Args(f, f["recipe"], RECIPE)
        weights, operands, outputs = recipe.weights, recipe.operands, recipe.outputs
        generation = f.load("i64", f["table"] + at(HEAD, "generation"))
        answer, good = f.var(special(f, UNKNOWN)), f.var(recipe.generation.equals(generation))
        arrays = f["recipe"] + size(RECIPE)
        reads = arrays + (weights + 1) * (8 * KNOWN)
        table = reads + operands * (8 * (KNOWN + 1))
        news = table + (weights + operands + outputs) * (8 * WORDS)
        pass_job = news + (outputs + weights) * (8 * MADE)
        ys, values, numbers = f.buffer(16), f.buffer(8 * layout.RECIPE_OPERANDS), f.buffer(8 * layout.RECIPE_OPERANDS)
        _match(f, head, (weights, operands), arrays, reads, (ys, values, numbers), good)
        with f.if_(good.value):
            slots, new, job = f.buffer(8 * WORDS * _MOST_SLOTS), f.buffer(8 * _MOST_MADE), f.buffer(size(JOB))
            with f.loop(0, (weights + operands + outputs) * WORDS) as i:
                f.store(f.load("i64", table + i * 8, align=8), slots + i * 8)
            copy_words(f, pass_job, job, len(JOB))
            f.store(slots, job + JOB_AT["bias"])
            with f.loop(0, operands) as i:
                value = f.load("ptr", values + i * 8)
                f.call_address(head.incref, value)
                slot = slots + (weights + i) * (8 * WORDS)
                _fill(f, recipe, reads + i * (8 * (KNOWN + 1)), value, numbers + i * 8, slot)
            _make(f, head, news, (weights, outputs), (new, slots, operands), good)
            with f.loop(0, weights) as i, f.if_(good.value):
                y, total = f.load("ptr", ys + i * 8), f.load("ptr", new + (outputs + i) * 8)
                _multiply(f, head, y, total, recipe.dtype, answer, good)
            with f.if_(good.value):
                state, is_long = f.var(f.null), recipe.long.differs(0)
                with f.if_(is_long):
                    state.value = f.result_of(head.save_thread, "ptr")
                plain = Args(f, job, JOB).parts.equals(1) & Args(f, job, JOB).workspace_bytes.equals(0)
                error = call(f, "i64", "launch", f["table"], job, f.convert("zext", plain, "i64"))
                good.value = error.equals(0)
                with f.if_(is_long):
                    f.call_address(head.restore_thread, state.value)
            _return(f, head, (weights, outputs), new, answer, good)
            with f.loop(0, operands) as i:
                f.call_address(head.decref, f.load("ptr", values + i * 8))
        f.ret(answer.value)


def _match(
    f: Function, head: Args, counts: tuple[Value, Value], arrays: Value, reads: Value, places: tuple[Value, ...],
    good: Var,
) -> None:  # fmt: skip
    """Compare a call with a recipe, and write down its weights, operands, and the values of those that are numbers."""
    (weights, operands), (ys, values, numbers), b, bindings = counts, places, f["b"], f["bindings"]
    f.store(b, ys)
    with f.if_(good.value):
        good.value = call(f, "i64", "is_known", f["table"], f["a"], arrays).differs(0)
    with f.if_(good.value & weights.equals(2)):
        good.value = same(f, f.load("ptr", b + objects.TYPE), head.tuple_type)
        with f.if_(good.value):
            good.value = f.load("i64", b + objects.TUPLE_SIZE).equals(2)
            with f.if_(good.value):
                for place in (0, 8):
                    f.store(f.load("ptr", b + (objects.TUPLE_ITEMS + place)), ys + place)
    with f.loop(0, weights) as i, f.if_(good.value):
        known = arrays + (i + 1) * (8 * KNOWN)
        good.value = call(f, "i64", "is_known", f["table"], f.load("ptr", ys + i * 8), known).differs(0)
    count = f.var(f.index(0))  # of values: a name that the function has not is Python's
    with f.if_(f.is_null(bindings) ^ True):
        count.value = f.load("i64", bindings + objects.DICT_SIZE)
    good.value = good.value & count.value.equals(operands)
    number = f.buffer(32)
    with f.loop(0, operands) as i, f.if_(good.value):
        known = reads + i * (8 * (KNOWN + 1))
        value = f.result_of(head.dict_item, "ptr", bindings, f.load("ptr", known, align=8))
        f.store(value, values + i * 8)
        good.value = f.is_null(value) ^ True
        with f.if_(good.value):
            with f.if_(f.load("i64", known + 8, align=8).equals(-1)):
                real = same(f, f.load("ptr", value + objects.TYPE), head.complex_type) ^ True
                good.value = call(f, "i64", "number", f["table"], value, number).differs(0) & real
                f.store(f.load("i64", number), numbers + i * 8)
            with f.else_():
                good.value = call(f, "i64", "is_known", f["table"], value, known + 8).differs(0)


def _fill(f: Function, recipe: Args, read_: Value, value: Value, number: Value, slot: Value) -> None:
    """Write an operand's address or number into its slot."""
    with f.if_(f.load("i64", read_ + 8, align=8).equals(-1)):
        f.store(f.load("i64", number), slot)
        with f.if_(recipe.single.differs(0)):
            f.store(f.convert("fptrunc", f.load("double", number), "float"), slot)
    with f.else_():
        f.store(f.load("i64", value + objects.DATA), slot)


def _make(
    f: Function, head: Args, news: Value, counts: tuple[Value, Value], places: tuple[Value, Value, Value], good: Var
) -> None:
    """Make arrays for outputs and sums, and write their addresses into the slots."""
    (weights, outputs), (new, slots, operands), null = counts, places, f.null
    for each in range(_MOST_MADE):
        f.store(f.index(0), new + 8 * each)
    with f.loop(0, outputs + weights) as i, f.if_(good.value):
        how = news + i * (8 * MADE)
        descr, array = f.load("ptr", how, align=8), f.var(f.load("ptr", new))
        with f.if_(f.is_null(descr)):
            f.call_address(head.incref, array.value)
        with f.else_():
            f.call_address(head.incref, descr)  # new_array takes over a reference
            ndim, zero = f.convert("trunc", f.load("i64", how + 8, align=8), "i32"), f.const("i32", 0)
            new_array = head.new_array
            array.value = f.result_of(new_array, "ptr", head.array_type, descr, ndim, how + 16, null, null, zero, null)
        f.store(array.value, new + i * 8)
        good.value = f.is_null(array.value) ^ True
        with f.if_(good.value):
            place = f.select(i < outputs, weights + operands + i, i - outputs)
            f.store(f.load("i64", array.value + objects.DATA), slots + place * (8 * WORDS))
        with f.else_():
            f.call_address(head.clear_error)  # the call is Python's: it tries again and says why


def _multiply(f: Function, head: Args, y: Value, total: Value, dtype: Value, answer: Var, good: Var) -> None:
    """Write the product of A and a weight to an array, as `matmul(a, y, out=total, dtype=dtype)` does."""
    record, null = f.buffer(size(CALL)), f.null
    fields = Args(f, record, CALL)
    fields.raw, fields.bias_kind, fields.beta = 0, layout.NO_BIAS, f.const("double", 0)
    fields.old_object = fields.bias_object = fields.threads = null
    fields.bias_ndim = fields.tensors = 0
    fields.dtype = dtype
    fields.options = f.select(f.is_null(dtype), f.index(0), f.index(layout.WIDENS))
    for name, x in (("a", f["a"]), ("b", y), ("out", total)):
        read(f, head, x, record + at(CALL, f"{name}_object"))
    result = call(f, "ptr", "product", f["table"], record)
    good.value = is_object(f, result)
    with f.if_(good.value):
        f.call_address(head.decref, result)
    with f.else_():
        answer.value = result


def _return(f: Function, head: Args, counts: tuple[Value, Value], new: Value, answer: Var, good: Var) -> None:
    """Set `answer` to the output, or a tuple of them, and let the other arrays go."""
    weights, outputs = counts
    with f.if_(good.value):
        answer.value = f.load("ptr", new)
        with f.if_(outputs > 1):
            answer.value = f.result_of(head.new_tuple, "ptr", outputs)
            good.value = f.is_null(answer.value) ^ True
            with f.if_(good.value), f.loop(0, outputs) as i:
                f.store(f.load("ptr", new + i * 8), answer.value + objects.TUPLE_ITEMS + i * 8)
            with f.else_():
                f.call_address(head.clear_error)
    start = f.select(good.value, outputs, f.index(0))
    with f.loop(start, outputs + weights) as i:
        array = f.load("ptr", new + i * 8)
        with f.if_(f.is_null(array) ^ True):
            f.call_address(head.decref, array)
