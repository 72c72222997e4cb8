"""The rival libraries of the CPU: NumPy, PyTorch and MKL, each as callables in a process of its own.

A process has none of the environment variables that change which kernels a BLAS runs: `OPENBLAS_CORETYPE=Haswell`,
which some shells export, halves NumPy's speed on a CPU with AVX-512. Both ends of its pipe write one JSON object per
line: {"prepare": {work}} -> {"note": ...} or {"refused": ...}; {"sample": [inner, warm]} -> {"ns": ...}. The worker
times its own loop, so that the time of the pipe does not count. It exits at the end of its input, and so with the
process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from gemmery import config, dtypes
from gemmery.cpu import target
from gemmery.errors import GemmeryError, RefusedError, not_installed
from gemmery_lab.measure import expressions
from gemmery_lab.measure.timing import Rival, Sample, by_name, not_found, products
from gemmery_lab.measure.work import Work, operands

try:
    import threadpoolctl
except ModuleNotFoundError as error:
    raise not_installed(error, "timing rival libraries") from error

STEERING = (
    *("OPENBLAS_", "GOTO_", "MKL_", "BLIS_", "OMP_", "KMP_", "GOMP_", "DNNL_", "ONEDNN_", "ATEN_"),
    "NPY_DISABLE_CPU",
)
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


@dataclass(frozen=True)
class RivalProduct:
    """A product ready to be sampled; `note` tells how it differs from the request."""

    sample: Sample
    note: str = ""


@dataclass(frozen=True)
class Library(Rival):
    """A rival on the CPU, with one set of settings; `runs` is read in its own process."""

    prepare: Callable[[Work], RivalProduct]  # raises RefusedError for a product it does not support
    settings: Mapping[str, str] = field(default_factory=dict)
    threads: Callable[[int], None] = lambda _: None  # for a library without an environment variable for it
    first: str = "pass"  # what its process does before anything else


def blas(path: str = "") -> str:
    """Return the BLAS loaded in this process whose file name contains `path`, and the kernels it chose.

    >>> blas()  # doctest: +SKIP
    'openblas 0.3.31, SkylakeX kernels'
    """
    pools = []
    for row in threadpoolctl.threadpool_info():
        if row["user_api"] == "blas" and row["internal_api"] != "gemmery" and path in row["filepath"]:
            kernels = f", {row['architecture']} kernels" if row.get("architecture") else ""
            pools.append(f"{row['internal_api']} {row.get('version') or ''}".strip() + kernels)
    return "; ".join(pools) or "unknown to threadpoolctl"


def distorting() -> dict[str, str]:
    """Return all variables of this environment that a library reads."""
    variables = config.distorting(STEERING)
    variables.pop("KMP_DUPLICATE_LIB_OK", None)  # threadpoolctl sets it in this very process
    return variables


def steering() -> dict[str, str]:
    """Return the variables of this environment that may change which kernels a library runs.

    Those that set a number of threads are not among them.
    """
    return {name: value for name, value in distorting().items() if not name.endswith("_NUM_THREADS")}


def find(name: str) -> Library:
    """Return the rival called `name`. Raises ArgumentError for an unknown one."""
    return by_name(RIVALS, name)


def environment(rival: Library, threads: int) -> dict[str, str]:
    """Return the environment of a rival's process: its own settings and thread count, no other steering variables."""
    return config.child_environment(STEERING, {**dict.fromkeys(THREADS, str(threads)), **rival.settings})


def _runs_numpy() -> str:
    return f"NumPy {np.__version__}, {blas()}"


def _runs_torch() -> str:
    import torch

    return f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, oneDNN"


def _prepare_numpy(work: Work) -> RivalProduct:
    if work.arrays:
        return RivalProduct(expressions.sample(work, "numpy", {"np": np}))
    a, b, c = operands(work)
    function: Callable[..., object] = np.matmul
    note = ""
    if work.out != work.dtype:
        function = functools.partial(np.matmul, dtype=dtypes.get(work.out).numpy)
    elif work.dtype == "bf16" and c is None:
        note = "returns float32"
    return RivalProduct(products(function, a, b, c), note)


def as_tensor(array: Any) -> Any:
    """Return a tensor on the array's memory; bfloat16 is passed as integers."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise RefusedError(f"PyTorch has no {array.dtype.name} tensor: {error}") from None


def _prepare_torch(work: Work) -> RivalProduct:
    import torch

    if work.arrays:
        return RivalProduct(expressions.sample(work, "torch", {"torch": torch}, as_tensor))
    a, b, c = operands(work)
    function: Callable[..., object] = torch.mv if work.vector else torch.bmm if work.batch > 1 else torch.mm
    note = ""
    if work.out != work.dtype:
        if (work.dtype, work.out) == ("int8", "int32") and work.batch == 1 and not work.vector:
            function = torch._int_mm
        elif work.dtype in ("f16", "bf16") and work.out == "f32":
            c = None if c is None else c.astype(a.dtype)
            note = f"returns {a.dtype.name}: PyTorch has no wider result on the CPU"
        else:
            raise RefusedError(f"PyTorch has no product {work.dtype} -> {work.out} on the CPU")
    tensors = [None if x is None else as_tensor(x) for x in (a, b, c)]
    try:
        function(*tensors[:2])
    except RuntimeError as error:
        raise RefusedError(f"PyTorch: {error}") from None
    return RivalProduct(products(function, *tensors), note)


def _set_torch_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


@functools.cache
def _mkl_file() -> str:
    """Return the path of MKL's single library, which its wheel installs into this environment's lib folder."""
    return next((str(path) for path in sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))), "")


def _prepare_mkl(work: Work) -> RivalProduct:
    """`cblas_?gemm` on row-major operands; the call through ctypes costs about 1 us, so small products are refused."""
    plain = work.batch == 1 and not work.vector and work.a_layout == work.b_layout == "row" and work.call == "out"
    if work.dtype not in ("f32", "f64") or work.out != work.dtype or not plain or work.m * work.n * work.k < 64**3:
        raise RefusedError("MKL is only timed for plain f32 and f64 products of at least 64x64x64")
    scalar = ctypes.c_float if work.dtype == "f32" else ctypes.c_double
    gemm = getattr(ctypes.CDLL(_mkl_file()), "cblas_sgemm" if work.dtype == "f32" else "cblas_dgemm")
    pointer, size = ctypes.c_void_p, ctypes.c_int
    gemm.argtypes = [size] * 6 + [scalar, pointer, size, pointer, size, scalar, pointer, size]
    gemm.restype = None
    m, n, k = work.m, work.n, work.k
    row_major, as_is = 101, 111  # CblasRowMajor, CblasNoTrans

    def product(a: Any, b: Any, out: Any) -> None:
        gemm(row_major, as_is, as_is, m, n, k, 1.0, a.ctypes.data, k, b.ctypes.data, n, 0.0, out.ctypes.data, n)

    return RivalProduct(products(product, *operands(work)))


def _runs_mkl() -> str:
    ctypes.CDLL(_mkl_file())
    return blas("libmkl")


RIVALS = (
    Library("numpy", str, _runs_numpy, _prepare_numpy),
    # gemmery takes its number of threads from OMP_NUM_THREADS, as the others do.
    Library(
        "numpy_installed", str, _runs_numpy, _prepare_numpy, first="import gemmery.numpy as g; g.install(wait=True)"
    ),
    Library(
        "numpy_avx512",
        lambda: "" if "avx512f" in target.host().features else "this CPU has no AVX-512",
        _runs_numpy,
        _prepare_numpy,
        {"OPENBLAS_CORETYPE": "SKYLAKEX"},
    ),
    Library("torch", functools.partial(not_found, "torch"), _runs_torch, _prepare_torch, threads=_set_torch_threads),
    Library(
        "mkl",
        lambda: "" if _mkl_file() else "mkl is not installed",
        _runs_mkl,
        _prepare_mkl,
        {"MKL_THREADING_LAYER": "INTEL", "MKL_DYNAMIC": "FALSE"},
    ),
)


# The folders from which the three packages are imported: one if they are installed, three in a checkout.
_SPECS = map(find_spec, ("gemmery", "gemmery_emulator", "gemmery_lab"))
SOURCES = sorted({str(Path(spec.origin).parents[1]) for spec in _SPECS if spec and spec.origin})


class RivalProcess:
    """A rival library in another process, until it is closed.

    >>> with contextlib.closing(RivalProcess(find("numpy"), threads=1)) as rival:
    ...     rival.prepare(Work(64, 64, 64, "f32", "f32"))
    ...     rival.sample(10, 1) > 0
    ''
    True

    Raises RefusedError if the library is not installed or the CPU cannot run it.
    """

    def __init__(self, rival: Library, threads: int) -> None:
        reason = rival.missing()
        if reason:
            raise RefusedError(f"rival {rival.name}: {reason}")
        self.name = rival.name
        self._work: Work | None = None  # the product prepared there
        self._note = ""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        start = f"import sys; sys.path[:0] = {SOURCES!r}; from gemmery_lab.measure.libraries import serve"
        command = [sys.executable, "-c", f"{start}; {rival.first}; serve({rival.name!r}, {threads})"]
        own, pipe = environment(rival, threads), subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, env=own)
        try:
            self.runs = str(self._reply()["runs"])
        except BaseException:
            self.close()
            raise

    def prepare(self, work: Work) -> str:
        """Prepare the operands of `work` there, unless they are ready; return how it differs from the request, or "".

        Raises RefusedError for a product that the library does not support.
        """
        if work != self._work:
            self._work = None
            reply = self._ask({"prepare": asdict(work)})
            if "refused" in reply:
                raise RefusedError(f"rival {self.name}: {reply['refused']}")
            self._work, self._note = work, str(reply["note"])
        return self._note

    def sample(self, inner: int, warm: int) -> int:
        """Return the nanoseconds of `inner` calls there, after `warm` untimed calls."""
        return int(self._ask({"sample": [inner, warm]})["ns"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the process by closing its input; kill it if it still runs a second later."""
        with contextlib.suppress(OSError):
            cast(IO[bytes], self._process.stdin).close()
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        cast(IO[bytes], self._process.stdout).close()
        self._errors.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        stdin = cast(IO[bytes], self._process.stdin)
        with contextlib.suppress(BrokenPipeError):  # `_reply` reports a dead worker
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        line = cast(IO[bytes], self._process.stdout).readline()
        if not line:
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise GemmeryError(f"rival {self.name}: its process ended ({' '.join(last) or 'no message'}); leave it out")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise GemmeryError(f"rival {self.name}: {reply['error']}; leave it out")
        return reply


def serve(name: str, threads: int) -> None:
    """The worker's main loop. What a library prints goes to stderr, because the pipe is for replies only."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one handles Ctrl-C
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    rival = find(name)
    rival.threads(threads)

    def answer(reply: dict[str, Any]) -> None:
        channel.write(json.dumps(reply) + "\n")
        channel.flush()

    answer({"runs": rival.runs})
    prepared: RivalProduct | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if "prepare" in message:
                prepared = None  # frees the operands before the next are allocated
                prepared = rival.prepare(Work(**message["prepare"]))
                answer({"note": prepared.note})
            elif prepared is None:
                answer({"error": "sample before prepare"})
            else:
                answer({"ns": prepared.sample(*message["sample"])})
        except RefusedError as error:
            answer({"refused": str(error)})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
