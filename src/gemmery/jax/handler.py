"""The handler of this process: its registration with JAX, and the table of jobs that it reads."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
import traceback
from collections.abc import Callable

import jax

from gemmery import tiers
from gemmery.api.cpu_call import Prepared
from gemmery.cpu import jit, pool, threads, workspace, xla
from gemmery.cpu.target import host
from gemmery.errors import DeviceError
from gemmery.jax import device_handler, frame, static
from gemmery.jax.static import StaticProduct

TARGET = "gemmery_matmul"

_MESSAGES = (
    b"gemmery could not prepare a product; the reason is on stderr",
    b"gemmery has no memory for the packed panels of a product",
)
_lock = threading.RLock()  # a signal handler may multiply meanwhile
_tables: list[int] = []
_entries: dict[tuple[StaticProduct, int], int] = {}  # by product and number of threads; the addresses stay valid


def register() -> int:
    """Register the handler with JAX, once, and return the address of its table.

    Raises DeviceError on systems without the compiled workers that run products there.
    """
    with _lock:  # two threads would make two tables, of which the handler reads one
        if not _tables:
            _tables.append(_registered())
    return _tables[0]


def _registered() -> int:
    if not pool.address():
        raise DeviceError(
            f"gemmery.jax runs products by compiled workers, which {sys.platform} on {host().machine} does not have: "
            "use jax.numpy.matmul there"
        )
    table = workspace.pages(xla.TABLE_BYTES)
    messages = [ctypes.create_string_buffer(text) for text in _MESSAGES]
    for message in messages:
        workspace.forever(message)
    head = (frame.minor_version(), _address(_prepare), pool.entries()["run"], *map(ctypes.addressof, messages))
    ctypes.memmove(table, struct.pack(f"<{len(head)}q", *head), 8 * len(head))
    address = jit.load(host(), "xla", lambda: xla.module(host()), table)["handle"]
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(address), platform="cpu")
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_address(device_handler.handle)), platform="CUDA")
    threads.at_change.append(_forget)
    return table


def _address(function: Callable[[int], int]) -> int:
    """Return the address at which XLA can call a Python function."""
    callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(function)
    workspace.forever(callback)
    return ctypes.cast(callback, ctypes.c_void_p).value or 0


def know(product: StaticProduct) -> int:
    """Prepare a product, unless that was done before, and return the address of its entry."""
    table, count = register(), threads.get()
    entry = _entries.get((product, count))
    if entry is None:
        how = static.prepared(product)
        entry = _entries[product, count] = _entry(static.job(product, how, count))
        _improve(product, how, count)
    _store(table, product.key, entry)
    return entry


def _entry(job: static.StaticJob) -> int:
    """Write an entry, and return its address."""
    offsets = struct.pack(f"<{3 * len(job.offsets)}q", *(step for offset in job.offsets for step in offset))
    block = ctypes.create_string_buffer(xla.JOB_AT + len(job.job) + len(offsets))
    workspace.forever(block)
    at = ctypes.addressof(block)
    words = struct.pack("<3q", len(job.offsets), at + xla.JOB_AT + len(job.job), job.swapped)
    ctypes.memmove(at, words + job.job + offsets, len(block))
    return at


def _store(table: int, key: int, entry: int) -> None:
    """Let the handler find an entry; without a free slot nearby it asks Python each time."""
    first = table + xla.SLOTS_AT + (key & xla.SLOTS - 1) * xla.SLOT
    for at in range(first, first + xla.PROBES * xla.SLOT, xla.SLOT):
        stored = ctypes.c_int64.from_address(at)
        if stored.value in (0, key):
            ctypes.c_int64.from_address(at + 8).value = entry  # before the key, by which the handler finds it
            stored.value = key
            return


def _improve(product: StaticProduct, how: Prepared, count: int) -> None:
    """Compile the kernel for this shape in the background, where there is a faster one, and store its job."""

    def make() -> None:
        better = static.specialised(how)
        if better is not None:
            _entries[product, count] = entry = _entry(static.job(product, better, count))
            if threads.get() == count:
                _store(register(), product.key, entry)

    tiers.aside(("jax", product, count), make)


def _forget() -> None:
    """Empty the table: the jobs in it are for another number of threads."""
    ctypes.memset(register() + xla.SLOTS_AT, 0, xla.TABLE_BYTES - xla.SLOTS_AT)


def _prepare(address: int) -> int:
    """Prepare the product of a call that the handler does not know; 0 where that fails."""
    try:
        return know(frame.product(address))
    except BaseException:  # nothing may be raised into XLA
        traceback.print_exc()
        return 0
