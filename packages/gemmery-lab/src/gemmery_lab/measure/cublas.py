"""The vendor's library on a GPU, as PyTorch and CuPy call it; beside `bench.torch_operands`.

It runs in this process, on the stream of the rungs: both see the same clocks, and only the device's work is timed.
float32 products are computed in float32 unless `precision` allows TF32, and half-precision products are summed in
float32: settings of a library that allow less are switched off.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from gemmery import dtypes
from gemmery.errors import RefusedError
from gemmery.limits.device_limits import Put, replays
from gemmery_lab.measure import torch_operands
from gemmery_lab.measure.record import version
from gemmery_lab.measure.timing import Rival, Sample, by_name, not_found
from gemmery_lab.measure.torch_operands import Resident, Sets, put_by, tensor, tensors

EIGHT_BITS = ("int8", *dtypes.TENSOR_FLOAT8)
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


def _runs_torch() -> str:
    import torch

    cublas = version("nvidia-cublas") or version("nvidia-cublas-cu12")
    return f"cuBLAS {cublas or f'of CUDA {torch.version.cuda}'} by PyTorch {torch.__version__}"


def _runs_cupy() -> str:
    import cupy

    number = cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle())
    return f"cuBLAS {number // 10000}.{number // 100 % 100} by CuPy {cupy.__version__}"


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
        return _tried(grouped_ways(resident), resident)
    if work.dtype in EIGHT_BITS:
        ways = _eight_bit_ways(resident, fast=True)
        also = _eight_bit_ways(resident, fast=False) if work.scales == "blocks" else {}
        return _tried({**ways, **also}, resident)
    function = _torch_function(resident)
    stream, sets = torch_operands.on_torch(resident), tensors(resident)
    name, by_lt = f"torch.{function.__name__}", functools.partial(_by_lt, function)
    ways = {name: put_by(stream, sets, function), f"{name} by cublasLt": put_by(stream, sets, by_lt)}
    if work.batch == 1 and sets[0][0].element_size() <= LARGEST_BIASED:
        bias = torch.zeros(work.n, dtype=sets[0][2].dtype, device=sets[0][2].device)
        ways["torch.addmm"] = put_by(stream, sets, functools.partial(torch.addmm, bias))
    if work.batch == 1 and 1 in (work.m, work.n):
        rows = [(b.T, a[0], c[0]) if work.m == 1 else (a, b[:, 0], c[:, 0]) for a, b, c in sets]
        ways["torch.mv"] = put_by(stream, rows, torch.mv)
    return _quickest(ways, resident)


def _eight_bit_ways(resident: Resident, fast: bool) -> dict[str, Put]:
    """torch._int_mm, or torch._scaled_mm with factors of one each or those of the work; sums are `fast` or kept in
    float32.
    """
    import torch

    work, stream, sets = resident.work, torch_operands.on_torch(resident), tensors(resident)
    if work.dtype == "int8":
        if work.out != "int32" or work.scales:
            raise RefusedError("torch._int_mm multiplies int8 into int32, without factors")
        return {"torch._int_mm": put_by(stream, sets, torch._int_mm)}
    factors = [torch.ones((), device=sets[0][0].device)] * 2
    a_factor, b_factor = map(tensor, resident.scales) if work.scales else factors

    def scaled(a: Any, b: Any, out: Any) -> None:
        torch._scaled_mm(a, b, a_factor, b_factor, out_dtype=out.dtype, use_fast_accum=fast, out=out)

    ways = {f"torch._scaled_mm, use_fast_accum={fast}": put_by(stream, sets, scaled)}
    by_recipes = getattr(torch.nn.functional, "scaled_mm", None)
    if work.scales == "blocks" and by_recipes is not None:
        kinds = torch.nn.functional.ScalingType
        recipes = a_factor, kinds.BlockWise1x128, b_factor, kinds.BlockWise128x128

        def blocks(a: Any, b: Any, out: Any) -> Any:
            return by_recipes(a, b, *recipes, output_dtype=out.dtype, use_fast_accum=fast)

        ways[f"torch.nn.functional.scaled_mm, use_fast_accum={fast}"] = put_by(stream, sets, blocks)
    return ways


def grouped_ways(resident: Resident) -> dict[str, Put]:
    """torch._grouped_mm, which allocates its result, and a loop of torch.mm that knows the groups' sizes."""
    import torch

    if resident.work.dtype in EIGHT_BITS or resident.offsets is None:
        raise RefusedError("torch._grouped_mm is timed with bf16 and f16 alone")
    stream, sets, ends = torch_operands.on_torch(resident), tensors(resident), tensor(resident.offsets)
    bounds = [0, *ends.tolist()]

    def grouped(a: Any, b: Any, out: Any) -> Any:
        return torch._grouped_mm(a, b, offs=ends)

    def loop(a: Any, b: Any, out: Any) -> None:
        for matrix, (start, end) in zip(b, itertools.pairwise(bounds), strict=True):
            if end > start:
                torch.mm(a[start:end], matrix, out=out[start:end])

    return {"torch._grouped_mm": put_by(stream, sets, grouped), "a loop of torch.mm": put_by(stream, sets, loop)}


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
    if resident.work.dtype not in dtypes.TENSOR_FLOAT8:
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
    stream = torch_operands.on_torch(resident)
    return torch_operands.host_time(stream, tensors(resident), _torch_function(resident), resident)


def _quickest(ways: Mapping[str, Put], resident: Resident) -> Placed:
    placed = [Placed(put, name) for name, put in ways.items()]
    if len(placed) == 1:
        return placed[0]
    samples = [product.sample(resident) for product in placed]
    calls = max(1, round(TRIED_SECONDS * 4e9 / max(samples[0](4, 1), 1)))
    times = [min(sample(calls, 1) for _ in range(TRIES)) for sample in samples]
    return placed[times.index(min(times))]


def _on_cupy(resident: Resident) -> tuple[AbstractContextManager[Any], Sets]:
    import cupy

    work, ordinal = resident.work, resident.stream.ordinal
    if work.dtype == "bf16" or work.out != work.dtype or work.precision:
        raise RefusedError("CuPy multiplies only f32, f64 and f16 here, each into its own type, and without TF32")

    def arrays(operands: torch_operands.DeviceOperands) -> tuple[Any, ...]:
        batches = (cupy.asarray(torch_operands.Shared(view)) for view in (operands.a, operands.b, operands.c))
        return tuple(batch[0] if work.batch == 1 else batch for batch in batches)

    with cupy.cuda.Device(ordinal):
        sets = [arrays(operands) for operands in resident.sets]
        return cupy.cuda.ExternalStream(resident.stream.handle, ordinal), sets


def _place_cupy(resident: Resident) -> Placed:
    import cupy

    note = "cupy.matmul, which cannot be captured in a graph: short calls include time of the host"
    return Placed(put_by(*_on_cupy(resident), cupy.matmul), note, captured=False)


def _cupy_calls(resident: Resident) -> Sample:
    import cupy

    return torch_operands.host_time(*_on_cupy(resident), cupy.matmul, resident)


RIVALS = (
    Caller("cublas", torch_operands.without_torch, _runs_torch, _place_torch, _torch_calls),
    Caller("cublas_full", torch_operands.without_torch, _runs_torch, _place_full, _no_calls),
    Caller("cublas_cupy", functools.partial(not_found, "cupy"), _runs_cupy, _place_cupy, _cupy_calls),
)
