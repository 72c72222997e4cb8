"""The handlers of this process: their registration with JAX, and the table of jobs that the CPU's reads.

The handler for CUDA devices is Python, which puts the launches of a product on XLA's stream, as `gemmery.matmul` does.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from gemmery import tiers
from gemmery.api.cpu_call import Prepared
from gemmery.api.precision import get_float32_precision
from gemmery.cpu import jit, pool, threads, workspace, xla
from gemmery.cpu.target import host
from gemmery.cuda import ordered
from gemmery.errors import DeviceError
from gemmery.jax import frame as frames
from gemmery.jax import static
from gemmery.jax.static import StaticProduct

if TYPE_CHECKING:
    from gemmery.api.prepared import TieredLaunch

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
    head = (frames.minor_version(), _address(_prepare), pool.entries()["run"], *map(ctypes.addressof, messages))
    ctypes.memmove(table, struct.pack(f"<{len(head)}q", *head), 8 * len(head))
    address = jit.load(host(), "xla", lambda: xla.module(host()), table)["handle"]
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(address), platform="cpu")
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_address(handle)), platform="CUDA")
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
        return know(frames.product(address))
    except BaseException:  # nothing may be raised into XLA
        traceback.print_exc()
        return 0


_MOST = 4096
# By key, device, alignment of the addresses, and default precision.
_launches: dict[tuple[Any, ...], TieredLaunch | None] = {}


def handle(frame: int) -> int:
    """Launch the product of a call; return 0, or the address of an error of XLA."""
    try:
        if not frames.answered(frame):
            _launch(frame)
    except BaseException as error:  # nothing may be raised into XLA
        return frames.failed(frame, f"{type(error).__name__}: {error}")
    return 0


def _launch(frame: int) -> None:
    """Put the launches of a call on its stream.

    A product of memory like that of an earlier call is looked up: its views and its plan, made anew each time, would
    take longer than the launch. XLA lets no result overlap an operand.
    """
    stream, (a, b, c) = frames.stream(frame), frames.addresses(frame)
    low, ordinal = (a & 15) << 8 | (b & 15) << 4 | c & 15, ordered.where(c)
    known = frames.key(frame), ordinal, low, get_float32_precision()
    served = _launches.get(known)
    if served is None:
        if len(_launches) >= _MOST:
            _launches.clear()
        _launches[known] = _write(frame, (a, b, c), ordinal, stream)
        return
    run = served.next(stream)
    scratch = ordered.Scratch(run.workspace, stream, ordinal) if run.workspace else None
    for first, second, third in served.form.offsets():
        run(a + first, b + second, c + third, stream, 0, 0 if scratch is None else scratch.pointer)


def _write(frame: int, addresses: tuple[int, int, int], ordinal: int, stream: int) -> TieredLaunch | None:
    """Launch the product of a call; return what ran."""
    from gemmery.api import on_device  # for the first product on a device

    product = frames.product(frame)
    x, y, target = (
        z._replace(pointer=address, device=f"cuda:{ordinal}", stream=stream)
        for z, address in zip(product.operands(), addresses, strict=True)
    )
    return on_device.write(x, y, target, product.precision or None)
