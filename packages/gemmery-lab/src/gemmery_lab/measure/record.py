"""One measurement, the machine it was taken on, JSON lines of them, and the progress of a command that takes them.

A file has two kinds of lines: `{"run": ..., "machine": {...}}` once per run, and
`{"run": ..., "measurement": {...}}` for each measurement as it is taken. One system call writes each line, so a killed
run keeps its measurements; a line torn by a crash is skipped, and the next append begins a new line.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from gemmery import config, display
from gemmery.errors import ArgumentError

R = TypeVar("R")


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that measurements depend on; the defaults mean no GPU."""

    name: str = ""  # "NVIDIA H200"
    capability: int = 0  # 90 for sm_90
    sms: int = 0
    l2: int = 0  # bytes
    clock_mhz: int = 0  # the highest clock of its multiprocessors
    power_w: float = 0.0  # the current limit; 0 if unknown
    driver: str = ""
    cuda: str = ""  # the version that the driver supports
    nvrtc: str = ""


@dataclass(frozen=True)
class MachineRecord:
    """The properties of a machine that measurements depend on."""

    name: str  # short, file-name safe, e.g. "amd-zen4-avx512-2c"
    cpu: str
    isa: str
    cores: int
    l1d: int  # bytes, per core; 0 if unknown
    l2: int
    l3: int
    os: str
    python: str
    numpy: str
    llvmlite: str
    blas: str  # the library and kernels of the rival NumPy
    gemmery: str
    gpu: Gpu = Gpu()


@dataclass(frozen=True)
class Measurement:
    """One kernel or rival on one problem. Times are in seconds per call."""

    suite: str  # "ladder", "square_f32", "sweep_block", ...
    kernel: str  # rung or rival: "packed", "numpy", "torch", "gm.matmul"
    m: int
    n: int
    k: int
    dtype: str
    out: str
    batch: int
    threads: int
    seconds: float  # median
    best: float
    p95: float
    samples: int
    flops: int
    bytes: int
    case: str = ""  # how it differs from others of its suite: "allocating", "a transposed", "cold", ...
    config: dict[str, int] = field(default_factory=dict)
    peak_gflops: float = 0.0  # measured in the same run, for the same dtype and threads
    bandwidth_gbs: float = 0.0
    versus: dict[str, float] = field(default_factory=dict)  # rival -> median of pairwise ratios (rival / this)
    spread: dict[str, float] = field(default_factory=dict)  # rival -> half the interquartile range of those ratios
    error: float = 0.0  # largest |C - ref| / bound; 0 if not checked
    checked: bool = False
    refused: str = ""  # the reason why it did not run; the times are then 0
    note: str = ""
    precision: str = ""  # "tf32" where products of f32 may keep 10 bits of fraction
    unit: str = ""  # the unit of a GPU that `peak_gflops` is of: "CUDA cores", "mma.sync"
    copy_gbs: float = 0.0  # of a GPU's memory, bytes read plus bytes written; bandwidth_gbs is that of reads
    clock_mhz: int = 0  # median clock of a GPU's multiprocessors during timing; 0 if unknown
    power_w: float = 0.0  # mean power of a GPU during timing; 0 if it was not measured
    load: float = 0.0  # cores used by other processes meanwhile; 0 if not measured

    @property
    def gflops(self) -> float:
        """10**9 operations per second at the median time."""
        return self.flops / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def joules(self) -> float:
        """The energy of a call at the median time; 0 if the power was not measured."""
        return self.power_w * self.seconds


@dataclass(frozen=True)
class Run:
    """Measurements taken by one command on one machine."""

    machine: MachineRecord
    started: str  # UTC, ISO 8601 with microseconds: the ID of the run
    measurements: tuple[Measurement, ...]

    def _repr_html_(self) -> str:
        """The measurements as a table, which a notebook displays."""
        head = ("kernel", "m × n × k", "types", "threads", "time, µs", "GFLOP/s", "error/bound")
        rows = list[tuple[str, ...]]()
        for m in self.measurements:
            shape = f"{m.m} × {m.n} × {m.k}" + (f", {m.batch} times" if m.batch > 1 else "")
            types = m.precision or (m.dtype if m.dtype == m.out else f"{m.dtype} → {m.out}")
            figures = f"{m.seconds * 1e6:,.4g}", f"{m.gflops:,.4g}", f"{m.error:.2g}" if m.checked else ""
            reached = (f"not run: {m.refused}", "", "") if m.refused else figures
            rows.append((m.kernel, shape, types, str(m.threads or ""), *reached))
        return display.table(rows, head)


@dataclass(frozen=True)
class RunEvent:
    """One step of a command.

    `what` names the step ("packed, 1024x1024x1024 f32"). When a step has ended, `measurement` is its result and
    `run` all results so far. `done` of `total` steps have ended, including this one.
    """

    what: str
    done: int
    total: int
    measurement: Measurement | None = None
    run: Run | None = None


OnEvent = Callable[[RunEvent], None]
OnStep = Callable[[str, int, int, R | None], None]  # what runs, finished and all steps, the record of a finished one


def ignore(*_: object) -> None:
    """A listener that ignores progress."""


class RunSteps(Generic[R]):
    """The records of a run so far, of which `on_step` hears."""

    def __init__(self, total: int, on_step: OnStep[R]) -> None:
        self._what, self._done, self._total, self._on_step = "", 0, total, on_step
        self.records: list[R] = []

    def begin(self, what: str) -> None:
        """Tell the listener what begins."""
        self._what = what
        self._on_step(what, self._done, self._total, None)

    def end(self, *records: R) -> None:
        """End a step and record its results."""
        self._done += 1
        self.add(*records)

    def add(self, *records: R) -> None:
        """Record results, and tell the listener of each."""
        self.records += records
        for record in records:
            self._on_step(self._what, self._done, self._total, record)


@cache
def cpu_machine() -> MachineRecord:
    """Return the fingerprint of this machine, which every record is stored with."""
    from gemmery.cpu import llvm, target  # these load what reading records does not need
    from gemmery_lab.measure import libraries

    host, cores, blas = target.host(), target.cores(), libraries.blas()
    if libraries.steering():  # that of the rival NumPy, which ignores variables that choose other kernels
        with closing(libraries.RivalProcess(libraries.find("numpy"), threads=1)) as numpy:
            blas = numpy.runs.partition(", ")[2]
    model, without = llvm.host_cpu().replace("znver", "amd-zen"), "-without-amx" * host.hides_tiles
    return MachineRecord(
        name=_file_safe(f"{model}-{host.isa}{without}-{cores}c"),
        cpu=host.cpu,
        isa=host.isa,
        cores=cores,
        l1d=host.l1d,
        l2=host.l2,
        l3=host.l3,
        os=f"{platform.system()} {platform.release().partition('-')[0]}",
        python=platform.python_version(),
        numpy=version("numpy"),
        llvmlite=version("llvmlite"),
        blas=blas,
        gemmery=version("gemmery"),
    )


def gpu_machine(ordinal: int = 0) -> MachineRecord:
    """Return the fingerprint of this machine for runs on its GPU, named after the GPU: "nvidia-h200".

    Raises DeviceError if there is no such device.
    """
    from gemmery.cuda import driver, nvml, nvrtc

    device, monitor = driver.device(ordinal), nvml.Monitor(ordinal)
    described = Gpu(
        name=device.name,
        capability=device.capability,
        sms=device.sms,
        l2=device.l2,
        clock_mhz=monitor.most_clock or round(device.clock * 1e3),
        power_w=monitor.power_limit,
        driver=nvml.driver_version(),
        cuda=driver.version(),
        nvrtc=nvrtc.version(),
    )
    return replace(cpu_machine(), name=_file_safe(described.name), gpu=described)


def _file_safe(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def now() -> str:
    """Return the current time in the format of `Run.started`."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def version(package: str) -> str:
    """Return the installed version of a package, "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def path(folder: Path, name: str) -> Path:
    """Return the file of records of the machine called `name`."""
    return folder / f"{name}.jsonl"


def results_folder() -> Path:
    """Return the folder of records in the user's data folder."""
    return Path(config.data_dir()) / "results"


def append(file: Path, run: Run) -> None:
    """Append the measurements of `run` to a file, and its machine if the file does not have this run yet.

    Raises ValueError for a NaN or infinite number: none is ever stored.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for m in run.measurements:
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(m)}
        differing = {name: value for name, value in vars(m).items() if value != defaults[name]}  # most do not
        lines.append(json.dumps({"run": run.started, "measurement": differing}, allow_nan=False))
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(handle).st_size
        known = os.pread(handle, size, 0)
        if json.dumps({"run": run.started})[:-1].encode() + b', "machine"' not in known:
            lines.insert(0, json.dumps({"run": run.started, "machine": asdict(run.machine)}))
        torn = known and not known.endswith(b"\n")
        os.write(handle, ("\n" * bool(torn) + "".join(line + "\n" for line in lines)).encode())
    finally:
        os.close(handle)


def read(file: Path) -> tuple[Run, ...]:
    """Return the runs of a file in the order of their start; torn lines and runs without a machine are skipped.

    Raises ArgumentError for a file that cannot be read, or for a complete line that is not a record.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ArgumentError(f"records {str(file)!r}: {error.strerror}; name a file of records") from error
    machines: dict[str, MachineRecord] = {}
    measurements: dict[str, list[Measurement]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        try:
            if not isinstance(row["run"], str):
                raise TypeError(f"run {row['run']!r} is not text")
            if "machine" in row:
                machines[row["run"]] = _build(MachineRecord, row["machine"])
            else:
                values = {**row["measurement"]}
                values |= {key: _RENAMED.get(values[key], values[key]) for key in ("dtype", "out") if key in values}
                measurements.setdefault(row["run"], []).append(_build(Measurement, values))
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"{file}:{number}: not a record ({error!r}); remove the line") from error
    return tuple(Run(machine, run, tuple(measurements.get(run, ()))) for run, machine in sorted(machines.items()))


# Records of version 0.1.0 name integers by their bits.
_RENAMED = {f"{kind[0]}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_PYTHON: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int), "bool": (bool,)}


def _build(kind: type[Any], row: dict[str, Any]) -> Any:
    """Make a record of `kind`, ignoring keys of later versions."""
    if not isinstance(row, dict):
        raise TypeError(f"{row!r} is not a {kind.__name__.lower()}")
    types = _types(kind)  # type: ignore[arg-type]  # mypy takes no class of Any for Hashable
    values = {key: value for key, value in row.items() if key in types}
    if "gpu" in values:
        values["gpu"] = _build(Gpu, values["gpu"])
    for name, value in values.items():
        if not isinstance(value, _PYTHON.get(types[name], object)):
            raise TypeError(f"{name} = {value!r} is not {types[name]}")
    return kind(**values)


@cache
def _types(kind: type[Any]) -> dict[str, str]:
    return {f.name: str(f.type) for f in fields(kind)}
