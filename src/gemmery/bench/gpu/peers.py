"""The vendor's library on a GPU, as PyTorch and CuPy call it; the only importer of either beside `bench.peers`.

It runs in this process, on the stream that the rungs run on: they share the device's clocks, and nothing is timed but
what the device does. Products of float32 are true ones unless `precision` allows TF32, and halves are summed in
float32: where a library may do otherwise, that is switched off.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemmery.bench.gpu.operands import Operands, Resident, Shared
from gemmery.bench.gpu.timing import Put, replays
from gemmery.bench.record import version
from gemmery.bench.timing import Sample
from gemmery.errors import ArgumentError, RefusedError

TRIES = 5  # samples by which the quicker of two ways is chosen
TRIED_CALLS = 500


@dataclass(frozen=True)
class Placed:
    """A product that a library can put on a stream; `note` says how it is called."""

    put: Put
    note: str

    def sample(self, resident: Resident) -> Sample:
        """A sampler of it, by replayed graphs."""
        return replays(self.put, resident.stream, len(resident.sets))


@dataclass(frozen=True)
class Peer:
    """One way to the vendor's library."""

    name: str
    about: str
    missing: Callable[[], str]  # "" or why it cannot run here
    place: Callable[[Resident], Placed]  # raises RefusedError for a product it does not serve
    runs: Callable[[], str]  # what it is, with versions


def find(name: str) -> Peer:
    """The rival called `name`; ArgumentError with the known ones otherwise."""
    for peer in PEERS:
        if peer.name == name:
            return peer
    raise ArgumentError(f"rival {name!r} is not known on a GPU; known: {', '.join(peer.name for peer in PEERS)}")


def installed() -> Peer | None:
    """The first way that is there; None when there is none."""
    return next((peer for peer in PEERS if not peer.missing()), None)


def _not_installed(package: str) -> str:
    return "" if importlib.util.find_spec(package) else f"{package} is not installed"


def _without_torch() -> str:
    reason = _not_installed("torch")
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


def _tensor(shared: Shared, ordinal: int) -> Any:
    import torch

    tensor = torch.as_tensor(shared, device=f"cuda:{ordinal}")
    return tensor.view(torch.bfloat16) if shared.view.dtype == "bf16" else tensor


def _place_torch(resident: Resident) -> Placed:
    """torch.mm; of a vector also torch.mv, and then the quicker; bmm of a batch."""
    import torch

    work, ordinal = resident.work, resident.stream.ordinal
    if work.out != work.dtype:
        raise RefusedError(f"PyTorch writes no {work.out} from {work.dtype} into memory that is there")
    stream = torch.cuda.ExternalStream(resident.stream.handle, device=f"cuda:{ordinal}")  # type: ignore[no-untyped-call]
    sets = [tuple(_tensor(Shared(x), ordinal) for x in (one.a, one.b, one.c)) for one in resident.sets]

    def put(function: Callable[..., object], operands: Sequence[Any], index: int) -> None:
        settings = torch.backends.cuda.matmul
        settings.allow_tf32 = work.precision == "tf32"
        settings.allow_fp16_reduced_precision_reduction = settings.allow_bf16_reduced_precision_reduction = False
        with torch.cuda.stream(stream):
            a, b, c = operands[index]
            function(a, b, out=c)

    if work.batch > 1:
        return Placed(functools.partial(put, torch.bmm, sets), "torch.bmm")
    flat = [tuple(x[0] for x in one) for one in sets]
    ways = {"torch.mm": functools.partial(put, torch.mm, flat)}
    if work.m == 1:
        vectors = [(b.T, a[0], c[0]) for a, b, c in flat]
        ways["torch.mv"] = functools.partial(put, torch.mv, vectors)
    elif work.n == 1:
        vectors = [(a, b[:, 0], c[:, 0]) for a, b, c in flat]
        ways["torch.mv"] = functools.partial(put, torch.mv, vectors)
    return _quickest(ways, resident)


def _quickest(ways: Mapping[str, Put], resident: Resident) -> Placed:
    placed = [Placed(put, name) for name, put in ways.items()]
    if len(placed) == 1:
        return placed[0]
    samples = [one.sample(resident) for one in placed]
    times = [min(sample(TRIED_CALLS, 1) for _ in range(TRIES)) for sample in samples]
    return placed[times.index(min(times))]


def _place_cupy(resident: Resident) -> Placed:
    import cupy

    work = resident.work
    if work.dtype == "bf16" or work.out != work.dtype or work.precision:
        raise RefusedError("CuPy multiplies f32, f64 and f16 here, each into its own type, and no TF32")
    stream = cupy.cuda.ExternalStream(resident.stream.handle, resident.stream.ordinal)

    def arrays(one: Operands) -> tuple[Any, ...]:
        made = (cupy.asarray(Shared(x)) for x in (one.a, one.b, one.c))
        return tuple(x[0] if work.batch == 1 else x for x in made)

    with cupy.cuda.Device(resident.stream.ordinal):
        sets = [arrays(one) for one in resident.sets]

    def put(index: int) -> None:
        with stream:
            a, b, c = sets[index]
            cupy.matmul(a, b, out=c)

    return Placed(put, "cupy.matmul")


PEERS = (
    Peer("cublas", "cuBLAS as PyTorch calls it: mm, mv, bmm", _without_torch, _place_torch, _runs_torch),
    Peer(
        "cublas_cupy",
        "cuBLAS as CuPy calls it: matmul",
        functools.partial(_not_installed, "cupy"),
        _place_cupy,
        _runs_cupy,
    ),
)
