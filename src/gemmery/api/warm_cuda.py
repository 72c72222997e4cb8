"""The kernels of a GPU that `warm` makes; the GPU need not be present."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product

from gemmery import dtypes as known
from gemmery.api.options import ACTIVATIONS
from gemmery.api.promote import can_cast
from gemmery.cuda import driver, nvrtc
from gemmery.cuda.geometry import Geometry
from gemmery.dispatch import choice
from gemmery.dispatch.cuda import copies_tensors, general
from gemmery.errors import CompileError, DeviceError, RefusedError
from gemmery.problem import Problem

_TYPES = ("f16", "bf16", "f32", "f64")
_OUT = {"e4m3": "bf16", "e5m2": "bf16", "int8": "int32"}  # the usual results of types that only some devices multiply
_SIDES = (64, 256, 1024, 4096)  # of aligned products whose specialised kernels are made
_MANY_SIDES = (*_SIDES, 1000, 5000)  # of those whose kernels serve many shapes; rows of the last two cross lines of L2
_EIGHTHS = (3000, 3000, 3000)  # whose tiles have every eighth row
_LAYOUTS = ("row", "col")
_ALIGNMENTS = (16, 2)  # bytes: operands that tensor maps describe, and such that are packed first


def types(name: str) -> tuple[str, ...]:
    """Return the element types of products on a GPU; the usual ones for a GPU that is not known."""
    try:
        return (*_TYPES, *_OUT) if copies_tensors(name) else _TYPES
    except DeviceError:
        return _TYPES


def images(
    names: tuple[str, ...], name: str, apart: bool = False
) -> Iterator[tuple[str, Callable[[], int], Callable[[], object]]]:
    """Yield the name, the size on disk and the maker of every kernel, once. Raises DeviceError for an unknown GPU.

    With `apart` each is compiled in a process of its own, because NVRTC compiles one kernel at a time in a process:
    8 kernels take 7.9 s with one thread and 8.2 s with two.
    """
    try:
        card = driver.find(name)
    except DeviceError as error:
        if "known" in str(error):
            raise
        raise DeviceError(f"{error}; name a card instead, such as h200: it need not be present") from None
    nvrtc.bindings()
    make = _in_a_process if apart else nvrtc.code
    yielded = set()
    numbers = tuple(dtype for dtype in names if dtype not in _OUT)
    for geometry in chain(_general(numbers, name), _specialised(numbers, name), _shared(names, name)):
        key = geometry.source, geometry.kernel, card.arch
        if key not in yielded:
            yielded.add(key)
            yield geometry.kernel, partial(nvrtc.stored, *key), partial(make, *key)


_COMPILE = "import sys; from gemmery.cuda import nvrtc; nvrtc.code(*sys.argv[1:])"


def _in_a_process(source: str, kernel: str, arch: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, source, kernel, arch], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CompileError(f"kernel {kernel} of {source} did not compile for {arch}: {done.stderr[-2000:].strip()}")


def _general(names: tuple[str, ...], name: str) -> Iterator[Geometry]:
    """Yield the launches of every general kernel: one for each result, activation and tile."""
    for dtype, out, activation in product(names, known.NAMES, ("", *ACTIVATIONS)):
        problem = Problem(64, 64, 64, dtype, out, epilogue=activation, device=name)
        candidate = general(problem) if can_cast(dtype, out, "safe") else None
        if candidate is None or candidate.rung.geometry is None:
            continue
        for tile in candidate.rung.space["tile"]:
            with contextlib.suppress(RefusedError):
                yield candidate.rung.geometry(problem, {**candidate.config, "tile": tile})


def _specialised(names: tuple[str, ...], name: str) -> Iterator[Geometry]:
    """Yield the launches of products of aligned matrices, row-major or transposed, and of matrices and vectors."""
    for dtype, a, b in product(names, _LAYOUTS, _LAYOUTS):
        square = Problem(1, 1, 1, dtype, dtype, a_layout=a, b_layout=b, device=name)
        squares = [square._replace(m=side, n=side, k=side) for side in _SIDES]
        column, row = square._replace(m=1024, k=1024, b_layout="row"), square._replace(n=1024, k=1024, a_layout="row")
        for problem in (*squares, column, row):
            rung, config, _ = choice(problem)
            assert rung.geometry is not None
            launch = rung.geometry(problem, config)
            yield from launch.launches


def _shared(names: tuple[str, ...], name: str) -> Iterator[Geometry]:
    """Yield the launches of kernels that serve many shapes: those that products of small and large sides choose."""
    layouts = _LAYOUTS if copies_tensors(name) else ()
    for dtype, a, b, alignment in product(names, layouts, layouts, _ALIGNMENTS):
        plain = Problem(1, 1, 1, dtype, _OUT.get(dtype, dtype), a_layout=a, b_layout=b, device=name)
        floats = dtype in ("e4m3", "e5m2")  # which come with factors
        finished = plain._replace(scales="outer") if floats else plain._replace(epilogue="bias")
        for (m, n, k), steps in product((*product(_MANY_SIDES, repeat=3), _EIGHTHS), (plain, finished)):
            problem = steps._replace(m=m, n=n, k=k, alignments=(alignment,) * 3)
            with contextlib.suppress(RefusedError):
                rung, config, _ = choice(problem)
                assert rung.geometry is not None
                launches = rung.geometry(problem, config).launches
                if launches[-1].maps:
                    yield from launches
