"""Compiled workers: a product cut into parts, run by the caller and by workers.

A `Job` is a kernel's record and the way in which the product is cut. `run(job)` opens the job to `threads - 1` workers,
wakes those that sleep, and works on the job itself: every thread takes the next part until none is left. Then it closes
the job and waits for the workers that joined it. A worker that wakes too late finds the job closed, and nobody waits
for it. So a product is late by one part at most, and slower than on one thread by no more than the call that wakes.

Workers spin for a moment after a job, then sleep on a futex. A second caller runs its parts on its own thread while the
workers are busy: the cores are taken, so waiting for them would only add to its time. After a fork the child has no
workers and starts its own.

Memory order. `STATE` publishes a job: the caller writes the job's words, then STATE; a worker changes STATE to join,
and reads the words after that. A worker that leaves changes STATE again, which publishes its part of C; the caller
reads STATE until no worker is left. `BUSY` hands the workers from caller to caller in the same way, and a slot's first
word hands over its workspace.
"""

from __future__ import annotations

from gemmery.cpu import atomics, layout
from gemmery.cpu.abi import FIELDS, Args
from gemmery.cpu.ir import Module, Value
from gemmery.cpu.layout import JOB
from gemmery.cpu.target import Target
from gemmery.cpu.workers import mark_core, workers

_HUGE = 2 << 20  # bytes of a large page


def module(target: Target) -> Module:
    """The module of `part(job, index, workspace)`, `run(job) -> errno`, the workers, `mode()` and `set_mode(mode)`."""
    module = Module(target)
    for define in (_mode, _part, _run_parts, _reserve, _take_slot):
        define(module)
    if target.machine in layout.FUTEX:
        workers(module)
        _run_parallel(module)
        _run(module)
    return module


def _mode(module: Module) -> None:
    """Define `mode` and `set_mode`, the floating-point mode of the calling thread."""
    with module.function("mode", returns="i64") as f:
        f.ret(atomics.floating_mode(f))
    with module.function("set_mode", ("i64", "mode")) as f:
        atomics.set_floating_mode(f, f["mode"])


def _part(module: Module) -> None:
    """One part: a copy of the record moved to it, and the kernel for each of its products."""
    with module.function("part", ("ptr", "job"), ("i64", "index"), ("ptr", "workspace")) as f:
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
        record.alpha, record.beta = base + layout.JOB_AT["alpha_value"], base + layout.JOB_AT["beta_value"]
        record.workspace = f["workspace"]
        kernel = job.kernel
        with f.loop(0, f.select(job.at_once.differs(0), f.index(1), count)):
            f.call_address(kernel, "void", copy)
            record.a, record.b, record.c = (
                record.a + job.a_batch, record.b + job.b_batch, record.c + job.c_batch
            )  # fmt: skip


def _run_parts(module: Module) -> None:
    """Run parts until none is left."""
    with module.function("run_parts", ("ptr", "pool"), ("ptr", "job"), ("ptr", "workspace"), local=True) as f:
        parts = Args(f, f["job"], JOB).parts
        with f.while_() as again:
            # Each index goes to one thread. The job's words were published by STATE before, so this orders nothing.
            index = atomics.fetch_add(f, f["pool"] + layout.NEXT, f.index(1))
            again.until(index >= parts)
            f.call("part", f["job"], index, f["workspace"])


def _reserve(module: Module) -> None:
    """Make a slot's workspace at least `size` bytes; returns an errno.

    The thread that will use the memory asks the system for it, so that its pages are close to its core. Sizes are whole
    large pages, since Linux uses those for whole ones alone.
    """
    enomem, hugepage = 12, 14
    with module.function("reserve", ("ptr", "pool"), ("ptr", "slot"), ("i64", "size"), local=True, returns="i64") as f:
        pool, at, size_at = f["pool"], f["slot"] + 8, f["slot"] + 16
        error = f.var(f.index(0))
        has = f.load("i64", size_at)
        with f.if_(has < f["size"]):
            with f.if_(has > 0):
                atomics.libc(f, pool, "munmap", "i32", f.load("ptr", at), has)
            f.store(f.index(0), size_at)
            null, flags = Value(f, "ptr", "null"), [f.const("i32", number) for number in (3, 0x22, -1)]
            size = f.select(f["size"] > _HUGE // 2, f["size"] + (_HUGE - 1) & -_HUGE, f["size"])
            pages = atomics.libc(f, pool, "mmap", "ptr", null, size, *flags, f.index(0))
            with f.if_(f.emit("i1", f"icmp eq {pages}, inttoptr (i64 -1 to ptr)")):
                error.value = enomem
            with f.else_():
                for advice in (layout.WIPE_ON_FORK, hugepage):
                    atomics.libc(f, pool, "madvise", "i32", pages, size, f.const("i32", advice))
                f.store(pages, at)
                f.store(size, size_at)
        f.ret(error.value)


def _take_slot(module: Module) -> None:
    """Take a slot for this call alone; when all CALLERS are taken, wait for one."""
    with module.function("take_slot", ("ptr", "pool"), local=True, returns="ptr") as f:
        slot = f.var(f["pool"] + layout.SLOTS)
        with f.while_() as again:
            # Pairs with the store that frees the slot, in `run`: its workspace's address and size are visible.
            again.until(atomics.compare_exchange(f, slot.value, f.index(0), f.index(1)))
            slot.value = slot.value + layout.SLOT
            end = f["pool"] + layout.WORKER_SLOTS
            past = f.emit("i1", f"icmp eq {slot.value}, {end.text}")
            with f.if_(past):
                atomics.libc(f, f["pool"], "sched_yield", "i32")
                slot.value = f["pool"] + layout.SLOTS
        f.ret(slot.value)


def _run_parallel(module: Module) -> None:
    """Run a job with the workers; returns 0 when another caller uses them."""
    with module.function(
        "run_parallel", ("ptr", "pool"), ("ptr", "job"), ("ptr", "workspace"), local=True, returns="i64"
    ) as f:  # fmt: skip
        pool = f["pool"]
        job = Args(f, f["job"], JOB)
        # Pairs with the store to BUSY at the end: what the previous caller wrote into STARTED and LAST is visible.
        free = atomics.compare_exchange(f, pool + layout.BUSY, f.index(0), f.index(1))
        with f.if_(free):
            most_helpers = f.min(f.min(job.threads, job.parts) - 1, layout.WORKERS)
            f.call("start", pool, most_helpers)
            helpers = f.min(most_helpers, f.load("i64", pool + layout.STARTED))
            # Plain stores: the last job is closed and its workers have left, so nobody reads these words before STATE
            # has a new number.
            f.store(f.index(0), pool + layout.NEXT)
            f.store(f["job"], pool + layout.OPEN_JOB)
            f.store(atomics.floating_mode(f), pool + layout.MODE)
            number = (atomics.load(f, pool + layout.STATE) >> 32) + 1
            for word in range(layout.MASK // 8):
                f.store(f.index(0), pool + (layout.CPUS + 8 * word))
            mark_core(f, pool)
            # Opens the job and publishes the words above. An exchange and not a store, because `notify` reads SLEEPING
            # next, and a store may wait in the core's buffer until after that read. A worker does the opposite: it
            # increments SLEEPING, then the futex compares STATE. So at least one of them sees the other: the caller
            # sees a sleeper to wake, or the worker sees the new number and does not sleep.
            atomics.exchange(f, pool + layout.STATE, number << 32 | helpers << 16)
            f.call("notify", pool, job.wakes, helpers)
            f.call("run_parts", pool, f["job"], f["workspace"])
            # Closes the job: no places are left. A worker that loaded STATE before fails in its compare_exchange.
            atomics.fetch_and(f, pool + layout.STATE, ~0xFFFF0000)
            spins = f.buffer(8)
            f.store(f.index(0), spins)
            # Pairs with the decrement by each worker that leaves: its part of C is visible.
            with f.while_() as again:
                again.until((atomics.load(f, pool + layout.STATE) & 0xFFFF).equals(0))
                atomics.pause(f, pool, spins)
            atomics.store(f, f.index(0), pool + layout.WANTED)
            f.store(atomics.now(f, pool), pool + layout.LAST)
            # A release store is enough: this call reads nothing of the pool after it.
            atomics.store(f, f.index(0), pool + layout.BUSY)
        f.ret(f.convert("zext", free, "i64"))


def _run(module: Module) -> None:
    """Run a job; returns an errno, 0 when it is done. Nothing is written unless there is memory for the workspace."""
    with module.function("run", ("ptr", "job"), returns="i64") as f:
        job = Args(f, f["job"], JOB)
        pool = job.pool
        slot = atomics.call(f, "ptr", "take_slot", pool)
        error = atomics.call(f, "i64", "reserve", pool, slot, job.workspace_bytes)
        with f.if_(error.equals(0)):
            buffer = f.load("ptr", slot + 8)
            shared = f.var(f.index(0))
            with f.if_((job.threads > 1) & (job.parts > 1)):
                shared.value = atomics.call(f, "i64", "run_parallel", pool, f["job"], buffer)
            with f.loop(0, f.select(shared.value.equals(0), job.parts, f.index(0))) as index:
                f.call("part", f["job"], index, buffer)
        atomics.store(f, f.index(0), slot)
        f.ret(error)
