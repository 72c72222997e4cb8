"""The workers of the pool: how they start, sleep, wake and join a job. `pool_code` describes the protocol."""

from __future__ import annotations

from gemmery.cpu import atomics, layout
from gemmery.cpu.abi import Args
from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.layout import JOB

_SPIN_LIMIT = 2000  # pauses before a worker sleeps: 25 to 80 us, by the CPU
_FAN = 4  # sleepers that one thread wakes; they wake the others
_BURST = 100_000  # ns after a job within which the next one counts as part of a series


def workers(module: Module) -> None:
    """Define `start`, `notify` and `worker`, and what they need; `reserve` and `run_parts` must be defined."""
    for define in (_start, _wait_for_job, _join, _wake, _notify, _migrate, _worker):
        define(module)


def _start(module: Module) -> None:
    """Start workers until there are `wanted`, or the system refuses one.

    They block signals, which go to the program's own threads, except for those that a thread's own faults raise.
    """
    segv, bus, fpe, ill = 11, 7, 8, 4
    with module.function("start", ("ptr", "pool"), ("i64", "wanted"), local=True) as f:
        pool, started = f["pool"], f["pool"] + layout.STARTED
        with f.if_(f.load("i64", started) < f["wanted"]):
            blocked, before, thread = f.buffer(128), f.buffer(128), f.buffer(8)
            for i in range(16):
                f.store(f.const("i64", -1), blocked + 8 * i)
            f.store(f.const("i64", -1 - sum(1 << number - 1 for number in (segv, bus, fpe, ill))), blocked)
            null = Value(f, "ptr", "null")
            atomics.libc(f, pool, "pthread_sigmask", "i32", f.const("i32", 0), blocked, before)
            with f.while_() as again:
                have = f.load("i64", started)
                again.until(have >= f["wanted"])
                slot = pool + (have * layout.SLOT + layout.WORKER_SLOTS)
                f.store(pool, slot)
                body = f.load("ptr", pool + layout.FUNCTIONS["worker"])
                error = atomics.libc(f, pool, "pthread_create", "i32", thread, null, body, slot)
                again.until(error.differs(0))
                f.store(have + 1, started)
            atomics.libc(f, pool, "pthread_sigmask", "i32", f.const("i32", 2), before, null)


def _wait_for_job(module: Module) -> None:
    """Wait until the newest job is not the one with the number `last`, and return its number: spin, then sleep."""
    with module.function(
        "wait_for_job", ("ptr", "pool"), ("ptr", "spins"), ("i64", "last"), local=True, returns="i64"
    ) as f:
        pool, last = f["pool"], f["last"]
        number = f.var(last)
        with f.while_() as again:
            # A hint: `join` reads STATE again. The number alone says when to sleep.
            number.value = atomics.load(f, pool + layout.STATE) >> 32
            again.until(number.value.differs(last))
            with f.if_(f.load("i64", f["spins"]) < _SPIN_LIMIT):
                atomics.pause(f, pool, f["spins"])
            with f.else_():
                # Sequentially consistent, before the futex compares STATE: a caller that opens a job meanwhile sees
                # this sleeper, or the futex sees the new number and returns. It may also return for no reason, and the
                # number says so.
                atomics.fetch_add(f, pool + layout.SLEEPING, f.index(1))
                atomics.futex(f, pool, atomics.WAIT, last)
                # Any order: a caller that still counts this thread as asleep wakes nobody in its place.
                atomics.fetch_add(f, pool + layout.SLEEPING, f.index(-1))
        f.ret(number.value)


def _join(module: Module) -> None:
    """Take a place in the open job; returns the state before, 0 when no place is left."""
    with module.function("join", ("ptr", "pool"), local=True, returns="i64") as f:
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
    with module.function("worker", ("ptr", "slot")) as f:
        slot = f["slot"]
        pool, spins = f.load("ptr", slot), slot + 24
        last = f.var(f.index(0))
        with f.while_():
            last.value = atomics.call(f, "i64", "wait_for_job", pool, spins, last.value)
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
                atomics.fetch_add(f, pool + layout.STATE, f.index(-1))
                f.store(f.index(0), spins)


def _notify(module: Module) -> None:
    """Wake as many sleepers as a job lacks, if it is large enough or one of a series of jobs.

    In a virtual machine a futex wake takes the caller 5 us and the sleeper 20 to 50 us, as long as a product with
    n = 128.
    """
    with module.function("notify", ("ptr", "pool"), ("i64", "wakes"), ("i64", "helpers"), local=True) as f:
        pool = f["pool"]
        # Sequentially consistent, after the exchange of STATE: see `wait_for_job`.
        sleeping = atomics.load(f, pool + layout.SLEEPING)
        lacking = f["helpers"] - (f.load("i64", pool + layout.STARTED) - sleeping)
        with f.if_((sleeping > 0) & (lacking > 0)):
            worth = f.var(f["wakes"].differs(0))
            with f.if_(worth.value ^ True):
                worth.value = atomics.now(f, pool) - f.load("i64", pool + layout.LAST) < _BURST
            with f.if_(worth.value):
                # Any order: a worker that joined before this reads 0 and wakes nobody, one that reads `lacking` helps.
                atomics.store(f, lacking, pool + layout.WANTED)
                f.call("wake", pool)


def _wake(module: Module) -> None:
    """Wake up to 4 of the sleepers that are wanted; they wake the others."""
    with (
        module.function("wake", ("ptr", "pool"), local=True) as f,
        f.if_(atomics.load(f, f["pool"] + layout.WANTED) > 0),
    ):
        # Any order: the addition gives each sleeper to one thread, and the futex needs no other word.
        sleepers = atomics.fetch_add(f, f["pool"] + layout.WANTED, f.index(-_FAN))
        with f.if_(sleepers > 0):
            atomics.futex(f, f["pool"], atomics.WAKE, f.min(sleepers, _FAN))


def _migrate(module: Module) -> None:
    """Move to another allowed core if a thread of the job already runs on this one.

    The scheduler often puts a woken thread on the core of the thread that woke it, and leaves it there for
    milliseconds. The affinity mask is restored at once: the thread is moved, not bound.
    """
    with module.function("migrate", ("ptr", "pool"), local=True) as f:
        pool = f["pool"]
        with f.if_(mark_core(f, pool)):
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
                mark_core(f, pool)


def mark_core(f: Function, pool: Value) -> Value:
    """Mark this thread's core; returns true when it was marked before."""
    cpu = f.convert("zext", atomics.libc(f, pool, "sched_getcpu", "i32"), "i64") & 8 * layout.MASK - 1
    bit = f.index(1) << (cpu & 63)
    before = atomics.fetch_or(f, pool + layout.CPUS + (cpu >> 6) * 8, bit)  # a hint: its order does not matter
    return (before & bit).differs(0)
