"""The first product of a new process, after importing NumPy: with and without kernels cached on disk."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gemmery import config, dtypes
from gemmery.bench import peers, timing
from gemmery.bench.peer_worker import PeerProcess
from gemmery.bench.record import Measurement
from gemmery.bench.work import Work
from gemmery.errors import GemmeryError
from gemmery.lab import results
from gemmery.lab.session import CpuSession

COLD, WARM = "gm.matmul, cold cache", "gm.matmul, warm cache"
ROUNDS = 9
_SOURCES = str(Path(__file__).parents[2])
_SCRIPT = """
import sys, time, numpy as np
sys.path.insert(0, {sources!r})
a, b = np.ones(({m}, {k}), np.{dtype}), np.ones(({k}, {n}), np.{dtype})
start = time.perf_counter_ns()
{product}
print(time.perf_counter_ns() - start)
"""
# An installed package has byte code on disk: without it, compiling gemmery's Python code would take 50 ms.
_CLEARED = (*peers.STEERING, "GEMMERY_", "PYTHONDONTWRITEBYTECODE")
_OURS, _NUMPY = "import gemmery; gemmery.matmul(a, b)", "np.matmul(a, b)"


def first_call(
    session: CpuSession, name: str, work: Work, threads: int, rivals: Sequence[PeerProcess], seconds: float
) -> list[Measurement]:
    """Time a first product with a cold cache, a warm cache, and in NumPy if that is among the rivals.

    Each time is that of `import gemmery` and one product in a new process. There are fewer rounds if they take longer
    than `seconds`.
    """
    limits = session.limits(work.dtype, threads)
    taken: dict[str, dict[int, float]] = {WARM: {}, COLD: {}}
    with_numpy = "numpy" in [rival.name for rival in rivals]
    if with_numpy:
        taken["numpy"] = {}
    with tempfile.TemporaryDirectory() as warm:
        run(_OURS, work, threads, warm)
        spent = 0.0
        for index in range(ROUNDS):
            taken[WARM][index] = run(_OURS, work, threads, warm)
            with tempfile.TemporaryDirectory() as cold:
                taken[COLD][index] = run(_OURS, work, threads, cold)
            if with_numpy:
                taken["numpy"][index] = run(_NUMPY, work, threads, warm)
            spent += sum(rounds[index] for rounds in taken.values())
            if spent > seconds:
                break
    found = timing.tally(taken)
    return [
        results.timed(
            results.blank(name, kernel, work, threads),
            found.timings[kernel],
            limits,
            found.versus if kernel == WARM else None,
        )
        for kernel in taken
    ]


def run(product: str, work: Work, threads: int, cache: str) -> float:
    """Return the seconds of `product` in a new process with the cache folder `cache`.

    Raises GemmeryError with the last line of the process if it fails.
    """
    script = _SCRIPT.format(
        sources=_SOURCES, m=work.m, n=work.n, k=work.k, dtype=dtypes.get(work.dtype).numpy, product=product
    )
    environment = config.child_environment(
        _CLEARED,
        {
            **dict.fromkeys(peers.THREADS, str(threads)),
            "GEMMERY_NUM_THREADS": str(threads),
            "GEMMERY_CACHE_DIR": cache,
        },
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise GemmeryError(f"a first product failed in its process: {last[0]}")
    return int(done.stdout) / 1e9
