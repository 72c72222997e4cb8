"""Jobs on Python's threads, for systems without futexes: the same parts, the same bits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from _thread import allocate_lock
from concurrent.futures import Future, ThreadPoolExecutor, wait

from gemmery.cpu import pool, workspace
from gemmery.cpu.layout import JOB
from gemmery.cpu.target import cores

_Part = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p)
_Mode, _SetMode = ctypes.CFUNCTYPE(ctypes.c_int64), ctypes.CFUNCTYPE(None, ctypes.c_int64)
_workers: list[ThreadPoolExecutor] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.clear)  # a child has no threads


def run(job: bytes) -> int:
    """Run every part of a job, as `pool.run` does in compiled code. Returns 0.

    Raises MemoryError, before anything is written, where there is no memory for the caller's packed panels. Where
    there is none for a helper's, its parts are left to the others.
    """
    field = dict(zip((name for name, _ in JOB), struct.unpack(f"<{len(JOB)}q", job), strict=True))
    entries = pool.entries()
    part, set_mode = _Part(entries["part"]), _SetMode(entries["set_mode"])
    mode = _Mode(entries["mode"])()
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
            helpers.extend(_pool().submit(help_out) for _ in range(min(field["threads"], field["parts"]) - 1))
            drain(buffer)
    finally:  # also when interrupted: the operands must outlive whoever still reads them
        wait([helper for helper in helpers if not helper.cancel()])
    for helper in helpers:
        if not helper.cancelled():
            helper.result()
    return 0


def _pool() -> ThreadPoolExecutor:
    if not _workers:
        _workers.append(ThreadPoolExecutor(cores(), "gemmery"))
    return _workers[0]
