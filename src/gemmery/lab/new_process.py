"""A script in a new process, whose cache folder and number of threads are given, and no variable of the shell's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gemmery import config
from gemmery.bench import libraries
from gemmery.errors import GemmeryError

SOURCES = str(Path(__file__).parents[2])  # the folder from which `gemmery` is imported
# An installed package has byte code on disk: without it, compiling gemmery's Python code would take 50 ms.
_CLEARED = (*libraries.STEERING, "GEMMERY_", "PYTHONDONTWRITEBYTECODE")


def run(script: str, what: str, cache: str, threads: int) -> Any:
    """Return what a script prints last, as JSON; 0 threads leaves the number to the libraries.

    Raises GemmeryError with the last line of the process if `what` it does fails.
    """
    count = {name: str(threads) for name in (*libraries.THREADS, "GEMMERY_NUM_THREADS") if threads}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=config.child_environment(_CLEARED, {**count, "GEMMERY_CACHE_DIR": cache}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise GemmeryError(f"{what} failed in a new process: {last[0]}")
    return json.loads(done.stdout.splitlines()[-1])
