"""Work in the background, in a queue and by one thread: specialized kernels for products that come back often.

General kernels serve a product at once. A faster kernel for one product is compiled here, by one thread, while the
program goes on. `GEMMERY_TIERS=off` switches this off.

The thread holds the interpreter for less than 1 ms at a time, because LLVM works without it. A program that calls 8 x 8
products in a loop, with a core left for the thread, waited 1.0 ms at most while 8 kernels were compiled. With more
processes than cores it waits as long as without background work: 8 to 20 ms, for a core.
"""

from __future__ import annotations

import contextlib
import functools
import os
from _thread import RLock  # that of `threading`, whose import takes 0.5 ms of a first product
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from gemmery import config
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from threading import Thread

WAITING = 64  # jobs in the queue; further ones are dropped
REMEMBERED = 4096  # keys that are not made again
_FAILURES = 16  # messages that are kept
_FORK_TIMEOUT = 2.0  # s that a fork waits for the job in progress

Make = Callable[[], object]


class State(NamedTuple):
    """What the background thread does and has done."""

    working: bool
    waiting: int  # jobs in the queue
    finished: int  # jobs that ended, the failed ones too
    dropped: int  # jobs refused because the queue was full
    failures: tuple[str, ...]  # messages of the last jobs that failed


class _Work:
    """The queue of one process, and what became of the jobs.

    `lock` guards the queue, the keys and the thread, for a few instructions at a time. `job` is held during a job and
    during a fork. Who takes both takes `job` first: a job may call `aside`, and nobody runs one while it holds `lock`.
    The thread alone writes `current`, `finished` and `failures`; others read them, one load each.
    """

    def __init__(self) -> None:
        # Reentrant, because `aside` may be interrupted by a signal handler or a `__del__` that multiplies or forks.
        self.lock = RLock()
        self.job = RLock()
        self.queue: deque[tuple[Hashable, Make]] = deque()
        self.keys: dict[Hashable, None] = {}  # queued, in progress or finished, oldest first
        self.current: Hashable = None  # the key of the job in progress
        self.thread: Thread | None = None
        self.finished = 0
        self.dropped = 0
        self.failures: deque[str] = deque(maxlen=_FAILURES)


_work = _Work()


def enabled() -> bool:
    """Return False if GEMMERY_TIERS=off. Raises ArgumentError for a value that is neither "on" nor "off"."""
    return config.tiers()


def aside(key: Hashable, make: Make) -> bool:
    """Call `make()` in the background, once for each key; return False if that is not to be.

    An exception in `make` is kept for `state()`, and its key is not tried again. At most 64 jobs wait: further ones are
    dropped, and their keys may be asked for again. The 4096 keys of the last jobs are remembered. Does nothing with
    GEMMERY_TIERS=off, where no thread can start, and in a process that ends.
    """
    if not enabled() or _ending():
        return False
    work = _work
    with work.lock:
        if key in work.keys:
            return True
        if len(work.queue) >= WAITING:
            work.dropped += 1
            return False
        work.keys[key] = None
        if len(work.keys) > REMEMBERED:
            del work.keys[next(iter(work.keys))]
        work.queue.append((key, make))
        if work.thread is None:
            _start(work)
        return key in work.keys


def wait() -> None:
    """Return when no background work is left; at once if called by it."""
    import threading

    while True:
        with _work.lock:
            thread = _work.thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join()


def state() -> State:
    """Return what the background thread does and has done in this process."""
    work = _work
    with work.lock:
        return State(work.thread is not None, len(work.queue), work.finished, work.dropped, tuple(work.failures))


def _ending() -> bool:
    """Return True if the interpreter waits for its threads to end, or for none any more."""
    import threading

    return not threading.main_thread().is_alive()


def _start(work: _Work) -> None:
    import threading

    _register()
    # Not a daemon: the interpreter waits for it at its end. It would otherwise free what a compilation still uses.
    work.thread = threading.Thread(target=_run, args=(work,), name="gemmery-tiers", daemon=False)
    try:
        work.thread.start()
    except RuntimeError:  # the limit of threads, a subinterpreter without threads, the end of the process
        _forget(work)


def _forget(work: _Work) -> None:
    """Empty the queue, so that its keys may be asked for again."""
    for key, _ in work.queue:
        work.keys.pop(key, None)
    work.queue.clear()
    work.thread = None


def _run(work: _Work) -> None:
    try:
        while job := _next_job(work):
            with work.job:
                _do(work, *job)
    except BaseException:  # no memory even for this: another job starts another thread
        with work.lock:
            _forget(work)
        raise


def _next_job(work: _Work) -> tuple[Hashable, Make] | None:
    """Take a job from the queue. The last one is None: if none is left, or if the interpreter ends."""
    with work.lock:
        if not work.queue or _ending():
            _forget(work)
            return None
        key, make = work.queue.popleft()
        work.current = key
        return key, make


def _do(work: _Work, key: Hashable, make: Make) -> None:
    try:
        make()
    except BaseException as error:  # SystemExit too: it concerns no caller
        work.failures.append(_words(key, error))
    work.finished += 1
    work.current = None


def _words(key: Hashable, error: BaseException) -> str:
    try:
        return f"{key}: {type(error).__name__}: {error}"
    except Exception:  # the __str__ of another's exception may raise anything
        return type(error).__name__


@functools.cache
def _register() -> None:
    """Let forks wait for the job in progress, which may hold locks, such as that of a module being imported.

    Registered late, so that it comes before the handler of `cpu/jit.py`: a fork that held the lock of compilations
    would wait for a job that waits for this lock.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


def _before_fork() -> None:
    # Not for long: a thread that forks in the middle of a compilation (a signal handler) holds what the job waits for.
    for lock in (_work.job, _work.lock):  # no key is in the child's copy without its job
        lock.acquire(timeout=_FORK_TIMEOUT)


def _in_parent() -> None:
    for lock in (_work.lock, _work.job):
        with contextlib.suppress(RuntimeError):  # not acquired in time
            lock.release()


def _in_child() -> None:
    """Start anew in a forked process: the thread is not there, and the parent makes what was in its queue."""
    global _work
    old, _work = _work, _Work()
    unfinished = {old.current, *(key for key, _ in old.queue)}
    old.queue.clear()
    _work.keys = {key: None for key in old.keys if key not in unfinished}
