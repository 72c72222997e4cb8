"""The emulator for assistants: a server of the Model Context Protocol, by its Python SDK, with five tools.

A tool takes the text of a kernel, or the path of its file, and a launch as `gemmery emulate` takes it on the command
line. It runs nothing but kernels: host code of the text is left out.
"""

# No `from __future__ import annotations` here: the SDK reads the types of the tools.

import io
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from gemmery.errors import ArgumentError, EmulationError, GemmeryError
from gemmery_emulator.kernels import written_arguments
from gemmery_emulator.kernels.kernel import emulate, only_kernel
from gemmery_emulator.kernels.kernel_run import KernelRun, compared, summary
from gemmery_emulator.kernels.prediction import Prediction
from gemmery_emulator.pages.writing import as_plain
from gemmery_emulator.run import progress

INSTRUCTIONS = (
    "Runs CUDA C++ and PTX kernels on the CPU, without a GPU: faults with their lines (races, bounds, barriers), a "
    "profiler's counters, and predicted times. Arguments are texts, one for each parameter of the kernel: "
    "f32[64,32]=random (or zeros, ones, arange, nan, a number), i32[8]=arange, n=64, 0.5, i64=3, null."
)
SHOWN = 16  # elements of an array in an answer
SECONDS = 60.0  # of processor time for a whole launch
LINES = 8  # of the source in an answer, the costliest first
COSTS = ("instructions", "sectors", "wavefronts", "bank_conflicts", "requests", "divergent_branches", "flops")


class WrittenLaunch:
    """A launch in texts, and the arrays after it."""

    def __init__(
        self, source: str, kernel: str, grid: str, block: str, args: list[str], shared: int, arch: str
    ) -> None:
        place: str | Path = source if "{" in source else Path(source)
        if isinstance(place, Path) and place.suffix not in (".cu", ".cuh", ".ptx"):
            raise ArgumentError(f"source={source!r}: pass the text of a kernel, or the path of a .cu or .ptx file")
        self.arrays = [written_arguments.argument(text, number) for number, text in enumerate(args)]
        self.of_bf16 = [text.strip().startswith(("bf16[", "bfloat16[")) for text in args]
        blocks, threads = written_arguments.sides("grid", grid), written_arguments.sides("block", block)
        printed, before = io.StringIO(), progress.set(_limited(grid))
        try:
            with redirect_stdout(printed):  # which is the protocol's
                self.run: KernelRun = emulate(
                    place, kernel or only_kernel(place), blocks, threads, self.arrays, shared=shared, arch=arch,
                    seconds=SECONDS,
                )  # fmt: skip
        finally:
            progress.reset(before)
        self.printed = printed.getvalue()

    def faults(self) -> dict[str, Any]:
        """Findings and warnings."""
        whole = summary(self.run)
        return {name: whole[name] for name in ("findings", "warnings")} | {"faultless": not self.run.findings}

    def counters(self) -> dict[str, Any]:
        """All counters added up, and those of the costliest lines."""
        whole: dict[str, Any] = as_plain(summary(self.run))
        lines = sorted(whole["lines"], key=lambda line: -line["instructions"])[:LINES]
        return {"total": whole["total"], "lines": lines, "instructions": whole["kinds"]}

    def values(self) -> dict[str, Any]:
        """The first elements of each array after the launch, and what the kernel printed."""
        arrays = {f"argument {place}": it for place, it in enumerate(self.numbers()) if isinstance(it, np.ndarray)}
        first = {name: [_number(value) for value in it.reshape(-1)[:SHOWN]] for name, it in arrays.items()}
        return {"arrays": first, "printed": self.printed}

    def numbers(self) -> list[Any]:
        """The arguments; those of bfloat16, of which NumPy has the bits, as float32."""
        pairs = zip(self.arrays, self.of_bf16, strict=True)
        return [(it.astype(np.uint32) << 16).view(np.float32) if bits else it for it, bits in pairs]


def _limited(grid: str) -> Callable[[int, int], None]:
    """Return what is told of the blocks that ran, and ends a launch that takes too long: nobody else would."""
    end = time.process_time() + SECONDS

    def look(done: int, blocks: int) -> None:
        if time.process_time() > end:
            ran = f"{done:,} of {blocks:,} blocks ran in {SECONDS:g} seconds"
            raise EmulationError(f"grid={grid!r}: {ran}: pass fewer blocks, those that show what you look for")

    return look


def _difference(x: Any, y: Any) -> float:
    """Return the largest difference of numbers that are not equal; NaN equals NaN here."""
    unequal = ~((x == y) | ((x != x) & (y != y)))
    return float(np.abs(x[unequal].astype("f8") - y[unequal].astype("f8")).max(initial=0.0))


def _number(value: Any) -> float | int | str:
    number = value.item() if hasattr(value, "item") else value
    return number if isinstance(number, int) or np.isfinite(number) else str(number)


def _predicted(prediction: Prediction) -> dict[str, Any]:
    return {
        "card": prediction.card,
        "seconds": prediction.seconds,
        "bound": prediction.bound,
        "terms": dict(prediction.terms),
        "lines": dict(prediction.largest(LINES)),
        "doubts": list(prediction.doubts),
    }


def run(
    source: str, grid: str, block: str, args: list[str], kernel: str = "", shared: int = 0, arch: str = "sm_90"
) -> dict[str, Any]:
    """Run a kernel: the arrays after it, what it printed, its faults, and its counters added up.

    `grid` and `block` are "4" or "4,2"; `kernel` may be left out if the source has one, and is "add<4>" for a template.
    """
    launch = WrittenLaunch(source, kernel, grid, block, args, shared, arch)
    total = launch.counters()["total"]
    return {"kernel": launch.run.kernel, **launch.values(), **launch.faults(), "counters": total}


def faults(
    source: str, grid: str, block: str, args: list[str], kernel: str = "", shared: int = 0, arch: str = "sm_90"
) -> dict[str, Any]:
    """Look for faults: races, accesses out of bounds, missing barriers, uninitialized reads, each with its line."""
    return WrittenLaunch(source, kernel, grid, block, args, shared, arch).faults()


def counters(
    source: str, grid: str, block: str, args: list[str], kernel: str = "", shared: int = 0, arch: str = "sm_90"
) -> dict[str, Any]:
    """Count what a profiler counts: sectors, bank conflicts, divergent branches, instructions, in all and by line."""
    return WrittenLaunch(source, kernel, grid, block, args, shared, arch).counters()


def predict(
    source: str, grid: str, block: str, args: list[str], card: str, kernel: str = "", shared: int = 0
) -> dict[str, Any]:
    """Predict the time of a launch on a card ("h200", "a100", "rtx4090"), what bounds it, and the costliest lines."""
    return _predicted(WrittenLaunch(source, kernel, grid, block, args, shared, card).run.predict(card))


def diff(
    old: str, new: str, grid: str, block: str, args: list[str], card: str = "", new_grid: str = "", new_block: str = "",
    kernel: str = "", shared: int = 0, arch: str = "sm_90",
) -> dict[str, Any]:  # fmt: skip
    """Compare two versions of a kernel on the same arguments: whether their arrays agree, and what cost moved.

    With `card` their predicted times, too. The second one may have a grid and a block of its own.
    """
    target = card or arch
    first = WrittenLaunch(old, kernel, grid, block, args, shared, target)
    second = WrittenLaunch(new, kernel, new_grid or grid, new_block or block, args, shared, target)
    pairs = list(zip(first.numbers(), second.numbers(), strict=True))
    equal = all(np.array_equal(x, y, equal_nan=True) for x, y in pairs if isinstance(x, np.ndarray))
    sizes = [0.0, *(_difference(x, y) for x, y in pairs if isinstance(x, np.ndarray))]
    section = compared(first.run, second.run)
    moved = {row[0]: {"old": row[1], "new": row[2]} for row in section.rows if row[1] != row[2]}
    answer: dict[str, Any] = {"same_results": equal, "largest_difference": _number(np.max(sizes))}
    answer |= {"moved": moved, "faults": {"old": first.faults(), "new": second.faults()}}
    if card:
        times = [launch.run.predict(card) for launch in (first, second)]
        answer["predicted"] = {"old": _predicted(times[0]), "new": _predicted(times[1])}
        answer["speedup"] = times[0].seconds / times[1].seconds
    return answer


TOOLS = (run, faults, counters, predict, diff)


def server() -> Any:
    """The server, which the SDK runs on any of its transports.

    Raises ModuleNotFoundError, with what to install, without the SDK.
    """
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ModuleNotFoundError as error:
        what = "the server needs version 2 or newer of the SDK of the Model Context Protocol"
        raise ModuleNotFoundError(f"{what}: pip install 'mcp>=2'", name=error.name) from None
    service = MCPServer("gemmery", instructions=INSTRUCTIONS)
    for tool in TOOLS:
        service.tool()(_with_errors(tool, ToolError))
    return service


def _with_errors(tool: Any, of_sdk: type[Exception]) -> Any:
    """A tool whose errors an assistant can read."""

    @wraps(tool)
    def called(*args: Any, **options: Any) -> Any:
        try:
            with redirect_stdout(io.StringIO()):  # a prediction runs the kernel again, and stdout is the protocol's
                return tool(*args, **options)
        except GemmeryError as error:
            raise of_sdk(f"{type(error).__name__}: {error}") from error

    return called
