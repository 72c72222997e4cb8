"""Records in words, the same wherever one is shown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gemmery import experiments
from gemmery.bench.record import MachineRecord, Measurement, Run

RIVALS = {
    "numpy": "NumPy",
    "numpy_avx512": "NumPy AVX-512",
    "torch": "PyTorch",
    "mkl": "MKL",
    "blis": "BLIS",
    "gm.matmul on one thread": "one thread",
    "cublas": "cuBLAS",
    "cublas_full": "cuBLAS, float32 sums",
    "cublas_cupy": "cuBLAS through CuPy",
}


UNITS = {
    "f32": "CUDA cores, f32",
    "f64": "CUDA cores, f64",
    "tensor": "tensor cores, half precision",
    "tensor_tf32": "tensor cores, tf32",
    "tensor_f64": "tensor cores, f64",
    "tensor_8": "tensor cores, 8 bits",
}  # the units of a GPU that multiply: fields of device.Rates

IN_PARTS = ("split_", "ozaki_")  # rungs that multiply parts of elements: the peak in a record is of another unit


def share(measurement: Measurement) -> float | None:
    """Return the fraction of the measured peak that was reached; None if no peak of its unit was measured."""
    if not measurement.peak_gflops or not measurement.seconds or measurement.kernel.startswith(IN_PARTS):
        return None
    part = measurement.gflops / measurement.peak_gflops
    return part if part < 1.1 else None  # wgmma's beside the peak of mma.sync


def passed(measurement: Measurement) -> bool:
    """Return True unless a check found an element outside its bound (NaN is outside)."""
    return not measurement.checked or measurement.error <= 1


def rate(measurement: Measurement) -> str:
    """Return the unit of its rate: GFLOP/s, Gop/s for integers, TFLOP/s on a GPU."""
    return "Gop/s" if measurement.dtype[0] in "iu" else "TFLOP/s" if measurement.unit else "GFLOP/s"


def reached(measurement: Measurement, gflops: float | None = None) -> float:
    """Return its rate, or `gflops`, in the unit of `rate`."""
    value = measurement.gflops if gflops is None else gflops
    return value / 1e3 if measurement.unit else value


def tick(measurement: Measurement) -> tuple[str, float]:
    """Return the unit for times of one product and its number per second: ms, or µs on a GPU."""
    return ("µs", 1e6) if measurement.unit else ("ms", 1e3)


def kernel(name: str) -> str:
    """Return the common name of a rival, or the name of a rung."""
    return RIVALS.get(name) or name.removeprefix("gm.matmul, ")


def versioned(name: str, records: Sequence[Measurement]) -> str:
    """Return the common name of a rival with the version of cuBLAS that its records name: "cuBLAS 13.1"."""
    note = next((m.note for m in records if m.kernel == name and m.note), "")
    version = re.match(r"cuBLAS \d+\.\d+", note)
    return kernel(name).replace("cuBLAS", version[0]) if version else kernel(name)


def between(values: Sequence[int]) -> str:
    """Return one number or a range: "1980", "1755 to 1980"."""
    return str(values[0]) if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def cores(count: int) -> str:
    """Return `1 thread` or `2 threads`."""
    return f"{count} thread{'s' if count != 1 else ''}"


def place(measurement: Measurement) -> str:
    """Return where it ran: "2 threads", or the unit of a GPU."""
    return measurement.unit or cores(measurement.threads)


def types(measurement: Measurement) -> str:
    """Return the element types: "f32", "tf32", or "int8 → int32" if the result is wider."""
    if measurement.precision:
        return measurement.precision
    return measurement.dtype if measurement.dtype == measurement.out else f"{measurement.dtype} → {measurement.out}"


def shape(measurement: Measurement) -> str:
    """Return the problem without its element types: "n = 1024", "8 × 1024 × 1024", "10,000 of 3 × 3 × 3"."""
    m, n, k = measurement.m, measurement.n, measurement.k
    if measurement.batch > 1:
        return f"{measurement.batch:,} of {m} × {n} × {k}"
    return f"n = {n}" if m == n == k else f"{m} × {n} × {k}"


def caches(machine: MachineRecord) -> tuple[tuple[str, int], ...]:
    """Return the caches of known size, the nearest first; for a run on a GPU, those of the GPU."""
    if machine.gpu.name:
        return (("L2", machine.gpu.l2),)
    return tuple((name, size) for name, size in (("L1d", machine.l1d), ("L2", machine.l2), ("L3", machine.l3)) if size)


def title(run: Run) -> str:
    """Return the title of a run."""
    titles = {experiments.of(measurement).title for measurement in run.measurements}
    return titles.pop() if len(titles) == 1 else experiments.COMPARED


def processor(machine: MachineRecord) -> tuple[str, str]:
    """Return the CPU and its instruction set, or the GPU and its architecture."""
    gpu = machine.gpu
    return (gpu.name, f"sm_{gpu.capability}") if gpu.name else (machine.cpu, machine.isa)


def when(run: Run) -> str:
    """Return the start of a run to the minute, in UTC."""
    return run.started[:16].replace("T", " ") + " UTC"
