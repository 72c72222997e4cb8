"""A compiled builtin for `gm.matmul` that repeats products: 50 ns instead of the microseconds of Python.

The first product of a kind (element types, shapes, strides) goes through Python, which checks, plans and stores a
prepared job in a table in plain memory. From then on `gm.matmul` is a builtin of compiled code: it reads the fields of
the NumPy arrays, finds the job with the same key, allocates the result and runs the job. Every other call goes to the
Python function.

Source: CPython's `PyMethodDef` (METH_FASTCALL | METH_KEYWORDS).
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmery.cpu import jit, objects, pool, threads, workspace
from gemmery.cpu.abi import Args
from gemmery.cpu.ir import Function, Module, Value, Var
from gemmery.cpu.layout import JOB
from gemmery.cpu.target import Target, host

_JOBS = 512  # a power of two; a job replaces the one that has its place
_METH_FASTCALL_KEYWORDS = 0x80 | 0x02


# The head of the table: objects, then functions of the C API.
_HEAD = tuple(
    (name, "ptr")
    for name in (
        "array_type",
        "none",
        "new_array",
        "incref",
        "decref",
        "save_thread",
        "restore_thread",
        "no_memory",
        "vectorcall",
        "run",
        "out_name",
        "python",  # the function for every other call
    )
)
# One prepared job: the key, the result, the job.
_KEY = (
    ("a_element", "i64"),
    ("b_element", "i64"),
    ("m", "i64"),
    ("k", "i64"),
    ("n", "i64"),
    ("a_row", "i64"),
    ("a_col", "i64"),
    ("b_row", "i64"),
    ("b_col", "i64"),
)
_ENTRY = (
    *_KEY,
    ("used", "i64"),
    ("c_element", "i64"),
    ("c_descr", "ptr"),  # NumPy's own object of the element type, which lives as long as the process
    ("c_row", "i64"),
    ("c_col", "i64"),
    ("a_bytes", "i64"),  # from the first byte of the array to one past its last
    ("b_bytes", "i64"),
    ("c_bytes", "i64"),
    ("plain", "i64"),  # 1: one thread and no workspace, so the kernel is called directly
    ("long", "i64"),  # 1: long enough to release the GIL
    *((f"job_{name}", type_) for name, type_ in JOB),
)
_HEAD_BYTES = 8 * len(_HEAD)
_ENTRY_BYTES = -(-8 * len(_ENTRY) // 64) * 64
_JOB_AT = 8 * (len(_ENTRY) - len(JOB))
_ALPHA_AT = 8 * [name for name, _ in JOB].index("alpha_value")
# Operations from which the GIL is released: 20 us of work, where releasing it takes 100 ns.
_LONG = 1 << 21


def module(target: Target) -> Module:
    """Return the module of `call(self, args, count, names)`, which runs matmul(a, b, out=None) or calls Python."""
    made = Module(target)
    params = (("ptr", "self"), ("ptr", "args"), ("i64", "count"), ("ptr", "names"))
    with made.function("call", *params, returns="ptr") as f:
        table = f.emit("ptr", f"inttoptr i64 {jit.HOLE} to ptr")
        head = Args(f, table, _HEAD)
        done, answer = f.var(f.const("i1", 0)), f.var(Value(f, "ptr", "null"))
        out = f.var(Value(f, "ptr", "null"))
        _find_out(f, head, out)
        with f.if_(f.emit("i1", f"icmp ne {out.value}, null")):
            a, b = f.load("ptr", f["args"]), f.load("ptr", f["args"] + 8)
            with f.if_(_is_matrix(f, head.array_type, a) & _is_matrix(f, head.array_type, b)):
                _look_up(f, table, head, a, b, out.value, done, answer)
        with f.if_(done.value ^ True):
            answer.value = _called(f, head.vectorcall, "ptr", head.python, f["args"], f["count"], f["names"])
        f.ret(answer.value)
    return made


def _find_out(f: Function, head: Args, out: Var) -> None:
    """Set `out` to that of a call (a, b), (a, b, out) or (a, b, out=out): None if missing, NULL for other calls."""
    names, count = f["names"], f["count"]
    with f.if_(f.emit("i1", f"icmp eq {names}, null")):
        with f.if_(count.equals(2)):
            out.value = head.none
        with f.if_(count.equals(3)):
            out.value = f.load("ptr", f["args"] + 16)
    with f.else_():
        one_name = count.equals(2) & f.load("i64", names + objects.TUPLE_SIZE).equals(1)
        with f.if_(one_name), f.if_(_same(f, f.load("ptr", names + objects.TUPLE_ITEMS), head.out_name)):
            out.value = f.load("ptr", f["args"] + 16)


def _same(f: Function, x: Value, y: Value) -> Value:
    return f.emit("i1", f"icmp eq {x}, {y.text}")


def _is_matrix(f: Function, array_type: Value, x: Value) -> Value:
    """Return true for a 2-D ndarray that is not a subclass; `ndim` is read only once the type is known."""
    found = f.var(f.const("i1", 0))
    with f.if_(_same(f, f.load("ptr", x + objects.TYPE), array_type)):
        found.value = f.load("i32", x + objects.NDIM).equals(2)
    return found.value


def _look_up(f: Function, table: Value, head: Args, a: Value, b: Value, out: Value, done: Var, answer: Var) -> None:
    """Find the prepared job for a and b, check or allocate `out`, and run the job."""
    a_descr, b_descr = f.load("ptr", a + objects.DESCR), f.load("ptr", b + objects.DESCR)
    key = _key(f, a, b, a_descr, b_descr)
    entry_at = table + _HEAD_BYTES + _place(f, list(key.values())) * _ENTRY_BYTES
    entry = Args(f, entry_at, _ENTRY)
    # A result inherits the metadata of a dtype, so those that have some are left to Python.
    metadata = f.load("i64", a_descr + objects.METADATA) | f.load("i64", b_descr + objects.METADATA)
    b_rows = f.load("i64", f.load("ptr", b + objects.SHAPE))
    match = entry.used.differs(0) & b_rows.equals(key["k"]) & metadata.equals(0)
    for name, value in key.items():
        match = match & f.emit("i1", f"icmp eq {value}, {getattr(entry, name).text}")
    with f.if_(match):
        has_out = _same(f, out, head.none) ^ True
        target = f.var(out)
        fits = f.var(f.const("i1", 1))
        with f.if_(has_out):
            fits.value = _fits(f, head, entry, a, b, out)
        with f.else_():
            sizes = f.buffer(16)
            f.store(key["m"], sizes)
            f.store(key["n"], sizes + 8)
            f.call_address(head.incref, "void", entry.c_descr)  # new_array takes over a reference
            null, flags = Value(f, "ptr", "null"), f.const("i32", 0)
            made = _called(
                f,
                head.new_array,
                "ptr",
                head.array_type,
                entry.c_descr,
                f.const("i32", 2),
                sizes,
                null,
                null,
                flags,
                null,
            )
            target.value = answer.value = made
            done.value = f.const("i1", 1)  # a NULL carries NumPy's MemoryError
            fits.value = f.emit("i1", f"icmp ne {made}, null")
        with f.if_(fits.value):
            done.value = f.const("i1", 1)
            with f.if_(has_out):
                f.call_address(head.incref, "void", out)
                answer.value = out
            error = _run(f, head, entry, entry_at, (a, b, target.value))
            with f.if_(error.differs(0)):
                f.call_address(head.decref, "void", answer.value)
                answer.value = _called(f, head.no_memory, "ptr")


def _key(f: Function, a: Value, b: Value, a_descr: Value, b_descr: Value) -> dict[str, Value]:
    a_shape, b_shape = f.load("ptr", a + objects.SHAPE), f.load("ptr", b + objects.SHAPE)
    a_strides, b_strides = f.load("ptr", a + objects.STRIDES), f.load("ptr", b + objects.STRIDES)
    values = (
        f.load("i64", a_descr + objects.ELEMENT),
        f.load("i64", b_descr + objects.ELEMENT),
        f.load("i64", a_shape),
        f.load("i64", a_shape + 8),
        f.load("i64", b_shape + 8),
        f.load("i64", a_strides),
        f.load("i64", a_strides + 8),
        f.load("i64", b_strides),
        f.load("i64", b_strides + 8),
    )
    return {name: value for (name, _), value in zip(_KEY, values, strict=True)}


def _place(f: Function, values: list[Value]) -> Value:
    """Return the index in the table: the high bits of the sum of the key's words, each times a constant.

    Source: Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic" (1996).
    """
    mixed = f.index(0)
    for value, factor in zip(values, _FACTORS, strict=True):
        mixed = mixed + value * factor
    return mixed >> (64 - _JOBS.bit_length() + 1)


def place(values: list[int]) -> int:
    """`_place` in Python."""
    mixed = sum(value * factor for value, factor in zip(values, _FACTORS, strict=True))
    return (mixed & 0xFFFFFFFFFFFFFFFF) >> (64 - _JOBS.bit_length() + 1)


def _signed(word: int) -> int:
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


# Odd numbers that look random: the powers of 2**64 over the golden ratio.
_FACTORS = [_signed(pow(0x9E3779B97F4A7C15, i, 1 << 64)) for i in range(1, len(_KEY) + 1)]


def _fits(f: Function, head: Args, entry: Args, a: Value, b: Value, out: Value) -> Value:
    """Return true for a writable `out` of the prepared type, shape and strides that does not overlap a or b."""
    good = f.var(f.const("i1", 0))
    with f.if_(_is_matrix(f, head.array_type, out)):
        shape, strides = f.load("ptr", out + objects.SHAPE), f.load("ptr", out + objects.STRIDES)
        good.value = (
            f.load("i64", f.load("ptr", out + objects.DESCR) + objects.ELEMENT).equals(entry.c_element)
            & f.load("i64", shape).equals(entry.m)
            & f.load("i64", shape + 8).equals(entry.n)
            & f.load("i64", strides).equals(entry.c_row)
            & f.load("i64", strides + 8).equals(entry.c_col)
            & (f.load("i32", out + objects.FLAGS) & objects.WRITEABLE).differs(0)
        )
        start, end = _span(f, out, entry.c_bytes)
        for other, size in ((a, entry.a_bytes), (b, entry.b_bytes)):
            other_start, other_end = _span(f, other, size)
            good.value = good.value & ((end <= other_start) | (other_end <= start))
    return good.value


def _span(f: Function, array: Value, size: Value) -> tuple[Value, Value]:
    start = f.load("i64", array + objects.DATA)
    return start, start + size


def _called(f: Function, address: Value, type_: str, *values: Value) -> Value:
    found = f.call_address(address, type_, *values)
    assert found is not None
    return found


def _run(f: Function, head: Args, entry: Args, entry_at: Value, arrays: tuple[Value, Value, Value]) -> Value:
    """Run a copy of the job on these arrays; return an errno.

    A copy, because another thread may replace the entry while this one runs without the GIL.
    """
    job_at = f.buffer(8 * len(JOB))
    for i in range(len(JOB)):
        f.store(f.load("i64", entry_at + (_JOB_AT + 8 * i), align=8), job_at + 8 * i, align=8)
    job = Args(f, job_at, JOB)
    for name, array in zip("abc", arrays, strict=True):
        setattr(job, name, f.load("ptr", array + objects.DATA))
    error = f.var(f.index(0))
    with f.if_(entry.plain.differs(0)):
        job.alpha, job.beta = job_at + _ALPHA_AT, job_at + (_ALPHA_AT + 16)
        f.call_address(job.kernel, "void", job_at)
    with f.else_():
        is_long = entry.long.differs(0)
        state = f.var(Value(f, "ptr", "null"))
        with f.if_(is_long):
            state.value = _called(f, head.save_thread, "ptr")
        error.value = _called(f, head.run, "i64", job_at)
        with f.if_(is_long):
            f.call_address(head.restore_thread, "void", state.value)
    return error.value


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (("name", ctypes.c_char_p), ("call", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


_kept: dict[int, np.dtype[Any]] = {}  # dtypes to which the table points, by address


@functools.cache
def _table() -> int:
    """Return the address of this process's table, or 0 where the fields of arrays are unknown or there is no pool."""
    return workspace.pages(_HEAD_BYTES + _JOBS * _ENTRY_BYTES) if pool.address() and objects.known() else 0


def builtin(python: Callable[..., Any], name: str, module_name: str, doc: str) -> Callable[..., Any]:
    """Return the compiled entry for `python`, or `python` itself where compiled code cannot read arrays.

    `doc` begins with the signature, as builtins' do, so that `help` and `inspect.signature` know it.
    """
    table = _table()
    if not table:
        return python
    target, api = host(), ctypes.pythonapi
    functions = (
        api.Py_IncRef, api.Py_DecRef, api.PyEval_SaveThread, api.PyEval_RestoreThread, api.PyErr_NoMemory,
        api.PyObject_Vectorcall,
    )  # fmt: skip
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    head: tuple[Any, ...] = (id(np.ndarray), id(None), objects.new_from_descr(), *addresses, pool.entries()["run"])
    (ctypes.c_int64 * len(_HEAD)).from_address(table)[:] = [*head, id(objects.OUT[0]), id(python)]
    call = jit.load(target, "entry", lambda: module(target), table)["call"]
    method = _Method(name.encode(), call, _METH_FASTCALL_KEYWORDS, doc.encode())
    workspace.forever(method)
    workspace.forever(python)
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.py_object)
    # Its `self` is the module, as for functions of C extensions, so that it is pickled by name.
    made: Callable[..., Any] = new(ctypes.addressof(method), sys.modules[module_name], module_name)
    return made


def remember(a: Any, b: Any, c: Any, job: bytes, flops: int) -> None:
    """Store a job for calls with matrices like a and b and a result like c, all exact ndarrays, c contiguous."""
    table = _table()
    if not table or min(*a.strides, *b.strides) < 0:  # `_span` starts at the first element
        return
    own: np.dtype[Any] = np.dtype(c.dtype.type)
    elements = [objects.element(x.dtype) for x in (a, b, c)]
    if elements[2] != objects.element(own):
        return
    _kept[id(own)] = own
    key = (*elements[:2], *a.shape, b.shape[1], *a.strides, *b.strides)
    fields = struct.unpack(f"<{len(JOB)}q", job)
    plan = dict(zip((name for name, _ in JOB), fields, strict=True))
    plain = plan["parts"] == 1 and not plan["workspace_bytes"] and flops < _LONG
    spans = (_bytes(x) for x in (a, b, c))
    entry = [*key, 1, elements[2], id(own), *c.strides, *spans, plain, flops >= _LONG, *fields]
    at = table + _HEAD_BYTES + place(list(key)) * _ENTRY_BYTES
    (ctypes.c_int64 * len(_ENTRY)).from_address(at)[:] = entry


def forget() -> None:
    """Drop every prepared job, because the number of threads has changed."""
    table = _table()
    if table:
        ctypes.memset(table + _HEAD_BYTES, 0, _JOBS * _ENTRY_BYTES)


threads.at_change.append(forget)


def _bytes(x: Any) -> int:
    return int(sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True))) + int(x.itemsize)
