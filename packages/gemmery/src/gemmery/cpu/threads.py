"""The number of threads that a product may use."""

from __future__ import annotations

import importlib.util
import operator
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec
from typing import Any

from gemmery import config
from gemmery.cpu.layout import WORKERS
from gemmery.cpu.target import cores
from gemmery.errors import ArgumentError, brief

_override: int | None = None
generation = 0  # incremented by `set_`: a product keeps its plan only if this has not changed meanwhile
at_change: list[Callable[[], None]] = []  # called when the number changes, to drop plans made for the old one


def get() -> int:
    """Return the current number: set by `set_`, else by a variable, else the cores this process may use.

    GEMMERY_NUM_THREADS comes first. OMP_NUM_THREADS, which joblib and Dask set in their workers, SLURM_CPUS_PER_TASK
    and the number of an MPI job's processes on this host can only lower the number of cores.
    """
    return _override or _allowed()


@cache
def _allowed() -> int:
    """Return the default, read once: reading affinity mask and cgroup takes 10 us, a small product 1 us."""
    _announce()
    number = config.num_threads() or config.threads_of_others(cores())
    if number > most():
        raise ArgumentError(
            f"GEMMERY_NUM_THREADS={brief(number)}: it must be at most {most()}; unset it to use every core"
        )
    return number


@cache
def most() -> int:
    """Return the largest number of threads that a caller may ask for, read once: it takes 8 us."""
    return max(WORKERS + 1, cores())


def checked(count: Any) -> int:
    """Return a number of threads that a caller passed as an int; raise ArgumentError for anything else."""
    try:
        number = None if isinstance(count, bool) else operator.index(count)
    except Exception:  # TypeError, or what an object's own __index__ raises
        number = None
    limit = most()
    if number is None or not 1 <= number <= limit:
        raise ArgumentError(
            f"threads={brief(count)} must be an integer from 1 to {limit}, or None for every core allowed"
        )
    return number


def set_(count: Any) -> None:
    """Use `count` threads from now on; None restores the default. Raises ArgumentError below 1."""
    global _override, generation
    _announce()
    number = None if count is None else checked(count)
    if number == _override:  # plans stay
        return
    _override = number
    generation += 1
    for forget in at_change:
        forget()


class _Watch:
    """A finder that registers gemmery's controller when somebody imports threadpoolctl, and then leaves."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "threadpoolctl":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@cache
def _announce() -> None:
    """Let threadpoolctl know of gemmery: now if it has been imported, else when it is."""
    module = sys.modules.get("threadpoolctl")
    if module is None:
        sys.meta_path.insert(0, _Watch())
    else:
        _register(module)


def _register(module: Any) -> None:
    """Register a controller among those of BLAS libraries.

    threadpoolctl knows libraries by their files, and gemmery's kernels have none: the file of NumPy's core stands for
    them, since no process multiplies without it.
    """
    if not hasattr(module, "register"):  # a version before 3.2, or another thread is importing it
        return

    def limit(_self: Any, count: int) -> None:
        set_(min(count, most()))

    members = {
        "user_api": "blas",
        "internal_api": "gemmery",
        "filename_prefixes": ("_multiarray_umath",),
        "get_num_threads": lambda _self: get(),
        "set_num_threads": limit,
        "get_version": lambda _self: sys.modules["gemmery"].__version__,
    }
    module.register(type("GemmeryController", (module.LibController,), members))
