"""Products with the shapes that JAX knows when it traces, and the handlers of this process: what XLA calls.

For the CPU that is compiled code, which reads a table of jobs. For CUDA devices it is Python, which puts the launches
of a product on XLA's stream, as `gemmery.matmul` does. The frame that XLA passes is read here too, by the offsets of
`cpu/xla.py`.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from gemmery import dispatch, dtypes, tiers
from gemmery.api.compute import KernelTypes, prepare
from gemmery.api.device_call import keep, low_bits, table
from gemmery.api.device_operands import get_float32_precision
from gemmery.api.options import only_on_devices
from gemmery.api.repeats import Prepared
from gemmery.arrange import Ints, result_shape
from gemmery.arrays import View, contiguous
from gemmery.cpu import jit, pool, threads, workspace, xla
from gemmery.cpu.launch import Launch
from gemmery.cpu.target import host
from gemmery.cuda import ordered
from gemmery.errors import DeviceError, RefusedError
from gemmery.keywords import PRECISIONS, Options
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from gemmery.api.prepared import TieredLaunch

TARGET = "gemmery_matmul"

A_TRANSPOSED, B_TRANSPOSED = 1, 2
_PRECISIONS = ("", *PRECISIONS)  # by number; new ones go to the end, as programs that JAX stored have the numbers


class StaticProduct(NamedTuple):
    """A product of C-contiguous arrays, whose last two dimensions may be exchanged."""

    a_shape: Ints  # as the array is in memory
    b_shape: Ints
    dtype: str  # gemmery's names of the element types
    out: str
    transposed: int  # A_TRANSPOSED, B_TRANSPOSED, both or 0
    precision: str = ""  # on a CUDA device

    @property
    def key(self) -> int:
        """A number that identifies the product in any process; 0 is none."""
        whole = tuple(self) if self.precision else tuple(self)[:-1]
        digest = blake2b(repr(whole).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True) or 1

    @property
    def form(self) -> int:
        """A number for what the shapes and types do not say: which operands are transposed, and the precision."""
        return self.transposed | _PRECISIONS.index(self.precision) << 2

    @property
    def shape(self) -> Ints:
        """Shape of the result. Raises ShapeError."""
        return result_shape(self._exchanged(self.a_shape, A_TRANSPOSED), self._exchanged(self.b_shape, B_TRANSPOSED))

    def of_form(self, form: int) -> StaticProduct:
        """Return the product of these shapes and types that has this form."""
        return self._replace(transposed=form & 3, precision=_PRECISIONS[form >> 2])

    def _exchanged(self, sides: Ints, which: int) -> Ints:
        return (*sides[:-2], sides[-1], sides[-2]) if self.transposed & which else sides

    def operands(self) -> tuple[View, View, View]:
        """Return A, B and C as the kernel sees them, at address 0."""
        size = dtypes.get(self.dtype).size
        a, b = (
            View(0, self._exchanged(shape, which), self._exchanged(contiguous(shape, size), which), self.dtype)
            for shape, which in ((self.a_shape, A_TRANSPOSED), (self.b_shape, B_TRANSPOSED))
        )
        return a, b, View(0, self.shape, contiguous(self.shape, dtypes.get(self.out).size), self.out)


class StaticJob(NamedTuple):
    """What the handler runs: a job without pointers, once for each offset of those of A, B and C."""

    job: bytes
    offsets: tuple[tuple[int, int, int], ...]
    swapped: bool  # the job computes C' = B' A'


def prepared(product: StaticProduct) -> Prepared:
    """Return the kernel for a product on the CPU, compiled, and the form in which it takes the operands.

    Raises ArgumentError for a precision, which only products on a CUDA device have.
    """
    only_on_devices(Options(precision=product.precision or None))
    (a, b, c), types = product.operands(), KernelTypes(product.dtype, product.dtype, product.out)
    done = prepare(types, (a.shape, b.shape, c.shape), (a.strides, b.strides, c.strides))
    assert done is not None  # C is contiguous
    return done


def job(product: StaticProduct, how: Prepared, threads: int) -> StaticJob:
    """Return the job of a product. Raises RefusedError where kernels are no compiled code with jobs."""
    kernel, form = how.plan.kernel, how.form
    if not isinstance(kernel, Launch):
        raise RefusedError(f"{how.plan.rung.name} has no job that XLA can run: use gemmery.matmul outside of jit")
    words = kernel.job(*how.operands(*product.operands()), 1, 0, None, threads)
    swapped = kernel.transposes((form.batch, form.m, form.n), form.c)
    return StaticJob(words, tuple(form.offsets()), swapped)


def specialized(how: Prepared) -> Prepared | None:
    """Return the kernel compiled for this shape alone, where it is faster than the one for every shape."""
    plan = dispatch.specialized(how.problem)
    return None if plan is None else how._replace(plan=plan)


# ---- the handlers ----

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
    head = (minor_version(), _address(_prepare), pool.entries()["run"], *map(ctypes.addressof, messages))
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
        how = prepared(product)
        entry = _entries[product, count] = _entry(job(product, how, count))
        _improve(product, how, count)
    _store(table, product.key, entry)
    return entry


def _entry(job: StaticJob) -> int:
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
        better = specialized(how)
        if better is not None:
            _entries[product, count] = entry = _entry(job(product, better, count))
            if threads.get() == count:
                _store(register(), product.key, entry)

    tiers.aside(("jax", product, count), make)


def _forget() -> None:
    """Empty the table: the jobs in it are for another number of threads."""
    ctypes.memset(register() + xla.SLOTS_AT, 0, xla.TABLE_BYTES - xla.SLOTS_AT)


def _prepare(address: int) -> int:
    """Prepare the product of a call that the handler does not know; 0 where that fails."""
    try:
        return know(_product_of(address))
    except BaseException:  # nothing may be raised into XLA
        traceback.print_exc()
        return 0


def handle(frame: int) -> int:
    """Launch the product of a call; return 0, or the address of an error of XLA."""
    try:
        if not _answered(frame):
            _launch(frame)
    except BaseException as error:  # nothing may be raised into XLA
        text = ctypes.create_string_buffer(f"{type(error).__name__}: {error}".encode())
        arguments = (ctypes.c_int64 * 4)(xla.ERROR_BYTES, 0, ctypes.addressof(text), xla.INTERNAL)
        create = _FUNCTION(_word(_word(frame + xla.API) + xla.ERROR_CREATE))
        return int(create(ctypes.addressof(arguments)) or 0)
    return 0


def _launch(frame: int) -> None:
    """Put the launches of a call on its stream.

    A product of memory like that of an earlier call is looked up: its views and its plan, made anew each time, would
    take longer than the launch. XLA lets no result overlap an operand.
    """
    stream, (a, b, c) = _stream_of(frame), (_word(buffer + xla.BUFFER_DATA) for buffer in _buffers(frame))
    low, ordinal = low_bits(a, b, c), ordered.where(c)
    number = _word(_word(_word(_word(frame + xla.ATTRIBUTES)) + xla.SCALAR_VALUE))  # the key of the product
    key = "jax", number, ordinal, low, get_float32_precision()
    served = table.calls.get(key)
    if served is None:
        keep(table.calls, key, _write(frame, (a, b, c), ordinal, stream))
        return
    run = served.next(stream)
    scratch = ordered.Scratch(run.workspace, stream, ordinal) if run.workspace else None
    for first, second, third in served.form.offsets():
        run(a + first, b + second, c + third, stream, 0, 0 if scratch is None else scratch.pointer)


def _write(frame: int, addresses: tuple[int, int, int], ordinal: int, stream: int) -> TieredLaunch | None:
    """Launch the product of a call; return what ran."""
    from gemmery.api import on_device  # for the first product on a device

    product = _product_of(frame)
    x, y, target = (
        z._replace(pointer=address, device=f"cuda:{ordinal}", stream=stream)
        for z, address in zip(product.operands(), addresses, strict=True)
    )
    return on_device.write(x, y, target, product.precision or None)


_NAMES = {row.xla: row.name for row in dtypes.DTYPES if row.name in dtypes.NAMES}
_CONTEXT = 24
_STREAM_GET, _STREAM_BYTES, _STREAM = 80, 32, 24
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def _word(at: int) -> int:
    return ctypes.c_int64.from_address(at).value


@functools.cache
def minor_version() -> int:
    """Return the minor version of the interface of this JAX, whose major version is 0.

    Raises DeviceError for another major version.
    """
    text = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    major, minor = (int(re.findall(rf"#define XLA_FFI_API_{name} (\d+)", text)[0]) for name in ("MAJOR", "MINOR"))
    if major:
        raise DeviceError(f"version {major}.{minor} of XLA's interface is not supported: gemmery.jax knows version 0")
    return minor


def _answered(frame: int) -> bool:
    """Answer a question about the handler's version; return False if the frame is a call."""
    extension = _word(frame + xla.EXTENSION)
    if not extension or ctypes.c_int32.from_address(extension + xla.EXTENSION_TYPE).value != xla.METADATA_TYPE:
        return False
    metadata = _word(extension + xla.METADATA)
    ctypes.c_int32.from_address(metadata + xla.MAJOR).value = 0
    ctypes.c_int32.from_address(metadata + xla.MINOR).value = minor_version()
    return True


def _product_of(frame: int) -> StaticProduct:
    """Return the product that a call is for."""
    a, b, c = _buffers(frame)
    attributes = _word(frame + xla.ATTRIBUTES)
    form = _word(_word(_word(attributes + 8) + xla.SCALAR_VALUE))
    return StaticProduct(_dims(a), _dims(b), _element(a), _element(c), 0).of_form(form)


def _stream_of(frame: int) -> int:
    """Return the CUDA stream of a call. Raises DeviceError where XLA has none."""
    arguments = (ctypes.c_int64 * (_STREAM_BYTES // 8))(_STREAM_BYTES, 0, _word(frame + _CONTEXT))
    if _FUNCTION(_word(_word(frame + xla.API) + _STREAM_GET))(ctypes.addressof(arguments)):
        raise DeviceError("XLA has no stream for a product on a CUDA device")
    return arguments[_STREAM // 8]


def _buffers(frame: int) -> tuple[int, int, int]:
    operands, results = _word(frame + xla.ARGS), _word(frame + xla.RESULTS)
    return _word(operands), _word(operands + 8), _word(results)


def _dims(buffer: int) -> tuple[int, ...]:
    at = _word(buffer + xla.BUFFER_DIMS)
    return tuple(_word(at + 8 * i) for i in range(_word(buffer + xla.BUFFER_RANK)))


def _element(buffer: int) -> str:
    return _NAMES[ctypes.c_int32.from_address(buffer + xla.BUFFER_DTYPE).value]
