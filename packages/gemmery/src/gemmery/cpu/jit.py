"""Machine code of modules of LLVM IR: compiled once, kept in the cache, loaded, by threads that may be interrupted."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import time
from _thread import RLock, allocate_lock, get_ident, start_new_thread  # `threading` takes 0.5 ms to import
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from gemmery import cache, config, dtypes
from gemmery.cpu import workspace
from gemmery.cpu.target import X86, Target, cores
from gemmery.errors import CompileError

if TYPE_CHECKING:
    from gemmery.cpu.ir import Module

Image = tuple[str, Callable[[], "Module"]]  # the name and the generator of a module

# Threads compile different modules at the same time; a second thread that needs the same one waits for the first.
# Python code may run in the middle of a compilation, in the same thread: a `__del__` that the garbage collector calls,
# or a signal handler. It may multiply or fork. So a thread that compiles already waits for no other: it compiles what
# it needs itself, and the inner product is complete before the outer compilation goes on.
_lock = RLock()  # guards the next three, for a few instructions at a time
_active: dict[int, int] = {}  # compilations in progress, by thread: more than one where one is inside another
_making: set[tuple[Target, str]] = set()
_forks = 0  # forks that wait or are in progress; no compilation starts meanwhile
_at_work: list[object] = []  # LLVM's calls for the main thread, in threads of their own
_WAIT_LIMIT = 10.0  # s that a thread waits for another: one that was interrupted may not have said that it has stopped
_BEGINS = 0.2  # s in which a new thread begins, or never does
_PAUSE = 500e-6  # s between two looks at what another thread compiles, which takes tens of ms
_CLOCK = 20_000_000  # ns by which the change time of a file may lag behind the clock
_loaded: dict[tuple[Target, str], dict[str, int]] = {}
_generators: dict[tuple[Target, str], Callable[[], object]] = {}  # of those in `_loaded`


def _before_fork() -> None:
    """Wait for compilations in other threads: otherwise their locks, also LLVM's, would stay held in the child."""
    global _forks
    with _lock:
        _forks += 1
    late = time.monotonic() + _WAIT_LIMIT
    while compiling_elsewhere() and time.monotonic() < late:
        time.sleep(_PAUSE)


def compiling_elsewhere() -> bool:
    """Return True while other threads compile."""
    return bool(_at_work) or any(thread != get_ident() for thread in tuple(_active))


def _after_in_parent() -> None:
    global _forks
    with _lock:
        _forks = max(0, _forks - 1)  # this module may have been imported while a fork waited


def _after_in_child() -> None:
    global _lock, _forks
    _lock, _forks = RLock(), 0
    _making.clear()
    _at_work.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


# A 64-bit constant that stands for an address known only when the module is loaded: "gemmery_" as a number.
HOLE = int.from_bytes(b"gemmery_", "little")


def load(target: Target, name: str, generate: Callable[[], object], hole: int = HOLE) -> dict[str, int]:
    """Return the addresses of the functions of module `name`, compiled now unless memory or disk has it.

    `name` must contain everything that `generate` depends on besides the target and gemmery's sources. `hole` replaces
    the constant HOLE, so that code with an address of this process can be cached.
    """
    key, thread = (target, name), get_ident()
    entries = _loaded.get(key)
    if entries is not None:
        return entries
    outer, first, late = _active.get(thread, 0), False, time.monotonic() + _WAIT_LIMIT
    try:
        while key not in _loaded:
            with _lock:
                if outer or not (_forks or key in _making) or time.monotonic() > late:
                    first = key not in _making
                    _making.add(key)
                    _active[thread] = outer + 1
                    break
            time.sleep(_PAUSE)
        _generators[key] = generate
        return _loaded.get(key) or _loaded.setdefault(key, _load(target, name, generate, hole))
    finally:
        with _lock:
            if first:
                _making.discard(key)
            _active[thread] = outer
            if not outer:
                del _active[thread]


def origin(address: int) -> tuple[Target, str, str, Callable[[], object]]:
    """Return what a loaded function is: its target, the names of its module and of itself, the module's generator."""
    return next(
        (target, name, symbol, _generators[target, name])
        for (target, name), entries in _loaded.items()
        for symbol, at in entries.items()
        if at == address
    )


def load_together(target: Target, image: Image, others: Callable[[], Iterable[Image]] = tuple) -> dict[str, int]:
    """Return the addresses of a module's functions; if it must be compiled, `others` are compiled at the same time.

    So is what `postpone` left.
    """
    name, generate = image
    there = (target, name) in _loaded or (keeps(target) and stored(target, name))
    late = tuple(_postponed)
    if late or not there:
        at_once([*late, *(functools.partial(load, target, *each) for each in (() if there else (image, *others())))])
        for task in late:
            with contextlib.suppress(ValueError):  # another thread was faster
                _postponed.remove(task)
    return load(target, name, generate)


_postponed: list[Callable[[], object]] = []


def postpone(task: Callable[[], object]) -> None:
    """Leave a task that compiles to the next `load_together`, which runs it beside others. It may run twice."""
    _postponed.append(task)


def at_once(tasks: Sequence[Callable[[], object]]) -> None:
    """Run tasks that compile on all cores that this process may use; those that fail in a helper run again here."""
    queue = list(reversed(tasks))

    def work() -> None:
        while queue:
            try:
                task = queue.pop()
            except IndexError:  # another thread was faster
                return
            task()

    def help_() -> None:
        with contextlib.suppress(BaseException):  # the caller tries again
            work()

    # A thread that compiles already has no helpers: they would not start during a fork that waits for this thread.
    count = 0 if get_ident() in _active else min(cores(), len(queue)) - 1
    with contextlib.suppress(RuntimeError, MemoryError):  # no more threads
        for _ in range(count):
            # Not waited for, as Thread.start does: it never begins where memory or the interpreter ends.
            start_new_thread(help_, ())
    try:
        work()
    except BaseException:
        queue.clear()
        raise
    for task in tasks:  # `load` waits for what a helper compiles
        task()


def _load(target: Target, name: str, generate: Callable[[], object], hole: int) -> dict[str, int]:
    if not keeps(target):
        from gemmery.cpu import llvm

        return llvm.linked(target, name, str(generate()).replace(str(HOLE), str(hole)))
    folder = config.cache_dir() if _unchanged_at_first() else None
    header, _, image = (cache.read(folder, _key(target, name)) or store(target, name, generate)).partition(b"\n")
    if hole != HOLE:
        from gemmery.cpu import elf

        image = elf.fill(image, HOLE, hole)
    base = _map(image)
    words = header.decode().split()
    return {symbol: base + int(offset) for symbol, offset in zip(words[::2], words[1::2], strict=True)}


def store(target: Target, name: str, generate: Callable[[], object]) -> bytes:
    """Compile a module, store it in the cache if there is one, and return it as it is stored."""
    from gemmery.cpu import elf  # only to compile

    image, entries = elf.flatten(_object(target, name, str(generate())))
    payload = " ".join(f"{symbol} {offset}" for symbol, offset in entries.items()).encode() + b"\n" + image
    cache.write(None if reason() else config.cache_dir(), _key(target, name), payload)
    return payload


def stored(target: Target, name: str) -> int:
    """Return the bytes of a module in the cache, 0 if it is not there."""
    return len(cache.read(config.cache_dir() if _unchanged_at_first() else None, _key(target, name)) or b"")


def keeps(target: Target) -> bool:
    """Return True where kernels are flat images, which can be stored."""
    return sys.platform == "linux" if target.is_arm else target.machine in X86 and sys.platform != "win32"


def _key(target: Target, name: str) -> str:
    described = f"{_sources()} {target.cpu} {target.isa} {sorted(target.features)} {target.llvm} {name}"
    return cache.key("cpu", version(), described.encode())


def version() -> str:
    """Return what names the version of the generators in the cache."""
    return _sources()[:12]


def versions() -> tuple[str, ...]:
    """Return what names entries of the cache that this version reads."""
    return version(), _DIGESTS


_DIGESTS = "sources"  # in place of a version, for digests of the sources
# Modules outside this folder that shape the code of a kernel.
_AROUND = ("dtypes", "problem", "keywords", "arrays/pytorch_abi", "epilogues/graph")


@functools.cache
def _source_files() -> tuple[str, ...]:
    """Return the files that shape a kernel's code: the generators, and llvmlite's version."""
    here, (_, kind) = os.path.dirname(__file__), os.path.splitext(__file__)  # .pyc in a package without sources
    names = [os.path.join(here, name) for name in sorted(os.listdir(here)) if name.endswith(kind)]
    names += [os.path.join(os.path.dirname(here), name + kind) for name in _AROUND]
    spec = PathFinder.find_spec("llvmlite")
    if spec and spec.origin:
        names.append(os.path.join(os.path.dirname(spec.origin), "_version.py"))
    return tuple(names)


@functools.cache
def _sources() -> str:
    """Return a digest of everything that shapes a kernel's code.

    Reading and hashing the files takes 1 ms, so the cache keeps the digest under their names, sizes and times. Every
    change to a file sets its change time, which programs cannot choose. "" where there are no files, as in a zip.
    """
    folder = config.cache_dir() if _unchanged_at_first() else None
    try:
        files = [(name, os.stat(name)) for name in _source_files()]
    except OSError:
        return ""
    stamps = [(name, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, at in files]
    key = cache.key("cpu", _DIGESTS, str(stamps).encode())
    stored = cache.read(folder, key)
    if stored is None:
        contents = []
        for name in _source_files():
            with open(name, "rb") as file:
                contents.append(file.read())
        stored = cache.digest(*contents)
        cache.write(folder, key, stored)
    return stored.hex()


def reason() -> str:
    """Return why no kernel may be stored, as what to do about it; "" where kernels may be.

    Generators are imported when they are first needed. If a source changes while a process runs (an editor, an
    upgrade), the module in memory may be older or newer than the file in the digest.
    """
    try:
        newest = max(os.stat(name).st_ctime_ns for name in _source_files())
    except OSError:
        return "gemmery's files, whose digest names kernels, cannot be read, as in a zip: install gemmery as files"
    if newest > time.time_ns() + _CLOCK:
        return "the clock is behind the time at which gemmery's files were changed: set it"
    if newest < dtypes.IMPORTED_AT - _CLOCK:
        return ""
    return "a source of gemmery has changed since this process began: start it again"


@functools.cache
def _unchanged_at_first() -> bool:
    """Return whether kernels could be stored when the digest was taken: later changes do not matter to reading."""
    return not reason()


def _map(image: bytes) -> int:
    """Copy an image into fresh pages, then make them executable and read-only."""
    block = workspace.fresh(len(image))
    address = workspace.address(block)
    ctypes.memmove(address, image, len(image))
    error = _make_executable(address, len(image))
    if error:
        raise CompileError(
            f"this system does not let a process run code that it compiled (mprotect: {os.strerror(error)}); allow it: "
            "MemoryDenyWriteExecute=no in the systemd unit, no PR_SET_MDWE, execmem in the SELinux policy"
        )
    workspace.forever(block)
    return address


def _make_executable(address: int, size: int) -> int:
    """Make pages executable and read-only; returns an errno, 0 on success."""
    libc = ctypes.CDLL(None, use_errno=True)
    protection = mmap.PROT_READ | mmap.PROT_EXEC
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection):
        return ctypes.get_errno()
    if config.ON_ARM:  # instructions are fetched past the cache to which they were written
        ctypes.CDLL("libgcc_s.so.1")["__clear_cache"](ctypes.c_void_p(address), ctypes.c_void_p(address + size))
    return 0


def _object(target: Target, name: str, text: str) -> bytes:
    # Imported here: if Python is interrupted in the middle of an import, other threads may not import any more.
    from gemmery.cpu import llvm

    return _uninterrupted(lambda: llvm.emitted(target, name, text))


def _uninterrupted(call: Callable[[], bytes]) -> bytes:
    """Return the result of a call, made in another thread if this is the main one.

    Signal handlers run in the main thread alone. If one raises KeyboardInterrupt while llvmlite frees an object, then
    llvmlite frees it twice.
    """
    import threading

    results: list[bytes | BaseException] = []
    begun, done = allocate_lock(), allocate_lock()  # not the thread's own: a child forked meanwhile finds them free
    done.acquire()

    def work() -> None:
        _at_work.append(done)
        try:
            if begun.acquire(blocking=False):
                results.append(call())
        except BaseException as error:  # raised again in the main thread
            results.append(error)
        finally:
            done.release()
            _at_work.remove(done)

    if get_ident() != threading.main_thread().ident:
        return call()
    try:
        start_new_thread(work, ())
    except (RuntimeError, MemoryError):  # no more threads
        return call()
    # The thread never begins where memory or the interpreter ends: then the call is made here after all.
    if not done.acquire(timeout=_BEGINS):
        if begun.acquire(blocking=False):
            return call()
        done.acquire()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]
