"""Operands in a GPU's memory as tensors of PyTorch, or as arrays of no library, and calls that take them.

There are so many copies that no call finds its own in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from gemmery import arrays, dtypes
from gemmery.arrays import View
from gemmery.cuda import driver
from gemmery.cuda.driver import Memory, Stream
from gemmery.errors import DeviceError, RefusedError
from gemmery.limits.device_limits import Put
from gemmery.problem import Problem
from gemmery_lab.measure import work as works
from gemmery_lab.measure.libraries import as_tensor
from gemmery_lab.measure.timing import Sample, not_found, products
from gemmery_lab.measure.work import Work

L2_TIMES = 3  # sets of operands together fill this many L2 caches
MOST_SETS = 1024  # sets below 180 KB stay in an L2 of 60 MB: a graph of more calls would be slow to build
ALIGNMENT = 256  # alignment of operands in bytes, that of the driver's allocations


class DeviceOperands(NamedTuple):
    """A, B and C of one product, each of shape (batch, rows, columns)."""

    a: View
    b: View
    c: View


class Resident:
    """A Work on a device: `sets` of equal operands in separate memory, and `host`, the arrays they are copies of.

    Raises RefusedError if the device does not have enough memory.
    """

    def __init__(self, work: Work, stream: Stream) -> None:
        device = driver.device(stream.ordinal)
        self.work, self.stream = work, stream
        operands = works.operands(replace(work, call="out", vector=False))
        self.host = tuple(x if x.ndim == 3 else x[None] for x in operands)
        stored = [_stored(x) for x in self.host]
        sizes = [-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in stored]
        if work.b_layout == works.OF_A:
            sizes[1] = 0
        each = sum(sizes)
        count = min(max(1, -(-L2_TIMES * device.l2 // each)), MOST_SETS)
        room = driver.room(stream.ordinal)
        if each > room:
            raise RefusedError(f"{work} takes {each:,} bytes on the device, which has {room:,} free: make it smaller")
        self.scales = tuple(self._small(x) for x in works.factors(work)) if work.scales else ()
        self.offsets = self._small(works.offsets(work)) if work.groups else None
        self._memory = Memory(min(count, max(1, room // each)) * each, stream.ordinal)
        starts = [0, sizes[0] if sizes[1] else 0, sizes[0] + sizes[1]]
        for start, x in zip(starts, stored, strict=True):
            self._memory.write(x, start)
        for index in range(1, self._memory.size // each):
            self._memory.copy(0, index * each, each)
        driver.synchronize(stream.ordinal)  # the copies run on another stream
        self.sets = tuple(
            DeviceOperands(*(self._view(x, place, offset) for x, place in zip(self.host, starts, strict=True)))
            for offset in range(0, self._memory.size, each)
        )

    @property
    def problem(self) -> Problem:
        """The problem that a rung is built for."""
        a, b, c = map(alignment, self.sets[0])
        return self.work.problem._replace(device=f"cuda:{self.stream.ordinal}", alignments=(a, b, c))

    def poison(self) -> None:
        """Fill the C of the first set with what no product has: NaN, or a sum of integers that is out of reach."""
        c = self.sets[0].c
        size = self.host[2].nbytes
        self._memory.fill(poison(self.host[2].dtype), c.pointer - self._memory.pointer, size)
        driver.synchronize(self.stream.ordinal)

    def result(self) -> np.ndarray[Any, Any]:
        c = np.empty(self.host[2].shape, self.host[2].dtype)
        self._memory.read(c, self.sets[0].c.pointer - self._memory.pointer)
        return c

    def vector(self, length: int) -> View:
        return self._small(np.random.default_rng(self.work.seed).standard_normal(length, np.float32))

    def _small(self, x: np.ndarray[Any, Any]) -> View:
        """Copy an array that all sets share to the device; its strides stay."""
        memory = Memory(x.nbytes, self.stream.ordinal)
        memory.write(x.T if x.flags.f_contiguous else x)
        return self._placed(x, memory.pointer, memory)

    def _view(self, x: np.ndarray[Any, Any], place: int, offset: int) -> View:
        start = self._memory.pointer + offset + place + x.ctypes.data - _stored(x).ctypes.data
        return self._placed(x, start, self._memory)

    def _placed(self, x: np.ndarray[Any, Any], pointer: int, memory: Memory) -> View:
        name, device = dtypes.get(x.dtype.name).name, f"cuda:{self.stream.ordinal}"
        return View(pointer, x.shape, x.strides, name, device, self.stream.handle, True, memory)


def poison(dtype: np.dtype[Any]) -> int:
    """Return the byte that C is filled with before a check: all bits set are a NaN in every floating-point type."""
    return 0x80 if dtype.kind in "iu" else 0xFF


def alignment(view: View) -> int:
    """Return the largest power of two, at most 16, that divides the pointer and all strides except the unit stride."""
    size, walked = dtypes.get(view.dtype).size, zip(view.strides, view.shape, strict=True)
    return arrays.alignment(view.pointer, tuple(step for step, length in walked if length > 1 and abs(step) != size))


def _stored(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the whole memory that `x` is a view of."""
    return x if x.base is None else x.base


class Shared:
    """A View with `__cuda_array_interface__`, which all GPU libraries read; bfloat16 and float8, which it lacks, as
    integers.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        row = dtypes.get(view.dtype)
        stored = row.numpy if row.stored == row.numpy else f"int{8 * row.size}"
        self.__cuda_array_interface__ = {
            "shape": view.shape,
            "strides": view.strides,
            "typestr": np.dtype(stored).str,
            "data": (view.pointer, False),
            "stream": view.stream,
            "version": 3,
        }


TORCH_NAMES = {row.name: row.numpy for row in dtypes.DTYPES if row.stored != row.numpy}  # of what is shared as integers

OnStream = AbstractContextManager[Any]  # a stream as the current one of a library
Sets = Sequence[tuple[Any, ...]]
"""(a, b, c) as arrays of a library, a set after the other."""


def without_torch() -> str:
    """Return why PyTorch cannot use a GPU here, "" if it can."""
    reason = not_found("torch")
    if reason:
        return reason
    import torch

    if torch.cuda.is_available():
        return ""
    return "this PyTorch finds no CUDA device" if torch.version.cuda else "this PyTorch is built without CUDA"


def tensor(view: View) -> Any:
    """Return a view of a GPU's memory as a tensor."""
    import torch

    shared = torch.as_tensor(Shared(view), device=view.device)
    return shared.view(getattr(torch, TORCH_NAMES[view.dtype])) if view.dtype in TORCH_NAMES else shared


def array(view: View) -> Any:
    """Return a view as a tensor, without PyTorch as an object with `__cuda_array_interface__`."""
    return Shared(view) if without_torch() else tensor(view)


def new_shapes(device: str) -> tuple[Callable[[Any], Any], Callable[..., object], Callable[[], object]]:
    """Return what makes a tensor on a device of NumPy's array, PyTorch's product, and what waits for a result."""
    import torch

    return lambda array: as_tensor(array).to(device), torch.matmul, torch.cuda.synchronize


def tensors_in(device: str) -> Callable[[Any], tuple[Any, Callable[[], Any]]]:
    """Return what makes a tensor on a device of the image of a matrix: its bytes, type, shape, strides and offset.

    That returns the tensor, and what reads the bytes back. Raises DeviceError without PyTorch for the device.
    """
    if reason := without_torch():
        install = "install PyTorch for CUDA, or name the device cpu"
        raise DeviceError(f"products on {device} are of PyTorch's tensors: {reason}; {install}")
    import torch

    def place(image: Any) -> tuple[Any, Callable[[], Any]]:
        there = torch.from_numpy(image.memory).to(device, copy=True)
        elements = there.view(getattr(torch, image.dtype.name))
        return torch.as_strided(elements, image.shape, image.strides, image.offset), lambda: there.cpu().numpy()

    return place


def own(resident: Resident, function: Callable[..., object]) -> Put:
    """Return what launches `function(a, b, out=c)` on the stream, as a caller of gemmery would."""
    return put_by(*_callers(resident), function)


def own_options(resident: Resident, bias: bool = False) -> dict[str, Any]:
    """Return the arrays besides A, B and C that gemmery's product of a work takes, and random numbers as a bias."""
    options = dict(zip(("scale_a", "scale_b"), map(array, resident.scales), strict=False))
    if resident.offsets is not None:
        options["offsets"] = array(resident.offsets)
    if bias:
        options["bias"] = array(resident.vector(resident.work.n))
    return options


def own_calls(resident: Resident, function: Callable[..., object]) -> Sample:
    """Return a sampler of the time until `function(a, b, out=c)` returns."""
    return host_time(*_callers(resident), function, resident)


def _callers(resident: Resident) -> tuple[OnStream, Sets]:
    """Return the operands as PyTorch tensors and its current stream; without PyTorch, as objects with
    `__cuda_array_interface__`, which names the stream itself.
    """
    if not without_torch():
        return on_torch(resident), tensors(resident)
    for name in (resident.work.dtype, resident.work.out):
        if name in TORCH_NAMES:
            raise RefusedError(f"{name}: __cuda_array_interface__ has no such type; timed only through PyTorch")
    return nullcontext(), [tuple(map(Shared, views)) for views in _views(resident)]


def _views(resident: Resident) -> Sequence[tuple[View, ...]]:
    """Return the views of all sets; those of a single product are matrices, except the many B of groups."""
    if resident.work.batch > 1:
        return resident.sets
    grouped = bool(resident.work.groups)
    return [(_matrix(x.a), x.b if grouped else _matrix(x.b), _matrix(x.c)) for x in resident.sets]


def _matrix(view: View) -> View:
    """Return the only matrix of a batch."""
    return view._replace(shape=view.shape[1:], strides=view.strides[1:])


def put_by(stream: OnStream, sets: Sets, function: Callable[..., object]) -> Put:
    """Return what launches `function(a, b, out=c)` on one set of operands; results that it allocates are kept."""
    results: list[object] = [None] * len(sets)

    def put(index: int) -> None:
        with stream:
            a, b, c = sets[index]
            results[index] = function(a, b, out=c)

    return put


def host_time(stream: OnStream, sets: Sets, function: Callable[..., object], resident: Resident) -> Sample:
    """Return a sampler of the time on the host until `function(a, b, out=c)` returns, for the first set of operands."""
    loop = products(function, *sets[0])

    def sample(inner: int, warm: int) -> int:
        with stream:
            elapsed = loop(inner, warm)
        resident.stream.synchronize()
        return elapsed

    return sample


def on_torch(resident: Resident) -> OnStream:
    """Return what makes the stream of the operands PyTorch's current one."""
    import torch

    handle, device = resident.stream.handle, f"cuda:{resident.stream.ordinal}"
    stream = torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def tensors(resident: Resident) -> Sets:
    """Return the operands as tensors; for a single product as matrices."""
    return [tuple(map(tensor, views)) for views in _views(resident)]


def torch_chain(views: Sequence[View]) -> Put:
    """Puts one step of R = A (A + B) on their stream, by torch.add and torch.mm: step i of a chain in which A and R
    change places. `views` are A, B, the sum and R.
    """
    import torch

    a, b, total, r = (tensor(view)[0] for view in views)
    stream = torch.cuda.ExternalStream(views[0].stream, device=views[0].device)  # type: ignore[no-untyped-call]

    def put(step: int) -> None:
        x, y = (r, a) if step % 2 else (a, r)
        with torch.cuda.stream(stream):
            torch.add(x, b, out=total)
            torch.mm(x, total, out=y)

    return put
