"""The module of the compiled builtins: one function each, and what they share."""

from __future__ import annotations

from gemmery.cpu import entry_arguments as arguments
from gemmery.cpu import entry_family, entry_lookup, entry_quick, entry_run, entry_tensors, entry_types, jit
from gemmery.cpu.abi import Args
from gemmery.cpu.atomics import call
from gemmery.cpu.entry_arguments import is_null
from gemmery.cpu.entry_layout import ARGUMENTS, BUILTINS, CALL, HEAD, OPERAND, size
from gemmery.cpu.entry_run import RAISED, UNKNOWN, called, special
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.target import Target


def module(target: Target) -> Module:
    """Return the module of `NAME(self, args, count, names)` for each builtin, which computes or calls Python."""
    module = Module(target)
    shared = (
        arguments.define_read, arguments.define_number, entry_lookup.define_find, entry_run.define_launch,
        entry_run.define_execute, entry_run.define_copied, entry_run.define_aside, entry_run.define_prepared,
        entry_types.define_pair, entry_types.define_as_type, entry_types.define_with_bias,
        entry_types.define_converted, entry_types.define_cast, entry_family.define_member,
        entry_run.define_product,
    )  # fmt: skip
    entry_tensors.define(module, OPERAND)
    for define in shared:
        define(module)
    for name in BUILTINS:
        params = (("ptr", "self"), ("ptr", "args"), ("i64", "count"), ("ptr", "names"))
        with module.function(name, *params, returns="ptr") as f:
            _builtin(f, name)
    return module


def python(target: Target) -> Module:
    """Return the module of builtins that only call Python, for the time until the others are compiled."""
    module = Module(target)
    params = (("ptr", "args"), ("i64", "count"), ("ptr", "names"))
    for name in BUILTINS:
        # With a function of its own that reads the table, HOLE stays a constant that no offset is added to.
        with module.function(f"call_{name}", ("ptr", "table"), *params, local=True, returns="ptr") as f:
            head = Args(f, f["table"], HEAD)
            function = getattr(head, f"python_{name}")
            f.ret(called(f, head.vectorcall, "ptr", function, f["args"], f["count"], f["names"]))
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
    unknown = is_null(f, answer.value)
    with (
        f.if_(unknown),
        f.if_(arguments.parse(f, head, name, slots)),
        f.if_(arguments.operands(f, head, name, table, slots, record)),
    ):
        if name == "matmul":
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
        answer.value = called(f, head.vectorcall, "ptr", python, f["args"], f["count"], f["names"])
    with f.else_():
        raised = f.emit("i64", f"ptrtoint {answer.value} to i64").equals(RAISED)
        answer.value = f.select(raised, Value(f, "ptr", "null"), answer.value)
    f.ret(answer.value)
