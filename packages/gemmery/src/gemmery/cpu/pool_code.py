"""Compiled workers: a product cut into parts, run by the caller and by workers.

A job is a kernel's record and the way in which the product is cut. `run(job)` opens the job to `threads - 1` workers,
wakes those that sleep, and works on the job itself: every thread takes the next part until none is left. Then it closes
the job and waits for the workers that joined it. A worker that wakes too late finds the job closed, and nobody waits
for it. So a product is late by one part at most, and slower than on one thread by no more than the call that wakes.

Workers spin for a moment after a job, longer if jobs come often, then sleep on a futex. A second caller runs its parts
on its own thread while the workers are busy: the cores are taken, so waiting for them would only add to its time. After
a fork the child has no workers and starts its own.

The protocol. STATE holds three numbers: that of the newest job, the places left in it, the workers in it.

| step | by | STATE | from |
| --- | --- | --- | --- |
| open | the caller that holds BUSY | n + 1, helpers, 0 | n, 0, 0 |
| join | a worker | n, places - 1, workers + 1 | n, places > 0, workers |
| leave | a worker that joined | n, places, workers - 1 | n, places, workers > 0 |
| close | the caller that opened | n, 0, workers | n, places, workers |

A job is over when places and workers are 0, and only its caller opens the next, so n changes while nobody is in a job.

| words | written by | read by |
| --- | --- | --- |
| OPEN_JOB, MODE, NEXT = 0, CPUS = 0 | the caller, before it opens | workers between join and leave |
| NEXT, CPUS | caller and workers, by additions and "or"s | the same |
| STARTED, LAST | the caller that holds BUSY | that caller |
| WANTED | the caller; whoever wakes takes some off | workers between join and leave |
| SLEEPING | workers, around their sleep | the caller, after it opened |
| address and size in a slot | who took the slot; the worker to which it belongs | the same |

Memory order. Every change of STATE is an exchange, an addition or an "and", so all of them are one release sequence:
who reads STATE sees what each thread wrote before its change. A worker that joins thus sees the words of the job, and
the caller that reads "no workers" sees every worker's part of C. After its leave a worker touches nothing of the job,
whose memory is the caller's stack. BUSY and the first word of a slot are locks: taken by compare-and-exchange
(acquire), freed by a store (release). The words they guard are plain.

No lost wake-up. To sleep, a worker increments SLEEPING and then the futex compares the number in STATE, after a barrier
of its own; to wake, a caller exchanges STATE and then reads SLEEPING. All four are sequentially consistent, so one of
the two sees the other: the worker does not sleep, or the caller wakes it. Results do not depend on it: a caller runs
every part that no worker takes, and waits for none that has not joined.

A product whose parts would pack the same columns of B several times is two jobs: one that packs all of B, and one that
multiplies. Between them the caller waits for every worker that joined.

Forks: the words from STATE on are zero in a child, so there BUSY and slots are free and no worker is started. The job
that another thread ran is not the child's. Nothing here is a cancellation point, and no one has a worker's handle, so
no thread ends between taking BUSY and freeing it. Workers never end; at the end of the process the system stops them.
They use the pool, the job and the C library alone, never Python.
"""

from __future__ import annotations

from gemmery.cpu import atomics, layout, symmetric
from gemmery.cpu.abi import FIELDS, Args, copy_record
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.layout import JOB
from gemmery.cpu.target import Target

_HUGE = 2 << 20  # bytes of a large page
# Pauses before a worker sleeps: 25 to 80 us, by the CPU. Where its last sleep was shorter than _SERIES, it waits longer
# for the next job: to be woken takes it 20 to 50 us, as long as a product with n = 160.
_SPINS, _SPINS_IN_SERIES = 2_000, 30_000
_FAN = 4  # sleepers that one thread wakes; they wake the others
_SERIES = 1_000_000  # ns between two jobs of a series


def module(target: Target) -> Module:
    """The module of `part(job, index, workspace)`, `run(job) -> errno`, the workers, `mode()` and `set_mode(mode)`."""
    module = Module(target)
    for define in (_mode, symmetric.mirror, symmetric.halve, _part, _run_parts, _reserve, _take_slot):
        define(module)
    if target.machine in layout.FUTEX:
        _workers(module)
        _run_parallel(module)
        _run_cut(module)
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
    with module.function("part", "job", ("i64", "index"), "workspace") as f:
        base = f["job"]
        job = Args(f, base, JOB)
        copy = f.buffer(8 * len(FIELDS))
        copy_record(f, base, copy, FIELDS)
        record = Args(f, copy)
        rest = f["index"] // job.row_parts
        row = (f["index"] - rest * job.row_parts) * job.rows
        group = rest // job.column_parts
        column = (rest - group * job.column_parts) * job.columns
        first = group * job.products
        count = f.min(job.products, job.batch - first)
        half, end = job.half.differs(0), f.min(row + job.rows, job.m)
        row = f.select(half, f.max(row, column), row)  # from the diagonal down
        below, rows = row - column, end - row
        record.m, record.n, record.batch = rows, f.min(job.columns, job.n - column), count
        record.below = f.select(half, below + 1, f.index(0))
        record.a = job.a + row * job.a_row + first * job.a_batch
        record.b = job.b + column * job.b_col + first * job.b_batch
        record.c = job.c + row * job.c_row + column * job.c_col + first * job.c_batch
        record.bias = job.bias + column * job.bias_step
        record.alpha, record.beta = base + layout.JOB_AT["alpha_value"], base + layout.JOB_AT["beta_value"]
        record.workspace = f["workspace"]
        kernel = job.kernel
        with f.loop(0, f.select(rows > 0, f.select(job.at_once.differs(0), f.index(1), count), f.index(0))):
            f.call_address(kernel, copy)
            with f.if_(half):
                image = record.c + below * (job.c_col - job.c_row)
                f.call("mirror", record.c, image, job.c_col, job.c_row, rows, record.n, below)
            record.a, record.b, record.c = (
                record.a + job.a_batch, record.b + job.b_batch, record.c + job.c_batch
            )  # fmt: skip


def _run_parts(module: Module) -> None:
    """Run parts until none is left."""
    with module.function("run_parts", "pool", "job", "workspace", local=True) as f:
        parts = Args(f, f["job"], JOB).parts
        with f.while_() as again:
            # Each index goes to one thread. The job's words were published by STATE before, so relaxed would be enough.
            index = atomics.fetch(f, "add", f["pool"] + layout.NEXT, f.index(1))
            again.until(index >= parts)
            f.call("part", f["job"], index, f["workspace"])


def _reserve(module: Module) -> None:
    """Make a slot's workspace at least `size` bytes; returns an errno.

    The thread that will use the memory asks the system for it, so that its pages are close to its core. Sizes are whole
    large pages, since Linux uses those for whole ones alone.
    """
    enomem, hugepage = 12, 14
    with module.function("reserve", "pool", "slot", ("i64", "size"), local=True, returns="i64") as f:
        pool, at, size_at = f["pool"], f["slot"] + 8, f["slot"] + 16
        error = f.var(f.index(0))
        has = f.load("i64", size_at)
        with f.if_(has < f["size"]):
            with f.if_(has > 0):
                atomics.libc(f, pool, "munmap", "i32", f.load("ptr", at), has)
            f.store(f.index(0), size_at)
            flags = [f.const("i32", number) for number in (3, 0x22, -1)]
            size = f.select(f["size"] > _HUGE // 2, f["size"] + (_HUGE - 1) & -_HUGE, f["size"])
            pages = atomics.libc(f, pool, "mmap", "ptr", f.null, size, *flags, f.index(0))
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
    with module.function("take_slot", "pool", local=True, returns="ptr") as f:
        slot = f.var(f["pool"] + layout.SLOTS)
        with f.while_() as again:
            # Acquire. Pairs with the store that frees the slot, in `run`: its workspace's address and size are visible.
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
    with module.function("run_parallel", "pool", "job", "workspace", local=True, returns="i64") as f:
        pool = f["pool"]
        job = Args(f, f["job"], JOB)
        # Acquire. Pairs with the store to BUSY at the end: what the caller before wrote to STARTED and LAST is visible.
        free = atomics.compare_exchange(f, pool + layout.BUSY, f.index(0), f.index(1))
        with f.if_(free):
            most_helpers = f.min(f.min(job.threads, job.parts) - 1, layout.WORKERS)
            f.call("start", pool, most_helpers)
            helpers = f.min(most_helpers, f.load("i64", pool + layout.STARTED))
            # Plain stores: the last job is over, so nobody reads these words before STATE has a new number.
            f.store(f.index(0), pool + layout.NEXT)
            f.store(f["job"], pool + layout.OPEN_JOB)
            f.store(atomics.floating_mode(f), pool + layout.MODE)
            number = (atomics.load(f, pool + layout.STATE) >> 32) + 1
            for word in range(layout.MASK // 8):
                f.store(f.index(0), pool + (layout.CPUS + 8 * word))
            _mark_core(f, pool)
            # Opens the job: release, for the words above. Sequentially consistent too, because `notify` reads SLEEPING
            # next: a release store may wait in the core's buffer until after that read, and the wake-up would be lost.
            atomics.exchange(f, pool + layout.STATE, number << 32 | helpers << 16)
            f.call("notify", pool, job.wakes, helpers)
            f.call("run_parts", pool, f["job"], f["workspace"])
            # Closes the job. A worker that loaded STATE before this fails in its compare_exchange.
            atomics.fetch(f, "and", pool + layout.STATE, f.index(~0xFFFF0000))
            spins = f.buffer(8)
            f.store(f.index(0), spins)
            # Acquire. Pairs with the decrement by each worker that leaves: its part of C is visible.
            with f.while_() as again:
                again.until((atomics.load(f, pool + layout.STATE) & 0xFFFF).equals(0))
                atomics.pause(f, pool, spins)
            # Any order: the next change of STATE publishes it. Until then nobody has joined, so nobody reads it.
            atomics.store(f, f.index(0), pool + layout.WANTED)
            f.store(atomics.now(f, pool), pool + layout.LAST)
            # Release, for STARTED and LAST. No more is needed: this call reads nothing of the pool after it, and a
            # caller to whom it looks taken a moment longer runs its parts alone.
            atomics.store(f, f.index(0), pool + layout.BUSY)
        f.ret(f.convert("zext", free, "i64"))


def _run(module: Module) -> None:
    """Run a job; returns an errno, 0 when it is done. Nothing is written unless there is memory for the workspace."""
    with module.function("run", "job", returns="i64") as f:
        job_at = f.var(atomics.call(f, "ptr", "halve", f["job"], f.buffer(8 * len(JOB))))
        job, copy = Args(f, job_at.value, JOB), f.buffer(8 * len(JOB))
        pool, shared = job.pool, job.shared_bytes
        slot = atomics.call(f, "ptr", "take_slot", pool)
        error = atomics.call(f, "i64", "reserve", pool, slot, shared + job.workspace_bytes)
        with f.if_(error.equals(0)):
            memory = f.load("ptr", slot + 8)
            with f.if_((shared > 0) & (job.parts > 0)):
                _pack_shared(f, job_at.value, copy, memory)
                job_at.value = copy
            f.call("run_cut", job_at.value, memory + shared)
        atomics.store(f, f.index(0), slot)  # release, for the address and size of the workspace
        f.ret(error)


def _run_cut(module: Module) -> None:
    """Run the parts of a job, with the workers if they are free."""
    with module.function("run_cut", "job", "workspace", local=True) as f:
        job, alone = Args(f, f["job"], JOB), f.var(f.index(1))
        with f.if_((job.threads > 1) & (job.parts > 1)):
            shared = atomics.call(f, "i64", "run_parallel", job.pool, f["job"], f["workspace"])
            alone.value = f.index(1) - shared
        with f.loop(0, job.parts * alone.value) as index:
            f.call("part", f["job"], index, f["workspace"])


def _pack_shared(f: Function, job_at: Value, copy: Value, to: Value) -> None:
    """Pack B with all threads, and make `copy` the job of the product with what they packed.

    A part has whole panels, so no two threads write to the same one; the product begins when all are packed.
    """
    job, own = Args(f, job_at, JOB), Args(f, copy, JOB)
    copy_record(f, job_at, copy, JOB)
    columns = job.pack_columns
    own.kernel, own.c, own.c_row, own.c_col = job.pack, to, job.shared_row, job.shared_col
    own.row_parts, own.rows, own.columns, own.half = 1, job.m, columns, 0
    own.column_parts = own.parts = (job.n + columns - 1) // columns
    f.call("run_cut", copy, to)
    copy_record(f, job_at, copy, JOB)
    own.b, own.b_row, own.b_col = to, job.shared_row, job.shared_col


def _workers(module: Module) -> None:
    """Define how workers start, sleep, wake and join a job; `reserve` and `run_parts` must be defined."""
    for define in (_start, _wait_for_job, _join, _wake, _notify, _migrate, _worker):
        define(module)


def _start(module: Module) -> None:
    """Start workers until there are `wanted`, or the system refuses one.

    They block signals, which go to the program's own threads, except for those that a thread's own faults raise.
    """
    segv, bus, fpe, ill = 11, 7, 8, 4
    with module.function("start", "pool", ("i64", "wanted"), local=True) as f:
        pool, started = f["pool"], f["pool"] + layout.STARTED
        with f.if_(f.load("i64", started) < f["wanted"]):
            blocked, before, thread = f.buffer(128), f.buffer(128), f.buffer(8)
            for i in range(16):
                f.store(f.const("i64", -1), blocked + 8 * i)
            f.store(f.const("i64", -1 - sum(1 << number - 1 for number in (segv, bus, fpe, ill))), blocked)
            atomics.libc(f, pool, "pthread_sigmask", "i32", f.const("i32", 0), blocked, before)
            with f.while_() as again:
                have = f.load("i64", started)
                again.until(have >= f["wanted"])
                slot = pool + (have * layout.SLOT + layout.WORKER_SLOTS)
                f.store(pool, slot)
                body = f.load("ptr", pool + layout.FUNCTIONS["worker"])
                error = atomics.libc(f, pool, "pthread_create", "i32", thread, f.null, body, slot)
                again.until(error.differs(0))
                f.store(have + 1, started)
            atomics.libc(f, pool, "pthread_sigmask", "i32", f.const("i32", 2), before, f.null)


def _wait_for_job(module: Module) -> None:
    """Wait until the newest job is not the one with the number `last`, and return its number: spin, then sleep."""
    with module.function("wait_for_job", "pool", "slot", ("i64", "last"), local=True, returns="i64") as f:
        pool, last = f["pool"], f["last"]
        spins, limit = f["slot"] + 24, f["slot"] + 32
        number = f.var(last)
        with f.while_() as again:
            # A hint: `join` reads STATE again. The number alone says when to sleep.
            number.value = atomics.load(f, pool + layout.STATE) >> 32
            again.until(number.value.differs(last))
            with f.if_(f.load("i64", spins) < f.load("i64", limit) + _SPINS):
                atomics.pause(f, pool, spins)
            with f.else_():
                before = atomics.now(f, pool)
                # Sequentially consistent, before the futex compares STATE: a caller that opens a job meanwhile sees
                # this sleeper, or the futex sees the new number and returns. It may also return for no reason, and the
                # number says so.
                atomics.fetch(f, "add", pool + layout.SLEEPING, f.index(1))
                atomics.futex(f, pool, atomics.WAIT, last)
                # Any order: a caller that still counts this thread as asleep wakes nobody in its place.
                atomics.fetch(f, "add", pool + layout.SLEEPING, f.index(-1))
                often = atomics.now(f, pool) - before < _SERIES
                f.store(f.select(often, f.index(_SPINS_IN_SERIES - _SPINS), f.index(0)), limit)
        f.ret(number.value)


def _join(module: Module) -> None:
    """Take a place in the open job; returns the state before, 0 when no place is left."""
    with module.function("join", "pool", local=True, returns="i64") as f:
        state = f.var(f.index(0))
        with f.while_() as again:
            state.value = atomics.load(f, f["pool"] + layout.STATE)
            places = state.value & 0xFFFF0000
            with f.if_(places.equals(0)):
                state.value = 0
            again.until(places.equals(0))
            # One place fewer and one worker more. The word contains the job's number, so an old value does not match a
            # later job, and if 2**32 jobs came between, joining that one is right too. Acquire: pairs with the exchange
            # by which the caller opened the job. What it wrote before is visible.
            joined = state.value - 0xFFFF
            again.until(atomics.compare_exchange(f, f["pool"] + layout.STATE, state.value, joined))
        f.ret(state.value)


def _worker(module: Module) -> None:
    """The loop of a worker: wait for a job, take a place in it, run parts, leave."""
    with module.function("worker", "slot") as f:
        slot = f["slot"]
        pool = f.load("ptr", slot)
        last = f.var(f.index(0))
        with f.while_():
            last.value = atomics.call(f, "i64", "wait_for_job", pool, slot, last.value)
            state = atomics.call(f, "i64", "join", pool)
            with f.if_(state.differs(0)):
                last.value = state >> 32
                f.call("wake", pool)
                f.call("migrate", pool)
                job = f.load("ptr", pool + layout.OPEN_JOB)
                # The bits of a result must not depend on which thread computed them. A worker has no other use for its
                # mode, so it keeps this one until the next job.
                atomics.set_floating_mode(f, f.load("i64", pool + layout.MODE))
                error = atomics.call(f, "i64", "reserve", pool, slot, Args(f, job, JOB).workspace_bytes)
                with f.if_(error.equals(0)):
                    f.call("run_parts", pool, job, f.load("ptr", slot + 8))
                # Release, for this worker's part of C. The caller may free the job from here on.
                atomics.fetch(f, "add", pool + layout.STATE, f.index(-1))
                f.store(f.index(0), slot + 24)


def _notify(module: Module) -> None:
    """Wake as many sleepers as a job lacks, if it is large enough or one of a series of jobs.

    In a virtual machine a futex wake takes the caller 5 us and the sleeper 20 to 50 us, as long as a product with
    n = 128.
    """
    with module.function("notify", "pool", ("i64", "wakes"), ("i64", "helpers"), local=True) as f:
        pool = f["pool"]
        # Sequentially consistent, after the exchange of STATE: see `wait_for_job`.
        sleeping = atomics.load(f, pool + layout.SLEEPING)
        lacking = f["helpers"] - (f.load("i64", pool + layout.STARTED) - sleeping)
        with f.if_((sleeping > 0) & (lacking > 0)):
            worth = f.var(f["wakes"].differs(0))
            with f.if_(worth.value ^ True):
                worth.value = atomics.now(f, pool) - f.load("i64", pool + layout.LAST) < _SERIES
            with f.if_(worth.value):
                # Any order: a worker that joined before this reads 0 and wakes nobody, one that reads `lacking` helps.
                atomics.store(f, lacking, pool + layout.WANTED)
                f.call("wake", pool)


def _wake(module: Module) -> None:
    """Wake up to 4 of the sleepers that are wanted; they wake the others."""
    with (
        module.function("wake", "pool", local=True) as f,
        f.if_(atomics.load(f, f["pool"] + layout.WANTED) > 0),
    ):
        # Any order: the addition gives each sleeper to one thread, and the futex needs no other word.
        sleepers = atomics.fetch(f, "add", f["pool"] + layout.WANTED, f.index(-_FAN))
        with f.if_(sleepers > 0):
            atomics.futex(f, f["pool"], atomics.WAKE, f.min(sleepers, _FAN))


def _migrate(module: Module) -> None:
    """Move to another allowed core if a thread of the job already runs on this one.

    The scheduler often puts a woken thread on the core of the thread that woke it, and leaves it there for
    milliseconds. The affinity mask is restored at once: the thread is moved, not bound.
    """
    with module.function("migrate", "pool", local=True) as f:
        pool = f["pool"]
        with f.if_(_mark_core(f, pool)):
            size, allowed, free = f.index(layout.MASK), f.buffer(layout.MASK), f.buffer(layout.MASK)
            for word in range(0, layout.MASK, 8):
                f.store(f.index(0), allowed + word)
            me = f.const("i32", 0)
            atomics.libc(f, pool, "sched_getaffinity", "i32", me, size, allowed)
            some = f.index(0)
            for word in range(0, layout.MASK, 8):
                free_word = f.load("i64", allowed + word) & (atomics.load(f, pool + (layout.CPUS + word)) ^ -1)
                f.store(free_word, free + word)
                some = some | free_word
            with f.if_(some.differs(0)):
                atomics.libc(f, pool, "sched_setaffinity", "i32", me, size, free)
                atomics.libc(f, pool, "sched_setaffinity", "i32", me, size, allowed)
                _mark_core(f, pool)


def _mark_core(f: Function, pool: Value) -> Value:
    """Mark this thread's core; returns true when it was marked before."""
    cpu = f.convert("zext", atomics.libc(f, pool, "sched_getcpu", "i32"), "i64") & 8 * layout.MASK - 1
    bit = f.index(1) << (cpu & 63)
    before = atomics.fetch(f, "or", pool + layout.CPUS + (cpu >> 6) * 8, bit)  # a hint: its order does not matter
    return (before & bit).differs(0)
