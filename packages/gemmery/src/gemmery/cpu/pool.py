"""The process's pool of compiled workers, whose code `pool_code` generates.

Its loops:
    cut C into parts, at least one for each thread
    in each thread, until no part is left:
        take a part C[i..., j...]
        packed: C[i..., j...] = A[i..., all k] * B[all k, j...]
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import TYPE_CHECKING

from gemmery.cpu import jit, layout, workspace
from gemmery.cpu.target import host

if TYPE_CHECKING:
    from gemmery.cpu.ir import Module

_addresses: list[int] = []


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
