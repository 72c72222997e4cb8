"""The module of the compiled builtins: one function each, and what they share.

Operands and results of different element types are converted by NumPy, before or after. A pair of types is Python's at
first. It tells the table to which type the pair promotes, and whether a result may be cast to the type of an `out`;
from then on shapes do not matter.
"""

from __future__ import annotations

from gemmery.cpu import entry_arguments as arguments
from gemmery.cpu import entry_epilogue, entry_family, entry_quick, entry_run, entry_tensors, jit, objects
from gemmery.cpu import entry_layout as layout
from gemmery.cpu.abi import Args
from gemmery.cpu.atomics import call
from gemmery.cpu.entry_arguments import is_null, read
from gemmery.cpu.entry_layout import ARGUMENTS, CALL, HEAD, OPERAND, PAIR, at, size
from gemmery.cpu.entry_run import RAISED, UNKNOWN, copy_words, special
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.target import Target


def module(target: Target) -> Module:
    """Return the module of `NAME(self, args, count, names)` for each builtin, which computes or calls Python."""
    module = Module(target)
    shared = (
        arguments.define_read, arguments.define_number, entry_quick.define_find, entry_run.define_launch,
        entry_run.define_execute, entry_run.define_copied, entry_run.define_aside, entry_run.define_prepared,
        define_pair, define_as_type, define_with_bias,
        define_converted, define_cast, entry_family.define_member,
        entry_run.define_product, entry_epilogue.define,
    )  # fmt: skip
    entry_tensors.define(module)
    for define in shared:
        define(module)
    for name in layout.BUILTINS:
        params = (("ptr", "self"), ("ptr", "args"), ("i64", "count"), ("ptr", "names"))
        with module.function(name, *params, returns="ptr") as f:
            _builtin(f, name)
    return module


def python(target: Target) -> Module:
    """Return the module of builtins that only call Python, for the time until the others are compiled."""
    module = Module(target)
    params = (("ptr", "args"), ("i64", "count"), ("ptr", "names"))
    for name in layout.BUILTINS:
        # With a function of its own that reads the table, HOLE stays a constant that no offset is added to.
        with module.function(f"call_{name}", ("ptr", "table"), *params, local=True, returns="ptr") as f:
            head = Args(f, f["table"], HEAD)
            function = getattr(head, f"python_{name}")
            f.ret(f.result_of(head.vectorcall, "ptr", function, f["args"], f["count"], f["names"]))
        with module.function(name, ("ptr", "self"), *params, returns="ptr") as f:
            table = f.emit("ptr", f"inttoptr i64 {jit.HOLE} to ptr")
            f.ret(call(f, "ptr", f"call_{name}", table, f["args"], f["count"], f["names"]))
    return module


def _builtin(f: Function, name: str) -> None:
    table = f.emit("ptr", f"inttoptr i64 {jit.HOLE} to ptr")
    head = Args(f, table, HEAD)
    slots, record = f.buffer(size(ARGUMENTS)), f.buffer(size(CALL))
    answer = f.var(special(f, UNKNOWN))
    if name == "matmul":
        entry_quick.matrices(f, table, answer)
        entry_epilogue.again(f, head, table, answer)
    unknown = is_null(f, answer.value)
    with (
        f.if_(unknown),
        f.if_(arguments.parse(f, head, name, slots)),
        f.if_(arguments.operands(f, head, name, table, slots, record)),
    ):
        if name == "matmul" or name in layout.CONTRACTION:
            answer.value = call(f, "ptr", "product", table, record)
        else:
            fields = Args(f, record, CALL)
            into_tensor = fields.tensors.differs(0) & (is_null(f, fields.out_object) ^ True)
            with f.if_(is_null(f, fields.old_object) | into_tensor):
                answer.value = call(f, "ptr", "product", table, record)
            with f.else_():
                answer.value = call(f, "ptr", "aside", table, record)
    with f.if_(is_null(f, answer.value)):
        python = getattr(head, f"python_{name}")
        answer.value = f.result_of(head.vectorcall, "ptr", python, f["args"], f["count"], f["names"])
    with f.else_():
        raised = f.emit("i64", f"ptrtoint {answer.value} to i64").equals(RAISED)
        answer.value = f.select(raised, Value(f, "ptr", "null"), answer.value)
    f.ret(answer.value)


_FLAGS = 0x1 | 0x10 | 0x100  # NPY_ARRAY_C_CONTIGUOUS, _FORCECAST, _ALIGNED


def define_pair(module: Module) -> None:
    """Define `pair(table, first, second, use)`: what the table knows of two element types, or NULL."""
    params = (("ptr", "table"), ("i64", "first"), ("i64", "second"), ("i64", "use"))
    with module.function("pair", *params, local=True, returns="ptr") as f:
        result = f.var(Value(f, "ptr", "null"))
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
    params = (("ptr", "table"), ("ptr", "array"), ("ptr", "descr"))
    with module.function("as_type", *params, local=True, returns="ptr") as f:
        head, answer = Args(f, f["table"], HEAD), f.var(Value(f, "ptr", "null"))
        token = f.result_of(head.set_context, "ptr", head.error_state, head.ignoring)
        with f.if_(is_null(f, token) ^ True):
            f.call_address(head.incref, f["descr"])  # from_array takes over a reference
            answer.value = f.result_of(head.from_array, "ptr", f["array"], f["descr"], f.const("i32", _FLAGS))
            f.result_of(head.reset_context, "i32", head.error_state, token)
            f.call_address(head.decref, token)
        f.ret(answer.value)


def define_with_bias(module: Module) -> None:
    """Define `with_bias(table, call)`: the product with the bias converted to the kernel's type, else UNKNOWN.

    The call is then Python's, or the bias was as it must be: a record never has a bias that is gone.
    """
    with module.function("with_bias", ("ptr", "table"), ("ptr", "call"), local=True, returns="ptr") as f:
        table, record = f["table"], f["call"]
        head, fields, answer = Args(f, table, HEAD), Args(f, record, CALL), f.var(special(f, UNKNOWN))
        good = fields.bias_kind.equals(layout.ARRAY_BIAS) & fields.a_element.equals(fields.b_element)
        with f.if_(good & is_null(f, fields.dtype) & fields.tensors.equals(0)):
            pair = call(f, "ptr", "pair", table, fields.a_element, fields.bias_element, f.index(layout.BIAS))
            with f.if_(is_null(f, pair) ^ True):
                bias = f.buffer(size(OPERAND))
                place = record + at(CALL, "bias_object")
                copy_words(f, place, bias, len(OPERAND))
                copy = call(f, "ptr", "as_type", table, fields.bias_object, Args(f, pair, PAIR).descr)
                answer.value = special(f, RAISED)
                with f.if_(is_null(f, copy) ^ True):
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
    params = (("ptr", "table"), ("ptr", "call"), ("ptr", "pair"))
    with module.function("converted", *params, local=True, returns="ptr") as f:
        head, fields = Args(f, f["table"], HEAD), Args(f, f["call"], CALL)
        null = Value(f, "ptr", "null")
        answer, copies = f.var(special(f, UNKNOWN)), [f.var(null), f.var(null)]
        descr, good = Args(f, f["pair"], PAIR).descr, f.var(f.const("i1", 1))
        element = f.load("i64", descr + objects.ELEMENT)
        for name, copy in zip("ab", copies, strict=True):
            with f.if_(good.value & getattr(fields, f"{name}_element").differs(element)):
                copy.value = call(f, "ptr", "as_type", f["table"], getattr(fields, f"{name}_object"), descr)
                with f.if_(is_null(f, copy.value)):
                    answer.value, good.value = special(f, RAISED), f.const("i1", 0)
                with f.else_():
                    good.value = read(f, head, copy.value, f["call"] + at(CALL, f"{name}_object"))
        with f.if_(good.value):
            answer.value = call(f, "ptr", "product", f["table"], f["call"])
        for copy in copies:
            with f.if_(is_null(f, copy.value) ^ True):
                f.call_address(head.decref, copy.value)
        f.ret(answer.value)


def define_cast(module: Module) -> None:
    """Define `cast(table, call)`: a product whose `out` is contiguous and of a type to which the result may be cast."""
    with module.function("cast", ("ptr", "table"), ("ptr", "call"), local=True, returns="ptr") as f:
        fields, answer = Args(f, f["call"], CALL), f.var(special(f, UNKNOWN))
        contiguous = (fields.out_flags & (objects.C_CONTIGUOUS | objects.F_CONTIGUOUS)).differs(0)
        good = is_null(f, fields.out_object) ^ True
        good = good & contiguous & (fields.out_flags & objects.WRITEABLE).differs(0)
        good = (
            good
            & is_null(f, fields.dtype)
            & fields.a_element.equals(fields.b_element)
            & fields.out_element.differs(fields.a_element)
        )
        with f.if_(good & (fields.options & layout.BETA).equals(0)):
            pair = call(f, "ptr", "pair", f["table"], fields.a_element, fields.out_element, f.index(layout.CAST))
            with f.if_(is_null(f, pair) ^ True):
                answer.value = call(f, "ptr", "aside", f["table"], f["call"])
        f.ret(answer.value)
