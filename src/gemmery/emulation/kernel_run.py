"""`gm.emulate`, whose runs have a page: what makes it is loaded with the first page."""

# No `from __future__ import annotations` here: help() would show annotations as strings.

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

from gemmery.emulation import kernel
from gemmery.emulator.run import EmulatedRun
from gemmery.errors import ArgumentError, not_installed

if TYPE_CHECKING:
    from gemmery.emulation.prediction import Prediction

P = ParamSpec("P")


class KernelRun(EmulatedRun):
    """The result of a launch on the emulator, which a notebook displays as a page with pictures of its accesses."""

    def html(self, path: str | Path | None = None, line: str = "") -> str:
        """Return the page of this run, and write it to a file if `path` is given.

        `line`, such as "kernel.cu:6", chooses the line whose accesses are drawn; the default is the costliest.

        >>> import numpy as np, gemmery as gm
        >>> code = "__global__ void f(float* x) { x[threadIdx.x] += 1; }"
        >>> gm.emulate(code, "f", 1, 64, [np.zeros(64, np.float32)]).html().count("<h1>")
        1

        Raises ArgumentError for a line without memory accesses, InstallError without the packages of the extra `lab`.
        """
        from gemmery.emulation.run_report import run_page

        page = run_page(self, line=line)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def svg(self, line: str = "") -> str:
        """Return the first picture of a line, or of the costliest accesses, as an SVG file.

        Raises as `html` does, and ArgumentError if the run has nothing to draw.
        """
        from gemmery.emulation.run_report import drawn

        drawings = drawn(self, line)
        if not drawings:
            raise ArgumentError("this run has nothing to draw: it has no access to memory, or had check=False")
        return next(iter(drawings.values()))

    def predict(self, card: str) -> "Prediction":
        """Return the predicted time of this launch on a card, what bounds it, and the share of each line.

        >>> import numpy as np, gemmery as gm
        >>> code = "__global__ void f(float* x) { x[blockIdx.x * 256 + threadIdx.x] += 1; }"
        >>> prediction = gm.emulate(code, "f", 1024, 256, [np.zeros(1024 * 256, np.float32)]).predict("a100")
        >>> prediction.bound, prediction.seconds < 1e-5, [line for line, share in prediction.largest(1)]
        ('launch', True, ['kernel.cu:1'])

        `seconds` are those of the launch alone, `doubts` say what is not taken into account. One multiprocessor's
        blocks run again, on a copy of the arrays as they are now. Raises DeviceError for a card whose latencies are not
        known, and EmulationError for blocks that wait for others.
        """
        from gemmery.emulation.prediction import predicted_run

        return predicted_run(self, card)

    def _repr_html_(self) -> str:
        try:
            from gemmery.emulation.run_report import run_page
            from gemmery.pages.rendering import framed
        except ModuleNotFoundError:
            return super()._repr_html_()
        return framed(run_page(self), f"emulated {self.kernel}")


class KernelRuns:
    """Two runs side by side, which a notebook displays as a page."""

    def __init__(self, old: EmulatedRun, new: EmulatedRun) -> None:
        self.old, self.new = old, new

    def __repr__(self) -> str:
        """One line."""
        from gemmery.emulation.run_report import titled

        return f"<Comparison of {' and '.join(titled([self.old, self.new]))}>"

    def html(self, path: str | Path | None = None) -> str:
        """Return the page of both runs, and write it to a file if `path` is given."""
        from gemmery.emulation.run_report import run_page

        page = run_page(self.old, self.new)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _repr_html_(self) -> str:
        try:
            from gemmery.pages.rendering import framed
        except ModuleNotFoundError as error:
            raise not_installed(error, "the page of two runs") from error
        return framed(self.html(), repr(self))


def with_page(run: EmulatedRun) -> KernelRun:
    """The same run with its page."""
    return KernelRun(**{field.name: getattr(run, field.name) for field in fields(run)})


def _paged(function: Callable[P, EmulatedRun]) -> Callable[P, KernelRun]:
    """The same function, whose result has a page."""

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> KernelRun:
        return with_page(function(*args, **options))

    return run


emulate = _paged(kernel.emulate)
