"""One measurement, the machine it was taken on, and JSON lines of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Machine:
    """What a figure depends on besides the code."""

    name: str  # short, file-name safe, e.g. "amd-epyc-zen4-avx512-2c"
    cpu: str
    isa: str
    cores: int
    l1d: int  # bytes, per core; 0 when unknown
    l2: int
    l3: int
    os: str
    python: str
    numpy: str
    llvmlite: str
    blas: str  # what NumPy says it runs
    gemmery: str


@dataclass(frozen=True)
class Measurement:
    """One kernel or rival on one problem. Times are seconds a call."""

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
    config: dict[str, int] = field(default_factory=dict)
    peak_gflops: float = 0.0  # measured in the same run, for the same dtype and threads
    bandwidth_gbs: float = 0.0
    versus: dict[str, float] = field(default_factory=dict)  # rival -> median of pairwise ratios (rival / this)
    spread: dict[str, float] = field(default_factory=dict)  # rival -> half the interquartile range of those ratios
    error: float = 0.0  # largest |C - ref| / bound; 0 when not checked
    checked: bool = False
    refused: str = ""  # why it did not run; then the times are 0
    note: str = ""

    @property
    def gflops(self) -> float:
        """10**9 operations a second at the median."""
        return self.flops / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True)
class Run:
    """Measurements taken by one command on one machine."""

    machine: Machine
    started: str  # UTC, ISO 8601 with microseconds: it names the run
    measurements: tuple[Measurement, ...]
