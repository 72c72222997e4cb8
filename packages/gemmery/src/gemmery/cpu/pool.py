"""The process's pool of compiled workers, whose code `pool_code` generates.

Its loops:
    cut C into parts, at least one for each thread
    in each thread, until no part is left:
        take a part C[i..., j...]
        packed: C[i..., j...] = A[i..., all k] * B[all k, j...]
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
import sys
from _thread import allocate_lock
from typing import TYPE_CHECKING

from gemmery.cpu import jit, layout, workspace
from gemmery.cpu.target import cores, host

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from gemmery.cpu.ir import Module

_addresses: list[int] = []
_Part = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p)
_Mode, _SetMode = ctypes.CFUNCTYPE(ctypes.c_int64), ctypes.CFUNCTYPE(None, ctypes.c_int64)
_workers: list[ThreadPoolExecutor] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.clear)  # a child has no threads


def address() -> int:
    """Return the address of this process's pool, made on first use; 0 on a system without futexes."""
    if sys.platform != "linux" or host().machine not in layout.FUTEX:
        return 0
    return _addresses[0] if _addresses else _make()


def _make() -> int:
    libc = ctypes.CDLL(None)
    functions = [ctypes.cast(getattr(libc, name), ctypes.c_void_p).value or 0 for name in layout.LIBC]
    at = workspace.pages(layout.SIZE)
    (ctypes.c_int64 * len(layout.FUNCTIONS)).from_address(at)[:] = [*functions, entries()["worker"]]
    state, size = at + layout.STATE, layout.SIZE - layout.STATE
    if libc.madvise(ctypes.c_void_p(state), ctypes.c_size_t(size), layout.WIPE_ON_FORK):
        os.register_at_fork(after_in_child=functools.partial(ctypes.memset, state, 0, size))
    _addresses.append(at)  # if two threads were here at once, the second pool stays unused
    return _addresses[0]


def entries() -> dict[str, int]:
    """Return the addresses of the compiled functions: `part`, `mode`, `set_mode`, and with a pool `run`."""
    return jit.load(host(), "pool", _module)


def started() -> int:
    """Return the number of workers that this process has started."""
    at = address()
    return ctypes.c_int64.from_address(at + layout.STARTED).value if at else 0


def _module() -> Module:
    from gemmery.cpu import pool_code

    return pool_code.module(host())


def run_on_python_threads(job: bytes) -> int:
    """Run every part of a job, as the compiled `run` does, for systems without futexes. Returns 0.

    Raises MemoryError, before anything is written, where there is no memory for the caller's packed panels. Where
    there is none for a helper's, its parts are left to the others.
    """
    from concurrent.futures import wait  # takes 7 ms

    field = dict(zip((name for name, _ in layout.JOB), struct.unpack(f"<{len(layout.JOB)}q", job), strict=True))
    functions = entries()
    part, set_mode = _Part(functions["part"]), _SetMode(functions["set_mode"])
    mode = _Mode(functions["mode"])()
    indices, lock = iter(range(field["parts"])), allocate_lock()

    def drain(buffer: int) -> None:
        while True:
            with lock:  # without the GIL two threads may get one index from an iterator, and add one part to C twice
                index = next(indices, None)
            if index is None:
                return
            part(job, index, buffer)

    def help_out() -> None:
        set_mode(mode)
        with contextlib.suppress(MemoryError), workspace.borrowed(field["workspace_bytes"]) as buffer:
            drain(buffer)

    helpers: list[Future[None]] = []
    try:
        with workspace.borrowed(field["workspace_bytes"]) as buffer:
            helpers.extend(_python_threads().submit(help_out) for _ in range(min(field["threads"], field["parts"]) - 1))
            drain(buffer)
    finally:  # also when interrupted: the operands must outlive whoever still reads them
        wait([helper for helper in helpers if not helper.cancel()])
    for helper in helpers:
        if not helper.cancelled():
            helper.result()
    return 0


def _python_threads() -> ThreadPoolExecutor:
    if not _workers:
        from concurrent.futures import ThreadPoolExecutor

        _workers.append(ThreadPoolExecutor(cores(), "gemmery"))
    return _workers[0]
