"""Operands in a GPU's memory as tensors of PyTorch, or as arrays of no library, and calls that take them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gemmery import dtypes
from gemmery.arrays import View
from gemmery.bench import new_shapes as shapes
from gemmery.bench.new_shapes import Pairs
from gemmery.bench.resident import Resident, Shared
from gemmery.bench.rival import not_found
from gemmery.bench.timing import Sample, products
from gemmery.bench.work import Work
from gemmery.errors import DeviceError, RefusedError
from gemmery.limits.device_limits import Put

TORCH_NAMES = {row.name: row.numpy for row in dtypes.DTYPES if row.stored != row.numpy}  # of what is shared as integers

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


def new_shapes(work: Work, device: str) -> tuple[Pairs, Callable[[Any, Any], object], Callable[[], object]]:
    """Return tensors of the shapes of a work on a device, PyTorch's product, and what waits for a result."""
    import torch

    def convert(array: Any) -> Any:
        tensor = torch.from_numpy(array.view("int16") if work.dtype == "bf16" else array)
        return (tensor.view(torch.bfloat16) if work.dtype == "bf16" else tensor).to(device)

    return shapes.pairs(work, convert), torch.matmul, torch.cuda.synchronize


def tensors_in(device: str) -> Callable[[Any, str, Sequence[int], Sequence[int], int], tuple[Any, Callable[[], Any]]]:
    """Return what copies bytes to a device and describes a tensor there: its type, shape, strides and first element.

    That returns the tensor, and what reads the bytes back. Raises DeviceError without PyTorch for the device.
    """
    reason = without_torch()
    if reason:
        raise DeviceError(
            f"products on {device} are of PyTorch's tensors: {reason}; install PyTorch for CUDA, or name the device cpu"
        )
    import torch

    def place(
        memory: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int
    ) -> tuple[Any, Callable[[], Any]]:
        there = torch.from_numpy(memory).to(device, copy=True)
        tensor = torch.as_strided(there.view(getattr(torch, dtype)), shape, strides, offset)
        return tensor, lambda: there.cpu().numpy()

    return place


def own(resident: Resident, function: Callable[..., object]) -> Put:
    """Return what launches `function(a, b, out=c)` on the stream, as a caller of gemmery would."""
    stream, sets = _callers(resident)
    return functools.partial(put_by, stream, sets, function)


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
    stream, sets = _callers(resident)
    return host_time(stream, function, sets[0], resident)


def _callers(resident: Resident) -> tuple[AbstractContextManager[Any], Sets]:
    """Return the operands as PyTorch tensors and its current stream; without PyTorch, as objects with
    `__cuda_array_interface__`, which names the stream itself.
    """
    if not without_torch():
        return on_torch(resident), tensors(resident)
    for name in (resident.work.dtype, resident.work.out):
        if name in TORCH_NAMES:
            raise RefusedError(f"{name}: __cuda_array_interface__ has no such type; timed only through PyTorch")
    return nullcontext(), [tuple(map(Shared, views)) for views in _views(resident)]


def _views(resident: Resident) -> list[tuple[View, ...]]:
    """Return the views of all sets; those of a single product are matrices."""
    if resident.work.batch > 1:
        return [(x.a, x.b, x.c) for x in resident.sets]
    grouped = bool(resident.work.groups)
    return [(matrix(x.a), x.b if grouped else matrix(x.b), matrix(x.c)) for x in resident.sets]


def put_by(stream: AbstractContextManager[Any], sets: Sets, function: Callable[..., object], index: int) -> None:
    """Launch `function(a, b, out=c)` on one set of operands."""
    with stream:
        a, b, c = sets[index]
        function(a, b, out=c)


def host_time(
    stream: AbstractContextManager[Any], function: Callable[..., object], operands: tuple[Any, ...], resident: Resident
) -> Sample:
    """Return a sampler of the time on the host until `function(a, b, out=c)` returns."""
    loop = products(function, *operands)

    def sample(inner: int, warm: int) -> int:
        with stream:
            elapsed = loop(inner, warm)
        resident.stream.synchronize()
        return elapsed

    return sample


def matrix(view: View) -> View:
    """Return the only matrix of a batch."""
    return view._replace(shape=view.shape[1:], strides=view.strides[1:])


def on_torch(resident: Resident) -> AbstractContextManager[Any]:
    """Return what makes the stream of the operands PyTorch's current one."""
    import torch

    handle, device = resident.stream.handle, f"cuda:{resident.stream.ordinal}"
    stream = torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def tensors(resident: Resident) -> Sets:
    """Return the operands as tensors; for a single product as matrices."""
    return [tuple(map(tensor, views)) for views in _views(resident)]


def allocating(stream: AbstractContextManager[Any], sets: Sets, function: Callable[..., Any]) -> Put:
    """Return what launches a function that allocates its result, and keeps one for each set of operands."""
    results: list[Any] = [None] * len(sets)

    def put(index: int) -> None:
        with stream:
            a, b, c = sets[index]
            results[index] = function(a, b, c)

    return put


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
