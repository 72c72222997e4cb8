"""Compiled workers: a product cut into parts, run by the caller and whoever is awake.

A `Job` is a kernel's record and how the product is cut. `run(job)` gives each of its parts to the next thread
that asks. It opens the job to `threads - 1` workers, wakes those that sleep, works itself, closes the job and
waits for those that came: one that wakes too late finds nothing to do, and nobody waits for it. So a product is
late by a part at most, and never slower than alone by more than the call that wakes.

Workers spin for a moment after a job, then sleep on a futex. A second caller while they are busy runs its parts on
its own thread: the cores are taken, so to wait for them would only add to its time. After a fork the child starts
with no workers and makes its own.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

from gemmery.cpu import jit, workspace
from gemmery.cpu.abi import FIELDS, Args
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.target import Target, host

# What `run` reads, 8-byte words: a record whose alpha, beta and workspace are filled in by `part`, the two scalars
# (16 bytes each), and the cut. A part is `rows` x `columns` of C in `products` products of the batch.
JOB = (
    *FIELDS,
    ("alpha_value", "i64"),
    ("alpha_high", "i64"),
    ("beta_value", "i64"),
    ("beta_high", "i64"),
    ("kernel", "ptr"),
    ("at_once", "i64"),  # 1: the kernel runs `batch` products itself
    ("threads", "i64"),
    ("parts", "i64"),  # row_parts * column_parts * groups of products
    ("row_parts", "i64"),
    ("column_parts", "i64"),
    ("rows", "i64"),
    ("columns", "i64"),
    ("products", "i64"),
    ("workspace_bytes", "i64"),
    ("wakes", "i64"),  # 1: enough work to wake sleepers for it alone
    ("pool", "ptr"),
)
_JOB_AT = {name: 8 * i for i, (name, _) in enumerate(JOB)}

# The pool: functions of the C library, by address; then state, all zero at first and in a forked child. Words that
# different threads write lie 128 bytes apart: neighbouring lines are fetched in pairs.
LIBC = (
    "pthread_create", "pthread_sigmask", "mmap", "munmap", "madvise", "syscall", "clock_gettime",
    "sched_yield", "sched_getcpu", "sched_getaffinity", "sched_setaffinity",
)  # fmt: skip
_FUNCTIONS = {name: 8 * i for i, name in enumerate((*LIBC, "worker"))}
_STATE = 128  # number of the job << 32 | workers it may still take << 16 | workers at it
_SLEEPING = 256  # workers in the futex
_BUSY = 384  # 1 while a caller has the workers
_STARTED = 392  # workers there are
_OPEN_JOB = 400
_LAST = 408  # when the last job ended, ns
_NEXT = 512  # the next part
_WANTED = 640  # sleepers still to be woken
_CPUS = 768  # a bit for each core that has a thread at the job
_SLOTS = 896
_SLOT = 64  # bytes of a slot: taken (a worker's: the pool), address and size of a workspace, pauses since it worked
CALLERS, WORKERS = 64, 255
SIZE = _SLOTS + (CALLERS + WORKERS) * _SLOT

_SPINS = 2000  # pauses before a worker sleeps: 25 to 80 us, by the CPU
_PATIENCE = 64  # pauses between two offers of the core to whoever else wants it
_FAN = 4  # sleepers that one thread wakes; they wake the next
_HUGE = 2 << 20  # bytes of a large page
_MASK = 128  # bytes of a set of cores
_BURST = 100_000  # ns between jobs that are taken for a run of them
_FUTEX = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98}
_FUTEX_WAIT, _FUTEX_WAKE, _FUTEX_PRIVATE = 0, 1, 128
_PAUSE = {"x86_64": "llvm.x86.sse2.pause()", "amd64": "llvm.x86.sse2.pause()"}
_OTHERS = "llvm.aarch64.hint(i32 1)"

_made: list[int] = []


def module(target: Target) -> Module:
    """The module of `part(job, index, workspace)`, `run(job) -> errno` and the workers."""
    made = Module(target)
    _part(made)
    _drain(made)
    _fit(made)
    _caller_slot(made)
    if target.machine in _FUTEX:
        _start(made)
        _news(made)
        _join(made)
        _wake(made)
        _rouse(made)
        _crew(made)
        _step_aside(made)
        _worker(made)
        _run(made)
    return made


def _part(made: Module) -> None:
    """One part: a copy of the record moved to it, and the kernel for each of its products."""
    with made.function("part", ("ptr", "job"), ("i64", "index"), ("ptr", "workspace")) as f:
        base = f["job"]
        job = Args(f, base, JOB)
        copy = f.buffer(8 * len(FIELDS))
        for i in range(len(FIELDS)):
            f.store(f.load("i64", base + 8 * i, align=8), copy + 8 * i, align=8)
        record = Args(f, copy)
        rest = f["index"] // job.row_parts
        row = (f["index"] - rest * job.row_parts) * job.rows
        group = rest // job.column_parts
        column = (rest - group * job.column_parts) * job.columns
        first = group * job.products
        count = f.min(job.products, job.batch - first)
        record.m, record.n, record.batch = f.min(job.rows, job.m - row), f.min(job.columns, job.n - column), count
        record.a = job.a + row * job.a_row + first * job.a_batch
        record.b = job.b + column * job.b_col + first * job.b_batch
        record.c = job.c + row * job.c_row + column * job.c_col + first * job.c_batch
        record.bias = job.bias + column * job.bias_step
        record.alpha, record.beta = base + _JOB_AT["alpha_value"], base + _JOB_AT["beta_value"]
        record.workspace = f["workspace"]
        kernel = job.kernel
        with f.loop(0, f.select(job.at_once.differs(0), f.index(1), count)):
            f.call_address(kernel, "void", copy)
            record.a, record.b, record.c = (
                record.a + job.a_batch, record.b + job.b_batch, record.c + job.c_batch
            )  # fmt: skip


def _drain(made: Module) -> None:
    """Take parts until there are none."""
    with made.function("drain", ("ptr", "pool"), ("ptr", "job"), ("ptr", "workspace"), local=True) as f:
        parts = Args(f, f["job"], JOB).parts
        with f.while_() as again:
            index = _add(f, f["pool"] + _NEXT, f.index(1))
            again.until(index >= parts)
            f.call("part", f["job"], index, f["workspace"])


def _fit(made: Module) -> None:
    """Let a slot's workspace have `size` bytes; the result is an errno.

    Memory comes straight from the system, by the thread that will use it, so that its pages lie near its core. Linux
    gives large pages to whole ones alone.
    """
    enomem, dontfork, hugepage = 12, 10, 14
    with made.function("fit", ("ptr", "pool"), ("ptr", "slot"), ("i64", "size"), local=True, returns="i64") as f:
        pool, at, held = f["pool"], f["slot"] + 8, f["slot"] + 16
        error = f.var(f.index(0))
        has = f.load("i64", held)
        with f.if_(has < f["size"]):
            with f.if_(has > 0):
                _libc(f, pool, "munmap", "i32", f.load("ptr", at), has)
            f.store(f.index(0), held)
            null, flags = Value(f, "ptr", "null"), [f.const("i32", number) for number in (3, 0x22, -1)]
            size = f.select(f["size"] > _HUGE // 2, f["size"] + (_HUGE - 1) & -_HUGE, f["size"])
            pages = _libc(f, pool, "mmap", "ptr", null, size, *flags, f.index(0))
            with f.if_(f.emit("i1", f"icmp eq {pages}, inttoptr (i64 -1 to ptr)")):
                error.value = enomem
            with f.else_():
                for advice in (dontfork, hugepage):
                    _libc(f, pool, "madvise", "i32", pages, size, f.const("i32", advice))
                f.store(pages, at)
                f.store(size, held)
        f.ret(error.value)


def _caller_slot(made: Module) -> None:
    """A slot for this call alone; more than CALLERS calls at once take turns."""
    with made.function("caller_slot", ("ptr", "pool"), local=True, returns="ptr") as f:
        slot = f.var(f["pool"] + _SLOTS)
        with f.while_() as again:
            again.until(_exchange(f, slot.value, f.index(0), f.index(1)))
            slot.value = slot.value + _SLOT
            past = f.emit("i1", f"icmp eq {slot.value}, {(f['pool'] + (_SLOTS + CALLERS * _SLOT)).text}")
            with f.if_(past):
                _libc(f, f["pool"], "sched_yield", "i32")
                slot.value = f["pool"] + _SLOTS
        f.ret(slot.value)


def _start(made: Module) -> None:
    """Start workers until there are `wanted`, or the system refuses one.

    They leave signals to the program's own threads, except those that say that the thread itself went wrong.
    """
    segv, bus, fpe, ill = 11, 7, 8, 4
    with made.function("start", ("ptr", "pool"), ("i64", "wanted"), local=True) as f:
        pool, started = f["pool"], f["pool"] + _STARTED
        with f.if_(f.load("i64", started) < f["wanted"]):
            blocked, before, thread = f.buffer(128), f.buffer(128), f.buffer(8)
            for i in range(16):
                f.store(f.const("i64", -1), blocked + 8 * i)
            f.store(f.const("i64", -1 - sum(1 << number - 1 for number in (segv, bus, fpe, ill))), blocked)
            null = Value(f, "ptr", "null")
            _libc(f, pool, "pthread_sigmask", "i32", f.const("i32", 0), blocked, before)
            with f.while_() as again:
                have = f.load("i64", started)
                again.until(have >= f["wanted"])
                slot = pool + (have * _SLOT + (_SLOTS + CALLERS * _SLOT))
                f.store(pool, slot)
                body = f.load("ptr", pool + _FUNCTIONS["worker"])
                error = _libc(f, pool, "pthread_create", "i32", thread, null, body, slot)
                again.until(error.differs(0))
                f.store(have + 1, started)
            _libc(f, pool, "pthread_sigmask", "i32", f.const("i32", 2), before, null)


def _news(made: Module) -> None:
    """The number of the newest job, once it is not `last`: spin, then sleep."""
    with made.function("news", ("ptr", "pool"), ("ptr", "spins"), ("i64", "last"), local=True, returns="i64") as f:
        pool, last = f["pool"], f["last"]
        number = f.var(last)
        with f.while_() as again:
            number.value = _load(f, pool + _STATE) >> 32
            again.until(number.value.differs(last))
            with f.if_(f.load("i64", f["spins"]) < _SPINS):
                _pause(f, pool, f["spins"])
            with f.else_():
                _add(f, pool + _SLEEPING, f.index(1))
                _futex(f, pool, _FUTEX_WAIT, last)
                _add(f, pool + _SLEEPING, f.index(-1))
        f.ret(number.value)


def _join(made: Module) -> None:
    """Take a place at the open job: its state before, or 0 when there is no place left."""
    with made.function("join", ("ptr", "pool"), local=True, returns="i64") as f:
        found = f.var(f.index(0))
        with f.while_() as again:
            found.value = _load(f, f["pool"] + _STATE)
            places = found.value & 0xFFFF0000
            with f.if_(places.equals(0)):
                found.value = 0
            again.until(places.equals(0))
            again.until(_exchange(f, f["pool"] + _STATE, found.value, found.value - 0xFFFF))
        f.ret(found.value)


def _crew(made: Module) -> None:
    """Run a job with the workers; 0 when another caller has them."""
    with made.function(
        "crew", ("ptr", "pool"), ("ptr", "job"), ("ptr", "workspace"), local=True, returns="i64"
    ) as f:  # fmt: skip
        pool = f["pool"]
        job = Args(f, f["job"], JOB)
        free = _exchange(f, pool + _BUSY, f.index(0), f.index(1))
        with f.if_(free):
            wanted = f.min(f.min(job.threads, job.parts) - 1, WORKERS)
            f.call("start", pool, wanted)
            helpers = f.min(wanted, f.load("i64", pool + _STARTED))
            f.store(f.index(0), pool + _NEXT)
            f.store(f["job"], pool + _OPEN_JOB)
            number = (_load(f, pool + _STATE) >> 32) + 1
            for word in range(_MASK // 8):
                f.store(f.index(0), pool + (_CPUS + 8 * word))
            _claim(f, pool)
            _swap(f, pool + _STATE, number << 32 | helpers << 16)
            f.call("rouse", pool, job.wakes, helpers)
            f.call("drain", pool, f["job"], f["workspace"])
            f.emit("i64", f"atomicrmw and {pool + _STATE}, i64 {~0xFFFF0000} seq_cst")
            spins = f.buffer(8)
            f.store(f.index(0), spins)
            with f.while_() as again:
                again.until((_load(f, pool + _STATE) & 0xFFFF).equals(0))
                _pause(f, pool, spins)
            _store(f, f.index(0), pool + _WANTED)
            f.store(_now(f, pool), pool + _LAST)
            _store(f, f.index(0), pool + _BUSY)
        f.ret(f.convert("zext", free, "i64"))


def _rouse(made: Module) -> None:
    """Have sleepers woken, as many as a job lacks, when it is worth their while or one of a run of jobs.

    A futex wake takes the caller 5 us and the sleeper 20 to 50 us in a virtual machine: as long as n = 128 takes.
    """
    with made.function("rouse", ("ptr", "pool"), ("i64", "wakes"), ("i64", "helpers"), local=True) as f:
        pool = f["pool"]
        sleeping = _load(f, pool + _SLEEPING)
        lacking = f["helpers"] - (f.load("i64", pool + _STARTED) - sleeping)
        with f.if_((sleeping > 0) & (lacking > 0)):
            worth = f.var(f["wakes"].differs(0))
            with f.if_(worth.value ^ True):
                worth.value = _now(f, pool) - f.load("i64", pool + _LAST) < _BURST
            with f.if_(worth.value):
                _store(f, lacking, pool + _WANTED)
                f.call("wake", pool)


def _wake(made: Module) -> None:
    """Wake some of those that are wanted."""
    with made.function("wake", ("ptr", "pool"), local=True) as f, f.if_(_load(f, f["pool"] + _WANTED) > 0):
        left = _add(f, f["pool"] + _WANTED, f.index(-_FAN))
        with f.if_(left > 0):
            _futex(f, f["pool"], _FUTEX_WAKE, f.min(left, _FAN))


def _step_aside(made: Module) -> None:
    """Leave a core that another thread of the job is on, if a free one is allowed.

    The scheduler likes to put a woken thread on the core of the one that woke it, and leaves it there for
    milliseconds. The mask is put back at once: the thread is moved, not bound.
    """
    with made.function("step_aside", ("ptr", "pool"), local=True) as f:
        pool = f["pool"]
        with f.if_(_claim(f, pool)):
            size, allowed, free = f.index(_MASK), f.buffer(_MASK), f.buffer(_MASK)
            for word in range(0, _MASK, 8):
                f.store(f.index(0), allowed + word)
            me = f.const("i32", 0)
            _libc(f, pool, "sched_getaffinity", "i32", me, size, allowed)
            some = f.index(0)
            for word in range(0, _MASK, 8):
                left = f.load("i64", allowed + word) & (_load(f, pool + (_CPUS + word)) ^ -1)
                f.store(left, free + word)
                some = some | left
            with f.if_(some.differs(0)):
                _libc(f, pool, "sched_setaffinity", "i32", me, size, free)
                _libc(f, pool, "sched_setaffinity", "i32", me, size, allowed)
                _claim(f, pool)


def _claim(f: Function, pool: Value) -> Value:
    """Mark this thread's core; true when it was marked."""
    cpu = f.convert("zext", _libc(f, pool, "sched_getcpu", "i32"), "i64") & 8 * _MASK - 1
    bit = f.index(1) << (cpu & 63)
    before = f.emit("i64", f"atomicrmw or {pool + _CPUS + (cpu >> 6) * 8}, {bit} seq_cst")
    return (before & bit).differs(0)


def _worker(made: Module) -> None:
    """The life of a worker: wait for a job, find a place at it, take parts, leave."""
    with made.function("worker", ("ptr", "slot")) as f:
        slot = f["slot"]
        pool, spins = f.load("ptr", slot), slot + 24
        last = f.var(f.index(0))
        with f.while_():
            last.value = _call(f, "i64", "news", pool, spins, last.value)
            found = _call(f, "i64", "join", pool)
            with f.if_(found.differs(0)):
                last.value = found >> 32
                f.call("wake", pool)
                f.call("step_aside", pool)
                job = f.load("ptr", pool + _OPEN_JOB)
                error = _call(f, "i64", "fit", pool, slot, Args(f, job, JOB).workspace_bytes)
                with f.if_(error.equals(0)):
                    f.call("drain", pool, job, f.load("ptr", slot + 8))
                _add(f, pool + _STATE, f.index(-1))
                f.store(f.index(0), spins)


def _run(made: Module) -> None:
    """The whole of a job; the result is an errno, 0 when it is done."""
    with made.function("run", ("ptr", "job"), returns="i64") as f:
        job = Args(f, f["job"], JOB)
        pool = job.pool
        slot = _call(f, "ptr", "caller_slot", pool)
        error = _call(f, "i64", "fit", pool, slot, job.workspace_bytes)
        with f.if_(error.equals(0)):
            buffer = f.load("ptr", slot + 8)
            shared = f.var(f.index(0))
            with f.if_((job.threads > 1) & (job.parts > 1)):
                shared.value = _call(f, "i64", "crew", pool, f["job"], buffer)
            with f.loop(0, f.select(shared.value.equals(0), job.parts, f.index(0))) as index:
                f.call("part", f["job"], index, buffer)
        _store(f, f.index(0), slot)
        f.ret(error)


# Atomics and calls; every order is at least acquire or release, as each word hands memory from thread to thread.


def _load(f: Function, at: Value) -> Value:
    return f.emit("i64", f"load atomic i64, {at} seq_cst, align 8")


def _store(f: Function, new: Value, at: Value) -> None:
    f.line(f"store atomic {new}, {at} release, align 8")


def _add(f: Function, at: Value, number: Value) -> Value:
    return f.emit("i64", f"atomicrmw add {at}, {number} seq_cst")


def _swap(f: Function, at: Value, new: Value) -> None:
    f.emit("i64", f"atomicrmw xchg {at}, {new} seq_cst")


def _exchange(f: Function, at: Value, old: Value, new: Value) -> Value:
    both = f.emit("{ i64, i1 }", f"cmpxchg {at}, {old}, {new} seq_cst seq_cst")
    return f.emit("i1", f"extractvalue {both}, 1")


def _call(f: Function, type_: str, name: str, *values: Value) -> Value:
    return f.emit(type_, f"call {type_} @{name}({', '.join(map(str, values))})")


def _libc(f: Function, pool: Value, name: str, type_: str, *values: Value) -> Value:
    address = f.load("ptr", pool + _FUNCTIONS[name])
    return f.emit(type_, f"call {type_} {address.text}({', '.join(map(str, values))})")


def _futex(f: Function, pool: Value, operation: int, number: Value) -> None:
    """Wait while the number of the job is `number`, or wake that many."""
    call = f.load("ptr", pool + _FUNCTIONS["syscall"])
    values = [_FUTEX[f.target.machine], pool + (_STATE + 4), operation | _FUTEX_PRIVATE, number, 0, 0, 0]
    text = ", ".join(str(v) if isinstance(v, Value) else f"i64 {v}" for v in values)
    f.emit("i64", f"call i64 (i64, ...) {call.text}({text})")


def _now(f: Function, pool: Value) -> Value:
    """Monotonic time in ns."""
    time = f.buffer(16)
    _libc(f, pool, "clock_gettime", "i32", f.const("i32", 1), time)
    return f.load("i64", time) * 1_000_000_000 + f.load("i64", time + 8)


def _pause(f: Function, pool: Value, spins: Value) -> None:
    """A moment; now and then the core is offered to others, for a woken worker may have been put on it."""
    name = _PAUSE.get(f.target.machine, _OTHERS)
    f.module.declare(f"declare void @{name.replace('i32 1', 'i32')}")
    f.line(f"call void @{name}")
    count = f.load("i64", spins) + 1
    f.store(count, spins)
    with f.if_((count & (_PATIENCE - 1)).equals(0)):
        _libc(f, pool, "sched_yield", "i32")


def address() -> int:
    """The pool of this process, made on first use; 0 on a system without futexes."""
    if sys.platform != "linux" or host().machine not in _FUTEX:
        return 0
    return _made[0] if _made else _make()


def _make() -> int:
    libc = ctypes.CDLL(None)
    functions = [ctypes.cast(getattr(libc, name), ctypes.c_void_p).value or 0 for name in LIBC]
    at = workspace.pages(SIZE)
    (ctypes.c_int64 * len(_FUNCTIONS)).from_address(at)[:] = [*functions, entries()["worker"]]
    os.register_at_fork(after_in_child=functools.partial(ctypes.memset, at + _STATE, 0, SIZE - _STATE))
    _made.append(at)  # of two threads that came here at once, the second's pool is not used again
    return at


def entries() -> dict[str, int]:
    """Addresses of the compiled functions: `part`, and where there is a pool `run`."""
    return jit.load(host(), "pool", lambda: module(host()))


def started() -> int:
    """Workers that this process has started."""
    at = address()
    return ctypes.c_int64.from_address(at + _STARTED).value if at else 0
