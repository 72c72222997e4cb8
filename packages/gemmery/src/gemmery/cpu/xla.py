"""The handler by which XLA, the compiler behind JAX, calls products: one compiled function for all of them.

XLA calls `handle(frame)` on a thread of its own, without Python. The frame names the product by a key, its first
attribute; the table holds the job of each product that this process has prepared. For a product that is not there, such
as one in a program that JAX kept on disk, the handler calls Python, which prepares it.

Source: `xla/ffi/api/c_api.h` of XLA, version 0 of its interface. The offsets are those of a 64-bit machine.
"""

from __future__ import annotations

from gemmery.cpu import atomics, jit
from gemmery.cpu.abi import Args, copy_record
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.layout import JOB
from gemmery.cpu.target import Target

# XLA_FFI_CallFrame, _Buffer, _Scalar, _Extension_Base, _Metadata_Extension, _Metadata, _Api, _Error_Create_Args.
EXTENSION, API, ARGS, RESULTS, ATTRIBUTES = 8, 16, 72, 112, 160
BUFFER_DTYPE, BUFFER_DATA, BUFFER_RANK, BUFFER_DIMS = 16, 24, 32, 40
SCALAR_VALUE = 8
EXTENSION_TYPE, METADATA_TYPE, METADATA, MAJOR, MINOR = 8, 1, 24, 24, 28
ERROR_CREATE, ERROR_BYTES, ERROR_MESSAGE, ERROR_CODE = 48, 28, 16, 24
NO_MEMORY, INTERNAL = 8, 13

# The table: a head, then slots of a key and the address of an entry. A key is looked for in PROBES slots.
HEAD = (
    ("minor", "i64"),  # the version of the interface
    ("prepare", "ptr"),  # Python's function: frame -> address of an entry, or 0
    ("run", "ptr"),  # the pool's
    ("unprepared", "ptr"),  # messages
    ("no_memory", "ptr"),
)
SLOTS_AT, SLOTS, PROBES, SLOT = 64, 4096, 16, 16
TABLE_BYTES = SLOTS_AT + (SLOTS + PROBES) * SLOT

# An entry: the job runs once for each offset of the three pointers, for a batch that no single stride walks.
ENTRY = (("runs", "i64"), ("offsets", "ptr"), ("swapped", "i64"), *JOB)
JOB_AT = 8 * (len(ENTRY) - len(JOB))


def module(target: Target) -> Module:
    """Return the module of `handle(frame)`, which returns null or an error of XLA."""
    module = Module(target)
    for define in (_find, _failed, _run_entry, _handle):
        define(module)
    with module.function("handle", "frame", returns="ptr") as f:
        # With a function of its own that reads the table, HOLE stays a constant that no offset is added to.
        table = f.emit("ptr", f"inttoptr i64 {jit.HOLE} to ptr")
        f.ret(atomics.call(f, "ptr", "handle_with", table, f["frame"]))
    return module


def _find(module: Module) -> None:
    """Define `find(table, key)`: the entry of a product, or null."""
    with module.function("find", "table", ("i64", "key"), local=True, returns="ptr") as f:
        entry = f.var(f.null)
        first = f["table"] + SLOTS_AT + (f["key"] & SLOTS - 1) * SLOT
        with f.loop(0, PROBES) as i:
            slot = first + i * SLOT
            with f.if_(f.load("i64", slot, align=8).equals(f["key"])):
                entry.value = f.load("ptr", slot + 8, align=8)
        f.ret(entry.value)


def _failed(module: Module) -> None:
    """Define `failed(frame, message, code)`: an error of XLA."""
    with module.function("failed", "frame", "message", ("i64", "code"), local=True, returns="ptr") as f:
        arguments = f.buffer(32)
        f.store(f.index(ERROR_BYTES), arguments)
        f.store(f.null, arguments + EXTENSION)
        f.store(f["message"], arguments + ERROR_MESSAGE)
        f.store(f["code"], arguments + ERROR_CODE)
        create = f.load("ptr", f.load("ptr", f["frame"] + API) + ERROR_CREATE)
        f.ret(f.result_of(create, "ptr", arguments))


def _data(f: Function, list_at: int, number: int) -> Value:
    """Return the address of the memory of an operand or result."""
    buffer = f.load("ptr", f.load("ptr", f["frame"] + list_at) + 8 * number)
    return f.load("ptr", buffer + BUFFER_DATA)


def _run_entry(module: Module) -> None:
    """Define `run_entry(table, frame, entry)`: runs a job on the memory of a call; returns an errno."""
    with module.function("run_entry", "table", "frame", "record", local=True, returns="i64") as f:
        entry, place = Args(f, f["record"], ENTRY), f.buffer(8 * len(JOB))
        copy_record(f, f["record"], place, JOB, JOB_AT)
        job = Args(f, place, JOB)
        a, b, c = _data(f, ARGS, 0), _data(f, ARGS, 1), _data(f, RESULTS, 0)
        offsets, swapped, error = entry.offsets, entry.swapped.differs(0), f.var(f.index(0))
        with f.loop(0, entry.runs) as i:
            at = offsets + i * 24
            x, y = a + f.load("i64", at), b + f.load("i64", at + 8)
            job.a, job.b = f.select(swapped, y, x), f.select(swapped, x, y)
            job.c = c + f.load("i64", at + 16)
            with f.if_(error.value.equals(0)):
                error.value = f.result_of(Args(f, f["table"], HEAD).run, "i64", place)
        f.ret(error.value)


def _handle(module: Module) -> None:
    """Define `handle_with(table, frame)`: answers a question about the handler, or runs a product."""
    with module.function("handle_with", "table", "frame", local=True, returns="ptr") as f:
        table, frame, head = f["table"], f["frame"], Args(f, f["table"], HEAD)
        answer, asks = f.var(f.null), f.var(f.const("i1", 0))
        extension = f.load("ptr", frame + EXTENSION)
        with f.if_(f.is_null(extension) ^ True):
            asks.value = f.load("i32", extension + EXTENSION_TYPE).equals(METADATA_TYPE)
            with f.if_(asks.value):
                metadata = f.load("ptr", extension + METADATA)
                f.store(f.const("i32", 0), metadata + MAJOR)
                f.store(f.convert("trunc", head.minor, "i32"), metadata + MINOR)
        with f.if_(asks.value ^ True):
            attribute = f.load("ptr", f.load("ptr", frame + ATTRIBUTES))
            key = f.load("i64", f.load("ptr", attribute + SCALAR_VALUE))
            entry = f.var(atomics.call(f, "ptr", "find", table, key))
            with f.if_(f.is_null(entry.value)):
                entry.value = f.result_of(head.prepare, "ptr", frame)
            with f.if_(f.is_null(entry.value)):
                answer.value = atomics.call(f, "ptr", "failed", frame, head.unprepared, f.index(INTERNAL))
            with f.else_():
                error = atomics.call(f, "i64", "run_entry", table, frame, entry.value)
                with f.if_(error.differs(0)):
                    answer.value = atomics.call(f, "ptr", "failed", frame, head.no_memory, f.index(NO_MEMORY))
        f.ret(answer.value)
