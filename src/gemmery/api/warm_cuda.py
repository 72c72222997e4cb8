"""The kernels of a GPU that `warm` makes; the GPU need not be present."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from gemmery.cuda import device, nvrtc
from gemmery.cuda.geometry import Geometry
from gemmery.dispatch import choice
from gemmery.dispatch.candidate import Candidate
from gemmery.errors import CompileError, DeviceError
from gemmery.problem import Problem

TYPES = ("f16", "bf16", "f32", "f64")
_SIDES = (64, 256, 1024, 4096)  # of aligned products whose specialised kernels are made
_LAYOUTS = ("row", "col")


def images(
    names: tuple[str, ...], name: str, apart: bool = False
) -> Iterator[tuple[str, Callable[[], int], Callable[[], object]]]:
    """Yield the name, the size on disk and the maker of every kernel, once. Raises DeviceError for an unknown GPU.

    With `apart` each is compiled in a process of its own, because NVRTC compiles one kernel at a time in a process:
    8 kernels take 7.9 s with one thread and 8.2 s with two.
    """
    try:
        card = device.find(name)
    except DeviceError as error:
        if "known" in str(error):
            raise
        raise DeviceError(f"{error}; name a card instead, such as h200: it need not be present") from None
    nvrtc.bindings()
    make = _in_a_process if apart else nvrtc.code
    seen = set()
    for problem in _problems(names, name):
        for geometry in _launches(problem):
            wanted = geometry.source, geometry.kernel, card.arch
            if wanted not in seen:
                seen.add(wanted)
                yield geometry.kernel, partial(nvrtc.stored, *wanted), partial(make, *wanted)


_COMPILE = "import sys; from gemmery.cuda import nvrtc; nvrtc.code(*sys.argv[1:])"


def _in_a_process(source: str, kernel: str, arch: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, source, kernel, arch], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CompileError(f"kernel {kernel} of {source} did not compile for {arch}: {done.stderr[-2000:].strip()}")


def _launches(problem: Problem) -> Iterator[Geometry]:
    for rung, config, _ in _candidates(problem):
        assert rung.geometry is not None
        launch = rung.geometry(problem, config)
        yield from (*launch.before, launch)


def _candidates(problem: Problem) -> Iterator[Candidate]:
    yield choice(problem)


def _problems(names: tuple[str, ...], name: str) -> Iterator[Problem]:
    """Yield products of aligned matrices, row-major or transposed, and matrices times vectors."""
    for dtype, a, b in product(names, _LAYOUTS, _LAYOUTS):
        square = Problem(1, 1, 1, dtype, dtype, a_layout=a, b_layout=b, device=name)
        for side in _SIDES:
            yield square._replace(m=side, n=side, k=side)
        yield square._replace(m=1024, n=1, k=1024, b_layout="row")
        yield square._replace(m=1, n=1024, k=1024, a_layout="row")
