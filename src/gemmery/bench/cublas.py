"""The vendor's library on a GPU, as PyTorch and CuPy call it; the only importer of both except `bench.libraries`.

It runs in this process, on the stream of the rungs: both see the same clocks, and only the device's work is timed.
float32 products are computed in float32 unless `precision` allows TF32, and half-precision products are summed in
float32: settings of a library that allow less are switched off.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from gemmery import dtypes
from gemmery.arrays import View
from gemmery.bench import new_shapes as shapes
from gemmery.bench.new_shapes import Pairs
from gemmery.bench.record import version
from gemmery.bench.replays import Put, replays
from gemmery.bench.resident import DeviceOperands, Resident, Shared
from gemmery.bench.rival import Rival, by_name, not_found
from gemmery.bench.timing import Sample, products
from gemmery.bench.work import Work
from gemmery.errors import DeviceError, RefusedError

EIGHT_BITS = ("i8", *dtypes.FP8)
TRIES = 5  # samples of TRIED_SECONDS each to choose the fastest way
TRIED_SECONDS = 0.003
LARGEST_BIASED = 2  # bytes of elements whose products with a bias PyTorch leaves to cublasLt


@dataclass(frozen=True)
class Placed:
    """A product that a library can launch on a stream; `note` tells how it is called."""

    put: Put
    note: str
    captured: bool = True  # in a graph; otherwise short calls include time of the host

    def sample(self, resident: Resident, look: Callable[[], None] = lambda: None) -> Sample:
        """Return a sampler of it; `look` is called while the device works."""
        return replays(self.put, resident.stream, len(resident.sets), look, self.captured)


@dataclass(frozen=True)
class Caller(Rival):
    """One way to call the vendor's library."""

    place: Callable[[Resident], Placed]  # raises RefusedError for a product it does not support
    calls: Callable[[Resident], Sample]  # the time of a call on the host; also raises RefusedError


def find(name: str) -> Caller:
    """Return the rival called `name`. Raises ArgumentError for an unknown one."""
    return by_name(RIVALS, name, " on a GPU")


def _without_torch() -> str:
    reason = not_found("torch")
    if reason:
        return reason
    import torch

    return "" if torch.cuda.is_available() else "this PyTorch is built without CUDA"


def _runs_torch() -> str:
    import torch

    cublas = version("nvidia-cublas") or version("nvidia-cublas-cu12")
    return f"cuBLAS {cublas or f'of CUDA {torch.version.cuda}'} by PyTorch {torch.__version__}"


def _runs_cupy() -> str:
    import cupy

    number = cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle())
    return f"cuBLAS {number // 10000}.{number // 100 % 100} by CuPy {cupy.__version__}"


TORCH_NAMES = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}  # of what is shared as integers


def tensor(view: View) -> Any:
    """Return a view of a GPU's memory as a tensor."""
    import torch

    shared = torch.as_tensor(Shared(view), device=view.device)
    return shared.view(getattr(torch, TORCH_NAMES[view.dtype])) if view.dtype in TORCH_NAMES else shared


def array(view: View) -> Any:
    """Return a view as a tensor, without PyTorch as an object with `__cuda_array_interface__`."""
    return Shared(view) if _without_torch() else tensor(view)


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
    reason = _without_torch()
    if reason:
        raise DeviceError(f"{device} without PyTorch, whose tensors hold the operands: {reason}")
    import torch

    def place(
        memory: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int
    ) -> tuple[Any, Callable[[], Any]]:
        there = torch.from_numpy(memory).to(device, copy=True)
        tensor = torch.as_strided(there.view(getattr(torch, dtype)), shape, strides, offset)
        return tensor, lambda: there.cpu().numpy()

    return place


Sets = Sequence[tuple[Any, ...]]
"""(a, b, c) as arrays of a library, a set after the other."""


def own(resident: Resident, function: Callable[..., object]) -> Put:
    """Return what launches `function(a, b, out=c)` on the stream, as a caller of gemmery would."""
    stream, sets = _callers(resident)
    return functools.partial(_put, stream, sets, function)


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
    return _host(stream, function, sets[0], resident)


def _callers(resident: Resident) -> tuple[AbstractContextManager[Any], Sets]:
    """Return the operands as PyTorch tensors and its current stream; without PyTorch, as objects with
    `__cuda_array_interface__`, which names the stream itself.
    """
    if not _without_torch():
        return _on_torch(resident), _tensors(resident)
    for name in (resident.work.dtype, resident.work.out):
        if name in TORCH_NAMES:
            raise RefusedError(f"{name}: __cuda_array_interface__ has no such type; timed only through PyTorch")
    return nullcontext(), [tuple(map(Shared, views)) for views in _views(resident)]


def _views(resident: Resident) -> list[tuple[View, ...]]:
    """Return the views of all sets; those of a single product are matrices."""
    if resident.work.batch > 1:
        return [(x.a, x.b, x.c) for x in resident.sets]
    grouped = bool(resident.work.groups)
    return [(_matrix(x.a), x.b if grouped else _matrix(x.b), _matrix(x.c)) for x in resident.sets]


def _put(stream: AbstractContextManager[Any], sets: Sets, function: Callable[..., object], index: int) -> None:
    with stream:
        a, b, c = sets[index]
        function(a, b, out=c)


def _host(
    stream: AbstractContextManager[Any], function: Callable[..., object], operands: tuple[Any, ...], resident: Resident
) -> Sample:
    loop = products(function, *operands)

    def sample(inner: int, warm: int) -> int:
        with stream:
            elapsed = loop(inner, warm)
        resident.stream.synchronize()
        return elapsed

    return sample


def _matrix(view: View) -> View:
    return view._replace(shape=view.shape[1:], strides=view.strides[1:])


def _on_torch(resident: Resident) -> AbstractContextManager[Any]:
    import torch

    handle, device = resident.stream.handle, f"cuda:{resident.stream.ordinal}"
    stream = torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def _tensors(resident: Resident) -> Sets:
    """Return the operands as tensors; for a single product as matrices."""
    return [tuple(map(tensor, views)) for views in _views(resident)]


def _torch_function(resident: Resident) -> Callable[..., object]:
    """torch.mm or torch.bmm, with the settings for the element types."""
    import torch

    work = resident.work
    if work.dtype in EIGHT_BITS or work.scales or work.groups:
        raise RefusedError("torch.mm multiplies neither 8-bit types nor groups, and takes no factors")
    if work.out != work.dtype:
        raise RefusedError(f"PyTorch writes no {work.out} from {work.dtype} into existing memory")
    settings = torch.backends.cuda.matmul
    settings.allow_tf32 = work.precision == "tf32"
    settings.allow_fp16_reduced_precision_reduction = settings.allow_bf16_reduced_precision_reduction = False
    return torch.bmm if work.batch > 1 else torch.mm


def _place_torch(resident: Resident) -> Placed:
    """The fastest of torch.mm (torch.bmm for a batch) by cuBLAS and by cublasLt, and of torch.addmm of a zero bias in
    half precision, which has heuristics of its own; for a vector torch.mv too.
    """
    import torch

    work = resident.work
    if work.groups:
        return _tried(_grouped_ways(resident), resident)
    if work.dtype in EIGHT_BITS:
        ways = _eight_bit_ways(resident, fast=True)
        also = _eight_bit_ways(resident, fast=False) if work.scales == "blocks" else {}
        return _tried({**ways, **also}, resident)
    function = _torch_function(resident)
    stream, sets = _on_torch(resident), _tensors(resident)
    name = f"torch.{function.__name__}"
    ways = {
        name: functools.partial(_put, stream, sets, function),
        f"{name} by cublasLt": functools.partial(_put, stream, sets, functools.partial(_by_lt, function)),
    }
    if work.batch == 1 and sets[0][0].element_size() <= LARGEST_BIASED:
        bias = torch.zeros(work.n, dtype=sets[0][2].dtype, device=sets[0][2].device)
        ways["torch.addmm"] = functools.partial(_put, stream, sets, functools.partial(torch.addmm, bias))
    if work.batch == 1 and 1 in (work.m, work.n):
        rows = [(b.T, a[0], c[0]) if work.m == 1 else (a, b[:, 0], c[:, 0]) for a, b, c in sets]
        ways["torch.mv"] = functools.partial(_put, stream, rows, torch.mv)
    return _quickest(ways, resident)


def _eight_bit_ways(resident: Resident, fast: bool) -> dict[str, Put]:
    """torch._int_mm, or torch._scaled_mm with factors of one each or those of the work; sums are `fast` or kept in
    float32.
    """
    import torch

    work, stream, sets = resident.work, _on_torch(resident), _tensors(resident)
    if work.dtype == "i8":
        if work.out != "i32" or work.scales:
            raise RefusedError("torch._int_mm multiplies int8 into int32, without factors")
        return {"torch._int_mm": functools.partial(_put, stream, sets, torch._int_mm)}
    factors = [torch.ones((), device=sets[0][0].device)] * 2
    a_factor, b_factor = map(tensor, resident.scales) if work.scales else factors

    def scaled(a: Any, b: Any, out: Any, accumulates: bool) -> None:
        torch._scaled_mm(a, b, a_factor, b_factor, out_dtype=out.dtype, use_fast_accum=accumulates, out=out)

    function = functools.partial(scaled, accumulates=fast)
    ways: dict[str, Put] = {f"torch._scaled_mm, use_fast_accum={fast}": functools.partial(_put, stream, sets, function)}
    named = getattr(torch.nn.functional, "scaled_mm", None)
    if work.scales == "blocks" and named is not None:
        kinds = torch.nn.functional.ScalingType
        recipes = a_factor, kinds.BlockWise1x128, b_factor, kinds.BlockWise128x128

        def blocks(a: Any, b: Any, out: Any) -> Any:
            return named(a, b, *recipes, output_dtype=out.dtype, use_fast_accum=fast)

        ways[f"torch.nn.functional.scaled_mm, use_fast_accum={fast}"] = _allocating(stream, sets, blocks)
    return ways


def _grouped_ways(resident: Resident) -> dict[str, Put]:
    """torch._grouped_mm, which allocates its result, and a loop of torch.mm that knows the groups' sizes."""
    import torch

    if resident.work.dtype in EIGHT_BITS or resident.offsets is None:
        raise RefusedError("torch._grouped_mm is timed with bf16 and f16 alone")
    stream, sets, ends = _on_torch(resident), _tensors(resident), tensor(resident.offsets)
    bounds = [0, *ends.tolist()]

    def grouped(a: Any, b: Any, out: Any) -> Any:
        return torch._grouped_mm(a, b, offs=ends)

    def loop(a: Any, b: Any, out: Any) -> None:
        for matrix, (start, end) in zip(b, itertools.pairwise(bounds), strict=True):
            if end > start:
                torch.mm(a[start:end], matrix, out=out[start:end])

    return {
        "torch._grouped_mm": _allocating(stream, sets, grouped),
        "a loop of torch.mm": functools.partial(_put, stream, sets, loop),
    }


def _allocating(stream: AbstractContextManager[Any], sets: Sets, function: Callable[..., Any]) -> Put:
    """Return what launches a function that allocates its result, and keeps one for each set of operands."""
    results: list[Any] = [None] * len(sets)

    def put(index: int) -> None:
        with stream:
            a, b, c = sets[index]
            results[index] = function(a, b, c)

    return put


def _tried(ways: Mapping[str, Put], resident: Resident) -> Placed:
    """Return the fastest of the ways that PyTorch supports here. Raises RefusedError with its words for none."""
    supported, reasons = dict[str, Put](), list[str]()
    for name, put in ways.items():
        try:
            put(0)
            supported[name] = put
        except (RuntimeError, ValueError) as error:  # by PyTorch, of a shape or type that it does not take
            reasons.append(f"{name}: {str(error).splitlines()[0]}")
    if not supported:
        raise RefusedError("; ".join(reasons))
    return _quickest(supported, resident)


def _place_full(resident: Resident) -> Placed:
    """torch._scaled_mm that adds up in float32, not in the tensor cores' own sums."""
    if resident.work.dtype not in dtypes.FP8:
        raise RefusedError("only products of float8 have sums of two kinds")
    return _tried(_eight_bit_ways(resident, fast=False), resident)


def _no_calls(resident: Resident) -> Sample:
    raise RefusedError("its calls are timed as those of cublas")


def _by_lt(function: Callable[..., object], a: Any, b: Any, out: Any) -> None:
    """Call `function(a, b, out=out)` with cublasLt as the preferred library."""
    import torch

    preferred = torch.backends.cuda.preferred_blas_library  # a setting of the process
    before = preferred()
    preferred("cublaslt")
    try:
        function(a, b, out=out)
    finally:
        preferred(before)


def _torch_calls(resident: Resident) -> Sample:
    return _host(_on_torch(resident), _torch_function(resident), _tensors(resident)[0], resident)


def _quickest(ways: Mapping[str, Put], resident: Resident) -> Placed:
    placed = [Placed(put, name) for name, put in ways.items()]
    if len(placed) == 1:
        return placed[0]
    samples = [product.sample(resident) for product in placed]
    calls = max(1, round(TRIED_SECONDS * 4e9 / max(samples[0](4, 1), 1)))
    times = [min(sample(calls, 1) for _ in range(TRIES)) for sample in samples]
    return placed[times.index(min(times))]


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


def _on_cupy(resident: Resident) -> tuple[AbstractContextManager[Any], Sets]:
    import cupy

    work, ordinal = resident.work, resident.stream.ordinal
    if work.dtype == "bf16" or work.out != work.dtype or work.precision:
        raise RefusedError("CuPy multiplies only f32, f64 and f16 here, each into its own type, and without TF32")

    def arrays(operands: DeviceOperands) -> tuple[Any, ...]:
        batches = (cupy.asarray(Shared(view)) for view in (operands.a, operands.b, operands.c))
        return tuple(batch[0] if work.batch == 1 else batch for batch in batches)

    with cupy.cuda.Device(ordinal):
        sets = [arrays(operands) for operands in resident.sets]
        return cupy.cuda.ExternalStream(resident.stream.handle, ordinal), sets


def _place_cupy(resident: Resident) -> Placed:
    import cupy

    stream, sets = _on_cupy(resident)
    note = "cupy.matmul, which cannot be captured in a graph: short calls include time of the host"
    return Placed(functools.partial(_put, stream, sets, cupy.matmul), note, captured=False)


def _cupy_calls(resident: Resident) -> Sample:
    import cupy

    stream, sets = _on_cupy(resident)
    return _host(stream, cupy.matmul, sets[0], resident)


RIVALS = (
    Caller("cublas", _without_torch, _runs_torch, _place_torch, _torch_calls),
    Caller("cublas_full", _without_torch, _runs_torch, _place_full, _no_calls),
    Caller("cublas_cupy", functools.partial(not_found, "cupy"), _runs_cupy, _place_cupy, _cupy_calls),
)
